"""A warning if a file of the user hides the package `models` of this project."""

import importlib.util
import sys
import warnings
from pathlib import Path


def warn_of_another_models(folder: Path) -> None:
    """Warn if `import models` gives another module than the package in a folder.

    This function imports nothing. It does not raise an error, because `interp` works without `models`.

    Args:
        folder: the folder that holds the packages of this project.
    """
    ours = folder / "models" / "__init__.py"
    # A command of `python -m interp` that needs `models` raises an error of its own.
    if not ours.is_file() or sys.argv[:1] == ["-m"]:
        return
    loaded = sys.modules.get("models")
    if loaded is not None:
        found = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec("models")
        found = None if spec is None else spec.origin
    if found is None or Path(found).resolve() != ours.resolve():
        place = found or "a folder without __init__.py"
        warnings.warn(
            f"`import models` gives {place}, not hookscope's package: rename that one, or put it into a "
            "package of your own (mine/models.py, from mine import models)",
            stacklevel=3,
        )
