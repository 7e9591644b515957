"""Interchange interventions: find and test the part of a value that carries a causal variable.

Read `featurizers` (parts of a value) and `runs` (runs with an interchanged part) first, because the
other files use them. Then read `aligning`, which learns a part with `fitting` and scores it with
controls, and `nullspace`, which checks a part that you provide.

>>> from interp.alignment import counterfactual
>>> def sum_of_three(a, b, c, carry=None):
...     carry = a + b if carry is None else carry
...     return {"carry": carry, "answer": carry + c}
>>> base, source = {"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 4, "c": 0}
>>> counterfactual(sum_of_three, base, source, "carry")["answer"]
11
"""

from hooks.base import missing_name as _missing_name
from interp.alignment.aligning import Alignment, align, counterfactual
from interp.alignment.featurizers import Featurizer, neurons, of_dictionary, pca, subspace
from interp.alignment.fitting import Fit
from interp.alignment.nullspace import NullSpaces, null_spaces

__all__ = [
    "Alignment",
    "Featurizer",
    "Fit",
    "NullSpaces",
    "align",
    "counterfactual",
    "neurons",
    "null_spaces",
    "of_dictionary",
    "pca",
    "subspace",
]

__getattr__ = _missing_name(__name__, __all__)
