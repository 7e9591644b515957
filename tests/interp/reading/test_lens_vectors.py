"""Lens vectors, compared with the dense matrix W_U J, and sparse sums of them, compared with a
pursuit in float64 on that matrix with the least squares of scipy.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from hooks import HookedRunner
from interp import JacobianLens, edits, run_with_cache
from tests.shipped import pydoc

VOCAB, D, LAYERS = 23, 7, 3


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.fixture
def model():
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=VOCAB, n_ctx=11, n_layers=LAYERS, n_heads=1, d_model=D, d_mlp=13)
    model = Transformer(TransformerConfig(**sizes)).double().eval()
    with torch.no_grad():
        # Lens vectors with a common part are not orthogonal, so coefficients depend on each other.
        model.unembedding.weight.copy_(drawn(VOCAB, D, seed=0) + drawn(D, seed=1))
        model.unembedding.weight[5] = 0
    return model


@pytest.fixture
def lens():
    weight = drawn(LAYERS, D, D, seed=2)
    weight[0] = torch.nan
    return JacobianLens(weight, torch.zeros(LAYERS, D).double(), "", 1, torch.ones(LAYERS))


def dense(model, lens, layer):
    """Return all lens vectors, [vocab, d_model]."""
    return model.W_U.detach().numpy().T @ lens.weight[layer].numpy()


def pursuit(rows, vector, k):
    """Return the selected rows, their coefficients and the rest of a vector."""
    norms = np.linalg.norm(rows, axis=1)
    norms[norms == 0] = np.inf
    selected, coefficients, rest, shares = [], np.zeros(0), vector, []
    for _ in range(k):
        cosines = rows @ rest / norms
        if cosines.max() <= 4e-4 * np.linalg.norm(vector):
            break
        selected.append(int(cosines.argmax()))
        coefficients, error = nnls(rows[selected].T, vector)
        rest = vector - coefficients @ rows[selected]
        shares.append(error**2 / (vector @ vector))
    return selected, coefficients, rest, shares


def test_lens_vectors_are_rows_of_the_unembedding_times_the_jacobian(model, lens):
    tokens = torch.tensor([[3, 0], [21, 8], [3, 9]])
    vectors = lens.vectors(model, tokens, layer=2)
    assert vectors.shape == (3, 2, D)
    expected = dense(model, lens, 2)[tokens.numpy()]
    np.testing.assert_allclose(vectors.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 5])
def test_a_decomposition_equals_a_pursuit_on_the_dense_matrix(model, lens, k, monkeypatch):
    # Two vectors are decomposed at a time, and the lengths of two lens vectors are computed at a
    # time.
    monkeypatch.setattr("interp.reading.affine._LOGITS_AT_ONCE", 2 * VOCAB)
    monkeypatch.setattr("interp.reading.lens_vectors._COLUMNS_AT_ONCE", 2 * D)
    vectors = drawn(3, 5, D, seed=4)
    made = lens.decompose(model, vectors, layer=1, k=k)
    rows = dense(model, lens, 1)
    n_zero = 0
    for place in np.ndindex(3, 5):
        selected, coefficients, rest, shares = pursuit(rows, vectors[place].numpy(), k)
        n = len(selected)
        n_zero += (coefficients == 0).sum()
        assert made.tokens[place].tolist() == selected + [-1] * (made.tokens.shape[-1] - n)
        np.testing.assert_allclose(made.coefficients[place][:n], coefficients, atol=1e-10)
        np.testing.assert_allclose(made.rest[place], rest, atol=1e-10)
        shares += shares[-1:] * (made.shares.shape[-1] - n)
        np.testing.assert_allclose(made.shares[place], shares, atol=1e-10)
        lengths = coefficients * np.linalg.norm(rows[selected], axis=1)
        np.testing.assert_allclose(made.lengths[place][:n], lengths, atol=1e-10)
        assert not made.coefficients[place][n:].any()
    # Some coefficients became 0 again, and some sums ended early.
    assert (n_zero > 0) == (k == 5)
    assert (made.tokens == -1).any() == (k == 5)


def test_a_planted_sum_is_found(model, lens):
    rows = torch.from_numpy(dense(model, lens, 2))
    planted = 0.7 * rows[2] + 0.2 * rows[11] + 1.1 * rows[17]
    made = lens.decompose(model, planted, layer=2, k=20)
    found = dict(zip(made.tokens.tolist(), made.coefficients.tolist(), strict=True))
    positive = {token: size for token, size in found.items() if size > 1e-9}
    assert positive == pytest.approx({2: 0.7, 11: 0.2, 17: 1.1})
    assert made.rest.abs().max() < 1e-9
    table = repr(made).splitlines()
    assert len(table) == 2 + len(found)
    assert table[-1].endswith("0.0%")
    assert "token" in str(made.view().parts)


def test_sums_of_different_sizes_are_printed():
    model, zeros = pydoc(), torch.zeros(4, 128)
    lens = JacobianLens(torch.eye(128).repeat(4, 1, 1), zeros, "", 1, zeros[:, 0])
    a, b = lens.vectors(model, ["a", "b"], layer=3)
    # The characters are fewer than the dimensions, so one vector is orthogonal to all of them.
    orthogonal = torch.linalg.svd(model.W_U.detach())[0][:, -1]
    made = lens.decompose(model, torch.stack([a, 2 * a + b, orthogonal]), layer=3)
    assert made.tokens.tolist() == [[64, -1], [64, 65], [-1, -1]]
    assert made.words == ["a", ""]
    assert repr(made).splitlines()[-1].split() == ["64", "'a'", f"{a.norm():.4g}", "1", "0.0%"]
    assert made.as_json()["tables"]["first.words"]["values"] == ["a", ""]
    alone = lens.decompose(model, orthogonal, layer=3)
    assert alone.tokens.tolist() == [-1]
    assert alone.shares.tolist() == [1]
    assert len(repr(alone).splitlines()) == 2
    assert "token" in alone.view()._repr_html_()
    torch.testing.assert_close(alone.rest, orthogonal)


def test_a_run_is_patched_along_one_lens_vector(model, lens):
    tokens, source = torch.tensor([[3, 1, 4, 1]]), torch.tensor([[5, 9, 2, 6]])
    name = "blocks.2.resid_pre"
    before, value = (run_with_cache(model, t, names=name)[1][name] for t in (tokens, source))
    vector = lens.vectors(model, 8, layer=2)
    length = vector.square().sum()
    with torch.no_grad():
        wanted = before[:, -1] + ((value - before)[:, -1] @ vector / length)[:, None] * vector
        to_number = before[:, -1] + ((3 - before[:, -1] @ vector) / length)[:, None] * vector
    for edit, last in (
        (edits.interchange(value, vector, pos=-1), wanted),
        # The product of this source with the lens vector is 3.
        (edits.interchange(3 * vector / length, vector, pos=-1), to_number),
    ):
        with HookedRunner(model).hooks({name: edit}):
            logits, cache = run_with_cache(model, tokens, names=name)
        stream = torch.cat([before[:, :-1], last[:, None]], 1)
        torch.testing.assert_close(cache[name], stream)
        with torch.no_grad():
            stream = model.run_block(2, stream, model.context(tokens))
            torch.testing.assert_close(logits, model.unembed(stream))
    torch.testing.assert_close(to_number @ vector, torch.tensor([3.0]).double())


def test_wrong_vectors_tokens_and_layers_are_refused(model, lens):
    vectors = drawn(2, D, seed=6)
    for layer in (0, LAYERS):
        with pytest.raises(ValueError, match=rf"layer must be .*; got {layer}"):
            lens.decompose(model, vectors, layer=layer)
    with pytest.raises(ValueError, match="k must be"):
        lens.decompose(model, vectors, layer=1, k=0)
    for wrong in (drawn(2, D + 1, seed=6), drawn(0, D, seed=6)):
        with pytest.raises(ValueError, match=rf"\[\.\.\., {D}\]; got \[{len(wrong)}, "):
            lens.decompose(model, wrong, layer=1)
    for number in (0.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="finite and not 0"):
            lens.decompose(model, vectors * torch.tensor([[1.0], [number]]), layer=1)
    with pytest.raises(ValueError, match=f"from 0 to {VOCAB - 1}; got {VOCAB}"):
        lens.vectors(model, VOCAB, layer=1)
