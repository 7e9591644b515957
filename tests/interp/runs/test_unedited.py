"""The unedited run of a sweep frees the streams that nobody reads again."""

import pytest
import torch

from hooks import HookedRunner
from interp.metrics import log_prob
from interp.protocol import of
from interp.runs.rows import Batch, EditedRun
from interp.runs.unedited import Unedited
from tests.reference import some_tokens, variant

LAYERS = 5


def unedited(model, keep):
    text = of(model).to_tokens(some_tokens())
    return Unedited(
        HookedRunner(model), Batch(text, log_prob(3)), [EditedRun(0, [], pos=1)], keep=keep
    )


@torch.no_grad()
def test_streams_are_freed_except_the_kept_ones():
    model = variant("pre", n_layers=LAYERS)
    whole, run = unedited(model, None), unedited(model, [2])
    assert whole.is_resumable()
    assert run.is_resumable()
    sizes = [stream.untyped_storage().nbytes() for stream in run.streams]
    _, cache = HookedRunner(model).run_with_cache(some_tokens(), names="*.resid_*")
    names = [f"blocks.{layer}.resid_pre" for layer in range(LAYERS)]
    expected = [*(cache[name] for name in names), cache["resid_post", -1]]
    for layer, (stream, value) in enumerate(zip(run.streams, expected, strict=True)):
        assert stream.shape == value.shape
        if layer in (0, 2, LAYERS):
            assert torch.equal(stream, value)
        else:
            assert sizes[layer] == value.element_size()


@torch.no_grad()
@pytest.mark.parametrize("keep", [None, [2]])
def test_a_block_that_changes_its_input_in_place_is_noticed(keep):
    model = variant("pre", n_layers=LAYERS)
    block = model.blocks[3]

    def forward(resid, context):
        return type(block).forward(block, resid.mul_(2), context)

    block.forward = forward
    assert not unedited(model, keep).is_resumable()
