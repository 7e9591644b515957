"""Modules that run several times in one run: all calls are cached, and one call can be edited."""

import copy

import pytest
import torch
from torch import nn

from hooks import CacheError, EditError, HookedRunner, HookError, HookPoint
from interp import edits, log_prob, sweep
from models import Transformer, TransformerConfig
from tests import tiny


class Recurrent(nn.Module):
    """A recurrent network: a cell that runs once per token, a point at its state, a linear map."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.cell = nn.GRUCell(3, 5)
        self.state = HookPoint("batch d_model", "the state after a step")
        self.out = nn.Linear(5, 11)
        self.last = HookPoint("batch pos vocab")

    def forward(self, tokens):
        state = torch.zeros(len(tokens), 5)
        for step in self.embed(tokens).unbind(1):
            state = self.state(self.cell(step, state))
        return self.last(self.out(state)[:, None])


TOKENS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def by_hand(model, change):
    state, states = torch.zeros(2, 5), []
    for n, step in enumerate(model.embed(TOKENS).unbind(1)):
        state = change(n, model.cell(step, state))
        states.append(state)
    return torch.stack(states), model.out(state)[:, None]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Recurrent().eval()


@torch.no_grad()
def test_each_call_is_kept(model):
    runner = HookedRunner(model)
    states, logits = by_hand(model, lambda n, state: state)
    with pytest.raises(HookError, match="calls='all' stores all values"):
        runner.run_with_cache(TOKENS)
    output, cache = runner.run_with_cache(TOKENS, calls="all")
    assert torch.equal(output, logits)
    assert torch.equal(cache["state"], states)
    assert cache.axes("state") == ("call", "batch", "d_model")
    # A module with one call has the axis of calls too.
    assert cache["last"].shape == (1, 2, 1, 11)
    captured = runner.capture(TOKENS, names="state", calls="all")
    assert torch.equal(captured["state"], states)
    assert torch.equal(captured.at(call=2, batch=1)["state"], states[2, 1])
    assert runner.plan(TOKENS, calls="all").values["state"].shape == (4, 2, 5)
    halved = runner.run_with_cache(TOKENS, calls="all", dtype=torch.float16)[1]
    assert torch.equal(halved["state"], states.half())
    # A module without points can be cached in the same way: its value is its output.
    cells = runner.run_with_cache(TOKENS, names="cell", calls="all")[1]
    assert torch.equal(cells["cell"], states)


def test_calls_with_a_graph(model):
    _, cache = HookedRunner(model).run_with_cache(TOKENS, calls="all", detach=False)
    (gradient,) = torch.autograd.grad(cache["state"][1].sum(), model.cell.bias_ih)
    states, _ = by_hand(model, lambda n, state: state)
    (wanted,) = torch.autograd.grad(states[1].sum(), model.cell.bias_ih)
    torch.testing.assert_close(gradient, wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    ("calls", "chosen"),
    [(1, [1]), ([0, 2], [0, 2]), (slice(2, None), [2, 3]), ([True, False, False, True], [0, 3])],
)
def test_edits_act_at_calls(model, calls, chosen):
    edit = edits.scale(-2.0, d_model=slice(1, 3), call=calls)

    def change(n, state):
        if n in chosen:
            state = state.clone()
            state[:, 1:3] *= -2
        return state

    runner, (states, logits) = HookedRunner(model), by_hand(model, change)
    for _ in range(2):  # the second run counts its calls from 0 again
        with runner.hooks({"state": edit}):
            output, cache = runner.run_with_cache(TOKENS, calls="all")
        assert torch.equal(output, logits)
        assert torch.equal(cache["state"], states)


@torch.no_grad()
def test_sweeps_count_calls(model):
    metric = log_prob(7)
    swept = sweep(model, TOKENS, [{"state": edits.zero(call=n)} for n in range(4)], metric)
    plain = metric(model(TOKENS))
    for n, effect in enumerate(swept.values):
        _, logits = by_hand(model, lambda at, state, n=n: state * (at != n))
        torch.testing.assert_close(effect, metric(logits) - plain)


@torch.no_grad()
def test_sweeps_of_blocks_count_calls():
    """Two blocks share one point. A sweep must not begin in the middle of the model here, because
    the calls of the point would then be counted from the wrong number.
    """
    sizes = dict(vocab_size=11, n_ctx=5, n_layers=3, n_heads=2, d_model=8)
    torch.manual_seed(0)
    apart = Transformer(TransformerConfig(**sizes)).eval()
    shared = copy.deepcopy(apart)
    shared.blocks[2].mlp_out = shared.blocks[1].mlp_out
    one = sweep(shared, TOKENS, [{"blocks.1.mlp_out": edits.zero(call=1)}], log_prob(7))
    two = sweep(apart, TOKENS, [{"blocks.2.mlp_out": edits.zero()}], log_prob(7))
    torch.testing.assert_close(one.values, two.values)


@torch.no_grad()
def test_wrong_calls_are_errors(model):
    runner = HookedRunner(model)
    # With shape checks, the checker of annotations raises a TypeError first.
    with pytest.raises((ValueError, TypeError), match="both"):
        runner.run_with_cache(TOKENS, calls="both")
    with pytest.raises(ValueError, match="calls='all' cannot be combined"):
        runner.run_with_cache(TOKENS, calls="all", run=model)
    with torch.enable_grad(), pytest.raises(ValueError, match="calls='all' keeps no gradients"):
        runner.run_with_cache(TOKENS, calls="all", grads=True)
    with pytest.raises(EditError, match="numbers from 0"):
        runner.run_with_hooks(TOKENS, hooks={"state": edits.zero(call=-1)})
    with pytest.raises(EditError, match="does not count calls"):
        edits.zero(call=0)(torch.ones(2, 5), runner.points["state"])


@torch.no_grad()
def test_a_shared_block():
    """ALBERT runs one block again and again, instead of several blocks."""
    model = tiny.model("AlbertForMaskedLM", embedding_size=6, num_hidden_layers=3)
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    hidden = model(TOKENS, output_hidden_states=True).hidden_states
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache(TOKENS, names=block, calls="all")
    assert torch.equal(cache[block], torch.stack(hidden[1:]))
    doubled = runner.run_with_hooks(TOKENS, hooks={block: edits.scale(2.0, call=1)}).logits
    calls = iter(range(3))
    handle = model.get_submodule(block).register_forward_hook(
        lambda module, args, out: out * 2 if next(calls) == 1 else out
    )
    assert torch.equal(doubled, model(TOKENS).logits)
    handle.remove()


class Shrinking(nn.Module):
    """A module whose output has another shape in each call."""

    def __init__(self):
        super().__init__()
        self.pool = nn.MaxPool1d(2)

    def forward(self, x):
        return self.pool(self.pool(x))


def test_calls_of_several_shapes_have_no_axis():
    runner = HookedRunner(Shrinking())
    with pytest.raises(HookError, match=r"calls of pool must have one shape"):
        runner.run_with_cache(torch.ones(2, 8), names="pool", calls="all")
    assert not issubclass(HookError, CacheError)
