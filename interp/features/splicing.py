"""Splice dictionaries into a model, with their features as points.

1. A dictionary encodes the value that it reads. The features pass through the point `features`,
   where hooks can read and edit them.
2. The value becomes `value + (edited - features) @ W_dec`. The error of the dictionary is therefore
   preserved. If no feature is edited, the value is unchanged bit by bit.
3. Without a hook at the features, nothing is computed. Two settings of `error` compute the features
   in every run. With `frozen`, gradients flow through the features and not through the error. With
   None, the value becomes the reconstruction.
4. With `pos`, the value changes only at these positions of each text. The hook knows the columns
   and the padding of a run from the context of `hooks` that tells edits.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookedRunner, HookError, Point, UnknownNameError
from hooks.base import (
    Index,
    Selection,
    explains_calls,
    padding_messages,
    piece_read,
    places_inside,
    require_choice,
    require_kind,
    to_device,
    unknown_point,
)
from hooks.shared import Part, PartPoint, blocks_of, names_by_layer, with_parts
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.crosscoder import Crosscoder
from interp.features.dictionary import Dictionary
from interp.features.places import point_at, warn_of_place
from interp.kinds import require_made
from interp.protocol import is_of_text, of, runner_of

Error = Literal["live", "frozen"] | None
"""The treatment of the error, the part of a value that the dictionary does not reconstruct; see
`splice`.
"""

Dictionaries = Mapping[str, Dictionary] | Dictionary
"""Dictionaries by the points that they write, such as a `TranscoderSet`, or a single dictionary
with a known point.
"""

Value = Float[Tensor, "batch pos *axes"]


class SplicedDictionary(Part):
    """A dictionary that is spliced in at a point. Its own point is `features`, [batch pos feature].

    Args:
        dictionary: the dictionary.
        point: the point whose value the dictionary changes.
        reads: the name of the point that the dictionary reads, or None for the same point.
        error: whether the error of the dictionary is added: `live`, `frozen` or None; see `splice`.
        pos: the positions of each text where the dictionary changes the value; None for all.

    Attributes:
        kept: a mask of the positions where the dictionary changes the value, for runs of one batch.
            Default: None, for the positions in `pos`.
    """

    kept: Bool[Tensor, "batch pos"] | None = None

    def __init__(
        self,
        dictionary: Dictionary,
        point: Point,
        reads: str | None,
        error: Error,
        pos: Index | None = None,
    ) -> None:
        super().__init__()
        self.dictionary = dictionary
        self.reads = reads
        self.error = error
        self.pos = None if pos is None else Selection(pos)
        self.needs_columns = self.pos is not None
        self.keeps_gradients = error == "live"
        self.counts_back = self.pos is not None and self.pos.counts_back
        changed = {"error": error, "pos": self.pos}
        usual = {"error": "live", "pos": None}
        self.settings = "".join(
            f" {name}={value!r}" for name, value in changed.items() if value != usual[name]
        )
        self.name = point.name
        self.has_heads = "d_head" in point.axes
        n = dictionary.n_features
        self.features = PartPoint("batch pos feature", f"{n} features of a dictionary")

    def _fused(self, value: Value, read: Value) -> Value:
        """Return the new value in a run in which no hook needs the point `features`.

        With `error="frozen"`, the features are computed nevertheless, because gradients flow
        through them.
        """
        if self.error is None:
            return self.replaced(value, self.dictionary(self.vector(read)))
        return value if self.error == "live" else self._explicit(value, read)

    def _explicit(self, value: Value, read: Value) -> Value:
        """Return the new value in a run in which a hook reads or edits the point `features`.

        The features are computed and pass through the point. All other runs call `_fused`; see
        `FusedUnlessHooked`.

        Args:
            value: the value of the point that the dictionary writes.
            read: the value of the point that the dictionary reads.
        """
        dictionary = self.dictionary
        x = self.vector(read)
        features = dictionary.encode(x)
        edited = self.features(features)
        if edited is features and self.error == "live":
            # No feature was edited. `value + 0 @ W_dec` would be NaN if a feature is NaN or
            # infinite, so return the value itself.
            return value
        if self.error is None:
            return self.replaced(value, dictionary.decode(edited, x))
        before = self.vector(value)
        if self.error == "frozen":
            before, features = before.detach(), features.detach()
            bypass = dictionary.bypass(x)
            if bypass is not None:
                before = before + (bypass - bypass.detach())
        return self.replaced(value, before + dictionary.write(edited - features, x))

    forward = FusedUnlessHooked("features", fused=_fused)(_explicit)

    def vector(self, value: Value) -> Float[Tensor, "batch pos d"]:
        """Return the part of a value that the dictionary reads: one head, or all heads
        concatenated.
        """
        if self.has_heads:
            head = self.dictionary.head
            value = value.flatten(-2) if head is None else value[..., head, :]
        return value

    def replaced(self, value: Value, vector: Float[Tensor, "#batch #pos d"]) -> Value:
        """Return the value with another vector at the positions where the dictionary changes it.

        Args:
            value: the value of the point.
            vector: the vector; its first two sizes may be 1.
        """
        before = self.vector(value)
        kept = self.kept
        if kept is None and self.pos is not None:
            kept = self._at(self.pos, value)
        if kept is not None:
            vector = vector.where(to_device(kept, value.device)[..., None], before)
        return self.put(value, vector.expand_as(before))

    def _at(self, pos: Selection, value: Value) -> Bool[Tensor, "#batch pos"]:
        """Return a mask that is True at some positions of each text, in the columns of a value.

        Args:
            pos: the positions.
            value: the value of the point in the columns that this run reads.

        Raises:
            HookError: if the mask of the texts does not fit the value.
        """
        piece = piece_read()
        piece.require_end(pos, f"pos at {self.name}")
        start = piece.start or 0
        end = start + value.shape[1]
        # If a block computes its positions in pieces, the text has more columns than this piece.
        n_columns = end + piece.n_later
        mask = piece.of_run.real
        columns = piece.columns
        if columns is None:
            columns = [[*range(n_columns)]]
        elif mask is None or mask.shape[1] != n_columns or len(value) % len(columns):
            raise HookError(
                padding_messages.mask_shape(
                    f"the mask of the texts, which pos= reads at {self.name},",
                    needed=[len(value), n_columns],
                    given=[] if mask is None else [*mask.shape],
                )
            )
        # Without a cache, each step of a generation reads the text again. Then a position that
        # counts from the end also selects what it selected in earlier steps.
        first = n_columns if piece.began is None else piece.began
        kept = torch.zeros(len(columns), n_columns, dtype=torch.bool)
        for row, columns_of_text in zip(kept, columns, strict=True):
            for size in range(first, n_columns + 1):
                so_far = [column for column in columns_of_text if column < size]
                row[[so_far[place] for place in places_inside(pos, len(so_far))]] = True
        # Edited runs are further rows of the same texts.
        return kept[:, start:end].repeat(len(value) // len(columns), 1)

    def put(self, value: Value, vector: Float[Tensor, "batch pos d"]) -> Value:
        """Return the value with another vector in place of the part that the dictionary reads.

        Args:
            value: the value of the point.
            vector: the vector at each position.
        """
        vector = vector.to(value.dtype)
        if not self.has_heads or self.dictionary.head is None:
            return vector.view(value.shape)
        heads = [*value.unbind(-2)]
        heads[self.dictionary.head] = vector
        return torch.stack(heads, -2)


class _Splicing(AbstractContextManager[HookedRunner]):
    """The context manager of `splice`. If it is used without `with`, the error shows the right use.

    Args:
        opened: the context manager that splices the dictionaries in.
    """

    def __init__(self, opened: AbstractContextManager[HookedRunner]) -> None:
        self._opened = opened

    def __enter__(self) -> HookedRunner:
        return self._opened.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)

    def __repr__(self) -> str:
        return (
            "splice(...), which acts only in a `with` statement: "
            "with splice(model, dictionary) as runner: ..."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"splice must be used in a `with` statement; got .{name} without it (with "
            f"splice(model, dictionary) as runner: runner.{name} ...)"
        )


@explains_calls
def splice(
    model: nn.Module,
    dictionaries: Dictionaries,
    *,
    error: Error = "live",
    reads: str | Mapping[str, str] | None = None,
    point: str | None = None,
    pos: Index | None = None,
) -> AbstractContextManager[HookedRunner]:
    """Make dictionaries part of a model inside a `with` statement, and yield a runner of the model.

    Call it as `with splice(model, dictionary) as runner:`. The features of each dictionary are
    points of the model.

    `blocks.1.resid_post.features` is the point of a dictionary at `blocks.1.resid_post`. The point
    can be cached, edited, swept and attributed like any point of the model, in every run inside the
    `with` statement and in all threads. A dictionary acts before all hooks at its point. Lazy
    caches of features must be read inside the `with` statement.

    Args:
        model: any model, in evaluation mode.
        dictionaries: a dictionary for each point, such as a `TranscoderSet`, or a single dictionary
            with a known point. The point of a transcoder is the point that it writes, such as
            `blocks.1.mlp_out`.
        error: the treatment of the error, the part of the value that the features do not
            reconstruct. With `live`, the error is added, so the outputs of the model only change
            when features are edited, and gradients flow through the error. With `frozen`, the error
            is added without a gradient, so all gradients flow through features (and a skip
            connection). This changes the gradients at earlier points, such as the features of a
            dictionary in an earlier layer, and not at the dictionary's own features. With None, the
            error is left out. Default: `live`.
        reads: the point that a transcoder reads, or a mapping from the points of transcoders to
            points that they read. A name without a block, such as `ln2.normalized`, means the point
            in the same layer. Default: the point in the config.
        point: the point of a single dictionary. If the config names a module of `transformers`, the
            model runs on a few tokens to find the point with the same value. Default: the point in
            the config.
        pos: the positions of each text where the dictionaries act, as in `evaluate_sae`. Position 0
            is the first token that is not padding, and negative positions count from the last. All
            other positions keep the values of the model, and edits of features do nothing there.
            In most models, the stream of the first token is many times longer than other streams,
            and many dictionaries do not reconstruct it. `pos=slice(1, None)` leaves it unchanged.
            Default: all positions.

    Returns:
        A context manager, which yields a runner of the model. The activations of features are the
        values of points whose names end with `features`, [batch, pos, feature], in the unit of the
        dictionary.

    Raises:
        TypeError: if an object is no dictionary, or writes to several layers. This error is raised
            by the call, and the next errors by the `with` statement.
        UnknownNameError: if a point is not in the model.
        ValueError: if a size is wrong, the point that a dictionary reads or writes is unknown, or
            `pos` differs between texts.
        HookError: if a transcoder reads and writes in different blocks, the point already has a
            dictionary, or `pos` is given for a point after the blocks or outside the text. With
            `pos`, graphs and circuits raise it too, and so do analyses of answers of several tokens
            if `pos` counts from the end.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a dictionary was trained at another place of the model; see
            `interp.features.places`.

    >>> from interp import edits
    >>> from interp.features import TopK
    >>> from models import load
    >>> model, W = load("pydoc-4l"), torch.eye(128)
    >>> neurons = Dictionary(W, W, torch.zeros(128), torch.zeros(128), TopK(5))
    >>> with splice(model, {"blocks.1.resid_post": neurons}) as runner:
    ...     logits, cache = runner.run_with_cache("def f(x):", names="*.features")
    ...     hooks = {"*.features": edits.zero(feature=[3, 7])}
    ...     without = runner.run_with_hooks("def f(x):", hooks=hooks)
    >>> cache
    ActivationCache of 1 value, 4,608 bytes
      blocks.1.resid_post.features  float32 [1, 9, 128]  batch pos feature
    """
    require_choice("error", error, ("live", "frozen", None))
    if pos is not None and Selection(pos).is_by_example:
        raise ValueError(f"pos must be the same in each text; got {Selection(pos)}")
    by_point = _by_point(dictionaries, point)
    return _Splicing(_spliced(model, by_point, error=error, reads=reads, pos=pos))


@contextmanager
def _spliced(
    model: nn.Module,
    dictionaries: Mapping[str, Dictionary],
    error: Error,
    reads: str | Mapping[str, str] | None,
    pos: Index | None,
) -> Iterator[HookedRunner]:
    """Splice dictionaries into a model until the end of the `with` statement; see `splice`."""
    runner = runner_of(model)
    parts = placed(runner, dictionaries, error=error, reads=reads, pos=pos)
    with with_parts(model, runner.points, parts):
        yield HookedRunner(model)


def placed(
    runner: HookedRunner,
    dictionaries: Dictionaries,
    error: Error = "live",
    reads: str | Mapping[str, str] | None = None,
    pos: Index | None = None,
) -> dict[str, SplicedDictionary]:
    """Return dictionaries as parts for the points of a model.

    Args:
        runner: the runner of the model.
        dictionaries, error, reads, pos: see `splice`, which also lists the errors and warnings.
    """
    require_kind("reads", reads, (str, Mapping, type(None)), "a name, or a mapping of names")
    parts: dict[str, SplicedDictionary] = {}
    for name, dictionary in _by_point(dictionaries).items():
        target = _point(runner, name, "point")
        source = _reading(runner, dictionary, point=target, reads=reads)
        _check_sizes(runner.model, dictionary, point=target, source=source)
        warn_of_place(runner, (dictionary.writes, target.name), (dictionary.reads, source.name))
        if pos is not None:
            _require_tokens(runner, target)
        parts[target.name] = SplicedDictionary(
            dictionary=dictionary,
            point=target,
            reads=None if source is target else source.name,
            error=error,
            pos=pos,
        )
    return parts


def _require_tokens(runner: HookedRunner, point: Point) -> None:
    """Check that the positions of a point are the tokens of the text, in all runs.

    Raises:
        HookError: if the point is after the blocks, where some runs compute only the positions that
            a metric reads, or if its positions are not tokens.
    """
    has_layers = any(other.layer is not None for other in runner.points.values())
    is_input = point.name.rpartition(".")[2] in ("embed", "pos_embed")
    is_after = has_layers and point.layer is None and not is_input
    if is_after or not is_of_text(point.name):
        where = "after the blocks" if is_after else "outside the text"
        raise HookError(
            f"pos= needs a point of the tokens, before or in the blocks; got {point.name}, {where}"
        )


def _by_point(dictionaries: Dictionaries, point: str | None = None) -> Mapping[str, Dictionary]:
    """Return dictionaries by the names of their points, after a check of names and objects.

    Args:
        dictionaries, point: see `splice`.

    Raises:
        TypeError: if an object is no dictionary, or writes to several layers; or if a point has no
            name.
        ValueError: if the point of a single dictionary is unknown, or if `point` is given for
            several dictionaries.
    """
    require_kind("point", point, (str, type(None)), "the name of a point")
    if isinstance(dictionaries, Crosscoder):
        raise _no_dictionary("dictionaries", dictionaries)
    if isinstance(dictionaries, nn.Module) and not isinstance(dictionaries, Mapping):
        if not isinstance(dictionaries, CrossLayerTranscoder):
            require_made("dictionaries", dictionaries, Dictionary)
        # The loop below raises an error for a cross-layer transcoder.
        dictionaries = {point or _place_of(dictionaries): dictionaries}
    elif point is not None:
        raise ValueError(
            f"point must be None if dictionaries are given by their points; got {point!r}"
        )
    if not isinstance(dictionaries, Mapping):
        require_made("dictionaries", dictionaries, Dictionary)
    for name, dictionary in dictionaries.items():
        example = "for example 'blocks.2.resid_post'"
        require_kind("the point of a dictionary", name, kind=str, words="a name", call=example)
        if not isinstance(dictionary, Dictionary):
            raise _no_dictionary(name, dictionary)
    return dictionaries


def _no_dictionary(name: str, value: object) -> TypeError:
    """Return the error for an object that is no dictionary of one layer.

    Args:
        name: the name of the point or of the argument.
        value: the object.
    """
    rule = "load_sae(path) reads one"
    if isinstance(value, CrossLayerTranscoder):
        rule = "cross-layer transcoders only work in attribution graphs"
    if isinstance(value, Crosscoder):
        rule = "crosscoder.dictionary(member, others) makes one"
    return TypeError(f"{name} needs a dictionary of one layer; got {type(value).__name__} ({rule})")


def _place_of(dictionary: nn.Module) -> str:
    """Return the name of the point that a dictionary writes.

    Raises:
        ValueError: if the point is unknown.
    """
    place = getattr(dictionary, "writes", None)
    if not isinstance(place, str):
        raise ValueError(
            "the point of the dictionary is unknown; give point=, such as point='blocks.1.mlp_out'"
        )
    return place


def _point(runner: HookedRunner, name: str, option: str) -> Point:
    """Return the point that a name means in a model.

    Args:
        runner: the runner of the model.
        name: the name of the point.
        option: the argument of `splice` that sets the point, for the error.
    """
    known = point_at(name, runner)
    if known not in runner.points:
        problem = unknown_point(name, runner.points, "hook point").args[0]
        raise UnknownNameError(
            f"{problem}, and no point of the model is known to have its value: give the right "
            f"point as {option}=",
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
    """Return the point that a dictionary reads: its own point, or another point for a transcoder.

    Args:
        runner: the runner of the model.
        dictionary: the dictionary.
        point: the point that the dictionary writes.
        reads: the name of the point from the user, or names by the points of transcoders; None for
            the point in the config.

    Raises:
        ValueError: if the point that a transcoder reads is unknown.
        HookError: if a transcoder reads and writes in different blocks.
    """
    name = reads.get(point.name) if isinstance(reads, Mapping) else reads
    if name is None:
        if not dictionary.is_transcoder:
            return point
        name = dictionary.reads
        if name is None:
            raise ValueError(
                f"the point that the transcoder at {point.name} reads is unknown; give reads="
            )
    is_last_part = any(point_name.endswith(f".{name}") for point_name in runner.points)
    if point.layer is not None and is_last_part:
        name = names_by_layer(name, runner.points).get(point.layer, name)
    source = _point(runner, name, "reads")
    blocks = blocks_of(runner.model)
    if blocks.get(source.name) != blocks.get(point.name):
        raise HookError(
            f"a transcoder must read and write in the same block; {name} and {point.name} are in "
            "different blocks"
        )
    return source


def _check_sizes(model: nn.Module, dictionary: Dictionary, point: Point, source: Point) -> None:
    """Check that the dictionary can read and write the values of its points.

    Args:
        model: the model.
        dictionary: the dictionary.
        point: the point that the dictionary writes.
        source: the point that it reads.

    Raises:
        ValueError: if a point has no vectors, or vectors of another size.
    """
    for place, size in ((source, dictionary.d_in), (point, dictionary.d_out)):
        axes = place.axes
        if axes and (axes[:2] != ("batch", "pos") or axes[-1] == "1"):
            raise ValueError(
                "a dictionary needs a vector at each position, such as [batch pos d_model]; got "
                f"{place}"
            )
        heads = _heads(model, axes)
        head = dictionary.head
        if heads is not None and head is not None and not 0 <= head < heads:
            raise ValueError(f"a dictionary's head must be 0 to {heads - 1} at {place}; got {head}")
        expected = _size(model, axes, head)
        if expected not in (size, None):
            what = "read" if place is source else "write"
            raise ValueError(
                f"the dictionary at {point.name} must {what} vectors of size {expected} at "
                f"{place}; got a dictionary for size {size} (set the points by reads= and point=)"
            )


def _size(model: nn.Module, axes: tuple[str, ...], head: int | None) -> int | None:
    """Return the size of the vectors of a dictionary at a point with some axes, or None if it is
    unknown.
    """
    config: Any = getattr(of(model), "config", None)
    sizes = [getattr(config, axis, None) for axis in axes[-1:]]
    if "d_head" in axes and head is None:
        sizes.append(_heads(model, axes))
    return None if None in sizes or not sizes else int(torch.tensor(sizes).prod())


def _heads(model: nn.Module, axes: tuple[str, ...]) -> int | None:
    """Return the number of heads at a point with some axes, or None if the point has no heads or
    the number is unknown.
    """
    name = next((size for axis, size in _HEADS.items() if axis in axes), None)
    return None if name is None else getattr(getattr(of(model), "config", None), name, None)


_HEADS = {"head": "n_heads", "kv_head": "n_kv_heads"}
