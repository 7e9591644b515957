"""The table of the guide about many GPUs: which jobs work on a model that several devices hold.

`python -m tests.models.attached.test_across_devices` writes the table. Each job runs on a small
Llama on one device, and on the same Llama in each setting. "yes" means that the values agree to
1e-5 of the largest value. `python -m tests.models.attached.test_across_devices FOLDER RANK` runs
one of the two processes of the last two settings, and saves its cells.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from models import attach
from tests.attachable import IS_5_24
from tests.pretended import DEVICE, SECOND, Devices
from tests.small_llama import TOKENS, llama, offloaded, transformers

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

PAGE = Path(__file__).parents[3] / "examples" / "guides" / "many_gpus.md"
# The table stands between these two lines of the page.
BEGIN, END = "<!-- table of jobs -->\n", "<!-- end of the table -->\n"


def pairs():
    from interp import Pairs

    return Pairs(TOKENS, TOKENS.roll(1, 1), torch.tensor([[5, 9], [3, 7]]))


def caches(model):
    from hooks import HookedRunner

    _, cache = HookedRunner(model).run_with_cache(TOKENS, names=["*.resid_post", "*.pattern"])
    return [cache[name] for name in cache]


def edits(model):
    from hooks import HookedRunner
    from interp.edits import zero

    return HookedRunner(model).run_with_hooks(TOKENS, hooks={"*.1.*.z": zero(head=2)}).logits


def generation(model):
    return model.generate(TOKENS, max_new_tokens=3, do_sample=False)


def patching(model):
    from interp import activation_patching

    return activation_patching(model, pairs(), "z", ("layer", "head")).values


def attribution(model):
    from interp import attribution_patching

    return attribution_patching(model, pairs(), "z", ("layer", "head")).values


def edges(model):
    from interp import edge_attribution

    return edge_attribution(model, pairs()).values


def lens(model):
    from hooks import HookedRunner
    from interp import logit_lens

    _, cache = HookedRunner(model).run_with_cache(TOKENS, names="*.resid_*")
    return logit_lens(model, cache, targets=TOKENS).target_probabilities


def direct(model):
    from hooks import HookedRunner
    from interp import direct_logit_attribution

    _, cache = HookedRunner(model).run_with_cache(TOKENS, lazy=True)
    right, wrong = pairs().answers.T
    return direct_logit_attribution(model, cache, right=right, wrong=wrong).values


JOBS = {
    "caches": caches,
    "edits": edits,
    "generation": generation,
    "activation patching": patching,
    "attribution patching": attribution,
    "logit lens": lens,
    "direct logit attribution": direct,
    "edges": edges,
}


def results(model):
    """Return the result of each job: tensors on the CPU, or an error as text."""
    found = {}
    with attach(model):
        for name, job in JOBS.items():
            try:
                value = job(model)
                found[name] = tree_map(lambda leaf: torch.as_tensor(leaf).cpu(), value)
            except Exception as error:
                rule = str(error).partition(";")[0]
                found[name] = f"{type(error).__name__}: {rule}"
    return found


def cell(value, expected):
    """Return "yes", or how the result of a job differs."""
    if isinstance(value, str):
        return value.replace("|", "/")
    for one, other in zip(tree_leaves(value), tree_leaves(expected), strict=True):
        if (one - other).abs().max() > 1e-5 * other.abs().max():
            return "other numbers"
    return "yes"


@contextlib.contextmanager
def two_devices():
    with Devices():
        parts = {"model.embed_tokens": DEVICE, "model.layers.0": DEVICE, "model.rotary_emb": DEVICE}
        parts |= {"model.layers.1": SECOND, "model.norm": SECOND, "lm_head": SECOND}
        yield accelerate.dispatch_model(llama(), parts, main_device=DEVICE, force_hooks=True)


@contextlib.contextmanager
def offload(how):
    yield offloaded(how)


def tensor_parallel(folder):
    from transformers.distributed import DistributedConfig

    split = DistributedConfig(tp_plan="auto", tp_size=2)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(f"{folder}/llama", dtype=torch.float32, distributed_config=split).eval()


def fully_sharded(folder, processes=2):
    from torch.distributed.fsdp import fully_shard

    model = llama()
    mesh = torch.distributed.init_device_mesh("cpu", (processes,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


IN_ONE_PROCESS = {
    "`device_map`: blocks on two devices (pretended)": two_devices,
    "offload to the CPU (accelerate)": lambda: offload("cpu"),
    "offload to a disk (accelerate)": lambda: offload("disk"),
}
IN_TWO_PROCESSES = {
    "tensor parallel, two processes (gloo)": tensor_parallel,
    "FSDP2, two processes (gloo)": fully_sharded,
}


def work(folder, rank):
    """Run one of the two processes, and save its cells."""
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    expected, rows = results(llama()), {}
    for name, made in IN_TWO_PROCESSES.items():
        found = results(made(folder))
        rows[name] = [cell(found[job], expected[job]) for job in JOBS]
    torch.distributed.destroy_process_group()
    Path(folder, f"rows.{rank}").write_text(json.dumps(rows))


def rows_of_two_processes():
    """Return the cells of the settings that need two processes. Both have the same cells."""
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(f"{folder}/llama")
        command = [sys.executable, "-m", "tests.models.attached.test_across_devices", folder]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        started = [subprocess.Popen([*command, rank], **quiet) for rank in "01"]
        try:
            errors = [process.communicate(timeout=240)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], errors
        one, other = (json.loads(Path(folder, f"rows.{rank}").read_text()) for rank in "01")
    assert one == other
    return one


@torch.no_grad()
def table():
    """Return the table as Markdown."""
    expected, rows = results(llama()), {}
    for name, made in IN_ONE_PROCESS.items():
        with made() as model:
            found = results(model)
        rows[name] = [cell(found[job], expected[job]) for job in JOBS]
    rows |= rows_of_two_processes()
    # Each job is a line, because an error needs the width of the page.
    lines = [["job", *rows], ["---"] * (1 + len(rows))]
    for number, job in enumerate(JOBS):
        lines.append([job, *(cells[number] for cells in rows.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not IS_5_24, reason="the table is that of transformers 5.24")
def test_the_table_matches_the_guide():
    assert BEGIN + table() + END in PAGE.read_text(encoding="utf-8")


@torch.no_grad()
def test_effects_of_a_device_map_equal_one_device():
    with attach(model := llama()):
        expected = patching(model)
    with two_devices() as model, attach(model):
        torch.testing.assert_close(patching(model).cpu(), expected, rtol=0, atol=1e-5)


def points(model):
    from hooks import HookedRunner

    with attach(model):
        return HookedRunner(model).table()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_attach_finds_norms_whose_weights_fsdp_divides(tmp_path):
    expected = points(llama())
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert points(fully_sharded(tmp_path, processes=1)) == expected
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        work(*sys.argv[1:])
    else:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
