"""Random models of `transformers`, and their effects of hidden steps from 4-D masks."""

import torch

from tests import tiny

LAYERS, HEADS, POS, VOCAB, D_MODEL = 3, 4, 17, 31, 24
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=D_MODEL,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
)
GPT2 = ("GPT2LMHeadModel", {})
LLAMA = ("LlamaForCausalLM", dict(num_key_value_heads=2))


def random_model(name, sizes):
    """Return a model of `transformers` with enlarged weights, so that effects are large too."""
    model = tiny.model(name, **SIZES | sizes).requires_grad_(False)
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def by_masks(model, tokens, spans):
    """Return the effects [step, later]: the mean KL divergence at each later step's tokens.

    For each hidden step, the whole text runs once in a model of `transformers`, with a 4-D mask
    that hides the step from all later tokens.
    """
    tokens = torch.tensor([tokens])
    n = tokens.shape[1]

    def log_probs(visible):
        mask = torch.zeros(1, 1, n, n).masked_fill(~visible, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=torch.arange(n)[None]).logits
        return logits[0].double().log_softmax(-1)

    causal = torch.ones(n, n, dtype=torch.bool).tril()
    base = log_probs(causal)
    effects = torch.zeros(len(spans), len(spans), dtype=torch.double)
    for row, hidden in enumerate(spans):
        visible = causal.clone()
        visible[hidden.stop :, hidden.start : hidden.stop] = False
        edited = log_probs(visible)
        for column, later in enumerate(spans):
            # The model predicts token t at position t - 1.
            terms = [(base[t - 1].exp() * (base[t - 1] - edited[t - 1])).sum() for t in later if t]
            effects[row, column] = sum(terms) / len(terms)
    return effects
