"""Models without hook points: names of submodules, outputs of any kind, and submodules that do not
run.
"""

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from hooks import (
    ActivationCache,
    CacheError,
    HookedRunner,
    HookError,
    HookPoint,
    NeverFiredError,
    UnknownNameError,
)
from tests import tiny


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
    """Return a model whose submodule `0` runs the function `make`."""
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


@pytest.mark.parametrize(
    ("hold", "wrap"), [(Tensor.to_sparse, lambda x: x), (Tensor.clone, lambda x: TwoTensor(x, x))]
)
def test_tensors_that_hold_tensors(hold, wrap):
    """A cache compares the memory of tensors to find values that share it.

    These tensors have no memory of their own, so a cache keeps copies.
    """
    x = torch.tensor([3.0, 0.0, 5.0])
    held = hold(x)
    runner = HookedRunner(returning(lambda x: wrap(held)))
    _, cache = runner.run_with_cache(x)
    assert "12 bytes" in repr(cache)
    edited = runner.run_with_hooks(x, hooks={"0": lambda value, point: value * 2})
    held.mul_(0)
    for value, factor in ((cache["0"], 1), (edited, 2)):
        plain = value.to_dense() if value.is_sparse else value.b
        assert plain.tolist() == [3 * factor, 0, 5 * factor]


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
    """PyTorch's encoder has a fast path that does not call its modules, unless they have hooks.

    If a module does not run in spite of its hooks, the error gives a hint.
    """
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    runner, x = HookedRunner(model), torch.randn(3, 5, 8)
    with torch.no_grad():
        output, cache = runner.run_with_cache(x, names="layers.*.linear1")
        torch.testing.assert_close(output, model(x), atol=1e-5, rtol=0)
    assert [value.shape for value in cache.values()] == [(3, 5, 12)] * 2
    with pytest.raises(NeverFiredError, match=r"out_proj.*set_fastpath_enabled"):
        runner.run_with_cache(x, names="layers.0.self_attn.out_proj")


class Experts(nn.Module):
    """A layer whose modules do not all run once.

    `spare` never runs, `shared` runs twice, and `config` returns no tensor.
    """

    def __init__(self, lone, pair):
        super().__init__()
        self.first, self.shared, self.spare = nn.Linear(3, 3), nn.Tanh(), nn.Dropout()
        self.config = returning(lambda x: "text")[0]
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.ids, self.last = nn.Identity(), nn.ReLU(inplace=True)
        self.lone, self.pair = lone, pair

    def forward(self, x):
        self.config(x)
        self.ids(torch.tensor([2, 3]))
        expert = self.experts[self.lone](self.shared(self.shared(self.first(x))))
        return self.last(expert.neg() + 0 * self.first.weight.sum())


@pytest.fixture
def mixture():
    """A model of three layers. In the first two, a different expert does not run. The third layer
    runs twice.
    """
    model = nn.Module()
    model.layers = nn.ModuleList([Experts(0, 3), Experts(1, 3), nn.Sequential(nn.Linear(3, 3))])

    def forward(x):
        one, two, again = model.layers
        return again(again(two(one(x))))

    model.forward = forward
    return model.eval()


SKIPPED = {
    *("layers.0.spare", "layers.0.shared", "layers.0.config", "layers.0.experts.1"),
    *("layers.1.spare", "layers.1.shared", "layers.1.config", "layers.1.experts.0"),
    *("layers.2", "layers.2.0"),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("names", [None, "*", lambda point: True, ["layers.0.first", "layers.*"]])
def test_modules_that_did_not_run_once_are_skipped_with_a_reason(mixture, tmp_path, lazy, names):
    runner, x, raw = HookedRunner(mixture), torch.randn(2, 3), {}
    for name, module in mixture.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: raw.update({name: out}))
    output, cache = runner.run_with_cache(x, names=names, lazy=lazy)
    expected = {name: value.clone() for name, value in raw.items() if name in cache}
    assert torch.equal(output, raw[""])
    assert set(cache.skipped) == SKIPPED
    assert set(cache) == runner.points.keys() - SKIPPED == expected.keys()
    assert all(torch.equal(cache[name], value) for name, value in expected.items())
    assert "10 skipped" in repr(cache)
    cache.save(tmp_path / "a")
    for same in (cache, cache.at(), cache.to(torch.float64), ActivationCache.load(tmp_path / "a")):
        for key, why in (
            ("layers.0.spare", "did not run"),
            (("shared", -1), "layers.1.shared.*twice"),
            (("experts.0", 1), "layers.1.experts.0 did not run"),
            ("layers.0.config", "str"),
            ("layers.2.0", "layers.2.* twice"),
        ):
            assert key not in same
            with pytest.raises(UnknownNameError, match=why):
                same[key]
        assert same.stack("first").shape == (2, 2, 3)
        with pytest.raises(CacheError, match="layers.1.experts.0 did not run"):
            same.stack("experts.0")
    assert runner.plan(x, names=names, lazy=lazy).values.keys() == set(cache)


def test_modules_that_are_named_are_never_skipped(mixture):
    runner, x = HookedRunner(mixture), torch.randn(2, 3)
    for run in (runner.run_with_cache, runner.capture):
        for name in SKIPPED - {"layers.2", "layers.2.0"}:
            with pytest.raises(HookError, match=name):
                run(x, names=[name, "*"])
        with pytest.raises(NeverFiredError, match="layers.0.spare"):
            run(x, names="*.spare")
        with pytest.raises(HookError, match="layers.0.shared fired twice"):
            run(x, names=["*.shared", "*.spare"])
    with pytest.raises(HookError, match=r"layers.2.* twice"):
        runner.run_with_cache(x, names=["layers.2.0", "*"], lazy=True)
    marked = nn.Sequential(HookPoint("batch d_model"), HookPoint("batch d_model")).eval()
    marked.forward = lambda x: marked[1](x)
    with pytest.raises(NeverFiredError, match="0"):
        HookedRunner(marked).run_with_cache(x)


def test_a_capture_with_skipped_points_and_gradients_of_the_others(mixture):
    runner, x = HookedRunner(mixture), torch.randn(2, 3)
    # `experts.1` never runs. A capture must stop without waiting for it.
    stopped = runner.capture(x, names="layers.0.[fel]*")
    assert list(stopped.skipped) == ["layers.0.experts.1"]
    output, cache = runner.run_with_cache(x, grads=True)
    output.sum().backward()
    assert "int64" in cache.skipped["layers.0.ids"]
    assert set(cache.grads) == set(cache)
    assert torch.equal(cache.grads["layers.1.first"].sum(0), mixture.layers[1].first.bias.grad)


@pytest.mark.parametrize("names", ["*", "0.0.bn1", ["0.0.bn1", "0.0.relu"]])
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        *(({}, mode) for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)),
        ({"dtype": torch.float64}, torch.no_grad),
        ({"grads": True}, torch.enable_grad),
        ({"lazy": True}, torch.no_grad),
    ],
)
def test_a_cache_has_the_value_before_the_model_overwrites_it(names, options, mode):
    """In every ResNet, a ReLU overwrites the output of `bn1`. The cache keeps the value before."""
    parts = OrderedDict(bn1=nn.BatchNorm1d(3), relu=nn.ReLU(inplace=True))
    model = nn.Sequential(nn.ModuleList([nn.Sequential(parts)])).eval()
    model.forward = lambda x: model[0][0](x)
    runner, x = HookedRunner(model), torch.tensor([[-2.0, 3.0, -5.0]])
    with mode():
        _, cache = runner.run_with_cache(x, names=names, **options)
    scaled = x / (1 + 1e-5) ** 0.5
    assert "0.0.bn1" in cache
    for name, expected in {"bn1": scaled, "relu": scaled.clamp(min=0)}.items():
        if (name := "0.0." + name) in cache:
            torch.testing.assert_close(cache[name].float(), expected)


def test_a_value_wanted_with_its_graph_and_overwritten_is_gone():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True)).eval()
    runner, x = HookedRunner(model), torch.ones(2, 3)
    with pytest.raises(CacheError, match="0 .*detach=True"):
        runner.run_with_cache(x, names="0", detach=False)
    _, cache = runner.run_with_cache(x, detach=False)
    assert list(cache) == ["1"]
    assert "0" in cache.skipped


@pytest.fixture(scope="module")
def gpt2():
    return tiny.model("GPT2LMHeadModel", n_inner=13)


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
    with torch.no_grad():
        _, full = runner.run_with_cache(tokens)
    assert set(full.skipped) == {f"transformer.h.{n}.attn.attn_dropout" for n in range(3)}
    assert torch.equal(full["lm_head"], reference.logits)


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
