"""Components have the same children and weights as an `nn.Module`."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from hooks.base import Component
from models.linear import Linear


class Pair(Component):
    chosen = SimpleNamespace(size=3)

    def __init__(self, second=True):
        super().__init__()
        self.first = nn.Linear(2, 3)
        if second:
            self.second = nn.Linear(5, 7)


def test_children_equal_those_of_nn_module():
    pair, other = Pair(), nn.Linear(11, 13)
    assert pair.first is pair._modules["first"]
    pair.first = other
    assert pair.first is pair.get_submodule("first") is other
    assert Pair().first is not other
    pair._modules["first"] = pair.second  # libraries for quantisation replace modules like this
    assert pair.first is pair.second
    pair.first = None
    assert pair.first is None
    del pair.first
    assert not hasattr(pair, "first")
    pair.add_module("first", other)
    assert pair.first is other


def test_instances_do_not_share_children():
    Pair()
    lone = Pair(second=False)
    assert not hasattr(lone, "second")
    with pytest.raises(AttributeError, match="second"):
        _ = lone.second
    lone.second = abs
    assert lone.second(-3) == 3
    lone.chosen = nn.Linear(2, 3)
    # As with `nn.Module`, an attribute of the class comes before a child of the same name.
    assert lone.chosen.size == 3


def test_weights_equal_those_of_nn_module():
    one, x = Linear(3, 5), torch.tensor([[1.0, 2.0, 3.0]])
    assert one.double().weight.dtype == torch.float64
    one.weight, one.bias = nn.Parameter(torch.ones(5, 3)), None
    assert one(x).tolist() == [[6.0] * 5]
    ours = {"weight": torch.full((5, 3), 2.0)}
    assert torch.func.functional_call(one, ours, (x,)).tolist() == [[12.0] * 5]
    assert one(x).tolist() == [[6.0] * 5]
    prune.custom_from_mask(one, "weight", torch.tensor([[1.0, 0.0, 1.0]] * 5))
    assert one(x).tolist() == [[4.0] * 5]


def test_weights_may_be_parametrized():
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    halved, x = Linear(3, 5, bias=False), torch.tensor([[1.0, 2.0, 3.0]])
    nn.init.ones_(halved.weight)
    parametrize.register_parametrization(halved, "weight", Half())
    assert halved(x).tolist() == [[3.0] * 5]
    parametrize.remove_parametrizations(halved, "weight")
    assert halved(x).tolist() == [[3.0] * 5]


def test_copies_have_children_of_their_own():
    pair = Pair()
    for made in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert made.first is made._modules["first"]
        assert made.first is not pair.first
        assert (made.first.weight == pair.first.weight).all()
