"""Attention and MLP of a view of an attached model: the model's own modules between linear maps of ours."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import mapped, tensors_in
from hooks.shared import Session
from models.attached.layout import BlockLayout
from models.attached.probe import Call
from models.attached.sums import agree
from models.attached.view_parts import (
    ViewContext,
    columns_of,
    instead,
    is_projection,
    linear_of,
    missing,
    outermost,
    stream_among,
    weights_of,
)


class ViewAttention(nn.Module):
    """Attention of the view: the model's own module between linear maps of ours.

    Args:
        layer: the index of the block.
        layout: the block's modules.
        points: the attached model's points of this attention, which fire as the module runs.
        read: what attention read in the recorded run, [batch, pos, d_model].
        calls: what each module read and gave.
        context: of that run.

    Attributes:
        qkv: the projections, joined: query heads, key heads, value heads.
        output: the output map, with the factor of what is added.
    """

    module: Any
    projections: list[nn.Module]
    map: nn.Module

    def __init__(
        self,
        layer: int,
        layout: BlockLayout,
        points: Any,
        read: Tensor,
        calls: dict[nn.Module, Call],
        context: ViewContext,
    ) -> None:
        super().__init__()
        self.layer, module = layer, layout.attention
        assert module is not None
        for name, point in points.named_children():
            setattr(self, name, point)
        inside = [calls[part] for part in module.modules() if part in calls and part is not module]
        projections = outermost([c for c in inside if is_projection(c, read)])
        if not projections:
            raise missing(layer, "projections that read what attention reads")
        # Not a submodule: its parameters are not the view's.
        vars(self).update(module=module, projections=[c.module for c in projections])
        leaves = [c.output.to(read).requires_grad_() for c in projections if c.output is not None]
        values = self._values(leaves, read, context)
        q, k, v, z = (values[name] for name in "qkvz")
        self.heads = [part.shape[2] for part in (q, k, v)]
        maps = [c for c in inside if c.inputs and agree(c.inputs[0], z.detach().flatten(2))]
        if len({part.shape[3] for part in (q, k, v, z)}) > 1 or not maps:
            raise missing(layer, "heads of one size and a map that reads z")
        vars(self)["map"] = maps[-1].module
        columns = columns_of((q, k, v), leaves)
        if columns is None:
            raise missing(layer, "projections each of whose columns belongs to one head")
        self.places = columns.argsort().split([leaf.shape[-1] for leaf in leaves])
        parts = [weights_of(c.module, read.shape[-1], q) for c in projections]
        weight, bias = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        self.qkv = linear_of(weight[:, columns], bias[columns])
        factor = layout.attn_out.factor if layout.attn_out else 1.0
        weight, bias = weights_of(self.map, z.shape[2] * z.shape[3], q)
        self.output = linear_of(weight * factor, bias * factor)

    def _values(
        self, leaves: Sequence[Tensor], x: Tensor, context: ViewContext
    ) -> dict[str, Float[Tensor, "batch pos _head d_head"]]:
        """Queries, keys, values and z of outputs of the projections, with their graph."""
        values: dict[str, Tensor] = {}
        with torch.enable_grad(), Session() as session:
            for module, leaf in zip(self.projections, leaves, strict=True):
                session.after(module, partial(instead, leaf))
            for name in "qkvz":
                session.after(getattr(self, name), partial(values.__setitem__, name))
            self._run(x, context)
        return values

    def _run(self, x: Tensor, context: ViewContext) -> None:
        args, kwargs = context.calls[self.layer]
        stream = stream_among((args, kwargs), x.shape[-1])
        args, kwargs = mapped((args, kwargs), lambda leaf: x if leaf is stream else leaf)
        self.module(*args, **kwargs)

    def project(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, pos, head, d_head] of the normalized stream: linear in `x`."""
        return self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)

    def mix(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos kv_head d_head"],
        v: Float[Tensor, "batch pos kv_head d_head"],
        context: ViewContext,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return what attention adds to the residual stream, from the results of `project`."""
        joined = torch.cat([q, k, v], 2).flatten(2)
        read: list[Tensor] = []
        with Session() as session:
            for module, place in zip(self.projections, self.places, strict=True):
                session.after(module, partial(instead, joined[..., place]))
            session.before(
                self.map, lambda args, kwargs: read.append(next(tensors_in((args, kwargs))))
            )
            self._run(joined.new_zeros(*q.shape[:2], self.qkv.in_features), context)
        return self.output(read[0])

    def forward(self, x: Float[Tensor, "batch pos d_model"], context: ViewContext) -> Tensor:
        """Return what attention adds to the residual stream."""
        q, k, v = self.project(x)
        return self.mix(q, k, v, context)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projections."""
        return self.output.weight.T.unflatten(0, (self.heads[0], -1))

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return self.output.bias


def _part(kind: str, index: int) -> Any:
    def read(self: ViewAttention) -> Tensor:
        held = getattr(self.qkv, kind).unflatten(0, (sum(self.heads), -1)).split(self.heads)[index]
        return held.mT if kind == "weight" else held

    return property(read)


for _index, _letter in enumerate("QKV"):
    setattr(ViewAttention, f"W_{_letter}", _part("weight", _index))
    setattr(ViewAttention, f"b_{_letter}", _part("bias", _index))


class ViewMLP(nn.Module):
    """The model's own modules, one after the other, and the factor of what they add."""

    parts: Sequence[nn.Module]
    factor: float

    def __init__(self, modules: Sequence[nn.Module], factor: float) -> None:
        super().__init__()
        vars(self).update(parts=modules, factor=factor)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return what the MLP gives."""
        shape = x.shape
        for module in self.parts:
            x = next(tensors_in(module(x)))
        x = x.view(shape)  # experts may see rows and positions as one axis
        return x if self.factor == 1 else x * self.factor
