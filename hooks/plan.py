"""Plans: what a cache would hold, found by a run on fake tensors."""

import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from hooks.base import mapped
from hooks.base._torch import FakeCopyMode, FakeTensorMode
from hooks.base.errors import HookError
from hooks.cache import ActivationCache
from hooks.names import lines_by_layer


@dataclass(frozen=True)
class Planned:
    """One value of a planned cache.

    Attributes:
        shape: its sizes.
        axes: their names; empty where the module declares none.
        dtype: its type.
        nbytes: its size in bytes if nothing shares its memory.

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
    """The values that a cached run would keep, and their memory.

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
        title = f"Plan of {len(self.values)} values, {self.nbytes:,} bytes"
        return f"{title}\n{textwrap.indent(table, '  ')}".rstrip()


def planned(
    model: nn.Module,
    run: Callable[[nn.Module, Any, Any], tuple[Any, ActivationCache]],
    args: Any,
    kwargs: Any,
) -> Plan:
    """The plan of `run(model, args, kwargs)`, which is called with copies that have no numbers.

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
                name: Planned(tuple(value.shape), cache.axes(name), value.dtype, value.nbytes)
                for name, value in cache.items()
            }
        except HookError:
            raise
        except Exception as error:
            raise HookError(
                f"a plan runs a copy of the model on tensors without numbers, and it failed: {error}"
            ) from error
    return Plan(values, nbytes)


def _deep_copies(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Copies that share no tensor with what was given."""
    owned = [value for module in model.modules() for value in vars(module).values()]
    # Fake tensors draw nothing from a generator, and among them PyTorch fails to copy one.
    copies: dict[int, Any] = {id(v): v for v in owned if isinstance(v, torch.Generator)}
    # Each module has a dozen of these, and `deepcopy` takes long for them.
    copies |= {id(v): OrderedDict() for v in owned if type(v) is OrderedDict and not v}

    def copied(leaf: Any) -> Any:
        try:
            return deepcopy(leaf, copies)
        except TypeError:  # a lock, for instance, which the run does not change
            return leaf

    model_copy = deepcopy(model, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                vars(copies[id(module)])[name] = _rebound(value, copies)
    return model_copy, *mapped((args, kwargs), copied)


def _rebound(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    """A forward that was put on a module, with copies in place of the modules in its closure."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [
        _rebound(v, copies) if isinstance(v, FunctionType) else deepcopy(v, copies) for v in held
    ]
    code, scope, name = function.__code__, function.__globals__, function.__name__
    bound = FunctionType(code, scope, name, function.__defaults__, tuple(map(CellType, held)))
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
