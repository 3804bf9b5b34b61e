"""The application for Ray Serve: `serve run lorax_server.scale.ray_app:build model_id=... replicas=4`.

Its arguments are those of `Scale`, and every other one is a flag of `lorax serve`, without the dashes in front and with
underscores for the others.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from lorax_server import __version__
from lorax_server.cli.settings import Parsed, parse
from lorax_server.config import ServerConfig
from lorax_server.errors import ConfigError
from lorax_server.scale.autoscaling import QueueAndTokens
from lorax_server.scale.ingress.gate import Ingress
from lorax_server.scale.ray_router import AdapterRouter, RandomRouter
from lorax_server.scale.replica import ServerReplica
from lorax_server.scale.server_process import Order

ROUTERS: Mapping[str, type | None] = {"adapters": AdapterRouter, "ray": None, "random": RandomRouter}
REPORT_S = 1.0  # between reports of a replica
REPORTS = 3  # of a replica to the autoscaler, in the time over which they are averaged
MAX_LOOK_BACK_S = 3600
HEALTH_S = 5.0
MANY = 100_000  # requests at once: the servers refuse what is too much, in their own words


@dataclass(frozen=True)
class Scale:
    """Settings of the application itself. A value of None is found by the builder."""

    name: str = "lorax"  # of the registry, for several applications in one cluster
    replicas: int = 1
    max_replicas: int | None = None  # more than `replicas`: Ray adds and removes them
    target_waiting: float = 8.0  # requests that wait at a replica, above which there is one more
    target_tokens: float = 100_000.0  # likewise, tokens of the sequences that run
    look_back_s: float = 30.0  # over which both are averaged
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    ingresses: int = 1
    cpus: float = 1.0  # of a replica
    gpus: float | None = None  # of a replica; None: as many as --num-shard, if the cluster has any
    router: str = "adapters"  # or, to compare: ray, its default, and random
    host: str = ""  # that replicas listen on; none: the address of their machine

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and value is not None and value < 1:
                raise ConfigError(f"{field.name} = {value} must be at least 1")
            if field.type in (float, float | None) and value is not None and not value >= 0:
                raise ConfigError(f"{field.name} = {value} must not be negative")
        for name in ("target_waiting", "target_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0")
        if not 1 <= self.look_back_s <= MAX_LOOK_BACK_S:
            raise ConfigError(f"look_back_s = {self.look_back_s} must be between 1 and {MAX_LOOK_BACK_S}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas = {self.max_replicas} must be at least replicas = {self.replicas}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router {self.router!r} is not one of {', '.join(ROUTERS)}")


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application of `serve run` and of a `serve` config, whose `args` these are."""
    own, flags = read_arguments(arguments)
    return build_scaled(Scale(**own), flags)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Divide arguments into those of `Scale` and flags."""
    kinds = {field.name: field.type for field in fields(Scale)}
    own, flags = dict[str, Any](), list[str]()
    for name, value in arguments.items():
        if name in kinds:
            own[name] = _convert(name, value, kinds[name])
        else:
            values = value if isinstance(value, list | tuple) else [value]
            flag = f"--{name.replace('_', '-')}"
            flags += (f"{flag}={str(one).lower() if isinstance(one, bool) else one}" for one in values)
    return own, flags


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Convert an argument: on a command line all are texts."""
    number = int if kind in (int, int | None) else float if kind in (float, float | None) else str
    try:
        return number(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {str(value)[:100]!r} is not a number") from None


def build_scaled(scale: Scale, flags: Sequence[str], order: Order | None = None) -> serve.Application:
    """Build the application. Flags are checked here, before any replica starts."""
    parsed = parse(list(flags), os.environ, "serve")
    config = parsed.make_config(None)
    order = order or Order(list(flags))
    servers = _deploy_servers(scale, parsed, config).bind(order, scale.name, __version__, scale.host)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress", num_replicas=scale.ingresses, max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0}
    )
    names = [config.model_id, *config.served_names]
    return ingress.bind(servers, scale.name, names, config.max_body_bytes, config.body_timeout_s)


def _deploy_servers(scale: Scale, parsed: Parsed, config: ServerConfig) -> serve.Deployment:
    chosen = ROUTERS[scale.router]
    router: dict[str, Any] = {} if chosen is None else {"request_router_class": chosen}
    options: dict[str, Any] = {
        "name": "servers",
        "max_ongoing_requests": MANY,
        "ray_actor_options": {"num_cpus": scale.cpus, "num_gpus": _count_gpus(scale, parsed)},
        "request_router_config": RequestRouterConfig(request_routing_stats_period_s=REPORT_S, **router),
        "graceful_shutdown_timeout_s": config.drain_s,
        "health_check_period_s": HEALTH_S,
    }
    if scale.max_replicas is None:
        return serve.deployment(ServerReplica).options(num_replicas=scale.replicas, **options)
    targets = {"target_waiting": scale.target_waiting, "target_tokens": scale.target_tokens}
    autoscaling = AutoscalingConfig(
        min_replicas=scale.replicas,
        max_replicas=scale.max_replicas,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
        look_back_period_s=scale.look_back_s,
        metrics_interval_s=scale.look_back_s / REPORTS,
        policy=AutoscalingPolicy(policy_function=QueueAndTokens, policy_kwargs=targets),
    )
    return serve.deployment(ServerReplica).options(autoscaling_config=autoscaling, **options)


def _count_gpus(scale: Scale, parsed: Parsed) -> float:
    if scale.gpus is not None:
        return scale.gpus
    device = parsed.values.get("device", "auto")
    has_gpus = device.startswith("cuda") or (
        device == "auto" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    )
    return float(parsed.num_shard or 1) if has_gpus else 0.0
