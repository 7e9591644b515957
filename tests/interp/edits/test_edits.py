"""Edits, compared with numpy, hooks by hand, masks of the model, and the same text read in
pieces.
"""

import itertools
import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from hooks import (
    ActivationCache,
    ContextError,
    EditedPoint,
    EditError,
    HookedRunner,
    HookPoint,
    Point,
    SelectionError,
    UnknownNameError,
    position_offset,
    start_of_piece,
    token_mask,
)
from hooks.base.pieces import Piece, reading
from interp import edits
from interp.directions import Direction
from models import KVCache, Transformer, TransformerConfig, generate

BATCH, POS, VOCAB = 5, 7, 23


def made(**options):
    """Return a random model in float64. All axes differ in size, except `query` and `key`."""
    sizes = dict(vocab_size=VOCAB, n_ctx=19, n_layers=2, n_heads=6, n_kv_heads=3, d_head=4)
    model = Transformer(TransformerConfig(d_model=10, d_mlp=13, **sizes | options)).eval().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return HookedRunner(model)


@pytest.fixture(scope="module")
def wide():
    return made()


@pytest.fixture(scope="module")
def texts():
    """The base batch, and another of the same size."""
    drawn = torch.randint(VOCAB, (2, BATCH, POS), generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


@pytest.fixture(scope="module")
def source(wide, texts):
    return wide.run_with_cache(texts[1])[1]


def drawn_index(rng, size):
    """Return a random index in one of the forms that users write, and the entries that it
    selects.
    """
    match rng.randrange(5):
        case 0:
            given = rng.randrange(-size, size)
            return given, [given % size]
        case 1:
            given = slice(rng.randrange(size), None, rng.randrange(1, 3))
        case 2:
            given = [rng.randrange(-size, size) for _ in range(rng.randrange(1, 4))]
            return rng.choice([given, torch.tensor(given)]), sorted({n % size for n in given})
        case 3:
            mask = [rng.random() < 0.5 for _ in range(size)]
            mask[rng.randrange(size)] = True
            return rng.choice([mask, np.array(mask)]), [n for n in range(size) if mask[n]]
        case 4:
            left_out = rng.sample(range(size), rng.randrange(size))
            shifted = [n - size * rng.randrange(2) for n in left_out]
            return edits.all_but(*shifted), [n for n in range(size) if n not in left_out]
    return given, list(range(size))[given]


def donors_of(source, seed):
    """Return the number of the row from which each row takes its values in `edits.resample`.

    It is read from a source in which each row contains its own number.
    """
    rows = torch.arange(len(source), dtype=torch.float64)[:, None]
    donated = edits.resample(rows, seed)(torch.zeros_like(rows), Point("any", ("batch", "n")))
    return donated[:, 0].long().tolist()


def drawn_change(rng, name, cache):
    """Return a random kind of edit, and the same change in numpy.

    The edit is a function of the selection. The change is a function of the whole value, the
    selected region, and the subscript of this region.
    """
    source, width = cache[name].numpy(), cache[name].shape[-1]
    two = np.random.default_rng(rng.randrange(99)).normal(size=(width, 2))
    onto = two @ np.linalg.inv(two.T @ two) @ two.T
    donors = donors_of(source, 3)
    given = rng.choice([cache, cache[name]])
    return rng.choice(
        [
            (edits.zero, lambda x, at: 0 * x),
            (lambda **at: edits.scale(-1.5, **at), lambda x, at: -1.5 * x),
            (lambda **at: edits.add(given, **at), lambda x, at: x + source[at]),
            (
                lambda **at: edits.add(torch.from_numpy(two[:, 0]), **at),
                lambda x, at: x + two[:, 0],
            ),
            (lambda **at: edits.replace(given, **at), lambda x, at: source[at]),
            (lambda **at: edits.resample(given, 3, **at), lambda x, at: source[donors][at]),
            (
                lambda **at: edits.mean(given, **at),
                lambda x, at: np.broadcast_to(source.mean(0, keepdims=True), source.shape)[at],
            ),
            (
                lambda **at: edits.project_out(torch.from_numpy(two), **at),
                lambda x, at: x - x @ onto,
            ),
            (
                lambda **at: edits.interchange(given, torch.from_numpy(two), **at),
                lambda x, at: x + (source[at] - x) @ onto,
            ),
        ]
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(150))
def test_equals_numpy(wide, texts, source, seed):
    rng = random.Random(seed)
    name = rng.choice([n for n in wide.points if wide.points[n].axes[-1] != "1"])
    before = wide.capture(texts[0], names=name)[name].numpy()
    axes = wide.points[name].axes
    # The last axis is not selected, because some edits act along it.
    chosen = rng.sample(range(len(axes) - 1), rng.randrange(len(axes)))
    indices = {at: drawn_index(rng, before.shape[at]) for at in chosen}
    make, change = drawn_change(rng, name, source)
    edit = make(**{axes[at]: given for at, (given, _) in indices.items()})
    with wide.hooks({name: edit}, receipts=True) as context:
        edited = wide.capture(texts[0], names=name)[name].numpy()
    whole = [list(range(n)) for n in before.shape]
    at = np.ix_(*(indices[n][1] if n in indices else every for n, every in enumerate(whole)))
    expected = before.copy()
    expected[at] = change(before[at], at)
    np.testing.assert_allclose(edited, expected, rtol=0, atol=1e-12)
    (receipt,) = context.receipts
    changed = abs(edited - before)
    assert receipt.calls == 1
    assert receipt.rows == (changed.reshape(BATCH, -1) > 0).any(1).sum()
    assert receipt.largest == changed.max()


SPANS = torch.tensor([[1, 3], [0, 6], [2, 2], [-1, 4], [5, 0]])
ELSEWHERE = torch.tensor([[6, 0], [1, 1], [2, 3], [4, -2], [0, 5]])
RAGGED = [[1, 3, 5], [-1], [], [0, 2], [4, 6]]
SWAPPED = [row[::-1] for row in RAGGED]


@pytest.mark.parametrize(
    ("pos", "source_pos"),
    [
        (SPANS, None),
        (SPANS, ELSEWHERE),
        (SPANS, [3, 0]),
        ([0, 4], ELSEWHERE),
        (4, ELSEWHERE[:, 1:]),
        (slice(2, 4), slice(-2, None)),
        ([1, -1], 3),
        (None, 2),
        (RAGGED, None),
        (RAGGED, 2),
        (RAGGED, SWAPPED),
    ],
)
@pytest.mark.parametrize("rows", [None, [1, 4]])
def test_positions_of_each_example_and_of_the_source(wide, texts, source, pos, source_pos, rows):
    name, where = "blocks.1.attn.z", {} if rows is None else {"batch": rows}
    where |= {} if pos is None else {"pos": pos}
    expected = wide.capture(texts[0], names=name)[name].clone()

    def listed(index, row):
        if isinstance(index, torch.Tensor) or index is RAGGED or index is SWAPPED:
            return [*map(int, index[row])]
        found = np.arange(POS)[index if index is not None else slice(None)]
        return np.atleast_1d(found).tolist()

    for row in range(BATCH) if rows is None else rows:
        here = listed(pos, row)
        there = here if source_pos is None else listed(source_pos, row)
        for n, column in enumerate(here):
            expected[row, column, 3] = source[name][row, there[n % len(there)], 3]
    with wide.hooks({name: edits.replace(source, head=3, source_pos=source_pos, **where)}):
        assert torch.equal(wide.capture(texts[0], names=name)[name], expected)


def test_values_of_another_layer_position_and_length(wide, texts, source):
    short = wide.run_with_cache(texts[1][:, :4])[1]
    last = wide.run_with_cache(texts[1], pos=[-1])[1]
    name = "blocks.1.attn.z"
    plain = wide.capture(texts[0], names=name)[name]
    for given, value in (
        (edits.replace(source["z", 0], head=2), source["z", 0][:, :, 2]),
        (edits.replace(source["z", 0][:1], head=2), source["z", 0][:1, :, 2]),
        (edits.add(3 * source["z", 0][:, 5, 2] - 3 * plain[:, 5, 2], pos=5, head=2), None),
        (edits.replace(source.at(pos=5), head=2), source["z", 1][:, 5, None, 2]),
        (edits.replace(source.at(head=0), head=2), source["z", 1][:, :, 0]),
        (edits.replace(short, source_pos=3, head=2), short["z", 1][:, 3, None, 2]),
        (edits.replace(last, source_pos=-1, head=2), source["z", 1][:, -1:, 2]),
        (edits.mean(last, ("batch", "pos"), head=2), source["z", 1][:, -1, 2].mean(0)),
        (edits.replace(source["z", 1][:, 4:5], head=2), source["z", 1][:, 4:5, 2]),
        (edits.mean(short, ("batch", "pos"), head=2), short["z", 1][:, :, 2].mean((0, 1))),
    ):
        with wide.hooks({name: given}):
            edited = wide.capture(texts[0], names=name)[name]
        expected = plain.clone()
        if value is None:
            expected[:, 5, 2] = 3 * source["z", 0][:, 5, 2] - 2 * plain[:, 5, 2]
        else:
            expected[:, :, 2] = value
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-14)


def test_a_mean_leaves_padding_out(wide, texts):
    real = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 3 + [0] * 4, [1] * 7, [1] * 6 + [0]])
    _, padded = wide.run_with_cache(texts[1], attention_mask=real)
    weights = real.numpy()
    for over, name in (
        ("batch", "resid_mid"),
        (("batch", "pos"), "z"),
        ("batch", "pattern"),
        (("batch", "head"), "z"),
        ("pos", "z"),
    ):
        value, axes = padded[name, 1].numpy(), padded.axes((name, 1))
        kept = weights.reshape(
            BATCH, *((1, POS) if name == "pattern" else (POS, 1)), *[1] * (value.ndim - 3)
        )
        along = tuple(map(axes.index, [over] if isinstance(over, str) else over))
        kept = np.broadcast_to(kept, value.shape)
        expected = (value * kept).sum(along, keepdims=True) / kept.sum(along, keepdims=True)
        expected = np.broadcast_to(expected, value.shape)
        for where in ({}, {axes[-2]: [1, 2], "batch": slice(1, 4)}, {axes[1]: 2}):
            at = tuple(
                np.atleast_1d(np.arange(n)[where.get(a, slice(None))])
                for a, n in zip(axes, value.shape, strict=True)
            )
            changed = value.copy()
            changed[np.ix_(*at)] = expected[np.ix_(*at)]
            # Without `attention_mask=`, the edit uses the mask of the cache.
            for mask in (real, None):
                edited = edits.mean(padded, over, attention_mask=mask, **where)(
                    padded[name, 1].clone(), wide.points[padded.name((name, 1))]
                )
                np.testing.assert_allclose(edited.numpy(), changed, atol=1e-13)


LEFT = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [0] * 4 + [1] * 3, [1] * 7, [0] + [1] * 6])
RIGHT_PADDED = LEFT.flip(1)


@pytest.mark.parametrize(
    ("of_reference", "of_run"), [(LEFT, LEFT), (RIGHT_PADDED, LEFT), (LEFT, RIGHT_PADDED)]
)
@pytest.mark.parametrize("point", ["blocks.1.mlp_out", "blocks.1.attn.pattern"])
def test_a_mean_at_each_column_needs_texts_that_begin_together(
    wide, texts, point, of_reference, of_run
):
    _, reference = wide.run_with_cache(texts[1], attention_mask=of_reference)
    with pytest.raises(EditError, match="begin in the columns 0, 1, 2, 4: pad on the right"):
        wide.run_with_hooks(texts[0], attention_mask=of_run, hooks={point: edits.mean(reference)})


@pytest.mark.parametrize("options", [dict(across=("batch", "pos")), dict(pos=-1)])
def test_other_means_do_not_depend_on_the_side_of_padding(wide, texts, options):
    """Three texts of 7, 5 and 3 tokens, padded on both sides."""
    tokens = texts[1][:3]
    results = []
    for mask in (LEFT[:3], RIGHT_PADDED[:3]):
        padded = torch.zeros_like(tokens)
        for row, real in enumerate(mask.bool()):
            padded[row, real] = tokens[row, : int(real.sum())]
        _, reference = wide.run_with_cache(padded, attention_mask=mask)
        hooks = {"blocks.1.mlp_out": edits.mean(reference, **options)}
        logits = wide.run_with_hooks(padded, attention_mask=mask, hooks=hooks)
        results.append([logits[row, real] for row, real in enumerate(mask.bool())])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_a_mean_is_over_its_axes_and_computed_at_each_use():
    point, x = Point("embed", ("batch", "pos", "d_model")), torch.zeros(2, 5, 3)
    reference = torch.ones(7, 5, 3, requires_grad=True)
    mean = edits.mean(reference, attention_mask=torch.ones(7, 5))
    with torch.no_grad():
        mean(x.clone(), point)
    for _ in range(2):
        mean.at(pos=1)(x.clone(), point).sum().backward()
    torch.testing.assert_close(reference.grad[:, 1], torch.full((7, 3), 4 / 7))
    with torch.no_grad():
        reference[:, 1] += 3.6
        assert (mean(x.clone(), point)[:, 1] == 4.6).all()
    mean = edits.mean(torch.arange(6.0).view(2, 3))
    edited = mean.at(pos=1)(x, point)
    assert torch.equal(edited[:, 1], torch.tensor([[1.5, 2.5, 3.5]] * 2))
    square = torch.zeros(5, 5, 3)
    with pytest.raises(EditError, match=r"values\[:, None\].*values\[None\].*\[5, 3\]"):
        edits.add(torch.ones(5, 3))(square, point)
    rows = torch.arange(5.0)[:, None, None].expand(5, 1, 3)
    assert torch.equal(edits.add(rows)(square.clone(), point)[:, 2], rows[:, 0])
    masked = edits.mean(torch.ones(7, 3), attention_mask=torch.ones(7, 5))
    with pytest.raises(EditError, match="batch and pos"):
        masked(torch.ones(2, 3), Point("last", ("batch", "d_model")))
    for edit in (mean, edits.resample(torch.arange(6.0).view(2, 3))):
        # The axes of this point are pos and d_model.
        with pytest.raises(UnknownNameError, match="batch"):
            edit.at(batch=0)(x, point)


def test_a_donor_has_the_same_padding():
    point, real = Point("embed", ("batch", "pos")), torch.ones(7, 5).bool()
    real[[1, 4, 6], 3:] = False
    own = torch.arange(7.0)[:, None].expand(7, 5)
    for seed in range(9):
        found = edits.resample(own, seed, attention_mask=real, pos=2)(own.clone(), point)
        donors = found[:, 2].long()
        assert torch.equal(real[donors], real)
        assert sorted(donors.tolist()) == list(range(7))
        assert not (donors == torch.arange(7)).any()
        assert torch.equal(found[:, 3:], own[:, 3:])
    real[4] = True
    real[6, 2] = False
    with pytest.raises(EditError, match="same padding.*row 1"):
        edits.resample(own, 0, attention_mask=real)(own.clone(), point)
    with pytest.raises(EditError, match=r"7.*6"):
        edits.resample(own, 0, attention_mask=real[:6])(own.clone(), point)


def test_the_batch_may_be_a_later_axis():
    """At this point, positions are the first axis and the batch is the second.

    The edit has one list of positions per text, and acts on one text only.
    """
    point = Point("any", ("pos", "batch"))
    value = torch.arange(1.0, 7).view(3, 2)
    edited = edits.zero(batch=1, pos=[[0], [2]])(value, point)
    assert edited.tolist() == [[1, 2], [3, 4], [5, 0]]


def test_rows_are_the_first_axis_if_no_axes_are_declared():
    runner, x = HookedRunner(nn.Sequential(nn.Tanh()).eval()), torch.randn(5, 2, 3)
    cache = runner.capture(x, names="0")
    donors = donors_of(x, 3)
    edited = runner.run_with_hooks(x, hooks={"0": edits.resample(cache, 3)})
    assert torch.equal(edited, x.tanh()[donors])
    edited = runner.run_with_hooks(x, hooks={"0": edits.mean(cache)})
    torch.testing.assert_close(edited, x.tanh().mean(0).expand(5, 2, 3))
    for make in (edits.mean, edits.resample):
        with pytest.raises(UnknownNameError, match="batch"):
            runner.run_with_hooks(x, hooks={"0": make(x[0])})


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_donor_is_another_row_the_same_at_every_point(n):
    for seed in range(20):
        donors = donors_of(torch.zeros(n, 1), seed)
        assert sorted(donors) == list(range(n))
        assert all(row != donor for row, donor in enumerate(donors))
    assert len({tuple(donors_of(torch.zeros(8, 1), seed)) for seed in range(20)}) > 15


@pytest.mark.parametrize("pos", [None, -1, slice(-2, None)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_copy_of_a_text_is_not_a_donor(wide, side, pos):
    """Texts 0, 2, 3 and 5 are copies. The tokens at padding do not matter."""
    where = {} if pos is None else {"pos": pos}
    texts = [[3, 1, 4], [1, 5, 9], [3, 1, 4], [3, 1, 4], [2, 6, 5], [3, 1, 4]]
    fill = torch.arange(6)[:, None]  # another token at the padding of each text
    tokens, columns = torch.tensor(texts), torch.ones(6, 4).bool()
    columns[:, 0 if side == "left" else 3] = False
    tokens = torch.cat([fill, tokens] if side == "left" else [tokens, fill], 1)
    _, cache = wide.run_with_cache(tokens, attention_mask=columns)
    name, real = "blocks.1.resid_post", slice(1, None) if side == "left" else slice(3)
    drawn = set()
    for seed in range(9):
        with wide.hooks({name: edits.resample(cache, seed, **where)}):
            edited = wide.capture(tokens, names=name, attention_mask=columns)[name][:, real]
        changed = pos if isinstance(pos, slice) else slice(pos, None)
        for row, value in enumerate(edited):
            (donor,) = {
                tuple(texts[n])
                for n in range(6)
                if torch.equal(value[changed], cache[name][n, real][changed])
            }
            assert donor != tuple(texts[row])
            drawn.add((row, donor))
    assert len(drawn) == 4 * 2 + 2 * 2
    copies = tokens[[0, 2, 3]]
    _, cache = wide.run_with_cache(copies, attention_mask=columns[:3])
    with pytest.raises(EditError, match=r"2 different texts.*3 copies.*row 0"):
        wide.run_with_hooks(copies, attention_mask=columns[:3], hooks={name: edits.resample(cache)})


def test_texts_with_other_values_are_no_copies(wide, texts):
    """A cache does not contain images. So texts with equal tokens are copies only if their values
    are equal too.
    """
    same = texts[0][:1].expand(3, -1)
    other = {"embed": edits.add(torch.arange(3.0)[:, None, None].double())}
    with wide.hooks(other):
        _, cache = wide.run_with_cache(same)
    edited = wide.run_with_hooks(same, hooks={"blocks.0.resid_mid": edits.resample(cache, 1)})
    assert torch.isfinite(edited).all()


def test_a_plan_of_a_run_with_donors_draws_nothing(wide, texts, source):
    with wide.hooks({"blocks.0.resid_mid": edits.resample(source)}):
        assert wide.plan(texts[0], names="embed").nbytes == BATCH * POS * 10 * 8


def test_noise_is_normal_and_belongs_to_its_place():
    axes = ("batch", "pos", "d_model")
    noisy, seen = edits.noise(0.5, seed=3), torch.zeros(3, 211, 401, dtype=torch.float64)
    drawn = noisy(seen, Point("embed", axes)).clone()
    flat = drawn.flatten() / 0.5
    assert abs(flat.mean()) < 0.01
    assert abs(flat.var() - 1) < 0.01
    assert abs(flat.pow(4).mean() - 3) < 0.06
    for shift in itertools.product((0, 1), repeat=3):
        rolled = drawn.roll(shift, (0, 1, 2)).flatten() / 0.5
        assert abs((flat * rolled).mean() - int(sum(shift) == 0)) < 0.01
    others = (edits.noise(0.5, seed=4), "embed"), (noisy, "pos_embed")
    for edit, name in others:
        other = edit(torch.zeros_like(drawn), Point(name, axes)).flatten() / 0.5
        assert abs((flat * other).mean()) < 0.01
    part = edits.noise(0.5, 3, batch=1, pos=[4, 9])(torch.zeros_like(drawn), Point("embed", axes))
    assert torch.equal(part[1, [4, 9]], drawn[1, [4, 9]])
    assert not part[1, 5:9].any()
    with position_offset(200):
        late = noisy(torch.zeros(1, 11, 401, dtype=torch.float64), Point("embed", axes))
    assert torch.equal(late[0], drawn[0, 200:])
    scores = Point("scores", ("batch", "head", "query", "key"))
    drawn = noisy(torch.zeros(2, 3, 7, 7), scores).clone()
    assert torch.equal(noisy(torch.zeros(2, 3, 5, 5), scores), drawn[:, :, :5, :5])
    assert torch.equal(
        edits.noise(0.5, 3, head=1)(torch.zeros_like(drawn), scores)[:, 1], drawn[:, 1]
    )
    with position_offset(5):
        late = noisy(torch.zeros(2, 3, 2, 7), scores)
    assert torch.equal(late, drawn[:, :, 5:])


FORMS = [{}, dict(attn_cap=2.0), dict(window=3), dict(positions="rotary", parallel=True)]


@pytest.mark.parametrize("form", FORMS)
def test_knockout_equals_the_models_own_mask(form, texts):
    """`knockout` has the effect of `query_key_mask`, also for all keys of a query."""
    runner = made(**form)
    seen = torch.ones(POS, POS, dtype=torch.bool).tril()
    seen &= ~torch.ones(POS, POS, dtype=torch.bool).tril(-form.get("window", POS))
    for query, key, head in (
        (-1, [0, 2], None),
        (slice(2, 5), slice(None), [1, 4]),
        (None, 1, 3),
        ([0, 3], None, None),
    ):
        mask = seen.expand(BATCH, 6, POS, POS).clone()
        for q, k in itertools.product(range(POS)[slice(None)], range(POS)):
            inside = query is None or q in np.atleast_1d(np.arange(POS)[query])
            inside &= key is None or k in np.atleast_1d(np.arange(POS)[key])
            if inside:
                mask[:, slice(None) if head is None else head, q, k] = False
        where = {} if head is None else {"head": head}
        edit = edits.knockout(query=query, key=key, **where)
        edited = runner.run_with_hooks(texts[0], hooks={"*.scores": edit})
        expected = runner.model(texts[0], query_key_mask=mask)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("later", [(2, 5), ([0, 2], [3, 6]), (-3, [-1, -2])])
def test_the_receipt_of_a_knockout_of_later_keys_shows_no_change(wide, texts, later):
    with pytest.warns(UserWarning, match="causal"):
        edit = edits.knockout(*later)
    logits = wide.run_with_hooks(texts[0], hooks={"*.scores": edit})
    torch.testing.assert_close(logits, wide.model(texts[0]), rtol=0, atol=1e-12)


def test_knockout_of_each_examples_own_columns():
    scores, point = (
        torch.zeros(BATCH, 6, POS, POS),
        Point("scores", ("batch", "head", "query", "key")),
    )
    edited = edits.knockout(SPANS, ELSEWHERE, head=[2, 5])(scores.clone(), point)
    for row in range(BATCH):
        for head, q, k in itertools.product((2, 5), SPANS[row], ELSEWHERE[row]):
            scores[row, head, q, k] = -torch.inf
    assert torch.equal(edited, scores)


@pytest.mark.parametrize("form", FORMS)
def test_a_text_read_in_pieces_is_edited_as_in_one(form, texts, source):
    runner, cuts = made(**form), [0, 2, 3, 6, 7]
    for hooks in (
        {"blocks.*.resid_pre": edits.zero(pos=[1, 5])},
        {
            "blocks.0.attn.v": edits.replace(
                source, pos=SPANS % POS, source_pos=ELSEWHERE, kv_head=1
            )
        },
        {"blocks.0.attn.z": edits.replace(source, pos=slice(3, None), source_pos=[0, 2, 1, 4])},
        {"*.z": edits.noise(0.7, pos=slice(1, 6)), "embed": edits.noise(0.3)},
        {"*.scores": edits.knockout(query=[2, 3, 6], key=slice(1, 4))},
        [("*.pattern", edits.scale(0.3, query=4, key=[3, 4])), ("*.scores", edits.noise(0.5))],
        {"blocks.1.attn_out": edits.mean(source, pos=slice(3, None))},
        {"blocks.*.mlp_out": edits.zero(pos=edits.all_but(1, 4))},
        {"blocks.1.mlp.post": edits.add(torch.ones(13).double(), pos=[True] * 3 + [False] * 4)},
    ):
        with runner.hooks(hooks):
            whole, kv_cache = runner.model(texts[0]), KVCache()
            parts = [
                runner.model(texts[0][:, a:b], kv_cache=kv_cache)
                for a, b in itertools.pairwise(cuts)
            ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_generation_reaches_an_edit_when_its_column_comes(wide, texts):
    """In a generation, pos=-1 is the newest column at each step. A position that is never reached
    has no effect.
    """
    start, new = texts[0][:1, :4], 6
    name, vector = "blocks.0.resid_mid", torch.linspace(-3, 3, 10).double()
    hooks = [(name, edits.add(vector, pos=-1)), (name, edits.zero(pos=[6, 40]))]
    with wide.hooks(hooks, receipts=True) as context:
        (made,) = generate(wide.model, start, max_new_tokens=new, stop=())
    assert [receipt.calls for receipt in context.receipts] == [new, new]
    assert [receipt.rows for receipt in context.receipts] == [new, 1]

    def by_hand(value, point):
        value[:, 3:] += vector
        value[:, 6:7] = 0

    for end in range(4, 4 + new):
        logits = wide.run_with_hooks(torch.tensor([made[:end]]), hooks={name: by_hand})
        assert logits[0, -1].argmax() == made[end]


@pytest.mark.parametrize("index", [-9, [-9, 1], slice(-20, -8), edits.all_but(-9)])
@pytest.mark.parametrize("axis", ["pos", "query"])
def test_a_position_before_every_text_is_an_error_in_a_generation(wide, axis, index):
    """A negative position before the start of a text can never be reached later, so it is an error.

    Padding does not count. One of the two prompts is long enough for -4.
    """
    name = {"pos": "blocks.1.attn.z", "query": "blocks.1.attn.pattern"}[axis]
    prompts = [[3, 1, 4], [1, 5, 9, 2]]
    edit = edits.scale(0.5)
    with (
        wide.hooks({name: edit.at(**{axis: index})}),
        pytest.raises(SelectionError, match=f"{axis} at {name}.*-4 on.*4 tokens.*(9|-8)"),
    ):
        generate(wide.model, prompts, max_new_tokens=2)
    with wide.hooks({name: edit.at(**{axis: [-4]})}, receipts=True) as context:
        generate(wide.model, prompts, max_new_tokens=2)
    assert context.receipts[0].rows == 1


def test_a_key_before_the_start_may_come_later(wide):
    """A key may lie before the start of the prompt, because a text that grows has it later."""
    name = "blocks.1.attn.pattern"
    with wide.hooks({name: edits.scale(0.5, key=-4)}, receipts=True) as context:
        generate(wide.model, [[3, 1, 4]], max_new_tokens=3, stop=())
    assert context.receipts[0].rows == 2


def test_a_lazy_cache_is_edited_as_the_run_was(wide, texts):
    longer = wide.run_with_cache(torch.cat([texts[1][:, 5:], texts[1]], 1))[1]
    hooks = [
        ("*.z", edits.resample(longer, 1, head=[0, 5])),
        ("*.mlp_out", edits.noise(0.4, pos=-1)),
        ("*.scores", edits.knockout(query=3)),
    ]
    with position_offset(2), wide.hooks(hooks, receipts=True) as context:
        _, eager = wide.run_with_cache(texts[0])
        _, lazy = wide.run_with_cache(texts[0], lazy=True)
        before = [receipt.calls for receipt in context.receipts]
        inside = lazy["z", 0]
    torch.testing.assert_close(inside, eager["z", 0], rtol=0, atol=1e-11)
    with position_offset(11):
        for name in eager:
            torch.testing.assert_close(lazy[name], eager[name], rtol=0, atol=1e-11)
    assert before == [receipt.calls for receipt in context.receipts] == [2] * 6
    assert start_of_piece() is None


def test_gradients_flow_through_the_values_that_remain(wide, texts, source):
    name = "blocks.0.resid_mid"

    def by_hand(value, point):
        return torch.cat([value[:, :2], source[name][:, 2:3], -3 * value[:, 3:]], 1)

    pairs = [(name, edits.replace(source, pos=2)), (name, edits.scale(-3.0, pos=slice(3, None)))]
    found = []
    for hooks in (pairs, {name: by_hand}):
        logits = wide.run_with_hooks(texts[0], hooks=hooks)
        found.append(
            torch.autograd.grad(logits.square().sum(), wide.model.token_embedding.weight)[0]
        )
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_several_hooks_at_a_point_act_in_order_each_on_a_copy(wide, texts):
    name, mine, seen = "blocks.1.resid_pre", torch.ones(BATCH, POS, 10).double(), []
    plain = wide.capture(texts[0], names=name)[name]
    pairs = [
        (name, lambda value, point: value.mul_(3)),
        ("*.resid_pre", lambda value, point: seen.append(value)),
        (name, lambda value, point: mine if point.name == name else None),
        (name, edits.zero(pos=0)),
        (name, lambda value, point: value + 5),
    ]
    (first, rest) = sorted(wide.edits(pairs), key=lambda edited: -len(edited.hooks))
    assert (first.point.name, len(first.hooks), len(rest.hooks)) == (name, 5, 1)
    given = plain.clone()
    edited = first.apply(given)
    assert torch.equal(given, plain)
    assert torch.equal(mine, torch.ones_like(mine)), "a later hook writes into nobody else's tensor"
    assert (edited[:, 0] == 5).all()
    assert (edited[:, 1:] == 6).all()
    assert torch.equal(seen[0], 3 * plain)
    grads = []
    backward = [(name, lambda grad, point: grad * 0 + 2), (name, lambda grad, point: grad + 3)]
    backward.append((name, lambda grad, point: grads.append(grad)))
    wide.run_with_hooks(texts[0], backward=backward).sum().backward()
    assert (grads[0] == 5).all()


def test_receipts_say_what_each_hook_did(wide, texts):
    def nothing(value, point):
        return None

    def to_nan(value, point):
        value[1, 2] = torch.nan

    normed = "ln_final.normalized"
    hooks = [("*.attn_out", edits.zero(batch=[0, 3])), ("embed", nothing), (normed, to_nan)]
    hooks.append((normed, edits.scale(1.0)))
    with wide.hooks(hooks, receipts=True) as context:
        wide.model(texts[0])
    plain = wide.run_with_cache(texts[0])[1]
    zeroed, again, idle, broken, same = context.receipts
    assert (zeroed.point.name, again.point.name) == ("blocks.0.attn_out", "blocks.1.attn_out")
    assert (zeroed.calls, zeroed.rows) == (1, 2)
    assert zeroed.largest == pytest.approx(plain["attn_out", 0][[0, 3]].abs().max().item())
    assert (idle.hook, idle.calls, idle.rows, idle.largest) == (nothing, 1, 0, 0)
    assert broken.rows == 1
    assert np.isnan(broken.largest)
    assert (same.calls, same.rows, same.largest) == (1, 0, 0)
    lines = repr(context.receipts).split("\n")
    assert [re.search(r"(\d+) rows?", line)[1] for line in lines] == ["2", "2", "0", "1", "0"]
    assert "nothing" in lines[2]
    with wide.hooks({"embed": nothing}) as context, pytest.raises(ContextError, match="receipts"):
        context.receipts  # noqa: B018  # reading it raises the error
    pairs = [("*.attn_out", nothing), ("blocks.0.attn_out", to_nan)]
    by_hook = [receipt.hook for receipt in wide.hooks(pairs, receipts=True).receipts]
    assert by_hook == [nothing, nothing, to_nan]
    assert wide.hooks(receipts=True).receipts == []
    with wide.hooks({"embed": nothing}, receipts=True) as context:
        wide.plan(texts[0])
    assert context.receipts[0].calls == 0
    reading = HookedRunner(nn.Sequential(nn.Flatten(0)))
    with reading.hooks({"0": lambda value, point: value * 2}, receipts=True) as context:
        reading.model(torch.tensor([[3.0, -5.0]]))
        assert (context.receipts[0].rows, context.receipts[0].largest) == (2, 5)
        reading.model(torch.tensor([[7.0, torch.nan]]))
        assert (context.receipts[0].rows, context.receipts[0].largest) == (3, 7)
        reading.model(torch.tensor([[2.0]]))
        assert (context.receipts[0].rows, context.receipts[0].largest) == (4, 7)
        reading.model(torch.tensor([[torch.inf, 0.0]]))
        reading.model(torch.ones(0, 2))
    assert (context.receipts[0].calls, context.receipts[0].rows) == (5, 4)
    scalar = HookedRunner(nn.Sequential(nn.Identity()))
    with scalar.hooks({"0": lambda value, point: -value}, receipts=True) as context:
        scalar.model(torch.tensor(60000.0).half())
        # A tensor on the device "meta" has no numbers, so this call is not counted.
        scalar.model(torch.tensor(1.0, device="meta"))
    (receipt,) = context.receipts
    assert (receipt.calls, receipt.rows, receipt.largest) == (1, 1, 120000)


def test_a_place_may_be_narrowed_but_not_chosen_twice(source):
    edit = edits.mean(source, head=2)
    assert repr(edit.at(pos=5)).endswith("head=2, pos=5)")
    assert edit.at(pos=np.array([[1, 2]], np.uint8)).where["pos"].index == [[1, 2]]
    with pytest.raises(ValueError, match="head"):
        edit.at(head=3)
    with pytest.raises(AttributeError):
        edit.where = {}
    assert repr(edits.scale(2.5, head=[1, 2]).at(pos=slice(3, None))) == (
        "edits.scale(2.5, head=[1, 2], pos=slice(3, None))"
    )
    assert repr(edits.noise(0.5, seed=7, pos=3)) == "edits.noise(0.5, seed=7, pos=3)"
    assert repr(edits.zero(pos=np.zeros(0))) == "edits.zero(pos=[])"
    assert repr(edits.replace(torch.ones(2, 3), source_pos=1)) == (
        "edits.replace(Tensor[2, 3], source_pos=1)"
    )


def test_a_printed_edit_gives_no_length_of_another_layer():
    vectors = {f"blocks.{n}.resid_post": torch.tensor([3.0 * n, 4.0 * n]) for n in range(3)}
    direction = Direction(vectors, about={"by": "difference of means"})
    assert repr(edits.add(direction, 2.0, pos=1)) == (
        "edits.add(Direction at 3 points, 2.0, pos=1)"
    )
    assert "10" in repr(direction)  # the length in the last layer


@pytest.mark.parametrize(
    ("edit", "name", "first"),
    [
        (edits.zero(pos=-2), "blocks.0.resid_pre", 5),
        (edits.zero(pos=slice(3, None)), "blocks.0.attn.z", 3),
        (edits.zero(pos=[False, False, True, False, True, True, False]), "embed", 2),
        (edits.zero(pos=SPANS[[0, 2]]), "embed", 1),
        (edits.zero(pos=SPANS % POS).at(head=0), "blocks.0.attn.q", 0),
        (edits.zero(pos=SPANS[2:3]), "embed", 2),
        (edits.knockout(query=[4, 6], key=1), "blocks.0.attn.scores", 4),
        (edits.knockout(key=4), "blocks.0.attn.scores", 0),
        (edits.zero(head=1), "blocks.0.attn.z", 0),
        (edits.add(torch.ones(())), "anything", 0),
    ],
)
def test_the_first_column_that_may_change(wide, edit, name, first):
    assert edit.first(wide.points.get(name, Point(name)), POS) == first


@pytest.mark.parametrize(
    ("edit", "first"),
    [
        (edits.zero(pos=-1), 3),  # the last token of the text that is padded on the right
        (edits.zero(pos=-4), 0),  # the first token of the same text
        (edits.zero(pos=-1, batch=0), 6),
        (edits.zero(pos=2), 2),
    ],
)
def test_the_first_column_that_may_change_skips_padding(wide, edit, first):
    mask = torch.ones(2, POS, dtype=torch.bool)
    mask[0, :2] = False
    mask[1, 4:] = False
    with reading(Piece(None, mask)):
        assert edit.first(wide.points["embed"], POS) == first
        with pytest.raises(SelectionError, match="example 0 must be a real token"):
            edits.zero(pos=1).first(wide.points["embed"], POS)


ONES = torch.ones(BATCH, POS, 10).double()


@pytest.mark.parametrize(
    ("edit", "name", "match"),
    [
        (lambda s: edits.zero(layer=3), "embed", "layer"),
        (lambda s: edits.zero(pos=3), "blocks.0.attn.pattern", "query.*pos"),
        (lambda s: edits.zero(head=1), "blocks.0.attn.k", "kv_head"),
        (lambda s: edits.zero(head=6), "blocks.0.attn.z", "-6 to 5; got 6"),
        (lambda s: edits.zero(pos=[2, -8]), "embed", "-7 to 6; got -8"),
        (lambda s: edits.zero(pos=slice(7, None)), "embed", "nothing"),
        (lambda s: edits.zero(pos=[True, False]), "embed", "7; got 2"),
        (lambda s: edits.zero(pos=[0, 1, 1, 0, 0, 0, 1]), "embed", r"\.bool\(\)"),
        (lambda s: edits.zero(pos=torch.eye(BATCH, POS).long()), "embed", r"\.bool\(\)"),
        (lambda s: edits.zero(pos=SPANS[:3]), "embed", "5 examples.*got 3"),
        (lambda s: edits.zero(pos=SPANS + 7), "embed", "-7 to 6; got 8"),
        (lambda s: edits.replace(s, pos=SPANS[:2], source_pos=SPANS), "embed", "5 examples"),
        (lambda s: edits.replace(ONES[:, :, :9]), "embed", "10 along d_model.*9"),
        (lambda s: edits.replace(ONES[:3], pos=1), "embed", "5 along batch.*3"),
        (lambda s: edits.replace(ONES[:, :6], pos=1), "embed", "7 along pos.*6"),
        (lambda s: edits.replace(ONES[:, :6], source_pos=6, pos=1), "embed", "-6 to 5; got 6"),
        (lambda s: edits.replace(s, source_pos=[0, 1], pos=[1, 2, 4]), "embed", "3 positions.*2"),
        (
            lambda s: edits.replace(s, source_pos=ELSEWHERE, pos=[[1, 2]] * 4 + [[3]]),
            "embed",
            "1 positions.*2",
        ),
        (lambda s: edits.replace(s, source_pos=1), "blocks.0.attn.pattern", None),
        (lambda s: edits.replace(ONES[None]), "embed", r"\[1, 5, 7, 10\]"),
        (lambda s: edits.replace(ActivationCache({}, {})), "embed", "embed"),
        (lambda s: edits.mean(s, "head"), "embed", "head"),
        (lambda s: edits.mean(ONES[:1]), "embed", "several.*got one"),
        (
            lambda s: edits.add(torch.ones(BATCH, 10).double(), pos=[0, 1]),
            "embed",
            "7 along pos.*5",
        ),
        (lambda s: edits.mean(s, attention_mask=torch.ones(BATCH, 6)), "embed", "7 along pos.*6"),
        (lambda s: edits.mean(s, attention_mask=torch.ones(1, POS)), "embed", "5, 7.*1, 7"),
        (
            lambda s: edits.mean(s, attention_mask=torch.ones(BATCH, POS).tril(1)),
            "embed",
            "the mean at embed",
        ),
        (lambda s: edits.replace(s.at(pos=[-1])), "embed", "7 along pos.*1"),
        (lambda s: edits.mean(s.at(pos=[-1]), pos=4), "embed", "7 along pos.*1"),
        (lambda s: edits.replace(s.at(key=[3])), "blocks.0.attn.scores", "7 along key.*1"),
        (lambda s: edits.resample(s.at(batch=0)), "embed", "batch"),
        (lambda s: edits.resample(ONES[:1]), "embed", "5 rows.*1"),
        (lambda s: edits.resample(ONES[:4]), "embed", "5 rows.*4"),
        (lambda s: edits.project_out(torch.ones(4)), "embed", "10.*4"),
        (lambda s: edits.knockout(query=1), "blocks.0.attn.pattern", "scores"),
    ],
)
def test_edits_that_do_not_fit_a_point_are_errors(wide, texts, source, edit, name, match):
    hooks = {name: edit(source)}
    # `query` also counts positions, so this edit fits.
    if match is None:
        wide.run_with_hooks(texts[0], hooks=hooks)
        return
    with pytest.raises((EditError, UnknownNameError), match=match):
        wide.run_with_hooks(texts[0], hooks=hooks)
    value = wide.capture(texts[0], names=name)[name]
    with pytest.raises((EditError, UnknownNameError), match=match):
        hooks[name].try_on(value, wide.points[name])


@pytest.mark.parametrize("mask_of_run", [False, True])
def test_padding_of_a_source_is_copied_only_to_padding(wide, texts, mask_of_run):
    mask = torch.ones(BATCH, POS).bool()
    mask[1, 5:] = False
    padded = {"attention_mask": mask}
    _, source = wide.run_with_cache(texts[0], names="embed", **padded)
    hooks = {"embed": edits.replace(source)}
    if mask_of_run:
        logits = wide.run_with_hooks(texts[0], hooks=hooks, **padded)
        assert torch.equal(logits, wide.model(texts[0], **padded))
        return
    with pytest.raises(EditError, match="real token; got padding at pos 5 of text 1"):
        wide.run_with_hooks(texts[0], hooks=hooks)


@pytest.mark.filterwarnings("ignore:a hook function at .* changed only padding")
@pytest.mark.parametrize("side", ["left", "right"])
def test_receipts_do_not_count_padding(wide, texts, side):
    mask = torch.ones(BATCH, POS).bool()
    mask[[1, 3], : 3 if side == "left" else None] = side == "right"
    if side == "right":
        mask[[1, 3], 4:] = False
    _, cache = wide.run_with_cache(texts[0], attention_mask=mask)

    def at_padding(value, point):
        value[~mask] += 1

    def halved(value, point):
        return value / 2

    def of_queries(value, point):
        value += 1.0 * ~mask[:, None, :, None]

    hooks = [
        ("blocks.1.mlp_out", at_padding),
        ("blocks.0.mlp_out", halved),
        ("blocks.0.attn.scores", of_queries),
    ]
    with wide.hooks(hooks, receipts=True) as context:
        wide.model(texts[0], attention_mask=mask)
    receipts = {receipt.hook: receipt for receipt in context.receipts}
    for hook in (at_padding, of_queries):
        assert (receipts[hook].rows, receipts[hook].largest) == (0, 0)
    assert receipts[halved].rows == BATCH
    largest = float(cache["mlp_out", 0][mask].abs().max())
    assert receipts[halved].largest == pytest.approx(largest / 2)


def of_last_column(value, point):
    value[:, -1] = 0


def of_last_token(value, point):
    last = token_mask().flip(1).int().argmax(1)
    value[torch.arange(BATCH), POS - 1 - last] = 0


@pytest.mark.filterwarnings("error")
def test_a_function_that_changes_only_padding_gives_a_warning(wide, texts):
    right = torch.ones(BATCH, POS).bool()
    right[[1, 3], 4:] = False
    point = "blocks.1.mlp_out"

    def run(hook, mask, name=point):
        wide.run_with_hooks(texts[0], attention_mask=mask, hooks={name: hook})

    message = (
        rf"hook function at {point} changed only padding in texts 1, 3: column {POS - 1} .*pos=-1"
    )
    with pytest.warns(UserWarning, match=message):
        run(of_last_column, right)
    # The last column is a real token, or the function knows the padding, or it changes all columns.
    run(of_last_column, right.flip(1))
    run(of_last_column, torch.ones(BATCH, POS).bool())
    run(of_last_token, right)
    run(edits.zero(pos=-1), right)
    run(lambda value, point: value * 2, right)
    run(lambda value, point: value * (1 + token_mask()[..., None]), right)
    run(lambda value, point: value, right)
    run(lambda value, point: value * token_mask()[..., None], right)
    with pytest.warns(UserWarning, match="only padding in texts 1, 3"):
        run(lambda value, point: value + 1.0 * ~right[:, None, :, None], right, "*.0.attn.pattern")


@pytest.mark.filterwarnings("error")
def test_nan_at_padding_is_no_change():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    value = torch.randn(2, 3, 5)
    value[1, 2] = torch.nan
    edited = EditedPoint(Point("any", ("batch", "pos", "d_model")), (lambda value, point: value,))
    with reading(Piece(None, mask)):
        assert torch.equal(edited.apply(value)[mask], value[mask])


def all_kinds(source):
    """Return an edit of each kind at a point with the axes batch, pos and d_model, by name."""
    directions = torch.randn(10, 2, generator=torch.Generator().manual_seed(2)).double()
    return {
        "zero": edits.zero(pos=-1),
        "scale": edits.scale(0.3, pos=[0, 2]),
        "add": edits.add(directions[:, 0], 2.0),
        "replace": edits.replace(source, pos=1, source_pos=-1),
        "mean": edits.mean(source, across=("batch", "pos")),
        "resample": edits.resample(source, seed=3),
        "noise": edits.noise(0.2, seed=5, pos=slice(2, None)),
        "interchange": edits.interchange(source, directions),
        "project_out": edits.project_out(directions),
    }


@pytest.mark.parametrize("kind", all_kinds(torch.zeros(1, 1, 1)))
def test_an_edit_acts_the_same_in_another_process(wide, texts, source, kind):
    edit = all_kinds(source)[kind]
    again = pickle.loads(pickle.dumps(edit))
    assert repr(again) == repr(edit)
    runs = [wide.run_with_hooks(texts[0], hooks={"blocks.1.mlp_out": e}) for e in (edit, again)]
    assert torch.equal(*runs)
    blocked = edits.knockout(query=-1, key=0)
    again = pickle.loads(pickle.dumps(blocked))
    runs = [wide.run_with_hooks(texts[0], hooks={"*.scores": e}) for e in (blocked, again)]
    assert torch.equal(*runs)


def test_as_many_texts_as_columns(wide, texts):
    """The mask of 5 texts with 5 columns has the shape of a mask along the axis `batch`."""
    mask = torch.ones(BATCH, BATCH).bool()
    mask[1, 3:] = False
    tokens, others = texts[0][:, :BATCH], texts[1][:, :BATCH]
    _, source = wide.run_with_cache(others, attention_mask=mask, names="embed")
    columns = torch.tensor([[4], [2], [0], [1], [3]])
    rows = torch.arange(BATCH)

    def by_hand(value, point):
        value[rows, columns[:, 0]] = source["embed"][rows, columns[:, 0]]

    logits = [
        wide.run_with_hooks(tokens, attention_mask=mask, hooks={"embed": edit})
        for edit in (edits.replace(source, pos=columns), by_hand)
    ]
    assert torch.equal(*logits)


def test_a_trial_changes_nothing(wide, texts, source):
    value = wide.capture(texts[0], names="embed")["embed"]
    before = value.clone()
    for edit in (
        edits.zero(),
        edits.replace(source, pos=SPANS),
        edits.mean(source),
        edits.noise(1),
    ):
        edit.try_on(value, wide.points["embed"])
    assert torch.equal(value, before)
    # The new value of an edit by another package may not fit.
    wrong = edits.Edit("wrong", lambda region, source, place: region[:, :2])
    with pytest.raises(RuntimeError, match="size"):
        wrong.try_on(value, wide.points["embed"])


@pytest.mark.usefixtures("unchecked")
def test_edits_that_fit_no_point_are_errors_at_once(source):
    for wrong in (torch.zeros(3), torch.ones(3, 2), torch.ones(2, 3), torch.ones(3, 0)):
        with pytest.raises(ValueError, match="independent"):
            edits.project_out(wrong)
        with pytest.raises(ValueError, match="independent"):
            edits.interchange(source, wrong)
    for index in (1.5, None, "all", True, [0, True], [[1, 2], 3], [slice(2)], torch.ones(2, 3)):
        with pytest.raises(TypeError, match="integer"):
            edits.zero(pos=index)
    for index in (1.5, "all", [1]):
        with pytest.raises(TypeError, match="integer"):
            edits.all_but(index)
    for axis, close in (("heads", "head"), ("querry", "query"), ("d_heads", "d_head")):
        with pytest.raises(UnknownNameError, match=f"no axis.*'{axis}'.* {close}"):
            edits.zero(**{axis: 3})
    assert repr(edits.zero(expert=3)) == "edits.zero(expert=3)"  # an axis of a user's own point
    with pytest.raises(ValueError, match="across"):
        edits.mean(source, across=())
    with pytest.raises(TypeError, match="direction; got 2.0"):
        edits.add(2.0)
    with pytest.raises(TypeError, match="pairs"):
        HookedRunner(nn.Sequential(HookPoint("pos"))).edits(["embed"])
    with pytest.raises(ValueError, match="-1"), position_offset(-1):
        pass


def test_edits_work_without_declared_axes():
    """Edits also work at points whose keys are not tokens of the text, as in cross-attention."""
    runner, x = HookedRunner(nn.Sequential(nn.Linear(3, 5), nn.ReLU()).eval()), torch.ones(2, 3)
    source = runner.capture(2 * x, names="0")
    for given in (source, source["0"]):
        edited = runner.run_with_hooks(x, hooks={"0": edits.replace(given)})
        assert torch.equal(edited, source["0"].relu())
    with pytest.raises(UnknownNameError, match="none"):
        runner.run_with_hooks(x, hooks={"0": edits.zero(pos=1)})
    across = HookedRunner(nn.Sequential(HookPoint("batch query key")))
    edited = across.run_with_hooks(torch.ones(2, 3, 5), hooks={"0": edits.zero(query=-1, key=4)})
    assert edited.sum() == 2 * 3 * 5 - 2
    assert not edited[:, 2, 4].any()


def test_a_plan_runs_the_edits(wide, texts, source):
    mean = edits.mean(source, pos=SPANS)
    hooks = {"*.resid_pre": mean, "*.z": edits.noise(1.0), "*.scores": edits.knockout(key=[0, 2])}
    with wide.hooks(hooks):
        plan = wide.plan(texts[0])
        _, cache = wide.run_with_cache(texts[0])
    assert plan.nbytes == cache.nbytes
