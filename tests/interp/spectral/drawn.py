"""Random matrices in float64, and a comparison with arrays of numpy."""

import numpy as np
import torch


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, wanted):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * max(1, abs(wanted).max()))
