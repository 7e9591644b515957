"""The power by frequency modulo n in the studies, compared with numpy."""

import doctest
from pathlib import Path

import numpy as np
import pytest
import torch

from interp import spectral
from interp.spectral import subspace_overlap, subspace_projection
from tests.interp.spectral.drawn import close, randn

STUDIES = Path(__file__).parent.parent / "examples" / "studies"


@pytest.fixture
def cyclic(monkeypatch):
    monkeypatch.syspath_prepend(STUDIES)
    import cyclic

    return cyclic


@pytest.mark.parametrize("n", [1, 2, 7, 12, 113])
def test_the_basis_is_orthonormal_and_made_of_waves(cyclic, n):
    basis = cyclic.fourier_basis(n).numpy()
    close(basis.T @ basis, np.eye(n))
    for column in range(1, n):
        k, angles = (column + 1) // 2, 2 * np.pi * np.arange(n) / n
        wave = np.cos(k * angles) if column % 2 else np.sin(k * angles)
        close(basis[:, column], wave / np.linalg.norm(wave))
    with pytest.raises(ValueError, match="at least 1"):
        cyclic.fourier_basis(0)


@pytest.mark.parametrize("n", [7, 12])
def test_power_matches_numpys_transform(cyclic, n):
    values = randn(5, n, 3)
    spectrum = abs(np.fft.fft(values.numpy(), axis=1)) ** 2 / n
    wanted = spectrum[:, : n // 2 + 1].copy()
    for k in range(1, (n + 1) // 2):
        wanted[:, k] += spectrum[:, n - k]
    found = cyclic.frequency_power(values, dims=(1,))
    close(found, wanted)
    close(found.sum(1), values.square().sum(1))
    single = values.float()
    close(
        cyclic.frequency_power(single, dims=(1,)),
        cyclic.frequency_power(single.double(), dims=(-2,)),
    )


def test_power_of_pairs_of_frequencies(cyclic):
    a, b = np.arange(7)[:, None], np.arange(12)
    turn = 2 * np.pi
    neuron = 3 * np.cos(turn * 2 * a / 7) * np.sin(turn * 5 * b / 12) + 2
    found = cyclic.frequency_power(torch.from_numpy(neuron), dims=(0, 1))
    wanted = np.zeros((4, 7))
    wanted[0, 0], wanted[2, 5] = 4 * 84, 9 * 84 / 4
    close(found, wanted)


@pytest.mark.parametrize("n", [11, 12])
def test_cyclic_embeddings_give_back_their_frequencies(cyclic, n):
    angles = 2 * torch.pi * torch.arange(n).double()[:, None] / n
    directions = torch.linalg.qr(randn(13, 4)).Q
    waves = torch.cat([(2 * angles).cos(), (2 * angles).sin(), (5 * angles).cos()], 1)
    embeddings = waves @ directions[:, :3].T + 0.7 * directions[:, 3]
    wanted = np.zeros(n // 2 + 1)
    wanted[[0, 2, 5]] = 0.49 * n, n, n / 2
    close(cyclic.frequency_power(embeddings).sum(1), wanted)
    # The two directions of frequency 2 in the stream span the plane that carries its waves.
    plane = embeddings.T @ cyclic.fourier_basis(n)[:, 3:5]
    close(subspace_overlap(plane, directions[:, :2]), 1)
    close(subspace_projection(embeddings, plane), waves[:, :2] @ directions[:, :2].T)


@pytest.mark.parametrize("operation", ["sum", "difference"])
def test_logits_of_waves_around_the_answer(cyclic, operation, unchecked):
    n = 11
    a, b = torch.arange(n)[:, None], torch.arange(n)
    answers = (a + b if operation == "sum" else a - b) % n
    away = 2 * torch.pi * (torch.arange(n) - answers[..., None]).double() / n
    logits = 3 * (4 * away).cos() + (2 * away).sin() + 0.5
    wanted = np.zeros(6)
    wanted[[0, 2, 4]] = np.array([0.25, 0.5, 4.5]) * n**3
    close(cyclic.answer_power(logits, answers), wanted)
    # Logits that depend on an input, and not on the distance to the answer, add no power. The
    # powers add up to the sum of squares of the logits.
    other = (2 * torch.pi * 3 * a / n).cos()[..., None] * randn(n)
    close(
        cyclic.answer_power(logits + other - other.mean(-1, keepdim=True), answers).sum(),
        wanted.sum(),
    )
    close(wanted.sum(), logits.square().sum())
    with pytest.raises(ValueError, match="one for each input"):
        cyclic.answer_power(logits, answers[1:])


def test_examples_of_docstrings(cyclic):
    results = doctest.testmod(cyclic)
    assert results.attempted >= 6
    assert not results.failed


def test_the_former_place_names_the_file():
    with pytest.raises(AttributeError, match="now in examples/studies/cyclic.py"):
        _ = spectral.frequency_power
