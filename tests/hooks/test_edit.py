"""Edits at modules that return several tensors. An edit changes only the first tensor.

If the parent module reads another tensor too, the edit would have only a part of its effect, so it
raises an error.
"""

import dataclasses

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError
from tests.attachable import made

X = torch.arange(12.0).view(4, 3) / 7


class Router(nn.Module):
    """A module that returns logits, the largest logit and its index, like a router of experts."""

    def __init__(self, form=tuple):
        super().__init__()
        self.linear, self.form = nn.Linear(3, 5), form

    def forward(self, x):
        logits = self.linear(x)
        weights, numbers = logits.softmax(-1).max(-1)
        return self.form(logits, weights, numbers)


@dataclasses.dataclass
class Routed:
    logits: torch.Tensor
    weights: torch.Tensor
    numbers: torch.Tensor


class Block(nn.Module):
    def __init__(self, reads, form=lambda *parts: parts):
        super().__init__()
        self.gate, self.out, self.reads = Router(form), nn.Linear(3, 3), reads

    def forward(self, x):
        routed = self.gate(x)
        logits, weights, numbers = (
            routed
            if isinstance(routed, tuple)
            else vars(routed).values()
            if dataclasses.is_dataclass(routed)
            else routed.values()
        )
        if self.reads == "logits":
            return self.out(x) * logits.amax(-1, keepdim=True), weights
        if self.reads == "shape":
            return self.out(x) + logits.sum() * weights.shape[0], numbers
        if self.reads == "numbers":
            return self.out(x)[numbers % 4], weights
        return self.out(x) * weights[:, None], numbers


class Model(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.blocks = nn.ModuleList([Block(*args)])

    def forward(self, x):
        y, beside = self.blocks[0](x)
        return y.sum(-1) + 0 * beside


FORMS = {
    "tuple": lambda *parts: parts,
    "mapping": lambda *parts: dict(zip("abc", parts, strict=True)),
    "dataclass": Routed,
}


@pytest.mark.parametrize("form", ["tuple", "mapping", "dataclass"])
@pytest.mark.parametrize("reads", ["weights", "numbers"])
@pytest.mark.parametrize("grad", [False, True])
def test_an_edit_of_a_tensor_that_the_parent_does_not_read_alone_is_an_error(form, reads, grad):
    torch.manual_seed(0)
    model = Model(reads, FORMS[form]).eval()
    runner, seen = HookedRunner(model), []
    with torch.set_grad_enabled(grad):
        plain = model(X)
        with pytest.raises(HookError, match=r"blocks.0.gate .*Block reads another"):
            runner.run_with_hooks(X, hooks={"blocks.0.gate": lambda value, point: value * 2})
        # A hook that only reads is not an edit, and changes nothing.
        looked = runner.run_with_hooks(X, hooks={"blocks.0.gate": lambda v, p: seen.append(v)})
        assert torch.equal(looked, plain)
        assert torch.equal(model(X), plain)
        assert seen[0].shape == (4, 5)


@pytest.mark.parametrize("form", ["tuple", "mapping", "dataclass"])
@pytest.mark.parametrize("reads", ["logits", "shape"])
def test_an_edit_of_the_tensor_that_is_read_acts_and_its_receipt_names_the_others(form, reads):
    torch.manual_seed(0)
    model = Model(reads, FORMS[form]).eval()
    runner = HookedRunner(model)
    with runner.hooks({"blocks.0.gate": lambda v, p: v * 2}, receipts=True) as context:
        edited = model(X)
    assert type(edited) is torch.Tensor
    assert not torch.equal(edited, model(X))
    assert context.receipts[0].beside == 2
    assert "of the first of 3 tensors" in repr(context.receipts)
    with runner.hooks({"blocks.0.out": lambda v, p: v * 2}, receipts=True) as context:
        model(X)
    assert "of the first" not in repr(context.receipts)


def test_outputs_of_the_parent_are_plain_tensors():
    torch.manual_seed(0)
    model = Model("logits").eval()
    kept = []
    model.blocks[0].register_forward_hook(lambda m, a, output: kept.append(output[1]))
    HookedRunner(model).run_with_hooks(X, hooks={"blocks.0.gate": lambda v, p: v * 2})
    assert [type(value) for value in kept] == [torch.Tensor]


def test_states_in_lists_are_passed_on():
    class Step(nn.Module):
        def forward(self, x, state):
            state[0] = state[0] + x
            return x * 2, state

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Step(), Step()

        def forward(self, x):
            state = [torch.zeros_like(x)]
            x, state = self.first(x, state)
            x, state = self.second(x, state)
            return x + state[0]

    runner = HookedRunner(Steps().eval())
    found = runner.run_with_hooks(X, hooks={"first": lambda value, point: value * 5})
    torch.testing.assert_close(found, X * 31)


ROUTERS = {
    "mixtral": "model.layers.1.mlp.gate",
    "qwen3_moe": "model.layers.1.mlp.gate",
    "gpt_oss": "model.layers.0.mlp.router",
    "deepseek_v3": "model.layers.1.mlp.gate",
    "jetmoe": "model.layers.0.mlp.router",
    "granitemoe": "model.layers.0.block_sparse_moe.router",
}


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers(name, is_attached):
    from models import attach

    model = made(name)
    if is_attached:
        attach(model)
    runner, tokens = HookedRunner(model), torch.tensor([[3, 5, 7], [2, 9, 4]])

    def rolled(value, point):
        return value.roll(1, -1)

    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        with pytest.raises(HookError, match=f"{ROUTERS[name]} changes only the first"):
            runner.run_with_hooks(tokens, use_cache=False, hooks={ROUTERS[name]: rolled})
        assert torch.equal(model(tokens, use_cache=False).logits, plain)
        attention = next(n for n, part in model.named_modules() if "attn" in n or "attention" in n)
        with runner.hooks({attention: rolled}, receipts=True) as context:
            edited = model(tokens, use_cache=False).logits
    assert not torch.equal(edited, plain)
    # If the kernel returns no weights, attention returns None for them.
    assert context.receipts[0].rows == 2
