"""Texts and tokens: tokenizers, the files of tokenizers, chats, and models that read text.

Read `tokenizer` and `texts` first: a tokenizer, and the methods of a model that has one. Then read
`files`, which reads tokenizers from files, with `tekken` and `charsmap` for two special formats,
and `chat`, which converts messages to tokens with `templates`.
"""
