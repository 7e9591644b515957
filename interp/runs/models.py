"""Two models: check that the values of one model can replace values of the other model.

1. Both models must have the same points, with the same axes (`source_of`). Sizes are compared when
   the values are read.
2. Both models must read the texts as the same tokens (`pairs_of_models`).
3. The default metric is the divergence of the predictions from the predictions of the source.
"""

from typing import Any

import torch
from torch import nn

from hooks import HookedRunner
from hooks.base import Text, Texts, shown, to_device
from interp.inputs.texts import text_for
from interp.metrics import kl_divergence
from interp.pairs.pairs import Pairs
from interp.protocol import logits_of, runner_of


def source_of(source: nn.Module, runner: HookedRunner) -> HookedRunner:
    """Return the runner of a model whose values replace values of another model.

    Args:
        source: the model whose values are read.
        runner: the runner of the model that is edited.

    Raises:
        TypeError: if the source is not a model.
        ValueError: if a point is missing in one of the models or has other axes. The error names
            the first difference.
        ModeError: if the source is in training mode.
    """
    if not isinstance(source, nn.Module):
        raise TypeError(
            f"source must be a model with the same points; got {shown(source)} (pass a cache as "
            "edit=edits.replace(cache))"
        )
    other = runner_of(source)
    rule = "source must be a model with the same points"
    for name, point in runner.points.items():
        if name not in other.points:
            raise ValueError(f"{rule}; got a model without {name}")
        if other.points[name].axes != point.axes:
            axes, got = " ".join(point.axes), " ".join(other.points[name].axes)
            raise ValueError(f"{rule}; got axes [{got}] at {name}; need [{axes}]")
    extra = [name for name in other.points if name not in runner.points]
    if extra:
        raise ValueError(f"{rule}; got a model with another point, {extra[0]}")
    return other


def require_no_direction(source: nn.Module | None, direction: str, default: str) -> None:
    """Check that no direction is given in addition to a source.

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


def pairs_of_models(model: nn.Module, source: nn.Module, pairs: "Pairs | Texts") -> Pairs:
    """Return pairs that both models read as the same tokens, with a metric.

    Args:
        model: the model that is edited.
        source: the model whose values are read.
        pairs: the pairs, or texts. Without answers and a metric, the metric is KL(source || model),
            the mean over the positions of each text, in nats.

    Raises:
        ValueError: if the two tokenizers disagree about a text.
    """
    pairs = pairs if isinstance(pairs, Pairs) else Pairs(pairs)
    read = pairs.clean_only().read_by(model)
    text = read.text
    if not pairs.is_read:
        _require_same_tokens(text, text_for(source, pairs.clean), model)
    if pairs.has_metric:
        return read
    with torch.no_grad():
        logits = logits_of(source(text.tokens, **text.arguments(source)))
    reference = to_device(logits, text.tokens.device)
    mask = text.of_logits.attention_mask
    return read.measured_by(kl_divergence(reference, None, attention_mask=mask))


def _require_same_tokens(ours: Text, theirs: Any, model: nn.Module) -> None:
    """Check that two models read texts as the same tokens."""
    for number, pair in enumerate(zip(ours.listed(), theirs.listed(), strict=True)):
        if pair[0] != pair[1]:
            raise ValueError(
                "both models must read the texts as the same tokens; got "
                f"{len(pair[0])} and {len(pair[1])} tokens, or other tokens, for text {number}: "
                "pass tokens that are right for both models"
            )
