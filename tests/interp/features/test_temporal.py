"""Temporal dictionaries, compared with numbers of SAELens (tests/dictionaries/make.py)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from hooks import HookedRunner
from interp import attribution_graph, edits
from interp.alignment.featurizers import of_dictionary
from interp.features import (
    AffineMap,
    ContextAttention,
    TemporalDictionary,
    TopK,
    evaluate_sae,
    feature_cards,
    for_saebench,
    load_sae,
    splice,
)
from interp.features.splicing import placed
from models import generate
from tests.interp.features.fixtures import FIXTURES, changed
from tests.shipped import pydoc

FOLDERS = ["sae_lens_temporal", "sae_lens_temporal_untied", "temporal/layer_12"]
CLOSE = {"atol": 5e-6, "rtol": 1e-5}


def read(name):
    if name.startswith("temporal"):
        pytest.importorskip("yaml", reason="conf.yaml needs PyYAML")
    return load_sae(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")


@pytest.mark.parametrize("name", FOLDERS)
def test_features_and_outputs_are_those_of_saelens(name):
    made, wanted = read(name)
    x = wanted["x"]
    features = made.encode(x)
    assert_close(features, wanted["features"], **CLOSE)
    assert_close(made(x), wanted["output"], **CLOSE)
    assert_close(made.decode(features, x), wanted["output"], **CLOSE)
    prediction = made.decode(features * 0, x)
    assert_close(made.write(features, x) + prediction, wanted["output"], **CLOSE)
    # Each part of the test matters: many features are inactive, and the prediction is no constant.
    assert 0 < (features != 0).float().mean() < 0.9
    assert prediction.std(0).mean() > 0.1
    layer = 12 if "12" in name else 1
    assert made.reads == made.writes == f"blocks.{layer}.resid_post"
    assert not made.is_transcoder


def test_the_older_checkpoint_of_canrager_is_read(tmp_path):
    made, wanted = read("temporal/layer_12")
    folder = shutil.copytree(FIXTURES / "temporal" / "layer_12", tmp_path / "layer_12" / "temporal")
    tensors = load_file(folder / "latest_ckpt.safetensors")
    (folder / "latest_ckpt.safetensors").unlink()
    torch.save({"sae": tensors | {"b": tensors["b"][None]}}, folder / "latest_ckpt.pt")
    again = load_sae(folder)
    assert_close(again(wanted["x"]), wanted["output"], **CLOSE)
    assert again.reads == made.reads
    fields = json.loads((folder / "conf.yaml").read_text())
    for changes, words in (
        ({"sae_diff_type": "batchtopk"}, "sae_diff_type must be"),
        ({"scaling_factor": 0}, "scaling_factor in conf.yaml must be above 0"),
        ({"n_attn_layers": 2}, "attn_layers.1"),
        ({"n_heads": 5}, "n_heads must divide"),
    ):
        text = json.dumps(fields | {"sae": fields["sae"] | changes})
        (folder / "conf.yaml").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_sae(folder)
    del fields["sae"]["n_heads"]
    (folder / "conf.yaml").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="n_heads"):
        load_sae(folder)


@pytest.mark.parametrize("rescaled", ["constant_norm_rescale", "expected_average_only_in"])
def test_other_norms_are_those_of_saelens(rescaled, tmp_path):
    """The input of the first norm can be rescaled by hand, and the second needs the factor."""
    folder = changed("sae_lens_temporal", tmp_path, {"normalize_activations": rescaled})
    _, wanted = read("sae_lens_temporal")
    x = wanted["x"]
    if rescaled == "constant_norm_rescale":
        scale = 0.3 * x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        made = load_sae(folder)
        assert_close(made.encode(x), made.encode(x * 3), **CLOSE)
        given = x / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5 / 0.3
        factored = load_sae(FIXTURES / "sae_lens_temporal")
        assert_close(made.encode(x), factored.encode(given), **CLOSE)
        assert_close(made(x), factored(given) * scale, **CLOSE)
    else:
        made = load_sae(folder, norm_factor=0.3)
        assert_close(made.encode(x), wanted["features"], **CLOSE)
        with pytest.raises(ValueError, match="norm_factor"):
            load_sae(folder)


def test_a_padded_text_gets_the_values_that_it_gets_alone():
    made, wanted = read("sae_lens_temporal")
    x = wanted["x"][:4].clone()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()
    x[~mask] = torch.nan
    features, output = made.encode(x, mask), made(x, mask)
    for row, real in enumerate(mask):
        alone = x[row][real][None]
        assert_close(features[row][real], made.encode(alone)[0], **CLOSE)
        assert_close(output[row][real], made(alone)[0], **CLOSE)
    # The padding would matter: without the mask, the values differ.
    unmasked = made.encode(x.nan_to_num(1.0))[0][mask[0]]
    assert (unmasked - features[0][mask[0]]).abs().max() > 0.01


def drawn(d_in=128, n=20, heads=2, size=6):
    """Return a random temporal dictionary for the bundled model."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"W_Q": (n, size), "W_K": (n, size), "W_V": (n, 10), "W_O": (10, n)}
    shapes |= {"b_Q": (size,), "b_K": (size,), "b_V": (10,), "b_O": (n,)}
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    queries, keys, values, output = (
        AffineMap(weights[f"W_{part}"], weights[f"b_{part}"]) for part in "QKVO"
    )
    return TemporalDictionary(
        W_enc=torch.randn(d_in, n, generator=draw) / 10,
        W_dec=torch.randn(n, d_in, generator=draw) / 10,
        b_dec=torch.randn(d_in, generator=draw) / 10,
        activation=TopK(4),
        attention=[ContextAttention(queries, keys, values, output=output, n_heads=heads)],
        subtracts_b_dec=True,
        reads="blocks.2.resid_post",
        writes="blocks.2.resid_post",
    )


TEXTS = ["part KV8 and part K", "def f(x):", "class A"]


@pytest.mark.parametrize("error", ["live", None])
def test_padding_changes_nothing_in_a_model(error):
    model, dictionary, text = pydoc(), drawn(), pydoc().to_tokens(TEXTS)
    with splice(model, dictionary, error=error) as runner:
        logits, cache = runner.run_with_cache(text, names="*.features")
        lazy = runner.run_with_cache(text, mode="full", lazy=True)[1]
        again = lazy["features", 2]
        features = cache["features", 2]
        assert_close(again, features, **CLOSE)
        for row, words in enumerate(TEXTS):
            alone, single = runner.run_with_cache(words, names="*.features")
            real = text.real[row]
            assert_close(features[row][real], single["features", 2][0], atol=1e-4, rtol=1e-4)
            assert_close(logits[row][real], alone[0], atol=1e-4, rtol=1e-4)
    stream = HookedRunner(model).capture(TEXTS[0], names="blocks.2.resid_post")["resid_post", 2]
    assert_close(features[0][text.real[0]], dictionary.encode(stream)[0], atol=1e-4, rtol=1e-4)


def test_gradients_of_a_frozen_error_flow_through_features_and_the_prediction():
    model, dictionary = pydoc(), drawn()
    stream = HookedRunner(model).capture(TEXTS[1], names="blocks.2.resid_post")["resid_post", 2]
    weights = stream.cos()
    (part,) = placed(HookedRunner(model), dictionary, error="frozen").values()
    spliced, alone = (stream.clone().requires_grad_() for _ in range(2))
    value = part(spliced, spliced)
    assert_close(value, stream, atol=1e-5, rtol=1e-5)
    (value * weights).sum().backward()
    (dictionary(alone) * weights).sum().backward()
    assert_close(spliced.grad, alone.grad, atol=1e-4, rtol=1e-4)


def test_scores_and_cards_read_whole_texts():
    model, dictionary = pydoc(), drawn()
    scores = evaluate_sae(model, dictionary, TEXTS, pos=slice(1, None), progress=False)
    (point,) = scores.points.values()
    rows, outputs, active = [], [], []
    for words in TEXTS:
        stream = HookedRunner(model).capture(words, names="blocks.2.resid_post")["resid_post", 2]
        rows.append(stream[0, 1:].double())
        outputs.append(dictionary(stream)[0, 1:].double())
        active.append(dictionary.encode(stream)[0] != 0)
    x, made = torch.cat(rows), torch.cat(outputs)
    explained = 1 - (x - made).square().sum() / (x - x.mean(0)).square().sum()
    assert point.explained_variance == pytest.approx(float(explained), abs=1e-4)
    counted = torch.cat([values[1:] for values in active]).double().mean(0)
    assert_close(point.density.double(), counted, atol=1e-6, rtol=0)
    cards = feature_cards(model, dictionary, TEXTS, [*range(20)], k=2, progress=False)
    density = torch.cat(active).double().mean(0)
    assert_close(torch.tensor([card.density for card in cards]).double(), density)


def test_a_sweep_of_features_equals_single_runs():
    model, dictionary, text = pydoc(), drawn(), pydoc().to_tokens(TEXTS)
    with splice(model, dictionary) as runner:
        clean = runner.capture(text, names="*.features")["features", 2]
        feature = int(clean[0, -1].argmax())
        hooks = {"*.features": edits.zero(feature=[feature], pos=-1)}
        edited = runner.run_with_hooks(text, hooks=hooks)
        for row, words in enumerate(TEXTS):
            alone = runner.run_with_hooks(words, hooks=hooks)
            assert_close(edited[row][text.real[row]], alone[0], atol=1e-4, rtol=1e-4)


ROWS = {
    "rows": (lambda made, x: made.encode(x.flatten(0, 1)), "whole texts.*35, 6"),
    "rows of an output": (lambda made, x: made(x.flatten(0, 1)), "whole texts"),
    "another size": (lambda made, x: made.encode(x[..., :5]), "whole texts.*7, 5, 5"),
    "another mask": (lambda made, x: made.encode(x, torch.ones(7, 4).bool()), r"got \[7, 4\]"),
    "no input": (lambda made, x: made.decode(made.encode(x)), "decode needs x"),
    "offset": (lambda made, x: made.offset, "no single offset"),
    "lengths": (lambda made, x: made.with_unit_decoder(), "temporal"),
    "a benchmark": (lambda made, x: for_saebench(made, "gpt2"), "temporal"),
    "a gain": (lambda made, x: made.with_input_gain(torch.ones(6)), "gain"),
    "a change": (lambda made, x: made._with(norm="none"), "temporal"),
    "interchange": (lambda made, x: of_dictionary(made), "temporal"),
}


@pytest.mark.parametrize("refused", ROWS)
def test_what_reads_single_positions_is_an_error(refused):
    made, wanted = read("sae_lens_temporal")
    call, words = ROWS[refused]
    with pytest.raises(ValueError, match=words):
        call(made, wanted["x"])


def test_runs_with_a_cache_of_keys_and_graphs_are_errors():
    model, dictionary = pydoc(), drawn()
    with splice(model, dictionary, error=None), pytest.raises(ValueError, match="key-value cache"):
        generate(model, "part KV8", max_new_tokens=3)
    dictionary.writes = "blocks.2.mlp_out"
    with pytest.raises(ValueError, match="attention"):
        attribution_graph(model, "part KV8", dictionary)
