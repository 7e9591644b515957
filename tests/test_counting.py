"""The counts of kernels and waits, compared with counts by hand."""

import torch
from torch.nn import functional as F

from tests.counting import counted


def test_kernels_are_operations_that_are_no_views():
    def job(x, weight, bias):
        y = F.linear(x, weight, bias)  # one kernel
        y = y.transpose(0, 1)[1:]  # two views
        return y + torch.empty(3)[0]  # one kernel; memory without values starts none

    counts = counted(job, torch.ones(3, 5), torch.ones(2, 5), torch.ones(2))
    assert (counts.starts, counts.waits) == (2, 0)
    assert dict(counts.operations) == {"addmm": 1, "add": 1}


def test_operations_on_tensors_of_the_cpu_start_no_kernel():
    def job(x, tokens):
        tokens = tokens.cpu()  # one wait
        is_first = tokens == tokens[:1]  # on the CPU
        share = is_first.float().mean()  # two operations on the CPU
        return x * share.to(x.device) + x  # two kernels, and a copy that Python waits for

    counts = counted(job, torch.ones(3), torch.tensor([3, 1, 3]))
    assert counts.starts == 2
    assert dict(counts.operations) == {"mul": 1, "add": 1}
    assert dict(counts.on_host) == {"eq": 1, "_to_copy": 1, "mean": 1}
    assert counts.waits == 2


def test_python_waits_for_numbers_masks_and_copies():
    def job(x, mask, model):
        if (x > 2).any():  # two kernels, one wait
            x = x[mask]  # a mask needs the number of its places: one wait
        return model(x).cpu()  # one kernel and one wait

    model = torch.nn.Linear(4, 6)
    mask = torch.tensor([True, False, True])
    counts = counted(job, torch.full((3, 4), 5.0), mask, model)
    assert counts.waits == 3
    assert dict(counts.stops) == {"_local_scalar_dense": 1, "index": 1, "_to_copy": 1}
    assert counts.operations["addmm"] == 1


def test_fused_attention_is_one_kernel():
    qkv = torch.randn(3, 1, 2, 5, 4)
    counts = counted(lambda qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), qkv)
    assert counts.starts == 1
