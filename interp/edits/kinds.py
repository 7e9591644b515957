"""The kinds of edits: functions that make an `Edit`, with their changes of values."""

from functools import partial
from numbers import Number
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks import EditError, Point
from hooks.base import (
    FakeTensor,
    Index,
    Selection,
    at_least_float32,
    explains_calls,
    padding_messages,
    piece_read,
    require_integer,
    require_kind,
    shown,
    to_device,
    warn,
)
from interp.edits.draws import donors, normal
from interp.edits.edit import Edit
from interp.edits.padding import require_same_starts
from interp.edits.places import Region, SourceValue
from interp.edits.sources import Axes, Values, ValueSource, source_of


@runtime_checkable
class Means(Protocol):
    """Precomputed means of some points, such as the results of `interp.store.statistics`."""

    def mean_at(self, point: Point) -> Shaped[Tensor, "..."]:
        """Return the mean at a point."""


def zero(*unnamed: object, **where: Index) -> Edit:
    """Return an edit that sets values of an activation to zero (zero ablation).

    Args:
        where: the place, by the names of axes of the point: `head`, `pos`, `d_model` and so on. An
            axis that is not given is selected whole, so `zero()` sets the whole activation to zero.
            `interp.edits` describes the indices.
        unnamed: arguments without the name of an axis, which raise an error.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. Values at the place become 0,
        and all other values stay the same.

    Raises:
        TypeError: if the place is given without the name of an axis.

    >>> from hooks import Point
    >>> edit = zero(head=[0, 2], pos=-1)  # the outputs of two heads at the last token
    >>> point = Point("attn.z", ("batch", "pos", "head", "d_head"))
    >>> edit(torch.ones(1, 2, 3, 1), point)[0, :, :, 0]  # [pos, head]
    tensor([[1., 1., 1.],
            [0., 1., 0.]])
    """
    if [type(value) for value in unnamed[1:]] == [Point]:
        raise TypeError("a hook must be an edit; got the function edits.zero: write edits.zero()")
    if unnamed:
        raise TypeError(
            f"zero needs places by axis, such as edits.zero(head=3); got {shown(unnamed[0])} "
            "without an axis"
        )
    return Edit("zero", _zeros).at(**where)


def _zeros(region: Tensor, value: Tensor, place: Region) -> Tensor:
    """Return zeros."""
    return torch.zeros_like(region)


@explains_calls
def scale(factor: float, **where: Index) -> Edit:
    """Return an edit that multiplies values by a number.

    Args:
        factor: the number.
        where: the place that is changed, by axis; see `zero`.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. A value x at the place becomes
        `factor * x`.

    >>> from hooks import Point
    >>> scale(0.5, pos=1)(torch.ones(1, 3), Point("resid_pre", ("batch", "pos")))
    tensor([[1.0000, 0.5000, 1.0000]])
    """
    require_kind("factor", factor, (Number, Tensor), "a number")
    return Edit("scale", partial(_scaled, factor=factor), {"0": factor}).at(**where)


def _scaled(region: Tensor, value: Tensor, place: Region, factor: float) -> Tensor:
    """Return the region times a factor."""
    return region * factor


@explains_calls
def add(vector: Values, scale: float = 1.0, **where: Index) -> Edit:
    """Return an edit that adds a vector, or other values, times a number (steering).

    Args:
        vector: a tensor whose axes are the last axes of the point, a `Direction`, whose vector at
            the point is added, or a cache. See `replace` for the columns of a cache.
        scale: the number. Default: 1.
        where: the place that is changed, by axis; see `zero`.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. A value x at the place becomes
        `x + scale * vector`, in the unit of the point.

    >>> from hooks import Point
    >>> edit = add(torch.tensor([1.0, 0.0]), 2.0, pos=-1)
    >>> edit(torch.zeros(1, 3, 2), Point("resid_pre", ("batch", "pos", "d_model")))
    tensor([[[0., 0.],
             [0., 0.],
             [2., 0.]]])
    """
    require_kind("scale", scale, (Number, Tensor), "a number")
    arguments = {"0": vector} | ({} if scale == 1 else {"1": scale})
    source = ValueSource(vector)
    added = Edit(
        name="add",
        change=partial(_with_source, factor=scale),
        arguments=arguments,
        source=source,
    )
    return added.at(**where)


def _with_source(region: Tensor, value: Tensor, place: Region, factor: float) -> Tensor:
    """Return the region plus the value of the source times a number."""
    return region + factor * value


@explains_calls
def replace(source: Values, *, source_pos: Index | None = None, **where: Index) -> Edit:
    """Return an edit that replaces values by values of another run, layer, position or model.

    The columns of the source follow from the first of these rules that applies:

    1. `source_pos` names the columns.
    2. The source is a cache, and `pos` counts from the end, such as `pos=-1`: the same positions,
       counted from the end of each cached text. The cached texts may have other lengths and other
       padding than the edited texts.
    3. In all other cases, the columns have the same numbers in the source and in the edited texts.
       This includes a tensor with `pos=-1`, because a tensor has no padding mask.

    Args:
        source: the values of whole texts. For another layer, pass the tensor `cache["z", 2]`.
        source_pos: the columns of the source for the selected positions, in order, or one column
            for all positions. Negative numbers count from the end of each text of the source.
            Default: rule 2 or 3.
        where: the place that is replaced, by axis; see `zero`.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. Values at the place become the
        values of the source, in the order of the selected positions.

    Raises:
        EditError: when the edit is applied, if a value of padding would be copied to a real token,
            or the keys of a pattern differ from the keys of the edited text.

    >>> from hooks import Point
    >>> source = torch.tensor([[5.0, 6.0, 7.0]])
    >>> replace(source, pos=0, source_pos=-1)(torch.ones(1, 3), Point("any", ("batch", "pos")))
    tensor([[7., 1., 1.]])
    """
    replacement = Edit(
        name="replace",
        change=_source_values,
        arguments={"0": source},
        source=source_of(source, source_pos),
    )
    return replacement.at(**where)


@explains_calls
def mean(
    reference: Values,
    across: str | tuple[str, ...] = "batch",
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Return an edit that replaces values by the mean of reference runs (mean ablation).

    The mean is taken separately at each position, unless `across` contains the positions. If `pos`
    counts from the end, the mean is over positions counted from the end of each reference text:
    `mean(cache, pos=-1)` is the mean over the last tokens, as for function vectors (Todd et al.
    2024).

    Args:
        reference: the values of reference runs of any number of texts; or computed means, such as
            the result of `interp.store.statistics`.
        across: the axes to average over: `"batch"`, or `("batch", "pos")`. If a point declares no
            axes, its first axis is the batch.
        attention_mask: 1 or True for real columns of the reference. Padding is ignored. At `scores`
            and `pattern`, only padding of queries is ignored: the mean at a key contains texts in
            which this key is padding. At keys and values of attention to an encoder, it is the mask
            of the encoder's texts. Default: the mask of a cache; a tensor has no padding.
        where: the place that is replaced, by axis.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. Values at the place become the
        mean, which has one entry along the axes in `across` and the sizes of the reference along
        all other axes.

    Raises:
        ValueError: if `across` names no axis.
        EditError: when the edit is applied, if it is a mean of one row, or if `pos` counts from the
            end and differs between texts.

    >>> from hooks import Point
    >>> edit = mean(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))
    >>> edit(torch.zeros(1, 2), Point("any", ("batch", "pos")))
    tensor([[2., 5.]])
    """
    require_kind("across", across, (str, tuple, list), "a name of an axis, or several names")
    averaged_axes = (across,) if isinstance(across, str) else tuple(across)
    if not averaged_axes:
        raise ValueError("across must name at least one axis; got ()")
    if isinstance(reference, Means):
        given_mean = Edit(
            name="mean",
            change=_source_values,
            arguments={"0": reference},
            source=ValueSource(reference),
        )
        return given_mean.at(**where)
    source = ValueSource(
        reference,
        whole=averaged_axes,
        attention_mask=_as_mask(attention_mask),
        rows="all" if "batch" in averaged_axes else "same",
    )

    averaged = partial(
        _averaged, source=source, axes=averaged_axes, has_own_mask=attention_mask is not None
    )
    arguments = {"0": reference, "across": across, "attention_mask": attention_mask}
    return Edit("mean", averaged, arguments=arguments, source=source).at(**where)


def _averaged(
    region: Tensor,
    value: Tensor,
    place: Region,
    source: ValueSource,
    axes: tuple[str, ...],
    has_own_mask: bool,
) -> Tensor:
    """Return the new value of a region for `mean`: a mean of the source's values at real tokens.

    Args:
        region: the value of the edited run in the region.
        value: the value of the source in the region.
        place: the region: the point, the axes, and the places along each axis.
        source: the source.
        axes: the axes along which values are averaged.
        has_own_mask: whether the user has passed the mask of the source.

    Raises:
        EditError: if there is only one value, or the texts begin in different columns.
    """
    dims = [place.axes.index(axis) for axis in axes]
    if all(value.shape[dim] == 1 for dim in dims):
        raise EditError(
            f"a mean over {' and '.join(axes)} needs several values at {place.point}; "
            "got one (use edits.replace for one value)"
        )
    value = at_least_float32(value)
    if source.rows == "all" and place.source_columns is not None:
        # The columns were counted from the last real token of each text, so none is padding.
        return place.in_order(value.mean(dims, keepdim=True))
    if source.rows == "all" and place.positions not in dims:
        require_same_starts(source, place)
    mask = source.mask_of_columns(place.point.name, place.axes)
    if mask is None or (not has_own_mask and place.positions is None):
        return value.mean(dims, keepdim=True)
    return _mean_of_real(value, _real_columns(mask, axes, value, place), dims, place)


@explains_calls
def resample(
    source: Values,
    seed: int = 0,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Return an edit that replaces values by values of another text (resample ablation).

    The other text, the donor, is the same at all points for a row. A copy of the row's text, with
    the same real tokens, is never the donor, because its values would change nothing. Copies are
    found in a cache of whole texts, but not in a tensor.

    Args:
        source: the values of texts with the batch size and the padding of the edited batch, such as
            a cache of the same batch. If a point declares no axes, its first axis is the batch.
        seed: the seed of the choice of donors.
        attention_mask: 1 or True for real columns of the texts. The donor of a row has the same
            padding. Default: the mask of a cache; a tensor has no padding.
        where: the place that is replaced, by axis.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. Values at the place become the
        values of the donor at the same columns.

    Raises:
        EditError: when the edit is applied, if a value of padding would be copied to a real token,
            if positions count from the end and the padding of the source differs from the edited
            texts, or if all rows with the same padding are copies of one text.

    >>> from hooks import Point
    >>> rows = torch.tensor([[1.0], [2.0], [3.0]])
    >>> resample(rows, seed=0)(rows.clone(), Point("any", ("batch", "pos"))).flatten()
    tensor([3., 1., 2.])
    """
    require_integer("seed", seed, least=-(2**63))
    values = ValueSource(
        source,
        whole=("batch",),
        attention_mask=_as_mask(attention_mask),
        rows="donor",
    )

    arguments = {"0": source, "seed": seed, "attention_mask": attention_mask}
    donated = partial(_donated, source=values, seed=seed)
    return Edit("resample", donated, arguments=arguments, source=values).at(**where)


def _donated(
    region: Tensor, value: Tensor, place: Region, source: ValueSource, seed: int
) -> Tensor:
    """Return the values of the donors.

    Args:
        region: the value of the edited run in the region.
        value: the value of the source in the region.
        place: the region: the point, the axes, and the places along each axis.
        source: the source.
        seed: the seed of the choice of donors.

    Raises:
        EditError: if the source has another number of texts, or a text has no donor.
    """
    batch = place.axes.index("batch")
    n_rows = place.sizes[batch]
    mask = source.mask_of_columns(place.point.name, place.axes)
    padding = None if mask is None else mask.tolist()
    counts = [value.shape[batch]] if padding is None else [value.shape[batch], len(padding)]
    # A run may have several rows for each text, such as beams, which follow one another.
    n_copies = n_rows // counts[0] if counts[0] * piece_read().copies == n_rows else 1
    n_texts = n_rows // n_copies
    if {*counts} != {n_texts}:
        raise EditError(f"resample must have {n_rows} rows at {place.point}; got {counts}")
    # `HookedRunner.plan` runs the model on tensors without numbers, which cannot be compared.
    if region.is_meta or isinstance(region, FakeTensor):
        return region
    column = 0 if place.positions is None else place.firsts[place.positions]
    texts = source.copies(value, place.axes, place.point.name, column)
    first = place.firsts[batch]
    donor_of_texts = donors(padding or [[]] * n_texts, seed, texts)
    rows = [donor for donor in donor_of_texts for _ in range(n_copies)]
    rows = rows[first : first + place.lengths[batch]]
    return value.index_select(batch, to_device(torch.tensor(rows), value.device))


@explains_calls
def noise(scale: float, seed: int = 0, **where: Index) -> Edit:
    """Return an edit that adds Gaussian noise, as in causal tracing (Meng et al. 2022).

    Each number depends only on the seed, the name of the point and the place of the number: row,
    column of the text, and so on. So it does not depend on the length of a piece, on the device or
    on other edits. The row counts from the start of its batch. If you divide texts into batches of
    another size, a text may get other noise.

    Args:
        scale: the standard deviation.
        seed: the seed of the noise.
        where: the place that is changed, by axis.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. A value x at the place becomes
        `x + scale * z`, where z is drawn from the normal distribution.

    >>> from hooks import Point
    >>> edit = noise(0.1, seed=3, pos=slice(0, 2))
    >>> noised = edit(torch.zeros(1, 3), Point("any", ("batch", "pos")))
    >>> (noised != 0).tolist()
    [[True, True, False]]
    """
    require_kind("scale", scale, (Number, Tensor), "a number")
    require_integer("seed", seed, least=-(2**63))
    noisy = partial(_noisy, factor=scale, seed=seed)
    return Edit("noise", noisy, {"0": scale, "seed": seed}).at(**where)


def _noisy(region: Tensor, value: Tensor, place: Region, factor: float, seed: int) -> Tensor:
    """Return the region plus noise."""
    added = factor * normal(seed, place)
    return region + to_device(added.to(region.dtype), region.device)


@explains_calls
def knockout(query: Index | None = None, key: Index | None = None, **where: Index) -> Edit:
    """Return an edit of `scores` that blocks attention from some queries to some keys.

    The scores become -inf. The weights of the other keys are renormalised by the softmax. If a
    query has no key left, its weights are 0.

    Args:
        query, key: the columns of the text. Default: all columns.
        where: the heads or rows, by axis. Default: all.

    Returns:
        The edit, only for points named `scores`, [batch, head, query, key].

    Warns:
        UserWarning: if every key comes after every query, so that the edit changes nothing.

    >>> from hooks import Point
    >>> scores = torch.zeros(1, 1, 3, 3)
    >>> edit = knockout(query=-1, key=[0, 1], head=0)
    >>> edit(scores, Point("attn.scores", ("batch", "head", "query", "key")))[0, 0]  # [query, key]
    tensor([[0., 0., 0.],
            [0., 0., 0.],
            [-inf, -inf, 0.]])
    """
    keys = Selection(slice(None) if key is None else key)
    queries = Selection(slice(None) if query is None else query)
    if _comes_after(keys.index, queries.index):
        warn(
            f"a causal model sees no key after its query, such as key {keys} after query "
            f"{queries}; this knockout has no effect in a causal model",
        )
    everywhere = Edit("knockout", _blocked, only_at="scores")
    indices = {"query": query, "key": key, **where}
    return everywhere.at(**{axis: index for axis, index in indices.items() if index is not None})


def _blocked(region: Tensor, value: Tensor, place: Region) -> Tensor:
    """Return scores of -inf."""
    return torch.full_like(region, -torch.inf)


def _comes_after(key: Any, query: Any) -> bool:
    """Return True if all keys certainly come after all queries."""
    keys = key if isinstance(key, list) else [key]
    queries = query if isinstance(query, list) else [query]
    columns = [*keys, *queries]
    are_numbers = {type(column) for column in columns} == {int}
    # A column from 0 and a column from -1 count from different ends, and cannot be compared.
    count_from_one_end = are_numbers and len({column < 0 for column in columns}) == 1
    return count_from_one_end and min(keys) > max(queries)


def _as_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask on the CPU, so that checks do not wait for another device."""
    kinds = (Tensor, type(None))
    require_kind("attention_mask", attention_mask, kinds, "a tensor [batch, pos]")
    return None if attention_mask is None else attention_mask.bool().cpu()


def _source_values(region: Tensor, value: Tensor, place: Region) -> Tensor:
    """Return the values of the source unchanged."""
    return value


def _mean_of_real(value: Tensor, mask: Tensor, dims: list[int], place: Region) -> Tensor:
    """Return the mean over some axes, ignoring padding, whose values may be anything."""
    if not mask.any(dims).all():
        raise EditError(padding_messages.no_real_token(f"the mean at {place.point}"))
    mask = to_device(mask, value.device).expand_as(value)
    total = value.where(mask, 0.0).sum(dims, keepdim=True)
    return total / mask.sum(dims, keepdim=True)


def _real_columns(mask: Tensor, averaged_axes: Axes, value: Tensor, place: Region) -> Tensor:
    """Return the mask of a reference's real columns, in a shape that broadcasts to `value`.

    Args:
        mask: the mask of whole texts, [batch, column].
        averaged_axes: the axes of the mean.
        value: the values of the reference.
        place: the place that the edit changes.
    """
    axes = tuple(
        axis for dim, axis in enumerate(place.axes) if axis == "batch" or dim == place.positions
    )
    if len(axes) < 2:
        raise EditError(padding_messages.mask_axes(place.point))
    source = SourceValue(mask, axes, whole=averaged_axes, what="attention_mask")
    mask_here = place.source_values(source, mask.device)
    dims = [place.axes.index(axis) for axis in axes]
    value_sizes = [value.shape[dim] for dim in dims]
    mask_sizes = [mask_here.shape[dim] for dim in dims]
    if value_sizes != mask_sizes:
        raise EditError(
            padding_messages.mask_shape(
                f"attention_mask of the reference at {place.point}",
                needed=value_sizes,
                given=mask_sizes,
                axes=f"[{', '.join(axes)}]",
            )
        )
    return mask_here
