"""Charsmaps: the tables by which SentencePiece normalises texts.

1. A table maps sequences of characters to texts, such as `ﬁ` to `fi`. It is a trie over the
   bytes of the sequences (`_Trie`).
2. At each position of a text, replace the longest sequence that is in the table, and continue after
   it. If no sequence fits, keep one character.

`tokenizers.normalizers.Precompiled` reads the same tables with a different rule. It replaces a
whole grapheme of up to five bytes with the text of the shortest sequence that fits. For example, if
an accent follows a wide space, it replaces both with a plain space, and the accent is lost. In
longer graphemes it finds only sequences of one character.

The format is defined in SentencePiece's src/normalizer.cc. A table contains the number of bytes of
a double array (darts-clone), then this array of 32-bit units, then the texts. Each text ends with a
zero byte.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hooks.base import library

if TYPE_CHECKING:
    import tokenizers

_ROOT = 0
# The largest number of cached pairs. The pairs use some ten megabytes.
_MOST_PAIRS = 1 << 17


class Charsmap:
    """A normalizer that replaces the longest known sequence at each position of a text.

    Args:
        data: the bytes of the table, in the format of SentencePiece.

    Raises:
        ValueError: if the table is damaged.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._trie = _Trie(data)
        # Pairs of characters whose first character is not replaced.
        self._unchanged: set[str] = set()

    def __reduce__(self) -> tuple[type["Charsmap"], tuple[bytes]]:
        return Charsmap, (self._data,)

    def before(self, tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
        """Return a copy of a library tokenizer that first normalises texts with this table.

        The copy shares the vocabulary of the original. The library cannot write the copy to a file.
        """
        library_ = library("tokenizers")
        copied = library_.Tokenizer(tokenizer.model)
        copied.pre_tokenizer, copied.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
        copied.post_processor = tokenizer.post_processor
        steps = [library_.normalizers.Normalizer.custom(self)]
        if tokenizer.normalizer is not None:
            steps.append(tokenizer.normalizer)
        copied.normalizer = library_.normalizers.Sequence(steps)
        copied.add_tokens(
            [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
        )
        return copied

    def normalize(self, text: "tokenizers.NormalizedString") -> None:
        """Normalise a text of the library in place.

        The library still knows the offsets of its characters.
        """
        before = text.normalized
        replaced = [*self._replaced(before)]
        if not replaced:
            return
        used = set(before).union(*(new for _, _, new in replaced))
        # At a given position, the library can only exchange one character for another. So a
        # private-use character represents each text that is not one character long, and the rest of
        # each sequence. At the end, all of these are replaced at once.
        free = (sign for sign in map(chr, range(0xF0000, 0x110000)) if sign not in used)
        characters = [*before]
        signs = {"": next(free)}
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
        """Yield the start, the end and the new text of each sequence that is replaced."""
        end = 0
        for start, pair in enumerate(map(str.__add__, text, text[1:] + "\0")):
            if start < end or pair in self._unchanged:
                continue
            end, new, read = self._longest(text, start)
            if new is not None:
                yield start, end, new
            elif read <= 2:
                if len(self._unchanged) == _MOST_PAIRS:
                    self._unchanged.clear()
                self._unchanged.add(pair)

    def _longest(self, text: str, start: int) -> tuple[int, str | None, int]:
        """Return the longest sequence of the table that begins at the character `start` of a text.

        Returns:
            The index after the last character of the sequence; the text that replaces the sequence;
            and the number of characters that were read from `start` on, which may be more than the
            sequence has. If the table has no sequence at `start`, the index is `start + 1`, and the
            text is None.
        """
        node = _ROOT
        end = start + 1
        new = None
        for after in range(start + 1, len(text) + 1):
            step = self._trie.step(node, text[after - 1])
            if step is None:
                return end, new, after - start
            node, known = step
            if known is not None:
                end = after
                new = known
        return end, new, len(text) - start + 1


class _Trie:
    """A double array, read one character at a time.

    Each unit of the array is a node of the trie. It contains the offset of the node's children, a
    label, and a bit that is set if a sequence ends at the node. The index of a child is the
    exclusive or of the node's index, the node's offset and the byte of the child. The child with
    byte 0 contains the position of the text of a sequence that ends at the node.

    Raises:
        ValueError: if a unit leads out of the array, or to no text. This is checked at once,
            because the library ignores errors that are raised later, while it normalises.
    """

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<I", data) if len(data) >= 4 else (0,)
        if not 4 <= size <= len(data) - 4 or size % 4:
            raise ValueError(
                f"a charsmap must begin with the size of its trie; got {size} of {len(data)} bytes"
            )
        units = np.frombuffer(data, "<u4", size // 4, 4)
        texts = data[4 + size :]
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
        """Return the node after a character, and the text that replaces the sequence so far.

        The text is None if no sequence ends here. The result is None if no sequence continues with
        this character.
        """
        for byte in character.encode():
            node ^= _offset(self._units[node]) ^ byte
            if not byte or self._units[node] & 0x800000FF != byte:
                return None
        if not self._units[node] >> 8 & 1:
            return node, None
        return node, self._texts[self._units[node ^ _offset(self._units[node])] & 0x7FFFFFFF]


def _offset(unit: Any) -> Any:
    """Return the offset of the children of a unit, or of each unit in an array.

    The offset is in bits 10 to 30. It is multiplied by 256 if bit 9 is set.
    """
    return (unit >> 10) << ((unit & 1 << 9) >> 6)
