"""Dictionaries in the formats of their publishers, compared with the published formulas in
numpy.
"""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hooks import UnknownNameError
from interp.features import Dictionary, Gated, JumpReLU, TopK, load_sae, load_transcoders, splice
from tests.count import ROOT
from tests.shipped import pydoc

FIXTURES = ROOT / "tests" / "dictionaries"
D_IN, FEATURES, D_OUT = 5, 11, 5
X = np.random.default_rng(7).normal(size=(13, D_IN)) * 3


def drawn(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.7).to(dtype)


def array(tensor):
    return tensor.detach().double().numpy()


def agrees(made, features, output, x=X, atol=1e-5):
    """Check that features and outputs of a dictionary equal the given arrays, up to float32."""
    given = torch.from_numpy(x).float()
    np.testing.assert_allclose(array(made.encode(given)), features, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(array(made(given)), output, rtol=1e-5, atol=atol)
    assert made.W_enc.dtype == torch.float32
    assert 0 < (features != 0).mean() < 1


# Llama Scope, with the fields of a published hyperparams.json.
HYPERPARAMS = {
    "device": "cuda:0",
    "seed": 42,
    "dtype": "torch.bfloat16",
    "hook_point_in": "blocks.24.hook_resid_post",
    "hook_point_out": "blocks.24.hook_resid_post",
    "use_decoder_bias": True,
    "apply_decoder_bias_to_pre_encoder": False,
    "expansion_factor": 32,
    "d_model": D_IN,
    "d_sae": FEATURES,
    "bias_init_method": "all_zero",
    "act_fn": "jumprelu",
    "jump_relu_threshold": 0.75390625,
    "norm_activation": "dataset-wise",
    "dataset_average_activation_norm": {"in": 3.125, "out": 3.125},
    "decoder_exactly_fixed_norm": False,
    "sparsity_include_decoder_norm": True,
    "use_glu_encoder": False,
    "init_decoder_norm": 0.5,
    "init_encoder_norm": None,
    "init_encoder_with_decoder_transpose": True,
    "lp": 1,
    "l1_coefficient": 8e-05,
    "l1_coefficient_warmup_steps": 78125,
    "top_k": 50,
    "k_warmup_steps": 78125,
    "use_batch_norm_mse": True,
    "use_ghost_grads": False,
    "tp_size": 1,
    "ddp_size": 1,
}
R1 = {
    "sae_type": "sae",
    "hook_point_in": "blocks.15.hook_resid_post",
    "hook_point_out": "blocks.15.hook_resid_post",
    "d_model": D_IN,
    "expansion_factor": 2,
    "use_decoder_bias": True,
    "use_glu_encoder": False,
    "act_fn": "jumprelu",
    "jump_relu_threshold": 0.0,
    "apply_decoder_bias_to_pre_encoder": False,
    "norm_activation": "dataset-wise",
    "sparsity_include_decoder_norm": True,
    "force_unit_decoder_norm": False,
    "top_k": 50,
    "use_triton_kernel": False,
    "sparsity_threshold_for_triton_spmm_kernel": 0.99,
    "jumprelu_threshold_window": 2.0,
}


def linear_weights(features=FEATURES, dtype=torch.float32):
    return {
        "encoder.weight": drawn(features, D_IN, dtype=dtype),
        "encoder.bias": drawn(features, seed=1, dtype=dtype),
        "decoder.weight": drawn(D_OUT, features, seed=2, dtype=dtype),
        "decoder.bias": drawn(D_OUT, seed=3, dtype=dtype),
    }


def llama_scope(folder, **fields):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "hyperparams.json").write_text(json.dumps(HYPERPARAMS | fields))
    weights = linear_weights(dtype=torch.bfloat16)
    save_file(weights, folder / "checkpoints" / "final.safetensors")
    return weights


def llama_scope_r1(folder, norms=(0.5, 0.5), more=None, **fields):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(R1 | fields))
    weights = linear_weights(2 * D_IN) | {"log_jumprelu_threshold": drawn(2 * D_IN, seed=4)}
    named = zip(
        (fields.get("hook_point_out", R1["hook_point_out"]), R1["hook_point_in"]),
        norms[::-1],
        strict=True,
    )
    weights |= {f"dataset_average_activation_norm.{name}": torch.tensor(n) for name, n in named}
    save_file(weights | (more or {}), folder / "sae_weights.safetensors")
    return weights


def by_their_steps(weights, norm_in, norm_out, is_active):
    """Return features and outputs, computed step by step: x is scaled, encoded, decoded and scaled
    back. The features have the unit of x.
    """
    W, b, D, c = (
        array(weights[f"{coder}.{part}"])
        for coder in ("encoder", "decoder")
        for part in ("weight", "bias")
    )
    s_in, s_out = D_IN**0.5 / norm_in, D_IN**0.5 / norm_out
    normed = (X * s_in) @ W.T + b
    normed = normed * is_active(normed, s_in, s_out, np.linalg.norm(D, axis=0))
    return normed / s_in, (normed @ D.T + c) / s_out


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("norms", [(3.125, 3.125), (2.5, 0.75)])
def test_llama_scope(norms, by_length, tmp_path):
    at_hook = {"in": norms[0], "out": norms[1]}
    fields = {
        "dataset_average_activation_norm": at_hook,
        "sparsity_include_decoder_norm": by_length,
    }
    weights = llama_scope(tmp_path / "a", **fields)
    made = load_sae(tmp_path / "a")

    def is_active(normed, s_in, s_out, length):
        # The threshold belongs to weights whose decoder rows have length 1.
        return normed / s_in * (length * s_in / s_out if by_length else 1) > 0.75390625

    agrees(made, *by_their_steps(weights, *norms, is_active))
    assert made.config["input_factor"] == pytest.approx(D_IN**0.5 / norms[0])
    assert made.reads == made.writes == "blocks.24.resid_post"
    assert not made.is_transcoder


def test_places_of_llama_scope(tmp_path):
    """In TransformerLens, `hook_normalized` is the output of the norm before the gain. This package
    has no point for this value.
    """
    points = {
        "hook_point_in": "blocks.3.ln2.hook_normalized",
        "hook_point_out": "blocks.3.hook_mlp_out",
    }
    llama_scope(tmp_path / "a", **points)
    made = load_sae(tmp_path / "a")
    assert (made.reads, made.writes) == ("blocks.3.ln2.hook_normalized", "blocks.3.mlp_out")
    llama_scope(
        tmp_path / "b", **{"hook_point_in": "blocks.3.hook_resid_mid", "hook_point_out": None}
    )
    assert load_sae(tmp_path / "b").writes == "blocks.3.resid_mid"


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("norms", [(0.5, 0.5), (0.5, 4.0)])
def test_llama_scope_r1(norms, by_length, tmp_path):
    point = {} if norms[0] == norms[1] else {"hook_point_out": "blocks.15.hook_mlp_out"}
    weights = llama_scope_r1(
        tmp_path / "a", norms, sparsity_include_decoder_norm=by_length, **point
    )
    threshold = np.exp(array(weights["log_jumprelu_threshold"]))

    def is_active(normed, s_in, s_out, length):
        return normed * (length if by_length else 1) > threshold

    agrees(load_sae(tmp_path / "a"), *by_their_steps(weights, *norms, is_active))
    llama_scope_r1(
        tmp_path / "b", norm_activation="inference", sparsity_include_decoder_norm=by_length
    )
    root = D_IN**0.5
    agrees(load_sae(tmp_path / "b"), *by_their_steps(weights, root, root, is_active))


REFUSED_OF_LLAMA_SCOPE = {
    "gate": {"use_glu_encoder": True},
    "bias before": {"apply_decoder_bias_to_pre_encoder": True},
    "activation": {"act_fn": "topk"},
    "norm": {"norm_activation": "token-wise"},
    "no norms": {"dataset_average_activation_norm": None},
    "unknown field": {"temperature": 2},
    "size": {"d_sae": FEATURES + 1},
}


@pytest.mark.parametrize("refused", REFUSED_OF_LLAMA_SCOPE)
def test_unknown_fields_of_llama_scope_are_errors(refused, tmp_path):
    fields = REFUSED_OF_LLAMA_SCOPE[refused]
    llama_scope(tmp_path / "a", **fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        load_sae(tmp_path / "a")


def test_unknown_fields_of_llama_scope_r1_are_errors(tmp_path):
    for n, (words, more, fields) in enumerate(
        [
            ("W_glu", {"W_glu": torch.zeros(3)}, {}),
            ("sae_type", {}, {"sae_type": "crosscoder"}),
            ("expansion|d_sae", {}, {"expansion_factor": 3}),
        ]
    ):
        llama_scope_r1(tmp_path / str(n), more=more, **fields)
        with pytest.raises(ValueError, match=words):
            load_sae(tmp_path / str(n))


# OpenAI.
def openai(path, kind, state, drop=()):
    path.parent.mkdir(parents=True)
    weights = {
        "pre_bias": drawn(D_IN),
        "latent_bias": drawn(FEATURES, seed=1),
        "encoder.weight": drawn(FEATURES, D_IN, seed=2),
        "decoder.weight": drawn(D_IN, FEATURES, seed=3),
        "stats_last_nonzero": torch.zeros(FEATURES, dtype=torch.long),
        "latents_activation_frequency": torch.ones(FEATURES),
        "latents_mean_square": torch.zeros(FEATURES),
    }
    about = {} if kind is None else {"activation": kind, "activation_state_dict": state}
    about |= {f"activation.{name}": value for name, value in state.items()}
    torch.save({n: w for n, w in (weights | about).items() if n not in drop}, path)
    return {name: array(weight) for name, weight in weights.items()}


def top(pre, k):
    kept = np.zeros_like(pre)
    places = np.argsort(-pre, axis=1)[:, :k]
    np.put_along_axis(kept, places, np.take_along_axis(pre, places, 1), 1)
    return kept


@pytest.mark.parametrize("after", ["ReLU", "Identity"])
def test_openai_with_a_norm(after, tmp_path):
    path = tmp_path / "gpt2-small/resid_post_attn_v5_32k/autoencoders/7.pt"
    w = openai(path, "TopK", {"k": 9, "postact_fn": after})
    mean = X.mean(1, keepdims=True)
    std = X.std(1, ddof=1, keepdims=True)
    normed = (X - mean) / (std + 1e-5)
    features = top((normed - w["pre_bias"]) @ w["encoder.weight"].T + w["latent_bias"], 9)
    assert (features < 0).any()
    features = np.maximum(features, 0) if after == "ReLU" else features
    made = load_sae(path)
    agrees(made, features, (features @ w["decoder.weight"].T + w["pre_bias"]) * std + mean)
    assert made.reads == made.writes == "blocks.7.resid_mid"


@pytest.mark.parametrize("kind", ["ReLU", None])
def test_openai_without_a_norm(kind, tmp_path):
    path = tmp_path / "mlp_post_act_v4/autoencoders/0.pt"
    w = openai(path, kind, {})
    features = np.maximum((X - w["pre_bias"]) @ w["encoder.weight"].T + w["latent_bias"], 0)
    made = load_sae(path.parent)
    agrees(made, features, features @ w["decoder.weight"].T + w["pre_bias"])
    assert made.reads == "blocks.0.mlp.post"


@pytest.mark.parametrize(
    ("folders", "point"),
    [
        ("resid_post_mlp_v5_128k/autoencoders", "resid_post"),
        ("resid_delta_attn_v5_32k/autoencoders", "attn_out"),
        ("resid_delta_mlp/autoencoders", "mlp_out"),
        ("downloads/mine", None),
    ],
)
def test_places_of_openai_are_in_the_path(folders, point, tmp_path):
    path = tmp_path / folders / "11.pt"
    openai(path, "TopK", {"k": 2, "postact_fn": "ReLU"})
    made = load_sae(path)
    assert made.reads == (point and f"blocks.11.{point}")


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("TopK", {"k": 3}, "postact_fn"),
        ("TopK", {"k": 3, "postact_fn": "GELU"}, "GELU"),
        ("JumpReLU", {}, "JumpReLU"),
        ("ReLU", {"bandwidth": 0.5}, "bandwidth"),
    ],
)
def test_other_activations_of_openai_are_refused(kind, state, words, tmp_path):
    copies = [f"activation.{name}" for name in state]
    openai(tmp_path / "a" / "0.pt", kind, state, drop=copies)
    with pytest.raises(ValueError, match=words):
        load_sae(tmp_path / "a" / "0.pt")


# Qwen Scope.
def qwen_scope(path, dtype=torch.float32):
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {
        "W_enc": drawn(FEATURES, D_IN, dtype=dtype),
        "W_dec": drawn(D_IN, FEATURES, seed=1, dtype=dtype),
    }
    weights |= {
        "b_enc": drawn(FEATURES, seed=2, dtype=dtype) - 1,
        "b_dec": drawn(D_IN, seed=3, dtype=dtype),
    }
    torch.save(weights, path)
    return {name: array(weight) for name, weight in weights.items()}


def test_qwen_scope(tmp_path):
    path = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_50" / "layer27.sae.pt"
    w = qwen_scope(path)
    made = load_sae(path, k=8)
    features = top(X @ w["W_enc"].T + w["b_enc"], 8)
    assert (features < 0).any()
    agrees(made, features, features @ w["W_dec"].T + w["b_dec"])
    assert made.reads == made.writes == "blocks.27.resid_post"
    with pytest.raises(ValueError, match=r"k=.*L0_"):
        load_sae(path)
    with pytest.raises(ValueError, match="k must be"):
        load_sae(path, k=FEATURES + 1)
    qwen_scope(path.with_name("layer28.sae.pt"))
    with pytest.raises(ValueError, match=r"the 2 files .*layer27"):
        load_sae(path.parent, k=8)


# Kissane et al.
@pytest.mark.parametrize("has_config", [True, False])
def test_z_of_kissane_et_al(has_config, tmp_path):
    """The files of Kissane et al. have the same names of tensors as Qwen Scope. But `W_enc` has the
    shape [d_in feature], and the bias of the decoder is subtracted from the input.
    """
    path = tmp_path / "gpt2-small_L5_Hcat_z_lr1.20e-03_l11.80e+00.pt"
    weights = {"W_enc": drawn(D_IN, FEATURES), "W_dec": drawn(FEATURES, D_IN, seed=1)}
    weights |= {"b_enc": drawn(FEATURES, seed=2) - 1, "b_dec": drawn(D_IN, seed=3)}
    torch.save(weights, path)
    if has_config:
        beside = {
            "act_name": "blocks.4.attn.hook_z",
            "act_size": D_IN,
            "dict_size": FEATURES,
            "site": "z",
        }
        path.with_name(f"{path.stem}_cfg.json").write_text(json.dumps(beside))
    w = {name: array(weight) for name, weight in weights.items()}
    features = np.maximum((X - w["b_dec"]) @ w["W_enc"] + w["b_enc"], 0)
    made = load_sae(path)
    agrees(made, features, features @ w["W_dec"] + w["b_dec"])
    assert made.reads == made.writes == f"blocks.{4 if has_config else 5}.attn.z"
    with pytest.raises(ValueError, match="k must be None"):
        load_sae(path, k=3)


# Goodfire.
def test_goodfire(tmp_path):
    for file, layer in (
        ("Llama-3.1-8B-Instruct-SAE-l19.pth", 19),
        ("Llama-3.3-70B-Instruct-SAE-l50.pt", 50),
        ("mine.pt", None),
    ):
        tied = {f"{name.replace('.', '_linear.')}": w for name, w in linear_weights().items()}
        torch.save({n: w.bfloat16() for n, w in tied.items()}, tmp_path / file)
        w = {name: array(weight.bfloat16()) for name, weight in linear_weights().items()}
        made = load_sae(tmp_path / file)
        features = np.maximum(X @ w["encoder.weight"].T + w["encoder.bias"], 0)
        agrees(made, features, features @ w["decoder.weight"].T + w["decoder.bias"])
        assert made.writes == (layer and f"blocks.{layer}.resid_post")
    with pytest.raises(ValueError, match="k must be None"):
        load_sae(tmp_path / file, k=3)


class Config:
    """A class like the one that old files of SAELens contain as their config."""


def test_other_files_of_torch_are_refused(tmp_path):
    files = {
        "decoder.bias.*three lines": linear_weights(),  # Goodfire's other variant
        r"GLOBAL .*Config": {"cfg": Config(), "state_dict": linear_weights()},
        "by name; got a list": [1, 2],
        "encoder_linear.bias": {"encoder_linear.weight": torch.zeros(3, 2)},
    }
    for n, (words, held) in enumerate(files.items()):
        torch.save(held, tmp_path / f"{n}.pt")
        with pytest.raises(ValueError, match=f"(?s){words}"):
            load_sae(tmp_path / f"{n}.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:300])
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    for name in ("cut.pt", "pickle.pt"):
        with pytest.raises(ValueError, match=name):
            load_sae(tmp_path / name)


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["ae.pt", "mine.pt", "params.npz"])
def test_no_form_runs_code_of_its_files(name, tmp_path):
    folder, trap = tmp_path / "form", Trap(tmp_path / "ran")
    folder.mkdir()
    (folder / "config.json").write_text('{"trainer": {"dict_class": "AutoEncoder"}}')
    if name == "params.npz":
        np.savez(folder / name, W_enc=np.array([trap], dtype=object))
    else:
        torch.save({"encoder.weight": trap}, folder / name)
    with pytest.raises(ValueError, match="pickle") as caught:
        load_sae(folder / name)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_named_file_is_read_although_another_format_is_beside_it(tmp_path):
    folder = shutil.copytree(FIXTURES / "dictionary_learning_AutoEncoder", tmp_path / "a")
    w = qwen_scope(folder / "layer3.sae.pt")
    np.testing.assert_array_equal(
        array(load_sae(folder / "layer3.sae.pt", k=2).W_enc), w["W_enc"].T
    )
    for path in (folder, folder / "ae.pt", folder / "config.json"):
        assert load_sae(path).config["dict_class"] == "AutoEncoder"


def test_a_file_in_a_folder_of_the_form_stands_for_it(tmp_path):
    llama_scope(tmp_path / "a")
    whole = load_sae(tmp_path / "a")
    for name in ("hyperparams.json", "checkpoints/final.safetensors"):
        np.testing.assert_array_equal(
            array(load_sae(tmp_path / "a" / name).W_enc), array(whole.W_enc)
        )


def test_a_folder_without_a_known_form_says_how_to_build_one(tmp_path):
    save_file({"encoder": torch.zeros(3, 2)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match="build a dictionary by hand") as caught:
        load_sae(tmp_path)
    assert len(str(caught.value).splitlines()) == 5
    assert "torch.nn.ReLU()" in str(caught.value)


# Cross-layer transcoders.
def across(folder, skip, change=None):
    folder.mkdir(parents=True)
    layers = []
    for n in range(3):
        weights = {
            "w_enc": drawn(D_IN, FEATURES, seed=n),
            "w_dec": drawn(FEATURES, 3, D_IN, seed=5 + n),
        }
        weights |= {"b_enc": drawn(FEATURES, seed=9 + n), "b_dec": drawn(D_IN, seed=20 + n)}
        weights["threshold"] = drawn(FEATURES, seed=30 + n).abs()
        weights["w_dec"][:, :n] = 0
        if skip:
            weights["affine_skip_connection"] = drawn(D_IN, D_IN, seed=40 + n)
        weights |= (change or {}).get(n, {})
        save_file(weights, folder / f"params_layer_{n}.safetensors")
        layers.append({name: array(weight) for name, weight in weights.items()})
    return layers


@pytest.mark.parametrize("skip", [False, True])
def test_cross_layer_transcoders_of_gemma_scope_2(skip, tmp_path):
    folder = tmp_path / "clt" / "width_262k_l0_medium_affine"
    layers = across(folder, skip)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architecture": "jump_relu",
                "hf_hook_point_in": "model.layers.0.pre_feedforward_layernorm.output",
            }
        )
    )
    made = load_transcoders(folder)
    with pytest.raises(ValueError, match=r"got .*params_layer_1\.safetensors"):
        load_sae(folder / "params_layer_1.safetensors")
    streams = [X + n for n in range(3)]
    features, outputs = [], [layer["b_dec"] for layer in layers]
    for layer, x in zip(layers, streams, strict=True):
        pre = x @ layer["w_enc"] + layer["b_enc"]
        features.append(np.where(pre > layer["threshold"], np.maximum(pre, 0), 0))
    for layer, f in zip(layers, features, strict=True):
        outputs = [y + f @ layer["w_dec"][:, n] for n, y in enumerate(outputs)]
    if skip:
        outputs = [
            y + x @ layer["affine_skip_connection"]
            for y, x, layer in zip(outputs, streams, layers, strict=True)
        ]
    given = [torch.from_numpy(x).float() for x in streams]
    ours = made.encode(given)
    np.testing.assert_allclose(array(torch.stack(ours)), features, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        array(torch.stack(made.decode(ours, given))), outputs, rtol=1e-5, atol=1e-4
    )
    assert (made.reads, made.writes) == ("ln2.normalized", "mlp_out")
    if skip:
        with pytest.raises(ValueError, match="skip connections"):
            made.decode(ours)


def test_files_that_are_not_a_cross_layer_transcoder_are_errors(tmp_path):
    back = drawn(FEATURES, 3, D_IN)
    across(tmp_path / "back", False, {1: {"w_dec": back}})
    across(tmp_path / "few", False, {2: {"w_dec": torch.zeros(FEATURES, 4, D_IN)}})
    across(tmp_path / "one skip", False, {1: {"affine_skip_connection": torch.eye(D_IN)}})
    across(tmp_path / "crosscoder" / "layer_7_13_17_width_65k", False)
    across(tmp_path / "stream", False)
    (tmp_path / "stream" / "config.json").write_text(
        '{"hf_hook_point_in": "model.layers.7.output"}'
    )
    for name, fields in {"relu": {"architecture": "relu"}, "field": {"temperature": 2}}.items():
        across(tmp_path / name, False)
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    for name, words in {
        "relu": "got relu",
        "field": "temperature",
        "back": "0 for all layers before",
        "few": "3 layers",
        "one skip": "affine_skip",
        "crosscoder/layer_7_13_17_width_65k": "pre_feedforward",
        "stream": "layers.7.output",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_transcoders(tmp_path / name)


def test_cross_layer_transcoders_of_circuit_tracer_may_skip(tmp_path):
    skips = [drawn(D_IN, D_IN, seed=n) for n in range(2)]
    for n in range(2):
        save_file(
            {
                f"W_enc_{n}": drawn(FEATURES, D_IN),
                f"b_enc_{n}": drawn(FEATURES),
                f"b_dec_{n}": drawn(D_IN),
                f"W_skip_{n}": skips[n],
            },
            tmp_path / f"W_enc_{n}.safetensors",
        )
        save_file(
            {f"W_dec_{n}": torch.zeros(FEATURES, 2 - n, D_IN)}, tmp_path / f"W_dec_{n}.safetensors"
        )
    made = load_transcoders(tmp_path)
    x = torch.from_numpy(X).float()
    outputs = made.decode(made.encode([x, 2 * x]), [x, 2 * x])
    for n, output in enumerate(outputs):
        np.testing.assert_allclose(
            array(output), (n + 1) * X @ array(skips[n]) + array(drawn(D_IN)), rtol=1e-5, atol=1e-5
        )


# Tests of all forms.
def test_half_precision_is_read_into_float32_by_default(tmp_path):
    path = tmp_path / "layer1.sae.pt"
    w = qwen_scope(path, torch.bfloat16)
    features = top(X @ w["W_enc"].T + w["b_enc"], 4)
    agrees(load_sae(path, k=4), features, features @ w["W_dec"].T + w["b_dec"])
    half = load_sae(path, k=4, dtype=torch.bfloat16)
    assert half.W_enc.dtype == half.encode(torch.ones(1, D_IN)).dtype == torch.bfloat16
    np.testing.assert_array_equal(array(half.W_enc), w["W_enc"].T)
    qwen_scope(path, torch.float64)
    assert load_sae(path, k=4).W_enc.dtype == torch.float64
    assert load_sae(path, k=4, dtype=torch.float32).W_enc.dtype == torch.float32
    assert load_sae("pydoc-4l/resid_post", dtype=torch.float64).W_dec.dtype == torch.float64
    llama_scope(tmp_path / "a")
    assert load_sae(tmp_path / "a", dtype=torch.float16).activation.threshold.dtype == torch.float16
    across(
        tmp_path / "b",
        False,
        {n: {"w_enc": drawn(D_IN, FEATURES, dtype=torch.bfloat16)} for n in range(3)},
    )
    assert load_transcoders(tmp_path / "b").W_enc[0].dtype == torch.float32
    with pytest.raises(ValueError, match="k must be None"):
        load_sae(tmp_path / "a", k=3)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "one threshold": JumpReLU(torch.tensor(0.4)),
    "thresholds": JumpReLU(drawn(FEATURES), relu=False),
    "gated": Gated(drawn(FEATURES, seed=6), drawn(FEATURES, seed=7), drawn(FEATURES, seed=8)),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_unit_decoder_rows_leave_the_function(name):
    W_dec = drawn(FEATURES, D_IN, seed=1)
    W_dec[4] = 0
    made = Dictionary(
        drawn(D_IN, FEATURES),
        W_dec,
        drawn(FEATURES, seed=2),
        drawn(D_IN, seed=3),
        ACTIVATIONS[name],
        subtracts_b_dec=True,
        norm="layer_norm",
        reads="blocks.1.resid_post",
        writes="blocks.1.resid_post",
        config={"a": 1},
    )
    unit, x = made.with_unit_decoder(), torch.from_numpy(X).float()
    torch.testing.assert_close(unit(x), made(x))
    length = np.linalg.norm(array(W_dec), axis=1)
    np.testing.assert_allclose(np.linalg.norm(array(unit.W_dec), axis=1), length > 0, rtol=1e-6)
    scaled = array(made.encode(x)) * np.where(length > 0, length, 1)
    np.testing.assert_allclose(array(unit.encode(x)), scaled, rtol=1e-5, atol=1e-5)
    assert (unit.reads, unit.norm, unit.config) == (made.reads, "layer_norm", {"a": 1})


def test_unit_decoder_rows_are_an_error_if_features_compete():
    weights = drawn(D_IN, FEATURES), drawn(FEATURES, D_IN), drawn(FEATURES), drawn(D_IN)
    with pytest.raises(ValueError, match="the same length"):
        Dictionary(*weights, TopK(3)).with_unit_decoder()
    same = nn.functional.normalize(weights[1]) * 2
    made, x = Dictionary(weights[0], same, *weights[2:], TopK(3)), torch.from_numpy(X).float()
    torch.testing.assert_close(made.with_unit_decoder()(x), made(x))
    torch.testing.assert_close(made.with_unit_decoder().encode(x), 2 * made.encode(x))
    with pytest.raises(ValueError, match="matching pursuit"):
        load_sae(FIXTURES / "sae_lens_matching_pursuit").with_unit_decoder()


def test_a_loaded_dictionary_is_spliced_at_the_point_of_its_config(tmp_path):
    model = pydoc()
    torch.save(
        {
            "W_enc": drawn(FEATURES, 128),
            "W_dec": drawn(128, FEATURES),
            "b_enc": drawn(FEATURES),
            "b_dec": drawn(128),
        },
        tmp_path / "layer2.sae.pt",
    )
    with splice(model, load_sae(tmp_path / "layer2.sae.pt", k=3)) as runner:
        cache = runner.capture("def f(x):", names="*.features")
    assert (cache["blocks.2.resid_post.features"] != 0).sum(-1).eq(3).all()


# The hub without a network. The files are in folders like the cache of the hub: the files in
# `snapshots` are links to `blobs`.
@pytest.fixture
def hub(monkeypatch, tmp_path):
    library = pytest.importorskip("huggingface_hub")
    asked = []

    def fetch(repository, allow_patterns=None):
        asked.append((repository, allow_patterns))
        folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        if not folder.exists():
            raise library.errors.LocalEntryNotFoundError("outgoing traffic\n has been disabled")
        return str(folder / "snapshots" / "9cf0a1")

    def put(source, repository, inside):
        folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        for file in [source] if source.is_file() else source.rglob("*.*"):
            blob = folder / "blobs" / f"{abs(hash(file)):x}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, blob)
            link = folder / "snapshots" / "9cf0a1" / inside
            link = link if source.is_file() else link / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)

    monkeypatch.setattr(library, "snapshot_download", fetch)
    return put, asked


def test_places_on_the_hub(hub, tmp_path):
    put, asked = hub
    inside = "layer_20/width_16k/average_l0_71"
    put(
        FIXTURES / "gemma_scope" / "params.npz",
        "google/gemma-scope-2b-pt-res",
        inside + "/params.npz",
    )
    made = load_sae(f"google/gemma-scope-2b-pt-res/{inside}")
    np.testing.assert_array_equal(
        array(made.W_enc), np.load(FIXTURES / "gemma_scope" / "params.npz")["W_enc"]
    )
    assert asked == [("google/gemma-scope-2b-pt-res", [inside, f"{inside}/*"])]
    w = qwen_scope(tmp_path / "layer7.sae.pt")
    put(tmp_path / "layer7.sae.pt", "Qwen/SAE-Res-W32K-L0_50", "layer7.sae.pt")
    made = load_sae("Qwen/SAE-Res-W32K-L0_50/layer7.sae.pt", k=5)
    np.testing.assert_array_equal(array(made.W_dec), w["W_dec"].T)
    assert made.reads == "blocks.7.resid_post"
    put(FIXTURES / "circuit_tracer", "mntss/transcoder", "")
    assert len(load_transcoders("mntss/transcoder")) == 2
    assert asked[-1] == ("mntss/transcoder", None)
    one = load_sae("mntss/transcoder/layer_1.safetensors")
    assert one.writes == "blocks.1.mlp_out"
    assert {"layer_1.safetensors", "config.yaml"} <= {*asked[-1][1]}
    with pytest.raises(FileNotFoundError, match="must contain layer_99"):
        load_sae("mntss/transcoder/layer_99")


def test_without_the_hub_the_error_is_one_line(hub, monkeypatch, tmp_path):
    for name in ("no-such/repository", "no-such/repository/layer_3"):
        with pytest.raises(
            FileNotFoundError, match="download of .* failed.*cannot be reached"
        ) as caught:
            load_sae(name)
        assert "\n" not in str(caught.value)
    for path in ("nothing", "./a/b", str(tmp_path / "absent"), Path("no-such/repository")):
        with pytest.raises(FileNotFoundError, match="must be a folder or a file"):
            load_sae(path)
    assert {repository for repository, _ in hub[1]} == {"no-such/repository"}
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"pip install"):
        load_sae("no-such/repository")


def test_names_of_an_installed_sae_lens(hub, monkeypatch, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "sae_lens").mkdir()
    (tmp_path / "sae_lens" / "__init__.py").write_text("raise RuntimeError('is not imported')")
    (tmp_path / "sae_lens" / "pretrained_saes.yaml").write_text(
        "other:\n  repo_id: a/b\n  saes:\n  - id: x\n    path: y\n"
        "gemma-scope-2b-pt-res-canonical:\n  conversion_func: gemma_2\n  model: gemma-2-2b\n  "
        "repo_id: google/gemma-scope-2b-pt-res\n"
        "  saes:\n  - id: layer_20/width_16k/canonical\n    path: "
        "layer_20/width_16k/average_l0_71\n    l0: 71\n"
        "  - id: layer_3\n    path: 3\nlast:\n  repo_id: c/d\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    inside = "layer_20/width_16k/average_l0_71/params.npz"
    hub[0](FIXTURES / "gemma_scope" / "params.npz", "google/gemma-scope-2b-pt-res", inside)
    made = load_sae("gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonical")
    np.testing.assert_array_equal(
        array(made.W_enc), np.load(FIXTURES / "gemma_scope" / "params.npz")["W_enc"]
    )
    with pytest.raises(UnknownNameError, match="layer_20/width_16k/canonical"):
        load_sae("gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonica")
    with pytest.raises(FileNotFoundError, match="download of 3"):
        load_sae("c/d/3")
