"""Harvests with a model that FSDP shards over two processes.

The processes may have different numbers of texts, or one of them may fail. Analyses that need whole
weights raise an error.
"""

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hooks import HookError
from interp import Pairs, attribution_patching, edge_attribution, over_examples
from interp.store import Activations, HarvestConfig, harvest
from tests.reference import variant

NAMES = ["blocks.0.mlp_out", "blocks.1.attn.z"]
# The texts fill three files: two in the first process and one in the second. The second process
# also has one batch fewer.
TEXTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7], [9, 3]]


def sharded(how):
    model = variant("pre", n_layers=2, n_heads=3)
    if how == "wrapped":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu).eval()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stream(rank):
    """Yield texts. In the second process, they end with an error while the first still has work."""
    yield from TEXTS * 3
    if rank == 1:
        raise OSError("the disk is gone")
    yield from TEXTS * 3


def work(folder, rank):
    """Run one of the two processes. It prints the error that it is expected to raise."""
    warnings.simplefilter("ignore")
    store = f"file://{folder}/init"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for how in ("wrapped", "sharded"):
        model = sharded(how)
        options = {"shard": (rank, 2), "config": HarvestConfig(per_file=2, batch=1)}
        names = [f"*{name}" for name in NAMES]
        harvest(model, TEXTS, names, f"{folder}/{how}", **options)
        torch.distributed.barrier()
        # Only the second process has to write a file again. The first has nothing left to do.
        if rank == 1:
            Path(f"{folder}/{how}/values-000001.safetensors").unlink()
        torch.distributed.barrier()
        harvest(model, TEXTS, names, f"{folder}/{how}", **options)
        torch.distributed.barrier()
        try:
            edge_attribution(model, Pairs([3, 1, 4], [3, 1, 5], [[2, 6]]))
        except TypeError as error:
            print(error)
        torch.distributed.barrier()
        # One process would run two parts, and the other would run one.
        pairs = Pairs(torch.tensor([[3, 1, 4]] * 3), torch.tensor([[3, 1, 5]] * 3), [[2, 6]] * 3)
        over = partial(over_examples, attribution_patching, model, pairs, "mlp_out", at_once=1)
        try:
            over(out=f"{folder}/parts-{how}", shard=(rank, 2))
        except ValueError as error:
            print(error)
        print(f"{len(over().values[0, 0])} examples")
        torch.distributed.barrier()
        try:
            harvest(model, stream(rank), names, f"{folder}/broken-{how}", **options)
        except (HookError, OSError) as error:
            print(f"{type(error).__name__}: {error}")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_jobs_of_a_sharded_model_may_be_uneven(tmp_path):
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    started = [
        subprocess.Popen(
            [*command, rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    for rank, (output, _) in enumerate(ended):
        assert output.count("by FSDP") == 2
        assert output.count("each process must run all parts") == 2
        assert output.count("3 examples") == 2
        error = "OSError: the disk is gone" if rank == 1 else "HookError: process 1 of this fully"
        assert output.count(error) == 2
    whole = harvest(
        variant("pre", n_layers=2, n_heads=3),
        TEXTS,
        NAMES,
        tmp_path / "whole",
        config=HarvestConfig(per_file=2),
    )
    for how in ("wrapped", "sharded"):
        store = Activations(tmp_path / how)
        assert not store.damaged()
        assert len(store) == sum(map(len, TEXTS))
        for text in range(len(TEXTS)):
            expected = whole.rows(text)
            found = store.rows(text)
            for name in NAMES:
                (of_shards,) = [key for key in store.names if key.endswith(name)]
                torch.testing.assert_close(found[of_shards], expected[name], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
