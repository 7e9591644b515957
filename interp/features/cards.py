"""Cards of features, for a page or for Neuronpedia's JSON.

A card shows where and how often a feature is active, and which tokens it promotes.

1. Run the model on texts, and cache the chosen features at every position.
2. The examples of a feature are the texts around its largest values. Each text is used at most
   once, and copies of a text count as one text.
3. The tokens that a feature raises and lowers come from its decoder row times the directions of
   tokens (`token_directions`).
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
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    Index,
    Text,
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
from interp import plots
from interp.features.splicing import Dictionaries, placed
from interp.inputs.copies import unseen
from interp.inputs.texts import batches
from interp.json_form import Table, columns, form
from interp.protocol import n_logits, runner_of
from interp.spectral.weights import token_directions

_BINS = 20
_BEFORE = 24
_AFTER = 8
_TITLE = "before each text: the feature's largest value there, which multiplies its decoder row"


@dataclass(frozen=True)
class FeatureExample:
    """A text around a position where a feature is large.

    Attributes:
        tokens: the tokens as text, or their ids if the model has no tokenizer.
        activations: the value of the feature at each token.
        pos: the index of the token where the feature is largest.

    >>> example = FeatureExample(["import", " os"], [0.0, 1.5], pos=1)
    >>> example.tokens[example.pos]
    ' os'
    """

    tokens: Sequence[str]
    activations: Sequence[float]
    pos: int


@dataclass(frozen=True)
class FeatureCard:
    """A description of one feature: where it is active, and what it writes. `feature_cards` returns
    cards.

    Attributes:
        index: the index of the feature in the dictionary.
        density: the share of positions where the feature is not 0.
        examples: the texts where the feature is largest, in descending order.
        top, bottom: the tokens whose logits the feature raises and lowers most, with the change of
            the logit for a feature value of 1. The change is not divided by the scale of the final
            norm, which depends on the text. Both are empty if the feature does not write to the
            residual stream.
        nearest: the most similar features of the dictionary, with the cosine of their decoder rows.
        histogram: the number of positions with a positive value in each of 20 equal bins from 0 to
            `largest`.
        largest: the largest value of the feature.
        n_tokens: the number of positions that were read, or None if it is unknown. A feature that
            is active at none of them may only be rare, unless they are a million or more.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> (card,) = feature_cards(model, sae, ["def f(x): return x", "part KV8"], [332], k=3)
    >>> card.index, f"{card.density:.2f}", card.examples[0].tokens[6]  # largest at the x
    (332, '0.12', 'x')
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
        """The density as a sentence."""
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
        """Return the card as the JSON that Neuronpedia's front end reads.

        Neuronpedia's form has no place for the logits of tokens, similar features and the number of
        positions. They are in the additional field `hookscope`. NaN and infinity become None.
        """
        examples = [
            {
                "tokens": [*example.tokens],
                "tokens_acts_list": [*example.activations],
                "train_token_ind": example.pos,
                "is_repeated_datapoint": False,
            }
            for example in self.examples
        ]
        facts = {
            "index": self.index,
            "examples_quantiles": [{"quantile_name": "Top activations", "examples": examples}],
            "top_logits": [token for token, _ in self.top],
            "bottom_logits": [token for token, _ in self.bottom],
            "act_min": 0.0,
            "act_max": self.largest,
            "quantile_values": [self.largest * end / _BINS for end in range(1, _BINS + 1)],
            "histogram": [*self.histogram],
            "activation_frequency": self.density,
            "hookscope": {
                "top_values": [value for _, value in self.top],
                "bottom_values": [value for _, value in self.bottom],
                "nearest": [[*pair] for pair in self.nearest],
                "n_tokens": self.n_tokens,
            },
        }
        return dict(strict_json.finite(facts))

    @classmethod
    def from_neuronpedia(cls, data: Mapping[str, Any]) -> "FeatureCard":
        """Return a card from JSON that `to_neuronpedia` or another tool wrote.

        Logits are NaN if another tool wrote the JSON, because Neuronpedia's form does not contain
        them. Null is read as NaN.

        Raises:
            ValueError: if the index or the examples are missing.
        """
        missing = [name for name in ("index", "examples_quantiles") if name not in data]
        if missing:
            raise ValueError(
                "a feature of Neuronpedia must have index and examples_quantiles; missing: "
                f"{missing}"
            )
        examples = []
        for quantile in data["examples_quantiles"]:
            for example in quantile["examples"]:
                examples.append(
                    FeatureExample(
                        tokens=example["tokens"],
                        activations=[*map(_number, example["tokens_acts_list"])],
                        pos=int(example["train_token_ind"]),
                    )
                )
        more = data.get("hookscope", {})
        promoted = {}
        for name in ("top", "bottom"):
            tokens = data.get(f"{name}_logits", ())
            values = map(_number, more.get(f"{name}_values", [None] * len(tokens)))
            promoted[name] = [*zip(tokens, values, strict=True)]
        return cls(
            index=int(data["index"]),
            density=_number(data.get("activation_frequency")),
            examples=examples,
            **promoted,
            nearest=[(int(index), _number(cosine)) for index, cosine in more.get("nearest", ())],
            histogram=[*map(_number, data.get("histogram", ()))],
            largest=_number(data.get("act_max")),
            n_tokens=more.get("n_tokens"),
        )


def _number(value: float | None) -> float:
    """Return a number of JSON, or NaN for null."""
    return math.nan if value is None else float(value)


class FeatureCards(list[FeatureCard], plots.Shown):
    """A list of cards of features, which a notebook displays as a page.

    `save("cards.html")` writes this page. `save("cards")` writes a folder with a JSON file in
    Neuronpedia's format for each feature, named by the index of the feature.

    >>> import tempfile
    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> cards = feature_cards(model, sae, ["def f(x): return x"], [332, 1011], k=3)
    >>> cards.save(folder := tempfile.mkdtemp())
    >>> FeatureCards.load(folder)[0]
    feature 332: active at 16.67% of 18 positions; raises ',' ']' 'h'
      3.505  'def f(«x»): retur'
    """

    def __repr__(self) -> str:
        lines = [repr(card) for card in self[:5]]
        if any(card.examples for card in self[:5]):
            lines.insert(0, _TITLE)
        if len(self) > 5:
            lines.append(f"and {len(self) - 5} more")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all cards in the JSON form of all results; see `interp.json_form`.

        Each entry of `feature.examples` is a list of texts, and each text a list of its tokens, the
        values of the feature, and the index of the largest value. Each entry of `feature.top` and
        `feature.bottom` is a list of tokens with their logits, and each entry of `feature.nearest`
        is a list of features with cosines.
        """
        labels = [card.index for card in self]
        units = {
            "density": "share of positions",
            "largest": "value of the feature",
            "n_tokens": "tokens",
            "histogram": "positions",
            "top": "logits",
            "bottom": "logits",
            "nearest": "cosine",
        }
        tables = columns("feature", self, f"index {' '.join(units)}", units, labels)
        examples = []
        for card in self:
            of_card = [[text.tokens, text.activations, text.pos] for text in card.examples]
            examples.append(of_card)
        unit = "value of the feature"
        tables["feature.examples"] = Table(examples, "feature", unit, {"feature": labels})
        return form("FeatureCards", tables)

    def view(self) -> plots.View:
        """Return a view of all cards, one below the other."""
        return plots.features(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page if the path ends in `.html`, and otherwise a folder of JSON files.

        Raises:
            ValueError: if the path ends in the suffix of another kind of file, such as `.json`, and
                is not an existing folder.
        """
        if storage.path_of(path).suffix.lower() == ".html":
            super().save(path)
        else:
            storage.require_folder(path, [".html"])
            self._save(storage.path_of(path))

    def _save(self, path: Path) -> None:
        """Write a folder with a JSON file for each card."""
        path.mkdir(parents=True, exist_ok=True)
        for card in self:
            with storage.replacing(path / f"{card.index}.json") as partial:
                partial.write_text(strict_json.dumps(card.to_neuronpedia()), encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "FeatureCards":
        """Return the cards in a folder of JSON files that `save` or another tool wrote."""
        paths = sorted(Path(directory).glob("*.json"), key=lambda path: (len(path.stem), path.stem))
        if not paths:
            raise FileNotFoundError(
                f"{directory} must contain JSON files of features; it contains none"
            )
        # Other tools write NaN for unknown numbers, so the JSON is not read strictly.
        return cls(
            FeatureCard.from_neuronpedia(json.loads(path.read_text("utf-8"))) for path in paths
        )


class Row(NamedTuple):
    """A text of a run.

    Attributes:
        tokens: the real tokens.
        values: the values of the features, [pos feature], or of one feature, [pos].
        counts: True at positions that count.
        is_new: False for a copy of an earlier text.
    """

    tokens: list[int]
    values: Tensor
    counts: Tensor
    is_new: bool


@shows_progress
@without_gradients
def feature_cards(
    model: nn.Module,
    dictionary: "Dictionaries",
    texts: "Texts",
    features: Sequence[int],
    *,
    reads: str | None = None,
    k: int = 8,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> FeatureCards:
    """Return a card for each feature: texts where it is active, and the tokens that it promotes.

    Args:
        model: any model in evaluation mode. If the model has no `W_U`, the cards have no logits.
        dictionary, reads: a single dictionary, and the point that it reads; see `splice`.
        texts: the texts. They are read once.
        features: the indices of the features.
        k: the number of examples, tokens and neighbours on each card. Default: 8.
        pos: the positions of each text that count. Position 0 is the first token that is not
            padding, and negative positions count from the last. In the examples, the value at all
            other positions is 0. Default: all positions.
        batch: the number of texts in a batch. Default: 16.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        The cards, in the order of `features`.

    Raises:
        ValueError: if there are several dictionaries, there is no text, or a feature does not
            exist.
        TypeError, UnknownNameError, HookError, ModeError: for the same reasons as in `splice`.

    Warns:
        UserWarning: for the same reasons as in `splice`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> feature_cards(model, sae, ["def f(x): return x"], [332, 1011], k=3)
    before each text: the feature's largest value there, which multiplies its decoder row
    feature 332: active at 16.67% of 18 positions; raises ',' ']' 'h'
      3.505  'def f(«x»): retur'
    feature 1011: active at 5.56% of 18 positions; raises '!' 'J' '%'
      0.7519  'def f(«x»): retur'
    """
    unspliced = runner_of(model)
    parts = placed(unspliced, dictionary, error="live", reads=reads)
    if len(parts) != 1:
        raise ValueError(
            f"feature_cards needs a single dictionary; got {len(parts)}; choose one by its point, "
            f"such as dictionary[{next(iter(parts), None)!r}]"
        )
    ((point, part),) = parts.items()
    require_integer("k", k)
    require_features(features, part.dictionary.n_features)
    rows: list[Row] = []
    digests: set[str] = set()
    with with_parts(model, unspliced.points, parts):
        runner = HookedRunner(model)
        name = f"{point}.features"
        for _, text in batches(texts, model, batch):
            cache = runner.capture(text.tokens, names=name, **text.arguments(model))
            values = cache[name][..., [*features]].float()
            rows += rows_of(text, values, counts=text.at(pos), is_new=unseen(text, digests))
    W_dec = part.dictionary.W_dec
    return cards_of(model, rows, W_dec=W_dec, features=features, k=k, has_heads=part.has_heads)


def cards_of(
    model: nn.Module,
    rows: list[Row],
    W_dec: Float[Tensor, "feature d_out"],
    features: Sequence[int],
    k: int,
    has_heads: bool = False,
) -> FeatureCards:
    """Return the card of each feature from its values on texts.

    Args:
        model: the model, which converts tokens to text.
        rows: the texts, with the values of the chosen features.
        W_dec: the decoder rows of all features.
        features: the indices of the chosen features.
        k: the number of examples, tokens and neighbours on each card.
        has_heads: whether the decoder writes vectors of heads, which are not in the residual
            stream. Default: False.

    Raises:
        ValueError: if no token counts.
    """
    if not any(bool(row.counts.any()) for row in rows):
        raise ValueError("pos must select a token of at least one text; got none")
    tokens_moved = _tokens_moved(model, has_heads, W_dec=W_dec, features=features, k=k)
    cards = FeatureCards()
    for column, index in enumerate(progress_of(features, "cards", len(features))):
        top, bottom = tokens_moved[column]
        of_feature = [row._replace(values=row.values[:, column]) for row in rows]
        nearest = nearest_features(W_dec, index, k)
        card = _card(model, index, rows=of_feature, k=k, nearest=nearest, top=top, bottom=bottom)
        cards.append(card)
    return cards


def require_features(features: object, n_features: int) -> None:
    """Check that features are a list of indices of a dictionary's features.

    Raises:
        TypeError: if `features` is not a list.
        ValueError: if the list is empty, or an index does not exist.
    """
    require_kind(
        "features",
        features,
        kind=Sequence,
        words="a list of indices of features",
        call="for example [3, 17]",
    )
    assert isinstance(features, Sequence)
    exist = [isinstance(index, int) and 0 <= index < n_features for index in features]
    if not exist or not all(exist):
        raise ValueError(
            f"features must be a list of at least one index in [0, {n_features}); got {[*features]}"
        )


def rows_of(
    text: Text,
    values: Float[Tensor, "batch pos feature"],
    counts: Bool[Tensor, "batch pos"],
    is_new: Bool[Tensor, " batch"],
) -> list[Row]:
    """Return the real tokens of each text of a batch with their values, on the CPU."""
    tensors = (text.tokens, values, counts, is_new, text.real)
    on_cpu = (tensor.cpu() for tensor in tensors)
    return [
        Row(
            tokens=row_tokens[real].tolist(),
            values=row_values[real],
            counts=row_counts[real],
            is_new=bool(row_is_new),
        )
        for row_tokens, row_values, row_counts, row_is_new, real in zip(*on_cpu, strict=True)
    ]


Scored = list[tuple[str, float]]


def _card(
    model: nn.Module,
    index: int,
    rows: list[Row],
    k: int,
    nearest: list[tuple[int, float]],
    top: Scored,
    bottom: Scored,
) -> FeatureCard:
    """Return the card of a feature from its values on texts, and from its decoder row.

    Args:
        model: the model, which converts tokens to text.
        index: the index of the feature.
        rows: the texts, with the values of this feature.
        k: the number of examples.
        nearest, top, bottom: see `FeatureCard`.
    """
    values = torch.cat([row.values[row.counts] for row in rows])
    shown_rows = [(row.tokens, row.values.where(row.counts, 0)) for row in rows if row.is_new]
    largest_first = sorted(shown_rows, key=lambda row: -row[1].max().item())
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    examples = []
    for tokens, activations in largest_first[:k]:
        pos = int(activations.argmax())
        if activations[pos] <= 0:
            continue
        first = max(0, pos - _BEFORE)
        shown = slice(first, pos + _AFTER + 1)
        examples.append(
            FeatureExample(
                tokens=[*write(tokens)][shown],
                activations=activations[shown].tolist(),
                pos=pos - first,
            )
        )
    largest = values.max().clamp(min=0).item()
    counts = torch.histc(values[values > 0], bins=_BINS, min=0, max=largest or 1.0)
    return FeatureCard(
        index=index,
        density=(values != 0).float().mean().item(),
        examples=examples,
        top=top,
        bottom=bottom,
        nearest=nearest,
        histogram=counts.tolist(),
        largest=largest,
        n_tokens=len(values),
    )


def nearest_features(
    W_dec: Float[Tensor, "feature d_out"], index: int, k: int
) -> list[tuple[int, float]]:
    """Return the features with the most similar decoder rows, with the cosines."""
    rows = nn.functional.normalize(W_dec.float(), dim=1)
    cosines = rows @ rows[index]
    cosines[index] = -torch.inf
    best = cosines.topk(min(k, len(rows) - 1))
    return [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def _tokens_moved(
    model: nn.Module,
    has_heads: bool,
    W_dec: Float[Tensor, "feature d_out"],
    features: Sequence[int],
    k: int,
) -> list[tuple[Scored, Scored]]:
    """Return for each feature the tokens with the largest and the smallest change of their logits.

    Both lists are empty if the feature does not write to the residual stream, or if the model has
    no unembedding.

    Args:
        model: the model.
        has_heads: whether the decoder writes vectors of heads, which are not in the residual
            stream.
        W_dec: the decoder rows of all features.
        features: the indices of the features.
        k: the number of tokens in each list.
    """
    directions = None
    # First fold the final norm into the directions. This raises an error if a norm acts on the
    # stream itself. Without folding, an error means that the model has no unembedding.
    for fold in () if has_heads else (True, False):
        with suppress(TypeError, ValueError):
            directions = token_directions(model, torch.arange(n_logits(model)), fold)
            break
    if directions is None or directions.shape[1] != W_dec.shape[1]:
        return [([], [])] * len(features)
    rows = W_dec[[*features]].to(directions)
    logits = to_device(rows, directions.device) @ directions.mT
    write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
    n_tokens = min(k, logits.shape[1])
    raised = logits.topk(n_tokens, dim=1)
    lowered = (-logits).topk(n_tokens, dim=1)

    def named(tokens: Tensor, changes: Tensor) -> Scored:
        return [*zip(write(tokens.tolist()), changes.tolist(), strict=True)]

    return [
        (named(raised.indices[n], raised.values[n]), named(lowered.indices[n], -lowered.values[n]))
        for n in range(len(features))
    ]
