"""Pairs of texts: checks that their parts fit, named spans, and the pairs that a model
answers rightly.
"""

import numpy as np
import pytest
import torch

from hooks import ModeError
from hooks.base import Text
from interp import Pairs, cross_entropy, log_prob, logit_diff
from interp.measuring import measure
from tests.shipped import pydoc

BATCH, POS = 4, 7


@pytest.fixture
def corrupted(tokens):
    return (tokens + 1) % 23


def padded(tokens, n, side):
    """Return the texts with `n` more columns of padding, and their mask."""
    filler, ones = torch.full((len(tokens), n), 22), torch.ones_like(tokens)
    parts, masks = [tokens, filler], [ones, 0 * filler]
    order = slice(None, None, -1 if side == "left" else 1)
    return torch.cat(parts[order], 1), torch.cat(masks[order], 1)


def test_spans_are_positions_of_each_example(tokens, corrupted):
    name, verb = [[1, 2], [3], [0, 5, 6], [4, 2]], torch.tensor([[0], [1], [2], [3]])
    pairs = Pairs(tokens, corrupted, spans={"name": name, "verb": verb})
    assert pairs.spans["name"].tolist() == [[1, 2, 2], [3, 3, 3], [0, 5, 6], [4, 2, 2]]
    assert torch.equal(pairs.other.spans["name"], pairs.spans["name"])
    assert torch.equal(pairs.spans["verb"], verb)
    last = Pairs(tokens, corrupted, spans={"name": name}, last_only=True)
    assert last.spans["name"].tolist() == [[2], [3], [6], [2]]
    # Booleans are a mask, not the columns 0 and 1. The position -1 is the last real token.
    mask = torch.zeros(BATCH, POS, dtype=torch.bool)
    mask[:, 3:5] = True
    real = torch.ones(BATCH, POS).tril(4)
    pairs = Pairs(tokens, corrupted, attention_mask=real, spans={"end": [[-1]] * BATCH})
    assert pairs.spans["end"].tolist() == [[4], [5], [6], [6]]
    assert Pairs(tokens, spans={"mask": mask}).spans["mask"].tolist() == [[3, 4]] * BATCH


def test_texts_of_different_lengths_correspond_by_spans(tokens, corrupted):
    other, mask = padded(corrupted, 2, "left")
    own = {"name": [[1, 2], [3, 4], [0, 5], [4, 2]]}
    shifted = {"name": [[p + 2 for p in row] for row in own["name"]]}
    masked = {"input_ids": other, "attention_mask": mask}
    pairs = Pairs(tokens, masked, spans=own, corrupted_spans=shifted)
    assert torch.equal(pairs.other.spans["name"], pairs.spans["name"] + 2)
    assert pairs.text.attention_mask is None
    assert torch.equal(pairs.other.attention_mask, mask.bool())
    fewer = {"name": [row[1:] for row in shifted["name"]]}
    options = {"spans": own, "corrupted_spans": fewer}
    part = pairs[2:]
    assert torch.equal(part.other.attention_mask, mask[2:].bool())
    assert part.other.spans["name"].tolist() == [[2, 7], [6, 4]]
    last = Pairs(tokens, masked, last_only=True, **options)
    assert last.other.spans["name"].tolist() == [[4], [6], [7], [4]]
    with pytest.raises(ValueError, match="'name'.*2 and 1 in example 0"):
        Pairs(tokens, masked, **options)


def test_one_mask_serves_both_texts(tokens, corrupted):
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    pairs = Pairs(tokens, corrupted, attention_mask=mask)
    assert pairs.text.attention_mask.dtype == pairs.other.attention_mask.dtype == torch.bool
    assert torch.equal(pairs.other.attention_mask, mask.bool())
    given = {"input_ids": tokens, "attention_mask": mask}
    for masked, got in ((given, "texts with a mask"), ([[3, 1]], "a list")):
        with pytest.raises(ValueError, match=f"attention_mask.*got .*{got}"):
            Pairs(masked, attention_mask=mask)
    other = torch.ones_like(mask)
    whole = {"input_ids": corrupted, "attention_mask": other}
    with pytest.raises(ValueError, match="same columns and padding"):
        Pairs(tokens, whole, attention_mask=mask)
    spans = {"a": [[1], [4], [1], [2]]}
    pairs = Pairs(tokens, whole, spans=spans, attention_mask=mask)
    assert torch.equal(pairs.other.attention_mask, other.bool())


def test_the_metric_of_the_answers(tokens, corrupted):
    logits = torch.randn(BATCH, POS, 23)
    both = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    rows = range(BATCH)
    found = Pairs(tokens, corrupted, both).metric(logits)
    assert torch.equal(found, logits[rows, -1, both[:, 0]] - logits[rows, -1, both[:, 1]])
    found = Pairs(tokens, corrupted, both[:, 1]).metric(logits)
    torch.testing.assert_close(found, logits.log_softmax(-1)[rows, -1, both[:, 1]])
    with pytest.raises(ValueError, match="answers"):
        Pairs(tokens, corrupted).metric  # noqa: B018  # reading the attribute raises the error


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([7, 3, 5], [7, 3, 5]),
        (17, [17] * 3),
        ((7, 3), [[7, 3]] * 3),
        ([(7, 3), (2, 1), (0, 9)], [[7, 3], [2, 1], [0, 9]]),
    ],
)
def test_answers_are_numbers_in_every_form(answers, expected):
    pairs = Pairs(torch.zeros(3, 5, dtype=torch.long), answers=answers)
    assert pairs.answers.tolist() == expected
    worded = Pairs([[0] * 5] * 3, answers=answers).read_by(pydoc())
    assert worded.answers.tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at_once", [2048, 10])
def test_the_pairs_that_a_model_gets_right(model, tokens, corrupted, side, at_once, monkeypatch):
    monkeypatch.setattr("interp.pairs.pairs._TOKENS_AT_ONCE", at_once)
    best = model(tokens)[:, -1].topk(2).indices
    answers = torch.where(torch.tensor([[1], [0], [1], [1]]) == 1, best, best.flip(1))
    (clean, mask), (other, _) = padded(tokens, 3, side), padded(corrupted, 3, side)
    spans = {"it": [[3], [4], [5], [6]]}
    for given in (answers, answers[:, 0]):
        pairs = Pairs(clean, other, given, attention_mask=mask, spans=spans)
        solved = pairs.solved(model)
        assert torch.equal(solved.clean, clean[[0, 2, 3]])
        assert torch.equal(solved.answers, given[[0, 2, 3]])
        assert solved.spans["it"].tolist() == [[3], [5], [6]]
        assert "3 of 4" in repr(solved)
        assert pairs.solved_of is None
        assert len(solved[1:]) == 2
        assert solved.to("cpu").solved_of == 4
        assert solved[1:].solved_of is solved.split()[0].solved_of is None

    def second(logits):
        return torch.tensor([-1.0, 1.0, 0.0, -2.0])

    assert torch.equal(pairs.solved(model, second).clean, clean[[1]])
    with pytest.raises(ValueError, match="attention_mask"):
        pairs.solved(model, cross_entropy(clean))
    with pytest.raises(ValueError, match="got 0 of 4"):
        pairs.solved(model, log_prob(3))
    with pytest.raises(ModeError):
        pairs.solved(model.train())


def test_parts_of_pairs(tokens, corrupted):
    mask = torch.ones_like(tokens)
    mask[2, -1] = 0
    spans = {"a": [[0], [1], [2], [3]]}
    pairs = Pairs(tokens, corrupted, torch.arange(4), attention_mask=mask, spans=spans)
    kept = torch.tensor([False, True, False, True])
    for index in (slice(1, None, 2), [1, 3], torch.tensor([1, 3]), kept):
        part = pairs[index]
        assert torch.equal(part.clean, tokens[[1, 3]])
        assert torch.equal(part.corrupted, corrupted[[1, 3]])
        assert part.answers.tolist() == [1, 3]
        assert part.spans["a"].tolist() == part.other.spans["a"].tolist() == [[1], [3]]
        assert torch.equal(part.text.attention_mask, mask[[1, 3]].bool())
    assert pairs[-1].answers.tolist() == [3]
    assert [one.answers.item() for one in pairs] == [0, 1, 2, 3]
    first, second = pairs.split(seed=3, share=0.75)
    assert (len(first), len(second)) == (3, 1)
    assert sorted(first.answers.tolist() + second.answers.tolist()) == [0, 1, 2, 3]
    again = [pairs.split(seed, 0.5)[0].answers.tolist() for seed in range(9)]
    assert again == [pairs.split(seed)[0].answers.tolist() for seed in range(9)]
    assert len(set(map(tuple, again))) > 1
    with pytest.raises(ValueError, match="got 0 of 4"):
        pairs[4:]
    with pytest.raises(ValueError, match="0 and 4"):
        pairs.split(share=0.1)


def test_many_pairs_print_the_first_pair():
    clean = [f"The story {n} is long: {'and then ' * 99}the end of " for n in range(1000)]
    spans = {"number": [str(n) for n in range(1000)]}
    pairs = Pairs(clean, None, [(" it", " them")] * 1000, spans=spans)
    title, first, answer = repr(pairs).splitlines()
    assert title == "Pairs: 1000, not read by a model yet, spans number"
    # The text is shortened in its middle.
    assert first.startswith("  first clean: 'The story 0 is long: and")
    assert first.endswith("the end of '")
    assert len(first) < 100
    assert answer == "  first answer: right ' it', wrong ' them'"


def test_pairs_print_words_of_tokens_and_answers_of_several_tokens():
    model = pydoc()
    text = model.to_tokens("def f(x):")
    printed = repr(Pairs(text, answers=[" return x"]).read_by(model)).splitlines()
    assert printed[1:] == ["  clean: 'def f(x):'", "  answer: right ' return x'"]
    printed = repr(Pairs(text, answers=("r", "s")).read_by(model)).splitlines()
    assert printed[2] == "  answer: right 'r', wrong 's'"
    # Without a tokenizer, the tokens are shown.
    tokens = torch.tensor([[3, 1, 4, 1]])
    printed = repr(Pairs(tokens, tokens + 1, [5])).splitlines()
    assert printed[1:] == [
        "  clean: [3, 1, 4, ... 4 in all]",
        "  corrupted: [4, 2, 5, ... 4 in all]",
        "  answer: right 5",
    ]
    many = {f"span {n}": [[1]] for n in range(99)}
    assert len(repr(Pairs(tokens, spans=many, metric=logit_diff(3, 5)))) < 200
    assert repr(Pairs(tokens, metric=logit_diff(3, 5))).endswith("metric: logit_diff(3, 5, pos=-1)")
    # Sounds have no words.
    sounds = torch.zeros(2, 8)
    assert repr(Pairs(sounds)) == "Pairs: 2, read: clean [2, 8]"


def test_clean_texts_alone(tokens):
    pairs = Pairs(tokens, spans={"a": [[1]] * 4})
    assert pairs.corrupted is pairs.other is None
    part = pairs[1:].to("cpu")
    assert torch.equal(part.clean, tokens[1:])
    assert len({*pairs.digests(), *Pairs(tokens, tokens).digests()}) == 8
    assert "corrupted" not in repr(pairs)
    for direction in ("noising", "denoising"):
        with pytest.raises(ValueError, match="corrupted"):
            pairs.texts(direction)


def test_a_metric_of_ones_own_goes_with_the_pairs(model, tokens, corrupted):
    metric = log_prob(3)
    pairs = Pairs(tokens, corrupted, torch.arange(4), metric=metric)
    assert pairs.metric is pairs[1:].metric is pairs.to("cpu").metric is metric
    other = pairs.measured_by(lambda logits: logits[:, -1, 5])
    assert other.metric(model(tokens)).shape == (4,)
    assert torch.equal(other.answers, pairs.answers)


@pytest.mark.parametrize("several", [False, True])
def test_selected_pairs_keep_the_spans_of_their_texts(several):
    model = pydoc()
    clean = ["part AB1 and AB", "part XY7 or XY", "part KV8 in KV"]
    corrupted = ["part AB2 and AB", "part XY3 or XY", "part KV6 in KV"]
    places = [[7], [3], [5]]
    answers = [(" 10", " 2")] * 3 if several else ("1", "2")
    order = [2, 0, 1]
    read = Pairs(clean, corrupted, answers, spans={"a": places}).read_by(model)
    chosen = read[order].read_by(model)
    assert chosen.spans["a"].tolist() == [places[n] for n in order]
    assert chosen.other.spans["a"].tolist() == [places[n] for n in order]
    words = {"a": [("AB1", "AB2"), ("XY7", "XY3"), ("KV8", "KV6")]}
    named = Pairs(clean, corrupted, answers, spans=words).read_by(model)
    assert named[[1]].read_by(model).spans["a"].tolist() == named.spans["a"][[1]].tolist()


def test_answers_of_several_tokens_as_lists_are_refused(tokens):
    with pytest.raises(ValueError, match=r"several tokens must be a tensor.*got \[\(\[3, 5\]"):
        Pairs(tokens[:1], answers=[([3, 5], [4])])


def test_unread_pairs_say_why_a_model_must_read_them(tokens):
    answers = [(torch.tensor([3, 5]), torch.tensor([4]))] * 2
    with pytest.raises(ValueError, match="pairs with answers of several tokens must be read"):
        Pairs(tokens[:2], answers=answers)[[0]]
    for clean, corrupted in ((["a", "b"], None), (tokens[:2], ["a", "b"])):
        with pytest.raises(ValueError, match="pairs of strings must be read"):
            Pairs(clean, corrupted, answers=answers)[[0]]


def test_a_metric_with_a_token_for_each_pair_is_selected_with_the_pairs(model, tokens, corrupted):
    right = torch.tensor([3, 0, 7, 5])
    part = Pairs(tokens, corrupted, metric=log_prob(right))[[2, 0]]
    logits = model(tokens[[2, 0]])
    expected = logits[:, -1].log_softmax(-1)[torch.arange(2), right[[2, 0]]]
    torch.testing.assert_close(part.metric(logits), expected)

    class Metric:
        """A metric with a number for each example, which can be selected."""

        def __init__(self, factors):
            self.factors = factors

        def __call__(self, logits):
            return self.factors * logits[:, -1, 3]

        def rows(self, numbers):
            return Metric(self.factors[numbers])

    part = Pairs(tokens, metric=Metric(torch.tensor([1.0, 2.0, 3.0, 5.0])))[1:3]
    torch.testing.assert_close(
        part.metric(logits), torch.tensor([2.0, 3.0]) * logits[:, -1, 3], check_dtype=False
    )


def test_pairs_move_to_a_device(tokens, corrupted):
    pairs = Pairs(
        tokens,
        corrupted,
        torch.arange(4),
        attention_mask=torch.ones_like(tokens),
        spans={"a": [[1]] * 4},
    )
    moved = pairs.to("cpu")
    assert torch.equal(moved.clean, tokens)
    assert torch.equal(moved.spans["a"], pairs.spans["a"])


TEXT = torch.ones(BATCH, POS).long()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"corrupted": torch.ones(3, POS).long()}, "4 and 3"),
        ({"clean": torch.ones(0, 2).long(), "corrupted": torch.ones(0, 2).long()}, "0 and 0"),
        ({"corrupted": torch.ones(BATCH, 5).long()}, r"\[4, 7\] and \[4, 5\]"),
        ({"corrupted": torch.ones(POS).long()}, r"corrupted.*\[7\]: pass one text"),
        ({"answers": torch.ones(BATCH, 3).long()}, r"\[4, 3\]"),
        ({"answers": torch.tensor([1, 2, -1, 3])}, "-1"),
        ({"attention_mask": torch.ones(BATCH, 6)}, r"attention_mask.*\[4, 6\]"),
        (
            {"corrupted": {"input_ids": TEXT, "attention_mask": torch.ones(BATCH, 6)}},
            r"corrupted.*\[4, 6\]",
        ),
        ({"spans": {"a": [[1]] * 3}}, "'a'.*4 examples"),
        ({"spans": {"a": [1, 2, 3, 4]}}, "'a'.*list"),
        ({"spans": {"a": [[1, 2, 3], [1], [1], [-8]]}}, "example 3|-7"),
        ({"spans": {"a": [[1], [], [2], [3]]}}, "'a'"),
        ({"spans": {"a": [[1], [7], [2], [3]]}}, "'a'.*clean.*to 6; got 7"),
        ({"spans": {"a": [[1]] * 4}, "corrupted_spans": {"b": [[1]] * 4}}, r"\['a'\] and \['b'\]"),
        ({"spans": {"a": [[1]] * 4}, "corrupted_spans": {"a": [[9]] * 4}}, "corrupted.*got 9"),
        ({"spans": {"a": [[6]] * 4}, "attention_mask": torch.ones(BATCH, POS).tril(3)}, "real"),
        (
            {
                "spans": {"a": [[1]] * 4},
                "attention_mask": torch.ones(BATCH, POS),
                "corrupted": torch.ones(BATCH, 5).long(),
            },
            r"corrupted.*\[4, 5\]; got \[4, 7\]",
        ),
    ],
)
def test_pairs_that_do_not_fit(tokens, corrupted, options, match):
    with pytest.raises(ValueError, match=match):
        Pairs(**{"clean": tokens, "corrupted": corrupted} | options)


THREE = torch.ones(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("clean", "corrupted"),
    [
        (["a", "b", "c"], ["a", "b"]),
        (["a", "b", "c"], "a"),
        (["a", "b", "c"], [5, 6, 7]),
        ([[1, 2], [3], [4]], ["a", "b"]),
        (THREE, ["a", "b"]),
        (Text(THREE), ["a", "b"]),
    ],
)
def test_unequal_numbers_of_texts_are_refused_before_a_model_reads_them(clean, corrupted):
    n_corrupted = 2 if len(corrupted) == 2 else 1
    with pytest.raises(ValueError, match=f"numbers of clean and corrupted.*3 and {n_corrupted}$"):
        Pairs(clean, corrupted, ("a", "b"))


def test_numbers_of_texts_that_are_not_known_are_compared_when_a_model_reads_them():
    columns = {"input_ids": [[3], [4]]}
    assert not Pairs(["a", "b"], columns, ("a", "b")).is_read
    pairs = Pairs(["a", "b", "c"], columns, ("a", "b"))
    with pytest.raises(ValueError, match="numbers of clean and corrupted.*3 and 2$"):
        pairs.read_by(pydoc())


def test_one_text_has_several_forms():
    """The tokens of a text may be integers of NumPy, which are no texts of their own."""
    for clean, corrupted in [("a", ["b"]), ([3, 1], [*np.array([3, 1, 4])]), (["a"], [5, 6])]:
        assert len(Pairs(clean, corrupted, ("a", "b"), spans={"end": [[-1]]})) == 1


@pytest.mark.usefixtures("unchecked")
def test_a_metric_is_a_function(tokens, corrupted):
    with pytest.raises(TypeError, match="metric must be a function"):
        Pairs(tokens, corrupted, metric="logit_diff")


def test_the_answers_of_padded_texts_are_read_at_their_ends(model, tokens, corrupted):
    clean, mask = padded(tokens, 2, "right")
    other, _ = padded(corrupted, 2, "right")
    pairs = Pairs(clean, other, torch.tensor([[1, 2]] * 4), attention_mask=mask)
    found = measure(pairs.metric, model(clean, attention_mask=mask), mask)
    alone = model(tokens)[:, -1]
    torch.testing.assert_close(found, alone[:, 1] - alone[:, 2])


def test_a_mapping_is_the_arguments_of_a_run(tokens, corrupted):
    mask, image = torch.ones_like(tokens), torch.arange(BATCH * 3.0).view(BATCH, 3)
    mask[2, 5:] = 0
    given = {"pixel_values": image, "attention_mask": mask, "input_ids": tokens}
    pairs = Pairs(given, {"input_ids": corrupted, "pixel_values": -image, "attention_mask": mask})
    assert torch.equal(pairs.clean, tokens)
    assert torch.equal(pairs.other.attention_mask, mask.bool())
    assert [*pairs.text.more] == [*pairs.other.more] == ["pixel_values"]
    edited, source = pairs[2:].texts("denoising")
    assert torch.equal(edited.more["pixel_values"], -image[2:])
    assert torch.equal(source.kwargs["attention_mask"], mask[2:].bool())
    shared = Pairs(given, corrupted)
    assert torch.equal(shared.other.more["pixel_values"], image)
    assert torch.equal(shared.other.attention_mask, mask.bool())
    seen = Pairs({"pixel_values": image[:, None], "labels": None})
    assert torch.equal(seen.text.tokens, image[:, None])
    assert seen.text.more == {"labels": None}


@pytest.mark.parametrize(("n_texts", "sections"), [(2, 3), (3, 3), (4, 4), (5, 4)])
def test_rows_of_positions_are_along_the_axis_of_the_texts(n_texts, sections):
    texts, n_pos = torch.arange(n_texts * 7).view(n_texts, 7), 7
    positions = torch.arange(sections * n_texts * n_pos).view(sections, n_texts, n_pos)
    # The length of `later` is the number of texts only by chance: it has no axis of texts.
    later = torch.arange(n_texts)
    given = {"input_ids": texts, "position_ids": positions, "cache_position": later}
    pairs = Pairs({**given, "scale": 1.0 + later, "bias": torch.ones(1, n_pos)})
    one, two = pairs[[1]].text, pairs.text.repeated(2)
    assert torch.equal(one.more["position_ids"], positions[:, 1:2])
    assert torch.equal(one.more["cache_position"], later)
    assert torch.equal(one.more["scale"], 1.0 + later[1:2])
    assert torch.equal(two.more["position_ids"], torch.cat([positions, positions], 1))
    assert two.more["bias"].shape == (1, n_pos)
    assert torch.equal(pairs.text.rows(slice(1, None)).more["position_ids"], positions[:, 1:])
    # Here the sections are the last axis: [batch, pos, section].
    own = Pairs({"input_ids": texts, "position_ids": positions.movedim(0, 2)})
    assert torch.equal(own[[1]].text.more["position_ids"], positions.movedim(0, 2)[1:2])
    shared = Pairs({"input_ids": texts, "position_ids": positions[:, :1]})
    assert torch.equal(shared[[1]].text.more["position_ids"], positions[:, :1])
    listed = [positions[:, [row]] for row in range(n_texts)]
    joined = Pairs({"input_ids": texts, "position_ids": listed})
    assert torch.equal(joined[[1, 0]].text.kwargs["position_ids"], positions[:, [1, 0]])


def test_rows_that_two_axes_may_have_are_refused_and_not_guessed():
    """With three texts of three tokens and three sections, any axis could be the axis of texts."""
    positions = torch.arange(27).view(3, 3, 3)
    pairs = Pairs({"input_ids": torch.tensor([[3, 1, 4]] * 3), "position_ids": positions})
    assert torch.equal(pairs.text.kwargs["position_ids"], positions)
    assert not pairs.text.goes_by_rows
    for ask in (lambda: pairs[1:], lambda: pairs.text.repeated(2), lambda: pairs.text.rows([0])):
        with pytest.raises(ValueError, match=r"position_ids.*\[3, 3, 3\]"):
            ask()


PADDED = (torch.tensor([[3, 1, 4, 2], [5, 2, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
LOGITS = torch.arange(2 * 4 * 7).view(2, 4, 7).double().sin()
BY_HAND = torch.tensor([LOGITS[0, 3, 2] - LOGITS[0, 3, 5], LOGITS[1, 1, 6] - LOGITS[1, 1, 1]])
"""The logit differences of the tokens (2, 5) and (6, 1), at the last real token of each text."""


def test_the_metric_of_padded_pairs_knows_their_mask():
    tokens, mask = PADDED
    pairs = Pairs(tokens, tokens + 1, torch.tensor([[2, 5], [6, 1]]), attention_mask=mask)
    for values in (measure(pairs.metric, LOGITS), pairs.metric(LOGITS)):
        torch.testing.assert_close(values, BY_HAND)
    # A given mask replaces the mask of the pairs, and logits of one position need no mask.
    torch.testing.assert_close(measure(pairs.metric, LOGITS, mask), BY_HAND)
    last = LOGITS[torch.arange(2), torch.tensor([3, 1])][:, None]
    torch.testing.assert_close(pairs.metric(last), BY_HAND)


def test_a_metric_of_two_masks_needs_the_mask_of_its_logits():
    tokens, mask = PADDED
    other = dict(input_ids=tokens, attention_mask=mask.flip(0))
    spans = {"first": [[0], [0]]}
    clean = dict(input_ids=tokens, attention_mask=mask)
    pairs = Pairs(clean, other, torch.tensor([[2, 5], [6, 1]]), spans=spans)
    with pytest.raises(ValueError, match=r"pass pairs\.text or pairs\.other"):
        measure(pairs.metric, LOGITS)
    torch.testing.assert_close(measure(pairs.metric, LOGITS, pairs.text), BY_HAND)
    expected = torch.stack([LOGITS[0, 1, 2] - LOGITS[0, 1, 5], LOGITS[1, 3, 6] - LOGITS[1, 3, 1]])
    torch.testing.assert_close(measure(pairs.metric, LOGITS, pairs.other), expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ((" a", " b", " c"), ValueError, r"must be \(right, wrong\), for all texts; got 3"),
        (([" a", " b"], [" c", " d"]), ValueError, r"pass a list of tuples.*zip\(right"),
        (((" a", " c"), (" b", " d")), ValueError, r"pass a list of tuples.*zip\(right"),
        ([" a", " b", " c"], ValueError, "one answer for each of 2 texts.*got 3 answers"),
        ([" a"], ValueError, "one answer for each of 2 texts.*got 1 answers"),
        ({" a": " b"}, TypeError, "a list; got a dict of 1"),
        ({" a", " b"}, TypeError, "a list; got a set of 2"),
    ],
)
def test_answers_are_counted_before_a_model_reads_them(answers, error, message):
    with pytest.raises(error, match=message):
        Pairs(["def f", "import"], answers=answers)


@pytest.mark.usefixtures("unchecked")
def test_an_answer_of_a_text_is_a_string_or_tokens():
    model = pydoc()
    pairs = Pairs(["def f", "import"], answers=[([" a"], " b"), (" c", " d")])
    with pytest.raises(TypeError, match=r"an answer must be a string.*got \[' a'\]"):
        pairs.read_by(model)
    tokens = Pairs(["def f", "import"], answers=[(np.int64(3), 4), (5, np.int64(6))])
    assert tokens.read_by(model).answers.tolist() == [[3, 4], [5, 6]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "texts", [["def f", "import"], [[3, 1], [4]], {"input_ids": [[3, 1], [4]]}, Text(THREE[:2])]
)
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (torch.tensor([1, 2, 3]), r"right tokens \[2\].*got \[3\]"),
        (torch.tensor([[1, 2, 3]] * 2), r"\[2, 2\]; got \[2, 3\]"),
        (torch.tensor(7), r"got \[\]"),
        (torch.tensor([3, -4]), "at least 0; got -4"),
    ],
)
def test_tokens_of_answers_are_checked_before_a_model_reads_the_texts(texts, answers, message):
    with pytest.raises(ValueError, match=message):
        Pairs(texts, answers=answers)


@pytest.mark.parametrize("answers", [torch.tensor([8, 9]), torch.tensor([[8, 2], [9, 3]])])
@pytest.mark.parametrize("texts", [["def f", "import"], {"input_ids": [[3, 1], [4]]}])
def test_tokens_of_answers_stay_the_same_when_a_model_reads_the_texts(texts, answers):
    assert torch.equal(Pairs(texts, answers=answers).read_by(pydoc()).answers, answers)
