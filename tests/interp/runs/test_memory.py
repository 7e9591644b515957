"""The default memory of runs and examples that are computed together."""

import torch

from interp.runs import memory


def test_the_default_is_a_share_of_the_free_memory_of_a_device(monkeypatch):
    free = {"cuda": 3e9, "cpu": 5e9}
    monkeypatch.setattr(memory, "free_memory", lambda device: free.get(device.type))

    def default(name):
        return memory.bytes_together(torch.device(name), on_cpu=7)

    assert [default(name) for name in ("cuda", "cpu", "mps")] == [1_500_000_000, 7, 7]
    free["cuda"] = 1e11
    assert default("cuda") == 2**33
    free["cuda"] = 1e8
    assert default("cuda") == 2**29
