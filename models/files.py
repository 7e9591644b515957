"""Reads JSON files and those of `torch.save`."""

import json
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hooks.shared import storage, unknown_name


def read_json(path: Path) -> Any:
    """Reads the value in a JSON file. Configs of `transformers` have Infinity, so it is read too.

    Raises:
        ValueError: if it is not JSON in UTF-8; the message names the file.
    """
    with storage.one_error(path):
        return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        ValueError: if it is not a JSON object in UTF-8; the message names the file.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {str(value)[:40]!r}")
    return value


def read_saved(path: Path) -> Any:
    """Reads what `torch.save` wrote, if it holds nothing but tensors and plain values.

    Checksums are compared first, because PyTorch compares none. Files from before PyTorch 1.6 have none.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, another file, or would run code; the message names the file.
    """
    with storage.one_error(path), path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":  # as PyTorch asks
            records = zipfile.ZipFile(file)
            # PyTorch reads nothing of a record that is marked as a directory.
            marked = [entry.filename for entry in records.infolist() if entry.external_attr & 0x10]
            if damaged := records.testzip() or "".join(marked[:1]):
                raise ValueError(f"{damaged} in it must be as saved, by its checksum; it differs")
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # PyTorch's message says how to run the code anyway
            called = re.search(r"GLOBAL \S+", str(error)) or ["another pickle"]
            rule = "it must hold only tensors, because a pickle may run any code"
            raise ValueError(f"{rule}; got {called[0]}") from None


def without(entries: Mapping[str, Any], ignore: Collection[str], where: str) -> dict[str, Any]:
    """The entries of a file without those under the keys to `ignore`.

    Raises:
        UnknownNameError: if a key to ignore is not in the file; it has close matches.
    """
    for key in ignore:
        if key not in entries:
            raise unknown_name(key, entries, f"key of {where}")
    return {key: value for key, value in entries.items() if key not in ignore}
