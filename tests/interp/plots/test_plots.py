"""Pictures: a browser reads the numbers from their pages, and they equal the original tensors."""

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import interp
from hooks import HookedRunner
from interp import Circuit, Pairs, Result, plots
from interp.attribution_graphs import Link, Node, PrunedGraph
from interp.directions import difference_of_means
from interp.features import FeatureCard, FeatureCards, load_sae
from interp.features.cards import FeatureExample
from interp.graph import Graph
from interp.plots.view import _page, visible
from interp.store import harvest
from models import KVCache
from tests.browser import FLAGS, seen_in_browser
from tests.shipped import pydoc

MINUS = chr(0x2212)
TEXT = "def f(x):"
HOSTILE = [
    "</script><script>hacked=1</script>",
    "<b onclick=hacked=2>\x07\u202eabc\u2029",
    "&amp;",
    "אב",
]
PROBE = Path(__file__).with_name("plots_probe.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bundled():
    return pydoc()


@pytest.fixture(scope="module")
def cache(bundled):
    return HookedRunner(bundled).run_with_cache(TEXT, mode="full")[1]


@pytest.fixture(scope="module")
def values():
    """Effects with the axes [row, column, example]."""
    return torch.tensor([[[1.0, 2], [3, 5], [0, 0]], [[0, 1], [-4, -1], [2, 7]]]).double()


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["parts"]


@pytest.fixture(scope="module")
def page(bundled, cache, values):
    """A page with every kind of picture. Its texts contain HTML and scripts, which must not run."""
    hostile = {"column": HOSTILE[:3]}
    table = Result(values, ("row", "column", "example"), words=hostile, unit="nats")
    three = Result(
        torch.tensor([[4.0, 5, 6], [-1, -2, -3]]), ("component", "example"), unit="logits"
    )
    edges = ["input->a0.h1<v>", "a0.h1->logits", "input->m2", "m2->logits"]
    graph = Graph(bundled)
    scores = torch.zeros(graph.allowed.shape)
    for size, edge in enumerate(edges, 1):
        scores[graph.index(edge)] = -size
    views = [
        plots.patterns(bundled, cache),
        plots.text([*HOSTILE, "a" * 100_000], [0.5, -2.25, math.nan, 1.0, 2.0], unit="nats"),
        plots.lens(interp.logit_lens(bundled, cache)),
        plots.effects(table),
        plots.effects(three),
        plots.curves({"<i>loss": [4.0, 3.5, 1.25]}),
        plots.circuit(Circuit(graph, edges, scores), FakeCurve),
    ]
    return plots.View("<b>all", [part for view in views for part in view.parts]).html()


class FakeCurve:
    """A curve over sizes of circuits. Its share 0.01 of 479 edges is 4 edges."""

    absolute = Result(torch.tensor([[0.25, 0.75]]), ("edges", "example"), labels={"edges": [0.01]})


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    return seen_in_browser(page, tmp_path_factory.mktemp("light"), PROBE)


def weight(cache, query, key):
    return f"{cache['pattern', 1][0, 0, query, key].item():.5g}"


def number(told):
    return float(told.split()[0].replace(MINUS, "-"))


def test_pattern_reads_the_weight_under_the_pointer_and_the_keys(seen, cache):
    assert seen["pressed"] == ["layer 1, head 0"]
    assert number(seen["weight"]) == pytest.approx(float(weight(cache, 7, 2)))
    assert all(word in seen["weight"] for word in ("query 7 “)”", "key 2 “f”"))
    assert number(seen["up"]) == pytest.approx(float(weight(cache, 6, 2)))
    assert number(seen["swapped"]) == pytest.approx(float(weight(cache, 7, 2)))
    assert seen["corner"] == "key \\ query"
    assert seen["strip"] == 1


def test_lens_reads_the_likeliest_tokens(seen, bundled):
    with torch.no_grad():
        chances = bundled(TEXT)[0, -1].softmax(-1).topk(5)
    for token, chance in zip(chances.indices.tolist(), chances.values.tolist(), strict=True):
        assert bundled.to_pieces(token).replace(" ", "·").replace("\n", "⏎") in seen["lens"]
        assert f"{100 * chance:.3g} %" in seen["lens"]


def test_texts_stand_over_their_cells_in_a_frame_below_the_fold(seen, bundled, cache):
    readout = interp.logit_lens(bundled, cache)
    words = [
        [visible(bundled.to_pieces(t)) for t in row] for row in readout.tokens[:, 0, :, 0].tolist()
    ]
    means = [["1.5", "4", "0"], ["0.5", f"{MINUS}2.5", "4.5"]]
    for places, rows in zip(seen["places"], (words[::-1], means), strict=True):
        shown = {(round(row, 1), round(column, 1)): text for row, column, text in places}
        assert shown == {(r, c): text for r, row in enumerate(rows) for c, text in enumerate(row)}
    assert seen["cursor"] == [[0, 8, ""]]
    assert seen["measured"] == []


def test_views_start_at_their_end_and_plots_fill_a_frame_laid_out_later(seen):
    pattern, lens, text = seen["ends"]
    assert pattern == [8, 8]  # only the padding of the frame is left at its start
    assert lens[0] == 8
    assert text[1] == pytest.approx(0, abs=3)
    assert seen["plots"] == [seen["scroll"] - 32] * 2


def test_the_script_reads_no_layout_of_elements():
    script = Path(plots.__file__).with_name("view.js").read_text(encoding="utf-8")
    assert not re.search(r"\b(offset|client|scroll)(Left|Top|Width|Height)\b", script)


def test_numbers_of_results_text_lines_and_circuits_are_read(seen):
    assert number(seen["heat"]) == -2.5
    assert "row 1" in seen["heat"]
    assert number(seen["value"]) == -2.25
    assert seen["bar"].startswith("5 logits")
    # Student's interval of 4, 5 and 6 by hand, with two degrees of freedom: 5 ± 4.3027 / √3.
    assert "2.5159 to 7.4841" in seen["bar"]
    assert "step 1" in seen["line"]
    assert "3.5" in seen["line"]
    assert seen["edges"] == [4, 2]
    told = "2 of 4 (1 more lead nowhere); faithfulness 0.5 (measured with 4 edges)"
    assert seen["faithful"] == told
    assert seen["edge"].startswith("m2 → logits")
    assert f"{MINUS}4" in seen["edge"]


OVER_IMAGE = """addEventListener("message", () => setTimeout(() => {
  const [under, over] = document.querySelectorAll(".map canvas"), box = node => { const r = node.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
  const pixels = canvas => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
  parent.postMessage(JSON.stringify({ under: pixels(under), over: pixels(over), boxes: [box(under), box(over)] }), "*");
}, 100));"""


def test_patches_are_drawn_over_their_image(tmp_path):
    pixels = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [4.0, 1.0, 0.0, 4.0]]]).expand(3, 2, 4)
    view = plots.image(pixels, torch.tensor([0.0, -2.0]), grid=(1, 2), unit="logits")
    seen = seen_in_browser(view.html(), tmp_path, OVER_IMAGE, around="")
    grey = (pixels[0] / 4 * 255).round().int().flatten().tolist()
    assert seen["under"][::4] == seen["under"][2::4] == grey
    assert seen["over"][3::4] == [0, 220]  # a patch with a larger effect is more opaque
    red, _, blue = seen["over"][4:7]
    assert red > blue  # the effect is negative
    assert seen["boxes"][0] == seen["boxes"][1]
    with pytest.raises(ValueError, match="2 by 2; got 5 "):
        plots.image(pixels, torch.ones(5))


def test_hostile_text_is_shown_and_runs_nothing(seen, page):
    assert seen["errors"] == []
    assert (seen["hacked"], seen["foreign"]) == (None, 0)
    assert HOSTILE[0] in seen["tokens"]
    assert r"<b·onclick=hacked=2>\x07\u202eabc\u2029" in seen["tokens"]
    assert max(map(len, seen["tokens"])) < 100
    assert page.count("<script") == 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_the_page_fits_400_pixels(seen):
    assert seen["width"] == 400
    assert seen["scroll"] <= 400


def mixed(page, theme, share):
    block = page.split("prefers-color-scheme: dark")[theme == "dark"]
    paper, more = (
        [int(n) for n in re.search(rf"--{name}: (\d+) (\d+) (\d+);", block).groups()]
        for name in ("paper", "more")
    )
    return pytest.approx([a + (b - a) * share for a, b in zip(paper, more, strict=True)], abs=1)


def test_colours_follow_the_readers_setting(page, seen, cache, tmp_path):
    # A frame gets the dark colours when it has a layout, so it must be inside the visible part here.
    option = "--blink-settings=preferredColorScheme=0"
    dark = seen_in_browser(page, tmp_path, PROBE, option, around="")
    share = cache["pattern", 1][0, 0, 7, 2].item()
    assert seen["pixel"] == mixed(page, "light", share)
    assert dark["pixel"] == mixed(page, "dark", share**0.6)


def unpacked(packed):
    raw = base64.b64decode(packed["base64"])
    return torch.frombuffer(
        bytearray(raw),
        dtype={"f4": torch.float32, "f8": torch.float64, "u1": torch.uint8}[packed["type"]],
    ).view(packed["shape"])


def test_numbers_are_exact_below_the_budget_and_of_8_bits_above(values):
    kept = embedded(plots.effects(Result(values, ("row", "column", "example"))).html())[0]
    assert torch.equal(unpacked(kept["values"])[0], values.mean(-1))
    assert not kept["note"]
    large = torch.randn(900, 500, 1)
    large[3, 7] = math.nan
    view = plots.effects(Result(large, ("row", "pos", "example")))
    assert len(view.html()) <= 2_000_000
    (part,) = embedded(view.html())
    assert part["note"] == "The last 160000 of 450000 values are shown."
    wide = plots.effects(Result(torch.randn(8, 400, 400, 1), ("head", "row", "column", "example")))
    (part,) = embedded(wide.html())
    assert part["values"]["type"] == "u1"
    assert "rounded to 254 steps" in part["note"]
    assert len(wide.html()) <= 2_000_000


def test_eight_bits_keep_numbers_to_half_a_step_and_nan(monkeypatch):
    numbers = torch.tensor([-1.0, math.nan, 0.3, 1.0])
    monkeypatch.setattr("interp.plots.view.BUDGET", 0)
    packed = embedded(plots.text(["a", "b", "c", "d"], numbers).html())[0]["values"]
    codes = unpacked(packed).double()
    assert codes[1] == 255
    back = packed["low"] + packed["step"] * codes[[0, 2, 3]]
    assert (back - numbers[[0, 2, 3]]).abs().max() <= 1 / 254 + 1e-6


def test_patterns_open_on_the_head_that_is_asked_for(bundled, cache):
    values = torch.zeros(4, 4, 1)
    values[2, 1], values[3, 0] = 0.75, math.nan
    scores = Result(values, ("layer", "head", "example"))
    (part,) = embedded(plots.patterns(bundled, cache, scores=scores).html())
    assert part["start"] == 2 * 4 + 1
    torch.testing.assert_close(unpacked(part["scores"]), values.flatten(), equal_nan=True)
    (part,) = embedded(plots.patterns(bundled, cache, scores=scores, head=(3, 1)).html())
    assert part["start"] == 13
    some = [(3, 2), (2, 1), (0, 0)]
    (part,) = embedded(plots.patterns(bundled, cache, heads=some, scores=scores).html())
    assert part["start"] == 1
    with pytest.raises(ValueError, match=r"\(layer, head\); got \(1, 1\)"):
        plots.patterns(bundled, cache, heads=some, head=(1, 1))
    for wrong in (Result(values[:3], scores.axes), Result(values[:, :1], scores.axes)):
        with pytest.raises(ValueError, match="must contain the drawn heads"):
            plots.patterns(bundled, cache, scores=wrong)
    with pytest.raises(ValueError, match="layer, head and example"):
        plots.patterns(bundled, cache, scores=Result(values[0], ("head", "example")))


def test_a_frame_is_as_high_as_its_page(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium to open the page in")
    rows = [Result(torch.ones(n, 1), ("component", "example")) for n in (20, 50)]
    opened = tmp_path / "page.html"
    opened.write_text("".join(each._repr_html_() for each in rows), encoding="utf-8")
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", opened.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    low, high = (float(n) for n in re.findall(r"<iframe[^>]*?height: ([\d.]+)px", done.stdout))
    assert high - low == 30 * 20  # a bar has 20 pixels
    assert 20 * 20 < low < 20 * 20 + 150


def test_objects_show_themselves(bundled, cache, values):
    lens = interp.logit_lens(bundled, cache)
    parts = interp.decompose(bundled, cache)
    circuit = Circuit(Graph(bundled), ["input->a0.h1<v>", "a0.h1->logits"])
    result = Result(values, ("row", "column", "example"))
    for shown in (lens, parts, circuit, result):
        assert shown._repr_html_().count('<iframe sandbox="allow-scripts"') == 1
        assert len(repr(shown).splitlines()) <= 40
    places = interp.max_activating(bundled, ["<b>x"], "blocks.1.mlp.post", neuron=3, k=2)
    assert "&lt;" in places._repr_html_()
    assert "<b>" not in places._repr_html_()
    assert cache._repr_html_().count("<tr>") <= 40
    assert "<td style='text-align: left'>blocks.0-3.attn.pattern</td>" in cache._repr_html_()
    deep = Result(torch.zeros(2, 3, 4, 5, 1), ("a", "b", "c", "d", "example"))
    assert "a 0, b 0, c 0, d 0" in deep.view().html()


def test_objects_with_pictures_save_them(bundled, tmp_path):
    sae, texts = load_sae("pydoc-4l/resid_post"), ["def f(x):", "class A:"]
    pairs = Pairs(["part KV8", "part KW8"], ["part KZ8", "part KZ9"], [("V", "Z"), ("W", "Z")])
    exact, guess = (
        analysis(bundled, pairs, "z", ("layer", "head"))
        for analysis in (interp.activation_patching, interp.attribution_patching)
    )
    stored = harvest(bundled, texts, "blocks.1.mlp_out", tmp_path / "store")
    circuit = Circuit(Graph(bundled), ["input->m2", "m2->logits"])
    for shown, said in (
        (pairs, "part KW8"),
        (pairs.read_by(bundled), "logit_diff([&#x27;V&#x27;, &#x27;W&#x27;], &#x27;Z&#x27;)"),
        (sae, "128 -&gt; 1024 features -&gt; 128"),
        (difference_of_means(bundled, (texts[:1], texts[1:])), "difference of means"),
        (interp.compare_effects(guess, exact), "rank correlation"),
        (interp.evaluate_circuit(bundled, pairs, circuit), "completeness"),
        (interp.ov_circuit(bundled), "the first 12 of 16 matrices"),
        (interp.evaluate_sae(bundled, sae, texts), "density at blocks.2.resid_post"),
        (interp.max_activating(bundled, texts, "blocks.1.mlp.post", neuron=3, k=2), "in text 1"),
        (stored, "blocks.1.mlp_out"),
        (exact, "logit_diff([&#x27;V&#x27;, &#x27;W&#x27;], &#x27;Z&#x27;)"),
    ):
        shown.save(tmp_path / "x.html")
        assert said in (tmp_path / "x.html").read_text(encoding="utf-8")
        assert shown._repr_html_().count('<iframe sandbox="allow-scripts"') == 1
    differ = [part["values"].tolist().index(1) for part in pairs.read_by(bundled).view().parts]
    assert differ == [6, 6, 6, 6]
    with pytest.raises(ValueError, match=r"must end in \.html or \.json; got x\.pdf"):
        stored.save("x.pdf")
    # The path of a dictionary without one of these suffixes is a folder.
    for name in ("x.pdf", "x.pt"):
        with pytest.raises(ValueError, match=rf"a folder or end in \.html or .*; got .*{name}"):
            sae.save(tmp_path / "new" / name)
    for shown in (pairs, stored, exact.view(), interp.ov_circuit(bundled), exact):
        for name in ("x.docx", "x.pt", "x.HTML5"):
            with pytest.raises(ValueError, match=rf"\.html.*; got .*{name}"):
                shown.save(tmp_path / "new" / name)
    for plot in (exact.view(), interp.compare_effects(guess, exact)):
        plot.save(tmp_path / "x.PNG")
        assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "x.PNG").unlink()
        with pytest.raises(ValueError, match=r"\.html, \.png, .*; got .*x$"):
            plot.save(tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"store", "x.html"}


def test_a_page_has_no_number_that_json_has_not():
    """A page contains numbers outside of arrays too, such as the influence of a node."""
    nodes = [
        Node("E_3_0", "token", -1, 0, 3, "a", influence=math.nan),
        Node("1_4_0", "feature", 1, 0, 4, activation=math.inf, influence=0.5),
        Node("2_5_0", "logit", 1, 0, 5, "b", influence=-math.inf),
    ]
    card = FeatureCard(4, math.nan, [FeatureExample(["a"], [math.nan], 0)])
    graph = PrunedGraph(nodes, [Link("E_3_0", "2_5_0", 1.5)], ["a"])
    wide = torch.tensor([[-1e308, 1e308], [math.nan, math.inf]]).double()[None]
    values = Result(wide, ("x", "y", "example"), about={"low": -math.inf})
    for view in (plots.attribution(graph, {1: [card]}), plots.effects(values)):
        for page in (view.html(), _page(view.title, "", view.parts, exact=False)):
            data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
            json.loads(data, parse_constant=pytest.fail)
    (part,) = plots.attribution(graph, {1: [card]}).parts
    assert [node["id"] for node in part["nodes"]] == ["2_5_0", "1_4_0", "E_3_0"]


@pytest.mark.usefixtures("unchecked")
def test_a_window_of_patterns_runs_the_layers_of_its_heads(bundled):
    runner, text = HookedRunner(bundled), "def f(self, x):\n    return x"
    eager = runner.run_with_cache(text, names="*.pattern")[1]
    lazy = runner.run_with_cache(text, names="*.pattern", lazy=True)[1]
    n, before = eager["pattern", 0].shape[-1], lazy.nbytes
    ran = []
    handles = [
        block.attn.register_forward_hook(lambda *args, layer=layer: ran.append(layer))
        for layer, block in enumerate(bundled.blocks)
    ]
    window = dict(queries=slice(-7, -2), keys=slice(3, 9), heads=[(3, 1), (0, 2), (3, 0)])
    (part,) = plots.patterns(bundled, lazy, **window).parts
    for handle in handles:
        handle.remove()
    assert set(ran) == {0, 3}
    assert lazy.nbytes == before, "nothing is kept"
    assert part["values"].shape == (3, 5, 6)
    for values, (layer, head) in zip(part["values"], window["heads"], strict=True):
        wanted = eager["pattern", layer][0, head, n - 7 : n - 2, 3:9]
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-6)
    assert part["names"] == ["3.1", "0.2", "3.0"]
    assert part["rows"]["labels"] == [str(place) for place in range(n - 7, n - 2)]
    assert part["columns"]["labels"] == ["3", "4", "5", "6", "7", "8"]
    pieces = bundled.to_pieces(eager.inputs["tokens"][0].tolist())
    assert part["columns"]["words"][1] == pieces[4]
    for wrong in (
        dict(queries=slice(n, None)),
        dict(keys=slice(4, 4)),
        dict(heads=[(4, 0)]),
        dict(heads=[(1, 4)]),
        dict(heads=[]),
        dict(heads=[3]),
        dict(queries=5),
        dict(keys=[2, 3]),
    ):
        with pytest.raises(ValueError, match="must be"):
            plots.patterns(None, lazy, **wrong)


def test_later_queries_of_a_cache_of_keys_see_all_keys(bundled):
    tokens, cached = bundled.to_tokens("def f(self, x):").tokens, KVCache()
    bundled(tokens[:, :-2], kv_cache=cached)
    runner = HookedRunner(bundled)
    cache = runner.run_with_cache(tokens[:, -2:], kv_cache=cached, names="*.pattern")[1]
    n = tokens.shape[1]
    (part,) = plots.patterns(None, cache, queries=slice(n - 1, None), heads=[(2, 3)]).parts
    torch.testing.assert_close(part["values"], cache["pattern", 2][:, 3, 1:])
    assert part["rows"]["labels"] == [str(n - 1)]
    assert len(part["columns"]["labels"]) == n


def test_a_plot_is_saved_by_the_word_of_views(tmp_path):
    result = Result(torch.rand(3, 5), ("layer", "example"))
    for end, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        result.plot().save(tmp_path / f"x.{end}")
        assert (tmp_path / f"x.{end}").read_bytes().startswith(start)
    for name in ("x.html", "x.safetensors", "x"):
        with pytest.raises(ValueError, match=rf"\.png.*; got .*{name}$"):
            result.plot().save(tmp_path / name)
    assert len([*tmp_path.iterdir()]) == 3


def test_a_saved_plot_has_the_dots_per_inch_of_the_user(tmp_path):
    images = pytest.importorskip("matplotlib.image", reason="needs the extra plots")
    figure = Result(torch.rand(3, 5), ("layer", "example")).plot()
    sizes = []
    for name, options in (("a.png", {}), ("b.png", {"dpi": 300})):
        figure.save(tmp_path / name, **options)
        sizes.append(images.imread(tmp_path / name).shape[1])
    assert sizes[1] == pytest.approx(3 * sizes[0], abs=3)
    with pytest.raises(TypeError, match="dip=; it takes dpi"):
        figure.save(tmp_path / "c.png", dip=300)


def test_a_view_is_saved_and_refuses_a_figure_it_has_not(cache, bundled, tmp_path):
    view = plots.patterns(bundled, cache)
    view.save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == view.html()
    with pytest.raises(ValueError, match=r"must end in \.html; got .*x\.png"):
        view.save(tmp_path / "x.png")  # patterns have no Matplotlib figure
    with pytest.raises(ValueError, match="plots"):
        _ = view.figure
    for call in (
        lambda: plots.patterns(None, cache, example=1),
        lambda: plots.text(["a"], [1.0, 2.0]),
        lambda: plots.curves({"a": [1.0], "b": [1.0, 2.0]}),
        lambda: plots.curves({}),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()


def test_the_error_of_a_figure_names_the_missing_library(values, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("interp.plots.f", "interp.plots.matplotlib_figures"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[plots\]"):
        Result(values, ("row", "column", "example")).plot()


def test_plots_have_a_figure(values):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    axes = plots.curves({"a": [3.0, 2.0]}, axis="rank").figure.axes[0]
    assert axes.lines[0].get_ydata().tolist() == [3.0, 2.0]
    assert plots.effects(Result(values, ("row", "column", "example"))).figure.axes


def test_a_circuit_explains_the_names_of_nodes(bundled):
    edges = ["input->a1.h2<v>", "a1.h2->m3", "m3->logits"]
    view = plots.circuit(Circuit(Graph(bundled), edges))
    assert view.parts[0]["names"] == ["a1.h2: head 2 of layer 1", "m3: MLP of layer 3"]


def test_heat_maps_have_a_table_for_each_label_of_the_facet():
    values = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    base, target = torch.zeros(7), torch.full((7,), 4.0)
    result = Result(values, ("layer", "head", "pos", "example"), base, target)
    (part,) = plots.effects(result, facet="head").parts
    assert torch.equal(part["values"], values.mean(-1).movedim(1, 0))
    for end, name in zip(result.interval(), ("95 % from", "95 % to"), strict=True):
        assert torch.equal(part["more"][name], end.movedim(1, 0))
    assert part["facets"] == ["head 0", "head 1", "head 2"]
    # The colours reach target - base, and the last positions are in view.
    assert part["limit"] == 4
    assert part["from_end"]
    assert not plots.effects(result.select(pos=0)).parts[0]["from_end"]


@pytest.mark.parametrize(("largest", "limit"), [(0.5, 4.0), (0.3, 0.3), (0.03, 0.03), (0.01, 4.0)])
def test_small_effects_are_not_drawn_as_white(largest, limit):
    """The colours include target - base, 4, unless the largest effect is 0.5 % to 10 % of it."""
    values = largest * torch.tensor([[0.1, -0.2, 0.0], [0.05, 1.0, -0.1]])[..., None].expand(
        2, 3, 5
    )
    base, target = torch.full((5,), 3.0), torch.full((5,), -1.0)
    result = Result(values, ("layer", "head", "example"), base, target)
    assert plots.effects(result).parts[0]["limit"] == pytest.approx(limit)
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    image = result.plot().axes[0].images[0]
    assert image.get_clim() == pytest.approx((-limit, limit))


def test_cards_of_features():
    example = FeatureExample([HOSTILE[0], "a", "b"], [0.5, 2.0, 0.0], 1)
    card = FeatureCard(
        7, 0.25, [example, example], [(HOSTILE[1], 1.5)], [("z", -0.5)], [(3, 0.9)], [0.0, 4.0], 2.0
    )
    view = plots.features([card, FeatureCard(9, 0.0)])
    whole = {"index": 3, "examples_quantiles": [], "histogram": [1, 2], "act_max": 2}
    (bars,) = plots.features([FeatureCard.from_neuronpedia(whole)]).parts
    assert bars["values"].tolist() == [1, 2]
    kinds = [part["kind"] for part in embedded(view.html())]
    assert kinds == ["text", "text", "bars", "histogram"]
    texts, bars = view.parts[:2], view.parts[2:]
    assert texts[0]["values"].tolist() == [0.5, 2.0, 0.0]
    assert texts[0]["limit"] == 2.0
    assert bars[0]["values"].tolist() == [1.5, -0.5]
    assert bars[1]["values"].tolist() == [0.0, 4.0]
    assert bars[1]["largest"] == 2
    page = view.html()
    assert "<h2>Feature 7, active at 25.00% of positions</h2>" in page
    assert "hacked=1</script>" not in page
    cards = FeatureCards([FeatureCard(n, 0.5, [example]) for n in range(13)])
    assert "12 of 13 features" in plots.features(cards).html()
    assert "<iframe" in cards._repr_html_()
