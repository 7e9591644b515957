"""Graphs of decoders with sublayers that are one node, compared with PyTorch's own hooks."""

import functools

import pytest
import torch
from torch import nn

from hooks import HookedRunner, UnknownNameError
from interp import (
    Pairs,
    decompose,
    edge_attribution,
    edge_patching,
    graph,
    path_patching,
    run_circuit,
)
from interp.graph.circuit import Circuit
from interp.graph.mib import read_mib, write_mib
from interp.runs.path_edits import PathEdits
from models import attach
from tests.attachable import HEADS, MODELS, MORE, agree, made
from tests.models.attached.graphs import CLEAN, OTHER, PAIRS, metric

close = functools.partial(agree, tolerance=1e-4)

# The nodes of each block besides the MLP; then the norm before the MLP, the MLP and the last norm.
KINDS = {
    "deepseek_v3": (["a0", "a1"], "post_attention_layernorm", "mlp", "norm"),
    "qwen3_next": (["a0", "x1"], "post_attention_layernorm", "mlp", "norm"),
    "bamba": (["x0", "a1.h2"], "pre_ff_layernorm", "feed_forward", "final_layernorm"),
}


@functools.cache
def model_of(kind):
    return made(kind).requires_grad_(False)


def changed(model, module, by, share=1.0):
    """Return the metric of a run in which a module reads its input plus a share of `by`."""

    def hook(module, args):
        return (args[0] + share * by, *args[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        return metric(model(CLEAN).logits)
    finally:
        handle.remove()


def moved(model, module, is_input=False):
    """Return the output of a module, or its input, on the other text minus on the clean text."""
    values = []

    def store(module, args, output=None):
        values.append(args[0] if is_input else output)

    register = module.register_forward_pre_hook if is_input else module.register_forward_hook
    handle = register(store)
    try:
        for text in (OTHER, CLEAN):
            model(text)
    finally:
        handle.remove()
    first, second = [value[0] if isinstance(value, tuple) else value for value in values]
    return first - second


@pytest.mark.parametrize("kind", KINDS)
def test_edges_match_raw_hooks(kind):
    model = model_of(kind)
    (first, second), norm, mlp, last = KINDS[kind]
    layers, final = model.model.layers, model.model.get_submodule(last)
    of_input = moved(model, layers[0], is_input=True)
    of_first_mlp, of_last_mlp = (moved(model, layer.get_submodule(mlp)) for layer in layers)
    by_hand: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "input->logits": (final, of_input),
        "m1->logits": (final, of_last_mlp),
        "input->m0": (layers[0].get_submodule(norm), of_input),
        f"input->{first}": (layers[0].input_layernorm, of_input),
    }
    if "h" not in second:
        by_hand[f"m0->{second}"] = (layers[1].input_layernorm, of_first_mlp)
    # The exact effect of each edge, and its derivative by the share of the change.
    exact, slopes = [], []
    base = metric(model(CLEAN).logits)
    for module, change in by_hand.values():
        exact.append(changed(model, module, change) - base)
        share = torch.zeros(3, 1, 1, requires_grad=True)
        total = changed(model, module, change, share).sum()
        slopes.append(torch.autograd.grad(total, share)[0].flatten())
    with attach(model):
        scores = edge_attribution(model, PAIRS)
        effects = edge_patching(model, PAIRS, [*by_hand])
        assert f"{first}->{'a1.h2<q>' if 'h' in second else second}" in scores.labels["edge"]
    close(effects.values, torch.stack(exact))
    places = [scores.labels["edge"].index(edge) for edge in by_hand]
    close(scores.values[places], torch.stack(slopes))
    assert scores.about["node_gap"] < 1e-4


# Bamba's heads share keys, and MIB's format has no shared keys.
@pytest.mark.filterwarnings("ignore:MIB's format has no shared key heads")
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_circuit_is_the_text_and_an_empty_one_the_other(kind, tmp_path):
    model = model_of(kind)
    logits = [model(text).logits for text in (CLEAN, OTHER)]
    with attach(model):
        nodes = graph.Graph(model)
        close(run_circuit(model, PAIRS, nodes.edges), logits[0])
        close(run_circuit(model, PAIRS, []), logits[1])
        # Freeze all other heads and mixers: a path from a mixer to the logits passes only MLPs.
        by_path = path_patching(model, PAIRS, receivers="logits", senders=["m1"])
        close(by_path.values, edge_patching(model, PAIRS, ["m1->logits"]).values)
        circuit = Circuit(nodes, nodes.edges[::3])
        for name in ("circuit.pt", "circuit.json"):
            write_mib(circuit, tmp_path / name)
            assert read_mib(tmp_path / name, nodes).circuit == circuit
        circuit.save(tmp_path / "circuit.safetensors")
        assert Circuit.load(tmp_path / "circuit.safetensors", nodes) == circuit
        rows, _ = Circuit(nodes, nodes.edges).drawn()
    one_node = [name for name in KINDS[kind][0] if "h" not in name]
    assert [row for row in rows if row[0] in one_node] == [[name] for name in one_node]


def test_an_undivided_node_can_be_removed_and_pruned():
    model = model_of("qwen3_next")
    with attach(model):
        nodes = graph.Graph(model)
        whole = Circuit(nodes, nodes.edges)
        assert not any("x1" in edge for edge in whole.without("x1"))
        # `x1` has no edge to a later node, so its incoming edge is pruned too.
        kept = Circuit(nodes, ["input->x1", "input->logits"])
        assert list(kept.pruned()) == ["input->logits"]


def test_a_receiver_may_be_a_mixer():
    """The receiver is fixed at its output for the changed stream, and the rest runs again."""
    model = model_of("qwen3_next")
    layers = model.model.layers
    by = moved(model, layers[0].mlp)
    expected = changed(model, layers[1].input_layernorm, by) - metric(model(CLEAN).logits)
    with attach(model):
        found = path_patching(model, PAIRS, receivers="x1", senders=["m0"], mlps="frozen")
    close(found.values[0], expected)


@pytest.mark.parametrize("kind", ["flex_olmo", "granitemoeshared"])
def test_paths_compute_only_positions_that_differ(kind):
    """The MLP of one model sees rows and positions as one axis. The MLP of the other model is the
    rest of the block, which reads the context too.
    """
    other = OTHER.clone()
    other[:, :3] = CLEAN[:, :3]
    with attach(model_of(kind)) as attached:
        nodes = graph.Graph(attached.model)
        pairs = Pairs(CLEAN, other, metric=metric)
        paths = PathEdits(nodes, pairs, direction="noising", max_bytes=2**30)
        places = nodes.place("writer", "input"), {nodes.place("reader", "logits")}
        assert paths.later == slice(3, None)
        later = paths.through(*places, True)
        paths.later = slice(None)
        close(later, paths.through(*places, True))


@pytest.mark.parametrize("kind", KINDS)
def test_components_with_undivided_nodes_add_up_to_the_stream(kind):
    model = model_of(kind)
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(CLEAN)
        parts = decompose(model, cache)
        close(parts.values.sum(0), cache["resid_post", -1])
    names = [name for name in KINDS[kind][0] if "h" not in name]
    assert {*names} <= {*parts.names}


def test_padding_changes_nothing_in_a_graph_with_a_mixer():
    model = model_of("bamba")
    real = torch.ones(3, 9, dtype=torch.bool)
    real[:, :2] = False
    texts = [nn.functional.pad(text, (2, 0)) for text in (CLEAN, OTHER)]
    padded = Pairs(*texts, metric=metric, attention_mask=real)
    with attach(model):
        edges = graph.Graph(model).edges[::2]
        alone = run_circuit(model, PAIRS, edges)
        close(run_circuit(model, padded, edges)[:, 2:], alone)
        ours = edge_attribution(model, padded).values
        close(ours, edge_attribution(model, PAIRS).values)


def test_analyses_of_heads_name_the_block_without_heads():
    model = model_of("deepseek_v3")
    with attach(model):
        layer = graph.Graph(model).layers[1]
        assert layer.n_heads == 0
        with pytest.raises(ValueError, match=r"block 1 must have attention .*; got a1"):
            _ = layer.heads
        with pytest.raises(UnknownNameError, match="a1 is one node without heads: attention must"):
            path_patching(model, PAIRS, receivers=["a1.h0<q>"])
    with attach(model_of("bamba")) as attached:
        assert graph.Graph(attached.model).layers[1].n_heads == HEADS


@pytest.mark.parametrize("kind", ["gemma4_text", "granitemoeshared"])
def test_edges_of_blocks_whose_mlp_is_the_rest_match_raw_hooks(kind):
    """Gemma 4 multiplies the stream after each block by a number, and Granite adds two modules."""
    model = model_of(kind)
    layers, final = model.model.layers, model.model.norm
    is_gemma = kind == "gemma4_text"
    before_mlp = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    numbers = [layer.layer_scalar if is_gemma else torch.ones(1) for layer in layers]
    assert not is_gemma or len({number.item() for number in numbers} - {1.0}) == 2

    def of_rest(n):
        between = moved(model, layers[n].get_submodule(before_mlp), is_input=True)
        return moved(model, layers[n]) - numbers[n] * between

    changes = {
        "input->logits": moved(model, layers[0], is_input=True) * numbers[0] * numbers[1],
        "m0->logits": of_rest(0) * numbers[1],
        "m1->logits": of_rest(1),
    }
    base = metric(model(CLEAN).logits)
    exact = [changed(model, final, change) - base for change in changes.values()]
    with attach(model):
        found = edge_patching(model, PAIRS, [*changes])
        scores = edge_attribution(model, PAIRS)
    close(found.values, torch.stack(exact))
    slopes = []
    for change in changes.values():
        share = torch.zeros(3, 1, 1, requires_grad=True)
        total = changed(model, final, change, share).sum()
        slopes.append(torch.autograd.grad(total, share)[0].flatten())
    places = [scores.labels["edge"].index(edge) for edge in changes]
    close(scores.values[places], torch.stack(slopes))


def test_sums_of_components_of_a_scaled_stream_name_the_reason():
    model = model_of("gemma4_text")
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(CLEAN)
        with pytest.raises(ValueError, match="also multiply the stream by numbers"):
            decompose(model, cache)


# These models have no edges: a norm of a sum replaces the stream, or the logits are not read from
# the stream after the last block by modules that run one after the other.
REFUSED = {
    *("bart", "bert", "electra", "marian", "openai-gpt", "plbart", "roberta", "minicpm3"),
    *("nanochat", "doge", "bert-generation", "big_bird", "blenderbot-small", "camembert"),
    *("data2vec-text", "ernie", "mvp", "rembert", "roc_bert", "roformer", "trocr", "xlm-roberta"),
    *("minimax", "rwkv", "inkling_text", "inkling2_text", "recurrent_gemma", "xmod"),
    *("zaya", "zamba2", "deepseek_v4", "gemma3n_text", "hy_v4", "git", "xlstm"),
}


@pytest.mark.sampled(48)
@pytest.mark.parametrize("kind", [kind for kind in MODELS | MORE if kind not in REFUSED])
@torch.no_grad()
def test_circuits_of_all_architectures(kind):
    model = made(kind)
    logits = [model(text, use_cache=False).logits for text in (CLEAN, OTHER)]
    with attach(model):
        # Points change no number.
        assert torch.equal(model(CLEAN, use_cache=False).logits, logits[0])
        nodes = graph.Graph(model)
        close(run_circuit(model, PAIRS, nodes.edges), logits[0], tolerance=1e-3)
        close(run_circuit(model, PAIRS, []), logits[1], tolerance=1e-3)
        assert edge_attribution(model, PAIRS).about["node_gap"] < 1e-3


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", sorted(REFUSED & {*MODELS, *MORE}))
def test_architectures_without_edges_name_the_reason(kind):
    model = made(kind)
    with attach(model), pytest.raises((TypeError, ValueError), match="must have|unembed"):
        graph.Graph(model)
