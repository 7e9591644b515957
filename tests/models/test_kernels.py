"""Fused attention by blocks, compared with numpy in float64.

A recording shows the kernels and their arguments.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hooks import HookedRunner
from models import KVCache, Transformer, TransformerConfig, kernels, skip_token_checks
from models.running import masks
from tests.largest import Largest
from tests.pretended import DEVICE, Devices
from tests.reference import (
    BATCH,
    HEADS,
    POS,
    SIZES,
    Reference,
    masked,
    some_tokens,
    tolerance,
    variant,
)

EXPLICIT = {"*.scores": lambda value, point: None}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding(*columns):
    """Return a mask of texts. Each argument is the list of columns that are padding in one text."""
    mask = torch.ones(len(columns), POS, dtype=torch.bool)
    for row, padded in zip(mask, columns, strict=True):
        row[list(padded)] = False
    return mask


MASKS = {
    "none": None,
    "left": padding((0, 1, 2, 3), (0,), (), (0, 1), ()),
    "right": padding((4, 5, 6), (6,), (), (3, 4, 5, 6), ()),
    "holes": padding((1, 2, 3, 4), (0, 5), (2,), (3, 4, 5), ()),
    "by query": draw(BATCH, HEADS, POS, POS, seed=4) > 0,
    "one for all queries": draw(BATCH, 1, POS, seed=5) > -0.5,
}
SOME = ["pre", "grouped", "multi-query", "window", "attn_cap", "like llama", "like gemma 2"]


@pytest.fixture(params=[1, 2, 3, 5])
def block(request, monkeypatch):
    """Let kernels and masks work with blocks of only a few queries."""
    for module in (kernels, masks):
        monkeypatch.setattr(module, "BLOCK", request.param)


@pytest.mark.sampled(24)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("hooks", [{}, EXPLICIT], ids=["fused", "explicit"])
def test_blocks_match_the_equations(name, mask, hooks):
    model, tokens, given = variant(name), some_tokens(), MASKS[mask]
    with torch.no_grad():
        logits = HookedRunner(model).run_with_hooks(tokens, **masked(given), hooks=hooks)
    for row in range(BATCH):
        real, allowed = slice(None), None
        if given is not None and given.ndim == 2:
            real = given[row]
        elif given is not None:
            by_head = given if given.ndim == 4 else given[:, None]
            allowed = by_head[row : row + 1].expand(1, HEADS, POS, POS).numpy()
        alone = Reference(model)(tokens[row : row + 1, real], allowed)
        np.testing.assert_allclose(
            logits[row, real], alone[0], rtol=0, atol=tolerance(model.config)
        )


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_blocks(name, mask):
    model, tokens = variant(name), some_tokens()

    def run(hooks):
        logits = HookedRunner(model).run_with_hooks(tokens, **masked(MASKS[mask]), hooks=hooks)
        return torch.autograd.grad(logits.log_softmax(-1)[..., 5].sum(), [*model.parameters()])

    for ours, theirs in zip(run({}), run(EXPLICIT), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=0)


def test_a_mask_without_padding_is_not_used():
    tokens = some_tokens()
    for name in ("window", "like llama"):
        model = variant(name)
        plain, ones = (
            model.context(tokens, attention_mask=mask) for mask in (None, torch.ones(BATCH, POS))
        )
        assert ones.real is None
        assert str(ones.masks) == str(plain.masks)


@pytest.mark.parametrize(
    ("row", "gaps"),
    [
        ("1111", False),
        ("0011", False),
        ("1100", False),
        ("0110", False),
        ("1011", True),
        ("0101", True),
        ("1001", True),
    ],
)
def test_only_padding_between_real_tokens_is_a_gap(row, gaps):
    rows = torch.tensor([[True] * 4, [number == "1" for number in row]])
    assert masks.has_gaps(rows, may_read=True) == gaps


class Reads(TorchDispatchMode):
    """Record the operations for which Python would wait on an accelerator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"):
            self.found.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["like llama", "window"])
@pytest.mark.parametrize("mask", ["left", "right", "holes", "by query"])
def test_trusted_masks_are_not_read(name, mask):
    model, tokens, given = variant(name), some_tokens(), MASKS[mask]
    expected = model(tokens, **masked(given))
    with skip_token_checks(), torch.no_grad():
        with Reads() as reads:
            model.context(tokens, **masked(given))
        logits = model(tokens, **masked(given))
    real = slice(None) if mask == "by query" else given
    torch.testing.assert_close(logits[real], expected[real], atol=1e-10, rtol=0)
    assert not reads.found
    with Reads() as reads:
        model.context(tokens, **masked(given))
    assert reads.found
    with skip_token_checks(), pytest.raises(ValueError, match="attention_mask"):
        model(tokens, attention_mask=torch.ones(BATCH, POS + 1))


# --- what is made


LONG = 2053


@pytest.mark.parametrize(
    "kind", ["plain", "padded", "window", "padded window", "cap", "cap window", "piece"]
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_no_matrix_of_all_queries_and_keys(kind, kv_heads):
    """The largest tensor of attention has the width of the window. Without a window, it has the
    keys of one block of queries.
    """
    window, heads, pad = 67 if "window" in kind else 0, 2, 31
    sizes = SIZES | dict(n_ctx=LONG, n_layers=1, n_heads=heads, n_kv_heads=kv_heads, d_head=2)
    config = TransformerConfig(**sizes, window=window, attn_cap=3.0 if "cap" in kind else 0.0)
    model, tokens = Transformer(config).eval(), some_tokens(shape=(1, LONG))
    mask = (torch.arange(LONG) >= pad)[None] if "padded" in kind else None
    cache = KVCache() if kind == "piece" else None
    with torch.no_grad(), Largest() as made:
        if cache:
            model(tokens[:, :60], kv_cache=cache)
        model(tokens[:, 60 if cache else 0 :], attention_mask=mask, kv_cache=cache)
    keys = window + masks.BLOCK if window else LONG
    # Without a mask the largest tensor is the logits.
    at_once = masks.BLOCK * keys * (heads if "cap" in kind else 1)
    assert made.elements <= (LONG * 46 if kind == "plain" else max(at_once, LONG * 46))


class Chosen(TorchFunctionMode):
    """A mode that records the arguments of PyTorch's fused attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            self.calls.append(dict(zip(names, args, strict=False), cudnn=cudnn) | kwargs)
        return func(*args, **kwargs)


@pytest.mark.parametrize("mask", ["none", "left", "window", "one query", "one padded query"])
def test_grouped_heads_take_a_kernel_that_forms_no_scores(mask):
    """On CUDA, no fused kernel has grouped heads. Either each key head is copied for its queries,
    or all queries of a key head become queries of one head.
    """
    one = "query" in mask
    sizes = SIZES | dict(n_layers=1, n_kv_heads=3, window=3 if mask == "window" else 0)
    model = Transformer(TransformerConfig(**sizes)).eval()
    with Devices(), torch.device(DEVICE), torch.no_grad():
        model.to(DEVICE)
        tokens, real = torch.zeros(BATCH, POS).long(), torch.arange(POS).expand(BATCH, -1) > 0
        context = model.context(
            tokens, attention_mask=real if mask in ("left", "one padded query") else None
        )
        past = [tuple(torch.zeros(BATCH, 3, POS - 1, SIZES["d_head"]) for _ in "kv")]
        context = context.after(POS - 1, past) if one else context
        with Chosen() as chosen:
            out = model.blocks[0](
                model.input_resid(tokens, model.context(tokens))[:, context.start :], context
            )
    assert out.device == DEVICE
    (call,) = chosen.calls
    assert call["query"].shape[1] == call["key"].shape[1]
    assert not call["enable_gqa"]
    assert call["query"].shape[1:3] == ((3, 2) if one else (HEADS, POS))
    assert call["is_causal"] == (mask == "none")
    assert (call["attn_mask"] is None) == (mask in ("none", "one query"))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_gets_no_mask(masked, alone):
    """cuDNN is not used with a mask, because its gradients may be NaN, unless the user has chosen
    only cuDNN.
    """
    chosen = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if alone else nullcontext()
    with Devices(), Chosen() as calls, chosen:
        q = torch.zeros(1, 2, 7, 8, device=DEVICE)
        mask = torch.ones(1, 1, 7, 7, dtype=torch.bool, device=DEVICE)
        kernels.fused(q, q, q, mask if masked else None, 1.0)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert [call["cudnn"] for call in calls.calls] == [alone or not masked]


def test_logits_do_not_depend_on_whether_gradients_are_recorded():
    sizes = SIZES | dict(n_layers=1, n_heads=3, d_model=384, d_mlp=1536, d_head=128)
    model = Transformer(TransformerConfig(**sizes)).eval()
    for tokens in (some_tokens(), some_tokens(shape=(1, 1))):
        recorded = model(tokens)
        with torch.no_grad():
            assert torch.equal(model(tokens), recorded)
