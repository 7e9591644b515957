"""Plans: what a cache would hold, found by a run on fake tensors."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    own_attributes,
    tree_map,
)
from hooks.cache import ActivationCache
from hooks.capture import Options
from hooks.errors import HookError
from hooks.point import Point


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


@dataclass(frozen=True)
class Plan:
    """What a cached run would keep.

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


def planned(
    model: nn.Module,
    run: Callable[..., tuple[Any, ActivationCache]],
    points: Mapping[str, Point],
    options: Options,
    args: Any,
    kwargs: Any,
) -> Plan:
    """The plan of `run(points, options, args, kwargs)`, a run of `model`.

    Raises:
        HookError: if a shape depends on the numbers in the model's tensors.
    """
    with _kept_clean(model), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        args, kwargs = tree_map(lambda leaf: _faked(leaf, fake), (args, kwargs))
        try:
            _, cache = run(points, options, args, kwargs)
            nbytes = cache.nbytes
            values = {
                name: Planned(tuple(value.shape), cache.axes(name), value.dtype, value.nbytes)
                for name, value in cache.items()
            }
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HookError(
                f"a plan needs shapes that depend on no tensor's numbers: {error}"
            ) from None
    return Plan(values, nbytes)


@contextmanager
def _kept_clean(model: nn.Module) -> Iterator[None]:
    """Removes fake tensors that the model stored in its attributes or buffers during the run."""
    owned = [store for module in model.modules() for store in own_attributes(module)]
    before = [dict(store) for store in owned]
    try:
        yield
    finally:
        for store, old in zip(owned, before, strict=True):
            for key in [key for key, value in store.items() if isinstance(value, FakeTensor)]:
                del store[key]
                store.update({key: old[key]} if key in old else {})


def _faked(leaf: Any, fake: FakeTensorMode) -> Any:
    if isinstance(leaf, Tensor):
        return fake.from_tensor(leaf)
    # A copy, because the run would write fake tensors into a key/value cache, for instance.
    try:
        with FakeCopyMode(fake):
            return copy.deepcopy(leaf)
    except TypeError:  # a lock, for instance; the run does not change it
        return leaf
