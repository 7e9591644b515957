"""The files of a store: a manifest, and files of values that are numbered from 0.

A file has the values of a fixed run of texts, whichever job writes it. It is written whole or not at all, with checksums, and
is plain safetensors: a tensor [row, ...] for each point, and `tokens`, `text` and `pos` of each row.
"""

import json
import os
from pathlib import Path
from typing import Any

from hooks import CacheError, storage

KIND = "store"
MANIFEST = "manifest.json"
ROWS = ("tokens", "text", "pos")
"""What a file says about each row: its token, the number of its text, and its position in it."""


def path_of(out: Path, number: int) -> Path:
    """The path of a file of values."""
    return out / f"values-{number:06}.safetensors"


def end_of(out: Path, shard: tuple[int, int]) -> Path:
    """The path of what a job writes when it is done."""
    return out / f"done-{shard[0]}-of-{shard[1]}.json"


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write facts, completely or not at all."""
    with storage.replacing(path) as partial:
        partial.write_text(json.dumps(facts, indent=1, sort_keys=True))


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        CacheError: if it is damaged.
    """
    with storage.one_error(path, "be a file of a store"):
        facts = json.loads(path.read_text())
        if not isinstance(facts, dict):
            raise ValueError(f"it must hold an object; got a {type(facts).__name__}")
    return facts


def digest_of(out: Path, number: int) -> str | None:
    """The digest of the texts of a complete file; None if there is none, or it is damaged."""
    try:
        with storage.opened(path_of(out, number), KIND) as (_, facts):
            return str(facts["texts"])
    except (FileNotFoundError, CacheError):
        return None


def require_same(manifest: dict[str, Any], out: str | os.PathLike[str]) -> None:
    """Write the manifest of a store, or refuse to go on with another one's.

    Raises:
        ValueError: if the store there is of another model, or other settings; it names the first.
    """
    path = Path(out) / MANIFEST
    if path.exists():
        other = read_json(path)
        changed = [key for key in manifest if other.get(key) != manifest[key]]
        if changed:
            raise ValueError(
                f"a store must go on with the same {changed[0]}; {os.fspath(out)!r} has "
                f"{other.get(changed[0])!r:.80}, got {manifest[changed[0]]!r:.80}"
            )
    else:
        write_json(path, manifest)
