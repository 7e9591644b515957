"""Vocabularies of published models from llama.cpp, with the tokens that llama.cpp expects."""

import os
import tarfile
from pathlib import Path

import pytest

from models import load_tokenizer

SOURCE = os.environ.get("LLAMA_CPP_SOURCE", "")
pytestmark = pytest.mark.skipif(
    not SOURCE,
    reason="LLAMA_CPP_SOURCE must be the archive of `python -m pip download --no-deps "
    "--no-binary :all: llama-cpp-python==0.3.36`",
)
# The vocabularies, with the tokens that begin and end a text. For some of them, llama.cpp has no
# expected tokens. A text is then only encoded and decoded again.
VOCABULARIES = {
    "llama-bpe": ((128000,), (128001,)),
    "bert-bge": ((101,), ()),
    "llama-spm": ((1,), (2,)),
    "qwen2": ((), (151643,)),
    "gemma-4": ((2,), (1,)),
    "starcoder": ((), (0,)),
    "aquila": ((), (0,)),  # the file names no pattern, so llama.cpp's default patterns count
    "deepseek-coder": ((32013,), (32014,)),
    "phi-3": ((1,), (32000,)),
    "falcon": ((), (11,)),
    "gpt-2": ((), (50256,)),
    "gpt-neox": ((), (0,)),
    "nomic-bert-moe": ((0,), (2,)),  # Unigram
    "command-r": ((5,), (255001,)),
    "mpt": ((), (0,)),
    "baichuan": ((1,), (2,)),
    "refact": ((), (0,)),
    "deepseek-llm": ((100000,), (100001,)),
    "qwen35": ((), (151643,)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    with tarfile.open(SOURCE) as archive:
        for member in archive:
            if Path(member.name).name.startswith("ggml-vocab-"):
                member.name = Path(member.name).name
                archive.extract(member, folder, filter="data")
    return folder


# All tests with the vocabularies run in one process, which unpacks them once.
@pytest.mark.xdist_group("vocabularies")
@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_line_is_as_llama_cpp_has_it(name, folder):
    path = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_ids, tokenizer.eos_token_ids) == VOCABULARIES[name]
    texts = path.with_name(f"{path.name}.inp")
    if not texts.exists():
        text = "Hello world, 12 cafés: 日本"
        assert tokenizer.decode(tokenizer.encode(text)).strip() == text
        return
    # Do not translate line ends, because the texts contain them.
    parts = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    assert len(parts) > 40
    assert len(lines) - len(parts) in (0, 1)
    for text, line in zip(parts, lines, strict=False):
        tokens = [int(token) for token in line.split()]
        assert tokenizer.encode(text) == tokens
        # All letters of this vocabulary's tokens are lower case.
        if name != "bert-bge":
            assert tokenizer.decode(tokens) == text


# Texts and the pieces of SentencePiece 0.2.3, with the vocabulary and the charsmap of the file.
OF_SENTENCEPIECE = {
    "a\u3000\u0301b": ["▁a", "▁\u0301", "b"],
    "\u33a2\u0301 \u00bd": ["▁km", "2", "\u0301", "▁1\u20442"],
    "cafe\u0301\u0301 \uff21\u0301": ["▁caf\u00e9", "\u0301", "▁\u00c1"],
    "\u1112\u1161\u11ab\u1100\u1173\u11af": ["▁\ud55c\uae00"],
    "\u304b\u3099\uff8a\uff9e": ["▁", "\u304c", "\u30d0"],
    " \u200b\u1680\u2028x ": ["▁x"],
    "\uff1cs\uff1e \uff1c/s\uff1e": ["▁<", "s", ">", "▁", "</", "s", ">"],
}


@pytest.mark.xdist_group("vocabularies")
def test_texts_are_normalised_as_sentencepiece_does(folder):
    tokenizer = load_tokenizer(folder / "ggml-vocab-nomic-bert-moe.gguf")
    for text, pieces in OF_SENTENCEPIECE.items():
        shown = tokenizer.tokens_as_text(tokenizer.encode(text))
        assert shown == [piece.replace("▁", " ") for piece in pieces], ascii(text)
