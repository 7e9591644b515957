"""Passes over the parts of all examples.

1. Divide the examples and the arguments of a pass into parts (`division`).
2. If there is a folder, name each part by a hash of its values (`fingerprints`), and find the
   finished parts (`folder`).
3. Run the other parts (`jobs`) on the executor (`interp.store.tasks`).
4. Join the results of the parts (`joining`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hooks import HookError
from hooks.base import progress_bar
from interp.many.division import PartOfExamples, Whole
from interp.many.fingerprints import fingerprint
from interp.many.folder import PartFolder
from interp.many.jobs import run_part
from interp.many.joining import Outcome, joined_result
from interp.store.tasks import ModelSource, TaskRun, require_shard, run_tasks, runs_here


@dataclass(frozen=True, eq=False)
class Pass:
    """The outcomes of a pass.

    Attributes:
        whole: all examples, with the arguments of the pass.
        parts: the parts that have run.
        n_own: the number of parts of this shard, which are the first `parts`.
        outcomes: the outcome of each part, by the number of the part.
    """

    whole: Whole
    parts: Sequence[PartOfExamples]
    n_own: int
    outcomes: Mapping[int, Outcome]

    def result(self) -> Any:
        """Return the result of the examples of this shard."""
        return self._joined(self.parts[: self.n_own], is_finished=True)

    def unfinished(self) -> Any:
        """Return the result of the examples of all parts, before the step over all examples."""
        parts = sorted(self.parts, key=lambda part: part.number)
        return self._joined(parts, is_finished=False)

    def _joined(self, parts: Sequence[PartOfExamples], is_finished: bool) -> Any:
        """Join the results of parts.

        Args:
            parts: the parts.
            is_finished: whether to take the last step too, which needs all examples.
        """
        outcomes = [self.outcomes[part.number] for part in parts]
        return joined_result(outcomes, parts, self.whole, is_finished=is_finished)


class Passes:
    """Runs passes over the parts of all examples.

    Args:
        whole: all examples.
        model: the model that has read the examples.
        make_model, at_once, executor, out, shard: see `over_examples`.

    Raises:
        ValueError: if the numbers of the shard are wrong, there is no folder for shards, or there
            are fewer parts than shards.
    """

    def __init__(
        self,
        whole: Whole,
        model: nn.Module,
        *,
        make_model: Any,
        at_once: int,
        executor: Any,
        out: str | os.PathLike[str] | None,
        shard: tuple[int, int] | None,
    ) -> None:
        self.n_parts = -(-len(whole) // at_once)
        _require_shard(shard, out, self.n_parts)
        self._whole = whole
        self._at_once = at_once
        self._executor = executor
        self._out = out
        self._folder = None if out is None else PartFolder(out)
        self._shard = shard
        self._source = ModelSource(make_model)
        # Threads and this process use the model that has read the texts. Other workers load a model
        # of their own, and this process then frees its model.
        self._model = model if runs_here(executor) else None
        self._hash = "" if out is None else fingerprint("make_model", model)

    def run(
        self,
        analysis: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        needs_all: bool = False,
    ) -> Pass:
        """Run an analysis on all parts, or on the parts of this shard.

        Args:
            analysis: the analysis.
            args, options: its arguments after the examples.
            needs_all: whether a shard also needs the parts of other shards. If it does, it first
                runs its own parts, and then all parts that other shards have not finished.

        Raises:
            ValueError: if other processes run the parts as shards and have not finished them, and
                this process is no shard.
            HookError: if a worker dies, or workers do not reach the folder.
        """
        whole = replace(self._whole, args=args, options=options)
        parts = [whole.part(number, self._at_once) for number in range(self.n_parts)]
        if self._folder is not None:
            parts = self._with_names(analysis, parts)
        of_pass, n_own = self._of_pass(parts, needs_all)
        outcomes = self._finished(parts, of_pass)
        run = TaskRun(run_part, (analysis, self._out), self._source, model=self._model)
        with progress_bar("parts", total=len(of_pass), unit="part") as count:
            count(len(outcomes))
            rest = [part for part in of_pass if part.number not in outcomes]
            for number, value in run_tasks(self._executor, run, rest):
                outcomes[rest[number].number] = self._outcome(rest[number], value)
                count()
        return Pass(whole, of_pass, n_own=n_own, outcomes=outcomes)

    def _with_names(
        self, analysis: Callable[..., Any], parts: Sequence[PartOfExamples]
    ) -> list[PartOfExamples]:
        """Return parts with the hashes of all their values."""
        shared = fingerprint("analysis", analysis), self._hash
        named = []
        for part in parts:
            values = (part.first, part.examples, part.args, part.options)
            hashes = [fingerprint("an argument", value) for value in values]
            named.append(replace(part, name=fingerprint("part", (*shared, *hashes))))
        return named

    def _of_pass(
        self, parts: Sequence[PartOfExamples], needs_all: bool
    ) -> tuple[Sequence[PartOfExamples], int]:
        """Return the parts that a pass needs, and the number of parts of this shard among them.

        The parts of other shards come last, and the last of them first, because each shard begins
        with its first part.
        """
        if self._shard is None:
            return parts, len(parts)
        rank, n_shards = self._shard
        own = parts[rank::n_shards]
        others = [part for part in reversed(parts) if part.number % n_shards != rank]
        return [*own, *others] if needs_all else own, len(own)

    def _finished(
        self, parts: Sequence[PartOfExamples], of_pass: Sequence[PartOfExamples]
    ) -> dict[int, Outcome]:
        """Return the outcomes of finished parts, by the numbers of the parts.

        Raises:
            ValueError: if other processes run these parts as shards and have not finished them, and
                this process is no shard.
        """
        folder = self._folder
        if folder is None:
            return {}
        if self._shard is not None:
            folder.record_shards(parts, self._shard[1])
        outcomes = {}
        for part in of_pass:
            if (outcome := folder.read(part.name)) is not None:
                outcomes[part.number] = outcome
        missing = [part for part in of_pass if part.number not in outcomes]
        if self._shard is None and missing and (n_shards := folder.n_shards(parts)) is not None:
            shards = sorted({part.number % n_shards for part in missing})
            raise ValueError(
                f"all shards must finish before their parts are joined; {folder.name} does not "
                f"contain {', '.join(map(str, missing))}: call again with "
                f"{' and '.join(f'shard=({number}, {n_shards})' for number in shards)}"
            )
        return outcomes

    def _outcome(self, part: PartOfExamples, value: Outcome | None) -> Outcome:
        """Return the outcome of a part that has run, from its value or from its file."""
        outcome = value if self._folder is None else self._folder.read(part.name)
        if outcome is None:
            raise HookError(
                f"the file of {part} must be in {self._out} after its run; got none: all workers "
                "must reach this folder"
            )
        return outcome


def _require_shard(
    shard: tuple[int, int] | None, out: str | os.PathLike[str] | None, n_parts: int
) -> None:
    """Check the number of a shard.

    Raises:
        ValueError: if the numbers are wrong, there is no folder, or there are too few parts.
    """
    if shard is None:
        return
    _, n_shards = require_shard(shard, "rank, world_size")
    if out is None:
        raise ValueError("shard needs out=, the folder in which all shards store their parts")
    if n_parts < n_shards:
        raise ValueError(
            f"each of {n_shards} shards must have at least one part; got {n_parts} parts: choose a "
            "smaller at_once, or fewer shards"
        )
