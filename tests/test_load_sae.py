"""Dictionaries of other libraries, against what those libraries computed (tests/dictionaries/make.py)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from hooks import UnknownNameError
from interp.features import CrossLayerTranscoder, Dictionary, load_sae, splice
from models import load

FIXTURES = Path(__file__).parent / "dictionaries"
ALONE = sorted(
    folder.parent
    for folder in FIXTURES.rglob("expected.safetensors")
    if not folder.parent.name.startswith(("circuit_tracer", "cross_layer"))
)
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


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
    made = load_sae(folder)
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
    for n, (place, coder) in enumerate(load_sae(folder).items()):
        assert place == coder.writes == f"blocks.{n}.mlp_out"
        assert coder.reads == f"blocks.{n}.ln2.normalized"


@pytest.mark.parametrize("kind", ["relu", "jump_relu"])
def test_cross_layer_transcoders(kind):
    folder = FIXTURES / f"cross_layer_{kind}"
    made, wanted = load_sae(folder), expected(folder)
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
    model = load("pydoc-4l")
    shutil.copytree(
        FIXTURES / "gemma_scope", tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_1"
    )
    shutil.copytree(FIXTURES / "sparsify_transcoder", tmp_path / "sparsify")
    for folder in ("gemma-scope-2b-pt-transcoders/layer_1", "sparsify/layers.1.mlp"):
        with pytest.raises((ValueError, UnknownNameError), match="is named|reads="):
            splice(model, {"blocks.1.mlp_out": load_sae(tmp_path / folder)}).__enter__()


def test_the_bundled_ones():
    made = load_sae("pydoc-4l/transcoders")
    assert [*made] == [f"blocks.{n}.mlp_out" for n in range(4)]
    assert made["blocks.3.mlp_out"].reads == "blocks.3.ln2.normalized"
    assert load_sae("pydoc-4l/resid_post").writes == "blocks.2.resid_post"
    files = Path(load_sae.__code__.co_filename).parent.joinpath("bundled_files").rglob("*.*")
    assert sum(file.stat().st_size for file in files) < 2_000_000


def test_embeddings_of_gemma_scope_are_scaled(tmp_path):
    with np.load(FIXTURES / "gemma_scope" / "params.npz") as arrays:
        W_enc, b_enc, threshold = (
            torch.from_numpy(arrays[n]) for n in ("W_enc", "b_enc", "threshold")
        )
        W_dec, b_dec = (torch.from_numpy(arrays[n]) for n in ("W_dec", "b_dec"))
    shutil.copytree(FIXTURES / "gemma_scope", tmp_path / "embedding" / "width_4k")
    shutil.copytree(FIXTURES / "gemma_scope", tmp_path / "embedding-study" / "a" / "b" / "layer_5")
    x = expected(FIXTURES / "gemma_scope")["x"] * 3
    pre = x / 6**0.5 @ W_enc + b_enc
    features = pre.relu() * (pre > threshold)
    made = load_sae(tmp_path / "embedding" / "width_4k")
    assert_close(made.encode(x), features, **CLOSE)
    assert_close(made(x), features @ W_dec * 6**0.5 + b_dec, **CLOSE)
    plain = load_sae(tmp_path / "embedding-study" / "a" / "b" / "layer_5")
    assert_close(plain.W_enc, W_enc)


def test_a_transcoder_is_one_by_its_architecture(tmp_path):
    names = {"hook_name": "blocks.1.hook_mlp_out", "hook_name_out": "blocks.1.hook_mlp_out"}
    square = {"d_out": 6, "metadata": names}
    weights = {"W_dec": torch.ones(11, 6), "b_dec": torch.zeros(6)}
    made = load_sae(changed("sae_lens_transcoder_layer_norm", tmp_path, square, weights))
    assert made.is_transcoder
    x = torch.arange(6.0)[None] ** 2
    assert_close(made(x), made.encode(x) @ torch.ones(11, 6))  # no norm is undone


def test_weights_of_another_size_are_refused():
    """In a process of its own, where nothing else checks shapes."""
    code = """
import torch
from interp.features import Dictionary, JumpReLU
right = dict(W_enc=(6, 11), W_dec=(11, 5), b_enc=(11,), b_dec=(5,), threshold=(11,), W_skip=(6, 5))
for name, size in dict(b_enc=(1,), b_dec=(1,), W_dec=(5, 11), threshold=(1,), W_skip=(5, 6)).items():
    weights = {n: torch.ones(size if n == name else shape) for n, shape in right.items()}
    try:
        Dictionary(activation=JumpReLU(weights.pop("threshold")), **weights)
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "b_enc",
        "b_dec",
        "W_dec",
        "threshold",
        "W_skip",
    ], done.stderr


def test_input_gain_before_the_encoder():
    made, wanted = load_sae(FIXTURES / "gemma_scope_2"), expected(FIXTURES / "gemma_scope_2")
    gain = torch.tensor([0.5, 2.0, -3.0, 1.5, 0.1, 7.0])
    assert_close(
        made.with_input_gain(gain)(wanted["x"] * gain), wanted["output"], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="before it"):
        load_sae(FIXTURES / "sae_lens_standard").with_input_gain(gain)


def changed(folder, tmp_path, config=None, weights=None, drop=()):
    """A copy of a fixture with other fields or tensors."""
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURES / folder, copy)
    for path in (*copy.glob("cfg.json"), *copy.glob("config.json")):
        fields = json.loads(path.read_text())
        fields |= config or {}
        path.write_text(json.dumps({name: fields[name] for name in fields if name not in drop}))
    for path in copy.glob("*.safetensors"):
        if path.name != "expected.safetensors":
            tensors = load_file(path) | (weights or {})
            save_file({n: t for n, t in tensors.items() if n not in drop}, path)
    return copy


REFUSED = {
    "unknown field": ("sae_lens_standard", {"config": {"temperature": 2}}, "temperature"),
    "temporal": ("sae_lens_standard", {"config": {"architecture": "temporal"}}, "'temporal'"),
    "factor": ("sae_lens_factor", {}, "norm_factor="),
    "norm": ("sae_lens_standard", {"config": {"normalize_activations": "whitening"}}, "'whitening'"),
    "missing tensor": ("sae_lens_standard", {"drop": ["b_enc"]}, "b_enc"),
    "extra tensor": ("sae_lens_standard", {"weights": {"r_mag": torch.ones(11)}}, "r_mag"),
    "no threshold": ("sae_lens_jumprelu", {"drop": ["threshold"]}, "threshold"),
    "old activation": ("sae_lens_old", {"config": {"activation_fn_str": "tanh-relu"}}, "tanh-relu"),
    "old scale": ("sae_lens_old", {"weights": {"scaling_factor": torch.full((11,), 2.0)}}, "scaling_factor"),
    "gemma": ("gemma_scope_2", {"config": {"architecture": "relu"}}, "'relu'"),
    "k": ("sae_lens_topk", {"drop": ["k"]}, "must say k"),
    "too large k": ("sae_lens_topk", {"config": {"k": 12}}, "from 1 to 11"),
    "class": ("dictionary_learning_AutoEncoder", {"config": {"trainer": {"dict_class": "Other"}}}, "'Other'"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_what_we_do_not_know_is_refused_by_name(refused, tmp_path):
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
