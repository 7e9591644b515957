"""Chats: messages as the text that a model reads, and the positions of each message in it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from hooks.base import Text, explains_calls, language_of, require_kind
from models.text.templates import ChatTemplate, Messages


@explains_calls
def chat(
    model: nn.Module,
    messages: Messages | Sequence[Messages],
    *,
    template: ChatTemplate | str | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> Text:
    """Return messages as the text that a model reads, with the positions of each message.

    Args:
        model: a model with a tokenizer. It may be an attached model.
        messages: the messages of a chat, or a list of chats.
        template: a `ChatTemplate`, or the source of one in Jinja. Default: the template in the
            files of the tokenizer.
        add_generation_prompt: whether to add the beginning of an answer. Default: False.
        variables: other variables of the template, such as `tools`.

    Returns:
        The texts. Their `spans` contain the positions of the message contents in each chat. The
        keys are the roles (`user`, `assistant`, `system`) and the numbers of the messages (`0`,
        `1`, ...). Edits and readings accept these positions as `pos=`, and functions that take
        texts accept the names of the spans.

    Raises:
        ValueError: if a message has no role or no content, if there is no tokenizer or no template,
            or if the template raises an error or changes a content.

    >>> from models import load
    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    >>> messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    >>> one = chat(load("pydoc-4l"), messages, template=source)
    >>> one.texts, one.spans["assistant"]
    (('user: hi. assistant: ok. ',), [[21, 22]])
    """
    chats = _as_chats(messages)
    language = language_of(model)
    tokenizer = language.require_tokenizer()
    used_template = _template_for(tokenizer, template)
    options = {"add_generation_prompt": add_generation_prompt, **variables}
    texts = tuple(used_template.render(messages_of_chat, **options) for messages_of_chat in chats)
    spans: dict[str, list[list[int]]] = {}
    for n, (messages_of_chat, text) in enumerate(zip(chats, texts, strict=True)):
        places = used_template.places(messages_of_chat, text, **options)
        positions = _positions(places, tokenizer.offsets(text))
        for number, message in enumerate(messages_of_chat):
            for name in (message["role"], str(number)):
                spans.setdefault(name, [[] for _ in chats])[n] += positions[number]
    # Encode the texts here, because to_tokens would add a second beginning token to a string.
    batch = language.to_tokens([tokenizer.encode(text) for text in texts])
    return replace(batch, texts=texts, spans=spans)


def _as_chats(messages: Any) -> Sequence[Messages]:
    """Return the messages of one chat, or of several, as a list of chats.

    Raises:
        TypeError: if they are not messages.
        ValueError: if a message has no role or no content.
    """
    rule = (
        "messages must be a list of messages, such as [{'role': 'user', 'content': 'hi'}], or a "
        "list of chats"
    )
    if not _is_list(messages):
        raise TypeError(f"{rule}; got {messages!r:.80}")
    chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if not all(map(_is_list, chats)):
        raise TypeError(f"{rule}; got {messages!r:.80}")
    for message in chain(*chats):
        if not isinstance(message, Mapping):
            raise TypeError(f"{rule}; got the message {message!r:.80}")
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"a message must have a role and a content that are strings; got {message!r:.80}"
            )
    return chats


def _is_list(value: object) -> bool:
    """Return whether a value is a sequence, and neither a text nor a mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str | Mapping)


def _template_for(tokenizer: Any, template: ChatTemplate | str | None) -> ChatTemplate:
    """Return the given template, or else the template in the files of the tokenizer.

    Raises:
        TypeError: if the given template is neither a text nor a `ChatTemplate`.
        ValueError: if there is no template.
    """
    require_kind("template", template, (str, ChatTemplate, type(None)), "a text or a ChatTemplate")
    if template is None:
        template = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise ValueError(
            "a chat needs a template, but the files of the tokenizer contain no template: "
            "pass template="
        )
    if isinstance(template, ChatTemplate):
        return template
    return ChatTemplate(template, getattr(tokenizer, "special_texts", None))


def _positions(
    places: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Return the tokens that contain characters of each place.

    Args:
        places: the first character and the end of each place in a text.
        offsets: the first character and the end of each token of the text.
    """
    positions = []
    for start, stop in places:
        tokens = enumerate(offsets)
        positions.append([n for n, (first, end) in tokens if first < stop and end > start])
    return positions
