"""`verify`: correct models pass.

For a broken model, the error names the identity that it breaks.
"""

import pytest
import torch

from hooks import HookedRunner
from models import Transformer
from models.checkpoints import load
from models.running.kvcache import LayerCache
from models.verification import VerificationError, random_tokens, verify
from tests.models.built import built

ROTARY = dict(positions="rotary", n_kv_heads=2)
LLAMA = ROTARY | dict(norm="rmsnorm", mlp="gated", activation="silu", mlp_bias=False)
FORMS = {
    "gpt2": {},
    "gpt2 unlearned": dict(norm_learned=False, dropout=0.4),
    "neox": dict(positions="rotary", rotary_fraction=0.5, parallel=True, tied_unembed=False),
    "llama": LLAMA,
    "qwen3": LLAMA | dict(qk_norm="head"),
    "mistral": LLAMA | dict(window=3),
    "olmo2": LLAMA | dict(norm_place="output", qk_norm="all"),
    "gemma2": LLAMA
    | dict(norm_place="sandwich", attn_cap=2.0, logit_cap=3.0, window=5, window_layers=(0, 2)),
    "post": dict(norm_place="post"),
    "parallel sandwich": dict(parallel=True, norm_place="sandwich"),
    "attention only": dict(mlp="none"),
    "attention only, output norm": dict(mlp="none", norm_place="output"),
    # Use smaller weights, because without norms the values and their rounding errors grow too much.
    "no norm": dict(norm="none", qkv_bias=False, out_bias=False, scale=0.2),
    "embeddings normalized": dict(embed_norm=True, norm="rmsnorm", positions="sinusoidal"),
    "no positions": dict(positions="none", final_norm=False),
    "one position": dict(n_ctx=1),
    "three positions": dict(n_ctx=3, n_layers=1),
}


def refused(model, *said):
    """Check that `verify` raises an error that contains the given texts."""
    with pytest.raises(VerificationError) as caught:
        verify(model)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
def test_sound_models_pass(form):
    assert verify(built(torch.float32, **FORMS[form])) is None


@pytest.mark.parametrize("form", FORMS)
def test_the_forward_adds_the_branches(form, monkeypatch):
    model = built(torch.float64, **FORMS[form])
    runner, tokens = HookedRunner(model), random_tokens(model)
    _, expected = runner.run_with_cache(tokens)
    for block in model.blocks:
        monkeypatch.setattr(block, "forward", adds(block))
    _, found = runner.run_with_cache(tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10 * value.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["gpt2", "gemma2"])
def test_sound_models_pass_in_every_dtype(form, dtype):
    verify(built(dtype, **FORMS[form]))


def test_autocast_of_the_caller_is_not_the_models_fault():
    with torch.autocast("cpu", torch.bfloat16):  # the check runs in float64, without autocast
        verify(built(torch.float32, **FORMS["gpt2"]))


def test_the_model_that_ships_passes_when_it_is_loaded(monkeypatch):
    assert isinstance(load("pydoc-4l", verify=True), Transformer)
    monkeypatch.setattr(LayerCache, "store", rolled)
    with pytest.raises(VerificationError, match="in pieces"):
        load("pydoc-4l", verify=True)
    load("pydoc-4l")


def test_the_model_is_left_as_it_was(monkeypatch):
    model = built(dropout=0.4).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    verify(model)
    monkeypatch.setattr(model.blocks[2], "forward", adds(model.blocks[2], mlp=2))
    with pytest.raises(VerificationError):
        verify(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def rows_mixed(x):
    """A wrong attention, in which a text of a batch reads another text."""
    return x + x.roll(1, 0) * 0.1


def rolled(self, start, k, v, plain=LayerCache.store):
    """A wrong cache that returns its keys in the wrong order, as soon as it has several."""
    k, v = plain(self, start, k, v)
    return (k.roll(1, 2), v) if start else (k, v)


def adds(block, attention=1.0, mlp=1.0):
    """Return a forward of a block that multiplies the outputs of its branches by factors.

    The points have the values without the factors, so with other factors than 1 they are wrong.
    """

    def forward(resid, context):
        stream = pre = block.resid_pre(resid)
        for branch, factor in zip(block.branches, (attention, mlp), strict=False):
            late = branch.reads is not block.resid_pre
            read = stream = branch.reads(stream) if late else stream
            given = (read if late else pre, context)[: 1 + (branch.sublayer is block.attn)]
            total = stream + factor * branch(*given)
            stream = branch.joined(total) if branch.joined else total
        return block.resid_post(stream)

    return forward


SUMS = [
    ("gpt2", "attention", "resid_mid = resid_pre + attn_out", "resid_mid"),
    ("gpt2", "mlp", "resid_post = resid_mid + mlp_out", "resid_post"),
    ("gemma2", "attention", "resid_mid = resid_pre + attn_out", "resid_mid"),
    ("gemma2", "mlp", "resid_post = resid_mid + mlp_out", "resid_post"),
    ("neox", "attention", "resid_post = resid_pre + attn_out + mlp_out", "resid_post"),
    ("neox", "mlp", "resid_post = resid_pre + attn_out + mlp_out", "resid_post"),
    ("attention only", "attention", "resid_post = resid_pre + attn_out", "resid_post"),
    ("post", "attention", "resid_mid = ln1(resid_pre + attn_out)", "resid_mid"),
    ("post", "mlp", "resid_post = ln2(resid_mid + mlp_out)", "resid_post"),
]


@pytest.mark.parametrize(("form", "which", "identity", "point"), SUMS)
def test_outputs_that_differ_from_their_points_are_errors(
    form, which, identity, point, monkeypatch
):
    model = built(**FORMS[form])
    block = model.blocks[1]
    monkeypatch.setattr(block, "forward", adds(block))
    verify(model)  # with the factors 1, this forward computes the same as the block
    monkeypatch.setattr(block, "forward", adds(block, **{which: 1.01}))
    refused(model, identity, f"blocks.1.{point}")


@pytest.mark.parametrize("form", ["gpt2", "neox", "gemma2", "attention only"])
def test_attention_gives_the_sum_of_its_heads(form, monkeypatch):
    model = built(**FORMS[form])
    output = model.blocks[2].attn.output
    monkeypatch.setattr(output, "forward", lambda z: z @ output.weight.T * 1.01 + output.offset)
    refused(model, "z @ W_O + b_O", "blocks.2.attn")


@pytest.mark.parametrize("form", ["gpt2", "olmo2"])
def test_attn_out_is_the_output_of_attention_or_its_norm(form, monkeypatch):
    """The point `attn_out` changes the output of attention, so its value is not this output."""
    model = built(**FORMS[form])
    monkeypatch.setattr(model.blocks[0].attn_out, "forward", lambda x: x + 0.01)
    refused(model, "attn_out = ln1_post(attn)", "blocks.0.attn_out")


def test_rounding_passes_and_a_thousandth_fails(monkeypatch):
    model = built(torch.float32)
    output = model.blocks[0].attn.output
    for factor, fails in ((1 + 1e-6, False), (1 + 1e-3, True)):
        monkeypatch.setattr(
            output, "forward", lambda z, f=factor: z @ output.weight.T * f + output.offset
        )
        if fails:
            refused(model, "blocks.0.attn")
        else:
            verify(model)


@pytest.mark.parametrize(("layer", "form"), [(0, "gpt2"), (1, "post"), (2, "olmo2")])
def test_rows_of_a_batch_keep_to_themselves(layer, form, monkeypatch):
    model = built(**FORMS[form])
    mlp = model.blocks[layer].mlp
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: rows_mixed(plain(x)))
    refused(model, "a row of a batch", f"blocks.{layer}.resid_post")


def test_logits_are_compared_too(monkeypatch):
    model = built()
    plain = model.unembedding.forward
    monkeypatch.setattr(model.unembedding, "forward", lambda x: rows_mixed(plain(x)))
    refused(model, "a row of a batch", "at logits")


def test_padding_that_is_seen_is_noticed(monkeypatch):
    model = built(positions="none")
    place = Transformer.context
    # This context forgets the mask, so queries attend to padding.
    monkeypatch.setattr(
        model,
        "context",
        lambda tokens, **options: place(model, tokens, **options | {"attention_mask": None}),
    )
    refused(model, "left-padded", "blocks.0.resid_post")


@pytest.mark.parametrize("positions", ["learned", "rotary", "sinusoidal"])
def test_positions_that_padding_changes_are_noticed(positions, monkeypatch):
    model = built(torch.float32, positions=positions)
    place = Transformer.context

    def counting(tokens, **options):
        context, mask = place(model, tokens, **options), options["attention_mask"]
        at = torch.arange(tokens.shape[1])[None] + context.start
        # For rotary positions, only differences of positions matter. So change the differences.
        if positions == "rotary":
            at = context.positions * (1 if mask is None else 2)
        rotation = model.rotary.rotation(at, torch.float32)
        return context._replace(positions=at, rotation=rotation)

    monkeypatch.setattr(model, "context", counting)
    refused(model, "left-padded")


def test_right_padding_has_a_check_of_its_own(monkeypatch):
    model = built()
    place = Transformer.context

    def shifted(tokens, **options):
        context, mask = place(model, tokens, **options), options["attention_mask"]
        right = mask is not None and not mask[:, -1].all() and options["kv_cache"] is None
        return context._replace(positions=context.positions + right)

    monkeypatch.setattr(model, "context", shifted)
    refused(model, "right-padded")


@pytest.mark.parametrize("several", [True, False])
def test_a_cache_is_checked_for_one_more_position_and_for_several(several, monkeypatch):
    def wrong(self, start, k, v, plain=LayerCache.store):
        breaks = start and (k.shape[2] > 1) == several
        k, v = plain(self, start, k, v)
        return (k, v.roll(1, 2)) if breaks else (k, v)

    monkeypatch.setattr(LayerCache, "store", wrong)
    refused(built(), "a text read in pieces")


def test_a_cache_that_forgets_padding_is_noticed(monkeypatch):
    model = built(positions="none")
    place = Transformer.context

    def forgetful(tokens, **options):
        cache = options["kv_cache"]
        if cache is not None and cache.length:
            options["attention_mask"] = cache.mask = None
        return place(model, tokens, **options)

    monkeypatch.setattr(model, "context", forgetful)
    refused(model, "padded text")


def test_nan_is_noticed():
    model = built()
    with torch.no_grad():
        model.blocks[1].attn.output.bias[3] = torch.nan
    refused(model, "blocks.1.attn", "nan")
