"""Executors: the files equal the files of one process, also if a worker is killed.

Errors reach the caller unchanged.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from hooks import HookedRunner, HookError
from interp import edits
from interp.store import HarvestConfig, Ray, harvest
from models import load
from tests.interp.many.analyses import make_pydoc_at_second_call
from tests.shipped import pydoc

NAME = "blocks.1.mlp_out"
TEXTS = [f"part {n} of the list, and more of it " * (1 + n % 5) for n in range(240)]


def working():
    """Return the numbers of the processes in which workers of Ray run a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(b"ray::Worker.run"):
            found.append(int(path.parent.name))
    return found


def kill_one(out, killed):
    """Kill a worker after a few files."""
    for _ in range(6000):
        if len([*out.glob("values-*.safetensors")]) >= 8 and (processes := working()):
            os.kill(processes[0], signal.SIGKILL)
            return killed.append(processes[0])
        time.sleep(0.01)
    return None


@pytest.mark.full
# Ray gives warnings.
@pytest.mark.filterwarnings("default")
def test_a_cluster_writes_the_files_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    corpus, out, killed = tmp_path / "texts.txt", tmp_path / "ray", []
    corpus.write_text("".join(text + "\n" for text in TEXTS))
    one = harvest(pydoc(), corpus, NAME, tmp_path / "one", config=HarvestConfig(per_file=4))
    killer = threading.Thread(target=kill_one, args=(out, killed))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        killer.start()
        # There are only two cores. The third worker does not start, and the others do its jobs.
        store = harvest(
            partial(load, "pydoc-4l"),
            corpus,
            NAME,
            out,
            config=HarvestConfig(per_file=4),
            executor=Ray(workers=3),
        )
        killer.join()
        assert killed
        assert store.checksums == one.checksums
        assert not [*out.glob("*.partial")]
        assert sorted(path.name for path in out.glob("done-*")) == sorted(
            f"done-{n}-of-12.json" for n in range(12)
        )
        # A module is copied to each worker, and its error is the same as here.
        with pytest.raises(ValueError, match="same texts; file 0 has other texts") as told:
            harvest(pydoc(), TEXTS[1:], NAME, out, config=HarvestConfig(per_file=4), executor=Ray())
        assert type(told.value) is ValueError
    finally:
        ray.shutdown()


def test_threads_write_the_files_of_one_process(tmp_path):
    one = harvest(pydoc(), TEXTS[:22], NAME, tmp_path / "one", config=HarvestConfig(per_file=3))
    with ThreadPoolExecutor(2) as threads:
        over = partial(
            harvest,
            names=NAME,
            out=tmp_path / "two",
            config=HarvestConfig(per_file=3),
            executor=threads,
        )
        store = over(pydoc, TEXTS[:22])
        assert store.checksums == one.checksums
        assert len([*(tmp_path / "two").glob("done-*-of-8.json")]) == 8
        with pytest.raises(ValueError, match="same texts; file 1 has other texts") as told:
            over(pydoc, [*TEXTS[:3], "part KV8", *TEXTS[4:22]])
        assert told.value.__notes__ == ["this error was raised in job 1 of 8"]
        with (
            HookedRunner(pydoc()).hooks({NAME: edits.zero()}),
            pytest.raises(HookError, match="a store must contain the values .* without edits"),
        ):
            over(pydoc(), TEXTS[:22])


@pytest.mark.full  # It starts two processes.
def test_processes_write_the_files_of_one_process(tmp_path):
    """The process dies while it loads its model. A second call runs all jobs."""
    one = harvest(pydoc(), TEXTS[:22], NAME, tmp_path / "one", config=HarvestConfig(per_file=3))
    make_model = partial(make_pydoc_at_second_call, str(tmp_path / "count"))
    context = multiprocessing.get_context("spawn")
    over = partial(
        harvest, make_model, TEXTS[:22], NAME, tmp_path / "two", config=HarvestConfig(per_file=3)
    )
    with (
        ProcessPoolExecutor(1, mp_context=context) as executor,
        pytest.raises(HookError, match="a worker died while it ran job 0 of 4; call again"),
    ):
        over(executor=executor)
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert over(executor=executor).checksums == one.checksums
    assert len((tmp_path / "count").read_text().splitlines()) == 2


def test_options_that_executors_do_not_support_are_errors(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 3)
    for wrong, error, message in (
        ({"executor": Ray(workers=0)}, ValueError, "workers.* 0"),
        ({"shard": (1, 2)}, ValueError, "with executor=, which runs all jobs"),
        ({"texts": iter(TEXTS)}, TypeError, "a path, a list or a table, .*; got a list_iterator"),
    ):
        with pytest.raises(error, match=message):
            harvest(
                **{
                    "model": model,
                    "texts": TEXTS,
                    "names": NAME,
                    "out": tmp_path,
                    "executor": Ray(),
                }
                | wrong
            )
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install .*\[ray\]"):
        harvest(model, TEXTS, NAME, tmp_path, executor=Ray())


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_client_of_dask_writes_the_files_of_one_process(tmp_path):
    distributed = pytest.importorskip(
        "distributed", reason="needs the package distributed, of Dask"
    )
    one = harvest(pydoc(), TEXTS[:40], NAME, tmp_path / "one", config=HarvestConfig(per_file=4))
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        store = harvest(
            partial(load, "pydoc-4l"),
            TEXTS[:40],
            NAME,
            tmp_path / "dask",
            config=HarvestConfig(per_file=4),
            executor=client,
        )
    assert store.checksums == one.checksums
    assert len(store.checksums) == 10
