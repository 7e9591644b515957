"""The examples run, and their errors are one line."""

import contextlib
import random
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import models

ROOT = Path(__file__).parent.parent


@pytest.mark.full
def test_the_attribution_graph_example(printed, tmp_path):
    out = printed("attribution_graph")
    rows = re.findall(r"^  (\d|all) +(.*)$", out, re.MULTILINE)
    found = {
        name: [float(n) for n in numbers.replace("none", "nan").split()] for name, numbers in rows
    }
    # The correlations in the guide: predictions through values alone are bad, and predictions
    # through values and attention are good. The third column is the part through attention.
    assert abs(found["0"][0]) < 0.2 < 0.6 < found["0"][1]
    assert abs(found["all"][0]) < 0.2 < 0.6 < found["all"][1]
    assert found["0"][2] > 0.75
    assert min(found["2"][3], found["1"][3], found["3"][0]) > 0.9
    written = {"attribution_graph.html", "digit.json", "graph-metadata.json"}
    assert {path.name for path in tmp_path.iterdir()} == written


@pytest.mark.full
def test_the_features_example(printed, tmp_path):
    out = printed("features")
    before, after = (
        float(re.search(rf"{what}: (\S+)", out)[1])
        for what in ("clean text", "first 8 of these features")
    )
    assert before > 7 > 4 > after
    assert {path.name for path in tmp_path.iterdir()} == {"features.html"}


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """A function that runs an example and returns the text that it prints.

    The example writes its figures to `tmp_path`.
    """
    pytest.importorskip("matplotlib")
    for folder in ("examples", "examples/studies"):
        monkeypatch.syspath_prepend(ROOT / folder)

    def run(name, *options):
        assert import_module(name).main([*options, "--out", str(tmp_path)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "name",
    "patching attribution reading ioi features attribution_graph directions interchange".split(),
)
def test_a_wrong_option_is_one_line(name, printed, capsys):
    example = import_module(name)
    for options in (["--out", __file__], ["--no-such-option"]):
        with contextlib.suppress(SystemExit):
            assert example.main(options) == 1
        assert re.fullmatch("error: .*\n", capsys.readouterr().err)


def test_the_patching_example(printed, tmp_path):
    out = printed("patching")
    numbers = re.findall(r"^(?:clean|corrupted).*: (-?[\d.]+)$", out, re.MULTILINE)
    clean, corrupted, restored = map(float, numbers)
    assert clean > 1 > -1 > corrupted
    assert abs(restored - clean) < 1e-3
    assert "layer 0, pos 17 '1|4'  +1\n" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{site}.png" for site in ("resid_pre", "attn_out", "mlp_out", "z")
    }


@pytest.mark.full
def test_the_attribution_example(printed, tmp_path):
    out = printed("attribution")
    assert "8 of 8 solved" in out
    ranks = [float(rank) for rank in re.findall(r"rank correlation (\S+),", out)]
    shares = [int(share) for share in re.findall(r"effects are (\d+)%", out)]
    assert len(ranks) == 4
    assert min(ranks) > 0.9
    # The estimates of integrated gradients have a size that is closer to the exact effects.
    assert abs(shares[1] - 100) < abs(shares[0] - 100)
    assert abs(shares[3] - 100) < abs(shares[2] - 100)
    # The changed digit is read at position 17.
    assert re.search(r"top 5 of 220 places\n +place layer 0, pos 17 ", out)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.full
def test_the_directions_example(printed, tmp_path):
    pytest.importorskip("sklearn", reason="needs the extra probes")
    out = printed("directions")
    scores = re.findall(r"blocks\.2\.resid_post (?:-1 )? ([\d.]+) \[([\d.]+), ([\d.]+)\]", out)
    (found, *_), (_, low, high) = (map(float, each) for each in scores)
    assert found > 0.99
    # The baseline shows that one letter tells the two kinds apart.
    assert float(re.search(r"embed -1 +([\d.]+)", out)[1]) > 0.99
    assert low < 0.6
    assert high > 0.4
    before, after = map(float, re.search(r"means: (\S+) before, (\S+) after", out).groups())
    assert after < before / 4
    assert re.search(r"at most 0.5 nats elsewhere: 0.5\n", out)
    assert {path.name for path in tmp_path.iterdir()} == {
        "inside_a_part_number.safetensors",
        "probe.html",
        "steering.html",
    }


@pytest.mark.full
def test_the_interchange_example(printed, tmp_path):
    added, copied = printed("interchange").split("\nA digit copied")
    assert "aligned           1.000" in added
    places = re.findall(r"(blocks.\d).resid_pre, pos (\S+):(.*?)(?=blocks|$)", copied, re.DOTALL)
    scores = {
        (block, pos): {
            name.strip(): float(score)
            for name, score in re.findall(r"    ([a-z ]+?) +(\d\.\d+) \[", text)
        }
        for block, pos, text in places
    }
    assert len(scores) == 4
    # Up to the last block, position 13 carries the digit, and the last position does not.
    for (_, pos), of in scores.items():
        assert (of["aligned"] > 0.8) == (pos == "13")
        assert of["random"] < 0.1
    assert {path.name for path in tmp_path.iterdir()} == {"added.html", "copied.html"}


@pytest.mark.full
def test_the_reading_example(printed, tmp_path):
    out = printed("reading")
    assert "in 8 of 8 texts" in out
    best = re.findall(r"^(\w+), in .*\nlayer (\d), head (\d) +\+(\S+)", out, re.MULTILINE)
    heads = {kind: (int(layer), int(head)) for kind, layer, head, _ in best}
    assert heads["previous_token"] == (0, 3)
    assert heads["induction"][0] == 3
    total = float(re.search(r"another one is (\S+): the sum", out)[1])
    streams = re.findall(r"^ +(\d_pre|final_post) +(\S+) +(\S+)% +\S+% +\S+%$", out, re.MULTILINE)
    assert float(streams[-1][1]) == pytest.approx(total)
    # The last layer moves the digit to the last position, first attention and then the MLP.
    assert float(streams[-1][2]) > 50 > 1 > float(streams[-2][2])
    assert re.search(r"component m3 .*\ncomponent a3\.h\d", out)
    assert {path.stem for path in tmp_path.iterdir()} >= {"parts", "streams", "text"}


@pytest.fixture
def ioi(printed):
    return import_module("ioi")


def test_the_ioi_example_finds_the_heads_that_copy_a_digit(ioi, printed, tmp_path, capsys):
    out = printed("ioi", "--pairs", "3")
    assert "3 of 3 solved" in out
    found = re.findall(r"^(\w+): .*\n(.*?) +([+-]\S+)", out, re.MULTILINE)
    best, effect = ({name: kind[n] for name, *kind in found} for n in range(2))
    right, wrong = (
        float(re.search(rf"text {text} +(\S+)", out)[1]) for text in ("clean", "corrupted")
    )
    assert right > 1 > -1 > wrong
    assert float(effect["resid_pre"]) == pytest.approx(1, abs=1e-3)
    assert {path.stem for path in tmp_path.iterdir()} == best.keys()
    assert best["resid_pre"] == "layer 0, span digit"
    assert best["attn_out"] == "layer 3, span end"
    assert best["z"] == best["v"] != best["pattern"]
    for arguments in (["--pairs", "1"], ["--model", str(tmp_path / "no")]):
        assert ioi.main(arguments) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_indirect_objects_are_pairs_of_names_of_one_token(ioi):
    tokenizers = pytest.importorskip("tokenizers")
    known = ["Mary", "John", "Tom", *ioi.NAMES.split()[2:7]]
    space = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = space.alphabet()
    vocab = {sign: n for n, sign in enumerate(sorted(alphabet))}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    words.pre_tokenizer, words.decoder = space, tokenizers.decoders.ByteLevel()
    words.train_from_iterator(
        [" ".join(["The", *known])] * 2,
        tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = models.text.tokenizer.SubwordTokenizer(words)
    prompts = ioi.names(tokenizer, 11, random.Random(3))
    pairs = ioi.paired(tokenizer, prompts, ("IO", "S1", "S2", "end"))
    orders = set()
    for row, prompt in enumerate(prompts):
        at = {name: int(columns[row, 0]) for name, columns in pairs.spans.items()}
        told = tokenizer.tokens_as_text(pairs.clean[row].tolist())
        io, subject = told[at["IO"]], told[at["S1"]]
        assert {io[1:], subject[1:]} <= set(known) & set(ioi.NAMES.split())
        assert told[at["S2"]] == subject
        text = "".join(told[: at["end"] + 1])
        assert text == prompt.template.format_map(prompt.clean)
        assert (text.count(io), text.count(subject)) == (1, 2)
        assert int(pairs.text.attention_mask[row].sum()) == at["end"] + 1
        changed = (pairs.clean[row] != pairs.corrupted[row]).nonzero().tolist()
        assert changed == [[at["S2"]]]
        assert pairs.corrupted[row, at["S2"]] == pairs.clean[row, at["IO"]]
        answers = pairs.clean[row, [at["IO"], at["S1"]]]
        assert torch.equal(pairs.answers[row], answers)
        orders.add(at["IO"] < at["S1"])
    assert orders == {True, False}


def test_the_worked_numbers_of_the_handout(printed, tmp_path):
    """By hand: the weights of row 0 are a, a and 1, divided by 2 a + 1, with a = e^(1/√2)."""
    texts = printed("handout").split("--- causal mask ---")
    names = {f"{name}.png" for name in ("attention", "cost", "positions", "temperature")}
    assert {path.name for path in tmp_path.iterdir()} == names
    whole, causal = ([" ".join(line.split()) for line in text.splitlines()] for text in texts)
    shared = [
        "1.0000 2.0000 1.0000",
        "0.7071 1.4142 0.7071",
        "0.2483 0.5035 0.2483",
        "0.9930 1.2552",
    ]
    own = ["0.0000 0.7071 0.7071", "0.4011 0.4011 0.1978", "1.4011 1.2033"]
    masked = ["0.0000 0.7071 -inf", "0.3302 0.6698 0.0000", "0.3302 1.3395"]
    assert {*shared, *own} <= set(whole)
    assert {*shared, *masked} <= set(causal)


def test_the_curves_of_the_handout(printed):
    handout, pyplot = import_module("handout"), pytest.importorskip("matplotlib.figure")
    lines = {}
    for draw in (handout.cost, handout.positions, handout.temperature):
        axes = pyplot.Figure().subplots()
        draw(axes)
        labelled = [line for line in axes.lines if not line.get_label().startswith("_")]
        lines |= {line.get_label(): np.asarray(line.get_data()) for line in labelled}
    for tau in (0.5, 1, 2):
        gap, share = lines[f"$\\tau$ = {tau:g}"]
        np.testing.assert_allclose(share, 1 / (1 + np.exp(-gap / tau)), atol=1e-6)
    pos, wave = lines["i = 8: 63 positions a wave"]
    np.testing.assert_allclose(wave, np.sin(pos / 10), atol=1e-5)  # 10,000 ** (16 / 64)
    rnn, attention = lines["RNN: $T d^2$"][1], lines["self-attention: $T^2 d$"][1]
    assert (rnn[-1], attention[-1]) == (2048 * 256**2, 2048**2 * 256)


@pytest.mark.full
def test_the_training_example_takes_a_step(tmp_path):
    options = ["--steps", "1", "--out", str(tmp_path / "m")]
    script = [sys.executable, "examples/train_pydoc.py", *options]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert "step 1 of 1: validation" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 1
    assert "the model must copy in context; it does not after 1 steps" in done.stderr
