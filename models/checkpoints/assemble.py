"""From named tensors to a model: every key accounted for, every parameter allocated once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.config import TransformerConfig
from models.transformer import Transformer
from models.tying import differ

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def concatenated(*tensors: Tensor) -> Tensor:
    """Tensors one after another along their first axis; a single one as it is."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


@dataclass(frozen=True)
class Source:
    """Where one of our parameters comes from.

    Attributes:
        keys: names of tensors in the file.
        convert: from those tensors, in that order, to ours; it leaves them as they are.
    """

    keys: tuple[str, ...]
    convert: Callable[..., Tensor] = concatenated


@runtime_checkable
class Reader(Protocol):
    """Tensors by name, one at a time, so that a file is never in memory twice.

    Attributes:
        lends: whether `read` gives the reader's own memory, to be copied; else it gives it away.
    """

    lends: bool

    def keys(self) -> Collection[str]:
        """The names of all tensors."""

    def read(self, key: str) -> Tensor:
        """The tensor of a name.

        Raises:
            ValueError: naming the file and the key, if it is damaged.
        """


def check_layers(config: TransformerConfig, reader: Reader, where: str) -> None:
    """Refuses a config of more layers than there are tensors, before anything is built of it.

    Raises:
        ValueError: naming both numbers.
    """
    held = len(reader.keys())
    if config.n_layers > held:
        raise ValueError(
            f"{where} does not fit its config: it holds {held} tensors, for {config.n_layers} layers"
        )


def assemble(
    config: TransformerConfig,
    table: Mapping[str, Source],
    reader: Reader,
    where: str,
    ignored: Callable[[str], bool] = lambda key: False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """A model in eval mode whose parameters are a file's tensors.

    A weight that the config ties to another is one Parameter with it. Where the file holds it all the
    same, it has to be equal.

    Args:
        config: what the model is.
        table: the source of each parameter, by its name in `Transformer(config)`; rows for
            parameters that this config does not have are left out.
        reader: the file's tensors.
        where: the file, for errors.
        ignored: whether a key of the file carries nothing that the model needs.
        dtype: of all parameters; None for the file's own, and where that has several, for the
            narrowest that holds them all without rounding.
        device: where the parameters go; None for the CPU.

    Raises:
        ValueError: listing all keys that are missing, unexpected, of another shape or of a type that is
            not a number's, if there are any; no model is then made.
    """
    return _Assembly(config, table, reader, ignored, dtype, device).model(where)


class _Assembly:
    """One run of `assemble`: what is found wrong is collected, and raised at the end."""

    def __init__(
        self,
        config: TransformerConfig,
        table: Mapping[str, Source],
        reader: Reader,
        ignored: Callable[[str], bool],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.reader, self.dtype, self.device = reader, dtype, torch.device(device or "cpu")
        with torch.device("meta"), _Undrawn():
            self.made = Transformer(config)
        self.names = _names_of_parameters(self.made)
        self.table = {n: table[n] for names in self.names for n in names if n in table}
        self.found = {key for key in set(reader.keys()) if not ignored(key)}
        self.taken: set[int] = set()  # addresses that belong to a file or to a parameter
        self.wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "wrong": []}

    @torch.no_grad()
    def model(self, where: str) -> Transformer:
        known = {key for source in self.table.values() for key in source.keys}
        self.wrong["unexpected"] = sorted(self.found - known)
        # The largest first: when the last ones are read, file and model hold the rest together.
        sizes = {names[0]: self.made.get_parameter(names[0]).numel() for names in self.names}
        for names in sorted(self.names, key=lambda names: -sizes[names[0]]):
            value = self.value(names)
            if value is not None:
                _set(self.made, names, value)
        if any(self.wrong.values()):
            raise ValueError(f"{where} does not fit its config: {_listed(self.wrong)}")
        _unify(self.made, self.names)
        return self.made.eval()

    def value(self, names: list[str]) -> Tensor | None:
        """What a parameter of these names is, of which the second and later are tied to the first."""
        given = [name for name in names if self.present(name)]
        if not given:
            keys = self.table[names[0]].keys if names[0] in self.table else (names[0],)
            self.wrong["missing"] += [key for key in keys if key not in self.found]
            return None
        first, *others = given
        if not others:
            return self.owned(self.converted(first, self.read(first)))
        tensors = self.read(first)
        value = self.converted(first, tensors)
        for other in others:
            again = self.read(other)
            if all(map(is_, tensors, again)):
                continue
            repeated = self.converted(other, again)
            if value is None or repeated is None:
                continue
            tied = f"{', '.join(self.table[first].keys)}, tied to it"
            what = ", ".join(self.table[other].keys)
            if value.is_meta or repeated.is_meta:
                self.wrong["wrong"].append(
                    f"{what} on the device meta cannot be compared to {tied}"
                )
            elif differ(value, repeated):
                self.wrong["wrong"].append(f"{what} is not {tied}")
        return self.owned(value)

    def present(self, name: str) -> bool:
        return name in self.table and self.found.issuperset(self.table[name].keys)

    def read(self, name: str) -> list[Tensor]:
        """The tensors that a name's value is made from."""
        tensors = [self.reader.read(key) for key in self.table[name].keys]
        if self.reader.lends:
            self.taken |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return tensors

    def converted(self, name: str, tensors: list[Tensor]) -> Tensor | None:
        """The value of a name from its tensors; None, and said why, if it is not the parameter's."""
        source, shape = self.table[name], self.made.get_parameter(name).shape
        held = ", ".join(f"{k} {list(t.shape)}" for k, t in zip(source.keys, tensors, strict=True))
        for key, tensor in zip(source.keys, tensors, strict=True):
            if tensor.dtype not in DTYPES:
                kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
                self.wrong["wrong"].append(f"{key} holds {tensor.dtype}, not one of {kinds}")
                return None
            if tensor.is_meta and self.device.type != "meta":
                self.wrong["wrong"].append(f"{key} is on the device meta, where it has no values")
                return None
        if self.dtype is not None:  # or a sum would be rounded to the file's type first
            wide = [torch.promote_types(tensor.dtype, self.dtype) for tensor in tensors]
            tensors = [tensor.to(dtype) for tensor, dtype in zip(tensors, wide, strict=True)]
        try:
            value = source.convert(*tensors)
        except (RuntimeError, IndexError):  # sizes that cannot be viewed or concatenated so
            value = None
        if value is None or value.shape != shape:
            what = f"{held} in the file, {list(shape)} in the config"
            self.wrong["wrong"].append(what if source.keys == (name,) else f"{what} ({name})")
            return None
        return value

    def owned(self, value: Tensor | None) -> Tensor | None:
        """The value as the model's own: of its dtype, whole, and shared with nobody."""
        if value is None:
            return None
        dtype, device = self.dtype or value.dtype, self.device
        storage = value.untyped_storage()
        alone = storage.nbytes() == value.nbytes and storage.data_ptr() not in self.taken
        if not (alone and value.is_contiguous() and (value.dtype, value.device) == (dtype, device)):
            value = torch.empty(value.shape, dtype=dtype, device=device).copy_(value)
        self.taken.add(value.untyped_storage().data_ptr())
        return value


class _Undrawn(TorchFunctionMode):
    """Leaves out the drawing of weights that have no memory.

    For a `normal_` there, torch imports sympy and 800 more modules: one second and 74 MiB.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        return given["tensor"] if func is nn.init.normal_ else func(*args, **given)


def _names_of_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _set(model: nn.Module, names: Collection[str], value: Tensor) -> None:
    parameter = nn.Parameter(value)
    for name in names:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, parameter)


def _unify(model: nn.Module, names: list[list[str]]) -> None:
    """Brings parameters of several dtypes to the one that holds them all."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        if dtypes >= {torch.float16, torch.bfloat16} and widest.itemsize == 2:
            widest = torch.float32
        for group in names:
            value = model.get_parameter(group[0]).detach()
            if value.dtype != widest:
                _set(model, group, value.to(widest))


def _listed(wrong: Mapping[str, list[str]]) -> str:
    return "; ".join(
        f"{len(items)} {kind}: {', '.join(items)}" for kind, items in wrong.items() if items
    )
