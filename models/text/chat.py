"""Chats: messages as the text that a model reads, and where the content of each is in it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from hooks.base import Text, language_of
from models.text.templates import ChatTemplate, Messages


def chat(
    model: nn.Module,
    messages: Messages | Sequence[Messages],
    *,
    template: ChatTemplate | str | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> Text:
    """Write messages as a model was trained to read them, and find where each is.

    Args:
        model: a model with a tokenizer, also an attached one.
        messages: the messages of a chat, or a list of chats.
        template: a template, or its source; None for that of the tokenizer's files.
        add_generation_prompt, variables: see `ChatTemplate.render`.

    Returns:
        The texts. Their `spans` are the positions of contents in each chat: by role (`user`, `assistant`, `system`), and of
        each message by its number, `0` and so on. Edits and readings take them as `pos=`, and functions of texts know
        them by name.

    Raises:
        ValueError: if a message has no role or content; if there is no tokenizer or no template; or as for `ChatTemplate`.

    >>> from models import load
    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    >>> one = chat(load("pydoc-4l"), [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}], template=source)
    >>> one.texts, one.spans["assistant"]
    (('user: hi. assistant: ok. ',), [[21, 22]])
    """
    rule = (
        "messages must be a list of messages, as [{'role': 'user', 'content': 'hi'}], or of chats"
    )
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"{rule}; got {messages!r:.80}")
    chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if any(isinstance(one, str | Mapping) or not isinstance(one, Sequence) for one in chats):
        raise ValueError(f"{rule}; got {messages!r:.80}")
    for message in chain(*chats):
        if not isinstance(message, Mapping):
            raise ValueError(f"{rule}; got {message!r:.80} among them")
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"a message must have a role and a content, both texts; got {message!r:.80}"
            )
    language = language_of(model)
    tokenizer = language.require_tokenizer()
    chosen = getattr(tokenizer, "chat_template", None) if template is None else template
    if chosen is None:
        raise ValueError("a chat needs a template; the tokenizer's files have none: give template=")
    if isinstance(chosen, str):
        chosen = ChatTemplate(chosen)
    options = {"add_generation_prompt": add_generation_prompt, **variables}
    texts = tuple(chosen.render(each, **options) for each in chats)
    spans: dict[str, list[list[int]]] = {}
    for row, (each, text) in enumerate(zip(chats, texts, strict=True)):
        places, offsets = chosen.places(each, text, **options), tokenizer.offsets(text)
        for n, (message, (start, stop)) in enumerate(zip(each, places, strict=True)):
            touched = [
                at for at, (first, end) in enumerate(offsets) if first < stop and end > start
            ]
            for name in (message["role"], str(n)):
                spans.setdefault(name, [[] for _ in chats])[row] += touched
    # A list is read as it is, without a second token at its beginning.
    batch = language.to_tokens([tokenizer.encode(text) for text in texts])
    return replace(batch, texts=texts, spans=spans)
