"""Runs of circuits on the same texts, and their metrics as shares between two special circuits.

The circuit without edges has the share 0, and the whole model has the share 1.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import is_cancelled, warn, without_gradients
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.inputs.parts import finished, part_now
from interp.kinds import require_made
from interp.measuring import name_of
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result, shares_of
from interp.runs.masked import CircuitSource, MaskedRuns


class CircuitRuns(MaskedRuns):
    """Runs of circuits on the same texts. Call the object with a circuit to get its metric.

    Args:
        model: the model of the circuit's graph.
        pairs, source, max_bytes: see `run_circuit`.
        circuit: a circuit. All circuits that are run must have the same graph.
        direction: `noising` runs the clean texts, `denoising` the corrupted texts. Default:
            `noising`.

    Attributes:
        none: the metric of the circuit without edges.
        whole: the metric of the whole model.

    Raises:
        ValueError: if both metrics are equal, or for the reasons of `run_circuit`.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.
    """

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs,
        circuit: Circuit,
        source: CircuitSource,
        max_bytes: int,
        direction: PatchingDirection = "noising",
    ) -> None:
        require_made("circuit", circuit, Circuit)
        graph = Graph(model, split_embeddings="input" not in circuit.graph.writers)
        super().__init__(graph, pairs, source, direction=direction, max_bytes=max_bytes)
        digests = self.runs.digests
        n_used = sum(digest in circuit.found_on for digest in digests)
        if n_used:
            warn(
                f"the circuit was found on {n_used} of these {len(digests)} pairs; measure it on "
                "other pairs",
            )
        whole = circuit | ~circuit
        self.none = self(whole - whole)
        self.whole = self(whole)
        if part_now() is None:
            _require_difference(self.none, self.whole)

    @without_gradients
    def __call__(self, circuit: Circuit) -> Float[Tensor, " example"]:
        """Return the metric of a run that replaces all edges outside the circuit."""
        return self.runs.per_example(self.metric(circuit))

    def shares(self, values: Tensor, axis: str, labels: Iterable[object]) -> Result:
        """Return differences of the metric, divided by the mean of `whole - none`.

        Args:
            values: the differences, [axis, example].
            axis: the name of the first axis.
            labels: the labels of the first axis.
        """
        return finished(self.effects(values, axis, labels), as_shares)

    def effects(self, values: Tensor, axis: str, labels: Iterable[object]) -> Result:
        """Return differences of the metric, in its unit, which `as_shares` divides.

        Args:
            values: the differences, [axis, example].
            axis: the name of the first axis.
            labels: the labels of the first axis.
        """
        return Result(
            values,
            (axis, "example"),
            base=self.none,
            target=self.whole,
            labels={axis: tuple(labels)},
            about={"metric": name_of(self.runs.metric)},
            groups=self.runs.groups,
        )


def as_shares(effects: Result) -> Result:
    """Return differences of the metric as shares of the whole model's difference.

    Raises:
        ValueError: if the metric of the whole model equals the metric of the empty circuit.
    """
    assert effects.base is not None
    assert effects.target is not None
    _require_difference(effects.base, effects.target)
    return shares_of(effects)


def _require_difference(none: Float[Tensor, " example"], whole: Float[Tensor, " example"]) -> None:
    """Check that the metric of the whole model differs from the metric of the empty circuit."""
    gap = whole - none
    size = torch.maximum(whole.abs(), none.abs())
    if is_cancelled(gap.mean(), size.mean()):
        raise ValueError(
            "the metric must differ between the whole model and the empty circuit; got equal"
        )
