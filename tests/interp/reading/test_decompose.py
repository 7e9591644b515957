"""Streams and logits as sums of components, compared with the same sums in numpy."""

import copy
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from hooks import CacheError, HookedRunner, UnknownNameError
from interp import (
    accumulated_logits,
    apply_norm,
    decompose,
    direct_logit_attribution,
    edits,
    head_scores,
    logit_lens,
    run_with_cache,
    svd_targets,
)
from models import attach
from tests.largest import Largest
from tests.reference import VARIANTS, VOCAB, Reference, some_tokens, tolerance, variant
from tests.shipped import pydoc

SUMS = [name for name in VARIANTS if name != "post"]
BATCH, POS = 3, 5
TOKENS, RIGHT, WRONG = (some_tokens(seed, (BATCH, POS)) for seed in (1, 2, 3))


class Parts:
    """The outputs of all components of a model, in numpy, and their contributions to logits."""

    def __init__(self, model, tokens=TOKENS):
        self.config, self.reference = model.config, Reference(model)
        self.logits = self.reference(tokens)
        self.values, self.weights = self.reference.values, self.reference.weights
        self.parts, self.neurons = {}, {}
        embeds = {name: self.values[name] for name in ("embed", "pos_embed") if name in self.values}
        self.add(self.parts, embeds, "ln_embed", 0.0, "input.bias")
        for layer in range(model.config.n_layers):
            at, sums = f"blocks.{layer}", self.parts
            z, weight = self.values[f"{at}.attn.z"], self.weights[f"{at}.attn.output.weight"]
            width = model.config.d_head
            heads = {
                f"a{layer}.h{h}": z[:, :, h] @ weight[:, h * width : (h + 1) * width].T
                for h in range(model.config.n_heads)
            }
            bias = self.weights.get(f"{at}.attn.output.bias", 0.0)
            self.add(sums, heads, f"{at}.ln1_post", bias, f"a{layer}.bias")
            if model.config.mlp == "none":
                continue
            sums[f"m{layer}"] = self.values[f"{at}.mlp_out"]
            post, weight = self.values[f"{at}.mlp.post"], self.weights[f"{at}.mlp.output.weight"]
            neurons = {
                f"m{layer}.n{n}": post[:, :, n, None] * weight[:, n] for n in range(len(weight.T))
            }
            bias = self.weights.get(f"{at}.mlp.output.bias", 0.0)
            self.add(self.neurons, neurons, f"{at}.ln2_post", bias, f"m{layer}.bias")

    def through(self, x, at):
        if f"{at}.scale" not in self.values:
            return x
        if self.config.norm == "layernorm":
            x = x - np.mean(x, -1, keepdims=True)
        return x / self.values[f"{at}.scale"] * self.weights.get(f"{at}.weight", 1.0)

    def add(self, sums, written, at, bias, rest):
        sums |= {name: self.through(x, at) for name, x in written.items()}
        vector = bias + np.zeros(next(iter(written.values())).shape)
        vector = self.through(vector, at)
        if f"{at}.scale" in self.values:
            vector = vector + self.weights.get(f"{at}.bias", 0.0)
        if np.any(vector):
            sums[rest] = vector

    def expanded(self):
        """Return the components, with neurons instead of MLPs."""
        kept = {name: x for name, x in self.parts.items() if not name.startswith("m")}
        return kept | self.neurons

    def along(self, parts, directions):
        """Return the contributions of components along directions [batch, pos, d_model].

        The directions are in the space that the unembedding reads, after the final norm.
        """
        found = {
            name: (self.through(x, "ln_final") * directions).sum(-1) for name, x in parts.items()
        }
        bias = self.weights.get("ln_final.bias")
        return found if bias is None else found | {"ln_final.bias": directions @ bias}

    def difference(self, parts):
        rows, bias = self.weights["unembedding.weight"], self.weights.get("unembedding.bias")
        found = self.along(parts, rows[RIGHT] - rows[WRONG])
        return found if bias is None else found | {"unembed.bias": bias[RIGHT] - bias[WRONG]}


def close(found, expected, config, size=None):
    expected = torch.as_tensor(np.asarray(expected))
    size = expected.abs().max() if size is None else size
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(config) * float(size))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SUMS)
def test_parts_match_numpy_and_add_up(name):
    model = variant(name)
    config, by_hand = model.config, Parts(model)
    logits, eager = run_with_cache(model, TOKENS)
    _, lazy = run_with_cache(model, TOKENS, lazy=True)
    streams = [by_hand.values[f"blocks.1.{point}"] for point in ("resid_pre", "resid_post")]
    picked = (logits.gather(-1, tokens[..., None])[..., 0] for tokens in (RIGHT, WRONG))
    difference = (next(picked) - next(picked)).T
    for neurons, cache in ((False, eager), (True, lazy)):
        wanted = by_hand.expanded() if neurons else by_hand.parts
        found = decompose(model, cache, neurons=neurons)
        assert set(found.names) == wanted.keys()
        close(found.values.sum(0), streams[1], config)
        close(
            found.values, [wanted[part] for part in found.names], config, np.abs(streams[1]).max()
        )
        found = decompose(model, cache, before=1, neurons=neurons)
        assert set(found.names) == {n for n in wanted if not n.startswith(("a1", "m1"))}
        close(found.values.sum(0), streams[0], config)
        if config.logit_cap:
            continue
        wanted = by_hand.difference(wanted)
        found = direct_logit_attribution(model, cache, right=RIGHT, wrong=WRONG, neurons=neurons)
        assert (found.axes, found.unit) == (("component", "pos", "example"), "logits")
        assert set(found.labels["component"]) == wanted.keys()
        expected = torch.from_numpy(np.stack([wanted[c].T for c in found.labels["component"]]))
        close(found.values, expected, config)
        assert (found.values.sum(0) - difference).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize(
    "name", ["post", "sandwich", "parallel", "unembed bias", "no norm", "attention only"]
)
def test_the_stream_up_to_each_layer_has_the_logits_of_numpy(name):
    model = variant(name)
    by_hand = Parts(model)
    logits, cache = run_with_cache(model, TOKENS)
    found = accumulated_logits(model, cache, right=RIGHT, wrong=WRONG)
    points = {"0_pre": "0.resid_pre", "0_mid": "0.resid_mid", "1_pre": "1.resid_pre"}
    points |= {"1_mid": "1.resid_mid", "final_post": "1.resid_post"}
    streams = {label: by_hand.values.get(f"blocks.{point}") for label, point in points.items()}
    streams = {label: stream for label, stream in streams.items() if stream is not None}
    assert found.labels["stream"] == tuple(streams)
    wanted = [sum(by_hand.difference({"all": stream}).values()).T for stream in streams.values()]
    close(found.values, wanted, model.config)
    difference = logits.gather(-1, RIGHT[..., None]) - logits.gather(-1, WRONG[..., None])
    close(found.values[-1], difference[..., 0].T.numpy(force=True), model.config)


FAMILIES = ("gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox sequential", "llama", "mistral", "qwen2")
FAMILIES += ("qwen3", "olmo2 biased", "gemma2 uncapped", "opt")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", FAMILIES)
def test_parts_add_up_to_the_logits_of_transformers(row, tmp_path):
    pytest.importorskip("transformers")
    from tests.models.checkpoints.pair import VOCAB, Pair

    pair, tokens = Pair(row, tmp_path), torch.randint(VOCAB, (2, 11))
    theirs = pair.reference(tokens)
    stream, middle = (theirs[f"blocks.{layer}.resid_post"] for layer in (2, 0))
    logit, found = theirs["logits"][..., 7].T, []
    for model in (pair.ours, pair.theirs):
        with attach(model) if model is pair.theirs else nullcontext():
            _, cache = run_with_cache(model, tokens)
            sums = [
                decompose(model, cache, neurons=True).values.sum(0),
                decompose(model, cache, before=1).values.sum(0),
                direct_logit_attribution(model, cache, right=7).values.sum(0),
                accumulated_logits(model, cache, right=7).select(stream="final_post").values,
            ]
            for ours, expected in zip(sums, (stream, middle, logit, logit), strict=True):
                atol = 1e-5 * expected.abs().max().item()
                torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
            found.append(direct_logit_attribution(model, cache, right=7, neurons=True))
    assert found[0].labels == found[1].labels
    torch.testing.assert_close(
        *(f.values for f in found), rtol=0, atol=1e-5 * float(logit.abs().max())
    )


@torch.no_grad()
def test_attached_models_of_families_without_a_table_or_with_a_cap():
    pytest.importorskip("transformers")
    from tests.attachable import made

    for name in ("phi3", "granite", "cohere"):
        model = made(name)
        logits = model(TOKENS).logits
        with attach(model):
            _, cache = run_with_cache(model, TOKENS)
            parts = direct_logit_attribution(model, cache, right=3, wrong=5)
        difference = (logits[..., 3] - logits[..., 5]).T
        torch.testing.assert_close(parts.values.sum(0), difference, rtol=0, atol=1e-5)
    with attach(model := made("gemma2")):
        _, cache = run_with_cache(model, TOKENS)
        for reading in (direct_logit_attribution, accumulated_logits):
            with pytest.raises(ValueError, match="cap"):
                reading(model, cache, right=3)


# The map that reads the hidden layer, and a number that multiplies its output. GLM 4 has a norm
# after the MLP.
OUTPUT_MAPS = {
    "phi3": ("down_proj", 1.0),
    "granite": ("down_proj", 0.22),
    "cohere": ("down_proj", 1.0),
    "starcoder2": ("c_proj", 1.0),
    "glm4": ("down_proj", 1.0),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", OUTPUT_MAPS)
def test_neurons_of_attached_models_of_families_without_a_table(kind):
    pytest.importorskip("transformers")
    from tests.attachable import config_of, made

    name, factor = OUTPUT_MAPS[kind]
    config = config_of(kind)
    if kind == "granite":
        config.residual_multiplier = factor
    model = made(kind, config=config)
    block = model.model.layers[1]
    output_map = getattr(block.mlp, name)
    read = []
    handle = output_map.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    model(TOKENS)
    handle.remove()
    (hidden,) = read
    neuron = hidden[..., 4, None] * output_map.weight[:, 4] * factor
    if kind == "glm4":
        norm = block.post_mlp_layernorm
        whole = output_map(hidden)
        scale = whole.pow(2).mean(-1, keepdim=True).add(norm.variance_epsilon).rsqrt()
        neuron = neuron * scale * norm.weight
    attach(model)
    _, cache = run_with_cache(model, TOKENS)
    parts = decompose(model, cache, neurons=True)
    found = parts.values[parts.names.index("m1.n4")]
    torch.testing.assert_close(found, neuron, rtol=0, atol=1e-5 * float(neuron.abs().max()))
    torch.testing.assert_close(parts.values.sum(0), cache["resid_post", -1], rtol=0, atol=1e-4)


@torch.no_grad()
def test_experts_are_not_divided_into_neurons():
    pytest.importorskip("transformers")
    from tests.attachable import made

    model = made("olmoe")
    attach(model)
    _, cache = run_with_cache(model, TOKENS)
    with pytest.raises(ValueError, match="block 0 must have a hidden layer"):
        decompose(model, cache, neurons=True)


WIDTHS = {
    "llama": dict(hidden_size=12, num_attention_heads=3, intermediate_size=20),
    "gpt2": dict(n_embd=12, n_head=3),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n_layers", [12, 24])
@pytest.mark.parametrize("family", WIDTHS)
def test_deep_runs_in_bfloat16_are_right(family, n_layers):
    """With the default initialisation, components are small compared with the stream, so rounding
    of the stream in bfloat16 is large for them. `decompose` must not take it for a mistake.
    """
    transformers = pytest.importorskip("transformers")
    sizes = WIDTHS[family] | dict(vocab_size=VOCAB, num_hidden_layers=n_layers)
    config = transformers.AutoConfig.for_model(family, **sizes, bos_token_id=0, eos_token_id=0)
    for seed in range(3):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
        with attach(model):
            logits, cache = run_with_cache(model, TOKENS)
            parts = decompose(model, cache).values
            found = direct_logit_attribution(model, cache, right=RIGHT).values
        stream = cache["resid_post", -1].float()
        assert (parts.sum(0) - stream).abs().max() < 0.1 * stream.abs().max()
        wanted = logits.logits.float().gather(-1, RIGHT[..., None])[..., 0].T
        assert (found.sum(0) - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_attached_models_whose_norms_compute_in_float32(name):
    pytest.importorskip("transformers")
    from tests.attachable import made

    model = made(name).double()
    with attach(model):
        _, cache = run_with_cache(model, TOKENS)
        parts, stream = decompose(model, cache), cache["resid_post", -1]
    assert stream.dtype == torch.float64
    torch.testing.assert_close(
        parts.values.sum(0), stream, rtol=0, atol=1e-5 * stream.abs().max().item()
    )


@pytest.mark.parametrize("name", ["pre", "sandwich", "like llama", "embed_norm"])
def test_parts_of_bfloat16_add_up_to_rounding(name):
    """The components add up to the stream, to 1% of the largest value.

    The stream is rounded after each addition, and the components are not.
    """
    model = variant(name).bfloat16()
    logits, cache = run_with_cache(model, TOKENS)
    stream = cache["resid_post", -1].float()
    for neurons in (False, True):
        parts = decompose(model, cache, neurons=neurons).values
        assert parts.dtype == torch.float32
        assert (parts.sum(0) - stream).abs().max() < 0.01 * stream.abs().max()
    found = direct_logit_attribution(model, cache, right=RIGHT)
    wanted = logits.gather(-1, RIGHT[..., None])[..., 0].float().T
    assert (found.values.sum(0) - wanted).abs().max() < 0.02 * found.values.abs().max()
    assert 0 < found.about["gap"] < 0.02 * found.values.abs().max()


def test_tokens_and_directions_of_all_examples_of_each_and_of_each_position():
    model = variant("unembed bias")
    _, cache = run_with_cache(model, TOKENS)
    whole = direct_logit_attribution(model, cache, right=RIGHT).values
    for column in (3, -2):
        own, by_row = RIGHT[:, column], torch.full((BATCH,), column)
        for pos in (column, by_row):
            found = direct_logit_attribution(model, cache, right=own, pos=pos)
            assert found.axes == ("component", "example")
            torch.testing.assert_close(found.values, whole[:, column])
    by_example = direct_logit_attribution(model, cache, right=RIGHT[:, 0]).values
    for row in range(BATCH):
        one = direct_logit_attribution(model, cache, right=int(RIGHT[row, 0])).values
        torch.testing.assert_close(by_example[..., row], one[..., row])
    # The direction of a token is its column of the unembedding. The product of the final norm's
    # output with this direction is the token's logit without the bias.
    columns = model.W_U.detach()[:, RIGHT].movedim(0, -1)
    for direction in (columns, columns[:, 2], columns[1, 2]):
        shared = direction.expand(BATCH, POS, -1) if direction.ndim != 2 else direction[:, None]
        logit = (cache["ln_final.normalized"] * shared).sum(-1)
        found = direct_logit_attribution(model, cache, vector=direction)
        torch.testing.assert_close(found.values.sum(0), logit.T)
        assert "unembed.bias" not in found.labels["component"]
    capped = variant("logit_cap")
    _, cache = run_with_cache(capped, TOKENS)
    found = direct_logit_attribution(capped, cache, vector=capped.W_U[:, 5])
    assert found.unit == "product with the vector"
    logit = cache["ln_final.normalized"] @ capped.W_U[:, 5]
    torch.testing.assert_close(found.values.sum(0), logit.T.detach())


def test_the_last_position_is_the_last_real_token(model, tokens):
    mask = torch.ones_like(tokens)
    mask[1, :2] = mask[2, -3:] = 0
    last = torch.tensor([6, 6, 3, 6][: len(tokens)])
    _, cache = run_with_cache(model, tokens, attention_mask=mask)
    whole = direct_logit_attribution(model, cache, right=3).values
    found = direct_logit_attribution(model, cache, right=3, pos=-1).values
    torch.testing.assert_close(found, whole[:, last, range(len(tokens))])
    with pytest.raises(ValueError, match="padding"):
        direct_logit_attribution(model, cache, right=3, pos=5)


@pytest.mark.parametrize("name", ["pre", "rmsnorm", "sandwich", "parallel", "post", "no norm"])
def test_normalized_parts_add_up_to_the_value_that_was_read(name):
    model = variant(name)
    _, cache = run_with_cache(model, TOKENS, mode="full")
    layer, norm = 1, model.blocks[1]
    for mlp, module, point in ((False, norm.ln1, "ln1"), (True, norm.ln2, "ln2")):
        stream = cache["resid_mid" if mlp and name != "parallel" else "resid_pre", layer]
        parts = torch.stack([stream * 0.25, stream * 0.75])
        read = apply_norm(model, cache, parts, layer, mlp=mlp).sum(0)
        normed = name not in ("post", "no norm")
        expected = cache[f"{point}.normalized", layer] if normed else stream
        bias = getattr(module, "bias", None) if normed else None
        torch.testing.assert_close(read if bias is None else read + bias, expected)
    last = apply_norm(model, cache, cache["resid_post", -1])
    logits = (last + getattr(model.ln_final, "bias", torch.zeros(1).double())) @ model.W_U
    bias = 0 if model.b_U is None else model.b_U
    torch.testing.assert_close(logits + bias, model(TOKENS).detach())


def test_vectors_that_no_sublayer_reads_are_refused(unchecked):
    model = variant("attention only sandwich")
    _, cache = run_with_cache(model, TOKENS, mode="full")
    stream = cache["resid_pre", 1]
    for values, layer, mlp, said in (
        (stream, 1, True, "with an MLP"),
        (stream, 2, False, "0 to 1"),
        (stream[:1], 1, False, "batch, pos, d_model"),
        (stream[0, 0], 1, False, "batch, pos, d_model"),
    ):
        with pytest.raises(ValueError, match=said):
            apply_norm(model, cache, values, layer, mlp=mlp)
    lacking = run_with_cache(model, TOKENS, names="*.resid_*")[1]
    with pytest.raises(CacheError, match=r"ln1\.scale"):
        apply_norm(model, lacking, stream, 1)


def test_a_decomposition_prints_its_sizes_and_names(model, tokens):
    _, cache = run_with_cache(model, tokens, mode="full")
    assert len(repr(decompose(model, cache, neurons=True))) < 300
    stream = decompose(model, cache, before=0)
    sizes = (
        f"component 2, batch {len(tokens)}, pos {tokens.shape[1]}, d_model {model.config.d_model}"
    )
    assert repr(stream) == f"Decomposition [{sizes}]: embed, pos_embed"


def test_some_positions_and_inference_mode_give_the_same(model, tokens):
    _, cache = run_with_cache(model, tokens)
    whole = direct_logit_attribution(model, cache, right=3).values
    with torch.inference_mode():
        _, part = run_with_cache(model, tokens, pos=[2, -1])
        found = direct_logit_attribution(model, part, right=3).values
    torch.testing.assert_close(found, whole[:, [2, -1]])
    assert not found.requires_grad


@pytest.mark.parametrize("form", ["pre", "sandwich"])
def test_no_output_of_a_head_and_no_logits_are_made(form):
    heads, d_model, shape = 6, 60, (5, 13)
    model = variant(form, n_heads=heads, d_head=2, d_model=d_model, vocab_size=113)
    text = torch.randint(113, shape)
    _, cache = run_with_cache(model, text)
    with Largest() as largest:
        direct_logit_attribution(model, cache, right=text, wrong=3)
    # The largest tensor contains the two embeddings. No tensor has an axis of all heads.
    assert largest.elements <= 2 * text.numel() * d_model < heads * text.numel() * d_model


def test_caches_and_targets_that_do_not_fit(model, tokens, unchecked):
    _, cache = run_with_cache(model, tokens)
    names = ["embed", "pos_embed", "*.z", "*.mlp_out", "*.resid_*", "ln_final.scale"]
    _, enough = run_with_cache(model, tokens, names=names)
    expected = direct_logit_attribution(model, cache, right=3).values
    torch.testing.assert_close(direct_logit_attribution(model, enough, right=3).values, expected)
    for lacking in names:
        _, few = run_with_cache(model, tokens, names=[n for n in names if n != lacking])
        with pytest.raises(CacheError, match=r"blocks\.\*\.attn\.z.*ln_final\.scale"):
            direct_logit_attribution(model, few, right=3), accumulated_logits(model, few, right=3)
    with pytest.raises(CacheError, match=r"blocks\.\*\.mlp\.post"):
        decompose(model, enough, neurons=True)
    wrong = [
        {},
        {"right": 3, "vector": torch.ones(10)},
        {"wrong": 3, "vector": torch.ones(10)},
        {"right": 23},
        {"right": -1},
        {"right": 3, "wrong": torch.zeros(5, dtype=torch.long)},
        {"right": torch.zeros(4, 6, dtype=torch.long)},
        {"vector": torch.ones(5, 10)},
        {"vector": torch.ones(11)},
        {"right": 3, "pos": 7},
        {"right": 3, "pos": torch.tensor([1, 2, 3, -8])},
        {"right": torch.zeros_like(tokens), "pos": 2},
    ]
    for options in wrong:
        for reading in (direct_logit_attribution, accumulated_logits):
            with pytest.raises(ValueError, match=r"right|wrong|vector|tokens|pos"):
                reading(model, cache, **options)
    for before in (-1, 3):
        with pytest.raises(ValueError, match="before"):
            decompose(model, cache, before=before)
    with pytest.raises(UnknownNameError, match=r"a1\.h1"):
        decompose(model, cache)["a1.1"]
    capped = variant("logit_cap")
    _, cache = run_with_cache(capped, TOKENS)
    for reading in (direct_logit_attribution, accumulated_logits):
        with pytest.raises(ValueError, match="cap"):
            reading(capped, cache, right=3)


def test_a_cache_of_another_run_is_refused(model, tokens, unchecked):
    changed = {"blocks.1.attn_out": edits.scale(2.0)}
    with HookedRunner(model).hooks(changed):
        _, cache = run_with_cache(model, tokens)
    for reading in (decompose, lambda *given: direct_logit_attribution(*given, right=3)):
        with pytest.raises(CacheError, match="add up"):
            reading(model, cache)
    _, cache = run_with_cache(model, tokens)
    # PyTorch does not count this write.
    model.blocks[0].attn.output.weight.data[1] *= 1.5
    for reading in (decompose, lambda *given: direct_logit_attribution(*given, right=3)):
        with pytest.raises(CacheError, match="add up"):
            reading(model, cache)
    lens = partial(logit_lens, targets=tokens)
    targeted = partial(direct_logit_attribution, right=3), partial(accumulated_logits, right=3)
    readings = (decompose, *targeted, head_scores, lens, svd_targets)
    with torch.no_grad():
        model.blocks[0].attn.output.weight[1] *= 1.5
    for reading in readings:
        with pytest.raises(CacheError, match="before blocks.0.attn.output.weight was changed"):
            reading(model, cache)
    _, cache = run_with_cache(model, tokens)
    torch.manual_seed(5)
    other = type(model)(model.config).eval()
    for reading in readings:
        reading(model, cache)
        for one, said in ((other, "weights hash"), (variant("gated"), "config hash")):
            with pytest.raises(CacheError, match=said):
                reading(one, cache)
    for wrong in (-1, VOCAB):
        with pytest.raises(ValueError, match=f"targets.*{wrong}"):
            logit_lens(model, cache, targets=torch.full_like(tokens, wrong))
    for part in ({"batch": 0}, {"pos": -1}):
        with pytest.raises(CacheError, match="batch, pos, d_model"):
            decompose(model, cache.at(**part))
    post = variant("post")
    _, cache = run_with_cache(post, TOKENS)
    with pytest.raises(ValueError, match="post"):
        decompose(post, cache)
    assert post.config.vocab_size == VOCAB


def test_values_that_users_of_transformer_lens_look_for(model, tokens):
    """Values that users of TransformerLens look for, compared with their definitions."""
    logits, cache = run_with_cache(model, tokens)
    right, wrong = tokens.roll(-1, 1), tokens.roll(-2, 1)
    heads = torch.einsum("bphe,hed->hbpd", cache["z", 1], model.W_O[1])
    neuron = cache["post", 1][..., 3, None] * model.W_out[1, 3]
    direction = (model.W_U[:, right] - model.W_U[:, wrong]).movedim(0, -1).detach()
    along = (cache["ln_final.normalized"] * direction).sum(-1)
    picked = (logits.gather(-1, tokens[..., None])[..., 0] for tokens in (right, wrong))
    difference = next(picked) - next(picked)
    rows = {
        'decompose(model, cache)["m2"]': cache["mlp_out", 2],
        'decompose(model, cache, before=2)["a1.h1"]': heads[1],
        'decompose(model, cache, neurons=True)["m1.n3"]': neuron,
        'cache.stack("mlp_out")[2]': cache["mlp_out", 2],
        'cache.stack("resid_pre")[1]': cache["resid_post", 0],
        "accumulated_logits(model, cache, right=right, wrong=wrong).values[-1].T": difference,
        (
            "direct_logit_attribution(model, cache, right=right, wrong=wrong).values.sum(0).T"
        ): difference,
        "direct_logit_attribution(model, cache, vector=direction).values.sum(0).T": along,
    }
    names = {**globals(), **locals()}
    for row, expected in rows.items():
        torch.testing.assert_close(eval(row, names), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_answer_of_several_tokens_is_a_sum_over_its_positions(side):
    model = copy.deepcopy(pydoc()).double()
    texts = ["Return the list", "a list"]
    text = model.to_tokens(texts, side=side)
    logits, cache = HookedRunner(model).run_with_cache(
        text.tokens, attention_mask=text.attention_mask, lazy=True
    )
    result = direct_logit_attribution(model, cache, right=" list")
    answer = model.to_tokens(" list", bos=False).tokens[0]
    gains = model.ln_final.weight[:, None] * model.W_U[:, answer]
    for row, is_real in enumerate(text.real):
        # The positions before each token of the answer.
        columns = is_real.nonzero()[:, 0][-len(answer) - 1 : -1]
        total = logits[row, columns, answer].sum()
        torch.testing.assert_close(result.values[:, row].sum(), total)
        scale = cache["ln_final.scale"][row, columns]
        out = cache["mlp_out", 2][row, columns]
        # LayerNorm subtracts the mean of the stream.
        centred = out - out.mean(1, keepdim=True)
        expected = (centred / scale * gains.T).sum()
        torch.testing.assert_close(result.select(component="m2").values[row], expected)
    with pytest.raises(ValueError, match="must end with the answer.*' item'.*text 0"):
        direct_logit_attribution(model, cache, right=" item")
    with pytest.raises(ValueError, match="pos must be left out.*pos=-1"):
        direct_logit_attribution(model, cache, right=" list", pos=-1)
