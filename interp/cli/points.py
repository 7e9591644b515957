"""The command `points`: the hook points of a model."""

import argparse

from hooks import HookedRunner
from interp.cli.common import model_of, print_or_write


def run(options: argparse.Namespace) -> None:
    """Print the table of points, or each point with its axes."""
    runner = HookedRunner(model_of(options, trained=False))
    data = [{"name": name, "axes": [*point.axes]} for name, point in runner.points.items()]
    print_or_write(options, runner.table(), data)
