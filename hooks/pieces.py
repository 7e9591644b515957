"""Which columns of its text a run reads. Generation and sweeps run a model on pieces of texts."""

from contextvars import ContextVar, Token

# None: the run reads a whole text.
_start: ContextVar[int | None] = ContextVar("start", default=None)


class starting_at:
    """A `with` in which runs read a piece of their text: columns `column`, `column + 1` and so on.

    Edits count positions from the start of the text. `models.Transformer` enters this itself when it is
    called with a `kv_cache`.

    Args:
        column: the first column of the piece, padding included. None for whole texts, the default.

    Raises:
        ValueError: if it is negative.

    >>> with starting_at(5):
    ...     start_of_piece()
    5
    """

    # Not a generator: a small model's step would take one percent longer.
    def __init__(self, column: int | None) -> None:
        if column is not None and column < 0:
            raise ValueError(f"column must be at least 0; got {column}")
        self._column = column

    def __enter__(self) -> None:
        self._token: Token[int | None] = _start.set(self._column)

    def __exit__(self, *error: object) -> None:
        _start.reset(self._token)


def start_of_piece() -> int | None:
    """The column of the text where this run's piece begins; None where it reads a whole text.

    >>> start_of_piece() is None
    True
    """
    return _start.get()
