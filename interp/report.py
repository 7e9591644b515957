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
from interp.json_form import form
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
SITES: Mapping[str, str] = {
    "z": "One head's output, at all positions",
    "resid_pre": "Residual stream entering a layer",
    "attn_out": "What attention adds",
    "mlp_out": "What the MLP adds",
}
# The smallest difference between the metrics of the two prompts, in nats. A smaller difference may
# be float32 rounding.
LEAST_GAP = 1e-4
_TOKENS_PER_FORWARD = 16_384
# The explanation below each heading.
_EXPLANATIONS = {
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

    def as_json(self) -> dict[str, Any]:
        """Return all tables of the page in the JSON form of all results; see `interp.json_form`.

        The names of the tables begin with the headings. Pictures of attention patterns and of the
        loss are left out.
        """
        tables: dict[str, Any] = {}
        for heading, result in self.results.items():
            if not isinstance(result, View):
                of_result = result.as_json()["tables"]
                tables |= {f"{heading}.{name}": table for name, table in of_result.items()}
        listed = form("Report", {}, {"summary": self.summary.splitlines()})
        return {**listed, "tables": tables}


@without_gradients
def derive_corruption(
    model: nn.Module, clean: Int[Tensor, "1 pos"], metric: Metric
) -> Int[Tensor, "1 pos"]:
    """Return the prompt with one token replaced, such that the metric falls as far as possible.

    Each position except the last is tried once. Its token is replaced by the next token of the
    prompt that is different, or by the first different token of the prompt if there is no such
    token after the position. The metric is called with the logits of the last position only,
    because the logits of all positions need far more memory than the model.

    Args:
        model: a model in evaluation mode.
        clean: the prompt.
        metric: the metric to lower, which reads the last position.

    Raises:
        ValueError: if all tokens of the prompt are the same.
    """
    prompt = clean[0]
    if bool((prompt == prompt[0]).all()):
        raise ValueError(
            "the prompt must have two different tokens to derive a corrupted prompt; got the "
            "same token "
            f"{len(prompt)} times: give a corrupted prompt"
        )
    candidates = prompt.repeat(len(prompt) - 1, 1)
    for pos in range(len(prompt) - 1):
        following = prompt.roll(-pos)
        candidates[pos, pos] = following[following != prompt[pos]][0]
    chunks = candidates.split(max(1, _TOKENS_PER_FORWARD // len(prompt)))
    language = of(model, "blocks", "unembed")
    runner = runner_of(model)
    final = f"blocks.{len(language.blocks) - 1}.resid_post"
    options = {"names": final, "pos": [-1], **Text(clean).arguments(model)}
    metrics = []
    with progress_bar("deriving a corruption", total=len(chunks)) as count:
        for chunk in chunks:
            stream = runner.capture(chunk, **options)[final]
            metrics.append(metric(language.unembed(stream)))
            count()
    return candidates[torch.cat(metrics).argmin()][None]


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
        model: a model in evaluation mode with the hook points of `models.Transformer`, `unembed`
            and `config`.
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
    _check_texts(clean, corrupted)
    arguments = Text(clean).arguments(model)
    output, cache = runner.run_with_cache(clean, **arguments)
    logits = logits_of(output)
    answer = int(logits[0, -1].argmax())
    metric = log_prob(answer)
    is_derived = corrupted is None
    corrupted = derive_corruption(model, clean, metric) if corrupted is None else corrupted
    corrupted_logits = logits_of(model(corrupted, **arguments))
    _check_gap(metric(logits).item(), metric(corrupted_logits).item())
    results = _patches(model, Pairs(clean, corrupted, metric=metric))
    # Some models do not support direct attribution.
    with suppress(TypeError, ValueError, HookError):
        results["Direct attribution"] = direct_logit_attribution(model, cache, right=answer, pos=-1)
    results["Attention patterns"] = plots.patterns(model, cache)
    results["Induction heads"] = _induction(runner, logits.shape[-1], period)
    results["Previous-token heads"] = head_scores(model, cache)
    results["Logit lens"] = logit_lens(model, cache)
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    words = write(clean[0].tolist())
    corrupted_words = write(corrupted[0].tolist())
    results["Loss of each token"] = _losses(logits[0], clean[0], words)
    changed = (clean != corrupted)[0].nonzero()[:, 0].tolist()
    lines = _described_texts(name, words, corrupted_words)
    if is_derived:
        lines.append(_described_change(changed, words, corrupted_words))
    lines.append(_likeliest(logits[0, -1], write))
    lines += _findings(results)
    view = View(f"Inside {name}", _parts(results, changed), says=lines)
    return Report("\n".join(lines), results, view)


def _losses(
    logits: Float[Tensor, "pos vocab"], prompt: Int[Tensor, " pos"], words: list[str]
) -> View:
    """Return a view of the loss of each token, in nats. The first token has no loss."""
    log_probs = logits[:-1].double().log_softmax(-1)
    losses = -log_probs.gather(-1, prompt[1:, None])[:, 0]
    return plots.text(words, [math.nan, *losses.tolist()], unit="nats", title="loss")


def _described_texts(name: str, clean: list[str], corrupted: list[str]) -> list[str]:
    """Return the lines that name the model and both prompts."""
    return [
        f"model      {name}",
        f"clean      {_shortened(clean)}",
        f"corrupted  {_shortened(corrupted)}",
    ]


def _described_change(changed: list[int], clean: list[str], corrupted: list[str]) -> str:
    """Return the line that shows the token that was replaced in a derived prompt."""
    [pos] = changed
    return f"           derived: {clean[pos]!r} at position {pos} became {corrupted[pos]!r}"


def _patches(model: nn.Module, pairs: Pairs) -> dict[str, Any]:
    """Return the effects of patching at each site of the model, by heading."""
    last_parts = {name.rpartition(".")[2] for name in runner_of(model).points}
    # An attention-only model has no `mlp_out`.
    return {
        f"Patching: {heading}": activation_patching(model, pairs, site).normalized()
        for site, heading in SITES.items()
        if site in last_parts
    }


def _likeliest(logits: Float[Tensor, " vocab"], write: Callable[[list[int]], Any]) -> str:
    """Return the likeliest next tokens with their probabilities, in one line."""
    likeliest = logits.softmax(-1).topk(min(5, len(logits)))
    words = write(likeliest.indices.tolist())
    guesses = zip(words, likeliest.values.tolist(), strict=True)
    return "next token " + ", ".join(f"{word!r} {chance:.1%}" for word, chance in guesses)


def _findings(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each table, with the largest entry of the table."""
    tops = {
        heading: result.top(1) for heading, result in results.items() if isinstance(result, Result)
    }
    width = max(map(len, tops))
    return [f"{heading:<{width}}  {top}" for heading, top in tops.items()]


def _parts(results: Mapping[str, Any], changed: list[int]) -> list[Mapping[str, Any]]:
    """Return the parts of the page, in which a click on the cell of a head shows its pattern.

    Args:
        results: the results, by heading.
        changed: the positions of the tokens that differ between the prompts.
    """
    parts: list[Mapping[str, Any]] = []
    patterns = [*results].index("Attention patterns")
    for heading, result in results.items():
        (part,) = (result if isinstance(result, View) else _drawn(result)).parts
        options: dict[str, Any] = {"heading": heading, "says": _EXPLANATIONS.get(heading)}
        if heading.startswith("Patching"):
            if not parts:
                options["says"] = _EXPLANATIONS["Activation patching"]
            if heading.endswith(SITES["z"]):
                options["link"] = patterns
            else:
                options["marked"] = changed
        elif heading.endswith("heads"):
            options |= {"link": patterns, "limit": 1.0, "title": heading}
        elif result is results["Attention patterns"]:
            options["start"] = int(results["Induction heads"].mean().argmax())
        parts.append({**part, **options})
    return parts


def _drawn(result: Any) -> View:
    """Return a view of a table of effects, or of a logit lens."""
    return plots.effects(result) if isinstance(result, Result) else plots.lens(result)


def _check_texts(clean: Tensor, corrupted: Tensor | None) -> None:
    """Check that the prompts have at least two tokens, and equal lengths."""
    if clean.shape[1] < 2:
        raise ValueError(f"a prompt must have at least 2 tokens; got {clean.shape[1]}")
    if corrupted is not None and clean.shape != corrupted.shape:
        raise ValueError(
            "the clean and the corrupted prompt must have the same number of tokens; "
            f"got {clean.shape[1]} and {corrupted.shape[1]}"
        )


def _check_gap(target: float, base: float) -> None:
    """Check that the metric differs between the two prompts."""
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
    """Return the text of a prompt; a long text without its middle."""
    text = "".join(map(visible, words))
    return text if len(text) <= 100 else f"{text[:50]} ... {text[-50:]}"
