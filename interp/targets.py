"""What SVD analyses look at: the score matrices, the maps of the OV circuit, what heads write."""

from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, UnknownNameError
from interp.protocol import AttentionWeights


@dataclass(frozen=True)
class SVDTargets:
    """The tensors of svd-transformer.md, detached, with an axis for heads.

    Where attention adds what it computes to the stream as it is (no norm of its output, no hook that
    edits `z` or `attn_out`), the sum of `avwo` over heads plus the output bias is `attn_out`.

    Attributes:
        qkt: scaled dot products of queries and keys, before any soft cap, zero above the diagonal.
            Keys that a sliding window or a padding mask hides keep their products.
        pattern: the weight of each key for each query; rows sum to 1, those of padding to 0.
        values: what a head reads at each position; heads that share a key head hold the same.
        wvwo: `W_V @ W_O`, from weights alone: `x @ wvwo` is what a head would write on reading `x`.
        avwo: `pattern @ values @ W_O`: what each head writes, the output bias left out.
    """

    qkt: Float[Tensor, "batch layer *head pos pos"]
    pattern: Float[Tensor, "batch layer *head pos pos"]
    values: Float[Tensor, "batch layer *head pos d_head"]
    wvwo: Float[Tensor, "layer *head d_model d_model"]
    avwo: Float[Tensor, "batch layer *head pos d_model"]

    def squeeze_heads(self) -> "SVDTargets":
        """The same without the axis of heads, the document's shapes.

        Raises:
            ValueError: if there is more than one head, or the axis is gone already.
        """
        if self.pattern.ndim != 5:
            raise ValueError("squeeze_heads needs the axis of heads, and it is gone already")
        if self.pattern.shape[2] != 1:
            raise ValueError(f"squeeze_heads needs one head, not {self.pattern.shape[2]}")
        squeezed = {
            field.name: getattr(self, field.name).squeeze(1 if field.name == "wvwo" else 2)
            for field in fields(self)
        }
        return replace(self, **squeezed)


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream in windows, and its size everywhere.

    Attributes:
        vectors: the stream at each position inside a window, by row, then by position: the order of
            `windows.nonzero()`.
        norms: L2 norms at all positions.
    """

    vectors: Float[Tensor, "window layer d_model"]
    norms: Float[Tensor, "batch pos layer"]


@torch.no_grad()
def wvwo(model: nn.Module) -> Float[Tensor, "layer head d_model d_model"]:
    """`W_V @ W_O` of every head, detached: the OV circuit of Elhage et al. 2021, for row vectors.

    Rows are directions that a head reads, columns those that it writes. It needs no run, so it may
    be asked for while the model trains.

    Args:
        model: a model with `W_V` and `W_O`; see `AttentionWeights`.

    Raises:
        TypeError: if the model has no such weights.
    """
    w_v, w_o = _weights(model)
    return w_v @ w_o


@torch.no_grad()
def svd_targets(model: nn.Module, cache: ActivationCache) -> SVDTargets:
    """The targets of a run, stacked over layers, and their products with the model's weights.

    Products are taken in the wider of the types of cache and weights, on the cache's device.

    Args:
        model: the model of that run, its weights unchanged since.
        cache: of a run in the mode `svd_targets`, `residual` or `full`, lazy or not, over all its
            positions.

    Raises:
        TypeError: if the model has no `W_V` and `W_O`.
        CacheError: if the cache lacks scores, patterns or values; it says which mode to run.
        ValueError: if the cache holds some positions only, or does not fit the model's weights.
    """
    weights = _weights(model)
    scores, pattern, v = (_stacked(cache, name) for name in ("scores", "pattern", "v"))
    if not scores.shape[-2] == scores.shape[-1] == v.shape[2]:
        raise ValueError(
            "svd_targets needs all positions of a run from its first token on, and this cache has "
            f"{scores.shape[-2]} queries, {scores.shape[-1]} keys and {v.shape[2]} values: "
            "run without positions= and kv_cache="
        )
    found = (v.shape[0], pattern.shape[2], v.shape[4])
    expected = (weights[1].shape[0], *weights[1].shape[1:3])
    if found != expected:
        raise ValueError(
            "svd_targets needs a cache of this model: its layers, heads and d_head are "
            f"{expected}, not {found}"
        )
    groups = pattern.shape[2] // v.shape[3]
    values = v.transpose(2, 3).repeat_interleave(groups, 2)
    wide = torch.promote_types(values.dtype, weights[1].dtype)
    w_v, w_o = (weight.to(values.device, wide) for weight in weights)
    return SVDTargets(
        qkt=scores.tril().transpose(0, 1),
        pattern=pattern.transpose(0, 1),
        values=values.transpose(0, 1),
        wvwo=w_v @ w_o,
        avwo=(pattern.to(wide) @ values.to(wide) @ w_o[:, None]).transpose(0, 1),
    )


def residual_stream(cache: ActivationCache, point: str = "resid_post") -> ResidualStream:
    """The residual stream of a run with `windows=`, stacked over layers and detached.

    Args:
        cache: of a run in the mode `residual` or `full`, with `windows=`.
        point: `resid_pre`, `resid_mid` or `resid_post`.

    Raises:
        CacheError: if the cache lacks the stream or its norms; it says what to run.
    """
    try:
        vectors, norms = cache.stack(point), cache.stack(f"{point}.norm")
    except (UnknownNameError, CacheError) as error:
        raise CacheError(
            f"residual_stream reads {point} and {point}.norm of every layer ({error}): run with "
            'mode="residual" and windows='
        ) from error
    return ResidualStream(vectors.detach().transpose(0, 1), norms.detach().movedim(0, -1))


def _stacked(cache: ActivationCache, name: str) -> Tensor:
    try:
        return cache.stack(name)
    except (UnknownNameError, CacheError) as error:
        raise CacheError(
            f"svd_targets reads scores, pattern and v of every layer ({error}): run with "
            'mode="svd_targets"'
        ) from error


def _weights(model: nn.Module) -> tuple[Tensor, Tensor]:
    """`W_V` repeated for the heads that share it, and `W_O`."""
    # Not isinstance: since Python 3.12 a protocol does not see the parameters of a module.
    if not (hasattr(model, "W_V") and hasattr(model, "W_O")):
        raise TypeError(f"SVD targets need a model with W_V and W_O, not {type(model).__name__}")
    w_v, w_o = cast(AttentionWeights, model).W_V, cast(AttentionWeights, model).W_O
    return w_v.repeat_interleave(w_o.shape[1] // w_v.shape[1], 1), w_o
