"""Edge and path patching: effects of a value from another run along some of the paths only."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from hooks.base import Texts, require_choice, shown, shows_progress, without_gradients
from interp.graph.graph import Graph
from interp.graph.nodes import as_names
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.models import Source
from interp.runs.path_edits import PathEdits


@shows_progress
@without_gradients
@of_pairs
def edge_patching(
    model: nn.Module,
    pairs: "Pairs | Texts",
    edges: str | Iterable[str] | None = None,
    *,
    direction: PatchingDirection = "noising",
    source: Source | None = None,
    split_embeddings: bool = False,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the effect of patching each edge alone.

    An edge leads from a writer, a node that adds its output to the stream, to a reader, an input
    that is computed from the stream, such as the queries of a head.

    The reader of the edge sees the output of the writer in the other run. All other edges carry the
    values of the edited run, and all nodes after the reader are computed again. So the effect is
    exact, and equals the effect of `run_circuit` with a mask of this edge. An edge is direct:
    changes in the heads and MLPs between the writer and the reader do not reach the reader.

    `path_patching` with frozen MLPs has the same effect if there is one receiver. With several
    receivers, it patches the edges to all of them together, and then fixes the receivers at their
    new values. The result equals `run_circuit` with a mask of these edges, unless a receiver is
    upstream of another receiver. With recomputed MLPs, `path_patching` also counts the paths
    through MLPs.

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part. Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: clean and corrupted texts, and the metric; see `activation_patching`.
        edges: the name of one edge, or the names of several edges. Default: all edges. Patching
            all edges takes many runs; `edge_attribution` is a faster estimate.
        direction: `noising` edits the clean run, as circuits do; `denoising` edits the corrupted
            run.
        source: another model, whose values are used instead of a run on other texts; see
            `activation_patching`. The outputs of its writers are computed with its own weights.
        split_embeddings: whether token and position embeddings are two separate writers; see
            `Graph`.
        max_bytes: a bound on the memory in bytes, not counting the model, two runs and the outputs
            of their writers.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [edge, example] in the metric's unit. `base` is the metric of the edited run before
        the edit, and `target` is the metric of the other run. `about` contains `texts`, the digests
        of the texts that a circuit was found on (`Pairs.digests`).

    Raises:
        ValueError: if texts or metric do not fit, there is no edge, or an edge runs backwards.
        UnknownNameError: if the model lacks a node of an edge; the error names close matches.
        HookError: if hooks act on the model.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> edge_patching(model, pairs, ["input->m0", "m3->logits"]).top(2)
    edge input->m0   -22.35
    edge m3->logits  -5.003
    """
    graph = Graph(model, split_embeddings)
    runs = PathEdits(graph, pairs, direction=direction, max_bytes=max_bytes, source=source)
    names = graph.edges if edges is None else as_names(edges, "edges")
    if not names:
        raise ValueError("edges must be at least one; got none")
    places = [graph.index(name) for name in names]
    # Sort by reader, so that the runs of one sweep begin at about the same block.
    order = sorted(range(len(names)), key=lambda n: places[n][::-1])
    jobs = ((n, runs.over_edge(*places[n])) for n in order)
    return runs.result(jobs, "edge", names)


@shows_progress
@without_gradients
@of_pairs
def path_patching(
    model: nn.Module,
    pairs: "Pairs | Texts",
    receivers: str | Iterable[str] = "logits",
    senders: str | Iterable[str] | None = None,
    *,
    mlps: Literal["recomputed", "frozen"] = "recomputed",
    direction: PatchingDirection = "noising",
    source: Source | None = None,
    split_embeddings: bool = False,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the effect of patching each sender along its paths to the receivers.

    The paths pass no other head. As in Wang et al. 2022, "Interpretability in the Wild": the first
    run replaces the sender's output by its output in the other run, freezes the outputs of all
    other heads, and records the values of the receivers. The second run replaces the values of the
    receivers by the recorded values, and computes everything after them again. So each receiver is
    fixed, even if it is downstream of another receiver; `edge_patching` fixes no receiver. A sender
    that is also a receiver keeps its own output, because no path leads from its output to itself.

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part. Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: clean and corrupted texts, and the metric; see `activation_patching`.
        direction: `noising` edits the clean run; `denoising` edits the corrupted run.
        source: another model, whose values are used instead of a run on other texts.
        split_embeddings: whether token and position embeddings are two separate senders.
        max_bytes: a bound on the memory in bytes; see `edge_patching`.
        receivers: the inputs of heads and MLPs that are patched together, such as `a9.h6<q>` or
            `m3`; or `logits` alone. The value of a head is its queries, keys or values at the point
            `q`, `k` or `v`; the value of an MLP is its output. A name may contain the wildcards `*`
            and `?`: `a9.*<q>` means the queries of all heads of layer 9.
        senders: the heads, MLPs or embeddings whose output is patched, such as `a2.h0`, `m2` or
            `input`. A name with wildcards, such as `a*.h*` for all heads, means the matching
            senders that come before a receiver. Default: all senders before a receiver.
        mlps: `recomputed`: the first run computes the MLPs again, as in the paper, so paths through
            MLPs count. `frozen`: MLPs keep their outputs of the edited run, so only the direct path
            to each receiver counts.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [sender, example] in the metric's unit. `base` is the metric of the edited run
        before the edit, and `target` is the metric of the other run. `plot()` draws all heads of
        several layers as a map of layers and heads, and `by("head")` returns this table.

    Raises:
        ValueError: if no receiver comes after a sender, if `logits` is not the only receiver, or
            for the reasons of `edge_patching`.
        UnknownNameError, HookError, ModeError: for the reasons of `edge_patching`.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> path_patching(model, pairs, receivers="logits", senders=["a3.h0", "m3"]).top(2)
    sender m3     -5.003
    sender a3.h0  -0.9231
    >>> heads = path_patching(model, pairs, receivers="a2.h1<v>", senders="a*.h*").by("head")
    >>> heads.top(1)
    layer 0, head 3  -0.142
    """
    require_choice("mlps", mlps, ("recomputed", "frozen"))
    graph = Graph(model, split_embeddings)
    runs = PathEdits(graph, pairs, direction=direction, max_bytes=max_bytes, source=source)
    readers = [
        reader
        for name in as_names(receivers, "receivers")
        for reader in graph.places("reader", name)
    ]
    receivers = [*dict.fromkeys(graph.readers[reader] for reader in readers)]
    if not receivers or ("logits" in receivers and len(receivers) > 1):
        raise ValueError(f"receivers must be heads and MLPs, or 'logits' alone; got {receivers}")
    is_before = graph.allowed[:, readers].any(1).tolist()
    writers = _senders(graph, senders, is_before)
    is_recomputed = mlps == "recomputed"
    jobs = (
        (n, runs.through(writer, {*readers}, is_recomputed)) for n, writer in enumerate(writers)
    )
    about = {"receivers": [*map(str, receivers)], "mlps": mlps}
    return runs.result(jobs, "sender", [graph.writers[writer] for writer in writers], **about)


def _senders(
    graph: Graph, names: str | Iterable[str] | None, is_before: Sequence[bool]
) -> list[int]:
    """Return the indices of senders among the writers of a graph.

    Args:
        graph: the graph.
        names: the names of senders, which may contain wildcards; None for all before a receiver.
        is_before: for each writer, whether a receiver reads it.

    Raises:
        ValueError: if a sender does not come before a receiver, or there are no senders. A name
            with wildcards needs only one sender before a receiver, and stands for all of them.
    """
    if names is None:
        return [*itertools.compress(range(len(is_before)), is_before)]
    senders: list[int] = []
    for name in as_names(names, "senders"):
        matches = graph.places("writer", name)
        before = [writer for writer in matches if is_before[writer]]
        if not before:
            raise ValueError(f"senders must come before a receiver; got {shown(name)}")
        senders += before
    if not senders:
        raise ValueError("senders must be at least one node before a receiver; got none")
    return [*dict.fromkeys(senders)]
