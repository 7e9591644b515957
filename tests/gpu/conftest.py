"""Where the tests of this folder run: on the CPU, which shows that they hold, and on a GPU if there
is one.
"""

import contextlib
import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def as_stated(request):
    """Float32 products in float32, whatever an image's environment says, and warnings that are no
    errors.

    PyTorch warns at the first guard below, say, and an error there would leave the guard switched
    on.
    """
    if not request.node.get_closest_marker("filterwarnings"):
        warnings.simplefilter("default")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def where(request):
    """The name of a device."""
    return request.param


@pytest.fixture
def without_stops(where):
    """A function that gives a `with` in which waiting for the GPU is an error."""

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
