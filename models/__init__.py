"""Transformers, checkpoints, tokenizers, generation and training.

Read the architecture first: `transformer`, `block`, `attention` (with `dot_product`, `kernels`,
`positions` and `rotary_scaling`), `mlp`, `norm` and `linear`, then `config` with its `checks`,
`registry` and `initialisation`, and `weights`, which names the weights as the literature does. Then
read `running` (what a run needs), `text` (tokenizers), `checkpoints` (formats of files, with
`files`), `attached` (hook points in models of `transformers`) and `training` in any order, and as
needed `adapters`, `processing`, `verification`, `mode` and `hints`.
"""

from hooks.base import missing_name as _missing_name
from hooks.base import skip_token_checks
from models.attached import Attached, AttachError, attach, detach
from models.attention import Attention
from models.block import Block
from models.checkpoints import (
    from_hf,
    from_transformer_lens,
    list_models,
    load,
    load_tokenizer,
    save,
)
from models.config import TransformerConfig
from models.dot_product import causal_mask, scaled_dot_product_attention
from models.mlp import MLP, GatedMLP
from models.norm import LayerNorm, RMSNorm
from models.processing import center, fold_norms
from models.registry import build, config_of, list_configs, register
from models.rotary_scaling import RotaryBase, RotaryScaling
from models.running.context import Context
from models.running.generation import Step, generate, generate_steps, generate_text
from models.running.kvcache import KVCache
from models.running.sampling import Sampling, row_generator
from models.text.chat import chat
from models.text.templates import ChatTemplate
from models.text.tokenizer import CharTokenizer, Tokenizer
from models.training import (
    Batches,
    Evaluation,
    TrainingConfig,
    TrainingResult,
    evaluate,
    next_token_loss,
    sample_batch,
    train,
    train_test_split,
)
from models.transformer import Transformer
from models.verification import VerificationError, verify

__all__ = [
    "MLP",
    "AttachError",
    "Attached",
    "Attention",
    "Batches",
    "Block",
    "CharTokenizer",
    "ChatTemplate",
    "Context",
    "Evaluation",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "RMSNorm",
    "RotaryBase",
    "RotaryScaling",
    "Sampling",
    "Step",
    "Tokenizer",
    "TrainingConfig",
    "TrainingResult",
    "Transformer",
    "TransformerConfig",
    "VerificationError",
    "attach",
    "build",
    "causal_mask",
    "center",
    "chat",
    "config_of",
    "detach",
    "evaluate",
    "fold_norms",
    "from_hf",
    "from_transformer_lens",
    "generate",
    "generate_steps",
    "generate_text",
    "list_configs",
    "list_models",
    "load",
    "load_tokenizer",
    "next_token_loss",
    "register",
    "row_generator",
    "sample_batch",
    "save",
    "scaled_dot_product_attention",
    "skip_token_checks",
    "train",
    "train_test_split",
    "verify",
]

__getattr__ = _missing_name(
    __name__,
    __all__,
    moved={
        "available": "models.list_configs",
        "bundled": "models.list_models",
        "split": "models.train_test_split",
        "stream": "models.generate_steps",
        "trusted": "models.skip_token_checks",
    },
)
