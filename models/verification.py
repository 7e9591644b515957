"""Checks that the activations of a model satisfy the identities of its architecture."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooks import HookedRunner
from hooks.base import at_least_float32, model_gap, require_kind, without_gradients
from models.block import Block
from models.config import TransformerConfig
from models.mode import mode
from models.running.kvcache import KVCache
from models.transformer import Transformer

# The length of the test rows, unless the context is shorter.
LENGTH = 12
POINTS = ("resid_pre", "attn.z", "attn", "attn_out", "resid_mid", "mlp_out", "resid_post")

CheckedIdentity = tuple[str, str, Tensor, Tensor]
"""An identity, the point where it is checked, the value at the point, and the expected value."""


class VerificationError(ValueError):
    """The error for a model that breaks an identity.

    It names the identity, the point and the difference.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=1, n_heads=2, d_model=6)
    >>> model = Transformer(config)
    >>> _ = model.blocks[0].attn_out.register_forward_hook(lambda point, args, value: 2 * value)
    >>> verify(model)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    models.verification.VerificationError: 'attn_out = ln1_post(attn)' must hold at blocks.0...
    """


@without_gradients
def verify(model: Transformer) -> None:
    """Check the arithmetic of a model, in evaluation mode.

    The checks run on two short, fixed rows of random tokens:

    - In each block, `resid_mid` and `resid_post` are the sums that its form of block defines, or
      the norms of these sums.
    - The output of attention is `sum over heads of z @ W_O + b_O`.
    - A row of a batch gets the same values as alone, without padding and with padding on either
      side.
    - A text that is read in pieces through a `KVCache` gets the same values as the whole text,
      without padding and with padding on the left. A model with `causal=False` skips this check.

    Differences may be 1e-4 of the largest value compared in float32, 1e-10 in float64, 1e-2 in
    float16 and 1e-1 in bfloat16. The model does not change.

    Raises:
        VerificationError: naming the identity, the first point where it fails, the largest
            difference and the allowed difference.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> verify(Transformer(config))
    """
    require_kind("model", model, Transformer, words="a Transformer")
    exactly = torch.autocast(model.W_E.device.type, enabled=False)
    with mode(model, training=False), exactly:
        for identity, where, actual, expected in _identities(model):
            largest, allowed = model_gap(actual, expected, model.W_E.dtype)
            # The comparison is false for NaN.
            if not largest <= allowed:
                raise VerificationError(
                    f"'{identity}' must hold at {where} within {allowed:.3g}, the rounding of "
                    f"{model.W_E.dtype}; got a difference of {largest:.3g}"
                )


def random_tokens(model: Transformer) -> Int[Tensor, "2 pos"]:
    """Return two rows of random tokens, the same at each call."""
    shape = (2, min(LENGTH, model.config.n_ctx))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator, device="cpu")
    return tokens.to(model.W_E.device)


def _identities(model: Transformer) -> Iterator[CheckedIdentity]:
    """Yield all identities of a model; see `verify`."""
    runner = HookedRunner(model)
    tokens = random_tokens(model)
    yield from _sums(model, runner, tokens)
    real = torch.ones_like(tokens, dtype=torch.bool)
    yield from _rows_alone(runner, tokens, real=real, identity="a row of a batch is that row alone")
    if model.config.causal:
        yield from _pieces_joined(
            runner, tokens, real=real, identity="a text read in pieces is the whole text"
        )
    if (width := tokens.shape[1]) > 1:
        padding = max(1, width // 3)
        padded_left = real.clone()
        padded_left[1, :padding] = False
        padded_right = real.clone()
        padded_right[1, -padding:] = False
        yield from _rows_alone(
            runner, tokens, real=padded_left, identity="a left-padded row is that row alone"
        )
        yield from _rows_alone(
            runner, tokens, real=padded_right, identity="a right-padded row is that row alone"
        )
        if model.config.causal:
            identity = "a padded text read in pieces is the whole text"
            yield from _pieces_joined(runner, tokens, real=padded_left, identity=identity)


def _sums(model: Transformer, runner: HookedRunner, tokens: Tensor) -> Iterator[CheckedIdentity]:
    """Yield the sums in each block that define its points."""
    points = [point for point in POINTS if hasattr(model.blocks[0], point.partition(".")[0])]
    _, cache = runner.run_with_cache(tokens, names=[f"blocks.*.{point}" for point in points])
    for layer, block in enumerate(model.blocks):
        values = {point: cache[f"blocks.{layer}.{point}"] for point in points}
        for identity, point, expected in _sums_of_block(model.config, cast(Block, block), values):
            yield identity, f"blocks.{layer}.{point}", values[point], expected


def _sums_of_block(
    config: TransformerConfig, block: Block, values: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the sums in one block: the identity, the point, and the expected value there."""
    resid = values["resid_pre"]
    attn_out = values["attn_out"]
    # In half precision, the sum over heads must not be rounded.
    z = at_least_float32(values["attn.z"])
    W_O = at_least_float32(block.attn.W_O)
    heads = torch.einsum("b p h d, h d m -> b p m", z, W_O) + block.attn.b_O
    yield "attn = sum over heads of z @ W_O + b_O", "attn", heads
    yield "attn_out = ln1_post(attn)", "attn_out", block.ln1_post(values["attn"])
    if config.mlp == "none":
        yield "resid_post = resid_pre + attn_out", "resid_post", resid + attn_out
    elif config.parallel:
        expected = resid + attn_out + values["mlp_out"]
        yield "resid_post = resid_pre + attn_out + mlp_out", "resid_post", expected
    elif config.norm_place == "post":
        yield "resid_mid = ln1(resid_pre + attn_out)", "resid_mid", block.ln1(resid + attn_out)
        expected = block.ln2(values["resid_mid"] + values["mlp_out"])
        yield "resid_post = ln2(resid_mid + mlp_out)", "resid_post", expected
    else:
        yield "resid_mid = resid_pre + attn_out", "resid_mid", resid + attn_out
        expected = values["resid_mid"] + values["mlp_out"]
        yield "resid_post = resid_mid + mlp_out", "resid_post", expected


def _rows_alone(
    runner: HookedRunner, tokens: Tensor, real: Bool[Tensor, "batch pos"], identity: str
) -> Iterator[CheckedIdentity]:
    """Yield the values of each row in a batch, with the values of the same row alone."""
    together = _stream(runner, tokens, real)
    for n, is_token in enumerate(real):
        for name, alone in _stream(runner, tokens[n, is_token][None]).items():
            yield identity, name, together[name][n, is_token], alone[0]


def _pieces_joined(
    runner: HookedRunner, tokens: Tensor, real: Bool[Tensor, "batch pos"], identity: str
) -> Iterator[CheckedIdentity]:
    """Yield the values of texts that are read in pieces, with the values of the whole texts."""
    width = tokens.shape[1]
    cache = KVCache()
    # The pieces are several positions, several more, then one.
    pieces = [
        _stream(runner, tokens[:, start:end], real=real[:, :end], cache=cache)
        for start, end in pairwise((0, width // 2, width - 1, width))
        if start < end
    ]
    for name, whole in _stream(runner, tokens, real).items():
        joined = torch.cat([piece[name] for piece in pieces], 1)
        yield identity, name, joined[real], whole[real]


def _stream(
    runner: HookedRunner, tokens: Tensor, real: Tensor | None = None, cache: KVCache | None = None
) -> dict[str, Tensor]:
    """Return the output of each block and the logits, by name: [batch, pos, ...]."""
    mask = None if real is None or real.all() else real
    logits, values = runner.run_with_cache(
        tokens, names="blocks.*.resid_post", attention_mask=mask, kv_cache=cache
    )
    return {**values, "logits": logits}
