"""Replica choice by loaded adapters, load and prompt prefix, and stability when replicas change."""

import math
from collections import Counter
from typing import Any

import pytest

from lorax_server.scale.placement import (
    POPULAR_EXTRA_REQUESTS,
    UNPOPULAR_EXTRA_REQUESTS,
    UNPOPULAR_LOAD_RATIO,
    ReplicaChooser,
    ReplicaReport,
    RoutingKey,
    hash_name,
)
from tests.scale.simulation import Cluster, Simulation

REPLICAS = ("a", "b", "c", "d")


@pytest.fixture
def placement() -> ReplicaChooser:
    placement = ReplicaChooser()
    placement.set_replicas(REPLICAS)
    return placement


def choose(placement: ReplicaChooser, adapter: str, prefix: str = "", now: float = 0.0, **options: Any) -> str:
    key = RoutingKey(hash_name(adapter) if adapter else 0, hash_name(prefix) if prefix else 0)
    return placement.choose(key, now, **options)


def test_routers_without_reports_agree_and_balance(placement: ReplicaChooser) -> None:
    other = ReplicaChooser()
    other.set_replicas(reversed(REPLICAS))
    names = [f"adapter-{index}" for index in range(2000)]
    chosen = [choose(placement, name) for name in names]
    assert chosen == [choose(other, name) for name in names]
    counts = Counter(chosen)
    assert all(420 < counts[name] < 580 for name in REPLICAS)


def test_only_adapters_on_removed_replica_move(placement: ReplicaChooser) -> None:
    names = [hash_name(f"adapter-{index}") for index in range(1000)]
    before = {name: placement.rank(name)[0] for name in names}
    placement.set_replicas(("a", "b", "d"))
    after = {name: placement.rank(name)[0] for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "c")
    assert {after[name] for name in names if before[name] == "c"} == {"a", "b", "d"}
    placement.set_replicas(REPLICAS)
    assert {name: placement.rank(name)[0] for name in names} == before


def test_faster_tier_is_preferred(placement: ReplicaChooser) -> None:
    adapter = hash_name("x")
    far = placement.rank(adapter)[::-1]
    placement.set_report(far[2], ReplicaReport(disk={adapter}), 0)
    assert choose(placement, "x", now=0) == far[2]
    placement = renewed(far, disk=far[2], host=far[1])
    assert choose(placement, "x") == far[1]
    placement = renewed(far, disk=far[2], host=far[1], device=far[0])
    assert choose(placement, "x") == far[0]


def renewed(names: list[str], **tiers: str) -> ReplicaChooser:
    placement = ReplicaChooser()
    placement.set_replicas(names)
    for tier, name in tiers.items():
        here: dict[str, Any] = {tier: {hash_name("x")}}
        placement.set_report(name, ReplicaReport(**here), 0)
    return placement


def test_device_with_free_space_is_preferred(placement: ReplicaChooser) -> None:
    first, second, *_ = placement.rank(hash_name("x"))
    placement.set_report(first, ReplicaReport(device={1, 2}, is_full=True), 0)
    assert choose(placement, "x") == second
    for name in REPLICAS:
        placement.set_report(name, ReplicaReport(device={1, 2}, is_full=True), 100)
    assert choose(placement, "x", now=100) == first


def test_routed_adapter_counts_as_loaded_until_next_report(placement: ReplicaChooser) -> None:
    first, second, *_ = placement.rank(hash_name("x"))
    placement.set_load(first, 100)
    assert choose(placement, "x", now=0) == second
    placement.set_load(first, 0)
    placement.set_report(second, ReplicaReport(), 1)  # written before the request arrived
    assert choose(placement, "x", now=1) == second
    placement.set_report(second, ReplicaReport(), 100)
    assert choose(placement, "x", now=100) == first


def test_failed_replicas_are_avoided(placement: ReplicaChooser) -> None:
    adapter = hash_name("x")
    first, second, third, last = placement.rank(adapter)
    placement.set_report(first, ReplicaReport(device={adapter}), 0)
    assert choose(placement, "x", failed_replicas={first}) == second
    assert choose(placement, "x", failed_replicas={first, second}) == third
    assert choose(placement, "", "text", failed_replicas={first, second, third}) == last


def test_replica_with_broken_adapter_is_chosen_last(placement: ReplicaChooser) -> None:
    adapter = hash_name("x")
    first, second, *_ = placement.rank(adapter)
    placement.set_report(first, ReplicaReport(broken={adapter}), 0)
    assert choose(placement, "x") == second
    assert choose(placement, "x", failed_replicas=set(REPLICAS) - {first}) == first


def test_only_popular_adapters_are_replicated(placement: ReplicaChooser) -> None:
    loads: Counter[str] = Counter()
    placed: dict[str, set[str]] = {"popular": set(), "unpopular": set()}
    for index in range(400):
        name = "unpopular" if index % 50 == 49 else "popular"
        chosen = choose(placement, name)
        placed[name].add(chosen)
        loads[chosen] += 1
        placement.set_load(chosen, loads[chosen])
    assert placement.is_popular(hash_name("popular"))
    assert not placement.is_popular(hash_name("unpopular"))
    assert placed["popular"] == set(REPLICAS)
    assert len(placed["unpopular"]) == 1
    mean = sum(loads.values()) / len(REPLICAS)
    assert max(loads.values()) <= 1.15 * mean + POPULAR_EXTRA_REQUESTS + 1


def test_unpopular_adapter_moves_only_above_load_limit(placement: ReplicaChooser) -> None:
    adapter = hash_name("x")
    first, second, *_ = placement.rank(adapter)
    placement.set_report(first, ReplicaReport(device={adapter}), 0)
    assert {choose(placement, f"another-{index}") for index in range(100)} == set(
        REPLICAS
    )  # so that no adapter is popular
    # All requests are there: the mean is a quarter of them.
    limit = UNPOPULAR_EXTRA_REQUESTS / (1 - UNPOPULAR_LOAD_RATIO / len(REPLICAS))
    placement.set_load(first, math.floor(limit))
    assert choose(placement, "x", now=100) == first
    placement.set_load(first, math.floor(limit) + 1)
    assert choose(placement, "x", now=100) == second


def test_equal_prefixes_share_replica_unless_overloaded(placement: ReplicaChooser) -> None:
    chosen = {text: {choose(placement, "", text) for _ in range(5)} for text in map(str, range(40))}
    assert all(len(names) == 1 for names in chosen.values())
    assert set.union(*chosen.values()) == set(REPLICAS)
    (first,) = chosen["0"]
    placement.set_load(first, 50)
    assert choose(placement, "", "0") != first
    assert choose(placement, "") != first  # without a prefix: the least loaded replica


@pytest.mark.parametrize(
    ("cluster", "requests"),
    [(Cluster(10, 1_000, 120), 10_000), pytest.param(Cluster(), 100_000, marks=pytest.mark.slow)],
    ids=["10 replicas", "100 replicas"],
)
def test_simulated_cluster_hits_adapters_and_balances_load(cluster: Cluster, requests: int) -> None:
    ours = Simulation(cluster)
    ours.warm_up()
    outcome = ours.run(requests)
    assert outcome.hits > 0.95
    assert outcome.load_spread < 1.3
    before = ours.owners()
    gone = set(ours.remove_replicas(0.1))
    assert all(owner == before[name] for name, owner in ours.owners().items() if before[name] not in gone)
    chance = Simulation(cluster, is_random=True)
    chance.warm_up()
    assert chance.run(requests // 2).hits < 0.7
