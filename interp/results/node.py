"""Names of the nodes of a model's graph, with the kind, the layer and the number of the node."""

from typing import Any

# For each kind of node, the name without the number of the block: `a` for attention, `x` for
# another mixer of positions or `m` for the MLP, and then the part of it.
_PARTS = {
    "head": "a.h{}",
    **{kind: f"a.h{{}}<{kind}>" for kind in "qkv"},
    "attn_bias": "a.bias",
    "attn": "a",
    "mixer": "x",
    "attn_adapter": "a.adapter",
    "mlp_adapter": "m.adapter",
    "mlp": "m",
    "neuron": "m.n{}",
    "expert": "m.e{}",
    "shared": "m.shared",
    "mlp_bias": "m.bias",
}


class NodeName(str):
    """The name of a writer or a reader of the residual stream, as text, as in `interp.graph.Graph`.

    Attributes:
        kind: `head`, its readers `q`, `k` and `v`, `attn_bias`, `attn_adapter`; `attn` for
            attention that is one node; `mixer`; `mlp`, `neuron`, `expert`, `shared`, `mlp_bias`,
            `mlp_adapter`. For a node outside of blocks, such as `embed`, its name.
        part: the name without the number of the block, such as `a.h1` and `m`.
        layer: the number of the block; None outside of blocks.
        number: the number of the head, the neuron or the expert.
    """

    kind: str
    part: str
    layer: int | None
    number: int | None

    def __new__(cls, name: str, **what: Any) -> "NodeName":
        """Create the name of a node.

        Args:
            name: the whole name.
            what: all attributes of the node. Default: attributes of a node outside of blocks.
        """
        node = super().__new__(cls, name)
        outside_of_blocks = {"kind": name, "part": name, "layer": None, "number": None}
        vars(node).update(outside_of_blocks | what)
        return node


def node_name(layer: int, kind: str, number: int | None = None) -> NodeName:
    """Return the name of a node of a block.

    Args:
        layer: the number of the block.
        kind: the kind of the node; see `NodeName`.
        number: the number of the head, the neuron or the expert; None for other nodes.

    >>> node_name(2, "head", 1), node_name(2, "q", 1), node_name(0, "mlp"), node_name(5, "mixer")
    ('a2.h1', 'a2.h1<q>', 'm0', 'x5')
    """
    part = _PARTS[kind].format(number)
    name = f"{part[0]}{layer}{part[1:]}"
    return NodeName(name, kind=kind, part=part, layer=layer, number=number)


def as_fact(label: Any) -> Any:
    """Return a label in a form for JSON, which `from_fact` reads."""
    return {"name": label, **vars(label)} if isinstance(label, NodeName) else label


def from_fact(fact: Any) -> Any:
    """Return the label that `as_fact` converted."""
    return NodeName(**fact) if isinstance(fact, dict) else fact
