"""Random numbers that depend only on a seed and a place, not on other draws."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks import EditError
from hooks.base import (
    generator,
    padding_messages,
)
from interp.edits.places import Region
from interp.inputs.parts import require_whole

# The number of texts that share a generator. Making a generator takes longer than drawing numbers.
_TOGETHER = 16


def donors(
    padding: Sequence[Sequence[bool]], seed: int, texts: Sequence[int] | None = None
) -> list[int]:
    """Draw for each row another row with the same padding and another text.

    Each row is drawn once. If there are copies of a text, other rows may be drawn several times.

    Args:
        padding: the mask of the columns of each row.
        seed: another seed draws other rows.
        texts: the number of the text of each row; copies have the same number. Default: all texts
            differ.

    Raises:
        EditError: if a row has no other row with the same padding, or only copies of its text.
        ValueError: in a part of many examples; see `interp.inputs.parts`.

    >>> donors([[True], [False], [True], [False]], seed=0)
    [2, 3, 0, 1]
    >>> donors([[True]] * 4, seed=0, texts=[0, 0, 0, 1])
    [3, 3, 3, 1]
    """
    require_whole("edits must not draw rows", "edits.resample")
    draw = torch.Generator().manual_seed(seed)
    texts = range(len(padding)) if texts is None else texts
    rows_by_padding: dict[tuple[bool, ...], list[int]] = {}
    for row, is_padding in enumerate(padding):
        rows_by_padding.setdefault(tuple(is_padding), []).append(row)
    donor_of: dict[int, int] = {}
    for rows in rows_by_padding.values():
        if len({texts[row] for row in rows}) < 2:
            raise EditError(padding_messages.no_donor(rows[0], n_copies=len(rows)))
        order = [rows[n] for n in torch.randperm(len(rows), generator=draw).tolist()]
        # Arrange the rows in a random circle. The donor of a row is the previous row, skipping
        # copies of its text.
        for place, row in enumerate(order):
            previous_rows = (order[place - back] for back in range(1, len(order)))
            donor_of[row] = next(donor for donor in previous_rows if texts[donor] != texts[row])
    return [donor_of[row] for row in range(len(padding))]


def normal(seed: int, region: Region) -> Float[Tensor, "..."]:
    """Draw a number from the normal distribution for each place of a region's box.

    A number depends only on the seed, the name of the point and the place of the number. The number
    is the same for every box and for every length of the text so far: each row and each column of
    the text has a separate generator, and the generator draws the numbers in the order of the keys.

    Args:
        seed: the seed.
        region: the region, whose box has the shape of the result.

    Raises:
        ValueError: in a part of many examples; see `interp.inputs.parts`.
    """
    require_whole("edits must not draw numbers for rows", "edits.noise")
    axes = region.axes
    ends = [first + length for first, length in zip(region.firsts, region.lengths, strict=True)]
    box = [slice(first, end) for first, end in zip(region.firsts, ends, strict=True)]
    # There is one generator for each row and position. It draws the numbers along all other axes.
    # The keys come first among these axes, so further keys do not change the numbers of earlier
    # keys.
    outer = [dim for dim, axis in enumerate(axes) if axis in ("batch", "pos", "query")]
    inner = sorted({*range(len(axes))} - {*outer}, key=lambda dim: (axes[dim] != "key", dim))
    sizes = [ends[dim] if axes[dim] == "key" else region.sizes[dim] for dim in inner]
    inner_box = tuple(box[dim] for dim in inner)
    uniforms = []
    for place in itertools.product(*(range(box[dim].start, box[dim].stop) for dim in outer)):
        place_generator = generator(seed, region.point.name, *place)
        numbers = torch.rand(sizes, dtype=torch.float64, generator=place_generator)
        uniforms.append(numbers[inner_box])
    order = [*outer, *inner]
    uniform = torch.stack(uniforms).view([region.lengths[dim] for dim in order])
    uniform = uniform.movedim([*range(len(axes))], order)
    return torch.special.ndtri(uniform.clamp(min=2.0**-54))


def keys_of(
    seed: int, text: Int[Tensor, " row"], pos: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Draw a number from [0, 1) for each place, which depends only on the seed and the place.

    Args:
        seed: the seed.
        text: the number of the text of each place.
        pos: the position of each place in its text.
    """
    keys = torch.empty(len(text), dtype=torch.float64)
    groups = text // _TOGETHER
    order = groups.argsort()
    numbers, counts = groups[order].unique_consecutive(return_counts=True)
    for number, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
        sizes = int(pos[rows].max()) + 1, _TOGETHER
        table = torch.rand(sizes, dtype=torch.float64, generator=generator(seed, number))
        keys[rows] = table[pos[rows], text[rows] % _TOGETHER]
    return keys
