"""The correction of attribution patching at queries and keys: compute the softmax again.

The algorithm (Kramár et al. 2024, "AtP*: An efficient and scalable method for localizing LLM
behaviour to components"), for one layer:

1. In the base run, store the arguments of attention (`RecordedAttention`), and take the gradient g
   of the metric at the pattern.
2. Run this attention alone with other queries or keys, and read its new pattern or scores.
3. For queries (`OtherQueries`): each query has a separate row of the pattern. The effect of a query
   is the change of its row times g.
4. For keys (`OtherKeys`): each key changes alone, so its new score changes its weight from p to r,
   and the weights of the other keys by one factor. The softmax is solved for all keys at once,
   without a separate run for each key.
5. Sum the effects over the queries, over the query heads that share a key head, and at each place
   (`corrected`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookedRunner, HookPoints, Options
from hooks.base import (
    Piece,
    at_least_float32,
    block_rounding,
    mapped,
    unknown_name,
    without_gradients,
)
from hooks.shared import Recorder, Session, edits_in_force, plain_argument, replay
from interp.runs.estimates import by_place, replacements, summed
from interp.runs.sites import Sites

Patterns = Float[Tensor, "batch head query key"]
_PARTS = ("q", "k", "scores", "pattern")


def corrected(
    sites: Sites, name: str, attention: "RecordedAttention", piece: Piece
) -> Callable[[Patterns], Float[Tensor, "..."]]:
    """Return a function that estimates the effects of other queries or keys.

    The function takes the gradient at the pattern, and returns effects [*places, example].

    Args:
        sites: the places of queries or keys.
        name: the point of the queries or keys, such as `blocks.3.attn.q`.
        attention: the attention of the point, after the run.
        piece: the texts that the attention reads.
    """
    part = name.rpartition(".")[2]
    kind = OtherQueries if part == "q" else OtherKeys
    base = attention.values()
    changes = [
        kind(attention, base, replacement)
        for replacement in replacements(sites, name, base[part], piece)
    ]
    axes = sites.points[name].axes[:-1]

    def effects(gradient: Patterns) -> Float[Tensor, "..."]:
        by_replacement = [summed(sites, axes, change.effects(gradient)) for change in changes]
        return by_place(sites, by_replacement)

    return effects


class RecordedAttention:
    """The attention of one layer in a run. It can be run again with other queries or keys.

    Args:
        runner: the runner of the model.
        name: the exact name of a point of that attention, such as `blocks.3.attn.q`.

    Attributes:
        pattern: the name of the point of the attention pattern.
        cap: the function that caps the scores before the softmax, or the identity.

    Raises:
        UnknownNameError: if this attention lacks a point for queries, keys, scores or pattern.
    """

    def __init__(self, runner: HookedRunner, name: str) -> None:
        path = name.rpartition(".")[0]
        names = {part: f"{path}.{part}" for part in _PARTS}
        for point_name in names.values():
            if point_name not in runner.points:
                raise unknown_name(point_name, runner.points, "point of the model")
        self._points = {part: runner.points[point_name] for part, point_name in names.items()}
        points = runner.model.get_submodule(path)
        self._module = points.module if isinstance(points, HookPoints) else points
        self.pattern = names["pattern"]
        self.cap: Any = getattr(self._module, "cap", nn.Identity())

    def listen(self, session: Session) -> None:
        """Store the arguments of attention during the next run."""
        session.before(self._module, self._store)

    def _store(self, args: Any, kwargs: Any) -> None:
        """Store the arguments of a call of the attention."""

        def storable(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, Tensor)
            return leaf if is_tensor else plain_argument(self._module, leaf, self.pattern)

        self._args, self._kwargs = mapped((args, kwargs), storable)

    @without_gradients
    def values(self, **changed: Tensor) -> dict[str, Tensor]:
        """Return queries, keys, scores and pattern of the attention, after replacing some of them.

        Args:
            changed: the new values, by the names `q`, `k`, `scores` and `pattern`.
        """
        edits = [
            (self._points[part].module, lambda output, value=value: value.to(output.dtype))
            for part, value in changed.items()
        ]
        recorder = Recorder({point.name: point for point in self._points.values()}, Options())
        replay(self._module, self._args, self._kwargs, [*edits_in_force(), *edits], recorder)
        recorder.finish()
        return {part: recorder.values[point.name] for part, point in self._points.items()}


class OtherQueries:
    """The effects of other queries on the metric through the pattern, with a new softmax.

    Args:
        attention: the attention, after the run.
        base: the values of the attention in that run.
        queries: the queries that replace the queries of that run.
    """

    def __init__(
        self,
        attention: RecordedAttention,
        base: Mapping[str, Tensor],
        queries: Float[Tensor, "batch pos head d_head"],
    ) -> None:
        pattern = attention.values(q=queries)["pattern"]
        self._change = at_least_float32(pattern) - base["pattern"]

    def effects(self, gradient: Patterns) -> Float[Tensor, "batch pos head"]:
        """Return the change of the pattern times its gradient, for each query."""
        by_query = (self._change * gradient).sum(-1)
        return rearrange(by_query, "batch head query -> batch query head")


class OtherKeys:
    """The effects of other keys on the metric through the pattern, one position at a time.

    If the score of one key changes, its weight changes from p to r, and the weights of the other
    keys shrink or grow by one factor. The change of the pattern times the gradient g is then (r -
    p) (g - h), where h is the weighted mean of g over the other keys.

    Args:
        attention: the attention, after the run.
        base: the values of the attention in that run.
        keys: the keys that replace the keys of that run.

    Raises:
        ValueError: if the pattern of the base run is not the softmax of the capped scores, over the
            keys that each query sees.
    """

    def __init__(
        self,
        attention: RecordedAttention,
        base: Mapping[str, Tensor],
        keys: Float[Tensor, "batch pos kv_head d_head"],
    ) -> None:
        self._n_kv_heads = keys.shape[2]
        # Run the softmax with equal scores to find out which keys a query sees: these keys get the
        # same weight, and all other keys get weight 0.
        equal = attention.values(scores=torch.zeros_like(base["scores"]))["pattern"]
        is_visible = (equal > 0) & (base["scores"] > -torch.inf)
        scores = at_least_float32(attention.cap(base["scores"]))
        new_scores = at_least_float32(attention.cap(attention.values(k=keys)["scores"]))
        masked = scores.where(is_visible, -torch.inf)
        self._weights = masked.softmax(-1).where(is_visible, 0)
        self._require_softmax(attention, base["pattern"])
        self._top = masked.argmax(-1, keepdim=True)
        rest = masked.scatter(-1, self._top, -torch.inf)
        new_weights = self._new_weights(masked, rest, new_scores - scores)
        self._change = (new_weights - self._weights).masked_fill(~is_visible, 0)
        # If a query sees only one key, the softmax over the other keys is NaN and must be 0.
        is_alone = is_visible.sum(-1, keepdim=True) < 2
        self._rest = rest.softmax(-1).masked_fill(is_alone, 0)

    def _require_softmax(self, attention: RecordedAttention, pattern: Patterns) -> None:
        """Check that the pattern is the softmax of the scores, up to rounding."""
        if (self._weights - pattern).abs().max() > block_rounding(pattern.dtype):
            raise ValueError(
                "qk_correction of keys needs patterns that are the softmax of the scores after "
                f"`cap`; got a different pattern at {attention.pattern}"
            )

    def _new_weights(self, masked: Patterns, rest: Patterns, change: Patterns) -> Patterns:
        """Return the weight of each key after a change of the score of this key alone.

        Args:
            masked: the scores, with -inf at keys that a query does not see.
            rest: the masked scores, with -inf also at the largest score of each query.
            change: the change of each score.
        """
        total = masked.logsumexp(-1, keepdim=True)
        # If p is almost 1, 1 - p loses its digits. Use the sum of the other weights instead.
        log_others = (-self._weights.clamp(max=0.5)).log1p()
        log_others = log_others.scatter(-1, self._top, rest.logsumexp(-1, keepdim=True) - total)
        return (masked - total + change - log_others).sigmoid()

    def effects(self, gradient: Patterns) -> Float[Tensor, "batch pos kv_head"]:
        """Return the change of the pattern times its gradient for each key, summed over queries."""
        gradient = at_least_float32(gradient)
        # For each key, compute h, the weighted mean gradient of the other keys. For the key with
        # the largest weight, 1 - p may have lost its digits, so `_rest`, the softmax over the other
        # keys, is used instead.
        weighted = self._weights * gradient
        others = weighted.sum(-1, keepdim=True) - weighted
        others = others / (1 - self._weights.clamp(max=0.5))
        others_of_top = (self._rest * gradient).sum(-1, keepdim=True)
        mean_of_others = others.scatter(-1, self._top, others_of_top)
        by_key = (self._change * (gradient - mean_of_others)).sum(2)
        # Query heads that share a key head are neighbours.
        shared = rearrange(
            by_key, "batch (kv_head n) key -> batch key kv_head n", kv_head=self._n_kv_heads
        )
        return shared.sum(-1)
