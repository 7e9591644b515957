"""Fixtures, shape checks and options of the tests.

Fixtures import the packages inside their functions. At the top of this file, the packages would be
imported before the shape checks are switched on, and would not be checked.
"""

import collections
import functools
import gc
import math
import os
import signal
import sys
import threading
import types

# Use one thread in each process of pytest, and in the programs that tests start. PyTorch reads the
# variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import pytest
import torch

_jaxtyped = jaxtyping.jaxtyped
# `most` is the number of calls of each function that are checked in a test (with --full: all).
# `test` is a new object for each test, so a function knows when a new test has begun.
_checks = types.SimpleNamespace(test=object(), most=1)


def jaxtyped(*, typechecker):
    """Return a decorator that checks the shapes of the first call of a function in each test.

    It replaces jaxtyping's own decorator. Checking all calls would take a third of the time of the
    tests, and checking four calls a tenth. Functions without shapes in their annotations are left
    to mypy.
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
    """Add the option `--full`, which runs all cases of the tests instead of a sample."""
    parser.addoption("--full", action="store_true", help="all jobs on all architectures")


def pytest_configure(config):
    """With `--full`, check the shapes of all calls."""
    if config.getoption("full"):
        _checks.most = math.inf


# The key of the numbers of cases that a run leaves out, one number for each mark.
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config, items):
    """Without `--full`, leave out some tests.

    Tests that are marked `full` do not run. Of tests that are marked `sampled(n)`, every n-th case
    runs.
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
        # Divide the cases into groups of n. Keep the first case of the first group, the second case
        # of the second group, and so on. If the first case of every group were kept, some values of
        # a parameter would never run.
        elif case % n != case // n % n:
            left_out["sampled"] += 1
        else:
            kept.append(item)
    items[:] = kept
    config.stash[LEFT_OUT] = left_out
    # A process that pytest-xdist started sends the numbers to the main process.
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = left_out


def pytest_sessionstart():
    """Do not search for garbage while modules are imported and tests are collected."""
    gc.disable()


def pytest_collection_finish():
    """Search for garbage again, but never among the objects that exist now.

    The modules and the tests are millions of objects that live until the end. Searching all of them
    again and again would take a tenth of the time of the tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """In the main process, store the numbers of left out cases that another process sent.

    Every process collects all tests, so all processes send the same numbers.
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

    Under `nohup`, in background jobs and in some CI systems, Ctrl-C is ignored. The handler must be
    restored, because the command line installs a handler that ends the process. With this handler,
    the next Ctrl-C in a test would end the process of pytest.
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
    """Check after each test file that no test has changed the shared model of `tests.shipped`."""
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
    """Random tokens [batch, pos]."""
    return torch.randint(VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def runner(model):
    """A runner over the small transformer."""
    from hooks import HookedRunner

    return HookedRunner(model)


@pytest.fixture
def unchecked():
    """Switch the shape checks off during a test, as they are for users.

    A wrong shape then reaches the error of the package.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
