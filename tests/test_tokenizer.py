"""Tokenizers, against tokens worked out by hand and against other implementations of the same files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as kinds

from models import load_tokenizer
from models.tokenizers import CharTokenizer, Tokenizer
from models.tokenizers.bpe import BytePairTokenizer
from models.tokenizers.tokenizer_json import JsonTokenizer
from models.tokenizers.vocabulary import byte_signs

GPT2 = Path(__file__).parents[2] / "shared" / "data" / "gpt2"
END = "<|endoftext|>"
# The signs of the 256 bytes, in GPT-2's order: printable Latin-1, then what stands for the rest.
SIGNS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
MERGES = ["l l", "h e", "he ll", "Ġ w", "Ã ©"]
# 256 signs, then 256 ll, 257 he, 258 hell, 259 " w", 260 é, 261 the end of a text.
VOCABULARY = {piece: i for i, piece in enumerate([*SIGNS, "ll", "he", "hell", "Ġw", "Ã©", END])}
DIFFICULT = [
    "",
    " ",
    "Hello world",
    "hello  world   ",
    "\n\n\t x \r\n\x0b\x0c\x1c y\u2028z\x85\u3000",
    "don't we'll I've they're he'd I'm it's DON'T ''s 's",
    "1234567890 3.14 ٣٤٥ ²½Ⅷ",
    "Größe naïve Ünïcode e\u0301 \u0301 한국어 \u1112\u1161\u11ab",
    "日本語のテスト 中文測試 ελληνικά русский עברית العربية हिन्दी ไทย",
    "😀👍🏽👩‍👩‍👧‍👦🇫🇷 \U0010ffff\U0001d54f",
    "a\x00b\x7f\xa0\xad\u200b\ufeff\ufffd",
    "<|endoftext|>a<|endoftext|> <|endoftext|>\n<|endoftext",
    "if (x_1 != y[0]) { return \\xe2; } // ĠĊ ▁ <0x41>",
    "a" * 700 + " " * 700 + "!" * 700 + "ab" * 350,
]
TEXTS = st.one_of(st.text(), st.text("ehlow 'st\n\té😀07<|endoftext|>Ġ", max_size=40))


def write(directory: Path, vocabulary: object, merges: str, names=("encoder.json", "vocab.bpe")):
    directory.mkdir(exist_ok=True)
    (directory / names[0]).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (directory / names[1]).write_text(merges, encoding="utf-8")
    return directory


def made(model, **parts) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def byte_level(model) -> tokenizers.Tokenizer:
    """The library tokenizers' own byte-level encoding: an implementation that tiktoken has no part in."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = made(model, pre_tokenizer=splitter, decoder=decoders.ByteLevel())
    tokenizer.add_special_tokens([END])
    return tokenizer


def pairs_of(merges):
    return [tuple(merge.split(" ")) for merge in merges]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    lines = "\n".join(["#version: 0.2", *MERGES, ""])
    return load_tokenizer(write(tmp_path_factory.mktemp("pair"), VOCABULARY, lines))


@pytest.fixture
def saved(tmp_path):
    def save(tokenizer: tokenizers.Tokenizer) -> JsonTokenizer:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path)

    return save


@pytest.fixture(scope="module")
def gpt2():
    if not GPT2.is_dir():
        pytest.skip(f"GPT-2's own encoder.json and vocab.bpe are not at {GPT2}")
    files = [str(GPT2 / name) for name in ("encoder.json", "vocab.bpe")]
    return load_tokenizer(GPT2), byte_level(kinds.BPE.from_file(*files))


def llama() -> tokenizers.Tokenizer:
    """A tokenizer like Llama's: ▁ for a space, and tokens for bytes."""
    pieces = ["<unk>", "<s>", "▁", "t", "h", "e", "▁t", "▁th", "▁the", "h▁"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = made(
        kinds.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("▁t", "h"), ("▁th", "e")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        ),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        post_processor=processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)]),
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


# What all have in common.


def test_the_protocol_is_three_methods(pair, saved):
    public = {name for name in vars(Tokenizer) if not name.startswith("_")}
    assert public == {"encode", "decode", "tokens_as_text"}
    for tokenizer in (CharTokenizer("ab"), pair, saved(llama())):
        assert isinstance(tokenizer, Tokenizer)
    assert not isinstance("ab", Tokenizer)


def test_importing_them_imports_no_library():
    code = (
        "import torch, sys; had = set(sys.modules); import models.tokenizers.tokenizer; "
        "print({'tokenizers', 'tiktoken', 'regex', 'transformers'} & set(sys.modules) - had)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


@pytest.mark.parametrize("library", ["tokenizers", "tiktoken"])
def test_a_missing_library_says_what_to_install(library, tmp_path, monkeypatch):
    write(tmp_path, VOCABULARY, "\n".join(MERGES))
    if library == "tokenizers":
        llama().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f'{library} is missing: pip install "hookscope[hf]"'


def test_a_library_that_itself_lacks_something_says_so(tmp_path, monkeypatch):
    (tmp_path / "tiktoken.py").write_text("import regexes_by_someone")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tiktoken", raising=False)
    with pytest.raises(ModuleNotFoundError, match="regexes_by_someone"):
        BytePairTokenizer(VOCABULARY, MERGES)


@pytest.mark.parametrize("text", ["\ud800", "ab \udfff\ud83d c"])
def test_half_a_character_is_refused(text, pair, saved):
    place, half = next((i, c) for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    for tokenizer in (pair, saved(llama())):
        with pytest.raises(ValueError, match="a lone surrogate") as caught:
            tokenizer.encode(text)
        assert str(caught.value).startswith(f"{half!r} at {place} is")


def test_tokens_outside_the_vocabulary_are_named(pair, saved):
    for tokenizer, last in ((pair, 261), (saved(llama()), 265)):
        for method in (tokenizer.decode, tokenizer.tokens_as_text):
            for outside in (-1, last + 1, 2**33):
                with pytest.raises(ValueError, match=rf"0 to {last}, and not \[{outside}\]"):
                    method([3, outside, 4])
            assert method([last])
            assert not method([])


@pytest.mark.usefixtures("unchecked")
def test_tokens_are_whole_numbers_whatever_holds_them(pair, saved):
    for tokenizer in (pair, saved(llama()), CharTokenizer("abcdef")):
        for method in (tokenizer.decode, tokenizer.tokens_as_text):
            expected = method([3, 4, 5])
            assert method(torch.tensor([3, 4, 5])) == expected
            assert method(np.array([3, 4, 5], dtype=np.uint16)) == expected
            for wrong in ([3.0, 4.0], [[3, 4]], ["3"], torch.tensor([[3, 4]])):
                with pytest.raises(ValueError, match="tokens are whole numbers, one after another"):
                    method(wrong)


def test_a_tokenizer_json_may_be_named_itself(saved, tmp_path):
    tokenizer = saved(llama())
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("low") == tokenizer.encode("low")


# Byte pairs.


def test_the_signs_of_bytes_are_those_of_another_implementation():
    signs = byte_signs()
    assert list(signs) == SIGNS
    assert sorted(signs.values()) == list(range(256))
    assert set(signs) == set(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, (*range(0x800), 0x3042, 0xFFFD, 0x1F600, 0x10FFFF)):
        [(written, _)] = splitter.pre_tokenize_str(character)
        assert bytes(signs[sign] for sign in written) == character.encode()


def test_byte_pairs_worked_out_by_hand(pair):
    assert pair.encode("hello world") == [258, 78, 259, 78, 81, 75, 67]
    assert pair.encode("he  ll") == [257, 220, 220, 256]
    assert pair.encode("é😀") == [260, 172, 253, 246, 222]
    assert pair.encode(f"he{END}w") == [257, 261, 86]
    assert pair.encode("<|endoftext") == [27, 91, 68, 77, 67, 78, 69, 83, 68, 87, 83]
    assert pair.encode("") == []
    assert pair.decode([261, 259, 260, 188, 172, 253, 246, 222]) == f"{END} wé\x00😀"
    assert pair.decode([172, 253, 246]) == "\ufffd"


def test_parts_of_a_character_are_displayed_as_bytes(pair):
    texts = pair.tokens_as_text([172, 253, 246, 222, 259, 260, 261, 198, 127])
    assert texts == [r"\xf0", r"\x9f", r"\x98", r"\x80", " w", "é", END, "\n", r"\xc3"]


@pytest.mark.parametrize("text", DIFFICULT)
def test_byte_pairs_are_those_of_another_implementation(text, pair):
    other = byte_level(kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES)))
    assert pair.encode(text) == other.encode(text).ids
    assert pair.decode(pair.encode(text)) == text


@given(TEXTS)
def test_byte_pairs_come_back_as_the_text(pair, text):
    tokens = pair.encode(text)
    assert pair.decode(tokens) == text
    assert len(pair.tokens_as_text(tokens)) == len(tokens)


@given(st.lists(st.sampled_from(range(262)), max_size=9))
def test_any_tokens_decode_as_elsewhere(pair, tokens):
    other = byte_level(kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES)))
    assert pair.decode(tokens) == other.decode(tokens, skip_special_tokens=False)


def test_numbers_need_not_follow_the_merges(tmp_path):
    pieces = ["<s>", "</s>", "hell", *reversed(SIGNS), "Ã©", "he", "madeupword0000", "Ġw", "ll"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    lines = "\n".join(MERGES)
    tokenizer = load_tokenizer(write(tmp_path, vocabulary, lines, ("vocab.json", "merges.txt")))
    # Reversed, the signs take 258 down to 3: an o is 258 - 78, and a space 258 - 220.
    assert tokenizer.encode("hello w<s>") == [2, 180, 262, 0]
    assert tokenizer.encode(" é</s>") == [38, 259, 1]
    assert tokenizer.tokens_as_text([263, 261, 260, 180]) == ["ll", "madeupword0000", "he", "o"]
    assert tokenizer.decode([2, 180, 262, 0]) == "hello w<s>"


def test_a_file_that_changes_gives_other_tokens(tmp_path, monkeypatch):
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    directory = write(tmp_path / "m", VOCABULARY, "\n".join(MERGES))
    assert load_tokenizer(directory).encode("hell") == [258]
    without = {piece: i for i, piece in enumerate([*SIGNS, "ll", "he"])}
    write(directory, without, "l l\r\nh e\r\n")
    assert load_tokenizer(directory).encode("hell") == [257, 256]
    assert not (tmp_path / "cache").exists()


@given(st.data())
def test_merges_are_followed_as_elsewhere_or_refused(data):
    """Of random merges, those are refused with which a token's own text is not that token."""
    pieces, merges = ["a", "b"], []
    for _ in range(data.draw(st.integers(1, 7))):
        first, second = data.draw(st.sampled_from(pieces)), data.draw(st.sampled_from(pieces))
        if first + second not in pieces:
            pieces.append(first + second)
            merges.append(f"{first} {second}")
    vocabulary = {piece: token for token, piece in enumerate([*SIGNS, *pieces[2:]])}
    other = byte_level(kinds.BPE(vocab=vocabulary, merges=pairs_of(merges)))
    if all(other.encode(piece).ids == [vocabulary[piece]] for piece in pieces):
        text = data.draw(st.text("abc", max_size=20))
        assert BytePairTokenizer(vocabulary, merges).encode(text) == other.encode(text).ids
    else:
        with pytest.raises(ValueError, match="is never reached"):
            BytePairTokenizer(vocabulary, merges)


def renumbered(**tokens):
    return VOCABULARY | tokens


@pytest.mark.parametrize(
    ("vocabulary", "merges", "said"),
    [
        (renumbered(ll=3), MERGES, "of 262 are 0 to 261, .*missing: 256; .*outside: 3$"),
        (renumbered(ll=900), MERGES, "missing: 256; .*outside: 900$"),
        (renumbered(ll=-1), MERGES, "missing: 256; .*outside: -1$"),
        (VOCABULARY | {"left over": 262}, MERGES, "no merge makes 'left over'"),
        (VOCABULARY, MERGES[:2], "no merge makes 'hell', 'Ġw', 'Ã©', and"),
        (VOCABULARY, [*MERGES, "a b"], "merge 'a b' must join"),
        (VOCABULARY | {"xyz": 262}, [*MERGES, "xy z"], "merge 'xy z' must join"),
        (VOCABULARY | {"xyz": 262}, [*MERGES, "x yz"], "merge 'x yz' must join"),
        (VOCABULARY, [*MERGES[:-1], MERGES[2], MERGES[-1]], "merge 'he ll' must join"),
        (VOCABULARY, [MERGES[2], *MERGES[:2], *MERGES[3:]], "merge 'he ll' must join"),
        (VOCABULARY, [*MERGES, "a", "b"], "'a' is not two pieces"),
        (VOCABULARY, [*MERGES, "a b c"], "'a b c' is not two pieces"),
        (VOCABULARY, [*MERGES, "a  b"], "'a  b' is not two pieces"),
        (VOCABULARY, [*MERGES, "日 本"], "'日 本' is not two pieces"),
        (VOCABULARY, [*MERGES, "a "], "merge 'a ' must join"),
    ],
)
def test_files_that_do_not_fit_each_other(vocabulary, merges, said, tmp_path):
    write(tmp_path, vocabulary, "\n".join(["#version: 0.2", *merges]))
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'encoder.json'} with vocab.bpe: ")
    assert "\n" not in str(caught.value)


def test_a_byte_without_a_token(tmp_path):
    pieces = [piece for piece in VOCABULARY if piece not in ("Ċ", "q")]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    write(tmp_path, vocabulary, "\n".join(MERGES))
    with pytest.raises(ValueError, match="lacks the signs of bytes 'q', 'Ċ'"):
        load_tokenizer(tmp_path)


# Files beside the two, against transformers reading the same directory.

BESIDE = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
PLAIN = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=True)
PAD = {"262": dict(PLAIN, content="<pad>"), "263": dict(PLAIN, content="né w", special=False)}
TEXT = f"he<pad>hell  né w<pad> wné w{END}né wé <pa[MASK]d>!!"


def beside(directory, vocabulary=VOCABULARY, names=("vocab.json", "merges.txt"), **files):
    """A directory with the two files and others, given by the first part of their names."""
    write(directory, vocabulary, "\n".join(["#version: 0.2", *MERGES, ""]), names)
    for name in BESIDE:
        if (described := files.get(name.removesuffix(".json"))) is not None:
            (directory / name).write_text(json.dumps(described), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    "files",
    [
        dict(added_tokens={"<pad>": 262, "né w": 263}),
        dict(added_tokens={"<pad>": 262}, special_tokens_map={"pad_token": "<pad>"}),
        dict(tokenizer_config=dict(added_tokens_decoder=PAD)),
        dict(
            tokenizer_config=dict(
                tokenizer_class="GPT2Tokenizer", added_tokens_decoder=PAD, pad_token="<pad>"
            ),
            added_tokens={"<pad>": 262, "né w": 263},
            special_tokens_map={"pad_token": dict(content="<pad>", lstrip=False)},
        ),
        dict(tokenizer_config=dict(tokenizer_class="GPT2TokenizerFast", pad_token="!")),
        dict(tokenizer_config=dict(additional_special_tokens=["hell", "w"], add_bos_token=False)),
        dict(special_tokens_map=dict(bos_token=END, eos_token=dict(content="he", special=True))),
        dict(tokenizer_config=dict(pad_token=None, model_max_length=1024, add_prefix_space=False)),
        dict(tokenizer_config=dict(added_tokens_decoder={"261": dict(PLAIN, content=END)})),
    ],
)
def test_added_tokens_are_those_of_transformers(files, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = beside(tmp_path, **files)
    theirs = transformers.GPT2Tokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    for text in (TEXT, *DIFFICULT):
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(tokens) == text


def test_added_tokens_worked_out_by_hand(tmp_path):
    added = {"<pad>": 262, "né w": 263}
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        ours = load_tokenizer(beside(tmp_path, names=names, added_tokens=added))
        assert ours.encode("he<pad>né ww") == [257, 262, 263, 86]
        assert ours.decode([262, 257, 263]) == "<pad>hené w"
        assert ours.tokens_as_text([263, 262]) == ["né w", "<pad>"]
        with pytest.raises(ValueError, match=r"264 tokens are within 0 to 263, and not \[264\]"):
            ours.decode([264])
    masked = VOCABULARY | {"[MASK]": 262}
    named = beside(tmp_path, masked, special_tokens_map={"mask_token": "[MASK]"})
    for name in ("encoder.json", "vocab.bpe", "added_tokens.json"):
        (named / name).unlink()
    assert load_tokenizer(named).encode("a[MASK]b") == [64, 262, 65]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            dict(tokenizer_config=dict(tokenizer_class="Qwen2Tokenizer")),
            "tokenizer_config.json: tokenizer_class is 'Qwen2Tokenizer', .*put its tokenizer.json",
        ),
        (dict(tokenizer_config=dict(tokenizer_class=["a"])), r"tokenizer_class is \['a'\]"),
        (dict(tokenizer_config=dict(add_prefix_space=True)), "add_prefix_space is True"),
        (dict(tokenizer_config=dict(split_special_tokens=True)), "split_special_tokens is True"),
        (dict(tokenizer_config=dict(auto_map={"AutoTokenizer": ["a.B"]})), "auto_map is {'Auto"),
        (dict(tokenizer_config=["a"]), "tokenizer_config.json is not a JSON object"),
        (dict(tokenizer_config=dict(added_tokens_decoder=[1])), r"by number, not \[1\]"),
        (dict(tokenizer_config=dict(added_tokens_decoder={"a": "b"})), "tokens by number, not"),
        (dict(tokenizer_config=dict(added_tokens_decoder={"262": 3})), "token 262 is text, not 3"),
        (dict(tokenizer_config=dict(additional_special_tokens="ab")), "list of tokens, not 'ab'"),
        (
            dict(tokenizer_config=dict(pad_token=dict(content="!", lstrip=True))),
            "lstrip of '!' is False, not True",
        ),
        (
            dict(tokenizer_config=dict(added_tokens_decoder={"262": dict(PLAIN, content="")})),
            "the token 262 is text, not {",
        ),
        (dict(special_tokens_map={"pad_token": "Ġ"}), "'Ġ' is written in signs of bytes"),
        (dict(special_tokens_map={"pad_token": "<pad>"}), "pad_token is '<pad>', which neither"),
        (dict(added_tokens={"<pad>": "262"}), "whole numbers, not '<pad>' '262'"),
        (dict(added_tokens={"<pad>": 300}), "of 263 are 0 to 262, .*missing: 262; .*outside: 300"),
        (dict(added_tokens={"hell": 262}), "added token 'hell' is 262, and in the vocabulary 258"),
        (dict(added_tokens={"<p>": 262, "<p>>": 263}), "do not overlap, as '<p>'"),
        (dict(added_tokens={"<p>": 262, "x<p>y": 263}), "not overlap, as 'x<p>y' and '<p>'"),
        (dict(added_tokens={"a b": 262, "b c": 263}), "do not overlap, as 'a b' and 'b c'"),
        (dict(added_tokens={"<|end": 262}), "do not overlap"),
        (
            dict(tokenizer_config=dict(added_tokens_decoder={}), added_tokens={"<pad>": 262}),
            "added_tokens.json gives '<pad>' the number 262, and tokenizer_config.json none",
        ),
    ],
)
def test_what_changes_tokens_and_is_not_expressed_is_named(files, said, tmp_path):
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(beside(tmp_path, **files))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_may_overlap_itself(tmp_path):
    ours = load_tokenizer(beside(tmp_path, added_tokens={"|a|": 262, "    ": 263}))
    assert ours.encode("|a|a|     |a|") == [262, 64, 91, 263, 220, 262]


# GPT-2's own files.


def test_gpt2_gives_the_tokens_that_are_known(gpt2):
    ours, _ = gpt2
    # From OpenAI's documentation of tiktoken, and GPT-2's encoder.json.
    assert ours.encode("Hello world") == [15496, 995]
    assert ours.encode("hello world") == [31373, 995]
    assert ours.encode(END) == [50256]
    assert ours.decode([15496, 995, 50256]) == f"Hello world{END}"
    assert ours.tokens_as_text([15496, 995, 50256]) == ["Hello", " world", END]


def test_each_token_of_gpt2_has_a_text_of_its_own(gpt2):
    ours, other = gpt2
    texts = ours.tokens_as_text(range(50257))
    assert len(set(texts)) == 50257
    for token, text in enumerate(texts):
        # A few tokens are made of U+FFFD itself; ï¿½ are the signs of its bytes.
        itself = "ï¿½" in other.id_to_token(token)
        assert ("\ufffd" in text) == itself
        assert itself or (r"\x" in text and text != r"\x") == ("\ufffd" in other.decode([token]))


@pytest.mark.parametrize("text", DIFFICULT)
def test_gpt2_is_as_elsewhere(text, gpt2):
    ours, other = gpt2
    assert ours.encode(text) == other.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@given(TEXTS)
def test_gpt2_is_as_elsewhere_on_any_text(gpt2, text):
    ours, other = gpt2
    tokens = ours.encode(text)
    assert tokens == other.encode(text).ids
    assert ours.decode(tokens) == text


@given(st.lists(st.integers(0, 50256), max_size=20))
def test_gpt2_decodes_any_tokens_as_elsewhere(gpt2, tokens):
    ours, other = gpt2
    assert ours.decode(tokens) == other.decode(tokens, skip_special_tokens=False)


# tokenizer.json.


@pytest.mark.parametrize("text", DIFFICULT)
def test_a_json_of_byte_pairs_agrees_with_the_two_files(text, pair, saved):
    ours = saved(byte_level(kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES))))
    tokens = ours.encode(text)
    assert tokens == pair.encode(text)
    assert ours.decode(tokens) == text
    assert ours.tokens_as_text(tokens) == pair.tokens_as_text(tokens)


def test_spaces_and_bytes_as_sentencepiece_writes_them(saved):
    ours = saved(llama())
    # No <s>, though the file's template asks for one. A byte's token is 10 and the byte.
    assert ours.encode("the théor") == [8, 7, 10 + 0xC3, 10 + 0xA9, 10 + 0x6F, 10 + 0x72]
    assert ours.encode("<s>\n") == [1, 2, 10 + 0x0A]
    assert ours.decode([8, 7, 10 + 0xC3, 10 + 0xA9]) == "the thé"
    assert ours.decode([1, 8, 0]) == "<s> the<unk>"
    assert ours.tokens_as_text([8, 3, 10 + 0xC3, 10 + 0xA9, 10 + 0x0A, 10 + 0x41, 1, 2, 9]) == [
        " the", "t", r"\xc3", r"\xa9", "\n", "A", "<s>", " ", "h ",
    ]  # fmt: skip


def test_the_space_sign_of_a_metaspace_is_the_files(saved):
    model = kinds.WordLevel({"_ab": 0, "c": 1, "?": 2, "<0x41>": 3}, unk_token="?")
    ours = saved(made(model, decoder=decoders.Metaspace(replacement="_")))
    # Without a step for bytes, what looks like a byte's token is not one.
    assert ours.tokens_as_text([0, 1, 3]) == [" ab", "c", "<0x41>"]
    assert ours.encode("nothing known") == [2]


def test_pieces_are_shown_as_they_are_where_nothing_says_otherwise(saved):
    vocabulary = {"▁a": 0, "Ġa": 1, "##a": 2, "?": 3}
    model = kinds.WordLevel(vocabulary, unk_token="?")
    assert saved(made(model)).tokens_as_text([0, 1, 2]) == ["▁a", "Ġa", "##a"]
    pattern = decoders.Replace(tokenizers.Regex("▁+"), " ")
    assert saved(made(model, decoder=pattern)).tokens_as_text([0, 1]) == ["▁a", "Ġa"]


def test_added_tokens_keep_their_letters(saved):
    tokenizer = byte_level(kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES)))
    tokenizer.add_tokens([AddedToken("é!Ġ"), "日本", "    "])
    ours = saved(tokenizer)
    assert ours.encode("hé!Ġé日本    日") == [71, 262, 260, 263, 264, 162, 245, 98]
    assert ours.decode(ours.encode("hé!Ġé日本    日")) == "hé!Ġé日本    日"
    assert ours.tokens_as_text([262, 263, 264, 261]) == ["é!Ġ", "日本", "    ", END]


def test_nothing_is_cut_off_or_padded(saved):
    tokenizer = byte_level(kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES)))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5, pad_id=7)
    assert saved(tokenizer).encode("!!!!") == [0, 0, 0, 0]
    assert saved(tokenizer).encode("!") == [0]


def test_gaps_between_tokens_are_not_tokens(saved):
    ours = saved(made(kinds.WordLevel({"a": 0, "b": 5, "?": 7}, unk_token="?")))
    assert ours.encode("b") == [5]
    with pytest.raises(ValueError, match=r"vocabulary's 3 tokens are within 0 to 7, and not \[4\]"):
        ours.decode([0, 4, 7])
    with pytest.raises(ValueError, match=r"vocabulary's 0 tokens .* not \[0\]"):
        saved(made(kinds.BPE())).decode([0])


def refuses(tokenizer, text, lost):
    with pytest.raises(ValueError, match="has no token") as caught:
        tokenizer.encode(text)
    assert str(caught.value) == f"the tokenizer has no token for {lost}"


def test_what_the_library_leaves_out_is_refused(saved):
    """It drops what has no token where there is no unknown token either, and says nothing."""
    vocabulary = {piece: token for token, piece in enumerate("abÃ©Ġx")}
    model = kinds.BPE(vocab=vocabulary, merges=[])
    letters = made(model, pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    letters.add_tokens(["aΩ"])
    ours = saved(letters)
    assert ours.encode("a bé".replace("é", "Ã©") + " aΩ") == [0, 1, 2, 3, 6]
    refuses(ours, "a日bcaΩ", "'c', '日'")
    refuses(ours, "日b", "'日'")
    refuses(ours, "c©", "'c'")
    refuses(ours, "aΩΩ", "'Ω'")


def test_bytes_that_the_library_leaves_out_are_refused(saved):
    vocabulary = {piece: token for token, piece in enumerate("abÃ©Ġx")}
    tokenizer = byte_level(kinds.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_tokens(["zΩ"])
    ours = saved(tokenizer)
    # é is C3 A9; of è, C3 A8, the first half is there.
    assert ours.encode(f"a é{END}zΩ") == [0, 4, 2, 3, 6, 7]
    refuses(ours, "aè", "'è'")
    refuses(ours, "a\nb", r"'\n'")
    refuses(ours, "zΩz", "'z'")


def test_what_a_prefix_hides_is_refused_too(saved):
    vocabulary = {piece: token for token, piece in enumerate(["▁", "a", "<0xCE>", "<0xA9>"])}
    model = kinds.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    steps = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ours = saved(made(model, normalizer=spaces, decoder=steps))
    assert ours.encode("a Ω▁") == [0, 1, 0, 2, 3, 0]
    refuses(ours, "ab", "'b'")


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.BertNormalizer()],
)
def test_what_the_file_itself_changes_is_no_loss(normalizer, saved):
    letters = {piece: token for token, piece in enumerate("aeé\u0301fi")}
    tokenizer = made(kinds.BPE(vocab=letters, merges=[]), normalizer=normalizer)
    ours = saved(tokenizer)
    for text in ("e\u0301a", "éf", "a e"):
        assert ours.encode(text) == tokenizer.encode(text).ids != []
    composed = {normalizers.NFC: [2], normalizers.NFKC: [2], normalizers.NFD: [1, 3]}
    assert ours.encode("e\u0301") == composed.get(type(normalizer), [1])
    if isinstance(normalizer, normalizers.NFKC):
        assert ours.encode("ﬁ") == [4, 5]
    if isinstance(normalizer, normalizers.BertNormalizer):
        assert ours.encode("a\x00\u200b") == [0]


def test_what_the_file_marks_as_unknown_is_no_loss(saved):
    piece = kinds.BPE(vocab={"?": 0, "a": 1}, merges=[], unk_token="?")
    assert saved(made(piece)).encode("aba") == [1, 0, 1]
    unigram = kinds.Unigram([("?", 0.0), ("a", -1.0)], unk_id=0)
    assert saved(made(unigram)).encode("aba") == [1, 0, 1]


def test_bytes_may_be_made_by_the_normalizer(saved):
    model = kinds.BPE(vocab=VOCABULARY, merges=pairs_of(MERGES))
    tokenizer = made(model, normalizer=normalizers.ByteLevel(), decoder=decoders.ByteLevel())
    ours = saved(tokenizer)
    assert ours.encode("hell wé😀") == [258, 259, 260, 172, 253, 246, 222]
    assert ours.decode([172, 253, 246, 222, 172]) == "😀\ufffd"


def test_an_unknown_word_without_a_token_for_such(saved):
    ours = saved(made(kinds.WordLevel({"a": 0}, unk_token="?")))
    with pytest.raises(ValueError, match="the tokenizer cannot encode the text: .*UNK"):
        ours.encode("b")


# Which files are taken.


def test_the_files_are_looked_for_in_order(tmp_path):
    lines = "\n".join(MERGES)
    write(tmp_path, VOCABULARY, lines, ("vocab.json", "merges.txt"))
    assert load_tokenizer(tmp_path).encode("!hell") == [0, 258]
    shifted = {piece: token for token, piece in enumerate([END, *list(VOCABULARY)[:-1]])}
    write(tmp_path, shifted, lines)
    assert load_tokenizer(tmp_path).encode("!hell") == [1, 259]
    llama().save(str(tmp_path / "tokenizer.json"))
    assert isinstance(load_tokenizer(tmp_path), JsonTokenizer)
    (tmp_path / "vocabulary.json").write_text('["b", "a", "é"]', encoding="utf-8")
    assert load_tokenizer(tmp_path).encode("aéb") == [1, 2, 0]


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no tokenizer: neither vocabulary.json, nor tokenizer.json, nor encoder.json "
        "with vocab.bpe, nor vocab.json with merges.txt"
    )


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_half_a_pair_names_the_other_half(names, tmp_path):
    for there, missing in (names, names[::-1]):
        (tmp_path / there).write_text("{}")
        with pytest.raises(FileNotFoundError) as caught:
            load_tokenizer(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path / there} needs {missing} beside it, and it is not there"
        )
        (tmp_path / there).unlink()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocabulary.json", b"[", "is not JSON: "),
        ("vocabulary.json", b'["\xff"]', "is not UTF-8: "),
        ("vocabulary.json", b'{"a": 0}', "is not a list of characters"),
        ("vocabulary.json", b"[1, 2]", "is not a list of characters"),
        ("vocabulary.json", b'["a", "a"]', "distinct single characters"),
        ("tokenizer.json", b"{", "is not a tokenizer.json: "),
        ("tokenizer.json", b"[]", "is not a tokenizer.json: "),
        ("tokenizer.json", b'{"version": "1.0"}', "is not a tokenizer.json: "),
        ("tokenizer.json", b"\xff", "is not UTF-8: "),
        ("encoder.json", b'{"a": ', "is not JSON: "),
        ("encoder.json", b'["a"]', "does not map pieces of text to whole numbers"),
        ("encoder.json", b'{"a": "b"}', "does not map pieces of text to whole numbers"),
        ("encoder.json", b'{"a": true}', "does not map pieces of text to whole numbers"),
        ("encoder.json", b"{}", "lacks the signs of bytes '!', "),
        ("vocab.bpe", b"\xff", "is not UTF-8: "),
        ("vocab.bpe", b"", "no merge makes 'll', "),
        ("tokenizer_config.json", b"{", "is not JSON: "),
        ("vocabulary.json", b"[" * 100_000, "is nested at most 100 deep"),
        ("tokenizer.json", b"[" * 100_000, "is not a tokenizer.json: "),
    ],
)
def test_damaged_files_are_named(name, content, said, tmp_path):
    if name in ("encoder.json", "vocab.bpe", "tokenizer_config.json"):
        write(tmp_path, VOCABULARY, "\n".join(MERGES))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
