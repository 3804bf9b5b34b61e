"""The playground at `/ui`: a page that asks this server like any other client. It holds no secrets and needs no key."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from lorax_server.server.schemas.examples import read_examples
from lorax_server.server.service import Service

FOLDER = Path(__file__).parents[2] / "ui"
TYPES = {".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}  # machines differ in what they call these
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "cache-control": "no-cache",  # kept, but asked for again: a new server may have a new page
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=FOLDER)
    examples = read_examples(service.config.examples)

    @router.get("/ui")
    async def redirect_to_folder() -> Response:
        """Redirect by a relative path, since a proxy may put a prefix before ours."""
        return Response(status_code=307, headers={**HEADERS, "location": "ui/"})

    @router.get("/ui/")
    async def serve_page(http: Request) -> Response:
        return await serve_file("index.html", http)

    @router.get("/ui/examples.json")
    async def serve_examples() -> Response:
        return Response(examples, headers=HEADERS, media_type="application/json")

    @router.get("/ui/{name}")  # a name without slashes, so that there is one path to a file
    async def serve_file(name: str, http: Request) -> Response:
        response = await files.get_response(name, http.scope)
        response.headers.update(HEADERS)
        if Path(name).suffix in TYPES:
            response.headers["content-type"] = TYPES[Path(name).suffix]
        return response

    return router
