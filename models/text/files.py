"""Readers of the files of tokenizers.

The files are vocabulary.json, tokenizer.json, tekken.json, or a vocabulary with its merges.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any

from hooks.base import library, storage
from models.files import read_json, read_object
from models.text.tekken import tokenizer_of_tekken
from models.text.tokenizer import (
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    byte_level,
    frame_texts,
)

# The file names of a vocabulary and its merges, first of OpenAI and then of Hugging Face.
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
# Names such as tokenizer.model, spiece.model and Mistral's tokenizer.model.v3.
_MODEL = re.compile(r"\.model(\.v\w+)?$")
_CONFIG, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
# GPT-2 uses this token at the end of a text, and also at the beginning if a beginning is requested.
_END = "<|endoftext|>"
# Tokens in a vocabulary that need no merge: special tokens such as <|endoftext|> and <s>, and the
# filler words of fairseq.
_SPECIAL = re.compile(r"<.+>|madeupword\d+")
_IN_TEMPLATES = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def tokenizer_from(path: Path) -> Tokenizer:
    """Return the tokenizer in a directory, a tokenizer.json or a tekken.json.

    In a directory, the first of these files is read:

    1. vocabulary.json, a list of characters;
    2. tokenizer.json;
    3. encoder.json with vocab.bpe;
    4. vocab.json with merges.txt;
    5. tekken.json.

    For tokenizer.json and for a vocabulary with merges, the tokens that begin and end a text, and
    the chat template, are read from tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja in the same directory. For a vocabulary with merges, the added tokens are
    also read, from the two JSON files and from added_tokens.json.

    Raises:
        FileNotFoundError: if the directory contains none of these files. The error names a `.model`
            file if the directory contains one.
        ImportError: if the library `tokenizers` is needed and missing.
        ValueError: if a file is damaged, or contains an unsupported kind of tokenizer. The error
            names the file.
    """
    if path.is_file() and _MODEL.search(path.name):
        raise ValueError(_model_in(path))
    if path.is_file():
        return (tokenizer_of_tekken if "tekken" in path.name else _from_json)(path)
    if (file := path / "vocabulary.json").is_file():
        return _characters(file)
    if (file := path / "tokenizer.json").is_file():
        return _from_json(file)
    for names in _PAIRS:
        vocabulary, merges = (path / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return _from_pairs(vocabulary, merges)
    if (file := path / "tekken.json").is_file():
        return tokenizer_of_tekken(file)
    others = sorted(file for file in path.glob("*") if _MODEL.search(file.name))
    raise FileNotFoundError(
        f"{path} must contain vocabulary.json, tokenizer.json, tekken.json, "
        + " or ".join(" with ".join(names) for names in _PAIRS)
        + "".join(f"; {_model_in(file)}" for file in others[:1])
    )


def _model_in(path: Path) -> str:
    """Return an error message that describes a `.model` file and shows how to convert it."""
    with path.open("rb") as file:
        is_ranks = re.match(rb"[\w+/]+=* \d+\n", file.read(99))
    kind = "a vocabulary of tiktoken" if is_ranks else "a SentencePiece model"
    return (
        f"{path} is {kind}, which is unsupported: convert it to a tokenizer.json with transformers "
        "(and sentencepiece or tiktoken), "
        f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained({str(path.parent)!r})"
    )


def _characters(path: Path) -> CharTokenizer:
    """Return the tokenizer of a list of characters.

    Raises:
        ValueError: if the file contains something else, or is damaged.
    """
    characters = read_json(path)
    is_list = isinstance(characters, list)
    if not is_list or not all(isinstance(character, str) for character in characters):
        raise ValueError(f"{path} must contain a list of characters; got {str(characters)[:40]}")
    with storage.one_error(path):
        return CharTokenizer(characters)


def _from_json(path: Path) -> SubwordTokenizer:
    """Return the tokenizer in a tokenizer.json."""
    kind = library("tokenizers").Tokenizer
    with storage.one_error(path):
        tokenizer = kind.from_file(str(path))
    return _finished(path, tokenizer)


def _from_pairs(vocabulary: Path, merges: Path) -> SubwordTokenizer:
    """Return the tokenizer of GPT-2's two files.

    Added and special tokens come from files in the same directory.
    """
    library_ = library("tokenizers")
    with _beside(vocabulary, _CONFIG) as config:
        kind = config.get("tokenizer_class") or _CLASSES[0]
    if kind not in _CLASSES or config.get("auto_map") or config.get("split_special_tokens"):
        rule = "must contain a tokenizer.json, because its tokenizer may not split texts like GPT-2"
        raise ValueError(f"{vocabulary.parent} {rule}; got the tokenizer_class {kind!r}")
    with storage.one_error(f"{vocabulary} and {merges.name}"):
        pieces, pairs = library_.models.BPE.read_file(str(vocabulary), str(merges))
        model = library_.models.BPE(pieces, pairs)
    tokens = _added_tokens(vocabulary)
    mergeable = {first + second for first, second in pairs} | tokens.keys()
    unmergeable = [piece for piece in pieces if len(piece) > 1 and piece not in mergeable]
    if plain := [piece for piece in unmergeable if not _SPECIAL.fullmatch(piece)]:
        raise ValueError(
            f"{merges} must contain the merges of all tokens of {vocabulary.name}; missing for "
            f"{plain[:5]}"
        )
    tokens |= {piece: (_token(piece), None) for piece in unmergeable}
    tokenizer = byte_level(model, add_prefix_space=bool(config.get("add_prefix_space")))
    tokenizer.add_tokens([token for token, _ in tokens.values()])
    for piece, (_, number) in tokens.items():
        expected = tokenizer.token_to_id(piece)
        numbered = pieces.get(piece) if number is None else number
        if numbered != expected:
            where = f"{vocabulary.parent}: the number of the added token {piece!r}"
            raise ValueError(f"{where} must be {expected}; got {numbered}")
    # The tokenizer of OPT begins each text with a token.
    return _finished(vocabulary, tokenizer, _END, begins=bool(config.get("add_bos_token")))


def _added_tokens(vocabulary: Path) -> dict[str, tuple[Any, int | None]]:
    """Return the tokens that are recognised before a text is split, by their text.

    Each token comes with its number, or with None if the files do not contain the number.
    """
    numbered: dict[str, tuple[Any, int]] = {}
    with _beside(vocabulary, "added_tokens.json") as older:
        numbered |= {piece: (_token(piece), index(number)) for piece, number in older.items()}
    with _beside(vocabulary, _CONFIG) as config:
        for number, token in config.get("added_tokens_decoder", {}).items():
            numbered[token["content"]] = (_token(token), int(number))
    # The library numbers new tokens in the order in which they are added.
    tokens: dict[str, tuple[Any, int | None]] = {
        piece: numbered[piece] for piece in sorted(numbered, key=lambda piece: numbered[piece][1])
    }
    for name in (_CONFIG, _SPECIAL_TOKENS):
        with _beside(vocabulary, name) as described:
            for token in map(_token, _named(described)):
                tokens.setdefault(token.content, (token, None))
    return tokens


def _named(described: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the special tokens in a config: under keys such as `eos_token`, and in lists."""
    for name, value in described.items():
        # A key such as `add_bos_token` has the same ending, but its value is a boolean.
        if name.endswith("_token") and isinstance(value, str | dict):
            yield value
        elif name in ("additional_special_tokens", "extra_special_tokens"):
            yield from value.values() if isinstance(value, dict) else value or ()


def _token(described: Any) -> Any:
    """Return the library's added token for a text, or for an object with the text and flags."""
    values = {"content": described} if isinstance(described, str) else described
    flags = {flag: values.get(flag, False) for flag in _FLAGS}
    return library("tokenizers").AddedToken(values["content"], **flags)


def _finished(
    file: Path, tokenizer: Any, default: str | None = None, begins: bool = False
) -> SubwordTokenizer:
    """Return a tokenizer with the special tokens and the template of its files.

    Args:
        file: a file of the tokenizer. The other files are in the same directory.
        tokenizer: the tokenizer of the library.
        default: the token that begins and ends a text, if the files name no token.
        begins: whether the tokenizer adds a token at the beginning of each text.
    """
    pieces: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token"), default)
    for name in (_CONFIG, _SPECIAL_TOKENS):
        with _beside(file, name) as described:
            named = {key: described[key] for key in pieces if described.get(key) is not None}
            pieces |= {key: _token(token).content for key, token in named.items()}
    begin, end = (
        None if piece is None else tokenizer.token_to_id(piece) for piece in pieces.values()
    )
    if begins and begin is not None:
        frame_texts(tokenizer, [begin])
    wrapped = SubwordTokenizer(tokenizer, () if end is None else (end,), begin)
    special = {key: piece for key, piece in pieces.items() if piece is not None}
    with _beside(file, _CONFIG) as described:
        more = {key: described[key] for key in _IN_TEMPLATES if described.get(key) is not None}
        special |= {key: _token(token).content for key, token in more.items()}
        wrapped.pad_token_id, wrapped.mask_token_id = (
            tokenizer.token_to_id(special[key]) if key in special else None
            for key in ("pad_token", "mask_token")
        )
        written = file.with_name("chat_template.jinja")
        source = written.read_text("utf-8") if written.is_file() else described.get("chat_template")
        wrapped.note_template(source, special)
    return wrapped


@contextmanager
def _beside(file: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the object in a file `name` next to `file`, or an empty object if it is missing.

    Errors inside the `with` name the file.
    """
    path = file.with_name(name)
    described = read_object(path) if path.is_file() else {}
    with storage.one_error(path):
        yield described
