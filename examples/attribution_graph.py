"""Trace how the bundled model copies a digit: an attribution graph, its heads, and interventions.

The text names a part twice, the second time without its last digit. Transcoders replace the MLPs.
Attention is frozen, and the effect through attention is estimated separately. The example takes
half a minute, and about 20 seconds for each additional text.

    python examples/attribution_graph.py --out out --texts 10
"""

import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser, pydoc_text
from torch import Tensor

from interp import attribution_graph, load_transcoders, plots
from interp.attribution_graphs import AttributionGraph, Node
from interp.features import feature_cards
from models import load

TEXT, RIGHT, WRONG = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8", "1", "4"
DIGIT = TEXT.index("1")
MOST = 60


def strongest(graph: AttributionGraph) -> list[Node]:
    """Return the features with the most influence on the target, at most `MOST`."""
    features = (node for node in graph.nodes if node.kind == "feature")
    return sorted(features, key=lambda node: node.influence or 0.0)[:MOST]


def correlations(graph: AttributionGraph) -> Tensor:
    """Return correlations between pairs of numbers, [layer, pair]; the last row is of all layers.

    Each of the strongest features is set to zero. This gives, for each feature, predicted and
    measured changes of the target. A correlation compares two of these numbers over all features
    of a layer. The pairs are:

    1. predicted through values, and measured;
    2. predicted through values and attention, and measured;
    3. predicted through attention, and the measured change that fixed patterns do not explain;
    4. measured with fixed patterns, and measured;
    5. measured with fixed patterns and norms, and measured with fixed patterns;
    6. predicted through values, and measured with fixed patterns and norms.
    """
    features, changes = strongest(graph), []
    for node in features:
        each = graph.intervene({node.id: 0.0})
        numbers = each.predicted, each.by_attention, each.true, each.patterns_held, each.scales_held
        changes.append(torch.stack([number[0] for number in numbers]))
    predicted, moved, true, patterns, scales = torch.stack(changes, 1)
    values = predicted - moved
    pairs = [(values, true), (predicted, true), (moved, true - patterns)]
    pairs += [(patterns, true), (scales, patterns), (values, scales)]
    layers, table = torch.tensor([node.layer for node in features]), []
    for at in (*(layers == layer for layer in range(4)), layers >= 0):
        both = [torch.stack([one[at], other[at]]) for one, other in pairs]
        table.append(torch.stack([torch.corrcoef(each)[0, 1] for each in both]))
    return torch.stack(table)


def show(table: Tensor) -> None:
    """Print correlations. A layer without a predicted change has no correlation."""
    for name, row in zip(("0", "1", "2", "3", "all"), table.tolist(), strict=True):
        numbers = ("none" if math.isnan(number) else f"{number:+.2f}" for number in row)
        print(f"  {name:4}" + "".join(f"{number:>8}" for number in numbers))


def run(out: Path | None, texts: int) -> None:
    """Draw the graph, explain the attention of heads, and set the strongest features to 0 one by
    one.
    """
    if out:
        out.mkdir(parents=True, exist_ok=True)
    model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    graph = attribution_graph(model, TEXT, transcoders, targets=[(RIGHT, WRONG)], attention=True)
    print(graph)
    target = graph.logits[0].id
    pruned = graph.pruned()
    print(
        f"\nWhat acts on the logit of {RIGHT!r} less that of {WRONG!r}, "
        f"{float(graph.totals[0]):.2f}"
    )
    for name, weight in pruned.inputs(target)[:8]:
        node = pruned[name]
        print(f"  {weight:+.3f}  {name:10} {node.kind:8} {node.label or ' '.join(node.raises)!r}")

    (digit,) = (node.id for node in pruned.nodes if node.kind == "token" and node.pos == DIGIT)
    print(
        f"\nThe token at position {DIGIT} adds {graph.effect(digit, target):.2f} itself; cut a "
        "head, and this is lost"
    )
    print(graph.heads(digit, target).top(4))

    (best,) = graph.heads(digit, target).top(1)
    head = best.where["layer"], best.where["head"]
    print(f"\nWhy head {head[1]} of layer {head[0]} looks there rather than at the first token")
    why = graph.attention(head, key=DIGIT, against=0)
    print(why.about)
    print(why.top(5))

    print(f"""
The {MOST} most influential features, each set to 0. The columns are correlations over the features
of a layer, and over all features:
  - the measured change with the prediction through values, with the prediction through values and
    attention, and of the part through attention with its measured part;
  - the measured change with fixed patterns, and without; with fixed patterns and scales, and with
    fixed patterns only; and the prediction through values with fixed patterns and scales""")
    rows = [correlations(graph)]
    show(rows[0])
    draw = random.Random(0)
    for _ in range(texts):
        letters = "".join(draw.choice("ABCDEFGHJKLMNPQRSTVWXYZ") for _ in range(6))
        right, wrong, other = draw.sample("0123456789", 3)
        part = f"{letters[:4]}-{letters[4:]}{other}"
        text = f"part {part}{right} is sold out; ask for {part}"
        rows.append(
            correlations(
                attribution_graph(
                    model, text, transcoders, targets=[(right, wrong)], attention=True
                )
            )
        )
    if texts:
        print(f"\nMedians over {texts} texts with other parts")
        show(torch.stack(rows[1:]).quantile(0.5, 0))

    features = strongest(graph)
    last = [node.id for node in features if node.layer == 3]
    together = graph.intervene({"layer 3": 0.0}, supernodes={"layer 3": last})
    print(
        f"\nall of layer 3 at once: predicted {together.predicted[0]:+.2f}, true "
        f"{together.true[0]:+.2f}"
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
        plots.attribution(pruned, cards).save(out / "attribution_graph.html")
        written = pruned.to_neuronpedia(out, slug="digit", scan="pydoc-4l")
        print(f"\n{out / 'attribution_graph.html'} shows the graph, {written} holds it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    parser = figures_parser(__doc__)
    parser.add_argument(
        "--texts", type=int, default=0, help="more texts to measure on (%(default)s)"
    )
    options = parser.parse_args(arguments)
    return attempt(partial(run, options.out, options.texts))


if __name__ == "__main__":
    sys.exit(main())
