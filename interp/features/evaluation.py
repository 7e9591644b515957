"""Scores of dictionaries: quality of reconstruction, loss of the model, and sparsity.

1. In the first pass over the texts, run the model, and encode and decode the values that each
   dictionary reads. The explained variance and the number of active features follow from sums over
   all positions (`score_sums`). Also run the model with the reconstructions, and with zeros, in
   place of the values.
2. In the second pass, run the model with the means over all positions in place of the values.
3. The share of the loss that is recovered is (ablated - spliced) / (ablated - unedited), where each
   term is a mean loss (`scores`).

`interp.many` runs both passes in parts of the texts.

A high share is no evidence that features are meaningful: a dictionary can reach a high share while
its decoder is still close to its random initialization. Compare two seeds (`stability`), and
compare the tokens that activate features and neurons (`purity`).
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Hook, HookError, Point
from hooks.base import (
    Index,
    Text,
    Texts,
    progress_of,
    shows_progress,
    to_device,
    without_gradients,
)
from interp.features.score_sums import PointSums, ScoreSums
from interp.features.scores import DictionaryScores
from interp.features.splicing import Dictionaries, SplicedDictionary, placed
from interp.inputs.copies import digests
from interp.inputs.texts import batches
from interp.measuring import measure
from interp.metrics import cross_entropy, kl_divergence
from interp.protocol import logits_of, runner_of


@shows_progress
@without_gradients
def evaluate_sae(
    model: nn.Module,
    dictionaries: "Dictionaries",
    texts: "Texts",
    *,
    reads: str | Mapping[str, str] | None = None,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> DictionaryScores:
    """Return the loss, KL, explained variance and density of dictionaries in a model.

    Several dictionaries are spliced in together. Use texts that the dictionaries were not trained
    on.

    Args:
        model: any model, in evaluation mode.
        dictionaries: a dictionary for each point, or a single dictionary with a known point.
        reads: the point that a transcoder reads, or a mapping from the points of transcoders to
            points that they read; see `splice`. Default: the point in the config.
        texts: the texts. Padding is ignored. Texts of a single token are left out, because they
            have no loss.
        pos: the positions of each text whose values are replaced. The explained variance, L0 and
            the density are over these positions; the losses and the KL are always means over all
            positions of a text. All other positions keep the values of the model. Position 0 is the
            first token that is not padding, and negative positions count from the last, so
            `slice(1, None)` leaves out the first token, whose stream is many times longer in most
            models. Default: all positions.
        batch: the number of texts in a batch. Default: 16.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        The losses in nats per token, [run, example], the KL in nats, [example], and the scores of
        each dictionary by the point that it writes.

    Raises:
        TypeError, UnknownNameError, ValueError, HookError, ModeError: for the same reasons as in
            `splice`, or if there are no texts.

    Warns:
        UserWarning: for the same reasons as in `splice`; if texts were left out; or if a single
            position has most of the variance, so that the explained variance mainly measures this
            position.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> texts = ["def f(x): return x", "class A: pass"]
    >>> scores = evaluate_sae(load("pydoc-4l"), load_sae("pydoc-4l/resid_post"), texts)
    >>> scores.recovered().mean() > 0.9
    tensor([True])
    """
    passes = _Passes(model, dictionaries, reads, pos)
    read = [text for _, text in batches(texts, model, batch)]
    sums = passes.first(read)
    return sums.scores(passes.second(read, sums.means()))


@shows_progress
@without_gradients
def sums_of_pass(
    model: nn.Module,
    texts: "Texts",
    dictionaries: "Dictionaries",
    means: Mapping[str, Float[Tensor, " d_out"]] | None = None,
    *,
    reads: str | Mapping[str, str] | None = None,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> "ScoreSums":
    """Return the sums of one pass of `evaluate_sae` over texts.

    The keywords are the keywords of `evaluate_sae`, because `over_examples` passes them on.

    Args:
        model, texts, dictionaries, reads, pos, batch, progress: see `evaluate_sae`.
        means: for the second pass, the mean over all texts for each dictionary, by the point that
            it writes. Default: None, for the first pass.
    """
    read = [text for _, text in batches(texts, model, batch)]
    passes = _Passes(model, dictionaries, reads, pos)
    return passes.first(read) if means is None else passes.second(read, means)


class _Passes:
    """The two passes over texts. The second needs means over all texts, which the first computes.

    Args:
        model, dictionaries, reads, pos: see `evaluate_sae`.
    """

    def __init__(
        self,
        model: nn.Module,
        dictionaries: "Dictionaries",
        reads: str | Mapping[str, str] | None,
        pos: "Index | None",
    ) -> None:
        self._runner = runner_of(model)
        self._parts = placed(self._runner, dictionaries, error=None, reads=reads)
        self._pos = pos

    def first(self, read: Sequence[Text]) -> "ScoreSums":
        """Return the sums of all positions, and the losses with reconstructions and with zeros."""
        points = {name: PointSums.zeros(part.dictionary) for name, part in self._parts.items()}
        zeros = {name: torch.zeros(part.dictionary.d_out) for name, part in self._parts.items()}
        rows: dict[str, list[Tensor]] = {"unedited": [], "spliced": [], "zero": [], "kl": []}
        hashes: list[str] = []
        long_texts = _with_loss(read)
        for text in progress_of(long_texts, "batches", len(long_texts)):
            unedited, values = self._unedited(text)
            for name, sums in values.items():
                points[name] += sums
            spliced = self._edited(text, _reconstructions(self._parts))
            rows["unedited"].append(_loss(text, unedited))
            rows["spliced"].append(_loss(text, spliced))
            rows["zero"].append(_loss(text, self._edited(text, _vectors(self._parts, zeros))))
            divergence = kl_divergence(unedited, None, attention_mask=text.attention_mask)
            rows["kl"].append(measure(divergence, spliced, text.attention_mask).cpu())
            hashes += digests(text)
        n = sum(len(text.tokens) for text in read)
        return ScoreSums(
            rows={name: _joined(parts) for name, parts in rows.items()},
            points=points,
            digests=hashes,
            n_left_out=n - len(hashes),
        )

    def second(self, read: Sequence[Text], means: Mapping[str, Tensor]) -> "ScoreSums":
        """Run the texts a second time, with the mean of each dictionary's output in its place.

        Return the losses of these runs.

        Args:
            read: the texts.
            means: the mean over all texts, by the point that the dictionary writes. The first pass
                computes it.
        """
        long_texts = _with_loss(read)
        hooks = _vectors(self._parts, means)
        losses = [
            _loss(text, self._edited(text, hooks))
            for text in progress_of(long_texts, "batches with the mean in place", len(long_texts))
        ]
        return ScoreSums({"mean": _joined(losses)})

    def _unedited(
        self, text: Text
    ) -> tuple[Float[Tensor, "batch pos vocab"], dict[str, "PointSums"]]:
        """Return the logits of the unedited model, and the sums for each dictionary."""
        parts = self._parts
        names = [*parts, *(part.reads for part in parts.values() if part.reads)]
        arguments = text.arguments(self._runner.model)
        output, cache = self._runner.run_with_cache(text.tokens, names=names, **arguments)
        is_scored = text.at(self._pos)
        sums = {}
        for name, part in parts.items():
            read = cache[part.reads or name]
            sums[name] = PointSums.of(
                part, cache[name], read=read, is_scored=is_scored, real=text.real
            )
        return logits_of(output), sums

    def _edited(
        self, text: Text, hooks: Sequence[tuple[str, Hook]]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a run in which hooks replace values at the scored positions."""
        is_scored = text.at(self._pos)
        for part in self._parts.values():
            part.kept = is_scored
        arguments = text.arguments(self._runner.model)
        return logits_of(self._runner.run_with_hooks(text.tokens, hooks=hooks, **arguments))


def _loss(text: Text, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
    """Return the mean loss of each text, in nats per token."""
    metric = cross_entropy(text.tokens, attention_mask=text.attention_mask)
    return measure(metric, logits, text.attention_mask).cpu()


def _joined(parts: Sequence[Float[Tensor, " _batch"]]) -> Float[Tensor, " example"]:
    """Return the numbers of all batches. Without a batch, there are no numbers."""
    return torch.cat([*parts]) if parts else torch.zeros(0)


def _with_loss(read: Sequence[Text]) -> list[Text]:
    """Return the texts of at least two tokens."""
    is_long = [text.real.sum(1) > 1 for text in read]
    return [text.rows(rows) for text, rows in zip(read, is_long, strict=True) if rows.any()]


def _vectors(
    parts: Mapping[str, SplicedDictionary], vectors: Mapping[str, Float[Tensor, " d_out"]]
) -> list[tuple[str, Hook]]:
    """Return hooks that replace the values at the point of each dictionary by one vector."""

    def hook(part: SplicedDictionary, vector: Tensor) -> Hook:
        return lambda value, point: part.replaced(
            value, to_device(vector, value.device)[None, None]
        )

    return [(name, hook(part, vectors[name])) for name, part in parts.items()]


def _reconstructions(parts: Mapping[str, SplicedDictionary]) -> list[tuple[str, Hook]]:
    """Return hooks that replace the values at the point of each dictionary by reconstructions.

    Unlike the hooks of `splice`, these hooks act in one thread only.
    """
    values: dict[str, Tensor] = {}

    def reading(value: Tensor, point: Point) -> None:
        values[point.name] = value

    def writing(value: Tensor, point: Point) -> Tensor:
        part = parts[point.name]
        if part.reads is not None and part.reads not in values:
            raise HookError(f"{point.name} must run after {part.reads}, which its part reads")
        return part(value, value if part.reads is None else values[part.reads])

    # A value is read after it was written.
    writers = [(name, writing) for name in parts]
    return [*writers, *((part.reads, reading) for part in parts.values() if part.reads)]
