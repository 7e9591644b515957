"""Two models: check that the values of one model can replace values of the other model.

`with_shuffled_weights` makes another model, as a control.

Both models have the same points, with the same axes (`require_same_points`), and read the texts as
the same tokens (`require_same_tokens`). Sizes are compared when the values are used.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hooks import HookedRunner
from hooks.base import Text, is_batch, shown
from interp.graph.graph import Graph
from interp.inputs.texts import text_for
from interp.protocol import runner_of
from interp.runs.adapters import WithoutAdapter

Source = nn.Module | WithoutAdapter
"""A model whose values replace values of another model. It may be a model without its adapter."""


def as_source(source: Source | None) -> AbstractContextManager[None]:
    """Return a context manager inside which a `WithoutAdapter` has its adapter off."""
    return source.off() if isinstance(source, WithoutAdapter) else nullcontext()


def source_graph_of(source: Source | None, graph: Graph) -> Graph:
    """Return the graph of a source, whose outputs of writers are computed with its own weights.

    Args:
        source: the model whose values are read; None for the model of the graph.
        graph: the graph of the model that is edited.

    Raises:
        TypeError: if the source is not a model.
    """
    if source is None:
        return graph
    model = _module_of(source)
    with as_source(source):
        return Graph(model, split_embeddings="input" not in graph.writers)


def _module_of(source: Source) -> nn.Module:
    """Return the model of a source, or raise an error if the source is not a model."""
    model = source.model if isinstance(source, WithoutAdapter) else source
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"source must be a model with the same points; got {shown(source)} (pass a cache as "
            "edit=edits.replace(cache))"
        )
    return model


def source_runner(
    source: Source,
    runner: HookedRunner,
    texts: Any,
    text: Text,
    graph: Graph | None = None,
) -> HookedRunner:
    """Return the runner of a model whose values replace values of another model.

    Args:
        source: the model whose values are read.
        runner: the runner of the model that is edited.
        texts: the texts as they were given.
        text: the texts as the tokens of the model that is edited.
        graph: the graph of the source, if the analysis runs the parts of a graph; see
            `source_graph_of`. Default: the source runs as a whole.

    Raises:
        TypeError: if the source is not a model.
        ValueError: if a point is missing in one of the models or has other axes, or if the models
            read the texts as different tokens. The error names the first difference.
        ModeError: if the source is in training mode.
    """
    model = _module_of(source)
    other = runner_of(model) if graph is None else graph.runner()
    require_same_points(runner, other, "source")
    if not is_batch(texts):
        require_same_tokens(text.listed(), text_for(model, texts).listed())
    return other


def require_same_points(runner: HookedRunner, other: HookedRunner, name: str) -> None:
    """Check that two models have the same points with the same axes.

    Args:
        runner: the runner of the first model.
        other: the runner of the second model.
        name: the name of the second model in the error.

    Raises:
        ValueError: if a point is missing in one of the models or has other axes. The error names
            the first difference.
    """
    rule = f"{name} must be a model with the same points"
    for point_name, point in runner.points.items():
        if point_name not in other.points:
            raise ValueError(f"{rule}; got a model without {point_name}")
        if other.points[point_name].axes != point.axes:
            got = " ".join(other.points[point_name].axes)
            axes = " ".join(point.axes)
            raise ValueError(f"{rule}; got axes [{got}] at {point_name}; need [{axes}]")
    more = [point_name for point_name in other.points if point_name not in runner.points]
    if more:
        raise ValueError(f"{rule}; got a model with another point, {more[0]}")


def require_same_tokens(
    ours: Sequence[list[int]], theirs: Sequence[list[int]], first: int = 0
) -> None:
    """Check that two models read texts as the same tokens.

    Args:
        ours, theirs: the tokens of each text.
        first: the number of the first text, for the error.

    Raises:
        ValueError: if they do not. The error names the first difference.
    """
    for number, (row, other) in enumerate(zip(ours, theirs, strict=True), first):
        for pos, (token, other_token) in enumerate(zip_longest(row, other)):
            if token != other_token:
                raise ValueError(
                    "both models must read the texts as the same tokens; got token "
                    f"{token} and {other_token} at position {pos} of text {number}: pass tokens "
                    "that are right for both models"
                )


def with_shuffled_weights(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a model in which the numbers of each weight are permuted.

    The copy has weights of the same scale, but has learned nothing.

    Args:
        model: the model.
        seed: the seed of the permutations.
    """
    shuffled = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    for weight in shuffled.parameters():
        order = torch.randperm(weight.numel(), generator=draw).to(weight.device)
        weight.data.copy_(weight.data.flatten()[order].view_as(weight))
    return shuffled
