"""Metrics, compared with NumPy in float64, also on padded texts."""

import functools
import pickle

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from hooks.base import Text, columns_of_last
from interp import (
    Pairs,
    accuracy,
    activation_patching,
    attribution_patching,
    cross_entropy,
    edits,
    kl_divergence,
    log_prob,
    logit_diff,
    rank,
    sweep,
)
from interp.alignment import align
from interp.inputs.token_positions import last_real
from interp.measuring import last_of, measure, metric_of_examples, per_run
from interp.runs.masked import run_circuit
from models import KVCache, Transformer, TransformerConfig, attach, load, next_token_loss
from models.attached.view import PlainView
from tests import tiny
from tests.shipped import pydoc

BATCH, POS, VOCAB = 3, 5, 11
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])


@pytest.fixture
def logits():
    return torch.randn(BATCH, POS, VOCAB, dtype=torch.float64) * 3


def by_numpy(name, x, token, other):
    """Return a metric of one example, computed by numpy from its logits [vocab] at one position."""
    log_p = x - np.log(np.exp(x).sum())
    return {
        "logit_diff": x[token] - x[other],
        "log_prob": log_p[token],
        "accuracy": float(x.max() == x[token]),
        "rank": float((x > x[token]).sum()),
    }[name]


MAKE = {
    "logit_diff": logit_diff,
    "log_prob": lambda token, other, **pos: log_prob(token, **pos),
    "accuracy": lambda token, other, **pos: accuracy(token, **pos),
    "rank": lambda token, other, **pos: rank(token, **pos),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("token", "other"),
    [(4, 7), ([1, 8, 5], 2), (torch.tensor([3, 0, 10]), torch.tensor([6, 9, 1]))],
)
@pytest.mark.parametrize("pos", [-1, 2, -3, [-2, -5, -1], torch.tensor([4, 0, 1])])
def test_metrics_of_one_token_equal_numpy(logits, name, token, other, pos):
    def each(given):
        return torch.as_tensor(given).expand(BATCH).tolist()

    # Make the first prediction right, so that the accuracy is not 0 everywhere.
    if name == "accuracy":
        logits[0, :, each(token)[0]] = 20
    metric = MAKE[name](token, other, pos=pos)
    rows = zip(logits.numpy(), each(pos), each(token), each(other), strict=True)
    expected = torch.tensor([by_numpy(name, x[p], t, o) for x, p, t, o in rows]).double()
    torch.testing.assert_close(metric(logits), expected, rtol=1e-12, atol=1e-12)
    half = logits.bfloat16()
    torch.testing.assert_close(metric(half), metric(half.float()), rtol=0, atol=0)


def test_several_tokens_count_by_their_mean(logits):
    right, wrong = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[7], [8], [9]])
    x = logits.numpy()[:, -1]
    expected = [(x[i, 2 * i + 1] + x[i, 2 * i + 2]) / 2 - x[i, 7 + i] for i in range(BATCH)]
    assert logit_diff(right, wrong)(logits).tolist() == pytest.approx(expected, abs=1e-12)


def test_ties(logits):
    """Of tokens with equal logits, the prediction is the first.

    A rank counts only larger logits.
    """
    logits[:, -1] = torch.tensor([[5.0] * 2 + [1] * 9, [1] * 10 + [5.0], [0] * 11])
    assert accuracy(1)(logits).tolist() == [0, 0, 0]
    assert accuracy(0)(logits).tolist() == [1, 0, 1]
    assert rank(3)(logits).tolist() == [2, 1, 0]


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1).bool()])
def test_cross_entropy_is_the_mean_over_real_predictions(logits, mask):
    tokens = torch.randint(VOCAB, (BATCH, POS))
    if mask is not None:
        tokens[mask == 0] = -100  # padding may contain any number
    real = np.ones((BATCH, POS)) if mask is None else mask.numpy()
    expected = []
    for x, text, own in zip(logits.numpy(), tokens.tolist(), real, strict=True):
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        pairs = [at for at in range(POS - 1) if own[at] and own[at + 1]]
        expected.append(-np.mean([log_p[at, text[at + 1]] for at in pairs]))
    found = measure(cross_entropy(tokens, attention_mask=mask), logits, mask)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


RIGHT = LEFT.flip(1)


@pytest.mark.parametrize(
    ("pos", "mask", "columns"),
    [
        # The columns whose predictions each example uses.
        (-2, None, [[3], [3], [3]]),
        (-2, LEFT, [[3], [3], [3]]),
        (-2, RIGHT, [[1], [3], [2]]),
        (3, LEFT, [[3], [3], [3]]),
        (slice(-3, None), RIGHT, [[0, 1], [2, 3], [1, 2]]),
        (slice(-3, -2), RIGHT.bool(), [[0], [2], [1]]),
        (slice(2), LEFT, [None, [0, 1], [1]]),
        ([-2, -5, -3], LEFT, [[3], [0], [2]]),
        (torch.tensor([-2, 0, -3]), RIGHT, [[1], [0], [1]]),
        ([[-3], [0, 3], [-1, -2]], RIGHT, [[0], [0, 3], [2]]),
        (torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 1, 1, 1]]).bool(), LEFT, None),
        (torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]).bool(), RIGHT, None),
    ],
    ids=repr,
)
def test_cross_entropy_is_limited_to_positions(logits, pos, mask, columns):
    tokens = torch.randint(VOCAB, (BATCH, POS))
    if mask is not None:
        tokens[mask == 0] = -100
    if columns is None:
        columns = [[at for at in np.flatnonzero(row) if at < 4] for row in pos.numpy()]
    if None in columns:
        with pytest.raises(ValueError, match="example 0 at pos=slice"):
            cross_entropy(tokens, pos, attention_mask=mask)
        return
    expected = []
    for x, text, read in zip(logits.numpy(), tokens.tolist(), columns, strict=True):
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        expected.append(-np.mean([log_p[at, text[at + 1]] for at in read]))
    metric = cross_entropy(tokens, pos, attention_mask=mask)
    assert measure(metric, logits, mask).tolist() == pytest.approx(expected, abs=1e-12)
    # The metric of some examples, and of the examples in another process.
    again = pickle.loads(pickle.dumps(metric))
    assert again(logits).tolist() == pytest.approx(expected, abs=1e-12)
    some = metric.rows(torch.tensor([2, 0]))
    assert some(logits[[2, 0]]).tolist() == pytest.approx([expected[2], expected[0]], abs=1e-12)


def test_cross_entropy_of_words_is_limited_to_positions():
    model = pydoc()
    texts = ["def __init", "self.name"]
    found = measure(
        cross_entropy(texts, pos=-2),
        model(texts),
        model.to_tokens(texts).attention_mask,
        model=model,
    )
    for text, value in zip(texts, found, strict=True):
        x = model(text)[0, -2].detach().double().numpy()
        token = model.to_tokens(text).tokens[0, -1]
        assert value.item() == pytest.approx(np.log(np.exp(x).sum()) - x[token], abs=1e-5)
    assert repr(cross_entropy(texts, pos=-2)) == "cross_entropy(texts, pos=-2)"
    assert repr(cross_entropy(torch.ones(1, 2).long(), 0)) == "cross_entropy(tokens [1, 2], pos=0)"


def test_cross_entropy_uses_the_mask_of_every_form_of_tokens(logits):
    tokens = torch.randint(VOCAB, (BATCH, POS))
    expected = cross_entropy(tokens, attention_mask=LEFT)(logits)
    forms = [
        cross_entropy(Text(tokens, LEFT)),
        cross_entropy(Text(tokens), attention_mask=LEFT),
        cross_entropy({"input_ids": tokens, "attention_mask": LEFT}),
        cross_entropy(
            {
                "input_ids": torch.randint(VOCAB, (BATCH, 4)),
                "decoder_input_ids": tokens,
                "decoder_attention_mask": LEFT,
            }
        ),
    ]
    for metric in forms:
        assert torch.equal(metric(logits), expected)
    assert not torch.allclose(cross_entropy(tokens)(logits), expected)
    for tokens_with_mask in (Text(tokens, LEFT), "the cat", [[3, 1, 4]]):
        with pytest.raises(ValueError, match="attention_mask needs texts in a tensor"):
            cross_entropy(tokens_with_mask, attention_mask=LEFT)


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1).bool()])
@pytest.mark.parametrize("pos", [None, -1, -2, [-1, -3, -2]])
def test_kl_divergence_is_from_the_reference(logits, mask, pos):
    reference = torch.randn(BATCH, POS, VOCAB, dtype=torch.float64)
    logits[1, :, 4] = reference[1, :, 4] = -torch.inf  # probability 0 in both
    reference[2, :, 3] = -torch.inf
    real = np.ones((BATCH, POS)) if mask is None else mask.numpy()
    expected = []
    for i in range(BATCH):
        columns = np.flatnonzero(real[i])
        if pos is not None:
            columns = columns[[pos if isinstance(pos, int) else pos[i]]]
        each = []
        for at in columns:
            p, q = (np.exp(x[i, at].numpy()) for x in (reference, logits))
            p, q = p / p.sum(), q / q.sum()
            each.append(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a))
        expected.append(np.mean(each))
    found = measure(kl_divergence(reference, pos, attention_mask=mask), logits, mask)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "metric",
    [
        logit_diff([1, 2, 3], [[4, 5], [6, 7], [8, 9]], pos=[-1, -2, -1]),
        log_prob(3, pos=1),
        cross_entropy(torch.tensor([[1, 2, 3, 4, 5]] * BATCH), attention_mask=LEFT),
        kl_divergence(
            torch.arange(165.0).sin().view(BATCH, POS, VOCAB).double(), None, attention_mask=LEFT
        ),
    ],
    ids=repr,
)
def test_gradients_match_finite_differences(logits, metric):
    assert torch.autograd.gradcheck(metric, logits.requires_grad_())


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 2, 4, 6, 8]])


@pytest.mark.parametrize(
    "metric",
    [
        logit_diff([1, 2, 3], [[4, 5], [6, 7], [8, 9]], pos=[-1, -2, -1]),
        log_prob([3, 0, 2], pos=1),
        accuracy([3, 0, 2]),
        rank(4, pos=[0, 2, 4]),
        cross_entropy(TOKENS, attention_mask=LEFT),
        cross_entropy(TOKENS, [-2, 0, -3], attention_mask=LEFT),
        kl_divergence(
            torch.arange(165.0).sin().view(BATCH, POS, VOCAB).double(), None, attention_mask=LEFT
        ),
    ],
    ids=repr,
)
def test_the_metric_of_several_runs_is_the_metric_of_each(metric):
    logits = torch.randn(7 * BATCH, POS, VOCAB, dtype=torch.float64)
    values = per_run(metric, logits, BATCH)
    assert values.shape == (7, BATCH)
    for run, logits_of_run in enumerate(logits.split(BATCH)):
        # The same operations compute each row, so the numbers are equal to the last bit.
        assert torch.equal(values[run], metric(logits_of_run))


def test_a_function_of_the_user_receives_one_run_at_a_time(logits):
    shapes = []

    def metric(logits):
        shapes.append(tuple(logits.shape))
        return logits[:, -1, 2].half()

    values = per_run(metric, logits.repeat(2, 1, 1), BATCH)
    assert shapes == [(BATCH, POS, VOCAB)] * 2
    assert values.tolist() == [logits[:, -1, 2].half().tolist()] * 2
    assert values.dtype == torch.float32
    with pytest.raises(ValueError, match=r"\[3\].*\[2\]"):
        per_run(lambda logits: logits[:2, 0, 0], logits, BATCH)


@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1), torch.tensor([[1, 0, 1, 1, 0]] * 3).bool()])
@pytest.mark.parametrize("pos", [-1, -3, [-2, -1, -3]])
def test_negative_positions_count_real_tokens(logits, mask, pos):
    metric = log_prob([3, 1, 4], pos=pos)
    assert last_of(metric) == (3 if pos != -1 else 1)
    found = measure(metric, logits, mask)
    for i, own in enumerate([pos] * 3 if isinstance(pos, int) else pos):
        alone = logits[i : i + 1, mask[i].bool()]
        assert found[i] == log_prob([3, 1, 4][i], pos=own)(alone)[0]


def test_the_positions_that_a_metric_needs(logits):
    assert [last_of(m) for m in (rank(3), log_prob(3, pos=4), lambda x: x[:, 0, 0])] == [1, 0, 0]
    columns = columns_of_last(2, POS, BATCH, LEFT.flip(1))
    assert columns.tolist() == [[1, 2], [3, 4], [2, 3]]
    assert columns_of_last(3, POS, 2).tolist() == [[2, 3, 4]] * 2

    def own(logits):
        return logits.argmax(-1).sum(1)

    own.last = 2
    expected = logits.argmax(-1).gather(1, columns).sum(1).float()
    assert torch.equal(measure(own, logits, LEFT.flip(1)), expected)
    assert metric_of_examples(lambda x: x[:, 0, 0].half(), logits, BATCH).dtype == torch.float32


def test_logits_at_the_last_positions_do_not_keep_the_others_in_memory(logits):
    last = last_real(logits, 2)
    assert torch.equal(last, logits[:, [3, 4]])
    assert last.untyped_storage().nbytes() == BATCH * 2 * VOCAB * 8


def test_padding_that_a_metric_was_not_told_of_is_refused(logits):
    tokens = torch.ones(BATCH, POS).long()
    for make in (
        kl_divergence,
        lambda x, **mask: kl_divergence(x, None, **mask),
        lambda x, **mask: cross_entropy(tokens, **mask),
    ):
        with pytest.raises(ValueError, match="attention_mask"):
            measure(make(logits), logits, LEFT.flip(1))
        measure(make(logits, attention_mask=LEFT), logits, LEFT)
        measure(make(logits), logits, torch.ones_like(LEFT))
    assert not measure(kl_divergence(logits, 3), logits, LEFT).any()


@pytest.mark.parametrize("wrong", [torch.tensor([[7, 1, 4], [1, 1, 0]]), torch.full((2, 3), 0.5)])
def test_tokens_are_not_a_mask(wrong):
    logits = torch.randn(2, 3, 5)
    for call in (functools.partial(measure, log_prob(3)), log_prob(3)):
        with pytest.raises(ValueError, match="attention_mask must be 1 .*, and 0 at padding"):
            call(logits, wrong)


def last_column(logits):
    return logits[:, -1, 2]


def mean_of_real(logits):
    return (logits[..., 2] * torch.tensor([[1, 1, 1], [1, 1, 0]])).sum(1)


def test_a_function_that_reads_logits_at_padding_is_refused():
    logits, mask = torch.randn(2, 3, 5), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match=r"set metric\.last = 1"):
        measure(last_column, logits, mask)
    torch.testing.assert_close(measure(last_column, logits), logits[:, -1, 2])
    torch.testing.assert_close(measure(last_column, logits, mask.flip(1)), logits[:, -1, 2])
    by_hand = torch.stack([logits[0, :, 2].sum(), logits[1, :2, 2].sum()])
    torch.testing.assert_close(measure(mean_of_real, logits, mask), by_hand)

    def told(logits):
        return logits[:, -1, 2]

    told.last = 1
    values = measure(told, logits, mask)
    torch.testing.assert_close(values, torch.stack([logits[0, 2, 2], logits[1, 1, 2]]))


def entropy(logits):
    log_probs = logits[:, -1].log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def margin(logits):
    first, second = logits[:, -1].topk(2).values.unbind(1)
    return first - second


@pytest.mark.parametrize(
    "metric", [entropy, margin, lambda x: x[:, -1].norm(dim=-1), lambda x: x.amax(-1).mean(1)]
)
def test_a_function_that_does_not_depend_on_the_order_of_tokens_is_refused_too(metric):
    logits, mask = torch.randn(2, 3, 5), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match="must not read the logits at padding"):
        measure(metric, logits, mask)


def test_a_cache_contains_the_mask_of_its_run():
    model = pydoc()
    texts = ["def __ini", "import"]
    logits, cache = HookedRunner(model).run_with_cache(texts, names="embed")
    alone = torch.cat([measure(log_prob(3), model(text)) for text in texts])
    torch.testing.assert_close(measure(log_prob(3), logits, cache), alone, rtol=0, atol=1e-4)
    _, cache = HookedRunner(model).run_with_cache(texts[:1], names="embed")
    assert measure(log_prob(3), logits[:1], cache).shape == (1,)


def padded_runs():
    """Return runs of padded texts, each as (logits, mask), by the kind of the model."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(1, VOCAB, (BATCH, POS), generator=generator)
    runs = {}
    for side, mask in {"left": LEFT, "right": LEFT.flip(1)}.items():
        own = Transformer(
            TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=2, n_heads=2, d_model=8)
        )
        runs[f"own, {side}"] = own(tokens, attention_mask=mask), mask
        gemma = tiny.redraw(tiny.model("Gemma2ForCausalLM"), 0.3)
        attached = attach(gemma)
        runs[f"attached, {side}"] = gemma(tokens, attention_mask=mask).logits, mask
        runs[f"view, {side}"] = PlainView(attached)(tokens, attention_mask=mask), mask
    decoder = LEFT.flip(1)
    t5 = tiny.redraw(tiny.model("T5ForConditionalGeneration", decoder_start_token_id=0), 0.3)
    attach(t5)
    given = dict(decoder_input_ids=tokens, decoder_attention_mask=decoder)
    output = t5(input_ids=tokens[:, :4], attention_mask=LEFT[:, :4].flip(1), **given)
    runs["encoder and decoder"] = output.logits, decoder
    return runs


def at_last_real(logits, mask, token):
    """Return the log probability of a token at the last real column of each text, by numpy."""
    rows = logits.detach().double().numpy()
    columns = [max(row.nonzero().flatten().tolist()) for row in mask]
    read = [row[column] for row, column in zip(rows, columns, strict=True)]
    return torch.tensor([by_numpy("log_prob", x, token, 0) for x in read], dtype=torch.float32)


def test_logits_of_a_run_contain_its_mask():
    pytest.importorskip("transformers", reason="needs the extra hf")
    for name, (logits, mask) in padded_runs().items():
        expected = at_last_real(logits, mask, 3)
        for given in (logits, logits.detach(), logits.float()):
            for call in (functools.partial(measure, log_prob(3)), log_prob(3)):
                assert torch.allclose(call(given), expected, atol=1e-5), name
        # Parts in the same memory have the mask of their texts and columns.
        assert torch.allclose(measure(log_prob(3), logits[1:]), expected[1:], atol=1e-5), name
        assert torch.allclose(measure(log_prob(3), logits[::2]), expected[::2], atol=1e-5), name
        part = at_last_real(logits[:, :4], mask[:, :4], 3)
        assert torch.allclose(measure(log_prob(3), logits[:, :4]), part, atol=1e-5), name
        if "right" in name:
            with pytest.raises(ValueError, match=r"set metric\.last = 1"):
                measure(last_column, logits)
        # A copy has no mask, and the mask of the caller comes first.
        assert torch.allclose(
            measure(log_prob(3), logits.clone()),
            at_last_real(logits, torch.ones_like(mask), 3),
            atol=1e-5,
        ), name
        other = mask.roll(1, 0)
        assert torch.allclose(
            measure(log_prob(3), logits, other), at_last_real(logits, other, 3), atol=1e-5
        ), name


def mean_nats(logits, tokens, mask):
    """Return the mean -log probability of the next real tokens of each text, by numpy."""
    means = []
    for rows, row, real in zip(logits.detach().double().numpy(), tokens, mask, strict=True):
        columns = [at for at in range(1, len(row)) if real[at] and real[at - 1]]
        nats = [-by_numpy("log_prob", rows[at - 1], int(row[at]), 0) for at in columns]
        means.append(np.mean(nats))
    return torch.tensor(means, dtype=torch.float32)


def test_metrics_of_whole_texts_take_the_mask_of_the_run():
    pytest.importorskip("transformers", reason="needs the extra hf")
    tokens = torch.randint(1, VOCAB, (BATCH, POS))
    for name, (logits, mask) in padded_runs().items():
        expected = mean_nats(logits, tokens, mask)
        metric = cross_entropy(tokens)
        for found in (metric(logits), measure(metric, logits), measure(metric, logits, mask)):
            assert torch.allclose(found, expected, atol=1e-5), name
        # The last prediction of a text is in another column of each text.
        last = measure(cross_entropy(tokens, pos=-2), logits)
        told = cross_entropy(tokens, pos=-2, attention_mask=mask)
        assert torch.equal(last, measure(told, logits)), name
        # A copy has no mask.
        unpadded = mean_nats(logits, tokens, torch.ones_like(mask))
        assert torch.allclose(measure(metric, logits.clone()), unpadded, atol=1e-5), name
        # Metrics of some rows, and from other processes, know only columns without a mask.
        some = cross_entropy(tokens, pos=-2).rows(torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match="attention_mask"):
            measure(some, logits)
        other = torch.randn_like(logits)
        for pos in (-1, None):
            found = kl_divergence(logits, pos)
            told = kl_divergence(logits.clone(), pos, attention_mask=mask)
            for wanted in (other, logits):
                assert torch.equal(measure(found, wanted, mask), measure(told, wanted, mask)), name
            with pytest.raises(ValueError, match="attention_mask"):
                measure(kl_divergence(logits.clone(), pos), other, mask)
    # A run without padding tells no mask of other texts.
    whole = Transformer(
        TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=1, n_heads=2, d_model=8)
    )(tokens, attention_mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match="attention_mask"):
        measure(kl_divergence(whole), torch.randn_like(whole), LEFT)


def test_the_mask_of_logits_is_the_mask_when_the_run_began():
    model = Transformer(
        TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=1, n_heads=2, d_model=8)
    )
    tokens = torch.randint(0, VOCAB, (BATCH, POS))
    mask = LEFT.flip(1).clone()
    logits = model(tokens, attention_mask=mask)
    mask[:] = 1
    expected = at_last_real(logits, LEFT.flip(1), 3)
    assert torch.allclose(measure(log_prob(3), logits), expected, atol=1e-5)


def test_logits_of_some_columns_contain_their_part_of_the_mask():
    pytest.importorskip("transformers", reason="needs the extra hf")
    tokens = torch.randint(1, VOCAB, (BATCH, POS))
    mask = LEFT.flip(1)
    model = tiny.redraw(tiny.model("LlamaForCausalLM"), 0.3)
    attach(model)
    whole = model(tokens, attention_mask=mask).logits
    expected = at_last_real(whole, mask, 3)
    some = model(tokens, attention_mask=mask, logits_to_keep=4).logits
    assert torch.allclose(measure(log_prob(3), some), expected, atol=1e-5)
    # The columns of a tensor are in any order, so these logits have no mask.
    chosen = model(tokens, attention_mask=mask, logits_to_keep=torch.tensor([1, 0])).logits
    assert torch.allclose(
        measure(log_prob(3), chosen), measure(log_prob(3), whole[:, :1].clone()), atol=1e-5
    )
    own = Transformer(
        TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=1, n_heads=2, d_model=8)
    )
    expected = at_last_real(own(tokens, attention_mask=mask), mask, 3)
    some = own(tokens, attention_mask=mask, last=4)
    assert torch.allclose(measure(log_prob(3), some), expected, atol=1e-5)
    cache = KVCache()
    own(tokens[:, :2], attention_mask=mask[:, :2], kv_cache=cache)
    later = own(tokens[:, 2:], attention_mask=mask, kv_cache=cache)
    assert torch.allclose(measure(log_prob(3), later), expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_logits_of_only_the_last_columns_are_real_in_every_text(count):
    """A text that ends in an earlier column has no logits there."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    tokens = torch.randint(1, VOCAB, (BATCH, POS))
    model = tiny.redraw(tiny.model("LlamaForCausalLM"), 0.3)
    alone = [model(row[None, 2:]).logits[:, -1] for row in tokens]
    expected = torch.cat(alone).log_softmax(-1)[:, 3]
    attach(model)
    own = Transformer(
        TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=1, n_heads=2, d_model=8)
    )
    left = torch.ones(BATCH, POS, dtype=torch.long)
    left[:, :2] = 0
    right = left.flip(1)
    right[1:] = 1
    kept = model(tokens, attention_mask=left, logits_to_keep=count).logits
    for mask in (None, left) if count == 1 else (None,):
        assert torch.allclose(measure(log_prob(3), kept, mask), expected, atol=1e-5)
        assert torch.allclose(log_prob(3)(kept, mask), expected, atol=1e-5)
    wrong = {
        "transformers": model(tokens, attention_mask=right, logits_to_keep=count).logits,
        "a slice": model(tokens, attention_mask=right).logits[:, -count:],
        "last=": own(tokens, attention_mask=right, last=count),
    }
    for logits in wrong.values():
        for metric in (log_prob(3), rank(3), accuracy(3), logit_diff(3, 4), last_column):
            with pytest.raises(ValueError, match="padding in text 0"):
                measure(metric, logits)
        with pytest.raises(ValueError, match="padding in text 0"):
            log_prob(3)(logits)
    if count == 1:
        # A mask that the caller gives is the mask of all columns of the texts.
        for logits in wrong.values():
            with pytest.raises(ValueError, match="padding in text 0"):
                measure(log_prob(3), logits.clone(), right)
        assert torch.allclose(
            measure(log_prob(3), wrong["a slice"][1:]),
            model(tokens[1:]).logits[:, -1].log_softmax(-1)[:, 3],
            atol=1e-5,
        )


def test_an_analysis_with_logits_of_one_column_reads_no_padding():
    pytest.importorskip("transformers", reason="needs the extra hf")
    tokens = torch.randint(1, VOCAB, (2, POS))
    mask = torch.ones_like(tokens)
    mask[0, 3:] = 0
    model = tiny.redraw(tiny.model("LlamaForCausalLM"), 0.3)
    attach(model)
    text = {"input_ids": tokens, "attention_mask": mask, "logits_to_keep": 1}
    with pytest.raises(ValueError, match="padding in text 0"):
        Pairs(text, answers=[(3, 4), (5, 6)]).solved(model)


def test_logits_of_a_circuit_contain_the_mask_of_its_texts():
    model = pydoc()
    pairs = Pairs(["def __ini", "import"], ["def __ini", "export"])
    logits = run_circuit(model, pairs, circuit=[])
    mask = pairs.read_by(model).text.attention_mask
    assert torch.allclose(measure(log_prob(3), logits), at_last_real(logits, mask, 3), atol=1e-5)


def test_the_loss_of_padded_texts_takes_the_mask_of_their_run():
    model = Transformer(
        TransformerConfig(vocab_size=VOCAB, n_ctx=7, n_layers=1, n_heads=2, d_model=8)
    )
    tokens = torch.randint(0, VOCAB, (BATCH, POS))
    mask = LEFT.flip(1)
    logits = model(tokens, attention_mask=mask)
    expected = next_token_loss(logits.clone(), tokens, mask)
    assert expected.isnan().any()
    torch.testing.assert_close(next_token_loss(logits, tokens), expected, equal_nan=True)


@pytest.mark.parametrize(
    "analysis", ["activation_patching", "align", "attribution_patching", "sweep"]
)
def test_analyses_refuse_a_function_that_reads_logits_at_padding(analysis):
    model = pydoc()
    texts = ["def __ini", "import"]
    pairs = Pairs(texts, texts, metric=last_column)
    tokens = torch.tensor([[3, 4], [5, 6]])
    read = Pairs(texts, texts).read_by(model)
    given = dict(attention_mask=read.text.attention_mask, metric=last_column)
    answered = Pairs(read.clean, read.clean.roll(1, 1), tokens, **given)
    fresh = Pairs(read.clean.roll(2, 1), read.clean, tokens, **given)
    calls = {
        "align": lambda: align(
            model, answered, "blocks.1.resid_post", k=1, test=fresh, epochs=1, progress=False
        ),
        "activation_patching": lambda: activation_patching(model, pairs, "resid_post", ("layer",)),
        "attribution_patching": lambda: attribution_patching(model, pairs, "z"),
        "sweep": lambda: sweep(model, texts, [{"blocks.1.mlp_out": edits.zero()}], last_column),
    }
    with pytest.raises(ValueError, match=r"set metric\.last = 1"):
        calls[analysis]()


def test_a_metric_prints_as_its_call():
    assert repr(logit_diff(3, [1, 2])) == "logit_diff(3, [1, 2], pos=-1)"
    assert len(repr(log_prob(torch.arange(1000)))) < 60


def test_a_metric_prints_the_texts_of_its_tokens():
    model = pydoc()
    for call, printed in (
        (rank(["t", "s"]), "rank(['t', 's'])"),
        (rank(["t", "t"], pos=1), "rank('t', pos=1)"),
        (logit_diff("t", "s", pos=[2, 1]), "logit_diff('t', 's', pos=[2, 1])"),
    ):
        assert repr(call.read_alone(model)) == printed


def test_texts_are_read_like_answers_only_at_the_last_position():
    assert log_prob("t").is_at_last
    assert log_prob("t").answers == "t"
    for other in (log_prob("t", pos=-2), log_prob("t", pos=3)):
        assert not other.is_at_last
        assert other.answers is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x: log_prob(-1), "-1"),
        (lambda x: log_prob([[1, 2]]), r"\[1, 2\]"),
        (lambda x: log_prob(1, pos=[-1, 0, 2]), "negative"),
        (lambda x: log_prob(VOCAB)(x), r"11\); got 11"),
        (lambda x: log_prob([1, 2])(x), "3 examples.*got 2"),
        (lambda x: log_prob(1, pos=[-1, -2])(x), "3 examples.*got 2"),
        (lambda x: log_prob(1, pos=5)(x), "got 5"),
        (lambda x: measure(log_prob(1, pos=1), x, LEFT), "example 0.*padding at column 1"),
        (lambda x: measure(log_prob(1, pos=[4, 0, 0]), x, LEFT), "example 2.*padding at column 0"),
        (lambda x: measure(lambda y: None, x), "got None"),
        (lambda x: log_prob(1, pos=-6)(x), "got -6"),
        (lambda x: cross_entropy(torch.ones(BATCH, 1).long()), "example 0"),
        (lambda x: cross_entropy(torch.ones(BATCH, 4).long())(x), r"\(3, 4\)"),
        (lambda x: cross_entropy(torch.ones(BATCH, 4).long(), pos=-1), "example 0 at pos=-1"),
        (lambda x: cross_entropy(torch.ones(BATCH, 4).long(), pos=4), "got 4"),
        (lambda x: cross_entropy(torch.ones(BATCH, 4).long(), pos=[0, 1]), "3 examples.*got 2"),
        (lambda x: cross_entropy(TOKENS, 1, attention_mask=LEFT), "padding at column 1"),
        (
            lambda x: cross_entropy(torch.ones(BATCH, POS).long(), attention_mask=LEFT[:2]),
            r"\[2, 5\]",
        ),
        (lambda x: kl_divergence(x[:1])(x), "reference"),
        (lambda x: logit_diff(4, 4), r"different tokens; got \[4\] for both: "),
        (lambda x: logit_diff([4, 1, 9], 1), r"got \[1\] for both in example 1"),
        (lambda x: logit_diff([[4, 1], [9, 2]], [[3, 1], [2, 9]]), r"got \[2, 9\] for both in ex"),
        (lambda x: measure(log_prob(1, pos=-4), x, LEFT), "example 0 must be from -3 on.*got -4"),
        (lambda x: measure(log_prob(1), x, LEFT[:, :4]), r"\[3, 4\]"),
        (lambda x: measure(lambda y: y[:, -1], x), r"\[3\].*\[3, 11\]"),
        (lambda x: measure(lambda y: y[:, -1, 1].mean(), x), r"\[\]"),
        (lambda x: measure(lambda y: y[:, -1, 1].sub(9).log(), x), "NaN for example 0"),
        (lambda x: measure(rank(3), x * torch.nan), "NaN"),
        (lambda x: measure(accuracy(3), x * torch.nan), "NaN"),
        (lambda x: measure(kl_divergence(x * torch.nan), x), "NaN"),
    ],
)
def test_metrics_that_make_no_sense(logits, make, match):
    with pytest.raises(ValueError, match=match):
        make(logits)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: measure("logit_diff", x),
        lambda x: log_prob(2.5),
        lambda x: log_prob(3, pos=True),
        lambda x: log_prob(3, pos=slice(2)),
        lambda x: log_prob(3, pos=[True, False, True]),
    ],
)
def test_wrong_metrics_and_positions_are_errors(logits, make):
    with pytest.raises(TypeError):
        make(logits)


REFERENCE = torch.randn(BATCH, POS, VOCAB, dtype=torch.float64)


@pytest.mark.parametrize(
    "metric",
    [
        logit_diff([4, 1, 9], torch.tensor([3, 0, 10]), pos=[-2, -1, -3]),
        logit_diff(torch.tensor([[4, 1], [9, 2], [0, 7]]), 6),
        log_prob([1, 8, 5], pos=2),
        accuracy([1, 8, 5]),
        rank(3, pos=torch.tensor([4, 0, 1])),
        cross_entropy(torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 10]])),
        kl_divergence(REFERENCE),
        kl_divergence(REFERENCE, pos=None, attention_mask=LEFT),
    ],
    ids=repr,
)
def test_a_metric_of_some_examples_is_a_part_of_the_metric(logits, metric):
    numbers = torch.tensor([2, 0])
    expected = metric(logits)[numbers]
    part = metric.rows(numbers)
    assert torch.equal(part(logits[numbers]), expected)
    # Another process gets a copy.
    copied = pickle.loads(pickle.dumps(part))
    assert torch.equal(copied(logits[numbers]), expected)
    assert (copied.last, copied.unit, copied.unmasked) == (part.last, part.unit, part.unmasked)


def test_a_metric_in_words_can_be_sent_to_another_process(logits):
    metric = pickle.loads(pickle.dumps(log_prob(["t", "s", "c"], pos=-2)))
    model = pydoc()
    expected = log_prob([model.to_id(word) for word in "tsc"], pos=-2)
    wide = torch.randn(BATCH, POS, model.config.vocab_size)
    assert torch.equal(metric.read(model)(wide), expected(wide))


class Token:
    def __call__(self, logits):
        return logits[:, -1, 5]


def times(factor, logits):
    return factor * logits[:, -1, 5]


def token(logits):
    return logits[:, -1, 5]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (token, "token"),
        (functools.partial(times, 2), "functools.partial(<function times>, 2)"),
        (Token(), f"<{__name__}.Token object>"),
    ],
    ids=["function", "partial", "class"],
)
def test_a_metric_without_a_unit_is_named_by_the_result(metric, name):
    """The name contains no address, so it is the same in another process."""
    result = activation_patching(pydoc(), Pairs("if x in", "if x is", metric=metric), "resid_post")
    assert result.about["metric"] == name
    assert result.unit == f"values of {name}"
    assert f"in values of {name}" in repr(result).splitlines()[0]


@pytest.mark.parametrize(
    ("pos", "shown"), [([2, 5], "[2, 5]"), (torch.tensor([2, 5]), "[2, 5]"), (torch.tensor(4), "4")]
)
def test_a_metric_with_positions_is_written_in_words(pos, shown):
    model = load("pydoc-4l")
    pairs = Pairs(["return", "import"], metric=log_prob([3, 4], pos=pos)).read_by(model)
    words = [model.to_text([token]) for token in (3, 4)]
    assert repr(pairs.metric) == f"log_prob({words}, pos={shown})"


@pytest.mark.parametrize("pos", [-1, torch.tensor(-1)])
def test_the_last_position_is_left_out_of_the_words(pos):
    model = load("pydoc-4l")
    pairs = Pairs("return", metric=log_prob(3, pos=pos)).read_by(model)
    assert repr(pairs.metric) == f"log_prob({model.to_text([3])!r})"


@pytest.mark.parametrize("first", [log_prob(3), log_prob("t")])
def test_the_error_of_a_sum_of_metrics_says_what_to_write(first):
    operations = [
        lambda: first + log_prob("e"),
        lambda: sum([first]),
        lambda: first - log_prob("e"),
        lambda: 1 - first,
        lambda: first * 2,
        lambda: 2 * first,
        lambda: first / 2,
        lambda: -first,
    ]
    for operation in operations:
        with pytest.raises(TypeError, match="lambda logits: measure"):
            operation()


def test_a_sum_of_metrics_as_the_error_writes_it():
    model = load("pydoc-4l")

    def both(logits):
        first, second = log_prob("t"), log_prob("e")
        return measure(first, logits, model=model) + measure(second, logits, model=model)

    both.last = 1
    texts = ["def __ini", "def f(x): return x.__ini"]
    others = ["def __nam", "def g(y): return y.__nam"]

    def base(metric):
        return activation_patching(model, Pairs(texts, others, metric=metric), "z", layers=0).base

    alone = [base(log_prob(token)) for token in ("t", "e")]
    torch.testing.assert_close(base(both), alone[0] + alone[1])
