"""Fixtures.

They import the packages themselves, because the shape checks only affect later imports.
"""

import collections
import functools
import math
import os
import signal
import sys
import threading
import types

# One thread for each of pytest's processes, and for the programs that tests start. PyTorch reads it
# once.
os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import pytest
import torch

_jaxtyped = jaxtyping.jaxtyped
# The number of checked calls of each function; with --full, all calls are checked.
_checks = types.SimpleNamespace(test=object(), most=4)


def jaxtyped(*, typechecker):
    """Return the decorator for shape checks of every function. It checks a few calls in each test.

    Checking all calls would take a third of the time. mypy checks functions that declare no shape.
    """

    def decorate(thing):
        if not isinstance(thing, types.FunctionType):
            return _jaxtyped(typechecker=typechecker)(thing)
        if "jaxtyping." not in repr(thing.__annotations__):
            return thing
        checked, test, calls = None, None, 0

        @functools.wraps(thing)
        def partly_checked(*args, **kwargs):
            nonlocal checked, test, calls
            calls = calls + 1 if test is _checks.test else 1
            test = _checks.test
            if calls > _checks.most:
                return thing(*args, **kwargs)
            checked = checked or _jaxtyped(typechecker=typechecker)(thing)
            return checked(*args, **kwargs)

        return partly_checked

    return decorate


jaxtyping.jaxtyped = jaxtyped

BATCH, POS, LAYERS, HEADS, D_HEAD, D_MODEL, D_MLP, VOCAB, N_CTX = 4, 7, 3, 2, 5, 10, 13, 23, 17


def pytest_addoption(parser):
    """Adds the option that runs whole tables instead of a sample."""
    parser.addoption("--full", action="store_true", help="all jobs on all architectures")


def pytest_configure(config):
    """Checks the shapes of all calls with `--full`."""
    if config.getoption("full"):
        _checks.most = math.inf


# Cases that a run leaves out, by the mark that leaves them out.
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config, items):
    """Without `--full`, leaves out tests marked `full`, and all but each n-th case of those marked
    `sampled(n)`.
    """
    if config.getoption("full"):
        return
    kept, seen, left_out = [], collections.Counter(), {"sampled": 0, "full": 0}
    for item in items:
        marker = item.get_closest_marker("sampled")
        function = item.parent, getattr(item, "originalname", item.name)
        n, case = marker.args[0] if marker else 1, seen[function]
        seen[function] += 1
        if item.get_closest_marker("full"):
            left_out["full"] += 1
        # Turned by one after n cases, so that every value of every parameter is met.
        elif case % n != case // n % n:
            left_out["sampled"] += 1
        else:
            kept.append(item)
    items[:] = kept
    config.stash[LEFT_OUT] = left_out
    if hasattr(config, "workeroutput"):  # in one of several processes, which tells the first
        config.workeroutput["left_out"] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Store the counts of one process.

    Every process collects all tests, so all counts are equal.
    """
    if counts := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = counts


def pytest_terminal_summary(terminalreporter, config):
    """Print the number of cases that were left out."""
    counts = config.stash.get(LEFT_OUT, {})
    if any(counts.values()):
        terminalreporter.write_line(
            f"left out without --full: {counts['sampled']} cases of tests that are sampled, "
            f"and {counts['full']} that are marked full"
        )


@pytest.fixture(autouse=True)
def seeded():
    """Use the same seed in every test, and reset the shape checks."""
    _checks.test = object()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def hears_ctrl_c():
    """Enable Ctrl-C as on a terminal, and restore its handler after the test.

    It is ignored under `nohup`, in background jobs and in some CI systems. The command line leaves
    a handler that ends the process, and the next Ctrl-C in a test would end the worker.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def shared_models_are_unchanged():
    """The tests of a module leave the model that ships as it came."""
    yield
    if shipped := sys.modules.get("tests.shipped"):
        shipped.pydoc.require_unchanged()


@pytest.fixture
def model():
    """A small random transformer whose sizes all differ, with weights large enough to matter."""
    from models import Transformer, TransformerConfig

    config = TransformerConfig(
        vocab_size=VOCAB, n_ctx=N_CTX, n_layers=LAYERS, n_heads=HEADS, d_model=D_MODEL, d_mlp=D_MLP
    )
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


@pytest.fixture
def tokens():
    """[batch, pos] tokens."""
    return torch.randint(VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def runner(model):
    """A runner over the small transformer."""
    from hooks import HookedRunner

    return HookedRunner(model)


@pytest.fixture
def unchecked():
    """Without the shape checks, as users run: for errors that the checks would forestall."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
