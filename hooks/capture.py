"""Recorder: records the values of the requested points during a run.

In a joined run, a generation runs the model once for each new token. `join` makes one value for all
positions from the values of the steps: the value that one run of the whole text would have.
"""

import dataclasses
import functools
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hooks.base import (
    NEVER_FIRED,
    POSITION_AXES,
    Piece,
    _torch,
    mapped,
    piece_read,
    reading,
    require_fired,
    with_first_tensor,
)
from hooks.base.errors import CacheError, HookError, MemoryLimitError
from hooks.base.masks import NO_PADDING, TextMasks
from hooks.base.memory import Bound
from hooks.base.pieces import piece_is_known, with_ends
from hooks.base.selection import KeyMask
from hooks.base.transfer import Copies, private
from hooks.modes import Options
from hooks.point import HookPoint, Point, as_node, first_tensor, require_unsplit
from hooks.session import Session


class Complete(BaseException):
    """An exception that ends a run early, when its recorder has all values.

    It is not an `Exception`, so `except Exception` in the model does not catch it.
    """


@dataclasses.dataclass(frozen=True)
class Request:
    """The values that a run records.

    Attributes:
        points: the chosen points, by name.
        optional: names of points that may have no value.
        options: the positions, device, dtype and so on of the values.
    """

    points: Mapping[str, Point]
    optional: Collection[str]
    options: Options


@dataclasses.dataclass(eq=False, repr=False)
class Recorder:
    """A recorder of the values of `points`, and of their gradients if requested, during one run.

    Attributes:
        points: the points to record.
        options: the positions, device, dtype and so on of the values.
        optional: names of points that the run may leave out without an error.
        stops: whether to end the run, by `Complete`, once every point has fired.
        joined: whether a point may fire many times. Its values are then joined along the position
            axis.
        unkept: names of points whose values are not stored, because a lazy cache computes them.
        bound: counts the recorded bytes and raises an error above the limit.
        memory_of_others: the memory of weights and arguments (see `_torch.memory_of`). A value in
            this memory is copied, because the caller may write into it later; other values are
            stored without copies. None if the run itself may write into its values; then the
            recorder copies every value.
        values: the recorded values by name; after `finish` in the model's order.
        axes: after `finish`, the axes of each value, including values that are not stored.
        fired: the names of the points that the run reached.
        skipped: the optional points without a value, each with the reason.
        grads: the gradients from a later backward pass, without their graph.
    """

    points: Mapping[str, Point]
    options: Options
    _: dataclasses.KW_ONLY
    optional: Collection[str] = ()
    stops: bool = False
    joined: bool = False
    unkept: Container[str] = ()
    memory_of_others: Collection[int] | None = None
    bound: Bound | None = None
    values: dict[str, Tensor] = dataclasses.field(init=False, default_factory=dict)
    axes: dict[str, tuple[str, ...]] = dataclasses.field(init=False)
    fired: set[str] = dataclasses.field(init=False, default_factory=set)
    skipped: dict[str, str] = dataclasses.field(init=False, default_factory=dict)
    grads: dict[str, Tensor] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._copies = Copies()
        self._parts: dict[str, list[Tensor]] = {}
        # The piece of texts with padding that each point read, in the order in which points fired.
        self._pieces: dict[str, Piece] = {}
        # In a joined run: the first piece of each point.
        self._first_pieces: dict[str, Piece] = {}
        self._keeps_calls = self.options.keeps_calls
        self._views: list[str] = []

    def listen(self, session: Session) -> None:
        """Record all points, through hooks of the session."""
        record = self._record
        for name, point in self.points.items():
            # A point whose value is not stored needs no hook, and a hook would disable a fused
            # kernel. But an optional point needs a hook, because only the hook shows whether the
            # point fired. Models with fused kernels have HookPoints, which are rarely optional.
            if name not in self.unkept or name in self.optional:
                session.after(point.module, functools.partial(record, point))

    def _record(self, point: Point, output: Any) -> Any:
        """Record the value of `point` in a forward hook and leave the value unchanged."""
        name = point.name
        axes = point.axes
        replaced = None
        try:
            value = output if isinstance(output, Tensor) else first_tensor(output, point)
            if axes and value.ndim != len(axes):
                raise HookError(f"{point} must have these axes; got shape {tuple(value.shape)}")
            require_unsplit(value, point)
            if piece_read().n_later and not (self.joined or self._keeps_calls):
                raise HookError(
                    f"{name} must have one value for a whole text; inside in_pieces, a block "
                    "computes several: leave the `with`, or use lazy=True and read the value later"
                )
            if name in self.fired and not (self.joined or self._keeps_calls):
                raise HookError(
                    f"{name} fired twice; a cache stores one value per name (calls='all' stores "
                    "all values)"
                )
            if self.options.grads:
                node = self._watch(value, point)
                replaced = with_first_tensor(output, node)
                # The model continues with the node and may write into it, so the node is stored
                # only if the caller wants the graph.
                value = value if self.options.detach else node
            if name not in self.unkept:
                self._keep(value, point)
        except MemoryLimitError:
            raise
        except HookError as error:
            self.skip(point, error)
        self.fired.add(name)
        piece = piece_read()
        if self.joined:
            self._first_pieces.setdefault(name, piece)
        if piece.has_masks:
            self.note(name, piece)
        if self.stops and len(self.fired) == len(self.points):
            raise Complete(self)
        return replaced

    def note(self, name: str, piece: Piece) -> None:
        """Record the piece of texts with padding that a point read.

        If a point reads several pieces, the record has the start of the first piece and the masks
        of the last piece.
        """
        before = self._pieces.get(name)
        if before is None or not piece.has_masks_of(before):
            # The first piece of a generation may have no mask, although later pieces have one.
            start = (before or self._first_pieces.get(name, piece)).start
            self._pieces[name] = Piece(start, piece.real, others=piece.others)

    def end_rows(self, new: KeyMask) -> None:
        """Change the masks of a joined run: the columns after the end of a row are not real.

        Args:
            new: the mask of the last columns, [batch, pos]; see `RowEnds.new_columns`.
        """
        pieces: dict[str, Piece] = {}
        # Points of the same texts must have the same tensor as their mask.
        masks: dict[int, KeyMask] = {}
        for name, first in self._first_pieces.items():
            known = self._pieces.get(name)
            piece = known or first
            real = piece.real
            if piece.start is not None and name in self.values:
                if id(real) not in masks:
                    axis = _position_axis(name, self.points[name].axes)
                    columns = piece.start + self.values[name].shape[axis]
                    before = torch.ones(len(new), columns, dtype=torch.bool)
                    masks[id(real)] = with_ends(before if real is None else real.bool(), new)
                pieces[name] = Piece(piece.start, masks[id(real)], others=piece.others)
            elif known is not None:
                pieces[name] = known
        self._pieces = pieces

    def masks(self) -> TextMasks:
        """Return the masks of the texts that points read."""
        # Batch 0, to which a value belongs by default, is the batch of texts that was read last:
        # the texts of a decoder, or the text that follows an image.
        texts: list[Piece] = []
        for piece in reversed(self._pieces.values()):
            if not any(piece.has_masks_of(text) for text in texts):
                texts.append(piece)
        batches = tuple(self.options.kept_masks(piece) for piece in texts)
        if not any(batches):
            return TextMasks()
        numbers = dict.fromkeys(self.axes, NO_PADDING)
        for name in numbers.keys() & self._pieces.keys():
            matching = [self._pieces[name].has_masks_of(text) for text in texts]
            numbers[name] = matching.index(True)
        return TextMasks(batches, {name: number for name, number in numbers.items() if number})

    def skip(self, point: Point, error: HookError) -> None:
        """Leave out an optional point and store the reason in `skipped`.

        Raise `error` for any other point.
        """
        if point.name not in self.optional:
            raise error
        self.skipped[point.name] = str(error)

    def finish(self, reason: str = NEVER_FIRED, output: Any = None) -> None:
        """Sort the values in the model's order, and check that all values are present.

        Args:
            reason: a possible reason why a point was not reached, for the error.
            output: the output of the run. The caller may write into it, so values that share its
                memory are copied.

        Raises:
            NeverFiredError: if the run did not reach a point that is not optional; the error
                includes `reason`.
            CacheError: if a later module overwrote, in place, a value that was not copied.
        """
        self._settle()
        self.options.placement.wait()
        self._copies = Copies()
        if self.joined:
            for name, pieces in self._parts.items():
                self.values[name] = join(pieces, name, self.points[name].axes)
        elif self._keeps_calls:
            self._stack_calls()
        self._refuse_overwritten()
        if self.memory_of_others is not None:
            self._copy_returned(output)
        if len(self.fired) < len(self.points):
            self._require_fired(reason)
        call = ("call",) if self._keeps_calls else ()
        self.axes = {
            name: (*call, *point.axes) if point.axes else ()
            for name, point in self.points.items()
            if name not in self.skipped
        }
        self.values = {name: self.values[name] for name in self.axes if name in self.values}

    def _stack_calls(self) -> None:
        """Stack the values of all calls of each point along a first axis."""
        for name, calls in self._parts.items():
            shapes = sorted({tuple(call.shape) for call in calls})
            if len(shapes) > 1:
                rule = f"the calls of {name} must have one shape to be stacked"
                self.skip(self.points[name], HookError(f"{rule}; got {shapes[0]} and {shapes[-1]}"))
            else:
                self.values[name] = torch.stack(calls)

    def _refuse_overwritten(self) -> None:
        """Raise an error if the model overwrote values that were not copied."""
        remedy = (
            "detach=True" if self.memory_of_others is None else "model.overwrites_values = True"
        )
        for name, before in self._versions.items():
            if _torch.version(self.values[name]) != before:
                changed = f"the model wrote over the value of {name} later; {remedy} keeps a copy"
                self.skip(self.points[name], CacheError(changed))

    def _copy_returned(self, output: Any) -> None:
        """Copy the values that share memory with the output and were not copied before."""
        returned = memory_in(output)
        for name in self._versions:
            if _torch.memory_of(self.values[name]) in returned:
                self.values[name] = private(self.values[name])

    def _require_fired(self, reason: str) -> None:
        """Skip optional points that the run did not reach.

        Raise an error if it did not reach any other point.
        """
        absent = [name for name in self.points if name not in self.fired]
        for name in absent:
            if name in self.optional:
                self.skipped[name] = f"{name} did not run: {reason}"
        require_fired(absent, self.skipped, reason)

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        """Return a value whose gradient is recorded in a later backward pass."""
        if isinstance(point.module, HookPoint) and value.dtype == torch.int64:
            # Integers, such as the numbers of experts, have no gradients.
            return value
        value = as_node(value, point)
        # The graph keeps the hook alive. A reference from the hook to the recorder would keep all
        # recorded values in memory as long as the graph.
        grads = self.grads
        options = self.options
        piece = piece_read()

        def keep(grad: Tensor | None) -> None:
            # A user's autograd function may return None as the gradient.
            if grad is None:
                return
            # The gradient is copied, because PyTorch may use its memory for the `grad` of a leaf.
            with reading(piece):
                grads[point.name] = options.apply(private(grad), point)

        value.register_hook(keep)
        return value

    def _keep(self, value: Tensor, point: Point) -> None:
        """Store a value, as a copy if anything may later write into it."""
        name = point.name
        if value.requires_grad and not self.options.detach:
            stored = self.options.apply(value, point)
            if self.joined or self._keeps_calls or not _torch.has_storage(stored):
                # A later run may write into this memory, for example into a key/value cache.
                stored = stored.clone()
            else:
                self._versions[name] = _torch.version(stored)
        else:
            stored = self._copies(value, functools.partial(self._copied, point), point.axes)
            if self.memory_of_others is not None and _torch.has_storage(stored):
                self._note_view(name, stored)
        if self.joined or self._keeps_calls:
            parts = self._parts.setdefault(name, [])
            if self.joined:
                _require_next(parts, point)
            parts.append(stored)
        else:
            self.values[name] = stored
        if self.bound is not None:
            self.bound.add(name, stored)

    def _copied(self, point: Point, value: Tensor) -> Tensor:
        """Return a detached value with the options applied.

        The result is a copy, unless the memory of the value may be stored itself; see `_may_keep`.
        """
        value = value.detach()
        changed = self.options.apply(value, point)
        return private(changed) if changed is value and not self._may_keep(value) else changed

    def _may_keep(self, value: Tensor) -> bool:
        """Return whether a value may be stored without a copy: nothing writes into its memory."""
        return (
            self.memory_of_others is not None
            and _torch.has_storage(value)
            and not value.is_inference()
            and _torch.memory_of(value) not in self.memory_of_others
        )

    def _note_view(self, name: str, stored: Tensor) -> None:
        """Note that a value was stored without a copy.

        Its version is recorded, so that a later write into it is detected. If the value is a view
        of a larger tensor, its name is added to `_views`, for `_settle`. For example, keys may be a
        view of the output of all three projections.
        """
        if self._views:
            earlier = self.values[self._views[0]]
            if _torch.memory_of(earlier) != _torch.memory_of(stored):
                self._settle()
        self._versions[name] = _torch.version(stored)
        if stored.untyped_storage().nbytes() > stored.nbytes:
            self._views.append(name)

    def _settle(self) -> None:
        """Copy the views in `_views` if they do not cover the whole tensor of which they are views.

        Without the copies, the views would keep the whole tensor in memory.
        """
        views = {name: self.values[name] for name in self._views}
        different = {id(view): view for view in views.values()}
        nbytes = sum(view.nbytes for view in different.values())
        is_part = any(nbytes < view.untyped_storage().nbytes() for view in different.values())
        if is_part and all(
            _torch.version(view) == self._versions[name] for name, view in views.items()
        ):
            copies = {key: private(view) for key, view in different.items()}
            for name, view in views.items():
                self.values[name] = copies[id(view)]
                self._versions[name] = _torch.version(self.values[name])
        self._views = []


def _require_next(pieces: Sequence[Tensor], point: Point) -> None:
    """Check that the present piece of the texts continues the earlier pieces of a point's value.

    Args:
        pieces: the values of the earlier pieces.
        point: the point.

    Raises:
        HookError: if the present piece starts at a different column, or has different rows.
    """
    piece = piece_read()
    axis = _position_axis(point.name, point.axes)
    next_column = sum(part.shape[axis] for part in pieces)
    if pieces and piece_is_known() and (piece.start != next_column or piece.moved):
        got = "different rows" if piece.moved else f"column {piece.start or 0}"
        raise HookError(
            f"the pieces of a joined run must follow one another, for {point.name} from column "
            f"{next_column} of the same rows; got {got} (a generation without a cache of keys, "
            "with beams or with an assistant)"
        )


def join(pieces: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """Join the values of the steps of a generation as if one run covered all positions.

    Along `key`, the last key of a step is the last position that the step read. Later keys, and
    earlier keys that a step does not have, are zero.

    Args:
        pieces: the value of each run, in order.
        name: the name of the point, for errors.
        axes: the axes of the value.

    Raises:
        HookError: if the value does not have exactly one axis of positions.
    """
    axis = _position_axis(name, axes)
    if "key" in axes:
        key = axes.index("key")
        n_cached = pieces[0].shape[key] - pieces[0].shape[axis]
        lengths = [piece.shape[axis] for piece in pieces]
        ends = [n_cached + end for end in accumulate(lengths)]
        # `pad` takes two sizes for each axis, and the last axis comes first.
        later_axes = [0, 0] * (len(axes) - 1 - key)
        pieces = [
            pad(piece, [*later_axes, end - piece.shape[key], ends[-1] - end])
            for piece, end in zip(pieces, ends, strict=True)
        ]
    return torch.cat(list(pieces), axis)


def _position_axis(name: str, axes: tuple[str, ...]) -> int:
    """Return the index of the only axis of positions.

    Raises:
        HookError: if the value has no axis of positions, or several.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        rule = "joining the values of several runs needs one axis of positions"
        raise HookError(f"{rule}; {name} has [{' '.join(axes)}]")
    return axes.index(along[0])


def memory_in(tree: Any) -> set[int]:
    """Return a number for the memory of each tensor in nested containers.

    Two tensors that share memory have the same number.
    """
    memory: set[int] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and _torch.has_storage(leaf):
            memory.add(_torch.memory_of(leaf))
        return leaf

    mapped(tree, note)
    return memory
