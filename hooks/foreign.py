"""Words of TransformerLens, each with what it is called here.

1. A name is made full, as its `get_act_name` does, and its layer is taken out: `q3` is `blocks.*.attn.hook_q`.
2. A table says which of our points has that value. Where that depends on the model, it says on what of its config.
3. Where none has it, the error says how to get it from those there are.
"""

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

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
    "prepend_bos": "model.to_tokens(texts, bos=True or False)",
    "padding_side": "model.to_tokens(texts, side='left')",
    "loss_per_token": "nothing: models.next_token_loss(logits, tokens) gives each",
    "past_kv_cache": "kv_cache=",
    "reset_hooks_end": "nothing: hooks end with the call",
    "return_cache_object": "nothing: dict(cache) is a plain dict",
}
"""Arguments of TransformerLens, and what does the same here."""

_ADDED = "HookedRunner(model).add({name: function})"
_PARTS_OF_STREAM = "interp.decompose(model, cache)"
ATTRIBUTES = {
    "run_with_cache": "HookedRunner(model).run_with_cache(tokens)",
    "run_with_hooks": "HookedRunner(model).run_with_hooks(tokens, hooks={name: function})",
    "hooks": "HookedRunner(model).hooks({name: function})",
    "add_hook": _ADDED,
    "add_perma_hook": _ADDED,
    "reset_hooks": "handle.remove(), where add gave the handle; runner.handles has all",
    "hook_dict": "HookedRunner(model).points",
    "cfg": "model.config",
    "to_str_tokens": "model.to_pieces(tokens)",
    "to_string": "model.to_text(tokens)",
    "to_single_token": "model.to_id(text)",
    "generate": "models.generate(model, prompts, max_new_tokens=9), or generate_text",
    "loss_fn": "models.next_token_loss(logits, tokens)",
    "fold_layer_norm": "models.fold_norms(model)",
    "center_writing_weights": "models.center(model)",
    "center_unembed": "models.center(model)",
    "process_weights_": "models.fold_norms(models.center(model))",
    "OV": "interp.ov_circuit(model)",
    "QK": "interp.qk_circuit(model)",
    "all_composition_scores": "interp.composition_scores(model, kind)",
    "tokens_to_residual_directions": "interp.token_directions(model, tokens)",
    "remove_batch_dim": "cache.at(batch=0)",
    "cache_dict": "dict(cache)",
    "stack_activation": "cache.stack(name)",
    "compute_head_results": _PARTS_OF_STREAM,
    "stack_head_results": _PARTS_OF_STREAM,
    "stack_neuron_results": "interp.decompose(model, cache, neurons=True)",
    "decompose_resid": _PARTS_OF_STREAM,
    "get_full_resid_decomposition": _PARTS_OF_STREAM,
    "accumulated_resid": "cache.stack('resid_pre'), or interp.accumulated for what it says of logits",
    "logit_attrs": "interp.direct_logit_attribution(model, cache, right=token)",
    "apply_ln_to_stack": "interp.apply_norm(model, cache, values, layer)",
}
"""Methods and attributes of TransformerLens' objects, and what does the same here."""


class SaysOurs:
    """A class whose error for an attribute of TransformerLens says what does the same here."""

    if not TYPE_CHECKING:  # or any attribute would pass for one

        def __getattr__(self, name: str) -> Any:
            inherited = getattr(super(), "__getattr__", None)  # that of a module finds its parts
            try:
                if inherited is not None:
                    return inherited(name)
            except AttributeError:
                if name not in ATTRIBUTES:
                    raise
            hint = f"; here it is {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


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
        raise UnknownNameError(f"{theirs} {_explained(version, row, layers)}", theirs)
    return _in_layer(row.ours, layers)


ATTACH = " (models.attach(model) gives a model of transformers the names of points)"


def unknown_point(name: str, known: Collection[str], what: str) -> UnknownNameError:
    """The error for a `name` that no `what` has; for a name of TransformerLens it says ours."""
    # Quick, because `in` asks it for every name.
    foreign = "hook_" in name or name in _ALIASES or name in _SHORT
    key, layers = _key(_full(name), TABLE_4) if foreign else (None, "")
    if key is None or any("hook_" in other for other in known):  # it may be a model of theirs
        error = unknown_name(name, known, what)
        hint = ""
        if name.endswith("features"):
            hint = " (features of a dictionary are there inside `with interp.splice(model, sae)`)"
        elif name.startswith(("blocks.", "*.")) and not any("blocks." in other for other in known):
            hint = ATTACH
        error.args = (f"{error.args[0]}{hint}",)
        return error
    version = 2 if key in TABLE_2 else 4
    explained = _explained(version, TABLES[version][key], layers, known=False)
    return UnknownNameError(f"no {what} is named {name!r}: that {explained}", name)


def _explained(version: int, row: Row, layers: str, known: bool = True) -> str:
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
    key, _ = _key(short, TABLE_2)
    if layer is None or key is None:
        return key or short
    return key.replace("blocks.*", f"blocks.{layer}")
