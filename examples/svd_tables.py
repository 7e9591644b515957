"""What the stability study is set in, and the rows of its tables."""

import csv
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from walks import Graph

METRICS = ("angle", "change")
"""How a window's decomposition is compared with the one before: the largest angle by which the top
subspace turned, in radians, and how far singular values moved, as a share of their norm."""


@dataclass(frozen=True)
class Setting:
    """What is walked on, what is read at once, and what is followed.

    Attributes:
        graph: of the walks.
        width: tokens of a window, all that the model reads.
        delay: steps from a jumper to the landing.
        buffer: steps after it that still belong to an event window.
        d_model: the model's width.
        top: dimension of the singular subspaces that are followed.
        seed: of the bootstrap's draws.
    """

    graph: Graph
    width: int
    delay: int
    buffer: int
    d_model: int
    top: int
    seed: int


class Spectrum(NamedTuple):
    """A singular value, its mean over windows; counted from 1."""

    step: int
    target: str
    layer: int
    number: int
    singular_value: float


class Measure(NamedTuple):
    """What is read from singular values; medians over windows."""

    step: int
    target: str
    layer: int
    effective_rank: float
    stable_rank: float
    spectral_gap: float
    condition_number: float


class Drift(NamedTuple):
    """How far the top subspace turns from one checkpoint to the next."""

    from_step: int
    to_step: int
    target: str
    layer: int
    mean_radians: float
    sd_radians: float


class Event(NamedTuple):
    """How far it turns from window to window, the newest token inside an event window or not."""

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
    """That difference less the untrained model's."""

    target: str
    layer: int
    metric: str
    difference: float
    low: float
    high: float


class Around(NamedTuple):
    """The angle between windows so many steps after an event began."""

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
    """The residual stream's norm after a block, and how many dimensions it fills in windows."""

    layer: int
    inside: float
    outside: float
    difference: float
    low: float
    high: float
    effective_rank_in_windows: float


@dataclass(frozen=True)
class Tables:
    """All rows, by the name of their file."""

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
        """Of the checkpoints, in order."""
        return [row.step for row in self.learning]

    @property
    def layers(self) -> list[int]:
        """All of the model's."""
        return [row.layer for row in self.residual_norms]

    def write(self, directory: Path) -> None:
        """A CSV file for each table; numbers with six digits."""
        for table in fields(self):
            rows = getattr(self, table.name)
            with (directory / f"{table.name}.csv").open("w", newline="") as file:
                out = csv.writer(file)
                out.writerow(rows[0]._fields)
                for row in rows:
                    out.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])
