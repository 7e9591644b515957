"""Direct effects in a frozen run: they add up, and are those of a model whose norms and attention cannot react."""

import pytest
import torch

from interp.effects.frozen import FrozenRun
from interp.features import Dictionary, Gated, TopK
from models import Transformer, TransformerConfig

FORMS = {
    "plain": {},
    "rms": {"norm": "rmsnorm", "positions": "rotary", "n_kv_heads": 2},
    "output": {"norm_place": "output"},
    "sandwich": {"norm_place": "sandwich", "norm": "rmsnorm"},
    "parallel": {"parallel": True},
}


def frozen(form, text=((3, 1, 4, 1, 5),)):
    """A run with transcoders in two of three layers, one of them with a skip connection."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "n_ctx": 11, "n_layers": 3, "n_heads": 4, "d_model": 8, "d_mlp": 13}
    model = Transformer(TransformerConfig(**sizes, **FORMS[form])).double().eval()
    for weight in model.parameters():  # gains and biases too
        weight.data += 0.3 * torch.randn_like(weight)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    def transcoder(skip):
        weights = drawn(8, 17), drawn(17, 8), drawn(17), drawn(8)
        return Dictionary(*weights, TopK(5), W_skip=skip, reads="ln2.normalized", transcodes=True)

    dictionaries = {
        "blocks.0.mlp_out": transcoder(drawn(8, 8)),
        "blocks.2.mlp_out": transcoder(None),
    }
    return FrozenRun(model, torch.tensor(text), dictionaries)


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_of_a_row_add_up_to_the_pre_activation(form):
    row = frozen(form).row(2, -1, 6)
    assert abs(row.gap) < 1e-10 * max(1, abs(row.total))
    assert row.features[0].abs().max() > 1e-3
    assert {*row.errors} == {0, 1}


def test_a_transcoder_that_is_not_linear_or_stands_elsewhere_is_refused():
    one = torch.ones(8)
    gated = Dictionary(torch.eye(8), torch.eye(8), one, one, Gated(one, one, one), transcodes=True)
    model = frozen("plain").graph.model.float()
    tokens = torch.tensor([[3, 1]])
    with pytest.raises(ValueError, match="gate"):
        FrozenRun(model, tokens, {"blocks.0.mlp_out": gated})
    with pytest.raises(ValueError, match="must stand at"):
        FrozenRun(model, tokens, {"blocks.0.resid_post": gated})
    with pytest.raises(ValueError, match="must be one"):
        FrozenRun(model, tokens.expand(2, -1), {})
