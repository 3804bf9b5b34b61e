"""Fairness between keys over several replicas, in simulated time.

Each simulated replica schedules its own requests fairly, as the engine does, and requests are routed as with Ray.
"""

import heapq
import random
from collections import Counter, deque

from lorax_server.scale.placement import ReplicaChooser, RoutingKey, hash_name

REPLICAS, ROWS = 4, 8


class FairReplica:
    """A fair scheduler: the next slot goes to the key with the fewest slots."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.waiting: dict[str, deque[str]] = {}

    @property
    def load(self) -> int:
        return self.running.total() + sum(map(len, self.waiting.values()))

    def take_next(self) -> str | None:
        waiting = [key for key, queue in self.waiting.items() if queue]
        if self.running.total() >= ROWS or not waiting:
            return None
        key = min(waiting, key=lambda each: (self.running[each], self.begun[each]))
        self.waiting[key].popleft()
        self.running[key] += 1
        self.begun[key] += 1
        return key


def serve(outstanding: dict[str, int], adapters: dict[str, int], answers: int) -> Counter[str]:
    """Simulate keys with a constant number of outstanding requests. Return completed requests per key."""
    chance = random.Random(0)
    replicas = {f"replica-{index}": FairReplica() for index in range(REPLICAS)}
    placement = ReplicaChooser()
    placement.set_replicas(replicas)
    now, ends, served = 0.0, list[tuple[float, str, str]](), Counter[str]()

    def ask(key: str) -> None:
        adapter = hash_name(f"{key}-{chance.randrange(adapters[key])}")
        name = placement.choose(RoutingKey(adapter), now)
        assert name is not None
        replicas[name].waiting.setdefault(key, deque()).append(key)
        begin(name)

    def begin(name: str) -> None:
        while (key := replicas[name].take_next()) is not None:
            heapq.heappush(ends, (now + chance.uniform(0.5, 1.5), name, key))
        placement.set_load(name, replicas[name].load)

    for key, count in outstanding.items():
        for _ in range(count):
            ask(key)
    while served.total() < answers:
        now, name, key = heapq.heappop(ends)
        replicas[name].running[key] -= 1
        served[key] += 1
        begin(name)
        ask(key)
    return served


def test_adapter_count_does_not_affect_fairness() -> None:
    served = serve({"one": 60, "many": 60}, {"one": 1, "many": 1000}, 8000)
    assert max(served.values()) / min(served.values()) < 1.25


def test_heavy_key_does_not_slow_light_key() -> None:
    served = serve({"greedy": 400, "modest": 32}, {"greedy": 500, "modest": 50}, 8000)
    assert served["modest"] / served.total() > 1 / 3  # fair share: 1/2


def test_keys_with_one_adapter_get_equal_shares() -> None:
    keys = {f"key-{index}": 16 for index in range(10)}
    served = serve(keys, dict.fromkeys(keys, 1), 8000)
    assert max(served.values()) / min(served.values()) < 2
