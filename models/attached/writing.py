"""Continuations of texts by an attached model, with the model's own `generate`."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hooks.base import Text, without_gradients


@without_gradients
def continuations(
    attached: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return the new tokens of each prompt, without the token that ends a row.

    Args:
        attached: the attached model.
        prompts: the tokens of each prompt.
        max_new_tokens: the largest number of new tokens.
        temperature: the temperature of random draws; 0 for the most probable tokens.
        seed: the seed of random draws. The generator of PyTorch itself does not change.

    Raises:
        TypeError: if the model has no method `generate`.
    """
    model = attached.model
    if not hasattr(model, "generate"):
        raise TypeError(f"the model must have a method generate; got a {type(model).__name__}")
    rows = [torch.tensor([*prompt]) for prompt in prompts]
    device = next(model.parameters()).device
    tokens, mask = Text.padded(rows, attached.pad_token, side="left", device=device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ends = _end_tokens(attached)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        texts = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens) if mask is None else mask.long(),
            max_new_tokens=max_new_tokens,
            pad_token_id=attached.pad_token,
            eos_token_id=[*ends] or None,
            **sampling,
        )
    new_rows = texts[:, tokens.shape[1] :].tolist()
    return [[*itertools.takewhile(lambda token: token not in ends, new)] for new in new_rows]


def _end_tokens(attached: Any) -> list[int]:
    """Return the tokens that end a text: of the generation config, and of the tokenizer."""
    named = getattr(getattr(attached.model, "generation_config", None), "eos_token_id", None)
    ends = {*getattr(attached.tokenizer, "eos_token_ids", ())}
    if named is not None:
        ends |= {named} if isinstance(named, int) else {*named}
    return sorted(ends)
