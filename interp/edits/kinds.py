"""The kinds of edits: functions that make an `Edit`, with their changes of values."""

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
    require_integer,
    require_kind,
    shown,
    to_device,
    warn,
)
from interp.edits.draws import donors, normal
from interp.edits.edit import Edit
from interp.edits.places import Region, SourceValue
from interp.edits.sources import Axes, Values, ValueSource, source_of


@runtime_checkable
class Means(Protocol):
    """Precomputed means of some points, such as the results of `interp.store.statistics`."""

    def mean_at(self, point: Point) -> Shaped[Tensor, "..."]:
        """Return the mean at a point."""


def zero(*unnamed: object, **where: Index) -> Edit:
    """Set values to zero.

    Raises:
        TypeError: if the place is given without the name of an axis.

    >>> zero(head=[0, 2])
    edits.zero(head=[0, 2])
    """
    if unnamed:
        shown_value = shown(unnamed[0])
        raise TypeError(
            f"zero needs places by axis, such as edits.zero(head=3); got {shown_value} without an "
            "axis"
        )
    return Edit("zero", lambda region, value, place: torch.zeros_like(region), {}).at(**where)


def scale(factor: float, **where: Index) -> Edit:
    """Multiply values by a number.

    >>> from hooks import Point
    >>> scale(0.5, pos=1)(torch.ones(1, 3), Point("resid_pre", ("batch", "pos")))
    tensor([[1.0000, 0.5000, 1.0000]])
    """
    require_kind("factor", factor, (Number, Tensor), "a number")
    return Edit("scale", lambda region, value, place: region * factor, {"0": factor}).at(**where)


def add(vector: Values, scale: float = 1.0, **where: Index) -> Edit:
    """Add a vector, the vector of a direction at the point, or other values, times a number.

    See `replace` for the columns of a cache.

    >>> add(torch.ones(5), 2.0, head=3, pos=-1)
    edits.add(Tensor[5], 2.0, head=3, pos=-1)
    """
    require_kind("scale", scale, (Number, Tensor), "a number")
    arguments = {"0": vector} | ({} if scale == 1 else {"1": scale})
    source = ValueSource(vector)
    return Edit("add", lambda x, value, place: x + scale * value, arguments, source).at(**where)


def replace(source: Values, *, source_pos: Index | None = None, **where: Index) -> Edit:
    """Replace values by values of another run, layer, position or model.

    If `pos` counts from the end, such as `pos=-1`, positions of a cache are counted from the end of
    the cached texts, whose lengths and padding may differ. Otherwise values are copied to the same
    columns.

    Args:
        source: the values of whole texts. For another layer, pass the tensor `cache["z", 2]`. A
            tensor has no padding mask, so its columns are always the columns of the edited texts.
        source_pos: the columns of the source for the selected positions, in order, or one column
            for all positions. Negative numbers count from the end of each text of the source.
            Default: see above.
        where: the place that is replaced, by axis.

    Raises:
        EditError: when the edit is applied, if a value of padding would be copied to a real token,
            or the keys of a pattern differ from the keys of the edited text.

    >>> from hooks import Point
    >>> source = torch.tensor([[5.0, 6.0, 7.0]])
    >>> replace(source, pos=0, source_pos=-1)(torch.ones(1, 3), Point("any", ("batch", "pos")))
    tensor([[7., 1., 1.]])
    """
    return Edit("replace", _source_values, {"0": source}, source_of(source, source_pos)).at(**where)


def mean(
    reference: Values,
    across: str | tuple[str, ...] = "batch",
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Replace values by the mean of reference runs (mean ablation).

    The mean is taken separately at each position, unless `across` contains the positions. If `pos`
    counts from the end, the mean is over positions counted from the end of each reference text:
    `mean(cache, pos=-1)` is the mean over the last tokens, as for function vectors (Todd et al.
    2024).

    Args:
        reference: the values of reference runs of any number of texts; or statistics, which contain
            means.
        across: the axes to average over: `"batch"`, or `("batch", "pos")`. If a point declares no
            axes, its first axis is the batch.
        attention_mask: 1 or True for real columns of the reference. Padding is ignored. Default:
            the mask of a cache; a tensor has no padding.
        where: the place that is replaced, by axis.

    Raises:
        ValueError: if `across` names no axis.
        EditError: when the edit is applied, if it is a mean of one row, or if `pos` counts from the
            end and differs between texts.

    >>> from hooks import Point
    >>> edit = mean(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))
    >>> edit(torch.zeros(1, 2), Point("any", ("batch", "pos")))
    tensor([[2., 5.]])
    """
    if "over" in where:
        raise TypeError("edits.mean takes no argument over=; it is now across=")
    require_kind("across", across, (str, tuple, list), "a name of an axis, or several names")
    dropped = (across,) if isinstance(across, str) else tuple(across)
    if not dropped:
        raise ValueError("across must name at least one axis; got ()")
    if isinstance(reference, Means):
        return Edit("mean", _source_values, {"0": reference}, ValueSource(reference)).at(**where)
    source = ValueSource(
        reference,
        whole=dropped,
        attention_mask=_as_mask(attention_mask),
        rows="all" if "batch" in dropped else "same",
    )

    def averaged(region: Tensor, value: Tensor, place: Region) -> Tensor:
        dims = [place.axes.index(axis) for axis in dropped]
        if all(value.shape[dim] == 1 for dim in dims):
            raise EditError(
                f"a mean over {' and '.join(dropped)} needs several values at {place.point}; got "
                "one "
                "(use edits.replace for one value)"
            )
        value = at_least_float32(value)
        if source.rows == "all" and place.source_columns is not None:
            # The columns of each text were counted from its last real token, so they are all real.
            return place.in_order(value.mean(dims, keepdim=True))
        real = source.mask(place.point.name)
        if real is None or (attention_mask is None and place.positions is None):
            return value.mean(dims, keepdim=True)
        return _mean_of_real(value, _real_columns(real, dropped, value, place), dims, place)

    arguments = {"0": reference, "across": across, "attention_mask": attention_mask}
    return Edit("mean", averaged, arguments, source).at(**where)


def resample(
    source: Values,
    seed: int = 0,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Replace the values of each row by values of another text of a source (resample ablation).

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

    def donated(region: Tensor, value: Tensor, place: Region) -> Tensor:
        at = place.axes.index("batch")
        n, first = place.sizes[at], place.firsts[at]
        real = values.mask(place.point.name)
        padding = None if real is None else real.tolist()
        rows = [value.shape[at]] if padding is None else [value.shape[at], len(padding)]
        if {*rows} != {n}:
            raise EditError(f"resample must have {n} rows at {place.point}; got {rows}")
        # In a plan, values have no numbers to compare.
        if region.is_meta or isinstance(region, FakeTensor):
            return region
        texts = values.copies(value, place.axes, place.point.name)
        chosen = donors(padding or [[]] * n, seed, texts)[first : first + place.lengths[at]]
        return value.index_select(at, to_device(torch.tensor(chosen), value.device))

    arguments = {"0": source, "seed": seed, "attention_mask": attention_mask}
    return Edit("resample", donated, arguments, values).at(**where)


def noise(scale: float, seed: int = 0, **where: Index) -> Edit:
    """Add Gaussian noise, as in causal tracing (Meng et al. 2022).

    Each number depends only on the seed, the name of the point and the place of the number: row,
    column of the text, and so on. So it does not depend on the length of a piece, on the device or
    on other edits.

    Args:
        scale: the standard deviation.
        seed: the seed of the noise.
        where: the place that is changed, by axis.

    >>> from hooks import Point
    >>> edit = noise(0.1, seed=3, pos=slice(0, 2))
    >>> noised = edit(torch.zeros(1, 3), Point("any", ("batch", "pos")))
    >>> (noised != 0).tolist()
    [[True, True, False]]
    """

    require_kind("scale", scale, (Number, Tensor), "a number")
    require_integer("seed", seed, least=-(2**63))

    def noisy(region: Tensor, value: Tensor, place: Region) -> Tensor:
        drawn = scale * normal(seed, place)
        return region + to_device(drawn.to(region.dtype), region.device)

    return Edit("noise", noisy, {"0": scale, "seed": seed}).at(**where)


def knockout(query: Index | None = None, key: Index | None = None, **where: Index) -> Edit:
    """Block attention from some queries to some keys, by setting `scores` to -inf.

    The weights of the other keys are renormalised by the softmax. If a query has no key left, its
    weights are 0.

    Args:
        query, key: the columns of the text. Default: all columns.
        where: the heads or rows, by axis. Default: all.

    Warns:
        UserWarning: if all keys come after all queries.

    >>> knockout(query=-1, key=[2, 3], head=5)
    edits.knockout(query=-1, key=[2, 3], head=5)
    """
    first, last = (Selection(slice(None) if index is None else index) for index in (key, query))
    if _comes_after(first.index, last.index):
        warn(
            f"a causal model sees no key after its query, such as key {first} after query {last}; "
            "this knockout has no effect in a causal model",
        )
    chosen = {"query": query, "key": key, **where}
    selected = {axis: index for axis, index in chosen.items() if index is not None}
    none = Edit(
        "knockout", lambda x, value, place: torch.full_like(x, -torch.inf), only_at="scores"
    )
    return none.at(**selected)


def _comes_after(key: Any, query: Any) -> bool:
    """Return whether all keys certainly come after all queries."""
    keys, queries = (i if isinstance(i, list) else [i] for i in (key, query))
    numbers = [*keys, *queries]
    same_end = {type(n) for n in numbers} == {int} and len({n < 0 for n in numbers}) == 1
    return same_end and min(keys) > max(queries)


def _as_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask on the CPU, so that checks do not wait for another device."""
    kinds = (Tensor, type(None))
    require_kind("attention_mask", attention_mask, kinds, "a tensor [batch, pos]")
    return None if attention_mask is None else attention_mask.bool().cpu()


def _source_values(region: Tensor, value: Tensor, place: Region) -> Tensor:
    return value


def _mean_of_real(value: Tensor, real: Tensor, dims: list[int], place: Region) -> Tensor:
    """Return the mean over some axes, ignoring padding, whose values may be anything."""
    if not real.any(dims).all():
        raise EditError(
            f"attention_mask must leave columns to average at {place.point}; got only padding"
        )
    real = to_device(real, value.device).expand_as(value)
    total = value.where(real, 0.0).sum(dims, keepdim=True)
    return total / real.sum(dims, keepdim=True)


def _real_columns(real: Tensor, dropped: Axes, value: Tensor, place: Region) -> Tensor:
    """Return the mask of a reference's real columns, with the axes of `value`, some of size 1."""
    axes = tuple(axis for axis in place.axes if axis in ("batch", "pos", "query"))
    if len(axes) < 2:
        raise EditError(f"attention_mask needs the axes batch and pos; got {place.point}")
    mask = SourceValue(real, axes, whole=dropped, what="attention_mask")
    real_there = place.source_values(mask, real.device)
    sizes = [[x.shape[place.axes.index(axis)] for axis in axes] for x in (value, real_there)]
    if sizes[0] != sizes[1]:
        rule = f"attention_mask must fit the reference, {sizes[0]} along {' and '.join(axes)}"
        raise EditError(f"{rule} at {place.point}; got {sizes[1]}")
    return real_there
