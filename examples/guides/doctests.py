"""An extension of Griffe, which reads the docstrings for the reference pages.

1. It puts the heading `Examples:` before the doctests at the end of a docstring. Without a heading,
   Griffe shows them as ordinary text.
2. It exports the names that `interp/__init__.pyi` imports. Griffe cannot compute the `__all__` of
   `interp`, and would show none of them.
"""

import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Show doctests as code, and the names of packages whose `__all__` is computed."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Export the imported names of a package without a readable `__all__`."""
        if not pkg.exports:
            members = pkg.members.items()
            pkg.exports = [name for name, value in members if value.is_alias and name[0] != "_"]

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the heading before the first example of an object's docstring."""
        if obj.docstring is not None:
            text, prompt, examples = obj.docstring.value.partition(">>> ")
            if prompt:
                obj.docstring.value = (
                    f"{text}Examples:\n{textwrap.indent(prompt + examples, '    ')}"
                )
