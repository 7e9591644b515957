"""Make the fixtures of tests/interp/features/test_load_sae.py with the libraries of their formats.

Run it by hand, in an environment with sae-lens 6.54, eai-sparsify 1.3, dictionary-learning 0.1 and
circuit-tracer 0.5: `python tests/dictionaries/make.py`. Each folder contains the files that the
library wrote. `expected.safetensors` contains inputs, with the features and the outputs that the
library computed. `sparsify_of_2024` needs sparsify as it was in January 2025, when the package was
named `sae`: commit 0b58af4 of its repository, on the path.

The crosscoders need other versions of dictionary-learning, on the path: `crosscoders` needs the
commit 173f7fa of science-of-finetuning/dictionary_learning, and `crosscoder_with_one_scale` the
commit 48debb2 of jkminder/dictionary_learning.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
D_IN, D_OUT, FEATURES, HEADS = 6, 5, 11, 2


def inputs(*shape):
    return torch.randn(7, *shape, generator=torch.Generator().manual_seed(1)) * 2


def randomize(module, scale=0.7):
    draw = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim:
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * scale)
            if "threshold" in name and "log" not in name:
                tensor.abs_()
    return module


def keep(name, x, features, output):
    (HERE / name).mkdir(exist_ok=True)
    tensors = {"x": x, "features": features, "output": output}
    save_file(
        {n: t.detach().contiguous() for n, t in tensors.items()},
        HERE / name / "expected.safetensors",
    )


def sae_lens():
    from sae_lens.saes.sae import SAE

    common = {"metadata": {"model_name": "gpt2", "hook_name": "blocks.1.hook_resid_post"}}
    out = {"hook_name_out": "blocks.1.hook_mlp_out", "hook_name": "blocks.1.hook_resid_mid"}
    cases = {
        "standard": {},
        "standard_no_b_dec": {"apply_b_dec_to_input": False},
        "standard_layer_norm": {"normalize_activations": "layer_norm"},
        "standard_rescaled": {"normalize_activations": "constant_norm_rescale"},
        "gated": {},
        "gated_layer_norm": {"normalize_activations": "layer_norm"},
        "jumprelu": {},
        "topk": {"k": 3, "rescale_acts_by_decoder_norm": False},
        "topk_by_norm": {"k": 3, "rescale_acts_by_decoder_norm": True},
        "topk_rescaled": {"k": 4, "normalize_activations": "constant_norm_rescale"},
        "abstopk": {"k": 3},
        "matching_pursuit": {"residual_threshold": 1.5},
        "matching_pursuit_long": {
            "residual_threshold": 0.0,
            "max_iterations": 9,
            "stop_on_duplicate_support": False,
        },
        "matching_pursuit_no_b_dec": {"apply_b_dec_to_input": False, "residual_threshold": 0.8},
        "transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
        "transcoder_layer_norm": {
            "d_out": D_OUT,
            "apply_b_dec_to_input": False,
            "normalize_activations": "layer_norm",
        },
        "skip_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
        "jumprelu_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
        "jumprelu_skip_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
        "standard_hook_z": {"reshape_activations": "hook_z"},
    }
    for name, fields in cases.items():
        kind = next(k for k in sorted(KINDS, key=len, reverse=True) if name.startswith(k))
        config = {"architecture": kind, "d_in": D_IN, "d_sae": FEATURES} | fields
        config |= {"metadata": dict(common["metadata"])}
        if "transcoder" in kind:
            config["metadata"] |= out
        if name.endswith("hook_z"):
            config["metadata"]["hook_name"] = "blocks.1.attn.hook_z"
        sae = randomize(SAE.from_dict(config))
        folder = HERE / f"sae_lens_{name}"
        sae.save_model(folder)
        x = inputs(HEADS, D_IN // HEADS) if name.endswith("hook_z") else inputs(D_IN)
        features = sae.encode(x)
        keep(folder.name, x, features, sae(x))
    # A file of version 5, which has one flat config with the settings of the training.
    sae = randomize(
        SAE.from_dict(
            {
                "architecture": "standard",
                "d_in": D_IN,
                "d_sae": FEATURES,
                "metadata": common["metadata"],
            }
        )
    )
    folder = HERE / "sae_lens_old"
    sae.save_model(folder)
    old = {
        "architecture": "standard",
        "d_in": D_IN,
        "d_sae": FEATURES,
        "activation_fn_str": "relu",
        "dtype": "torch.float32",
        "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False,
        "model_name": "gpt2-small",
        "hook_point": "blocks.1.hook_resid_pre",
        "hook_point_head_index": None,
        "context_size": 128,
        "prepend_bos": True,
        "normalize_activations": "none",
        "dataset_path": "any",
        "lr": 0.0004,
        "device": "cpu",
    }
    (folder / "cfg.json").write_text(json.dumps(old))
    read = SAE.load_from_disk(folder)
    keep(folder.name, inputs(D_IN), read.encode(inputs(D_IN)), read(inputs(D_IN)))
    # A dictionary that was trained on scaled activations. SAELens folds the scale into the weights
    # if the file contains it.
    config = {
        "architecture": "jumprelu",
        "d_in": D_IN,
        "d_sae": FEATURES,
        "normalize_activations": "expected_average_only_in",
    }
    sae = randomize(SAE.from_dict(config | common))
    folder = HERE / "sae_lens_factor"
    sae.save_model(folder)
    sae.fold_activation_norm_scaling_factor(1.7)
    keep(folder.name, inputs(D_IN), sae.encode(inputs(D_IN)), sae(inputs(D_IN)))


KINDS = (
    *("standard", "gated", "jumprelu", "topk", "abstopk", "matching_pursuit", "transcoder"),
    *("skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"),
)


def sae_lens_training():
    """Write checkpoints of trainings, and the files that are saved at the end of a training."""
    from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
    from sae_lens.saes.jumprelu_sae import JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig
    from sae_lens.saes.matryoshka_batchtopk_sae import (
        MatryoshkaBatchTopKTrainingSAE,
        MatryoshkaBatchTopKTrainingSAEConfig,
    )
    from sae_lens.saes.sae import SAE

    sizes = {"d_in": D_IN, "d_sae": FEATURES}
    trained = {
        "batchtopk": BatchTopKTrainingSAE(
            BatchTopKTrainingSAEConfig(**sizes, k=3, rescale_acts_by_decoder_norm=True)
        ),
        "matryoshka": MatryoshkaBatchTopKTrainingSAE(
            MatryoshkaBatchTopKTrainingSAEConfig(
                **sizes, k=3, matryoshka_widths=[4, FEATURES], rescale_acts_by_decoder_norm=False
            )
        ),
        "jumprelu": JumpReLUTrainingSAE(JumpReLUTrainingSAEConfig(**sizes)),
    }
    for name, sae in trained.items():
        randomize(sae)
        if hasattr(sae, "topk_threshold"):
            sae.topk_threshold.fill_(0.9)
        raw, folder = HERE / f"sae_lens_raw_{name}", HERE / f"sae_lens_end_{name}"
        sae.save_model(raw)
        sae.save_inference_model(folder)
        read = SAE.load_from_disk(folder)
        for each in (raw, folder):
            keep(each.name, inputs(D_IN), read.encode(inputs(D_IN)), read(inputs(D_IN)))


def sae_lens_temporal():
    """Write temporal dictionaries: two as SAELens writes them, and one as canrager publishes it.

    SAELens' own loader reads the published form, with a local folder in place of the hub.
    """
    from sae_lens.loading import pretrained_sae_loaders
    from sae_lens.saes.sae import SAE
    from sae_lens.saes.temporal_sae import TemporalSAE, TemporalSAEConfig

    sizes = {"d_in": D_IN, "d_sae": 24, "n_heads": 2, "bottleneck_factor": 4}
    cases = {
        "temporal": {
            "n_attn_layers": 2,
            "kval_topk": 5,
            "normalize_activations": "constant_scalar_rescale",
            "activation_normalization_factor": 0.3,
        },
        "temporal_untied": {
            "sae_diff_type": "relu",
            "tied_weights": False,
            "apply_b_dec_to_input": False,
            "normalize_activations": "layer_norm",
        },
    }
    x = inputs(5, D_IN)
    for name, fields in cases.items():
        about = {"metadata": {"model_name": "gpt2", "hook_name": "blocks.1.hook_resid_post"}}
        sae = SAE.from_dict({"architecture": "temporal"} | sizes | fields | about)
        randomize(sae)
        folder = HERE / f"sae_lens_{name}"
        sae.save_model(folder)
        keep(folder.name, x, sae.encode(x), sae(x))
    folder = HERE / "temporal" / "layer_12"
    folder.mkdir(parents=True)
    section = {
        "exp_factor": 4,
        "n_heads": 2,
        "n_attn_layers": 1,
        "bottleneck_factor": 4,
        "sae_diff_type": "topk",
        "kval_topk": 7,
        "tied_weights": True,
        "scaling_factor": 0.4,
    }
    config = {"sae": section, "llm": {"dimin": D_IN}, "data": {"dtype": "float32"}}
    (folder / "conf.yaml").write_text(json.dumps(config))
    sae = randomize(TemporalSAE(TemporalSAEConfig(**sizes)))
    tensors = {{"W_dec": "D", "b_dec": "b"}.get(n, n): t for n, t in sae.state_dict().items()}
    save_file(tensors, folder / "latest_ckpt.safetensors")
    pretrained_sae_loaders.hf_hub_download = lambda repo_id, filename, **_: HERE / filename
    fields, tensors, _ = pretrained_sae_loaders.temporal_sae_huggingface_loader(
        "owner/name", "temporal/layer_12"
    )
    sae = TemporalSAE.from_dict(fields)
    sae.load_state_dict(tensors)
    keep("temporal/layer_12", x, sae.encode(x), sae(x))


def sparsify():
    from sparsify.config import SparseCoderConfig
    from sparsify.sparse_coder import SparseCoder

    for name, fields in {
        "topk": {"k": 3},
        "transcoder": {"k": 3, "transcode": True, "skip_connection": True},
        "groupmax": {"k": 4, "activation": "groupmax"},
    }.items():
        features = 12 if name == "groupmax" else FEATURES
        coder = randomize(SparseCoder(D_IN, SparseCoderConfig(num_latents=features, **fields)))
        folder = HERE / f"sparsify_{name}" / "layers.1.mlp"
        coder.save_to_disk(folder)
        x = inputs(D_IN)
        kept, numbers, _ = coder.encode(x)
        dense = torch.zeros(len(x), features).scatter(-1, numbers, kept)
        keep(f"sparsify_{name}/layers.1.mlp", x, dense, coder(x).sae_out)


def sparsify_of_2024():
    """Write a transcoder of the time when the config had no field `transcode`.

    It has a skip connection, and the bias of the decoder is subtracted from its input.
    """
    from sae import Sae, SaeConfig

    coder = randomize(
        Sae(D_IN, SaeConfig(num_latents=FEATURES, k=3, skip_connection=True), decoder=True)
    )
    folder = HERE / "sparsify_of_2024" / "layers.1.mlp"
    coder.save_to_disk(folder)
    x = inputs(D_IN)
    kept, numbers = coder.encode(x)
    dense = torch.zeros(len(x), FEATURES).scatter(-1, numbers, kept)
    keep("sparsify_of_2024/layers.1.mlp", x, dense, coder(x).sae_out)


def dictionary_learning():
    from dictionary_learning.dictionary import (
        AutoEncoder,
        AutoEncoderNew,
        GatedAutoEncoder,
        JumpReluAutoEncoder,
    )
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
    from dictionary_learning.trainers.top_k import AutoEncoderTopK

    for kind, more in {
        AutoEncoder: (),
        AutoEncoderNew: (),
        GatedAutoEncoder: (),
        JumpReluAutoEncoder: (),
        AutoEncoderTopK: (3,),
        BatchTopKSAE: (3,),
        MatryoshkaBatchTopKSAE: (3, [4, 7]),
    }.items():
        coder = randomize(kind(D_IN, FEATURES, *more))
        if kind in (BatchTopKSAE, MatryoshkaBatchTopKSAE):
            coder.threshold.fill_(0.8)
        folder = HERE / f"dictionary_learning_{kind.__name__}"
        folder.mkdir(exist_ok=True)
        trainer = {
            "dict_class": kind.__name__,
            "activation_dim": D_IN,
            "dict_size": FEATURES,
            "layer": 1,
            "lm_name": "EleutherAI/pythia-70m",
            "submodule_name": "resid_post_layer_1",
        }
        (folder / "config.json").write_text(
            json.dumps({"trainer": trainer, "buffer": {"ctx_len": 128}})
        )
        torch.save(coder.state_dict(), folder / "ae.pt")
        keep(folder.name, inputs(D_IN), coder.encode(inputs(D_IN)), coder(inputs(D_IN)))
    # The files that an interrupted training leaves. The biases are not scaled yet.
    coder = randomize(BatchTopKSAE(D_IN, FEATURES, 3))
    coder.threshold.fill_(0.8)
    folder = HERE / "dictionary_learning_interrupted"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"trainer": trainer | {"dict_class": "BatchTopKSAE"}})
    )
    torch.save({"step": 40, "ae": coder.state_dict(), "norm_factor": 1.7}, folder / "ae.pt")
    coder.scale_biases(1.7)
    keep(folder.name, inputs(D_IN), coder.encode(inputs(D_IN)), coder(inputs(D_IN)))


def circuit_tracer():
    from circuit_tracer.transcoder.activation_functions import JumpReLU, TopK
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder, load_clt
    from circuit_tracer.transcoder.single_layer_transcoder import (
        SingleLayerTranscoder,
        TranscoderSet,
        load_gemma_scope_2_transcoder,
        load_gemma_scope_transcoder,
    )

    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    layers = {
        0: SingleLayerTranscoder(
            D_IN, FEATURES, torch.nn.functional.relu, 0, skip_connection=True, **options
        ),
        1: SingleLayerTranscoder(
            D_IN, FEATURES, JumpReLU(torch.zeros(FEATURES)), 1, skip_connection=True, **options
        ),
    }
    for layer in layers.values():
        randomize(layer)
    folder = HERE / "circuit_tracer"
    TranscoderSet(layers, "hook_resid_mid", "hook_mlp_out").to_safetensors(folder)
    (folder / "config.yaml").write_text(
        "model_kind: transcoder_set\nfeature_input_hook: hook_resid_mid\nfeature_output_hook: "
        "hook_mlp_out\n"
    )
    x = inputs(2, D_IN)
    features = [layers[n].encode(x[:, n]) for n in layers]
    output = [layers[n].decode(features[n], x[:, n]) for n in layers]
    keep(folder.name, x, torch.stack(features, 1), torch.stack(output, 1))

    # A top-k transcoder. Since April 2026, circuit-tracer reads it from a config like this.
    # Features may be negative.
    layer = randomize(SingleLayerTranscoder(D_IN, FEATURES, TopK(7), 0, **options))
    folder = HERE / "circuit_tracer_topk"
    TranscoderSet({0: layer}, "mlp.hook_in", "mlp.hook_out").to_safetensors(folder)
    (folder / "config.yaml").write_text(
        "model_kind: transcoder_set\nfeature_input_hook: mlp.hook_in\nfeature_output_hook: "
        "mlp.hook_out\n"
        "activation: topk\nk: 7\n"
    )
    x = inputs(D_IN)
    features = layer.encode(x)
    keep(folder.name, x, features, layer.decode(features, x))

    for name, activation in {"relu": "relu", "jump_relu": "jump_relu"}.items():
        clt = randomize(
            CrossLayerTranscoder(
                3,
                FEATURES,
                D_IN,
                activation_function=activation,
                lazy_decoder=False,
                feature_input_hook="hook_resid_mid",
                feature_output_hook="hook_mlp_out",
                **options,
            )
        )
        folder = HERE / f"cross_layer_{name}"
        clt.to_safetensors(str(folder))
        read = load_clt(str(folder), lazy_decoder=False, **options)
        x = inputs(3, D_IN).transpose(0, 1)
        features = read.encode(x)
        output = read.decode(features.to_sparse())
        keep(folder.name, x, features, output)

    # A file in the published format of Gemma Scope, loaded by circuit-tracer.
    draw = np.random.default_rng(0)
    shapes = {
        "W_enc": (D_IN, FEATURES),
        "W_dec": (FEATURES, D_IN),
        "b_enc": (FEATURES,),
        "b_dec": (D_IN,),
        "threshold": (FEATURES,),
    }
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["threshold"] = np.abs(arrays["threshold"])
    folder = HERE / "gemma_scope"
    folder.mkdir(exist_ok=True)
    np.savez(folder / "params.npz", **arrays)
    coder = load_gemma_scope_transcoder(str(folder / "params.npz"), 1, **options)
    keep(folder.name, inputs(D_IN), coder.encode(inputs(D_IN)), coder(inputs(D_IN)))
    folder = HERE / "gemma_scope_2"
    folder.mkdir(exist_ok=True)
    tensors = {
        (n.lower() if n.startswith("W") else n): torch.from_numpy(array)
        for n, array in arrays.items()
    }
    tensors["affine_skip_connection"] = torch.from_numpy(
        draw.normal(size=(D_IN, D_IN)).astype(np.float32)
    )
    save_file(tensors, folder / "params.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architecture": "jump_relu",
                "model_name": "gemma-v3-1b-it",
                "hf_hook_point_in": "model.layers.1.pre_feedforward_layernorm.output",
                "hf_hook_point_out": "model.layers.1.post_feedforward_layernorm.output",
                "affine_connection": True,
            }
        )
    )
    coder = load_gemma_scope_2_transcoder(str(folder / "params.safetensors"), 1, **options)
    keep(folder.name, inputs(D_IN), coder.encode(inputs(D_IN)), coder(inputs(D_IN)))


# Numbers of a crosscoder that differ from the sizes above.
MEMBERS, LATENTS = 2, 13


def random_crosscoder(kind, code_norm="CROSSCODER", normalized=False, **settings):
    """Return a random crosscoder of the library, without dead features."""
    if normalized:
        draw = torch.Generator().manual_seed(2)
        settings |= {
            "activation_mean": torch.randn(MEMBERS, D_IN, generator=draw),
            "activation_std": torch.rand(MEMBERS, D_IN, generator=draw) + 0.5,
            "target_rms": 3.0,
        }
    coder = kind(D_IN, LATENTS, MEMBERS, code_normalization=code_norm, **settings)
    draw = torch.Generator().manual_seed(0)
    for tensor in coder.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.7)
    if hasattr(coder, "threshold"):
        coder.threshold.fill_({"NONE": 1.1, "SAE": 2.3}.get(code_norm, 4.1))
    return coder


def keep_crosscoder(name, coder, trainer=None):
    """Write the inputs and the numbers of a crosscoder, and the files of a training if its settings
    are given.
    """
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    if trainer is not None:
        (folder / "config.json").write_text(json.dumps({"trainer": trainer}))
        torch.save(coder.state_dict(), folder / "ae.pt")
    x = inputs(MEMBERS, D_IN)
    keep(name, x, coder.encode(x), coder(x))


def trained(kind, code_norm, **more):
    """Return the settings that a training writes."""
    return {
        "dict_class": kind.__name__,
        "trainer_class": f"{kind.__name__}Trainer",
        "activation_dim": D_IN,
        "dict_size": LATENTS,
        "layer": 1,
        "lm_name": "tuned-base",
        "submodule_name": "resid_post_layer_1",
        "code_normalization": code_norm,
        "code_normalization_alpha_sae": 1.0,
        "code_normalization_alpha_cc": 0.1,
    } | more


def crosscoders():
    from dictionary_learning.dictionary import BatchTopKCrossCoder, CrossCoder

    # As a training writes it, with the file names of the oldest version.
    coder = random_crosscoder(CrossCoder)
    keep_crosscoder("crosscoder_relu", coder, trained(CrossCoder, "CROSSCODER"))
    for code_norm in ("CROSSCODER", "SAE", "MIXED", "NONE"):
        coder = random_crosscoder(BatchTopKCrossCoder, code_norm, k=3)
        settings = trained(
            BatchTopKCrossCoder,
            code_norm,
            k=3,
            dict_class_kwargs={"norm_init_scale": "1.0", "encoder_layers": "None"},
        )
        keep_crosscoder(f"crosscoder_batch_top_k_{code_norm.lower()}", coder, settings)
    # As it is on the hub.
    coder = random_crosscoder(BatchTopKCrossCoder, "SAE", normalized=True, k=3)
    folder = HERE / "crosscoder_hub"
    coder.save_pretrained(folder)
    (folder / "README.md").unlink()
    (folder / "trainer_config.json").write_text(
        json.dumps({"trainer": trained(BatchTopKCrossCoder, "SAE", k=3, target_rms=3.0)})
    )
    keep_crosscoder("crosscoder_hub", coder)


def crosscoder_with_one_scale():
    """A crosscoder of the version in which all members have one scale."""
    from dictionary_learning.dictionary import CrossCoder

    coder = random_crosscoder(CrossCoder, normalized=True)
    keep_crosscoder("crosscoder_one_scale", coder, trained(CrossCoder, "CROSSCODER"))


def crosscoder_gemma_scope_2():
    """The files as published; the numbers are from the formula of the published notebook."""
    layers, own = 3, 4
    draw = np.random.default_rng(0)
    shapes = {
        "w_enc": (D_IN, own),
        "w_dec": (own, layers, D_IN),
        "b_enc": (own,),
        "b_dec": (D_IN,),
        "threshold": (own,),
    }
    of_layer = [
        {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    folder = HERE / "crosscoder_gemma_scope_2"
    folder.mkdir(exist_ok=True)
    for layer, arrays in enumerate(of_layer):
        arrays["threshold"] = np.abs(arrays["threshold"])
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        save_file(tensors, folder / f"params_layer_{layer}.safetensors")
    place = "model.layers.{1,4,6}.output"
    config = {
        "hf_hook_point_in": place,
        "hf_hook_point_out": place,
        "width": layers * own,
        "model_name": "google/gemma-3-270m-pt",
        "architecture": "jump_relu",
        "l0": 150,
        "affine_connection": False,
        "type": "crosscoder",
    }
    (folder / "config.json").write_text(json.dumps(config))
    x = inputs(layers, D_IN)
    stacked = {name: np.stack([arrays[name] for arrays in of_layer]) for name in shapes}
    pre = np.einsum("rld,ldf->rlf", x.numpy(), stacked["w_enc"]) + stacked["b_enc"]
    features = np.where(pre > stacked["threshold"], np.maximum(pre, 0), 0)
    output = np.einsum("rlf,lfod->rod", features, stacked["w_dec"]) + stacked["b_dec"]
    keep(folder.name, x, torch.from_numpy(features).flatten(1), torch.from_numpy(output))


if __name__ == "__main__":
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    with torch.no_grad():
        for make in (sae_lens, sae_lens_training, sae_lens_temporal):
            make()
        for make in (sparsify, sparsify_of_2024, dictionary_learning):
            make()
        circuit_tracer()
        crosscoder_gemma_scope_2()
        # With another version of dictionary-learning on the path each: crosscoders(),
        # crosscoder_with_one_scale().
