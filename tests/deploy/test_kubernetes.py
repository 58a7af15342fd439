"""Objects for Kubernetes: each is valid by its schema, and what they name of each other is there."""

import json
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from sentinel.cli.serve import serve
from sentinel.daemon.config import load_config

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.31"
"""Of Kubernetes: the oldest that is kept up."""
OBJECTS = [
    (path, one)
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for one in yaml.safe_load_all(path.read_text())
]
BY_KIND = {(path.parent.name, one["kind"]): one for path, one in OBJECTS}
KUSTOMIZATIONS = sorted(FOLDER.rglob("kustomization.yaml"))
OF_THE_OPERATOR = {
    "ServiceMonitor": {"endpoints", "jobLabel", "selector", "namespaceSelector", "targetLabels"},
    "PrometheusRule": {"groups"},
}
"""Kind of the Prometheus operator, whose schemas are no part of Kubernetes -> fields of its spec that we may use."""


@pytest.mark.parametrize(("path", "found"), OBJECTS, ids=lambda one: one.stem if isinstance(one, Path) else one["kind"])
def test_each_object_is_valid_by_its_schema(path, found):
    if found["kind"] in OF_THE_OPERATOR:
        assert found["apiVersion"] == "monitoring.coreos.com/v1"
        assert found["spec"].keys() <= OF_THE_OPERATOR[found["kind"]]
        return

    kubernetes_validate.validate(found, VERSION, strict=True)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_each_kustomization_names_files_that_there_are_and_leaves_out_none(path):
    found = yaml.safe_load(path.read_text())
    files = [*found.get("resources", ()), *(file for one in found.get("configMapGenerator", ()) for file in one["files"])]

    for name in files:
        assert (path.parent / name).exists(), name
    beside = {one.name for one in path.parent.glob("*.y*ml")} - {"kustomization.yaml"}
    assert beside <= set(files)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_example_and_all_of_it_is_valid():
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "overlays" / "example")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr

    built = list(yaml.safe_load_all(done.stdout))

    assert {one["kind"] for one in built} == {
        "ServiceAccount", "ConfigMap", "Service", "PersistentVolumeClaim", "Deployment", "PodDisruptionBudget",
        "NetworkPolicy", "ServiceMonitor", "PrometheusRule",
    }  # fmt: skip
    for one in built:
        assert one["metadata"]["namespace"] == "training"
        if one["kind"] not in OF_THE_OPERATOR:
            kubernetes_validate.validate(one, VERSION, strict=True)
    [deployment] = [one for one in built if one["kind"] == "Deployment"]
    images = {one["image"] for one in pod(deployment)["containers"] + pod(deployment)["initContainers"]}
    assert images == {"registry.example.org/ml/sentinel:0.1.0"}


def pod(one):
    return one["spec"]["template"]["spec"]


def test_the_daemon_is_started_with_options_that_there_are():
    [container] = pod(BY_KIND["base", "Deployment"])["containers"]
    verb, *words = container["args"]

    options = serve.make_context("serve", words).params

    assert verb == "serve"
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    paths = [options["directory"], options["state_dir"], options["config"], options["tls_cert"], options["tls_key"]]
    assert all(any(path == one or path.startswith(f"{one}/") for one in mounted) for path in paths)
    assert options["listen"].endswith(":9464")
    assert container["ports"] == [{"name": "https", "containerPort": 9464}]
    assert options["drain_s"] < pod(BY_KIND["base", "Deployment"])["terminationGracePeriodSeconds"]


def test_selectors_and_ports_meet():
    name = {"app.kubernetes.io/name": "sentinel"}
    deployment, service = BY_KIND["base", "Deployment"], BY_KIND["base", "Service"]
    monitor = BY_KIND["monitoring", "ServiceMonitor"]
    [endpoint] = monitor["spec"]["endpoints"]

    assert deployment["spec"]["template"]["metadata"]["labels"] == name
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == name
    assert BY_KIND["base", "NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == name
    assert BY_KIND["base", "PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == name
    assert monitor["spec"]["selector"]["matchLabels"] == name
    assert endpoint["port"] == service["spec"]["ports"][0]["name"] == "https"
    # The rules ask for this job.
    assert name[monitor["spec"]["jobLabel"]] == "sentinel"


def test_volumes_secrets_and_accounts_that_are_named_are_there():
    spec = pod(BY_KIND["base", "Deployment"])
    volumes = {one["name"] for one in spec["volumes"]}
    secrets = {one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    example = (FOLDER / "overlays" / "example" / "kustomization.yaml").read_text()

    for container in (*spec["initContainers"], *spec["containers"]):
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
        assert (
            container["securityContext"]["readOnlyRootFilesystem"]
            and not container["securityContext"]["allowPrivilegeEscalation"]
        )
    assert secrets == {"sentinel-tls", "sentinel-tokens"}
    assert all(f"create secret generic {one} " in example for one in secrets)
    assert spec["serviceAccountName"] == BY_KIND["base", "ServiceAccount"]["metadata"]["name"]
    assert BY_KIND["base", "PersistentVolumeClaim"]["metadata"]["name"] in json.dumps(spec["volumes"])


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("sentinel.yml")), ids=lambda path: path.parent.name)
def test_the_configurations_are_the_daemons(path):
    assert load_config(path).notify.sinks


def test_the_rules_of_the_operator_are_those_of_prometheus(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rule_object

    given = yaml.safe_load((FOLDER.parent / "prometheus" / "sentinel.rules.yml").read_text())

    assert (FOLDER / "monitoring" / "prometheus-rule.yaml").read_text() == rule_object.rule_object()
    assert BY_KIND["monitoring", "PrometheusRule"]["spec"] == given
