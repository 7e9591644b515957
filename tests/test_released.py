"""The comparison of the record with the record of a release."""

import subprocess

import pytest

from tests.released import (
    ROOT,
    Version,
    announcements,
    changed_arguments,
    entries,
    faults,
    last_release,
    lost_announcements,
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
  class Model(Sized, Protocol)
    pieces(self, n: int) -> None (optional)
    run(self, tokens: Tensor) -> Tensor
objects that functions return
  class Entry(tuple)
    label: str
details
  class Stack
words
  models of load = pydoc-4l, smollm2-135m
needed versions
  python>=3.11
  torch>=2.9,<2.14
"""
COMPARE = "compare(first: Result, second: Result, *, side: Literal['left', 'right'] = 'left')"
HEADINGS = {
    "old names": "| 0.2.0 | 0.3.0 |",
    "other changes": "| 0.2.0 | 0.3.0 without an error |",
}
DATES = {
    "0.1.0": "2026-07-31",
    "0.2.0": "2027-01-31",
    "0.2.1": "2027-02-01",
    "0.3.0": "2027-07-31",
    "0.4.0": "2028-01-31",
}


def page(*rows, heading="old names", version="0.3.0", announced=(), date=None):
    """Return a page of changes with a table of a version, and with announcements.

    Args:
        rows: the rows of the table of the version.
        heading: the kind of the table.
        version: the version of the table.
        announced: the rows under "Announced", each with four cells.
        date: the date of the version. By default, it is six months after the version before.
    """
    dates = DATES if date is None else {**DATES, version: date}
    text = "# Changes\n\n## Announced\n\n"
    if announced:
        text += "| now | later | announced in | changes in |\n| --- | --- | --- | --- |\n"
        text += "".join(f"| {' | '.join(row)} |\n" for row in announced)
    for each, day in reversed(dates.items()):
        text += f"\n## {each} (last change {day})\n\nSome text.\n"
        if each == version and rows:
            table = "".join(f"| {old} | {new} |\n" for old, new in rows)
            text += f"\n{HEADINGS[heading]}\n| --- | --- |\n{table}"
    return text


def found(old, new, last_page="", changes="", version="0.3.0"):
    """Return the faults after a text of the record of 0.2.0 was replaced.

    Args:
        old: a text of the record.
        new: its replacement.
        last_page: the page of changes of 0.2.0.
        changes: the page of changes of the new version.
        version: the new version.
    """
    assert old in BEFORE
    release = Version("0.2.0", BEFORE, last_page or page())
    return faults(release, Version(version, BEFORE.replace(old, new), changes or page()))


def announced(row, version="0.2.0", changes="0.3.0"):
    """Return the page of a release that announces the change of a row."""
    return page(announced=[(row, "other", version, changes)])


def test_the_record_of_a_release_agrees_with_itself():
    record = (ROOT / "tests/signatures.txt").read_text()
    page = (ROOT / "examples/guides/changes.md").read_text()
    assert faults(Version("0.1.0", record, page), Version("0.1.1", record, page)) == []
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
    assert found(old, new, version="0.2.0") == []
    is_free = "Stack" in old
    assert bool(found(old, new, version="0.2.1")) is not is_free


REMOVED = [
    # A function, a method, an attribute, a class and an argument.
    (f"  {COMPARE} -> Result\n", "", "`interp.compare`"),
    ("    batches(self, size: int = 8) -> Pairs\n", "", "`Pairs.batches()`"),
    ("    axes: tuple[str, ...]\n", "", "`axes` of `Pairs`"),
    ("    label: str\n", "", "`Entry.label`"),
    ("class Pairs", "class Couples", "`interp.Pairs`"),
    ("class Entry", "class Item", "`Entry`"),
    (", groups: int | None = None", "", "`groups=` of `Pairs`"),
    ("side: Literal", "at: Literal", "`compare(side=)`"),
]
CHANGED = [
    # A default, a word and a type; an argument that became a keyword, has another position or must
    # be passed.
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
    # A word whose type is only a text.
    ("pydoc-4l, smollm2-135m", "pydoc-4l", "`models of load`: `smollm2-135m`"),
    # A member that the models of users lack, or whose arguments they lack.
    ("Protocol)\n", "Protocol)\n    depth: int\n", "`depth` of `Model`"),
    ("tokens: Tensor) -> Tensor", "tokens: Tensor, at: int = 0) -> Tensor", "`Model.run(at=)`"),
    ("n: int) -> None (optional)", "n: int) -> None", "`Model.pieces`"),
]


@pytest.mark.parametrize(("old", "new", "row"), [*REMOVED, *CHANGED])
def test_an_earlier_release_must_announce_a_change_and_the_page_must_list_it(old, new, row):
    listed = page((row, "other"))
    assert found(old, new, announced(row), listed) == []
    # Not announced, announced for another name, and announced by the new version itself.
    assert len(found(old, new, "", listed)) == 1
    assert found(old, new, announced("`other`"), listed)
    assert found(old, new, "", page((row, "other"), announced=[(row, "other", "0.2.0", "0.3.0")]))
    # Announced for a later version, and not listed by the new version.
    assert found(old, new, announced(row, changes="0.4.0"), listed)
    assert found(old, new, announced(row), page())
    assert found(old, new, announced(row), page((row, "other"), version="0.2.0"))


@pytest.mark.parametrize(("old", "new", "row"), [*REMOVED, *CHANGED])
def test_nothing_excuses_a_change_of_a_patch_version(old, new, row):
    listed = page((row, "other"), version="0.2.1")
    assert found(old, new, announced(row, "0.1.0", "0.2.1"), listed, "0.2.1")
    still_works = page(announced=[(row, "other", "0.2.1", "0.3.0")])
    assert found(old, new, "", still_works, "0.2.1")


@pytest.mark.parametrize(("old", "new", "row"), REMOVED)
def test_a_name_may_leave_the_record_while_its_old_form_works(old, new, row):
    """`test_old_names` runs the old forms of the rows under "Announced"."""
    assert found(old, new, "", page(announced=[(row, "other", "0.3.0", "0.4.0")])) == []
    assert found(old, new, announced(row), page((row, "other"), heading="other changes"))


@pytest.mark.parametrize(("old", "new", "row"), CHANGED)
def test_a_change_in_place_may_be_listed_in_a_table_of_changes_without_an_error(old, new, row):
    listed = page((row, "other"), heading="other changes")
    assert found(old, new, announced(row), listed) == []
    # The release before must announce it: the announcement of the same version is too late.
    assert found(old, new, "", page(announced=[(row, "other", "0.3.0", "0.4.0")]))
    # A version before the announced one is too early.
    later = [(row, "other", "0.2.0", "0.4.0")]
    listed = page((row, "other"), announced=later)
    assert found(old, new, page(announced=later), listed)


@pytest.mark.parametrize(
    ("now", "n_faults"),
    [
        ("torch>=2.9,<2.15", 0),
        ("torch>=2.9", 0),
        # A newer version is needed, an accepted version is refused, and a bound is new.
        ("torch>=2.10,<2.15", 2),
        ("torch>=2.9,<2.13", 2),
        ("python>=3.11,<3.14", 2),
    ],
)
def test_a_patch_version_may_accept_newer_versions_of_libraries(now, n_faults):
    name = now.partition(">")[0]
    before = {"torch": "torch>=2.9,<2.14", "python": "python>=3.11"}[name]
    assert len(found(before, now, version="0.2.1")) == n_faults
    assert found(before, now) == []
    # Texts of other sections are no versions.
    metric = "  Metric = Callable[[Tensor], Tensor]"
    (fault,) = faults(
        Version("0.2.0", f"hooks\n{metric},<1\n", page()),
        Version("0.3.0", f"hooks\n{metric},<2\n", page()),
    )
    assert "changed" in fault


def test_a_row_with_too_many_cells_is_named():
    broken = page(announced=[("`a | b`", "`c`", "0.2.0", "0.3.0")])
    with pytest.raises(ValueError, match=r"four cells; got .*a \| b"):
        announcements(broken)


def test_an_optional_member_of_a_protocol_is_an_addition():
    optional = "Protocol)\n    depth(self) -> int (optional)\n"
    assert found("Protocol)\n", optional) == []
    assert found("Protocol)\n", optional, version="0.2.1")


@pytest.mark.parametrize(
    ("date", "is_early"), [("2027-07-30", True), ("2027-07-31", False), ("2028-01-01", False)]
)
def test_a_change_follows_at_least_six_months_after_its_announcement(date, is_early):
    row = "`Pairs.batches(size=8)`"
    listed = page((row, "other"), date=date)
    changes = found("size: int = 8", "size: int = 16", announced(row), listed)
    assert bool(changes) is is_early
    # The page of the release has the date of the announcement.
    other = listed.replace("2027-01-31", "2027-01-30")
    assert other != listed
    assert found("size: int = 8", "size: int = 16", announced(row), other) == changes


def test_an_announcement_stays_until_its_version_lists_the_change():
    row = ("`positions=`", "`pos=`", "0.2.0", "0.3.0")
    last = page(announced=[row])

    def lost(now, version="0.3.0"):
        return lost_announcements(Version("0.2.0", "", last), Version(version, "", now))

    # It stays, it is made, or a later version makes it.
    assert lost(last) == lost(last, "0.2.1") == []
    assert lost(page(row[:2])) == []
    assert lost(page(announced=[(*row[:3], "0.4.0")])) == []
    # It is gone, is gone in a patch, or becomes earlier.
    assert len(lost(page())) == 1
    assert len(lost(page(row[:2], version="0.2.1"), "0.2.1")) == 1
    assert len(lost(page(announced=[(*row[:3], "0.2.5")]))) == 1


@pytest.mark.parametrize(
    ("announced_in", "changes_in", "version", "n_faults"),
    [
        ("0.3.0", "0.4.0", "0.3.0", 0),
        # In the name of an earlier version, by a patch, after the release, and for itself.
        ("0.2.0", "0.4.0", "0.3.0", 1),
        ("0.2.1", "0.4.0", "0.2.1", 1),
        ("0.2.0", "0.4.0", "0.2.0", 1),
        ("0.3.0", "0.3.1", "0.3.0", 1),
    ],
)
def test_only_a_minor_version_announces_changes(announced_in, changes_in, version, n_faults):
    now = page(announced=[("`positions=`", "`pos=`", announced_in, changes_in)])
    last = Version("0.2.0", "", page())
    assert len(lost_announcements(last, Version(version, "", now))) == n_faults


def test_the_page_of_changes_has_a_section_for_announcements():
    text = (ROOT / "examples/guides/changes.md").read_text()
    assert "\n## Announced\n" in text
    header = "| now | later | announced in | changes in |\n| --- | --- | --- | --- |\n"
    row = "| `positions=` | `pos=` | 0.1.0 | 0.2.0 |\n"
    one = text.replace("\n## Announced\n", f"\n## Announced\n\n{header}{row}", 1)
    assert len(announcements(one)) == len(announcements(text)) + 1
    assert ("`positions=`", "`pos=`", "0.1.0", "0.2.0") in announcements(one)


def test_a_row_names_the_argument_and_the_class():
    for old, new, row in (
        ("size: int = 8", "size: int = 16", "`Pairs.batches()`"),
        ("side: Literal", "at: Literal", "`compare()`"),
        ("Protocol)\n", "Protocol)\n    depth: int\n", "`Model`"),
        ("Protocol)\n", "Protocol)\n    depth: int\n", "`depth`"),
    ):
        assert found(old, new, announced(row), page((row, "other")))


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
    files = [tmp_path / "tests/signatures.txt", tmp_path / "examples/guides/changes.md"]
    for file in files:
        file.parent.mkdir(parents=True)
    git("init")
    for name in ("v0.1.0", "v0.2.0rc1", "v0.2.0"):
        for file in files:
            file.write_text(f"{file.stem} of {name}\n")
        git("add", ".")
        git("commit", "-m", name)
        if name == "v0.1.0":
            assert last_release() is None
        git("tag", name)
    assert last_release() == ("0.1.0", "signatures of v0.1.0\n", "changes of v0.1.0\n")
    git("commit", "--allow-empty", "-m", "later")
    assert last_release() == ("0.2.0", "signatures of v0.2.0\n", "changes of v0.2.0\n")


def test_the_command_says_that_there_is_no_tag_or_compares_with_the_last_tag(monkeypatch, capsys):
    monkeypatch.setattr("tests.released.last_release", lambda: None)
    assert main() == 0
    assert "compared with nothing" in capsys.readouterr().out
    record = (ROOT / "tests/signatures.txt").read_text()
    page = (ROOT / "examples/guides/changes.md").read_text()
    monkeypatch.setattr("tests.released.last_release", lambda: Version("0.1.0", record, page))
    assert main() == 0
    gone = record.replace("interp\n", "interp\n  removed_name(text: str) -> str\n", 1)
    monkeypatch.setattr("tests.released.last_release", lambda: Version("0.0.1", gone, page))
    assert main() == 1
    assert "removed_name" in capsys.readouterr().out
