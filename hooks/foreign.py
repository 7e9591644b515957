"""Words of TransformerLens, each with what it is called here.

1. A name is made full, as its `get_act_name` does, and its layer is taken out: `q3` is `blocks.*.attn.hook_q`.
2. A table says which of our points has that value. Where that depends on the model, it says on what of its config.
3. Where none has it, the error says how to get it from those there are.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from hooks.errors import UnknownNameError, unknown_name
from hooks.foreign_names import TABLE_2, TABLE_4, Row

ARGUMENTS = {
    "names_filter": "names=, with names, globs, or a predicate on a point",
    "fwd_hooks": "hooks={name: function}",
    "bwd_hooks": "backward={name: function}",
    "incl_bwd": "grads=True",
    "return_type": "nothing: the model returns logits, and interp.metrics takes a loss from them",
    "stop_at_layer": "capture(..., names='blocks.L.resid_pre'), which stops there",
    "start_at_layer": "starting_at_layer=",
    "pos_slice": "positions=",
    "remove_batch_dim": "nothing: index the cached values",
}
"""Arguments of TransformerLens, and what does the same here."""

TABLES = {2: TABLE_2, 4: TABLE_4}

# Short names in TransformerLens: those that stand for others, and those that are the ends of no name of ours.
_ALIASES = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v"}
_ALIASES |= {"mlp_pre": "pre", "mlp_mid": "mid", "mlp_post": "post"}
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_SHORT = {"attn_scores", "rot_q", "rot_k", "result", "pre_linear", "attn_in", "mlp_in"}
_SHORT |= {"q_input", "k_input", "v_input"}


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
            refused; those that differ in few (a norm of the embeddings, shortformer positions, biases
            of a gated MLP) are taken to be the same.
        version: 2 for `HookedTransformer`, 4 for `TransformerBridge`.

    Raises:
        UnknownNameError: if TransformerLens has no such name, or none of our points is known to have that
            value; then it says what the value is.
        ValueError: if the version is another.

    >>> hooks_name("blocks.3.attn.hook_rot_q"), hooks_name("pattern", 3), hooks_name("resid_pre")
    ('blocks.3.attn.q', 'blocks.3.attn.pattern', 'blocks.*.resid_pre')
    """
    if version not in TABLES:
        raise ValueError(f"version must be one of {', '.join(map(str, TABLES))}; got {version}")
    theirs = _full(*name) if isinstance(name, tuple) else _full(name, layer, layer_type)
    key, layers = _key(theirs, TABLES[version])
    if key is None:
        raise unknown_name(theirs, TABLES[version], f"point of TransformerLens {version}")
    row = TABLES[version][key]
    if not row.has_value_in(model):
        raise UnknownNameError(_explained(theirs, version, row, layers))
    return _in_layer(row.ours, layers)


def unknown_point(name: str, known: Iterable[str], what: str) -> UnknownNameError:
    """The error for a `name` that no `what` has; for a name of TransformerLens it says ours."""
    # Quick, because `in` asks it for every name.
    foreign = "hook_" in name or name in _ALIASES or name in _SHORT
    key, layers = _key(_full(name), TABLE_4) if foreign else (None, "")
    if key is None:
        return unknown_name(name, known, what)
    version = 2 if key in TABLE_2 else 4
    explained = _explained(name, version, TABLES[version][key], layers)
    return UnknownNameError(f"no {what} is named {name!r}: {explained}", name)


def _explained(theirs: str, version: int, row: Row, layers: str) -> str:
    ours = _in_layer(row.ours, layers)
    note = _in_layer(row.note.format(ours=ours), layers) or f"is {ours} here"
    return f"{theirs} of TransformerLens {version} {note}"


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
    key, _ = _key(short, TABLE_2)
    if layer is None or key is None:
        return key or short
    return key.replace("blocks.*", f"blocks.{layer}")
