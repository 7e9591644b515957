"""Positions: rotations, compared with complex numbers and with the scalings of `transformers`."""

import cmath
import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hooks import HookedRunner
from models import RotaryScaling, Transformer, TransformerConfig
from models.positions import Frequencies, Rotary

BATCH, POS, HEADS, D_HEAD, N_CTX = 3, 7, 2, 12, 19
SIZES = dict(vocab_size=23, n_ctx=N_CTX, n_layers=1, n_heads=HEADS, d_model=HEADS * D_HEAD)


def config(**changes):
    return TransformerConfig(**SIZES | dict(positions="rotary") | changes)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(seed=1):
    return torch.randint(N_CTX, (BATCH, POS), generator=torch.Generator().manual_seed(seed))


# --- rotations


def turned(x, positions, frequencies, length=1.0):
    """Return x [batch pos head d_head] after a rotation, computed with complex numbers.

    Each pair of dimensions is the real and the imaginary part of one complex number.
    """
    out, half = x.numpy().copy(), len(frequencies)
    for row, pos, head in np.ndindex(x.shape[:3]):
        for i, frequency in enumerate(frequencies):
            number = complex(x[row, pos, head, i], x[row, pos, head, i + half])
            number *= length * cmath.exp(1j * float(positions[row, pos]) * float(frequency))
            out[row, pos, head, i], out[row, pos, head, i + half] = number.real, number.imag
    return torch.tensor(out)


def rotate(rotary, x, positions):
    return rotary(x, rotary.rotation(positions, x.dtype))


def test_one_quarter_turn():
    # With theta 1, every pair turns by one radian for each position.
    rotary = Rotary(config(d_head=2, rotary_theta=1.0))
    out = rotate(rotary, torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]), torch.tensor([[2, 2]]))
    expected = [[math.cos(2), math.sin(2)], [-math.sin(2), math.cos(2)]]
    torch.testing.assert_close(out[0, :, 0], torch.tensor(expected))


# --- scalings

SCALINGS = {
    "linear": (dict(kind="linear", factor=3.0), dict(rope_type="linear", factor=3.0)),
    "llama3": (
        dict(kind="llama3", factor=8.0, original_n_ctx=40, low=1.0, high=4.0),
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
        | dict(original_max_position_embeddings=40),
    ),
    "yarn": (
        dict(kind="yarn", factor=4.0, original_n_ctx=100, low=1.0, high=32.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=100),
    ),
    "yarn turns": (
        dict(kind="yarn", factor=4.0, original_n_ctx=300, low=2.0, high=9.0, attention_factor=1.3),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=300)
        | dict(beta_slow=2.0, beta_fast=9.0, attention_factor=1.3),
    ),
    "yarn one dimension": (
        dict(kind="yarn", factor=4.0, original_n_ctx=7, low=0.9, high=1.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=7)
        | dict(beta_slow=0.9, beta_fast=1.0),
    ),
    "yarn tiny": (
        dict(kind="yarn", factor=4.0, original_n_ctx=2, low=1.0, high=32.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2),
    ),
    "yarn long": (
        dict(kind="yarn", factor=4.0, original_n_ctx=10**9, low=1.0, high=32.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=10**9),
    ),
    "factors": (
        dict(kind="factors", factors=(1.0, 1.5, 2.0, 4.0, 7.0, 9.0)),
        dict(
            rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 4.0, 7.0, 9.0], long_factor=[1.0] * 6
        )
        | dict(original_max_position_embeddings=N_CTX, factor=1.0),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_match_transformers(name):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALINGS[name]
    reference = transformers.LlamaConfig(
        hidden_size=HEADS * D_HEAD,
        num_attention_heads=HEADS,
        head_dim=D_HEAD,
        max_position_embeddings=N_CTX,
        rope_parameters=theirs | dict(rope_theta=123.0),
    )
    frequencies, length = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](reference, torch.device("cpu"))
    rotary = Rotary(config(rotary_theta=123.0, rotary_scaling=RotaryScaling(**ours)))
    torch.testing.assert_close(rotary.frequencies.values, frequencies, atol=0, rtol=1e-6)
    x, positions = draw(BATCH, POS, HEADS, D_HEAD), places()
    out = rotate(rotary, x, positions)
    torch.testing.assert_close(out, turned(x, positions, frequencies, length), atol=1e-5, rtol=0)


# --- precision and copies


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16).float(),
        lambda m: m.double(),
    ],
)
def test_conversion_leaves_the_frequencies(positions, convert):
    sizes = dict(n_ctx=3000, rotary_theta=10_000.0)
    model, fresh = (
        convert(Transformer(config(positions=positions, **sizes))),
        Transformer(config(positions=positions, **sizes)),
    )
    at = torch.tensor([[0, 1, 2047, 2999]])
    if positions == "rotary":
        for ours, theirs in zip(
            *(m.rotary.rotation(at, torch.float32) for m in (model, fresh)), strict=True
        ):
            assert torch.equal(ours, theirs)
        exact = (at[0, :, None] * 10_000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)).cos()
        torch.testing.assert_close(
            ours := model.rotary.rotation(at, torch.float32)[0][0, :, 0, :6].double(),
            exact,
            atol=5e-4,
            rtol=0,
        )
        assert ours.shape == (4, 6)
    else:
        assert torch.equal(model.position_embedding(at), fresh.position_embedding(at))
    logits = model(torch.zeros(1, 2999).long())
    assert logits.dtype == model.token_embedding.weight.dtype


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_copies_pickles_and_files_carry_the_frequencies(positions):
    model, tokens = Transformer(config(positions=positions)).eval(), places()
    assert not [name for name in model.state_dict() if "rotary" in name or "position" in name]
    assert not list(model.buffers())
    expected = model(tokens)
    assert torch.equal(copy.deepcopy(model)(tokens), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), expected)


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(positions=kind) for kind in ("rotary", "sinusoidal", "learned", "none")),
        *(dict(rotary_scaling=RotaryScaling(**ours)) for ours, _ in SCALINGS.values()),
    ],
)
def test_a_model_may_be_built_on_and_moved_to_the_meta_device(changes):
    model, tokens = Transformer(config(**changes)).eval(), places()
    with torch.device("meta"):
        empty = Transformer(config(**changes)).eval()
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty(tokens.to("meta")).shape == (BATCH, POS, 23)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty(tokens), model(tokens))
    logits = model.to("meta")(tokens.to("meta"))
    assert (logits.shape, logits.device.type) == ((BATCH, POS, 23), "meta")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("changes", [{}, dict(qk_norm="head"), dict(qk_norm="all", norm="rmsnorm")])
def test_under_autocast_queries_keys_and_values_are_of_one_precision(changes):
    model, tokens = Transformer(config(**changes)).eval(), places()
    runner, names = HookedRunner(model), ["*.q", "*.k", "*.v"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, cache = runner.run_with_cache(tokens, names=names)
    _, exact = runner.run_with_cache(tokens, names=names)
    for name, value in cache.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), exact[name], atol=0.05, rtol=0.02)


def test_a_device_gets_one_copy_of_the_frequencies():
    frequencies = Frequencies(torch.tensor([2.0, 3.0]))
    assert frequencies.on(torch.device("cpu")) is frequencies.values
    there = frequencies.on(torch.device("meta"))
    assert there.is_meta
    assert frequencies.on(torch.device("meta")) is there
    # A file contains only the frequencies on the CPU, not the copies on other devices.
    again = pickle.loads(pickle.dumps(frequencies))
    assert again.on(torch.device("meta")) is not there
    assert again.values.tolist() == [2.0, 3.0]
    fresh = Frequencies(frequencies.values)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = fresh.on(torch.device("meta"))
        assert there.is_meta
        assert fresh.on(torch.device("meta")) is not there
