"""Tokenizers: one token per character, or any tokenizer of the library `tokenizers`."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from hooks.base import library, require_kind, shown
from models.text.charsmap import Charsmap
from models.text.templates import ChatTemplate, template_of

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TOKEN = "\0 no token"


@runtime_checkable
class Tokenizer(Protocol):
    """An object that converts texts to tokens and tokens to texts.

    Attributes:
        bos_token_ids: the tokens that a model expects before a text.
        eos_token_ids: the tokens that end a text.

    >>> isinstance(CharTokenizer("abc"), Tokenizer)
    True
    """

    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`. No special token is added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens."""

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, for display."""


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return an object as a `Tokenizer`.

    Args:
        tokenizer: an object with the methods and attributes of `Tokenizer`, a fast tokenizer of
            `transformers`, or None.

    Returns:
        The tokenizer, or None if `tokenizer` is None. A tokenizer of `transformers` is converted to
        a `SubwordTokenizer`.

    Raises:
        TypeError: if the object is not a tokenizer, or if it is a slow tokenizer of `transformers`.
    """
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise TypeError(
            "a tokenizer must have encode, decode, tokens_as_text, bos_token_ids and "
            "eos_token_ids, or be a fast tokenizer of transformers; got a "
            f"{type(tokenizer).__name__}"
        )
    copied = library("tokenizers").Tokenizer.from_str(backend.to_str())
    end = tokenizer.eos_token_id
    begin = tokenizer.bos_token_id
    wrapped = SubwordTokenizer(copied, () if end is None else (end,), begin)
    wrapped.pad_token_id = tokenizer.pad_token_id
    wrapped.mask_token_id = tokenizer.mask_token_id
    wrapped.note_template(tokenizer.chat_template, tokenizer.special_tokens_map)
    return wrapped


class CharTokenizer:
    """A tokenizer with one token per character. It has no tokens that begin or end a text.

    Args:
        characters: the vocabulary. The token of a character is its index in the vocabulary.

    Attributes:
        vocab_size: the number of tokens.

    Raises:
        ValueError: if the vocabulary contains a character twice, or a string that is not one
            character.

    >>> tokenizer = CharTokenizer.of("hello world")
    >>> tokenizer.encode("hole")
    [3, 5, 4, 2]
    >>> tokenizer.decode([3, 2, 4, 4, 5])
    'hello'
    """

    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    characters: tuple[str, ...]
    vocab_size: int

    def __init__(self, characters: Sequence[str]) -> None:
        require_kind("characters", characters, Sequence, words="a text, or a list of characters")
        self.characters = tuple(characters)
        self.vocab_size = len(self.characters)
        self._token = {character: token for token, character in enumerate(self.characters)}
        is_repeated = len(self._token) != len(self.characters)
        if is_repeated or any(len(character) != 1 for character in self.characters):
            raise ValueError(
                f"a vocabulary must contain different single characters; got {characters!r:.80}"
            )

    def __repr__(self) -> str:
        return f"CharTokenizer({self.vocab_size} characters)"

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """Return the tokenizer of the characters in `text`, in the order of their code points."""
        return cls(sorted(set(text)))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`.

        Raises:
            ValueError: if a character is not in the vocabulary. The error names these characters.
        """
        if unknown := sorted(set(text) - self._token.keys()):
            raise ValueError(
                f"characters must be in the vocabulary of {len(self.characters)} characters, "
                f"{''.join(self.characters)!r}; got {', '.join(map(repr, unknown))}"
            )
        return [self._token[character] for character in text]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the first character and the end of each token in a text."""
        return [(n, n + 1) for n in range(len(text))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`.

        Raises:
            ValueError: if a token is not in the vocabulary. The error names these tokens.
        """
        return "".join(self.tokens_as_text(tokens))

    def tokens_as_text(self, tokens: Shaped[Tensor, "..."] | Sequence[Any]) -> list[Any]:
        """Return the text of each token, in lists of the shape of the tokens.

        Raises:
            ValueError: if a token is not in the vocabulary. The error names these tokens.
        """
        known = range(len(self.characters))
        return pieces_of(tokens, lambda token: self.characters[_known([token], known)[0]])


class SubwordTokenizer:
    """A tokenizer of the library `tokenizers`.

    No special tokens are added to a text, even if the template of the tokenizer adds them. The
    attribute `bos_token_ids` contains the tokens that the template adds before a text. Special
    tokens that are written in a text are recognised. Texts are never truncated or padded. With
    byte-level tokens, decoding returns exactly the encoded text. Many SentencePiece tokenizers
    remove a space at the beginning.

    Args:
        tokenizer: the tokenizer of the library. Its truncation, padding and dropout are switched
            off.
        eos_token_ids: the tokens that end a text. The library does not know them. Default: no
            tokens.
        bos_token_id: the token that may begin a text, even if the template does not add it.
            Default: no token.
        charsmap: a table that normalises texts before the normalizer of the tokenizer. Default: no
            table.

    Attributes:
        vocab_size: the largest token plus 1. A model that reads these tokens needs a vocabulary of
            at least this size.
        closing_token_ids: the tokens that the template adds after a text.
        chat_template: the template of messages, or None if the files of the tokenizer contain no
            template.
        special_texts: the texts of special tokens by name, such as `bos_token`, for templates.
        pad_token_id: the token of padding, or None if the files name no such token.
        mask_token_id: the token at which a masked language model predicts, or None if the files
            name no such token.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        charsmap: Charsmap | None = None,
    ) -> None:
        library_ = library("tokenizers")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        example = tokenizer.encode("a", add_special_tokens=True)
        special = example.special_tokens_mask
        first = [*special, 0].index(0)
        after = [*reversed(special), 0].index(0)
        self.bos_token_ids: tuple[int, ...] = tuple(example.ids[:first])
        self.closing_token_ids: tuple[int, ...] = tuple(example.ids[len(special) - after :])
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template: ChatTemplate | None = None
        self.special_texts: Mapping[str, str] = {}
        self.pad_token_id: int | None = None
        self.mask_token_id: int | None = None
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().keys()
        self._byte_level = isinstance(tokenizer.decoder, library_.decoders.ByteLevel)
        signs = byte_signs() if self._byte_level else {}
        self._bytes = {
            token: piece.encode() if token in added else _bytes_of(piece, signs)
            for piece, token in tokenizer.get_vocab(with_added_tokens=True).items()
        }
        self.vocab_size = max(self._bytes) + 1
        # Without an unknown token, BPE silently drops unknown characters. With an unknown token
        # that is not in the vocabulary, it raises an error.
        if isinstance(tokenizer.model, library_.models.BPE):
            tokenizer.model.unk_token = tokenizer.model.unk_token or _NO_TOKEN
            # With dropout, the tokens of a text would be random.
            tokenizer.model.dropout = None
        self._charsmap = charsmap
        self._without_charsmap = tokenizer
        if charsmap is not None:
            self._tokenizer = charsmap.before(tokenizer)

    def note_template(self, source: Any, special: Mapping[str, Any]) -> None:
        """Store the template in the files of the tokenizer, and the texts of special tokens.

        Args:
            source: see `template_of`.
            special: the texts of special tokens by name. Values that are not strings are ignored.
        """
        texts = {name: str(text) for name, text in special.items() if isinstance(text, str)}
        self.special_texts = texts
        self.chat_template = template_of(source, texts)

    def __repr__(self) -> str:
        ends = "".join(
            f", {name} {ids}" for name, ids in vars(self).items() if name.endswith("_ids") and ids
        )
        return f"SubwordTokenizer({self.vocab_size} tokens{ends})"

    def __getstate__(self) -> dict[str, Any]:
        # The library cannot pickle a tokenizer with a charsmap, so `__setstate__` adds it again.
        return vars(self) | {"_tokenizer": self._without_charsmap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._charsmap is not None:
            self._tokenizer = self._charsmap.before(self._without_charsmap)

    def __deepcopy__(self, memo: Any) -> "SubwordTokenizer":
        # A copy would be slow, because vocabularies are large, and is not needed, because a
        # tokenizer does not change.
        return self

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`.

        Raises:
            ValueError: if the text contains a lone surrogate, or characters without a token.
        """
        # This raises an error that names a lone surrogate.
        text.encode()
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        # The library raises no more specific class of errors.
        except Exception as error:
            if _NO_TOKEN not in str(error):
                raise
            raise ValueError(
                f"each character of a text must have a token; got {text[:80]!r}"
            ) from None

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the first character and the end of each token in a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: if a token is not in the vocabulary. The error names these tokens.
        """
        tokens = _known(tokens, self._bytes)
        # In byte-level tokens each letter stands for a byte, but not in added tokens. The library
        # would decode the letters of added tokens as bytes too.
        if self._byte_level:
            return b"".join(self._bytes[token] for token in tokens).decode("utf-8", "replace")
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def tokens_as_text(self, tokens: Shaped[Tensor, "..."] | Sequence[Any]) -> list[Any]:
        r"""Return the text of each token, in lists of the shape of the tokens.

        A byte that is not part of a UTF-8 character is written as an escape with its value, such as
        `\xe2`.
        """
        return pieces_of(tokens, self._piece)

    def _piece(self, token: int) -> str:
        """Return the text of one token, for display."""
        return self._bytes[_known([token], self._bytes)[0]].decode("utf-8", "backslashreplace")


def byte_level(
    model: "tokenizers.models.BPE", patterns: Sequence[str] = (), add_prefix_space: bool = False
) -> "tokenizers.Tokenizer":
    """Return a tokenizer of the library for byte-level BPE.

    Args:
        model: the model of the library.
        patterns: the patterns that split texts, applied in this order. Default: the pattern of
            GPT-2.
        add_prefix_space: whether to add a space before a text. Default: False.
    """
    library_ = library("tokenizers")
    tokenizer = library_.Tokenizer(model)
    splitters = library_.pre_tokenizers
    words = [splitters.Split(library_.Regex(pattern), "isolated") for pattern in patterns]
    signs = splitters.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not patterns)
    tokenizer.pre_tokenizer = splitters.Sequence([*words, signs])
    tokenizer.decoder = library_.decoders.ByteLevel()
    return tokenizer


def frame_texts(
    tokenizer: "tokenizers.Tokenizer", before: Sequence[int], after: Sequence[int] = ()
) -> None:
    """Set the tokens that a library tokenizer adds before and after each text."""
    first = [*map(tokenizer.id_to_token, before)]
    last = [*map(tokenizer.id_to_token, after)]
    tokenizer.post_processor = library("tokenizers").processors.TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[*zip(first, before, strict=True), *zip(last, after, strict=True)],
    )


def _bytes_of(piece: str, signs: Mapping[str, int]) -> bytes:
    """Return the bytes of a token that is written in byte-level or SentencePiece notation."""
    if signs.keys() >= set(piece):
        return bytes(signs[sign] for sign in piece)
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


def byte_signs() -> dict[str, int]:
    """Return a map from the characters of a byte-level vocabulary to bytes.

    Printable Latin-1 characters map to themselves. The characters from 256 on map to the remaining
    bytes in order (`bytes_to_unicode` in GPT-2's encoder.py).
    """
    alphabet = sorted(library("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    printable = {sign: ord(sign) for sign in alphabet if ord(sign) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(alphabet[len(printable) :], others, strict=True))


def pieces_of(tokens: Any, piece: Callable[[int], str]) -> Any:
    """Return the text of one token, or of all tokens in lists of the same shape."""
    # This also converts arrays of NumPy.
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    # A text is a sequence of texts without end, and no sequence of tokens.
    if isinstance(tokens, Sequence) and not isinstance(tokens, str):
        return [pieces_of(part, piece) for part in tokens]
    return piece(tokens)


def _known(tokens: Sequence[int], known: Collection[int]) -> list[int]:
    """Return tokens as Python integers.

    Raises:
        TypeError: if they are not whole numbers.
        ValueError: if a token is not in `known`; the error names these tokens.
    """
    try:
        tokens = [index(token) for token in tokens]
    except TypeError:
        raise TypeError(f"tokens must be whole numbers; got {shown(tokens)}") from None
    if outside := [token for token in tokens if token not in known]:
        raise ValueError(
            f"tokens must be in the vocabulary of {len(known)}, 0 to {max(known, default=-1)}; "
            f"got {outside[:5]}"
        )
    return tokens
