"""Tied weights: the unembedding's weight is the token embedding's own, also after weights were loaded."""

from typing import Any

from torch import Tensor, nn

from models.checks import can_be_read
from models.weights import BlockWeights


def tie(model: BlockWeights) -> None:
    """Makes the unembedding's weight that of the token embedding.

    `load_state_dict` then keeps them one parameter, with `assign=True` too, and takes either name or
    both. It raises a ValueError if the two names have different values: PyTorch would keep the last.
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
            f"{names[1]} must equal {names[0]} where they are tied, and it differs; a model with "
            "tied_unembed=False has both"
        )
    if given:
        # `load_state_dict` gives it the requires_grad of the weight that it replaces.
        shared = nn.Parameter(given[0], requires_grad=False)
        state_dict.update(dict.fromkeys(names, shared))


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold different numbers; NaN equals NaN here, and types may differ."""
    if one.shape != other.shape:
        return True
    if one is other or not (can_be_read(one) and can_be_read(other)):
        return False
    other = other.to(one.device)
    return not bool(((one == other) | (one.isnan() & other.isnan())).all())
