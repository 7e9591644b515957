"""Runs of circuits on the same texts, on a scale from the empty circuit to the whole model."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import is_cancelled, warn, without_gradients
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.kinds import require_made
from interp.pairs.pairs import Pairs
from interp.results.result import Result
from interp.runs.masked import CircuitSource, MaskedRuns


class CircuitRuns(MaskedRuns):
    """Runs of circuits on the same texts.

    Args:
        model: the model of the circuit's graph.
        pairs, source, max_bytes: see `run_circuit`.
        circuit: one of the circuits.

    Attributes:
        none, whole: the metric of the circuit without edges, and of the whole model.

    Raises:
        ValueError: if the metric is the same for both, or as for `run_circuit`.

    Warns:
        UserWarning: if texts are among those that the circuit was found on.
    """

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs,
        circuit: Circuit,
        source: CircuitSource,
        max_bytes: int,
    ) -> None:
        require_made("circuit", circuit, Circuit)
        graph = Graph(model, split_embeddings="input" not in circuit.graph.writers)
        super().__init__(graph, pairs, source, max_bytes=max_bytes)
        digests = self.runs.pairs.digests()
        seen = sum(digest in circuit.found_on for digest in digests)
        if seen:
            warn(
                f"the circuit was found on {seen} of these {len(digests)} pairs: others show how good it is",
            )
        whole = circuit | ~circuit
        self.none, self.whole = self(whole - whole), self(whole)
        gap, size = self.whole - self.none, torch.maximum(self.whole.abs(), self.none.abs())
        if is_cancelled(gap.mean(), size.mean()):
            raise ValueError("the metric must differ between the whole model and none of it")

    @without_gradients
    def __call__(self, circuit: Circuit) -> Float[Tensor, " example"]:
        """Return the metric of a run in which only the circuit's edges have their own values."""
        return self.metric(circuit)

    def shares(self, values: Tensor, axis: str, labels: Iterable[object]) -> Result:
        """Return differences of the metric as shares of the whole scale.

        Args:
            values: the differences, [axis, example].
            axis: the name of their first axis.
            labels: its labels.
        """
        effects = Result(
            values,
            (axis, "example"),
            base=self.none,
            target=self.whole,
            labels={axis: tuple(labels)},
            about={"metric": repr(self.runs.metric)},
            groups=self.runs.groups,
        )
        return effects.normalized()
