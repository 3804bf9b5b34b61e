"""Metrics by adapter and tenant. Rejected requests count for their adapter if the server knows it."""

import re
from pathlib import Path
from typing import Any

import pytest

from lorax_server.errors import SourceError
from tests.server.fake_server import Reply, Routes, chat, complete, generate

NATIVE, STREAM, COMPLETIONS, CHAT = "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"
COUNTERS = ("lorax_adapter_requests_total", "lorax_adapter_failures_total", "lorax_key_requests_total")
HOT: dict[str, Any] = {"temperature": 5}
INVALID_BODIES = {
    NATIVE: lambda name: generate(adapter_id=name, temperature=-1),
    STREAM: lambda name: generate(adapter_id=name, best_of=2, do_sample=True),
    "/": lambda name: generate(adapter_id=name, top_p=7),
    COMPLETIONS: lambda name: complete(name, **HOT),
    CHAT: lambda name: chat(name, **HOT),
}


def read_counts(routes: Routes, name: str) -> dict[str, float]:
    """Return metric values by adapter."""
    text = routes.metrics.render_prometheus().decode()
    result = re.findall(rf'^{name}{{.*?adapter="([^"]*)".*?}} (\S+)$', text, re.MULTILINE)
    return {adapter: float(count) for adapter, count in result if float(count)}


def count_rejected(path: str, name: str | None, **options: Any) -> dict[str, float]:
    routes = Routes(["poet"], **options)
    assert routes.post(path, INVALID_BODIES[path](name)).status == (400 if path in (COMPLETIONS, CHAT) else 422)
    first, *others = [read_counts(routes, counter) for counter in COUNTERS]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("path", INVALID_BODIES)
def test_rejected_request_counts_toward_requested_adapter(path: str) -> None:
    assert count_rejected(path, "poet") == {"poet": 1}
    assert count_rejected(path, "base") == count_rejected(path, "") == {"base": 1}


@pytest.mark.parametrize("path", INVALID_BODIES)
@pytest.mark.parametrize("source", ["local", "hub"])
def test_unknown_adapter_names_share_one_label(path: str, source: str) -> None:
    assert count_rejected(path, "made-up", default_source=source) == {"unknown": 1}


def test_unknown_revisions_and_merges_share_one_label() -> None:
    routes = Routes(["poet", "pirate"])
    for parameters in (
        {"adapter_id": "poet@made-up"},
        {"merged_adapters": {"ids": ["poet", "pirate"]}},
        {"adapter_id": "poet", "adapter_source": "hub"},
        {"adapter_id": "poet", "merged_adapters": {"ids": ["poet"]}},
    ):
        assert routes.post(NATIVE, generate(temperature=-1, **parameters)).status == 422
    assert read_counts(routes, COUNTERS[0]) == {"unknown": 4}


def test_resolved_adapter_gets_its_label() -> None:
    routes = Routes()
    body = generate(adapter_id="found-later")
    assert routes.post(NATIVE, generate(adapter_id="found-later", temperature=-1)).status == 422
    assert routes.post(NATIVE, body).status == 200
    assert routes.post(NATIVE, generate(adapter_id="found-later", temperature=-1)).status == 422
    routes.resolutions["found-later"] = SourceError("down")
    assert routes.post(NATIVE, body).status >= 400
    assert read_counts(routes, COUNTERS[0]) == {"unknown": 1, "found-later": 3}
    assert read_counts(routes, COUNTERS[1]) == {"unknown": 1, "found-later": 2}


def test_forbidden_request_counts_toward_listed_adapter(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.some]\nkey = "some"\nadapters = ["pirate"]\n')
    routes = Routes(["poet"], keys_file=keys)
    assert routes.post(CHAT, chat("poet"), "some").status == 403
    assert read_counts(routes, COUNTERS[2]) == {"poet": 1}


def test_request_during_shutdown_counts_toward_no_adapter() -> None:
    routes = Routes(["poet"])
    routes.service.is_draining = True
    try:
        reply: Reply = routes.post(COMPLETIONS, complete("poet"))
    finally:
        routes.service.is_draining = False
    assert reply.status == 503
    assert "base" not in read_counts(routes, COUNTERS[0])


def test_scored_prompt_has_no_generated_tokens() -> None:
    routes = Routes(["poet"])
    reply = routes.post(COMPLETIONS, complete("poet", echo=True, max_tokens=0))
    assert reply.json["usage"]["completion_tokens"] == 0
    text = routes.metrics.render_prometheus().decode()
    assert 'lorax_adapter_tokens_total{adapter="poet",kind="generated"} 0.0' in text
    assert 'lorax_key_tokens_total{adapter="poet",key="anonymous",kind="generated"} 0.0' in text
    assert "lorax_request_generated_tokens_sum 0.0" in text


# --- Tenants ----------------------------------------------------------------------------------------------------------


class RemoteRoutes(Routes):
    """Routes with a given client address."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(["poet"], **options)
        inner, self.app = self.app, self._set_client_address  # type: ignore[assignment]
        self._inner, self._address = inner, address

    async def _set_client_address(self, scope: Any, receive: Any, send: Any) -> None:
        await self._inner({**scope, "client": (self._address, 7)}, receive, send)

    def send_three_requests(self, key: str | None = None) -> tuple[set[str], int]:
        """Send requests. Return the tenants seen by the engine and the number of completions."""
        for path, body in ((NATIVE, generate(adapter_id="poet")), (COMPLETIONS, complete("poet", n=2))):
            assert self.post(path, body, key).status == 200
        assert self.post(COMPLETIONS, complete(prompt=["ask", "ask"], n=2), key).status == 200
        return {each.tenant for each in self.engine.added}, len(self.engine.added)


@pytest.mark.parametrize(
    ("address", "tenant"),
    [("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8::1", "20010db800000000")],
)
def test_tenant_is_client_address_without_keys(address: str, tenant: str) -> None:
    """All requests from one address have the same tenant."""
    assert RemoteRoutes(address).send_three_requests() == ({tenant}, 7)


def test_tenant_is_key_regardless_of_address(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.alice]\nkey = "a"\n[keys.bob]\nkey = "b"\n')
    for address in ("10.0.0.7", "10.0.0.8"):
        assert RemoteRoutes(address, keys_file=keys).send_three_requests("a") == ({"alice"}, 7)
