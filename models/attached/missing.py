"""The usual points that an attached model does not have, each with its reason."""

from collections.abc import Mapping, Sequence
from typing import Any

from hooks import HookedRunner
from models.attached.layout import BlockLayout

USUAL = (
    *("resid_pre", "ln1.scale", "ln1.normalized", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z"),
    *("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out", "resid_post"),
)  # fmt: skip
"""The points of a usual block, by the last parts of their names."""

ADDED = ("attn_out", "mixer_out", "mlp_out")
SUMMED = ("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out")
"""Those that say what is added to the stream, and those that are found by such sums."""


def missing(
    model: Any, layouts: Sequence[BlockLayout], known: Mapping[str, str], prefix: str = ""
) -> dict[str, str]:
    """The usual points that some block, or the model's end, is without, and why, beside those whose reason is known."""
    points, reasons = HookedRunner(model).points, dict[str, str]()
    for name in USUAL:
        without = [n for n in range(len(layouts)) if f"{prefix}blocks.{n}.{name}" not in points]
        if without and not {name, *name.split(".")} & {*known}:
            others = all(f"{prefix}blocks.{n}.mixer_out" in points for n in without)
            scaled = all(layouts[n].reads_first for n in without)
            some = f"block {', '.join(map(str, without))}"
            if name.startswith("attn") and others:
                why = f"{some} has another mixer of positions, mixer_out"
            elif name in SUMMED and not any(
                f"{prefix}blocks.{n}.{part}" in points for n in without for part in ADDED
            ):
                why = "the stream that leaves the block is no sum of what entered and modules' outputs"
            elif name in ("mlp_out", "resid_mid") and scaled:
                why = "what is added after attention is scaled, or a sum of several"
            else:
                where = "any block" if len(without) == len(layouts) else some
                why = f"no module of {where} takes it in or gives it out"
            reasons[name] = why
    attentions = [layout.attention for layout in layouts if layout.attention is not None]
    inside = (name.split(".") for attention in attentions for name, _ in attention.named_modules())
    if any("router" in parts for parts in inside):
        reasons["attn.router"] = "attention chooses among experts by a router of its own"
    if f"{prefix}ln_final.normalized" not in points:
        reasons["ln_final"] = "no norm of one module comes after the last block"
    return reasons
