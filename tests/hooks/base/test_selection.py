"""Tests of positions in padded batches, which must be the same tokens as in each text alone.

Positions have several forms: integers, slices, lists, masks and one list per text.
"""

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint, Point, SelectionError, position_offset
from hooks.base import Selection
from interp import Pairs, activation_patching, edits, log_prob, sweep
from models import KVCache, attach, generate
from tests import tiny
from tests.reference import some_tokens, variant

BATCH, POS = 3, 6
MASKS = {
    "right": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6, [1, 1, 1, 1, 1, 0]]),
    "left": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]]),
    "gaps": torch.tensor([[1, 0, 1, 1, 1, 0], [1] * 6, [0, 1, 1, 0, 1, 1]]),
}
FORMS = [-1, -3, [-1, -2], slice(-3, None), slice(2, -1), slice(-4, -1), [[-1], [2, -1], [4]]]
FORMS.append(edits.all_but(2, -1))


def listed(form, row, columns):
    """Return the columns that a position selects in a row, computed with Python's own indexing.

    Args:
        form: the position, in one of the forms of `FORMS`.
        row: the number of the text.
        columns: the columns of the real tokens of this text.
    """
    form = form[row] if isinstance(form, list) and isinstance(form[0], list) else form
    if form is FORMS[-1]:
        return [n for n in columns[:-1] if n != 2]
    if not isinstance(form, slice):
        asked = [form] if isinstance(form, int) else form
        return [columns[n] if n < 0 else n for n in asked]
    # The start of this slice counts columns, and its negative stop counts real tokens.
    if form.start == 2:
        return [n for n in columns[: form.stop] if n >= 2]
    return columns[form]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_negative_positions_count_from_the_last_real_token(mask, form):
    model, tokens = variant("pre"), some_tokens(1, (BATCH, POS))
    name, runner = "blocks.0.mlp_out", HookedRunner(model)
    own = [listed(form, n, np.flatnonzero(row).tolist()) for n, row in enumerate(mask)]

    def by_hand(value, point):
        for row, columns in enumerate(own):
            value[row, columns] = 0

    expected = runner.run_with_hooks(tokens, hooks={name: by_hand}, attention_mask=mask)
    zero, read = {name: edits.zero(pos=form)}, log_prob(3)
    runs = {"plain": runner.run_with_hooks(tokens, hooks=zero, attention_mask=mask)}
    with runner.hooks(zero):
        _, cache = runner.run_with_cache(tokens, attention_mask=mask, lazy=True)
    runs["lazy"] = model.unembed(cache["resid_post", -1])
    for logits in runs.values():
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    last = [max(np.flatnonzero(row)) for row in mask]
    metric = expected.log_softmax(-1)[range(BATCH), last, 3]
    for entries in (
        [zero] * 3,
        [zero, {name: by_hand}],
        [zero, {name: edits.zero(pos=4, batch=1)}],
    ):
        found = sweep(model, tokens, entries, read, attention_mask=mask)
        torch.testing.assert_close((found.values + found.base)[0], metric, rtol=0, atol=1e-12)
    queries = Selection(form).inside(mask.bool(), "queries")
    assert [np.flatnonzero(row).tolist() for row in queries] == [sorted(row) for row in own]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_readings_leave_padding_out_of_a_slice(mask):
    real = mask.bool()
    for form in (slice(None), slice(2, None), slice(1, 5, 2), slice(-4, None)):
        rows = Selection(form).rows(
            POS, "pos", BATCH, [np.flatnonzero(row).tolist() for row in real]
        )
        rows = rows * (BATCH // len(rows))
        kept = [[n for n in row if real[at, n]] for at, row in enumerate(rows)]
        assert Selection(form).read(real, "pos") == kept
        inside = Selection(form).inside(real, "pos")
        assert [np.flatnonzero(row).tolist() for row in inside] == kept


class Foreign(nn.Module):
    """A user's own model, which takes a mask but does not report it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.point = nn.Embedding(23, 4), HookPoint("batch pos d_model")
        self.head = nn.Linear(4, 23)

    def forward(self, tokens, attention_mask):
        x = self.point(self.embedding(tokens)) * attention_mask[..., None]
        return self.head(x.cumsum(1))


def test_edits_in_a_sweep_of_any_model_know_the_padding():
    model, tokens, mask = Foreign().eval(), some_tokens(1, (BATCH, POS)), MASKS["right"]
    entries = [{"point": edits.zero(pos=-1)}, {"point": edits.zero(pos=[[3], [5], [4]])}]
    found = sweep(model, tokens, entries, log_prob(3), attention_mask=mask)
    torch.testing.assert_close(found.values[0], found.values[1], rtol=0, atol=1e-6)
    assert found.values.abs().min() > 0


def test_an_attached_model_reads_its_mask(tokens):
    llama = tiny.model("LlamaForCausalLM")
    mask = torch.ones_like(tokens)
    mask[0, 4:] = mask[2, 5:] = 0
    hooks = [edits.zero(pos=-1), edits.zero(pos=mask.sum(1)[:, None] - 1)]
    with attach(llama):
        found = []
        for edit in hooks:
            with HookedRunner(llama).hooks({"blocks.0.mlp_out": edit}):
                found.append(llama(tokens, attention_mask=mask).logits)
                found.append(llama(tokens, mask).logits)
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("wrong", [4, [0, 5], [[4], [0], [0]], -5, [True] * 5 + [False]])
def test_a_column_of_padding_is_an_error(wrong):
    model, tokens, mask = variant("pre"), some_tokens(1, (BATCH, POS)), MASKS["right"]
    hooks = {"blocks.0.mlp_out": edits.zero(pos=wrong)}
    with pytest.raises(SelectionError, match="example 0"):
        HookedRunner(model).run_with_hooks(tokens, hooks=hooks, attention_mask=mask)
    with pytest.raises(SelectionError, match="example 0"):
        sweep(model, tokens, [hooks], log_prob(3), attention_mask=mask)


def test_patching_of_padded_pairs_reaches_every_column():
    model, mask = variant("pre"), MASKS["right"]
    clean, corrupted = some_tokens(1, (BATCH, POS)), some_tokens(2, (BATCH, POS))
    pairs = Pairs(clean, corrupted, torch.tensor([1, 2, 3]), attention_mask=mask)
    found = activation_patching(model, pairs, site="mlp_out").values
    for row in range(BATCH):
        kept = mask[row].bool()
        one = Pairs(clean[row][None, kept], corrupted[row][None, kept], torch.tensor([row + 1]))
        alone = activation_patching(model, one, site="mlp_out").values[..., 0]
        torch.testing.assert_close(found[:, kept, row], alone, rtol=0, atol=1e-12)
        assert (found[:, ~kept, row].abs() < 1e-12).all()


def test_a_source_may_be_longer_than_the_prompt_so_far():
    model, source = variant("pre"), torch.randn(1, 9, 10, dtype=torch.float64)
    prompt, name = some_tokens(1, (1, 3)), "blocks.0.resid_mid"
    for pos, columns in ((slice(2, 6), [8, 1, 4, 0]), (slice(1, None), [7, 6, 5, 4, 3, 2, 1, 0])):
        edit = edits.replace(source, pos=pos, source_pos=columns)
        with HookedRunner(model).hooks({name: edit}):
            (made,) = generate(model, prompt, max_new_tokens=4, stop=())

        def by_hand(value, point, first=pos.start, columns=columns):
            n = min(len(columns), value.shape[1] - first)
            value[:, first : first + n] = source[:, columns[:n]]

        for end in range(3, 7):
            text = torch.tensor([made[:end]])
            logits = HookedRunner(model).run_with_hooks(text, hooks={name: by_hand})
            assert logits[0, -1].argmax() == made[end]


def test_pieces_of_a_padded_batch_are_edited_as_in_one():
    model, mask, tokens = variant("pre"), MASKS["left"], some_tokens(1, (BATCH, POS))
    with HookedRunner(model).hooks({"blocks.0.mlp_out": edits.zero(pos=[[2, 3], [0, 4], [5]])}):
        whole, cache = model(tokens, attention_mask=mask), KVCache()
        first = model(tokens[:, :4], attention_mask=mask[:, :4], kv_cache=cache)
        rest = model(tokens[:, 4:], attention_mask=mask, kv_cache=cache)
        pieces = torch.cat([first, rest], 1)
    torch.testing.assert_close(pieces[mask.bool()], whole[mask.bool()], rtol=0, atol=1e-12)
    with position_offset(4, mask):
        assert not edits.zero(pos=-1)(torch.ones(BATCH, 2), Point("any", ("batch", "pos")))[
            :, 1
        ].any()
