"""`GET /docs`: the API's document as a page to read. It is made here, of one file, so that it needs
neither scripts nor other servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """
  body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  summary { cursor: pointer; padding: .3rem 0 }
  table { border-collapse: collapse; margin: .5rem 0 1rem }
  th, td { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0 }
  code { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
"""
CODE = re.compile(r"`([^`]+)`")

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    return HTMLResponse(api_page(request.app.openapi()), headers=HEADERS)


def api_page(document: Mapping[str, Any]) -> str:
    about = document["info"]
    title = f"{escape(about['title'])} {escape(about['version'])}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{title}</h1><p>{_prose(about.get('description', ''))} "
        '<a href="openapi.json">openapi.json</a> is this for programs.</p>'
        f"{''.join(_operations(document))}</main></body></html>"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            says = operation.get("description") or operation.get("summary", "")
            yield (
                f"<details><summary><code>{method.upper()} {escape(path)}</code> "
                f"{_prose(says)}</summary>{_fields(operation, document)}</details>"
            )


def _fields(operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    rows = [
        (each["name"], each.get("schema", {}), each.get("required", False))
        for each in operation.get("parameters", [])
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for body in content.values():
        schema = _resolved(body.get("schema", {}), document)
        required = schema.get("required", [])
        rows += [
            (name, each, name in required) for name, each in schema.get("properties", {}).items()
        ]
    if not rows:
        return "<p>Nothing to say.</p>"
    lines = "".join(
        f'<tr><th scope="row"><code>{escape(name)}</code></th>'
        f"<td>{escape(_kind(schema, document))}</td><td>{'required' if needed else ''}</td></tr>"
        for name, schema, needed in rows
    )
    return f"<table>{lines}</table>"


def _kind(schema: Any, document: Mapping[str, Any], depth: int = 0) -> str:
    """The type in a few words; what is inside of objects is left to the document."""
    schema = _resolved(schema, document)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(str(each) for each in schema["enum"])
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if kinds and depth < 3:
        said = [_kind(each, document, depth + 1) for each in kinds]
        return " or ".join(dict.fromkeys(each for each in said if each != "null"))
    kind = schema.get("type", "anything")
    if kind == "array" and depth < 3:
        return f"list of {_kind(schema.get('items', {}), document, depth + 1)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _resolved(schema: Any, document: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _prose(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", escape(text))
