"""Application arguments and the autoscaling policy."""

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from lorax_server.errors import ConfigError
from lorax_server.scale.ray_app import QueueAndTokenPolicy, ScaleConfig, build, read_arguments

DEPLOYMENT = DeploymentID("servers", "lorax")


def test_string_and_typed_arguments_give_equal_settings() -> None:
    as_text = read_arguments({"replicas": "4", "gpus": "1", "model_id": "x/y", "hub": "false", "port": "1"})
    as_values = read_arguments({"replicas": 4, "gpus": 1.0, "model_id": "x/y", "hub": False, "port": 1})
    assert as_text == as_values
    assert as_text == (ScaleConfig(replicas=4, gpus=1.0), ["--model-id=x/y", "--hub=false", "--port=1"])
    assert read_arguments({"local_adapters": ["a", "b"]})[1] == ["--local-adapters=a", "--local-adapters=b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modle_id": "x"}, r"'--modle-id=x' is not a known flag; did you mean --model-id\?"),
        ({"replicas": "many"}, "replicas: 'many' is not a whole number"),
        ({"replicas": 0}, "replicas = 0 must be at least 1"),
        ({"cpus": -1}, "cpus = -1.0 must not be negative"),
        ({"look_back_s": 0}, r"look_back_s = 0\.0 must be at least 1"),
        ({"look_back_s": "inf"}, "look_back_s: 'inf' is not a number"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas = 2 must be at least replicas = 3"),
        ({"max_total_tokens": -1}, "--max-total-tokens = -1 must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments)


def test_max_replicas_is_read_into_scale_settings() -> None:
    assert read_arguments({"max_replicas": "3"})[0].max_replicas == 3


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
@pytest.mark.parametrize(("look_back_s", "interval_s"), [(30, 10), (3, 1)])
def test_metrics_interval_is_a_third_of_look_back(look_back_s: float, interval_s: float) -> None:
    application = build({"device": "cpu", "max_replicas": 2, "look_back_s": look_back_s})
    servers = application._bound_deployment.init_args[0]._bound_deployment
    autoscaling = servers._deployment_config.autoscaling_config
    assert (autoscaling.look_back_period_s, autoscaling.metrics_interval_s) == (look_back_s, interval_s)


def context(reported: dict[str, list[float]]) -> AutoscalingContext:
    replicas = [ReplicaID(str(index), DEPLOYMENT) for index in range(8)]
    return AutoscalingContext(
        deployment_id=DEPLOYMENT, deployment_name="servers", app_name="lorax", current_num_replicas=2,
        target_num_replicas=2, running_replicas=replicas[:2], total_num_requests=0, total_queued_requests=0,
        aggregated_metrics={kind: dict(zip(replicas, values, strict=False)) for kind, values in reported.items()},
        raw_metrics={}, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8, policy_state={},
        last_scale_up_time=None, last_scale_down_time=None, current_time=None, config=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reported", "replicas"),
    [
        ({}, 1),
        ({"waiting": [0, 0], "tokens": [0, 0]}, 1),
        ({"waiting": [20, 0], "tokens": [10, 10]}, 2),
        ({"waiting": [0, 0], "tokens": [2500, 1000]}, 4),
        ({"waiting": [400, 0], "tokens": [0, 0]}, 40),
    ],
)
def test_replica_count_follows_queue_and_tokens(reported: dict[str, list[float]], replicas: int) -> None:
    assert QueueAndTokenPolicy(target_waiting=10, target_tokens=1000)(context(reported)) == (replicas, {})
