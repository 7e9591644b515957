"""GPT-2 medium gives a known answer. The test runs if the published weights are on this machine."""

import pytest

from models import generate, load, load_tokenizer

# Ten tokens at temperature 0, from section 11.1 of gpt2-inference.md.
PROMPT = "What is the answer to life, the universe, and everything?"
CONTINUATION = "\n\nThe answer is that we are all one"


def test_gpt2_medium_gives_the_known_continuation():
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hf")
    try:
        path = hub.snapshot_download("gpt2-medium", local_files_only=True)
        # A snapshot in the cache may have only some of the files.
        model, tokenizer = load(path), load_tokenizer(path)
    except FileNotFoundError as absent:
        pytest.skip(
            'the cache has not all of gpt2-medium (1.5 GB); models.load("gpt2-medium") fetches it: '
            f"{absent}"
        )
    (text,) = generate(model, [tokenizer.encode(PROMPT)], max_new_tokens=10)
    assert tokenizer.decode(text) == PROMPT + CONTINUATION
