"""The table of architectures in the guides, made here:

`python -m tests.models.attached.test_guide` writes it.
"""

import re
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "examples" / "guides" / "architectures.md"
HEAD = """# Architectures that were tested

`attach` was tested on tiny random models of these architectures of `transformers`. A test writes this table.

| column | meaning |
| --- | --- |
| points | the number of points of a block, in the block with the most points |
| left out | points that some block does not have, as in `attached.left_out` |
| sums | whether the stream is a sum of components, for `decompose`, direct logit attribution, circuits and edges. Otherwise these analyses raise an error that gives the reason |

Patching, sweeps and attribution at points work for all of these architectures.

| architecture | points | left out | sums |
| --- | --- | --- | --- |
"""


def row(name):
    from hooks import HookedRunner
    from interp.graph import Graph
    from models import attach
    from tests.attachable import made

    model = made(name)
    with attach(model) as attached:
        runner = HookedRunner(model)
        blocks = [re.match(r"blocks\.(\d+)\.", point) for point in runner.points]
        counts = [match[1] for match in blocks if match]
        try:
            Graph(model)
            sums = "yes"
        except (TypeError, ValueError):
            sums = "no"
        most = max(counts.count(block) for block in {*counts})
        return f"| {name} | {most} | {', '.join(sorted(attached.left_out))} | {sums} |\n"


# Their residual streams have several vectors for each token.
SEVERAL = ("deepseek_v4", "gemma3n_text", "hy_v4")


def page():
    from tests.attachable import MODELS

    return HEAD + "".join(row(name) for name in sorted([*MODELS, *SEVERAL]))


@pytest.mark.full
def test_the_table_matches_the_guide():
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the table is that of transformers 5.24")
    assert page() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
