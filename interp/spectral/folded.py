"""The weights of attention heads as they act on the stream, with norms folded in."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import at_least_float32, require_integer, require_kind, stacked, to_device
from interp.graph.norms import LinearPart, linear_part
from interp.protocol import plain

FoldedReading = Float[Tensor, "layer head d_model d_head"]
Writing = Float[Tensor, "layer head d_head d_model"]


def part_of(owner: Any, name: str, purpose: str) -> Any:
    """Return a named part of a model.

    Args:
        owner: the model, or a part of it.
        name: the name of the part.
        purpose: the use of the part, for the error.

    Raises:
        TypeError: if the part is missing.
    """
    if not hasattr(owner, name):
        raise TypeError(
            f"the model must have `{name}` to {purpose} (an identity if it does nothing); got "
            f"{type(owner).__name__} without `{name}`: load the model with models.from_hf"
        )
    return getattr(owner, name)


class FoldedWeights:
    """A model's weights as they act on row vectors: `x @ W`, in at least float32.

    A norm divides by its scale, which depends on the text. All other effects of a norm are linear
    and are folded in: gains, and for LayerNorm the subtraction of the mean. Biases are left out.
    All weights are on the device of the model's first parameter.

    Args:
        model: see `LanguageModel`; an attached model is copied, if `models.from_hf` knows its
            family.
        fold: whether norms are folded in. False returns the model's own weights.
        weights: the names of the weights that are read.

    Raises:
        TypeError: if a weight is missing. If `fold`, also if the model has no `ln_final`, if a
            block has no `ln1` or `ln1_post`, or if one of these modules is not a LayerNorm, an
            RMSNorm, an identity or a norm with an attribute `centres`. A model without one of these
            norms must have an identity in its place.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`).
    """

    def __init__(self, model: nn.Module, fold: bool, *weights: str) -> None:
        require_kind("fold", fold, kind=bool, words="True or False")
        self.model: Any = plain(model, "config", "blocks", *weights)
        self.fold = fold
        if fold and getattr(self.model.config, "norm_place", "pre") == "post":
            raise ValueError(
                "norm_place must be 'pre', 'output' or 'sandwich' to fold norms; got 'post', where "
                "norms normalize the stream itself: use fold=False"
            )
        self.reads = [self._linear(block, "ln1") for block in self.model.blocks]
        self.writes = [self._linear(block, "ln1_post") for block in self.model.blocks]
        self.final = self._linear(self.model, "ln_final")
        # If all norms that read the stream subtract the mean over d_model, the mean of what a
        # sublayer writes has no effect, and is subtracted from the weights.
        self.centred = all(part.centres for part in (*self.reads, self.final))

    def _linear(self, owner: Any, name: str, *shape: int) -> LinearPart:
        """Return the linear part of a norm, or the identity without folding."""
        if not self.fold:
            return linear_part(None)
        shape = shape or (self.model.config.d_model,)
        return linear_part(part_of(owner, name, "fold norms"), *shape)

    def _weight(self, name: str) -> Tensor:
        """Return a weight of the model, without folding, on the device of its first parameter."""
        weight = getattr(self.model, name).detach()
        devices = (parameter.device for parameter in self.model.parameters())
        return to_device(weight, next(devices, weight.device))

    def read(self, name: str) -> Float[Tensor, "layer _kv_head d_model d_head"]:
        """Return `W_Q`, `W_K` or `W_V` with the norm before attention folded in."""
        layers = zip(self.reads, at_least_float32(self._weight(name)), strict=True)
        return stacked(part.before(weight.mT).mT for part, weight in layers)

    def values(self) -> FoldedReading:
        """Return `W_V` of every head with the norm before attention folded in."""
        return self._by_head(self.read("W_V"))

    def written(self) -> Writing:
        """Return `W_O` with the norm after attention folded in, if there is one."""
        layers = zip(self.writes, at_least_float32(self._weight("W_O")), strict=True)
        weights = stacked(part.after(weight) for part, weight in layers)
        return weights - weights.mean(-1, keepdim=True) if self.centred else weights

    def mlp(self, layer: int, name: str) -> Float[Tensor, "rows columns"]:
        """Return `W_in` or `W_out` of the MLP of one block with its norm folded in.

        Args:
            layer: the block.
            name: `W_in` or `W_out`.
        """
        block = self.model.blocks[layer]
        weight = getattr(part_of(block, "mlp", f"read {name}"), name).detach()
        weights = at_least_float32(to_device(weight, self._weight("W_E").device))
        if name == "W_in":
            return self._linear(block, "ln2").before(weights.mT).mT
        written = self._linear(block, "ln2_post").after(weights)
        return written - written.mean(-1, keepdim=True) if self.centred else written

    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """Return `W_E` times the model's `embed_scale`, with the norm after it folded in, if there
        is one.
        """
        weights = at_least_float32(self._weight("W_E"))
        weights = weights * getattr(self.model.config, "embed_scale", 1.0)
        return self._linear(self.model, "ln_embed").after(weights)

    def unembedding(
        self, tokens: Int[Tensor, " token"] | None = None
    ) -> Float[Tensor, "d_model token"]:
        """Return `W_U` with the final norm folded in, or the columns of some tokens.

        With `fold`, the mean over the vocabulary is subtracted unless logits are capped. This
        subtraction does not change probabilities.
        """
        weights = self._weight("W_U")
        chosen = weights if tokens is None else weights[:, to_device(tokens, weights.device)]
        columns = at_least_float32(chosen)
        if self.fold and not getattr(self.model.config, "logit_cap", 0):
            columns = columns - weights.mean(-1, keepdim=True, dtype=columns.dtype)
        return self.final.before(columns.mT).mT

    def queries_and_keys(self, distance: int | None) -> tuple[FoldedReading, FoldedReading]:
        """Return `W_Q` and `W_K` of every head.

        With rotary positions, they include the rotations of a query and of a key that is `distance`
        positions before it.

        With `fold`, they also include the norm before attention, and the gains of the norms of
        queries and keys.

        Raises:
            TypeError: if the model's attention has no `rotary`, or no `q_norm` and `k_norm`.
            ValueError: if positions are rotary and `distance` is not from 0 to n_ctx - 1.
        """
        n_ctx = self.model.config.n_ctx
        require_integer("distance", 0 if distance is None else distance, least=0, most=n_ctx - 1)
        queries = self._turned_layers("W_Q", norm="q_norm", pos=distance)
        return queries, self._turned_layers("W_K", norm="k_norm", pos=0)

    def _turned_layers(self, name: str, norm: str, pos: int | None) -> FoldedReading:
        """Return `W_Q` or `W_K` of every head, with the rotation at position `pos`."""
        layers = zip(self.model.blocks, self.read(name), strict=True)
        turned = stacked(
            self._turned(block.attn, weight, norm=norm, pos=pos) for block, weight in layers
        )
        return self._by_head(turned)

    def _turned(self, attn: Any, weights: Tensor, norm: str, pos: int | None) -> Tensor:
        """Return weights of queries or keys with the gain of their norm and their rotation.

        Args:
            attn: the attention of the block.
            weights: the weights, [head, d_model, d_head].
            norm: the name of the norm of queries or keys.
            pos: the position of the query or key, for the rotation.
        """
        # Treat the weights like the queries of a text, with a position for each row.
        rows = rearrange(weights, "head d_model d_head -> 1 d_model head d_head")
        rows = self._linear(attn, norm, *rows.shape[2:]).after(rows)
        rotary = part_of(attn, "rotary", "rotate queries and keys")
        # Compute the rotation again. The rotation of a run is rounded to the model's dtype.
        rotation = rotary.rotation(torch.tensor([[pos or 0]], device=rows.device), rows.dtype)
        if rotation is not None and pos is None:
            raise ValueError(
                "distance must be the number of positions from key to query, because positions "
                "are rotary; got None"
            )
        return rearrange(rotary(rows, rotation), "1 d_model head d_head -> head d_model d_head")

    def _by_head(self, weights: Tensor) -> Tensor:
        """Return the weights of every head. Heads may share the weights of keys or values."""
        return weights.repeat_interleave(self.model.config.n_heads // weights.shape[1], 1)
