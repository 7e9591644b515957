"""The rows of the tables in the guide: lines of TransformerLens, and of ours."""

import ast
import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("rows.npz")
GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "from_transformer_lens.ipynb"
KEPT = 80  # numbers of each result


def of_the_guide():
    """Both lines of each row of the tables that come after the imports."""
    cells = json.loads(GUIDE.read_text())["cells"]
    code = next(n for n, cell in enumerate(cells) if "import torch" in "".join(cell["source"]))
    texts = ["".join(c["source"]) for c in cells[code:] if c["cell_type"] == "markdown"]
    tables = "\n".join(texts).partition("## TransformerLens 4")[0]
    rows = [
        line.removeprefix("|").split(" | ") for line in tables.splitlines() if line[:3] == "| `"
    ]
    return [(theirs.strip(" `"), ours.strip(" `")) for theirs, ours, *_ in rows]


def guide():
    """The names that the guide's code makes."""
    names = {"__name__": "guide"}
    for cell in json.loads(GUIDE.read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("%"):
            exec(code, names)
    return names


def result(code, names):
    """What a line gives: its last expression, or else the value of `logits`."""
    *before, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        exec(code, names)
        return names["logits"]
    exec(compile(ast.Module(before, []), code, "exec"), names)
    return eval(compile(ast.Expression(last.value), code, "eval"), names)


def numbers(value):
    """The first numbers of a tensor, a number or lists of them, or the characters of texts;

    None of others.
    """
    value = "".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
    if isinstance(value, str):
        value = [*value.encode()]
    if not hasattr(value, "shape") and not isinstance(value, int | float | list):
        return None
    array = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
    return array.astype(np.float32).ravel()[:KEPT]
