"""Small models of many forms, and their continuations by full reruns, for tests of generation."""

import functools

import torch

from models import RotaryBase, Transformer, TransformerConfig
from tests import tiny

VOCAB, N_CTX, LAYERS, HEADS = 29, 19, 3, 4
NEW = 6
SIZES = dict(vocab_size=VOCAB, n_ctx=N_CTX, n_layers=LAYERS, n_heads=HEADS, d_model=20, d_mlp=11)
FORMS = {
    "learned": {},
    "rotary": dict(positions="rotary", d_head=6, n_kv_heads=2, mlp="gated", norm="rmsnorm"),
    "sinusoidal": dict(positions="sinusoidal", norm_place="post"),
    "window": dict(window=3),
    "windows": dict(positions="rotary", d_head=6, window=4, window_layers=(0, 2), parallel=True),
    "window with own base": dict(positions="rotary", d_head=6, window=4, window_layers=(1,))
    | dict(window_rotary=RotaryBase(theta=20.0)),
    "capped": dict(attn_cap=1.5, logit_cap=9.0, norm_place="sandwich"),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9], [28]]


@torch.no_grad()
def enlarged(model):
    """Add random numbers to the weights of a model, and return it."""
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * (0.1 if parameter.ndim == 1 else 0.5))
    return model


def mistral():
    """Return a random Mistral of `transformers` in which every weight matters."""
    sizes = dict(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    return enlarged(tiny.model("MistralForCausalLM", **sizes, sliding_window=4))


@functools.cache
def build(form="learned"):
    """Return a random model in which every weight matters, and that does not repeat one token
    forever.
    """
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return enlarged(Transformer(TransformerConfig(**SIZES | FORMS[form])).eval())


@torch.no_grad()
def continued(model, prompt, new=NEW, choose=torch.argmax, run=None, stop=()):
    """Return a prompt with its continuation.

    The model reads the whole text again for each token.
    """
    text = list(prompt)
    for _ in range(new):
        text.append(int(choose((run or model)(torch.tensor([text]))[0, -1])))
        if text[-1] in stop:
            break
    return text
