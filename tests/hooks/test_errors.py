"""Checks that all packages share: optional libraries, choices."""

import pytest

from hooks.shared import library
from interp import composition_scores


def test_a_library_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_library_of_anyone")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match='pip install "hookscope'):
        library("no_such_library_of_anyone.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library_of_anyone'"):
        library("halfway")


@pytest.mark.usefixtures("unchecked")
def test_a_part_of_a_choice_is_none(model):
    with pytest.raises(ValueError, match="one of Q, K, V; got 'QK'"):
        composition_scores(model, "QK")
