"""Calls that rows on the CPU and rows on a GPU share."""

from typing import Any

import torch

from hooks import HookedRunner
from interp import edits, log_prob, sweep
from tests.bench import peers, timing


class Patches:
    """A sweep that patches a site in each layer, at every `step`-th position or head."""

    def __init__(self, model: Any, shape: peers.Shape, site: str, step: int = 1) -> None:
        self.model, clean = model, shape.tokens()
        self.corrupted = (clean + 1) % shape.vocab
        cache = HookedRunner(model).capture(clean, names=f"blocks.*.{site}")
        axis = {"resid_pre": "pos", "v": "kv_head"}.get(site, "head")
        places = range(step - 1, shape.pos if axis == "pos" else shape.heads, step)
        self.edits = [{n: edits.replace(cache, **{axis: at})} for at in places for n in cache]
        self.each = len(self.edits)

    def __call__(self) -> object:
        return sweep(self.model, self.corrupted, self.edits, log_prob(0))


def differentiated(ours: Any, clean: torch.Tensor, corrupted: torch.Tensor) -> timing.Call:
    """Return a call that makes two forward passes and one backward pass through the second."""
    metric = log_prob(0)

    def bare() -> None:
        ours(corrupted)
        with torch.enable_grad():
            stream = ours.input_resid(clean).requires_grad_()
            context, resid = ours.context(clean), stream
            for block in ours.blocks:
                resid = block(resid, context)
            torch.autograd.grad(metric(ours.unembed(resid)).sum(), stream)

    return bare
