"""Count lines of code, without docstrings, comments and blank lines: `python tests/count.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ("hooks", "models", "interp")


def lines_of_code(path: Path) -> int:
    text = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(text.splitlines(), 1)
    )


def counted(*folders: str) -> tuple[int, int]:
    """Lines and files of some folders together."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sum(map(lines_of_code, files)), len(files)


if __name__ == "__main__":
    for folders in (*((folder,) for folder in SOURCE), SOURCE, ("tests",)):
        lines, files = counted(*folders)
        print(f"{' + '.join(folders):<24}{lines:>7} lines in {files:>3} files")
