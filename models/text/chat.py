"""Chats: messages as the text that a model reads, and the positions of each message in
this text.
"""

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
    """Return messages as the text that a model was trained to read, with the positions of each
    message.

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
    rule = (
        "messages must be a list of messages, such as [{'role': 'user', 'content': 'hi'}], or a "
        "list of chats"
    )
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"{rule}; got {messages!r:.80}")
    chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if any(isinstance(one, str | Mapping) or not isinstance(one, Sequence) for one in chats):
        raise ValueError(f"{rule}; got {messages!r:.80}")
    for message in chain(*chats):
        if not isinstance(message, Mapping):
            raise ValueError(f"{rule}; got the message {message!r:.80}")
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"a message must have a role and a content that are strings; got {message!r:.80}"
            )
    language = language_of(model)
    tokenizer = language.require_tokenizer()
    chosen = getattr(tokenizer, "chat_template", None) if template is None else template
    if chosen is None:
        raise ValueError(
            "a chat needs a template, but the files of the tokenizer contain no template: "
            "pass template="
        )
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
    # Encode the texts here, because to_tokens would add a second beginning token to a string.
    batch = language.to_tokens([tokenizer.encode(text) for text in texts])
    return replace(batch, texts=texts, spans=spans)
