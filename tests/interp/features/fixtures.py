"""Files of other libraries in tests/dictionaries, and copies of them with changes."""

import json
import shutil

from safetensors.torch import load_file, save_file

from tests.count import ROOT

FIXTURES = ROOT / "tests" / "dictionaries"


def changed(folder, tmp_path, config=None, weights=None, drop=()):
    """Return a copy of the folder of a fixture, with changed fields of its config or changed
    tensors.
    """
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURES / folder, copy)
    for path in (*copy.glob("cfg.json"), *copy.glob("config.json")):
        fields = json.loads(path.read_text())
        fields |= config or {}
        path.write_text(json.dumps({name: fields[name] for name in fields if name not in drop}))
    for path in copy.glob("*.safetensors"):
        if path.name != "expected.safetensors":
            tensors = load_file(path) | (weights or {})
            save_file({n: t for n, t in tensors.items() if n not in drop}, path)
    return copy
