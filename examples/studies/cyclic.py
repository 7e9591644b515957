"""Functions of numbers modulo n: their power by frequency (Nanda et al. 2023).

1. `fourier_basis` has a constant, and a cosine and a sine of each frequency, orthonormal.
2. `frequency_power` writes values in this basis along each axis, squares them, and adds up cosine
   and sine.
3. `answer_power` shifts each input's logits so that the right answer comes first, and takes the
   power of their mean.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import require_integer


def fourier_basis(n: int) -> Float[Tensor, "n n"]:
    """Orthonormal functions of the numbers modulo n, as columns, in float64.

    The constant, then the cosine and the sine of each frequency from 1 on, in periods per n; for an
    even n the last is the frequency n / 2, which has no sine.
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
    # Whole numbers of turns are taken off before rounding.
    turns = (torch.arange(n)[:, None] * torch.arange(1, n // 2 + 1)) % n
    angles = turns.double() * (2 * torch.pi / n)
    waves = rearrange([angles.cos(), angles.sin()], "kind n frequency -> n (frequency kind)")
    waves = waves[:, : n - 1]
    basis = torch.cat([torch.ones(n, 1, dtype=torch.float64), waves], 1)
    return basis / torch.linalg.vector_norm(basis, dim=0)


def frequency_power(
    values: Float[Tensor, "*axes"], dims: tuple[int, ...] = (0,)
) -> Float[Tensor, "*frequencies"]:
    """The power of each frequency along axes that count numbers modulo n, in float64.

    The powers of an axis, 0 to n // 2, take its place and add up to the sum of its squares. So for
    embeddings [n, d_model], `frequency_power(embeddings).sum(1)` is the power of each frequency;
    for a neuron's activations [a, b], with `dims=(0, 1)`, that of each pair of frequencies.
    Frequency 0 is the mean: subtract it, or leave it out, for shares of the variance.

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

    For sums modulo n it is the power of cos(w (a + b - c)) and sin(w (a + b - c)) in the logits of
    c, the functions of Nanda et al. 2023; over `logits.square().sum()` it is a share. Powers of
    frequencies 0 to n // 2, in float64.

    Args:
        logits: of the n numbers, for each input: [a, b, n] for all pairs.
        answers: the right answer to each input.

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
