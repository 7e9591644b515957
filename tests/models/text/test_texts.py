"""Strings, lists and tensors in place of tokens, and words as labels in results."""

import copy
import pickle
import re

import numpy as np
import pandas
import pytest
import torch

import interp
from hooks import HookedRunner
from interp import Pairs, Result, edits
from interp.measuring import measure
from interp.store import statistics
from models import generate, load
from tests import tiny
from tests.shipped import pydoc
from tests.streams import SIZES

WORDS = "<s> </s> <pad> the cat dog sat on mat ran . Anne Mark play ing".split()
TEXTS = ["the cat sat", "the dog sat on the mat"]
IDS = [[3, 4, 6], [3, 5, 6, 7, 3, 8]]


class Spaced:
    """A tokenizer of words. A word and the same word after a space are two different tokens."""

    bos_token_ids = ()
    eos_token_ids = (1,)

    def __init__(self):
        self.pieces = [*WORDS, *(f" {word}" for word in WORDS[3:])]

    def encode(self, text):
        tokens = []
        while text:
            fits = [piece for piece in self.pieces if text.startswith(piece)]
            if not fits:
                raise ValueError(f"no token begins {text!r}")
            tokens.append(self.pieces.index(max(fits, key=len)))
            text = text.removeprefix(max(fits, key=len))
        return tokens

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)

    def tokens_as_text(self, tokens):
        if outside := [t for t in tokens if t >= len(self.pieces)]:
            raise ValueError(f"tokens must be in the vocabulary; got {outside}")
        return [self.pieces[token] for token in tokens]


def reading(**choices):
    """Return a model whose vocabulary has three more tokens than its tokenizer of words."""
    from models import Transformer, TransformerConfig

    sizes = {**SIZES, "vocab_size": 30, **choices}
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(**sizes)).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    model.tokenizer = Spaced()
    return model


def library_of(pieces, template=None):
    """Return a tokenizer of `transformers` that splits texts at spaces."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = tokenizers.models.WordLevel(
        {piece: n for n, piece in enumerate(pieces)}, unk_token="<pad>"
    )
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if template is not None:
        special = [(piece, pieces.index(piece)) for piece in ("<s>", "</s>")]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=special
        )
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def test_every_form_of_a_text_gives_the_same_tokens():
    model = reading()
    one = ["the cat sat", [3, 16, 18], (3, 16, 18), torch.tensor([3, 16, 18])]
    for text in one:
        tokens, mask = model.to_tokens(text)
        assert (tokens.tolist(), mask) == ([[3, 16, 18]], None)
        assert torch.equal(model(text), model(torch.tensor([[3, 16, 18]])))
    several = [TEXTS, model.to_tokens(TEXTS), [*map(model.encoded, TEXTS)], tuple(TEXTS)]
    several.append([torch.tensor(model.encoded(text)) for text in TEXTS])
    for texts in several:
        tokens, mask = model.to_tokens(texts)
        assert tokens.tolist() == [[3, 16, 18, 0, 0, 0], [3, 17, 18, 19, 15, 20]]
        assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
        assert torch.equal(model(texts), model(tokens, attention_mask=mask))
    left = model.to_tokens(TEXTS, side="left")
    assert left.tokens[0].tolist() == [0, 0, 0, 3, 16, 18]
    assert left.attention_mask[0].tolist() == [False] * 3 + [True] * 3
    assert left.texts == tuple(TEXTS)
    tensor = torch.tensor([[3, 4]])
    assert model.to_tokens(tensor).tokens is tensor


def encodings():
    """Yield outputs of tokenizers for the same two texts.

    They are tensors with padding on either side, arrays, and lists without padding.
    """
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    model = reading()
    ids = [*map(model.encoded, TEXTS)]
    yield {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    for side in ("left", "right"):
        tokens, mask = model.to_tokens(ids, side=side)
        padded = {"input_ids": tokens, "attention_mask": mask.long()}
        yield padded
        yield transformers.BatchEncoding(padded | {"token_type_ids": torch.zeros_like(tokens)})
        yield {name: value.numpy() for name, value in padded.items()}
        yield transformers.BatchEncoding({name: value.tolist() for name, value in padded.items()})


@pytest.mark.parametrize("n", range(9))
def test_the_output_of_a_tokenizer_is_read_by_its_keys(n):
    from hooks.base import each_text
    from interp.store.corpora import each
    from models import generate, generate_text

    model, encoding = reading(), [*encodings()][n]
    runner, alone = HookedRunner(model), [model(text)[0, -1] for text in TEXTS]
    batch = model.to_tokens(encoding)
    real = batch.attention_mask
    assert real.sum(1).tolist() == [3, 6]
    for logits in (model(encoding), runner.run_with_cache(encoding)[0]):
        last = [row[mask][-1] for row, mask in zip(logits, real, strict=True)]
        torch.testing.assert_close(torch.stack(last), torch.stack(alone))
    embed = runner.capture(encoding, names="embed").at(pos=-1)["embed"]
    assert torch.equal(embed, model.W_E[[18, 20]])
    assert generate(model, encoding, max_new_tokens=2) == generate(model, TEXTS, max_new_tokens=2)
    written = generate_text(model, TEXTS, max_new_tokens=2, stop=())
    assert generate_text(model, encoding, max_new_tokens=2, stop=()) == written
    assert model.to_text(encoding) == TEXTS
    ids = [[3, 16, 18], [3, 17, 18, 19, 15, 20]]
    assert [*map(list, each_text(encoding))] == [*map(list, each(encoding))] == ids
    pairs = Pairs(encoding, encoding, torch.tensor([4, 5])).read_by(model)
    assert len(Pairs(encoding, encoding)) == 2
    assert torch.equal(pairs.text.attention_mask, real)


def test_one_encoded_text_and_a_row_of_a_table_are_texts():
    from interp.store.corpora import each
    from models import generate_text

    model = reading()
    one = {"input_ids": [3, 16, 18], "attention_mask": [1, 1, 1]}
    for text in (
        one,
        {"input_ids": np.array([3, 16, 18])},
        {"input_ids": torch.tensor([[3, 16, 18]])},
    ):
        assert torch.equal(model(text), model("the cat sat"))
        assert model.to_tokens(text).attention_mask is None
    assert model.to_text(one) == "the cat sat"
    assert generate_text(model, one, max_new_tokens=1, stop=()).startswith("the cat sat")
    rows = [{"input_ids": [0, 3, 16], "attention_mask": [0, 1, 1]}, {"input_ids": [3], "label": 2}]
    assert [*each(rows)] == [[3, 16], [3]]
    assert [*each(rows, "input_ids")] == [[3, 16], [3]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ({"text": TEXTS}, "must have input_ids.*got a dict of text"),
        (pandas.DataFrame({"text": TEXTS}), "got a DataFrame of text"),
        (pandas.DataFrame({"input_ids": IDS}), "got a DataFrame of input_ids"),
        ({"input_ids": [[3, 4]], "attention_mask": [[1]]}, "as long as input_ids"),
        ({"input_ids": [3, 4], "attention_mask": [1, 2]}, "attention_mask must be 1 .*got 2"),
        ({"input_ids": [[3, 4]], "token_type_ids": [[0, 1]]}, "got token_type_ids too"),
        ({"input_ids": [[3, 4]], "position_ids": torch.tensor([[1, 2]])}, "position_ids too"),
    ],
)
def test_other_mappings_and_tables_are_refused(texts, match):
    from models import generate, generate_text

    model = reading()
    for read in (
        model,
        model.to_tokens,
        HookedRunner(model).run_with_cache,
        lambda texts: HookedRunner(model).capture(texts, names="embed"),
        lambda texts: generate(model, texts, max_new_tokens=1),
        lambda texts: generate_text(model, texts, max_new_tokens=1),
        lambda texts: interp.max_activating(model, texts, "embed"),
        lambda texts: Pairs(texts, texts, torch.tensor([4])).read_by(model),
    ):
        with pytest.raises(ValueError, match=match):
            read(texts)
    with pytest.raises(TypeError, match=r"string or a list.*got"):
        model.to_tokens([{"input_ids": [3, 4]}])


def test_an_attached_model_reads_every_output_of_a_tokenizer():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from models import attach

    model = tiny.model("BertForMaskedLM")
    encoding = transformers.BatchEncoding(
        {
            "input_ids": torch.tensor([[3, 4, 6, 0], [5, 7, 3, 8]]),
            "token_type_ids": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]),
            "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        }
    )
    wanted = model(**encoding).logits
    with attach(model):
        torch.testing.assert_close(model(encoding).logits, wanted)
        output, cache = HookedRunner(model).run_with_cache(encoding)
        torch.testing.assert_close(output.logits, wanted)
        assert cache.real().sum(1).tolist() == [3, 4]


def test_tokens_become_text_again():
    model = reading()
    assert model.to_text(model.to_tokens(TEXTS, side="left")) == TEXTS
    assert model.to_text([3, 16]) == "the cat"
    assert (model.to_text(16), model.to_text(torch.tensor(16))) == (" cat", " cat")
    assert repr(model.to_tokens(TEXTS)) == "Text [2, 6], padded: 'the cat sat'"
    assert model.to_text(torch.tensor([[3, 16]])) == ["the cat"]
    assert model.to_pieces(torch.tensor([[[3], [16]], [[29], [4]]])) == [
        [["the"], [" cat"]],
        [["<token 29>"], ["cat"]],
    ]
    assert model.to_pieces("the cat") == ["the", " cat"]
    assert model.to_pieces(4) == "cat"
    assert model.to_id(" cat") == 16
    with pytest.raises(ValueError, match=r"'the cat', which is 2 tokens: \['the', ' cat'\]"):
        model.to_id("the cat")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("", r"empty: \[0\]"),
        (["the", ""], r"empty: \[1\]"),
        ([], "0 texts"),
        ([[1.5]], "list of integers"),
        ([True, False], "list of integers"),
        (["the", 3], "list of integers"),
        (7, "got 7"),
        (torch.zeros(2, 3, 4), r"float32 .*\[3, 4\]"),
        (torch.tensor(3), "tensor"),
    ],
)
def test_objects_that_are_not_texts_are_errors(texts, said):
    with pytest.raises((ValueError, TypeError), match=said):
        reading().to_tokens(texts)


@pytest.mark.usefixtures("unchecked")
def test_another_side_is_refused():
    with pytest.raises(ValueError, match="got 'middle'"):
        reading().to_tokens(["the", "the cat"], side="middle")


def test_without_a_tokenizer_the_error_says_how_to_give_one():
    model = reading()
    model.tokenizer = None
    for call in (lambda: model("the cat"), lambda: model.to_text([3]), lambda: model.to_pieces(3)):
        with pytest.raises(ValueError, match="set model.tokenizer"):
            call()
    assert model([3, 4]).shape == (1, 2, 30)
    with pytest.raises(TypeError, match=r"encode.*got a int"):
        model.tokenizer = 7


def test_texts_bring_their_own_mask_and_begin_a_text():
    from models import KVCache

    model = reading()
    with pytest.raises(ValueError, match="attention_mask needs texts"):
        model(TEXTS, attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="if a cache"):
        model("the cat", kv_cache=KVCache(9))
    with pytest.raises(ValueError, match="attention_mask needs texts"):
        interp.sweep(model, TEXTS, [{}], interp.log_prob(3), attention_mask=torch.ones(2, 6))


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>", "$A </s>"])
def test_special_tokens_match_the_tokenizer(template):
    tokenizer, model = library_of(WORDS, template), reading()
    model.tokenizer = tokenizer
    for text in TEXTS:
        assert model.to_tokens(text).tokens[0].tolist() == tokenizer(text).input_ids
        plain = tokenizer(text, add_special_tokens=False).input_ids
        assert model.to_tokens(text, bos=False).tokens[0].tolist() == plain
        assert model.to_tokens(text, bos=True).tokens[0].tolist()[:2] == [0, 3]
    # If the text contains the token, it is not added again.
    assert model.to_tokens("<s> the", bos=True).tokens[0, :2].tolist() == [0, 3]
    model.tokenizer = Spaced()
    with pytest.raises(ValueError, match="bos=True"):
        model.to_tokens("the", bos=True)


def test_a_loaded_model_has_the_tokenizer_of_its_files(tmp_path):
    from models import CharTokenizer, load, save

    model = reading(vocab_size=5)
    save(tmp_path / "one", model, CharTokenizer("abcde"))
    save(tmp_path / "none", model)
    loaded = load(tmp_path / "one")
    assert loaded.to_tokens("bad").tokens.tolist() == [[1, 0, 3]]
    for same in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(same("bad"), loaded([1, 0, 3]))
    assert load(tmp_path / "none").tokenizer is None
    (tmp_path / "one" / "vocabulary.json").write_text("{}")
    damaged = load(tmp_path / "one")
    assert damaged([1, 2]).shape == (1, 2, 5)
    with pytest.raises(ValueError, match="list of characters"):
        damaged("bad")


def test_new_models_of_a_model_keep_its_tokenizer():
    from models import center, fold_norms

    model = reading()
    for made in (fold_norms(model), center(model)):
        assert made.to_id("cat") == 4


def test_the_runner_reads_texts_and_the_cache_knows_their_tokens(tmp_path):
    model = reading()
    tokens, mask = model.to_tokens(TEXTS)
    runner = HookedRunner(model)
    expected, wanted = runner.run_with_cache(tokens, attention_mask=mask)
    logits, cache = runner.run_with_cache(TEXTS)
    assert torch.equal(logits, expected)
    assert torch.equal(cache["z", 1], wanted["z", 1])
    cache.save(tmp_path / "cache")
    from hooks import ActivationCache

    for known in (cache, ActivationCache.load(tmp_path / "cache")):
        assert torch.equal(known.inputs["tokens"], tokens)
        assert torch.equal(known.inputs["attention_mask"], mask)
    captured = runner.capture(TEXTS, names="blocks.1.mlp_out")
    torch.testing.assert_close(captured["mlp_out", 1], wanted["mlp_out", 1])
    assert runner.plan(TEXTS).nbytes == runner.plan(tokens, attention_mask=mask).nbytes
    edited = runner.run_with_hooks(TEXTS, hooks={"blocks.0.attn.z": edits.zero(head=1)})
    assert torch.equal(
        edited,
        runner.run_with_hooks(
            tokens, attention_mask=mask, hooks={"blocks.0.attn.z": edits.zero(head=1)}
        ),
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_attached_model_reads_texts(side):
    from models import attach, from_hf

    model = tiny.model("GPT2LMHeadModel", vocab_size=len(WORDS)).double()
    tokenizer = library_of(WORDS)
    with attach(model, tokenizer=tokenizer) as attached:
        batch = attached.to_tokens(TEXTS, side=side)
        assert model(TEXTS).logits.shape == (2, 6, len(WORDS))
        logits, cache = HookedRunner(model).run_with_cache(batch)
        assert torch.equal(cache.inputs["attention_mask"], batch.attention_mask)
        for row, text, ids in zip(range(2), TEXTS, IDS, strict=True):
            alone = model(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(logits.logits[row][batch.attention_mask[row]], alone)
            assert torch.equal(model(text).logits[0], alone)
            assert torch.equal(model(input_ids=text).logits[0], alone)
        assert attached.to_text(batch) == TEXTS
        attached.tokenizer = None
        with pytest.raises(ValueError, match="tokenizer"):
            model("the cat")
    assert not hasattr(model, "prepare_inputs")
    plain = from_hf(model, tokenizer=tokenizer)
    torch.testing.assert_close(plain(TEXTS[1])[0], model(torch.tensor(IDS[1:])).logits[0])


@pytest.mark.usefixtures("unchecked")
def test_errors_name_the_object_that_has_the_methods_of_an_attached_model():
    from models import attach

    model = tiny.model("GPT2LMHeadModel", vocab_size=30)
    attached = attach(model)
    with pytest.raises(ValueError, match=r"set attached\.tokenizer") as caught:
        model("the cat")
    name, made = re.search("set (.*), where (.*?), to", str(caught.value)).groups()
    names = {"attach": attach, "model": model, "tokenizer": Spaced()}
    exec(f"{made}; {name} = tokenizer", names)
    assert model("the cat").logits.shape == (1, 2, 30)
    # The token 14 ends a word, and the token 26 is the same letters as a new word.
    with pytest.raises(ValueError, match="rest of a word") as caught:
        Pairs("the play", answers="ing").read_by(model)
    advice = re.search("pass (.*)$", str(caught.value))[1]
    assert eval(advice, {"attached": attached}) == 14
    for hint in ("cfg", "to_single_token", "to_str_tokens", "to_string"):
        with pytest.raises(AttributeError, match=r"here it is attached\.") as caught:
            getattr(attached, hint)
        member = re.search(r"here it is attached\.(\w+)", str(caught.value))[1]
        assert hasattr(attached, member)
    # A plain model has these methods itself.
    plain = reading()
    plain.tokenizer = None
    with pytest.raises(ValueError, match=r"set model\.tokenizer to"):
        plain("the cat")


# --- logits of a run


def nats(logits, token):
    """Return the negative log-probability of a token, by NumPy in float64."""
    x = logits.double().numpy()
    return np.log(np.exp(x).sum()) - x[token]


def attached_gpt2():
    """Return a GPT-2 with a tokenizer of words, and the result of `attach`."""
    from models import attach

    model = tiny.model("GPT2LMHeadModel", vocab_size=30)
    return model.requires_grad_(False), attach(model, tokenizer=Spaced())


def test_the_output_of_a_model_stands_for_its_logits():
    from models import next_token_loss

    model, attached = attached_gpt2()
    tokens, mask = attached.to_tokens(TEXTS, side="left")
    output = model(tokens, attention_mask=mask)
    expected = [-nats(row[-1], 4) for row in output.logits]
    for found in (interp.log_prob(4)(output), measure(interp.log_prob(4), output)):
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    losses = next_token_loss(output, tokens, mask)
    for row, text, real, found in zip(output.logits, tokens, mask, losses, strict=True):
        each = [nats(row[at - 1], text[at]) for at in range(1, 6) if real[at - 1]]
        assert found[~found.isnan()].tolist() == pytest.approx(each, abs=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_the_loss_reads_tokens_in_every_form():
    from models import attach, next_token_loss

    model = reading()
    text = model.to_tokens(TEXTS)
    logits = model(text).detach()
    expected = [
        [nats(row[at - 1], token) for at, token in enumerate(tokens) if at]
        for row, tokens in zip(logits, ([3, 16, 18], [3, 17, 18, 19, 15, 20]), strict=True)
    ]
    mapping = {"input_ids": text.tokens, "attention_mask": text.attention_mask}
    for tokens in (text, mapping, text.listed()):
        for found, each in zip(next_token_loss(logits, tokens), expected, strict=True):
            assert found[~found.isnan()].tolist() == pytest.approx(each, abs=1e-9)
    one = next_token_loss(logits[1:], text.listed()[1])
    assert one[0].tolist() == pytest.approx(expected[1], abs=1e-9)
    # The logits of an encoder-decoder model are at the tokens of the decoder.
    decoded = {"input_ids": torch.tensor([[1, 2]]), "decoder_input_ids": text.tokens[1:]}
    assert torch.equal(next_token_loss(logits[1:], decoded), one)
    with pytest.raises(ValueError, match="without a mask"):
        next_token_loss(logits, text, text.attention_mask)
    with pytest.raises(ValueError, match="attention_mask must be"):
        next_token_loss(logits, text.tokens, text.attention_mask[:, 1:])
    for wrong in ([[1.0, 2.5]], [], text.tokens.float()):
        with pytest.raises(TypeError, match="tokens must be integers"):
            next_token_loss(logits, wrong)
    gpt2, _ = attached_gpt2()
    for strings in (TEXTS, TEXTS[1]):
        with pytest.raises(TypeError, match="tokens must be integers") as caught:
            next_token_loss(logits, strings)
        line, part, made = re.search("write (.*), or (.*) after (.*)", str(caught.value)).groups()
        names = {"next_token_loss": next_token_loss, "model": model, "text": strings}
        names["logits"] = model(strings).detach()
        assert eval(line, names).nansum() > 0
        names |= {"attach": attach, "model": gpt2}
        exec(made, names)
        names["attached"].tokenizer = Spaced()
        names["logits"] = gpt2(strings)
        assert next_token_loss(names["logits"], eval(part, names)).nansum() > 0


@pytest.mark.usefixtures("unchecked")
def test_a_model_converts_the_words_of_a_metric():
    model, attached = attached_gpt2()
    text = attached.to_tokens(TEXTS)
    output = model(text.tokens, attention_mask=text.attention_mask)
    last = output.logits[[0, 1], [2, 5]]
    mask = text.attention_mask
    words = interp.log_prob([" dog", " cat"])
    expected = [-nats(last[0], 17), -nats(last[1], 16)]
    mapping = {"input_ids": text.tokens, "attention_mask": mask}
    for given in (mask, text, mapping):
        found = measure(words, output, given, model=model)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    for wrong in (TEXTS, {"input_ids": [[3, 4]]}):
        with pytest.raises(TypeError, match="to_tokens"):
            measure(words, output, wrong, model=model)
    change = [{"blocks.0.mlp_out": edits.scale(0.5)}]
    assert interp.sweep(model, text, change, words).base.tolist() == pytest.approx(expected)
    difference = measure(interp.logit_diff(" dog", "<s>"), output, mask, model=model)
    assert difference.tolist() == pytest.approx((last[:, 17] - last[:, 0]).tolist(), abs=1e-5)
    entropy = measure(interp.cross_entropy(TEXTS), output, mask, model=model)
    rows = [(0, [3, 16, 18]), (1, [3, 17, 18, 19, 15, 20])]
    means = [
        np.mean([nats(output.logits[n, at - 1], row[at]) for at in range(1, len(row))])
        for n, row in rows
    ]
    assert entropy.tolist() == pytest.approx(means, abs=1e-5)
    # At another position, no text precedes the word, so a word is read as it is written.
    first = measure(interp.log_prob("cat", pos=0), output, mask, model=model)
    assert first.tolist() == pytest.approx([-nats(row[0], 4) for row in output.logits], abs=1e-5)
    names = {"measure": measure, "metric": words, "model": model}
    names |= {"logits": output.logits, "attention_mask": mask}
    # The logits tell their model and their mask, and a copy tells neither.
    for found in (words(output), measure(words, output), measure(words, output.logits[:2])):
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    names["logits"] = copy = output.logits.clone()
    for call in (lambda: words(copy, mask), lambda: measure(words, copy, mask)):
        with pytest.raises(ValueError, match="tokens as text") as caught:
            call()
        line = re.search(r"model: (.*) converts them$", str(caught.value))[1]
        assert eval(line, names).tolist() == pytest.approx(expected, abs=1e-5)
    for call in (lambda: words(copy), lambda: measure(words, copy)):
        with pytest.raises(ValueError, match="padded texts also need") as caught:
            call()
        line, more = re.search("model: (.*) converts .* need (.*)$", str(caught.value)).groups()
        assert "attention_mask" not in line
        found = eval(line.replace(")", f", {more})"), names)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="begin with a space") as caught:
        measure(interp.log_prob(["cat", " dog"]), output, mask, model=model)
    advice = re.search("write (.*) for a new word, or pass (.*) for", str(caught.value)).groups()
    assert [eval(part, {"attached": attached}) for part in advice] == [" cat", 4]
    # A word that is a token only after a space must have the space.
    attached.tokenizer.pieces[4] = "elsewhere"
    with pytest.raises(ValueError, match="write ' cat' for a new word$"):
        measure(interp.log_prob("cat"), output, mask, model=model)
    # A word with a space needs no other space.
    attached.tokenizer.pieces[13] = "  dog"
    found = measure(interp.log_prob(" dog"), output, mask, model=model)
    assert found.tolist() == pytest.approx([-nats(row, 17) for row in last], abs=1e-5)


# --- pairs


CLEAN, CORRUPTED = (
    ["Anne sat on the mat .", "the cat ran on"],
    ["Mark sat on the mat .", "the dog ran on"],
)


def test_words_answer_texts_with_masks_and_other_arguments():
    model, mask = reading(), torch.tensor([[0, 1, 1, 1]])
    tokens = model.to_tokens("the cat sat on").tokens
    given = {"input_ids": tokens, "attention_mask": mask, "query_key_mask": torch.ones(4, 4)}
    pairs = Pairs(given, tokens.roll(1, 1), (" cat", " dog"))
    assert not pairs.is_read
    read, wanted = pairs.read_by(model), Pairs(given, tokens.roll(1, 1), (16, 17))
    assert read.answers.tolist() == [[16, 17]]
    runs = [interp.sweep(model, p, [{"embed": edits.zero(pos=2)}]) for p in (read, wanted)]
    assert torch.equal(*(run.values for run in runs))
    logits = model(tokens, attention_mask=mask, query_key_mask=torch.ones(4, 4))
    torch.testing.assert_close(runs[0].base, logits[:, -1, 16] - logits[:, -1, 17])


def test_pairs_of_strings_are_pairs_of_their_tokens():
    model = reading()
    pairs = Pairs(CLEAN, CORRUPTED, (" cat", " dog"))
    assert len(pairs) == 2
    assert repr(pairs).splitlines() == [
        "Pairs: 2, not read by a model yet",
        f"  first clean: {CLEAN[0]!r}",
        f"  first corrupted: {CORRUPTED[0]!r}",
        "  first answer: right ' cat', wrong ' dog'",
    ]
    assert pairs.clean == CLEAN
    for use in (lambda: pairs.metric, lambda: pairs[:1], lambda: pairs.text, pairs.digests):
        with pytest.raises(ValueError, match="read_by"):
            use()
    tokens, mask = model.to_tokens(CLEAN)
    others, _ = model.to_tokens(CORRUPTED)
    wanted = Pairs(tokens, others, torch.tensor([[16, 17]] * 2), attention_mask=mask)
    for function, options in (
        (interp.activation_patching, dict(site="z")),
        (interp.activation_patching, dict(site="z", edit=edits.zero())),
        (interp.attribution_patching, dict(site="resid_pre")),
        (interp.edge_attribution, {}),
        (interp.path_patching, {}),
    ):
        found, expected = function(model, pairs, **options), function(model, wanted, **options)
        assert torch.equal(found.values, expected.values)
    swept = [interp.sweep(model, p, [{"embed": edits.zero(pos=1)}]).values for p in (pairs, wanted)]
    assert torch.equal(*swept)
    kept = interp.graph.Graph(model).edges[::2]
    assert torch.equal(*(interp.run_circuit(model, p, kept) for p in (pairs, wanted)))
    assert pairs.read_by(model).digests() == wanted.digests()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("Anne", [23, 23]),
        (" cat", [16, 16]),
        ((" cat", 3), [[16, 3], [16, 3]]),
        ([" cat", " dog"], [16, 17]),
        ([(" cat", " dog"), (" mat", " sat")], [[16, 17], [20, 18]]),
        (torch.tensor([4, 5]), [4, 5]),
        ([4, 5], [4, 5]),
    ],
)
def test_answers_are_tokens(answers, expected):
    model = reading()
    texts = ["Anne sat on the mat . Anne", "Anne ran"]
    assert Pairs(texts, answers=answers).read_by(model).answers.tolist() == expected


def test_an_answer_that_may_be_two_tokens_is_refused():
    model = reading()
    with pytest.raises(ValueError, match=r"after 'the play' got 'ing': write ' ing'"):
        Pairs("the play", answers="ing").read_by(model)
    assert Pairs("the play", answers=[14]).read_by(model).answers.tolist() == [14]
    assert Pairs("the play", answers=" ing").read_by(model).answers.tolist() == [26]
    two_tokens = Pairs("the play", answers=" cat sat").read_by(model).answers
    assert two_tokens.tokens == (((16, 18),),)
    with pytest.raises(ValueError, match="for each of 1 texts"):
        Pairs("the play", answers=[" cat", " dog"]).read_by(model)


@pytest.mark.parametrize("answer", ["", (" cat", ""), [" cat", ""], [(" cat", " dog"), ("", 3)]])
def test_an_empty_answer_is_refused(answer):
    with pytest.raises(ValueError, match="an answer must have at least one token; got ''"):
        Pairs(["the cat", "the sat"], answers=answer).read_by(reading())
    with pytest.raises(ValueError, match="an answer must have at least one token; got ''"):
        Pairs(["the cat", "the sat"], metric=interp.log_prob("")).read_by(reading())


def test_targets_of_a_graph_are_read_like_answers():
    """The token 14 ends a word, and the token 26 is the same letters as a new word."""
    model = reading()

    def numbers(targets, text="the play", pos=-1):
        graph = interp.attribution_graph(model, text, {}, targets=targets, pos=pos)
        return [node.number for node in graph.logits]

    for targets in ("ing", ("ing", " cat"), ["ing"], [("ing", " cat")]):
        with pytest.raises(ValueError, match="write ' ing' for a new word"):
            numbers(targets)
    for targets in ("", [""]):
        with pytest.raises(ValueError, match="at least one token; got ''"):
            numbers(targets)
    # The error names a form that `targets` accepts. Without a tuple, 14 is a number of targets.
    with pytest.raises(ValueError, match=r"rest of a word, pass \(model.to_id\('ing'\),\)"):
        numbers("ing")
    assert numbers((model.to_id("ing"),)) == numbers([14]) == [14]
    assert numbers(" ing") == numbers([" ing"]) == [26]
    # A word of the text is a new word, but only words up to the position of the logits count.
    assert numbers("cat", "the cat sat") == numbers(["cat"], "the cat sat") == [16]
    for targets in ("cat", ["cat"]):
        with pytest.raises(ValueError, match="after 'the' got 'cat'"):
            numbers(targets, "the cat sat", pos=0)


def test_words_of_metrics_are_read_like_answers_at_the_last_position():
    model = reading()
    change = [{"blocks.0.mlp_out": edits.zero(pos=0)}]

    def base(texts, metric):
        return interp.sweep(model, texts, change, metric).base

    for metric in (
        interp.log_prob("ing"),
        interp.accuracy(["ing"]),
        interp.rank("ing"),
        interp.logit_diff(" cat", [[" dog", "ing"]]),
    ):
        with pytest.raises(ValueError, match="write ' ing' for a new word"):
            base("the play", metric)
        with pytest.raises(ValueError, match="write ' ing' for a new word"):
            interp.over_examples(interp.sweep, model, "the play", change, metric, progress=False)
    _, cache = interp.run_with_cache(model, "the play")
    with pytest.raises(ValueError, match="write ' ing' for a new word"):
        interp.direct_logit_attribution(model, cache, right=" cat", wrong="ing", pos=-1)
    # At any other position, a word is the token with this text.
    read = [interp.direct_logit_attribution(model, cache, right=t, pos=0) for t in ("ing", 14)]
    assert torch.equal(read[0].values, read[1].values)
    assert base("the play", interp.rank("ing", pos=0)) == base("the play", interp.rank(14, pos=0))
    # A word of the text is a new word. After a space, a word has no other space.
    model.tokenizer.pieces[9] = "so "
    texts = ["the cat", "so "]
    assert model.to_tokens(texts).listed() == [[3, 16], [9]]
    plain = torch.tensor([16, model.to_id("cat")])
    expected = base(texts, interp.log_prob(plain))
    assert torch.equal(base(texts, interp.log_prob("cat")), expected)


def test_an_answer_is_a_token_if_only_one_token_fits():
    """An answer is unambiguous in two cases. The first tokenizer drops the first space, so the word
    and the word after a space are one token. The second has a token only for the word after a
    space.
    """
    model = reading()
    model.tokenizer = library_of(WORDS)
    assert Pairs("the cat", answers="dog").read_by(model).answers.tolist() == [5]
    tokenizer = Spaced()
    # Now " dog" is a token, and "dog" is not.
    tokenizer.pieces[5] = "elsewhere"
    model.tokenizer = tokenizer
    assert Pairs("the cat", answers="dog").read_by(model).answers.tolist() == [17]


def test_a_metric_reads_a_word_that_is_one_token_only_after_a_space():
    model, tokenizer = reading(), Spaced()
    tokenizer.pieces[5], tokenizer.pieces[8], tokenizer.pieces[10] = "dog"
    model.tokenizer = tokenizer
    assert model.to_tokens("dog", bos=False).listed() == [[5, 8, 10]]
    pairs = Pairs(["the cat", "the sat"], metric=interp.log_prob("dog")).read_by(model)
    expected = model(torch.tensor([[3, 16], [3, 18]]))[:, -1].log_softmax(-1)[:, 17]
    rows = pairs.rows()
    torch.testing.assert_close(rows.metric(model(rows.text.tokens)), expected)


def test_spans_are_found_by_their_words():
    model = reading()
    clean, corrupted = ["the cat sat on", "the dog ran"], ["cat sat on the mat", "the mat ran on"]
    spans = {"who": [("cat", "mat"), ("the dog", "the mat")], "verb": ["sat", "ran"]}
    pairs = Pairs(clean, corrupted, " mat", spans=spans, last_only=True).read_by(model)
    assert pairs.spans["who"].tolist() == [[1], [1]]
    assert pairs.other.spans["who"].tolist() == [[4], [1]]
    assert (pairs.spans["verb"].tolist(), pairs.other.spans["verb"].tolist()) == (
        [[2], [2]],
        [[1], [2]],
    )
    whole = Pairs(clean[1], corrupted[1], " mat", spans={"who": ("the dog", "the mat")}).read_by(
        model
    )
    assert whole.spans["who"].tolist() == [[0, 1]]
    assert whole.other.attention_mask is None
    result = interp.activation_patching(
        model,
        Pairs(clean, corrupted, " mat", spans={"who": spans["who"]}, last_only=True),
        over=["layer", "span"],
    )
    assert result.labels["span"] == ("who",)
    for part, count in (("mat", 0), ("on", 2)):
        with pytest.raises(ValueError, match=rf"'x' must .*got '{part}' {count} times"):
            Pairs("cat on sat on", spans={"x": part}).read_by(model)


def test_texts_that_do_not_correspond_are_shown_as_tokens():
    model = reading()
    with pytest.raises(ValueError, match=r"got 2, 'the\| cat', and 3, 'the\| cat\| ran'"):
        interp.activation_patching(model, Pairs("the cat", "the cat ran", " mat"))
    with pytest.raises(ValueError, match="attention_mask needs texts"):
        Pairs(["the"], attention_mask=torch.ones(1, 1)).read_by(model)
    with pytest.raises(TypeError, match="to_tokens"):
        Pairs("the").read_by(torch.nn.Linear(2, 3))


# --- metrics


def test_metrics_accept_words_if_a_model_reads_them():
    model = reading()
    tokens = model.to_tokens("the cat").tokens
    for worded, plain, said in (
        (interp.log_prob(" cat"), interp.log_prob(16), "log_prob(' cat')"),
        (interp.rank([" cat"], pos=0), interp.rank([16], pos=0), "rank(' cat', pos=0)"),
        (
            interp.logit_diff(" cat", " dog"),
            interp.logit_diff(16, 17),
            "logit_diff(' cat', ' dog')",
        ),
        (
            interp.logit_diff([[" cat", " dog"]], 17),
            interp.logit_diff([[16, 17]], 17),
            "logit_diff([' cat', ' dog'], ' dog')",
        ),
        (interp.cross_entropy("the cat"), interp.cross_entropy(tokens), "cross_entropy(texts)"),
    ):
        change = [{"blocks.0.mlp_out": edits.zero(pos=0)}]
        found, expected = (
            interp.sweep(model, "the cat", change, metric) for metric in (worded, plain)
        )
        assert torch.equal(found.values, expected.values)
        assert found.about["metric"] == said
        assert torch.equal(worded(model(tokens)), plain(model(tokens)))
        with pytest.raises(ValueError, match="tokens as text"):
            worded(model(tokens).clone())
    assert Pairs(tokens, metric=interp.log_prob(" cat")).read_by(model).metric(
        model(tokens)
    ).item() == pytest.approx(model(tokens)[0, -1].log_softmax(-1)[16].item())
    cache = interp.run_with_cache(model, tokens)[1]
    found = interp.direct_logit_attribution(model, cache, right=" cat", wrong=" dog", pos=-1)
    assert torch.equal(
        found.values,
        interp.direct_logit_attribution(model, cache, right=16, wrong=17, pos=-1).values,
    )


def test_a_metric_takes_the_mask_of_padded_logits():
    model = reading()
    batch = model.to_tokens(TEXTS)
    metric, logits = interp.log_prob(4), model(batch)
    alone = torch.cat([metric(model(text)) for text in TEXTS])
    torch.testing.assert_close(metric(logits, batch.attention_mask), alone)
    torch.testing.assert_close(measure(metric, logits, batch.attention_mask), alone)
    assert interp.measure is measure


# --- words in results


def test_results_say_which_words(tmp_path):
    model = reading()
    pairs = Pairs("Anne sat on the mat .", "Mark sat on the mat .", (" cat", " dog"))
    result = interp.activation_patching(model, pairs)
    words = ("Anne|Mark", " sat", " on", " the", " mat", " .")
    assert tuple(result.words["pos"]) == words
    noising = interp.activation_patching(model, pairs, direction="noising")
    assert tuple(noising.words["pos"]) == words
    assert torch.equal(result.select(pos=" mat").values, result.select(pos=4).values)
    kept = result.select(pos=[2, 4], layer=1)
    assert kept.words["pos"] == [" on", " mat"]
    assert result.select(pos=2).words == {}
    assert "pos 1 ' sat'" in repr(result.select(pos=[1]).top(1))
    result.save(tmp_path / "result")
    assert [*Result.load(tmp_path / "result").words["pos"]] == [*words]
    estimate = interp.attribution_patching(
        model, pairs, site="pattern", over=["layer", "query", "key"]
    )
    assert [*estimate.words] == ["query", "key"]
    with pytest.raises(ValueError, match="unique label.* or a unique word of .*Anne|Mark"):
        result.select(pos=" ran")
    for word in ("Anne|Mark", "Anne", "Mark"):
        assert torch.equal(result.select(pos=word).values, result.select(pos=0).values)
    twice = interp.activation_patching(
        model, Pairs("the cat ran", answers=" cat"), edit=edits.zero()
    )
    assert twice.words["pos"] == ["the", " cat", " ran"]
    cache = interp.run_with_cache(model, ["the cat", "the dog"])[1]
    assert interp.accumulated_logits(model, cache, right=3).words["pos"] == ["the", " cat| dog"]
    model.tokenizer = None
    assert interp.activation_patching(model, pairs.read_by(reading())).words == {}


def test_select_refuses_a_word_that_a_text_has_at_another_position(tmp_path):
    model = reading()
    clean = ["Anne sat on the mat .", "Mark ran on the cat .", "the dog on Anne mat ."]
    corrupted = ["Mark sat on the mat .", "Anne ran on the cat .", "the cat on Mark mat ."]
    made = interp.activation_patching(model, Pairs(clean, corrupted, (" cat", " dog")))
    made.save(tmp_path / "result")
    loaded = Result.load(tmp_path / "result")
    for result in (made, loaded, pickle.loads(pickle.dumps(made))):
        assert [*result.words["pos"]] == ["", "", " on", "", " mat| cat", " ."]
        # The word of all texts, of one text, of one corrupted text, and of two texts.
        for word, column in ((" on", 2), (" sat", 1), (" Mark", 3), (" mat| cat", 4), (" mat", 4)):
            selected = result.select(pos=word).values
            assert torch.equal(selected, made.select(pos=column).values)
        with pytest.raises(ValueError, match="got ' cat', .* 1 and 4: write pos=1 or pos=4"):
            result.select(pos=" cat")
        with pytest.raises(ValueError, match="unique label"):
            result.select(pos="")


def test_a_table_for_pandas_has_words():
    pytest.importorskip("pandas", reason="optional")
    effects = torch.zeros(1, 2, 3)
    result = Result(effects, ("layer", "pos", "example"), words={"pos": ["the", " cat"]})
    assert [*result.to_dataframe()["pos_word"]] == ["the", " cat"]


def test_readings_print_words():
    model = reading()
    _, cache = interp.run_with_cache(model, "the cat sat")
    lens = interp.logit_lens(model, cache, top_k=2)
    text, likeliest = lens.first
    assert text == ["the", " cat", " sat"]
    assert likeliest[1][2] == model.to_pieces(lens.tokens[1, 0, 2])
    assert "' cat'" in repr(lens).splitlines()[2]
    assert repr(likeliest[0][0][0]) in repr(lens).splitlines()[3]
    best = interp.max_activating(model, TEXTS, "blocks.1.resid_post", k=2)
    assert best == interp.max_activating(
        model, [model.encoded(text) for text in TEXTS], "blocks.1.resid_post", k=2
    )
    assert "".join(best[0].pieces) == TEXTS[best[0].text]
    assert f"«{best[0].pieces[best[0].pos]}»" in repr(best[0])
    assert "tokenizer" not in repr(best)
    tokens = interp.singular_tokens(model, 1, 0, k=2, top=3)
    assert tokens.texts[0] == model.to_pieces(tokens.read)
    assert repr(tokens.texts[1][1][0][0]) in repr(tokens)
    model.tokenizer = None
    numbers = repr(interp.max_activating(model, IDS, "embed", k=1)).splitlines()
    assert "no tokenizer" in numbers[1]
    assert "«" in numbers[2]
    assert interp.logit_lens(model, cache).first is None
    assert (
        str(lens.tokens[0, 0, 0, 0].item()) in repr(interp.logit_lens(model, cache)).splitlines()[2]
    )
    assert interp.singular_tokens(model, 1, 0, k=2, top=3).texts is None


def test_readings_take_words():
    model = reading()
    _, cache = interp.run_with_cache(model, "the cat sat")
    followed = interp.logit_lens(model, cache, targets=" dog").target_probabilities
    tokens = torch.full((1, 3), 17)
    assert torch.equal(
        followed, interp.logit_lens(model, cache, targets=tokens).target_probabilities
    )
    assert torch.equal(
        interp.token_directions(model, [" cat", " dog"]),
        interp.token_directions(model, torch.tensor([16, 17])),
    )
    assert torch.equal(
        interp.token_directions(model, " cat"), interp.token_directions(model, torch.tensor(16))
    )


def test_tokenizers_show_tokens_of_any_shape():
    from models import CharTokenizer

    tokenizer = CharTokenizer("abc")
    assert tokenizer.tokens_as_text(torch.tensor([[[0, 2]], [[1, 1]]])) == [
        [["a", "c"]],
        [["b", "b"]],
    ]
    with pytest.raises(ValueError, match=r"\[3\]"):
        tokenizer.tokens_as_text([0, 3])


@pytest.mark.parametrize("site", ["resid_pre", "z", "pattern"])
def test_a_mask_by_query_reaches_every_analysis(site):
    """With a mask in which all queries see all keys, every run of an analysis uses this mask."""
    model = reading()
    clean, other = (model.to_tokens(text).tokens for text in ("the cat sat on", "the dog sat on"))
    mask = {"query_key_mask": torch.ones(4, 4)}
    pairs = Pairs({"input_ids": clean, **mask}, other, torch.tensor([[3, 4]]))
    metric, causal = interp.logit_diff(3, 4), Pairs(clean, other, torch.tensor([[3, 4]]))
    base, target = (metric(model(tokens, **mask)) for tokens in (other, clean))
    assert abs(base - metric(model(other))) > 1e-3
    axes = dict(over=["layer", "query"]) if site == "pattern" else {}
    result = interp.activation_patching(model, pairs, site=site, **axes)
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache(clean, **mask)
    axis = {"resid_pre": "pos", "z": "head", "pattern": "query"}[site]
    name = f"blocks.1.{site if axis == 'pos' else f'attn.{site}'}"
    edited = runner.run_with_hooks(other, **mask, hooks={name: edits.replace(cache, **{axis: 2})})
    torch.testing.assert_close(result.values[1, 2], metric(edited) - base)
    torch.testing.assert_close(result.target, target)
    estimate = interp.attribution_patching(model, pairs, site=site, **axes)
    kept = interp.graph.Graph(model).edges
    everything = metric(interp.run_circuit(model, pairs, kept))
    scores = interp.edge_attribution(model, pairs)
    torch.testing.assert_close(estimate.base, base)
    # Effects of edges use noising, so the base is the clean run.
    torch.testing.assert_close(scores.base, target)
    torch.testing.assert_close(everything, target)
    assert (scores.values - interp.edge_attribution(model, causal).values).abs().max() > 1e-3


@pytest.mark.usefixtures("unchecked")
def test_a_tokenizer_given_to_a_generation_says_where_it_goes():
    from models import generate_text

    model = pydoc()
    with pytest.raises(TypeError, match="model.tokenizer = tokenizer"):
        generate_text(model, model.tokenizer, max_new_tokens=2)
    with pytest.raises(TypeError, match="model.tokenizer = tokenizer"):
        generate_text(model, "def", max_new_tokens=2, tokenizer=model.tokenizer)


def test_fits_read_texts():
    model = reading()
    ids = [model.encoded(text) for text in TEXTS]
    one, other = (interp.tuned_lens(model, texts, steps=3, batch=2) for texts in (TEXTS, ids))
    assert torch.equal(one.weight, other.weight)
    one, other = (
        interp.jacobian_lens(model, texts, skip=0)
        for texts in (iter(TEXTS), model.to_tokens(TEXTS))
    )
    assert torch.equal(one.weight, other.weight)
    assert interp.jacobian_lens(model, "the cat sat", skip=0).n_texts == 1
    assert interp.jacobian_lens(model, [3, 4, 5], skip=0).n_texts == 1


UNREADABLE = [
    ({"abc", "de"}, r"a set has no order; .*sorted\(texts\)"),
    (frozenset({"abc"}), "a set has no order"),
    (b"abc", r"must be a string; got b'abc': write text\.decode\(\)"),
    (["abc", b"de"], "must be a string; got b'de'"),
]


@pytest.mark.parametrize(("texts", "message"), UNREADABLE)
def test_sets_and_bytes_are_no_texts(texts, message):
    model = load("pydoc-4l")
    calls = [
        lambda: model.to_tokens(texts),
        lambda: HookedRunner(model).run_with_cache(texts),
        lambda: generate(model, texts, max_new_tokens=1),
        lambda: statistics(model, texts, "embed"),
    ]
    if not isinstance(texts, list):
        calls.append(lambda: Pairs(texts, answers="a"))
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()


def test_a_text_names_its_tokens():
    text = reading().to_tokens("the cat")
    for name in ("shape", "device", "input_ids"):
        with pytest.raises(AttributeError, match=r"here it is text\.tokens"):
            getattr(text, name)
