"""Attention in attribution graphs, compared with autograd of a run with frozen norms and MLPs, and
with interventions.
"""

import re

import pytest
import torch

from hooks import HookedRunner
from interp import attention_attribution, attribution_graph
from interp.attribution_graphs.descent import Descent
from interp.attribution_graphs.frozen import FrozenRun
from models import Transformer, TransformerConfig
from tests.interp.attribution_graphs.transcoders import (
    FORMS,
    SIZES,
    TEXT,
    model_of,
    skip_of,
    transcoders,
)

MORE = {
    "norm of each head": {"qk_norm": "head"},
    "norm of all heads": {"qk_norm": "all", "rotary_pairs": "adjacent"},
}
CASES = [(form, {}) for form in FORMS] + [("rms", more) for more in MORE.values()]


def made(form, more):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**(SIZES | FORMS[form] | more))).double().eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return model


def hold_norms_of_queries(model):
    """Freeze the scales of the norms of queries and keys."""
    for block in model.blocks:
        for norm in (block.attn.q_norm, block.attn.k_norm):
            if hasattr(norm, "eps"):
                scales = []

                def see(module, args, output, scales=scales, norm=norm):
                    flat = args[0].flatten(norm.first)
                    scales.append((flat.square().mean(-1, keepdim=True) + norm.eps).sqrt().detach())

                with norm.register_forward_hook(see):
                    model(TEXT)

                def held(x, scales=scales, norm=norm):
                    return (x.flatten(norm.first) / scales[0] * norm.weight).view(x.shape)

                norm.forward = held


def slope(model, cache, dictionaries, name, vector, reads, directions, held):
    """Return the derivatives of directions in several reads when a vector is added at a point.

    Norms and MLPs keep the values of the run. With `held`, attention patterns keep theirs too.
    """
    seen, share = {}, torch.zeros((), dtype=torch.float64, requires_grad=True)

    def freeze(value, at):
        return cache[at.name]

    def see(value, at):
        seen[at.name] = value

    def write(value, at):
        skip, read = skip_of(dictionaries, at.name), at.name.replace("mlp_out", "ln2.normalized")
        return (
            cache[at.name] if skip is None else cache[at.name] + (seen[read] - cache[read]) @ skip
        )

    hooks = [("*.scale", freeze), ("*.mlp_out", write), *([("*.pattern", freeze)] if held else [])]
    watched = {*reads, *(f"blocks.{n}.ln2.normalized" for n in range(3))} & {*cache}
    hooks += [(each, see) for each in watched]
    hooks.append((name, lambda value, at: value + share * vector))
    HookedRunner(model).run_with_hooks(TEXT, hooks=hooks)
    numbers = [seen[read][0, pos] @ direction for (read, pos, direction) in directions]
    slopes = [
        torch.autograd.grad(n, share, retain_graph=True, allow_unused=True)[0] for n in numbers
    ]
    return torch.stack(
        [torch.zeros_like(share) if each is None else each for each in slopes]
    ).detach()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "more"), CASES)
def test_effects_by_attention_are_slopes_of_a_run_with_norms_held(form, more):
    model = made(form, more)
    reads = "resid_mid" if form == "output" else "ln2.normalized"
    dictionaries = transcoders("layer", reads)
    run = FrozenRun(model, TEXT, dictionaries)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    features = ((run.layer == 2) & (run.pos > 1)).nonzero()[:, 0][[1, -2]]
    targets = run.of_logits(torch.eye(7)[[2, 5]]), run.of_features(features)
    live = [Descent(run, each, attention=True) for each in targets]
    rows = torch.cat(
        [each.rows - run.rows(target) for each, target in zip(live, targets, strict=True)]
    )
    moved = torch.cat([each.moved for each in live])
    torch.testing.assert_close(rows.sum(1), moved, rtol=1e-9, atol=1e-11)
    assert rows.abs().sum(1).min() > 1e-3
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, [2, 5]]
    encoders = dictionaries["blocks.2.mlp_out"].W_enc
    read = f"blocks.2.{reads}"
    directions = [("ln_final.normalized", -1, each) for each in W_U.T.detach()]
    directions += [(read, int(run.pos[n]), encoders[:, run.feature[n]]) for n in features]
    hold_norms_of_queries(model)
    n_features = len(run.layer)
    sources = {n_features + pos: ("blocks.0.mlp_out", pos, run.errors[0]) for pos in (0, 2, 4)}
    sources |= {n_features + 5 + pos: ("blocks.1.mlp_out", pos, run.errors[1]) for pos in (1, 3)}
    if not FORMS[form].get("embed_norm"):
        sources |= {n_features + 15 + pos: ("embed", pos, cache["embed"][0]) for pos in (1, 2)}
    for column, (name, pos, values) in sources.items():
        vector = torch.zeros_like(cache["embed"])
        vector[0, pos] = values[pos]
        live, held = (
            slope(
                model,
                cache,
                dictionaries,
                name,
                vector,
                {read, "ln_final.normalized"},
                directions,
                held,
            )
            for held in (False, True)
        )
        torch.testing.assert_close(rows[:, column], live - held, rtol=1e-8, atol=1e-11)


def graph_of(form="rms", **more):
    model = model_of(form)
    dictionaries = transcoders("layer", "ln2.normalized")
    return model, attribution_graph(model, TEXT, dictionaries, targets=[2, 5], **more)


def test_effects_by_attention_are_separate():
    _, plain = graph_of()
    _, graph = graph_of(attention=True)
    torch.testing.assert_close(graph.rows, plain.rows, rtol=0, atol=0)
    torch.testing.assert_close(graph.influence, plain.influence, rtol=0, atol=0)
    assert plain.by_attention is None
    assert 0 < graph.attention_gap < 1e-10
    # No attention reads the output of block 2, the last block, so it has no effect through
    # patterns.
    last = graph.run.layer == 2
    assert not graph.by_attention[:, : len(last)][:, last].any()
    name, target = graph.nodes[0].id, graph.logits[1].id
    assert graph.effect(name, target, by_attention=True) == float(graph.by_attention[1, 0])
    with pytest.raises(ValueError, match="need attribution_graph"):
        plain.effect(name, target, by_attention=True)
    _, few = graph_of(attention=True, max_bytes=1)
    torch.testing.assert_close(few.by_attention, graph.by_attention)


def test_targets_in_parts_equal_all_targets_together(monkeypatch):
    _, graph = graph_of(attention=True)
    monkeypatch.setattr("interp.attribution_graphs.descent._BYTES", 1)
    _, parts = graph_of(attention=True)
    torch.testing.assert_close(parts.by_attention, graph.by_attention, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", ["rms", "both ways", "window", "parallel"])
@pytest.mark.parametrize("against", [None, 0, "mean"])
def test_pairs_by_paths_add_up_like_pairs_by_writers(form, against):
    model, graph = graph_of(form)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    for head in ((0, 3), (2, 1)):
        tables = [
            graph.attention(head, -2, 2, against, through=each, k=5)
            for each in ("paths", "writers")
        ]
        sums = [table.values.sum() for table in tables]
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-9, atol=1e-11)
        known = attention_attribution(model, cache, head, -2, 2, against, k=5)
        torch.testing.assert_close(tables[1].values, known.values)
        assert tables[0].about | {"summed sizes of all pairs": 0, "gap": 0} == known.about | {
            "summed sizes of all pairs": 0,
            "gap": 0,
        }
        assert {*tables[0].labels["key_source"]} <= {node.id for node in graph.nodes} | {"rest"}


def test_both_sides_of_a_pair_equal_a_frozen_run():
    """A token's contributions to a query and to a key equal their changes in a run in which norms,
    patterns and MLPs keep the values of the unedited run.
    """
    model, graph = graph_of()
    table = graph.attention((2, 3), 4, 1, k=10**7)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    transcoders_of = graph.run.transcoders.items()
    dictionaries = {f"blocks.{n}.mlp_out": each.dictionary for n, each in transcoders_of}
    sides = {}
    for pos in (0, 1, 4):
        seen = {}

        def freeze(value, at):
            return cache[at.name]

        def see(value, at, seen=seen):
            seen[at.name] = value

        def add(value, at, pos=pos):
            value[0, pos] += cache["embed"][0, pos]

        def write(value, at, seen=seen):
            skip, read = (
                skip_of(dictionaries, at.name),
                at.name.replace("mlp_out", "ln2.normalized"),
            )
            written = cache[at.name]
            return written if skip is None else written + (seen[read] - cache[read]) @ skip

        hooks = [("*.scale", freeze), ("*.pattern", freeze), ("*.mlp_out", write), ("embed", add)]
        hooks += [("*.ln2.normalized", see), ("blocks.2.attn.q", see), ("blocks.2.attn.k", see)]
        HookedRunner(model).run_with_hooks(TEXT, hooks=hooks)
        for name, at in (("q", 4), ("k", 1)):
            point = f"blocks.2.attn.{name}"
            head = 3 if name == "q" else 3 // (4 // seen[point].shape[2])
            sides[name, pos] = (seen[point] - cache[point])[0, at, head].detach()
    tokens = TEXT[0].tolist()
    for one in (0, 1, 4):
        for two in (0, 1):
            expected = model.blocks[2].attn.scale * sides["q", one] @ sides["k", two]
            ours = table.select(
                query_source=f"E_{tokens[one]}_{one}", key_source=f"E_{tokens[two]}_{two}"
            ).values
            torch.testing.assert_close(ours, expected[None], rtol=1e-9, atol=1e-12)


def test_the_largest_cells_match_all_scores():
    model, graph = graph_of(attention=True)
    cells = graph.cells(graph.logits[1].id, k=7)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    live = Descent(graph.run, graph._targets(1), attention=True, keep=True)
    weights = torch.cat([worth.flatten() for worth in live.cells.values()])
    best = weights[weights.abs().argsort(descending=True)[:7]]
    assert [cell.weight for cell in cells] == pytest.approx(best.tolist())
    for cell in cells:
        at = cell.layer, cell.head, cell.query, cell.key
        score = cache["scores", cell.layer][0, cell.head, cell.query, cell.key]
        assert cell.score == pytest.approx(float(score), rel=1e-4)
        assert cell.pattern == pytest.approx(
            cache["pattern", cell.layer][0, cell.head, cell.query].tolist()
        )
        assert cell.weight == pytest.approx(float(live.cells[at[0]][at[1:]]))
        assert cell.size >= abs(cell.score)
        assert cell.target == graph.logits[1].id
        assert cell.pairs
    assert graph.cells()[0].target == graph.logits[0].id


def test_the_cells_of_the_last_block_match_their_formula():
    """The effect of an attention score is its gradient multiplied by its difference from the mean.

    With the pattern P and A, the effect of each key's value on the target, the gradient of a score
    is P (A - mean of A), with means weighted by P.
    """
    model, graph = graph_of("plain", attention=True)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    cells = Descent(graph.run, graph._targets(0), attention=True, keep=True).cells[2]
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, 2] * model.ln_final.weight
    direction = (W_U - W_U.mean()) / cache["ln_final.scale"][0, -1]
    pattern, scores = (cache[name, 2][0, :, -1] for name in ("pattern", "scores"))
    worth = torch.einsum("jhe,hed,d->hj", cache["v", 2][0], model.blocks[2].attn.W_O, direction)
    gradient = pattern * (worth - (pattern * worth).sum(-1, keepdim=True))
    expected = gradient * (scores - (pattern * scores).sum(-1, keepdim=True))
    torch.testing.assert_close(cells[:, -1], expected.detach(), rtol=1e-9, atol=1e-12)
    assert not cells[:, :-1].any()


def test_an_intervention_has_the_measured_and_the_predicted_effect_of_attention():
    model, graph = graph_of("plain", attention=True)
    _, plain = graph_of("plain")
    name = next(node.id for node in graph.nodes if node.layer == 0 and node.pos == 1)
    source, old = graph.place(name), float(graph.run.activation[graph.place(name)])
    result, without = (each.intervene({name: old + 1e-6}) for each in (graph, plain))
    torch.testing.assert_close(result.true, without.true, rtol=1e-5, atol=1e-13)
    torch.testing.assert_close(
        result.predicted - result.by_attention, without.predicted, rtol=1e-9, atol=1e-15
    )
    assert not without.by_attention.any()
    per_unit = (graph.rows + graph.by_attention)[0, source] / old
    assert float(result.direct[0]) == pytest.approx(1e-6 * float(per_unit), rel=1e-6)
    # The change with fixed patterns, by hand: make the same edit in a run that uses the patterns of
    # the unedited run.
    run = graph.run
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    dictionary, n, feature = (
        run.transcoders[0].dictionary,
        int(run.pos[source]),
        int(run.feature[source]),
    )
    changes = {}
    for parts in (("pattern",), ("pattern", "scale")):

        def write(value, at):
            value[0, n] += 1e-6 * dictionary.W_dec[feature]

        def freeze(value, at, parts=parts):
            return cache[at.name] if at.name.rpartition(".")[2] in parts else None

        frozen = [(f"*.{part}", freeze) for part in parts]
        logits = HookedRunner(model).run_with_hooks(
            TEXT, hooks=[*frozen, ("blocks.0.mlp_out", write)]
        )
        difference = (logits - model(TEXT))[0, -1].detach()
        changes[parts] = (difference - difference.mean())[[2, 5]]
    torch.testing.assert_close(result.patterns_held[:2], changes["pattern",], rtol=1e-4, atol=1e-13)
    torch.testing.assert_close(
        result.scales_held[:2], changes["pattern", "scale"], rtol=1e-4, atol=1e-13
    )
    assert (result.true[:2] - result.patterns_held[:2]).abs().min() > 1e-12
    header = re.split(" {2,}", repr(result).splitlines()[2].strip())
    assert header == [
        "node",
        "direct",
        "predicted",
        "by attention",
        "true",
        "true by attention",
    ]


def test_targets_that_no_graph_can_explain_are_errors():
    _, graph = graph_of()
    with pytest.raises(ValueError, match="through .*paths, writers; got 'heads'"):
        graph.attention((0, 0), through="heads")
    with pytest.raises(ValueError, match=r"3 layers with 4 heads; got \(3, 0\)"):
        graph.attention((3, 0))


def test_rows_without_an_effect_of_attention_have_no_gap():
    """At the second of two equal tokens, all values that attention reads are equal.

    So no score matters there, and the difference of two rows is only rounding.
    """
    model = model_of("rms")
    text = torch.tensor([[3, 3, 5, 1]])
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = attribution_graph(model, text, dictionaries, targets=[2, 5], attention=True)
    assert graph.attention_gap < 1e-10
    second = (graph.run.pos == 1).nonzero().flatten()
    assert len(second)
