"""Pairs of texts and the identity of a model, in a form that fits a file of JSON.

1. A model reads the pairs. The file contains the tokens of each text without padding, the answers
   as tokens, and the words of the tokens for people.
2. To restore the pairs, the tokens are padded on the right. If the model has a tokenizer, its words
   must be the words of the file; otherwise the same tokens would be another text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import Text, config_hash, sides_of_padding, uncompiled, weights_hash, writer_of
from interp.claims.fields import entries, fields, flag, integer, text_field
from interp.kinds import require_made
from interp.pairs.pairs import Pairs

TokenRows = tuple[tuple[int, ...], ...]
"""The tokens of each text."""


@dataclass(frozen=True)
class StoredPairs:
    """Pairs as numbers and texts.

    Attributes:
        clean, corrupted: the tokens of each text without padding; None without corrupted texts.
        answers: the tokens of the right answer of each text, or of the right and the wrong answer.
        pos: the position of the answers in each text without padding. Negative positions count
            from the last token, -1.
        per_token: see `Pairs`.
        words: the words of each clean text; None if the model has no tokenizer.
    """

    clean: TokenRows
    corrupted: TokenRows | None
    answers: tuple[TokenRows, ...]
    pos: tuple[int, ...]
    per_token: bool
    words: tuple[str, ...] | None

    @classmethod
    def of(cls, name: str, pairs: Pairs, model: nn.Module) -> "StoredPairs":
        """Return the stored form of pairs.

        Args:
            name: the name of the argument, for errors.
            pairs: the pairs.
            model: the model that reads them.

        Raises:
            TypeError: if the value is not a `Pairs`.
            ValueError: if the pairs have no answers, another metric, spans, or inputs other than
                tokens.
        """
        require_made(name, pairs, Pairs)
        read = pairs.read_by(model)
        if read.answers is None and read.continuations is None:
            raise ValueError(
                f"{name} must have answers, because a file cannot contain the code of a metric; "
                "got pairs without answers: pass Pairs(clean, corrupted, answers)"
            )
        if read.spans:
            raise ValueError(
                f"{name} must have no spans, which a claim does not store; got "
                f"{', '.join(read.spans)}: pass positions as pos="
            )
        for part in filter(None, (read.text, read.other)):
            if part.more or part.tokens.is_floating_point():
                raise ValueError(
                    f"{name} must be texts of tokens and masks; got other inputs of the model"
                )
        stored = cls(
            clean=_rows(read.text),
            corrupted=None if read.other is None else _rows(read.other),
            answers=_answers(read),
            pos=_pos(read),
            per_token=read.per_token,
            words=_words(model, _rows(read.text)),
        )
        _require_metric_of_answers(name, read, stored.restored(model))
        return stored

    def restored(self, model: nn.Module) -> Pairs:
        """Return the pairs for a model.

        Raises:
            ValueError: if the model's tokenizer reads the tokens as other words.
        """
        if self.words is not None:
            theirs = _words(model, self.clean)
            for number, (ours, other) in enumerate(zip(self.words, theirs or (), strict=False)):
                if ours != other:
                    raise ValueError(
                        "the model must read the tokens of a claim as the same words; got "
                        f"{other!r:.60} instead of {ours!r:.60} for text {number}"
                    )
        weight = next(model.parameters(), None)
        device = None if weight is None else weight.device
        clean, mask = Text.padded([torch.tensor(row) for row in self.clean], device=device)
        corrupted = None
        if self.corrupted is not None:
            corrupted = Text.padded([torch.tensor(row) for row in self.corrupted]).tokens.to(device)
        answers: Any
        if all(len(answer) == 1 for these in self.answers for answer in these):
            answers = torch.tensor(self.answers, device=device)[..., 0]
            answers = answers[:, 0] if answers.shape[1] == 1 else answers
        else:
            answers = [tuple(map(torch.tensor, these)) for these in self.answers]
        is_same = len({*self.pos}) == 1
        pairs = Pairs(
            clean,
            corrupted,
            answers,
            attention_mask=mask,
            pos=self.pos[0] if is_same else torch.tensor(self.pos),
            per_token=self.per_token,
        )
        return pairs.read_by(model)

    def packed(self) -> dict[str, Any]:
        """Return the pairs as JSON types."""
        return {
            "clean": listed(self.clean),
            "corrupted": None if self.corrupted is None else listed(self.corrupted),
            "answers": [listed(answers) for answers in self.answers],
            "pos": [*self.pos],
            "per_token": self.per_token,
            "words": None if self.words is None else [*self.words],
        }

    @classmethod
    def from_json(cls, value: Any, path: str) -> "StoredPairs":
        """Return pairs from JSON types.

        Args:
            value: the result of `packed`.
            path: the path of the pairs in the file, for errors.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        names = ("clean", "corrupted", "answers", "pos", "per_token", "words")
        facts = fields(value, path, *names)
        clean = read_rows(facts["clean"], f"{path}.clean")
        n = len(clean)
        corrupted = None
        if facts["corrupted"] is not None:
            corrupted = read_rows(facts["corrupted"], f"{path}.corrupted")
            if [*map(len, corrupted)] != [*map(len, clean)]:
                raise ValueError(f"{path}.corrupted must have texts as long as {path}.clean")
        answers = tuple(
            read_rows(entry, place) for place, entry in entries(facts["answers"], f"{path}.answers")
        )
        if {*map(len, answers)} not in ({1}, {2}):
            raise ValueError(f"{path}.answers must have one answer or two answers for each text")
        pos = tuple(integer(entry, at) for at, entry in entries(facts["pos"], f"{path}.pos"))
        words = None
        if facts["words"] is not None:
            words = tuple(
                text_field(entry, at) for at, entry in entries(facts["words"], f"{path}.words")
            )
        for name, values in (("answers", answers), ("pos", pos), ("words", words)):
            if values is not None and len(values) != n:
                raise ValueError(f"{path}.{name} must have {n} entries; got {len(values)}")
        if not all(-len(row) <= place < len(row) for place, row in zip(pos, clean, strict=True)):
            raise ValueError(f"{path}.pos must be positions inside the texts; got {[*pos]}")
        return cls(
            clean=clean,
            corrupted=corrupted,
            answers=answers,
            pos=pos,
            per_token=flag(facts["per_token"], f"{path}.per_token"),
            words=words,
        )


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model.

    Attributes:
        name: the name of the model, for people.
        config: the hash of its configuration.
        weights: the hash of all of its weights.
    """

    name: str
    config: str
    weights: str

    @classmethod
    def of(cls, model: nn.Module, name: str = "") -> "ModelIdentity":
        """Return the identity of a model.

        Args:
            model: the model.
            name: its name. Default: the name in its config, or the name of its class.
        """
        inner = uncompiled(model)
        config = getattr(inner, "config", None)
        known_name = str(getattr(config, "name_or_path", "") or type(inner).__name__)
        return cls(name or known_name, config_hash(inner), weights_hash(inner, whole=True))

    def is_same(self, other: "ModelIdentity") -> bool:
        """Return whether two identities have the same hashes."""
        return (self.config, self.weights) == (other.config, other.weights)

    @classmethod
    def from_json(cls, value: Any, path: str) -> "ModelIdentity":
        """Return an identity from JSON types.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        facts = fields(value, path, "name", "config", "weights")
        for name in ("config", "weights"):
            digits = text_field(facts[name], f"{path}.{name}")
            if len(digits) != 64 or {*digits} - {*"0123456789abcdef"}:
                raise ValueError(f"{path}.{name} must be a hash of 64 digits; got {digits!r:.60}")
        return cls(text_field(facts["name"], f"{path}.name"), facts["config"], facts["weights"])


def _rows(part: Text) -> TokenRows:
    """Return the real tokens of each text."""
    return tuple(tuple(row) for row in part.listed())


def listed(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return tokens as lists."""
    return [[*row] for row in rows]


def read_rows(value: Any, path: str) -> TokenRows:
    """Return tokens from JSON types: lists of integers from 0, none of them empty."""
    rows = []
    for place, row in entries(value, path, least=1):
        rows.append(tuple(integer(token, at, 0) for at, token in entries(row, place, least=1)))
    return tuple(rows)


def _answers(pairs: Pairs) -> tuple[TokenRows, ...]:
    """Return the answers of pairs that a model has read."""
    if pairs.continuations is not None:
        return pairs.continuations.tokens
    answers: Tensor = pairs.answers
    by_example = answers[:, None] if answers.ndim == 1 else answers
    # `zip` makes a tuple of one token of each token.
    return tuple(tuple(zip(tokens)) for tokens in by_example.tolist())


def _pos(pairs: Pairs) -> tuple[int, ...]:
    """Return the position of each answer, counted in the text without padding.

    Negative positions count from the last token in any case.
    """
    pos = -1 if pairs.pos is None else pairs.pos
    columns = pos.tolist() if isinstance(pos, Tensor) else [pos] * len(pairs)
    places = []
    for column, positions in zip(columns, pairs.text.positions.tolist(), strict=True):
        places.append(positions[column] if column >= 0 else column)
    return tuple(places)


def _require_metric_of_answers(name: str, pairs: Pairs, restored: Pairs) -> None:
    """Check that pairs are measured by their answers.

    Args:
        name: the name of the argument, for the error.
        pairs: the pairs.
        restored: the same pairs with the metric of their answers.

    Raises:
        ValueError: if the pairs have another metric.
    """
    if pairs.continuations is not None:
        is_default = pairs.continuations.score == "log_prob"
    else:
        # The positions of restored pairs do not count padding on the left.
        has_other_places = isinstance(pairs.pos, Tensor) or sides_of_padding(pairs.text.real)[0]
        is_default = has_other_places or repr(pairs.metric) == repr(restored.metric)
    if not is_default:
        raise ValueError(
            f"{name} must be measured by their answers, because a file cannot contain the code of "
            f"a metric; got {pairs.metric!r}: leave out metric="
        )


def _words(model: nn.Module, rows: TokenRows) -> tuple[str, ...] | None:
    """Return the words of texts; None without a tokenizer."""
    write = writer_of(model)
    return None if write is None else tuple("".join(write([*row])) for row in rows)
