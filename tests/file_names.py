"""The names in files and tables that other programs read, for `signatures.txt`.

These are the names of tables, axes, columns, tensors and keys. They come from small objects.

1. `JSON` has the objects whose form `as_json` returns, and the commands that print a form.
2. `FILES` writes a file of each kind that `load` reads, and of each format of other programs.
3. `TABLES` makes a table of each kind.
4. `makers` returns a function for each of them, which returns the names as lines.

If a library is not installed, the tests leave some of them out.
"""

import contextlib
import importlib
import io
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open

import interp
from interp.cli.command import main
from interp.store import HarvestConfig, harvest, to_arrow
from models import TrainingConfig, train
from tests.interp.made import MADE, TEXT, changed, shared
from tests.saved_kinds import WRITERS, model_of_numbers, result

HEADING = "names in files and tables"
# The values of these keys are also recorded.
VERSIONS = ("version", "format", "kind")


def printed(*arguments):
    """Return the JSON that a command prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        main([*arguments, "--json"])
    return json.loads(output.getvalue())


def stored(folder):
    """Return a store of full contexts of three tokens."""
    config = HarvestConfig(context=3, pack=True)
    return harvest(model_of_numbers(), [[1, 2, 3]], "embed", folder, config)


def decomposed():
    """Return the tokens of a vector, by a lens that doubles each vector."""
    zeros = torch.zeros(4, 128)
    matrices = 2 * torch.eye(128).expand(4, -1, -1)
    lens = interp.JacobianLens(matrices, zeros, "", n_texts=1, squares=zeros[:, 0])
    (vector,) = lens.vectors(shared().model, ["a"], layer=3)
    return lens.decompose(shared().model, vector, layer=3)


def streams():
    """Return the residual stream of a text in a window of all positions."""
    cache = shared().cache
    n_pos = cache["resid_post", 0].shape[1]
    return interp.residual_stream(cache, torch.ones(1, n_pos, dtype=torch.bool))


JSON = {
    **{name: lambda make=make: interp.as_json(make(shared())) for name, make in MADE.items()},
    "decompose of a lens": lambda: decomposed().as_json(),
    "residual_stream": lambda: streams().as_json(),
    "statistics of a point": lambda: next(iter(MADE["statistics"](shared()).values())).as_json(),
    "weights of a change": lambda: changed().weights.as_json(),
    "harvest": lambda: stored(tempfile.mkdtemp()).as_json(),
    "hookscope points": lambda: printed("points"),
    "hookscope generate": lambda: printed("generate", "--prompt", TEXT, "--tokens", "1"),
    "hookscope report": lambda: printed("report", "--out", f"{tempfile.mkdtemp()}/x.html"),
}


def train_a_little(folder):
    """Train a model for two steps, with a log."""
    tokens = torch.arange(100) % 7
    config = TrainingConfig(steps=2, batch_size=2, evaluate_every=1)
    train(model_of_numbers(), tokens, config, directory=folder)


FILES = {**WRITERS, "training": train_a_little}


def columns_of_arrow():
    """Return the columns of the data set of a store."""
    import datasets

    folder = f"{tempfile.mkdtemp()}/arrow"
    to_arrow(stored(tempfile.mkdtemp()), folder, {"embed": "hook_embed"})
    return datasets.load_from_disk(folder).column_names


def columns_of_csv():
    """Return the first line of a saved table."""
    path = Path(tempfile.mkdtemp()) / "x.csv"
    result().save(path)
    return path.read_text().splitlines()[0].split(",")


def columns_with_words():
    """Return the columns of effects at positions of one text."""
    effects = interp.activation_patching(shared().model, shared().pairs[:1])
    return [*effects.to_dataframe()]


# For each table, the library that it needs and a function that returns its columns.
TABLES = {
    "to_dataframe": ("pandas", lambda: [*result().to_dataframe()]),
    "to_dataframe with words": ("pandas", columns_with_words),
    "save as csv": ("pandas", columns_of_csv),
    "to_arrow": ("datasets", columns_of_arrow),
}


def keys_in(value, path=""):
    """Yield the paths to all keys in JSON; `[]` in a path means the items of a list.

    The value of a version or a format is part of the path.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            is_version = key in VERSIONS and isinstance(item, str | int)
            yield f"{inner} = {item!r}" if is_version else inner
            yield from keys_in(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from keys_in(item, f"{path}[]")


def sorted_keys(value, path=""):
    """Return the paths to all keys in JSON, each once."""
    return sorted({*keys_in(value, path)})


def names_in_form(form):
    """Return the names of the tables of a form, with their axes and units, and its other keys."""
    lines = []
    for name, table in sorted(form["tables"].items()):
        labels = f" labels {' '.join(sorted(table['labels']))}" if table["labels"] else ""
        unit = f" in {table['unit']}" if table["unit"] else ""
        lines.append(f"tables.{name} [{' '.join(table['axes'])}]{labels}{unit}")
    rest = {key: value for key, value in form.items() if key != "tables"}
    return [*sorted_keys(rest), *lines]


def names_in_file(path):
    """Return the names in a file: keys of JSON, or tensors and metadata of safetensors."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        is_form = value.keys() >= {"tables", "about"}
        return names_in_form(value) if is_form else sorted_keys(value)
    if path.suffix == ".jsonl":
        return sorted_keys([json.loads(line) for line in path.read_text().splitlines()])
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            tensors = sorted(name for name in [*file.keys()] if not name.startswith("."))
            facts = {key: parsed(text) for key, text in (file.metadata() or {}).items()}
        # The checksums have the names of the tensors.
        facts = {key: None if key == "checksums" else fact for key, fact in facts.items()}
        return [*(f"tensor {name}" for name in tensors), *sorted_keys(facts, "metadata")]
    # The keys in `checkpoint.pt` depend on the version of PyTorch.
    return []


def parsed(text):
    """Return the value of a metadata entry, which may be JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def names_in_files(write, name):
    """Return the names in the file, or in the files of a folder, that a function writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        if path.is_file():
            return names_in_file(path)
        lines = []
        for inner in sorted(file for file in path.rglob("*") if file.is_file()):
            place = inner.relative_to(path).as_posix()
            lines += [place, *(f"{place}: {line}" for line in names_in_file(inner))]
        return lines


def makers():
    """Return a function for each block, which returns its lines."""
    made = {}
    for name, make in JSON.items():
        made[f"JSON of {name}"] = lambda make=make: names_in_form(make())
    for name, write in FILES.items():
        made[f"file {name}"] = lambda name=name, write=write: names_in_files(write, name)
    for name, (library, columns) in TABLES.items():
        if find_spec(library):
            made[f"columns of {name}"] = columns
    return made


def lines():
    """Yield the lines of the record about names in files and tables.

    Raises:
        ImportError: if a library is missing, because a part of the record would be lost.
    """
    for library in ("datasets", "pandas", "sklearn"):
        importlib.import_module(library)
    yield HEADING
    for name, make in makers().items():
        yield f"  {name}"
        yield from (f"    {line}" for line in make())


def recorded(record):
    """Return the lines of each block in a record."""
    blocks = {}
    for line in record.partition(f"\n{HEADING}\n")[2].splitlines():
        if line.startswith("    "):
            blocks[name].append(line[4:])
        else:
            name = line.strip()
            blocks[name] = []
    return blocks
