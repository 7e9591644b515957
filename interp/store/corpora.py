"""Corpora: the texts of a harvest, from files and tables, cut or packed into what the model reads at once."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Number
from pathlib import PurePath
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import Text, Texts, each_text, unknown_name
from interp.inputs.texts import padded

COLUMNS = ("text", "input_ids", "token_ids", "tokens")
"""The columns of tables that are read if no other is asked for, the first that is there."""

Corpus = Texts | str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""Texts, which may stream; the path of a file, or several; or rows with a column of texts, as `datasets` has them. A string
is a path or an address of `fsspec`, with `*` for any name: lines of a `.txt`, objects of a `.jsonl` or rows of a `.npy`."""

TextPiece = Int[Tensor, "3 _pos"]
"""Tokens that a model reads at once: at each position the token, the number of its text, and its place in that."""


def each(corpus: Corpus, column: str | None = None) -> Iterator[Any]:
    """Each text of a corpus, as a string or as tokens.

    Raises:
        FileNotFoundError: if there is no such file.
        UnknownNameError: if rows have no such column.
        ValueError: if a file is not of a kind that is read, or damaged.

    >>> [*each([{"text": "one"}, {"text": "two"}])]
    ['one', 'two']
    """
    parts = [corpus] if isinstance(corpus, (str, os.PathLike)) else each_text(corpus)
    for part in parts:
        whole = isinstance(corpus, str) or isinstance(part, os.PathLike)
        for text in _each_of_file(os.fspath(part)) if whole else [part]:
            yield _of_row(text, column) if isinstance(text, Mapping) else text


def count(corpus: Corpus) -> int | None:
    """The number of texts, or of paths, where that is known before all are read."""
    is_one = getattr(corpus, "ndim", 2) == 1 or (
        isinstance(corpus, list) and isinstance(corpus[0], int)
    )
    if isinstance(corpus, (str, Text, Mapping)) or not isinstance(corpus, Sized):
        return None
    return 1 if is_one else len(corpus)


def runs(corpus: Corpus, column: str | None, per_file: int) -> Iterator[list[Any]]:
    """The texts of each file of a store.

    Raises:
        ValueError: if there is no text; for other errors see `each`.
    """
    rest, nothing = each(corpus, column), True
    while run := [*itertools.islice(rest, per_file)]:
        yield run
        nothing = False
    if nothing:
        raise ValueError("texts must hold at least one text; got none")


def _of_row(row: Mapping[str, Any], column: str | None) -> Any:
    if (
        column in (None, "input_ids")
        and "text" not in row
        and {"input_ids", "attention_mask"} <= {*row}
    ):
        (text,) = each_text(row)  # without its padding
        return text
    names = COLUMNS if column is None else (column,)
    for name in names:
        if name in row:
            return row[name]
    raise unknown_name(" or ".join(names), row, "column of the texts (column= names another)")


def _each_of_file(path: str) -> Iterator[Any]:
    """The texts of a file, or of all files that a pattern fits."""
    kind = next((end for end in PurePath(path).suffixes[-2:] if end in _READERS), None)
    if kind is None:
        raise ValueError(
            f"a file of texts must be one of {', '.join(_READERS)}, which may be compressed; got {path!r} "
            "(one text is given as a list of one)"
        )
    mode = {"mode": "rb"} if kind == ".npy" else {"mode": "rt", "encoding": "utf-8"}
    files = fsspec.open_files(path, compression="infer", **mode)
    if not files:
        raise FileNotFoundError(f"no file fits {path!r}")
    for file in files:
        yield from _READERS[kind](file)


def _lines(file: Any) -> Iterator[str]:
    with file as opened:
        yield from (line.rstrip("\r\n") for line in opened)


def _objects(file: Any) -> Iterator[Any]:
    for number, line in enumerate(_lines(file), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file.path} must be JSON; {error}") from None


def _rows_of_array(file: Any) -> Iterator[Any]:
    if isinstance(file.fs, LocalFileSystem) and file.compression is None:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    else:
        with file as opened:
            array = np.load(opened, allow_pickle=False)
    if array.ndim != 2:
        raise ValueError(
            f"an array of tokens must be [text, pos]; got {list(array.shape)} in {file.path} "
            "(one long row can be cut: array[: n * 128].reshape(n, 128))"
        )
    yield from map(np.array, array)  # copies, which PyTorch may own


_READERS = {".txt": _lines, ".jsonl": _objects, ".npy": _rows_of_array}


def _require_text(text: Any, number: int) -> None:
    """Refuse what stands in a row and is no text, such as null or a nested object.

    Raises:
        ValueError: naming the text by its number.
    """
    tokens = text if isinstance(text, list | tuple) else ()
    is_text = isinstance(text, str) or (hasattr(text, "__len__") and not isinstance(text, Mapping))
    if not is_text or not all(isinstance(each, Number | Tensor) for each in tokens):
        raise ValueError(
            f"text {number} must be a string, or a list of the numbers of its tokens; got {text!r:.60}"
        )


def cut(
    model: nn.Module, texts: Sequence[Any], first: int, context: int | None, pack: bool
) -> list[TextPiece]:
    """Pieces that the model reads of some texts: each by itself, or one after another, cut to the context. An empty text is none.

    Args:
        model: the model, whose tokenizer reads strings.
        texts: as `each` gives them.
        first: the number of the first.
        context: the most tokens of a piece; None for no bound.
        pack: whether a piece may have several texts.
    """
    rows = []
    for number, text in enumerate(texts, first):
        _require_text(text, number)
        tokens = padded([text], model, [number]).tokens[0].cpu() if len(text) else torch.empty(0)
        places = torch.arange(len(tokens))
        rows.append(torch.stack([tokens.long(), torch.full_like(places, number), places]))
    joined = [torch.cat(rows, 1)] if pack else rows
    pieces = [row.split(context or max(1, row.shape[1]), 1) for row in joined if row.shape[1]]
    return [*itertools.chain.from_iterable(pieces)]
