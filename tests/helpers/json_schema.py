"""Whether a value is of a JSON schema, as far as descriptions of inference servers use the language."""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip


def problems(
    value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any], at: str = "body"
) -> Iterator[str]:
    """One line for each mistake. A property that the schema does not list is one: servers ignore it without a word."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from problems(value, whole["components"]["schemas"][name], whole, at)
    elif any_of := schema.get("anyOf") or schema.get("oneOf"):
        if all(any(problems(value, each, whole, at)) for each in any_of):
            yield f"{at}: {value!r} is none of {any_of}"
    else:
        kind = schema.get("type")
        wrong = kind is not None and not isinstance(value, TYPES[kind])
        if wrong or (isinstance(value, bool) and kind in ("integer", "number")):
            yield f"{at}: {value!r} is no {kind}"
        elif isinstance(value, dict):
            yield from _of_object(value, schema, whole, at)
        elif isinstance(value, list):
            if len(value) < schema.get("minItems", 0):
                yield f"{at}: {value!r} is too short"
            for i, item in enumerate(value):
                yield from problems(item, schema.get("items", {}), whole, f"{at}[{i}]")
        elif isinstance(value, int | float) and not schema.get(
            "minimum", value
        ) <= value <= schema.get("maximum", value):
            yield f"{at}: {value!r} is out of range"
        elif "enum" in schema and value not in schema["enum"]:
            yield f"{at}: {value!r} is none of {schema['enum']}"


def _of_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], whole: Mapping[str, Any], at: str
) -> Iterator[str]:
    named = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name}: missing"
    for name, item in value.items():
        if name in named:
            yield from problems(item, named[name], whole, f"{at}.{name}")
        elif isinstance(schema.get("additionalProperties"), dict):
            yield from problems(item, schema["additionalProperties"], whole, f"{at}.{name}")
        elif named or schema.get("additionalProperties") is False:
            yield f"{at}.{name}: unknown"
