"""Masked runs, compared with a slow implementation in which every reader has its own stream."""

import pytest
import torch

from hooks import CacheError, HookedRunner, HookError, UnknownNameError
from hooks.base._torch import PeakBytes
from interp import Circuit, Pairs, graph, run_circuit
from interp.runs.masked import MaskedRuns
from tests.streams import FORMS, made, slow_run

PLACES = torch.randint(23, (2, 5, 7), generator=torch.Generator().manual_seed(1))
CLEAN, OTHER = PLACES
REAL = torch.ones(5, 7, dtype=torch.bool)
LEFT, RIGHT = REAL.clone(), REAL.clone()
LEFT[1, :3] = RIGHT[2, 4:] = False


def drawn(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("by_pos", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_masked_runs_equal_a_stream_for_every_reader(form, by_pos):
    model = made(**FORMS[form])
    nodes = graph.Graph(model)
    real = {"output": LEFT, "rms": RIGHT, "sandwich": LEFT}.get(form, REAL)
    mask = drawn(*nodes.allowed.shape, *([7] if by_pos else []))
    mask *= (drawn(*nodes.allowed.shape) < 0.5).view(*nodes.allowed.shape, *([1] if by_pos else []))
    _, source = slow_run(model, OTHER, real=real)
    expected, _ = slow_run(model, CLEAN, mask, source, real, nodes)
    found = run_circuit(model, Pairs(CLEAN, OTHER, attention_mask=real), mask)
    size = expected[real].abs().max().item()
    assert (expected - slow_run(model, CLEAN, real=real)[0])[real].abs().max() > 0.1 * size
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-10 * size)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_masked_is_the_text_and_everything_masked_the_source(form):
    model = made(**FORMS[form])
    pairs, nodes = Pairs(CLEAN, OTHER), graph.Graph(model)
    for circuit, text in (
        (nodes.edges, CLEAN),
        ([], OTHER),
        (nodes.allowed.double(), OTHER),
        (~Circuit(nodes, []), CLEAN),
    ):
        torch.testing.assert_close(run_circuit(model, pairs, circuit), model(text))
    back = run_circuit(model, pairs, [], direction="denoising")
    torch.testing.assert_close(back, model(CLEAN))


@pytest.mark.parametrize("mode", ["float32", "chunks", "cache", "apart"])
def test_a_circuit_is_the_same_however_it_is_run(mode):
    model, pairs = made(norm_place="sandwich"), Pairs(CLEAN, OTHER, attention_mask=LEFT)
    nodes = graph.Graph(model)
    circuit = [
        edge for edge, kept in zip(nodes.edges, drawn(len(nodes.edges)) < 0.6, strict=True) if kept
    ]
    expected = run_circuit(model, pairs, circuit)
    if mode == "float32":
        found = run_circuit(model.float(), pairs, circuit).double()
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        return
    if mode == "chunks":
        found = run_circuit(model, pairs, circuit, max_bytes=150_000)
    elif mode == "cache":
        texts = Pairs(CLEAN, attention_mask=LEFT)
        cache = HookedRunner(model).capture(OTHER, names=nodes.needed, attention_mask=LEFT)
        found = run_circuit(model, texts, circuit, cache, max_bytes=150_000)
    else:
        apart = [
            e.replace("input->", f"{e_}->")
            for e in circuit
            for e_ in (("embed", "pos_embed") if "input" in e else ("",))
        ]
        found = run_circuit(model, pairs, apart, split_embeddings=True)
    torch.testing.assert_close(found, expected)


def test_sources_may_be_means_and_zeros():
    model, mask = made(**FORMS["rms"]), drawn(25 - 3, 40)
    nodes = graph.Graph(model)
    many = torch.randint(23, (11, 7))
    _, wrote = slow_run(model, many)
    for source, made_of in (
        (nodes.mean(HookedRunner(model).run_with_cache(many)[1]), lambda v: v.mean(0, True)),
        ("zero", torch.zeros_like),
    ):
        other = {name: made_of(value)[:1].expand(5, -1, -1) for name, value in wrote.items()}
        expected, _ = slow_run(model, CLEAN, mask, other, nodes=nodes)
        torch.testing.assert_close(run_circuit(model, Pairs(CLEAN), mask, source), expected)


def test_the_metric_reads_the_last_real_position():
    model, pairs = made(), Pairs(CLEAN, OTHER, torch.arange(10).view(5, 2), attention_mask=RIGHT)
    runs, circuit = (
        MaskedRuns(graph.Graph(model), pairs),
        ["input->logits", "m2->logits", "a1.h1->m2"],
    )
    logits = run_circuit(model, pairs, circuit)
    last = logits[torch.arange(5), RIGHT.sum(1) - 1]
    expected = (last.gather(1, pairs.answers) * torch.tensor([1.0, -1])).sum(1)
    found = runs.metric(circuit)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    mask = runs.graph.mask(circuit).requires_grad_()
    torch.testing.assert_close(runs.metric(mask), expected)
    assert torch.autograd.grad(runs.metric(mask).sum(), mask)[0].any()


@pytest.mark.parametrize("by_pos", [False, True])
def test_gradients_of_a_mask_match_finite_differences(by_pos):
    model = made(**FORMS["sandwich rms"]).requires_grad_(False)
    nodes, pairs = graph.Graph(model), Pairs(CLEAN, OTHER)
    mask = drawn(*nodes.allowed.shape, *([7] if by_pos else [])).requires_grad_()
    step = drawn(*mask.shape) - 0.5
    run_circuit(model, pairs, mask)[:, :, 3].sum().backward()
    ends = [
        run_circuit(model, pairs, mask.detach() + e * step)[:, :, 3].sum() for e in (1e-5, -1e-5)
    ]
    torch.testing.assert_close(
        (mask.grad * step).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=0
    )
    assert not mask.grad[~nodes.allowed].any()


def test_memory_stays_within_its_bound():
    model, pairs = made(), Pairs(CLEAN.repeat(7, 1), OTHER.repeat(7, 1))
    for bound in (200_000, 700_000):
        with PeakBytes() as memory:
            logits = run_circuit(model, pairs, [], max_bytes=bound)
        # The memory beyond the logits, which exist twice: in parts and joined.
        assert memory.peak - 2 * logits.nbytes < bound


def test_arguments_that_do_not_fit_are_errors(unchecked):
    model, pairs = made(), Pairs(CLEAN, OTHER, attention_mask=LEFT)
    nodes = graph.Graph(model)
    contributions = graph.writers(model, HookedRunner(model).run_with_cache(CLEAN)[1])
    zeros = torch.zeros(nodes.allowed.shape)
    wider = Circuit(graph.Graph(made(d_mlp=5)), [])
    spans = {"a": [[3]] * 5}
    right = {"input_ids": OTHER, "attention_mask": RIGHT}
    unlike = Pairs(CLEAN, right, attention_mask=LEFT, spans=spans)
    for error, text, given in (
        ("mask must be", pairs, [torch.zeros(3, 5)]),
        ("from 0 to 1", pairs, [zeros / 0.0]),
        ("from 0 to 1", pairs, [zeros + 1.5]),
        ("from 0 to 1", pairs, [zeros - 0.1]),
        ("Circuit", pairs, [nodes.allowed]),
        ("another config", pairs, [wider]),
        ("other nodes", pairs, [Circuit(graph.Graph(made(), split_embeddings=True), [])]),
        ("m2", pairs, [["m7->logits"]]),
        ("later", pairs, [["m2->a1.h0<q>"]]),
        ("source must be", pairs, [zeros, contributions[:, :3]]),
        ("source must be", pairs, [zeros, "mean"]),
        ("right", pairs, [zeros, contributions.mean(1, keepdim=True)]),
        ("corrupted", Pairs(CLEAN), [zeros]),
        ("correspond", Pairs(CLEAN, OTHER[:, 1:], spans=spans), [zeros]),
        ("correspond", unlike, [zeros]),
    ):
        with pytest.raises((ValueError, UnknownNameError), match=error):
            run_circuit(model, text, *given)
    with pytest.raises(ValueError, match="max_bytes"):
        run_circuit(model, pairs, zeros, max_bytes=1000)
    other = made()
    _, cache = HookedRunner(other).run_with_cache(OTHER)
    with torch.no_grad():
        model.blocks[0].mlp.W_in.add_(1)
    with pytest.raises(CacheError, match="weights"):
        run_circuit(model, pairs, zeros, cache)
    hooks = {"blocks.1.mlp_out": lambda value, point: value * 0}
    with HookedRunner(model).hooks(hooks), pytest.raises(HookError, match="hook"):
        run_circuit(model, pairs, zeros)


@pytest.mark.parametrize(
    ("of_texts", "of_source"), [(REAL, RIGHT), (RIGHT, LEFT), (LEFT, RIGHT), (LEFT, REAL)]
)
def test_a_cache_of_texts_with_other_padding_is_no_source(of_texts, of_source):
    model = made()
    pairs, needed = Pairs(CLEAN, attention_mask=of_texts), graph.Graph(model).needed
    cache = HookedRunner(model).capture(OTHER, names=needed, attention_mask=of_source)
    with pytest.raises(ValueError, match="the source and the texts must have the same columns"):
        run_circuit(model, pairs, [], source=cache)


def test_a_longer_text_is_a_source_of_a_shorter_text():
    model = made()
    pairs, needed = Pairs(CLEAN, attention_mask=RIGHT), graph.Graph(model).needed
    cache = HookedRunner(model).capture(OTHER, names=needed)
    found = run_circuit(model, pairs, [], source=cache)
    torch.testing.assert_close(found[RIGHT], model(OTHER).detach()[RIGHT])
