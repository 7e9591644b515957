"""Kernels: which kernel computes attention while nobody listens, so that no matrix of all scores is formed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from threading import RLock
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from models.checks import can_be_read
from models.masks import BLOCK, Mask, Rule, dense, part

HALF = (torch.float16, torch.bfloat16)
# Flex attention would be compiled once more for fewer queries, such as the last ones of a text.
FEW = 128
# Shorter texts do not repay the plans that cuDNN builds.
LONG = 1024
# Which kernels may run is a setting of the whole process.
_CHOICE = RLock()


def fused(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch head query d_head"]:
    """`softmax(scale q k^T) v` over the keys that the mask leaves, with dropout of the weights."""
    queries, kv_heads, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    has_all = mask is None and queries in (1, k.shape[2])
    # On accelerators only the flash kernel shares key heads. For others PyTorch would form all scores,
    # which are much larger than copies of the keys and values.
    if group > 1 and queries > 1 and not (q.is_cpu or (has_all and _takes_flash(q, k, v, dropout))):
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    if isinstance(mask, Rule) or (mask is None and not has_all):

        def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
            return _sdpa(q, k, v, dense(mask, (q.shape[2], k.shape[2]), q.device), scale, dropout)

        return by_blocks(kernel, q, k, v, mask)
    if group > 1 and queries == 1:
        # The query heads of one key head become its queries: then no kernel needs to know of groups.
        if mask is not None and mask.shape[1] > 1:
            mask = mask.view(len(mask), kv_heads, group, -1)
        folded = q.reshape(len(q), kv_heads, group, -1)
        return _sdpa(folded, k, v, mask, scale, dropout).reshape(q.shape)
    # During tracing sizes are symbolic, and comparing them does not give a bool.
    is_causal = True if has_all and queries > 1 else False  # noqa: SIM210
    return _sdpa(q, k, v, mask, scale, dropout, is_causal)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    is_causal: bool = False,
) -> Tensor:
    # During tracing sizes are tensors.
    shares = bool(q.shape[1] != k.shape[1])
    free = not q.is_cuda or torch.compiler.is_compiling() or (is_causal and q.shape[2] >= LONG)
    with nullcontext() if free else _without_cudnn():
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=shares
        )


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Keeps cuDNN's attention out, which PyTorch from 2.11 on prefers on an H100.

    It builds a plan for each new shape in up to half a second: for each length of a prompt, each generated
    token and each block. With a mask, gradients of queries can be NaN (PyTorch's issue 196678).
    """
    chosen = torch.backends.cuda
    with _CHOICE:
        before = chosen.cudnn_sdp_enabled()
        try:
            # Without the plain kernel somebody has chosen cuDNN alone.
            chosen.enable_cudnn_sdp(before and not chosen.math_sdp_enabled())
            yield
        finally:
            chosen.enable_cudnn_sdp(before)


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Whether the flash kernel runs for these: on recent devices, in half precision."""
    if q.dtype in HALF and can_be_read(q):
        params = torch.backends.cuda.SDPAParams(q, k, v, None, dropout, True, True)
        return torch.backends.cuda.can_use_flash_attention(params)
    return q.dtype in HALF


def by_blocks(
    kernel: Callable[[Tensor, Tensor, Tensor, Mask], Tensor],
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Mask,
) -> Float[Tensor, "batch head query d_head"]:
    """The output of a kernel that is called for some queries at a time, with the keys in their reach.

    Masks then take memory for one block of queries, and keys outside a window take no time.
    """
    if torch.compiler.is_compiling():
        # The loop would be unrolled, and compiled again for each length.
        return kernel(q, k, v, mask)
    shape, parts = (q.shape[2], k.shape[2]), []
    for start in range(0, max(shape[0], 1), BLOCK):
        queries = slice(start, min(start + BLOCK, shape[0]))
        keys, seen = part(mask, queries, shape, q.device)
        parts.append(kernel(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def takes_flex(q: Tensor, k: Tensor) -> bool:
    """Whether flex attention can be compiled for these, and repays the seconds that this takes once.

    On the CPU it is as fast as the explicit computation by blocks, so it is not used there.
    """
    return (
        q.is_cuda
        and can_be_read(q)
        and q.shape[2] * k.shape[2] > BLOCK**2
        and q.shape[3] >= 16
        and q.dtype in (*HALF, torch.float32)
        and find_spec("triton") is not None
    )


def capped_by_flex(
    explicit: Callable[[Tensor, Tensor, Tensor, Mask], Tensor],
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Mask,
    scale: float,
    cap: float,
) -> Float[Tensor, "batch head query d_head"]:
    """`softmax(cap tanh(scale q k^T / cap)) v` over the keys that the mask leaves.

    `explicit` gives the same, for few queries and where flex attention cannot be compiled: without a C
    compiler, say, or for vectors that a small device has no room for.
    """
    flex = _flex(q.dtype, q.shape[3])
    if q.shape[2] < FEW or not flex:
        return explicit(q, k, v, mask)
    shape = (*q.shape[:3], k.shape[2])
    seen = dense(mask, shape[2:], q.device).expand(shape)
    # As tensors, because another cap or scale would be compiled anew, and PyTorch fails at that.
    wide = q.new_empty(shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    limit, factor = (torch.full_like(wide, part) for part in (cap, scale / cap))
    try:
        return flex[0](
            q,
            k,
            v,
            lambda score, row, head, query, key: torch.where(
                seen[row, head, query, key],
                limit[head] * torch.tanh(score * factor[head]),
                -torch.inf,
            ),
            scale=1.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # each part of the compiler has its own
        reason = str(error).partition("\n")[0]
        warnings.warn(f"soft caps are computed without flex attention: {reason}", stacklevel=2)
        flex.clear()
        return explicit(q, k, v, mask)


@cache
def _flex(dtype: torch.dtype, d_head: int) -> list[Any]:
    """Compiled flex attention for vectors of this kind; emptied where that fails."""
    # The import takes seconds, as it brings the compiler.
    from torch.nn.attention.flex_attention import flex_attention

    return [torch.compile(flex_attention)]
