"""Random models of `transformers` whose every parameter matters."""

import torch


def shaken(model):
    """The model in eval mode, with weights large enough that each matters, gains and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()
