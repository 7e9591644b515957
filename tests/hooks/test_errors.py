"""Checks that all packages share: optional libraries."""

import pytest

from hooks.shared import library


def test_a_library_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_library_of_anyone")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match='pip install "hookscope'):
        library("no_such_library_of_anyone.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library_of_anyone'"):
        library("halfway")
