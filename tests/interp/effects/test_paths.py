"""Edge and path patching, compared with two runs of a two-layer model with hooks, and with slow
masked runs.
"""

import re

import pytest
import torch

from hooks import HookedRunner, HookError, UnknownNameError
from interp import Pairs, edge_patching, graph, path_patching, run_circuit
from interp.runs.path_edits import PathEdits
from tests.shipped import pydoc
from tests.streams import FORMS, made, slow_run

CLEAN, OTHER = torch.randint(23, (2, 5, 7), generator=torch.Generator().manual_seed(1))
OTHER[:, :2] = CLEAN[:, :2]
REAL = torch.ones(5, 7, dtype=torch.bool)
LEFT = REAL.clone()
LEFT[1, :3] = False
EDGES = {
    "q": "input->a1.h2<q>",
    "k": "a0.h3->a2.h1<k>",
    "v": "m0->a1.h2<v>",
    "m": "a1.h4->m2",
    "logits": "a1.h0->logits",
}


def answer(logits):
    return logits[:, -1, 3] - logits[:, -1, 11]


answer.last = 1


PAIRS = Pairs(CLEAN, OTHER, metric=answer)


def close(found, expected):
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
def test_each_edge_is_a_run_with_this_edge_alone(form):
    model, pairs = made(**FORMS[form]), Pairs(CLEAN, OTHER, attention_mask=LEFT, metric=answer)
    nodes = graph.Graph(model)
    edges = [edge for edge in EDGES.values() if "m" not in edge or FORMS[form].get("mlp") != "none"]
    found = edge_patching(model, pairs, edges)
    base, _ = slow_run(model, CLEAN, real=LEFT)
    target, source = slow_run(model, OTHER, real=LEFT)
    assert found.axes == ("edge", "example")
    assert found.labels["edge"] == tuple(edges)
    for edge, effect in zip(edges, found.values, strict=True):
        mask = torch.zeros(nodes.allowed.shape)
        mask[nodes.index(edge)] = 1
        edited, _ = slow_run(model, CLEAN, mask, source, LEFT, nodes)
        close(effect, answer(edited) - answer(base))
        close(effect, answer(run_circuit(model, pairs, mask)) - answer(base))
    close(found.base, answer(base))
    close(found.target, answer(target))


def test_all_edges_in_either_direction_and_in_little_memory():
    model = made(n_layers=2, n_heads=2, n_kv_heads=1)
    found = edge_patching(model, PAIRS)
    assert found.labels["edge"] == graph.Graph(model).edges
    small = edge_patching(model, PAIRS, max_bytes=200_000)
    torch.testing.assert_close(small.values, found.values)
    back = edge_patching(model, Pairs(OTHER, CLEAN, metric=answer), direction="denoising")
    torch.testing.assert_close(back.values, found.values)


def two_runs(model, sender, receivers, mlps):
    """Return the logits of path patching, computed with hooks in two runs."""
    runner = HookedRunner(model)
    _, base = runner.run_with_cache(CLEAN)
    (_, own), (_, other) = slow_run(model, CLEAN), slow_run(model, OTHER)
    recorded = {}

    def keep(added, is_frozen=True):
        def hook(value, point):
            recorded[point.name] = value.clone()
            return base[point.name] + added if is_frozen else value + added

        return hook

    hooks, moved = {}, other[sender] - own[sender]
    if sender == "input":
        hooks["blocks.0.resid_pre"] = keep(moved)
    for n in range(2):
        for part in "qkv":
            hooks[f"blocks.{n}.attn.{part}"] = keep(0, False)
        hooks[f"blocks.{n}.attn_out"] = keep(moved if sender.startswith(f"a{n}.") else 0)
        its_own = sender == f"m{n}"
        hooks[f"blocks.{n}.mlp_out"] = keep(moved if its_own else 0, its_own or mlps == "frozen")
    logits = runner.run_with_hooks(CLEAN, hooks=hooks)
    if receivers == ["logits"]:
        return logits

    def put(heads):
        def hook(value, point):
            value = value.clone()
            value[:, :, heads] = recorded[point.name][:, :, heads]
            return value

        return hook

    second = {}
    for name in receivers:
        if name.startswith("m"):
            second[f"blocks.{name[1:]}.mlp_out"] = put(slice(None))
            continue
        layer, part = name[1], name[-2]
        same = [r for r in receivers if r.startswith(f"a{layer}.") and r.endswith(f"<{part}>")]
        second[f"blocks.{layer}.attn.{part}"] = put([int(r.partition(".h")[2][0]) for r in same])
    return runner.run_with_hooks(CLEAN, hooks=second)


RECEIVERS = [
    ["logits"],
    ["a1.h0<q>", "a1.h3<q>", "a1.h1<k>"],
    ["m1"],
    ["a1.h2<v>", "m1"],
    ["m0", "a1.h5<q>", "m1"],
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mlps", ["recomputed", "frozen"])
@pytest.mark.parametrize("receivers", RECEIVERS, ids=" ".join)
@pytest.mark.parametrize("form", ["pre", "sandwich", "sandwich rms"])
def test_paths_are_two_runs_with_hooks(form, receivers, mlps):
    model = made(**FORMS[form], n_layers=2)
    senders = ["input"] if receivers[0] == "m0" else ["input", "a0.h1", "m0"]
    senders += ["a0.bias"] if form != "pre" and "m0" not in receivers else []
    found = path_patching(model, PAIRS, receivers, senders, mlps=mlps)
    for sender, effect in zip(senders, found.values, strict=True):
        close(effect, answer(two_runs(model, sender, receivers, mlps)) - answer(model(CLEAN)))


@pytest.mark.parametrize(
    ("receiver", "computed"),
    [("a1.h0<q>", [(0, 5)]), ("m1", [(0, 5), (1, 7)]), ("logits", [(0, 5), (1, 5), (2, 5)])],
)
def test_a_path_computes_no_more_mlps_and_positions_than_it_needs(receiver, computed, monkeypatch):
    """The texts have 7 tokens, and differ from the third one on. A receiver is computed whole."""
    model = made(n_layers=3)
    nodes = graph.Graph(model)
    paths = PathEdits(nodes, PAIRS, direction="noising", max_bytes=2**30)
    layer_of = {block.mlp: layer for layer, block in enumerate(model.blocks)}
    kind = type(model.blocks[0].mlp)
    forward, seen = kind.forward, []

    def counted(mlp, x):
        seen.append((layer_of[mlp], x.shape[1]))
        return forward(mlp, x)

    monkeypatch.setattr(kind, "forward", counted)
    before = paths.moved.clone()
    paths.through(nodes.place("writer", "input"), {nodes.place("reader", receiver)}, True)
    assert seen == computed
    # The next path reads the same outputs of writers.
    assert torch.equal(paths.moved, before)


def test_one_name_stands_for_itself():
    model, edge = made(n_layers=1), "input->m0"
    one, several = (edge_patching(model, PAIRS, edges) for edges in (edge, [edge]))
    assert torch.equal(one.values, several.values)
    one, several = (path_patching(model, PAIRS, *n) for n in (("m0", "input"), (["m0"], ["input"])))
    assert torch.equal(one.values, several.values)


def test_senders_are_by_default_all_before_a_receiver():
    found = path_patching(made(), PAIRS, ["m0", "a1.h0<q>"])
    assert found.labels["sender"] == ("input", *(f"a0.h{h}" for h in range(6)), "m0")


def test_names_with_wildcards_stand_for_all_nodes_before_a_receiver():
    model, receivers = made(), [f"a2.h{head}<q>" for head in range(6)]
    heads = [f"a{layer}.h{head}" for layer in (0, 1) for head in range(6)]
    listed = path_patching(model, PAIRS, receivers, [*heads, "m1"])
    found = path_patching(model, PAIRS, ["a2.*<q>", "a2.h1<q>"], ["a*.h*", "a0.h?", "m1"])
    assert found.about["receivers"] == receivers
    assert found.labels["sender"] == (*heads, "m1")
    close(found.values, listed.values)
    for name, numbers in (("a1.*", range(6)), ("a1.h?", range(6)), ("a1.h4", [4])):
        one = path_patching(model, PAIRS, receivers, name)
        assert one.labels["sender"] == tuple(f"a1.h{head}" for head in numbers)


def test_heads_among_the_senders_are_a_table_of_layers_and_heads():
    model = made()
    found = path_patching(model, PAIRS, ["a2.h0<k>"], ["a1.h5", "a0.h2", "a1.h2", "a0.h5", "m1"])
    table = found.by("head")
    assert table.axes == ("layer", "head", "example")
    assert (table.labels["layer"], table.labels["head"]) == ((0, 1), (2, 5))
    close(table.values, found.values[torch.tensor([[1, 3], [2, 0]])])
    assert table.about["left out"] == "1 mlp"


def test_frozen_paths_are_edges_unless_a_receiver_is_upstream_of_another():
    model, nodes = made(), graph.Graph(made())
    for receivers, agree in ((["a1.h0<q>", "a1.h2<v>"], True), (["a1.h0<q>", "a2.h2<v>"], False)):
        found = path_patching(model, PAIRS, receivers, ["input"], mlps="frozen")
        removed = {f"input->{receiver}" for receiver in receivers}
        logits = run_circuit(
            model, Pairs(CLEAN, OTHER), [e for e in nodes.edges if e not in removed]
        )
        difference = found.values[0] - (answer(logits) - answer(model(CLEAN)))
        assert (difference.abs().max() < 1e-9) == agree


def test_arguments_that_do_not_fit_are_errors(unchecked):
    model = made()
    shifted = torch.cat([OTHER[:, :1], OTHER], 1)
    apart = Pairs(CLEAN, shifted, spans={"a": [[3]] * 5}, metric=answer)
    for error, call in (
        ("a1.h3<q>", lambda: edge_patching(model, PAIRS, ["input->a1.h7<q>"])),
        ("later", lambda: edge_patching(model, PAIRS, ["m1->a1.h0<q>"])),
        ("at least one", lambda: edge_patching(model, PAIRS, [])),
        ("must be names.*Pairs", lambda: edge_patching(model, PAIRS, answer)),
        ("must be names.*Pairs", lambda: path_patching(model, PAIRS, answer)),
        (r"such as 'm2'.*\(3, 0\)", lambda: path_patching(model, PAIRS, [(3, 0)])),
        ("a2.h1", lambda: path_patching(model, PAIRS, ["a2.h1q"])),
        ("writer|sender", lambda: path_patching(model, PAIRS, senders=["a9.h1"])),
        ("before", lambda: path_patching(model, PAIRS, ["m1"], ["m1"])),
        ("before.*m2", lambda: path_patching(model, PAIRS, ["m1"], ["m0", "m2"])),
        (r"before.*a2\.\*", lambda: path_patching(model, PAIRS, ["m1"], ["a2.*"])),
        ("none", lambda: path_patching(model, PAIRS, ["m1"], [])),
        (r"a9\.\*.*close matches: a", lambda: path_patching(model, PAIRS, senders="a9.*")),
        ("alone", lambda: path_patching(model, PAIRS, "*")),
        (
            "readers at this point are a1.h0<q> to a1.h5<q>",
            lambda: path_patching(model, PAIRS, "blocks.1.attn.q"),
        ),
        (
            "readers at this point are a2.h0<k> to a2.h2<k>",
            lambda: path_patching(model, PAIRS, ["blocks.2.attn.hook_k"]),
        ),
        ("reader at this point is m2", lambda: path_patching(model, PAIRS, "blocks.2.mlp_out")),
        (
            "writers at this point are a0.h0 to a0.h5",
            lambda: path_patching(model, PAIRS, senders="blocks.0.attn.z"),
        ),
        (
            "writer at this point is m1",
            lambda: path_patching(model, PAIRS, senders="blocks.1.mlp_out"),
        ),
        ("alone", lambda: path_patching(model, PAIRS, ["m1", "logits"])),
        ("correspond", lambda: path_patching(model, apart)),
        ("mlps", lambda: path_patching(model, PAIRS, mlps="kept")),
    ):
        with pytest.raises((ValueError, TypeError, UnknownNameError), match=error):
            call()
    with HookedRunner(model).hooks({"*.z": lambda z, point: z}), pytest.raises(HookError):
        path_patching(model, PAIRS)


def test_the_smallest_bound_is_the_bound_that_the_error_names():
    model = made(n_layers=2, n_heads=2, n_kv_heads=1)

    def run(max_bytes):
        return edge_patching(model, PAIRS, ["input->a0.h0<v>"], max_bytes=max_bytes)

    with pytest.raises(ValueError, match="max_bytes must be at least .*got 10$") as error:
        run(10)
    least = int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))
    assert run(least).values.shape[0] == 1
    with pytest.raises(ValueError, match=f"at least {least:,}"):
        run(least - 1)


@pytest.mark.parametrize(
    ("receiver", "nodes"),
    [
        (("q", 1, 2), "a1.h2<q>)"),
        ([("v", 1, 2)], "a1.h2<v>)"),
        ("L1H2", "a1.h2<q>, a1.h2<k>, a1.h2<v>)"),
        ((1, 2), "a1.h2<q>, a1.h2<k>, a1.h2<v>)"),
    ],
)
def test_a_head_in_another_form_is_named_in_the_error(receiver, nodes):
    model = pydoc()
    pairs = Pairs("def __ini", "def __nam", ("t", "e"))
    with pytest.raises(UnknownNameError) as caught:
        path_patching(model, pairs, receivers=receiver)
    assert f"of this head {nodes}" in str(caught.value)
