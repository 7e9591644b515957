"""Errors and warnings that all packages share: optional libraries, choices, lines of callers."""

import importlib.metadata
import inspect
import re

import pytest

from hooks.base import library, warn
from interp import composition_scores


def test_a_library_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_library_of_anyone")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r'pip install (-e )?".*\[hf\]'):
        library("no_such_library_of_anyone.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library_of_anyone'"):
        library("halfway")


@pytest.mark.parametrize(
    ("origin", "argument"),
    [
        (None, '"hookscope[ray] @ git+https://github.com/hookscope/hookscope"'),
        (
            '{"url": "https://g.example/h", "vcs_info": {"vcs": "git", "commit_id": "8f3a"}}',
            '"hookscope[ray] @ git+https://g.example/h@8f3a"',
        ),
        ('{"url": "https://g.example/h.zip", "archive_info": {}}', '"hookscope[ray] @ https://g.'),
        ('{"url": "file:///my%20h", "dir_info": {}}', '"hookscope[ray] @ file:///my%20h"'),
        ('{"url": "file:///my%20h", "dir_info": {"editable": true}}', '-e "/my h[ray]"'),
    ],
)
def test_the_advice_to_install_an_extra_keeps_the_installed_version(monkeypatch, origin, argument):
    """pip writes these forms of direct_url.json (PEP 610)."""

    class Distribution:
        def read_text(self, name):
            return {"direct_url.json": origin}[name]

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Distribution())
    with pytest.raises(ImportError, match=re.escape(f"pip install {argument}")):
        library("no_such_library_of_anyone", extra="ray")


def test_a_package_that_is_not_installed_is_advised_from_its_repository(monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    with pytest.raises(ImportError, match=r"hookscope\[hf\] @ git\+https://github.com/hookscope"):
        library("no_such_library_of_anyone")


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
