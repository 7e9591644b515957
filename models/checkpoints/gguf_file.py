"""The GGUF file format: a header of metadata, then tensors, quantised or not."""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
"""The types of tensors that can be read."""

# A value in a header: the type's code there, and struct's.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# How many rows of a tensor are dequantised at a time, so that what is needed meanwhile stays small.
_ROWS = 256


@dataclass(frozen=True)
class Stored:
    """Where a tensor is in a file.

    Attributes:
        kind: its type.
        shape: as PyTorch has it, the contiguous axis last.
        start: its first byte.
        row_bytes: the size of a row, along the last axis.
    """

    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return prod(self.shape[:-1])


class GGUFFile:
    """A GGUF file, checked when it is opened, its tensors then read one at a time.

    Attributes:
        keep: True, as what `read` gives is the caller's own.
        metadata: the header's values by key; arrays are tuples.
        tensors: where each tensor is.

    Args:
        path: a file of GGUF 2 or 3 in little-endian order.

    Raises:
        ImportError: if the package gguf is not installed.
        ValueError: if this is no such file, it is damaged, or a tensor is not of `TYPES`.
    """

    keep: bool = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with open(path, "rb") as file:
            if (magic := file.read(4)) != b"GGUF":
                raise ValueError(f"a GGUF file starts with b'GGUF', not {magic!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._open(_Header(data))

    def _open(self, header: "_Header") -> None:
        if (version := header.number("I")) not in (2, 3):
            raise ValueError(f"the version is 2 or 3, in little-endian order, not {version}")
        n_tensors, n_values = header.numbers("Q", 2)
        self.metadata = _once((header.text(), header.value()) for _ in range(n_values))
        described = _once((header.text(), header.tensor()) for _ in range(n_tensors))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment.bit_count() != 1:
            raise ValueError(f"general.alignment is a power of two, not {alignment!r}")
        self.tensors: dict[str, Stored] = {}
        first = at = _up(header.at, alignment)
        for name, (shape, kind, offset) in described.items():
            # llama.cpp asks for the same: tensors follow each other without gaps or overlaps.
            if first + offset != at:
                raise ValueError(f"{name} starts {at - first} bytes into the data, not {offset}")
            self.tensors[name] = tensor = _stored(name, shape, kind, at)
            end = at + tensor.n_rows * tensor.row_bytes
            if end > len(header.data):
                raise ValueError(f"{name} ends at byte {end}, and the file at {len(header.data)}")
            at = _up(end, alignment)

    def keys(self) -> set[str]:
        """The names of all tensors."""
        return set(self.tensors)

    def stored_alike(self, key: str, other: str) -> bool:
        """Whether two tensors are of one type and shape, and the same byte for byte."""
        one, two = self.tensors[key], self.tensors[other]
        if (one.kind, one.shape) != (two.kind, two.shape):
            return False
        with open(self._path, "rb") as file, open(self._path, "rb") as again:
            file.seek(one.start)
            again.seek(two.start)
            return all(
                file.read(one.row_bytes) == again.read(two.row_bytes) for _ in range(one.n_rows)
            )

    def read(self, key: str) -> Tensor:
        """A tensor's values in float32."""
        import numpy as np
        from gguf.quants import dequantize

        tensor = self.tensors[key]
        values = torch.empty(tensor.n_rows, tensor.shape[-1], dtype=torch.float32, device="cpu")
        # Not mapped: pages of the file would count as memory of ours for as long as the map is open.
        with open(self._path, "rb") as file:
            file.seek(tensor.start)
            for rows in values.split(_ROWS):
                raw = np.frombuffer(file.read(len(rows) * tensor.row_bytes), np.uint8)
                rows.numpy()[:] = dequantize(raw.reshape(len(rows), tensor.row_bytes), tensor.kind)
        return values.view(tensor.shape)


class _Header:
    """Reads a header front to back, and never beyond the end of the file.

    The package's own reader makes several arrays for every token's text, which takes seconds and
    hundreds of megabytes, and loops without end where a damaged file gives a huge length.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(b"GGUF")

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        try:
            values = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise ValueError(f"the file ends within its header, {len(self.data)} bytes") from None
        self.at += struct.calcsize(form)
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        (raw,) = self.numbers("s", self.number("Q"))
        return str(raw, errors="replace")  # some vocabularies hold parts of characters

    def value(self) -> Any:
        kind = self.number("I")
        if kind != _ARRAY:
            return self._values(kind, 1)[0]
        return self._values(self.number("I"), self.number("Q"))

    def _values(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        if kind != _STRING:
            raise ValueError(f"a value in the header is of type 0 to 12, not {kind}")
        return tuple(self.text() for _ in range(count))

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, type, and how far into the data it starts."""
        if not 1 <= (n_axes := self.number("I")) <= 4:
            raise ValueError(f"a tensor in the header has 1 to 4 axes, not {n_axes}")
        return self.numbers("Q", n_axes)[::-1], self.number("I"), self.number("Q")


def _once(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"a name stands in the header once, not twice as {name!r} does")
        found[name] = value
    return found


def _up(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _stored(name: str, shape: tuple[int, ...], code: int, start: int) -> Stored:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ImportError('GGUF needs the package gguf: pip install "hookscope[hf]"') from None
    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    if names.get(code) not in TYPES:
        given = names.get(code, code)
        raise ValueError(f"the tensor {name} is of a type among {', '.join(TYPES)}, not {given}")
    kind = GGMLQuantizationType(code)
    block, size = GGML_QUANT_SIZES[kind]
    if not prod(shape) or shape[-1] % block:
        rule = f"of at least one row, each a multiple of {block} long"
        raise ValueError(f"the tensor {name}, {kind.name}, is {rule}, not of shape {shape}")
    return Stored(kind, shape, start, shape[-1] // block * size)
