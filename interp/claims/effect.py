"""Claims that a head or a feature of a dictionary matters, and the tests of such a claim.

The effect is the share of the behaviour, m(clean) - m(corrupted), that is lost if the value of the
head or feature in the clean run is replaced. On fresh pairs:

1. With the value of the corrupted run, the effect must be at least the promise.
2. With zeros, with the mean over all texts, and with values of random other texts, it must have at
   least a quarter of the promised size. A mean is halfway between two answers, so a smaller effect
   is expected.
3. In the reversed direction, the value of the clean run must restore as much of the behaviour in
   the corrupted run.
4. On a paraphrase, if there is one, it must have at least a quarter of the promised size.
5. The effect must be larger than the mean effect of random other heads, or of other features that
   are active in the texts.
6. A model with shuffled weights must lack the behaviour.

If later parts of the model repair the loss of a head, the effect is small, and the claim fails.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import require_integer, weights_hash, without_gradients
from interp import edits
from interp.claims.fields import fields, integer, number, text_field
from interp.claims.trial import Content, Trial, shuffled_weights, signed
from interp.claims.verdict import Test
from interp.edits import Edit
from interp.features import splice
from interp.features.dictionary import Dictionary
from interp.kinds import require_made
from interp.pairs.pairs import PatchingDirection
from interp.protocol import runner_of
from interp.runs.runs import Runs
from interp.runs.sweep import effects_of_edits

_WEAKER = 0.25
Place = tuple[str, int]
"""The name of a point, and the index of a head or feature there."""


@dataclass(frozen=True)
class EffectContent(Content):
    """A head or a feature and the promised effect.

    Attributes:
        axis: `head` or `feature`.
        point: the name of the point.
        index: the number of the head or feature.
        dictionary: the hash of the dictionary of a feature; empty for a head.
        matters: the promised share of the behaviour; negative if the part works against it.
    """

    axis: str
    point: str
    index: int
    dictionary: str
    matters: float

    kind: ClassVar[str] = "effect"
    has_paraphrase: ClassVar[bool] = True

    @classmethod
    def of_head(cls, head: tuple[int, int], matters: float) -> "EffectContent":
        """Return the content of a claim about a head, (layer, head)."""
        layer, index = head
        require_integer("layer", layer, least=0)
        require_integer("head", index, least=0)
        point = f"blocks.{layer}.attn.z"
        return cls("head", point, index, dictionary="", matters=_share(matters))

    @classmethod
    def of_feature(cls, feature: int, dictionary: Dictionary, matters: float) -> "EffectContent":
        """Return the content of a claim about a feature of a dictionary with a known point.

        Raises:
            ValueError: if the dictionary has no such feature or no point.
        """
        require_made("dictionary", dictionary, Dictionary)
        require_integer("feature", feature, least=0, most=dictionary.n_features - 1)
        if dictionary.writes is None:
            raise ValueError("dictionary must have a point that it writes; got none: pass writes=")
        return cls(
            axis="feature",
            point=f"{dictionary.writes}.features",
            index=feature,
            dictionary=weights_hash(dictionary, whole=True),
            matters=_share(matters),
        )

    @property
    def title(self) -> str:
        """The head or feature."""
        return f"{self.axis} {self.index} at {self.point}"

    @without_gradients
    def tests(self, trial: Trial) -> list[Test]:
        """Run all tests of the claim, and return their results.

        The tests replace the value of the head or feature by other values, do the same in the
        reversed direction, on a paraphrase and for random other parts, and shuffle the weights. The
        docstring of this module describes each test.

        If the metric has the same mean on the clean and the corrupted texts of the fresh pairs,
        there is no behaviour to lose. The result is then the failed test of the behaviour alone.

        Raises:
            ValueError: if the claim is about a feature, and its dictionary is not given.
        """
        if trial.behaviour.is_zero:
            return [trial.behaviour.test()]
        with self._spliced(trial):
            tests = [trial.behaviour.test(), *self._measured(trial)]
        return [*tests, shuffled_weights(trial)]

    @contextlib.contextmanager
    def _spliced(self, trial: Trial) -> Iterator[None]:
        """Splice the dictionary of a feature into the model."""
        if self.axis == "head":
            yield
            return
        dictionary = trial.dictionary
        if dictionary is None or weights_hash(dictionary, whole=True) != self.dictionary:
            got = "none" if dictionary is None else "another dictionary"
            raise ValueError(f"dictionary must be the dictionary of the claim; got {got}")
        with splice(trial.model, dictionary):
            yield

    def _measured(self, trial: Trial) -> list[Test]:
        """Run the tests that give the head or feature other values, and return their results.

        The tests are, in order: values of the corrupted texts, ablations (zeros, the mean, and
        values of other texts), the reversed direction, a paraphrase if there is one, and the same
        replacement at random other heads or features.
        """
        own = (self.point, self.index)
        clean = _Replaced(trial, self.axis, "noising")
        others = self._others(trial, clean)
        lost = clean.shares([own, *others], "other")
        tests = [signed(trial, "effect", lost[0], self.matters)]
        # In padded texts, a value of another text could be the value of padding.
        is_padded = trial.fresh.text.has_padding
        for kind in ("zero", "mean") if is_padded else ("zero", "mean", "resample"):
            (of_kind,) = clean.shares([own], kind)
            tests.append(signed(trial, f"{kind} ablation", of_kind, _WEAKER * self.matters))
        (restored,) = _Replaced(trial, self.axis, "denoising").shares([own], "other")
        tests.append(signed(trial, "reversed direction", restored, _WEAKER * self.matters))
        if trial.paraphrase is not None:
            reworded = replace(trial, fresh=trial.paraphrase, paraphrase=None)
            (lost_again,) = _Replaced(reworded, self.axis, "noising").shares([own], "other")
            promised = _WEAKER * self.matters
            tests.append(signed(reworded, "paraphrase", lost_again, promised))
        above = lost[0] - lost[1:].mean(0)
        name = f"above other {self.axis}s"
        tests.append(signed(trial, name, above, self.matters, is_difference=True))
        return tests

    def _others(self, trial: Trial, runs: "_Replaced") -> list[Place]:
        """Return random other heads, or random other features that are active in the texts."""
        if self.axis == "head":
            points = [name for name in runs.points if name.endswith(".attn.z")]
            sizes = {name: runs.values(name, "own").shape[2] for name in points}
            places = [(name, n) for name, size in sizes.items() for n in range(size)]
        else:
            values = runs.values(self.point, "own")
            active = (values != 0).flatten(0, 1).any(0).nonzero()[:, 0].tolist()
            places = [(self.point, n) for n in active]
        others = [place for place in places if place != (self.point, self.index)]
        if not others:
            raise ValueError(
                f"a comparison needs another active {self.axis} of the model; got none"
            )
        draw = torch.Generator().manual_seed(trial.seeds[0])
        order = torch.randperm(len(others), generator=draw).tolist()
        return [others[n] for n in order[: len(trial.seeds)]]

    def about(self, trial: Trial) -> Mapping[str, str]:
        """Return facts about the metric and its base."""
        return trial.behaviour.about()

    def packed(self) -> dict[str, Any]:
        """Return the content as JSON types."""
        return {
            "axis": self.axis,
            "point": self.point,
            "index": self.index,
            "dictionary": self.dictionary,
            "promised": {"matters": self.matters},
        }

    @classmethod
    def from_json(cls, value: Any, path: str) -> "EffectContent":
        """Return the content from JSON types.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        facts = fields(value, path, "axis", "point", "index", "dictionary", "promised")
        promised = fields(facts["promised"], f"{path}.promised", "matters")
        axis = text_field(facts["axis"], f"{path}.axis")
        if axis not in ("head", "feature"):
            raise ValueError(f"{path}.axis must be head or feature; got {axis!r:.60}")
        return cls(
            axis=axis,
            point=text_field(facts["point"], f"{path}.point"),
            index=integer(facts["index"], f"{path}.index", least=0),
            dictionary=text_field(facts["dictionary"], f"{path}.dictionary"),
            matters=_share(promised["matters"], f"{path}.promised.matters"),
        )


class _Replaced:
    """Runs of fresh pairs in which the value of a head or feature is replaced.

    Args:
        trial: the model and the pairs of the verification.
        axis: `head` or `feature`.
        direction: `noising` edits the clean run, `denoising` the corrupted run.
    """

    def __init__(self, trial: Trial, axis: str, direction: PatchingDirection) -> None:
        self._trial = trial
        self._axis = axis
        self._sign = -1 if direction == "noising" else 1
        self._runs = Runs(
            trial.model, trial.fresh, direction=direction, max_bytes=int(trial.max_bytes)
        )
        self.points = runner_of(trial.model).points

    def values(self, point: str, whose: str) -> Float[Tensor, "batch pos n *d"]:
        """Return the values of a point in the edited run (`own`), or in the other run (`other`)."""
        text_of_run = self._runs.text if whose == "own" else self._runs.other
        return self._runs.capture(text_of_run, point)[point]

    def shares(self, places: Sequence[Place], kind: str) -> Float[Tensor, "place example"]:
        """Return the lost or restored share of the behaviour for each place.

        Args:
            places: the heads or features, each in a separate run.
            kind: the values that replace them: of the `other` run, `zero`, the `mean`, or
                `resample` for values of random texts.
        """
        jobs = []
        for point, index in places:
            for edit in self._edits(point, kind):
                jobs.append({point: edit.at(**{self._axis: index})})
        _, effects = effects_of_edits(self._runs, jobs, of_rows=True)
        values = self._runs.per_example(effects).unflatten(0, (len(places), -1)).mean(1)
        return self._sign * values

    def _edits(self, point: str, kind: str) -> list[Edit]:
        """Return the edits that write values of a kind; for `resample`, an edit for each seed."""
        if kind == "zero":
            return [edits.zero()]
        other = self.values(point, "other")
        if kind == "other":
            return [edits.replace(other)]
        both = torch.cat([self.values(point, "own"), other])
        masks = [part.attention_mask for part in (self._runs.text, self._runs.other)]
        if kind == "mean":
            mask = (
                None
                if masks[0] is None
                else torch.cat([part for part in masks if part is not None])
            )
            return [edits.mean(both, attention_mask=mask)]
        resampled = []
        for seed in self._trial.seeds:
            draw = torch.Generator().manual_seed(seed)
            rows = torch.randint(len(both), (len(other),), generator=draw)
            resampled.append(edits.replace(both[rows.to(both.device)]))
        return resampled


def _share(matters: Any, path: str = "matters") -> float:
    """Return a promised share after a check that it is a finite number other than 0."""
    share = number(matters, path)
    if share == 0:
        raise ValueError(f"{path} must be a share above or below 0; got 0")
    return share
