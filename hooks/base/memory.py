"""A limit of memory: values that would not fit raise an error before the system kills the process.

1. Each stored value is counted (`Bound.add`). The sum is checked from 256 MiB on, or from a quarter
   of `max_bytes` on, if this is less.
2. Later values are assumed to be as large as the same values in an earlier layer.
3. More than `max_bytes`, or 0.9 of the free memory, raises an error that suggests a smaller
   selection.
4. Code with a large allocation checks the free memory before it (`require_room`).
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hooks.base._torch import FakeTensor, has_storage, memory_of
from hooks.base.errors import MemoryLimitError
from hooks.base.kinds import require_kind
from hooks.base.paths import LAYER

_FIRST_LOOK = 2**28
_SHARE = 0.9


class Bound:
    """A counter of the bytes of stored values, which raises an error above a limit.

    Args:
        names: the names of all values that will be stored.
        max_bytes: the limit. Default: 0.9 of the free memory.
        otherwise: the advice at the end of the error. Default: to use `lazy=True` or `pos=`, or
            `names=` with a selection of points whose values do not exceed the limit.
        times: the number of tensors of the same size for each value: 2 if its gradient is stored
            later.
    """

    def __init__(
        self,
        names: Collection[str],
        max_bytes: int | None = None,
        otherwise: str | None = None,
        times: int = 1,
    ) -> None:
        require_kind("max_bytes", max_bytes, (int, float, type(None)), words="a number of bytes")
        self._names = names
        self._max_bytes = max_bytes
        self._otherwise = otherwise
        self._times = times
        self._sizes: dict[str, int] = {}
        # The number of bytes of each storage that no counted value covers, by `memory_of`. Two
        # values may be views of one storage, whose bytes must count once.
        self._uncounted: dict[int, int] = {}
        self._counted = 0
        self._next_look = _FIRST_LOOK if max_bytes is None else min(_FIRST_LOOK, max_bytes / 4)
        # Until so many bytes are counted, each value counts in full, even if it shares its memory
        # with another one. The search for shared memory would slow down small runs.
        self._count_from = _FIRST_LOOK / 8 if max_bytes is None else 0

    def add(self, name: str, value: Tensor) -> None:
        """Count a stored value, unless its memory is already counted.

        Raises:
            MemoryLimitError: if all values together would exceed the limit.
        """
        # Sparse tensors have no `nbytes`.
        size = value.numel() * value.element_size()
        if self._counted >= self._count_from and has_storage(value):
            memory = memory_of(value)
            uncounted = self._uncounted.get(memory, value.untyped_storage().nbytes())
            size = min(size, uncounted)
            self._uncounted[memory] = uncounted - size
        self._sizes[name] = self._sizes.get(name, 0) + size * self._times
        self._counted += size
        if self._counted > self._next_look and not isinstance(value, FakeTensor):
            self._look(value.device)

    def _look(self, device: torch.device) -> None:
        """Estimate the bytes of all values, and compare them with the limit.

        Raises:
            MemoryLimitError: if they exceed the limit.
        """
        limit: float = math.inf
        if self._max_bytes is not None:
            limit = self._max_bytes
        elif (free := free_memory(device)) is not None:
            limit = self._counted + _SHARE * free
        kinds = {name: self._kind(name) for name in self._names}
        # If layers differ in size, the latest one counts. The first layer is not typical: the input
        # of a later layer may share its memory with the output of the layer before it.
        of_kind = {kinds[name]: size for name, size in self._sizes.items()}
        sizes: Counter[str] = Counter()
        for name, kind in kinds.items():
            sizes[name.rpartition(".")[2]] += self._sizes.get(name, of_kind.get(kind, 0))
        in_layers = {kind for kind, count in Counter(kinds.values()).items() if count > 1}
        is_known = of_kind.keys() >= in_layers
        # Before every kind of value has been seen in one layer, raise the error only if the values
        # so far exceed the limit. Half of the free memory is such a limit, because the run needs
        # memory for more than the stored values.
        is_late = self._counted > (limit if self._max_bytes is not None else limit / 2)
        if sizes.total() > limit and (is_known or is_late):
            raise MemoryLimitError(self._refusal(limit, sizes, is_known))
        self._next_look = self._counted + max((limit / self._times - self._counted) / 4, limit / 64)

    def _kind(self, name: str) -> str:
        """Return a point's name without layer numbers.

        Names of blocks of lazy caches end in a layer number. Digits in the names of a `Sequential`
        are not layer numbers.
        """
        is_layer = self._otherwise is not None or not name.rpartition(".")[2].isdigit()
        return LAYER.sub("#", name) if is_layer else name

    def _refusal(self, limit: float, sizes: Counter[str], is_known: bool) -> str:
        """Return the message for values that exceed the limit.

        Args:
            limit: the limit in bytes.
            sizes: the bytes of all values, by the last part of their names.
            is_known: whether the sizes of all values of one layer are known. Otherwise, the real
                size may be larger than the estimate, and the message contains "at least".
        """
        whose = "0.9 of the memory that is free" if self._max_bytes is None else "max_bytes"
        n_bytes = sizes.total()
        left_out = []
        more = "" if is_known else "at least "
        message = (
            f"the values would take {more}{bytes_in_words(n_bytes)}, and {whose} is "
            f"{bytes_in_words(limit)}"
        )
        if self._otherwise is not None:
            return f"{message}: {self._otherwise}"
        message = f"{message}: use lazy=True or pos="
        for part, size in sizes.most_common(len(sizes) - 1):
            if n_bytes <= limit:
                break
            left_out.append(f".{part}")
            n_bytes -= size
        if n_bytes > limit or not is_known:
            return message
        chosen = f"lambda point: not point.name.endswith({(*left_out,)})"
        return f"{message}, or keep {bytes_in_words(n_bytes)} by names={chosen}"


def require_room(n_bytes: int, like: Tensor, what: str) -> None:
    """Check that an allocation needs at most 0.9 of the free memory on a tensor's device.

    Below 256 MiB there is no check.

    Args:
        n_bytes: the bytes of the allocation.
        like: a tensor on the device.
        what: the purpose of the allocation, with advice, for the error.

    Raises:
        MemoryLimitError: with the needed and the free bytes.
    """
    if torch.compiler.is_compiling() or n_bytes < _FIRST_LOOK or isinstance(like, FakeTensor):
        return
    free = free_memory(like.device)
    if free is not None and n_bytes > _SHARE * free:
        raise MemoryLimitError(
            f"{bytes_in_words(free)} are free, and {bytes_in_words(n_bytes)} are needed for {what}"
        )


def free_memory(device: torch.device, root: Path = Path("/")) -> float | None:
    """Return the bytes that this process can still allocate on a device.

    On Linux, the limits of the process (`ulimit`) and of its control groups are respected. The
    result is None if the system does not report the bytes.

    Args:
        device: the CPU or a device of CUDA. For other devices the result is None.
        root: the directory that contains `proc` and `sys`.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with suppress(OSError):
        free = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
        if device.type == "cpu" and free:
            return max(0, min(int(free[1]) * 1024, *_left_in_groups(root), *_left_of_limits(root)))
    return None


class _GroupFiles(NamedTuple):
    """The names of the files of a control group.

    Attributes:
        folder: the folder of all groups.
        limit, usage: the files with the limit and with the used bytes.
        unused: the entry of `memory.stat` with the bytes of unused files in the page cache.
    """

    folder: str
    limit: str
    usage: str
    unused: str


_FILES_OF_VERSION_1 = _GroupFiles(
    "memory", "memory.limit_in_bytes", usage="memory.usage_in_bytes", unused="total_inactive_file"
)
_FILES_OF_VERSION_2 = _GroupFiles("", "memory.max", usage="memory.current", unused="inactive_file")


def _left_in_groups(root: Path) -> Iterator[float]:
    """Yield the free bytes in each control group of this process.

    Unused files in the page cache count as free.
    """
    yield float("inf")
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            names = _FILES_OF_VERSION_1 if controllers else _FILES_OF_VERSION_2
            group = Path(path.lstrip("/"))
            for part in (group, *group.parents):
                folder = root / "sys/fs/cgroup" / names.folder / part
                # The outermost group has no such file, or its limit is `max`.
                with suppress(OSError, ValueError):
                    limit = int((folder / names.limit).read_text())
                    usage = int((folder / names.usage).read_text())
                    stat = (folder / "memory.stat").read_text()
                    unused = re.search(rf"^{names.unused} (\d+)", stat, re.M)
                    yield limit - usage + (int(unused[1]) if unused else 0)


def _left_of_limits(root: Path) -> Iterator[float]:
    """Yield the free bytes within each limit of this process (`ulimit -v` and `ulimit -d`)."""
    yield float("inf")
    with suppress(OSError):
        limits = (root / "proc/self/limits").read_text()
        used = (root / "proc/self/status").read_text()
        for limit, size in _LIMITS.items():
            # There is no match if the limit is `unlimited`.
            most = re.search(rf"^{limit} +(\d+)", limits, re.M)
            in_use = re.search(rf"^{size}:\s+(\d+) kB", used, re.M)
            if most and in_use:
                yield int(most[1]) - int(in_use[1]) * 1024


# The memory limits of a Linux process, and the counter for each limit.
_LIMITS = {"Max address space": "VmSize", "Max data size": "VmData"}


def bytes_in_words(n_bytes: float) -> str:
    """Return a number of bytes as text.

    >>> bytes_in_words(17_300_000_000), bytes_in_words(2**20)
    ('17.3 GB', '1.0 MB')
    """
    unit, size = ("GB", 1e9) if n_bytes >= 1e9 else ("MB", 1e6)
    return f"{n_bytes / size:.1f} {unit}"
