"""Read Mistral's tekken.json, which contains the bytes of each token by rank and a pattern to split
texts.

1. Number the special tokens first, then all other tokens in the order of their ranks.
2. Two tokens are merged if their joined bytes are a token. The token with the lowest rank is merged
   first, as in tiktoken.
"""

import base64
from pathlib import Path
from typing import Any

from hooks.base import library, storage
from models.files import read_object
from models.text.tokenizer import SubwordTokenizer, byte_level, byte_signs, frame_texts

_BEGIN, _END = "<s>", "</s>"
# Files of versions 3 and 7 may omit their special tokens. These are the special tokens of both
# versions.
_SPECIAL = (
    f"<unk> {_BEGIN} {_END} [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] "
    "[/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def tokenizer_of_tekken(path: Path) -> SubwordTokenizer:
    """Return the tokenizer in a tekken.json.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged. The error names the file.
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
        raise ValueError(f"its tokens must have the numbers 0 to {size - 1} in this order")
    merges = [
        (piece[:n], piece[n:])
        for piece in [*vocabulary][n_special:]
        for n in range(1, len(piece))
        if piece[:n] in vocabulary and piece[n:] in vocabulary
    ]
    # With ignore_merges, a text that is a token is not built from merges.
    model = library_.models.BPE(vocabulary, merges, ignore_merges=True)
    tokenizer = byte_level(model, [config["pattern"]])
    tokenizer.add_special_tokens(
        [library_.AddedToken(special[n], special=True, normalized=False) for n in range(n_special)]
    )
    begin, end = (vocabulary[piece] for piece in (_BEGIN, _END))
    frame_texts(tokenizer, [begin])
    return SubwordTokenizer(tokenizer, (end,), begin)
