"""`Text`, the value for texts: its padding, rows and words, and checks that its parts fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hooks.base import Text, as_text, each_text, sides_of_padding
from tests.pretended import DEVICE, Devices

ROWS = [[3, 1, 4, 1], [5], [9, 2]]
STRINGS = ("one", "two", "three")
SPANS = {"user": [[0, 2], [0], [1]], "first": torch.tensor([[0], [0], [0]])}


@pytest.fixture(params=["left", "right"])
def text(request):
    rows = [torch.tensor(row) for row in ROWS]
    one = Text.padded(rows, 7, side=request.param, texts=STRINGS)
    kinds = torch.arange(12).view(3, 4)
    return Text(*one, STRINGS, SPANS, {"token_type_ids": kinds, "scale": 2.0})


def test_padding_is_not_a_token(text):
    assert text.listed() == [*each_text(text)] == ROWS
    assert text.real.sum(1).tolist() == [4, 1, 2]
    assert text.tokens[~text.real].tolist() == [7] * 5
    assert text.is_aligned_with(Text(*text))
    assert not text.is_aligned_with(Text(text.tokens))
    whole = Text(text.tokens)
    assert whole.is_aligned_with(Text(text.tokens + 1))
    assert not whole.is_aligned_with(Text(text.tokens[:, 1:]))
    assert text.has_padding
    assert not Text(text.tokens, torch.ones_like(text.tokens)).has_padding
    assert not whole.has_padding


def test_columns_and_positions_count_real_tokens():
    real = [[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]]
    text = Text(torch.zeros(3, 5), torch.tensor(real))
    columns = []
    positions = []
    for row in real:
        columns.append([])
        positions.append([])
        for column, is_real in enumerate(row):
            columns[-1] += [column] * is_real
            positions[-1].append(max(sum(row[: column + 1]) - 1, 0))
    assert text.columns == columns == [[1, 2, 4], [0, 1, 2, 3, 4], [3]]
    assert text.positions.tolist() == positions
    assert sides_of_padding(text.real) == (True, True)
    assert sides_of_padding(text.real[1:2]) == (False, False)
    assert sides_of_padding(text.real[:, 2:].flip(1)) == (True, True)
    assert sides_of_padding(text.real[2:, :4]) == (True, False)


def test_a_mask_on_a_device_selects_rows():
    """The texts also have strings, and a tensor that is on the CPU."""
    with Devices():
        tokens = torch.tensor([[3, 1], [5, 9], [2, 6]]).to(DEVICE)
        kinds = torch.tensor([[0, 1], [1, 1], [0, 0]])
        text = Text(tokens, None, STRINGS, more={"token_type_ids": kinds})
        part = text.rows(torch.tensor([True, False, True]).to(DEVICE))
        assert part.tokens.tolist() == [[3, 1], [2, 6]]
        assert part.texts == ("one", "three")
        assert part.more["token_type_ids"].tolist() == [[0, 1], [0, 0]]


def test_all_parts_go_with_the_rows(text):
    part = text.rows(torch.tensor([2, 0]))
    assert part.listed() == [[9, 2], [3, 1, 4, 1]]
    assert part.texts == ("three", "one")
    assert part.spans["user"] == [[1], [0, 2]]
    assert part.spans["first"].shape == (2, 1)
    assert part.more["token_type_ids"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert part.more["scale"] == 2.0
    twice = text.repeated(2)
    assert twice.listed() == ROWS * 2
    assert twice.texts == STRINGS * 2
    assert twice.spans["user"] == SPANS["user"] * 2


def test_equal_lengths_have_no_mask():
    text = Text.padded([torch.tensor([3, 1]), torch.tensor([4, 1])], side="left")
    tokens, mask = text
    assert tokens.tolist() == [[3, 1], [4, 1]]
    assert mask is None
    assert "attention_mask" not in text.kwargs


def test_a_mask_of_another_shape_is_an_error():
    text = Text(torch.tensor([[3, 1, 4]]), torch.ones(1, 2))
    for read in (text.listed, lambda: text.real):
        with pytest.raises(ValueError, match=r"attention_mask must be .*\[1, 3\]; got \[1, 2\]"):
            read()


def test_words_of_columns_leave_padding_out():
    model = nn.Identity()
    language = SimpleNamespace(tokenizer=True, to_pieces=lambda ids: [f"w{n}" for n in ids])
    vars(model)["language_parts"] = language
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
    tokens = torch.tensor([[3, 1, 4, 1], [7, 7, 5, 1], [7, 1, 9, 1]])
    assert Text(tokens, mask).words(model) == ["w3", "w1", "", "w1"]
    assert Text(tokens[:1]).words(model, Text(tokens[1:2], mask[1:2]))[2] == "w4|w5"
    assert Text(tokens).words(nn.Identity()) is None


def test_a_mapping_is_a_text_with_its_other_arguments():
    ids, mask = torch.tensor([[3, 1]]), torch.tensor([[1, 1]])
    text = as_text({"attention_mask": mask, "input_ids": ids, "labels": None})
    assert text.tokens is ids
    assert text.attention_mask is mask
    assert text.more == {"labels": None}
    assert as_text("a string") == "a string"
