"""Reads Mistral's tekken.json: the bytes of each token by rank, and a pattern that splits texts.

1. The first tokens are special ones, by number; the others follow in the order of their ranks.
2. Two tokens whose bytes make another are merged to it, the lowest rank first, as in tiktoken.
"""

import base64
from pathlib import Path
from typing import Any

from hooks.base import library, storage
from models.files import read_object
from models.text.tokenizer import SubwordTokenizer, byte_level, byte_signs, frame_texts

_BEGIN, _END = "<s>", "</s>"
# Files of the versions 3 and 7 may leave out their special tokens; these are they.
_SPECIAL = (
    f"<unk> {_BEGIN} {_END} [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def tokenizer_of_tekken(path: Path) -> SubwordTokenizer:
    """The tokenizer in a tekken.json.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged; it names the file.
    """
    data = read_object(path)
    with storage.one_error(path):
        return _made(data)


def _made(data: dict[str, Any]) -> SubwordTokenizer:
    library_, config = library("tokenizers"), data["config"]
    size, n_special = config["default_vocab_size"], config["default_num_special_tokens"]
    special = {n: f"<SPECIAL_{n}>" for n in range(n_special)}
    if data.get("special_tokens") is None and config["version"] in ("v3", "v7"):
        special |= enumerate(_SPECIAL.split())
    else:
        special |= {each["rank"]: each["token_str"] for each in data["special_tokens"]}
    signs = {byte: sign for sign, byte in byte_signs().items()}
    vocabulary = {piece: number for number, piece in special.items()}
    for entry in data["vocab"][: size - n_special]:
        token = base64.b64decode(entry["token_bytes"])
        vocabulary["".join(signs[byte] for byte in token)] = n_special + entry["rank"]
    if [*vocabulary.values()] != [*range(size)]:
        raise ValueError(f"its tokens must have the numbers 0 to {size - 1} in order, each once")
    merges = [
        (piece[:n], piece[n:])
        for piece in [*vocabulary][n_special:]
        for n in range(1, len(piece))
        if piece[:n] in vocabulary and piece[n:] in vocabulary
    ]
    # A text that is a token needs no merges.
    model = library_.models.BPE(vocabulary, merges, ignore_merges=True)
    tokenizer = byte_level(model, [config["pattern"]])
    tokenizer.add_special_tokens(
        [library_.AddedToken(special[n], special=True, normalized=False) for n in range(n_special)]
    )
    begin, end = (vocabulary[piece] for piece in (_BEGIN, _END))
    frame_texts(tokenizer, [begin])
    return SubwordTokenizer(tokenizer, (end,), begin)
