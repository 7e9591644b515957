"""The files of a store: a manifest, numbered files of values, and a file of each finished job.

A file of values contains a fixed range of texts and does not depend on the job that writes it. The
file is written completely or not at all, with checksums. The format is safetensors: a tensor [row,
...] for each point, and `tokens`, `text`, `offset` and `pos` of each row. The files are numbered
from 0.

Each file contains facts, a JSON object:

- The manifest: the model, the points and the settings. It also has facts that change as the store
  grows: `texts`, the number of texts, and `files`, a list with the facts of each file of values.
- A file of values: `store`, the hash of the manifest; `first` and `texts`, the number of its first
  text and the number of its texts; `sha256`, the hash of these texts; `rows`, the number of rows;
  `tensors`, the dtypes and shapes; `checksums`.
- The file of a finished job: `store`; `texts` and `of`, the number of texts and of files of the
  whole harvest; `files`, the facts of each file that the job wrote, by its number.

A store never reads or replaces a file of another store, because each file contains a hash of the
manifest. The hash excludes the facts that change as the store grows.

1. Before the first run, an existing manifest must be the same. If the manifest is lost, the hashes
   in the files must be the same.
2. Before a file is written, the manifest is created if it does not exist, and compared again. If
   several stores begin in the same folder at the same time, the first writer wins; later writers
   fail.
3. An existing file must belong to the same store and the same texts. The number of texts of a
   finished store never decreases.
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
"""Facts of each row: the token, the number of its text, its place in the text and in the input."""

_REPEAT = "repeat the same harvest call, which keeps finished files (of each shard=, if there are)"
"""The way to complete a store, for errors."""

FOREIGN = "belongs to another store, or has an older format"
GROWS = ("texts", "files", "overflow")
"""Facts of a manifest that change as the store grows."""


def store_of(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest, which all files of a store contain.

    The hash excludes the facts that change as the store grows (`GROWS`).
    """
    fixed = {key: fact for key, fact in manifest.items() if key not in GROWS}
    return hashlib.sha256(strict_json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def file_of(number: int) -> str:
    """Return the name of a file of values."""
    return f"values-{number:06}.safetensors"


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return facts about the tensors of a file: the dtype, the shape of a row and a CRC of each."""
    kinds = {
        name: [str(value.dtype).removeprefix("torch."), *value.shape[1:]]
        for name, value in tensors.items()
    }
    return {"tensors": kinds, "checksums": storage.checksums_of(tensors)}


class Folder:
    """A directory on this machine, or an address for `fsspec`, such as `s3://bucket/store`."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        require_kind("out", out, kind=(str, os.PathLike), words="a folder or an address")
        self.name = os.fspath(out)
        self._system, self._root = fsspec.core.url_to_fs(self.name)
        self._is_here = isinstance(self._system, LocalFileSystem)

    def path(self, name: str) -> str:
        """Return the path of a file in its file system."""
        return f"{self._root}/{name}"

    def make(self) -> None:
        """Create the directory if it does not exist."""
        self._system.makedirs(self._root, exist_ok=True)

    def names(self, pattern: str) -> list[str]:
        """Return the names of existing files that match a pattern, in order."""
        self._system.invalidate_cache()
        paths = self._system.ls(self._root, detail=False) if self._system.exists(self._root) else []
        return sorted(name for path in paths if fnmatch(name := Path(path).name, pattern))

    @property
    def free(self) -> int | None:
        """The free bytes of the disk; None if unknown."""
        folder = Path(self._root)
        while self._is_here and not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free if self._is_here else None

    def write_json(self, name: str, facts: Mapping[str, Any], new: bool = False) -> None:
        """Write a file of JSON, completely or not at all.

        With `new`, the file is only written if it does not exist. If two processes write it at the
        same moment, only one succeeds on a disk, and on file systems for which `fsspec` supports
        conditional writes, such as S3 and GCS. On other file systems, both may succeed, and the
        later facts remain. Therefore, a process must read the facts after it writes them, and again
        later.

        Args:
            name: the name of the file.
            facts: the facts, as JSON types.
            new: whether to write only a new file. Default: False.
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
        except OSError:
            # The file may exist already, which is no problem with `new`. S3 then raises another
            # error than FileExistsError, so look for the file.
            if not (new and self.names(name)):
                raise

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the facts in a file that `write_json` wrote.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged.
        """
        rule = "be a file of a store (harvest again to replace a damaged file)"
        with storage.one_error(self.path(name), rule, CacheError):
            try:
                content = self._system.cat_file(self.path(name))
            except NotADirectoryError:
                raise FileNotFoundError(f"a store must be a folder; got {self.name}") from None
            facts = strict_json.loads(content)
            if not isinstance(facts, dict):
                raise ValueError(f"it must contain an object; got a {type(facts).__name__}")
        return facts

    def manifest(self) -> dict[str, Any]:
        """Return the manifest, or an empty dictionary if it does not exist.

        Raises:
            CacheError: if the manifest is damaged.
        """
        try:
            return self.read_json(MANIFEST)
        except FileNotFoundError:
            return {}

    def undamaged_json(self, name: str) -> dict[str, Any]:
        """Return the facts in a manifest, or in the file of a finished job.

        The result is empty if the file does not exist, or if it is damaged and must be made again.
        """
        try:
            facts = self.read_json(name)
        except (FileNotFoundError, CacheError):
            return {}
        return facts if _is_sound(name, facts) else {}

    def write(
        self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write a file of values, completely or not at all, and return its facts.

        If an undamaged file exists already, return the facts of the existing file.

        Args:
            number: the number of the file.
            tensors: the values of points, and the facts of each row (`tokens`, `text`, `offset` and
                `pos`).
            facts: the facts of the file.
        """
        name = file_of(number)
        if (known := self.facts(name)) is not None:
            return known
        if not self._is_here:
            storage.write(file := io.BytesIO(), self.path(name), KIND, tensors, facts)
            self._system.pipe_file(self.path(name), file.getvalue())
            return facts
        path = Path(self.path(name))
        try:
            # If a file exists here, it is damaged, so replace it. Otherwise create a new file, and
            # fail if another process has created it in the meantime.
            place = os.replace if path.exists() else storage.create
            storage.save(path, KIND, tensors, facts, place)
        except (FileExistsError, FileNotFoundError):
            # Another process ran the same job, and created the file. It may also have removed the
            # unfinished file of this process (`tidy`).
            if (known := self.facts(name)) is None:
                raise
            return known
        return facts

    def write_file(
        self, name: str, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Write a file of tensors and of facts about them, completely or not at all.

        Args:
            name: the name of the file.
            kind: the kind of the file, for `undamaged_file`.
            tensors: the tensors by name.
            facts: the facts, which fit JSON.
        """
        if self._is_here:
            storage.save(Path(self.path(name)), kind, tensors, facts)
        else:
            storage.write(file := io.BytesIO(), self.path(name), kind, tensors, facts)
            self._system.pipe_file(self.path(name), file.getvalue())

    def undamaged_file(
        self, name: str, kind: str
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors and facts of a file that `write_file` wrote, if it is undamaged.

        Return None if the file does not exist or is damaged.
        """
        path = self.path(name)
        try:
            if self._is_here:
                with storage.opened(Path(path), kind) as content:
                    return content
            with storage.one_error(path, f"be a {kind}", CacheError):
                data = self._system.cat_file(path)
                tensors = safetensors.torch.load(data)
                facts = dict(storage.unpacked(kind, tensors, _metadata_of(data)))
                return tensors, facts
        except (FileNotFoundError, CacheError):
            return None

    def tidy(self) -> None:
        """Remove the unfinished files of killed jobs. Call this after all files are written."""
        for unfinished in self.names("values-*.partial"):
            self.remove(unfinished)

    def owners(self) -> dict[str, str]:
        """Return the hash of the store of each undamaged file of values, by file name.

        The hash is empty for older formats.
        """
        facts = {name: self.facts(name) for name in self.names("values-*.safetensors")}
        return {name: fact.get("store", "") for name, fact in facts.items() if fact is not None}

    def remove(self, name: str) -> None:
        """Remove a file. It is no error if another job has removed the file before."""
        with suppress(FileNotFoundError):
            self._system.rm_file(self.path(name))

    def read(
        self, number: int, names: Sequence[str], store: str, listed: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Return some tensors of a file of values. The checksums of the values are not checked.

        Files on a disk are mapped into memory.

        Args:
            number: the number of the file.
            names: the names of the tensors.
            store: the hash of the store.
            listed: a list with the facts of the file in the manifest, or an empty list if jobs have
                not finished.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is truncated or belongs to another store.
        """
        path = self.path(file_of(number))
        rule = "be a complete file of this store (harvest again to replace a damaged file)"
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
        """Return the facts of a file of values after a check of its checksums.

        Return None if the file does not exist or is damaged.
        """
        content = self.undamaged_file(name, KIND)
        return None if content is None else content[1]


def _is_sound(name: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the facts of a manifest or of a finished job have the expected types."""
    counts = ("texts",) if name == MANIFEST else ("texts", "of")
    are_counts = all(isinstance(facts.get(key, 0), int) for key in counts)
    if name == MANIFEST:
        return are_counts and _are_facts(facts.get("files", []))
    files = facts.get("files")
    has_all = {"store", "files", *counts} <= facts.keys()
    return has_all and are_counts and isinstance(files, dict) and _are_numbered(files)


def _are_facts(files: Any) -> bool:
    """Return True if a value is a list of JSON objects, as the facts of several files are."""
    return isinstance(files, list) and all(isinstance(file, dict) for file in files)


def _are_numbered(files: Mapping[str, Any]) -> bool:
    """Return True if the keys are numbers of files, and the values are the facts of files."""
    return all(number.isdecimal() for number in files) and _are_facts([*files.values()])


def _metadata_of(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    return dict(storage.header_of(data)["__metadata__"])


def _require_own(
    metadata: Mapping[str, str], store: str, listed: Sequence[Mapping[str, Any]]
) -> None:
    """Check that a file belongs to a store, and is the file that the manifest lists.

    Raises:
        ValueError: if the file has other facts.
    """
    facts = storage.facts_of(metadata)
    if facts.get("store") != store:
        raise ValueError(f"it {FOREIGN}")
    if listed and facts != listed[0]:
        raise ValueError("it is not the file that the manifest lists")


def require_same(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """Check that a folder contains this store or no store, and return the existing manifest.

    The result is empty if there is no manifest. If the manifest is lost, the files must belong to
    this store.

    If a value of the store was not finite in its dtype, a harvest with another dtype removes the
    files of the store and begins again.

    Args:
        manifest: the manifest of this store.
        folder: the folder.

    Raises:
        ValueError: if the existing store is from another model or has other settings (the error
            contains the first difference), if a file belongs to another store, or if the name of
            the folder is the name of a file, such as `store.json`.
    """
    storage.require_folder(folder.name)
    saved = folder.undamaged_json(MANIFEST)
    store = store_of(manifest)
    old_store = store_of(saved)
    with_new_dtype = store_of({**saved, "dtype": manifest["dtype"]})
    if saved.get("overflow") and old_store != store == with_new_dtype:
        for name, owner in folder.owners().items():
            if owner == old_store:
                folder.remove(name)
        folder.write_json(MANIFEST, manifest)
        saved = folder.undamaged_json(MANIFEST)
    for key in manifest if saved else ():
        if saved.get(key) != manifest[key]:
            raise ValueError(
                f"a store must continue with the same {key}; {folder.name!r} has "
                f"{saved.get(key)!r:.80}, got {manifest[key]!r:.80}"
            )
    for name, owner in ({} if saved else folder.owners()).items():
        if owner != store:
            raise ValueError(
                f"a folder must contain files of one store; {folder.path(name)} {FOREIGN}"
            )
    return saved


def ensured_manifest(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """Return the existing manifest, after creating it if it does not exist or is damaged.

    Args:
        manifest, folder: see `require_same`, which also lists the errors.
    """
    if not (saved := require_same(manifest, folder)):
        folder.make()
        if folder.names(MANIFEST) and not folder.undamaged_json(MANIFEST):
            folder.remove(MANIFEST)
        folder.write_json(MANIFEST, manifest, new=True)
        saved = require_same(manifest, folder)
    return saved


def finished_jobs(folder: Folder, store: str) -> dict[str, dict[str, Any]]:
    """Return the facts that each finished job wrote at its end, by file name.

    Damaged files and the files of other stores are ignored.

    Args:
        folder: the folder.
        store: the hash of the store.
    """
    facts = {name: folder.undamaged_json(name) for name in folder.names("done-*.json")}
    return {name: end for name, end in facts.items() if end.get("store") == store}


def facts_of_all_jobs(folder: Folder, store: str) -> dict[str, Any]:
    """Return the facts of a complete store for its manifest, from the files of all finished jobs.

    They are `texts`, the number of texts, and `files`, the facts of each file of values.

    Args:
        folder: the folder.
        store: the hash of the store.

    Raises:
        CacheError: if jobs have not finished. The error contains the number of missing files.
    """
    jobs = [*finished_jobs(folder, store).values()]
    facts = {}
    for end in jobs:
        for number, file in end["files"].items():
            facts[int(number)] = file
    sizes = {end["of"] for end in jobs}
    if not sizes:
        raise CacheError(
            f"a store must be complete to be read; no job of {folder.name} has finished: {_REPEAT}"
        )
    if len(sizes) > 1:
        raise CacheError(
            f"jobs of {folder.name} must have the same texts; got {sorted(sizes)} files"
        )
    missing = [number for number in range(*sizes) if number not in facts]
    if missing:
        raise CacheError(
            f"a store must be complete to be read; {len(missing)} of {max(sizes)} files of "
            f"{folder.name} are missing, the first is {file_of(missing[0])}: {_REPEAT}"
        )
    return {"texts": jobs[0]["texts"], "files": [facts[number] for number in range(*sizes)]}
