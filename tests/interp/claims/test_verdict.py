"""The status of a test, compared with decisions by hand, and the verdict of several tests."""

import json
import math

import pytest
import torch

from interp import Result
from interp.claims import Test, Verdict
from interp.claims.verdict import Bounds

NAN = math.nan


@pytest.mark.parametrize(
    ("bounds", "low", "high", "status"),
    [
        (Bounds(least=0.8), 0.8, 0.9, "holds"),
        (Bounds(least=0.8), 0.79, 0.9, "cannot tell"),
        (Bounds(least=0.8), 0.7, 0.79, "fails"),
        (Bounds(least=0.8), 0.7, 0.8, "cannot tell"),
        (Bounds(most=0.2), -3.0, 0.2, "holds"),
        (Bounds(most=0.2), 0.1, 0.3, "cannot tell"),
        (Bounds(most=0.2), 0.21, 0.3, "fails"),
        (Bounds(0.8, 1.2), 0.9, 1.1, "holds"),
        (Bounds(0.8, 1.2), 0.7, 1.3, "cannot tell"),
        (Bounds(0.8, 1.2), 1.3, 1.4, "fails"),
        (Bounds(0.8, 1.2), 0.1, 0.2, "fails"),
        (Bounds(above=0.0), 0.1, 0.2, "holds"),
        (Bounds(above=0.0), 0.0, 0.2, "cannot tell"),
        (Bounds(above=0.0), 0.0, 0.0, "fails"),
        (Bounds(least=0.8), NAN, NAN, "cannot tell"),
        (Bounds(least=0.8), 0.9, math.inf, "holds"),
        (Bounds(above=0.0), -math.inf, math.inf, "cannot tell"),
    ],
)
def test_a_status_says_where_the_interval_is(bounds, low, high, status):
    assert bounds.status(low, high) == status


def test_a_test_of_a_result_has_its_mean_and_interval():
    values = torch.tensor([0.7, 0.9, 0.8, 1.1, 1.0])
    result = Result(values[None], ("test", "example"))
    test = Test.of("share", result, Bounds(least=0.5), note="five texts")
    low, high = result.interval()
    assert (test.measured, test.low, test.high) == pytest.approx((0.9, low.item(), high.item()))
    assert (test.status, test.promised, test.note) == ("holds", "at least 0.5", "five texts")


def verdict(*statuses):
    tests = [Test(f"test {n}", status) for n, status in enumerate(statuses)]
    return Verdict("a claim", {}, tuple(tests))


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (("holds", "holds"), "holds"),
        (("holds", "cannot tell", "holds"), "cannot tell"),
        (("cannot tell", "fails", "holds"), "fails"),
    ],
)
def test_a_verdict_is_the_worst_status(statuses, worst):
    assert verdict(*statuses).status == worst


def test_a_verdict_is_short_and_strict_json(tmp_path):
    many = verdict(*["holds"] * 60)
    assert len(repr(many).splitlines()) < 40
    path = tmp_path / "verdict.json"
    many.save(path)
    tables = json.loads(path.read_text())["tables"]
    assert tables["status"]["values"] == "holds"
    assert tables["test.low"]["labels"]["test"][3] == "test 3"
    assert tables["test.low"]["values"][3] is None
    with pytest.raises(KeyError, match="test 3"):
        many["test 300"]
