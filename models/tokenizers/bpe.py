"""GPT-2's byte-pair encoding, from the two files that describe it."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path

from models.tokenizers.special import special_tokens
from models.tokenizers.vocabulary import (
    as_known,
    byte_signs,
    check_encodable,
    few,
    library,
    read,
    read_json,
)

# How a text is cut into pieces that no token crosses. GPT-2's encoder.py has
# 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# and this is tiktoken's spelling, which cuts likewise and backtracks less on long runs of spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# What a vocabulary may hold without a merge that makes it: tokens such as <|endoftext|> and <s>, and
# the words that fairseq fills a vocabulary up with.
_SPECIAL = re.compile(r"<.+>|madeupword\d+")


class BytePairTokenizer:
    """Byte-level byte-pair encoding with GPT-2's pattern, done by tiktoken.

    No special token is added; one that is written in the text, such as `<|endoftext|>`, is
    recognised. Decoding the tokens of a text gives the text.

    Args:
        vocabulary: the token of each piece of text; a piece's bytes are written as the signs that
            `models.tokenizers.vocabulary.byte_signs` gives.
        merges: which two pieces are joined, first come first; a space stands between the two.
        added: tokens besides the vocabulary's, or among them, that are recognised in a text before
            it is cut, by the text that they stand for.
        named: what tokens that are recognised likewise are called, by their text; each is among the
            vocabulary or the added ones.

    Raises:
        ImportError: without the library tiktoken.
        ValueError: if the tokens are not 0, 1, 2, ..., each once; if a byte has no token; if a merge
            joins what no earlier one makes, makes what has no token or is made already, or is never
            reached; if a piece that no merge makes is neither added nor named, and does not look
            special (is not in angle brackets); or if two tokens that are recognised may overlap.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Sequence[str],
        added: Mapping[str, int] | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        vocabulary, recognised = _with_added(vocabulary, added or {}, named or {})
        _check_numbering(vocabulary)
        signs = byte_signs()
        rest = dict(vocabulary)
        if bare := [sign for sign in signs if sign not in rest]:
            raise ValueError(f"the vocabulary lacks the signs of bytes {few(bare)}")
        # To tiktoken a number is also a merge's priority; `_tokens` holds the vocabulary's own.
        numbers = {bytes([byte]): number for number, byte in enumerate(signs.values())}
        self._tokens = [rest.pop(sign) for sign in signs]
        pairs = []
        for merge in merges:
            first, second = pair = _pair(merge, signs)
            piece = merge.replace(" ", "")
            if not (first in numbers and second in numbers and piece in rest):
                raise ValueError(
                    f"the merge {merge!r} must join bytes, or what merges before it make, into a piece "
                    "that the vocabulary has and no merge before it makes"
                )
            numbers[first + second] = len(numbers)
            self._tokens.append(rest.pop(piece))
            pairs.append(pair)
        if plain := [p for p in rest if p not in recognised and not _SPECIAL.fullmatch(p)]:
            raise ValueError(f"no merge makes {few(plain)}, and the vocabulary has it")
        _check_reached(pairs, numbers)
        if signs_of := [p for p in recognised if p not in rest and not p.isascii()]:
            raise ValueError(
                f"{few(signs_of)} is written in signs of bytes in the vocabulary, and cannot be "
                "recognised as it is written"
            )
        recognised = rest | recognised
        _check_apart(recognised)
        special = {piece: number for number, piece in enumerate(recognised, start=len(numbers))}
        self._tokens += recognised.values()
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._encoding = library("tiktoken").Encoding(
            "byte pairs", pat_str=PATTERN, mergeable_ranks=numbers, special_tokens=special
        )

    @classmethod
    def of(cls, vocabulary: Path, merges: Path) -> "BytePairTokenizer":
        """The tokenizer of two files, GPT-2's encoder.json and vocab.bpe or others of their form.

        Added and special tokens are those that Hugging Face's files in the same directory give:
        tokenizer_config.json, added_tokens.json, special_tokens_map.json.

        Raises:
            ImportError: without the library tiktoken.
            FileNotFoundError: if a file is not there.
            ValueError: naming the file that is damaged or asks for another tokenizer, or both where
                they do not fit each other.
        """
        # tiktoken's own reader keeps copies by path, and would give those when a file has changed.
        described = read_json(vocabulary)
        if not isinstance(described, dict) or any(type(t) is not int for t in described.values()):
            raise ValueError(f"{vocabulary} does not map pieces of text to whole numbers")
        lines = read(merges).split("\n")
        if lines[0].startswith("#version"):
            del lines[0]
        beside = special_tokens(vocabulary.parent)
        try:
            return cls(described, [line for line in lines if line], *beside)
        except ValueError as error:
            raise ValueError(f"{vocabulary} with {merges.name}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`.

        Raises:
            ValueError: if the text has a lone surrogate, which no UTF-8 can hold.
        """
        check_encodable(text)
        return [self._tokens[n] for n in self._encoding.encode(text, allowed_special="all")]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        return b"".join(self._pieces(tokens)).decode("utf-8", "replace")

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        r"""The text of each token, for display; bytes that are no UTF-8 by themselves show as `\xe2`.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        return [piece.decode("utf-8", "backslashreplace") for piece in self._pieces(tokens)]

    def _pieces(self, tokens: Sequence[int]) -> list[bytes]:
        known = as_known(tokens, self._numbers)
        return self._encoding.decode_tokens_bytes([self._numbers[token] for token in known])


def _with_added(
    vocabulary: Mapping[str, int], added: Mapping[str, int], named: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """The vocabulary with the added tokens, and those of it that are recognised in a text."""
    for piece, token in added.items():
        if vocabulary.get(piece, token) != token:
            raise ValueError(
                f"the added token {piece!r} is {token}, and in the vocabulary {vocabulary[piece]}"
            )
    whole = {**vocabulary, **added}
    for piece, name in named.items():
        if piece not in whole:
            raise ValueError(
                f"{name} is {piece!r}, which neither the vocabulary nor the added tokens have"
            )
    return whole, {piece: whole[piece] for piece in (*added, *named)}


def _check_apart(pieces: Collection[str]) -> None:
    """Refuses two pieces that may overlap in a text.

    Of two that begin at one place, tiktoken takes either, and of two that begin at different places,
    transformers may take the later.
    """
    beginnings: dict[str, set[str]] = defaultdict(set)
    for piece in pieces:
        for length in range(1, len(piece) + 1):
            beginnings[piece[:length]].add(piece)
    for piece in pieces:
        for start in range(len(piece)):
            for end in range(start + 1, len(piece) + 1):
                part = piece[start:end]
                meets = beginnings.get(part, set()) - {piece}
                if others := {each for each in meets if end == len(piece) or each == part}:
                    raise ValueError(
                        f"tokens that are recognised in a text do not overlap, as {piece!r} and "
                        f"{min(others)!r} may"
                    )


def _check_numbering(vocabulary: Mapping[str, int]) -> None:
    times = Counter(vocabulary.values())
    missing = sorted(set(range(len(vocabulary))) - times.keys())
    wrong = sorted(t for t in times if times[t] > 1 or not 0 <= t < len(vocabulary))
    if missing:
        raise ValueError(
            f"the tokens of a vocabulary of {len(vocabulary)} are 0 to {len(vocabulary) - 1}, each "
            f"once; missing: {few(missing)}; repeated or outside: {few(wrong)}"
        )


def _pair(merge: str, signs: Mapping[str, int]) -> tuple[bytes, bytes]:
    """The two pieces that a merge joins, as bytes."""
    try:
        first, second = (bytes(signs[sign] for sign in piece) for piece in merge.split(" "))
    except (KeyError, ValueError):
        raise ValueError(f"the merge {merge!r} is not two pieces of byte signs") from None
    return first, second


def _check_reached(pairs: Sequence[tuple[bytes, bytes]], numbers: Mapping[bytes, int]) -> None:
    """Refuses a merge that is never reached, because another one comes first across its middle.

    tiktoken joins any two neighbours that together are a token, and byte-pair encoding only those that
    are listed. They agree if each token's bytes, left to tiktoken's rule, end as the listed pair.
    """
    # What stands at the left and the right edge of a piece while it is made, and which merge ends that.
    lefts: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    rights: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    for first, second in pairs:
        number = numbers[first + second]
        for (before, ends), (after, stops) in product(
            [*rights[first], (first, number)], [*lefts[second], (second, number)]
        ):
            joined = numbers.get(before + after, number)
            # Of two places for the same merge the left one is first.
            if joined < ends and joined <= stops:
                raise ValueError(
                    f"the merge of {first!r} and {second!r} is never reached, for {before!r} and "
                    f"{after!r} are joined before"
                )
        lefts[first + second] = [*lefts[first], (first, number)]
        rights[first + second] = [*rights[second], (second, number)]
