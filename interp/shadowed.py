"""Checks that `hooks` and `models` are the packages of this project and no modules of the user with their names.

They import nothing.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent


def require_own(package: str) -> None:
    """Refuse a module of the user that has the name of a package of this project.

    Args:
        package: `hooks` or `models`.

    Raises:
        ImportError: naming the module and the remedy.
    """
    place = _place_of(package)
    if place is None or not _is_own(place, package):
        raise ImportError(
            f"the package `{package}` must be hookscope's; got {place}: "
            "rename or move that one, or put hookscope before it on sys.path"
        )


def warn_of_another_models() -> None:
    """Warn if `import models` gives a module of the user.

    It is no error, because `interp` works without `models`.
    """
    if not (_FOLDER / "models" / "__init__.py").is_file():
        return
    place = _place_of("models")
    if place is None or not _is_own(place, "models"):
        warnings.warn(
            f"`import models` gives {place or 'a folder without __init__.py'}, not hookscope's package: "
            "rename that one, or put it into a package of your own (mine/models.py, from mine import models)",
            stacklevel=3,
        )


def _place_of(package: str) -> str | None:
    """The file that an import of a package gives."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def _is_own(place: str, package: str) -> bool:
    return Path(place).resolve() == _FOLDER / package / "__init__.py"
