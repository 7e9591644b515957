"""Readers of weight files: safetensors and .bin, whole or in shards, and of a state dict in memory."""

import pickle
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoints.assemble import Reader
from models.files import read_object

WHOLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
WHOLE_BIN, SHARDED_BIN = "pytorch_model.bin", "pytorch_model.bin.index.json"


class SafetensorsReader:
    """The tensors of safetensors files.

    A file is mapped into memory, and what was read of it counts as the process's until it is closed: so
    it is opened anew for each tensor.

    Args:
        files: which file each tensor is in, by the tensor's name.
    """

    lends = True

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def read(self, key: str) -> Tensor:
        """The tensor of a name, in the file's own memory."""
        path = self._files[key]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path}: {key} cannot be read: {error}") from None


class StateReader:
    """The tensors of a state dict, each of which is let go of when it is read.

    Args:
        state: tensors by name; it is emptied.
    """

    lends = False

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state
        self._keys = frozenset(state)

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._keys

    def read(self, key: str) -> Tensor:
        """The tensor of a name, once."""
        return self._state.pop(key)


def reader_of(
    directory: Path, ignored: Callable[[str], bool] = lambda key: False
) -> tuple[Reader, Path]:
    """A reader of the weights in a directory, and the file to name in errors.

    Args:
        directory: where the files are.
        ignored: whether a key carries nothing that is needed: an index may leave it out, or name it
            where it is not.

    Raises:
        FileNotFoundError: if there are no weights, or a file that the index names is not there.
        ValueError: if a file is damaged, or would run code.
    """
    if (directory / WHOLE).is_file():
        path = directory / WHOLE
        return SafetensorsReader(dict.fromkeys(_safetensors_keys(path), path)), path
    if (directory / SHARDED).is_file():
        index = directory / SHARDED
        shards = _shards(index, ignored)
        held = {path: _safetensors_keys(path) for path in set(shards.values())}
        _check_index(index, held, shards, ignored)
        return SafetensorsReader(shards), index
    if (directory / WHOLE_BIN).is_file():
        path = directory / WHOLE_BIN
        return StateReader(load_bin(path)), path
    if (directory / SHARDED_BIN).is_file():
        index = directory / SHARDED_BIN
        shards = _shards(index, ignored)
        states = {path: load_bin(path) for path in sorted(set(shards.values()))}
        _check_index(index, states, shards, ignored)
        return StateReader({key: states[path].pop(key) for key, path in shards.items()}), index
    names = f"{WHOLE}, {SHARDED}, {WHOLE_BIN} or {SHARDED_BIN}"
    raise FileNotFoundError(f"{directory} holds no weights: it has no {names}")


def load_bin(path: Path) -> dict[str, Tensor]:
    """The state dict in a file of `torch.save`, in memory; nothing in the file is run.

    Raises:
        ValueError: if the file is damaged, holds anything but tensors by name, or would run code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Not the rest of torch's message, which says how to run the code all the same.
        called = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it calls {called[1]}" if called else "or it is damaged"
        raise ValueError(
            f"{path} is not opened: a .bin holds tensors alone, and a pickle may run any code; {what}"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a whole file of torch.save: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not tensors by name")
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"{path} holds tensors by name, but {others[0]!r} is not one")
    return dict(state)


def _safetensors_keys(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def _shards(index: Path, ignored: Callable[[str], bool]) -> dict[str, Path]:
    """The file of each tensor that is needed, as an index says.

    Raises:
        FileNotFoundError: naming the files that are not there.
        ValueError: if it is not an index, or names files elsewhere.
    """
    described = read_object(index).get("weight_map")
    if not isinstance(described, dict) or not all(isinstance(n, str) for n in described.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files")
    described = {key: name for key, name in described.items() if not ignored(key)}
    names = sorted(set(described.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names files of its own directory, not {outside[0]!r}")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{index} names {len(names)} files, of which {len(absent)} are not there: {', '.join(absent)}"
        )
    return {key: index.parent / name for key, name in described.items()}


def _check_index(
    index: Path,
    held: Mapping[Path, Collection[str]],
    shards: Mapping[str, Path],
    ignored: Callable[[str], bool],
) -> None:
    wrong = [
        f"{path.name} does not hold {key}" for key, path in shards.items() if key not in held[path]
    ]
    wrong += [
        f"{path.name} holds {key}, which the index does not name"
        for path, keys in held.items()
        for key in keys
        if shards.get(key) != path and not ignored(key)
    ]
    if wrong:
        raise ValueError(f"{index} does not fit its files: {'; '.join(wrong)}")
