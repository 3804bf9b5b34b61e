"""CORS: SDKs send many headers, which the preflight must allow."""

from collections.abc import Mapping
from functools import cache

import pytest
from fastapi import FastAPI

from lorax_server.config import CorsConfig
from lorax_server.server.app import make_app
from tests.grids import slow_except
from tests.server.fake_server import Reply, Routes
from tests.server.service_harness import ServiceHarness

PAGE, OTHER = "http://page.example", "http://other.example"
CHAT = "/v1/chat/completions"
SDK_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


@cache
def app_of(cors: CorsConfig) -> FastAPI:
    """Create one application per CORS setting, because it is slow."""
    return make_app(ServiceHarness(cors=cors).service)


def send_preflight(
    cors: CorsConfig, origin: str = PAGE, headers: str = SDK_HEADERS, method: str = "POST", path: str = CHAT
) -> Reply:
    """Send a preflight request."""
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
    return send(cors, "OPTIONS", path, asked)


def send(cors: CorsConfig, method: str, path: str, headers: Mapping[str, str]) -> Reply:
    routes = Routes()
    routes.app = app_of(cors)
    return routes.send(method, path, None, headers)


@pytest.mark.parametrize("origins", [("*",), (PAGE,)])
@pytest.mark.parametrize("has_credentials", slow_except([True], [False, True]))
def test_allowed_origin_may_send_sdk_headers(origins: tuple[str, ...], has_credentials: bool) -> None:
    reply = send_preflight(CorsConfig(origins, allow_credentials=has_credentials))
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] in ("*", PAGE)
    assert set(SDK_HEADERS.split(",")) <= set(reply.headers["access-control-allow-headers"].split(","))


def test_retry_after_header_is_exposed() -> None:
    reply = send(CorsConfig((PAGE,)), "GET", "/health", {"origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert set(reply.headers["access-control-expose-headers"].split(", ")) == {"retry-after", "x-request-id"}


def test_only_configured_headers_are_allowed() -> None:
    cors = CorsConfig((PAGE,), allow_headers=("authorization",))
    assert send_preflight(cors, headers="authorization,content-type").status == 200
    assert send_preflight(cors).status == 400


@pytest.mark.parametrize("cors", [CorsConfig(), CorsConfig((OTHER,))], ids=["none", "another"])
def test_preflight_rejects_other_origins(cors: CorsConfig) -> None:
    refused = send_preflight(cors)
    assert refused.status == 400
    assert "access-control-allow-origin" not in refused.headers


def test_preflight_rejects_forbidden_method() -> None:
    assert send_preflight(CorsConfig((PAGE,)), method="DELETE").status == 400
