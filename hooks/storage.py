"""Small files of tensors and facts, written whole and checked when they are read; hashes of models."""

import dataclasses
import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hooks._torch import has_storage, memory_of
from hooks.errors import CacheError

CHECKSUMS = "checksums"
"""The key of the checksums in a file's metadata."""


def config_hash(model: nn.Module) -> str:
    """A hash of the model's `config`, or of its parameters' names and shapes if it has none."""
    config: Any = getattr(model, "config", None)
    described: Any
    if hasattr(config, "to_dict"):
        volatile = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
        described = {
            key: value
            for key, value in config.to_dict().items()
            if key not in volatile and not key.startswith("_")
        }
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        described = dataclasses.asdict(config)
    else:
        described = {name: list(value.shape) for name, value in model.named_parameters()}
    text = json.dumps([type(model).__name__, described], sort_keys=True, default=_described)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or str(value)


def weights_hash(model: nn.Module, whole: bool = False) -> str:
    """A hash of the name, the shape and at most 16 numbers of each parameter.

    The `whole` is all numbers of these and of the buffers that belong to the model's state.
    """
    hashed = hashlib.sha256()
    weights = model.state_dict() if whole else dict(model.named_parameters())
    for name, part in weights.items():
        # Of a model that is split over processes, what they hold together.
        weight = part.full_tensor() if whole and hasattr(part, "full_tensor") else part
        numbers: Any = None
        if has_storage(weight) and not weight.is_meta:
            flat = weight.detach().flatten()
            numbers = flat[:: max(1, -(-len(flat) // 16))].tolist()
        hashed.update(repr((name, tuple(weight.shape), numbers)).encode())
        if whole and numbers is not None:
            hashed.update(str(checksum(name, weight)).encode())
    return hashed.hexdigest()


def nbytes(tensors: Collection[Tensor]) -> int:
    """The memory of `tensors`, in bytes. Shared storage counts once; sparse tensors count as dense ones."""
    shared = {memory_of(t): t.untyped_storage().nbytes() for t in tensors if has_storage(t)}
    others = [t.numel() * t.element_size() for t in tensors if not has_storage(t)]
    return sum(shared.values()) + sum(others)


def save(
    path: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    place: Callable[[Path, Path], object] = os.replace,
) -> None:
    """Writes tensors, and facts as JSON, to one file of a kind, completely or not at all; for `place` see `replacing`.

    Raises:
        FileNotFoundError: if there is no such directory.
        TypeError: if a fact does not fit JSON.
        OSError: if the disk is full.
    """
    alone, metadata = packed(kind, tensors, facts)
    with replacing(path, place) as partial:
        try:
            save_file(alone, partial, metadata=metadata)
        except SafetensorError as error:  # the disk is full
            raise OSError(f"{path} could not be written: {error}") from None


def packed(
    kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of safetensors, with checksums.

    Raises:
        TypeError: if a fact does not fit JSON.
    """
    alone: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        # safetensors refuses tensors that share memory, and writes a slice's whole storage.
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        if not whole or memory_of(value) in seen:
            value = value.clone(memory_format=torch.contiguous_format)
        alone[name] = value
        seen.add(memory_of(value))
    text = json.dumps(facts)
    return alone, {"kind": kind, "facts": text, CHECKSUMS: checksums(alone, text)}


def unpacked(kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Any:
    """The facts of what `packed` made, after a check that all is whole.

    Raises:
        ValueError: if it is damaged, or of another kind.
        KeyError: if it was made by something else.
    """
    text = metadata["facts"]
    if (metadata["kind"], metadata[CHECKSUMS]) != (kind, checksums(tensors, text)):
        raise ValueError(f"kind and checksums must be as saved; got {metadata['kind']!r}")
    return json.loads(text)


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The tensors and the facts that `save` wrote to a file of this kind.

    Raises:
        FileNotFoundError: if there is no such file.
        CacheError: if the file is damaged or another one, or if its content raises anything inside the `with`.
    """
    with one_error(path, f"be a complete {kind} that `save` wrote"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        yield tensors, unpacked(kind, tensors, metadata)


@contextmanager
def one_error(path: str | os.PathLike[str], rule: str) -> Iterator[None]:
    """Turns each error that a file's content may raise into one that names the file and the rule.

    Raises:
        CacheError: in place of any error but a FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CacheError(f"{path} must {rule}: {error!r}") from None


def create(partial: Path, path: Path) -> None:
    """Move a file to a path where none is, in one step. Where a file system has no links, in two.

    Raises:
        FileExistsError: if one is there.
    """
    try:
        os.link(partial, path)
    except OSError:
        if path.exists():
            raise FileExistsError(f"no file must be at {path}") from None
        os.replace(partial, path)


@contextmanager
def replacing(path: Path, place: Callable[[Path, Path], object] = os.replace) -> Iterator[Path]:
    """A path to write to. That file takes the place of `path` at the end, unless something was raised.

    Args:
        path: the file.
        place: moves a file to it: `create` refuses to replace one.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the directory of {str(path)!r} must exist")
    # In the same directory, because a move between file systems is a copy.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def checksum(name: str, tensor: Tensor) -> int:
    """A CRC of a tensor's name, dtype, shape and numbers. It finds damage, not forgery."""
    described = zlib.crc32(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(numbers.numpy().data, described)


def checksums(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """The checksums of tensors, and of a text under the empty name, as JSON."""
    return json.dumps({"": zlib.crc32(text.encode()), **checksums_of(tensors)}, sort_keys=True)


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of each tensor by its name."""
    return {name: checksum(name, tensor) for name, tensor in tensors.items()}
