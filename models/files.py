"""Files that models and tokenizers are read from: JSON, and the libraries that read other formats."""

import importlib
import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: naming the file, if it is not JSON in UTF-8.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path} must be JSON in UTF-8: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, if it is not JSON in UTF-8, or holds no object.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {str(value)[:40]!r}")
    return value


def library(name: str) -> Any:
    """The library, imported.

    Raises:
        ImportError: if it is missing, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        message = f'{name} must be installed: pip install "hookscope[hf]"'
        raise ImportError(message, name=name) from None
