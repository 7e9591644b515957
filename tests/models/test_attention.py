"""Attention compared with loops in numpy and float64: the function, the module, masks and
points.
"""

import math
import re

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from models import Transformer, TransformerConfig, causal_mask, scaled_dot_product_attention
from tests.reference import (
    BATCH,
    FORMS,
    HEADS,
    POS,
    SIZES,
    VARIANTS,
    Reference,
    masked,
    randomised,
    some_tokens,
    tolerance,
    variant,
)

QUERY, KEY, D_K, D_V = 7, 11, 2, 13
# A hook that only reads `scores` and `scale`. With it, all attention and all norms use the explicit
# computation instead of fused kernels.
EXPLICIT = {"*.sc*": lambda value, point: None}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, torch.as_tensor(theirs), atol=atol, rtol=0)


# --- the function


def loops(q, k, v, mask=None):
    """Return attention of numpy arrays, computed one query and one key at a time."""
    axes = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (np.broadcast_to(part, (*axes, *part.shape[-2:])) for part in (q, k, v))
    query, key = q.shape[-2], k.shape[-2]
    if mask is None:
        mask = np.zeros((query, key))
    if mask.dtype == bool:
        mask = np.where(mask, 0.0, -np.inf)
    mask = np.broadcast_to(mask, (*axes, query, key))
    out = np.zeros((*axes, query, v.shape[-1]))
    for at in np.ndindex(*axes, query):
        lead = at[:-1]
        scores = [
            sum(q[*at, d] * k[*lead, j, d] for d in range(q.shape[-1])) / math.sqrt(q.shape[-1])
            + mask[*at, j]
            for j in range(key)
        ]
        largest = max(scores)
        if largest > -np.inf:
            weights = [math.exp(score - largest) for score in scores]
            out[at] = sum(w / sum(weights) * v[*lead, j] for j, w in enumerate(weights))
    return out


@pytest.mark.parametrize(
    "axes",
    [
        ((), (), ()),
        ((5,), (5,), (5,)),
        ((5, 3), (5, 3), (5, 3)),
        ((5, 3), (5, 1), (1, 3)),
        ((5, 3), (3,), ()),
        ((), (5, 1), (3,)),
    ],
)
def test_function_over_any_leading_axes(axes):
    q, k, v = (
        draw(*lead, *last, seed=n)
        for n, (lead, last) in enumerate(
            zip(axes, ((QUERY, D_K), (KEY, D_K), (KEY, D_V)), strict=True)
        )
    )
    ours = scaled_dot_product_attention(q, k, v)
    close(ours, loops(q.numpy(), k.numpy(), v.numpy()))
    assert ours.shape[-2:] == (QUERY, D_V)


MASKS = [
    (QUERY, KEY),
    (QUERY, 1),
    (1, 3, QUERY, KEY),
    (5, 3, QUERY, KEY),
    (5, 1, 1, KEY),
    (1, 1, QUERY, KEY),
]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_function_with_masks(shape, kind):
    q, k, v = draw(5, 3, QUERY, D_K), draw(5, 3, KEY, D_K, seed=1), draw(5, 3, KEY, D_V, seed=2)
    noise = draw(*shape, seed=3)
    mask = noise > 0.4
    assert mask.any()
    assert not mask.all()
    if kind == "float":
        mask = torch.where(mask, 2 * noise, -torch.inf)
    ours = scaled_dot_product_attention(q, k, v, mask)
    close(ours, loops(q.numpy(), k.numpy(), v.numpy(), mask.numpy()))
    assert not torch.allclose(ours, scaled_dot_product_attention(q, k, v))


def test_a_causal_mask_is_true_up_to_the_query():
    assert causal_mask(3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert causal_mask(2, "meta").device.type == "meta"


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_a_query_without_keys_gets_zeros_and_finite_gradients(kind):
    q, k, v = (
        draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(((4, 2), (5, 2), (5, 3)))
    )
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1], mask[3, 2:] = False, False
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf).double()
    out = scaled_dot_product_attention(q, k, v, mask)
    assert out[1].tolist() == [0, 0, 0]
    assert out[[0, 2, 3]].all()
    out.square().sum().backward()
    assert all(part.grad.isfinite().all() for part in (q, k, v))
    assert q.grad[1].tolist() == [0, 0]
    assert q.grad[[0, 2, 3]].all()


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_are_stable(size, dtype):
    q = torch.tensor([[size * math.sqrt(2), 0], [0, size * math.sqrt(2)]], dtype=dtype)
    k = torch.tensor([[1.0, 1.0], [0.5, 1.0], [1.0, 0.5]], dtype=dtype)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 5.0]], dtype=dtype, requires_grad=True)
    out = scaled_dot_product_attention(q, k, v)
    # Scores differ by 5000, so all weight is on the largest score. Two equal scores share it.
    expected = [[2.5, 2.5], [0.5, 0.5]] if size > 0 else [[0.0, 1.0], [4.0, 5.0]]
    assert out.tolist() == expected
    assert out.dtype == dtype
    out.sum().backward()
    assert v.grad.sum(1).tolist() == ([2.0, 1.0, 1.0] if size > 0 else [0.0, 2.0, 2.0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mask", "match"),
    [
        *(
            (torch.ones(shape).bool(), re.escape(str(shape)))
            for shape in ((KEY,), (QUERY, 5), (5, KEY), (2, 3, QUERY, KEY), (3, 3, 1, QUERY, KEY))
        ),
        (torch.ones(3, QUERY, KEY).bool(), "3, 7, 11"),  # the axis of 3 could be rows or heads
        *(
            (torch.ones(QUERY, KEY, dtype=dtype), str(dtype))
            for dtype in (torch.int64, torch.uint8)
        ),
    ],
)
def test_masks_that_are_refused(mask, match):
    """A mask of integers is refused.

    If 0 and 1 were added to the scores, no key would be hidden.
    """
    q, k, v = draw(3, 3, QUERY, D_K), draw(3, 3, KEY, D_K), draw(3, 3, KEY, D_V)
    with pytest.raises(ValueError, match=match):
        scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_float_mask_may_be_of_another_precision(dtype):
    q, mask = draw(3, D_K).to(dtype), torch.where(causal_mask(3), 0.0, -torch.inf)
    ours = scaled_dot_product_attention(q, q, q, mask.to(torch.float64))
    assert ours.dtype == dtype
    assert torch.equal(ours, scaled_dot_product_attention(q, q, q, causal_mask(3)))


@pytest.mark.parametrize("mask", ["none", "causal", "holes", "float"])
def test_gradients_of_the_function(mask):
    leaves = [
        draw(*shape, seed=n).requires_grad_()
        for n, shape in enumerate(((2, 3, 2), (2, 5, 2), (2, 5, 3)))
    ]
    masks = {
        "none": None,
        "causal": torch.ones(3, 5, dtype=torch.bool).tril(2),
        "holes": draw(2, 3, 5, seed=4) > 0.8,
        "float": draw(3, 5, seed=5),
    }
    if mask == "holes":
        assert (~masks[mask].any(-1)).any()
    torch.autograd.gradcheck(lambda *qkv: scaled_dot_product_attention(*qkv, masks[mask]), leaves)


# --- attention in a model, and every point, compared with tests.reference


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_point_matches_the_reference(name):
    model, tokens = variant(name), some_tokens()
    reference = Reference(model)
    expected = reference(tokens)
    atol = tolerance(model.config)
    with torch.no_grad():
        # Without hooks, the model uses the fused kernels.
        close(model(tokens), expected, atol)
        logits, cache = HookedRunner(model).run_with_cache(tokens)
    close(logits, expected, atol)
    assert set(cache) == set(reference.values)
    for point, value in reference.values.items():
        close(cache[point], value, atol)
        assert value.std() > 1e-3, point  # the values vary, so the comparison means something


@pytest.mark.parametrize("cap", [0.0, 0.3])
def test_recorded_scores_are_not_masked(cap):
    """Attention may write the mask into scores that nobody records, also after the cap."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, n_ctx=7, n_layers=1, n_heads=2, d_model=10, d_mlp=13)
    model = Transformer(TransformerConfig(**sizes, attn_cap=cap)).eval().requires_grad_(False)
    tokens = torch.randint(11, (3, 5))
    names = ["blocks.0.attn.q", "blocks.0.attn.k", "blocks.0.attn.pattern"]
    for recorded in ("scores", "cap"):
        name = f"blocks.0.attn.{recorded}"
        _, cache = HookedRunner(model).run_with_cache(tokens, names=[*names, name])
        q, k = (cache[part].double().transpose(1, 2) for part in names[:2])
        scores = q @ k.mT / math.sqrt(5)
        if cap and recorded == "cap":
            scores = cap * torch.tanh(scores / cap)
        close(cache[name].double(), scores, atol=1e-6)


def padding():
    """Return a mask of texts: padded on the left, on the right, with holes, and two without
    padding.
    """
    mask = torch.ones(BATCH, POS, dtype=torch.bool)
    mask[0, :3], mask[1, 5:], mask[2, [1, 4]] = False, False, False
    return mask


def holes(*shape):
    """Return a random mask, in which the last query of the first row sees no key."""
    mask = draw(*shape, seed=9) > 0
    mask[0, ..., -1, :] = False
    return mask


GIVEN_MASKS = {
    "none": None,
    "padding": padding(),
    "3-D": holes(BATCH, POS, POS),
    "4-D": holes(BATCH, HEADS, POS, POS),
    "one for all rows": draw(1, POS, POS, seed=8) > 0,
    "one for all heads": draw(BATCH, 1, POS, POS, seed=7) > 0,
    "one for all queries": draw(BATCH, 1, POS, seed=6) > -0.5,
    "one for all keys": draw(BATCH, HEADS, POS, 1, seed=5) > -0.5,
}
SOME = ["pre", "post", "like llama", "like gemma 2", "like olmo 2", "window", "qk_norm all"]
WITH_MASKS = [(name, mask) for name in SOME for mask in ("padding", "4-D")]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "mask"), [(name, "none") for name in VARIANTS] + WITH_MASKS)
def test_explicit_and_fused_agree_in_values_and_gradients(name, mask):
    """Test every option with masks in which some queries see no key."""
    model, tokens, given = variant(name), some_tokens(), GIVEN_MASKS[mask]
    runner, weights = HookedRunner(model), list(model.parameters())

    def run(hooks):
        logits = runner.run_with_hooks(tokens, **masked(given), hooks=hooks)
        gradients = torch.autograd.grad(logits.log_softmax(-1)[:, :, 5].sum(), weights)
        return logits.detach(), gradients

    fused, fused_gradients = run({})
    explicit, explicit_gradients = run(EXPLICIT)
    close(explicit, fused, 1e-10)
    for ours, theirs in zip(explicit_gradients, fused_gradients, strict=True):
        assert theirs.isfinite().all()
        close(ours, theirs, 1e-8)


@pytest.mark.parametrize("name", SOME)
def test_gradients_of_the_model_are_finite_differences(name):
    model, tokens = variant(name), some_tokens(shape=(2, 5))
    weights = list(model.parameters())
    directions = [draw(*weight.shape, seed=n) for n, weight in enumerate(weights)]

    def loss(step):
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight += step * direction
        return model(tokens).log_softmax(-1)[:, :, 5].sum()

    gradients = torch.autograd.grad(loss(0), weights)
    along = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True))
    slope = (loss(1e-6) - loss(-2e-6)).item() / 2e-6
    assert along == pytest.approx(slope, rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS | {"like llama": {}, "embed_norm": {}, "logit_cap": {}})
def test_every_point_lies_on_the_compute_path(name):
    model, tokens = variant(name), some_tokens(shape=(2, 5))
    runner = HookedRunner(model)

    def nudge(value, point):
        # Add random numbers. The same number for all scores of a query, or for a whole vector,
        # might have no effect.
        return value + 0.1 * draw(*value.shape, seed=11)

    with torch.no_grad():
        plain = model(tokens)
        for point in runner.points:
            edited = runner.run_with_hooks(tokens, hooks={point: nudge})
            assert (edited - plain).abs().max() > 1e-4, point
    kinds = {point.rpartition(".")[2] for point in runner.points}
    assert {"scores", "pattern", "z", "q", "k", "v", "attn_out", "resid_post"} <= kinds


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_of_the_pattern_leaves_its_mean(dropout):
    """Explicit and fused attention drop weights with the given probability, and scale up the
    others, so that the mean stays the same.
    """
    model = variant("no positions", dropout=dropout)
    attn, x = model.blocks[0].attn.train(), draw(1, POS, SIZES["d_model"]).expand(3000, -1, -1)
    attn.output_dropout.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        expected = attn.eval()(x)[:1]
        attn.train().output_dropout.eval()
        for hooks in ({}, {"pattern": lambda value, point: None}):
            with HookedRunner(attn).hooks(hooks):
                out = attn(x)
            spread = out.std(0)
            assert bool((spread > 0.01).all()) == bool(dropout)
            error = (out.mean(0) - expected[0]).abs()
            assert (error <= 5 * spread / math.sqrt(3000) + 1e-12).all()


# --- masks of a call


@pytest.mark.parametrize(
    "name", ["pre", "like llama", "like gemma 2", "sinusoidal", "window", "qk_norm all"]
)
@pytest.mark.parametrize("hooks", [{}, EXPLICIT], ids=["fused", "explicit"])
def test_a_padded_text_equals_the_text_alone(name, hooks):
    model, tokens, mask = variant(name), some_tokens(), GIVEN_MASKS["padding"]
    with torch.no_grad():
        logits = HookedRunner(model).run_with_hooks(tokens, attention_mask=mask, hooks=hooks)
        for row, real in enumerate(mask):
            alone = model(tokens[row][real][None])[0]
            close(logits[row][real], alone, 1e-9)
    assert logits.isfinite().all()


@pytest.mark.parametrize("mask", list(GIVEN_MASKS)[2:])
@pytest.mark.parametrize("name", ["pre", "grouped", "like gemma 2", "window"])
def test_a_mask_by_query_replaces_the_causal_rule_and_windows(name, mask):
    model, tokens, given = variant(name), some_tokens(), GIVEN_MASKS[mask]
    allowed = given[:, None] if given.ndim == 3 else given
    allowed = allowed.expand(BATCH, HEADS, POS, POS).numpy()
    expected, atol = Reference(model)(tokens, allowed), tolerance(model.config)
    runner = HookedRunner(model)
    with torch.no_grad():
        close(model(tokens, query_key_mask=given), expected, atol)
        explicit, cache = runner.run_with_cache(tokens, query_key_mask=given, names="*.pattern")
    close(explicit, expected, atol)
    sums = cache["pattern", 1].sum(-1)
    close(sums, torch.tensor(allowed.any(-1)).double())


@pytest.mark.parametrize("name", ["pre", "like llama", "window"])
def test_the_argument_decides_the_meaning_of_a_square_mask(name):
    """With as many texts as positions, the shape of a mask does not say if its first axis is the
    batch or the queries. This follows from the name of the argument that the mask is given to.
    """
    model, tokens = variant(name), some_tokens(shape=(POS, POS))
    # As a mask of queries and keys, queries see later keys. As a mask of padding, each text has one
    # more column of padding on the left.
    mask = torch.ones(POS, POS, dtype=torch.bool).triu()
    allowed = np.broadcast_to(mask.numpy(), (POS, HEADS, POS, POS))
    with torch.no_grad():
        seen = model(tokens, query_key_mask=mask)
        close(seen, Reference(model)(tokens, allowed), tolerance(model.config))
        padded = model(tokens, attention_mask=mask)
        for row in range(POS):
            close(padded[row, row:], model(tokens[row : row + 1, row:])[0], 1e-9)


@pytest.mark.parametrize("name", ["pre", "like llama", "sinusoidal"])
def test_padding_and_a_mask_by_query_act_together(name):
    """A padded text equals the text alone, with the part of the other mask for its real tokens."""
    model, tokens, padded = variant(name), some_tokens(), GIVEN_MASKS["padding"]
    seen = GIVEN_MASKS["4-D"]
    with torch.no_grad():
        logits = model(tokens, attention_mask=padded, query_key_mask=seen)
        for row, real in enumerate(padded):
            part = seen[row : row + 1, :, real][..., real]
            alone = model(tokens[row : row + 1, real], query_key_mask=part)
            close(logits[row, real], alone[0], 1e-9)


@pytest.mark.parametrize("shape", [(0, POS), (BATCH, 0)])
@pytest.mark.parametrize("name", ["grouped", "like gemma 2", "window"])
def test_nothing_passes_through_hooked_attention_too(name, shape):
    model, tokens = variant(name), some_tokens(shape=shape)
    with torch.no_grad():
        for mask in (None, torch.ones(shape), torch.ones(shape[1], shape[1])[None]):
            logits, cache = HookedRunner(model).run_with_cache(tokens, **masked(mask))
            assert logits.shape == model(tokens, **masked(mask)).shape == (*shape, 23)
            assert cache["pattern", 1].shape == (shape[0], HEADS, shape[1], shape[1])
    q, k = draw(3, D_K), draw(0, D_K)
    assert scaled_dot_product_attention(q, k, k).tolist() == [[0] * D_K] * 3


def test_a_mask_is_given_by_name():
    """If masks could be given by position, a mask [query, key] could be taken for padding."""
    model, tokens = variant("like llama"), torch.zeros(POS, POS).long()
    for run in (model, model.context):
        with pytest.raises(TypeError, match="positional"):
            run(tokens, torch.ones(POS, POS).tril())


def test_a_mask_of_zeros_and_ones_may_have_any_type():
    model, tokens = variant("like llama"), some_tokens()
    for mask in (GIVEN_MASKS["padding"], GIVEN_MASKS["3-D"]):
        with torch.no_grad():
            expected = model(tokens, **masked(mask))
            for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64):
                assert torch.equal(model(tokens, **masked(mask.to(dtype))), expected)
            close(model(tokens, attention_mask=torch.ones(BATCH, POS)), model(tokens), 1e-10)


PADDING, BY_QUERY = "attention_mask", "query_key_mask"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("argument", "mask", "match"),
    [
        *(
            (PADDING, torch.ones(shape), re.escape(f"got {[*shape]}"))
            for shape in ((BATCH, 6), (1, POS), (POS,))
        ),
        *(
            (PADDING, torch.ones(shape), BY_QUERY)
            for shape in ((BATCH, POS, POS), (BATCH, HEADS, POS, POS))
        ),
        *(
            (BY_QUERY, torch.ones(shape), re.escape(str(shape)))
            for shape in (
                (POS,),
                (1, POS),
                (BATCH, POS),
                (BATCH, 3, POS),
                (2, POS, POS),
                (BATCH, 3, POS, POS),
                (1, 1, 1, 1, POS),
            )
        ),
        *(
            (PADDING, torch.ones(BATCH, POS) * value, str(value))
            for value in (2.0, 0.5, -1.0, -torch.inf)
        ),
        (BY_QUERY, torch.zeros(POS, POS).fill_diagonal_(-torch.inf), "-inf"),
        (PADDING, torch.ones(BATCH, POS).index_fill(0, torch.tensor(3), 0), "row 3"),
        (BY_QUERY, torch.ones(BATCH, POS, POS).index_fill(0, torch.tensor(2), 0), "row 2"),
    ],
)
def test_masks_of_a_model_that_are_refused(argument, mask, match):
    """A text without any real token is refused. Most likely, its mask is inverted."""
    with pytest.raises(ValueError, match=f"{argument}.*{match}"):
        variant("pre")(some_tokens(), **{argument: mask})


def test_a_context_without_rotations_is_refused():
    model, tokens = variant("rotary"), some_tokens()
    context = model.context(tokens)
    with pytest.raises(ValueError, match="rotary embeddings"):
        model.blocks[0](model.input_resid(tokens, context), context._replace(rotation=None))


def test_long_sequences_take_the_kernels_other_paths():
    """The text is longer than the blocks of fused kernels. It has a window and grouped heads."""
    config = TransformerConfig(**SIZES | dict(n_ctx=600, n_layers=1, n_kv_heads=2, window=257))
    model, tokens = randomised(config), some_tokens(shape=(1, 600))
    q = k = v = None
    with torch.no_grad():
        logits, cache = HookedRunner(model).run_with_cache(tokens)
        close(model(tokens), logits, 1e-4)
        q, k, v = (cache[f"blocks.0.attn.{n}"][0].double().numpy() for n in "qkv")
    for head, query in ((0, 599), (3, 300), (5, 256), (4, 257), (2, 0)):
        keys = slice(max(0, query - 256), query + 1)
        expected = loops(q[[query], head], k[keys, head // 3], v[keys, head // 3])
        close(cache["z", 0][0, query, head].double(), expected[0], 1e-5)
