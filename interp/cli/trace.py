"""`trace`: an attribution graph, as a page and as Neuronpedia's JSON."""

import argparse
from pathlib import Path

from interp import pictures
from interp.cli.common import model_of, print_or_write, text_of
from interp.features import load_sae
from interp.tracing import AttributionGraph, PrunedGraph, attribution_graph

HELP = "trace which features of transcoders make the next token (an attribution graph)"
EXAMPLE = 'trace --prompt "part AB1 and part AB"'
TEXT = "the text"


def add(trace: argparse.ArgumentParser) -> None:
    """Add the options."""
    trace.description = (
        "Freezes attention and norms, replaces MLPs by transcoders and their errors, and shows what acts on the likeliest "
        "next tokens. With --out it writes a page, and a file that Neuronpedia and circuit-tracer's server read."
    )
    trace.add_argument(
        "--transcoders",
        default="pydoc-4l/transcoders",
        metavar="PATH",
        help="a folder of transcoders, or bundled ones (%(default)s)",
    )
    trace.add_argument(
        "--target",
        action="append",
        metavar="TOKEN",
        help="explain this token; may be repeated (the likeliest, to 0.95 of the probability, at most 10)",
    )
    trace.add_argument(
        "--nodes", type=float, default=0.8, metavar="SHARE", help="of influence kept (%(default)s)"
    )
    trace.add_argument(
        "--edges", type=float, default=0.98, metavar="SHARE", help="likewise (%(default)s)"
    )
    trace.add_argument(
        "--max-features",
        type=int,
        default=4096,
        metavar="N",
        help="whose own inputs are traced (%(default)s)",
    )
    trace.add_argument(
        "--attention",
        action="store_true",
        help="show on the page through which scores of heads the first target is decided, and why those are as they are",
    )
    trace.add_argument(
        "--slug", default="trace", metavar="NAME", help="the name of the graph (%(default)s)"
    )
    trace.add_argument("--json", action="store_true", help="print Neuronpedia's JSON")
    trace.add_argument(
        "--out", metavar="FOLDER", help="where NAME.html, NAME.json and their list go (nowhere)"
    )


def run(options: argparse.Namespace) -> None:
    """Print the targets and what acts on them, and write the files."""
    model, text = model_of(options, trained=True), text_of(options)
    graph = attribution_graph(
        model,
        text,
        load_sae(options.transcoders),
        targets=options.target or 10,
        max_features=options.max_features,
        attention=options.attention,
    )
    pruned = graph.pruned(options.nodes, options.edges)
    said = _summary(graph, pruned)
    if options.out is not None:
        page = Path(options.out) / f"{options.slug}.html"
        written = pruned.to_neuronpedia(options.out, options.slug, Path(options.model).name)
        pictures.attribution(pruned).save(page)
        said += f"\nwrote {page} and {written}"
    options.out = None
    print_or_write(options, said, pruned.as_json(options.slug, Path(options.model).name))


def _summary(graph: AttributionGraph, pruned: PrunedGraph) -> str:
    lines = [repr(graph), repr(pruned)]
    for node in graph.logits[:3]:
        lines.append(f"what acts on {node.id} {node.label!r}:")
        for name, weight in pruned.inputs(node.id)[:8]:
            source = pruned[name]
            about = source.label or f"raises {' '.join(map(repr, source.raises))}"
            lines.append(f"  {weight:+.4f}  {name:12} {source.kind:8} {about}")
    return "\n".join(lines)
