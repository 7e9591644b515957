"""The targets of SVD analyses: attention scores, OV circuits, and the outputs of heads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, UnknownNameError
from hooks.base import (
    padding_messages,
    require_kind,
    require_room,
    shown,
    to_device,
    wide_dtype,
    without_gradients,
)
from interp.inputs.cached import mask_of, nan_at_padding
from interp.json_form import Table, form
from interp.kinds import require_cache, require_made
from interp.protocol import LanguageModel, of, require_one_vector
from interp.runs.sites import Some
from interp.spectral.factored import FactoredMatrix
from interp.spectral.singular import SVD, randomized_svd, svd


@dataclass(frozen=True, repr=False)
class SVDTargets:
    """The tensors of a run whose singular values are analysed, detached, with an axis for heads.

    `examples/studies/svd_stability.py` uses them. The sum of `avwo` over heads, plus the output
    bias, is `attn_out`, unless a norm follows attention or a hook edits `z` or `attn_out`.

    Attributes:
        qkt: scaled dot products of queries and keys, before any soft cap, zero above the diagonal.
            Keys outside a sliding window keep their products. Rows and columns of padding are 0.
            Singular values of padded texts are therefore the singular values of each text alone,
            and zeros.
        pattern: the weight of each key for each query. Rows sum to 1, and rows of padding sum to 0.
        values: the value vectors of each head, 0 at padding. Heads that share a key head have the
            same value vectors.
        wvwo: `W_V @ W_O`, from weights only: `x @ wvwo` is the output of a head for an input `x`
            (Elhage et al. 2021). [layer, head, d_model, d_model], stored as two factors;
            `wvwo.form()` is the product.
        avwo: `pattern @ values @ W_O`: the output of each head, without the output bias.
    """

    qkt: Float[Tensor, "batch layer *head pos pos"]
    pattern: Float[Tensor, "batch layer *head pos pos"]
    values: Float[Tensor, "batch layer *head pos d_head"]
    wvwo: FactoredMatrix
    avwo: Float[Tensor, "batch layer *head pos d_model"]

    def as_json(self) -> dict[str, Any]:
        """Return the size of each tensor in the JSON form of all results; see `interp.json_form`.

        `svd_spectra` returns their singular values.
        """
        return form("SVDTargets", _size_tables(self))

    def __repr__(self) -> str:
        return _sizes_of(self)

    def squeeze_heads(self) -> "SVDTargets":
        """Return the same tensors without the axis of heads, for a model with a single head.

        Raises:
            ValueError: if the axis of heads is missing, or has more than one head.
        """
        if self.pattern.ndim != 5 or self.pattern.shape[2] != 1:
            raise ValueError(
                f"pattern must be [batch, layer, 1 head, pos, pos]; got {tuple(self.pattern.shape)}"
            )
        by_run = ("qkt", "pattern", "values", "avwo")
        squeezed = {name: getattr(self, name).squeeze(2) for name in by_run}
        return SVDTargets(**squeezed, wvwo=self.wvwo[:, 0])


@dataclass(frozen=True, repr=False)
class ResidualStream:
    """The residual stream inside windows, and its norms at all positions.

    Attributes:
        vectors: the stream at each position inside a window, ordered by row and then by position,
            as in `windows.nonzero()`.
        norms: the L2 norms at all positions; NaN at padding.
    """

    vectors: Float[Tensor, "window layer d_model"]
    norms: Float[Tensor, "batch pos layer"]

    def as_json(self) -> dict[str, Any]:
        """Return the norms, and the sizes of both tensors, in the JSON form of all results; see
        `interp.json_form`.
        """
        norms = Table(self.norms, "batch pos layer", "norm of the stream")
        return form("ResidualStream", {"norms": norms, **_size_tables(self)})

    def __repr__(self) -> str:
        return _sizes_of(self)


def _size_tables(tensors: SVDTargets | ResidualStream) -> dict[str, Table]:
    """Return a table with the size of each tensor."""
    tables = {}
    for part in fields(tensors):
        tables[f"{part.name}.size"] = Table([*getattr(tensors, part.name).shape], "axis")
    return tables


def _sizes_of(tensors: SVDTargets | ResidualStream) -> str:
    """Return the class of a value and the sizes of its tensors, in one line."""
    sizes = (f"{field.name} {[*getattr(tensors, field.name).shape]}" for field in fields(tensors))
    return f"{type(tensors).__name__}: {', '.join(sizes)}"


@without_gradients
def svd_targets(model: nn.Module, cache: ActivationCache, layers: Some = None) -> SVDTargets:
    """Return the targets of a run, stacked over layers, and their products with the model's
    weights.

    Products have the wider dtype of cache and weights, and are computed on the cache's device. For
    a lazy cache, one layer at a time is computed. The size of scores and patterns grows with the
    square of the text's length.

    Args:
        model: the model of the run.
        cache: the cache of a run in the mode `svd_targets`, `residual` or `full`, at all positions.
        layers: one layer or several, in this order. Default: all layers.

    Returns:
        The tensors [batch, layer, head, ...]; see `SVDTargets`.

    Raises:
        TypeError: if the model has no `W_V` and `W_O`.
        CacheError: if the cache is of another model, or has no scores, patterns or values. The
            error names the mode to run.
        ValueError: if the cache does not contain all positions, or a layer does not exist.
        MemoryLimitError: if the result does not fit into memory.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "def f(x):", mode="full")
    >>> targets = svd_targets(model, cache)
    >>> heads = targets.avwo[0, 2].sum(0)  # what all heads of layer 2 write, without the bias
    >>> torch.allclose(heads + model.b_O[2], cache["attn_out", 2][0], atol=1e-5)
    True
    """
    language: LanguageModel = of(model, "W_V", "W_O")
    require_cache(cache, model)
    names = _names(cache, ("scores", "pattern", "v"), 'mode="svd_targets"')
    wanted = names if layers is None else layers
    require_kind("layers", wanted, (int, Iterable), "a layer or a list of layers")
    if isinstance(wanted, str):
        raise TypeError(f"layers must be a layer or a list of layers; got {shown(wanted)}")
    chosen = [wanted] if isinstance(wanted, int) else [*wanted]
    if not chosen or not set(chosen) <= set(names):
        raise ValueError(f"layers must be one or more of {[*names]}; got {chosen}")
    w_v, w_o = language.W_V[chosen], language.W_O[chosen]
    # With grouped heads, several heads share one W_V. Repeat it for each of these heads.
    w_v = w_v.repeat_interleave(w_o.shape[1] // w_v.shape[1], 1)
    stacks: list[Tensor] = []
    for place, layer in enumerate(chosen):
        tensors = _of_layer(cache, cache.read(*names[layer]), w_o[place])
        if not stacks:
            n_bytes = len(chosen) * sum(tensor.nbytes for tensor in tensors)
            require_room(n_bytes, tensors[0], f"{len(chosen)} layers: give fewer by layers=")
            stacks = [
                tensor.new_empty(len(tensor), len(chosen), *tensor.shape[1:]) for tensor in tensors
            ]
        for stack, tensor in zip(stacks, tensors, strict=True):
            stack[:, place] = tensor
    device, dtype = stacks[-1].device, stacks[-1].dtype
    wvwo = FactoredMatrix(w_v.to(device, dtype), w_o.to(device, dtype))
    qkt, pattern, values, avwo = stacks
    return SVDTargets(qkt=qkt, pattern=pattern, values=values, wvwo=wvwo, avwo=avwo)


def _of_layer(
    cache: ActivationCache, read: tuple[Tensor, ...], w_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four targets of one layer that depend on the run, each [batch, head, pos, ...]."""
    scores, pattern, v = read
    if not scores.shape[-2] == scores.shape[-1] == v.shape[1]:
        raise ValueError(
            f"the cache must contain whole texts, without pos= and kv_cache=; got "
            f"{scores.shape[-2]} queries, {scores.shape[-1]} keys and {v.shape[1]} values"
        )
    groups = pattern.shape[1] // v.shape[2]
    values = repeat(v, "batch pos kv_head d_head -> batch (kv_head group) pos d_head", group=groups)
    if (mask := mask_of(cache, (len(scores), scores.shape[-1]))) is not None:
        real = to_device(mask, scores.device)[:, None, :, None]
        scores = scores.where(real & real.mT, 0)
        values = values.where(real, 0)
    dtype = torch.promote_types(values.dtype, w_o.dtype)
    avwo = pattern.to(dtype) @ values.to(dtype) @ w_o.to(values.device, dtype)
    return scores.tril(), pattern, values, avwo


def svd_spectra(targets: SVDTargets, k: int | None = None) -> Mapping[str, SVD]:
    """Return the decompositions of the three targets, under `qkt`, `wvwo` and `avwo`.

    In `qkt`, left singular vectors have an entry for each query, and right singular vectors have an
    entry for each key. In
    `wvwo`, left singular vectors are directions that a head reads, and right singular vectors are
    directions that it writes. In `avwo`, left singular vectors are over positions, and right
    singular vectors are directions that a head writes.

    The rank of `wvwo` is at most d_head, so its decomposition has the d_head singular values that
    may differ from 0, without the zeros after them. These zeros would not change the effective rank
    and the stable rank. The condition number is computed for the map from the d_head directions
    that the head reads to the directions that it writes. For the whole matrix, the number would be
    infinite.

    Args:
        targets: the targets of a run; see `svd_targets`.
        k: the number of singular values and vectors, by `randomized_svd` for `qkt` and `avwo`.
            Default: all of them, by `svd`.

    Returns:
        The decompositions, by the names of the targets. The axes of a target before its rows and
        columns are batch axes.

    Raises:
        ValueError: if a number is not finite (the error names the target and the first place), or
            if k is not 1 to the smaller side of a matrix.

    >>> square, wide = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 2)  # batch, layer
    >>> wvwo = FactoredMatrix(torch.ones(1, 2, 1), torch.ones(1, 1, 2))
    >>> targets = SVDTargets(square, square, wide, wvwo, wide)
    >>> {name: spectrum.s.shape for name, spectrum in svd_spectra(targets).items()}
    {'qkt': torch.Size([1, 1, 3]), 'wvwo': torch.Size([1, 1]), 'avwo': torch.Size([1, 1, 2])}
    """
    require_made("targets", targets, SVDTargets)
    wvwo = targets.wvwo.svd("wvwo")

    def of_matrices(name: str) -> SVD:
        """Return the decomposition of a target that is not factored."""
        matrices = getattr(targets, name)
        return svd(matrices, name) if k is None else randomized_svd(matrices, k, name=name)

    return {
        "qkt": of_matrices("qkt"),
        "wvwo": wvwo if k is None else wvwo.top(k),
        "avwo": of_matrices("avwo"),
    }


@without_gradients
def residual_stream(
    cache: ActivationCache, windows: Bool[Tensor, "batch pos"], point: str = "resid_post"
) -> ResidualStream:
    """Return the residual stream of a run inside windows, and its norms everywhere, stacked over
    layers.

    Args:
        cache: the cache of a run in the mode `residual` or `full`, at all positions.
        windows: True at the positions inside windows.
        point: `resid_pre`, `resid_mid` or `resid_post`.

    Returns:
        The vectors [window, layer, d_model] and the norms [batch, pos, layer], in the unit of the
        stream.

    Raises:
        CacheError: if the cache has no stream. The error names the run that is needed.
        ValueError: if `windows` is not boolean, does not have the stream's shape, or includes
            padding.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "def f(x):", mode="full")
    >>> windows = torch.zeros(1, 9, dtype=torch.bool)
    >>> windows[0, 2:5] = True
    >>> stream = residual_stream(cache, windows)
    >>> stream
    ResidualStream: vectors [3, 4, 128], norms [1, 9, 4]
    >>> stream.norms[0].mean(0).round()  # the stream grows from layer to layer
    tensor([11., 12., 14., 15.])
    """
    require_cache(cache)
    _names(cache, (point,), 'mode="residual"')
    require_one_vector(cache.axes((point, 0)), point)
    stream = cache.stack(point)
    require_kind("windows", windows, kind=Tensor, words="a boolean tensor [batch, pos]")
    if windows.dtype != torch.bool or windows.shape != stream.shape[1:3]:
        rule = f"boolean [batch, pos], {tuple(stream.shape[1:3])} here"
        raise ValueError(f"windows must be {rule}; got {windows.dtype} {tuple(windows.shape)}")
    dtype = wide_dtype(stream.dtype)
    mask = mask_of(cache, windows.shape)
    if mask is not None and bool((windows & ~to_device(mask, windows.device)).any()):
        raise ValueError(padding_messages.padding_selected("each place of windows"))
    norms = nan_at_padding(torch.linalg.vector_norm(stream, dim=-1, dtype=dtype), mask)
    vectors = stream[:, to_device(windows, stream.device)]
    return ResidualStream(
        rearrange(vectors, "layer token d_model -> token layer d_model"),
        rearrange(norms, "layer batch pos -> batch pos layer"),
    )


def _names(
    cache: ActivationCache, shorts: tuple[str, ...], options: str
) -> dict[int, tuple[str, ...]]:
    """Return the full names of some values, by layer.

    Raises:
        CacheError: if a value is missing. The error names the run that is needed.
    """
    try:
        names = [cache.layer_names(short) for short in shorts]
    except (UnknownNameError, CacheError) as error:
        raise CacheError(
            f"the cache must have {', '.join(shorts)} of every layer, as runs with {options} do; "
            f"{error}"
        ) from error
    by_layer = {}
    for layer in names[0]:
        by_layer[layer] = tuple(names_of_value[layer] for names_of_value in names)
    return by_layer
