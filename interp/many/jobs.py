"""Run the analysis on one part, and write its outcome to the folder or return it."""

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from hooks.base import shows_progress
from interp.inputs import parts as running
from interp.many.division import PartOfExamples, ReadExamples
from interp.many.folder import PartFolder
from interp.many.joining import Outcome
from interp.pairs.pairs import Pairs


def run_part(
    model: nn.Module,
    analysis: Callable[..., Any],
    out: str | os.PathLike[str] | None,
    part: PartOfExamples,
) -> Outcome | None:
    """Run a part. Return its outcome, or None if it was written to the folder.

    A part that another process has finished in the meantime does not run again.

    Args:
        model: the model.
        analysis: the analysis.
        out: the folder for finished parts; None to return the outcome.
        part: the part.
    """
    folder = None if out is None else PartFolder(out)
    if folder is not None and folder.read(part.name) is not None:
        return None
    outcome = _outcome(analysis, model, part, progress=False)
    if folder is None:
        return outcome
    folder.write(part.name, outcome)
    return None


@shows_progress
def _outcome(
    analysis: Callable[..., Any], model: nn.Module, part: PartOfExamples, progress: bool = True
) -> Outcome:
    """Run the analysis on a part, without a progress bar of its own."""
    now = running.RunningPart(part.first, is_whole=part.is_whole)
    examples = _at_model(model, part.examples)
    with running.running(now):
        result = analysis(model, examples, *part.args, **part.options)
    return Outcome.of(result, now)


def _at_model(model: nn.Module, examples: ReadExamples) -> ReadExamples:
    """Return examples on the device of the model."""
    device = next((weight.device for weight in model.parameters()), None)
    if device is None or isinstance(examples, list):
        return examples
    if isinstance(examples, Pairs):
        return examples.to(device)
    return examples.changed(lambda value: value.to(device))
