"""Components find their children and weights as `nn.Module` does, whatever happens to them."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from hooks._torch import Component
from models.linear import Linear


class Pair(Component):
    def __init__(self, second=True):
        super().__init__()
        self.first = nn.Linear(2, 3)
        if second:
            self.second = nn.Linear(5, 7)


def test_children_are_what_nn_module_keeps():
    pair = Pair()
    assert type(Pair.first).__name__ == "_Kept"
    assert pair.first is pair._modules["first"]
    assert Pair().first is not pair.first
    other = nn.Linear(11, 13)
    pair.first = other
    assert pair.first is pair.get_submodule("first") is other
    # As quantisation and the like replace modules.
    pair._modules["first"] = pair.second
    assert pair.first is pair.second
    pair.first = None
    assert pair.first is None
    del pair.first
    assert not hasattr(pair, "first")
    pair.add_module("first", other)
    assert pair.first is other
    pair.late = other
    assert [name for name, _ in pair.named_children()] == ["second", "first"]  # `late` is `first`
    assert pair.late is other


def test_a_child_of_another_instance_is_none_of_ours():
    Pair()
    lone = Pair(second=False)
    assert not hasattr(lone, "second")
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'second'"):
        _ = lone.second
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'third'"):
        _ = lone.third


def test_what_an_instance_sets_is_its_own():
    """Whatever was built before: else code would run or not by what else the process has done."""
    Pair()
    pair = Pair(second=False)
    pair.second = abs
    assert pair.second(-3) == 3
    del pair.first
    pair.first = None
    assert pair.first is None


def test_weights_are_what_nn_module_keeps():
    one, bare = Linear(3, 5), Linear(3, 5, bias=False)
    assert one.weight is one._parameters["weight"]
    assert bare.bias is None
    one.double()
    assert one.weight.dtype == torch.float64
    one.weight = nn.Parameter(torch.ones(5, 3))
    one.bias = None
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert one(x).tolist() == [[6.0] * 5]
    ours = {"weight": torch.full((5, 3), 2.0)}
    assert torch.func.functional_call(one, ours, (x,)).tolist() == [[12.0] * 5]
    assert one(x).tolist() == [[6.0] * 5]


def test_weights_may_be_pruned_and_parametrized():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    pruned, halved = Linear(3, 5, bias=False), Linear(3, 5, bias=False)
    for module in (pruned, halved):
        nn.init.ones_(module.weight)
    prune.custom_from_mask(pruned, "weight", torch.tensor([[1.0, 0.0, 1.0]] * 5))
    assert pruned(x).tolist() == [[4.0] * 5]

    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    parametrize.register_parametrization(halved, "weight", Half())
    assert halved(x).tolist() == [[3.0] * 5]
    parametrize.remove_parametrizations(halved, "weight")
    assert halved(x).tolist() == [[3.0] * 5]
    assert Linear(3, 5).weight.shape == (5, 3)


def test_copies_have_children_of_their_own():
    pair = Pair()
    for made in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert made.first is made._modules["first"]
        assert made.first is not pair.first
        assert (made.first.weight == pair.first.weight).all()


def test_attributes_of_the_class_are_left_alone():
    class Named(Component):
        chosen = SimpleNamespace(size=3)

    named = Named()
    named.chosen = nn.Linear(2, 3)
    assert named.chosen.size == 3  # as with `nn.Module`
