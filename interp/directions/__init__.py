"""Find directions from two kinds of texts, steer along them, erase them and save them.

Read `direction` (vectors by point, and their files, also for llama.cpp and repeng), `contrast` (two
kinds of texts) and `examples` (their values, with `stored` for texts of a store) first. Then read
`finding` and `probing` (directions from examples, with `folds` for held-out texts), `sparse`
(probes of few features of a dictionary), `erasing` (removes a concept) and `steering` (effects of a
direction) in any order.

>>> from interp import edits
>>> from interp.directions import difference_of_means
>>> from hooks import HookedRunner
>>> from models import load
>>> model = load("pydoc-4l")
>>> v = difference_of_means(model, (["part KV8", "part QX3"], ["def f(", "return x"]))
>>> hooks = {"blocks.2.resid_post": edits.add(v, scale=0.5)}
>>> steered = HookedRunner(model).run_with_hooks("The ", hooks=hooks)
"""

from hooks.base import missing_name as _missing_name
from interp.directions.contrast import Contrast
from interp.directions.direction import Direction
from interp.directions.erasing import Eraser, leace
from interp.directions.finding import Erasure, difference_of_means, erasure
from interp.directions.probing import Probe, probe
from interp.directions.sparse import SparseProbes, sparse_probes
from interp.directions.steering import SteeringCurve, steering_curve
from interp.numbers.moments import Moments

__all__ = [
    "Contrast",
    "Direction",
    "Eraser",
    "Erasure",
    "Moments",
    "Probe",
    "SparseProbes",
    "SteeringCurve",
    "difference_of_means",
    "erasure",
    "leace",
    "probe",
    "sparse_probes",
    "steering_curve",
]

__getattr__ = _missing_name(__name__, __all__)
