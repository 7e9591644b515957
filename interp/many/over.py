"""Run an analysis of many examples in parts, and join the results.

1. Read all examples with the model, and divide them into parts (`division`).
2. If `out` is given, name each part by a hash of its values (`fingerprints`), and find the finished
   parts (`folder`).
3. Run the other parts on the executor (`jobs`).
4. Join the results of all parts (`joining`).
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hooks import HookError
from hooks.base import (
    Texts,
    progress_bar,
    require_integer,
    shown,
    shows_progress,
)
from interp.many.division import Part, whole
from interp.many.fingerprints import fingerprint
from interp.many.folder import PartFolder
from interp.many.jobs import Job, ended
from interp.many.joining import Outcome, joined
from interp.pairs.pairs import Pairs
from interp.reading.maxima import max_activating
from interp.store.engines import Model, Ray, loaded
from interp.store.streaming import statistics

_OF_LISTS = (max_activating, statistics)
"""Analyses that pad batches of texts themselves."""


@shows_progress
def over_examples(
    analysis: Callable[..., Any],
    make_model: Model,
    examples: "Pairs | Texts",
    *args: Any,
    at_once: int = 32,
    executor: Any = None,
    out: str | os.PathLike[str] | None = None,
    shard: tuple[int, int] | None = None,
    by_example: Sequence[str] = (),
    progress: bool = True,
    **options: Any,
) -> Any:
    """Run an analysis on parts of many examples, and return its result for all examples.

    The result equals `analysis(model, examples, *args, **options)` up to rounding: values, base,
    target, labels, groups and `about`. Each worker runs at most `at_once` examples at a time. Steps
    over all examples, such as the shares of `faithfulness`, follow after all parts.

    The model is also loaded in this process, which reads all texts. Therefore all parts have the
    columns of all examples.

    Args:
        analysis: a function of a model and pairs or texts that returns a `Result` with a value for
            each example: an analysis of `interp`, or a function of your own, which may run the
            model and read a cache. Also `max_activating` and `interp.store.statistics`. Another
            process must be able to import the module of the function.
        make_model: a function that returns the model, such as `partial(models.load, "gpt2")`. Each
            worker process calls it once. A model is possible too; it is copied to each process.
        examples: pairs or texts, the second argument of the analysis.
        args: the other positional arguments of the analysis.
        at_once: the number of examples in a part.
        executor: any object whose `submit` returns futures with `add_done_callback`, such as
            `ProcessPoolExecutor(8)`, `ThreadPoolExecutor(2)` or a client of Dask; or
            `interp.store.Ray(workers=8)`. Threads share one model. Default: None, which runs one
            part after the other here.
        out: a folder, or an address of `fsspec`, for finished parts. A later call with the same
            values finds them, for example after the process was killed. All workers must reach this
            folder. Default: None, to keep results in memory.
        shard: the number of this process and the number of processes, such as `(rank, world_size)`
            under torchrun. This call runs only its own parts, and returns the result of their
            examples. A later call without `shard` joins all parts. It needs `out`.
        by_example: the names of `options` that have an entry for each example, such as `["right"]`.
        progress: whether to show a bar over parts after two seconds.
        options: keyword arguments of the analysis.

    Returns:
        The joined result, on the CPU.

    Raises:
        ValueError: if there are no examples; if the analysis decides something from all examples,
            such as `steps="auto"`, or selects labels from the examples; if a metric contains data
            of single examples and cannot be divided; if there are fewer parts than shards; or if a
            shard has not finished its parts. Errors of the analysis have a note with the part.
        TypeError: if the executor has no `submit`, or the analysis returns another kind of result.
        HookError: if a worker dies. The error names the part, and the same call repeats it.

    >>> from functools import partial
    >>> from interp import Pairs, activation_patching
    >>> from models import load
    >>> make_model = partial(load, "pydoc-4l")
    >>> clean, corrupted = ["def __ini", "import o"], ["def __nam", "import s"]
    >>> pairs = Pairs(clean, corrupted, [("t", "e"), ("s", "y")])
    >>> result = over_examples(activation_patching, make_model, pairs, "z", layers=0, at_once=1)
    >>> result.shape  # layer, head, example
    torch.Size([1, 4, 2])
    """
    if not callable(analysis):
        raise TypeError(
            "analysis must be a function of (model, examples), such as activation_patching; got "
            f"{shown(analysis)}"
        )
    if executor is not None and not (isinstance(executor, Ray) or hasattr(executor, "submit")):
        raise TypeError(
            "executor must have submit(), such as ProcessPoolExecutor(8), or be "
            f"interp.store.Ray(...); got {shown(executor)}"
        )
    model = loaded(make_model)
    all_examples = whole(
        analysis,
        model,
        examples,
        args,
        options,
        by_example=by_example,
        at_once=at_once,
        as_list=_inner(analysis) in _OF_LISTS,
    )
    parts = [all_examples.part(n, at_once) for n in range(-(-len(all_examples) // at_once))]
    _require_shard(shard, out, len(parts))
    outcomes: dict[int, Outcome] = {}
    folder = None
    if out is not None:
        parts = _with_names(analysis, model, parts)
        folder = PartFolder(out)
        outcomes = _finished(folder, parts, shard)
    of_call = parts if shard is None else parts[shard[0] :: shard[1]]
    # Threads and this process use the model that has read the texts. Other workers load a model of
    # their own. This process then frees its model.
    is_here = executor is None or isinstance(executor, ThreadPoolExecutor)
    job = Job(analysis, make_model, out, model if is_here else None)
    del model
    with progress_bar("parts", total=len(of_call), unit="part") as count:
        count(sum(part.number in outcomes for part in of_call))
        rest = [part for part in of_call if part.number not in outcomes]
        for one in ended(executor, job, rest):
            if one.error is not None:
                if not isinstance(one.error, HookError) or str(one.part) not in str(one.error):
                    one.error.add_note(f"this error was raised in {one.part}")
                raise one.error
            outcome = one.outcome if folder is None else folder.read(one.part.name)
            if outcome is None:
                raise HookError(
                    f"the file of {one.part} must be in {out} after its run; got none: all workers "
                    "must reach this folder"
                )
            outcomes[one.part.number] = outcome
            count()
    return joined([outcomes[part.number] for part in of_call], of_call, all_examples)


def _inner(analysis: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a partial application."""
    while isinstance(analysis, functools.partial):
        analysis = analysis.func
    return analysis


def _require_shard(
    shard: tuple[int, int] | None, out: str | os.PathLike[str] | None, n_parts: int
) -> None:
    """Check the number of a shard.

    Raises:
        ValueError: if the numbers are wrong, there is no folder, or there are too few parts.
    """
    if shard is None:
        return
    rank, n_shards = shard
    require_integer("the number of shards", n_shards)
    if not 0 <= rank < n_shards:
        raise ValueError(
            f"shard must be (rank, world_size) with 0 <= rank < world_size; got {shard}"
        )
    if out is None:
        raise ValueError("shard needs out=, the folder in which all shards store their parts")
    if n_parts < n_shards:
        raise ValueError(
            f"each of {n_shards} shards must have at least one part; got {n_parts} parts: choose a "
            "smaller at_once, or fewer shards"
        )


def _with_names(analysis: Callable[..., Any], model: Any, parts: Sequence[Part]) -> list[Part]:
    """Return parts with the hashes of all their values."""
    shared = fingerprint("analysis", analysis), fingerprint("make_model", model)
    named = []
    for part in parts:
        values = (part.first, part.examples, part.args, part.options)
        hashes = [fingerprint("an argument", value) for value in values]
        named.append(replace(part, name=fingerprint("part", (*shared, *hashes))))
    return named


def _finished(
    folder: PartFolder, parts: Sequence[Part], shard: tuple[int, int] | None
) -> dict[int, Outcome]:
    """Return the outcomes of finished parts, by the numbers of the parts.

    Raises:
        ValueError: if other processes run these parts as shards and have not finished them, and
            this call has no shard.
    """
    if shard is not None:
        folder.claim(parts, shard[1])
    outcomes = {}
    for part in parts:
        is_ours = shard is None or part.number % shard[1] == shard[0]
        if is_ours and (outcome := folder.read(part.name)) is not None:
            outcomes[part.number] = outcome
    if shard is None and len(outcomes) < len(parts):
        n_shards = folder.n_shards(parts)
        missing = [part for part in parts if part.number not in outcomes]
        if n_shards is not None:
            shards = sorted({part.number % n_shards for part in missing})
            raise ValueError(
                f"all shards must finish before their parts are joined; {folder.name} does not "
                f"contain {', '.join(map(str, missing))}: call again with "
                f"{' and '.join(f'shard=({number}, {n_shards})' for number in shards)}"
            )
    return outcomes
