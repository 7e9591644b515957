"""Run an analysis of many examples in parts, and join the results.

1. Read all examples with the model (`division`).
2. Run the analysis on all parts (`passes`). Some analyses need several passes, because they decide
   something from all examples (`decisions`).
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from hooks import HookError
from hooks.base import Texts, Words, has_shards, hooks_of, shown, shows_progress
from hooks.shared import is_foreign
from interp.features.evaluation import evaluate_sae
from interp.many import decisions
from interp.many.division import read_examples, whole_call
from interp.many.fingerprints import is_of_user
from interp.many.passes import Passes
from interp.pairs.pairs import Pairs
from interp.reading.maxima import max_activating
from interp.store.engines import Model, loaded, require_executor
from interp.store.rows import points_with_edits
from interp.store.streaming import statistics

_OF_LISTS = (evaluate_sae, max_activating, statistics)
"""Analyses that pad batches of texts themselves."""

_OWN_OPTIONS = ("at_once", "executor", "out", "shard", "by_example", "progress")
"""The keywords of `over_examples` itself."""


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

    The result equals `analysis(model, examples, *args, **options)` up to rounding. Each worker runs
    at most `at_once` examples at a time. `evaluate_sae` and analyses with `steps="auto"` need
    numbers of all examples, so they run several passes over the parts.

    The value of an example must depend on this example only. A metric that compares examples raises
    an error. Your own analyses and your own functions as edits are not checked: if a function
    compares examples, or contains numbers for rows of the batch, the result is wrong.

    This process loads the model too, and converts all texts to tokens. So the texts of all parts
    are padded to the same length, except in analyses that pad batches themselves.

    Args:
        analysis: a function of a model and pairs or texts that returns a `Result` with a value for
            each example: an analysis of `interp`, or a function of your own, which may run the
            model and read a cache. Also `evaluate_circuit`, `evaluate_sae`, `max_activating` and
            `interp.store.statistics`. Another process must be able to import the module of the
            function.
        make_model: a function that returns the model, such as `partial(models.load, "gpt2")`. It is
            called once in each worker process. A model is possible too; it is copied to each
            process.
        examples: the pairs or texts of the analysis.
        args: its other positional arguments, such as the dictionaries of `evaluate_sae`.
        at_once: the number of examples in a part.
        executor: any object whose `submit` returns futures with `add_done_callback`, such as
            `ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn"))`,
            `ThreadPoolExecutor(2)` or a client of Dask; or `interp.store.Ray(workers=8)`. A pool
            must start its processes with spawn or forkserver. Before Python 3.14, Linux uses fork
            by default, and PyTorch hangs in forked processes. Threads share one model. Default:
            None, which runs the parts in this process, one by one.
        out: a folder, or an address of `fsspec`, for finished parts. A later call with the same
            values finds them, for example after the process was killed. The values are the
            examples, the arguments, the model, the code of your own functions and classes, and the
            global values that they read. Packages count by the names of their functions, so choose
            a new folder after an update of a package. All workers must reach this folder. Default:
            None, to keep results in memory.
        shard: the number of this process and the number of processes, such as `(rank, world_size)`
            under torchrun. This call runs only its own parts, and returns the result of their
            examples. A later call without `shard` joins all parts. It needs `out`. If the analysis
            needs several passes, the shard also runs parts that other shards have not finished.
        by_example: the names of `options` that have an entry for each example, such as `["right"]`.
        progress: whether to show a progress bar over parts or, outside a terminal, lines of
            progress.
        options: keyword arguments of the analysis.

    Returns:
        The joined result, on the CPU.

    Raises:
        ValueError: if there are no examples; if a function of your own decides something from all
            examples, such as `steps="auto"`, or selects labels from the examples; if a metric
            contains data of single examples and cannot be divided, or compares examples; if there
            are fewer parts than shards; if a shard has not finished its parts; if the executor
            forks; or if a fully sharded model (FSDP) gets `shard` or an executor. Errors of the
            analysis have a note with the part.
        TypeError: if the executor has no `submit`; if the analysis does not know an option, or
            returns another kind of result; or if a process cannot import one of the functions.
        HookError: if a worker dies. The error names the parts that ran at that time, and the same
            call repeats them. The error is also raised with `executor` or `out` if edits are
            active, and with `out` if the model has PyTorch hooks of your own.

    >>> from functools import partial
    >>> from interp import Pairs, activation_patching
    >>> from models import load
    >>> make_model = partial(load, "pydoc-4l")
    >>> clean, corrupted = ["def __ini", "import o"], ["def __nam", "import s"]
    >>> pairs = Pairs(clean, corrupted, [("t", "e"), ("s", "y")])
    >>> result = over_examples(activation_patching, make_model, pairs, "z", layers=0, at_once=1)
    >>> result.top(2)  # means over both examples
    layer 0, head 0  +1.288
    layer 0, head 1  +0.5636
    """
    _require_analysis(analysis)
    require_executor(executor)
    analysis, options = _without_partial(analysis, options)
    _require_options(analysis, options)
    by_example = [by_example] if isinstance(by_example, str) else by_example
    model = loaded(make_model)
    _require_all_parts(model, executor, shard)
    _require_no_hooks(model, executor, out)
    all_examples = whole_call(
        analysis,
        model,
        read_examples(model, examples, as_list=analysis in _OF_LISTS),
        args,
        options,
        by_example=by_example,
        at_once=at_once,
    )
    passes = Passes(
        all_examples,
        model,
        make_model=make_model,
        at_once=at_once,
        executor=executor,
        out=out,
        shard=shard,
    )
    # Worker processes load their own models, so this process frees its model.
    del model
    return decisions.run(passes, analysis, all_examples.args, all_examples.options)


def _require_analysis(analysis: Callable[..., Any]) -> None:
    """Check that the analysis is a function.

    Raises:
        TypeError: if it is not.
    """
    if not callable(analysis):
        raise TypeError(
            "analysis must be a function of (model, examples), such as activation_patching; got "
            f"{shown(analysis)}"
        )


def _require_options(analysis: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that the analysis knows all options.

    Raises:
        TypeError: if an option is unknown. The error lists close matches.
    """
    words = Words(analysis)
    if not words.is_open:
        name = getattr(analysis, "__name__", type(analysis).__name__)
        words.require(options, _OWN_OPTIONS, f"over_examples({name})")


def _require_all_parts(model: nn.Module, executor: Any, shard: tuple[int, int] | None) -> None:
    """Check that each process of a fully sharded model runs all parts, in order.

    Raises:
        ValueError: if the processes may make different runs. Each process would then wait forever
            for the others.
    """
    is_divided = shard is not None or executor is not None
    if is_divided and has_shards(model):
        raise ValueError(
            "a fully sharded model (FSDP) runs in all of its processes together, so each process "
            "must run all parts; got shard= or executor=: leave them out"
        )


def _require_no_hooks(model: nn.Module, executor: Any, out: str | os.PathLike[str] | None) -> None:
    """Check that parts do not depend on hooks that workers or later calls do not have.

    Raises:
        HookError: if edits are active, or if the model has hooks of the user and parts are stored.
    """
    if (executor is not None or out is not None) and (edited := points_with_edits(model)):
        raise HookError(
            "the model must have no active edits, because workers and later calls do not have "
            f"these edits; got an edit at {edited[0]}: edit inside a function of your own, or "
            "leave out executor= and out="
        )
    for name, module in model.named_modules() if out is not None else ():
        if any(is_foreign(hook) and is_of_user(hook) for hook in hooks_of(module)):
            raise HookError(
                "the model must have no hooks of your own, because the names of stored parts do "
                f"not contain hooks; got a hook on {name or 'the model'}: remove the hook, or "
                "leave out the argument out="
            )


def _without_partial(
    analysis: Callable[..., Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of a partial application, and all its keyword arguments."""
    while isinstance(analysis, functools.partial) and not analysis.args:
        options = {**analysis.keywords, **options}
        analysis = analysis.func
    return analysis, options
