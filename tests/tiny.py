"""Tiny random models of `transformers`. A test states only the sizes that it needs."""

import pytest
import torch

SIZES = dict(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    max_position_embeddings=19,
    pad_token_id=None,
    eos_token_id=None,
)
"""The sizes of a model with one stack of blocks. They differ, so a test finds swapped axes."""
STACKS = dict(
    encoder_layers=SIZES["num_hidden_layers"],
    encoder_attention_heads=SIZES["num_attention_heads"],
    encoder_ffn_dim=13,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=15,
)
"""The sizes of BART and similar models, which have an encoder and a decoder."""


def known(kind, sizes):
    """Return the sizes that a class of configs stores. `from_hf` rejects other sizes.

    Falcon and ProphetNet compute some sizes and do not store them.
    """
    computed = {name for name in dir(kind) if isinstance(getattr(kind, name), property)}
    names = {*vars(kind()), *dir(kind), *kind.attribute_map} - computed
    return {name: size for name, size in sizes.items() if name in names}


def named(name):
    """Return a class of `transformers`. If this version does not have it, the test is skipped."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    return getattr(transformers, name)


def config(name, **sizes):
    """Return the config of a class of models, such as "LlamaForCausalLM", or of a class of configs.

    Args:
        name: the name of the class in `transformers`.
        sizes: sizes and other settings, which replace `SIZES`. The names in `SIZES` are valid for
            all models: the hidden_size of GPT-2 is `n_embd`.
    """
    kind = getattr(named(name), "config_class", named(name))
    own_names, chosen = kind.attribute_map, {}
    for choice in (sizes, known(kind, STACKS), known(kind, SIZES)):
        for size, value in choice.items():
            chosen.setdefault(own_names.get(size, size), value)
    return kind(**chosen)


def model(name, seed=0, **sizes):
    """Return a random model of a class, the same at each call. `config` explains the arguments."""
    settings = config(name, **sizes)
    torch.manual_seed(seed)
    return named(name)(settings).eval()


@torch.no_grad()
def redraw(module, scale):
    """Draw the weights of a model again, so large that every part changes the output.

    Weights with one axis, which are gains and biases, are near 1.
    """
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape) * scale + float(weight.ndim == 1))
    return module


def t5():
    """Return a random T5 model in float64, the same at each call."""
    sizes = dict(d_ff=13, pad_token_id=0, decoder_start_token_id=1)
    return redraw(model("T5ForConditionalGeneration", **sizes).double(), 0.3)


def padded(texts, side="right"):
    """Return the tokens and the mask of texts, padded with the token 0."""
    n_columns = max(map(len, texts))
    tokens = torch.zeros(len(texts), n_columns, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        columns = slice(0, len(text)) if side == "right" else slice(n_columns - len(text), None)
        tokens[row, columns] = torch.tensor(text)
        mask[row, columns] = 1
    return tokens, mask
