"""Ray: the files equal the files of one process, also if a worker is killed.

Errors reach the caller unchanged.
"""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from interp.store import Ray, harvest
from models import load
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
    one = harvest(pydoc(), corpus, NAME, tmp_path / "one", per_file=4)
    killer = threading.Thread(target=kill_one, args=(out, killed))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        killer.start()
        # There are only two cores. The third worker does not start, and the others do its jobs.
        store = harvest(
            partial(load, "pydoc-4l"), corpus, NAME, out, per_file=4, engine=Ray(workers=3)
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
            harvest(pydoc(), TEXTS[1:], NAME, out, per_file=4, engine=Ray())
        assert type(told.value) is ValueError
    finally:
        ray.shutdown()


def test_options_that_ray_does_not_support_are_errors(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 3)
    for wrong, error, message in (
        ({"engine": Ray(workers=0)}, ValueError, "workers.* 0"),
        ({"shard": (1, 2)}, ValueError, "with Ray, which runs all jobs"),
        ({"texts": iter(TEXTS)}, TypeError, "a path, a list or a table, .*; got a list_iterator"),
    ):
        with pytest.raises(error, match=message):
            harvest(
                **{"model": model, "texts": TEXTS, "names": NAME, "out": tmp_path, "engine": Ray()}
                | wrong
            )
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install \"hookscope\[ray\] @ git"):
        harvest(model, TEXTS, NAME, tmp_path, engine=Ray())
