"""Targets of an attribution graph: likely tokens, chosen tokens, differences of logits, the tokens
of an answer, and features.

`promoted_tokens` returns the tokens that features promote.
"""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import require_integer, require_kind, shown
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.nodes import Node
from interp.inputs.token_positions import is_worded, token_ids
from interp.pairs.wording import has_several_tokens


class LogitTerms(NamedTuple):
    """Weighted sums of logits, each at one position. The value of a node is the sum of its terms.

    Attributes:
        weights: the weight of each token's logit in each term: 1 at the token of a logit, and 1 and
            -1 at the two tokens of a difference.
        pos: the position of each term.
        node: the index of the node of each term. Terms are in the order of their nodes.
    """

    weights: Float[Tensor, "term vocab"]
    pos: Int[Tensor, " term"]
    node: Int[Tensor, " term"]

    def of(self, start: int, stop: int) -> "LogitTerms":
        """Return the terms of some nodes, which are counted from 0 again."""
        is_chosen = (self.node >= start) & (self.node < stop)
        return LogitTerms(
            self.weights[is_chosen], self.pos[is_chosen], self.node[is_chosen] - start
        )


class ChosenTargets(NamedTuple):
    """The targets of an attribution graph.

    Attributes:
        logits: the nodes of logits, differences of logits, and the sum of the logits of an answer.
        terms: the logits of these nodes.
        features: the indices of the chosen features among the active features.
    """

    logits: list[Node]
    terms: LogitTerms
    features: list[int]


def chosen_targets(
    model: nn.Module,
    run: FrozenRun,
    targets: int | str | Sequence[Any],
    desired_prob: float,
    pos: int,
) -> ChosenTargets:
    """Return the targets that a caller of `attribution_graph` chose.

    Args:
        model: the model.
        run: the frozen run.
        targets, desired_prob, pos: see `attribution_graph`.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if a text is several tokens, a token does not exist, a feature is not active, or
            two targets are the same.
    """
    # Wrap a text in a list, because a text is also a sequence of characters.
    if isinstance(targets, str):
        targets = [targets]
    require_kind(
        "targets", targets, kind=(int, Sequence, Tensor), words="a number, or a list of tokens"
    )
    chances = run.logits[pos].softmax(-1)
    if isinstance(targets, int):
        targets = _likely_tokens(chances, targets, desired_prob)
    vocab = run.logits.shape[1]
    layer = len(run.graph.layers)
    logits: list[Node] = []
    features: list[int] = []
    directions = run.logits.new_zeros(len(targets), vocab)
    for target in targets:
        if isinstance(target, (tuple, list)) and len(target) == 3 and not is_worded(target):
            features.append(_active_feature(run, *target))
            continue
        ids = _tokens_of_target(model, target, vocab)
        directions[len(logits), ids[0]] += 1
        for token in ids[1:]:
            directions[len(logits), token] -= 1
        # A difference of logits has no token id. Number it after the last id of the vocabulary, as
        # circuit-tracer does.
        number = ids[0] if len(ids) == 1 else vocab + len(logits)
        chance = float(chances[ids[0]]) if len(ids) == 1 else None
        logits.append(
            Node(
                id=f"{layer + 1}_{number}_{pos}",
                kind="logit",
                layer=layer,
                pos=pos,
                number=number,
                label=" - ".join(run.write(ids)),
                probability=chance,
            )
        )
    if len({node.id for node in logits}) < len(logits) or len({*features}) < len(features):
        raise ValueError(f"targets must differ from each other; got {targets}")
    directions = directions[: len(logits)]
    numbers = torch.arange(len(logits), device=directions.device)
    terms = LogitTerms(directions, torch.full_like(numbers, pos), numbers)
    return ChosenTargets(logits, terms, features)


def targets_of_answer(run: FrozenRun, answer: Sequence[int]) -> ChosenTargets:
    """Return the targets of an answer: the logits of its tokens, and the sum of these logits.

    The logit of a token is read at the position that predicts the token.

    Args:
        run: the frozen run of the prompt and all tokens of the answer except the last.
        answer: the tokens of the answer.
    """
    n_pos, vocab = run.logits.shape
    n = len(answer)
    layer = len(run.graph.layers)
    positions = range(n_pos - n, n_pos)
    logits = []
    for token, pos in zip(answer, positions, strict=True):
        logits.append(
            Node(
                id=f"{layer + 1}_{token}_{pos}",
                kind="logit",
                layer=layer,
                pos=pos,
                number=token,
                label=run.write([token])[0],
                probability=float(run.logits[pos].softmax(-1)[token]),
            )
        )
    # As in a difference of logits, the number follows the ids of the vocabulary.
    number = vocab + n
    label = "".join(run.write([*answer]))
    logits.append(
        Node(
            id=f"{layer + 1}_{number}_{n_pos - 1}",
            kind="logit",
            layer=layer,
            pos=n_pos - 1,
            number=number,
            label=label,
        )
    )
    weights = run.logits.new_zeros(n, vocab)
    device = weights.device
    weights[torch.arange(n), torch.tensor(answer)] = 1
    numbers = torch.arange(n, device=device)
    terms = LogitTerms(
        weights=weights.repeat(2, 1),
        pos=torch.tensor([*positions], device=device).repeat(2),
        node=torch.cat([numbers, torch.full_like(numbers, n)]),
    )
    return ChosenTargets(logits, terms, [])


def _likely_tokens(chances: Float[Tensor, " vocab"], most: int, share: float) -> list[int]:
    """Return the likeliest tokens, starting with the likeliest.

    Args:
        chances: the probability of each token.
        most: the maximum number of tokens.
        share: tokens are returned until the sum of their probabilities reaches this number.

    Raises:
        ValueError: if `most` is below 1.
    """
    require_integer("targets", most)
    likely = chances.sort(descending=True)
    needed = int((likely.values.cumsum(0) < share).sum()) + 1
    tokens: list[int] = likely.indices[: min(most, needed)].tolist()
    return tokens


def _active_feature(run: FrozenRun, layer: int, feature: int, pos: int) -> int:
    """Return the index of a feature among the active features."""
    at = (run.layer == layer) & (run.feature == feature) & (run.pos == pos % len(run.tokens))
    if not at.any():
        raise ValueError(
            f"a target (layer, feature, pos) must be an active feature; got {(layer, feature, pos)}"
        )
    return int(at.nonzero()[0])


def _tokens_of_target(model: nn.Module, target: Any, vocab: int) -> list[int]:
    """Return the token of a target, or the two tokens of a difference.

    Raises:
        ValueError: if a text is several tokens, a token does not exist, or the target is neither a
            token nor two different tokens.
    """
    several = isinstance(target, (tuple, list))
    for text in target if several else [target]:
        if isinstance(text, str) and has_several_tokens(model, text):
            raise ValueError(
                f"a text in a list of targets must be one token; got {text!r}; for the tokens of "
                f"an answer, use targets={text!r} without a list"
            )
    ids = [index(token) for token in token_ids(model, [*target] if several else [target])]
    known = all(0 <= token < vocab for token in ids)
    if len(ids) not in (1, 2) or len({*ids}) < len(ids) or not known:
        raise ValueError(
            f"a target must be a token in [0, {vocab}), two different tokens or (layer, feature, "
            f"pos); got {shown(target)}"
        )
    return ids


def promoted_tokens(run: FrozenRun, sources: Int[Tensor, " source"], k: int = 3) -> list[list[str]]:
    """Return, for each feature, the tokens whose logits the feature raises most by its direct path.

    A feature of a cross-layer transcoder writes to several layers. The sum of its decoder rows for
    all layers is used.

    Args:
        run: the frozen run.
        sources: the indices of the features among the active features.
        k: the number of tokens for each feature. Default: 3.
    """
    if not len(sources):
        return []
    written = []
    for layer, feature in zip(
        run.layer[sources].tolist(), run.feature[sources].tolist(), strict=True
    ):
        rows = [decoder[feature] for decoder in run.transcoders[layer].decoders]
        written.append(run.like(torch.stack(rows).sum(0)))
    logits = run.final.linear.after(torch.stack(written)) @ run.like(run.model.W_U)
    return [run.write(tokens) for tokens in logits.topk(k).indices.tolist()]
