"""Signs of damage in downloaded files: their first bytes and their sizes.

1. A failed download leaves an empty file, a pointer of Git LFS or a page of HTML.
2. The header of a safetensors file contains the length of the file.
3. Files of GGUF, NumPy and PyTorch begin with known bytes, and archives end with a list of their
   parts.
"""

import json
import os
import zipfile
from pathlib import Path

# The suffixes of each format.
_TENSORS = (".safetensors",)
_GGUF = (".gguf",)
_ONNX = (".onnx",)
_NUMPY = (".npz",)
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
# The first bytes of a zip archive, and of a pickle.
_ARCHIVE = b"PK"
_PICKLE = b"\x80"


def damage_of(path: str | os.PathLike[str]) -> str:
    """Return the damage of a file as the end of a sentence, or an empty text if no damage is found.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.gguf")
    ...     _ = file.write_bytes(b"<!doctype html>")
    ...     damage_of(file)
    'is a page of HTML'
    """
    file = Path(path)
    if not file.is_file():
        return ""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(64)
    if not size:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS instead of the file"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "is a page of HTML"
    return _damage_of_kind(file, start, size)


def _damage_of_kind(file: Path, start: bytes, size: int) -> str:
    """Return a text that describes the damage of a file of tensors, or an empty text.

    The suffix of the file determines the format that is checked.
    """
    suffix = file.suffix.lower()
    if suffix in _TENSORS:
        return _damage_of_safetensors(file, start, size)
    if suffix in _GGUF and not start.startswith(b"GGUF"):
        return f"is no file of GGUF, as it begins with {start[:4]!r}"
    if suffix in _NUMPY + _TORCH and start.startswith(_ARCHIVE) and not _is_archive(file):
        return f"has {size:,} bytes, without a sound list of its parts at the end"
    if suffix in _NUMPY and not start.startswith(_ARCHIVE):
        return f"is no archive of NumPy, as it begins with {start[:4]!r}"
    if suffix in _TORCH and not start.startswith((_ARCHIVE, _PICKLE)):
        return f"is no file of PyTorch, as it begins with {start[:4]!r}"
    # An ONNX file begins with the field of its version.
    if suffix in _ONNX and start[:1] != b"\x08":
        return f"is no file of ONNX, as it begins with {start[:4]!r}"
    return ""


def _is_archive(file: Path) -> bool:
    """Return whether an archive contains the list of its parts.

    The check in `zipfile` may raise an error.
    """
    try:
        with zipfile.ZipFile(file):
            return True
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def _damage_of_safetensors(file: Path, start: bytes, size: int) -> str:
    """Return the damage of a safetensors file, whose header contains its size."""
    n_header = int.from_bytes(start[:8], "little")
    if size < 8 or start[8:9] != b"{":
        return f"is no file of safetensors, as it begins with {start[:9]!r}"
    if size < 8 + n_header:
        return f"has only {size:,} bytes, fewer than its header"
    with file.open("rb") as opened:
        opened.seek(8)
        header = opened.read(n_header)
    try:
        entries = json.loads(header)
        ends = [
            entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"
        ]
        whole = 8 + n_header + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError):
        return "has a damaged header"
    return "" if size == whole else f"has {size:,} bytes, and its header says {whole:,}"
