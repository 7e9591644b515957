"""Claims about circuits: their numbers against separate runs, and verdicts of known circuits."""

import copy

import pytest
import torch

from interp import Circuit, Claim, Pairs, Result, edge_attribution, run_circuit, run_with_cache
from interp.graph import Graph, circuits
from tests.interp.claims.known import (
    COMPARISON,
    EDGES,
    claim_of,
    comparison_pairs,
    induction_pairs,
    model_of,
)
from tests.reference import some_tokens, variant


def metric(edges, pairs, **options):
    """Return the metric of a separate run of a circuit, for each example."""
    with torch.no_grad():
        logits = run_circuit(model_of("induction"), pairs, [*edges], **options)
    right, wrong = pairs.answers.unbind(1)
    rows = torch.arange(len(pairs))
    return logits[rows, -1, right] - logits[rows, -1, wrong]


def test_the_numbers_of_a_verdict_are_those_of_separate_runs():
    model = model_of("induction")
    pairs, fresh = induction_pairs(13, 1), induction_pairs(11, 2)
    graph = Graph(model)
    extra = ["input->logits", "input->a1.h0<v>", "a1.h0->logits"]
    circuit = Circuit(graph, [*EDGES[:-2], *EDGES[-1:], *extra])
    claim = Claim.circuit(model, pairs, circuit, "all but one edge", test=fresh, seeds=2)
    verdict = claim.verify()
    every = Circuit(graph, graph.edges)

    def share(kept, base=(), options=None):
        options = options or {}
        ends = metric(every, fresh, **options), metric([], fresh, **options)
        gap = (ends[0] - ends[1]).mean()
        of_base = ends[1] if not base else metric(base, fresh, **options)
        return ((metric(kept, fresh, **options) - of_base).mean() / gap).item()

    assert verdict["faithful"].measured == pytest.approx(share(circuit))
    assert verdict["left without it"].measured == pytest.approx(share(every - circuit))
    exchanged = {"direction": "denoising"}
    assert verdict["texts exchanged"].measured == pytest.approx(share(circuit, (), exchanged))
    with torch.no_grad():
        texts = torch.cat([fresh.clean, fresh.corrupted])
        mean = graph.mean(run_with_cache(model, texts, names=graph.needed)[1])
    ablated = share(circuit, (), {"source": mean})
    assert verdict["mean ablation"].measured == pytest.approx(ablated)
    # The better half: the edges whose removal costs most on the pairs of the claim.
    whole = metric(circuit, pairs)
    costs = {}
    for edge in circuit:
        costs[edge] = (whole - metric({*circuit} - {edge}, pairs)).mean().item()
    half = sorted(circuit, key=costs.get, reverse=True)[:4]
    assert verdict["above its better half"].measured == pytest.approx(share(circuit, half))
    # Circuits of the same size from halves of the claim's pairs.
    again = []
    for seed in range(2):
        scores = edge_attribution(model, pairs.split(seed)[0])
        again.append(share(circuits.greedy(graph, scores, 7)))
    expected = share(circuit) - sum(again) / 2
    assert verdict["as good as found again"].measured == pytest.approx(expected)
    gap = (metric(every, fresh) - metric([], fresh)).mean().item()
    assert verdict["behaviour"].measured == pytest.approx(gap)
    # The best of two random circuits, whose edges all have a path to the logits.
    randoms = []
    for seed in range(2):
        numbers = torch.rand(len(graph.edges), 1, generator=torch.Generator().manual_seed(seed))
        scores = Result(numbers, ("edge", "example"), labels={"edge": graph.edges})
        randoms.append(share(circuits.greedy(graph, scores, 7)))
    expected = share(circuit) - max(randoms)
    assert verdict["above random circuits"].measured == pytest.approx(expected)
    assert verdict["faithful"].promised == "0.8 to 1.2"
    assert verdict["as good as found again"].promised == "at least -0.2"
    assert verdict["left without it"].promised == "at most 0.2"
    assert verdict["mean ablation"].promised == "at least 0.5"


def test_the_behaviour_of_a_model_with_shuffled_weights_is_a_share():
    model = variant("grouped")
    texts = [some_tokens(seed) for seed in (1, 2)]
    answers = torch.tensor([[3, 1], [0, 4], [7, 2], [22, 9], [5, 8]])
    found_on = Pairs(some_tokens(3), some_tokens(4), answers)
    claim = Claim.effect(model, found_on, "c", head=(0, 1), test=Pairs(*texts, answers))
    measured = claim.verify(seeds=1)["shuffled weights"].measured
    shuffled = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    gaps = []
    with torch.no_grad():
        for weight in shuffled.parameters():
            numbers = weight.flatten()[torch.randperm(weight.numel(), generator=draw)]
            weight.copy_(numbers.view_as(weight))
        for one in (shuffled, model):
            clean, corrupted = (one(tokens)[:, -1].gather(1, answers) for tokens in texts)
            change = clean - corrupted
            gaps.append((change[:, 0] - change[:, 1]).mean().item())
    assert gaps[0] != 0
    assert measured == pytest.approx(gaps[0] / gaps[1], rel=1e-4)


def test_known_circuits_hold():
    claim = claim_of(EDGES, says="two heads copy the token after the last one", seeds=2)
    verdict = claim.verify(paraphrase=induction_pairs(9, 5))
    assert {test.status for test in verdict.tests} == {"holds"}
    assert verdict["paraphrase"].measured == pytest.approx(1)
    model = model_of("comparison")
    circuit = Circuit(Graph(model), COMPARISON)
    claim = Claim.circuit(model, comparison_pairs(15, 1), circuit, "a sum is above 5")
    assert claim.verify(fresh=comparison_pairs(17, 2), seeds=3).status == "holds"


EXTRA = [
    "a0.h0->logits",
    "input->a0.h0<v>",
    "input->a1.h0<k>",
    "a0.h0->a1.h0<k>",
    "a0.h1->a1.h0<k>",
]
FALSE = {
    "an edge is missing": (EDGES[:-1], "faithful", "fails"),
    "half of the edges do nothing": ([*EDGES, *EXTRA], "above its better half", "fails"),
    "all edges": (Graph(model_of("induction")).edges, "above random circuits", "fails"),
    "the rest suffices": (EXTRA, "left without it", "fails"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FALSE)
def test_false_circuits_fail(name):
    edges, test, status = FALSE[name]
    verdict = claim_of(edges, n=12, seeds=2).verify()
    assert verdict[test].status == status
    assert verdict.status == "fails"


@pytest.mark.full
def test_a_promise_below_the_measured_number_holds():
    graph = Graph(model_of("induction"))
    # One of three kinds of pairs needs the edge to the query.
    circuit = Circuit(graph, [edge for edge in EDGES if edge != "input->a1.h2<q>"])
    pairs, test = induction_pairs(24, 1), induction_pairs(30, 2)
    measured = []
    for promised in (0.95, 0.3):
        claim = Claim.circuit(graph.model, pairs, circuit, "c", test=test, faithful=promised)
        measured.append(claim.verify(seeds=1)["faithful"])
    assert [test.status for test in measured] == ["fails", "holds"]
    assert measured[0].measured == measured[1].measured


def test_a_claim_is_not_tested_on_the_pairs_that_it_was_found_on():
    model = model_of("induction")
    graph = Graph(model)
    pairs, test = induction_pairs(6, 1), induction_pairs(7, 2)
    circuit = Circuit(graph, EDGES)
    same = Claim.circuit(model, pairs, circuit, "c", test=pairs).verify(seeds=1)
    assert (same.status, same["texts"].status, same["texts"].measured) == (
        "cannot tell",
        "cannot tell",
        0,
    )
    both = Pairs(
        torch.cat([pairs.clean[:5], test.clean]),
        torch.cat([pairs.corrupted[:5], test.corrupted]),
        torch.cat([pairs.answers[:5], test.answers]),
    )
    claim = Claim.circuit(model, pairs, circuit, "c")
    assert claim.verify(fresh=both, seeds=1)["texts"].measured == 7
    # The circuit itself knows the pairs that it was found on.
    scored = Circuit(graph, EDGES, found_on=test[:3].digests())
    claim = Claim.circuit(model, pairs, scored, "c")
    few = claim.verify(fresh=test, seeds=1)
    assert (few["texts"].measured, few["texts"].status) == (4, "holds")
    assert claim.verify(fresh=test[:6], seeds=1)["texts"].status == "cannot tell"


def test_without_a_behaviour_there_are_no_shares():
    model = model_of("induction")
    pairs = induction_pairs(8, 1)
    same = Pairs(pairs.clean, pairs.clean, pairs.answers)
    claim = Claim.circuit(model, pairs, Circuit(Graph(model), EDGES), "c")
    verdict = claim.verify(fresh=same, seeds=1)
    assert verdict["behaviour"].status == "fails"


def test_pairs_that_do_not_fit_a_file_are_errors():
    model, pairs = model_of("induction"), induction_pairs(5, 1)
    circuit = Circuit(Graph(model), EDGES)

    def claim(pairs, circuit=circuit, **options):
        return Claim.circuit(model, pairs, circuit, "c", **options)

    with pytest.raises(ValueError, match="must have answers"):
        claim(Pairs(pairs.clean, pairs.corrupted, metric=lambda logits: logits[:, -1, 0]))
    with pytest.raises(ValueError, match="metric"):
        claim(pairs.measured_by(lambda logits: logits[:, -1, 0]))
    spans = {"last": [[10]] * 5}
    with pytest.raises(ValueError, match="no spans"):
        claim(Pairs(pairs.clean, pairs.corrupted, pairs.answers, spans=spans))
    with pytest.raises(ValueError, match="at least one edge"):
        claim(pairs, Circuit(Graph(model), []))
    with pytest.raises(ValueError, match="other nodes"):
        claim(pairs, Circuit(Graph(model_of("comparison")), COMPARISON))
    with pytest.raises(ValueError, match="faithful must be a number from 0 to 1; got 1.5"):
        claim(pairs, faithful=1.5)
    with pytest.raises(ValueError, match="robust"):
        claim(pairs, robust=float("nan"))
    with pytest.raises(ValueError, match="says"):
        Claim.circuit(model, pairs, circuit, " ")
