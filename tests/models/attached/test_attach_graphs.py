"""Graphs of attached decoders that `from_hf` does not support, compared with PyTorch's
own hooks.
"""

import contextlib
import functools

import pytest
import torch

from hooks import HookedRunner
from interp import (
    Pairs,
    decompose,
    edge_attribution,
    edge_patching,
    graph,
    path_patching,
    run_circuit,
)
from models import attach, from_hf
from models.attached.view import PlainView
from models.checkpoints.huggingface.families import FAMILIES
from models.text.tokenizer import CharTokenizer
from tests.attachable import HEADS, KV_HEADS, agree, made
from tests.decoders import FOREIGN, KINDS, KNOWN
from tests.models.attached.graphs import CLEAN, OTHER, PAIRS, metric

close = functools.partial(agree, tolerance=2e-5)

REFUSED = {
    "bert": "not of the sum with the stream",
    "doge": "a stream that is kept, up to a number",
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_circuit_is_the_text_and_an_empty_one_the_other(kind):
    model = made(kind)
    with torch.no_grad():
        logits = [model(text).logits for text in (CLEAN, OTHER)]
    with attach(model):
        nodes = graph.Graph(model)
        close(run_circuit(model, PAIRS, nodes.edges), logits[0])
        close(run_circuit(model, PAIRS, []), logits[1])
        scores = edge_attribution(model, PAIRS)
        assert scores.about["node_gap"] < 1e-4
        assert scores.labels["edge"] == nodes.edges
        assert any(f"a1.h{HEADS - 1}<q>" in edge for edge in nodes.edges)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KNOWN)
def test_families_that_are_known_have_the_graph_of_their_plain_model(kind, monkeypatch):
    model = made(kind)
    foreign = [name for name in FOREIGN.get(kind, ()) if hasattr(model.config, name)]
    plain = from_hf(model, ignore=foreign)
    with attach(model):
        monkeypatch.setattr("models.attached.attached.FAMILIES", {})
        assert isinstance(graph.Graph(model).model, PlainView)
        edges = list(graph.Graph(plain).edges)[::3]
        for analysis in (edge_attribution, path_patching):
            ours, theirs = analysis(model, PAIRS), analysis(plain, PAIRS)
            close(ours.values, theirs.values, tolerance=1e-4)
            assert ours.labels == theirs.labels
        close(run_circuit(model, PAIRS, edges), run_circuit(plain, PAIRS, edges), tolerance=1e-4)
        some = edge_patching(model, PAIRS, edges[:20])
        close(some.values, edge_patching(plain, PAIRS, edges[:20]).values, tolerance=1e-4)


# The modules of models in which queries, keys and values have separate maps.
NAMES = {
    "olmoe": (
        "model.layers",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "input_layernorm",
        "model.norm",
    ),
    "gptj": ("transformer.h", "attn.v_proj", "attn.out_proj", "ln_1", "transformer.ln_f"),
    "granite": (
        "model.layers",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "input_layernorm",
        "model.norm",
    ),
}


@contextlib.contextmanager
def listening(module, hook, before=False):
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", NAMES)
@torch.no_grad()
def test_an_edge_matches_raw_hooks(kind):
    model, (blocks, value, output, norm, final) = made(kind), NAMES[kind]
    blocks, final = model.get_submodule(blocks), model.get_submodule(final)
    factor = getattr(model.config, "residual_multiplier", 1.0)
    first, second = blocks[0].get_submodule(output), blocks[1].get_submodule(output)
    size = first.in_features // HEADS

    def wrote(module, head, text):
        """Return the vectors that a head adds to the stream."""
        read = []
        with listening(module, lambda module, args: read.append(args[0]), before=True):
            model(text)
        columns = slice(head * size, (head + 1) * size)
        return factor * read[0][..., columns] @ module.weight[:, columns].T

    def moved(module, head):
        return wrote(module, head, OTHER) - wrote(module, head, CLEAN)

    # The edge to the logits, by hand: add the change of the head to the input of the final norm.
    change = moved(second, 2)
    with listening(final, lambda module, args: (args[0] + change,), before=True):
        to_logits = metric(model(CLEAN).logits)
    # The edge to the value of a head, by hand: its map reads the norm of the changed stream.
    by = moved(first, 1)
    head = 1 if kind == "gptj" else KV_HEADS - 1
    columns = slice(head * size, (head + 1) * size)
    reader, norms = blocks[1].get_submodule(value), []
    with listening(blocks[1], lambda module, args: norms.append(args[0]), before=True):
        model(CLEAN)
    values = reader(blocks[1].get_submodule(norm)(norms[0] + by))

    def put(module, args, out):
        out = out.clone()
        out[..., columns] = values[..., columns]
        return out

    with listening(reader, put):
        to_value = metric(model(CLEAN).logits)
    base = metric(model(CLEAN).logits)
    with attach(model):
        edges = ["a1.h2->logits", f"a0.h1->a1.h{head}<v>"]
        found = edge_patching(model, PAIRS, edges)
    close(found.values[0], to_logits - base)
    close(found.values[1], to_value - base)


@pytest.mark.parametrize("kind", ["olmoe", "gpt2", "glm4"])
def test_padding_changes_nothing(kind, monkeypatch):
    monkeypatch.setattr("models.attached.attached.FAMILIES", {})
    model = made(kind)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[:, :2] = False
    texts = [torch.nn.functional.pad(text, (2, 0)) for text in (CLEAN, OTHER)]
    padded = Pairs(*texts, metric=metric, attention_mask=real)
    with attach(model):
        edges = list(graph.Graph(model).edges)[::2]
        alone = run_circuit(model, PAIRS, edges)
        close(run_circuit(model, padded, edges)[:, 2:], alone)
        close(
            edge_attribution(model, padded).values,
            edge_attribution(model, PAIRS).values,
            tolerance=1e-4,
        )


@pytest.mark.parametrize("kind", ["olmoe", "phi"])
def test_graphs_read_strings_with_the_tokenizer_of_the_attached_model(kind):
    model = made(kind)
    tokenizer = CharTokenizer("abcdefgh")
    texts = "abcab", "abfab"
    tokens = [torch.tensor([tokenizer.encode(text)]) for text in texts]
    with attach(model, tokenizer=tokenizer):
        assert isinstance(graph.Graph(model).model, PlainView)
        from_tokens = Pairs(*tokens, answers=torch.tensor([[3, 6]]))
        from_strings = Pairs(*texts, answers=("d", "g"))
        for analysis in (
            edge_attribution,
            lambda *given: edge_patching(*given, ["m0->logits"]),
            lambda *given: path_patching(*given, receivers="m1"),
        ):
            found, expected = (
                analysis(model, pairs).values for pairs in (from_strings, from_tokens)
            )
            assert torch.equal(found, expected)


def test_components_add_up_to_the_stream():
    model = made("granite")
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(CLEAN)
        parts = decompose(model, cache)
        close(parts.values.sum(0), cache["resid_post", -1])


@pytest.mark.parametrize("kind", REFUSED)
def test_missing_parts_are_named(kind):
    model = made(kind)
    with attach(model), pytest.raises((ValueError, TypeError), match=REFUSED[kind]):
        graph.Graph(model)


def test_families_of_the_table_are_not_in_from_hf():
    assert not {*KINDS} & {*FAMILIES}
