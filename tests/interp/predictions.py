"""The logit lens, computed from the blocks of a model."""

import torch


def predictions(model, tokens):
    """Return the probabilities of the logit lens, [layer, batch, pos, vocab].

    The streams come from a forward pass, and the unembedding is computed here in float64.
    """
    with torch.no_grad():
        context = model.context(tokens)
        streams = [model.input_resid(tokens, context)]
        for block in model.blocks:
            streams.append(block(streams[-1], context))
        x = torch.stack(streams).double()
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
        x = x * model.ln_final.weight.double() + model.ln_final.bias.double()
        exponentials = (x @ model.unembedding.weight.double().T).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)
