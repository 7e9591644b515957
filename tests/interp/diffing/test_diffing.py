"""Differences between two models, compared with plain PyTorch in float64, with the forward of
`transformers`, and with models whose change is known.
"""

import copy
import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner, ModeError, UnknownNameError
from hooks.base import peak_bytes
from interp import Result, compare_models, edits
from interp.diffing import streams as diffing_streams
from models import CharTokenizer, Transformer, TransformerConfig, attach
from tests import tiny
from tests.attachable import MODELS, TOKENS, config_of, made
from tests.pretended import DEVICE, SECOND, Devices, split
from tests.reference import some_tokens, variant
from tests.shipped import pydoc

# Other cases run with --full.
pytestmark = pytest.mark.sampled(3)

TEXTS = ["def f(x):", "Return the value of", "import os, sys", "class A", "for k in range(9):"]
# The matrices of the MLP in block 2 of pydoc-4l.
MLP = ["blocks.2.mlp.input.weight", "blocks.2.mlp.output.weight"]


def scaled(model, names, factor=1.3):
    """Return a copy of a model whose weights with these names are multiplied by a factor."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).mul_(factor)
    return other


def streams(model, text):
    """Return the stream after each block, and the log-probabilities, of one text in float64.

    The blocks of a plain model are called one after the other, without a runner or padding.
    """
    double = copy.deepcopy(model).double()
    tokens = torch.tensor([model.tokenizer.encode(text)])
    with torch.no_grad():
        context = double.context(tokens)
        stream = double.input_resid(tokens, context)
        after = []
        for block in double.blocks:
            stream = block(stream, context)
            after.append(stream[0])
        return torch.stack(after), double.unembed(stream)[0].log_softmax(-1)


def divergences(expected, predicted):
    """Return KL(expected ‖ predicted) at each position, summed token by token."""
    sums = []
    for log_p, log_q in zip(expected.tolist(), predicted.tolist(), strict=True):
        sums.append(sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True)))
    return torch.tensor(sums)


@pytest.fixture(scope="module")
def base():
    return pydoc()


@pytest.fixture(scope="module")
def tuned(base):
    return scaled(base, MLP)


@pytest.fixture(scope="module")
def change(tuned, base):
    return compare_models(tuned, base, TEXTS, batch=3)


def test_predictions_and_streams_equal_plain_torch_in_float64(change, tuned, base):
    longest = max(map(len, TEXTS))
    assert change.kl.values.shape == (longest, 5)
    assert change.stream.values.shape == (4, longest, 5)
    for n, text in enumerate(TEXTS):
        ours, log_p = streams(tuned, text)
        theirs, log_q = streams(base, text)
        kl = divergences(log_p, log_q)
        torch.testing.assert_close(
            change.kl.values[: len(text), n].double(), kl.double(), atol=2e-6, rtol=1e-4
        )
        sizes = ((ours - theirs).square().sum(-1) / theirs.square().sum(-1)).sqrt()
        torch.testing.assert_close(
            change.stream.values[:, : len(text), n].double(), sizes, atol=1e-6, rtol=1e-4
        )
        assert change.kl.values[len(text) :, n].isnan().all()
        assert change.stream.values[:, len(text) :, n].isnan().all()
        assert change.kl_curve.values[0, n] == pytest.approx(kl.mean().item(), rel=1e-3)
        curve = sizes.mean(-1).float()
        torch.testing.assert_close(change.curves.values[0, :, n], curve, atol=1e-6, rtol=1e-4)


def test_the_divergence_is_from_the_base(base):
    """KL is not symmetric: the first argument is the tuned model."""
    tuned = scaled(base, ["unembedding.weight"], 3.0)
    (_, log_p), (_, log_q) = streams(tuned, TEXTS[0]), streams(base, TEXTS[0])
    forwards, backwards = divergences(log_p, log_q), divergences(log_q, log_p)
    assert (forwards - backwards).abs().max() > 0.1
    found = compare_models(tuned, base, TEXTS[0]).kl.values[:, 0]
    torch.testing.assert_close(found, forwards, atol=1e-4, rtol=1e-4)


def test_nothing_differs_before_the_changed_block(change):
    values = change.stream.values
    known = ~values.isnan()
    assert (values[:2][known[:2]] == 0).all()
    assert (values[2:][known[2:]] > 0.01).all()


def test_equal_models_have_no_difference_and_no_control_of_this_size(base):
    same = compare_models(copy.deepcopy(base), base, TEXTS[:2])
    for result in (same.kl, same.stream, same.controls["kl"]["random"]):
        assert (result.values.nan_to_num() == 0).all()
    assert same.weights.changed == []
    assert same.view().html()


def changed_head(model):
    """Return a copy of a model with another unembedding, and the name of its weight."""
    other = copy.deepcopy(model)
    weight = other.get_output_embeddings().weight
    names = [name for name, parameter in other.named_parameters() if parameter is weight]
    with torch.no_grad():
        weight[3] += 1.0
    return other, *names


def test_a_changed_unembedding_is_named():
    original = made("llama")
    other, weight = changed_head(original)
    for model in (original, other):
        attach(model)
    change = compare_models(other, original, TOKENS)
    assert change.outside_layers == (weight,)
    assert weight in repr(change)
    assert change.kl.mean().max() > 0
    assert change.stream.values.abs().max() == 0
    assert compare_models(copy.deepcopy(original), original, TOKENS).outside_layers == ()


def tied_config(is_tied):
    """Return the config of a small Llama, with or without a tied unembedding."""
    config = config_of("llama")
    config.tie_word_embeddings = is_tied
    return config


def tied_and_untied(kind):
    """Return a model with a tied unembedding and a copy with its own unembedding, 1.25 times as
    large; then the names of the embedding and of the unembedding, and tokens.
    """
    if kind == "attached":
        tied = made("llama", config=tied_config(is_tied=True))
        untied = made("llama", config=tied_config(is_tied=False))
        names = "model.embed_tokens.weight", "lm_head.weight"
    else:
        sizes = dict(vocab_size=11, n_ctx=13, n_layers=2, n_heads=2, d_model=6, d_mlp=5)
        tied, untied = (
            Transformer(TransformerConfig(**sizes, tied_unembed=is_tied)).eval()
            for is_tied in (True, False)
        )
        names = "token_embedding.weight", "unembedding.weight"
    untied.load_state_dict(tied.state_dict())
    with torch.no_grad():
        untied.get_parameter(names[1]).mul_(1.25)
    assert names[1] not in dict(tied.named_parameters())
    for model in (tied, untied):
        if kind == "attached":
            attach(model)
    return tied, untied, *names, torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("kind", ["attached", "plain"])
@pytest.mark.parametrize("tuned_is_tied", [False, True])
def test_an_unembedding_that_is_tied_in_one_model_is_compared(kind, tuned_is_tied):
    tied, untied, embedding, unembedding, tokens = tied_and_untied(kind)
    tuned, base = (tied, untied) if tuned_is_tied else (untied, tied)
    change = compare_models(tuned, base, tokens)
    assert change.outside_layers == (unembedding,)
    outside = f"changed weights outside the layers: {unembedding} (all changed weights: .weights"
    assert outside in repr(change)
    assert "the control 'random' says nothing, because the streams are equal" in repr(change)
    assert change.weights.changed == [unembedding]
    # The change is a quarter of the smaller weight, and a fifth of the larger one.
    assert change.weights[unembedding].relative == pytest.approx(0.2 if tuned_is_tied else 0.25)
    assert change.weights[unembedding].rows[0] == "unembedding"
    assert change.weights[embedding].relative == 0
    assert [weight.name for weight in change.top().weights] == [unembedding]
    # The logits of the untied model are 1.25 times as large, because no unembedding has a bias.
    with torch.no_grad():
        logits = tied(tokens)
    logits = getattr(logits, "logits", logits)[0]
    log_p, log_q = (
        (factor * logits).log_softmax(-1) for factor in ((1, 1.25) if tuned_is_tied else (1.25, 1))
    )
    expected = divergences(log_p, log_q)
    torch.testing.assert_close(change.kl.values[:, 0], expected, atol=1e-5, rtol=1e-3)
    assert change.stream.values.abs().max() == 0


def test_a_changed_embedding_that_is_tied_in_one_model_has_two_names():
    tied, untied, embedding, unembedding, tokens = tied_and_untied("plain")
    with torch.no_grad():
        untied.get_parameter(unembedding).copy_(tied.get_parameter(embedding))
        tied.W_E[3] += 1.0
    change = compare_models(tied, untied, tokens)
    assert change.outside_layers == (embedding, unembedding)
    roles = [change.weights[name].rows for name in (embedding, unembedding)]
    assert roles == [("embedding", 1, (3,)), ("unembedding", 1, (3,))]


@pytest.mark.parametrize("kind", ["attached", "plain"])
def test_a_tied_weight_is_one_weight_if_both_models_tie_it(kind):
    tied, _, embedding, unembedding, tokens = tied_and_untied(kind)
    tuned = scaled(tied, [embedding], 1.5)
    change = compare_models(tuned, tied, tokens)
    assert change.outside_layers == (embedding,)
    # The same parameter has both names.
    assert tied.get_parameter(unembedding) is tied.get_parameter(embedding)
    assert f": {embedding} (also {unembedding}) (all changed weights" in repr(change)
    assert f"{embedding} (also {unembedding}) [" in repr(change.weights)
    assert change.weights[unembedding] is change.weights[embedding]
    assert len(change.weights.changes) == len([*tied.parameters()])
    assert change.weights[embedding].rows[0] == "embedding and unembedding"


def test_weights_that_are_not_compared_are_not_called_unchanged():
    tuned, base = made("llama"), made("llama")
    attach(base), attach(tuned)
    base.config.quantization_config = {"quant_method": "gptq"}
    change = compare_models(tuned, base, TOKENS)
    assert change.outside_layers is None
    assert "changed weights outside the layers: not known" in repr(change)


def test_weights_of_layers_are_not_outside_the_layers(change, base):
    assert change.outside_layers == ()
    other = scaled(base, ["ln_final.weight", "blocks.0.mlp.input.weight"])
    assert compare_models(other, base, "def").outside_layers == ("ln_final.weight",)


def test_a_change_prints_the_layers_that_changed_most():
    sizes = dict(vocab_size=11, n_ctx=13, n_layers=8, n_heads=2, d_model=6, d_mlp=5)
    base = Transformer(TransformerConfig(**sizes)).eval()
    tuned = scaled(base, ["blocks.2.mlp.output.weight"], 30.0)
    change = compare_models(tuned, base, torch.randint(11, (3, 7)))
    means = change.stream.values.mean((1, 2)).tolist()
    order = sorted(range(8), key=lambda layer: -means[layer])
    printed = repr(change).splitlines()
    layers = [int(line.split()[3]) for line in printed if line.startswith("  stream after layer")]
    assert layers == sorted(order[:5])
    (others,) = [line for line in printed if "…" in line]
    assert others.split()[1:4] == ["3", "more", "layers,"]
    assert others.endswith(f"{means[order[5]]:.4g}")
    assert "KL(tuned ‖ base)" in repr(change)


def test_means_are_over_the_texts_that_have_a_position(change):
    expected = change.kl.values.nanmean(-1)
    torch.testing.assert_close(change.kl.mean(), expected)
    assert expected.isfinite().all()
    of_base = change.controls["stream"]["base on the next text"]
    torch.testing.assert_close(of_base.mean(), of_base.values.nanmean(-1), equal_nan=True)


def test_an_unknown_control_is_an_error(change):
    with pytest.raises(UnknownNameError, match="tuned on the next text"):
        change.controls["kl"]["tuned"]


def test_the_error_of_a_former_control_has_only_its_new_name(change):
    new_names = {"other texts": "base on the next text", "shuffled": "tuned on the next text"}
    for old, new in new_names.items():
        with pytest.raises(UnknownNameError, match=new) as caught:
            change.controls["kl"][old]
        assert not [name for name in {*new_names.values()} - {new} if name in str(caught.value)]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_batches_and_padding_change_no_number(change, tuned, base, batch):
    other = compare_models(tuned, base, TEXTS, batch=batch)
    for ours, theirs in ((other.kl, change.kl), (other.stream, change.stream)):
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-3, equal_nan=True)
    for table, controls in change.controls.items():
        for name in ("base on the next text", "tuned on the next text"):
            ours, theirs = other.controls[table][name], controls[name]
            assert (ours.exists is None) == (theirs.exists is None)
            assert ours.exists is None or torch.equal(ours.exists, theirs.exists)
            torch.testing.assert_close(
                ours.values, theirs.values, atol=1e-5, rtol=1e-3, equal_nan=True
            )
    lens, other_lens = change.lens(2), other.lens(2)
    torch.testing.assert_close(lens.vectors[0], other_lens.vectors[0], atol=1e-5, rtol=1e-4)


def test_logits_of_few_positions_at_a_time_change_no_number(change, tuned, base, monkeypatch):
    monkeypatch.setattr("interp.diffing.streams._LOGITS_AT_ONCE", 3 * 103 * 4)
    other = compare_models(tuned, base, TEXTS, batch=3)
    pairs = [(other.kl, change.kl)]
    pairs += [
        (other.controls["kl"][name], result) for name, result in change.controls["kl"].items()
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_controls_read_the_next_text(tuned, base, batch):
    texts = ["def f(x)", "Return a", "if x > 0"]  # of the same length, so nothing is padded
    change = compare_models(tuned, base, texts, batch=batch)
    ours, theirs = [streams(tuned, text) for text in texts], [streams(base, text) for text in texts]
    for n in range(3):
        following = (n + 1) % 3
        stream, log_q = theirs[n]
        for name, others in (("base on the next text", theirs), ("tuned on the next text", ours)):
            other_stream, log_p = others[following]
            kl = change.controls["kl"][name].values[:, n]
            torch.testing.assert_close(kl, divergences(log_p, log_q), atol=1e-4, rtol=1e-4)
            sizes = (other_stream - stream).norm(dim=-1) / stream.norm(dim=-1)
            found = change.controls["stream"][name].values[..., n]
            torch.testing.assert_close(found, sizes.float(), atol=1e-5, rtol=1e-4)


def test_a_control_exists_where_both_texts_have_a_token(tuned, base):
    texts = ["def f(x)", "Ret", "if x >"]
    change = compare_models(tuned, base, texts)
    for results in change.controls.values():
        for name, result in results.items():
            lengths = [8, 3, 6] if name == "random" else [3, 3, 6]
            known = ~result.values.isnan()
            assert known.sum(-2).tolist() in (lengths, [lengths] * 4)


def test_the_random_control_moves_the_last_stream_by_the_size_of_the_difference(base):
    """With an unembedding that returns the stream itself, the divergence shows the size."""
    sizes = dict(vocab_size=6, n_ctx=7, n_layers=1, n_heads=1, d_model=6, d_mlp=5)
    config = TransformerConfig(**sizes, final_norm=False, tied_unembed=False)
    torch.manual_seed(3)
    model = Transformer(config).eval()
    with torch.no_grad():
        model.unembedding.weight.copy_(torch.eye(6))
    other = scaled(model, ["blocks.0.mlp.output.weight"], 0.5)
    tokens = torch.randint(6, (400, 5))
    random = compare_models(other, model, tokens, batch=400).controls["kl"]["random"].values
    with torch.no_grad():
        logits = model(tokens).double()
        gap = (other(tokens) - model(tokens)).norm(dim=-1)
    # A small move by δ has the divergence δᵀFδ / 2, with F = diag(p) - p pᵀ. For random directions
    # of the size |δ|, the mean is |δ|² trace(F) / (2 · 6).
    chances = logits.softmax(-1)
    trace = 1 - chances.square().sum(-1)
    expected = (gap.double().square() * trace / 12).mean().item()
    assert random.mean().item() == pytest.approx(expected, rel=0.1)


def test_a_single_text_has_words_and_no_control_of_the_next_text(tuned, base):
    change = compare_models(tuned, base, "def f")
    assert change.kl.words["pos"] == [*"def f"]
    assert change.controls["kl"]["tuned on the next text"].values.isnan().all()
    assert change.controls["stream"]["base on the next text"].values.isnan().all()
    assert "nan" not in repr(change)
    assert "need a second text" in repr(change)
    assert change.lens(2).rows == ("difference", "random 0", "random 1", "random 2")


@pytest.mark.parametrize("places", [(DEVICE, SECOND), (SECOND, "cpu"), ("cpu", DEVICE)])
def test_models_on_two_devices_are_compared_as_on_one(places):
    """The streams and weights of the base are copied; two models are never on one device."""
    base = variant("pre").float()
    tuned = scaled(base, ["blocks.0.mlp.output.weight"])
    tokens = some_tokens()
    expected = compare_models(tuned, base, tokens)
    lens, weights = expected.lens(-1), expected.weights
    with Devices():
        there, other = copy.deepcopy(tuned), copy.deepcopy(base)
        for model, place in zip((there, other), places, strict=True):
            if place != "cpu":
                split(model, place)
        found = compare_models(there, other, tokens)
        for ours, theirs in ((found.kl, expected.kl), (found.stream, expected.stream)):
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.lens(-1).vectors, lens.vectors, atol=1e-6, rtol=1e-5)
        assert found.weights.changed == weights.changed
        assert found.weights.changes[0].relative == pytest.approx(weights.changes[0].relative)


# Weights


def by_numpy(tuned, base):
    """Return the relative size, the effective rank and the singular values of a change."""
    gap = tuned.detach().double().numpy() - base.detach().double().numpy()
    s = np.linalg.svd(gap, compute_uv=False)
    share = s[s > 1e-12] / s.sum()
    rank = math.exp(-(share * np.log(share)).sum())
    return np.linalg.norm(gap) / np.linalg.norm(base.detach().double().numpy()), rank, s


def test_exactly_the_changed_matrices_are_named(change, tuned, base):
    assert sorted(change.weights.changed) == sorted(MLP)
    assert len(change.weights.changes) == len([*base.parameters()])
    for name in MLP:
        found = change.weights[name]
        pair = (model.get_parameter(name) for model in (tuned, base))
        relative, rank, s = by_numpy(*pair)
        assert found.relative == pytest.approx(relative, rel=1e-6)
        assert found.effective_rank == pytest.approx(rank, rel=1e-4)
        np.testing.assert_allclose(found.s, s, rtol=1e-4, atol=1e-6)
    # All singular values of a random matrix of this shape are large.
    assert 110 < change.weights[MLP[0]].random_rank < 128
    assert change.weights["ln_final.bias"].relative == 0


def test_directions_of_a_matrix_that_writes_to_the_stream_have_tokens(base):
    """The planted change writes the direction of one token for one neuron."""
    tuned = copy.deepcopy(base)
    token = base.to_id("q")
    written = base.W_U[:, token].detach() - base.W_U.detach().mean(1)
    with torch.no_grad():
        tuned.blocks[1].mlp.output.weight[:, 7] += 5 * written / written.norm()
        tuned.blocks[1].mlp.input.weight[3] += 1.0
    change = compare_models(tuned, base, TEXTS[:2])
    found = change.weights["blocks.1.mlp.output.weight"]
    assert found.effective_rank == pytest.approx(1, abs=1e-3)
    assert found.s[0].item() == pytest.approx(5, rel=1e-5)
    assert "q" in [ends[0] for ends in found.tokens[0]]
    gain = base.ln_final.weight.detach()
    direction = found.writes[0].float()
    for end, sign in enumerate((1, -1)):
        centred = sign * (direction - direction.mean())
        normed = centred / (centred.square().mean() + base.config.norm_eps).sqrt() * gain
        logits = (normed + base.ln_final.bias) @ base.W_U + base.b_U
        best = [base.to_pieces(token) for token in logits.topk(10).indices[:, None]]
        assert found.tokens[0][end] == [piece for (piece,) in best]
        strength = (logits.max() - logits.mean()).item()
        assert found.strength[0, end].item() == pytest.approx(strength, rel=1e-3)
    assert found.strength.max() > 2 * found.random_strength
    # Neurons are not tokens.
    assert change.weights["blocks.1.mlp.input.weight"].writes is None


@pytest.mark.parametrize(
    ("name", "writing"),
    [
        ("llama", ["self_attn.o_proj", "mlp.down_proj"]),
        ("gpt2", ["attn.c_proj", "mlp.c_proj"]),
        ("gpt_neox", ["attention.dense", "mlp.dense_4h_to_h"]),
        ("opt", ["self_attn.out_proj", "fc2"]),  # queries, keys and values have d_model numbers
    ],
)
def test_writers_are_found_in_models_of_transformers(name, writing):
    from models import attach

    base, tuned = made(name), made(name)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(torch.randn(weight.shape))
    attach(base), attach(tuned)
    changes = compare_models(tuned, base, TOKENS).weights.changes
    writers = [change for change in changes if change.writes is not None]
    expected = [
        name
        for name, _ in base.named_parameters()
        if name.removesuffix(".weight").endswith(tuple(writing))
    ]
    assert sorted(change.name for change in writers) == sorted(expected)
    size = base.get_input_embeddings().weight.shape[1]
    assert all(change.writes.shape[1] == size for change in writers)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", MODELS)
def test_the_changed_matrix_of_twins_ranks_first(name):
    from models import attach

    draws = torch.Generator().manual_seed(len(name))
    base, tuned = made(name), made(name)
    matrices = [key for key, weight in base.named_parameters() if weight.ndim > 1]
    changed = matrices[torch.randint(len(matrices), (), generator=draws)]
    with torch.no_grad():
        weight = tuned.get_parameter(changed)
        weight.add_(0.01 * torch.randn(weight.shape, generator=draws))
    attach(base), attach(tuned)
    weights = compare_models(tuned, base, TOKENS).weights
    assert weights.changes[0].name == changed
    assert weights.changed == [changed]
    gap = tuned.get_parameter(changed) - base.get_parameter(changed)
    relative = (gap.norm() / base.get_parameter(changed).norm()).item()
    assert weights.changes[0].relative == pytest.approx(relative, rel=1e-3)


# Mean differences


def early(model, layer, texts=TEXTS, first=5):
    """Return the mean stream over the first tokens of texts, and the number of tokens."""
    rows = torch.cat([streams(model, text)[0][layer, :first] for text in texts])
    return rows.mean(0)


def test_the_lens_reads_the_mean_difference_of_early_tokens(change, tuned, base):
    lens = change.lens(2, first=4)
    by_name = dict(zip(lens.rows, lens.vectors, strict=True))
    expected = early(tuned, 2, first=4) - early(base, 2, first=4)
    torch.testing.assert_close(by_name["difference"], expected, atol=1e-5, rtol=1e-4)
    halves = TEXTS[:2], TEXTS[2:]
    for texts, row in zip(halves, ("first", "second"), strict=True):
        gap = early(tuned, 2, texts, 4) - early(base, 2, texts, 4)
        torch.testing.assert_close(by_name[f"{row} half of the texts"], gap, atol=1e-5, rtol=1e-4)
    others = early(base, 2, halves[0], 4) - early(base, 2, halves[1], 4)
    torch.testing.assert_close(by_name["base, half minus half"], others, atol=1e-5, rtol=1e-4)
    sizes = dict(zip(lens.rows, lens.sizes.tolist(), strict=True))
    for draw in range(3):
        assert sizes[f"random {draw}"] == pytest.approx(expected.norm().item(), rel=1e-4)
        assert sizes[f"models exchanged {draw}"] < expected.norm().item()
    # Read the vectors with the final norm and the unembedding of the tuned model, by hand.
    centred = expected - expected.mean()
    normed = centred / (centred.square().mean() + tuned.config.norm_eps).sqrt()
    normed = normed * tuned.ln_final.weight.double() + tuned.ln_final.bias.double()
    logits = normed @ tuned.W_U.double() + tuned.b_U.double()
    torch.testing.assert_close(lens.logits[0], logits.detach(), atol=1e-3, rtol=1e-3)
    order = logits.argsort(descending=True).tolist()
    for piece in ("a", "(", "Z"):
        assert lens.rank(piece)[0, 0] == order.index(tuned.to_id(piece))
    assert lens.top(3)[0].tolist() == order[:3]
    assert lens.view().html()


def test_first_tokens_of_a_model_that_sees_later_tokens():
    """The whole text is read, and only its first values count."""
    sizes = dict(vocab_size=11, n_ctx=13, n_layers=2, n_heads=2, d_model=6, d_mlp=5)
    base = Transformer(TransformerConfig(**sizes, causal=False)).eval()
    tuned = scaled(base, ["blocks.0.mlp.output.weight"], 30.0)
    tokens = torch.randint(11, (3, 7))
    vector = compare_models(tuned, base, tokens).difference(layer=1, first=2)[1]
    name = "blocks.1.resid_post"
    ours, theirs = (HookedRunner(m).capture(tokens, names=name)[name] for m in (tuned, base))
    torch.testing.assert_close(vector, (ours - theirs)[:, :2].mean((0, 1)))


def test_a_control_exchanges_the_models_in_half_of_the_texts(tuned, base):
    texts = TEXTS[:2]
    lens = compare_models(tuned, base, texts).lens(3, first=3, draws=2)
    gaps = [early(tuned, 3, [text], 3) - early(base, 3, [text], 3) for text in texts]
    expected = (gaps[0] - gaps[1]) / 2
    for row, vector in zip(lens.rows, lens.vectors, strict=True):
        if row.startswith("models exchanged"):
            sign = torch.sign(vector @ expected)
            torch.testing.assert_close(sign * vector, expected, atol=1e-5, rtol=1e-4)


def test_exchanges_of_texts_that_begin_alike_are_different_too(tuned, base):
    """Two texts with the same first tokens can take each other's place in a half."""
    texts = ["abcd", "abce", *TEXTS[:1]]
    lens = compare_models(tuned, base, texts).lens(3, first=3)
    vectors = [v for v, row in zip(lens.vectors, lens.rows, strict=True) if row[:4] == "mode"]
    gaps = [early(tuned, 3, [text], 3) - early(base, 3, [text], 3) for text in texts]
    expected = [gaps[2] / 3, (2 * gaps[0] - gaps[2]) / 3]
    assert len(vectors) == 2
    for vector in vectors:
        assert any(torch.allclose(vector, other, atol=1e-5, rtol=1e-4) for other in expected)
    assert not torch.allclose(*vectors)


@pytest.mark.parametrize("site", ["resid_post", "z"])
def test_a_difference_is_a_direction_that_separates_the_models(change, tuned, base, site):
    direction = change.difference(site, layer=3)
    name = f"blocks.3.{'attn.z' if site == 'z' else site}"
    values = {}
    for kind, model in (("tuned", tuned), ("base", base)):
        runner = HookedRunner(model)
        rows = [runner.capture(text, names=name)[name].flatten(2)[0] for text in TEXTS]
        values[kind] = torch.cat(rows)
    means = {kind: rows.mean(0) for kind, rows in values.items()}
    expected = means["tuned"] - means["base"]
    torch.testing.assert_close(direction[3], expected, atol=1e-5, rtol=1e-3)
    scores = {
        kind: (rows @ direction[name] + direction.offsets[name]).mean().item()
        for kind, rows in values.items()
    }
    half = expected.square().sum().item() / 2
    assert scores["tuned"] == pytest.approx(half, rel=1e-2)
    assert scores["base"] == pytest.approx(-half, rel=1e-2)
    # It steers the base: the mean of its values becomes the mean of the tuned model.
    runner = HookedRunner(base)
    with runner.hooks({name: edits.add(direction)}):
        moved = torch.cat([runner.capture(t, names=name)[name].flatten(2)[0] for t in TEXTS])
    torch.testing.assert_close(moved.mean(0), means["tuned"], atol=1e-5, rtol=1e-3)


def test_a_model_without_unembed_is_compared_by_its_logits():
    """The steps between the last stream and the logits of NanoChat are not found."""
    from models import attach

    base = made("nanochat")
    tuned = scaled(base, ["model.layers.1.mlp.fc2.weight"])
    logits = [model(TOKENS).logits.double().log_softmax(-1).detach() for model in (tuned, base)]
    attach(base), attach(tuned)
    change = compare_models(tuned, base, TOKENS)
    kl = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mT
    torch.testing.assert_close(change.kl.values.double(), kl, atol=1e-6, rtol=1e-4)
    assert change.controls["kl"]["random"].values.isnan().all()
    assert change.weights.changed == ["model.layers.1.mlp.fc2.weight"]
    with pytest.raises(TypeError, match="unembed"):
        change.lens(1)


# Checkpoints


def test_checkpoints_have_a_curve_for_each_layer(base):
    factors = {100: 1.1, 200: 1.2, 300: 1.4}
    steps = {step: scaled(base, MLP, factor) for step, factor in factors.items()}
    change = compare_models(steps, base, TEXTS[:3])
    assert change.curves.axes == ("checkpoint", "layer", "example")
    assert change.curves.labels["checkpoint"] == (100, 200, 300)
    assert change.kl_curve.axes == ("checkpoint", "example")
    assert (change.kl_curve.unit, change.curves.unit) == ("nats", change.stream.unit)
    assert change.stream.unit
    for step, model in steps.items():
        one = compare_models(model, base, TEXTS[:3])
        for ours, theirs in ((change.curves, one.curves), (change.kl_curve, one.kl_curve)):
            ours = ours.select(checkpoint=step).values
            torch.testing.assert_close(ours, theirs.values[0])
    # Everything else belongs to the last checkpoint.
    assert change.weights.changes[0].relative == pytest.approx(0.4, rel=1e-5)
    torch.testing.assert_close(change.kl.values, one.kl.values, equal_nan=True)


@pytest.mark.parametrize("form", ["list", "iterator", "function"])
def test_checkpoints_are_loaded_one_at_a_time(base, form):
    alive = weakref.WeakSet()
    most = []

    def load(factor):
        model = scaled(base, MLP, factor)
        alive.add(model)
        most.append(len(alive))
        return model

    loaders = [lambda factor=factor: load(factor) for factor in (1.1, 1.2, 1.3)]
    given = {
        "list": loaders,
        "iterator": (load(factor) for factor in (1.1, 1.2, 1.3)),
        "function": lambda: iter(loaders),
    }[form]
    change = compare_models(given, base, TEXTS[0])
    assert len(change.curves.values) == 3
    # An iterator loads the next model before the last one is known to be unneeded.
    assert most == ([1, 2, 2] if form == "iterator" else [1, 1, 1])


# Pictures


def test_one_page_contains_texts_streams_and_spectra(change):
    parts = change.view().parts
    kinds = [part["kind"] for part in parts]
    assert kinds == ["text", "text", "text", "grid", "lines"]
    most = change.kl.values.nanmean(0).argmax().item()
    assert parts[0]["tokens"][:3] == [*TEXTS[most][:3]]
    torch.testing.assert_close(parts[0]["values"], change.kl.values[: len(TEXTS[most]), most])
    grid = parts[3]["values"][0]
    torch.testing.assert_close(grid, change.stream.values.nanmean(-1))
    assert sorted(parts[4]["series"]) == sorted(MLP)
    html = change.view().html()
    assert "KL(tuned" in html


def test_the_plot_is_a_heat_map_of_layers_and_positions(change):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    (image,) = change.plot().axes[0].get_images()
    expected = change.stream.values.nanmean(-1).numpy()
    np.testing.assert_allclose(np.asarray(image.get_array()), expected, rtol=1e-6)


def test_a_change_is_saved_as_a_page(change, tmp_path):
    change.save(tmp_path / "change.html")
    assert (tmp_path / "change.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="html"):
        change.save(tmp_path / "change.png")
    # The numbers themselves can be kept.
    change.stream.save(tmp_path / "stream")
    again = Result.load(tmp_path / "stream")
    torch.testing.assert_close(again.values, change.stream.values, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(again.mean(), change.stream.mean(), rtol=0, atol=0)


# Errors


def test_the_first_difference_is_named(base, tuned):
    sizes = dict(vocab_size=11, n_ctx=13, n_layers=3, n_heads=2, d_model=6, d_mlp=5)
    tokens = torch.tensor([[3, 1, 4, 1]])

    def model(**changes):
        return Transformer(TransformerConfig(**sizes | changes)).eval()

    cases = {
        "d_model.*6 and 8": dict(d_model=8),
        "n_heads.*2 and 3": dict(n_heads=3),
        "vocab_size.*11 and 12": dict(vocab_size=12),
        "n_layers.*3 and 2": dict(n_layers=2),
        "base.*without blocks.0.resid_mid": dict(parallel=True),
        "base.*without pos_embed": dict(positions="none"),
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            compare_models(model(), model(**changes), tokens)
    with pytest.raises(ValueError, match="no adapter"):
        compare_models(tuned, None, TEXTS)
    with pytest.raises(ValueError, match="no adapter"):
        compare_models(tuned, tuned, TEXTS)
    with pytest.raises(TypeError, match="texts"):
        compare_models(tuned, base)
    with pytest.raises(ValueError, match="at least one model"):
        compare_models([], base, TEXTS)
    with pytest.raises(TypeError, match="hook points"):
        compare_models(nn.Linear(2, 3).eval(), base, TEXTS)
    with pytest.raises(ModeError):
        compare_models(copy.deepcopy(tuned).train(), base, TEXTS)


def test_packed_numbers_are_not_compared_as_weights():
    from models import attach

    tuned, base = made("llama"), made("llama")
    attach(base), attach(tuned)
    base.config.quantization_config = {"quant_method": "gptq"}
    change = compare_models(tuned, base, TOKENS)
    with pytest.raises(ValueError, match="must not be quantized"):
        _ = change.weights
    # `transformers` has unpacked the weights of a GGUF file.
    base.config.quantization_config = {"quant_method": "gguf"}
    assert compare_models(tuned, base, TOKENS).weights.changed == []


def test_tokenizers_must_agree_on_the_texts(base, tuned):
    other = copy.deepcopy(tuned)
    other.tokenizer = CharTokenizer(base.tokenizer.characters[::-1])
    with pytest.raises(ValueError, match=r"token \d+ and \d+ at position 0 of text 0"):
        compare_models(tuned, other, TEXTS)
    # Tokens need no tokenizer.
    compare_models(tuned, other, [[3, 1, 4]])


def test_wrong_layers_and_sites_are_named(change):
    with pytest.raises(ValueError, match="layer"):
        change.lens(4)
    with pytest.raises(ValueError, match="first"):
        change.lens(1, first=0)
    with pytest.raises(ValueError, match="batch pos"):
        change.difference("pattern", layer=1)
    with pytest.raises(UnknownNameError, match="blocks.2.mlp.output"):
        _ = change.weights["blocks.2.mlp.ouput.weight"]


# peft reads an attribute that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.is_gradient")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["plain", "attached", "adapter"])
def test_one_layer_of_each_model_is_in_memory(kind, monkeypatch):
    """The streams of one model in all layers would take more memory than the whole comparison.

    The size of a layer is multiplied by the copies in float64 and by the values inside a block.
    """
    n_texts, n_pos, n_layers, d_model = 3, 96, 24, 64
    tuned, base = deep_models(kind, n_pos, n_layers, d_model)
    monkeypatch.setattr(diffing_streams, "_LOGITS_AT_ONCE", 2**10)
    texts = torch.randint(2003, (n_texts, n_pos), generator=torch.Generator().manual_seed(0))
    change, peak = peak_bytes(lambda: compare_models(tuned, base, texts))
    assert peak < n_texts * n_pos * d_model * n_layers * 4
    assert change.stream.values[-1].mean() > 1e-3


def deep_models(kind, n_pos, n_layers, d_model):
    """Return two deep models of random weights, or one model with an adapter and None."""
    if kind == "plain":
        sizes = dict(vocab_size=2003, n_ctx=n_pos, n_layers=n_layers, n_heads=4, d_model=d_model)
        config = TransformerConfig(**sizes)
        return Transformer(config).eval(), Transformer(config).eval()
    sizes = dict(
        vocab_size=2003,
        hidden_size=d_model,
        intermediate_size=80,
        num_hidden_layers=n_layers,
        max_position_embeddings=n_pos,
    )
    tuned = tiny.model("LlamaForCausalLM", **sizes)
    if kind == "attached":
        base = tiny.model("LlamaForCausalLM", seed=1, **sizes)
        attach(base)
    else:
        peft = pytest.importorskip("peft", reason="needs peft")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        tuned, base = peft.get_peft_model(tuned, lora).eval(), None
    attach(tuned)
    return tuned, base


def test_weights_that_are_stored_elsewhere_are_compared_as_before():
    accelerate = pytest.importorskip("accelerate", reason="needs the extra hf")
    changes = []
    for is_offloaded in (False, True):
        models = []
        for factor in (1.0, 1.7):
            models.append(made("llama").requires_grad_(False))
            models[-1].model.layers[0].mlp.down_proj.weight *= factor
            if is_offloaded:
                accelerate.cpu_offload(models[-1], torch.device("cpu"))
            attach(models[-1])
        changes.append(compare_models(*models, TOKENS))
    plain, offloaded = changes
    torch.testing.assert_close(offloaded.stream.values, plain.stream.values)
    torch.testing.assert_close(offloaded.kl.values, plain.kl.values)
    assert plain.kl.values.mean() > 1e-3


def test_hooks_on_a_model_act_in_a_comparison(base):
    doubled = {"blocks.1.mlp_out": lambda value, point: 2 * value}
    hooked = copy.deepcopy(base)
    with HookedRunner(hooked).hooks(doubled):
        change = compare_models(hooked, base, TEXTS)
    other = scaled(base, ["blocks.1.mlp.output.weight", "blocks.1.mlp.output.bias"], 2)
    expected = compare_models(other, base, TEXTS)
    torch.testing.assert_close(change.kl.values, expected.kl.values, equal_nan=True)
    torch.testing.assert_close(change.stream.values, expected.stream.values, equal_nan=True)
    assert expected.kl.values.nanmean() > 1e-3
    with HookedRunner(hooked).hooks(doubled):
        change = compare_models(base, hooked, TEXTS)
    expected = compare_models(base, other, TEXTS)
    torch.testing.assert_close(change.stream.values, expected.stream.values, equal_nan=True)


def test_layers_without_a_difference_are_not_listed_and_have_no_lens(change, base):
    """The MLP of block 2 changed."""
    assert {layer.layer for layer in change.top(4).layers} == {2, 3}
    with pytest.raises(ValueError, match="layer must be a layer whose streams differ; got 1"):
        change.lens(1)
    same = compare_models(copy.deepcopy(base), base, TEXTS[:2]).top()
    assert same.layers == same.weights == []
    assert "layers: no difference of the stream" in repr(same)


def test_the_top_changes_are_the_largest_numbers_of_each_table(change, tuned, base):
    top = change.top(2)
    by_text = []
    for number, text in enumerate(TEXTS):
        _, log_p = streams(tuned, text)
        _, log_q = streams(base, text)
        kl = divergences(log_p, log_q)
        by_text += [(float(value), number, pos) for pos, value in enumerate(kl)]
    expected = sorted(by_text, reverse=True)[:2]
    places = [(token.text, token.pos) for token in top.tokens]
    assert places == [(number, pos) for _, number, pos in expected]
    for token, (kl, number, pos) in zip(top.tokens, expected, strict=True):
        assert token.kl == pytest.approx(kl, rel=1e-4)
        assert token.token == base.tokenizer.decode([base.tokenizer.encode(TEXTS[number])[pos]])
    sizes = []
    for layer in range(4):
        gaps = []
        for text in TEXTS:
            ours, theirs = streams(tuned, text)[0][layer], streams(base, text)[0][layer]
            gaps += ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).tolist()
        sizes.append((sum(gaps) / len(gaps), layer))
    for found, (size, layer) in zip(top.layers, sorted(sizes, reverse=True)[:2], strict=True):
        assert found.layer == layer
        assert found.difference == pytest.approx(size, rel=1e-4)
        assert found.next_text > 2 * found.difference
    assert sorted(weight.name for weight in top.weights) == sorted(MLP)
    assert len(repr(top).splitlines()) == 6
    # Only two weights changed.
    assert len(change.top(3).weights) == 2
    with pytest.raises(ValueError, match="k must be"):
        change.top(0)


def test_intervals_of_divergences_are_not_below_zero(base):
    """One text has a much larger divergence than the others."""
    tuned = copy.deepcopy(base)
    token = base.tokenizer.encode("X")[0]
    with torch.no_grad():
        tuned.token_embedding.weight[token] += 3
    change = compare_models(tuned, base, ["def f", "X y z", "a b c"])
    for result in (change.kl, change.kl_curve, change.stream, change.controls["kl"]["random"]):
        low, high = result.interval()
        places = ~low.isnan()
        assert places.any()
        assert (low[places] >= 0).all()
        assert (high[places] >= result.mean()[places]).all()


def test_exchanges_of_models_are_different_for_few_texts(base, tuned):
    """Two texts have two halves, and three texts have three."""
    for n_texts, n_exchanges in ((1, 0), (2, 2), (3, 3), (5, 3)):
        change = compare_models(tuned, base, TEXTS[:n_texts])
        lens = change.lens(3, first=4)
        numbers = [n for n, row in enumerate(lens.rows) if row.startswith("models exchanged")]
        assert len(numbers) == n_exchanges
        for first, second in itertools.combinations(numbers, 2):
            assert not torch.allclose(lens.vectors[first], lens.vectors[second])
        assert ("different exchanges" in repr(lens)) == (n_exchanges < 3)
    # A single text has no half to exchange.
    about = compare_models(tuned, base, TEXTS[0]).difference("resid_post", 3).about
    assert "length for exchanged models" not in about


def test_parts_of_a_fused_weight_are_named(base):
    tuned = copy.deepcopy(base)
    values = tuned.blocks[1].attn.W_V
    with torch.no_grad():
        values.mul_(1.25)
        tuned.blocks[3].attn.b_K.add_(0.5)
    change = compare_models(tuned, base, TEXTS[:2])
    weight = change.weights["blocks.1.attn.qkv.weight"]
    assert weight.parts == pytest.approx({"q": 0.0, "k": 0.0, "v": 0.25}, rel=1e-5)
    before = base.blocks[1].attn
    norms = [part.detach().double().norm() for part in (before.W_Q, before.W_K, before.W_V)]
    relative = 0.25 * norms[2] / torch.stack(norms).norm()
    assert weight.relative == pytest.approx(float(relative), rel=1e-5)
    keys = base.blocks[3].attn.b_K.detach()
    expected = 0.5 * math.sqrt(keys.numel()) / float(keys.norm())
    bias = change.weights["blocks.3.attn.qkv.bias"]
    assert bias.parts == pytest.approx({"q": 0.0, "k": expected, "v": 0.0}, rel=1e-5)
    assert "(q 0, k 0, v 0.25)" in repr(change.weights)
    assert change.weights["blocks.1.mlp.input.weight"].parts == {}


def test_changed_rows_of_tokens_are_named_with_their_role(base):
    tuned = copy.deepcopy(base)  # its unembedding is tied
    with torch.no_grad():
        tuned.W_E[base.encoded("z")[0]] += 0.25
        tuned.W_E[base.encoded("Q")[0]] += 0.5
    change = compare_models(tuned, base, TEXTS[:1]).weights["token_embedding.weight"]
    assert change.rows == ("embedding and unembedding", 2, ("Q", "z"))
    assert "2 of 103 tokens: 'Q' 'z'" in repr(compare_models(tuned, base, TEXTS[:1]).top(1))
    untied = made("gpt_neox")
    other = copy.deepcopy(untied)
    with torch.no_grad():
        other.get_output_embeddings().weight[7] += 1.0
    attach(untied), attach(other)
    (change, *rest) = compare_models(other, untied, TOKENS).weights.changes
    assert change.rows == ("unembedding", 1, (7,))
    assert not any(unchanged.rows for unchanged in rest)


def test_hooks_on_a_model_know_the_padding_of_a_batch(base):
    """The last token of a short text is before its padding."""
    hooked = copy.deepcopy(base)
    with HookedRunner(hooked).hooks({"blocks.1.mlp_out": edits.scale(3.0, pos=-1)}):
        together = compare_models(hooked, base, TEXTS[:2]).kl.values
        for number, text in enumerate(TEXTS[:2]):
            alone = compare_models(hooked, base, [text]).kl.values[:, 0]
            assert alone[-1] > 1e-4
            torch.testing.assert_close(together[: len(alone), number], alone, atol=1e-5, rtol=0)
