"""Folders that `Dictionary.save` writes: read again, and compared with files that SAELens wrote."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from interp.features import (
    Dictionary,
    Gated,
    GroupMax,
    JumpReLU,
    MatchingPursuit,
    TopK,
    load_sae,
    load_transcoders,
)
from tests.interp.features.fixtures import FIXTURES

D_IN, FEATURES, D_OUT = 3, 5, 2
SETTINGS = ("reads", "writes", "head", "norm", "subtracts_b_dec", "is_transcoder")
SAE_LENS = ["cfg.json", "sae_weights.safetensors"]
OWN = ["dictionary.safetensors"]


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def made(activation, d_out=D_IN, **settings):
    weights = dict(
        W_enc=drawn(D_IN, FEATURES),
        W_dec=drawn(FEATURES, d_out),
        b_enc=torch.zeros(FEATURES) if isinstance(activation, Gated) else drawn(FEATURES),
        b_dec=drawn(d_out),
    )
    return Dictionary(**weights | settings, activation=activation)


def assert_same(one, other):
    """Check weights, settings, features and outputs. No weight is computed on the way, so weights
    are equal bit by bit. Their strides may differ, so products may be rounded differently.
    """
    assert type(one) is type(other)
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    for name in SETTINGS:
        assert getattr(one, name) == getattr(other, name), name
    assert f"{one}" == f"{other}"
    x = drawn(7, one.d_in)
    assert_close(one.encode(x), other.encode(x))
    assert_close(one(x), other(x))


def saved(dictionary, folder):
    dictionary.save(folder)
    return load_sae(folder)


IN_SAE_LENS = {
    "relu": dict(activation=nn.ReLU(), subtracts_b_dec=True, reads="blocks.2.resid_post"),
    "unnamed": dict(activation=nn.ReLU()),
    "top_k": dict(activation=TopK(2), norm="layer_norm"),
    "largest": dict(activation=TopK(2, "size", relu=False), norm="constant_norm_rescale"),
    "jump": dict(activation=JumpReLU(drawn(FEATURES)), reads="blocks.2.attn.z", head=3),
    "gated": dict(activation=Gated(drawn(FEATURES), drawn(FEATURES), drawn(FEATURES))),
    "transcoder": dict(activation=nn.ReLU(), d_out=D_OUT, writes="blocks.2.mlp_out"),
    "skip": dict(activation=nn.ReLU(), d_out=D_OUT, W_skip=drawn(D_IN, D_OUT)),
    "jump_skip": dict(activation=JumpReLU(drawn(FEATURES)), d_out=D_OUT, W_skip=drawn(D_IN, D_OUT)),
}
ONLY_HERE = {
    "top_k_skip": dict(activation=TopK(2), W_skip=drawn(D_IN, D_IN), head=1),
    "top_k_signed": dict(activation=TopK(2, relu=False)),
    "groups": dict(activation=GroupMax(5), subtracts_b_dec=True),
    "negative": dict(activation=JumpReLU(drawn(FEATURES), relu=False)),
    "linear": dict(activation=nn.Identity(), norm="layer_norm"),
    "two_points": dict(activation=nn.ReLU(), reads="a", writes="b", transcodes=False),
    "skip_of_one_point": dict(activation=nn.ReLU(), transcodes=False, W_skip=drawn(D_IN, D_IN)),
    "gate_and_bias": dict(activation=Gated(*drawn(3, FEATURES)), b_enc=drawn(FEATURES)),
    "minus": dict(activation=nn.ReLU(), transcodes=True, subtracts_b_dec=True),
}
READ_BY_SAE_LENS = [
    f"sae_lens_{name}"
    for name in (
        *("abstopk", "end_batchtopk", "end_jumprelu", "end_matryoshka", "gated"),
        *("gated_layer_norm", "jumprelu", "jumprelu_skip_transcoder", "jumprelu_transcoder"),
        *("matching_pursuit", "skip_transcoder", "standard", "standard_hook_z"),
        *("standard_layer_norm", "standard_no_b_dec", "standard_rescaled", "topk"),
        *("topk_rescaled", "transcoder", "transcoder_layer_norm"),
    )
]


@pytest.mark.parametrize("name", IN_SAE_LENS | ONLY_HERE)
def test_a_dictionary_of_one_s_own_is_read_as_it_was_saved(name, tmp_path):
    settings = (IN_SAE_LENS | ONLY_HERE)[name]
    if "reads" in settings:
        settings = {"writes": settings["reads"], **settings}
    mine = made(**settings)
    assert_same(mine, saved(mine, tmp_path / "sae"))
    files = SAE_LENS if name in IN_SAE_LENS else OWN
    assert sorted(path.name for path in (tmp_path / "sae").iterdir()) == files


def of_sae_lens(folder):
    """Return the config and the weights in the files of SAELens in a folder."""
    config = json.loads((folder / "cfg.json").read_text())
    return config, load_file(folder / "sae_weights.safetensors")


@pytest.mark.parametrize("name", READ_BY_SAE_LENS)
def test_saved_files_are_the_files_that_sae_lens_wrote(name, tmp_path):
    """SAELens wrote the files of the fixture, so it reads files with the same content."""
    load_sae(FIXTURES / name).save(tmp_path)
    config, weights = of_sae_lens(FIXTURES / name)
    our_config, our_weights = of_sae_lens(tmp_path)
    # SAELens writes null for the size of the input, which is the number that it then uses.
    if config.get("max_iterations", 0) is None:
        config["max_iterations"] = config["d_in"]
    assert our_config == config
    assert our_weights.keys() == weights.keys()
    for key, weight in weights.items():
        assert torch.equal(our_weights[key], weight), key


@pytest.mark.parametrize(
    "name", ["sae_lens_old", "sae_lens_factor", "sparsify_transcoder/layers.1.mlp", "gemma_scope_2"]
)
def test_a_dictionary_of_other_files_is_read_as_it_was_saved(name, tmp_path):
    options = {"norm_factor": 1.7} if name == "sae_lens_factor" else {}
    original = load_sae(FIXTURES / name, **options)
    assert_same(original, saved(original, tmp_path))


def test_transcoders_are_saved_one_by_one(tmp_path):
    original = load_transcoders("pydoc-4l/transcoders")["blocks.1.mlp_out"]
    assert_same(original, saved(original, tmp_path))


def test_half_precision_is_kept_on_request(tmp_path):
    made(TopK(2)).to(torch.bfloat16).save(tmp_path)
    assert load_sae(tmp_path, dtype=torch.bfloat16).W_enc.dtype == torch.bfloat16
    assert torch.equal(load_sae(tmp_path).W_enc, drawn(D_IN, FEATURES).bfloat16().float())


def test_weights_may_share_memory(tmp_path):
    """The encoder of a tied dictionary is a view of its decoder."""
    eye, zeros = torch.eye(3), torch.zeros(3)
    tied = Dictionary(eye, eye, zeros, zeros, nn.ReLU())
    assert_same(tied, saved(tied, tmp_path))


def test_a_single_threshold_becomes_one_for_each_feature(tmp_path):
    one = made(JumpReLU(torch.tensor(0.25)))
    again = saved(one, tmp_path)
    assert again.activation.threshold.tolist() == [0.25] * FEATURES
    x = drawn(7, D_IN)
    assert_close(again(x), one(x))


def test_a_threshold_keeps_its_precision(tmp_path):
    one = made(JumpReLU(drawn(FEATURES).double() / 3))
    assert torch.equal(saved(one, tmp_path).activation.threshold, one.activation.threshold)


def test_the_config_says_what_sae_lens_must_know(tmp_path):
    """SAELens reads a config without a version with other defaults, and joins the heads of `z` if
    the config says so.
    """
    z = "blocks.2.attn.z"
    for head, reshaping in ((None, "hook_z"), (3, "none")):
        made(nn.ReLU(), reads=z, writes=z, head=head).save(tmp_path)
        config, _ = of_sae_lens(tmp_path)
        assert config["reshape_activations"] == reshaping
        assert config["metadata"]["sae_lens_version"].startswith("6.")


def test_facts_of_the_config_are_kept(tmp_path):
    here = saved(made(nn.ReLU(), config={"model_name": "mine", "steps": 7}), tmp_path / "a")
    assert here.config["metadata"].items() >= {"model_name": "mine", "steps": 7}.items()
    assert saved(here, tmp_path / "b").config == here.config
    own = made(TopK(2, relu=False), config={"model_name": "mine", "steps": 7})
    assert saved(own, tmp_path / "c").config == own.config


def test_a_dictionary_that_no_file_can_contain_is_an_error(tmp_path):
    class Mine(nn.ReLU):
        pass

    with pytest.raises(TypeError, match="Mine"):
        made(Mine()).save(tmp_path / "sae")
    with pytest.raises(ValueError, match="temporal"):
        load_sae(FIXTURES / "sae_lens_temporal").save(tmp_path / "sae")
    with pytest.raises(ValueError, match="folder"):
        made(nn.ReLU()).save(tmp_path / "sae.png")
    pursuit = MatchingPursuit(drawn(FEATURES, D_IN), drawn(D_IN), 0.1, reads="a", writes="b")
    with pytest.raises(ValueError, match="matching pursuit"):
        pursuit.save(tmp_path / "sae")
    assert not [*tmp_path.iterdir()]


def test_pages_and_numbers_are_saved_as_files(tmp_path):
    made(nn.ReLU()).save(tmp_path / "sae.html")
    made(nn.ReLU()).save(tmp_path / "sae.json")
    assert json.loads((tmp_path / "sae.json").read_text())["kind"] == "Dictionary"
