"""Checks that `hooks` and `models` are the packages of this project.

The user may have modules with the same names.

The checks do not import the packages.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent


def require_own(package: str) -> None:
    """Raise an error if a module of the user has the name of a package of this project.

    Args:
        package: `hooks` or `models`.

    Raises:
        ImportError: if the import finds another module. The error names the module and the remedy.
    """
    place = _place_of(package)
    if place is None or not _is_own(place, package):
        raise ImportError(
            f"the package `{package}` must be hookscope's; got {place}: "
            "rename or move that module, or put hookscope before it on sys.path"
        )


def warn_of_another_models() -> None:
    """Warn if `import models` imports a module of the user.

    This is not an error, because `interp` works without `models`.
    """
    if not (_FOLDER / "models" / "__init__.py").is_file():
        return
    place = _place_of("models")
    if place is None or not _is_own(place, "models"):
        warnings.warn(
            f"`import models` imports {place or 'a folder without __init__.py'}, not hookscope's "
            "package: rename that module, or put it into a package of your own "
            "(mine/models.py, from mine import models)",
            stacklevel=3,
        )


def _place_of(package: str) -> str | None:
    """Return the file that an import of a package finds; None without a file."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def _is_own(place: str, package: str) -> bool:
    """Return True if a file is the `__init__.py` of this project's package."""
    return Path(place).resolve() == _FOLDER / package / "__init__.py"
