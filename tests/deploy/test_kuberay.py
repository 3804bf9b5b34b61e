"""Checks the KubeRay manifests and the `serve deploy` config against the schemas of Kubernetes and Ray Serve."""

from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from ray.serve.schema import ServeDeploySchema

from lorax_server.cli.flags import FLAGS
from lorax_server.cli.lorax_flags import TOKEN_VARIABLES
from lorax_server.cli.settings import parse
from lorax_server.scale.ray_app import build, read_arguments
from tests.deploy.dockerfile import ROOT, all_instructions, read_stages, values
from tests.deploy.test_kubernetes import FOLDER, SHUTDOWN_S, VERSIONS, render

CONFIG = ROOT / "deploy/ray/serve.yaml"
GROUPS = ("head", "workers")


def service() -> Any:
    (result,) = (one for one in render(FOLDER / "ray") if one["kind"] == "RayService")
    return result["spec"]


def pod(group: str) -> Any:
    cluster = service()["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return (cluster["headGroupSpec"] if group == "head" else workers)["template"]


def container(group: str) -> Any:
    (only,) = pod(group)["spec"]["containers"]
    return only


def configs() -> dict[str, Any]:
    return {"manifest": yaml.safe_load(service()["serveConfigV2"]), "file": yaml.safe_load(CONFIG.read_text())}


@pytest.mark.parametrize("version", VERSIONS)
def test_kuberay_objects_and_pods_are_valid(version: str) -> None:
    objects = render(FOLDER / "ray")
    assert [one["kind"] for one in objects] == ["ServiceAccount", "PodDisruptionBudget", "RayService"]
    for one in objects[:2]:
        validate(one, version, strict=True)
    for group in GROUPS:
        whole_pod = {"apiVersion": "v1", "kind": "Pod", **pod(group)}
        whole_pod["metadata"] = {"name": group, **whole_pod["metadata"]}
        validate(whole_pod, version, strict=True)
        with pytest.raises(ValidationError):
            validate({**whole_pod, "spec": {**whole_pod["spec"], "container": []}}, version, strict=True)


def test_ray_cluster_has_valid_fields_and_version() -> None:
    cluster = service()["rayClusterConfig"]
    assert set(service()) == {"serveConfigV2", "rayClusterConfig"}
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("name", ["manifest", "file"])
def test_serve_configs_and_arguments_are_valid(name: str) -> None:
    (application,) = ServeDeploySchema.model_validate(configs()[name]).applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    own, flags = read_arguments(application.args)
    assert own.gpus == 1
    parsed = parse(flags, {}, "serve")
    parsed.make_config(None)
    assert not parsed.warnings
    assert [each.name for each in application.deployments] == ["servers", "ingress"]


def test_replica_resources_fit_workers() -> None:
    (workers,) = service()["rayClusterConfig"]["workerGroupSpecs"]
    (application,) = configs()["manifest"]["applications"]
    own, flags = read_arguments(application["args"])
    resources = container("workers")["resources"]
    assert application["deployments"][0]["num_replicas"] == workers["replicas"] >= workers["minReplicas"]
    assert own.gpus == resources["limits"]["nvidia.com/gpu"]
    assert own.cpus < int(resources["requests"]["cpu"])
    drain_s = parse(flags, {}, "serve").make_config(None).drain_s
    assert pod("workers")["spec"]["terminationGracePeriodSeconds"] >= drain_s + SHUTDOWN_S


def test_secrets_and_permissions_match_other_variants() -> None:
    known = {name for flag in FLAGS for name in flag.variables} | set(TOKEN_VARIABLES)
    assert {one["name"] for one in container("workers")["env"]} <= known
    references = [one["valueFrom"]["secretKeyRef"] for one in container("workers")["env"] if "valueFrom" in one]
    assert {one["name"] for one in references} == {"lorax-keys"}
    (user,) = values(all_instructions(read_stages(), "cuda"), "USER")
    for group in GROUPS:
        assert pod(group)["spec"]["securityContext"]["runAsUser"] == int(user)
        assert container(group)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {one["name"] for one in container(group)["volumeMounts"]}
        assert mounts == {one["name"] for one in pod(group)["spec"]["volumes"]}


def test_disruption_budget_selects_workers() -> None:
    (budget,) = (one for one in render(FOLDER / "ray") if one["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == pod("workers")["metadata"]["labels"]
    assert "kubectl apply -k deploy/kubernetes/ray" in (ROOT / "docs/deployment.md").read_text()
    assert "--build-arg RAY=1" in (ROOT / "docs/deployment.md").read_text()
