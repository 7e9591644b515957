"""Edits: immutable changes of activations, for hooks, generation, sweeps and circuits.

Axis names select the part that changes: `edits.zero(head=3, pos=slice(4, None))`. An index is an
integer, a slice, a list, a mask, or all but some indices, `head=all_but(7, 9)`. With several axes,
the edit changes only the places that every axis selects. `pos`, `query` and `key` count columns
from the start of the text, including padding. Negative numbers count from the end of the text read
so far. A list or tensor [n] selects the same columns in every example, even if n is the batch size;
[batch, n] selects different columns in each example. Columns outside a text raise an error. A run
may read only a piece of a text, as in generation (see `hooks.position_offset`); columns outside the
piece then change nothing. Edits never write to padded keys, and never copy padding of the source to
a real token.

The package contains the class `Edit` (`edit`) and the functions that make edits: `kinds`, and
`subspaces` for a part of a vector. Read `kinds` and `edit` first; then `places`, the meaning of
axis names, and `sources`, the values that an edit writes. `padding` checks that no padding is
copied, and `draws` computes random numbers from a seed.

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
