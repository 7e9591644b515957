"""Exchange stores with SAELens: a data set in Arrow with a row for each context.

The format is the format of its CacheActivationsRunner. The columns are values [context, d_in], with
names of TransformerLens and flattened heads, and `token_ids`.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hooks.base import at_least_float32, library, storage, unknown_name
from interp.store.activations import Activations
from interp.store.imported import TextValues, imported
from interp.store.rows import HarvestConfig
from interp.transformer_lens import hooks_name

TOKENS = "token_ids"


def to_arrow(
    store: Activations,
    folder: str | os.PathLike[str],
    columns: Mapping[str, str],
    *,
    drop_short: bool = False,
) -> int:
    """Write points of a store as a data set for SAELens, and return the number of contexts.

    SAELens reads the data set with `cached_activations_path`.

    Args:
        store: a store of full contexts, such as the result of
            `HarvestConfig(context=128, pack=True)`.
        folder: a directory that is empty or does not exist.
        columns: the names of columns by the names of points, such as
            `{"blocks.1.mlp_out": "blocks.1.hook_mlp_out"}`. SAELens reads the column with the name
            in its setting `hook_name`. Arrow has no bfloat16, so bfloat16 values become float32.
        drop_short: whether to leave out contexts that are not full, such as the last context of
            each file. Default: False.

    Returns:
        The number of contexts that were written.

    Raises:
        ValueError: if the store does not contain all tokens of its contexts, if a context is not
            full, or if the name of the folder is the name of a file.
        FileExistsError: if the directory is not empty.
        CacheError: if the store is incomplete.
        UnknownNameError: if a name is unknown. The error contains close matches.
        ImportError: if `datasets` is not installed.

    >>> from interp.store import HarvestConfig, harvest
    >>> from models import load
    >>> out = tempfile.mkdtemp()
    >>> config = HarvestConfig(context=8, pack=True)
    >>> texts = ["part KV8 part KV8", "import os.path"]
    >>> store = harvest(load("pydoc-4l"), texts, "blocks.1.mlp_out", f"{out}/store", config)
    >>> columns = {"blocks.1.mlp_out": "blocks.1.hook_mlp_out"}
    >>> to_arrow(store, f"{out}/arrow", columns, drop_short=True)
    3
    """
    storage.require_folder(folder)
    datasets = library("datasets", "datasets")
    context = store.manifest["context"]
    if os.path.exists(folder) and os.listdir(folder):
        raise FileExistsError(f"folder must be an empty or a new directory; got {folder!s}")
    if context is None or any(store.manifest[key] for key in ("pos", "pool", "without")):
        raise ValueError(
            "store must contain all tokens of its contexts; got one with pos=, pool= or without="
        )
    files = range(len(store.files))
    starts = [_starts(store.file(number, ["pos"])["pos"]) for number in files]
    full = [starts_of_file[:-1][starts_of_file.diff() == context] for starts_of_file in starts]
    n = sum(len(starts_of_file) - 1 for starts_of_file in starts)
    n_full = sum(map(len, full))
    if n != n_full and not drop_short:
        raise ValueError(
            f"contexts must have {context} tokens; {n - n_full} of {n} have fewer (use "
            "drop_short=True to leave these out)"
        )

    def rows() -> Iterator[dict[str, Any]]:
        """Yield the values and tokens of each full context."""
        for number in files:
            values_of_file = store.file(number, [*columns, "tokens"])
            for start in full[number].tolist():
                inside = slice(start, start + context)
                row = {TOKENS: values_of_file["tokens"][inside].numpy()}
                for name, column in columns.items():
                    row[column] = _plain(values_of_file[name][inside]).numpy()
                yield row

    first_file = store.file(0, [*columns])
    types = {TOKENS: datasets.Sequence(datasets.Value("int32"), length=context)}
    for name, column in columns.items():
        value = _plain(first_file[name])
        dtype = str(value.dtype).removeprefix("torch.")
        types[column] = datasets.Array2D((context, value.shape[1]), dtype)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(folder))) as scratch:
        dataset = datasets.Dataset.from_generator(rows, datasets.Features(types), scratch)
        dataset.save_to_disk(os.fspath(folder))
    return n_full


def from_arrow(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    columns: Mapping[str, str] | None = None,
    per_file: int = 64,
) -> Activations:
    """Return a store of a data set of SAELens' CacheActivationsRunner. Its contexts are the texts.

    Like `harvest`, the same call can be repeated at any time. A repeated call writes only the files
    that are missing or damaged.

    Args:
        folder: the data set.
        out: a directory, or its address.
        columns: the names of points by the names of columns. Default: the result of `hooks_name`
            for each column.
        per_file: the number of contexts in a file.

    Returns:
        The store. The data set does not record its model, so the model is not checked.

    Raises:
        FileNotFoundError: if the data set does not exist.
        ValueError: if the directory contains another store, or a store of another data set.
        UnknownNameError: if the data set does not have a column or the tokens, or if no point is
            known for the name of a column.
        ImportError: if `datasets` is not installed.

    >>> import numpy
    >>> from datasets import Dataset
    >>> values = numpy.arange(30, dtype="float32").reshape(2, 3, 5)
    >>> rows = {"token_ids": [[7, 8, 9], [4, 5, 6]], "blocks.1.hook_mlp_out": values}
    >>> out = tempfile.mkdtemp()
    >>> Dataset.from_dict(rows).save_to_disk(f"{out}/arrow")
    >>> store = from_arrow(f"{out}/arrow", f"{out}/store")
    >>> store.rows(1)["blocks.1.mlp_out"][0]  # the first token of the second context
    tensor([15., 16., 17., 18., 19.])
    """
    table = library("datasets", "datasets").load_from_disk(os.fspath(folder)).with_format("torch")
    names = columns or {name: hooks_name(name) for name in table.column_names if name != TOKENS}
    for column in (TOKENS, *names):
        if column not in table.column_names:
            raise unknown_name(column, table.column_names, f"column of {os.fspath(folder)}")
    config = HarvestConfig(context=len(table[0][TOKENS]) if len(table) else None, per_file=per_file)

    def contexts() -> Iterator[TextValues]:
        """Yield the tokens and values of each row of the data set."""
        for batch in table.iter(per_file):
            for number, tokens in enumerate(batch[TOKENS]):
                values = {point: batch[column][number] for column, point in names.items()}
                yield TextValues(tokens, values)

    return imported(contexts(), out, dict.fromkeys(names.values(), ("d_in",)), config)


def _starts(pos: Tensor) -> Tensor:
    """Return the index of the first row of each context, and then the number of rows.

    Args:
        pos: the position of each row in its context.
    """
    return torch.cat([(pos == 0).nonzero()[:, 0], torch.tensor([len(pos)])])


def _plain(value: Tensor) -> Tensor:
    """Return rows [row, d_in] in a dtype that Arrow supports."""
    flat = value.flatten(1)
    return at_least_float32(flat) if flat.dtype == torch.bfloat16 else flat
