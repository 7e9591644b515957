"""Texts in, texts out: what a model that has a tokenizer reads, and how its tokens are shown."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from hooks.base import (
    NoOthers,
    Text,
    Texts,
    columns_of,
    is_columns,
    is_integer,
    is_one_text,
    refuse,
    require_choice,
    require_kind,
    shown,
)
from models.text.tokenizer import Tokenizer, as_tokenizer, pieces_of

_SET_ANOTHER = "set model.tokenizer (load_tokenizer(path) or one of transformers; --tokenizer on the command line)"


class ReadsText:
    """A model's own reading of texts, by its tokenizer.

    Where the tokenizer's files say that a text begins with a token, such as `<s>`, or ends with one, such as
    BERT's `[SEP]`, strings get it too; a list of tokens is read as it is.
    """

    # The tokenizer, or a `partial` that loads it.
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none. It may be set, also to a tokenizer of `transformers`.

        A loaded model reads its files when the tokenizer is first asked for.

        Raises:
            ImportError: if a library that the tokenizer needs is not installed.
            ValueError: if its files are damaged or of an unknown kind.
        """
        if isinstance(self._tokenizer, partial):
            try:
                self._tokenizer = self._tokenizer()
            except ValueError as error:
                raise ValueError(f"{error} (instead of it {_SET_ANOTHER})") from None
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = as_tokenizer(tokenizer)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: if there is none; it says how to give one.
        """
        if (tokenizer := self.tokenizer) is None:
            raise ValueError(
                "the model must have a tokenizer to read or write text; it has none: "
                f"{_SET_ANOTHER}, or give tokens"
            )
        return tokenizer

    def _text_device(self) -> torch.device | None:
        """The device for tokens; None for the CPU."""
        return None

    @property
    def mask_token(self) -> int | None:
        """The token that stands where a masked language model predicts; None if the tokenizer names none."""
        return getattr(self.tokenizer, "mask_token_id", None)

    @property
    def pad_token(self) -> int:
        """The token that stands where a text is padded. A model that masks padding never reads it."""
        return 0

    def to_tokens(
        self,
        texts: Texts,
        *,
        bos: bool | None = None,
        side: Literal["left", "right"] = "right",
        **others: Unpack[NoOthers],
    ) -> Text:
        """Tokens and mask of texts of any lengths. A tensor [batch, pos] is returned as it is.

        Args:
            texts: see `Texts`.
            bos: whether strings begin with the token for the beginning of a text; None as the tokenizer's own
                configuration says, with the token at the end too where it has one. False adds neither.
            side: where shorter texts are padded, with `pad_token`.

        Raises:
            ValueError: if there is no tokenizer for strings, a text has no tokens, or they are something else.

        >>> from models import load
        >>> tokens, mask = load("pydoc-4l").to_tokens(["a list", "a"])
        >>> tokens.shape, mask.sum(1).tolist()
        (torch.Size([2, 6]), [6, 1])
        """
        refuse(others, self.to_tokens, "to_tokens")
        if isinstance(texts, Text):
            return texts
        if isinstance(texts, Tensor) and texts.ndim == 2:
            return Text(texts)
        require_choice("side", side, ("left", "right"))
        if is_columns(texts):
            rows, real = columns_of(texts)
            text = self._padded([*map(_integers, rows)], side)
            if text.attention_mask is None and all(map(all, real)):
                return text
            # Such texts may have padding of their own too.
            mask = Text.padded([*map(torch.tensor, real)], side=side, device=self._text_device())
            return replace(text, attention_mask=mask.tokens.bool())
        several: list[Any] = [texts] if is_one_text(texts) else [*texts]
        strings = tuple(text for text in several if isinstance(text, str))
        rows = [
            self.encoded(text, bos) if isinstance(text, str) else _integers(text)
            for text in several
        ]
        return self._padded(rows, side, strings if len(strings) == len(several) else None)

    def _padded(
        self,
        rows: Sequence[list[int]],
        side: Literal["left", "right"],
        strings: tuple[str, ...] | None = None,
    ) -> Text:
        """The tokens of texts of any lengths as one batch."""
        empty = [n for n, row in enumerate(rows) if not row]
        if empty or not rows:
            raise ValueError(
                f"each text must have at least one token; got {len(rows)} texts, empty: {empty}"
            )
        return Text.padded(
            [*map(torch.tensor, rows)],
            self.pad_token,
            side=side,
            device=self._text_device(),
            texts=strings,
        )

    def encoded(self, text: str, bos: bool | None = None, closed: bool = True) -> list[int]:
        """The tokens of one text; see `to_tokens`. Without `closed` none is added at the end."""
        tokenizer = self.require_tokenizer()
        tokens = tokenizer.encode(text)
        if bos is False:
            return tokens
        start = tokenizer.bos_token_ids
        if bos and not start:
            if (token := getattr(tokenizer, "bos_token_id", None)) is None:
                raise ValueError(
                    "the tokenizer must have a token for the beginning of a text; it has none (bos=True)"
                )
            start = (token,)
        begun = tuple(tokens[: len(start)]) == start
        closing = getattr(tokenizer, "closing_token_ids", ()) if closed else ()
        return [*(() if begun else start), *tokens, *closing]

    def to_text(self, tokens: Texts | int | Int[Tensor, ""]) -> Any:
        """The text of a token, of the tokens of one text or, as a list, of several, without padding.

        Raises:
            ValueError: if there is no tokenizer, or it does not know a token.

        >>> from models import load
        >>> model = load("pydoc-4l")
        >>> model.to_text(model.to_tokens(["a list", "a"]))
        ['a list', 'a']
        """
        listed: Any = [index(tokens)] if is_integer(tokens) else tokens  # type: ignore[arg-type]
        decode = self.require_tokenizer().decode
        written = [decode(row) for row in self.to_tokens(listed).listed()]
        return written[0] if is_one_text(listed) else written

    def to_pieces(self, tokens: Any) -> Any:
        """The text of each token, for display: a string, or lists of them in the shape of the tokens.

        Args:
            tokens: an integer, or integers of any shape in tensors or lists; or a string, to see its tokens.

        Raises:
            ValueError: if there is no tokenizer.

        >>> from models import load
        >>> load("pydoc-4l").to_pieces(torch.tensor([[64], [65]]))
        [['a'], ['b']]
        """
        tokenizer = self.require_tokenizer()
        if isinstance(tokens, str):
            tokens = tokenizer.encode(tokens)

        def piece(token: int) -> str:
            try:
                return tokenizer.tokens_as_text([token])[0]
            except ValueError:
                return f"<token {token}>"  # vocabularies of models are often rounded up

        return pieces_of(tokens.tokens if isinstance(tokens, Text) else tokens, piece)

    def to_id(self, text: str) -> int:
        """The one token of a text, such as `" cat"`.

        Raises:
            ValueError: if there is no tokenizer, or the text is several tokens; it lists them.

        >>> from models import load
        >>> load("pydoc-4l").to_id("a")
        64
        """
        require_kind("text", text, str, "the text of a token")
        tokens = self.require_tokenizer().encode(text)
        if len(tokens) != 1:
            raise ValueError(
                f"a text must be one token; got {text!r}, which is {len(tokens)}: {self.to_pieces(tokens)}"
            )
        return tokens[0]


def read(
    model: ReadsText, texts: Any, attention_mask: Tensor | None, kv_cache: object | None = None
) -> tuple[Tensor, Tensor | None]:
    """Tokens and mask of what a model was called with; tensors as they are.

    Raises:
        ValueError: as for `to_tokens`, or if texts come beside a mask or a cache.
    """
    if isinstance(texts, Tensor) and texts.ndim != 1:
        return texts, attention_mask
    if attention_mask is not None or kv_cache is not None:
        raise ValueError(
            "tokens must be [batch, pos] beside attention_mask= or a cache; got "
            + (f"{list(texts.shape)}" if isinstance(texts, Tensor) else f"a {type(texts).__name__}")
        )
    batch = model.to_tokens(texts)
    return batch.tokens, batch.attention_mask


def _integers(tokens: Any) -> list[int]:
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # NumPy's arrays too
    if not isinstance(listed, Sequence) or not all(map(is_integer, listed)):
        raise ValueError(f"a text must be a string or a list of integers; got {shown(tokens)}")
    return [*map(index, listed)]
