"""An extension of Griffe for the reference pages: examples at the end of a docstring get the
heading that it looks for.
"""

import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Shows doctests as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the heading before the first example of an object's docstring."""
        if obj.docstring is not None:
            text, prompt, examples = obj.docstring.value.partition(">>> ")
            if prompt:
                obj.docstring.value = (
                    f"{text}Examples:\n{textwrap.indent(prompt + examples, '    ')}"
                )
