"""Readers of files of weights: safetensors and .bin, whole or in shards."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hooks.base import storage
from models.checkpoints.assemble import Reader
from models.files import read_object

WHOLE = "model.safetensors"
WHOLE_BIN = "pytorch_model.bin"


def reader_of(directory: Path) -> tuple[Reader, Path]:
    """Return a reader of the weights in a directory, and the file that errors should name.

    If the directory has an index, each tensor is read from the file that the index gives.

    Raises:
        FileNotFoundError: if the directory has no weights, or if a file of the index is missing.
        ValueError: if a file is damaged, or if unpickling it would run code.
    """
    names = [WHOLE, f"{WHOLE}.index.json", WHOLE_BIN, f"{WHOLE_BIN}.index.json"]
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{directory} must contain weights: one of {', '.join(names)}")
    files = [path]
    shards = dict[str, Path]()
    if path.suffix == ".json":
        shards = _shards(path)
        files = sorted(set(shards.values()))
    if path.name.startswith(WHOLE):
        return _safetensors_reader(files, shards), path
    tensors = dict[str, Tensor]()
    for file in files:
        for key, tensor in _load(file).items():
            if shards.get(key, file) == file:
                tensors[key] = tensor
    return Reader(frozenset(tensors), tensors.pop, keep=True), path


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index gives.

    Raises:
        ValueError: if the index does not map tensors to files inside its folder.
    """
    names = read_object(index).get("weight_map")
    if not (isinstance(names, dict) and all(isinstance(name, str) for name in names.values())):
        got = str(names)[:40]
        raise ValueError(f"{index}: weight_map must map each tensor to a file; got {got!r}")
    for file in map(Path, names.values()):
        if file.is_absolute() or ".." in file.parts:
            raise ValueError(f"{index}: files must be inside its folder; got {file}")
    return {key: index.parent / name for key, name in names.items()}


def _safetensors_reader(files: Sequence[Path], shards: Mapping[str, Path]) -> Reader:
    """Return a reader of safetensors files.

    Args:
        files: the files.
        shards: the file of each tensor that the index gives. A tensor in another file is ignored.
    """
    owners = dict[str, Path]()
    for file in files:
        for key in _keys(file):
            if shards.get(key, file) == file:
                owners[key] = file

    # An open file is mapped into memory, and pages that were read count as memory of the
    # process. Opening the file again for each tensor keeps the memory small.
    def read(key: str) -> Tensor:
        with storage.one_error(owners[key]), safe_open(owners[key], "pt") as file:
            tensor = file.get_tensor(key)
            saved = json.loads((file.metadata() or {}).get(storage.CHECKSUMS, "{}"))
            if saved and saved.get(key) != storage.checksum(key, tensor):
                raise ValueError(f"the checksum of {key} must be as saved; it differs")
            return tensor

    # The tensors are views of the mapped file, so they must be copied.
    return Reader(owners, read, keep=False)


def _keys(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    with storage.one_error(path), safe_open(path, "pt") as file:
        return list(file.keys())


def _load(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of `torch.save`, by name."""
    state = storage.read_saved(path)
    with storage.one_error(path):
        for key, value in dict(state).items():
            if not (isinstance(key, str) and isinstance(value, Tensor)):
                raise TypeError(f"{key!r} must be the name of a tensor")
        return dict(state)
