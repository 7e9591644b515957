"""Small models of every block form, and a slow reference for runs of circuits.

The reference computes a residual stream of its own for each reader, a part that reads the stream.
"""

import torch
import torch.nn.functional as F

SIZES = dict(
    vocab_size=23, n_ctx=13, n_layers=3, n_heads=6, n_kv_heads=3, d_head=4, d_model=14, d_mlp=11
)
FORMS = {
    "pre": {},
    "rms": dict(norm="rmsnorm", out_bias=False, mlp="gated", activation="silu"),
    "none": dict(norm="none", final_norm=False),
    "output": dict(norm_place="output", qk_norm="all", positions="rotary"),
    "sandwich": dict(norm_place="sandwich", attn_cap=2.0, logit_cap=3.0),
    "sandwich rms": dict(norm_place="sandwich", norm="rmsnorm", parallel=True, qk_norm="head"),
    "parallel": dict(parallel=True, positions="rotary", rotary_fraction=0.5),
    "attention only": dict(mlp="none", d_mlp=0, norm_place="sandwich", window=3, out_bias=False),
    "embed_norm": dict(embed_norm=True, positions="sinusoidal"),
    "solu and mlp_norm": dict(activation="solu", mlp_norm=True),
    "not causal": dict(causal=False, rotary_pairs="adjacent", positions="rotary", vocab_size_out=17)
    | dict(tied_unembed=False),
}


def made(seed=0, **choices):
    """Return a model in float64 in which every weight matters."""
    from models import Transformer, TransformerConfig

    model = Transformer(TransformerConfig(**{**SIZES, **choices})).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.4 * torch.randn(weight.shape, generator=generator))
    return model


def seen_keys(config, layer, real):
    """Return True for the keys that a query sees, [batch, query, key], and the positions."""
    pos = real.shape[1]
    counted = (real.long().cumsum(1) - 1).clamp(min=0)
    gap = counted[:, :, None] - counted[:, None]
    seen = torch.ones(pos, pos, dtype=torch.bool).tril(0 if config.causal else pos) & real[:, None]
    window = config.windows[layer]
    return seen & (gap < window) if window else seen, counted


def normed(norm, config, x, parts=()):
    """Return the output of a norm, and the share of each part if `x` is the sum of `parts`."""
    if not hasattr(norm, "scale"):
        return x, list(parts)
    centred = x - x.mean(-1, keepdim=True) if config.norm == "layernorm" else x
    scale = (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    if config.norm == "layernorm":
        parts = [part - part.mean(-1, keepdim=True) for part in parts]
    gain, bias = norm.weight, getattr(norm, "bias", 0)
    return centred / scale * gain + bias, [part / scale * gain for part in parts]


@torch.no_grad()
def slow_run(model, tokens, mask=None, source=None, real=None, nodes=None):
    """Return the logits of a run with a mask of edges, and the output of each writer.

    A writer is a part that adds to the residual stream. For an edge with the mask m, the reader
    sees `(1 - m) * current + m * source`: `current` is the output of the writer in this run, and
    `source` is its output in another run.

    Args:
        model: the model, in float64.
        tokens: the tokens [batch, pos].
        mask: [writer, reader], with more axes `pos` or `batch pos` if they differ, in the order of
            `nodes`. Default: no mask, a plain run.
        source: the output of each writer in the other run, by its name.
        real: True for real tokens, [batch, pos]. Default: no padding.
        nodes: the graph of the model, which names writers and readers. A mask needs it.
    """
    config, current, fixed = model.config, {}, 0
    real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.bool()
    heads, kv, size = config.n_heads, config.n_kv_heads, config.d_head

    def stream(reader):
        total = fixed
        for name, value in current.items():
            share = 0
            if mask is not None and name in nodes.writers:
                share = mask[nodes.writers.index(name), nodes.readers.index(reader)]
                share = share[..., None] if share.ndim else share
            total = total + (value if mask is None else value + share * (source[name] - value))
        return total

    current["input"] = model.input_resid(tokens, model.context(tokens, attention_mask=real))
    for n, block in enumerate(model.blocks):
        attn = block.attn
        seen, positions = seen_keys(config, n, real)
        rotation = attn.rotary.rotation(positions, dtype=torch.float64)
        found = {"q": [], "k": [], "v": []}
        for row, (kind, head) in enumerate(
            [("q", h) for h in range(heads)] + [(k, h) for k in "kv" for h in range(kv)]
        ):
            read, _ = normed(block.ln1, config, stream(f"a{n}.h{head}<{kind}>"))
            rows = slice(row * size, (row + 1) * size)
            bias = None if attn.qkv.bias is None else attn.qkv.bias[rows]
            found[kind].append(F.linear(read, attn.qkv.weight[rows], bias))
        q, k, v = (torch.stack(found[kind], 2) for kind in "qkv")
        q, k = attn.rotary(attn.q_norm(q), rotation), attn.rotary(attn.k_norm(k), rotation)
        k, v = (part.repeat_interleave(heads // kv, 2) for part in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * config.attn_scale
        if config.attn_cap:
            scores = config.attn_cap * (scores / config.attn_cap).tanh()
        scores = scores.masked_fill(~seen[:, None], -1e30)
        z = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        parts = [
            z[:, :, h] @ attn.output.weight[:, h * size : (h + 1) * size].T for h in range(heads)
        ]
        bias = 0 if attn.output.bias is None else attn.output.bias
        parts.append(torch.zeros_like(parts[0]) + bias)
        total = sum(parts)
        _, parts = normed(block.ln1_post, config, total, parts)
        heads_wrote = {f"a{n}.h{h}": part for h, part in enumerate(parts[:-1])}
        varies = hasattr(block.ln1_post, "scale") and attn.output.bias is not None
        if varies:
            heads_wrote[f"a{n}.bias"] = parts[-1]
        if config.parallel:
            read = stream(f"m{n}")
        current |= heads_wrote
        fixed = fixed + getattr(block.ln1_post, "bias", torch.zeros(())) + (0 if varies else bias)
        if config.mlp == "none":
            continue
        if not config.parallel:
            read = stream(f"m{n}")
        out = block.mlp(normed(block.ln2, config, read)[0])
        current[f"m{n}"] = normed(block.ln2_post, config, out)[0]
    return model.unembed(stream("logits")), current
