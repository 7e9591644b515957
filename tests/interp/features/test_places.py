"""Names of places in files of other libraries, compared with inputs and outputs of modules of
`transformers`.
"""

import copy
import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from hooks import UnknownNameError
from interp.attribution_graphs import attribution_graph
from interp.features import Dictionary, JumpReLU, evaluate_sae, feature_cards, load_sae, splice
from interp.features.places import ours
from models import Transformer, TransformerConfig, attach, from_hf, load
from tests.interp.features.fixtures import FIXTURES, changed
from tests.shipped import pydoc

attachable = pytest.importorskip("tests.attachable", reason="needs the extra hf")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def made(name):
    """Return a tiny random model in which gains of norms and biases are random too."""
    torch.manual_seed(3)
    model = attachable.made(name).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def models():
    """A function that returns three models of a family: the original, an attached copy, and a plain
    copy. The plain copy is None if `from_hf` does not support the family.
    """
    kept = {}

    def of(name):
        if name not in kept:
            model = made(name)
            try:
                plain = from_hf(copy.deepcopy(model))
            except ValueError:
                plain = None
            attached = copy.deepcopy(model)
            attach(attached)
            kept[name] = model, attached, plain
        return kept[name]

    return of


def seen(model, name):
    """Return the input or the output of a module, in a run of a model of `transformers`.

    The name ends with `input` or `output`, for example `layers.1.mlp.input`.
    """
    path, end = name.rsplit(".", 1)
    (module,) = [m for n, m in model.named_modules() if n == path or n.endswith(f".{path}")]
    values = []

    def hook(_, args, kwargs, output):
        value = next(iter((*args, *kwargs.values()))) if end == "input" else output
        values.append(value if isinstance(value, torch.Tensor) else value[0])

    handle = module.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    (value,) = values
    return value.detach()


def dictionary(size, **about):
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((size, 5), (5, size))
    ]
    biases = torch.zeros(5).double(), torch.zeros(size).double()
    return Dictionary(*weights, *biases, JumpReLU(torch.zeros(5).double()), **about)


# For each family: the name of a place in a file, the module with its input or output, and the name of
# our point. It is None if there is no such point.
PLACES = json.loads(Path(__file__).with_name("places.json").read_text())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", PLACES)
def test_a_name_is_the_point_with_its_value(family, models):
    theirs, *forms = models(family)
    for name, (module, point) in PLACES[family].items():
        value = seen(theirs, module)
        for model in filter(None, forms):
            sae = dictionary(value.shape[-1], reads=ours(name), writes=ours(name))
            # The norm has this name after attention in some families, and before the MLP in others.
            # A plain model does not know which of them it was.
            is_unclear = model is forms[-1] and "post_attention_layernorm" in name
            if point is None or is_unclear:
                with pytest.raises(UnknownNameError, match="point="):
                    splice(model, sae).__enter__()
                continue
            with splice(model, sae) as runner:
                cache = runner.capture(TOKENS, names=[f"{point}.features", point])
            # In models of transformers, norms compute in float32, also if the model is in float64.
            close = {"atol": 1e-5, "rtol": 1e-5}
            assert_close(cache[point].flatten(2), value, **close)
            assert_close(cache[f"{point}.features"], sae.encode(value), **close)


def test_families_that_are_plain_models_too(models):
    plain = {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "olmo2"}
    assert {name for name in PLACES if models(name)[2] is not None} == plain


def test_an_exact_name_is_ours_before_any_model():
    exact = {
        name: place[1]
        for places in PLACES.values()
        for name, place in places.items()
        if place[0].count(".") == 2 and place[0][-6:] in ("output", ".input")
    }
    assert len(exact) == 6
    assert {name: ours(name) for name in exact} == exact
    for name in ("layers.3.mlp", "model.layers.3.self_attn.o_proj.input", "vision.layers.3", "any"):
        assert ours(name) == name


@pytest.mark.parametrize("mlp", [True, False], ids=["all of zeros", "attention too"])
def test_a_value_of_zeros_means_no_point(mlp):
    model = load("pydoc-4l")
    for part in [model.blocks[1].mlp, *([] if mlp else [model.blocks[1].attn])]:
        for parameter in part.output.parameters():
            parameter.data.zero_()
    with pytest.raises(UnknownNameError, match="point="):
        splice(model, dictionary(128), point="layers.1.mlp").__enter__()


def test_a_place_that_is_given():
    model = pydoc()
    sae = dictionary(128, reads="layers.9.mlp", writes="layers.9.mlp")
    with pytest.raises(UnknownNameError, match="point="):
        splice(model, sae).__enter__()
    for at in ("blocks.1.mlp_out", "layers.1.mlp", "mlp_out_layer_1", "blocks.1.hook_mlp_out"):
        with (
            pytest.warns(UserWarning, match=r"at layers\.9\.mlp and is used at blocks\.1\.mlp_out"),
            splice(model, sae, point=at) as runner,
        ):
            assert "blocks.1.mlp_out.features" in runner.points
    with pytest.raises(ValueError, match="point must be None"):
        splice(model, {"blocks.1.mlp_out": sae}, point="blocks.1.mlp_out").__enter__()
    with pytest.raises(ValueError, match="point="):
        splice(model, dictionary(128)).__enter__()
    transcoder = dictionary(128, reads="layers.9.mlp.input", writes="layers.1.mlp")
    with pytest.raises(UnknownNameError, match="reads="):
        splice(model, transcoder).__enter__()
    with (
        pytest.warns(UserWarning, match=r"layers\.9\.mlp\.input and .* blocks\.1\.ln2\.normalized"),
        splice(model, transcoder, reads="layers.1.mlp.input") as runner,
    ):
        cache = runner.capture("def f", names=["*.features", "blocks.1.ln2.normalized"])
    read = cache["blocks.1.ln2.normalized"]
    assert_close(cache["blocks.1.mlp_out.features"], transcoder.encode(read))


def warned(run):
    """Return the warnings of a call as texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def spliced(model, dictionaries, **options):
    with splice(model, dictionaries, **options):
        pass


PLACE = "blocks.2.resid_post"
OTHER_PLACES = {
    "another value": (PLACE, "blocks.2.attn.q"),
    "another layer": (PLACE, "blocks.1.resid_post"),
    "the stream before the block": (PLACE, "blocks.2.resid_pre"),
    "the next block's output": ("blocks.3.hook_resid_pre", "blocks.3.resid_post"),
    "a layer that is not here": ("blocks.30.resid_post", "blocks.3.resid_post"),
    "a name of transformers": ("model.layers.2", "blocks.1.resid_post"),
    "a part of a name": ("mlp_out", "blocks.1.attn_out"),
}
SAME_PLACES = {
    "its own": (PLACE, PLACE),
    "entering the next block": (PLACE, "blocks.3.resid_pre"),
    "leaving the block before": ("blocks.3.resid_pre", PLACE),
    "TransformerLens": ("blocks.2.hook_resid_post", PLACE),
    "transformers": ("model.layers.2.output", "blocks.3.resid_pre"),
    "dictionary_learning": ("resid_post_layer_2", PLACE),
    "the last block": ("blocks.3.resid_post", "blocks.3.hook_resid_post"),
    "unknown": (None, "blocks.1.attn.q"),
    "a name that nobody knows": ("what load_sae says", "blocks.1.attn.q"),
    "a module that we cannot read": ("layers.1.mlp.up_proj", "blocks.1.mlp.post"),
    "a part of a name": ("resid_post", PLACE),
}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_a_dictionary_at_another_place_is_a_warning_that_names_both(name):
    trained, at = OTHER_PLACES[name]
    model = pydoc()
    sae = dictionary(128, reads=trained, writes=trained)
    for dictionaries, options in ((sae, {"point": at}), ({at: sae}, {})):
        (message,) = warned(partial(spliced, model, dictionaries, **options))
        assert f"trained at {trained} and is used at {at.replace('hook_', '')}, " in message
    texts = ["def f(x): return x", "class A:"]
    assert len(warned(lambda: feature_cards(model, {at: sae}, texts, [3]))) == 1
    found = warned(lambda: evaluate_sae(model, {at: sae}, texts))
    assert [at in message for message in found if "trained at" in message] == [True]


@pytest.mark.parametrize("name", SAME_PLACES)
def test_a_dictionary_at_its_own_place_gives_no_warning(name):
    trained, at = SAME_PLACES[name]
    model = pydoc()
    size = 512 if at.endswith("mlp.post") else 128
    assert not warned(
        partial(spliced, model, dictionary(size, reads=trained, writes=trained), point=at)
    )


def test_points_of_one_value_are_one_place():
    """If a model adds no encodings of positions, `embed` and `blocks.0.resid_pre` are the same value,
    so a dictionary of one may be used at the other without a warning.
    """
    config = dict(vocab_size=11, n_ctx=9, n_layers=2, n_heads=3, d_model=12)
    sae = dictionary(12, reads="embed", writes="embed")
    for positions, count in (("rotary", 0), ("learned", 1)):
        model = Transformer(TransformerConfig(**config, positions=positions, d_head=4)).eval()
        assert len(warned(partial(spliced, model, sae, point="blocks.0.resid_pre"))) == count
        assert len(warned(partial(spliced, model, sae, point="blocks.0.attn_out"))) == 1


def test_a_transcoder_reads_and_writes_its_own_places():
    model, reads, writes = pydoc(), "blocks.1.ln2.normalized", "blocks.1.mlp_out"
    coder = dictionary(128, reads=reads, writes=writes)
    for short in (reads, "ln2.normalized", None):
        assert not warned(partial(spliced, model, coder, reads=short))
    (message,) = warned(partial(spliced, model, coder, reads="resid_mid"))
    assert f"trained at {reads} and is used at blocks.1.resid_mid, " in message
    (message,) = warned(
        partial(spliced, model, {"blocks.2.mlp_out": coder}, reads="ln2.normalized")
    )
    assert f"{writes} and {reads} and is used at blocks.2.mlp_out and blocks.2.ln2" in message
    # The parts of a cross-layer transcoder name no layer.
    part = dictionary(128, reads="ln2.normalized", writes="mlp_out")
    assert not warned(partial(spliced, model, {"blocks.3.mlp_out": part}))


def test_an_attribution_graph_warns_of_a_transcoder_of_another_layer():
    model = pydoc()
    part = dictionary(128, reads="ln2.normalized", writes="blocks.1.mlp_out")
    for at, count in (("blocks.1.mlp_out", 0), ("blocks.2.mlp_out", 1)):
        found = warned(partial(attribution_graph, model, "part KV8", {at: part}, targets=1))
        assert len(found) == count
        assert all("trained at blocks.1.mlp_out and is used at blocks.2" in each for each in found)


def test_no_hook_is_left_by_looking():
    model = pydoc()
    with splice(model, dictionary(128), point="layers.1.mlp"):
        pass
    with pytest.raises(UnknownNameError):
        splice(model, dictionary(128), point="layers.1.mlp.up_proj").__enter__()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("learned", [True, False])
def test_values_of_a_norm_before_its_gain(learned):
    config = dict(vocab_size=11, n_ctx=9, n_layers=2, n_heads=3, d_model=12, norm="rmsnorm")
    model = Transformer(TransformerConfig(**config, norm_learned=learned)).double().eval()
    coder = dictionary(12, reads="blocks.1.ln2.hook_normalized", writes="blocks.1.mlp_out")
    tokens, names = torch.tensor([[3, 1, 4, 1, 5]]), ["*.features", "blocks.1.resid_mid"]
    if learned:
        gain = model.blocks[1].ln2.weight.data.normal_(1.0, 0.5)
        with pytest.raises(UnknownNameError, match="gain"):
            splice(model, coder).__enter__()
        coder = coder.with_input_gain(gain)
    with splice(model, coder) as runner:
        cache = runner.capture(tokens, names=names)
    x = cache["blocks.1.resid_mid"].numpy()
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    W_enc = coder.W_enc.numpy() * (gain.numpy()[:, None] if learned else 1)
    features = torch.from_numpy(np.maximum(x @ W_enc, 0))
    assert_close(cache["blocks.1.mlp_out.features"], features)


def test_a_dictionary_of_gemma_scope_2_in_its_model(models):
    """`splice` finds the block of a published transcoder from its config. Only its size does not fit
    this small model.
    """
    _, attached, _ = models("gemma3_text")
    made = load_sae(FIXTURES / "gemma_scope_2")
    assert (made.reads, made.writes) == ("blocks.1.ln2.normalized", "blocks.1.mlp_out")
    # The error is about the size, so `splice` has found the block.
    with pytest.raises(ValueError, match="must read vectors of size 24"):
        splice(attached, made).__enter__()


@pytest.mark.parametrize(
    "hook", ["output", "post_feedforward_layernorm.output", "self_attn.o_proj.input"]
)
def test_autoencoders_of_gemma_scope_2_have_our_points(hook, tmp_path):
    fields = {
        "hf_hook_point_in": f"model.layers.1.{hook}",
        "type": "sae",
        "width": 11,
        "l0": 20,
        "affine_connection": False,
    }
    folder = changed(
        "gemma_scope_2", tmp_path, fields, drop=["hf_hook_point_out", "affine_skip_connection"]
    )
    sae, point = load_sae(folder), PLACES["gemma3_text"][fields["hf_hook_point_in"]][1]
    assert (sae.reads, sae.writes, sae.is_transcoder) == (point, point, False)
