"""The command `trace`: an attribution graph, as a page and as a JSON file for Neuronpedia."""

import argparse
from pathlib import Path

from interp import plots
from interp.attribution_graphs import AttributionGraph, PrunedGraph, attribution_graph
from interp.cli.common import model_of, print_or_write, text_of_options
from interp.features.loading import load_any


def run(options: argparse.Namespace) -> None:
    """Print the targets and the nodes that act on them, and write the files."""
    model = model_of(options, trained=True)
    text = text_of_options(options)
    graph = attribution_graph(
        model,
        text,
        load_any(options.transcoders),
        targets=_targets(options),
        max_features=options.max_features,
        attention=options.attention,
    )
    pruned = graph.pruned(options.nodes, options.edges)
    text = _summary(graph, pruned)
    if options.out is not None:
        page = Path(options.out) / f"{options.slug}.html"
        written = pruned.to_neuronpedia(options.out, options.slug, Path(options.model).name)
        plots.attribution(pruned).save(page)
        text += f"\nwrote {page} and {written}"
    options.out = None
    print_or_write(options, text, pruned.as_json())


def _targets(options: argparse.Namespace) -> int | str | tuple[str, ...] | list[str]:
    """Return the targets of a graph: the default number, one answer, two answers, or tokens."""
    texts: list[str] = options.target or []
    if options.answers:
        if texts:
            raise ValueError(f"--target must be left out with --answers; got {' '.join(texts)}")
        return tuple(options.answers)
    if not texts:
        return 10
    return texts[0] if len(texts) == 1 else texts


def _summary(graph: AttributionGraph, pruned: PrunedGraph) -> str:
    """Return a text: the sizes of both graphs, and the strongest sources of the first targets.

    For each of the first 3 targets, the text lists the 8 sources with the strongest effects.
    """
    lines = [repr(graph), repr(pruned)]
    for node in graph.logits[:3]:
        lines.append(f"what acts on {node.id} {node.label!r}:")
        for name, weight in pruned.inputs(node.id)[:8]:
            source = pruned[name]
            about = source.label or f"raises {' '.join(map(repr, source.raises))}"
            lines.append(f"  {weight:+.4f}  {name:12} {source.kind:8} {about}")
    return "\n".join(lines)
