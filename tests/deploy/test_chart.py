"""The chart and the image: what they start is what kvarts accepts. No cluster is here; Helm's library may be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from builders.go_template import Chart, FailedError

yaml: Any = pytest.importorskip("yaml", reason="reads YAML")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "kvarts"
SETTINGS: list[dict[str, Any]] = [
    {"insecure": True},
    {"insecure": True, "kvEvents": True, "headless": True, "serviceMonitor": {"enabled": True, "labels": {"a": "b"}}},
    {"tlsSecret": "cert", "keysSecret": "keys", "serviceMonitor": {"enabled": True}},
    {"insecure": True, "mocks": [
        {"name": "chat", "replicas": 3, "args": []},
        {"name": "code", "replicas": 1, "args": ["--pages", "500", "--cost", "linear:step_ms=5"]},
    ], "podAnnotations": {"x": "y"}, "tolerations": [{"key": "k"}], "image": {"tag": "other"}},
]  # fmt: skip


def to_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=False, sort_keys=False))


def merged(values: Any, more: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(more, dict):
        return more
    return values | {name: merged(values.get(name), each) for name, each in more.items()}


def rendered(settings: dict[str, Any]) -> list[dict[str, Any]]:
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), settings)
    app = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    root = {"Values": values, "Release": {"Name": "my"}, "Chart": {"AppVersion": app}}
    chart = Chart(CHART / "templates", root, to_yaml)
    told = [yaml.safe_load_all(chart.render(name)) for name in ("mocks.yaml", "servicemonitor.yaml")]
    return [each for documents in told for each in documents if each is not None]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind]


@pytest.mark.parametrize("settings", SETTINGS)
def test_containers_start_with_options_that_a_mock_has(settings: dict[str, Any]) -> None:
    from kvarts.cli.mock import mock_command
    from kvarts.doors.exposure import check_reach

    for deployment in of_kind(rendered(settings), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        command, *arguments = container["args"]
        assert command == "mock"
        params = mock_command.make_context("mock", arguments).params
        assert params["port"] == container["ports"][0]["containerPort"]
        check_reach(params["host"], field="host", insecure=params["insecure"], encrypts=params["tls_cert"] is not None,
                    asks_for_token=params["api_key_file"] is not None, missing="")  # fmt: skip
        spec = deployment["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] >= params["drain"] + params["drain_delay"] + 5
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        for name in ("tls_cert", "tls_key", "api_key_file"):
            assert params[name] is None or str(params[name].parent) in mounted
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


@pytest.mark.parametrize("settings", SETTINGS)
def test_objects_refer_to_each_other(settings: dict[str, Any]) -> None:
    documents = rendered(settings)
    deployments, services = of_kind(documents, "Deployment"), of_kind(documents, "Service")
    assert len(deployments) == len(services) == len(settings.get("mocks", [1]))
    assert len({each["metadata"]["name"] for each in deployments}) == len(deployments)
    for deployment, service in zip(deployments, services, strict=True):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {each["name"] for each in container["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} == ports
        scheme = "HTTPS" if settings.get("tlsSecret") else "HTTP"
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http", "scheme": scheme}
        assert container["livenessProbe"]["tcpSocket"]["port"] == "http"  # a pod that drains is not killed
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["image"] == f"kvarts:{settings.get('image', {}).get('tag', '0.1.0')}"
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert all(wanted <= service["metadata"]["labels"].items() for service in services)
        assert monitor["spec"]["endpoints"][0]["port"] in {each["name"] for each in services[0]["spec"]["ports"]}
        assert ("authorization" in monitor["spec"]["endpoints"][0]) is bool(settings.get("keysSecret"))
    assert len(of_kind(documents, "ServiceMonitor")) == bool(settings.get("serviceMonitor"))


@pytest.mark.parametrize("settings", SETTINGS)
def test_helm_itself_has_no_complaint_and_makes_the_same_objects(settings: dict[str, Any]) -> None:
    """With Helm's own library, which is on PyPI for Linux: `pip install helm-python-sdk kubernetes-validate`."""
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk")
    linted = helm.lint(CHART, settings, strict=True)
    assert not linted["errors"] and {each["error"] for each in linted["messages"]} <= {"icon is recommended"}
    texts = helm.Chart.load(CHART).render(settings, name="my")
    documents = [each for text in texts.values() for each in yaml.safe_load_all(text) if each is not None]
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert by_name == {(each["kind"], each["metadata"]["name"]): each for each in rendered(settings)}
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in documents:
        if document["kind"] != "ServiceMonitor":  # not of Kubernetes itself
            kubernetes.validate(document, kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("settings", [{}, {"tlsSecret": "a"}, {"tlsSecret": "a", "keysSecret": "b", "kvEvents": True}])
def test_what_would_be_open_by_mistake_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(FailedError, match="insecure: true"):
        rendered(settings)


def test_the_schema_has_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(value: Any, of: dict[str, Any]) -> None:
        kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
        assert isinstance(value, kinds[of["type"]]) if "type" in of else value in of["enum"]
        for name, each in value.items() if "properties" in of else ():
            check(each, of["properties"][name])
        for each in value if "items" in of else ():
            check(each, of["items"])

    check(values, schema)
    assert values.keys() == schema["properties"].keys() - {"global"}


def test_the_image_copies_what_the_package_needs() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    ignored = (DEPLOY.parent / ".containerignore").read_text()
    assert (DEPLOY.parent / ".dockerignore").read_text() == ignored
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \./?\S*$", text, re.MULTILINE) for name in line.split()}
    kept = {line[1:] for line in ignored.splitlines() if line.startswith("!")}
    assert copied == kept and all((DEPLOY.parent / name).exists() for name in copied)
    assert "USER 65532" in text and 'ENTRYPOINT ["kvarts"]' in text
