"""Build a model from named tensors.

Every key of a file is checked. No parameter shares memory with another one or with the file, unless
the caller allows it (`Reader.keep`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks.base import progress_bar, require_device, shown, without_gradients
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase
from models.transformer import Transformer
from models.weights import differ

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# If the config ties these two parameters, a file may store the weight under either name.
_TIED = ("unembedding.weight", "token_embedding.weight")


def concatenated(*tensors: Tensor) -> Tensor:
    """Concatenate tensors along their first axis. A single tensor is returned without a copy."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


@dataclass(frozen=True)
class TensorSource:
    """The source of one parameter.

    Attributes:
        keys: the names of tensors in the file.
        convert: a function that makes the parameter from these tensors, in the same order.
    """

    keys: tuple[str, ...]
    convert: Callable[..., Tensor] = concatenated


SourceTable = Mapping[str, str | TensorSource]
"""The keys of a file for each parameter name.

`N` stands for each layer, and `*` for `weight` and `bias`.
"""


def expanded(
    rows: SourceTable,
    config: TransformerConfig,
    keys: Collection[str],
    spelled: Callable[[str], str] = str,
) -> dict[str, TensorSource]:
    """Return the source of each parameter, with a row for each layer, and for weight and bias.

    Args:
        rows: the table, with `N` and `*` in its names. It may contain rows for parameters that the
            model does not have.
        config: the config, which gives the number of layers.
        keys: the keys of the file.
        spelled: a function from a key of the table to the spelling of the file.
    """

    def filled(name: str, layer: int, kind: str) -> str:
        return name.replace(".N.", f".{layer}.").replace("*", kind)

    table: dict[str, TensorSource] = {}
    for ours, theirs in rows.items():
        source = theirs if isinstance(theirs, TensorSource) else TensorSource((theirs,))
        for kind in ("weight", "bias") if ours.endswith("*") else ("",):
            for layer in range(min(config.n_layers, len(keys))) if ".N." in ours else (0,):
                named = tuple(spelled(filled(key, layer, kind)) for key in source.keys)
                table[filled(ours, layer, kind)] = TensorSource(named, source.convert)
    return table


@dataclass(frozen=True)
class Reader:
    """Tensors by name. They are read one at a time, so a file is never in memory twice.

    Attributes:
        keys: the names of all tensors.
        read: a function from a name to a tensor. It is called once for each parameter that is made
            from the tensor.
        keep: whether a tensor may become a parameter without a copy.
    """

    keys: Collection[str]
    read: Callable[[str], Tensor]
    keep: bool


@without_gradients
def assemble(
    config: TransformerConfig,
    table: Mapping[str, TensorSource],
    reader: Reader,
    where: str,
    ignored: Callable[[str], object] = lambda key: False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Return a model in evaluation mode whose parameters are the tensors of a file.

    Args:
        config: the config of the model. If it ties the unembedding to the embedding, the file may
            contain either tensor, or both if they are equal.
        table: the source of each parameter, by its name in `Transformer(config)`. A parameter
            without a row is read under its own name. Rows of parameters that the model does not
            have are ignored.
        reader: the tensors of the file.
        where: the name of the file, for errors.
        ignored: a function that returns True for a key of the file that the model does not need.
        dtype: the dtype of all parameters. Default: the dtype of the file. If the file mixes
            dtypes, the narrowest dtype that represents all of them without rounding.
        device: the device of the parameters. Default: the CPU.

    Raises:
        ValueError: if keys are missing or unexpected (the error lists all of them), if a tensor has
            a wrong shape or an unsupported dtype, or if `dtype` is unsupported.
        TypeError: if `dtype` is no dtype.
    """
    if dtype not in (None, *DTYPES):
        error = ValueError if isinstance(dtype, torch.dtype) else TypeError
        raise error(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {shown(dtype)}")
    keys = set(filterfalse(ignored, reader.keys))
    # Check this first: a config with a huge number of layers would take all memory below.
    if config.n_layers > len(keys):
        raise ValueError(
            f"{where}: n_layers must be at most {len(keys)}, the number of tensors; got "
            f"{config.n_layers}"
        )
    model = without_values(config)
    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {name: parameter.shape for name, parameter in parameters}
    sources = {name: table.get(name, TensorSource((name,))) for name in shapes}
    if config.tied_unembed:
        absent = [name for name in _TIED if keys.isdisjoint(sources[name].keys)]
        for name in absent[:1]:
            del sources[name]
    needed = set[str]()
    for source in sources.values():
        needed.update(source.keys)
    _check_keys(needed, keys, where)
    values = _read_all(
        config, sources, shapes=shapes, reader=reader, where=where, dtype=dtype, device=device
    )
    widest = reduce(torch.promote_types, {value.dtype for value in values.values()})
    for name in values:
        values[name] = values[name].to(widest)
    model.load_state_dict(values, assign=True)
    return model.eval()


def _read_all(
    config: TransformerConfig,
    sources: Mapping[str, TensorSource],
    shapes: Mapping[str, torch.Size],
    reader: Reader,
    where: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> dict[str, Tensor]:
    """Return the parameters, each in memory of its own. A progress bar counts their numbers.

    If the config ties two parameters, only the one that was read first is returned.

    Args:
        config: the config of the model.
        sources: the source of each parameter in the file.
        shapes: the shape of each parameter.
        reader: the tensors of the file.
        where: the name of the file, for errors.
        dtype: the dtype of all parameters. Default: the dtype of each tensor.
        device: the device of the parameters. Default: the CPU.
    """
    target = require_device(device) or torch.device("cpu")
    values: dict[str, Tensor] = {}
    # The addresses of the memory that parameters use.
    addresses: set[int] = set()
    # Read the largest tensor first. While a tensor is copied, memory contains it twice, and at the
    # beginning memory contains no other tensors.
    names = sorted(sources, key=lambda name: -shapes[name].numel())
    numbers = sum(shapes[name].numel() for name in names)
    with progress_bar("loading", total=float(numbers)) as count:
        for name in names:
            tensors = [reader.read(key) for key in sources[name].keys]
            if not reader.keep:
                addresses.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
            value = _converted(sources[name], tensors, shape=shapes[name], where=where, dtype=dtype)
            read_before = values.keys() & set(_TIED)
            if config.tied_unembed and name in _TIED and read_before:
                first = read_before.pop()
                if differ(values[first], value.to(dtype or value.dtype)):
                    tied = " and ".join(sources[parameter].keys[0] for parameter in (first, name))
                    raise ValueError(f"{where}: {tied} must be equal, because the config ties them")
            else:
                values[name] = _owned(value, addresses, dtype=dtype or value.dtype, device=target)
                addresses.add(values[name].untyped_storage().data_ptr())
            count(shapes[name].numel())
    return values


def end_tokens(listed: Any, vocab_size: int) -> tuple[Any, ...]:
    """Return the tokens that end a text, from a file that gives one token, several tokens or none.

    Tokens outside the vocabulary are ignored, because the model cannot predict them. Many configs
    of small models contain such a token, copied from the config of a large model.
    """
    tokens = listed if isinstance(listed, list) else [listed]
    known = (token for token in tokens if type(token) is not int or 0 <= token < vocab_size)
    return tuple(token for token in dict.fromkeys(known) if token is not None)


def rotary_of_windows(fields: Mapping[str, Any], base: RotaryBase) -> dict[str, Any]:
    """Return the rotary fields of our config that the base of layers with a window changes.

    Args:
        fields: the other fields: `rotary_theta` and `rotary_scaling` are for layers without a
            window.
        base: the rotary base and scaling of layers with a window.
    """
    if not fields.get("window"):
        return {}
    if not fields.get("window_layers"):
        # All layers have the window.
        return {"rotary_theta": base.theta, "rotary_scaling": base.scaling}
    of_others = RotaryBase(theta=fields["rotary_theta"], scaling=fields["rotary_scaling"])
    return {} if base == of_others else {"window_rotary": base}


def without_values(config: TransformerConfig) -> Transformer:
    """Return a model with parameters on the meta device, where they need no memory."""
    with torch.device("meta"), _Undrawn():
        return Transformer(config)


def _check_keys(needed: set[str], present: set[str], where: str) -> None:
    """Check that a file contains exactly the tensors that a model needs.

    Raises:
        ValueError: listing all missing and all unexpected tensors.
    """
    missing, unexpected = sorted(needed - present), sorted(present - needed)
    if missing or unexpected:
        raise ValueError(
            f"{where} must contain the tensors of its config; got {len(missing)} missing: "
            f"{', '.join(missing)}; {len(unexpected)} unexpected: {', '.join(unexpected)}"
        )


def _converted(
    source: TensorSource,
    tensors: list[Tensor],
    shape: torch.Size,
    where: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return a parameter from the tensors of its source.

    Raises:
        ValueError: if a tensor has an unsupported dtype, or the parameter would not have this
            shape.
    """
    read = ", ".join(
        f"{key} {tensor.dtype} {list(tensor.shape)}"
        for key, tensor in zip(source.keys, tensors, strict=True)
    )
    if any(tensor.dtype not in DTYPES for tensor in tensors):
        raise ValueError(f"{where}: weights must be {', '.join(map(str, DTYPES))}; got {read}")
    # Convert first. Otherwise a sum of tensors would be rounded to the dtype of the file.
    if dtype is not None:
        tensors = [tensor.to(torch.promote_types(tensor.dtype, dtype)) for tensor in tensors]
    try:
        value = source.convert(*tensors)
    # Sizes that do not fit a view or a concatenation raise these errors.
    except (RuntimeError, IndexError):
        value = None
    if value is None or value.shape != shape:
        raise ValueError(f"{where}: shape must be {list(shape)} to match the config; got {read}")
    return value


def _owned(value: Tensor, addresses: set[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a parameter in memory of its own.

    The value is copied if it shares memory, is part of a larger tensor, or has another dtype or
    device.

    Args:
        value: the value of the parameter.
        addresses: the addresses of the memory that is in use.
        dtype: the dtype of the parameter.
        device: the device of the parameter.
    """
    storage = value.untyped_storage()
    is_alone = storage.nbytes() == value.nbytes and storage.data_ptr() not in addresses
    if is_alone and value.is_contiguous() and (value.dtype, value.device) == (dtype, device):
        return value
    return torch.empty(value.shape, dtype=dtype, device=device).copy_(value)


class _Undrawn(TorchFunctionMode):
    """Skip the random initialisation of weights.

    On the meta device, the initialisation would import sympy, which takes a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        return keywords["tensor"] if func is nn.init.normal_ else func(*args, **keywords)
