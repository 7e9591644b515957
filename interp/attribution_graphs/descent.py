"""Carry the directions of targets down the layers of a frozen run, and compute the effect of each
source on each target.

1. Start with the direction in the residual stream that a target reads, at the target's position.
2. Go down the layers. At `mlp_out`, the effect of a feature or an error is the product of its
   output and the direction. The skip connection of a transcoder carries the direction to the input
   of the MLP. Attention carries the direction from the query positions to the key positions, with
   the weights of its pattern.
3. If attention may change, compute the gradient of the target with respect to the pattern, then the
   scores, then the queries and keys, and then the stream that queries and keys read. Add this
   gradient to the direction.
4. Below the first layer, compute the effects of the embeddings.

Without step 3, the rows are exact for the frozen run. With step 3, they also contain the effects of
sources through changes of attention patterns, to first order. The query and the key of a score each
get the whole effect `gradient · score` of this score. So a row adds up to the value of the target
plus twice the sum of `gradient · score` over all scores. This second term is `moved`.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import without_gradients

TARGETS_AT_ONCE = 256
"""The number of targets that are carried down at once. A larger number is not faster."""

_BYTES = 2**28
"""A bound of the bytes of the gradients of patterns that are computed at once."""


class Targets(NamedTuple):
    """The values of the run that are explained.

    A target is a linear function of the residual stream at one place: `direction · stream + bias`.

    Attributes:
        stage: the number of sublayers below the stream that the target reads. Each block counts as
            two sublayers. The attention of block n reads at stage `2 * n`, and its MLP at
            `2 * n + 1` (at `2 * n` in parallel blocks). Logits read above all sublayers.
        pos: the position of the stream that the target reads.
        direction: the direction in the stream.
        bias: the constant part: the target's own bias, and the contribution of its norm's bias.
        total: the value of the target.
    """

    stage: Int[Tensor, " target"]
    pos: Int[Tensor, " target"]
    direction: Float[Tensor, "target d_model"]
    bias: Float[Tensor, " target"]
    total: Float[Tensor, " target"]


class Descent:
    """The effect of each source on each target.

    Args:
        run: the frozen run.
        targets: the targets.
        strengths: for each target, the factors by which the paths through each head are multiplied.
            The constants that attention adds after the heads keep the factor 1. Default: 1.
        attention: whether to include effects through changes of patterns (step 3). Default: False.
        keep: whether to store `cells`. This needs a single target and `attention`. Default: False.
        row: the index of the row to which the effects on each target are added. Targets with the
            same index are added up. Default: one row for each target.

    Attributes:
        rows: the effect of each source on each target.
        cells: for each layer, `gradient · (score - mean)` of each attention score. The gradient is
            the derivative of the target with respect to the score. The mean is the mean score of
            the query over all keys, weighted by the pattern.
        moved: twice the sum of `gradient · score` over all attention scores, or 0 without
            `attention`.
    """

    rows: Float[Tensor, "target source"]
    moved: Float[Tensor, " target"]
    cells: dict[int, Float[Tensor, "head query key"]]

    @without_gradients
    def __init__(
        self,
        run: Any,
        targets: Targets,
        strengths: Float[Tensor, "target layer head"] | None = None,
        attention: bool = False,
        keep: bool = False,
        row: Int[Tensor, " target"] | None = None,
    ) -> None:
        self._run = run
        self._moves = attention
        self._keep = keep
        self.cells = {}
        stage, pos, direction, bias, _ = targets
        row = torch.arange(len(stage), device=stage.device) if row is None else row
        # Sort rows by the highest stage of their targets, in descending order. Then the rows with a
        # target above some stage are the first rows.
        last = stage.new_zeros(int(row.max()) + 1).scatter(0, row, stage)
        order = last.argsort(descending=True, stable=True)
        back = order.argsort()
        row, last = back[row], last[order]
        self._strengths = None if strengths is None else strengths[order]
        # With causal attention, a target only depends on its own and earlier positions. So all
        # directions are 0 at the positions after the last target.
        self._stop = int(pos.max()) + 1 if run.is_causal else len(run.tokens)
        directions = direction.new_zeros(self._stop, len(last), direction.shape[-1])
        self.rows = directions.new_zeros(len(last), run.n_sources)
        self.moved = directions.new_zeros(len(last))
        self.rows[:, -1].index_add_(0, row, bias)
        n_stages = 2 * len(run.graph.layers)
        for now in range(n_stages, -1, -1):
            # Carry the directions of targets above this sublayer through the sublayer, and then add
            # the targets that read the stream below it.
            if now < n_stages:
                self._go_down(now, directions[:, : int((last > now).sum())])
            at = (stage == now).nonzero()[:, 0]
            directions[pos[at], row[at]] = direction[at]
        column = len(run.layer) + len(run.tokens) * len(run.errors)
        for n, part in enumerate(run.inputs[:, : self._stop]):
            added = torch.einsum("ptd,pd->tp", directions, part)
            if n in run.embeddings:
                self.rows[:, column : column + self._stop] = added
                column += len(run.tokens)
            else:
                self.rows[:, -1] += added.sum(1)
        self.rows = self.rows[back]
        self.moved = self.moved[back]

    def _go_down(self, stage: int, directions: Float[Tensor, "pos target d_model"]) -> None:
        """Carry directions in the stream above a sublayer to the stream below it, in place."""
        n, is_mlp = divmod(stage, 2)
        if not self._run.graph.layers[n].is_parallel:
            directions.copy_(
                self._mlp(n, directions) if is_mlp else directions + self._attention(n, directions)
            )
        elif not is_mlp:
            directions.copy_(self._mlp(n, directions) + self._attention(n, directions))

    def _mlp(
        self, n: int, directions: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"]:
        """Store the effects of the features, the error and the constants of an MLP's output, and
        return the directions in the stream before the MLP.
        """
        run = self._run
        rows = self.rows[: directions.shape[1]]
        if n not in run.errors:
            return directions
        first = len(run.layer) + len(run.tokens) * [*run.errors].index(n)
        rows[:, first : first + len(directions)] = torch.einsum(
            "ptd,pd->tp", directions, run.errors[n][: len(directions)]
        )
        rows[:, -1] += torch.einsum("ptd,pd->t", directions, run.constants[n][: len(directions)])
        for layer, (_, decoders) in run.transcoders.items():
            if not 0 <= n - layer < len(decoders):
                continue
            W_dec = decoders[n - layer]
            begin = int((run.layer < layer).sum())
            counts = run.pos[run.layer == layer].bincount(minlength=len(run.tokens)).tolist()
            for direction, count in zip(directions, counts, strict=False):
                columns = slice(begin, begin + count)
                written = run.like(W_dec[run.feature[columns]])
                rows[:, columns] += direction @ written.mT * run.activation[columns]
                begin += count
        skip = run.transcoders[n].dictionary.W_skip if n in run.transcoders else None
        if skip is None:
            return directions
        reading = run.readings[n]
        through = reading.linear.before(directions @ run.like(skip).mT)
        return directions + through / reading.scale[: len(directions), None]

    def _attention(
        self, n: int, directions: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"]:
        """Return the directions in the stream before attention, for the paths through attention.

        The effects of the constants of attention are added to the last source.
        """
        run = self._run
        stop, n_targets, _ = directions.shape
        rows = self.rows[:n_targets]
        layer = run.graph.layers[n]
        attention = layer.attention.sublayer
        added, scale = layer.heads.added, layer.heads.scale
        assert added is not None
        rows[:, -1] += directions.sum(0) @ run.like(added.constant)
        along = directions if scale is None else directions / run.at(scale)[:stop, None]
        rows[:, -1] += along.sum(0) @ run.like(added.bias)
        W_O, W_V, b_V = (run.like(part) for part in (added.weight, attention.W_V, attention.b_V))
        heads, d_head, _ = W_O.shape
        at_z = (along @ W_O.flatten(0, 1).mT).unflatten(-1, (heads, d_head))
        if self._strengths is not None:
            at_z = at_z * self._strengths[:n_targets, n, :, None]
        pattern = run.at(attention.pattern)[:, :stop, :stop]
        flat = at_z.permute(2, 0, 1, 3).reshape(heads, stop, n_targets * d_head)
        at_v = (pattern.mT @ flat).view(len(W_V), heads // len(W_V), stop, n_targets, d_head).sum(1)
        reading = run.reading(layer.attention.norm, layer.attention.reads)
        # The constant part of the value vectors: their bias, and the bias of the norm times W_V.
        constant = b_V + torch.einsum("d,hde->he", run.like(reading.linear.bias), W_V)
        rows[:, -1] += torch.einsum("hpte,he->t", at_v, constant)
        at_norm = at_v.permute(1, 2, 0, 3).flatten(2) @ W_V.mT.flatten(0, 1)
        if self._moves:
            at_norm += self._moved(n, at_z, reading.linear.bias)
        return reading.linear.before(at_norm) / reading.scale[:stop, None]

    def _moved(
        self, n: int, at_z: Float[Tensor, "pos target head d_head"], bias: Tensor
    ) -> Float[Tensor, "pos target d_model"]:
        """Return the gradients of the targets at the output of the norm, through the queries and
        keys (step 3).

        Args:
            n: the layer.
            at_z: the gradients at the outputs of the heads.
            bias: the bias of the norm.
        """
        run = self._run
        stop = self._stop
        scores = run.scores_of(n)
        n_pos = len(run.tokens)
        heads = at_z.shape[2]
        v = run.like(scores.v)[0].repeat_interleave(heads // scores.v.shape[2], 1)
        through_scores = at_z.new_zeros(stop, at_z.shape[1], run.inputs.shape[-1])
        bias = run.like(bias)
        at_once = max(1, _BYTES // (4 * heads * n_pos**2 * v.element_size()))
        for first in range(0, at_z.shape[1], at_once):
            part = slice(first, min(first + at_once, at_z.shape[1]))
            worth = at_z.new_zeros(at_z[:, part].shape[1], 1, heads, n_pos, n_pos)
            worth[:, 0, :, :stop] = torch.einsum("ithe,jhe->thij", at_z[:, part], v)
            at_scores, *at_sides = scores.moved_by(worth)
            if self._keep:
                mean = (scores.pattern * scores.scores).sum(-1, keepdim=True)
                self.cells[n] = (at_scores * (scores.scores - mean))[0, 0]
            for side, gradient in zip((scores.q, scores.k), at_sides, strict=True):
                direction, constants = (run.like(vectors) for vectors in side.pulled_back(gradient))
                direction = direction[:, 0]
                through_scores[:, part] += direction[:, :stop].transpose(0, 1)
                self.rows[part, -1] += constants + direction.sum(1) @ bias
                self.moved[part] += run.like(at_scores * scores.scores).sum((1, 2, 3, 4))
        return through_scores
