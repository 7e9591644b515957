"""Blocks in pieces: blocks that compute some positions at a time, to save memory.

1. Inside `in_pieces`, the forward of each block is a `PieceByPiece`.
2. It divides its arguments into pieces of positions. Each piece also reads the keys and values of
   the earlier pieces (`divided_call`, and `models.attached.context` for attached models).
3. It runs the block's own forward on one piece after the other, and joins the outputs. So values
   inside the block exist for one piece only.
4. At the end of the `with`, the block gets its own forward back.

The result equals the result of the block up to rounding. Hooks inside a block get the values of one
piece, as in a run with a `KVCache`. Edits count positions from the start of the text, and negative
positions from the end of all positions that the run reads.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import Tensor, nn

from hooks.base import (
    Piece,
    Scoped,
    piece_read,
    reading,
    require_integer,
    tensors_in,
    with_first_tensor,
)
from models.running.context import Context
from models.running.kvcache import KVCache, LayerCache

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of a block, positional and by name."""

Divide = Callable[[nn.Module, Arguments, int], Iterator[Arguments] | None]
"""A function that divides a call of a block into calls for one piece each.

It gets the block, its arguments and the largest number of positions of a piece. The result is None
if the block must compute all positions together. The first argument of each call is the stream of
the piece. A call may read what the calls before it have computed.
"""

_n_positions = Scoped[int | None]("positions of a piece", None)
# Threads may enter and leave `in_pieces` at the same time, with the same blocks.
_CHANGE = RLock()


class PieceByPiece:
    """The forward of a block that computes some positions at a time, in the context of `in_pieces`.

    In other contexts, such as other threads, it is the block's own forward.

    Args:
        block: the block.
        divide: the function that divides the calls of the block.

    Attributes:
        n_users: the number of open `in_pieces` that use this object.
        joins_first_tensor: True, because only the first tensor of an output has all positions. Lazy
            caches then compare only this tensor of two runs.
    """

    joins_first_tensor = True

    def __init__(self, block: nn.Module, divide: Divide) -> None:
        self.__wrapped__ = block.forward
        self.n_users = 0
        self._block = block
        self._divide = divide
        self._is_own = "forward" not in vars(block)

    def remove(self) -> None:
        """Give the block its own forward back."""
        if self._is_own:
            del self._block.forward
        else:
            self._block.forward = self.__wrapped__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the block for all positions."""
        forward = self.__wrapped__
        most = _n_positions.get()
        pieces = None if most is None else self._divide(self._block, (args, kwargs), most)
        if pieces is None:
            return forward(*args, **kwargs)
        whole = piece_read()
        joined: Tensor | None = None
        start = 0
        output = None
        for piece_args, piece_kwargs in pieces:
            end = start + piece_args[0].shape[1]
            with reading(_piece_from(whole, start, end=end, n_columns=args[0].shape[1])):
                output = forward(*piece_args, **piece_kwargs)
            stream = next(tensors_in(output))
            if joined is None:
                joined = stream.new_empty(args[0].shape)
            joined[:, start : start + stream.shape[1]] = stream
            start += stream.shape[1]
        assert joined is not None
        return with_first_tensor(output, joined)


def _piece_from(whole: Piece, start: int, end: int, n_columns: int) -> Piece:
    """Return the piece of the texts that a piece of a block reads.

    Args:
        whole: the columns that the block reads.
        start, end: the first column of the piece, and the column after its last, counted from the
            first column of `whole`.
        n_columns: the number of columns of `whole`.
    """
    first = whole.start or 0
    return Piece(
        first + start,
        real=None if whole.real is None else whole.real[:, : first + end],
        moved=whole.moved,
        began=whole.began,
        others=whole.others,
        n_later=whole.n_later + n_columns - end,
        of_run=whole.of_run,
        unknown_end=whole.unknown_end,
        copies=whole.copies,
    )


@contextmanager
def in_pieces(blocks: Iterable[nn.Module], n_positions: int, divide: Divide) -> Iterator[None]:
    """Return a context manager inside which blocks compute at most `n_positions` at once.

    Args:
        blocks: the blocks.
        n_positions: the largest number of positions of a piece.
        divide: the function that divides the calls of these blocks.

    Raises:
        TypeError: if `n_positions` is not a whole number.
        ValueError: if it is below 1.
    """
    require_integer("n_positions", n_positions)
    changed: list[PieceByPiece] = []
    try:
        with _CHANGE:
            for block in blocks:
                forward = block.forward
                if not isinstance(forward, PieceByPiece):
                    forward = PieceByPiece(block, divide)
                    block.forward = forward
                forward.n_users += 1
                changed.append(forward)
        with _n_positions.set(n_positions):
            yield
    finally:
        with _CHANGE:
            for forward in changed:
                forward.n_users -= 1
                if not forward.n_users:
                    forward.remove()


def divided_call(block: nn.Module, call: Arguments, most: int) -> Iterator[Arguments] | None:
    """Divide a call of a block along its positions: yield the arguments of one call for each piece.

    The blocks are the blocks of a plain transformer. The result is None if the block got no
    `Context`, if a single piece would contain all positions, or if a query sees later keys.

    Args:
        block: the block.
        call: the arguments of the block.
        most: the largest number of positions of a piece.
    """
    args, kwargs = call
    if kwargs or len(args) != 2 or not isinstance(args[1], Context):
        return None
    stream, context = args
    is_short = stream.shape[1] <= most
    if is_short or context.kv_cache is not None or not context.is_causal:
        return None
    layer: int = block.attn.layer  # type: ignore[union-attr, assignment]
    if context.past is not None and len(context.past[layer][0]) != len(stream):
        return None
    return _pieces_of(stream, context, layer=layer, most=most)


def _pieces_of(stream: Tensor, context: Context, layer: int, most: int) -> Iterator[Arguments]:
    """Yield the arguments of a block for one piece after the other.

    A cache contains the keys and values of earlier pieces. Each piece adds its keys and values.

    Args:
        stream: the stream that enters the block.
        context: the context of all positions.
        layer: the index of the block.
        most: the largest number of positions of a piece.
    """
    end = context.start + stream.shape[1]
    cache = KVCache()
    # Masks count keys from the first column, so the keys outside a window are kept too.
    cache.layers = [LayerCache(window=0, limit=end)] * (layer + 1)
    if context.past is not None:
        cache.layers[layer].store(0, *context.past[layer])
    for start in range(0, stream.shape[1], most):
        piece = stream[:, start : start + most]
        first = context.start + start
        later = context.until(first + piece.shape[1]).after(first, ())
        yield (piece, later._replace(past=None, kv_cache=cache)), {}
