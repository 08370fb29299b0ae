"""What is answered while the model loads: that the process lives, and that it is too early."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse

from quire.api.server.errors import ApiError
from quire.api.server.routes.health import version

RETRY = {"Retry-After": "2"}
# For browsers: it reloads itself, and becomes the page when the model is loaded.
PAGE = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <meta http-equiv="refresh" content="2">
    <title>Quire</title>
  </head>
  <body><p role="status">The model is loading; this page opens when it is there.</p></body>
</html>
"""

router = APIRouter(include_in_schema=False)
router.get("/version")(version)
router.get("/v1/version")(version)


@router.get("/ping")
@router.get("/health")
@router.get("/v1/health")
async def health() -> Response:
    return JSONResponse({"status": "starting"})


@router.get("/ready")
@router.get("/v1/ready")
async def ready() -> Response:
    return JSONResponse({"status": "the model is loading"}, 503, RETRY)


@router.get("/")
async def page() -> Response:
    return HTMLResponse(PAGE, 503, RETRY)


@router.api_route("/{path:path}", methods=["GET", "HEAD", "POST"])
async def anything_else(path: str) -> Response:
    says = "The model is still loading; ask again in a few seconds, or wait for /ready."
    raise ApiError(503, says, code="starting", headers=RETRY)
