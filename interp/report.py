"""The report: one page about what happens inside a model on a text, put together from views.

1. Run the text, and a corrupted one that the model continues differently; make that one if none is given.
2. Patch values of the clean run into the corrupted one, at each site.
3. Read the clean run: direct attribution, attention patterns, scores of heads, the logit lens, losses.
4. Draw each result under its heading, and print the largest entries.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookedRunner, HookError
from hooks.base import Text, progress_bar, without_gradients, writer_of
from interp import pictures
from interp.effects.patching import activation_patching
from interp.measuring import Metric
from interp.metrics import log_prob
from interp.pairs.pairs import Pairs
from interp.pictures.view import View, visible
from interp.protocol import logits_of, of, runner_of
from interp.reading.heads import head_scores, repeated_tokens
from interp.reading.lens import logit_lens
from interp.reading.logit_attribution import direct_logit_attribution
from interp.results.result import Result

# Sites to patch, with their headings.
SITES = {
    "z": "One head's output, at all positions",
    "resid_pre": "Residual stream entering a layer",
    "attn_out": "What attention adds",
    "mlp_out": "What the MLP adds",
}
# A smaller difference of metrics, in nats, may be float32 rounding.
LEAST_GAP = 1e-4
_TOKENS_PER_FORWARD = 16_384
# What stands below each heading.
_SAYS = {
    "Activation patching": "Which values carry the answer: each cell is a run on the corrupted prompt with one value taken "
    "from the clean run, and shows the share of the difference in log-probability that this restores. 0 is the corrupted "
    "run, 1 the clean one. Heimersheim & Nanda 2024, arXiv:2404.15255; the denoising direction.",
    "Direct attribution": "What each part of the model adds by itself to the logit of the answer. Elhage et al. 2021, A "
    "mathematical framework for transformer circuits.",
    "Attention patterns": "How much each token (a row, the query) reads from each token before it (a column, the key). Rows "
    "sum to 1. Choose a head among the small pictures. Vaswani et al. 2017, arXiv:1706.03762.",
    "Induction heads": "Attention to what followed the same token earlier, over random tokens given twice, 0 to 1. A click, "
    "or Enter, shows the head's pattern. Olsson et al. 2022, arXiv:2209.11895.",
    "Previous-token heads": "Attention to the token just before, over this prompt, 0 to 1. Elhage et al. 2021.",
    "Logit lens": "The next token that the model would predict if it ended early, shaded by its probability. Point at a cell "
    "for the likeliest ones. nostalgebraist 2020, interpreting GPT: the logit lens.",
    "Loss of each token": "The cross-entropy -ln p(token | all before it), in nats. The first token has nothing before it "
    "and no loss.",
}


@dataclass(frozen=True)
class Report:
    """A page about a text, and what it says in a few lines.

    Attributes:
        summary: the texts, and the largest entry of each result.
        results: what the page shows, by heading.
        view: the page.
    """

    summary: str
    results: Mapping[str, Any]
    view: View


@without_gradients
def derive_corruption(
    model: nn.Module, clean: Int[Tensor, "1 pos"], metric: Metric
) -> Int[Tensor, "1 pos"]:
    """The prompt with one token replaced, by the replacement that lowers the metric most.

    It tries each position but the last once. The replacement is the next token of the prompt that
    differs, with the search continuing at the beginning of the prompt. The metric gets the logits of
    the last position only, because those of all positions need far more memory than the model.

    Raises:
        ValueError: if the prompt is one token repeated.
    """
    row = clean[0]
    if bool((row == row[0]).all()):
        raise ValueError(
            "the prompt must have two different tokens to derive a corrupted one from; got one token "
            f"{len(row)} times: give a corrupted prompt"
        )
    tried = row.repeat(len(row) - 1, 1)
    for pos in range(len(row) - 1):
        others = row.roll(-pos)
        tried[pos, pos] = others[others != row[pos]][0]
    chunks = tried.split(max(1, _TOKENS_PER_FORWARD // len(row)))
    language, runner = of(model, "blocks", "unembed"), runner_of(model)
    final = f"blocks.{len(language.blocks) - 1}.resid_post"
    options = {"names": final, "positions": [-1], **Text(clean).arguments(model)}
    metrics = []
    with progress_bar("deriving a corruption", total=len(chunks)) as count:
        for chunk in chunks:
            stream = runner.capture(chunk, **options)[final]
            metrics.append(metric(language.unembed(stream)))
            count()
    return tried[torch.cat(metrics).argmin()][None]


@without_gradients
def report(
    model: nn.Module,
    clean: Int[Tensor, "1 pos"],
    corrupted: Int[Tensor, "1 other"] | None = None,
    *,
    name: str = "a model",
    period: int = 40,
) -> Report:
    """Run a model on two prompts, and put what happened on a page. Patching takes at most 1 GiB beyond the model.

    Args:
        model: a model in evaluation mode with the usual points, `unembed` and `config`.
        clean: the prompt that the page is about.
        corrupted: a prompt of the same length that the model continues differently; None to derive one.
        name: the model's name.
        period: the number of random tokens that repeat, for induction scores. Twice as many must fit the model's context.

    Raises:
        ValueError: if a prompt has fewer than two tokens, the two differ in length, or the metric is
            the same for both.
        ModeError: if the model is in training mode.
    """
    runner = runner_of(model)
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    _check_texts(clean, corrupted)
    arguments = Text(clean).arguments(model)
    output, cache = runner.run_with_cache(clean, **arguments)
    logits = logits_of(output)
    answer = int(logits[0, -1].argmax())
    metric, is_derived = log_prob(answer), corrupted is None
    corrupted = derive_corruption(model, clean, metric) if corrupted is None else corrupted
    other = logits_of(model(corrupted, **arguments))
    _check_gap(metric(logits).item(), metric(other).item())
    results = _patches(model, Pairs(clean, corrupted, metric=metric))
    with suppress(TypeError, ValueError, HookError):  # some models have none
        results["Direct attribution"] = direct_logit_attribution(model, cache, right=answer, pos=-1)
    results["Attention patterns"] = pictures.patterns(model, cache)
    results["Induction heads"] = _induction(runner, logits.shape[-1], period)
    results["Previous-token heads"] = head_scores(model, cache)
    results["Logit lens"] = logit_lens(model, cache)
    losses = -logits[0, :-1].double().log_softmax(-1).gather(-1, clean[0, 1:, None])[:, 0]
    words = write(clean[0].tolist())
    results["Loss of each token"] = pictures.text(
        words, [math.nan, *losses.tolist()], unit="nats", title="loss"
    )
    changed = (clean != corrupted)[0].nonzero()[:, 0].tolist()
    others = write(corrupted[0].tolist())
    said = [
        f"model      {name}",
        f"clean      {_shortened(words)}",
        f"corrupted  {_shortened(others)}",
    ]
    if is_derived:
        [pos] = changed
        said.append(f"           derived: {words[pos]!r} at position {pos} became {others[pos]!r}")
    said.append(_likeliest(logits[0, -1], write))
    said += _findings(results)
    view = View(f"Inside {name}", _parts(results, changed), says=said)
    return Report("\n".join(said), results, view)


def _patches(model: nn.Module, pairs: Pairs) -> dict[str, Any]:
    """Effects of patching at each site that the model has, by heading."""
    ends = {point.rpartition(".")[2] for point in runner_of(model).points}
    # A model of attention only has no `mlp_out`.
    return {
        f"Patching: {heading}": activation_patching(model, pairs, site).normalized()
        for site, heading in SITES.items()
        if site in ends
    }


def _likeliest(logits: Float[Tensor, " vocab"], write: Callable[[list[int]], Any]) -> str:
    """The likeliest next tokens, in a line."""
    chances = logits.softmax(-1).topk(min(5, len(logits)))
    guesses = zip(write(chances.indices.tolist()), chances.values.tolist(), strict=True)
    return "next token " + ", ".join(f"{text!r} {chance:.1%}" for text, chance in guesses)


def _findings(results: Mapping[str, Any]) -> list[str]:
    """The largest entry of each table."""
    tops = {heading: each.top(1) for heading, each in results.items() if isinstance(each, Result)}
    width = max(map(len, tops))
    return [f"{heading:<{width}}  {top}" for heading, top in tops.items()]


def _parts(results: Mapping[str, Any], changed: list[int]) -> list[Mapping[str, Any]]:
    """The parts of the page. A click on a head's cell shows the head among the patterns."""
    parts: list[Mapping[str, Any]] = []
    patterns = [*results].index("Attention patterns")
    for heading, result in results.items():
        (part,) = (result if isinstance(result, View) else _drawn(result)).parts
        more: dict[str, Any] = {"heading": heading, "says": _SAYS.get(heading)}
        if heading.startswith("Patching"):
            more |= {} if parts else {"says": _SAYS["Activation patching"]}
            more |= {"link": patterns} if heading.endswith(SITES["z"]) else {"marked": changed}
        elif heading.endswith("heads"):
            more |= {"link": patterns, "limit": 1.0, "title": heading}
        elif result is results["Attention patterns"]:
            more["start"] = int(results["Induction heads"].mean().argmax())
        parts.append({**part, **more})
    return parts


def _drawn(result: Any) -> View:
    return pictures.effects(result) if isinstance(result, Result) else pictures.lens(result)


def _check_texts(clean: Tensor, corrupted: Tensor | None) -> None:
    if clean.shape[1] < 2:
        raise ValueError(f"a prompt must have at least 2 tokens; got {clean.shape[1]}")
    if corrupted is not None and clean.shape != corrupted.shape:
        raise ValueError(
            "the clean and the corrupted prompt must have equally many tokens; "
            f"got {clean.shape[1]} and {corrupted.shape[1]}"
        )


def _check_gap(target: float, base: float) -> None:
    # In this form, NaN is also refused.
    if not abs(target - base) >= LEAST_GAP:
        raise ValueError(
            "the clean and the corrupted prompt must differ in the metric by at least "
            f"{LEAST_GAP} nats, or patching has nothing to restore; got {target:.6f} and {base:.6f}"
        )


def _induction(runner: HookedRunner, vocab: int, period: int) -> Result:
    """The induction scores of heads on repeated random tokens."""
    device = next(runner.model.parameters()).device
    repeated = repeated_tokens(vocab, period).to(device)
    arguments = Text(repeated).arguments(runner.model)
    cache = runner.capture(repeated, names="blocks.*.pattern", **arguments)
    return head_scores(runner.model, cache, "induction")


def _shortened(words: list[str]) -> str:
    text = "".join(map(visible, words))
    return text if len(text) <= 100 else f"{text[:50]} ... {text[-50:]}"
