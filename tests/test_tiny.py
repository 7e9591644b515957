"""The configs of tiny models have the sizes of the test, and otherwise sizes that all differ."""

import pytest

from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")


def test_sizes_differ():
    sizes = [size for size in tiny.SIZES.values() if size is not None]
    assert len({*sizes}) == len(sizes) == 8


def test_a_config_may_have_other_names():
    config = tiny.config("GPT2LMHeadModel", num_hidden_layers=5)
    assert (config.vocab_size, config.n_embd, config.n_layer, config.n_head) == (23, 12, 5, 2)
    assert not {"head_dim", "num_key_value_heads", "intermediate_size"} & {*vars(config)}


@pytest.mark.parametrize("name", ["hidden_size", "n_embd"])
def test_a_size_of_the_test_replaces_the_size_by_each_of_its_names(name):
    assert tiny.config("GPT2Config", **{name: 20}).n_embd == 20


def test_an_encoder_and_a_decoder_have_different_sizes():
    config = tiny.config("WhisperForConditionalGeneration")
    assert (config.encoder_layers, config.decoder_layers) == (3, 2)
    # Whisper's config also calls this number num_key_value_heads.
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 4)


@pytest.mark.parametrize("name", ["FalconConfig", "ProphetNetConfig"])
def test_sizes_that_a_config_computes_are_left_out(name):
    kind = tiny.named(name)
    computed = {size for size in tiny.SIZES if isinstance(getattr(kind, size, None), property)}
    assert computed
    assert not computed & {*tiny.known(kind, tiny.SIZES)}
    assert tiny.config(name).hidden_size == 12


def test_a_class_of_another_version_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="NoSuchModel"):
        tiny.model("NoSuchModel")


def test_a_model_depends_on_its_seed_only():
    one, same, other = (tiny.model("LlamaForCausalLM", seed) for seed in (3, 3, 4))
    weights = [model.lm_head.weight for model in (one, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert not one.training
