"""Latent scaling of crosscoders: least squares with numpy, and features whose owner is known."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hooks import HookedRunner
from interp.features import Crosscoder, crosscoder_cards, latent_scaling, member_values
from interp.features import scaling as scaling_module
from tests.interp.features.crosscoders import FEATURES, POINT, D, random_crosscoder, two_models

TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8], [9, 7, 9, 3]]


def random_values(rows=41):
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(rows, D, generator=draw, dtype=torch.float64) * 2 for _ in range(2)]


def least_squares(crosscoder, values, feature, member, other):
    """Return the factors of a feature by numpy's least squares, [target, member].

    The contribution of the feature is removed from the reconstruction before the error is taken, as
    in the paper.
    """
    weights = {name: tensor.numpy() for name, tensor in crosscoder.state_dict().items()}
    features = crosscoder.encode(values).numpy()
    direction = np.outer(features[:, feature], weights["W_dec"][member][feature]).ravel()
    factors = np.zeros((2, 2))
    for column, each in enumerate((member, other)):
        value = (values[each].numpy() - weights["center"][each]) * weights["scale"][each]
        reconstruction = features @ weights["W_dec"][each] + weights["b_dec"][each]
        without = features.copy()
        without[:, feature] = 0
        rest = value - without @ weights["W_dec"][each] - weights["b_dec"][each]
        for row, target in enumerate((rest, reconstruction)):
            solution = np.linalg.lstsq(direction[:, None], target.ravel(), rcond=None)
            factors[row, column] = solution[0][0]
    return factors


@pytest.mark.parametrize(("member", "other"), [(1, 0), (0, 1)])
def test_factors_are_the_least_squares_of_numpy(member, other, monkeypatch):
    # Pieces of three rows.
    monkeypatch.setattr(scaling_module, "_MOST", 3 * FEATURES)
    crosscoder, values = random_crosscoder(), random_values()
    batches = [[value[:20] for value in values], [value[None, 20:] for value in values]]
    made = latent_scaling(crosscoder, batches, member)
    for feature in range(FEATURES):
        wanted = least_squares(crosscoder, values, feature, member, other)
        assert_close(
            made.betas[:, :, feature].double(), torch.from_numpy(wanted), rtol=0, atol=1e-5
        )
    assert made.n_tokens == 41
    assert_close(made.density, (crosscoder.encode(values) != 0).float().mean(0))
    assert_close(made.relative_norm, crosscoder.relative_norms(member, other))
    assert (made.member, made.other) == (f"model {member}", f"model {other}")
    assert_close(made.nu("error"), made.betas[0, 1] / made.betas[0, 0])
    assert_close(made.nu("reconstruction"), made.betas[1, 1] / made.betas[1, 0])


def planted():
    """Return a crosscoder and values of `base` and `tuned`, with known features.

    Feature 0 is in both models. Feature 1 is only in tuned. Feature 2 is in both models, but has
    no decoder row in base, so the error of base contains it. Feature 3 is in both models, but base
    is reconstructed by feature 4, which is active at the same tokens. So the decoder rows of base
    are zero for the features 1, 2 and 3. Feature 5 is only in tuned, but is never active.
    """
    draw = torch.Generator().manual_seed(0)
    concepts = (torch.rand(60, 4, generator=draw) + 0.5) * (torch.rand(60, 4, generator=draw) < 0.3)
    in_base = torch.tensor([1.0, 0.0, 1.0, 1.0])
    base = nn.functional.pad(concepts * in_base, (0, 3))
    tuned = nn.functional.pad(concepts, (0, 3))
    W_enc, W_dec = torch.zeros(2, 7, 6), torch.zeros(2, 6, 7)
    for concept in range(4):
        W_enc[1, concept, concept] = 1
        W_dec[1, concept, concept] = 1
    W_enc[0, 3, 4] = 1
    W_dec[0, 0, 0] = 1
    W_dec[0, 4, 3] = 1
    W_dec[1, 5, 5] = 1
    crosscoder = Crosscoder(
        W_enc, W_dec, torch.zeros(6), torch.zeros(2, 7), nn.ReLU(), names=["base", "tuned"]
    )
    return crosscoder, [base, tuned]


def test_features_of_one_model_are_separated_from_artifacts():
    crosscoder, values = planted()
    made = latent_scaling(crosscoder, [values], "tuned")
    assert_close(made.relative_norm, torch.tensor([0.5, 1, 1, 1, 0, 1]))
    # All concepts have different dimensions, so the numbers are exact.
    assert_close(made.nu("error")[:4], torch.tensor([1.0, 0, 1, 0]))
    assert_close(made.nu("reconstruction")[:4], torch.tensor([1.0, 0, 0, 1]))
    assert made.nu("error")[4:].isnan().all()
    assert made.belongs().tolist() == [False, True, False, False, False, False]
    assert not made.belongs(norm=1.0).any()
    assert made.belongs(error=1.1).tolist() == [False, True, True, False, False, False]
    assert made.belongs(reconstruction=1.1).tolist() == [False, True, False, True, False, False]
    assert made.top(2) == [(1, 1.0), (2, 1.0)]
    assert made.top(9, by="error") == [(1, 0.0), (3, 0.0), (2, 1.0)]
    assert made.top(9, by="reconstruction") == [(1, 0.0), (2, 0.0), (3, 1.0)]
    assert "  3 features have" in repr(made)
    assert "  1 of them are also in the error of base" in repr(made)
    assert "  1 of them are also in the reconstruction of base" in repr(made)
    assert "  1 truly belong to tuned" in repr(made)
    of_base = latent_scaling(crosscoder, [values], "base")
    assert of_base.belongs().sum() == 0
    assert of_base.nu("error")[4] == 0
    assert of_base.nu("reconstruction")[4] == 1


def test_the_view_shows_norms_and_ratios():
    crosscoder, values = planted()
    norms, ratios = latent_scaling(crosscoder, [values], "tuned").view().parts
    assert norms["series"]["relative norm"].tolist() == [0, 0.5, 1, 1, 1, 1]
    assert_close(ratios["series"]["nu of the error"], torch.tensor([0.0, 0, 1]))
    assert_close(ratios["series"]["nu of the reconstruction"], torch.tensor([0.0, 0, 1]))


def test_there_must_be_values_and_another_model():
    crosscoder = random_crosscoder()
    with pytest.raises(ValueError, match="at least one token"):
        latent_scaling(crosscoder, [], 0)
    with pytest.raises(ValueError, match="value of each member"):
        latent_scaling(crosscoder, [random_values()[:1]], 0)
    with pytest.raises(ValueError, match="other must be one of"):
        latent_scaling(random_crosscoder(members=3), [random_values()], 0)


def test_values_of_models_are_the_values_of_each_text_alone():
    models, crosscoder = two_models(), random_crosscoder()
    wanted = []
    for model in models:
        runner = HookedRunner(model)
        rows = [runner.capture(torch.tensor([text]), names=POINT)[POINT][0, 1:] for text in TEXTS]
        wanted.append(torch.cat(rows))
    by_name = {"model 1": models[1], "model 0": models[0]}
    for given in (models, by_name):
        read = member_values(given, crosscoder, TEXTS, pos=slice(1, None), batch=2)
        batches = [*read]
        assert [len(values[0]) for values in batches] == [10, 3]
        for number in range(2):
            value = torch.cat([values[number] for values in batches])
            assert_close(value, wanted[number], rtol=0, atol=1e-9)


def test_layers_of_one_model_are_read_in_one_run():
    (model, _), made = two_models(), random_crosscoder(members=3, joint=False)
    points = [f"blocks.{layer}.resid_post" for layer in (2, 0, 1)]
    crosscoder = Crosscoder(
        made.W_enc, made.W_dec, made.b_enc, made.b_dec, made.activation, points=points
    )
    counted = []
    model.blocks[0].register_forward_hook(lambda *_: counted.append(1))
    (values,) = member_values(model, crosscoder, TEXTS[:1])
    assert len(counted) == 1
    cache = HookedRunner(model).capture(torch.tensor(TEXTS[:1]), names=points)
    for point, value in zip(points, values, strict=True):
        assert_close(value, cache[point][0], rtol=0, atol=1e-9)


def test_models_must_fit_the_members_and_read_the_same_tokens():
    models, crosscoder = two_models(), random_crosscoder()
    with pytest.raises(ValueError, match="a model for each member"):
        next(member_values(models[:1], crosscoder, TEXTS))
    unknown = Crosscoder(
        crosscoder.W_enc, crosscoder.W_dec, crosscoder.b_enc, crosscoder.b_dec, nn.ReLU()
    )
    with pytest.raises(ValueError, match="give point="):
        next(member_values(models, unknown, TEXTS))
    for shift, model in enumerate(models):
        model.to_tokens = lambda text, shift=shift: _tokens(text, shift)
    with pytest.raises(ValueError, match="same tokens.*text 0"):
        next(member_values(models, crosscoder, ["ab", "c"]))


@pytest.mark.usefixtures("unchecked")
def test_another_object_than_a_crosscoder_is_an_error_with_the_call():
    models, crosscoder = two_models(), random_crosscoder()
    for call in (
        lambda: latent_scaling([random_values()], crosscoder, 0),
        lambda: next(member_values(crosscoder, models, TEXTS)),
        lambda: crosscoder_cards(crosscoder, models, TEXTS, [0], 0),
    ):
        with pytest.raises(TypeError, match=r"must be a Crosscoder.*load_crosscoder"):
            call()


def _tokens(text, shift):
    """Return a text as one token for each character, counted from `shift`."""
    from hooks.base import Text

    return Text(torch.tensor([[ord(letter) - ord("a") + shift for letter in text]]))
