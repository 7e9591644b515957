"""Contexts of a part of a run: repeated for several edits, or continued after a position.

A context contains the masks and positions that blocks need. A continued context also has the keys
and values of earlier positions, its past.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hooks import HookedRunner
from models import KVCache, kernels
from models.running import masks
from tests.reference import BATCH, HEADS, POS, masked, some_tokens, variant

COPIES = 3
SOME = [
    *(
        "pre",
        "post",
        "output",
        "sandwich",
        "parallel",
        "attention only",
        "sinusoidal",
        "no positions",
    ),
    *("rotary partly", "grouped", "window", "window of one layer", "like llama", "like gemma 2"),
    "like gemma 3",
]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding(left, right):
    mask = torch.ones(BATCH, POS, dtype=torch.bool)
    mask[0, :left], mask[1, :1], mask[2, POS - right :] = False, False, False
    return mask


MASKS = {
    "none": None,
    "left": padding(3, 0),
    "right": padding(0, 4),
    "3-D": draw(BATCH, POS, POS, seed=9) > -0.5,
    "4-D": draw(BATCH, HEADS, POS, POS, seed=8) > -0.5,
    "one for all rows": draw(1, POS, POS, seed=7) > -0.5,
    "one for all queries": draw(BATCH, 1, POS, seed=6) > -0.5,
}
CASES = [(name, mask) for name in SOME for mask in ("none", "left", "right")]
CASES += [(name, mask) for name in ("pre", "like llama", "window") for mask in list(MASKS)[3:]]


@pytest.fixture(params=[512, 3])
def block(request, monkeypatch):
    """Set the size of blocks. With large blocks, masks are computed once for all layers. With small
    blocks, each layer computes the masks of its blocks.
    """
    for module in (kernels, masks):
        monkeypatch.setattr(module, "BLOCK", request.param)


class Run:
    """A run of all blocks, with the streams, keys and values of each block."""

    def __init__(self, name, mask):
        self.model, self.tokens = variant(name), some_tokens()
        self.runner, self.layers = HookedRunner(self.model), self.model.config.n_layers
        self.context = self.model.context(self.tokens, **masked(MASKS[mask]))
        with torch.no_grad():
            _, self.cache = self.runner.run_with_cache(
                self.tokens, **masked(MASKS[mask]), names=["*.resid_*", "*.k", "*.v"]
            )

    def past(self, pos):
        """Return keys and values before `pos` for each layer, [batch, kv_head, key, d_head]."""
        return [
            tuple(self.cache[part, layer][:, :pos].transpose(1, 2) for part in ("k", "v"))
            for layer in range(self.layers)
        ]

    @torch.no_grad()
    def blocks(self, first, resid, context, hooks=None):
        """Run the blocks from `first` on, and return the stream after the last block."""
        with self.runner.hooks(hooks or {}):
            for block in self.model.blocks[first:]:
                resid = block(resid, context)
        return resid


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


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
