"""Words of TransformerLens, each with what it is called here.

1. A name is made full, as its `get_act_name` does, and its layer is taken out: `q3` is `blocks.*.attn.hook_q`.
2. A table says which of our points has that value. Where that depends on the model, it says on what of its config.
3. Where none has it, the error says how to get it from those there are.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hooks.errors import UnknownNameError, unknown_name

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

Config = Any  # a `TransformerConfig` of `models`, or any other


@dataclass(frozen=True)
class Row:
    """A value that has a name in TransformerLens.

    Attributes:
        ours: our point, with `*` for the layer; empty if none has the value.
        note: what their value is, where ours is another.
        same: whether our point has the value in a model with this config; None for every model.
        usual: the answer of `same` where the model is not known.
    """

    ours: str = ""
    note: str = ""
    same: Callable[[Config], bool] | None = None
    usual: bool = False

    def has_value_in(self, model: nn.Module | None) -> bool:
        """Whether our point has the value in this model, as far as that is known."""
        if self.same is None:
            return bool(self.ours)
        try:
            return self.same(model.config)  # type: ignore[union-attr]
        except AttributeError:  # no model, or one whose config has other fields
            return self.usual


def _same(lines: str) -> dict[str, Row]:
    """Rows of values that are the same in every model, from lines of their name and ours."""
    return {theirs: Row(ours) for theirs, ours in map(str.split, lines.strip().splitlines())}


def _normalized(note: str, same: Callable[[Config], bool]) -> dict[str, Row]:
    norms = ("blocks.*.ln1", "blocks.*.ln2", "blocks.*.ln1_post", "blocks.*.ln2_post", "ln_final")
    return {f"{name}.hook_normalized": Row(f"{name}.normalized", note, same) for name in norms}


def _projected(part: str, index: int) -> Row:
    formula = f"model.blocks[L].attn.project(cache['ln1.normalized', L])[{index}]"
    note = f"is before QK-norm and rotation, and {{ours}} after both: it is {formula}"
    same = lambda c: c.positions != "rotary" and c.qk_norm == "none"  # noqa: E731
    return Row(f"blocks.*.attn.{part}", note, same)


def _read_alone(value: str, reader: str) -> Row:
    edited = f"an edit there reaches {reader} alone, as interp.edge_patching does here"
    return Row(note=f"has the value of {value}; {edited}")


_STREAM = "blocks.*.resid_pre for each head"
_MIDDLE = "blocks.*.resid_mid (resid_pre in parallel blocks)"
_GAIN = "is before RMSNorm's gain, and {ours} after: it is {ours} / gain, the norm's weight"
_GAIN_AND_BIAS = (
    "is before the norm's gain and bias, and {ours} after: it is ({ours} - bias) / gain"
)
_SCORES = (
    "is after cap and mask, and blocks.*.attn.scores before both: it is scores.masked_fill("
    "~models.causal_mask(n), -inf), with a cap that of cap * tanh(scores / cap)"
)
_RESULT = (
    "is z @ W_O of each head: einsum('bphd,hdm->bphm', cache['z', L], model.blocks[L].attn.W_O), or what "
    "interp.decompose gives for all layers"
)

TABLE_2: dict[str, Row] = {
    **_same("""
        embed.ln.hook_scale             ln_embed.scale
        embed.ln.hook_normalized        ln_embed.normalized
        blocks.*.hook_resid_pre         blocks.*.resid_pre
        blocks.*.ln1.hook_scale         blocks.*.ln1.scale
        blocks.*.attn.hook_rot_q        blocks.*.attn.q
        blocks.*.attn.hook_rot_k        blocks.*.attn.k
        blocks.*.attn.hook_v            blocks.*.attn.v
        blocks.*.attn.hook_pattern      blocks.*.attn.pattern
        blocks.*.attn.hook_z            blocks.*.attn.z
        blocks.*.ln1_post.hook_scale    blocks.*.ln1_post.scale
        blocks.*.hook_attn_out          blocks.*.attn_out
        blocks.*.hook_resid_mid         blocks.*.resid_mid
        blocks.*.ln2.hook_scale         blocks.*.ln2.scale
        blocks.*.mlp.hook_pre           blocks.*.mlp.pre
        blocks.*.mlp.hook_pre_linear    blocks.*.mlp.linear
        blocks.*.mlp.hook_mid           blocks.*.mlp.mid
        blocks.*.mlp.ln.hook_scale      blocks.*.mlp.ln.scale
        blocks.*.mlp.ln.hook_normalized blocks.*.mlp.ln.normalized
        blocks.*.ln2_post.hook_scale    blocks.*.ln2_post.scale
        blocks.*.hook_mlp_out           blocks.*.mlp_out
        blocks.*.hook_resid_post        blocks.*.resid_post
        ln_final.hook_scale             ln_final.scale
    """),
    **_normalized(_GAIN, lambda c: c.norm != "rmsnorm" or not c.norm_learned),
    "hook_embed": Row(
        "embed",
        "is after the norm of embeddings: ln_embed.normalized",
        lambda c: not c.embed_norm,
        usual=True,
    ),
    "hook_pos_embed": Row(
        "pos_embed",
        "is blocks.*.attn.pos_embed with shortformer positions",
        lambda c: c.positions != "shortformer",
        usual=True,
    ),
    "hook_tokens": Row(note="is cache.inputs['tokens']"),
    "blocks.*.attn.hook_q": _projected("q", 0),
    "blocks.*.attn.hook_k": _projected("k", 1),
    "blocks.*.attn.hook_attn_scores": Row(note=_SCORES),
    "blocks.*.attn.hook_result": Row(note=_RESULT),
    "blocks.*.attn.hook_attn_input": Row(note="never fires there"),
    "blocks.*.hook_attn_in": _read_alone(_STREAM, "attention"),
    "blocks.*.hook_q_input": _read_alone(_STREAM, "the queries"),
    "blocks.*.hook_k_input": _read_alone(_STREAM, "the keys"),
    "blocks.*.hook_v_input": _read_alone(_STREAM, "the values"),
    "blocks.*.hook_mlp_in": _read_alone(_MIDDLE, "the MLP"),
    "blocks.*.mlp.hook_post": Row(
        "blocks.*.mlp.post",
        "has b_in added after the gate's product: it is {ours} + b_in",
        lambda c: c.mlp != "gated" or not c.mlp_bias,
        usual=True,
    ),
    **{
        f"blocks.*.attn.{norm}.hook_{value}": Row(
            note=f"is no point here; the output of that norm is the module's, blocks.*.attn.{norm}"
        )
        for norm in ("q_norm", "k_norm")
        for value in ("scale", "normalized")
    },
    **{
        f"blocks.*.mlp.{name}": Row(note="is of a mixture of experts, which is not read here")
        for name in (
            *("hook_expert_weights", "hook_expert_indices"),
            *(f"experts.*.hook_{value}" for value in ("gate", "pre", "post")),
        )
    },
}
"""Every point of `HookedTransformer`."""

TABLE_4: dict[str, Row] = {
    **TABLE_2,
    **_same("""
        blocks.*.hook_in            blocks.*.resid_pre
        blocks.*.hook_out           blocks.*.resid_post
        blocks.*.ln1.hook_out       blocks.*.ln1.normalized
        blocks.*.attn.hook_in       blocks.*.ln1.normalized
        blocks.*.attn.v.hook_out    blocks.*.attn.v
        blocks.*.attn.o.hook_in     blocks.*.attn.z
        blocks.*.ln2.hook_out       blocks.*.ln2.normalized
        blocks.*.mlp.hook_in        blocks.*.ln2.normalized
        blocks.*.mlp.hook_post      blocks.*.mlp.post
        blocks.*.mlp.gate.hook_out  blocks.*.mlp.pre
        blocks.*.mlp.out.hook_in    blocks.*.mlp.post
        ln_final.hook_out           ln_final.normalized
        unembed.hook_in             ln_final.normalized
        unembed.hook_out            unembedding
        hook_unembed                unembedding
        embed.hook_out              embed
    """),
    **_normalized(_GAIN_AND_BIAS, lambda c: c.norm == "none" or not c.norm_learned),
    "pos_embed.hook_out": TABLE_2["hook_pos_embed"],
    "ln_final.hook_in": Row(note="is the last block's resid_post: cache['resid_post', -1]"),
    "blocks.*.ln1.hook_in": _read_alone("blocks.*.resid_pre", "the norm"),
    "blocks.*.ln2.hook_in": _read_alone(_MIDDLE, "the norm"),
    "blocks.*.attn.q.hook_out": TABLE_2["blocks.*.attn.hook_q"],
    "blocks.*.attn.k.hook_out": TABLE_2["blocks.*.attn.hook_k"],
    "blocks.*.mlp.in.hook_out": Row(
        "blocks.*.mlp.pre", "is blocks.*.mlp.linear in gated MLPs", lambda c: c.mlp != "gated"
    ),
    **{
        f"blocks.*.{part}.hook_out": Row(
            ours,
            "is before the norm of what the sublayer adds, and {ours} after",
            lambda c: c.norm_place == "pre",
        )
        for part, ours in {
            **dict.fromkeys(("attn", "attn.o"), "blocks.*.attn_out"),
            **dict.fromkeys(("mlp", "mlp.out"), "blocks.*.mlp_out"),
        }.items()
    },
}
"""The points of `TransformerBridge`: its own names, and those of before, which it also knows."""

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
