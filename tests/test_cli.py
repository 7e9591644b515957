"""The command line: what it writes, what it prints, and how it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import interp.__main__ as cli
from interp.__main__ import main
from models import CharTokenizer, Transformer, TransformerConfig, load, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model, saved; its tokenizer knows what the default prompt needs."""
    torch.manual_seed(3)
    tokenizer = CharTokenizer.of(cli.DEFAULT_PROMPT + cli.DEFAULT_CORRUPTED + "acdefhinorstuv")
    config = TransformerConfig(
        vocab_size=len(tokenizer.characters), n_ctx=89, n_layers=2, n_heads=3, d_model=15
    )
    model = Transformer(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.3)
    path = tmp_path_factory.mktemp("model")
    save(path, model, tokenizer)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refusal, which leaves no file behind."""
    before = sorted(Path.cwd().rglob("*"))
    assert main(arguments) == 1
    assert sorted(Path.cwd().rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def embedded(page: Path) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_no_argument_is_needed(here: Path) -> None:
    """The bundled model, on the default prompt."""
    done = subprocess.run(
        [sys.executable, "-m", "interp", "report"], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in here.iterdir()] == ["report.html"]
    assert "wrote report.html" in done.stdout
    found = embedded(here / "report.html")
    assert len(found["tokens"]) == len(cli.DEFAULT_PROMPT)
    model = load(cli.DEFAULT_MODEL)
    assert found["shape"][:2] == [model.config.n_layers, model.config.n_heads]


def test_the_summary_says_what_the_page_shows(
    saved: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "the function returns a value"
    assert main(["report", "--model", saved, "--prompt", prompt, "--out", "page.html"]) == 0
    out = capsys.readouterr().out
    found = embedded(here / "page.html")
    [(text, probability), *_] = found["guesses"][-1][-1]
    first = next(line for line in out.splitlines() if "%" in line).split()
    assert first == [repr(text.replace("·", " ").replace("⏎", "\n")), f"{probability:.1%}"]
    assert f"clean      {prompt}".replace("\n", "⏎").replace(" ", "·") in out.replace(" ", "·")
    for kind, name in (("previous", "previous-token"), ("induction", "induction")):
        score, layer, head = max(
            (score, layer, head)
            for layer, row in enumerate(found["scores"][kind])
            for head, score in enumerate(row)
        )
        assert re.search(rf"{name} +layer {layer} head {head} +{score:.2f}", out)
    for site, patched in found["patches"].items():
        share, layer, place = max(
            ((share, layer, place)
             for layer, row in enumerate(patched["share"])
             for place, share in enumerate(row)),
            key=lambda cell: abs(cell[0]),
        )  # fmt: skip
        kind = "head" if site == "z" else "position"
        assert re.search(rf"{site} +layer {layer} {kind} {place}\b.* {share:.1%}", out)
    [pos] = found["changed"]
    assert f"derived: {prompt[pos]!r} at position {pos} became" in out


def test_corrupted_alone_goes_with_the_default_prompt(saved: str, here: Path) -> None:
    corrupted = "a" + cli.DEFAULT_PROMPT[1:]
    assert main(["report", "--model", saved, "--corrupted", corrupted]) == 0
    assert embedded(here / "report.html")["changed"] == [0]


def test_the_default_prompts_fit_each_other() -> None:
    assert len(cli.DEFAULT_PROMPT) == len(cli.DEFAULT_CORRUPTED)
    assert cli.DEFAULT_PROMPT != cli.DEFAULT_CORRUPTED


def test_prompts_that_no_report_can_be_made_of(
    saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("report", "--model", saved)
    unknown = refused(capsys, *model, "--prompt", "def Ωq")
    assert "--prompt: the tokenizer has no token for 'q', 'Ω'" in unknown
    assert "--corrupted: the tokenizer has no token for 'é'" in refused(
        capsys, *model, "--prompt", "def", "--corrupted", "dé" + "f"
    )
    for prompt, count in (("", "0 tokens"), ("d", "1 token"), ("de" * 45, "90 tokens")):
        line = refused(capsys, *model, "--prompt", prompt)
        assert f"--prompt has {count}, and must have 2 to 89, the model's context" in line
    assert "--corrupted has 0 tokens" in refused(
        capsys, *model, "--prompt", "def", "--corrupted", ""
    )
    assert "equally many tokens, not 3 and 4" in refused(
        capsys, *model, "--prompt", "def", "--corrupted", "deff"
    )
    assert f"not {len(cli.DEFAULT_PROMPT)} and 3" in refused(capsys, *model, "--corrupted", "def")
    assert "differ in the metric" in refused(
        capsys, *model, "--prompt", "def", "--corrupted", "def"
    )
    assert "repeats a single token" in refused(capsys, *model, "--prompt", "ddd")


def test_models_that_are_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "report", "--model", "pydoc-5l")
    assert "'pydoc-5l'" in line
    assert "available: pydoc-4l" in line
    assert "'nowhere'" in refused(capsys, "points", "--model", "nowhere")
    (here / "config.json").write_text("{")
    assert "is not JSON" in refused(capsys, "points", "--model", str(here))


def test_a_context_too_short_to_repeat_anything(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TransformerConfig(vocab_size=3, n_ctx=3, n_layers=1, n_heads=1, d_model=2)
    save(here / "tiny", Transformer(config), CharTokenizer("abc"))
    line = refused(capsys, "report", "--model", "tiny", "--prompt", "ab")
    assert "context of at least 4 tokens, not 3" in line


def small(vocab_size: int, n_ctx: int = 7) -> Transformer:
    torch.manual_seed(0)
    sizes = dict(n_ctx=n_ctx, n_layers=1, n_heads=1, d_model=6)
    model = Transformer(TransformerConfig(vocab_size=vocab_size, **sizes))
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.5)
    return model


def test_tokens_that_only_the_tokenizer_knows(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(here / "mixed", small(3), CharTokenizer("abcde"))
    model = ("report", "--model", "mixed")
    for given in (["--prompt", "abed"], ["--prompt", "abca", "--corrupted", "abea"]):
        line = refused(capsys, *model, *given)
        assert f"{given[-2]} has token 4, 'e', and the model knows 3 tokens, 0 to 2" in line
    assert main([*model, "--prompt", "abca"]) == 0


def test_tokens_that_only_the_model_knows(here: Path) -> None:
    """The vocabularies of many models are padded."""
    save(here / "padded", small(5), CharTokenizer("abc"))
    assert main(["report", "--model", "padded", "--prompt", "abca"]) == 0
    guesses = embedded(here / "report.html")["guesses"]
    assert {text for text, _ in guesses[0][0]} == {"a", "b", "c", "<token·3>", "<token·4>"}


def words(directory: Path, *pieces: str) -> None:
    """Puts a byte-level tokenizer.json there, which joins letters to these pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made, merges = list(alphabet), []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in made:
                made.append(piece[:end])
                merges.append((piece[: end - 1], piece[end - 1]))
    vocabulary = {piece: token for token, piece in enumerate(made)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture
def worded(here: Path) -> str:
    """A model of 300 tokens, most of several characters; of "81" and "84" one is a token."""
    save(here / "worded", small(300, n_ctx=90), CharTokenizer("a"))
    (here / "worded" / "vocabulary.json").unlink()
    words(here / "worded", "the", "Ġcat", "Ġsat", "incomprehensible", "81")
    return "worded"


def test_tokens_of_several_characters(worded: str, here: Path) -> None:
    prompt = "the cat sat\n日incomprehensible"
    assert main(["report", "--model", worded, "--prompt", prompt]) == 0
    found = embedded(here / "report.html")
    assert found["tokens"] == [
        "the", "·cat", "·sat", "⏎", r"\xe6", r"\x97", r"\xa5", "incomprehensible",
    ]  # fmt: skip
    assert found["shape"] == [1, 1, 8]
    [pos] = found["changed"]
    assert pos < 7


def test_default_prompts_of_different_lengths_are_not_paired(worded: str, here: Path) -> None:
    from models import load_tokenizer

    tokenizer = load_tokenizer(worded)
    clean, corrupted = map(tokenizer.encode, (cli.DEFAULT_PROMPT, cli.DEFAULT_CORRUPTED))
    assert len(clean) == len(corrupted) - 1
    assert main(["report", "--model", worded]) == 0
    assert "Derived, not given" in (here / "report.html").read_text(encoding="utf-8")


def test_tokenizers_that_cannot_be_loaded(
    worded: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        line = refused(capsys, "report", "--model", worded)
        assert line == 'error: tokenizers is missing: pip install "hookscope[hf]"\n'
    refused(capsys, "report", "--model", worded, "--prompt", "a\udce9b")
    path = here / worded / "tokenizer.json"
    path.write_text("{")
    assert "tokenizer.json is not a tokenizer.json: " in refused(
        capsys, "report", "--model", worded
    )
    path.unlink()
    assert "holds no tokenizer" in refused(capsys, "report", "--model", worded)


def test_induction_takes_a_shorter_period_where_the_context_is_short(here: Path) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=3, n_ctx=5, n_layers=1, n_heads=1, d_model=7)
    model = Transformer(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.3)
    save(here / "tiny", model, CharTokenizer("abc"))
    given = ["--prompt", "abca", "--corrupted", "bbca"]
    assert main(["report", "--model", "tiny", *given]) == 0
    assert "over 2 random tokens" in (here / "report.html").read_text(encoding="utf-8")


def test_places_that_the_page_cannot_go(
    saved: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All are refused before the model is loaded.
    monkeypatch.setattr(cli.models, "load", None)
    model = ("report", "--model", saved, "--out")
    line = refused(capsys, *model, "missing/page.html")
    assert "'missing/page.html' cannot be written: there is no directory" in line
    assert "it is a directory" in refused(capsys, *model, ".")
    assert "it is a directory" in refused(capsys, *model, "")
    assert "not a regular file" in refused(capsys, *model, os.devnull)
    assert "File name too long" in refused(capsys, *model, "x" * 300)
    (here / "loop").symlink_to("loop")
    assert "cannot be written" in refused(capsys, *model, "loop")
    kept = here / "kept.html"
    kept.write_text("good")
    # Tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "write-protected" in refused(capsys, *model, "kept.html")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", denied)
    assert "'page.html' cannot be written: Permission denied" in refused(
        capsys, *model, "page.html"
    )
    assert kept.read_text() == "good"


def test_a_page_that_cannot_be_written_whole_leaves_the_old_one(
    saved: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "report.html").write_text("good")

    def full(path: Path, text: str, **_: object) -> None:
        with path.open("w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    for owner, name, broken in ((Path, "write_text", full), (os, "replace", busy)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            assert main(["report", "--model", saved]) == 1
        assert "'report.html' could not be written: " in capsys.readouterr().err
        assert [path.name for path in here.iterdir()] == ["report.html"]
        assert (here / "report.html").read_text() == "good"


def test_a_link_stays_a_link(saved: str, here: Path) -> None:
    (here / "pages").mkdir()
    (here / "report.html").symlink_to("pages/real.html")
    assert main(["report", "--model", saved]) == 0
    assert (here / "report.html").is_symlink()
    assert [path.name for path in (here / "pages").iterdir()] == ["real.html"]


def test_ctrl_c_leaves_nothing(
    saved: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("interp.report.activation_patching", stop)
    assert main(["report", "--model", saved]) == 130
    assert list(here.iterdir()) == []
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_a_missing_jinja2_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "interp.report", raising=False)
    assert 'pip install "hookscope[report]"' in refused(capsys, "report")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m interp" in capsys.readouterr().err
    for wrong in (["rapport"], ["report", "--depth", "3"], ["report", "--out"]):
        with pytest.raises(SystemExit) as exit:
            main(wrong)
        assert exit.value.code == 2
        assert "usage: python -m interp" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0


def test_points(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["points", "--model", saved]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split()[:5] == ["blocks.0-1.attn.z", "batch", "pos", "head", "d_head"]
        for line in lines
    )


def test_a_reader_that_goes_away_is_no_traceback(saved: str) -> None:
    command = f'"{sys.executable}" -m interp points --model "{saved}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_importing_interp_needs_no_template_engine() -> None:
    code = "import sys, interp; sys.exit('jinja2' in sys.modules or 'models' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
