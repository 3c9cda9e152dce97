"""The schema of the check's JSON, and what breaks it."""

import json
import re
from importlib.resources import files

SCHEMA = json.loads(files("samebits.checks").joinpath("models.schema.json").read_text())
TYPES = {
    "object": dict,
    "string": str,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def breaches(value, schema, path="$"):
    """Yield where ``value`` breaks ``schema``; the keywords that the schema uses and no other."""
    known = {"type", "enum", "const", "pattern", "required", "properties", "additionalProperties"}
    assert schema.keys() <= known | {"description", "title", "$schema"}
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) for kind in kinds):
        yield f"{path}: {value!r} is no {kinds}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match"
    if not isinstance(value, dict):
        return
    yield from (f"{path}: no {name}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        if inner is False:
            yield f"{path}: {name} is unknown"
        else:
            yield from breaches(item, inner, f"{path}.{name}")
