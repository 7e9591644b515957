"""A tokenizer with a token for each byte, so characters are several tokens."""


class _Bytes:
    """A tokenizer whose tokens are bytes. Bytes that are not UTF-8 are decoded as U+FFFD."""

    bos_token_ids = eos_token_ids = ()
    vocab_size = 256

    def encode(self, text):
        return [*text.encode()]

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")

    def tokens_as_text(self, tokens):
        return [bytes([token]).decode(errors="backslashreplace") for token in tokens]


BYTES_OF_EACH_TOKEN = _Bytes()
