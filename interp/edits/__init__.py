"""Edits: immutable changes of activations, for hooks, generation, sweeps and circuits.

Read `kinds` (the functions that make edits, with `subspaces` for a part of a vector) and `edit`
(the class `Edit`) first; then `places`, the meaning of axis names and positions such as `head=3,
pos=slice(4, None)`, and `sources`, the values that an edit writes. Last, read `padding`, which
checks that no padding is copied, and `draws`, which computes random numbers from a seed.

>>> import torch
>>> from hooks import HookedRunner, HookPoint
>>> model = torch.nn.Sequential(HookPoint("batch pos d_model"))
>>> HookedRunner(model).run_with_hooks(torch.ones(1, 3, 2), hooks={"0": zero(pos=1)})
tensor([[[1., 1.],
         [0., 0.],
         [1., 1.]]])
"""

from hooks.base import all_but
from hooks.base import missing_name as _missing_name
from interp.edits.edit import Edit
from interp.edits.kinds import add, knockout, mean, noise, replace, resample, scale, zero
from interp.edits.subspaces import interchange, project_out

__all__ = [
    "Edit",
    "add",
    "all_but",
    "interchange",
    "knockout",
    "mean",
    "noise",
    "project_out",
    "replace",
    "resample",
    "scale",
    "zero",
]

__getattr__ = _missing_name(__name__, __all__)
