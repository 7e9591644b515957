"""Finished parts in a folder, each in one file.

The name of a file is a hash of the model, the arguments and the examples of its part.

A file is written completely or not at all, with checksums. A damaged file counts as missing.
"""

import os
from collections.abc import Sequence

from interp.many.division import PartOfExamples
from interp.many.joining import Outcome
from interp.store.files import Folder

_KIND = "part-1"


class PartFolder:
    """The files of finished parts.

    Args:
        out: a directory, which is created if it does not exist, or an address of `fsspec`.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._folder = Folder(out)
        self._folder.make()
        self.name = self._folder.name

    def write(self, name: str, outcome: Outcome) -> None:
        """Write the outcome of a part, completely or not at all."""
        tensors, facts = outcome.packed()
        self._folder.write_file(_file_of(name), _KIND, tensors, facts)

    def read(self, name: str) -> Outcome | None:
        """Return the outcome of a part, or None if its file is missing or damaged."""
        content = self._folder.undamaged_file(_file_of(name), _KIND)
        return None if content is None else Outcome.unpacked(*content)

    def record_shards(self, parts: Sequence[PartOfExamples], n_shards: int) -> None:
        """Record that the parts of a call are divided into shards."""
        self._folder.write_json(_shards_of(parts), {"shards": n_shards, "parts": len(parts)})

    def n_shards(self, parts: Sequence[PartOfExamples]) -> int | None:
        """Return the number of shards of the parts of a call; None if there were no shards."""
        name = _shards_of(parts)
        return self._folder.read_json(name)["shards"] if self._folder.names(name) else None


def _file_of(name: str) -> str:
    """Return the name of the file with the result of a part."""
    return f"part-{name}.safetensors"


def _shards_of(parts: Sequence[PartOfExamples]) -> str:
    """Return the name of the file with the number of shards. `parts` are the parts of a call."""
    return f"shards-{parts[0].name}.json"
