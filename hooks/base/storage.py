"""Files of tensors and metadata, which replace an old file only when they are complete.

Files are checked when they are read.
Files of `torch.save` are read as plain data.
"""

import itertools
import os
import pickle
import re
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hooks.base import strict_json
from hooks.base._torch import has_storage, memory_of
from hooks.base.damage import damage_of
from hooks.base.errors import CacheError, UnknownNameError
from hooks.base.kinds import require_kind

CHECKSUMS = "checksums"
"""The key of the checksums in a file's metadata."""

SAFETENSORS = ("", ".safetensors")
"""The allowed suffixes of safetensors files. If a name has no suffix, no suffix is added."""

# A folder whose name ends in one of these suffixes is probably a mistake. Any other suffix, as in
# `llama-3.1`, belongs to the name of the folder.
_OF_FILES = {
    *(".safetensors", ".gguf", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".h5", ".pkl"),
    *(".npy", ".npz", ".parquet", ".arrow", ".json", ".jsonl", ".yaml", ".csv", ".txt", ".md"),
    *(".html", ".htm", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".zip", ".tar", ".gz"),
}

# The prefix of the names of gaps between tensors. No name of a module starts with a dot.
_PAD = ".pad."

# The longest entry of a tensor with at most 64 axes; see `_entry`. The product of its sizes is
# below 2**63, so several sizes together do not have more digits than one size of 2**63.
_LONGEST = {"dtype": "F8_E4M3FNUZ", "shape": [2**63] + [1] * 63, "data_offsets": [2**63, 2**63]}


def nbytes(tensors: Collection[Tensor]) -> int:
    """Return the memory of `tensors` in bytes.

    Tensors with the same storage count once. A sparse tensor counts as if it were dense.
    """
    shared: dict[int, int] = {}
    without_storage = 0
    for tensor in tensors:
        if has_storage(tensor):
            shared[memory_of(tensor)] = tensor.untyped_storage().nbytes()
        else:
            without_storage += tensor.numel() * tensor.element_size()
    return sum(shared.values()) + without_storage


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return a path after a check of its type.

    Raises:
        TypeError: if `path` is neither a text nor a path.

    >>> path_of(3)
    Traceback (most recent call last):
    TypeError: path must be a text or a path; got 3
    """
    require_kind("path", path, (str, os.PathLike), words="a text or a path")
    return Path(path)


def suffix_of(path: str | os.PathLike[str], supported: Iterable[str]) -> str:
    """Return the suffix of a file to write, in lower case. The suffix decides the format.

    Args:
        path: the file. A name without a dot has the suffix `""`.
        supported: the suffixes of the supported formats, in lower case.

    Raises:
        ValueError: if the suffix is not supported.

    >>> suffix_of("run.1/means.HTML", [".html", ".safetensors"])
    '.html'
    >>> suffix_of("run.1/means.png", ["", ".html", ".safetensors"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: path must end in .html or .safetensors, or have no suffix; got run.1/means.png...
    """
    known = [*supported]
    suffix = path_of(path).suffix.lower()
    if path == "":
        raise ValueError("path must name a file; got an empty text")
    if suffix not in known:
        suffixes = [*filter(None, known)]
        listed = " or ".join(filter(None, [", ".join(suffixes[:-1]), *suffixes[-1:]]))
        rules = [f"end in {listed}"] if suffixes else []
        rules += ["have no suffix"] if "" in known else []
        # Pages, figures and tables are for other programs.
        is_read = {"", *SAFETENSORS} < {*known}
        hint = " (.safetensors and no suffix can be loaded again)" if is_read else ""
        raise ValueError(f"path must {', or '.join(rules)}; got {os.fspath(path)}{hint}")
    return suffix


def require_folder(path: str | os.PathLike[str], files: Iterable[str] = ()) -> None:
    """Check that the path of a folder does not look like a file, such as `model.safetensors`.

    Args:
        path: the folder.
        files: the suffixes of files that the caller could write instead, for the error.

    Raises:
        ValueError: if the path is empty, or if no folder exists at the path and the path has the
            suffix of a file.
    """
    folder = path_of(path)
    if path == "":
        raise ValueError("path must name a folder; got an empty text ('.' is the working folder)")
    if folder.suffix.lower() in _OF_FILES and not folder.is_dir():
        endings = "".join(f" or end in {suffix}" for suffix in files)
        raise ValueError(f"path must be a folder{endings}; got {os.fspath(path)}")


def save(
    path: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    place: Callable[[Path, Path], object] = os.replace,
    names: Collection[str] = (),
    later: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write tensors, and facts as JSON, to one file, completely or not at all.

    Any reader of safetensors can read the file.

    Args:
        path: the file; its name ends in `.safetensors` or has no suffix.
        kind: the kind of file, which is checked when the file is read.
        tensors: the tensors by name.
        facts: any value that fits JSON, and NaN and infinity.
        place: see `replacing`.
        names: the names of the tensors in `later`.
        later: more tensors, as pairs of a name and a tensor. A generator may compute them during
            writing: each tensor is released before the next one is requested.

    Raises:
        ValueError: if the path has a different suffix.
        FileNotFoundError: if the directory does not exist.
        TypeError: if a fact does not fit JSON, or safetensors does not support a dtype.
        OSError: if the disk is full.
    """
    suffix_of(path, SAFETENSORS)
    with replacing(path, place) as partial, partial.open("wb") as file:
        write(file, path, kind=kind, tensors=tensors, facts=facts, names=names, later=later)


def write(
    file: IO[bytes],
    path: str | os.PathLike[str],
    kind: str,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    names: Collection[str] = (),
    later: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write the content of a file of `save` to an open file; for the arguments see `save`.

    1. The names determine the largest possible size of the header, and this space is left free.
    2. Each tensor is written and released; its dtype, shape, place and checksum are recorded.
       Tensors in memory are sorted, widest dtype first. If a tensor would not begin at a multiple
       of the width of its dtype, bytes named `.pad.` fill the gap.
    3. The header is written into the free space.

    Raises:
        TypeError, OSError: see `save`.
    """
    text = strict_json.dumps(strict_json.encoded(facts))
    n_header = _size_of_header([*tensors, *names], kind, text)
    content = _Content(file, path, begin=8 + n_header)
    widest_first = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())
    for name, value in itertools.chain(later, widest_first):
        # This copies the tensor at most once. If it was copied, the original is released here.
        value = value.detach().cpu().contiguous()
        content.add(name, value)
        # Without this line, the tensor would exist until `later` has computed the next one.
        del value
    header = _header(content.entries, content.sums, kind, text)
    if len(header) > n_header:
        raise ValueError(f"a header must fit into {n_header} bytes; got {len(header)}")
    content.put(0, n_header.to_bytes(8, "little") + header.ljust(n_header))


def _size_of_header(names: Sequence[str], kind: str, text: str) -> int:
    """Return the largest possible size of a header in bytes, rounded up to a multiple of 8.

    Args:
        names: the names of the tensors.
        kind: the kind of file.
        text: the facts as JSON.
    """
    gaps = [f"{_PAD}{2**63}{name}" for name in names]
    entries = dict.fromkeys([*names, *gaps], _LONGEST)
    longest = _header(entries, dict.fromkeys(names, 2**32), kind, text)
    return -(-len(longest) // 8) * 8


def _header(entries: Mapping[str, Any], sums: Mapping[str, int], kind: str, text: str) -> bytes:
    """Return the header of a file.

    Args:
        entries: the entries of tensors and gaps; see `_entry`.
        sums: the checksum of each tensor.
        kind: the kind of file.
        text: the facts as JSON.
    """
    metadata = {"kind": kind, "facts": text, CHECKSUMS: _summed(sums, text)}
    return strict_json.dumps({"__metadata__": metadata, **entries}).encode()


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """Return the entry of a tensor in the header of safetensors."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class _Content:
    """The tensors in an open file, which are written one after another behind the header.

    Args:
        file: the open file.
        path: its path, for the errors.
        begin: the place of the first tensor, counted in bytes from the start of the file.

    Attributes:
        entries: the entries of the tensors and of the gaps so far.
        sums: the checksum of each tensor so far.
        end: the end of the last tensor, counted in bytes from `begin`.
    """

    def __init__(self, file: IO[bytes], path: str | os.PathLike[str], begin: int) -> None:
        self._file = file
        self._path = path
        self._begin = begin
        self.entries: dict[str, Any] = {}
        self.sums: dict[str, int] = {}
        self.end = 0

    def add(self, name: str, value: Tensor) -> None:
        """Write a tensor, after a gap if its numbers would not be aligned."""
        if n_gap := -self.end % value.element_size():
            self._append(f"{_PAD}{self.end}", "U8", [n_gap], bytes(n_gap))
        self._append(name, *_form(name, value), bytes_of(value))
        self.sums[name] = checksum(name, value)

    def _append(self, name: str, dtype: str, shape: list[int], content: bytes | memoryview) -> None:
        """Write the bytes of a tensor or of a gap after all other bytes, and add their entry."""
        end = self.end + len(content)
        self.put(self._begin + self.end, content)
        self.entries[name] = _entry(dtype, shape, begin=self.end, end=end)
        self.end = end

    def put(self, at: int, content: bytes | memoryview) -> None:
        """Write bytes at a place, counted from the start of the file."""
        try:
            self._file.seek(at)
            self._file.write(content)
            self._file.flush()
        # The message of Python, such as "No space left on device", does not name the file.
        except OSError as error:
            raise OSError(f"{self._path} could not be written: {error}") from None


def _form(name: str, value: Tensor) -> tuple[str, list[int]]:
    """Return the dtype and the shape of a tensor, as the header of safetensors spells them."""
    empty = torch.empty(0, *value.shape, dtype=value.dtype, device="cpu")
    try:
        entry = header_of(safetensors.torch.save({name: empty}))[name]
    except KeyError:
        raise TypeError(f"{name!r} must have a dtype of safetensors; got {value.dtype}") from None
    return entry["dtype"], entry["shape"][1:]


def header_of(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return dict(strict_json.loads(data[8 : 8 + size]))


def unpacked(kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Any:
    """Return the facts in a file of `write`, after a check that the file is complete.

    Raises:
        ValueError: if the file is damaged or has a different kind.
        KeyError: if a different program wrote the file.
    """
    text = metadata["facts"]
    if (metadata["kind"], metadata[CHECKSUMS]) != (kind, checksums(tensors, text)):
        raise ValueError(f"kind and checksums must be as saved; got {metadata['kind']!r}")
    return facts_of(metadata)


def facts_of(metadata: Mapping[str, str]) -> Any:
    """Return the facts in the metadata of a file of `write`.

    Raises:
        KeyError: if a different program wrote the file.
    """
    return strict_json.decoded(metadata["facts"])


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Open a file of this kind that `save` wrote, and yield its tensors and facts.

    Raises:
        FileNotFoundError: if the file does not exist.
        CacheError: if the file is damaged or has a different kind, or if its content raises an
            error inside the `with`.
    """
    with one_error(path, f"be a complete {kind} that `save` wrote", CacheError):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # `file` is not a mapping, so it has no iterator.
            names = [name for name in file.keys() if not name.startswith(_PAD)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
        yield tensors, unpacked(kind, tensors, metadata)


@contextmanager
def one_error(
    path: str | os.PathLike[str], rule: str = "", kind: type[Exception] = ValueError
) -> Iterator[None]:
    """Turn each error that a file's content may raise into an error that names the file.

    A damaged file is reported as damaged. Errors about a missing file, library or name are not
    changed.

    Args:
        path: the file or folder.
        rule: the rule that the content must satisfy, for the error. Default: none.
        kind: the class of the new error.
    """
    named = f"{path} must {rule}" if rule else str(path)
    try:
        yield
    except (FileNotFoundError, ImportError, UnknownNameError):
        raise
    except Exception as error:
        # If the path is a folder, these errors come from an attempt to read it as a file. Any other
        # error is about a file inside the folder.
        if os.path.isdir(path) and isinstance(error, IsADirectoryError | SafetensorError):
            raise kind(f"{named}; got a folder") from None
        damage = damage_of(path)
        again = "; download it again" if kind is ValueError else ""
        if damage and rule:
            raise kind(f"{named}; it {damage}{again}") from None
        if damage:
            raise kind(f"{path} {damage}{again}") from None
        if isinstance(error, SafetensorError):
            raise kind(f"{named}: it is not a valid safetensors file{again}") from None
        if isinstance(error, UnicodeDecodeError):
            raise kind(
                f"{named}: it must be text in UTF-8; got bytes that are not{again}"
            ) from None
        if isinstance(error, KeyError):
            raise kind(f"{named}: {error} is missing from the file") from None
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        # An error from an inner function may already name the file.
        raise kind(reason if reason.startswith(str(path)) else f"{named}: {reason}") from None


def read_saved(path: Path) -> Any:
    """Return the content of a file of `torch.save`, if it contains only tensors and plain values.

    Checksums are compared first, because PyTorch does not compare them. Files from before PyTorch
    1.6 have no checksums.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, has a different format, or would run code; the error
            names the file.
    """
    with one_error(path), path.open("rb") as file:
        # A file of PyTorch 1.6 or later is a zip archive, which begins with these bytes. PyTorch
        # itself uses the same check.
        if file.read(4) == b"PK\x03\x04":
            _require_undamaged(zipfile.ZipFile(file))
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        # pickle raises many classes of errors. PyTorch's message explains how to run the code
        # anyway.
        except Exception as error:
            called = _called_by(error)
            remedy = "save model.state_dict() instead of a whole model"
            got = f"{called}: {remedy}" if called else "what PyTorch cannot read"
            raise ValueError(f"it {_ONLY_TENSORS}; got {got}") from None


_ONLY_TENSORS = "must hold only tensors and plain values, because a pickle may run any code"


def _called_by(refusal: Exception) -> str:
    """Return the function that a pickle would call, from the message of PyTorch's error.

    The result is empty if the message does not name the function.
    """
    called = re.search(r"GLOBAL \S+", str(refusal))
    return called[0] if called else ""


def _require_undamaged(records: zipfile.ZipFile) -> None:
    """Check the records of an archive.

    Raises:
        ValueError: if the checksum of a record differs, or if PyTorch would read the record as
            empty.
    """
    # PyTorch reads no bytes from a record that is marked as a directory.
    marked = [entry.filename for entry in records.infolist() if entry.external_attr & 0x10]
    if damaged := records.testzip() or "".join(marked[:1]):
        raise ValueError(f"the record {damaged} must match its checksum, but it is damaged")


@contextmanager
def only_tensors(where: str = "it") -> Iterator[None]:
    """Turn PyTorch's error for an unsafe pickle into a ValueError.

    The new error names the function that the pickle would call. PyTorch's message explains how to
    run the pickle anyway.

    Args:
        where: the file or folder, for the error.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        got = _called_by(error) or "another pickle"
        raise ValueError(f"{where} {_ONLY_TENSORS}; got {got}") from None


def create(partial: Path, path: Path) -> None:
    """Move a file to a free path in one step, or in two steps if the file system has no links.

    Raises:
        FileExistsError: if a file exists at the path.
    """
    try:
        os.link(partial, path)
    except OSError:
        if path.exists():
            raise FileExistsError(f"no file must be at {path}") from None
        os.replace(partial, path)


@contextmanager
def replacing(
    path: Path, place: Callable[[Path, Path], object] | None = None, alone: bool = False
) -> Iterator[Path]:
    """Yield a temporary path for writing.

    At the end its file replaces `path`, unless an error was raised.

    Args:
        path: the file.
        place: the function that moves the temporary file to `path`. The default replaces an
            existing file; `create` raises an error instead.
        alone: True if no other process writes this file at the same time. Then the temporary file
            of a killed process is overwritten.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the directory of {str(path)!r} must exist")
    # The temporary file is in the same directory, because a move between file systems is a copy.
    partial = path.with_name(f"{path.name}{'' if alone else f'.{uuid.uuid4().hex}'}.partial")
    try:
        yield partial
        (place or os.replace)(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def checksum(name: str, tensor: Tensor) -> int:
    """Return a CRC of a tensor's name, dtype, shape and numbers. It detects damage, not forgery."""
    described = zlib.crc32(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
    return zlib.crc32(bytes_of(tensor), described)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's numbers in the order of its axes.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T).tolist()
    [1, 3, 2, 4]
    """
    numbers = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one number may have any stride, and `view` accepts only a stride of 1.
    packed = numbers.as_strided((numbers.numel(),), (1,))
    return packed.view(torch.uint8).numpy().data


def checksums(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return a JSON object with the checksum of each tensor, by its name, and of a text.

    The key of the text is `""`. No tensor has an empty name.

    Args:
        tensors: the tensors by name.
        text: the text.
    """
    return _summed(checksums_of(tensors), text)


def _summed(sums: Mapping[str, int], text: str) -> str:
    """Return the given checksums and the checksum of a text as JSON, as in `checksums`."""
    return strict_json.dumps({"": zlib.crc32(text.encode()), **sums}, sort_keys=True)


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor by name."""
    return {name: checksum(name, tensor) for name, tensor in tensors.items()}
