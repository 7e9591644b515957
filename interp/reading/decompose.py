"""Decomposition: the residual stream as the sum of the outputs of a model's parts."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    at_least_float32,
    is_integer,
    require_integer,
    require_kind,
    to_device,
    unknown_name,
    without_gradients,
)
from interp import plots
from interp.graph.sublayers import kind_of
from interp.json_form import Table, form
from interp.numbers.precision import like
from interp.reading.components import ResidualComponents
from interp.results.result import Result


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(plots.Shown):
    """A residual stream as a sum of parts, in at least float32.

    Attributes:
        names: the names of the parts, in the order of computation.
        values: the output of each part.

    >>> import torch
    >>> parts = Decomposition(("embed", "a0.h0"), torch.tensor([[[[1.0, 3.0]]], [[[2.0, 0.0]]]]))
    >>> parts["a0.h0"]
    tensor([[[2., 0.]]])
    """

    names: tuple[str, ...]
    values: Float[Tensor, "component batch pos d_model"]

    is_plot = True

    def __getitem__(self, name: str) -> Float[Tensor, "batch pos d_model"]:
        """Return the output of one part.

        Raises:
            UnknownNameError: if the part does not exist. The error names close matches.
        """
        if name not in self.names:
            raise unknown_name(name, self.names, "component")
        return self.values[self.names.index(name)]

    def view(self) -> plots.View:
        """Draw the norms of the parts at the last position of the first text."""
        norms = self.values[:, 0, -1].norm(dim=-1)[:, None]
        labels = {"component": self.names}
        about = {"norms": "at the last position"}
        shown = Result(norms, ("component", "example"), labels=labels, unit="norm", about=about)
        return plots.effects(shown)

    def as_json(self) -> dict[str, Any]:
        """Return the norm of each part in the JSON form of all results; see `interp.json_form`."""
        labels = {"component": self.names}
        norms = Table(self.values.norm(dim=-1), "component batch pos", "norm of the part", labels)
        return form("Decomposition", {"norm": norms})

    def __repr__(self) -> str:
        """Return the sizes, and the first and last names."""
        sizes = zip(("component", "batch", "pos", "d_model"), self.values.shape, strict=True)
        names = self.names if len(self.names) <= 12 else (*self.names[:8], "...", *self.names[-3:])
        shape = ", ".join(f"{axis} {size}" for axis, size in sizes)
        return f"Decomposition [{shape}]: {', '.join(names)}"


@without_gradients
def decompose(
    model: nn.Module,
    cache: ActivationCache,
    *,
    before: int | None = None,
    neurons: bool = False,
    experts: bool = False,
) -> Decomposition:
    """Return the residual stream as a sum of the outputs of embeddings, heads, MLPs and biases.

    The method is from Elhage et al. 2021. Parts have the names of `interp.graph`: `embed`,
    `pos_embed`, a head `a0.h1`, an MLP with its biases `m0`, and `a0.bias`, the biases of an
    attention layer. Where an image or an edit replaces the embeddings, `input` is the stream that
    enters the first block. `input2` is a vector that is added before block 2 outside of all blocks.
    If a norm is applied to the output of a sublayer, each part of this output is divided by the
    norm's scale in the run. `a3.adapter` and `m3.adapter` are the outputs of LoRA adapters of
    `peft`; see below. The parts add up to the stream, up to rounding: 1e-5 of its largest
    value in float32. In half precision the stream is rounded after each addition, so the difference
    is a few percent. The values are NaN at padding.

    With a LoRA adapter, the output map of a sublayer adds two terms: `W x + b` and `scale B A x`.
    The first term is in the heads, the MLP or its neurons, and their biases. The second term is
    `a3.adapter` or `m3.adapter`. The terms of several active adapters are one part, their sum. An
    adapter that is switched off, or merged in place, is no part. Adapters of other maps change
    values of the run that the parts already use: adapters of queries, keys and values change `z`,
    and adapters of the input map or the gate change neurons. The outputs of experts contain their
    adapters.

    Args:
        model: the model of the run, with the parts that a graph needs. An attached model is copied
            at each call, if `models.from_hf` knows its family.
        cache: the cache of a run that cached all points, or
            `Graph(model, split_embeddings=True).needed`. With an adapter in the output map of an
            MLP, the run must also have cached `*.mlp.post`.
        before: decompose the stream entering this block. Default: the stream after the last block.
        neurons: whether to return the neurons of each MLP, `m0.n3`, and `m0.bias` instead of the
            MLP.
        experts: whether to return the parts of a mixture of experts instead of its sum: the output
            of each expert times its weight, such as `m0.e3`, and the shared expert, `m0.shared`.

    Returns:
        The names of the parts, and their outputs [component, batch, pos, d_model], in the unit of
        the stream.

    Raises:
        TypeError: if the model lacks a part.
        ValueError: if norms are applied to the sum of stream and sublayer (`norm_place="post"`), if
            `models.from_hf` does not support an attached model, if the block does not exist, or if
            the model has an adapter of another kind than LoRA, such as DoRA: merge it first.
        CacheError: if the cache is of another model, a point is missing, or the parts do not add up
            to the stream.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> cache = HookedRunner(model).run_with_cache("Return the", lazy=True)[1]
    >>> parts = decompose(model, cache)
    >>> parts.names[:4]
    ('embed', 'pos_embed', 'a0.h0', 'a0.h1')
    >>> torch.allclose(parts.values.sum(0), cache["resid_post", -1], atol=1e-4)
    True
    """
    parts = ResidualComponents(model, cache)
    n_layers = len(parts.model.blocks)
    require_integer("before", 0 if before is None else before, least=0, most=n_layers - 1)
    groups = [*parts(before, neurons, experts)]
    sizes = [len(group.names) for group in groups]
    names: list[str] = []
    for group in groups:
        names += group.names
    stream = parts.at(parts.last if before is None else f"blocks.{before}.resid_pre")
    values = stream.new_empty(len(names), *stream.shape)
    for group, rows in zip(groups, values.split(sizes), strict=True):
        group.put(rows)
    # A matrix product is twice as fast as a sum over the first axis.
    total = values.new_ones(len(names)) @ values.flatten(1)
    parts.check(total.view_as(stream), stream, stream, values)
    if parts.mask is not None:
        values.masked_fill_(~to_device(parts.mask, values.device)[..., None], torch.nan)
    return Decomposition(tuple(names), values)


@without_gradients
def apply_norm(
    model: nn.Module,
    cache: ActivationCache,
    values: Float[Tensor, "*axes batch pos d_model"],
    layer: int | None = None,
    *,
    mlp: bool = False,
) -> Float[Tensor, "*axes batch pos d_model"]:
    """Apply the norm of a sublayer to vectors of the stream, with the scale that the norm had in
    the run.

    The norm's bias is left out. Parts that add up to the stream therefore add up to the input of
    the sublayer without that bias.

    Args:
        model: the model of the run, with the parts that a graph needs; see `decompose`.
        cache: the cache of a run that cached the last `resid_post` and the norm's `scale`.
        values: vectors of the stream, for example the values of `decompose` with `before=layer`;
            any axes may come first. A direction is the same at all positions:
            `direction.expand(batch, pos, -1)`.
        layer: the block that reads the vectors. Default: the unembedding.
        mlp: True for the vectors that the MLP of the block reads, False for its attention.

    Returns:
        The vectors in at least float32. Without a norm they are returned unchanged.

    Raises:
        TypeError: if the model lacks a part.
        ValueError: if the block or the MLP does not exist, or the vectors have other sizes than the
            run's stream.
        CacheError: if the cache is of another model, or a point is missing.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "def f(x):", mode="full")
    >>> parts = decompose(model, cache, before=2)
    >>> read = apply_norm(model, cache, parts.values, 2).sum(0) + model.blocks[2].ln1.bias
    >>> torch.allclose(read, cache["ln1.normalized", 2], atol=1e-5)
    True
    """
    components = ResidualComponents(model, cache)
    blocks = components.model.blocks
    stream = components.at(components.last)
    require_kind("values", values, kind=Tensor, words="a tensor [..., batch, pos, d_model]")
    if layer is None:
        norm = getattr(components.model, "ln_final", None)
    else:
        exists = type(layer) is int and 0 <= layer < len(blocks)
        branches = blocks[layer].branches if exists else ()
        is_mlp = [kind_of(branch, n) == "mlp" for n, branch in enumerate(branches)]
        norms = [
            branch.norm for branch, is_one in zip(branches, is_mlp, strict=True) if is_one == mlp
        ]
        if not norms:
            what = ", of blocks with an MLP" * mlp
            error = ValueError if is_integer(layer) else TypeError
            raise error(f"layer must be 0 to {len(blocks) - 1}{what}; got {layer}")
        norm = norms[0]
    if values.shape[-3:] != stream.shape:
        raise ValueError(
            f"values must be [..., batch, pos, d_model], {[*stream.shape]} last; got "
            f"{[*values.shape]}"
        )
    linear, scale = components.norm_in_run(norm)
    vectors = linear.after(at_least_float32(values))
    return vectors / like(scale, vectors)
