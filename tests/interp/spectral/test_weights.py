"""Circuits of heads from weights, compared with values of runs, numpy, and heads made by hand."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner
from interp import (
    composition_scores,
    copying_scores,
    edits,
    full_circuits,
    ov_circuit,
    positional_scores,
    qk_circuit,
    run_with_cache,
    singular_tokens,
    token_directions,
)
from models import RotaryScaling, Transformer, TransformerConfig
from tests.reference import (
    HEADS,
    LAYERS,
    LLAMA,
    N_CTX,
    VARIANTS,
    VOCAB,
    Reference,
    some_tokens,
    variant,
)
from tests.shipped import pydoc

# The circuits of weights do not contain biases, so compare them with models without biases.
UNBIASED = dict(qkv_bias=False, out_bias=False)
KINDS = [
    *("pre", "output", "sandwich", "parallel", "attention only sandwich", "grouped", "rmsnorm"),
    *("no norm", "layernorm eps", "unlearned", "no final norm", "attn_scale", "rotary partly"),
    *("qk_norm head", "qk_norm all", "qk_norm unlearned", "like llama", "like gemma 2"),
    "like gemma 3",
    *("like olmo 2", "d_head follows"),
]
YARN = RotaryScaling(kind="yarn", factor=4.0, original_n_ctx=16, attention_factor=1.5)
FOLDED = [(kind, {}) for kind in KINDS] + [("rotary", dict(rotary_scaling=YARN))]
FOLDED += [("rotary", dict(n_heads=1)), ("pre", dict(d_model=11))]


def close(found, wanted, tolerance=1e-9):
    wanted = np.asarray(wanted)
    atol = tolerance * abs(wanted).max()
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=atol)


def unbiased(kind, **changes):
    own = VARIANTS[kind]
    has_bias = own.get("norm", "layernorm") == "layernorm" and own.get("norm_learned", True)
    # With this eps, norms of queries and keys divide by the constant sqrt(eps).
    eps = dict(norm_eps=1e9) if "qk_norm" in own else {}
    return variant(kind, **UNBIASED | eps | dict(norm_bias=not has_bias), **changes)


def scales(cache, name, like):
    """Return the scale of a norm; ones without a norm."""
    return cache[name] if name in cache else torch.ones_like(like[..., :1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "changes"), FOLDED)
def test_folded_circuits_match_a_run(kind, changes):
    model = unbiased(kind, **changes)
    config, tokens = model.config, some_tokens()
    _, cache = run_with_cache(model, tokens)
    ov = ov_circuit(model).form()
    only_layernorms = config.norm == "layernorm" and config.norm_place != "output"
    for layer in range(LAYERS):
        name = f"blocks.{layer}"
        stream = cache[f"{name}.resid_pre"]
        read = stream / scales(cache, f"{name}.ln1.scale", stream)
        written = torch.einsum("bhqk,bkm,hmn->bqn", cache["pattern", layer], read, ov[layer])
        added = cache["attn_out", layer]
        if only_layernorms and config.final_norm:
            added = added - added.mean(-1, keepdim=True)
        close(written / scales(cache, f"{name}.ln1_post.scale", stream), added)
        for query, key in ((6, 6), (5, 3), (6, 1)):
            qk = qk_circuit(model, distance=query - key).form()[layer]
            found = torch.einsum("bm,hmn,bn->bh", read[:, query], qk, read[:, key])
            scale = config.attn_scale / (1 if config.qk_norm == "none" else config.norm_eps)
            wanted = cache["scores", layer][:, :, query, key]
            close(found * scale, wanted, 2e-5 if config.positions == "rotary" else 1e-9)


@pytest.mark.parametrize("kind", ["pre", "post", "grouped", "like gemma 2"])
def test_raw_circuits_are_products_of_the_weights(kind):
    model = variant(kind)
    w = {name: getattr(model, name).detach().numpy() for name in ("W_Q", "W_K", "W_V", "W_O")}
    rotary = model.config.positions == "rotary"
    ov, qk = (
        ov_circuit(model, fold=False),
        qk_circuit(model, fold=False, distance=0 if rotary else None),
    )
    for layer, head in np.ndindex(LAYERS, HEADS):
        of = layer, head // (HEADS // w["W_K"].shape[1])
        close(ov[layer, head].form(), w["W_V"][of] @ w["W_O"][layer, head])
        close(qk[layer, head].form(), w["W_Q"][layer, head] @ w["W_K"][of].T)


def centring(size):
    return np.eye(size) - 1 / size


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        dict(tied_unembed=False),
        dict(embed_norm=True, embed_scale=1.7),
        LLAMA | dict(embed_scale=1.7),
        dict(logit_cap=1.3, norm_place="sandwich"),
    ],
)
def test_full_circuits_and_copying_are_numpys_products_of_all_their_parts(changes, fold):
    model, at = variant("pre", **changes), (1, 4)
    config, w = model.config, {n: p.detach().numpy() for n, p in model.named_parameters()}
    mean = centring(config.d_model) if config.norm == "layernorm" else np.eye(config.d_model)

    def norm(name):
        there = fold and f"{name}.weight" in w
        return mean @ np.diag(w[f"{name}.weight"]) if there else np.eye(len(mean))

    embedding = w["token_embedding.weight"] * config.embed_scale @ norm("ln_embed")
    of = at[0], at[1] // (HEADS // config.n_kv_heads)
    read = norm("blocks.1.ln1")
    queries, keys = (read @ x.detach().numpy() for x in (model.W_Q[at], model.W_K[of]))
    outputs = model.W_V[of].detach().numpy() @ model.W_O[at].detach().numpy()
    logits = norm("blocks.1.ln1_post") @ norm("ln_final") @ model.W_U.detach().numpy()
    logits = logits @ centring(VOCAB) if fold and not config.logit_cap else logits
    distance = 0 if config.positions == "rotary" else None
    found, ov = full_circuits(model, *at, fold, distance), embedding @ read @ outputs @ logits
    close(found.qk.form(), embedding @ queries @ keys.T @ embedding.T)
    close(found.ov.form(), ov)
    values = np.linalg.eigvals(ov)
    close(copying_scores(model, fold).values[at], [values.real.sum() / abs(values).sum()])


@pytest.mark.parametrize("kind", ["pre", "output", "no norm", "like llama", "unembed bias"])
def test_token_directions_give_the_logits(kind):
    """The product of the normalised stream and the directions equals the logits.

    The biases of the final norm and of the unembedding are 0, and a number that is added to the
    logits of all tokens does not matter.
    """
    model, tokens = variant(kind), torch.tensor([[3, 11], [0, 22]])
    for bias in (getattr(model.ln_final, "bias", None), model.unembedding.bias):
        _ = bias is None or bias.data.zero_()
    logits, cache = run_with_cache(model, some_tokens())
    stream = cache["resid_post", -1]
    stream = stream / scales(cache, "ln_final.scale", stream)
    found = torch.einsum("bpm,jkm->bpjk", stream, token_directions(model, tokens))
    close(found, (logits - logits.mean(-1, keepdim=True))[..., tokens].detach())
    assert torch.equal(token_directions(model, tokens[0, 1], fold=False), model.W_U[:, 11])
    with pytest.raises(ValueError, match="tokens"):
        token_directions(model, -tokens)


def test_open_hooks_do_not_change_readings_of_weights():
    model = variant("like olmo 2")
    wanted = qk_circuit(model, distance=3).form(), ov_circuit(model).form()
    with HookedRunner(model).hooks(
        {"*.normalized": lambda x, point: x * 3, "*.scale": edits.zero()}
    ):
        close(qk_circuit(model, distance=3).form(), wanted[0])
        close(ov_circuit(model).form(), wanted[1])


def test_a_rotated_circuit_needs_a_distance_within_the_context():
    model = variant("rotary")
    for ask in (qk_circuit, lambda model, **options: composition_scores(model, "K", **options)):
        for wrong in (None, -1, N_CTX):
            with pytest.raises(ValueError, match="distance"):
                ask(model, distance=wrong)
    composition_scores(model, "V")


class SimpleModel(nn.Module):
    """A model without views of weights such as `W_Q`."""

    config = SimpleNamespace(n_heads=1, vocab_size=11)
    blocks = nn.ModuleList()


def test_norms_that_cannot_be_folded_are_errors():
    model = variant("post")
    for ask in (ov_circuit, qk_circuit, copying_scores):
        with pytest.raises(ValueError, match="fold=False"):
            ask(model)
    with pytest.raises(TypeError, match=r"W_V and W_O .*from_hf"):
        ov_circuit(SimpleModel())
    del (other := variant("pre")).blocks[1].ln1_post
    with pytest.raises(TypeError, match="ln1_post"):
        ov_circuit(other)
    ov_circuit(other, fold=False)
    other.blocks[1].ln1_post = nn.Tanh()
    with pytest.raises(TypeError, match="got Tanh"):
        ov_circuit(other)
    del other.blocks[1].attn.rotary
    with pytest.raises(TypeError, match="rotary"):
        qk_circuit(other, fold=False)


# --- composition -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
@pytest.mark.parametrize("changes", [{}, LLAMA])
def test_composition_scores_are_numpys(kind, changes):
    model = variant("pre", **changes, n_layers=3)
    distance = 4 if changes and kind != "V" else None
    ov = ov_circuit(model).form().numpy()
    later = ov if kind == "V" else qk_circuit(model, distance=distance).form().numpy()
    later = later.swapaxes(-1, -2) if kind == "K" else later
    found = composition_scores(model, kind, distance=distance)
    assert found.axes == ("layer", "head", "to_layer", "to_head", "example")
    wanted, norm = np.full(found.values.shape[:-1], np.nan), np.linalg.norm
    for at, to in itertools.product(np.ndindex(3, HEADS), repeat=2):
        if to[0] > at[0]:
            wanted[at + to] = norm(ov[at] @ later[to]) / (norm(ov[at]) * norm(later[to]))
    np.testing.assert_allclose(found.values[..., 0], wanted, atol=1e-12)


def test_random_heads_have_the_baseline():
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(400):
        a, b, c, d = (rng.standard_normal(size) for size in [(10, 8), (8, 10)] * 2)
        scores.append(np.linalg.norm(a @ b @ c @ d) / np.linalg.norm(a @ b) / np.linalg.norm(c @ d))
    about = composition_scores(variant("pre"), "K", draws=400).about
    assert abs(about["baseline"] - np.mean(scores)) < 5 * np.std(scores) / 20
    assert about["spread"] == pytest.approx(np.std(scores), rel=0.2)
    same, other = (composition_scores(variant("pre"), "Q", seed=seed).about for seed in (0, 1))
    assert same == composition_scores(variant("pre"), "Q").about
    assert same["baseline"] != other["baseline"]


def planted():
    """Return a model without norms. All weights are zero."""
    sizes = dict(vocab_size=7, n_ctx=13, n_layers=2, n_heads=2, d_head=7, d_model=20, d_mlp=3)
    model = Transformer(TransformerConfig(**sizes, norm="none", tied_unembed=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model.eval().double()


@torch.no_grad()
def test_a_head_that_reads_the_output_of_another_head_composes_with_it():
    model, eye = planted(), torch.eye(20).double()
    first, later = model.blocks[0].attn, model.blocks[1].attn
    first.W_V[1], first.W_O[1] = eye[:, :7], eye[7:14]
    first.W_V[0], first.W_O[0] = eye[:, :7], eye[:7]
    later.W_Q[0], later.W_K[0] = eye[:, :7], eye[:, 7:14]
    found = {kind: composition_scores(model, kind).values[0, :, 1, 0, 0] for kind in "QK"}
    close(found["Q"], [1 / 7**0.5, 0])
    close(found["K"], [0, 1 / 7**0.5])
    assert (
        composition_scores(model, "K").values[0, 0, 1, 1].isnan()
    )  # the weights of this head are 0


def test_an_unknown_kind_is_an_error(model, unchecked):
    with pytest.raises(ValueError, match="kind"):
        composition_scores(model, "q")
    with pytest.raises(ValueError, match="draws"):
        composition_scores(model, "Q", draws=1)
    with pytest.raises(ValueError, match="circuit"):
        singular_tokens(model, 1, 1, "vo")
    with pytest.raises(ValueError, match="k must"):
        singular_tokens(model, 1, 1, k=99)


# --- copying, positions, singular directions ---------------------------------------------------


@torch.no_grad()
def test_a_head_that_copies_scores_one():
    model, eye = planted(), torch.eye(20).double()
    model.W_E[:], model.W_U[:] = eye[:7], 3 * eye[:, 7:14]
    for layer, (outputs, score) in enumerate([(eye[:7], 1), (-eye[:7], -1)]):
        attention = model.blocks[layer].attn
        attention.W_V[:] = eye[:, :7]
        attention.W_O[0] = outputs @ eye.roll(7, 1)
        # Head 1 writes the next token modulo 7 instead of a copy.
        attention.W_O[1] = outputs.roll(1, 0) @ eye.roll(7, 1)
        close(copying_scores(model, fold=False).values[layer, :, 0], [score, 0])
    # With folded weights, logits have the mean 0, so a number that is added to all logits does not
    # matter.
    model.W_U[:] += torch.arange(20.0)[:, None]
    close(copying_scores(model).values[0, 0], [1])


def test_copying_between_two_vocabularies_is_refused():
    class Translating(SimpleModel):
        W_E, W_U = torch.ones(11, 5), torch.ones(5, 7)
        W_V = torch.ones(2, 1, 5, 3)
        W_O = torch.ones(2, 1, 3, 5)

    with pytest.raises(ValueError, match=r"11 and 7"):
        copying_scores(Translating(), fold=False)


@torch.no_grad()
def test_a_head_that_attends_to_the_previous_position_scores_one():
    model, eye = planted(), torch.eye(20).double()
    model.position_embedding.weight[:] = eye[:13]
    attention = model.blocks[1].attn
    attention.W_Q[0], attention.W_K[0] = 99 * eye[:, 1:8], 99 * eye[:, :7]
    found = positional_scores(model, n_pos=7).values[..., 0]
    assert found[1, 0] > 0.99
    close(found.flatten()[[0, 1, 3]], [np.mean(1 / np.arange(2, 8))] * 3, 1e-6)


@pytest.mark.parametrize("kind", ["pre", "post", "sinusoidal", "embed_norm", "like gemma 2"])
@pytest.mark.parametrize("back", [0, 2])
def test_positional_scores_are_the_reference_on_mean_embeddings(kind, back):
    model, n_pos = variant(kind), 11
    reference, config = Reference(model), model.config
    reference(np.zeros((1, n_pos), int))
    embed, pos_embed = reference.values["embed"], reference.values.get("pos_embed", 0)
    mean = reference.weights["token_embedding.weight"].mean(0) * config.embed_scale
    stream = np.broadcast_to(mean, embed.shape) + pos_embed
    stream = reference.norm(stream, "ln_embed") if config.embed_norm else stream
    found = positional_scores(model, back, n_pos)
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        read = reference.norm(stream, f"{at}.ln1") if config.norm_place != "post" else stream
        reference.attention(read, layer, None)
        pattern = reference.values[f"{at}.attn.pattern"][0]
        wanted = np.diagonal(pattern, -back, 1, 2).mean(-1)
        close(found.values[layer, :, 0], wanted, 2e-5)


def test_positions_that_are_not_there_are_refused(model):
    for back in (-1, 17):
        with pytest.raises(ValueError, match="back"):
            positional_scores(model, back, 17)
    with pytest.raises(ValueError, match="context"):
        positional_scores(model)


@pytest.mark.parametrize("circuit", ["ov", "qk"])
def test_singular_directions_are_read_out_at_both_ends(circuit):
    model = variant("pre", tied_unembed=False)
    made = ov_circuit(model) if circuit == "ov" else qk_circuit(model)
    u, s, vh = np.linalg.svd(made[1, 4].form().numpy())
    embedding, gain, logits = (
        x.detach().numpy() for x in (model.W_E, model.ln_final.weight, model.W_U)
    )
    out = (
        centring(10) @ np.diag(gain) @ logits @ centring(VOCAB) if circuit == "ov" else embedding.T
    )
    found = singular_tokens(model, 1, 4, circuit, k=3, top=5)
    close(found.s, s[:3])
    for k in range(3):
        read, written = embedding @ u[:, k], vh[k] @ out
        # A pair of singular vectors may have either sign.
        sign = np.sign(read[found.read[k, 0, 0]])
        for tokens, scores, products in [
            (found.read[k], found.read_scores[k], sign * read),
            (found.written[k], found.written_scores[k], sign * written),
        ]:
            ascending = products.argsort()
            assert tokens.tolist() == [ascending[::-1][:5].tolist(), ascending[:5].tolist()]
            close(scores, products[tokens.numpy()])


@pytest.mark.parametrize("kind", ["pre", "sandwich"])
@pytest.mark.parametrize("weights", ["W_in", "W_out"])
def test_singular_directions_of_an_mlp_are_tokens_and_neurons(weights, kind):
    model = variant(kind, tied_unembed=False)
    block = model.blocks[1]
    w_in, w_out, embedding, logits, before, final = (
        x.detach().numpy()
        for x in (
            *(block.mlp.W_in, block.mlp.W_out, model.W_E, model.W_U),
            *(block.ln2.weight, model.ln_final.weight),
        )
    )
    before, final = (norm.weight.detach().numpy() for norm in (block.ln2, model.ln_final))
    after = np.diag(block.ln2_post.weight.detach()) if kind == "sandwich" else np.eye(10)
    after = centring(10) @ after if kind == "sandwich" else after
    if weights == "W_in":
        matrix = centring(10) @ np.diag(before) @ w_in
        sides = embedding.T, np.eye(13)
    else:
        matrix = w_out @ after @ centring(10)
        sides = np.eye(13), centring(10) @ np.diag(final) @ logits @ centring(VOCAB)
    u, s, vh = np.linalg.svd(matrix)
    found = singular_tokens(model, 1, circuit=weights, k=3, top=20)
    close(found.s, s[:3])
    for k in range(3):
        read, written = u[:, k] @ sides[0], vh[k] @ sides[1]
        sign = np.sign(read[found.read[k, 0, 0]])
        for entries, scores, products in [
            (found.read[k], found.read_scores[k], sign * read),
            (found.written[k], found.written_scores[k], sign * written),
        ]:
            ascending, top = products.argsort(), min(20, len(products))
            assert entries.tolist() == [ascending[::-1][:top].tolist(), ascending[:top].tolist()]
            close(scores, products[entries.numpy()])


def test_wrong_arguments_of_singular_tokens_are_errors():
    model = variant("pre")
    for options in ({}, {"head": 1, "circuit": "W_in"}, {"circuit": "qk"}):
        with pytest.raises(ValueError, match="head must be"):
            singular_tokens(model, 1, **options)
    with pytest.raises(TypeError, match="mlp"):
        singular_tokens(variant("attention only sandwich"), 1, circuit="W_in")
    shown = repr(singular_tokens(pydoc(), 1, circuit="W_out", k=1))
    assert "+ 'n" in shown


def test_half_precision_is_read_in_float32():
    model = variant("like llama").bfloat16()
    wide = copy.deepcopy(model).double()
    for read in (
        lambda model: ov_circuit(model).form(),
        lambda model: qk_circuit(model, distance=9).form(),
        lambda model: copying_scores(model).values,
        lambda model: composition_scores(model, "V").values[0, :, 1],
    ):
        found = read(model)
        assert found.dtype in (torch.float32, torch.float64)
        close(found, read(wide), 1e-5)
