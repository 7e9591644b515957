"""The walks of the stability example, step by step, and the example itself on a few steps."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples" / "studies"
DELAY, BUFFER, WIDTH = 4, 3, 11


@pytest.fixture
def walks(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import walks

    return walks


@pytest.fixture
def graph(walks):
    return walks.random_graph(n=47, regions=3, degree=4, jumpers=2, seed=5)


@pytest.fixture
def walked(walks, graph):
    return walks.random_walks(graph, 60, 90, DELAY, torch.Generator().manual_seed(1))


def neighbours(graph):
    return [set(row.nonzero().flatten().tolist()) for row in graph.adjacency]


def test_a_graph_has_the_regions_edges_and_jumpers_of_its_arguments(walks, graph):
    assert torch.bincount(graph.region).tolist() == [16, 16, 15]
    assert torch.equal(graph.adjacency, graph.adjacency.T)
    assert not graph.adjacency.diagonal().any()
    # A vertex has two edges of the cycle and, on average, two edges of chords. The number of chords
    # is rounded down in the region of 15 vertices.
    assert graph.adjacency.sum().item() == 2 * (16 + 16 + 16 + 16 + 15 + 15)
    assert graph.adjacency.sum(1).min() >= 2
    for region in range(3):
        jumpers = (graph.region == region) & (graph.leads_to >= 0)
        assert jumpers.sum() == 2
        assert (region + 1) % 3 in graph.leads_to[jumpers].tolist()
        assert region not in graph.leads_to[jumpers].tolist()
    # The numbers of vertices carry no information: regions are not ranges of numbers.
    assert (graph.region.diff() != 0).sum() > 10


@pytest.mark.parametrize("delay", [1, DELAY])
def test_walks_follow_the_rules_step_by_step(walks, graph, delay):
    walked = walks.random_walks(graph, 40, 70, delay, torch.Generator().manual_seed(1))
    near, jumps = neighbours(graph), 0
    for row, events in zip(walked.tokens.tolist(), walked.events.tolist(), strict=True):
        due, to = None, None
        for step, vertex in enumerate(row):
            if step == due:
                assert graph.region[vertex] == to
                jumps, due = jumps + 1, None
            elif step:
                assert vertex in near[row[step - 1]]
            begins = due is None and int(graph.leads_to[vertex]) >= 0
            assert events[step] == begins
            if begins:
                due, to = step + delay, int(graph.leads_to[vertex])
    assert jumps > 100


def test_event_windows_are_closed_and_end_with_the_walk(walks):
    events = torch.zeros(2, 20, dtype=torch.bool)
    events[0, 5] = events[1, 0] = events[1, 6] = events[1, 18] = True
    found = walks.event_windows(events, delay=4, buffer=3)
    assert found[0].nonzero().flatten().tolist() == list(range(5, 13))
    assert found[1].nonzero().flatten().tolist() == [*range(14), 18, 19]
    assert walks.event_windows(events, delay=50, buffer=0)[0].nonzero()[0].item() == 5


@pytest.fixture
def statistics(walks):
    import svd_statistics

    return svd_statistics


def test_differences_come_with_an_interval_over_walks(statistics):
    """The means are over steps, and the interval is over walks. NaN is ignored. The third walk has
    no step inside event windows.

    The expected interval is computed by hand from the contribution of each walk to the difference.
    Inside, the contributions are (1 - 3) / (2 / 3), (5 - 3) / (2 / 3) and 0. Outside, they are
    (5 - 2 R) / 2, (9 - R) / 2 and (12 - 3 R) / 2, with R = 13 / 3.
    """
    values = torch.tensor([[1.0, 2.0, 3.0], [5.0, math.nan, 9.0], [4.0, 4.0, 4.0]])
    inside = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    within, outside, difference, low, high = statistics.interval(values, inside)
    assert (within, outside) == (3.0, pytest.approx(26 / 6))
    assert difference == pytest.approx(3 - 26 / 6)
    parts = np.array([-3.0, 3.0, 0.0]) - np.array([5 - 26 / 3, 9 - 13 / 3, 12 - 13]) / 2
    skewness = (parts**3).mean() / (parts**2).mean() ** 1.5
    stretch = 1 + 2.5 * np.clip([-skewness, skewness], 0, None)
    half = 4.3027 * stretch * parts.std(ddof=1) / np.sqrt(3)
    assert (difference - low, high - difference) == pytest.approx(tuple(half), rel=1e-4)
    alike = torch.full((5, 8), 2.0)
    assert statistics.interval(alike, alike.cumsum(1) > 9) == (2, 2, 0, 0, 0)
    assert math.isnan(statistics.interval(values[:2], inside[:2]).low)


def test_the_course_around_an_event_is_read_at_its_lag(statistics):
    values = torch.arange(60.0).expand(4, 60)
    events = torch.zeros(4, 60, dtype=torch.bool)
    events[range(4), [20, 30, 20, 30]] = True
    lags = range(-8, 20)
    rows = statistics.locked(values, events, lags)
    assert [row.lag for row in rows] == list(lags)
    for lag, mean, low, high in rows:
        # The quantile of Student's t is 3.1824. The standard error of 20, 30, 20, 30 is 5 / √3.
        half = 3.182446 * 5 / math.sqrt(3)
        assert (mean, low, high) == pytest.approx((25 + lag, 25 + lag - half, 25 + lag + half))
    # Steps before the start or after the end of a walk are not counted.
    edges = torch.zeros(4, 60, dtype=torch.bool)
    edges[:, 1] = edges[:, 58] = True
    means = {row.lag: row.mean for row in statistics.locked(values, edges, lags)}
    assert (means[-4], means[0], means[4]) == (54, 29.5, 5)


@pytest.fixture
def study(walks, statistics, monkeypatch):
    pytest.importorskip("matplotlib")
    import svd_stability

    monkeypatch.setattr(svd_stability, "LENGTH", 48)
    monkeypatch.setattr(svd_stability, "TRAINING", 20)
    return svd_stability


@pytest.fixture
def training_only(study, monkeypatch):
    """Skip the analysis, for tests of the training. The value is a list of the checkpoints that the
    analysis would have received.
    """
    seen = []
    monkeypatch.setattr(study, "look", lambda setting, checkpoints, *_: seen.append(checkpoints))
    return seen


@pytest.fixture
def call(study, tmp_path, capsys):
    """A function that runs the example, and returns its status, its output and its errors."""

    def call(*more, out="out", steps=4):
        small = ["--steps", str(steps), "--walks", "12", "--seed", "3"]
        status = study.main([*small, "--out", str(tmp_path / out), *more])
        return (status, *capsys.readouterr())

    return call


def kept(out):
    """Return the content of each file of the checkpoints, by its path."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.glob("checkpoints/*/*"))
        if path.is_file()
    }


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.full
def test_the_example_runs_on_a_few_steps(call, study, tmp_path, monkeypatch):
    status, said, complaints = call(steps=2)
    assert (status, complaints) == (0, "")
    out = tmp_path / "out"
    findings = (out / "findings.txt").read_text(encoding="utf-8")
    assert findings.startswith("svd-64-2l, 2 steps, seed 3; 12 held-out walks of 48 steps")
    assert "Of 8 comparisons" in findings
    assert said.endswith(findings)
    assert "step 1 of 2: loss" in said
    for name in ("spectra", "drift", "events"):
        assert (out / f"{name}.png").stat().st_size > 10_000
    rows = {path.stem: rows_of(path) for path in out.glob("*.csv")}
    assert {row["target"] for row in rows["spectra"]} == {"qkt", "wvwo", "avwo"}
    # There are three checkpoints and two layers. The targets have 32, 64 and 32 singular values.
    assert len(rows["spectra"]) == 3 * 2 * (32 + 64 + 32)
    assert len(rows["drift"]) == 2 * 3 * 2
    assert len(rows["events"]) == 3 * 2 * 2 * 2
    for row in rows["events"]:
        gap = float(row["inside"]) - float(row["outside"])
        assert float(row["difference"]) == pytest.approx(gap, abs=1e-4)

    # Run again without training: the analysis reads the stored checkpoints.
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: pytest.fail("trained again"))
    looked = []
    monkeypatch.setattr(study, "look", lambda setting, kept, *_: looked.append(kept))
    assert call("--resume", steps=2)[::2] == (0, "")
    assert [list(kept) for kept in looked] == [[0, 1, 2]]
