"""Known answers of GPT-2 medium, if its published weights are available."""

import pytest

from models import generate, load, load_tokenizer

# gpt2-inference.md, section 11.1: ten tokens at temperature 0.
PROMPT = "What is the answer to life, the universe, and everything?"
CONTINUATION = "\n\nThe answer is that we are all one"


def test_gpt2_medium_goes_on_as_it_is_known_to():
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hf")
    try:
        path = hub.snapshot_download("gpt2-medium", local_files_only=True)
        model, tokenizer = load(path), load_tokenizer(path)  # a snapshot may hold some files only
    except FileNotFoundError as absent:
        pytest.skip(
            'the cache has not all of gpt2-medium (1.5 GB); models.load("gpt2-medium") fetches it: '
            f"{absent}"
        )
    (text,) = generate(model, [tokenizer.encode(PROMPT)], max_new_tokens=10)
    assert tokenizer.decode(text) == PROMPT + CONTINUATION
