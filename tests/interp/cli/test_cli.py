"""The command line: the files that it writes, the text that it prints, and its errors."""

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import interp.__main__ as start
import interp.cli.report as cli
import models
from interp.cli.command import main
from interp.report import SITES
from models import CharTokenizer, Transformer, TransformerConfig, save
from tests.count import ROOT
from tests.interp.pages import embedded, numbers, patches_of, scores_of
from tests.pretended import DEVICE, Devices


def small(vocab_size, n_ctx=89):
    torch.manual_seed(0)
    sizes = dict(n_ctx=n_ctx, n_layers=2, n_heads=3, d_model=6)
    model = Transformer(TransformerConfig(vocab_size=vocab_size, **sizes))
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.5)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a small random model whose tokenizer can encode the default prompt."""
    tokenizer = CharTokenizer.of(cli.DEFAULT_PROMPT + cli.DEFAULT_CORRUPTED + "acdefhinorstuv")
    path = tmp_path_factory.mktemp("model")
    save(path, small(len(tokenizer.characters)), tokenizer)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory for each test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments):
    """Run a command that must fail, and return its error of one line.

    Check that it leaves no file behind.
    """
    before = sorted(Path.cwd().rglob("*"))
    assert main(arguments) == 1
    assert sorted(Path.cwd().rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def command_line(*arguments):
    command = [sys.executable, "-m", "interp", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def opened(page):
    return page.read_text("utf-8")


def test_no_argument_is_needed(here):
    """Without arguments, the command uses the bundled model and the default prompts."""
    done = command_line("report")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in here.iterdir()] == ["report.html"]
    page = opened(here / "report.html")
    assert len(embedded(page)["Loss of each token"]["tokens"]) == len(cli.DEFAULT_PROMPT)
    assert embedded(page)["Patching: What attention adds"]["marked"] == [len("The part ZQXJ-KV8")]
    assert scores_of(page, "Induction").max() > 0.3
    assert scores_of(page, "Previous-token").max() > 0.3


def test_a_warning_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr("interp.cli.command.main", lambda: 0)
    assert start.script() == 0
    assert warnings.formatwarning("seen", UserWarning, "file.py", 7) == "warning: seen\n"


def test_the_summary_says_what_the_page_shows(saved, here, capsys):
    prompt = "the returns"
    (here / "page.html").touch(mode=0o604)
    assert main(["report", "--model", saved, "--prompt", prompt, "--out", "page.html"]) == 0
    assert (here / "page.html").stat().st_mode % 0o1000 == 0o604
    out = capsys.readouterr().out
    page = opened(here / "page.html")
    lens = embedded(page)["Logit lens"]
    text, probability = lens["cells"][len(prompt) - 1], numbers(lens["values"])[0, 0, -1]
    assert f"next token {text.replace('·', ' ')!r} {probability:.1%}" in out
    assert f"clean      {prompt}".replace(" ", "·") in out.replace(" ", "·")
    for kind in ("Previous-token", "Induction"):
        scores = scores_of(page, kind)
        layer, head = divmod(int(scores.argmax()), scores.shape[1])
        assert re.search(
            rf"{kind} heads +layer {layer}, head {head}  \+{scores.max():.2f}"[:-1], out
        )
    patches = patches_of(page)
    # Several places of this site restore everything, so none of them is the largest.
    assert patches.pop("resid_pre").max() == pytest.approx(1, abs=1e-4)
    for site, shares in patches.items():
        layer, place = divmod(int(shares.abs().argmax()), shares.shape[1])
        kind = "head" if site == "z" else "pos"
        value = f"{shares[layer, place]:+.2f}"[:4]
        assert re.search(
            rf"{SITES[site]} +layer {layer}, {kind} {place}\b.* {re.escape(value)}", out
        )
    [pos] = embedded(page)["Patching: What attention adds"]["marked"]
    assert f"derived: {prompt[pos]!r} at position {pos} became" in out


def test_corrupted_alone_goes_with_the_default_prompt(saved, here, monkeypatch):
    monkeypatch.setattr(cli, "DEFAULT_PROMPT", "the returns")
    (here / "pages").mkdir()
    (here / "report.html").symlink_to("pages/real.html")
    assert main(["report", "--model", saved, "--corrupted", "ahe returns"]) == 0
    assert embedded(opened(here / "report.html"))["Patching: What attention adds"]["marked"] == [0]
    # The page is written through the symbolic link, which stays.
    assert (here / "report.html").is_symlink()
    assert [path.name for path in (here / "pages").iterdir()] == ["real.html"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["--prompt", "def Ωq"], "'q', 'Ω'"),
        (["--prompt", "def", "--corrupted", "déf"], "'é'"),
        (["--prompt", "a\udce9b"], "udce9"),
        (["--prompt", ""], "at least one token"),
        (["--prompt", "d"], " 1"),
        (["--prompt", "de" * 45], "89.*90"),
        (["--prompt", "def", "--corrupted", ""], "at least one token"),
        (["--prompt", "def", "--corrupted", "deff"], "3 and 4"),
        (["--corrupted", "def"], f"{len(cli.DEFAULT_PROMPT)} and 3"),
        (["--prompt", "def", "--corrupted", "def"], "0.0001"),
        (["--prompt", "ddd"], "3 times"),
        (["--model", "pydoc-5l"], "'pydoc-5l'.*pydoc-4l"),
        (["--model", "tiny-lmm"], "'tiny-lmm'.*'tiny-lm'"),
        (["--model", "svd-64-2l"], "'svd-64-2l'.* train"),
    ],
)
def test_models_and_texts_without_a_report(saved, capsys, given, match):
    assert re.search(match, refused(capsys, "report", "--model", saved, *given))


def test_models_and_tokenizers_that_are_not_there(here, capsys):
    assert "'nowhere'" in refused(capsys, "points", "--model", "nowhere")
    (here / "config.json").write_text("{")
    assert "config.json" in refused(capsys, "points", "--model", str(here))
    save(here / "m", small(3), CharTokenizer("abc"))
    (here / "m" / "vocabulary.json").unlink()
    assert "tokenizer" in refused(capsys, "report", "--model", "m")


def test_vocabularies_of_model_and_tokenizer_that_differ(here, capsys):
    save(here / "mixed", small(3), CharTokenizer("abcde"))
    assert " 4 " in refused(capsys, "report", "--model", "mixed", "--prompt", "abed")
    # The vocabularies of many models are padded.
    save(here / "padded", small(5, n_ctx=5), CharTokenizer("abc"))
    assert main(["report", "--model", "padded", "--prompt", "abca"]) == 0
    tips = embedded(opened(here / "report.html"))["Logit lens"]["tips"]
    assert {text for text, _ in tips[0]} == {"a", "b", "c", "<token·3>", "<token·4>"}


def test_default_prompts_of_different_lengths_are_no_pair(saved, here, monkeypatch):
    """With some tokenizers, the default texts have different numbers of tokens. Then the report
    derives a corrupted text.
    """
    monkeypatch.setattr(cli, "DEFAULT_PROMPT", "the returns")
    monkeypatch.setattr(cli, "DEFAULT_CORRUPTED", "the return")
    assert main(["report", "--model", saved]) == 0
    assert "derived: " in (here / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("known", "n_ctx"), [("\nabc", 89), ("the returns", 7)])
def test_the_model_writes_the_prompt_if_it_cannot_read_the_default(here, monkeypatch, known, n_ctx):
    """One model has no tokens for some characters, and one model has too few positions.

    Both models would generate the end of a text first. The tokenizer is changed so that encoding a
    decoded text gives other tokens, as with most tokenizers.
    """
    encode = CharTokenizer.encode
    monkeypatch.setattr(CharTokenizer, "encode", lambda self, text: 2 * encode(self, text))
    monkeypatch.setattr(cli, "DEFAULT_PROMPT", "the returns")
    monkeypatch.setattr(cli, "DEFAULT_CORRUPTED", "the turners")
    tokenizer = CharTokenizer.of(known)
    model = small(len(tokenizer.characters), n_ctx)
    model.config = model.config.replace(eos_token_ids=tuple(range(model.config.vocab_size)))
    save(here / "m", model, tokenizer)
    assert main(["report", "--model", "m"]) == 0
    tokens = embedded(opened(here / "report.html"))["Loss of each token"]["tokens"]
    assert len(tokens) == min(n_ctx, 11)
    assert set(tokens) <= set(known.replace("\n", "⏎").replace(" ", "·"))


def test_places_that_the_page_cannot_go(here, capsys, monkeypatch):
    # The errors come before the model is loaded.
    monkeypatch.setattr(models, "load", None)
    for out in ("missing/page.html", ".", "x" * 300):
        assert repr(out) in refused(capsys, "report", "--out", out)
    with pytest.raises(SystemExit):
        main(["report", "--out", ""])
    assert "got an empty text" in capsys.readouterr().err


def test_a_page_for_a_stream_is_written_to_it(saved, here, capfd):
    print("before", flush=True)
    assert main(["report", "--model", saved, "--prompt", "def", "--out", "/dev/stdout"]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch("before\n<!DOCTYPE html>.*</html>\n", out, re.S)
    assert "wrote /dev/stdout" in err
    assert not list(here.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space"), KeyboardInterrupt("interrupted")])
def test_a_page_that_cannot_be_written_leaves_the_old_one(saved, here, capsys, monkeypatch, error):
    def broken(*_):
        raise error

    (here / "report.html").write_text("good")
    monkeypatch.setattr(os, "replace", broken)
    status = main(["report", "--model", saved, "--prompt", "def"])
    assert status == (1 if isinstance(error, OSError) else 130)
    assert error.args[-1] in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["report.html"]
    assert (here / "report.html").read_text() == "good"


def test_a_report_from_another_device(saved, here):
    assert main(["report", "--model", saved, "--prompt", "def"]) == 0
    losses = [numbers(embedded(opened(here / "report.html"))["Loss of each token"]["values"])]
    with Devices():
        assert main(["report", "--model", saved, "--prompt", "def", "--device", DEVICE.type]) == 0
    losses.append(numbers(embedded(opened(here / "report.html"))["Loss of each token"]["values"]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_dtype_of_a_report(saved, here, monkeypatch, dtype):
    load, loaded = models.load, []
    monkeypatch.setattr(models, "load", lambda *a, **b: loaded.append(load(*a, **b)) or loaded[-1])
    assert main(["report", "--model", saved, "--prompt", "def", "--dtype", dtype]) == 0
    assert loaded[0].W_E.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "no"])
def test_devices_that_are_not_here(capsys, device):
    with pytest.raises(SystemExit):
        main(["points", "--device", device])
    assert repr(device) in capsys.readouterr().err


def test_usage(capsys):
    for wrong in ([], ["rapport"], ["report", "--depth", "3"], ["report", "--out"]):
        with pytest.raises(SystemExit) as exit:
            main(wrong)
        assert exit.value.code == 2
        assert "usage: hookscope" in capsys.readouterr().err


def test_points(saved, capsys):
    assert main(["points", "--model", saved]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["blocks.0-1.attn.z", "batch", "pos", "head", "d_head"] in [row[:5] for row in lines]


def test_points_of_a_registered_config(here, capsys, monkeypatch):
    build, built = models.build, []
    monkeypatch.setattr(models, "build", lambda name: built.append(build(name)) or built[-1])
    assert main(["points", "--model", "gpt2-xl"]) == 0
    assert "blocks.0-47.attn.z" in capsys.readouterr().out
    assert all(weights.is_meta for weights in built[0].parameters()), "they need no memory"
    # If a directory has the name, the model in the directory is used, as in `load`.
    save(here / "gpt2-xl", small(3))
    assert main(["points", "--model", "gpt2-xl"]) == 0
    assert "blocks.0-1.attn.z" in capsys.readouterr().out


@pytest.mark.parametrize(("output", "error"), [("| true", ""), ("> /dev/full", "error: .*\n")])
def test_output_that_cannot_be_written_gives_no_traceback(saved, monkeypatch, output, error):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = f"'{sys.executable}' -m interp points --model '{saved}' {output}"
    command = ["bash", "-c", f"{command}; exit $PIPESTATUS"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.fullmatch(error, done.stderr)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("package", "text", "status", "error"),
    [
        ("hooks", "", 1, "error: .*{}.*\n"),
        ("models", "1 / 0", 1, "error: .*{}.*\n"),  # the user's module is found, but not run
    ],
)
def test_a_module_that_shadows_ours_gives_no_traceback(here, package, text, status, error):
    file = here / f"{package}.py"
    file.write_text(text)
    done = command_line("points")
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(error.format(re.escape(str(file))), done.stderr)


PRESSING = """
import os, signal, sys

class Presses:
    def find_spec(name, path=None, target=None):
        if name == {!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses)
"""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("module", ["hooks", "torch.nn", "interp.cli.common", "models"])
def test_ctrl_c_during_imports_gives_no_traceback(here, monkeypatch, module):
    (here / "sitecustomize.py").write_text(PRESSING.format(module))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, ROOT))))
    done = command_line("points", "--model", "pydoc-4l")
    assert done.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in done.stderr
