"""Special and added tokens, as the files beside a vocabulary and its merges give them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models.tokenizers.vocabulary import read_object

CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
CONFIG, ADDED, NAMED = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"

# What gives other tokens than the vocabulary and the merges do, if it is so.
_REFUSED = ("add_prefix_space", "split_special_tokens", "auto_map")
_REFUSED_OF_TOKENS = ("lstrip", "rstrip", "single_word")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def special_tokens(directory: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Added tokens with their numbers, and special ones with what they are called, as `pad_token`.

    As in transformers, special_tokens_map.json counts only where tokenizer_config.json has no
    added_tokens_decoder.

    Raises:
        ValueError: naming the file, if it is damaged, asks for what changes the tokens of a text and
            cannot be expressed, or is of another class than GPT-2's.
    """
    path = directory / CONFIG
    config = read_object(path) if path.is_file() else {}
    _check(path, config)
    older = read_object(directory / ADDED) if (directory / ADDED).is_file() else {}
    for piece, number in older.items():
        if type(number) is not int or not piece:
            raise ValueError(
                f"{directory / ADDED} gives tokens whole numbers, not {piece!r} {number!r}"
            )
    if "added_tokens_decoder" not in config:
        named = dict(_named(path, config))
        if (directory / NAMED).is_file():
            named |= _named(directory / NAMED, read_object(directory / NAMED))
        return older, named
    added = _listed(path, config["added_tokens_decoder"])
    for piece, number in older.items():
        if added.get(piece) != number:
            raise ValueError(
                f"{directory / ADDED} gives {piece!r} the number {number}, and {CONFIG} "
                f"{added.get(piece, 'none')}"
            )
    return added, dict(_named(path, config))


def _check(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("tokenizer_class") or CLASSES[0]
    if kind not in CLASSES:
        raise ValueError(
            f"{path}: tokenizer_class is {kind!r}, which may cut texts otherwise than "
            f"{' and '.join(CLASSES)}, whose two files are read: put its tokenizer.json beside them"
        )
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(
                f"{path}: {name} is {config[name]!r}, which gives other tokens than the two files "
                "do: put a tokenizer.json beside them"
            )


def _listed(path: Path, decoder: Any) -> dict[str, int]:
    if not isinstance(decoder, dict) or not all(map(str.isdecimal, decoder)):
        raise ValueError(f"{path}: added_tokens_decoder is tokens by number, not {decoder!r:.40}")
    return {_text(path, number, token): int(number) for number, token in decoder.items()}


def _named(path: Path, described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in described.items():
        if name in _LISTS:
            if not isinstance(value, list | dict | None):
                raise ValueError(f"{path}: {name} is a list of tokens, not {value!r:.40}")
            for token in value.values() if isinstance(value, dict) else value or ():
                yield _text(path, name, token), name
        elif name.endswith("_token") and isinstance(value, str | dict):  # not add_bos_token
            yield _text(path, name, value), name


def _text(path: Path, name: str, token: Any) -> str:
    """What is to be found in a text, from a token that is written alone or with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not content:
        raise ValueError(f"{path}: the token {name} is text, not {token!r:.40}")
    for flag in _REFUSED_OF_TOKENS:
        if isinstance(token, dict) and token.get(flag):
            raise ValueError(f"{path}: {flag} of {content!r} is False, not {token[flag]!r}")
    return content
