"""Fixtures of the tests for GPUs.

The tests run on the CPU, which shows that the tests themselves are right, and on a GPU if there is
one.
"""

import contextlib
import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def as_stated(request):
    """Compute products of float32 in float32, and let warnings be warnings.

    The environment of the machine may choose a lower precision. If a warning were an error, it
    could leave a mode of PyTorch switched on.
    """
    if not request.node.get_closest_marker("filterwarnings"):
        warnings.simplefilter("default")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def where(request):
    """The name of the device of a test."""
    return request.param


@pytest.fixture
def without_stops(where):
    """A function that returns a context for a `with`, in which waiting for the GPU is an error."""

    @contextlib.contextmanager
    def guard():
        try:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    return guard
