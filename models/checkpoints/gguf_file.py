"""GGUF files, read with the package gguf: metadata, single tensors, and the tokenizer."""

import os
import struct
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.checks import check_choice
from models.files import library, without
from models.text.tokenizer import SubwordTokenizer, begin_texts, byte_level

try:
    from gguf import GGUFReader, GGUFValueType
    from gguf.quants import dequantize
except ModuleNotFoundError as error:
    raise ImportError('GGUF needs the package gguf: pip install "hookscope[hf]"') from error

# Rows to dequantize at a time, because the library needs a second copy of them.
_ROWS = 256
# How a text is split into pieces before BPE, by `tokenizer.ggml.pre`: None for GPT-2's way, or a pattern.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"gpt-2": None, "llama-bpe": _LLAMA_3, "llama3": _LLAMA_3, "llama-v3": _LLAMA_3}
# Values of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


class GGUFFile:
    """A GGUF file.

    Attributes:
        shapes: the shapes of all tensors, in PyTorch's order.

    Args:
        path: a complete file in little-endian order.
        ignore: keys of the metadata to leave out.

    Raises:
        UnknownNameError: if a key to ignore is not there.
        Exception: of many kinds, if it is not such a file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], ignore: Collection[str] = ()) -> None:
        self._path = path
        reader = _Reader(path)
        if reader.byte_order != "I":
            raise ValueError("the byte order must be that of this machine; got the other one")
        self._fields = without(reader.fields, ignore, str(path))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()
        }

    def metadata(self, prefix: str) -> dict[str, Any]:
        """The header's values under keys that start with `prefix`, by the rest of the key."""
        return {
            key.removeprefix(prefix): field.contents()
            for key, field in self._fields.items()
            if key.startswith(prefix)
        }

    def read(self, key: str) -> Tensor:
        """A tensor's values in float32, in new memory.

        Raises:
            ValueError: if the library cannot dequantize its type; it names the tensor and the type.
        """
        tensor, shape = self._tensors[key], self.shapes[key]
        # Not through the library's memory map, whose pages count as memory of this process.
        stored = np.fromfile(
            self._path, tensor.data.dtype, tensor.data.size, offset=int(tensor.data_offset)
        )
        rows = stored.reshape(-1, tensor.data.shape[-1])
        values = torch.empty(len(rows), shape[-1], dtype=torch.float32, device="cpu")
        try:
            for start in range(0, len(rows), _ROWS):
                part = dequantize(rows[start : start + _ROWS], tensor.tensor_type)
                values[start : start + _ROWS] = torch.from_numpy(part)
        except NotImplementedError:
            rule = f"{key} must be of a type that the package gguf can dequantize"
            raise ValueError(f"{self._path}: {rule}; got {tensor.tensor_type.name}") from None
        return values.view(shape)


class _Reader(GGUFReader):
    """The library's reader, with a faster way to read arrays.

    The library makes several objects for each element. A vocabulary of 128,000 tokens then takes seconds
    and hundreds of megabytes, and a damaged length causes an endless loop.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = self.data.data
        code, length = struct.unpack_from("<IQ", raw, orig_offs)
        kind, start = GGUFValueType(code), orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], length)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]
        if kind != GGUFValueType.STRING:
            raise ValueError(f"elements of an array must be numbers or texts; got {kind.name}")
        parts, at = [], start
        for _ in range(length):
            (size,) = struct.unpack_from("<Q", raw, at)
            parts.append(raw[at + 8 : at + 8 + size])
            at += 8 + size
        return at - orig_offs, parts, list(range(length)), [GGUFValueType.ARRAY, kind]


def read_tokenizer(file: GGUFFile) -> SubwordTokenizer:
    """The tokenizer in a file.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        KeyError: if the file has no such key.
        ValueError: if the tokenizer is of an unknown kind.
    """
    entries = file.metadata("tokenizer.ggml.")
    if file.metadata("general.")["architecture"] == "gpt2":  # older files have no `pre`
        entries.setdefault("pre", "gpt-2")
    makers = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    check_choice("tokenizer.ggml.model", model := str(entries.get("model")), makers)
    tokenizer = makers[model](entries)
    marked = [
        library("tokenizers").AddedToken(piece, normalized=False)
        for piece, kind in zip(entries["tokens"], entries["token_type"], strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(marked)
    # As llama.cpp does where the file does not say.
    begins = entries.get("add_bos_token", model == "llama" or _SPLITS[entries["pre"]] == _LLAMA_3)
    if begins and "bos_token_id" in entries:
        begin_texts(tokenizer, entries["bos_token_id"])
    ends = (entries[key] for key in ("eos_token_id", "eot_token_id") if key in entries)
    return SubwordTokenizer(tokenizer, tuple(ends), entries.get("bos_token_id"))


def _byte_pairs(entries: Mapping[str, Any]) -> Any:
    library_, pre = library("tokenizers"), str(entries.get("pre"))
    check_choice("tokenizer.ggml.pre", pre, _SPLITS)
    vocabulary = {piece: token for token, piece in enumerate(entries["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in entries["merges"]]
    pattern = _SPLITS[pre]
    # Llama 3 looks up whole pieces first, because merges cannot make some of its tokens.
    try:
        model = library_.models.BPE(vocabulary, merges, ignore_merges=pattern is not None)
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"tokenizer.ggml.merges: {error}") from None
    tokenizer = byte_level(model)
    if pattern is not None:
        cut = library_.pre_tokenizers.Split(library_.Regex(pattern), "isolated")
        signs = library_.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = library_.pre_tokenizers.Sequence([cut, signs])
    return tokenizer


def _sentence_pieces(entries: Mapping[str, Any]) -> Any:
    library_, pieces, kinds = library("tokenizers"), entries["tokens"], entries["token_type"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    # SentencePiece joins the two neighbours that give the piece with the highest score.
    scores = dict(zip(pieces, entries["scores"], strict=True))
    normal = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _NORMAL]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    unknown = next(
        (piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _UNKNOWN), None
    )
    model = library_.models.BPE(
        vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = library_.Tokenizer(model)
    normalizers, decoders = library_.normalizers, library_.decoders
    spaces, texts = [normalizers.Replace(" ", "▁")], [decoders.Replace("▁", " ")]
    texts += [decoders.ByteFallback(), decoders.Fuse()]
    if entries.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        texts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(texts)
    return tokenizer
