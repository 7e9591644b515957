"""Classifiers and other models whose output is not a language model's, on padded batches.

Each text in a batch has the result of the text alone.
"""

import pytest
import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, log_prob
from interp.inputs.texts import padded
from interp.protocol import logits_of
from models import attach
from tests import tiny

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

WORDS = "[UNK] [PAD] [CLS] [SEP] [MASK] it is a good bad film and not very".split()
PAD = WORDS.index("[PAD]")
TEXTS = ["it is a good film", "it is", "not very good and very bad"]
OTHERS = ["it is a bad film", "not is", "not very bad and very good"]
SIZES = dict(vocab_size=len(WORDS), num_hidden_layers=2, num_attention_heads=3, pad_token_id=PAD)


def tokenizer():
    library = pytest.importorskip("tokenizers", reason="needs the extra hf")
    vocabulary = {word: token for token, word in enumerate(WORDS)}
    words = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]"
    )


def made(name, **options):
    """Return a random model of a class, such as `LlamaForTokenClassification`, in float64."""
    model = tiny.model(name, **SIZES | options).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.4)
    return model


def first_logits(output):
    """Return the logits of an output.

    A model that finds answers in a text has two kinds of logits. Return the logits of the start.
    """
    starts = getattr(output, "start_logits", None)
    return logits_of(output) if starts is None else starts


HEADS = {
    "LlamaForSequenceClassification": dict(num_labels=3),
    "LlamaForTokenClassification": dict(num_labels=3),
    "LlamaForQuestionAnswering": {},
    "GPT2ForSequenceClassification": dict(num_labels=1),  # one number, as in a reward model
    "GPTNeoXForSequenceClassification": dict(num_labels=2),
    "BertForSequenceClassification": dict(num_labels=3),
    "BertForTokenClassification": dict(num_labels=2),
    "BertForQuestionAnswering": {},
    "RobertaForSequenceClassification": dict(num_labels=3),
    "RobertaForTokenClassification": dict(num_labels=3),
}
POOLED = ("BertForSequenceClassification", "RobertaForSequenceClassification")
"""Heads that read the first column, which is padding where texts are padded on the left."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_each_row_equals_the_text_alone(name, side):
    model = made(name, **HEADS[name])
    alone = [first_logits(model(torch.tensor([tokenizer().encode(text)]))) for text in TEXTS]
    attached = attach(model, tokenizer=tokenizer())
    batch = attached.to_tokens(TEXTS, side=side)
    assert (batch.tokens[~batch.attention_mask] == PAD).all()
    if name in POOLED and side == "left":
        with pytest.raises(ValueError, match="padded on the right"):
            model(batch.tokens, attention_mask=batch.attention_mask)
        return
    together = first_logits(model(batch.tokens, attention_mask=batch.attention_mask))
    for n, expected in enumerate(alone):
        is_by_token = expected.shape[1] == batch.attention_mask[n].sum() and together.ndim > 1
        by_token = is_by_token and together.shape[1] == batch.tokens.shape[1]
        row = together[n][batch.attention_mask[n]] if by_token else together[n]
        torch.testing.assert_close(row, expected[0])


def good_over_bad(logits):
    """Return the logit of class 2 minus the logit of class 0. A classifier has one position."""
    return logits[:, -1, 2] - logits[:, -1, 0]


def test_effects_on_a_classifier_match_each_text():
    model = made("LlamaForSequenceClassification", num_labels=3)
    attach(model, tokenizer=tokenizer())

    def patched(clean, corrupted):
        spans = {"end": [[-1]] * len(clean)}
        pairs = Pairs(clean, corrupted, metric=good_over_bad, spans=spans)
        return activation_patching(model, pairs, "resid_post", over=["layer", "span"]).values

    together = patched(TEXTS, OTHERS)
    alone = [patched([one], [other]) for one, other in zip(TEXTS, OTHERS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone, -1))
    assert together.abs().max() > 1e-3


def test_texts_that_stream_are_padded_with_the_token_of_the_model():
    model = made("LlamaForSequenceClassification")
    attached = attach(model)
    text = padded([[5, 6, 7], [8, 9]], model, range(2))
    assert text.tokens.tolist() == [[5, 6, 7], [8, 9, PAD]]
    # The padding token of the config is used before the tokenizer's, because classifiers read it.
    # A token outside of the vocabulary is ignored.
    attached.tokenizer = tokenizer()
    for config, expected in ((3, 3), (-1, PAD), (len(WORDS), PAD), (None, PAD)):
        model.config.pad_token_id = config
        assert attached.pad_token == expected
    attached.tokenizer = None
    assert attached.pad_token == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_an_error_for_a_model_that_reads_it(side):
    # FNet computes a Fourier transform along the positions, with padding.
    model = made("FNetForTokenClassification")
    attached = attach(model)
    batch = attached.to_tokens([[5, 6, 7], [8, 9]], side=side)
    with pytest.raises(ValueError, match=f"one length.*padding on the {side}"):
        model(batch.tokens, attention_mask=batch.attention_mask)


def test_padding_is_an_error_for_a_convolution_over_the_end_of_a_text():
    sizes = dict(embedding_size=12, conv_kernel_size=3, head_ratio=1, num_groups=1)
    model = made("ConvBertForSequenceClassification", **sizes)
    attached = attach(model)
    for side in ("left", "right"):
        batch = attached.to_tokens([[5, 6, 7], [8, 9]], side=side)
        with pytest.raises(ValueError, match=f"one length.*padding on the {side}"):
            model(batch.tokens, attention_mask=batch.attention_mask)
    model(torch.tensor([[5, 6, 7], [8, 9, 4]]))


@torch.no_grad()
def test_several_choices_for_each_text():
    """The tokens of a model for multiple choice are [batch, choice, pos].

    Its blocks read a batch with one row for each choice.
    """
    model = made("BertForMultipleChoice")
    choices = [[[5, 6, 7, 8], [9, 5]], [[7, 7, 10], [6]]]
    tokens = torch.tensor([[row + [PAD] * (4 - len(row)) for row in text] for text in choices])
    mask = (tokens != PAD).long()
    alone = [[model(torch.tensor([[row]])).logits.item() for row in text] for text in choices]
    attach(model, example={"input_ids": tokens, "attention_mask": mask})
    runner = HookedRunner(model)
    found = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(found, torch.tensor(alone).double())
    hooks = {"blocks.1.attn.pattern": edits.add(torch.tensor(0.2).double())}
    found = runner.run_with_hooks(input_ids=tokens, attention_mask=mask, hooks=hooks).logits
    for n, text in enumerate(choices):
        for m, row in enumerate(text):
            one = torch.tensor([[row]])
            given = dict(input_ids=one, attention_mask=torch.ones_like(one))
            edited = runner.run_with_hooks(**given, hooks=hooks).logits
            torch.testing.assert_close(found[n, m], edited[0, 0])


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        ("LlamaForCausalLM", True),
        ("BertForMaskedLM", False),
        ("BertForTokenClassification", False),
        # Sequence classifiers have no logits for each position.
        ("LlamaForSequenceClassification", True),
        ("BertForSequenceClassification", True),
    ],
)
def test_whether_a_model_reads_later_tokens(name, is_causal):
    assert attach(made(name)).is_causal == is_causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_weak_attention_to_later_tokens_is_found(dtype, seed):
    """With initial weights, a later token changes the logits by less than rounding in some runs."""
    assert not attach(tiny.model("BertForMaskedLM", seed=seed).to(dtype)).is_causal
    assert attach(tiny.model("LlamaForCausalLM", seed=seed).to(dtype)).is_causal


MASKED = ["it is [MASK] and very good", "[MASK] film is bad"]
UNMASKED = ["it is [MASK] and very bad", "[MASK] film is good"]
ANSWERS = [("not", "good"), ("a", "very")]


@torch.no_grad()
def test_answers_of_a_masked_language_model_are_at_its_mask_token():
    model = made("BertForMaskedLM")
    words = tokenizer()
    expected = []
    for text, (right, wrong) in zip(UNMASKED, ANSWERS, strict=True):
        tokens = words.encode(text)
        logits = model(torch.tensor([tokens])).logits[0, tokens.index(WORDS.index("[MASK]"))]
        expected.append(logits[WORDS.index(right)] - logits[WORDS.index(wrong)])
    attach(model, tokenizer=words)
    pairs = Pairs(MASKED, UNMASKED, ANSWERS)
    read = pairs.read_by(model)
    assert read.pos.tolist() == [-4, -4]
    assert read[1:].pos.tolist() == [-4]
    result = activation_patching(model, pairs, "resid_post", over=["layer"])
    torch.testing.assert_close(result.base, torch.stack(expected))
    # The answer depends only on the stream after the last block at the mask token.
    at_mask = activation_patching(model, pairs, "resid_post", layers=1, over=["layer"])
    torch.testing.assert_close(at_mask.values[0], result.target - result.base)
    given = Pairs(MASKED, UNMASKED, ANSWERS, pos=[2, 0])
    torch.testing.assert_close(
        activation_patching(model, given, "resid_post", over=["layer"]).base, result.base
    )


@pytest.mark.parametrize(
    ("clean", "corrupted", "match"),
    [
        ("it is good", None, "0 mask tokens"),
        (["it is [MASK]", "[MASK] is [MASK]"], None, "text 1 has 2"),
        ("it [MASK] good", "it is [MASK]", r"\[-2\] and \[-1\]"),
    ],
)
def test_pairs_without_one_mask_token_must_say_where_answers_are(clean, corrupted, match):
    model = made("BertForMaskedLM")
    attach(model, tokenizer=tokenizer())
    with pytest.raises(ValueError, match=match):
        Pairs(clean, corrupted, "good").read_by(model)
    assert Pairs(clean, corrupted, "good", pos=-1).read_by(model).metric.last == 1
    # A metric has its own position.
    assert Pairs(clean, corrupted, "good", metric=log_prob(3)).read_by(model).pos is None


def test_pairs_need_a_tokenizer_to_find_a_mask_token():
    model = made("BertForMaskedLM")
    attach(model)
    pairs = Pairs(torch.tensor([[5, 4, 6]]), answers=torch.tensor([7]))
    with pytest.raises(ValueError, match="pos=.*no mask token"):
        pairs.read_by(model)
    model.config.mask_token_id = 4
    assert pairs.read_by(model).pos.tolist() == [-2]
    with pytest.raises(ValueError, match="pos="):
        Pairs(torch.tensor([[5, 4]]), metric=lambda logits: logits[:, 0, 0], pos=1)


SEQUENCES = {
    "MT5ForQuestionAnswering": dict(d_model=12, num_layers=2, num_heads=3, d_kv=4, d_ff=17),
    "UMT5ForQuestionAnswering": dict(d_model=12, num_layers=2, num_heads=3, d_kv=4, d_ff=17),
    "BartForConditionalGeneration": dict(
        d_model=12,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=3,
        decoder_attention_heads=2,
        encoder_ffn_dim=17,
        decoder_ffn_dim=19,
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SEQUENCES)
@torch.no_grad()
def test_a_decoder_that_copies_the_text_of_its_encoder_never_reads_padding(name):
    """Without `decoder_input_ids`, the decoders of these models read `input_ids`, shifted by one.

    Padding of `input_ids` is not masked in the decoder. On the left, it must raise an error.
    """
    model = made(name, **SEQUENCES[name], decoder_start_token_id=2)
    row = torch.tensor([[5, 7, 9, 4, 11]])
    alone = first_logits(model(row))
    attach(model)
    padding = torch.full((1, 3), PAD)
    real, no = torch.ones_like(row), torch.zeros_like(padding)
    right = first_logits(
        model(torch.cat([row, padding], 1), attention_mask=torch.cat([real, no], 1))
    )
    torch.testing.assert_close(right[:, :5], alone)
    left, mask = torch.cat([padding, row], 1), torch.cat([no, real], 1)
    with pytest.raises(ValueError, match="must be given decoder_input_ids"):
        model(left, attention_mask=mask)
    with pytest.raises(ValueError, match="must be given decoder_input_ids"):
        model(input_ids=left, attention_mask=mask, decoder_input_ids=None)
    if name.startswith("Bart"):
        # The encoder of BART counts positions from the first column, so padding on the left is an
        # error anyway.
        return
    decoded = torch.tensor([[2, 5, 7]])
    expected = first_logits(model(row, decoder_input_ids=decoded))
    torch.testing.assert_close(
        first_logits(model(left, attention_mask=mask, decoder_input_ids=decoded)), expected
    )
