"""`from_transformer_lens` and `load`, compared with models of TransformerLens 2.16
(transformer_lens/make.py).
"""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models import KVCache, fold_norms, from_transformer_lens, generate, load
from tests.transformer_lens import names, read

REFUSED = {
    "alibi": "positional_embedding_type must be one of",
    "experts": "num_experts must be None; got 3",
    "final_rms": "final_rms must be False; got True",
    "post_embedding_ln": "post_embedding_ln must be False",
    "shortformer": r"shortformer positions \(.*\) are not supported; use .* got 'shortformer'",
}
# This package computes angles in float32, like transformers. TransformerLens computes them in
# float64.
ROTARY = 3e-8
CENTRED = "ignore:TransformerLens centred these weights"


def converted(name, **changes):
    theirs = read(name)
    return theirs, from_transformer_lens(theirs.state, theirs.config | changes)


def close(found, expected, tolerance=1e-11):
    size = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * size)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings(CENTRED)
@pytest.mark.parametrize("name", [name for name in names() if name not in REFUSED])
def test_logits_match_transformer_lens(name):
    theirs, model = converted(name)
    tolerance = ROTARY if model.config.positions == "rotary" else 1e-11
    close(model(theirs.tokens), theirs.logits, tolerance)
    close(model.float()(theirs.tokens).double(), theirs.logits, 1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_expressed_are_errors_that_name_them(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        converted(name)


def test_a_model_brings_its_config_and_its_tokenizer():
    theirs = read("local")
    model = nn.Module()
    for key, value in theirs.state.items():
        at = model
        *path, last = key.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_buffer(last, value)
    model.cfg = SimpleNamespace(to_dict=lambda: theirs.config)
    close(from_transformer_lens(model)(theirs.tokens), theirs.logits)


@pytest.mark.parametrize("name", ["ln", "solu_ln", "rms", "local"])
def test_without_a_config_a_warning_names_the_assumptions(name):
    theirs = read(name)
    with pytest.warns(UserWarning, match=r"attention_dir='causal', eps=1e-05"):
        model = from_transformer_lens({k: v for k, v in theirs.state.items() if "mask" not in k})
    assert (model.config.activation == "solu") == (name == "solu_ln")
    # Without masks in the file, only the model "local" is loaded differently.
    if name != "local":
        close(model(theirs.tokens), theirs.logits)
    else:
        with (
            pytest.warns(UserWarning, match="no config"),
            pytest.raises(ValueError, match=r"attn\.mask .* attn_types"),
        ):
            from_transformer_lens(theirs.state)


@pytest.mark.parametrize("name", ["ln_pre", "rms_pre", "no_norm", "attn_only_no_norm"])
def test_without_a_config_an_open_question_is_asked(name):
    with pytest.raises(ValueError, match="normalization_type"):
        from_transformer_lens(read(name).state)


def test_a_part_of_a_config_is_enough():
    theirs = read("ln_pre")
    part = {"normalization_type": "LNPre", "act_fn": "gelu_new"}
    close(from_transformer_lens(theirs.state, part)(theirs.tokens), theirs.logits)
    ours = converted("ln_pre")[1].config
    close(from_transformer_lens(theirs.state, ours)(theirs.tokens), theirs.logits)
    with pytest.raises(ValueError, match="act_fn"):
        from_transformer_lens(theirs.state, {"normalization_type": "LNPre"})


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("rotary", dict(rotary_base=100), "rotary_(cos|sin) .* rotary fields"),
        ("rotary", dict(rotary_adjacent_pairs=True), "rotary_"),
        ("rotary", dict(positional_embedding_type="standard"), "missing: pos_embed.W_pos"),
        ("local", dict(window_size=4), "mask .* attn_types and window_size"),
        ("local", dict(attn_types=["local", "local"]), r"blocks\.0\.attn\.mask"),
        ("ln", dict(normalization_type="LNPre"), "unexpected: blocks.0.ln1.b, blocks.0.ln1.w"),
        ("ln_pre", dict(normalization_type="LN"), None),
        ("gated", dict(gated_mlp=False), "unexpected: .*mlp.W_gate"),
        ("ln", dict(act_fn="tanh"), "act_fn must be one of solu, solu_ln, gelu"),
        ("ln", dict(normalization_type="BN"), "normalization_type must be LN, LNPre"),
        ("ln", dict(moe_router="x"), "moe_router .*leave them out"),
        ("gated", dict(act_fn="solu_ln"), "act_fn must be another activation in a gated"),
    ],
)
def test_a_config_that_is_not_of_the_weights_is_refused(name, change, error):
    # No error: the norm LNPre is LN with gains of 1.
    if error is None:
        theirs, model = converted(name, **change)
        close(model(theirs.tokens), theirs.logits)
        return
    with pytest.raises(ValueError, match=error):
        converted(name, **change)


def test_damaged_and_foreign_state_dicts_are_refused():
    theirs = read("ln")
    cut = {**theirs.state, "blocks.1.attn.W_O": theirs.state["blocks.1.attn.W_O"][:, :2]}
    with pytest.raises(ValueError, match=r"shape must be .* blocks\.1\.attn\.W_O"):
        from_transformer_lens(cut, theirs.config)
    less = {k: v for k, v in theirs.state.items() if k != "blocks.1.mlp.b_in"}
    with pytest.raises(ValueError, match=r"1 missing: blocks\.1\.mlp\.b_in"):
        from_transformer_lens(less, theirs.config)
    with pytest.raises(ValueError, match="classic names.*transformer.wte"):
        from_transformer_lens({"transformer.wte": torch.ones(2)})


def test_centred_weights_give_a_warning():
    with pytest.warns(UserWarning, match="centred these weights"):
        converted("processed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted("ln_pre")


@pytest.mark.parametrize("form", ["alone", "nested", "old zip", "safetensors", "config beside"])
def test_files_are_loaded(form, tmp_path):
    theirs = read("local")
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file({k: v.contiguous() for k, v in theirs.state.items()}, path)
    elif form == "nested":
        torch.save({"epoch": 3, "model": theirs.state, "cfg": theirs.config}, path)
    else:
        torch.save(theirs.state, path, _use_new_zipfile_serialization=form != "old zip")
    if form in ("config beside", "alone"):
        (tmp_path / "config.json").write_text(json.dumps(theirs.config))
    if form in ("nested", "config beside", "alone"):
        model = load(path)
    else:
        with (
            pytest.raises(ValueError, match=r"attn\.mask"),
            pytest.warns(UserWarning, match="no config"),
        ):
            load(path)
        model = from_transformer_lens(theirs.state, theirs.config)
    close(model(theirs.tokens), theirs.logits)
    assert model.tokenizer is None
    torch.save({"a": theirs.state, "b": theirs.state}, path)
    with pytest.raises(ValueError, match="must contain one state dict; got a, b"):
        load(path)


# --- operations that some forms do not support


def test_functions_that_need_causal_attention_are_errors_without_it():
    theirs, model = converted("bidirectional")
    with pytest.raises(ValueError, match="causal must be True to write texts"):
        generate(model, [1, 2], max_new_tokens=1)
    with pytest.raises(ValueError, match="causal=False"):
        model(theirs.tokens, kv_cache=KVCache())
    earlier = model(theirs.tokens)[0, 0]
    assert not torch.equal(earlier, model(theirs.tokens.flip(1)[:, [4, 1, 2, 3, 0]])[0, 0])


def test_another_output_vocabulary_is_an_error_in_generation():
    _, model = converted("out_vocab")
    assert model.W_U.shape == (5, 3)
    with pytest.raises(ValueError, match=r"vocab_size_out must be vocab_size \(13\)"):
        generate(model, [1, 2], max_new_tokens=1)


@pytest.mark.parametrize("name", ["solu_ln", "ln", "rms"])
def test_folded_weights_keep_the_probabilities(name):
    theirs, model = converted(name)
    folded = fold_norms(model)
    close(folded(theirs.tokens).log_softmax(-1), theirs.logits.log_softmax(-1), 1e-10)
    assert not any("ln" in name for name, _ in folded.named_parameters())


def test_a_share_of_rotated_dimensions_is_exact():
    """The share of rotated dimensions is 30 / 44. In floating-point numbers, 30 / 44 * 44 is less
    than 30, so it must be rounded.
    """
    weights = {
        key: torch.zeros(3, 5, 44) if ".W_" in key and ".attn" in key else value
        for key, value in read("rotary").state.items()
        if "rotary" not in key
    }
    weights |= {k: torch.zeros(3, 44, 5) for k in weights if k.endswith("W_O")}
    weights |= {k: torch.zeros(3, 44) for k in weights if k.endswith(("b_Q", "b_K", "b_V"))}
    fields = read("rotary").config | dict(d_head=44, rotary_dim=30)
    assert from_transformer_lens(weights, fields).config.d_rotary == 30
