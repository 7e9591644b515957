"""Tokenizers: characters, GPT-2's byte pairs, and whatever a `tokenizer.json` describes."""

from models.tokenizers.bpe import BytePairTokenizer
from models.tokenizers.tokenizer import CharTokenizer, Tokenizer, tokenizer_from
from models.tokenizers.tokenizer_json import JsonTokenizer

__all__ = ["BytePairTokenizer", "CharTokenizer", "JsonTokenizer", "Tokenizer", "tokenizer_from"]
