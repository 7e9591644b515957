"""Blocks of attached models that compute some positions at a time equal the model itself."""

import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import edits
from models import attach
from tests import tiny
from tests.models.attached.kinds import made

TOKENS = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(3))
RIGHT = torch.ones(2, 7).long()
RIGHT[1, 5:] = 0
N_LAYERS = 3
PIECES = N_LAYERS * [3, 3, 1]


def run(model, attached, most, mask=None):
    """Return the logits in pieces, and the number of positions in each call of the blocks' q."""
    sizes = []
    runner = HookedRunner(model)
    counts = {"blocks.*.attn.q": lambda value, point: sizes.append(value.shape[1])}
    with torch.no_grad(), attached.in_pieces(most), runner.hooks(counts):
        return model(TOKENS, attention_mask=mask).logits, sizes


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no padding", "padding"])
def test_pieces_equal_the_model(kind, attention, mask):
    model = made(kind, attention=attention)
    with torch.no_grad():
        wanted = model(TOKENS, attention_mask=mask).logits
    with attach(model) as attached:
        logits, sizes = run(model, attached, 3, mask)
    # The cache of a window of 3 positions drops keys, so these blocks stay whole.
    whole = [7] * N_LAYERS
    assert sizes == (whole if kind == "gemma3" else PIECES)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], wanted[real], atol=1e-9, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_edits_count_positions_from_the_end_of_the_text(kind):
    model = made(kind)
    new = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    with attach(model) as attached:
        runner = HookedRunner(model)
        for hooks in (
            {"blocks.0.mlp_out": edits.zero(pos=-1)},
            {"blocks.1.attn.z": edits.zero(pos=[-1, -3], head=1)},
        ):
            whole = runner.run_with_hooks(TOKENS, attention_mask=RIGHT, hooks=hooks).logits
            with attached.in_pieces(3):
                logits = runner.run_with_hooks(TOKENS, attention_mask=RIGHT, hooks=hooks).logits
            real = RIGHT.bool()
            torch.testing.assert_close(logits[real], whole[real], atol=1e-9, rtol=0)
            # Without a cache, a generation reads the whole text in each step.
            with runner.hooks(hooks):
                tokens = model.generate(TOKENS[:1], use_cache=False, **new)
                with attached.in_pieces(3):
                    in_pieces = model.generate(TOKENS[:1], use_cache=False, **new)
            assert torch.equal(in_pieces, tokens)


def test_a_window_that_reaches_all_positions_is_divided():
    config = tiny.config("Gemma3TextConfig", sliding_window=8)
    model = made("gemma3", config, attention="sdpa")
    wanted = model(TOKENS).logits
    with attach(model) as attached:
        logits, sizes = run(model, attached, 3)
    assert sizes == PIECES
    torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("runs_in_pieces", [True, False])
@pytest.mark.parametrize("reads_in_pieces", [True, False])
def test_a_lazy_cache_of_blocks_that_return_their_pattern(runs_in_pieces, reads_in_pieces):
    """In pieces, a block returns the pattern of its last piece beside the stream."""
    kinds = dict(attention_types=[[["global", "local", "local"], 1]], window_size=4)
    model = tiny.model("GPTNeoForCausalLM", attn_implementation="eager", **kinds)
    tiny.redraw(model, 0.3)
    patterns = model(TOKENS, output_attentions=True).attentions
    most = {True: 3, False: 100}
    with attach(model) as attached:
        runner = HookedRunner(model)
        with attached.in_pieces(most[runs_in_pieces]):
            _, cache = runner.run_with_cache(TOKENS, lazy=True)
        with attached.in_pieces(most[reads_in_pieces]):
            for layer, pattern in enumerate(patterns):
                torch.testing.assert_close(cache["pattern", layer], pattern, atol=1e-6, rtol=1e-5)
            assert cache["resid_post", -1].shape == cache["resid_pre", 0].shape
            # A change of the block is still seen: its stream differs.
            hook = model.transformer.h[-1].mlp.register_forward_hook(lambda m, a, out: out * 1.1)
            with pytest.raises(CacheError, match=r"transformer\.h\.\d+ changed after the run"):
                cache["mlp_out", -1]
            hook.remove()
