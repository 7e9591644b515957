"""Texts and tokens: tokenizers, the files of tokenizers, chats, and models that read text."""
