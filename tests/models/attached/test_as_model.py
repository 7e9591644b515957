"""The result of `attach` in place of its model: every public function takes it as the model.

1. By program: the code of each public function and method gets the model of a handle.
2. By calls: analyses of an attached model return bit for bit the same numbers.
"""

import functools
import importlib
import inspect
import types
import typing

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import interp
from hooks import HookedRunner
from hooks.base import ModelHandle, decorators
from interp import directions, edits, features, store
from models import attach, detach
from tests import tiny
from tests.analyses import ANALYSES, CLEAN, CORRUPTED, PAIRS, TEXTS
from tests.attachable import made
from tests.faces import MODULES, is_ours

MADE_BY_THE_LIBRARY = {"Attached", "HookContext", "HookPoints", "Point", "Ray"}
"""Classes whose methods with a model the library calls."""

NO_MODELS = ("activation", "_")
"""The beginnings of parameters that are modules of another kind, or that users do not pass."""


def functions():
    """Yield the names, the values and the parameters for models of all public functions."""
    for module in MODULES:
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield f"{module}.{name}", value
            elif inspect.isclass(value) and is_ours(value) and name not in MADE_BY_THE_LIBRARY:
                for method, stored in vars(value).items():
                    is_public = not method.startswith("_") or method == "__init__"
                    if is_public and inspect.isfunction(getattr(stored, "__func__", stored)):
                        yield f"{module}.{name}.{method}", getattr(value, method)


def with_models():
    """Yield functions that have a parameter whose type names `torch.nn.Module`."""
    seen = set()
    for name, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            kind = parameter.annotation
            members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            takes_models = nn.Module in members and not parameter.name.startswith(NO_MODELS)
            key = getattr(function, "__func__", function), parameter.name
            if takes_models and key not in seen:
                seen.add(key)
                yield pytest.param(function, parameter.name, id=f"{name}({parameter.name}=)")


def code_of(function):
    """Return the cell of the decorators that contains the undecorated function, or None."""
    cells = [cell for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    inner = [code_of(cell.cell_contents) for cell in cells]
    is_ours = function.__code__.co_filename == decorators.__file__
    return next(filter(None, inner), cells[0] if cells and is_ours else None)


@pytest.mark.parametrize(("function", "name"), [*with_models()])
def test_a_handle_is_read_as_its_model(function, name):
    cell = code_of(getattr(function, "__func__", function))
    assert cell is not None, "needs the decorator explains_calls"
    undecorated, received = cell.cell_contents, []

    @functools.wraps(undecorated)
    def receive(*args, **kwargs):
        received.append((args, kwargs))

    parameters = [*inspect.signature(undecorated).parameters]
    is_method = parameters[0] in ("self", "cls")
    handle = ModelHandle()
    handle.model = nn.Identity()
    owner = [ModelHandle()] if parameters[0] == "self" else []
    cell.cell_contents = receive
    try:
        function(*owner, **{name: handle})
        function(*owner, handle, handle)
    finally:
        cell.cell_contents = undecorated
    (_, named), (unnamed, _) = received
    assert named[name] is handle.model
    assert unnamed[is_method:] == (handle.model, handle.model)
    # The object of a method stays itself.
    assert [*unnamed[: len(owner)]] == owner


PLAIN_ONLY = {"attribution graph", "dictionaries"}
"""Analyses whose call in the table reads weights by the names of a plain transformer."""


@pytest.fixture(scope="module")
def attached():
    with attach(made("gpt2")) as attached:
        yield attached


def same(found, expected):
    """Check that nested values are equal, bit for bit."""
    leaves = [tree_leaves(value) for value in (found, expected)]
    assert len(leaves[0]) == len(leaves[1])
    for one, other in zip(*leaves, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.* should add up")
@pytest.mark.parametrize("name", [name for name in ANALYSES if name not in PLAIN_ONLY])
def test_an_analysis_of_the_attachment_is_the_analysis_of_its_model(attached, name):
    same(ANALYSES[name](attached), ANALYSES[name](attached.model))


def dictionary(width):
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in ((width, 5), (5, width), (5,), (width,))]
    return features.Dictionary(*weights, features.TopK(2))


KINDS = directions.Contrast(CLEAN, CORRUPTED)

OTHERS = {
    "runner": lambda model: HookedRunner(model).run_with_cache(CLEAN)[0].logits,
    "call": lambda model: model(CLEAN).logits,
    "means": lambda model: directions.difference_of_means(model, KINDS, "resid_pre").vectors,
    "sweep": lambda model: (
        interp.sweep(model, PAIRS, {"a": {"blocks.1.attn.z": edits.zero(head=1)}}).values
    ),
    "pairs": lambda model: PAIRS.read_by(model).clean,
    "source": lambda model: (
        interp.activation_patching(model, PAIRS, "mlp_out", source=model).values
    ),
    "graph": lambda model: interp.graph.Graph(model).allowed,
    "moments": lambda model: (
        store.statistics(model, TEXTS, "blocks.0.attn.z")["blocks.0.attn.z"].moments.mean
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_take_the_attachment(attached, name):
    same(OTHERS[name](attached), OTHERS[name](attached.model))


def test_a_dictionary_is_spliced_into_the_attachment(attached):
    spliced, expected = [], []
    for model, logits in ((attached, spliced), (attached.model, expected)):
        for error in ("live", None):
            points = {"blocks.0.resid_post": dictionary(attached.config.d_model)}
            with interp.splice(model, points, error=error) as runner:
                logits.append(runner.run_with_cache(CLEAN)[0].logits)
    same(spliced, expected)
    assert not torch.equal(spliced[0], spliced[1])


def test_models_in_lists_may_be_attachments():
    base, tuned = (tiny.model("GPT2LMHeadModel", seed) for seed in (0, 1))
    with attach(base), attach(tuned) as attached:
        found, expected = (
            str(interp.compare_models({"a": model}, base, TEXTS)) for model in (attached, tuned)
        )
    assert found == expected


def test_the_attachment_is_a_module_with_one_child(attached):
    assert attached.model is dict(attached.named_children())["model"]
    assert [*attached.children()] == [attached.model]
    assert {*attached.parameters()} == {*attached.model.parameters()}
    assert attach(attached) is attached


def test_detach_takes_the_attachment():
    model = tiny.model("GPT2LMHeadModel")
    detach(attach(model))
    assert not hasattr(model, "blocks")
