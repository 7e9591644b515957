"""Checkpoints in this package's own format, Hugging Face's, GGUF and TransformerLens' weights."""

from models.checkpoints.huggingface import from_hf
from models.checkpoints.loading import load, load_tokenizer
from models.checkpoints.own import BUNDLED, list_models, save
from models.checkpoints.transformer_lens import from_transformer_lens

__all__ = [
    "BUNDLED",
    "from_hf",
    "from_transformer_lens",
    "list_models",
    "load",
    "load_tokenizer",
    "save",
]
