"""Chat templates: messages written as one text, by the Jinja template that comes with a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from hooks.base import library

Messages = Sequence[Mapping[str, str]]
"""Messages as `{"role": "user", "content": "Hello"}`."""


class ChatTemplate:
    """A template that writes messages as one text, as `transformers` does.

    Args:
        source: in Jinja.
        special: texts of special tokens that it may use, such as `bos_token`.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<user>Hello'
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source, self.special = source, dict(special or {})

    def render(
        self, messages: Messages, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """The text of messages.

        Args:
            messages: the messages.
            add_generation_prompt: whether what comes before an answer is added.
            variables: others that the template knows, such as `tools`.

        Raises:
            ValueError: if the template refuses the messages, or is damaged.
        """
        jinja = library("jinja2")
        values = {**self.special, **variables, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = _environment().from_string(self.source).render(messages=messages, **values)
        except jinja.TemplateError as error:
            raise ValueError(
                f"the chat template must accept the messages; it says: {error}"
            ) from None
        return text

    def places(self, messages: Messages, text: str, **options: Any) -> list[tuple[int, int]]:
        """Where the content of each message is in its text, from a character to another.

        Raises:
            ValueError: if the template changes a content otherwise than by taking spaces off its ends.
        """
        signs = [f"\ue000{n}\ue001" for n in range(len(messages))]
        marked = [
            {**message, "content": sign} for message, sign in zip(messages, signs, strict=True)
        ]
        pattern = self.render(marked, **options)
        contents = [message["content"] for message in messages]
        for kept in (contents, [content.strip() for content in contents]):
            places, written, rest = [], "", pattern
            for sign, content in zip(signs, kept, strict=True):
                if sign not in rest:  # a template may leave a message out
                    places.append((0, 0))
                    continue
                before, _, rest = rest.partition(sign)
                written += before
                places.append((len(written), len(written) + len(content)))
                written += content
            if written + rest == text:
                return places
        raise ValueError(
            "the chat template must keep contents as they are, for their places to be known"
        )


def template_of(source: Any, special: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a tokenizer's files: a text, or the one named `default` of several; None if there is none.

    Raises:
        ValueError: if there are several without a default, or it is something else.
    """
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}
    if isinstance(source, Mapping):
        if "default" not in source:
            raise ValueError(f"one chat template must be named default; got {', '.join(source)}")
        source = source["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"a chat template must be a text; got {source!r:.60}")
    return ChatTemplate(
        source, {name: str(text) for name, text in special.items() if isinstance(text, str)}
    )


@cache
def _environment() -> Any:
    """Jinja as `transformers` sets it up: without access to Python's insides, and with its functions and tags."""
    jinja = library("jinja2")
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """`{% generation %}`, which marks answers and writes what is inside."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    def tojson(
        value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # The text is a part of the prompt, and must be the text that `transformers` gives.
        return json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return made
