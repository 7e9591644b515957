"""Ratios of two callables from interleaved runs, and the peak memory of one call in a fresh
process.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Call = Callable[[], object]


def seconds(call: Call) -> float:
    """Wall time of one call, until a GPU has done its part."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratios(calls: dict[str, Call], base: str, budget: float) -> dict[str, tuple[float, float]]:
    """For each call its median time and its median ratio to `base`, measured in turn round by
    round.

    A ratio is taken within a round, so a machine that slows down slows both; rounds go on until the
    budget, in seconds, is spent, and there are at least seven.
    """
    for call in calls.values():
        call()
    rounds: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(rounds) < 7 or time.perf_counter() - start < budget:
        # Every other round runs backwards, so that no call always follows the same one.
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
    """How far one call raises the process's resident memory at its peak, in MiB. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    kept = call()
    after = _status("VmHWM")
    del kept
    return (after - before) / 1024


def peak_on_gpu(call: Call) -> float:
    """How far one call raises the memory of tensors on the GPU at its peak, in MiB."""
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
    """The same, in a fresh process that builds the row's models first."""
    command = [sys.executable, str(Path(script)), row, "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])
