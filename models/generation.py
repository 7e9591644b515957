"""Generation: prompts of any lengths go on, token by token, from cached keys and values."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.checks import check_tokens, check_whole
from models.kvcache import KVCache
from models.sampling import Sampling
from models.transformer import Transformer

Prompts = Int[Tensor, "batch pos"] | Sequence[Sequence[int]]
"""Tokens of each prompt; in a list they may differ in length."""
NO_DROPOUT = "generation needs a model without dropout: call model.eval() first"
RULE = "prompts are integers of shape [batch, pos] or a list of lists of them"


@dataclass(frozen=True)
class Step:
    """One more token for each row.

    Attributes:
        tokens: the new token of each row.
        running: whether the row had not met a stop token before; if not, its token means nothing.
        logits: what the tokens were chosen from, before temperature and cuts.
    """

    tokens: Int[Tensor, " batch"]
    running: Bool[Tensor, " batch"]
    logits: Float[Tensor, "batch vocab"]


def generate(
    model: Transformer,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Iterable[int] = (),
    seed: int | torch.Generator = 0,
    max_context: int | None = None,
    prefill_chunk: int = 1024,
) -> list[list[int]]:
    """Each prompt with its continuation, up to and with a stop token.

    A row of a batch gets what it would get alone, up to rounding: other numbers of rows are multiplied
    by other kernels, so that two all but equally probable tokens may change places.

    Hooks in force act in every step. To keep values of all steps in one cache,
    `runner.run_with_cache(prompts, run=functools.partial(generate, model, max_new_tokens=20))`: its
    positions are those of the prompt and of all new tokens but the last, which the model does not read.

    Args:
        model: in eval mode.
        prompts: tokens [batch, pos], or a list of prompts of any lengths.
        max_new_tokens: how many tokens to add at most.
        temperature, top_k, top_p, min_p: see `Sampling`; temperature 0 takes the most probable token.
        stop: tokens that end a row.
        seed: row i draws from a generator of its own, seeded with `seed + i`, so alone with that seed
            it draws the same; or one generator that all rows draw from in turn.
        max_context: the most positions to hold; None for the model's `n_ctx`.
        prefill_chunk: how many positions of the prompts are read at once.

    Raises:
        ValueError: if an option is outside its range, a prompt is empty or does not fit with its
            continuation, or the model is in training mode; before any work.
            Later, if the logits of a row that has not ended are no numbers.
        TypeError: if the model is none of this package's.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=9, n_layers=1, n_heads=2, d_model=4)
    >>> rows = generate(Transformer(config).eval(), [[1, 2], [3]], max_new_tokens=3)
    >>> [len(row) for row in rows]
    [5, 4]
    """
    texts = _as_lists(prompts)
    steps = stream(
        model,
        texts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
        seed=seed,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
    )
    made = [(step.tokens, step.running) for step in steps]
    tokens = torch.stack([token for token, _ in made], 1).tolist()
    lengths = torch.stack([running for _, running in made], 1).sum(1).tolist()
    new = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    return [prompt + row for prompt, row in zip(texts, new, strict=True)]


def stream(
    model: Transformer,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Iterable[int] = (),
    seed: int | torch.Generator = 0,
    max_context: int | None = None,
    prefill_chunk: int = 1024,
) -> Iterator[Step]:
    """The steps of `generate`, one at a time as they are made; arguments and errors as there.

    The errors come at the call, before the first step is asked for. A caller may change a step's
    tensors: the next step does not read them.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    texts, stop = _as_lists(prompts), _as_stops(stop)
    _check(model, texts, max_new_tokens, stop, seed, max_context, prefill_chunk)
    device = model.token_embedding.weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    generators: list[torch.Generator] = []
    if isinstance(seed, torch.Generator):
        generators = [seed] * len(texts)
    elif not sampling.is_greedy:
        seeds = range(index(seed), index(seed) + len(texts))
        generators = [torch.Generator(device).manual_seed(own) for own in seeds]
    mask = None
    if min(map(len, texts)) < longest:
        places = torch.arange(longest + max_new_tokens, device=device)
        mask = places >= longest - lengths[:, None]
    limit = model.config.n_ctx if max_context is None else max_context
    reader = _Reader(model, KVCache(min(limit, longest + max_new_tokens)), mask, prefill_chunk)
    return _steps(reader, tokens, sampling, generators, stop, max_new_tokens)


class _Reader:
    """Feeds tokens to a model and gives the logits after the last of them."""

    def __init__(self, model: Transformer, cache: KVCache, mask: Tensor | None, chunk: int) -> None:
        self._model, self._cache, self._mask, self._chunk = model, cache, mask, chunk

    # Not around the generator below: between its steps the caller's own mode would be changed.
    @torch.no_grad()
    def __call__(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch vocab"]:
        if self._model.training:
            raise ValueError(NO_DROPOUT)
        for chunk in tokens.split(self._chunk, 1) if tokens.shape[1] > self._chunk else [tokens]:
            end = self._cache.length + chunk.shape[1]
            mask = None if self._mask is None else self._mask[:, :end]
            logits = self._model(chunk, attention_mask=mask, kv_cache=self._cache, last=1)
        return logits[:, -1]


def _steps(
    reader: _Reader,
    tokens: Tensor,
    sampling: Sampling,
    generators: list[torch.Generator],
    stop: list[int],
    count: int,
) -> Iterator[Step]:
    stops = torch.tensor(stop, device=tokens.device)
    running = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(count):
        logits = reader(tokens)
        # A row that has ended goes on with anything, so that it cannot fail.
        finite = logits if not stop or running.all() else torch.where(running[:, None], logits, 0.0)
        new = sampling.choose(finite, generators)
        yield Step(new.clone(), running.clone(), logits)
        if stop:
            running = running & ~torch.isin(new, stops)
            if not running.any():
                return
        tokens = new[:, None]


def _as_lists(prompts: Prompts) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        check_tokens(prompts, RULE)
        return prompts.tolist()
    try:
        return [[index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise ValueError(f"{RULE}, not {str(prompts)[:50]!r}") from None


def _as_stops(stop: Iterable[int]) -> list[int]:
    try:
        return [index(token) for token in stop]
    except TypeError:
        raise ValueError(f"stop is a list of tokens, not {str(stop)[:50]!r}") from None


def _check(
    model: Transformer,
    texts: list[list[int]],
    new: int,
    stop: list[int],
    seed: int | torch.Generator,
    max_context: int | None,
    prefill_chunk: int,
) -> None:
    """Raises ValueError if generation could not run to its end."""
    if not isinstance(model, Transformer):
        raise TypeError(
            f"generation runs a models.Transformer, not a {type(model).__name__}; models.from_hf makes "
            "one of a transformers model"
        )
    vocab, n_ctx = model.config.vocab_size, model.config.n_ctx
    if any(module.training for module in model.modules()):
        raise ValueError(NO_DROPOUT)
    check_whole("max_new_tokens", new)
    check_whole("prefill_chunk", prefill_chunk)
    if not isinstance(seed, torch.Generator):
        check_whole("seed", seed, least=-math.inf)
        first, last = -(2**63), 2**64 - len(texts)
        if not first <= seed <= last:
            raise ValueError(f"seed is {first} to {last} for {len(texts)} rows, not {seed}")
    if max_context is not None:
        check_whole("max_context", max_context)
    empty = [row for row, text in enumerate(texts) if not text]
    if empty or not texts:
        raise ValueError(
            f"prompts have at least one token; of {len(texts)}, these rows are empty: {empty}"
        )
    for what, tokens in (("stop tokens", stop), *((f"prompt {i}", t) for i, t in enumerate(texts))):
        outside = [token for token in tokens if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"{what}: tokens are 0 to {vocab - 1}, not {outside[0]}")
    if max_context is not None and max_context > n_ctx:
        raise ValueError(f"max_context is 1 to the model's context of {n_ctx}, not {max_context}")
    limit, longest = max_context or n_ctx, max(map(len, texts))
    if longest + new > limit:
        what = "max_context" if max_context else "the model's context"
        raise ValueError(
            f"a prompt of {longest} tokens and {new} new ones do not fit {what} of {limit}"
        )
