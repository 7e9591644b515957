"""Gradient caches and backward hooks, against autograd."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from hooks import CacheError, EditError, HookedRunner, HookError


def loss_of(logits):
    return logits.log_softmax(-1)[:, -1, 3].sum() + logits.square().mean()


def test_gradient_cache_equals_autograd_at_every_point(runner, tokens):
    logits, attached = runner.run_with_cache(tokens, detach=False)
    expected = torch.autograd.grad(loss_of(logits), list(attached.values()))
    logits, cache = runner.run_with_cache(tokens, grads=True)
    loss_of(logits).backward()
    assert set(cache.grads) == set(cache)
    for name, gradient in zip(attached, expected, strict=True):
        torch.testing.assert_close(cache.grads[name], gradient, atol=1e-5, rtol=1e-4)
        assert cache.grads.axes(name) == cache.axes(name)
    assert not any(value.requires_grad for value in cache.values())


def test_gradient_equals_a_finite_difference(model, runner, tokens):
    model.double()
    logits, cache = runner.run_with_cache(tokens, names="blocks.1.attn.pattern", grads=True)
    loss_of(logits).backward()
    for step, at in ((1e-6, (2, 1, 5, 3)), (1e-6, (0, 0, 6, 0))):
        losses = []
        for sign in (1, -1):

            def nudge(value, point, at=at, by=sign * step):
                value[at] += by

            edited = runner.run_with_hooks(tokens, hooks={"blocks.1.attn.pattern": nudge})
            losses.append(loss_of(edited).item())
        slope = (losses[0] - losses[1]) / (2 * step)
        assert cache.grads["pattern", 1][at].item() == pytest.approx(slope, rel=1e-5)


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


def test_gradients_flow_when_every_weight_is_frozen(model, runner, tokens):
    logits, cache = runner.run_with_cache(tokens, names="blocks.*.resid_pre", grads=True)
    loss_of(logits).backward()
    model.requires_grad_(False)
    logits, frozen = runner.run_with_cache(tokens, names="blocks.*.resid_pre", grads=True)
    loss_of(logits).backward()
    for name in cache:
        torch.testing.assert_close(frozen.grads[name], cache.grads[name])


def test_a_gradient_counts_only_what_flows_through_the_point():
    class Skip(nn.Module):
        """`3 * identity(x) + 5 * x`: the identity's output is its input, used elsewhere too."""

        def __init__(self):
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            return (3 * self.same(x) + 5 * x).sum()

    output, cache = HookedRunner(Skip()).run_with_cache(
        torch.ones(2, requires_grad=True), names="same", grads=True
    )
    output.backward()
    assert cache.grads["same"].tolist() == [3.0, 3.0]


def test_gradients_obey_the_capture_options(runner, tokens):
    logits, full = runner.run_with_cache(tokens, names="blocks.*.resid_mid", grads=True)
    loss_of(logits).backward()
    logits, part = runner.run_with_cache(
        tokens, names="blocks.*.resid_mid", grads=True, positions=[2, 6], dtype=torch.float64
    )
    loss_of(logits).backward()
    assert torch.equal(part.grads["resid_mid", 1], full.grads["resid_mid", 1][:, [2, 6]].double())


def test_an_undetached_cache_carries_the_graph(model, runner, tokens):
    _, cache = runner.run_with_cache(tokens, names="blocks.0.mlp_out", detach=False)
    (gradient,) = torch.autograd.grad(cache["mlp_out", 0].sum(), model.blocks[0].mlp.output.bias)
    assert torch.equal(gradient, torch.full((10,), 28.0))


def test_gradient_caches_that_cannot_be(runner, tokens):
    _, cache = runner.run_with_cache(tokens, names="embed")
    with pytest.raises(CacheError, match="run with grads=True"):
        cache.grads  # noqa: B018
    _, cache = runner.run_with_cache(tokens, names="embed", grads=True)
    with pytest.raises(CacheError, match=r"call backward\(\)"):
        cache.grads  # noqa: B018
    with torch.no_grad(), pytest.raises(ValueError, match="switched off here"):
        runner.run_with_cache(tokens, names="embed", grads=True)
    counter = nn.Sequential(nn.Identity())
    with pytest.raises(HookError, match=r"0 holds torch.int64, which has no gradient"):
        HookedRunner(counter).run_with_cache(torch.ones(2).long(), names="0", grads=True)


def test_backward_hooks_see_and_replace_gradients(model, runner, tokens):
    logits, cache = runner.run_with_cache(tokens, names="blocks.1.mlp_out", grads=True)
    loss_of(logits).backward()
    plain = model.blocks[1].mlp.output.bias.grad.clone()
    model.zero_grad()
    seen = []

    def double(gradient, point):
        seen.append((point.name, gradient.clone()))
        return gradient * 2

    logits = runner.run_with_hooks(tokens, backward={"blocks.1.mlp_out": double})
    loss_of(logits).backward()
    assert [name for name, _ in seen] == ["blocks.1.mlp_out"]
    torch.testing.assert_close(seen[0][1], cache.grads["mlp_out", 1])
    torch.testing.assert_close(model.blocks[1].mlp.output.bias.grad, 2 * plain)


def test_a_backward_hook_may_write_into_its_gradient_or_leave_it(model, runner, tokens):
    def clear(gradient, point):
        gradient.zero_()

    def look(gradient, point):
        return None

    logits = runner.run_with_hooks(
        tokens, backward={"blocks.1.mlp_out": clear, "blocks.2.mlp_out": look}
    )
    loss_of(logits).backward()
    assert not model.blocks[1].mlp.output.bias.grad.any()
    assert model.blocks[2].mlp.output.bias.grad.any()


def test_backward_hooks_that_cannot_be(runner, tokens):
    logits = runner.run_with_hooks(tokens, backward={"embed": lambda gradient, point: gradient[:1]})
    with pytest.raises(EditError, match="embed .* must keep the shape"):
        loss_of(logits).backward()
    with torch.no_grad(), pytest.raises(HookError, match="needs gradients"):
        runner.run_with_hooks(tokens, backward={"embed": lambda gradient, point: None})


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_never_hold_a_graph(runner, tokens):
    logits, cache = runner.run_with_cache(tokens, names="embed", grads=True)
    loss_of(logits).backward(create_graph=True)
    assert cache.grads["embed"].grad_fn is None


def test_a_backward_hook_at_integers_is_an_error():
    counter = nn.Sequential(nn.Identity())
    with pytest.raises(HookError, match="needs gradients, and none flow here"):
        HookedRunner(counter).run_with_hooks(
            torch.ones(2).long(), backward={"0": lambda gradient, point: None}
        )
