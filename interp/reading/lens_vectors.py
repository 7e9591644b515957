"""Sparse decompositions: vectors of the stream as sums of a few lens vectors.

The lens vector of a token is the token's row of W_U J, where J is the Jacobian of a layer. The
product of the stream with this vector is the logit of the token by the lens, before the final norm.

1. Select the lens vector with the largest cosine with the rest, which is the vector minus the sum
   that was found so far: the whole vector at first.
2. Compute the coefficients of all selected lens vectors by least squares, under the condition that
   no coefficient is negative.
3. Subtract the sum from the vector to get the new rest. Repeat until there are k lens vectors, or
   no lens vector points in the direction of the rest.

This is orthogonal matching pursuit (Pati et al. 1993) with the constraint of Gurnee et al. 2026.
The matrix of all lens vectors, [vocab, d_model], is never formed.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import plots
from interp.json_form import Table, form
from interp.reading.affine import split_rows
from interp.results.result import Result

# The pursuit ends if no product of the rest and a lens vector of length 1 is larger than this
# number times the length of the whole vector.
_LEAST_PRODUCT = math.sqrt(torch.finfo(torch.float32).eps)
# A coefficient stays 0 if this product is not larger than this number times the length.
_LEAST_SLOPE = 1e-7
# The number of entries of lens vectors that are computed together: 32 MiB in float32.
_COLUMNS_AT_ONCE = 2**23
# The largest number of rows in a printed table.
_SHOWN = 36


@dataclass(frozen=True, eq=False, repr=False)
class LensDecomposition(plots.Shown):
    """Vectors of the stream as sums of a few lens vectors. `JacobianLens.decompose` returns them.

    A vector is the sum of `coefficients` times the lens vectors of `tokens`, and of `rest`.

    Attributes:
        tokens: the tokens of the lens vectors, in the order in which they were selected; -1 after
            the last one.
        coefficients: the coefficients of the lens vectors. A coefficient is 0 if later lens vectors
            replaced its lens vector.
        lengths: the length of each coefficient times its lens vector, in the unit of the stream.
        shares: the share of the vector's squared length that remains in the rest after each
            selection, from 0 to 1.
        rest: the vectors minus their sums.
        layer: the layer of the lens.
        words: the tokens of the first vector as text, and empty texts after the last one; None if
            the model has no tokenizer.
    """

    tokens: Int[Tensor, "*batch selected"]
    coefficients: Float[Tensor, "*batch selected"]
    lengths: Float[Tensor, "*batch selected"]
    shares: Float[Tensor, "*batch selected"]
    rest: Float[Tensor, "*batch d_model"]
    layer: int
    words: list[str] | None = None

    is_plot = True

    def _first(self) -> list[tuple[str, float, float, float]]:
        """Return the label, length, coefficient and share of each token of the first vector."""
        selected = self.tokens.shape[-1]
        columns: list[list[Any]] = [
            column.reshape(-1, selected)[0].tolist()
            for column in (self.tokens, self.lengths, self.coefficients, self.shares)
        ]
        count = sum(token >= 0 for token in columns[0])
        if self.words is not None:
            # Different tokens can have the same text.
            columns[0] = [
                f"{token} {word!r}" for token, word in zip(columns[0], self.words, strict=True)
            ]
        return [*zip(*columns, strict=True)][:count]

    def view(self) -> plots.View:
        """Draw the lengths of the lens vectors in the first vector."""
        rows = self._first()
        if not rows:
            return plots.View(f"lens vectors of layer {self.layer}", [], says=[repr(self)])
        result = Result(
            torch.tensor([[length] for _, length, _, _ in rows]),
            ("token", "example"),
            labels={"token": [f"{label}" for label, _, _, _ in rows]},
            unit="length in the stream",
            about={"layer": self.layer},
        )
        return plots.effects(result)

    def as_json(self) -> dict[str, Any]:
        """Return the lens vectors of all vectors in the JSON form of all results; see
        `interp.json_form`.
        """
        batch = " ".join(f"batch{number}" for number in range(self.tokens.ndim - 1))
        axes = f"{batch} selected"
        tables = {
            "tokens": Table(self.tokens, axes),
            "coefficients": Table(self.coefficients, axes, "coefficient"),
            "lengths": Table(self.lengths, axes, "norm of the stream"),
            "shares": Table(self.shares, axes, "share of the squared length"),
            "rest.norm": Table(self.rest.norm(dim=-1), batch, "norm of the stream"),
        }
        if self.words is not None:
            tables["first.words"] = Table(self.words, "selected")
        return form("LensDecomposition", tables, {"layer": self.layer})

    def __repr__(self) -> str:
        """Return a table of the lens vectors of the first vector."""
        *batch, selected = self.tokens.shape
        sizes = [*(f"batch {size}" for size in batch), f"selected {selected}"]
        rows = self._first()
        width = max([5, *(len(f"{label}") for label, *_ in rows)])
        lines = [
            f"LensDecomposition [{', '.join(sizes)}] at layer {self.layer}: the first vector",
            f"  {'token':<{width}}  length in the stream  coefficient  remaining squared length",
        ]
        for label, length, coefficient, share in rows[:_SHOWN]:
            lines.append(f"  {label:<{width}}  {length:<20.4g}  {coefficient:<11.4g}  {share:.1%}")
        return "\n".join(lines)


class Pursuit(NamedTuple):
    """The tensors of `LensDecomposition` for rows of vectors, and the rest."""

    tokens: Int[Tensor, "row selected"]
    coefficients: Float[Tensor, "row selected"]
    lengths: Float[Tensor, "row selected"]
    shares: Float[Tensor, "row selected"]
    rest: Float[Tensor, "row d_model"]


def pursue(
    vectors: Float[Tensor, "row d_model"],
    jacobian: Float[Tensor, "d_model d_model"],
    unembedding: Float[Tensor, "d_model vocab"],
    k: int,
) -> Pursuit:
    """Return each vector as a sum of at most `k` lens vectors and a rest.

    Args:
        vectors: the vectors, of the dtype and on the device of the other tensors.
        jacobian: the Jacobian of the layer.
        unembedding: the weight of the unembedding.
        k: the largest number of lens vectors in a sum.
    """
    norms = _norms(jacobian, unembedding)
    parts = [
        _pursue_rows(rows, jacobian, unembedding=unembedding, norms=norms, k=k)
        for rows in split_rows(vectors[None], unembedding.shape[1])
    ]
    joined = Pursuit(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    # A table has at least one column, also if no lens vector points in the direction of a vector.
    used = max(1, int((joined.tokens >= 0).any(0).sum()))
    return Pursuit(
        tokens=joined.tokens[:, :used],
        coefficients=joined.coefficients[:, :used],
        lengths=joined.lengths[:, :used],
        shares=joined.shares[:, :used],
        rest=joined.rest,
    )


def _norms(
    jacobian: Float[Tensor, "d_model d_model"], unembedding: Float[Tensor, "d_model vocab"]
) -> Float[Tensor, " vocab"]:
    """Return the length of each lens vector. A length of 0 becomes infinite, so that the cosines of
    this lens vector are 0, and it is never selected.
    """
    columns = unembedding.split(max(1, _COLUMNS_AT_ONCE // len(jacobian)), 1)
    norms = torch.cat([(part.mT @ jacobian).norm(dim=-1) for part in columns])
    return norms.where(norms > 0, torch.inf)


def _pursue_rows(
    vectors: Float[Tensor, "1 row d_model"],
    jacobian: Float[Tensor, "d_model d_model"],
    unembedding: Float[Tensor, "d_model vocab"],
    norms: Float[Tensor, " vocab"],
    k: int,
) -> Pursuit:
    """Return a few vectors as sums of lens vectors and a rest, with `k` columns of lens vectors.

    Each step adds the lens vector with the largest cosine to the rest of a vector, and then fits
    the sizes of all selected lens vectors again. After the pursuit of a vector has ended, its
    further columns have the token -1.

    Args:
        vectors: the vectors, as a batch of one.
        jacobian, unembedding, k: the arguments of `pursue`.
        norms: the length of each lens vector.
    """
    (vectors,) = vectors
    n_rows = len(vectors)
    size = vectors.norm(dim=-1)
    tokens = torch.full((n_rows, k), -1, device=vectors.device)
    sizes = vectors.new_zeros(n_rows, k)
    shares = vectors.new_ones(n_rows, k)
    # The selected lens vectors, with length 1; 0 after the pursuit of a row has ended.
    units = vectors.new_zeros(n_rows, k, vectors.shape[-1])
    rest = vectors
    goes_on = torch.ones_like(size, dtype=torch.bool)
    for step in range(k):
        products, selected = (rest @ jacobian.mT @ unembedding / norms).max(-1)
        goes_on = goes_on & (products > _LEAST_PRODUCT * size)
        if not goes_on.any():
            break
        unit = (unembedding[:, selected].mT @ jacobian) / norms[selected, None]
        units[:, step] = unit * goes_on[:, None]
        tokens[:, step] = selected.where(goes_on, -1)
        end = step + 1
        sizes[:, :end] = _least_squares(units[:, :end], vectors, start=sizes[:, :end])
        rest = vectors - (sizes[:, None] @ units)[:, 0]
        # The share stays at its last value after the pursuit of a row has ended.
        shares[:, step:] = ((rest.norm(dim=-1) / size) ** 2)[:, None]
    coefficients = sizes / norms[tokens]
    return Pursuit(tokens, coefficients=coefficients, lengths=sizes, shares=shares, rest=rest)


def _least_squares(
    units: Float[Tensor, "row selected d_model"],
    vectors: Float[Tensor, "row d_model"],
    start: Float[Tensor, "row selected"],
) -> Float[Tensor, "row selected"]:
    """Return coefficients that are at least 0 and minimize the error of each row.

    The method of Lawson & Hanson 1974 ("Solving Least Squares Problems", chapter 23) divides the
    coefficients into a set of positive coefficients and a set of zeros. In each step, the zero
    along which the error falls fastest becomes positive, and the positive coefficients are
    computed again. If some of them are negative, the coefficients move towards the solution until
    the first of them is 0, which joins the zeros. These steps are computed for all rows at the same
    time.

    Args:
        units: the lens vectors, with length 1.
        vectors: the vectors that the sums should be near to.
        start: coefficients to start from, the solution for fewer lens vectors.
    """
    # These matrices are small, so the loop runs on the CPU and does not wait for the device.
    units64, vectors64 = units.double(), vectors.double()
    gram = (units64 @ units64.mT).cpu()
    products = (units64 @ vectors64[..., None])[..., 0].cpu()
    least = _LEAST_SLOPE * vectors64.norm(dim=-1, keepdim=True).cpu()
    coefficients = start.double().cpu()
    is_positive = coefficients > 0
    # The limit prevents an endless loop, in which rounding lets a coefficient change forever.
    for _ in range(3 * gram.shape[-1]):
        slope = products - (gram @ coefficients[..., None])[..., 0]
        steepest, index = slope.masked_fill(is_positive, -torch.inf).max(-1, keepdim=True)
        enters = steepest > least
        if not enters.any():
            break
        is_positive = is_positive.scatter(-1, index, is_positive.gather(-1, index) | enters)
        solution = _solved(gram, products, is_positive)
        while (falls := is_positive & (solution <= 0)).any():
            ratios = coefficients / (coefficients - solution).clamp(min=1e-300)
            ratios = ratios.where(falls, torch.inf)
            nearest = ratios.amin(-1, keepdim=True)
            coefficients = coefficients + nearest.clamp(max=1) * (solution - coefficients)
            is_positive = is_positive & ~(falls & (ratios <= nearest))
            solution = _solved(gram, products, is_positive)
        coefficients = solution
    return coefficients.to(start)


def _solved(
    gram: Float[Tensor, "row selected selected"],
    products: Float[Tensor, "row selected"],
    is_positive: Bool[Tensor, "row selected"],
) -> Float[Tensor, "row selected"]:
    """Return the least-squares solution of the positive coefficients. The others are 0."""
    both = is_positive[:, :, None] & is_positive[:, None]
    system = gram.where(both, torch.eye(gram.shape[-1], dtype=gram.dtype))
    return torch.linalg.solve(system, products * is_positive)
