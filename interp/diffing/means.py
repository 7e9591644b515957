"""Mean differences of values between two models, at one point."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import float32_rounding, generator, require_integer, to_device
from hooks.shared import names_by_layer
from interp.diffing.twins import TwoModels
from interp.protocol import of

_TRIES = 100
"""The number of random halves that are tried for each draw."""


class SumsOfTexts(NamedTuple):
    """Sums of the values of each text over its tokens, in float64, and the numbers of tokens.

    Attributes:
        name: the name of the point.
        tuned, base: the sums of both models.
        counts: the number of tokens of each text.
    """

    name: str
    tuned: Float[Tensor, "text d"]
    base: Float[Tensor, "text d"]
    counts: Int[Tensor, " text"]

    def mean(self, model: str, texts: slice = slice(None)) -> Float[Tensor, " d"]:
        """Return the mean value of one model over the tokens of some texts.

        Args:
            model: `tuned` or `base`.
            texts: the texts.
        """
        sums: Tensor = getattr(self, model)
        return sums[texts].sum(0) / self.counts[texts].sum()

    def difference(self, texts: slice = slice(None)) -> Float[Tensor, " d"]:
        """Return the mean difference, tuned - base, over the tokens of some texts."""
        return self.mean("tuned", texts) - self.mean("base", texts)

    def exchanged(self, draws: int, seed: int) -> list[Float[Tensor, " d"]]:
        """Return mean differences after the two models are exchanged in half of the texts.

        Each draw exchanges the models in another half of the texts. A mean difference that is equal
        to an earlier one up to rounding, as for texts that begin with the same tokens, is left out.
        If the texts have fewer different halves than `draws`, there is one result for each half.
        For a single text, the list is empty.

        Args:
            draws: the number of draws.
            seed: the seed of the draws.
        """
        n_texts = len(self.counts)
        n_halves = math.comb(n_texts, n_texts // 2) if n_texts > 1 else 0
        gaps = (self.tuned - self.base) / self.counts.sum()
        sizes = (self.tuned.abs() + self.base.abs()).sum(0) / self.counts.sum()
        rounding = float32_rounding() * sizes
        halves: set[frozenset[int]] = set()
        differences: list[Tensor] = []
        for draw in range(_TRIES * draws):
            if len(differences) == draws or len(halves) == n_halves:
                break
            order = torch.randperm(n_texts, generator=generator(seed, "exchange", draw))
            half = frozenset(order[: n_texts // 2].tolist())
            if half in halves:
                continue
            halves.add(half)
            signs = torch.ones(n_texts, 1, dtype=gaps.dtype)
            signs[[*half]] = -1
            difference = (gaps * signs).sum(0)
            earlier = ((difference - other).abs() <= rounding for other in differences)
            if not any(same.all() for same in earlier):
                differences.append(difference)
        return differences


def means_of(
    models: TwoModels,
    rows: list[list[int]],
    site: str,
    layer: int,
    first: int | None,
    batch: int,
) -> SumsOfTexts:
    """Return the sums of the values of each text at one point. Axes after `pos` are flattened.

    Args:
        models: the two models.
        rows: the tokens of each text.
        site: the last part of the name of the point.
        layer: the layer; negative layers count from the last one.
        first: the number of first tokens of each text that are read; None for all tokens.
        batch: the number of texts in a batch.

    Raises:
        UnknownNameError: if the site is unknown.
        ValueError: if the layer does not exist, the values have no axis `pos` after `batch`, or
            `first` is below 1.
    """
    names = [*names_by_layer(site, models.runner.points).items()]
    require_integer("layer", layer, least=-len(names), most=max(dict(names)))
    name = names[layer][1] if layer < 0 else dict(names).get(layer)
    if name is None:
        raise ValueError(f"layer must have the site {site!r}; got {layer} of {[*dict(names)]}")
    axes = models.runner.points[name].axes
    if axes[:2] != ("batch", "pos"):
        raise ValueError(f"site must have the axes batch pos ...; got {site!r} with {axes}")
    if first is not None:
        require_integer("first", first)
        # In a causal model, later tokens do not change earlier values, so leave them out.
        if getattr(of(models.tuned), "is_causal", True):
            rows = [row[:first] for row in rows]
    sums: dict[str, list[Tensor]] = {"tuned": [], "base": []}
    counts = []
    for part in models.batches(rows, batch):
        tuned, base = models.capture(part, [name])
        read = part.tuned.real.clone()
        if first is not None:
            read[:, first:] = False
        counts.append(read.sum(1).cpu())
        for kind, cache in (("tuned", tuned), ("base", base)):
            values = cache[name].flatten(2).double()
            mask = to_device(read, values.device)[..., None]
            sums[kind].append(values.where(mask, 0).sum(1).cpu())
    return SumsOfTexts(
        name=name,
        tuned=torch.cat(sums["tuned"]),
        base=torch.cat(sums["base"]),
        counts=torch.cat(counts),
    )
