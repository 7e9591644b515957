"""Two models: check that the values of one model can replace values of the other model.

1. Both models run the clean texts, so the user may not choose a direction of patching
   (`require_no_direction`).
2. Both models have the same points, with the same axes, and read the texts as the same tokens
   (`source_of`). Sizes are compared when the values are used.
"""

from typing import Any

from torch import nn

from hooks import HookedRunner
from hooks.base import Text, is_batch, shown
from interp.inputs.texts import text_for
from interp.protocol import runner_of


def require_no_direction(source: nn.Module | None, direction: str, default: str) -> None:
    """Check that the user has not chosen a direction in addition to a source.

    Args:
        source: the model whose values are read, if any.
        direction: the direction of patching.
        default: the default direction of the analysis.
    """
    if source is not None and direction != default:
        raise ValueError(
            "direction must be left out with source=, because both models run the clean texts; got "
            f"direction={direction!r}"
        )


def source_of(source: nn.Module, runner: HookedRunner, texts: Any, text: Text) -> HookedRunner:
    """Return the runner of a model whose values replace values of another model.

    Args:
        source: the model whose values are read.
        runner: the runner of the model that is edited.
        texts: the texts as they were given.
        text: the texts as the tokens of the model that is edited.

    Raises:
        TypeError: if the source is not a model.
        ValueError: if a point is missing in one of the models or has other axes, or if the models
            read the texts as different tokens. The error names the first difference.
        ModeError: if the source is in training mode.
    """
    if not isinstance(source, nn.Module):
        raise TypeError(
            f"source must be a model with the same points; got {shown(source)} (pass a cache as "
            "edit=edits.replace(cache))"
        )
    source_runner = runner_of(source)
    rule = "source must be a model with the same points"
    for name, point in runner.points.items():
        if name not in source_runner.points:
            raise ValueError(f"{rule}; got a model without {name}")
        if source_runner.points[name].axes != point.axes:
            got = " ".join(source_runner.points[name].axes)
            axes = " ".join(point.axes)
            raise ValueError(f"{rule}; got axes [{got}] at {name}; need [{axes}]")
    more = [name for name in source_runner.points if name not in runner.points]
    if more:
        raise ValueError(f"{rule}; got a model with another point, {more[0]}")
    if not is_batch(texts):
        _require_same_tokens(text, text_for(source, texts))
    return source_runner


def _require_same_tokens(ours: Text, theirs: Text) -> None:
    """Check that two models read texts as the same tokens."""
    for number, pair in enumerate(zip(ours.listed(), theirs.listed(), strict=True)):
        if pair[0] != pair[1]:
            raise ValueError(
                "both models must read the texts as the same tokens; got "
                f"{len(pair[0])} and {len(pair[1])} tokens, or other tokens, for text {number}: "
                "pass tokens that are right for both models"
            )
