"""Hashes of the configuration and of the weights of a model.

Stored results contain these hashes, so a later run can check that it uses the same model.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from hooks.base import processes
from hooks.base._torch import has_storage
from hooks.base.storage import checksum

_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


def without_hashes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a stored result for people: without hashes.

    A list of hashes becomes the number of its entries.

    >>> without_hashes({"site": "z", "texts": ["b0752fe06d314c0f", "4de94dccc9b62ebf"]})
    {'site': 'z', 'texts': 2}
    """
    words = {}
    for name, fact in facts.items():
        if isinstance(fact, list | tuple) and fact and all(map(_is_hash, fact)):
            words[name] = len(fact)
        elif not _is_hash(fact):
            words[name] = fact
    return words


def _is_hash(fact: object) -> bool:
    """Return whether a value is a text with the form of a hash."""
    return isinstance(fact, str) and _HASH.fullmatch(fact) is not None


def config_hash(model: nn.Module) -> str:
    """Return a hash of the model's `config`.

    Without a config, the names and shapes of the parameters are hashed.
    """
    config: Any = getattr(model, "config", None)
    described: Any
    if hasattr(config, "to_dict"):
        volatile = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
        described = {
            key: value
            for key, value in config.to_dict().items()
            if key not in volatile and not key.startswith("_")
        }
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        described = dataclasses.asdict(config)
    else:
        described = {name: list(value.shape) for name, value in model.named_parameters()}
    # The text is only hashed, so a config may contain NaN and infinity.
    text = json.dumps([type(model).__name__, described], sort_keys=True, default=_described)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(value: object) -> object:
    """Return a value of a config in a form of JSON that is the same in every process."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or str(value)


def weights_hash(model: nn.Module, whole: bool = False) -> str:
    """Return a hash of the name, the shape and at most 16 numbers of each parameter.

    With `whole`, hash all numbers of the parameters and of the buffers in the model's state.
    """
    hashed = hashlib.sha256()
    weights = model.state_dict() if whole else dict(model.named_parameters())
    for name, part in weights.items():
        weight = processes.whole(part) if whole else part
        numbers: Any = None
        if has_storage(weight) and not weight.is_meta:
            flat = weight.detach().flatten()
            numbers = flat[:: max(1, -(-len(flat) // 16))].tolist()
        hashed.update(repr((name, tuple(weight.shape), numbers)).encode())
        if whole and numbers is not None:
            hashed.update(str(checksum(name, weight)).encode())
    return hashed.hexdigest()
