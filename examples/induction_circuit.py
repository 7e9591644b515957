"""Finds, draws and measures the circuit by which the bundled model copies a part number.

Each edge of the model is patched on some pairs of texts, and estimated from gradients beside that. The smallest
circuit that keeps 90% of the behaviour there is then measured on other pairs, beside a random circuit of the
same size. It takes half a minute.

    python examples/induction_circuit.py --out out
"""

import argparse
import random
import sys
from collections.abc import Sequence

import torch
from commands import attempt, figures_parser, require_least, require_matplotlib

from interp import (
    Circuit,
    Pairs,
    Result,
    circuits,
    compare,
    completeness,
    curve,
    edge_attribution,
    edge_patching,
    faithfulness,
    minimality,
)
from interp.graph import Graph
from models import load

TEXT = "The part {}{} is sold out; please ask for {}"
LETTERS, ENOUGH = "BCDFGHJKLMNPQRSTVWXZ", 0.9


def parts(n: int, draw: random.Random) -> Pairs:
    """Texts that name a part again, up to its last digit. The corrupted text begins with another part."""
    clean, corrupted, answers = [], [], []
    for _ in range(n):
        letters = "".join(draw.sample(LETTERS, 12))
        name, other = (f"{x[:4]}-{x[4:]}{draw.randrange(10)}" for x in (letters[:6], letters[6:]))
        right, wrong = draw.sample("0123456789", 2)
        clean.append(TEXT.format(name, right, name))
        corrupted.append(TEXT.format(other, wrong, name))
        answers.append((right, wrong))
    return Pairs(clean, corrupted, answers)


def run(options: argparse.Namespace) -> None:
    """From texts to a circuit and its figures."""
    require_least(options, {"pairs": 8})
    if options.out:
        require_matplotlib(options.out)
    model = load("pydoc-4l")
    pairs = parts(options.pairs, random.Random(options.seed)).solved(model)
    found_on, others = pairs.split(options.seed)
    print(
        f"{pairs}; the circuit is found on {len(found_on)} of them, and measured on {len(others)}"
    )

    graph = Graph(model)
    scores = edge_patching(model, found_on)
    print(
        f"\nThe edges whose replacement changes the logit difference most, of {len(scores.values)}:"
    )
    print(scores.top(8))
    print(f"\nGradients instead: {compare(scores, edge_attribution(model, found_on))}")

    circuit = smallest(model, found_on, graph, scores)
    print(f"\n{circuit}\nIts faithfulness on other texts, and that of as many random edges:")
    print(faithfulness(model, others, circuit).top(2))
    print("\nWhat it loses without one of its nodes, as a share of the behaviour:")
    print(minimality(model, others, circuit).top(6))
    print("\nWhat the model does without a node, and the circuit without it cannot:")
    print(completeness(model, others, circuit).top(4))

    measured = curve(model, others, graph, scores)
    print(f"\n{measured}")
    if options.out:
        circuit.save(options.out / "circuit.json")
        circuit.plot().savefig(options.out / "circuit.png", dpi=150)
        measured.plot().savefig(options.out / "curve.png", dpi=150)


def smallest(model: torch.nn.Module, pairs: Pairs, graph: Graph, scores: Result) -> Circuit:
    """The first circuit of a growing number of edges that keeps enough of the behaviour."""
    n = 8
    while n < len(graph.edges):
        circuit = circuits.greedy(graph, scores, n, signed=True)
        # On the same texts, because this is still the search: without the digests that would be warned of.
        if faithfulness(model, pairs, Circuit(graph, circuit)).mean()[0] > ENOUGH:
            return circuit
        n = n * 5 // 4
    raise ValueError(f"no circuit keeps {ENOUGH:.0%} of the behaviour")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    parser = figures_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return attempt(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
