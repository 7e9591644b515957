"""Comparisons of estimated and exact effects, against ranks and counts by hand."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

import interp
from interp import Result, compare_effects
from interp.numbers.ranks import rank_correlation

AXES = ("layer", "pos", "example")


def result(values, axes=AXES, unit="nats", **about):
    return Result(values, axes, about=about, unit=unit)


def drawn(seed):
    return torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(seed)).round(decimals=1)


@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
def test_ranks_and_signs_of_the_means(noise):
    exact, estimate = drawn(1), drawn(1) + noise * drawn(2)
    exact[1, 2] = 0
    # Equal values have equal ranks.
    exact[2] = exact[2, :1]
    found = compare_effects(result(exact), result(estimate))
    ours, theirs = (values.mean(-1).flatten().numpy() for values in (exact, estimate))
    ranks = [[sum(values < x) + sum(values == x) / 2 for x in values] for values in (ours, theirs)]
    assert found.rank_correlation == pytest.approx(np.corrcoef(ranks)[0, 1])
    agree = [(x > 0) == (y > 0) for x, y in zip(ours, theirs, strict=True) if x]
    assert len(agree) == 14
    assert found.sign_agreement == pytest.approx(sum(agree) / 14)
    differences = sorted(abs(ours - theirs), reverse=True)[:10]
    assert [abs(m.exact - m.estimate) for m in found.misses] == pytest.approx(differences, abs=1e-6)
    worst = found.misses[0]
    at = worst.where["layer"], worst.where["pos"]
    assert worst.exact == pytest.approx(exact.mean(-1)[at].item())
    assert worst.estimate == pytest.approx(estimate.mean(-1)[at].item())
    assert found.unit == "nats"


def test_rounding_of_an_effect_that_is_zero_has_no_sign():
    exact, estimate = drawn(1), drawn(1)
    exact[1, 2], estimate[1, 2] = 3e-6, -1e-7
    assert compare_effects(result(exact), result(estimate)).sign_agreement == 1
    exact[1, 2] = 0.3
    assert compare_effects(result(exact), result(estimate)).sign_agreement == pytest.approx(14 / 15)


def test_an_estimate_without_signs_is_compared_with_sizes():
    exact = drawn(1)
    found = compare_effects(result(exact), result(exact.abs(), signed=False))
    assert found.rank_correlation == pytest.approx(1)
    assert math.isnan(found.sign_agreement)
    assert found.misses[0].estimate == pytest.approx(found.misses[0].exact)
    assert "sign" not in repr(found)


@pytest.mark.usefixtures("unchecked")
def test_results_of_two_kinds_are_compared_by_rank():
    """Ranks 1, 2.5, 2.5, 4 against 2, 4, 1, 3: deviations from 2.5 give 1.5 / sqrt(4.5 * 5)."""
    scores = result(torch.tensor([[[0.1], [0.4]], [[0.4], [0.9]]]), unit="share", kind="induction")
    effects = result(torch.tensor([[[-1.0], [7.0]], [[-3.0], [2.0]]]), site="z")
    with pytest.raises(ValueError, match="same site") as caught:
        compare_effects(effects, scores)
    advice = re.search(r"interp\.rank_correlation\(.*\)\)", str(caught.value))[0]
    names = {"interp": interp, "exact": effects, "estimate": scores}
    assert eval(advice, names) == pytest.approx(1.5 / math.sqrt(4.5 * 5))
    assert rank_correlation(torch.tensor([1.0, 2.0]), torch.tensor([0.3, -5.0])) == pytest.approx(
        -1
    )
    with pytest.raises(ValueError, match="NaN at 1 of 2"):
        rank_correlation(torch.tensor([1.0, math.nan]), torch.tensor([0.3, -5.0]))
    with pytest.raises(ValueError, match=r"\[2\] and \[1, 2\]"):
        rank_correlation(torch.ones(2), torch.ones(1, 2))


def test_a_constant_has_no_rank_correlation():
    assert math.isnan(
        compare_effects(result(drawn(1)), result(torch.zeros(3, 5, 7))).rank_correlation
    )
    single = result(drawn(1)[:1, :1])
    assert math.isnan(compare_effects(single, single).rank_correlation)


@pytest.mark.parametrize(
    ("match", "other"),
    [
        ("axes", result(drawn(2), ("pos", "layer", "example"))),
        ("labels", Result(drawn(2), AXES, labels={"layer": [0, 1, 5]})),
        ("site.*q and k", result(drawn(2), site="k", direction="noising")),
        ("direction.*noising.*denoising", result(drawn(2), site="q", direction="denoising")),
        (
            "edit.*none and edits",
            result(drawn(2), site="q", direction="noising", edit="edits.zero()"),
        ),
        ("metric.*none and f", result(drawn(2), site="q", direction="noising", metric="f")),
        ("texts", result(drawn(2), site="q", direction="noising", texts=["ab"])),
        ("unit.*nats and bits", result(drawn(2), unit="bits", site="q", direction="noising")),
    ],
)
def test_other_places_are_refused(match, other):
    with pytest.raises(ValueError, match=match):
        compare_effects(result(drawn(1), direction="noising", site="q"), other)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_effects_that_are_not_finite_are_refused(number):
    wrong = drawn(1)
    wrong[1, 2, 3] = number
    for pair in itertools.permutations([result(wrong), result(drawn(1))]):
        with pytest.raises(ValueError, match="finite.* 1 of 15"):
            compare_effects(*pair)
    with pytest.raises(ValueError, match="finite"):
        compare_effects(result(wrong), result(wrong))


def test_positions_that_no_text_has_are_not_compared():
    exists = torch.tensor([[True, True], [True, False], [False, False]])
    axes = ("pos", "example")
    exact = Result(torch.tensor([[2.0, 4.0], [1.0, 0.0], [0.0, 0.0]]), axes, exists=exists)
    estimate = Result(torch.tensor([[2.0, 2.0], [3.0, 0.0], [0.0, 0.0]]), axes, exists=exists)
    found = compare_effects(exact, estimate)
    assert found.exact.tolist() == [3.0, 1.0]
    assert found.estimate.tolist() == [2.0, 3.0]
    assert [miss.where["pos"] for miss in found.misses] == [1, 0]


def test_the_figure_shows_each_place_and_names_the_worst():
    found = compare_effects(result(drawn(1)), result(drawn(2)))
    axes = found.plot().axes[0]
    torch.testing.assert_close(
        torch.tensor(axes.collections[0].get_offsets().data),
        torch.stack([found.exact, found.estimate], 1),
    )
    worst = found.misses[0].where
    assert f"layer {worst['layer']}, pos {worst['pos']}" in [text.get_text() for text in axes.texts]
    assert "nats" in axes.get_xlabel()
