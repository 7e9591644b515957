"""Functions that read JSON files."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hooks.base import require_kind, storage, unknown_name


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Infinity is allowed, because configs of `transformers` contain it.

    Raises:
        ValueError: if the file is not JSON in UTF-8; the error names the file.
    """
    with storage.one_error(path):
        return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: if the file is not a JSON object in UTF-8; the error names the file.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object; got {str(value)[:40]!r}")
    return value


def without(entries: Mapping[str, Any], ignore: Collection[str], where: str) -> dict[str, Any]:
    """Return the entries of a file, except the keys in `ignore`.

    Args:
        entries: the entries.
        ignore: the keys to leave out.
        where: the name of the file, for the error.

    Raises:
        UnknownNameError: if a key to ignore is not in the file; the error has close matches.
    """
    require_kind("ignore", ignore, Collection, "a list of keys", "for example ['key']")
    for key in ignore:
        if key not in entries:
            raise unknown_name(key, entries, f"key of {where}")
    return {key: value for key, value in entries.items() if key not in ignore}
