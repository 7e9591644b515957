"""Generation: continue prompts of any lengths token by token, with cached keys and values.

1. Check arguments and prompts before the model runs, and pad the prompts on the left
   (`generate_steps`).
2. Run the model on the prompts in chunks, and cache their keys and values (`_last_logits`).
3. Choose a token for each row from the logits of the last position, with `Sampling.choose`
   (`_steps`).
4. A row ends after a stop token. While any row continues, run the model on the new tokens and
   repeat step 3.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from hooks.base import (
    NoOthers,
    Piece,
    Prompt,
    Text,
    Texts,
    carried,
    explains_calls,
    hides_others,
    in_chunks,
    is_columns,
    is_integer,
    is_one_text,
    language_of,
    note_running,
    prompts_moved,
    refuse,
    require_integer,
    shown,
    skip_token_checks,
    to_device,
    uncompiled,
    without_gradients,
)
from hooks.shared import is_listened_to
from models.running.compiled import CompiledSteps, compile_options
from models.running.kvcache import KVCache
from models.running.prompts import IN_TRAINING, check_prompts, prompts_as_text, require_tokens
from models.running.sampling import Sampling, row_generator
from models.text.texts import ReadsText
from models.text.tokenizer import Tokenizer
from models.transformer import Transformer


@dataclass(frozen=True)
class Step:
    """One step of generation: a new token for each row.

    Attributes:
        tokens: the new token of each row.
        running: True for each row that has not generated a stop token in an earlier step. The
            tokens of all other rows have no meaning.
        logits: the logits of the new token, before temperature, top_k, top_p and min_p.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> step = next(generate_steps(model, "impor", max_new_tokens=1))
    >>> model.to_text(step.tokens), step.running.tolist()
    ('t', [True])
    """

    tokens: Int[Tensor, " batch"]
    running: Bool[Tensor, " batch"]
    logits: Float[Tensor, "batch vocab"]


class GenerationOptions(TypedDict, total=False):
    """The options that `generate` passes to `generate_steps`."""

    attention_mask: Shaped[Tensor, "batch pos"] | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    stop: int | Iterable[int] | None
    seed: int | torch.Generator
    max_context: int | None
    prefill_chunk: int
    compiled: bool | Mapping[str, Any]


@explains_calls
def generate(
    model: Transformer, prompts: Texts, *, max_new_tokens: int, **options: Unpack[GenerationOptions]
) -> list[list[int]]:
    """Return each prompt without padding, followed by its new tokens.

    If the model chooses a stop token, the row ends. The stop token is then the last new token of
    the row.

    Rows end at the `eos_token_ids` of the model's config, unless `stop` is given. The tokens of a
    row do not depend on the other rows of the batch, up to rounding. The kernels may depend on the
    batch size, so the order of two tokens with almost equal probabilities may change.

    Hooks act in every step. To cache the values of all steps, use
    `runner.run_with_cache(prompts, run=functools.partial(generate, model, max_new_tokens=20))`. The
    positions of a row in this cache are its prompt and its new tokens except the last, as in a
    generation of this row alone. The last token, which may be a stop token, is not read. If other
    rows continue, the later columns of the row count as padding: the mask of the cache is False
    there, and `pos=-1` is the token before the last.

    Args:
        model: a model in evaluation mode.
        prompts: texts of any lengths, in any form; see `Transformer.to_tokens`.
        max_new_tokens: the largest number of new tokens.
        options: `attention_mask`, `temperature`, `top_k`, `top_p`, `min_p`, `stop`, `seed`,
            `max_context`, `prefill_chunk` and `compiled`; see `generate_steps`.

    Returns:
        One list of tokens for each prompt, of different lengths.

    Raises:
        ValueError: if a sampling option is out of range, if a prompt is empty, if a prompt and its
            new tokens are too long, if a token is outside the vocabulary, if the mask has a wrong
            shape or wrong values, if the model is in training mode, or if logits are not finite.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> rows = generate(model, ["impor", "def __in"], max_new_tokens=2)
    >>> [model.to_text(row) for row in rows]
    ['import ', 'def __init']
    """
    _require(model, options.get("compiled"))
    refuse(options, generate_steps, "generate")
    text = prompts_as_text(model, prompts, options.pop("attention_mask", None))
    steps = generate_steps(model, text, max_new_tokens=max_new_tokens, **options)
    new = [(step.tokens, step.running) for step in steps]
    lengths = torch.stack([running for _, running in new], 1).sum(1)
    # Copy one tensor to the CPU, because each copy waits for the device.
    rows = torch.stack([lengths, *(tokens for tokens, _ in new)], 1).tolist()
    return [
        text + added[:length] for text, (length, *added) in zip(text.listed(), rows, strict=True)
    ]


@overload
def generate_text(
    model: nn.Module | ReadsText,
    prompts: str,
    *,
    max_new_tokens: int,
    **options: Unpack[GenerationOptions],
) -> str: ...


@overload
def generate_text(
    model: nn.Module | ReadsText,
    prompts: list[str],
    *,
    max_new_tokens: int,
    **options: Unpack[GenerationOptions],
) -> list[str]: ...


@overload
def generate_text(
    model: nn.Module | ReadsText,
    prompts: Texts,
    *,
    max_new_tokens: int,
    **options: Unpack[GenerationOptions],
) -> Any: ...


@explains_calls
def generate_text(
    model: nn.Module | ReadsText,
    prompts: Texts,
    *,
    max_new_tokens: int,
    **options: Unpack[GenerationOptions],
) -> Any:
    """Return a text with its continuation, or a list of texts with their continuations.

    An attached model of `transformers` continues the prompts with its own method `generate`.

    The model also reads the tokens that its tokenizer adds at the beginning of a text. These tokens
    are not in the result. If `stop` is not given, a row also ends at the end-of-text tokens of the
    tokenizer, and the result does not contain the end-of-text token. If `stop` is given, the result
    contains the stop token. If the last token ends inside a character, U+FFFD stands for it.

    Args:
        model: a model in evaluation mode, with a `tokenizer`: a `Transformer`, or a model of
            `transformers` after `attach`, or the result of `attach`.
        prompts: a text, or a batch of texts, in any form; see `Transformer.to_tokens`.
        max_new_tokens: the largest number of new tokens.
        options: see `generate_steps`. With an attached model, only `attention_mask`, `temperature`
            and `seed`.

    Returns:
        A text for a single text, otherwise a list with one text for each prompt.

    Raises:
        ValueError: see `generate_steps`. The tokenizer also raises this error if it does not know a
            character or a token.
        TypeError: if the model is not attached, or an attached model does not have an option.

    >>> from models import load
    >>> generate_text(load("pydoc-4l"), "impor", max_new_tokens=1)
    'import'
    """
    if not _is_attached(model) or options.get("compiled"):
        _require(model, options.get("compiled"))
    if "tokenizer" in options or hasattr(prompts, "decode"):
        raise TypeError(
            "generate_text takes texts and no tokenizer: set model.tokenizer = tokenizer"
        )
    refuse(options, generate_steps, "generate_text")
    language: Any = language_of(model) if isinstance(model, nn.Module) else model
    tokenizer: Tokenizer = language.require_tokenizer()
    is_one = is_one_text(prompts)
    several: list[Any] = [prompts] if is_one else [*prompts]
    if all(isinstance(text, str) for text in several) and not is_columns(prompts):
        read = [language.encoded(text, closed=False) for text in several]
        given: Texts = read
    else:
        given = prompts_as_text(language, prompts, options.pop("attention_mask", None))
        read = given.listed()
        several = [tokenizer.decode(tokens) for tokens in read]
    ends: set[int] = set()
    if isinstance(model, Transformer):
        if options.get("stop") is None:
            known_ends = (*model.config.eos_token_ids, *tokenizer.eos_token_ids)
            # The tokenizer of a larger model may have tokens that this model does not have.
            ends = {token for token in known_ends if token < model.config.vocab_size}
            options["stop"] = ends
        rows = generate(model, given, max_new_tokens=max_new_tokens, **options)
    else:
        rows = _continued(language, read, max_new_tokens, options)
    texts = []
    for prompt, prompt_tokens, tokens in zip(several, read, rows, strict=True):
        written = tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens)
        # Some tokenizers drop the space of the first token or rewrite characters. So decode whole
        # rows, but return the prompt unchanged.
        texts.append(prompt + written[len(tokenizer.decode(prompt_tokens)) :])
    return texts[0] if is_one else texts


def _continued(
    attached: Any, prompts: list[list[int]], max_new_tokens: int, options: GenerationOptions
) -> list[list[int]]:
    """Generate with an attached model. Return each prompt with its new tokens.

    An end-of-text token that ends a row is left out.

    Args:
        attached: the result of `attach`.
        prompts: the tokens of each prompt.
        max_new_tokens: the largest number of new tokens.
        options: the options of the call.

    Raises:
        TypeError: if an attached model does not have an option.
        ValueError: if a prompt has no token, or the model is in training mode.
    """
    if others := sorted({*options} - {"attention_mask", "temperature", "seed"}):
        raise TypeError(f"{others[0]}= needs a models.Transformer; use {_OF_ATTACHED}")
    require_integer("max_new_tokens", max_new_tokens)
    require_tokens(prompts)
    if attached.model.training:
        raise ValueError(IN_TRAINING)
    settings = {name: options[name] for name in ("temperature", "seed") if name in options}
    added = attached.continuations(prompts, max_new_tokens=max_new_tokens, **settings)
    return [prompt + new for prompt, new in zip(prompts, added, strict=True)]


@hides_others
def generate_steps(
    model: Transformer,
    prompts: "Texts",
    *,
    max_new_tokens: int,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: int | Iterable[int] | None = None,
    seed: int | torch.Generator = 0,
    max_context: int | None = None,
    prefill_chunk: int = 1024,
    compiled: bool | Mapping[str, Any] = False,
    **others: Unpack[NoOthers],
) -> Iterator[Step]:
    """Yield the steps of `generate` one at a time.

    A caller may change the tensors of a step, because the next step does not read them.

    Args:
        model: a model in evaluation mode.
        prompts: texts of any lengths, in any form; see `Transformer.to_tokens`.
        max_new_tokens: the largest number of new tokens.
        attention_mask: 1 for tokens and 0 for padding, which may be on either side. Default: no
            padding.
        temperature, top_k, top_p, min_p: see `Sampling`. Default: temperature 0, which selects the
            most probable token.
        stop: the token or tokens that end a row. If it is (), no token ends a row. Default: the
            `eos_token_ids` of the model's config.
        seed: the seed of random draws. Row i draws from `row_generator(seed, i)`, independently of
            the other rows. If a generator is given, all rows draw from this generator in turn.
            Default: 0.
        max_context: the largest number of positions. Default: the model's `n_ctx`.
        prefill_chunk: the number of positions of the prompts that are read at once. Default: 1024.
        compiled: whether each step after the prompts runs as one graph of `torch.compile`, with
            keys and values in buffers of a fixed size. The tokens are the same, up to rounding.
            Compiling takes seconds, and the model keeps the graph and the buffers for the next
            generation of a similar length. A mapping gives the arguments of `torch.compile`, such
            as `dict(mode="reduce-overhead")` on a GPU. Hooks that act at the first compilation are
            part of the graph; without a graph run the steps of hooks that write another value at
            each position, of hooks at `scores` and `pattern`, and of caches. Default: False.

    Returns:
        An iterator with at most `max_new_tokens` steps. A step has the new tokens [batch] and their
        logits [batch, vocab]; see `Step`. The steps end early if every row has ended.

    Raises:
        ValueError: at the call, if a sampling option is out of range, if a prompt is empty, if a
            prompt and its new tokens are too long, if a token is outside the vocabulary, if the
            mask has a wrong shape or wrong values, or if the model is in training mode. During the
            steps, if the logits of a running row are not finite.
        RuntimeError: if `torch.compile` cannot compile a step.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> for step in generate_steps(model, "impor", max_new_tokens=2):
    ...     print(repr(model.to_text(step.tokens)), step.logits.softmax(-1).amax(-1))
    't' tensor([0.9037])
    ' ' tensor([0.6768])
    """
    refuse(others, generate_steps, "generate_steps")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _require(model, compiled)
    given = prompts_as_text(model, prompts, attention_mask)
    texts = given.listed()
    stop = model.config.eos_token_ids if stop is None else stop
    stops = _as_stops(stop)
    require_integer("max_new_tokens", max_new_tokens)
    require_integer("prefill_chunk", prefill_chunk)
    check_prompts(model, texts, stops=stops, new=max_new_tokens, max_context=max_context)
    compiling = compile_options(compiled)
    tokens, mask = Text.padded([*map(torch.tensor, texts)], side="left")
    end = tokens.shape[1] + max_new_tokens
    n_moved = tokens.shape[1] if _is_moved(given, mask) else 0
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(mask), max_new_tokens)], 1)
    cache = KVCache(end)
    # The blocks of a model may be on several devices.
    device = model.token_embedding.weight.device
    mask_there = None if mask is None else to_device(mask, device)
    read: Callable[[Tensor], Tensor] = partial(
        _last_logits, model, cache, mask_there, prefill_chunk, n_moved
    )
    if compiling is not None:
        read = CompiledSteps(model, cache, read=read, mask=mask, end=end, options=compiling)
    steps = _steps(
        model,
        read,
        tokens=to_device(tokens, device),
        sampling=sampling,
        generators=_generators(model, len(texts), sampling=sampling, seed=seed),
        stop=stops,
        count=max_new_tokens,
    )
    return _closing(steps, read) if isinstance(read, CompiledSteps) else steps


def _is_moved(given: Text, mask: Tensor | None) -> bool:
    """Return whether prompts are in other columns than in the texts that the caller gave.

    Args:
        given: the texts of the caller.
        mask: the mask of the prompts after padding on the left; None without padding.
    """
    if mask is None:
        return False
    of_caller = given.attention_mask
    return of_caller is None or not torch.equal(of_caller.bool().cpu(), mask)


def _generators(
    model: Transformer, n_rows: int, sampling: Sampling, seed: int | torch.Generator
) -> list[torch.Generator]:
    """Return the generator of each row, on the device of the logits.

    The list is empty if nothing is drawn.
    """
    if isinstance(seed, torch.Generator):
        return [seed] * n_rows
    if sampling.is_greedy:
        return []
    device = model.unembedding.weight.device
    return [row_generator(seed, row, device) for row in range(n_rows)]


@without_gradients
def continuations(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return the new tokens of each prompt, without the token that ends a row.

    Rows end at the end-of-text tokens of the config and the tokenizer. The model reads the common
    beginning of the prompts only once, so many draws after one long text are cheap. The tokens are
    the tokens of `generate`, up to rounding.

    Args:
        model: a model in evaluation mode.
        prompts: the tokens of each prompt.
        max_new_tokens: the largest number of new tokens.
        temperature: the number by which logits are divided before a token is drawn; 0 selects the
            most probable token.
        seed: the seed of random draws; see `generate_steps`.

    Raises:
        ValueError: if a sampling option is out of range, if a prompt is empty, if a prompt and its
            new tokens are too long, if a token is outside the vocabulary, if the mask has a wrong
            shape or wrong values, if the model is in training mode, or if logits are not finite.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> prompts = [model.encoded("impor"), model.encoded("impor")]
    >>> [model.to_text(new) for new in continuations(model, prompts, max_new_tokens=1)]
    ['t', 't']
    """
    texts = [[*prompt] for prompt in prompts]
    ends = {*model.config.eos_token_ids, *getattr(model.tokenizer, "eos_token_ids", ())}
    stops = sorted(token for token in ends if token < model.config.vocab_size)
    sampling = Sampling(temperature=temperature)
    check_prompts(model, texts, stops=stops, new=max_new_tokens, max_context=None)
    # Hooks may edit rows differently, and a window would count padding between tokens.
    may_share = not any(model.config.windows) and not is_listened_to(model)
    n_shared = _common_length(texts) if may_share else 0
    tokens, mask = Text.padded([torch.tensor(text[n_shared:]) for text in texts], side="left")
    end = n_shared + tokens.shape[1] + max_new_tokens
    device = model.token_embedding.weight.device
    cache = KVCache(end)
    if n_shared:
        shared = to_device(torch.tensor([texts[0][:n_shared]]), device)
        _last_logits(model, cache, None, 1024, 0, shared)
        cache.repeat(len(texts))
    n_moved = 0 if mask is None else n_shared + tokens.shape[1]
    if mask is not None:
        before = mask.new_ones(len(mask), n_shared)
        after = mask.new_ones(len(mask), max_new_tokens)
        mask = to_device(torch.cat([before, mask, after], 1), device)
    steps = _steps(
        model,
        partial(_last_logits, model, cache, mask, 1024, n_moved),
        tokens=to_device(tokens, device),
        sampling=sampling,
        generators=_generators(model, len(texts), sampling=sampling, seed=seed),
        stop=stops,
        count=max_new_tokens,
    )
    new = torch.stack([step.tokens for step in steps], 1).tolist()
    rows = []
    for added in new:
        rows.append([*itertools.takewhile(lambda token: token not in ends, added)])
    return rows


def _common_length(texts: Sequence[list[int]]) -> int:
    """Return the number of tokens that all texts begin with. Each text keeps its last token."""
    columns = itertools.takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False))
    shortest = min(map(len, texts))
    return min(sum(1 for _ in columns), shortest - 1) if len(texts) > 1 else 0


def _as_stops(stop: Any) -> list[int]:
    """Return the numbers of the tokens that end a text.

    Raises:
        TypeError: if a token is not a number, such as a string.
    """
    listed = [*stop] if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop]
    if not all(map(is_integer, listed)):
        rule = "stop must be the number of a token, such as model.to_id('.'), or several numbers"
        raise TypeError(f"{rule}; got {shown(stop)}")
    return [index(token) for token in listed]


# The decorator is here and not on the generator `_steps`, where gradients would also be off in the
# caller's code between two steps.
@without_gradients
def _last_logits(
    model: Transformer,
    cache: KVCache,
    mask: Tensor | None,
    chunk: int,
    n_moved: int,
    tokens: Tensor,
) -> Tensor:
    """Return the logits after the last token: [batch, vocab].

    Args:
        model: the model.
        cache: the cache of the earlier tokens.
        mask: True at real tokens, for all columns of the generation; None without padding.
        chunk: the largest number of tokens that are read together.
        n_moved: see `prompts_moved`.
        tokens: the tokens to read, [batch, pos].
    """
    if model.training:
        raise ValueError(IN_TRAINING)
    # A generation takes many steps, and most prompts do not move.
    moved = partial(prompts_moved, n_moved) if n_moved else nullcontext
    pieces = tokens.split(chunk, 1)
    chunks: Callable[[], AbstractContextManager[None]] = nullcontext
    if len(pieces) > 1:
        end = cache.length + tokens.shape[1]
        whole = Piece(cache.length, None if mask is None else mask[:, :end])
        chunks = partial(in_chunks, Prompt(whole, end))
    for piece in pieces:
        mask_so_far = None if mask is None else mask[:, : cache.length + piece.shape[1]]
        # The tokens were checked in `check_prompts`, and the mask was made in `generate_steps`.
        with skip_token_checks(), moved(), chunks():
            logits = model(piece, attention_mask=mask_so_far, kv_cache=cache, last=1)
    return logits[:, -1]


def _steps(
    model: Transformer,
    read: Callable[[Tensor], Tensor],
    tokens: Tensor,
    sampling: Sampling,
    generators: list[torch.Generator],
    stop: list[int],
    count: int,
) -> Iterator[Step]:
    """Yield the steps of a generation.

    Args:
        model: the model.
        read: a function that reads tokens [batch, pos], and returns the logits [batch, vocab] after
            the last token.
        tokens: the tokens of the prompts, padded on the left.
        sampling: the choice of a token.
        generators: the generator of each row.
        stop: the tokens that end a row.
        count: the largest number of steps.
    """
    device = model.unembedding.weight.device
    stops = to_device(torch.tensor(stop, dtype=torch.int64), device)
    running = torch.ones(len(tokens), dtype=torch.bool, device=device)
    for step_number in range(count):
        if step_number:
            note_running(model, running[:, None])
        logits = read(tokens)
        new, largest = sampling.choose_unchecked(logits, generators, running if stop else None)
        step = Step(new.clone(), running.clone(), logits)
        if stop:
            running = running & (new[:, None] != stops).all(1)
            # Copy one tensor to the CPU, because each copy waits for the device.
            largest = torch.cat([largest, running.any()[None].to(largest.dtype)])
        numbers = largest.tolist()
        sampling.require_finite(numbers[: len(new)])
        yield step
        if stop and not numbers[-1]:
            return
        tokens = new[:, None]


def _closing(steps: Iterator[Step], read: CompiledSteps) -> Iterator[Step]:
    """Yield steps, and close the function that reads tokens at the end or after an error."""
    try:
        yield from steps
    finally:
        read.close()


_OF_ATTACHED = (
    "the model's own method: rows = model.generate(attached.to_tokens(text).tokens, "
    "max_new_tokens=9), where attached = attach(model); attached.to_text(rows[0]) is the text"
)
"""The way to generate with an attached model, for errors."""


def _is_attached(model: object) -> bool:
    """Return whether a model is attached, or is the result of `attach`."""
    if isinstance(model, nn.Module):
        return carried(model, "language_parts") is not None
    return isinstance(model, ReadsText)


def _require(model: object, compiled: object = False) -> None:
    """Check that a model is a `Transformer`.

    Args:
        model: the model.
        compiled: the option `compiled` of the call, for the error.

    Raises:
        TypeError: if the model is not a `Transformer`. The error explains the remedy.
    """
    if not isinstance(model, Transformer):
        hint = ""
        if isinstance(model, nn.Module) and isinstance(uncompiled(model), Transformer):
            hint = (
                " (pass compiled._orig_mod, the model before compilation; with compiled=True, its "
                "steps are compiled)"
            )
        elif compiled and (hasattr(model, "generate") or _is_attached(model)):
            hint = (
                ' (try its own .generate with cache_implementation="static", and under hooks also '
                "disable_compile=True)"
            )
        elif _is_attached(model):
            hint = f" (use generate_text, or {_OF_ATTACHED})"
        elif hasattr(model, "generate"):
            hint = " (generate_text accepts it after attach(model); or try its own .generate)"
        raise TypeError(f"generate needs a models.Transformer; got {shown(model)}{hint}")
