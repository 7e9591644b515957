"""Chat templates, which write messages as one text with the Jinja template of a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from hooks.base import library

Messages = Sequence[Mapping[str, str]]
"""A list of messages, such as `[{"role": "user", "content": "Hello"}]`."""


class ChatTemplate:
    """A template that writes messages as one text, as `transformers` does.

    Args:
        source: the template, in Jinja.
        special: the texts of special tokens, such as `bos_token`. The template may use them.
            Default: no special tokens.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<user>Hello'
    """

    source: str
    special: dict[str, str]

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})

    def render(
        self, messages: Messages, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Return messages as one text.

        Args:
            messages: the messages.
            add_generation_prompt: whether to add the beginning of an answer. Default:
                False.
            variables: other variables of the template, such as `tools`.

        Raises:
            ValueError: if the template raises an error, or is damaged.
        """
        jinja = library("jinja2")
        values = {**self.special, **variables, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = _environment().from_string(self.source).render(messages=messages, **values)
        except jinja.TemplateError as error:
            raise ValueError(
                f"the chat template must accept the messages; its error is: {error}"
            ) from None
        return text

    def places(self, messages: Messages, text: str, **options: Any) -> list[tuple[int, int]]:
        """Return the first character and the end of the content of each message in a text.

        For a message that the template omits, both numbers are 0.

        Args:
            messages: the messages.
            text: the text that the template writes for these messages.
            options: the other arguments of `render`.

        Raises:
            ValueError: if the template changes a content. It may remove spaces at the ends of all
                contents.
        """
        signs = [f"\ue000{n}\ue001" for n in range(len(messages))]
        marked = [
            {**message, "content": sign} for message, sign in zip(messages, signs, strict=True)
        ]
        pattern = self.render(marked, **options)
        contents = [message["content"] for message in messages]
        for written_contents in (contents, [content.strip() for content in contents]):
            places = []
            written = ""
            remaining = pattern
            for sign, content in zip(signs, written_contents, strict=True):
                # The template has omitted this message.
                if sign not in remaining:
                    places.append((0, 0))
                    continue
                before, _, remaining = remaining.partition(sign)
                written += before
                places.append((len(written), len(written) + len(content)))
                written += content
            if written + remaining == text:
                return places
        raise ValueError(
            "the chat template must not change contents, because their positions in the text "
            "must be known"
        )


def template_of(source: Any, special: Mapping[str, str]) -> ChatTemplate | None:
    """Return the template in the files of a tokenizer, or None if they contain no template.

    Args:
        source: the text of a template, or several templates by name. The template named `default`
            is used.
        special: the texts of special tokens.

    Raises:
        ValueError: if there are several templates and none is named `default`, or if the template
            is not a string.
    """
    if isinstance(source, list):
        source = {template["name"]: template["template"] for template in source}
    if isinstance(source, Mapping):
        if "default" not in source:
            raise ValueError(f"one chat template must be named 'default'; got {', '.join(source)}")
        source = source["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"a chat template must be a string; got {source!r:.60}")
    return ChatTemplate(source, special)


@cache
def _environment() -> Any:
    """Return a Jinja environment in a sandbox, with the functions and tags of `transformers`."""
    jinja = library("jinja2")
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """The tag `{% generation %}`. It marks answers, and its content is written unchanged."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    def tojson(
        value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # The text becomes part of the prompt, so it must equal the text that `transformers` writes.
        return json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
