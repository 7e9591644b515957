"""Measures of circuits, compared with their definitions in separate runs."""

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid

from interp import (
    Circuit,
    Pairs,
    circuit_curve,
    edge_attribution,
    edge_patching,
    evaluate_circuit,
    faithfulness,
    measure,
    run_circuit,
    run_with_cache,
)
from interp.graph import Graph, circuits
from interp.numbers.intervals import interval
from interp.runs.circuit_runs import CircuitRuns
from tests.interp.graph.scored import EDGES, GRAPH, by_edge, scored, without_input
from tests.reference import some_tokens, variant
from tests.shipped import pydoc
from tests.streams import made

ANSWERS = torch.stack([torch.tensor([3, 0, 7, 22, 5]), torch.tensor([1, 4, 2, 9, 8])], 1)
PAIRS = Pairs(some_tokens(1), some_tokens(2), ANSWERS)
TEXTS = torch.randint(23, (2, 5, 7), generator=torch.Generator().manual_seed(3))
SHARES = (0.05, 0.4, 1.0)
KEPT = EDGES[::2]


def metric(edges, pairs=PAIRS, **options):
    with torch.no_grad():
        return pairs.metric(run_circuit(GRAPH.model, pairs, [*edges], **options))


def share(values, none, whole):
    return (values.mean() - none.mean()) / (whole.mean() - none.mean())


def test_faithfulness_is_a_share_of_the_whole_effect():
    everything = Circuit(GRAPH, EDGES)
    options = dict(n_random=3, among=everything, seed=4)
    found = faithfulness(GRAPH.model, PAIRS, Circuit(GRAPH, KEPT), **options)
    none, whole = metric([]), metric(EDGES)
    expected = share(metric(KEPT), none, whole)
    torch.testing.assert_close(found.circuit.mean(), expected[None])
    drawn = [circuits.random(GRAPH, len(KEPT), seed, connected=True) for seed in (4, 5, 6)]
    assert len({*map(tuple, drawn)}) == 3
    shares = torch.stack([share(metric(edges), none, whole) for edges in drawn])
    torch.testing.assert_close(found.random.mean(), shares)
    assert found.random.labels["draw"] == (4, 5, 6)
    assert found.n_as_good == sum(shares >= expected)
    assert f"{found.n_as_good} of 3 random circuits" in repr(found)
    assert f"drawn from all {len(EDGES)} edges" in repr(found)
    low, median, high = sorted(shares.tolist())
    assert f"random, median  {median:+.4g}" in repr(found)
    assert f"random, range   {low:+.4g} to {high:+.4g}" in repr(found)


def test_random_circuits_that_do_as_well_are_counted():
    # The circuit lacks the strongest edge, so most draws of its edges and this edge do better.
    model = pydoc()
    pairs = Pairs("def __ini", "def __nam", ("t", "e")).read_by(model)
    nodes = Graph(model)
    strongest = circuits.greedy(nodes, edge_attribution(model, pairs), 24, exact=True)
    weak = Circuit(nodes, [edge for edge in strongest if not edge.startswith("m2->logits")])
    with pytest.warns(UserWarning, match="found on"):
        found = faithfulness(model, pairs, strongest, n_random=2, among=strongest)
    assert found.n_as_good == 2
    found = faithfulness(model, pairs, weak, n_random=8, among=strongest, seed=1)
    none, whole = (measure(pairs.metric, run_circuit(model, pairs, e)) for e in ([], nodes.edges))
    own = share(measure(pairs.metric, run_circuit(model, pairs, weak)), none, whole)
    as_good = 0
    for seed in range(1, 9):
        drawn = circuits.random(nodes, len(weak), seed, connected=True, among=strongest)
        as_good += (
            share(measure(pairs.metric, run_circuit(model, pairs, drawn)), none, whole) >= own
        )
    assert found.n_as_good == as_good
    assert 0 < as_good < 8


def test_a_circuit_that_does_nothing_is_named():
    model = pydoc()
    pairs = Pairs("def __ini", "def __nam", ("t", "e")).read_by(model)
    nodes = Graph(model)
    strongest = circuits.greedy(nodes, edge_attribution(model, pairs), 20)
    nothing = faithfulness(model, pairs, Circuit(nodes, ["input->a1.h2<q>", "a1.h2->logits"]))
    assert "the circuit does nothing" in repr(nothing)
    with pytest.warns(UserWarning, match="found on"):
        assert "does nothing" not in repr(faithfulness(model, pairs, strongest))
    with pytest.raises(ValueError, match="at least one edge.*eap_ig_inputs"):
        faithfulness(model, pairs, Circuit(nodes, []))


def test_random_circuits_that_do_nothing_are_said_to_show_little():
    model = pydoc()
    pairs = Pairs("def __ini", "def __nam", ("t", "e")).read_by(model)
    nodes = Graph(model)
    path = Circuit(nodes, ["input->m0", "m0->m2", "m2->logits"])
    assert "says little" in repr(faithfulness(model, pairs, path))
    known = circuits.greedy(nodes, edge_attribution(model, pairs), 20)
    with pytest.warns(UserWarning, match="found on"):
        assert "says little" not in repr(faithfulness(model, pairs, known))


def test_the_sizes_of_random_circuits_are_printed():
    # A path of two edges may be left, or a path of three edges that needs each of them.
    first, second = ["input->m0", "m0->logits"], ["input->a0.h1<q>", "a0.h1->m1", "m1->logits"]
    pool, circuit = Circuit(GRAPH, [*first, *second]), Circuit(GRAPH, ["input->m1", "m1->logits"])
    found = faithfulness(GRAPH.model, PAIRS, circuit, n_random=9, among=pool)
    drawn = [circuits.random(GRAPH, 2, n, connected=True, among=pool) for n in range(9)]
    assert {frozenset(each) for each in drawn} == {frozenset(first), frozenset(second)}
    assert "9 random circuits of 2 to 3 edges do as well, drawn from 5 given edges" in repr(found)
    few = Circuit(GRAPH, ["input->logits"])
    with pytest.raises(ValueError, match=r"among must have at least n edges \(2\); got 1"):
        faithfulness(GRAPH.model, PAIRS, circuit, among=few)
    with pytest.raises(ValueError, match="n_random must be"):
        faithfulness(GRAPH.model, PAIRS, circuit, n_random=0)


def test_a_mean_can_take_the_place_of_the_other_text():
    with torch.no_grad():
        _, cache = run_with_cache(GRAPH.model, some_tokens(4), names=GRAPH.needed)
        source = GRAPH.mean(cache)
    found = faithfulness(GRAPH.model, PAIRS, Circuit(GRAPH, KEPT), source=source)
    ends = metric([], source=source), metric(EDGES, source=source)
    torch.testing.assert_close(found.circuit.mean()[0], share(metric(KEPT, source=source), *ends))


def test_examples_that_run_separately_get_their_own_source(monkeypatch):
    together = faithfulness(GRAPH.model, PAIRS, Circuit(GRAPH, KEPT))
    monkeypatch.setattr("interp.runs.masked._QUICK", 1)
    apart = faithfulness(GRAPH.model, PAIRS, Circuit(GRAPH, KEPT))
    torch.testing.assert_close(apart.circuit.values, together.circuit.values)
    torch.testing.assert_close(apart.random.values, together.random.values)


def test_the_criteria_leave_out_one_node_at_a_time():
    circuit = Circuit(GRAPH, KEPT)
    none, whole = metric([]), metric(EDGES)
    gap = (whole - none).mean()
    scores = evaluate_circuit(GRAPH.model, PAIRS, circuit)
    complete, minimal = scores.completeness, scores.minimality
    expected = share(metric(KEPT), none, whole)[None]
    torch.testing.assert_close(scores.faithfulness.mean(), expected)
    nodes = {edge.split("->")[0] for edge in KEPT}
    assert {*minimal.labels["node"]} == nodes
    assert complete.labels["without"] == (*minimal.labels["node"], "circuit")
    for node in ("input", "a0.h2", "m0"):
        own, every = ([*edges.without(node)] for edges in (circuit, Circuit(GRAPH, EDGES)))
        expected = (metric(every) - metric(own)).mean() / gap
        torch.testing.assert_close(complete.select(without=node).mean(), expected)
        lost = (metric(KEPT) - metric(own)).mean() / gap
        torch.testing.assert_close(minimal.select(node=node).mean(), lost)
    expected = (metric({*EDGES} - {*KEPT}) - none).mean() / gap
    torch.testing.assert_close(complete.select(without="circuit").mean(), expected)


def test_the_criteria_run_each_circuit_once(monkeypatch):
    circuits_run = []
    run = CircuitRuns.__call__
    monkeypatch.setattr(
        CircuitRuns, "__call__", lambda runs, c: circuits_run.append(frozenset(c)) or run(runs, c)
    )
    circuit = Circuit(GRAPH, KEPT)
    n_nodes = evaluate_circuit(GRAPH.model, PAIRS, circuit).minimality.shape[0]
    # Besides two runs for each node: the empty circuit, the model, the circuit, and the model
    # without the circuit.
    assert len(circuits_run) == len({*circuits_run}) == 2 * n_nodes + 4


def test_the_printed_criteria_list_the_nodes_that_the_circuit_needs_most(monkeypatch):
    monkeypatch.setattr("interp.effects.evaluation._MOST_NODES", 3)
    scores = evaluate_circuit(GRAPH.model, PAIRS, Circuit(GRAPH, KEPT))
    lines = repr(scores).splitlines()
    order = scores.minimality.mean().argsort(descending=True)[:3].tolist()
    expected = [scores.minimality.labels["node"][n] for n in order]
    assert [line.split()[0] for line in lines[4:8]] == [*expected, "circuit"]
    for line, place in zip(lines[4:], [*order, -1], strict=False):
        assert f"{scores.completeness.mean()[place]:+.4g}" in line
    assert f"{scores.minimality.mean()[order[0]]:+.4g}" in lines[4]
    assert "11 more nodes" in lines[8]
    assert lines[9].startswith("  inf: ")


def test_a_curve_has_the_areas_of_the_benchmark():
    scores = scored(6)
    found = circuit_curve(GRAPH.model, PAIRS, GRAPH, scores, shares=SHARES, seed=2)
    none, whole = metric([]), metric(EDGES)
    by_help = sorted(EDGES, key=by_edge(scores).get)
    by_size = sorted(EDGES, key=lambda edge: -abs(by_edge(scores)[edge]))
    runs = {
        kind: np.stack([metric(order[: int(p * len(EDGES))]).numpy() for p in SHARES])
        for kind, order in (("signed", by_help), ("absolute", by_size))
    }

    gap = (whole - none).double().numpy()
    faithful = {kind: (run - none.numpy()) / gap.mean() for kind, run in runs.items()}
    above = np.sign((gap / gap.mean() - faithful["absolute"]).mean(1, keepdims=True))
    heights = {
        "signed": faithful["signed"],
        "absolute": above * (gap / gap.mean() - faithful["absolute"]),
    }
    for measured, kind, height in (
        (found.cpr, "signed", lambda f: f),
        (found.cmd, "absolute", lambda f: abs(1 - f)),
    ):
        expected = trapezoid(height(faithful[kind].mean(1)), SHARES)
        assert measured.value == pytest.approx(expected, rel=1e-5)
        each = torch.from_numpy(trapezoid(heights[kind], SHARES, axis=0))
        ends = [end.item() for end in interval(each[None], (whole - none) / gap.mean())]
        assert (measured.low, measured.high) == pytest.approx(ends, rel=1e-4)
    random = []
    for p in SHARES:
        n = int(p * len(EDGES))
        few = circuits.greedy(GRAPH, scores, min(2 * n, len(EDGES)), exact=True)
        random.append(metric(circuits.random(GRAPH, n, 2, connected=True, among=few)))
    expected = torch.stack([share(values, none, whole) for values in random])
    torch.testing.assert_close(found.random.mean(), expected)
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    lines = {line.get_label(): line for line in found.plot().axes[0].lines}
    for kind in ("signed", "absolute", "random"):
        shown = lines[kind].get_xydata()
        assert shown[:, 0] == pytest.approx(SHARES)
        assert shown[:, 1] == pytest.approx(getattr(found, kind).mean().numpy())


def test_a_curve_of_circuits_that_do_nothing_says_so():
    scores = scored(6)
    # No edge from the input is among the strongest edges, so no small circuit has a path.
    weak, sizes = without_input(scores), (0.01, 0.05, 0.1, 1.0)
    curve = repr(circuit_curve(GRAPH.model, PAIRS, GRAPH, weak, shares=sizes))
    assert "3 of 4 circuits of the edges that help do nothing: use edge_attribution" in curve
    assert "do nothing" not in repr(circuit_curve(GRAPH.model, PAIRS, GRAPH, scores, shares=SHARES))


def test_pairs_that_a_circuit_was_found_on_are_noticed():
    first, second = PAIRS[[0, 1, 2]], PAIRS[[2, 3, 4]]
    circuit = circuits.top(GRAPH, scored(6, texts=first.digests()), 60)
    with pytest.warns(UserWarning, match="1 of these 3 pairs"):
        faithfulness(GRAPH.model, second, circuit)
    faithfulness(GRAPH.model, second[[1, 2]], circuit)


@pytest.mark.parametrize("find", [edge_patching, edge_attribution])
def test_a_circuit_knows_the_pairs_that_its_scores_are_from(find):
    model, pairs = made(n_layers=1), Pairs(*TEXTS, ANSWERS)
    scores = find(model, pairs[[0, 1, 2]])
    circuit = circuits.top(Graph(model), scores, 20)
    assert circuit.found_on == {*pairs[[0, 1, 2]].digests()}
    with pytest.warns(UserWarning, match="1 of these 3 pairs"):
        faithfulness(model, pairs[[2, 3, 4]], circuit)
    with pytest.warns(UserWarning, match="3 of these 3 pairs"):
        circuit_curve(model, pairs[[0, 1, 2]], Graph(model), scores, shares=SHARES)


def test_a_circuit_with_separate_embeddings():
    model, pairs = made(embed_norm=True), Pairs(*TEXTS, ANSWERS)
    nodes = Graph(model, split_embeddings=True)
    edges = ["embed->a0.h1<v>", "pos_embed->a1.h5<q>", "a0.h3->logits"]
    found = edge_patching(model, pairs, edges, split_embeddings=True)
    for edge, effect in zip(edges, found.values, strict=True):
        mask = torch.zeros(nodes.allowed.shape)
        mask[nodes.index(edge)] = 1
        with torch.no_grad():
            exact = (
                pairs.metric(run_circuit(model, pairs, mask, split_embeddings=True)) - found.base
            )
        torch.testing.assert_close(effect, exact)
    kept = nodes.edges[::3]
    measured = faithfulness(model, pairs, Circuit(nodes, kept), max_bytes=100_000)
    with torch.no_grad():
        own, none, whole = (
            pairs.metric(run_circuit(model, pairs, given, split_embeddings=True))
            for given in (kept, [], nodes.edges)
        )
    torch.testing.assert_close(measured.circuit.mean()[0], share(own, none, whole))
    with pytest.raises(ValueError, match="max_bytes"):
        faithfulness(model, pairs, Circuit(nodes, kept), max_bytes=100)


@pytest.mark.parametrize("method", ["eap", "eap_ig_inputs"])
def test_edges_of_separate_embeddings_add_up_to_edges_of_the_input(method):
    model = made(embed_norm=True, n_layers=1).requires_grad_(False)
    nodes, pairs = Graph(model, split_embeddings=True), Pairs(*TEXTS, ANSWERS)
    found, joined = (
        edge_attribution(model, pairs, method=method, split_embeddings=apart)
        for apart in (True, False)
    )
    of_each = dict(zip(nodes.edges, found.values, strict=True))
    for edge, values in zip(Graph(model).edges, joined.values, strict=True):
        if edge.startswith("input->"):
            each = [of_each[edge.replace("input", name)] for name in ("embed", "pos_embed")]
            torch.testing.assert_close(sum(each), values)
            assert each[1].abs().max() > 1e-6
    assert found.about.get("gaps") == joined.about.get("gaps")
    if method == "eap":
        mask = torch.zeros(nodes.allowed.shape).double().requires_grad_()
        pairs.metric(run_circuit(model, pairs, mask, split_embeddings=True)).mean().backward()
        torch.testing.assert_close(found.mean(), mask.grad[nodes.allowed])


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.2), (0.0, 1.0), (0.5, 1.5)])
def test_shares_must_rise_to_at_most_1(shares):
    with pytest.raises(ValueError, match="shares must"):
        circuit_curve(GRAPH.model, PAIRS, GRAPH, scored(), shares=shares)


def test_circuits_that_cannot_be_measured_are_errors():
    with pytest.raises(ValueError, match="other nodes"):
        faithfulness(variant("grouped", n_layers=3), PAIRS, Circuit(GRAPH, KEPT))
    same = Pairs(PAIRS.clean, PAIRS.clean, ANSWERS)
    with pytest.raises(ValueError, match="must differ"):
        faithfulness(GRAPH.model, same, Circuit(GRAPH, KEPT))
    with pytest.raises(ValueError, match="at least one edge"):
        evaluate_circuit(GRAPH.model, PAIRS, Circuit(Graph(GRAPH.model), []))


@pytest.mark.filterwarnings("ignore:the circuit was found on")
def test_random_edges_are_drawn_from_the_strongest_edges():
    model = pydoc()
    pairs = Pairs("def __ini", "def __nam", ("t", "e")).read_by(model)
    nodes = Graph(model)
    scores = edge_attribution(model, pairs)
    circuit = circuits.greedy(nodes, scores, 12, exact=True)
    strongest = circuits.greedy(nodes, scores, 24, exact=True)
    found = faithfulness(model, pairs, circuit, n_random=1, seed=3)
    drawn = circuits.random(nodes, 12, 3, connected=True, among=strongest)
    none, kept, whole = (
        measure(pairs.metric, run_circuit(model, pairs, edges))
        for edges in ([], drawn, nodes.edges)
    )
    torch.testing.assert_close(found.random.values[0], (kept - none) / (whole - none))
    assert abs(float(found.random.values)) > 1e-3
    given = faithfulness(model, pairs, circuit, n_random=1, seed=3, among=strongest)
    assert torch.equal(given.random.values, found.random.values)
    helping = circuits.greedy(nodes, scores, 12, signed=True, exact=True)
    drawn = faithfulness(model, pairs, helping, n_random=1, seed=3)
    strongest_help = circuits.greedy(nodes, scores, 24, signed=True, exact=True)
    assert {*strongest_help} != {*strongest}
    given_help = faithfulness(model, pairs, helping, n_random=1, seed=3, among=strongest_help)
    assert torch.equal(drawn.random.values, given_help.random.values)
    assert "24 given edges" in repr(given)
    n = int(0.05 * len(nodes.edges))
    curve = circuit_curve(model, pairs, nodes, scores, shares=(0.05, 1.0), seed=3)
    strongest = circuits.greedy(nodes, scores, 2 * n, exact=True)
    drawn = circuits.random(nodes, n, 3, connected=True, among=strongest)
    kept = measure(pairs.metric, run_circuit(model, pairs, drawn))
    torch.testing.assert_close(curve.random.values[0], (kept - none) / (whole - none))
