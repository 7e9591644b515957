"""Reader of Mistral's tekken.json.

The file contains the bytes of each token by rank, and a pattern that splits texts.

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
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def tokenizer_of_tekken(path: Path) -> SubwordTokenizer:
    """Return the tokenizer in a tekken.json.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged. The error names the file.
    """
    data = read_object(path)
    with storage.one_error(path):
        return _tokenizer(data)


def _tokenizer(data: dict[str, Any]) -> SubwordTokenizer:
    """Return the tokenizer of the content of a file.

    Raises:
        ValueError: if the numbers of the tokens have gaps.
    """
    library_ = library("tokenizers")
    config = data["config"]
    size = config["default_vocab_size"]
    n_special = config["default_num_special_tokens"]
    special = {n: f"<SPECIAL_{n}>" for n in range(n_special)}
    if data.get("special_tokens") is None and config["version"] in ("v3", "v7"):
        special |= enumerate(_SPECIAL.split())
    else:
        special |= {token["rank"]: token["token_str"] for token in data["special_tokens"]}
    signs = {byte: sign for sign, byte in byte_signs().items()}
    vocabulary = {piece: number for number, piece in special.items()}
    for entry in data["vocab"][: size - n_special]:
        token = base64.b64decode(entry["token_bytes"])
        vocabulary["".join(signs[byte] for byte in token)] = n_special + entry["rank"]
    if [*vocabulary.values()] != [*range(size)]:
        raise ValueError(f"its tokens must have the numbers 0 to {size - 1} in this order")
    merges = []
    for piece in [*vocabulary][n_special:]:
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        merges += [
            (left, right) for left, right in cuts if left in vocabulary and right in vocabulary
        ]
    # With ignore_merges, a text that is a token is not built from merges.
    model = library_.models.BPE(vocabulary, merges, ignore_merges=True)
    tokenizer = byte_level(model, [config["pattern"]])
    tokenizer.add_special_tokens(
        [library_.AddedToken(special[n], special=True, normalized=False) for n in range(n_special)]
    )
    begin = vocabulary[_BEGIN]
    frame_texts(tokenizer, [begin])
    return SubwordTokenizer(tokenizer, (vocabulary[_END],), begin)
