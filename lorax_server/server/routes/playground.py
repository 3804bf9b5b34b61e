"""The playground at `/ui`: a page that asks this server like any other client. It holds no secrets and needs no key."""

import mimetypes
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.errors import ConfigError
from lorax_server.server.service import Service

FOLDER = Path(__file__).parents[2] / "ui"
PAGE = "index.html"
EXAMPLES = "examples.json"
TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}  # of which a machine may have an opinion of its own
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "cache-control": "no-cache",  # kept, but asked for again: a new server may have a new page
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

Route = Callable[[Request], Awaitable[Response]]


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    kind: str


class Example(msgspec.Struct):
    """A prompt that is offered, and who is to answer it."""

    title: str
    prompt: str
    models: list[str]


def make_router(service: Service) -> APIRouter:
    """A route for each file, so that there is no other path to a file."""
    router = APIRouter(include_in_schema=False)
    assets = read_assets(FOLDER) | {EXAMPLES: _examples(service.config.examples)}
    router.get("/ui")(_move_into_folder)
    router.get("/ui/")(_serve(assets[PAGE]))
    for name, asset in assets.items():
        router.get(f"/ui/{name}", name=f"ui {name}")(_serve(asset))
    return router


def read_assets(folder: Path) -> dict[str, Asset]:
    """By their names."""
    return {path.name: Asset(path.read_bytes(), _kind(path)) for path in sorted(folder.iterdir()) if path.is_file()}


async def _move_into_folder() -> Response:
    """What the page names is beside it. The way there is relative, since a proxy may have put a prefix before it."""
    return Response(status_code=307, headers={**HEADERS, "location": "ui/"})


def _serve(asset: Asset) -> Route:
    etag = f'"{sha256(asset.content).hexdigest()[:32]}"'
    headers = {**HEADERS, "content-type": asset.kind, "etag": etag}

    async def serve(http: Request) -> Response:
        if etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.content, headers=headers)

    return serve


def _kind(path: Path) -> str:
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _examples(path: Path | None) -> Asset:
    if path is None:
        return Asset(b"[]", "application/json")
    try:
        content = path.read_bytes()
        msgspec.json.decode(content, type=list[Example])
    except OSError as error:
        raise ConfigError(f"{path}: the examples cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not a JSON list of title, prompt and models: {error}") from None
    return Asset(content, "application/json")
