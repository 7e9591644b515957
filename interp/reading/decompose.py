"""Decomposition: the residual stream as the sum of what each part of a model wrote."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    at_least_float32,
    require_integer,
    require_kind,
    to_device,
    unknown_name,
    without_gradients,
)
from interp import pictures
from interp.numbers.precision import like
from interp.reading.components import ResidualComponents
from interp.results.result import Result


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(pictures.Shown):
    """A residual stream as a sum of parts, in at least float32.

    Attributes:
        names: the names of the parts, in the order of computation.
        values: what each of them wrote.

    >>> import torch
    >>> parts = Decomposition(("embed", "a0.h0"), torch.tensor([[[[1.0, 3.0]]], [[[2.0, 0.0]]]]))
    >>> parts["a0.h0"]
    tensor([[[2., 0.]]])
    """

    names: tuple[str, ...]
    values: Float[Tensor, "component batch pos d_model"]

    is_plot = True

    def __getitem__(self, name: str) -> Float[Tensor, "batch pos d_model"]:
        """Return what one part wrote.

        Raises:
            UnknownNameError: if there is no such part; it has close matches.
        """
        if name not in self.names:
            raise unknown_name(name, self.names, "component")
        return self.values[self.names.index(name)]

    def view(self) -> pictures.View:
        """The norms of the parts at the last position of the first text."""
        norms = self.values[:, 0, -1].norm(dim=-1)[:, None]
        labels, about = {"component": self.names}, {"norms": "at the last position"}
        shown = Result(norms, ("component", "example"), labels=labels, unit="norm", about=about)
        return pictures.effects(shown)

    def __repr__(self) -> str:
        """The sizes, and the first and last names."""
        sizes = zip(("component", "batch", "pos", "d_model"), self.values.shape, strict=True)
        names = self.names if len(self.names) <= 12 else (*self.names[:8], "...", *self.names[-3:])
        return (
            f"Decomposition [{', '.join(f'{axis} {n}' for axis, n in sizes)}]: {', '.join(names)}"
        )


@without_gradients
def decompose(
    model: nn.Module,
    cache: ActivationCache,
    *,
    before: int | None = None,
    neurons: bool = False,
    experts: bool = False,
) -> Decomposition:
    """The residual stream as the sum of what embeddings, heads, MLPs and biases wrote (Elhage et al. 2021).

    The names are those of `interp.graph`: `embed`, `pos_embed`, a head `a0.h1`, an MLP with its biases
    `m0`, and `a0.bias`, what attention added beside its heads. Where an image, or an edit,
    replaces the embeddings, `input` is the stream that enters the first block, and `input2` what is added before block 2 by
    no part of a block. Parts that were normed together are
    divided by the norm's scale in the run. They add up to the stream up to rounding, 1e-5 of its largest
    value in float32. In half precision the stream is rounded after each addition: a few percent. At padding
    they are NaN.

    Args:
        model: the model of the run, with the parts that a graph needs. An attached one is copied at each
            call, if `models.from_hf` knows its family.
        cache: the cache of a run that kept all points, or `Graph(model, split_embeddings=True).needed`.
        before: decompose the stream entering this block; None for the stream after the last one.
        neurons: whether to give, in place of an MLP, each of its neurons, `m0.n3`, and `m0.bias`.
        experts: whether to give, in place of a mixture, each of its experts, `m0.e3`, times its weight, and `m0.shared`.

    Raises:
        TypeError, ValueError: as for `Graph`; or if there is no such block.
        CacheError: if the cache is of another model or lacks a point, or the parts do not add up to the stream.

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
    require_integer("before", 0 if before is None else before, 0, n_layers - 1)
    groups = [*parts(before, neurons, experts)]
    names = tuple(name for part in groups for name in part.names)
    stream = parts.at(parts.last if before is None else f"blocks.{before}.resid_pre")
    values = stream.new_empty(len(names), *stream.shape)
    for part, out in zip(groups, values.split([len(p.names) for p in groups]), strict=True):
        part.put(out)
    # A matrix product is twice as fast as a sum over the first axis.
    total = values.new_ones(len(names)) @ values.flatten(1)
    parts.check(total.view_as(stream), stream, stream, values)
    if parts.mask is not None:
        values.masked_fill_(~to_device(parts.mask, values.device)[..., None], torch.nan)
    return Decomposition(names, values)


@without_gradients
def apply_norm(
    model: nn.Module,
    cache: ActivationCache,
    values: Float[Tensor, "*axes batch pos d_model"],
    layer: int | None = None,
    *,
    mlp: bool = False,
) -> Float[Tensor, "*axes batch pos d_model"]:
    """Return vectors of the stream as a sublayer reads them: normed, with the norm's scale in the run.

    It leaves out the norm's bias. So parts that add up to the stream add up to what is read, up to that bias.

    Args:
        model: see `decompose`.
        cache: the cache of a run that kept the last `resid_post`, and the norm's `scale`.
        values: such vectors, as those of `decompose` with `before=layer`, in front of any axes. A direction is
            the same everywhere: `direction.expand(batch, pos, -1)`.
        layer: the block that reads them; None for the unembedding.
        mlp: whether its MLP reads them, or its attention.

    Returns:
        The vectors in at least float32. Where nothing is normed they are those given.

    Raises:
        TypeError: as for `Graph`.
        ValueError: if there is no such block or MLP, or the vectors have other sizes than the run's stream.
        CacheError: if the cache is of another model or lacks a point.

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
    blocks, stream = components.model.blocks, components.at(components.last)
    require_kind("values", values, Tensor, "a tensor [..., batch, pos, d_model]")
    if layer is None:
        norm = getattr(components.model, "ln_final", None)
    elif type(layer) is int and 0 <= layer < len(blocks) and mlp < len(blocks[layer].branches):
        norm = blocks[layer].branches[mlp].norm
    else:
        raise ValueError(
            f"layer must be 0 to {len(blocks) - 1}{', of blocks with an MLP' * mlp}; got {layer}"
        )
    if values.shape[-3:] != stream.shape:
        raise ValueError(
            f"values must be [..., batch, pos, d_model], {[*stream.shape]} last; got {[*values.shape]}"
        )
    linear, scale = components.norm_in_run(norm)
    vectors = linear.after(at_least_float32(values))
    return vectors / like(scale, vectors)
