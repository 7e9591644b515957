"""Runs of models of all forms with all masks, whose contexts the tests change."""

import torch

from hooks import HookedRunner
from tests.reference import BATCH, HEADS, POS, masked, some_tokens, variant

SOME = [
    *(
        "pre",
        "post",
        "output",
        "sandwich",
        "parallel",
        "attention only",
        "sinusoidal",
        "no positions",
    ),
    *("rotary partly", "grouped", "window", "window of one layer", "like llama", "like gemma 2"),
    "like gemma 3",
]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding(left, right):
    mask = torch.ones(BATCH, POS, dtype=torch.bool)
    mask[0, :left], mask[1, :1], mask[2, POS - right :] = False, False, False
    return mask


MASKS = {
    "none": None,
    "left": padding(3, 0),
    "right": padding(0, 4),
    "3-D": draw(BATCH, POS, POS, seed=9) > -0.5,
    "4-D": draw(BATCH, HEADS, POS, POS, seed=8) > -0.5,
    "one for all rows": draw(1, POS, POS, seed=7) > -0.5,
    "one for all queries": draw(BATCH, 1, POS, seed=6) > -0.5,
}
CASES = [(name, mask) for name in SOME for mask in ("none", "left", "right")]
CASES += [(name, mask) for name in ("pre", "like llama", "window") for mask in list(MASKS)[3:]]


class Run:
    """A run of all blocks, with the streams, keys and values of each block."""

    def __init__(self, name, mask):
        self.model, self.tokens = variant(name), some_tokens()
        self.runner, self.layers = HookedRunner(self.model), self.model.config.n_layers
        self.context = self.model.context(self.tokens, **masked(MASKS[mask]))
        with torch.no_grad():
            _, self.cache = self.runner.run_with_cache(
                self.tokens, **masked(MASKS[mask]), names=["*.resid_*", "*.k", "*.v"]
            )

    def past(self, pos):
        """Return keys and values before `pos` for each layer, [batch, kv_head, key, d_head]."""
        return [
            tuple(self.cache[part, layer][:, :pos].transpose(1, 2) for part in ("k", "v"))
            for layer in range(self.layers)
        ]

    @torch.no_grad()
    def blocks(self, first, resid, context, hooks=None):
        """Run the blocks from `first` on, and return the stream after the last block."""
        with self.runner.hooks(hooks or {}):
            for block in self.model.blocks[first:]:
                resid = block(resid, context)
        return resid


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
