"""Edits: frozen values that change activations, for hooks, generation, sweeps and circuits alike.

Axis names select what changes: `edits.zero(head=3, pos=slice(4, None))`. An index is an integer, a
slice, a list or a mask, or all but some, `head=all_but(7, 9)`. Several axes select where all of
them do. `pos`, `query` and `key` count columns from the start of the text, padding included;
negative numbers count from the end of what has been read so far. A list or tensor [n] means these
columns in every example, also if n is the batch size; [batch, n] means columns of each example's
own. Columns outside a text are an error. Columns that a piece of a text does not hold (see
`hooks.position_offset`) change nothing there. No edit writes at padded keys, and none copies
padding of its source to a real token.

The package contains the edit as a value, `edit`, and the functions that make edits: `kinds`, and
`subspaces` for a part of a vector. Read `kinds` and `edit` first; then `places`, which says what
axis names select, and `sources`, which says which values go there. Last come `padding`, which
refuses copied padding, and `draws`, random numbers that follow from a seed.

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
    "Edit", "add", "all_but", "interchange", "knockout", "mean", "noise", "project_out", "replace",
    "resample", "scale", "zero",
]  # fmt: skip

__getattr__ = _missing_name(__name__, __all__)
