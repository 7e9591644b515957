"""Run cells in a real Jupyter kernel, and check what a notebook shows below them."""

import base64

import pytest

manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client")
pytest.importorskip("ipykernel", reason="needs ipykernel")

SETUP = """
import interp
from hooks import HookedRunner
from models import TrainingConfig, load, train
model = load("pydoc-4l")
"""


@pytest.fixture(scope="module")
def run_cell():
    """A function that runs a cell and returns the messages that it shows."""
    kernel, client = manager.start_new_kernel(kernel_name="python3")

    def run(code):
        shown = []
        reply = client.execute_interactive(code, timeout=120, output_hook=shown.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        return [(message["msg_type"], message["content"]) for message in shown]

    try:
        yield run
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def test_imports_and_a_model_print_nothing(run_cell):
    assert [kind for kind, _ in run_cell(SETUP)] == ["status", "execute_input", "status"]


@pytest.mark.parametrize("wait", ["pass", "import asyncio; await asyncio.sleep(0)"])
def test_hooks_stay_between_cells(run_cell, wait):
    run_cell(SETUP + f"{wait}; before = model('def f(x):')")
    run_cell(
        "handle = HookedRunner(model).add({'blocks.1.attn.z': lambda value, point: value * 0})\n"
        + wait
    )
    run_cell(f"{wait}; assert not (model('def f(x):') == before).all()")
    run_cell(f"handle.remove(); {wait}")
    run_cell(f"{wait}; assert (model('def f(x):') == before).all()")


def test_a_plot_shows_its_picture(run_cell):
    run_cell(SETUP)
    run_cell("pairs = interp.Pairs('if x in y:', 'if x is y:', metric=interp.log_prob('\\n'))")
    (picture,) = [
        content["data"]["image/png"]
        for kind, content in run_cell("interp.activation_patching(model, pairs).plot()")
        if kind == "execute_result"
    ]
    assert base64.b64decode(picture)[:4] == b"\x89PNG"


def test_training_shows_its_progress(run_cell):
    run_cell(SETUP)
    shown = run_cell(
        "result = train(model, [5, 7, 11] * 1000, TrainingConfig(steps=3, batch_size=1))"
    )
    frames = [content["data"]["text/plain"] for kind, content in shown if "display" in kind]
    assert "3/3" in frames[-1]


def test_a_bar_leaves_an_empty_output(run_cell):
    """One output shows all frames, and is empty at the end, also in the saved notebook."""
    shown = run_cell(
        "import time; from hooks.base import progress\n"
        "progress.DELAY = progress.EVERY = 0.05\n"
        "with progress.progress_bar('texts', total=3) as count:\n"
        "    count(2)\n"
        "    time.sleep(0.5)\n"
        "print('done')"
    )
    frames = [content for kind, content in shown if kind.endswith("display_data")]
    assert len({content["transient"]["display_id"] for content in frames}) == 1
    assert "texts:  67%" in frames[0]["data"]["text/plain"]
    assert frames[-1]["data"] == {"text/plain": ""}
    assert [content["text"] for kind, content in shown if kind == "stream"] == ["done\n"]
