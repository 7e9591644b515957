"""The commands `points`, `lens`, `patch`, `features`, `trace`, `generate` and `harvest`.

They print the results of the same calls in Python.
"""

import fnmatch
import io
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import warnings

import numpy
import pytest
import torch
from safetensors.torch import save_file

import hooks
from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, load_transcoders, logit_lens
from interp.cli.command import main
from interp.cli.common import OPTIONS
from interp.cli.edits import parsed
from interp.directions import Direction
from interp.store import Activations, HarvestConfig, harvest
from models import generate_text, load, load_tokenizer
from models.checkpoints.loading import locate
from tests.interp.json_schema import require_schema
from tests.shipped import pydoc

CLEAN, OTHER = (f"part ZQXJ-KV8{digit} is out; ask for ZQXJ-KV8" for digit in "14")


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    """Run a command that must fail, and return its error of one line."""
    try:
        status = main(arguments)
    except SystemExit as error:  # the parser of options ends the program
        status = error.code
    out, err = capsys.readouterr()
    assert status in (1, 2)
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("lens --promt x", "option of hookscope lens is named '--promt'; close matches: --prompt"),
        ("lens --promt=x", "'--promt'; close matches: --prompt"),
        ("lens --prompt x --topp 3", "'--topp'; close matches: --top"),
        ("lens --promt='def f(x):'", "'--promt'; close matches: --prompt"),
        ("verify --seed 3", "required: CLAIM"),
        ("points --top 3", "option of hookscope points is named '--top'"),
        ("--verison", "no option is named '--verison'; close matches: --version"),
        ("lens -prompt x", "'-prompt'; close matches: --prompt"),
        # These arguments are no options.
        ("lens -- --promt", "--prompt --text-file is required"),
        ("lens --top -3", "--prompt --text-file is required"),
        ("lens '--promt is a text'", "--prompt --text-file is required"),
    ],
)
def test_an_unknown_option_is_named_with_close_matches(capsys, arguments, error):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(arguments))
    assert caught.value.code == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_a_text_with_the_name_of_a_command_is_a_text(capsys):
    printed(capsys, "lens", "--prompt", "report", "--top", "1")


def test_a_text_may_look_like_an_option(capsys):
    printed(capsys, "lens", "--prompt", "--x=def f(x):", "--top", "1")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "name", ["points", "lens", "patch", "features", "trace", "generate", "harvest", "report"]
)
def test_the_example_in_the_help_prints_the_json_form(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "part AB1"}\n{"text": "and part AB"}\n')
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"hookscope {name}" in " ".join(capsys.readouterr().out.split())
    example = OPTIONS["commands"][name]["example"].replace("gpt2-medium", "tiny-lm")
    require_schema(json.loads(printed(capsys, *shlex.split(example), "--json")))


def test_the_lens_matches_python(capsys):
    model = pydoc()
    readout = logit_lens(model, HookedRunner(model).run_with_cache(CLEAN, lazy=True)[1], top_k=3)
    data = json.loads(printed(capsys, "lens", "--prompt", CLEAN, "--top", "3", "--json"))
    assert data == readout.as_json()
    likeliest = data["tables"]["first.likeliest"]["values"]
    assert data["tables"]["first.words"]["values"] == [*CLEAN]
    assert likeliest == model.to_pieces(readout.tokens[:, 0])
    table = printed(capsys, "lens", "--prompt", CLEAN, "--last", "2").splitlines()
    assert table[0].split() == ["stream", "'V'", "'8'"]
    assert table[-2].split()[-2] == repr(likeliest[-1][-1][0])
    assert "--last must be a whole number of at least 1; got 0" in refused(
        capsys, "lens", "--prompt", CLEAN, "--last", "0"
    )


def test_features_match_python(capsys):
    model, point = pydoc(), "blocks.1.mlp_out"
    transcoder = load_transcoders("pydoc-4l/transcoders")[point]
    given = ["features", "--prompt", CLEAN, "--dictionary", "pydoc-4l/transcoders", "--at", point]
    data = json.loads(printed(capsys, *given, "--top", "3", "--json"))
    read = HookedRunner(model).capture(CLEAN, names=transcoder.reads)[transcoder.reads]
    best = transcoder.encode(read)[0].amax(0).topk(3)
    assert data["tables"]["feature.index"]["values"] == best.indices.tolist()
    largest = torch.tensor(data["tables"]["feature.largest"]["values"])
    torch.testing.assert_close(largest, best.values)
    assert "feature 5:" in printed(capsys, *given, "--feature", "5")
    assert "blocks.3.mlp_out" in refused(capsys, *given[:-2])
    assert "[0, 1024)" in refused(capsys, *given, "--feature", "1024")
    assert "no hook point" in refused(capsys, "features", "--prompt", "x", "--at", "nowhere")
    assert "must be a folder or a file" in refused(
        capsys, "features", "--prompt", "x", "--dictionary", "nowhere"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        printed(capsys, "features", "--prompt", "def", "--at", "blocks.1.attn_out", "--top", "2")
    (warned,) = caught
    assert "at blocks.2.resid_post and is used at blocks.1.attn_out" in str(warned.message)


def test_jobs_of_a_harvest_match_python(capsys, tmp_path):
    texts = [f"part {n} of the list" for n in range(30)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    options = "--point blocks.1.mlp_out --point blocks.1.attn.z --context 8 --pack".split()
    options += ["--skip-first", "--values", "float16", "--batch", "3", "--per-file", "7"]
    given = ["harvest", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "out"), *options]
    assert "which fits on the disk" in printed(capsys, *given, "--plan")
    planned = json.loads(printed(capsys, *given, "--plan", "--json"))
    assert planned["tables"]["texts"]["values"] == 30
    for job in ("1/2", "0/2"):
        assert main([*given, "--shard", job]) == 0
    names = ["blocks.1.mlp_out", "blocks.1.attn.z"]
    settings = {"context": 8, "pack": True, "pos": slice(1, None), "dtype": torch.float16}
    store = harvest(
        pydoc(),
        texts,
        names,
        tmp_path / "python",
        config=HarvestConfig(batch=3, per_file=7, **settings),
    )
    assert Activations(tmp_path / "out").checksums == store.checksums
    out = capsys.readouterr().out.splitlines()
    assert out == ["Activations of 2 points, not complete", repr(store)]
    assert "JOB/JOBS" in refused(capsys, *given, "--shard", "1 of 2")
    assert "0 <= job < jobs" in refused(capsys, *given, "--shard", "2/2")
    assert "same dtype" in refused(capsys, *given, "--values", "float32")


def test_patches_match_python(capsys):
    pairs = Pairs(CLEAN, OTHER, ("1", "4"))
    given = ["patch", "--prompt", CLEAN, "--corrupted", OTHER, "--answers", "1", "4"]
    for site, over in (("z", ["layer", "head"]), ("resid_pre", None)):
        result = activation_patching(pydoc(), pairs, site, over)
        more = ["--site", site, *(["--over", *over] if over else [])]
        data = json.loads(printed(capsys, *given, *more, "--json"))
        assert data == result.as_json()
        text = printed(capsys, *given, *more, "--top", "2")
        assert repr(result.top(2)).splitlines()[0] in text


def test_texts_of_unequal_length_name_the_options(capsys):
    given = ["patch", "--prompt", "part KV8", "--corrupted", "part", "--answers", "1", "4"]
    assert main(given) == 1
    error = capsys.readouterr().err
    assert "the prompt and --corrupted must have equally many tokens; got 8, 'p|a|r|t| |K" in error
    assert "and 4, 'p|a|r|t'" in error
    assert "spans" not in error


def test_answers_of_several_tokens_are_measured_in_nats(capsys):
    answers = (" 1 and", " 4 or b")
    given = ["patch", "--prompt", CLEAN, "--corrupted", OTHER, "--site", "mlp_out"]
    result = activation_patching(pydoc(), Pairs(CLEAN, OTHER, answers), "mlp_out")
    data = json.loads(printed(capsys, *given, "--answers", *answers, "--json"))
    assert data == result.as_json()
    text = printed(capsys, *given, "--answer", *answers)
    assert "log-probability of ' 1 and' less that of ' 4 or b', in nats" in text


def test_generation_under_edits_matches_python(capsys):
    model, change = pydoc(), "blocks.3.attn.z zero head=0,3 pos=4:"
    edit = edits.zero(head=[0, 3], pos=slice(4, None))
    with HookedRunner(model).hooks({"blocks.3.attn.z": edit}):
        expected = generate_text(model, CLEAN, max_new_tokens=5)
    given = ["generate", "--prompt", CLEAN, "--tokens", "5"]
    assert printed(capsys, *given, "--edit", change) == f"{expected}\n"
    assert printed(capsys, *given) != f"{expected}\n"


def test_texts_and_output_may_be_files(tmp_path, capsys):
    source, out = tmp_path / "text.txt", tmp_path / "out.json"
    # Some editors begin a file with a mark of the encoding.
    source.write_text(f"{CLEAN}\n", encoding="utf-8-sig")
    main(["generate", "--text-file", str(source), "--tokens", "3", "--json", "--out", str(out)])
    tables = json.loads(out.read_text())["tables"]
    assert tables["prompt"]["values"] == CLEAN
    assert len(tables["text"]["values"]) == len(CLEAN) + 3
    assert capsys.readouterr().out == ""


def test_the_suffix_of_a_file_decides_its_format(tmp_path, capsys):
    data = json.loads(printed(capsys, "points", "--json"))
    for name in ("x.json", "x.JSON"):
        assert main(["points", "--out", str(tmp_path / name)]) == 0
        assert json.loads((tmp_path / name).read_text()) == data
    text = printed(capsys, "points")
    for name in ("x.txt", "a.json/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        assert main(["points", "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text() == text


def test_a_generation_is_steered_by_a_file(tmp_path, capsys):
    direction = Direction({"blocks.2.resid_post": torch.linspace(-2, 2, 128)})
    direction.save(tmp_path / "v.safetensors")
    direction.to_gguf(tmp_path / "v.gguf")
    model = pydoc()
    with HookedRunner(model).hooks({"blocks.2.resid_post": edits.add(direction, 2.5)}):
        expected = generate_text(model, CLEAN, max_new_tokens=6, temperature=0.0)
    for name in ("v.safetensors", "v.gguf"):
        given = [
            "generate",
            "--prompt",
            CLEAN,
            "--tokens",
            "6",
            "--steer",
            f"{tmp_path / name}:2.5",
        ]
        assert printed(capsys, *given).removesuffix("\n") == expected
    assert expected != generate_text(model, CLEAN, max_new_tokens=6, temperature=0.0)
    for wrong, message in (
        (f"{tmp_path / name}:much", "a file and a number"),
        ("no.safetensors", "no.safetensors"),
    ):
        assert message in refused(capsys, "generate", "--prompt", "x", "--steer", wrong)


def saved(kind, folder):
    """Save a tiny model with a tokenizer of the words w0, w1, ..., and return the model."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    from tests.attachable import VOCAB, made

    model = made(kind)
    model.save_pretrained(folder)
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    return model


def test_the_seed_of_a_generation_of_an_attached_model(tmp_path, capsys):
    """Each seed gives the same text again, and the caller's random numbers do not change."""
    model = saved("olmoe", tmp_path)
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        settings = dict(max_new_tokens=9, do_sample=True, temperature=1.0)
        expected = model.generate(torch.tensor([[3, 5, 7]]), **settings)[0].tolist()
    given = ["generate", "--model", str(tmp_path), "--prompt", "w3 w5 w7", "--tokens", "9"]
    given += ["--temperature", "1"]
    state = torch.get_rng_state()
    text = printed(capsys, *given, "--seed", "5")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert printed(capsys, *given, "--seed", "5") == text
    assert text.split() == [f"w{token}" for token in expected]
    assert printed(capsys, *given, "--seed", "6") != text


def test_a_family_without_a_table_is_attached(tmp_path, capsys, monkeypatch):
    model = saved("olmoe", tmp_path)
    expected = model(torch.tensor([[3, 5, 7]])).logits[0, -1].softmax(-1).max().item()
    given = ["--model", str(tmp_path), "--prompt", "w3 w5 w7", "--json"]
    data = json.loads(printed(capsys, "lens", *given))
    assert data["tables"]["first.words"]["values"] == ["w3", "w5", "w7"]
    chances = data["tables"]["probabilities"]["values"]
    assert chances[-1][0][-1][0] == pytest.approx(expected, rel=1e-5)
    more = json.loads(printed(capsys, "generate", *given, "--tokens", "2"))
    assert more["tables"]["text"]["values"].startswith("w3 w5 w7")
    # A name on the hub gives the same, because a download is a folder.
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(tmp_path))
    given[1] = "some/olmoe"
    assert json.loads(printed(capsys, "lens", *given)) == data


# A Python file of a model. When it runs, it writes a marker file, and defines a new model type.
CODE = """
from pathlib import Path
from transformers import OlmoConfig, OlmoForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(OlmoConfig):
    model_type = "only_its_own"
class Model(OlmoForCausalLM):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


def with_code(folder, config, tokenizer_config=None):
    """Write a small model with Python code among its files.

    Return the path of the marker file that the code writes when it runs.
    """
    marker = folder.with_name(f"{folder.name} ran")
    saved("olmo", folder)
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    for name, more in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if more is not None:
            kept = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(kept | more))
    return marker


@pytest.mark.parametrize(
    "kind", ["unknown type", "known type", "inside", "tokenizer", "older tokenizer", "of the hub"]
)
def test_code_among_the_files_of_a_model_does_not_run(kind, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "model"
    config, words = {"model_type": "only_its_own", "auto_map": CLASSES}, None
    # `transformers` knows this type, but has no causal language model for it.
    if kind == "known type":
        config = {"model_type": "siglip_text_model", "auto_map": CLASSES}
    # `transformers` looks for the code of a nested config at the path that the config names.
    elif kind == "inside":
        inner = {"model_type": "trocr", "auto_map": {"AutoModel": "code.Model"}}
        inner["_name_or_path"] = str(folder)
        config = {"model_type": "gemma3", "vision_config": inner}
    # `transformers` has no tokenizer of its own for this type.
    elif kind.endswith("tokenizer"):
        classes = ["code.Words", None]
        config = {"model_type": "olmo"}
        words = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": classes}}
        if kind == "older tokenizer":
            words["auto_map"] = classes
        mapping = pytest.importorskip("transformers.models.auto.tokenization_auto")
        monkeypatch.delitem(mapping.TOKENIZER_MAPPING_NAMES, "olmo", raising=False)
        monkeypatch.setattr(
            mapping,
            "TOKENIZER_MAPPING",
            mapping._LazyAutoMapping(mapping.CONFIG_MAPPING_NAMES, mapping.TOKENIZER_MAPPING_NAMES),
        )
    marker = with_code(folder, config, words)
    given = [str(folder)]
    if kind == "of the hub":
        hub = pytest.importorskip("huggingface_hub")

        def download(name, allow_patterns, **options):
            assert not [pattern for pattern in allow_patterns if fnmatch.fnmatch("a.py", pattern)]
            return str(folder)

        monkeypatch.setattr(hub, "snapshot_download", download)
        given = ["some/model"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    said = refused(capsys, "lens", "--prompt", "w3 w5", "--model", *given)
    assert "--trust-remote-code" in said
    assert not marker.exists()
    assert sys.stdin.read() == "y\n" * 9
    # In Python, the readers of this package do not run the code either.
    with pytest.raises(ValueError, match="model_type"):
        load(given[0])
    load_tokenizer(given[0])
    assert not marker.exists()


@pytest.mark.full
def test_code_among_the_files_of_a_model_runs_if_the_user_says_so(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    words = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["code.Words", None]}}
    marker = with_code(folder, {"model_type": "only_its_own", "auto_map": CLASSES}, words)
    given = ["lens", "--prompt", "w3 w5 w7", "--model", str(folder), "--json"]
    command = [sys.executable, "-m", "interp", *given, "--trust-remote-code"]
    settings = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, capture_output=True, text=True, input="n\n", env=settings)
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    data = json.loads(done.stdout)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"model_type": "olmo"})
    )
    model = transformers.OlmoForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    expected = model(torch.tensor([[3, 5, 7]])).logits[0, -1].softmax(-1).max().item()
    assert data["tables"]["first.words"]["values"] == ["w3", "w5", "w7"]
    chances = data["tables"]["probabilities"]["values"]
    assert chances[-1][0][-1][0] == pytest.approx(expected, rel=1e-5)


def test_python_files_of_the_hub_are_downloaded_only_if_they_may_run(tmp_path, monkeypatch):
    hub, asked = pytest.importorskip("huggingface_hub"), []

    def download(name, allow_patterns, **options):
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    locate("some/model")
    assert not [pattern for pattern in asked if fnmatch.fnmatch("code.py", pattern)]
    locate("some/model", code=True)
    assert [pattern for pattern in asked if fnmatch.fnmatch("code.py", pattern)]


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def test_pickled_weights_of_an_attached_model_run_nothing(tmp_path, capsys):
    folder = tmp_path / "model"
    with_code(folder, None)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    for more in ([], ["--trust-remote-code"]):
        given = ["lens", "--prompt", "w3", "--model", str(folder), *more]
        assert str(folder) in (said := refused(capsys, *given))
        assert "only tensors" in said
    assert not (tmp_path / "ran").exists()


def test_a_model_without_a_tokenizer_is_given_one(tmp_path, capsys):
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    for file in (weights, config):
        shutil.copy(locate("pydoc-4l") / file.name, file)
    given = ["lens", "--prompt", "def", "--json", "--model"]
    assert "--tokenizer" in refused(capsys, *given, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert "--tokenizer" in refused(capsys, *given, str(tmp_path))
    expected = printed(capsys, *given, "pydoc-4l")
    assert printed(capsys, *given, str(tmp_path), "--tokenizer", "pydoc-4l") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blocks.*.mlp_out scale 0.5 pos=-1", edits.scale(0.5, pos=-1)),
        ("embed zero pos=2:5", edits.zero(pos=slice(2, 5))),
        ("'embed' noise 0.1", edits.noise(0.1)),
    ],
)
def test_edits_are_parsed(text, expected):
    assert repr(parsed(text)[1]) == repr(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate --prompt a --edit 'blocks.9.attn.z zero'", "close matches"),
        ("generate --prompt a --edit 'blocks.1.attn.z zeroo'", "close matches: zero"),
        ("generate --prompt a --edit blocks.1.attn.z", "a point and a kind"),
        ("generate --prompt a --edit 'zero head=3'", "a point and a kind"),
        (
            "patch --prompt ab --corrupted ac --answers b --site zz",
            "no site is named 'zz'; close matches: z",
        ),
        ("generate --prompt a --edit 'embed scale pos=1'", "needs 1 numbers"),
        ("generate --prompt a --edit 'embed scale x'", "scale needs a number; got 'x'"),
        ("generate --prompt a --edit 'embed zero pos=x'", "pos must be an index"),
        ("generate --prompt a --edit 'embed zero head=1'", "head"),
        (
            "generate --prompt abc --edit 'embed zero pos=-99'",
            "-3 on in a text of 3 tokens; got -99",
        ),
        ("lens --text-file no/such", "No such file"),
        ("lens --prompt a --model no/such", "no file, directory or model"),
        ("patch --prompt ab --corrupted abc --answers a", "equally many tokens"),
        ("patch --prompt ab --corrupted ac --answers a b c", "one or two"),
        ("patch --prompt ab --corrupted ac --answers a --site zz", "zz"),
        ("lens", "--prompt"),
        ("lens --prompt a --out no/such/file", "--out must be a file"),
        ("lens --prompt a --out x.png", ".txt or .json, or have no suffix; got x.png"),
        ("patch --prompt ab --corrupted ac --answers a --out x.CSV", "got x.CSV"),
        ("points --json --out x.txt", "must end in .json"),
        ("report --out x.pdf", ".html, or have no suffix; got x.pdf"),
        ("trace --prompt a --out x.json", "must be a folder; got x.json"),
        ("harvest texts.txt --point embed --out x.safetensors", "a folder; got x.safetensors"),
    ],
)
def test_errors_are_one_line(arguments, said, capsys):
    assert said in refused(capsys, *shlex.split(arguments))


def test_the_version(capsys):
    assert printed(capsys, "--version").startswith(f"hookscope {hooks.__version__}, python 3.")
    versions = json.loads(printed(capsys, "--version", "--json"))["about"]
    numbers = (versions["torch"].partition("+")[0], versions["numpy"])
    assert numbers == (torch.__version__.partition("+")[0], numpy.__version__)
    assert "a command is needed: report, points" in refused(capsys)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("zero self=1", "self"),
        ("scale 0.5 factor=1", "factor="),
        ("noise 0.1 scale=2", "scale="),
        ("noise 0.1 seed=1,2", "1,2"),
        ("noise 0.1 seed=-1", "-1"),
        ("zero head=1 head=2", "head"),
        ("zero head=::0", "::0"),
        ("zero 'a", "'a"),
        ("zero --x=2", "--x"),
    ],
)
def test_names_in_an_edit_that_python_uses_are_no_axes(edit, said, capsys):
    point = f"blocks.1.attn.z {edit}"
    assert said in refused(capsys, "generate", "--prompt", "def", "--tokens", "1", "--edit", point)


@pytest.mark.parametrize(
    "row",
    [
        '{"text": null}',
        '{"text": 3}',
        '{"text": true}',
        '{"text": {"a": 1}}',
        '{"text": [1, "a"]}',
        '{"text": [null]}',
        "null",
        "3.5",
    ],
)
def test_rows_that_hold_no_text_are_named(row, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(f'{{"text": "def"}}\n{row}\n')
    point = ["--point", "blocks.0.resid_post", "--out", str(tmp_path / "store")]
    assert "text 1 must" in refused(capsys, "harvest", str(texts), *point)


@pytest.mark.parametrize("command", ["harvest texts.jsonl --point embed", "trace --prompt def"])
def test_an_empty_folder_is_not_the_working_one(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "def"}\n')
    assert "empty" in refused(capsys, *shlex.split(command), "--out", "")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    [
        "features --dictionary",
        "trace --transcoders",
        "generate --steer",
        "lens --model",
        "lens --tokenizer",
    ],
)
@pytest.mark.parametrize("name", ["junk.safetensors", "cut.safetensors", "junk.pt", "junk.gguf"])
def test_a_damaged_file_is_one_line(arguments, name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(b"junk" * 30)
    if name.startswith("cut"):
        save_file({"a": torch.zeros(30)}, path)
        path.write_bytes(path.read_bytes()[:-5])
    assert name in refused(capsys, *arguments.split(), str(path), "--prompt", "def")


@pytest.mark.parametrize("arguments", ["features --dictionary", "lens --model"])
def test_an_empty_path_is_not_the_working_folder(arguments, capsys):
    assert "got ''" in refused(capsys, *arguments.split(), "", "--prompt", "def")
