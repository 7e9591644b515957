"""Crosscoders: numbers of the libraries (tests/dictionaries/make.py), files that are refused, and
runs of a model with a crosscoder.
"""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from hooks import HookedRunner, UnknownNameError
from interp import load_crosscoder, load_sae, load_transcoders, splice
from interp.features import Crosscoder, JumpReLU
from tests.interp.features.crosscoders import FEATURES, POINT, random_crosscoder, two_models
from tests.interp.features.fixtures import FIXTURES, changed

# Other cases run with --full.
pytestmark = pytest.mark.sampled(2)

FOLDERS = sorted(FIXTURES.glob("crosscoder_*"))
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEXTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_features_and_outputs_are_the_library_s(folder):
    wanted = load_file(folder / "expected.safetensors")
    made = load_crosscoder(folder)
    values = [*wanted["x"].unbind(1)]
    assert_close(made.encode(values), wanted["features"], **CLOSE)
    assert_close(torch.stack(made(values), 1), wanted["output"], **CLOSE)
    assert_close(torch.stack(made.decode(wanted["features"]), 1), wanted["output"], **CLOSE)
    by_name = dict(zip(reversed(made.names), reversed(values), strict=True))
    assert torch.equal(made.encode(by_name), made.encode(values))
    assert 0 < (wanted["features"] != 0).float().mean() < 0.5
    assert not any(tensor.requires_grad for tensor in made.state_dict().values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_dictionary_of_one_member_is_this_part_of_the_crosscoder(folder):
    wanted = load_file(folder / "expected.safetensors")
    made = load_crosscoder(folder)
    values = dict(zip(made.names, wanted["x"][:, None].unbind(2), strict=True))
    for number, name in enumerate(made.names):
        others = {other: value for other, value in values.items() if other != name}
        of_member = made.dictionary(name, others)
        assert_close(of_member.encode(values[name])[:, 0], wanted["features"], **CLOSE)
        assert_close(of_member(values[name])[:, 0], wanted["output"][:, number], **CLOSE)


def test_gemma_scope_has_the_points_of_its_layers():
    made = load_crosscoder(FIXTURES / "crosscoder_gemma_scope_2")
    assert made.names == made.points == tuple(f"blocks.{layer}.resid_post" for layer in (1, 4, 6))
    assert not made.is_joint
    assert (made.n_features, made.d_model) == (12, 6)
    named = load_crosscoder(FIXTURES / "crosscoder_gemma_scope_2", names=["early", "mid", "late"])
    assert named.points == made.points
    assert named.index("late") == 2


def test_dictionary_learning_has_the_point_and_the_names_that_are_given():
    made = load_crosscoder(FIXTURES / "crosscoder_relu")
    assert (made.names, made.points) == (("0", "1"), ("blocks.1.resid_post",) * 2)
    made = load_crosscoder(FIXTURES / "crosscoder_hub", names=["base", "tuned"], point="blocks.0.x")
    assert (made.names, made.points) == (("base", "tuned"), ("blocks.0.x",) * 2)
    assert made.config["k"] == 3
    assert load_crosscoder(FIXTURES / "crosscoder_relu", dtype=torch.float64).b_enc.dtype == (
        torch.float64
    )


def test_files_of_the_last_step_and_of_a_compiled_module_are_read(tmp_path):
    source = FIXTURES / "crosscoder_batch_top_k_sae"
    copy = tmp_path / "end"
    shutil.copytree(source, copy)
    saved = torch.load(copy / "ae.pt", weights_only=True)
    (copy / "ae.pt").unlink()
    torch.save({f"_orig_mod.{name}": saved[name] for name in saved}, copy / "model_final.pt")
    wanted = load_file(source / "expected.safetensors")
    values = [*wanted["x"].unbind(1)]
    for path in (copy, copy / "config.json", copy / "model_final.pt"):
        assert_close(load_crosscoder(path).encode(values), wanted["features"], **CLOSE)


def test_a_file_without_a_code_norm_has_the_norm_of_crosscoders(tmp_path):
    source = FIXTURES / "crosscoder_batch_top_k_crosscoder"
    copy = changed(source.name, tmp_path, {"trainer": {"dict_class": "BatchTopKCrossCoder"}})
    saved = torch.load(copy / "ae.pt", weights_only=True)
    del saved["code_normalization_id"]
    torch.save(saved, copy / "ae.pt")
    wanted = load_file(source / "expected.safetensors")
    assert_close(
        load_crosscoder(copy).encode([*wanted["x"].unbind(1)]), wanted["features"], **CLOSE
    )


HUB, GEMMA = "crosscoder_hub", "crosscoder_gemma_scope_2"
REFUSED = {
    "field": (HUB, {"latent_scale": 2}, {}, (), "latent_scale"),
    "encoder layers": (HUB, {"encoder_layers": [1]}, {}, (), "encoder_layers"),
    "number of layers": (HUB, {"num_layers": 3}, {}, (), "num_layers"),
    "type of a field": (HUB, {"num_layers": "2"}, {}, (), "num_layers"),
    "class": (HUB, {"dict_class": "CrossCoder"}, {}, (), "'CrossCoder'"),
    "code norm": (HUB, {"code_normalization": "L2"}, {}, (), "L2"),
    "two code norms": (HUB, {"code_normalization": "NONE"}, {}, (), "NONE and SAE"),
    "unknown tensor": (HUB, {}, {"decoder.scale": torch.ones(2)}, (), "decoder.scale is unknown"),
    "missing tensor": (HUB, {}, {}, ("encoder.bias",), "encoder.bias is missing"),
    "half a normalization": (HUB, {}, {}, ("activation_std",), "activation_std is missing"),
    "axes": (HUB, {}, {"encoder.weight": torch.ones(6, 13)}, (), "encoder.weight"),
    "size": (HUB, {}, {"decoder.bias": torch.ones(2, 5)}, (), "b_dec"),
    "type": (GEMMA, {"type": "clt"}, {}, (), "'clt'"),
    "architecture": (GEMMA, {"architecture": "topk"}, {}, (), "'topk'"),
    "skip": (GEMMA, {"affine_connection": True}, {}, (), "affine_connection"),
    "skip tensor": (GEMMA, {}, {"affine_skip_connection": torch.ones(6, 6)}, (), "affine_skip"),
    "layers": (
        GEMMA,
        {f"hf_hook_point_{end}": "model.layers.{1,4}.output" for end in ("in", "out")},
        {},
        (),
        "2 layers",
    ),
    "points": (GEMMA, {"hf_hook_point_out": "model.layers.{1,4,7}.output"}, {}, (), "{1,4,7}"),
    "decoder": (GEMMA, {}, {"w_dec": torch.ones(4, 2, 6)}, (), "w_dec of params_layer_0"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_means_something_else_is_refused(case, tmp_path):
    folder, config, weights, drop, named = REFUSED[case]
    copy = changed(folder, tmp_path, config, weights, drop)
    with pytest.raises(ValueError, match=named.replace("{", r"\{")) as error:
        load_crosscoder(copy)
    assert "\n" not in str(error.value)


def test_features_of_each_member_are_refused(tmp_path):
    decoupled = {"code_normalization": "DECOUPLED"}
    copy = changed(HUB, tmp_path, decoupled, {"code_normalization_id": torch.tensor(5)}, ())
    with pytest.raises(ValueError, match="not supported; got DECOUPLED"):
        load_crosscoder(copy)


@pytest.mark.parametrize("folder", ["crosscoder_relu", HUB, GEMMA])
def test_other_loaders_name_the_loader_of_crosscoders(folder):
    for load in (load_sae, load_transcoders):
        with pytest.raises(ValueError, match="load_crosscoder|load_transcoders|load_sae"):
            load(FIXTURES / folder)
    with pytest.raises(FileNotFoundError):
        load_crosscoder(FIXTURES / "sparsify_topk")
    with pytest.raises(ValueError, match="point must be None"):
        load_crosscoder(FIXTURES / GEMMA, point=POINT)


@pytest.fixture(scope="module")
def models():
    return two_models()


def by_hand(crosscoder, values, edited=None):
    """Return the features and the outputs of a joint crosscoder, with numpy.

    Args:
        crosscoder: the crosscoder.
        values: the value of each model, [batch pos d_model].
        edited: the feature that is set to 3. Default: none.
    """
    weights = {name: tensor.numpy() for name, tensor in crosscoder.state_dict().items()}
    pre = weights["b_enc"].copy()
    for number, value in enumerate(values):
        normed = (value.numpy() - weights["center"][number]) * weights["scale"][number]
        pre = pre + normed @ weights["W_enc"][number]
    features = np.where(pre > weights["activation.threshold"], np.maximum(pre, 0), 0)
    if edited is not None:
        features[..., edited] = 3
    outputs = [
        (features @ weights["W_dec"][number] + weights["b_dec"][number]) / weights["scale"][number]
        + weights["center"][number]
        for number in range(len(values))
    ]
    return features, outputs


@pytest.mark.parametrize("number", [0, 1])
def test_a_crosscoder_is_spliced_into_either_model(models, number):
    crosscoder = random_crosscoder()
    caches = [HookedRunner(model).capture(TEXTS, names=POINT) for model in models]
    values = [cache[POINT] for cache in caches]
    assert not torch.allclose(*values)
    model, name = models[number], f"model {number}"
    of_member = crosscoder.dictionary(name, {f"model {1 - number}": caches[1 - number]})
    with splice(model, of_member) as runner:
        logits, cache = runner.run_with_cache(TEXTS, names="*.features")
        features, outputs = by_hand(crosscoder, values)
        assert_close(cache[f"{POINT}.features"], torch.from_numpy(features), rtol=0, atol=1e-9)
        assert_close(logits, model(TEXTS), rtol=0, atol=0)
    with splice(model, of_member, error=None) as runner:
        replaced = runner.run_with_hooks(TEXTS, hooks={})
    output = torch.from_numpy(outputs[number])
    wanted = HookedRunner(model).run_with_hooks(TEXTS, hooks={POINT: lambda value, point: output})
    assert_close(replaced, wanted, rtol=0, atol=1e-6)


def test_an_edit_of_a_feature_moves_the_value_along_the_decoder_of_the_model(models):
    crosscoder = random_crosscoder()
    caches = [HookedRunner(model).capture(TEXTS, names=POINT) for model in models]
    values = [cache[POINT] for cache in caches]
    before, after = (by_hand(crosscoder, values, edited) for edited in (None, 5))
    change = torch.from_numpy(after[1][1] - before[1][1])

    def set_to_3(features, point):
        edited = features.clone()
        edited[..., 5] = 3
        return edited

    with splice(models[1], crosscoder.dictionary(1, {"model 0": values[0]})) as runner:
        logits = runner.run_with_hooks(TEXTS, hooks={f"{POINT}.features": set_to_3})
    hooks = {POINT: lambda value, point: value + change}
    wanted = HookedRunner(models[1]).run_with_hooks(TEXTS, hooks=hooks)
    assert_close(logits, wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(logits, models[1](TEXTS))


def test_values_of_other_texts_are_an_error(models):
    crosscoder = random_crosscoder()
    value = HookedRunner(models[0]).capture(TEXTS, names=POINT)[POINT]
    of_member = crosscoder.dictionary("model 1", {"model 0": value})
    with (
        splice(models[1], of_member) as runner,
        pytest.raises(ValueError, match=r"\[2, 5\].*\[2, 7\]"),
    ):
        runner.capture(TEXTS[:, :5], names="*.features")
    with (
        pytest.raises(TypeError, match=r"crosscoder.dictionary\(member, others\)"),
        splice(models[1], crosscoder),
    ):
        pass
    for others, named in (
        ({}, "values of model 0; got none"),
        ({"model 0": value, "model 1": value}, "values of model 0; got model 0, model 1"),
        ({"model 0": value[..., :5]}, "value of model 0"),
    ):
        with pytest.raises(ValueError, match=named):
            crosscoder.dictionary("model 1", others)
    with pytest.raises(UnknownNameError, match="model 1"):
        crosscoder.dictionary("model 2", {})
    with pytest.raises(ValueError, match="cannot be changed"):
        of_member.with_unit_decoder()
    with pytest.raises(ValueError, match="no single offset"):
        _ = of_member.offset


def test_layers_of_one_model(models):
    """A weakly causal crosscoder: a feature reads one layer."""
    model, points = models[0], ["blocks.0.resid_post", "blocks.1.resid_post", "blocks.2.resid_post"]
    made = random_crosscoder(members=3, joint=False)
    crosscoder = Crosscoder(
        made.W_enc, made.W_dec, made.b_enc, made.b_dec, made.activation, points=points
    )
    cache = HookedRunner(model).capture(TEXTS, names=points)
    values = [cache[point] for point in points]
    pre = torch.cat([value @ made.W_enc[n] for n, value in enumerate(values)], -1) + made.b_enc
    wanted = pre * (pre > made.activation.threshold)
    assert_close(crosscoder.encode(values), wanted, rtol=0, atol=1e-9)
    with splice(model, crosscoder.dictionary("1", {"0": cache, "2": cache})) as runner:
        features = runner.capture(TEXTS, names="*.features")[f"{points[1]}.features"]
    assert_close(features, wanted, rtol=0, atol=1e-9)


def test_relative_norms_are_the_formula():
    lengths = torch.tensor([[0.0, 1.0, 3.0, 2.0, 0.0], [5.0, 1.0, 1.0, 0.0, 0.0]])
    W_dec = lengths[..., None] * nn.functional.normalize(torch.randn(2, 5, 4), dim=2)
    made = Crosscoder(
        torch.zeros(2, 4, 5), W_dec, torch.zeros(5), torch.zeros(2, 4), nn.ReLU(), names=["a", "b"]
    )
    assert_close(made.relative_norms("b"), torch.tensor([1, 0.5, 1 / 6, 0, 0.5]))
    assert_close(made.relative_norms("a"), 1 - made.relative_norms("b", "a"))
    with pytest.raises(ValueError, match="other must be one of"):
        random_crosscoder(members=3).relative_norms(0)


def test_cosines_are_the_formula():
    made = random_crosscoder(members=3)
    rows = made.W_dec.numpy()
    lengths = np.linalg.norm(rows, axis=2)
    wanted = (rows[2] * rows[0]).sum(1) / (lengths[2] * lengths[0])
    assert_close(made.cosines(2, 0).double(), torch.from_numpy(wanted), rtol=0, atol=1e-6)
    two = random_crosscoder()
    assert_close(two.cosines("model 1"), two.cosines(0, 1))


@pytest.mark.usefixtures("unchecked")
def test_weights_that_do_not_fit_are_refused():
    zeros = torch.zeros
    sizes = {"W_enc": zeros(2, 4, 5), "W_dec": zeros(2, 5, 4), "b_enc": zeros(5)}
    sizes |= {"b_dec": zeros(2, 4), "activation": nn.ReLU()}
    Crosscoder(**sizes)
    for name, value in {
        "W_enc": zeros(2, 4, 3),
        "b_enc": zeros(4),
        "b_dec": zeros(1, 4),
        "names": ["a", "a"],
        "points": [POINT],
        "scale": zeros(3),
        "center": zeros(2, 5),
        "threshold": JumpReLU(zeros(6)),
    }.items():
        key = "activation" if name == "threshold" else name
        with pytest.raises(ValueError, match=name):
            Crosscoder(**sizes | {key: value})


def test_the_view_shows_lengths_and_relative_norms():
    made = random_crosscoder()
    lengths, norms = made.view().parts
    wanted = made.W_dec.norm(dim=2).amax(1)
    for name, largest in zip(made.names, wanted, strict=True):
        assert float(lengths["series"][name][0]) == pytest.approx(float(largest))
    assert len(norms["series"]["relative norm"]) == FEATURES
    assert "17 features of model 0, model 1" in repr(made)
