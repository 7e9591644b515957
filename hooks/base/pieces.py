"""Pieces of texts: the columns of a batch that one run of a model reads, and their padding.

A piece is a chunk of a text that runs in several parts. A run with a key-value cache, as in
generation, reads only the columns after the cached ones. Hooks still count positions from the start
of the text, so they need to know the piece.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks.base._torch import has_storage
from hooks.base.errors import SelectionError, require_integer
from hooks.base.scoped import Scoped
from hooks.base.selection import TEXT_AXES, KeyMask, Selection, real_columns
from hooks.base.transfer import to_device

Columns = list[list[int]]
"""The real columns of each text."""


class Piece:
    """A piece of a batch of texts: the columns that one run of a model reads.

    Attributes:
        start: the first column of the piece, counting padding; None for whole texts.
        real: the mask of real tokens [batch, key], from the first column of the text to the last
            column of the piece; None if all tokens are real or the padding is unknown.
        moved: whether the rows are not the rows of the previous piece, as after a beam search has
            reordered them.
        began: for a generation without a cache, in which every run reads the whole text again: the
            number of columns that its first run read. Otherwise None.
        others: masks of other texts that the run reads, by the axis of their columns: the texts of
            an encoder have the axis `encoder_pos`.
        n_later: the number of columns that are read after this piece, if a block computes its
            positions in pieces, or a generation reads its prompt in chunks; otherwise 0.
        of_run: the piece that the whole run reads. If a block computes its positions in pieces, or
            a generation reads its prompt in chunks, this piece is a part of it; otherwise both are
            the same.
        unknown_end: the reason why positions cannot count from the end of the texts; empty if they
            can.
        copies: the number of rows of each text, which follow one another, such as the beams of a
            search; 0 if it is unknown which text a row belongs to.
        is_asked: whether a hook function has asked for the mask (`token_mask`), so that it knows
            the padding.
    """

    def __init__(
        self,
        start: int | None = None,
        real: KeyMask | None = None,
        moved: bool = False,
        began: int | None = None,
        others: Mapping[str, Shaped[Tensor, "_batch _column"]] | None = None,
        n_later: int = 0,
        of_run: "Piece | None" = None,
        unknown_end: str = "",
        copies: int = 1,
    ) -> None:
        self.start = start
        self.real = real
        self.moved = moved
        self.began = began
        self.others = dict(others or {})
        self.n_later = n_later
        self.of_run = of_run or self
        self.unknown_end = unknown_end
        self.copies = copies
        self.is_asked = False
        self._parts: dict[tuple[int, int], Piece] = {}
        self._columns: dict[str, Columns | None] = {}
        self._masks: dict[str, KeyMask] = {}

    @property
    def columns(self) -> list[list[int]] | None:
        """The real columns of each text of the run, or None if there is no padding."""
        return self.of_run._known("key")

    @property
    def has_masks(self) -> bool:
        """True if a mask of any text is known."""
        return self.real is not None or bool(self.others)

    def has_masks_of(self, other: "Piece") -> bool:
        """Return whether the masks of another piece are the same tensor objects."""
        return (
            self.real is other.real
            and self.others.keys() == other.others.keys()
            and all(mask is other.others[axis] for axis, mask in self.others.items())
        )

    def of_rows(self, first: int, count: int) -> "Piece":
        """Return the piece with only some rows: `count` rows from the row `first` on."""
        masks = [mask for mask in (self.real, *self.others.values()) if mask is not None]
        if not first and all(len(mask) <= count for mask in masks):
            return self
        rows = slice(first, first + count)
        # A piece of an earlier call with these rows may have computed its real columns already.
        if (first, count) not in self._parts:
            of_run = None if self.of_run is self else self.of_run.of_rows(first, count)
            self._parts[first, count] = Piece(
                self.start,
                real=None if self.real is None else self.real[rows],
                moved=self.moved,
                began=self.began,
                others={axis: mask[rows] for axis, mask in self.others.items()},
                n_later=self.n_later,
                of_run=of_run,
                unknown_end=self.unknown_end,
                copies=self.copies,
            )
        return self._parts[first, count]

    def require_end(self, selected: Selection, what: str) -> None:
        """Check that a selection of positions does not count from an end that is unknown.

        Args:
            selected: the selection.
            what: the name of the positions, for errors.

        Raises:
            SelectionError: if the end is unknown, and the selection counts from it.
        """
        if self.unknown_end and selected.counts_back:
            raise SelectionError(
                f"{what} must count from the start of the text, because {self.unknown_end}; "
                f"got {selected!r}"
            )

    def columns_along(self, axis: str, rows: int, end: int) -> Sequence[Sequence[int]] | None:
        """Return the real columns of each text along an axis of a value.

        The columns are counted from the start of the text. The result is None if there is no
        padding, if the mask has another shape than [rows, end], or if the axis has no columns of
        texts.

        Args:
            axis: the name of the axis. `pos`, `query` and `key` have the columns of the text; the
                axes in `others` have the columns of other texts.
            rows: the number of texts in the batch.
            end: the number of columns from the start of the text to the end of this piece.
        """
        mask = self.others.get(axis, self.real if axis in TEXT_AXES else None)
        fits = mask is not None and mask.shape == (rows, end)
        return self._known(axis) if fits else None

    def mask_along(self, axis: str, rows: int, end: int) -> KeyMask | None:
        """Return a mask that is True at real columns along an axis, [rows, end], on the CPU.

        The result is None if there is no padding. The arguments are the arguments of
        `columns_along`, which returns the same columns as numbers.
        """
        columns = self.columns_along(axis, rows, end)
        if columns is None:
            return None
        axis = axis if axis in self.others else "key"
        if axis not in self._masks:
            mask = torch.zeros(rows, end, dtype=torch.bool)
            for mask_of_text, columns_of_text in zip(mask, columns, strict=True):
                mask_of_text[columns_of_text] = True
            self._masks[axis] = mask
        return self._masks[axis]

    def _known(self, axis: str) -> "Columns | None":
        """Return the real columns of each text along an axis. A second call reuses the result."""
        axis = axis if axis in self.others else "key"
        mask = self.others.get(axis, self.real)
        if mask is None:
            return None
        if axis not in self._columns:
            self._columns[axis] = real_columns(mask)
        return self._columns[axis]

    def mask_of(self, rows: int, size: int) -> KeyMask | None:
        """Return the mask of real tokens in the columns of this piece only, [rows, size].

        Unlike `real`, it leaves out the columns before the piece. The result is None if the mask is
        unknown, or belongs to another batch.

        Args:
            rows: the number of texts in the batch.
            size: the number of columns of the piece.
        """
        fits = self.real is not None and self.real.shape == (rows, (self.start or 0) + size)
        return self.real[:, -size:] if self.real is not None and fits else None


def mark_padding(logits: Any, real: KeyMask | None) -> None:
    """Store the mask of the texts of a run as an attribute of the memory of its logits.

    `padding_of` reads the mask. Nothing is stored if the mask does not belong to the logits, as for
    the logits of a classifier.

    Args:
        logits: the logits of the run, [batch, pos, vocab]; any other value is ignored.
        real: the mask of real tokens, for the columns of the logits and all columns before them.
            None if there is no padding, or if the padding is unknown.
    """
    if real is None or torch.compiler.is_compiling():
        return
    if not isinstance(logits, Tensor) or logits.ndim != 3 or not logits.is_contiguous():
        return
    rows, n_pos, _ = logits.shape
    if len(real) != rows or not 0 < n_pos <= real.shape[1]:
        return
    # The mask of a plan is a FakeTensor, which has no numbers.
    is_readable = n_pos == 1 and type(real) is Tensor and real.device.type == "cpu"
    if is_readable and has_storage(real) and all(real[:, -1].tolist()):
        # Most steps of a generation have no padding.
        return
    memory = _memory_of(logits)
    if memory is not None and memory.nbytes() == logits.nbytes:
        # The caller may write into its mask later, so the stored mask is a copy.
        memory.padding = _PaddingOf(logits.shape, real[:, -n_pos:].clone())


def padding_of(logits: Tensor) -> KeyMask | None:
    """Return the mask of real tokens of the logits of a run, or of a part of them, [batch, pos].

    A view, such as `logits[2:, :5]` or `logits.detach()`, has the mask of its own texts and
    columns. The result is None if the run had no mask, or if the logits are in other memory, as
    after a copy or arithmetic.

    Args:
        logits: logits [batch, pos, vocab].
    """
    padding = getattr(_memory_of(logits), "padding", None)
    if padding is None:
        return None
    _, n_pos, vocab = padding.shape
    row, column = (torch.arange(size) for size in logits.shape[:2])
    places = logits.storage_offset() + row[:, None] * logits.stride(0) + column * logits.stride(1)
    return padding.real.cpu()[places // (n_pos * vocab), places // vocab % n_pos]


def mark_model(logits: Any, model: nn.Module) -> None:
    """Store a weak reference to the model of a run as an attribute of the memory of its logits.

    `model_of_logits` reads the reference.

    Args:
        logits: the logits of the run, [batch, pos, vocab]; any other value is ignored.
        model: the model.
    """
    if torch.compiler.is_compiling() or not isinstance(logits, Tensor) or logits.ndim != 3:
        return
    memory = _memory_of(logits)
    if memory is not None:
        memory.model = weakref.ref(model)


def model_of_logits(logits: Tensor) -> nn.Module | None:
    """Return the model that computed some logits; see `mark_model`.

    A view, such as `logits[2:]`, has the model too. The result is None if the logits are in other
    memory, as after a copy or arithmetic, or if the model no longer exists.

    Args:
        logits: the logits.
    """
    reference = getattr(_memory_of(logits), "model", None)
    return None if reference is None else reference()


def _memory_of(value: Tensor) -> Any:
    """Return the memory of a tensor; None if a transform of PyTorch, such as `vmap`, hides it."""
    return value.untyped_storage() if has_storage(value) else None


class _PaddingOf(NamedTuple):
    """The shape of the logits of a run, and the mask of their real tokens [batch, pos]."""

    shape: torch.Size
    real: KeyMask


class RowEnds:
    """The ends of the rows of a generation, for the cache of the generation.

    A row that has ended still gets tokens while other rows continue. These tokens are no text. The
    function that generates tells which new columns belong to the text of each row (`note_running`).

    Args:
        modules: the model that the cache belongs to, and its modules. Generations of other models
            are ignored.

    Attributes:
        mask: the mask of real tokens of the last run, if the run got its mask in another form, such
            as a mask of queries and keys; None otherwise.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self._modules = {*modules}
        self._columns: list[Tensor] = []
        self.mask: KeyMask | None = None

    def note_mask(self, model: object, mask: Shaped[Tensor, "batch _key"]) -> None:
        """Store the mask of real tokens [batch, key] of a run whose own mask has another form.

        Args:
            model: the model that runs.
            mask: the mask, for all columns so far.
        """
        if model in self._modules:
            self.mask = mask

    def note(self, model: object, running: Shaped[Tensor, "batch pos"]) -> None:
        """Store which rows new columns belong to; see `note_running`."""
        if model in self._modules:
            self._columns.append(running)

    def new_columns(self) -> KeyMask | None:
        """Return the mask [batch, pos] of the last columns, on the CPU.

        It is True at columns that belong to the text of a row. The result is None if all rows ended
        together.
        """
        if not self._columns:
            return None
        mask = torch.cat(self._columns, 1).cpu()
        return None if bool(mask.all()) else mask


def with_ends(real: KeyMask, new: Shaped[Tensor, "batch new"]) -> KeyMask:
    """Return a mask of real tokens that is also False after the end of each row.

    Args:
        real: the mask of all columns, [batch, key]. Its dtype does not change.
        new: the mask of the last columns; see `RowEnds.new_columns`.
    """
    changed = real.clone()
    changed[:, -new.shape[1] :] *= to_device(new, real.device)
    return changed


class Prompt(NamedTuple):
    """The columns of a prompt that a generation reads in chunks.

    Attributes:
        whole: the piece with all columns of the prompt.
        end: the column after the last column of the prompt.
    """

    whole: Piece
    end: int

    def chunk(self, start: int, real: KeyMask | None, n_columns: int) -> Piece | None:
        """Return the piece of one chunk; None if the columns are not a part of the prompt.

        Args:
            start: the first column of the chunk.
            real: the mask of real tokens up to the last column of the chunk; None without padding.
            n_columns: the number of columns of the chunk.
        """
        # A hook may run a model inside the chunk. This run is not a chunk of the prompt.
        if piece_read().of_run is self.whole:
            return None
        n_later = self.end - start - n_columns
        return None if n_later < 0 else Piece(start, real, n_later=n_later, of_run=self.whole)


_WHOLE = Piece()
_prompt = Scoped[Prompt | None]("prompt", None)
_row_ends = Scoped[RowEnds | None]("ends of rows", None)
_piece = Scoped("piece", _WHOLE)
_moved = Scoped("moved prompts", 0)


def position_offset(
    column: int | None, real: KeyMask | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that tells edits which columns of the texts a run reads.

    An edit such as `edits.zero(pos=6)` counts positions from the start of the text, and negative
    positions from its last real token. A run may read only a piece of a text: a step of a
    generation reads only the newest token. Inside this context, the first column of each value is
    column `column` of the text. So code that runs a model on a piece, or on texts with padding,
    must enter this context. `models.Transformer` and attached models enter it themselves if they
    are called with a cache or a mask.

    Args:
        column: the first column of the piece, counting padding. Default: None, for whole texts.
        real: the mask of real columns, up to the last column of the piece. None if there is no
            padding. A mask on an accelerator is copied to the CPU when an edit needs it.

    Returns:
        The context manager. At its end, runs read the same piece as before it.

    Raises:
        ValueError: if the column is negative.

    >>> from hooks import Point
    >>> from interp import edits
    >>> with position_offset(5):  # the values belong to the columns 5, 6 and 7 of their text
    ...     edits.zero(pos=6)(torch.ones(1, 3), Point("any", ("batch", "pos")))
    tensor([[1., 0., 1.]])
    """
    require_integer("column", 0 if column is None else column, least=0)
    return reading(Piece(column, real))


def reading(piece: Piece) -> AbstractContextManager[None]:
    """Return a context manager inside which runs read a piece of their texts."""
    return _piece.set(piece)


def in_chunks(prompt: Prompt | None) -> AbstractContextManager[None]:
    """Return a context manager inside which runs read chunks of a prompt.

    Negative positions then count from the last token of the prompt, and not of a chunk.

    Args:
        prompt: the prompt; None if prompts are not read in chunks.
    """
    return _prompt.set(prompt)


def prompt_read() -> Prompt | None:
    """Return the prompt that runs read in chunks now, or None."""
    return _prompt.get()


def noting_ends(ends: RowEnds) -> AbstractContextManager[None]:
    """Return a context manager inside which `note_running` stores the ends of rows in `ends`."""
    return _row_ends.set(ends)


def row_ends() -> RowEnds | None:
    """Return the object that stores the ends of rows, or None if no cache needs them."""
    return _row_ends.get()


def note_running(model: nn.Module, running: Shaped[Tensor, "batch pos"]) -> None:
    """Tell the cache of a generation which new columns belong to the text of each row.

    Nothing happens if the generation is not cached.

    Args:
        model: the model that generates.
        running: True for each new column that the model reads while the row continues.
    """
    if (ends := _row_ends.get()) is not None:
        ends.note(model, running)


def prompts_moved(n_columns: int) -> AbstractContextManager[None]:
    """Return a context manager inside which prompts are in other columns than in the user's texts.

    A generation pads prompts of unequal length on the left, and texts of a run are padded on the
    right. So a column of a prompt is another token there, and edits raise an error for a position
    that counts columns of prompts.

    Args:
        n_columns: the number of columns of the prompts; 0 if they did not move.
    """
    return _moved.set(n_columns)


def n_moved_columns() -> int:
    """Return the number of columns of prompts that moved, or 0; see `prompts_moved`."""
    return 0 if torch.compiler.is_compiling() else _moved.get()


def piece_read() -> Piece:
    """Return the piece of the innermost open `reading` or `position_offset`.

    If none is open, the result is a piece that stands for whole texts. While a compiler traces a
    run, the result is this piece too, because a compiler cannot read a context variable.
    """
    return _WHOLE if torch.compiler.is_compiling() else _piece.get()


def piece_is_known() -> bool:
    """Return whether a `position_offset` or a `reading` is open."""
    return _piece.get() is not _WHOLE


def start_of_piece() -> int | None:
    """Return the first column of this run's piece, or None if the run reads a whole text.

    Returns:
        The number of the column, counted from 0 with padding. None if the run reads a whole text.

    >>> from hooks import HookedRunner
    >>> from models import generate, load
    >>> model = load("pydoc-4l")
    >>> starts = []
    >>> with HookedRunner(model).hooks({"embed": lambda *_: starts.append(start_of_piece())}):
    ...     _ = generate(model, "impor", max_new_tokens=3)
    >>> starts  # the prompt from column 0, and then one column in each step
    [0, 5, 6]
    """
    return _piece.get().start


def token_mask() -> KeyMask | None:
    """Return the mask of the texts that the model reads now, for use inside a hook function.

    Values at `pattern` and `scores` also have columns for padded keys. In `pattern` these columns
    are 0, and a hook that writes another number there makes the text attend to padding. Edits of
    `interp.edits` leave these columns unchanged. A hook function of your own can do the same: it
    multiplies its values by this mask.

    Returns:
        True at real tokens, False at padding, [batch, key], for all columns so far. None if there
        is no padding, or if the padding is unknown: the model does not report it, or
        `torch.compile` is tracing.

    >>> with position_offset(None, torch.tensor([[False, True, True]])):
    ...     token_mask()
    tensor([[False,  True,  True]])
    """
    piece = piece_read()
    if piece.real is None:
        return None
    piece.is_asked = True
    return None if real_columns(piece.real) is None else piece.real.bool()
