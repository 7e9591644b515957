"""The record of public names of the last release, compared with the record of the code.

1. `entries` reads a record: the text of each line, by its section, its class and its name.
2. `changed_arguments` compares two signatures. Additions are no changes: a new argument with a
   default, and a new word of an argument.
3. `faults` returns the lines that "Stability" in examples/guides/changes.md does not allow. A
   changed line needs a row in a table of the new version. A removed name or argument needs a row in
   a table of old names, whose rows `test_old_names` checks.
4. `python -m tests.released` compares the record of the last tag. It needs no other library.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECEIVED = "objects that functions return"
TABLE = re.compile(r"^\| (.+) \| (.+) \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)
CLOSING = {"(": ")", "[": "]", "{": "}"}


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
        name = name[1] or name[2] if name else re.split(r" = | \[(?=\w)", text)[0]
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


def faults(before, now, page, released, version):
    """Return the changes of a record that the promise does not allow.

    Args:
        before: the record of the release.
        now: the record of the code.
        page: the page of changes.
        released: the version of the release, such as `0.1.0`.
        version: the version of the code. A patch of the release may not even add names.
    """
    is_patch = is_patch_of(version, released)
    # Every version may change the details, and every minor version the needed versions.
    free = {"details"} if is_patch else {"details", "needed versions"}
    old, new = entries(before, without=free), entries(now, without=free)
    # Users do not import these objects, so they may become names of a module.
    anywhere = {(parent, name): text for (_, parent, name), text in new.items()}
    # A patch version changes nothing, so no row of the page excuses a line.
    renamed, every = ([], []) if is_patch else listed(page, released)
    found = []
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
            if not owner_is_gone and not has_row(renamed, names):
                found.append(f"removed without a row of old names: {place}")
            continue
        arguments, rest = signature(text)
        arguments_now, rest_now = signature(text_now)
        if arguments is None or arguments_now is None or rest != rest_now:
            if not is_more(text, text_now, section) and not has_row(every, names):
                found.append(f"changed without a row: {place} -> {text_now}")
            continue
        for changed in changed_arguments(arguments, arguments_now):
            is_gone = changed not in [argument for argument, *_ in arguments_now]
            if not has_row(renamed if is_gone else every, [*names, changed]):
                found.append(f"argument {changed}: no row for the change of {place}")
    if is_patch:
        added = new.items() - old.items()
        found += [f"new in a patch version: {text}" for _, text in sorted(added)]
    return found


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
    """Return the version and the record of the last tag before this commit, or None."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    # The tag of a release candidate has letters after the `v`.
    pattern = ("--match", "v[0-9]*", "--exclude", "v*[a-z]*")
    tag = git("describe", "--tags", "--abbrev=0", *pattern, "HEAD^")
    if tag.returncode:
        return None
    name = tag.stdout.strip()
    record = git("show", f"{name}:tests/signatures.txt")
    record.check_returncode()
    return name.removeprefix("v"), record.stdout


def main():
    """Compare the record of the last release with the record of the code."""
    if (release := last_release()) is None:
        print("There is no earlier tag, so the record is compared with nothing.")
        return 0
    released, before = release
    code = (ROOT / "hooks/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)[1]
    now = (ROOT / "tests/signatures.txt").read_text()
    page = (ROOT / "examples/guides/changes.md").read_text()
    found = faults(before, now, page, released, version)
    print(f"Compared with the record of {released}: {len(found)} changes break the promise.")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
