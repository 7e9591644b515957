"""Texts and tokens: tokenizers, their files, and what a model reads as text."""
