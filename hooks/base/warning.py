"""Warnings that point to the line of the user and leave the progress bar whole."""

import sys
import traceback
import warnings

from hooks.base.progress import without_bar

_PACKAGES = ("hooks", "models", "interp")


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line, which called a function of these packages.

    Any number of functions of these packages may lie between that line and this call.

    Args:
        message: the text of the warning.
        kind: the class of the warning.
    """
    frames = traceback.walk_stack(sys._getframe(1))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    outermost = max(n for n, package in enumerate(packages) if package in _PACKAGES)
    # A model that the user calls is called by PyTorch.
    while packages[outermost + 1 : outermost + 2] == ["torch"]:
        outermost += 1
    with without_bar():
        warnings.warn(message, kind, stacklevel=outermost + 3)
