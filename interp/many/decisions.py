"""Analyses that decide something from all examples, in several passes over the parts.

- `evaluate_sae` replaces values by their means over all texts. The first pass computes the means,
  and the second pass runs the model with them.
- With `steps="auto"`, all examples have the same number of steps on each path. Each pass doubles
  the steps of the paths whose gap over all examples is too large.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from interp.effects.edges import edge_attribution
from interp.effects.integrated_gradients import integrated_gradients
from interp.features.evaluation import evaluate_sae, sums_of_pass
from interp.features.scores import DictionaryScores
from interp.inputs.parts import UNFINISHED
from interp.many.passes import Passes
from interp.results.result import Result
from interp.runs.trapezoid import FIRST, PathSteps, more_steps


def run(
    passes: Passes, analysis: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Run an analysis in as many passes as it needs, and return its result.

    Args:
        passes: runs a pass.
        analysis: the analysis.
        args, options: its arguments after the examples.
    """
    if analysis is evaluate_sae:
        return _scores(passes, args, options)
    if passes.n_parts > 1 and _has_automatic_steps(analysis, args, options):
        return _with_enough_steps(passes, analysis, args, options)
    return passes.run(analysis, args, options).result()


def _scores(passes: Passes, args: tuple[Any, ...], options: Mapping[str, Any]) -> DictionaryScores:
    """Return the result of `evaluate_sae` over all examples, in two passes.

    The first pass computes the mean values over all texts. The second pass runs the model with
    these means.

    Args:
        passes: runs a pass.
        args, options: the arguments of `evaluate_sae` after the texts.
    """
    first = passes.run(sums_of_pass, args, options, needs_all=True)
    with_means = {**options, "means": first.unfinished().means()}
    second = passes.run(sums_of_pass, args, with_means)
    scores: DictionaryScores = first.result().scores(second.result())
    return scores


def _has_automatic_steps(
    analysis: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> bool:
    """Return whether an analysis runs along paths with `steps="auto"`."""
    if analysis not in (edge_attribution, integrated_gradients):
        return False
    try:
        bound = inspect.signature(analysis).bind(None, None, *args, **options)
    # The analysis itself raises a better error.
    except TypeError:
        return False
    bound.apply_defaults()
    arguments = bound.arguments
    # The method `eap` has no paths, and integrated gradients have no methods.
    return arguments.get("method") != "eap" and isinstance(arguments["steps"], str)


def _with_enough_steps(
    passes: Passes, analysis: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Result:
    """Return a result along paths, with enough steps for all examples."""
    steps: PathSteps | None = FIRST
    while steps is not None:
        one = passes.run(analysis, args, {**options, "steps": steps}, needs_all=True)
        steps = more_steps(one.unfinished().about[UNFINISHED])
    result: Result = one.result()
    return result
