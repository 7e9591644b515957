"""Weights by their names in the literature, in the form `x @ W`, and the tied unembedding."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import Component, stacked
from models.checks import can_be_read
from models.linear import Linear


def _stacked(name: str, meaning: str) -> Any:
    """Return a property: the weights of one name in each block, stacked."""
    return property(lambda model: stacked(map(attrgetter(name), model.blocks)), doc=meaning)


def _part(joined: str, place: int, meaning: str) -> Any:
    """Return a property: the part for queries (0), keys (1) or values (2) of a joined map.

    Args:
        joined: the name of the method that returns the three parts.
        place: the number of the part.
        meaning: the docstring of the property.
    """
    return property(lambda attention: getattr(attention, joined)()[place], doc=meaning)


class NamedWeights:
    """The base of modules whose weights have names of the literature: `W_Q`, `b_in` and so on."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            AttributeError: for a name of the literature, which is a view or a copy of parameters.
        """
        if name[:2] in ("W_", "b_") and isinstance(getattr(type(self), name, None), property):
            place = "attn" if name[-1] in "QKVO" else "mlp"
            view = (
                f"model.blocks[0].{place}.{name}" if hasattr(self, "blocks") else f"{place}.{name}"
            )
            if name in ("W_E", "W_U", "W_pos", "b_U"):
                view = f"model.{name}"
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be assigned, because it is computed from "
                f"the parameters: write in place, inside torch.no_grad(), such as "
                f"{view}[...] = value"
            )
        super().__setattr__(name, value)


class AttentionWeights(NamedWeights):
    """The weights of one attention layer by their usual names.

    Attributes:
        qkv: the linear map to queries, keys and values of all heads.
        output: the output map.
        heads: the numbers of heads of queries, keys and values.
        d_head: the size of a head.
    """

    qkv: Linear
    output: Linear
    heads: Sequence[int]
    d_head: int

    W_Q: Float[Tensor, "head d_model d_head"] = _part("_weights", 0, "The query projections.")
    W_K: Float[Tensor, "kv_head d_model d_head"] = _part("_weights", 1, "The key projections.")
    W_V: Float[Tensor, "kv_head d_model d_head"] = _part("_weights", 2, "The value projections.")
    b_Q: Float[Tensor, "head d_head"] = _part("_biases", 0, "The query biases.")
    b_K: Float[Tensor, "kv_head d_head"] = _part("_biases", 1, "The key biases.")
    b_V: Float[Tensor, "kv_head d_head"] = _part("_biases", 2, "The value biases.")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projections, a view: `attn_out = sum over heads of z @ W_O + b_O`."""
        return rearrange(self.output.weight, "model (head d) -> head d model", d=self.d_head)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return self.output.offset

    def _weights(self) -> tuple[Tensor, ...]:
        """Return the weights of queries, keys and values, each [head, d_model, d_head]."""
        by_head = rearrange(self.qkv.weight, "(head d) model -> head model d", d=self.d_head)
        return by_head.split([*self.heads])

    def _biases(self) -> tuple[Tensor, ...]:
        """Return the biases of queries, keys and values, each [head, d_head]."""
        return self.qkv.offset.unflatten(0, (-1, self.d_head)).split([*self.heads])


class BlockWeights(NamedWeights, Component):
    """A transformer's weights by their usual names, stacked over its blocks.

    They are computed at each access. If blocks are on several devices, they are on the device of
    the first block. The weights of one block (`blocks[3].attn.W_Q`) are views. A bias that the
    config switches off is zero. Weights of a part that the model does not have, such as a gate,
    raise an AttributeError.
    """

    blocks: nn.ModuleList
    token_embedding: nn.Embedding
    position_embedding: Any
    unembedding: Linear

    W_Q: Float[Tensor, "layer head d_model d_head"] = _stacked("attn.W_Q", "Query projections.")
    W_K: Float[Tensor, "layer kv_head d_model d_head"] = _stacked("attn.W_K", "Key projections.")
    W_V: Float[Tensor, "layer kv_head d_model d_head"] = _stacked("attn.W_V", "Value projections.")
    W_O: Float[Tensor, "layer head d_head d_model"] = _stacked(
        "attn.W_O", "Output projections of the heads."
    )
    W_gate: Float[Tensor, "layer d_model d_mlp"] = _stacked(
        "mlp.W_gate", "Gate weights of gated MLPs."
    )
    W_in: Float[Tensor, "layer d_model d_mlp"] = _stacked("mlp.W_in", "Input weights of the MLPs.")
    W_out: Float[Tensor, "layer d_mlp d_model"] = _stacked(
        "mlp.W_out", "Output weights of the MLPs."
    )
    b_Q: Float[Tensor, "layer head d_head"] = _stacked("attn.b_Q", "Query biases.")
    b_K: Float[Tensor, "layer kv_head d_head"] = _stacked("attn.b_K", "Key biases.")
    b_V: Float[Tensor, "layer kv_head d_head"] = _stacked("attn.b_V", "Value biases.")
    b_O: Float[Tensor, "layer d_model"] = _stacked("attn.b_O", "Output biases of attention.")
    b_gate: Float[Tensor, "layer d_mlp"] = _stacked("mlp.b_gate", "Gate biases of gated MLPs.")
    b_in: Float[Tensor, "layer d_mlp"] = _stacked("mlp.b_in", "Input biases of the MLPs.")
    b_out: Float[Tensor, "layer d_model"] = _stacked("mlp.b_out", "Output biases of the MLPs.")

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
    def b_U(self) -> Float[Tensor, " vocab"]:
        """The bias of the unembedding."""
        return self.unembedding.offset


def tie(model: BlockWeights) -> None:
    """Make the weight of the unembedding the same parameter as the token embedding.

    After this, `load_state_dict` keeps one parameter, even with `assign=True`, and accepts either
    name or both. If the two names have different values, it raises a ValueError; PyTorch would keep
    the last value.
    """
    model.unembedding.weight = model.token_embedding.weight
    nn.Module.register_load_state_dict_pre_hook(model, _load_one_for_both)


def _load_one_for_both(
    model: BlockWeights, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Give both names of a tied weight the same parameter, before a state dict is loaded.

    Raises:
        ValueError: if the two names have different values.
    """
    if model.unembedding.weight is not model.token_embedding.weight:
        # The user has replaced one of the tied weights, so nothing is tied now.
        return
    names = (f"{prefix}token_embedding.weight", f"{prefix}unembedding.weight")
    values = [state_dict[name] for name in names if name in state_dict]
    if len(values) == 2 and differ(*values):
        raise ValueError(
            f"{names[1]} must equal {names[0]}, because they are tied; they differ: use a model "
            "with tied_unembed=False"
        )
    if values:
        # The value of requires_grad does not matter: `load_state_dict` takes it from the replaced
        # weight.
        shared = nn.Parameter(values[0], requires_grad=False)
        state_dict.update(dict.fromkeys(names, shared))


def differ(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors contain different numbers.

    NaN equals NaN, and dtypes may differ.
    """
    if first.shape != second.shape:
        return True
    if first is second or not (can_be_read(first) and can_be_read(second)):
        return False
    second = second.to(first.device)
    return not bool(((first == second) | (first.isnan() & second.isnan())).all())
