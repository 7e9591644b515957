"""Rows of a store: the values that are stored from the runs of a model on texts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, HookError, Selector
from hooks.base import (
    Index,
    Selection,
    at_least_float32,
    config_hash,
    names_fields,
    places_inside,
    require_choice,
    require_integer,
    require_kind,
    shown,
    to_device,
    weights_hash,
)
from hooks.shared import edits_in_force, parts_of, resolve
from interp.inputs.texts import groups_by_length, padded
from interp.protocol import of, runner_of
from interp.store.corpora import TextPiece, cut_texts
from interp.store.files import ROWS
from interp.store.together import Together

FORMAT = "hookscope-store-3"
_POOLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: at_least_float32(rows).mean(0),
    "max": lambda rows: rows.amax(0),
}


@names_fields
@dataclass(frozen=True, kw_only=True)
class HarvestConfig:
    """Settings of a harvest: which values of the texts are stored, and how.

    Attributes:
        dtype: the dtype of stored values, a float of 16 bits or more. Default: the dtype of the
            model.
        context: the largest number of tokens in a piece. Longer texts are cut. Default: the model's
            `n_ctx`, which is also the upper limit.
        pack: whether a piece contains several texts, one after another, so that all pieces of a
            file except the last have the full length. Tokens then attend to earlier texts of the
            piece. Default: False.
        pos: the positions of each piece to store, such as `slice(1, None)` to exclude the first
            position. A piece without these positions has no row. Default: all positions.
        without: tokens that the model reads, but whose values are not stored, such as the BOS
            token. Default: no token.
        pool: store one row for each piece, the `mean` or `max` over its selected tokens. The row
            contains these facts of the last selected token: the token, the number of its text, its
            index in this text, and its position in the piece. Default: a row for each token.
        column: the column of a table that contains the texts. Default: the first of `text`,
            `input_ids`, `token_ids` and `tokens` that exists.
        batch: the largest number of pieces in a batch. Default: 16.
        per_file: the number of texts in a file. The values of a file must fit into memory. Default:
            64.

    Raises:
        ValueError: if a number is below 1, or if settings contradict each other.
        TypeError: if `dtype` is not a dtype.

    >>> config = HarvestConfig(context=128, pos=slice(1, None))  # without the first position
    >>> config.context, config.batch
    (128, 16)
    """

    dtype: torch.dtype | None = None
    context: int | None = None
    pack: bool = False
    pos: "Index | None" = None
    without: Sequence[int] = ()
    pool: Literal["mean", "max"] | None = None
    column: str | None = None
    batch: int = 16
    per_file: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype | None):
            raise TypeError(
                f"dtype must be a dtype of PyTorch, such as torch.float16; got {shown(self.dtype)}"
            )
        if self.dtype and not (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            raise ValueError(f"dtype must be a float of 16 bits or more; got {self.dtype}")
        require_integer("batch", self.batch)
        require_integer("per_file", self.per_file)
        if self.context is not None:
            require_integer("context", self.context)
        require_kind("column", self.column, (str, type(None)), "the name of a column, or None")
        if not isinstance(self.without, Sequence) or not all(
            isinstance(token, SupportsIndex) for token in self.without
        ):
            raise TypeError(f"without must be a list of tokens; got {shown(self.without)}")
        require_choice("pool", self.pool, (None, *_POOLS))
        if self.pos is not None and Selection(self.pos).is_by_example:
            raise ValueError(f"pos must be the same in each piece; got {Selection(self.pos)}")
        if self.pool and self.pack:
            raise ValueError("pool= needs pieces with a single text each; got pack=True")

    def described(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        pos = None if self.pos is None else repr(Selection(self.pos).index)
        dtype = None if self.dtype is None else str(self.dtype)
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return facts | {"pos": pos, "dtype": dtype, "without": sorted(self.without)}


class Overflow(ValueError):
    """An error: values are finite in the dtype of the model, but not in the dtype of the store."""


def by_token(runner: HookedRunner, names: Selector) -> list[str]:
    """Return the names of points that have a row for each token.

    Args:
        runner: the runner of the model.
        names: the points: names, globs or a mode.

    Raises:
        ValueError: if a point does not have a row for each token.
        UnknownNameError: if a name matches nothing.
    """
    points = [*resolve(names, runner.points, runner.points)]
    for name in points:
        if (axes := runner.points[name].axes)[:2] != ("batch", "pos"):
            raise ValueError(
                f"points must begin with [batch pos], a row for each token; got {name} "
                f"[{' '.join(axes)}] (use statistics(model, texts, names, reading=lambda model, "
                "cache: ...) for other points)"
            )
    return points


def points_with_edits(model: nn.Module) -> list[str]:
    """Return the names of the points of a model at which edits are active."""
    changed = {module for module, _ in edits_in_force()}
    if not changed:
        return []
    return [name for name, at in runner_of(model).points.items() if at.module in changed]


def require_no_edits(model: nn.Module) -> None:
    """Check that no edits of a model's values are active.

    Raises:
        HookError: if edits are active.
    """
    if edited := points_with_edits(model):
        raise HookError(
            "a store must contain the values of the model without edits, because edits are not "
            f"recorded; got an edit at {edited[0]}"
        )


def identity(model: nn.Module) -> dict[str, Any]:
    """Return facts that identify a model: the name of its class, and hashes.

    The hashes are of its config, of its weights, and of each part that is spliced in now, such as a
    dictionary. The settings of a part follow its hash.
    """
    parts = {}
    for name, part in parts_of(model).items():
        parts[name] = weights_hash(part, whole=True) + part.settings
    return {
        "model": type(model).__name__,
        "config": config_hash(model),
        "weights": weights_hash(model, whole=True),
        "parts": parts,
    }


class RowReader:
    """A model, the points to store, and the settings for reading texts.

    Raises:
        ValueError: if a point does not have a row for each token.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.
        HookError: if edits of the values are active.
    """

    def __init__(self, model: nn.Module, names: Selector, config: HarvestConfig) -> None:
        self.model = model
        self.runner = runner_of(model)
        require_no_edits(model)
        n_ctx = getattr(getattr(of(model), "config", None), "n_ctx", None)
        sizes = [size for size in (config.context, n_ctx) if size is not None]
        self.config = dataclasses.replace(config, context=min(sizes, default=None))
        self.points = by_token(self.runner, names)
        self._together = Together(model)

    def manifest(self) -> dict[str, Any]:
        """Return the facts that must agree for all runs that write to one store."""
        return {
            "format": FORMAT,
            "points": {name: [*self.runner.points[name].axes[2:]] for name in self.points},
            **identity(self.model),
            **self.config.described(),
        }

    def pieces(self, texts: Sequence[Any], first: int) -> list[TextPiece]:
        """Divide texts into inputs of the model, each with at most `context` tokens.

        A longer text becomes several pieces. With `pack`, a piece contains several short texts.

        Args:
            texts: the texts.
            first: the number of the first text.
        """
        return cut_texts(
            self.model, texts, first=first, context=self.config.context, pack=self.config.pack
        )

    def kept_mask(self, piece: TextPiece) -> Bool[Tensor, " _pos"]:
        """Return a mask of the tokens of a piece whose values are stored."""
        n = piece.shape[1]
        is_kept = ~torch.isin(piece[0], torch.tensor([*self.config.without], dtype=torch.long))
        if self.config.pos is None:
            return is_kept
        inside = torch.zeros(n, dtype=torch.bool)
        inside[places_inside(self.config.pos, n)] = True
        return is_kept & inside

    def tensors(
        self, pieces: Sequence[TextPiece], done: Callable[[int], Any] = lambda n_tokens: None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """Return the values of pieces at the selected tokens, and the facts of each row.

        The facts are `tokens`, `text`, `offset` and `pos`.

        Args:
            pieces: the pieces, which are read in batches.
            done: a function that is called after each batch with its number of tokens.

        Raises:
            Overflow: if a value is finite in the model's dtype, but not in the dtype of the store.
            ValueError: if a value of the model is not finite.
        """
        parts: dict[str, list[Tensor]] = {name: [] for name in (*self.points, *ROWS)}
        one_token = torch.zeros(3, 1, dtype=torch.long)
        # If there are no pieces, run one token. So the tensors have the right sizes, but no row.
        for batch in self._batches(pieces) or [[one_token]]:
            masks = [self.kept_mask(piece) & bool(pieces) for piece in batch]
            for name, value in self._values(batch, masks).items():
                parts[name].append(value)
            for piece, is_kept in zip(batch, masks, strict=True):
                for name, facts in zip(ROWS, _placed(piece)[:, is_kept], strict=True):
                    # A pooled row has the facts of its last token.
                    parts[name].append(facts[-1:] if self.config.pool else facts)
            done(sum(piece.shape[1] for piece in batch))
        return {name: torch.cat(parts_of_name) for name, parts_of_name in parts.items()}

    def _batches(self, pieces: Sequence[TextPiece]) -> list[Sequence[TextPiece]]:
        """Return the pieces of each run: at most `batch`, all of one group by length."""
        batches = list[Sequence[TextPiece]]()
        for group in groups_by_length(self.model, [piece.shape[1] for piece in pieces]):
            for start in range(group.start, group.stop, self.config.batch):
                batches.append(pieces[start : min(start + self.config.batch, group.stop)])
        return batches

    def _values(
        self, batch: Sequence[TextPiece], masks: Sequence[Bool[Tensor, " _pos"]]
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """Return the rows of each point on the CPU, from one run.

        Args:
            batch: the pieces to run.
            masks: a mask of the tokens of each piece whose values are stored.

        Raises:
            Overflow, ValueError: as in `tensors`.
        """
        with self._together.run():
            cache = self._run([piece[0] for piece in batch])
        chosen = nn.utils.rnn.pad_sequence([*masks], batch_first=True)
        values = {}
        for name in self.points:
            value = cache[name]
            rows = value[to_device(chosen, value.device)]
            if self.config.pool:
                pool = _POOLS[self.config.pool]
                counts = [count for count in chosen.sum(1).tolist() if count]
                rows_of_pieces = rows.split(counts or [0])
                pooled = [pool(part) for part in rows_of_pieces if len(part)]
                rows = torch.stack(pooled) if pooled else rows
            stored_rows = rows.to(self.config.dtype or value.dtype).cpu()
            if not bool(stored_rows.isfinite().all()):
                where = f"{stored_rows.dtype} at {name} in the texts from {int(batch[0][1, 0])} on"
                message = f"values must be finite; got NaN or infinity in {where}"
                if bool(rows.isfinite().all()):
                    raise Overflow(
                        f"{message}; set dtype= of the HarvestConfig to a dtype with a larger "
                        "range (a complete store also needs a new folder)"
                    )
                raise ValueError(f"{message}, in the values of the model itself")
            values[name] = stored_rows
        return values

    def runs(self) -> AbstractContextManager[None]:
        """Return a context for all runs of a job.

        If the model is fully sharded over several processes (FSDP), all of them leave the context
        at the same time.

        Raises:
            HookError: if another process of the model fails between two runs.
        """
        return self._together.runs(lambda: self._run([torch.zeros(1, dtype=torch.long)]))

    def _run(self, tokens: Sequence[Tensor]) -> ActivationCache:
        """Return the values of one run on some texts."""
        text = padded(tokens, self.model, range(len(tokens)))
        options = text.arguments(self.model)
        return self.runner.capture(text.tokens, names=[*self.points], **options)


def _placed(piece: TextPiece) -> Int[Tensor, "4 _pos"]:
    """Return the facts of each token of a piece: `tokens`, `text`, `offset` and `pos`."""
    return torch.cat([piece, torch.arange(piece.shape[1])[None]]).int()
