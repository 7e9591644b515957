"""Files that an earlier version saved can be read; "Stability" in the list of changes promises it.

The folder `saved` contains a file of each kind that `load` reads, also of each kind of claim. All
numbers in the files are below. After the release of 0.1.0, no file is written anew: if the format
of new files changes, the old file stays, and a file of the new format gets another name. This
command writes missing files:

    python -m tests.test_saved_files
"""

import shutil
from pathlib import Path

import pytest
import torch

import models
from hooks import ActivationCache
from interp import Circuit, Claim, JacobianLens, Pairs, Result, TunedLens
from interp.attribution_graphs import Link, Node, PrunedGraph
from interp.directions import Direction, Probe
from interp.features import Dictionary, FeatureCard, FeatureCards, TopK, load_sae
from interp.graph import Graph
from interp.store import Activations, Statistics, StatisticsByPoint, harvest

SAVED = Path(__file__).with_name("saved")
EDGES = ["input->m0", "m0->logits"]


def numbers(*shape):
    """Return 0, 0.5, 1, ... as a tensor of a shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) / 2


def model_of_numbers():
    """Return a model whose parameters are the numbers 0, 0.01, 0.02, ..."""
    config = models.TransformerConfig(
        vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=2, d_mlp=3
    )
    model = models.Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape) / 50)
    return model


def result(values=((1.0, 2.5, -3.0), (0.0, 4.0, 5.0))):
    """Return a result of two layers and three examples."""
    return Result(
        torch.tensor(values),
        ("layer", "example"),
        base=torch.tensor([0.5, 1.0, 1.5]),
        target=torch.tensor([2.0, 3.0, 4.0]),
        labels={"layer": [0, 3]},
        unit="logits",
        about={"site": "resid_pre"},
    )


def direction():
    """Return a direction at one point."""
    vectors = {"blocks.2.resid_pre": torch.tensor([3.0, 4.0])}
    return Direction(vectors, {"blocks.2.resid_pre": -5.0}, {"by": "hand"})


def dictionary(relu=False):
    """Return a dictionary of three features: with top-k, SAELens has it only with a ReLU."""
    weights = dict(
        W_enc=numbers(2, 3), W_dec=numbers(3, 2), b_enc=numbers(3), b_dec=numbers(2), norm="none"
    )
    return Dictionary(**weights, activation=TopK(2, relu=relu), reads="embed", writes="embed")


def statistics():
    """Return statistics of three rows, 1, 3 and -1."""
    rows = torch.tensor([[1.0], [3.0], [-1.0]])
    text, pos = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    return StatisticsByPoint({"embed": Statistics.of(rows, text=text, pos=pos)})


def graph_of_links():
    """Return an attribution graph with two nodes and a link."""
    nodes = [
        Node("E_3_0", "token", layer=0, pos=0, number=3, label="a", influence=0.5),
        Node("2_5_0", "feature", layer=2, pos=0, number=5, activation=1.25, influence=0.25),
    ]
    return PrunedGraph(nodes, [Link("E_3_0", "2_5_0", 1.5)], ["a"])


def claim():
    """Return a claim about a circuit of two edges."""
    model = model_of_numbers()
    pairs = Pairs([[1, 2], [3, 4]], [[2, 2], [4, 4]], [[5, 6], [6, 5]])
    return Claim.circuit(model, pairs, Circuit(Graph(model), EDGES), "two edges", name="numbers")


def claim_of(kind):
    """Return a claim of another kind: `effect`, `direction` or `variable`."""
    model = model_of_numbers()
    pairs = Pairs([[1, 2], [3, 4]], [[2, 2], [4, 4]], [[5, 6], [6, 5]])
    if kind == "effect":
        return Claim.effect(model, pairs, "head 0 matters", head=(0, 0), matters=0.25)
    if kind == "variable":
        options = dict(k=1, pos=-2, accuracy=0.75, epochs=4, rate=0.5)
        return Claim.variable(model, pairs, "a column", point="blocks.0.resid_post", **options)
    vectors = {"blocks.0.resid_post": torch.tensor([3.0, 4.0])}
    texts = dict(yes=[[1, 2]], no=[[3, 4]], others=[[5, 6]])
    numbers = dict(moves=0.5, strength=2.0, cost=0.125)
    found = Direction(vectors, about={"by": "hand"})
    return Claim.direction(model, pairs, found, "it moves", **texts, **numbers)


CACHED = {"embed": numbers(1, 2, 3), "blocks.0.attn.z": numbers(1, 2, 2, 2)}
AXES = {"embed": ("batch", "pos", "d_model"), "blocks.0.attn.z": ("batch", "pos", "head", "d_head")}
LENS = {"weight": numbers(1, 2, 2), "bias": numbers(1, 2), "config_hash": "a hash"}

WRITERS = {
    "cache.safetensors": lambda path: ActivationCache(CACHED, AXES).save(path),
    "cards": lambda path: FeatureCards([FeatureCard(7, 0.5, top=[("a", 2.0)])]).save(path),
    "circuit.safetensors": lambda path: Circuit(Graph(model_of_numbers()), EDGES).save(path),
    "claim.json": lambda path: claim().save(path),
    "claim_direction.json": lambda path: claim_of("direction").save(path),
    "claim_effect.json": lambda path: claim_of("effect").save(path),
    "claim_variable.json": lambda path: claim_of("variable").save(path),
    "dictionary": lambda path: dictionary().save(path),
    "dictionary_of_sae_lens": lambda path: dictionary(relu=True).save(path),
    "direction.safetensors": lambda path: direction().save(path),
    "graph.json": lambda path: graph_of_links().save(path),
    "jacobian_lens.safetensors": lambda path: JacobianLens(
        **LENS, n_texts=3, squares=torch.tensor([2.0])
    ).save(path),
    "model": lambda path: models.save(path, model_of_numbers()),
    "probe.safetensors": lambda path: Probe(direction(), result(), result()).save(path),
    "result.safetensors": lambda path: result().save(path),
    "statistics.safetensors": lambda path: statistics().save(path),
    "store": lambda path: harvest(model_of_numbers(), [[1, 2], [3]], "embed", path),
    "tuned_lens.safetensors": lambda path: TunedLens(**LENS, losses=numbers(2, 1), rows=9).save(
        path
    ),
}


def test_each_kind_of_file_is_there():
    assert {path.name for path in SAVED.iterdir()} == WRITERS.keys()


def test_a_saved_cache_can_be_read():
    cache = ActivationCache.load(SAVED / "cache.safetensors")
    assert cache.keys() == CACHED.keys()
    for name, values in CACHED.items():
        assert torch.equal(cache[name], values)
        assert cache.axes(name) == AXES[name]


def is_the_result(again):
    """Return whether a result has all parts of `result()`."""
    expected = result()
    return (
        torch.equal(again.values, expected.values)
        and torch.equal(again.base, expected.base)
        and torch.equal(again.target, expected.target)
        and again.axes == ("layer", "example")
        and [*again.labels["layer"]] == [0, 3]
        and again.unit == "logits"
        and again.about["site"] == "resid_pre"
    )


def is_the_direction(again):
    """Return whether a direction has all parts of `direction()`."""
    return (
        again.vectors.keys() == {"blocks.2.resid_pre"}
        and again[2].tolist() == [3, 4]
        and again.offsets == {"blocks.2.resid_pre": -5}
        and again.about["by"] == "hand"
    )


def test_a_saved_result_can_be_read():
    assert is_the_result(Result.load(SAVED / "result.safetensors"))


def test_a_saved_direction_can_be_read():
    assert is_the_direction(Direction.load(SAVED / "direction.safetensors"))


@pytest.mark.parametrize("name", ["dictionary", "dictionary_of_sae_lens"])
def test_a_saved_dictionary_can_be_read(name):
    again, expected = load_sae(SAVED / name), dictionary(relu=name != "dictionary")
    for weight in ("W_enc", "W_dec", "b_enc", "b_dec"):
        assert torch.equal(getattr(again, weight), getattr(expected, weight))
    assert f"{again}" == f"{expected}"
    assert (again.reads, again.writes, again.norm) == ("embed", "embed", "none")


def test_saved_probes_can_be_read():
    probe = Probe.load(SAVED / "probe.safetensors")
    assert is_the_direction(probe.direction)
    assert is_the_result(probe.auroc)
    assert is_the_result(probe.control)


@pytest.mark.parametrize("kind", [TunedLens, JacobianLens])
def test_a_saved_lens_can_be_read(kind):
    name = "tuned_lens" if kind is TunedLens else "jacobian_lens"
    lens = kind.load(SAVED / f"{name}.safetensors")
    assert torch.equal(lens.weight, LENS["weight"])
    assert torch.equal(lens.bias, LENS["bias"])
    assert lens.config_hash == "a hash"
    if kind is TunedLens:
        assert (lens.losses.tolist(), lens.rows) == ([[0], [0.5]], 9)
    else:
        assert (lens.squares.tolist(), lens.n_texts) == ([2], 3)


def test_saved_statistics_can_be_read():
    one = StatisticsByPoint.load(SAVED / "statistics.safetensors")["embed"]
    assert (one.n, one.mean.item(), one.low.item(), one.high.item()) == (3, 1, -1, 3)
    assert one.positive.item() == 2
    assert one.top_places[0, 0].tolist() == [0, 1]


def test_saved_cards_can_be_read():
    (card,) = FeatureCards.load(SAVED / "cards")
    assert (card.index, card.density) == (7, 0.5)
    # The form of Neuronpedia has the tokens without their numbers.
    assert [token for token, _ in card.top] == ["a"]


def test_a_saved_graph_of_links_can_be_read():
    graph = PrunedGraph.load(SAVED / "graph.json")
    assert [(node.id, node.kind, node.influence) for node in graph.nodes] == [
        ("E_3_0", "token", 0.5),
        ("2_5_0", "feature", 0.25),
    ]
    assert [*graph.links] == [("E_3_0", "2_5_0", 1.5)]
    assert [*graph.tokens] == ["a"]


def test_a_saved_model_can_be_read():
    model = models.load(SAVED / "model")
    expected = dict(model_of_numbers().named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_saved_circuit_fits_its_model():
    circuit = Circuit.load(SAVED / "circuit.safetensors", Graph(model_of_numbers()))
    assert sorted(circuit) == sorted(EDGES)


def test_a_saved_claim_can_be_read_and_verified():
    claim = Claim.load(SAVED / "claim.json")
    assert claim.says == "two edges"
    assert [*claim.content.edges] == EDGES
    first = claim.verify(model_of_numbers()).tests[0]
    # The hashes in the file are the hashes of the model.
    assert (first.name, first.status) == ("same model", "holds")


@pytest.mark.parametrize("kind", ["direction", "effect", "variable"])
def test_a_saved_claim_of_each_other_kind_can_be_read(kind):
    claim = Claim.load(SAVED / f"claim_{kind}.json")
    content = claim.content
    if kind == "effect":
        assert (claim.says, content.matters) == ("head 0 matters", 0.25)
    elif kind == "variable":
        read = (content.point, content.k, content.pos, content.accuracy, content.epochs)
        assert read == ("blocks.0.resid_post", 1, -2, 0.75, 4)
        assert content.rate == 0.5
    else:
        assert [*content.vectors["blocks.0.resid_post"]] == [3, 4]
        assert (content.moves, content.strength, content.cost) == (0.5, 2, 0.125)
    assert claim.verify(model_of_numbers()).tests[0].status == "holds"


def test_a_saved_store_can_be_read_and_continued(tmp_path):
    shutil.copytree(SAVED / "store", tmp_path / "store")
    writer = WRITERS["store"]
    for store in (Activations(SAVED / "store"), writer(tmp_path / "store")):
        rows = torch.cat([store.rows(text)["embed"] for text in range(2)])
        assert torch.equal(rows, torch.tensor([[0.02, 0.03], [0.04, 0.05], [0.06, 0.07]]))
    for path in (SAVED / "store").iterdir():
        assert (tmp_path / "store" / path.name).read_bytes() == path.read_bytes()


if __name__ == "__main__":
    for name, write in WRITERS.items():
        if not (SAVED / name).exists():
            write(SAVED / name)
