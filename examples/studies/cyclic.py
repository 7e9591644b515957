"""The power of each frequency in a function of numbers modulo n (Nanda et al. 2023).

A model that computes with numbers modulo n may represent a number by waves of few frequencies.
These functions measure how much of an activation belongs to each frequency.

1. `fourier_basis` returns an orthonormal basis: a constant, and a cosine and a sine of each
   frequency.
2. `frequency_power` expresses values in this basis, squares the coefficients, and adds up the
   squares of the cosine and the sine of each frequency.
3. `answer_power` shifts the logits of each input so that the right answer comes first, takes the
   mean over inputs, and returns the power of this mean.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import require_integer


def fourier_basis(n: int) -> Float[Tensor, "n n"]:
    """Return orthonormal functions of the numbers modulo n, as columns, in float64.

    The first column is constant. The next columns are the cosine and the sine of frequency 1, then
    of frequency 2, and so on. A wave of frequency k has k periods in n numbers. If n is even, the
    last column is the cosine of frequency n / 2, which has no sine.
    `embeddings.T @ basis[:, 2 * k - 1 : 2 * k + 1]` are the two directions of frequency k in the
    stream.

    Args:
        n: the modulus.

    Raises:
        ValueError: if n is below 1.

    >>> fourier_basis(3)
    tensor([[ 0.5774,  0.8165,  0.0000],
            [ 0.5774, -0.4082,  0.7071],
            [ 0.5774, -0.4082, -0.7071]], dtype=torch.float64)
    """
    require_integer("n", n)
    # Remove whole turns while the numbers are integers, because the cosine of a large angle is
    # less accurate.
    turns = (torch.arange(n)[:, None] * torch.arange(1, n // 2 + 1)) % n
    angles = turns.double() * (2 * torch.pi / n)
    waves = rearrange([angles.cos(), angles.sin()], "kind n frequency -> n (frequency kind)")
    waves = waves[:, : n - 1]
    basis = torch.cat([torch.ones(n, 1, dtype=torch.float64), waves], 1)
    return basis / torch.linalg.vector_norm(basis, dim=0)


def frequency_power(
    values: Float[Tensor, "*axes"], dims: tuple[int, ...] = (0,)
) -> Float[Tensor, "*frequencies"]:
    """Return the power of each frequency along axes that count numbers modulo n, in float64.

    Each axis in `dims` becomes an axis of the frequencies 0 to n // 2. The powers along it add up
    to the sum of the squares of the values. For embeddings [n, d_model],
    `frequency_power(embeddings).sum(1)` is the power of each frequency. For the activations [a, b]
    of a neuron, `dims=(0, 1)` gives the power of each pair of frequencies. Frequency 0 is the mean:
    for shares of the variance, leave it out.

    Args:
        values: embeddings, activations or logits, with an entry for each number.
        dims: the axes that count numbers modulo their size.

    >>> wave = torch.tensor([5.0, 4.0, 3.0, 4.0])  # 4 + cos(2 pi x / 4)
    >>> frequency_power(wave)
    tensor([64.0000,  2.0000,  0.0000], dtype=torch.float64)
    """
    coefficients = values.double()
    for dim in dims:
        basis = fourier_basis(values.shape[dim]).to(values.device)
        coefficients = (coefficients.movedim(dim, -1) @ basis).movedim(-1, dim)
    powers = coefficients.square()
    for dim in dims:
        frequency = (torch.arange(values.shape[dim], device=values.device) + 1) // 2
        parts = powers.movedim(dim, 0)
        summed = parts.new_zeros(int(frequency[-1]) + 1, *parts.shape[1:])
        powers = summed.index_add(0, frequency, parts).movedim(0, dim)
    return powers


def answer_power(
    logits: Float[Tensor, "*inputs n"], answers: Int[Tensor, "*inputs"]
) -> Float[Tensor, " frequency"]:
    """Return the power, by frequency, of logits that depend only on the distance to the right
    answer.

    For sums modulo n, these are the functions cos(w (a + b - c)) and sin(w (a + b - c)) of the
    logit of c, as in Nanda et al. 2023. To get shares, divide by `logits.square().sum()`.

    Args:
        logits: the logits of the n numbers for each input. For all pairs a and b: [a, b, n].
        answers: the right answer to each input.

    Returns:
        The powers of the frequencies 0 to n // 2, in float64.

    >>> a = torch.arange(5)
    >>> sums = (a[:, None] + a) % 5
    >>> answer_power(fourier_basis(5)[:, 3][a - sums[..., None]], sums).round(decimals=3)
    tensor([ 0.,  0., 25.], dtype=torch.float64)
    """
    n = logits.shape[-1]
    if answers.shape != logits.shape[:-1]:
        raise ValueError(
            f"answers must be one for each input, {[*logits.shape[:-1]]}; got {[*answers.shape]}"
        )
    aligned = logits.gather(-1, (answers[..., None] + torch.arange(n, device=answers.device)) % n)
    mean = aligned.double().reshape(-1, n).mean(0)
    return frequency_power(mean) * answers.numel()
