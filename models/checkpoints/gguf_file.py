"""Read metadata and single tensors from GGUF files, with the package gguf."""

import os
import struct
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hooks.base import install_command
from models.files import without

try:
    from gguf import GGUFReader, GGUFValueType
    from gguf.quants import dequantize
except ModuleNotFoundError as error:
    install = install_command("hf")
    raise ImportError(f"GGUF needs the package gguf: {install}") from error

# The number of rows to dequantize at a time. The library makes a second copy of these rows.
_ROWS = 256


class GGUFFile:
    """A GGUF file.

    Args:
        path: a complete file in little-endian order.
        ignore: keys of the metadata to leave out.

    Attributes:
        shapes: the shapes of all tensors, in PyTorch's order.

    Raises:
        UnknownNameError: if a key to ignore is not in the file.
        Exception: an exception of any class, if the file is damaged or is not a GGUF file.
    """

    def __init__(self, path: str | os.PathLike[str], ignore: Collection[str] = ()) -> None:
        self._path = path
        reader = _Reader(path)
        if reader.byte_order != "I":
            raise ValueError(
                "the file must have the byte order of this machine; got the other order"
            )
        self._fields = without(reader.fields, ignore, str(path))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()
        }

    def metadata(self, prefix: str) -> dict[str, Any]:
        """Return the values whose keys start with `prefix`, by the rest of the key."""
        return {
            key.removeprefix(prefix): field.contents()
            for key, field in self._fields.items()
            if key.startswith(prefix)
        }

    def read(self, key: str) -> Tensor:
        """Return the values of a tensor in float32, in new memory.

        Raises:
            ValueError: if the library cannot dequantize the type; the error names the tensor and
                the type.
        """
        tensor = self._tensors[key]
        shape = self.shapes[key]
        # Do not use the memory map of the library: its pages count as memory of this process.
        stored = np.fromfile(
            self._path, tensor.data.dtype, tensor.data.size, offset=int(tensor.data_offset)
        )
        rows = stored.reshape(-1, tensor.data.shape[-1])
        values = torch.empty(len(rows), shape[-1], dtype=torch.float32, device="cpu")
        try:
            for start in range(0, len(rows), _ROWS):
                part = dequantize(rows[start : start + _ROWS], tensor.tensor_type)
                values[start : start + _ROWS] = torch.from_numpy(part)
        except NotImplementedError:
            rule = f"{key} must be of a type that the package gguf can dequantize"
            raise ValueError(f"{self._path}: {rule}; got {tensor.tensor_type.name}") from None
        return values.view(shape)


class _Reader(GGUFReader):
    """The library's reader, with a faster way to read arrays.

    The library makes several objects for each element. A vocabulary of 128,000 tokens would take
    seconds and hundreds of megabytes, and a damaged length would cause an endless loop.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
        """Return the size of a value in bytes, its parts, the indices of its data, and its types.

        Args:
            orig_offs: the position of the value in the file.
            raw_type: the type of the value.
        """
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = self.data.data
        code, length = struct.unpack_from("<IQ", raw, orig_offs)
        kind = GGUFValueType(code)
        start = orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], length)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]
        if kind != GGUFValueType.STRING:
            raise ValueError(f"elements of an array must be numbers or strings; got {kind.name}")
        strings = []
        position = start
        for _ in range(length):
            # A string follows its length, which takes eight bytes.
            (size,) = struct.unpack_from("<Q", raw, position)
            strings.append(raw[position + 8 : position + 8 + size])
            position += 8 + size
        return position - orig_offs, strings, list(range(length)), [GGUFValueType.ARRAY, kind]
