"""Pictures of caches, texts, lenses, results, circuits and curves. Each function returns a `View`.

A `View` shows itself in a notebook, and has `.save("x.html")`, `.show()` and, where it is a plot, `.figure`.
Figures of matplotlib need the extra `plots`, so they are imported only when one is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.shared import carried
from interp.pictures.parts import axis_part, grid_part, thinned
from interp.pictures.view import View, limit_of, plotted_axes, visible, visible_title

__all__ = [
    "View",
    "attribution",
    "circuit",
    "curves",
    "effects",
    "features",
    "lens",
    "patterns",
    "text",
    "together",
]

# What a browser draws without a pause.
_MOST_WEIGHTS, _MOST_COLUMNS, _MOST_TOKENS, _MOST_BARS, _MOST_EDGES = 1_300_000, 400, 4000, 60, 400
_MOST_POINTS, _MOST_CELLS, _MOST_CARDS, _MOST_NODES, _MOST_LINKS = 2000, 4000, 12, 800, 8000


def patterns(
    model: nn.Module | None,
    cache: ActivationCache,
    example: int = 0,
    *,
    queries: slice | None = None,
    keys: slice | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
) -> View:
    """Draw the attention patterns of one text: heads as small pictures to click, the one chosen large.

    The pointer and the arrow keys read each weight. A button swaps queries and keys. Of a long text the last positions are
    drawn, fewer the more heads there are. Of a lazy cache one layer at a time is computed.

    Args:
        model: the model, to name tokens by their text; None to name them by number.
        cache: the cache of a run of it that kept `pattern`.
        example: the text, counted from 0.
        queries, keys: a window of the text's positions; None for all.
        heads: pairs (layer, head) to draw, in this order; None for all.

    Raises:
        TypeError: if the model and the cache have changed places.
        UnknownNameError: if the cache has no patterns.
        ValueError: if there is no such text or head, or nothing is in the window.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> cache = HookedRunner(model).run_with_cache("def f(x):", names="*.pattern")[1]
    >>> patterns(model, cache, queries=slice(4, 8), heads=[(0, 3), (2, 1)])
    View of attention patterns of “def f(x):”: .save("x.html") writes it, .show() opens it
    """
    if not isinstance(cache, ActivationCache):
        raise TypeError(
            f"patterns are of (model, cache); got a {type(model).__name__} and a {type(cache).__name__}"
        )
    names = cache.layer_names("pattern")
    pairs = [
        isinstance(pair, tuple) and len(pair) == 2 and pair[0] in names for pair in heads or ()
    ]
    if heads is not None and not (pairs and all(pairs)):
        raise ValueError(f"heads must be pairs (layer, head) of layers {[*names]}; got {heads}")
    layers = [*names] if heads is None else [*dict.fromkeys(layer for layer, _ in heads)]
    weights: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        pattern = cache.read(names[layer])[0]
        n_texts, n_heads, n_queries, n_keys = pattern.shape
        _require_example(example, n_texts)
        n_facets = len(layers) * n_heads if heads is None else len(heads)
        most = max(1, min(int((_MOST_WEIGHTS / n_facets) ** 0.5), _MOST_COLUMNS))
        all_rows, all_columns = _window(n_queries, n_keys, queries, keys)
        rows, columns = all_rows[-most:], all_columns[-most:]
        shown = pattern[example, :, [row - n_keys for row in rows]][..., columns].detach().cpu()
        for head in range(n_heads) if heads is None else (h for at, h in heads if at == layer):
            if not 0 <= head < n_heads:
                raise ValueError(f"a head must be 0 to {n_heads - 1}; got {head}")
            weights[layer, head] = shown[head]
    order = [*weights] if heads is None else [*heads]
    tokens = cache.inputs.get("tokens", cache.inputs.get("input_ids"))
    known = isinstance(tokens, Tensor) and tokens.shape[-1] == n_keys
    row = tokens[example].tolist() if known and isinstance(tokens, Tensor) else None
    words, written = (None, False) if row is None else _words(model, row)
    longest = max(all_rows, all_columns, key=len)
    part = grid_part(
        "attention patterns",
        torch.stack([weights[pair] for pair in order]),
        axis_part("query", rows, words and [words[place] for place in rows], most),
        axis_part("key", columns, words and [words[place] for place in columns], most),
        "of the attention",
        facets=[f"layer {layer}, head {head}" for layer, head in order],
        names=[f"{layer}.{head}" for layer, head in order],
        across=n_heads if heads is None else None,
        least=1.0,
        square=True,
        from_end=True,
        swap=rows == columns,
        strip=words is not None,
        note=thinned(len(longest), len(longest[-most:]), "positions"),
    )
    title = f" of “{''.join(words)[:60]}”" if words and written else ""
    return View(f"attention patterns{title}", [part])


def text(
    tokens: Sequence[str],
    values: Sequence[float] | Float[Tensor, " pos"],
    *,
    unit: str = "",
    title: str = "text",
) -> View:
    """Draw a text whose tokens are coloured by a value each, such as a loss or a neuron's activation.

    Args:
        tokens: the text of each token, as `model.to_pieces` gives them.
        values: a number for each. Those that are not known are NaN.
        unit: of the values.
        title: above the text.

    Raises:
        ValueError: if there are not as many values as tokens.

    >>> text(["Re", "turn"], [0.5, 2.0], unit="nats", title="loss")
    View of loss: .save("x.html") writes it, .show() opens it
    """
    numbers = torch.as_tensor(values).detach().cpu()
    if numbers.shape != (len(tokens),):
        raise ValueError(
            f"values must be one for each of the {len(tokens)} tokens; got {[*numbers.shape]}"
        )
    shown = [visible(token) for token in tokens[-_MOST_TOKENS:]]
    first = len(tokens) - len(shown)
    return View(title, [{
        "kind": "text", "title": title, "tokens": shown, "values": numbers[first:], "first": first,
        "unit": unit, "limit": limit_of(numbers), "signed": bool((numbers < 0).any()),
        "note": thinned(len(tokens), len(shown), "tokens"),
    }])  # fmt: skip


def lens(readout: Any) -> View:
    """Draw the likeliest next token of each layer at each position of the first text, coloured by its probability.

    The pointer reads the likeliest tokens with their probabilities.

    Args:
        readout: a `LensReadout`, of `logit_lens`.

    >>> from interp import logit_lens, run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> lens(logit_lens(model, run_with_cache(model, "def f(x):", mode="full")[1]))
    View of lens of “def f(x):”: .save("x.html") writes it, .show() opens it
    """
    words, likeliest = readout.first or (None, readout.tokens[:, 0].tolist())
    chances = readout.probabilities[:, 0].detach().cpu()
    layers, n = chances.shape[:2]
    last = max(1, min(n, _MOST_CELLS // layers))
    best = [[[visible(f"{t}") for t in pos] for pos in layer[-last:]] for layer in likeliest]
    shown = chances[:, -last:].flip(0)
    tips = [
        [[text, f"{100 * chance:.3g} %"] for text, chance in zip(*pos, strict=True)]
        for layer in zip(best[::-1], shown.tolist(), strict=True)
        for pos in zip(*layer, strict=True)
    ]
    rows = [*(f"entering {layer}" for layer in range(layers - 1)), "final"][::-1]
    part = grid_part(
        "lens",
        shown[None, ..., 0],
        {"name": "stream", "labels": rows},
        axis_part("pos", range(n), words, last),
        "probability of the likeliest token",
        least=1.0,
        from_end=True,
        cells=[pos[0] for layer in best[::-1] for pos in layer],
        tips=tips,
        note=thinned(n, last, "positions"),
    )
    return View(f"lens of “{''.join(words)[:60]}”" if words else "lens", [part])


def effects(result: Any, facet: str | None = None) -> View:
    """Draw a `Result`: a heat map of two axes, or bars with 95% intervals of one.

    The pointer and the arrow keys read means and intervals. Scores of heads are a heat map with numbers.

    Args:
        result: the result, with one or two axes besides `example` and the facet.
        facet: of three axes, the one that has a heat map for each label; by default the first.

    Raises:
        UnknownNameError, ValueError: as for `Result.plot`.

    >>> from interp import Result
    >>> effects(Result(torch.tensor([[1.0, 3.0, 2.5], [0.0, -0.5, 0.5]]), ("layer", "example")))
    View of mean effects: .save("x.html") writes it, .show() opens it
    """
    axes, means = [*result.axes[:-1]], result.mean().detach().cpu()
    facet = axes[0] if facet is None and len(axes) == 3 else facet
    rest = plotted_axes(axes, facet)
    low, high = (end.detach().cpu() for end in result.interval())
    facts = [f"{name}: {x}" for name, x in result.about.items() if isinstance(x, str | int | float)]
    about = f" ({', '.join(facts)[:200]})" if facts else ""
    title = f"mean effects{about}"

    def draw() -> Any:
        return result.plot(facet)

    if len(rest) == 1:
        return View(title, [_bars(rest[0], result, means, low, high)], draw)
    tables, lows, highs = (
        x[None] if facet is None else x.movedim(axes.index(facet), 0) for x in (means, low, high)
    )
    has_intervals = bool(low.isfinite().any())
    rows, columns = (min(len(result.labels[axis]), _MOST_COLUMNS) for axis in rest)
    some = max(1, min(len(tables), _MOST_WEIGHTS // ((1 + 2 * has_intervals) * rows * columns)))
    tables, lows, highs = (x[:some, -rows:, -columns:] for x in (tables, lows, highs))
    gap = None if result.base is None or result.target is None else result.target - result.base
    down, across = (
        axis_part(axis, result.labels[axis], result.words.get(axis), _MOST_COLUMNS) for axis in rest
    )
    part = grid_part(
        title,
        tables,
        down,
        across,
        result.unit,
        facets=[f"{facet} {label}" for label in result.labels[facet][:some]] if facet else [],
        least=0.0 if gap is None else abs(gap.mean().item()),
        from_end=rest[-1] in ("pos", "key", "query"),
        written=True,
        more={"95 % from": lows, "95 % to": highs} if has_intervals else {},
        note=thinned(means.numel(), tables.numel(), "values"),
    )
    return View(title, [part], draw)


def together(title: str, results: Mapping[str, Any]) -> View:
    """Draw several results below each other, each with its heading.

    Args:
        title: above all of them.
        results: by heading; see `effects`.

    >>> from interp import Result
    >>> one = Result(torch.tensor([[1.0, 3.0, 2.0]]), ("layer", "example"), unit="logits")
    >>> together("two", {"first": one, "second": one})
    View of two: .save("x.html") writes it, .show() opens it
    """
    parts = [
        {**part, "heading": heading if n == 0 else ""}
        for heading, result in results.items()
        for n, part in enumerate(effects(result).parts)
    ]
    return View(title, parts)


def circuit(circuit: Any, curve: Any = None) -> View:
    """Draw a circuit: layers upward, edges by their scores. A slider keeps the strongest that lead from input to output.

    Solid edges help the metric, dashed ones harm it. Only what is connected is drawn.

    Args:
        circuit: a `Circuit`.
        curve: of `interp.curve`; the slider shows the faithfulness of the nearest size measured.

    >>> from interp import Circuit, graph
    >>> from models import load
    >>> edges = ["input->a0.h1<v>", "a0.h1->logits"]
    >>> circuit(Circuit(graph.Graph(load("pydoc-4l")), edges))
    View of Circuit: 2 of 479 edges, 3 of 22 nodes: .save("x.html") writes it, .show() opens it
    """
    rows, edges = circuit.drawn()
    order = sorted(edges, key=lambda edge: -abs(edge.score))
    kept = order[:_MOST_EDGES]
    part = {
        "kind": "network", "title": "circuit", "rows": rows, "edges": [edge[:3] for edge in kept],
        "scores": torch.tensor([edge.score for edge in kept], dtype=torch.float64),
        "note": thinned(len(order), len(kept), "edges"),
    }  # fmt: skip
    if curve is not None:
        every = int(circuit.graph.allowed.sum())
        means = curve.absolute.mean().tolist()
        sizes = (int(share * every) for share in curve.absolute.labels["edges"])
        part["faithfulness"] = [*zip(sizes, means, strict=True)]
    return View(repr(circuit), [part])


def features(cards: Sequence[Any]) -> View:
    """Draw cards of features: texts where each is active, how large it is how often, and the tokens that it moves.

    Args:
        cards: of `interp.features.feature_cards`.

    Raises:
        ValueError: if there is no card.

    >>> from interp.features import FeatureCard
    >>> features([FeatureCard(7, 0.25, top=[("a", 1.5)])])
    View of feature 7: .save("x.html") writes it, .show() opens it
    """
    shown = cards[:_MOST_CARDS]
    if not shown:
        raise ValueError("cards must hold at least one feature; got none")
    parts: list[dict[str, Any]] = []
    for card in shown:
        mine: list[dict[str, Any]] = []
        for n, example in enumerate(card.examples):
            values = torch.tensor(example.activations)
            mine.append({
                "kind": "text", "title": "" if n else f"feature {card.index}", "values": values, "first": 0,
                "tokens": [visible(token) for token in example.tokens], "unit": "", "signed": False,
                "limit": card.largest or limit_of(values), "note": "",
            })  # fmt: skip
        moved = [*card.top, *card.bottom[::-1]]
        if moved and not math.isnan(moved[0][1]):
            mine.append(_chart("logits that a feature of 1 adds", "token", moved, "logits"))
        if any(card.histogram):
            step = card.largest / len(card.histogram)
            ends = (f"{(n + 1) * step:.3g}" for n in range(len(card.histogram)))
            counts = [*zip(ends, card.histogram, strict=True)]
            mine.append(
                _chart("how many positions have it, by its size", "activation", counts, "positions")
            )
        if mine:
            mine[0]["heading"] = f"Feature {card.index}, active at {card.density:.2%} of positions"
        parts += mine
    numbers = ", ".join(str(card.index) for card in shown)
    note = thinned(len(cards), len(shown), "features")
    if note and parts:
        parts[0]["note"] = note
    return View(f"feature{'s' * (len(shown) > 1)} {numbers}", parts)


def attribution(graph: Any, cards: Mapping[int, Sequence[Any]] | None = None) -> View:
    """Draw an attribution graph: layers upward, tokens across. A click on a node draws and lists its links.

    Nodes can be pinned and put in groups; the pinned ones are drawn below as a graph of their own. Their names are in the
    text at the end, in the form that files have. Circles are features, diamonds errors, squares embeddings and logits.

    Args:
        graph: a `PrunedGraph`.
        cards: of `interp.features.feature_cards`, by layer; each is shown beside its feature.

    >>> from interp.tracing import Link, Node, PrunedGraph
    >>> nodes = [Node("E_3_0", "token", -1, 0, 3, "a"), Node("2_5_0", "logit", 1, 0, 5, "b")]
    >>> attribution(PrunedGraph(nodes, [Link("E_3_0", "2_5_0", 1.5)], ["a"]))
    View of attribution graph of “a”: .save("x.html") writes it, .show() opens it
    """
    known = {
        (layer, card.index): card for layer, of_layer in (cards or {}).items() for card in of_layer
    }
    nodes = sorted(graph.nodes, key=lambda node: (node.kind != "logit", node.influence or 0.0))
    kept = {node.id: n for n, node in enumerate(nodes[:_MOST_NODES])}
    inside = [link for link in graph.links if link.source in kept and link.target in kept]
    links = sorted(inside, key=lambda link: -abs(link.weight))[:_MOST_LINKS]
    shown = [_shown(node, known.get((node.layer, node.number))) for node in nodes[:_MOST_NODES]]
    scores = ", ".join(f"{name} {value:.3g}" for name, value in graph.scores.items())
    notes = [scores and f"{scores[0].upper()}{scores[1:]}."]
    if len(kept) < len(nodes):
        notes.append(f"The most influential {len(kept)} of {len(nodes)} nodes are shown.")
    notes.append(thinned(len(inside), len(links), "links"))
    tokens = [visible(token) for token in graph.tokens]
    part = {
        "kind": "attribution", "title": "attribution graph", "nodes": shown, "tokens": tokens,
        "links": [(kept[link.source], kept[link.target]) for link in links],
        "weights": torch.tensor([link.weight for link in links], dtype=torch.float64),
        "pins": [kept[name] for name in graph.pins if name in kept],
        "groups": [
            (name, ids) for name, members in graph.supernodes.items()
            if (ids := [kept[member] for member in members if member in kept])
        ],
        "start": 0, "layers": max((node.layer for node in nodes), default=0), "note": " ".join(filter(None, notes)),
    }  # fmt: skip
    return View(f"attribution graph of “{''.join(tokens)[:60]}”", [part])


def _shown(node: Any, card: Any) -> dict[str, Any]:
    """A node of an attribution graph, with what is told of it."""
    raises = " ".join(visible(token) for token in node.raises)
    values = {
        "activation": node.activation,
        "probability": node.probability,
        "cumulative influence": node.influence,
    }
    known = [(name, f"{value:.4g}") for name, value in values.items() if value is not None]
    about = [("kind", node.kind), ("position", f"{node.pos}"), *known]
    label = visible_title(node.label)
    if raises:
        about.append(("raises", raises))
        label = label or f"raises {raises}"
    examples = card.examples if card and node.kind == "feature" else ()
    return {
        "id": node.id, "kind": node.kind, "layer": node.layer, "pos": node.pos, "label": label,
        "influence": node.influence, "about": about,
        "examples": [([visible(token) for token in each.tokens], [*each.activations]) for each in examples[:4]],
    }  # fmt: skip


def _chart(title: str, axis: str, bars: Sequence[tuple[str, float]], unit: str) -> dict[str, Any]:
    """Bars without intervals."""
    values = torch.tensor([value for _, value in bars])
    unknown = torch.full_like(values, torch.nan)
    labels = [visible(label) for label, _ in bars]
    return {
        "kind": "bars", "title": title, "unit": unit, "values": values, "low": unknown, "high": unknown,
        "axis": axis_part(axis, range(len(labels)), labels, len(labels)), "note": title[0].upper() + title[1:] + ".",
    }  # fmt: skip


def curves(
    series: Mapping[str, Sequence[float] | Float[Tensor, " x"]],
    *,
    x: Sequence[float] | Float[Tensor, " x"] | None = None,
    axis: str = "step",
    unit: str = "",
    title: str = "curves",
) -> View:
    """Draw numbers as lines: losses over steps, singular values of a spectrum, angles of subspaces.

    Args:
        series: by name the numbers of each line.
        x: where each of them is on the axis; by default they count from 0.
        axis: its name.
        unit: of the numbers.
        title: above the plot.

    Raises:
        ValueError: if there is no line, or they differ in length.

    >>> from interp.spectral import svd
    >>> s = svd(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).s
    >>> curves({"head 0": s}, axis="rank", title="spectrum")
    View of spectrum: .save("x.html") writes it, .show() opens it
    """
    lines = {name: torch.as_tensor(values).detach().cpu() for name, values in series.items()}
    sizes = {tuple(values.shape) for values in lines.values()}
    places = torch.arange(next(iter(lines.values())).numel()) if x is None and lines else x
    places = torch.as_tensor([] if places is None else places).double().cpu()
    if sizes != {tuple(places.shape)} or places.ndim != 1:
        raise ValueError(
            f"lines must be one or more, each [x] of one length; got {[*map(list, sizes)]}"
        )
    step = -(-len(places) // _MOST_POINTS)
    at = [*range(0, len(places), step or 1)]
    at += [len(places) - 1] if at and at[-1] != len(places) - 1 else []
    part = {
        "kind": "lines", "title": title, "x": places[at], "xname": axis, "unit": unit,
        "series": {visible_title(name): values[at] for name, values in lines.items()},
        "note": thinned(len(places), len(at), "points"),
    }  # fmt: skip

    def draw() -> Any:
        from interp.pictures.plots import lines as drawn

        return drawn(places, lines, axis, unit, title)

    return View(title, [part], draw)


def _window(
    n_queries: int, n_keys: int, queries: slice | None, keys: slice | None
) -> tuple[list[int], list[int]]:
    """The positions of queries, which are the last of all, and of keys in a window."""
    places, first = range(n_keys), n_keys - n_queries
    if not all(isinstance(chosen, slice | None) for chosen in (queries, keys)):
        raise ValueError(f"queries and keys must be slices of positions; got {queries} and {keys}")
    rows = [place for place in places[queries or slice(None)] if place >= first]
    columns = [*places[keys or slice(None)]]
    if not rows or not columns:
        at_most = f"{first} to {n_keys - 1} and keys of 0 to {n_keys - 1}"
        raise ValueError(f"queries must be some of {at_most}; got {queries} and {keys}")
    return rows, columns


def _words(model: nn.Module | None, row: Sequence[int]) -> tuple[list[str], bool]:
    """The text of each token and True, or the numbers of tokens and False where there is no tokenizer."""
    language: Any = None if model is None else carried(model, "language_parts") or model
    try:
        if getattr(language, "tokenizer", None) is not None:
            return language.to_pieces(row), True
    except (ImportError, ValueError):  # its files cannot be read, and numbers do as well
        pass
    return [*map(str, row)], False


def _bars(axis: str, result: Any, means: Tensor, low: Tensor, high: Tensor) -> dict[str, Any]:
    size = means.abs().nan_to_num(nan=-1)
    at = sorted(size.argsort(descending=True, stable=True)[:_MOST_BARS].tolist())
    words = result.words.get(axis)
    labels, texts = [result.labels[axis][n] for n in at], words and [words[n] for n in at]
    return {
        "kind": "bars", "title": "mean effects", "unit": result.unit,
        "axis": axis_part(axis, labels, texts, _MOST_BARS),
        "values": means[at], "low": low[at], "high": high[at],
        "note": len(at) < len(means) and f"The {len(at)} largest of {len(means)} are shown.",
    }  # fmt: skip


def _require_example(example: int, count: int) -> None:
    if not 0 <= example < count:
        raise ValueError(f"example must be 0 to {count - 1}; got {example}")
