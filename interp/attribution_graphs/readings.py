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
    """Several linear functions of one value of the run, such as the encoders of a transcoder.

    Each function reads the value at one position: `direction · value[pos] + offset`.

    Attributes:
        reading: the value that all functions read, with the norm whose output it is.
        stage: the number of sublayers below the value, where each block counts as two sublayers;
            see `Targets`.
        pos: the position that each function reads.
        direction: the direction of each function.
        offset: the constant that each function adds.
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
