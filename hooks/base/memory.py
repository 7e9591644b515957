"""A bound of memory: what would not fit is refused before the system ends the process.

1. What is kept is counted as it comes (`Bound.add`), and looked at from 256 MiB on.
2. What is still to come is taken to be as large as the same value of a layer that has come.
3. More than `max_bytes`, or 0.9 of the memory that is free, is an error that says what to leave out.
4. What allocates much at once asks before (`require_room`).
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hooks.base._torch import FakeTensor, has_storage, memory_of
from hooks.base.errors import MemoryLimitError
from hooks.base.kinds import require_kind
from hooks.base.paths import LAYER

_FIRST_LOOK = 2**28
_SHARE = 0.9


class Bound:
    """Counts the bytes of values that are kept together, and refuses them when they would be too many.

    Args:
        names: the names of all that will be kept.
        max_bytes: the bound; None for 0.9 of the memory that is free.
        otherwise: what to do instead, for the error; None for what helps an eager run: it names points that would fit.
        times: how many tensors of its size each value stands for: two where its gradient is kept later.
    """

    def __init__(
        self,
        names: Collection[str],
        max_bytes: int | None = None,
        otherwise: str | None = None,
        times: int = 1,
    ) -> None:
        require_kind("max_bytes", max_bytes, (int, float, type(None)), "a number of bytes")
        self._names, self._max_bytes = names, max_bytes
        self._otherwise, self._times = otherwise, times
        self._sizes: dict[str, int] = {}
        self._left: dict[int, int] = {}  # bytes of a memory that no value has been counted for
        self._held = 0
        self._next_look = _FIRST_LOOK if max_bytes is None else min(_FIRST_LOOK, max_bytes / 4)
        # Before, shared memory is counted again, because small runs have no time to ask for it.
        self._count_from = _FIRST_LOOK / 8 if max_bytes is None else 0

    def add(self, name: str, value: Tensor) -> None:
        """Count a value that is kept, unless its memory is counted already.

        Raises:
            MemoryLimitError: if all values would be too many.
        """
        size = value.numel() * value.element_size()  # sparse tensors have no `nbytes`
        if self._held >= self._count_from and has_storage(value):
            memory = memory_of(value)
            left = self._left.get(memory, value.untyped_storage().nbytes())
            size = min(size, left)
            self._left[memory] = left - size
        self._sizes[name] = self._sizes.get(name, 0) + size * self._times
        self._held += size
        if self._held > self._next_look and not isinstance(value, FakeTensor):
            self._look(value.device)

    def _look(self, device: torch.device) -> None:
        limit: float = math.inf
        if self._max_bytes is not None:
            limit = self._max_bytes
        elif (free := free_memory(device)) is not None:
            limit = self._held + _SHARE * free
        kinds = {name: self._kind(name) for name in self._names}
        # Of a later layer, whose input may be the memory of the earlier one's output.
        of_kind = {kinds[name]: size for name, size in self._sizes.items()}
        sizes: Counter[str] = Counter()
        for name, kind in kinds.items():
            sizes[name.rpartition(".")[2]] += self._sizes.get(name, of_kind.get(kind, 0))
        in_layers = {kind for kind, count in Counter(kinds.values()).items() if count > 1}
        is_known = of_kind.keys() >= in_layers
        # One layer may be too much, and what is free is needed for more than values.
        is_late = self._held > (limit if self._max_bytes is not None else limit / 2)
        if sizes.total() > limit and (is_known or is_late):
            raise MemoryLimitError(self._refusal(limit, sizes, is_known))
        self._next_look = self._held + max((limit / self._times - self._held) / 4, limit / 64)

    def _kind(self, name: str) -> str:
        """A point's name without the numbers of layers. Blocks of lazy caches end in them; `0` and `1` of a `Sequential` are no layers."""
        is_layer = self._otherwise is not None or not name.rpartition(".")[2].isdigit()
        return LAYER.sub("#", name) if is_layer else name

    def _refusal(self, limit: float, sizes: Counter[str], is_known: bool) -> str:
        whose = "0.9 of the memory that is free" if self._max_bytes is None else "max_bytes"
        left, without = sizes.total(), []
        more = "" if is_known else "at least "
        said = f"the values would take {more}{bytes_in_words(left)}, and {whose} is {bytes_in_words(limit)}"
        if self._otherwise is not None:
            return f"{said}: {self._otherwise}"
        said = f"{said}: use lazy=True or positions="
        for part, size in sizes.most_common(len(sizes) - 1):
            if left <= limit:
                break
            without.append(f".{part}")
            left -= size
        if left > limit or not is_known:
            return said
        chosen = f"lambda point: not point.name.endswith({(*without,)})"
        return f"{said}, or keep {bytes_in_words(left)} by names={chosen}"


def require_room(n_bytes: int, like: Tensor, what: str) -> None:
    """Refuse what needs more memory than 0.9 of what is free on a tensor's device. Below 256 MiB nothing is asked.

    Raises:
        MemoryLimitError: saying how many bytes.
    """
    if torch.compiler.is_compiling() or n_bytes < _FIRST_LOOK or isinstance(like, FakeTensor):
        return
    free = free_memory(like.device)
    if free is not None and n_bytes > _SHARE * free:
        raise MemoryLimitError(
            f"{bytes_in_words(free)} are free, and {bytes_in_words(n_bytes)} are needed for {what}"
        )


def free_memory(device: torch.device, root: Path = Path("/")) -> float | None:
    """The bytes that a device can still give to this process, within the control groups and limits of Linux.

    None if the system does not report it.

    Args:
        device: the CPU or a device of CUDA. For other devices the result is None.
        root: where `proc` and `sys` are.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with suppress(OSError):
        free = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
        if device.type == "cpu" and free:
            return max(0, min(int(free[1]) * 1024, *_left_in_groups(root), *_left_of_limits(root)))
    return None


def _left_in_groups(root: Path) -> Iterator[float]:
    """The bytes that each control group above this process leaves. Files in memory that nobody uses can go."""
    yield float("inf")
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            place, most, used, files = (
                ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                if controllers
                else ("", "memory.max", "memory.current", "inactive_file")
            )
            group = Path(path.lstrip("/"))
            for part in (group, *group.parents):
                folder = root / "sys/fs/cgroup" / place / part
                with suppress(OSError, ValueError):  # the outermost has none, or its limit is `max`
                    limit, usage = (int((folder / name).read_text()) for name in (most, used))
                    stat = (folder / "memory.stat").read_text()
                    unused = re.search(rf"^{files} (\d+)", stat, re.M)
                    yield limit - usage + (int(unused[1]) if unused else 0)


def _left_of_limits(root: Path) -> Iterator[float]:
    """The bytes that the limits of this process leave, as `ulimit -v` and `ulimit -d` set them."""
    yield float("inf")
    with suppress(OSError):
        limits = (root / "proc/self/limits").read_text()
        used = (root / "proc/self/status").read_text()
        for limit, size in _LIMITS.items():
            most = re.search(rf"^{limit} +(\d+)", limits, re.M)  # none where it is `unlimited`
            taken = re.search(rf"^{size}:\s+(\d+) kB", used, re.M)
            if most and taken:
                yield int(most[1]) - int(taken[1]) * 1024


# The limits of memory that Linux keeps for a process, and what it counts for each.
_LIMITS = {"Max address space": "VmSize", "Max data size": "VmData"}


def bytes_in_words(n_bytes: float) -> str:
    """A number of bytes for people.

    >>> bytes_in_words(17_300_000_000), bytes_in_words(2**20)
    ('17.3 GB', '1.0 MB')
    """
    unit, size = ("GB", 1e9) if n_bytes >= 1e9 else ("MB", 1e6)
    return f"{n_bytes / size:.1f} {unit}"
