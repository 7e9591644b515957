"""Reads the files of a tokenizer: vocabulary.json, tokenizer.json, tekken.json, or a vocabulary with its merges."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any

from hooks.base import library, storage
from models.files import read_json, read_object
from models.text.tekken import tokenizer_of_tekken
from models.text.templates import template_of
from models.text.tokenizer import (
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    byte_level,
    frame_texts,
)

# File names of a vocabulary and its merges, by OpenAI and by Hugging Face.
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
# tokenizer.model, spiece.model, Mistral's tokenizer.model.v3
_MODEL = re.compile(r"\.model(\.v\w+)?$")
_CONFIG, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_END = "<|endoftext|>"  # GPT-2's, also before a text where one is asked for
# Tokens that no merge makes: <|endoftext|>, <s>, and fairseq's filler words.
_SPECIAL = re.compile(r"<.+>|madeupword\d+")
_IN_TEMPLATES = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def tokenizer_from(path: Path) -> Tokenizer:
    """Loads the tokenizer in a directory, a tokenizer.json or a tekken.json.

    In a directory it looks for these in order: vocabulary.json, a list of characters;
    tokenizer.json; encoder.json with vocab.bpe; vocab.json with merges.txt; tekken.json. Beside tokenizer.json it
    reads the end of a text from tokenizer_config.json and special_tokens_map.json; beside the last two
    also added tokens, from these and added_tokens.json.

    Raises:
        FileNotFoundError: if the directory holds none of them; it names a SentencePiece model that is there.
        ImportError: if the library `tokenizers` is needed and missing.
        ValueError: if a file is damaged or describes another kind of tokenizer; it names the file.
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
        f"{path} must hold vocabulary.json, tokenizer.json, tekken.json, "
        + " or ".join(" with ".join(names) for names in _PAIRS)
        + "".join(f"; {_model_in(file)}" for file in others[:1])
    )


def _model_in(path: Path) -> str:
    """What a tokenizer's `.model` is, and how to read it."""
    with path.open("rb") as file:
        is_ranks = re.match(rb"[\w+/]+=* \d+\n", file.read(99))
    kind = "a vocabulary of tiktoken" if is_ranks else "SentencePiece's"
    return (
        f"{path} is {kind}, which is not read here: transformers (with sentencepiece or tiktoken) makes a tokenizer.json of it, by "
        f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained({str(path.parent)!r})"
    )


def _characters(path: Path) -> CharTokenizer:
    characters = read_json(path)
    if not isinstance(characters, list) or not all(isinstance(c, str) for c in characters):
        raise ValueError(f"{path} must hold a list of characters; got {str(characters)[:40]}")
    with storage.one_error(path):
        return CharTokenizer(characters)


def _from_json(path: Path) -> SubwordTokenizer:
    kind = library("tokenizers").Tokenizer
    with storage.one_error(path):
        tokenizer = kind.from_file(str(path))
    return _finished(path, tokenizer)


def _from_pairs(vocabulary: Path, merges: Path) -> SubwordTokenizer:
    """Loads GPT-2's two files, and the added and special tokens from the files beside them."""
    library_ = library("tokenizers")
    with _beside(vocabulary, _CONFIG) as config:
        kind = config.get("tokenizer_class") or _CLASSES[0]
    if kind not in _CLASSES or config.get("auto_map") or config.get("split_special_tokens"):
        rule = (
            "must hold a tokenizer.json, because its tokenizer may not split texts as GPT-2's does"
        )
        raise ValueError(f"{vocabulary.parent} {rule}; got the tokenizer_class {kind!r}")
    with storage.one_error(f"{vocabulary} and {merges.name}"):
        pieces, pairs = library_.models.BPE.read_file(str(vocabulary), str(merges))
        model = library_.models.BPE(pieces, pairs)
    tokens = _added_tokens(vocabulary)
    mergeable = {first + second for first, second in pairs} | tokens.keys()
    unmergeable = [piece for piece in pieces if len(piece) > 1 and piece not in mergeable]
    if plain := [piece for piece in unmergeable if not _SPECIAL.fullmatch(piece)]:
        raise ValueError(f"{merges} must make all pieces of {vocabulary.name}; got no {plain[:5]}")
    tokens |= {piece: (_token(piece), None) for piece in unmergeable}
    tokenizer = byte_level(model, add_prefix_space=bool(config.get("add_prefix_space")))
    tokenizer.add_tokens([token for token, _ in tokens.values()])
    for piece, (_, number) in tokens.items():
        expected = tokenizer.token_to_id(piece)
        numbered = pieces.get(piece) if number is None else number
        if numbered != expected:
            where = f"{vocabulary.parent}: the number of the added token {piece!r}"
            raise ValueError(f"{where} must be {expected}; got {numbered}")
    return _finished(vocabulary, tokenizer, _END, begins=bool(config.get("add_bos_token")))  # OPT's


def _added_tokens(vocabulary: Path) -> dict[str, tuple[Any, int | None]]:
    """The tokens that are recognised before a text is split: the library's token and its number."""
    numbered: dict[str, tuple[Any, int]] = {}
    with _beside(vocabulary, "added_tokens.json") as older:
        numbered |= {piece: (_token(piece), index(number)) for piece, number in older.items()}
    with _beside(vocabulary, _CONFIG) as config:
        for number, token in config.get("added_tokens_decoder", {}).items():
            numbered[token["content"]] = (_token(token), int(number))
    # The library numbers new tokens in order of addition.
    tokens: dict[str, tuple[Any, int | None]] = {
        piece: numbered[piece] for piece in sorted(numbered, key=lambda piece: numbered[piece][1])
    }
    for name in (_CONFIG, _SPECIAL_TOKENS):
        with _beside(vocabulary, name) as described:
            for token in map(_token, _named(described)):
                tokens.setdefault(token.content, (token, None))
    return tokens


def _named(described: Mapping[str, Any]) -> Iterator[Any]:
    """The special tokens of a config: under a name such as `eos_token`, or in a list."""
    for name, value in described.items():
        if name.endswith("_token") and isinstance(value, str | dict):  # not add_bos_token
            yield value
        elif name in ("additional_special_tokens", "extra_special_tokens"):
            yield from value.values() if isinstance(value, dict) else value or ()


def _token(described: Any) -> Any:
    """The library's added token, from its text or from an object with its text and flags."""
    values = {"content": described} if isinstance(described, str) else described
    flags = {flag: values.get(flag, False) for flag in _FLAGS}
    return library("tokenizers").AddedToken(values["content"], **flags)


def _finished(
    file: Path, tokenizer: Any, default: str | None = None, begins: bool = False
) -> SubwordTokenizer:
    """The tokenizer, with the tokens that begin and end a text by the files beside `file`, or the default."""
    pieces: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token"), default)
    for name in (_CONFIG, _SPECIAL_TOKENS):
        with _beside(file, name) as described:
            named = {key: described[key] for key in pieces if described.get(key) is not None}
            pieces |= {key: _token(token).content for key, token in named.items()}
    begin, end = (None if p is None else tokenizer.token_to_id(p) for p in pieces.values())
    if begins and begin is not None:
        frame_texts(tokenizer, [begin])
    made = SubwordTokenizer(tokenizer, () if end is None else (end,), begin)
    special = {key: piece for key, piece in pieces.items() if piece is not None}
    with _beside(file, _CONFIG) as described:
        more = {key: described[key] for key in _IN_TEMPLATES if described.get(key) is not None}
        special |= {key: _token(token).content for key, token in more.items()}
        made.pad_token_id, made.mask_token_id = (
            tokenizer.token_to_id(special[key]) if key in special else None
            for key in ("pad_token", "mask_token")
        )
        written = file.with_name("chat_template.jinja")
        source = written.read_text("utf-8") if written.is_file() else described.get("chat_template")
        made.chat_template = template_of(source, special)
    return made


@contextmanager
def _beside(file: Path, name: str) -> Iterator[dict[str, Any]]:
    """The object in a file beside `file`, empty if there is none. Errors inside the `with` name it."""
    path = file.with_name(name)
    described = read_object(path) if path.is_file() else {}
    with storage.one_error(path):
        yield described
