"""Where the tests of this folder run: on the CPU, which shows that they hold, and on a GPU if there is one."""

import contextlib

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def where(request):
    """The name of a device."""
    return request.param


@pytest.fixture
def without_stops(where):
    """A function that gives a `with` in which waiting for the GPU is an error."""

    @contextlib.contextmanager
    def guard():
        if where == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    return guard
