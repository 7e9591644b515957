"""Attention scores as products of two linear readings of the stream, and changes of the pattern.

If the scales of norms are fixed, queries and keys are linear in the input of attention:
`q = map(input W_Q + b_Q) + rest` at each position. The matrix `map` contains the norm of queries
and their rotation; `rest` comes from the bias of this norm. This file runs the code of the block
and takes derivatives with autograd, so it needs no code for kinds of rotations, norms, masks, caps
or sinks:

1. Run attention on the projections x = input W_Q + b_Q (and the same for keys). Cache the queries
   f(x), the keys, the scores and the pattern.
2. Find `map`. With a linear map L and the scale s of a norm, f(x) = L x / s(x), so `map` is L / s.
   Autograd gives the derivative J = L / s - f ∇sᵀ / s, whose second term must be removed: ∇s is
   along x (minus the mean of x if the norm subtracts the mean), and f - J x is f (∇s · x) / s. So
   `map` is `J + (f - J x) xᵀ / (x · x)`. Without a norm, f = J x, and `map` is J.
3. `rest` is f at x = 0.
4. Autograd propagates a change of the pattern back to scores, queries and keys (`moved_by`).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from hooks.base import all_to_device, at_least_float32, sum_rounding, without_gradients
from hooks.shared import Session, hooks_disabled
from interp.graph.nodes import Layer
from interp.numbers.precision import like

HeadValues = Float[Tensor, "batch pos head d_head"]


class HeadReadings(NamedTuple):
    """The queries or the keys of a block, as linear readings of the input of attention.

    Attributes:
        value: the queries or keys in the dot product.
        weight: `W_Q` or `W_K`.
        map: the linear map from projections to these values.
        bias: the part from the bias of the projections.
        rest: the part from the bias of their norm.
    """

    value: HeadValues
    weight: Float[Tensor, "head d_model d_head"]
    map: Float[Tensor, "batch pos head d_head d_head"]
    bias: HeadValues
    rest: HeadValues

    @property
    def constant(self) -> HeadValues:
        """The part that does not depend on the input of attention."""
        return self.bias + self.rest

    def directions(self, head: int) -> Float[Tensor, "batch pos d_head d_model"]:
        """Return the directions of the stream that the values of a head read."""
        return torch.einsum("bpei,di->bped", self.map[:, :, head], self.weight[head])

    def pulled_back(
        self, gradient: Float[Tensor, "target batch pos head d_head"]
    ) -> tuple[Float[Tensor, "target batch pos d_model"], Float[Tensor, " target"]]:
        """Map gradients at the queries or keys back to gradients at the input of attention.

        The second result is the product of the gradients with the constant parts of the queries or
        keys.
        """
        constants = torch.einsum("tbphe,bphe->t", gradient, self.constant)
        gradient = torch.einsum("tbphe,bphei->tbphi", gradient, self.map)
        return torch.einsum("tbphi,hdi->tbpd", gradient, self.weight), constants


class BlockScores:
    """The queries, keys, values, scores and pattern of a block in a run.

    Args:
        layer: the block.
        stream: the stream that enters the norm before attention.
        context: the other inputs of the block, such as the mask; see `interp.protocol`.

    Attributes:
        q, k: the queries and keys.
        v: the values.
        scores: the scores before a cap and the mask.
        pattern: the attention pattern.
    """

    @without_gradients
    def __init__(
        self, layer: Layer, stream: Float[Tensor, "batch pos d_model"], context: Any
    ) -> None:
        attention = layer.attention
        stream, context = all_to_device((stream, context), layer.device)
        self._attn = layer.heads.divided
        self._context = context
        x_q, x_k, self._x_v = self._attn.project(attention.norm(stream))
        values = self._run(x_q, x_k)
        self._values = values
        self.v, self.scores, self.pattern = (
            at_least_float32(values[name].detach()) for name in ("v", "scores", "pattern")
        )
        values_of_zero = self._run(torch.zeros_like(x_q), torch.zeros_like(x_k))
        self.q = _readings(
            x=values["x_q"],
            f=values["q"],
            rest=values_of_zero["q"].detach(),
            weight=self._attn.W_Q,
            bias=self._attn.b_Q,
        )
        self.k = _readings(
            x=values["x_k"],
            f=values["k"],
            rest=values_of_zero["k"].detach(),
            weight=self._attn.W_K,
            bias=self._attn.b_K,
        )

    def _run(
        self, x_q: HeadValues, x_k: Float[Tensor, "batch pos kv_head d_head"]
    ) -> dict[str, Tensor]:
        """Return the values of a run with two autograd graphs.

        One graph leads from queries and keys to scores, the other graph from scores to the pattern.
        """
        values: dict[str, Tensor] = {}

        def record(name: str, value: Tensor) -> Tensor:
            # Return the recorded tensor itself, so that it is part of the autograd graph.
            values[name] = value.clone()
            return values[name]

        def cut(scores: Tensor) -> Tensor:
            values["scores"] = scores
            values["cut"] = scores.detach().requires_grad_()
            # Return a copy, because some models change the scores in place.
            return values["cut"].clone()

        def run() -> None:
            with torch.enable_grad(), Session() as session:
                values["x_q"] = x_q.detach().requires_grad_()
                values["x_k"] = x_k.detach().requires_grad_()
                for name in ("q", "k", "v", "pattern"):
                    session.after(getattr(self._attn, name), partial(record, name))
                session.after(self._attn.scores, cut)
                self._attn.mix(values["x_q"], values["x_k"], self._x_v, self._context)

        hooks_disabled(run)
        return values

    def part(self, side: Literal["q", "k", "against"], head: int) -> tuple[HeadReadings, int]:
        """Return the queries or keys that a head uses, and the index of the query or key head.

        Several heads may share a key head.

        Args:
            side: `q` for the queries; `k` or `against` for the keys.
            head: the index of the query head.
        """
        if side == "q":
            return self.q, head
        n_sharing = self.q.value.shape[2] // self.k.value.shape[2]
        return self.k, head // n_sharing

    @property
    def scale(self) -> float:
        """The factor of `q · k` in scores, by least squares. It is 1 if all products are 0."""
        n_sharing = self.q.value.shape[2] // self.k.value.shape[2]
        keys = self.k.value.repeat_interleave(n_sharing, 2)
        products = torch.einsum("bihe,bjhe->bhij", self.q.value.double(), keys.double())
        squares = products.square().sum()
        return float((products * self.scores).sum() / squares) if squares else 1.0

    @without_gradients
    def moved_by(
        self, change: Float[Tensor, "target batch head query key"]
    ) -> tuple[
        Float[Tensor, "target batch head query key"],
        Float[Tensor, "target batch pos head d_head"],
        Float[Tensor, "target batch pos kv_head d_head"],
    ]:
        """Propagate gradients at the pattern back to the scores, the queries and the keys.

        Args:
            change: the gradients at the pattern, with an additional first axis.

        Returns:
            The gradients at the scores, the queries and the keys.
        """
        values = self._values
        pattern = values["pattern"]
        gradients = partial(torch.autograd.grad, retain_graph=True, is_grads_batched=True)
        (at_scores,) = gradients(pattern, values["cut"], like(change, pattern))
        at_q, at_k = gradients(values["scores"], (values["q"], values["k"]), at_scores)
        return at_scores, at_least_float32(at_q), at_least_float32(at_k)


def _readings(
    x: HeadValues, f: HeadValues, rest: HeadValues, weight: Tensor, bias: Tensor
) -> HeadReadings:
    """Return values f of projections x as linear readings.

    Args:
        x, f: the projections and the values, connected by an autograd graph.
        rest: f at x = 0.
        weight, bias: the weight and the bias of the projections.
    """
    # Autograd returns the derivative of the sum over all heads and positions. With a norm of each
    # head, every entry depends only on its own head. A norm of all heads together adds terms along
    # x, which are removed below.
    ones = torch.eye(f.shape[-1]).to(f)[:, None, None, None].expand(-1, *f.shape)
    (jacobian,) = torch.autograd.grad(f, x, ones, retain_graph=True, is_grads_batched=True)
    jacobian = rearrange(jacobian, "out batch pos head d_head -> batch pos head out d_head")
    jacobian = at_least_float32(jacobian)
    x = at_least_float32(x.detach())
    f = at_least_float32(f.detach())
    rest = at_least_float32(rest.nan_to_num())
    rounding = sum_rounding(jacobian.dtype) * jacobian.abs().sum(-1).max()
    subtracts_mean = jacobian.sum(-1).abs().max() <= rounding
    along = x - x.mean(-1, keepdim=True) if subtracts_mean else x
    not_linear = f - rest - torch.einsum("bphei,bphi->bphe", jacobian, x)
    along = along / (along * x).sum(-1, keepdim=True).clamp(min=1e-30)
    map = jacobian + not_linear[..., None] * along[..., None, :]
    constant = torch.einsum("bphei,hi->bphe", map, like(bias, x))
    return HeadReadings(value=f, weight=like(weight, x), map=map, bias=constant, rest=rest)
