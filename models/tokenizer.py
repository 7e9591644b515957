"""Tokenizers: one token per character, or any that the library `tokenizers` can read."""

import re
from collections.abc import Collection, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from models.files import library, read_json, read_object

if TYPE_CHECKING:
    import tokenizers

# File names of a vocabulary and its merges, by OpenAI and by Hugging Face.
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
# Tokens that no merge makes: <|endoftext|>, <s>, and fairseq's filler words.
_SPECIAL = re.compile(r"<.+>|madeupword\d+")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; no special token is added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, including special ones."""

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, for display."""


class CharTokenizer:
    """One token per character.

    Args:
        characters: the vocabulary; a character's index in it is its token.

    Raises:
        ValueError: if the characters are not single and distinct.

    >>> tokenizer = CharTokenizer.of("hello world")
    >>> tokenizer.encode("hole")
    [3, 5, 4, 2]
    >>> tokenizer.decode([3, 2, 4, 4, 5])
    'hello'
    """

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = tuple(characters)
        self._token = {character: token for token, character in enumerate(self.characters)}
        if len(self._token) != len(self.characters) or any(len(c) != 1 for c in self.characters):
            raise ValueError(
                f"a vocabulary must be of distinct single characters; got {characters!r:.80}"
            )

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer of the characters in `text`, in order of code point."""
        return cls(sorted(set(text)))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. A ValueError names characters that are not in the vocabulary."""
        if unknown := sorted(set(text) - self._token.keys()):
            raise ValueError(
                f"characters must be in the vocabulary of {len(self.characters)}, "
                f"{''.join(self.characters)!r}; got {', '.join(map(repr, unknown))}"
            )
        return [self._token[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`. A ValueError names those outside the vocabulary."""
        return "".join(self.tokens_as_text(tokens))

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token. A ValueError names those outside the vocabulary."""
        return [self.characters[token] for token in _known(tokens, range(len(self.characters)))]


class SubwordTokenizer:
    """A tokenizer of the library `tokenizers`.

    It adds no special tokens, even if the tokenizer's template does. Special tokens written in the text
    are recognised. Texts are never truncated or padded. With byte-level tokens, decoding gives exactly
    the encoded text; many SentencePiece tokenizers drop a space at the beginning.

    Args:
        tokenizer: the library's tokenizer; its truncation and padding are switched off.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        library_ = library("tokenizers")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pieces = tokenizer.get_vocab(with_added_tokens=True)
        self._added = tokenizer.get_added_tokens_decoder().keys()
        self._byte_level = isinstance(tokenizer.decoder, library_.decoders.ByteLevel)
        signs = _byte_signs() if self._byte_level else {}
        self._bytes = {
            token: piece.encode() if token in self._added else _bytes_of(piece, signs)
            for piece, token in self._pieces.items()
        }
        # A BPE model without an unknown token and without all bytes drops characters in silence.
        of_bytes = signs.keys() or {f"<0x{byte:02X}>" for byte in range(256)}
        marks = not isinstance(tokenizer.model, library_.models.BPE) or tokenizer.model.unk_token
        self._drops = not marks and not of_bytes <= self._pieces.keys()

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`.

        Raises:
            ValueError: if the text has a lone surrogate, or characters without a token.
        """
        text.encode()  # raises for a lone surrogate, and names it
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self._drops and (dropped := self._dropped(text, found)):
            raise ValueError(f"characters must have tokens; got {', '.join(map(repr, dropped))}")
        return list(found.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        tokens = _known(tokens, self._bytes)
        if self._byte_level:  # the library would decode letters of added tokens as bytes
            return b"".join(self._bytes[token] for token in tokens).decode("utf-8", "replace")
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        r"""The text of each token, for display. Bytes that are not UTF-8 show as `\xe2`."""
        pieces = [self._bytes[token] for token in _known(tokens, self._bytes)]
        return [piece.decode("utf-8", "backslashreplace") for piece in pieces]

    def _dropped(self, text: str, found: "tokenizers.Encoding") -> list[str]:
        """The characters that a BPE model without an unknown token drops in silence."""
        spans = zip(found.ids, found.offsets, strict=True)
        added = {place for token, span in spans if token in self._added for place in range(*span)}
        rest = {character for place, character in enumerate(text) if place not in added}
        return sorted(c for c in rest if not self._letters(c) <= self._pieces.keys())

    def _letters(self, character: str) -> set[str]:
        """The letters that the model gets for a character."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = normalizer.normalize_str(character) if normalizer else character
        parts = splitter.pre_tokenize_str(text) if splitter else [(text, ())]
        return {letter for part, _ in parts for letter in part}


def byte_level(
    model: "tokenizers.models.BPE", add_prefix_space: bool = False
) -> "tokenizers.Tokenizer":
    """A tokenizer of the library for byte-level BPE, which splits texts by GPT-2's pattern."""
    library_ = library("tokenizers")
    tokenizer = library_.Tokenizer(model)
    tokenizer.pre_tokenizer = library_.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = library_.decoders.ByteLevel()
    return tokenizer


def tokenizer_from(path: Path) -> Tokenizer:
    """Loads the tokenizer in a directory or a tokenizer.json.

    In a directory it looks for these in order: vocabulary.json, a list of characters;
    tokenizer.json; encoder.json with vocab.bpe; vocab.json with merges.txt. With the last two it also
    reads added_tokens.json, tokenizer_config.json and special_tokens_map.json.

    Raises:
        FileNotFoundError: if the directory holds none of them.
        ImportError: if the library `tokenizers` is needed and missing.
        ValueError: if a file is damaged or describes another kind of tokenizer; it names the file.
    """
    if path.is_file():
        return _from_json(path)
    if (file := path / "vocabulary.json").is_file():
        return _characters(file)
    if (file := path / "tokenizer.json").is_file():
        return _from_json(file)
    for names in _PAIRS:
        vocabulary, merges = (path / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return _byte_pairs(vocabulary, merges)
    raise FileNotFoundError(
        f"{path} must hold vocabulary.json, tokenizer.json, "
        + " or ".join(" with ".join(names) for names in _PAIRS)
    )


def _characters(path: Path) -> CharTokenizer:
    characters = read_json(path)
    if not isinstance(characters, list) or not all(isinstance(c, str) for c in characters):
        raise ValueError(f"{path} must hold a list of characters; got {str(characters)[:40]}")
    try:
        return CharTokenizer(characters)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _from_json(path: Path) -> SubwordTokenizer:
    kind = library("tokenizers").Tokenizer
    try:
        return SubwordTokenizer(kind.from_file(str(path)))
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{path} must be a valid tokenizer.json: {error}") from None


def _byte_pairs(vocabulary: Path, merges: Path) -> SubwordTokenizer:
    """Loads GPT-2's two files, and the added and special tokens from the files beside them."""
    library_ = library("tokenizers")
    config = _beside(vocabulary, "tokenizer_config.json")
    kind = config.get("tokenizer_class") or _CLASSES[0]
    if kind not in _CLASSES or config.get("auto_map") or config.get("split_special_tokens"):
        rule = (
            "must hold a tokenizer.json, because its tokenizer may not split texts as GPT-2's does"
        )
        raise ValueError(f"{vocabulary.parent} {rule}; got the tokenizer_class {kind!r}")
    try:
        pieces, pairs = library_.models.BPE.read_file(str(vocabulary), str(merges))
        model = library_.models.BPE(pieces, pairs)
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{vocabulary} and {merges.name} must be valid: {error}") from None
    tokens = _added(vocabulary, config)
    made = {first + second for first, second in pairs} | tokens.keys()
    unmade = [piece for piece in pieces if len(piece) > 1 and piece not in made]
    if plain := [piece for piece in unmade if not _SPECIAL.fullmatch(piece)]:
        raise ValueError(f"{merges} must make all pieces of {vocabulary.name}; got no {plain[:5]}")
    tokens |= {piece: {} for piece in unmade}
    tokenizer = byte_level(model, bool(config.get("add_prefix_space")))
    flags = {piece: {n: token.get(n, False) for n in _FLAGS} for piece, token in tokens.items()}
    tokenizer.add_tokens([library_.AddedToken(piece, **flags[piece]) for piece in tokens])
    for piece, token in tokens.items():
        expected, given = tokenizer.token_to_id(piece), token.get("id", pieces.get(piece))
        if given != expected:
            where = f"{vocabulary.parent}: the number of the added token {piece!r}"
            raise ValueError(f"{where} must be {expected}; got {given}")
    return SubwordTokenizer(tokenizer)


def _added(vocabulary: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tokens that are recognised before a text is split, with their numbers and flags."""
    older = _beside(vocabulary, "added_tokens.json")
    tokens: dict[str, dict[str, Any]] = {piece: {"id": number} for piece, number in older.items()}
    for number, token in config.get("added_tokens_decoder", {}).items():
        tokens[token["content"]] = {**token, "id": int(number)}
    # The library numbers new tokens in order of addition.
    tokens = dict(sorted(tokens.items(), key=lambda item: item[1]["id"]))
    more = _beside(vocabulary, "special_tokens_map.json")
    for name, value in [*config.items(), *more.items()]:
        if name.endswith("_token") and isinstance(value, str | dict):  # not add_bos_token
            value = [value]
        elif name not in ("additional_special_tokens", "extra_special_tokens"):
            continue
        for token in value.values() if isinstance(value, dict) else value or ():
            described = {"content": token} if isinstance(token, str) else token
            tokens.setdefault(described["content"], described)
    return tokens


def _beside(file: Path, name: str) -> dict[str, Any]:
    path = file.with_name(name)
    return read_object(path) if path.is_file() else {}


def _bytes_of(piece: str, signs: Mapping[str, int]) -> bytes:
    """The bytes of a vocabulary's piece, in byte-level or SentencePiece notation."""
    if signs.keys() >= set(piece):
        return bytes(signs[sign] for sign in piece)
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


def _byte_signs() -> dict[str, int]:
    """A map from the characters of a byte-level vocabulary to bytes.

    Printable Latin-1 characters map to themselves. Characters from 256 on map to the other bytes in
    order (`bytes_to_unicode` in GPT-2's encoder.py).
    """
    alphabet = sorted(library("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    printable = {sign: ord(sign) for sign in alphabet if ord(sign) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(alphabet[len(printable) :], others, strict=True))


def _known(tokens: Sequence[int], known: Collection[int]) -> list[int]:
    """The tokens as plain integers, after checking that all are `known`."""
    tokens = [index(token) for token in tokens]
    if outside := [token for token in tokens if token not in known]:
        raise ValueError(
            f"tokens must be among the vocabulary's {len(known)}, 0 to {max(known, default=-1)}; "
            f"got {outside[:5]}"
        )
    return tokens
