"""Read and write nodes of attribution graphs in Neuronpedia's JSON.

Files of circuit-tracer, Neuronpedia, Anthropic and this package can be read.

The format has features, errors, tokens and logits. Positions and constants are written as
embeddings with special names. The programs use different names for nodes, so nodes that are read
get the names of `Node`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from interp.attribution_graphs.nodes import Node, NodeKind

_TYPES: Mapping[NodeKind, str] = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "token": "embedding",
    "position": "embedding",
    "bias": "embedding",
    "logit": "logit",
}
_KINDS: Mapping[str, NodeKind] = {
    **{name: kind for kind, name in [*_TYPES.items()][::-1]},
    # Graphs of Anthropic contain this type, and their page displays it as a feature.
    "unexplored node": "feature",
}
_EMBEDDINGS: Mapping[str, NodeKind] = {"E": "token", "P": "position", "B": "bias"}
# Names look like `1_57794_2`, or `1_cro_57794_2` on Neuronpedia's server.
_NAME = re.compile(r".+_(-?\d+)_(\d+)")
# Labels look like `Output " a" (p=0.250)`, and begin with `Logit` on Neuronpedia's server and
# `output:` at Anthropic.
_LOGIT = re.compile(r"""(?:Output|Logit|output:) (["'])(.*)\1 \(p=[^)]*\)""", re.DOTALL)


def node_facts(node: Node, best: float) -> dict[str, Any]:
    """Return a node as a JSON object in Neuronpedia's format.

    Args:
        node: the node.
        best: the largest probability of a logit. Logits with this probability are marked as target
            logits.
    """
    first, second, _ = node.id.split("_")
    layer, number = node.layer, node.number
    script_id = f"{first}_{second}-0"
    if node.kind == "feature":
        # The format stores the layer and the number as one integer, by Cantor's pairing function.
        number = (layer + number) * (layer + number + 1) // 2 + number
    elif layer < 0:
        # The pages merge embeddings that have the same number and position, so the numbers must
        # differ.
        number = {"token": node.pos, "position": -2 - node.pos}.get(node.kind, -1)
        script_id = f"{first}_{second}-{node.pos}"
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


def read(data: Mapping[str, Any], tokens: Sequence[str], labels: Mapping[str, str]) -> Node:
    """Return the node that a JSON object describes, with the name that `Node` defines.

    Args:
        data: the JSON object.
        tokens: the tokens of the text.
        labels: the labels that a user gave to features in a page. A key is the entry `feature` of
            the object, or `layer_feature_pos`.

    Raises:
        KeyError: if a part is missing.
        ValueError: if the type of the node is unknown, or its name, layer or position is
            impossible.
    """
    name = data["node_id"]
    pos = int(data["ctx_idx"])
    kind = _kind_of(data)
    _require_place(name, str(data["layer"]), pos, n_tokens=len(tokens))
    number = _number_in_name(name, kind)
    label = _label_of(data, kind, labels)
    layer = -1 if str(data["layer"]) == "E" else int(data["layer"])
    first = str(data["layer"])
    chance = None
    if kind == "logit":
        layer = _number_of_layers(data, layer)
        first = str(layer + 1)
        # Differences of logits have no probability, and the format contains 0 for them.
        chance = number_or_none(data, "token_prob") or None
    elif kind in _EMBEDDINGS.values():
        first = name.partition("_")[0]
    return Node(
        id=f"{first}_{number}_{pos}",
        kind=kind,
        layer=layer,
        pos=pos,
        number=number,
        label=tokens[pos] if kind == "token" else label,
        activation=number_or_none(data, "activation"),
        probability=chance,
        influence=number_or_none(data, "influence"),
    )


def _kind_of(data: Mapping[str, Any]) -> NodeKind:
    """Return the kind of a node. The names of embeddings contain their kind.

    Raises:
        ValueError: if the type in the file is unknown.
    """
    kind = _KINDS.get(data["feature_type"])
    if kind is None:
        raise ValueError(
            f"feature_type of {data['node_id']} must be one of {', '.join(_KINDS)}; got "
            f"{data['feature_type']!r}"
        )
    if kind in _EMBEDDINGS.values():
        return _EMBEDDINGS.get(data["node_id"].partition("_")[0], "token")
    return kind


def _number_in_name(name: str, kind: NodeKind) -> int:
    """Return the number of a node, which is in its name; -1 for errors.

    Raises:
        ValueError: if the name contains no number and position.
    """
    if kind == "error":
        return -1
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise ValueError(f"the name of a node must end in its number and position; got {name!r}")
    return int(matched[1])


def _label_of(data: Mapping[str, Any], kind: NodeKind, labels: Mapping[str, str]) -> str:
    """Return the label of a node.

    Args:
        data: the JSON object.
        kind: the kind of the node.
        labels: the labels that a user gave to features; see `read`.
    """
    feature = data["feature"]
    label = data.get("clerp") or ""
    if kind == "logit":
        label_of_token = _LOGIT.fullmatch(label)
        return label_of_token[2] if label_of_token else label
    if kind != "feature":
        return label
    # Neuronpedia's server writes this label for features without a label.
    label = "" if label == f"F{feature}" else label
    keys = (str(feature), f"{data['layer']}_{feature}_{int(data['ctx_idx'])}")
    return next((labels[key] for key in keys if labels.get(key)), label)


def _number_of_layers(data: Mapping[str, Any], layer: int) -> int:
    """Return the number of layers of the model, from the layer of a logit.

    circuit-tracer and this package write the number of layers plus 1. The server and Anthropic
    write the number of layers.
    """
    script_id = data["jsNodeId"]
    is_one_more = script_id != data["node_id"] and "_-" not in script_id
    return layer - 1 if is_one_more else layer


def _require_place(name: str, layer: str, pos: int, n_tokens: int) -> None:
    """Check the layer and the position of a node.

    Raises:
        ValueError: if the layer is neither `E` nor a number, or the position does not exist.
    """
    if layer != "E" and not layer.isdecimal():
        raise ValueError(f"the layer of {name} must be E or a number; got {layer!r}")
    if not 0 <= pos < n_tokens:
        raise ValueError(f"ctx_idx of {name} must be in [0, {n_tokens}); got {pos}")


def number_of(data: Mapping[str, Any], name: str) -> float:
    """Return a number of a node or a link.

    Args:
        data: the JSON of the node or link.
        name: the name of the number.

    Raises:
        KeyError: if the number is missing.
        ValueError: if the value is no number. The error names the value.
    """
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        owner = data.get("node_id") or f"{data.get('source')} -> {data.get('target')}"
        raise ValueError(f"{name} of {owner} must be a number; got {value!r}")
    return value


def number_or_none(data: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a node, or None if it is null or missing.

    Args:
        data: the JSON of the node.
        name: the name of the number.

    Raises:
        ValueError: if the value is anything else. The error names the value.
    """
    return None if data.get(name) is None else number_of(data, name)


def state(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Return the pinned nodes, the groups of nodes, and the labels of nodes that a page has saved.

    Neuronpedia saves lists. The page of circuit-tracer saves the parameters of its URL: a text with
    the content of each list, or null for an empty list.
    """
    pins = data.get("pinnedIds") or []
    pins = pins.split(",") if isinstance(pins, str) else [*pins]
    listed = (data.get(name) or [] for name in ("supernodes", "clerps"))
    groups, labels = (json.loads(part) if isinstance(part, str) else part for part in listed)
    return pins, groups, dict(labels)
