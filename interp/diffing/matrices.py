"""Changes of the weights between two models, matrix by matrix.

1. `weights_of` lists the weights of a model by name. A weight with an adapter is the weight of the
   base plus the adapter's own matrix, such as B·A, which is never added to the large weight. A tied
   weight has two names. `weights_of_both` compares it once if it is tied in both models, and under
   each name if it is tied in only one model.
2. `_difference` subtracts the weights of the base, in float64.
3. Changed matrices are decomposed (`spectral.singular`), with the rank of the adapter as a bound.
4. `_writers` finds the matrices whose output is added to the stream: one short text is run, and
   the outputs of modules are compared with the points `attn_out` and `mlp_out`. The directions
   that these matrices write are read as tokens.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import UnknownNameError
from hooks.base import (
    block_rounding,
    float32_rounding,
    generator,
    memory_of,
    progress_of,
    tensors_in,
    to_device,
    unknown_name,
    writer_of,
)
from hooks.shared import Session, hooks_disabled, names_by_layer
from interp import plots
from interp.diffing.promoted import logits_of_directions
from interp.diffing.streams import has_unembed
from interp.diffing.twins import TwoModels
from interp.json_form import columns, form
from interp.protocol import of
from interp.results.result import Result
from interp.runs.adapters import adapter_layers
from interp.spectral import effective_rank, randomized_svd, svd
from interp.spectral.factored import FactoredMatrix

_LINEAR = 1e-3
"""An adapter adds a matrix if its output differs from the matrix's by at most this share.

This is no limit of rounding: an adapter of another kind differs by far more.
"""
# The number of tokens of the text that finds the writers, and of printed tokens.
_SHORT = 8
_SHOWN = 5
# The most matrices that are printed or drawn.
_MOST = 12
_MOST_SPECTRA = 6


class Weight(NamedTuple):
    """A weight of a model.

    Attributes:
        module: the module that owns the parameter.
        parameter: the parameter, without the adapter.
        added: a function that returns the matrix of the adapter; None without an adapter.
        rank: a bound on the rank of this matrix; None if no bound is known.
    """

    module: nn.Module
    parameter: Tensor
    added: Callable[[], Tensor] | None = None
    rank: int | None = None


class WeightOfBoth(NamedTuple):
    """A weight that both models have.

    Attributes:
        tuned, base: the weight in both models.
        other_names: the other names of the weight, if both models tie it.
    """

    tuned: Weight
    base: Weight
    other_names: tuple[str, ...] = ()


class ChangedRows(NamedTuple):
    """The rows that changed in a weight with a row for each token.

    Attributes:
        role: `embedding`, `unembedding` or, for a tied weight, `embedding and unembedding`.
        n: the number of rows that changed.
        tokens: the tokens of the 10 rows that changed most, as texts, or as numbers without a
            tokenizer.

    >>> ChangedRows("embedding", 2, (" left", " right")).tokens
    (' left', ' right')
    """

    role: str
    n: int
    tokens: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class MatrixChange:
    """The change of one weight: tuned - base, with the shape of the parameter.

    A vector is a matrix with one row. Of a weight with more than two axes, all axes but the last
    are joined.

    Attributes:
        name: the name of the parameter in the model.
        shape: the shape of the parameter.
        relative: the Frobenius norm of the change, divided by the norm of the weight of the base.
        effective_rank: the effective rank of the change (`spectral.effective_rank`); 0 without a
            change.
        random_rank: the effective rank of a random matrix with the same shape and, for an adapter,
            the same rank.
        s: the singular values of the change, descending; empty without a change. For an adapter,
            the values beyond its rank are left out, because they are 0.
        u, vh: the first singular directions, in columns and rows.
        writes: the first directions that the matrix writes to the stream; None if its output is not
            added to the stream itself, or the model has no `unembed`.
        tokens: by direction, the tokens that it promotes (end 0) and that its opposite promotes
            (end 1), as texts, or as numbers without a tokenizer; empty if `writes` is None.
        strength: by direction and end, the largest logit minus the mean logit.
        random_strength: the mean of the same number for random directions.
        parts: the relative changes of the parts `q`, `k` and `v`, if the weight of a plain model
            contains queries, keys and values; empty for other weights.
        rows: the tokens whose rows changed, for an embedding or an unembedding; None for other
            weights.

    >>> import copy
    >>> from interp import compare_models
    >>> from models import load
    >>> base = load("pydoc-4l")
    >>> tuned = copy.deepcopy(base)
    >>> with torch.no_grad():
    ...     _ = tuned.blocks[2].mlp.output.weight[5].add_(1.0)  # a row of 512 numbers
    >>> change = compare_models(tuned, base, "x").weights["blocks.2.mlp.output.weight"]
    >>> round(change.effective_rank, 6), round(change.s[0].item() ** 2)  # rank 1, and 512 ones
    (1.0, 512)
    """

    name: str
    shape: tuple[int, ...]
    relative: float
    effective_rank: float = 0.0
    random_rank: float = 0.0
    s: Float[Tensor, " k"] | None = None
    u: Float[Tensor, "rows _top"] | None = None
    vh: Float[Tensor, "_top columns"] | None = None
    writes: Float[Tensor, "_top d_model"] | None = None
    tokens: tuple[tuple[list[Any], ...], ...] = ()
    strength: Float[Tensor, "_top end"] | None = None
    random_strength: float = math.nan
    parts: Mapping[str, float] = field(default_factory=dict)
    rows: ChangedRows | None = None

    def parts_in_words(self) -> str:
        """Return the changes of the parts, or the tokens of the rows that changed, in parentheses
        after a space; empty without parts and rows.
        """
        facts = [f"{part} {size:.3g}" for part, size in self.parts.items()]
        if self.rows is not None:
            role, n, tokens = self.rows
            words = " ".join(map(repr, tokens[:_SHOWN]))
            largest = ", the largest" if n > _SHOWN else ""
            facts += [role, f"{n:,} of {self.shape[0]:,} tokens{largest}: {words}"]
        return f" ({', '.join(facts)})" if facts else ""


@dataclass(frozen=True, eq=False, repr=False)
class WeightChanges(plots.Shown):
    """Changes of all weights, the largest relative change first.

    Attributes:
        changes: the changes, also of weights that did not change.
        other_names: the other names of each weight that both models tie, such as `lm_head.weight`,
            by its first name.

    >>> import copy
    >>> from interp import compare_models
    >>> from models import load
    >>> base = load("pydoc-4l")
    >>> tuned = copy.deepcopy(base)
    >>> with torch.no_grad():
    ...     _ = tuned.blocks[1].attn.output.weight.mul_(1.2)
    ...     _ = tuned.blocks[2].mlp.output.weight.mul_(0.7)
    >>> changes = compare_models(tuned, base, "x").weights
    >>> [(change.name, round(change.relative, 3)) for change in changes.changes[:2]]
    [('blocks.2.mlp.output.weight', 0.3), ('blocks.1.attn.output.weight', 0.2)]
    """

    changes: tuple[MatrixChange, ...]
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def changed(self) -> list[str]:
        """The names of the weights that changed, the largest relative change first."""
        return [change.name for change in self.changes if change.relative > 0]

    def __getitem__(self, name: str) -> MatrixChange:
        """Return the change of a weight by its name. A tied weight has several names.

        Raises:
            UnknownNameError: if there is no such weight. The error contains close matches.
        """
        by_name: dict[str, MatrixChange] = {}
        for change in self.changes:
            names = (change.name, *self.other_names.get(change.name, ()))
            by_name |= dict.fromkeys(names, change)
        if name not in by_name:
            raise unknown_name(name, by_name, "weight of both models")
        return by_name[name]

    def result(self) -> Result:
        """Return the relative changes of all weights as a table [matrix, example]."""
        return Result(
            torch.tensor([[change.relative] for change in self.changes], dtype=torch.float64),
            ("matrix", "example"),
            labels={"matrix": [change.name for change in self.changes]},
            unit="norms of the base",
        )

    def view(self) -> plots.View:
        """Draw the singular values of the largest changes, and list the tokens of directions."""
        parts = self._spectra()
        return plots.View("changes of weights", parts, says=repr(self).splitlines())

    def _spectra(self) -> list[Any]:
        """Return the parts of a picture: singular values, each divided by the largest."""
        drawn = [change for change in self.changes if change.s is not None][:_MOST_SPECTRA]
        if not drawn:
            return []
        n = max(len(change.s) for change in drawn if change.s is not None)
        lines = {}
        for change in drawn:
            assert change.s is not None
            line = torch.zeros(n, dtype=torch.float64)
            line[: len(change.s)] = change.s / change.s[0]
            lines[change.name] = line
        title = "singular values of the largest changes of weights"
        return plots.curves(lines, axis="rank", unit="of the largest", title=title).parts

    def as_json(self) -> dict[str, Any]:
        """Return a row for each weight in the JSON form of all results; see `interp.json_form`.

        Each entry of `weight.s` is a list of singular values. Each entry of `weight.tokens` is a
        list with both ends of each direction.
        """
        units = {
            "relative": "norms of the base",
            "effective_rank": "rank",
            "random_rank": "rank",
            "s": "singular value",
            "strength": "logits",
            "random_strength": "logits",
            "parts": "norms of the base",
        }
        fields = f"name shape tokens rows {' '.join(units)}"
        return form("WeightChanges", columns("weight", self.changes, fields, units))

    def __repr__(self) -> str:
        changed = [change for change in self.changes if change.relative > 0]
        lines = [f"WeightChanges: {len(changed)} of {len(self.changes)} weights changed"]
        for change in changed[:_MOST]:
            name = with_other_names(change.name, self.other_names)
            lines.append(
                f"  {name} {[*change.shape]}: relative change {change.relative:.3g}"
                f"{change.parts_in_words()}, effective rank {change.effective_rank:.3g} "
                f"(random {change.random_rank:.3g})"
            )
            for number, ends in enumerate(change.tokens[:1]):
                strength = [] if change.strength is None else change.strength[number].tolist()
                for sign, tokens, size in zip("+-", ends, strength, strict=True):
                    words = " ".join(map(repr, tokens[:_SHOWN]))
                    lines.append(
                        f"    {sign} {words}  logit {size:.3g} (random "
                        f"{change.random_strength:.3g})"
                    )
        if len(changed) > _MOST:
            lines.append(f"  … and {len(changed) - _MOST} more")
        return "\n".join(lines)


def weight_changes(
    models: TwoModels, row: list[int], top: int = 3, n_tokens: int = 10, seed: int = 0
) -> WeightChanges:
    """Return the changes of all weights between two models.

    Args:
        models: the two models.
        row: the tokens of a text. Both models read the first of them, to find the matrices whose
            output is added to the residual stream. Only the directions that these matrices write
            can be read as tokens.
        top: the number of singular directions of each matrix.
        n_tokens: the number of tokens of each direction.
        seed: the seed of random matrices and directions.

    Raises:
        ValueError: if the models have different weights, or the matrix of an adapter cannot be
            computed. The error names the first such weight.
    """
    weights = weights_of_both(models)
    writers = _writers(models, row)
    decomposed = _Decomposer(models, top=top, n_tokens=n_tokens, seed=seed)
    fused = _fused(models.tuned) | _fused(models.base)
    changes = []
    other_names: dict[str, tuple[str, ...]] = {}
    for name in progress_of(weights, "weights", len(weights)):
        tuned, base, others = weights[name]
        writer = writers.get(base.module) if name.endswith(".weight") else None
        changes.append(decomposed.change(name, tuned=tuned, base=base, writer=writer))
        parts = _parts_of(tuned.parameter, base.parameter, fused)
        changes[-1] = replace(changes[-1], parts=parts)
        if others:
            other_names[name] = others
    changes.sort(key=lambda change: change.relative, reverse=True)
    return WeightChanges(tuple(changes), other_names)


def with_other_names(name: str, other_names: Mapping[str, tuple[str, ...]]) -> str:
    """Return the name of a weight and, in parentheses, the other names of a tied weight.

    >>> with_other_names("embed.weight", {"embed.weight": ("head.weight",)})
    'embed.weight (also head.weight)'
    """
    return name + "".join(f" (also {other})" for other in other_names.get(name, ()))


def changed_outside_layers(models: TwoModels) -> dict[str, tuple[str, ...]] | None:
    """Return the names of the changed weights that are not in blocks, such as the unembedding, with
    the other names of each tied weight.

    Args:
        models: the two models.

    Returns:
        The names, in the order of the model. None if they are not known: if the models have no
        blocks or different weights, or if weights are quantized or stored elsewhere.
    """
    in_blocks: set[int] = set()
    for model in (models.tuned, models.base):
        blocks = [*getattr(of(model), "blocks", ())]
        if not blocks:
            return None
        in_blocks.update(id(weight) for block in blocks for weight in block.parameters())
    try:
        weights = weights_of_both(models)
    except ValueError:
        return None
    changed: dict[str, tuple[str, ...]] = {}
    for name, (weight, other, other_names) in weights.items():
        if {id(weight.parameter), id(other.parameter)} <= in_blocks:
            continue
        if not (_is_plain(weight.parameter) and _is_plain(other.parameter)):
            return None
        if weight.added is not None or other.added is not None:
            is_equal = not _difference(weight, other).any()
        else:
            ours = weight.parameter.detach()
            is_equal = torch.equal(ours, to_device(other.parameter.detach(), ours.device))
        if not is_equal:
            changed[name] = other_names
    return changed


def _is_plain(parameter: Tensor) -> bool:
    """Return whether the numbers of a parameter are in the memory of this process."""
    return type(parameter.data) is Tensor and not parameter.is_meta


def weights_of_both(models: TwoModels) -> dict[str, WeightOfBoth]:
    """Return the weights of the tuned model and of the base by name.

    Two names of one weight are one entry, under the first name, if both models tie these names. If
    only one model ties them, each name is an entry.

    Args:
        models: the two models.

    Raises:
        ValueError: if the models have different weights, or if weights are quantized.
    """
    tuned = weights_of(models.tuned, with_adapter=True)
    base = weights_of(models.base, with_adapter=not models.is_one)
    _require_same_weights(tuned, base)
    weights: dict[str, WeightOfBoth] = {}
    first_name: dict[Any, str] = {}
    for name in tuned:
        both = tuned[name], base[name]
        # An adapter of one module leaves the other modules of a tied weight as they are.
        identity = tuple(
            (id(weight.parameter), None if weight.added is None else weight.module)
            for weight in both
        )
        first = first_name.setdefault(identity, name)
        if first == name:
            weights[name] = WeightOfBoth(*both)
        else:
            other_names = (*weights[first].other_names, name)
            weights[first] = weights[first]._replace(other_names=other_names)
    return weights


def weights_of(model: nn.Module, *, with_adapter: bool) -> dict[str, Weight]:
    """Return the weights of a model by name, without the parts of the names that peft adds.

    A weight that several modules share has a name for each of these modules.

    Args:
        model: the model.
        with_adapter: whether the adapter is on.

    Raises:
        ValueError: if weights are quantized, because packed numbers are not weights.
    """
    if _is_packed(model):
        raise ValueError(
            "weights must not be quantized, because they are subtracted; got a "
            f"{type(model).__name__} with a quantization_config (load both models without "
            "quantization)"
        )
    layers = adapter_layers(model)
    inner = [
        f"{name}.{part}." for name, layer in layers.items() for part in layer.adapter_layer_names
    ]
    weights = {}
    for owner, module, last, parameter in _parameters_of(model):
        name = f"{owner}.{last}" if owner else last
        if name.startswith(tuple(inner)):
            continue
        weight = Weight(module, parameter)
        parent, _, part = owner.rpartition(".")
        layer = layers.get(parent)
        if with_adapter and layer is not None and part == "base_layer" and last == "weight":
            weight = _adapted(weight, parent, layer)
        elif with_adapter and layer is not None and part == "original_module":
            for adapter in layer.active_adapters:
                saved = layer.modules_to_save[adapter].get_parameter(last)
                weight = Weight(module, saved)
        weights[_plain_name(name)] = weight
    return weights


def _parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the name of each module, the module, and the name and value of each of its parameters.

    A parameter that several modules share is yielded once for each module.
    """
    for owner, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            yield owner, module, last, parameter


def _is_packed(model: nn.Module) -> bool:
    """Return True if the parameters of a model are packed numbers.

    `transformers` unpacks the weights of a GGUF file, but the config still names the file's form.
    """
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return False
    as_mapping = settings if isinstance(settings, Mapping) else vars(settings)
    return as_mapping.get("quant_method") != "gguf"


def _plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that peft adds."""
    parts = [part for part in name.split(".") if part not in ("base_layer", "original_module")]
    return ".".join(parts).removeprefix("base_model.model.")


def _adapted(weight: Weight, name: str, layer: Any) -> Weight:
    """Return a weight with the matrix of its active adapters.

    Args:
        weight: the weight without the adapters.
        name: the name of the adapted module.
        layer: the adapted module.
    """
    adapters = [adapter for adapter in layer.active_adapters if _has(layer, adapter)]
    if not adapters or layer.disable_adapters:
        return weight

    def added() -> Tensor:
        # Adapters such as IA3 multiply the output, and have no such method.
        if not hasattr(layer, "get_delta_weight"):
            raise _no_matrix(name, layer)
        total: Tensor = sum(layer.get_delta_weight(adapter).double() for adapter in adapters)
        _require_linear(name, layer, total)
        return total

    ranks: Any = getattr(layer, "r", None)
    has_ranks = isinstance(ranks, dict) and hasattr(layer, "lora_A")
    rank = sum(ranks[adapter] for adapter in adapters) if has_ranks else None
    return Weight(weight.module, weight.parameter, added, rank)


def _has(layer: Any, adapter: str) -> bool:
    """Return whether a layer has weights of an adapter."""
    return any(adapter in getattr(layer, part) for part in layer.adapter_layer_names)


@torch.no_grad()
def _require_linear(name: str, layer: Any, added: Float[Tensor, "rows columns"]) -> None:
    """Check that an adapter adds a matrix to the weight, by the output of the module with it and
    without it.

    Raises:
        ValueError: if it adds another value, as DoRA and adapters with a bias do.
    """
    inner = layer.get_base_layer()
    parameter = inner.weight
    if isinstance(inner, nn.Embedding):
        x = torch.arange(min(_SHORT, len(parameter)), device=parameter.device)
        expected = added[: len(x)]
    else:
        x = torch.randn(_SHORT, layer.in_features, generator=generator(0, name)).to(parameter)
        is_transposed = added.shape[0] == layer.in_features != layer.out_features
        is_transposed |= getattr(layer, "fan_in_fan_out", False) is True
        expected = x.double() @ (added if is_transposed else added.mT)
    output = hooks_disabled(layer, x).double()
    without = hooks_disabled(inner, x).double()
    gap = (output - without - expected).norm()
    rounding = block_rounding(parameter.dtype)
    if gap > max(_LINEAR, rounding) * expected.norm() + rounding * output.norm():
        raise _no_matrix(name, layer)


def _no_matrix(name: str, layer: Any) -> ValueError:
    """Return the error for an adapter that does not add a matrix to the weight."""
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    return ValueError(
        f"an adapter must add a matrix to the weight; got {kind} at {name}, which does not: merge "
        "a copy of the adapter, and compare two models"
    )


def _fused(model: nn.Module) -> dict[int, dict[str, Tensor]]:
    """Return views of the queries, keys and values in each weight that contains all three.

    The first key is a number for the memory of the weight. The second key is `q`, `k` or `v`.
    Blocks of attached models have no views of these parts.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for block in getattr(of(model), "blocks", ()):
        attention = getattr(block, "attn", None)
        for kind, part in itertools.product("Wb", "QKV"):
            view = getattr(attention, f"{kind}_{part}", None)
            if isinstance(view, Tensor):
                parts.setdefault(memory_of(view), {})[part.lower()] = view.detach()
    return {memory: views for memory, views in parts.items() if len(views) == len("QKV")}


def _parts_of(
    tuned: Tensor, base: Tensor, fused: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, float]:
    """Return the relative change of each part of a weight; empty for a weight without parts.

    Args:
        tuned, base: the weight in both models.
        fused: views of the queries, keys and values in fused weights (from `_fused`).
    """
    if memory_of(tuned) not in fused or memory_of(base) not in fused:
        return {}
    relative = {}
    for part, before in fused[memory_of(base)].items():
        after = to_device(fused[memory_of(tuned)][part], before.device).double()
        size, norm = float((after - before.double()).norm()), float(before.double().norm())
        relative[part] = size / norm if norm else (math.inf if size else 0.0)
    return relative


def _require_same_weights(tuned: dict[str, Weight], base: dict[str, Weight]) -> None:
    """Check that two models have weights with the same names and shapes.

    Raises:
        ValueError: if they do not. The error names the first difference.
    """
    for name in [*tuned, *base]:
        if name not in tuned or name not in base:
            which = "tuned" if name in tuned else "base"
            raise ValueError(
                f"both models must have the same weights; got {name}, which only {which} has"
            )
        ours, theirs = (tuple(weights[name].parameter.shape) for weights in (tuned, base))
        if ours != theirs:
            raise ValueError(
                f"both models must have the same shape of {name}; got {[*ours]} and {[*theirs]}"
            )


def _difference(tuned: Weight, base: Weight) -> Float[Tensor, "..."]:
    """Return the change of a weight in float64, on the device of the tuned model.

    A weight that both models share adds no rounding to the matrix of an adapter.
    """
    parameter = tuned.parameter.detach()
    if tuned.parameter is base.parameter:
        change = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
    else:
        other = to_device(base.parameter.detach(), parameter.device)
        change = parameter.double() - other.double()
    for weight, sign in ((tuned, 1), (base, -1)):
        if weight.added is not None:
            change = change + sign * weight.added().detach().to(change)
    return change


class _Decomposer:
    """Decompositions of changes, with random matrices and directions that are computed once.

    Args:
        models: the two models.
        top, n_tokens, seed: see `weight_changes`.
    """

    def __init__(self, models: TwoModels, top: int, n_tokens: int, seed: int) -> None:
        self.models = models
        self.top = top
        self.n_tokens = n_tokens
        self.seed = seed
        self._roles = [_roles_of_token_tables(model) for model in (models.tuned, models.base)]
        self._random_ranks: dict[tuple[int, ...], float] = {}
        self._random_strength: float | None = None

    def change(self, name: str, tuned: Weight, base: Weight, writer: bool | None) -> MatrixChange:
        """Return the change of one weight.

        Args:
            name: the name of the weight.
            tuned, base: the weight in both models.
            writer: None if the weight does not write to the stream; otherwise whether its columns
                (True) or its rows (False) are vectors of the stream.
        """
        change = _difference(tuned, base)
        shape = tuple(change.shape)
        size = float(change.norm())
        norm = float(base.parameter.detach().double().norm())
        if not size:
            return MatrixChange(name, shape, 0.0)
        relative = size / norm if norm else math.inf
        matrix = change.reshape(-1, change.shape[-1]) if change.ndim else change.reshape(1, 1)
        bound = min(matrix.shape)
        rank = tuned.rank if tuned.parameter is base.parameter else None
        if rank is not None and rank < bound:
            decomposition = randomized_svd(matrix, rank, seed=self.seed)
        else:
            decomposition = svd(matrix)
        top = min(self.top, len(decomposition.s))
        u, vh = decomposition.u[:, :top], decomposition.vh[:top]
        found = MatrixChange(
            name=name,
            shape=shape,
            relative=relative,
            effective_rank=float(effective_rank(decomposition.s)),
            random_rank=self._random_rank(matrix.shape, len(decomposition.s)),
            s=decomposition.s.cpu(),
            u=u.cpu(),
            vh=vh.cpu(),
        )
        role = self._role_of(tuned, base)
        if role:
            found = self._with_rows(found, role=role, sizes=matrix.norm(dim=-1))
        if writer is None or not has_unembed(self.models.tuned):
            return found
        return self._with_tokens(found, u.mT if writer else vh)

    def _role_of(self, tuned: Weight, base: Weight) -> str:
        """Return the role of a weight with a row for each token; empty for another weight.

        A weight that is tied in only one model has its role in the other model.
        """
        of_tuned = self._roles[0].get(memory_of(tuned.parameter), [])
        of_base = self._roles[1].get(memory_of(base.parameter), [])
        return " and ".join(role for role in of_tuned if role in of_base)

    def _with_rows(
        self, change: MatrixChange, role: str, sizes: Float[Tensor, " vocab"]
    ) -> MatrixChange:
        """Return a change with the tokens whose rows changed most.

        Args:
            change: the change of a weight with a row for each token.
            role: see `ChangedRows`.
            sizes: the norm of the change of each row.
        """
        n_rows = int((sizes > 0).sum())
        tokens = sizes.topk(min(self.n_tokens, n_rows)).indices.tolist()
        to_text = writer_of(self.models.tuned)
        words = tokens if to_text is None else to_text(tokens)
        return replace(change, rows=ChangedRows(role, n_rows, tuple(words)))

    def _with_tokens(
        self, change: MatrixChange, directions: Float[Tensor, "top d_model"]
    ) -> MatrixChange:
        """Return a change with the tokens that its directions promote most.

        Args:
            change: the change of a matrix that writes to the stream.
            directions: the directions that the change writes. Each end of a direction has tokens.
        """
        both = torch.stack([directions, -directions], 1)
        logits = logits_of_directions(self.models, both.flatten(0, 1))
        best = logits.topk(min(self.n_tokens, logits.shape[-1]))
        strength = best.values[:, 0] - logits.mean(-1)
        to_text = writer_of(self.models.tuned)
        ids = best.indices.unflatten(0, both.shape[:2])
        words = ids.tolist() if to_text is None else to_text(ids)
        if self._random_strength is None:
            draws = generator(self.seed, "strength")
            random = torch.randn(_SHORT, directions.shape[1], generator=draws, dtype=torch.float64)
            random = random / random.norm(dim=-1, keepdim=True)
            of_random = logits_of_directions(self.models, random)
            self._random_strength = float((of_random.amax(-1) - of_random.mean(-1)).mean())
        return replace(
            change,
            writes=directions.cpu(),
            tokens=tuple(tuple(ends) for ends in words),
            strength=strength.view(both.shape[:2]),
            random_strength=self._random_strength,
        )

    def _random_rank(self, shape: torch.Size, rank: int) -> float:
        """Return the effective rank of a random matrix.

        Args:
            shape: the shape of the matrix, [rows, columns].
            rank: its rank.
        """
        key = (*shape, rank)
        if key not in self._random_ranks:
            draws = generator(self.seed, *key)
            if rank == min(shape):
                values = svd(torch.randn(shape, generator=draws)).s
            else:
                read = torch.randn(rank, shape[1], generator=draws)
                written = torch.randn(shape[0], rank, generator=draws)
                values = FactoredMatrix(written, read).svd().s
            self._random_ranks[key] = float(effective_rank(values))
        return self._random_ranks[key]


def _roles_of_token_tables(model: nn.Module) -> dict[int, list[str]]:
    """Return the roles of weights with a row for each token, by the memory of the weight.

    A model of `transformers` has a method that returns the module of each weight.
    """
    roles: dict[int, list[str]] = {}
    methods = {"embedding": "get_input_embeddings", "unembedding": "get_output_embeddings"}
    names = {"embedding": "W_E", "unembedding": "W_U"}
    for role, method in methods.items():
        weight = None
        if hasattr(model, method):
            # Some models of `transformers` do not have one of the two modules.
            with suppress(NotImplementedError, AttributeError):
                weight = getattr(getattr(model, method)(), "weight", None)
        else:
            weight = getattr(of(model), names[role], None)
        if isinstance(weight, Tensor):
            roles.setdefault(memory_of(weight), []).append(role)
    return roles


@torch.no_grad()
def _writers(models: TwoModels, row: list[int]) -> dict[nn.Module, bool]:
    """Return the modules whose output is added to the stream, from a run of one short text.

    The value is True if the weight is [d_model, in], as in `nn.Linear`, and False if it is
    [in, d_model]. The output may be multiplied by a number before it is added.

    Args:
        models: the two models.
        row: the tokens of a text.
    """
    reads: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}
    (batch,) = models.batches([row[:_SHORT]], 1)
    names = _added_names(models)
    if not names:
        return {}
    with models.as_base(), Session() as session:
        for module in models.base.modules():
            if _matrix_of(module) is not None:
                session.before(module, partial(_keep_input, reads, module))
                session.look(module, partial(_keep_output, outputs, module))
        # `capture` would stop at the last point, which may be the output of a module, before the
        # hook after this module.
        cache = models.base_runner.run_with_cache(
            batch.base.tokens, names=names, **batch.base.arguments(models.base)
        )[1]
    added = torch.stack([_unit(cache[name]) for name in names])
    writers = {}
    for module, output in outputs.items():
        weight = _matrix_of(module)
        read = reads.get(module)
        if weight is None or read is None or output.numel() != added.shape[1]:
            continue
        if float((added @ _unit(output).to(added)).max()) > 1 - float32_rounding():
            writers[module] = _has_columns_of_stream(module, weight, read=read, output=output)
    return writers


def _matrix_of(module: nn.Module) -> Tensor | None:
    """Return the weight of a module itself if it is a matrix, and None otherwise."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight if weight is not None and weight.ndim == 2 else None


def _added_names(models: TwoModels) -> list[str]:
    """Return the points of the values that attention and the MLP add to the stream."""
    names: list[str] = []
    for site in ("attn_out", "mlp_out"):
        with suppress(UnknownNameError):
            names += names_by_layer(site, models.base_runner.points).values()
    return names


def _keep_input(reads: dict[nn.Module, Tensor], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep the input of the first call of a module. This function is used as a hook."""
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is not None and tensor.is_floating_point():
        reads.setdefault(module, tensor.detach().clone())


def _keep_output(outputs: dict[nn.Module, Tensor], module: nn.Module, output: Any) -> None:
    """Keep the output of the first call of a module. This function is used as a hook."""
    tensor = next(tensors_in(output), None)
    if tensor is not None:
        outputs.setdefault(module, tensor.detach().clone())


def _unit(value: Float[Tensor, "..."]) -> Float[Tensor, " n"]:
    """Return a value as one vector of length 1, in float64."""
    flat = value.double().flatten()
    return flat / flat.norm().clamp(min=torch.finfo(flat.dtype).tiny)


def _has_columns_of_stream(
    module: nn.Module, weight: Float[Tensor, "_a _b"], read: Tensor, output: Tensor
) -> bool:
    """Return True if a module multiplies by the transpose of its weight, as `nn.Linear` does.

    Args:
        module: the module.
        weight: its weight.
        read, output: the input and the output of a call.
    """
    bias = dict(module.named_parameters(recurse=False)).get("bias")
    expected = output.double() if bias is None else output.double() - bias.double()
    gaps = []
    for matrix in (weight.mT, weight):
        fits = matrix.shape == (read.shape[-1], output.shape[-1])
        product = read.double() @ matrix.double() if fits else None
        gaps.append(math.inf if product is None else float((product - expected).norm()))
    return gaps[0] <= gaps[1]
