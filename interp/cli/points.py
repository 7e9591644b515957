"""The command `points`: the hook points of a model."""

import argparse

from hooks import HookedRunner
from interp.cli.common import model_of, print_or_write
from interp.json_form import columns, form


def run(options: argparse.Namespace) -> None:
    """Print the table of points, or each point with its axes."""
    runner = HookedRunner(model_of(options, trained=False))
    points = columns("point", [*runner.points.values()], "name axes")
    print_or_write(options, runner.table(), form("Points", points))
