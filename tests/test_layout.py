"""The layout of the project: import directions, public names, what an import costs."""

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

import hooks
from tests.faces import FACES, FORMER
from tests.faces import MODULES as PUBLIC
from tests.returned import DETAILS, returned

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"hooks": {"hooks"}, "models": {"hooks", "models"}, "interp": {"hooks", "interp"}}
FORMER_FILES = {ROOT / f"{module.replace('.', '/')}.py" for module in FORMER}
FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = [path for path in FILES if path not in FORMER_FILES]


@functools.cache
def nodes_of(path):
    """Return all nodes of the syntax tree of a file."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# These imports run inside a function, after both modules have been imported.
LATER = {
    ("models.transformer", "models.running.generation"),  # a method generates text
}


def test_no_module_imports_itself_through_others():
    """This holds inside each package too, and for imports inside functions."""
    modules = {module_of(path): path for path in MODULES}
    graph = {}
    for module, path in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        graph[module] = {name for name in names & modules.keys() if (module, name) not in LATER}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a cycle


def test_imports_go_one_way():
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        is_command = path.is_relative_to(ROOT / "interp" / "cli")
        allowed = MAY_IMPORT[package] | ({"models"} if is_command else set())
        ours = [name.split(".") for name in imported(path) if name.partition(".")[0] in MAY_IMPORT]
        assert {name[0] for name in ours} <= allowed, path
        is_base = path.is_relative_to(ROOT / "hooks" / "base")
        assert not is_base or {tuple(name[:2]) for name in ours} <= {("hooks", "base")}, path
        # From outside, only the face of a package (its __init__.py) may be imported.
        if package != "hooks":
            faces = {*hooks.__all__, "base", "shared", "__version__"}
            seen = {name[1] for name in ours if name[0] == "hooks" and len(name) > 1}
            assert seen <= faces, path


# The files and packages of `interp`. Each imports only earlier entries, and a package also its own
# files.
INTERP = """shadowed transformer_lens hints numbers kinds json_form plots protocol inputs measuring metrics pairs edits results graph runs
    spectral reading features effects store many directions diffing alignment attribution_graphs steps claims report cli __main__""".split()


def test_imports_inside_interp_go_one_way():
    for path in {*(ROOT / "interp").rglob("*.py")} - FORMER_FILES:
        here = path.relative_to(ROOT / "interp").with_suffix("").parts
        if here == ("__init__",):
            continue
        names = [name.split(".") for name in imported(path)]
        ours = [name[1:] for name in names if name[0] == "interp"]
        before = {*INTERP[: INTERP.index(here[0]) + 1]}
        assert {name[0] for name in ours} <= before, path


def test_what_tests_share_stands_in_no_test():
    borrows = re.compile(r"^\s*from tests\.(\w+\.)*test_\w+ import", re.MULTILINE)
    for path in (ROOT / "tests").rglob("*.py"):
        assert not borrows.search(path.read_text()), path


def test_no_name_hides_a_module():
    for path in MODULES:
        *package, name = path.relative_to(ROOT).with_suffix("").parts
        found = getattr(importlib.import_module(".".join(package)), name, None)
        assert found is None or name.startswith("__") or inspect.ismodule(found), path


# Both definitions of these names mean the same.
TWICE = {
    "logits_of": "`interp` imports nothing from `models`, and any model may return an output.",
    "divided_call": "The block of a plain transformer, and the block of an attached model.",
    "effects": "The same numbers, drawn by matplotlib.",
    "curves": "The same numbers, drawn by matplotlib.",
}


def defined(path):
    """Yield the public names that a module defines. A name of one letter is a type variable."""
    for node in nodes_of(path)[0].body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
        names = [getattr(target, "id", getattr(target, "name", "_")) for target in targets]
        yield from (name for name in names if len(name) > 1 and not name.startswith("_"))


def test_a_name_has_one_meaning():
    """A type, or another name that modules import from two places, is defined once."""
    homes = collections.defaultdict(set)
    for path in MODULES:
        for name in defined(path):
            homes[name].add(module_of(path))
    imports = {name for path in MODULES for name in imported(path)}
    for name in homes.keys() - TWICE.keys():
        is_type = name[0].isupper() and not name.isupper()
        used = [home for home in homes[name] if is_type or f"{home}.{name}" in imports]
        assert len(used) < 2, f"{name} has two meanings: {sorted(used)}"
    assert all(len(homes[name]) == 2 for name in TWICE)


def local_names(function):
    """Yield the names that a function binds, and whether each is one of its parameters."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg, node in {*function.args.args, *function.args.kwonlyargs}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, False
        elif isinstance(node, ast.FunctionDef) and node is not function:
            yield node.name, False


def test_no_local_name_hides_a_name_of_its_module():
    """Only a parameter of a public function may have the name of a function: `circuit(circuit)`."""
    for path in MODULES:
        body = nodes_of(path)[0].body
        of_imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        aliases = [alias for node in of_imports for alias in node.names]
        hidden = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        of_module = {*defined(path)}
        methods = [part for node in body if isinstance(node, ast.ClassDef) for part in node.body]
        for function in [*body, *methods]:
            if not isinstance(function, ast.FunctionDef):
                continue
            is_public = function in body and not function.name.startswith("_")
            for name, is_parameter in local_names(function):
                may_hide = is_public and is_parameter and name not in hidden
                place = f"{function.name} in {path}"
                assert may_hide or name not in hidden | of_module, f"{name} hides a name: {place}"


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def test_no_comprehension_contains_another_one():
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, COMPREHENSIONS):
                inside = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
                assert inside == [node], f"line {node.lineno} of {path}"


# These modules do more than define names when they are imported.
ACTS = {
    "interp/__init__.py": "It checks that `hooks` and `models` are the packages of this project.",
    "interp/__main__.py": "`python -m interp` runs the command line.",
    "interp/plots/figure.py": "The error names the extra with Matplotlib.",
    "models/checkpoints/gguf_file.py": "The error names the extra with the package gguf.",
}
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def only_defines(statement):
    """Return whether a statement only defines names, or only imports them for types."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name)
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "TYPE_CHECKING"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, DEFINES)


def test_importing_a_module_only_defines_names():
    """An import changes no data: a table is written as one value, and nothing is added later."""
    for path in MODULES:
        others = [node for node in nodes_of(path)[0].body if not only_defines(node)]
        acts = path.relative_to(ROOT).as_posix() in ACTS
        assert bool(others) == acts, (path, [ast.unparse(node) for node in others])


PRIVATE = {
    *("_version", "_base", "_cdata", "_modules", "_parameters", "_buffers"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
}


def is_private(dotted):
    parts = dotted.split(".")
    hidden = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
    return parts[0] == "torch" and bool(hidden)


def private_parts_of_torch(path):
    """Yield each private name of PyTorch that a module imports or reads, with its line."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        # A public name can be an attribute of a private name. The private name is a node of its
        # own, so only private attributes matter here.
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            # A class that overrides a documented method of nn.Module may read `self._name`.
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            names = [
                f"torch.{node.attr}" if node.attr in PRIVATE and not own else ast.unparse(node)
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [f"torch.{node.value}" if node.value in PRIVATE else node.value]
            names = names if "torch." in names[0] and " " not in names[0] else []
        else:
            continue
        yield from (f"{name}, line {node.lineno}" for name in names if is_private(name))


def test_private_parts_of_torch_are_used_in_one_module():
    for path in MODULES:
        found = list(private_parts_of_torch(path))
        is_theirs = path.relative_to(ROOT) == Path("hooks/base/_torch.py")
        assert bool(found) == is_theirs, (path, found)


# These modules write JSON themselves. One of them only hashes the text, and another one writes
# prompts, which must be exactly the text that `transformers` writes.
WRITES_OTHER_JSON = {
    "hooks/base/strict_json.py",
    "hooks/base/hashes.py",
    "models/text/templates.py",
}


def test_json_is_written_by_one_module():
    """Other modules could write NaN, which is not JSON."""
    writers = {"json.dumps", "json.dump"}
    for path in MODULES:
        called = {ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}
        may_write = path.relative_to(ROOT).as_posix() in WRITES_OTHER_JSON
        assert bool(called & writers) == may_write, path


def test_messages_about_padding_are_written_by_one_module():
    messages = ROOT / "hooks/base/padding_messages.py"
    writers = {node.name for node in nodes_of(messages) if isinstance(node, ast.FunctionDef)}
    about_padding = re.compile("padd|attention_mask|real token")
    for path in MODULES:
        for node in nodes_of(path):
            parts = [*ast.walk(node)] if isinstance(node, ast.Raise) else []
            texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            if any(map(about_padding.search, texts)):
                calls = [ast.unparse(part.func) for part in parts if isinstance(part, ast.Call)]
                assert writers & {call.rpartition(".")[2] for call in calls}, (path, texts)


# These calls may run code from the files that they read, unless an argument has a safe value.
RUNS_CODE = {
    "from_pretrained": ("trust_remote_code", {"False", "trusts"}),
    "from_config": ("trust_remote_code", {"False"}),
    "pipeline": ("trust_remote_code", {"False"}),
    "torch.load": ("weights_only", {"True"}),
    "np.load": ("allow_pickle", {"False"}),
}
NEVER = {"yaml.load", "pickle.load", "pickle.loads", "jinja2.Environment", "eval", "exec"}
# build.py runs the code of the guides, which is its purpose. quickstart.py loads one model by its
# name.
RUN_BY_USERS = {ROOT / "examples/guides/build.py", ROOT / "examples/quickstart.py"}
EXAMPLES = sorted({*(ROOT / "examples").rglob("*.py")} - RUN_BY_USERS)


def test_no_file_that_is_read_runs_code():
    for path in [*MODULES, *EXAMPLES]:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            name, said = ast.unparse(node.func), {each.arg: each.value for each in node.keywords}
            place = f"line {node.lineno} of {path}"
            assert name not in NEVER, place
            for call in {name, name.rpartition(".")[2]} & RUNS_CODE.keys():
                argument, safe = RUNS_CODE[call]
                value = ast.unparse(said[argument]) if argument in said else "nothing"
                assert value in safe, f"{argument} of {name} in {place}: {value}"


def test_the_face_of_base_has_the_names_that_other_packages_use():
    used = set()
    for path in MODULES:
        if not path.is_relative_to(ROOT / "hooks/base"):
            parts = [name.split(".") for name in imported(path)]
            used |= {part[2] for part in parts if part[:2] == ["hooks", "base"] and len(part) == 3}
    names = importlib.import_module("hooks.base").__all__
    assert sorted(names) == sorted(name for name in used if name != "_torch")


PACKAGES = [path for path in MODULES if path.name == "__init__.py"]


@pytest.mark.parametrize("path", PACKAGES, ids=module_of)
def test_three_sentences_name_the_files_of_a_package(path):
    """They say what the package contains and in which order to read its files."""
    prose = ast.get_docstring(nodes_of(path)[0]).partition(">>>")[0]
    assert len(re.findall(r"\.(?=\s|$)", prose)) == 3
    inside = [other for other in MODULES if other.parent in (path.parent, path.parent / other.stem)]
    names = {module_of(other).rpartition(".")[2] for other in inside} - {path.parent.name}
    packages = {other.parent.name for other in PACKAGES if other.parent.parent == path.parent}
    for name in names | packages:
        assert f"`{name}`" in prose, name


def public_objects(module):
    """Yield the name and the value of each public function and class of a module."""
    package = importlib.import_module(module)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield name, value


@pytest.mark.parametrize("module", FACES)
def test_help_shows_an_example_and_the_result(module):
    for name, value in public_objects(module):
        shown = inspect.getdoc(value) or ""
        assert ">>>" in shown, f"{name} has no example"
        if inspect.isfunction(value) and inspect.signature(value).return_annotation is not None:
            assert "\nReturns:\n" in shown or "\nYields:\n" in shown, name


def test_the_reference_page_lists_every_public_name():
    pytest.importorskip("matplotlib")
    page = (ROOT / "examples" / "guides" / "reference.md").read_text()
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    received = sections.pop("Objects that functions return")
    details = sections.pop("Details")
    assert re.findall(r"^\| `(\w+)` \|", received, re.MULTILINE) == [
        kind.__name__ for kind in returned()
    ]
    for kind in returned():
        assert f"\n::: {kind.__module__}.{kind.__name__}\n" in received
    assert set(re.findall(r"`(\w+)`", details)) == DETAILS
    assert sections.keys() == {*PUBLIC}
    for module, section in sections.items():
        names = sorted(re.findall("`(\\w+)`", section))
        assert names == sorted(importlib.import_module(module).__all__), module
        assert f"\n::: {module}\n" in section


# A config has a field for each difference between architectures.
LONG = {"TransformerConfig"}


def methods_of(kind):
    """Yield the name and the function of each public method that a class itself defines."""
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


@pytest.mark.parametrize("module", FACES)
def test_help_explains_several_arguments(module):
    for name, value in public_objects(module):
        functions = methods_of(value) if inspect.isclass(value) else [("", inspect.unwrap(value))]
        for method, function in functions:
            n_arguments = len({*inspect.signature(function).parameters} - {"self", "cls"})
            shown = inspect.getdoc(function) or ""
            is_explained = "\nArgs:\n" in shown or "see `" in shown
            assert n_arguments < 2 or is_explained, f"{name}.{method}"


@pytest.mark.parametrize("module", FACES)
def test_help_begins_with_a_signature_that_a_person_can_read(module):
    for name, value in public_objects(module):
        try:
            signature = str(inspect.signature(value))
        except ValueError:  # Python does not know the signature of some exceptions and types.
            continue
        assert name in LONG or len(signature) <= 600, f"{name}: {len(signature)} characters"
        assert "NoOthers" not in signature, name


# Both cases run in one process, to test that calls are counted anew in each test.
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("wrong", ["axes", "dtype"])
def test_a_wrong_shape_is_an_error_in_tests(wrong):
    from hooks import HookedRunner
    from models import Transformer, TransformerConfig

    config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
    model = Transformer(config).eval()
    cache = HookedRunner(model).capture(torch.tensor([[3, 1]]), names="blocks.0.resid_post")
    value = cache["resid_post", 0][0] if wrong == "axes" else torch.tensor([[3, 1]])
    with pytest.raises(jaxtyping.TypeCheckError):
        model.unembed(value)
    for _ in range(9):
        model.unembed(cache["resid_post", 0])


def test_the_top_level_holds_what_the_project_agreed_on():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    top = {name.partition("/")[0] for name in listed.stdout.split("\n") if name}
    agreed = {"pyproject.toml", "README.md", "LICENSE", "hooks", "models", "interp", "tests"}
    assert {name for name in top if not name.startswith(".")} == agreed | {"examples"}


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


HEAVY = {
    *("transformers", "tokenizers", "tiktoken", "huggingface_hub"),
    *("gguf", "matplotlib", "jinja2", "beartype"),
}
IMPORTS = """
import sys
import torch
before = {*sys.modules}
from interp import *
after_interp = {*sys.modules} - before
from models import *
print(sorted(({*sys.modules} - before) & HEAVY), "models" in after_interp)
""".replace("HEAVY", repr(HEAVY))


def test_importing_brings_no_heavy_dependency_and_no_warning():
    done = python(IMPORTS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[] False", "")


def test_interp_imports_an_analysis_when_it_is_used():
    done = python("import interp, sys; print('torch' in sys.modules); interp.logit_lens")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_hints_are_read_when_an_error_is_made():
    read = "[name for name in ('models.hints', 'interp.hints') if name in sys.modules]"
    code = (
        f"import sys; from models import *; from interp import *; print({read}); "
        f"hasattr(load('pydoc-4l'), 'W'); print({read})"
    )
    done = python(code)
    assert done.stdout.splitlines() == ["[]", "['models.hints', 'interp.hints']"], done.stderr


def test_their_names_of_points_have_hints_before_interp_is_imported():
    code = (
        "import sys; from hooks import HookedRunner; from models import load; "
        "runner = HookedRunner(load('pydoc-4l')); print('interp' in sys.modules); "
        "runner.capture('def', names='blocks.2.attn.hook_pattern')"
    )
    done = python(code)
    assert done.stdout.strip() == "False"
    assert "blocks.2.attn.pattern" in done.stderr.splitlines()[-1].partition("the value")[2]


def test_hints_do_not_import_a_foreign_interp(tmp_path):
    (tmp_path / "interp.py").write_text("print('imported')")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
        "from hooks import HookedRunner; from models import load; "
        "HookedRunner(load('pydoc-4l')).capture('def', names='blocks.2.attn.hook_pattern')"
    )
    done = python(code)
    assert done.stdout == ""
    assert "close matches" in done.stderr.splitlines()[-1]


def test_a_foreign_package_called_hooks_is_named(tmp_path):
    (tmp_path / "hooks.py").write_text("")
    done = python(f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import interp")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ImportError: the package `hooks` must be hookscope's")
    assert str(tmp_path / "hooks.py") in line


def test_a_foreign_module_called_models_is_a_warning(tmp_path):
    theirs = tmp_path / "models.py"
    theirs.write_text("")
    paths = [str(tmp_path), str(ROOT)]
    done = python(f"import sys; sys.path[:0] = {paths}; import interp; import interp.edits")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == 1
    assert str(theirs) in done.stderr


def test_interp_is_imported_without_models(tmp_path):
    """A project may contain only `hooks` and `interp`. Then `import interp` must not warn."""
    for package in ("hooks", "interp"):
        shutil.copytree(ROOT / package, tmp_path / package)
    done = python(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import interp.edits; print('ok')"
    )
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr == ""
