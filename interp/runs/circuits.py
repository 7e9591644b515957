"""Runs of circuits on the same texts, between all of the model and none of it."""

import warnings
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.shared import without_gradients
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.inputs.pairs import Pairs
from interp.results.result import Result
from interp.runs.masked import CircuitSource, MaskedRuns


class CircuitRuns(MaskedRuns):
    """Runs of circuits on the same texts, of which the empty and the whole one are the ends of a scale."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs,
        circuit: Circuit,
        source: CircuitSource,
        max_bytes: int,
    ) -> None:
        graph = Graph(model, split_embeddings="input" not in circuit.graph.writers)
        super().__init__(graph, pairs, source, max_bytes=max_bytes)
        digests = self.runs.pairs.digests()
        seen = sum(digest in circuit.found_on for digest in digests)
        if seen:
            warnings.warn(
                f"the circuit was found on {seen} of these {len(digests)} pairs: others show how good it is",
                stacklevel=3,
            )
        whole = circuit | ~circuit
        self.none, self.whole = self(whole - whole), self(whole)
        gap, size = self.whole - self.none, torch.maximum(self.whole.abs(), self.none.abs())
        if gap.mean().abs() <= 100 * torch.finfo(gap.dtype).eps * size.mean():
            raise ValueError("the metric must differ between the whole model and none of it")

    @without_gradients
    def __call__(self, circuit: Circuit) -> Float[Tensor, " example"]:
        """The metric of a run in which only the circuit's edges have their own values."""
        return self.metric(circuit)

    def shares(self, values: Tensor, axis: str, labels: Iterable[object]) -> Result:
        """Differences of the metric as shares of the whole scale."""
        about, named = {"metric": repr(self.runs.metric)}, {axis: tuple(labels)}
        effects = Result(values, (axis, "example"), self.none, self.whole, named, about=about)
        return effects.normalized()
