"""Stores of the hidden states that vLLM writes.

vLLM needs a GPU, so the files are written here, in the form that vLLM documents. Their values are
hidden states of `transformers`, and the test compares them with a harvest of our points.
"""

import pytest
import torch
from safetensors.torch import save_file

from interp.store import Activations, from_vllm, harvest
from models import attach

TEXTS = [[3, 14, 15, 9, 26], [35, 8], [9, 7, 9]]
LAYERS = [2, 0, 1]


def write(folder, model, texts=TEXTS, layers=LAYERS):
    """Write a file for each text, as vLLM does. Return the paths."""
    paths, last = [], []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    for number, text in enumerate(texts):
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        # The last hidden state of `transformers` has passed the final norm. vLLM's has not.
        streams = [*states[:-1], last[-1]]
        values = torch.stack([streams[layer][0] for layer in layers], 1).contiguous()
        paths.append(folder / f"{9 - number}-request.safetensors")
        save_file({"token_ids": torch.tensor(text), "hidden_states": values}, paths[-1])
    hook.remove()
    return paths


@torch.no_grad()
def test_values_have_the_names_of_our_points(tmp_path):
    small_llama = pytest.importorskip("tests.small_llama")
    model = small_llama.llama()
    store = from_vllm(write(tmp_path, model), tmp_path / "store", LAYERS, per_file=2)
    assert sorted(store.names) == [
        "blocks.0.resid_post",
        "blocks.0.resid_pre",
        "blocks.1.resid_post",
    ]
    with attach(model):
        expected = harvest(model, TEXTS, store.names, tmp_path / "expected")
    assert [*store.texts()] == TEXTS
    for text in range(len(TEXTS)):
        for name in store.names:
            torch.testing.assert_close(store.rows(text)[name], expected.rows(text)[name])
    assert store.rows(2, 1)["pos"].tolist() == [1]
    assert store.damaged() == []


def file(path, **tensors):
    whole = dict(token_ids=torch.tensor([5, 6, 7]), hidden_states=torch.arange(30.0).view(3, 2, 5))
    save_file(whole | tensors, path)
    return path


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for number in (2, 1):
        file(tmp_path / f"{number}.safetensors", token_ids=torch.tensor([number] * 3))
    store = from_vllm(tmp_path, tmp_path / "store", [4, 7])
    assert [*store.texts()] == [[1] * 3, [2] * 3]
    assert store.rows(0)["blocks.6.resid_post"][1].tolist() == [15, 16, 17, 18, 19]


def test_a_repeated_call_writes_missing_files_only(tmp_path):
    paths = [file(tmp_path / f"{number}.safetensors") for number in range(3)]
    from_vllm(paths, tmp_path / "store", [4, 7], per_file=1)
    lost = tmp_path / "store" / "values-000001.safetensors"
    expected = lost.read_bytes()
    lost.unlink()
    from_vllm(paths, tmp_path / "store", [4, 7], per_file=1)
    assert lost.read_bytes() == expected
    assert len(Activations(tmp_path / "store")) == 9
    file(paths[2], hidden_states=torch.ones(3, 2, 5))
    with pytest.raises(ValueError, match="file 2 has other texts"):
        from_vllm(paths, tmp_path / "store", [4, 7], per_file=1)


@pytest.mark.parametrize(
    ("tensors", "layers", "message"),
    [
        ({}, [4], r"\[3 tokens, 1 layers, d_model\]; got \[3, 2, 5\]"),
        ({}, [4, 4], "different ids"),
        ({}, [4, -1], "from 0 on; got -1"),
        ({"token_ids": torch.tensor([1])}, [4, 7], r"\[1 tokens, 2 layers"),
        ({"scales": torch.ones(3)}, [4, 7], "got hidden_states, scales, token_ids"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, tensors, layers, message):
    path = file(tmp_path / "x.safetensors", **tensors)
    with pytest.raises(ValueError, match=message):
        from_vllm([path], tmp_path / "store", layers)


def test_torn_and_missing_files_are_named(tmp_path):
    path = file(tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"x\.safetensors must be a complete"):
        from_vllm([path], tmp_path / "store", [4, 7])
    (tmp_path / "empty").mkdir()
    for files in ([tmp_path / "y.safetensors"], tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(FileNotFoundError):
            from_vllm(files, tmp_path / "other", [4, 7])
