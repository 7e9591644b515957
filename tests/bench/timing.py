"""Times and ratios of calls that run in turn, and the peak memory of a call in a new process."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Call = Callable[[], object]


def seconds(call: Call) -> float:
    """Return the wall time of one call, with the time that a GPU needs to finish it."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratios(calls: dict[str, Call], base: str, budget: float) -> dict[str, tuple[float, float]]:
    """Return the median time of each call, and its median ratio to the call `base`.

    In each round, all calls run in turn. A ratio compares two calls of the same round, because the
    speed of a machine changes over time. There are at least seven rounds, and rounds begin until
    `budget` seconds have passed.
    """
    for call in calls.values():
        call()
    rounds: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(rounds) < 7 or time.perf_counter() - start < budget:
        # Every second round has the reverse order, so that a call does not always follow the same
        # call.
        order = list(calls.items())[:: 1 if len(rounds) % 2 else -1]
        rounds.append({name: seconds(call) for name, call in order})
    return {
        name: (
            statistics.median(times[name] for times in rounds),
            statistics.median(times[name] / times[base] for times in rounds),
        )
        for name in calls
    }


def peak_in_this_process(call: Call) -> float:
    """Return the resident memory that one call adds at its peak, in MiB. It works on Linux only."""
    # This resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = call()
    after = _status("VmHWM")
    del kept
    return (after - before) / 1024


def peak_on_gpu(call: Call) -> float:
    """Return the memory of tensors on the GPU that one call adds at its peak, in MiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    after = torch.cuda.max_memory_allocated()
    del kept
    return (after - before) / 2**20


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak(script: str, row: str, name: str) -> float:
    """Return the memory of one call, in a new process that builds the models of the row first."""
    command = [sys.executable, str(Path(script)), row, "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])
