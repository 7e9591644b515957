"""Lazy caches: values recomputed a block at a time, equal to an eager cache's."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hooks import CacheError, HookedRunner, HookError, ModeError, NeverFiredError


def test_equals_an_eager_cache(runner, tokens):
    plain, eager = runner.run_with_cache(tokens)
    output, lazy = runner.run_with_cache(tokens, lazy=True)
    assert set(lazy) == set(eager)
    assert len(lazy) == len(eager)
    for name in eager:
        torch.testing.assert_close(lazy[name], eager[name], atol=1e-5, rtol=0)
        assert lazy.axes(name) == eager.axes(name)
    torch.testing.assert_close(output, plain, atol=1e-5, rtol=0)


def test_values_are_bitwise_what_the_block_gives_on_the_stored_input(model, runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    stream = runner.capture(tokens, names="blocks.0.resid_post")["resid_post", 0]
    block = HookedRunner(model.blocks[1])
    _, alone = block.run_with_cache(stream, model.context(tokens))
    for name, value in alone.items():
        assert torch.equal(lazy[f"blocks.1.{name}"], value), name


def test_the_run_keeps_block_inputs_and_little_else(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    stream = 4 * 7 * 10 * 4
    outside = stream + 7 * 10 * 4 + stream + 4 * 7 * 4  # embed, pos_embed, ln_final
    outside += 7 * 8  # the positions, which every block is given
    assert lazy.nbytes == 3 * stream + outside
    assert "not computed yet" in repr(lazy)
    lazy["pattern", 1]
    assert lazy.nbytes > 3 * stream + outside
    assert "blocks.0,2.attn.q          not computed yet" in repr(lazy)
    lazy.drop()
    assert lazy.nbytes == 3 * stream + outside


def test_what_was_recomputed_is_kept_until_dropped(model, runner, tokens):
    runs = []
    model.blocks[1].register_forward_hook(lambda *args: runs.append(1))
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    runs.clear()
    first = lazy["pattern", 1]
    assert lazy["pattern", 1] is first
    lazy["z", 1]
    assert len(runs) == 1
    lazy.drop()
    assert torch.equal(lazy["pattern", 1], first)
    assert len(runs) == 2


def test_stack_recomputes_only_what_it_stacks(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    before = lazy.nbytes
    stacked = lazy.stack("attn.q")
    assert stacked.shape == (3, 4, 7, 2, 5)
    assert lazy.nbytes == before + 3 * 4 * 7 * 10 * 4


def test_edits_of_the_run_act_in_the_recomputation_and_later_ones_do_not(model, runner, tokens):
    own = model.blocks[2].mlp_out.register_forward_hook(lambda module, args, value: value * 2)

    def halve(value, point):
        return value * 0.5

    with runner.hooks({"blocks.*.attn.pattern": halve}), runner.hooks({"blocks.1": lambda v, p: v}):
        _, eager = runner.run_with_cache(tokens)
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    with runner.hooks({"*": lambda value, point: value * 0}):
        inside = lazy["z", 1]
        runner.run_with_cache(tokens, mode="none")
    torch.testing.assert_close(inside, eager["z", 1])
    for name in eager:
        torch.testing.assert_close(lazy[name], eager[name])
    own.remove()


def test_recomputation_leaves_open_contexts_as_they_were(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    with runner.hooks({"blocks.0.resid_pre": lambda value, point: value * 0}):
        lazy["z", 0]
        _, cache = runner.run_with_cache(tokens, names="blocks.0.resid_pre")
    assert not cache["resid_pre", 0].any()


def test_capture_options_hold_for_recomputed_values(runner, tokens):
    _, eager = runner.run_with_cache(tokens, positions=[1, 4], dtype=torch.float64)
    _, lazy = runner.run_with_cache(tokens, positions=[1, 4], dtype=torch.float64, lazy=True)
    torch.testing.assert_close(lazy["pattern", 2], eager["pattern", 2], atol=1e-5, rtol=0)
    assert lazy["pattern", 2].shape == (4, 2, 2, 7)


@pytest.mark.parametrize(
    "change",
    ["step", "fused", "replace", "data", "through data", "cast", "train", "part", "hook", "unhook"],
)
def test_a_model_that_changed_since_is_an_error(model, runner, tokens, change):
    block = model.blocks[1]
    block.mlp.output.weight = nn.Parameter(torch.ones(10, 13))
    own = block.mlp.register_forward_hook(lambda module, args, value: value * 2)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    kept = lazy["z", 0]
    with torch.no_grad():
        if change == "step":
            block.mlp.output.weight.mul_(1.5)
        elif change == "replace":
            block.mlp.output.weight = nn.Parameter(torch.zeros(10, 13))
        elif change == "fused":  # which moves no version
            own_gradients = [torch.ones_like(p) for p in block.parameters()]
            for parameter, gradient in zip(block.parameters(), own_gradients, strict=True):
                parameter.grad = gradient
            torch.optim.SGD(block.parameters(), lr=0.1, fused=True).step()
        elif change == "through data":
            block.attn.output.weight.data.mul_(1.5)
        elif change == "data":
            block.mlp.output.weight.data = torch.zeros(10, 13)
        elif change == "part":
            block.mlp.dropout.train()
        elif change == "hook":
            block.attn.register_forward_pre_hook(lambda module, args: None)
        elif change == "unhook":
            own.remove()
        elif change == "cast":
            model.double()
        else:
            model.train()
    with pytest.raises(CacheError, match="blocks.1 changed after the run"):
        lazy["z", 1]
    assert torch.equal(lazy["z", 0], kept)


def test_a_stored_input_that_was_overwritten_is_an_error(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, names=["embed", "blocks.0.*"], lazy=True)
    lazy["resid_pre", 0].zero_()
    lazy.drop()
    with pytest.raises(CacheError, match="changed"):
        lazy["z", 0]


def test_what_lazy_cannot_do(model, runner, tokens):
    for options in ({"grads": True}, {"detach": False}):
        with pytest.raises(ValueError, match="recomputes outside the graph"):
            runner.run_with_cache(tokens, lazy=True, **options)
    with pytest.raises(HookError, match="children of an nn.ModuleList"):
        HookedRunner(nn.Sequential(nn.Linear(2, 3)).eval()).run_with_cache(
            torch.ones(1, 2), lazy=True
        )
    model.train()
    with pytest.raises(ModeError, match=r"call model.eval\(\)"):
        runner.run_with_cache(tokens, names="blocks.*", lazy=True)


class Stack(nn.Module):
    """Blocks that take more than a tensor; the last is used only if asked, the first twice if asked."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x, state=None, skip=False, twice=False):
        for block in self.blocks[: 2 if skip else 3]:
            x, _ = block(x, factor=torch.tensor(0.5), state=state)
        return self.blocks[0](x, torch.tensor(2.0))[0] if twice else x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])

    def forward(self, x, factor, state=None):
        for layer in self.inner:
            x = layer(x)
        return x * factor, factor


def test_foreign_blocks_with_keyword_arguments_and_nested_lists():
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 3)
    runner = HookedRunner(model)
    _, eager = runner.run_with_cache(x, names=["blocks.*.inner.*", "blocks.1"])
    _, lazy = runner.run_with_cache(x, names=["blocks.*.inner.*", "blocks.1"], lazy=True)
    assert len(lazy) == 7
    for name in eager:
        assert torch.equal(lazy[name], eager[name])


def test_blocks_that_cannot_be_run_again_are_errors():
    model, x = Stack().eval(), torch.randn(2, 3)
    runner = HookedRunner(model)
    names = "blocks.*.inner.0"
    with pytest.raises(HookError, match="blocks.0 was given a object"):
        runner.run_with_cache(x, names=names, lazy=True, state=object())
    with pytest.raises(NeverFiredError, match="blocks.2.inner.0"):
        runner.run_with_cache(x, names=names, lazy=True, skip=True)
    with pytest.raises(HookError, match="blocks.0 ran twice"):
        runner.run_with_cache(x, names=names, lazy=True, twice=True)


def test_autocast_of_the_run_is_repeated(runner, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        _, eager = runner.run_with_cache(tokens)
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    assert eager["q", 1].dtype == torch.bfloat16
    assert lazy["q", 1].dtype == torch.bfloat16
    torch.testing.assert_close(lazy["q", 0], eager["q", 0])


def test_the_users_own_pre_hooks_act_once(model, runner, tokens):
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))
    _, eager = runner.run_with_cache(tokens, names="blocks.1.*")
    _, lazy = runner.run_with_cache(tokens, names="blocks.1.*", lazy=True)
    for name in eager:
        torch.testing.assert_close(lazy[name], eager[name], atol=1e-5, rtol=0)


def test_autocast_where_the_cache_is_read_does_not_matter(runner, tokens):
    _, eager = runner.run_with_cache(tokens)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(lazy["z", 1], eager["z", 1], atol=1e-5, rtol=0)


def test_nothing_lazy_holds_a_graph(model, runner, tokens):
    recording = []
    model.blocks[1].register_forward_hook(lambda *args: recording.append(torch.is_grad_enabled()))
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    assert not any(tensor.requires_grad for tensor in lazy._values.held())
    assert lazy["z", 1].grad_fn is None
    assert not lazy["z", 1].requires_grad
    assert recording == [True, False], "the run records a graph, and the recomputation none"


def test_backward_hooks_are_not_run_again(runner, tokens):
    with runner.hooks(backward={"blocks.*.attn.z": lambda gradient, point: gradient}):
        _, lazy = runner.run_with_cache(tokens, lazy=True)
    assert lazy["z", 1].shape == (4, 7, 2, 5)


def test_a_block_that_writes_into_its_arguments_gives_the_same_again():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x, state):
            state["n"] += 1
            return self.inner(x * state["n"])

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Counting()])

        def forward(self, x):
            return self.blocks[0](x, state={"n": 0})

    _, lazy = HookedRunner(Stateful().eval()).run_with_cache(
        torch.ones(2, 3), names="blocks.0.inner", lazy=True
    )
    first = lazy["blocks.0.inner"]
    lazy.drop()
    assert torch.equal(lazy["blocks.0.inner"], first)


# The shape checks look at a value of every mapping, which would compute one.
@pytest.mark.usefixtures("unchecked")
def test_blocks_eleven_and_one_are_told_apart_and_containers_descended_into():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList(
                    [nn.Linear(3, 3), nn.ModuleDict({"ff": nn.Sequential(nn.Linear(3, 3))})]
                )
                for _ in range(11)
            )

        def forward(self, x):
            for first, second in self.layers:
                x = second["ff"](first(x))
            return x

    torch.manual_seed(0)
    model, x = Deep().eval(), torch.randn(2, 3)
    runner = HookedRunner(model)
    _, eager = runner.run_with_cache(x)
    _, lazy = runner.run_with_cache(x, lazy=True)
    assert list(lazy) == list(eager)
    assert len(lazy) == 33
    assert "layers.10.1.ff.0" in lazy
    assert lazy.nbytes == 22 * 2 * 3 * 4, "an input for each called module, and none twice"
    for name in eager:
        assert torch.equal(lazy[name], eager[name])


def test_a_shared_module_inside_a_block_is_found_by_either_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Identity()
            self.two = self.one

        def forward(self, x):
            return self.two(x)

    model = nn.Sequential(nn.Linear(3, 3))
    model.blocks = nn.ModuleList([Tied()])
    model.eval()
    model.forward = lambda x: model.blocks[0](model[0](x))
    _, lazy = HookedRunner(model).run_with_cache(torch.ones(2, 3), names="blocks.0.two", lazy=True)
    assert torch.equal(lazy["blocks.0.two"], model[0](torch.ones(2, 3)))


# The shape checks look at a value of every mapping, which would compute one.
@pytest.mark.usefixtures("unchecked")
def test_a_value_overwritten_in_the_recomputation_is_an_error():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))])
    model.forward = lambda x: model.blocks[0](x)
    _, lazy = HookedRunner(model.eval()).run_with_cache(
        torch.ones(2, 3), names="blocks.0.0", lazy=True
    )
    with pytest.raises(CacheError, match="blocks.0.0 was changed in place"):
        lazy["blocks.0.0"]


def test_copies_are_plain_caches(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    for copied in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        assert list(copied) == list(lazy)
        assert torch.equal(copied["pattern", -1], lazy["pattern", -1])
        assert copied.axes(("z", 0)) == lazy.axes(("z", 0))


def test_the_axes_are_known_without_computing(runner, tokens):
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    before = lazy.nbytes
    assert lazy.axes(("pattern", 1)) == ("batch", "head", "query", "key")
    assert lazy.nbytes == before


def test_a_block_whose_number_begins_with_anothers_is_its_own():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(11))
    model.forward = lambda x: [x := block(x) for block in model.blocks][-1]
    runner, x = HookedRunner(model.eval()), torch.ones(2, 3)
    _, lazy = runner.run_with_cache(x, names="blocks.10.0", lazy=True)
    assert torch.equal(lazy["blocks.10.0"], runner.capture(x, names="blocks.10.0")["blocks.10.0"])
