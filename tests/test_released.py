"""The comparison of the record with the record of a release."""

import subprocess

import pytest

from tests.released import (
    ROOT,
    changed_arguments,
    entries,
    faults,
    last_release,
    main,
    parts,
    signature,
)

BEFORE = """interp
  class Pairs(Shown)
    __init__(self, clean: Texts, corrupted: Texts, *, groups: int | None = None) -> None
    axes: tuple[str, ...]
    batches(self, size: int = 8) -> Pairs
  compare(first: Result, second: Result, *, side: Literal['left', 'right'] = 'left') -> Result
  Metric = Callable[[Tensor], Tensor]
objects that functions return
  class Entry(tuple)
    label: str
details
  class Stack
words
  models of load = pydoc-4l, smollm2-135m
needed versions
  python>=3.11
"""
COMPARE = "compare(first: Result, second: Result, *, side: Literal['left', 'right'] = 'left')"
HEADINGS = {
    "old names": "| 0.1.0 | 0.2.0 |",
    "other changes": "| 0.1.0 | 0.2.0 without an error |",
}


def page(*rows, heading="old names", version="0.2.0"):
    """Return a page of changes with one table."""
    table = "".join(f"| {old} | {new} |\n" for old, new in rows)
    return f"# Changes\n\n## {version} (now)\n\n{HEADINGS[heading]}\n| --- | --- |\n{table}\n"


def found(old, new, changes="", version="0.2.0"):
    """Return the faults after a text of the record was replaced."""
    assert old in BEFORE
    return faults(BEFORE, BEFORE.replace(old, new), changes, "0.1.0", version)


def test_the_record_of_a_release_agrees_with_itself():
    record = (ROOT / "tests/signatures.txt").read_text()
    assert faults(record, record, "", "0.1.0", "0.1.1") == []
    texts = {*entries(record).values()}
    assert {line.strip() for line in record.splitlines() if line.startswith(" ")} <= texts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A new argument with a default, as a keyword and at the end of the positions.
        ("*, groups: int | None = None", "*, groups: int | None = None, seed: int = 0"),
        ("size: int = 8", "size: int = 8, seed: int = 0"),
        # A type accepts more, and a word is new.
        ("first: Result", "first: Result | Path"),
        ("'left', 'right'", "'left', 'none', 'right'"),
        ("pydoc-4l, smollm2-135m", "pydoc-4l, qwen, smollm2-135m"),
        # A function, an attribute and a base are new.
        ("  Metric", "  other(text: str)\n  Metric"),
        ("    axes", "    also: str\n    axes"),
        ("(Shown)", "(Hints, Shown)"),
        # A received class gets a place in a module. Details and needed versions may change.
        ("objects that functions return\n", "interp.results\n"),
        ("  class Stack\n", ""),
        ("python>=3.11", "python>=3.12"),
    ],
)
def test_additions_need_no_row_in_a_minor_version(old, new):
    assert found(old, new) == []
    assert found(old, new, version="0.1.0") == []
    is_free = "Stack" in old
    assert bool(found(old, new, version="0.1.1")) is not is_free


@pytest.mark.parametrize(
    ("old", "new", "row"),
    [
        # Removed: a function, a method, an attribute, a class and an argument.
        (f"  {COMPARE} -> Result\n", "", "`interp.compare`"),
        ("    batches(self, size: int = 8) -> Pairs\n", "", "`Pairs.batches()`"),
        ("    axes: tuple[str, ...]\n", "", "`axes` of `Pairs`"),
        ("    label: str\n", "", "`Entry.label`"),
        ("class Pairs", "class Couples", "`interp.Pairs`"),
        ("class Entry", "class Item", "`Entry`"),
        (", groups: int | None = None", "", "`groups=` of `Pairs`"),
        ("side: Literal", "at: Literal", "`compare(side=)`"),
    ],
)
def test_a_removed_name_needs_a_row_of_old_names_in_the_new_version(old, new, row):
    other = page(("`interp.other`", "a name"))
    assert len(found(old, new, other)) == 1
    assert found(old, new, page((row, "a name"))) == []
    assert found(old, new, page((row, "a name"), heading="other changes"))
    assert found(old, new, page((row, "a name"), version="0.1.0"))


@pytest.mark.parametrize(
    ("old", "new", "row"),
    [
        # A default, a word and a type; an argument that became a keyword, has another position or
        # must be passed.
        ("size: int = 8", "size: int = 16", "`Pairs.batches(size=8)`"),
        ("'left', 'right'", "'left'", "`compare(side='right')`"),
        ("size: int = 8", "size: str = 8", "`Pairs.batches(size=8)`"),
        ("second: Result, *, side", "*, second: Result, side", "`second=` of `compare`"),
        ("self, size: int = 8", "self, seed: int = 0, size: int = 8", "`size` of `Pairs.batches`"),
        ("size: int = 8", "size: int = 8, *, seed: int", "`Pairs.batches()` without `seed=`"),
        # The type of a result, of an attribute and of a name; a base of a class.
        ("'left') -> Result", "'left') -> str", "`compare`"),
        ("axes: tuple[str, ...]", "axes: list[str]", "`Pairs.axes`"),
        ("Callable[[Tensor], Tensor]", "int", "`Metric`"),
        ("Pairs(Shown)", "Pairs(object)", "`Pairs`"),
    ],
)
def test_another_change_needs_a_row_in_the_new_version(old, new, row):
    assert len(found(old, new)) == 1
    assert found(old, new, page((row, "other"), heading="other changes")) == []
    assert found(old, new, page((row, "other"))) == []


def test_the_row_of_an_argument_names_the_argument():
    assert found("size: int = 8", "size: int = 16", page(("`Pairs.batches()`", "other")))
    assert found("side: Literal", "at: Literal", page(("`compare()`", "other")))


def test_a_removed_word_needs_a_row():
    row = ("`models of load`: `smollm2-135m`", "`load` of a directory")
    assert len(found("pydoc-4l, smollm2-135m", "pydoc-4l")) == 1
    assert found("pydoc-4l, smollm2-135m", "pydoc-4l", page(row, heading="other changes")) == []


def test_separators_inside_brackets_and_quotes_divide_nothing():
    assert parts("a: dict[str, int], b: str = ', ', c = (1, 2)") == [
        "a: dict[str, int]",
        "b: str = ', '",
        "c = (1, 2)",
    ]
    arguments, _ = signature(
        "of(f: Callable[[int], str] | None = None, **options: {n: int, k: str})"
    )
    assert arguments == [
        ("f", {"Callable[[int], str]", "None"}, "None"),
        ("**options", {"n: int", "k: str"}, None),
    ]
    assert changed_arguments(arguments, arguments) == []


def test_the_last_release_is_the_last_tag_before_the_commit(monkeypatch, tmp_path):
    """The tag of the commit itself, and tags of release candidates, are no earlier releases."""

    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr("tests.released.ROOT", tmp_path)
    record = tmp_path / "tests/signatures.txt"
    record.parent.mkdir()
    git("init")
    for name in ("v0.1.0", "v0.2.0rc1", "v0.2.0"):
        record.write_text(f"the record of {name}\n")
        git("add", ".")
        git("commit", "-m", name)
        if name == "v0.1.0":
            assert last_release() is None
        git("tag", name)
    assert last_release() == ("0.1.0", "the record of v0.1.0\n")
    git("commit", "--allow-empty", "-m", "later")
    assert last_release() == ("0.2.0", "the record of v0.2.0\n")


def test_the_command_says_that_there_is_no_tag_or_compares_with_the_last_tag(monkeypatch, capsys):
    monkeypatch.setattr("tests.released.last_release", lambda: None)
    assert main() == 0
    assert "compared with nothing" in capsys.readouterr().out
    record = (ROOT / "tests/signatures.txt").read_text()
    monkeypatch.setattr("tests.released.last_release", lambda: ("0.1.0", record))
    assert main() == 0
    gone = record.replace("interp\n", "interp\n  removed_name(text: str) -> str\n", 1)
    monkeypatch.setattr("tests.released.last_release", lambda: ("0.0.1", gone))
    assert main() == 1
    assert "removed_name" in capsys.readouterr().out


def test_no_row_excuses_a_change_of_a_patch_version():
    record = "hooks\n  old_name(text: str) -> str\n  other(text: str) -> str\n"
    less = "hooks\n  other(text: str) -> str\n"
    page = "## {}\n\n| 0.1.0 | {} |\n| --- | --- |\n| `hooks.old_name` | `hooks.other` |\n"
    for version, n_faults in (("0.2.0", 0), ("0.1.1", 1)):
        found = faults(record, less, page.format(version, version), "0.1.0", version)
        assert len(found) == n_faults
