"""Tokenizers, compared with tokens computed by hand and with other implementations of the same
files.
"""

import base64
import json
import re
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as kinds

from models import Transformer, TransformerConfig, generate_text, load_tokenizer
from models.text.tokenizer import CharTokenizer, Tokenizer
from tests.count import ROOT
from tests.models.text.vocabularies import (
    CORPUS,
    END,
    LLAMA_3,
    ORIGINALS,
    PRINTABLE,
    SIGNS,
    USER,
    byte_level,
    sentence_pieces,
    write_gguf,
)

GPT2 = ROOT.parent / "shared" / "data" / "gpt2"
BYTES = [*PRINTABLE, *(byte for byte in range(256) if byte not in PRINTABLE)]
MERGES = ["l l", "h e", "he ll", "Ġ w", "Ã ©"]
# The tokens 0 to 255 are signs of bytes. Then come 256 "ll", 257 "he", 258 "hell", 259 " w", 260
# "é" and 261, the end of a text.
VOCABULARY = {piece: i for i, piece in enumerate([*SIGNS, "ll", "he", "hell", "Ġw", "Ã©", END])}
TEXTS = [
    "",
    " ",
    " leading and trailing   ",
    "Hello world\n\n\t x \r\n\x0b\x0c\x1c y\u2028z\x85\u3000",
    "don't we'll I've they're he'd I'm it's DON'T 's 1234567890 3.14 ٣٤٥ ²½Ⅷ",
    "Größe naïve e\u0301 한국어 日本語のテスト ελληνικά русский עברית العربية हिन्दी ไทย",
    "😀👍🏽👩‍👩‍👧‍👦🇫🇷 \U0010ffff a\x00b\x7f\xa0\xad\u200b\ufeff\ufffd",
    "<|endoftext|>a<|endoftext|> <|endoftext|>\n<|endoftext the<s>other</s>hook <unk>",
    f"{USER}hi<think>so</think>    x if (x_1 != y[0]) {{ return \\xe2; }} // ĠĊ ▁ <0x41>",
    "a" * 300 + " " * 300 + "!" * 300 + "ab" * 150,
]


def write(
    directory, vocabulary=VOCABULARY, merges=MERGES, names=("vocab.json", "merges.txt"), **files
):
    """Write a vocabulary, merges, and other JSON files to a directory, and return it.

    The keywords are the names of the other files, without ".json".
    """
    (directory / names[0]).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (directory / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    for name, described in files.items():
        (directory / f"{name}.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


def other(vocabulary, merges):
    """Return a tokenizer of `tiktoken`, OpenAI's implementation."""
    signs = dict(zip(SIGNS, BYTES, strict=True))
    pieces = [*SIGNS, *(merge.replace(" ", "") for merge in merges)]
    return tiktoken.Encoding(
        "other",
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        mergeable_ranks={bytes(signs[s] for s in piece): vocabulary[piece] for piece in pieces},
        special_tokens={END: vocabulary[END]},
    )


@pytest.fixture(scope="module", params=["small", "GPT-2"])
def both(request, tmp_path_factory):
    """A tokenizer that is read from two files, and OpenAI's implementation of the same files."""
    if request.param == "small":
        directory = write(tmp_path_factory.mktemp("pair"), names=("encoder.json", "vocab.bpe"))
    elif not (directory := GPT2).is_dir():
        pytest.skip(f"GPT-2's own encoder.json and vocab.bpe are not at {GPT2}")
    vocabulary = json.loads((directory / "encoder.json").read_text(encoding="utf-8"))
    merges = (directory / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    return load_tokenizer(directory), other(vocabulary, merges)


@pytest.fixture
def pair(tmp_path):
    return load_tokenizer(write(tmp_path))


@pytest.fixture
def saved(tmp_path):
    def save(model, **parts):
        tokenizer = tokenizers.Tokenizer(model)
        added = parts.pop("added", [])
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        tokenizer.add_tokens(added)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path)

    return save


# Tests of all tokenizers.


def test_objects_that_are_tokenizers(pair):
    assert isinstance(CharTokenizer("ab"), Tokenizer)
    assert isinstance(pair, Tokenizer)
    assert not isinstance("ab", Tokenizer)


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'tokenizers is missing: pip install (-e )?".*\[hf\]'):
        load_tokenizer(write(tmp_path))


def test_half_a_character_is_refused(pair):
    with pytest.raises(ValueError, match=r"ud800.* 3"):
        pair.encode("abc\ud800")


@pytest.mark.usefixtures("unchecked")
def test_tokens_are_whole_numbers_of_the_vocabulary(pair, saved):
    gaps = saved(kinds.WordLevel({"a": 0, "b": 5, "?": 7}, unk_token="?"))
    for tokenizer, known, outside in (
        (pair, [3, 261], [-1, 262, 2**33]),
        (CharTokenizer("abcd"), [3, 0], [-1, 4]),
        (gaps, [5, 7], [4, 8]),
    ):
        for method in (tokenizer.decode, tokenizer.tokens_as_text):
            assert (
                method(torch.tensor(known)) == method(np.array(known, np.uint16)) == method(known)
            )
            assert not method([])
            for token in outside:
                with pytest.raises(ValueError, match=str(token)):
                    method([*known, token])
            with pytest.raises(TypeError):
                method([3.0])


# Byte pairs.


def test_byte_pairs_worked_out_by_hand(pair):
    assert pair.encode("hello world") == [258, 78, 259, 78, 81, 75, 67]
    assert pair.encode("he  ll") == [257, 220, 220, 256]
    assert pair.encode(f"é😀he{END}w") == [260, 172, 253, 246, 222, 257, 261, 86]
    assert pair.encode("<|endof") == [27, 91, 68, 77, 67, 78, 69]
    assert pair.decode([261, 259, 260, 188, 172, 253, 246, 222]) == f"{END} wé\x00😀"
    texts = pair.tokens_as_text([172, 253, 246, 222, 259, 260, 261, 198, 127])
    assert texts == [r"\xf0", r"\x9f", r"\x98", r"\x80", " w", "é", END, "\n", r"\xc3"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_pairs_match_another_implementation(text, both):
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text, allowed_special="all")
    assert ours.decode(ours.encode(text)) == text


@given(text=st.text() | st.text("ehlow 'st\n\té😀07<|endoftext|>Ġ", max_size=40), data=st.data())
def test_byte_pairs_of_any_text_and_texts_of_any_tokens(both, text, data):
    ours, theirs = both
    tokens = ours.encode(text)
    assert tokens == theirs.encode(text, allowed_special="all")
    assert ours.decode(tokens) == text
    assert len(ours.tokens_as_text(tokens)) == len(tokens)
    tokens = data.draw(st.lists(st.sampled_from(range(theirs.n_vocab)), max_size=9))
    assert ours.decode(tokens) == theirs.decode(tokens)


def test_numbers_need_not_follow_the_merges(tmp_path):
    pieces = ["<s>", "</s>", "hell", *reversed(SIGNS), "Ã©", "he", "madeupword0000", "Ġw", "ll"]
    tokenizer = load_tokenizer(write(tmp_path, {piece: i for i, piece in enumerate(pieces)}))
    # The signs are in reverse order and have the numbers 258 down to 3: an "o" is 258 - 78, and a
    # space is 258 - 220.
    assert tokenizer.encode("hello w<s> é</s>") == [2, 180, 262, 0, 38, 259, 1]
    assert tokenizer.tokens_as_text([263, 261, 260, 180]) == ["ll", "madeupword0000", "he", "o"]


# Other files in the directory, compared with transformers.

PLAIN = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=True)
PAD = {"262": dict(PLAIN, content="<pad>"), "263": dict(PLAIN, content="né w", special=False)}


# transformers gives this warning with tokenizers older than 0.23.
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")
@pytest.mark.parametrize(
    "files",
    [
        dict(added_tokens={"né w": 263, "<pad>": 262}),
        dict(added_tokens={"<pad>": 262}, special_tokens_map={"pad_token": "<pad>"}),
        dict(tokenizer_config=dict(added_tokens_decoder=PAD)),
        dict(
            tokenizer_config=dict(added_tokens_decoder=PAD, pad_token="<pad>"),
            added_tokens={"<pad>": 262, "né w": 263},
            special_tokens_map={"pad_token": dict(content="<pad>", lstrip=False)},
        ),
        dict(tokenizer_config=dict(tokenizer_class="GPT2TokenizerFast", pad_token="!")),
        dict(tokenizer_config=dict(additional_special_tokens=["hell", "w"], add_bos_token=False)),
        dict(special_tokens_map=dict(bos_token=END, eos_token=dict(content="he", special=True))),
        dict(tokenizer_config=dict(add_bos_token=True)),
        dict(
            tokenizer_config=dict(add_bos_token=True, bos_token=END, eos_token=END),
            special_tokens_map=dict(bos_token=dict(content="he", special=True)),
        ),
        dict(tokenizer_config=dict(added_tokens_decoder={"262": PAD["262"] | dict(lstrip=True)})),
        dict(tokenizer_config=dict(add_prefix_space=True, model_max_length=1024, eos_token="ll")),
    ],
)
def test_added_tokens_match_transformers(files, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(write(tmp_path, **files))
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in (f"he<pad>hell  né w <pad> wné w{END}né wé <pa[MASK]d>!!", *TEXTS):
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(tokens) == theirs.decode(tokens)
    text, bare = (theirs.encode("w", add_special_tokens=added) for added in (True, False))
    starts = tuple(text[: len(text) - len(bare)])
    assert (ours.bos_token_ids, ours.eos_token_ids) == (starts, (theirs.eos_token_id,))


def test_added_tokens_worked_out_by_hand(tmp_path):
    ours = load_tokenizer(write(tmp_path, added_tokens={"<pad>": 262, "né": 263}))
    assert ours.encode("he<pad>néw") == [257, 262, 263, 86]
    assert ours.decode([262, 257, 263]) == "<pad>hené"
    assert ours.tokens_as_text([263, 262]) == ["né", "<pad>"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (dict(tokenizer_config=dict(tokenizer_class="Qwen2Tokenizer")), "Qwen2Tokenizer"),
        (dict(tokenizer_config=dict(auto_map={"AutoTokenizer": ["a.B"]})), "tokenizer.json"),
        (dict(tokenizer_config=["a"]), "tokenizer_config.json"),
        (dict(special_tokens_map={"pad_token": "<pad>"}), "<pad>"),
        (dict(added_tokens={"<pad>": 300}), "300"),
        (dict(added_tokens={"hell": 262}), "262"),
        (dict(merges=MERGES[:2]), "hell"),
        (dict(merges=[*MERGES, "a b"]), "ab"),
    ],
)
def test_settings_that_would_silently_change_tokens_are_errors(files, said, tmp_path):
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(write(tmp_path, **files))
    assert str(tmp_path) in str(caught.value)


# tokenizer.json and GGUF, compared with the tokenizers of the library that wrote them.


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("file", ["tokenizer.json", "model.gguf"])
def test_files_give_the_tokenizer_that_they_were_written_from(name, file, tmp_path):
    make, said = ORIGINALS[name]
    original, path = make(), tmp_path / file
    if file == "tokenizer.json":
        original.enable_truncation(3)
        original.enable_padding(length=5, pad_id=7)
        original.save(str(path))
        original.no_truncation()
        original.no_padding()
    else:
        write_gguf(path, original, **said)
    ours = load_tokenizer(path)
    for text in (*CORPUS.splitlines(), CORPUS, *TEXTS):
        tokens = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == original.decode(tokens, skip_special_tokens=False)
        assert ours.decode(tokens) == text or said["model"] != "gpt2"


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", "rwkv"), ("model", None), ("pre", "kimi-k2"), ("pre", "smolm"), ("merges", ["q zz"])]
    + [(key, None) for key in ("merges", "tokens", "token_type")],
)
def test_gguf_tokenizers_that_cannot_be_read(key, value, tmp_path):
    path, original = tmp_path / "model.gguf", byte_level()
    with pytest.raises(ValueError, match=key) as caught:
        load_tokenizer(write_gguf(path, original, **{"model": "gpt2", "pre": "gpt-2", key: value}))
    assert str(path) in str(caught.value)


def test_spaces_and_bytes_as_sentencepiece_writes_them(saved):
    pieces = ["<unk>", "<s>", "▁", "t", "h", "▁t", "▁th", *(f"<0x{b:02X}>" for b in range(256))]
    ours = saved(
        kinds.BPE(
            {p: i for i, p in enumerate(pieces)}, [("▁", "t"), ("▁t", "h")], byte_fallback=True
        ),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
        added=[AddedToken("<s>", special=True)],
    )
    # The token of a byte is 7 plus the byte.
    assert ours.encode("th é<s>") == [6, 2, 7 + 0xC3, 7 + 0xA9, 1]
    assert ours.decode([6, 3, 7 + 0xC3, 7 + 0xA9, 1]) == " thté<s>"
    texts = ours.tokens_as_text([6, 3, 7 + 0xC3, 7 + 0x0A, 1, 2])
    assert texts == [" th", "t", r"\xc3", "\n", "<s>", " "]


SIX = {piece: token for token, piece in enumerate("abÃ©Ġx")}


@pytest.mark.parametrize(
    ("parts", "text", "tokens", "refused"),
    [
        (
            dict(pre_tokenizer=pre_tokenizers.WhitespaceSplit(), added=["aΩ"]),
            "a b aΩ",
            [0, 1, 6],
            ["a日bcaΩ", "aΩΩ"],
        ),
        (
            dict(
                pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
                decoder=decoders.ByteLevel(),
                added=["zΩ"],
            ),
            "a ézΩ",
            [0, 4, 2, 3, 6],
            ["aè", "a\nb", "zΩz"],
        ),
        (dict(normalizer=normalizers.NFKC()), "\uff41b", [0, 1], ["a "]),
    ],
)
def test_characters_without_a_token_are_errors(parts, text, tokens, refused, saved):
    """Without an unknown token, the library silently drops characters that have no token."""
    ours = saved(kinds.BPE(SIX, []), **parts)
    assert ours.encode(text) == tokens
    for wrong in refused:
        with pytest.raises(ValueError, match="must have a token"):
            ours.encode(wrong)
    assert saved(kinds.BPE({"?": 0, "a": 1}, [], unk_token="?")).encode("aba") == [1, 0, 1]
    assert saved(kinds.BPE({"b": 0}, [])).bos_token_ids == ()


# The order in which files are looked for.


def test_the_files_are_looked_for_in_order(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path)
    write(tmp_path)
    assert load_tokenizer(tmp_path).encode("!hell") == [0, 258]
    shifted = {piece: token for token, piece in enumerate([END, *list(VOCABULARY)[:-1]])}
    write(tmp_path, shifted, names=("encoder.json", "vocab.bpe"))
    assert load_tokenizer(tmp_path).encode("!hell") == [1, 259]
    (tmp_path / "encoder.json").rename(tmp_path / "other.json")
    assert load_tokenizer(tmp_path).encode("!hell") == [0, 258]
    model = kinds.WordLevel({"!hell": 3}, unk_token="!hell")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("!hell") == [3]
    (tmp_path / "vocabulary.json").write_text('["b", "a", "é"]', encoding="utf-8")
    assert load_tokenizer(tmp_path).encode("aéb") == [1, 2, 0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocabulary.json", content)
        for content in (b"[", b'["\xff"]', b'{"a": 0}', b"[1]", b'["a", "a"]')
    ]
    + [("tokenizer.json", content) for content in (b"{", b"[]", b"\xff", b'{"version": "1.0"}')]
    + [("encoder.json", content) for content in (b'{"a": ', b'["a"]', b'{"a": "b"}')]
    + [
        ("added_tokens.json", b'{"<pad>": "262"}'),
        ("special_tokens_map.json", b'{"eos_token": {"id": 3}}'),
    ]
    + [
        ("tokenizer_config.json", content)
        for content in (
            b'{"added_tokens_decoder": {"262": {}}}',
            b'{"added_tokens_decoder": ["a"]}',
            b'{"added_tokens_decoder": {"262": "a"}}',
            b'{"added_tokens_decoder": {"a": {"content": "a"}}}',
            b'{"additional_special_tokens": [3]}',
            b'{"pad_token": {"content": "a", "lstrip": 3}}',
            b'{"eos_token": 3}',
        )
    ]
    + [
        ("vocab.bpe", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("vocabulary.json", b"[" * 100_000),
    ],
)
def test_damaged_files_are_named(name, content, tmp_path):
    write(tmp_path, names=("encoder.json", "vocab.bpe"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)


def tekken(path, **changes):
    """Write a small tekken.json, and return a tokenizer of `tiktoken` with the same tokens.

    In mistral-common, special tokens come first, and tiktoken's tokens follow.
    """
    signs, trained_ = dict(zip(SIGNS, BYTES, strict=True)), json.loads(byte_level().to_str())
    pieces = [*SIGNS, *("".join(pair) for pair in trained_["model"]["merges"])]
    # Tokens of one letter with overlapping merges, and one token that no merge produces.
    pieces = [*dict.fromkeys([*pieces, "aa", "aaa", "aaaaa", "ĠĠ", "ĠĠĠ", "qzjq"])]
    tokens = [bytes(signs[sign] for sign in piece) for piece in pieces]
    tokens = [*map(bytes, ([byte] for byte in range(256))), *(t for t in tokens if len(t) > 1)]
    # This entry is beyond `default_vocab_size`, so it is not a token.
    extra = [{"rank": len(tokens), "token_bytes": "IQ==", "token_str": "!"}]
    size = {"default_vocab_size": len(tokens) + 29, "default_num_special_tokens": 29}
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for n, token in enumerate(tokens)
    ]
    config = {"pattern": LLAMA_3, "num_vocab_tokens": len(tokens) + 1, "version": "v3", **size}
    path.write_text(json.dumps({"config": config, "vocab": entries + extra} | changes))
    return tiktoken.Encoding(
        "other",
        pat_str=LLAMA_3,
        mergeable_ranks={t: n for n, t in enumerate(tokens)},
        special_tokens={},
    )


def test_tekken_matches_tiktoken(tmp_path):
    other = tekken(tmp_path / "tekken.json")
    ours = load_tokenizer(tmp_path)
    rng = np.random.default_rng(0)
    lengths, letters = rng.integers(1, 12, (300, 9)).tolist(), rng.integers(0, 7, (300, 9)).tolist()
    runs = [
        "".join("ab \n=é漢"[letter] * length for letter, length in zip(*run, strict=True))
        for run in zip(letters, lengths, strict=True)
    ]
    # Leave out texts with special tokens, which our tokenizer recognises in a text.
    plain = [text for text in TEXTS if "<s>" not in text]
    for text in [*plain, *runs, " qzjq", "qzjq", CORPUS]:
        tokens = [29 + token for token in other.encode(text, disallowed_special=())]
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == text
    assert ours.vocab_size == 29 + other.n_vocab
    assert (ours.bos_token_ids, ours.eos_token_ids) == ((1,), (2,))
    assert ours.tokens_as_text([0, 3, 17, 19, 20, 28]) == [
        "<unk>",
        "[INST]",
        "[SYSTEM_PROMPT]",
        "[TOOL_CONTENT]",
        "<SPECIAL_20>",
        "<SPECIAL_28>",
    ]
    assert ours.encode("[INST]a</s>") == [3, 29 + ord("a"), 2]
    listed = [{"rank": n, "token_str": text} for n, text in [(0, "</s>"), (4, "<s>"), (5, "<x>")]]
    tekken(tmp_path / "my_tekken.json", special_tokens=listed)
    ours = load_tokenizer(tmp_path / "my_tekken.json")
    assert (ours.bos_token_ids, ours.eos_token_ids, ours.encode("<x>")) == ((4,), (0,), [5])


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["config"].update(version="v11"),
        lambda data: data["config"].pop("pattern"),
        lambda data: data["config"].update(default_vocab_size=9_999),
        lambda data: data["vocab"].reverse(),
        lambda data: data["vocab"][258].update(data["vocab"][257], rank=258),
        lambda data: data["vocab"][258].update(token_bytes="PC9zPg=="),  # </s>
        lambda data: data.update(special_tokens=[{"rank": 1, "token_str": "<s>"}]),
    ],
)
def test_a_damaged_tekken_is_named(change, tmp_path):
    path = tmp_path / "tekken.json"
    tekken(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"tekken\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "SentencePiece"),
        ("mistral.model.v3", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "SentencePiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),
    ],
)
def test_the_error_for_a_sentencepiece_model_names_a_reader(name, content, kind, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"is .*{kind}.*save_pretrained"):
        load_tokenizer(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=f"is .*{kind}.*save_pretrained"):
        load_tokenizer(tmp_path)
    write(tmp_path)
    assert load_tokenizer(tmp_path).encode("!hell") == [0, 258]


def test_dropout_is_off(tmp_path):
    tokenizer = byte_level()
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    tokenizer.model.dropout = 0.5
    assert [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS] != expected
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == 0.5
    loaded = load_tokenizer(tmp_path)
    for _ in range(3):
        assert [loaded.encode(text) for text in TEXTS] == expected


# Tokens at the beginning and at the end of a text.


def begun(directory, template, **files):
    """Write a tokenizer like Llama 2's, with a template for the beginning and the end of texts."""
    original, specials = sentence_pieces(), [("<s>", 1), ("</s>", 2)]
    original.post_processor = processors.TemplateProcessing(template, special_tokens=specials)
    original.save(str(write(directory, **files) / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize(
    "ends",
    [
        {},
        dict(tokenizer_config=dict(eos_token="</s>")),
        dict(
            tokenizer_config=dict(eos_token="</s>"),
            special_tokens_map=dict(eos_token=dict(PLAIN, content="t")),
        ),
    ],
)
def test_beginnings_and_ends_match_transformers(template, ends, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = begun(tmp_path, template, **ends)
    ours = load_tokenizer(directory)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokens = [*ours.bos_token_ids, *ours.encode("hello")]
    assert tokens + [2] * template.endswith("</s>") == theirs("hello").input_ids
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def test_a_file_that_begins_texts_must_say_with_what(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", byte_level(), "gpt2", pre="gpt-2", add_bos_token=True
    )
    with pytest.raises(ValueError, match="bos_token_id"):
        load_tokenizer(path)


def test_tokens_at_the_end_of_a_text_in_gguf(tmp_path):
    make, more = ORIGINALS["bert"]
    assert load_tokenizer(write_gguf(tmp_path / "bert.gguf", make(), **more)).closing_token_ids == (
        3,
    )
    make, more = ORIGINALS["t5"]
    ours = load_tokenizer(write_gguf(tmp_path / "t5.gguf", make(), **more))
    assert (ours.closing_token_ids, ours.eos_token_ids) == ((1,), (1,))


@pytest.mark.parametrize(("name", "after"), [("Phi 3 mini", 3), ("Phi-3-mini", 0), (None, 3)])
def test_the_tokens_of_phi_3_take_the_spaces_after_them(name, after, tmp_path):
    make, more = ORIGINALS["llama"]
    path = write_gguf(tmp_path / "model.gguf", make(), name=name, **more)
    ours = load_tokenizer(path)
    assert len(ours.encode("</s>  ")) == 1 + after
    # `<s>` does not remove the spaces after it.
    assert len(ours.encode("<s>  ")) == 1 + 3


@pytest.mark.parametrize(
    ("name", "said", "start", "end"),
    [
        ("llama", dict(bos_token_id=1, eos_token_id=2), (1,), (2,)),
        (
            "llama",
            dict(add_bos_token=False, eos_token_id=4, eot_token_id=5, eom_token_id=6),
            (),
            (4, 5, 6),
        ),
        ("llama", {}, (1,), (2,)),
        ("gemma 4", dict(eos_token_id=1), (2,), (1,)),
        ("llama 3", dict(bos_token_id=9, eos_token_id=7, eot_token_id=8), (9,), (7, 8)),
        ("gpt2", dict(bos_token_id=9, eos_token_id=9), (), (9,)),
        ("gpt2", dict(bos_token_id=9, add_bos_token=True), (9,), ()),
    ],
)
def test_beginnings_and_ends_in_gguf(name, said, start, end, tmp_path):
    make, more = ORIGINALS[name]
    ours = load_tokenizer(write_gguf(tmp_path / "model.gguf", make(), **more | said))
    assert (ours.bos_token_ids, ours.eos_token_ids) == (start, end)
    said = {"bos_token_id": 1 if name == "llama" else None} | more | said
    assert ours.bos_token_id == said["bos_token_id"]


# Generation of texts.


def saying(vocab_size, *rows, **options):
    """Return a model that continues each row with given tokens, and a list of the tokens that it
    read.
    """
    sizes = dict(n_ctx=29, n_layers=1, n_heads=1, d_model=2)
    model = Transformer(TransformerConfig(vocab_size=vocab_size, **sizes, **options)).eval()
    steps, read = zip(*rows, strict=True), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].tolist()))

    def say(module, args, logits):
        chosen = torch.nn.functional.one_hot(torch.tensor(next(steps)), vocab_size)
        return chosen[:, None].expand_as(logits).float()

    model.unembedding.register_forward_hook(say)
    return model, read


@pytest.mark.parametrize(
    ("options", "ends", "texts"),
    [
        ({}, (), ["he😀", "hell w wooo\ufffd"]),
        (dict(stop=()), (), [f"he😀{END}", "hell w wooo\ufffd"]),
        ({}, (78,), ["he😀", "hell w w"]),
        (dict(stop=[78, 261]), (), [f"he😀{END}", "hell w wo"]),
    ],
)
def test_text_in_text_out(pair, options, ends, texts):
    """Four tokens of bytes become one character. The token for the end of a text is not shown, and
    other stop tokens are shown.
    """
    rows = [172, 253, 246, 222, 261], [259, 78, 78, 78, 172]
    model, _ = saying(262, *rows, eos_token_ids=ends)
    model.tokenizer = pair
    prompts = ["he", "hell w"]
    assert generate_text(model, prompts, max_new_tokens=5, **options) == texts
    model, _ = saying(262, rows[0])
    model.tokenizer = pair
    assert generate_text(model, "he", max_new_tokens=5, **options) == texts[0]


def test_a_tokenizer_may_end_texts_with_a_token_that_the_model_lacks(pair):
    model, _ = saying(261, [172, 253, 246, 222])
    model.tokenizer = pair
    assert generate_text(model, "he", max_new_tokens=4) == "he😀"


@pytest.mark.parametrize("prompt", ["The theory", "<s>The theory", ""])
def test_a_prompt_begins_as_its_tokenizer_says(prompt, tmp_path):
    described = dict(tokenizer_config=dict(eos_token="</s>"))
    ours = load_tokenizer(begun(tmp_path, "<s> $A", **described))
    model, read = saying(400, [*ours.encode("of hooks"), 2])
    model.tokenizer = ours
    assert generate_text(model, prompt, max_new_tokens=19) == f"{prompt} of hooks"
    assert read[0] == [[1, *ours.encode(prompt.removeprefix("<s>"))]]
