"""A script for torchrun: each process runs its shard of an analysis into the same folder.

torchrun --nproc-per-node=2 tests/interp/many/sharded.py FOLDER
"""

import os
import sys
from pathlib import Path

from interp import attribution_patching, over_examples
from tests.interp.many.analyses import PAIRS, make_model


def main() -> None:
    """Run this process's shard."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(sys.argv[1])
    folder.with_name(f"rank-{rank}").touch()
    shard = (rank, world_size)
    over_examples(attribution_patching, make_model, PAIRS, "z", at_once=2, out=folder, shard=shard)


if __name__ == "__main__":
    main()
