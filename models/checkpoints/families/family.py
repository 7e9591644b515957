"""What a family of Hugging Face checkpoints is: a translation of its config, a table of its keys."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.checkpoints.assemble import Source
from models.checkpoints.attributes import Attributes
from models.config import TransformerConfig

Rows = Mapping[str, str | Source]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` become ours.

    Attributes:
        config: our config, from the attributes of config.json.
        rows: where our parameters come from: keys by our names; `N` stands for each layer, and `*`
            for `weight` and `bias`. Rows of parameters that a config does not have are idle.
        prefix: what keys start with, unless the model was saved without its head.
        renamed: the names that other versions of transformers have for keys of the table.
        ignored: patterns of keys, without the prefix, that hold no weights: buffers of old versions.
    """

    config: Callable[[Attributes], TransformerConfig]
    rows: Callable[[TransformerConfig], Rows]
    prefix: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def table(self, config: TransformerConfig, keys: set[str]) -> dict[str, Source]:
        """The source of each parameter, with the keys as a file with these keys spells them."""
        table: dict[str, Source] = {}
        for ours, theirs in self.rows(config).items():
            source = theirs if isinstance(theirs, Source) else Source((theirs,))
            for kind in ("weight", "bias") if ours.endswith("*") else ("",):
                for layer in range(config.n_layers) if ".N." in ours else (0,):
                    name = _filled(ours, layer, kind)
                    spelled = (self._spelled(_filled(k, layer, kind), keys) for k in source.keys)
                    table[name] = Source(tuple(spelled), source.convert)
        return table

    def is_ignored(self, key: str) -> bool:
        """Whether a key of a file holds nothing that the model needs."""
        bare = key.removeprefix(self.prefix)
        return any(re.fullmatch(pattern, bare) for pattern in self.ignored)

    def _spelled(self, key: str, keys: set[str]) -> str:
        others = (key.removeprefix(self.prefix), self.renamed.get(key, key))
        return next((spelled for spelled in (key, *others) if spelled in keys), key)


def _filled(name: str, layer: int, kind: str) -> str:
    return name.replace(".N.", f".{layer}.").replace("*", kind)


def transposed(weight: Tensor) -> Tensor:
    """A matrix that is stored as [in, out], as [out, in]."""
    return weight.T if weight.ndim == 2 else weight


def plus_one(weight: Tensor) -> Tensor:
    """The gain of a norm that is stored as its distance from one.

    Kept in half precision the sum is rounded, which transformers, that adds in float32, does not do.
    """
    return weight + 1


def by_kind(n_heads: int) -> Callable[[Tensor], Tensor]:
    """Queries, keys and values that are stored head by head, as all queries, all keys, all values."""

    def convert(fused: Tensor) -> Tensor:
        return fused.unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return convert


def window_fields(a: Attributes, window: int | None, types: Sequence[str]) -> dict[str, Any]:
    """Our window fields, from the kind of attention that each layer has."""
    n_layers = a.take("num_hidden_layers", None)
    if not isinstance(types, list) or n_layers not in (None, len(types)):
        raise a.error("layer_types", types, f"one for each of {n_layers or 'its'} layers")
    unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise a.error("layer_types", unknown[0], "sliding_attention and full_attention")
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if not sliding:
        return {}
    if window is None or window < 1:
        raise a.error("sliding_window", window, "at least 1 where there is sliding_attention")
    return {"window": window, "window_layers": () if len(sliding) == len(types) else sliding}
