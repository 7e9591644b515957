"""Targets of an attribution graph: likely tokens, named tokens, differences of logits, and features; and what features promote."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import require_integer, shown
from interp.inputs.token_positions import is_worded
from interp.inputs.wording import token_ids
from interp.tracing.frozen import FrozenRun
from interp.tracing.nodes import Node


def chosen(
    model: nn.Module,
    run: FrozenRun,
    targets: int | str | Sequence[Any],
    desired_prob: float,
    pos: int,
) -> tuple[list[Node], Float[Tensor, "logit vocab"], list[int]]:
    """The nodes of logits, their weights of the vocabulary, and the numbers of features among the active ones.

    For arguments see `attribution_graph`.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if a text is several tokens, there is no such token, a feature is not active, or two are the same.
    """
    if isinstance(targets, str):  # else its characters would be targets
        targets = [targets]
    if isinstance(targets, int):
        require_integer("targets", targets)
        likely = run.logits[pos].softmax(-1).sort(descending=True)
        needed = int((likely.values.cumsum(0) < desired_prob).sum()) + 1
        targets = likely.indices[: min(targets, needed)].tolist()
    logits: list[Node] = []
    features: list[int] = []
    vocab, layer = run.logits.shape[1], len(run.graph.layers)
    directions = run.logits.new_zeros(len(targets), vocab)
    chances = run.logits[pos].softmax(-1)
    for target in targets:
        several = isinstance(target, (tuple, list))
        if isinstance(target, (tuple, list)) and len(target) == 3 and not is_worded(target):
            at = (run.layer == target[0]) & (run.feature == target[1])
            at &= run.pos == target[2] % len(run.tokens)
            if not at.any():
                raise ValueError(
                    f"a feature must be active to be a target, (layer, feature, pos); got {target}"
                )
            features.append(int(at.nonzero()[0]))
            continue
        ids = [index(token) for token in token_ids(model, [*target] if several else [target])]
        known = all(0 <= token < vocab for token in ids)
        if len(ids) not in (1, 2) or len({*ids}) < len(ids) or not known:
            raise ValueError(
                f"a target must be a token of {vocab}, two different ones or (layer, feature, pos); got {shown(target)}"
            )
        directions[len(logits), ids[0]] += 1
        for token in ids[1:]:
            directions[len(logits), token] -= 1
        # Differences have numbers behind those of the vocabulary, as in circuit-tracer.
        number = ids[0] if len(ids) == 1 else vocab + len(logits)
        chance = float(chances[ids[0]]) if len(ids) == 1 else None
        name = f"{layer + 1}_{number}_{pos}"
        logits.append(
            Node(name, "logit", layer, pos, number, " - ".join(run.write(ids)), probability=chance)
        )
    if len({node.id for node in logits}) < len(logits) or len({*features}) < len(features):
        raise ValueError(f"targets must differ from each other; got {targets}")
    return logits, directions[: len(logits)], features


def promoted_tokens(run: FrozenRun, sources: Int[Tensor, " source"], k: int = 3) -> list[list[str]]:
    """The tokens whose logits the decoders of features raise most, all layers that they write to together."""
    if not len(sources):
        return []
    places = zip(run.layer[sources].tolist(), run.feature[sources].tolist(), strict=True)
    decoders = (
        [each[feature] for each in run.transcoders[layer].decoders] for layer, feature in places
    )
    written = torch.stack([run.like(torch.stack(each).sum(0)) for each in decoders])
    logits = run.final.linear.after(written) @ run.like(run.model.W_U)
    return [run.write(row) for row in logits.topk(k).indices.tolist()]
