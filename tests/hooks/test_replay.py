"""`replay` runs one block again on given arguments.

The reference is the same arithmetic by hand.
"""

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint, Options
from hooks.base import _torch
from hooks.capture import Recorder
from hooks.point import Point
from hooks.replay import early_ends, replay

X = torch.tensor([[2.0, 3.0]])


class Scaled(nn.Module):
    """A block that computes `inner(x) * by + 1`, with a point before the 1 is added."""

    def __init__(self, by, inner):
        super().__init__()
        self.by, self.inner, self.out = by, inner, HookPoint("batch d")

    def forward(self, x):
        return self.out(self.inner(x) * self.by) + 1


@pytest.fixture
def blocks():
    """Two blocks that share the module `inner`."""
    inner = HookPoint("batch d")
    model = nn.Module()
    model.blocks = nn.ModuleList([Scaled(5, inner), Scaled(7, inner)])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    return model.eval()


def test_a_replay_with_edits_equals_the_block_by_hand(blocks):
    block = blocks.blocks[0]
    outside = blocks.blocks[1].out
    edits = [
        (block.inner, lambda output: output + 1 + len(outside._forward_hooks)),
        (block.inner, lambda output: output * 2),
        (outside, lambda output: output * 0),
        (blocks, lambda output: output * 0),
    ]
    point = HookedRunner(block).points["out"]
    recorder = Recorder({"out": point}, Options())
    output = replay(block, (X,), {}, edits, recorder)
    assert recorder.values["out"].tolist() == [[30, 40]]  # (x + 1) * 2 * 5
    assert output.tolist() == [[31, 41]]
    assert replay(block, (X,), {}, []).tolist() == [[11, 16]]


def test_sessions_of_the_thread_keep_silent_and_the_users_own_hooks_do_not(blocks):
    block, runner = blocks.blocks[0], HookedRunner(blocks)
    block.register_forward_hook(lambda module, args, output: output + 100)
    with runner.hooks({"blocks.0.out": lambda value, point: value * 0}):
        assert replay(block, (X,), {}, []).tolist() == [[111, 116]]
        with pytest.raises(ZeroDivisionError):
            replay(block, (X,), {}, [(block.inner, lambda output: 1 / 0)])
        assert block(X).tolist() == [[101, 101]]
    assert not block.inner._forward_hooks


def test_a_shared_module_is_found_by_the_block_that_runs(blocks):
    runner = HookedRunner(blocks)
    names = ["blocks.0.inner", "blocks.1.inner"]
    _, lazy = runner.run_with_cache(X, names=names, lazy=True)
    assert [lazy[name].tolist() for name in names] == [[[2, 3]], [[11, 16]]]
    # The two blocks share `inner`, so the edit acts in both.
    with runner.hooks({"blocks.1.inner": lambda value, point: value + 1}):
        _, lazy = runner.run_with_cache(X, names=names, lazy=True)
    assert [lazy[name].tolist() for name in reversed(names)] == [[[17, 22]], [[3, 4]]]


def ends(block, *names):
    """Return the modules after which a second run of a block may end, for points of these names."""
    points = {name: Point(name, module=block.get_submodule(name)) for name in names}
    return [end.module for end in early_ends(block, points)]


def test_a_run_ends_after_z_if_no_other_value_of_attention_is_needed(model):
    block = model.blocks[1]
    assert ends(block, "attn.pattern", "attn.q", "resid_post") == [block.attn.z]
    # The output map comes after z, so the output of attention is compared too.
    assert ends(block, "attn.pattern", "attn.output") == [block.attn.z, block.attn]
    assert ends(block, "attn") == [block.attn.z, block.attn]


@pytest.mark.parametrize("place", ["block", "attention"])
def test_no_run_ends_early_if_something_may_act_at_the_end(model, monkeypatch, place):
    """Something may act at the end of the block, or of attention, whose end is after z."""
    block = model.blocks[1]
    module = block if place == "block" else block.attn
    other_ends = [] if place == "block" else [block.attn]

    def found():
        return ends(block, "attn.pattern")

    assert found() == [block.attn.z]
    # Hooks of this package may miss the end of a run.
    with HookedRunner(model).hooks({f"blocks.1{'.attn' * (place == 'attention')}": lambda v, p: v}):
        assert found() == [block.attn.z]
    forward = module.forward
    module.forward = lambda *args: forward(*args)
    assert found() == other_ends
    del module.forward
    handle = module.register_forward_hook(lambda module, args, output: None)
    assert found() == other_ends
    handle.remove()
    assert found() == [block.attn.z]
    with monkeypatch.context() as patched:
        patched.setattr(_torch, "has_shards", lambda part: part is module)
        assert found() == other_ends
    module.compile(backend="eager")
    assert found() == other_ends
