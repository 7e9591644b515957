"""Words that continue a text, in tokenizers that put a space before each text.

The expected tokens are the last tokens of the text and the words together, read by `transformers`.
"""

import pytest
import torch

from interp import Pairs
from models import attach
from tests import tiny

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
WORDS = ("Mary", "John", "gave", "a", "drink", "to")
TEXT = "Mary gave a drink to"


def tokenizer_of(kind):
    """Return a tokenizer in which each word after a space is one token, as in Llama."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({*"".join(WORDS), *"▁.,"})
    merges = []
    for word in WORDS:
        start = "▁"
        for letter in word:
            merges.append((start, letter))
            start += letter
            pieces.append(start)
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocab,
            merges=[*dict.fromkeys(merges)],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if kind == "Llama 2":
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<s>", unk_token="<unk>"
    )


@pytest.fixture(params=["Llama 2", "Llama"])
def read(request):
    """Return a model and its tokenizer."""
    tokenizer = tokenizer_of(request.param)
    model = tiny.redraw(tiny.model("LlamaForCausalLM", vocab_size=len(tokenizer)), 0.3)
    attach(model, tokenizer=tokenizer)
    return model, tokenizer


@pytest.mark.parametrize("words", [" Mary", ".", ",", "r", ". Mary", " John gave"])
def test_an_answer_is_read_after_its_text(read, words):
    model, tokenizer = read
    before = tokenizer(TEXT)["input_ids"]
    whole = tokenizer(TEXT + words)["input_ids"]
    assert whole[: len(before)] == before
    added = whole[len(before) :]
    pairs = Pairs(TEXT, answers=words).read_by(model)
    logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    expected = sum(logits[len(before) - 1 + n, token] for n, token in enumerate(added))
    rows = pairs.rows()
    found = rows.metric(model(rows.clean).logits).sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_word_is_read_without_its_beginning(read):
    model, tokenizer = read
    # The text and the answer together end with one token, "▁to".
    answers = Pairs("Mary gave a drink t", answers="o").read_by(model).answers
    assert answers.flatten().tolist() == [tokenizer.convert_tokens_to_ids("o")]


def test_a_word_without_a_space_is_a_new_word_if_only_this_is_one_token(read):
    model, tokenizer = read
    for words in (("Mary", "John"), (" Mary", " John")):
        answers = Pairs(TEXT, answers=words).read_by(model).answers
        assert answers.tolist() == [tokenizer.convert_tokens_to_ids(["▁Mary", "▁John"])]
    # "t" and " t" are one token each. The error names the token of the rest of a word.
    token = tokenizer.convert_tokens_to_ids("t")
    with pytest.raises(ValueError, match=f"for the rest of a word, pass {token}$"):
        Pairs(TEXT, answers="t").read_by(model)
    assert Pairs(TEXT, answers=[token]).read_by(model).answers.flatten().tolist() == [token]
