"""Tokens that a mean difference between two models promotes, next to tokens of other directions.

1. The mean difference of the stream over the first tokens of some texts (`means`) is read like a
   stream: the final norm and the unembedding give a logit of each token. Minder et al. 2025,
   "Narrow finetuning leaves clearly readable traces" (arXiv 2510.13900), find the subject of a
   fine-tuning in these tokens, on texts that do not contain it.
2. The same is done for control directions (`directions_of`): each half of the texts alone; the
   difference of the base between the two halves; the mean difference after the models are
   exchanged in half of the texts; and random directions of the size of the mean difference.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import generator, require_integer, writer_of
from interp import plots
from interp.diffing.means import SumsOfTexts
from interp.diffing.twins import TwoModels
from interp.inputs.token_positions import tokens_of
from interp.inputs.words import token_ids
from interp.json_form import Table, form
from interp.protocol import of
from interp.results.result import Result

_SHOWN = 8


@dataclass(frozen=True, eq=False, repr=False)
class DifferenceLens(plots.Shown):
    """Logits that a mean difference and control directions promote.

    A final norm removes the size of a direction, so tokens of directions of any size can be
    compared. Sizes are in `sizes`. In all tensors, row i belongs to the direction `rows[i]`.

    Attributes:
        name: the point of the values.
        rows: the names of the directions. The first is `difference`, the mean difference. The
            others are control directions, such as `random 0`.
        vectors: the directions.
        logits: the logits of each direction, read by the final norm and the unembedding of the
            tuned model.
        to_text: the function that returns the texts of tokens; None without a tokenizer.

    >>> import copy
    >>> from interp import compare_models
    >>> from models import load
    >>> base = load("pydoc-4l")
    >>> tuned = copy.deepcopy(base)
    >>> with torch.no_grad():  # layer 3 now writes the direction of the token Q
    ...     _ = tuned.blocks[3].mlp.output.bias.add_(8 * tuned.W_U[:, base.encoded("Q")[0]])
    >>> lens = compare_models(tuned, base, "def f(x):").lens(layer=3, draws=2)
    >>> [(row, base.to_text(token)) for row, token in zip(lens.rows, lens.top(1))]
    [('difference', 'Q'), ('random 0', 's'), ('random 1', 'l')]
    """

    name: str
    rows: tuple[str, ...]
    vectors: Float[Tensor, "row d_model"]
    logits: Float[Tensor, "row vocab"]
    to_text: Any = None
    model: Any = None

    @property
    def sizes(self) -> Float[Tensor, " row"]:
        """The length of each direction, in the unit of the stream."""
        return self.vectors.norm(dim=-1)

    def top(self, k: int = 20) -> Int[Tensor, "row _top"]:
        """Return the tokens with the largest logits of each direction, the largest first.

        Args:
            k: the number of tokens; all tokens of a smaller vocabulary.

        Raises:
            ValueError: if `k` is below 1.
        """
        require_integer("k", k)
        return self.logits.topk(min(k, self.logits.shape[-1])).indices

    def rank(self, tokens: Any) -> Int[Tensor, "row _token"]:
        """Return the rank of each token for each direction: the number of tokens to which the
        direction gives a larger logit. Rank 0 is the token that the direction promotes most.

        Args:
            tokens: tokens, or texts of one token each.

        Returns:
            The ranks: a row for each direction in `rows`, and a column for each token.

        Raises:
            ValueError: if a text is several tokens, or a token is not in the vocabulary.
        """
        ids = tokens_of(token_ids(self.model, tokens)).flatten()
        require_integer("the largest token", int(ids.max()), least=0, most=self.logits.shape[1] - 1)
        logits = self.logits[:, ids]
        return torch.stack([(self.logits > logit[:, None]).sum(-1) for logit in logits.mT], 1)

    def _words(self, k: int) -> list[list[str]]:
        """Return the texts, or the numbers, of the first tokens of each direction."""
        tokens = self.top(k)
        words = tokens.tolist() if self.to_text is None else self.to_text(tokens)
        texts = []
        for row in words:
            texts.append([f"{word}" if isinstance(word, int) else repr(word) for word in row])
        return texts

    def as_json(self) -> dict[str, Any]:
        """Return the size of each direction and its 20 likeliest tokens with their logits, in the
        JSON form of all results; see `interp.json_form`.
        """
        labels = {"row": self.rows}
        tokens = self.top()
        tables = {
            "size": Table(self.sizes, "row", "norm of the stream", labels),
            "tokens": Table(tokens, "row top", labels=labels),
            "logits": Table(self.logits.gather(1, tokens), "row top", "logits", labels),
        }
        if self.to_text is not None:
            tables["words"] = Table(self.to_text(tokens), "row top", labels=labels)
        return form("DifferenceLens", tables, {"point": self.name})

    def view(self) -> plots.View:
        """Draw the largest logits of the mean difference, and list the tokens of each direction."""
        logits, tokens = self.logits[0].topk(min(2 * _SHOWN, self.logits.shape[-1]))
        labels = tokens.tolist() if self.to_text is None else self.to_text(tokens)
        # Different tokens can have the same text.
        names = [f"{token} {label}" for token, label in zip(tokens.tolist(), labels, strict=True)]
        about = {"direction": "mean difference", "point": self.name}
        result = Result(
            logits[:, None],
            ("token", "example"),
            labels={"token": names},
            unit="logits",
            about=about,
        )
        title = f"tokens of the mean difference at {self.name}"
        return plots.View(title, plots.effects(result).parts, says=repr(self).splitlines())

    def __repr__(self) -> str:
        width = max(map(len, self.rows))
        lines = [f"DifferenceLens at {self.name}: the likeliest tokens of each direction"]
        for row, size, words in zip(
            self.rows, self.sizes.tolist(), self._words(_SHOWN), strict=True
        ):
            lines.append(f"  {row:<{width}}  size {size:<8.4g} {' '.join(words)}")
        n_exchanged = sum(row.startswith("models exchanged") for row in self.rows)
        n_random = sum(row.startswith("random") for row in self.rows)
        if n_exchanged < n_random:
            lines.append(f"  these few texts have only {n_exchanged} different exchanges of models")
        return "\n".join(lines)


def directions_of(
    means: SumsOfTexts, draws: int, seed: int
) -> dict[str, Float[Tensor, " d_model"]]:
    """Return the mean difference and the control directions by name.

    Some controls compare two halves of the texts. A single text has no such controls. Four texts
    can be divided into halves in only three ways, so there are at most three controls that exchange
    the models in one half.

    Args:
        means: the sums of the values of each text.
        draws: the number of random directions, and of random exchanges of the models.
        seed: the seed of the draws.
    """
    difference = means.difference()
    directions = {"difference": difference}
    half = len(means.counts) // 2
    if half:
        first, second = slice(0, half), slice(half, None)
        directions["first half of the texts"] = means.difference(first)
        directions["second half of the texts"] = means.difference(second)
        directions["base, half minus half"] = means.mean("base", first) - means.mean("base", second)
        for draw, exchanged in enumerate(means.exchanged(draws, seed)):
            directions[f"models exchanged {draw}"] = exchanged
    for draw in range(draws):
        random = torch.randn(
            difference.shape, generator=generator(seed, "direction", draw), dtype=torch.float64
        )
        directions[f"random {draw}"] = random * (difference.norm() / random.norm())
    return directions


def promoted(
    models: TwoModels, name: str, directions: dict[str, Float[Tensor, " d_model"]]
) -> DifferenceLens:
    """Return the logits of some directions.

    Args:
        models: the two models; the tuned model reads the directions.
        name: the point of the directions.
        directions: the directions by name.
    """
    vectors = torch.stack([*directions.values()])
    return DifferenceLens(
        name=name,
        rows=(*directions,),
        vectors=vectors,
        logits=logits_of_directions(models, vectors),
        to_text=writer_of(models.tuned),
        model=models.tuned,
    )


def logits_of_directions(
    models: TwoModels, vectors: Float[Tensor, "row d_model"]
) -> Float[Tensor, "row vocab"]:
    """Return the logits of the tuned model for each direction, as if it were the final stream.

    Args:
        models: the two models.
        vectors: the directions.
    """
    weight = next(models.tuned.parameters())
    rows = vectors.to(weight.device, weight.dtype)[None]
    logits: Tensor = of(models.tuned, "unembed").unembed(rows)
    return logits[0].double().cpu()
