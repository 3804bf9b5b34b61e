"""Checks the Kubernetes manifests against the schemas and the server's flags, without a cluster."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate

from lorax_server.cli.flags import FLAGS
from lorax_server.cli.lorax_flags import TOKEN_VARIABLES
from lorax_server.cli.settings import ParsedSettings, parse
from lorax_server.server.app import make_app
from tests.deploy.dockerfile import ROOT, all_instructions, read_stages, values, words
from tests.server.service_harness import ServiceHarness

FOLDER = ROOT / "deploy/kubernetes"
DEPLOYMENT = (ROOT / "docs/deployment.md").read_text()
VARIANTS = ("cpu", "gpu")
IMAGES = {"cpu": "cpu", "gpu": "cuda"}  # targets of the Dockerfile
VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
SHUTDOWN_S = 20  # shutdown time after draining, docs/operations.md
# The ID `gpu` would mark a test as GPU test.
BOTH = pytest.mark.parametrize("variant", VARIANTS, ids=[f"variant-{name}" for name in VARIANTS])
OTHERS = {"OMP_NUM_THREADS"}  # variables of other programs


@cache
def render(folder: Path) -> tuple[Any, ...]:
    """Return the objects that `kubectl apply -k` creates from a folder that lists files and folders."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) == {"apiVersion", "kind", "resources"}
    objects: list[Any] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        objects += render(path) if path.is_dir() else [one for one in yaml.safe_load_all(path.read_text()) if one]
    return tuple(objects)


def find(variant: str, kind: str) -> Any:
    (result,) = (one for one in render(FOLDER / variant) if one["kind"] == kind)
    return result


def pod(variant: str) -> Any:
    return find(variant, "StatefulSet")["spec"]["template"]


def container(variant: str) -> Any:
    (only,) = pod(variant)["spec"]["containers"]
    return only


def read_settings(variant: str) -> ParsedSettings:
    """Parse the container's flags and variables like the server."""
    (entry,) = values(all_instructions(read_stages(), IMAGES[variant]), "ENTRYPOINT")
    environ = {one["name"]: one.get("value", "secret") for one in container(variant)["env"]}
    return parse([*words(entry)[4:], *container(variant)["args"]], environ, "serve")


def test_every_file_belongs_to_a_variant() -> None:
    listed = {FOLDER / folder / "kustomization.yaml" for folder in (*VARIANTS, "ray", "base")}
    for file in list(listed):
        names = yaml.safe_load(file.read_text())["resources"]
        listed |= {file.parent / name for name in names if name.endswith(".yaml")}
    assert listed == set(FOLDER.rglob("*.yaml"))


@BOTH
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(variant: str, version: str) -> None:
    objects = render(FOLDER / variant)
    assert {one["kind"] for one in objects} == {"Service", "PodDisruptionBudget", "ServiceAccount", "StatefulSet"}
    for one in objects:
        validate(one, version, strict=True)
    with pytest.raises(ValidationError):  # the schemas reject invalid objects
        validate({**objects[0], "spec": {"port": "80"}}, version, strict=True)


@BOTH
def test_manifest_flags_and_variables_exist(variant: str) -> None:
    parsed = read_settings(variant)
    config = parsed.make_config(None)
    assert not parsed.warnings
    assert config.host == "0.0.0.0"
    assert config.api_keys == ("secret",)
    assert config.admin_key == "secret"
    assert config.json_logs
    assert parsed.token == "secret"
    known = {name for flag in FLAGS for name in flag.variables} | set(TOKEN_VARIABLES) | OTHERS
    assert {one["name"] for one in container(variant)["env"]} <= known
    assert container(variant)["image"] == f"lorax:{IMAGES[variant]}"


@BOTH
def test_manifest_ports_and_probes_match_server(variant: str) -> None:
    (port,) = container(variant)["ports"]
    assert port["containerPort"] == read_settings(variant).make_config(None).port
    (served,) = find(variant, "Service")["spec"]["ports"]
    routes = make_app(ServiceHarness(api_keys=("secret",)).service).openapi()["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(variant)[probe]["httpGet"]
        assert asked["port"] == served["targetPort"] == port["name"]
        assert "get" in routes[asked["path"]]
        assert f"path: {asked['path']}" in (ROOT / "docs/operations.md").read_text()
    notes = pod(variant)["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(port["containerPort"])
    assert notes["prometheus.io/path"] in routes


@BOTH
def test_grace_period_exceeds_drain_time(variant: str) -> None:
    before = int(container(variant)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = read_settings(variant).make_config(None).drain_s
    assert pod(variant)["spec"]["terminationGracePeriodSeconds"] >= before + drain + SHUTDOWN_S


@BOTH
def test_selectors_and_volumes_match(variant: str) -> None:
    labels, spec = pod(variant)["metadata"]["labels"], find(variant, "StatefulSet")["spec"]
    assert spec["selector"]["matchLabels"] == find(variant, "Service")["spec"]["selector"] == labels
    assert find(variant, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert spec["serviceName"] == find(variant, "Service")["metadata"]["name"]
    assert pod(variant)["spec"]["serviceAccountName"] == find(variant, "ServiceAccount")["metadata"]["name"]
    mounts = {one["name"]: one["mountPath"] for one in container(variant)["volumeMounts"]}
    volumes = {one["name"] for one in pod(variant)["spec"]["volumes"]}
    claims = {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    assert set(mounts) == volumes | claims
    assert claims == {"data"}
    (volume,) = values(all_instructions(read_stages(), IMAGES[variant]), "VOLUME")
    assert mounts["data"] == volume


@BOTH
def test_pods_have_minimal_permissions(variant: str) -> None:
    spec, own = pod(variant)["spec"], container(variant)["securityContext"]
    (user,) = values(all_instructions(read_stages(), IMAGES[variant]), "USER")
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == int(user)
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not spec["automountServiceAccountToken"]


def test_only_gpu_variant_requests_gpu() -> None:
    limits = {variant: container(variant)["resources"]["limits"] for variant in VARIANTS}
    assert limits["gpu"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits["cpu"]
    threads = next(one["value"] for one in container("cpu")["env"] if one["name"] == "OMP_NUM_THREADS")
    assert int(threads) == int(container("cpu")["resources"]["requests"]["cpu"]) - 1


def test_documented_secret_matches_manifests() -> None:
    for variant in VARIANTS:
        references = [one["valueFrom"]["secretKeyRef"] for one in container(variant)["env"] if "valueFrom" in one]
        assert {one["name"] for one in references} == {"lorax-keys"}
        assert all(f"--from-literal={one['key']}=" in DEPLOYMENT for one in references)
        assert f"kubectl apply -k deploy/kubernetes/{variant}" in DEPLOYMENT
    assert "kubectl create secret generic lorax-keys" in DEPLOYMENT
