"""The project's additions to pytest, in runs of their own."""

import subprocess
import sys

from tests.count import ROOT

TABLE = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(3))
def test_table(row, column):
    pass

@pytest.mark.full
def test_long():
    pass
"""


def test_the_summary_counts_what_is_left_out(tmp_path):
    (tmp_path / "test_table.py").write_text(TABLE)
    options = ["-v", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "-n", "1"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    for case in ("0-0", "1-1", "2-2"):  # every row and every column
        assert f"test_table[{case}]" in done.stdout
    assert "6 cases of tests that are sampled, and 1 that are marked full" in done.stdout
