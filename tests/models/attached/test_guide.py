"""The table of architectures in the guides, made here: `python -m tests.models.attached.test_guide` writes it."""

import re
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "examples" / "guides" / "architectures.md"
HEAD = """# Architectures that were tried

Tiny random models of `transformers`, each attached. `points` is how many points a block has, the most of all blocks. What is left out
in some block is named, as `attached.left_out` does. `sums` says whether the stream is seen as a sum of parts: for `decompose`, direct
logit attribution, circuits and edges; where it is not, an error says why. Patching, sweeps and attribution at points take
all of these. The tests make this table.

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


def page():
    from tests.attachable import MODELS

    return HEAD + "".join(row(name) for name in MODELS)


@pytest.mark.full
def test_the_table_is_that_of_the_guide():
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the table is that of transformers 5.24")
    assert page() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
