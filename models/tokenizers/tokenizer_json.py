"""The tokenizers that Hugging Face's tokenizer.json files describe."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.tokenizers.vocabulary import as_known, byte_signs, check_encodable, library, read

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    """What a Hugging Face tokenizer.json describes, done by the library tokenizers.

    No special token is added, whatever the file's template; one that is written in the text is
    recognised as the file says. Texts are never cut off or padded, also where the file asks for it.

    Args:
        path: the file.

    Raises:
        ImportError: without the library tokenizers.
        FileNotFoundError: if the file is not there.
        ValueError: naming the file, if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        tokenizers = library("tokenizers")
        text = read(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing more particular.
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._known = set(vocabulary.values())
        self._added = self._tokenizer.get_added_tokens_decoder().keys()
        steps = _steps(json.loads(text).get("decoder"))
        kinds = {step["type"] for step in steps}
        self._of_bytes = kinds == {"ByteLevel"}
        self._signs = byte_signs() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        # Other kinds mark or refuse what they have no token for; this one leaves it out.
        model, complete = self._tokenizer.model, self._signs.keys() <= vocabulary.keys()
        self._drops = (
            isinstance(model, tokenizers.models.BPE)
            and model.unk_token is None
            and not (self._signs and complete)
        )
        self._replaced = [pair for step in steps for pair in _replacement(step)]

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`.

        Raises:
            ValueError: if the text has a lone surrogate, or characters that the file has no token for
                and no way to mark as unknown.
        """
        check_encodable(text)
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # The library raises nothing more particular.
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from None
        if self._drops:
            self._check_whole(text, found)
        return list(found.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` as the file's decoder has it; bytes that are no UTF-8 become U+FFFD.

        Many files of SentencePiece's kind drop the space that the text begins with.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        tokens = as_known(tokens, self._known)
        if self._of_bytes:
            # The library would take the letters of added tokens for the signs of bytes.
            return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def tokens_as_text(self, tokens: Sequence[int]) -> list[str]:
        r"""The text of each token, for display; bytes that are no UTF-8 by themselves show as `\xe2`.

        Raises:
            ValueError: naming the tokens outside the vocabulary.
        """
        tokens = as_known(tokens, self._known)
        return [self._bytes(token).decode("utf-8", "backslashreplace") for token in tokens]

    def _bytes(self, token: int) -> bytes:
        piece: str = self._tokenizer.id_to_token(token)
        if token not in self._added and self._signs.keys() >= set(piece):
            return bytes(self._signs[sign] for sign in piece)
        if self._has_byte_tokens and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        return self._spaced(piece).encode()

    def _spaced(self, piece: str) -> str:
        for sign, meant in self._replaced:
            piece = piece.replace(sign, meant)
        return piece

    def _check_whole(self, text: str, found: Any) -> None:
        """Refuses a text of which the library has left characters out, as it does without a word."""
        added = {
            place
            for token, span in zip(found.ids, found.offsets, strict=True)
            if token in self._added
            for place in range(*span)
        }
        rest = {character for place, character in enumerate(text) if place not in added}
        if lost := sorted(filter(self._loses, rest)):
            raise ValueError(f"the tokenizer has no token for {', '.join(map(repr, lost))}")

    def _loses(self, character: str) -> bool:
        clean = getattr(self._tokenizer.normalizer, "normalize_str", str)(character)
        # Files may put a space before every text, and elsewhere drop spaces on purpose.
        meant = clean if self._signs else self._spaced(clean).strip()
        alone = self._tokenizer.encode(character, add_special_tokens=False).ids
        return meant.encode() not in b"".join(map(self._bytes, alone))


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The parts of a decoder, as the file has it."""
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replacement(step: dict[str, Any]) -> list[tuple[str, str]]:
    """What a part of a decoder writes for what."""
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []
