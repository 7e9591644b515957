"""Attention scores as sums over pairs of sources.

They are compared with products in float64, with planted weights, with padding and in half
precision.
"""

import dataclasses

import numpy as np
import pytest
import torch

from hooks import CacheError, HookedRunner, SelectionError
from interp import attention_attribution, decompose, edits
from models import Transformer, TransformerConfig, attach
from tests.attachable import made
from tests.decoders import FOREIGN, KINDS, KNOWN
from tests.interp.attending import model_of

# Their logits are NaN after padding, or an operation does not accept float64.
NOT_IN_FLOAT64 = ("olmoe", "gpt_oss", "xglm", "bloom", "mpt", "gemma2")
TEXT = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 0, 3, 3]])


def cached(model, text=TEXT, **more):
    return HookedRunner(model).run_with_cache(text, lazy=True, **more)[1]


def rotated(x, position):
    """Return x after the rotation of a position, in numpy.

    The four dimensions are two halves, and the angles are position / 10000^(2i / 4). The model has
    the angles in float32.
    """
    angles = position / 10000.0 ** (np.arange(0, 4, 2) / 4)
    first, second = x[..., :2], x[..., 2:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def by_hand(model, cache, side, head, example, pos):
    """Return the contributions of each component and of all constants to a query or a key, by hand.

    It is the query or key of one head at one position, in a model with RMSNorm and rotary
    positions.
    """
    attn, norm = model.blocks[1].attn, model.blocks[1].ln1
    letter = side.upper()
    head = head if side == "q" else head // 2
    weight, bias = (getattr(attn, f"{kind}_{letter}")[head].detach().numpy() for kind in "Wb")
    parts = decompose(model, cache, before=1).values[:, example, pos].detach().numpy()
    total = parts.sum(0)
    scale = np.sqrt((total**2).mean() + norm.eps)
    made = np.concatenate([parts / scale * norm.weight.detach().numpy() @ weight, bias[None]])
    qk = getattr(attn, f"{side}_norm")
    if hasattr(qk, "eps"):
        made = made / np.sqrt((made.sum(0) ** 2).mean() + qk.eps) * qk.weight.detach().numpy()
    return rotated(made, pos)


@pytest.mark.parametrize("form", ["grouped", "norm of each head"])
def test_pairs_are_the_products_written_out(form):
    model = model_of(form)
    cache = cached(model)
    head, queries, key, other = 3, [4, 3], 2, 0
    result = attention_attribution(
        model, cache, (1, head), query=queries, key=key, against=other, k=10**6
    )
    names = ["bias", *decompose(model, cache, before=1).names]
    labels = result.labels["query_source"], result.labels["key_source"]
    assert [set(each) - {"rest"} for each in labels] == [set(names)] * 2
    for example, query in enumerate(queries):
        q = by_hand(model, cache, "q", head, example, query)
        k = by_hand(model, cache, "k", head, example, key) - by_hand(
            model, cache, "k", head, example, other
        )
        expected = model.blocks[1].attn.scale * q @ k.T
        named = [*decompose(model, cache, before=1).names, "bias"]
        for i, one in enumerate(labels[0][:-1]):
            for j, two in enumerate(labels[1][:-1]):
                ours = float(result.values[i, j, example])
                by_part = expected[named.index(one), named.index(two)]
                assert ours == pytest.approx(by_part, abs=1e-7)
        scores = cache["scores", 1][example, head, query]
        assert float(result.values[..., example].sum()) == pytest.approx(
            float(scores[key] - scores[other])
        )
    assert result.unit == "score"
    assert result.about["head"] == "a1.h3"


@pytest.mark.parametrize("form", ["plain", "norm of each head", "cap and window", "both ways"])
@pytest.mark.parametrize("against", [None, 1, "mean"])
def test_pairs_add_up_and_the_rest_is_said(form, against):
    model = model_of(form)
    cache = cached(model)
    whole, few = (
        attention_attribution(model, cache, (1, 5), -1, 3, against, k=k) for k in (10**6, 3)
    )
    pattern, scores = cache["pattern", 1][:, 5, -1], cache["scores", 1][:, 5, -1]
    base = {None: 0, 1: scores[:, 1], "mean": (pattern * scores).sum(-1)}[against]
    for result in (whole, few):
        torch.testing.assert_close(
            result.values.sum((0, 1)), (scores[:, 3] - base).detach(), rtol=1e-9, atol=1e-9
        )
        assert result.about["score"] == pytest.approx(float((scores[:, 3] - base).mean()), rel=1e-5)
        sizes = whole.values.abs().sum((0, 1)).mean()
        assert result.about["summed sizes of all pairs"] == pytest.approx(float(sizes), rel=1e-5)
    # The three largest pairs are shown. The other contributions of each side are its rest.
    order = whole.values.abs().mean(-1).flatten().argsort(descending=True)[:3].tolist()
    width = whole.values.shape[1]
    for place in order:
        one, two = (
            whole.labels[axis][n]
            for axis, n in zip(("query_source", "key_source"), divmod(place, width), strict=True)
        )
        shown = few.select(query_source=one, key_source=two).values
        torch.testing.assert_close(shown, whole.values[place // width, place % width])
    for axis in ("query_source", "key_source"):
        assert len(few.labels[axis]) <= 4
        assert few.labels[axis][-1] == "rest"
    rest = few.select(query_source="rest").values.sum(0)
    known = [whole.labels["query_source"].index(name) for name in few.labels["query_source"][:-1]]
    torch.testing.assert_close(rest, whole.values.sum((0, 1)) - whole.values[known].sum((0, 1)))


def test_pairs_that_are_looked_at_in_blocks_are_the_same(monkeypatch):
    model = model_of("grouped")
    whole = attention_attribution(model, cached(model), (1, 5), -1, 3, k=4)
    monkeypatch.setattr("interp.reading.attending._BLOCK", 1)
    blocks = attention_attribution(model, cached(model), (1, 5), -1, 3, k=4)
    assert blocks.labels == whole.labels
    assert blocks.about == whole.about
    torch.testing.assert_close(blocks.values, whole.values, rtol=0, atol=0)


def test_the_default_key_has_the_most_attention():
    model = model_of("plain")
    cache = cached(model)
    looked = cache["pattern", 1][:, 2, 3].argmax(-1).tolist()
    result = attention_attribution(model, cache, (1, 2), query=-2)
    expected = [cache["scores", 1][n, 2, 3, key].item() for n, key in enumerate(looked)]
    assert result.values.sum((0, 1)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_number(side):
    model = model_of("norm of each head")
    alone = [
        attention_attribution(model, cached(model, row[None]), (1, 4), -1, -3, -4)
        for row in (TEXT[0, :4], TEXT[1])
    ]
    padded, mask = TEXT.clone(), torch.ones_like(TEXT)
    columns = slice(1, None) if side == "left" else slice(None, 4)
    padded[0, columns], mask[0, 0 if side == "left" else -1] = TEXT[0, :4], 0
    both = attention_attribution(
        model, cached(model, padded, attention_mask=mask), (1, 4), -1, -3, -4, k=10**6
    )
    for n, one in enumerate(alone):
        for name_q in one.labels["query_source"][:-1]:
            for name_k in one.labels["key_source"][:-1]:
                ours = both.select(query_source=name_q, key_source=name_k).values[n]
                theirs = one.select(query_source=name_q, key_source=name_k).values[0]
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    with pytest.raises(SelectionError):
        attention_attribution(model, cached(model, padded, attention_mask=mask), (1, 4), -5)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("kind", [*KINDS, *KNOWN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_attached_models_with_padding(kind, dtype, monkeypatch):
    if kind in FOREIGN:
        monkeypatch.setattr("models.attached.attached.FAMILIES", {})
    if dtype is torch.bfloat16 and kind in ("olmoe", "gpt_oss"):
        pytest.skip("grouped products in half precision need other sizes than these tiny ones")
    if dtype is torch.float64 and kind in NOT_IN_FLOAT64:
        pytest.skip("the library does not run this model in float64 with padding on the left")
    model = made(kind).to(dtype)
    attach(model)
    texts = torch.tensor([[0, 0, 3, 1, 4, 1], [3, 1, 4, 1, 5, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    cache = cached(model, texts, attention_mask=mask)
    result = attention_attribution(model, cache, (1, 1), -1, -2, -3)
    scores = cache["scores", 1][:, 1, -1].to(result.values.dtype).detach()
    tolerance = (0.02 if dtype is torch.bfloat16 else 1e-5) * result.values.abs().sum((0, 1)).max()
    expected = scores[:, -2] - scores[:, -3]
    torch.testing.assert_close(result.values.sum((0, 1)), expected, rtol=0, atol=float(tolerance))


def test_a_planted_pair_is_the_whole_reason():
    """A head of block 0 attends to one token, and writes a vector.

    A head of block 1 attends to this vector, but only if the query comes from a certain token.
    """
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 7,
        "n_ctx": 11,
        "n_layers": 2,
        "n_heads": 2,
        "d_head": 3,
        "d_model": 8,
        "d_mlp": 5,
    }
    choices = {"norm": "none", "final_norm": False, "positions": "none", "qkv_bias": False}
    model = Transformer(TransformerConfig(**sizes, **choices)).double().eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.001)
    model.token_embedding.weight.data[3, 0] = model.token_embedding.weight.data[5, 1] = 2.0
    first, second = (block.attn for block in model.blocks)
    first.W_V.data[1, 1, 0] = first.W_O.data[1, 0, 4] = 3.0
    second.W_Q.data[0, 0, 2] = second.W_K.data[0, 4, 2] = 2.0
    result = attention_attribution(
        model, cached(model, torch.tensor([[6, 5, 2, 3]])), (1, 0), key=1
    )
    best = result.top(1)[0]
    assert best.where == {"query_source": "embed", "key_source": "a0.h1"}
    assert best.effect == pytest.approx(result.about["score"], rel=0.02)


def test_half_precision_is_within_its_rounding():
    model = model_of("grouped").float()
    whole = attention_attribution(model, cached(model), (1, 1), -1, 2, 0, k=10**6)
    half = attention_attribution(model.bfloat16(), cached(model), (1, 1), -1, 2, 0, k=10**6)
    named = dict(zip(("query_source", "key_source"), ("embed", "embed"), strict=True))
    size = whole.values.abs().max()
    assert (half.select(**named).values - whole.select(**named).values).abs().max() < 0.05 * size


def test_scores_that_cannot_be_explained_are_errors():
    model = model_of("plain")
    cache = cached(model)
    for head in ((2, 0), (-1, 0), (1, 6)):
        with pytest.raises(ValueError, match=r"2 layers with 6 heads; got \("):
            attention_attribution(model, cache, head)
    with pytest.raises(ValueError, match="k must be .*1; got 0"):
        attention_attribution(model, cache, (1, 0), k=0)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference mode"):
        attention_attribution(model, cache, (1, 0))
    with pytest.raises(SelectionError):
        attention_attribution(model, cache, (1, 0), query=5)
    with pytest.raises(ValueError, match="against must .*got 'first'"):
        attention_attribution(model, cache, (1, 0), against="first")
    for point in ("q", "k", "v", "pattern"):
        with HookedRunner(model).hooks({f"blocks.1.attn.{point}": edits.scale(2.0)}):
            edited = HookedRunner(model).run_with_cache(TEXT)[1]
        with pytest.raises(CacheError, match=r"head \(1, 0\) must have the same output in the run"):
            attention_attribution(model, edited, (1, 0))
    hooks = {"blocks.0.mlp_out": edits.scale(1.5, pos=2)}
    with HookedRunner(model).hooks({"blocks.1.resid_pre": edits.scale(2.0)}):
        edited = HookedRunner(model).run_with_cache(TEXT)[1]
    # An edit between two blocks changes the stream. The attribution lists this change as a source
    # of its own.
    assert "input1" in attention_attribution(model, edited, (1, 0)).labels["key_source"]
    chosen = torch.tensor([-1, 3]), torch.tensor([[2], [0]])[:, 0]
    lists = ([-1, 3], [2, 0])
    one, other = (attention_attribution(model, cache, (1, 4), *each) for each in (chosen, lists))
    torch.testing.assert_close(one.values, other.values)
    # If an edit changes the output of a component, the edited output is its contribution.
    with HookedRunner(model).hooks(hooks):
        attention_attribution(model, HookedRunner(model).run_with_cache(TEXT)[1], (1, 0), query=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["grouped", "cap and window"])
@pytest.mark.parametrize("where", ["one text", "no keys", "constant keys", "one key"])
@pytest.mark.parametrize("against", ["mean", 1])
def test_pairs_of_equal_scores_cancel(form, dtype, where, against):
    """All keys are equal, so the difference of two scores is only rounding. The pairs cancel, and
    the analysis must not raise an error.
    """
    model = model_of(form)
    sizes = dataclasses.replace(model.config, positions="none")
    same = Transformer(sizes).eval()
    same.load_state_dict(model.state_dict(), strict=False)
    if where in ("no keys", "constant keys"):
        for block in same.blocks:
            block.attn.W_K.data.zero_()
            block.attn.b_K.data.mul_(where == "constant keys")
    text = torch.tensor([[4, 4, 4, 4, 4]]) if where == "one text" else TEXT
    query, key = (0, 0) if where == "one key" else (-1, 3)
    against = 0 if where == "one key" and against == 1 else against
    cache = cached(same.to(dtype), text)
    result = attention_attribution(same, cache, (1, 2), query, key, against, k=10**6)
    sizes = attention_attribution(same, cache, (1, 2), query, key, k=10**6).values.abs().sum((0, 1))
    eps = 1e-30 + sizes * torch.finfo(dtype).eps
    assert (result.values.abs().sum((0, 1)) <= 1000 * eps).all()


def test_pairs_of_an_edited_run_are_refused_against_the_mean_too():
    model = model_of("grouped")
    hooks = {"blocks.1.attn.k": edits.scale(1.5, pos=2)}
    with HookedRunner(model).hooks(hooks):
        cache = cached(model)
    for against in (None, 2, "mean"):
        with pytest.raises(CacheError):
            attention_attribution(model, cache, (1, 5), -1, 3, against)
