"""SVD targets, compared with the steps of the forward pass; measures, compared with numpy and known
spectra.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from hooks import ActivationCache, CacheError
from interp import residual_stream, run_with_cache, svd_spectra, svd_targets
from interp.spectral import (
    alignment,
    condition_number,
    drift,
    effective_rank,
    principal_angles,
    randomized_svd,
    spectral_gap,
    stable_rank,
    subspace_angles,
    svd,
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthonormal(rows, columns, seed=0):
    return torch.linalg.qr(randn(rows, columns, seed=seed)).Q


def with_spectrum(values, rows, columns, seed=0):
    """Return a matrix with these singular values, and its singular vectors."""
    u, v = orthonormal(rows, len(values), seed), orthonormal(columns, len(values), seed + 1)
    return u * torch.tensor(values, dtype=torch.float64) @ v.T, u, v


def small(**changes):
    """Return a model with large random weights and biases."""
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=23, n_ctx=17, n_layers=3, n_heads=6, d_head=5, d_model=10, d_mlp=13)
    model = Transformer(TransformerConfig(**sizes | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def falling(fall, count):
    """Return matrices [count, 90, 71] whose singular values fall by a power law.

    With None, the matrices are noise.
    """
    if fall is None:
        return randn(count, 90, 71)
    values = [n**-fall for n in range(1, 72)]
    return torch.stack(
        [with_spectrum(values, 90, 71, seed)[0] for seed in range(0, 10 * count, 10)]
    )


# --- targets -----------------------------------------------------------------------------------


def formed(targets, name):
    value = getattr(targets, name)
    return value.form() if name == "wvwo" else value


def targets_of(model, tokens, **options):
    return svd_targets(model, run_with_cache(model, tokens, mode="svd_targets", **options)[1])


@pytest.mark.parametrize("options", [{"mode": "svd_targets"}, {"mode": "full", "lazy": True}])
def test_targets_are_the_documents(model, tokens, options):
    """The targets equal the definitions in the document, computed from the weights of each block.

    A is the pattern, V are the values, and scores of later keys are set to 0.
    """
    targets = svd_targets(model, run_with_cache(model, tokens, **options)[1])
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    found = {name: [] for name in ("qkt", "pattern", "values", "avwo", "wvwo")}
    with torch.no_grad():
        context = model.context(tokens)
        resid = model.input_resid(tokens, context)
        for block in model.blocks:
            q, k, v = block.attn.qkv(block.ln1(resid)).view(4, 7, 3, 2, 5).permute(2, 0, 3, 1, 4)
            products = q @ k.mT / math.sqrt(5)
            pattern = products.masked_fill(later, -math.inf).softmax(-1)
            w_o = block.attn.output.weight.T.view(2, 5, 10)  # weight: [d_model, head * d_head]
            w_v = block.attn.qkv.weight[20:].view(2, 5, 10)  # the first 20 rows: queries and keys
            of_layer = products.masked_fill(later, 0.0), pattern, v, pattern @ v @ w_o, w_v.mT @ w_o
            for values, value in zip(found.values(), of_layer, strict=True):
                values.append(value)
            resid = block(resid, context)
    for name, values in found.items():
        expected = torch.stack(values, 0 if name == "wvwo" else 1)
        torch.testing.assert_close(formed(targets, name), expected, atol=1e-5, rtol=1e-5)
    assert (targets.qkt[..., later] == 0).all()
    some = svd_targets(model, run_with_cache(model, tokens, **options)[1], layers=[2, 0])
    one = svd_targets(model, run_with_cache(model, tokens, **options)[1], layers=2)
    assert torch.equal(one.avwo, some.avwo[:, :1])
    for name in found:
        whole, part = formed(targets, name), formed(some, name)
        assert torch.equal(part, whole[[2, 0]] if name == "wvwo" else whole[:, [2, 0]])


@pytest.mark.parametrize(("n_kv_heads", "out_bias"), [(6, True), (2, False), (1, True)])
def test_heads_and_bias_add_up_to_the_output_of_attention(tokens, n_kv_heads, out_bias):
    model = small(n_kv_heads=n_kv_heads, out_bias=out_bias)
    _, cache = run_with_cache(model, tokens, mode="full")
    targets = svd_targets(model, cache)
    total = targets.avwo.sum(2) + model.b_O[:, None]
    torch.testing.assert_close(total, cache.stack("attn_out").transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_one_head_squeezes_to_the_documents_shapes(model, tokens):
    targets = targets_of(small(n_heads=1), tokens)
    squeezed = targets.squeeze_heads()
    assert squeezed.qkt.shape == squeezed.pattern.shape == (4, 3, 7, 7)
    assert (squeezed.values.shape, squeezed.avwo.shape) == ((4, 3, 7, 5), (4, 3, 7, 10))
    assert squeezed.wvwo.shape == (3, 10, 10)
    assert torch.equal(squeezed.avwo, targets.avwo[:, :, 0])
    short = targets_of(small(n_heads=1), tokens[:, :1]).squeeze_heads()
    for wrong, shape in ((short, "4, 3, 1, 1"), (targets_of(model, tokens), "4, 3, 2, 7, 7")):
        with pytest.raises(ValueError, match=shape):
            wrong.squeeze_heads()


def test_targets_are_detached(model, tokens):
    targets = targets_of(model, tokens, detach=False)
    for name in ("qkt", "pattern", "values", "wvwo", "avwo"):
        assert not formed(targets, name).requires_grad


def test_products_are_taken_in_the_wider_type(model, tokens):
    _, cache = run_with_cache(model, tokens, mode="svd_targets")
    targets = svd_targets(model.double(), cache)
    assert (targets.qkt.dtype, targets.avwo.dtype) == (torch.float32, torch.float64)
    w_v, w_o = model.W_V.detach()[2, -1], model.W_O.detach()[2, -1]
    torch.testing.assert_close(targets.wvwo[2, -1].form(), w_v @ w_o)
    written = cache["pattern", 2][:, -1].double() @ cache["v", 2][:, :, -1].double() @ w_o
    torch.testing.assert_close(targets.avwo[:, 2, -1], written)


def test_caches_and_models_that_do_not_do(model, tokens):
    _, whole = run_with_cache(model, tokens, mode="svd_targets")
    for wrong in ([], [3], [0, -1]):
        with pytest.raises(ValueError, match=r"layers must be one or more of \[0, 1, 2\]"):
            svd_targets(model, whole, wrong)
    for names in ("*.pattern", "blocks.0.attn.*", "embed"):
        with pytest.raises(CacheError, match=r'mode="svd_targets"'):
            svd_targets(model, run_with_cache(model, tokens, names=names)[1])
    for positions in (slice(2, 5), [1]):
        with pytest.raises(ValueError, match=r"pos=.* 7 keys"):
            targets_of(model, tokens, pos=positions)
    for mode in ("none", "svd_targets"):
        with pytest.raises(CacheError, match='mode="residual"'):
            residual_stream(run_with_cache(model, tokens, mode=mode)[1], torch.ones(4, 7).bool())


def test_residual_stream_in_windows_and_norms_everywhere(model, tokens):
    windows = torch.zeros(4, 7, dtype=torch.bool)
    windows[1, 2:5] = windows[3, 6] = True
    _, cache = run_with_cache(model, tokens, mode="residual", detach=False)
    for point in ("resid_pre", "resid_mid", "resid_post"):
        stream = residual_stream(cache, windows, point)
        values = [cache[point, layer] for layer in range(model.config.n_layers)]
        inside = [torch.stack([v[1, 2], v[1, 3], v[1, 4], v[3, 6]]) for v in values]
        assert not any(part.requires_grad for part in (stream.vectors, stream.norms))
        assert torch.equal(stream.vectors, torch.stack(inside, 1))
        sizes = [value.double().square().sum(-1).sqrt().float() for value in values]
        torch.testing.assert_close(stream.norms, torch.stack(sizes, -1))
    assert torch.equal(residual_stream(cache, windows).vectors, stream.vectors)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("windows", [torch.ones(4, 9).bool(), torch.ones(4, 7).long()])
def test_windows_that_cannot_be(model, tokens, windows):
    _, cache = run_with_cache(model, tokens, mode="residual")
    with pytest.raises(ValueError, match=rf"windows.*\(4, 7\).*{windows.dtype}"):
        residual_stream(cache, windows)


@pytest.mark.parametrize(("dtype", "number"), [(torch.half, 60000.0), (torch.double, 1 + 2**-40)])
def test_norms_neither_overflow_nor_lose_digits(dtype, number):
    stream, axes = torch.full((1, 1, 4), number, dtype=dtype), ("batch", "pos", "d_model")
    cache = ActivationCache({"blocks.0.resid_post": stream}, {"blocks.0.resid_post": axes})
    norms = residual_stream(cache, torch.zeros(1, 1).bool()).norms
    assert norms.item() == pytest.approx(2 * number, rel=1e-15)


# --- decompositions ----------------------------------------------------------------------------


def test_svd_is_numpys():
    matrices = randn(3, 2, 7, 5, dtype=torch.float32)
    found = svd(matrices)
    u, s, _ = np.linalg.svd(matrices.double().numpy(), full_matrices=False)
    assert found.s.dtype == found.u.dtype == found.vh.dtype == torch.float64
    np.testing.assert_allclose(found.s, s, atol=1e-13)
    np.testing.assert_allclose(found.u * found.s[..., None, :] @ found.vh, matrices, atol=1e-13)
    np.testing.assert_allclose(abs((found.u.numpy() * u).sum(-2)), 1, atol=1e-12)
    assert (found.next_value == 0).all()
    np.testing.assert_allclose(found.tolerance, 7 * np.finfo(np.float32).eps * s[..., 0], rtol=1e-9)


def test_rank_is_numpys_and_a_batch_is_sliced():
    matrix, _, _ = with_spectrum([5.0, 3.0, 2.0], 11, 7)
    several = torch.stack([matrix, torch.zeros(11, 7, dtype=torch.float64), randn(11, 7)])[None]
    whole = svd(several)
    assert whole.rank.tolist() == np.linalg.matrix_rank(several.numpy()).tolist()
    # In float32, the matrix contains rounding errors of about 1e-7. They must not raise the rank.
    assert svd(matrix.float()).rank == 3
    part = whole[0, 1:]
    assert (part.u.shape, part.s.shape, part.vh.shape) == ((2, 11, 7), (2, 7), (2, 7, 7))
    assert torch.equal(part.s, whole.s[0, 1:])
    for index in ((0, 0, 0), (..., 0)):
        with pytest.raises(IndexError):
            whole[index]


def test_targets_are_decomposed_by_name(model, tokens):
    targets = targets_of(model, tokens)
    found, top = svd_spectra(targets), svd_spectra(targets, k=2)
    assert list(found) == list(top) == ["qkt", "wvwo", "avwo"]
    for name, one in found.items():
        expected = np.linalg.svd(formed(targets, name).double().numpy(), compute_uv=False)
        # WvWo of one head has at most d_head singular values that are not 0.
        at_most = 5 if name == "wvwo" else None
        # The expected product of WvWo was rounded to float32.
        rounding = 1e-6 if name == "wvwo" else 1e-12
        np.testing.assert_allclose(one.s, expected[..., :at_most], atol=rounding)
        np.testing.assert_allclose(top[name].s, expected[..., :2], rtol=1e-6, atol=1e-9)
        rebuilt = one.u * one.s[..., None, :] @ one.vh
        np.testing.assert_allclose(rebuilt, formed(targets, name), atol=1e-5)
    assert (found["wvwo"].rank == 5).all()
    assert torch.equal(top["wvwo"].next_value, found["wvwo"].s[..., 2])
    for value, index, at in (
        (targets.wvwo.right, (2, 1, 3, 4), r"wvwo right .*nan at \[2, 1, 3, 4\]"),
        (targets.avwo, (2, 1, 0, 3, 4), r"avwo .*nan at \[2, 1, 0, 3, 4\]"),
    ):
        value[index] = math.nan
        for k in (None, 2):
            with pytest.raises(ValueError, match=at):
                svd_spectra(targets, k)
        value[index] = 0


def test_matrices_that_cannot_be_decomposed_or_measured(unchecked):
    matrices = randn(40, 37)
    assert svd(randn(0, 7, 5)).s.shape == (0, 5)
    for k in (0, -1, 38):
        with pytest.raises(ValueError, match=rf"1 to 37.* {k}$"):
            randomized_svd(matrices, k)
    with pytest.raises(ValueError, match=r"oversample.* 1$"):
        randomized_svd(matrices, 3, oversample=1)
    for measure in (effective_rank, stable_rank, spectral_gap, condition_number):
        for bad in ([1.0, math.nan], [math.inf, 1.0], [1.0, 2.0], [1.0, -0.5]):
            with pytest.raises(ValueError, match=str(bad[1])):
                measure(torch.tensor(bad))
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"k must .*1 to 3.* {k}$"):
            spectral_gap(torch.tensor([3.0, 2.0, 1.0]), k=k)
    one = svd(randn(3, 9, 7))
    for compare in (subspace_angles, alignment):
        with pytest.raises(ValueError, match="'top'"):
            compare(one, one, 2, "top")
        for k in (0, -2, 8):
            with pytest.raises(ValueError, match=rf"1 to 7.* {k}$"):
                compare(one, one, k)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("fall", [None, 0.1, 0.5, 1.0, 3.0])
def test_randomized_svd_is_within_its_stated_error(k, fall):
    matrices = falling(fall, 2)
    true = np.linalg.svd(matrices.numpy(), compute_uv=False)
    for p, q in ((10, 4), (2, 0), (5, 1)):
        found = randomized_svd(matrices, k, oversample=p, iterations=q, seed=3)
        # The bound of Corollary 10.10 in Halko et al. 2011.
        factor = 1 + math.sqrt(k / (p - 1)) + math.e * math.sqrt(k + p) / p * math.sqrt(71 - k)
        bound = factor ** (1 / (2 * q + 1)) * true[:, k]
        short = true[:, :k] - found.s.numpy()
        assert (short > -1e-12).all()
        assert (short <= bound[:, None]).all()
        left = matrices - found.u * found.s[:, None] @ found.vh
        assert (np.linalg.norm(left.numpy(), 2, axis=(1, 2)) <= bound + true[:, k]).all()
        assert (found.next_value.numpy() <= true[:, k] + 1e-12).all()
    default = randomized_svd(matrices, k)
    assert (1 - default.s.numpy() / true[:, :k]).max() < (1e-5 if fall and fall >= 1 else 0.06)
    eye = torch.eye(k, dtype=torch.float64).expand(2, k, k)
    torch.testing.assert_close(default.u.mT @ default.u, eye, atol=1e-12, rtol=0)
    torch.testing.assert_close(default.vh @ default.vh.mT, eye, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(60, 43), (43, 60)])
def test_randomized_svd_is_exact_at_low_rank_and_the_same_for_a_seed(rows, columns):
    matrix, u, v = with_spectrum([7.0, 4.0, 1.0, 0.5], rows, columns)
    found = randomized_svd(matrix, 3, seed=5)
    np.testing.assert_allclose(found.s, [7, 4, 1], atol=1e-12)
    np.testing.assert_allclose(found.next_value, 0.5, atol=1e-12)
    for mine, true in ((found.u, u), (found.vh.T, v)):
        np.testing.assert_allclose((mine * true[:, :3]).sum(0).abs(), 1, atol=1e-12)
    assert torch.equal(found.u, randomized_svd(matrix, 3, seed=5).u)
    noise = randn(rows, columns)
    found, other = (randomized_svd(noise, 3, seed=seed) for seed in (5, 6))
    assert not torch.equal(found.s, other.s)
    tiny = randomized_svd(noise * 1e-170, 3, seed=5)
    np.testing.assert_allclose(tiny.tolerance * 1e170, found.tolerance, rtol=1e-9)
    zero = randomized_svd(torch.zeros(rows, columns), 3)
    assert zero.s.tolist() == [0, 0, 0]


def test_randomized_svd_of_a_small_matrix_is_the_full_one():
    matrices = randn(2, 7, 5)
    for k in (1, 3, 5):
        found, whole = randomized_svd(matrices, k), svd(matrices)
        assert torch.equal(found.s, whole.s[:, :k])
        assert torch.equal(found.vh, whole.vh[:, :k])
        assert found.next_value.tolist() == (whole.s[:, k] if k < 5 else torch.zeros(2)).tolist()


# --- measures ----------------------------------------------------------------------------------


def test_measures_by_hand():
    s = torch.tensor([[4.0, 2.0, 2.0], [3.0, 3.0, 3.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    # The shares 1/2, 1/4 and 1/4 have an entropy of 1.5 bits, so the effective rank is 2**1.5.
    np.testing.assert_allclose(effective_rank(s), [2**1.5, 3, 1, 0], atol=1e-12)
    np.testing.assert_allclose(stable_rank(s), [1.5, 3, 1, 0], atol=1e-12)
    assert spectral_gap(s).tolist() == [2, 0, 5, 0]
    assert spectral_gap(s, k=3).tolist() == [2, 3, 0, 0]
    assert condition_number(s).tolist() == [2, 1, math.inf, math.inf]
    # The measures have no unit: they are the same for any scale of the matrix.
    matrices = randn(5, 9, 7)
    s = svd(matrices).s
    for scale in (1e-170, 1e170, 1e307):
        for measure in (effective_rank, stable_rank, condition_number):
            np.testing.assert_allclose(measure(s * scale), measure(s), rtol=1e-12)
    np.testing.assert_allclose(condition_number(s), np.linalg.cond(matrices.numpy()), rtol=1e-12)


# --- subspaces ---------------------------------------------------------------------------------


def planes(angles, dim=11, seed=4):
    """Return bases of two subspaces with these principal angles. They are not orthonormal."""
    frame, count = orthonormal(dim, 2 * len(angles), seed), len(angles)
    turn = torch.tensor(angles, dtype=torch.float64)
    a = frame[:, :count]
    b = a * turn.cos() + frame[:, count:] * turn.sin()
    return a @ randn(count, count, seed=8), b @ randn(count, count, seed=9)


@pytest.mark.parametrize(
    "angles",
    [[0.3], [0.0, 0.7, 1.2], [1e-12, 1e-7, 0.5, math.pi / 2], [math.pi / 2] * 2, [1e-9, 1.5]],
)
def test_principal_angles_of_constructed_planes(angles):
    a, b = planes(angles)
    np.testing.assert_allclose(principal_angles(a, b), angles, atol=1e-13, rtol=0)
    np.testing.assert_allclose(principal_angles(b, a), angles, atol=1e-13, rtol=0)


def test_principal_angles_of_spaces_of_different_dimensions():
    a, b = planes([0.2, 0.9, 1.4])
    inside = torch.cat([a, b], 1)[:, :5]
    np.testing.assert_allclose(principal_angles(inside, a), [0, 0, 0], atol=1e-14)


def test_bases_are_checked():
    a, b = planes([0.2, 0.9])
    flat = torch.stack([a, torch.cat([a[:, :1], 3 * a[:, :1]], 1)])
    with pytest.raises(ValueError, match=r"b\[1\] of rank 1 with 2 columns"):
        principal_angles(torch.stack([b, b]), flat)
    b[3, 1] = -math.inf
    with pytest.raises(ValueError, match=r"b .*-inf at \[3, 1\]"):
        principal_angles(a, b)


def turned(angle, k, rows=9, columns=7):
    """Return a matrix, and the matrix with its right singular vector k turned by an angle.

    The vector turns out of the space of all singular vectors.
    """
    values = [5.0, 3.0, 2.0, 1.0]
    u, frame = orthonormal(rows, 4), orthonormal(columns, 5, seed=6)
    v = frame[:, :4].clone()
    w = v.clone()
    w[:, k - 1] = math.cos(angle) * v[:, k - 1] + math.sin(angle) * frame[:, 4]
    scale = torch.tensor(values, dtype=torch.float64)
    return svd(u * scale @ v.T), svd(u * scale @ w.T)


def test_subspaces_of_singular_vectors_turn_as_built():
    before, after = turned(0.4, k=2)
    np.testing.assert_allclose(subspace_angles(before, after, 1), [0], atol=1e-12)
    np.testing.assert_allclose(subspace_angles(before, after, 2), [0, 0.4], atol=1e-12)
    np.testing.assert_allclose(subspace_angles(before, after, 3), [0, 0, 0.4], atol=1e-12)
    np.testing.assert_allclose(subspace_angles(before, after, 2, "left"), [0, 0], atol=1e-12)
    # Signs of singular vectors do not matter.
    after = dataclasses.replace(after, u=-after.u, vh=-after.vh)
    expected = [1, math.cos(0.4), 1, 1]
    np.testing.assert_allclose(alignment(before, after, 4), expected, atol=1e-12)
    np.testing.assert_allclose(alignment(before, after, 4, "left"), [1] * 4, atol=1e-12)


def test_drift_compares_consecutive_steps():
    steps = [turned(angle, k=1)[1] for angle in (0.0, 0.1, 0.35, 0.3)]
    whole = torch.stack([one.u * one.s @ one.vh for one in steps])
    matrices = [whole, 2 * whole, whole.flip(1)]
    found = drift(svd(torch.stack(matrices, 1)), 2)
    assert found.shape == (3, 3, 2)
    for row in range(3):
        np.testing.assert_allclose(found[:, row, 1], [0.1, 0.25, 0.05], atol=1e-12)
    assert drift(svd(randn(1, 7, 5)), 2).shape == (0, 2)


def test_repeated_singular_values_leave_no_direction():
    """If the first two of three singular values are equal, the plane of their vectors is defined,
    but the single vectors are not.
    """
    matrix, _, _ = with_spectrum([2.0, 2.0, 1.0], 9, 7)
    one = svd(torch.stack([matrix, 3 * matrix]))
    assert subspace_angles(one, one, 1).isnan().all()
    np.testing.assert_allclose(subspace_angles(one, one, 2), 0, atol=1e-12)
    assert alignment(one, one, 3).isnan().tolist() == [[True, True, False]] * 2
    # After rounding to float32, the two values are still equal up to the tolerance.
    rounded = svd(matrix.float())
    assert subspace_angles(rounded, rounded, 1).isnan().all()


def test_a_zero_matrix_has_no_subspace():
    good = with_spectrum([3.0, 2.0], 9, 7)[0]
    both = svd(torch.stack([good, torch.zeros_like(good)]))
    assert subspace_angles(both, both, 2).isnan().tolist() == [[False] * 2, [True] * 2]
    for pair in ((both, both[[0, 0]]), (both[[0, 0]], both)):
        assert subspace_angles(*pair, 2).isnan().tolist() == [[False] * 2, [True] * 2]
        assert alignment(*pair, 1).isnan().tolist() == [[False], [True]]
    assert alignment(both, both, 3).isnan().tolist() == [[False, False, True], [True] * 3]


def test_a_truncated_decomposition_knows_the_next_value():
    """The third singular value equals the fourth, which a decomposition of the top 3 leaves out. So
    the third vector is not defined.
    """
    matrix, _, _ = with_spectrum([4.0, 3.0, 2.0, 2.0, 1.0], 40, 37)
    top = randomized_svd(matrix, 3)
    assert alignment(top, svd(matrix), 3).isnan().tolist() == [False, False, True]
    assert subspace_angles(top, top, 3).isnan().all()
    np.testing.assert_allclose(subspace_angles(top, svd(matrix), 2), [0, 0], atol=1e-7)


def test_a_randomised_decomposition_finds_no_space_if_none_is_defined():
    """If 30 singular values are equal, any 3 vectors are valid, and two random starts find
    different vectors.
    """
    matrix, _, _ = with_spectrum([2.0] * 30 + [1.9] * 90, 120, 120)
    one, other = (randomized_svd(matrix, 3, seed=seed) for seed in (0, 1))
    assert subspace_angles(one, other, 3).isnan().all()
    assert alignment(one, other, 3).isnan().all()
