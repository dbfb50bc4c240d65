"""Test the manifests of examples/kubernetes/ against Kubernetes' schemas and the server."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jpaged import EngineStats
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.metrics import Metrics
from jpaged.serve.options import read_flags

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.30", "1.33", "1.37")
FILES = sorted(FOLDER.glob("*.yaml"))


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def container() -> dict[str, Any]:
    return manifest("deployment")["spec"]["template"]["spec"]["containers"][0]


def validate(data: dict[str, Any], version: str) -> None:
    reason = 'needs the schemas: pip install ".[test]"'
    schemas = pytest.importorskip("kubernetes_validate", reason=reason)
    # If the package has no schema for the Kubernetes version, `schemas.validate` uses the schema of
    # an older Kubernetes version, and returns the older version.
    assert schemas.validate(data, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_manifest_is_valid(file: Path, version: str):
    validate(manifest(file.stem), version)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "terminationGracePeriod"), 5),
        (("spec", "selector"), None),
    ],
    ids=["type", "unknown", "missing"],
)
def test_invalid_manifest_is_detected(path: tuple[str, ...], value: Any):
    wrong = copy.deepcopy(manifest("deployment"))
    parent = wrong
    for name in path[:-1]:
        parent = parent[name]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    with pytest.raises(Exception, match=rf"{path[-1]}|{value}"):
        validate(wrong, VERSIONS[-1])


def test_all_kinds_of_manifests_exist():
    kinds = [manifest(file.stem)["kind"] for file in FILES]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Service"]


def test_labels_and_ports_of_manifests_match():
    deployment, service = manifest("deployment"), manifest("service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    target = manifest("autoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"])


def test_server_accepts_the_arguments_of_the_deployment_and_can_drain():
    pod, own = manifest("deployment")["spec"]["template"]["spec"], container()
    assert own["command"] == ["python", "-m", "jpaged.serve"]
    flags = read_flags(own["args"])
    assert flags.serve.port == own["ports"][0]["containerPort"]
    assert flags.serve.host == "0.0.0.0"
    assert not flags.serve.api_keys
    num_gpus = own["resources"]["limits"]["nvidia.com/gpu"]
    assert num_gpus == flags.engine.get("tensor_parallel_size", 1)
    slept = int(own["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > slept + flags.serve.shutdown_timeout


def test_probes_use_unauthenticated_paths():
    own = container()
    paths = {kind: own[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
    assert set(paths.values()) == {"/ready"}
    assert own["livenessProbe"]["httpGet"]["path"] == "/health"
    assert {"/ready", "/health"} <= UNAUTHENTICATED_PATHS


def test_autoscaler_uses_an_existing_metric():
    (rule,) = yaml.safe_load(manifest("adapter_rule")["data"]["config.yaml"])["rules"]
    series = rule["seriesQuery"].partition("{")[0]
    metrics = Metrics("m", max_model_len=64, block_size=16, num_blocks=9)
    text = metrics.text(EngineStats(16, 8, 8, 0)).decode()
    assert re.search(rf"^{re.escape(series)}{{", text, re.M)
    renamed = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("$", "\\"), series)
    (metric,) = manifest("autoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == renamed


def test_manifests_contain_no_secret():
    text = "\n".join(file.read_text(encoding="utf-8") for file in FILES)
    assert "kind: Secret" not in text
    assert "env" not in container()
