"""Jacobian lenses in the published form: a file that TransformerLens 4.3.0 wrote, and files that
its loader accepts.
"""

import dataclasses

import pytest
import torch

from hooks import CacheError
from interp import JacobianLens, logit_lens, plots, run_with_cache
from tests.count import ROOT

# `JacobianLens.save` of TransformerLens 4.3.0 wrote this file, with entry (i, j) of `J[l]` equal to
# (100 l + 10 i + j) / 64 and the metadata of its own fit.
WRITTEN = ROOT / "tests" / "lenses" / "transformer_lens_4_3.pt"


def small(n_layers):
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=11, n_ctx=7, n_heads=1, d_model=5, d_mlp=13)
    return Transformer(TransformerConfig(n_layers=n_layers, **sizes)).eval()


def test_a_file_of_transformer_lens():
    lens = JacobianLens.from_published(WRITTEN)
    assert lens.weight.dtype == torch.float32
    assert lens.weight.shape == (4, 5, 5)
    assert lens.layers == [1, 2, 3]
    assert lens.weight[0].isnan().all()
    for layer in range(3):
        expected = [[(100 * layer + 10 * i + j) / 64 for j in range(5)] for i in range(5)]
        assert lens.weight[layer + 1].tolist() == expected
    assert lens.n_texts == 7
    assert lens.about["corpus"] == "words"
    assert "no matrix for layer 0" in repr(lens)
    assert lens.error.isnan().all()
    assert lens.merged(lens).about == lens.about
    assert lens.merged(dataclasses.replace(lens, about={"corpus": "code"})).about == {}


def test_the_lens_reads_the_stream_after_the_layer_of_the_file(tmp_path):
    model, tokens = small(4), torch.tensor([[3, 1, 4, 1]])
    lens = JacobianLens.from_published(WRITTEN)
    lens.save(tmp_path / "ours")
    assert JacobianLens.load(tmp_path / "ours").about == lens.about
    _, cache = run_with_cache(model, tokens, names=["*.resid_pre", "*.resid_post"])
    readout = logit_lens(model, cache, lens=lens, targets=tokens)
    matrices = torch.load(WRITTEN, weights_only=True)["J"]
    for layer, matrix in matrices.items():
        logits = model.unembed(cache["resid_post", layer] @ matrix.float().T)
        expected = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
        torch.testing.assert_close(readout.target_probabilities[layer + 1], expected.detach())
    assert readout.kl[0].isnan().all()
    assert not readout.kl[1:].isnan().any()
    rows = repr(readout).splitlines()
    assert rows[2].split() == ["0", "-", "-", "-", "-"]
    cells = plots.lens(readout).parts[0]["cells"]
    assert cells[-4:] == [""] * 4
    assert all(cells[:-4])


def test_a_written_lens_has_the_entries_of_the_form(tmp_path):
    lens = JacobianLens.from_published(WRITTEN)
    for dtype in (torch.float32, torch.float16):
        lens.to_published(tmp_path / "lens.pt", dtype)
        content = torch.load(tmp_path / "lens.pt", weights_only=True)
        original = torch.load(WRITTEN, weights_only=True)
        assert content.keys() == original.keys()
        assert content["metadata"] == original["metadata"]
        assert content["source_layers"] == original["source_layers"] == [0, 1, 2]
        assert (content["d_model"], content["n_prompts"]) == (5, 7)
        for layer, matrix in original["J"].items():
            assert content["J"][layer].dtype == dtype
            assert torch.equal(content["J"][layer].float(), matrix.float())
            # A view of all layers would write the memory of all layers.
            assert content["J"][layer].untyped_storage().nbytes() == 25 * dtype.itemsize
    with pytest.raises(ValueError, match=r"end in \.pt"):
        lens.to_published(tmp_path / "lens.safetensors")
    alone = JacobianLens(torch.eye(2)[None], torch.zeros(1, 2), "", 1, torch.ones(1))
    with pytest.raises(ValueError, match=r"after layer 0; got \[0\]"):
        alone.to_published(tmp_path / "alone.pt")


def test_layers_that_a_fit_left_out_are_nan(tmp_path):
    content = torch.load(WRITTEN, weights_only=True)
    del content["J"][1]
    torch.save(content | {"source_layers": [0, 2]}, tmp_path / "some.pt")
    lens = JacobianLens.from_published(tmp_path / "some.pt")
    assert lens.layers == [1, 3]
    content["metadata"]["target_layer"] = 5
    torch.save(content | {"source_layers": [0, 2]}, tmp_path / "some.pt")
    deeper = JacobianLens.from_published(tmp_path / "some.pt")
    assert (deeper.layers, len(deeper.weight)) == ([1, 3], 6)
    deeper.check(small(6))
    with pytest.raises(ValueError, match=r"\[4, 5, 5\]; got \[6, 5, 5\]"):
        deeper.check(small(4))


WRONG = {
    "keys must be .*'extra'": {"extra": 3},
    r"d_model.*got 0": {"d_model": 0},
    r"J\[0\] must be a matrix \[6, 6\]; got \[5, 5\]": {"d_model": 6},
    r"source_layers, \[0, 1\]; got \[0, 1, 2\]": {"source_layers": [0, 1]},
    "n_prompts must": {"n_prompts": 0},
    "at least one matrix": {"J": {}, "source_layers": []},
    r"J\[0\] must be finite": {"J": {0: torch.full((5, 5), torch.inf)}, "source_layers": [0]},
    "a layer of J must": {"J": {-1: torch.eye(5)}, "source_layers": [-1]},
    "estimator must be 'jacobian_lens'": {"metadata": {"estimator": "other"}},
    "hook_convention must be": {"metadata": {"hook_convention": "blocks.{layer}.hook_in"}},
    "target_layer must be a whole number of at least 3": {"metadata": {"target_layer": 2}},
    "only plain values; got Tensor": {"metadata": {"notes": [torch.ones(2)]}},
    "'J' is missing": {"J": None},
    "checkpoint of a fit": {"J": None, "jacobian_sum": {}, "n_done": 3},
}


@pytest.mark.parametrize("reason", WRONG)
def test_other_files_are_refused_in_one_line(reason, tmp_path):
    path = tmp_path / "wrong.pt"
    content = torch.load(WRITTEN, weights_only=True) | WRONG[reason]
    torch.save({key: part for key, part in content.items() if part is not None}, path)
    with pytest.raises(CacheError, match=rf"wrong\.pt must be .*{reason}") as raised:
        JacobianLens.from_published(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_runs_code_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "code.pt")
    with pytest.raises(CacheError, match="only tensors and plain values"):
        JacobianLens.from_published(tmp_path / "code.pt")
    with pytest.raises(FileNotFoundError):
        JacobianLens.from_published(tmp_path / "none.pt")
