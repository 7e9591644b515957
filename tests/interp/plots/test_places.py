"""Pictures in JupyterLab, exported notebooks, built pages and print.

In each of them, every word must be at the place of its own number.
"""

import collections
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

import interp
from interp.plots.view import visible
from tests.shipped import pydoc

api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
nbconvert = pytest.importorskip("nbconvert", reason="needs the extra notebook")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    # The test takes minutes, and CI has no browser.
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open pages in"),
    pytest.mark.xdist_group("browser"),
]

TEXT = "def f(x): return f(x)"
MODEL = f"""import interp, torch
from interp import *
from interp.features import feature_cards, load_sae, load_transcoders
from models import load
model, text = load("pydoc-4l"), {TEXT!r}
_, cache = run_with_cache(model, text, mode="full")
pairs = Pairs("def __ini", "def __nam", ("t", "e"))"""
CELLS = {
    "lens": "logit_lens(model, cache)",
    "patterns": "plots.patterns(model, cache, scores=head_scores(model, cache, 'previous_token'))",
    "heat": "activation_patching(model, pairs, 'resid_post')",
    "bars": "direct_logit_attribution(model, cache, right='t')",
    "text": "plots.text(model.to_pieces(text), torch.arange(21.0))",
    "image": "plots.image(torch.rand(3, 20, 20), torch.arange(16.0))",
    "curves": "plots.curves({'a': [3.0, 2.0, 1.0], 'b': [1.0, 1.5, 2.0]})",
    "circuit": "circuits.top(interp.graph.Graph(model), edge_attribution(model, pairs), 12)",
    "graph": "attribution_graph(model, 'part KV8 and part K', load_transcoders('pydoc-4l/transcoders'))",
    "cards": "feature_cards(model, load_sae('pydoc-4l/resid_post'), [text], [3, 17])",
}
# A script that returns places on the screen: the cells of a map, the tokens of a text, and the size
# of the drawing.
LOOK = """() => [...document.querySelectorAll("[data-part]")].map(part => {
  const map = part.querySelector(".map canvas"), box = map && map.getBoundingClientRect();
  const middle = node => { const r = node.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; };
  const over = node => { node.scrollIntoView({ block: "nearest" }); return document.elementsFromPoint(...middle(node)).includes(node); };
  const cells = map ? [...part.querySelectorAll(".cells span")].map(span => {
    const [x, y] = middle(span);
    return [Math.floor((y - box.top) / box.height * map.height), Math.floor((x - box.left) / box.width * map.width), span.textContent];
  }) : [];
  const tokens = [...part.querySelectorAll(".text > div > span")].map(span => [span.textContent, over(span)]);
  const drawn = [...part.querySelectorAll("svg.plot, canvas")].map(node => node.getBoundingClientRect()).map(r => r.width * r.height);
  return { cells, tokens, drawn };
})"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A folder with a notebook that was run, and that contains a picture of each kind."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(cell) for cell in (MODEL, *CELLS.values())]
    about = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": about})
    nbconvert.preprocessors.ExecutePreprocessor(timeout=200).preprocess(made)
    nbformat.write(made, folder / "pictures.ipynb")
    return folder / "pictures.ipynb"


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def words():
    """The most likely next token in the lens, for each layer and position."""
    model = pydoc()
    lens = interp.logit_lens(model, interp.run_with_cache(model, TEXT)[1])
    return [[visible(top[0]) for top in layer] for layer in model.to_pieces(lens.tokens[:, 0])]


def frames_of(page):
    """Return the frames of all pictures after they are drawn, by the names of the cells."""
    shown = f"document.querySelectorAll('iframe[srcdoc]').length >= {len(CELLS)}"
    page.wait_for_function(shown, timeout=120_000)
    handles = page.query_selector_all("iframe[srcdoc]")
    for handle in handles:
        handle.scroll_into_view_if_needed()
        page.wait_for_timeout(150)
    return dict(zip(CELLS, [(h, h.content_frame()) for h in handles], strict=True))


def check(page, words, fitted=True):
    """Check that every kind of picture is drawn completely, with each word next to its number."""
    frames = frames_of(page)
    for name, (handle, frame) in frames.items():
        handle.scroll_into_view_if_needed()
        parts = frame.evaluate(LOOK)
        assert any(size > 1000 for part in parts for size in part["drawn"]) or name == "text", name
        high = frame.evaluate("[innerHeight, document.documentElement.scrollHeight]")
        assert high[0] >= high[1] or not fitted, (name, high)
        if name == "lens":
            seen = {(row, column): text for row, column, text in parts[0]["cells"]}
            layers, n_pos = len(words), len(words[0])
            assert len(seen) == layers * n_pos
            # The last layer is the top row.
            expected = {
                (layers - 1 - n, p): words[n][p] for n in range(layers) for p in range(n_pos)
            }
            assert seen == expected
        if name == "text":
            assert [token for token, _ in parts[0]["tokens"]] == [visible(c) for c in TEXT]
            assert all(is_over for _, is_over in parts[0]["tokens"])
    # Move the pointer to a word.
    handle, frame = frames["lens"]
    # A narrow lens opens at its last tokens, so take the last token.
    span = frame.locator(".cells span").nth(len(words[0]) - 1)
    handle.scroll_into_view_if_needed()
    box = span.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert span.inner_text() in frame.locator("#tip").inner_text()
    frames["curves"][1].locator("svg.plot").press("ArrowLeft")
    assert "1.5" in frames["curves"][1].locator("#tip").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_exported_html(notebook, browser, words, theme, width):
    body, _ = nbconvert.HTMLExporter(embed_images=True).from_filename(str(notebook))
    opened = notebook.with_suffix(".html")
    opened.write_text(body, encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
    page.goto(opened.as_uri())
    check(page, words)
    page.close()


def test_a_hidden_tab(notebook, browser, words):
    body, _ = nbconvert.HTMLExporter().from_filename(str(notebook))
    opened = notebook.with_suffix(".html")
    opened.write_text(body.replace("<body", '<body style="display: none"', 1), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto(opened.as_uri())
    page.wait_for_timeout(1000)  # the page draws before it has a layout
    page.evaluate("document.body.style.display = ''")
    check(page, words)
    page.close()


def test_built_pages(notebook, browser, words, tmp_path):
    pytest.importorskip("mkdocs_jupyter", reason="needs the extra docs")
    (tmp_path / "docs").mkdir()
    shutil.copy(notebook, tmp_path / "docs")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nuse_directory_urls: false\nplugins: [mkdocs-jupyter]\ntheme: {name: "
        "material, font: false}\n"
    )
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q"], cwd=tmp_path, check=True)
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto((tmp_path / "site" / "pictures.html").as_uri())
    check(page, words)
    page.close()


def test_print(notebook, browser, words, tmp_path):
    pypdf = pytest.importorskip("pypdf", reason="needs pypdf, which reads the printed page")
    body, _ = nbconvert.HTMLExporter().from_filename(str(notebook))
    opened = notebook.with_suffix(".html")
    opened.write_text(body, encoding="utf-8")
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.goto(opened.as_uri())
    frames_of(page)
    page.pdf(path=tmp_path / "x.pdf")
    page.close()
    # Collect the words of each line of the PDF, from left to right. A frame shows the last tokens of
    # a long text.
    lines = collections.defaultdict(list)
    for n, leaf in enumerate(pypdf.PdfReader(tmp_path / "x.pdf").pages):

        def note(text, cm, tm, font, size, n=n):
            matrix = pypdf.mult(tm, cm)
            if text.strip():
                lines[n, round(matrix[5])].append((matrix[4], text.strip()))

        leaf.extract_text(visitor_text=note)
    printed = [[text for _, text in sorted(line)] for line in lines.values()]
    for layer in words:
        assert any(line[-5:] == layer[-5:] for line in printed), layer
    assert any("".join(line) == "".join(map(visible, TEXT[:18])) for line in printed)


@contextlib.contextmanager
def jupyterlab(folder):
    """Start JupyterLab in a folder, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        "--no-browser --allow-root --IdentityProvider.token= --ServerApp.password= "
        "--ServerApp.disable_check_xsrf=True"
    )
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        *options.split(),
        f"--port={port}",
        f"--ServerApp.root_dir={folder}",
    ]
    places = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    settings = folder / "JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    # By default, JupyterLab removes outputs that are not visible from the page.
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    with (folder / "log").open("w") as log:
        lab = subprocess.Popen(command, env={**os.environ, **places}, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/lab/tree/"
    finally:
        lab.terminate()
        lab.wait()


def test_jupyterlab(notebook, browser, words, tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    shutil.copy(notebook, tmp_path)
    with jupyterlab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        for _ in range(60):
            with contextlib.suppress(api.Error):
                page.goto(f"{address}pictures.ipynb?reset")
                break
            time.sleep(1)
        # The notebook was run by another program, so JupyterLab does not trust it.
        line = page.locator(
            "p", has_text="lens of “def f(x): return f(x)”: a picture, which trusted"
        )
        line.wait_for(timeout=60_000)
        assert page.query_selector("iframe[srcdoc]") is None
        # Newer versions of JupyterLab ask for the kernel if it does not run yet.
        with contextlib.suppress(api.TimeoutError):
            page.click(".jp-Dialog button:has-text('Select')", timeout=10_000)
        page.click("text=Run >> nth=0")
        page.click("text=Run All Cells")
        page.wait_for_function(
            "[...document.querySelectorAll('.jp-InputPrompt')].every(p => "
            "!p.innerText.includes('*'))",
            timeout=120_000,
        )
        check(page, words)
        for what in ("Collapse All Outputs", "Expand All Outputs"):
            page.click("text=View >> nth=0")
            page.click(f"text={what}")
            page.wait_for_timeout(500)
        check(page, words)
        page.click("text=File >> nth=0")
        page.click("text=/^Save Notebook$/")
        page.wait_for_timeout(2000)
        # After the notebook is opened again, scripts of outputs do not run, so the heights of frames
        # are guessed.
        page.goto(f"{address}pictures.ipynb?reset")
        page.wait_for_selector("iframe[srcdoc]", timeout=60_000, state="attached")
        check(page, words, fitted=False)
        page.close()
