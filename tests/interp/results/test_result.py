"""Results: means and intervals, compared with NumPy and SciPy; parts, figures, tables and files."""

import copy
import itertools
import json
import math
import pickle
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from hooks import UnknownNameError
from interp import Result
from interp.results.entries import Entries, Entry
from interp.results.node import NodeName, node_name

LAYERS, HEADS, EXAMPLES = [4, 5, 7], 2, 13


@pytest.fixture
def result():
    values = torch.randn(len(LAYERS), HEADS, EXAMPLES) + torch.tensor([[-3.0], [1.0]])
    base = torch.rand(EXAMPLES)
    return Result(
        values,
        ("layer", "head", "example"),
        base,
        base + 2 + torch.rand(EXAMPLES),
        labels={"layer": LAYERS},
        unit="logits",
        about={"metric": "logit_diff(3, 5)", "direction": "denoising"},
    )


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_ends_solve_fiellers_equation(result, normal, confidence):
    """The ends of an interval solve the equation, with quantiles and skewness from SciPy.

    If the gap of all examples is 1, the ratio is a mean, and the equation is Student's.
    """
    stats = pytest.importorskip("scipy.stats", reason="an independent distribution of t")
    measured = result.normalized() if normal else result
    gap = (result.target - result.base).double().numpy() if normal else np.ones(EXAMPLES)
    ends = measured.interval(confidence)
    assert ends.low.shape == ends.high.shape == (3, 2)
    for at in ((0, 1), (2, 0)):
        x = result.values[at].double().numpy()
        share = x.mean() / gap.mean()
        assert measured.mean()[at] == pytest.approx(share, rel=1e-5)
        tail = stats.skew(x - share * gap) * 2.5 / math.sqrt(EXAMPLES - 2)
        for end, sign in zip(ends, (-1, 1), strict=True):
            rest = x - end[at].item() * gap
            apart = rest.mean() / stats.sem(rest)
            t = stats.t.ppf((1 + confidence) / 2, EXAMPLES - 1) * (1 + max(0, sign * tail))
            assert apart == pytest.approx(-sign * t, rel=1e-4)


def test_three_examples_by_hand():
    """The mean is 2, the standard error 1 / √3, the skewness 0, and t is 4.3027."""
    low, high = Result(torch.tensor([[3.0, 1.0, 2.0]]), ("head", "example")).interval()
    assert (low.item(), high.item()) == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-4)


@pytest.mark.parametrize(("right", "n"), [(0, 3), (7, 7), (13, 17), (19, 20), (1, 41)])
@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_shares_of_examples_have_the_interval_of_wilson(right, n, confidence):
    """The interval equals Wilson's interval of SciPy. The two values may be any two bounds."""
    stats = pytest.importorskip("scipy.stats", reason="an independent interval of Wilson")
    expected = stats.binomtest(right, n).proportion_ci(confidence, method="wilson")
    values = (torch.arange(n) < right).double()[None]
    for low, width in ((0.0, 1.0), (-1.0, 2.0), (3.0, 7.0)):
        result = Result(low + width * values, ("head", "example"), bounds=(low, low + width))
        ends = [(float(end) - low) / width for end in result.interval(confidence)]
        assert ends == pytest.approx([*expected], abs=1e-9)


def test_an_interval_above_a_bound_begins_there():
    values = torch.tensor([[0.0, 0.1, 4.0]])
    low, high = Result(values, ("head", "example"), bounds=(0.0, math.inf)).interval()
    assert low == 0
    assert torch.equal(high, Result(values, ("head", "example")).interval().high)


@pytest.mark.parametrize(
    ("mean", "counts", "folds"),
    [(1.0, (4, 4), 5), (0.9, (1.0, 2.4), 5), (0.5, (10, 7), 3), (0.0, (2, 3), 2)],
)
def test_an_auroc_has_the_interval_of_newcombe(mean, counts, folds):
    """Both ends solve Newcombe's equation, with the variance of Hanley and McNeil."""
    optimize = pytest.importorskip("scipy.optimize")
    a, b = map(float, counts)
    values = torch.full((1, folds), mean, dtype=torch.float64)
    result = Result(values, ("point", "example"), bounds=(0.0, 1.0), counts=(a, b))
    low, high = map(float, result.interval())

    def missed(m):
        q1, q2, n = m / (2 - m), 2 * m**2 / (1 + m), (a + b) / 2 - 1
        variance = (m * (1 - m) + n * (q1 - m**2) + n * (q2 - m**2)) / (a * b * folds)
        return (mean - m) ** 2 - 1.959963985**2 * variance

    inside = (1e-9, mean - 1e-9), (mean + 1e-9, 1 - 1e-9)
    for end, bound, (start, stop) in zip((low, high), (0, 1), inside, strict=True):
        expected = bound if mean == bound else optimize.brentq(missed, start, stop)
        assert end == pytest.approx(expected, abs=1e-7)
    assert 0 <= low < high <= 1


def test_an_auroc_of_few_texts_has_no_interval_and_parts_keep_its_kind():
    values = torch.tensor([[1.0, 0.5], [0.75, 1.0]])
    few = Result(values, ("point", "example"), bounds=(0.0, 1.0), counts=(1.0, 2.0), unit="AUROC")
    assert all(end.isnan().all() for end in few.interval())
    more = replace(few, counts=(2.0, 2.0))
    torch.testing.assert_close(more.select(point=1).interval().low, more.interval().low[1])
    lost = more - replace(more, values=1 - values)
    assert (lost.bounds, lost.counts) == ((-1, 1), None)


def of_copies(sizes, seed=0):
    """Return values [3, text], and the number of the text of each example, in a random order."""
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return torch.randn(3, len(sizes)).double(), groups.tolist()


def test_an_index_that_is_a_label_or_a_word_names_select():
    labels, words = {"component": ["embed", "m2"]}, {"component": ["", " cat"]}
    result = Result(torch.rand(2, 3), ("component", "example"), labels=labels, words=words)
    for index in ("m2", " cat"):
        with pytest.raises(TypeError, match=f"select.component={index!r}"):
            result[index]
    with pytest.raises(TypeError, match="values.*mean.*select"):
        result["m3"]


@pytest.mark.usefixtures("unchecked")
def test_groups_may_be_a_tensor():
    values, groups = torch.rand(2, 4), torch.tensor([0, 1, 2, 0])
    result = Result(values, ("head", "example"), groups=groups)
    assert "4 texts (3 different)" in repr(result)
    assert result.groups == (0, 1, 2, 0)


@pytest.mark.parametrize("kind", ["means", "ratios", "shares", "above a bound", "ones"])
@pytest.mark.parametrize("times", [2, 5])
def test_copies_do_not_change_an_interval(kind, times):
    values, groups = of_copies([times] * 9)
    bounds = {"shares": (-4.0, 4.0), "above a bound": (-4.0, math.inf), "ones": (0.0, 1.0)}.get(
        kind
    )
    values = (values > 0).double() if kind == "ones" else values
    base, target = torch.rand(9).double(), 2 + torch.rand(9).double()
    given = {"axes": ("head", "example"), "bounds": bounds}
    once = Result(values, base=base, target=target, **given)
    often = Result(
        values[:, groups], base=base[groups], target=target[groups], groups=tuple(groups), **given
    )
    if kind == "ratios":
        once, often = once.normalized(), often.normalized()
    for end, same in zip(often.interval(0.9), once.interval(0.9), strict=True):
        torch.testing.assert_close(end, same, rtol=1e-9, atol=1e-12)
    plain = replace(often, groups=None).interval(0.9)
    assert (plain.high - plain.low < often.interval(0.9).high - often.interval(0.9).low).all()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (7, 2, 1, 3, 3, 1), (20, *[1] * 11)])
def test_unequal_copies_have_the_error_of_the_jackknife(sizes):
    """The standard error equals the jackknife, which leaves out one text at a time with all
    copies.
    """
    stats = pytest.importorskip("scipy.stats")
    values, groups = of_copies(sizes)
    result = Result(values[:, groups], ("head", "example"), groups=tuple(groups))
    n, texts = len(groups), len(sizes)
    for row, low, high in zip(values.numpy(), *result.interval(), strict=True):
        mean = row[groups].mean()
        left = [[row[group] for group in groups if group != text] for text in range(texts)]
        change = mean - np.array([np.mean(others) for others in left])
        error = math.sqrt((texts - 1) / texts * (change**2).sum())
        skewness = (change**3).mean() / (change**2).mean() ** 1.5
        tail = 2.5 * skewness / math.sqrt(texts - 2)
        for end, sign in ((low, -1), (high, 1)):
            t = stats.t.ppf(0.975, texts - 1) * (1 + max(0, sign * tail))
            assert float(end) == pytest.approx(mean + sign * t * error, rel=1e-6)
    right = torch.tensor([[1.0] + [0.0] * (texts - 1)])[:, groups]
    share = Result(right, ("head", "example"), bounds=(0.0, 1.0), groups=tuple(groups))
    # Wilson's interval, with the effective number of texts by Kish's formula.
    sure, p, z = n**2 / sum(size**2 for size in sizes), sizes[0] / n, stats.norm.ppf(0.975)
    middle, half = (p + z**2 / sure / 2), z * math.sqrt(p * (1 - p) / sure + z**2 / 4 / sure**2)
    ends = [(middle + sign * half) / (1 + z**2 / sure) for sign in (-1, 1)]
    assert [float(end) for end in share.interval()] == pytest.approx(ends, abs=1e-6)


def test_parts_and_differences_know_which_examples_are_copies():
    values, groups = of_copies([3, 1, 2, 2])
    base, same = torch.rand(8).double(), tuple(groups)
    result = Result(values[:, groups], ("head", "example"), base, base + 1, groups=same)
    rows = [5, 0, 3, 6, 1]
    assert result.select(example=rows).groups == tuple(groups[row] for row in rows)
    assert result.select(head=1).groups == result.normalized().groups == same
    assert result.sum("head").groups == (result - replace(result, groups=None)).groups == same
    assert result.normalized().select(example=rows).groups == tuple(groups[row] for row in rows)
    one = replace(result, groups=(4,) * 8)  # all examples are copies of one text
    assert all(end.isnan().all() for end in one.interval())
    with pytest.raises(ValueError, match="groups .*8; got 3"):
        replace(result, groups=(0, 1, 2))


def test_too_few_examples_have_no_interval(result):
    for n, normal in ((1, False), (2, False), (3, True)):
        few = result.select(example=list(range(n)))
        few = few.normalized() if normal else few
        assert all(end.isnan().all() for end in few.interval())
        assert math.isnan(few.top(1)[0].low)
    assert not result.select(example=[0, 1, 2]).interval().low.isnan().any()
    assert not result.normalized().select(example=[0, 1, 2, 3]).interval().low.isnan().any()


def test_a_ratio_over_an_uncertain_gap_has_no_bound():
    values, base = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(4)
    target = torch.tensor([5.0, -4.0, 6.0, -3.0])
    with pytest.warns(UserWarning, match="not reliable"):
        shares = Result(values, ("head", "example"), base, target).normalized()
    low, high = shares.interval()
    assert (low.item(), high.item()) == (-math.inf, math.inf)


def test_shares_of_a_small_gap_have_a_warning():
    effects, base = torch.tensor([[0.4], [-0.1]]), torch.tensor([3.0])
    for gap, is_small in ((0.03, True), (-0.03, True), (0.05, False)):
        result = Result(effects, ("layer", "example"), base, base + gap, unit="logits")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result.normalized()
            result.normalized(per_example=True)
        assert len(caught) == 2 * is_small
        assert all(f"is {gap} logits, so" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("names", [{"base"}, {"target"}, {"base", "target"}])
def test_a_missing_run_is_named(result, names):
    with pytest.raises(ValueError, match="without") as error:
        replace(result, **dict.fromkeys(names)).normalized()
    assert {*str(error.value).split("without ")[1].split(" and ")} == names


def test_shares_of_each_example(result):
    shares = result.normalized(per_example=True)
    torch.testing.assert_close(shares.values, result.values / (result.target - result.base))
    for again in (shares.normalized(), result.normalized().normalized(per_example=True)):
        torch.testing.assert_close(again.values, shares.values)
    twice = result.normalized().normalized()
    torch.testing.assert_close(twice.values, result.normalized().values)


def test_nothing_is_divided_if_base_and_target_are_equal(result):
    target = result.target.clone()
    target[2] = result.base[2] * (1 + 1e-7)
    close = replace(result, target=target)
    left = [n for n in range(EXAMPLES) if n != 2]
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 of 13"):
            shares = close.normalized(per_example=True)
        expected = (result.values / (target - result.base))[..., left]
        torch.testing.assert_close(shares.values, expected)
        assert shares.labels["example"] == tuple(left)
        assert torch.equal(shares.target, torch.ones(12))
        target[2] = result.base[2] = 0
    assert not close.normalized().mean().isnan().any()
    same = replace(result, target=result.base)
    with pytest.warns(UserWarning, match="13 of 13"), pytest.raises(ValueError, match="example"):
        same.normalized(per_example=True)
    # The differences of the examples are 1 and -1, so their mean is 0.
    target = result.base + torch.tensor([1.0] * 6 + [-1.0] * 6 + [0.0])
    with pytest.warns(UserWarning, match="agree"):
        same = replace(result, target=target).normalized()
    assert same.mean().isnan().all()
    assert same.interval().high.isnan().all()
    # No place is larger than another.
    assert [line.endswith("NaN, not ranked") for line in repr(same.top(2)).splitlines()] == [
        True
    ] * 2


def test_parts_by_label(result):
    part = result.select(layer=7, head=[1, 0])
    assert part.axes == ("head", "example")
    assert torch.equal(part.values, result.values[2].flip(0))
    assert part.labels["head"] == (1, 0)
    assert part.about["layer"] == 7
    few = result.select(example=[5, 1], layer=[5])
    assert torch.equal(few.values, result.values[1:2, :, [5, 1]])
    assert torch.equal(few.base, result.base[[5, 1]])
    assert few.labels["layer"] == (5,)


def test_shares_are_of_the_mean_difference_of_the_examples_that_are_there(result):
    for rows in (list(range(EXAMPLES)), [5, 1, 9, 2]):
        few = result.normalized().select(example=rows)
        gap = (result.target - result.base)[rows]
        torch.testing.assert_close(few.values, result.values[..., rows] / gap.mean())
        torch.testing.assert_close(few.target - few.base, gap / gap.mean())
        for end, same in zip(
            few.interval(), result.select(example=rows).normalized().interval(), strict=True
        ):
            torch.testing.assert_close(end, same)


def test_effects_that_are_only_rounding_are_printed_as_zero():
    """In float32, neighbouring numbers near 10 differ by 9.5e-7."""
    step = float(np.nextafter(np.float32(10), np.float32(11)) - np.float32(10))
    values = torch.tensor([[0.0, 2e-4], [step, -2 * step], [3.0, -3.0], [0.0, 0.0]])
    base = torch.tensor([10.0, 10.0])
    effects = Result(values, ("layer", "example"), unit="logits", base=base, target=base + 1)
    printed = repr(effects.top(4)).splitlines()
    assert ["up to rounding" in line for line in printed] == [False, True, False, False]
    assert effects.top(2)[1].effect == pytest.approx(-step / 2)
    # The size of the numbers behind a metric of one's own is not known.
    assert "rounding" not in repr(replace(effects, unit="").top(4))


def test_the_top_places_are_largest_in_absolute_value(result):
    result.values[1, 1] = -9 + torch.arange(EXAMPLES) / 10
    result.values[0, 1] = torch.nan
    top = result.top(3)
    assert top[0].where == {"layer": 5, "head": 1}
    assert top[0].effect == pytest.approx(-8.4)
    assert top[0].low < -8.4 < top[0].high
    assert (top[0].low, top[0].high) == pytest.approx([e[1, 1].item() for e in result.interval()])
    assert [place.where["head"] for place in top[1:]] == [0, 0]
    assert abs(top[1].effect) >= abs(top[2].effect)
    # The effect of this place is NaN, and NaN comes last.
    assert result.top(6)[5].where == {"layer": 4, "head": 1}
    assert len(result.top(100)) == 6
    assert repr(top).splitlines()[0].startswith("layer 5, head 1  -8.4  [-8.")
    assert result.select(layer=5, head=1).top()[0].where == {}


def test_the_top_places_may_be_the_largest_or_the_smallest():
    effects = torch.tensor([2.0, -5.0, torch.nan, -1.0, 3.0])[:, None].expand(-1, 4)
    result = Result(effects, ("head", "example"))

    def heads(**options):
        return [entry.where["head"] for entry in result.top(5, **options)]

    assert heads() == heads(largest=None) == [1, 4, 0, 3, 2]
    assert heads(largest=True) == [4, 0, 3, 1, 2]
    assert heads(largest=False) == [1, 3, 0, 4, 2]
    assert [entry.effect for entry in result.top(2, largest=False)] == [-5, -1]
    for wrong in ("absolute", -1, 0):
        with pytest.raises(TypeError, match="largest"):
            result.top(2, largest=wrong)


def test_a_place_with_nan_has_no_mean(result):
    result.values[0, 1, 3] = torch.nan
    low, high = result.interval()
    for found in (result.mean(), low, high):
        assert found.isnan().flatten().tolist() == [False, True, False, False, False, False]
    assert repr(result.top()).splitlines()[-1] == "layer 4, head 1  NaN, not ranked"


def test_a_result_prints_its_axes_and_largest_effects(result):
    lines = repr(result).splitlines()
    assert lines[0] == "Result: 3 layers x 2 heads, mean logits of 13 texts"
    assert "denoising" in lines[1]
    assert f"{result.base.mean():+.4g}" in lines[2]
    assert lines[3:-1] == [f"  {line}" for line in repr(result.top(3)).splitlines()]
    # The other places are not printed.
    assert lines[-1] == "  3 of 6 places; .top(k) shows more"
    # Shares say which run is 0 and which is 1.
    title = repr(result.normalized()).splitlines()[0]
    assert title.endswith(", in shares of target - base (0: base, 1: target)")
    bare = repr(Result(torch.ones(2, 3), ("head", "example"))).splitlines()
    assert bare == [
        "Result: 2 heads, mean of 3 texts",
        "  head 0  +1  [+1, +1]",
        "  head 1  +1  [+1, +1]",
    ]
    # One text needs no mean, and the result of one text has the printed title of its sizes.
    one = result.select(example=[0])
    assert repr(one).splitlines()[0] == "Result: 3 layers x 2 heads x 1 example, in logits"
    assert repr(Result(torch.ones(3), ("example",))).splitlines()[0] == "Result: mean of 3 texts"


def test_a_result_prints_which_examples_are_different_texts_or_folds():
    values = torch.ones(2, 4)
    copies = Result(values, ("head", "example"), unit="norms of the base", groups=(0, 1, 1, 2))
    assert repr(copies).splitlines()[0] == (
        "Result: 2 heads, mean of 4 texts (3 different), in norms of the base"
    )
    folds = Result(values, ("head", "example"), unit="AUROC", bounds=(0.0, 1.0), counts=(3.0, 5.0))
    assert repr(folds).splitlines()[0] == "Result: 2 heads, mean AUROC of 4 folds"


def test_a_result_counts_only_places_that_exist():
    # [layer, pos, example]: no text has the last two positions.
    exists = torch.tensor([[[True], [True], [False], [False]]])
    result = Result(torch.ones(2, 4, 1), ("layer", "pos", "example"), exists=exists)
    assert repr(result).splitlines()[-1].strip() == "3 of 4 places; .top(k) shows more"
    assert "places" not in repr(result.select(layer=[0]))
    three = Result(torch.ones(3, 1), ("layer", "example"))
    assert "places" not in repr(three)


def test_an_entry_prints_its_line():
    entry = Entry({"layer": 2, "pos": 9}, 0.5, 0.1, 0.9, words={"pos": " Mary"})
    assert repr(entry) == "layer 2, pos 9 ' Mary'  +0.5  [+0.1, +0.9]"
    assert repr(entry._replace(examples="1 of 2 texts")).endswith("+0.9] (1 of 2 texts)")


def test_plots(result):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    axes, bar = result.plot().axes
    np.testing.assert_allclose(axes.images[0].get_array(), result.mean())
    # The scale of colours ends at the difference of the runs. If no effect is negative, it begins
    # at 0.
    whole = (result.target - result.base).mean().abs()
    tiny = replace(result, values=result.values * 1e-3)
    shares = replace(result.normalized(), values=result.values.abs() * 1e-3)
    for drawn, low, high in (
        *((result, -1, max(whole, result.mean().abs().max())), (tiny, -1, whole)),
        (tiny.normalized(), -1, 1),
        *((shares, 0, 1), (Result(shares.values, result.axes), 0, shares.values.mean(-1).max())),
    ):
        norm = drawn.plot().axes[0].images[0].norm
        assert (norm.vmin, norm.vmax) == pytest.approx((low * float(high), float(high)))
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == (
        *("head", "layer"),
        "mean effect (logits)",
    )
    assert [text.get_text() for text in axes.get_yticklabels()] == ["4", "5", "7"]
    (axes,) = result.select(head=1).plot().axes
    assert [patch.get_height() for patch in axes.patches] == result.mean()[:, 1].tolist()
    lines = np.array(axes.collections[0].get_segments())[..., 1]
    np.testing.assert_allclose(lines, torch.stack(result.select(head=1).interval(), 1), rtol=1e-6)
    many = Result(
        torch.zeros(300, 2, 5), ("neuron", "head", "example"), labels={"head": ["a", "name"]}
    )
    axes = many.plot().axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "name"]
    assert len(axes.get_yticks()) <= 81
    with pytest.raises(ValueError, match="head"):
        replace(many, values=torch.zeros(3, 300, 2, 5), axes=("layer", *many.axes)).plot()


def test_entries_are_a_tuple_that_can_be_copied(result):
    entries = result.top(2)
    assert isinstance(entries, tuple)
    assert copy.copy(entries) == pickle.loads(pickle.dumps(entries)) == entries


def test_a_table_for_pandas(result):
    pytest.importorskip("pandas", reason="optional")
    frame = result.to_dataframe()
    assert list(frame.columns) == ["layer", "head", "effect", "low", "high"]
    row = frame[(frame.layer == 7) & (frame["head"] == 1)].iloc[0]
    assert row.effect == pytest.approx(result.mean()[2, 1].item())
    assert row.low == pytest.approx(result.interval().low[2, 1].item())
    assert len(frame) == 6
    assert len(result.select(layer=4, head=0).to_dataframe()) == 1


@pytest.mark.parametrize(("effect", "is_explained"), [(7.0, True), (-7.0, True), (5.0, False)])
def test_a_print_explains_shares_beyond_1(effect, is_explained):
    """The difference of the runs is 4, so the shares are 1.75, -1.75 and 1.25."""
    effects = Result(
        torch.tensor([[effect, effect], [1.0, 3.0]]),
        ("layer", "example"),
        base=torch.tensor([1.0, 2.0]),
        target=torch.tensor([5.0, 6.0]),
    )
    assert "beyond 1" not in repr(effects)
    assert ("beyond 1" in repr(effects.normalized())) == is_explained


@pytest.mark.parametrize("normal", [False, True])
def test_saved_and_loaded(result, tmp_path, normal):
    limits = {"bounds": (0.0, math.inf), "counts": (2.0, 3.5), "groups": (*range(EXAMPLES - 1), 0)}
    given = result.normalized() if normal else replace(result, target=None, **limits)
    given.save(tmp_path / "r.safetensors")
    found = Result.load(tmp_path / "r.safetensors")
    for name in ("values", "base", "target"):
        one, two = getattr(given, name), getattr(found, name)
        assert (one is two is None) or torch.equal(one, two)
    for name in ("axes", "labels", "unit", "about", "is_ratio", "bounds", "counts", "groups"):
        assert getattr(given, name) == getattr(found, name)
    assert [path.name for path in tmp_path.iterdir()] == ["r.safetensors"]


@pytest.mark.parametrize("table", [Result.to_dataframe, lambda result: result.save("r.csv")])
def test_a_table_without_pandas_names_the_extra(result, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install .*\[tables\]"):
        table(result)
    assert not [*tmp_path.iterdir()]


FIGURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>"}


@pytest.mark.parametrize("suffix", FIGURES)
def test_the_suffix_decides_the_format_of_a_picture(result, tmp_path, suffix):
    for path in (tmp_path / f"x{suffix}", tmp_path / f"y{suffix.upper()}"):
        result.save(path)
        assert path.read_bytes().startswith(FIGURES[suffix])
    assert len([*tmp_path.iterdir()]) == 2


def test_the_suffix_decides_the_format_of_a_table(result, tmp_path):
    pandas = pytest.importorskip("pandas", reason="optional")
    result.save(tmp_path / "x.csv")
    table = pandas.read_csv(tmp_path / "x.csv")
    assert [*table.columns] == ["layer", "head", "effect", "low", "high"]
    means = result.values.numpy().mean(-1).flatten()
    np.testing.assert_allclose(table.effect, means, rtol=1e-5)
    assert [*table.layer] == [4, 4, 5, 5, 7, 7]
    result.save(tmp_path / "x.JSON")
    assert json.loads((tmp_path / "x.JSON").read_text()) == result.as_json()


@pytest.mark.parametrize("name", ["x.pt", "x.jpeg", "x.xlsx", "x.png.zip", "x.htm", "x.7"])
def test_a_suffix_of_no_format_is_refused_before_anything_is_written(result, tmp_path, name):
    with pytest.raises(ValueError, match=r"\.html, \.png, \.pdf, .* or have no suffix; got .*x\."):
        result.save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_result_of_many_axes_has_no_figure(tmp_path):
    many = Result(torch.zeros(2, 3, 2, 5, 7), (*"abcd", "example"))
    with pytest.raises(ValueError, match=r"got .*x\.png"):
        many.save(tmp_path / "x.png")
    many.save(tmp_path / "x.html")
    three = Result(torch.rand(2, 3, 5, 7), (*"abc", "example"))
    three.save(tmp_path / "x.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"x.html", "x.svg"}


def test_a_folder_may_have_dots_and_a_file_no_suffix(result, tmp_path):
    (tmp_path / "run.png").mkdir()
    for name in ("means", "means.SafeTensors"):
        result.save(tmp_path / "run.png" / name)
        assert torch.equal(Result.load(tmp_path / "run.png" / name).values, result.values)


def test_json_has_no_number_that_is_not_finite(tmp_path):
    """In JSON, labels, facts and values that are not finite become null.

    Other files of this package keep them.
    """
    values = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 0.5, 1.5]])
    about = {"scale": math.inf, "nested": [{"low": -math.inf}], "n": 3}
    labels = {"factor": [math.inf, 0.5]}
    base = torch.tensor([math.nan, 1.0, -math.inf])
    result = Result(values, ("factor", "example"), base, labels=labels, about=about)
    result.save(tmp_path / "x.json")
    written = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert written == result.as_json()
    tables = written["tables"]
    assert tables["effect"]["values"] == [[None, 1.0, 2.0], [None, 0.5, 1.5]]
    assert tables["effect.base"]["values"] == [None, 1.0, None]
    assert tables["effect.mean"]["labels"]["factor"] == [None, 0.5]
    assert written["about"] == {"scale": None, "nested": [{"low": None}], "n": 3}
    result.save(tmp_path / "x")
    again = Result.load(tmp_path / "x")
    assert again.about == result.about
    assert again.labels["factor"] == (math.inf, 0.5)
    torch.testing.assert_close(again.values, values, equal_nan=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: {"axes": ("layer", "example", "head")}, "example"),
        (lambda r: {"axes": ("layer", "example")}, r"\[3, 2, 13\]"),
        (lambda r: {"axes": ("head", "head", "example")}, "head"),
        (lambda r: {"base": r.base[:5]}, r"base.*\[13\].*\[5\]"),
        (lambda r: {"target": r.base.mean()}, r"target.*\[\]"),
        (lambda r: {"base": None, "is_ratio": True}, "base"),
        (lambda r: {"labels": {"layer": [1, 2]}}, "2 for 'layer'"),
        (lambda r: {"labels": {"pos": [1, 2]}}, "2 for 'pos'"),
        (lambda r: {"labels": {"head": [(0, 1), (2, 3)]}}, r"numbers or text.*\(0, 1\)"),
        (lambda r: {"values": r.values[:, :0]}, r"one place.*\[3, 0, 13\]"),
        (lambda r: {"values": r.values[..., :0]}, r"example.*\[3, 2, 0\]"),
        (lambda r: {"exists": r.values[:, :, :5] > 0}, r"exists.*\[3, 2, 13\].*\[3, 2, 5\]"),
        (lambda r: {"exists": r.values[0] > 0}, r"exists.*\[3, 2, 13\].*\[2, 13\]"),
    ],
)
def test_parts_that_do_not_fit(result, change, match):
    with pytest.raises(ValueError, match=match):
        replace(result, **change(result))


def test_questions_that_make_no_sense(result):
    with pytest.raises(ValueError, match="4, 5, 7.*got 6"):
        result.select(layer=6)
    with pytest.raises(UnknownNameError, match="layer"):
        result.select(layers=4)
    with pytest.raises(ValueError, match="unique"):
        replace(result, labels={"head": ["a", "a"]}).select(head="a")
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"got {k}"):
            result.top(k)
    with pytest.raises(ValueError, match="one place"):
        result.select(layer=[])
    with pytest.raises(ValueError, match="confidence"):
        result.interval(95.0)
    with pytest.raises(ValueError, match="target"):
        replace(result, target=None).normalized()


@pytest.mark.parametrize(
    ("direction", "runs"),
    [
        ("denoising", "base +1.5 (corrupted texts), target +4 (clean texts)"),
        ("noising", "base +1.5 (clean texts), target +4 (corrupted texts)"),
        (None, "base +1.5, target +4"),
    ],
)
def test_the_print_says_which_texts_are_the_base(direction, runs):
    base, target = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    about = {} if direction is None else {"direction": direction}
    result = Result(torch.ones(3, 2), ("head", "example"), base, target, about=about)
    assert repr(result).splitlines()[-4].strip() == runs


def test_the_print_of_an_interval_says_why_it_is_nan():
    few, enough = (Result(torch.rand(3, n), ("head", "example")) for n in (2, 3))
    assert repr(few.interval()).startswith("Interval [3]: NaN, because an interval needs at least")
    assert repr(enough.interval()).startswith("Interval(low=tensor([")


def test_the_print_of_many_intervals_gives_their_range():
    values = torch.zeros(7, 3, 5)
    values[1, 2] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    values[2, 0, 0] = torch.nan
    values[5, 1] = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    printed = repr(Result(values, ("layer", "head", "example")).interval())
    # The mean is 3, the standard error is 1 / sqrt(2), and t is 2.776 with 4 degrees of freedom.
    assert printed.startswith("Interval [7, 3]: .low and .high contain the ends, between -4.963 ")
    assert "and +4.963;" in printed


def test_labels_by_pattern():
    names = ["embed", "a0.h1", "a0.h12", "m0", "a1.h1", "what?"]
    values = torch.arange(12.0).view(6, 2)
    result = Result(
        values, ("node", "example"), labels={"node": names}, words={"node": list("abcd*f")}
    )
    assert result.select(node="a*.h1").labels["node"] == ("a0.h1", "a1.h1")
    assert torch.equal(result.select(node="a*.h1").values, values[[1, 4]])
    # A pattern keeps the axis, also if it matches only one label.
    assert result.select(node="m?").axes == ("node", "example")
    assert result.select(node=["m0", "a0*"]).labels["node"] == ("m0", "a0.h1", "a0.h12")
    # If a label or a word contains `?` or `*`, the same text selects it exactly.
    assert result.select(node="what?").axes == ("example",)
    assert result.select(node="*").about["node"] == "a1.h1"
    with pytest.raises(ValueError, match=r"match.*'x\*'"):
        result.select(node="x*")


@pytest.mark.filterwarnings("ignore:the gap between the runs")
def test_the_print_says_why_an_interval_has_no_bound():
    values = torch.tensor([[1.0, 2.0, 3.0, 9.0], [3.0, 1.0, 2.0, 4.0]])
    gap = torch.tensor([1.0, -0.5, 8.0, 6.0])  # mean 3.6, standard error 2.0, t = 3.2
    result = Result(values, ("head", "example"), torch.zeros(4), gap).normalized()
    assert torch.isinf(result.interval().high).all()
    lines = repr(result).splitlines()
    assert lines[-1].startswith("  inf: the share has no bound, because target - base may be 0")
    assert repr(result.top(1)).count("no bound") == 1
    sure = Result(values, ("head", "example"), torch.zeros(4), torch.full((4,), 2.0))
    for finite in (sure, sure.normalized()):
        assert "no bound" not in repr(finite)
    one_end = Entries([Entry({"head": 3}, 0.5, 0.1, math.inf)])
    assert len(repr(one_end).splitlines()) == 2
    assert len(repr(Entries([one_end[0]._replace(is_rounding=True)])).splitlines()) == 1


@pytest.mark.usefixtures("unchecked")
def test_nodes_as_axes(tmp_path):
    kinds = [
        (0, "head", 1),
        (0, "head", 0),
        (0, "mlp"),
        (2, "head", 1),
        (2, "attn_bias"),
        (2, "neuron", 0),
        (2, "neuron", 7),
    ]
    names = [NodeName("embed"), *(node_name(*kind) for kind in kinds)]
    assert names == ["embed", "a0.h1", "a0.h0", "m0", "a2.h1", "a2.bias", "m2.n0", "m2.n7"]
    values = torch.arange(48.0).view(3, 8, 2)  # [pos, node, example]
    result = Result(values, ("pos", "node", "example"), labels={"node": names, "pos": [4, 5, 9]})
    heads = result.by("head")
    assert heads.axes == ("pos", "layer", "head", "example")
    assert heads.labels["layer"] == (0, 2)
    assert heads.labels["head"] == (0, 1)
    for layer, head, index in ((0, 0, 2), (0, 1, 1), (1, 1, 4)):
        assert torch.equal(heads.values[:, layer, head], values[:, index])
    assert heads.values[:, 1, 0].isnan().all()
    parts = result.by("layer")
    assert parts.labels["part"] == ("a.h1", "a.h0", "m", "a.bias", "m.n0", "m.n7")
    assert torch.equal(parts.select(layer=2, part="a.bias").values, values[:, 5])
    assert parts.about["left out"] == "embed"
    assert "left out: embed" in repr(parts)
    assert heads.about["left out"] == "embed, 1 mlp, 1 attn_bias, 2 neurons"
    assert "left out" not in result.select(node=names[1:]).by("layer").about
    assert torch.equal(result.by("neuron").values, values[:, None, 6:])
    result.save(tmp_path / "nodes")
    for same in (Result.load(tmp_path / "nodes"), copy.deepcopy(result)):
        assert same.labels == result.labels
        assert same.by("layer").labels == parts.labels
        torch.testing.assert_close(same.by("head").values, heads.values, equal_nan=True)
    with pytest.raises(ValueError, match="nodes.*'pos'"):
        result.select(node="embed").by("head")
    with pytest.raises(UnknownNameError, match="heads.*head"):
        result.by("heads")


def test_sums_along_an_axis(result):
    for axis in result.axes[:-1]:
        added = result.sum(axis)
        torch.testing.assert_close(added.values, result.values.sum(result.axes.index(axis)))
        assert added.axes == tuple(each for each in result.axes if each != axis)
        assert axis not in {**added.labels, **added.words}
        assert (added.about, added.unit) == (result.about, result.unit)
        torch.testing.assert_close(added.base, result.base)
    with pytest.raises(ValueError, match=r"use mean\(\) for the mean over examples"):
        result.sum("example")
    with pytest.raises(UnknownNameError, match="axis of this result"):
        result.sum("heads")
    shares = Result(torch.rand(2, 3), ("head", "example"), bounds=(0.0, 1.0))
    assert shares.sum("head").bounds is None


def test_differences(result):
    other = replace(
        result,
        values=result.values.flip(0) * 2,
        about={"metric": "log_prob(3)", "direction": "denoising"},
    )
    apart = result - other
    assert torch.equal(apart.values, result.values - 2 * result.values.flip(0))
    assert (apart.axes, apart.labels, apart.unit) == (result.axes, result.labels, "logits")
    assert torch.equal(apart.base, result.base)
    assert apart.about == {"direction": "denoising"}
    moved = replace(other, base=result.base + 1)
    assert (result - moved).base is None
    torch.testing.assert_close((result - moved).target, result.target)
    shares = result.normalized() - other.normalized()
    torch.testing.assert_close(shares.values, apart.normalized().values)
    gap = replace(other, target=other.target * 3).normalized()
    relabelled = replace(result, labels={"layer": [4, 5, 6]})
    for wrong, match in (
        (relabelled, "labels"),
        (result.normalized(), "unit"),
        (result.select(head=1), "axes"),
    ):
        with pytest.raises(ValueError, match=f"same {match}"):
            result - wrong
    with pytest.raises(ValueError, match="same runs"):
        result.normalized() - gap
    one, two = (replace(result, about={"texts": [text] * 13}) for text in "ab")
    with pytest.raises(ValueError, match="same texts"):
        one - two
    with pytest.raises(TypeError):
        result - 1


def test_a_heat_map_for_each_label_of_a_facet():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    values = torch.randn(3, 5, 2, 7)
    result = Result(values, ("layer", "pos", "head", "example"), labels={"pos": [*"abcde"]})
    *panels, bar = result.plot(facet="pos").axes
    assert [panel.get_title() for panel in panels] == [f"pos {name}" for name in "abcde"]
    for n, panel in enumerate(panels):
        np.testing.assert_allclose(panel.images[0].get_array(), values.mean(-1)[:, n])
        assert panel.images[0].norm.vmax == pytest.approx(values.mean(-1).abs().max())
    assert (panels[0].get_xlabel(), panels[0].get_ylabel(), bar.get_ylabel()) == (
        "head",
        "layer",
        "mean effect",
    )
    with pytest.raises(UnknownNameError, match="heads"):
        result.plot(facet="heads")
    with pytest.raises(ValueError, match="facet"):
        result.select(layer=0).plot(facet="pos")


def test_a_plot_labels_the_decisive_column_and_no_hash():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    for size, decisive in ((44, 13), (190, 133)):
        values = torch.zeros(3, size, 1)
        values[1, decisive] = -2.0
        about = {"site": "z", "texts": ["cae69e703590e665"], "gap": 1e-7}
        result = Result(values, ("layer", "pos", "example"), unit="logits", about=about)
        figure = result.plot()
        panel, bar = figure.axes
        shown = [label.get_text() for label in panel.get_xticklabels()]
        assert str(decisive) in shown
        assert len(shown) == size if size < 80 else 60 < len(shown) <= 81
        assert bar.get_ylabel() == "effect (logits)"
        assert figure.get_suptitle() == "effects (site: z)"
    assert result.view().title == "effects (site: z)"


def nodes(layers, n_heads, others=(), kind="head"):
    """Return effects of the heads of some layers and of other nodes, from -4 to 4."""
    labels = [node_name(layer, kind, head) for layer in layers for head in range(n_heads)]
    labels += [node_name(layer, "mlp") for layer in others]
    values = torch.linspace(-4, 4, len(labels))[:, None]
    return Result(values, ("sender", "example"), labels={"sender": labels}, unit="logits")


def test_all_heads_of_several_layers_are_drawn_as_a_map():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    about = {"receivers": ["a7.h1<q>"], "texts": ["cae69e703590e665"], "steps": [3]}
    result = replace(nodes([3, 5], 4), about=about)
    figure = result.plot()
    assert figure.get_suptitle() == "effects (receivers: a7.h1<q>)"
    two = replace(result, about={"receivers": ["a7.h1<q>", "m7"]})
    assert two.plot().get_suptitle() == "effects (receivers: a7.h1<q> and m7)"
    many = replace(result, about={"receivers": ["a7.h1<q>", "m7", "m8"]})
    assert many.plot().get_suptitle() == "effects"
    panel, _ = figure.axes
    (image,) = panel.images
    torch.testing.assert_close(torch.tensor(image.get_array()), result.values.view(2, 4))
    assert (panel.get_ylabel(), panel.get_xlabel()) == ("layer", "head")
    assert [text.get_text() for text in panel.get_yticklabels()] == ["3", "5"]
    assert result.view().html() == result.by("head").view().html()
    # One layer, some heads, or other nodes, are bars.
    some = result.select(sender=["a3.h0", "a3.h1", "a5.h0"])
    neurons = nodes([3, 5], 4, kind="neuron")
    mixed = nodes([3, 5], 4, others=[3])
    for other, n_bars in ((nodes([3], 4), 4), (some, 3), (mixed, 9), (neurons, 8)):
        (panel,) = other.plot().axes
        assert len(panel.patches) == n_bars


@pytest.mark.parametrize(("width", "n_labels"), [(5, 36), (3, 12), (16, 36), (4, 200)])
def test_labels_of_bars_do_not_overlap_in_a_panel_of_the_user(width, n_labels):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from matplotlib.figure import Figure

    labels = [f"a{n // 9}.h{n % 9}" for n in range(n_labels)]
    values = torch.ones(n_labels, 1)
    values[7] = 2
    figure = Figure(figsize=(width, 3))
    panel = figure.add_subplot()
    result = Result(values, ("sender", "example"), labels={"sender": labels}, unit="logits")
    result.plot(ax=panel)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in panel.get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    assert len(boxes) >= min(n_labels, 3 * width)
    assert "a0.h7" in [text.get_text() for text in panel.get_xticklabels()]


def test_labels_of_rows_do_not_overlap_in_a_panel_of_the_user():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    panel = figure.add_subplot()
    nodes(range(48), 3).plot(ax=panel)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in panel.get_yticklabels()]
    boxes.sort(key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))
    assert len(boxes) > 8


def test_the_plot_of_shares_says_whether_they_are_restored_or_lost():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    about = {"metric": "logit_diff('a', 'b')", "site": "z", "texts": ["cae69e703590e665"]}
    values, base, target = torch.ones(2, 3, 1), torch.tensor([-1.0]), torch.tensor([3.0])
    result = Result(values, ("layer", "head", "example"), base, target, unit="logits")
    share = "Share of the logit difference"
    for facts, title in (
        ({"direction": "denoising"}, f"{share} restored, by head"),
        ({"direction": "noising"}, f"{share} lost, by head"),
        ({"direction": "noising", "site": "q"}, f"{share} lost, by head (site: q)"),
        ({"direction": "noising", "metric": "kl"}, "Share of the effect lost, by head"),
    ):
        shares = replace(result, about=about | facts).normalized()
        assert shares.plot().get_suptitle() == title
    assert shares.select(head=2).plot().get_suptitle() == (
        "Share of the effect lost, by layer (site: z, head: 2)"
    )
    assert "Share" not in replace(result, about=about | facts).plot().get_suptitle()


def test_the_plot_of_effects_on_the_logit_difference_has_a_sentence_as_its_title():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    about = {"metric": "logit_diff([' Mary', ' John'], [' John', ' Mary'])"}
    values = torch.ones(2, 3, 2)
    result = Result(values, ("layer", "head", "example"), unit="logits", about=about)
    effect = "Effect on the logit difference"
    for facts, title in (
        ({"site": "z"}, f"{effect}, by head"),
        ({"direction": "denoising"}, f"{effect}, by head (direction: denoising)"),
        ({"estimate": "attribution"}, "Estimated effect on the logit difference, by head"),
    ):
        assert replace(result, about=about | facts).plot().get_suptitle() == title
    assert result.select(head=1).plot().get_suptitle() == f"{effect}, by layer (head: 1)"
    of_nodes = replace(result, axes=("effect", "node", "example"), labels={})
    assert of_nodes.plot().get_suptitle() == f"{effect}, by node"
    assert of_nodes.select(node=0).plot().get_suptitle() == f"{effect}, by effect (node: 0)"
    own = replace(result, about={"metric": "margin", "site": "z"})
    assert own.plot().get_suptitle() == "mean effects (metric: margin, site: z)"


@pytest.mark.parametrize("select", [{}, {"head": 1}])
def test_a_plot_has_a_title_a_limit_and_axes_of_the_user(result, select):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from matplotlib.figure import Figure

    result = replace(result, values=result.values - 2).select(**select)
    figure = result.plot(title="Heads", limit=0.25)
    assert figure.get_suptitle() == "Heads"
    assert result.plot(title="").get_suptitle() == ""

    mine = Figure()
    left, right = mine.subplots(1, 2)
    assert result.plot(title="Panel", limit=0.25, ax=right) is mine
    assert (right.get_title(), left.get_title(), mine.get_suptitle()) == ("Panel", "", "")
    assert not left.has_data()
    for axes in (figure.axes[0], right):
        if select:
            assert axes.get_ylim() == (-0.25, 0.25)
            heights = [patch.get_height() for patch in axes.patches]
            assert heights == result.mean().tolist()
        else:
            assert axes.images[0].get_clim() == (-0.25, 0.25)
            np.testing.assert_allclose(axes.images[0].get_array(), result.mean())
    positive = replace(result, values=result.values.abs() + 10)
    axes = positive.plot(limit=20).axes[0]
    limits = axes.get_ylim() if select else axes.images[0].get_clim()
    assert limits == (0, 20)
    if select:
        # Two examples have no interval.
        few = Result(torch.tensor([[-1.0, -2.0], [3.0, 4.0]]), ("layer", "example"))
        assert few.plot(limit=5).axes[0].get_ylim() == (-5, 5)
        # The interval of a positive mean may go below 0.
        wide = Result(torch.tensor([[-1.0, 1.0, 3.0]]), ("layer", "example"))
        assert wide.plot(limit=5).axes[0].get_ylim() == (-5, 5)


def test_the_scale_of_a_plot_shows_that_effects_go_beyond_its_limit(result):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    largest = float(result.mean().abs().max())
    positive = replace(result, values=result.values.abs())
    for drawn, limit, ends in (
        (result, None, "neither"),
        (result, 2 * largest, "neither"),
        (result, largest / 2, "both"),
        (positive, float(positive.mean().max()) / 2, "max"),
    ):
        assert drawn.plot(limit=limit).axes[0].images[0].colorbar.extend == ends


def test_a_plot_refuses_a_wrong_limit_or_wrong_axes(result):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    for limit in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            result.plot(limit=limit)
    for wrong in (figure, figure.subplots(1, 2)):
        with pytest.raises(TypeError, match="ax must be"):
            result.plot(ax=wrong)
    axes.remove()
    with pytest.raises(ValueError, match="removed"):
        result.plot(ax=axes)
    three = Result(torch.ones(2, 3, 5, 4), ("layer", "head", "pos", "example"))
    with pytest.raises(ValueError, match="facet"):
        three.plot(facet="pos", ax=figure.axes[0])


def test_a_result_prints_at_most_40_lines(result):
    long = replace(result, about={f"fact {n}": list(range(99)) for n in range(99)})
    assert len(repr(long).splitlines()) <= 40


@pytest.fixture
def unequal():
    """Return effects [layer, pos, example] of four texts; the fourth text has only one position."""
    values = torch.tensor(
        [
            [[1.0, 2.0, 3.0, 6.0], [3.0, 5.0, 7.0, 0.0]],
            [[0.0, 0.0, 0.0, 8.0], [-1.0, 2.0, 8.0, 0.0]],
        ]
    )
    exists = torch.tensor([[[True] * 4, [True, True, True, False]]])
    base, target = torch.zeros(4), torch.tensor([2.0, 4.0, 6.0, 20.0])
    return Result(values, ("layer", "pos", "example"), base, target, exists=exists)


def test_means_and_intervals_are_over_the_texts_that_have_a_position(unequal, tmp_path):
    # By hand: three texts have the second position. Its means are (3 + 5 + 7) / 3 and
    # (-1 + 2 + 8) / 3.
    expected = torch.tensor([[3.0, 5.0], [2.0, 3.0]])
    torch.testing.assert_close(unequal.mean(), expected)
    alone = Result(unequal.values[:, 1, :3], ("layer", "example"))
    for end, end_alone in zip(unequal.interval(), alone.interval(), strict=True):
        torch.testing.assert_close(end[:, 1], end_alone)
    first = Result(unequal.values[:, 0], ("layer", "example")).interval()
    torch.testing.assert_close(unequal.interval().low[:, 0], first.low)
    assert [entry.effect for entry in unequal.top(4)] == [5.0, 3.0, 3.0, 2.0]
    assert unequal.to_dataframe()["effect"].tolist() == [3.0, 5.0, 2.0, 3.0]
    printed = repr(unequal.top(4)).splitlines()
    assert ["3 of 4 texts" in line for line in printed] == [True, False, True, False]
    effects = unequal.as_json()["tables"]
    assert effects["effect"]["values"][0][1] == [3.0, 5.0, 7.0, None]
    assert effects["effect.mean"]["values"][1] == [2.0, 3.0]
    unequal.save(tmp_path / "effects")
    loaded = Result.load(tmp_path / "effects")
    assert torch.equal(loaded.exists, unequal.exists)
    torch.testing.assert_close(loaded.mean(), expected)


@pytest.mark.filterwarnings("ignore:the gap between the runs")
def test_shares_at_a_position_are_of_the_texts_that_have_it(unequal):
    # By hand: at the first position, the mean of target - base is 8; at the second, it is 4.
    shares = unequal.normalized()
    expected = torch.tensor([[3.0 / 8, 5.0 / 4], [2.0 / 8, 3.0 / 4]])
    torch.testing.assert_close(shares.mean(), expected)
    texts = unequal.select(example=[0, 1, 2]).normalized()
    torch.testing.assert_close(shares.mean()[:, 1], texts.mean()[:, 1])
    torch.testing.assert_close(shares.interval().low[:, 0], shares.select(pos=0).interval().low)
    copies = replace(unequal, groups=(0, 1, 1, 2)).select(pos=1, layer=[0, 1])
    alone = Result(unequal.values[:, 1, :3], ("layer", "example"), groups=(0, 1, 1))
    torch.testing.assert_close(copies.interval().high, alone.interval().high, equal_nan=True)


def test_the_interval_of_a_share_is_of_the_texts_that_have_the_position():
    values, base = torch.rand(2, 7) + 1, torch.rand(7)
    target = base + 2 + torch.rand(7)
    exists = torch.ones(2, 7, dtype=torch.bool)
    exists[1, [0, 4]] = False
    shares = Result(values, ("pos", "example"), base, target, exists=exists).normalized()
    some = exists[1]
    alone = Result(values[1:, some], ("pos", "example"), base[some], target[some]).normalized()
    for end, end_alone in zip(shares.interval(), alone.interval(), strict=True):
        torch.testing.assert_close(end[1:], end_alone)


def test_positions_that_no_text_has_are_left_out(unequal):
    short = unequal.select(example=[3])
    assert short.mean()[:, 1].isnan().all()
    assert [entry.where for entry in short.top()] == [
        {"layer": 1, "pos": 0},
        {"layer": 0, "pos": 0},
    ]
    assert len(short.to_dataframe()) == 2
    assert unequal.select(example=[0, 1]).exists is None
    assert unequal.select(pos=0).exists is None
    assert unequal.select(pos=1, layer=1).mean() == 3.0


def test_a_sum_adds_nothing_at_missing_positions(unequal):
    total = unequal.sum("pos")
    assert total.exists is None
    assert total.values.tolist() == [[4.0, 7.0, 10.0, 6.0], [-1.0, 2.0, 8.0, 8.0]]
    assert unequal.sum("layer").mean().tolist() == [5.0, 8.0]


def test_missing_values_that_are_nan_add_0_to_a_sum():
    """The second of two texts has only the first of three positions."""
    values = torch.tensor([[2.0, 5.0], [7.0, math.nan], [11.0, math.nan]])
    exists = torch.tensor([[True, True], [True, False], [True, False]])
    total = Result(values, ("pos", "example"), exists=exists).sum("pos")
    assert total.values.tolist() == [20, 5]
    assert total.exists is None


def test_a_difference_exists_where_both_effects_exist(unequal):
    whole = replace(unequal, values=unequal.values - 1, exists=None)
    for difference in (unequal - whole, whole - unequal):
        assert torch.equal(difference.exists, unequal.exists)
    assert (unequal - whole).mean().tolist() == [[1.0, 1.0], [1.0, 1.0]]
    other = torch.tensor([[[False, True, True, True]], [[True] * 4]])
    expected = [[[False, True, True, True], [False, True, True, False]]]
    expected.append([[True] * 4, [True, True, True, False]])
    difference = unequal - replace(unequal, exists=other)
    assert difference.exists.tolist() == expected


def test_nodes_keep_the_positions_that_exist():
    nodes = [node_name(layer, "head", head) for layer in (0, 1) for head in (0, 1, 2)]
    values = torch.arange(12.0).view(6, 2, 1).expand(6, 2, 5) * torch.ones(5)
    exists = torch.ones(1, 2, 5, dtype=torch.bool)
    exists[0, 1, 2:] = False
    result = Result(
        values, ("component", "pos", "example"), labels={"component": nodes}, exists=exists
    )
    assert result.by("head").mean().shape == (2, 3, 2)
    assert result.by("head").exists.sum() == 5 + 2
    moved = Result(
        values.movedim(0, 1),
        ("pos", "component", "example"),
        labels={"component": nodes},
        exists=exists.movedim(0, 1),
    )
    torch.testing.assert_close(moved.by("head").exists[:, 0, 0], exists[0])
