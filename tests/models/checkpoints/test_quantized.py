"""Checkpoints that `transformers` wrote in fp8, and the errors and points of other forms."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooks import HookedRunner
from models import attach
from models.checkpoints import from_hf, load
from models.checkpoints.assemble import Reader
from models.checkpoints.huggingface.quantized import dequantized
from tests import tiny
from tests.small_llama import TOKENS, llama, transformers

CONFIG = transformers.FineGrainedFP8Config


def written(folder, block):
    """Write a small Llama in fp8 with `transformers`, which otherwise does so on a GPU only."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    llama(torch.bfloat16).save_pretrained(folder / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FineGrainedFP8HfQuantizer, "validate_environment", lambda *given, **more: None
        )
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder / "plain", quantization_config=CONFIG(weight_block_size=block)
        )
    model.save_pretrained(folder / "fp8")
    return folder / "fp8"


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, (16, 32))


def by_transformers(path, dtype):
    return transformers.LlamaForCausalLM.from_pretrained(
        path, quantization_config=CONFIG(dequantize=True), dtype=dtype
    ).eval()


@torch.no_grad()
def test_fp8_is_read_as_transformers_reads_it(path):
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert stored[name].dtype == torch.float8_e4m3fn
    assert stored[f"{name}_scale_inv"].shape == (4, 4)
    for dtype, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        ours, theirs = load(path, dtype=dtype), by_transformers(path, wanted)
        assert torch.equal(ours.blocks[1].mlp.output.weight, theirs.get_parameter(name))
        torch.testing.assert_close(ours.state_dict(), from_hf(theirs).state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits)


@torch.no_grad()
def test_a_model_in_fp8_is_attached_and_its_weights_are_read(path):
    model, twin = (by_transformers(path, torch.float32) for _ in range(2))
    with attach(model) as attached:
        assert torch.equal(model(TOKENS).logits, twin(TOKENS).logits)
        cache = HookedRunner(model).run_with_cache(TOKENS, names=["*.attn.z", "*.mlp_out"])[1]
        wanted = twin.model.layers[1].self_attn.q_proj.weight
        assert torch.equal(attached.W_Q[1].mT.flatten(0, 1), wanted)
    seen = {}
    layer = twin.model.layers[1]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.update(z=args[0]))
    layer.mlp.register_forward_hook(lambda module, args, output: seen.update(mlp=output))
    twin(TOKENS)
    assert torch.equal(cache["z", 1].flatten(2), seen["z"])
    assert torch.equal(cache["mlp_out", 1], seen["mlp"])


@pytest.mark.parametrize("sizes", [[2, 3], None])
def test_blocks_at_the_edges_of_a_weight_are_smaller(sizes):
    torch.manual_seed(0)
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) if sizes else torch.rand(())
    tensors = {
        "a.weight": weight,
        "a.weight_scale_inv": scales,
        "a.activation_scale": torch.ones(()),
        "b.weight": scales,
    }
    reader = dequantized(
        Reader(tensors.keys(), tensors.__getitem__, keep=False),
        {"weight_block_size": sizes},
        dtype=None,
    )
    assert reader.keys == {"a.weight", "b.weight"}
    assert reader.read("b.weight") is scales
    wanted = torch.empty(5, 7)
    for row in range(5):
        for column in range(7):
            scale = scales[row // 2, column // 3] if sizes else scales
            wanted[row, column] = float(weight[row, column].float()) * scale
    assert torch.equal(reader.read("a.weight"), wanted)


def change(path, name, value):
    state = load_file(path / "model.safetensors")
    state[name] = value
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Bytes may be exponents, and other blocks would put scales at wrong places.
        (f"{NAME}_scale_inv", torch.ones(8, 2, dtype=torch.uint8)),
        (f"{NAME}_scale_inv", torch.ones(16, 2)),
        (f"{NAME}_scale_inv", torch.ones(7, 2)),
        (NAME, torch.ones(128, 64, dtype=torch.int8)),
    ],
)
def test_scales_that_do_not_fit_raise_an_error(path, name, value):
    change(path, name, value)
    with pytest.raises(ValueError, match=f"{NAME}_scale_inv must be floats .8, 2."):
        load(path)


def test_a_weight_in_fp8_without_its_scales_raises_an_error(path):
    state = load_file(path / "model.safetensors")
    del state[f"{NAME}_scale_inv"]
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj\.weight.*float8"):
        load(path)
    with pytest.raises(ValueError, match="scale_inv"):
        load(path, ignore=["quantization_config"])


# What these libraries wrote: gptqmodel 7.7, bitsandbytes 0.50, torchao 0.18, compressed-tensors
# 0.20. Entries that only one library knows are left out.
FORMS = {
    "gptq": dict(quant_method="gptq", bits=4, group_size=32, checkpoint_format="gptq"),
    "awq": dict(quant_method="awq", bits=4, group_size=32, version="gemm"),
    "bitsandbytes": dict(quant_method="bitsandbytes", load_in_4bit=True),
    "torchao": dict(quant_method="torchao", quant_type={"default": {}}),
    "compressed-tensors": dict(quant_method="compressed-tensors", format="pack-quantized"),
    "mxfp4": dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    "unknown": dict(bits=3),
}
WAYS = {"compressed-tensors": "CompressedTensorsConfig", "mxfp4": "Mxfp4Config"}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_name_the_way(tmp_path, form):
    config = llama().config
    described = config.to_dict() | dict(quantization_config=FORMS[form])
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").touch()
    way = f"attach.*from_pretrained.*{re.escape(str(tmp_path))}.*{WAYS.get(form, '')}"
    with pytest.raises(ValueError, match=f"got .*{form}.*{way}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_of_a_quantized_model_in_memory_are_not_read():
    model = llama()
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    attached = attach(model)
    with pytest.raises(ValueError, match=r"bitsandbytes .*model.dequantize\(\)"):
        _ = attached.W_Q
    attached.remove()
    model.config.quantization_config = dict(quant_method="compressed-tensors")
    with pytest.raises(ValueError, match=r"CompressedTensorsConfig\(dequantize=True\)"):
        from_hf(model)


def test_weights_that_transformers_has_unpacked_from_a_gguf_file_are_read():
    """The config still names the form of the file."""
    model = llama()
    model.config.quantization_config = dict(quant_method="gguf")
    model.config._model_name_or_path, model.config.unk_token_id = "a name in the file", 3
    torch.testing.assert_close(from_hf(model)(TOKENS), model(TOKENS).logits)
    packed = torch.ones(7, 5, dtype=torch.uint8)
    model.model.embed_tokens.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match="must not be quantized if they are read; got gguf"):
        from_hf(model)


# The numbers of four bits, in the order of their codes (OCP Microscaling, E2M1).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@torch.no_grad()
def test_a_model_in_mxfp4_is_attached(tmp_path):
    model = tiny.model(
        "GptOssForCausalLM",
        vocab_size=67,
        hidden_size=64,
        intermediate_size=32,  # the format has blocks of 32 numbers
        num_hidden_layers=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=2**17,  # the default frequencies are for this number
    )
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    wanted = {}
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        experts, rows, columns = state.pop(name).mT.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])[codes]
        wanted[name] = (numbers * 2.0 ** (scales[..., None] - 127.0)).flatten(2).mT
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    described = model.config.to_dict() | dict(quantization_config=FORMS["mxfp4"])
    (tmp_path / "config.json").write_text(json.dumps(described))
    model, twin = (
        transformers.GptOssForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
            dtype=torch.float32,
        ).eval()
        for _ in range(2)
    )
    assert len(wanted) == 4
    for name, weight in wanted.items():
        assert torch.equal(model.get_parameter(name), weight)
    seen = []
    twin.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    logits = twin(TOKENS).logits
    with attach(model):
        assert torch.equal(model(TOKENS).logits, logits)
        cache = HookedRunner(model).run_with_cache(TOKENS, names="*.mlp_out")[1]
    assert torch.equal(cache["mlp_out", 1], seen[0])
