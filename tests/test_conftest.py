"""The project's additions to pytest: what a sample keeps, and what a summary says of the rest."""

import itertools
from types import SimpleNamespace

import pytest

from tests import conftest


class Config(SimpleNamespace):
    """The part of pytest's config that is read. One of several processes has `workeroutput`."""

    def getoption(self, name):
        return getattr(self, name)


def case(row, column, *marks):
    """A case of a table, or a long test of its own."""
    found = {mark.name: mark for mark in marks}
    names = dict(originalname="test_table", name=f"test_table[{row}-{column}]")
    return SimpleNamespace(parent=None, get_closest_marker=found.get, **names)


def collected(config):
    """The names that are kept, of a table of which each third case runs and of a long test."""
    table = itertools.product(range(3), range(3))
    items = [case(row, column, pytest.mark.sampled(3).mark) for row, column in table]
    items.append(case("long", "", pytest.mark.full.mark))
    conftest.pytest_collection_modifyitems(config, items)
    return [item.name for item in items]


def summary(config):
    """The lines at the end of a run."""
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
