"""The playground at `/ui`: a static page that calls this server's API. The page itself needs no key."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from lorax_server.server.schemas.examples import read_examples
from lorax_server.server.service import Service

UI_FOLDER = Path(__file__).parents[2] / "ui"
# Explicit, because `mimetypes` differs between machines.
CONTENT_TYPES = {".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # cached but revalidated, because an upgraded server may have a new page
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=UI_FOLDER)
    examples = read_examples(service.config.examples)

    @router.get("/ui")
    async def redirect_to_folder() -> Response:
        """Redirect with a relative path, because a proxy may add a path prefix."""
        return Response(status_code=307, headers={**HEADERS, "location": "ui/"})

    @router.get("/ui/")
    async def serve_page(request: Request) -> Response:
        return await serve_file("index.html", request)

    @router.get("/ui/examples.json")
    async def serve_examples() -> Response:
        return Response(examples, headers=HEADERS, media_type="application/json")

    @router.get("/ui/{name}")  # names contain no slashes, so each file has exactly one path
    async def serve_file(name: str, request: Request) -> Response:
        response = await files.get_response(name, request.scope)
        response.headers.update(HEADERS)
        if Path(name).suffix in CONTENT_TYPES:
            response.headers["content-type"] = CONTENT_TYPES[Path(name).suffix]
        return response

    return router
