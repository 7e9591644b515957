"""A tokenizer whose tokens are characters."""

from collections.abc import Sequence


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
        outside = [token for token in tokens if not 0 <= token < len(self.characters)]
        if outside:
            raise ValueError(f"tokens are 0 to {len(self.characters) - 1}, not {outside[:5]}")
        return [self.characters[token] for token in tokens]
