"""The Ray Serve application: `serve run lorax_server.scale.ray_app:build model_id=... replicas=4`.

Arguments are the fields of `ScaleConfig` and all `lorax serve` flags, with underscores instead of dashes.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from lorax_server import __version__
from lorax_server.cli.flags import make_flags
from lorax_server.cli.settings import ParsedSettings, parse
from lorax_server.config import ServerConfig, Settings, setting
from lorax_server.errors import ConfigError
from lorax_server.scale.ingress import Ingress
from lorax_server.scale.ray_router import AdapterRouter
from lorax_server.scale.replica import ServerReplica
from lorax_server.server.access.model_names import list_base_names

REPORT_INTERVAL_S = 1.0  # between routing reports
REPORTS_PER_LOOK_BACK = 3  # autoscaling reports per averaging period
HEALTH_CHECK_INTERVAL_S = 5.0
UNLIMITED_REQUESTS = 100_000  # no limit in Ray, because replicas reject excess requests


@dataclass(frozen=True)
class ScaleConfig(Settings):
    """Ray deployment settings for routing, autoscaling and resources."""

    name: str = setting("lorax", "registry name, unique for each application in a cluster")
    replicas: int = setting(1, "number of replicas")
    max_replicas: int | None = setting(None, "upper bound for autoscaling", none="no autoscaling")
    target_waiting: float = setting(8.0, "target number of waiting requests per replica", above=0)
    target_tokens: float = setting(100_000.0, "target number of tokens in running sequences per replica", above=0)
    look_back_s: float = setting(30.0, "seconds over which the load is averaged", at_least=1)
    upscale_delay_s: float = setting(10.0, "seconds before a replica is added", at_least=0)
    downscale_delay_s: float = setting(300.0, "seconds before a replica is removed", at_least=0)
    ingresses: int = setting(1, "number of ingress processes")
    cpus: float = setting(1.0, "CPUs per replica", at_least=0)
    gpus: float | None = setting(None, "GPUs per replica", none="--num-shard if the cluster has GPUs", at_least=0)
    host: str = setting("", "address that replicas listen on", none="the machine address")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas = {self.max_replicas} must be at least replicas = {self.replicas}")


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application from `serve run` arguments or `args` in a Serve config file."""
    scale, flags = read_arguments(arguments)
    return build_application(scale, flags)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[ScaleConfig, list[str]]:
    """Return the arguments, split into application settings and `lorax serve` flags."""
    own_flags = {flag.field: flag for flag in make_flags(ScaleConfig)}
    own, flags = dict[str, Any](), list[str]()
    for name, value in arguments.items():
        if name in own_flags:
            own[name] = own_flags[name].convert(str(value), name)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            flag = f"--{name.replace('_', '-')}"
            flags += (f"{flag}={str(one).lower() if isinstance(one, bool) else one}" for one in values)
    return ScaleConfig(**own), flags


def build_application(scale: ScaleConfig, flags: list[str]) -> serve.Application:
    """Build the application. All flags are checked before a replica starts."""
    parsed = parse(flags, os.environ, "serve")
    config = parsed.make_config(None)
    servers = _make_server_deployment(scale, parsed, config).bind(flags, scale.name, __version__, scale.host)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=scale.ingresses,
        max_ongoing_requests=UNLIMITED_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    names = [config.model_id, *list_base_names(config.model_id, config.served_names)]
    return ingress.bind(servers, scale.name, names, config.max_body_bytes, config.body_timeout_s)


def _make_server_deployment(scale: ScaleConfig, parsed: ParsedSettings, config: ServerConfig) -> serve.Deployment:
    router = RequestRouterConfig(request_router_class=AdapterRouter, request_routing_stats_period_s=REPORT_INTERVAL_S)
    servers = serve.deployment(ServerReplica).options(
        name="servers",
        max_ongoing_requests=UNLIMITED_REQUESTS,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": _count_gpus(scale, parsed)},
        request_router_config=router,
        graceful_shutdown_timeout_s=config.drain_s,
        health_check_period_s=HEALTH_CHECK_INTERVAL_S,
    )
    if scale.max_replicas is None:
        return servers.options(num_replicas=scale.replicas)
    targets = {"target_waiting": scale.target_waiting, "target_tokens": scale.target_tokens}
    autoscaling = AutoscalingConfig(
        min_replicas=scale.replicas,
        max_replicas=scale.max_replicas,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
        look_back_period_s=scale.look_back_s,
        metrics_interval_s=scale.look_back_s / REPORTS_PER_LOOK_BACK,
        policy=AutoscalingPolicy(policy_function=QueueAndTokenPolicy, policy_kwargs=targets),
    )
    return servers.options(autoscaling_config=autoscaling)


def _count_gpus(scale: ScaleConfig, parsed: ParsedSettings) -> float:
    if scale.gpus is not None:
        return scale.gpus
    device = parsed.values.get("device", "auto")
    has_gpus = device.startswith("cuda") or (
        device == "auto" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    )
    return float(parsed.num_shard or 1) if has_gpus else 0.0


# --- Autoscaling ------------------------------------------------------------------------------------------------------


class QueueAndTokenPolicy:
    """A Ray Serve autoscaling policy that keeps waiting requests and tokens per replica below their targets.

    Ray calls the policy periodically, and applies delays and bounds to the result.
    """

    def __init__(self, target_waiting: float, target_tokens: float) -> None:
        self._targets = {"waiting": target_waiting, "tokens": target_tokens}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        needed = (sum(reported.get(kind, {}).values()) / target for kind, target in self._targets.items())
        return max(1, math.ceil(max(needed))), {}
