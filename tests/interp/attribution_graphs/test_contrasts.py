"""Attribution graphs of two answers of several tokens, against runs of each answer alone."""

import pytest
import torch

from hooks import HookedRunner
from interp.attribution_graphs import attribution_graph
from interp.attribution_graphs.branches import Branches
from interp.attribution_graphs.descent import Descent
from interp.attribution_graphs.frozen import FrozenRun
from tests.interp.attribution_graphs.transcoders import TEXT, model_of, transcoders
from tests.shipped import pydoc

# Both answers begin with the token 2, which makes the text longer by one.
RIGHT, WRONG = (2, 6, 3, 3), (2, 5, 1)
START = (*TEXT[0].tolist(), 2)


def row_of(answer):
    """Return the tokens that the model reads for an answer."""
    return torch.tensor([[*TEXT[0].tolist(), *answer[:-1]]])


def score(logits, answer):
    """Return the log-probability of an answer."""
    first = len(TEXT[0]) - 1
    log_probs = logits[0].log_softmax(-1)
    return sum(log_probs[first + n, token] for n, token in enumerate(answer))


class Alone:
    """The run of one answer alone, with frozen patterns, scales and MLPs, in autograd."""

    def __init__(self, model, answer):
        runner = HookedRunner(model)
        row = row_of(answer)
        _, cache = runner.run_with_cache(row, mode="full")
        self.leaves = {}

        def freeze(value, at):
            return cache[at.name]

        def leaf(value, at):
            self.leaves[at.name] = cache[at.name].clone().requires_grad_()
            return self.leaves[at.name]

        hooks = [("*.scale", freeze), ("*.pattern", freeze), ("*.mlp_out", leaf)]
        hooks += [(name, leaf) for name in ("embed", "pos_embed") if name in cache]
        logits = runner.run_with_hooks(row, hooks=hooks)
        self.score = score(logits, answer)
        self.score.backward()

    def effect(self, name, column, vector=None):
        """Return the effect of a vector that is added at a point, or of the value of the point."""
        leaf = self.leaves[name]
        vector = leaf[0, column].detach() if vector is None else vector
        return float(leaf.grad[0, column] @ vector)


def contrast(model, dictionaries, **more):
    answers = (torch.tensor(RIGHT), torch.tensor(WRONG))
    return attribution_graph(model, TEXT, dictionaries, targets=answers, **more)


def rows_of_positions(graph):
    """Return the number of the answer and the column of each position, or None for both answers."""
    n_text = len(START)
    n_right = len(RIGHT) - 2
    places = []
    for pos in range(len(graph.tokens)):
        is_right = pos < n_text + n_right
        column = pos if is_right else pos - n_right
        places.append((None if pos < n_text else 0 if is_right else 1, column))
    return places


@pytest.mark.parametrize("form", ["plain", "window"])
def test_effects_equal_the_gradients_of_the_log_probabilities(form):
    model = model_of(form)
    dictionaries = transcoders("layer", "resid_mid")
    graph = contrast(model, dictionaries)
    runs = [Alone(model, RIGHT), Alone(model, WRONG)]
    expected = float(runs[0].score.detach() - runs[1].score.detach())
    assert [node.label for node in graph.logits] == ["2633 - 251"]
    assert [*map(int, graph.tokens)] == [*START, 6, 3, 5]
    labels = [node.label for node in graph.nodes if node.kind == "position"]
    # The labels at positions of an answer name its token and the answer.
    assert labels[-5:-3] == ["position 4", "position 5, '2' of both answers"]
    right = ["position 6, '6' of '2633'", "position 7, '3' of '2633'"]
    assert labels[-3:] == [*right, "position 6, '5' of '251'"]
    (token,) = (node.label for node in graph.nodes if node.kind == "token" and node.pos == 8)
    assert token == "'5' of '251'"
    printed = repr(graph).splitlines()
    assert f"explains log p('2633') - log p('251'): {expected:.4g} nats" in printed[2]
    assert printed[4:7] == [
        "  position 5 reads '2' of both answers",
        "  positions 6 to 7 read '63' of '2633'",
        "  position 8 reads '5' of '251'",
    ]
    assert float(graph.totals[0]) == pytest.approx(expected, rel=1e-9)
    assert graph.metric == pytest.approx(expected, rel=1e-9)
    assert float(graph.rows[0].sum()) == pytest.approx(expected, rel=1e-9)
    assert graph.gap < 1e-12
    places = rows_of_positions(graph)

    checked = set()
    for place, node in enumerate(graph.nodes[: graph.rows.shape[1]]):
        embeddings = {"token": "embed", "position": "pos_embed"}
        name = embeddings.get(node.kind, f"blocks.{node.layer}.mlp_out")
        vector = None
        if node.kind == "feature":
            vector = node.activation * dictionaries[name].W_dec[node.number]
        elif node.kind == "bias" or (node.kind == "error" and node.layer != 1):
            # The MLP of layer 1 has no transcoder, so its error is its output.
            continue
        number, column = places[node.pos]
        effect = 0.0
        for row, (sign, run) in enumerate(zip((1, -1), runs, strict=True)):
            if number in (None, row):
                effect += sign * run.effect(name, column, vector)
        assert float(graph.rows[0, place]) == pytest.approx(effect, abs=1e-9), node
        checked.add((node.kind, number))
    # Four kinds of sources, each at positions of the text and of both answers.
    assert len(checked) == 12


def test_attention_and_interventions_equal_runs_of_each_answer_alone():
    model = model_of("rms")
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = contrast(model, dictionaries, attention=True, max_features=9)
    assert graph.attention_gap < 1e-12
    # Weighted sums of logits of each answer alone, with weights from autograd.
    by_node = dict.fromkeys((node.id for node in graph.nodes), 0.0)
    places = rows_of_positions(graph)
    columns = [{}, {}]
    for pos, (number, column) in enumerate(places):
        for row in (0, 1) if number is None else (number,):
            columns[row][column] = pos
    changed = next(
        node for node in graph.nodes if node.kind == "feature" and (node.layer, node.pos) == (0, 3)
    )
    true_change = 0.0
    for row, (sign, answer) in enumerate(zip((1, -1), (RIGHT, WRONG), strict=True)):
        logits = model(row_of(answer)).detach().requires_grad_()
        (sign * score(logits, answer)).backward()
        weights = logits.grad[0]
        pos = torch.arange(len(weights))
        terms = graph.terms._replace(
            weights=weights, pos=pos, node=torch.zeros_like(pos), constant=None
        )
        run = FrozenRun(model, row_of(answer), dictionaries)
        alone = attribution_graph(model, row_of(answer), dictionaries, targets=[0], max_features=0)
        one_row = torch.zeros_like(pos)
        targets = terms.in_run(run)
        moving = Descent(run, targets, attention=True, row=one_row).rows[0]
        still = Descent(run, targets, row=one_row).rows[0]
        for node, effect in zip(alone.nodes, (moving - still).tolist(), strict=False):
            first, number, _ = node.id.split("_")
            place = columns[row][node.pos]
            number = place if node.kind == "position" else number
            by_node["_".join([first, str(number), str(place)])] += effect
        decoder = dictionaries["blocks.0.mlp_out"].W_dec[changed.number]

        def without(value, at, vector=changed.activation * decoder):
            value[0, changed.pos] -= vector
            return value

        after = HookedRunner(model).run_with_hooks(
            row_of(answer), hooks=[("blocks.0.mlp_out", without)]
        )
        true_change += float(((after - logits)[0].detach() * weights).sum())
    wanted = torch.tensor([by_node[node.id] for node in graph.nodes[: graph.rows.shape[1]]])
    torch.testing.assert_close(graph.by_attention[0], wanted.double(), rtol=1e-7, atol=1e-9)
    result = graph.intervene({changed.id: 0.0})
    assert float(result.true[0]) == pytest.approx(true_change, rel=1e-9)
    assert abs(true_change) > 1e-3
    # The score of a query of the wrong answer and a key of the text, in the run of this answer.
    _, cache = HookedRunner(model).run_with_cache(row_of(WRONG), mode="full")
    score_of_pair = graph.attention((1, 2), query=-1, key=1).values.sum()
    assert float(score_of_pair) == pytest.approx(float(cache["scores", 1][0, 2, -1, 1]), rel=1e-9)
    with pytest.raises(ValueError, match="through must be 'paths'"):
        graph.attention((1, 2), through="writers")


def test_answers_that_differ_in_one_token_are_a_difference_of_logits():
    model = model_of("plain")
    dictionaries = transcoders("layer", "ln2.normalized")
    graph = attribution_graph(
        model, TEXT, dictionaries, targets=(torch.tensor([2, 6]), torch.tensor([2, 5]))
    )
    pair = attribution_graph(model, torch.tensor([START]), dictionaries, targets=[(6, 5)])
    torch.testing.assert_close(graph.rows, pair.rows)
    assert graph.metric == pytest.approx(float(pair.totals[0]))
    same = attribution_graph(model, torch.tensor([START]), dictionaries, targets=(6, 5))
    torch.testing.assert_close(same.rows, pair.rows)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ((1, 2, 3), r"a tuple \(right, wrong\) or a list of targets; got \(1, 2, 3\)"),
        ((" KV8", " KV"), "no answer of targets may begin with the other"),
        ((" KV8", " KV8"), "no answer of targets may begin with the other"),
    ],
)
def test_two_answers_must_differ(targets, message):
    with pytest.raises(ValueError, match=message):
        attribution_graph(pydoc(), "part KV8 and part", {}, targets=targets)


def test_answers_follow_one_text_of_a_causal_model():
    answers = (torch.tensor(RIGHT), torch.tensor(WRONG))
    with pytest.raises(ValueError, match="reads texts in both directions"):
        attribution_graph(model_of("both ways"), TEXT, {}, targets=answers)
    one_differs = (torch.tensor([2, 6]), torch.tensor([2, 5]))
    with pytest.raises(ValueError, match="reads texts in both directions"):
        attribution_graph(model_of("both ways"), TEXT, {}, targets=one_differs)
    with pytest.raises(ValueError, match="a single text without padding"):
        attribution_graph(model_of("rms"), TEXT.expand(2, -1), {}, targets=answers)
    with pytest.raises(ValueError, match="pos must be left out"):
        attribution_graph(model_of("rms"), TEXT, {}, targets=answers, pos=2)


def test_gradients_of_a_joined_pattern_are_the_adjoint_of_joining():
    torch.manual_seed(0)
    branches = Branches(n_shared=3, lengths=(2, 1))
    rows = torch.randn(2, 7, 5, 5).double().tril()
    gradient = torch.randn(4, 7, 6, 6).double()
    inner = torch.einsum("thij,hij->t", gradient, branches.joined_pattern(rows))
    divided = branches.divided_pattern(gradient, 5)
    torch.testing.assert_close(torch.einsum("trhij,rhij->t", divided, rows), inner)
