"""The memory limit: how much memory is free, read from files of Linux that the tests write, and
runs that would need more.
"""

import gc
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch

from hooks import CacheError, HookedRunner, MemoryLimitError
from hooks.base import memory
from hooks.base.memory import Bound, free_memory
from interp import run_with_cache
from models import Transformer, TransformerConfig, attach
from tests import tiny
from tests.count import ROOT

CPU = torch.device("cpu")
TOKENS = torch.randint(23, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def deep():
    config = TransformerConfig(vocab_size=23, n_ctx=17, n_layers=5, n_heads=3, d_model=12, d_mlp=7)
    return Transformer(config).eval()


@pytest.fixture
def room(monkeypatch):
    """A function that sets the number of free bytes. The limit then also holds for small runs."""

    def free(n_bytes):
        monkeypatch.setattr(memory, "free_memory", lambda device: n_bytes)
        monkeypatch.setattr(memory, "_FIRST_LOOK", 100)

    return free


def _system(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return free_memory(CPU, root)


def test_free_memory_is_the_least_of_the_system_and_its_groups(tmp_path):
    assert free_memory(CPU, tmp_path) is None
    system = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     700 kB\nCached: 5 kB\n"}
    assert _system(tmp_path / "system", system) == 700 * 1024
    group = "sys/fs/cgroup/jobs/mine"
    second = system | {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "4\n",
        "sys/fs/cgroup/jobs/memory.max": "500000\n",
        "sys/fs/cgroup/jobs/memory.current": "300000\n",
        "sys/fs/cgroup/jobs/memory.stat": "anon 9\ninactive_file 20000\nactive_file 7\n",
    }
    assert _system(tmp_path / "second", second) == 500_000 - 300_000 + 20_000
    # Inside a container, the path of the group may not exist. Only the outermost group exists.
    group = "sys/fs/cgroup/memory"
    first = system | {
        "proc/self/cgroup": "9:cpu:/a\n4:memory:/a/b\n0::/\n",
        f"{group}/memory.limit_in_bytes": "600000\n",
        f"{group}/memory.usage_in_bytes": "250000\n",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 30000\n",
        "sys/fs/cgroup/cpu/memory.limit_in_bytes": "3\n",
    }
    assert _system(tmp_path / "first", first) == 600_000 - 250_000 + 30_000
    first[f"{group}/memory.usage_in_bytes"] = "700000\n"
    assert _system(tmp_path / "over", first) == 0
    assert 0 < free_memory(CPU) < 2**50


@pytest.mark.parametrize("options", [{"mode": "full"}, {"names": ["*.scores", "*.pre"]}])
def test_a_run_is_refused_above_max_bytes_and_not_below(deep, options):
    runner, layers = HookedRunner(deep), []
    handle = deep.blocks[2].register_forward_hook(lambda *args: layers.append(2))
    needed = runner.run_with_cache(TOKENS, **options)[1].nbytes
    _, cache = runner.run_with_cache(TOKENS, **options, max_bytes=int(1.1 * needed))
    assert cache.nbytes == needed
    layers.clear()
    for share in (0.9, 0.5, 0.05):
        with pytest.raises(MemoryLimitError, match="max_bytes"):
            runner.run_with_cache(TOKENS, **options, max_bytes=int(share * needed))
    assert not layers, "known after the second layer"
    assert runner.plan(TOKENS, **options, max_bytes=3).nbytes >= needed, "a plan says it all"
    handle.remove()


@pytest.mark.parametrize("share", [0.3, 0.45, 0.7, 0.9])
def test_the_selection_that_is_named_fits(deep, share):
    _, whole = run_with_cache(deep, TOKENS, mode="full")
    bound = int(share * whole.nbytes)
    with pytest.raises(MemoryLimitError) as told:
        run_with_cache(deep, TOKENS, mode="full", max_bytes=bound)
    # A user would copy the selector from the message.
    selector = eval(str(told.value).partition("names=")[2])
    _, cache = run_with_cache(deep, TOKENS, names=selector, max_bytes=bound)
    assert bound / 3 < cache.nbytes <= bound
    assert not {"blocks.0.attn.scores", "blocks.4.attn.scores"} & {*cache}
    with pytest.raises(MemoryLimitError, match="use lazy=True or pos=$"):
        # Not even one layer fits, so the message suggests no selector.
        run_with_cache(deep, TOKENS, mode="full", max_bytes=whole.nbytes // 9)


def test_free_memory_limits_a_run(deep, room):
    _, whole = run_with_cache(deep, TOKENS, mode="full")
    room(whole.nbytes // 2)
    kept = []
    deep.blocks[0].mlp.pre.register_forward_hook(lambda *args: kept.append(weakref.ref(args[2])))
    with pytest.raises(MemoryLimitError, match="is free"):
        run_with_cache(deep, TOKENS, mode="full")
    gc.disable()
    try:
        with pytest.raises(MemoryLimitError):
            run_with_cache(deep, TOKENS, mode="full", detach=True)
        assert kept
        assert not any(each() is not None for each in kept), "freed without the garbage collector"
    finally:
        gc.enable()
    room(2 * whole.nbytes)
    run_with_cache(deep, TOKENS, mode="full")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            "Max address space 600000 unlimited bytes\nMax data size unlimited unlimited bytes\n",
            600_000 - 300 * 1024,
        ),
        (
            "Max address space unlimited unlimited bytes\nMax data size 400000 500000 bytes\n",
            400_000 - 200 * 1024,
        ),
        ("Max address space 300000 300000 bytes\n", 0),
        ("Max address space unlimited unlimited bytes\n", 700 * 1024),
    ],
)
def test_the_limits_of_a_process_are_seen(limits, expected, tmp_path):
    sizes = "VmPeak:\t     900 kB\nVmSize:\t     300 kB\nVmData:\t  200 kB\n"
    files = {
        "proc/meminfo": "MemAvailable:     700 kB\n",
        "proc/self/limits": f"Limit      Soft Limit   Hard Limit  Units\n{limits}",
        "proc/self/status": f"Name: python\n{sizes}",
    }
    assert _system(tmp_path, files) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_run_under_ulimit_is_refused_before_the_allocator_ends_it():
    code = (
        "import resource, torch; from hooks import MemoryLimitError; from hooks.base.memory "
        "import *\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))\n"
        "assert 0 < free_memory(torch.device('cpu')) <= 2**28\n"
        "try: require_room(2**29, torch.empty(1), 'a test')\n"
        "except MemoryLimitError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "refused\n", done.stderr


def test_the_limit_counts_stored_inputs_of_lazy_runs_and_values_of_reads(deep, room):
    _, lazy = run_with_cache(deep, TOKENS, mode="full", lazy=True)
    stored = lazy.nbytes
    with pytest.raises(MemoryLimitError, match="shorter texts$"):
        run_with_cache(deep, TOKENS, mode="full", lazy=True, max_bytes=stored // 2)
    run_with_cache(deep, TOKENS, mode="full", lazy=True, max_bytes=2 * stored)
    patterns = 5 * lazy["pattern", 0].nbytes
    room(int(0.72 * patterns))
    for call in (lambda: lazy.stack("pattern"), lambda: lazy.to(torch.float64)):
        with pytest.raises(MemoryLimitError, match="at a time"):
            call()
    room(2 * patterns)
    assert lazy.stack("pattern").nbytes == patterns


def test_scores_of_one_layer_that_do_not_fit_are_refused_before_they_are_made(deep, room):
    runner = HookedRunner(deep)
    scores = 2 * 3 * 11 * 11 * 4
    room(3 * scores)
    with pytest.raises(MemoryLimitError, match="scores and pattern of a layer"):
        runner.run_with_cache(TOKENS, names="blocks.1.attn.pattern")
    # Fused attention forms no scores, so it needs no memory for them.
    runner.run_with_cache(TOKENS, names="blocks.1.mlp.post")
    room(4 * scores)
    runner.run_with_cache(TOKENS, names="blocks.1.attn.pattern")


def test_modules_that_may_be_skipped_are_refused_and_not_left_out():
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
    ).eval()
    runner, x = HookedRunner(model), torch.ones(2, 5)
    with pytest.raises(MemoryLimitError):
        runner.run_with_cache(x, max_bytes=100)
    assert len(runner.run_with_cache(x, max_bytes=136)[1]) == 3  # 2 rows of 7, 7 and 3 numbers


def test_scores_of_an_attached_model_are_refused_before_they_are_made(room):
    model = tiny.model("LlamaForCausalLM", num_attention_heads=3)
    scores = 2 * 3 * 11 * 11 * 4
    with attach(model):
        for free in (3 * scores, 4 * scores):
            room(free)
            ask = pytest.raises(MemoryLimitError, match="scores and pattern of a layer")
            with ask if free < 4 * scores else nullcontext():
                run_with_cache(model, TOKENS, names="blocks.1.attn.pattern")


def test_gradients_count_as_their_values(deep):
    runner, names = HookedRunner(deep), "*.mlp.pre"
    _, cache = runner.run_with_cache(TOKENS, names=names, grads=True)
    needed = 2 * cache.nbytes
    runner.run_with_cache(TOKENS, names=names, grads=True, max_bytes=needed)
    with pytest.raises(MemoryLimitError):
        runner.run_with_cache(TOKENS, names=names, grads=True, max_bytes=needed - 1)


def test_layers_of_another_dtype_are_not_rounded_into_one_tensor(deep):
    deep.blocks[3].mlp.double()
    deep.blocks[3].mlp.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    deep.blocks[3].mlp.register_forward_hook(lambda module, args, output: output.float())
    _, lazy = run_with_cache(deep, TOKENS, names="*.mlp.post", lazy=True)
    with pytest.raises(CacheError, match="all layers; got .*float32.*float64"):
        lazy.stack("mlp.post")


def test_memory_that_values_share_is_counted_once():
    values, bound = torch.zeros(200), Bound(["w", "x", "y", "z"], max_bytes=1650)
    bound.add("w", values[:50])
    bound.add("x", values[20:])
    # The three values share one tensor of 800 bytes.
    bound.add("y", values)
    with pytest.raises(MemoryLimitError):
        bound.add("z", torch.zeros(300))
