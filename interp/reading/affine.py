"""The common part of lenses: an affine map of each layer's stream.

The map is checked against its model and saved to disk.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import config_hash, explains_calls, require_gradients, storage, to_device
from hooks.shared import names_by_layer
from interp.json_form import Table, form
from interp.protocol import of, require_one_vector, runner_of

L = TypeVar("L", bound="AffineLens")
# The number of logits that are computed together: 32 MiB in float32.
_LOGITS_AT_ONCE = 2**23


def split_rows(
    resid: Float[Tensor, "stream row d_model"], vocab: int
) -> Sequence[Float[Tensor, "stream _row d_model"]]:
    """Return streams in parts of few rows, so that the logits of a part need little memory.

    Args:
        resid: the streams.
        vocab: the number of logits of each vector.
    """
    return resid.split(max(1, _LOGITS_AT_ONCE // (len(resid) * vocab)), 1)


def for_fit(model: nn.Module) -> tuple[HookedRunner, list[str]]:
    """Return a runner of the model, and the points of the stream that a lens is fitted to.

    The list of points contains the stream that enters each block, in the order of the blocks, and
    then the stream after the last block.

    Raises:
        UnknownNameError: if the model has no such points.
        ModeError: if any part of the model is in training mode.
        ValueError: if PyTorch's inference mode is on, or the stream has several vectors for each
            token.
    """
    require_gradients()
    runner = runner_of(model)
    entering, leaving = (
        names_by_layer(name, runner.points) for name in ("resid_pre", "resid_post")
    )
    names = [*entering.values(), leaving[max(leaving)]]
    require_one_vector(runner.points[names[0]].axes, names[0])
    return runner, names


@dataclass(frozen=True, eq=False, repr=False)
class AffineLens:
    """An affine map from the stream entering each block to the input of the unembedding.

    Attributes:
        weight: one matrix for each block. Row i computes entry i of the result.
        bias: one vector for each block.
        config_hash: the config hash of the model that the lens belongs to; empty if the model is
            unknown.
    """

    weight: Float[Tensor, "layer d_model d_model"]
    bias: Float[Tensor, "layer d_model"]
    config_hash: str

    _format: ClassVar[str]

    def __call__(
        self, resid: Float[Tensor, "layer *batch d_model"]
    ) -> Float[Tensor, "layer *batch d_model"]:
        """Return `weight[l] @ x + bias[l]` for each vector x that enters block l, in the dtype of
        x.
        """
        dtype = torch.promote_types(resid.dtype, self.weight.dtype)
        weight = to_device(self.weight, resid.device).to(dtype)
        bias = to_device(self.bias, resid.device).to(dtype)
        rows = resid.to(dtype).flatten(1, -2)
        return (rows @ weight.mT + bias[:, None]).to(resid.dtype).view_as(resid)

    def as_json(self) -> dict[str, Any]:
        """Return the size of each matrix, and facts about the fit, in the JSON form of all results;
        see `interp.json_form`.

        `distance` is the Frobenius norm of the matrix minus the identity. `save` writes the
        matrices.
        """
        layers, d_model = self.bias.shape
        identity = torch.eye(d_model, dtype=self.weight.dtype, device=self.weight.device)
        distance = (self.weight - identity).norm(dim=(1, 2))
        tables = {"distance": Table(distance, "layer", "Frobenius norm"), **self._tables()}
        about = {"layers": layers, "d_model": d_model, "config_hash": self.config_hash}
        return form(type(self).__name__, tables, about)

    def _tables(self) -> dict[str, Table]:
        """Return the tables of one kind of lens."""
        return {}

    def __repr__(self) -> str:
        """Return the kind of the lens and the sizes of its model."""
        layers, d_model = self.bias.shape
        return f"{type(self).__name__} [layer {layers}, d_model {d_model}]"

    @explains_calls
    def check(self, model: nn.Module) -> None:
        """Check that the lens has the sizes and the configuration of this model.

        Raises:
            ValueError: if they are different.
        """
        sizes = of(model, "config").config
        wanted = (sizes.n_layers, sizes.d_model, sizes.d_model)
        if self.weight.shape != wanted:
            raise ValueError(
                f"the lens must have weights [layer, d_model, d_model], {list(wanted)}; "
                f"got {list(self.weight.shape)}"
            )
        if self.config_hash and self.config_hash != (theirs := config_hash(model)):
            raise ValueError(
                f"the lens must be of a model with this model's config hash, {theirs[:12]}; "
                f"got {self.config_hash[:12]}: fit a lens to this model"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lens as safetensors, completely or not at all.

        Raises:
            FileNotFoundError: if the directory does not exist.
        """
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        others = {name: part for name, part in parts.items() if name not in tensors}
        storage.save(storage.path_of(path), self._format, tensors, others)

    @classmethod
    def load(cls: type[L], path: str | os.PathLike[str]) -> L:
        """Load a lens that `save` wrote.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged, or contains another kind of lens or other data.
        """
        with storage.opened(storage.path_of(path), cls._format) as (tensors, others):
            return cls(**tensors, **others)
