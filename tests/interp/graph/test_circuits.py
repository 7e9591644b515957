"""Circuits: operations of sets, circuits from scores, and files.

They are compared with paths that are followed one by one, and with tables by hand.
"""

import dataclasses
import itertools
import json
import math
from contextlib import nullcontext

import pytest
import torch

from hooks import CacheError, UnknownNameError
from interp import Pairs
from interp.effects.evaluation import circuit_auroc
from interp.graph import Graph, circuits
from interp.graph.circuit import Circuit
from interp.graph.circuits import above, greedy, random, top
from interp.graph.mib import read_mib, write_mib
from models import Transformer, TransformerConfig
from tests.interp.graph.scored import EDGES, GRAPH, by_edge, scored, without_input
from tests.reference import variant

WIDER = Graph(variant("grouped", d_mlp=11))
RANDOM_SCORES = pytest.mark.filterwarnings("ignore:only .* selected edges are on a path")
"""The mark of a test that selects edges by random scores. Few of these edges are on a path."""


def feeds(writer, reader):
    """Return True if a head or an MLP computes its output from a reader. Both are names."""
    if "." not in writer or reader == "logits":
        return writer == reader
    layer, head = writer.split(".h")
    path, _, letter = reader.partition("<")
    if "." not in path or path.split(".h")[0] != layer:
        return False
    group = (
        1
        if letter == "q>"
        else len(GRAPH.model.blocks[0].attn.W_Q) // len(GRAPH.model.blocks[0].attn.W_K)
    )
    return int(head) // group == int(path.split(".h")[1])


def connected(edges):
    """Return the edges that are on a path from the input to the logits, by following each path."""

    def paths(reader):
        for edge in edges:
            writer, read = edge.split("->")
            if read == reader:
                if writer == "input":
                    yield [edge]
                for before in {e.split("->")[1] for e in edges if feeds(writer, e.split("->")[1])}:
                    yield from ([*path, edge] for path in paths(before))

    return {edge for path in paths("logits") for edge in path}


def test_circuits_are_sets_of_edges():
    one, other = EDGES[::3], EDGES[::2]
    a, b = Circuit(GRAPH, one), Circuit(GRAPH, other)
    assert {*(a | b)} == {*one} | {*other}
    assert {*(a & b)} == {*one} & {*other}
    assert {*(a - b)} == {*one} - {*other}
    assert {*~a} == {*EDGES} - {*one}
    assert len(a) == len(one)
    assert EDGES[0] in a
    assert EDGES[1] not in a
    assert a == Circuit(GRAPH, a.kept)
    assert a != b
    model = variant("pre", positions="rotary")
    assert Circuit(Graph(model), []) != Circuit(Graph(model, split_embeddings=True), [])
    first, second = (Circuit(GRAPH, one, found_on=[text]) for text in ("ab", "cd"))
    assert all(c.found_on == {"ab", "cd"} for c in (first | second, first & second, first - second))


@pytest.mark.parametrize("seed", range(5))
def test_pruned_edges_are_on_no_path_from_input_to_logits(seed):
    draw = random(GRAPH, 45, seed)
    assert {*draw.pruned()} == connected([*draw])
    assert len(draw) == 45


@RANDOM_SCORES
def test_edges_above_a_threshold_or_at_the_top():
    scores = scored(1)
    ranked = sorted(by_edge(scores).items(), key=lambda item: item[1])
    assert {*above(GRAPH, scores, 0.9)} == connected([e for e, s in ranked if abs(s) > 0.9])
    assert {*above(GRAPH, scores, 0.3, signed=True)} == connected(
        [e for e, s in ranked if -s > 0.3]
    )
    assert {*top(GRAPH, scores, 40, signed=True)} == connected([e for e, _ in ranked[:40]])
    by_size = sorted(ranked, key=lambda item: -abs(item[1]))
    assert {*top(GRAPH, scores, 40)} == connected([e for e, _ in by_size[:40]])


@RANDOM_SCORES
def test_an_edge_helps_that_moves_the_metric_to_the_other_texts():
    scores, rising = scored(1), scored(1, target=1.0)
    ranked = sorted(EDGES, key=by_edge(scores).get)
    for given, best in ((scores, ranked[:40]), (rising, ranked[-40:])):
        found = top(GRAPH, given, 40, signed=True)
        assert found == top(GRAPH, given.normalized(), 40, signed=True)
        assert {*found} == connected(best)
        assert (found.scores[found.kept] < 0).all()
        size = torch.tensor([abs(by_edge(given)[edge]) for edge in found])
        torch.testing.assert_close(found.scores[found.kept], -size.double())
    with pytest.raises(ValueError, match="base and target"):
        top(GRAPH, dataclasses.replace(scores, base=None), 3, signed=True)


@pytest.mark.parametrize("signed", [False, True])
def test_greedy_takes_the_best_edge_to_a_node_it_has(signed):
    scores = scored(2)
    matters = {edge: -score if signed else abs(score) for edge, score in by_edge(scores).items()}
    taken = []
    for _ in range(30):
        has = {edge.split("->")[0] for edge in taken} | {"logits"}
        waiting = [
            edge
            for edge in EDGES
            if edge not in taken and any(feeds(node, edge.split("->")[1]) for node in has)
        ]
        taken.append(max(waiting, key=matters.get))
    assert {*greedy(GRAPH, scores, 30, signed)} == connected(taken)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 17, 60, len(EDGES)])
def test_a_circuit_may_have_exactly_as_many_edges_as_asked(n):
    """The reference tries each edge in order and counts connected edges by hand."""
    scores = scored(2)
    matters = {edge: abs(score) for edge, score in by_edge(scores).items()}
    taken, passed_over = [], set()
    while len(connected(taken)) < n:
        has = {edge.split("->")[0] for edge in taken} | {"logits"}
        waiting = [
            edge
            for edge in EDGES
            if edge not in taken
            and edge not in passed_over
            and any(feeds(node, edge.split("->")[1]) for node in has)
        ]
        if not waiting:
            break
        best = max(waiting, key=matters.get)
        if len(connected([*taken, best])) > n:
            passed_over.add(best)
        else:
            taken.append(best)
    n_found = len(connected(taken))
    warned = nullcontext()
    if n_found < n:
        warned = pytest.warns(UserWarning, match=f"found only {n_found} of {n} connected edges")
    with warned:
        circuit = greedy(GRAPH, scores, n, exact=True)
    assert {*circuit} == connected(taken)
    # Two edges may be impossible: the strongest edges into the logits need longer paths.
    assert len(circuit) == n or n == 2
    assert circuit.n_left_out == 0
    drawn = [random(GRAPH, n, seed, connected=True) for seed in range(3)]
    for each in drawn:
        assert len(connected([*each])) == len(each)
        # A path of two or three edges may be left, which needs each of them.
        assert len(each) == n or n < len(each) <= 3
    assert n not in (17, 60) or drawn[0] != drawn[1]


def test_a_circuit_of_hardly_any_paths_gives_a_warning():
    scores = scored(2)
    weak = without_input(scores)
    threshold = weak.values.mean(-1).abs().topk(21).values[-1].item()
    for find in (
        lambda: greedy(GRAPH, weak, 20),
        lambda: top(GRAPH, weak, 20),
        lambda: above(GRAPH, weak, threshold),
    ):
        with pytest.warns(UserWarning, match="only . of 20 selected edges.*more pairs"):
            assert len(find()) < 10
    # Nine edges, and most edges on paths, give no warning.
    greedy(GRAPH, weak, 9)
    top(GRAPH, weak, 9)
    greedy(GRAPH, scores, 20)


@RANDOM_SCORES
def test_random_edges_may_be_drawn_from_a_circuit():
    strongest = top(GRAPH, scored(2), 60)
    n = 15
    drawn = [
        random(GRAPH, n, seed, connected=connected, among=strongest)
        for seed in range(3)
        for connected in (False, True)
    ]
    for each in drawn:
        assert {*each} <= {*strongest}
        assert len(each) == n
    for each in drawn[1::2]:
        assert {*each} == connected([*each])
    assert len({tuple(each) for each in drawn}) == len(drawn)
    n_edges = len(strongest)
    with pytest.raises(ValueError, match=rf"among must .* \({n_edges + 1}\); got {n_edges}"):
        random(GRAPH, len(strongest) + 1, among=strongest)


@pytest.mark.parametrize("pool", [30, 60, len(EDGES)])
def test_random_edges_on_paths_are_more_only_if_the_circuit_needs_each_edge(pool):
    among = greedy(GRAPH, scored(0), pool, exact=True)
    n_larger = 0
    for n in (3, 5, 15, 24):
        for seed in range(6):
            drawn = random(GRAPH, n, seed, connected=True, among=among)
            assert len(drawn) >= n
            if len(drawn) > n:
                n_larger += 1
                assert all(len(connected({*drawn} - {edge})) < n for edge in drawn)
    assert n_larger < 4


def test_a_circuit_without_a_node_has_none_of_its_edges():
    circuit = ~Circuit(GRAPH, [])
    left = circuit.without("a0.h4")
    # The edges into the keys and values of the head stay, because other heads use them too.
    gone = {edge for edge in EDGES if edge.startswith("a0.h4->") or edge.endswith("->a0.h4<q>")}
    assert {*circuit} - {*left} == gone
    assert "a0.h4" not in left.nodes
    assert {*(circuit - circuit.without("m1"))} == {e for e in EDGES if "m1" in e}


@RANDOM_SCORES
def test_a_file_gives_back_the_circuit(tmp_path):
    scores = scored(3, texts=["ab", "cd"])
    circuit = top(GRAPH, scores, 25)
    circuit.save(tmp_path / "circuit")
    again = Circuit.load(tmp_path / "circuit", Graph(variant("grouped")))
    assert again == circuit
    assert again.found_on == {"ab", "cd"}
    assert torch.equal(again.scores[GRAPH.allowed], scores.mean().double())
    for other in (Graph(variant("pre")), WIDER):
        with pytest.raises(ValueError, match="belong to this graph"):
            Circuit.load(tmp_path / "circuit", other)


def test_the_format_of_mib(tmp_path):
    model = variant("pre", n_layers=1, n_heads=4, n_kv_heads=2, d_head=4)
    graph = Graph(model)
    heads = [f"a0.h{h}<{part}>" for part in "qkv" for h in range(4)]
    names = [
        *(f"input->{reader}" for reader in (*heads, "m0", "logits")),
        *(f"a0.h{h}->{reader}" for h in range(4) for reader in ("m0", "logits")),
        "m0->logits",
    ]
    edges = {name: {"score": 0.5 + n, "in_graph": n % 2 == 0} for n, name in enumerate(names)}
    (tmp_path / "mib.json").write_text(json.dumps({"cfg": {}, "nodes": {}, "edges": edges}))
    circuit, nodes, neurons = read_mib(tmp_path / "mib.json", graph)
    assert nodes is neurons is None
    assert circuit.scores[graph.index("input->a0.h1<q>")] == -1.5
    # The heads 0 and 1 share the first key head, and the heads 2 and 3 share the second.
    assert circuit.scores[graph.index("input->a0.h0<v>")] == -(8.5 + 9.5)
    assert circuit.scores[graph.index("input->a0.h1<v>")] == -(10.5 + 11.5)
    assert "input->a0.h0<v>" in circuit
    assert "input->a0.h1<q>" not in circuit
    with pytest.warns(UserWarning, match="shared key heads"):
        write_mib(circuit, tmp_path / "again.json")
    written = json.loads((tmp_path / "again.json").read_text())
    assert written["cfg"] == {
        "n_layers": 1,
        "n_heads": 4,
        "parallel_attn_mlp": False,
        "d_model": model.config.d_model,
    }
    assert {*written["edges"]} == {*names}
    assert written["edges"]["input->a0.h0<q>"] == {"score": 0.5, "in_graph": True}
    assert written["edges"]["input->a0.h1<v>"]["score"] == 9.0
    assert written["edges"]["input->a0.h3<v>"]["score"] == 11.0
    assert {*written["nodes"]} == {"input", *(f"a0.h{h}" for h in range(4)), "m0", "logits"}
    assert read_mib(tmp_path / "again.json", graph).circuit == circuit
    del edges["m0->logits"]
    (tmp_path / "mib.json").write_text(json.dumps({"nodes": {}, "edges": edges}))
    with pytest.raises(ValueError, match="m0->logits"):
        read_mib(tmp_path / "mib.json", graph)
    with pytest.raises(ValueError, match="embed"):
        write_mib(Circuit(Graph(model, split_embeddings=True), []), tmp_path / "apart.json")
    with pytest.raises(CacheError, match="a format of MIB"):
        read_mib(__file__, graph)


@pytest.mark.parametrize("name", ["pre", "parallel"])
def test_the_tables_of_mib(name, tmp_path):
    """A `.pt` file of MIB has a table with a row for each writer and a column for each reader.

    They have the order that MIB documents.
    """
    model = variant(name, n_layers=2, n_heads=3, n_kv_heads=3, d_head=4)
    graph, path = Graph(model), tmp_path / "mib.pt"
    scores = torch.arange(graph.allowed.numel()).view(graph.allowed.shape) + 0.5
    circuit = Circuit(graph, graph.edges[::3], scores)
    nodes = torch.arange(9).float()
    neurons = torch.randn(9, model.config.d_model)
    write_mib(circuit, path, nodes, neurons)
    table = torch.load(path, weights_only=True)
    writers = ["input", "a0.h0", "a0.h1", "a0.h2", "m0", "a1.h0", "a1.h1", "a1.h2", "m1"]
    readers = [
        f"a{layer}.h{head}<{part}>" if part else f"m{layer}"
        for layer in (0, 1)
        for part, heads in (("q", 3), ("k", 3), ("v", 3), ("", 1))
        for head in range(heads)
    ] + ["logits"]
    assert table["src_nodes"] == writers
    assert table["dst_nodes"] == readers
    for row, writer in enumerate(writers):
        for column, reader in enumerate(readers):
            edge = f"{writer}->{reader}"
            value, kept = table["edges_scores"][row, column], table["edges_in_graph"][row, column]
            expected = -scores[graph.index(edge)] if edge in graph.edges else 0
            assert value == expected, edge
            assert bool(kept) == (edge in {*circuit})
    is_in = [name in circuit.nodes for name in writers]
    assert table["nodes_in_graph"].tolist() == is_in
    assert torch.equal(table["neurons_in_graph"].all(1), torch.tensor(is_in))
    write_mib(circuit, tmp_path / "mib.json", nodes, neurons)
    described = json.loads((tmp_path / "mib.json").read_text())["nodes"]
    assert [described[name]["neurons"] for name in writers] == [
        [kept] * model.config.d_model for kept in is_in
    ]
    assert not all(is_in)
    for wrong in ("mib", "mib.txt", "mib.pth"):
        with pytest.raises(ValueError, match=rf"must end in \.pt or \.json; got .*{wrong}"):
            write_mib(circuit, tmp_path / wrong)
    for file in (path, tmp_path / "mib.json", tmp_path / "mib.PT"):
        write_mib(circuit, file, nodes, neurons)
        again = read_mib(file, graph)
        assert again.circuit == circuit
        assert torch.equal(
            again.circuit.scores[graph.allowed], circuit.scores[graph.allowed].float().double()
        )
        assert torch.equal(again.node_scores, nodes)
        assert torch.equal(again.neuron_scores, neurons)
    other = variant(
        "parallel" if name == "pre" else "pre", n_layers=2, n_heads=3, n_kv_heads=3, d_head=4
    )
    with pytest.raises(ValueError, match="must have the edges of this graph"):
        read_mib(path, Graph(other))
    with pytest.raises(ValueError, match=r"must be \[9\] .*got \[8\]"):
        write_mib(circuit, path, nodes[1:])


def test_scores_that_are_not_known_are_left_out_of_mibs_json(tmp_path):
    """A node without a score has no number in the file. MIB reads it as NaN.

    MIB itself writes NaN, which is not JSON.
    """
    model, path = variant("pre", n_layers=2, n_heads=3, n_kv_heads=3, d_head=4), tmp_path / "x.json"
    circuit = Circuit(Graph(model), Graph(model).edges[::3])
    nodes, neurons = torch.arange(9).float(), torch.randn(9, model.config.d_model)
    nodes[[2, 8]], neurons[[0, 5]] = math.nan, math.nan
    write_mib(circuit, path, nodes, neurons)
    described = json.loads(path.read_text(), parse_constant=pytest.fail)["nodes"]
    assert [n for n, name in enumerate(described) if "score" not in described[name]] == [2, 8, 9]
    for text in (path.read_text(), path.read_text().replace('"score": 3.0', '"score": NaN')):
        path.write_text(text)
        again = read_mib(path, circuit.graph)
        torch.testing.assert_close(again.neuron_scores, neurons, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(again.node_scores, nodes, rtol=0, atol=0, equal_nan=True)
        nodes[3] = math.nan
    neurons[7, 1] = math.nan
    with pytest.raises(ValueError, match=r"nan at nodes\.a1\.h2\.neurons_scores\[1\]"):
        write_mib(circuit, path, nodes, neurons)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_auroc_is_the_share_of_pairs_in_the_right_order():
    scores, known = scored(4), Circuit(GRAPH, EDGES[::4])
    scores.values[0] = scores.values[1]
    size = {edge: abs(score) for edge, score in by_edge(scores).items()}
    pairs = [(size[a], size[b]) for a, b in itertools.product(known, ~known)]
    right = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    assert circuit_auroc(scores, known) == pytest.approx(right)
    with pytest.raises(ValueError, match="some edges"):
        circuit_auroc(scores, Circuit(GRAPH, EDGES))


def test_pairs_are_recognised_by_their_real_tokens():
    clean, corrupted = torch.tensor([[3, 1, 4], [2, 1, 5]]), torch.tensor([[3, 6, 4], [2, 6, 5]])
    padded = [torch.nn.functional.pad(text, (2, 0)) for text in (clean, corrupted)]
    mask = padded[0] > 0
    first, second = Pairs(clean, corrupted).digests()
    assert Pairs(*padded, attention_mask=mask).digests() == [first, second]
    assert first != second
    assert Pairs(corrupted, clean).digests()[0] != first


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Circuit(GRAPH, ["input->a0.h9<q>"]), UnknownNameError, "a0.h"),
        (lambda: Circuit(GRAPH, ["m1->a0.h0<q>"]), ValueError, "later node"),
        (lambda: Circuit(GRAPH, []).without("m7"), UnknownNameError, "m1"),
        (lambda: Circuit(GRAPH, torch.ones(2, 3).bool()), ValueError, "graph.writers"),
        (
            lambda: Circuit(GRAPH, []) | Circuit(Graph(variant("pre")), []),
            ValueError,
            "other nodes",
        ),
        (lambda: top(GRAPH, scored(), len(EDGES) + 1), ValueError, str(len(EDGES))),
        (lambda: random(GRAPH, -1), ValueError, str(len(EDGES))),
        (lambda: greedy(GRAPH, scored(), len(EDGES) + 1), ValueError, str(len(EDGES))),
        (lambda: top(Graph(variant("pre")), scored(), 3), ValueError, "of this graph"),
        (lambda: Circuit(GRAPH, []) - Circuit(WIDER, []), ValueError, "another config"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_scores_must_be_finite():
    scores = scored()
    scores.values[5] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        circuits.top(GRAPH, scores, 3)


@RANDOM_SCORES
def test_the_drawing_has_each_node_and_edge():
    circuit = top(GRAPH, scored(5), 60)
    rows, arrows = circuit.drawn()
    assert sorted(node for row in rows for node in row) == sorted(circuit.nodes)
    heights = {node: y for y, row in enumerate(rows) for node in row}
    assert min(heights.values()) == heights[circuit.nodes[0]] < heights["logits"] == len(rows) - 1
    assert all(heights["m0"] > heights[node] for node in circuit.nodes if node.startswith("a0"))
    # In the picture, an edge to a key head ends at each head of the circuit that uses this key
    # head.
    expected = [
        (edge.split("->")[0], node, circuit.scores[GRAPH.index(edge)].item())
        for edge in circuit
        for node in circuit.nodes
        if feeds(node, edge.split("->")[1])
    ]
    assert sorted((start, end, score) for start, end, _, score in arrows) == sorted(expected)


def drawn_by_hand():
    """Return a circuit with three scores, one unknown score, and an edge on no path."""
    edges = ["input->a0.h1<q>", "a0.h1->m1", "m1->logits", "input->logits", "m0->m1"]
    scores = torch.full(GRAPH.allowed.shape, math.nan)
    for edge, score in zip(edges, [0.5, -2.0, -0.25, math.nan, 9.0], strict=True):
        scores[GRAPH.index(edge)] = score
    return Circuit(GRAPH, edges, scores)


def test_a_printed_circuit_lists_nodes_and_the_edges_with_the_largest_scores():
    lines = [line.split() for line in repr(drawn_by_hand().pruned()).splitlines()]
    assert lines[0][:2] == ["Circuit:", "4"]
    assert lines[1:3] == [["layer", "0", "head", "1"], ["layer", "1", "MLP"]]
    assert lines[4:8] == [
        ["a0.h1->m1", "-2"],
        ["input->a0.h1<q>", "+0.5"],
        ["m1->logits", "-0.25"],
        ["input->logits"],  # its score is unknown
    ]
    # `m0` reads nothing.
    assert " ".join(lines[8]) == "left out: 1 edge on no path from the input to the logits"
    assert len(lines) == 9
    assert "left out" not in repr(drawn_by_hand())
    assert repr(drawn_by_hand() - drawn_by_hand()).startswith("Circuit: 0 of")
    assert len(repr(drawn_by_hand() - drawn_by_hand()).splitlines()) == 1


def test_a_circuit_without_heads_has_no_column_of_heads():
    assert repr(Circuit(GRAPH, ["m0->logits"])).splitlines()[1] == "  layer 0  MLP"


def test_edges_without_scores_are_listed_in_their_order():
    circuit = Circuit(GRAPH, EDGES)
    lines = repr(circuit).splitlines()
    start = lines.index("  edges:") + 1
    assert [line.strip() for line in lines[start : start + 20]] == [*circuit][:20]
    assert lines[start + 20].split()[:2] == ["…", f"{len(EDGES) - 20}"]
    assert lines[start + 21].endswith("share a0.h0<k>"), "the last line explains shared keys"
    assert len(lines) == start + 22


def test_long_lists_of_layers_and_heads_are_cut():
    model = Transformer(
        TransformerConfig(vocab_size=7, n_ctx=5, n_layers=17, n_heads=13, d_model=13, d_mlp=2)
    )
    graph = Graph(model)
    lines = repr(Circuit(graph, graph.allowed)).splitlines()
    assert lines[1] == "  layer 0   heads 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … 1 more  MLP"
    assert lines[14].startswith("  layer 13")
    assert lines[15] == "  … 3 more layers"
    assert len(lines) <= 40


def test_a_picture_says_that_heads_share_keys():
    shared, plain = (variant(form) for form in ("grouped", "pre"))
    edges = ["input->a0.h1<v>", "a0.h1->logits"]
    says = "an edge to a key head ends at each head that uses it"
    assert says in repr(Circuit(Graph(shared), edges).view().parts)
    assert says not in repr(Circuit(Graph(plain), edges).view().parts)
    # Queries are not shared.
    queries = ["input->a0.h1<q>", "a0.h1->logits"]
    assert says not in repr(Circuit(Graph(shared), queries).view().parts)


@RANDOM_SCORES
def test_the_number_of_edges_that_were_left_out(tmp_path):
    scores = scored(5)
    strongest = {EDGES[i] for i in scores.values.mean(-1).abs().topk(30).indices.tolist()}
    circuit = top(GRAPH, scores, 30)
    assert circuit.n_left_out == 30 - len(connected(strongest)) > 0
    assert circuit.pruned().n_left_out == circuit.n_left_out
    circuit.save(tmp_path / "circuit")
    assert Circuit.load(tmp_path / "circuit", GRAPH).n_left_out == circuit.n_left_out
    assert (circuit | circuit).n_left_out == 0


def test_a_figure_has_each_node_and_an_arrow_for_each_edge(tmp_path):
    to_hex = pytest.importorskip("matplotlib.colors", reason="needs the extra plots").to_hex
    circuit = drawn_by_hand().pruned()
    texts = circuit.plot().axes[0].texts
    heights = {text.get_text(): text.get_position()[1] for text in texts}
    del heights[""], heights["q"]
    arrows = [text.arrow_patch for text in texts if text.get_text() == ""]
    assert sorted(heights) == sorted(circuit.nodes)
    assert heights["input"] < heights["a0.h1"] < heights["m1"] < heights["logits"]
    # From the weakest edge: `input->logits` has no score, and then 0.25, 0.5 and 2.
    widths = [arrow.get_linewidth() for arrow in arrows]
    assert widths == pytest.approx([0.5, 0.5 + 2.5 / 8, 0.5 + 2.5 / 4, 3.0])
    styles = [(arrow.get_linestyle(), to_hex(arrow.get_edgecolor())) for arrow in arrows]
    blue = ("solid", "#2166ac")
    assert styles == [("solid", "#808080"), blue, ("dashed", "#b2182b"), blue]
    assert "harms" in circuit.plot().get_suptitle()
    assert "harms" not in Circuit(GRAPH, ["input->logits"]).plot().get_suptitle()
    circuit.save(tmp_path / "circuit.png")
    assert (tmp_path / "circuit.png").read_bytes().startswith(b"\x89PNG")


def test_the_part_of_a_head_is_written_on_its_arrow():
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    heads = ("a0.h1", "a0.h4")
    edges = [(f"input->{head}<q>", f"{head}->logits") for head in heads]
    figure = Circuit(GRAPH, itertools.chain(*edges)).plot()
    figure.draw_without_rendering()
    axes = figure.axes[0]
    arrows = [text.arrow_patch for text in axes.texts if text.get_text() == ""]
    letters = [text.get_position() for text in axes.texts if text.get_text() == "q"]
    assert len(letters) == 2
    for letter in letters:
        at = axes.transData.transform(letter)
        gaps = []
        for arrow in arrows:
            # matplotlib has drawn the curve, in pixels.
            curve = arrow.get_transform().transform_path(arrow.get_path()).interpolated(400)
            gaps += [math.dist(at, place) for place in curve.vertices]
        assert min(gaps) < 2


def test_readers_of_shared_keys_say_which_query_heads_share_them():
    """Four query heads and two key heads: key head 1 belongs to the query heads 2 and 3."""
    grouped = Graph(variant("pre", n_layers=2, n_heads=4, n_kv_heads=2, d_head=4))
    assert grouped.query_heads_of("a1.h0<k>") == [0, 1]
    assert grouped.query_heads_of("a1.h1<v>") == [2, 3]
    assert grouped.query_heads_of("a1.h3<q>") == grouped.query_heads_of("m0") == []
    with pytest.raises(UnknownNameError, match=r"this query head shares a1\.h1<v> with"):
        grouped.query_heads_of("a1.h3<v>")
    edges = ["input->a0.h1<q>", "input->a0.h0<k>", "a0.h1->logits"]
    assert "query heads 0 and 1 share a0.h0<k>" in repr(Circuit(grouped, edges))
    single = Graph(variant("pre", n_layers=2, n_heads=4, n_kv_heads=4, d_head=4))
    assert single.query_heads_of("a1.h3<v>") == [3]
    assert "share" not in repr(Circuit(single, edges))
    with pytest.raises(UnknownNameError) as caught:
        single.query_heads_of("a1.h4<v>")
    assert "shares" not in str(caught.value)
