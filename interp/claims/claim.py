"""Claims about a model that a machine can check: a statement, its evidence, and promised numbers.

A promised number is a bound that the tests must reach, such as the effect of a head on new texts.

1. A constructor, such as `Claim.circuit`, records the statement, the model, the pairs on which it
   was found, other pairs to test it, and the promised numbers.
2. `save` writes a file of strict JSON, and `load` reads it and checks each field. The file contains
   no code.
3. `verify` tests the claim on a model as a sceptic would: on fresh pairs, against random
   alternatives, with other seeds and other kinds of ablation. The tests are in the file of each
   kind of claim, such as `circuit`.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hooks import CacheError, __version__
from hooks.base import (
    Texts,
    explains_calls,
    number_of,
    require_choice,
    require_integer,
    require_module,
    shows_progress,
    storage,
    strict_json,
)
from interp import plots
from interp.claims.circuit import CircuitContent
from interp.claims.direction import DirectionContent
from interp.claims.effect import EffectContent
from interp.claims.fields import choice, fields, integer, text_field
from interp.claims.texts import ModelIdentity, StoredPairs
from interp.claims.trial import Content, Trial
from interp.claims.variable import VariableContent
from interp.claims.verdict import Test, Verdict
from interp.directions.direction import Direction
from interp.features.dictionary import Dictionary
from interp.graph.circuit import Circuit
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.pairs.pairs import Pairs

_FORMAT = "hookscope-claim-1"
_FEWEST_PAIRS = 4
_CONTENTS: tuple[type[Content], ...] = (
    CircuitContent,
    DirectionContent,
    EffectContent,
    VariableContent,
)
_KINDS = {content.kind: content for content in _CONTENTS}
_FIELDS = ("format", "kind", "says", "model", "versions", "seeds", "pairs", "test", "content")


@dataclass(frozen=True, eq=False, repr=False)
class Claim(plots.Shown):
    """A statement about a model that can be saved, sent to others and tested.

    Make a claim with `Claim.circuit`, `Claim.effect` (a head or a feature), `Claim.direction` or
    `Claim.variable`.

    Attributes:
        says: the statement in words.
        model: the name of the model and the hashes of its config and of its weights.
        pairs: the pairs on which the claim was found.
        test: other pairs, on which `verify` tests the claim. None if there are no other pairs.
        content: the object of the claim and the promised numbers.
        versions: the versions of the libraries that made the claim.
        seeds: the number of seeds of random alternatives.

    >>> from interp.graph import Graph
    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> circuit = Circuit(Graph(model), ["input->m0", "m0->m1", "m1->logits"])
    >>> claim = Claim.circuit(model, pairs, circuit, "two MLPs write the t", name="pydoc-4l")
    >>> claim  # doctest: +ELLIPSIS
    Claim: two MLPs write the t
      a circuit of 3 edges in pydoc-4l, hash ...
      promised: faithful 0.8, complete 0.8, robust 0.5
      found on 1 pair; 0 pairs to test it
    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/claim.json"
    >>> claim.save(path)
    >>> Claim.load(path).says
    'two MLPs write the t'
    """

    says: str
    model: ModelIdentity
    pairs: StoredPairs
    test: StoredPairs | None
    content: Content
    versions: Mapping[str, str]
    seeds: int
    _model: nn.Module | None = field(default=None)

    @classmethod
    @explains_calls
    def circuit(
        cls,
        model: nn.Module,
        pairs: Pairs,
        circuit: Circuit,
        says: str,
        *,
        test: Pairs | None = None,
        faithful: float = 0.8,
        complete: float = 0.8,
        robust: float = 0.5,
        seeds: int = 5,
        name: str = "",
    ) -> "Claim":
        """Return the claim that a circuit does what the whole model does.

        Args:
            model: the model of the circuit's graph.
            pairs: the pairs on which the circuit was found. They need answers. Their metric is the
                logit difference of right and wrong answers, or a log-probability; see `Pairs`.
            circuit: the circuit.
            says: the statement in words, such as `these edges copy the digit`.
            test: other pairs, which a file of the claim contains for its tests. Default: none; then
                pass fresh pairs to `verify`.
            faithful: the promised share of the behaviour that the circuit keeps, from 0 to 1. With
                0.8, for example, the share must be between 0.8 and 1.2.
            complete: the promised share of the behaviour that the model loses without the circuit.
            robust: the promised share under another ablation, with exchanged texts and on a
                paraphrase.
            seeds: the number of seeds of random alternatives. Default: 5.
            name: the name of the model, for people. Default: the name in its config, or of its
                class.

        Raises:
            ValueError: if the circuit is empty or belongs to another model, a promise is not a
                number from 0 to 1, or the pairs do not fit into a file: they have no answers,
                another metric, spans, or inputs other than tokens.
        """
        content = CircuitContent.of(
            model, circuit, faithful=faithful, complete=complete, robust=robust
        )
        return cls._made(model, pairs, content, says=says, test=test, seeds=seeds, name=name)

    @classmethod
    @explains_calls
    def effect(
        cls,
        model: nn.Module,
        pairs: Pairs,
        says: str,
        *,
        head: tuple[int, int] | None = None,
        feature: int | None = None,
        dictionary: Dictionary | None = None,
        matters: float = 0.3,
        test: Pairs | None = None,
        seeds: int = 5,
        name: str = "",
    ) -> "Claim":
        """Return the claim that a head or a feature matters for the behaviour of pairs.

        The effect is the share of the behaviour, the metric of the clean run minus the metric of
        the corrupted run, that is lost if the value in the clean run is replaced by the value of
        the corrupted run.

        Args:
            model: the model in which the effect was found.
            pairs: the pairs on which the effect was found. They need answers.
            says: the statement in words.
            test: other pairs for the tests. Default: none; then pass fresh pairs to `verify`.
            seeds: the number of seeds of random alternatives. Default: 5.
            name: the name of the model, for people. Default: the name in its config.
            head: the layer and the number of a head.
            feature: in place of a head, the number of a feature.
            dictionary: the dictionary of the feature. Pass it to `verify` too.
            matters: the promised share; negative if the part works against the behaviour.

        Raises:
            ValueError: if not exactly one of head and feature is given, if the promise is 0, or for
                the reasons of `circuit` about pairs.

        >>> from models import load
        >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
        >>> Claim.effect(model, pairs, "head 1 reads the name", head=(0, 1)).content.title
        'head 1 at blocks.0.attn.z'
        """
        if (head is None) == (feature is None):
            raise ValueError(
                f"either head or feature must be given; got head={head}, feature={feature}"
            )
        if head is not None:
            content = EffectContent.of_head(head, matters)
        else:
            assert feature is not None
            require_made("dictionary", dictionary, Dictionary)
            assert dictionary is not None
            content = EffectContent.of_feature(feature, dictionary, matters)
        return cls._made(model, pairs, content, says=says, test=test, seeds=seeds, name=name)

    @classmethod
    @explains_calls
    def direction(
        cls,
        model: nn.Module,
        prompts: Pairs,
        direction: Direction,
        says: str,
        *,
        yes: Texts,
        no: Texts,
        others: Texts,
        moves: float,
        strength: float = 1.0,
        cost: float = 0.1,
        test: Pairs | None = None,
        seeds: int = 5,
        name: str = "",
    ) -> "Claim":
        """Return the claim that adding a direction moves the metric of prompts.

        Args:
            model: the model in which the direction was found.
            says: the statement in words.
            test: other texts for the tests. Default: none; then pass fresh texts to `verify`.
            seeds: the number of seeds of random alternatives. Default: 5.
            name: the name of the model, for people. Default: the name in its config.
            prompts: texts with answers, such as `Pairs(texts, answers=(" Yes", " No"))`, whose
                metric the direction moves.
            direction: the direction, which is added at all positions of all of its points.
            yes, no: the two kinds of texts that the direction was found from, for directions with
                shuffled labels.
            others: texts whose predictions should not change.
            moves: the promised change of the metric, in its unit; negative for a decrease.
            strength: the factor of the direction. Default: 1.
            cost: the largest mean KL divergence of the predictions on other texts, in nats.

        Raises:
            ValueError: if a promise is not a number or `moves` is 0, if the vectors are zero or not
                finite, or for the reasons of `circuit` about pairs.

        >>> from interp.directions import difference_of_means
        >>> from models import load
        >>> model, yes, no = load("pydoc-4l"), ["part KV8", "part QX3"], ["def f(", "return x"]
        >>> v = difference_of_means(model, (yes, no), "blocks.2.resid_post")
        >>> prompts, others = Pairs(["import o", "def f("], answers="8"), ["class A:"]
        >>> kinds = {"yes": yes, "no": no, "others": others}
        >>> Claim.direction(model, prompts, v, "digits", moves=2.0, **kinds).content.title
        'a direction at blocks.2.resid_post'
        """
        content = DirectionContent.of(
            model,
            direction,
            texts={"yes": yes, "no": no, "others": others},
            strength=strength,
            moves=moves,
            cost=cost,
        )
        return cls._made(model, prompts, content, says=says, test=test, seeds=seeds, name=name)

    @classmethod
    @explains_calls
    def variable(
        cls,
        model: nn.Module,
        pairs: Pairs,
        says: str,
        *,
        point: str,
        k: int,
        pos: int = -1,
        head: int | None = None,
        accuracy: float = 0.8,
        epochs: int = 3,
        rate: float = 1e-2,
        test: Pairs | None = None,
        seeds: int = 2,
        name: str = "",
    ) -> "Claim":
        """Return the claim that some columns of a value carry a variable of a causal model.

        `verify` learns the columns on the pairs of the claim and scores them on fresh pairs, with
        the four controls of `interp.alignment.align`.

        Args:
            model: the model in which the variable was found.
            says: the statement in words.
            test: other pairs for the tests. Default: none; then pass fresh pairs to `verify`.
            name: the name of the model, for people. Default: the name in its config.
            pairs: the training pairs, with the answers of the causal model on the corrupted text
                with the variable of the clean text; see `align`.
            point: the name of the point, such as `blocks.2.resid_post`.
            k: the number of columns.
            pos: the position. Default: the last.
            head: the head, if the point has heads.
            accuracy: the promised share of right answers on fresh pairs.
            epochs, rate: the number of epochs and the learning rate of `align`.
            seeds: the number of seeds of the search. Default: 2.

        Raises:
            ValueError: if a number is out of range, or for the reasons of `circuit` about pairs.

        >>> from models import load
        >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
        >>> place = {"point": "blocks.2.resid_pre", "pos": 8}
        >>> Claim.variable(model, pairs, "the last letter", k=4, **place).content.title
        'a variable in 4 columns of blocks.2.resid_pre at position 8'
        """
        content = VariableContent(
            point=point,
            k=k,
            pos=pos,
            head=head,
            epochs=epochs,
            rate=rate,
            accuracy=accuracy,
        )
        return cls._made(model, pairs, content, says=says, test=test, seeds=seeds, name=name)

    @classmethod
    def _made(
        cls,
        model: nn.Module,
        pairs: Pairs,
        content: Content,
        says: str,
        test: Pairs | None,
        seeds: int,
        name: str,
    ) -> "Claim":
        """Return a claim about a model; for the arguments see `circuit`."""
        if not isinstance(says, str) or not says.strip():
            raise ValueError(f"says must be a text with the statement; got {says!r}")
        require_integer("seeds", seeds)
        stored = StoredPairs.of("pairs", pairs, model)
        stored_test = None if test is None else StoredPairs.of("test", test, model)
        _require_corrupted(content, pairs=stored, test=stored_test)
        return cls(
            says=says,
            model=ModelIdentity.of(model, name),
            pairs=stored,
            test=stored_test,
            content=content,
            versions={
                "hookscope": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            seeds=seeds,
            _model=model,
        )

    @shows_progress
    def verify(
        self,
        model: nn.Module | None = None,
        *,
        fresh: Pairs | None = None,
        paraphrase: Pairs | None = None,
        on: Literal["another model"] | None = None,
        seeds: int | None = None,
        dictionary: Dictionary | None = None,
        max_bytes: int = 2**30,
        progress: bool = True,
    ) -> Verdict:
        """Test the claim, and return all tests with the worst of them as the verdict.

        Each test compares a 95% interval over examples with a promised number: it *holds*, it
        *fails*, or it *cannot tell*, because the interval contains the bound or there are too few
        examples for an interval.

        Args:
            model: the model. Default: the model that the claim was made with, unless the claim was
                loaded from a file.
            fresh: pairs on which the claim was not found. Default: the pairs `test` of the claim.
                Pairs on which the claim was found are left out. If no other pairs are left, all
                tests run on the pairs of the claim, and the verdict is at best `cannot tell`.
            paraphrase: for a circuit, a head or a feature, pairs with the same behaviour in other
                words. Default: none.
            on: `another model` if the claim is to be tested on a model with other weights. Default:
                the model of the claim; with another model, the verdict is then at best `cannot
                tell`.
            seeds: the number of seeds of random alternatives. Default: the number of the claim.
            dictionary: the dictionary of a claim about a feature.
            max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
            progress: whether to show a progress bar or, outside a terminal, lines of progress.

        Returns:
            A table of tests, whose rows a `Verdict` also returns by name.

        Raises:
            ValueError: if no model is given for a claim from a file, if `on` is unknown, if the
                tests use no paraphrase, or if the model reads the tokens of the claim as other
                words.
            UnknownNameError: if the model lacks a node of the claim.
            ModeError: if the model is in training mode.
        """
        model = self._model if model is None else model
        if model is None:
            raise ValueError("model must be given for a claim from a file; got none")
        require_module(model)
        require_choice("on", on, (None, "another model"))
        n_seeds = self.seeds if seeds is None else seeds
        require_integer("seeds", n_seeds)
        found_on = self.pairs.restored(model)
        given = self._test_pairs(model, fresh)
        usable = None if given is None else self._unseen(given, found_on)
        trial = Trial(
            model=model,
            found_on=found_on,
            fresh=found_on if usable is None else usable,
            seeds=range(n_seeds),
            paraphrase=None if paraphrase is None else self._reworded(model, paraphrase, found_on),
            dictionary=dictionary,
            max_bytes=max_bytes,
        )
        identity = ModelIdentity.of(model)
        tests = [
            *self._tests_of_model(identity, on),
            _test_of_texts(given, usable),
            *self.content.tests(trial),
        ]
        return Verdict(self.says, self._about(trial, identity, usable), tuple(tests))

    def _test_pairs(self, model: nn.Module, fresh: Pairs | None) -> Pairs | None:
        """Return the pairs on which the claim is tested: `fresh`, or else the claim's test pairs.

        The result is None if there are neither. It may still contain copies of the pairs on which
        the claim was found; `_unseen` leaves them out.

        Args:
            model: the tested model.
            fresh: the pairs from the user; None for the test pairs that the claim stores.
        """
        if fresh is not None:
            stored = StoredPairs.of("fresh", fresh, model)
            _require_corrupted(self.content, fresh=stored)
            return stored.restored(model)
        return None if self.test is None else self.test.restored(model)

    def _reworded(self, model: nn.Module, paraphrase: Pairs, found_on: Pairs) -> Pairs:
        """Return the pairs of a paraphrase on which the claim was not found.

        Raises:
            ValueError: if there are none, or if the tests of this kind of claim use no paraphrase.
        """
        if not self.content.has_paraphrase:
            raise ValueError(
                f"paraphrase must be left out for a claim about a {self.content.kind}; pass the "
                "pairs as fresh="
            )
        stored = StoredPairs.of("paraphrase", paraphrase, model)
        _require_corrupted(self.content, paraphrase=stored)
        pairs = self._unseen(stored.restored(model), found_on)
        if pairs is None:
            raise ValueError(
                "paraphrase must have pairs on which the claim was not found; got none"
            )
        return pairs

    def _unseen(self, pairs: Pairs, found_on: Pairs) -> Pairs | None:
        """Return the pairs on which the claim was not found; None if there are none."""
        seen = {*found_on.digests(), *self.content.found_on}
        rows = [row for row, digest in enumerate(pairs.digests()) if digest not in seen]
        return pairs[rows] if rows else None

    def _tests_of_model(self, identity: ModelIdentity, on: str | None) -> list[Test]:
        """Return the test that the tested model is the model of the claim, in a list.

        The test compares the hashes of the two models. With `on="another model"`, the user tests
        another model on purpose, and the list is empty.

        Args:
            identity: the hashes of the tested model.
            on: `another model`, or None.
        """
        if on == "another model":
            return []
        if identity.is_same(self.model):
            return [Test("same model", "holds", "equal hashes")]
        note = "this is not the model of the claim; to test this model, pass on='another model'"
        return [Test("same model", "cannot tell", "equal hashes", note=note)]

    def _about(self, trial: Trial, identity: ModelIdentity, usable: Pairs | None) -> dict[str, str]:
        """Return facts about a verification, for the table."""
        differs = "" if identity.is_same(self.model) else ", which has other hashes"
        fresh = "0" if usable is None else str(len(usable))
        seeds = number_of(len(trial.seeds), "seed")
        facts = {
            "object": f"{self.content.title}, found on {number_of(len(trial.found_on), 'pair')}",
            "model": f"{identity.name}, hash {identity.weights[:12]}{differs}; the claim is about "
            f"{self.model.name}, hash {self.model.weights[:12]}",
            "texts": f"{fresh} fresh pairs; {seeds} of random alternatives",
        }
        return {**facts, **self.content.about(trial)}

    def as_json(self) -> dict[str, Any]:
        """Return the statement and the promised numbers in the JSON form of all results; see
        `interp.json_form`.

        This is a summary. The file of `save` contains the whole claim in another form, which `load`
        reads.
        """
        promised = self.content.packed()["promised"]
        n_test = 0 if self.test is None else len(self.test.clean)
        tables = {
            "promised": Table([*promised.values()], "promise", labels={"promise": [*promised]}),
            "n_pairs": Table(len(self.pairs.clean), unit="pairs"),
            "n_test": Table(n_test, unit="pairs"),
        }
        about = {
            "says": self.says,
            "kind": self.content.kind,
            "object": self.content.title,
            "model": asdict(self.model),
            "versions": self.versions,
            "seeds": self.seeds,
        }
        return form("Claim", tables, about)

    def packed(self) -> dict[str, Any]:
        """Return the claim as JSON types, as `save` writes it to a file."""
        return {
            "format": _FORMAT,
            "kind": self.content.kind,
            "says": self.says,
            "model": asdict(self.model),
            "versions": dict(self.versions),
            "seeds": self.seeds,
            "pairs": self.pairs.packed(),
            "test": None if self.test is None else self.test.packed(),
            "content": self.content.packed(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Claim":
        """Load a claim from a file of `save`, after a check of every field.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is not a claim in strict JSON, or if a field is missing, unknown
                or wrong. The error names the field.
        """
        file = storage.path_of(path)
        with storage.one_error(file, "be a claim that `save` wrote", CacheError):
            return cls._from_json(strict_json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def _from_json(cls, value: Any) -> "Claim":
        """Return a claim from JSON types."""
        facts = fields(value, "the file", *_FIELDS)
        choice(facts["format"], "format", (_FORMAT,))
        kind = choice(facts["kind"], "kind", tuple(_KINDS))
        versions = fields(facts["versions"], "versions", "hookscope", "torch", "python")
        content = _KINDS[kind].from_json(facts["content"], "content")
        pairs = StoredPairs.from_json(facts["pairs"], "pairs")
        test = None if facts["test"] is None else StoredPairs.from_json(facts["test"], "test")
        _require_corrupted(content, pairs=pairs, test=test)
        return cls(
            says=text_field(facts["says"], "says"),
            model=ModelIdentity.from_json(facts["model"], "model"),
            pairs=pairs,
            test=test,
            content=content,
            versions={
                name: text_field(fact, f"versions.{name}") for name, fact in versions.items()
            },
            seeds=integer(facts["seeds"], "seeds", least=1),
        )

    def view(self) -> plots.View:
        """Return a view of the claim."""
        title, *lines = repr(self).splitlines()
        return plots.View(title, [], says=lines)

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that `save` can call, by suffix."""
        return {**super()._writers(), ".json": self._save}

    def _save(self, path: Path) -> None:
        """Write the claim as strict JSON."""
        written = strict_json.dumps(self.packed(), indent=1, ensure_ascii=False)
        with storage.replacing(path) as partial:
            partial.write_text(written + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        n_test = 0 if self.test is None else len(self.test.clean)
        promised: Mapping[str, Any] = self.content.packed()["promised"]
        numbers = ", ".join(f"{name} {value}" for name, value in promised.items())
        found_on = number_of(len(self.pairs.clean), "pair")
        lines = [
            f"Claim: {self.says:.90}",
            f"{self.content.title} in {self.model.name}, hash {self.model.weights[:12]}",
            f"promised: {numbers}",
            f"found on {found_on}; {number_of(n_test, 'pair')} to test it",
        ]
        return "\n  ".join(lines)


def _require_corrupted(content: Content, **pairs: StoredPairs | None) -> None:
    """Check that pairs have corrupted texts, if the tests of a claim need them.

    Args:
        content: the content of the claim.
        pairs: the pairs, by the name for the error.

    Raises:
        ValueError: if some pairs have no corrupted texts.
    """
    for name, stored in pairs.items():
        if content.compares_texts and stored is not None and stored.corrupted is None:
            raise ValueError(
                f"{name}.corrupted must be texts for a claim about a {content.kind}; got none: "
                "pass Pairs(clean, corrupted, answers)"
            )


def _test_of_texts(given: Pairs | None, usable: Pairs | None) -> Test:
    """Return the test that there are enough pairs on which the claim was not found.

    Args:
        given: the pairs for the tests.
        usable: the pairs among them on which the claim was not found.
    """
    n = 0 if usable is None else len(usable)
    n_given = 0 if given is None else len(given)
    note = ""
    if n < n_given:
        note = f"the claim was found on {n_given - n} of {n_given} pairs, which are left out"
    if n == 0:
        note = "there are no fresh pairs, so the tests run on the pairs of the claim: pass fresh="
    return Test(
        name="texts",
        status="holds" if n >= _FEWEST_PAIRS else "cannot tell",
        promised=f"at least {_FEWEST_PAIRS}",
        measured=float(n),
        unit="fresh pairs",
        note=note,
    )
