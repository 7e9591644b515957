"""`fold_norms` and `center`: the processed weights give the same probabilities, or an error."""

import re

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from models.processing import center, fold_norms
from tests.models.built import D_MODEL, VOCAB, built

GROUPED = dict(n_kv_heads=3)
BARE = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
LLAMA = dict(norm="rmsnorm", positions="rotary", mlp="gated", activation="silu") | BARE | GROUPED
NEOX = dict(positions="rotary", rotary_fraction=0.5, parallel=True, tied_unembed=False)

# Forms whose norms can be folded. The second value is True if their writes can also be centred.
FORMS = {
    "gpt2": ({}, True),
    "gpt2 untied": (dict(tied_unembed=False, dropout=0.3), True),
    "gpt_bigcode": (dict(n_kv_heads=1), True),
    "neox": (NEOX, True),
    "llama": (LLAMA | dict(tied_unembed=False), False),
    "qwen3": (LLAMA | dict(qk_norm="head", window=3), False),
    "mistral": (LLAMA | dict(window=3, window_layers=(1,)), False),
    "layernorm without bias": (dict(norm_bias=False), True),
    "layernorm, maps without bias": (BARE, True),
    "layernorm gated": (dict(mlp="gated") | BARE, True),
    "attention only": (dict(mlp="none") | BARE, True),
    "parallel rmsnorm": (dict(norm="rmsnorm", parallel=True), False),
    "grouped, all queries normalized": (GROUPED | dict(qk_norm="all"), True),
    "sinusoidal": (dict(positions="sinusoidal", embed_scale=3.0), True),
    "no positions": (dict(positions="none", unembed_bias=True, tied_unembed=False), True),
    "no final norm, biased": (dict(final_norm=False, unembed_bias=True), False),
    "no final norm, rmsnorm": (dict(final_norm=False, norm="rmsnorm"), False),
    "capped, unembedding biased": (dict(logit_cap=2.0, attn_cap=1.5, unembed_bias=True), True),
}
SEVERAL = ["gpt2", "neox", "qwen3", "attention only", "no final norm, biased"]
CENTRED = [form for form, (_, centred) in FORMS.items() if centred]


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (5, 9), generator=torch.Generator().manual_seed(1))


def log_probabilities(model, tokens):
    with torch.no_grad():
        logits = model(tokens).double().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def storages(model):
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def array(value):
    return value.detach().numpy()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((f, torch.float64) for f in FORMS), *((f, torch.float32) for f in SEVERAL)],
    ids=str,
)
def test_the_probabilities_stay_as_they_are(form, dtype, tokens):
    fields, can_be_centred = FORMS[form]
    single = dtype == torch.float32
    model = built(dtype, scale=0.3 if single else 0.5, **fields)
    expected = log_probabilities(model, tokens)
    for process in (fold_norms, center, both) if can_be_centred else (fold_norms,):
        found = log_probabilities(process(model), tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5 if single else 1e-11, rtol=0)


def both(model):
    folded, centred = center(fold_norms(model)), fold_norms(center(model))
    assert folded.config == centred.config
    return folded


@pytest.mark.parametrize("form", SEVERAL)
def test_the_given_model_is_untouched_and_shares_nothing(form):
    fields, can_be_centred = FORMS[form]
    model = built(**fields)
    config = model.config
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    for process in (fold_norms, center) if can_be_centred else (fold_norms,):
        new = process(model)
        assert not storages(new) & storages(model)
        assert len(storages(new)) == len(list(new.parameters()))
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.fill_(7)
    assert model.config is config
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.unembedding.weight is model.token_embedding.weight) == config.tied_unembed
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("form", FORMS)
def test_folded_norms_have_learned_nothing(form):
    model = built(**FORMS[form][0])
    old, folded = model.config, fold_norms(model)
    biased = old.norm == "layernorm" and old.norm_bias
    assert folded.config == old.replace(
        norm_learned=False,
        tied_unembed=old.tied_unembed and not old.final_norm,
        qkv_bias=old.qkv_bias or biased,
        mlp_bias=old.mlp_bias or (biased and old.mlp != "none"),
        unembed_bias=old.unembed_bias or (biased and old.final_norm),
    )
    assert all(block.ln1.weight is None for block in folded.blocks)
    assert getattr(folded.ln_final, "weight", None) is None
    learned = {name for name, _ in folded.named_parameters() if re.search(r"\bln", name)}
    assert not learned
    kept = {name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name}
    for name in kept:
        assert torch.equal(folded.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize("form", ["gpt2", "gpt_bigcode", "neox", "llama", "layernorm gated"])
def test_folded_weights_are_products(form):
    """The folded weights are computed by numpy from `(x * gain + bias) @ W + b`."""
    model = built(**FORMS[form][0])
    folded = fold_norms(model)
    has_bias = model.config.norm == "layernorm"

    def expected(norm, W, b):
        """Return the folded weight [..., d_model, out] and the folded bias [..., out]."""
        shift = array(norm.bias) if has_bias else np.zeros(D_MODEL)
        return np.diag(array(norm.weight)) @ array(W), shift @ array(W) + array(b)

    def same(W, b, norm, old_W, old_b):
        for found, wanted in zip((W, b), expected(norm, old_W, old_b), strict=True):
            np.testing.assert_allclose(array(found), wanted, atol=1e-13, rtol=0)

    for new, old in zip(folded.blocks, model.blocks, strict=True):
        for kind in "QKV":
            W, b = f"W_{kind}", f"b_{kind}"
            same(
                getattr(new.attn, W),
                getattr(new.attn, b),
                old.ln1,
                getattr(old.attn, W),
                getattr(old.attn, b),
            )
        same(new.mlp.W_in, new.mlp.b_in, old.ln2, old.mlp.W_in, old.mlp.b_in)
        if model.config.mlp == "gated":
            same(new.mlp.W_gate, new.mlp.b_gate, old.ln2, old.mlp.W_gate, old.mlp.b_gate)
        for part in ("attn.output", "mlp.output"):
            new_map, old_map = new.get_submodule(part), old.get_submodule(part)
            assert torch.equal(new_map.weight, old_map.weight)
            assert torch.equal(new_map.offset, old_map.offset)
    same(folded.W_U, folded.b_U, model.ln_final, model.W_U, model.b_U)
    assert torch.equal(folded.W_E, model.W_E)


def test_points_of_a_folded_model(tokens):
    """The stream is the same, and the outputs of norms have no gain and no bias."""
    model = built()
    _, old = HookedRunner(model).run_with_cache(tokens)
    _, new = HookedRunner(fold_norms(model)).run_with_cache(tokens)
    assert set(new) == set(old)
    for name in old:
        expected = new[name]
        if name.endswith("normalized"):
            norm = model.get_submodule(name.removesuffix(".normalized"))
            expected = expected * norm.weight + norm.bias
        torch.testing.assert_close(old[name], expected, atol=1e-11, rtol=0, msg=name)


@pytest.mark.parametrize("form", CENTRED)
def test_centred_weights_are_projections(form):
    model = built(**FORMS[form][0])
    config, new = model.config, center(model)
    out = np.eye(D_MODEL) - 1 / D_MODEL  # subtracts the mean of a vector of size d_model
    names = ["W_E", "W_O", "b_O"] + ["W_pos"] * (config.positions == "learned")
    for name in names + ["W_out", "b_out"] * (config.mlp != "none"):
        expected = array(getattr(model, name)) @ out
        np.testing.assert_allclose(array(getattr(new, name)), expected, atol=1e-14, rtol=0)
        assert np.abs(expected).max() > 0.1 or config.out_bias is False
    over_vocab = np.eye(VOCAB) if config.logit_cap else np.eye(VOCAB) - 1 / VOCAB
    for name in ("W_U", "b_U"):
        expected = array(getattr(model, name)) @ over_vocab
        np.testing.assert_allclose(array(getattr(new, name)), expected, atol=1e-13, rtol=0)
    assert new.config == config.replace(tied_unembed=False)
    written = re.compile(r"embedding|\.output\.|unembedding")
    for name, parameter in model.named_parameters():
        if not written.search(name):
            assert torch.equal(new.get_parameter(name), parameter), name


def test_centring_a_norm_of_the_embeddings_that_learned_nothing(tokens):
    model = built(embed_norm=True, norm_learned=False)
    new = center(model)
    expected = log_probabilities(model, tokens)
    np.testing.assert_allclose(log_probabilities(new, tokens), expected, atol=1e-11, rtol=0)


REFUSED = [
    (fold_norms, dict(norm="none"), "norm must be 'layernorm' or 'rmsnorm'"),
    (fold_norms, dict(norm_place="post"), "norm_place"),
    (fold_norms, LLAMA | dict(norm_place="output", qk_norm="all"), "norm_place"),  # OLMo 2
    (fold_norms, LLAMA | dict(norm_place="sandwich", attn_cap=3.0), "norm_place"),  # Gemma 2
    (fold_norms, dict(embed_norm=True), "embed_norm"),
    (center, dict(norm="none"), "norm must be 'layernorm'"),
    (center, LLAMA, "got 'rmsnorm'"),
    (center, dict(norm_place="post"), "norm_place"),
    (center, dict(norm_place="output"), "norm_place"),
    (center, dict(norm_place="sandwich"), "norm_place"),
    (center, dict(final_norm=False), "final_norm"),
    (center, dict(embed_norm=True), "embed_norm"),
]


@pytest.mark.parametrize(("process", "fields", "words"), REFUSED)
def test_processing_that_would_change_the_probabilities_is_an_error(process, fields, words):
    with pytest.raises(ValueError, match=words):
        process(built(**fields))


UNLEARNED = [
    dict(norm="rmsnorm", norm_place="sandwich"),
    dict(norm_place="post"),
    dict(embed_norm=True),
]


@pytest.mark.parametrize("fields", UNLEARNED)
def test_norms_that_learned_nothing_are_copied(fields):
    model = built(norm_learned=False, **fields)
    copy = fold_norms(model)
    assert copy.config == model.config
    assert (copy.unembedding.weight is copy.token_embedding.weight) == model.config.tied_unembed
    assert not storages(copy) & storages(model)
    assert copy.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value)


@pytest.mark.parametrize("process", [fold_norms, center])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_is_kept(process, dtype, tokens):
    model = built(dtype, scale=0.3)
    new = process(model)
    assert {parameter.dtype for parameter in new.parameters()} == {dtype}
    expected = log_probabilities(model, tokens)
    # The tolerance is about six digits in float32. In half precision, the processed weights are
    # rounded again.
    near = 30 * torch.finfo(dtype).eps
    np.testing.assert_allclose(log_probabilities(new, tokens), expected, atol=near, rtol=near)


def test_half_precision_is_rounded_once():
    model = built(torch.bfloat16)
    gain, W = model.blocks[1].ln2.weight.double(), model.blocks[1].mlp.input.weight.double()
    bias = model.blocks[1].ln2.bias.double() @ W.T + model.blocks[1].mlp.input.bias.double()
    folded = fold_norms(model).blocks[1].mlp.input
    assert torch.equal(folded.weight, (W * gain).bfloat16())
    torch.testing.assert_close(folded.bias, bias.bfloat16(), atol=0, rtol=2**-8)
    rows = model.W_E.double()
    expected = (rows - rows.mean(-1, keepdim=True)).bfloat16()
    torch.testing.assert_close(center(model).W_E, expected, atol=1e-7, rtol=2**-8)


@pytest.mark.parametrize(("process", "training"), [(fold_norms, True), (center, False)])
def test_the_mode_and_frozen_weights_are_kept(process, training):
    model = built(**BARE, dropout=0.4).train(training)
    model.blocks[0].eval()
    model.requires_grad_(False)
    model.blocks[1].attn.requires_grad_(True)
    modes = [module.training for module in model.modules()]
    new = process(model)
    assert [module.training for module in model.modules()] == modes
    assert {module.training for module in new.modules()} == {training}
    assert new.config.dropout == 0.4
    trained = {name for name, p in new.named_parameters() if p.requires_grad}
    expected = {"blocks.1.attn.qkv.weight", "blocks.1.attn.output.weight"}
    assert trained == expected | ({"blocks.1.attn.qkv.bias"} if process is fold_norms else set())


@pytest.mark.parametrize("process", [fold_norms, center])
def test_a_model_that_is_not_its_config_is_noticed(process, monkeypatch):
    model = built()
    plain = model.blocks[1].mlp.forward
    monkeypatch.setattr(model.blocks[1].mlp, "forward", lambda x: plain(x) * 1.01)
    with pytest.raises(RuntimeError, match=process.__name__):
        process(model)


@pytest.mark.parametrize("process", [fold_norms, center])
def test_nan_is_noticed(process):
    model = built()
    with torch.no_grad():
        model.blocks[1].mlp.output.bias[0] = torch.nan
    with pytest.raises(RuntimeError, match="nan"):
        process(model)


@pytest.mark.parametrize("process", [fold_norms, center])
def test_autocast_of_the_caller_is_not_the_models_fault(process):
    with torch.autocast("cpu", torch.bfloat16):  # the check runs in float64, without autocast
        process(built(torch.float32))
