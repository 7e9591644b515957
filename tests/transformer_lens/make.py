"""Make `models.npz`: `python tests/transformer_lens/make.py`, with TransformerLens 2.16.1.

Every parameter is random, also biases and gains. Weights are multiples of 1/16, so each fits into a
byte. The weights of folded models are in float64. Everything is computed in float64.
"""

import json
from pathlib import Path

import numpy as np

STEP = 16
FILE = Path(__file__).with_name("models.npz")
SIZES = dict(n_layers=2, n_heads=3, d_head=4, d_model=5, d_mlp=7, n_ctx=11, d_vocab=13)
SIZES |= dict(act_fn="gelu_new", normalization_type="LN", device="cpu", seed=0)

MODELS = json.loads(FILE.with_suffix(".json").read_text())
CACHED = {
    *"ln rms attn_only gated rotary_partly llama parallel qk_norm sandwich".split(),
    *"rms_pre qk_norm_ln caps solu_ln post_embedding_ln_rotary processed".split(),
}


def main():
    import torch

    tokens = torch.randint(13, (1, 5), generator=torch.Generator().manual_seed(1))
    arrays, index = {"tokens": tokens.numpy()}, {}
    for name, changes in MODELS.items():
        model = made(name, changes)
        parameters = {n: p.detach().numpy() for n, p in model.named_parameters()}
        buffers = {n: b.numpy() for n, b in model.named_buffers()}
        with torch.no_grad():
            logits = model(tokens).numpy()
            cache = cached(model, tokens) if name in CACHED else {}
        parts = dict(state=parameters, buffers=buffers, logits={"logits": logits}, cache=cache)
        index[name] = {"config": model.cfg.to_dict() | {"dtype": str(model.cfg.dtype)}}
        index[name]["points"] = list(model.hook_dict)
        for kind, values in parts.items():
            index[name][kind] = {n: list(value.shape) for n, value in values.items()}
            arrays[f"{name}/{kind}"] = flat(kind, values)
    np.savez_compressed(FILE, index=json.dumps(index), **arrays)
    print(FILE.stat().st_size)


def made(name, changes):
    """Return the random model with a name."""
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**SIZES | changes, dtype=torch.float64)
    model = HookedTransformer(config).double().eval()  # experts ignore the dtype of the config
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            gain = path.endswith(".w")
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            value = (0.8 if gain else 0) + (0.2 if gain else 0.5) * noise
            parameter.copy_((value.clamp(-1.9, 1.9) * STEP).round() / STEP)
    if name.startswith("processed"):
        model.process_weights_()
        # `setup` gives names to the points of the new norms.
        model.setup()
    return model


def cached(model, tokens):
    """Return the values of block 1 and of the points outside of blocks.

    Points that are switched off by default are included.
    """
    # With grouped heads, TransformerLens does not allow `use_attn_in`.
    grouped = model.cfg.n_key_value_heads is not None
    cache = {}
    # If inputs are split by head, values of norms have another shape. The run without this switch
    # comes last, so its values remain.
    for switches in (["use_split_qkv_input"], [] if grouped else ["use_attn_in"], []):
        switches = [*switches, "use_attn_result", "use_hook_mlp_in"]
        for name in switches:
            setattr(model.cfg, name, True)
        cache |= model.run_with_cache(tokens, return_cache_object=False)[1]
        for name in switches:
            setattr(model.cfg, name, False)
    return {name: value.numpy() for name, value in cache.items() if "blocks.0" not in name}


def flat(kind, values):
    """Return all values joined in one array, with the smallest dtype that is exact.

    Values of a cache are rounded to float32.
    """
    joined = np.concatenate([np.zeros(0), *(value.ravel() for value in values.values())])
    whole = np.round(joined * STEP)
    if kind == "state" and np.array_equal(whole / STEP, joined):
        return whole.astype(np.int8)
    return joined.astype(np.float32) if kind == "cache" else joined


if __name__ == "__main__":
    main()
