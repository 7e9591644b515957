"""The report: its numbers are compared with values computed here, and its page is opened in a
browser.
"""

import copy
import html
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import interp
import interp.report as reports
from hooks import HookedRunner
from interp.plots.view import visible
from models import CharTokenizer, Transformer, TransformerConfig
from tests.browser import seen_in_browser
from tests.interp.pages import embedded, numbers, patches_of, scores_of
from tests.interp.predictions import predictions

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
    return reports.report(model, encoded(clean), other, name="a <model>", period=11)


@pytest.fixture(scope="module")
def page(model):
    return report(model, CLEAN, CORRUPTED).view.html()


def attention(model, text):
    """Return the attention patterns of a text, [layer, head, query, key], in float32."""
    _, cache = interp.run_with_cache(model, encoded(text), names="*.pattern")
    return torch.stack([cache[f"blocks.{layer}.attn.pattern"][0] for layer in range(2)]).float()


@pytest.fixture(scope="module")
def pattern(model):
    return attention(model, CLEAN)


def drawn(page):
    """Return the attention patterns that a page contains, [layer, head, query, key]."""
    part = embedded(page)["Attention patterns"]
    return numbers(part["values"]).unflatten(0, (-1, part["across"]))


def test_loss_is_the_cross_entropy_of_each_next_token(model, page):
    tokens = encoded(CLEAN)
    with torch.no_grad():
        logits = model(tokens)[0, :-1].double()
    expected = logits.exp().sum(-1).log() - logits[range(len(CLEAN) - 1), tokens[0, 1:]]
    first, *rest = numbers(embedded(page)["Loss of each token"]["values"]).tolist()
    assert math.isnan(first)
    assert rest == pytest.approx(expected.tolist(), abs=2e-5)


def test_attention_survives_its_encoding(pattern, page):
    assert (drawn(page) - pattern).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_drawn_without_another_rounding(model, dtype):
    half = copy.deepcopy(model).to(dtype)
    page = report(half, "the cat", "the bat").view.html()
    assert (drawn(page) - attention(half, "the cat")).abs().max() <= 1e-6
    assert numbers(embedded(page)["Loss of each token"]["values"])[1:].min() > 0


FORMS = [
    *({"norm_place": place} for place in ("post", "output", "sandwich")),
    {"parallel": True, "n_kv_heads": 1, "positions": "none"},
    {"mlp": "none", "positions": "rotary", "d_head": 4},
    {"norm": "none", "mlp": "gated", "attn_cap": 9.0, "window": 5},
]


# A model with random weights hardly prefers an answer.
@pytest.mark.filterwarnings("ignore:the gap between the runs")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_model_has_a_report(form):
    sizes = dict(vocab_size=29, n_ctx=37, n_layers=2, n_heads=3, d_model=15)
    torch.manual_seed(3)
    other = Transformer(TransformerConfig(**sizes | form)).eval().bfloat16()
    for weights in other.parameters():
        nn.init.normal_(weights, std=0.2)
    made = report(other, "the cat", "the bat")
    page = made.view.html()
    found, lacking = patches_of(page), {"mlp_out"} if form.get("mlp") == "none" else set()
    assert found.keys() == reports.SITES.keys() - lacking
    assert len(re.findall("<figure", page)) == len(embedded(page))
    with torch.no_grad():
        probabilities = other(encoded("the cat"))[0, -1].double().softmax(-1)
    chance = float(re.search(r"next token .*? ([\d.]+)%", made.summary)[1]) / 100
    assert chance == pytest.approx(probabilities.max().item(), rel=0.03)
    # The two texts have the same last token, so patching it before layer 0 changes nothing.
    assert found["resid_pre"][0, -1] == pytest.approx(0, abs=1e-6)
    # Patching the token that differs before layer 0 restores everything.
    assert found["resid_pre"][0, 4] == pytest.approx(1, abs=1e-2)


def test_guesses_are_the_lens_of_each_stream_and_the_model_last(model, page):
    probabilities = predictions(model, encoded(CLEAN))
    part = embedded(page)["Logit lens"]
    chances = numbers(part["values"])[0].flip(0)
    assert chances.shape == (3, len(CLEAN))
    for layer, pos in ((0, 0), (0, 17), (1, 3), (2, 9), (2, len(CLEAN) - 1)):
        best = probabilities[layer, 0, pos].sort(descending=True)
        assert chances[layer, pos] == pytest.approx(best.values[0].item(), abs=2e-6)
        told = part["tips"][(2 - layer) * len(CLEAN) + pos]
        expected = [CHARACTERS.characters[token] for token in best.indices[:5]]
        assert [text for text, _ in told] == list(map(visible, expected))
        shares = [float(share.removesuffix(" %")) / 100 for _, share in told]
        assert shares == pytest.approx(best.values[:5].tolist(), rel=6e-3)
        assert part["cells"][(2 - layer) * len(CLEAN) + pos] == told[0][0]


def followed(weights, text):
    """Return the mean attention to the tokens after earlier copies of the query's token."""
    found = [
        sum(weights[query, n + 1].item() for n in range(query) if text[n] == text[query])
        for query in range(len(text))
        if text[query] in text[:query]
    ]
    return statistics.mean(found)


def test_head_scores_are_means_over_queries(model, pattern, page):
    means = [[head[range(1, 29), range(28)].mean().item() for head in layer] for layer in pattern]
    for found, expected in zip(scores_of(page, "Previous-token").tolist(), means, strict=True):
        assert found == pytest.approx(expected, abs=2e-6)
    repeated = interp.repeated_tokens(29, 11)
    _, cache = interp.run_with_cache(model, repeated, names="*.pattern")
    weights = cache["blocks.1.attn.pattern"][:, 2]
    texts = zip(weights, repeated.tolist(), strict=True)
    mean = statistics.mean(followed(own, text) for own, text in texts)
    assert scores_of(page, "Induction")[1, 2].item() == pytest.approx(mean, abs=2e-6)


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
    shares = patches_of(page)[site]
    share = (nats - wrong) / (right - wrong)
    assert shares[layer, place].item() == pytest.approx(share, abs=1e-4)


def test_the_marks_and_links_of_the_pictures(page):
    parts = embedded(page)
    assert parts["Patching: What the MLP adds"]["marked"] == [0, 18, 22]
    patterns = [*parts].index("Attention patterns")
    assert parts["Attention patterns"]["start"] == scores_of(page, "Induction").argmax().item()
    assert parts["Induction heads"]["link"] == patterns


def test_the_derived_corruption_has_the_lowest_metric_of_all_candidates(model, monkeypatch):
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
    # Only the last position's logits are computed, because those of all positions could need too
    # much memory.
    made = []
    with HookedRunner(model).hooks({"unembedding": lambda logits, _: made.append(logits.shape)}):
        reports.derive_corruption(model, encoded(text), interp.log_prob(int(answer)))
    assert made == [(len(text) - 1, 1, 29)]
    # Chunks of one row give the same result.
    for size in (1, 99):
        monkeypatch.setattr(reports, "_TOKENS_PER_FORWARD", size)
        made = report(model, text, None)
        assert f"corrupted  {expected}".replace(" ", "·") in made.summary.replace(" ", "·")
    [pos] = [n for n in range(len(text)) if text[n] != expected[n]]
    assert f"{text[pos]!r} at position {pos} became {expected[pos]!r}" in made.summary
    assert "corrupted  bb" in report(model, "ab", None).summary


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
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    for call in (
        "url(",
        "@import",
        "import(",
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "EventSource",
        "sendBeacon",
        "new Worker",
        "new Image",
    ):
        assert call not in page
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy[1].startswith("default-src 'none';")


def test_prompts_and_names_are_escaped_everywhere(page):
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="data">',
        "<script>",
    ]
    assert not re.search(r"<(b|model)>", page)
    assert html.escape("Inside a <model>") in page
    assert html.escape("clean      cat·</script><b>") in page
    data_script = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(data_script)
    assert "".join(embedded(page)["Loss of each token"]["tokens"]) == CLEAN.replace(
        " ", "·"
    ).replace("\n", "⏎")


def test_the_attribution_adds_up_to_the_logit(model, page):
    with torch.no_grad():
        logit = model(encoded(CLEAN))[0, -1].max().item()
    values = numbers(embedded(page)["Direct attribution"]["values"])
    assert values.sum().item() == pytest.approx(logit, abs=1e-4)


PROBE = Path(__file__).with_name("report_probe.js").read_text(encoding="utf-8")


def test_the_page_links_heads_to_their_patterns_in_a_browser(pattern, page, tmp_path):
    seen = seen_in_browser(page, tmp_path, PROBE)
    assert seen["errors"] == []
    assert seen["maps"] == 8
    assert seen["chosen"] == "layer 1, head 1"
    assert f"“{CLEAN[7]}”" in seen["attention"]
    assert float(seen["attention"].split()[0]) == pytest.approx(
        pattern[1, 1, 7, 2].item(), abs=2e-5
    )
    share = patches_of(page)["mlp_out"][1, 5].item()
    assert seen["patch"].startswith(f"{share:.5g}".replace("-", "\u2212"))
    assert seen["changed"] == [[], [0, 18, 22]]
