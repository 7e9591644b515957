"""Small tokenizers of the kinds that model files contain, trained with the library `tokenizers`.

`write_gguf` writes them into GGUF files.
"""

import json

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds

END, USER = "<|endoftext|>", "<\uff5cUser\uff5c>"
# The signs of the 256 bytes, in GPT-2's order: first the printable characters of Latin-1, then the
# characters that stand for all other bytes.
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
SIGNS = [chr(code) for code in (*PRINTABLE, *range(256, 324))]

CORPUS = """The theory of hooks: a hook listens where a value passes, and hands it on unchanged.
Don't we'll I've they're 1234567890 3.14 (x_1 != y[0]) { return; } naïve Größe 日本語のテスト
    Four spaces   three, tabs\t\tand lines.

The other theories of the same hooks, hooked where other values pass, are not the same theory."""
# The pattern in Llama 3's tokenizer.json.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(model, splitter, pieces, n_merges=None, added=(), normalizer=None):
    """Return a tokenizer that is trained to a vocabulary of 400.

    Only the first `n_merges` merges remain. Default: all.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    options = dict(special_tokens=pieces, vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainers.BpeTrainer(**options))
    whole = json.loads(tokenizer.to_str())
    whole["model"]["merges"] = whole["model"]["merges"][:n_merges]
    whole["added_tokens"] = []
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in added])
    return tokenizer


# The patterns that llama.cpp applies one after another if a file names no pattern.
FOUR = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)


def byte_level(llama_3=False, patterns=()):
    # Train on words as GPT-2 splits them. Other patterns then split some of these words.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Llama 3's vocabulary has words that no sequence of merges produces.
    model, n_merges = kinds.BPE(ignore_merges=llama_3), 40 if llama_3 else None
    tokenizer = trained(model, words, SIGNS, n_merges, [END, USER, "<think>", "    "])
    tokenizer.decoder = decoders.ByteLevel()
    if patterns := [LLAMA_3] if llama_3 else patterns:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        signs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, signs])
    return tokenizer


def sentence_pieces(prefix=True):
    """Return a tokenizer like Llama 2's: BPE with "▁" for spaces and with tokens for bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = kinds.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = trained(model, pre_tokenizers.Metaspace(), pieces, None, pieces[:3])
    tokenizer.pre_tokenizer = None
    spaces, texts = [normalizers.Replace(" ", "▁")], [decoders.Replace("▁", " ")]
    texts += [decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces, texts = [normalizers.Prepend("▁"), *spaces], [*texts, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(texts)
    return tokenizer


def gemma_4():
    """Return a tokenizer like Gemma 4's: BPE on whole lines, with SentencePiece's spaces and bytes."""
    pieces = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    spaces = normalizers.Replace(" ", "▁")
    model = kinds.BPE(byte_fallback=True)
    tokenizer = trained(model, lines, pieces, None, pieces[:3], spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_pieces(lowercase=True):
    """Return a tokenizer like BERT's, with BERT's defaults."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(kinds.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    options = dict(special_tokens=special, vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainers.WordPieceTrainer(**options))
    return tokenizer


def unigrams(prefix="always"):
    """Return a tokenizer like T5's. It splits a text so that the sum of the scores is largest."""
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = tokenizers.Tokenizer(kinds.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if prefix == "always"
        else []
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    options = dict(special_tokens=special, vocab_size=90, show_progress=False, unk_token="<unk>")
    tokenizer.train_from_iterator([CORPUS], trainers.UnigramTrainer(**options))
    return tokenizer


def write_gguf(path, tokenizer, model, architecture="llama", name=None, **more):
    """Write a tokenizer to a GGUF file, as llama.cpp's converter does. Keys with None are left out."""
    added = tokenizer.get_added_tokens_decoder()
    pieces = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    written = json.loads(tokenizer.to_str())["model"]
    merges = written.get("merges", [])
    ranks = {first + second: rank for rank, (first, second) in enumerate(merges)}
    scores = {"llama": [-float(ranks.get(piece, 0)) for piece in pieces]}
    if model == "t5":
        scores["t5"] = [score for _, score in written["vocab"]]
    # In GGUF files, the pieces that begin a word are marked, not the others.
    if model == "bert":
        said_pieces = [
            p if t in added else p[2:] if p[:2] == "##" else f"▁{p}" for t, p in enumerate(pieces)
        ]
    user, kind = ("<think>", "    "), {"<unk>": 2} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    said = {
        "model": model,
        "tokens": said_pieces if model == "bert" else pieces,
        "token_type": [
            kind.get(piece, (4 if piece in user else 3) if token in added else 1)
            for token, piece in enumerate(pieces)
        ],
        "merges": [" ".join(pair) for pair in merges] if model in ("gpt2", "gemma4") else None,
        "scores": scores.get(model),
    } | more
    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    for key, value in said.items():
        adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        adder = adders.get(type(value), writer.add_array)
        if value is not None:
            adder(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ORIGINALS = {
    "gpt2": (byte_level, dict(model="gpt2", pre="gpt-2")),
    "an older file": (lambda: byte_level(patterns=FOUR), dict(model="gpt2", architecture="gpt2")),
    "smollm": (
        lambda: byte_level(patterns=[r"\p{N}", FOUR[1]]),
        dict(model="gpt2", pre="smollm", add_space_prefix=False),
    ),
    "gemma 4": (gemma_4, dict(model="gemma4", bos_token_id=2)),
    "bert": (
        word_pieces,
        dict(model="bert", unknown_token_id=1, seperator_token_id=3, bos_token_id=2),
    ),
    "bert, cased": (
        lambda: word_pieces(lowercase=False),
        {
            "model": "bert",
            "unknown_token_id": 1,
            "bos_token_id": 2,
            "seperator_token_id": 3,
            "normalizer.lowercase": False,
        },
    ),
    "t5": (unigrams, dict(model="t5", add_space_prefix=True, remove_extra_whitespaces=True)),
    "t5, no prefix": (lambda: unigrams("never"), dict(model="t5")),
    "llama 3": (
        lambda: byte_level(llama_3=True),
        dict(model="gpt2", pre="llama-bpe", bos_token_id=7),
    ),
    "llama": (sentence_pieces, dict(model="llama")),
    "no prefix": (lambda: sentence_pieces(False), dict(model="llama", add_space_prefix=False)),
}
