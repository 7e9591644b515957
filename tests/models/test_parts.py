"""The modules of a model without the model: each computes its equations from a config and a
mask.
"""

import copy
import pickle

import pytest
import torch

from models import MLP, GatedMLP
from models.attention import attention_of
from models.block import block_of
from models.mlp import mlp_of
from tests.reference import FORMS, POS, Reference, some_tokens, tolerance, variant

MASK = torch.rand(POS, POS, generator=torch.Generator().manual_seed(3)) > 0.4
ALONE = [*FORMS, "attn_cap", "gated", "window of one layer", "attn_scale by layer", "like llama"]


MASKED = [("pre", MASK), ("pre", MASK[None]), ("window", MASK.expand(5, 6, -1, -1))]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "mask"), [(name, None) for name in ALONE] + MASKED)
def test_parts_compute_what_their_config_says(name, mask):
    """A module that is built from a config returns the same numbers as inside a model."""
    model = variant(name)
    reference, config = Reference(model), model.config
    reference(some_tokens(), None if mask is None else mask.expand(5, 6, -1, -1).numpy())
    for layer, inside in enumerate(model.blocks):
        parts = [(inside, block_of(config, layer), "resid_pre", "resid_post")]
        if config.norm_place == "pre":
            parts += [(inside.attn, attention_of(config, layer), "ln1.normalized", "attn_out")]
            if config.mlp != "none":
                parts += [(inside.mlp, mlp_of(config), "ln2.normalized", "mlp_out")]
        for theirs, part, *points in parts:
            part.double().load_state_dict(theirs.state_dict())
            x, expected = (torch.tensor(reference.values[f"blocks.{layer}.{at}"]) for at in points)
            for same in (part, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
                out = same(x) if isinstance(part, MLP) else same(x, mask)
                torch.testing.assert_close(out, expected, atol=tolerance(config), rtol=0)
                assert repr(same) == repr(theirs)


def test_forms_by_config():
    assert type(block_of(variant("post").config)).__name__ == "PostNormBlock"
    assert type(mlp_of(variant("gated").config)) is GatedMLP
    with pytest.raises(ValueError, match="'none'"):
        MLP(variant("attention only").config)
