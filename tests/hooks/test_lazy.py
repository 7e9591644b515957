"""Lazy caches: a value is computed again when it is read, one block at a time.

It equals the value of an eager cache. If it would not, because something has changed, reading it is
an error.
"""

import copy
import dataclasses
import itertools
import pickle
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hooks import (
    CacheError,
    FusedUnlessHooked,
    HookedRunner,
    HookError,
    HookPoint,
    HookPoints,
    ModeError,
    NeverFiredError,
)
from models import Transformer, TransformerConfig, attach
from tests import tiny

# The shape checks read a value of each mapping that a function gets. In a lazy cache, this computes
# the value. Tests that count runs or bytes, or in which a block cannot run again, use this mark to
# switch the checks off.
uncomputed = pytest.mark.usefixtures("unchecked")

X = torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])


def runner_of(block):
    """Return a runner over a model of one block. The block has two names."""
    model = nn.Module()
    model.first = block
    model.blocks = nn.ModuleList([block])
    model.forward = lambda x: model.blocks[0](x)
    return HookedRunner(model.eval())


@pytest.mark.parametrize(
    ("dtype", "mode", "tolerance"),
    [
        (torch.float32, nullcontext(), 1e-5),
        (torch.float64, nullcontext(), 1e-12),
        (torch.bfloat16, nullcontext(), 0.05),
        (torch.float32, torch.autocast("cpu", torch.bfloat16), 0.05),
        (torch.float32, torch.inference_mode(), 1e-5),
    ],
)
def test_equals_an_eager_cache(model, runner, tokens, dtype, mode, tolerance):
    """The run used fused kernels, and a lazy cache uses the explicit computation."""
    model.to(dtype)
    with mode:
        plain, eager = runner.run_with_cache(tokens)
        output, lazy = runner.run_with_cache(tokens, lazy=True)
        _, part = runner.run_with_cache(tokens, pos=[1, 4], dtype=torch.float64, lazy=True)
    assert list(lazy) == list(eager)
    assert torch.equal(part["pattern", 2], lazy["pattern", 2][:, :, [1, 4]].double())
    # Autocast where the cache is read must not matter. Only the mode of the run counts.
    with torch.autocast("cpu", torch.float16):
        for name, value in eager.items():
            assert lazy[name].dtype == value.dtype
            assert lazy.axes(name) == eager.axes(name)
            assert not lazy[name].requires_grad
            assert (lazy[name] - value).abs().max() <= tolerance * value.abs().max()
    assert (output - plain).abs().max() <= tolerance * plain.abs().max()


def test_values_are_bitwise_a_run_of_the_block_on_its_stored_input(model, runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    stream = runner.capture(tokens, names="blocks.0.resid_post")["resid_post", 0]
    # A lazy cache computes its values without gradients. With gradients, norms use other kernels.
    with torch.no_grad():
        block, context = HookedRunner(model.blocks[1]), model.context(tokens)
        for name in block.points:
            alone = block.capture(stream, context, names=name)[name]
            assert torch.equal(lazy[f"blocks.1.{name}"], alone), name
        _, together = block.run_with_cache(stream, context)
    lazy.drop()
    read = lazy.read(*(f"blocks.1.{name}" for name in together))
    assert all(map(torch.equal, read, together.values()))


def test_the_run_keeps_block_inputs_and_samples_of_outputs(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    stream = 4 * 7 * 10 * 4
    # The run keeps the inputs of the three blocks and of ln_final, and the outputs of embed and
    # pos_embed.
    kept = 4 * stream + stream + 7 * 10 * 4
    # It also keeps the positions, which are an argument of every block.
    kept += 7 * 8
    # It also keeps every ninth of the 280 numbers of the outputs of three blocks and of ln_final,
    # whose rows have 10 numbers, and every fourth of z, whose rows have 5 numbers.
    kept += (4 * 32 + 3 * 70) * 4
    assert lazy.axes(("pattern", 1)) == ("batch", "head", "query", "key")
    assert lazy.nbytes == kept
    assert "not computed yet" in repr(lazy)
    assert lazy.stack("attn.q").shape == (3, 4, 7, 2, 5)
    assert lazy.read(("pattern", 1), ("z", -1))[1].shape == (4, 7, 2, 5)
    assert lazy.nbytes == kept, "what is read together is not kept"
    assert lazy["attn.q", 1].shape == (4, 7, 2, 5)
    assert lazy.nbytes == kept + stream, "what was asked for, and no others of the block"
    lazy.drop()
    assert lazy.nbytes == kept


def test_the_run_is_the_plain_one_and_a_norm_outside_the_blocks_runs_again(model, runner, tokens):
    output, lazy = runner.run_with_cache(tokens, lazy=True)
    assert torch.equal(output, model(tokens)), "no kernel is another, the final norm's neither"
    stream = lazy["resid_post", 2].double()
    scale = (stream.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(lazy["ln_final.scale"].double(), scale, atol=1e-6, rtol=1e-6)
    lazy.drop()
    with torch.no_grad():
        model.ln_final.weight[3] += 1
    with pytest.raises(CacheError, match="ln_final"):
        lazy["ln_final.normalized"]


def test_computed_values_are_stored_until_dropped(model, runner, tokens):
    graphs = []
    model.blocks[1].register_forward_hook(lambda *args: graphs.append(torch.is_grad_enabled()))
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    assert not any(tensor.requires_grad for tensor in lazy._values.held())
    first = lazy["pattern", 1]
    assert lazy["pattern", 1] is first
    assert lazy.read(("pattern", 1))[0] is first
    assert graphs == [False, False]
    lazy["z", 1]
    lazy.stack("z")
    lazy.read(("z", 1), ("q", 1), ("resid_post", 1))
    assert len(graphs) == 4
    lazy.drop()
    assert torch.equal(lazy["pattern", 1], first)
    assert len(graphs) == 5


def small(kind):
    """Return a model of two blocks, its MLPs, and the output maps of its attention."""
    if kind == "plain":
        sizes = dict(vocab_size=11, n_ctx=7, n_layers=2, n_heads=2, d_model=10, d_mlp=13)
        model = Transformer(TransformerConfig(**sizes)).eval()
        blocks = model.blocks
        return model, [block.mlp for block in blocks], [block.attn.output for block in blocks]
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.AutoConfig.for_model(kind, **sizes, vocab_size=11)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layers = model.gpt_neox.layers if kind == "gpt_neox" else model.model.layers
    attach(model)
    if kind == "llama":
        maps = [layer.self_attn.o_proj for layer in layers]
    else:
        maps = [layer.attention.dense for layer in layers]
    return model, [layer.mlp for layer in layers], maps


@uncomputed
@pytest.mark.parametrize("kind", ["plain", "llama", "gpt_neox"])
def test_reading_attention_runs_no_output_map_and_no_mlp(kind):
    model, mlps, maps = small(kind)
    runner = HookedRunner(model)
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    options = {} if kind == "plain" else {"use_cache": False}
    _, eager = runner.run_with_cache(tokens, **options)
    _, lazy = runner.run_with_cache(tokens, lazy=True, **options)
    runs = []
    for module in (*mlps, *maps):
        module.register_forward_hook(lambda module, args, output: runs.append(module))
    # A norm is not a part of attention or of an MLP, so its block runs to the end.
    needs_rest = {
        ("pattern",): False,
        ("q", "z"): False,
        ("ln1.scale", "pattern"): True,
        ("mlp.pre",): True,
        ("pattern", "mlp.pre"): True,
        ("resid_post",): True,
    }
    for names, runs_rest in needs_rest.items():
        runs.clear()
        keys = [(name, 1) for name in names]
        for value, expected in zip(lazy.read(*keys), eager.read(*keys), strict=True):
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
        assert runs == [maps[1], mlps[1]] * runs_rest, names
        lazy.drop()


def test_every_part_that_ran_is_compared():
    """In a parallel block, the MLP does not read attention, so its output does not show a change.

    A value that is read before the change of the block is still right.
    """
    sizes = dict(vocab_size=11, n_ctx=7, n_layers=1, n_heads=2, d_model=10, d_mlp=13)
    model = Transformer(TransformerConfig(**sizes, parallel=True)).eval()
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    _, lazy = HookedRunner(model).run_with_cache(tokens, lazy=True)
    handle = model.blocks[0].attn.z.register_forward_hook(lambda module, args, value: value + 1)
    for names in (["z"], ["z", "mlp.pre"], ["attn_out"]):
        with pytest.raises(CacheError, match="blocks.0"):
            lazy.read(*((name, 0) for name in names))
    handle.remove()
    model.blocks[0].mlp.register_forward_hook(lambda module, args, value: value + 1)
    assert lazy["z", 0].shape == (2, 3, 2, 5)
    with pytest.raises(CacheError, match="blocks.0"):
        lazy["mlp.pre", 0]


def test_a_value_that_is_no_point_of_attention_is_compared_by_the_output(model, runner, tokens):
    """A point of attention acts through z. Any other module may change the output beside z."""
    names = ["*.attn.qkv", "*.attn.z"]
    _, lazy = runner.run_with_cache(tokens, names=names, lazy=True)
    _, eager = runner.run_with_cache(tokens, names=names)
    model.blocks[1].attn.output.register_forward_hook(lambda module, args, value: value + 1)
    torch.testing.assert_close(lazy["z", 1], eager["z", 1], atol=1e-5, rtol=0)
    with pytest.raises(CacheError, match="blocks.1"):
        lazy["blocks.1.attn.qkv"]


def test_a_run_ends_after_a_part_only_if_all_values_are_inside_it(model, runner, tokens):
    names = ["blocks.1.ln1", "blocks.1.attn.qkv"]
    _, lazy = runner.run_with_cache(tokens, names=names, lazy=True)
    runs = []
    model.blocks[1].mlp.register_forward_hook(lambda module, args, output: runs.append(module))
    lazy.read(names[1])
    assert not runs
    lazy.read(*names)
    assert runs == [model.blocks[1].mlp]


def test_edits_of_the_run_act_in_the_recomputation_and_later_ones_do_not(model, runner, tokens):
    model.blocks[2].mlp_out.register_forward_hook(lambda module, args, value: value * 2)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))
    with (
        runner.hooks({"*.pattern": lambda v, p: v * 0.5}),
        runner.hooks({"blocks.1": lambda v, p: v + 1}),
    ):
        _, eager = runner.run_with_cache(tokens)
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    with runner.hooks({"*": lambda value, point: value * 0}):
        inside = lazy["z", 1]
        _, zero = runner.run_with_cache(tokens, names="blocks.0.resid_pre")
    torch.testing.assert_close(inside, eager["z", 1])
    for name in eager:
        torch.testing.assert_close(lazy[name], eager[name])
    assert not zero["resid_pre", 0].any(), "reading leaves open contexts as they were"


def fused_step(block):
    """Change weights by a fused optimizer step, which does not change the versions of tensors."""
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(block.parameters(), lr=0.1, fused=True).step()


def adapt(block):
    """Put another forward in front of the old one, like libraries of adapters."""
    forward, extra = block.attn.forward, torch.randn(10, 10)
    block.attn.forward = lambda x, context: forward(x, context) + x @ extra


CHANGES = {
    "step": lambda block: block.mlp.output.weight.mul_(1.5),
    "fused step": fused_step,
    "another weight": lambda block: setattr(block.mlp.input, "bias", nn.Parameter(torch.ones(13))),
    "another data": lambda block: setattr(block.mlp.output.weight, "data", torch.zeros(10, 13)),
    "through data": lambda block: block.attn.qkv.weight.data.mul_(1.5),
    "after z, through data": lambda block: block.attn.output.weight.data.mul_(1.5),
    "cast": lambda block: block.double(),
    "hook": lambda block: block.mlp.register_forward_hook(lambda m, args, value: value * 2),
    "attribute": lambda block: setattr(block.attn, "scale", 3.0),
    "activation": lambda block: setattr(block.mlp, "activation", torch.tanh),
    "child": lambda block: setattr(block, "attn_out", nn.Tanh()),
    "adapter": adapt,
}


# These changes act after `z` and write to no weight, so `z` is the same as in the first run.
AFTER_Z = ("hook", "activation", "child", "after z, through data")


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_since_is_an_error(model, runner, tokens, change):
    _, eager = runner.run_with_cache(tokens)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    kept = lazy["z", 0]
    with torch.no_grad():
        CHANGES[change](model.blocks[1])
    if change in AFTER_Z:
        torch.testing.assert_close(lazy["z", 1], eager["z", 1], atol=1e-5, rtol=0)
    for name in ["resid_post", "mlp.post"] + ["z"] * (change not in AFTER_Z):
        with pytest.raises(CacheError, match="blocks.1"):
            lazy[name, 1]
    assert torch.equal(lazy["z", 0], kept)
    assert lazy["z", 2].shape == (4, 7, 2, 5), "the other blocks are what they were"


def test_hooks_that_are_gone_and_edits_that_are_not_the_same_twice(model, runner, tokens):
    own = model.blocks[0].mlp.register_forward_hook(lambda module, args, value: value * 2)
    edits = {}
    for factor in (2, 3):
        edits[f"blocks.{factor - 1}.mlp_out"] = lambda v, p: v * factor  # noqa: B023  # the point
    edits["blocks.2.resid_pre"] = lambda value, point: value + torch.rand(10)
    with runner.hooks(edits):
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    own.remove()
    factor = 5
    for layer in range(3):
        with pytest.raises(CacheError, match=f"blocks.{layer}"):
            lazy["mlp_out", layer]


def test_weights_that_a_module_has_only_since_an_earlier_run():
    """The change affects a hidden unit that ReLU sets to 0, so the output does not show it.

    The block also has a buffer whose changes PyTorch does not count, as it was made in inference
    mode.
    """
    block = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.ReLU(), nn.Linear(5, 3))
    with torch.inference_mode():
        block.register_buffer("table", torch.zeros(2))
    runner = runner_of(block)
    runner.run_with_cache(X, lazy=True)
    block[1].added = nn.Parameter(torch.tensor([0.0, 0.0, -1000.0, 0.0, 0.0]))
    block[1].forward = lambda x: x + block[1].added
    _, lazy = runner.run_with_cache(X, lazy=True)
    with torch.no_grad():
        block[1].added[2] += 1
    with pytest.raises(CacheError, match="blocks.0"):
        lazy["blocks.0.1"]


def test_a_block_runs_again_once_though_kernels_round_to_half_precision(model, runner, tokens):
    runs = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: runs.append(module))
    with torch.autocast("cpu", torch.bfloat16):
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    lazy["pattern", 1]
    assert len(runs) == 2


def test_hooks_on_all_modules_and_dropout_that_is_always_on(model, runner, tokens):
    model.blocks[2].mlp_out.register_forward_hook(lambda m, args, value: F.dropout(value))
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    with pytest.raises(CacheError, match="blocks.2"):
        lazy["mlp_out", 2]
    with (
        nn.modules.module.register_module_forward_hook(lambda m, args, value: value * 2),
        pytest.raises(CacheError, match="blocks.1"),
    ):
        lazy["z", 1]
    assert lazy["z", 1].shape == (4, 7, 2, 5)


@uncomputed
@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (2, 4), (4, 4), (1, 7), (7, 1), (2, 3, 4), (3,)])
def test_a_change_of_one_row_or_one_column_is_an_error(shape):
    block, x = nn.Sequential(nn.Identity()), torch.randn(shape)
    _, lazy = runner_of(block).run_with_cache(x, names="blocks.0.0", lazy=True)
    lines = torch.zeros(shape).flatten(0, -2) if x.ndim > 1 else torch.zeros(1, *shape)
    for line in (*lines, *lines.T):
        line += 1
        block.forward = lambda x: block[0](x) + lines.view(shape)
        with pytest.raises(CacheError, match="blocks.0"):
            lazy["blocks.0.0"]
        line -= 1
    assert torch.equal(lazy["blocks.0.0"], x)


def test_a_model_on_the_meta_device(model, runner, tokens):
    model.to("meta")
    _, lazy = runner.run_with_cache(tokens.to("meta"), lazy=True)
    assert lazy["pattern", 1].shape == (4, 2, 7, 7)


def test_a_model_of_transformers():
    """This model has a gate with one output, attention that is called without a mask, and an option
    that returns the outputs of all layers.
    """
    experts = dict(moe_intermediate_size=16, shared_expert_intermediate_size=20, num_experts=5)
    model = tiny.model("Qwen2MoeForCausalLM", num_hidden_layers=2, **experts)
    runner, tokens = HookedRunner(model), torch.arange(1, 11).view(2, 5)
    names = ["model.layers.*.input_layernorm", "model.layers.*.mlp*"]
    _, eager = runner.run_with_cache(tokens, names=names, use_cache=False)
    _, lazy = runner.run_with_cache(tokens, names=names, use_cache=False, lazy=True)
    model(tokens, output_hidden_states=True, output_attentions=True)
    for name, value in eager.items():
        assert torch.equal(lazy[name], value), name
    lazy.drop()
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="layers.1"):
        lazy["model.layers.1.mlp"]


OFFLOADED = {
    "cpu": lambda accelerate, model, path: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk": lambda accelerate, model, path: accelerate.disk_offload(
        model, path, torch.device("cpu")
    ),
    "map": lambda accelerate, model, path: accelerate.dispatch_model(
        model,
        dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm"], "cpu")
        | {"model.rotary_emb": "cpu", "model.layers.1": "disk", "lm_head": "cpu"},
        main_device="cpu",
        offload_dir=path,
    ),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kind", OFFLOADED)
def test_weights_offloaded_by_accelerate(kind, attached, tmp_path):
    """Between runs the weights are on the meta device. After each call they are new tensors."""
    accelerate = pytest.importorskip("accelerate")
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2)
    model = tiny.model("LlamaForCausalLM", **sizes)
    tokens = torch.arange(1, 11).view(2, 5)
    untouched, outputs = copy.deepcopy(model), []
    untouched.model.layers[1].mlp.register_forward_hook(lambda m, args, out: outputs.append(out))
    untouched(tokens, use_cache=False)
    if attached:
        attach(model)
    OFFLOADED[kind](accelerate, model, str(tmp_path))
    linear = model.model.layers[1].mlp.down_proj
    assert linear.weight.is_meta
    name = "blocks.1.mlp_out" if attached else "model.layers.1.mlp"
    runner = HookedRunner(model)
    _, lazy = runner.run_with_cache(tokens, names=[name], use_cache=False, lazy=True)
    torch.testing.assert_close(lazy[name], outputs[0].detach(), atol=1e-6, rtol=0)
    lazy.drop()
    linear._hf_hook.weights_map = {"weight": torch.zeros(8, 12)}
    with pytest.raises(CacheError, match="changed after the run"):
        lazy[name]


def test_left_padding_in_a_model_of_transformers():
    """Compare only real tokens. Queries that see no key have other values in other kernels."""
    model = tiny.model("LlamaForCausalLM")
    assert model.config._attn_implementation == "sdpa"
    attach(model)
    runner = HookedRunner(model)
    tokens = torch.arange(1, 11).view(2, 5)
    padded = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), use_cache=False)
    _, eager = runner.run_with_cache(tokens, **padded)
    _, lazy = runner.run_with_cache(tokens, **padded, lazy=True)
    real = padded["attention_mask"].bool()
    for short, layer in itertools.product(["attn.q", "attn.z", "mlp.post", "resid_post"], range(2)):
        ours, theirs = lazy[short, layer][real], eager[short, layer][real]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_an_edit_that_acts_every_second_time(runner, tokens):
    turns = itertools.count()
    with runner.hooks({"blocks.1.mlp_out": lambda value, point: value * (1 + next(turns) % 2)}):
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    with pytest.raises(CacheError, match="blocks.1"):
        lazy["mlp_out", 1]


def test_changes_without_an_effect_on_a_block_are_allowed(model, runner, tokens):
    _, eager = runner.run_with_cache(tokens)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    # Training mode changes nothing, because the model has no dropout.
    model.train()
    model.requires_grad_(False)
    model.blocks[1].attn.register_forward_pre_hook(lambda module, args: None)
    with runner.hooks({"*": lambda value, point: None}):
        runner.run_with_cache(tokens, mode="none")
        torch.testing.assert_close(lazy["z", 1], eager["z", 1], atol=1e-5, rtol=0)


def test_coarse_rounding_is_allowed_and_changes_beside_huge_values_are_found(model, runner, tokens):
    """The explicit computation rounds large scores to bfloat16, and fused kernels do not.

    A lazy cache must not treat this rounding as a change of the model.
    """
    model.bfloat16()
    with torch.no_grad():
        for _ in range(10):
            # The first 20 rows make queries and keys.
            model.blocks[0].attn.qkv.weight[:20] *= 1.5
            _, eager = runner.run_with_cache(tokens, names="blocks.0.attn.pattern")
            _, lazy = runner.run_with_cache(tokens, lazy=True)
            assert torch.equal(lazy["pattern", 0], eager["pattern", 0])
        model.token_embedding.weight[:, 5] += 1000
        _, lazy = runner.run_with_cache(tokens, lazy=True)
        model.blocks[2].register_forward_hook(lambda module, args, value: value + (value < 100))
    with pytest.raises(CacheError, match="blocks.2"):
        lazy["mlp_out", 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_into_an_argument_do_not_change_the_cache(mode):
    model, names = nn.Module(), "blocks.*.0"
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
    for block in model.blocks:
        block.forward = lambda x, block=block: x.add_(block[0](x))
    model.forward = lambda x: reduce(lambda x, block: block(x), model.blocks, x)
    with mode():
        _, eager = HookedRunner(model.eval()).run_with_cache(X.clone(), names=names)
        _, lazy = HookedRunner(model).run_with_cache(x := X.clone(), names=names, lazy=True)
        x.zero_()
    for inside in (mode(), nullcontext()):
        with inside:
            for name in eager:
                assert torch.equal(lazy[name], eager[name])
                lazy[name].zero_()
            lazy.drop()


def test_a_function_of_each_layer_is_an_error_if_a_block_changed(model, runner, tokens):
    _, eager = runner.run_with_cache(tokens)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    shapes = [value.shape for value in eager.layers("pattern")]
    assert lazy.map_layers("pattern", lambda pattern: pattern.shape) == shapes
    assert eager.map_layers("pattern", lambda pattern: pattern.shape) == shapes
    handle = model.blocks[1].attn.register_forward_hook(lambda module, args, value: value + 1)
    with pytest.raises(CacheError, match="blocks.1 changed"):
        lazy.map_layers("pattern", lambda pattern: pattern.shape)
    handle.remove()


def test_a_block_that_writes_into_its_argument_only_after_the_run_has_changed():
    """The second run reads the stored argument itself, so no third run can read it."""
    block = nn.Sequential(nn.Identity())
    _, lazy = runner_of(block).run_with_cache(X, names="blocks.0.0", lazy=True)
    forward = block.forward
    block.forward = lambda x: forward(x) + 0 * x.add_(1)
    for _ in range(2):
        with pytest.raises(CacheError, match="blocks.0 changed"):
            lazy["blocks.0.0"]
        block.forward = forward


@uncomputed
def test_blocks_share_one_copy_of_their_arguments():
    """An argument that several blocks share is stored once, unless the model writes into it.

    An expanded tensor is stored without its repetitions.
    """
    model, mask = nn.Module(), torch.ones(1, 5).expand(7, 5)
    model.blocks = nn.ModuleList(nn.Identity() for _ in range(3))
    for block in model.blocks:
        block.forward = lambda x, mask, counter: x[:, :, None] + mask + counter - 1
    counter = torch.zeros(())
    model.forward = lambda x: [block(x, mask, counter.add_(1)) for block in model.blocks]
    _, lazy = HookedRunner(model.eval()).run_with_cache(X[:, :1], names="blocks.*", lazy=True)
    # The run keeps every fourth of the 70 numbers of each output.
    samples = 3 * 18
    assert lazy.nbytes == 4 * (2 + 5 + 3 + samples), "x, the mask, three counters"
    assert [lazy[name].mean().item() for name in lazy] == [5.5 + n for n in range(3)]


HOLED = torch.where(X > 10, torch.nan, torch.where(X == 3, -torch.inf, X))
OUTPUTS = {
    "nan and inf": lambda x: x + HOLED,
    "all nan": lambda x: x * torch.nan,
    "inf": lambda x: x / 0,
    "integers": lambda x: x.argmax(-1),
    "complex": lambda x: torch.complex(x[:, :1] * 0, x[:, :1]),
    "half": lambda x: x.half(),
    "one number": lambda x: x.sum(),
    "turned": lambda x: x.T,
    "expanded": lambda x: x[:, :1].expand(2, 7),
    "no number": lambda x: x[:, :0],
    "no tensor": lambda x: "none",
    "tuple": lambda x: (None, x, x * 2),
    "mapping": lambda x: {"label": "a", "value": x},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_kind_are_only_an_error_if_they_changed(kind):
    block = nn.Sequential(nn.Identity())
    block.again = block[0]  # the module has two names, and both must work
    block.forward = lambda x: OUTPUTS[kind](block[0](x))
    _, lazy = runner_of(block).run_with_cache(X, names="blocks.0.again", lazy=True)
    assert torch.equal(lazy["blocks.0.again"], X)
    lazy.drop()
    if kind in ("nan and inf", "integers", "complex", "tuple", "half", "turned", "expanded"):
        block.forward = lambda x: OUTPUTS[kind](block[0](x).flip(-1))
        with pytest.raises(CacheError, match="blocks.0"):
            lazy["blocks.0.again"]


@pytest.mark.parametrize("x", [torch.tensor([[2, 0], [1, 3]]), torch.tensor([[2 + 3j]])])
def test_a_block_that_reads_no_real_numbers(x):
    _, lazy = runner_of(nn.Sequential(nn.Identity())).run_with_cache(x, lazy=True)
    assert torch.equal(lazy["blocks.0.0"], x)


def test_options_that_a_lazy_cache_does_not_support(model, runner, tokens):
    for options in ({"grads": True}, {"detach": False}):
        with pytest.raises(ValueError, match="lazy"):
            runner.run_with_cache(tokens, lazy=True, **options)
    with pytest.raises(HookError, match="ModuleList"):
        HookedRunner(nn.Sequential(nn.ReLU()).eval()).run_with_cache(X, lazy=True)
    model.blocks[1].mlp.train()
    for run in (runner.run_with_cache, runner.plan):
        with pytest.raises(ModeError, match=r"model.eval\(\)"):
            run(tokens, names="blocks.*", lazy=True)


class Rounded(nn.Module):
    """A block whose explicit form differs from the fused form by more than rounding.

    This happens if a kernel computes in another precision.
    """

    def __init__(self, is_random):
        super().__init__()
        self.is_random = is_random
        self.inner = HookPoint("batch d_model")

    def fused(self, x):
        return x * 2

    @FusedUnlessHooked("inner", fused=fused)
    def forward(self, x):
        noise = torch.rand(()) if self.is_random else 0.5
        return self.inner(x) * 2 + noise


class OneBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        return self.blocks[0](x)


@uncomputed
def test_other_kernels_under_hooks_are_no_change_if_they_give_the_same_twice():
    for is_random in (False, True):
        model, x = OneBlock(Rounded(is_random)).eval(), torch.arange(15.0).view(3, 5)
        _, lazy = HookedRunner(model).run_with_cache(x, lazy=True)
        with pytest.raises(CacheError, match="changed") if is_random else nullcontext():
            assert torch.equal(lazy["inner", 0], x)


class Passing(nn.Module):
    """A block with its argument and its weight as points."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([5.0, 7.0, 11.0]))
        self.x, self.scale = HookPoint("batch d_model"), HookPoint("d_model")

    def forward(self, x):
        return self.x(x) * self.scale(self.weight)


@uncomputed
@pytest.mark.parametrize("point", ["x", "scale"])
def test_a_write_into_a_value_that_was_read_changes_no_later_read(point):
    """The model declares that it overwrites no values, so only these two values are copied."""
    model = OneBlock(Passing()).eval()
    model.overwrites_values = False
    _, lazy = HookedRunner(model).run_with_cache(X, lazy=True)
    expected = {"x": X.clone(), "scale": torch.tensor([5.0, 7.0, 11.0])}
    lazy[point, 0].zero_()
    lazy.drop()
    assert torch.equal(lazy[point, 0], expected[point])


class Counting(nn.Module):
    """A block that counts its calls in its argument."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])

    def forward(self, x, factor, state=None):
        state["n"] += 1
        for layer in self.inner:
            x = layer(x) * state["n"]
        return x * factor, factor


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (HookError, "blocks.0 .* complex", dict(state=0j)),
        (NeverFiredError, "blocks.2.inner.0", dict(skip=True)),
        (HookError, "blocks.0 .*twice", dict(twice=True)),
    ],
)
def test_blocks_with_keyword_arguments_that_they_write_into(error, match, arguments):
    model, names = nn.Module(), ["blocks.*.inner.*", "blocks.1"]
    model.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(x, state=0, skip=False, twice=False):
        for block in model.blocks[: 2 if skip else 3]:
            x, _ = block(x, factor=torch.tensor(0.5), state={"n": state})
        return model.blocks[0](x, torch.tensor(2.0), {"n": 0}) if twice else x

    model.forward = forward
    runner = HookedRunner(model.eval())
    _, eager = runner.run_with_cache(X, names=names)
    _, lazy = runner.run_with_cache(X, names=names, lazy=True)
    for _ in range(2):
        for name in eager:
            assert torch.equal(lazy[name], eager[name])
        lazy.drop()
    with pytest.raises(error, match=match):
        runner.run_with_cache(X, names=list(eager), lazy=True, **arguments)


@uncomputed
def test_block_11_is_not_block_1_and_blocks_may_be_in_containers():
    model = nn.Module()
    nested = [{"ff": nn.Sequential(nn.Linear(3, 3))} for _ in range(11)]
    pairs = [nn.ModuleList([nn.Linear(3, 3), nn.ModuleDict(part)]) for part in nested]
    model.layers = nn.ModuleList(pairs)
    model.forward = lambda x: reduce(lambda x, pair: pair[1]["ff"](pair[0](x)), pairs, x)
    runner = HookedRunner(model.eval())
    _, eager = runner.run_with_cache(X)
    _, lazy = runner.run_with_cache(X, lazy=True)
    assert list(lazy) == list(eager)
    assert len(lazy) == 33
    assert lazy.nbytes == 22 * (6 + 3) * 4, "input and sample of each called module, none twice"
    for name in eager:
        assert torch.equal(lazy[name], eager[name])


def test_points_beside_a_block_and_modules_in_it():
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(2)]))
    model.points = nn.ModuleList([HookPoints(block) for block in model[0]])
    for block, points in zip(model[0], model.points, strict=True):
        points.out = HookPoint("batch d_model")
        block.register_forward_hook(lambda block, args, output: block.hook_points.out(output))
    model.forward = lambda x: model[0][1](model[0][0](x))
    names = ["0.0.0", "0.1.0", "points.0.out", "points.1.out"]
    _, lazy = HookedRunner(model.eval()).run_with_cache(X, names=names, lazy=True)
    between = model[0][0][0](X)
    for name, value in zip(names, (between, model[0][1][0](between)) * 2, strict=True):
        assert torch.equal(lazy[name], value)


def test_copies_are_plain_caches(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    for copied in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        assert list(copied) == list(lazy)
        torch.testing.assert_close(copied["pattern", -1], lazy["pattern", -1])
        assert copied.axes(("z", 0)) == lazy.axes(("z", 0))


@dataclasses.dataclass
class Settings:
    by: float
    shifts: tuple[torch.Tensor, list[torch.Tensor]]


Pair = namedtuple("Pair", ["settings", "more"])


def test_arguments_nested_in_any_container():
    """A block that changes its arguments does not change the stored arguments."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Identity()

        def forward(self, x, pair):
            first, (second, *_) = pair.settings.shifts
            x = self.out(x * pair.settings.by + first + second + pair.more["third"])
            pair.settings.by, pair.more["third"] = 0, 0
            pair.settings.shifts[1].clear()
            return x

    one, two = torch.tensor(1.0), torch.tensor(2.0)
    given = Pair(Settings(5.0, (one, [two])), OrderedDict(third=torch.tensor(3.0)))
    runner = runner_of(Block())
    runner.model.forward = lambda x: runner.model.blocks[0](x, given)
    _, lazy = runner.run_with_cache(X, names="blocks.0.out", lazy=True)
    two.zero_()
    for _ in range(2):
        assert torch.equal(lazy["blocks.0.out"], X * 5 + 6)
        lazy.drop()


@uncomputed
def test_a_block_that_writes_its_own_buffers_is_not_run_again():
    block = nn.Sequential(nn.Identity())
    block.register_buffer("calls", torch.zeros(()))
    block.forward = lambda x: block[0](x) + 0 * block.calls.add_(1)
    _, lazy = runner_of(block).run_with_cache(X, names="blocks.0.0", lazy=True)
    with pytest.raises(CacheError, match="blocks.0"):
        lazy["blocks.0.0"]
    assert block.calls == 1
