"""Charsmaps: the tables by which SentencePiece normalises texts.

1. A table maps sequences of characters to texts, such as `ﬁ` to `fi`. It is a trie over their bytes (`_Trie`).
2. At each position of a text, replace the longest sequence that is in the table, and continue after it. If no sequence
   fits, keep one character.

`tokenizers.normalizers.Precompiled` reads the same tables by another rule. It replaces a whole grapheme of up to five bytes
by the text of the shortest sequence that fits, so an accent after a wide space is lost. In longer graphemes it finds only
sequences of one character.

The format is that of SentencePiece's src/normalizer.cc: the number of bytes of a double array (darts-clone), this array of
32-bit units, and the texts, each with a zero byte behind it.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hooks.base import library

if TYPE_CHECKING:
    import tokenizers

_ROOT = 0
_MOST_PAIRS = 1 << 17  # that are remembered, some ten megabytes


class Charsmap:
    """A normalizer that replaces the longest known sequence at each place of a text.

    Args:
        data: the table, as files of SentencePiece hold it.

    Raises:
        ValueError: if it is no such table.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._trie = _Trie(data)
        self._kept: set[str] = set()  # pairs of characters, the first of which stays

    def __reduce__(self) -> tuple[type["Charsmap"], tuple[bytes]]:
        return Charsmap, (self._data,)

    def before(self, tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
        """Return a copy of a tokenizer of the library that normalises with this table first. Both share one vocabulary.

        The library cannot write the copy to a file.
        """
        library_ = library("tokenizers")
        made = library_.Tokenizer(tokenizer.model)
        made.pre_tokenizer, made.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
        made.post_processor = tokenizer.post_processor
        steps = [library_.normalizers.Normalizer.custom(self)]
        if tokenizer.normalizer is not None:
            steps.append(tokenizer.normalizer)
        made.normalizer = library_.normalizers.Sequence(steps)
        made.add_tokens(
            [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
        )
        return made

    def normalize(self, text: "tokenizers.NormalizedString") -> None:
        """Normalise a text of the library in place, which keeps the places of its characters."""
        before = text.normalized
        replaced = [*self._replaced(before)]
        if not replaced:
            return
        used = set(before).union(*(new for _, _, new in replaced))
        # At a given place, the library can only exchange one character for another. So a character of private use stands for
        # each text of another length, and for the rest of a sequence, until all are replaced at once.
        free = (sign for sign in map(chr, range(0xF0000, 0x110000)) if sign not in used)
        characters, signs = [*before], {"": next(free)}
        for start, end, new in replaced:
            if len(new) != 1 and new not in signs:
                signs[new] = next(free)
            characters[start] = signs.get(new, new)
            characters[start + 1 : end] = signs[""] * (end - start - 1)
        following = iter(characters)
        text.map(lambda _: next(following))
        for new, sign in signs.items():
            text.replace(sign, new)

    def _replaced(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield where each sequence that is replaced begins and ends, and what replaces it."""
        end = 0
        for start, pair in enumerate(map(str.__add__, text, text[1:] + "\0")):
            if start < end or pair in self._kept:
                continue
            end, new, read = self._longest(text, start)
            if new is not None:
                yield start, end, new
            elif read <= 2:
                if len(self._kept) == _MOST_PAIRS:
                    self._kept.clear()
                self._kept.add(pair)

    def _longest(self, text: str, start: int) -> tuple[int, str | None, int]:
        """Return the end of the longest sequence from a place on, what replaces it, and how many characters show that.

        Where there is none, the sequence is one character, and nothing replaces it.
        """
        node, end, new = _ROOT, start + 1, None
        for after in range(start + 1, len(text) + 1):
            step = self._trie.step(node, text[after - 1])
            if step is None:
                return end, new, after - start
            node, known = step
            if known is not None:
                end, new = after, known
        return end, new, len(text) - start + 1


class _Trie:
    """A double array, read one character at a time.

    Each unit has the offset of its children, a label, and whether a sequence ends there. A child is at the exclusive or of
    that offset and its byte. Behind the end of a sequence is a unit with the place of its text.

    Raises:
        ValueError: if a unit leads out of the array, or to no text. The library would keep silent about an error later.
    """

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<I", data) if len(data) >= 4 else (0,)
        if not 4 <= size <= len(data) - 4 or size % 4:
            raise ValueError(
                f"a charsmap must begin with the size of its trie; got {size} of {len(data)} bytes"
            )
        units, texts = np.frombuffer(data, "<u4", size // 4, 4), data[4 + size :]
        children = np.arange(len(units)) ^ _offset(units)
        is_text = units >> 31 == 1
        ends = ~is_text & (units >> 8 & 1 == 1)
        if (children[~is_text] | 255 >= len(units)).any() or not is_text[children[ends]].all():
            raise ValueError("a charsmap must be whole; its trie is damaged")
        try:
            self._texts = {
                start: texts[start : texts.index(b"\0", start)].decode()
                for start in np.unique(units[is_text] & 0x7FFFFFFF).tolist()
            }
        except ValueError:
            raise ValueError("a charsmap must be whole; its texts are damaged") from None
        self._units: list[int] = units.tolist()

    def step(self, node: int, character: str) -> tuple[int, str | None] | None:
        """Return the node behind a character, and the text for the sequence so far, or None; None if no sequence goes on so."""
        for byte in character.encode():
            node ^= _offset(self._units[node]) ^ byte
            if not byte or self._units[node] & 0x800000FF != byte:
                return None
        if not self._units[node] >> 8 & 1:
            return node, None
        return node, self._texts[self._units[node ^ _offset(self._units[node])] & 0x7FFFFFFF]


def _offset(unit: Any) -> Any:
    """The offset of a unit's children, or of those of an array of units: in bits 10 to 30, times 256 if bit 9 is set."""
    return (unit >> 10) << ((unit & 1 << 9) >> 6)
