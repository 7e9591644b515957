"""Run texts without a store: compute statistics of values, and plan the size of a harvest."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hooks import ActivationCache, Selector
from hooks.base import (
    Texts,
    require_callable,
    require_kind,
    shows_progress,
    to_device,
    without_gradients,
)
from interp.inputs.parts import n_before
from interp.inputs.texts import batches
from interp.json_form import Table, form
from interp.protocol import runner_of
from interp.results.result import Result
from interp.store.corpora import Corpus, TextPiece, texts_of_files
from interp.store.engines import Model, loaded
from interp.store.files import Folder
from interp.store.rows import HarvestConfig, RowReader, by_token
from interp.store.summary import StatisticsByPoint

_READING = "for example: lambda model, cache: head_scores(model, cache, 'induction')"


@shows_progress
@without_gradients
def statistics(
    model: nn.Module,
    texts: "Texts",
    names: "Selector",
    *,
    reading: Callable[[nn.Module, ActivationCache], Result] | None = None,
    covariance: bool = False,
    top: int = 10,
    sample: int = 1024,
    seed: int = 0,
    batch: int = 16,
    progress: bool = True,
) -> StatisticsByPoint:
    """Return the mean, variance, density, quantiles and largest values of points over many texts.

    The model runs once on each text, and no values are written to disk. Padding does not count.

    Args:
        model: any model with hook points, in evaluation mode.
        texts: strings or tokens. They are read once, so they can be a stream.
        names: the points. Without `reading`, their first axes must be `batch pos`.
        reading: a function from the model and a cache to a `Result`, such as
            `lambda model, cache: head_scores(model, cache, "induction")`. The statistics are then
            computed over the examples of the results, and their name is `reading`.
        covariance: whether to compute the products of all pairs of columns.
        top: the number of largest values to record.
        sample: the largest number of rows in the random sample, from which quantiles are taken.
        seed: the seed of the sample.
        batch: the number of texts in a batch.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The statistics of each point by its name. A row is a token. At a point with the axes `batch
        pos *rest`, `mean` has the axes [*rest], and all other statistics are flattened to [d]. They
        are in the unit of the point, or in its square for the variance. See `Statistics`.

    Raises:
        ValueError: if there is no text, if a text is empty, or if a point does not have a row for
            each token.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.
        TypeError: if an option is unknown.

    >>> from models import load
    >>> by_point = statistics(load("pydoc-4l"), ["part KV8 part KV8"] * 3, "*.mlp_out")
    >>> by_point["blocks.1.mlp_out"]
    Statistics of 51 rows [128]
    >>> by_point["blocks.1.mlp_out"].mean.shape, by_point["blocks.1.mlp_out"].variance.shape
    (torch.Size([128]), torch.Size([128]))
    >>> by_point["blocks.1.mlp_out"].top_places[0, 0].tolist()  # of the largest value of column 0
    [0, 4]
    """
    options: dict[str, Any] = {"covariance": covariance, "top": top, "sample": sample, "seed": seed}
    if reading is not None:
        require_callable("reading", reading, parameters=("model", "cache"), example=_READING)
    runner = runner_of(model)
    points = by_token(runner, names) if reading is None else names

    def parts() -> Iterator[StatisticsByPoint]:
        """Yield the statistics of each batch."""
        for first, text in batches(texts, model, batch):
            cache = runner.capture(text.tokens, names=points, **text.arguments(model))
            if reading is None:
                rows = {
                    name: value[to_device(text.real, value.device)] for name, value in cache.items()
                }
                number, pos = text.real.cpu().nonzero(as_tuple=True)
            else:
                table = reading(model, cache)
                require_kind(
                    "what reading returns", table, kind=Result, words="a Result", call=_READING
                )
                rows = {"reading": table.values.movedim(-1, 0)}
                number = torch.arange(len(text.tokens))
                pos = torch.zeros_like(number)
            yield StatisticsByPoint.of(rows, number + n_before() + first, pos, **options)

    return StatisticsByPoint.together(parts())


class PlannedHarvest(NamedTuple):
    """The planned size of a harvest.

    Attributes:
        texts, tokens, rows, files: the number of texts, tokens, rows and files.
        bytes: the size of the files, without some kilobytes for each file.
        seconds: the estimated time in one job on this machine, from the speed of the first batch.
        free: the free bytes of the disk; None if unknown.

    >>> from interp.store import plan
    >>> from models import load
    >>> planned = plan(load("pydoc-4l"), ["part KV8"] * 100, "blocks.1.mlp_out")
    >>> print(planned)  # doctest: +ELLIPSIS
    800 tokens of 100 texts: 0.000422 GB in 2 files, which fits on the disk; about ... s
    """

    texts: int
    tokens: int
    rows: int
    files: int
    bytes: int
    seconds: float
    free: int | None

    @property
    def fits(self) -> bool:
        """True if the harvest fits on the disk, or if the free bytes are unknown."""
        return self.free is None or self.bytes < self.free

    def as_json(self) -> dict[str, Any]:
        """Return the planned sizes in the JSON form of all results; see `interp.json_form`."""
        units = {"bytes": "bytes", "free": "bytes", "seconds": "seconds"}
        tables = {}
        for name, number in self._asdict().items():
            tables[name] = Table(number, unit=units.get(name, name))
        return form("PlannedHarvest", {**tables, "fits": Table(self.fits)})

    def __repr__(self) -> str:
        room = "which fits on the disk"
        if not self.fits:
            room = f"but the disk has room for only {(self.free or 0) / 1e9:.3g} GB"
        return (
            f"{self.tokens:,} tokens of {self.texts:,} texts: {self.bytes / 1e9:.3g} GB in "
            f"{self.files:,} file{'s' * (self.files != 1)}, {room}; about {self.seconds:.3g} s"
        )


@without_gradients
def plan(
    model: "Model",
    texts: "Corpus",
    names: "Selector",
    out: str | os.PathLike[str] = ".",
    config: HarvestConfig = HarvestConfig(),
) -> PlannedHarvest:
    """Return the size of a harvest, and its time, which is measured on the first batch.

    All texts are read, so a generator is exhausted.

    Args:
        model, texts, names, out, config: the arguments of a call of `harvest`, which raises the
            same errors.

    Returns:
        The numbers of texts, tokens, rows and files, the size in bytes and the time in seconds.

    >>> from models import load
    >>> planned = plan(load("pydoc-4l"), ["part KV8"] * 100, "blocks.1.mlp_out")
    >>> # Each row has 128 values and 4 integers of 4 bytes.
    >>> planned.tokens, planned.bytes, planned.fits
    (800, 422400, True)
    """
    require_kind("config", config, kind=HarvestConfig, words="a HarvestConfig")
    reader = RowReader(loaded(model), names, config)
    first_batch: list[TextPiece] = []
    n_texts, n_tokens, n_rows, n_files = 0, 0, 0, 0
    for run in texts_of_files(texts, config.column, config.per_file):
        pieces = reader.pieces(run, n_texts)
        first_batch += pieces[: config.batch - len(first_batch)]
        counts = [int(reader.kept_mask(piece).sum()) for piece in pieces]
        n_texts += len(run)
        n_files += 1
        n_tokens += sum(piece.shape[1] for piece in pieces)
        n_rows += sum(map(bool, counts)) if config.pool else sum(counts)
    start = time.perf_counter()
    tensors = reader.tensors(first_batch).values()
    rate = sum(piece.shape[1] for piece in first_batch) / (time.perf_counter() - start)
    bytes_per_row = sum(value.shape[1:].numel() * value.element_size() for value in tensors)
    return PlannedHarvest(
        texts=n_texts,
        tokens=n_tokens,
        rows=n_rows,
        files=n_files,
        bytes=n_rows * bytes_per_row,
        seconds=n_tokens / max(1e-9, rate),
        free=Folder(out).free,
    )
