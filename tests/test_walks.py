"""The walks of the stability example, step by step, and the example itself on a few steps."""

import csv
import math
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
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


def test_a_graph_is_what_was_asked_for(walks, graph):
    assert torch.bincount(graph.region).tolist() == [16, 16, 15]
    assert torch.equal(graph.adjacency, graph.adjacency.T)
    assert not graph.adjacency.diagonal().any()
    # Two for the cycle, two for chords, rounded down in the region of 15.
    assert graph.adjacency.sum().item() == 2 * (16 + 16 + 16 + 16 + 15 + 15)
    assert graph.adjacency.sum(1).min() >= 2
    for region in range(3):
        jumpers = (graph.region == region) & (graph.leads_to >= 0)
        assert jumpers.sum() == 2
        assert (region + 1) % 3 in graph.leads_to[jumpers].tolist()
        assert region not in graph.leads_to[jumpers].tolist()
    # Numbers say nothing: regions are not stretches of vertices.
    assert (graph.region.diff() != 0).sum() > 10


def test_seeds_decide(walks, graph):
    def again(seed):
        return walks.random_graph(n=47, regions=3, degree=4, jumpers=2, seed=seed)

    assert torch.equal(again(5).adjacency, graph.adjacency)
    assert not torch.equal(again(6).adjacency, graph.adjacency)
    one, two = (
        walks.random_walks(graph, 2, 30, DELAY, torch.Generator().manual_seed(s)).tokens
        for s in (7, 8)
    )
    same = walks.random_walks(graph, 2, 30, DELAY, torch.Generator().manual_seed(7)).tokens
    assert torch.equal(one, same)
    assert not torch.equal(one, two)


def test_every_vertex_is_reached_from_every_other(graph):
    """Along edges, and from a jumper to any vertex of its region."""
    to = graph.adjacency.float()
    for vertex in (graph.leads_to >= 0).nonzero().flatten():
        to[vertex, graph.region == graph.leads_to[vertex]] = 1
    reached = torch.linalg.matrix_power(to + torch.eye(47), 40)
    assert (reached > 0).all()


@pytest.mark.parametrize("delay", [1, DELAY])
def test_walks_by_an_account_kept_step_by_step(walks, graph, delay):
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


def test_walks_are_uniform_over_neighbours_and_landings(walks, graph):
    walked = walks.random_walks(graph, 400, 200, DELAY, torch.Generator().manual_seed(3))
    landed = torch.zeros(47)
    at = walked.events.nonzero()
    at = at[at[:, 1] + DELAY < 200]
    to = graph.leads_to[walked.tokens[at[:, 0], at[:, 1]]]
    for vertex, region in zip(
        walked.tokens[at[:, 0], at[:, 1] + DELAY].tolist(), to.tolist(), strict=True
    ):
        assert graph.region[vertex] == region
        landed[vertex] += 1
    for region in range(3):
        counts = landed[graph.region == region]
        assert (counts - counts.mean()).abs().max() < 5 * counts.mean().sqrt()
    vertex = int((graph.leads_to < 0).nonzero()[0])
    stays = walked.tokens[:, :-1] == vertex
    following = torch.bincount(walked.tokens[:, 1:][stays], minlength=47)[graph.adjacency[vertex]]
    assert (following > 0.6 * following.float().mean()).all()


def test_event_windows_are_closed_and_end_with_the_walk(walks):
    events = torch.zeros(2, 20, dtype=torch.bool)
    events[0, 5] = events[1, 0] = events[1, 6] = events[1, 18] = True
    found = walks.event_windows(events, delay=4, buffer=3)
    assert found[0].nonzero().flatten().tolist() == list(range(5, 13))
    assert found[1].nonzero().flatten().tolist() == [*range(14), 18, 19]
    assert walks.event_windows(events, delay=50, buffer=0)[0].nonzero()[0].item() == 5


def test_windows_slide_by_one(walks, walked):
    windows = walks.sliding_windows(walked.tokens, WIDTH)
    assert windows.shape == (60, 80, WIDTH)
    assert torch.equal(windows[7, 31], walked.tokens[7, 31 : 31 + WIDTH])
    for width in (0, -1, 91):
        with pytest.raises(ValueError, match=rf"1 to all steps .* not of {width} in shape"):
            walks.sliding_windows(walked.tokens, width)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"regions": 1}, "regions are at least 2, .* not 1$"),
        ({"n": 8}, "n is at least 3 for each of 3 regions, 9, not 8$"),
        ({"n": -5}, "n is at least 3 for each of 3 regions, 9, not -5$"),
        ({"degree": 1}, "degree is 2 to 14: with fewer .* would not be connected.* not 1$"),
        ({"degree": 15}, "degree is 2 to 14.* not 15$"),
        ({"jumpers": 0}, "jumpers are 1 to 14 a region, not 0$"),
    ],
)
def test_impossible_graphs_are_refused(walks, change, says):
    with pytest.raises(ValueError, match=says):
        walks.random_graph(**dict(n=47, regions=3, degree=4, jumpers=2, seed=0) | change)


def test_graphs_made_by_hand_are_checked(walks):
    region = torch.tensor([0, 0, 0, 1, 1])
    leads = torch.tensor([1, -1, -1, -1, 0])
    edges = torch.zeros(5, 5, dtype=torch.bool)
    for a, b in ((0, 1), (1, 2), (3, 4)):
        edges[a, b] = edges[b, a] = True
    assert walks.Graph(edges, region, leads).regions == 2

    def changed(tensor, *at, to):
        tensor = tensor.clone()
        for place in at:
            tensor[place] = to
        return tensor

    cut = changed(edges, (1, 2), (2, 1), to=False)
    across = changed(edges, (2, 3), (3, 2), to=True)
    for wrong, says in (
        ((edges[:4], region, leads), r"adjacency is \[5, 5\]"),
        ((changed(edges, (0, 2), to=True), region, leads), r"is symmetric, and \[0, 2\]"),
        ((changed(edges, (2, 2), to=True), region, leads), r"no vertex to itself, and \[2, 2\]"),
        ((across, region, leads), r"of one region, and \[2, 3\]"),
        ((cut, region, leads), r"is connected, and region 0 is cut from \[2\]"),
        ((edges, region + (region == 1), leads), r"without gaps, and region 1 is empty"),
        ((edges, region, changed(leads, 0, to=0)), r"vertex 0 of region 0 leads to 0"),
        ((edges, region, changed(leads, 0, to=2)), r"of the 2 regions, .* leads to 2"),
    ):
        with pytest.raises(ValueError, match=says):
            walks.Graph(*wrong)


def test_bad_sizes_are_refused(walks, graph):
    generator = torch.Generator()
    for sizes, says in (
        ((0, 9, 4), "count is at least 1, not 0"),
        ((2, -1, 4), "length is at least 1, not -1"),
        ((2, 9, 0), "delay is at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=says):
            walks.random_walks(graph, *sizes, generator)
    events = torch.zeros(2, 9, dtype=torch.bool)
    for delay, buffer in ((0, 2), (3, -1)):
        with pytest.raises(ValueError, match=rf"not {delay} and {buffer}$"):
            walks.event_windows(events, delay, buffer)
    for bad in (events.int(), events[0]):
        with pytest.raises(ValueError, match=r"events are boolean \[walk, step\], not"):
            walks.event_windows(bad, 3, 2)


@pytest.fixture
def study(walks):
    pytest.importorskip("matplotlib")
    import svd_stability

    return svd_stability


def test_differences_come_with_an_interval_over_walks(study):
    """One walk has no step inside; NaN counts nowhere; the means are over steps, not over walks."""
    values = torch.tensor([[1.0, 2.0, 3.0], [5.0, math.nan, 9.0], [4.0, 4.0, 4.0]])
    inside = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    within, outside, difference, low, high = study.interval(values, inside, seed=0)
    assert (within, outside) == (3.0, pytest.approx(26 / 6))
    assert difference == pytest.approx(3 - 26 / 6)
    # The extremes of all samples that hold a step inside: walk 1 alone, and with walk 2 twice.
    assert low == pytest.approx(5 - 9)
    assert high == pytest.approx(5 - 33 / 7)
    alike = torch.full((5, 8), 2.0)
    assert study.interval(alike, alike.cumsum(1) > 9, seed=0) == (2, 2, 0, 0, 0)


def test_the_interval_covers_as_often_as_it_says(study, monkeypatch):
    """Walks with an offset of their own: an interval over steps would be far too narrow."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(study, "RESAMPLES", 300)
    covered = 0
    for trial in range(200):
        inside = torch.rand(40, 30, generator=generator) < 0.3
        own = torch.randn(40, 1, generator=generator)
        values = torch.randn(40, 30, generator=generator) + inside * (0.5 + own)
        _, _, _, low, high = study.interval(values, inside, seed=trial)
        covered += low < 0.5 < high
    assert 0.88 < covered / 200 < 0.99


def test_the_course_around_an_event_is_read_at_its_lag(study):
    values = torch.arange(60.0).expand(2, 60)
    events = torch.zeros(2, 60, dtype=torch.bool)
    events[0, 20] = events[1, 30] = True
    rows = study.locked(values, events, seed=0)
    assert [row[0] for row in rows] == list(study.LAGS)
    for lag, mean, low, high in rows:
        assert (mean, low, high) == (25 + lag, 20 + lag, 30 + lag)
    # Nothing wraps around the ends of a walk.
    edges = torch.zeros(2, 60, dtype=torch.bool)
    edges[:, 1] = edges[:, 58] = True
    means = {row[0]: row[1] for row in study.locked(values, edges, seed=0)}
    assert (means[-4], means[0], means[4]) == (54, 29.5, 5)


def test_the_example_runs_on_a_few_steps(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "RESAMPLES", 50)
    monkeypatch.setattr(study, "LENGTH", 96)
    script = ["svd_stability.py", "--out", str(tmp_path), "--walks", "2", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", [*script, "--steps", "2"])
    study.main()
    said = capsys.readouterr().out
    assert said.startswith("svd-64-2l, 2 steps, seed 3; 2 held-out walks of 96 steps")
    assert (tmp_path / "findings.txt").read_text() == said
    for name in ("spectra", "drift", "events"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    rows = {
        path.stem: list(csv.DictReader(path.read_text().splitlines()))
        for path in tmp_path.glob("*.csv")
    }
    assert {row["target"] for row in rows["spectra"]} == {"qkt", "wvwo", "avwo"}
    # Three checkpoints, two layers; singular values 32, 64 and 32.
    assert len(rows["spectra"]) == 3 * 2 * (32 + 64 + 32)
    assert len(rows["drift"]) == 2 * 3 * 2
    assert len(rows["events"]) == 3 * 2 * 2 * 2
    for row in rows["events"]:
        gap = float(row["inside"]) - float(row["outside"])
        assert float(row["difference"]) == pytest.approx(gap, abs=1e-4)
    monkeypatch.setattr(sys, "argv", [*script, "--steps", "0"])
    with pytest.raises(SystemExit):
        study.main()
    assert "--steps is at least 1 and --walks at least 2" in capsys.readouterr().err
