"""The settings of the stability study, and the rows of its tables."""

import csv
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from walks import Graph

METRICS = ("angle", "change")
"""Comparisons of a window with the one before: the largest angle between top subspaces, in radians,
and the change of singular values, relative to their norm.
"""


@dataclass(frozen=True)
class Setting:
    """The settings of the analysis.

    Attributes:
        graph: the graph of the walks.
        width: the number of tokens in a window, which is the model's input.
        delay: steps from a jumper to the landing.
        buffer: steps after the landing that still belong to an event window.
        d_model: the model's width.
        top: the dimension of the top singular subspaces.
    """

    graph: Graph
    width: int
    delay: int
    buffer: int
    d_model: int
    top: int


class Spectrum(NamedTuple):
    """The mean over windows of a singular value. The largest has the `number` 1."""

    step: int
    target: str
    layer: int
    number: int
    singular_value: float


class Measure(NamedTuple):
    """Medians over windows of numbers that summarize singular values."""

    step: int
    target: str
    layer: int
    effective_rank: float
    stable_rank: float
    spectral_gap: float
    condition_number: float


class Drift(NamedTuple):
    """The angles by which the top subspace turns from one checkpoint to the next."""

    from_step: int
    to_step: int
    target: str
    layer: int
    mean_radians: float
    sd_radians: float


class Event(NamedTuple):
    """The mean change from window to window, with the newest token inside or outside
    event windows.
    """

    step: int
    target: str
    layer: int
    metric: str
    inside: float
    outside: float
    difference: float
    low: float
    high: float


class Beyond(NamedTuple):
    """The difference in an `Event` row, minus the same difference of the untrained model."""

    target: str
    layer: int
    metric: str
    difference: float
    low: float
    high: float


class Around(NamedTuple):
    """The mean angle between windows at `lag` steps after the beginning of an event."""

    step: int
    target: str
    layer: int
    lag: int
    mean: float
    low: float
    high: float


class Learned(NamedTuple):
    """Losses in nats along edges and at landings, and the probability of the landing's region."""

    step: int
    edge_nats: float
    landing_nats: float
    landing_region: float


class Norm(NamedTuple):
    """The residual stream's norm after a block, and its effective rank in event windows."""

    layer: int
    inside: float
    outside: float
    difference: float
    low: float
    high: float
    effective_rank_in_windows: float


@dataclass(frozen=True)
class Tables:
    """The rows of all tables, by the names of their files."""

    spectra: list[Spectrum] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    beyond_untrained: list[Beyond] = field(default_factory=list)
    around_events: list[Around] = field(default_factory=list)
    learning: list[Learned] = field(default_factory=list)
    residual_norms: list[Norm] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return [row.step for row in self.learning]

    @property
    def layers(self) -> list[int]:
        """All layers of the model."""
        return [row.layer for row in self.residual_norms]

    def write(self, directory: Path) -> None:
        """Write a CSV file for each table, with numbers of six digits."""
        for table in fields(self):
            rows = getattr(self, table.name)
            with (directory / f"{table.name}.csv").open("w", newline="") as file:
                out = csv.writer(file)
                out.writerow(rows[0]._fields)
                for row in rows:
                    out.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])
