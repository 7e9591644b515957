"""The kinds of edits: functions that make an `Edit`, and what each does to a value."""

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
    """Means that were made before, of some points, such as those of `interp.store.statistics`."""

    def mean_at(self, point: Point) -> Shaped[Tensor, "..."]:
        """The mean at a point."""


def zero(*unnamed: object, **where: Index) -> Edit:
    """Set values to zero.

    Raises:
        TypeError: if the place is given without the name of its axis.

    >>> zero(head=[0, 2])
    edits.zero(head=[0, 2])
    """
    if unnamed:
        shown_value = shown(unnamed[0])
        raise TypeError(
            f"zero takes places by axis, as edits.zero(head=3); got {shown_value} alone"
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
    """Add a vector, a direction's vector of the point, or other values, times a number.

    For the columns of a cache see `replace`.

    >>> add(torch.ones(5), 2.0, head=3, pos=-1)
    edits.add(Tensor[5], 2.0, head=3, pos=-1)
    """
    require_kind("scale", scale, (Number, Tensor), "a number")
    arguments = {"0": vector} | ({} if scale == 1 else {"1": scale})
    source = ValueSource(vector)
    return Edit("add", lambda x, value, place: x + scale * value, arguments, source).at(**where)


def replace(source: Values, *, source_pos: Index | None = None, **where: Index) -> Edit:
    """Take values from another run, layer, position or model.

    Where `pos` counts from the end, as `pos=-1` does, a cache gives the positions counted from the
    end of its own texts, whatever their lengths and padding. Otherwise values go to the same
    columns.

    Args:
        source: the values of whole texts; for another layer the tensor itself, `cache["z", 2]`. A
            tensor does not know its padding, so its columns are always those of the edited texts.
        source_pos: the columns of the source that go to the selected positions, in order, or one
            column for all. Negative ones count from the end of each text of the source.
        where: what is replaced.

    Raises:
        EditError: where the edit acts, if a value of padding would go to a real token, or a pattern
            has other keys than the edited text.

    >>> from hooks import Point
    >>> source = torch.tensor([[5.0, 6.0, 7.0]])
    >>> replace(source, pos=0, source_pos=-1)(torch.ones(1, 3), Point("any", ("batch", "pos")))
    tensor([[7., 1., 1.]])
    """
    return Edit("replace", _source_values, {"0": source}, source_of(source, source_pos)).at(**where)


def mean(
    reference: Values,
    over: str | tuple[str, ...] = "batch",
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Take the mean of reference runs (mean ablation), at each position unless it is averaged over.

    Where `pos` counts from the end, the mean is over positions counted from the end of each
    reference text: `mean(cache, pos=-1)` is the mean over the last tokens, as for function vectors
    (Todd et al. 2024).

    Args:
        reference: the values of reference runs, any number of texts; or statistics, which hold
            means already.
        over: the axes to average over: `"batch"`, or `("batch", "pos")`. Where a point declares no
            axes, its first is the batch.
        attention_mask: which columns of the reference are real, 1 or True. Padding is left out. A
            cache knows its own.
        where: what is replaced.

    Raises:
        ValueError: if `over` names no axis.
        EditError: where the edit acts, if it is a mean of one row, or if `pos` counts from the end
            and is not the same for all texts.

    >>> from hooks import Point
    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))(torch.zeros(1, 2), Point("any", ("batch", "pos")))
    tensor([[2., 5.]])
    """
    require_kind("over", over, (str, tuple, list), "a name of an axis, or several")
    dropped = (over,) if isinstance(over, str) else tuple(over)
    if not dropped:
        raise ValueError("over must name at least one axis; got ()")
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
                f"a mean over {' and '.join(dropped)} must be of several at {place.point}; got one "
                "(edits.replace takes it as it is)"
            )
        value = at_least_float32(value)
        if source.rows == "all" and place.source_columns is not None:
            # The columns of each text were counted from its last real token, so all are real.
            return place.in_order(value.mean(dims, keepdim=True))
        real = source.mask(place.point.name)
        if real is None or (attention_mask is None and place.positions is None):
            return value.mean(dims, keepdim=True)
        return _mean_of_real(value, _real_columns(real, dropped, value, place), dims, place)

    arguments = {"0": reference, "over": over, "attention_mask": attention_mask}
    return Edit("mean", averaged, arguments, source).at(**where)


def resample(
    source: Values,
    seed: int = 0,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    **where: Index,
) -> Edit:
    """Take each row's values from another text of a source (resample ablation).

    Row i takes from the same donor wherever the edit acts. A copy of its text, with the same real
    tokens, is no donor: its values would change nothing. A cache of whole texts knows copies; a
    tensor does not.

    Args:
        source: values of as many texts as the batch has, padded alike, such as a cache of the same
            batch. Where a point declares no axes, its first is the batch.
        seed: chooses the donors.
        attention_mask: which columns of the texts are real, 1 or True; a cache knows its own. A row
            takes from one with the same padding.
        where: what is replaced.

    Raises:
        EditError: where the edit acts, if a value of padding would go to a real token, if positions
            count from the end and the source has other padding than the edited texts, or if all
            other rows with the same padding are copies of one text.

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
        if region.is_meta or isinstance(region, FakeTensor):  # a plan has no numbers to draw
            return region
        texts = values.copies(value, place.axes, place.point.name)
        chosen = donors(padding or [[]] * n, seed, texts)[first : first + place.lengths[at]]
        return value.index_select(at, to_device(torch.tensor(chosen), value.device))

    arguments = {"0": source, "seed": seed, "attention_mask": attention_mask}
    return Edit("resample", donated, arguments, values).at(**where)


def noise(scale: float, seed: int = 0, **where: Index) -> Edit:
    """Add Gaussian noise, as in causal tracing (Meng et al. 2022).

    Each number follows from the seed, the point's name and the number's own place: row, column of
    the text, and so on. So it does not depend on the length of a piece, on the device or on other
    edits.

    Args:
        scale: the standard deviation.
        seed: another seed gives other noise.
        where: what is changed.

    >>> from hooks import Point
    >>> noised = noise(0.1, seed=3, pos=slice(0, 2))(torch.zeros(1, 3), Point("any", ("batch", "pos")))
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
    """Stop attention from some queries to some keys, at `scores`: -inf before the softmax.

    The weights of the other keys grow to a sum of 1. A query without any key left gets zeros.

    Args:
        query, key: columns of the text; None for all.
        where: which heads or rows; None for all.

    Warns:
        UserWarning: if each key comes after each query.

    >>> knockout(query=-1, key=[2, 3], head=5)
    edits.knockout(query=-1, key=[2, 3], head=5)
    """
    first, last = (Selection(slice(None) if index is None else index) for index in (key, query))
    if _comes_after(first.index, last.index):
        warn(
            f"a causal model sees no key that comes after its query, as key {first} after query {last}: "
            "this knockout changes nothing there",
        )
    chosen = {"query": query, "key": key, **where}
    selected = {axis: index for axis, index in chosen.items() if index is not None}
    none = Edit(
        "knockout", lambda x, value, place: torch.full_like(x, -torch.inf), only_at="scores"
    )
    return none.at(**selected)


def _comes_after(key: Any, query: Any) -> bool:
    """Whether all keys are known to come after all queries."""
    keys, queries = (i if isinstance(i, list) else [i] for i in (key, query))
    numbers = [*keys, *queries]
    same_end = {type(n) for n in numbers} == {int} and len({n < 0 for n in numbers}) == 1
    return same_end and min(keys) > max(queries)


def _as_mask(attention_mask: Tensor | None) -> Tensor | None:
    """The mask on the CPU, where checks of it wait for nothing."""
    kinds = (Tensor, type(None))
    require_kind("attention_mask", attention_mask, kinds, "a tensor [batch, pos]")
    return None if attention_mask is None else attention_mask.bool().cpu()


def _source_values(region: Tensor, value: Tensor, place: Region) -> Tensor:
    return value


def _mean_of_real(value: Tensor, real: Tensor, dims: list[int], place: Region) -> Tensor:
    """The mean over some axes of the entries that are not padding, which may hold anything."""
    if not real.any(dims).all():
        raise EditError(f"attention_mask must leave columns to average at {place.point}; got none")
    real = to_device(real, value.device).expand_as(value)
    total = value.where(real, 0.0).sum(dims, keepdim=True)
    return total / real.sum(dims, keepdim=True)


def _real_columns(real: Tensor, dropped: Axes, value: Tensor, place: Region) -> Tensor:
    """The mask of the real columns of a reference, with the axes of `value`, some of size 1."""
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
