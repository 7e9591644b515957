"""Differences between two models with the same points, such as before and after fine-tuning.

Read `change` first (`compare_models` and its result), and then `twins`, which checks and runs the
two models; `interp.runs.adapters` makes two models of one model with an adapter. Then read
`streams` (predictions and the residual stream), `means` and `promoted` (mean differences) and
`matrices` (the weights) in any order.
"""

from hooks.base import missing_name as _missing_name
from interp.diffing.change import ModelChange, compare_models
from interp.diffing.matrices import ChangedRows, MatrixChange, WeightChanges
from interp.diffing.promoted import DifferenceLens

__all__ = [
    "ChangedRows",
    "DifferenceLens",
    "MatrixChange",
    "ModelChange",
    "WeightChanges",
    "compare_models",
]

__getattr__ = _missing_name(__name__, __all__)
