"""Carry the directions of targets down the layers of a frozen run, to compute effects of sources.

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

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import to_device, without_gradients

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


class _Order:
    """The order in which targets are added, and the order of their rows.

    Targets are sorted by stage (`Targets.stage`). Rows are sorted by the highest stage of their
    targets, in descending order. So for every stage, the rows with a target in a higher stage come
    before all other rows.

    Args:
        targets: the targets.
        row: the row of each target; see `Descent`.

    Attributes:
        stop: the position after the last target.
        targets: the index of each target, in the order of this object.
        pos, row: the position and the sorted row of each target, in this order.
        rows: the index of each row, in the order of this object.
        back: the inverse of `rows`.
    """

    def __init__(self, targets: Targets, row: Int[Tensor, " target"] | None) -> None:
        device = targets.stage.device
        numbers = [targets.stage, targets.pos, *([] if row is None else [row])]
        # This is the only wait for the device.
        stages, positions, *listed = torch.stack(numbers).tolist()
        rows = listed[0] if listed else [*range(len(stages))]
        last = [-1] * (max(rows, default=-1) + 1)
        for number, stage in zip(rows, stages, strict=True):
            last[number] = max(last[number], stage)
        order = sorted(range(len(last)), key=lambda number: -last[number])
        place = [0] * len(order)
        for sorted_row, number in enumerate(order):
            place[number] = sorted_row
        by_stage = sorted(range(len(stages)), key=lambda target: stages[target])
        self._stages = [stages[target] for target in by_stage]
        self._last = [last[number] for number in reversed(order)]
        self.stop = max(positions, default=-1) + 1
        of_targets = [
            by_stage,
            [positions[target] for target in by_stage],
            [place[rows[target]] for target in by_stage],
        ]
        self.targets, self.pos, self.row = to_device(
            torch.tensor(of_targets, dtype=torch.long), device
        )
        self.rows, self.back = to_device(torch.tensor([order, place], dtype=torch.long), device)

    def n_above(self, stage: int) -> int:
        """Return the number of rows with a target above a stage."""
        return len(self._last) - bisect_right(self._last, stage)

    def at(self, stage: int) -> slice:
        """Return the sorted targets of a stage."""
        return slice(bisect_left(self._stages, stage), bisect_right(self._stages, stage))


class Descent:
    """The effect of each source on each target.

    Args:
        run: the frozen run.
        targets: the targets.
        strengths: for each row, the factors by which the paths through each head are multiplied.
            The constants that attention adds after the heads keep the factor 1. Default: 1.
        attention: whether to include effects through changes of patterns (step 3). Default: False.
        keep: whether to store `cells`. This needs a single target and `attention`. Default: False.
        row: the index of the row to which the effects on each target are added. Targets with the
            same index are added up. They must have different positions or stages. Default: one row
            for each target.

    Attributes:
        rows: the effect of each source on each target, or on the targets of each row.
        cells: for each layer, `gradient · (score - mean)` of each attention score. The gradient is
            the derivative of the target with respect to the score. The mean is the mean score of
            the query over all keys, weighted by the pattern.
        moved: the sum of `gradient · score` over all attention scores, times 2. It is 0 if
            `attention` is False.
    """

    rows: Float[Tensor, "row source"]
    moved: Float[Tensor, " row"]
    cells: dict[int, Float[Tensor, "head query key"]]

    @without_gradients
    def __init__(
        self,
        run: Any,
        targets: Targets,
        strengths: Float[Tensor, "row layer head"] | None = None,
        attention: bool = False,
        keep: bool = False,
        row: Int[Tensor, " target"] | None = None,
    ) -> None:
        self._run = run
        self._moves = attention
        self._keep = keep
        self.cells = {}
        order = _Order(targets, row)
        # With causal attention, a target only depends on its own and earlier positions. So all
        # directions are 0 at the positions after the last target.
        self._stop = order.stop if run.is_causal else len(run.tokens)
        self._strengths = None if strengths is None else strengths[order.rows]
        n_rows = len(order.rows)
        directions = targets.direction.new_zeros(self._stop, n_rows, targets.direction.shape[-1])
        self.rows = directions.new_zeros(n_rows, run.n_sources)
        self.moved = directions.new_zeros(n_rows)
        # The effects of the constants, which become the last column of the rows.
        self._constants = directions.new_zeros(n_rows)
        self._constants.index_add_(0, order.row, targets.bias[order.targets])
        sorted_directions = targets.direction[order.targets]
        n_stages = 2 * len(run.graph.layers)
        for now in range(n_stages, -1, -1):
            # Carry the directions of targets above this sublayer through the sublayer, and then add
            # the targets that read the stream below it.
            if now < n_stages:
                self._go_down(now, directions[:, : order.n_above(now)])
            at = order.at(now)
            if at.start < at.stop:
                directions[order.pos[at], order.row[at]] = sorted_directions[at]
        column = len(run.layer) + len(run.tokens) * len(run.errors)
        for n, part in enumerate(run.inputs[:, : self._stop]):
            added = (directions @ part[:, :, None])[..., 0].mT
            if n in run.embeddings:
                self.rows[:, column : column + self._stop] = added
                column += len(run.tokens)
            else:
                self._constants += added.sum(1)
        self.rows[:, -1] = self._constants
        self.rows = self.rows[order.back]
        self.moved = self.moved[order.back]

    def _go_down(self, stage: int, directions: Float[Tensor, "pos target d_model"]) -> None:
        """Carry directions from the stream after a sublayer to the stream before it, in place."""
        if not directions.numel():
            return
        n, is_mlp = divmod(stage, 2)
        through = []
        # In a parallel block, attention and the MLP read the same stream, at the stage of
        # attention.
        if bool(is_mlp) != self._run.graph.layers[n].is_parallel:
            through.append(self._mlp(n, directions))
        if not is_mlp:
            through.append(self._attention(n, directions))
        for part in through:
            if part is not None:
                directions.add_(part)

    def _mlp(
        self, n: int, directions: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"] | None:
        """Store the effects of the features, the error and the constants of an MLP's output.

        Returns:
            The directions in the stream before the MLP, for the paths through the skip connection;
            None without one.
        """
        run = self._run
        stop, n_rows, _ = directions.shape
        if n not in run.errors:
            return None
        rows = self.rows[:n_rows]
        first = len(run.layer) + len(run.tokens) * [*run.errors].index(n)
        rows[:, first : first + stop] = (directions @ run.errors[n][:stop, :, None])[..., 0].mT
        if n in run.constants:
            self._constants[:n_rows].addmv_(directions.sum(0), run.constants[n])
        for layer, (_, decoders) in run.transcoders.items():
            if 0 <= n - layer < len(decoders):
                self._add_features(layer, decoders[n - layer], directions)
        skip = run.transcoders[n].dictionary.W_skip if n in run.transcoders else None
        if skip is None:
            return None
        reading = run.readings[n]
        through = reading.linear.before(directions @ run.like(skip).mT)
        return through / reading.scale[:stop, None]

    def _add_features(
        self,
        layer: int,
        W_dec: Float[Tensor, "feature d_model"],
        directions: Float[Tensor, "pos target d_model"],
    ) -> None:
        """Add the effects of features on the targets, through one decoder, to the rows.

        A feature of a cross-layer transcoder has a decoder for each layer that it writes to, and
        this method is called for each of them. The effect is the activation of the feature times
        the product of its decoder vector and the direction of a target.

        Args:
            layer: the layer whose MLP input the features read.
            W_dec: the decoder.
            directions: for each target, the direction in the output of the MLP that the decoder
                writes to.
        """
        run = self._run
        padded = run.padded_features(layer, self._stop)
        if not padded.groups:
            return
        effects = []
        for positions, features in padded.groups:
            written = run.like(W_dec[features])  # [pos, slot, d_model]
            by_slot = directions[positions] @ written.mT  # [pos, target, slot]
            effects.append(by_slot.transpose(0, 1).flatten(1))
        of_groups = effects[0] if len(effects) == 1 else torch.cat(effects, 1)
        columns = slice(padded.first, padded.first + len(padded.slot))
        of_features = of_groups.index_select(1, padded.slot)
        self.rows[: directions.shape[1], columns].addcmul_(of_features, run.activation[columns])

    def _attention(
        self, n: int, directions: Float[Tensor, "pos target d_model"]
    ) -> Float[Tensor, "pos target d_model"]:
        """Return the directions in the stream before attention, for the paths through attention.

        The effects of the constants of attention are added to the last source.
        """
        run = self._run
        stop, n_targets, _ = directions.shape
        constants = self._constants[:n_targets]
        layer = run.graph.layers[n]
        frozen = run.attention(n)
        scale = layer.heads.scale
        if scale is None:
            along = directions
            constants.addmv_(directions.sum(0), frozen.bias + frozen.constant)
        else:
            along = directions / run.at(scale)[:stop, None]
            constants.addmv_(directions.sum(0), frozen.constant)
            constants.addmv_(along.sum(0), frozen.bias)
        W_O = frozen.after.after(run.like(layer.heads.divided.W_O))
        W_V = run.like(layer.heads.divided.W_V)
        heads, d_head, _ = W_O.shape
        at_z = (along @ W_O.flatten(0, 1).mT).unflatten(-1, (heads, d_head))
        if self._strengths is not None:
            at_z = at_z * self._strengths[:n_targets, n, :, None]
        pattern = run.pattern(n)[:, :stop, :stop]
        flat = at_z.permute(2, 0, 1, 3).reshape(heads, stop, n_targets * d_head)
        at_v = (pattern.mT @ flat).view(len(W_V), heads // len(W_V), stop, n_targets, d_head)
        # Several heads may share the values of one key head.
        summed = at_v.sum(1) if at_v.shape[1] > 1 else at_v[:, 0]
        at_values = summed.permute(1, 2, 0, 3).flatten(2)
        constants.addmv_(at_values.sum(0), frozen.value_constant)
        at_norm = at_values @ W_V.mT.flatten(0, 1)
        if self._moves:
            at_norm += self._moved(n, at_z, frozen.reading.linear.bias)
        return frozen.reading.linear.before(at_norm) / frozen.reading.scale[:stop, None]

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
                self._constants[part] += constants + direction.sum(1) @ bias
                self.moved[part] += run.like(at_scores * scores.scores).sum((1, 2, 3, 4))
        return through_scores
