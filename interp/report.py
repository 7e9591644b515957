"""The report: one page about the computation of a model on a text, composed of views.

1. Run the text and a corrupted text that the model continues differently. Without a corrupted text,
   derive one.
2. Patch values of the clean run into the corrupted run, at each site.
3. Read the clean run: direct attribution, attention patterns, scores of heads, the logit lens,
   losses.
4. Draw each result below its heading, and print the largest entries.
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
from interp import plots
from interp.effects.patching import activation_patching
from interp.measuring import Metric
from interp.metrics import log_prob
from interp.pairs.pairs import Pairs
from interp.plots.view import View, visible
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
# The text below each heading.
_SAYS = {
    "Activation patching": (
        "The values that carry the answer. Each cell is a run on the corrupted prompt with one "
        "value taken from the clean run. It shows the share of the difference in log-probability "
        "that this value restores: 0 is the corrupted run, 1 is the clean run. "
        "Heimersheim & Nanda 2024, arXiv:2404.15255; the denoising direction."
    ),
    "Direct attribution": (
        "The direct contribution of each part of the model to the logit of the answer. Elhage "
        "et al. 2021, A mathematical framework for transformer circuits."
    ),
    "Attention patterns": (
        "The attention of each token (a row, the query) to itself and each token before it (a "
        "column, the key). Rows sum to 1. Select a head in the small pictures. Vaswani et al. "
        "2017, arXiv:1706.03762."
    ),
    "Induction heads": (
        "Attention to the token after the same token earlier, over repeated random tokens, 0 to "
        "1. A click, or Enter, shows the head's pattern. Olsson et al. 2022, arXiv:2209.11895."
    ),
    "Previous-token heads": (
        "Attention to the token before the query, over this prompt, 0 to 1. Elhage et al. 2021."
    ),
    "Logit lens": (
        "The next token that the model would predict if it ended at each layer, shaded by its "
        "probability. Point at a cell for the likeliest tokens. nostalgebraist 2020, "
        "interpreting GPT: the logit lens."
    ),
    "Loss of each token": (
        "The cross-entropy -ln p(token | all tokens before it), in nats. The first token has no "
        "loss, because no token comes before it."
    ),
}


@dataclass(frozen=True)
class Report:
    """A page about a text, and its summary in a few lines.

    Attributes:
        summary: the texts, and the largest entry of each result.
        results: the results on the page, by heading.
        view: the page.
    """

    summary: str
    results: Mapping[str, Any]
    view: View


@without_gradients
def derive_corruption(
    model: nn.Module, clean: Int[Tensor, "1 pos"], metric: Metric
) -> Int[Tensor, "1 pos"]:
    """Return the prompt with one token replaced. Of all replacements, it lowers the metric most.

    Each position except the last is tried once. The replacement is the next different token of the
    prompt; the search continues at the beginning of the prompt. The metric is called with the
    logits of the last position only, because the logits of all positions need far more memory than
    the model.

    Raises:
        ValueError: if all tokens of the prompt are the same.
    """
    row = clean[0]
    if bool((row == row[0]).all()):
        raise ValueError(
            "the prompt must have two different tokens to derive a corrupted prompt; got the "
            "same token "
            f"{len(row)} times: give a corrupted prompt"
        )
    tried = row.repeat(len(row) - 1, 1)
    for pos in range(len(row) - 1):
        others = row.roll(-pos)
        tried[pos, pos] = others[others != row[pos]][0]
    chunks = tried.split(max(1, _TOKENS_PER_FORWARD // len(row)))
    language, runner = of(model, "blocks", "unembed"), runner_of(model)
    final = f"blocks.{len(language.blocks) - 1}.resid_post"
    options = {"names": final, "pos": [-1], **Text(clean).arguments(model)}
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
    """Run a model on two prompts, and draw the results on a page.

    Patching needs at most 1 GiB in addition to the model.

    Args:
        model: a model in evaluation mode with the usual points, `unembed` and `config`.
        clean: the prompt that the page is about.
        corrupted: a prompt of the same length that the model continues differently. Default: derive
            it from `clean`.
        name: the model's name.
        period: the number of random tokens that are repeated for induction scores. The context of
            the model must be at least twice as long.

    Raises:
        ValueError: if a prompt has fewer than two tokens, the two differ in length, or the metric
            is the same for both.
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
    # Some models do not support direct attribution.
    with suppress(TypeError, ValueError, HookError):
        results["Direct attribution"] = direct_logit_attribution(model, cache, right=answer, pos=-1)
    results["Attention patterns"] = plots.patterns(model, cache)
    results["Induction heads"] = _induction(runner, logits.shape[-1], period)
    results["Previous-token heads"] = head_scores(model, cache)
    results["Logit lens"] = logit_lens(model, cache)
    losses = -logits[0, :-1].double().log_softmax(-1).gather(-1, clean[0, 1:, None])[:, 0]
    words = write(clean[0].tolist())
    results["Loss of each token"] = plots.text(
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
    """Return the effects of patching at each site of the model, by heading."""
    ends = {point.rpartition(".")[2] for point in runner_of(model).points}
    # An attention-only model has no `mlp_out`.
    return {
        f"Patching: {heading}": activation_patching(model, pairs, site).normalized()
        for site, heading in SITES.items()
        if site in ends
    }


def _likeliest(logits: Float[Tensor, " vocab"], write: Callable[[list[int]], Any]) -> str:
    """Return the likeliest next tokens, in one line."""
    chances = logits.softmax(-1).topk(min(5, len(logits)))
    guesses = zip(write(chances.indices.tolist()), chances.values.tolist(), strict=True)
    return "next token " + ", ".join(f"{text!r} {chance:.1%}" for text, chance in guesses)


def _findings(results: Mapping[str, Any]) -> list[str]:
    """Return the largest entry of each table."""
    tops = {heading: each.top(1) for heading, each in results.items() if isinstance(each, Result)}
    width = max(map(len, tops))
    return [f"{heading:<{width}}  {top}" for heading, top in tops.items()]


def _parts(results: Mapping[str, Any], changed: list[int]) -> list[Mapping[str, Any]]:
    """Return the parts of the page. A click on the cell of a head shows the pattern of the head."""
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
    return plots.effects(result) if isinstance(result, Result) else plots.lens(result)


def _check_texts(clean: Tensor, corrupted: Tensor | None) -> None:
    if clean.shape[1] < 2:
        raise ValueError(f"a prompt must have at least 2 tokens; got {clean.shape[1]}")
    if corrupted is not None and clean.shape != corrupted.shape:
        raise ValueError(
            "the clean and the corrupted prompt must have the same number of tokens; "
            f"got {clean.shape[1]} and {corrupted.shape[1]}"
        )


def _check_gap(target: float, base: float) -> None:
    # With `not >=` instead of `<`, NaN is an error too.
    if not abs(target - base) >= LEAST_GAP:
        raise ValueError(
            "the clean and the corrupted prompt must differ in the metric by at least "
            f"{LEAST_GAP} nats for patching; got {target:.6f} and {base:.6f}"
        )


def _induction(runner: HookedRunner, vocab: int, period: int) -> Result:
    """Return the induction scores of heads on repeated random tokens."""
    device = next(runner.model.parameters()).device
    repeated = repeated_tokens(vocab, period).to(device)
    arguments = Text(repeated).arguments(runner.model)
    cache = runner.capture(repeated, names="blocks.*.pattern", **arguments)
    return head_scores(runner.model, cache, "induction")


def _shortened(words: list[str]) -> str:
    text = "".join(map(visible, words))
    return text if len(text) <= 100 else f"{text[:50]} ... {text[-50:]}"
