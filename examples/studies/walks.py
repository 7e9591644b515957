"""Random walks on a graph of regions, with jumpers: vertices that later move the walk to another
region.

Each token is a vertex. Vertices are numbered at random, so their numbers carry no information.
Edges join vertices of one region. When the walk is on a jumper and no event is active, an event
begins: `delay` steps later the walk is in the region that the jumper leads to, wherever it was
before.
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
        region: the region of each vertex, counted from 0.
        leads_to: the region that a jumper moves the walk into; -1 for other vertices.
    """

    adjacency: Bool[Tensor, "vertex vertex"]
    region: Int[Tensor, " vertex"]
    leads_to: Int[Tensor, " vertex"]

    @property
    def regions(self) -> int:
        """The number of regions."""
        return int(self.region.max()) + 1


@dataclass(frozen=True)
class Walks:
    """Walks over vertices, with the steps where events begin.

    Attributes:
        tokens: the vertex at each step.
        events: True where the walk is on a jumper and an event begins.
    """

    tokens: Int[Tensor, "walk step"]
    events: Bool[Tensor, "walk step"]


def random_graph(n: int, regions: int, degree: int, jumpers: int, seed: int) -> Graph:
    """Return a random graph with regions of nearly equal size. Each region is connected.

    A region is a random cycle of its vertices with some chords. The first jumper of each region
    leads to the next region, so that every vertex can be reached from every other vertex. The other
    jumpers lead to random other regions.

    Args:
        n: number of vertices.
        regions: number of regions, at least 2, of at least 3 vertices each.
        degree: mean number of neighbours, at least 2 and below the size of a region.
        jumpers: number of jumpers in each region, at least 1 and below the size of a region.
        seed: the seed of the graph.

    Raises:
        ValueError: if a number is out of range. The message gives the rule and the number.
    """
    size = n // regions
    if regions < 2 or size < 3:
        raise ValueError(
            f"n must be at least 3 for each of 2 or more regions; got n={n} and regions={regions}"
        )
    if not 2 <= degree < size:
        raise ValueError(
            f"degree must be 2 to {size - 1} for connected regions of {size}; got {degree}"
        )
    if not 1 <= jumpers < size:
        raise ValueError(f"jumpers must be 1 to {size - 1} in each region; got {jumpers}")
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
        # The cycle of a region has as many edges as vertices, and gives each vertex two neighbours.
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
    """Return walks that begin at random vertices, with the events that this module describes.

    Each step goes to a neighbour that is chosen uniformly, unless an event ends.

    An event ends on a vertex chosen uniformly from its region. Other jumpers on the way have no
    effect.

    Args:
        graph: the graph.
        count: number of walks.
        length: vertices of each walk, including the first.
        delay: steps from a jumper to the other region (r), at least 1.
        generator: the generator of the walks.

    Raises:
        ValueError: if the delay is below 1.
    """
    _check_delay(delay)
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
    """Return True for the steps in event windows.

    The window of an event that begins at step s contains the steps s to s + delay + buffer, with
    both ends. At the end of a walk, windows are cut off.

    Args:
        events: True at the steps where events begin.
        delay: steps from a jumper to the other region (r), at least 1.
        buffer: steps after the landing that still belong to the window.

    Raises:
        ValueError: if the delay is below 1.
    """
    _check_delay(delay)
    windows = torch.zeros_like(events)
    for after in range(min(delay + buffer + 1, events.shape[1])):
        windows[:, after:] |= events[:, : events.shape[1] - after]
    return windows


def sliding_windows(
    values: Shaped[Tensor, "walk step"], width: int
) -> Shaped[Tensor, "walk start width"]:
    """Return all windows of `width` steps, with stride 1, as a view of the values."""
    return values.unfold(1, width, 1)


def _check_delay(delay: int) -> None:
    if delay < 1:
        raise ValueError(f"delay must be at least 1; got {delay}")
