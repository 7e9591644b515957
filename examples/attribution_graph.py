"""Traces how the bundled model copies a digit: an attribution graph, the heads behind it, and interventions that test it.

The text names a part, and asks for it again up to its last digit. Transcoders stand in place of the MLPs. It takes some ten
seconds.

    python examples/attribution_graph.py --out out
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser, pydoc_text

from interp import attribution_graph, load_sae, pictures
from interp.features import feature_cards
from models import load

TEXT, RIGHT, WRONG = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8", "1", "4"
DIGIT = TEXT.index("1")
MOST = 60


def run(out: Path | None) -> None:
    """Draws the graph of the digit, names heads, and sets its strongest features to 0, one at a time."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
    model, transcoders = load("pydoc-4l"), load_sae("pydoc-4l/transcoders")
    graph = attribution_graph(model, TEXT, transcoders, targets=[(RIGHT, WRONG)])
    print(graph)
    target = graph.logits[0].id
    pruned = graph.pruned()
    print(
        f"\nWhat acts on the logit of {RIGHT!r} less that of {WRONG!r}, {float(graph.totals[0]):.2f}"
    )
    for name, weight in pruned.inputs(target)[:8]:
        node = pruned[name]
        print(f"  {weight:+.3f}  {name:10} {node.kind:8} {node.label or ' '.join(node.raises)!r}")

    (digit,) = (node.id for node in pruned.nodes if node.kind == "token" and node.pos == DIGIT)
    print(
        f"\nThe token at position {DIGIT} adds {graph.effect(digit, target):.2f} itself; cut a head, and this is lost"
    )
    print(graph.heads(digit, target).top(4))

    features = sorted(
        (node for node in pruned.nodes if node.kind == "feature"),
        key=lambda node: node.influence or 0.0,
    )[:MOST]
    results = [graph.intervene({node.id: 0.0}) for node in features]
    changes = torch.stack([torch.stack([each.predicted[0], each.true[0]]) for each in results])
    print(
        f"\nThe {MOST} most influential features, each set to 0: predicted and true change of the difference"
    )
    for layer in range(4):
        inside = [n for n, node in enumerate(features) if node.layer == layer]
        if len(inside) > 2:
            r = torch.corrcoef(changes[inside].T)[0, 1]
            example = features[inside[0]].id, *changes[inside[0]].tolist()
            print(
                "  layer {}: correlation {:+.2f} over {}; {} {:+.2f} and {:+.2f}".format(
                    layer, r, len(inside), *example
                )
            )
    last = [node.id for node in features if node.layer == 3]
    together = graph.intervene({"layer 3": 0.0}, supernodes={"layer 3": last})
    print(
        f"all of layer 3 at once: predicted {together.predicted[0]:+.2f}, true {together.true[0]:+.2f}"
    )

    if out:
        documentation = pydoc_text()
        texts = [TEXT, *(documentation[start : start + 100] for start in range(0, 6000, 100))]
        cards = {}
        for layer in range(4):
            numbers = sorted({node.number for node in features if node.layer == layer})
            place = f"blocks.{layer}.mlp_out"
            if numbers:
                cards[layer] = feature_cards(
                    model, {place: transcoders[place]}, texts, numbers, k=3
                )
        pictures.attribution(pruned, cards).save(out / "attribution_graph.html")
        written = pruned.to_neuronpedia(out, slug="digit", scan="pydoc-4l")
        print(f"\n{out / 'attribution_graph.html'} shows the graph, {written} holds it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    options = figures_parser(__doc__).parse_args(arguments)
    return attempt(partial(run, options.out))


if __name__ == "__main__":
    sys.exit(main())
