"""Tests of pairs whose answers have several tokens.

Each analysis must equal a loop, written here, that runs the rows one by one, without padding,
in float64.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hooks import HookedRunner, HookError, SelectionError
from interp import (
    Pairs,
    accuracy,
    acdc,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edge_patching,
    edits,
    faithfulness,
    integrated_gradients,
    log_prob,
    logit_diff,
    measure,
    node_effects,
    path_patching,
    sweep,
    top_attributions,
)
from interp.alignment import align, neurons
from interp.alignment.runs import InterchangeRuns
from interp.directions import Direction, steering_curve
from interp.graph import Graph, circuits
from interp.runs.masked import run_circuit
from interp.runs.runs import Runs
from models import attach, load
from tests import tiny
from tests.counting import Starts
from tests.interp.effects.by_hand import changed, close
from tests.reference import LAYERS, variant

# Other cases run with --full.
pytestmark = pytest.mark.sampled(2)

# The prompts have 5, 3 and 4 tokens. A corrupted prompt differs from its clean prompt in one or two
# tokens and has the same length. The answers have 1 to 4 tokens.
CLEAN = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
CORRUPTED = [[3, 7, 4, 2, 5], [9, 0, 6], [5, 3, 11, 8]]
RIGHT = [[7, 9, 3], [2], [10, 4, 6, 8]]
WRONG = [[12], [2, 13, 1], [10, 4]]
EQUAL = [0, 0, 0]
SIDES = ("left", "right")


def text(prompts, side):
    """Return prompts as tokens, padded on `side`, with their mask."""
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), 22)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        columns = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[row, columns] = torch.tensor(prompt)
        mask[row, columns] = True
    return {"input_ids": tokens, "attention_mask": mask}


def answers(two=True):
    """Return tensors of tokens: (right, wrong) for each row, or only right without `two`."""
    right, wrong = ([torch.tensor(tokens) for tokens in kind] for kind in (RIGHT, WRONG))
    return [*zip(right, wrong, strict=True)] if two else right


def pairs_of(side, two=True, **options):
    return Pairs(text(CLEAN, side), text(CORRUPTED, side), answers(two), **options)


def score(model, prompt, answer, changes=(), per_token=False):
    """Return the log-probability of one answer after one prompt, from a run without padding.

    `changes` gives functions of outputs by the names of modules. With `per_token`, the result is
    divided by the number of tokens of the answer.
    """
    with changed(model, dict(changes)), torch.no_grad():
        logits = model(torch.tensor([prompt + answer]))[0]
    terms = []
    for number, token in enumerate(answer):
        terms.append(logits[len(prompt) + number - 1].log_softmax(0)[token])
    total = sum(terms)
    return total / len(answer) if per_token else total


def by_hand(model, prompts, two=True, per_token=False, changes=lambda row, answer: {}):
    """Return the metric [row]: the score of the right answer minus that of the wrong answer.

    Without `two`, it is the score of the right answer. `changes` returns the changes of the run
    with one row and one answer.
    """
    numbers = []
    for row, prompt in enumerate(prompts):
        number = score(model, prompt, RIGHT[row], changes(row, RIGHT[row]), per_token)
        if two:
            wrong = score(model, prompt, WRONG[row], changes(row, WRONG[row]), per_token)
            number = number - wrong
        numbers.append(number)
    return torch.stack(numbers)


def value_of(model, name, prompt, answer):
    """Return the output of a module in the run of one prompt and its answer."""
    values = []
    with changed(model, {name: lambda output: values.append(output.detach())}), torch.no_grad():
        model(torch.tensor([prompt + answer]))
    return values[0]


def patched(model, name, column_of_row):
    """Return a function of (row, answer) that returns the changes of a run.

    They put the clean value of one position into the output of a module. `column_of_row` returns
    the position for a row; if it returns None, nothing changes.
    """

    def changes(row, answer):
        column = column_of_row(row)
        if column is None:
            return {}
        source = value_of(model, name, CLEAN[row], answer)

        def change(output):
            new = output.clone()
            new[:, column] = source[:, column]
            return new

        return {name: change}

    return changes


def column(side, pos):
    """Return a function of a row that returns the index in its prompt of one column of `text`.

    It returns None if the column is padding in this row.
    """
    width = max(map(len, CLEAN))

    def of_row(row):
        n = len(CLEAN[row])
        index = pos - (width - n) if side == "left" else pos
        return index if 0 <= index < n else None

    return of_row


@pytest.fixture
def model():
    return variant("pre")


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("side", SIDES)
def test_a_patch_of_each_position_equals_the_loop_by_hand(model, side, two, per_token):
    pairs = pairs_of(side, two, per_token=per_token)
    result = activation_patching(model, pairs, "resid_pre", layers=[0, 1])
    base = by_hand(model, CORRUPTED, two, per_token)
    close(result.base, base)
    close(result.target, by_hand(model, CLEAN, two, per_token))
    assert result.labels["pos"] == (0, 1, 2, 3, 4)
    assert result.unit == ("nats per token" if per_token else "nats")
    expected = torch.zeros_like(result.values)
    for layer in (0, 1):
        for pos in range(5):
            changes = patched(model, f"blocks.{layer}.resid_pre", column(side, pos))
            expected[layer, pos] = by_hand(model, CORRUPTED, two, per_token, changes) - base
    close(result.values, expected)


@pytest.mark.parametrize("side", SIDES)
def test_a_patch_of_a_head_acts_on_positions_of_answers_too(model, side):
    result = activation_patching(model, pairs_of(side), "z", heads=[1])
    base = by_hand(model, CORRUPTED)
    for layer in range(LAYERS):
        name = f"blocks.{layer}.attn.z"

        def changes(row, answer, name=name):
            source = value_of(model, name, CLEAN[row], answer)

            def change(output):
                new = output.clone()
                new[:, :, 1] = source[:, :, 1]
                return new

            return {name: change}

        close(result.values[layer, 0], by_hand(model, CORRUPTED, changes=changes) - base)


def gradient(model, name, prompt, answer):
    """Return the output of a module, and the gradient of one answer's score with respect to it."""
    nodes = []

    def watch(output):
        nodes.append(output.detach().requires_grad_())
        return nodes[0]

    with changed(model, {name: watch}):
        logits = model(torch.tensor([prompt + answer]))[0]
    start = len(prompt) - 1
    log_probs = logits[start : start + len(answer)].log_softmax(1)
    log_probs.gather(1, torch.tensor(answer)[:, None]).sum().backward()
    return nodes[0].detach(), nodes[0].grad


def attribution_by_hand(model, name, side):
    """Return the estimates [pos, row] of attribution patching: (target - base) times gradient."""
    effects = torch.zeros(5, len(CLEAN), dtype=torch.float64)
    for row, prompt in enumerate(CORRUPTED):
        for answer, sign in ((RIGHT[row], 1), (WRONG[row], -1)):
            base, grad = gradient(model, name, prompt, answer)
            target = value_of(model, name, CLEAN[row], answer)
            at_columns = ((target - base) * grad)[0].sum(1)
            for pos in range(5):
                place = column(side, pos)(row)
                if place is not None:
                    effects[pos, row] += sign * at_columns[place]
    return effects


@pytest.mark.parametrize("side", SIDES)
def test_attribution_equals_gradients_of_each_row(model, side):
    result = attribution_patching(model, pairs_of(side), "resid_mid", layers=1)
    expected = attribution_by_hand(model, "blocks.1.resid_mid", side)
    close(result.values[0], expected)
    # A result without an axis of positions adds up all positions, also those of the answers.
    whole = attribution_patching(model, pairs_of(side), "mlp_out", ["layer"], layers=1)
    total = torch.zeros(len(CLEAN), dtype=torch.float64)
    for row, prompt in enumerate(CORRUPTED):
        for answer, sign in ((RIGHT[row], 1), (WRONG[row], -1)):
            base, grad = gradient(model, "blocks.1.mlp_out", prompt, answer)
            target = value_of(model, "blocks.1.mlp_out", CLEAN[row], answer)
            total[row] += sign * ((target - base) * grad).sum()
    close(whole.values[0], total)


@pytest.mark.parametrize("side", SIDES)
def test_top_attributions_are_at_positions_of_prompts(model, side):
    name = "blocks.1.mlp_out"
    unit = torch.zeros(10, 1, dtype=torch.float64)
    unit[4] = 1
    found = top_attributions(model, pairs_of(side), {name: unit}, k=100)
    expected = torch.zeros(5, len(CLEAN), dtype=torch.float64)
    for row, prompt in enumerate(CORRUPTED):
        for answer, sign in ((RIGHT[row], 1), (WRONG[row], -1)):
            base, grad = gradient(model, name, prompt, answer)
            target = value_of(model, name, CLEAN[row], answer)
            for pos in range(5):
                place = column(side, pos)(row)
                if place is not None:
                    effect = ((target - base) * grad)[0, place, 4]
                    expected[pos, row] += sign * effect
    close(found.base, by_hand(model, CORRUPTED))
    by_place = dict(zip(found.labels["place"], found.values, strict=True))
    for pos in range(5):
        close(by_place.pop(f"{name}, pos {pos}, direction 0"), expected[pos])
    # The other places are columns of answers.
    assert not any(values.any() for values in by_place.values())


def without_values(model, name, columns_of_row):
    """Return estimates [row] of setting a module's output to zero at some columns of each row."""
    effects = torch.zeros(len(CLEAN), dtype=torch.float64)
    for row, prompt in enumerate(CLEAN):
        for answer, sign in ((RIGHT[row], 1), (WRONG[row], -1)):
            value, grad = gradient(model, name, prompt, answer)
            at_columns = -(value * grad)[0].flatten(1).sum(1)
            effects[row] += sign * at_columns[columns_of_row(row)].sum()
    return effects


@pytest.mark.parametrize("side", SIDES)
def test_estimates_of_an_edit_equal_gradients_of_each_row(model, side):
    clean = Pairs(text(CLEAN, side), answers=answers())
    name, given = "blocks.1.mlp_out", dict(site="mlp_out", layers=1)
    found = attribution_patching(model, clean, edit=edits.zero(), **given)
    close(found.base, by_hand(model, CLEAN))
    for pos in range(5):
        places = [column(side, pos)(row) for row in range(3)]
        columns = [[] if place is None else [place] for place in places]
        close(found.values[0, pos], without_values(model, name, columns.__getitem__))
    # Without an axis of positions, an edit also acts on the tokens of the answer.
    found = attribution_patching(model, clean, over="layer", edit=edits.zero(), **given)
    close(found.values[0], without_values(model, name, lambda row: slice(None)))
    # Positions of an edit are positions of the prompt.
    found = attribution_patching(model, clean, over="layer", edit=edits.zero(pos=-2), **given)
    close(found.values[0], without_values(model, name, lambda row: [len(CLEAN[row]) - 2]))
    spans = {"two": [[0, 2], [1, 2], [3, 0]]}
    if side == "left":
        spans = {"two": [[0, 2], [3, 4], [4, 1]]}
    spanned = Pairs(text(CLEAN, side), answers=answers(), spans=spans)
    found = attribution_patching(model, spanned, edit=edits.zero(), **given)
    columns = [[0, 2], [1, 2], [3, 0]]
    close(found.select(span="two").values[0], without_values(model, name, columns.__getitem__))


def test_a_path_to_an_edit_moves_the_positions_of_prompts(model):
    clean = Pairs(text(CLEAN, "left"), answers=answers())
    found = integrated_gradients(model, clean, "mlp_out", layers=0, edit=edits.zero(), steps=64)

    def zeroed(row, answer):
        def change(output):
            new = output.clone()
            new[:, : len(CLEAN[row])] = 0
            return new

        return {"blocks.0.mlp_out": change}

    exact = by_hand(model, CLEAN, changes=zeroed) - by_hand(model, CLEAN)
    close(found.values[0].sum(0), exact, 1e-3)


def test_integrated_gradients_add_up_to_the_change_of_all_positions(model):
    pairs = pairs_of("left")
    result = integrated_gradients(model, pairs, "resid_pre", ["layer"], layers=0, steps=64)
    exact = by_hand(model, CLEAN) - by_hand(model, CORRUPTED)
    close(result.values[0], exact, 1e-3)


@pytest.mark.parametrize("side", SIDES)
def test_sweeps_count_negative_positions_in_prompts(model, side):
    hooks = [
        {"blocks.1.attn_out": edits.zero(pos=-2)},
        {"blocks.0.mlp_out": edits.scale(0.25)},
        {"blocks.0.resid_mid": edits.add(torch.arange(10.0).double(), pos=-1)},
    ]
    result = sweep(model, pairs_of(side), hooks)
    base = by_hand(model, CLEAN)
    close(result.base, base)

    def zeroed(row, answer):
        def change(output):
            new = output.clone()
            new[:, len(CLEAN[row]) - 2] = 0
            return new

        return {"blocks.1.attn_out": change}

    def added(row, answer):
        def change(output):
            new = output.clone()
            new[:, len(CLEAN[row]) - 1] += torch.arange(10.0).double()
            return new

        return {"blocks.0.resid_mid": change}

    def scaled(row, answer):
        return {"blocks.0.mlp_out": lambda output: output * 0.25}

    for number, changes in enumerate((zeroed, scaled, added)):
        close(result.values[number], by_hand(model, CLEAN, changes=changes) - base)


@pytest.mark.parametrize("pos", [1, [0, 2], slice(0, 2), -1, slice(-2, None)])
def test_values_of_a_cache_are_put_into_prompts(model, pos):
    """The cached texts end where the prompts end, and rows continue with an answer."""
    given = text(CORRUPTED, "right")
    tokens, mask = given["input_ids"], given["attention_mask"]
    name = "blocks.0.mlp_out"
    _, cache = HookedRunner(model).run_with_cache(tokens, attention_mask=mask, names=name)
    result = sweep(model, pairs_of("right"), [{name: edits.replace(cache, pos=pos)}])

    def put(row, answer):
        columns = torch.arange(len(CLEAN[row]))[pos]

        def change(output):
            new = output.clone()
            new[:, columns] = cache[name][row, columns]
            return new

        return {name: change}

    close(result.values[0], by_hand(model, CLEAN, changes=put) - by_hand(model, CLEAN))


def test_spans_may_be_elsewhere_in_the_corrupted_texts(model):
    clean, corrupted = [[1], [0], [2]], [[3], [1], [0]]
    options = dict(spans={"word": clean}, corrupted_spans={"word": corrupted})
    name = "blocks.0.mlp_out"
    result = activation_patching(
        model, pairs_of("right", **options), "mlp_out", ["layer", "span"], layers=0
    )

    def put(row, answer):
        source = value_of(model, name, CLEAN[row], answer)

        def change(output):
            new = output.clone()
            new[:, corrupted[row]] = source[:, clean[row]]
            return new

        return {name: change}

    effect = by_hand(model, CORRUPTED, changes=put) - by_hand(model, CORRUPTED)
    close(result.values[0, 0], effect)


def scaled_at(columns_of_row):
    """Return the changes of a run that multiply a module's output by 3 at columns of the prompt."""

    def changes(row, answer):
        columns = columns_of_row(row)

        def change(output):
            new = output.clone()
            new[:, columns] *= 3
            return new

        return {"blocks.1.mlp_out": change}

    return changes


@pytest.mark.parametrize(
    ("pos", "chosen"),
    [
        (slice(2, None), {2, 3, 4}),
        (slice(2, 99), {2, 3, 4}),
        (slice(None), {0, 1, 2, 3, 4}),
        (slice(1, 4), {1, 2, 3}),
        (2, {2}),
        ([[1, 4], [2], [2, 3]], [{1, 4}, {2}, {2, 3}]),
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_sweeps_leave_out_answers_after_positions_from_zero(model, side, pos, chosen):
    result = sweep(model, pairs_of(side), [{"blocks.1.mlp_out": edits.scale(3.0, pos=pos)}])

    def columns_of_row(row):
        wanted = chosen if isinstance(chosen, set) else chosen[row]
        places = [column(side, pos)(row) for pos in sorted(wanted)]
        return [place for place in places if place is not None]

    expected = by_hand(model, CLEAN, changes=scaled_at(columns_of_row))
    close(result.values[0], expected - by_hand(model, CLEAN))


def test_all_but_some_positions_are_positions_of_prompts(model):
    hooks = {"blocks.1.mlp_out": edits.scale(3.0, pos=edits.all_but(0, 2))}
    result = sweep(model, pairs_of("right"), [hooks])

    def columns_of_row(row):
        return [place for place in range(len(CLEAN[row])) if place not in (0, 2)]

    expected = by_hand(model, CLEAN, changes=scaled_at(columns_of_row))
    close(result.values[0], expected - by_hand(model, CLEAN))


@pytest.mark.parametrize("axis", ["head", "pos"])
def test_an_edit_of_some_texts_acts_on_both_answers(model, axis):
    place = {"head": 2} if axis == "head" else {"pos": [[0], [1], [2]]}
    name = "blocks.1.attn.z"
    result = sweep(model, pairs_of("right"), [{name: edits.scale(3.0, batch=[0, 2], **place)}])

    def changes(row, answer):
        def change(output):
            new = output.clone()
            if axis == "head":
                new[:, :, 2] *= 3
            else:
                new[:, row] *= 3
            return new

        return {name: change} if row != 1 else {}

    close(result.values[0], by_hand(model, CLEAN, changes=changes) - by_hand(model, CLEAN))


@pytest.mark.parametrize("site", ["span", "pos", "all"])
def test_noise_is_the_same_for_both_answers(model, site):
    """Noise at the tokens of an answer differs between answers of other lengths."""
    edit = edits.noise(1.0, seed=3)
    spans = {"end": [[3, 4], [1, 2], [2]]}
    if site == "all":
        edit = edit.at(pos=slice(1, 3))

    def effects(pairs):
        if site == "all":
            return sweep(model, pairs, [{"blocks.1.resid_mid": edit}]).values
        over = ["layer", site]
        return activation_patching(model, pairs, "resid_mid", over, edit=edit, layers=1).values

    right, wrong = (
        Pairs(text(CLEAN, "right"), answers=[torch.tensor(answer) for answer in kind], spans=spans)
        for kind in (RIGHT, WRONG)
    )
    both = Pairs(text(CLEAN, "right"), answers=answers(), spans=spans)
    close(effects(both), effects(right) - effects(wrong))


ACTIVE = {
    "last token": {"blocks.0.mlp_out": edits.zero(pos=-1)},
    "query": {"blocks.1.attn.scores": edits.knockout(query=-1, key=0)},
    "one text": {"blocks.0.mlp_out": edits.zero(batch=1)},
    "noise": {"blocks.0.mlp_out": edits.noise(0.3)},
}


@pytest.mark.parametrize("receipts", [True, False])
@pytest.mark.parametrize("name", ACTIVE)
def test_active_edits_of_some_positions_are_refused(model, name, receipts):
    """Their positions and rows would include the answers, which are rows of these runs."""
    pairs = pairs_of("right")
    calls = (
        lambda: sweep(model, pairs, [{"blocks.1.mlp_out": edits.zero()}]),
        lambda: activation_patching(model, pairs, "mlp_out", ["layer"]),
    )
    with HookedRunner(model).hooks(ACTIVE[name], receipts=receipts):
        for call in calls:
            with pytest.raises(
                HookError, match="active edit .* at blocks.*: pass the edit to sweep"
            ):
                call()
    # The hooks of another model do not matter.
    handle = HookedRunner(variant("post")).add(ACTIVE[name])
    calls[0]()
    handle.remove()


def test_active_edits_of_all_positions_act_on_answers_too(model):
    def scaled(row, answer):
        return {"blocks.0.mlp_out": lambda output: output * 0.25}

    with HookedRunner(model).hooks({"blocks.0.mlp_out": edits.scale(0.25)}):
        result = sweep(model, pairs_of("left"), [{"blocks.1.mlp_out": edits.zero()}])
    close(result.base, by_hand(model, CLEAN, changes=scaled))


@pytest.mark.parametrize("pos", [5, [0, 6], slice(5, None), edits.all_but(7)])
def test_positions_of_answers_are_refused(model, pos):
    with pytest.raises(SelectionError):
        sweep(model, pairs_of("right"), [{"blocks.1.mlp_out": edits.zero(pos=pos)}])


@pytest.mark.parametrize("two", [True, False])
def test_measure_adds_up_the_answers_of_a_text(model, two):
    pairs = pairs_of("left", two).read_by(model)
    rows = pairs.rows().text
    logits = model(rows.tokens, attention_mask=rows.attention_mask).detach()
    close(measure(pairs.metric, logits), by_hand(model, CLEAN, two))
    close(measure(pairs.metric, logits, rows), by_hand(model, CLEAN, two))


def separate(row, answer):
    """Return the pair of one row and one answer, without padding.

    The answer, except for its last token, is part of the text. The metric adds up the
    log-probabilities of the answer's tokens.
    """
    start = len(CLEAN[row]) - 1

    def metric(logits):
        log_probs = logits[:, start : start + len(answer)].log_softmax(2)
        return log_probs.gather(2, torch.tensor(answer)[None, :, None]).sum((1, 2))

    clean, corrupted = (
        torch.tensor([prompts[row] + answer[:-1]]) for prompts in (CLEAN, CORRUPTED)
    )
    return Pairs(clean, corrupted, metric=metric)


def summed(analysis):
    """Return values [..., row] of an analysis of separate rows: right answer minus wrong answer."""
    values = []
    for row in range(len(CLEAN)):
        right, wrong = (analysis(separate(row, kind[row])).values for kind in (RIGHT, WRONG))
        values.append(right - wrong)
    return torch.cat(values, -1)


# With few steps, integrated gradients warn that they do not add up to the change of the metric.
# This does not matter here, because both sides of the comparison take the same steps.
@pytest.mark.filterwarnings("ignore:.*should add up to within:UserWarning")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "analysis",
    [
        lambda model, pairs: edge_attribution(model, pairs),
        lambda model, pairs: edge_attribution(model, pairs, "eap_ig_inputs", steps=3),
        lambda model, pairs: edge_patching(model, pairs, ["m0->m1", "m0->a1.h3<q>"]),
        lambda model, pairs: path_patching(model, pairs, receivers=["a1.h3<q>", "m1"]),
        lambda model, pairs: node_effects(model, pairs),
        lambda model, pairs: attribution_patching(model, pairs, "q", qk_correction=True),
        lambda model, pairs: attribution_patching(model, pairs, "z", grad_drop=False),
        lambda model, pairs: integrated_gradients(model, pairs, "z", steps=3),
        lambda model, pairs: activation_patching(model, pairs, "pattern", ["layer", "head"]),
    ],
    ids=["eap", "eap-ig", "edges", "paths", "nodes", "atp-qk", "atp", "ig", "pattern"],
)
def test_each_analysis_equals_the_sum_of_separate_rows(model, side, analysis):
    result = analysis(model, pairs_of(side))
    close(result.values, summed(lambda pairs: analysis(model, pairs)), 1e-9)


@pytest.mark.parametrize("side", SIDES)
def test_circuits_are_measured_on_all_rows_of_a_pair(model, side):
    pairs = pairs_of(side)
    graph = Graph(model)
    circuit = circuits.top(graph, edge_attribution(model, pairs), 20)
    fresh = pairs.read_by(model)
    with pytest.warns(UserWarning, match="found on 3 of these 3 pairs"):
        result = faithfulness(model, fresh, circuit)

    def kept(row, answer):
        one = separate(row, answer)
        return one.metric(run_circuit(model, one, circuit))

    inside = torch.cat([kept(row, RIGHT[row]) - kept(row, WRONG[row]) for row in range(3)])
    whole, empty = by_hand(model, CLEAN), by_hand(model, CORRUPTED)
    close(result.circuit.mean()[0], (inside - empty).mean() / (whole - empty).mean())
    assert result.random.values.shape == (20, 3)


@pytest.mark.parametrize("side", SIDES)
def test_acdc_compares_predictions_of_the_positions_of_answers(model, side):
    kept = acdc(model, pairs_of(side), 0.3)[0.3]
    # Compute by hand the KL divergence of the circuit from the model, as a mean over the positions
    # of each answer and then over all answers.
    divergences = []
    for row in range(3):
        for answer in (RIGHT[row], WRONG[row]):
            one = separate(row, answer)
            start = len(CLEAN[row]) - 1
            logits = run_circuit(model, one, kept)[0, start:]
            reference = model(one.clean)[0, start:]
            terms = reference.softmax(1) * (reference.log_softmax(1) - logits.log_softmax(1))
            divergences.append(terms.sum(1).mean())
    scores = kept.scores
    assert scores is not None
    total = -scores[~scores.isnan() & ~kept.kept].sum()
    close(torch.stack(divergences).mean().detach(), total)


def test_pairs_solved_by_the_model_have_the_likelier_right_answer(model):
    pairs = pairs_of("right")
    solved = pairs.solved(model)
    expected = by_hand(model, CLEAN) > 0
    assert 0 < expected.sum() < 3
    assert len(solved) == int(expected.sum())
    assert solved.clean.tolist() == pairs.clean[expected].tolist()


@pytest.mark.parametrize("qk_correction", [False, True])
def test_grad_drop_does_not_depend_on_the_answers_of_other_texts(model, qk_correction):
    """The metric of the second text is right - wrong, also if the first text has long answers."""
    options = dict(site="q", grad_drop=True, qk_correction=qk_correction)
    one_token = [(torch.tensor([7]), torch.tensor([9])), (torch.tensor([2]), torch.tensor([11]))]
    several = [(torch.tensor([7, 3]), torch.tensor([9])), one_token[1]]
    alone, mixed = (
        attribution_patching(
            model, Pairs(text(CLEAN[:2], "left"), text(CORRUPTED[:2], "left"), given), **options
        )
        for given in (one_token, several)
    )
    close(mixed.values[..., 1], alone.values[..., 1])
    assert mixed.values.shape == alone.values.shape


def greedy(model, prompt, n):
    """Return the likeliest next tokens after a prompt, chosen one after another."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_right_answers_alone_are_solved_by_greedy_decoding(model):
    right = [greedy(model, CLEAN[0], 3), greedy(model, CLEAN[1], 2), [4, 4, 4, 4]]
    right[1][1] = (right[1][1] + 1) % 23
    pairs = Pairs(text(CLEAN, "left"), answers=[torch.tensor(answer) for answer in right])
    assert pairs.solved(model).clean.tolist() == pairs.clean[:1].tolist()


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("side", SIDES)
def test_an_alignment_scores_whole_answers(model, side, two):
    pairs = pairs_of(side, two)
    name = "blocks.1.resid_pre"

    def last_column(row):
        return len(CLEAN[row]) - 1

    changes = patched(model, name, last_column)
    expected = by_hand(model, CORRUPTED, two, changes=changes)
    site = InterchangeRuns(Runs(model, pairs, "denoising"), name, -1, head=None, batch=2)
    whole = site.scores(neurons(10))
    close(whole.effect, expected - by_hand(model, CORRUPTED, two))
    # With two answers, the loss of a pair is the cross-entropy of the choice between them. With
    # one answer, it is minus the log-probability of that answer.
    some = torch.tensor([2, 0])
    losses = (1 + (-expected).exp()).log() if two else -expected
    close(site.loss(neurons(10), some), losses[some].mean())
    if two:
        assert whole.right.tolist() == (expected > 0).tolist()
    drawn = site.runs.pairs.with_answers_of(torch.tensor([1, 2, 0]))
    moved = InterchangeRuns(Runs(model, drawn, "denoising"), name, -1, head=None, batch=3)
    swapped = score(model, CORRUPTED[0], RIGHT[1], changes(0, RIGHT[1]))
    if not two:
        close(moved.loss(neurons(10), torch.tensor([0])), -swapped)


def test_an_alignment_is_fitted_to_pairs_and_not_to_rows(model):
    first, second = pairs_of("left").read_by(model), pairs_of("left").read_by(model)
    result = align(
        model, first[:2], "resid_pre", 3, test=second[[2]], layers=1, epochs=2, batch=2, seed=4
    )
    assert result.accuracy.values.shape == (5, 1, 1, 1)
    assert len(result.losses["blocks.1.resid_pre", -1]) == 2
    # The whole value of the other text at the last token of the prompt.
    changes = patched(model, "blocks.1.resid_pre", lambda row: len(CLEAN[row]) - 1)
    effect = by_hand(model, CORRUPTED, changes=changes) - by_hand(model, CORRUPTED)
    close(result.metric.select(control="whole").values.flatten(), effect[2:])


def test_right_answers_of_an_alignment_are_greedy(model):
    right = [greedy(model, CORRUPTED[0], 3), [4, 4]]
    prompts = [CORRUPTED[0], CORRUPTED[2]]
    texts = text(prompts, "right")
    pairs = Pairs(texts, texts, [torch.tensor(answer) for answer in right])
    runs = Runs(model, pairs, "denoising")
    site = InterchangeRuns(runs, "blocks.0.mlp_out", -1, head=None, batch=5)
    assert site.scores(neurons(10)).right.tolist() == [1, 0]


def test_a_sweep_costs_as_much_as_a_sweep_of_its_rows(model):
    """The rows are the same texts with a metric that reads as many logits.

    The score of an answer adds a few operations to each edit: it hides the fill of short answers,
    adds up the tokens and multiplies by the sign.
    """
    pairs = pairs_of("right")
    rows = pairs.read_by(model).rows()

    real = rows.text.attention_mask

    def plain(logits):
        scores = logits.log_softmax(-1)[:, :, 3]
        return (scores.where(real, 0) if scores.shape == real.shape else scores).sum(1)

    plain.last = rows.metric.last
    assert plain.last in (0, 4)

    def work(texts, n_edits):
        jobs = [{"blocks.1.attn.z": edits.zero(pos=-1 - n % 3)} for n in range(n_edits)]
        with FlopCounterMode(display=False) as flops, Starts() as starts:
            sweep(model, texts, jobs, progress=False)
        return flops.get_total_flops(), starts.operations.total()

    flops, operations = work(pairs, 3)
    flops_of_rows, operations_of_rows = work(Pairs(rows.text, metric=plain), 3)
    assert flops <= 1.1 * flops_of_rows
    more = work(pairs, 9)[1] - operations
    more_of_rows = work(Pairs(rows.text, metric=plain), 9)[1] - operations_of_rows
    assert more <= more_of_rows + 6 * 6


def test_the_metric_reads_the_last_positions_of_whole_texts(model):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 0, 8]]
    answers = [torch.tensor([7, 9, 3]), torch.tensor([10, 4, 6])]
    rows = Pairs(torch.tensor(prompts), answers=answers).read_by(model).rows()
    expected = []
    for prompt, answer in zip(prompts, answers, strict=True):
        expected.append(score(model, prompt, answer.tolist()))
    close(rows.metric(model(rows.text.tokens)), torch.stack(expected))


SIZES = dict(num_hidden_layers=2, num_attention_heads=3)
DECODERS = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", SIZES | dict(num_key_value_heads=3, sliding_window=3)),
    "gpt2": ("GPT2LMHeadModel", SIZES),
    "gemma3_text": ("Gemma3ForCausalLM", SIZES | dict(head_dim=4, sliding_window=3)),
}


def decoder(kind, dtype=torch.float64):
    """Return a model of `transformers` with random weights, attached."""
    name, sizes = DECODERS[kind]
    model = tiny.model(name, seed=3, **sizes).to(dtype)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    attach(model)
    return model


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", DECODERS)
def test_rows_of_attached_models_equal_separate_texts(kind, side):
    model = decoder(kind)

    def by_row(analysis):
        return analysis(model, pairs_of(side)), summed(lambda pairs: analysis(model, pairs))

    patched, expected = by_row(lambda model, pairs: activation_patching(model, pairs, "z"))
    close(patched.values, expected, 1e-8)
    estimated, expected = by_row(
        lambda model, pairs: attribution_patching(model, pairs, "mlp_out", ["layer"])
    )
    close(estimated.values, expected, 1e-8)


def test_rows_in_half_precision_are_close(model):
    half = variant("pre").to(torch.bfloat16)
    result = activation_patching(half, pairs_of("left"), "resid_pre", layers=1)
    assert result.values.dtype == torch.float32
    exact = activation_patching(model, pairs_of("left"), "resid_pre", layers=1)
    close(result.values.double(), exact.values, 0.1)


def test_answers_continue_the_texts_of_a_decoder():
    model = tiny.model("T5ForConditionalGeneration", d_ff=13, decoder_start_token_id=0).double()
    attach(model)
    encoded = {
        name: torch.tensor([[3, 1, last, 5], [9, 2, last, 7]])
        for name, last in (("clean", 4), ("corrupted", 8))
    }
    starts = torch.tensor([[0, 6], [0, 11]])
    clean, corrupted = (
        {"input_ids": encoded[name], "decoder_input_ids": starts} for name in encoded
    )
    right = [[7, 9, 3], [2]]
    answers_of_rows = [torch.tensor(answer) for answer in right]
    pairs = Pairs(clean, corrupted, answers_of_rows)
    site = "encoder.blocks.1.mlp_out"
    result = activation_patching(model, pairs, site)
    for row, answer in enumerate(right):
        read = torch.tensor([starts[row].tolist() + answer])
        tokens = torch.tensor(answer)[:, None]
        for name, number in (("corrupted", result.base[row]), ("clean", result.target[row])):
            with torch.no_grad():
                output = model(encoded[name][row : row + 1], decoder_input_ids=read)
            total = output.logits[0, 1:-1].log_softmax(1).gather(1, tokens).sum()
            assert float(number) == pytest.approx(float(total), abs=1e-9)
    # Positions of the encoder are positions of its own text, which is longer than a decoder's text.
    mlp = model.encoder.block[1].layer[1].DenseReluDense

    def of_run(name, change):
        """Return the metric of each row, while the output of the MLP is changed."""
        totals = []
        for row, answer in enumerate(right):
            read = torch.tensor([starts[row].tolist() + answer])
            handle = mlp.register_forward_hook(lambda *call, row=row: change(row, call[2]))
            with torch.no_grad(), handle:
                logits = model(encoded[name][row : row + 1], decoder_input_ids=read).logits
            of_answer = logits[0, 1:-1].log_softmax(1).gather(1, torch.tensor(answer)[:, None])
            totals.append(of_answer.sum())
        return torch.stack(totals)

    outputs = {}
    of_run("clean", lambda row, output: outputs.update({row: output.clone()}))
    assert result.labels["pos"] == (0, 1, 2, 3)
    for pos in range(4):

        def patch(row, output, pos=pos):
            output[:, pos] = outputs[row][:, pos]
            return output

        close(result.select(layer=1).values[pos], of_run("corrupted", patch) - result.base)

    def zero(row, output):
        output[:, -1] = 0
        return output

    for pos in (-1, 3, slice(3, None)):
        swept = sweep(model, pairs, [{site: edits.zero(pos=pos)}])
        close(swept.values[0], of_run("clean", zero) - result.target)


def test_answers_of_several_tokens_may_be_at_the_last_position(model):
    expected = pairs_of("left").read_by(model).rows()
    for pos in (-1, [-1] * 3, torch.tensor([-1] * 3)):
        rows = pairs_of("left", pos=pos).read_by(model).rows()
        assert torch.equal(rows.text.tokens, expected.text.tokens)


REFUSED = [
    (dict(answers=[torch.tensor([3, 1])] * 3, pos=-2), "pos must be left out.*-2"),
    (dict(answers=[torch.tensor([3, 1])] * 3, pos=[-1, -2, -1]), "pos must be left out.*-2"),
    (dict(answers=[torch.tensor([3, 1])] * 3, metric=lambda logits: logits[:, 0, 0]), "metric"),
    (dict(answers=[torch.tensor([3, 1])] * 2), "one answer for each of 3 texts.*2 answers"),
    (dict(answers=[torch.tensor([[3], [1]])] * 3), "must be a tensor of tokens"),
    (dict(answers=[(torch.tensor([3, 1]), 2), 4, 4]), "right and a wrong answer.*1, 2"),
    (
        dict(
            answers=[
                (torch.tensor([3, 1]), 2),
                (torch.tensor([5, 4]), torch.tensor([5, 4])),
                (4, 6),
            ]
        ),
        r"different.*\[5, 4\].*example 1",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_answers_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        activation_patching(model, Pairs(text(CLEAN, "left"), text(CORRUPTED, "left"), **options))


def test_answers_and_a_metric_of_several_tokens_are_refused():
    pairs = Pairs("Return the", answers=" number of", metric=log_prob(" list of"))
    with pytest.raises(ValueError, match=r"metric must be left out.*list of"):
        pairs.read_by(load("pydoc-4l"))


def test_another_metric_replaces_the_log_probability_of_answers_of_several_tokens():
    model = load("pydoc-4l")
    pairs = Pairs("Return the", answers=(" number of", " list of"))
    read = pairs.measured_by(last_logit).read_by(model)
    assert read.continuations is None
    assert read.metric is last_logit
    worded = pairs.measured_by(log_prob(" list of")).read_by(model)
    assert [*map(list, worded.continuations.tokens)] == [[tuple(model.encoded(" list of"))]]


def last_logit(logits):
    """Return the logit of a token at the last position."""
    return logits[:, -1, 7]


def test_the_score_of_an_answer_takes_the_place_of_a_metric_with_its_words():
    read = Pairs("Return the", metric=log_prob(" list of")).read_by(load("pydoc-4l"))
    assert read.metric.n_texts == 1
    assert repr(read.metric) == "log_prob(' list of')"


def test_arguments_without_positions_of_answers_are_refused(model):
    inputs = text(CLEAN, "left")
    by_position = inputs | {"query_key_mask": torch.ones(3, 5, 5, dtype=torch.bool).tril()}
    pairs = Pairs(by_position, by_position, answers())
    with pytest.raises(ValueError, match=r"query_key_mask must be left out.*\[3, 5, 5\]"):
        activation_patching(model, pairs, "resid_pre")


def test_a_metric_may_be_the_score_of_an_answer():
    model = load("pydoc-4l")
    prompts = ["Return the", "def __ini"]
    hooks = [{"blocks.1.mlp_out": edits.zero()}]
    answer = " list of"
    result = sweep(model, prompts, hooks, log_prob(answer))
    tokens = model.encoded(answer)

    def total(prompt):
        read = model.encoded(prompt)
        logits = model(torch.tensor([read + tokens]))[0, len(read) - 1 : -1].detach()
        return float(logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None]).sum())

    assert result.base.tolist() == pytest.approx([total(prompt) for prompt in prompts], abs=1e-3)
    with HookedRunner(model).hooks(hooks[0]):
        edited = [total(prompt) for prompt in prompts]
    assert (result.base + result.values[0]).tolist() == pytest.approx(edited, abs=1e-3)
    # This text is the greedy continuation, so `accuracy` must be 1.
    continued = model.to_text(greedy(model, model.encoded(prompts[0]), 4))
    scores = sweep(model, prompts[:1], hooks, accuracy(f"{continued}")).base
    assert scores.tolist() == [1]
    with pytest.raises(ValueError, match="one token.*' list'"):
        sweep(model, prompts, hooks, logit_diff(" list", " a"))


def test_steering_raises_the_score_of_a_whole_answer(model):
    vector = torch.arange(10.0).double() / 7
    direction = Direction({"blocks.0.resid_post": vector})
    metric = Pairs(text(CLEAN, "left"), answers=answers(False)).read_by(model)
    hooks = [{"blocks.0.resid_post": edits.add(direction, factor)} for factor in (0.0, 1.5)]
    result = sweep(model, metric, hooks)
    base = by_hand(model, CLEAN, two=False)

    def steered_rows(row, answer):
        return {"blocks.0.resid_post": lambda output: output + 1.5 * vector}

    expected = by_hand(model, CLEAN, two=False, changes=steered_rows) - base
    close(result.values, torch.stack([torch.zeros_like(base), expected]))
    shipped = load("pydoc-4l")
    curve = steering_curve(
        shipped,
        Direction({"blocks.1.resid_post": torch.ones(128)}),
        ["Return the"],
        [0.0, 0.5],
        log_prob(" list"),
        pos=-1,
    )
    tokens, read = shipped.encoded(" list"), shipped.encoded("Return the")
    place = len(read) - 1

    def moved(output):
        new = output.clone()
        new[:, place] += 0.5
        return new

    totals = [
        score(shipped, read, tokens, changes) for changes in ({}, {"blocks.1.resid_post": moved})
    ]
    assert float(curve.score.values[1, 0]) == pytest.approx(float(totals[1] - totals[0]), abs=1e-4)


def test_a_space_is_added_only_to_a_word_of_one_token():
    """A right and a wrong answer of one form are read in one way, also if one is in the text."""
    model = load("pydoc-4l")
    prompt, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ" for digit in "14")
    read = Pairs(prompt, other, ("-KV81", "-KV84")).read_by(model)
    expected = tuple(tuple(model.encoded(answer)) for answer in ("-KV81", "-KV84"))
    assert read.continuations.tokens == (expected,)
    assert repr(read.metric) == "log_prob('-KV81') - log_prob('-KV84')"
    tokens, answer = model.encoded(prompt), model.encoded("-KV81")
    base = sweep(model, prompt, [{"blocks.0.mlp_out": edits.zero()}], log_prob("-KV81")).base
    assert float(base) == pytest.approx(float(score(model, tokens, answer)), abs=1e-3)
    # A word of the text of several tokens may be a new word or the rest of "ZQXJ".
    with pytest.raises(ValueError, match="new word or the rest of a word.*'part'"):
        Pairs(prompt, other, ("part", "sold")).read_by(model)
    with pytest.raises(ValueError, match=r"pass Pairs\(\.\.\., answers=\[torch.tensor\(\[.*\]\)"):
        sweep(model, prompt, [{"blocks.0.mlp_out": edits.zero()}], log_prob("part"))


def test_a_cache_of_a_longer_text_is_read_from_its_own_end(model):
    prompt, longer = CLEAN[1], CLEAN[0]
    answer = RIGHT[0]
    pairs = Pairs(torch.tensor([prompt]), answers=[torch.tensor(answer)])
    name = "blocks.1.resid_pre"
    _, cache = HookedRunner(model).run_with_cache(torch.tensor([longer]), names=name)
    result = sweep(model, pairs, [{name: edits.replace(cache, pos=-1)}])
    source = value_of(model, name, longer, [])

    def put(output):
        new = output.clone()
        new[:, len(prompt) - 1] = source[:, len(longer) - 1]
        return new

    expected = score(model, prompt, answer, {name: put}) - score(model, prompt, answer)
    close(result.values[0, 0], expected)
