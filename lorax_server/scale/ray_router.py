"""Ray Serve's request router, with `ReplicaChooser` to decide."""

import random
import time
from array import array
from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lorax_server.scale.placement import ReplicaChooser, Report, Wanted


class AdapterRouter(RequestRouter):  # type: ignore[misc] # Ray has no types that mypy can use
    """Sends a request where its adapter is. The first argument of a request is a `Wanted`, the second the replicas that
    have failed to answer it."""

    def initialize_state(self, **_: Any) -> None:
        self._placement = ReplicaChooser()
        self._reports: dict[str, dict[str, Any]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id: replica for replica in replicas}
        self._placement.set_replicas(names)
        self._reports = {name: report for name, report in self._reports.items() if name in names}
        for name, replica in names.items():
            if replica.routing_stats and replica.routing_stats is not self._reports.get(name):
                self._reports[name] = replica.routing_stats
                self._placement.set_report(name, _unpack(replica.routing_stats), time.monotonic())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the one that is chosen first, and then all others, since the first may refuse."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted, avoided = _read(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._placement.set_replicas(by_name)
        for name, replica in by_name.items():
            self._placement.set_load(name, self.replica_queue_len_cache.get(replica.replica_id) or 0)
        chosen = self._placement.choose(wanted, time.monotonic(), avoided)
        if chosen is None:
            return []  # all drain: Ray asks again when another is there
        self.on_send_request(by_name[chosen].replica_id)  # counts at once: the replica's own number comes later
        others = (name for name, view in self._placement.views.items() if not view.is_draining and name not in avoided)
        return [[by_name[chosen]], [by_name[name] for name in others if name != chosen]]


class RandomRouter(RequestRouter):  # type: ignore[misc] # likewise
    """Sends requests anywhere, to compare."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


def _read(request: PendingRequest) -> tuple[Wanted, Collection[str]]:
    wanted, avoided = request.args if len(request.args) == 2 else (Wanted(), ())
    return Wanted(*wanted), avoided


def _unpack(report: dict[str, Any]) -> Report:
    device, host, disk, broken = (array("Q", report[tier]) for tier in ("device", "host", "disk", "broken"))
    return Report(device, host, disk, broken, report["capacity"], report["is_draining"])
