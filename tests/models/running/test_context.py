"""Contexts of a part of a run: repeated for several edits, or continued after a position.

A context contains the masks and positions that blocks need. A continued context also has the keys
and values of earlier positions, its past.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from models import KVCache, kernels
from models.running import masks
from tests.models.running.contexts import CASES, Run, close, draw
from tests.reference import BATCH, HEADS, POS, some_tokens, variant

COPIES = 3


@pytest.fixture(params=[512, 3])
def block(request, monkeypatch):
    """Set the size of blocks. With large blocks, masks are computed once for all layers. With small
    blocks, each layer computes the masks of its blocks.
    """
    for module in (kernels, masks):
        monkeypatch.setattr(module, "BLOCK", request.param)


@pytest.mark.sampled(32)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "mask"), CASES)
@pytest.mark.parametrize(
    "hooks", [{}, {"*.scores": lambda value, point: None}], ids=["fused", "explicit"]
)
def test_a_run_from_a_block_and_a_position_equals_the_whole_run(name, mask, hooks):
    run = Run(name, mask)
    for pos in (0, 1, 3, POS - 1):
        past = run.past(pos)
        before = [part.clone() for pair in past for part in pair]
        context = run.context.after(pos, past)
        for layer in range(run.layers):
            part = run.blocks(layer, run.cache["resid_pre", layer][:, pos:], context, hooks)
            close(part, run.cache["resid_post", -1][:, pos:])
        assert all(map(torch.equal, (part for pair in past for part in pair), before))


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_edits_as_rows_equal_each_edit_alone(name, mask):
    run, pos = Run(name, mask), 3
    resid = run.cache["resid_pre", 1]
    edited = [resid.clone() for _ in range(COPIES)]
    for n, stream in enumerate(edited):
        stream[:, pos:] += draw(*stream[:, pos:].shape, seed=n)
    alone = torch.cat([run.blocks(1, stream, run.context) for stream in edited])
    assert (alone[:BATCH] - alone[BATCH : 2 * BATCH]).abs().max() > 0.1
    rows = torch.cat(edited)
    close(run.blocks(1, rows, run.context.repeated(COPIES)), alone)
    past = run.past(pos)
    for context in (
        run.context.after(pos, past).repeated(COPIES),
        run.context.repeated(COPIES).after(pos, past),
        run.context.after(
            pos, [tuple(part.repeat(COPIES, 1, 1, 1) for part in pair) for pair in past]
        ).repeated(COPIES),
    ):
        close(run.blocks(1, rows[:, pos:], context), alone[:, pos:])


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_hidden_keys_equal_scores_of_minus_infinity(name, mask):
    run, pos = Run(name, mask), 4
    hidden = torch.zeros(BATCH, HEADS, POS, dtype=torch.bool)
    hidden[:, 1, 1:3] = True
    hidden[2, :, :3] = True

    def remove(scores, point):
        return scores.masked_fill(hidden.repeat(len(scores) // BATCH, 1, 1)[:, :, None], -torch.inf)

    resid = run.cache["resid_pre", 0][:, pos:]
    context = run.context.after(pos, run.past(pos))
    wanted = run.blocks(0, resid, context, {"*.scores": remove})
    assert (wanted - run.blocks(0, resid, context)).abs().max() > 1e-3
    hiding = context.hiding(hidden)
    close(run.blocks(0, resid, hiding), wanted)
    close(run.blocks(0, resid, hiding, {"*.scores": lambda value, point: None}), wanted)
    # Keys may be hidden one after the other, and the rows may be repeated.
    early = torch.arange(POS) < 2
    twice = context.hiding(hidden & early).hiding(hidden & ~early).repeated(COPIES)
    close(run.blocks(0, resid.repeat(COPIES, 1, 1), twice), wanted.repeat(COPIES, 1, 1))


@pytest.mark.parametrize("name", ["pre", "like llama", "window"])
@pytest.mark.parametrize("mask", ["none", "left", "3-D"])
def test_a_context_may_be_taken_up_twice(name, mask):
    """Both positions count from the start of the text."""
    run = Run(name, mask)
    context = run.context.after(2, run.past(2)).after(5, run.past(5))
    close(
        run.blocks(0, run.cache["resid_pre", 0][:, 5:], context), run.cache["resid_post", -1][:, 5:]
    )
    assert context.start == 5


@pytest.mark.parametrize("mask", ["none", "left"])
def test_embeddings_of_a_part_match_the_whole(mask):
    """Padding moves positions, so they must follow the rows and columns."""
    run = Run("sinusoidal", mask)
    context = run.context.after(3, run.past(3)).repeated(COPIES)
    tokens = run.tokens[:, 3:].repeat(COPIES, 1)
    if mask == "left":
        assert torch.equal(context.real, run.context.real.repeat(COPIES, 1))
    with torch.no_grad():
        close(
            run.model.input_resid(tokens, context),
            run.cache["resid_pre", 0][:, 3:].repeat(COPIES, 1, 1),
        )


def test_one_text_in_many_copies_shares_its_masks():
    """If the context of one text is valid for all copies, nothing is copied."""
    model = variant("like llama")
    context = model.context(some_tokens(shape=(1, POS)), attention_mask=torch.ones(1, POS).long())
    repeated = context.repeated(COPIES)
    pairs = zip(tree_leaves(context), tree_leaves(repeated), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)


def test_a_context_is_a_tree_of_tensors_and_numbers():
    run = Run("window of one layer", "left")
    for context in (run.context, run.context.after(3, run.past(3)).repeated(COPIES)):
        assert all(isinstance(leaf, Tensor | int | None) for leaf in tree_leaves(context))


def test_contexts_that_cannot_be_continued_are_errors():
    run = Run("pre", "none")
    for pos in (-1, POS, POS + 1):
        with pytest.raises(ValueError, match=f"got {pos}"):
            run.context.after(pos, [])
    with pytest.raises(ValueError, match="got 2"):
        run.context.after(3, run.past(2))
    with pytest.raises(ValueError, match="got 1"):
        run.context.after(3, run.past(3)).after(1, run.past(1))
    cached = run.model.context(run.tokens, kv_cache=KVCache())
    calls = (
        lambda: cached.repeated(2),
        lambda: cached.after(3, run.past(3)),
        lambda: cached.hiding(torch.zeros(1, 1, POS, dtype=torch.bool)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="KVCache"):
            call()
