"""The rows of the tables in the guide: lines of TransformerLens, and of ours."""

import ast
import runpy
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("rows.npz")
GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "from_transformer_lens.py"
KEPT = 80  # numbers of each result


def of_the_guide():
    """Both lines of each row."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("# | `")]
    cells = [line.removeprefix("# |").split(" | ") for line in lines]
    return [(theirs.strip(" `"), ours.strip(" `")) for theirs, ours, *_ in cells]


def guide():
    """The names that the guide's code makes."""
    return runpy.run_path(str(GUIDE))


def result(code, names):
    """What a line gives: its last expression, or else the value of `logits`."""
    *before, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        exec(code, names)
        return names["logits"]
    exec(compile(ast.Module(before, []), code, "exec"), names)
    return eval(compile(ast.Expression(last.value), code, "eval"), names)


def numbers(value):
    """The first numbers of a tensor, a number or lists of them, or the characters of texts; None of others."""
    value = "".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
    if isinstance(value, str):
        value = [*value.encode()]
    if not hasattr(value, "shape") and not isinstance(value, int | float | list):
        return None
    array = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
    return array.astype(np.float32).ravel()[:KEPT]
