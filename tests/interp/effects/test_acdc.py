"""ACDC, compared with a simple loop, on a model whose circuit is known.

Total and direct effects of nodes are compared with hooks.
"""

import pytest
import torch

from hooks import HookedRunner
from interp import Pairs, logit_diff, node_effects
from interp.effects.acdc import acdc
from interp.graph import Graph
from interp.runs.masked import run_circuit
from tests.interp.planted import case
from tests.reference import variant
from tests.shipped import pydoc


def pairs_of(model, seed=0):
    draw = torch.Generator().manual_seed(seed)
    clean, corrupted = torch.randint(0, model.config.vocab_size, (2, 3, 6), generator=draw)
    return Pairs(clean, corrupted, torch.tensor([[1, 2], [3, 4], [5, 6]]))


@torch.no_grad()
def written_out(model, pairs, threshold, pos=-1):
    """Run ACDC as a loop that removes one edge at a time and runs the rest with `run_circuit`.

    Return the edges that remain, and the change that each removal made.
    """
    graph, whole = Graph(model), model(pairs.clean).double().log_softmax(-1)
    left, current, added = [*graph.edges], 0.0, {}
    for reader in reversed(graph.readers):
        for writer in reversed(graph.writers):
            edge = f"{writer}->{reader}"
            if edge not in left:
                continue
            fewer = [other for other in left if other != edge]
            circuit = run_circuit(model, pairs, fewer).double().log_softmax(-1)
            each = (whole.exp() * (whole - circuit)).sum(-1)
            new = float((each.mean(-1) if pos is None else each[:, pos]).mean())
            added[edge] = new - current
            if new - current < threshold:
                left, current = fewer, new
    return left, added


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "pos"), [("pre", -1), ("pre", None), ("parallel", -1)])
def test_acdc_is_the_loop_written_out(name, pos):
    model = variant(name, n_layers=2, n_heads=2).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0)
    pairs, thresholds = pairs_of(model), [0.002, 0.02]
    found = acdc(model, pairs, thresholds, pos=pos)
    sizes = []
    for threshold in thresholds:
        circuit, (left, added) = found[threshold], written_out(model, pairs, threshold, pos)
        graph = circuit.graph
        sizes.append(len(circuit))
        # `acdc` does not test readers from which no path leads to the logits. The loop tests their
        # edges, and finds that they have no effect.
        assert {*circuit} == {*left}
        for edge, change in added.items():
            score = float(circuit.scores[graph.index(edge)])
            assert score == pytest.approx(-change, abs=1e-9) or (
                score != score and abs(change) < 1e-9
            )
    assert 0 < sizes[1] < sizes[0] < len(graph.edges)


def test_padding_changes_no_circuit():
    model, pairs = variant("pre", n_layers=2, n_heads=2).double(), pairs_of(variant("pre"))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, :3] = False
    texts = [
        torch.cat([torch.zeros(3, 3).long(), each], 1) for each in (pairs.clean, pairs.corrupted)
    ]
    padded = Pairs(*texts, attention_mask=mask)
    for pos in (-1, None):
        one, other = (acdc(model, each, 0.001, pos=pos)[0.001] for each in (pairs, padded))
        assert one == other
        torch.testing.assert_close(one.scores, other.scores, equal_nan=True, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["comparison", "induction"])
def test_a_planted_circuit_is_found(name):
    model, pairs, _graph, known = case(name, is_saturated=True)
    circuit = acdc(model, Pairs(pairs.clean, pairs.corrupted), [1e-3])[1e-3]
    assert circuit.pruned() == known


def test_thresholds_share_their_tests():
    model, pairs = pydoc(), Pairs("def __ini", "def __nam")
    one = acdc(model, pairs, 1.0)
    both = acdc(model, pairs, [1.0, 2.0])
    assert both[1.0] == one[1.0]
    assert len(both[2.0]) < len(both[1.0])
    assert both[1.0].found_on == {*pairs.read_by(model).digests()}
    for wrong in ([], [0.1, 0.0]):
        with pytest.raises(ValueError, match="thresholds must be numbers above 0"):
            acdc(model, pairs, wrong)


@pytest.mark.parametrize("source", ["pair", "zero"])
def test_total_and_direct_effects_match_hooks(source):
    model = variant("pre", n_layers=2, n_heads=3).double()
    pairs, runner = pairs_of(model), HookedRunner(model)
    found = node_effects(model, pairs, source)
    metric = logit_diff(pairs.answers[:, 0], pairs.answers[:, 1])
    base, cache = runner.run_with_cache(pairs.clean)
    other = runner.run_with_cache(pairs.corrupted)[1]

    def difference(name, head=None):
        added = other[name] - cache[name] if source == "pair" else -cache[name]
        if head is None:
            return added
        return added[..., head, :] @ model.blocks[int(name[7])].attn.W_O[head]

    places = {"input": ("blocks.0.resid_pre", None)}
    for layer in (0, 1):
        places |= {f"a{layer}.h{head}": (f"blocks.{layer}.attn.z", head) for head in range(3)}
        places[f"m{layer}"] = (f"blocks.{layer}.mlp_out", None)
    assert found.labels["node"] == tuple(n for n in found.labels["node"] if n in places)
    assert len(found.labels["node"]) == len(places)
    for node, (name, head) in places.items():
        change = difference(name, head)
        at = name.replace("attn.z", "attn_out")
        total = runner.run_with_hooks(pairs.clean, hooks={at: lambda v, p, c=change: v + c})
        direct = model.unembed(cache["blocks.1.resid_post"] + change)
        for effect, logits in (("total", total), ("direct", direct)):
            values = found.select(effect=effect, node=node).values
            expected = metric(logits) - metric(base)
            torch.testing.assert_close(values, expected.detach(), atol=1e-9, rtol=1e-9)
        later = found.select(effect="later", node=node).values
        torch.testing.assert_close(
            later, (metric(total) - metric(direct)).detach(), atol=1e-9, rtol=1e-9
        )
