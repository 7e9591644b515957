"""Words: which keywords a model takes, so that a misspelt one is an error and not lost in `**kwargs`.

1. A function knows the names of its parameters. If its `**kwargs` are typed (`Unpack[...]`), it knows those of the type.
   A model hands `**kwargs` on to its parts, so it knows theirs.
2. A decorator may take out words of its own first. They stand in its code or in its closure.
3. Any other word is refused. Where `**kwargs` have no type it may be the model's own, so only what is close to one of ours is.
"""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from hooks.base._torch import refuse_unbound
from hooks.base.hints import argument_hint

P = ParamSpec("P")
R = TypeVar("R")

OURS = {
    *("names", "mode", "lazy", "run", "hooks", "backward", "receipts", "bos", "side"),
    *("positions", "device", "dtype", "detach", "grads"),
}
"""The words of the calls of this package."""


class Words:
    """The keywords that a function takes.

    Args:
        function: the function.
        parts: functions that its `**kwargs` are handed on to.

    Attributes:
        known: the keywords.
        is_open: whether it may take others.

    >>> words = Words(lambda tokens, *, scale=1.0: tokens)
    >>> words.require(["scales"], (), "the model")
    Traceback (most recent call last):
    TypeError: the model takes no argument scales=; close matches: scale
    """

    def __init__(self, function: Callable[..., Any], *parts: Callable[..., Any]) -> None:
        self.known: set[str] = set()
        self.is_open = True
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # Python knows none
            return
        rest = next((p.annotation for p in parameters if p.kind is p.VAR_KEYWORD), None)
        typed = [kind for kind in typing.get_args(rest) if typing.is_typeddict(kind)]
        self.is_open = rest is not None and not typed
        self.known = {
            p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
        for kind in typed:
            self.known |= kind.__optional_keys__ | kind.__required_keys__
        if rest is not None:
            inner = (Words(part).known for part in parts)
            self.known = self.known.union(_read_by_decorators(function), *inner)

    def require(self, given: Iterable[str], options: Collection[str], what: str) -> None:
        """Refuse a keyword that is none.

        Args:
            given: the keywords of a call.
            options: what the caller takes itself, for close matches.
            what: what was called, for the error.

        Raises:
            TypeError: naming the first, with close matches, or with our word for one of TransformerLens.
        """
        for name in given:
            if name in self.known:
                continue
            if ours := argument_hint(name):
                raise TypeError(f"{name}= is another library's word: here it is {ours}")
            if self.is_open and not _close(name, OURS):
                continue
            close = _close(name, {*options, *self.known} or OURS)
            hint = f"; close matches: {', '.join(close)}" if close else ""
            if not close and not self.is_open and len(self.known) < 12:
                hint = f"; it takes {', '.join(sorted(self.known))}"
            raise TypeError(f"{what} takes no argument {name}={hint}")


class NoOthers(typing.TypedDict):
    """No keyword. A function with `**others: Unpack[NoOthers]` gives them to `refuse`, whose error is of help."""


def refuse(others: Iterable[str], function: Callable[..., Any], what: str) -> None:
    """Refuse keywords that a function does not take, with close matches or our word for another library's.

    Args:
        others: the keywords.
        function: the function, whose own words are known.
        what: how it is called, for the error.

    Raises:
        TypeError: naming the first.
    """
    if others:
        Words(function).require(others, (), what)


def explains_calls(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose error for arguments that it does not take, or lacks, says how it is called.

    >>> explains_calls(lambda x, *, scale=1.0: x)(3, scales=2.0)
    Traceback (most recent call last):
    TypeError: <lambda> takes no argument scales=; close matches: scale
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            refuse_unbound(function, args, kwargs, error)
            raise

    return run


def forwards_in(module: Any) -> Iterator[Callable[..., Any]]:
    """The forwards of a module's parts, to which it may hand `**kwargs` on, and of theirs if these do so too."""
    for part in module.children():
        yield part.forward
        if any(
            p.kind is p.VAR_KEYWORD for p in inspect.signature(part.forward).parameters.values()
        ):
            yield from forwards_in(part)


def _close(name: str, words: Collection[str]) -> list[str]:
    """The words that a name may be a misspelling of. `position_ids` is none of `positions`."""
    similar = difflib.get_close_matches(name, sorted(words), n=3, cutoff=0.75)
    return [word for word in similar if abs(len(word) - len(name)) <= 2]


def _read_by_decorators(function: Any) -> set[str]:
    """The words in the code and the closures of a function's decorators."""
    words: set[str] = set()
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        plain = getattr(function, "__func__", function)
        closure = getattr(plain, "__closure__", None) or ()
        held = [cell.cell_contents for cell in closure] + [
            *getattr(getattr(plain, "__code__", None), "co_consts", ())
        ]
        words |= {word for word in held if isinstance(word, str) and word.isidentifier()}
        function = inner
    return words
