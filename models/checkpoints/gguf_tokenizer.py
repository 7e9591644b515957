"""Make tokenizers from GGUF files, with the library `tokenizers`.

1. `tokenizer.ggml.model` names the kind: byte-level BPE, BPE of SentencePiece, WordPiece or
   Unigram.
2. A text is split at the special tokens: control, unknown and user-defined tokens.
3. For BPE, `tokenizer.ggml.pre` names the patterns that split the other parts into words
   (pre_tokenizers.json).
4. Each word becomes tokens of the vocabulary.

The patterns, and the defaults of missing keys, are from src/llama-vocab.cpp of llama.cpp.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hooks.base import library, require_choice
from models.checkpoints.gguf_file import GGUFFile
from models.text.charsmap import Charsmap
from models.text.tokenizer import SubwordTokenizer, byte_level, frame_texts

# Values of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Vocabularies that are not byte-level write a space as this character.
_SPACE = "▁"
# Special tokens by the names that chat templates use, and the keys of their ids.
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def read_tokenizer(file: GGUFFile) -> SubwordTokenizer:
    """Return the tokenizer in a file, with its chat template.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        KeyError: if a key is missing.
        ValueError: if the tokenizer is of an unknown kind.
    """
    stated = file.metadata("tokenizer.ggml.")
    require_choice("tokenizer.ggml.model", model := str(stated.get("model")), _KINDS)
    make, defaults = _KINDS[model]
    entries = {**defaults, **stated}
    tokenizer = make(entries)
    tokenizer.add_tokens(_unsplit(entries, str(file.metadata("general.").get("name", ""))))
    before = [entries["bos_token_id"]] if entries.get("add_bos_token") else []
    after = [entries["eos_token_id"]] if entries.get("add_eos_token") else []
    if model == "bert":
        after.append(entries["seperator_token_id"])
    frame_texts(tokenizer, before, after)
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = dict.fromkeys(entries[key] for key in end_keys if key in entries)
    # llama.cpp reads the table of normalisation only for Unigram tokenizers.
    charsmap = _charsmap(entries) if model == "t5" else None
    wrapped = SubwordTokenizer(
        tokenizer, tuple(ends), bos_token_id=entries.get("bos_token_id"), charsmap=charsmap
    )
    special = {
        name: entries["tokens"][entries[key]] for name, key in _SPECIAL.items() if key in entries
    }
    template = file.metadata("tokenizer.").get("chat_template")
    wrapped.note_template(template, special)
    return wrapped


def _unsplit(entries: Mapping[str, Any], model_name: str) -> list[Any]:
    """Return the special tokens, which are found in a text before it is split.

    Some special tokens include the spaces that follow them in a text. The file does not state
    which. In Phi-3, all special tokens do, except three.
    """
    strips = any(name in model_name.lower() for name in ("phi-3", "phi3"))
    keep = ("<unk>", "<s>", "<|endoftext|>")
    return [
        library("tokenizers").AddedToken(
            piece,
            normalized=False,
            special=kind != _USER_DEFINED,
            rstrip=strips and piece not in keep,
        )
        for piece, kind in zip(entries["tokens"], entries["token_type"], strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


@cache
def _splits() -> dict[str, dict[str, Any]]:
    """Return the facts for each name of `tokenizer.ggml.pre`.

    The facts are its patterns, whether a whole word is looked up before merges are applied, whether
    a text begins with a special token, and whether words are written as bytes.
    """
    path = Path(__file__).with_name("pre_tokenizers.json")
    splits = dict[str, dict[str, Any]]()
    for facts in json.loads(path.read_text(encoding="utf-8")):
        splits |= dict.fromkeys(facts["names"], facts)
    return splits


def _byte_pairs(entries: dict[str, Any]) -> Any:
    """Return the tokenizer of a BPE model with a list of merges.

    Most of these models write words as bytes. Some, for example Gemma 4, write words as characters,
    and only unknown characters as bytes.

    Raises:
        ValueError: if the patterns that split texts are unknown, or the merges are damaged.
    """
    library_ = library("tokenizers")
    require_choice("tokenizer.ggml.pre", pre := str(entries["pre"]), _splits())
    facts = _splits()[pre]
    entries.setdefault("add_bos_token", facts.get("adds_bos", False))
    is_byte_level = facts.get("byte_level", True)
    vocabulary = {piece: token for token, piece in enumerate(entries["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in entries["merges"]]
    try:
        model = library_.models.BPE(
            vocabulary,
            merges,
            ignore_merges=facts.get("ignore_merges", False),
            byte_fallback=not is_byte_level,
        )
    # The library raises errors of the class Exception.
    except Exception as error:
        raise ValueError(f"tokenizer.ggml.merges: {error}") from None
    if is_byte_level:
        return byte_level(model, facts["patterns"])
    tokenizer = library_.Tokenizer(model)
    splitters = library_.pre_tokenizers
    _write_spaces(tokenizer, begins_with_space=False)
    tokenizer.pre_tokenizer = splitters.Sequence(
        [splitters.Split(library_.Regex(pattern), "isolated") for pattern in facts["patterns"]]
    )
    return tokenizer


def _sentence_pieces(entries: dict[str, Any]) -> Any:
    """Return the tokenizer of a BPE model of SentencePiece, with merges in the order of scores."""
    library_ = library("tokenizers")
    pieces = entries["tokens"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    # SentencePiece merges the two neighbours that give the piece with the highest score.
    scores = dict(zip(pieces, entries["scores"], strict=True))
    merges = []
    for piece in sorted(pieces, key=lambda piece: -scores[piece]):
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [
            (left, right) for left, right in cuts if left in vocabulary and right in vocabulary
        ]
    unknown = pieces[entries["unknown_token_id"]]
    model = library_.models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True)
    tokenizer = library_.Tokenizer(model)
    _write_spaces(tokenizer, entries["add_space_prefix"])
    return tokenizer


def _write_spaces(tokenizer: Any, begins_with_space: bool) -> None:
    """Make a tokenizer replace spaces by `_SPACE`, and decode `_SPACE` and tokens of single bytes.

    Args:
        tokenizer: the tokenizer. Its normalizer and decoder are set.
        begins_with_space: whether a space is added before a text, and removed when it is decoded.
    """
    normalizers = library("tokenizers").normalizers
    decoders = library("tokenizers").decoders
    spaces = [normalizers.Replace(" ", _SPACE)]
    texts = [decoders.Replace(_SPACE, " ")]
    texts += [decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        texts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(texts)


def _word_pieces(entries: dict[str, Any]) -> Any:
    """Return the WordPiece model of BERT, which takes the longest piece that fits, from the left.

    GGUF marks the pieces that begin a word; BERT marks the other pieces.
    """
    library_ = library("tokenizers")
    vocabulary = dict[str, int]()
    pieces = zip(entries["tokens"], entries["token_type"], strict=True)
    for token, (piece, kind) in enumerate(pieces):
        if kind == _NORMAL:
            piece = piece[1:] if piece[0] == _SPACE else f"##{piece}"
        vocabulary[piece] = token
    unknown = entries["tokens"][entries["unknown_token_id"]]
    tokenizer = library_.Tokenizer(
        library_.models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    )
    lowercase = entries["normalizer.lowercase"]
    tokenizer.normalizer = library_.normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=entries.get("normalizer.strip_accents", lowercase)
    )
    tokenizer.pre_tokenizer = library_.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library_.decoders.WordPiece()
    return tokenizer


def _charsmap(entries: Mapping[str, Any]) -> Charsmap | None:
    """Return the table that normalises texts; None if the file has no table.

    Raises:
        ValueError: if the table is damaged.
    """
    data = bytes(entries.get("precompiled_charsmap", b""))
    try:
        return Charsmap(data) if data else None
    except ValueError as error:
        raise ValueError(f"tokenizer.ggml.precompiled_charsmap: {error}") from None


def _unigrams(entries: dict[str, Any]) -> Any:
    """Return the Unigram model of T5, which splits a text so that the sum of scores is highest."""
    library_ = library("tokenizers")
    # Give control tokens very low scores. Then a text never becomes a control token, even if its
    # normalised form contains the name of one.
    hidden = min(entries["scores"]) - 1000
    pieces = [
        (piece, hidden if kind in (_UNKNOWN, _CONTROL) else score)
        for piece, score, kind in zip(
            entries["tokens"], entries["scores"], entries["token_type"], strict=True
        )
    ]
    tokenizer = library_.Tokenizer(
        library_.models.Unigram(pieces, entries["unknown_token_id"], False)
    )
    steps = []
    # Remove only spaces, as SentencePiece does, and no other white space.
    if entries["remove_extra_whitespaces"]:
        for pattern, replacement in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append(library_.normalizers.Replace(library_.Regex(pattern), replacement))
    # Add the space here. `Metaspace` would not add it before a text that begins with a space.
    if entries["add_space_prefix"]:
        steps.append(library_.normalizers.Prepend(" "))
    tokenizer.normalizer = library_.normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = library_.pre_tokenizers.Metaspace(prepend_scheme="never")
    scheme = "always" if entries["add_space_prefix"] else "never"
    tokenizer.decoder = library_.decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


# For each value of `tokenizer.ggml.model`: the function that makes the tokenizer, and the defaults
# of missing keys.
_KINDS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "gpt2": (_byte_pairs, {"pre": "default"}),
    "gemma4": (_byte_pairs, {"pre": "gemma4", "add_bos_token": True}),
    "llama": (
        _sentence_pieces,
        {
            "add_bos_token": True,
            "add_space_prefix": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        },
    ),
    "bert": (
        _word_pieces,
        {
            "add_bos_token": True,
            "bos_token_id": 101,
            "unknown_token_id": 100,
            "seperator_token_id": 102,
            "normalizer.lowercase": True,
        },
    ),
    "t5": (
        _unigrams,
        {
            "add_eos_token": True,
            "eos_token_id": 1,
            "unknown_token_id": 2,
            "add_space_prefix": False,
            "remove_extra_whitespaces": False,
        },
    ),
}
