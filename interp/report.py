"""The report: collects results from one model and two prompts, and renders them as an HTML page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, HookError
from hooks.shared import progress_bar, without_gradients
from interp import pictures
from interp.effects.patching import patched
from interp.graph.graph import Graph
from interp.inputs.texts import Text, writer_of
from interp.measuring import Metric
from interp.metrics import log_prob
from interp.pictures.view import View
from interp.pictures.view import visible as visible
from interp.protocol import logits_of, of, runner_of
from interp.reading.heads import head_scores, repeated_tokens
from interp.reading.lens import LensReadout, logit_lens
from interp.reading.logit_attribution import direct_logit_attribution
from interp.results.result import Result
from interp.running.sites import Choice

try:
    import jinja2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('the report needs Jinja2: pip install "hookscope[report]"') from error

SITES = ("resid_pre", "attn_out", "mlp_out", "z")
GUESSES = 5
CONTINUED = 20
# A smaller difference of metrics, in nats, may be float32 rounding.
LEAST_GAP = 1e-4
_TOKENS_PER_FORWARD = 16_384


class Guess(NamedTuple):
    """A possible next token and its probability, 0 to 1."""

    text: str
    probability: float


class Peak(NamedTuple):
    """The largest entry, in absolute value, of a [layer, place] table."""

    layer: int
    place: int
    value: float


@dataclass(frozen=True)
class ReportData:
    """The numbers and texts of a report.

    Attributes:
        name: the model's name.
        facts: its configuration, shown unchanged.
        clean: the text of each token of the clean prompt.
        corrupted: the same for the corrupted prompt.
        changed: the positions where the two prompts differ.
        derived: whether the corrupted prompt was made by `derive_corruption`.
        answer: the token that the clean run predicts last; patching measures its log-probability.
        loss: cross-entropy of each token after the first, in nats.
        guesses: `guesses[layer][pos]` are the likeliest next tokens, best first, by the logit lens on
            the stream entering each layer; the last entry is the model's own prediction.
        continuation: the likeliest next tokens, one after the other.
        pattern: attention of the clean run.
        lens: the logit lens of the clean run.
        attribution: what each part adds to the answer's logit; None where that is not defined.
        previous: mean attention of each head to the token before, 0 to 1.
        induction: mean attention of each head from repeated random tokens to the token after their
            first copy, 0 to 1.
        period: the number of tokens before they repeat.
        target, base: the metric of the clean run and of the corrupted one, in nats.
        patches: the effects of patching, for each site of `SITES` that the model has.
    """

    name: str
    facts: Mapping[str, object]
    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    changed: tuple[int, ...]
    derived: bool
    answer: str
    loss: Float[Tensor, " next"]
    guesses: tuple[tuple[tuple[Guess, ...], ...], ...]
    continuation: tuple[str, ...]
    pattern: View
    lens: View
    attribution: Result | None
    previous: Float[Tensor, "layer head"]
    induction: Float[Tensor, "layer head"]
    period: int
    target: float
    base: float
    patches: Mapping[str, Result]

    def shares(self) -> dict[str, Float[Tensor, "layer place"]]:
        """For each site the shares of target - base that patches restore."""
        gap = self.target - self.base
        return {site: result.mean() / gap for site, result in self.patches.items()}


def peak(table: Float[Tensor, "layer place"]) -> Peak:
    """The entry of `table` that is largest in absolute value.

    >>> peak(torch.tensor([[0.5, 0.0], [0.25, -1.0]]))
    Peak(layer=1, place=1, value=-1.0)
    """
    layer, place = divmod(int(table.abs().argmax()), table.shape[1])
    return Peak(layer, place, table[layer, place].item())


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
    shown = progress_bar(iterable=chunks, desc="deriving a corruption", leave=False)
    language, runner = of(model, "blocks", "unembed"), runner_of(model)
    final = f"blocks.{len(language.blocks) - 1}.resid_post"
    streams = (runner.capture(chunk, names=final, positions=[-1])[final] for chunk in shown)
    metrics = [metric(language.unembed(stream)) for stream in streams]
    return tried[torch.cat(metrics).argmin()][None]


def _check_texts_of_report(
    clean: Int[Tensor, "1 pos"], corrupted: Int[Tensor, "1 other"] | None
) -> None:
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


def _kept(model: nn.Module, sites: Sequence[str]) -> list[str]:
    points = ("pattern", "resid_post", *sites)
    return [*(f"blocks.*.{point}" for point in points), *_attributed(model)]


def _sites(runner: HookedRunner) -> list[str]:
    # A model of attention only has no `mlp_out`.
    present = {name.rpartition(".")[2] for name in runner.points}
    return [site for site in SITES if site in present]


def _induction(runner: HookedRunner, vocab: int, period: int) -> Float[Tensor, "layer head"]:
    """The mean induction scores of heads on repeated random tokens."""
    device = next(runner.model.parameters()).device
    repeated = repeated_tokens(vocab, period).to(device)
    repetition = runner.capture(repeated, names="blocks.*.pattern")
    return head_scores(runner.model, repetition, "induction").mean()


@without_gradients
def build_report(
    model: nn.Module,
    clean: Int[Tensor, "1 pos"],
    corrupted: Int[Tensor, "1 other"] | None,
    *,
    name: str,
    facts: Mapping[str, object],
    period: int = 40,
) -> ReportData:
    """Runs the model on the prompts and collects what the page shows.

    The clean prompt is run once. Patching takes at most 1 GiB beyond the model and that run.

    Args:
        model: a model in evaluation mode with the usual points, `unembed` and `config`.
        clean: the prompt that the page is about.
        corrupted: a prompt of the same length that the model continues differently; None to derive
            one.
        name, facts: the model's name and configuration.
        period: the number of random tokens that repeat, for induction scores. Twice as many must fit
            the model's context.

    Raises:
        ValueError: if a prompt has fewer than two tokens, the two differ in length, or the metric is
            the same for both.
        ModeError: if the model is in training mode.
    """
    runner, texts = runner_of(model), writer_of(model) or _numbers
    _check_texts_of_report(clean, corrupted)
    sites = _sites(runner)
    output, cache = runner.run_with_cache(clean, names=_kept(model, sites))
    logits = logits_of(output)
    answer = int(logits[0, -1].argmax())
    metric, derived = log_prob(answer), corrupted is None
    corrupted = derive_corruption(model, clean, metric) if corrupted is None else corrupted
    target, base = metric(logits).item(), metric(logits_of(model(corrupted))).item()
    _check_gap(target, base)
    lens = logit_lens(model, cache, top_k=min(GUESSES, logits.shape[-1]))
    given = (model, Text(corrupted), Text(clean), cache, metric)
    return ReportData(
        name=name,
        facts=facts,
        clean=tuple(texts(clean[0].tolist())),
        corrupted=tuple(texts(corrupted[0].tolist())),
        changed=tuple((clean != corrupted)[0].nonzero()[:, 0].tolist()),
        derived=derived,
        answer=texts([answer])[0],
        loss=-logits[0, :-1].double().log_softmax(-1).gather(-1, clean[0, 1:, None])[:, 0],
        guesses=_guesses(lens, texts),
        continuation=tuple(texts(_continued(model, clean, answer))),
        pattern=pictures.patterns(model, cache),
        lens=pictures.lens(lens),
        attribution=_attribution(model, cache, answer),
        previous=head_scores(model, cache).mean(),
        induction=_induction(runner, logits.shape[-1], period),
        period=period,
        target=target,
        base=base,
        patches={site: patched(*given, Choice(site)) for site in sites},
    )


def render(data: ReportData) -> str:
    """The HTML page. It needs no other file and no network."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["visible"] = visible
    shares, trivial = data.shares(), len(data.changed) == 1
    tables = {"previous": data.previous, "induction": data.induction, "z": shares["z"]}
    parts = _parts(data, trivial)
    places = {name: n for n, name in enumerate(parts)}
    body = environment.get_template("report.html").render(
        data=data,
        strongest={kind: peak(table) for kind, table in tables.items()},
        gap=abs(data.target - data.base),
        trivial=trivial,
        places=places,
    )
    return View(f"Inside {data.name}", [*parts.values()]).html(body)


def _parts(data: ReportData, trivial: bool) -> dict[str, Mapping[str, Any]]:
    """The pictures by name. Of heads' tables, a click shows the head in the first, the patterns."""
    losses = pictures.text(data.clean, [math.nan, *data.loss.tolist()], unit="nats", title="loss")
    guesses = [[(g.text, f"{100 * g.probability:.3g} %") for g in pos] for pos in data.guesses[-1]]
    told = [[["the model's guesses", ""], *map(list, pos)] for pos in guesses]
    strongest, heads = peak(data.induction), data.induction.shape[1]
    start = strongest.layer * heads + strongest.place
    parts = {"pattern": {**data.pattern.parts[0], "start": start}, "lens": data.lens.parts[0]}
    first = losses.parts[0]["first"]
    parts["loss"] = {**losses.parts[0], "tips": [[], *told[:-1]][first:]}
    for kind, scores in (("previous", data.previous), ("induction", data.induction)):
        table = Result(scores[..., None], ("layer", "head", "example"), unit="of the attention")
        (part,) = pictures.effects(table).parts
        parts[kind] = {**part, "title": f"{kind} scores", "limit": 1.0, "link": 0}
    shares = data.shares()
    limit = max(1.0, *(float(share.abs().max()) for share in shares.values()))
    for site, result in data.patches.items():
        skipped = int(trivial and site == "resid_pre")
        if len(result.values) == skipped:  # of one layer, nothing else is left
            continue
        axis = result.axes[1]
        labels = {**result.labels, "layer": result.labels["layer"][skipped:]}
        table = Result(
            shares[site][skipped:, ..., None], result.axes, labels=labels, words=result.words
        )
        (part,) = pictures.effects(table).parts
        extra = {"link": 0} if site == "z" else {"marked": data.changed}
        metric = {"metric in nats": (data.base + result.mean())[None, skipped:].cpu()}
        unit = "of the difference restored"
        about = {"title": f"{site}, layer by {axis}", "limit": limit, "unit": unit, "more": metric}
        parts[site] = {**part, **about, **extra}
    if data.attribution is not None:
        (parts["attribution"],) = pictures.effects(data.attribution).parts
    return parts


def _attributed(model: nn.Module) -> list[str]:
    """The points that direct attribution reads; none where the model has no graph."""
    try:
        needed = Graph(model, split_embeddings=True).needed
    except (TypeError, ValueError):
        return []
    return [*needed, *(name for name in runner_of(model).points if name == "ln_final.scale")]


def _attribution(model: nn.Module, cache: ActivationCache, answer: int) -> Result | None:
    try:
        return direct_logit_attribution(model, cache, right=answer, pos=-1)
    except (TypeError, ValueError, HookError):
        return None


def _continued(model: nn.Module, clean: Int[Tensor, "1 pos"], answer: int) -> list[int]:
    """The likeliest next tokens, as far as the context goes."""
    longest = getattr(of(model, "config").config, "n_ctx", math.inf)
    tokens, row = [answer], clean
    while len(tokens) < CONTINUED and row.shape[1] < longest:
        row = torch.cat([row, row.new_tensor([tokens[-1:]])], 1)
        tokens.append(int(logits_of(model(row))[0, -1].argmax()))
    return tokens


def _numbers(tokens: Sequence[int]) -> list[str]:
    return [*map(str, tokens)]


def _guesses(
    lens: LensReadout, texts: Callable[[Sequence[int]], Sequence[str]]
) -> tuple[tuple[tuple[Guess, ...], ...], ...]:
    layers = zip(lens.tokens[:, 0].tolist(), lens.probabilities[:, 0].tolist(), strict=True)
    return tuple(
        tuple(tuple(map(Guess, texts(best), values)) for best, values in zip(*layer, strict=True))
        for layer in layers
    )
