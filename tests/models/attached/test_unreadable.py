"""Models that attach cannot read: one error that names the module, and a model that is
as it was.
"""

import copy

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, NeverFiredError
from interp import edits
from models import AttachError, attach
from tests import tiny
from tests.models.attached.kinds import TOKENS, made

pytest.importorskip("transformers", reason="needs the extra hf")


def test_a_model_that_names_a_parameter_as_its_embeddings():
    sizes = dict(d_model=24, d_latents=20, num_latents=5, max_position_embeddings=30)
    blocks = dict(num_blocks=2, num_self_attends_per_block=3)
    heads = dict(num_self_attention_heads=4, num_cross_attention_heads=2)
    model = tiny.model("PerceiverForMaskedLM", **sizes, **blocks, **heads)
    with pytest.raises(AttachError, match=r"'perceiver.encoder.self_attends'.*run 2 times"):
        attach(model)
    assert HookedRunner(model).points  # without `attach`, submodules are points


def test_embeddings_outside_of_the_encoder_fire_once():
    """T5Gemma2 embeds its texts first, and passes the vectors to the module that runs
    the blocks.
    """
    text = tiny.SIZES | dict(vocab_size=29, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = tiny.config("SiglipVisionConfig", image_size=16, patch_size=4).to_dict()
    encoder = dict(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = tiny.model(
        "T5Gemma2ForConditionalGeneration",
        encoder=encoder | dict(image_token_index=28),
        decoder=text,
        image_token_index=28,
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    twin, read = copy.deepcopy(model), dict(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :3] + 1)

    def run(change):
        seen = []

        def hook(module, args, output):
            seen.append(output.clone())
            return output * change

        module = twin.model.encoder.text_model.embed_tokens
        handle = module.register_forward_hook(hook)
        with torch.no_grad():
            logits = twin(**read).logits
        handle.remove()
        assert len(seen) == 1
        return seen[0], logits

    with attach(model):
        runner = HookedRunner(model)
        output, cache = runner.run_with_cache(**read)
        scaled = runner.run_with_hooks(**read, hooks={"encoder.embed": edits.scale(2.0)})
        with torch.no_grad():
            scaled = scaled.logits
    embedded, logits = run(1.0)
    torch.testing.assert_close(cache["encoder.embed"], embedded)
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(scaled.detach(), run(2.0)[1])


ERRORS = [
    AttributeError("'Parameter' object has no attribute 'weight'"),
    IndexError("Dimension out of range"),
    KeyError("hidden"),
    RuntimeError("unflatten: sizes do not fit"),
    TypeError("'NoneType' object is not iterable"),
    ValueError("not enough values to unpack (expected 3, got 2)"),
    HookError(
        "blocks.0.attn_out fired twice; a cache stores one value per name "
        "(calls='all' stores all values)"
    ),
    NeverFiredError("blocks.1.z never fired"),
    AssertionError(),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("step", "named"),
    [
        ("stacks.layout_of", "'model.layers.0'"),
        ("checks.arguments_of", "'model.layers'"),
        ("stacks.stacks_of", "LlamaForCausalLM"),
        ("probe.probed", "LlamaForCausalLM"),
    ],
)
def test_any_error_while_a_model_is_read_names_the_module(step, named, error, monkeypatch):
    model, count = made("llama"), []

    def fails(*args, **kwargs):
        count.append(1)
        raise error

    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    logits = model(TOKENS).logits
    monkeypatch.setattr(f"models.attached.{step}", fails)
    with pytest.raises(ValueError, match=f"{named}.*blocks=.*HookedRunner") as caught:
        attach(model)
    assert "calls=" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
    monkeypatch.undo()
    assert torch.equal(model(TOKENS).logits, logits)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    # The failed attempt has left nothing on the model, so `attach` works now.
    with attach(model):
        assert "blocks.0.attn_out" in HookedRunner(model).points


@pytest.mark.parametrize(
    "error", [MemoryError("1 TB"), KeyboardInterrupt(), FutureWarning("later")]
)
def test_errors_without_a_relation_to_the_model_stay(error, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr("models.attached.stacks.layout_of", fails)
    with pytest.raises(type(error)):
        attach(made("llama"))


class Stage(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return x + self.inside(x)


class Picture(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("inside", "shape", "said"),
    [
        (lambda: nn.Conv2d(5, 5, 3, padding=1), (2, 5, 6, 4), "feature map"),
        (lambda: nn.Linear(4, 4), (2, 7, 3, 4), "several streams for each token"),
        (lambda: nn.Linear(4, 4), (3, 5, 6, 4), "rows and columns"),
    ],
)
def test_the_error_names_values_with_four_axes(inside, shape, said):
    model = Picture([Stage(inside()) for _ in range(2)]).eval()
    with pytest.raises(
        AttachError, match=rf"'layers' that return \[{', '.join(map(str, shape))}\] .*{said}"
    ):
        attach(model, example=torch.randn(shape))
    if said == "feature map":
        with pytest.raises(AttachError) as caught:
            attach(model, example=torch.randn(shape))
        assert "streams" not in str(caught.value)
