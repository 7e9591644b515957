"""Dictionaries in the class of SAEBench, if that package is installed."""

import pytest
import torch
from torch import nn

from interp.features import Dictionary, TopK, for_saebench


def dictionary(activation=None, **options):
    draw = torch.Generator().manual_seed(0)
    W_enc, W_dec = (torch.randn(*size, generator=draw) for size in ((5, 11), (11, 5)))
    b_enc, b_dec = (torch.randn(size, generator=draw) for size in (11, 5))
    options = {"reads": "blocks.3.resid_post"} | options
    options |= {"writes": options["reads"]}
    return Dictionary(W_enc, W_dec, b_enc, b_dec, activation or nn.ReLU(), **options)


def test_saebench_gets_features_of_unit_rows():
    base = pytest.importorskip("sae_bench.custom_saes.base_sae", reason="needs sae-bench")
    ours = dictionary(subtracts_b_dec=True)
    made = for_saebench(ours, "gemma-2-2b")
    assert isinstance(made, base.BaseSAE)
    assert made.check_decoder_norms()
    assert (made.cfg.hook_name, made.cfg.hook_layer) == ("blocks.3.hook_resid_post", 3)
    assert (made.cfg.d_in, made.cfg.d_sae, made.cfg.dtype) == (5, 11, "float32")
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    lengths = ours.W_dec.norm(dim=1)
    torch.testing.assert_close(made.encode(x), ours.encode(x) * lengths)
    torch.testing.assert_close(made.decode(made.encode(x)), ours(x))
    torch.testing.assert_close(made(x), ours(x))
    torch.testing.assert_close(made.W_dec.norm(dim=1), torch.ones(11))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer_norm"}, "a norm"),
        ({"W_skip": torch.ones(5, 5)}, "a skip connection"),
        ({"transcodes": True}, "another output"),
        ({"reads": "blocks.3.resid_post.features"}, "hook_name must be"),
        ({"reads": None}, "hook_name must be"),
        ({"activation": TopK(3)}, "same length"),
    ],
)
def test_other_dictionaries_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        for_saebench(dictionary(**options), "gemma-2-2b")
