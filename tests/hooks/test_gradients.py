"""Gradient caches and backward hooks are compared with autograd."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from hooks import CacheError, EditError, HookedRunner, HookError, HookPoint, UnknownNameError


def loss_of(logits):
    return logits.log_softmax(-1)[:, -1, 3].sum() + logits.square().mean()


def test_gradient_cache_equals_autograd_at_every_point(model, runner, tokens):
    logits, attached = runner.run_with_cache(tokens, detach=False)
    expected = torch.autograd.grad(loss_of(logits), list(attached.values()))
    logits, cache = runner.run_with_cache(tokens, grads=True)
    loss_of(logits).backward()
    model.requires_grad_(False)
    logits, frozen = runner.run_with_cache(tokens, names="blocks.*.resid_pre", grads=True)
    loss_of(logits).backward()
    assert set(cache.grads) == set(cache)
    for name, gradient in zip(attached, expected, strict=True):
        for one in (cache, frozen) if name in frozen else (cache,):
            torch.testing.assert_close(one.grads[name], gradient, atol=1e-5, rtol=1e-4)
        assert cache.grads.axes(name) == cache.axes(name)
    assert not any(value.requires_grad for value in cache.values())


def test_forward_derivatives_and_vmap_pass_through_hooked_attention(model, runner, tokens):
    model.double().requires_grad_(False)
    context = model.context(tokens)
    resid = model.input_resid(tokens, context)
    direction = torch.randn_like(resid)

    def logits(resid):
        for block in model.blocks:
            resid = block(resid, context)
        return model.unembed(resid)

    with runner.hooks({"blocks.*.attn.scores": lambda value, point: None}):
        _, along = torch.func.jvp(logits, (resid,), (direction,))
        with forward_ad.dual_level():
            dual = logits(forward_ad.make_dual(resid, direction))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)
        scaled = torch.stack([resid, 2 * resid, resid - direction])
        mapped = torch.func.vmap(logits)(scaled)
        for one, expected in zip(mapped, map(logits, scaled), strict=True):
            torch.testing.assert_close(one, expected)
    step = 1e-6
    slope = (logits(resid + step * direction) - logits(resid - step * direction)) / (2 * step)
    torch.testing.assert_close(along, slope, rtol=1e-5, atol=1e-6)


def test_a_gradient_counts_only_what_flows_through_the_point():
    model, x = nn.Sequential(nn.Identity()), torch.ones(2, requires_grad=True)
    # The input reaches the output on two paths, and only one of them goes through the point.
    model.forward = lambda x: (3 * model[0](x) + 5 * x).sum()
    output, cache = HookedRunner(model).run_with_cache(x, names="0", grads=True)
    output.backward()
    assert cache.grads["0"].tolist() == [3.0, 3.0]
    assert x.grad.tolist() == [8.0, 8.0]
    output, cache = HookedRunner(model).run_with_cache(
        x.detach(), names="0", grads=True, detach=False
    )
    assert torch.autograd.grad(output, cache["0"])[0].tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_obey_the_capture_options_and_hold_no_graph(runner, tokens):
    names = "blocks.*.resid_mid"
    logits, full = runner.run_with_cache(tokens, names=names, grads=True)
    loss_of(logits).backward(create_graph=True)
    assert full.grads["resid_mid", 1].grad_fn is None
    options = dict(pos=[2, 6], dtype=torch.float64)
    logits, part = runner.run_with_cache(tokens, names=names, grads=True, **options)
    loss_of(logits).backward()
    assert torch.equal(part.grads["resid_mid", 1], full.grads["resid_mid", 1][:, [2, 6]].double())
    sliced = full.at(pos=[2, 6]).to(torch.float64)
    assert torch.equal(sliced.grads["resid_mid", 1], part.grads["resid_mid", 1])


def test_gradients_that_cannot_be(runner, tokens):
    for grads, match in ((False, "grads=True"), (True, r"backward\(\)")):
        _, cache = runner.run_with_cache(tokens, names="embed", grads=grads)
        with pytest.raises(CacheError, match=match):
            cache.grads  # noqa: B018
    with torch.no_grad():
        with pytest.raises(ValueError, match="grads=True"):
            runner.run_with_cache(tokens, names="embed", grads=True)
        with pytest.raises(HookError, match="embed"):
            runner.run_with_hooks(tokens, backward={"embed": lambda gradient, point: None})
    counter, ids = HookedRunner(nn.Sequential(nn.Identity())), torch.ones(2).long()
    with pytest.raises(HookError, match="int64 at 0"):
        counter.run_with_cache(ids, names="0", grads=True)
    with pytest.raises(HookError, match="0"):
        counter.run_with_hooks(ids, backward={"0": lambda gradient, point: None})
    logits = runner.run_with_hooks(tokens, backward={"embed": lambda gradient, point: gradient[:1]})
    with pytest.raises(EditError, match="embed"):
        loss_of(logits).backward()


class WithoutGradient(torch.autograd.Function):
    """A function that doubles a value and passes no gradient to its input, like some quantised
    layers.
    """

    @staticmethod
    def forward(ctx, value):
        return 2 * value

    @staticmethod
    def backward(ctx, gradient):
        return None


class TwoPaths(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after, self.beside = (HookPoint("batch d_model") for _ in range(3))

    def forward(self, value):
        return 3 * self.after(WithoutGradient.apply(self.before(value))) + self.beside(value)


def test_a_cache_has_no_gradient_if_autograd_has_none():
    runner, value = HookedRunner(TwoPaths().eval()), torch.ones(2, 5, requires_grad=True)
    output, cache = runner.run_with_cache(value, grads=True)
    output.sum().backward()
    assert torch.equal(cache.grads["after"], torch.full((2, 5), 3.0))
    assert torch.equal(cache.grads["beside"], torch.ones(2, 5))
    with pytest.raises(UnknownNameError, match="'before' was skipped"):
        cache.grads["before"]
    double = {"*": lambda gradient, point: 2 * gradient}
    value.grad = None
    runner.run_with_hooks(value, backward=double).sum().backward()
    assert torch.equal(value.grad, torch.full((2, 5), 2.0))


@pytest.mark.parametrize("factor", [2, 0, 1])
def test_backward_hooks_see_and_replace_gradients(model, runner, tokens, factor):
    logits, cache = runner.run_with_cache(tokens, names="blocks.1.mlp_out", grads=True)
    loss_of(logits).backward()
    plain = model.blocks[1].mlp.output.bias.grad.clone()
    model.zero_grad()
    seen = []

    def change(gradient, point):
        seen.append(gradient.clone())
        if factor == 2:
            return gradient * 2
        gradient.mul_(factor)
        return None

    logits = runner.run_with_hooks(tokens, backward={"blocks.1.mlp_out": change})
    loss_of(logits).backward()
    torch.testing.assert_close(seen, [cache.grads["mlp_out", 1]])
    torch.testing.assert_close(model.blocks[1].mlp.output.bias.grad, factor * plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_before_an_operation_in_place(frozen):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    model.requires_grad_(not frozen)
    x, (first, _, last) = torch.randn(7, 3), model
    before = first(x)
    # The gradient of the sum of the outputs, by hand: the sums of the columns of the last weight, 0
    # where ReLU is 0.
    expected = (before > 0) * last.weight.sum(0)
    output, cache = HookedRunner(model).run_with_cache(x, names="0", grads=True)
    output.sum().backward()
    torch.testing.assert_close(cache.grads["0"], expected)
    assert torch.equal(cache["0"], before)
    seen = []
    hooks = {"0": lambda gradient, point: [seen.append(gradient.clone()), gradient.zero_()].clear()}
    first.weight.grad = None
    HookedRunner(model).run_with_hooks(x, backward=hooks).sum().backward()
    torch.testing.assert_close(seen[0], expected)
    assert frozen or not first.weight.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_edits_inside_activation_checkpointing_are_refused(reentrant):
    """Checkpointing runs the block again in the backward pass, and there the edit would not act."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return self[2](checkpoint(nn.Sequential.forward, self[:2], x, use_reentrant=reentrant))

    model = Checkpointed(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    runner, x = HookedRunner(model), torch.randn(7, 3, requires_grad=True)
    kinds = ("hooks",) if reentrant else ("hooks", "backward")
    for kind in kinds:
        with pytest.raises(HookError, match="0 .*checkpoint"):
            runner.run_with_hooks(x, **{kind: {"0": lambda value, point: value * 2}})
    output = model(x)
    with runner.hooks({"0": lambda v, p: v * 2}), pytest.raises(HookError, match="checkpoint"):
        output.sum().backward()
    model(x).sum().backward()
    expected, model[0].weight.grad = model[0].weight.grad, None
    runner.run_with_hooks(x, hooks={"2": lambda value, point: value * 2}).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * expected)
    _, cache = runner.run_with_cache(x, names=["0", "1"])
    assert torch.equal(cache["1"], cache["0"].tanh())
    # Reentrant checkpointing runs the block without gradients first, so the value of the point has
    # no gradient.
    with pytest.raises(HookError, match="at 0") if reentrant else nullcontext():
        output, cache = runner.run_with_cache(x, names="0", grads=True)
        output.sum().backward()
        assert cache.grads["0"].any()
