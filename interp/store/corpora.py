"""Corpora: read texts from files and tables, and cut or pack them into pieces for the model.

A piece is one input of the model. A text that is longer than the context of the model becomes
several pieces. A piece can also contain several short texts.
"""

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
"""The default columns of tables. The first column that exists is read."""

Corpus = Texts | str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""Texts, paths of files, or rows of a table.

Texts may be a stream. Rows need a column of texts, as in the library `datasets`. A string is a path
or an address of `fsspec`, in which `*` matches any name. The texts are the lines of a `.txt`, the
objects of a `.jsonl` or the rows of a `.npy`.
"""

TextPiece = Int[Tensor, "3 _pos"]
"""The tokens of one input.

Each position has the token, the number of its text and its place there.
"""


def each(corpus: Corpus, column: str | None = None) -> Iterator[Any]:
    """Yield each text of a corpus, as a string or as tokens.

    Args:
        corpus: the corpus.
        column: the column of the texts in a table. Default: the first of `text`, `input_ids`,
            `token_ids` and `tokens` that exists.

    Raises:
        FileNotFoundError: if a file does not exist.
        UnknownNameError: if the rows do not have the column.
        ValueError: if a file has an unsupported format or is damaged.

    >>> [*each([{"text": "one"}, {"text": "two"}])]
    ['one', 'two']
    """
    parts = [corpus] if isinstance(corpus, (str, os.PathLike)) else each_text(corpus)
    for part in parts:
        is_path = isinstance(corpus, str) or isinstance(part, os.PathLike)
        for text in _each_of_file(os.fspath(part)) if is_path else [part]:
            yield _of_row(text, column) if isinstance(text, Mapping) else text


def count(corpus: Corpus) -> int | None:
    """Return the number of texts or paths in a sequence; 1 for one text of tokens.

    For a path, a mapping or a stream, the result is None, because the number of texts is known only
    after they are read.
    """
    is_list_of_tokens = isinstance(corpus, list) and isinstance(corpus[0], int)
    is_one_text = getattr(corpus, "ndim", 2) == 1 or is_list_of_tokens
    if isinstance(corpus, (str, Text, Mapping)) or not isinstance(corpus, Sized):
        return None
    return 1 if is_one_text else len(corpus)


def texts_of_files(corpus: Corpus, column: str | None, per_file: int) -> Iterator[list[Any]]:
    """Yield the texts of each file of a store.

    Args:
        corpus, column: see `each`.
        per_file: the number of texts in a file.

    Raises:
        ValueError: if there is no text. For other errors, see `each`.

    >>> [*texts_of_files(["a", "b", "c"], None, per_file=2)]
    [['a', 'b'], ['c']]
    """
    rest = each(corpus, column)
    is_empty = True
    while run := [*itertools.islice(rest, per_file)]:
        yield run
        is_empty = False
    if is_empty:
        raise ValueError("texts must contain at least one text; got none")


def _of_row(row: Mapping[str, Any], column: str | None) -> Any:
    """Return the text in a row of a table, as a string or as tokens without padding.

    Raises:
        UnknownNameError: if the row does not have the column.
    """
    has_mask = "text" not in row and {"input_ids", "attention_mask"} <= {*row}
    if has_mask and column in (None, "input_ids"):
        # With a mask of padding in the row, `each_text` returns only the real tokens.
        (text,) = each_text(row)
        return text
    names = COLUMNS if column is None else (column,)
    for name in names:
        if name in row:
            return row[name]
    raise unknown_name(
        " or ".join(names), row, "column of the texts (column= selects another column)"
    )


def _each_of_file(path: str) -> Iterator[Any]:
    """Yield the texts of a file, or of all files that match a pattern."""
    kind = next((end for end in PurePath(path).suffixes[-2:] if end in _READERS), None)
    if kind is None:
        raise ValueError(
            f"a file of texts must be one of {', '.join(_READERS)}, which may be compressed; got "
            f"{path!r} (pass a single text as a list with one text)"
        )
    mode = {"mode": "rb"} if kind == ".npy" else {"mode": "rt", "encoding": "utf-8"}
    files = fsspec.open_files(path, compression="infer", **mode)
    if not files:
        raise FileNotFoundError(f"no file matches {path!r}")
    for file in files:
        yield from _READERS[kind](file)


def _lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file."""
    with file as opened:
        yield from (line.rstrip("\r\n") for line in opened)


def _objects(file: Any) -> Iterator[Any]:
    """Yield the JSON value of each line of a file.

    Raises:
        ValueError: if a line is not JSON. The error contains its number.
    """
    for number, line in enumerate(_lines(file), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file.path} must be JSON; {error}") from None


def _rows_of_array(file: Any) -> Iterator[Any]:
    """Yield the rows of an array [text, pos] in a file.

    Raises:
        ValueError: if the array has other axes.
    """
    if isinstance(file.fs, LocalFileSystem) and file.compression is None:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    else:
        with file as opened:
            array = np.load(opened, allow_pickle=False)
    if array.ndim != 2:
        raise ValueError(
            f"an array of tokens must be [text, pos]; got {list(array.shape)} in {file.path} "
            "(one long row can be cut into texts with array[: n * 128].reshape(n, 128))"
        )
    # PyTorch needs writable arrays, so copy the rows.
    yield from map(np.array, array)


_READERS = {".txt": _lines, ".jsonl": _objects, ".npy": _rows_of_array}


def _require_text(text: Any, number: int) -> None:
    """Check that a text is a string or a list of tokens.

    A row may contain other values, such as null or a nested object.

    Raises:
        ValueError: if the text is something else. The error contains the number of the text.
    """
    tokens = text if isinstance(text, list | tuple) else ()
    is_listed = hasattr(text, "__len__") and not isinstance(text, Mapping | Text)
    is_text = isinstance(text, str) or is_listed
    if not is_text or not all(isinstance(token, Number | Tensor) for token in tokens):
        raise ValueError(
            f"text {number} must be a string or a list of token numbers; got {text!r:.60}"
        )


def cut_texts(
    model: nn.Module, texts: Sequence[Any], first: int, context: int | None, pack: bool
) -> list[TextPiece]:
    """Cut texts into the pieces that the model reads. An empty text has no piece.

    Args:
        model: the model. Its tokenizer reads strings.
        texts: the texts, as `each` yields them.
        first: the number of the first text.
        context: the largest number of tokens in a piece; None means no limit.
        pack: whether a piece may contain several consecutive texts.
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
