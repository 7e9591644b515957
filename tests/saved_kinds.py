"""A small object of each kind that can be saved, and the function that saves it."""

from pathlib import Path

import torch

import models
from hooks import ActivationCache
from interp import Circuit, Claim, JacobianLens, Pairs, Result, TunedLens
from interp.attribution_graphs import Link, Node, PrunedGraph
from interp.directions import Direction, Probe
from interp.features import Dictionary, FeatureCard, FeatureCards, TopK
from interp.graph import Graph
from interp.store import Statistics, StatisticsByPoint, harvest

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
