"""Dictionaries of other libraries, compared with numbers of these libraries
(tests/dictionaries/make.py).
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from hooks import UnknownNameError
from interp.features import (
    CrossLayerTranscoder,
    Dictionary,
    JumpReLU,
    load_sae,
    load_transcoders,
    splice,
)
from tests.interp.features.fixtures import FIXTURES, changed
from tests.shipped import pydoc

ALONE = sorted(
    folder.parent
    for folder in FIXTURES.rglob("expected.safetensors")
    if not folder.parent.name.startswith(("circuit_tracer", "cross_layer", "crosscoder"))
    and "temporal" not in str(folder.relative_to(FIXTURES))
)
CLOSE = {"atol": 5e-6, "rtol": 1e-5}  # rounding differs by processor


def expected(folder):
    return load_file(folder / "expected.safetensors")


@pytest.mark.parametrize("folder", ALONE, ids=lambda folder: str(folder.relative_to(FIXTURES)))
def test_features_and_outputs_are_the_library_s(folder):
    asked = {"sae_lens_factor": {"norm_factor": 1.7}, "gemma_scope": {"scale_embeddings": False}}
    made, wanted = load_sae(folder, **asked.get(folder.name, {})), expected(folder)
    x = wanted["x"].flatten(1)
    assert_close(made.encode(x), wanted["features"], **CLOSE)
    assert_close(made(x), wanted["output"].flatten(1), **CLOSE)
    assert_close(
        made.write(made.encode(x), x) + made.decode(made.encode(x) * 0, x), made(x), **CLOSE
    )
    assert (wanted["features"] != 0).any()
    assert not any(tensor.requires_grad for tensor in made.parameters())


def test_layers_of_circuit_tracer():
    folder = FIXTURES / "circuit_tracer"
    wanted = expected(folder)
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    made = load_transcoders(folder)
    assert [*made] == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    for n, coder in enumerate(made.values()):
        x = wanted["x"][:, n]
        assert (coder.reads, coder.writes) == (f"blocks.{n}.resid_mid", f"blocks.{n}.mlp_out")
        assert_close(coder.encode(x), wanted["features"][:, n], **CLOSE)
        assert_close(coder(x), wanted["output"][:, n], **CLOSE)


def test_the_points_that_circuit_tracer_adds_have_our_names(tmp_path):
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    folder = shutil.copytree(FIXTURES / "circuit_tracer", tmp_path / "own")
    (folder / "config.yaml").write_text(
        "feature_input_hook: mlp.hook_in\nfeature_output_hook: mlp.hook_out"
    )
    for n, (place, coder) in enumerate(load_transcoders(folder).items()):
        assert place == coder.writes == f"blocks.{n}.mlp_out"
        assert coder.reads == f"blocks.{n}.ln2.normalized"


def yaml_changed(name, tmp_path, text, k=None):
    """Return a copy of a fixture of circuit-tracer with another `config.yaml`.

    If `k` is given, the first file of weights contains it.
    """
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    folder = shutil.copytree(FIXTURES / name, tmp_path / "own")
    (folder / "config.yaml").write_text(text)
    if k is not None:
        path = folder / "layer_0.safetensors"
        save_file(load_file(path) | {"k": torch.tensor(k)}, path)
    return folder


def top_k(folder, x, k):
    """Return features and output of a top-k transcoder by circuit-tracer's formula, in float64."""
    weights = {n: t.double().numpy() for n, t in load_file(folder / "layer_0.safetensors").items()}
    pre = x.double().numpy() @ weights["W_enc"].T + weights["b_enc"]
    features = np.where(pre >= np.sort(pre, axis=1)[:, [-k]], pre, 0.0)
    return features, features @ weights["W_dec"] + weights["b_dec"]


def test_top_k_of_circuit_tracer(tmp_path):
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    folder, wanted = FIXTURES / "circuit_tracer_topk", expected(FIXTURES / "circuit_tracer_topk")
    (made,) = load_transcoders(folder).values()
    x = wanted["x"]
    assert_close(made.encode(x), wanted["features"], **CLOSE)
    assert_close(made(x), wanted["output"], **CLOSE)
    assert (wanted["features"] < 0).any()
    unsaid = yaml_changed("circuit_tracer_topk", tmp_path, "activation_function: TopK")
    with pytest.raises(ValueError, match="k="):
        load_transcoders(unsaid)
    (made,) = load_transcoders(unsaid, k=5).values()
    features, output = top_k(unsaid, x, 5)
    assert_close(made.encode(x).double(), torch.from_numpy(features), **CLOSE)
    assert_close(made(x).double(), torch.from_numpy(output), atol=1e-5, rtol=1e-5)


def test_a_saved_k_means_top_k(tmp_path):
    folder = yaml_changed("circuit_tracer_topk", tmp_path, "scan: any", k=2)
    x = expected(folder)["x"]
    (made,) = load_transcoders(folder).values()
    assert_close(made.encode(x).double(), torch.from_numpy(top_k(folder, x, 2)[0]), **CLOSE)
    with pytest.raises(ValueError, match=r"k \[2, 3\]"):
        load_transcoders(folder, k=3)


YAML = {
    "k of relu": ("circuit_tracer_topk", "k: 7", "one k"),
    "two activations": (
        "circuit_tracer_topk",
        "{activation: relu, activation_function: topk, k: 7}",
        "relu and topk",
    ),
    "unknown activation": ("circuit_tracer_topk", "activation: batch_topk", "batchtopk"),
    "no threshold": ("circuit_tracer_topk", "activation: jump_relu", "no threshold"),
    "threshold": ("circuit_tracer", "activation: relu", "a threshold"),
    "field": ("circuit_tracer", "acitvation: topk", "close matches: activation"),
    "kind": ("circuit_tracer", "model_kind: cross_layer_transcoder", "model_kind"),
    "other files": (
        "circuit_tracer",
        "transcoders: ['hf://a/b/layer_1.safetensors', 'hf://a/b/layer_0.safetensors']",
        "transcoders",
    ),
    "top-k of which layers": ("cross_layer_relu", "{activation: topk, k: 3}", "in one layer"),
    "other kind": ("cross_layer_relu", "model_kind: transcoder_set", "model_kind"),
}


@pytest.mark.parametrize("refused", YAML)
def test_a_config_of_circuit_tracer_is_honoured_or_refused(refused, tmp_path):
    folder, text, words = YAML[refused]
    with pytest.raises(ValueError, match=words):
        load_transcoders(yaml_changed(folder, tmp_path, text))


@pytest.mark.parametrize("siblings", ["beside", "alone"])
def test_a_file_of_one_layer_is_this_layer(tmp_path, siblings):
    """The file of a layer may be alone in its folder or beside the files of other layers.

    The file of layer 10 tests that a name with two digits is read.
    """
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    folder = shutil.copytree(FIXTURES / "circuit_tracer", tmp_path / "own")
    shutil.copy(folder / "layer_0.safetensors", folder / "layer_10.safetensors")
    whole = load_transcoders(FIXTURES / "circuit_tracer")
    if siblings == "alone":
        (folder / "layer_0.safetensors").unlink()
    for number, weights in ((1, "layer_1"), (10, "layer_10")):
        made = load_sae(folder / f"layer_{number}.safetensors")
        assert isinstance(made, Dictionary)
        saved = load_file(folder / f"{weights}.safetensors")
        assert_close(made.W_enc, saved["W_enc"].T)
        assert_close(made.b_dec, saved["b_dec"])
        assert made.writes == f"blocks.{number}.mlp_out"
        assert made.reads == whole["blocks.1.mlp_out"].reads.replace("1", str(number))
    assert [*whole] == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    assert load_transcoders(FIXTURES / "circuit_tracer" / "config.yaml").keys() == whole.keys()
    made = load_sae(str(folder / "layer_1.safetensors"), "circuit_tracer", dtype=torch.float64)
    assert made.W_enc.dtype == torch.float64


def test_a_folder_with_one_layer_is_this_layer(tmp_path):
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    folder = shutil.copytree(FIXTURES / "circuit_tracer", tmp_path / "own")
    path = folder / "layer_1.safetensors"
    saved = load_file(path)
    (folder / "layer_0.safetensors").rename(folder / "layer_2.safetensors")
    with pytest.raises(FileNotFoundError, match="layer_0"):
        load_sae(folder)
    (folder / "layer_2.safetensors").unlink()
    made = load_sae(folder)
    assert (made.reads, made.writes) == ("blocks.1.resid_mid", "blocks.1.mlp_out")
    assert_close(made.W_dec, saved["W_dec"])
    with pytest.raises(ValueError, match="load_sae"):
        load_transcoders(folder)


def test_a_file_of_one_layer_honours_its_config(tmp_path):
    text = "{activation: topk, k: 2, transcoders: [layer_1.safetensors, layer_0.safetensors]}"
    folder = yaml_changed("circuit_tracer_topk", tmp_path, text)
    path = folder / "layer_0.safetensors"
    with pytest.raises(ValueError, match=r"list layer_0\.safetensors at index 0"):
        load_sae(path)
    (folder / "config.yaml").write_text("{activation: topk, transcoders: [a/layer_0.safetensors]}")
    assert load_sae(path, k=3).activation.k == 3
    with pytest.raises(ValueError, match="norm_factor"):
        load_sae(path, norm_factor=2.0)
    shutil.copy(path, folder / "layer_x.safetensors")
    with pytest.raises(ValueError, match=r"number of a layer.*layer_x"):
        load_sae(folder / "layer_x.safetensors")


@pytest.mark.parametrize("end", ["enc", "dec"])
def test_one_file_of_a_cross_layer_transcoder_is_an_error(end):
    with pytest.raises(ValueError, match=rf"the folder .*cross_layer_relu.*got .*W_{end}_1"):
        load_sae(FIXTURES / "cross_layer_relu" / f"W_{end}_1.safetensors")


def test_a_file_of_no_form_is_not_its_folder(tmp_path):
    folder = shutil.copytree(FIXTURES / "sae_lens_standard", tmp_path / "own")
    save_file({"other": torch.ones(3)}, folder / "other.safetensors")
    for name in ("other.safetensors", "expected.safetensors"):
        with pytest.raises(FileNotFoundError, match=rf"{name} must be one of .*cfg\.json"):
            load_sae(folder / name)
    for name in ("sae_weights.safetensors", "cfg.json"):
        assert_close(load_sae(folder / name).W_enc, load_sae(folder).W_enc)


def test_a_list_of_its_own_files_changes_nothing(tmp_path):
    listed = "['hf://a/b/layer_0.safetensors?revision=main', layer_1.safetensors]"
    folder = yaml_changed("circuit_tracer", tmp_path, f"{{model_name: any, transcoders: {listed}}}")
    assert len(load_transcoders(folder)) == 2
    (folder / "config.yaml").write_text("activation: jump_relu")
    with pytest.raises(ValueError, match="no threshold"):  # layer 0 has the ReLU activation
        load_transcoders(folder)


@pytest.mark.parametrize("kind", ["relu", "jump_relu"])
def test_cross_layer_transcoders(kind):
    folder = FIXTURES / f"cross_layer_{kind}"
    made, wanted = load_transcoders(folder), expected(folder)
    assert isinstance(made, CrossLayerTranscoder)
    features = made.encode([*wanted["x"]])
    assert_close(torch.stack(features), wanted["features"], **CLOSE)
    assert_close(torch.stack(made.decode(features)), wanted["output"], **CLOSE)


def test_points_have_our_names():
    assert load_sae(FIXTURES / "sae_lens_jumprelu").reads == "blocks.1.resid_post"
    transcoder = load_sae(FIXTURES / "sae_lens_skip_transcoder")
    assert (transcoder.reads, transcoder.writes) == ("blocks.1.resid_mid", "blocks.1.mlp_out")
    assert load_sae(FIXTURES / "sae_lens_old").reads == "blocks.1.resid_pre"
    assert load_sae(FIXTURES / "dictionary_learning_AutoEncoder").reads == "blocks.1.resid_post"
    assert load_sae(FIXTURES / "gemma_scope_2").is_transcoder


def test_a_transcoder_without_a_known_place_is_not_taken_for_an_autoencoder(tmp_path):
    model = pydoc()
    shutil.copytree(
        FIXTURES / "gemma_scope", tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_1"
    )
    shutil.copytree(FIXTURES / "sparsify_transcoder", tmp_path / "sparsify")
    for folder in ("gemma-scope-2b-pt-transcoders/layer_1", "sparsify/layers.1.mlp"):
        with pytest.raises((ValueError, UnknownNameError), match="is named|reads="):
            splice(model, {"blocks.1.mlp_out": load_sae(tmp_path / folder)}).__enter__()


def test_the_bundled_ones():
    made = load_transcoders("pydoc-4l/transcoders")
    assert [*made] == [f"blocks.{n}.mlp_out" for n in range(4)]
    assert made["blocks.3.mlp_out"].reads == "blocks.3.ln2.normalized"
    assert load_sae("pydoc-4l/resid_post").writes == "blocks.2.resid_post"
    files = Path(load_sae.__code__.co_filename).parent.joinpath("bundled_files").rglob("*.*")
    assert sum(file.stat().st_size for file in files) < 2_000_000


SHA, CACHE = "c1f6c4e0", "models--google--gemma-scope-2b-pt"
# For each place: the path, True if the dictionary reads embeddings, and True if it is a transcoder.
SPELLINGS = {
    "a repository": ("gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6", True, False),
    "embeddings in a cache": (
        f"{CACHE}-res/snapshots/{SHA}/embedding/width_4k/average_l0_6",
        True,
        False,
    ),
    "a layer": ("gemma-scope-9b-it-res/layer_3/width_16k/average_l0_59", False, False),
    "attention": ("gemma-scope-2b-pt-att/layer_3/width_16k/average_l0_59", False, False),
    "transcoders in a cache": (
        f"{CACHE}-transcoders/snapshots/{SHA}/layer_3/width_16k/average_l0_59",
        False,
        True,
    ),
    "without its repository": ("embedding/width_4k/average_l0_6", True, False),
    "of somebody else": ("x/embedding/layer_3", False, None),
    "a study of embeddings": ("embedding-study/a/b/layer_5", False, None),
}


def formula_of_gemma_scope(x, root):
    """Return features and output in float64, for weights that read x / root."""
    with np.load(FIXTURES / "gemma_scope" / "params.npz") as arrays:
        W = {name: arrays[name].astype(np.float64) for name in arrays}
    pre = x.double().numpy() / root @ W["W_enc"] + W["b_enc"]
    features = np.maximum(pre, 0) * (pre > W["threshold"])
    return torch.from_numpy(features), torch.from_numpy(features @ W["W_dec"] * root + W["b_dec"])


@pytest.mark.parametrize("spelling", ["folder", "file", "dot", "bare file", "link", "link in it"])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_gemma_scope_is_known_by_its_path(kind, spelling, tmp_path, monkeypatch):
    path, scaled, transcodes = SPELLINGS[kind]
    folder = shutil.copytree(FIXTURES / "gemma_scope", tmp_path / path)
    file = folder / "params.npz"
    # In the cache of the hub, files are links to files whose names say nothing.
    if "snapshots" in path:
        blob = folder.parents[len(Path(path).parts) - 2] / "blobs" / "0a1b"
        blob.parent.mkdir()
        file.rename(blob)
        file.symlink_to(blob)
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "params.npz").symlink_to(file)
    if spelling in ("dot", "bare file"):
        monkeypatch.chdir(folder)
    elif spelling == "link in it" and "snapshots" in path:
        pytest.skip("a link into a cache ends at a file without a name")
    where = {"folder": folder, "file": file, "dot": ".", "bare file": "params.npz"}
    made = load_sae(where.get(spelling, tmp_path / ("own" if "in it" in spelling else "link")))
    x = expected(FIXTURES / "gemma_scope")["x"] * 3
    features, output = formula_of_gemma_scope(x, 6**0.5 if scaled else 1.0)
    assert_close(made.encode(x).double(), features, **CLOSE)
    assert_close(made(x).double(), output, atol=1e-5, rtol=1e-5)
    assert made.transcodes is transcodes


def test_points_of_gemma_scope(tmp_path):
    for path, points in {
        "gemma-scope-2b-pt-res/layer_3/width_16k": ("blocks.3.resid_post",) * 2,
        "gemma-scope-2b-pt-res/embedding/width_4k": ("embed",) * 2,
        "gemma-scope-2b-pt-mlp/layer_3/width_16k": ("blocks.3.mlp_out",) * 2,
        "gemma-scope-2b-pt-att/layer_13/width_16k": ("blocks.13.attn.z",) * 2,
        "gemma-scope-2b-pt-transcoders/layer_3/width_16k": (
            "blocks.3.ln2.hook_normalized",
            "blocks.3.mlp_out",
        ),
    }.items():
        made = load_sae(shutil.copytree(FIXTURES / "gemma_scope", tmp_path / path))
        assert (made.reads, made.writes) == points
    gain = torch.arange(1.0, 7.0)
    assert made.with_input_gain(gain).reads == "blocks.3.ln2.normalized"


def test_a_link_has_the_name_of_its_repository(tmp_path):
    shutil.copytree(FIXTURES / "gemma_scope", tmp_path / "data" / "layer_3")
    link = tmp_path / "gemma-scope-2b-pt-transcoders"
    link.symlink_to(tmp_path / "data", target_is_directory=True)
    assert load_sae(link / "layer_3").transcodes is True


def test_a_path_without_information_asks_for_arguments(tmp_path):
    folder, model = FIXTURES / "gemma_scope", pydoc()
    other = shutil.copytree(folder, tmp_path / "x" / "embedding" / "run_2")
    for each in (folder, other):
        with pytest.raises(ValueError, match="scale_embeddings=.*transcodes="):
            load_sae(each)
    with pytest.raises(ValueError, match="scale_embeddings="):
        load_sae(folder, transcodes=False)
    x = expected(folder)["x"]
    scaled = load_sae(folder, scale_embeddings=True)
    assert_close(scaled.encode(x).double(), formula_of_gemma_scope(x, 6**0.5)[0], **CLOSE)
    # Without `transcodes=`, it is unknown what the dictionary reads. A transcoder also needs the
    # gain of the norm.
    for asked in (None, True):
        made = load_sae(folder, scale_embeddings=False, transcodes=asked)
        with pytest.raises(UnknownNameError, match="transcodes=" if asked is None else "gain"):
            splice(model, {"blocks.1.mlp_out": made}).__enter__()
    made = load_sae(folder, scale_embeddings=False, transcodes=False)
    # The place of an autoencoder is known, so the error is about its size.
    with pytest.raises(ValueError, match="must read vectors of size 128"):
        splice(model, {"blocks.1.mlp_out": made}).__enter__()


def test_a_transcoder_of_sparsify_is_known_by_its_skip_connection(tmp_path):
    folder, model = FIXTURES / "sparsify_of_2024" / "layers.1.mlp", pydoc()
    made, W = load_sae(folder), load_file(folder / "sae.safetensors")
    assert (made.is_transcoder, made.writes) == (True, "layers.1.mlp")
    W = {name: weight.double().numpy() for name, weight in W.items()}
    x = expected(folder)["x"].double().numpy()
    pre = np.maximum((x - W["b_dec"]) @ W["encoder.weight"].T + W["encoder.bias"], 0)
    features = np.where(pre >= np.sort(pre, axis=1)[:, [-3]], pre, 0.0)
    output = features @ W["W_dec"] + W["b_dec"] + x @ W["W_skip"].T
    assert_close(made.encode(expected(folder)["x"]).double(), torch.from_numpy(features), **CLOSE)
    assert_close(made(expected(folder)["x"]).double(), torch.from_numpy(output), **CLOSE)
    # The path and the config do not say that it is a transcoder, so the caller must.
    plain = changed("sparsify_topk/layers.1.mlp", tmp_path, drop=["transcode"])
    assert not load_sae(plain).is_transcoder
    told = load_sae(plain, transcodes=True)
    assert (told.is_transcoder, told.subtracts_b_dec) == (True, True)
    with pytest.raises(ValueError, match="transcodes must be"):
        load_sae(FIXTURES / "sparsify_topk" / "layers.1.mlp", transcodes=True)
    with pytest.raises(ValueError, match="must read vectors of size 128"):
        splice(model, made).__enter__()  # the point is found, so the error is about the size


def test_a_module_of_sparsify_is_the_folder_s_name(monkeypatch):
    monkeypatch.chdir(FIXTURES / "sparsify_topk" / "layers.1.mlp")
    assert load_sae(".").writes == load_sae("cfg.json").writes == "layers.1.mlp"


def test_fields_that_change_nothing_are_accepted(tmp_path):
    x = expected(FIXTURES / "sparsify_topk" / "layers.1.mlp")
    made = load_sae(changed("sparsify_topk/layers.1.mlp", tmp_path, {"signed": False}))
    assert_close(made.encode(x["x"]), x["features"], **CLOSE)


def test_top_k_of_dictionary_learning_before_its_k_was_a_buffer(tmp_path):
    folder = shutil.copytree(FIXTURES / "dictionary_learning_AutoEncoderTopK", tmp_path / "old")
    weights, config = torch.load(folder / "ae.pt"), json.loads((folder / "config.json").read_text())
    torch.save({n: weights[n] for n in weights.keys() - {"k", "threshold"}}, folder / "ae.pt")
    with pytest.raises(ValueError, match="one k"):
        load_sae(folder)
    config["trainer"]["k"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    made, wanted = load_sae(folder), expected(folder)
    assert_close(made.encode(wanted["x"]), wanted["features"], **CLOSE)
    assert_close(made(wanted["x"]), wanted["output"], **CLOSE)
    torch.save(weights | {"k": torch.tensor(4)}, folder / "ae.pt")
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        load_sae(folder)


ALONE = ["AutoEncoder", "AutoEncoderNew", "GatedAutoEncoder", "JumpReluAutoEncoder"]
ALONE += ["MatryoshkaBatchTopKSAE"]


@pytest.mark.parametrize("kind", ALONE)
def test_a_file_of_dictionary_learning_without_its_config(kind, tmp_path):
    folder = FIXTURES / f"dictionary_learning_{kind}"
    path, wanted = shutil.copy(folder / "ae.pt", tmp_path), expected(folder)
    for made in (load_sae(path), load_sae(tmp_path)):
        assert_close(made.encode(wanted["x"]), wanted["features"], **CLOSE)
        assert_close(made(wanted["x"]), wanted["output"], **CLOSE)
        assert made.reads is None


@pytest.mark.parametrize("kind", ["AutoEncoderTopK", "BatchTopKSAE", "interrupted"])
def test_kinds_with_the_same_tensors_need_a_config(kind, tmp_path):
    path = shutil.copy(FIXTURES / f"dictionary_learning_{kind}" / "ae.pt", tmp_path)
    with pytest.raises(ValueError, match=r"config\.json must be beside"):
        load_sae(path)


@pytest.mark.parametrize("name", ["batchtopk", "jumprelu", "matryoshka"])
def test_sae_lens_with_flat_fields_beside_metadata(name, tmp_path):
    """Early files of SAELens 6 have the fields of the training next to `metadata`.

    The fields of the model may be in both places.
    """
    folder = f"sae_lens_raw_{name}"
    flat = {
        "hook_name": "blocks.2.hook_mlp_out",
        "model_name": "any",
        "lr": 0.1,
        "hook_layer": 2,
        "prepend_bos": True,
    }
    made = load_sae(changed(folder, tmp_path, flat | {"metadata": {"sae_lens_version": "6.0.0"}}))
    wanted = expected(FIXTURES / folder)
    assert_close(made.encode(wanted["x"]), wanted["features"], **CLOSE)
    assert made.reads == made.writes == "blocks.2.mlp_out"
    inner = {"metadata": {"hook_name": "blocks.1.hook_resid_post"}}
    other = load_sae(changed(folder, tmp_path / "other", flat | inner, drop=["decoder_init_norm"]))
    # If the config and its `metadata` name different points, the name in `metadata` counts.
    assert other.reads == "blocks.1.resid_post"


def test_a_transcoder_is_one_by_its_architecture(tmp_path):
    names = {"hook_name": "blocks.1.hook_mlp_out", "hook_name_out": "blocks.1.hook_mlp_out"}
    square = {"d_out": 6, "metadata": names}
    weights = {"W_dec": torch.ones(11, 6), "b_dec": torch.zeros(6)}
    made = load_sae(changed("sae_lens_transcoder_layer_norm", tmp_path, square, weights))
    assert made.is_transcoder
    x = torch.arange(6.0)[None] ** 2
    # The output of a transcoder is not multiplied by the scale of its input.
    assert_close(made(x), made.encode(x) @ torch.ones(11, 6))


SIZES = dict(W_enc=(6, 11), W_dec=(11, 5), b_enc=(11,), b_dec=(5,), threshold=(11,), W_skip=(6, 5))
WRONG_SIZES = dict(b_enc=(1,), b_dec=(1,), W_dec=(5, 11), threshold=(1,), W_skip=(5, 6))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG_SIZES)
def test_weights_of_another_size_are_refused(name):
    weights = {n: torch.ones(size) for n, size in (SIZES | {name: WRONG_SIZES[name]}).items()}
    with pytest.raises(ValueError, match=f"^{name} "):
        Dictionary(activation=JumpReLU(weights.pop("threshold")), **weights)


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("transcoder_all", ("blocks.9.ln2.normalized", "blocks.9.mlp_out")),
        ("resid_post", ("blocks.9.resid_post",) * 2),
        ("attn_out_all", ("blocks.9.attn.z",) * 2),
        ("mlp_out", ("blocks.9.mlp_out",) * 2),
    ],
)
def test_gemma_scope_2_without_its_config(kind, points, tmp_path):
    folder = tmp_path / "models--google--gemma-scope-2-270m-pt" / kind / "layer_9_width_16k_l0_big"
    folder.mkdir(parents=True)
    shutil.copy(FIXTURES / "gemma_scope_2" / "params.safetensors", folder)
    made = load_sae(folder)
    assert (made.reads, made.writes) == points
    wanted = expected(FIXTURES / "gemma_scope_2")
    assert_close(made.encode(wanted["x"]), wanted["features"], **CLOSE)
    shutil.copy(folder / "params.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"config\.json must be in"):
        load_sae(tmp_path)


def test_input_gain_before_the_encoder():
    made, wanted = load_sae(FIXTURES / "gemma_scope_2"), expected(FIXTURES / "gemma_scope_2")
    gain = torch.tensor([0.5, 2.0, -3.0, 1.5, 0.1, 7.0])
    assert_close(
        made.with_input_gain(gain)(wanted["x"] * gain), wanted["output"], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="subtracts b_dec"):
        load_sae(FIXTURES / "sae_lens_standard").with_input_gain(gain)


REFUSED = {
    "unknown field": ("sae_lens_standard", {"config": {"temperature": 2}}, "temperature"),
    "crosscoder": ("sae_lens_standard", {"config": {"architecture": "cross"}}, "'cross'"),
    "factor": ("sae_lens_factor", {}, "norm_factor="),
    "norm": (
        "sae_lens_standard",
        {"config": {"normalize_activations": "whitening"}},
        "'whitening'",
    ),
    "missing tensor": ("sae_lens_standard", {"drop": ["b_enc"]}, "b_enc"),
    "extra tensor": ("sae_lens_standard", {"weights": {"r_mag": torch.ones(11)}}, "r_mag"),
    "no threshold": ("sae_lens_jumprelu", {"drop": ["threshold"]}, "threshold"),
    "old activation": ("sae_lens_old", {"config": {"activation_fn_str": "tanh-relu"}}, "tanh-relu"),
    "old scale": (
        "sae_lens_old",
        {"weights": {"scaling_factor": torch.full((11,), 2.0)}},
        "scaling_factor",
    ),
    "gemma": ("gemma_scope_2", {"config": {"architecture": "relu"}}, "'relu'"),
    "old activation beside another": (
        "sae_lens_standard",
        {"config": {"activation_fn": "topk", "activation_fn_kwargs": {"k": 3}}},
        "architecture",
    ),
    "shape": ("sae_lens_standard", {"config": {"reshape_activations": "other"}}, "'other'"),
    "old unknown field": ("sae_lens_old", {"config": {"temprature": 2}}, "temprature"),
    "close": (
        "sae_lens_standard",
        {"config": {"apply_b_dec_to_inputs": True}},
        "close matches: apply_b_dec_to_input",
    ),
    "unknown field of sparsify": ("sparsify_topk/layers.1.mlp", {"config": {"K": 2}}, "'K'"),
    "signed": ("sparsify_topk/layers.1.mlp", {"config": {"signed": True}}, "signed"),
    "no skip": ("sparsify_topk/layers.1.mlp", {"config": {"skip_connection": True}}, "W_skip"),
    "unknown field of gemma": (
        "gemma_scope_2",
        {"config": {"apply_b_dec_to_input": True}},
        "apply_b_dec",
    ),
    "no affine": ("gemma_scope_2", {"config": {"affine_connection": False}}, "affine"),
    "type": ("gemma_scope_2", {"config": {"type": "crosscoder"}}, "crosscoder"),
    "sae of two points": ("gemma_scope_2", {"config": {"type": "sae"}}, "'sae'"),
    "trainer": (
        "dictionary_learning_AutoEncoder",
        {"config": {"trainer": {"dict_class": "AutoEncoder", "temp": 1}}},
        "'temp'",
    ),
    "top field": ("dictionary_learning_AutoEncoder", {"config": {"scale": 3}}, "'scale'"),
    "field of the buffer": (
        "dictionary_learning_AutoEncoder",
        {"config": {"buffer": {"normalize": True}}},
        "'normalize'",
    ),
    "buffer": (
        "dictionary_learning_AutoEncoder",
        {"config": {"buffer": {"io": "in_and_out"}}},
        "io",
    ),
    "k": ("sae_lens_topk", {"drop": ["k"]}, "must contain k"),
    "too large k": ("sae_lens_topk", {"config": {"k": 12}}, "from 1 to 11"),
    "class": (
        "dictionary_learning_AutoEncoder",
        {"config": {"trainer": {"dict_class": "Other"}}},
        "'Other'",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_unknown_fields_are_errors_that_name_them(refused, tmp_path):
    folder, change, words = REFUSED[refused]
    with pytest.raises(ValueError, match=words):
        load_sae(changed(folder, tmp_path, **change))


def test_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="cfg.json and sae_weights.safetensors"):
        load_sae(tmp_path)
    with pytest.raises(UnknownNameError, match="sae_lens"):
        load_sae(tmp_path, "saelens")
    both = changed("sae_lens_standard", tmp_path)
    coder = FIXTURES / "sparsify_topk" / "layers.1.mlp"
    shutil.copy(coder / "sae.safetensors", both)
    with pytest.raises(ValueError, match="format="):
        load_sae(both)
    assert isinstance(load_sae(both, "sae_lens"), Dictionary)
    assert_close(load_sae(both / "cfg.json", "sae_lens").W_enc, load_sae(both, "sae_lens").W_enc)
    for finished in (coder, FIXTURES / "dictionary_learning_AutoEncoder"):
        with pytest.raises(ValueError, match="norm_factor"):
            load_sae(finished, norm_factor=2.0)
    other = tmp_path / "sparsify"
    shutil.copytree(coder, other)
    (other / "cfg.json").write_text(
        json.dumps(json.loads((coder / "cfg.json").read_text()) | {"signed": True})
    )
    with pytest.raises(ValueError, match="signed"):
        load_sae(other)


DAMAGED = [
    "sae_lens_topk",
    "sae_lens_old",
    "sae_lens_raw_batchtopk",
    "sae_lens_matching_pursuit",
    "sparsify_topk/layers.1.mlp",
    "dictionary_learning_interrupted",
    "gemma_scope",
    "gemma_scope_2",
    "circuit_tracer_topk",
    "cross_layer_relu",
]
OTHER_TYPES = (None, 3, -1, True, "x", "", [], [1], {}, {"a": 1})
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n"


def refused_or_read(folder, name):
    """Return True if a folder can be loaded.

    Otherwise, check that the error is one of this package, and that it names the file.
    """
    options = {"scale_embeddings": False} if name == "gemma_scope" else {}
    load = load_transcoders if name.startswith(("circuit_tracer", "cross_layer")) else load_sae
    try:
        load(folder, **options)
        return True
    except Exception as caught:
        error = caught
    assert isinstance(error, (ValueError, FileNotFoundError)), error
    assert not isinstance(error, UnicodeError), error
    assert str(folder) in str(error)
    words = "attribute|NoneType|subscriptable|operand|iterable|codec|Error while|out of range"
    assert not re.search(words, str(error)), error
    return False


def fields_of(config, above=()):
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*above, name))


def with_field(config, path, value):
    """Return a copy of a config with another value of a field. With `...`, the field is removed."""
    config = json.loads(json.dumps(config))
    owner = config
    for name in path[:-1]:
        owner = owner[name]
    owner.pop(path[-1])
    if value is not ...:
        owner[path[-1]] = value
    return config


@pytest.fixture
def copied(request, tmp_path):
    folder = tmp_path / "a" / Path(request.param).name
    shutil.copytree(FIXTURES / request.param, folder)
    (folder / "expected.safetensors").unlink()
    return folder, request.param


@pytest.mark.parametrize("copied", DAMAGED, indirect=True)
def test_each_field_of_a_config_may_be_missing_null_or_of_another_type(copied):
    folder, name = copied
    pytest.importorskip("yaml", reason="config.yaml needs PyYAML")
    import yaml

    for path in [*folder.glob("*.json"), *folder.glob("*.yaml")]:
        text = path.read_text()
        read, write = (
            (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
        )
        for field in fields_of(read(text)):
            for value in (..., *OTHER_TYPES):
                path.write_text(write(with_field(read(text), field, value)))
                refused_or_read(folder, name)
        for junk in (b"", b"null", b"[1]", b"{", b"a: [", b"\xff\xfe\x00", b"NaN"):
            path.write_bytes(junk)
            refused_or_read(folder, name)
        path.write_text(text)


@pytest.mark.parametrize("copied", DAMAGED, indirect=True)
def test_a_damaged_file_of_weights_is_named(copied):
    folder, name = copied
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.npz"), *folder.glob("*.pt")]:
        whole = path.read_bytes()
        for damaged in (
            b"",
            b"junk" * 50,
            LFS,
            b"<!doctype html>",
            whole[:6],
            whole[: len(whole) // 2],
            whole[:-1],
        ):
            path.write_bytes(damaged)
            assert not refused_or_read(folder, name)
            with pytest.raises((ValueError, FileNotFoundError), match=path.name):
                load_sae(path)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "copied", ["sae_lens_topk_by_norm", "gemma_scope_2", "circuit_tracer"], indirect=True
)
def test_each_tensor_may_be_missing_or_of_another_form(copied):
    folder, name = copied
    (path, *_) = sorted(folder.glob("*.safetensors"))
    whole = load_file(path)
    for key, tensor in whole.items():
        for other in (
            None,
            tensor.long(),
            tensor.bool(),
            torch.tensor(1.5),
            tensor.flatten()[:1],
            tensor[None],
            torch.empty(0),
        ):
            changed = {**whole, key: other}
            save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, path)
            refused_or_read(folder, name)
        save_file(whole, path)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("sae_lens_topk", "k"),
        ("sparsify_topk/layers.1.mlp", "k"),
        ("gemma_scope_2", "architecture"),
        ("dictionary_learning_AutoEncoder", "dict_class"),
    ],
)
def test_a_null_field_is_named(form, what, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / form, tmp_path / "a"))
    (path,) = folder.glob("*.json")
    config = json.loads(path.read_text())
    owner = config.get("trainer", config)
    owner[what] = None
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"\b{what}\b"):
        load_sae(folder)
