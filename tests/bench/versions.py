"""Compare the speed of two versions of this project, in one process.

    git worktree add ../earlier COMMIT
    python tests/bench/versions.py ../earlier . forward-tiny generate-tiny

Identical code differs by up to 17 % between two processes, and by less than 1 % in one process. So
both versions are imported under the same names, and the modules of one version are in `sys.modules`
at a time. The rows are the rows of `bench.py`, and both versions must have them. Each line has the
median ratio of the later version to the earlier version, with its 95% interval over rounds, for
each call of a row. Calls of other libraries show the noise: their ratio is 1.
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("hooks", "models", "interp", "tests")
DRAWS = 400


class Version:
    """A source tree, whose modules are importable inside `active`.

    Args:
        path: the root of the tree.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path.resolve())
        self.modules: dict[str, ModuleType] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context manager inside which imports give the modules of this tree."""
        for name in _imported():
            del sys.modules[name]
        sys.modules.update(self.modules)
        sys.path.insert(0, self.path)
        try:
            yield
        finally:
            sys.path.remove(self.path)
            self.modules = {name: sys.modules[name] for name in _imported()}

    def calls(self, row: str) -> dict[str, Callable[[], Any]]:
        """Return the calls of a row of the benchmark."""
        with self.active():
            bench = importlib.import_module("tests.bench.bench")
            if not str(bench.__file__).startswith(self.path):
                raise ImportError(f"tests must be imported from {self.path}; got {bench.__file__}")
            torch.manual_seed(0)
            return bench.ROWS[row]()

    def seconds(self, call: Callable[[], Any], n: int) -> float:
        """Return the mean time of a call, over `n` calls."""
        with self.active():
            start = time.perf_counter()
            for _ in range(n):
                call()
            return (time.perf_counter() - start) / n


def _imported() -> list[str]:
    """Return the names of the imported modules of this project."""
    return [name for name in sys.modules if name.partition(".")[0] in PACKAGES]


def compare(versions: list[Version], row: str, budget: float) -> None:
    """Print the ratios of each call of a row.

    Args:
        versions: the earlier and the later version.
        row: the name of the row.
        budget: the seconds for each call, for both versions together.
    """
    of_versions = [version.calls(row) for version in versions]
    for name in [name for name in of_versions[0] if name in of_versions[1]]:
        jobs = [
            (version, calls[name]) for version, calls in zip(versions, of_versions, strict=True)
        ]
        # The first calls prepare tables and memory.
        fastest = min(version.seconds(call, 2) for version, call in jobs)
        n = max(1, int(0.02 / fastest))
        end = time.monotonic() + budget
        ratios: list[float] = []
        times: list[float] = []
        while time.monotonic() < end or len(ratios) < 5:
            order = random.sample((0, 1), 2)
            taken = {number: jobs[number][0].seconds(jobs[number][1], n) for number in order}
            ratios.append(taken[1] / taken[0])
            times.append(taken[1])
        medians = sorted(
            statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(DRAWS)
        )
        low, high = medians[DRAWS // 40], medians[-1 - DRAWS // 40]
        print(
            f"{row:16} {name:44} {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]  "
            f"{statistics.median(times) * 1e3:.3f} ms",
            flush=True,
        )


def main() -> None:
    """Read the arguments and compare the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for each call")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # A path of one version must not give modules to the other version.
    roots = {path.resolve() for path in (options.earlier, options.later, Path(__file__).parents[2])}
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() not in roots]
    versions = [Version(options.earlier), Version(options.later)]
    for row in options.rows:
        compare(versions, row, options.budget)


if __name__ == "__main__":
    main()
