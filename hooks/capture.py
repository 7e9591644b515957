"""Recorder: keeps the values of the requested points during a run."""

import dataclasses
import functools
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hooks import _torch
from hooks.errors import NEVER_FIRED, CacheError, HookError, require_fired
from hooks.modes import Options
from hooks.point import POSITION_AXES, Point, as_node, first_tensor, tensors_in, with_first_tensor
from hooks.session import Session


class Complete(BaseException):
    """Ends the run of the recorder that it holds. `except Exception` in the model does not catch it."""


@dataclasses.dataclass(eq=False, repr=False)
class Recorder:
    """Collects the values of `points`, and their gradients if asked, during one run.

    Attributes:
        points: what to listen at.
        options: how to keep values.
        optional: names of points that may have no value.
        stops: whether to end the run, by `Complete`, once every point has fired.
        joined: a point may fire many times. Its values are joined along the position axis.
        unkept: names of points whose values are not kept. It is only noted that they fired.
        values: the captured values by name; after `finish` in the model's order.
        axes: after `finish`, the axes of each value, also of those that are not kept.
        fired: the names of the points that the run reached.
        skipped: why optional points have no value, by name.
        grads: the gradients from a later backward pass, without their graph.
    """

    points: Mapping[str, Point]
    options: Options
    optional: Collection[str] = ()
    stops: bool = False
    joined: bool = False
    unkept: Container[str] = ()
    values: dict[str, Tensor] = dataclasses.field(init=False, default_factory=dict)
    axes: dict[str, tuple[str, ...]] = dataclasses.field(init=False)
    fired: set[str] = dataclasses.field(init=False, default_factory=set)
    skipped: dict[str, str] = dataclasses.field(init=False, default_factory=dict)
    grads: dict[str, Tensor] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._in_graph: set[str] = set()
        self._parts: dict[str, list[Tensor]] = {}

    def listen(self, session: Session) -> None:
        """Records all points, through hooks of the session."""
        record = self._record
        for name, point in self.points.items():
            # Where nothing is kept a hook would only switch a fused kernel off. Optional points need one,
            # to tell whether they ran; models that have fused kernels have HookPoints, and no such points.
            if name not in self.unkept or name in self.optional:
                session.after(point.module, functools.partial(record, point))

    def _record(self, point: Point, output: Any) -> Any:
        """A forward hook that records `point` and leaves its value unchanged."""
        name, axes, replaced = point.name, point.axes, None
        try:
            value = output if isinstance(output, Tensor) else first_tensor(output, point)
            if axes and value.ndim != len(axes):
                raise HookError(f"{point} must have these axes; got shape {tuple(value.shape)}")
            if name in self.fired and not self.joined:
                raise HookError(f"{name} fired twice; a cache keeps one value per name")
            if self.options.grads:
                node = self._watch(value, point)
                replaced = with_first_tensor(output, node)
                # The model may write into the node, so it is kept only if its graph is wanted.
                value = value if self.options.detach else node
            if name not in self.unkept:
                self._keep(value, point)
        except HookError as error:
            self.skip(point, error)
        self.fired.add(name)
        if self.stops and len(self.fired) == len(self.points):
            raise Complete(self)
        return replaced

    def skip(self, point: Point, error: HookError) -> None:
        """Leaves an optional point out, and says why in `skipped`. Raises `error` for any other."""
        if point.name not in self.optional:
            raise error
        self.skipped[point.name] = str(error)

    def finish(self, outside: Any = (), reason: str = NEVER_FIRED) -> None:
        """Puts values in the model's order. Checks that all are present and none was overwritten.

        Values that others can still write into are copied, unless they carry their graph.

        Args:
            outside: the model, its arguments and its output.
            reason: why a point may not have been reached, for the error.

        Raises:
            NeverFiredError: if the run did not reach a point that is not optional; the message
                includes `reason`.
            CacheError: if a later module overwrote a value in place.
        """
        self.options.placement.wait()
        if self.joined:
            parts = self._parts.items()
            self.values = {name: join(each, name, self.points[name].axes) for name, each in parts}
        for name, before in self._versions.items():
            if _torch.version(self.values[name]) != before:
                changed = (
                    f"the model changed the value of {name} in place after its capture; "
                    "select the module that changed it, or switch its in-place option off"
                )
                self.skip(self.points[name], CacheError(changed))
        if len(self.fired) < len(self.points):
            missing = [name for name in self.points if name not in self.fired]
            self.skipped |= {n: f"{n} did not run: {reason}" for n in missing if n in self.optional}
            require_fired(missing, self.skipped, reason)
        self.axes = {name: p.axes for name, p in self.points.items() if name not in self.skipped}
        self.values = {name: self.values[name] for name in self.axes if name in self.values}
        self._own(outside)

    def _own(self, outside: Any) -> None:
        """Copies values whose memory others hold too, or of which they use only a part.

        Queries, for instance, may be a view of one tensor that holds queries, keys and values.
        """
        groups: dict[torch.UntypedStorage, list[str]] = {}
        for name, value in self.values.items():
            if not value.requires_grad and (name in self._versions or _torch.has_storage(value)):
                groups.setdefault(value.untyped_storage(), []).append(name)
        reachable = _reachable(outside) if self._in_graph else set()
        for storage, names in groups.items():
            if self._in_graph.issuperset(names):
                shared = storage in reachable
            else:
                shared = _torch.is_shared(self.values[names[0]], len(names))
            if len(names) == 1 and not shared and self.values[names[0]].nbytes == storage.nbytes():
                continue  # most values
            parts = {_torch.extent(self.values[name]): self.values[name] for name in names}
            if shared or sum(part.nbytes for part in parts.values()) < storage.nbytes():
                copies = {extent: private(part) for extent, part in parts.items()}
                self.values |= {name: copies[_torch.extent(self.values[name])] for name in names}

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        value = as_node(value, point)
        # The hook lives as long as the graph, so it must not hold the recorder and its values.
        grads, options = self.grads, self.options

        def keep(grad: Tensor) -> None:
            # A copy, because PyTorch may use the same memory for the `grad` of a leaf.
            grads[point.name] = options.kept(private(grad), point)

        value.register_hook(keep)
        return value

    def _keep(self, value: Tensor, point: Point) -> None:
        if value.requires_grad and self.options.detach:
            # The graph may use this memory too, so `is_shared` could not tell whether others do.
            self._in_graph.add(point.name)
        if self.options.detach or not value.requires_grad:
            value = value.detach()
        name, kept = point.name, self.options.kept(value, point)
        # A copy on another device may not be complete yet.
        moved = kept.device != value.device
        if self.joined:
            # A later run may overwrite this memory, a key/value cache for instance.
            self._parts.setdefault(name, []).append(kept if moved else kept.clone())
        elif torch.compiler.is_compiling():
            self.values[name] = kept
        elif not moved and (kept.is_inference() or not _torch.has_storage(kept)):
            # These have no count that would reveal later writes.
            self.values[name] = kept.clone()
        else:
            self.values[name], self._versions[name] = kept, _torch.version(kept)


def join(parts: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """Joins the values of several runs (a generation's steps) as if one run covered all positions.

    Along `key` each part ends at its own last position, and later keys are zero.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        rule = "joining the values of several runs needs one axis of positions"
        raise HookError(f"{rule}; {name} has [{' '.join(axes)}]")
    at = axes.index(along[0])
    if "key" in axes:
        key = axes.index("key")
        before = parts[0].shape[key] - parts[0].shape[at]
        ends = [before + end for end in accumulate(part.shape[at] for part in parts)]
        after = [0, 0] * (len(axes) - 1 - key)
        parts = [
            pad(part, [*after, end - part.shape[key], ends[-1] - end])
            for part, end in zip(parts, ends, strict=True)
        ]
    return torch.cat(list(parts), at)


def _reachable(outside: Any) -> set[torch.UntypedStorage]:
    """The memory of all tensors in modules, arguments and outputs."""
    found: list[Tensor] = []
    for part in outside:
        found += _torch.state_of(part) if isinstance(part, nn.Module) else tensors_in(part)
    return {tensor.untyped_storage() for tensor in found if _torch.has_storage(tensor)}


def private(value: Tensor) -> Tensor:
    """A copy without a graph. The copy of an expanded tensor is expanded too, so it takes no more memory."""
    if not _torch.has_storage(value) or 0 not in value.stride():
        return value.detach().clone()
    tight = value.detach()[tuple(slice(None if stride else 1) for stride in value.stride())]
    return tight.clone().expand(value.shape)
