"""Blocks that compute some positions at a time give the results of whole blocks."""

import threading

import pytest
import torch

from hooks import HookedRunner, HookError
from interp import edits
from models import TransformerConfig
from tests.models.running.contexts import CASES, Run, close, draw
from tests.reference import BATCH, HEADS, LAYERS, POS, masked, randomised, some_tokens, variant

MOST = 3  # Pieces of the 7 positions have 3, 3 and 1 positions.


def sizes_of(runner, run, name):
    """Return the result of `run()`, and the number of positions in each call of a point."""
    sizes = []
    with runner.hooks({name: lambda value, point: sizes.append(value.shape[1])}):
        return run(), sizes


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_pieces_equal_whole_blocks(name, mask):
    run = Run(name, mask)
    context = run.context
    with run.model.in_pieces(MOST):
        stream, sizes = sizes_of(
            run.runner, lambda: run.blocks(0, run.cache["resid_pre", 0], context), "*.attn.q"
        )
        assert sizes == (run.layers * [3, 3, 1] if context.is_causal else run.layers * [POS])
        close(stream, run.cache["resid_post", -1])
        if context.is_causal:
            close(
                run.blocks(0, run.cache["resid_pre", 0][:, 1:], context.after(1, run.past(1))),
                run.cache["resid_post", -1][:, 1:],
            )


@pytest.mark.parametrize("name", ["like llama", "window", "sandwich"])
def test_pieces_read_the_masks_of_hidden_keys(name):
    run = Run(name, "left")
    hidden = torch.zeros(1, HEADS, POS, dtype=torch.bool)
    hidden[:, [1, 4], 2:4] = True
    resid = run.cache["resid_pre", 1][:, 2:] + draw(BATCH, POS - 2, run.model.config.d_model)
    context = run.context.after(2, run.past(2)).hiding(hidden)
    whole = run.blocks(1, resid, context)
    with run.model.in_pieces(MOST):
        close(run.blocks(1, resid, context), whole)


@pytest.mark.parametrize("mask", [None, torch.arange(BATCH * POS).view(BATCH, POS) % POS > 1])
def test_edits_count_positions_from_the_start_of_the_text(mask):
    model = variant("pre")
    runner = HookedRunner(model)
    hooks = {
        "blocks.0.mlp.post": edits.zero(pos=4),
        "blocks.1.attn.scores": edits.knockout(query=5, key=[2, 3]),
        "blocks.1.attn.z": edits.zero(pos=6, head=2),
    }
    whole = runner.run_with_hooks(some_tokens(), hooks=hooks, **masked(mask))
    with model.in_pieces(MOST):
        logits, sizes = sizes_of(
            runner,
            lambda: runner.run_with_hooks(some_tokens(), hooks=hooks, **masked(mask)),
            "*.attn.k",
        )
    assert sizes == LAYERS * [3, 3, 1]
    close(logits, whole)


FROM_THE_END = {
    "the last token": {"blocks.0.mlp_out": edits.zero(pos=-1)},
    "several pieces": {"blocks.0.mlp.post": edits.scale(2.0, pos=[-1, -3])},
    "a slice": {"blocks.1.attn.z": edits.zero(pos=slice(-3, None), head=1)},
    "all but the last": {"blocks.0.attn.v": edits.zero(pos=slice(None, -1))},
    "a query and a key": {"blocks.1.attn.scores": edits.knockout(query=-1, key=-3)},
    "a pattern": {"blocks.1.attn.pattern": edits.zero(query=-2)},
}
LEFT = torch.arange(BATCH * POS).view(BATCH, POS) % POS > 1
RIGHT = torch.arange(POS) < torch.tensor([7, 4, 5, 3, 6])[:, None]


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["no padding", "left", "right"])
@pytest.mark.parametrize("name", FROM_THE_END)
def test_edits_count_positions_from_the_end_of_the_text(name, mask):
    model = variant("pre")
    runner = HookedRunner(model)
    hooks = FROM_THE_END[name]
    whole = runner.run_with_hooks(some_tokens(), hooks=hooks, **masked(mask))
    assert not torch.allclose(whole, model(some_tokens(), **masked(mask)), atol=1e-3)
    with model.in_pieces(MOST):
        logits = runner.run_with_hooks(some_tokens(), hooks=hooks, **masked(mask))
    real = slice(None) if mask is None else mask
    close(logits[real], whole[real])


def test_a_source_is_copied_from_the_end_of_its_texts():
    model = variant("pre")
    runner = HookedRunner(model)
    _, source = runner.run_with_cache(some_tokens(5), attention_mask=RIGHT)
    hooks = {"blocks.0.mlp_out": edits.replace(source, pos=-1)}
    whole = runner.run_with_hooks(some_tokens(), hooks=hooks, attention_mask=RIGHT)
    with model.in_pieces(MOST):
        logits = runner.run_with_hooks(some_tokens(), hooks=hooks, attention_mask=RIGHT)
    close(logits[RIGHT], whole[RIGHT])


def test_values_of_pieces_are_not_cached_as_values_of_texts():
    model = variant("pre")
    runner = HookedRunner(model)
    with model.in_pieces(MOST):
        for call in (runner.run_with_cache, runner.capture):
            with pytest.raises(HookError, match=r"blocks.1.mlp_out must have one .* lazy=True"):
                call(some_tokens(), names="blocks.1.mlp_out")
        _, cache = runner.run_with_cache(some_tokens(), names="blocks.1.mlp_out", lazy=True)
    close(
        cache["mlp_out", 1], runner.capture(some_tokens(), names="blocks.1.mlp_out")["mlp_out", 1]
    )


def test_blocks_that_see_later_keys_stay_whole():
    config = TransformerConfig(
        vocab_size=23, n_ctx=9, n_layers=2, n_heads=2, d_model=8, causal=False
    )
    model = randomised(config).double()
    whole = model(some_tokens())
    with model.in_pieces(MOST):
        logits, sizes = sizes_of(
            HookedRunner(model), lambda: model(some_tokens()), "blocks.0.attn.q"
        )
    assert sizes == [POS]
    assert torch.equal(logits, whole)


def test_blocks_get_their_own_forward_back():
    model = variant("pre")
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda resid, context: own(resid, context)
    given = model.blocks[1].forward
    runner = HookedRunner(model)

    def fail():
        with model.in_pieces(MOST), model.in_pieces(2):
            assert sizes_of(runner, lambda: model(some_tokens()), "*.0.attn.q")[1] == [2, 2, 2, 1]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "forward" not in vars(model.blocks[0])
    assert model.blocks[1].forward is given
    with pytest.raises(ValueError, match="got 0"), model.in_pieces(0):
        pass


def test_other_threads_run_whole_blocks():
    model = variant("pre")
    sizes = []

    def run():
        sizes.extend(sizes_of(HookedRunner(model), lambda: model(some_tokens()), "*.0.attn.q")[1])

    with model.in_pieces(MOST):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert sizes == [POS]
