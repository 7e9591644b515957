"""Stores: values of many texts on disk, written by any number of jobs, killed and resumed, and read in shuffled batches.

Read `files` (what lies on disk), `corpora` (texts in pieces) and `rows` (what is kept of each piece) first; `harvesting`
writes a store, by `engines`, and `activations` reads it, with `shuffling`. `summary` and `streaming` sum values, without a
store too; `arrow` exchanges stores with SAELens, and `together` is for models that several processes share.

>>> import tempfile
>>> from interp.store import Activations, harvest
>>> from models import load
>>> out = tempfile.mkdtemp()
>>> harvest(load("pydoc-4l"), ["def f(x):", "return x"], ["blocks.1.ln2.normalized", "blocks.1.mlp_out"], out)
Activations of 2 points, 17 rows of 2 texts
>>> [(len(x), len(y)) for x, y in Activations(out).batches(10, seed=0)]
[(10, 10), (7, 7)]
"""

from hooks.base import missing_name as _missing_name
from interp.store.activations import Activations
from interp.store.arrow import from_arrow, to_arrow
from interp.store.engines import Ray
from interp.store.harvesting import harvest
from interp.store.rows import Settings
from interp.store.streaming import PlannedHarvest, plan, statistics
from interp.store.summary import Statistics, StatisticsByPoint

__all__ = [
    "Activations", "PlannedHarvest", "Ray", "Settings", "Statistics", "StatisticsByPoint",
    "from_arrow", "harvest", "plan", "statistics", "to_arrow",
]  # fmt: skip

__getattr__ = _missing_name(__name__, __all__)
