"""Attribution graphs in files of circuit-tracer's page, Neuronpedia's server and Anthropic.

tests/circuit_tracer/make_files.py made the files.
"""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from safetensors import safe_open

from interp import attribution_graph, load_transcoders
from interp.attribution_graphs import Link, Node, PrunedGraph
from tests.count import ROOT
from tests.shipped import pydoc

HERE = ROOT / "tests" / "circuit_tracer"


def graph_of(name):
    return PrunedGraph.from_neuronpedia(HERE / f"{name}.json")


def test_a_file_of_circuit_tracers_page_is_read():
    graph, data = graph_of("page"), json.loads((HERE / "page.json").read_text())
    assert isinstance(data["qParams"]["pinnedIds"], str)
    assert data["qParams"]["sg_pos"] is None
    # These nodes were clicked on the page: three features, the error of layer 0 at position 1, the
    # second token and the most likely logit.
    assert graph.pins == ["0_100_5", "0_109_5", "1_100_5", "0_-1_1", "E_1_1", "4_2_5"]
    assert graph.supernodes == {
        "supernode": ["0_109_5", "1_100_5"],
        'says "b", or ü': ["0_100_5", "0_-1_1"],
    }
    labels = {node.id: node.label for node in graph.nodes if node.kind == "feature" and node.label}
    assert labels == {"0_100_5": 'says "b", or ü', "0_121_5": "seen, not pinned"}
    assert graph["4_2_5"].label == " c"
    assert graph["4_2_5"].layer == 3


@pytest.mark.parametrize("name", ["page", "server", "anthropic"])
def test_a_graph_survives_being_written(name, tmp_path):
    graph = graph_of(name)
    path = graph.to_neuronpedia(tmp_path, "again", "some-model")
    again = PrunedGraph.from_neuronpedia(path)
    first, second = (json.loads(file.read_text()) for file in (HERE / f"{name}.json", path))
    assert [node["node_id"] for node in second["nodes"]] == [
        node["node_id"] for node in first["nodes"]
    ]
    assert [(link["source"], link["target"], link["weight"]) for link in second["links"]] == [
        (link["source"], link["target"], link["weight"]) for link in first["links"]
    ]
    for part in ("nodes", "links", "tokens", "pins", "supernodes", "node_threshold"):
        assert getattr(again, part) == getattr(graph, part)
    assert again.about["prompt"] == graph.about["prompt"]
    for node, ours in zip(second["nodes"], graph.nodes, strict=True):
        if node["feature_type"] == "cross layer transcoder":
            layer, number = int(node["layer"]), ours.number
            assert node["feature"] == (layer + number) * (layer + number + 1) // 2 + number
        # Without this text in logits, circuit-tracer's page fails.
        if node["feature_type"] == "logit":
            assert "(p=0." in node["clerp"]


@pytest.mark.parametrize("attention", [False, True])
def test_a_saved_graph_is_loaded(attention, tmp_path):
    model, transcoders = pydoc(), load_transcoders("pydoc-4l/transcoders")
    options = dict(max_features=30, attention=attention)
    traced = attribution_graph(model, "part KV8 and part K", transcoders, **options)
    graph = traced.pruned(0.5, 0.8)
    graph.pins.append(graph.links[0].source)
    graph.supernodes["letters"] = [link.target for link in graph.links[:2]]
    graph.save(tmp_path / "graph.json")
    again = PrunedGraph.load(tmp_path / "graph.json")
    assert again == graph
    assert bool(again.cells) == attention
    assert {type(part) for node in again.nodes for part in node} > {str, int, float}
    assert again.subgraph_scores() == graph.subgraph_scores()
    assert again.inputs(graph.pins[0]) == graph.inputs(graph.pins[0])


def test_a_graph_of_a_file_is_saved_and_loaded(tmp_path):
    graph = graph_of("page")
    graph.save(tmp_path / "graph.json")
    again = PrunedGraph.load(tmp_path / "graph.json")
    assert again == graph
    assert again.neuronpedia("a", "b") == graph.neuronpedia("a", "b")
    unknown = replace(graph, links=[Link(*graph.links[0][:2], math.inf)], scores={"gap": math.nan})
    unknown.save(tmp_path / "unknown.json")
    loaded = PrunedGraph.load(tmp_path / "unknown.json")
    assert math.isnan(loaded.links[0].weight)
    assert math.isnan(loaded.scores["gap"])
    with pytest.raises(ValueError, match="page.json must be a graph that save wrote"):
        PrunedGraph.load(HERE / "page.json")
    with pytest.raises(FileNotFoundError):
        PrunedGraph.load(tmp_path / "none.json")


def test_an_added_feature_may_have_the_name_of_an_error_in_the_file():
    graph = graph_of("page")
    state = graph.neuronpedia("x", "y")["qParams"]
    assert state["pinnedIds"][3] == state["supernodes"][1][2] == "0_0_1"
    feature = Node("0_0_1", "feature", 0, 1, 0)
    graph.nodes = [*graph.nodes, feature]
    graph.links = [*graph.links, Link("0_0_1", "4_2_5", 0.5), Link("0_-1_1", "4_2_5", 0.25)]
    written = graph.neuronpedia("x", "y")
    assert {node["node_id"] for node in written["nodes"]} >= {"0_0_1", "0_-1_1"}
    assert written["links"][-2:] == [
        {"source": "0_0_1", "target": "4_2_5", "weight": 0.5},
        {"source": "0_-1_1", "target": "4_2_5", "weight": 0.25},
    ]
    assert written["qParams"]["pinnedIds"][3] == "0_-1_1"


def test_a_file_of_neuronpedias_server_is_read():
    graph = graph_of("server")
    influence = {node.id: node.influence for node in graph.nodes}
    assert [node._replace(influence=None) for node in graph.nodes if node.pos >= 2] == [
        Node("E_13_2", "token", -1, 2, 13, " of"),
        Node("1_57794_2", "feature", 1, 2, 57794, "", 1.5),
        Node("1_-1_2", "error", 1, 2, -1, 'Err: mlp " of"'),
        Node("1_1203_3", "feature", 1, 3, 1203, "", 2.0),
        Node("1_-1_3", "error", 1, 3, -1, 'Err: mlp " Texas"'),
        Node("E_7_3", "token", -1, 3, 7, " Texas"),
        Node("4_17_3", "logit", 3, 3, 17, " Austin", None, 0.625),
        Node("4_5_3", "logit", 3, 3, 5, ' "Dallas"', None, 0.25),
    ]
    assert 0 < influence["1_57794_2"] < 1
    assert Link("0_57_1", "1_57794_2", 2.0) in graph.links
    assert graph.inputs("4_5_3") == [("1_1203_3", -2.0), ("1_57794_2", 1.0), ("1_-1_2", 0.0625)]


def test_a_file_of_anthropic_is_read():
    graph, data = graph_of("anthropic"), json.loads((HERE / "anthropic.json").read_text())
    # In the groups of Anthropic's page, the position in the name of a node counts from the end.
    assert data["qParams"]["supernodes"][0] == ["capital", "1_1729136_-0", "3_10502022_-1"]
    assert graph.supernodes["capital"] == ["1_1729136_5", "3_10502022_6"]
    assert {*graph.pins} <= {node.id for node in graph.nodes}
    assert graph.pins[0] == "19_16400899_11"
    austin = graph["19_16400899_11"]
    assert (austin.label, austin.layer) == ("Austin", 18)
    assert austin.probability == pytest.approx(0.984, abs=1e-3)
    assert graph["E_28948388_10"].label == " Dallas"
    assert graph["3_10502022_6"].label == "capital (of)"
    assert graph["0_-1_11"].kind == "error"
    assert len(graph.links) == 27


def test_nodes_that_anthropic_did_not_explore_are_features(tmp_path):
    data = saved(lambda data: data["nodes"][0].update(feature_type="unexplored node"))
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert PrunedGraph.from_neuronpedia(tmp_path / "x.json").nodes == graph_of("page").nodes


def saved(change):
    data = json.loads((HERE / "page.json").read_text())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["nodes"][0].update(feature_type="lorsa error"),
            "of 0_114_1 must be .*'lorsa error'",
        ),
        (lambda data: data["nodes"][-1].update(layer="-1"), "layer of 4_8_5 .*got '-1'"),
        (lambda data: data["nodes"][0].update(ctx_idx=6), r"ctx_idx of 0_114_1 .* got 6"),
        (lambda data: data["nodes"][0].update(node_id="a"), "got 'a'"),
        (lambda data: data["nodes"][0].pop("layer"), "'layer' is missing"),
        (lambda data: data["qParams"].update(supernodes="[['"), "Neuronpedia"),
        (lambda data: data["qParams"].update(supernodes=[[]]), "Neuronpedia"),
        (lambda data: data["nodes"][1].update(data["nodes"][0], node_id="0_cro_114_1"), "1 names"),
        (lambda data: data.update(nodes=[1]), "Neuronpedia"),
        (lambda data: data.update(metadata=3), "Neuronpedia"),
    ],
)
def test_errors_of_a_graph_file_name_the_file(change, message, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(saved(change)))
    with pytest.raises(ValueError, match=message) as raised:
        PrunedGraph.from_neuronpedia(tmp_path / "x.json")
    assert "x.json" in str(raised.value)
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(ValueError, match=r"y\.json"):
        PrunedGraph.from_neuronpedia(tmp_path / "y.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data, n: data["nodes"][2].update(influence=n), r"nodes\[2\]\.influence"),
        (lambda data, n: data["nodes"][0].update(activation=n), r"nodes\[0\]\.activation"),
        (lambda data, n: data["links"][3].update(weight=n), r"links\[3\]\.weight"),
        (lambda data, n: data["metadata"].update(node_threshold=n), r"metadata\.node_threshold"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_its_file_and_place(
    change, place, number, tmp_path
):
    text = json.dumps(saved(lambda data: change(data, "here")))
    (tmp_path / "x.json").write_text(text.replace('"here"', number))
    with pytest.raises(ValueError, match=rf"x\.json.*(nan|inf) at {place}$"):
        PrunedGraph.from_neuronpedia(tmp_path / "x.json")


def test_a_text_or_null_is_not_a_weight(tmp_path):
    for wrong in ("NaN", None, True):
        data = saved(lambda data, wrong=wrong: data["links"][3].update(weight=wrong))
        (tmp_path / "x.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=rf"x\.json.*weight of .* -> .*got '?{wrong}"):
            PrunedGraph.from_neuronpedia(tmp_path / "x.json")


def test_a_file_has_null_for_a_number_that_is_not_finite(tmp_path):
    graph = graph_of("server")
    graph.nodes[1] = graph.nodes[1]._replace(influence=math.nan, activation=math.inf)
    graph.about = {**graph.about, "seconds": math.inf}
    (tmp_path / "graph-metadata.json").write_text('{"graphs": [{"slug": "old", "gap": NaN}]}')
    path = graph.to_neuronpedia(tmp_path, "new", "m")
    data, listed = (
        json.loads(file.read_text(), parse_constant=pytest.fail)
        for file in (path, tmp_path / "graph-metadata.json")
    )
    assert data["nodes"][1]["influence"] is data["nodes"][1]["activation"] is None
    assert data["metadata"]["seconds"] is None
    assert listed["graphs"][0] == {"slug": "old", "gap": None}
    assert PrunedGraph.from_neuronpedia(path).nodes[1].influence is None
    graph.links[0] = graph.links[0]._replace(weight=math.nan)
    with pytest.raises(ValueError, match="weights of links must be finite; got nan from"):
        graph.to_neuronpedia(tmp_path, "other", "m")
    with pytest.raises(ValueError, match=r"must be a folder; got .*x\.json"):
        graph_of("server").to_neuronpedia(tmp_path / "x.json", "a", "m")
    for slug in ("../escaped", "a/b", "", ".", "..", "graph-metadata", "a\\b"):
        with pytest.raises(ValueError, match="without a folder"):
            graph_of("server").to_neuronpedia(tmp_path / "inside", slug, "m")
    assert not (tmp_path / "escaped.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"new.json", "graph-metadata.json"}


def test_groups_of_one_name_and_labels_of_neuronpedias_page_are_kept(tmp_path):
    groups, labels = [["a", "0_100_5"], ["a", "0_0_1"], ["a (2)"]], [["0_5150_5", "mine"]]
    state = {"pinnedIds": "", "supernodes": groups, "clerps": labels}
    (tmp_path / "x.json").write_text(json.dumps(saved(lambda data: data.update(qParams=state))))
    graph = PrunedGraph.from_neuronpedia(tmp_path / "x.json")
    assert graph.supernodes == {"a": ["0_100_5"], "a (2)": ["0_-1_1"], "a (2) (2)": []}
    assert graph.pins == []
    assert graph["0_100_5"].label == "mine"


def test_a_directory_lists_its_graphs_as_circuit_tracers_page_asks(tmp_path):
    graph, index = graph_of("server"), tmp_path / "graph-metadata.json"
    assert "transcoder_list" not in graph.about
    for slug, scan in (("one", "a"), ("two", "custom-1"), ("one", "b")):
        graph.to_neuronpedia(tmp_path, slug, scan)
    listed = json.loads(index.read_text())["graphs"]
    assert [(each["slug"], each["scan"]) for each in listed] == [("two", "custom-1"), ("one", "b")]
    for each in listed:
        assert each == json.loads((tmp_path / f"{each['slug']}.json").read_text())["metadata"]
        assert each["transcoder_list"] == []
        assert isinstance(each["node_threshold"], float)
        assert each["prompt"] == "capital of Texas"
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"graph-metadata\.json"):
        graph.to_neuronpedia(tmp_path, "three", "a")
    assert not (tmp_path / "three.json").exists()


def test_embeddings_at_one_position_are_distinct_for_the_pages():
    nodes = [Node("E_7_2", "token", -1, 2, 7), Node("P_2_2", "position", -1, 2, 2)]
    nodes += [Node("E_7_0", "token", -1, 0, 7), Node("B_0_0", "bias", -1, 0, 0)]
    written = PrunedGraph(nodes, [], [*"abc"]).neuronpedia("x", "y")["nodes"]
    assert len({(node["layer"], node["feature"], node["ctx_idx"]) for node in written}) == 4


@pytest.fixture(scope="module")
def whole():
    """Return the graph of circuit-tracer with all nodes and links.

    tests/circuit_tracer/make_graph.py made the file.
    """
    with safe_open(HERE / "circuit_tracer.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in ("features", "matrix", "scores")}
        chances = file.get_tensor("probabilities").tolist()
    features = tensors["features"].tolist()
    nodes = [Node(f"{n}_{f}_{pos}", "feature", n, pos, f) for n, pos, f in features]
    nodes += [Node(f"{n}_-1_{pos}", "error", n, pos, -1) for n in range(3) for pos in range(6)]
    nodes += [Node(f"E_0_{pos}", "token", -1, pos, 0) for pos in range(6)]
    nodes += [Node(f"4_{n}_5", "logit", 3, 5, n, "", None, p) for n, p in enumerate(chances)]
    links = [
        Link(nodes[source].id, nodes[target].id, float(tensors["matrix"][target, source]))
        for target, source in tensors["matrix"].nonzero().tolist()
    ]
    return PrunedGraph(nodes, links, [*"abcdef"]), tensors


def test_scores_are_circuit_tracers_and_neuronpedias(whole):
    graph, tensors = whole
    scores = graph.subgraph_scores([node.id for node in graph.nodes])
    theirs = tensors["scores"].tolist()
    assert [*scores.values()] == pytest.approx(theirs, rel=1e-6)
    # The expected scores come from `score.worker.ts` of Neuronpedia, for the same graph and pins.
    pinned = graph.subgraph_scores(["0_0_5", "1_0_5"])
    assert pinned == pytest.approx(
        {"replacement": 0.5452600453042685, "completeness": 0.7913353430035025}, rel=1e-9
    )
    graph.pins = ["0_0_5", "1_0_5", "E_0_0"]
    assert graph.subgraph_scores() == pinned
    assert graph_of("page").subgraph_scores() == pytest.approx(
        {"replacement": 0.49726608313124443, "completeness": 0.7757369747675867}, rel=1e-9
    )
    with pytest.raises(KeyError, match="0_0_4"):
        graph.subgraph_scores(["0_0_4"])


def test_a_feature_without_an_error_counts_as_one():
    # Edges: token 1 to a feature and to the logit, features to the logit. Only one of the graphs
    # has an error node.
    nodes = [
        Node("0_1_0", "feature", 0, 0, 1),
        Node("1_2_0", "feature", 1, 0, 2),
        Node("1_-1_0", "error", 1, 0, -1),
        Node("E_3_0", "token", -1, 0, 3),
        Node("3_4_0", "logit", 2, 0, 4, "", None, 0.5),
    ]
    links = [
        Link("E_3_0", "0_1_0", 1.0),
        Link("0_1_0", "1_2_0", 5.0),
        Link("E_3_0", "1_2_0", 3.0),
        Link("0_1_0", "3_4_0", 1.0),
        Link("1_2_0", "3_4_0", -2.0),
        Link("1_-1_0", "3_4_0", 5.0),
        Link("E_3_0", "3_4_0", 4.0),
    ]
    graph = PrunedGraph(nodes, links, ["a"])
    # The logit gets 1 and -2 + 5 from errors, and 4 from the token.
    expected = {"replacement": 4 / 8, "completeness": 1 - 0.5 * 4 / 8 / (0.5 + 0.5)}
    assert graph.subgraph_scores([]) == pytest.approx(expected)
    # A difference of logits is a target without a probability. The scores stay the same.
    difference = [*nodes[:-1], Node("3_4_0", "logit", 2, 0, 4, "", None, None)]
    assert PrunedGraph(difference, links, ["a"]).subgraph_scores([]) == pytest.approx(expected)
    # With all nodes pinned, 1/12 and 2/12 of the logit come from the two features. The second
    # feature gets 5/8 of its inputs from the first.
    reached = np.array([1 / 12 + 2 / 12 * 5 / 8, 2 / 12, 5 / 12, 0]) / 2
    reached[3] = 4 / 12 / 2 + reached[0] + reached[1] * 3 / 8
    expected = {
        "replacement": reached[3] / (reached[3] + reached[2]),
        "completeness": 1 - 5 / 12 * 0.5 / (reached.sum() + 0.5),
    }
    assert graph.subgraph_scores(["0_1_0", "1_2_0"]) == pytest.approx(expected)
    graph.links = [*links, Link("1_2_0", "0_1_0", 1.0)]
    with pytest.raises(ValueError, match="form a cycle"):
        graph.subgraph_scores(["0_1_0", "1_2_0"])


def test_influence_needs_a_step_for_each_node_of_a_chain():
    chain = [Node(f"{n}_0_0", "feature", n, 0, 0) for n in range(7)]
    nodes = [
        Node("E_0_0", "token", -1, 0, 0),
        *chain,
        Node("8_0_0", "logit", 7, 0, 0, "", None, 1.0),
    ]
    links = [Link(a.id, b.id, 2.0) for a, b in pairwise(nodes)]
    scores = PrunedGraph(nodes, links, ["a"]).subgraph_scores([node.id for node in chain])
    assert scores == {"replacement": 1.0, "completeness": 1.0}
