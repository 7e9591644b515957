"""The additions of tests/conftest.py to pytest: samples of cases, and the summary at the end."""

import itertools
from types import SimpleNamespace

import pytest

from tests import conftest


class Config(SimpleNamespace):
    """A config with the parts of pytest's config that tests/conftest.py reads.

    In a process that pytest-xdist started, it has the attribute `workeroutput`.
    """

    def getoption(self, name):
        return getattr(self, name)


def case(row, column, *marks):
    """Return a test item: one case of a parametrized test."""
    found = {mark.name: mark for mark in marks}
    names = dict(originalname="test_table", name=f"test_table[{row}-{column}]")
    return SimpleNamespace(parent=None, get_closest_marker=found.get, **names)


def collected(config):
    """Return the names of the test items that would run.

    The items are the nine cases of a test that is marked `sampled(3)`, and a test that is marked
    `full`.
    """
    table = itertools.product(range(3), range(3))
    items = [case(row, column, pytest.mark.sampled(3).mark) for row, column in table]
    items.append(case("long", "", pytest.mark.full.mark))
    conftest.pytest_collection_modifyitems(config, items)
    return [item.name for item in items]


def summary(config):
    """Return the lines that the summary adds at the end of a run."""
    lines = []
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)
    return lines


SAID = ["left out without --full: 6 cases of tests that are sampled, and 1 that are marked full"]


def test_the_summary_counts_what_is_left_out():
    config = Config(full=False, stash=pytest.Stash())
    kept = collected(config)
    assert kept == ["test_table[0-0]", "test_table[1-1]", "test_table[2-2]"]  # each row and column
    assert summary(config) == SAID


def test_the_first_process_has_the_counts_of_the_others():
    first, other = (Config(full=False, stash=pytest.Stash()) for _ in range(2))
    other.workeroutput = {}
    collected(other)
    conftest.pytest_testnodedown(SimpleNamespace(config=first, workeroutput=other.workeroutput))
    assert summary(first) == SAID


def test_nothing_is_left_out_of_a_full_run():
    config = Config(full=True, stash=pytest.Stash())
    assert len(collected(config)) == 10
    assert summary(config) == []
