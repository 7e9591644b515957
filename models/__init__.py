"""The plain transformer, the model that ships with the package, tokenizers and training."""

from models.attention import Attention
from models.checkpoint import available, load, load_tokenizer, save
from models.config import TransformerConfig
from models.norm import LayerNorm
from models.tokenizer import CharTokenizer
from models.training import TrainingConfig, evaluate, next_token_loss, sample, split, train
from models.transformer import MLP, Block, Transformer

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "CharTokenizer",
    "LayerNorm",
    "TrainingConfig",
    "Transformer",
    "TransformerConfig",
    "available",
    "evaluate",
    "load",
    "load_tokenizer",
    "next_token_loss",
    "sample",
    "save",
    "split",
    "train",
]
