"""Names of the nodes of a model's graph, which know what they name."""

from typing import Any

# The part of a block that each kind of node is: attention or MLP, and what there.
_PARTS = {"head": "a.h{}", **{kind: f"a.h{{}}<{kind}>" for kind in "qkv"}, "attn_bias": "a.bias"}
_PARTS |= {"mlp": "m", "neuron": "m.n{}", "expert": "m.e{}", "shared": "m.shared", "mlp_bias": "m.bias"}  # fmt: skip


class NodeName(str):
    """The name of what writes to the residual stream or reads it: text, as in `interp.graph.Graph`.

    Attributes:
        kind: `head`, its readers `q`, `k` and `v`, `attn_bias`; `mlp`, `neuron`, `expert`, `shared`, `mlp_bias`. Of what is
            outside of blocks, such as `embed`, the name.
        part: the name without the number of the block, such as `a.h1` and `m`.
        layer: the number of the block; None outside.
        number: that of the head, the neuron or the expert.
    """

    kind: str
    part: str
    layer: int | None
    number: int | None

    def __new__(cls, name: str, **what: Any) -> "NodeName":
        """The name of what is outside of blocks, or of anything with all attributes given."""
        node = super().__new__(cls, name)
        vars(node).update({"kind": name, "part": name, "layer": None, "number": None} | what)
        return node


def node_name(layer: int, kind: str, number: int | None = None) -> NodeName:
    """Return the name of a part of a block; for arguments see `NodeName`.

    >>> node_name(2, "head", 1), node_name(2, "q", 1), node_name(0, "mlp")
    ('a2.h1', 'a2.h1<q>', 'm0')
    """
    part = _PARTS[kind].format(number)
    name = f"{part[0]}{layer}{part[1:]}"
    return NodeName(name, kind=kind, part=part, layer=layer, number=number)


def as_fact(label: Any) -> Any:
    """A label as JSON has it; `from_fact` reads it."""
    return {"name": label, **vars(label)} if isinstance(label, NodeName) else label


def from_fact(fact: Any) -> Any:
    """The label that `as_fact` wrote."""
    return NodeName(**fact) if isinstance(fact, dict) else fact
