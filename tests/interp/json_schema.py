"""A check of the JSON form, for tests of results and of the command line."""

from importlib.util import find_spec

from interp import json_form


def require_schema(form):
    """Check the keys and types that the docstring of the module promises."""
    assert [*form] == ["kind", "version", "tables", "about"]
    assert form["version"] == 1
    assert form["tables"]
    for name, table in form["tables"].items():
        assert [*table] == ["axes", "labels", "unit", "values"], name
        level = table["values"]
        sizes = {}
        for axis in table["axes"]:
            assert isinstance(level, list), name
            sizes[axis] = len(level)
            level = level[0] if level else []
        for axis, labels in table["labels"].items():
            assert len(labels) == sizes[axis], name
    if find_spec("jsonschema"):
        import jsonschema

        jsonschema.validate(form, json_form.SCHEMA)
