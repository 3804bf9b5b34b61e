"""The Ray Serve request router."""

import time
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lorax_server.scale.placement import ReplicaChooser, ReplicaReport, RoutingKey, hash_name

TIERS = ("device", "host", "disk", "broken")
MAX_REPORTED = 2048  # adapters per tier in a report; every router receives all reports


class AdapterRouter(RequestRouter):  # type: ignore[misc] # Ray is untyped
    """Routes requests with adapter affinity. The request arguments are a `RoutingKey` and the names of replicas that
    have failed to serve the request."""

    def initialize_state(self, **_: Any) -> None:
        self._chooser = ReplicaChooser()
        self._reports: dict[str, dict[str, Any]] = {}  # the latest report of each replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        reports = {replica.replica_id.unique_id: replica.routing_stats for replica in replicas}
        self._chooser.set_replicas(reports)
        for name, report in reports.items():
            if report and report is not self._reports.get(name):
                self._chooser.set_report(name, unpack_report(report), time.monotonic())
        self._reports = reports

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first, then all other available replicas as fallback."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key, failed_replicas = pending_request.args or (RoutingKey(), ())
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._chooser.set_replicas(by_name)
        for name, replica in by_name.items():
            self._chooser.set_load(name, self.replica_queue_len_cache.get(replica.replica_id) or 0)
        chosen = self._chooser.choose(RoutingKey(*key), time.monotonic(), failed_replicas)
        self.on_send_request(by_name[chosen].replica_id)  # count the request before Ray updates its queue length
        others = [replica for name, replica in by_name.items() if name not in (chosen, *failed_replicas)]
        return [[by_name[chosen]], others]


def pack_report(names: dict[str, list[str]], is_full: bool = False) -> dict[str, Any]:
    """Encode a report for Ray. Hashes are sorted, because Ray compares reports by `str()`."""
    tiers = {tier: sorted(map(hash_name, set(names.get(tier, ())[:MAX_REPORTED]))) for tier in TIERS}
    return {**tiers, "is_full": is_full}


def unpack_report(report: dict[str, Any]) -> ReplicaReport:
    return ReplicaReport(**{**report, **{tier: frozenset(report[tier]) for tier in TIERS}})
