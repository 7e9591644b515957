"""Pictures of texts: attention patterns, values of tokens, and predictions of each layer."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    explains_calls,
    require_integer,
    shown,
    text_of_inputs,
    writer_of,
)
from interp.plots.parts import (
    MOST_COLUMNS,
    MOST_WEIGHTS,
    axis_part,
    grid_part,
    require_table,
    thinned,
)
from interp.plots.view import View, limit_of, visible

# The largest numbers that a browser draws without a pause.
_MOST_TOKENS = 4000
_MOST_CELLS = 4000


@explains_calls
def patterns(
    model: nn.Module | None,
    cache: ActivationCache,
    example: int = 0,
    *,
    queries: slice | None = None,
    keys: slice | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    head: tuple[int, int] | None = None,
    scores: Any = None,
) -> View:
    """Return a picture of the attention patterns of one text, with a small picture of each head.

    With scores of heads, such as `head_scores(model, cache, "induction")`, the head with the
    largest score is shown first, and a button sorts the heads by score. The pointer and the arrow
    keys show each weight. Another button swaps queries and keys. Only the last positions of a long
    text are drawn; with more heads, fewer positions are drawn. For a lazy cache, one layer at a
    time is computed.

    Args:
        model: the model, to show the text of tokens; None to show their numbers.
        cache: the cache of a run of the model that cached `pattern`.
        example: the number of the text, counted from 0.
        queries, keys: a window of the text's positions. Default: all positions.
        heads: pairs (layer, head) to draw, in this order. Default: all heads.
        head: the head that is shown first.
        scores: a `Result` of heads, with the axes `layer` and `head`.

    Returns:
        The page, for `.save()`, `.show()` and notebooks: for each head a picture [query, key] of
        weights from 0 to 1.

    Raises:
        TypeError: if the model and the cache are exchanged.
        UnknownNameError: if the cache has no patterns.
        ValueError: if the text or a head does not exist, the window is empty, or scores are not of
            these heads.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> cache = HookedRunner(model).run_with_cache("def f(x):", names="*.pattern")[1]
    >>> patterns(model, cache, queries=slice(4, 8), heads=[(0, 3), (2, 1)])
    View of attention patterns of “def f(x):”: .save("x.html") writes it, .show() opens it
    """
    if not isinstance(cache, ActivationCache):
        raise TypeError(
            f"patterns must be called as patterns(model, cache); got {shown(model)} and "
            f"{shown(cache)}"
        )
    _require_heads(heads, [*cache.layer_names("pattern")])
    drawn = _weights(cache, example, window=(queries, keys), heads=heads)
    order = [*drawn.weights] if heads is None else [*heads]
    numbers = None if scores is None else _scores_of(scores, order, example)
    start = _first_picture(order, head, numbers)
    tokens = _tokens(cache, example, drawn.run_shape)
    words, are_texts = (None, False) if tokens is None else _words(model, tokens)
    part = grid_part(
        "attention patterns",
        torch.stack([drawn.weights[pair] for pair in order]),
        rows=_axis_of_tokens("query", drawn.rows, words=words, most=drawn.most),
        columns=_axis_of_tokens("key", drawn.columns, words=words, most=drawn.most),
        unit="of the attention",
        facets=[f"layer {layer}, head {head}" for layer, head in order],
        names=[f"{layer}.{head}" for layer, head in order],
        across=drawn.n_heads if heads is None else None,
        least=1.0,
        square=True,
        from_end=True,
        swap=drawn.rows == drawn.columns,
        strip=words is not None,
        start=start,
        **({} if numbers is None else {"scores": numbers}),
        note=thinned(drawn.n_inside, min(drawn.n_inside, drawn.most), "positions"),
    )
    title = f" of “{''.join(words)[:60]}”" if words and are_texts else ""
    return View(f"attention patterns{title}", [part])


def _first_picture(
    order: Sequence[tuple[int, int]],
    head: tuple[int, int] | None,
    scores: Float[Tensor, " facet"] | None,
) -> int:
    """Return the number of the picture that is shown first: the requested head, or the head with
    the largest score.

    Raises:
        ValueError: if the requested head is not drawn.
    """
    if head is not None:
        if head not in order:
            raise ValueError(f"head must be a drawn head (layer, head); got {head}")
        return order.index(head)
    if scores is not None and scores.isfinite().any():
        return int(scores.nan_to_num(-torch.inf).argmax())
    return 0


def _axis_of_tokens(
    name: str, positions: Sequence[int], words: Sequence[str] | None, most: int
) -> dict[str, Any]:
    """Return an axis of positions, with the text of their tokens if the texts are known.

    Args:
        name: the name of the axis.
        positions: the drawn positions.
        words: the text of each token of the run.
        most: the largest number of positions along the axis.
    """
    drawn_words = words and [words[position] for position in positions]
    return axis_part(name, positions, words=drawn_words, most=most)


def _require_heads(heads: Sequence[Any] | None, layers: list[int]) -> None:
    """Check that heads are pairs of a layer and a head.

    Raises:
        ValueError: if they are not. The error names the layers.
    """
    if heads is None:
        return
    are_pairs = [isinstance(pair, tuple) and len(pair) == 2 and pair[0] in layers for pair in heads]
    if not are_pairs or not all(are_pairs):
        raise ValueError(f"heads must be pairs (layer, head) of layers {layers}; got {heads}")


class _Drawn(NamedTuple):
    """The attention weights that `patterns` draws: at all positions, or at a window of a long text.

    Attributes:
        weights: the weights [query, key] by layer and head.
        rows, columns: the positions of queries and of keys.
        most: the largest number of positions along an axis.
        n_inside: the number of positions along the longer axis of the window.
        n_heads: the number of heads in a layer.
        run_shape: the numbers of texts and of keys in the run.
    """

    weights: dict[tuple[int, int], Float[Tensor, "query key"]]
    rows: list[int]
    columns: list[int]
    most: int
    n_inside: int
    n_heads: int
    run_shape: tuple[int, int]


def _weights(
    cache: ActivationCache,
    example: int,
    window: tuple[slice | None, slice | None],
    heads: Sequence[tuple[int, int]] | None,
) -> _Drawn:
    """Read the attention weights of one text in a window of queries and keys, layer by layer.

    A large window is cut to its last queries and keys, so that the page stays small.

    Args:
        cache: the cache with the patterns.
        example: the index of the text.
        window: the slices of queries and of keys; None for all.
        heads: the heads, (layer, head); None for all heads.
    """
    names = cache.layer_names("pattern")
    layers = [*names] if heads is None else [*dict.fromkeys(layer for layer, _ in heads)]
    weights: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        pattern = cache.read(names[layer])[0]
        n_texts, n_heads, n_queries, n_keys = pattern.shape
        require_integer("example", example, least=0, most=n_texts - 1)
        n_facets = len(layers) * n_heads if heads is None else len(heads)
        most = max(1, min(int((MOST_WEIGHTS / n_facets) ** 0.5), MOST_COLUMNS))
        all_rows, all_columns = _window(n_queries, n_keys, *window)
        rows, columns = all_rows[-most:], all_columns[-most:]
        drawn = pattern[example, :, [row - n_keys for row in rows]][..., columns].detach().cpu()
        drawn_heads = [*range(n_heads)]
        if heads is not None:
            drawn_heads = [head for layer_of_head, head in heads if layer_of_head == layer]
        for head in drawn_heads:
            require_integer("a head", head, least=0, most=n_heads - 1)
            weights[layer, head] = drawn[head]
    return _Drawn(
        weights=weights,
        rows=rows,
        columns=columns,
        most=most,
        n_inside=max(len(all_rows), len(all_columns)),
        n_heads=n_heads,
        run_shape=(n_texts, n_keys),
    )


def _tokens(cache: ActivationCache, example: int, shape: tuple[int, int]) -> list[int] | None:
    """Return the tokens of one text; None if the cache does not know the tokens of its keys."""
    texts = text_of_inputs(cache.inputs)
    if texts is None or texts.tokens.shape != shape or cache.is_part:
        return None
    tokens: list[int] = texts.tokens[example].tolist()
    return tokens


def _scores_of(
    scores: Any, order: Sequence[tuple[int, int]], example: int
) -> Float[Tensor, " facet"]:
    """Return the scores of heads on one text, in the order of the pictures."""
    require_table("scores", scores)
    if scores.axes != ("layer", "head", "example"):
        raise ValueError(f"scores must have the axes layer, head and example; got {scores.axes}")
    layers = [*scores.labels["layer"]]
    at = torch.tensor([(layers.index(layer), head) for layer, head in order if layer in layers])
    values = scores.values.detach().cpu()
    if len(at) != len(order) or int(at[:, 1].max()) >= values.shape[1]:
        raise ValueError(f"scores must contain the drawn heads; got layers {layers}")
    return values[at[:, 0], at[:, 1], min(example, values.shape[2] - 1)]


@explains_calls
def text(
    tokens: Sequence[str],
    values: Sequence[float] | Float[Tensor, " pos"],
    *,
    unit: str = "",
    title: str = "text",
) -> View:
    """Draw a text and colour each token by a value, such as a loss or a neuron's activation.

    Args:
        tokens: the text of each token, from `model.to_pieces`.
        values: a number for each token; NaN if the number is unknown.
        unit: the unit of the values.
        title: the title above the text.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, with the value of each token in the given
        unit.

    Raises:
        ValueError: if the number of values is not the number of tokens.

    >>> text(["Re", "turn"], [0.5, 2.0], unit="nats", title="loss")
    View of loss: .save("x.html") writes it, .show() opens it
    """
    numbers = torch.as_tensor(values).detach().cpu()
    if numbers.shape != (len(tokens),):
        raise ValueError(
            f"values must be [{len(tokens)}], one for each token; got {[*numbers.shape]}"
        )
    drawn = [visible(token) for token in tokens[-_MOST_TOKENS:]]
    first = len(tokens) - len(drawn)
    return View(
        title,
        [
            {
                "kind": "text",
                "title": title,
                "tokens": drawn,
                "values": numbers[first:],
                "first": first,
                "unit": unit,
                "limit": limit_of(numbers),
                "signed": bool((numbers < 0).any()),
                "note": thinned(len(tokens), len(drawn), "tokens"),
            }
        ],
    )


class Readout(Protocol):
    """The parts of an `interp.LensReadout` that `lens` draws.

    Its module imports this package, so this package cannot import the class.
    """

    @property
    def tokens(self) -> Int[Tensor, "layer batch pos top"]:
        """The likeliest next tokens, best first."""

    @property
    def probabilities(self) -> Float[Tensor, "layer batch pos top"]:
        """The probabilities of `tokens`."""

    @property
    def first(self) -> tuple[list[str] | None, list[list[list[str]]]] | None:
        """The tokens of the first text and its likeliest next tokens, as strings."""

    @property
    def columns(self) -> list[int]:
        """The columns of the first text that are not padding."""

    @property
    def without_numbers(self) -> list[bool]:
        """For each layer, True if all numbers of the first text are NaN."""


@explains_calls
def lens(readout: Readout) -> View:
    """Draw the likeliest next token of each layer at each position of the first text, coloured by
    its probability.

    The pointer shows the likeliest tokens with their probabilities.

    Args:
        readout: a `LensReadout` from `logit_lens`.

    Returns:
        The page, for `.save()`, `.show()` and notebooks: a table [layer, pos] of tokens and
        probabilities.

    >>> from interp import logit_lens, run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> lens(logit_lens(model, run_with_cache(model, "def f(x):", mode="full")[1]))
    View of lens of “def f(x):”: .save("x.html") writes it, .show() opens it
    """
    words, likeliest = readout.first or (None, readout.tokens[:, 0].tolist())
    columns = readout.columns
    words = words and [words[column] for column in columns]
    of_columns = []
    for tokens_of_layer in likeliest:
        of_columns.append([tokens_of_layer[column] for column in columns])
    chances = readout.probabilities[:, 0, columns].detach().cpu()
    layers, n = chances.shape[:2]
    last = max(1, min(n, _MOST_CELLS // layers))
    drawn = chances[:, -last:].flip(0)
    cells = []
    tips = []
    without = readout.without_numbers[::-1]
    for number, chances_of_layer in enumerate(drawn.tolist()):
        layer = of_columns[layers - 1 - number]
        for tokens, chances_of_pos in zip(layer[-last:], chances_of_layer, strict=True):
            best = ["" if without[number] else visible(f"{token}") for token in tokens]
            percents = [f"{100 * chance:.3g} %" for chance in chances_of_pos]
            cells.append(best[0])
            tips.append([[*pair] for pair in zip(best, percents, strict=True)])
    rows = [*(f"entering {layer}" for layer in range(layers - 1)), "final"][::-1]
    part = grid_part(
        "lens",
        drawn[None, ..., 0],
        rows={"name": "stream", "labels": rows},
        columns=axis_part("pos", columns, words=words, most=last),
        unit="probability of the likeliest token",
        least=1.0,
        from_end=True,
        cells=cells,
        tips=tips,
        note=thinned(n, last, "positions"),
    )
    return View(f"lens of “{''.join(words)[:60]}”" if words else "lens", [part])


def _window(
    n_queries: int, n_keys: int, queries: slice | None, keys: slice | None
) -> tuple[list[int], list[int]]:
    """Return the positions of queries and of keys in a window.

    A run with a cache of keys has fewer queries than keys. The queries are then the last positions
    of the text.
    """
    places = range(n_keys)
    first = n_keys - n_queries
    if not all(isinstance(chosen, slice | None) for chosen in (queries, keys)):
        raise ValueError(f"queries and keys must be slices of positions; got {queries} and {keys}")
    rows = [place for place in places[queries or slice(None)] if place >= first]
    columns = [*places[keys or slice(None)]]
    if not rows or not columns:
        at_most = f"{first} to {n_keys - 1} and keys of 0 to {n_keys - 1}"
        raise ValueError(f"queries must be positions of {at_most}; got {queries} and {keys}")
    return rows, columns


def _words(model: nn.Module | None, tokens: Sequence[int]) -> tuple[list[str], bool]:
    """Return the text of each token and True, or the numbers of tokens and False without a
    tokenizer.
    """
    write = None if model is None else writer_of(model)
    if write is not None:
        # Show numbers if the tokenizer does not know a token.
        with suppress(ImportError, ValueError):
            return write(tokens), True
    return [*map(str, tokens)], False
