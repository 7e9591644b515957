"""The arguments of the runs by which a model's points are found and checked."""

import contextlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import Words, forwards_in, tensors_in, without_gradients
from models.attached.configs import base_of
from models.attached.unreadable import AttachError, brief
from models.mode import mode

SHAPE = (2, 7)


@dataclass(frozen=True, eq=False)
class Example:
    """The arguments of a run.

    Attributes:
        args, kwargs: the arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: nn.Module) -> Any:
        """The model's output."""
        return model(*self.args, **self.kwargs)

    @without_gradients
    def logits(self, model: nn.Module) -> Tensor:
        """The model's logits.

        Raises:
            ValueError: if the model does not run on these arguments.
        """
        with mode(model, training=False):
            try:
                output = self.run(model)
            except Exception as error:
                shapes = {n: [*x.shape] for n, x in self.kwargs.items() if isinstance(x, Tensor)}
                raise AttachError(
                    f"the model must run on {shapes or 'its first argument'} alone; {type(model).__name__} raised "
                    f"{brief(error)} (example= gives other arguments)"
                ) from error
        return logits_of(output)

    @without_gradients
    def runs_with_cache(self, model: nn.Module) -> bool:
        """Whether the model also runs without `use_cache=False`, with a cache of its own making."""
        if self.kwargs.get("use_cache") is not False:
            return True
        kwargs = {name: value for name, value in self.kwargs.items() if name != "use_cache"}
        with mode(model, training=False):
            try:
                Example(self.args, kwargs).run(model)
            except Exception:  # each model has an error of its own
                return False
        return True

    @property
    def tokens(self) -> Tensor | None:
        """The tokens [batch, pos] that the model reads; None where it reads none."""
        tokens = self.kwargs.get("input_ids", next(tensors_in(self.args), None))
        is_text = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
        return tokens if is_text else None

    @property
    def is_text(self) -> bool:
        """Whether it is tokens alone."""
        others = {name for name, value in self.kwargs.items() if isinstance(value, Tensor)}
        return self.tokens is not None and others <= {"input_ids", "attention_mask"}


def example_of(model: nn.Module, example: Any = None) -> Example | None:
    """Return the example of the user, or a few tokens without one.

    None for a model that reads no tokens, or has no embedding of tokens.

    Raises:
        TypeError: if it is neither a mapping nor a tensor.
    """
    config, names = getattr(model, "config", None), parameters_of(model)
    if example is not None and not isinstance(example, Mapping | Tensor):
        raise TypeError(
            f"example must be a mapping of arguments, as a processor gives, or a tensor; got a {type(example).__name__}"
        )
    if isinstance(example, Tensor):
        return Example((example,))
    if example is None and table_of(model) is None:
        return None
    if example is None and config is None:
        return Example((tokens_for(model),))
    if example is None and "input_ids" not in {getattr(model, "main_input_name", ""), *names}:
        return None
    if example is None:
        tokens = tokens_for(model)
        example = {"input_ids": tokens}
        if is_encoder_decoder(model):
            example["decoder_input_ids"] = tokens[
                :, :5
            ]  # fewer, so that the streams differ in size
    return Example(kwargs={**uncached(model), **example})


def uncached(model: nn.Module) -> dict[str, Any]:
    """The arguments of a run whose keys nobody needs later."""
    knows_cache = "use_cache" in Words(model.forward, *forwards_in(model)).known
    return {"use_cache": False} if knows_cache else {}


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a model has both an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def parameters_of(model: Any) -> list[str]:
    """The names of the arguments of a model's forward."""
    return [*inspect.signature(base_of(model).forward).parameters]


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output or, where it has none, the first tensor. Losses may come before them."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else next(tensors_in(output))


def embedding_of(model: Any) -> Any:
    """The embedding of a model's tokens: the one that it names, or else its first; None without one."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        named = model.get_input_embeddings()
        if named is None or isinstance(named, nn.Module):  # some name a parameter
            return named
    return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def table_of(model: Any) -> Tensor | None:
    """The vectors of a model's tokens [vocab, d]; None without an embedding of tokens."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    for module in (embedding_of(model), *embeddings):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            return weight
    return None


def tokens_for(model: Any) -> Tensor:
    """Different tokens, [2, 7], on the device of the model's embedding.

    Raises:
        ValueError: if the model has none.
    """
    if (weight := table_of(model)) is None:
        raise ValueError(
            f"attach needs example=, the input of a run, for a {type(model).__name__} without an nn.Embedding"
        )
    # A weight that is elsewhere until it is needed has no device; whoever brings it moves tokens too.
    device = "cpu" if weight.is_meta else weight.device
    n_tokens = math.prod(SHAPE)
    numbers = (torch.arange(2 * n_tokens, device=device) * 5 + 1).remainder(len(weight))
    # Models that count positions or find the end of a text by the padding token would see padding here.
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(pad, int):
        numbers = torch.cat([numbers[numbers != pad], numbers[numbers == pad]])
    return numbers[:n_tokens].view(SHAPE)
