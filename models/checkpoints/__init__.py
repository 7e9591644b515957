"""Checkpoints in this package's own format, Hugging Face's and GGUF."""

from models.checkpoints.huggingface import from_hf
from models.checkpoints.loading import load, load_tokenizer
from models.checkpoints.own import BUNDLED, bundled, save

__all__ = ["BUNDLED", "bundled", "from_hf", "load", "load_tokenizer", "save"]
