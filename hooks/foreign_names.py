"""The points of TransformerLens, and which of ours have their values. See `foreign.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

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


def _added(sublayer: str) -> Row:
    formula = f"the output of the module blocks.*.{sublayer}"
    note = f"is before the norm of what the sublayer adds, and {{ours}} after: it is {formula}"
    return Row(f"blocks.*.{sublayer}_out", note, lambda c: c.norm_place == "pre")


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
        blocks.*.ln1_post.hook_out  blocks.*.attn_out
        blocks.*.ln2_post.hook_out  blocks.*.mlp_out
        blocks.*.ln1_post.hook_in   blocks.*.attn
        blocks.*.ln2_post.hook_in   blocks.*.mlp
    """),
    **_normalized(_GAIN_AND_BIAS, lambda c: c.norm == "none" or not c.norm_learned),
    "pos_embed.hook_out": TABLE_2["hook_pos_embed"],
    "embed.hook_in": TABLE_2["hook_tokens"],
    "ln_final.hook_in": Row(note="is the last block's resid_post: cache['resid_post', -1]"),
    **{
        name: Row(note="is no point here: positions and rotations are no values of the stream")
        for name in (
            "pos_embed.hook_in",
            "rotary_emb.hook_in",
            "rotary_emb.hook_out",
            "rotary_emb.hook_cos",
            "rotary_emb.hook_sin",
            "blocks.*.attn.hook_cos",
            "blocks.*.attn.hook_sin",
        )
    },
    "blocks.*.ln1.hook_in": _read_alone("blocks.*.resid_pre", "the norm"),
    "blocks.*.ln2.hook_in": _read_alone(_MIDDLE, "the norm"),
    "blocks.*.attn.q.hook_in": _read_alone("blocks.*.ln1.normalized", "the queries"),
    "blocks.*.attn.k.hook_in": _read_alone("blocks.*.ln1.normalized", "the keys"),
    "blocks.*.attn.v.hook_in": _read_alone("blocks.*.ln1.normalized", "the values"),
    "blocks.*.mlp.in.hook_in": _read_alone("blocks.*.ln2.normalized", "this map"),
    "blocks.*.mlp.gate.hook_in": _read_alone("blocks.*.ln2.normalized", "this map"),
    "blocks.*.attn.q.hook_out": TABLE_2["blocks.*.attn.hook_q"],
    "blocks.*.attn.k.hook_out": TABLE_2["blocks.*.attn.hook_k"],
    **{
        f"blocks.*.attn.{name}": Row(
            note=f"is the output of the module blocks.*.attn.{part}_norm, with heads before positions"
        )
        for part in "qk"
        for name in (f"{part}_norm.hook_out", f"hook_{part}_normed")
    },
    "blocks.*.attn.q_norm.hook_in": TABLE_2["blocks.*.attn.hook_q"],
    "blocks.*.attn.k_norm.hook_in": TABLE_2["blocks.*.attn.hook_k"],
    "blocks.*.mlp.in.hook_out": Row(
        "blocks.*.mlp.pre", "is blocks.*.mlp.linear in gated MLPs", lambda c: c.mlp != "gated"
    ),
    "blocks.*.attn.hook_out": _added("attn"),
    "blocks.*.attn.o.hook_out": _added("attn"),
    "blocks.*.attn.hook_hidden_states": _added("attn"),
    "blocks.*.mlp.hook_out": _added("mlp"),
    "blocks.*.mlp.out.hook_out": _added("mlp"),
}
"""The points of `TransformerBridge`: its own names, and those of before, which it also knows."""
