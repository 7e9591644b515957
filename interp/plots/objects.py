"""Pictures of pairs of texts, dictionaries and scores of dictionaries.

The method `view()` of these objects returns them.
"""

from typing import Any

from interp.plots.tables import curves, effects
from interp.plots.texts import text
from interp.plots.view import View, told

_MOST_PAIRS = 6


def pairs(pairs: Any, title: str, write: Any) -> View:
    """Draw the first pairs as tokens, and mark differing tokens.

    Args:
        pairs: the pairs.
        title: the title of the view.
        write: a function that returns the texts of tokens.
    """
    parts = []
    for number in range(min(len(pairs), _MOST_PAIRS)):
        pair = pairs[number]
        runs = [pair.text] if pair.corrupted is None else pair.texts("noising")
        listed = [run.listed()[0] for run in runs]
        for name, tokens, compared in zip(
            ("clean", "corrupted"), listed, listed[::-1], strict=False
        ):
            differs = []
            for pos, token in enumerate(tokens):
                # A slice is empty beyond the end of a shorter text.
                differs.append(float(token not in compared[pos : pos + 1]))
            shown = text(write(tokens), differs, title=f"{name} {number}")
            parts += [{**part, "heading": f"{name}, pair {number}"} for part in shown.parts]
    says = [] if pairs.answers is None else [repr(pairs.metric)]
    return View(title, parts, says=says)


def dictionary(dictionary: Any) -> View:
    """Draw the lengths of a dictionary's rows, below its description."""
    lengths = {"encoder": dictionary.W_enc.norm(dim=0), "decoder": dictionary.W_dec.norm(dim=1)}
    lines = {name: size.float().sort(descending=True).values for name, size in lengths.items()}
    shown = curves(lines, axis="features, by length", title="lengths of rows")
    says = [dictionary.extra_repr(), f"activation: {dictionary.activation}"]
    return View("a dictionary", shown.parts, says=[*says, *told(dictionary.config)])


def crosscoder(crosscoder: Any) -> View:
    """Draw the lengths of the decoder rows of each member, and the relative norms of two members.

    Args:
        crosscoder: the crosscoder.
    """
    names = crosscoder.names
    lengths = crosscoder.W_dec.float().norm(dim=2).sort(dim=1, descending=True).values
    lines = dict(zip(names, lengths, strict=True))
    parts = curves(lines, axis="features, by length", title="lengths of decoder rows").parts
    if len(names) == 2:
        norms = crosscoder.relative_norms(1).sort().values
        title = f"relative decoder norms: 0 is only {names[0]}, 1 is only {names[1]}"
        parts = [*parts, *curves({"relative norm": norms}, axis="features", title=title).parts]
    says = [crosscoder.extra_repr(), f"activation: {crosscoder.activation}"]
    return View("a crosscoder", parts, says=[*says, *told(crosscoder.config)])


def latent_scaling(scaling: Any) -> View:
    """Draw the relative decoder norms, and both ratios of features whose relative norm is near 1.

    Args:
        scaling: the latent scaling of a crosscoder.
    """
    norms = {"relative norm": scaling.relative_norm.sort().values}
    title = f"relative decoder norms: 0 is only {scaling.other}, 1 is only {scaling.member}"
    parts = [*curves(norms, axis="features", title=title).parts]
    is_only = (scaling.relative_norm > 0.9) & (scaling.density > 0)
    if is_only.any():
        ratios = {
            f"nu of the {target}": scaling.nu(target)[is_only].sort().values
            for target in ("error", "reconstruction")
        }
        axis = "features with a relative norm above 0.9, in order"
        parts += curves(ratios, axis=axis, title="1 is as much in the other model").parts
    title, *says = repr(scaling).splitlines()
    return View(title, parts, says=says)


def dictionary_scores(scores: Any, losses: Any) -> View:
    """Draw the losses and the density of features.

    Args:
        scores: the scores of dictionaries.
        losses: the losses, a `Result`.
    """
    parts = [{**part, "heading": "losses"} for part in effects(losses).parts]
    for name, point in scores.points.items():
        densities = {name: point.density.sort(descending=True).values}
        shown = curves(densities, axis="features, by density", unit="share of positions")
        parts += [{**part, "heading": f"density at {name}"} for part in shown.parts]
    title, *says = repr(scores).splitlines()
    return View(title, parts, says=says)
