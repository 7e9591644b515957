"""The results of parts: join them, and write them to files.

1. `Outcome` is the result of one part, with the step that finishes the joined result, and the
   hashes of the texts whose copies it numbers.
2. The results are joined along the axis `example`. Words of positions, the description of the
   metric and the numbers of copies are those of all examples.
3. The step of the analysis finishes the joined result, for example with means over all examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooks.base import shown, warn
from interp.effects import edges, integrated_gradients
from interp.effects.evaluation import (
    CircuitResults,
    CircuitScores,
    Faithfulness,
    results_as_shares,
)
from interp.features.score_sums import ScoreSums
from interp.inputs import parts as running
from interp.inputs.copies import groups, same_values
from interp.inputs.parts import UNFINISHED
from interp.many.division import PartOfExamples, Whole
from interp.reading.maxima import Activation, TopActivations, largest_of
from interp.results.result import Result
from interp.runs.circuit_runs import as_shares
from interp.store.summary import StatisticsByPoint

Packed = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and facts for a file."""

_FINISHES: Mapping[str, Callable[..., Any]] = {
    "edges": edges.with_gaps,
    "integrated gradients": integrated_gradients.with_gaps,
    "shares": as_shares,
    "circuit scores": results_as_shares,
    "largest": largest_of,
}
"""The functions that finish joined results, by their names in files."""

_POSITIONS = ("pos", "query", "key")


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one part.

    Attributes:
        result: the result of the analysis, on the CPU.
        finish: the name of the function that finishes the joined result; empty for none.
        options: the options of this function.
        digests: a hash of the texts of each example; None if the analysis numbered no copies.
        compares_values: whether two examples are copies only if their values in the result are
            equal too.
    """

    result: Any
    finish: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    digests: Sequence[str] | None = None
    compares_values: bool = False

    @classmethod
    def of(cls, result: Any, part: running.RunningPart) -> "Outcome":
        """Return the outcome of a part that has run.

        Raises:
            TypeError: if results of this kind cannot be joined.
        """
        kind = _kind_of(result)
        name = ""
        if part.finish is not None:
            name = next(name for name, step in _FINISHES.items() if step is part.finish)
        digests = None if part.digests is None else [*part.digests]
        return cls(
            kind.on_cpu(result),
            finish=name,
            options=dict(part.options),
            digests=digests,
            compares_values=part.compares_values,
        )

    def packed(self) -> Packed:
        """Return the outcome as tensors and facts for a file."""
        tensors, facts = _kind_of(self.result).pack(self.result)
        names = ("finish", "options", "digests", "compares_values")
        more = {name: getattr(self, name) for name in names}
        return tensors, {"kind": type(self.result).__name__, "facts": facts, **more}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> "Outcome":
        """Return the outcome of tensors and facts that `packed` made."""
        kinds = {kind.type.__name__: kind for kind in _KINDS}
        kind = kinds[facts.pop("kind")]
        return cls(kind.unpack(tensors, facts.pop("facts")), **facts)


def joined_result(
    outcomes: Sequence[Outcome],
    parts: Sequence[PartOfExamples],
    whole: Whole,
    is_finished: bool = True,
) -> Any:
    """Return the result of all parts together.

    Args:
        outcomes: the outcome of each part.
        parts: the parts.
        whole: all examples.
        is_finished: whether the step of the analysis finishes the joined result.

    Raises:
        ValueError: if the results of parts differ in axes, labels or unit.
    """
    result = _kind_of(outcomes[0].result).join(outcomes, parts, whole)
    name = outcomes[0].finish
    return _FINISHES[name](result, **outcomes[0].options) if name and is_finished else result


def _joined_results(
    outcomes: Sequence[Outcome], parts: Sequence[PartOfExamples], whole: Whole
) -> Result:
    """Return one `Result` of the examples of all parts."""
    results: list[Result] = [outcome.result for outcome in outcomes]
    first = results[0]
    if any(result.is_ratio for result in results):
        raise ValueError(
            "shares of target - base depend on all examples: return the effects from the analysis, "
            "and call normalized() on the joined result"
        )
    for name in ("axes", "unit", "bounds", "counts"):
        if any(getattr(result, name) != getattr(first, name) for result in results):
            raise ValueError(f"all parts must have the same {name}; got different {name}")
    labels = _labels(results)
    values = torch.cat([_at_labels(result.values, result, labels) for result in results], -1)
    groups_of_all = _numbers_of_texts(outcomes, values)
    return replace(
        first,
        values=values,
        base=_cat([result.base for result in results]),
        target=_cat([result.target for result in results]),
        labels=labels,
        about=_facts(results, parts, whole),
        words=_words(results, labels, whole),
        groups=groups_of_all,
        exists=_exists(results, labels),
    )


def _exists(results: Sequence[Result], labels: Mapping[str, Sequence[Any]]) -> Tensor | None:
    """Return whether the values of all parts exist; None if all exist.

    Positions that are missing in a part do not exist in its examples.
    """
    masks = []
    for result in results:
        sizes = []
        for axis, size in zip(result.axes, result.shape, strict=True):
            sizes.append(size if axis in (*_POSITIONS, "example") else 1)
        exists = torch.ones(sizes, dtype=torch.bool)
        if result.exists is not None:
            exists = exists & result.exists
        masks.append(_at_labels(exists, result, labels))
    return torch.cat(masks, -1)


def _labels(results: Sequence[Result]) -> dict[str, Sequence[Any]]:
    """Return the labels by axis, without the axis `example`.

    A position that is padding in all texts of a part may be missing in this part.

    Raises:
        ValueError: if another axis has different labels in two parts.
    """
    labels: dict[str, Sequence[Any]] = {}
    for axis in results[0].axes[:-1]:
        all_labels = [result.labels[axis] for result in results]
        if all(part == all_labels[0] for part in all_labels):
            labels[axis] = all_labels[0]
        elif axis in _POSITIONS:
            labels[axis] = tuple(sorted(set().union(*all_labels)))
        else:
            raise ValueError(
                f"all parts must have the same labels of {axis}, but the analysis selects them "
                "from the examples of a part: choose them by an argument of the analysis, or run "
                "all examples in one part"
            )
    return labels


def _at_labels(table: Tensor, result: Result, labels: Mapping[str, Sequence[Any]]) -> Tensor:
    """Return a table at all labels, with 0 or False at positions that are missing in this part.

    Args:
        table: the table, with the axes of the result.
        result: the result of this part.
        labels: the labels of all parts.
    """
    for dim, (axis, names) in enumerate(labels.items()):
        if result.labels[axis] != tuple(names):
            shape = [*table.shape]
            shape[dim] = len(names)
            index = torch.tensor([names.index(label) for label in result.labels[axis]])
            table = table.new_zeros(shape).index_copy_(dim, index, table)
    return table


def _cat(metrics: Sequence[Tensor | None]) -> Tensor | None:
    """Return the metrics of all examples; None if a part has none."""
    parts = [metric for metric in metrics if metric is not None]
    return torch.cat(parts) if len(parts) == len(metrics) else None


def _numbers_of_texts(outcomes: Sequence[Outcome], values: Tensor) -> tuple[int, ...] | None:
    """Return for each example the number of its text, over all parts.

    Two examples with the same text have the same number, also if they are in different parts. So
    intervals count the text once. The result is None if all texts are different, or if the
    analysis does not compare texts.

    Args:
        outcomes: the outcomes of the parts.
        values: the effects of all parts, [..., example].
    """
    digests: list[str] = []
    for outcome in outcomes:
        if outcome.digests is None:
            return None
        digests += outcome.digests
    if len(digests) != values.shape[-1]:
        return None
    return groups(digests, same_values(values) if outcomes[0].compares_values else None)


def _words(
    results: Sequence[Result], labels: Mapping[str, Sequence[Any]], whole: Whole
) -> dict[str, Sequence[str]]:
    """Return the words of labels; the words of positions are the words of all texts."""
    words: dict[str, Sequence[str]] = {}
    columns = whole.columns.get(results[0].about.get("direction"))
    for axis, first in results[0].words.items():
        if axis in _POSITIONS and columns is not None:
            words[axis] = [columns[label] for label in labels[axis]]
        elif all(result.words.get(axis) == first for result in results):
            words[axis] = first
    return words


def _facts(
    results: Sequence[Result], parts: Sequence[PartOfExamples], whole: Whole
) -> dict[str, Any]:
    """Return the facts of all examples, `about`.

    Warns:
        UserWarning: if a fact differs between parts, and is therefore left out.
    """
    in_words = whole.words
    facts: dict[str, Any] = {}
    described = [part.words for part in parts]
    for name, first in results[0].about.items():
        values: list[Any] = [result.about.get(name) for result in results]
        if name == UNFINISHED:
            facts[name] = _unfinished(values)
        elif (place := _place(values, described)) is not None:
            facts[name] = in_words[place]
        elif all(value == first for value in values) and name != "texts":
            facts[name] = first
        elif _are_of_examples(values, results):
            facts[name] = [entry for value in values for entry in value]
        elif name == "gap":
            facts[name] = max(values)
        else:
            warn(f"{name} in about differs between parts of the examples, and is left out")
    return facts


def _place(values: Sequence[Any], described: Sequence[Sequence[str]]) -> int | None:
    """Return the number of the argument that a fact describes in every part; None for none."""
    for place in range(len(described[0])):
        if all(value == words[place] for value, words in zip(values, described, strict=True)):
            return place
    return None


def _are_of_examples(values: Sequence[Any], results: Sequence[Result]) -> bool:
    """Return True if a fact is a list with an entry for each example in every part."""
    return all(
        isinstance(value, list | tuple) and len(value) == result.shape[-1]
        for value, result in zip(values, results, strict=True)
    )


def _unfinished(sums: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the joined numbers of unfinished results; see `interp.inputs.parts`."""
    first = sums[0]
    examples = {}
    for name in first["examples"]:
        arrays = [torch.tensor(part["examples"][name], dtype=torch.float64) for part in sums]
        examples[name] = torch.cat(arrays, -1).tolist()
    largest = {}
    for name in first["largest"]:
        largest[name] = _largest([part["largest"][name] for part in sums])
    return {"examples": examples, "largest": largest}


def _largest(values: Sequence[Any]) -> Any:
    """Return the largest number, or for lists the largest number at each place."""
    return [*map(max, *values)] if isinstance(values[0], list) and len(values) > 1 else max(values)


def _joined_largest(
    outcomes: Sequence[Outcome], parts: Sequence[PartOfExamples], whole: Whole
) -> TopActivations:
    """Return the largest values of all parts, in the order of the parts."""
    places = TopActivations()
    for outcome in outcomes:
        places += outcome.result
    return places


def _joined_statistics(
    outcomes: Sequence[Outcome], parts: Sequence[PartOfExamples], whole: Whole
) -> StatisticsByPoint:
    """Return the statistics of all rows."""
    return StatisticsByPoint.together(outcome.result for outcome in outcomes)


def _joined_sums(
    outcomes: Sequence[Outcome], parts: Sequence[PartOfExamples], whole: Whole
) -> ScoreSums:
    """Return the sums of the texts of all parts."""
    return ScoreSums.together([outcome.result for outcome in outcomes])


def _joined_circuit_results(
    outcomes: Sequence[Outcome], parts: Sequence[PartOfExamples], whole: Whole
) -> CircuitResults:
    """Return the results about a circuit for the examples of all parts."""
    first = outcomes[0].result
    joined = {}
    for name in first.results():
        results = [getattr(outcome.result, name) for outcome in outcomes]
        of_name = zip(outcomes, results, strict=True)
        joined[name] = _joined_results(
            [replace(outcome, result=result) for outcome, result in of_name], parts, whole
        )
    return type(first)(**joined)


def _circuit_results_on_cpu(results: CircuitResults) -> CircuitResults:
    """Return the results about a circuit with all tensors on the CPU."""
    on_cpu = {name: _result_on_cpu(result) for name, result in results.results().items()}
    return type(results)(**on_cpu)


def _pack_circuit_results(results: CircuitResults) -> Packed:
    """Return the results about a circuit as tensors and facts for a file."""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for name, result in results.results().items():
        of_result, facts[name] = result.packed()
        tensors |= {f"{name}.{part}": tensor for part, tensor in of_result.items()}
    return tensors, facts


def _unpack_circuit_results(
    kind: type[CircuitResults], tensors: dict[str, Tensor], facts: dict[str, Any]
) -> CircuitResults:
    """Return the results about a circuit from the tensors and facts of a file."""
    results = {}
    for name, of_result in facts.items():
        prefix = f"{name}."
        parts = {
            key.removeprefix(prefix): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix)
        }
        results[name] = Result.unpacked(parts, of_result)
    return kind(**results)


def _result_on_cpu(result: Result) -> Result:
    """Return a result with all tensors on the CPU."""
    return replace(
        result,
        values=result.values.detach().cpu(),
        base=None if result.base is None else result.base.detach().cpu(),
        target=None if result.target is None else result.target.detach().cpu(),
        exists=None if result.exists is None else result.exists.cpu(),
    )


def _pack_largest(places: TopActivations) -> Packed:
    """Return the largest activations as facts for a file."""
    return {}, {"places": [[*place] for place in places]}


def _unpack_largest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> TopActivations:
    """Return the largest activations from the facts of a file."""
    places = TopActivations()
    for value, text, pos, tokens, pieces in facts["places"]:
        in_pieces = None if pieces is None else tuple(pieces)
        places.append(Activation(value, text, pos, tokens=tuple(tokens), pieces=in_pieces))
    return places


class _Kind(NamedTuple):
    """A kind of result, with the functions that join and store results of this kind.

    Attributes:
        type: its class.
        join: joins the results of the parts of all examples.
        on_cpu: moves a result to the CPU.
        pack: converts a result to tensors and facts for a file.
        unpack: converts the tensors and facts of a file to a result.
    """

    type: type
    join: Callable[[Sequence[Outcome], Sequence[PartOfExamples], Whole], Any]
    on_cpu: Callable[[Any], Any]
    pack: Callable[[Any], Packed]
    unpack: Callable[[dict[str, Tensor], dict[str, Any]], Any]


def _same(result: Any) -> Any:
    """Return the result itself: results of its kind are on the CPU already."""
    return result


def _of_circuits(kind: type[CircuitResults]) -> _Kind:
    """Return a kind of results about a circuit."""
    return _Kind(
        kind,
        join=_joined_circuit_results,
        on_cpu=_circuit_results_on_cpu,
        pack=_pack_circuit_results,
        unpack=partial(_unpack_circuit_results, kind),
    )


_KINDS = (
    _Kind(Result, _joined_results, _result_on_cpu, Result.packed, Result.unpacked),
    _Kind(TopActivations, _joined_largest, _same, _pack_largest, _unpack_largest),
    _Kind(
        StatisticsByPoint,
        _joined_statistics,
        _same,
        StatisticsByPoint.packed,
        StatisticsByPoint.unpacked,
    ),
    _of_circuits(CircuitScores),
    _of_circuits(Faithfulness),
    _Kind(ScoreSums, _joined_sums, _same, ScoreSums.packed, ScoreSums.unpacked),
)


def _kind_of(result: Any) -> _Kind:
    """Return the kind of a result.

    Raises:
        TypeError: if results of this kind cannot be joined.
    """
    for kind in _KINDS:
        if isinstance(result, kind.type):
            return kind
    known = ", ".join(kind.type.__name__ for kind in _KINDS)
    raise TypeError(
        f"over_examples joins results of parts, so the analysis must return one of {known}; got "
        f"{shown(result)}"
    )
