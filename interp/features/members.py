"""Runs of all members of a crosscoder on the same texts.

1. Each model reads the texts. All models must read the same tokens.
2. A run stops when all points of the model's members have their values.
3. `member_values` yields the values without padding, one row for each token.
"""

from collections.abc import Iterator, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    Index,
    Text,
    Texts,
    each_text,
    explains_calls,
    require_module,
    to_device,
    without_handle,
)
from interp.features.crosscoder import Crosscoder
from interp.features.places import point_at
from interp.inputs.texts import batches
from interp.kinds import require_made
from interp.protocol import runner_of

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""The model of each member, in the order of `Crosscoder.names` or by name. A single model is the
model of all members, which are its layers.
"""


def models_of(models: Models, crosscoder: Crosscoder) -> list[nn.Module]:
    """Return the model of each member.

    Args:
        models: the models.
        crosscoder: the crosscoder.

    Raises:
        ValueError: if a member has no model.
        TypeError: if a value is not a model.
        UnknownNameError: if a name is no member.
    """
    names = crosscoder.names
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        return [models] * len(names)
    if isinstance(models, Mapping):
        by_index = {crosscoder.index(name): model for name, model in models.items()}
        models = [by_index[index] for index in sorted(by_index)]
    if len(models) != len(names):
        raise ValueError(
            f"models must contain a model for each member, {', '.join(names)}; got {len(models)} "
            "models"
        )
    models = [*map(without_handle, models)]
    for model in models:
        require_module(model)
    return models


def point_of(
    crosscoder: Crosscoder, member: int, runner: HookedRunner, point: str | None = None
) -> str:
    """Return the name of the point that a member reads in its model.

    Args:
        crosscoder: the crosscoder.
        member: the index of the member.
        runner: the runner of the model.
        point: the point. Default: the point in the files.

    Raises:
        ValueError: if the point is unknown.
    """
    place = point or crosscoder.points[member]
    if place is None:
        raise ValueError(
            f"the point of {crosscoder.names[member]} is unknown: give point=, such as "
            "point='blocks.1.resid_post'"
        )
    return point_at(place, runner)


def values_of_members(
    models: Models, crosscoder: Crosscoder, texts: Texts, *, point: str | None = None, batch: int
) -> Iterator[tuple[Text, list[Float[Tensor, "batch pos d_model"]]]]:
    """Yield each batch of texts with the value of each member.

    Args:
        models: the model of each member.
        crosscoder: the crosscoder.
        texts: the texts.
        point: the point that all members read. Default: the points in the files.
        batch: the number of texts in a batch.

    Raises:
        ValueError: if there are no texts, a point is unknown, or two models read the texts as
            different tokens.
    """
    require_made("crosscoder", crosscoder, Crosscoder)
    of_member = models_of(models, crosscoder)
    runners = {id(model): runner_of(model) for model in of_member}
    points: dict[int, list[str]] = {key: [] for key in runners}
    places = []
    for member, model in enumerate(of_member):
        place = point_of(crosscoder, member, runner=runners[id(model)], point=point)
        points[id(model)].append(place)
        places.append((id(model), place))
    listed = [*each_text(texts)]
    read = [batches(listed, runner.model, batch) for runner in runners.values()]
    for numbered in zip(*read, strict=True):
        of_model = {key: text for key, (_, text) in zip(runners, numbered, strict=True)}
        _require_same_tokens(numbered[0][0], [*of_model.values()])
        values: dict[tuple[int, str], Tensor] = {}
        for key, text in of_model.items():
            runner = runners[key]
            arguments = text.arguments(runner.model)
            cache = runner.capture(text.tokens, names=points[key], **arguments)
            values |= {(key, place): cache[place] for place in points[key]}
        yield numbered[0][1], [values[place] for place in places]


@explains_calls
def member_values(
    models: Models,
    crosscoder: Crosscoder,
    texts: "Texts",
    *,
    point: str | None = None,
    pos: "Index | None" = None,
    batch: int = 16,
) -> Iterator[list[Float[Tensor, "row d_model"]]]:
    """Yield the values of all members on texts, with one row for each real token.

    `latent_scaling` reads these values. Values of two stores of the same texts have the same form.

    Args:
        models: the model of each member, in the order of `crosscoder.names` or by name; one model
            if the members are its layers.
        crosscoder: the crosscoder.
        texts: the texts. Padding is left out.
        point: the point that all members read. Default: the points in the files.
        pos: the positions of each text that are read. Position 0 is the first token that is not
            padding, and negative positions count from the last. Default: all positions.
        batch: the number of texts in a batch. Default: 16.

    Yields:
        A list with the value of each member, in the order of `crosscoder.names`.

    Raises:
        ValueError: if a member has no model, a point is unknown, there are no texts, or two models
            read the texts as different tokens.

    >>> import torch
    >>> from models import load
    >>> model, eye = load("pydoc-4l"), torch.eye(128)
    >>> both = Crosscoder(
    ...     torch.stack([eye, eye]), torch.stack([eye, eye]), torch.zeros(128),
    ...     torch.zeros(2, 128), nn.ReLU(), names=["base", "tuned"],
    ... )
    >>> texts = ["def f(x):", "return x"]
    >>> values = member_values([model, model], both, texts, point="blocks.2.resid_post")
    >>> [[value.shape for value in values_of_batch] for values_of_batch in values]
    [[torch.Size([17, 128]), torch.Size([17, 128])]]
    """
    for text, values in values_of_members(models, crosscoder, texts, point=point, batch=batch):
        counts = text.at(pos)
        yield [value[to_device(counts, value.device)] for value in values]


def _require_same_tokens(first: int, texts: Sequence[Text]) -> None:
    """Check that all models read a batch of texts as the same tokens.

    Args:
        first: the number of the first text of the batch.
        texts: the texts as each model reads them.

    Raises:
        ValueError: if the tokens differ. The error names the first such text.
    """
    ours = texts[0].listed()
    for other in texts[1:]:
        for number, (one, two) in enumerate(zip(ours, other.listed(), strict=True), first):
            if one != two:
                raise ValueError(
                    "all models must read the texts as the same tokens; got "
                    f"{len(one)} and {len(two)} tokens, or other tokens, for text {number}: pass "
                    "tokens that are right for all models"
                )
