"""The equations of a transformer in numpy and float64, one head and one query at a time.

They are written from the papers, to test `models.Transformer`. From the plain model they use only
the fields of its config and the names of its weights. They return every value that has a hook
point.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

VOCAB, N_CTX, LAYERS, HEADS, KV_HEADS, D_HEAD, D_MODEL, D_MLP = 23, 17, 2, 6, 3, 8, 10, 13
BATCH, POS = 5, 7
SIZES = dict(vocab_size=VOCAB, n_ctx=N_CTX, n_layers=LAYERS, n_heads=HEADS)
SIZES |= dict(d_model=D_MODEL, d_head=D_HEAD, d_mlp=D_MLP)

ROTARY = dict(positions="rotary")
LLAMA = ROTARY | dict(norm="rmsnorm", n_kv_heads=KV_HEADS, mlp="gated", activation="silu")
LLAMA |= dict(qkv_bias=False, out_bias=False, mlp_bias=False, tied_unembed=False)


def _read(fields):
    """Return a JSON object with tuples for lists, and with a `RotaryBase` as `window_rotary`."""
    from models import RotaryBase

    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    if "window_rotary" in fields:
        fields["window_rotary"] = RotaryBase(**fields["window_rotary"])
    return fields


# `FORMS` are configs of all block forms. `SWITCHES` are single options that change the computation.
_VARIANTS = json.loads(Path(__file__).with_name("variants.json").read_text(), object_hook=_read)
FORMS, SWITCHES = _VARIANTS["forms"], _VARIANTS["switches"]
VARIANTS = FORMS | SWITCHES


def randomised(config, seed=0, scale=0.4):
    """Return a model with random weights. No gain is one and no bias is zero, so all matter."""
    from models import Transformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def variant(name, **changes):
    """Return a randomised model of a form or a switch, in float64."""
    from models import TransformerConfig

    return randomised(TransformerConfig(**SIZES | VARIANTS[name] | changes)).double()


def separately(model, texts, edits, metric=None, attention_mask=None):
    """Return effects [edit, example] from a separate run of the whole model for each edit."""
    from interp import Pairs
    from interp.measuring import measure
    from interp.runs.runs import Runs

    pairs = texts if isinstance(texts, Pairs) else Pairs(texts, attention_mask=attention_mask)
    runs = Runs(model, pairs if metric is None else pairs.measured_by(metric))
    mask = runs.text.of_logits.attention_mask
    base, *edited = (measure(runs.metric, runs.logits(each), mask) for each in [{}, *edits])
    return torch.stack(edited).detach() - base


def some_tokens(seed=1, shape=(BATCH, POS)):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def masked(mask):
    """Return a mask as a keyword of a model.

    A mask with more than two axes is a `query_key_mask`. Otherwise it is an `attention_mask`. A
    mask [query, key] is not supported.
    """
    by_query = mask is not None and mask.ndim > 2
    return {"query_key_mask" if by_query else "attention_mask": mask}


def tolerance(config):
    """Return how far a model may be from the equations.

    Models compute the angles of rotary and sinusoidal positions in float32. Its rounding is 6e-8 of
    an angle, and angles are at most 17 radians.
    """
    return 2e-5 if config.positions in ("rotary", "sinusoidal") else 1e-11


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def activate(kind, x):
    return {
        "gelu": lambda: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
        "gelu_tanh": lambda: (
            0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        ),
        "relu": lambda: np.where(x > 0, x, 0.0),
        "silu": lambda: x / (1 + np.exp(-x)),
        "solu": lambda: x * np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    }[kind]()


def sinusoids(positions, d_model):
    out = np.zeros((*positions.shape, d_model))
    for i in range(d_model // 2):
        angle = positions / 10_000 ** (2 * i / d_model)
        out[..., 2 * i], out[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    return out


def rotated(x, positions, theta, d_rotary, pairs):
    """Return x [batch pos head d_head] after the rotation of rotary positions.

    Each pair of dimensions is treated as a complex number, and multiplied by exp(i angle).
    """
    half, out = d_rotary // 2, x.copy()
    for i in range(half):
        one, other = (i, i + half) if pairs == "halves" else (2 * i, 2 * i + 1)
        angle = positions * theta ** (-2 * i / d_rotary)
        turned = (x[..., one] + 1j * x[..., other]) * np.exp(1j * angle)[..., None]
        out[..., one], out[..., other] = turned.real, turned.imag
    return out


class Reference:
    """The equations with the weights of a model.

    Attributes:
        values: the values of the last call, by the names of their hook points.
    """

    def __init__(self, model):
        self.config = model.config
        self.weights = {n: w.detach().double().numpy() for n, w in model.state_dict().items()}

    def __call__(self, tokens, allowed=None):
        """Return the logits. `allowed` [batch head query key] replaces causal mask and windows."""
        config, self.values = self.config, {}
        tokens = np.asarray(tokens)
        self.positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        resid = self.weights["token_embedding.weight"][tokens] * config.embed_scale
        self.keep("embed", resid)
        if config.positions == "learned":
            table = self.weights["position_embedding.weight"]
            resid = resid + self.keep("pos_embed", table[self.positions])
        if config.positions == "sinusoidal":
            added = sinusoids(self.positions, config.d_model)
            resid = resid + self.keep("pos_embed", added)
        if config.embed_norm:
            resid = self.norm(resid, "ln_embed")
        for layer in range(config.n_layers):
            resid = self.block(resid, layer, allowed)
        if config.final_norm:
            resid = self.norm(resid, "ln_final")
        logits = self.linear(resid, "unembedding")
        return self.capped(logits, config.logit_cap)

    def keep(self, name, value):
        self.values[name] = value
        return value

    def linear(self, x, at):
        return x @ self.weights[f"{at}.weight"].T + self.weights.get(f"{at}.bias", 0.0)

    @staticmethod
    def capped(x, cap):
        return cap * np.tanh(x / cap) if cap else x

    def norm(self, x, at):
        if self.config.norm == "none":
            return x
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)
        gain = self.weights.get(f"{at}.weight", 1.0)
        self.keep(f"{at}.scale", scale)
        return self.keep(f"{at}.normalized", x / scale * gain + self.weights.get(f"{at}.bias", 0.0))

    def block(self, resid, layer, allowed):
        config, at = self.config, f"blocks.{layer}"
        before = config.norm_place in ("pre", "sandwich")
        after = config.norm_place in ("output", "sandwich")

        def sublayer(function, x, n, name):
            x = function(self.norm(x, f"{at}.ln{n}") if before else x)
            x = self.norm(x, f"{at}.ln{n}_post") if after else x
            return self.keep(f"{at}.{name}", x)

        def joined(resid, added, n):
            return (
                self.norm(resid + added, f"{at}.ln{n}")
                if config.norm_place == "post"
                else resid + added
            )

        start = self.keep(f"{at}.resid_pre", resid)
        added = sublayer(lambda x: self.attention(x, layer, allowed), start, 1, "attn_out")
        resid = joined(start, added, 1)
        if config.mlp != "none":
            if not config.parallel:
                self.keep(f"{at}.resid_mid", resid)
            read = start if config.parallel else resid
            resid = joined(
                resid, sublayer(lambda x: self.mlp(x, f"{at}.mlp"), read, 2, "mlp_out"), 2
            )
        return self.keep(f"{at}.resid_post", resid)

    def mlp(self, x, at):
        inner, kind = self.linear(x, f"{at}.input"), self.config.activation
        if self.config.mlp == "plain":
            hidden = activate(kind, self.keep(f"{at}.pre", inner))
            if self.config.mlp_norm:
                hidden = self.keep(f"{at}.mid", hidden)
                hidden = hidden - hidden.mean(-1, keepdims=True)
                scale = np.sqrt((hidden**2).mean(-1, keepdims=True) + self.config.norm_eps)
                self.keep(f"{at}.ln.scale", scale)
                gain, bias = (
                    self.weights.get(f"{at}.ln.{end}", d) for end, d in (("weight", 1), ("bias", 0))
                )
                hidden = self.keep(f"{at}.ln.normalized", hidden / scale * gain + bias)
        else:
            gate = activate(kind, self.keep(f"{at}.pre", self.linear(x, f"{at}.gate")))
            hidden = gate * self.keep(f"{at}.linear", inner)
        return self.linear(self.keep(f"{at}.post", hidden), f"{at}.output")

    def attention(self, x, layer, allowed):
        config, at = self.config, f"blocks.{layer}.attn"
        heads, kv_heads, d_head = config.n_heads, config.n_kv_heads, config.d_head
        batch, pos = x.shape[:2]
        ends = np.cumsum([0, heads * d_head, kv_heads * d_head, kv_heads * d_head])
        q, k, v = (self.linear(x, f"{at}.qkv")[..., ends[i] : ends[i + 1]] for i in range(3))
        q, k = self.qk_norm(q, f"{at}.q_norm"), self.qk_norm(k, f"{at}.k_norm")
        q, k, v = (part.reshape(batch, pos, -1, d_head) for part in (q, k, v))
        if config.positions == "rotary":
            d_rotary = round(d_head * config.rotary_fraction)
            has_base = config.window_rotary and layer in config.window_layers
            theta = config.window_rotary.theta if has_base else config.rotary_theta
            turn = (theta, d_rotary, config.rotary_pairs)
            q, k = (rotated(p, self.positions, *turn) for p in (q, k))
        for name, value in (("q", q), ("k", k), ("v", v)):
            self.keep(f"{at}.{name}", value)
        scale = config.attn_scale or 1 / math.sqrt(d_head)
        if config.attn_scale_by_layer:
            scale /= layer + 1
        scores, pattern = np.zeros((2, batch, heads, pos, pos))
        z = np.zeros(q.shape)
        for row, head, query in np.ndindex(batch, heads, pos):
            of = head // (heads // kv_heads)
            for key in range(pos):
                scores[row, head, query, key] = scale * (q[row, query, head] @ k[row, key, of])
            seen = [
                key
                for key in range(pos)
                if (
                    self.sees(layer, query, key)
                    if allowed is None
                    else allowed[row, head, query, key]
                )
            ]
            if seen:
                weights = softmax(self.capped(scores[row, head, query, seen], config.attn_cap))
                pattern[row, head, query, seen] = weights
                z[row, query, head] = sum(
                    w * v[row, key, of] for w, key in zip(weights, seen, strict=True)
                )
        for name, value in (("scores", scores), ("pattern", pattern), ("z", z)):
            self.keep(f"{at}.{name}", value)
        return self.linear(z.reshape(batch, pos, -1), f"{at}.output")

    def sees(self, layer, query, key):
        config = self.config
        near = layer in (config.window_layers or range(config.n_layers)) and config.window
        if not config.causal:
            return True
        return key <= query and (not near or query - key < config.window)

    def qk_norm(self, x, at):
        """Normalize x [batch pos d], for each head or as one vector."""
        if self.config.qk_norm == "none":
            return x
        size = self.config.d_head if self.config.qk_norm == "head" else x.shape[-1]
        parts = x.reshape(*x.shape[:2], -1, size)
        root = np.sqrt((parts**2).mean(-1, keepdims=True) + self.config.norm_eps)
        return (parts / root * self.weights.get(f"{at}.weight", 1.0)).reshape(x.shape)
