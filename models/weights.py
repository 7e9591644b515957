"""Weights by their names in the literature, for `x @ W`, and the tied unembedding."""

from operator import attrgetter
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooks._torch import Component
from hooks.transfer import stacked
from models.checks import can_be_read
from models.linear import Linear


class BlockWeights(Component):
    """A transformer's weights by their usual names, stacked over its blocks.

    They are computed at each access, on the first block's device if blocks are on several. The weights of one block (`blocks[3].attn.W_Q`) are views. A bias
    that the config switches off is zeros; weights of a part that the model lacks, such as a gate, raise an
    AttributeError.
    """

    blocks: nn.ModuleList
    token_embedding: nn.Embedding
    position_embedding: Any
    unembedding: Linear

    def _stack(self, name: str) -> Tensor:
        return stacked(attrgetter(name)(block) for block in self.blocks)

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Token embeddings, before `embed_scale`."""
        return self.token_embedding.weight

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Learned position embeddings."""
        return self.position_embedding.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """The unembedding."""
        return self.unembedding.weight.T

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query projections."""
        return self._stack("attn.W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """Key projections."""
        return self._stack("attn.W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """Value projections."""
        return self._stack("attn.W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output projections of the heads."""
        return self._stack("attn.W_O")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Gate weights of gated MLPs."""
        return self._stack("mlp.W_gate")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Input weights of the MLPs."""
        return self._stack("mlp.W_in")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """Output weights of the MLPs."""
        return self._stack("mlp.W_out")

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Query biases."""
        return self._stack("attn.b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer kv_head d_head"]:
        """Key biases."""
        return self._stack("attn.b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer kv_head d_head"]:
        """Value biases."""
        return self._stack("attn.b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of attention."""
        return self._stack("attn.b_O")

    @property
    def b_gate(self) -> Float[Tensor, "layer d_mlp"]:
        """Gate biases of gated MLPs."""
        return self._stack("mlp.b_gate")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """Input biases of the MLPs."""
        return self._stack("mlp.b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of the MLPs."""
        return self._stack("mlp.b_out")

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """The bias of the unembedding."""
        return self.unembedding.offset


def tie(model: BlockWeights) -> None:
    """Makes the unembedding's weight the same parameter as the token embedding.

    `load_state_dict` then keeps them one parameter, even with `assign=True`, and accepts either name or
    both. If the two names have different values it raises a ValueError; PyTorch would keep the last.
    """
    model.unembedding.weight = model.token_embedding.weight
    nn.Module.register_load_state_dict_pre_hook(model, _load_one_for_both)


def _load_one_for_both(
    model: BlockWeights, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    if model.unembedding.weight is not model.token_embedding.weight:
        return  # untied since
    names = (f"{prefix}token_embedding.weight", f"{prefix}unembedding.weight")
    given = [state_dict[name] for name in names if name in state_dict]
    if len(given) == 2 and differ(*given):
        raise ValueError(
            f"{names[1]} must equal {names[0]}, to which it is tied; they differ: use a model with "
            "tied_unembed=False"
        )
    if given:
        # `load_state_dict` sets requires_grad to that of the replaced weight.
        shared = nn.Parameter(given[0], requires_grad=False)
        state_dict.update(dict.fromkeys(names, shared))


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold different numbers. NaN equals NaN, and dtypes may differ."""
    if one.shape != other.shape:
        return True
    if one is other or not (can_be_read(one) and can_be_read(other)):
        return False
    other = other.to(one.device)
    return not bool(((one == other) | (one.isnan() & other.isnan())).all())
