"""Pruned attribution graphs: Neuronpedia's format, the page in a browser, and the command `trace`."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from interp import plots
from interp.attribution_graphs import Link, Node, PrunedGraph, attribution_graph
from interp.cli.command import main
from interp.features import feature_cards, load_transcoders
from interp.plots.view import visible
from tests.browser import seen_in_browser
from tests.shipped import pydoc

TEXT = "part KV8 and part K"
# The schema of 2025 that Neuronpedia's front end requires of a graph.
SCHEMA = json.loads((Path(__file__).parents[2] / "circuit_tracer" / "schema.json").read_text())


@pytest.fixture(scope="module")
def graph():
    return attribution_graph(pydoc(), TEXT, load_transcoders("pydoc-4l/transcoders"))


def test_a_text_alone_is_an_answer():
    model = pydoc()
    graph = attribution_graph(model, TEXT, {}, targets="V")
    assert [node.number for node in graph.logits] == [model.to_id("V")]
    with pytest.raises(ValueError, match="must be one token"):
        attribution_graph(model, TEXT, {}, targets=["KV", "V"])
    with pytest.raises(ValueError, match=r"a target must be .* got \('a', 'b', 'c'\)"):
        attribution_graph(model, TEXT, {}, targets=[("a", "b", "c")])


def test_an_answer_of_several_tokens_has_a_target_for_each_token_and_their_sum():
    model, transcoders = pydoc(), load_transcoders("pydoc-4l/transcoders")
    graph = attribution_graph(model, "part KV8 and part", transcoders, targets=" KV8")
    tokens = model.to_tokens("part KV8 and part KV").tokens
    logits = model(tokens)[0].detach()
    answer = model.to_tokens(" KV8", bos=False).tokens[0].tolist()
    n = len(answer)
    positions = range(tokens.shape[1] - n, tokens.shape[1])
    assert [node.label for node in graph.logits] == [" ", "K", "V", "8", " KV8"]
    assert [node.pos for node in graph.logits] == [*positions, positions[-1]]
    # Each logit less the mean over the vocabulary, at the position that predicts the token.
    centred = [
        float(logits[pos, token] - logits[pos].mean())
        for pos, token in zip(positions, answer, strict=True)
    ]
    assert graph.totals[:n].tolist() == pytest.approx(centred, rel=1e-4)
    assert float(graph.totals[n]) == pytest.approx(sum(centred), rel=1e-4)
    # The printed graph states the explained number, which differs from the metric.
    _, _, explained, metric, read, *_ = repr(graph).splitlines()
    assert explained.startswith("  explains the sum of the 4 logits of ' KV8'")
    assert explained.endswith(f"{sum(centred):.4g} logits")
    log_probs = logits.log_softmax(-1)[[*positions], answer]
    assert metric.endswith(f"{float(log_probs.sum()):.4g} nats")
    # The model does not read the last token of the answer.
    assert read == f"  positions {positions[1]} to {positions[-1]} read ' KV' of ' KV8'"
    embedding = graph.pruned()[f"E_{answer[-2]}_{positions[-1]}"]
    assert embedding.label == "'V' of ' KV8'"
    for node, pos, token in zip(graph.logits, positions, answer, strict=False):
        assert node.probability == pytest.approx(float(logits[pos].softmax(0)[token]), rel=1e-4)
    torch.testing.assert_close(graph.rows[n], graph.rows[:n].sum(0), rtol=1e-4, atol=1e-5)
    # The rows of single targets in graphs of the prefixes.
    for number, pos in [(0, positions[0]), (n - 1, positions[-1])]:
        prefix = attribution_graph(
            model, tokens[:, : pos + 1], transcoders, targets=[answer[number]]
        )
        sources = {node.id: n for n, node in enumerate(graph.nodes)}
        columns = [sources[node.id] for node in prefix.nodes[: prefix.rows.shape[1]]]
        torch.testing.assert_close(
            graph.rows[number, columns], prefix.rows[0], rtol=1e-4, atol=1e-5
        )
    # The node of the whole answer gives sums over its tokens, in `heads` and in `intervene`.
    total = graph.logits[-1].id
    source = max(
        (node for node in graph.nodes if node.kind == "feature"), key=lambda node: node.influence
    ).id
    lost = graph.heads(source, total)
    parts = [graph.heads(source, node.id).values for node in graph.logits[:n]]
    torch.testing.assert_close(lost.values, sum(parts), rtol=1e-3, atol=1e-5)
    changed = graph.intervene({source: 0.0})
    names = [node.id for node in graph.logits]
    values = torch.stack([changed.true[changed.nodes.index(name)] for name in names])
    torch.testing.assert_close(values[-1], values[:-1].sum(), rtol=1e-3, atol=1e-5)
    # The printed table has only the nodes with large changes.
    shown = repr(changed).splitlines()
    largest = torch.maximum(changed.true.abs(), changed.predicted.abs())
    rows = [line.split() for line in shown if line.split()[0] in changed.nodes]
    assert 0 < len(rows) <= 12
    sizes = [float(largest[changed.nodes.index(row[0])]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == float(largest.max())
    assert sizes[-1] > 1e-3 * sizes[0]


@pytest.mark.parametrize(
    ("targets", "form"), [(["81"], "targets='81'"), ([("81", "84")], r"targets=\('81', '84'\)")]
)
def test_an_answer_in_a_list_is_named_in_the_error(targets, form):
    with pytest.raises(ValueError, match=form):
        attribution_graph(pydoc(), TEXT, {}, targets=targets)


def test_a_difference_has_no_probability_in_a_file(tmp_path):
    model = pydoc()
    graph = attribution_graph(model, TEXT, {}, targets=["V", ("V", "K")]).pruned()
    again = PrunedGraph.from_neuronpedia(graph.to_neuronpedia(tmp_path, "x", "pydoc-4l"))
    chances = {node.label: node.probability for node in again.nodes if node.kind == "logit"}
    assert chances["V - K"] is None
    assert chances["V"] > 0


@pytest.fixture
def pruned(graph):
    return graph.pruned()


def test_a_graph_is_written_and_read_with_pins_and_groups(pruned, tmp_path):
    features = [node.id for node in pruned.nodes if node.kind == "feature"]
    pruned.pins, pruned.supernodes = features[:3], {"a group": features[1:3]}
    path = pruned.to_neuronpedia(tmp_path / "new", slug="kv8", scan="pydoc-4l")
    data = json.loads(path.read_text())
    jsonschema.validate(data, SCHEMA)
    assert path.name == "kv8.json"
    assert "".join(data["metadata"]["prompt_tokens"]) == data["metadata"]["prompt"] == TEXT
    assert data["qParams"]["supernodes"] == [["a group", *features[1:3]]]
    again = PrunedGraph.from_neuronpedia(path)
    assert (again.links, again.pins, again.supernodes) == (
        pruned.links,
        pruned.pins,
        pruned.supernodes,
    )
    assert [node._replace(raises=(), label="") for node in pruned.nodes] == [
        node._replace(label="") for node in again.nodes
    ]
    assert again.nodes[-1].label == pruned.nodes[-1].label
    again.to_neuronpedia(tmp_path, slug="kv8", scan="pydoc-4l")
    assert json.loads((tmp_path / "kv8.json").read_text()) == data


def of_circuit_tracer():
    """Return a graph in the format of circuit-tracer 0.5, written by hand."""
    shared = {
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "token_prob": 0.0,
        "is_target_logit": False,
        "clerp": "",
    }
    nodes = [
        {
            "node_id": "1_5_0",
            "feature": 26,
            "layer": "1",
            "feature_type": "cross layer transcoder",
            "activation": 2.5,
        },
        {
            "node_id": "0_1_0",
            "feature": -1,
            "layer": "1",
            "feature_type": "mlp reconstruction error",
        },
        {"node_id": "E_7_0", "feature": 0, "layer": "E", "feature_type": "embedding"},
        {
            "node_id": "3_9_0",
            "feature": 9,
            "layer": "3",
            "feature_type": "logit",
            "clerp": 'Output " b" (p=0.250)',
            "token_prob": 0.25,
        },
    ]
    links = [("E_7_0", "1_5_0", 1.5), ("0_1_0", "3_9_0", -0.5), ("1_5_0", "3_9_0", 0.25)]
    return {
        "metadata": {
            "slug": "x",
            "scan": "m",
            "prompt_tokens": ["a"],
            "prompt": "a",
            "transcoder_list": [],
        },
        "qParams": {
            "pinnedIds": ["0_1_0"],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [
            shared | {"ctx_idx": 0, "jsNodeId": "x", "influence": 0.5} | node for node in nodes
        ],
        "links": [dict(zip(("source", "target", "weight"), link, strict=True)) for link in links],
    }


def test_the_files_of_circuit_tracer_are_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(of_circuit_tracer()))
    graph = PrunedGraph.from_neuronpedia(path)
    assert graph.nodes == [
        Node("1_5_0", "feature", 1, 0, 5, "", 2.5, None, 0.5),
        Node("1_-1_0", "error", 1, 0, -1, "", None, None, 0.5),
        Node("E_7_0", "token", -1, 0, 7, "a", None, None, 0.5),
        Node("3_9_0", "logit", 2, 0, 9, " b", None, 0.25, 0.5),
    ]
    assert graph.links[1] == Link("1_-1_0", "3_9_0", -0.5)
    assert graph.pins == ["1_-1_0"]
    assert graph.inputs("3_9_0") == [("1_-1_0", -0.5), ("1_5_0", 0.25)]
    assert graph.about["transcoder_list"] == []
    assert "completeness" not in repr(graph)
    # After writing the graph again, nodes have their names in the file, and numbers have the format
    # of Neuronpedia's own files. The number of a feature is Cantor's pairing of its layer and index:
    # 26 for 1 and 5.
    again = {node["node_id"]: node for node in graph.neuronpedia("x", "m")["nodes"]}
    assert [again[name]["feature"] for name in ("1_5_0", "0_1_0", "E_7_0", "3_9_0")] == [
        26,
        -1,
        0,
        9,
    ]
    names = [node["jsNodeId"] for node in again.values()]
    assert names == ["1_5-0", "1_-1-0", "E_7-0", "L_9-0"]
    assert again["3_9_0"]["clerp"] == 'Output " b" (p=0.250)'
    assert [node["is_target_logit"] for node in again.values()] == [False, False, False, True]
    assert [node["layer"] for node in again.values()] == ["1", "1", "E", "3"]
    assert "<iframe" in graph._repr_html_()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("links"), "'links' is missing"),
        (lambda data: data["nodes"].append(data["nodes"][0]), "1 names are repeated"),
        (lambda data: data["links"][0].update(source="E_8_0"), "'E_8_0' is missing"),
        (
            lambda data: data["nodes"][0].update(feature_type="lorsa"),
            "of 1_5_0 must be .*got 'lorsa'",
        ),
    ],
)
def test_a_broken_file_is_refused(change, message, tmp_path):
    data = of_circuit_tracer()
    change(data)
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        PrunedGraph.from_neuronpedia(tmp_path / "x.json")


PROBE = """
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push(event.violatedDirective));
addEventListener("message", () => {
  const find = text => document.querySelector(text), all = text => [...document.querySelectorAll(text)];
  const links = () => all(".side .link").map(node => node.innerText.replace("\\n", " "));
  const press = key => find(".traced svg").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const seen = { title: find(".side h2").textContent, inputs: links(), paths: all(".side .path").map(node => node.innerText), spots: all(".spot").length, width: document.documentElement.scrollWidth };
  const [outer, inner] = [".traced .box", ".chosen"].map(text => find(text).getBoundingClientRect());
  seen.from = inner.left - outer.left;
  find(".side .link").click();
  seen.chosen = [find(".side h2").textContent, find(".side dl").innerText, all(".side .text").length];
  find(".swap").click();
  press("ArrowUp");
  seen.next = find(".side dl").innerText;
  press("Enter");
  const name = find("input[placeholder]");
  name.value = "<b>both";
  all(".swap")[1].click();
  seen.state = JSON.parse(find("textarea").value);
  seen.boxes = all("figure > .box .node").map(node => node.textContent);
  const slider = find("input[type=range]");
  slider.value = 5;
  slider.dispatchEvent(new Event("input"));
  seen.fewer = all(".spot").length;
  seen.foreign = all("img, b:not(.tip b, .link b)").length;
  seen.errors = errors;
  parent.postMessage(JSON.stringify(seen), "*");
});
"""


def strongest_path(graph, name):
    """Return the strongest path to a node from a token or a position, and its strength.

    The strength is the product of the shares of the links in the inputs of their nodes.
    """
    if graph[name].kind in ("token", "position"):
        return 1.0, [name]
    into = [link for link in graph.links if link.target == name]
    total, found = sum(abs(link.weight) for link in into), [(0.0, [name])]
    for link in into:
        product, path = strongest_path(graph, link.source)
        found.append((abs(link.weight) / total * product, [*path, name]))
    return max(found)


def test_the_page_lists_links_pins_groups_and_thins(graph, tmp_path):
    model, transcoders = pydoc(), load_transcoders("pydoc-4l/transcoders")
    pruned = graph.pruned(0.6, 0.9)
    logit = graph.logits[0]
    strongest = [name for name, _ in pruned.inputs(logit.id)]
    feature = next(pruned[name] for name in strongest if pruned[name].kind == "feature")
    # Change the links so that the strongest input is the feature that has a card.
    links = [link for link in pruned.links if link.target != logit.id]
    links.append(Link(feature.id, logit.id, 100.0))
    pruned.links, pruned.tokens = links, ["<i>x", *pruned.tokens[1:]]
    point = f"blocks.{feature.layer}.mlp_out"
    cards = feature_cards(model, {point: transcoders[point]}, [TEXT], [feature.number])
    seen = seen_in_browser(
        plots.attribution(pruned, {feature.layer: cards}).html(), tmp_path, PROBE
    )
    assert seen["errors"] == []
    assert seen["foreign"] == 0
    assert seen["width"] <= 400
    # The node that is selected first is inside the visible part.
    assert 0 < seen["from"] < 350
    assert seen["title"] == logit.label
    assert len(seen["inputs"]) == 1
    # The line of a feature says first what the feature raises. Its id comes last.
    assert seen["inputs"][0].startswith("+100 raises ")
    assert seen["inputs"][0].endswith(f" {feature.id}")
    # The page must show the strongest path to the logit.
    *_, path = strongest_path(pruned, logit.id)
    raised = [" ".join(map(visible, pruned[name].raises)) for name in path]
    words = [
        f"raises {r}" if r else visible(pruned[n].label) for n, r in zip(path, raised, strict=True)
    ]
    assert pruned[path[0]].kind == "token"
    words[0] += f" ({pruned[path[0]].pos})"
    assert seen["paths"][0] == " → ".join(words)
    assert seen["spots"] == len(pruned.nodes)
    title, about, examples = seen["chosen"]
    assert f"{feature.pos} “{visible(TEXT[feature.pos])}”" in about
    assert title == f"raises {' '.join(visible(each) for each in feature.raises)}"
    assert f"{feature.activation:.4g}" in about
    assert examples == len(cards[0].examples) > 0
    assert feature.id in seen["state"]["pinnedIds"]
    assert seen["state"]["supernodes"][0][0] == "<b>both"
    assert len(seen["state"]["supernodes"][0]) == 3
    assert seen["boxes"] == ["<b>both"]
    assert 5 <= seen["fewer"] <= 5 + len(graph.logits) + 3


def test_the_command_writes_the_page_and_the_file(graph, pruned, tmp_path, capsys):
    assert main(["trace", "--prompt", TEXT, "--out", str(tmp_path / "out"), "--slug", "kv8"]) == 0
    said = capsys.readouterr().out
    best = graph.logits[0]
    assert f"what acts on {best.id} {best.label!r}" in said
    name, weight = pruned.inputs(best.id)[0]
    assert f"{weight:+.4f}  {name}" in said
    written = PrunedGraph.from_neuronpedia(tmp_path / "out" / "kv8.json")
    assert {*written.links} == {*pruned.links}
    assert "attribution graph" in (tmp_path / "out" / "kv8.html").read_text()
    assert main(["trace", "--prompt", TEXT, "--target", "8", "--json", "--nodes", "0.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    kinds, labels = (data["tables"][f"node.{name}"]["values"] for name in ("kind", "label"))
    assert [*zip(kinds, labels, strict=True)].count(("logit", "8")) == kinds.count("logit") == 1
    few = ["--max-features", "3", "--json"]
    assert main(["trace", "--prompt", TEXT, "--answers", "8", "V", *few]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "8 - V" in data["tables"]["node.label"]["values"]
    for wrong in (
        ["--target", "x", "--answers", "8", "V"],
        ["--target", "x", "--target", "xy"],
        ["--nodes", "2"],
        ["--transcoders", "pydoc-4l/resid_post"],
    ):
        assert main(["trace", "--prompt", TEXT, *wrong]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


LOOKS = """
addEventListener("message", () => {
  const all = text => [...document.querySelectorAll(text)], told = [];
  for (let n = 0; n < all(".spot.head").length; n++) {
    all(".spot.head")[n].dispatchEvent(new MouseEvent("click"));
    const spots = all(".side .text span").map(span => [span.textContent, span.style.background]);
    told.push([document.querySelector(".side h2").textContent, document.querySelector(".side dl").innerText, spots,
      all(".side .link").map(link => link.innerText)]);
  }
  parent.postMessage(JSON.stringify(told), "*");
});
"""


def test_the_node_of_a_head_shows_its_attention_and_the_pairs_of_its_score(tmp_path):
    model, transcoders = pydoc(), load_transcoders("pydoc-4l/transcoders")
    more = {"max_features": 32, "attention": True}
    pruned = attribution_graph(model, TEXT, transcoders, targets=["V"], **more).pruned(0.3, 0.5)
    assert len(pruned.cells) == 8
    assert "8 scores of heads" in repr(pruned)
    seen = seen_in_browser(plots.attribution(pruned).html(), tmp_path, LOOKS)
    for cell in pruned.cells:
        at = f"{cell.key} “{visible(TEXT[cell.key])}”"
        title = f"head {cell.head} of layer {cell.layer} looks at {at}"
        (_, about, spots, links) = next(
            each for each in seen if each[0] == title and f"\n{cell.query}\n" in each[1]
        )
        assert f"{cell.score:.4g}, of pairs" in about
        for one, two, value in cell.pairs:
            assert f"{value:+.3g}" in about
            assert one in about
            assert two in about
        assert [text for text, _ in spots] == [visible(token) for token in TEXT]
        # The darkest cell is the position with the most attention.
        colours = [sum(map(int, colour[4:-1].split(","))) for _, colour in spots]
        assert colours.index(min(colours)) == max(range(len(TEXT)), key=cell.pattern.__getitem__)
        assert len(links) == 1
        assert links[0].split("\n")[1].startswith("V ")
    # Files contain no attention scores, only the nodes and their summed links.
    kinds = {node["feature_type"] for node in pruned.neuronpedia("x", "m")["nodes"]}
    assert kinds <= {"cross layer transcoder", "mlp reconstruction error", "embedding", "logit"}
