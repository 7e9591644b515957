"""The values of a lazy cache. A value inside a block is computed when it is read."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from hooks.base import _torch
from hooks.base.errors import HookError
from hooks.base.transfer import Copies, private
from hooks.capture import Recorder
from hooks.names import Blocks
from hooks.point import Point
from hooks.replay import BlockCall, SecondRun, require_reproduced
from hooks.session import Edits

T = TypeVar("T")


class LazyValues(Mapping[str, Tensor]):
    """The values of a lazy run.

    Values outside of blocks were stored in the run. When a value inside a block is read, its block
    runs again.

    A value that is read by its name stays in memory until `drop`. Values that are read by `several`
    or `by_block` do not. A deep copy or a pickle is a plain dict of all values.

    Args:
        recorder: the recorder of the run.
        calls: the stored calls of its blocks.
        edits: the edits that acted in the run.
        change: a function of a name and a value that returns the value to read. Default: None, for
            no change.
    """

    def __init__(
        self,
        recorder: Recorder,
        calls: list[BlockCall],
        edits: Edits,
        change: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._run = recorder
        self._calls = calls
        self._edits = edits
        self._change = change
        self._recomputed: dict[str, Tensor] = {}

    @functools.cached_property
    def _calls_by_name(self) -> dict[str, BlockCall]:
        """The call of the block that computes a value, by the name of the value."""
        calls = dict[str, BlockCall]()
        for call in self._calls:
            calls |= dict.fromkeys(call.points, call)
        return calls

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._recomputed and (self._change or name not in self._run.values):
            self._recomputed |= self.several([name])
        return self._recomputed[name] if name in self._recomputed else self._run.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.axes)

    def __len__(self) -> int:
        return len(self._run.axes)

    def __contains__(self, name: object) -> bool:
        return name in self._run.axes

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.by_block()),)

    def is_held(self, name: str) -> bool:
        """Return whether the value is in memory."""
        return name in self._recomputed or (not self._change and name in self._run.values)

    def several(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of several names.

        A block runs once for all requested values inside it. The values are not stored.
        """
        names = list(names)
        values = self._run.values | self._recomputed
        missing: dict[BlockCall, dict[str, Point]] = {}
        for name in names:
            if name not in values:
                call = self._calls_by_name[name]
                missing.setdefault(call, {})[name] = call.points[name]
        seconds = [self._run_again(call, points) for call, points in missing.items()]
        require_reproduced(seconds)
        for second in seconds:
            values |= second.values
        return {name: self._changed(name, values[name]) for name in names}

    def mapped(self, names: Iterable[str], function: Callable[[Tensor], T]) -> list[T]:
        """Apply a function to the value of each name, and return the results in order.

        Only the values of one block are in memory at a time. Each block that runs again is compared
        with the first run. The results of all comparisons are read at the end, so the host waits
        for the device once.
        """
        results = []
        seconds = []
        for name in names:
            if name in self._recomputed or name in self._run.values:
                value = self.several([name])[name]
            else:
                call = self._calls_by_name[name]
                second = self._run_again(call, {name: call.points[name]})
                value = self._changed(name, second.values.pop(name))
                seconds.append(second)
            results.append(function(value))
        require_reproduced(seconds)
        return results

    def _run_again(self, call: BlockCall, points: Mapping[str, Point]) -> SecondRun:
        """Run a block again, and record some of its points."""
        run = self._run
        return call.run_again(points, self._edits, run.options, run.memory_of_others)

    def by_block(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all names with their values.

        Only the values of one block are in memory at a time.
        """
        outside = [name for name in self if name not in self._calls_by_name]
        yield from self.several(outside).items()
        for call in self._calls:
            yield from self.several(name for name in call.points if name in self).items()

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> "LazyValues":
        """Return these values with one more change, which is applied when they are read."""

        def changed_twice(name: str, value: Tensor) -> Tensor:
            return change(name, value if self._change is None else self._change(name, value))

        return LazyValues(self._run, self._calls, edits=self._edits, change=changed_twice)

    def _changed(self, name: str, value: Tensor) -> Tensor:
        """Return a value with the change applied, unless it was already applied."""
        if self._change is None or name in self._recomputed:
            return value
        part = self._change(name, value)
        # If the change returned a view of a larger value, such as a slice, copy the view: it would
        # keep the whole value in memory.
        is_part = part.untyped_storage().nbytes() > part.nbytes and _torch.has_storage(part)
        return private(part) if is_part else part

    def drop(self) -> None:
        """Free the recomputed values."""
        self._recomputed.clear()

    def held(self) -> list[Tensor]:
        """Return every tensor in memory: stored values, stored calls and recomputed values."""
        tensors = [*self._run.values.values()]
        for call in self._calls:
            tensors += call.tensors()
        return [*tensors, *self._recomputed.values()]


def divided(points: Mapping[str, Point], blocks: Blocks) -> list[BlockCall]:
    """Return one `BlockCall` for each block with points.

    Raises:
        HookError: if the model has no blocks.
    """
    if not blocks:
        raise HookError("lazy=True needs blocks, as in a ModuleList; this model has none")
    inside: dict[tuple[str, nn.Module], dict[str, Point]] = {}
    # Points of the same block are neighbours in most models, so the loop has few steps.
    for block, names in itertools.groupby(points, blocks.get):
        if block is not None:
            inside.setdefault(block, {}).update({name: points[name] for name in names})
    copies = Copies()
    return [BlockCall(*block, chosen, copies) for block, chosen in inside.items()]
