"""What a tokenizer is, the one whose tokens are characters, and finding the one in a directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from models.tokenizers.bpe import BytePairTokenizer
from models.tokenizers.tokenizer_json import JsonTokenizer
from models.tokenizers.vocabulary import as_known, read_json

# Files that come in twos: pieces with their tokens, and merges.
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; none is added that the text does not hold."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, that of special ones included."""

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, for display."""


class CharTokenizer:
    """One token a character.

    Args:
        characters: the vocabulary; a character's place in it is its token.

    Raises:
        ValueError: if a character stands twice, or something longer than a character is given.
    """

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = tuple(characters)
        self._token = {character: token for token, character in enumerate(self.characters)}
        if len(self._token) != len(self.characters) or any(len(c) != 1 for c in self.characters):
            raise ValueError("a vocabulary is made of distinct single characters")

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer of the characters that occur in `text`, in order of code point."""
        return cls(sorted(set(text)))

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`.

        Raises:
            ValueError: naming the characters that the vocabulary lacks.
        """
        unknown = sorted(set(text) - self._token.keys())
        if unknown:
            raise ValueError(
                f"the tokenizer has no token for {', '.join(map(repr, unknown))}; "
                f"its {len(self.characters)} characters are {''.join(self.characters)!r}"
            )
        return [self._token[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        return "".join(self.tokens_as_text(tokens))

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        return [self.characters[token] for token in as_known(tokens, range(len(self.characters)))]


def tokenizer_from(directory: Path) -> Tokenizer:
    """The tokenizer that a directory's files describe.

    They are looked for in this order: vocabulary.json, a list of characters, which is this project's
    own; tokenizer.json; encoder.json with vocab.bpe; vocab.json with merges.txt. With the last two,
    added_tokens.json, tokenizer_config.json and special_tokens_map.json count as well.

    Raises:
        FileNotFoundError: if there is none of them, or only one of two that go together.
        ImportError: naming the library that the files need, where it is missing.
        ValueError: naming the file that is damaged, or asks for what cannot be expressed.
    """
    if (path := directory / "vocabulary.json").is_file():
        return _characters(path)
    if (path := directory / "tokenizer.json").is_file():
        return JsonTokenizer(path)
    pairs = [(directory / vocabulary, directory / merges) for vocabulary, merges in _PAIRS]
    for pair in pairs:
        if all(path.is_file() for path in pair):
            return BytePairTokenizer.of(*pair)
    for pair in pairs:
        for path, other in (pair, pair[::-1]):
            if path.is_file():
                raise FileNotFoundError(f"{path} needs {other.name} beside it, and it is not there")
    raise FileNotFoundError(
        f"{directory} holds no tokenizer: neither vocabulary.json, nor tokenizer.json, nor "
        + ", nor ".join(" with ".join(pair) for pair in _PAIRS)
    )


def _characters(path: Path) -> CharTokenizer:
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ValueError(f"{path} is not a list of characters")
    try:
        return CharTokenizer(listed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
