"""Plans: the shapes and sizes of a cache, found by a run on fake tensors."""

import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from hooks.base import mapped, number_of
from hooks.base._torch import FakeCopyMode, FakeTensorMode
from hooks.base.errors import HookError
from hooks.cache import ActivationCache
from hooks.names import lines_by_layer


@dataclass(frozen=True)
class Planned:
    """One value of a planned cache.

    Attributes:
        shape: the shape of the value.
        axes: the names of the axes; empty if the module declares no axes.
        dtype: the dtype of the value.
        nbytes: the size in bytes, even if the value shares its memory with another value.

    >>> Planned((2, 3), ("batch", "pos"), torch.float32, 24).nbytes
    24
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    nbytes: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)}  {' '.join(self.axes)}".rstrip()


@dataclass(frozen=True)
class Plan:
    """The values that a cached run would store, and their memory.

    Attributes:
        values: each value by name.
        nbytes: the memory of the whole cache, in bytes. Memory that values share counts once.

    >>> from hooks import HookedRunner
    >>> plan = HookedRunner(nn.Sequential(nn.Linear(3, 5)).eval()).plan(torch.ones(2, 3))
    >>> plan.nbytes, plan.values["0"].shape
    (40, (2, 5))
    """

    values: Mapping[str, Planned]
    nbytes: int

    def __repr__(self) -> str:
        table = lines_by_layer({name: str(value) for name, value in self.values.items()}, limit=39)
        title = f"Plan of {number_of(len(self.values), 'value')}, {self.nbytes:,} bytes"
        return f"{title}\n{textwrap.indent(table, '  ')}".rstrip()


def planned(
    model: nn.Module,
    run: Callable[[nn.Module, Any, Any], tuple[Any, ActivationCache]],
    args: Any,
    kwargs: Any,
) -> Plan:
    """Return the plan of a cached run.

    The run uses copies of the model and its arguments with fake tensors, which have shapes but no
    numbers.

    Args:
        model: the model.
        run: a function of a model and its arguments that makes a cached run, and returns the output
            and the cache.
        args, kwargs: the arguments of the run.

    Raises:
        HookError: if the model cannot run on tensors without numbers.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        try:
            with FakeCopyMode(fake):
                model, args, kwargs = _deep_copies(model, args, kwargs)
            _, cache = run(model, args, kwargs)
            nbytes = cache.nbytes
            values = {
                name: Planned(
                    tuple(value.shape), cache.axes(name), dtype=value.dtype, nbytes=value.nbytes
                )
                for name, value in cache.items()
            }
        except HookError:
            raise
        except Exception as error:
            raise HookError(
                "a plan runs a copy of the model on tensors without numbers, and it failed: "
                f"{error}"
            ) from error
    return Plan(values, nbytes)


def _deep_copies(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return deep copies of the model and the arguments, which share no tensor with them."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            # Fake tensors do not use a generator, and PyTorch cannot copy a generator in fake mode.
            if isinstance(value, torch.Generator):
                copies[id(value)] = value
            # Each module has a dozen empty dictionaries for hooks. `deepcopy` takes long for them,
            # so new empty dictionaries replace them.
            elif type(value) is OrderedDict and not value:
                copies[id(value)] = OrderedDict()

    def copied(leaf: Any) -> Any:
        try:
            return deepcopy(leaf, copies)
        # For example, a lock cannot be copied, but the run does not change it.
        except TypeError:
            return leaf

    model_copy = deepcopy(model, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                vars(copies[id(module)])[name] = _rebound(value, copies)
    return model_copy, *mapped((args, kwargs), copied)


def _rebound(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    """Return a copy of a function that was stored on a module, such as a replaced `forward`.

    The copy refers to the copies of the modules in the closure of the function.

    Args:
        function: the function.
        copies: the copy of each object, by the `id` of the object.
    """
    cells = list[CellType]()
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        is_function = isinstance(value, FunctionType)
        cells.append(CellType(_rebound(value, copies) if is_function else deepcopy(value, copies)))
    bound = FunctionType(
        function.__code__,
        function.__globals__,
        name=function.__name__,
        argdefs=function.__defaults__,
        closure=tuple(cells),
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
