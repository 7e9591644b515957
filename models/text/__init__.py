"""Texts and tokens: tokenizers, the files of tokenizers, chats, and models that read text.

Read `tokenizer` and `texts` first: a tokenizer, and the methods of a model that has one. `files`
reads tokenizers from files, with `tekken` and `charsmap` for two special formats. `chat` converts
messages to tokens with `templates`.
"""
