"""Shown: what a notebook shows as a picture, and what `.save("x.html")` writes as a page."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from interp.pictures.view import View


class Shown:
    """A base of classes that have a picture; each says in `view` which."""

    def view(self) -> View:
        """The picture."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture as a page where the path ends in `.html`; otherwise a file that `load` reads, where the class
        has such files. Either is written completely or not at all.

        Raises:
            ValueError: if it has none.
            FileNotFoundError: if there is no such directory.
            TypeError: if a fact does not fit JSON.
        """
        if Path(path).suffix == ".html":
            self.view().save(path)
        else:
            self._save(Path(path))

    def _save(self, path: Path) -> None:
        """Writes what `load` reads."""
        raise ValueError(
            f"a {type(self).__name__} is saved as a picture, so the path must end in .html; got {path}"
        )

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()


def told(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the facts that are numbers, text or short lists of them."""
    for name, fact in facts.items():
        if isinstance(fact, str | int | float) or (
            isinstance(fact, list | tuple) and len(fact) < 9
        ):
            yield f"{name}: {fact!s:.200}"
