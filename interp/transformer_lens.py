"""Names of TransformerLens' points, each with what it is called here.

1. A name is made full, as its `get_act_name` does, and its layer is taken out: `q3` is `blocks.*.attn.hook_q`.
2. A table says which of our points has that value. Where that depends on the model, it says on what of its config.
3. Where none has it, the error says how to get it from those there are.
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
from hooks.base import require_choice, require_kind, unknown_name

# Short names in TransformerLens: those that stand for others, and those that are the ends of no name of ours.
_ALIASES = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v"}
_ALIASES |= {"mlp_pre": "pre", "mlp_mid": "mid", "mlp_post": "post"}
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_SHORT = {"attn_scores", "rot_q", "rot_k", "result", "pre_linear", "attn_in", "mlp_in"}
_SHORT |= {"q_input", "k_input", "v_input"}


@dataclass(frozen=True)
class _Row:
    """A value that has a name in TransformerLens.

    Attributes:
        ours: our point, with `*` for the layer; empty if none has the value.
        note: what their value is, where ours is another.
        conditions: fields of a config and their values, `!` for any other: our point has the value in a model that
            has all of one mapping. None for every model.
        usual: whether it has the value where the model is not known.
    """

    ours: str = ""
    note: str = ""
    conditions: list[Mapping[str, Any]] | None = None
    usual: bool = False

    def has_value_in(self, model: nn.Module | None) -> bool:
        """Whether our point has the value in this model, as far as that is known."""
        if self.conditions is None:
            return bool(self.ours)
        config = getattr(model, "config", None)
        if not all(hasattr(config, field) for fields in self.conditions for field in fields):
            return self.usual  # no model, or one whose config has other fields
        return any(
            all(_fits(getattr(config, field), value) for field, value in fields.items())
            for fields in self.conditions
        )


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and wanted.startswith("!"):
        return bool(value != wanted[1:])
    return bool(value == wanted)


@cache
def _tables() -> dict[int, dict[str, _Row]]:
    """The points of `HookedTransformer` (2), and those of `TransformerBridge` (4), which also knows the others."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    tables = {
        int(version): {
            name: _Row(row)
            if isinstance(row, str)
            else _Row(row.get("ours", ""), row["note"], row.get("if"), row.get("usual", False))
            for name, row in rows.items()
        }
        for version, rows in json.loads(text).items()
    }
    return {2: tables[2], 4: tables[2] | tables[4]}


def hooks_name(
    name: str | tuple[Any, ...],
    layer: int | str | None = None,
    layer_type: str | None = None,
    *,
    model: nn.Module | None = None,
    version: int = 2,
) -> str:
    """Our name of a value that has a name in TransformerLens.

    Args:
        name: a full name, one with `*` for the layer, or a short name; or a tuple of these arguments.
        layer, layer_type: as for its `get_act_name`: `("scale", 0, "ln1")`.
        model: our model, a `models.Transformer`, where the answer depends on its config: ours are the
            queries after rotation, for instance. Without it, values that differ in many models are
            refused; those that differ in few (a norm of the embeddings, biases of a gated MLP) are taken to be
            the same.
        version: 2 for `HookedTransformer`, 4 for `TransformerBridge`.

    Raises:
        UnknownNameError: if TransformerLens has no such name, or none of our points is known to have that
            value; then it says what the value is.
        ValueError: if the version is another.

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
    row = table[key]
    if not row.has_value_in(model):
        raise UnknownNameError(f"{theirs} {_explained(version, row, layers)}", theirs)
    return _in_layer(row.ours, layers)


def name_hint(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """The error for a name of TransformerLens, with ours."""
    # Quick, because `in` asks it for every name.
    if not ("hook_" in name or name in _ALIASES or name in _SHORT):
        return None
    key, layers = _key(_full(name), _tables()[4])
    if key is None or any("hook_" in other for other in known):  # it may be a model of theirs
        return None
    version = 2 if key in _tables()[2] else 4
    explained = _explained(version, _tables()[version][key], layers, known=False)
    adds = "; what attention adds is attn_out" if name == "attn" else ""
    return UnknownNameError(f"no {what} is named {name!r}: that {explained}{adds}", name)


def _explained(version: int, row: _Row, layers: str, known: bool = True) -> str:
    """The meaning of a value of theirs; with `known=False` in a model that is not known."""
    ours = _in_layer(row.ours, layers)
    note = _in_layer(row.note.format(ours=ours), layers)
    if not note or (row.usual and not known):
        note = f"is {ours} here"
    return f"of TransformerLens {version} {note}"


def _in_layer(text: str, layers: str) -> str:
    return text.replace("blocks.*.", f"blocks.{layers}.")


def _key(theirs: str, table: Iterable[str]) -> tuple[str | None, str]:
    """The name in the table, and what stands for the layer. A name without its first parts may be in any."""
    match = re.match(r"blocks\.([^.]+)\.", theirs)
    layers = match[1] if match else "*"
    pattern = re.sub(
        r"\bexperts\.[^.]+", "experts.*", re.sub(r"^blocks\.[^.]+", "blocks.*", theirs)
    )
    if pattern in table:
        return pattern, layers
    tail = pattern.lstrip("*.")
    fitting = [key for key in table if key.endswith(f".{tail}") and "experts" not in key]
    return (fitting[0] if len(fitting) == 1 else None), layers


def _full(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The name that their `get_act_name` gives, without the place in a block if that is not said."""
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
