"""Readers of files of weights: safetensors and .bin, whole or in shards."""

import json
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
    names = [f"{whole}{end}" for whole in (WHOLE, WHOLE_BIN) for end in ("", ".index.json")]
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{directory} must contain weights: one of {', '.join(names)}")
    files, shards = [path], {}
    if path.suffix == ".json":
        index = read_object(path).get("weight_map")
        if not (isinstance(index, dict) and all(isinstance(name, str) for name in index.values())):
            got = str(index)[:40]
            raise ValueError(f"{path}: weight_map must map each tensor to a file; got {got!r}")
        paths = map(Path, index.values())
        if outside := [file for file in paths if file.is_absolute() or ".." in file.parts]:
            raise ValueError(f"{path}: files must be inside its folder; got {outside[0]}")
        shards = {key: directory / name for key, name in index.items()}
        files = sorted(set(shards.values()))
    if path.name.startswith(WHOLE):
        owners = {k: file for file in files for k in _keys(file) if shards.get(k, file) == file}

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
        return Reader(owners, read, keep=False), path
    states = ((file, _load(file)) for file in files)
    held = {k: t for file, state in states for k, t in state.items() if shards.get(k, file) == file}
    return Reader(frozenset(held), held.pop, keep=True), path


def _keys(path: Path) -> list[str]:
    with storage.one_error(path), safe_open(path, "pt") as file:
        return list(file.keys())


def _load(path: Path) -> dict[str, Tensor]:
    state = storage.read_saved(path)
    with storage.one_error(path):
        for key, value in dict(state).items():
            if not (isinstance(key, str) and isinstance(value, Tensor)):
                raise TypeError(f"{key!r} must be the name of a tensor")
        return dict(state)
