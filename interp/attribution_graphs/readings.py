"""Values of a frozen run that attention, transcoders and the unembedding read.

Linear functions of these values are here too.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from interp.graph.norms import LinearPart


class FrozenReading(NamedTuple):
    """A value of the run that attention, a transcoder or the unembedding reads, and the norm whose
    output it is.

    Attributes:
        name: the name of the hook point of the value.
        value: the value.
        linear: everything in the norm except the division by its scale. It is the identity if the
            value is the residual stream.
        scale: the values by which the norm divides. They are 1 if the value is the residual stream.
    """

    name: str
    value: Float[Tensor, "pos d_model"]
    linear: LinearPart
    scale: Float[Tensor, "pos 1"]


class LinearReads(NamedTuple):
    """Linear functions `direction · value + offset` of a value of the run.

    Attributes:
        reading: the value, and its norm.
        stage: the place of the value among the sublayers; see `Targets`.
        pos: the position of the value that each function reads.
        direction: the direction of each function.
        offset: the offset of each function.
    """

    reading: FrozenReading
    stage: int
    pos: Int[Tensor, " target"]
    direction: Float[Tensor, "target d_model"]
    offset: Float[Tensor, " target"]


class FrozenAttention(NamedTuple):
    """The attention of a layer.

    Attributes:
        reading: the value that attention reads.
        after: the linear part of the norm after attention.
        bias, constant: the biases of the output; see `interp.graph.nodes.Added`.
        value_constant: the constant part of the value vectors of all heads: their bias, and the
            bias of the norm times `W_V`.
    """

    reading: FrozenReading
    after: LinearPart
    bias: Float[Tensor, " d_model"]
    constant: Float[Tensor, " d_model"]
    value_constant: Float[Tensor, " head_d_head"]
