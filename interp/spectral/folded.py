"""The weights of attention heads as they act on the stream, with the norms around them folded in."""

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
    """A named part of a model.

    Raises:
        TypeError: if it lacks the part.
    """
    if not hasattr(owner, name):
        raise TypeError(
            f"the model must have `{name}` to {purpose}, an identity where it does nothing; got "
            f"{type(owner).__name__} without it (models.from_hf makes a model that has it)"
        )
    return getattr(owner, name)


class FoldedWeights:
    """Weights of a model for row vectors, as they act: `x @ W`, in at least float32.

    A norm divides by its scale, which depends on the text. Everything else that it does is linear, and is
    folded in: gains, and for LayerNorm the mean, which nothing reads. Biases are left out. All are on the
    device of the model's first parameter.

    Args:
        model: see `LanguageModel`; an attached one is copied, if `models.from_hf` knows its family.
        fold: False for the weights as the model holds them.
        weights: the names of those that are read.

    Raises:
        TypeError: if the model lacks such weights; or if `fold`, and it lacks `ln_final`, or its blocks
            `ln1` or `ln1_post`, identities where there is no norm; or one is a norm of another kind.
        ValueError: if `fold`, and the norms are of the stream itself (`norm_place="post"`).
    """

    def __init__(self, model: nn.Module, fold: bool, *weights: str) -> None:
        require_kind("fold", fold, bool, "True or False")
        self.model: Any = plain(model, "config", "blocks", *weights)
        self.fold = fold
        if fold and getattr(self.model.config, "norm_place", "pre") == "post":
            raise ValueError(
                "norm_place must be 'pre', 'output' or 'sandwich' to fold norms, as others norm the "
                "stream itself; got 'post': use fold=False"
            )
        self.reads = [self._linear(block, "ln1") for block in self.model.blocks]
        self.writes = [self._linear(block, "ln1_post") for block in self.model.blocks]
        self.final = self._linear(self.model, "ln_final")
        # The mean of what is written has no effect if all that read it subtract it.
        self.centred = all(part.centres for part in (*self.reads, self.final))

    def _linear(self, owner: Any, name: str, *shape: int) -> LinearPart:
        if not self.fold:
            return linear_part(None)
        shape = shape or (self.model.config.d_model,)
        return linear_part(part_of(owner, name, "fold norms"), *shape)

    def _held(self, name: str) -> Tensor:
        held = getattr(self.model, name).detach()
        return to_device(held, next((w.device for w in self.model.parameters()), held.device))

    def read(self, name: str) -> Float[Tensor, "layer _kv_head d_model d_head"]:
        """`W_Q`, `W_K` or `W_V`."""
        layers = zip(self.reads, at_least_float32(self._held(name)), strict=True)
        return stacked(part.before(w.mT).mT for part, w in layers)

    def values(self) -> FoldedReading:
        """`W_V` of every head."""
        return self._by_head(self.read("W_V"))

    def written(self) -> Writing:
        """`W_O`."""
        layers = zip(self.writes, at_least_float32(self._held("W_O")), strict=True)
        held = stacked(part.after(w) for part, w in layers)
        return held - held.mean(-1, keepdim=True) if self.centred else held

    def mlp(self, layer: int, name: str) -> Float[Tensor, "rows columns"]:
        """`W_in` or `W_out` of the MLP of one block."""
        block = self.model.blocks[layer]
        held = getattr(part_of(block, "mlp", f"read {name}"), name).detach()
        weights = at_least_float32(to_device(held, self._held("W_E").device))
        if name == "W_in":
            return self._linear(block, "ln2").before(weights.mT).mT
        written = self._linear(block, "ln2_post").after(weights)
        return written - written.mean(-1, keepdim=True) if self.centred else written

    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """`W_E`, times the model's `embed_scale`."""
        held = at_least_float32(self._held("W_E"))
        held = held * getattr(self.model.config, "embed_scale", 1.0)
        return self._linear(self.model, "ln_embed").after(held)

    def unembedding(
        self, tokens: Int[Tensor, " token"] | None = None
    ) -> Float[Tensor, "d_model token"]:
        """`W_U`, or its columns at some tokens.

        Folded also without the mean over the vocabulary, which changes no probability, unless there is a
        cap.
        """
        held = self._held("W_U")
        here = tokens if tokens is None else to_device(tokens, held.device)
        columns = at_least_float32(held if here is None else held[:, here])
        if self.fold and not getattr(self.model.config, "logit_cap", 0):
            columns = columns - held.mean(-1, keepdim=True, dtype=columns.dtype)
        return self.final.before(columns.mT).mT

    def queries_and_keys(self, distance: int | None) -> tuple[FoldedReading, FoldedReading]:
        """`W_Q` and `W_K`, rotated as for a key `distance` positions before the query.

        Folded, they have the gains of norms of queries and keys.

        Raises:
            TypeError: if the model's attention lacks `rotary`, or `q_norm` and `k_norm`.
            ValueError: if positions are rotary and there is no distance from 0 to n_ctx - 1.
        """
        n_ctx = self.model.config.n_ctx
        require_integer("distance", 0 if distance is None else distance, 0, n_ctx - 1)
        weights = []
        for name, norm, pos in (("W_Q", "q_norm", distance), ("W_K", "k_norm", 0)):
            layers = zip(self.model.blocks, self.read(name), strict=True)
            turned = stacked(self._turned(block.attn, w, norm, pos) for block, w in layers)
            weights.append(self._by_head(turned))
        return weights[0], weights[1]

    def _turned(self, attn: Any, weights: Tensor, norm: str, pos: int | None) -> Tensor:
        # As the queries of a text, whose positions are the rows.
        rows = rearrange(weights, "head d_model d_head -> 1 d_model head d_head")
        rows = self._linear(attn, norm, *rows.shape[2:]).after(rows)
        rotary = part_of(attn, "rotary", "rotate queries and keys")
        # Not the rotation of a run, which has the rounding of the model's dtype.
        rotation = rotary.rotation(torch.tensor([[pos or 0]], device=rows.device), rows.dtype)
        if rotation is not None and pos is None:
            raise ValueError(
                "distance must say how far a key is before its query, as positions are rotary; got None"
            )
        return rearrange(rotary(rows, rotation), "1 d_model head d_head -> head d_model d_head")

    def _by_head(self, weights: Tensor) -> Tensor:
        return weights.repeat_interleave(self.model.config.n_heads // weights.shape[1], 1)
