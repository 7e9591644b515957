"""A small random Llama of `transformers`, in memory or offloaded by accelerate."""

import tempfile

import pytest
import torch

from tests import tiny

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

SIZES = dict(
    hidden_size=64,
    # The maps of bitsandbytes with four bits need multiples of 64 inputs on a CPU.
    intermediate_size=128,
    num_hidden_layers=2,
    # Two processes divide the heads of keys.
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])


def llama(dtype=torch.float32, attention="sdpa"):
    words = dict(vocab_size=67, pad_token_id=0, bos_token_id=1)
    model = tiny.model("LlamaForCausalLM", **SIZES, **words, attn_implementation=attention)
    return tiny.redraw(model, 0.15).to(dtype)


def offloaded(how):
    import accelerate

    model = llama()
    if how == "cpu":
        return accelerate.cpu_offload(model, torch.device("cpu"))
    folder = tempfile.mkdtemp()
    devices = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    devices |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, devices, "cpu", offload_dir=folder)
