"""Splicing: dictionaries behind points of a model, as parts of it, and their features as points.

1. At its point a dictionary encodes what it reads. Features pass through the point `features`, where hooks see and
   change them.
2. The value passed on is `value + (edited - features) @ W_dec`. So what the dictionary does not explain stays, and where
   nothing is edited the value does too, bit by bit.
3. While nobody listens to the features nothing is computed. With `error=None` the reconstruction is passed on instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookedRunner, HookError, Point, UnknownNameError
from hooks.base import explains_calls, require_choice, to_device, unknown_point
from hooks.shared import Part, PartPoint, blocks_of, names_by_layer, with_parts
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.places import point_at, warn_of_place
from interp.kinds import require_made
from interp.protocol import of, runner_of

Error = Literal["live", "frozen"] | None
"""What becomes of the error, the part of a value that the dictionary does not explain; see `splice`."""

Dictionaries = Mapping[str, Dictionary] | Dictionary | CrossLayerTranscoder
"""Dictionaries by the points where they stand, or one that says where it belongs."""

Value = Float[Tensor, "batch pos *axes"]


class SplicedDictionary(Part):
    """A dictionary behind a point. Its point is `features`, [batch pos feature].

    Args:
        dictionary: the dictionary.
        point: the point whose value it changes.
        reads: the name of the point that it reads; None for the same.
        error: see `splice`.

    Attributes:
        kept: where its reconstruction is passed on, if the error is left out; None for all positions.
    """

    kept: Bool[Tensor, "batch pos"] | None = None

    def __init__(
        self, dictionary: Dictionary, point: Point, reads: str | None, error: Error
    ) -> None:
        super().__init__()
        self.dictionary, self.reads, self.error = dictionary, reads, error
        self.has_heads = "d_head" in point.axes
        n = dictionary.n_features
        self.features = PartPoint("batch pos feature", f"{n} features of a dictionary")

    def _fused(self, value: Value, read: Value) -> Value:
        if self.error is None:
            return self.replaced(value, self.dictionary(self.vector(read)))
        return value if self.error == "live" else self._explicit(value, read)

    def _explicit(self, value: Value, read: Value) -> Value:
        dictionary, x = self.dictionary, self.vector(read)
        features = dictionary.encode(x)
        edited = self.features(features)
        if edited is features and self.error == "live":
            return value  # even where features are no numbers
        if self.error is None:
            return self.replaced(value, dictionary.decode(edited, x))
        before = self.vector(value)
        if self.error == "frozen":
            before, features = before.detach(), features.detach()
            if dictionary.W_skip is not None:
                rest = (x - x.detach()).to(dictionary.W_skip.dtype)
                before = before + rest @ dictionary.W_skip
        return self.put(value, before + dictionary.write(edited - features, x))

    forward = FusedUnlessHooked("features", fused=_fused)(_explicit)

    def vector(self, value: Value) -> Float[Tensor, "batch pos d"]:
        """What the dictionary sees of a value: one head, or all in a row."""
        if self.has_heads:
            head = self.dictionary.head
            value = value.flatten(-2) if head is None else value[..., head, :]
        return value

    def replaced(self, value: Value, vector: Float[Tensor, "#batch #pos d"]) -> Value:
        """Return the value with another vector at the positions that are `kept`."""
        before = self.vector(value)
        if self.kept is not None:
            vector = vector.where(to_device(self.kept, value.device)[..., None], before)
        return self.put(value, vector.expand_as(before))

    def put(self, value: Value, vector: Float[Tensor, "batch pos d"]) -> Value:
        """Return the value with another vector in place of what the dictionary sees of it."""
        vector = vector.to(value.dtype)
        if not self.has_heads or self.dictionary.head is None:
            return vector.view(value.shape)
        heads = [*value.unbind(-2)]
        heads[self.dictionary.head] = vector
        return torch.stack(heads, -2)


@explains_calls
@contextmanager
def splice(
    model: nn.Module,
    dictionaries: Dictionaries,
    *,
    error: Error = "live",
    reads: str | Mapping[str, str] | None = None,
    at: str | None = None,
) -> Iterator[HookedRunner]:
    """A `with` in which dictionaries are part of a model, and their features are points like others.

    `blocks.1.resid_post.features` is the point of a dictionary at `blocks.1.resid_post`. It can be kept, edited, swept
    and attributed to like any other, in every run inside the `with`, in all threads. A dictionary acts before all hooks
    at its point. Lazy caches of features must be read inside.

    Args:
        model: any model, in evaluation mode.
        dictionaries: for each point its dictionary, or one that says where it belongs. Transcoders stand where they
            write, such as `blocks.1.mlp_out`.
        error: `live`: what features do not explain is added, so the model computes what it did before until
            features are edited; gradients flow through it. `frozen`: likewise, but no gradient flows through it, so
            all that passes goes through features (and a skip connection). None: the error is left out.
        reads: the point that a transcoder reads, or one for each point; by default that of its config. A last part
            such as `ln2.normalized` is that of the same layer.
        at: the point where a single dictionary stands; by default that of its config. Names of modules of `transformers`
            that a config gives are those of the point with the same value in this model, which runs on a few tokens.

    Raises:
        TypeError: if one is no dictionary, or writes to several layers.
        UnknownNameError: if the model has no such point.
        ValueError: if a size does not fit, or a dictionary does not say what it reads or where it belongs.
        HookError: if a transcoder reads in another block than it writes, or the point has a dictionary already.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a dictionary says that it was trained at another place; see
            `interp.features.places`.

    >>> from interp import edits
    >>> from interp.features import TopK
    >>> from models import load
    >>> model, W = load("pydoc-4l"), torch.eye(128)
    >>> neurons = Dictionary(W, W, torch.zeros(128), torch.zeros(128), TopK(5))
    >>> with splice(model, {"blocks.1.resid_post": neurons}) as runner:
    ...     logits, cache = runner.run_with_cache("def f(x):", names="*.features")
    ...     without = runner.run_with_hooks("def f(x):", hooks={"*.features": edits.zero(feature=[3, 7])})
    >>> cache
    ActivationCache of 1 values, 4,608 bytes
      blocks.1.resid_post.features  float32 [1, 9, 128]  batch pos feature
    """
    require_choice("error", error, ("live", "frozen", None))
    runner = runner_of(model)
    with with_parts(model, runner.points, placed(runner, dictionaries, error, reads, at)):
        yield HookedRunner(model)


def placed(
    runner: HookedRunner,
    dictionaries: Dictionaries,
    error: Error = "live",
    reads: str | Mapping[str, str] | None = None,
    at: str | None = None,
) -> dict[str, SplicedDictionary]:
    """Dictionaries as parts for points of a model, with the warnings of `splice`; see there."""
    if isinstance(dictionaries, nn.Module):
        dictionaries = {at or _place_of(dictionaries): dictionaries}  # type: ignore[dict-item]  # refused below
    elif at is not None:
        raise ValueError(f"at must be None where each dictionary has its point; got {at}")
    if not isinstance(dictionaries, Mapping):
        require_made("dictionaries", dictionaries, Dictionary)
    parts: dict[str, SplicedDictionary] = {}
    for name, dictionary in dictionaries.items():
        if not isinstance(dictionary, Dictionary):
            several = isinstance(dictionary, CrossLayerTranscoder)
            rule = (
                "one that writes to several layers is for attribution graphs"
                if several
                else "see load_sae"
            )
            raise TypeError(
                f"a dictionary of one layer must stand at {name}; got {type(dictionary).__name__} ({rule})"
            )
        point = _point(runner, name, "at")
        source = _reading(runner, dictionary, point, reads)
        _check_sizes(runner.model, dictionary, point, source)
        places = (dictionary.writes, point.name), (dictionary.reads, source.name)
        warn_of_place(runner, *places)
        parts[point.name] = SplicedDictionary(
            dictionary, point, None if source is point else source.name, error
        )
    return parts


def _place_of(dictionary: nn.Module) -> str:
    place = getattr(dictionary, "writes", None)
    if not isinstance(place, str):
        raise ValueError(
            "the dictionary must say where it belongs, or give at=, such as at='blocks.1.mlp_out'; it does not"
        )
    return place


def _point(runner: HookedRunner, name: str, option: str) -> Point:
    """The point that a name means here; the option is what says another."""
    known = point_at(name, runner)
    if known not in runner.points:
        problem = unknown_point(name, runner.points, "hook point").args[0]
        raise UnknownNameError(
            f"{problem}, nor known to have its value in this model: give {option}= with the one that is meant",
            name,
            runner.points,
        )
    return runner.points[known]


def _reading(
    runner: HookedRunner,
    dictionary: Dictionary,
    point: Point,
    reads: str | Mapping[str, str] | None,
) -> Point:
    """The point that a dictionary reads if it stands at `point`."""
    name = reads.get(point.name) if isinstance(reads, Mapping) else reads
    if name is None:
        if not dictionary.is_transcoder:
            return point
        name = dictionary.reads
        if name is None:
            raise ValueError(
                f"the transcoder at {point.name} does not say what it reads: give reads="
            )
    if point.layer is not None and any(each.endswith(f".{name}") for each in runner.points):
        name = names_by_layer(name, runner.points).get(point.layer, name)
    source = _point(runner, name, "reads")
    blocks = blocks_of(runner.model)
    if blocks.get(source.name) != blocks.get(point.name):
        raise HookError(
            f"a transcoder must read in the block where it writes; {point.name} is not in that of {name}"
        )
    return source


def _check_sizes(model: nn.Module, dictionary: Dictionary, point: Point, source: Point) -> None:
    """Refuses points whose values the dictionary cannot read or write."""
    for place, size in ((source, dictionary.d_in), (point, dictionary.d_out)):
        axes = place.axes
        if axes and (axes[:2] != ("batch", "pos") or axes[-1] == "1"):
            raise ValueError(
                f"a dictionary needs vectors at positions, [batch pos d_model] or like that; got {place}"
            )
        heads, head = _heads(model, axes), dictionary.head
        if heads is not None and head is not None and not 0 <= head < heads:
            raise ValueError(f"a dictionary's head must be 0 to {heads - 1} at {place}; got {head}")
        expected = _size(model, axes, head)
        if expected not in (size, None):
            what = "read" if place is source else "write"
            raise ValueError(
                f"the dictionary at {point.name} must {what} {expected} numbers at {place}; got one for {size} (reads= and at= say other points)"
            )


def _size(model: nn.Module, axes: tuple[str, ...], head: int | None) -> int | None:
    """The size of a dictionary's vectors at a point with these axes; None if unknown."""
    config: Any = getattr(of(model), "config", None)
    sizes = [getattr(config, axis, None) for axis in axes[-1:]]
    if "d_head" in axes and head is None:
        sizes.append(_heads(model, axes))
    return None if None in sizes or not sizes else int(torch.tensor(sizes).prod())


def _heads(model: nn.Module, axes: tuple[str, ...]) -> int | None:
    """The number of heads at a point with these axes; None if it has none, or that is unknown."""
    name = next((size for axis, size in _HEADS.items() if axis in axes), None)
    return None if name is None else getattr(getattr(of(model), "config", None), name, None)


_HEADS = {"head": "n_heads", "kv_head": "n_kv_heads"}
