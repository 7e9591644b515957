"""A harvest against `capture` of the same batches, and the rate of shuffled reading: `python tests/bench/store.py`.

The model has GPT-2's shape without its weights; one point of 768 numbers in the middle is kept, of 16 texts of 256 tokens. What
is read was just written, so it comes from the page cache. Run it on an otherwise idle machine.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

# Run as a script, Python puts this folder on the path, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from hooks import HookedRunner, HookPoint
from interp.store import harvest
from models import Transformer, TransformerConfig
from tests.bench import timing

NAME = "blocks.6.resid_post"


class Table(nn.Module):
    """A model that takes no time: rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.point = nn.Embedding(1000, 768), HookPoint("batch pos d_model")

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens."""
        return self.point(self.rows(tokens))


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each number")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=50257, n_ctx=1024, n_layers=12, n_heads=12, d_model=768)
    model, texts = Transformer(config).eval(), torch.randint(0, 50257, (16, 256))
    runner = HookedRunner(model)

    def captured() -> None:
        for batch in texts.split(4):
            runner.capture(batch, names=NAME)

    def harvested() -> None:
        with tempfile.TemporaryDirectory() as out:
            harvest(model, texts.tolist(), NAME, out, batch=4, per_file=8)

    found = timing.ratios({"capture": captured, "harvest": harvested}, "capture", options.budget)
    print(f"harvest: {found['harvest'][0]:.2f} s, {found['harvest'][1]:.3f} of capture")
    with tempfile.TemporaryDirectory() as out:
        rows = torch.randint(0, 1000, (512, 512))
        store = harvest(Table().eval(), rows, "point", out, batch=64)
        size = len(store) * 768 * 4
        for window in (2, 4, 16):
            read = {
                "read": lambda window=window: sum(
                    len(x) for (x,) in store.batches(4096, 0, window=window)
                )
            }
            taken = timing.ratios(read, "read", options.budget / 8)["read"][0]
            print(f"shuffled batches of 4096 rows, window {window}: {size / 1e9 / taken:.2f} GB/s")


if __name__ == "__main__":
    main()
