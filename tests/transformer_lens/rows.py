"""The rows of the tables in the guide: a line of TransformerLens, and a line of this package."""

import ast
import json
from pathlib import Path

import numpy as np

from interp import Result

FILE = Path(__file__).with_name("rows.npz")
GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "from_transformer_lens.ipynb"
KEPT = 80  # how many numbers of each result are stored


def of_the_guide():
    """Yield both lines of each row, in the tables of the guide that come after the imports."""
    cells = json.loads(GUIDE.read_text())["cells"]
    code = next(n for n, cell in enumerate(cells) if "import torch" in "".join(cell["source"]))
    return rows_of(text_of(cells[code:]).partition("## TransformerLens 4")[0])


def of_attached_models():
    """Yield both lines of each row in the table of lines that differ after `attach`."""
    text = text_of(json.loads(GUIDE.read_text())["cells"])
    return rows_of(text.partition("## An attached model\n")[2].partition("\n## ")[0])


def text_of(cells):
    """Return the text of the cells without code."""
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def rows_of(tables):
    """Return the first two cells of each row that begins with code."""
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line[:3] == "| `"]
    return [(first.strip(" `"), second.strip(" `")) for first, second, *_ in rows]


def guide():
    """Run the code of the guide, and return its names."""
    names = {"__name__": "guide"}
    for cell in json.loads(GUIDE.read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("%"):
            exec(code, names)
    return names


def result(code, names):
    """Run a line, and return the value of its last expression.

    If the last statement is not an expression, return the value of `logits`.
    """
    *before, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        exec(code, names)
        return names["logits"]
    exec(compile(ast.Module(before, []), code, "exec"), names)
    return eval(compile(ast.Expression(last.value), code, "eval"), names)


def numbers(value):
    """Return the first numbers of a result, so that it can be compared.

    A text gives the numbers of its bytes. A result without numbers gives None.
    """
    value = "".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
    if isinstance(value, str):
        value = [*value.encode()]
    is_numbers = hasattr(value, "shape") and not isinstance(value, Result)
    if not is_numbers and not isinstance(value, int | float | list):
        return None
    array = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
    return array.astype(np.float32).ravel()[:KEPT]
