"""Stores: the values of many texts on disk, which any number of jobs write, resume after a stop,
and read in shuffled batches.

Read `files` (the files on disk), `corpora` (texts in pieces) and `rows` (the stored rows of each
piece) first, then `harvesting`, which writes a store with `tasks` on `engines`, and `activations`,
which reads it with `shuffling`. The other files are `summary` and `streaming` (statistics, with or
without a store), `imported` (values of other programs, with `arrow` for SAELens and `vllm` for
vLLM) and `together` (models that are sharded over several processes).

>>> import tempfile
>>> from interp.store import Activations, harvest
>>> from models import load
>>> out = tempfile.mkdtemp()
>>> names = ["blocks.1.ln2.normalized", "blocks.1.mlp_out"]
>>> harvest(load("pydoc-4l"), ["def f(x):", "return x"], names, out)
Activations of 2 points, 17 rows of 2 texts
>>> [(len(x), len(y)) for x, y in Activations(out).batches(10, seed=0)]
[(10, 10), (7, 7)]
"""

from hooks.base import missing_name as _missing_name
from interp.store.activations import Activations
from interp.store.arrow import from_arrow, to_arrow
from interp.store.engines import Ray
from interp.store.harvesting import harvest
from interp.store.rows import HarvestConfig
from interp.store.streaming import PlannedHarvest, plan, statistics
from interp.store.summary import Statistics, StatisticsByPoint
from interp.store.vllm import from_vllm

__all__ = [
    "Activations",
    "HarvestConfig",
    "PlannedHarvest",
    "Ray",
    "Statistics",
    "StatisticsByPoint",
    "from_arrow",
    "from_vllm",
    "harvest",
    "plan",
    "statistics",
    "to_arrow",
]

__getattr__ = _missing_name(__name__, __all__, {"Settings": "interp.store.HarvestConfig"})
