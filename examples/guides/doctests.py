"""An extension of Griffe, which reads the docstrings for the reference pages.

It puts the heading `Examples:` before the doctests at the end of a docstring. Without a heading,
Griffe shows them as ordinary text.
"""

import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Add the heading `Examples:` to docstrings, so that doctests are shown as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the heading before the first example of an object's docstring."""
        if obj.docstring is not None:
            text, prompt, examples = obj.docstring.value.partition(">>> ")
            if prompt:
                obj.docstring.value = (
                    f"{text}Examples:\n{textwrap.indent(prompt + examples, '    ')}"
                )
