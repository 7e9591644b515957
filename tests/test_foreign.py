"""Any module: names of submodules, outputs of any kind, and layers that skip their parts."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookError, NeverFiredError


class Pair(NamedTuple):
    extra: None
    value: Tensor
    other: Tensor


@dataclasses.dataclass(frozen=True)
class Result:
    label: str
    value: Tensor
    other: Tensor
    made: list = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self):
        self.made.append(1)


KINDS = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (None, x * 2, x),
    "nested tuple": lambda x: ((x * 2, x), x),
    "list": lambda x: [x * 2, x],
    "named tuple": lambda x: Pair(None, x * 2, x),
    "mapping": lambda x: {"label": "a", "value": x * 2, "other": x},
    "dataclass": lambda x: Result("a", x * 2, x),
}


def returning(make):
    """A model that gives back whatever its part `0` returned."""
    part = nn.Identity()
    part.forward = make
    return nn.Sequential(part).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_kind(kind):
    x, made = torch.tensor([3.0, 5.0]), []
    plain = KINDS[kind](x)
    runner = HookedRunner(returning(lambda x: made.append(KINDS[kind](x)) or made[-1]))
    _, cache = runner.run_with_cache(x, names="0")
    assert torch.equal(cache["0"], x * 2)
    edited = runner.run_with_hooks(x, hooks={"0": lambda value, point: value + 1})
    assert str(made[1]) == str(plain), "the module's own output is left as it was"
    assert type(edited) is type(plain)
    assert "7., 11." in str(edited)
    assert str(edited).replace("7., 11.", "6., 10.") == str(plain)


def test_an_output_without_a_tensor():
    runner = HookedRunner(returning(lambda x: (None, "text")))
    with pytest.raises(HookError, match="0 .* tuple"):
        runner.run_with_cache(torch.ones(1), names="0")


@pytest.mark.parametrize("selector", ["*", ("0", "1.1"), "1.1"])
def test_a_module_under_two_names_fires_under_both_and_is_edited_once(selector):
    shared, x, seen = nn.Linear(3, 3), torch.ones(1, 3), []
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared)).eval()
    expected = shared((shared(x) + 1).relu()) + 1

    def add(value, point):
        seen.append(point.name)
        return value + (point.name in ("0", "1.1"))

    assert torch.equal(HookedRunner(model).run_with_hooks(x, hooks={selector: add}), expected)
    assert len([name for name in seen if name in ("0", "1.1")]) == 2


def test_layers_with_a_fast_path():
    """PyTorch's encoder runs its parts once hooked; what it still skips is an error with a hint."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    runner, x = HookedRunner(model), torch.randn(3, 5, 8)
    with torch.no_grad():
        output, cache = runner.run_with_cache(x, names="layers.*.linear1")
        torch.testing.assert_close(output, model(x), atol=1e-5, rtol=0)
    assert [value.shape for value in cache.values()] == [(3, 5, 12)] * 2
    with pytest.raises(NeverFiredError, match=r"layers.0.self_attn.out_proj.*set_fastpath_enabled"):
        runner.run_with_cache(x, names="layers.0.self_attn.out_proj")


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = dict(vocab_size=23, n_positions=17, n_embd=10, n_layer=3, n_head=2, n_inner=13)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def test_a_transformers_model_against_its_own_hidden_states(gpt2, tokens):
    runner = HookedRunner(gpt2)
    with torch.no_grad():
        reference = gpt2(tokens, output_hidden_states=True)
        _, cache = runner.run_with_cache(tokens, names=["transformer.h.?", "*.mlp.c_fc"])
    for layer in range(2):
        name = f"transformer.h.{layer}"
        torch.testing.assert_close(cache[name], reference.hidden_states[layer + 1])
    assert cache.stack("mlp.c_fc").shape == (3, 4, 7, 13)
    edited = runner.run_with_hooks(tokens, hooks={"lm_head": lambda value, point: value * 0})
    assert not edited.logits.any()
    assert "transformer.h" not in runner.points, "a ModuleList is never called"


def test_a_transformers_model_lazily_and_planned(gpt2, tokens):
    runner, names = HookedRunner(gpt2), ["transformer.h.?", "*.attn", "*.mlp.*"]
    with torch.no_grad():
        _, eager = runner.run_with_cache(tokens, names=names, use_cache=False)
        _, lazy = runner.run_with_cache(tokens, names=names, use_cache=False, lazy=True)
        for name in eager:
            torch.testing.assert_close(lazy[name], eager[name], atol=1e-5, rtol=0)
        with pytest.raises(HookError, match=r"DynamicCache.*use_cache=False"):
            runner.run_with_cache(tokens, names=names, lazy=True)
    assert runner.plan(tokens, names=names, use_cache=False).nbytes == eager.nbytes
