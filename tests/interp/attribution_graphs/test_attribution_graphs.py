"""Attribution graphs: the effects on a node add up to its value.

Each effect equals a change in a run in which norms and patterns keep their values.
"""

import json
import math
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from hooks import HookedRunner
from interp.attribution_graphs import attribution_graph, influence
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.intervention import Intervention, predicted_changes
from interp.features import (
    CrossLayerTranscoder,
    Dictionary,
    Gated,
    JumpReLU,
    MatchingPursuit,
    TopK,
    splice,
)
from models import Transformer, TransformerConfig, attach, from_transformer_lens
from tests.attachable import made
from tests.count import ROOT
from tests.decoders import FOREIGN, KINDS, KNOWN
from tests.interp.attribution_graphs.transcoders import (
    FORMS,
    SIZES,
    TEXT,
    drawn,
    model_of,
    skip_of,
    transcoder,
    transcoders,
)


def moved(model, dictionaries, vectors, cache=None):
    """Return the changes of all reads and of the logits' input when vectors are added at points.

    Patterns, scales of norms and MLPs are frozen: they keep the values of `cache`.
    """
    runner = HookedRunner(model)
    cache = runner.run_with_cache(TEXT, mode="full")[1] if cache is None else cache
    seen = {}

    def freeze(value, at):
        return cache[at.name]

    def see(value, at):
        seen[at.name] = value.detach().clone()

    def write(value, at):
        written = cache[at.name]
        reads = at.name.replace("mlp_out", "ln2.normalized")
        skip = skip_of(dictionaries, at.name)
        return written if skip is None else written + (seen[reads] - cache[reads]) @ skip

    def add(value, at):
        return value + vectors[at.name]

    points = [("*.scale", freeze), ("*.pattern", freeze), ("*.mlp_out", write)]
    reads = [f"blocks.{n}.{name}" for n in range(3) for name in ("ln2.normalized", "resid_mid")]
    runner.run_with_hooks(
        TEXT,
        hooks=[
            *points,
            *((name, see) for name in (*reads, "ln_final.normalized") if name in cache),
            *((name, add) for name in vectors),
        ],
    )
    return {name: (value - cache[name])[0] for name, value in seen.items()}


CASES = [(form, "layer") for form in FORMS] + [
    ("rms", "across"),
    ("sandwich", "across"),
    ("rms", "across, with skips"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "kind"), CASES)
def test_rows_add_up_and_equal_changes_of_a_frozen_run(form, kind):
    model = model_of(form)
    reads = "resid_mid" if kind == "across" or form == "output" else "ln2.normalized"
    dictionaries = transcoders(kind, reads)
    run = FrozenRun(model, TEXT, dictionaries)
    features = [*zip(*(each.tolist() for each in (run.layer, run.pos, run.feature)), strict=True)]
    targets = run.of_features(torch.arange(len(features))), run.of_logits(torch.eye(7)[[2, 5]])
    rows = [run.rows(each) for each in targets]
    # The slope of a gate is 1, so the total of a feature is its activation.
    torch.testing.assert_close(targets[0].total, run.activation)
    for row, target in zip(rows, targets, strict=True):
        torch.testing.assert_close(row.sum(1), target.total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(run.rows(run.of_features(torch.tensor([0])))[0], rows[0][0])
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    before_cap = model.unembedding(cache["ln_final.normalized"])[0, -1]
    expected = before_cap[[2, 5]] - before_cap.mean()
    torch.testing.assert_close(targets[1].total, expected, rtol=1e-10, atol=1e-10)

    def decoders(layer, feature):
        if kind.startswith("across"):
            return {
                f"blocks.{layer + n}.mlp_out": dictionaries.W_dec[layer][feature, n]
                for n in range(3 - layer)
            }
        return {(name := f"blocks.{layer}.mlp_out"): dictionaries[name].W_dec[feature]}

    def encoder(layer, feature):
        if kind.startswith("across"):
            return dictionaries.W_enc[layer][:, feature]
        return dictionaries[f"blocks.{layer}.mlp_out"].W_enc[:, feature]

    def at(pos, value):
        return torch.zeros(1, 5, 8).double().index_fill(1, torch.tensor(pos), 1) * value

    sources = {
        n: {
            name: at(pos, run.activation[n] * row) for name, row in decoders(layer, feature).items()
        }
        for n, (layer, pos, feature) in [*enumerate(features)][::3]
    }
    sources[len(features) + 5 + 2] = {"blocks.1.mlp_out": at(2, run.errors[1])}
    if not FORMS[form].get("embed_norm"):
        sources[len(features) + 3 * 5 + 1] = {"embed": at(1, cache["embed"])}
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, [2, 5]]
    for source, vectors in sources.items():
        changes = moved(model, dictionaries, vectors)
        first = min(vectors)
        for other, (layer, pos, feature) in enumerate(features):
            read = changes[f"blocks.{layer}.{reads}"][pos] @ encoder(layer, feature)
            # A frozen MLP has its cached value, so a vector at an MLP changes only later reads.
            later = f"blocks.{layer}.mlp_out" > first or first == "embed"
            assert rows[0][other, source] == pytest.approx(float(read) if later else 0, abs=1e-9)
        change = changes["ln_final.normalized"][-1] @ W_U
        torch.testing.assert_close(rows[1][:, source], change, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def peer():
    """Return the graph of circuit-tracer for the same model and transcoders
    (tests/circuit_tracer/make_graph.py).
    """
    with safe_open(ROOT / "tests" / "circuit_tracer" / "circuit_tracer.safetensors", "pt") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    model = from_transformer_lens(weights, about["config"]).eval()
    dictionaries = {}
    for n in range(3):
        own = {
            name.rsplit(".", 1)[1]: t
            for name, t in tensors.items()
            if name.startswith(f"transcoders.{n}.")
        }
        dictionaries[f"blocks.{n}.mlp_out"] = Dictionary(
            own["W_enc"].T,
            own["W_dec"],
            own["b_enc"],
            own["b_dec"],
            JumpReLU(own["threshold"], relu=False),
            W_skip=own["W_skip"].T,
            reads="ln2.normalized",
        )
    return model, dictionaries, torch.tensor([about["text"]]), tensors


def test_the_effects_match_circuit_tracer(peer):
    model, dictionaries, text, theirs = peer
    graph = attribution_graph(model, text, dictionaries, targets=4, first=1)
    assert [node.number for node in graph.logits] == theirs["logits"].tolist()
    ours = torch.stack([graph.run.layer, graph.run.pos, graph.run.feature], 1)
    assert ours.tolist() == theirs["features"].tolist()
    torch.testing.assert_close(graph.run.activation, theirs["activations"])
    torch.testing.assert_close(graph.weights[:4], theirs["probabilities"])
    # The nodes of circuit-tracer are features, errors and tokens. It has no nodes for positions and
    # constants.
    n_sources = len(ours) + 3 * 6 + 6
    matrix = torch.zeros_like(theirs["matrix"])
    matrix[graph.column[4:], :n_sources] = graph.rows[4:, :n_sources]
    matrix[-4:, :n_sources] = graph.rows[:4, :n_sources]
    # circuit-tracer also leaves out the errors at the first position.
    matrix[:, [len(ours), len(ours) + 6, len(ours) + 12]] = 0
    torch.testing.assert_close(matrix, theirs["matrix"], rtol=1e-9, atol=1e-9)
    assert graph.gap < 1e-12


def test_influence_pruning_and_scores_match_circuit_tracer(peer):
    model, dictionaries, text, theirs = peer
    graph = attribution_graph(model, text, dictionaries, targets=4, first=1)
    n_features, n_sources = len(graph.run.layer), len(theirs["matrix"]) - 4
    rows = torch.cat([theirs["matrix"][-4:, :n_sources], theirs["matrix"][:n_features, :n_sources]])
    column = torch.cat([torch.full((4,), -1), torch.arange(n_features)])
    weights = torch.zeros(len(rows)).double()
    weights[:4] = theirs["probabilities"]
    of_each = influence.influence(influence.shares_of_rows(rows), weights, column)
    torch.testing.assert_close(of_each, theirs["influence"][:n_sources])
    is_token = torch.arange(n_sources) >= n_sources - 6
    nodes, edges = influence.pruned(rows, weights, column, is_token, 0.8, 0.98)
    assert torch.equal(nodes, theirs["nodes"][:n_sources])
    expected = torch.cat(
        [theirs["edges"][-4:, :n_sources], theirs["edges"][:n_features, :n_sources]]
    )
    assert torch.equal(edges, expected)
    torch.testing.assert_close(influence.cumulative(of_each), theirs["cumulative"][:n_sources])
    # The scores of a graph that contains only these rows.
    graph = replace(graph, rows=functional.pad(rows, (0, 7)), column=column, weights=weights)
    scores = torch.tensor([graph.replacement, graph.completeness]).double()
    torch.testing.assert_close(scores, theirs["scores"], rtol=1e-6, atol=1e-6)


def test_an_effect_is_the_sum_over_targets_that_are_asked_for():
    model = model_of("rms")
    dictionaries = transcoders("layer", "ln2.normalized")
    run = FrozenRun(model, TEXT, dictionaries)
    named = [int(each[-1]) for each in (run.layer, run.feature, run.pos)]
    graph = attribution_graph(
        model, TEXT, dictionaries, targets=[2, (2, 5), tuple(named)], pos=-2, max_features=9
    )
    logits = model(TEXT)[0, -2].detach()
    assert [node.pos for node in graph.logits] == [3, 3]
    assert float(graph.totals[0]) == pytest.approx(float(logits[2] - logits.mean()))
    assert float(graph.totals[1]) == pytest.approx(float(logits[2] - logits[5]))
    assert graph.logits[0].probability == pytest.approx(float(logits.softmax(-1)[2]))
    assert graph.weights[:4].tolist() == [graph.logits[0].probability, 1, 1, 0]
    assert graph.column[2] == len(run.layer) - 1
    assert len(graph.rows) == 2 + 9
    # The features with the most influence have rows, and each row equals the row of the feature
    # alone.
    rows = run.rows(run.of_features(graph.column[2:]))
    torch.testing.assert_close(graph.rows[2:], rows)
    whole = attribution_graph(model, TEXT, dictionaries, targets=[2, (2, 5), tuple(named)], pos=-2)
    assert len(whole.rows) == 2 + len(run.layer)
    assert whole.replacement > graph.replacement
    quiet = graph.nodes[({*range(len(run.layer))} - {*graph.column.tolist()}).pop()].id
    with pytest.raises(ValueError, match="has no row: increase max_features"):
        graph.effect("E_3_0", quiet)
    few = attribution_graph(model, TEXT, dictionaries, targets=[2], max_bytes=1, max_features=9)
    torch.testing.assert_close(
        few.rows, attribution_graph(model, TEXT, dictionaries, targets=[2], max_features=9).rows
    )


@pytest.mark.parametrize("pick", [{"targets": 3}, {"desired_prob": 0.5}, {}])
def test_likely_tokens_are_targets_until_the_probability_is_reached(pick):
    model = model_of("plain")
    graph = attribution_graph(model, TEXT, {}, **pick)
    chances = model(TEXT)[0, -1].softmax(-1).sort(descending=True)
    wanted = next(
        n for n in range(1, 8) if chances.values[:n].sum() >= pick.get("desired_prob", 0.95)
    )
    wanted = min(wanted, pick.get("targets", 10))
    assert [node.number for node in graph.logits] == chances.indices[:wanted].tolist()
    # A layer without a transcoder has only errors.
    assert len(graph.run.layer) == 0
    assert {node.kind for node in graph.nodes} == {"error", "token", "position", "bias", "logit"}
    assert graph.gap < 1e-12


def test_cutting_a_head_removes_its_paths():
    """Cutting a head equals a model in which this head adds nothing, with the same patterns and
    scales as before.
    """
    model = model_of("rms")
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = attribution_graph(model, TEXT, dictionaries, targets=[2, 5])
    source = "E_4_2"
    lost = graph.heads(source, graph.logits[1].id).values[..., 0]
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    vector = torch.zeros_like(cache["embed"])
    vector[0, 2] = cache["embed"][0, 2]
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, 5]
    for layer, head in [(0, 1), (1, 0), (2, 3)]:
        with torch.no_grad():
            kept = model.blocks[layer].attn.W_O[head].clone()
            whole = moved(model, dictionaries, {"embed": vector})["ln_final.normalized"][-1] @ W_U
            model.blocks[layer].attn.W_O[head] = 0
            # Another cache would have other scales, so the scales of the whole model stay frozen.
            cut = (
                moved(model, dictionaries, {"embed": vector}, cache)["ln_final.normalized"][-1]
                @ W_U
            )
            without = (
                moved(model, dictionaries, {"embed": 0 * vector}, cache)["ln_final.normalized"][-1]
                @ W_U
            )
            model.blocks[layer].attn.W_O[head] = kept
        assert float(lost[layer, head]) == pytest.approx(float(whole - (cut - without)), abs=1e-9)
        assert abs(float(lost[layer, head])) > 1e-4


def test_a_model_whose_mlps_are_their_own_transcoders_is_explained_completely():
    torch.manual_seed(1)
    config = TransformerConfig(**SIZES, activation="relu")
    model = Transformer(config).double().eval()
    own = {}
    for n, block in enumerate(model.blocks):
        block.mlp.b_in.data.normal_()
        mlp = block.mlp
        own[f"blocks.{n}.mlp_out"] = Dictionary(
            mlp.W_in.data,
            mlp.W_out.data,
            mlp.b_in.data,
            mlp.b_out.data,
            nn.ReLU(),
            reads="ln2.normalized",
            transcodes=True,
        )
    graph = attribution_graph(model, TEXT, own)
    assert all(error.abs().max() < 1e-12 for error in graph.run.errors.values())
    assert graph.replacement == pytest.approx(1, abs=1e-9)
    assert graph.completeness == pytest.approx(1, abs=1e-9)


def test_predictions_are_exact_with_the_rest_frozen():
    """With everything else frozen, a change of a feature moves its readers by
    `change * effect / activation`.
    """
    model = model_of("sandwich")
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = attribution_graph(model, TEXT, dictionaries, targets=[2, 5])
    source = next(
        n for n in range(len(graph.run.layer)) if graph.run.layer[n] == 0 and graph.run.pos[n] == 3
    )
    feature = int(graph.run.feature[source])
    result = graph.intervene({graph.nodes[source].id: 0.25})
    delta = 0.25 - float(graph.run.activation[source])
    vector = torch.zeros(1, 5, 8, dtype=torch.float64)
    vector[0, 3] = delta * dictionaries["blocks.0.mlp_out"].W_dec[feature]
    changes = moved(model, dictionaries, {"blocks.0.mlp_out": vector})
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, [2, 5]]
    torch.testing.assert_close(
        result.direct[:2], changes["ln_final.normalized"][-1] @ W_U, rtol=0, atol=1e-8
    )
    # The effect over all paths is computed with the inverse of I - A, where A are direct effects.
    n = len(graph.run.layer)
    square = torch.zeros(n, n).double()
    square[graph.column[2:]] = graph.rows[2:, :n] / graph.run.activation
    square[source] = 0
    alone = torch.zeros(n).double()
    alone[source] = delta
    moved_by = torch.linalg.solve(torch.eye(n).double() - square, alone)
    expected = (graph.rows[:2, :n] / graph.run.activation) @ moved_by
    torch.testing.assert_close(result.predicted[:2], expected, rtol=1e-9, atol=1e-9)

    # The measured change: edit the feature in the model with the spliced transcoders.
    def set_feature(value, at):
        value[0, 3, feature] = 0.25

    name = "blocks.0.mlp_out.features"
    with splice(model, dictionaries) as runner:
        logits = runner.run_with_hooks(TEXT, hooks={name: set_feature})[0, -1]
    cap = 5.0
    before, after = (cap * torch.atanh(each / cap) for each in (model(TEXT)[0, -1], logits))
    change = (after - after.mean() - before + before.mean())[[2, 5]]
    torch.testing.assert_close(result.true[:2], change.detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", [*KINDS, *KNOWN])
def test_attached_models_have_the_graph_of_their_parts(kind, monkeypatch):
    if kind in FOREIGN:  # from_hf does not support some fields of these tiny configs
        monkeypatch.setattr("models.attached.attached.FAMILIES", {})
    model, text = made(kind), torch.tensor([[3, 1, 4, 1, 5, 9]])
    attach(model)
    torch.manual_seed(0)
    d = model.get_input_embeddings().embedding_dim
    weights = torch.randn(d, 17), torch.randn(17, d), torch.randn(17), torch.randn(d)
    # Parallel blocks have no stream between their sublayers.
    reads = "resid_mid" if "blocks.0.resid_mid" in HookedRunner(model).points else "resid_pre"
    dictionaries = {"blocks.0.mlp_out": Dictionary(*weights, TopK(5), reads=reads, transcodes=True)}
    graph = attribution_graph(model, text, dictionaries, targets=[3, (3, 5)], attention=True)
    assert graph.gap < 1e-5
    assert 0 < graph.attention_gap < 1e-4
    scores = HookedRunner(model).run_with_cache(text, names="*.scores")[1]["scores", 1]
    for through in ("paths", "writers"):
        table = graph.attention((1, 1), -2, 3, against=0, through=through)
        expected = scores[0, 1, 4, 3] - scores[0, 1, 4, 0]
        tolerance = 1e-5 * table.about["summed sizes of all pairs"]
        torch.testing.assert_close(table.values.sum(), expected.detach(), rtol=0, atol=tolerance)
    logits = model(text).logits[0, -1].detach()
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = cap * torch.atanh(logits / cap) if cap else logits
    expected = torch.stack([logits[3] - logits.mean(), logits[3] - logits[5]])
    torch.testing.assert_close(graph.totals[:2], expected, rtol=1e-4, atol=1e-4)


def test_a_planted_chain_of_features_is_found_first():
    """The planted chain: a token activates feature 11 of layer 0. A head of layer 1 moves this
    feature to another position. Feature 3 of layer 1 reads it there, and increases a logit.
    """
    torch.manual_seed(2)
    sizes = SIZES | {"n_layers": 2, "n_heads": 1, "d_head": 4}
    choices = {
        "norm": "none",
        "final_norm": False,
        "positions": "none",
        "tied_unembed": False,
        "mlp_bias": False,
    }
    model = Transformer(TransformerConfig(**sizes, **choices)).double().eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.01)
    model.token_embedding.weight.data[4, 0] = 1.0
    attn = model.blocks[1].attn
    attn.W_V.data[0, 1, 0] = attn.W_O.data[0, 0, 2] = 1.0
    model.unembedding.weight.data[5, 3] = 4.0
    dictionaries = {}
    for layer, (feature, reads, writes) in enumerate([(11, 0, 1), (3, 2, 3)]):
        one = Dictionary(
            0.01 * drawn(8, 17),
            0.01 * drawn(17, 8),
            torch.full((17,), 0.02).double(),
            torch.zeros(8).double(),
            nn.ReLU(),
            reads="resid_mid",
            transcodes=True,
        )
        one.W_enc[reads, feature] = 3.0
        one.W_dec[feature, writes] = 3.0
        dictionaries[f"blocks.{layer}.mlp_out"] = one
        # The MLP of the model writes the same as the feature, so the error of the transcoder is
        # small.
        mlp = model.blocks[layer].mlp
        mlp.W_in.data[reads, 0] = mlp.W_out.data[0, writes] = 3.0
    graph = attribution_graph(model, TEXT, dictionaries, targets=[5])
    features = [node for node in graph.nodes if node.kind == "feature"]
    best = sorted(features, key=lambda node: node.influence)[:2]
    assert {(node.layer, node.number) for node in best} == {(0, 11), (1, 3)}
    assert [(node.pos, node.layer) for node in sorted(best, key=lambda node: node.layer)] == [
        (2, 0),
        (4, 1),
    ]
    assert graph.effect("0_11_2", "1_3_4") > 10 * abs(graph.effect("0_11_0", "1_3_4"))
    kept = graph.pruned()
    assert {"0_11_2", "1_3_4", "3_5_4"} <= {node.id for node in kept.nodes}
    assert kept["1_3_4"].raises[0] == "5"
    assert kept.inputs("3_5_4")[0][0] == "1_3_4"
    assert kept.outputs("0_11_2")[0][0] == "1_3_4"


def test_transcoders_that_are_not_linear_or_stand_or_read_elsewhere_are_refused():
    model, one = model_of("plain"), torch.ones(17, dtype=torch.float64)
    weights = drawn(8, 17), drawn(17, 8), drawn(17), drawn(8)
    wrong = {
        "the transcoder at blocks.1.mlp_out must have features that are linear in its input": [
            Dictionary(*weights, Gated(one, one, one), reads="resid_mid", transcodes=True),
            Dictionary(*weights, nn.ReLU(), reads="resid_mid", norm="layer_norm", transcodes=True),
            MatchingPursuit(drawn(17, 8), drawn(8), 0.1, reads="resid_mid", transcodes=True),
        ],
        "must be blocks.1.resid_mid or blocks.1.ln2.normalized": [
            Dictionary(*weights, nn.ReLU(), transcodes=True),
            Dictionary(*weights, nn.ReLU(), reads="blocks.0.resid_mid", transcodes=True),
        ],
        "must read and write vectors of size 8; got": [
            Dictionary(drawn(7, 17), *weights[1:], nn.ReLU(), reads="resid_mid", transcodes=True)
        ],
    }
    for message, dictionaries in wrong.items():
        for each in dictionaries:
            with pytest.raises(ValueError, match=message):
                FrozenRun(model, TEXT, {"blocks.1.mlp_out": each})
    right = transcoder()
    with pytest.raises(ValueError, match="got 'blocks.1.attn_out'"):
        FrozenRun(model, TEXT, {"blocks.1.attn_out": right})
    two = CrossLayerTranscoder(
        [drawn(8, 3)] * 2,
        [drawn(3, 2, 8), drawn(3, 1, 8)],
        [drawn(3)] * 2,
        drawn(2, 8),
        [nn.ReLU()] * 2,
        reads="resid_mid",
    )
    with pytest.raises(ValueError, match="for each layer with an MLP, 3; got 2"):
        FrozenRun(model, TEXT, two)
    with pytest.raises(TypeError, match="integer"):
        attribution_graph(model, TEXT, {}, targets=[2.7])
    with pytest.raises(ValueError, match="first must be"):
        attribution_graph(model, TEXT, {}, first=-1)
    with pytest.raises(ValueError, match="pos .*-5 to 4; got 5"):
        attribution_graph(model, TEXT, {}, pos=5)
    with pytest.raises(ValueError, match="must be a single text without padding"):
        FrozenRun(model, TEXT.expand(2, -1), {})
    wrong_targets = {
        "at least one": [],
        r"a token in \[0, 7\)": [9],
        "must be an active feature": [(1, 2, 3)],
        "two different tokens": [(1, 2, 3, 4)],
        "must differ from each other": [2, 5, 2],
        "targets .*got -1": -1,
        r"tokens .* got \(2, 2\)": [(2, 2)],
    }
    for message, targets in wrong_targets.items():
        with pytest.raises(ValueError, match=message):
            attribution_graph(model, TEXT, {}, targets=targets)


def test_features_that_are_set_together_stay_as_they_are_set():
    model = model_of("rms")
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = attribution_graph(model, TEXT, dictionaries, targets=[2])
    run = graph.run
    low, high = (int(((run.layer == layer) & (run.pos == 4)).nonzero()[0]) for layer in (0, 2))
    assert abs(graph.effect(graph.nodes[low].id, graph.nodes[high].id)) > 1e-3
    ids = [graph.nodes[n].id for n in (low, high)]
    others = [graph.nodes[n].id for n in range(len(run.layer)) if run.layer[n] == 2 and n != high][
        -3:
    ]
    groups = {"both": ids, "three": others}
    result = graph.intervene({"both": 0.5}, supernodes=groups)
    assert {name: after for name, (_, after) in result.changed.items()} == dict.fromkeys(ids, 0.5)
    assert "both" not in result.nodes
    for what in (result.direct, result.predicted, result.true):
        places = [result.nodes.index(name) for name in others]
        assert float(what[-1]) == pytest.approx(float(what[places].sum()), rel=1e-9)
    n = len(run.layer)
    square = torch.zeros(n, n).double()
    square[graph.column[1:]] = graph.rows[1:, :n] / run.activation
    square[[low, high]] = 0
    alone = torch.zeros(n).double()
    alone[[low, high]] = 0.5 - run.activation[[low, high]]
    expected = (graph.rows[0, :n] / run.activation) @ torch.linalg.solve(
        torch.eye(n).double() - square, alone
    )
    assert float(result.predicted[0]) == pytest.approx(float(expected), rel=1e-9)

    def set_to(source):
        def edit(value, at):
            value[0, run.pos[source], run.feature[source]] = 0.5

        return edit

    hooks = {
        f"blocks.{int(run.layer[source])}.mlp_out.features": set_to(source)
        for source in (low, high)
    }
    with splice(model, dictionaries) as runner:
        logits = runner.run_with_hooks(TEXT, hooks=hooks)[0, -1]
    before = model(TEXT)[0, -1]
    change = (logits - logits.mean() - before + before.mean())[2]
    assert float(result.true[0]) == pytest.approx(float(change.detach()), rel=1e-7)
    with pytest.raises(
        ValueError, match="only features can be set; E_3_0 is a node of the kind token"
    ):
        graph.intervene({"E_3_0": 1.0})
    with pytest.raises(ValueError, match="at least one feature"):
        graph.intervene({})


def test_the_correlation_is_of_nodes_that_were_predicted_to_change():
    predicted, true = torch.tensor([1.0, 2, 3, 4, 5, 0]), torch.tensor([1.0, 2, 3, 4, 7, 99])
    result = Intervention({}, [*"abcdef"], predicted, predicted, 0 * true, true, true, true)
    r = float(np.corrcoef(predicted[:5], true[:5])[0, 1])
    assert result.correlation == pytest.approx(r)
    # Fisher's z has a standard error of 1 / √(n - 3), here of n = 5.
    ends = [math.tanh(math.atanh(r) + sign * 1.96 / math.sqrt(2)) for sign in (-1, 1)]
    assert result.interval == pytest.approx(ends)
    # All changes are equal, so there is no correlation and no interval.
    none = Intervention({}, [*"abcdef"], predicted, predicted, 0 * true, *[torch.ones(6)] * 3)
    assert all(map(math.isnan, (none.correlation, *none.interval)))
    assert "nan" not in repr(none)


def test_a_named_feature_stays_and_rows_that_do_not_add_up_are_refused(monkeypatch):
    model = model_of("plain")
    dictionaries = transcoders("layer", "ln2.normalized")
    weakest = attribution_graph(model, TEXT, dictionaries)
    feature = max(
        (n for n in weakest.nodes if n.kind == "feature"), key=lambda node: node.influence
    )
    named = feature.layer, feature.number, feature.pos
    graph = attribution_graph(model, TEXT, dictionaries, targets=[2, named])
    assert feature.id in {node.id for node in graph.pruned(0.01).nodes}
    rows = FrozenRun.rows
    monkeypatch.setattr(FrozenRun, "rows", lambda *of, row: 0.9 * rows(*of, row=row))
    with pytest.raises(ValueError, match="must add up to the value of their target; .* is missing"):
        attribution_graph(model, TEXT, dictionaries)


@contextmanager
def within_seconds(seconds):
    """Fail if the code inside the `with` runs longer than this, because it might never end."""

    def stop(number, frame):
        pytest.fail(f"it still runs after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("position_embedding.weight", r"position_embedding\.weight"),
        ("blocks.1.attn.output.weight", r"blocks\.1\.attn\.output\.weight"),
        ("W_enc", "the features of layer 2"),
        ("W_dec", "the decoder of layer 2 to layer 2"),
        ("b_dec", "the error of layer 2"),
    ],
)
def test_a_graph_of_numbers_that_are_not_finite_is_refused(part, named, number):
    model = model_of("plain")
    dictionaries = transcoders("layer", "ln2.normalized")
    weights = dict(model.named_parameters())
    weight = weights[part] if part in weights else getattr(dictionaries["blocks.2.mlp_out"], part)
    weight.data[..., 3] = number
    with within_seconds(60), pytest.raises(ValueError, match=f"({named}) must be finite; got"):
        attribution_graph(model, TEXT, dictionaries)
    # This number is finite, but products or sums with it are infinite.
    if part != "b_dec":
        weight.data[..., 3] = 1e308
        with within_seconds(60), pytest.raises(ValueError, match="must be finite; got"):
            attribution_graph(model, TEXT, dictionaries)


def test_values_and_changes_that_are_not_finite_are_refused(monkeypatch):
    graph = attribution_graph(model_of("plain"), TEXT, transcoders("layer", "ln2.normalized"))
    name = next(node.id for node in graph.nodes if node.kind == "feature")
    for value, what in (
        (math.nan, f"values of {name}"),
        (-math.inf, f"values of {name}"),
        (1e308, "predicted changes"),
        (1e200, "changes in the model"),
    ):
        with within_seconds(60), pytest.raises(ValueError, match=f"{what} must be finite"):
            graph.intervene({name: value})
    column, one = torch.tensor([-1, 0]), torch.ones(1).double()
    for wrong in (math.nan, math.inf):
        rows = torch.tensor([[2.0, 1.0], [wrong, 0.0]]).double()
        with within_seconds(60), pytest.raises(ValueError, match="must be finite"):
            influence.shares_of_rows(rows)
        with within_seconds(60), pytest.raises(ValueError, match="must be finite"):
            influence.influence(rows, rows.new_tensor([1.0, 0.0]), column)
        with within_seconds(60), pytest.raises(ValueError, match="must be finite"):
            predicted_changes(rows, column, one, one, torch.zeros(1).bool())
        # A node that has no effect on others gives the same error.
        with pytest.raises(ValueError, match="must be finite"):
            predicted_changes(rows, column, one, one, torch.ones(1).bool())
    rows = FrozenRun.rows
    monkeypatch.setattr(FrozenRun, "rows", lambda *of, row: math.inf * rows(*of, row=row))
    with pytest.raises(ValueError, match="effects must be finite"):
        attribution_graph(model_of("plain"), TEXT, {}, targets=[2])
    # The sum of a row can be infinite although all its numbers are finite.
    with pytest.raises(ValueError, match="must be finite"):
        influence.shares_of_rows(torch.full((1, 2), 3e38))
