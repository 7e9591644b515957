"""The mask and the model that logits of a run tell: views keep both, and copies do not."""

import torch
from torch import nn

from hooks.base import mark_model, mark_padding, model_of_logits, padding_of

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
BATCH, POS, VOCAB = 3, 5, 7


def marked(mask=MASK):
    logits = torch.randn(BATCH, POS, VOCAB)
    mark_padding(logits, mask)
    return logits


def test_views_have_the_mask_of_their_texts_and_columns():
    logits = marked()
    for part in (
        lambda x: x,
        lambda x: x[1:],
        lambda x: x[::2, 1::2],
        lambda x: x[:, -2:],
        lambda x: x[2:3, :4],
        lambda x: x.transpose(0, 1),
    ):
        assert torch.equal(padding_of(part(logits)), part(MASK))
    assert torch.equal(padding_of(logits[..., 3:]), MASK)
    assert torch.equal(padding_of(logits.view(1, -1, VOCAB)), MASK.view(1, -1))


def test_copies_have_no_mask():
    logits = marked()
    for copy in (logits.clone(), logits * 2, logits[[1, 0]], logits.double()):
        assert padding_of(copy) is None


def test_a_write_into_the_mask_after_the_run_changes_nothing():
    mask = MASK.clone()
    logits = marked(mask)
    mask.zero_()
    assert torch.equal(padding_of(logits), MASK)


def test_a_mask_of_more_columns_ends_with_the_columns_of_the_logits():
    logits = marked(torch.cat([torch.tensor([[0], [1], [1]]), MASK], dim=1))
    assert torch.equal(padding_of(logits), MASK)


def test_a_single_column_has_the_last_column_of_the_mask():
    logits = torch.randn(BATCH, 1, VOCAB)
    mark_padding(logits, MASK)
    assert torch.equal(padding_of(logits), MASK[:, -1:])


def test_logits_without_a_mask_of_their_own_are_not_marked():
    assert padding_of(marked(None)) is None
    assert padding_of(marked(MASK[:2])) is None
    assert padding_of(marked(MASK[:, :4])) is None
    # A part of larger memory is not marked, because the mask would seem to be of the whole memory.
    whole = torch.randn(BATCH + 1, POS, VOCAB)
    mark_padding(whole[1:], MASK)
    assert padding_of(whole[1:]) is None
    swapped = torch.randn(POS, BATCH, VOCAB).transpose(0, 1)
    mark_padding(swapped, MASK)
    assert padding_of(swapped) is None
    classes = torch.randn(BATCH, VOCAB)
    mark_padding(classes, MASK)
    assert not hasattr(classes.untyped_storage(), "padding")


def test_transforms_of_pytorch_hide_the_mask():
    found = []

    def read(logits):
        found.append(padding_of(logits))
        return logits.sum()

    torch.vmap(read)(marked()[None])
    assert found == [None]


def test_logits_tell_their_model_while_it_exists():
    model, logits = nn.Linear(2, 3), marked()
    mark_model(logits, model)
    for view in (logits, logits[1:], logits[:, -1], logits.detach()):
        assert model_of_logits(view) is model
    for copy in (logits.clone(), logits * 2, logits[[1, 0]]):
        assert model_of_logits(copy) is None
    assert torch.vmap(lambda row: row.sum() if model_of_logits(row) is None else row)(
        logits
    ).shape == (3,)
    del model
    assert model_of_logits(logits) is None
