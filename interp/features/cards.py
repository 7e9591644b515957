"""Cards of features: where each is active, what it writes, and how often; for a page or for Neuronpedia's JSON.

1. Run the model on texts, and keep the chosen features at every position.
2. The examples of a feature are the texts around its largest values, no text twice. Copies of a text
   are one text.
3. What it writes is its decoder row times the directions of tokens (`token_directions`).
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    Index,
    Texts,
    progress_of,
    require_integer,
    require_kind,
    shows_progress,
    storage,
    strict_json,
    to_device,
    without_gradients,
    writer_of,
)
from hooks.shared import with_parts
from interp import pictures
from interp.features.dictionary import Dictionary
from interp.features.splicing import Dictionaries, placed
from interp.inputs.copies import unseen
from interp.inputs.texts import batches
from interp.protocol import n_logits, runner_of
from interp.spectral.weights import token_directions

_BINS, _BEFORE, _AFTER = 20, 24, 8


@dataclass(frozen=True)
class FeatureExample:
    """A text around a place where a feature is large.

    Attributes:
        tokens: its tokens as text; their numbers where the model has no tokenizer.
        activations: the feature at each of them.
        pos: which of them is the place.
    """

    tokens: Sequence[str]
    activations: Sequence[float]
    pos: int


@dataclass(frozen=True)
class FeatureCard:
    """What is known of one feature; made by `feature_cards`.

    Attributes:
        index: its number.
        density: the share of positions where it is not 0.
        examples: texts where it is largest, the largest first.
        top, bottom: tokens whose logits it raises and lowers most, with how much a feature of 1 does so, up to the
            scale of the final norm; empty where it does not write to the residual stream.
        nearest: other features of the dictionary, with the cosine of their decoder rows.
        histogram: how many positions have it in each of 20 equal steps up to `largest`, zeros apart.
        largest: its largest value.
        n_tokens: how many positions were read; None if that is not known. A feature that is active
            at none of them may only be rare: see `interp.features.evaluation.LEAST_FOR_DEAD`.
    """

    index: int
    density: float
    examples: Sequence[FeatureExample] = ()
    top: Sequence[tuple[str, float]] = ()
    bottom: Sequence[tuple[str, float]] = ()
    nearest: Sequence[tuple[int, float]] = ()
    histogram: Sequence[float] = ()
    largest: float = 0.0
    n_tokens: int | None = None

    @property
    def frequency(self) -> str:
        """The density in words."""
        count = "" if self.n_tokens is None else f"{self.n_tokens:,} "
        return f"active at {self.density:.2%} of {count}positions"

    def __repr__(self) -> str:
        words = " ".join(repr(token) for token, _ in self.top[:5])
        lines = [f"feature {self.index}: {self.frequency}; raises {words or 'nothing known'}"]
        for example in self.examples[:5]:
            shown = [*example.tokens]
            shown[example.pos] = f"«{shown[example.pos]}»"
            lines.append(f"  {example.activations[example.pos]:.4g}  {''.join(shown)!r}")
        return "\n".join(lines)

    def to_neuronpedia(self) -> dict[str, Any]:
        """Return it as the JSON that Neuronpedia's front end reads. None stands for NaN and infinity."""
        examples = [
            {
                "tokens": [*example.tokens],
                "tokens_acts_list": [*example.activations],
                "train_token_ind": example.pos,
                "is_repeated_datapoint": False,
            }
            for example in self.examples
        ]
        made = {
            "index": self.index,
            "examples_quantiles": [{"quantile_name": "Top activations", "examples": examples}],
            "top_logits": [token for token, _ in self.top],
            "bottom_logits": [token for token, _ in self.bottom],
            "act_min": 0.0,
            "act_max": self.largest,
            "quantile_values": [self.largest * (n + 1) / _BINS for n in range(_BINS)],
            "histogram": [*self.histogram],
            "activation_frequency": self.density,
        }
        return dict(strict_json.finite(made))

    @classmethod
    def from_neuronpedia(cls, data: Mapping[str, Any]) -> "FeatureCard":
        """Read what `to_neuronpedia`, or another tool, wrote.

        Logits are then NaN, as the format has none. Null is NaN too.

        Raises:
            ValueError: if it has no index or no examples.
        """
        missing = [name for name in ("index", "examples_quantiles") if name not in data]
        if missing:
            raise ValueError(
                f"a feature of Neuronpedia must have index and examples_quantiles; got none of {missing}"
            )
        examples = [
            FeatureExample(
                each["tokens"],
                [*map(_number, each["tokens_acts_list"])],
                int(each["train_token_ind"]),
            )
            for quantile in data["examples_quantiles"]
            for each in quantile["examples"]
        ]
        top, bottom = (
            [(token, float("nan")) for token in data.get(f"{end}_logits", ())]
            for end in ("top", "bottom")
        )
        return cls(
            int(data["index"]), _number(data.get("activation_frequency")), examples, top, bottom,
            histogram=[*map(_number, data.get("histogram", ()))], largest=_number(data.get("act_max")),
        )  # fmt: skip


def _number(value: float | None) -> float:
    """A number of JSON; NaN for null."""
    return math.nan if value is None else float(value)


class FeatureCards(list[FeatureCard], pictures.Shown):
    """Cards of features. A notebook shows them as a page, which `save("cards.html")` writes.

    `save("cards")` makes a folder with a JSON file of Neuronpedia's format for each feature, named by
    its number.
    """

    def __repr__(self) -> str:
        more = f"\nand {len(self) - 5} more" if len(self) > 5 else ""
        return "\n".join(map(repr, self[:5])) + more

    def view(self) -> pictures.View:
        """One card below the other."""
        return pictures.features(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page where the path ends in `.html`, and otherwise a folder of JSON files.

        Raises:
            ValueError: if the suffix is that of another kind of file, such as `.json`, and no folder has
                this name.
        """
        if storage.path_of(path).suffix.lower() == ".html":
            super().save(path)
        else:
            storage.require_folder(path, [".html"])
            self._save(storage.path_of(path))

    def _save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for card in self:
            with storage.replacing(path / f"{card.index}.json") as partial:
                partial.write_text(strict_json.dumps(card.to_neuronpedia()), encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "FeatureCards":
        """Read the files that `save`, or another tool, wrote."""
        paths = sorted(Path(directory).glob("*.json"), key=lambda path: (len(path.stem), path.stem))
        if not paths:
            raise FileNotFoundError(f"{directory} must have JSON files of features; it has none")
        # In files of other tools, NaN is a number that is not known.
        return cls(
            FeatureCard.from_neuronpedia(json.loads(path.read_text("utf-8"))) for path in paths
        )


class _Row(NamedTuple):
    """A text: its tokens, their values, which of them count, and whether no copy was before it."""

    tokens: list[int]
    values: Tensor
    counts: Tensor
    is_new: bool


@shows_progress
@without_gradients
def feature_cards(
    model: nn.Module,
    dictionary: Dictionaries,
    texts: Texts,
    features: Sequence[int],
    *,
    reads: str | None = None,
    k: int = 8,
    pos: Index | None = None,
    batch: int = 16,
    progress: bool = True,
) -> FeatureCards:
    """Find where features are active and what they write.

    Args:
        model: any model in evaluation mode. Without `W_U` cards have no logits.
        dictionary, reads: see `splice`; one dictionary.
        texts: the texts, read once.
        features: the numbers of the features.
        k: how many examples, tokens and neighbours each card has.
        pos: the positions of each text that count; None for all. At others examples show 0.
        batch: how many texts are read together.
        progress: whether to show a bar after two seconds.

    Raises:
        ValueError: if there are several dictionaries, no text, or no such feature.
        TypeError, UnknownNameError, HookError, ModeError: as for `splice`.

    Warns:
        UserWarning: as for `splice`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> cards = feature_cards(load("pydoc-4l"), load_sae("pydoc-4l/resid_post"), ["def f(x): return x"], [0, 5], k=3)
    >>> [card.index for card in cards]
    [0, 5]
    """
    unspliced = runner_of(model)
    parts = placed(unspliced, dictionary, "live", reads)
    if len(parts) != 1:
        raise ValueError(f"cards are of one dictionary at a time; got {len(parts)}")
    ((point, part),) = parts.items()
    chosen = part.dictionary
    require_integer("k", k)
    require_kind("features", features, Sequence, "a list of numbers of features", "[3, 17]")
    wrong = [n for n in features if not isinstance(n, int) or not 0 <= n < chosen.n_features]
    if wrong or not features:
        raise ValueError(
            f"features must be numbers from 0 to {chosen.n_features - 1}, at least one; got {[*features]}"
        )
    writes = _tokens_moved(model, part.has_heads, chosen, features, k)
    rows: list[_Row] = []
    seen: set[str] = set()
    with with_parts(model, unspliced.points, parts):
        runner = HookedRunner(model)
        for _, text in batches(texts, model, batch):
            values = runner.capture(text.tokens, names=f"{point}.features", **text.arguments(model))
            active = values[f"{point}.features"][..., [*features]].float().cpu()
            columns = (text.tokens, active, text.at(pos), unseen(text, seen), text.real)
            rows += [
                _Row(tokens[real].tolist(), value[real], counts[real], bool(is_new))
                for tokens, value, counts, is_new, real in zip(
                    *(column.cpu() for column in columns), strict=True
                )
            ]
    if not any(bool(row.counts.any()) for row in rows):
        raise ValueError("pos must select a token of at least one text; got none")
    return FeatureCards(
        _card(
            model,
            index,
            [row._replace(values=row.values[:, n]) for row in rows],
            k,
            _nearest(chosen, index, k),
            *writes[n],
        )
        for n, index in enumerate(progress_of(features, "cards", len(features)))
    )


Scored = list[tuple[str, float]]


def _card(
    model: nn.Module, index: int, rows: list[_Row], k: int, nearest: list[tuple[int, float]],
    top: Scored, bottom: Scored,
) -> FeatureCard:  # fmt: skip
    values = torch.cat([row.values[row.counts] for row in rows])
    shown_rows = [(row.tokens, row.values.where(row.counts, 0)) for row in rows if row.is_new]
    best = sorted(shown_rows, key=lambda row: -row[1].max().item())[:k]
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    examples = []
    for tokens, value in best:
        at = int(value.argmax())
        if value[at] <= 0:
            continue
        first = max(0, at - _BEFORE)
        shown = slice(first, at + _AFTER + 1)
        examples.append(FeatureExample([*write(tokens)][shown], value[shown].tolist(), at - first))
    largest = values.max().clamp(min=0).item()
    counts = torch.histc(values[values > 0], _BINS, 0, largest or 1.0)
    return FeatureCard(
        index,
        (values != 0).float().mean().item(),
        examples,
        top,
        bottom,
        nearest,
        counts.tolist(),
        largest,
        len(values),
    )


def _nearest(dictionary: Dictionary, index: int, k: int) -> list[tuple[int, float]]:
    rows = nn.functional.normalize(dictionary.W_dec.float(), dim=1)
    cosines = rows @ rows[index]
    cosines[index] = -torch.inf
    best = cosines.topk(min(k, len(rows) - 1))
    return [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def _tokens_moved(
    model: nn.Module, has_heads: bool, dictionary: Dictionary, features: Sequence[int], k: int
) -> list[tuple[Scored, Scored]]:
    """The tokens that each feature raises and lowers most."""
    directions = None
    for fold in () if has_heads else (True, False):  # norms of the stream itself cannot be folded
        with suppress(TypeError, ValueError):  # it may have no unembedding
            directions = token_directions(model, torch.arange(n_logits(model)), fold)
            break
    if directions is None or directions.shape[1] != dictionary.d_out:
        return [([], [])] * len(features)
    rows = dictionary.W_dec[[*features]].to(directions)
    logits = to_device(rows, directions.device) @ directions.mT
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    ends = []
    for sign in (1, -1):
        best = (sign * logits).topk(min(k, logits.shape[1]), dim=1)
        ends.append([
            [*zip(write(tokens), (sign * values).tolist(), strict=True)]
            for tokens, values in zip(best.indices.tolist(), best.values, strict=True)
        ])  # fmt: skip
    return [*zip(*ends, strict=True)]
