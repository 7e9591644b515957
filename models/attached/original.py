"""A model before points are added: its configs, and the arguments that it runs on.

1. The config of a module names its kernel: the attention function of `transformers` that the module
   calls (`kernel_of`). While the model is attached, a copy of the config asks for attention with
   points instead, under the name of `register_function`.
2. The model runs on fourteen tokens, or on the user's example (`examples_of`).
3. `AttachError` names the module that cannot be read, and suggests a solution to the user.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError
from hooks.base import HintsAtNames, Words, forwards_in, library, tensors_in, without_gradients
from models.mode import mode

Kernel = Callable[..., tuple[Tensor, Any]]
"""An attention function of `transformers`.

It returns z, [batch, query, head, d_head], and the weights or None.
"""

HOOKED = "hooked_"
"""The prefix of the names under which `hooked_attention` is registered in `transformers`.

After the prefix comes the name of the model's own kernel.
"""


class KernelName(str):
    """The name of `hooked_attention`, which is also equal to the name of the model's own kernel.

    Some modules compute a part of their mask only if the name of their kernel is in a list.

    >>> name = KernelName("hooked_sdpa")
    >>> name in ("eager", "sdpa"), {"hooked_sdpa": 1}[name]
    (True, 1)
    """

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or str(self).removeprefix(HOOKED) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def configs_of(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the config of each module that has one."""
    configs = {module: vars(module).get("config") for module in model.modules()}
    return {module: config for module, config in configs.items() if is_config(config)}


def kernel_name(config: Any) -> str:
    """Return the name of the kernel that a config asks for."""
    return str(config._attn_implementation or "sdpa").removeprefix(HOOKED)


def base_of(model: Any) -> Any:
    """Return the model inside an adapter's wrapper.

    The wrapper passes its arguments on to this model. In generation, only this model is called.
    """
    return getattr(model, "get_base_model", lambda: model)()


def text_config(model: Any) -> Any:
    """Return the part of a model's config about its text blocks, or the whole config.

    For a model without a config, the result is the model itself.
    """
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_config(value: Any) -> bool:
    """Return whether a value is a config of `transformers`, which names an attention function."""
    return hasattr(value, "_attn_implementation")


def kernel_of(module: nn.Module) -> Kernel:
    """Return the function that the module would call if the model were not attached."""
    name = kernel_name(module.config)
    eager = None
    for kind in type(module).__mro__:
        eager = eager or getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    if name == "eager" and eager:
        return eager
    return library("transformers").AttentionInterface()["sdpa" if name == "eager" else name]


def register_function(model: nn.Module, attention: Kernel) -> None:
    """Register an attention function in `transformers`, under a name for each kernel of a model.

    A model without a config of `transformers` needs no registration.

    Args:
        model: the model.
        attention: the function: `hooked_attention`, which passes values through points.

    Raises:
        ImportError: if `transformers` is missing, or older than 5.6.
    """
    kernels = {kernel_name(config) for config in configs_of(model).values()}
    if not kernels:
        return
    transformers = library("transformers")
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < (5, 6):
        raise ImportError(f"attach needs transformers 5.6 or later; got {version}")
    masks = library("transformers.masking_utils")
    for name in kernels:
        transformers.AttentionInterface.register(HOOKED + name, attention)
        if name in masks.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            mask = masks.ALL_MASK_ATTENTION_FUNCTIONS[name]
            masks.ALL_MASK_ATTENTION_FUNCTIONS.register(HOOKED + name, mask)


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclass(frozen=True)
class AttachedSizes(HintsAtNames):
    """The sizes of an attached model, under the names of `models.TransformerConfig`.

    Attributes:
        vocab_size: the number of logits.
        n_ctx: the number of positions of the longest text. If the config does not contain this
            length, the value is `sys.maxsize`.
        n_layers, n_heads, d_model, logit_cap: as in `models.TransformerConfig`.
    """

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int
    logit_cap: float


def sizes_of(
    model: Any, vocab_size: int, n_layers: int, d_model: int, logit_cap: float
) -> AttachedSizes:
    """Return the sizes of a model.

    Args:
        model: the model. Its config contains the longest text and the number of heads.
        vocab_size, n_layers, d_model, logit_cap: the sizes that were found in a run.
    """
    config = text_config(model)
    lengths = (getattr(config, name, None) for name in LENGTHS)
    n_ctx = next(filter(None, lengths), sys.maxsize)
    n_heads = getattr(config, "num_attention_heads", 0)
    return AttachedSizes(
        vocab_size, n_ctx, n_layers=n_layers, n_heads=n_heads, d_model=d_model, logit_cap=logit_cap
    )


SHAPE = (2, 7)


@dataclass(frozen=True, eq=False)
class ExampleArguments:
    """The arguments of a run.

    Attributes:
        args, kwargs: the arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: nn.Module) -> Any:
        """Return the model's output."""
        return model(*self.args, **self.kwargs)

    @without_gradients
    def logits(self, model: nn.Module) -> Tensor:
        """Return the model's logits.

        Raises:
            ValueError: if the model does not run on these arguments.
        """
        with mode(model, training=False):
            try:
                output = self.run(model)
            except Exception as error:
                shapes = {
                    name: [*value.shape]
                    for name, value in self.kwargs.items()
                    if isinstance(value, Tensor)
                }
                raise AttachError(
                    f"the model must run on only {shapes or 'its first argument'}; "
                    f"{type(model).__name__} raised {brief(error)} (use example= for other "
                    "arguments)"
                ) from error
        return logits_of(output)

    @without_gradients
    def runs_with_cache(self, model: nn.Module) -> bool:
        """Return whether the model also runs if `use_cache=False` is not among its arguments."""
        if self.kwargs.get("use_cache") is not False:
            return True
        kwargs = {name: value for name, value in self.kwargs.items() if name != "use_cache"}
        with mode(model, training=False):
            try:
                ExampleArguments(self.args, kwargs).run(model)
            # Models raise different errors here.
            except Exception:
                return False
        return True

    @property
    def tokens(self) -> Tensor | None:
        """The tokens [batch, pos] that the model reads; None if it reads no tokens."""
        tokens = self.kwargs.get("input_ids", next(tensors_in(self.args), None))
        is_text = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
        return tokens if is_text else None

    @property
    def is_text(self) -> bool:
        """True if the arguments are only tokens, with or without a mask."""
        others = {name for name, value in self.kwargs.items() if isinstance(value, Tensor)}
        return self.tokens is not None and others <= {"input_ids", "attention_mask"}


def examples_of(model: nn.Module, example: Any) -> list[ExampleArguments]:
    """Return the arguments of the one or two runs in which `attach` finds the points.

    The first run reads a few tokens, and the second run reads the user's example. Without an
    example, there is only the run on tokens. With an example, there is only the run on the example
    if it contains only tokens, if the model has an encoder and a decoder, or if the model does not
    run on tokens alone.

    Args:
        model: the model.
        example: the user's example: a tensor, or a mapping of arguments. None if the user gave no
            example.

    Raises:
        TypeError: if the example is neither a mapping nor a tensor.
        AttachError: if the model reads no tokens, and there is no example.
    """
    default = _example_of(model)
    from_user = None if example is None else _example_of(model, example)
    if default is None and from_user is None:
        names = parameters_of(model)[:3] or ["input"]
        lacks = "no nn.Embedding of tokens" if table_of(model) is None else "no argument input_ids"
        raise AttachError(
            f"attach needs example=, because {type(model).__name__} has {lacks}. Give the "
            f"arguments of one run, such as example={{{names[0]!r}: tensor}} (its forward reads "
            f"{', '.join(names)})"
        )
    if from_user is None or default is None or is_encoder_decoder(model):
        return [run for run in (from_user, default) if run][:1]
    if from_user.is_text:
        return [from_user]
    try:
        default.logits(model)
    # A model that also needs images cannot run on tokens alone.
    except ValueError:
        return [from_user]
    return [default, from_user]


def _example_of(model: nn.Module, example: Any = None) -> ExampleArguments | None:
    """Return the user's example, or a few tokens if there is no example.

    For a model that reads no tokens, or has no embedding of tokens, the result is None.

    Raises:
        TypeError: if the example is neither a mapping nor a tensor.
    """
    config = getattr(model, "config", None)
    names = parameters_of(model)
    if example is not None and not isinstance(example, Mapping | Tensor):
        raise TypeError(
            "example must be a tensor or a mapping of arguments, for example the output of a "
            f"processor; got a {type(example).__name__}"
        )
    if isinstance(example, Tensor):
        return ExampleArguments((example,))
    if example is None and table_of(model) is None:
        return None
    if example is None and config is None:
        return ExampleArguments((tokens_for(model),))
    if example is None and "input_ids" not in {getattr(model, "main_input_name", ""), *names}:
        return None
    if example is None:
        tokens = tokens_for(model)
        example = {"input_ids": tokens}
        if is_encoder_decoder(model):
            # The decoder gets fewer tokens than the encoder, so that the shape of a tensor shows
            # which of the two it belongs to.
            example["decoder_input_ids"] = tokens[:, :5]
    return ExampleArguments(kwargs={**uncached(model), **example})


def uncached(model: nn.Module) -> dict[str, Any]:
    """Return the arguments with which a model creates no cache of keys: `use_cache=False`.

    They are empty for a model that does not know `use_cache`.
    """
    knows_cache = "use_cache" in Words(model.forward, *forwards_in(model)).known
    return {"use_cache": False} if knows_cache else {}


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a model has both an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def parameters_of(model: Any) -> list[str]:
    """Return the names of the arguments of a model's forward."""
    return [*inspect.signature(base_of(model).forward).parameters]


def logits_of(output: Any) -> Tensor:
    """Return the attribute `logits` of a model's output, or else the first tensor of the output.

    In an output with logits, the first tensor may be a loss.
    """
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else next(tensors_in(output))


def embedding_of(model: Any) -> Any:
    """Return the embedding of a model's tokens; None without an embedding.

    This is the embedding that the model itself names, or else its first `nn.Embedding`.
    """
    with contextlib.suppress(AttributeError, NotImplementedError):
        named = model.get_input_embeddings()
        # Some models return a parameter instead of a module.
        if named is None or isinstance(named, nn.Module):
            return named
    return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def table_of(model: Any) -> Tensor | None:
    """Return the vectors of a model's tokens [vocab, d]; None without an embedding of tokens."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    for module in (embedding_of(model), *embeddings):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            return weight
    return None


def tokens_for(model: Any) -> Tensor:
    """Return different tokens, [2, 7], on the device of the model's embedding.

    Raises:
        AttachError: if the model has no embedding.
    """
    if (weight := table_of(model)) is None:
        raise AttachError(
            f"attach needs example=, because {type(model).__name__} has no nn.Embedding of tokens. "
            "Give the arguments of one run"
        )
    # A weight on `meta` is stored elsewhere until it is needed. The code that loads it also moves
    # the tokens to its device.
    device = "cpu" if weight.is_meta else weight.device
    n_tokens = math.prod(SHAPE)
    numbers = (torch.arange(2 * n_tokens, device=device) * 5 + 1).remainder(len(weight))
    # Put the padding token last. Models that count positions or find the end of a text by this
    # token would treat it as padding.
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(pad, int):
        numbers = torch.cat([numbers[numbers != pad], numbers[numbers == pad]])
    return numbers[:n_tokens].view(SHAPE)


WITHOUT_ATTACH = "use HookedRunner(model) without attach, whose points are the modules"
ADVICE = f"name blocks=, attn= and mlp=, give example=, or {WITHOUT_ATTACH}"


class AttachError(ValueError):
    """The error for a model that `attach` cannot read.

    The message contains the reason and the arguments of `attach` that can help.

    >>> from models import attach
    >>> attach(nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 5)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    models.attached.original.AttachError: the model must have a ModuleList of blocks that run ...
    """


@contextmanager
def reading_part(model: Any, name: str) -> Iterator[None]:
    """Return a context manager in which errors name the part of a model that could not be read.

    An unusual model may fail in any step, so any type of error is caught. An `AttachError` is
    raised unchanged, because it contains more details. Errors of memory, and warnings that the user
    turned into errors, are also raised unchanged.

    Args:
        model: the model.
        name: the module that is read; empty for the model itself.

    Raises:
        AttachError: if another error is raised inside. It names the module.
    """
    try:
        yield
    except (AttachError, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        part = f"{name!r} of a {type(model).__name__}" if name else f"a {type(model).__name__}"
        raise AttachError(
            f"attach must read each module, but cannot read {part}: {brief(error)} ({ADVICE})"
        ) from error


def brief(error: Exception) -> str:
    """Return an error as one line.

    The advice in an error of this package is removed, because it is for callers of other functions.

    >>> brief(KeyError("blocks"))
    "KeyError: 'blocks'"
    >>> message = "embed fired twice; a cache stores one value per name (see calls='all')"
    >>> brief(HookError(message))
    'HookError: embed fired twice; a cache stores one value per name'
    """
    line = " ".join(str(error).split())
    if isinstance(error, HookError) and line.endswith(")"):
        line = line.rpartition(" (")[0] or line
    return f"{type(error).__name__}: {line[:300]}"
