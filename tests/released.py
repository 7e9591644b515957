"""The record of public names of the last release, compared with the record of the code.

1. `entries` reads a record: the text of each line, by its section, its class and its name.
2. `changed_arguments` compares two signatures. Additions are no changes: a new argument with a
   default, and a new word of an argument.
3. `faults` returns the changes that "Stability" in examples/guides/changes.md does not allow. A
   changed or removed line needs a row under "Announced" in the page of the release, and a row in a
   table of the version that changes it. A name may leave the record earlier, if its old form still
   works. The page of the code then announces that the old form ends, and `test_old_names` runs the
   old form. A new member of a protocol is a change too, unless it is optional.
4. `lost_announcements` returns rows under "Announced" that were deleted too early, or that no
   release announces.
5. `python -m tests.released` reads the record and the page of the last tag. It needs no other
   library.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RECORD = "tests/signatures.txt"
PAGE = "examples/guides/changes.md"
OPTIONAL = " (optional)"
RECEIVED = "objects that functions return"
TABLE = re.compile(r"^\| (.+) \| (.+) \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)
ANNOUNCED = re.compile(
    r"^\| now \| later \| announced in \| changes in \|\n\| --- \| --- \| --- \| --- \|\n"
    r"((?:\|.*\n)+)",
    re.MULTILINE,
)
HEADING = re.compile(r"^## (\d+\.\d+\.\d+)\b.*?(\d+)-(\d+)-(\d+)", re.MULTILINE)
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Version(NamedTuple):
    """A version, such as `0.1.0`, with its record and its page of changes."""

    number: str
    record: str
    page: str


class Announcement(NamedTuple):
    """A row under "Announced": two forms, the version that announces the change, and the version
    that makes it.
    """

    now: str
    later: str
    announced: str
    changes: str


def entries(record, without=()):
    """Return the lines of a record: the text by section, class (or other parent line) and name.

    Args:
        record: the record.
        without: the sections that are left out.
    """
    lines = {}
    section = parent = ""
    for line in record.splitlines():
        text = line.strip()
        if not line.startswith(" "):
            section, parent = line, ""
            continue
        if not line.startswith("   "):
            parent = ""
        if section in without:
            continue
        is_python = section == "types" or re.match(r"(hooks|models|interp)\b|objects ", section)
        name = re.match(r"class (\w+)|(\w+)", text) if is_python else None
        separator = "[<>=]" if section == "needed versions" else r" = | \[(?=\w)"
        name = name[1] or name[2] if name else re.split(separator, text)[0]
        lines[section, parent, name] = text
        if not line.startswith("   "):
            parent = name
    return lines


def parts(text, separator=", "):
    """Return the parts of a text between separators that are outside brackets and quotes."""
    found = [""]
    waiting = []
    quote = ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in CLOSING:
            waiting.append(CLOSING[letter])
        elif waiting and letter == waiting[-1]:
            waiting.pop()
        is_outside = not (quote or waiting)
        if is_outside and text.startswith(separator, i):
            found.append("")
        found[-1] += letter
    return [found[0], *(part.removeprefix(separator) for part in found[1:])]


def signature(text):
    """Return the arguments of a recorded function, or None for other lines, and all other text.

    Each argument has its name, its types or words, and its default (None if it has no default).
    """
    if not (start := re.match(r"\w+\(", text)):
        return None, text
    inside, *rest = parts(text[start.end() - 1 :], " -> ")
    arguments = []
    for argument in parts(inside[1:-1]):
        head, *default = parts(argument, " = ")
        name, _, kind = head.partition(": ")
        arguments.append((name, accepted(kind), default[0] if default else None))
    return arguments, (start[0], rest)


def accepted(kind):
    """Return the members of a type, the words of `Literal` and the keywords of options."""
    if kind.startswith("{"):
        return {*parts(kind[1:-1])}
    members = set()
    for member in parts(kind, " | "):
        words = re.fullmatch(r"Literal\[(.*)\]", member)
        members |= {*parts(words[1])} if words else {member}
    return members


def changed_arguments(old, new):
    """Return the names of arguments of the old signature that the new signature does not accept as
    before, and of new arguments that a call must pass.
    """
    names = [name for name, *_ in old]
    by_name = {name: (kinds, default) for name, kinds, default in new}
    changed = []
    for name, kinds, default in old:
        kinds_now, default_now = by_name.get(name, (set(), None))
        if name not in by_name or not kinds <= kinds_now or default != default_now:
            changed.append(name)
    for name, (_, default) in by_name.items():
        if name not in names and default is None and not name.startswith("*"):
            changed.append(name)
    by_position = [[name for name, *_ in each] for each in (old, new)]
    for each in by_position:
        stars = [i for i, name in enumerate(each) if name.startswith("*")]
        del each[min(stars, default=len(each)) :]
    # An argument that became a keyword, or that has another position.
    moved = [name for i, name in enumerate(by_position[0]) if by_position[1][i : i + 1] != [name]]
    return [*dict.fromkeys([*changed, *moved])]


def listed(page, released):
    """Return the left cells of the tables of versions after the release: of old names, and of all.

    The heading of a table of old names has two versions, such as `| 0.1.0 | 0.2.0 |`.
    """
    renamed, every = [], []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        version = re.match(r"\d+\.\d+\.\d+", section)
        if version and numbers(version[0]) > numbers(released):
            for before, after, rows in TABLE.findall(section):
                cells = [row.strip("| ").split(" | ")[0] for row in rows.splitlines()]
                every += cells
                if all(re.fullmatch(r"\d+\.\d+\.\d+", cell) for cell in (before, after)):
                    renamed += cells
    return renamed, every


def numbers(version):
    """Return the numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def is_patch_of(version, released):
    """Return whether a version is a patch of a release: 0.1.1 of 0.1.0."""
    same_minor = numbers(version)[:2] == numbers(released)[:2]
    return same_minor and numbers(version) > numbers(released)


def has_row(cells, names):
    """Return whether one of the cells has all names."""
    words = {*re.findall(r"\w+", " ".join(names))}
    return any(words <= {*re.findall(r"\w+", cell)} for cell in cells)


def announcements(page):
    """Return the rows under "Announced" in a page of changes."""
    found = []
    for row in "".join(ANNOUNCED.findall(page)).splitlines():
        cells = row.strip("| ").split(" | ")
        if len(cells) != len(Announcement._fields):
            raise ValueError(f"a row under Announced must have four cells; got {row}")
        found.append(Announcement(*cells))
    return found


def is_due(row, release, now):
    """Return whether a version may make a change that a release announces.

    This is the version in the row or a later one, at least six months after the announcement.
    """
    if numbers(row.changes) > numbers(now.number):
        return False
    earliest, date = date_of(row.announced, release.page), date_of(now.number, now.page)
    return None not in (earliest, date) and (earliest[0] + 6, earliest[1]) <= date


def date_of(version, page):
    """Return the date in the heading of a version as months and days; None without a date."""
    for each, year, month, day in HEADING.findall(page):
        if each == version:
            return int(year) * 12 + int(month), int(day)
    return None


def lost_announcements(release, now):
    """Return the faults of the rows under "Announced", compared with the page of a release.

    A row stays until its version makes the change. It then becomes a row of this version. A row may
    name a later version than before. Only a minor version adds rows.
    """
    rows = announcements(now.page)
    _, listed_now = listed(now.page, release.number)
    later = {(row.now, row.announced): row.changes for row in rows}
    found = []
    for row in announcements(release.page):
        still = later.pop((row.now, row.announced), None)
        if still is not None and numbers(still) >= numbers(row.changes):
            continue
        if not is_due(row, release, now) or row.now not in listed_now:
            found.append(f"announced for {row.changes}, and gone or earlier: {row.now}")
    is_minor = numbers(now.number)[:2] > numbers(release.number)[:2]
    for (form, announced), changes in later.items():
        if announced != now.number or not is_minor:
            found.append(f"only a new minor version announces changes, in its own name: {form}")
        if numbers(changes)[:2] <= numbers(announced)[:2]:
            found.append(f"announced for the version that announces it: {form}")
    return found


def faults(release, now):
    """Return the changes since a release that the promise does not allow.

    Args:
        release: the release.
        now: the code. A patch of the release may not even add names.
    """
    is_patch = is_patch_of(now.number, release.number)
    # Every version may change the details, and every minor version the needed versions.
    free = {"details"} if is_patch else {"details", "needed versions"}
    old, new = entries(release.record, without=free), entries(now.record, without=free)
    # Every version may accept newer versions of libraries.
    for key in old.keys() & new.keys():
        if key[0] == "needed versions" and accepts_more(old[key], new[key]):
            old[key] = new[key]
    # Users do not import these objects, so they may become names of a module.
    anywhere = {(parent, name): text for (_, parent, name), text in new.items()}
    renamed, every = listed(now.page, release.number)
    due = [row.now for row in announcements(release.page) if is_due(row, release, now)]
    still_work = [row.now for row in announcements(now.page)]

    def is_allowed(names, is_gone):
        # A patch version changes nothing.
        if is_patch:
            return False
        if is_gone and has_row(still_work, names):
            return True
        return has_row(due, names) and has_row(renamed if is_gone else every, names)

    protocols = {
        (section, name)
        for (section, _, name), text in old.items()
        if re.match(r"class \w+\((.+, )?Protocol\b", text)
    }
    found = lost_announcements(release, now)
    for (section, parent, name), text in new.items():
        is_new_member = (section, parent) in protocols and (section, parent, name) not in old
        is_optional = text.endswith(OPTIONAL)
        if is_new_member and not is_optional and not is_allowed([parent, name], is_gone=False):
            found.append(f"required by a protocol, not announced or not listed: {parent} {text}")
    for (section, parent, name), text in old.items():
        is_received = section == RECEIVED
        text_now = (anywhere if is_received else new).get((section, parent, name)[is_received:])
        if text_now == text:
            continue
        place = f"{section}: {parent} {text}" if parent else f"{section}: {text}"
        names = [part for part in (parent, name) if part and part != "__init__"]
        if text_now is None:
            # The row of a class stands for its members.
            owner_is_gone = parent and ("", parent) not in anywhere
            if not owner_is_gone and not is_allowed(names, is_gone=True):
                found.append(f"removed, not announced or not listed: {place}")
            continue
        arguments, rest = signature(text)
        arguments_now, rest_now = signature(text_now)
        # Users write the members of a protocol, so a new argument is a break there.
        is_of_protocol = (section, parent) in protocols
        if is_of_protocol or None in (arguments, arguments_now) or rest != rest_now:
            if not is_more(text, text_now, section) and not is_allowed(names, is_gone=False):
                found.append(f"changed, not announced or not listed: {place} -> {text_now}")
            continue
        for changed in changed_arguments(arguments, arguments_now):
            is_gone = changed not in [argument for argument, *_ in arguments_now]
            if not is_allowed([*names, changed], is_gone):
                found.append(f"argument {changed}, not announced or not listed: {place}")
    if is_patch:
        added = new.items() - old.items()
        found += [f"new in a patch version: {text}" for _, text in sorted(added)]
    return found


def accepts_more(old, new):
    """Return whether a needed version only has a higher upper bound than before, or none."""
    (lowest, _, bound), (lowest_now, _, bound_now) = (each.partition(",<") for each in (old, new))
    is_higher = not bound_now or numbers(bound_now) > numbers(bound)
    return lowest == lowest_now and bool(bound) and is_higher


def is_more(old, new, section):
    """Return whether a line only gained bases of a class, or words that users write."""
    if section == "words":
        name, _, words = old.partition(" = ")
        name_now, _, words_now = new.partition(" = ")
        return name == name_now and {*words.split(", ")} <= {*words_now.split(", ")}
    if old.startswith("class ") and new.startswith("class "):
        bases, bases_now = (re.search(r"\((.*)\)", each)[1].split(", ") for each in (old, new))
        return {*bases} <= {*bases_now}
    return False


def last_release():
    """Return the version of the last tag before this commit, or None."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    # The tag of a release candidate has letters after the `v`.
    pattern = ("--match", "v[0-9]*", "--exclude", "v*[a-z]*")
    tag = git("describe", "--tags", "--abbrev=0", *pattern, "HEAD^")
    if tag.returncode:
        return None
    name = tag.stdout.strip()
    files = [git("show", f"{name}:{file}") for file in (RECORD, PAGE)]
    for file in files:
        file.check_returncode()
    return Version(name.removeprefix("v"), *(file.stdout for file in files))


def main():
    """Compare the last release with the code."""
    if (release := last_release()) is None:
        print("There is no earlier tag, so the record is compared with nothing.")
        return 0
    code = (ROOT / "hooks/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)[1]
    now = Version(version, *((ROOT / file).read_text() for file in (RECORD, PAGE)))
    found = faults(release, now)
    print(f"Compared with {release.number}: {len(found)} changes break the promise.")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
