"""Replay: runs one block again on stored arguments.

Lazy caches (`hooks.lazy`) compute their values this way.

1. Before the run, the state of the weights of each block with requested points is recorded
   (`BlockCall.listen`).
2. During the run, copies of each block's arguments are stored, and samples of the outputs of the
   block and of the modules after which a second run may end (`early_ends`), such as attention.
3. When a value is read, its block runs again on these arguments, under the edits of the first run,
   and records this value, or all values that are requested together (`BlockCall.run_again`). If
   the samples of some of these modules confirm all these values, the run ends after the last of
   these modules. So reading attention patterns runs no output projection and no MLP.
4. If the weights or a sample differ, the block has changed, and the read raises an error
   (`require_reproduced`). Samples of several blocks are compared together.
5. A single value that was read stays in memory until `LazyValues.drop`. If several values are
   requested together, they do not stay in memory.

Storing inputs and recomputing the rest is the idea of activation checkpointing (Chen et al. 2016).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import _torch, carried, mapped, piece_read, reading, tensors_in, without_gradients
from hooks.base.closeness import TwoRuns, are_reproduced, block_rounding, part_rounding
from hooks.base.errors import CacheError, HookError
from hooks.base.memory import Bound
from hooks.base.transfer import Copies
from hooks.capture import Complete, Recorder, memory_in
from hooks.edit import unwatched
from hooks.modes import Options
from hooks.point import HookPoint, Point, inside
from hooks.session import Edits, Session, hooks_disabled, is_of_package


def replay(
    block: nn.Module,
    args: Any,
    kwargs: Any,
    edits: Edits,
    recorder: Recorder | None = None,
    listen: Callable[[Session], None] | None = None,
) -> Any:
    """Run one block again on the given arguments and return its output.

    Open hook contexts do not act. Hooks that the user registered on the block act. The gradient
    mode and the autocast of the caller apply.

    Args:
        block: the module to run.
        args, kwargs: the block's arguments.
        edits: modules, each with a function of the module's output. Modules outside the block are
            ignored.
        recorder: records its points, which must all be inside the block.
        listen: a function that registers more hooks, which act after the edits and the recorder.

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
            if listen is not None:
                listen(session)
            return block(*args, **kwargs)

    return hooks_disabled(run)


@dataclasses.dataclass(frozen=True, eq=False)
class EarlyEnd:
    """A module inside a block after which a second run of the block may end.

    Attributes:
        module: a part of the block, or a point inside the part. A sample of its output is compared.
        points: the points inside the part that change the output of the part only through `module`.
            None if the module is the part. Then they are the points that fire while the part runs.
    """

    module: nn.Module
    points: Collection[nn.Module] | None = None


def early_ends(block: nn.Module, points: Mapping[str, Point]) -> list[EarlyEnd]:
    """Return the modules inside a block after which a second run of the block may end.

    They are the parts of the block: its children that contain modules with weights, such as
    attention and the MLP, but not norms. The last part is left out, because only an addition
    follows it in most blocks.

    A run may end even earlier, inside a part. For example, all points of attention change its
    output only through `z`, so the run may end at `z`. The class of the part declares this:
    `acts_through = "z"`. The result then contains the point `z` in place of attention. It contains
    attention too if a module inside attention that is not one of these points is requested.

    The list is empty if something may act at the end of the block: a shard, a compiler, a hook of
    the user, or an object that has replaced `block.forward`, for example to move weights back after
    each run.

    Args:
        block: the block.
        points: the requested points of the block.
    """
    if _acts_at_end(block):
        return []
    parts = [
        part for part in dict.fromkeys(_torch.children(block)) if _torch.contains_weights(part)
    ]
    requested = {point.module for point in points.values()}
    ends = []
    for part in parts[:-1]:
        end = None if _acts_at_end(part) else _last_point(part)
        others = requested
        if end is not None and end.points is not None:
            ends.append(end)
            others = requested.difference(end.points)
        if others and not others.isdisjoint(inside(part)):
            ends.append(EarlyEnd(part))
    return ends


def _acts_at_end(module: nn.Module) -> bool:
    """Return whether something may act when a module ends, so that it must not end early."""
    return (
        "forward" in vars(module)
        or _torch.is_compiled(module)
        or any(not is_of_package(hook) for hook in _torch.hooks_of(module))
        or _torch.has_shards(module)
    )


def _last_point(part: nn.Module) -> EarlyEnd | None:
    """Return the point through which all other points of a part act; None if none is declared."""
    for module in (part, carried(part, "hook_points")):
        name = getattr(type(module), "acts_through", None)
        if name is not None:
            points = [child for child in _torch.children(module) if isinstance(child, HookPoint)]
            return EarlyEnd(getattr(module, name), points)
    return None


Samples = dict[nn.Module, list[Tensor]]
"""Samples of the outputs of modules, by module; see `sampled`."""

_CONSTANTS = (type(None), int, float, str, torch.dtype)


def plain_argument(module: nn.Module, leaf: Any, name: str) -> Any:
    """Return an argument that is not a tensor in a form that can be stored for another run.

    Args:
        module: the module.
        leaf: the argument.
        name: the name of the module, for errors.

    Raises:
        HookError: if the argument is an object that a later run may change.
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
    """One call of a block: copies of its arguments, and data to detect later changes of the block.

    A write to a weight or buffer, or its replacement, is always detected, unless the tensor is
    offloaded to the meta device between runs. Any other change, such as a new hook, is detected in
    a sample of an output, which contains numbers from every row and every column: the output of the
    block, or of each part that the second run has run. The change is certain to be detected if it
    changes a whole row or column by more than rounding. A change of single numbers may be missed.
    A change after the last part that ran cannot change the values that are read.

    Attributes:
        name: the block's name.
        block: the module.
        points: the requested points of the block.
        copies: the copies of arguments in this run, which blocks may share, such as a mask.
        bound: counts the stored bytes and raises an error above the limit.
        fired, repeated: whether the block ran, and whether it ran more than once.
        writes: whether the block may write into its arguments, as far as the first run shows. Then
            each second run gets copies of the stored arguments.
    """

    name: str
    block: nn.Module
    points: Mapping[str, Point]
    copies: Copies
    bound: Bound | None = dataclasses.field(init=False, default=None)
    fired: bool = False
    repeated: bool = False
    writes: bool = True
    _inputs: list[Tensor] = dataclasses.field(default_factory=list)
    _given: list[Tensor] = dataclasses.field(default_factory=list)
    _samples: Samples = dataclasses.field(default_factory=dict)

    def listen(self, session: Session, bound: Bound) -> None:
        """Store the block's next call, through hooks of the session."""
        self.bound = bound
        # The state is recorded before the run and not when the block begins, which would take twice
        # as long. So a block that writes into its own buffers counts as changed, and reading its
        # values raises an error.
        self._state = _torch.marks(self.block)
        ends = early_ends(self.block, self.points)
        session.before(self.block, self._store)
        session.after(self.block, self._sample)
        for end in ends:
            session.after(end.module, partial(self._sample_end, end.module))

    def _store(self, args: Any, kwargs: Any) -> None:
        """Store the arguments of the first call, with the settings that its numbers depend on."""
        if self.fired:
            self.repeated = True
            return
        # The arguments are copied, because the block, a later block or the caller may write into
        # them.
        self._arguments = mapped((args, kwargs), self._stored)
        self._unwritten = _versions(self._inputs)
        self._before = _versions(self._given)
        self._autocast, self._precision = numerics(self._inputs)
        self._piece = piece_read()
        self.fired = True

    def _stored(self, leaf: Any) -> Any:
        """Return a copy of one argument."""
        if not isinstance(leaf, Tensor):
            return plain_argument(self.block, leaf, self.name)
        self._given.append(leaf)
        stored = self.copies(leaf)
        self._inputs.append(stored)
        assert self.bound is not None
        self.bound.add(self.name, stored)
        return stored

    def _sample(self, output: Any) -> None:
        """Store a sample of the output, and whether the block wrote into its arguments."""
        self._samples[self.block] = self._sampled(unwatched(output))
        self.writes = _versions(self._given) != self._before or -1 in self._before
        self._given = []

    def _sampled(self, output: Any) -> list[Tensor]:
        """Return samples of an output of the block.

        If the block ran in pieces, only the first tensor of its output has all positions. Another
        tensor, such as the pattern beside the stream, belongs to the last piece.
        """
        has_pieces = getattr(vars(self.block).get("forward"), "joins_first_tensor", False)
        return _first_sampled(output) if has_pieces else sampled(output)

    def _sample_end(self, module: nn.Module, output: Any) -> None:
        """Store a sample of the output of a module after which a second run may end.

        The sample is empty if the module runs twice, or if its output contains no tensor.
        """
        is_second = module in self._samples
        self._samples[module] = [] if is_second else _first_sampled(unwatched(output))

    def report(self, recorder: Recorder) -> None:
        """Tell the recorder which points the block reached.

        If the block ran twice, its optional points are skipped.

        Raises:
            HookError: if the block ran twice and a point is not optional.
        """
        if self.fired:
            if self._piece.has_masks:
                for name in self.points:
                    recorder.note(name, self._piece)
            names = self.points.keys()
            optional = recorder.optional
            recorder.fired.update(names - optional if optional else names)
        for name in self.points if self.repeated else ():
            once = "a lazy cache keeps one input per block"
            error = HookError(f"{self.name} ran twice in one run; {once}")
            recorder.skip(recorder.points[name], error)

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors of this call: its arguments and the samples."""
        return [*self._inputs, *itertools.chain.from_iterable(self._samples.values())]

    @without_gradients
    def run_again(
        self,
        points: Mapping[str, Point],
        edits: Edits,
        options: Options,
        memory_of_others: Collection[int] | None = None,
    ) -> "SecondRun":
        """Run the block on its stored arguments, under the edits of the first run.

        The result has the values. They may be wrong until `require_reproduced` has compared the
        two runs.

        Args:
            points: the block's points to record.
            edits: the edits of the first run, anywhere in the model.
            options: the options for the values.
            memory_of_others: the memory of weights and arguments in the first run; see `Recorder`.
                Default: None, so that every value is copied.

        Raises:
            CacheError: if a weight has changed since the run.
        """
        if _torch.marks(self.block) != self._state:
            raise _changed(self.name)
        if memory_of_others is not None:
            memory_of_others = {*memory_of_others, *memory_in(self._inputs)}
        recorder = Recorder(points, options, memory_of_others=memory_of_others)
        with real_tensors(self):
            outputs = self._compared(self._replayed(edits, recorder))
            second = SecondRun(self, edits, points, options, outputs, recorder.values)
            try:
                recorder.finish(
                    "its block gave it in the run, within a `with` statement that has ended"
                )
            except HookError:
                # A change of the block is the better reason.
                require_reproduced([second])
                raise
        return second

    def is_repeatable(self, second: "SecondRun") -> bool:
        """Return whether the block is unchanged although two runs of it differ.

        The recording hooks may have disabled fused kernels, and the other kernels may round more.
        So run the block without them, and compare this output. Then nothing has compared the
        recorded run, so it must be exactly repeatable: the same kernels round the same tensors
        equally.
        """
        again = Recorder(second.points, second.options)
        recorded = self._compared(self._replayed(second.edits, again))
        plain = self._compared(self._replayed(second.edits))
        runs = [TwoRuns(second.outputs.theirs, recorded.theirs, 0.0), plain]
        return all(are_reproduced(runs))

    def _compared(self, samples: Samples) -> TwoRuns:
        """Return the samples of a second run, and the samples of these modules in the first run."""
        precision = self._precision(block_rounding if self.block in samples else part_rounding)
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for module, sample in samples.items():
            earlier = self._samples[module]
            # Only one of the two runs may have been in pieces; see `_sampled`.
            n = 1 if 1 in (len(earlier), len(sample)) else None
            ours += earlier[:n]
            theirs += sample[:n]
        return TwoRuns(ours, theirs, precision)

    def _replayed(self, edits: Edits, recorder: Recorder | None = None) -> Samples:
        """Run the block again, and return samples of the outputs that show whether it has changed.

        They are the output of the block or, if the run ended early, the outputs of the modules of
        all early ends that ran.

        Args:
            edits: the edits of the first run.
            recorder: records values of the run. If it has all its values, and the samples confirm
                all of them, the run ends early.

        Raises:
            CacheError: if the block wrote into its stored arguments, and did not in the first run.
        """
        copies = Copies()

        def reused(leaf: Any) -> Any:
            return copies(leaf) if self.writes and isinstance(leaf, Tensor) else leaf

        # A block may write into the containers of its arguments too, so they are always copied.
        args, kwargs = mapped(self._arguments, reused)
        watch = None if recorder is None else _EndOfRun(recorder, self._ends(recorder.points))
        listen = None if watch is None else watch.listen
        with self._autocast(), reading(self._piece):
            try:
                output = replay(
                    self.block, args, kwargs, edits=edits, recorder=recorder, listen=listen
                )
            except Complete as stopped:
                if watch is None or stopped.args[0] is not watch:
                    raise
                samples = watch.samples
            else:
                samples = {self.block: self._sampled(output)}
        if _versions(self._inputs) != self._unwritten:
            raise _changed(self.name)
        return samples

    def _ends(self, points: Mapping[str, Point]) -> list[EarlyEnd]:
        """Return the early ends for some points whose samples the first run has stored."""
        return [end for end in early_ends(self.block, points) if self._samples.get(end.module)]


class _EndOfRun:
    """Ends the second run of a block early, as soon as all wanted values are recorded and checked.

    1. A recorder records the wanted values while the block runs.
    2. A value may be used only if the block computes the same as in its first run. So after some
       modules, a sample of the output is stored, for a comparison with the first run. A module
       confirms the values that were recorded inside it or that it names.
    3. When all wanted values are recorded and confirmed, `Complete` ends the run.

    Args:
        recorder: the recorder of the wanted values.
        ends: the modules after which the run may end.

    Attributes:
        samples: the samples, by module, of all modules that ran.
    """

    def __init__(self, recorder: Recorder, ends: Sequence[EarlyEnd]) -> None:
        self._recorder = recorder
        self._ends = ends
        self._before: set[str] = set()
        self._confirmed: set[str] = set()
        self.samples: Samples = {}

    def listen(self, session: Session) -> None:
        """Register the hooks."""
        for end in self._ends:
            if end.points is None:
                session.before(end.module, self._begin)
            session.after(end.module, partial(self._end, end))

    def _begin(self, args: Any, kwargs: Any) -> None:
        """Store the names of the values that are recorded before a module runs.

        After the module, `_end` finds the values that were recorded inside it: all recorded values
        except these.
        """
        self._before = set(self._recorder.fired)

    def _end(self, end: EarlyEnd, output: Any) -> None:
        """Take a sample of a module's output, and end the run if it confirms the last values."""
        self.samples[end.module] = _first_sampled(output)
        fired = self._recorder.fired
        if end.points is None:
            self._confirmed |= fired - self._before
        else:
            points = self._recorder.points
            self._confirmed |= {name for name in fired if points[name].module in end.points}
        if len(self._confirmed) == len(self._recorder.points):
            raise Complete(self)


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return the number of writes into each tensor; -1 if PyTorch does not count them."""
    return [_torch.version(part) if _torch.has_storage(part) else -1 for part in tensors]


@dataclasses.dataclass(frozen=True, eq=False)
class SecondRun:
    """A second run of a block, which recorded values.

    Attributes:
        call: the first run.
        edits: the edits of both runs.
        points, options: the recorded points, and the options for their values.
        outputs: samples of the outputs of both runs.
        values: the recorded values by name.
    """

    call: BlockCall
    edits: Edits
    points: Mapping[str, Point]
    options: Options
    outputs: TwoRuns
    values: dict[str, Tensor]


@without_gradients
def require_reproduced(seconds: Sequence[SecondRun]) -> None:
    """Check that blocks are unchanged since their first run.

    A block is unchanged if a sample of its output is equal to the sample of the first run, up to
    rounding. If the second run ended early, the samples of its parts are compared instead. The host
    waits once for all blocks.

    Raises:
        CacheError: if a block has changed. The error names the block.
    """
    with real_tensors(*(second.call for second in seconds)):
        agrees = are_reproduced([second.outputs for second in seconds])
        for second, is_same in zip(seconds, agrees, strict=True):
            if not is_same and not second.call.is_repeatable(second):
                raise _changed(second.call.name)


def _changed(name: str) -> CacheError:
    """Return the error for a block that has changed."""
    return CacheError(
        f"{name} changed after the run (a weight, an attribute, a hook, an adapter, a dictionary, "
        "the precision of products, or an edit that is not the same twice), so running it again "
        "would give other values; read a lazy cache before changing the model"
    )


def real_tensors(*calls: BlockCall) -> AbstractContextManager[Any]:
    """Return a context manager inside which blocks run on the tensors that they stored.

    A plan runs on fake tensors. But an edit that acts in the plan may read the lazy cache of a real
    run, whose blocks must run on real tensors.
    """
    tensors = itertools.chain.from_iterable(call.tensors() for call in calls)
    is_planned = any(isinstance(tensor, _torch.FakeTensor) for tensor in tensors)
    return nullcontext() if is_planned else _torch.unset_fake_temporarily()


def sampled(output: Any) -> list[Tensor]:
    """Return some numbers of each tensor: at least one from each row and from each column."""
    return [_sample(tensor.detach().contiguous()) for tensor in tensors_in(output)]


def _first_sampled(output: Any) -> list[Tensor]:
    """Return some numbers of the first tensor of an output.

    Other tensors may be missing in one of two runs, such as the pattern beside the output of
    attention.
    """
    return sampled(output if isinstance(output, Tensor) else next(tensors_in(output), None))


def _sample(tensor: Tensor) -> Tensor:
    """Return numbers of a contiguous tensor at equal steps, from every row and every column."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    # A step below the length of a row skips no row. If the step and this length have no common
    # divisor, the steps reach every column.
    step = max(min(tensor.numel() // max(columns, 1), columns - 1), 1)
    while math.gcd(step, columns) > 1:
        step -= 1
    # This one operation is faster than two views and a copy.
    return torch.as_strided_copy(tensor, (-(-tensor.numel() // step),), (step,))


def numerics(
    tensors: list[Tensor],
) -> tuple[Callable[[], Any], Callable[[Callable[..., float]], float]]:
    """Return the numerical settings of the present run, as two functions.

    The first function returns a context manager that restores the present state of autocast. The
    second function takes a rule, such as `block_rounding`, and returns its limit of rounding.

    Args:
        tensors: the arguments of the run, whose device and dtypes determine the settings.
    """
    dtype = None
    if _torch.is_any_autocast_enabled():
        kind = _autocast_device(tensors)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def precision(rounding: Callable[..., float]) -> float:
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return rounding(dtype or torch.float32, *dtypes)

    def autocast() -> Any:
        return torch.autocast(_autocast_device(tensors), dtype, enabled=dtype is not None)

    return autocast, precision


def _autocast_device(tensors: list[Tensor]) -> str:
    """Return the device type of the first tensor, if autocast supports it."""
    device = tensors[0].device.type if tensors else "cpu"
    return device if torch.amp.is_autocast_available(device) else "cpu"
