"""Nodes of attribution graphs in Neuronpedia's JSON, which circuit-tracer writes too.

It has features, errors, tokens and logits. Positions and constants are written as embeddings with names of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from interp.tracing.nodes import Kind, Node

_TYPES: dict[Kind, str] = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "token": "embedding",
    "position": "embedding",
    "bias": "embedding",
    "logit": "logit",
}
_KINDS: dict[str, Kind] = {name: kind for kind, name in [*_TYPES.items()][::-1]}
_EMBEDDINGS: dict[str, Kind] = {"E": "token", "P": "position", "B": "bias"}


def written(node: Node, best: float) -> dict[str, Any]:
    """A node as JSON. Logits whose probability is `best` are the chosen ones."""
    first, second, _ = node.id.split("_")
    layer, number = node.layer, node.number
    script_id = f"{first}_{second}-0"
    if node.kind == "feature":
        number = (layer + number) * (layer + number + 1) // 2 + number  # Cantor's pairing
    elif node.kind in ("token", "position", "bias"):
        number, script_id = node.pos, f"{first}_{second}-{node.pos}"
    elif node.kind == "logit":
        script_id = f"L_{second}-{node.pos}"
    else:
        script_id = f"{first}_{second}-{node.pos}"
    chance = node.probability or 0.0
    label = f'Output "{node.label}" (p={chance:.3f})' if node.kind == "logit" else node.label
    return {
        "node_id": node.id,
        "feature": number,
        "layer": "E" if layer < 0 else first,
        "ctx_idx": node.pos,
        "feature_type": _TYPES[node.kind],
        "token_prob": chance,
        "is_target_logit": node.kind == "logit" and chance == best,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": script_id,
        "clerp": label,
        "influence": node.influence,
        "activation": node.activation,
    }


def read(data: Mapping[str, Any], tokens: Sequence[str]) -> Node:
    """The node of some JSON, with our name.

    Raises:
        ValueError: if it is of an unknown type.
    """
    name, pos, label = data["node_id"], data["ctx_idx"], data.get("clerp") or ""
    if data["feature_type"] not in _KINDS:
        raise ValueError(
            f"a node must be one of {', '.join(_KINDS)}; got {data['feature_type']!r} as {name}"
        )
    kind = _KINDS[data["feature_type"]]
    first, *middle = name.split("_")
    number = int(middle[0])
    layer = -1 if data["layer"] == "E" else int(data["layer"])
    if layer < 0:
        kind = _EMBEDDINGS.get(first, "token")
        label = label or (tokens[pos] if kind == "token" else "")
    if kind == "error":
        name, number = f"{layer}_-1_{pos}", -1
    if kind == "logit":
        layer -= 1
        label = label.removeprefix('Output "').rpartition('" (p=')[0] or label
    chance = data.get("token_prob") if kind == "logit" else None
    return Node(
        name, kind, layer, pos, number, label, data.get("activation"), chance, data.get("influence")
    )
