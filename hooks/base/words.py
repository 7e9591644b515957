"""Words: the keywords that a function, such as the `forward` of a model, accepts.

With these, a misspelt keyword raises an error instead of being lost in `**kwargs`.

1. A function knows the names of its parameters. If its `**kwargs` are typed (`Unpack[...]`), it
   also knows the keys of the type. A model passes `**kwargs` to its parts, so the model also knows
   the parameters of its parts.
2. A decorator of the function may accept more keywords, which it does not pass on. They are in no
   signature, but they are strings in the code or the closure of the decorator.
3. Any other keyword raises an error. There is one exception: if `**kwargs` have no type, the model
   may know the keyword. Then only misspelt keywords of ours raise an error.
"""

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from hooks.base.hints import argument_hint

F = TypeVar("F", bound=Callable[..., Any])

OURS = (
    *("names", "mode", "lazy", "run", "hooks", "backward", "receipts", "bos", "side"),
    *("pos", "position", "positions", "device", "dtype", "detach", "grads"),
)
"""The keywords of the calls of this package, and common other spellings of `pos`."""

RENAMED: Mapping[str, str] = {
    "position": "pos",
    "positions": "pos",
    "direction": "vector",
    "at": "point",
    "engine": "executor",
}
"""Former or common spellings of our keywords, each with the keyword."""


# The number of keywords to list if no keyword is close.
_FEW = 24


class Words:
    """The keywords that a function accepts.

    Args:
        function: the function.
        parts: the functions that receive its `**kwargs`.

    Attributes:
        known: the keywords.
        is_open: whether the function may accept unknown keywords.

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
        # The signature is unknown, as for a function in C, so any keyword may be accepted.
        except (TypeError, ValueError):
            return
        # The annotation of `**kwargs`, or None if the function has no `**kwargs`.
        extra = None
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = parameter.annotation
            elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self.known.add(parameter.name)
        typed = [kind for kind in typing.get_args(extra) if typing.is_typeddict(kind)]
        self.is_open = extra is not None and not typed
        for kind in typed:
            self.known |= kind.__optional_keys__ | kind.__required_keys__
        if extra is not None:
            inner = (Words(part).known for part in parts)
            self.known = self.known.union(_read_by_decorators(function), *inner)

    def require(self, given: Iterable[str], options: Collection[str], what: str) -> None:
        """Check that the function knows each keyword of a call.

        Args:
            given: the keywords of a call.
            options: the keywords of the caller itself, for close matches.
            what: the name of the called function, for the error.

        Raises:
            TypeError: if a keyword is unknown. The error names the first one with close matches or,
                for a keyword of another library, with our keyword.
        """
        for name in given:
            if name in self.known:
                continue
            if RENAMED.get(name) in {*options, *self.known}:
                raise TypeError(f"{what} takes no argument {name}=; use {RENAMED[name]}=")
            if advice := argument_hint(f"{what}.{name}"):
                raise TypeError(f"{what} takes no argument {name}=; {advice}")
            if ours := argument_hint(name):
                use = f"use {ours} instead"
                if ours.startswith("nothing: "):
                    use = f"leave it out: {ours.removeprefix('nothing: ')}"
                raise TypeError(f"{name}= is a keyword of another library; {use}")
            if self.is_open and not _close(name, OURS):
                continue
            known = {*options, *self.known} or OURS
            close = _close(name, known)
            if not close and not self.is_open:
                close = sorted(word for word in known if {name, f"{name}s"} & {*word.split("_")})
            hint = f"; close matches: {', '.join(close)}" if close else ""
            if not close and not self.is_open and len(self.known) < _FEW:
                hint = f"; it takes {', '.join(sorted(self.known - {'self'}))}"
            raise TypeError(f"{what} takes no argument {name}={hint}")


class NoOthers(typing.TypedDict):
    """The type of the `**others` of a function that accepts no other keywords.

    The function is declared with `**others: Unpack[NoOthers]`, so a type checker rejects them. At
    run time the function passes them to `refuse`, whose error lists close matches. `hides_others`
    hides them from the signature that `help` shows.
    """


def hides_others(function: F) -> F:
    """Hide `**others` from the signature of a function. The function itself is unchanged.

    >>> @hides_others
    ... def double(x: int, **others: typing.Unpack[NoOthers]) -> int:
    ...     return 2 * x
    >>> inspect.signature(double)
    <Signature (x: int) -> int>
    """
    signature = inspect.signature(function)
    named = [part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=named)
    return function


def refuse(others: Iterable[str], function: Callable[..., Any], what: str) -> None:
    """Raise an error if there are keywords that a function does not accept.

    Args:
        others: the unknown keywords.
        function: the function, whose parameters are the known keywords.
        what: the name of the function, for the error.

    Raises:
        TypeError: naming the first keyword, with close matches or with our keyword for a keyword of
            another library.
    """
    if others:
        Words(function).require(others, (), what)


def forwards_in(module: Any) -> Iterator[Callable[..., Any]]:
    """Yield the `forward` of each part that may receive the `**kwargs` of a module.

    A part that accepts `**kwargs` may pass them to its own parts.
    """
    for part in module.children():
        yield part.forward
        parameters = inspect.signature(part.forward).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            yield from forwards_in(part)


def _close(name: str, words: Collection[str]) -> list[str]:
    """Return the keywords that are similar to a misspelt name.

    A keyword is not similar if it is longer or shorter by three characters or more.
    """
    similar = difflib.get_close_matches(name, sorted(words), n=3, cutoff=0.75)
    return [word for word in similar if abs(len(word) - len(name)) <= 2]


def _read_by_decorators(function: Any) -> set[str]:
    """Return the keywords in the code and the closures of a function's decorators."""
    words: set[str] = set()
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        plain = getattr(function, "__func__", function)
        closure = getattr(plain, "__closure__", None) or ()
        values = [cell.cell_contents for cell in closure] + [
            *getattr(getattr(plain, "__code__", None), "co_consts", ())
        ]
        words |= {word for word in values if isinstance(word, str) and word.isidentifier()}
        function = inner
    return words
