"""Names of TransformerLens' points, with the names of the same values in this project.

1. Expand a name like `get_act_name` of TransformerLens, and separate its layer: `q3` becomes
   `blocks.*.attn.hook_q`.
2. Look up our point with this value in a table. For some values, the table contains conditions on
   the model's config.
3. If no point has the value, the error explains how to compute it from our points.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from hooks import UnknownNameError
from hooks.base import explains_calls, require_choice, require_kind, unknown_name

# Short names in TransformerLens. `_ALIASES` maps short names to other short names. No name of our
# points ends with a name in `_SHORT`, so an unknown name in `_SHORT` is from TransformerLens.
_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_SHORT = {
    *("attn_scores", "rot_q", "rot_k", "result", "pre_linear", "attn_in", "mlp_in"),
    *("q_input", "k_input", "v_input"),
}


@dataclass(frozen=True)
class _Entry:
    """A value that has a name in TransformerLens.

    Attributes:
        ours: our point, with `*` for the layer; empty if no point has the value.
        note: an explanation of their value, if our value is different.
        conditions: mappings from fields of a config to values; `!` before a value means any other
            value. Our point has the value in models whose config matches all fields of at least one
            mapping. None: it has the value in every model.
        usual: whether the conditions are true for most models. If the model is not known, our point
            is then assumed to have the value.
    """

    ours: str = ""
    note: str = ""
    conditions: list[Mapping[str, Any]] | None = None
    usual: bool = False

    def has_value_in(self, model: nn.Module | None) -> bool:
        """Return True if our point has the value in this model. For an unknown model: `usual`."""
        if self.conditions is None:
            return bool(self.ours)
        config = getattr(model, "config", None)
        for fields in self.conditions:
            if not all(hasattr(config, field) for field in fields):
                # There is no model, or its config does not have the fields of the conditions.
                return self.usual
        return any(_matches(config, fields) for fields in self.conditions)


def _matches(config: Any, fields: Mapping[str, Any]) -> bool:
    """Return True if a config has these values."""
    return all(_fits(getattr(config, field), value) for field, value in fields.items())


def _fits(value: Any, wanted: Any) -> bool:
    """Return True if a value of a config is the wanted value; `!x` means any value except x."""
    if isinstance(wanted, str) and wanted.startswith("!"):
        return bool(value != wanted[1:])
    return bool(value == wanted)


@cache
def _tables() -> dict[int, dict[str, _Entry]]:
    """Return the table of the points of each version, by name.

    Version 2 is `HookedTransformer`. Version 4 is `TransformerBridge`, which also supports the
    names of version 2.
    """
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    tables = {}
    for version, facts_by_name in json.loads(text).items():
        tables[int(version)] = {name: _entry(facts) for name, facts in facts_by_name.items()}
    return {2: tables[2], 4: tables[2] | tables[4]}


def _entry(facts: Any) -> _Entry:
    """Return the entry for one value of the file: our name, or a mapping with conditions."""
    if isinstance(facts, str):
        return _Entry(facts)
    return _Entry(
        ours=facts.get("ours", ""),
        note=facts["note"],
        conditions=facts.get("if"),
        usual=facts.get("usual", False),
    )


@explains_calls
def hooks_name(
    name: str | tuple[Any, ...],
    layer: int | str | None = None,
    layer_type: str | None = None,
    *,
    model: nn.Module | None = None,
    version: int = 2,
) -> str:
    """Return our name of a value that has a name in TransformerLens.

    Args:
        name: a full name, a full name with `*` for the layer, or a short name; or a tuple of these
            arguments.
        layer, layer_type: the arguments of TransformerLens' `get_act_name`: `("scale", 0, "ln1")`.
        model: our model, a `models.Transformer`, for names that depend on its config. Our queries
            are queries after rotation, for example. Without a model, values that differ in many
            models raise an error, and values that differ in few models (a norm of the embeddings,
            biases of a gated MLP) are assumed to be the same.
        version: 2 for `HookedTransformer`, 4 for `TransformerBridge`.

    Returns:
        The full name of a point, with `*` for the layer if no layer is given.

    Raises:
        UnknownNameError: if TransformerLens does not have the name, or no point of ours is known to
            have the value. In the second case the error explains the value.
        ValueError: if the version is not 2 or 4.

    >>> hooks_name("blocks.3.attn.hook_rot_q"), hooks_name("pattern", 3), hooks_name("resid_pre")
    ('blocks.3.attn.q', 'blocks.3.attn.pattern', 'blocks.*.resid_pre')
    """
    require_choice("version", version, _tables())
    require_kind("name", name, (str, tuple), "a name of TransformerLens")
    theirs = _full(*name) if isinstance(name, tuple) else _full(name, layer, layer_type)
    table = _tables()[version]
    key, layers = _key(theirs, table)
    if key is None:
        raise unknown_name(theirs, table, f"point of TransformerLens {version}")
    entry = table[key]
    if not entry.has_value_in(model):
        raise UnknownNameError(f"{theirs} {_explained(version, entry, layers)}", theirs)
    return _in_layer(entry.ours, layers)


def their_name(name: str) -> str | None:
    """Return the name in TransformerLens 2 of the value of one of our points, or None if no name
    has the same value in nearly all models.

    >>> their_name("blocks.3.mlp_out"), their_name("blocks.3.attn.scores")
    ('blocks.3.hook_mlp_out', None)
    """
    match = re.match(r"blocks\.(\d+)\.", name)
    starred = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
    for theirs, entry in _tables()[2].items():
        if entry.ours == starred and entry.has_value_in(None):
            return _in_layer(theirs, match[1] if match else "*")
    return None


def name_hint(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for a name of TransformerLens, with our name; None for other names.

    Args:
        name: the name that does not exist.
        known: the names that exist.
        what: the kind of the names, such as `point`.
    """
    # Return early for other names: `name in cache` calls this function for every missing name.
    if not ("hook_" in name or name in _ALIASES or name in _SHORT):
        return None
    key, layers = _key(_full(name), _tables()[4])
    # If other points have `hook_` in their names, the model may be a model of TransformerLens.
    if key is None or any("hook_" in known_name for known_name in known):
        return None
    version = 2 if key in _tables()[2] else 4
    explanation = _explained(version, _tables()[version][key], layers, known=False)
    hint = "; the output of attention is attn_out" if name == "attn" else ""
    return UnknownNameError(f"no {what} is named {name!r}: the value {explanation}{hint}", name)


def _explained(version: int, entry: _Entry, layers: str, known: bool = True) -> str:
    """Return the meaning of a value of TransformerLens, as the end of a sentence.

    Args:
        version: the version of TransformerLens.
        entry: the entry of the value in the table.
        layers: the layer, or `*`.
        known: whether the model is known.
    """
    ours = _in_layer(entry.ours, layers)
    note = _in_layer(entry.note.format(ours=ours), layers)
    if not note or (entry.usual and not known):
        note = f"is {ours} here"
    return f"of TransformerLens {version} {note}"


def _in_layer(text: str, layers: str) -> str:
    """Return a text with a layer in its names instead of `*`."""
    return text.replace("blocks.*.", f"blocks.{layers}.")


def _key(theirs: str, table: Iterable[str]) -> tuple[str | None, str]:
    """Return the name of the entry in the table for a name, or None, and the layer or `*`.

    A name without its first parts, such as `hook_z`, matches if only one entry ends with this name.
    """
    match = re.match(r"blocks\.([^.]+)\.", theirs)
    layers = match[1] if match else "*"
    pattern = re.sub(r"^blocks\.[^.]+", "blocks.*", theirs)
    pattern = re.sub(r"\bexperts\.[^.]+", "experts.*", pattern)
    if pattern in table:
        return pattern, layers
    tail = pattern.lstrip("*.")
    matches = [key for key in table if key.endswith(f".{tail}") and "experts" not in key]
    return (matches[0] if len(matches) == 1 else None), layers


def _full(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """Return the full name, as TransformerLens' `get_act_name` does.

    Without a layer, the name has no number of a block. Without a layer type, the name has no part
    of a block.
    """
    if "hook_" in name or ("." in name and layer is None):
        return name
    if match := re.fullmatch(r"([a-z_]+)(\d+)(.*)", name):
        name, layer, layer_type = match[1], match[2], match[3] or layer_type
    name = _ALIASES.get(name, name)
    part = _PARTS.get(layer_type or "", layer_type)
    if layer is None and not part and name in ("scale", "normalized"):
        return f"ln_final.hook_{name}"
    short = f"{part}.hook_{name}" if part else f"hook_{name}"
    key, _ = _key(short, _tables()[2])
    if layer is None or key is None:
        return key or short
    return key.replace("blocks.*", f"blocks.{layer}")
