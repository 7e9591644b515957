"""Random walks on a graph of regions, with jumpers: vertices that move the walk elsewhere later.

A token is a vertex; there are no others. Vertices are numbered at random, so a number says nothing.
Edges join vertices of one region. When the walk stands on a jumper and no event is under way, an event
begins: `delay` steps later, wherever it is by then, the walk stands in the region that the jumper leads
to.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Graph:
    """An undirected graph of regions.

    Attributes:
        adjacency: True where an edge joins two vertices.
        region: of each vertex, counted from 0.
        leads_to: the region that a jumper moves the walk into; -1 for other vertices.

    Raises:
        ValueError: if the shapes do not fit, adjacency is not symmetric or joins a vertex to itself or
            to another region, a region is empty or not connected, or a jumper leads to its own region
            or to none.
    """

    adjacency: Bool[Tensor, "vertex vertex"]
    region: Int[Tensor, " vertex"]
    leads_to: Int[Tensor, " vertex"]

    def __post_init__(self) -> None:
        n = len(self.region)
        if self.adjacency.shape != (n, n) or self.leads_to.shape != (n,):
            raise ValueError(
                f"adjacency is [{n}, {n}] and leads_to [{n}] for {n} vertices, not "
                f"{tuple(self.adjacency.shape)} and {tuple(self.leads_to.shape)}"
            )
        across = self.region[:, None] != self.region
        for rule, broken in (
            ("is symmetric", self.adjacency != self.adjacency.T),
            ("joins no vertex to itself", self.adjacency & torch.eye(n, dtype=torch.bool)),
            ("joins vertices of one region", self.adjacency & across),
        ):
            if broken.any():
                raise ValueError(f"adjacency {rule}, and {broken.nonzero()[0].tolist()} does not")
        for region in range(self.regions):
            self._check_connected(region)
        for vertex in self.leads_to.ge(0).nonzero().flatten().tolist():
            to, own = int(self.leads_to[vertex]), int(self.region[vertex])
            if to == own or to >= self.regions:
                raise ValueError(
                    f"a jumper leads to another of the {self.regions} regions, and vertex {vertex} "
                    f"of region {own} leads to {to}"
                )

    @property
    def regions(self) -> int:
        """How many regions there are."""
        return int(self.region.max()) + 1

    def _check_connected(self, region: int) -> None:
        members = self.region == region
        if not members.any():
            raise ValueError(f"regions are numbered without gaps, and region {region} is empty")
        reached = torch.zeros_like(members)
        reached[members.nonzero()[0]] = True
        for _ in range(int(members.sum())):
            reached = reached | self.adjacency[reached].any(0)
        if not torch.equal(reached, members):
            cut = (members & ~reached).nonzero().flatten().tolist()
            raise ValueError(f"a region is connected, and region {region} is cut from {cut[:5]}")


@dataclass(frozen=True)
class Walks:
    """Walks over vertices, and where their events begin.

    Attributes:
        tokens: the vertex at each step.
        events: True where the walk stands on a jumper and an event begins.
    """

    tokens: Int[Tensor, "walk step"]
    events: Bool[Tensor, "walk step"]


def random_graph(n: int, regions: int, degree: int, jumpers: int, seed: int) -> Graph:
    """A random graph of regions of near equal size, each connected.

    Each region is a random cycle with chords. Its first jumper leads to the next region, so that every
    vertex can be reached from every other; its further ones lead anywhere else.

    Args:
        n: number of vertices.
        regions: number of regions, at least 2, of at least 3 vertices each.
        degree: mean number of neighbours, at least 2 and below the size of a region.
        jumpers: how many in each region, at least 1 and below its size.
        seed: of everything random here.

    Raises:
        ValueError: naming the rule and the number that breaks it.
    """
    if regions < 2:
        raise ValueError(
            f"regions are at least 2, as events lead from one to another, not {regions}"
        )
    size = n // regions
    if size < 3:
        raise ValueError(f"n is at least 3 for each of {regions} regions, {3 * regions}, not {n}")
    if not 2 <= degree < size:
        raise ValueError(
            f"degree is 2 to {size - 1}: with fewer a region of {size} would not be connected, and "
            f"there are no more to join; not {degree}"
        )
    if not 1 <= jumpers < size:
        raise ValueError(f"jumpers are 1 to {size - 1} a region, not {jumpers}")
    generator = torch.Generator().manual_seed(seed)
    adjacency = torch.zeros(n, n, dtype=torch.bool)
    region, leads_to = torch.full((n,), -1), torch.full((n,), -1)
    parts = torch.randperm(n, generator=generator).tensor_split(regions)
    for number, members in enumerate(parts):
        region[members] = number
        adjacency[members, members.roll(1)] = True
        adjacency |= adjacency.T.clone()
        upper = torch.ones(n, n, dtype=torch.bool).triu(1)
        inside = (region[:, None] == number) & (region == number)
        free = (upper & inside & ~adjacency).nonzero()
        # The cycle has as many edges as members, and gives each two neighbours.
        chords = (degree - 2) * len(members) // 2
        chosen = free[torch.randperm(len(free), generator=generator)[:chords]]
        adjacency[chosen[:, 0], chosen[:, 1]] = adjacency[chosen[:, 1], chosen[:, 0]] = True
        steps = torch.randint(1, regions, (jumpers,), generator=generator)
        steps[0] = 1
        leads_to[members[:jumpers]] = (number + steps) % regions
    return Graph(adjacency, region, leads_to)


def random_walks(
    graph: Graph, count: int, length: int, delay: int, generator: torch.Generator
) -> Walks:
    """Walks that begin anywhere and go on to a uniformly chosen neighbour; see the module for events.

    An event ends on a vertex chosen uniformly from its region. What jumpers the walk passes meanwhile
    changes nothing.

    Args:
        graph: where to walk.
        count: number of walks, at least 1.
        length: steps of each, its first vertex included, at least 1.
        delay: steps from a jumper to the other region (r), at least 1.
        generator: of everything random here.

    Raises:
        ValueError: if a number is below 1.
    """
    for name, value in (("count", count), ("length", length), ("delay", delay)):
        if value < 1:
            raise ValueError(f"{name} is at least 1, not {value}")
    at = torch.randint(len(graph.region), (count,), generator=generator)
    left, to = torch.zeros(count, dtype=torch.long), torch.full((count,), -1)
    inside = graph.region == torch.arange(graph.regions)[:, None]
    tokens, events = [], []
    for _ in range(length):
        begins = (left == 0) & (graph.leads_to[at] >= 0)
        tokens.append(at)
        events.append(begins)
        to = torch.where(begins, graph.leads_to[at], to)
        left = torch.where(begins, delay, left)
        allowed = torch.where((left == 1)[:, None], inside[to], graph.adjacency[at])
        at = torch.multinomial(allowed.float(), 1, generator=generator)[:, 0]
        left = (left - 1).clamp(min=0)
    return Walks(torch.stack(tokens, 1), torch.stack(events, 1))


def event_windows(
    events: Bool[Tensor, "walk step"], delay: int, buffer: int
) -> Bool[Tensor, "walk step"]:
    """True in `[s, s + delay + buffer]`, both ends included, for each event's step s.

    A window that runs past the last step ends there.

    Args:
        events: True at the steps where events begin.
        delay: steps from a jumper to the other region (r), at least 1.
        buffer: steps after that which still belong to the window, at least 0.

    Raises:
        ValueError: if events are not boolean [walk, step], or a number is too small.
    """
    if events.dtype != torch.bool or events.ndim != 2:
        raise ValueError(
            f"events are boolean [walk, step], not {events.dtype} {tuple(events.shape)}"
        )
    if delay < 1 or buffer < 0:
        raise ValueError(f"delay is at least 1 and buffer at least 0, not {delay} and {buffer}")
    windows = torch.zeros_like(events)
    for after in range(min(delay + buffer + 1, events.shape[1])):
        windows[:, after:] |= events[:, : events.shape[1] - after]
    return windows


def sliding_windows(
    values: Shaped[Tensor, "walk step"], width: int
) -> Shaped[Tensor, "walk start width"]:
    """Every stretch of `width` steps, with stride 1: a view.

    Raises:
        ValueError: if the width is not 1 to the number of steps.
    """
    if values.ndim != 2 or not 1 <= width <= values.shape[1]:
        raise ValueError(
            "a window is of 1 to all steps of [walk, step], "
            f"not of {width} in shape {tuple(values.shape)}"
        )
    return values.unfold(1, width, 1)
