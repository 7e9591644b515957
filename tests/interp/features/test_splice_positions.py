"""Dictionaries that act at some positions of each text, compared with each text run alone.

The references change the output of a module by PyTorch's own hook.
"""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hooks import HookError, HookPoint, position_offset
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edits,
    evaluate_sae,
    logit_diff,
    path_patching,
    run_circuit,
    sweep,
)
from interp.features import Dictionary, TopK, splice
from interp.graph.graph import Graph
from interp.store.rows import identity
from models import attach, generate
from tests import tiny
from tests.interp.effects.by_hand import changed
from tests.reference import D_MODEL, separately, variant

PLACE = "blocks.0.resid_post"
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [8, 9, 7, 2]]
AFTER_FIRST = [[1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3]]
# A selection, and the positions that it selects in each text.
CASES = [
    (slice(1, None), AFTER_FIRST),
    (-1, [[6], [2], [3]]),
    (slice(-2, None), [[5, 6], [1, 2], [2, 3]]),
    (edits.all_but(0, -1), [[1, 2, 3, 4, 5], [1], [1, 2]]),
    ([0, 2], [[0, 2]] * 3),
    ([5], [[5], [], []]),
]


@pytest.fixture(scope="module")
def model():
    return variant("rotary")


def dictionary(d_model=D_MODEL):
    """Return a dictionary with random weights that reconstructs badly."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(d_model, 23), (23, d_model), (23,), (d_model,)]
    weights = [torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes]
    return Dictionary(*weights, TopK(4))


def padded(side):
    """Return the texts as tokens of one batch, padded on a side, with their mask."""
    width = max(map(len, TEXTS))
    tokens = torch.full((len(TEXTS), width), 22)
    mask = torch.zeros(len(TEXTS), width, dtype=torch.bool)
    for row, text in enumerate(TEXTS):
        columns = slice(width - len(text), None) if side == "left" else slice(len(text))
        tokens[row, columns], mask[row, columns] = torch.tensor(text), True
    return tokens, mask


def at(positions, new):
    """Return a function that changes a value [1, pos, d] at some positions."""

    def change(value):
        changed_value = value.clone()
        changed_value[:, positions] = new(value)[:, positions]
        return changed_value

    return change


def alone(model, positions, new):
    """Return the logits of each text, run alone with a change at its positions."""
    logits = []
    for text, places in zip(TEXTS, positions, strict=True):
        with changed(model, {PLACE: at(places, new)}), torch.no_grad():
            logits.append(model(torch.tensor([text]))[0])
    return logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("pos", "positions"), CASES)
def test_other_positions_keep_their_values(model, pos, positions, side):
    d = dictionary()
    tokens, mask = padded(side)
    with splice(model, {PLACE: d}, error=None, pos=pos) as runner, torch.no_grad():
        logits = model(tokens, attention_mask=mask)
        heard, cache = runner.run_with_cache(tokens, names="*.features", attention_mask=mask)
    for row, expected in enumerate(alone(model, positions, d)):
        assert_close(logits[row, mask[row]], expected)
        assert_close(heard[row, mask[row]], expected)
    assert (cache["features", 0][mask] != 0).any(-1).all()


@pytest.mark.parametrize("error", ["live", "frozen", None])
def test_edits_of_features_act_at_the_positions(model, error):
    d = dictionary()
    tokens, mask = padded("left")
    hooks = {"*.features": edits.scale(3.0)}
    with splice(model, {PLACE: d}, error=error, pos=slice(1, None)) as runner:
        logits = runner.run_with_hooks(tokens, hooks=hooks, attention_mask=mask)

    def new(x):
        features = d.encode(x)
        return d.decode(3 * features) if error is None else x + 2 * features @ d.W_dec

    for row, expected in enumerate(alone(model, AFTER_FIRST, new)):
        assert_close(logits[row, mask[row]], expected)


@pytest.mark.parametrize("error", ["frozen", None])
def test_gradients_at_other_positions_flow_through_the_value(model, error):
    d, tokens = dictionary(), torch.tensor([TEXTS[0]])
    names = ["blocks.0.resid_mid"]

    def rebuilt(x):
        whole = d(x) if error is None else (x - d(x)).detach() + d(x)
        return torch.cat([x[:, :1], whole[:, 1:]], 1)

    with splice(model, {PLACE: d}, error=error, pos=slice(1, None)) as runner:
        logits, cache = runner.run_with_cache(tokens, names=names, grads=True)
        logits[0, -1, 3].backward()
    nodes = []

    def watch(x):
        nodes.append(x)
        x.retain_grad()

    with changed(model, {names[0]: watch, PLACE: rebuilt}):
        model(tokens)[0, -1, 3].backward()
    assert_close(cache.grads[names[0]], nodes[0].grad)
    model.zero_grad()


@pytest.mark.parametrize("side", ["left", "right"])
def test_sweeps_and_estimates_know_the_positions(model, side, monkeypatch):
    from interp.runs import sweep as sweeping

    tokens, mask = padded(side)
    answers = logit_diff([3, 0, 7], [1, 4, 2])
    pairs = Pairs(tokens, metric=answers, attention_mask=mask)
    jobs = [{"*.features": edits.zero(feature=[n, n + 3])} for n in range(6)]
    # These runs begin at a later position, and share rows.
    jobs += [{"blocks.0.mlp_out": edits.zero(pos=-1)}, {"blocks.0.mlp_out": edits.zero(pos=-2)}]
    with splice(model, {PLACE: dictionary()}, error=None, pos=slice(1, None)):
        expected = separately(model, tokens, jobs, answers, mask)
        monkeypatch.setattr(sweeping, "WholeRuns", None)
        assert_close(sweep(model, pairs, jobs).values, expected)
        given = dict(site="features", over=("pos",), layers=0, edit=edits.zero())
        estimate = attribution_patching(model, pairs, **given)
        exact = activation_patching(model, pairs, **given)
    assert expected.abs().max() > 1e-3
    # Features of the first tokens have no effect.
    first = mask.int().argmax(1)
    for result in (estimate, exact):
        assert result.values.abs().amax(1).gt(1e-3).any()
        assert result.values[first, range(3)].abs().max() < 1e-12


def test_generation_equals_each_prompt_alone(model):
    d = dictionary()

    def changing(pos, first, size):
        """Return the positions that were changed in a step or before, in a text of some size."""
        if pos == -1:
            return [*range(first - 1, size)]
        return [*range(1, size)] if isinstance(pos, slice) else [n for n in pos if n < size]

    for pos in (slice(1, None), -1, [0, 8]):
        with splice(model, {PLACE: d}, error=None, pos=pos):
            together = generate(model, TEXTS, max_new_tokens=5, temperature=0.0)
        for text, found in zip(TEXTS, together, strict=True):
            tokens = list(text)
            for _ in range(5):
                places = changing(pos, len(text), len(tokens))
                with changed(model, {PLACE: at(places, d)}), torch.no_grad():
                    tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            assert found == tokens


@pytest.mark.parametrize("pos", [slice(1, None), -1, slice(-4, -1), [0, 2]])
def test_lazy_values_and_pieces_of_blocks(model, pos):
    for side in ("left", "right"):
        tokens, mask = padded(side)
        with splice(model, {PLACE: dictionary()}, error=None, pos=pos) as runner, torch.no_grad():
            logits, eager = runner.run_with_cache(tokens, attention_mask=mask, mode="full")
            _, lazy = runner.run_with_cache(tokens, attention_mask=mask, lazy=True)
            for name in ("blocks.0.resid_post", "blocks.1.attn.z"):
                assert_close(lazy[name], eager[name])
            one = torch.tensor(TEXTS[:1])
            expected = model(one)
            with model.in_pieces(3):
                assert_close(model(tokens, attention_mask=mask)[mask], logits[mask])
                assert_close(model(one), expected)


def test_the_loss_is_the_loss_of_the_evaluation(model):
    d = dictionary()
    for pos in (slice(1, None), -1):
        scores = evaluate_sae(model, {PLACE: d}, TEXTS, pos=pos)
        with splice(model, {PLACE: d}, error=None, pos=pos), torch.no_grad():
            for row, text in enumerate(TEXTS):
                log_probs = model(torch.tensor([text]))[0, :-1].log_softmax(-1)
                losses = -log_probs.gather(1, torch.tensor(text[1:])[:, None])
                assert_close(scores.losses[1, row], losses.mean(), check_dtype=False)


def test_an_attached_model():
    reference = tiny.model("LlamaForCausalLM", hidden_size=D_MODEL * 2).double().eval()
    draw = torch.Generator().manual_seed(1)
    for weight in reference.parameters():
        weight.data.normal_(std=0.4, generator=draw)
    attached = attach(copy.deepcopy(reference)).model
    d = dictionary(2 * D_MODEL)
    tokens, mask = padded("left")
    with splice(attached, {PLACE: d}, error=None, pos=slice(1, None)):
        logits = attached(tokens, attention_mask=mask).logits
    # Without a cache, each step reads the whole text again.
    for pos in (slice(1, None), -1, slice(-2, None)):
        made = []
        with splice(attached, {PLACE: d}, error=None, pos=pos):
            for use_cache in (True, False):
                given = dict(
                    max_new_tokens=5, do_sample=False, use_cache=use_cache, pad_token_id=22
                )
                made.append(attached.generate(tokens, attention_mask=mask, **given))
        assert torch.equal(*made)
    for row, text in enumerate(TEXTS):
        places = [*range(1, len(text))]

        def change(output, places=places):
            value = output[0] if isinstance(output, tuple) else output
            new = at(places, d)(value)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        with changed(reference, {"model.layers.0": change}), torch.no_grad():
            expected = reference(torch.tensor([text])).logits[0]
        assert_close(logits[row, mask[row]], expected)


class Two(nn.Module):
    """A module of a user: two embeddings with points, without blocks and without a mask."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(23, D_MODEL).double()
        self.value = HookPoint("batch pos d_model")

    def forward(self, tokens):
        return self.value(self.table(tokens))


def test_any_module():
    module, d, tokens = Two().eval(), dictionary(), torch.tensor([TEXTS[0]])
    with splice(module, {"value": d}, error=None, pos=[2, -1]), torch.no_grad():
        found = module(tokens)
    assert_close(found, at([2, 6], d)(module.table(tokens).detach()))


def test_embeddings(model):
    d, tokens = dictionary(), torch.tensor([TEXTS[0]])
    with splice(model, {"embed": d}, error=None, pos=slice(1, None)), torch.no_grad():
        found = model(tokens)
    with changed(model, {"embed": at(AFTER_FIRST[0], d)}), torch.no_grad():
        assert_close(found, model(tokens))


@pytest.mark.parametrize("shape", [(3, 6), (2, 7)])
def test_a_mask_of_other_texts_is_refused(shape):
    mask = torch.ones(shape).bool()
    mask[0, 0] = False
    with (
        splice(Two().eval(), {"value": dictionary()}, error=None, pos=-1) as runner,
        position_offset(None, mask),
        pytest.raises(HookError, match="mask of the texts"),
    ):
        runner.model(torch.ones(3, 7).long())


def test_runs_that_do_not_know_the_positions_are_refused(model):
    tokens, mask = padded("left")
    both = Pairs(tokens, tokens.flip(0), attention_mask=mask, metric=logit_diff(3, 1))
    with splice(model, {PLACE: dictionary()}, error=None, pos=slice(1, None)):
        for call in (
            lambda: run_circuit(model, both, Graph(model).edges),
            lambda: edge_attribution(model, both),
            lambda: path_patching(model, both),
        ):
            with pytest.raises(HookError, match=r"all positions.*pos=\.\.\.\) at blocks.0"):
                call()
    long = Pairs(
        tokens, answers=[(torch.tensor([3, 5]), torch.tensor([7]))] * 3, attention_mask=mask
    )
    with (
        splice(model, {PLACE: dictionary()}, pos=slice(0, -1)),
        pytest.raises(HookError, match=r"count from the start.*pos=slice\(0, -1\)"),
    ):
        activation_patching(model, long, "z", edit=edits.zero())
    with pytest.raises(HookError, match="after the blocks"):
        splice(model, {"ln_final.normalized": dictionary()}, pos=-1).__enter__()
    with pytest.raises(ValueError, match="same in each text"):
        splice(model, {PLACE: dictionary()}, pos=[[1], [2], [0]])


def test_stores_of_two_settings_differ(model):
    found = []
    for options in ({}, {"error": None}, {"pos": slice(1, None)}, {"pos": slice(2, None)}):
        with splice(model, {PLACE: dictionary()}, **options):
            found.append(identity(model)["parts"][PLACE])
    assert len({*found}) == 4
