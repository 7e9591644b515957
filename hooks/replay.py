"""Replay: runs one block again on stored arguments. Lazy caches (`hooks.lazy`) compute their values this way.

1. Before the run, each block with requested points notes the state of its weights (`BlockCall.listen`).
2. During the run, each block stores copies of its arguments and a sample of its output.
3. When a value is read, its block runs again on those arguments, under the edits of the first run, and that
   value is recorded, or all those that are asked for together (`BlockCall.read`).
4. If the weights or the sample differ, the block has changed, and the read is an error. A wrong value is
   never given.
5. What was read by itself stays in memory until `LazyValues.drop`. What is read together does not.

Keeping inputs and computing the rest again is the idea of activation checkpointing (Chen et al. 2016).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import _torch, carried, mapped, piece_read, reading, tensors_in
from hooks.base.closeness import block_rounding, is_reproduced
from hooks.base.errors import CacheError, HookError
from hooks.base.memory import Bound
from hooks.base.transfer import Copies
from hooks.beside import unwatched
from hooks.capture import Recorder
from hooks.modes import Options
from hooks.point import Point, inside
from hooks.session import Edits, Session, hooks_disabled


def replay(
    block: nn.Module, args: Any, kwargs: Any, edits: Edits, recorder: Recorder | None = None
) -> Any:
    """Run one block again on the given arguments and return its output.

    Open hook contexts do not act. Hooks that the user registered on the block do. Gradient mode and
    autocast stay as the caller set them.

    Args:
        block: the module to run.
        args, kwargs: the block's arguments.
        edits: modules, each with a function of its output. Modules outside the block are ignored.
        recorder: records its points. All must be inside the block.

    >>> block = nn.Sequential(nn.ReLU(), nn.Tanhshrink())
    >>> replay(block, (torch.tensor([-1.0, 2.0]),), {}, [(block[1], lambda output: output * 0)])
    tensor([0., 0.])
    """
    reached = inside(block)

    def run() -> Any:
        with Session() as session:
            for module, edit in edits:
                if module in reached:
                    session.after(module, edit)
            if recorder is not None:
                recorder.listen(session)
            return block(*args, **kwargs)

    return hooks_disabled(run)


_CONSTANTS = (type(None), int, float, str, torch.dtype)


def plain_argument(module: nn.Module, leaf: Any, name: str) -> Any:
    """Return the form in which a module's argument that is no tensor is kept for another run.

    Raises:
        HookError: if it is an object that a later run may change.
    """
    if isinstance(leaf, _CONSTANTS):
        return leaf
    plain = getattr(carried(module, "hook_points"), "plain", None)
    if plain is None:
        got = f"{name} got a {type(leaf).__name__}"
        raise HookError(f"lazy=True needs plain arguments; {got} (use_cache=False may help)")
    return plain(leaf)


@dataclasses.dataclass(eq=False)
class BlockCall:
    """One call of a block: copies of its arguments, and enough to detect later changes of the block.

    Weights and buffers that were written or replaced are always detected, unless they are offloaded to the
    meta device while nothing runs. Other changes are detected by the output, of which a sample of every row
    and column is kept: they must change a whole row or column by more than rounding. A change of single
    numbers may be missed.

    Attributes:
        name: the block's name.
        block: the module.
        points: the block's points that were asked for.
        copies: the copies of arguments in this run. Blocks may share a mask, for instance.
        bound: counts what is stored, and refuses too much.
        fired, repeated: whether the block ran, and whether it did more than once.
    """

    name: str
    block: nn.Module
    points: Mapping[str, Point]
    copies: Copies
    bound: Bound | None = dataclasses.field(init=False, default=None)
    fired: bool = False
    repeated: bool = False
    _inputs: list[Tensor] = dataclasses.field(default_factory=list)
    _output: list[Tensor] = dataclasses.field(default_factory=list)

    def listen(self, session: Session, bound: Bound) -> None:
        """Store the block's next call, through hooks of the session."""
        self.bound = bound
        # Of all blocks before the run: between other work the same questions take twice as long. A block
        # that writes its own buffers is then never run again.
        self._state = _torch.marks(self.block)
        session.before(self.block, self._store)
        session.after(self.block, self._sample)

    def _store(self, args: Any, kwargs: Any) -> None:
        if self.fired:
            self.repeated = True
            return
        # The block itself, a later one or the caller may write into its arguments.
        self._arguments = mapped((args, kwargs), self._stored)
        self._autocast, self._precision = numerics(self._inputs)
        self._piece = piece_read()
        self.fired = True

    def _stored(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return plain_argument(self.block, leaf, self.name)
        stored = self.copies(leaf)
        self._inputs.append(stored)
        assert self.bound is not None
        self.bound.add(self.name, stored)
        return stored

    def _sample(self, output: Any) -> None:
        self._output = sampled(unwatched(output))

    def report(self, recorder: Recorder) -> None:
        """Tell the recorder which points the block's run reached, and skip them if it ran twice.

        Raises:
            HookError: if the block ran twice and a point is not optional.
        """
        if self.fired:
            if self._piece.has_masks:
                for name in self.points:
                    recorder.note(name, self._piece)
            names, optional = self.points.keys(), recorder.optional
            recorder.fired.update(names - optional if optional else names)
        for name in self.points if self.repeated else ():
            once = "a lazy cache keeps one input per block"
            error = HookError(f"{self.name} ran twice in one run; {once}")
            recorder.skip(recorder.points[name], error)

    def tensors(self) -> list[Tensor]:
        """The tensors kept of this call: its arguments and a sample of its output."""
        return self._inputs + self._output

    @_torch.without_gradients
    def read(
        self, points: Mapping[str, Point], edits: Edits, options: Options
    ) -> Mapping[str, Tensor]:
        """Run the block on its stored arguments, under the edits of the first run.

        Args:
            points: the block's points to record.
            edits: the edits of the first run, anywhere in the model.
            options: how to keep them.

        Returns:
            Their values, by name.

        Raises:
            CacheError: if the block changed since.
        """
        recorder = Recorder(points, options)
        planned = any(isinstance(tensor, _torch.FakeTensor) for tensor in self.tensors())
        # During a plan, an edit may read the cache of a real run.
        with nullcontext() if planned else _torch.unset_fake_temporarily():
            if not self._record_again(edits, recorder):
                raise CacheError(
                    f"{self.name} changed after the run (a weight, an attribute, a hook, an adapter, a dictionary, the "
                    "precision of products, or an edit that is not the same twice), so running it again "
                    "would give other values; read a lazy cache before changing the model"
                )
            recorder.finish("its block gave it in the run, within a `with` that has ended")
        return recorder.values

    def _record_again(self, edits: Edits, recorder: Recorder) -> bool:
        """Record the points in another run, and say whether the output of the block is the same."""
        if _torch.marks(self.block) != self._state:
            return False
        precision, output = self._precision(), self._replayed(edits, recorder)
        if is_reproduced(self._output, output, precision):
            return True
        # Hooks may cause other kernels to run. If those round more, compare without hooks; but what was
        # recorded must then be the same twice: the same kernels on the same tensors round alike.
        again = Recorder(recorder.points, recorder.options)
        is_repeatable = is_reproduced(output, self._replayed(edits, again), 0.0)
        return is_repeatable and is_reproduced(self._output, self._replayed(edits), precision)

    def _replayed(self, edits: Edits, recorder: Recorder | None = None) -> list[Tensor]:
        """A sample of what the block gives now."""
        # New containers and tensors, because the block may write into them.
        copies = Copies()
        args, kwargs = mapped(
            self._arguments, lambda leaf: copies(leaf) if isinstance(leaf, Tensor) else leaf
        )
        with self._autocast(), reading(self._piece):
            return sampled(replay(self.block, args, kwargs, edits, recorder))


def sampled(output: Any) -> list[Tensor]:
    """Some numbers of each tensor: at least one of each row and of each column."""
    return [_sample(tensor.detach().contiguous()) for tensor in tensors_in(output)]


def _sample(tensor: Tensor) -> Tensor:
    columns = tensor.shape[-1] if tensor.ndim else 1
    # A step below the length of a row skips no row. Without a common divisor it reaches every column.
    step = max(min(tensor.numel() // max(columns, 1), columns - 1), 1)
    while math.gcd(step, columns) > 1:
        step -= 1
    # One operation in place of two views and a copy.
    return torch.as_strided_copy(tensor, (-(-tensor.numel() // step),), (step,))


def numerics(tensors: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Two functions: one enters the present autocast again, one gives the relative size of rounding errors."""
    dtype = None
    if _torch.is_any_autocast_enabled() and torch.is_autocast_enabled(
        kind := _autocast_device(tensors)
    ):
        dtype = torch.get_autocast_dtype(kind)

    def precision() -> float:
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return block_rounding(dtype or torch.float32, *dtypes)

    return lambda: torch.autocast(
        _autocast_device(tensors), dtype, enabled=dtype is not None
    ), precision


def _autocast_device(tensors: list[Tensor]) -> str:
    """The kind of device of the first tensor, if it has autocast."""
    device = tensors[0].device.type if tensors else "cpu"
    return device if torch.amp.is_autocast_available(device) else "cpu"
