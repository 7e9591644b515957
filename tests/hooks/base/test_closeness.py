"""Comparisons up to rounding: numbers just inside and just outside each limit."""

import pytest
import torch

from hooks.base import closeness, wide_dtype

EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def test_same_tensors_have_the_same_shape_dtype_and_bits():
    value = torch.tensor([[1.0, -2.0, 3.0]])
    assert closeness.is_same(value, value.clone())
    others = (value.T, value.double(), torch.nextafter(value, 2 * value), None)
    assert not any(closeness.is_same(value, other) for other in others)
    assert not closeness.is_same(None, None)


def test_each_place_is_compared_with_its_own_terms():
    expected = torch.tensor([1.0, 1024.0])
    just = torch.tensor([1 + 7 * 2**-23, 1024.0])
    assert closeness.is_close(just, expected)
    assert not closeness.is_close(torch.tensor([1 + 9 * 2**-23, 1024.0]), expected)
    # A sum may contain a large term that cancels. Its rounding is then allowed: 8 eps of 1 + 1000.
    lost = torch.tensor([1 + 1000 * 7 * 2**-23, 1024.0])
    assert not closeness.is_close(lost, expected)
    assert closeness.is_close(lost, expected, torch.tensor([1000.0, 0.0]))
    assert not closeness.is_close(expected[:1], expected)


def test_all_places_are_compared_with_the_largest_number():
    other = torch.tensor([0.0, -1000.0])
    assert closeness.agree(torch.tensor([0.009, -1000.0]), other)
    assert not closeness.agree(torch.tensor([0.011, -1000.0]), other)
    assert closeness.agree(torch.tensor([90.0, -1000.0]), other, 0.1)
    half = other.bfloat16()
    # The limit in bfloat16 is 16 * 2**-7 of the largest number, 1000: 125.
    assert closeness.agree(half + torch.tensor([120.0, 0.0]).bfloat16(), half)
    assert not closeness.agree(half + torch.tensor([130.0, 0.0]).bfloat16(), half)
    assert not closeness.agree(other, None)
    assert not closeness.agree(torch.tensor([torch.nan, -1000.0]), other)


def reproduced(*run):
    """Return whether the numbers of a single block are the same in two runs."""
    return closeness.are_reproduced([closeness.TwoRuns(*run)])[0]


def test_samples_are_compared_with_each_number_and_the_median():
    theirs = torch.tensor([0.0, 1.0, 2.0, 3.0, 4000.0])
    for place, allowed in (
        (0, 0.02),
        (3, 0.05),
        (4, 40.02),
    ):
        # The allowed difference is 0.01 of the number, plus 0.01 of the median, which is 2.
        for share, agrees in ((0.99, True), (1.01, False)):
            ours = theirs.clone()
            ours[place] += share * allowed
            assert reproduced([theirs], [ours], 0.01) == agrees
    holed = torch.tensor([torch.nan, 1.0, torch.inf])
    assert reproduced([holed], [holed], 0.0)
    for place in range(3):
        changed = holed.clone()
        changed[place] = -torch.inf
        assert not reproduced([holed], [changed], 0.01)
        assert not reproduced([changed], [holed], 0.01)
    assert not reproduced([theirs], [theirs.double()], 0.01)
    assert not reproduced([theirs], [theirs, theirs], 0.01)
    assert reproduced([theirs.to("meta")], [theirs.to("meta")], 0.0)


def test_blocks_are_compared_together_and_each_has_its_own_median():
    """Blocks of different shapes, dtypes and precisions, with a limit of 0.01 of the median."""
    small, large = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 100.0, 100.0])
    moved = torch.tensor([0.5, 0.0, 0.0])
    runs = [
        ([small + moved], [small], 0.01),
        ([large + moved], [large], 0.01),
        ([small, large + moved], [small, large], 0.001),
        ([large[:2], large + moved], [large[:2], large], 0.01),
        ([], [], 0.01),
        ([large.double() + moved], [large.double()], 0.01),
        ([large, small + moved], [large, small], 0.01),
    ]
    verdicts = closeness.are_reproduced([closeness.TwoRuns(*run) for run in runs])
    assert verdicts == [False, True, False, True, True, True, False]


def test_sums_in_another_order_differ_by_a_share_of_the_largest_number():
    other = torch.tensor([1.0, -8192.0, torch.inf, torch.nan, torch.nan])
    # The limit is 1000 * 2**-23 of the largest number, 8192. The shift is a little smaller.
    shift = torch.tensor([999 * 2.0**-10, 0.0, 0.0, 0.0, 1.0])
    one = (other.double() + shift.double()).where(other.isfinite(), other.double())
    one[3] = 0
    assert closeness.is_rounding(one, other).tolist() == [True, True, True, False, True]
    one[0] += 2 * 2.0**-10
    assert closeness.is_rounding(one, other).tolist() == [False, True, True, False, True]
    assert closeness.is_rounding(one, other, torch.float16)[0]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_a_metric_in_another_batch_differs_by_a_share_of_one_plus_its_size(dtype):
    """The metrics are in float32. The share is 10 √eps, or 16 eps of the dtype of the model."""
    share = max(10 * 2**-11.5, 16 * EPS[dtype])
    metric = torch.tensor([0.0, -4.0, 2.0])
    for place, allowed in enumerate((share, 5 * share, 3 * share)):
        for fraction, is_same in ((0.99, True), (1.01, False)):
            moved = metric.clone()
            moved[place] += fraction * allowed
            assert closeness.is_same_metric(moved, metric, dtype) == is_same
    assert not closeness.is_same_metric(metric, None, dtype)
    assert not closeness.is_same_metric(metric * torch.nan, metric * torch.nan, dtype)


def test_a_sum_of_few_terms_has_its_error_in_units_of_rounding():
    terms = [torch.tensor([[4.0, 1.0, 3.0], [0.0, 8.0, 4.0]]), torch.full((2, 3), -4.0)]
    total = torch.tensor([[0.0, -3.0, -1.0], [-4.0, 4.0, 0.0]])
    assert closeness.sum_error(total, *terms) == 0
    # The terms and the sum have the sizes 8 + 4 + 4, so one unit of rounding is 16 eps.
    for units in (3, 5):
        wrong = total.clone()
        wrong[1, 1] += units * 16 * 2**-23
        assert closeness.sum_error(wrong, *terms) == pytest.approx(units)
    assert closeness.sum_error(total + 1, *terms) > closeness.WRONG_SUM


def test_limits_without_a_dtype():
    assert closeness.float32_rounding() == 2**-20
    assert closeness.file_rounding() == 2**-7


def test_a_difference_of_two_means_may_be_their_rounding():
    size = torch.tensor([64.0, 64.0])
    assert closeness.is_cancelled(torch.tensor([-99 * 2**-17, 101 * 2**-17]), size).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_shares_by_dtype(dtype):
    eps = EPS[dtype]
    assert closeness.block_rounding(dtype) == max(1e-5, 4 * eps)
    assert closeness.block_rounding(torch.float32, dtype) == max(1e-5, 4 * eps)
    assert closeness.sum_rounding(dtype) == min(0.03, 1000 * eps)
    assert closeness.stream_rounding(dtype, 9) == pytest.approx(12 * eps + 1e-4)
    assert closeness.code_rounding(dtype) == max(1e-4, 16 * eps)
    assert closeness.run_rounding(dtype) == max(1e-3, 16 * eps)
    assert closeness.norm_rounding(dtype) == max(2**-18, 4 * eps)
    assert closeness.logits_rounding(dtype) == (0.05 if eps > 1e-4 else 1e-3)
    assert wide_dtype(dtype) == (dtype if eps < 1e-6 else torch.float32)
    gap, allowed = closeness.model_gap(torch.tensor([1.0, 2.0]), torch.tensor([1.5, -4.0]), dtype)
    share = dict(zip(EPS, (1e-10, 1e-4, 1e-2, 1e-1), strict=True))[dtype]
    assert (gap, allowed) == (6.0, 4 * share)
