"""Fused kernels for attention.

They run while no hook reads `scores` or `pattern`, and never form the matrix of scores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from models.running.masks import BLOCK, Rule, Visible, dense, part

# PyTorch keeps the set of allowed kernels for the whole process.
_CHOICE = RLock()


def fused(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Visible,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch head query d_head"]:
    """Return `softmax(scale q k^T) v` over the keys that the mask allows.

    Args:
        q, k, v: queries, keys, values. Several query heads may share a key head.
        mask: the keys that each query sees.
        scale: the factor of the dot products.
        dropout: the dropout probability of the softmax.
    """
    queries = q.shape[2]
    kv_heads = k.shape[1]
    group = q.shape[1] // k.shape[1]
    has_all = mask is None and queries in (1, k.shape[2])
    # Most kernels for accelerators do not support shared key heads. PyTorch would form all scores,
    # which are much larger than copies of the keys and values.
    if group > 1 and queries > 1 and not q.is_cpu:
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
    if isinstance(mask, Rule) or (mask is None and not has_all):

        def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Visible) -> Tensor:
            return _sdpa(q, k, v, dense(mask, (q.shape[2], k.shape[2]), q.device), scale, dropout)

        return by_blocks(kernel, q, k, v, mask)
    if group > 1 and queries == 1:
        # There is only one query. So the query heads that share a key head are passed as queries of
        # one head, and the kernel needs no shared key heads.
        if mask is not None and mask.shape[1] > 1:
            mask = mask.view(len(mask), kv_heads, group, -1)
        folded = q.reshape(len(q), kv_heads, group, -1)
        return _sdpa(folded, k, v, mask, scale, dropout).reshape(q.shape)
    # During tracing, sizes are symbolic, and a comparison does not return a bool.
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
    """Return the result of PyTorch's fused attention, without kernels whose gradients are wrong."""
    # During tracing, sizes are tensors.
    shares = bool(q.shape[1] != k.shape[1])
    free = mask is None or not q.is_cuda or torch.compiler.is_compiling()
    with nullcontext() if free else _without_cudnn():
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=shares
        )


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Switch off cuDNN's attention inside a `with` statement.

    Its gradients can be NaN with a mask (PyTorch's issue 196678).
    """
    chosen = torch.backends.cuda
    with _CHOICE:
        before = chosen.cudnn_sdp_enabled()
        try:
            # If the user has switched off the plain kernel, cuDNN stays on, because it may be the
            # only kernel left.
            chosen.enable_cudnn_sdp(before and not chosen.math_sdp_enabled())
            yield
        finally:
            chosen.enable_cudnn_sdp(before)


def by_blocks(
    kernel: Callable[[Tensor, Tensor, Tensor, Visible], Tensor],
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Visible,
) -> Float[Tensor, "batch head query d_head"]:
    """Return the output of a kernel that is called for one block of queries at a time.

    Each call gets the keys that its queries can see. A mask then takes memory for one block of
    queries, and keys outside a window take no time.
    """
    if torch.compiler.is_compiling():
        # The compiler would unroll the loop, and compile it again for each length.
        return kernel(q, k, v, mask)
    shape = (q.shape[2], k.shape[2])
    outputs = []
    for start in range(0, max(shape[0], 1), BLOCK):
        queries = slice(start, min(start + BLOCK, shape[0]))
        keys, visible = part(mask, queries, shape, q.device)
        outputs.append(kernel(q[:, :, queries], k[:, :, keys], v[:, :, keys], visible))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
