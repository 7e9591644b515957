"""The command `patch`: activation patching between two texts."""

import argparse

from torch import nn

from interp.cli.common import model_of, print_or_write, text_of_options
from interp.effects.patching import activation_patching
from interp.pairs.pairs import Pairs
from interp.protocol import of


def run(options: argparse.Namespace) -> None:
    """Print the largest effects, or all effects as JSON."""
    if len(options.answers) > 2:
        raise ValueError(f"--answers must be one or two answers; got {len(options.answers)}")
    model = model_of(options, trained=True)
    answers = tuple(options.answers) if len(options.answers) == 2 else options.answers[0]
    text = text_of_options(options)
    _require_equal_lengths(model, text, options.corrupted)
    pairs = Pairs(text, options.corrupted, answers)
    result = activation_patching(
        model, pairs, site=options.site, over=options.over, direction=options.direction
    )
    base = float(result.base[0])  # type: ignore[index]
    target = float(result.target[0])  # type: ignore[index]
    name, unit = ("logit", "") if result.unit == "logits" else ("log-probability", ", in nats")
    shown = " less that of ".join(map(repr, options.answers))
    metric = f"{name} of {shown}{unit}"
    lines = [
        metric,
        f"{base:.3f} in the run that is edited, {target:.3f} in the other",
        "",
        *repr(result.top(options.top)).splitlines(),
    ]
    print_or_write(options, "\n".join(lines), result.as_json())


def _require_equal_lengths(model: nn.Module, *texts: str) -> None:
    """Check that the two texts have equally many tokens.

    Raises:
        ValueError: if not. The error shows the tokens.
    """
    language = of(model)
    tokens = [language.to_tokens(text).tokens[0] for text in texts]
    if len(tokens[0]) != len(tokens[1]):
        pieces = " and ".join(
            f"{len(ids)}, {'|'.join(language.to_pieces(ids))!r}" for ids in tokens
        )
        raise ValueError(
            f"the prompt and --corrupted must have equally many tokens; got {pieces}: change the "
            "words of one of them"
        )
