"""A random model of `transformers`, and the same model read from the files that it saved."""

import json
import math
from pathlib import Path

import pytest
import torch

from models.checkpoints import load

transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, HEADS, D_MLP, N_CTX, BATCH, POS = 53, 3, 6, 37, 41, 2, 23

GPT = dict(
    vocab_size=VOCAB, n_positions=N_CTX, n_layer=LAYERS, n_head=HEADS, n_embd=66, n_inner=D_MLP
)
# A head has 72 / 6 = 12 dimensions, and half of them are rotated.
NEOX = dict(vocab_size=VOCAB, max_position_embeddings=N_CTX, num_hidden_layers=LAYERS)
NEOX |= dict(num_attention_heads=HEADS, hidden_size=72, intermediate_size=D_MLP)
NEOX |= dict(rotary_pct=0.5, layer_norm_eps=3e-3)
# All heads together have 60 dimensions, and the stream has 66.
LLAMA = dict(vocab_size=VOCAB, max_position_embeddings=N_CTX, num_hidden_layers=LAYERS)
LLAMA |= dict(num_attention_heads=HEADS, num_key_value_heads=2, hidden_size=66, head_dim=10)
LLAMA |= dict(intermediate_size=D_MLP, rms_norm_eps=3e-3)
GPT2, BIGCODE = dict(GPT, layer_norm_epsilon=3e-3), dict(GPT, layer_norm_epsilon=2e-3)
GEMMA2 = dict(LLAMA, query_pre_attn_scalar=7, sliding_window=5, attn_logit_softcapping=2.0)
# A larger eps, because a norm after a sublayer would magnify the rounding of small outputs.
GEMMA2 |= dict(final_logit_softcapping=3.0, rms_norm_eps=1e-2)
GEMMA3 = dict(LLAMA, query_pre_attn_scalar=7, sliding_window=5, rms_norm_eps=1e-2)
OLMO2 = dict(LLAMA, rms_norm_eps=3e-2)
NEO = dict(vocab_size=VOCAB, max_position_embeddings=N_CTX, num_layers=LAYERS, num_heads=HEADS)
NEO |= dict(hidden_size=66, intermediate_size=D_MLP, layer_norm_epsilon=3e-3, window_size=5)
NEO |= dict(attention_types=[[["local", "global"], 1], [["local"], 1]])
OPT = dict(vocab_size=VOCAB, max_position_embeddings=N_CTX, num_hidden_layers=LAYERS)
OPT |= dict(num_attention_heads=HEADS, hidden_size=66, ffn_dim=D_MLP)
SIZES = dict(gpt2=GPT2, gpt_bigcode=BIGCODE, gpt_neox=NEOX, olmo2=OLMO2, gemma2=GEMMA2)
SIZES |= dict(gpt_neo=NEO, opt=OPT, gemma3_text=GEMMA3, olmo3=dict(OLMO2, sliding_window=5))


ROWS = json.loads(Path(__file__).with_name("parity.json").read_text())


class Pair:
    """A random model of `transformers` (`theirs`), and the same model loaded from its files
    (`ours`).
    """

    def __init__(self, row, directory):
        family, overrides = ROWS[row]
        config = transformers.AutoConfig.for_model(
            family,
            **SIZES.get(family, LLAMA) | overrides,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        self.theirs = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        randomise(self.theirs)
        self.theirs.save_pretrained(directory)
        self.directory = directory
        self.ours = load(directory, verify=True)

    def reference(self, tokens):
        """Return the logits and values of the model of `transformers`, by the names of our points.

        The tokens must have no padding.
        """
        base = getattr(self.theirs.base_model, "decoder", self.theirs.base_model)
        layers = getattr(base, "h", None) or base.layers
        last = []  # `hidden_states[-1]` is the output of the final norm, so record the last block
        handle = layers[-1].register_forward_hook(
            lambda module, inputs, output: last.append(output)
        )
        with torch.no_grad():
            theirs = self.theirs(tokens, output_hidden_states=True, output_attentions=True)
        handle.remove()
        assert len(theirs.hidden_states) == LAYERS + 1
        *streams, normalized = theirs.hidden_states
        streams.append(last[0] if torch.is_tensor(last[0]) else last[0][0])
        values = {"logits": theirs.logits}
        if self.ours.config.final_norm:
            values["ln_final.normalized"] = normalized
        for layer in range(LAYERS):
            values[f"blocks.{layer}.resid_pre"] = streams[layer]
            values[f"blocks.{layer}.resid_post"] = streams[layer + 1]
            values[f"blocks.{layer}.attn.pattern"] = theirs.attentions[layer]
        return values


# Parts of the names of parameters, and the scale of their random values, multiplied by the square
# root of the larger size. With these scales, scores are far apart, and no norm enlarges small
# values.
SCALES = {"q_proj": 1.2, "k_proj": 1.2, "c_attn": 1.4, "query_key_value": 1.4}
SCALES |= {"embed_tokens": 1.5, "embed_in": 1.5, "wte": 1.5}
SCALES |= dict.fromkeys(("o_proj", "c_proj", "down_proj", "attention.dense", "dense_4h_to_h"), 0.5)
# OPT has no norm before attention here, so scores are far apart only if embeddings are.
SCALES |= {"out_proj": 0.5, "fc2": 0.5, "embed_positions": 6.0}


def randomise(model):
    """Draw all weights at random, so that each matters: no gain is one, and no bias is zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.3)
            else:
                scale = next((SCALES[part] for part in SCALES if part in name), 1.0)
                parameter.copy_(noise * scale / math.sqrt(max(parameter.shape)))
