"""Generates ``/openapi.json`` from the table of routes and their message types."""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvstore.server import answers
from kvstore.server.admin.routes import Route

_REFERENCE: Final = "#/components/schemas/{name}"


def described(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    kinds = {route.asks for route in routes} | {route.gives for route in routes if route.gives}
    _, schemas = msgspec.json.schema_components(
        sorted({*kinds, answers.ErrorAnswer}, key=lambda kind: str(kind.__name__)),
        ref_template=_REFERENCE,
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvstore node", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = schemas[route.asks.__name__]
    in_path = re.findall(r"{(\w+)", route.path)
    success: dict[str, Any] = {"description": "Done." if route.role else "OK."}
    if route.gives is None:
        success["content"] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        reference = _REFERENCE.format(name=route.gives.__name__)
        success["content"] = {"application/json": {"schema": {"$ref": reference}}}
    parameters = [
        {
            "name": name, "in": "path" if name in in_path else "query", "schema": of,
            "required": name in schema.get("required", ()),
        }
        for name, of in schema.get("properties", {}).items()
        if name in in_path or not route.has_body
    ]  # fmt: skip
    shown: dict[str, Any] = {
        "operationId": route.asks.__name__,
        "summary": (route.asks.__doc__ or "").partition("\n")[0],
        "description": schema.get("description", ""),
        "tags": ["operate" if route.role == "operate" else "read" if route.role else "health"],
        "parameters": parameters,
        "responses": {str(route.status): success, "default": _refusal()},
    }
    if route.has_body:
        body = {**schema, "properties": {k: v for k, v in schema["properties"].items()
                                         if k not in in_path}}  # fmt: skip
        body["required"] = [name for name in schema.get("required", ()) if name not in in_path]
        shown["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if route.role is not None:
        shown["security"] = [{"bearer": []}]
    return shown


def _refusal() -> dict[str, Any]:
    reference = _REFERENCE.format(name=answers.ErrorAnswer.__name__)
    return {
        "description": "The request was refused or failed.",
        "content": {"application/json": {"schema": {"$ref": reference}}},
    }
