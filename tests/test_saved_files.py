"""Files that an earlier version saved can be read; "Stability" in the list of changes promises it.

The folder `saved` contains a file of each kind that `load` reads, also of each kind of claim. All
numbers in the files are below. After the release of 0.1.0, no file is written anew: if the format
of new files changes, the old file stays, and a file of the new format gets another name. This
command writes missing files:

    python -m tests.test_saved_files
"""

import shutil

import pytest
import torch

import models
from hooks import ActivationCache
from interp import Circuit, Claim, JacobianLens, Result, TunedLens
from interp.attribution_graphs import PrunedGraph
from interp.directions import Direction, Probe
from interp.features import FeatureCards, load_sae
from interp.graph import Graph
from interp.store import Activations, StatisticsByPoint
from tests.saved_kinds import (
    AXES,
    CACHED,
    EDGES,
    LENS,
    SAVED,
    WRITERS,
    dictionary,
    model_of_numbers,
    result,
)


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
