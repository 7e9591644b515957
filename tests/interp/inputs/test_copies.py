"""Copies of texts: they are recognised, and splits and intervals keep them together."""

import math

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from hooks.base import Text
from interp import (
    Circuit,
    Pairs,
    activation_patching,
    attention_attribution,
    direct_logit_attribution,
    edits,
    faithfulness,
    head_scores,
    jacobian_lens,
    log_prob,
    run_with_cache,
    sweep,
)
from interp.alignment import null_spaces
from interp.directions import Direction, steering_curve
from interp.graph import Graph
from interp.inputs.copies import digests, groups, groups_of_cache, numbered
from interp.reading.experts import expert_load
from tests import tiny
from tests.pretended import DEVICE, Devices
from tests.reference import variant
from tests.shipped import pydoc
from tests.streams import made

SHORT = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [1, 5], [3, 1, 4, 1], [3, 1, 4]]
NUMBERS = (0, 1, 2, 1, 3, 0)


def batch_of(texts, sides, width=7, filler=8):
    """Return the tokens of a batch of texts and their mask.

    Each text has its own side of padding.
    """
    tokens = torch.full((len(texts), width), filler)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (text, side) in enumerate(zip(texts, sides, strict=True)):
        columns = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        tokens[row, columns] = torch.tensor(text)
        mask[row, columns] = True
    return tokens, mask


def test_texts_on_a_device_are_read_at_once():
    texts = [Text(*batch_of(SHORT, [side] * 6)) for side in ("left", "right")]
    expected = digests(*texts)
    with Devices() as devices:
        there = [Text(*(part.to(DEVICE) for part in text)) for text in texts]
        found, stops, waits = devices.counted(lambda: digests(*there))
    assert found == expected
    assert (stops, waits) == ({}, 1)


@pytest.mark.parametrize("sides", [["left"] * 6, ["right"] * 6, ["left", "right"] * 3])
def test_texts_are_the_same_by_their_real_tokens(sides):
    tokens, mask = batch_of(SHORT, sides)
    # Which token is at padding does not matter.
    tokens[0, ~mask[0]] = 2
    assert groups(digests(Text(tokens, mask))) == NUMBERS
    wider = Text(*batch_of(SHORT, sides[::-1], width=9))
    assert digests(wider) == digests(Text(tokens, mask))
    assert groups(digests(Text(tokens, mask))[1:3]) is None
    pair = Text(tokens, mask), Text(*batch_of([*SHORT[:3], [1, 6], *SHORT[4:]], sides))
    assert numbered(digests(*pair)) == [0, 1, 2, 3, 4, 0]


def test_a_cut_cache_does_not_know_which_texts_are_copies():
    """The inputs of a cache keep the order of the run, also if the rows of the cache are
    reordered.
    """
    _, cache = run_with_cache(pydoc(), [[3, 1, 4], [3, 1, 4], [1, 5, 9]], names="embed")
    same = torch.zeros(2, 3)
    assert groups_of_cache(cache, same) == (0, 0, 1)
    assert groups_of_cache(cache.at(batch=[2, 1, 0]), same) is None


def test_other_arguments_make_other_texts():
    tokens = torch.tensor([[3, 1, 4]] * 4)
    one, other = torch.randn(2, 2, 5)
    assert groups(digests(Text(tokens))) == (0, 0, 0, 0)
    images = {"pixel_values": torch.stack([one, other, one, other])}
    assert groups(digests(Text(tokens, more=images))) == (0, 1, 0, 1)
    listed = {"images": [one, one, other, one[:1]]}
    assert groups(digests(Text(tokens, more=listed))) == (0, 0, 1, 2)
    # The numbers of a column are not beside each other in memory.
    column = torch.tensor([[5.0, 3, 5, 5], [1, 2, 3, 4]]).T[:, :1]
    assert groups(digests(Text(tokens, more={"pixel_values": column}))) == (0, 1, 0, 0)
    # It is unknown which patches belong to which text.
    assert groups(digests(Text(tokens, more={"patches": torch.zeros(9, 2)}))) is None
    shared = {"window": torch.zeros(3, 3), "scale": 2.0, "labels": None}
    assert groups(digests(Text(tokens, more={"scale": 2.0, "labels": None}))) == (0, 0, 0, 0)
    assert groups(digests(Text(tokens, more=shared))) is None
    # Of the tokens of a decoder, only the real tokens count.
    answers, mask = batch_of([[5], [5, 6], [5], [5]], ["left", "right", "right", "right"])
    more = {"decoder_input_ids": answers, "decoder_attention_mask": mask}
    assert groups(digests(Text(tokens, more=more))) == (0, 1, 0, 0)
    seen = torch.stack([one, other, other, one]).bfloat16()
    assert groups(digests(Text(seen))) == (0, 1, 1, 0)
    # Arguments with a value for each token count only at real tokens.
    tokens, mask = batch_of([[3, 1]] * 3, ["left", "right", "right"], width=4)
    types = torch.tensor([[7, 7, 0, 1], [0, 1, 7, 7], [0, 0, 7, 7]])
    assert groups(digests(Text(tokens, mask, more={"token_type_ids": types}))) == (0, 0, 1)


def pairs_of(numbers, width=5):
    """Return pairs of texts.

    Pairs with the same number are copies, and the answers are the rows.
    """
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(20, (2, max(numbers) + 1, width), generator=draw)[:, [*numbers]]
    return Pairs(table[0], table[1], torch.arange(len(numbers)))


@pytest.mark.parametrize("seed", range(4))
def test_a_split_keeps_copies_together(seed):
    numbers = [0, 1, 2, 0, 3, 1, 4, 0, 5, 6, 2, 1, 0]
    pairs = pairs_of(numbers)
    parts = pairs.split(seed, share=0.4)
    texts = [{numbers[row] for row in part.answers.tolist()} for part in parts]
    assert not texts[0] & texts[1]
    # 0.4 of 7 texts are rounded to 3 texts.
    assert len(texts[0]) == 3
    assert sorted(row for part in parts for row in part.answers.tolist()) == [*range(13)]
    assert not {*parts[0].digests()} & {*parts[1].digests()}
    # The draw is over different texts, so it is the draw of a split without copies.
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:3]
    assert texts[0] == {*order.tolist()}


def test_a_split_of_one_text_is_refused():
    with pytest.raises(ValueError, match="0 and 1 different"):
        pairs_of([0, 0, 0]).split()
    # Pairs with the same clean text and different corrupted texts are different.
    other = Pairs(torch.tensor([[1, 2]] * 2), torch.tensor([[1, 3], [1, 4]]))
    assert [len(part) for part in other.split()] == [1, 1]


# --- intervals of tables whose examples are copies


@pytest.fixture(scope="module")
def model():
    return made(n_layers=2)


def repeated(times):
    """Return five pairs, and the same pairs several times, in another order with padding on
    the left.
    """
    texts = torch.randint(23, (2, 5, 6), generator=torch.Generator().manual_seed(5))
    answers = torch.tensor([[3, 1], [0, 4], [7, 2], [20, 9], [5, 8]])
    rows = [row for row in range(5) for _ in range(times[row])]
    rows = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    columns, mask = torch.nn.functional.pad(texts[:, rows], (2, 0)), torch.ones(len(rows), 8)
    mask[:, :2] = 0
    return (
        Pairs(*texts, answers),
        Pairs(*columns, answers[rows], attention_mask=mask),
        rows,
    )


def half(model):
    return Circuit(Graph(model), Graph(model).edges[::2])


def exchanged(model, pairs):
    columns = torch.eye(model.config.d_model)[:, :2].double()
    return null_spaces(model, pairs, "blocks.0.resid_post", columns).effects


def steered(model, pairs):
    direction = Direction({"blocks.0.resid_post": torch.ones(model.config.d_model).double()})
    texts = {"input_ids": pairs.clean, **pairs.text.kwargs}
    return steering_curve(model, direction, texts, [1.0, 2.0], log_prob(3)).score


WITHOUT_MLP = {"blocks.0.mlp_out": edits.zero()}
TABLES = {
    "patching": lambda m, pairs: activation_patching(m, pairs, "resid_pre", "layer"),
    "ablation": lambda m, pairs: activation_patching(
        m, pairs, "mlp_out", "layer", edit=edits.zero()
    ),
    "sweep": lambda m, pairs: sweep(m, pairs, [WITHOUT_MLP], log_prob(3)),
    "faithfulness": lambda m, pairs: faithfulness(m, pairs, half(m)).circuit,
    "zeros": lambda m, pairs: faithfulness(m, pairs, half(m), "zero").circuit,
    "null spaces": exchanged,
    "steering": steered,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_copies_count_once_in_the_intervals_of_pairs(model, table):
    once, often, rows = repeated([3] * 5)
    expected, found = table(model, once), table(model, often)
    assert expected.groups is None
    assert [rows[found.groups.index(group)] for group in found.groups] == rows
    torch.testing.assert_close(found.mean(), expected.mean())
    for end, same in zip(found.interval(), expected.interval(), strict=True):
        torch.testing.assert_close(end, same, rtol=1e-4, atol=1e-5)
    few = table(model, repeated([6, 1, 1, 1, 1])[1])
    assert len({*few.groups}) == 5


def test_pairs_with_the_same_clean_text_are_copies_if_only_it_is_read(model):
    once, _, _ = repeated([1] * 5)
    clean = once.clean[[0, 1, 2, 0, 3, 4]]
    corrupted = once.corrupted[[0, 1, 2, 3, 4, 0]]
    pairs = Pairs(clean, corrupted, torch.tensor([[3, 1]] * 6))
    kept = half(model)
    assert faithfulness(model, pairs, kept).circuit.groups is None
    assert faithfulness(model, pairs, kept, "zero").circuit.groups == (0, 1, 2, 0, 3, 4)


def test_copies_count_once_in_tables_of_a_cache(model):
    once, often, rows = repeated([2, 2, 2, 2, 2])
    readings = {
        "scores": lambda cache: head_scores(model, cache, "previous_token"),
        "logits": lambda cache: direct_logit_attribution(model, cache, right=3, pos=-1),
        "reasons": lambda cache: attention_attribution(model, cache, (1, 0), k=2),
    }
    _, one = run_with_cache(model, once.clean, lazy=True)
    _, many = run_with_cache(
        model, often.clean, attention_mask=often.text.attention_mask, lazy=True
    )
    for reading in readings.values():
        expected, found = reading(one), reading(many)
        assert expected.groups is None
        assert [rows[found.groups.index(group)] for group in found.groups] == rows
        for end, same in zip(found.interval(), expected.interval(), strict=True):
            torch.testing.assert_close(end, same, rtol=1e-4, atol=1e-5)


def test_texts_of_a_cache_that_differ_in_more_than_tokens_are_no_copies():
    """Two texts have the same tokens and different images. A cache does not contain the images, so
    it cannot say which texts are copies.
    """
    from models import attach

    sizes = dict(hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_local_experts=3)
    model = attach(tiny.model("MixtralForCausalLM", **sizes)).model
    same = torch.tensor([[3, 1, 4]] * 3)
    _, cache = run_with_cache(model, same, names="*.routing")
    assert expert_load(model, cache).groups == (0, 0, 0)
    vectors = torch.randn(3, 3, 4)
    runner = HookedRunner(model)
    with runner.hooks({"embed": lambda value, point: vectors.to(value)}):
        _, cache = run_with_cache(model, same, names="*.routing")
    assert expert_load(model, cache, weighted=True).groups is None


def test_the_error_of_a_jacobian_lens_counts_copies_once():
    model = variant("pre", n_layers=2)
    texts = [[4, 9, 1, 16, 3], [7, 2, 20, 11, 6], [0, 13, 5, 5, 8]]
    once, twice = (jacobian_lens(model, texts * n, skip=3) for n in (1, 2))
    assert (once.n_texts, twice.n_texts) == (3, 6)
    torch.testing.assert_close(twice.weight, once.weight)
    torch.testing.assert_close(twice.error, once.error, rtol=1e-4, atol=0)
    # The effective number of texts that occur 3, 1 and 1 times is 5² / (9 + 1 + 1).
    uneven = jacobian_lens(model, [*texts, *texts[:1] * 2], skip=3)
    assert uneven.n_different == pytest.approx(25 / 11)
    others = jacobian_lens(model, [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [2, 7, 1, 8, 2]], skip=3)
    both = uneven.merged(others)
    assert both.n_different == pytest.approx(64 / (11 + 3))
    alone = jacobian_lens(model, texts[:1] * 4, skip=3)
    assert all(math.isnan(error) for error in alone.error.tolist())
    assert alone.n_different == 1
