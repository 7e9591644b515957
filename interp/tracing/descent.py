"""Directions of targets, carried down a frozen run from layer to layer, and what each source adds to them.

1. Start with the direction that a target reads, at its position.
2. Go down the layers. At `mlp_out` read off what each feature and the error add. A skip connection passes the direction on
   to what the MLP reads; attention passes it on along its pattern.
3. If attention may move, a change of the pattern is worth what the moved values are worth along the direction. It goes back
   to scores, and from there to queries and keys, and the direction at the stream that these read is added.
4. At the bottom read off what embeddings add.

Without 3 rows are exact about the frozen run. With it they are its first-order change, where a query's part and a key's part
of a score each count whole: rows then add up to the target and, on both sides, to `gradient · score` (`moved`).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import without_gradients

TARGETS_AT_ONCE = 256
"""More are no faster."""

_BYTES = 2**28
"""Of what moves patterns at one time."""


class Targets(NamedTuple):
    """Values of the run that are to be explained.

    Attributes:
        stage: how many sublayers, two for each block, are below the stream that each reads: `2 * n` for attention of block n,
            `2 * n + 1` for its MLP (`2 * n` in parallel blocks), all of them for logits.
        pos: its position.
        direction: the direction of the stream there.
        bias: what its own bias and that of its norm add.
        total: its value.
    """

    stage: Int[Tensor, " target"]
    pos: Int[Tensor, " target"]
    direction: Float[Tensor, "target d_model"]
    bias: Float[Tensor, " target"]
    total: Float[Tensor, " target"]


class Descent:
    """What each source adds to each target.

    Args:
        run: the frozen run.
        targets: the targets.
        strengths: what each head's paths are multiplied by, for each target. Biases stay as they are.
        attention: whether patterns move.
        keep: whether to keep `cells`, of one target.
        row: the row of each target, where several are added up; None if each has one.

    Attributes:
        rows: what each source adds.
        cells: by layer, the gradient of each score times how far the score is above the pattern's mean of its row.
        moved: `gradient · score`, summed over scores, queries and keys; 0 where patterns do not move.
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
        self._run, self._moves, self._keep, self.cells = run, attention, keep, {}
        stage, pos, direction, bias, _ = targets
        row = torch.arange(len(stage), device=stage.device) if row is None else row
        # The targets that are read last come first.
        last = stage.new_zeros(int(row.max()) + 1).scatter(0, row, stage)
        order = last.argsort(descending=True, stable=True)
        back = order.argsort()
        row, last = back[row], last[order]
        self._strengths = None if strengths is None else strengths[order]
        # Where attention looks back alone, all is 0 behind the last target.
        self._stop = int(pos.max()) + 1 if run.is_causal else len(run.tokens)
        g = direction.new_zeros(self._stop, len(last), direction.shape[-1])
        self.rows, self.moved = g.new_zeros(len(last), run.n_sources), g.new_zeros(len(last))
        self.rows[:, -1].index_add_(0, row, bias)
        n_stages = 2 * len(run.graph.layers)
        for now in range(n_stages, -1, -1):
            # Those that began above pass the sublayer between.
            if now < n_stages:
                self._go_down(now, g[:, : int((last > now).sum())])
            at = (stage == now).nonzero()[:, 0]
            g[pos[at], row[at]] = direction[at]
        column = len(run.layer) + len(run.tokens) * len(run.errors)
        for n, part in enumerate(run.inputs[:, : self._stop]):
            added = torch.einsum("ptd,pd->tp", g, part)
            if n in run.embeddings:
                self.rows[:, column : column + self._stop] = added
                column += len(run.tokens)
            else:
                self.rows[:, -1] += added.sum(1)
        self.rows, self.moved = self.rows[back], self.moved[back]

    def _go_down(self, stage: int, g: Float[Tensor, "pos target d_model"]) -> None:
        """Carry directions in the stream above a stage to it."""
        n, is_mlp = divmod(stage, 2)
        if not self._run.graph.layers[n].is_parallel:
            g.copy_(self._mlp(n, g) if is_mlp else g + self._attention(n, g))
        elif not is_mlp:
            g.copy_(self._mlp(n, g) + self._attention(n, g))

    def _mlp(
        self, n: int, g: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"]:
        """Read off what is added at `mlp_out`, and return the direction in the stream that the MLP reads."""
        run, rows = self._run, self.rows[: g.shape[1]]
        if n not in run.errors:
            return g
        first = len(run.layer) + len(run.tokens) * [*run.errors].index(n)
        rows[:, first : first + len(g)] = torch.einsum("ptd,pd->tp", g, run.errors[n][: len(g)])
        rows[:, -1] += torch.einsum("ptd,pd->t", g, run.constants[n][: len(g)])
        for layer, (_, decoders) in run.transcoders.items():
            if not 0 <= n - layer < len(decoders):
                continue
            W_dec = decoders[n - layer]
            begin = int((run.layer < layer).sum())
            counts = run.pos[run.layer == layer].bincount(minlength=len(run.tokens)).tolist()
            for direction, count in zip(g, counts, strict=False):
                columns = slice(begin, begin + count)
                written = run.like(W_dec[run.feature[columns]])
                rows[:, columns] += direction @ written.mT * run.activation[columns]
                begin += count
        skip = run.transcoders[n].dictionary.W_skip if n in run.transcoders else None
        if skip is None:
            return g
        reading = run.readings[n]
        through = reading.linear.before(g @ run.like(skip).mT)
        return g + through / reading.scale[: len(g), None]

    def _attention(
        self, n: int, g: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"]:
        """What attention passes on of a direction. What its constants add goes to the bias."""
        run, (stop, n_targets, _) = self._run, g.shape
        rows, layer = self.rows[:n_targets], run.graph.layers[n]
        attention, added = layer.attention.sublayer, layer.added
        rows[:, -1] += g.sum(0) @ run.like(added.constant)
        along = g if layer.scale is None else g / run.at(layer.scale)[:stop, None]
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
        # What every value has whatever the norm reads: its bias, and that of the norm through W_V.
        constant = b_V + torch.einsum("d,hde->he", run.like(reading.linear.bias), W_V)
        rows[:, -1] += torch.einsum("hpte,he->t", at_v, constant)
        at_norm = at_v.permute(1, 2, 0, 3).flatten(2) @ W_V.mT.flatten(0, 1)
        if self._moves:
            at_norm += self._moved(n, at_z, reading.linear.bias)
        return reading.linear.before(at_norm) / reading.scale[:stop, None]

    def _moved(
        self, n: int, at_z: Float[Tensor, "pos target head d_head"], bias: Tensor
    ) -> Float[Tensor, "pos target d_model"]:
        """The direction in what queries and keys read, by what moved patterns would add."""
        run, stop = self._run, self._stop
        scores = run.scores_of(n)
        n_pos, heads = len(run.tokens), at_z.shape[2]
        v = run.like(scores.v)[0].repeat_interleave(heads // scores.v.shape[2], 1)
        made, bias = at_z.new_zeros(stop, at_z.shape[1], run.inputs.shape[-1]), run.like(bias)
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
                direction, constants = (run.like(x) for x in side.pulled_back(gradient))
                direction = direction[:, 0]
                made[:, part] += direction[:, :stop].transpose(0, 1)
                self.rows[part, -1] += constants + direction.sum(1) @ bias
                self.moved[part] += run.like(at_scores * scores.scores).sum((1, 2, 3, 4))
        return made
