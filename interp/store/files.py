"""The files of a store: a manifest, files of values that are numbered from 0, and what each job writes when it is done.

A file has the values of a fixed run of texts, whichever job writes it. It is written whole or not at all, with checksums, and
is plain safetensors: a tensor [row, ...] for each point, and `tokens`, `text`, `offset` and `pos` of each row.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import safe_open
from torch import Tensor

from hooks import CacheError, storage

KIND = "store"
MANIFEST = "manifest.json"
ROWS = ("tokens", "text", "offset", "pos")
"""Facts of each row: its token, the number of its text, its place there, and the position where the model read it."""


def file_of(number: int) -> str:
    """The name of a file of values."""
    return f"values-{number:06}.safetensors"


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Facts of the tensors of a file, for the manifest: dtypes and the sizes of rows, and a CRC of each."""
    kinds = {
        name: [str(value.dtype).removeprefix("torch."), *value.shape[1:]]
        for name, value in tensors.items()
    }
    return {"tensors": kinds, "checksums": storage.checksums_of(tensors)}


class Folder:
    """A directory on this machine, or wherever `fsspec` reaches, such as `s3://bucket/store`."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.name = os.fspath(out)
        self._system, self._root = fsspec.core.url_to_fs(self.name)
        self._is_here = isinstance(self._system, LocalFileSystem)

    def path(self, name: str) -> str:
        """The path of a file, as its file system has it."""
        return f"{self._root}/{name}"

    def make(self) -> None:
        """Make it, if it is not there."""
        self._system.makedirs(self._root, exist_ok=True)

    def names(self, pattern: str) -> list[str]:
        """The names of files that are there, in order."""
        self._system.invalidate_cache()
        paths = self._system.ls(self._root, detail=False) if self._system.exists(self._root) else []
        return sorted(name for path in paths if fnmatch(name := Path(path).name, pattern))

    @property
    def free(self) -> int | None:
        """The bytes that the disk has; None where nobody knows."""
        there = Path(self._root)
        while self._is_here and not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free if self._is_here else None

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write facts, completely or not at all."""
        text = json.dumps(facts, indent=1, sort_keys=True).encode()
        if self._is_here:
            with storage.replacing(Path(self.path(name))) as partial:
                partial.write_bytes(text)
        else:
            self._system.pipe_file(self.path(name), text)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is damaged.
        """
        with storage.one_error(self.path(name), "be a file of a store"):
            facts = json.loads(self._system.cat_file(self.path(name)))
            if not isinstance(facts, dict):
                raise ValueError(f"it must hold an object; got a {type(facts).__name__}")
        return facts

    def write(self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a file of values, completely or not at all."""
        name = file_of(number)
        if not self._is_here:
            alone, metadata = storage.packed(KIND, tensors, facts)
            self._system.pipe_file(self.path(name), safetensors.torch.save(alone, metadata))
            return
        try:
            storage.save(Path(self.path(name)), KIND, tensors, facts)
        except FileNotFoundError:
            if self.facts(number) is None:
                raise
            # Another process did the same job, was done, and tidied up.

    def tidy(self) -> None:
        """Take away what jobs that were killed have left, once all files are there."""
        for unfinished in self.names("values-*.partial"):
            Path(self.path(unfinished)).unlink(missing_ok=True)

    def read(self, number: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors of a file of values: those of a disk mapped into memory, unchecked.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is torn.
        """
        path = self.path(file_of(number))
        with storage.one_error(path, "be a file of a store; harvest again, and it is mended"):
            if not self._is_here:
                tensors = safetensors.torch.load(self._system.cat_file(path))
                return {name: tensors[name] for name in names}
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in names}

    def facts(self, number: int) -> dict[str, Any] | None:
        """The facts of a file of values that is whole, by its checksums; None if there is none, or it is damaged."""
        path = self.path(file_of(number))
        try:
            if self._is_here:
                with storage.opened(Path(path), KIND) as (_, facts):
                    return facts
            with storage.one_error(path, "be a file of a store"):
                data = self._system.cat_file(path)
                size = int.from_bytes(data[:8], "little")
                metadata = json.loads(data[8 : 8 + size])["__metadata__"]
                facts = storage.unpacked(KIND, safetensors.torch.load(data), metadata)
                return dict(facts)
        except (FileNotFoundError, CacheError):
            return None


def require_same(manifest: Mapping[str, Any], folder: Folder) -> None:
    """Write the manifest of a store, or refuse to go on with another one's.

    Raises:
        ValueError: if the store there is of another model, or other settings; it names the first.
    """
    if not folder.names(MANIFEST):
        return folder.write_json(MANIFEST, manifest)
    other = folder.read_json(MANIFEST)
    for key in manifest:
        if other.get(key) != manifest[key]:
            raise ValueError(
                f"a store must go on with the same {key}; {folder.name!r} has "
                f"{other.get(key)!r:.80}, got {manifest[key]!r:.80}"
            )
    return None


def gathered(folder: Folder) -> dict[str, Any]:
    """Facts of all jobs together: how many texts there are, and the facts of each file.

    Raises:
        CacheError: if jobs are not done; it says how many files are missing.
    """
    ends = [folder.read_json(name) for name in folder.names("done-*.json")]
    facts = {int(number): file for end in ends for number, file in end["files"].items()}
    sizes = {end["of"] for end in ends}
    if len(sizes) != 1:
        raise CacheError(
            f"a store must be complete to be read; no job of {folder.name} is done"
            if not sizes
            else f"jobs of {folder.name} must have had the same texts; they made {sorted(sizes)} files"
        )
    missing = [number for number in range(*sizes) if number not in facts]
    if missing:
        raise CacheError(
            f"a store must be complete to be read; {folder.name} lacks {len(missing)} of {max(sizes)} files, "
            f"the first {file_of(missing[0])}: run its job"
        )
    return {"texts": ends[0]["texts"], "files": [facts[number] for number in range(*sizes)]}
