"""The report: its numbers against values computed here, its page against what a browser would do."""

import base64
import copy
import html
import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import interp
import interp.report
from interp.report import build_report, derive_corruption, peak, render
from models import CharTokenizer, Transformer, TransformerConfig

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
    return made


def encoded(text):
    return torch.tensor([CHARACTERS.encode(text)])


def report(model, clean, corrupted):
    other = None if corrupted is None else encoded(corrupted)
    facts, texts = {"n_layers": 2, "n_heads": 3}, CHARACTERS.tokens_as_text
    name = "a <model>"
    return build_report(model, encoded(clean), other, texts, name=name, facts=facts, period=11)


@pytest.fixture(scope="module")
def page(model):
    """Of the whole module; the clean text is run once."""
    runs = []
    handle = model.register_forward_pre_hook(lambda _, args: runs.append(args[0]))
    page = render(report(model, CLEAN, CORRUPTED))
    handle.remove()
    assert sum(torch.equal(tokens, encoded(CLEAN)) for tokens in runs) == 1
    # One run for each patch, and one for each prompt and for the repeated tokens.
    assert len(runs) == 3 * 2 * len(CLEAN) + 2 * 3 + 3
    return page


@pytest.fixture(scope="module")
def pattern(model):
    """[layer, head, query, key] of the clean prompt."""
    _, cache = interp.run_with_cache(model, encoded(CLEAN), names="*.pattern")
    return torch.stack([cache[f"blocks.{layer}.attn.pattern"][0] for layer in range(2)])


def embedded(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


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
        logits = model(tokens)[0].double()
    expected = [
        (logits[pos].exp().sum().log() - logits[pos, tokens[0, pos + 1]]).item()
        for pos in range(tokens.shape[1] - 1)
    ]
    first, *rest = embedded(page)["loss"]
    assert first is None
    assert rest == pytest.approx(expected, abs=2e-5)


def test_attention_survives_its_encoding(pattern, page):
    assert drawn(page).shape == (2, 3, len(CLEAN), len(CLEAN))
    assert (drawn(page) - pattern).abs().max() <= 0.5 / 65535 + 1e-7


def test_half_precision_is_drawn_as_it_is(model):
    half = copy.deepcopy(model).bfloat16()
    page = render(report(half, "the cat", "the bat"))
    _, cache = interp.run_with_cache(half, encoded("the cat"), names="*.pattern")
    expected = torch.stack([cache[f"blocks.{layer}.attn.pattern"][0] for layer in range(2)])
    assert (drawn(page) - expected.float()).abs().max() <= 0.5 / 65535 + 1e-7
    assert min(embedded(page)["loss"][1:]) > 0


def test_guesses_are_the_lens_of_each_stream_and_the_model_last(model, page):
    tokens = encoded(CLEAN)
    with torch.no_grad():
        context = model.context(tokens)
        streams = [model.input_resid(tokens, context)]
        for block in model.blocks:
            streams.append(block(streams[-1], context))
        probabilities = [model.unembed(stream)[0].double().softmax(-1) for stream in streams]
    found = embedded(page)["guesses"]
    assert (len(found), len(found[0]), len(found[0][0])) == (3, len(CLEAN), 5)
    for layer, pos in ((0, 0), (0, 17), (1, 3), (2, 9), (2, len(CLEAN) - 1)):
        best = probabilities[layer][pos].sort(descending=True)
        assert [value for _, value in found[layer][pos]] == pytest.approx(
            best.values[:5].tolist(), abs=2e-6
        )
        expected = [CHARACTERS.characters[token] for token in best.indices[:5]]
        assert [text for text, _ in found[layer][pos]] == list(map(interp.report.visible, expected))


def test_head_scores_are_means_along_diagonals(model, pattern, page):
    scores, length = embedded(page)["scores"], len(CLEAN)
    for layer in range(2):
        for head in range(3):
            weights = pattern[layer, head]
            mean = sum(weights[i, i - 1].item() for i in range(1, length)) / (length - 1)
            assert scores["previous"][layer][head] == pytest.approx(mean, abs=2e-6)
    repeated = interp.repeated_tokens(29, 11)
    _, cache = interp.run_with_cache(model, repeated, names="*.pattern")
    weights = cache["blocks.1.attn.pattern"][:, 2]
    mean = sum(weights[:, i, i - 10].mean().item() for i in range(11, 22)) / 11
    assert scores["induction"][1][2] == pytest.approx(mean, abs=2e-6)


@pytest.mark.parametrize(
    ("site", "layer", "place"),
    [("resid_pre", 1, 4), ("attn_out", 0, 0), ("mlp_out", 1, 28), ("z", 0, 2), ("z", 1, 1)],
)
def test_a_patch_is_a_corrupted_run_with_one_clean_value(model, page, site, layer, place):
    clean, corrupted = encoded(CLEAN), encoded(CORRUPTED)
    block = model.blocks[layer]
    module = block.attn.z if site == "z" else getattr(block, site)
    seen = []
    index = (0, slice(None), place) if site == "z" else (0, place)

    def put(_module, _args, output):
        patched = output.clone()
        patched[index] = seen[0][index]
        return patched

    with torch.no_grad():
        handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
        logits = model(clean)
        handle.remove()
        answer = logits[0, -1].argmax()
        clean_metric = logits[0, -1].double().log_softmax(-1)[answer].item()
        corrupted_metric = model(corrupted)[0, -1].double().log_softmax(-1)[answer].item()
        handle = module.register_forward_hook(put)
        metric = model(corrupted)[0, -1].double().log_softmax(-1)[answer].item()
        handle.remove()
    found = embedded(page)["patches"][site]
    assert found["nats"][layer][place] == pytest.approx(metric, abs=1e-5)
    share = (metric - corrupted_metric) / (clean_metric - corrupted_metric)
    assert found["share"][layer][place] == pytest.approx(share, abs=1e-4)


def test_the_picture_sizes_and_the_scale(page):
    found = embedded(page)
    sites = {"resid_pre": len(CLEAN), "attn_out": len(CLEAN), "mlp_out": len(CLEAN), "z": 3}
    assert found["patches"].keys() == sites.keys()
    for site, width in sites.items():
        share = found["patches"][site]["share"]
        assert (len(share), len(share[0])) == (2, width)
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
    # In chunks of one row each it is the same.
    monkeypatch.setattr(interp.report, "_TOKENS_PER_FORWARD", 1)
    metric = interp.log_prob(int(answer))
    with torch.no_grad():
        found = derive_corruption(model, encoded(text), metric)
    assert CHARACTERS.decode(found[0].tolist()) == expected
    monkeypatch.undo()
    data = report(model, text, None)
    assert "".join(data.corrupted) == expected
    assert data.derived
    assert f"at position {data.changed[0]} became" in render(data)
    assert "".join(report(model, "ab", None).corrupted) == "bb"


@pytest.mark.parametrize(
    ("clean", "corrupted", "match"),
    [("abcd", "abc", "4 and 3"), ("a", "b", "2 tokens; got 1"), ("a", None, "2 tokens; got 1"),
     ("abc", "abc", "0.0001 nats"), ("aaa", None, "3 times")],
)  # fmt: skip
def test_what_no_report_can_be_made_of(model, clean, corrupted, match):
    with pytest.raises(ValueError, match=match):
        report(model, clean, corrupted)


def test_a_model_that_gives_no_numbers_is_refused(model):
    broken = Transformer(model.config).eval()
    nn.init.constant_(broken.unembedding.weight, float("nan"))
    with pytest.raises(ValueError, match="nan"):
        report(broken, "abc", "abd")


class Page(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_loads_nothing(page):
    parsed = Page(page)
    for tag, attributes in parsed.tags:
        assert tag not in {"img", "iframe", "object", "embed", "video", "audio", "base", "form"}
        for name, value in attributes.items():
            if name in {"src", "href", "srcset", "action", "data", "poster", "background"}:
                assert (value or "").startswith(("data:", "#")), (tag, name, value)
    assert "http" not in page.replace("http-equiv", "")
    for call in ("url(", "@import", "import(", "fetch(", "XMLHttpRequest", "WebSocket", "EventSource",
                 "sendBeacon", "new Worker", "new Image"):  # fmt: skip
        assert call not in page
    policy = next(a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none';")


def test_prompts_and_names_are_escaped_everywhere(page):
    tags = [tag for tag, _ in Page(page).tags]
    assert tags.count("script") == 2
    assert not {"b", "model"} & set(tags)
    assert "<model>" not in page
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


PROBE = """
<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push("blocked " + event.blockedURI));
console.error = console.warn = (...what) => errors.push(what.join(" "));
addEventListener("load", () => {
  const spot = (node, x, y) => {
    const box = node.getBoundingClientRect();
    return { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
  };
  const tip = () => document.getElementById("tip").innerText;
  const seen = {};
  const loss = document.querySelector("#loss [data-pos='3']");
  loss.dispatchEvent(new PointerEvent("pointerover", spot(loss, .5, .5)));
  seen.loss = tip();
  const buttons = document.querySelectorAll("#heads button");
  seen.heads = buttons.length;
  buttons[4].click();
  seen.title = document.getElementById("pattern-title").innerText;
  seen.pressed = document.querySelectorAll("#heads [aria-pressed=true]").length;
  const map = document.querySelector("#pattern canvas");
  map.dispatchEvent(new PointerEvent("pointermove", spot(map, 2.5 / 29, 7.5 / 29)));
  seen.attention = tip();
  seen.reads = document.getElementById("reads-title").innerText;
  map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
  seen.above = tip();
  const cell = document.querySelector("#lens tbody tr:nth-child(2) td:nth-of-type(6)");
  cell.dispatchEvent(new PointerEvent("pointerover", spot(cell, .5, .5)));
  seen.lens = tip();
  const patch = document.querySelector("#patch-mlp_out canvas");
  patch.dispatchEvent(new PointerEvent("pointermove", spot(patch, 5.5 / 29, .75)));
  seen.patch = tip();
  const paint = (node, x, y) =>
    [...node.getContext("2d").getImageData(x * node.width, y * node.height, 1, 1).data].slice(0, 3);
  seen.paint = [paint(patch, 5.5 / 29, .25), paint(patch, 5.5 / 29, .75), paint(map, 2.5 / 29, 7.5 / 29)];
  const heads = document.querySelector("#patch-z canvas");
  heads.dispatchEvent(new PointerEvent("pointermove", spot(heads, .5, .75)));
  seen.z = tip();
  heads.click();
  seen.chosen = document.getElementById("pattern-title").innerText;
  seen.maps = document.querySelectorAll(".map").length;
  seen.sideways = document.documentElement.scrollWidth > innerWidth;
  seen.errors = errors;
  document.body.setAttribute("data-seen", JSON.stringify(seen));
});
</script>
"""


def test_the_page_answers_the_pointer_in_a_browser(pattern, page, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium to open the page in")
    copy = tmp_path / "page.html"
    copy.write_text(page.replace("<title>", PROBE + "<title>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-sync", "--disable-background-networking", "--disable-component-update",
               "--window-size=1200,900", "--virtual-time-budget=3000", "--dump-dom"]  # fmt: skip
    command = [chromium, *options, f"--user-data-dir={tmp_path / 'profile'}", copy.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r'data-seen="([^"]*)"', dumped)
    assert found, dumped[-2000:]
    seen = json.loads(html.unescape(found[1]))
    values = embedded(page)
    assert seen["errors"] == []
    assert f"{values['loss'][3]:.3f} nats" in seen["loss"]
    assert (seen["heads"], seen["pressed"], seen["maps"]) == (6, 1, 7)
    assert seen["title"].startswith("Layer 1, head 1")
    weights = pattern[1, 1]
    assert float(seen["attention"].split()[0]) == pytest.approx(weights[7, 2].item(), abs=2e-5)
    assert float(seen["above"].split()[0]) == pytest.approx(weights[6, 2].item(), abs=2e-5)
    assert f"“{CLEAN[7]}” at 7" in seen["reads"]
    text, probability = values["guesses"][1][5][0]
    assert f"“{text}”" in seen["lens"]
    assert f"{100 * probability:.1f} %" in seen["lens"]
    for site, told in (("mlp_out", seen["patch"]), ("z", seen["z"])):
        nats = values["patches"][site]["nats"][1][5 if site == "mlp_out" else 1]
        assert f"{nats:.3f} nats".replace("-", chr(0x2212)) in told
    assert seen["chosen"].startswith("Layer 1, head 1")
    shares = [values["patches"]["mlp_out"]["share"][layer][5] / values["limit"] for layer in (0, 1)]
    for share, painted in zip(shares, seen["paint"], strict=False):
        assert painted == mixed(page, "less" if share < 0 else "more", abs(share))
    assert seen["paint"][2] == mixed(page, "weight", weights[7, 2].item())
    assert seen["sideways"] is False
