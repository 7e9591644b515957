"""The unedited run of a sweep, and the check that edited runs can begin inside this run."""

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import EditedPoint, HookedRunner
from hooks.base import Calls, is_rounding, number_of_call, tensors_in, version
from hooks.shared import Session, first_tensor, hooks_disabled, inside
from interp.edits import Edit
from interp.protocol import few_logits, logits_of, of
from interp.runs.rows import Batch, EditedRun, are_edits


class Unedited:
    """The unedited run of a batch, with the values that edited runs share with it.

    Each `Edit` is tried on the values of this run, so that errors are raised before the edited
    runs.

    Args:
        runner: the runner of the model.
        batch: the texts and the metric.
        jobs: the edited runs that will follow.
        last: the number of last positions whose logits are needed, if the model can leave out the
            others. Default: all positions.
        keep: the blocks whose input streams are kept. Other streams are freed during the run,
            except the output of the last block: `streams` has a tensor without values in their
            place. Default: all blocks.

    Attributes:
        logits: the logits that the metric reads, [batch, read, vocab].
        stages: for each edited module, the stages of the forward pass at which the module ran. The
            stage is -1 before the blocks, n in block n, and n + 0.5 from the end of block n to the
            next block.
        streams: the inputs of all blocks and the output of the last block, [batch, pos, d_model].
        past: the keys and values of each block, [batch, kv_head, pos, d_head]; empty if no edited
            run begins after the first position.
        contexts: the inputs of each block besides the stream. Blocks on one device share a context.
        language: the parts of the model; see `interp.protocol.of`.

    Raises:
        EditError: if an edit does not fit.
        NeverFiredError: if the run does not reach an edited point.
    """

    def __init__(
        self,
        runner: HookedRunner,
        batch: Batch,
        jobs: Sequence[EditedRun],
        last: int = 0,
        keep: Container[int] | None = None,
    ) -> None:
        self.model: Any = runner.model
        self.batch = batch
        self.stages: dict[nn.Module, set[float]] = {}
        self.streams: list[Tensor] = []
        self.past: list[list[Tensor]] = []
        self.contexts: list[Any] = []
        # The number of tensors that `past` needs for each block: keys and values, or none.
        self._n_past = 2 if any(job.pos for job in jobs) else 0
        self._stage = -1.0
        self._by_rows = True
        self._keep_streams = keep
        # What is known of the streams that were freed: that no block changed its input in place,
        # and whether each block read the output of the block before it.
        self._is_intact = True
        self._flags: list[Tensor] = []
        self._fired = Calls()
        self._calls: list[tuple[Any, ...]] = []
        self._outputs: list[Any] = []
        self.language: Any = of(runner.model)
        self._arguments = batch.text.arguments(runner.model)
        # `context_of` of an attached model returns the keys and values of a run. Otherwise hooks
        # record them.
        self._finds_context = hasattr(self.language, "context_of")
        with Session() as session:
            self._listen(session, runner, jobs)
            fewer = few_logits(self.model, last) if last else {}
            output = self.model(batch.tokens, **self._arguments, **fewer)
        self.logits = batch.read(logits_of(output))
        self._require_fired(jobs)

    def _listen(self, session: Session, runner: HookedRunner, jobs: Sequence[EditedRun]) -> None:
        """Register hooks that try the edits and record the blocks in the next run."""
        # Hooks run in the order of registration. The hooks of edits come first, so that an edit of
        # a block's output still runs at the stage of this block.
        for module, edited in _by_module(jobs).items():
            session.after(module, partial(self._try, module, edited))
        for layer, block in enumerate(getattr(self.language, "blocks", ())):
            session.before(block, partial(self._enter, layer))
            session.after(block, partial(self._leave, layer))
            if self._n_past and not self._finds_context:
                for point in _keys_and_values(block, runner):
                    session.after(point, self._keep)

    def _require_fired(self, jobs: Sequence[EditedRun]) -> None:
        """Raise an error if the run did not reach an edited point."""
        for job in jobs:
            points = [edited.point for edited in job.edits]
            job.fired = {point.name for point in points if point.module in self.stages}
            job.require_fired()
            job.fired = set()

    def _try(self, module: nn.Module, edits: list[EditedPoint], output: Any) -> None:
        """Try the edits of a module on its output, so that wrong edits raise their errors now.

        Also record the stage of the forward pass at which the module runs (see `stages`), and
        whether edited runs can be rows of one batch there.

        Args:
            module: the module, which has just run.
            edits: the edits of this module in all edited runs.
            output: the output of the module. Edits change a copy of its value.
        """
        point = edits[0].point
        value = first_tensor(output, point)
        call = self._fired.next(point.name)
        self.batch.note(point, value)
        self.stages.setdefault(module, set()).add(self._stage)
        # Steps before and after the blocks are computed for one edited run at a time, so only
        # values in blocks need a row for each text.
        is_in_block = self._stage in range(len(self._calls))
        self._by_rows &= not is_in_block or self.batch.axes[point.module] is not None
        # The value of this run must not change, even if the features of an edit write into it.
        scratch = value.clone() if any(map(are_edits, edits)) else value
        for edited in edits:
            # A function may have a state, so it must not be called an additional time.
            if not are_edits(edited):
                continue
            first, *others = edited.hooks
            if others or not isinstance(first, Edit):
                # Each edit changes the result of the edit before it.
                edited.apply(value, call)
            else:
                with number_of_call.set(call):
                    hooks_disabled(first.try_on, scratch, edited.point)

    def _enter(self, layer: int, args: Any, kwargs: Any) -> None:
        """Record the arguments of a block, and the version of its input stream.

        PyTorch raises the version of a tensor with each change in place.
        """
        self._stage = layer
        self.past.append([])
        stream = next(iter((*args, *kwargs.values())), None)
        if isinstance(stream, Tensor):
            self._calls.append((args, kwargs, stream, version(stream)))
        else:
            self._calls.append(())

    def _leave(self, layer: int, output: Any) -> None:
        """Record the output of a block."""
        self._stage = layer + 0.5
        self._outputs.append(next(tensors_in(output), None))
        if len(self.past[layer]) > 2:
            # The block computed some positions at a time: the keys of a piece, its values, the keys
            # of the next piece, and so on.
            keys, values = self.past[layer][::2], self.past[layer][1::2]
            self.past[layer] = [torch.cat(keys, 2), torch.cat(values, 2)]
        if self._keep_streams is not None and self._calls[layer]:
            self._free(layer, is_kept=layer in self._keep_streams)

    def _free(self, layer: int, is_kept: bool) -> None:
        """Check that the input stream of a block is the output of the block before, and free both.

        `is_resumable` needs this check, and it is impossible after the tensors are freed.

        Args:
            layer: the number of the block.
            is_kept: whether the stream is needed later, and must not be freed.
        """
        args, kwargs, stream, before = self._calls[layer]
        self._is_intact &= version(stream) == before
        if layer:
            flags = _closeness([self._outputs[layer - 1]], [stream])
            self._is_intact &= flags is not None
            self._flags += flags or []
        # The first stream is compared with the result of `input_resid`.
        if not is_kept and layer:
            empty = stream.new_zeros(1).expand(stream.shape)
            args = tuple(empty if value is stream else value for value in args)
            kwargs = {name: empty if value is stream else value for name, value in kwargs.items()}
            self._calls[layer] = (args, kwargs, empty, version(empty))
            stream = empty
        if layer:
            self._outputs[layer - 1] = stream

    def _keep(self, value: Tensor) -> None:
        """Record the keys or the values of a block."""
        # Copy the value. Queries, keys and values may be views of one tensor, which a view would
        # keep in memory.
        self.past[-1].append(value.detach().transpose(1, 2).contiguous())

    def is_resumable(self) -> bool:
        """Return True if edited runs can begin at any block, with the stream of this run.

        This method also sets `streams` and `contexts`. It sets `past` if the contexts contain the
        keys and values.
        """
        language = self.language
        calls = self._calls
        outputs = self._outputs
        n_blocks = len(getattr(language, "blocks", ()))
        if not n_blocks or len(calls) != n_blocks or not all(calls) or not self._by_rows:
            return False
        possible_stages = {-1.0, *map(float, range(n_blocks)), n_blocks - 0.5}
        self.contexts = self._contexts()
        self.streams = [stream for _, _, stream, _ in calls] + outputs[-1:]
        return (
            set().union(*self.stages.values()) <= possible_stages
            and all(hasattr(context, "repeated") for context in self.contexts)
            and all(hasattr(context, "after") for context in self.contexts)
            and all(map(self._is_whole, self.past))
            and self._is_intact
            # If a block changes its input stream in place, the recorded stream is wrong.
            and all(version(stream) == before for _, _, stream, before in calls)
            and all(hasattr(language, step) for step in ("input_resid", "run_block", "unembed"))
            and self._steps_are_close()
        )

    def _is_whole(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if these are the keys and values of a block, once at each position.

        If no edited run needs keys and values, the sequence must be empty.
        """
        n_pos = self.batch.tokens.shape[1]
        return len(tensors) == self._n_past and all(part.shape[2] == n_pos for part in tensors)

    def free_streams(self) -> None:
        """Free the memory of the streams of this run. The contexts, keys and values remain."""
        self.streams = []
        self._calls = []
        self._outputs = []

    def _steps_are_close(self) -> bool:
        """Return True if the steps of the model return the values that the run computed."""
        outputs = _closeness(self._outputs, self.streams[1:])
        if outputs is None:
            return False
        resid = self.language.input_resid(self.batch.tokens, self.contexts[0])
        logits = self.language.unembed(self.batch.read(self.streams[-1]))
        ends = _closeness([resid, logits], [self.streams[0], self.logits])
        if ends is None:
            return False
        flags: dict[torch.device, list[Tensor]] = {}
        for flag in self._flags + outputs + ends:
            flags.setdefault(flag.device, []).append(flag)
        # Python waits once for each device, and only here.
        return all(bool(torch.stack(of_device).all()) for of_device in flags.values())

    def contexts_from(self, pos: int) -> list[Any]:
        """Return contexts for runs that begin at a position, with the keys and values before it.

        Blocks that share a context in `contexts` also share the new context.
        """
        if not pos:
            return self.contexts
        past = []
        for tensors in self.past:
            past.append(tuple(tensor[:, :, :pos] for tensor in tensors))
        originals = {id(context): context for context in self.contexts}
        later = {key: context.after(pos, past) for key, context in originals.items()}
        return [later[id(context)] for context in self.contexts]

    def _contexts(self) -> list[Any]:
        """Return the inputs of each block besides the stream.

        The context is None for a block that cannot run again.
        """
        if self._finds_context:
            calls = [(args, kwargs) for args, kwargs, _, _ in self._calls]
            context = self.language.context_of(calls, self._arguments)
            if context and self._n_past:
                self.past = [list(pair) for pair in context.held]
            return [context] * len(calls)
        contexts = []
        for args, kwargs, *_ in self._calls:
            contexts.append(args[1] if len(args) == 2 and not kwargs else None)
        return contexts


def _keys_and_values(block: nn.Module, runner: HookedRunner) -> list[nn.Module]:
    """Return the modules of the block's points `k` and `v`."""
    modules_of_block = inside(block)
    modules = {}
    for point in runner.points.values():
        if point.module in modules_of_block:
            modules[point.name.rpartition(".")[2]] = point.module
    return [modules[name] for name in ("k", "v") if name in modules]


def _by_module(jobs: Sequence[EditedRun]) -> dict[nn.Module, list[EditedPoint]]:
    """Return the edited points of all runs by their modules."""
    by_module: dict[nn.Module, list[EditedPoint]] = {}
    for job in jobs:
        for edited in job.edits:
            by_module.setdefault(edited.point.module, []).append(edited)
    return by_module


def _closeness(values: Sequence[Any], expected: Sequence[Any]) -> list[Tensor] | None:
    """Return for each value whether it equals the expected tensor up to rounding.

    A value that is the expected tensor itself is left out. The result is None if a value is no
    tensor or has another shape.
    """
    flags = []
    for value, tensor in zip(values, expected, strict=True):
        if not isinstance(value, Tensor) or value.shape != tensor.shape:
            return None
        if value is not tensor:
            flags.append(is_rounding(value, tensor).all())
    return flags
