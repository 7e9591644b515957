"""Find, steer, erase and exchange directions, compared with numpy, closed forms and models with
known weights.
"""

import copy
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import nn

from hooks import CacheError, EditError, HookedRunner, HookPoint, UnknownNameError
from hooks.base import all_but
from interp import edits, log_prob
from interp.directions import (
    Contrast,
    Direction,
    Moments,
    Probe,
    SteeringCurve,
    difference_of_means,
    erasure,
    leace,
    probe,
    steering_curve,
)
from interp.results.result import Result
from models import Transformer, TransformerConfig
from tests.interp.directions.lookup import embedded
from tests.shipped import pydoc

YES = ["part KV8 is", "part QX3", "see part ZQXJ-K", "a part ABC-7 of"]
NO = ["def f(x):", "return x", "import os, sys", "class A: pass", "for n in"]


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(pydoc()).double()


def rows_of(model, texts, name, pos):
    """Return values [row, d] at a point, from a separate run of each text."""
    values = [HookedRunner(model).run_with_cache(text)[1][name][0].flatten(1) for text in texts]
    return np.concatenate([(each if pos is None else each[[pos]]).numpy() for each in values])


@pytest.mark.parametrize(("site", "pos"), [("resid_post", -1), ("resid_post", None), ("z", -2)])
def test_a_difference_of_means_matches_numpy(model, site, pos):
    v = difference_of_means(model, Contrast(YES, NO, pos=pos, batch=2), site)
    assert len(v.vectors) == 4
    for name, vector in v.vectors.items():
        yes, no = rows_of(model, YES, name, pos), rows_of(model, NO, name, pos)
        expected = yes.mean(0) - no.mean(0)
        np.testing.assert_allclose(vector.numpy(), expected, rtol=1e-5, atol=1e-6)
        halfway = (yes.mean(0) + no.mean(0)) / 2
        assert v.offsets[name] == pytest.approx(float(-halfway @ expected), rel=1e-5)
        scores = v.scores({name: torch.tensor(np.stack([yes.mean(0), no.mean(0)]))})[name]
        assert scores[0] == pytest.approx(-float(scores[1]), rel=1e-4)
        assert scores[0] > 0
    assert v.about["yes"] == len(rows_of(model, YES, name, pos))
    assert v.about["rows"] - v.about["yes"] == len(rows_of(model, NO, name, pos))


def test_values_may_come_from_caches(model):
    runner, name = HookedRunner(model), "blocks.1.resid_post"
    caches = [runner.run_with_cache(texts)[1] for texts in (YES, NO)]
    for pos in (-1, None, [-2, -1]):
        expected = difference_of_means(model, Contrast(YES, NO, pos=pos), name)
        v = difference_of_means(model, Contrast(*caches, pos=pos), name)
        torch.testing.assert_close(v[name], expected[name], rtol=1e-6, atol=1e-6)
        assert v.about == expected.about
    without = HookedRunner(nn.Sequential(nn.Linear(128, 128)).eval()).run_with_cache(
        torch.ones(2, 128)
    )[1]
    with pytest.raises(ValueError, match="must be from a run on tokens"):
        difference_of_means(model, (without, caches[1]), name)
    # The values of these caches are a part of a run, but the tokens are still all tokens of the
    # run.
    _, cut = runner.run_with_cache(YES, pos=[-1])
    for part in (caches[0].at(batch=[1, 0]), cut):
        with pytest.raises(ValueError, match="got a part"):
            difference_of_means(model, (part, caches[1]), name)


def chosen_of(lengths, pos):
    """Yield the positions that `pos` selects in each text alone, by Python's own rules of
    indexing.
    """
    each = pos if isinstance(pos, list) and isinstance(pos[0], list) else [pos] * len(lengths)
    for length, index in zip(lengths, each, strict=True):
        numbers = [*range(length)]
        if index is None or isinstance(index, slice):
            yield numbers[index or slice(None)]
        elif type(index).__name__ == "AllBut":
            out = {numbers[place] for place in index.places}
            yield [n for n in numbers if n not in out]
        elif all(isinstance(place, bool) for place in index):
            yield [n for n in numbers if index[n]]
        else:
            yield [numbers[place] for place in index]


OWN = [[0, -1], [2], [-3, 1, 4], [3]]
POSITIONS = {
    "all": None,
    "after the first": slice(1, None),
    "two": slice(0, 2),
    "every third": slice(2, 40, 3),
    "backward": slice(4, 0, -1),
    "negative ends": slice(-3, -1),
    "both ends": slice(1, -1),
    "listed": [2, 0, -1],
    "all but": all_but(0, -2),
    "a mask": [False, True, True] + 20 * [False],
    "of each": OWN,
    "of both": [*OWN, [1], [0, 2], [5, 3], [-1], [4]],
    "masks of each": [[n == 1 or n == k for n in range(15)] for k in (2, 3, 5, 7)],
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pos", POSITIONS.values(), ids=POSITIONS)
def test_padding_is_not_an_example_for_any_form_of_positions(model, pos):
    name, runner = "blocks.1.resid_post", HookedRunner(model)
    kinds = [YES, NO if pos is POSITIONS["of both"] else NO[:4]]
    lengths = [[len(text) for text in texts] for texts in kinds]
    of_both = pos is POSITIONS["of both"]
    indices = [pos[:4], pos[4:]] if of_both else [pos, pos]
    means, counts = [], []
    for texts, sizes, index in zip(kinds, lengths, indices, strict=True):
        values = [runner.run_with_cache(text)[1][name][0].numpy() for text in texts]
        rows = [v[n] for v, n in zip(values, chosen_of(sizes, index), strict=True)]
        means.append(np.concatenate(rows).mean(0))
        counts.append(sum(map(len, rows)))
    caches = [runner.run_with_cache(texts)[1] for texts in kinds]
    for batch, given in ((1, kinds), (2, kinds), (4, kinds), (16, kinds), (16, caches)):
        v = difference_of_means(model, Contrast(*given, pos=pos, batch=batch), name)
        assert (v.about["yes"], v.about["rows"]) == (counts[0], sum(counts))
        np.testing.assert_allclose(v[name].numpy(), means[0] - means[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pos", [None, slice(1, None), slice(3, 40), slice(-2, None), all_but(-1)])
def test_columns_of_padding_on_the_left_are_no_examples(model, pos):
    """Positions 0, 1, ... are columns of the batch. Columns of padding are not examples."""
    name, runner = "blocks.1.resid_post", HookedRunner(model)
    caches, means, count = [], [], 0
    for texts in (YES, NO):
        width = max(map(len, texts))
        mask = torch.tensor([[n >= width - len(text) for n in range(width)] for text in texts])
        tokens = torch.zeros(mask.shape, dtype=torch.long)
        tokens[mask] = torch.cat([model.to_tokens(text).tokens[0] for text in texts])
        caches.append(runner.run_with_cache(tokens, attention_mask=mask)[1])
        rows = []
        for text in texts:
            columns = [*range(width - len(text), width)]
            if isinstance(pos, slice):
                kept = [n for n in columns if n >= pos.start] if pos.start > 0 else columns[pos]
            else:
                kept = columns if pos is None else columns[:-1]
            value = runner.run_with_cache(text)[1][name][0]
            rows.append(value[[n - columns[0] for n in kept]].numpy())
        means.append(np.concatenate(rows).mean(0))
        count += sum(map(len, rows))
    v = difference_of_means(model, Contrast(*caches, pos=pos), name)
    assert v.about["rows"] == count
    np.testing.assert_allclose(v[name].numpy(), means[0] - means[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_a_text_without_its_positions_is_refused_in_any_batch(model, batch):
    name = "blocks.1.resid_post"
    short = next(n for n, text in enumerate(YES) if len(text) == min(map(len, YES)))
    wrong = {
        f"pos of yes, text {short} must": slice(9, None),
        "pos of yes, text 1 must": [[0], [], [0], [0]],
        "pos of yes, text 2 must": [[0], [1], [99], [0]],
        "pos of yes must be given for each": [[0], [1]],
        "pos of no must be given for each text; got 4": [[0]] * 4,
        "for each text; got 2": [[0]] * 6,
        "for each of 5 texts of no; got 6": [[0]] * 10,
        "pos of yes, text 3 must be a mask of": [[True] * len(text) for text in YES[:3]] + [[True]],
        "pos of yes, text 0 must": [False, False, True] + [False] * 40 + [True],
    }
    for message, pos in wrong.items():
        with pytest.raises(ValueError, match=message):
            difference_of_means(model, Contrast(YES, NO, pos=pos, batch=batch), name)


def planted(size=3.0):
    """Return a model whose embeddings of the tokens 0 and 1 contain a known vector, and the
    vector.
    """
    torch.manual_seed(0)
    sizes = dict(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=8, d_mlp=11)
    options = dict(tied_unembed=False, final_norm=False, positions="none")
    model = Transformer(TransformerConfig(**sizes, **options)).double().eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.02)
    vector = torch.randn(8).double()
    model.token_embedding.weight.data[:2] += size * vector
    return model, vector


def test_a_planted_direction_is_found():
    model, vector = planted()
    yes, no = torch.tensor([[3, 0], [5, 1], [2, 0]]), torch.tensor([[0, 3], [1, 5], [4, 6], [1, 2]])
    v = difference_of_means(model, (yes, no), "resid_pre")
    for name in ("blocks.0.resid_pre", "blocks.1.resid_pre"):
        assert torch.cosine_similarity(v[name].double(), vector, dim=0) > 0.99


def test_steering_moves_a_logit_by_the_product_and_costs_the_kl():
    model, vector = planted()
    v = Direction({"blocks.1.resid_post": vector}, about={"by": "hand"})
    prompts, others = torch.tensor([[3, 2, 5], [1, 4, 6]]), torch.tensor([[2, 2], [5, 3], [6, 1]])
    strengths = [0.0, 0.5, -1.5]
    curve = steering_curve(
        model, v, prompts, strengths, lambda logits: logits[:, -1, 4], others=others
    )
    product = float(vector @ model.W_U[:, 4].detach())
    expected = torch.tensor(strengths).double()[:, None].expand(3, 2) * product
    torch.testing.assert_close(
        curve.score.values, expected.to(curve.score.values), rtol=1e-6, atol=1e-9
    )
    for strength, cost in zip(strengths, curve.kl.values, strict=True):
        before = model(others).log_softmax(-1)
        after = (model(others) + strength * (vector @ model.W_U)).log_softmax(-1)
        divergence = (before.exp() * (before - after)).sum(-1).mean(-1).detach()
        torch.testing.assert_close(cost, divergence.to(cost), rtol=1e-6, atol=1e-9)
    means = dict(zip(strengths, curve.kl.mean().tolist(), strict=True))
    best = max((s for s in strengths if means[s] <= means[0.5]), key=lambda s: s * product)
    assert curve.within(means[0.5]) == best
    with pytest.raises(ValueError, match="budget must be at least"):
        curve.within(-1.0)
    # An edit at the first position has no effect, because the last position does not read it here.
    early = steering_curve(model, v, prompts, [2.0], lambda logits: logits[:, -1, 4], pos=0)
    assert early.score.values.abs().max() < 1e-9
    with pytest.raises(ValueError, match="steering_curve with others="):
        early.within(1.0)
    assert "strengths" in repr(curve)
    assert "<iframe" in curve._repr_html_()


def test_a_direction_is_an_edit_of_its_own_points(model):
    v = difference_of_means(model, (YES, NO))
    runner, name = HookedRunner(model), "blocks.2.resid_post"
    steered = runner.run_with_hooks(
        NO[0], hooks={name: edits.add(v, scale=0.5, pos=slice(2, None))}
    )
    whole = torch.zeros(1, len(NO[0]), 128).double()
    whole[:, 2:] = 0.5 * v[2]
    by_hand = runner.run_with_hooks(NO[0], hooks={name: lambda value, point: value + whole})
    torch.testing.assert_close(steered, by_hand)
    assert steered.sub(model(NO[0])).abs().max() > 0.1
    with pytest.raises(UnknownNameError, match="point of this direction"):
        runner.run_with_hooks(NO[0], hooks={"blocks.1.mlp_out": edits.add(v)})
    assert [*v.at(1, "blocks.3.resid_post").vectors] == [
        "blocks.1.resid_post",
        "blocks.3.resid_post",
    ]
    assert v.unit()[1].norm() == pytest.approx(1)
    assert repr(edits.add(v, 2.0)).startswith("edits.add(")


@pytest.mark.usefixtures("unchecked")
def test_a_place_of_a_direction_has_the_forms_of_a_key_of_a_cache():
    names = ["blocks.2.resid_post", "blocks.5.resid_post", "blocks.3.mlp_out", "encoder"]
    v = Direction({name: torch.tensor([float(number)]) for number, name in enumerate(names)})
    assert v["resid_post", 5] == v["blocks.5.resid_post", 5] == v[5] == v[np.int64(5)] == 1
    # Layer -1 is the last layer that has a vector at such a point.
    assert v["resid_post", -1] == 1
    assert v["mlp_out", -1] == v[3] == 2
    assert v[-1] == 1
    assert v[-4] == 0
    assert [*v.at(("resid_post", 2), -1, "encoder").vectors] == [names[0], names[1], names[3]]
    both = Direction({"blocks.2.resid_post": torch.ones(1), "blocks.2.mlp_out": torch.zeros(1)})
    assert both["mlp_out", 2] == 0
    with pytest.raises(ValueError, match="resid_post and blocks.2.mlp_out"):
        both[2]
    for missing in (("resid_post", 3), ("post", 2), ("encoder", 0), 4, -7, "resid_post"):
        with pytest.raises(UnknownNameError, match="point of this direction"):
            v[missing]
    for wrong in (2.5, None, (2, "resid_post"), ("resid_post", "2"), ("resid_post", 2, 3)):
        with pytest.raises(TypeError, match="a layer, the name of a point, or a pair"):
            v[wrong]


def values_and_labels(rank=6, rows=40):
    """Return values in a space of few dimensions, like outputs of a norm, and labels that depend on
    the values.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, 9)) + rng.normal(size=9)
    z = (x @ rng.normal(size=9) + rng.normal(size=rows) > 0).astype(float)
    return x, z


@pytest.mark.parametrize("rank", [6, 9])
def test_an_erased_label_cannot_be_read_and_the_change_is_the_smallest(rank):
    x, z = values_and_labels(rank)
    eraser = leace(Moments.of(torch.tensor(x), torch.tensor(z)[:, None]))
    erased = eraser(torch.tensor(x)).numpy()
    cross = (x - x.mean(0)).T @ (z - z.mean()) / len(x)
    after = (erased - erased.mean(0)).T @ (z - z.mean()) / len(x)
    assert np.abs(after).max() <= 1e-10 * np.abs(cross).max()
    # For two classes, the formula is x - s (s' Σ⁺ (x - mean)) / (s' Σ⁺ s). Here s is the covariance
    # of values and labels, and Σ⁺ is the pseudoinverse of the covariance of values.
    inverse = np.linalg.pinv(np.cov(x.T, bias=True), rcond=1e-10, hermitian=True)
    expected = x - np.outer((x - x.mean(0)) @ inverse @ cross, cross) / (cross @ inverse @ cross)
    np.testing.assert_allclose(erased, expected, rtol=0, atol=1e-8)

    def loss(weights):
        logits = erased @ weights[:-1] + weights[-1]
        return float(np.mean(np.logaddexp(0, logits) - z * logits))

    share = z.mean()
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    best = scipy.optimize.minimize(loss, np.zeros(10), method="BFGS").fun
    assert best == pytest.approx(entropy, abs=1e-7)
    assert eraser(torch.tensor(x).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("rank", "labels"), [(9, 1), (6, 1), (9, 3)])
def test_erasure_matches_the_library_concept_erasure(rank, labels):
    theirs = pytest.importorskip("concept_erasure", reason="needs concept-erasure")
    torch.manual_seed(0)
    x = torch.randn(200, rank).double() @ torch.randn(rank, 9).double() + torch.randn(9)
    z = torch.nn.functional.one_hot((x @ torch.randn(9, 3).double()).argmax(1), 3)[
        :, :labels
    ].double()
    fitter = theirs.LeaceFitter(9, labels, dtype=torch.float64, shrinkage=False)
    expected = fitter.update(x, z).eraser(x)
    torch.testing.assert_close(leace(Moments.of(x, z))(x), expected, rtol=1e-10, atol=1e-10)
    assert (expected - x).abs().max() > 0.5


def test_moments_of_parts_match_all_rows():
    x, z = values_and_labels()
    x, z = torch.tensor(x), torch.tensor(z)[:, None]
    parts = [Moments.of(x[part], z[part]) for part in (slice(0, 3), slice(3, 4), slice(4, None))]
    together, whole = parts[0] + parts[1] + parts[2], Moments.of(x, z)
    assert together.n == whole.n
    for name in ("mean", "products"):
        torch.testing.assert_close(
            getattr(together, name), getattr(whole, name), rtol=1e-12, atol=1e-12
        )
    with pytest.raises(ValueError, match="at least 2 rows"):
        leace(parts[1])


@pytest.mark.parametrize("site", ["resid_post", "attn.z"])
def test_an_erasure_is_an_edit_at_its_points(model, site):
    found = erasure(model, (YES, NO), site)
    runner, name = HookedRunner(model), f"blocks.3.{site}"
    rows = {}
    for label, texts in ((1, YES), (0, NO)):
        for text in texts:
            with runner.hooks({name: found.edit(pos=-1)}):
                value = runner.run_with_cache(text)[1][name][0]
            plain = runner.run_with_cache(text)[1][name][0]
            torch.testing.assert_close(value[:-1], plain[:-1])
            rows.setdefault(label, []).append(value[-1])
    means = [torch.stack(rows[label]).mean(0) for label in (0, 1)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-9)
    with pytest.raises(Exception, match=rf"one of blocks.0.{site}.*; got blocks.1.mlp_out"):
        runner.run_with_hooks(NO[0], hooks={"blocks.1.mlp_out": found.edit()})
    if site == "attn.z":
        with pytest.raises(EditError, match="all 128 .*got 32"):
            runner.run_with_hooks(NO[0], hooks={name: found.edit(head=2)})


def test_a_direction_over_all_heads_of_a_position(model):
    v, name = difference_of_means(model, (YES, NO), "z"), "blocks.1.attn.z"
    runner = HookedRunner(model)
    plain = runner.run_with_cache(YES[0])[1][name]
    with runner.hooks({name: edits.add(v, 0.5, head=[1, 3], pos=-1)}):
        changed = runner.run_with_cache(YES[0])[1][name]
    expected = plain.clone()
    expected[:, -1, [1, 3]] += 0.5 * v[1].view(4, 32)[[1, 3]]
    torch.testing.assert_close(changed, expected)
    scores = v.scores({name: plain})[name]
    by_hand = np.einsum("bphd,hd->bp", plain.numpy(), v[1].view(4, 32).numpy())
    np.testing.assert_allclose(scores.numpy(), by_hand + v.offsets[name], rtol=1e-5, atol=1e-6)


def test_a_vector_without_length_has_no_unit():
    for wrong in (0.0, math.inf):
        with pytest.raises(ValueError, match="must be above 0 .*at here"):
            Direction({"there": torch.ones(3), "here": torch.full((2,), wrong)}).unit()


def test_files_hold_directions(model, tmp_path):
    v = difference_of_means(model, (YES, NO))
    v.save(tmp_path / "v.safetensors")
    again = Direction.load(tmp_path / "v.safetensors")
    assert again.offsets == v.offsets
    assert again.about == v.about
    assert all(torch.equal(again[n], v[n]) for n in range(4))
    (tmp_path / "other").write_bytes(b"no")
    with pytest.raises(CacheError, match="must be a complete direction"):
        Direction.load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"\.html, \.json, .*got .*v\.png"):
        v.save(tmp_path / "v.png")
    odd = Direction({"here": torch.ones(3)}, {"here": math.inf}, {"scale": math.nan})
    odd.save(tmp_path / "odd")
    again = Direction.load(tmp_path / "odd")
    assert again.offsets == odd.offsets
    assert math.isnan(again.about["scale"])


def test_files_hold_probes(tmp_path):
    names = ["blocks.0.resid_post", "blocks.1.resid_post"]
    vectors = {names[0]: torch.tensor([3.0, -1.0, 2.0]), names[1]: torch.tensor([4.0, 0.5, 7.0])}
    direction = Direction(vectors, {names[0]: -2.0}, {"method": "probe", "folds": 5})
    axes, labels = ("point", "example"), {"point": ["0.resid_post", "1.resid_post"]}
    folds = torch.tensor([[0.5, 0.75, 0.625, 0.5], [1.0, 0.875, 1.0, 0.75]])
    auroc = Result(folds, axes, labels=labels, bounds=(0.0, 1.0), unit="AUROC")
    control = Result(folds.flip(1) / 2, axes, labels=labels)
    made = Probe(direction, auroc, control)
    made.save(tmp_path / "probe.safetensors")
    again = Probe.load(tmp_path / "probe.safetensors")
    assert again.about == {"method": "probe", "folds": 5}
    assert again.direction.offsets == {names[0]: -2.0}
    assert [*again.direction.vectors] == names
    assert all(torch.equal(again.direction[name], vectors[name]) for name in names)
    assert torch.equal(again.auroc.values, folds)
    assert torch.equal(again.control.values, folds.flip(1) / 2)
    assert (again.auroc.bounds, again.auroc.unit) == ((0.0, 1.0), "AUROC")
    assert repr(again) == repr(made)
    (best,) = again.top(1)
    assert (best.where["point"], best.effect) == ("1.resid_post", 0.90625)
    direction.save(tmp_path / "direction.safetensors")
    with pytest.raises(CacheError, match="must be a complete probe"):
        Probe.load(tmp_path / "direction.safetensors")


def curve_of_three():
    """Return a steering curve whose strengths are not sorted."""
    axes, labels = ("strength", "example"), {"strength": [2.0, -1.0, 0.5]}
    score = Result(
        torch.tensor([[3.0, 5.0, 4.0, 4.0], [-1.0, 1.0, 0.0, 0.0], [0.5, 1.5, 1.0, 1.0]]),
        axes,
        labels=labels,
        unit="nats",
    )
    kl = Result(score.values.square(), axes, labels=labels, unit="nats")
    return SteeringCurve((2.0, -1.0, 0.5), score, kl)


def test_a_steering_curve_is_a_table():
    pytest.importorskip("pandas", reason="optional")
    curve = curve_of_three()
    table = curve.to_dataframe()
    assert [*table["strength"]] == [2.0, -1.0, 0.5]
    assert [*table["score"]] == [4.0, 0.0, 1.0]
    assert [*table["KL"]] == [16.5, 0.5, 1.125]
    low, high = curve.score.interval()
    assert [*table["score_low"]] == low.tolist()
    assert [*table["score_high"]] == high.tolist()
    assert [*table["KL_high"]] == curve.kl.interval().high.tolist()
    alone = replace(curve, kl=None).to_dataframe()
    assert [*alone.columns] == ["strength", "score", "score_low", "score_high"]


def test_a_printed_steering_curve_names_the_change_of_the_score_and_its_base():
    curve = curve_of_three()
    curve = replace(curve, score=replace(curve.score, base=torch.tensor([4.0, 5.0, 2.0, 7.0])))
    assert repr(curve).splitlines()[0] == (
        "SteeringCurve of 3 strengths, means over texts; change of score in nats, base +4.5; "
        "KL in nats"
    )
    # Without other texts, there is no KL.
    assert repr(replace(curve, kl=None)).splitlines()[0].endswith("base +4.5")


def test_a_steering_curve_is_a_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="optional")
    curve = curve_of_three()
    score, kl = curve.plot().axes
    assert (score.get_ylabel(), kl.get_ylabel()) == ("score (nats)", "KL (nats)")
    assert kl.get_xlabel() == "strength"
    # The line goes from the smallest to the largest strength; the first line is at 0.
    x, y = score.lines[1].get_data()
    assert ([*x], [*y]) == ([-1.0, 0.5, 2.0], [0.0, 1.0, 4.0])
    assert [*kl.lines[1].get_ydata()] == [0.5, 1.125, 16.5]
    band = score.collections[0].get_paths()[0].vertices
    ends = curve.score.interval()
    assert {*ends.low.tolist(), *ends.high.tolist()} == {float(y) for y in band[:, 1]}
    curve.save(tmp_path / "curve.png")
    assert len(replace(curve, kl=None).plot().axes) == 1


def probe_of_two():
    """Return probes of two points, without their directions."""
    axes, labels = ("point", "example"), {"point": ["0.resid_post", "1.resid_post"]}
    auroc = Result(torch.tensor([[0.5, 0.75], [1.0, 0.5]]), axes, labels=labels, unit="AUROC")
    control = Result(torch.tensor([[0.25, 0.5], [0.5, 0.75]]), axes, labels=labels)
    return Probe(Direction({}), auroc, control)


def test_probes_have_the_table_and_the_plot_of_their_auroc():
    pytest.importorskip("pandas", reason="optional")
    pytest.importorskip("matplotlib", reason="optional")
    table = probe_of_two().to_dataframe()
    assert [*table.columns] == ["point", "auroc", "low", "high", "control"]
    assert [*table["point"]] == ["0.resid_post", "1.resid_post"]
    assert [*table["auroc"]] == [0.625, 0.75]
    assert [*table["control"]] == [0.375, 0.625]
    bars = probe_of_two().plot().axes[0].patches
    assert [bar.get_height() for bar in bars] == [0.625, 0.75]


@pytest.mark.parametrize(
    ("name", "way"),
    [("accuracy", "probe.auroc"), ("predict", "value @ probe.direction"), ("coef_", "direction")],
)
def test_a_probe_names_the_way_to_what_it_lacks(name, way):
    with pytest.raises(AttributeError, match=way):
        getattr(probe_of_two(), name)


def test_control_vectors_match_llama_cpp(model, tmp_path):
    gguf = pytest.importorskip("gguf")
    v = difference_of_means(model, (YES, NO)).at(1, 3)
    v.to_gguf(tmp_path / "v.gguf", "gpt2")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == "controlvector"
    assert facts["controlvector.model_hint"] == "gpt2"
    assert facts["controlvector.layer_count"] == 2
    assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.3"]
    np.testing.assert_array_equal(reader.tensors[1].data, v[3].numpy())
    again = Direction.from_gguf(tmp_path / "v.gguf")
    assert torch.equal(again[1], v[1])
    v.save(tmp_path / "saved.GGUF")
    assert gguf.GGUFReader(tmp_path / "saved.GGUF").tensors[0].name == "direction.1"
    assert torch.equal(Direction.load(tmp_path / "saved.GGUF")[3], v[3])
    for name in ("v", "v.safetensors"):
        with pytest.raises(ValueError, match=rf"must end in \.gguf; got .*{name}"):
            v.to_gguf(tmp_path / name)
    for wrong in (
        difference_of_means(model, (YES, NO)).at(0),
        difference_of_means(model, (YES, NO), "mlp_out").at(1),
    ):
        with pytest.raises(ValueError, match="must be resid_post of layer 1"):
            wrong.to_gguf(tmp_path / "w.gguf")
    assert not (tmp_path / "w.gguf").exists()
    whole = (tmp_path / "v.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:60])
    with pytest.raises(CacheError, match="must be a complete control vector in GGUF"):
        Direction.from_gguf(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(whole.replace(b"controlvector", b"controlvectoq"))
    with pytest.raises(CacheError, match="must have the architecture controlvector"):
        Direction.from_gguf(tmp_path / "other.gguf")


def write_as_repeng(path, tensors, kind=None):
    """Write a control vector with the calls of repeng's `export_gguf`, in a number type of GGUF."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, numbers in tensors.items():
        stored = numbers if kind is None else gguf.quantize(numbers, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_control_vectors_are_read_in_each_type(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    numbers = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    names = ("direction.5", "direction.12")
    tensors = {**dict(zip(names, numbers, strict=True)), "extra": numbers[:, :32].copy()}
    write_as_repeng(tmp_path / "v.gguf", tensors, gguf.GGMLQuantizationType[kind])
    read = Direction.from_gguf(tmp_path / "v.gguf")
    assert [*read.vectors] == ["blocks.5.resid_post", "blocks.12.resid_post"]
    # Q8_0 has blocks of 32 numbers, each with a scale in half precision.
    if kind == "Q8_0":
        blocks = numbers.reshape(2, 2, 32).astype(np.float64)
        scale = np.abs(blocks).max(-1, keepdims=True) / 127
        expected = (np.round(blocks / scale) * scale.astype(np.float16)).reshape(2, 64)
    else:
        types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        expected = torch.tensor(numbers).to(types[kind]).double().numpy()
    for layer, row in zip((5, 12), expected, strict=True):
        assert read[layer].dtype == torch.float32
        np.testing.assert_allclose(read[layer].double().numpy(), row, rtol=1e-6)


def test_files_that_are_not_a_control_vector_are_errors_of_one_line(tmp_path):
    path, vector = tmp_path / "v.gguf", np.arange(32, dtype=np.float32)
    wrong = {
        r"one length; got shapes \[\(16,\), \(32,\)\]": {
            "direction.1": vector,
            "direction.2": vector[:16],
        },
        r"one length; got shapes \[\(4, 8\)\]": {"direction.1": vector.reshape(4, 8)},
        r"got shapes \[\]": {"other": vector},
        "'first'": {"direction.first": vector},
    }
    for message, tensors in wrong.items():
        write_as_repeng(path, tensors)
        with pytest.raises(CacheError, match=message):
            Direction.from_gguf(path)
    write_as_repeng(path, {"direction.1": vector, "direction.2": vector})
    whole = path.read_bytes()
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CacheError, match=r"v\.gguf must be a complete control") as raised:
            Direction.from_gguf(path)
        assert "\n" not in str(raised.value)
    # The header says that an array has 2^40 bytes, but the file has 200.
    pieces = [b"GGUF", struct.pack("<IQQ", 3, 0, 1), struct.pack("<Q", 1), b"a"]
    path.write_bytes(b"".join([*pieces, struct.pack("<IIQ", 9, 0, 2**40)]).ljust(200, b"\0"))
    with pytest.raises(CacheError, match="must have 1 numbers at byte 200"):
        Direction.from_gguf(path)


def test_several_points_may_be_named(model):
    """Points are named by their site or by their full name. A repeated name counts once."""
    names = ["attn_out", "blocks.1.mlp_out", "blocks.0.attn_out"]
    found = difference_of_means(model, (YES, NO), names)
    sizes = range(model.config.n_layers)
    assert [*found.vectors] == [*(f"blocks.{n}.attn_out" for n in sizes), "blocks.1.mlp_out"]
    alone = difference_of_means(model, (YES, NO), "mlp_out").vectors["blocks.1.mlp_out"]
    assert torch.equal(found.vectors["blocks.1.mlp_out"], alone)


def test_a_score_may_be_a_metric_of_words(model):
    v = difference_of_means(model, (YES, NO)).at(2)
    curve = steering_curve(model, v, YES, [0.0, 1.0], log_prob("8"), others=NO)
    assert curve.score.unit == "nats"
    assert curve.kl.bounds == (0, math.inf)
    few = steering_curve(model, v, YES[:1], [1.0], log_prob("8"), others=NO[:1])
    assert "nan" not in repr(few)
    assert float(curve.kl.mean()[0]) == pytest.approx(0, abs=1e-9)
    assert float(curve.kl.mean()[1]) > 0


@pytest.mark.parametrize("kind", ["logistic", "linear"])
def test_a_probe_finds_what_is_planted_and_its_control_does_not(kind):
    linear = pytest.importorskip("sklearn.linear_model", reason="needs the extra probes")
    torch.manual_seed(0)
    planted, noise = torch.randn(6), 0.4 * torch.randn(80, 6)
    values = noise + planted * (torch.arange(80) < 40)[:, None]
    yes, no = torch.arange(40)[:, None], torch.arange(40, 80)[:, None]
    found = probe(
        embedded(values), (yes, no), "1", kind=kind, folds=4, C=0.01 if kind == "linear" else 1.0
    )
    assert float(found.auroc.mean()) > 0.99
    ends = found.control.interval()
    assert float(ends.low) < 0.5 < float(ends.high)
    assert float(found.selectivity.mean()) == pytest.approx(
        float(found.auroc.mean() - found.control.mean())
    )
    assert torch.cosine_similarity(found.direction["1"], planted, dim=0) > 0.9
    # The direction is fitted on all texts. It equals scikit-learn's classifier on standardised
    # values.
    x, labels = values.numpy(), np.arange(80) < 40
    scaled = (x - x.mean(0)) / x.std(0)
    if kind == "logistic":
        expected = (
            linear.LogisticRegression(max_iter=1000).fit(scaled, labels).decision_function(scaled)
        )
    else:
        expected = linear.Ridge(alpha=100).fit(scaled, 2.0 * labels - 1).predict(scaled)
    scores = found.direction.scores({"1": values})["1"].numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)
    assert "Probe at 1 point," in repr(found)
    assert "<iframe" in found._repr_html_()


def test_positions_are_scored_separately_in_one_pass():
    """Only the second of three positions shows which kind a text has."""
    pytest.importorskip("sklearn", reason="needs the extra probes")
    torch.manual_seed(0)
    values = torch.randn(43, 7)
    values[:20, 2] += 9
    yes, no = (torch.randint(20, 43, (n, 3)) for n in (22, 18))
    yes[:, 1] = torch.randint(0, 20, (22,))
    found = probe(
        embedded(values), Contrast(yes, no, pos=[0, 1, 2]), "1", over="pos", draws=2, seed=2
    )
    assert found.auroc.axes == ("point", "pos", "example")
    assert found.auroc.labels["pos"] == (0, 1, 2)
    first, second, third = found.auroc.mean()[0].tolist()
    assert second == 1
    assert max(abs(first - 0.5), abs(third - 0.5)) < 0.25
    alone = probe(embedded(values), Contrast(yes, no, pos=1), "1", draws=2, seed=2)
    torch.testing.assert_close(found.auroc.values[:, 1], alone.auroc.values)
    torch.testing.assert_close(found.control.values[:, 1], alone.control.values)
    together = probe(embedded(values), Contrast(yes, no, pos=[0, 1, 2]), "1")
    assert torch.equal(found.direction["1"], together.direction["1"])
    ends = found.auroc.interval()
    assert 0.6 < float(ends.low[0, 1]) < 0.95
    assert float(ends.high[0, 1]) == 1
    assert f"  1 1  1.000 [{float(ends.low[0, 1]):.3f}, 1.000]" in repr(found)
    listed = Contrast(yes, no, pos=[2, -2])
    swapped = probe(embedded(values), listed, "1", over="pos", draws=2, seed=2).auroc
    assert swapped.labels["pos"] == (2, -2)
    torch.testing.assert_close(swapped.values, found.auroc.values[:, [2, 1]])
    # If the positions are a mask, or differ between texts, the axis has no labels.
    of_each = [[0, 1], [2, 0]] * 20
    for other in ([True, True, False], of_each):
        labels = probe(
            embedded(values), Contrast(yes, no, pos=other), "1", over="pos", draws=1
        ).auroc.labels
        assert labels["pos"] == (0, 1)
    texts = [[21, 1, 22], [23, 2], [21, 3], [24, 4]], [[21, 22], [23, 24]]
    with pytest.raises(ValueError, match="same number of positions"):
        probe(embedded(values), Contrast(*texts, pos=None, batch=1), "1", over="pos", folds=2)


def test_prompts_may_have_strengths_of_their_own(model):
    v, name = torch.randn(128).double(), "blocks.1.resid_post"
    strengths, runner = torch.tensor([0.5, -2.0]).double(), HookedRunner(model)
    both = runner.run_with_hooks(
        ["ab", "cd"], hooks={name: edits.add(strengths[:, None, None] * v)}
    )
    for row, text, strength in zip(both, ("ab", "cd"), strengths, strict=True):
        alone = runner.run_with_hooks(text, hooks={name: edits.add(v, float(strength))})
        torch.testing.assert_close(row, alone[0])


def test_a_component_is_set_by_two_edits(model):
    v, name = torch.randn(128).double(), "blocks.1.resid_post"
    unit = v / v.norm()
    set_to_4 = [(name, edits.project_out(v)), (name, edits.add(unit, 4.0))]
    with HookedRunner(model).hooks(set_to_4):
        _, cache = HookedRunner(model).run_with_cache("abc")
    torch.testing.assert_close(cache[name] @ unit, torch.full((1, 3), 4.0).double())


def test_examples_of_one_text_are_never_in_two_folds():
    """Each text has its own random vector, which is the same at all positions of the text.

    So a probe that sees a part of a text in training would know the label of the rest.
    """
    pytest.importorskip("sklearn", reason="needs the extra probes")
    torch.manual_seed(1)
    values = torch.randn(60, 100)
    yes, no = torch.arange(30)[:, None].expand(30, 4), torch.arange(30, 60)[:, None].expand(30, 4)
    found = probe(embedded(values), Contrast(yes, no, pos=None), "1")
    assert found.direction.about["rows"] == 240
    assert 0.3 < float(found.auroc.mean()) < 0.7


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def random_letters(n, seed=0):
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice([*LETTERS], 12)) for _ in range(n)]


def test_copies_of_a_text_are_never_in_two_folds(model):
    """Random letters carry no information, for any number of copies of each text."""
    pytest.importorskip("sklearn", reason="needs the extra probes")
    texts = random_letters(24)
    yes, no, site = texts[:12], texts[12:], ["blocks.1.resid_post", "blocks.3.mlp_out"]
    once = probe(model, (yes, no), site)
    # The loss is a sum over examples. With four times as many examples, use a quarter of C.
    for copies, batch in ((yes * 4, 16), ([text for text in yes for _ in range(4)], 5)):
        often = probe(model, Contrast(copies, no * 4, batch=batch), site, C=0.25)
        assert often.auroc.counts == once.auroc.counts == (2.4, 2.4)
        torch.testing.assert_close(often.auroc.values, once.auroc.values)
        torch.testing.assert_close(often.control.values, once.control.values, atol=0.03, rtol=0)
        for end, same in zip(often.auroc.interval(), once.auroc.interval(), strict=True):
            torch.testing.assert_close(end, same)
    often = probe(model, (yes * 4, no * 4), site)
    assert (often.auroc.interval().low < 0.6).all()
    assert often.direction.about["rows"] == 96
    every = probe(model, Contrast(yes * 4, no * 4, pos=[0, -1]), site, over="pos")
    assert float(every.auroc.interval().low.max()) < 0.6
    assert float((every.control.mean() - 0.5).abs().max()) < 0.2


@pytest.mark.parametrize("kind", ["logistic", "linear"])
def test_folds_of_texts_that_come_several_times_match_scikit_learn(kind):
    """The folds are made by hand: all copies of a text are in the same fold, and are scored once.

    The fit uses all copies.
    """
    metrics = pytest.importorskip("sklearn.metrics", reason="needs the extra probes")
    linear = pytest.importorskip("sklearn.linear_model")
    torch.manual_seed(5)
    values = torch.randn(17, 4) + 0.7 * (torch.arange(17) < 8)[:, None]
    times = [5, 1, 1, 2, 1, 1, 3, 1, 1, 4, 1, 1, 1, 2, 1, 1, 7]
    yes, no = ([n for n in rows for _ in range(times[n])] for rows in (range(8), range(8, 17)))
    yes, no = (np.random.default_rng(1).permutation(each).tolist() for each in (yes, no))
    found = probe(
        embedded(values),
        (torch.tensor(yes)[:, None], torch.tensor(no)[:, None]),
        "1",
        folds=3,
        kind=kind,
        seed=6,
        draws=2,
    )
    # Texts have the number of their first occurrence. The texts of `no` are assigned to folds
    # first.
    draw, fold = torch.Generator().manual_seed(6), np.zeros(17, int)
    for each in (no, yes):
        texts = np.array([*dict.fromkeys(each)])
        fold[texts[torch.randperm(len(texts), generator=draw)]] = np.arange(len(texts)) % 3
    rows, expected = np.array(yes + no), []
    x, labels = values.double().numpy(), np.arange(17) < 8
    for n in range(3):
        kept = rows[fold[rows] != n]
        mean, spread = x[kept].mean(0), x[kept].std(0)
        scaled = (x - mean) / spread
        if kind == "logistic":
            made = linear.LogisticRegression(max_iter=1000).fit(scaled[kept], labels[kept])
            scores = made.decision_function(scaled)
        else:
            made = linear.Ridge(alpha=1.0).fit(scaled[kept], 2.0 * labels[kept] - 1)
            scores = made.predict(scaled)
        held = fold == n
        expected.append(metrics.roc_auc_score(labels[held], scores[held]))
    np.testing.assert_allclose(found.auroc.values[0].numpy(), expected)
    assert found.auroc.counts == pytest.approx((8 / 3, 3))
    assert found.control.counts == pytest.approx((17 / 6, 17 / 6))


def left_padded(model, texts, width=15):
    """Return a cache of a batch of texts with padding on the left."""
    mask = torch.tensor([[n >= width - len(text) for n in range(width)] for text in texts])
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.cat([model.to_tokens(text).tokens[0] for text in texts])
    return HookedRunner(model).run_with_cache(tokens, attention_mask=mask)[1]


@pytest.mark.parametrize("pos", [-1, [-5, -1], "of each"])
@pytest.mark.parametrize("given", ["texts", "caches", "both"])
def test_a_text_of_both_kinds_is_in_one_fold(model, given, pos):
    """With the same texts in both kinds, a probe cannot find anything, and the AUROC is about 0.5.

    If a text were in training with one label and in the test with the other, the AUROC would be 0.
    """
    pytest.importorskip("sklearn", reason="needs the extra probes")
    texts = random_letters(13, seed=3)
    yes, no = [*texts, texts[4]], [*reversed(texts), *texts[2:6]]
    where = {
        "-1": -1,
        "[-5, -1]": [-5, -1],
        "of each": [[-1 - n % 5] for n in range(len(yes) + len(no))],
    }
    name = "blocks.2.resid_post"
    if given != "texts":
        no = left_padded(model, no)
    if given == "caches":
        yes = left_padded(model, yes, 20)
    found = probe(model, Contrast(yes, no, pos=where[str(pos)]), name, draws=3, folds=4)
    # With "of each", the values of a text in the two kinds come from different positions, so they
    # are not equal.
    if pos != "of each":
        # The AUROC compares each example with all examples of the other kind. Rounding decides the
        # comparison of a text with itself, which is one of 3 or 4 comparisons.
        assert float((found.auroc.values - 0.5).abs().max()) < 0.5 / 3 + 1e-6
    assert found.auroc.counts == (13 / 4, 13 / 4)
    assert found.control.counts == (13 / 8, 13 / 8)
    assert 0.1 < float(found.control.mean()) < 0.9
    # Only some of the texts are in both kinds.
    mixed = probe(model, (texts[:9], texts[5:]), name, folds=3)
    assert mixed.auroc.counts == (3, 8 / 3)
    assert mixed.control.counts == pytest.approx((13 / 6, 13 / 6))
    with pytest.raises(ValueError, match="got 5 texts for 3 folds"):
        probe(model, (texts[:4], texts[1:5]), name, folds=3)
    with pytest.raises(ValueError, match=r"\(2 and 3\); got 3"):
        probe(model, (texts[:2] * 5, texts[2:5] * 2), name, folds=3)


class Seeing(nn.Module):
    """A model that adds a picture to the embeddings of its tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.point = nn.Embedding(7, 4), HookPoint("batch pos d_model")

    def forward(self, tokens, picture):
        return self.point(self.embedding(tokens) + picture[:, None])


def test_the_same_words_with_other_pictures_are_other_texts():
    """A cache does not contain the images of its run. So texts with equal tokens are copies only if
    their values are equal too.
    """
    pytest.importorskip("sklearn", reason="needs the extra probes")
    torch.manual_seed(0)
    model = Seeing().eval()
    pictures = torch.randn(24, 4)
    kind = 3 * torch.tensor([1.0, 0, 0, 0])
    tokens = torch.tensor([[3, 1]] * 12)
    runner = HookedRunner(model)
    yes, no = pictures[:12] + kind, pictures[12:]
    caches = [runner.run_with_cache(tokens, picture)[1] for picture in (yes, no)]
    found = probe(model, caches, "point")
    assert found.auroc.counts == (2.4, 2.4)
    assert float(found.auroc.mean()) > 0.8
    copied = [runner.run_with_cache(tokens, torch.cat([each[:6]] * 2))[1] for each in (yes, no)]
    assert probe(model, copied, "point", folds=3).auroc.counts == (2, 2)


def test_the_auroc_of_a_fold_matches_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="needs the extra probes")
    linear = pytest.importorskip("sklearn.linear_model")
    torch.manual_seed(2)
    values = torch.randn(12, 3) + 0.8 * (torch.arange(12) < 6)[:, None]
    found = probe(
        embedded(values),
        (torch.arange(6)[:, None], torch.arange(6, 12)[:, None]),
        "1",
        folds=2,
        seed=4,
    )
    # The folds are drawn from the seed as documented: first for the texts of `no` (6 to 11), then
    # for the texts of `yes`.
    draw, fold = torch.Generator().manual_seed(4), np.zeros(12, int)
    for each in (np.arange(6, 12), np.arange(6)):
        fold[each[torch.randperm(6, generator=draw)]] = np.arange(6) % 2
    x, labels, expected = values.double().numpy(), np.arange(12) < 6, []
    for n in range(2):
        kept = fold != n
        mean, spread = x[kept].mean(0), x[kept].std(0)
        made = linear.LogisticRegression(max_iter=1000).fit((x[kept] - mean) / spread, labels[kept])
        expected.append(
            metrics.roc_auc_score(labels[~kept], made.decision_function((x[~kept] - mean) / spread))
        )
    np.testing.assert_allclose(found.auroc.values[0].numpy(), expected)


@pytest.mark.parametrize("kind", ["logistic", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_columns_have_no_coefficient(kind, dtype):
    """The classifier equals scikit-learn's pipeline, which does not change constant columns."""
    linear = pytest.importorskip("sklearn.linear_model", reason="needs the extra probes")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    torch.manual_seed(0)
    values = torch.randn(46, 5).double() * torch.tensor([1.0, 1e-4, 30.0, 1.0, 1e-9]).double()
    values[:23, 2] += 40
    constants = torch.tensor([0.1, -1e6, 0.0, 1 / 3]).double().expand(46, 4).clone()
    constants[:, 3] += 1e-8 * torch.randn(46).double()  # in float32, this column is constant too
    model = embedded(torch.cat([values, constants], 1)).to(dtype)
    model[0].weight.data = torch.cat([values, constants], 1).to(dtype)
    yes, no = torch.arange(23)[:, None], torch.arange(23, 46)[:, None]
    found = probe(model, (yes, no), "1", kind=kind, C=0.5, draws=1)
    vector = found.direction["1"].double()
    assert vector[5:].tolist() == [0, 0, 0, 0]
    classifier = (
        linear.LogisticRegression(C=0.5, max_iter=1000) if kind == "logistic" else linear.Ridge(2)
    )
    fitted = make_pipeline(StandardScaler(), classifier)
    labels = np.arange(46) < 23
    fitted.fit(
        torch.cat([values, constants[:, :3]], 1), labels if kind == "logistic" else 2.0 * labels - 1
    )
    expected = np.ravel(fitted[1].coef_)[:5] / values.numpy().std(0)
    np.testing.assert_allclose(vector[:5].numpy(), expected, rtol=2e-3)


def test_directions_that_vary_only_by_rounding_are_not_erased():
    """In the fitted values, the third dimension varies only by rounding.

    The erasure must leave this dimension unchanged, even in other values in which it does vary.
    """
    torch.manual_seed(3)
    labels = (torch.arange(60) < 30).double()[:, None]
    x = torch.randn(60, 3).double() + torch.tensor([2.0, 0.0, 0.0]).double() * labels
    x[:, 2] = 1 + 1e-7 * torch.randn(60).double()
    erasers = [leace(Moments.of(rows, labels)) for rows in (x, x.float().double())]
    others = torch.randn(11, 3).double()
    torch.testing.assert_close(erasers[0](others), erasers[1](others), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(erasers[0](others)[:, 2], others[:, 2], rtol=0, atol=1e-6)
    left = erasers[0](x)
    assert (left[:30].mean(0) - left[30:].mean(0)).abs().max() < 1e-6


def test_values_that_are_not_finite_are_refused():
    values, texts = torch.randn(6, 3), torch.arange(6)[:, None]
    values[4, 1] = math.inf
    for function in (difference_of_means, erasure, probe):
        with pytest.raises(ValueError, match="values at 1 must be finite; got inf at"):
            function(
                embedded(values),
                (texts[:3], texts[3:]),
                "1",
                **{"folds": 2} if function is probe else {},
            )


def test_probes_that_cannot_be_fitted_are_refused():
    model, texts = embedded(torch.randn(5, 3)), torch.arange(3)[:, None]
    with pytest.raises(ValueError, match=r"\(3 and 2\); got 3"):
        probe(model, (texts, texts[:2]), "1", folds=3)
    with pytest.raises(ValueError, match="logistic, linear"):
        probe(model, (texts, texts), "1", kind="svm")
    with pytest.raises(UnknownNameError):
        probe(model, (texts, texts), "resid_post")


def test_directions_are_added_at_their_points():
    first = Direction({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0])}, {"a": 0.5})
    second = Direction({"b": torch.tensor([3.0]), "a": torch.tensor([-4.0, 7.0])}, {"b": 2.0})
    total, difference = first + second, first - second
    assert total["a"].tolist() == [-3, 9]
    assert difference["b"].tolist() == [2]
    assert total.offsets == {"a": 0.5, "b": 2.0}
    assert difference.offsets == {"a": 0.5, "b": -2.0}
    with pytest.raises(ValueError, match="same points.*a, b and a"):
        first + first.at("a")


def test_a_direction_at_many_points_prints_its_longest_vectors():
    # Lengths 0, 7, 14, ... modulo 30: each of 0 to 29 once.
    lengths = {f"blocks.{n}.resid_post": float(7 * n % 30) for n in range(30)}
    vectors = {name: torch.tensor([length, 0.0]) for name, length in lengths.items()}
    title, *rows, note = repr(Direction(vectors)).splitlines()
    assert title == "Direction at 30 points"
    assert [float(row.split()[-1]) for row in rows] == [29, 28, 27, 26, 25, 24, 23, 22]
    # 7 * 17 = 119 = 3 * 30 + 29.
    assert rows[0].startswith("  blocks.17.resid_post")
    assert "8 longest of 30" in note
    assert ".vectors" in note
    few = dict([*vectors.items()][:8])
    assert [row.split(":")[0].strip() for row in repr(Direction(few)).splitlines()[1:]] == [*few]
