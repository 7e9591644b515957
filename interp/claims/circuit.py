"""Claims that a circuit does what the whole model does, and the tests of such a claim.

The share F of a circuit is (m(C) - m(∅)) / (m(M) - m(∅)), as in `faithfulness`. On fresh pairs:

1. F must be near 1, within the promise.
2. The circuit must be more faithful than the best of several random circuits of the same size. Each
   random edge has a path to the logits.
3. It must be as faithful as circuits that edge attribution finds from random halves of the pairs of
   the claim.
4. Without the circuit, the model must lose the behaviour (completeness).
5. The better half of the edges must be less faithful. This half is chosen on the pairs of the
   claim, by the loss without each edge.
6. F must hold up if the replaced edges carry mean values, if clean and corrupted texts change their
   roles, and on a paraphrase.
7. A model with shuffled weights must lack the behaviour.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import number_of, progress_of, without_gradients
from interp.claims.fields import entries, fields, flag, number, text_field
from interp.claims.trial import Content, Trial, highest, shuffled_weights
from interp.claims.verdict import Bounds, Test
from interp.effects.edges import edge_attribution
from interp.graph.circuit import Circuit
from interp.graph.circuits import greedy, random_backward
from interp.graph.graph import Graph
from interp.kinds import require_made
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.protocol import runner_of
from interp.results.result import Result
from interp.runs.circuit_runs import CircuitRuns
from interp.runs.masked import CircuitSource

_PROMISES = ("faithful", "complete", "robust")


@dataclass(frozen=True)
class CircuitContent(Content):
    """A circuit and its promised numbers.

    Attributes:
        edges: the names of the edges.
        split_embeddings: whether token and position embeddings are two separate writers.
        digests: the digests of the texts that the circuit was found on.
        faithful: the share of the behaviour that the circuit keeps is at least this number, and at
            most 2 minus this number.
        complete: the model without the circuit keeps at most 1 minus this share.
        robust: the share under mean values, with exchanged texts and on a paraphrase is at least
            this number.
    """

    edges: tuple[str, ...]
    split_embeddings: bool
    digests: tuple[str, ...]
    faithful: float
    complete: float
    robust: float

    kind: ClassVar[str] = "circuit"
    has_paraphrase: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in _PROMISES:
            number(getattr(self, name), name, least=0, most=1)

    @classmethod
    def of(cls, model: nn.Module, circuit: Circuit, **promised: float) -> "CircuitContent":
        """Return the content of a claim about a circuit.

        Args:
            model: the model.
            circuit: the circuit.
            promised: the promised numbers.

        Raises:
            ValueError: if the circuit has no edge or belongs to another model, or if a promise is
                not a share.
        """
        require_made("circuit", circuit, Circuit)
        if not len(circuit):
            raise ValueError("circuit must have at least one edge; got none")
        is_split = "input" not in circuit.graph.writers
        Graph(model, is_split).require(circuit.graph.identity)
        return cls(
            edges=tuple(circuit),
            split_embeddings=is_split,
            digests=tuple(sorted(circuit.found_on)),
            **promised,
        )

    @property
    def title(self) -> str:
        """The kind and the size of the circuit."""
        return f"a circuit of {number_of(len(self.edges), 'edge')}"

    @property
    def found_on(self) -> frozenset[str]:
        """The digests of the texts that the circuit was found on."""
        return frozenset(self.digests)

    @without_gradients
    def tests(self, trial: Trial) -> list[Test]:
        """Return the results of all tests that the module's docstring lists.

        If the metric has the same mean on the clean and the corrupted texts of the fresh pairs,
        there is no behaviour to keep. The result is then the failed test of the behaviour alone.
        """
        graph = Graph(trial.model, self.split_embeddings)
        circuit = Circuit(graph, self.edges)
        if trial.behaviour.is_zero:
            return [trial.behaviour.test()]
        runs = _Shares(trial, trial.fresh, circuit)
        robust = Bounds(least=self.robust)
        tests = [
            trial.behaviour.test(),
            runs.test("faithful", Bounds(self.faithful, 2 - self.faithful)),
            self._random(trial, runs, circuit),
            self._found_again(trial, runs, circuit),
            _completeness(runs, circuit, Bounds(most=1 - self.complete)),
            _better_half(trial, runs, circuit),
            _mean_ablation(trial, circuit, robust),
            _Shares(trial, trial.fresh, circuit, direction="denoising").test(
                "texts exchanged", robust
            ),
            shuffled_weights(trial),
        ]
        if trial.paraphrase is not None:
            tests.append(_Shares(trial, trial.paraphrase, circuit).test("paraphrase", robust))
        return tests

    def _random(self, trial: Trial, runs: "_Shares", circuit: Circuit) -> Test:
        """Return the comparison with the best random circuit of the same size."""
        metrics = []
        for seed in progress_of(trial.seeds, "random circuits", len(trial.seeds)):
            metrics.append(runs(random_backward(circuit.graph, len(circuit), seed)))
        result = runs.share(runs(circuit) - highest(metrics))
        return Test.of("above random circuits", result, Bounds(above=0.0))

    def _found_again(self, trial: Trial, runs: "_Shares", circuit: Circuit) -> Test:
        """Return the comparison with circuits that are found from halves of the claim's pairs."""
        name = "as good as found again"
        bounds = Bounds(least=self.faithful - 1)
        if len({*trial.found_on.digests()}) < 2:
            return Test(
                name, "cannot tell", repr(bounds), note="it needs two different pairs of the claim"
            )
        metrics = []
        n_same = 0
        for seed in progress_of(trial.seeds, "halves", len(trial.seeds)):
            half, _ = trial.found_on.split(seed)
            scores = edge_attribution(trial.model, half, split_embeddings=self.split_embeddings)
            again = Circuit(circuit.graph, greedy(circuit.graph, scores, len(circuit)).kept)
            n_same += len(again & circuit)
            metrics.append(runs(again))
        result = runs.share(runs(circuit) - torch.stack(metrics).mean(0))
        share = n_same / len(circuit) / len(trial.seeds)
        return Test.of(name, result, bounds, note=f"{share:.0%} of the edges are found again")

    def about(self, trial: Trial) -> Mapping[str, str]:
        """Return facts about the metric and its base."""
        return trial.behaviour.about()

    def packed(self) -> dict[str, Any]:
        """Return the content as JSON types."""
        facts = asdict(self)
        return {
            "edges": [*self.edges],
            "split_embeddings": self.split_embeddings,
            "digests": [*self.digests],
            "promised": {name: facts[name] for name in _PROMISES},
        }

    @classmethod
    def from_json(cls, value: Any, path: str) -> "CircuitContent":
        """Return the content from JSON types.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        facts = fields(value, path, "edges", "split_embeddings", "digests", "promised")
        edges = tuple(
            text_field(edge, at) for at, edge in entries(facts["edges"], f"{path}.edges", 1)
        )
        if len({*edges}) < len(edges):
            raise ValueError(f"{path}.edges must be different edges; got the same edge twice")
        digests = [
            text_field(entry, at) for at, entry in entries(facts["digests"], f"{path}.digests")
        ]
        promised = fields(facts["promised"], f"{path}.promised", *_PROMISES)
        for name in _PROMISES:
            promised[name] = number(promised[name], f"{path}.promised.{name}", least=0, most=1)
        return cls(
            edges=edges,
            split_embeddings=flag(facts["split_embeddings"], f"{path}.split_embeddings"),
            digests=tuple(digests),
            **promised,
        )


class _Shares(CircuitRuns):
    """Runs of circuits on some pairs, and their shares of the behaviour.

    Args:
        trial: the model and the pairs of the verification.
        pairs: the pairs.
        circuit: the circuit of the claim.
        source: see `run_circuit`. Default: the other text of each pair.
        direction: `denoising` exchanges the roles of the clean and the corrupted texts. Default:
            `noising`.
    """

    def __init__(
        self,
        trial: Trial,
        pairs: Pairs,
        circuit: Circuit,
        source: CircuitSource = "pair",
        direction: PatchingDirection = "noising",
    ) -> None:
        super().__init__(
            trial.model,
            pairs,
            circuit,
            source=source,
            max_bytes=trial.max_bytes,
            direction=direction,
        )
        self.circuit = circuit

    def share(self, values: Float[Tensor, " example"]) -> Result:
        """Return differences of the metric as shares of the behaviour, at a single place."""
        return self.shares(values[None], "test", [""])

    def test(self, name: str, bounds: Bounds) -> Test:
        """Return the test of the faithfulness of the circuit."""
        return Test.of(name, self.share(self(self.circuit) - self.none), bounds)


def _completeness(runs: _Shares, circuit: Circuit, bounds: Bounds) -> Test:
    """Return the test of the share that the model keeps without the circuit."""
    return Test.of("left without it", runs.share(runs(~circuit) - runs.none), bounds)


def _better_half(trial: Trial, runs: _Shares, circuit: Circuit) -> Test:
    """Return the test that the circuit is more faithful than the better half of its edges.

    The half is chosen on the pairs of the claim: the edges whose removal costs most.
    """
    name = "above its better half"
    edges = [*circuit]
    if len(edges) < 2:
        return Test(name, "holds", "above 0", note="a single edge has no half")
    on_claim = _Shares(trial, trial.found_on, circuit)
    with_all = on_claim(circuit)
    losses = []
    for edge in progress_of(edges, "edges", len(edges)):
        rest = circuit - Circuit(circuit.graph, [edge])
        losses.append(float((with_all - on_claim(rest)).mean()))
    order = sorted(range(len(edges)), key=lambda place: -losses[place])
    half = Circuit(circuit.graph, [edges[place] for place in order[: (len(edges) + 1) // 2]])
    result = runs.share(runs(circuit) - runs(half))
    return Test.of(
        name, result, Bounds(above=0.0), note=f"the half has {number_of(len(half), 'edge')}"
    )


def _mean_ablation(trial: Trial, circuit: Circuit, bounds: Bounds) -> Test:
    """Return the test of the faithfulness if replaced edges carry the mean of all fresh texts.

    If the fresh texts have different lengths, they have no mean at each position, and the replaced
    edges carry zeros.
    """
    pairs = trial.fresh
    if pairs.text.has_padding:
        return _Shares(trial, pairs, circuit, "zero").test("zero ablation", bounds)
    graph = circuit.graph
    runner = runner_of(trial.model)
    means = []
    for part in (pairs.rows().text, pairs.rows().corrupted_text):
        cache = runner.capture(part.tokens, names=graph.needed, **part.arguments(trial.model))
        means.append(graph.mean(cache))
    source = torch.stack(means).mean(0)
    return _Shares(trial, pairs, circuit, source).test("mean ablation", bounds)
