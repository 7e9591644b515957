"""Any module: names of submodules, outputs of any kind, and layers that skip their parts."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookError, NeverFiredError


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 7, 2), nn.Flatten()
        )
        self.head = nn.Linear(7 * 16, 11)

    def forward(self, image):
        return self.head(self.features(image))


def test_a_convolutional_network():
    torch.manual_seed(0)
    model, image = Network().eval(), torch.randn(2, 3, 12, 12)
    runner = HookedRunner(model)
    output, cache = runner.run_with_cache(image)
    assert list(cache) == ["features", *(f"features.{n}" for n in range(5)), "head"]
    assert torch.equal(cache["features.3"], model.features[:4](image))
    assert torch.equal(cache["head"], output)
    edited = runner.run_with_hooks(image, hooks={"features.1": lambda value, point: value * 0})
    zeros = torch.zeros(2, 5, 10, 10)
    assert torch.equal(edited, model.head(model.features[2:](zeros)))
    assert "features.0,3  " in runner.table(), "the two convolutions share a line, and no others"


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


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Reads(nn.Module):
    """Gives back whatever its part returned."""

    def __init__(self, make):
        super().__init__()
        self.part = Returns(make)

    def forward(self, x):
        return self.part(x)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_kind(kind):
    runner, x = HookedRunner(Reads(KINDS[kind]).eval()), torch.tensor([3.0, 5.0])
    plain = KINDS[kind](x)
    _, cache = runner.run_with_cache(x, names="part")
    assert torch.equal(cache["part"], x * 2)
    made = []
    model = Reads(lambda x: made.append(KINDS[kind](x)) or made[-1])
    edited = HookedRunner(model).run_with_hooks(x, hooks={"part": lambda value, point: value + 1})
    assert str(made[0]) == str(plain), "the module's own output is left as it was"
    assert type(edited) is type(plain)
    flat = lambda value: str(value).replace("7., 11.", "6., 10.")  # noqa: E731
    assert "7., 11." in str(edited)
    assert flat(edited) == str(plain)


def test_an_output_without_a_tensor():
    runner = HookedRunner(Reads(lambda x: (None, "text")).eval())
    with pytest.raises(HookError, match="part returned no tensor but tuple"):
        runner.run_with_cache(torch.ones(1), names="part")


def test_modules_under_two_names_fire_under_both():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared)).eval()
    runner = HookedRunner(model)
    edited = runner.run_with_hooks(torch.ones(1, 3), hooks={"1.0": lambda value, point: value * 0})
    assert not edited.any()


def test_a_module_under_two_names_is_edited_once():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared)).eval()
    x = torch.ones(1, 3)
    inner = (shared(x) + 1).relu()
    expected = shared(inner) + 1
    for selector in ("*", ("0", "1.1")):
        seen = []

        def add(value, point, seen=seen):
            seen.append(point.name)
            return value + (point.name in ("0", "1.1"))

        edited = HookedRunner(model).run_with_hooks(x, hooks={selector: add})
        assert torch.equal(edited, expected)
        assert [name for name in seen if name in ("0", "1.1")] == ["0", "0"]


ENCODER = dict(d_model=8, nhead=2, dim_feedforward=12, batch_first=True)


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**ENCODER), 2, enable_nested_tensor=False
    )


def test_encoder_layers_run_their_parts_once_hooked():
    model, x = encoder().eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        plain = model(x)
        output, cache = HookedRunner(model).run_with_cache(x, names="layers.*.linear1")
    torch.testing.assert_close(output, plain, atol=1e-5, rtol=0)
    assert [value.shape for value in cache.values()] == [(3, 5, 12)] * 2


def test_a_part_that_the_fast_path_skips_is_an_error_with_a_hint():
    model, x = encoder().eval(), torch.randn(3, 5, 8)
    with pytest.raises(NeverFiredError, match=r"layers.0.self_attn.out_proj.*set_fastpath_enabled"):
        HookedRunner(model).run_with_cache(x, names="layers.0.self_attn.out_proj")


@pytest.fixture
def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=17, n_embd=10, n_layer=3, n_head=2, n_inner=13
    )
    return transformers.GPT2LMHeadModel(config).eval()


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


def test_a_transformers_model_lazily(gpt2, tokens):
    runner, names = HookedRunner(gpt2), ["transformer.h.?", "*.attn", "*.mlp.*"]
    with torch.no_grad():
        _, eager = runner.run_with_cache(tokens, names=names, use_cache=False)
        _, lazy = runner.run_with_cache(tokens, names=names, use_cache=False, lazy=True)
        for name in eager:
            torch.testing.assert_close(lazy[name], eager[name], atol=1e-5, rtol=0)
        with pytest.raises(HookError, match=r"given a DynamicCache.*use_cache=False"):
            runner.run_with_cache(tokens, names=names, lazy=True)


def test_a_transformers_model_planned(gpt2, tokens):
    runner = HookedRunner(gpt2)
    _, cache = runner.run_with_cache(tokens, names="transformer.h.*.attn", use_cache=False)
    plan = runner.plan(tokens, names="transformer.h.*.attn", use_cache=False)
    assert plan.nbytes == cache.nbytes
