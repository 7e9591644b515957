"""The exceptions of this package, as a tree.

HookError
├── UnknownNameError   a name or selector without a match (also a KeyError)
├── NeverFiredError    a requested point that the forward pass did not reach
├── EditError          a hook returned a value that does not fit the point
│   └── SelectionError positions or other indices outside a value (also a ValueError)
├── ModeError          a run that is not possible in training mode
├── ContextError       a hook context used twice
├── CacheError         a cache, or a file, without the requested content
└── MemoryLimitError   values that do not fit or exceed `max_bytes` (also a MemoryError)
"""

import difflib
import functools
import importlib
import importlib.metadata
import json
import math
import operator
import textwrap
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from hooks.base.saying import shown

NEVER_FIRED = (
    "this input may not lead there, a parent may compute it another way (PyTorch's own attention "
    "layers do unless torch.backends.mha.set_fastpath_enabled(False)), or the model was compiled "
    "before the hooks were set; if this is intended, do not select it"
)


class HookError(Exception):
    """The base class of the errors about hooks, points, caches and edits.

    Wrong arguments raise a `ValueError` or a `TypeError` of Python, without this class.

    >>> issubclass(UnknownNameError, HookError), issubclass(UnknownNameError, KeyError)
    (True, True)
    """


class UnknownNameError(HookError, KeyError):
    """A name or selector without a match.

    Args:
        message: the message.
        name: the requested name.
        known: the existing names.

    >>> UnknownNameError("no hook point is named 'atn.q'", "atn.q", ["attn.q", "mlp"]).close_matches
    ('attn.q',)
    """

    def __init__(self, message: str, name: object = "", known: Iterable[str] = ()) -> None:
        super().__init__(message)
        self._name = str(name)
        self._known = [str(known_name) for known_name in known]

    # The search is lazy because it is slow, and `in` and `get` catch this error.
    @functools.cached_property
    def close_matches(self) -> tuple[str, ...]:
        """The known names closest to the requested name.

        Names that end in the requested name come first, then names with a similar spelling. If
        there are none, the names with the same last part follow: `decoder.blocks.0.attn.z` for
        `decoder.z`.
        """
        known = [candidate for candidate in self._known if candidate != self._name]
        endings = [candidate for candidate in known if candidate.endswith("." + self._name)]
        similar = difflib.get_close_matches(self._name, known, n=5, cutoff=0.5)
        parts = [candidate.split(".") for candidate in known]
        last = self._name.split(".")[-1]
        same_part = [".".join(part) for part in parts if part[-1] == last and len(part) > 1]
        return tuple(dict.fromkeys(endings[:5] + similar or same_part))[:5]

    def __str__(self) -> str:
        hint = f"; close matches: {', '.join(self.close_matches)}" if self.close_matches else ""
        if not hint and 0 < len(self._known) <= _FEW:
            hint = f"; the known names are {', '.join(map(repr, self._known))}"
        return f"{self.args[0]}{hint}"


# The number of names to list if no name is close.
_FEW = 24


class NeverFiredError(HookError):
    """A requested point that the forward pass did not reach.

    >>> require_fired(["left", "right"], {"left"}, "it may be optional")
    Traceback (most recent call last):
    hooks.base.errors.NeverFiredError: the forward pass never reached right: it may be optional
    """


class EditError(HookError):
    """A hook returned a value that does not fit the point.

    >>> import torch
    >>> from hooks import HookedRunner
    >>> model = torch.nn.Sequential(torch.nn.ReLU())
    >>> hooks = {"0": lambda value, point: value[:1]}
    >>> HookedRunner(model).run_with_hooks(torch.ones(2), hooks=hooks)
    Traceback (most recent call last):
    hooks.base.errors.EditError: a hook at 0 must keep the shape [2]; got [1]
    """


class SelectionError(EditError, ValueError):
    """Positions or other indices outside a value.

    >>> issubclass(SelectionError, EditError), issubclass(SelectionError, ValueError)
    (True, True)
    """


class ModeError(HookError):
    """A run that is not possible while the model is in training mode.

    >>> import torch
    >>> from hooks import HookedRunner
    >>> model = torch.nn.Sequential(torch.nn.ReLU())
    >>> HookedRunner(model).run_with_cache(torch.ones(2), mode="full")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hooks.base.errors.ModeError: mode 'full' needs a model in evaluation mode: ...
    """


class ContextError(HookError):
    """A hook context used twice.

    >>> import torch
    >>> from hooks import HookedRunner
    >>> context = HookedRunner(torch.nn.Sequential(torch.nn.ReLU())).hooks()
    >>> with context: pass
    >>> with context: pass  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hooks.base.errors.ContextError: a hook context can be entered only once: ...
    """


class MemoryLimitError(HookError, MemoryError):
    """Values that do not fit into memory or exceed `max_bytes`.

    >>> issubclass(MemoryLimitError, HookError), issubclass(MemoryLimitError, MemoryError)
    (True, True)
    """


class CacheError(HookError):
    """A cache, or a file, without the requested content.

    >>> from hooks import ActivationCache
    >>> ActivationCache({}, {}).drop()
    Traceback (most recent call last):
    hooks.base.errors.CacheError: only a lazy cache can drop values and compute them again
    """


def unknown_name(name: object, known: Iterable[str], what: str) -> UnknownNameError:
    """Return an error that says that a name is unknown, and lists the known names close to it.

    Args:
        name: the unknown name.
        known: the known names.
        what: the kind of thing that has the name, such as `component`. The message begins with
            "no component is named".
    """
    return UnknownNameError(f"no {what} is named {name!r}", name, known)


def require_choice(name: str, value: object, choices: Collection[Any]) -> None:
    """Check that a value is one of the choices.

    Raises:
        ValueError: naming the argument, the choices and the closest choice.
        TypeError: if the value is no text, and no choice has its class.

    >>> require_choice("side", "lft", ("left", "right"))
    Traceback (most recent call last):
    ValueError: side must be one of left, right; got 'lft'; did you mean 'left'?
    """
    try:
        is_choice = value in choices
    # A list, a tensor or an array may not be comparable with a choice, or not hashable. Then it is
    # no choice.
    except (TypeError, RuntimeError, ValueError):
        is_choice = False
    if not is_choice:
        texts = [choice for choice in choices if isinstance(choice, str)]
        spelled = str(value).lower().replace("-", "_")
        close = [text for text in texts if len(spelled) > 3 and spelled in text]
        close = close or difflib.get_close_matches(spelled, texts, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        listed = ", ".join(map(str, choices))
        is_of_a_kind = isinstance(value, str) or type(value) in map(type, choices)
        error = ValueError if is_of_a_kind else TypeError
        raise error(f"{name} must be one of {listed}; got {shown(value)}{hint}")


def require_integer(name: str, value: Any, least: int = 1, most: float = math.inf) -> None:
    """Check that a value is a whole number of Python, NumPy or PyTorch, from `least` to `most`.

    Raises:
        TypeError: if the value is not a whole number, such as a text or 2.5.
        ValueError: if the number is outside the bounds. Both errors name the argument, the bounds
            and the value.

    >>> require_integer("k", 0, most=5)
    Traceback (most recent call last):
    ValueError: k must be a whole number from 1 to 5; got 0
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        error = TypeError if number is None else ValueError
        raise error(f"{name} must be a whole number {bounds}; got {shown(value)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this package.

    The command names the commit, the folder or the archive from which this package was installed,
    so pip does not replace it by another version.
    """
    try:
        origin = importlib.metadata.distribution("hookscope").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    return _install_command(extra, json.loads(origin or "{}"))


def _install_command(extra: str, origin: Mapping[str, Any]) -> str:
    """Return the command that adds an extra to an installed package.

    Args:
        extra: the extra.
        origin: the content of the file `direct_url.json` that pip writes; empty if there is none.

    >>> _install_command("ray", {})
    'pip install "hookscope[ray] @ git+https://github.com/hookscope/hookscope"'
    >>> commit = {"vcs": "git", "commit_id": "8f3a", "requested_revision": "v0.1.0"}
    >>> _install_command("ray", {"url": "https://example.org/copy", "vcs_info": commit})
    'pip install "hookscope[ray] @ git+https://example.org/copy@8f3a"'
    >>> _install_command("ray", {"url": "file:///home/me/h", "dir_info": {"editable": True}})
    'pip install -e "/home/me/h[ray]"'
    """
    url = origin.get("url", "git+https://github.com/hookscope/hookscope")
    if commit := origin.get("vcs_info"):
        url = f"{commit['vcs']}+{url}@{commit['commit_id']}"
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install -e "{unquote(urlsplit(url).path)}[{extra}]"'
    return f'pip install "hookscope[{extra}] @ {url}"'


def library(name: str, install: str | None = None, *, extra: str = "hf") -> Any:
    """Import an optional library.

    Args:
        name: the name of the module.
        install: the argument of `pip install` that installs the library. Default: this package with
            `extra`.
        extra: the extra of this package that contains the library.

    Raises:
        ImportError: if the library is missing; the message contains the command to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        command = f'pip install "{install}"' if install else install_command(extra)
        raise ImportError(f"{error.name} is missing: {command}", name=name) from None


# The reasons for errors of huggingface_hub, by the names of their classes.
_OF_THE_HUB = {
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the local cache lacks the files",
    "LocalEntryNotFoundError": "the hub cannot be reached, and the local cache lacks the files",
    "GatedRepoError": "accept the terms of the repository on the hub, and log in (hf auth login)",
    "RepositoryNotFoundError": "no repository has this name, or you may not read it",
    "RevisionNotFoundError": "the repository has no such revision",
}


def hub_failure(error: BaseException) -> str:
    """Return the reason why a download from the hub failed, in one short line.

    Args:
        error: the error of huggingface_hub, of HTTP, of the network or of the disk.

    >>> hub_failure(OSError("no space left\\non device"))
    'no space left on device'
    """
    # The error about a file that is not in the cache comes from the error about the network.
    for cause in (error.__cause__, error):
        for kind in type(cause).__mro__:
            if kind.__name__ in _OF_THE_HUB:
                return _OF_THE_HUB[kind.__name__]
    return textwrap.shorten(str(error), width=200, placeholder=" ...")


def require_fired(names: Iterable[str], fired: Container[str], reason: str = NEVER_FIRED) -> None:
    """Check that all points have fired.

    Args:
        names: the names of the points.
        fired: the names of the points that have fired.
        reason: a possible reason why a point did not fire, for the error.

    Raises:
        NeverFiredError: if a point has not fired; the error names the first five.
    """
    missing = [name for name in names if name not in fired]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        listed = ", ".join(missing[:5])
        raise NeverFiredError(f"the forward pass never reached {listed}{more}: {reason}")
