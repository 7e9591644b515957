"""Interrupt a call at every place where Ctrl-C can act.

After each interrupt, everything that the call switched on must be off, and the model must not have
changed.
"""

import gc
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hooks import HookedRunner, HookPoint, position_offset, start_of_piece
from hooks.base import Scoped, peak_bytes, skip_token_checks, skips_token_checks, without_gradients
from hooks.session import hooks_disabled
from tests.hooks.registered import hooks_of

SCOPED = Scoped("number", 0)
X = torch.randn(2, 3)


class Interrupt(BaseException):
    pass


def interrupted(call, stride):
    """Run `call` again and again, each time with an interrupt at a later place.

    Python looks for signals at these places: where a function begins, and where a function written
    in C has returned. Yield the number and the line of each place. With a `stride` above 1, some
    places are left out.
    """
    for place in itertools.count(1, stride):
        left, where = place, ""

        def step(frame, event, arg):
            nonlocal left, where
            left -= event in ("call", "c_return")
            if left == 0:
                left = -1
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise Interrupt

        sys.setprofile(step)
        try:
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        if left > 0:
            return
        yield f"place {place}, {where}"


def model():
    block = nn.Sequential(nn.Linear(3, 3), HookPoint("batch d"))
    return nn.Sequential(nn.ModuleList([block]), nn.LayerNorm(3)).eval()


def scoped(runner):
    with SCOPED.set(5):
        assert SCOPED.get() == 5


def checks(runner):
    with skip_token_checks():
        assert skips_token_checks()


def piece(runner):
    with position_offset(5):
        assert start_of_piece() == 5


def edited(runner):
    with runner.hooks({"0.0.1": lambda value, point: value * 2}):
        runner.model(X)


def read(runner):
    with runner.hooks({"0.0.1": lambda value, point: value * 2}):
        _, cache = runner.run_with_cache(X, lazy=True)
    cache["0.0.1"]


CALLS = {
    "scoped": scoped,
    "skip_token_checks": checks,
    "piece": piece,
    "hooks": edited,
    "lazy": read,
    "hooks_disabled": lambda runner: hooks_disabled(runner.model, X),
    "bytes": lambda runner: peak_bytes(lambda: X + 1),
    "no gradients": lambda runner: without_gradients(lambda: X + 1)(),
}


@pytest.mark.sampled(8)
# An interrupted generator causes this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", CALLS)
def test_an_interrupt_leaves_nothing_behind(kind):
    made = model()
    made.forward = lambda x: made[1](made[0][0](x))
    plain, hooks = made(X), hooks_of(made)
    runner = HookedRunner(made)
    # Some work is done only in the first call, so make that call before the ones under test.
    CALLS[kind](runner)
    with runner.hooks({"0.0.1": lambda value, point: value + 1}):
        outer = made(X)
        for place in interrupted(lambda: CALLS[kind](runner), 1 + 12 * (kind == "lazy")):
            assert torch.is_grad_enabled(), place
            assert not _get_current_dispatch_mode_stack(), place
            assert (SCOPED.get(), skips_token_checks(), start_of_piece()) == (0, False, None), place
            assert {p.dtype for p in made.parameters()} == {torch.float32}, place
            assert torch.equal(made(X), outer), place
    gc.collect()
    assert hooks_of(made) == hooks
    assert torch.equal(made(X), plain)
