"""`AdapterRouter` with fake replicas. See `test_ray_replicas.py` for a real cluster."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.request_router import RequestRouter

from lorax_server.scale.placement import ReplicaChooser, RoutingKey, hash_name
from lorax_server.scale.ray_router import AdapterRouter, pack_report

DEPLOYMENT = DeploymentID("servers", "lorax")
NAMES = ("a", "b", "c")


def make_replica(name: str, device: Sequence[str] = ()) -> Any:
    """Return a replica that reports these adapters on its device."""
    report = pack_report({"device": list(device)})
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), routing_stats=report)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a router without Ray."""
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    router: Any = AdapterRouter.__new__(AdapterRouter)
    router._use_replica_queue_len_cache = False
    router._replica_queue_len_cache = {}
    router.initialize_state()
    return router


def choose(router: Any, replicas: list[Any], *args: Any) -> list[list[str]]:
    """Return replica names by rank for these request arguments."""
    request: Any = SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


def ranked(adapter: str) -> list[str]:
    chooser = ReplicaChooser()
    chooser.set_replicas(NAMES)
    return chooser.rank(hash_name(adapter))


def test_request_is_routed_to_loaded_adapter(router: Any) -> None:
    last = ranked("poet")[-1]
    replicas = [make_replica(name, device=["poet"] if name == last else []) for name in NAMES]
    router.update_replicas(replicas)
    (first,), others = choose(router, replicas, RoutingKey(hash_name("poet")), ())
    assert first == last
    assert sorted([first, *others]) == sorted(NAMES)


def test_failed_replicas_are_avoided(router: Any) -> None:
    replicas = [make_replica(name) for name in NAMES]
    router.update_replicas(replicas)
    first, second, third = ranked("poet")
    assert choose(router, replicas, RoutingKey(hash_name("poet")), [first]) == [[second], [third]]
