"""Caches of the bridge of TransformerLens 4.3, for tiny random models of `transformers`.

`python -m tests.transformer_lens.bridge` makes `bridge.npz`, if this version is installed.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).with_name("bridge.npz")
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
SIZES = dict(vocab_size=13, hidden_size=12, num_hidden_layers=2, intermediate_size=7)
SIZES |= dict(num_attention_heads=3, max_position_embeddings=11)
SHARED = SIZES | dict(num_attention_heads=6, num_key_value_heads=3, head_dim=4)
KINDS = {
    "GPT2": dict(vocab_size=13, n_embd=12, n_layer=2, n_head=3, n_positions=11),
    "GPTNeoX": SIZES | dict(hidden_size=24),
    "Gemma2": SHARED | dict(query_pre_attn_scalar=4),
    "Qwen3": SHARED,
}


def made(kind):
    """Return the random model of a kind."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    return model


def read(kind):
    """Return the values of block 1 and of the points outside of blocks, by name."""
    with np.load(FILE) as file:
        shapes = json.loads(str(file["shapes"]))[kind]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
        parts = np.split(file[kind], ends[:-1])
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: torch.tensor(part).reshape(shape) for (name, shape), part in pairs}


def main():
    import tokenizers
    from transformer_lens.model_bridge.sources.transformers import source
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({chr(97 + n): n for n in range(13)}, unk_token="a")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "m")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **special)
    arrays, shapes = {}, {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            made(kind).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            bridge = source.boot(directory, dtype=torch.float32, device="cpu")
        kept = {
            name: value.detach().float()
            for name, value in bridge.run_with_cache(TOKENS)[1].items()
            if "blocks.0" not in name and isinstance(value, torch.Tensor)
        }
        arrays[kind] = np.concatenate([value.numpy().ravel() for value in kept.values()])
        shapes[kind] = {name: list(value.shape) for name, value in kept.items()}
    np.savez_compressed(FILE, shapes=json.dumps(shapes), **arrays)
    print(FILE.stat().st_size)


if __name__ == "__main__":
    main()
