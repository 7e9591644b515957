"""Shares of LoRA adapters in sums of components, against hooks of PyTorch, autograd and peft."""

import copy
import functools

import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import attention_attribution, decompose, direct_logit_attribution, run_with_cache
from interp.graph import Graph

peft = pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs the extra hf")

from models import attach, detach, from_hf  # noqa: E402 - after the check for the libraries
from tests.attachable import VOCAB  # noqa: E402
from tests.attachable import made as made_float32  # noqa: E402
from tests.models.attached.kinds import TOKENS, made  # noqa: E402

# `peft` warns that it sets fan_in_fan_out for GPT-2, and about tied weights.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.is_gradient"),
    # Other cases run with --full.
    pytest.mark.sampled(4),
]

# The output maps of attention and the MLP in each block, from the block on.
OUTPUTS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
}
FAMILIES = {
    "gpt_bigcode": OUTPUTS["gpt2"],
    "gpt_neo": ("attn.attention.out_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "opt": ("self_attn.out_proj", "fc2"),
    "mistral": OUTPUTS["llama"],
    "qwen2": OUTPUTS["llama"],
    "qwen3": OUTPUTS["llama"],
    "olmo2": OUTPUTS["llama"],
    "gemma2": OUTPUTS["llama"],
    # Without a table of `from_hf`: the factor of a term, and a parallel block.
    "granite": OUTPUTS["llama"],
    "cohere": OUTPUTS["llama"],
}
# The norms after the sublayers.
AFTER = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def adapted(model, seed=1, **options):
    """Return a model with random LoRA adapters on all linear maps."""
    torch.manual_seed(seed)
    settings = {"target_modules": "all-linear", "init_lora_weights": False, "r": 2} | options
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


def layers_of(model):
    """Return the blocks of a model, the only list of modules with three entries."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    return next(part for part in lists if len(part) == len(model.blocks))


def recorded(model, run, modules):
    """Return the inputs and outputs of modules in a run, by module."""
    seen = {}

    def record(module, args, output):
        seen[module] = args[0].detach(), output.detach()

    hooks = [module.register_forward_hook(record) for module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def terms_of(model, maps, tokens):
    """Return `scale * B A x` of each map, from the recorded outputs of B."""
    ups = {part: part.lora_B["default"] for part in maps}
    seen = recorded(model, lambda: model(tokens), ups.values())
    return [part.scaling["default"] * seen[up][1] for part, up in ups.items()]


@pytest.mark.parametrize("kind", OUTPUTS)
@torch.no_grad()
def test_the_share_of_an_adapter_is_the_term_that_it_adds(kind):
    model = adapted(made(kind))
    attach(model)
    maps = [block.get_submodule(name) for block in layers_of(model) for name in OUTPUTS[kind]]
    terms = terms_of(model, maps, TOKENS)
    for lazy in (False, True):
        _, cache = run_with_cache(model, TOKENS, lazy=lazy)
        parts = decompose(model, cache)
        names = [name for name in parts.names if name.kind.endswith("adapter")]
        assert names == [f"{part}{n}.adapter" for n in range(3) for part in "am"]
        for name, term in zip(names, terms, strict=True):
            torch.testing.assert_close(parts[name], term, rtol=1e-9, atol=1e-9)
        stream = cache["resid_post", -1]
        torch.testing.assert_close(parts.values.sum(0), stream, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_the_share_after_a_norm_and_with_a_factor(kind):
    check_shares(kind)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"gemma2", "granite"}))
def test_the_share_in_each_family(kind):
    check_shares(kind)


@torch.no_grad()
def check_shares(kind):
    """Compare the shares in all blocks of a model with the recorded terms of its adapters."""
    model = adapted(made_float32(kind))
    attached = attach(model)
    blocks = attached.blocks
    tokens = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    _, cache = run_with_cache(model, tokens)
    parts = decompose(model, cache)
    for n, block in enumerate(blocks):
        maps = [block.get_submodule(name) for name in FAMILIES[kind]]
        for place, (part, term) in enumerate(zip("am", terms_of(model, maps, tokens), strict=True)):
            if kind in AFTER:
                norm = block.get_submodule(AFTER[kind][place])
                whole, output = recorded(model, lambda: model(tokens), [norm])[norm]
                # These norms multiply each number of a vector by a factor.
                term = term * output / whole
            if kind == "granite":
                term = term * model.config.residual_multiplier
            expected = term.view_as(parts.values[0])
            size = expected.abs().max()
            assert size > 1e-4
            assert (parts[f"{part}{n}.adapter"] - expected).abs().max() <= 1e-4 * size


def along_direct_paths(norm):
    """Change a norm so that its scale has no gradient."""
    old = norm.forward

    def forward(x):
        output = old(x).detach()
        bias = getattr(norm, "bias", None)
        bias = 0 if bias is None else bias.detach()
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else x
        slope = ((output - bias) / centred).detach()
        return output + (centred - centred.detach()) * slope

    norm.forward = forward


@pytest.mark.parametrize(("kind", "norm"), [("llama", "model.norm"), ("gpt2", "transformer.ln_f")])
def test_direct_shares_equal_autograd(kind, norm):
    """The share is the gradient of the logit by the adapter's output, times this output.

    The blocks after the adapter get no gradient, and the scale of the final norm is constant.
    """
    model = adapted(made(kind))
    twin = copy.deepcopy(model)
    tokens, token = TOKENS, 11
    attach(model)
    _, cache = run_with_cache(model, tokens, lazy=True)
    shares = direct_logit_attribution(model, cache, right=token, pos=-1)

    base = twin.get_base_model()
    along_direct_paths(base.get_submodule(norm))
    outputs = {}
    for n, block in enumerate(layers_of_twin(base)):
        for name, child in block.named_children():
            if "norm" in name or name.startswith("ln"):
                child.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
        for part, name in zip("am", OUTPUTS[kind], strict=True):
            up = block.get_submodule(name).lora_B["default"]
            up.register_forward_hook(functools.partial(keep, outputs, f"{part}{n}.adapter"))
    logit = base(tokens).logits[:, -1, token].sum()
    grads = torch.autograd.grad(logit, [*outputs.values()])
    names = shares.labels["component"]
    for name, output, grad in zip(outputs, outputs.values(), grads, strict=True):
        expected = (grad * output).sum(-1)[:, -1]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(
            shares.values[names.index(name)], expected.detach(), rtol=0, atol=1e-6
        )


def layers_of_twin(base):
    return base.model.layers if hasattr(base, "model") else base.transformer.h


def keep(outputs, name, module, args, output):
    outputs[name] = output


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("neurons", [False, True])
@torch.no_grad()
def test_all_parts_add_up_to_the_logits_of_the_merged_model(kind, neurons):
    model = adapted(made(kind))
    merged = copy.deepcopy(model).merge_and_unload()
    tokens, token = TOKENS, 7
    attach(model)
    _, cache = run_with_cache(model, tokens)
    parts = direct_logit_attribution(model, cache, right=token, neurons=neurons)
    logits = merged(tokens).logits[..., token]
    size = float(logits.abs().max())
    torch.testing.assert_close(parts.values.sum(0).T, logits, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_heads_and_neurons_write_with_the_weights_without_the_adapter(kind):
    model = adapted(made(kind))
    attach(model)
    _, cache = run_with_cache(model, TOKENS)
    parts = decompose(model, cache, neurons=True)
    layer = layers_of_twin(model.get_base_model())[1]
    attn, mlp = (layer.get_submodule(name).base_layer for name in OUTPUTS[kind])
    transposed = kind == "llama"
    w_o, w_out = ((part.weight.T if transposed else part.weight) for part in (attn, mlp))
    z, post = cache["z", 1], cache["post", 1]
    torch.testing.assert_close(parts["a1.h1"], z[:, :, 1] @ w_o[6:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts["m1.n5"], post[..., 5:6] * w_out[5], rtol=1e-9, atol=1e-9)
    if kind == "gpt2":
        expected = attn.bias.expand_as(parts["a1.bias"])
        torch.testing.assert_close(parts["a1.bias"], expected, rtol=0, atol=0)


@torch.no_grad()
def test_several_adapters_are_one_part_and_inactive_adapters_are_none():
    model = adapted(made("llama"), r=3)
    torch.manual_seed(4)
    target = dict(target_modules=["o_proj", "gate_proj"], init_lora_weights=False)
    model.add_adapter("second", peft.LoraConfig(**target, r=2, lora_alpha=5))
    model.eval()
    attach(model)

    def parts_of():
        return decompose(model, run_with_cache(model, TOKENS)[1])

    first = parts_of()["a0.adapter"]
    model.set_adapter("second")
    second = parts_of()
    model.base_model.set_adapter(["default", "second"])
    both = parts_of()["a0.adapter"]
    # The input of the first output map also changes, so read the terms from hooks.
    up = [layers_of(model)[0].self_attn.o_proj.lora_B[name] for name in ("default", "second")]
    seen = recorded(model, lambda: model(TOKENS), up)
    expected = seen[up[0]][1] * 8 / 3 + seen[up[1]][1] * 5 / 2
    torch.testing.assert_close(both, expected, rtol=1e-9, atol=1e-9)
    assert (both - first).abs().max() > 1e-3
    # The second adapter has no term in the MLP's output.
    assert "a0.adapter" in second.names
    assert "m0.adapter" not in second.names
    with model.disable_adapter():
        assert not any(name.kind.endswith("adapter") for name in parts_of().names)
    model.merge_adapter()
    assert not any(name.kind.endswith("adapter") for name in parts_of().names)


@torch.no_grad()
def test_an_adapter_with_a_bias():
    model = adapted(made("gpt2"), target_modules=["c_proj"], lora_bias=True)
    maps = []
    for part in model.modules():
        if hasattr(part, "lora_B") and "default" in part.lora_B:
            part.lora_B["default"].bias.normal_()
            maps.append(part)
    attach(model)
    _, cache = run_with_cache(model, TOKENS)
    parts = decompose(model, cache)
    shares = [parts[name] for name in parts.names if name.kind.endswith("adapter")]
    for share, term in zip(shares, terms_of(model, maps, TOKENS), strict=True):
        torch.testing.assert_close(share, term, rtol=1e-9, atol=1e-9)
    merged = copy.deepcopy(model).merge_and_unload()
    detach(merged)
    detach(model)
    torch.testing.assert_close(from_hf(model)(TOKENS), merged(TOKENS).logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_score_of_attention_has_adapters_among_its_sources():
    """The function checks that all pairs of sources add up to the score."""
    # Without task_type, the wrapper of peft has no names for its arguments. The cache must still
    # know the tokens.
    model = adapted(made("gpt2"))
    attach(model)
    _, cache = run_with_cache(model, TOKENS[:1], lazy=True)
    pairs = attention_attribution(model, cache, (2, 1), k=400)
    assert {"a0.adapter", "m1.adapter"} <= {*pairs.labels["key_source"]}


@torch.no_grad()
def test_in_a_graph_heads_and_mlps_contain_the_adapters():
    model = adapted(made("gpt2"))
    attach(model)
    graph = Graph(model)
    assert not any("adapter" in name for name in graph.writers)
    _, cache = run_with_cache(model, TOKENS)
    contributions = graph.contributions(cache)
    parts = decompose(model, cache)
    mlp = graph.place("writer", "m1")
    expected = parts["m1"] + parts["m1.adapter"]
    torch.testing.assert_close(contributions[mlp], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_cache_without_the_hidden_layer_raises_an_error_with_the_names():
    model = adapted(made("llama"))
    attach(model)
    runner = HookedRunner(model)
    needed = Graph(model, split_embeddings=True).needed
    _, cache = runner.run_with_cache(TOKENS, names=needed)
    with pytest.raises(CacheError, match=r"blocks\.\*\.mlp\.post"):
        decompose(model, cache)


@torch.no_grad()
def test_parts_of_a_run_with_the_adapter_off_do_not_fit_a_model_with_it_on():
    model = adapted(made("llama"))
    attach(model)
    with model.disable_adapter():
        _, cache = run_with_cache(model, TOKENS)
    with pytest.raises(CacheError):
        decompose(model, cache)
