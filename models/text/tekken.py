"""Reads Mistral's tekken.json: the bytes of each token by rank, and a pattern that splits texts.

1. The first tokens are special ones, by number; the others follow in the order of their ranks.
2. The two parts of a token that are tokens themselves may be merged, the lowest ranks first, as in tiktoken.
"""

import base64
from pathlib import Path
from typing import Any

from models.files import library, one_error, read_object
from models.text.tokenizer import SubwordTokenizer, begin_texts, byte_level, byte_signs

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
    with one_error(path):
        return _made(data)


def _made(data: dict[str, Any]) -> SubwordTokenizer:
    library_, config = library("tokenizers"), data["config"]
    n_special = config["default_num_special_tokens"]
    listed = data.get("special_tokens")
    if listed is None:
        if config["version"] not in ("v3", "v7"):
            raise KeyError("special_tokens")
        listed = [{"rank": n, "token_str": name} for n, name in enumerate(_SPECIAL.split())]
    special = {n: f"<SPECIAL_{n}>" for n in range(n_special)}
    special |= {each["rank"]: each["token_str"] for each in listed}
    entries = data["vocab"][: config["default_vocab_size"] - n_special]
    if [each["rank"] for each in entries] != [*range(config["default_vocab_size"] - n_special)]:
        raise ValueError("the vocabulary must be in order of rank, and complete")
    signs = {byte: sign for sign, byte in byte_signs().items()}
    pieces = ["".join(signs[byte] for byte in base64.b64decode(each["token_bytes"])) for each in entries]  # fmt: skip
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    if len({*pieces, *special.values()}) != len(pieces) + n_special:
        raise ValueError("each token must be there once")
    vocabulary = {piece: number for number, piece in special.items()}
    vocabulary |= {piece: rank + n_special for piece, rank in ranks.items()}
    merges = []
    for piece in pieces:
        halves = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    # A text that is a token needs no merges.
    tokenizer = byte_level(library_.models.BPE(vocabulary, merges, ignore_merges=True))
    split = library_.pre_tokenizers.Split(library_.Regex(config["pattern"]), "isolated")
    as_bytes = library_.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library_.pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.add_special_tokens(
        [library_.AddedToken(special[n], special=True, normalized=False) for n in range(n_special)]
    )
    begin, end = (vocabulary[piece] for piece in (_BEGIN, _END))
    begin_texts(tokenizer, begin)
    return SubwordTokenizer(tokenizer, (end,), begin)
