"""The report: its numbers against values computed here, its page against what a browser would do."""

import base64
import copy
import html
import json
import re
import shutil
import statistics
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import interp
import interp.report
from hooks import HookedRunner
from interp.report import build_report, peak, render
from models import CharTokenizer, Transformer, TransformerConfig
from tests.test_interp import predictions

CHARACTERS = CharTokenizer('\n "&/<>abcdefghiklmnoprstuvwx')
CLEAN = 'cat </script><b>&"cat\ncat </s'
CORRUPTED = 'bat </script><b>&"bat\nbat </s'


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = TransformerConfig(
        vocab_size=29, n_ctx=37, n_layers=2, n_heads=3, d_model=15, d_mlp=7, tied_unembed=False
    )
    made = Transformer(config).eval()
    for weights in made.parameters():
        if weights.ndim == 2:
            nn.init.normal_(weights, std=0.4)
    made.tokenizer = CHARACTERS
    return made


def encoded(text):
    return torch.tensor([CHARACTERS.encode(text)])


def report(model, clean, corrupted):
    other = None if corrupted is None else encoded(corrupted)
    facts, name = {"n_layers": 2, "n_heads": 3}, "a <model>"
    return build_report(model, encoded(clean), other, name=name, facts=facts, period=11)


@pytest.fixture(scope="module")
def page(model):
    """Of the whole module; the clean text is run once."""
    runs = []
    handle = model.register_forward_pre_hook(lambda _, args: runs.append(args[0]))
    page = render(report(model, CLEAN, CORRUPTED))
    handle.remove()
    assert sum(torch.equal(tokens, encoded(CLEAN)) for tokens in runs) == 1
    return page


def attention(model, text):
    """[layer, head, query, key], in float32."""
    _, cache = interp.run_with_cache(model, encoded(text), names="*.pattern")
    return torch.stack([cache[f"blocks.{layer}.attn.pattern"][0] for layer in range(2)]).float()


@pytest.fixture(scope="module")
def pattern(model):
    return attention(model, CLEAN)


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def drawn(page):
    """The attention patterns that the page holds."""
    found = embedded(page)
    layers, heads, length = found["shape"]
    raw = base64.b64decode(found["attention"])
    values = torch.tensor(struct.unpack(f"<{len(raw) // 2}H", raw)) / 65535
    return values.view(layers, heads, length, length)


def test_loss_is_the_cross_entropy_of_each_next_token(model, page):
    tokens = encoded(CLEAN)
    with torch.no_grad():
        logits = model(tokens)[0, :-1].double()
    expected = logits.exp().sum(-1).log() - logits[range(len(CLEAN) - 1), tokens[0, 1:]]
    first, *rest = embedded(page)["loss"]
    assert first is None
    assert rest == pytest.approx(expected.tolist(), abs=2e-5)


def test_attention_survives_its_encoding(pattern, page):
    assert (drawn(page) - pattern).abs().max() <= 0.5 / 65535 + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_drawn_as_it_is(model, dtype):
    half = copy.deepcopy(model).to(dtype)
    page = render(report(half, "the cat", "the bat"))
    assert (drawn(page) - attention(half, "the cat")).abs().max() <= 0.5 / 65535 + 1e-7
    assert min(embedded(page)["loss"][1:]) > 0


FORMS = [
    *({"norm_place": place} for place in ("post", "output", "sandwich")),
    {"parallel": True, "n_kv_heads": 1, "positions": "none"},
    {"mlp": "none", "positions": "rotary", "d_head": 4},
    {"norm": "none", "mlp": "gated", "attn_cap": 9.0, "window": 5},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_model_has_a_report_of_what_it_has(form):
    sizes = dict(vocab_size=29, n_ctx=37, n_layers=2, n_heads=3, d_model=15)
    other = Transformer(TransformerConfig(**sizes | form)).eval().bfloat16()
    for weights in other.parameters():
        nn.init.normal_(weights, std=0.2)
    data = report(other, "the cat", "the bat")
    page = render(data)
    found, lacking = embedded(page)["patches"], {"mlp_out"} if form.get("mlp") == "none" else set()
    assert found.keys() == set(interp.report.SITES) - lacking
    assert set(re.findall(r'id="patch-(.+?)"', page)) == found.keys()
    with torch.no_grad():
        probabilities = other(encoded("the cat"))[0, -1].double().softmax(-1)
    assert data.guesses[-1][-1][0].probability == pytest.approx(
        probabilities.max().item(), rel=0.02
    )
    # The last position of the stream entering layer 0 is the same in both runs, so nothing changes.
    assert found["resid_pre"]["share"][0][-1] == pytest.approx(0, abs=1e-6)


def test_guesses_are_the_lens_of_each_stream_and_the_model_last(model, page):
    probabilities = predictions(model, encoded(CLEAN))
    found = embedded(page)["guesses"]
    assert (len(found), len(found[0]), len(found[0][0])) == (3, len(CLEAN), 5)
    for layer, pos in ((0, 0), (0, 17), (1, 3), (2, 9), (2, len(CLEAN) - 1)):
        best = probabilities[layer, 0, pos].sort(descending=True)
        texts, values = zip(*found[layer][pos], strict=True)
        assert values == pytest.approx(best.values[:5].tolist(), abs=2e-6)
        expected = [CHARACTERS.characters[token] for token in best.indices[:5]]
        assert list(texts) == list(map(interp.report.visible, expected))


def followed(weights, text):
    """Mean attention [query, key] to the tokens after earlier copies of the query's token."""
    found = [
        sum(weights[query, n + 1].item() for n in range(query) if text[n] == text[query])
        for query in range(len(text))
        if text[query] in text[:query]
    ]
    return statistics.mean(found)


def test_head_scores_are_means_over_queries(model, pattern, page):
    scores = embedded(page)["scores"]
    means = [[head[range(1, 29), range(28)].mean().item() for head in layer] for layer in pattern]
    for found, expected in zip(scores["previous"], means, strict=True):
        assert found == pytest.approx(expected, abs=2e-6)
    repeated = interp.repeated_tokens(29, 11)
    _, cache = interp.run_with_cache(model, repeated, names="*.pattern")
    weights = cache["blocks.1.attn.pattern"][:, 2]
    texts = zip(weights, repeated.tolist(), strict=True)
    mean = statistics.mean(followed(own, text) for own, text in texts)
    assert scores["induction"][1][2] == pytest.approx(mean, abs=2e-6)


@pytest.mark.parametrize(
    ("site", "layer", "place"),
    [("resid_pre", 1, 4), ("attn_out", 0, 0), ("mlp_out", 1, 28), ("z", 0, 2), ("z", 1, 1)],
)
def test_a_patch_is_a_corrupted_run_with_one_clean_value(model, page, site, layer, place):
    name = f"blocks.{layer}.attn.z" if site == "z" else f"blocks.{layer}.{site}"
    index = (0, slice(None), place) if site == "z" else (0, place)
    logits, cache = interp.run_with_cache(model, encoded(CLEAN), names=name)

    def put(value, point):
        value[index] = cache[name][index]

    corrupted = encoded(CORRUPTED)
    patched = HookedRunner(model).run_with_hooks(corrupted, hooks={name: put})
    outputs = patched, logits, model(corrupted)
    answer = logits[0, -1].argmax()
    nats, right, wrong = (x[0, -1].double().log_softmax(-1)[answer].item() for x in outputs)
    found = embedded(page)["patches"][site]
    assert found["nats"][layer][place] == pytest.approx(nats, abs=1e-5)
    share = (nats - wrong) / (right - wrong)
    assert found["share"][layer][place] == pytest.approx(share, abs=1e-4)


def test_the_picture_sizes_and_the_scale(page):
    found = embedded(page)
    shares = [v for p in found["patches"].values() for row in p["share"] for v in row]
    assert found["limit"] == pytest.approx(max(1.0, *map(abs, shares)), abs=1e-5)
    assert found["changed"] == [0, 18, 22]
    scores = torch.tensor(found["scores"]["induction"])
    assert found["first"] == list(divmod(scores.argmax().item(), 3))
    assert peak(torch.tensor([[0.1, -0.7], [0.5, 0.6]])) == (0, 1, pytest.approx(-0.7))


def test_the_derived_corruption_has_the_lowest_metric_of_those_tried(model, monkeypatch):
    text = "the cat sat"
    tokens = encoded(text)[0].tolist()
    with torch.no_grad():
        answer = model(torch.tensor([tokens]))[0, -1].argmax()
        tried = {}
        for pos in range(len(tokens) - 1):
            new = next(t for t in tokens[pos:] + tokens[:pos] if t != tokens[pos])
            row = (*tokens[:pos], new, *tokens[pos + 1 :])
            tried[row] = model(torch.tensor([row]))[0, -1].log_softmax(-1)[answer].item()
    expected = CHARACTERS.decode(min(tried, key=tried.__getitem__))
    # Logits of other positions would take memory in proportion to text and vocabulary.
    made = []
    with HookedRunner(model).hooks({"unembedding": lambda logits, _: made.append(logits.shape)}):
        interp.report.derive_corruption(model, encoded(text), interp.log_prob(int(answer)))
    assert made == [(len(text) - 1, 1, 29)]
    # In chunks of one row each it is the same.
    for size in (1, 99):
        monkeypatch.setattr(interp.report, "_TOKENS_PER_FORWARD", size)
        data = report(model, text, None)
        assert "".join(data.corrupted) == expected
    assert f"at position {data.changed[0]} became" in render(data)
    assert "".join(report(model, "ab", None).corrupted) == "bb"


def test_a_model_that_gives_no_numbers_is_refused(model):
    broken = Transformer(model.config).eval()
    nn.init.constant_(broken.unembedding.weight, float("nan"))
    with pytest.raises(ValueError, match="nan"):
        report(broken, "abc", "abd")


def test_the_page_loads_nothing(page):
    assert not re.search(r"<(img|iframe|object|embed|video|audio|base|form)\b", page)
    for value in re.findall(
        r"""\s(?:src|href|srcset|action|data|poster|background)=["']?([^\s>]*)""", page
    ):
        assert value.startswith(("data:", "#"))
    assert "http" not in page.replace("http-equiv", "")
    for call in ("url(", "@import", "import(", "fetch(", "XMLHttpRequest", "WebSocket", "EventSource",
                 "sendBeacon", "new Worker", "new Image"):  # fmt: skip
        assert call not in page
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy[1].startswith("default-src 'none';")


def test_prompts_and_names_are_escaped_everywhere(page):
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="data">', "<script>"
    ]  # fmt: skip
    assert not re.search(r"<(b|model)>", page)
    assert html.escape("Inside a <model>") in page
    data_script = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&'") & set(data_script)
    assert "".join(embedded(page)["tokens"]) == CLEAN.replace(" ", "·").replace("\n", "⏎")
    assert 'data-pos="4">&lt;</span>' in page
    assert re.search(r'data-pos="\d+">&amp;</span>', page)
    assert not re.search(r'data-pos="\d+"[^>]*> </span>', page)


def mixed(page, name, share):
    """A share of the way from white to a colour that the style sheet names."""
    found = re.search(rf"--{name}: (\d+) (\d+) (\d+);", page)
    return pytest.approx([255 + (int(to) - 255) * share for to in found.groups()], abs=1)


PROBE = Path(__file__).with_name("report_probe.js").read_text(encoding="utf-8")


def test_the_page_answers_the_pointer_in_a_browser(pattern, page, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium to open the page in")
    opened = tmp_path / "page.html"
    opened.write_text(page.replace("<title>", f"<script>{PROBE}</script><title>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-sync", "--disable-background-networking", "--disable-component-update",
               "--window-size=1200,900", "--virtual-time-budget=3000", "--dump-dom"]  # fmt: skip
    command = [chromium, *options, f"--user-data-dir={tmp_path / 'profile'}", opened.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r'data-seen="([^"]*)"', dumped)
    assert found, dumped[-2000:]
    seen = json.loads(html.unescape(found[1]))
    values = embedded(page)
    assert seen["errors"] == []
    assert (seen["heads"], seen["pressed"], seen["maps"]) == (6, 1, 7)
    weights, patches = pattern[1, 1], values["patches"]
    assert float(seen["attention"].split()[0]) == pytest.approx(weights[7, 2].item(), abs=2e-5)
    assert float(seen["above"].split()[0]) == pytest.approx(weights[6, 2].item(), abs=2e-5)
    text, probability = values["guesses"][1][5][0]
    nats = [patches["mlp_out"]["nats"][1][5], patches["z"]["nats"][1][1]]
    patch, z = (f"{value:.3f} nats".replace("-", chr(0x2212)) for value in nats)
    expected = [("loss", f"{values['loss'][3]:.3f} nats"), ("title", "Layer 1, head 1"),
                ("reads", f"“{CLEAN[7]}” at 7"), ("lens", f"“{text}”"), ("lens", f"{100 * probability:.1f} %"),
                ("patch", patch), ("z", z), ("chosen", "Layer 1, head 1")]  # fmt: skip
    for part, told in expected:
        assert told in seen[part]
    for layer in (0, 1):
        share = patches["mlp_out"]["share"][layer][5] / values["limit"]
        assert seen["paint"][layer] == mixed(page, "less" if share < 0 else "more", abs(share))
    assert seen["paint"][2] == mixed(page, "weight", weights[7, 2].item())
    assert seen["red"] == [[], [0, 18, 22]]
    assert seen["sideways"] is False
