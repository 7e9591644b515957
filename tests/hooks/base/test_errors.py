"""Errors and warnings that all packages share: optional libraries, choices, lines of callers."""

import inspect

import pytest

from hooks.base import library, warn
from interp import composition_scores


def test_a_library_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_library_of_anyone")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match='pip install "hookscope'):
        library("no_such_library_of_anyone.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library_of_anyone'"):
        library("halfway")


@pytest.mark.usefixtures("unchecked")
def test_a_part_of_an_allowed_value_is_not_allowed(model):
    with pytest.raises(ValueError, match="one of Q, K, V; got 'QK'"):
        composition_scores(model, "QK")


def test_a_warning_names_the_line_that_called_these_packages():
    """Between the call and the warning, a function of the caller may run, such as a metric.

    The warning must still name the line of the first call.
    """
    deep, top = {"__name__": "interp.deep", "warn": warn}, {"__name__": "models.top"}
    exec("def warned(): warn('seen')", deep)
    exec("def run(function): return function()", top)

    def between():
        deep["warned"]()

    with pytest.warns(UserWarning, match="seen") as caught:
        top["run"](between)
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
