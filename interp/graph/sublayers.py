"""The branches of a block and their sublayers: the parts that a graph reads, with their types.

A graph accepts the blocks of any model and knows their parts only by name; see
`interp.protocol.LanguageModel`. `heads_of`, `divided_of` and `neurons_of` give the sublayer of a
branch a type, so that a type checker knows its parts.
"""

from typing import Any, Literal, Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from interp.graph.norms import is_identity
from interp.protocol import Adapter

SublayerKind = Literal["attn", "mixer", "mlp"]
"""The kind of a sublayer. A mixer moves information between positions without attention."""


@runtime_checkable
class BlockBranch(Protocol):
    """One branch of a block: a sublayer with its norms.

    The branch reads the residual stream, and adds a vector to it. The vector is
    `after(sublayer(norm(stream)))`. `reads` is the point of the stream, and `added` is the point of
    the vector.
    """

    @property
    def reads(self) -> nn.Module:
        """The point that has the stream before the branch."""

    @property
    def norm(self) -> nn.Module:
        """The norm before the sublayer; an identity if there is none."""

    @property
    def sublayer(self) -> nn.Module:
        """Attention, a mixer or the MLP."""

    @property
    def after(self) -> nn.Module:
        """The norm after the sublayer; an identity if there is none."""

    @property
    def added(self) -> nn.Module:
        """The point that has the vector which the branch adds to the stream."""

    def __call__(
        self, stream: Float[Tensor, "batch pos d_model"], *context: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the branch adds to a stream."""

    def finished(
        self, output: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the branch adds to the stream, from an output of the sublayer."""


class SeparateHeads(Protocol):
    """Attention whose heads are separate writers: head h adds `z[:, :, h] @ W_O[h]`."""

    z: nn.Module
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Float[Tensor, " d_model"]


class DividedAttention(SeparateHeads, Protocol):
    """Attention whose queries, keys and values are separate readers.

    Some analyses also need points: the queries, keys and values, the scores and the pattern, and
    `qkv`, the map to queries, keys and values with one `weight`.
    """

    q: nn.Module
    k: nn.Module
    v: nn.Module
    qkv: nn.Module
    scores: nn.Module
    pattern: nn.Module
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "kv_head d_head"]
    b_V: Float[Tensor, "kv_head d_head"]

    def project(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of all heads."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Any) -> Tensor:
        """Return the output of attention.

        Args:
            q, k, v: the results of `project`.
            context: the other inputs of the block.
        """


class Neurons(Protocol):
    """An MLP whose neurons are separate writers: neuron n adds `post[:, :, n] * W_out[n]`."""

    post: nn.Module
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, " d_model"]


def has_heads(branch: BlockBranch) -> bool:
    """Return True if the outputs of heads are known, as in `SeparateHeads`."""
    return hasattr(branch.sublayer, "W_O")


def heads_of(branch: BlockBranch) -> SeparateHeads:
    """Return the sublayer of a branch that has heads; see `has_heads`."""
    return cast(SeparateHeads, branch.sublayer)


def is_divided(branch: BlockBranch) -> bool:
    """Return True if queries, keys and values are separate, as in `DividedAttention`."""
    return hasattr(branch.sublayer, "project")


def divided_of(branch: BlockBranch) -> DividedAttention:
    """Return the sublayer of a branch with divided attention; see `is_divided`."""
    return cast(DividedAttention, branch.sublayer)


def neurons_of(branch: BlockBranch) -> Neurons:
    """Return the sublayer of a branch of the kind `mlp`."""
    return cast(Neurons, branch.sublayer)


def weight_of(branch: BlockBranch) -> Tensor:
    """Return a weight of a branch, which has the dtype and the device of its block."""
    return heads_of(branch).W_O if has_heads(branch) else cast(Tensor, branch.sublayer.weight)


def scale_of(branch: BlockBranch) -> nn.Module | None:
    """Return the point of the scale of the norm after a branch; None if there is no norm."""
    return None if is_identity(branch.after) else cast(nn.Module, branch.after.scale)


def kind_of(branch: BlockBranch, number: int) -> SublayerKind:
    """Return the kind of a branch. Without a `kind`, the first is attention and others are MLPs."""
    kind: SublayerKind | None = getattr(branch, "kind", None)
    return kind or ("mlp" if number else "attn")


def adapter_of(branch: BlockBranch) -> Adapter | None:
    """Return the adapter of a branch's output map, or None; see `interp.protocol.Adapter`."""
    adapter: Adapter | None = getattr(branch.sublayer, "adapter", None)
    return adapter


def reads_context(branch: BlockBranch, kind: SublayerKind) -> bool:
    """Return True if a branch reads the context of its block. Most MLPs do not."""
    return kind != "mlp" or getattr(branch.sublayer, "reads_context", False)


def require_branches(blocks: nn.ModuleList) -> None:
    """Raise an error if blocks have no branches, or if their stream is not a sum of outputs."""
    for block in blocks:
        if not hasattr(block, "branches"):
            raise TypeError(
                f"a graph needs blocks with branches; got a {type(block).__name__} without "
                "branches (models.from_hf returns a model with branches)"
            )
        if any(branch.joined for branch in block.branches):  # type: ignore[union-attr]
            raise ValueError(
                "norm_place must be 'pre', 'output' or 'sandwich' for a graph; got 'post', where "
                "the stream is not the sum of the outputs of the writers"
            )
