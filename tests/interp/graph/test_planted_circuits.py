"""Circuits whose edges are known, because the weights of the model are written by hand."""

import pytest
import torch

from interp import edge_attribution, edge_patching, evaluate_circuit, faithfulness
from interp.effects.evaluation import circuit_auroc
from interp.graph.circuit import Circuit
from interp.graph.circuits import above, greedy, top
from tests.interp.planted import KNOWN, case

CASES = pytest.mark.parametrize("name", KNOWN)


@CASES
def test_exact_patching_finds_exactly_the_edges(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    found = edge_patching(model, pairs)
    assert circuit_auroc(found, known) == 1
    assert above(graph, found, 1e-9) == greedy(graph, found, len(known), signed=True) == known


@CASES
def test_gradients_find_the_edges_without_saturation(name):
    model, pairs, graph, known = case(name, is_saturated=False)
    for method in ("eap", "eap_ig_inputs", "eap_ig_activations"):
        found = edge_attribution(model, pairs, method=method)
        assert circuit_auroc(found, known) == 1
        assert top(graph, found, len(known)) == known


@CASES
def test_gradients_miss_edges_with_saturation(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    found = edge_attribution(model, pairs)
    assert circuit_auroc(found, known) < 0.9
    assert not {*known} <= {*above(graph, found, 1e-9)}


@CASES
def test_the_known_circuit_is_faithful_complete_and_minimal(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    scores = evaluate_circuit(model, pairs, known)
    found = faithfulness(model, pairs, known)
    own = found.circuit.mean().item()
    assert scores.faithfulness.mean().item() == own == pytest.approx(1, abs=0.01)
    assert found.n_as_good == 0
    assert found.random.mean().median().abs() < 0.5
    rest = scores.completeness.values
    torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-9, rtol=0)
    assert (scores.minimality.mean() > 0.1).all()
    wider = known | Circuit(graph, ["input->m0"] if name == "comparison" else ["a0.h0->a1.h2<k>"])
    assert faithfulness(model, pairs, wider).circuit.mean().item() == pytest.approx(own)
