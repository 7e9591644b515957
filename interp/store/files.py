"""The files of a store: a manifest, files of values that are numbered from 0, and what each job writes when it is done.

A file has the values of a fixed run of texts, whichever job writes it. It is written whole or not at all, with checksums, and
is plain safetensors: a tensor [row, ...] for each point, and `tokens`, `text`, `offset` and `pos` of each row.

No store reads or replaces a file of another one, as each has a hash of its manifest, without what grows:

1. Before anything runs, the manifest there must be the same or, where it was lost, the hashes of the files.
2. Before a file is written, the manifest is created, if none is there, and compared again. So one of several stores that begin
   at once in a folder is first, and the others are refused.
3. A file that is there must be of the same store and the same texts. A finished store never gets fewer.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import safe_open
from torch import Tensor

from hooks import CacheError
from hooks.base import require_kind, storage, strict_json

KIND = "store"
MANIFEST = "manifest.json"
ROWS = ("tokens", "text", "offset", "pos")
"""Facts of each row: its token, the number of its text, its place there, and the position where the model read it."""

FOREIGN = "is of another store, or of an older form"
GROWS = ("texts", "files", "overflow")
"""Facts of a manifest that come later."""


def store_of(manifest: Mapping[str, Any]) -> str:
    """The hash that files of a store have: of its manifest, without what grows."""
    fixed = {key: fact for key, fact in manifest.items() if key not in GROWS}
    return hashlib.sha256(strict_json.dumps(fixed, sort_keys=True).encode()).hexdigest()


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
        require_kind("out", out, (str, os.PathLike), "a folder or an address")
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

    def write_json(self, name: str, facts: Mapping[str, Any], new: bool = False) -> None:
        """Write facts, completely or not at all; `new` ones only where none are.

        That is one step on disks, and where `fsspec` writes on condition, as on S3 and GCS. Elsewhere two that write new ones
        at the same moment may both go on, and the later facts stay: whoever writes must read them back, then and later.
        """
        text = strict_json.dumps(facts, indent=1).encode()
        place = storage.create if new else os.replace
        try:
            if self._is_here:
                with storage.replacing(Path(self.path(name)), place) as partial:
                    partial.write_bytes(text)
            else:
                only = {"mode": "create"} if new else {}
                self._system.pipe_file(self.path(name), text, **only)
        except OSError:  # S3 has another one than FileExistsError
            if not (new and self.names(name)):
                raise

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is damaged.
        """
        rule = "be a file of a store (harvest again, and a damaged one is mended)"
        with storage.one_error(self.path(name), rule, CacheError):
            facts = strict_json.loads(self._system.cat_file(self.path(name)))
            if not isinstance(facts, dict):
                raise ValueError(f"it must hold an object; got a {type(facts).__name__}")
        return facts

    def manifest(self) -> dict[str, Any]:
        """The manifest; empty if there is none.

        Raises:
            CacheError: if it is damaged.
        """
        try:
            return self.read_json(MANIFEST)
        except FileNotFoundError:
            return {}

    def sound(self, name: str) -> dict[str, Any]:
        """The facts in a manifest, or in the end of a job; empty if there are none, or they are damaged and must be made again."""
        try:
            facts = self.read_json(name)
        except (FileNotFoundError, CacheError):
            return {}
        return facts if _is_sound(name, facts) else {}

    def write(
        self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write a file of values, completely or not at all. Its facts, or those of a whole one that is there before it."""
        name = file_of(number)
        if (there := self.facts(name)) is not None:
            return there
        if not self._is_here:
            storage.write(file := io.BytesIO(), self.path(name), KIND, tensors, facts)
            self._system.pipe_file(self.path(name), file.getvalue())
            return facts
        path = Path(self.path(name))
        try:
            # Only a damaged one is replaced.
            place = os.replace if path.exists() else storage.create
            storage.save(path, KIND, tensors, facts, place)
        except (FileExistsError, FileNotFoundError):
            # Another process did the same job; it may be done, and have tidied up.
            if (there := self.facts(name)) is None:
                raise
            return there
        return facts

    def tidy(self) -> None:
        """Take away what jobs that were killed have left, once all files are there."""
        for unfinished in self.names("values-*.partial"):
            self.remove(unfinished)

    def owners(self) -> dict[str, str]:
        """By the names of files of values that are whole, the hash of the store that each is of; empty of older forms."""
        facts = {name: self.facts(name) for name in self.names("values-*.safetensors")}
        return {name: fact.get("store", "") for name, fact in facts.items() if fact is not None}

    def remove(self, name: str) -> None:
        """Take away a file, if no other job has."""
        with suppress(FileNotFoundError):
            self._system.rm_file(self.path(name))

    def read(
        self, number: int, names: Sequence[str], store: str, listed: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Some tensors of a file of values: those of a disk mapped into memory, their numbers unchecked.

        Args:
            number: the file.
            names: of the tensors.
            store: the hash of the store.
            listed: the facts of the file in the manifest; nothing if jobs are not done.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is torn, or of another store.
        """
        path = self.path(file_of(number))
        rule = "be a whole file of this store (harvest again, and a damaged one is mended)"
        with storage.one_error(path, rule, CacheError):
            if self._is_here:
                with safe_open(path, framework="pt") as file:
                    _require_own(file.metadata(), store, listed)
                    return {name: file.get_tensor(name) for name in names}
            data = self._system.cat_file(path)
            _require_own(_metadata_of(data), store, listed)
            tensors = safetensors.torch.load(data)
            return {name: tensors[name] for name in names}

    def facts(self, name: str) -> dict[str, Any] | None:
        """The facts of a file of values that is whole, by its checksums; None if there is none, or it is damaged."""
        path = self.path(name)
        try:
            if self._is_here:
                with storage.opened(Path(path), KIND) as (_, facts):
                    return facts
            with storage.one_error(path, "be a file of a store", CacheError):
                data = self._system.cat_file(path)
                tensors = safetensors.torch.load(data)
                return dict(storage.unpacked(KIND, tensors, _metadata_of(data)))
        except (FileNotFoundError, CacheError):
            return None


def _is_sound(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether facts of a manifest, or of the end of a job, have the types that this module reads."""
    counts = ("texts",) if name == MANIFEST else ("texts", "of")
    are_counts = all(isinstance(facts.get(key, 0), int) for key in counts)
    if name == MANIFEST:
        return are_counts and _are_facts(facts.get("files", []))
    files = facts.get("files")
    has_all = {"store", "files", *counts} <= facts.keys()
    return has_all and are_counts and isinstance(files, dict) and _are_numbered(files)


def _are_facts(files: Any) -> bool:
    return isinstance(files, list) and all(isinstance(file, dict) for file in files)


def _are_numbered(files: Mapping[str, Any]) -> bool:
    return all(number.isdecimal() for number in files) and _are_facts([*files.values()])


def _metadata_of(data: bytes) -> dict[str, str]:
    """What the header of safetensors has."""
    return dict(storage.header_of(data)["__metadata__"])


def _require_own(
    metadata: Mapping[str, str], store: str, listed: Sequence[Mapping[str, Any]]
) -> None:
    facts = storage.facts_of(metadata)
    if facts.get("store") != store:
        raise ValueError(f"it {FOREIGN}")
    if listed and facts != listed[0]:
        raise ValueError("it is not the file that the manifest lists")


def require_same(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The manifest that is there, or nothing. A store must go on with the same one and, if it was lost, with its own files.

    If the dtype of a store could not hold a value, another dtype may begin it again: its files are taken away.

    Raises:
        ValueError: if the store there is of another model, or other settings; it names the first. If a file is of another store.
            If the name is that of a file, such as `store.json`.
    """
    storage.require_folder(folder.name)
    there, store = folder.sound(MANIFEST), store_of(manifest)
    old, again = store_of(there), store_of({**there, "dtype": manifest["dtype"]})
    if there.get("overflow") and old != store == again:
        for name in [name for name, owner in folder.owners().items() if owner == old]:
            folder.remove(name)
        folder.write_json(MANIFEST, manifest)
        there = folder.sound(MANIFEST)
    for key in manifest if there else ():
        if there.get(key) != manifest[key]:
            raise ValueError(
                f"a store must go on with the same {key}; {folder.name!r} has "
                f"{there.get(key)!r:.80}, got {manifest[key]!r:.80}"
            )
    for name, owner in ({} if there else folder.owners()).items():
        if owner != store:
            raise ValueError(f"a store must have its own files; {folder.path(name)} {FOREIGN}")
    return there


def claim(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The manifest that is there. If there is none, or a damaged one, create it; for errors see `require_same`."""
    if not (there := require_same(manifest, folder)):
        folder.make()
        if folder.names(MANIFEST) and not folder.sound(MANIFEST):
            folder.remove(MANIFEST)
        folder.write_json(MANIFEST, manifest, new=True)
        there = require_same(manifest, folder)
    return there


def ends(folder: Folder, store: str) -> dict[str, dict[str, Any]]:
    """What jobs of a store wrote when they were done, by the names of the files. A damaged one counts as not written."""
    facts = {name: folder.sound(name) for name in folder.names("done-*.json")}
    return {name: end for name, end in facts.items() if end.get("store") == store}


def gathered(folder: Folder, store: str) -> dict[str, Any]:
    """Facts of all jobs together: how many texts there are, and the facts of each file.

    Raises:
        CacheError: if jobs are not done; it says how many files are missing.
    """
    jobs = [*ends(folder, store).values()]
    facts = {int(number): file for end in jobs for number, file in end["files"].items()}
    sizes = {end["of"] for end in jobs}
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
    return {"texts": jobs[0]["texts"], "files": [facts[number] for number in range(*sizes)]}
