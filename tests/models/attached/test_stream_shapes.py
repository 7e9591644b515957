"""`attach` rejects models whose residual streams do not have the positions of the tokens.

The error gives the reason.
"""

import pytest
import torch
from torch import nn

from models import AttachError, attach
from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")

WIDTH = 24
MADE = {
    "cpmant": (
        "CpmAntForCausalLM",
        dict(dim_head=6, dim_ff=20, prompt_length=5, prompt_types=4),
        r"\[2, 12, 24\].* adds 5 positions",
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        dict(d_inner=20),
        r"\[7, 2, 24\].*positions first",
    ),
    "prophetnet": (
        "ProphetNetForCausalLM",
        dict(
            num_decoder_layers=2,
            num_decoder_attention_heads=4,
            ngram=2,
            pad_token_id=0,
            is_decoder=True,
            is_encoder_decoder=False,
            add_cross_attention=False,
        ),
        r"\[2, 21, 24\].* 3 positions for each token",
    ),
    "longformer": (
        "LongformerForMaskedLM",
        dict(attention_window=4, pad_token_id=1),
        r"\[2, 8, 24\].*pads texts to a multiple",
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        dict(src_vocab_size=29, tgt_vocab_size=31, pad_token_id=1),
        r"\[7, 2, 24\] in 'model.encoder.layers'.*positions first",
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_reason_is_the_model_s_own_and_no_adapter(kind):
    name, sizes, reason = MADE[kind]
    model = tiny.model(name, hidden_size=WIDTH, **sizes)
    with pytest.raises(AttachError, match=reason) as caught:
        attach(model)
    assert "adapter" not in str(caught.value)
    assert "HookedRunner" in str(caught.value)
    assert not any("hook_points" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore")  # peft gives warnings
@pytest.mark.parametrize("kind", ["llama", "longformer"])
def test_an_adapter_is_the_reason_only_if_the_base_model_is_supported(kind):
    peft = pytest.importorskip("peft", reason="needs peft")
    if kind == "longformer":
        name, sizes, _ = MADE[kind]
        model = tiny.model(name, hidden_size=WIDTH, **sizes)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).eval()
        expected = "pads texts"
    else:
        model = tiny.model("LlamaForCausalLM")
        chosen = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(model, chosen).eval()
        expected = "3 virtual tokens.*run="
    with pytest.raises(AttachError, match=expected):
        attach(model)


class Joining(nn.Module):
    """A model whose blocks see one position for two tokens, or a fixed number of positions."""

    def __init__(self, positions):
        super().__init__()
        self.embed_tokens = nn.Embedding(29, 12)
        self.blocks_of_mine = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.positions = positions

    def forward(self, tokens):
        stream = self.positions(self.embed_tokens(tokens))
        for block in self.blocks_of_mine:
            stream = stream + block(stream)
        return stream


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (lambda x: x[:, ::2], r"joins tokens, 7 of them into 4"),
        (lambda x: torch.cat([x, x[:, :2] * 0], 1), "adds 2 positions"),
        (lambda x: torch.cat([x, x * 2], 1), "2 positions for each token"),
        (lambda x: torch.cat([x] * x.shape[1], 1), "not the positions of the tokens"),
    ],
)
def test_reasons_of_models_of_one_s_own(positions, reason):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(12, 12)

        def forward(self, x):
            return x + self.map(x)

    model = Joining(positions).eval()
    model.blocks_of_mine = nn.ModuleList(Block() for _ in range(3))
    model.forward = lambda tokens: nn.Sequential(*model.blocks_of_mine)(
        positions(model.embed_tokens(tokens))
    )
    with pytest.raises(AttachError, match=reason):
        attach(model)
