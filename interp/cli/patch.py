"""`patch`: activation patching between two texts."""

import argparse

from interp.cli.common import model_of, print_or_write, text_of
from interp.effects.patching import activation_patching
from interp.inputs.pairs import Pairs

HELP = "patch values of one text into a run on another, place by place"
EXAMPLE = 'patch --prompt "part AB1 and part AB" --corrupted "part AB4 and part AB" --answers 1 4 --site z'
TEXT = "the clean text"
PRINTS = True


def add(patch: argparse.ArgumentParser) -> None:
    """Add the options."""
    patch.description = (
        "Runs the model on the corrupted text and puts values of the clean text in their place, one layer and place at "
        "a time: how much of the answer does each bring back?"
    )
    patch.add_argument(
        "--corrupted",
        required=True,
        metavar="TEXT",
        help="a text of equally many tokens that the model continues differently",
    )
    patch.add_argument(
        "--answers",
        nargs="+",
        required=True,
        metavar="TOKEN",
        help="the right next token, and a wrong one; with both the metric is the difference of their logits, with one "
        "its log-probability",
    )
    patch.add_argument(
        "--site", default="resid_pre", metavar="POINT", help="such as z (%(default)s)"
    )
    patch.add_argument("--over", nargs="+", metavar="AXIS", help="such as layer head pos")
    patch.add_argument(
        "--direction", choices=("denoising", "noising"), default="denoising", help="(%(default)s)"
    )
    patch.add_argument("--top", type=int, default=10, metavar="N", help="places (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Print the largest effects, or all in JSON."""
    if len(options.answers) > 2:
        raise ValueError(f"--answers must be one or two tokens; got {len(options.answers)}")
    model = model_of(options, trained=True)
    answers = tuple(options.answers) if len(options.answers) == 2 else options.answers[0]
    pairs = Pairs(text_of(options), options.corrupted, answers)
    result = activation_patching(
        model, pairs, options.site, options.over, direction=options.direction
    )
    base, target = (float(values[0]) for values in (result.base, result.target))  # type: ignore[index]
    lines = [
        f"logit of {answers[0]!r} less that of {answers[1]!r}"
        if isinstance(answers, tuple)
        else f"log-probability of {answers!r}, in nats",
        f"{base:.3f} in the run that is edited, {target:.3f} in the other",
        "",
        *repr(result.top(options.top)).splitlines(),
    ]
    print_or_write(options, "\n".join(lines), result.as_json())
