"""Charsmaps, the tables with which SentencePiece normalises a text.

They are compared with pairs of texts that were computed by hand. SentencePiece 0.2.3 returns the
same.
"""

import pickle
import random
import struct

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
pytest.importorskip("gguf", reason="needs the extra hf")

from models import load_tokenizer  # noqa: E402  # needs the libraries above
from models.text.charsmap import Charsmap  # noqa: E402
from tests.models.text.vocabularies import ORIGINALS, unigrams, write_gguf  # noqa: E402

TABLE = {
    "\u3000": " ",  # three bytes, so that a grapheme with an accent has five
    "\uff21": "A",
    "e\u0301": "\u00e9",
    "A\u0301": "\u00c1",
    "\u1112\u1161": "\ud558",  # letters of Hangul, six and nine bytes of one grapheme
    "\u1112\u1161\u11ab": "\ud55c",
    "\u33a2": "km2",
    "\u200b": "",
    "ab": "x",
    "abcd": "yz",
    "bc": "q",
    "c": "",
    "ghi": "!",
    # This is one of the characters that stand for longer texts.
    "\u2603": "\U000f0000",
}
# At each place the longest sequence is replaced. The replacement is not read again.
NORMALISED = {
    "plain": "plain",
    "a\u3000\u0301b": "a \u0301b",
    "\uff21\u0301": "A\u0301",
    "A\u0301e\u0301\u0301": "\u00c1\u00e9\u0301",
    "\u1112\u1161\u1112\u1161\u11ab\u1161": "\ud558\ud55c\u1161",
    "\u33a2\u0301 \u33a2": "km2\u0301 km2",
    "\u200b": "",
    "\u200b\u200ba\u200b": "a",
    "abc": "x",
    "abcd": "yz",
    "ghjghi": "ghj!",
    "\u2603abcd": "\U000f0000yz",
    "abccab": "xx",
    "aabbcbcdd": "axqqdd",
    "e\0\u0301ab\0": "e\0\u0301x\0",
    "\U000f0000\u33a2\U000f0001\u200b": "\U000f0000km2\U000f0001",
    "": "",
}


def written(table):
    """Return a charsmap in SentencePiece's format: a double array.

    The child of a node for a byte is at the exclusive or of the node's offset and the byte.
    """
    tree, texts = {}, b""
    for key, text in table.items():
        branch = tree
        for byte in key.encode():
            branch = branch.setdefault(byte, {})
        branch[0] = len(texts)  # the place of the text that replaces the key
        texts += text.encode() + b"\0"
    units, taken, bases = [0] * 4096, {0}, iter(range(256, 4096))

    def place(node, label, children):
        # Each node has its own base, so that a label identifies its children.
        base = next(base for base in bases if not {base ^ byte for byte in children} & taken)
        taken.update(base ^ byte for byte in children)
        units[node] = (node ^ base) << 10 | (0 in children) << 8 | label
        for byte, below in children.items():
            if byte:
                place(base ^ byte, byte, below)
            else:
                units[base] = 1 << 31 | below

    place(0, 0, tree)
    return struct.pack("<I4096I", 4 * 4096, *units) + texts


@pytest.fixture(scope="module")
def charsmap():
    return Charsmap(written(TABLE))


@pytest.mark.parametrize("text", NORMALISED, ids=ascii)
def test_the_longest_sequence_is_replaced(text, charsmap):
    normalizer = tokenizers.normalizers.Normalizer.custom(charsmap)
    assert normalizer.normalize_str(text) == NORMALISED[text]
    assert normalizer.normalize_str(text * 3) == NORMALISED[text] * 3


def test_the_place_of_a_text_is_not_read_as_a_child():
    """The place of a text must not be read as a child of the node.

    The place of the second text is 258. Its last byte is 2, and it is stored where the child for
    the byte 2 would be.
    """
    charsmap = Charsmap(written({"a": "X" * 257, "b": "Y"}))
    normalizer = tokenizers.normalizers.Normalizer.custom(charsmap)
    assert normalizer.normalize_str("\2b\2") == "\2Y\2"


def test_the_library_reads_a_table_in_another_way():
    """The library `tokenizers` does not follow SentencePiece here, so this package reads the table
    itself. If this test fails, `Precompiled` of the library may be correct now.
    """
    theirs = tokenizers.normalizers.Precompiled(written(TABLE))
    # The library can read the table, so the table is valid.
    assert theirs.normalize_str("e\u0301 \u33a2") == "\u00e9 km2"
    assert theirs.normalize_str("a\u3000\u0301b") == "a b"
    assert theirs.normalize_str("\u1112\u1161") == "\u1112\u1161"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A function that writes a GGUF tokenizer of single characters, with or without the table."""
    characters = sorted({*"".join(TABLE), *"".join(NORMALISED.values()), "[", "]", "▁", "\n"})
    original = unigrams()
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("[ab]", 0.0)]
    vocabulary += [(character, -1.0) for character in characters]
    original.model = tokenizers.models.Unigram(vocabulary, 2, False)
    original.add_tokens([tokenizers.AddedToken("[ab]", special=True, normalized=False)])
    folder = tmp_path_factory.mktemp("charsmap")

    def read(**said):
        path = folder / f"{len([*folder.iterdir()])}.gguf"
        return load_tokenizer(write_gguf(path, original, "t5", **said))

    return read


def shown(tokenizer, text):
    return tokenizer.tokens_as_text(tokenizer.encode(text))


def test_a_file_with_a_table(pieces):
    ours = pieces(precompiled_charsmap=[*written(TABLE)])
    assert shown(ours, "a\u3000\u0301b") == ["a", " ", "\u0301", "b"]
    assert ours.offsets("a\u3000\u0301\u33a2b") == [
        (0, 1),
        (1, 2),
        (2, 3),
        *[(3, 4)] * 3,
        (4, 5),
    ]
    # Special tokens are found in the original text, not in the normalised text.
    assert shown(ours, "ab[ab]ab") == ["x", "[ab]", "x"]
    assert shown(ours, "[a\u200bb]") == ["[", "a", "b", "]"]
    again = pickle.loads(pickle.dumps(ours))
    for text in (*NORMALISED, "ab[ab]\u33a2"):
        assert again.encode(text) == ours.encode(text)


@pytest.mark.parametrize(
    ("prefix", "merges", "expected"),
    [
        (False, False, "  a  b \n "),
        (True, False, "   a  b \n "),
        (False, True, "a b \n"),
        (True, True, " a b \n"),
    ],
)
def test_spaces_match_sentencepiece(prefix, merges, expected, pieces):
    """Only spaces are removed and joined.

    A space is added at the beginning, also before another space.
    """
    said = dict(add_space_prefix=prefix, remove_extra_whitespaces=merges)
    ours = pieces(precompiled_charsmap=[*written(TABLE)], **said)
    assert "".join(shown(ours, "  a\u3000 b \n ")) == expected
    assert "".join(shown(pieces(**said), "  a  b \n ")) == expected
    assert "".join(shown(ours, "[ab]a")) == "[ab]" + " " * prefix + "a"


def test_other_kinds_of_tokenizers_have_no_table(tmp_path):
    """llama.cpp reads the table only for Unigram tokenizers."""
    make, said = ORIGINALS["llama"]
    path = write_gguf(tmp_path / "a.gguf", make(), **said, precompiled_charsmap=[*written(TABLE)])
    plain = load_tokenizer(write_gguf(tmp_path / "b.gguf", make(), **said))
    assert load_tokenizer(path).encode("abcd e\u0301") == plain.encode("abcd e\u0301")


def test_tables_that_are_damaged(pieces):
    whole = written(TABLE)
    cut = [b"\1", b"\0" * 8, whole[:400], struct.pack("<I", 7) + whole[4:], whole[:-1]]
    leads_out = struct.pack("<II", 4 * 4096, 1 << 30) + whole[8:]
    # Unit 299 is inside the table, but some of its 256 children would be outside.
    children_lead_out = struct.pack("<I", 4 * 300) + bytes(4 * 300)
    text_behind_all = whole[: 4 + 4 * 4096]
    no_utf_8 = whole.replace(b"km2", b"k\xff2")
    for data in (*cut, leads_out, children_lead_out, text_behind_all, no_utf_8):
        with pytest.raises(ValueError, match="charsmap"):
            pieces(precompiled_charsmap=[*data])


def test_a_table_that_is_damaged_anywhere_is_refused_or_read():
    """The library hides errors of a normalizer, so the normalizer must never raise an error."""
    whole, draw, refused = written(TABLE), random.Random(0), 0
    for _ in range(300):
        at, bit = draw.randrange(len(whole)), draw.randrange(8)
        data = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        try:
            charsmap = Charsmap(data)
        except ValueError:
            refused += 1
        else:
            for text in NORMALISED:
                tokenizers.normalizers.Normalizer.custom(charsmap).normalize_str(text)
    assert refused
