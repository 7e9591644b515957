"""`points`: the hook points of a model."""

import argparse

from hooks import HookedRunner
from interp.cli.common import model_of, print_or_write

HELP = "list a model's hook points"
EXAMPLE = "points --model gpt2-medium"
PRINTS = True


def add(points: argparse.ArgumentParser) -> None:
    """Add the options."""
    points.description = "Lists the points of a model: names, axes and what they are."


def run(options: argparse.Namespace) -> None:
    """Print the table, or each point with its axes."""
    runner = HookedRunner(model_of(options, trained=False))
    data = [{"name": name, "axes": [*point.axes]} for name, point in runner.points.items()]
    print_or_write(options, runner.table(), data)
