"""Texts of models with a tokenizer: convert texts to tokens, and tokens to texts or pieces.

A piece is the text of one token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, Literal, Unpack, overload

import torch
from jaxtyping import Int
from torch import Tensor

from hooks.base import (
    NoOthers,
    Text,
    Texts,
    columns_of,
    hides_others,
    is_columns,
    is_integer,
    is_one_text,
    name_of_parts,
    padding_messages,
    refuse,
    require_choice,
    require_kind,
    require_readable,
    shown,
)
from models.text.tokenizer import Tokenizer, as_tokenizer, pieces_of


class ReadsText:
    """Methods of a model that convert between texts and tokens with its tokenizer.

    If the files of the tokenizer add a token at the beginning of a text, such as `<s>`, or at the
    end, such as BERT's `[SEP]`, these tokens are added to strings. No tokens are added to a list of
    tokens.
    """

    # The tokenizer, or a `partial` that loads the tokenizer.
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the model has no tokenizer.

        It can be set, also to a tokenizer of `transformers`.

        The files of the tokenizer of a loaded model are read at the first access.

        Raises:
            ImportError: if a library that the tokenizer needs is not installed.
            ValueError: if the files are damaged or unsupported.
        """
        if isinstance(self._tokenizer, partial):
            try:
                self._tokenizer = self._tokenizer()
            except ValueError as error:
                raise ValueError(f"{error} (or {self._set_another})") from None
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = as_tokenizer(tokenizer)

    @property
    def _set_another(self) -> str:
        """The advice to set a tokenizer, for errors."""
        name = name_of_parts(self)
        made = "" if name == "model" else f", where {name} = attach(model),"
        return (
            f"set {name}.tokenizer{made} to load_tokenizer(path) or to a tokenizer of transformers "
            "(on the command line: --tokenizer)"
        )

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: if the model has no tokenizer. The error shows how to set a tokenizer.
        """
        if (tokenizer := self.tokenizer) is None:
            raise ValueError(
                "the model must have a tokenizer to read or write text; got no tokenizer: "
                f"{self._set_another}, or pass tokens"
            )
        return tokenizer

    def _text_device(self) -> torch.device | None:
        """Return the device on which the tokens of texts are created, or None for the CPU."""
        return None

    @property
    def mask_token(self) -> int | None:
        """The token at which a masked language model predicts.

        None if the tokenizer has no mask token.
        """
        return getattr(self.tokenizer, "mask_token_id", None)

    @property
    def pad_token(self) -> int:
        """The token that is used as padding.

        A model that masks padding never reads it.
        """
        return 0

    @hides_others
    def to_tokens(
        self,
        texts: Texts,
        *,
        bos: bool | None = None,
        side: Literal["left", "right"] = "right",
        **others: Unpack[NoOthers],
    ) -> Text:
        """Return the tokens and the mask of texts of any lengths.

        The tokens of a tensor [batch, pos] are not changed.

        Args:
            texts: the texts in any form; see `Texts`.
            bos: whether to add a beginning token to strings. With True, the tokens that the
                tokenizer adds at the end are added too; with False, nothing is added. Default:
                None, which adds the tokens that the tokenizer itself adds.
            side: the side on which shorter texts are padded with `pad_token`. Default: "right".

        Raises:
            ValueError: if a string is given and the model has no tokenizer, if a text has no
                tokens, or if a text is neither a string nor a list of integers.

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
            # The columns may already contain padding, which `_padded` does not know.
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
        """Return the tokens of texts of any lengths as one batch."""
        empty = [n for n, tokens in enumerate(rows) if not tokens]
        if not rows:
            raise ValueError("texts must contain at least one text; got 0 texts")
        if empty:
            raise ValueError(
                f"each text must have at least one token; got {len(rows)} texts, of which these "
                f"are empty: {empty}"
            )
        return Text.padded(
            [*map(torch.tensor, rows)],
            self.pad_token,
            side=side,
            device=self._text_device(),
            texts=strings,
        )

    def encoded(self, text: str, bos: bool | None = None, closed: bool = True) -> list[int]:
        """Return the tokens of one text.

        Args:
            text: the text.
            bos: whether to add a beginning token. Default: None, which adds the tokens that the
                tokenizer itself adds.
            closed: whether to add the tokens that the tokenizer adds at the end.

        Raises:
            ValueError: if the model has no tokenizer, or if `bos` is True and the tokenizer has no
                token for the beginning of a text.
        """
        tokenizer = self.require_tokenizer()
        tokens = tokenizer.encode(text)
        if bos is False:
            return tokens
        start = tokenizer.bos_token_ids
        if bos and not start:
            if (token := getattr(tokenizer, "bos_token_id", None)) is None:
                raise ValueError(
                    "the tokenizer must have a token for the beginning of a text if bos=True; got "
                    "no token"
                )
            start = (token,)
        has_start = tuple(tokens[: len(start)]) == start
        closing = getattr(tokenizer, "closing_token_ids", ()) if closed else ()
        return [*(() if has_start else start), *tokens, *closing]

    @overload
    def to_text(self, tokens: int | list[int]) -> str: ...

    @overload
    def to_text(self, tokens: Texts | Int[Tensor, ""]) -> Any: ...

    def to_text(self, tokens: Texts | int | Int[Tensor, ""]) -> Any:
        """Return the text of one token or of one list of tokens, or a list of several texts.

        Padding is ignored.

        Raises:
            ValueError: if the model has no tokenizer, or if a token is not in the vocabulary.

        >>> from models import load
        >>> model = load("pydoc-4l")
        >>> model.to_text(model.to_tokens(["a list", "a"]))
        ['a list', 'a']
        """
        listed: Any = [index(tokens)] if is_integer(tokens) else tokens  # type: ignore[arg-type]
        decode = self.require_tokenizer().decode
        texts = [decode(tokens_of_text) for tokens_of_text in self.to_tokens(listed).listed()]
        return texts[0] if is_one_text(listed) else texts

    def to_pieces(self, tokens: Any) -> Any:
        """Return the text of each token for display.

        The result is a string, or lists of strings in the shape of the tokens.

        Args:
            tokens: an integer, or a tensor or nested list of integers of any shape, or a string
                whose tokens are shown.

        Raises:
            ValueError: if the model has no tokenizer.

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
                # A model often has more tokens than its tokenizer, so such a token is no mistake.
                return f"<token {token}>"

        return pieces_of(tokens.tokens if isinstance(tokens, Text) else tokens, piece)

    def to_id(self, text: str) -> int:
        """Return the token of a text that is one token, such as `" cat"`.

        Raises:
            ValueError: if the model has no tokenizer, or if the text is several tokens. The error
                lists these tokens.

        >>> from models import load
        >>> load("pydoc-4l").to_id("a")
        64
        """
        require_kind("text", text, str, words="the text of a token")
        tokens = self.require_tokenizer().encode(text)
        if len(tokens) != 1:
            raise ValueError(
                f"a text must be one token; got {text!r}, which is {len(tokens)} tokens: "
                f"{self.to_pieces(tokens)}"
            )
        return tokens[0]


def read(
    model: ReadsText, texts: Any, attention_mask: Tensor | None, kv_cache: object | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens and the mask of the texts that a model was called with.

    Tensors are not changed.

    Raises:
        ValueError: see `to_tokens`, or if texts are given with a mask or a cache.
    """
    if isinstance(texts, Tensor) and texts.ndim != 1:
        return texts, attention_mask
    given = f"{[*texts.shape]}" if isinstance(texts, Tensor) else f"a {type(texts).__name__}"
    if attention_mask is not None:
        raise ValueError(padding_messages.second_mask(given))
    if kv_cache is not None:
        raise ValueError(f"tokens must be [batch, pos] if a cache is given; got {given}")
    batch = model.to_tokens(texts)
    return batch.tokens, batch.attention_mask


def _integers(tokens: Any) -> list[int]:
    """Return tokens as a list of Python integers.

    Raises:
        TypeError: if they are not integers, or are a set or bytes.
    """
    require_readable(tokens)
    # This also converts arrays of NumPy.
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(listed, Sequence) or not all(map(is_integer, listed)):
        raise TypeError(f"a text must be a string or a list of integers; got {shown(tokens)}")
    return [*map(index, listed)]
