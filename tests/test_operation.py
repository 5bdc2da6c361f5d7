"""The units and manifests of `operation/`: what they start is there, and they ask for no rights."""

import configparser
import shlex
from pathlib import Path

import pytest
import yaml

OPERATION = Path(__file__).parents[1] / "operation"
DOCKERFILE = OPERATION.parent / "docker" / "Dockerfile"


def unit(name):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string((OPERATION / "systemd" / name).read_text().replace("\\\n", " "))
    return parser


def manifests():
    for path in sorted((OPERATION / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


@pytest.mark.parametrize(
    ("name", "program"),
    [("fedhet-server.service", "flower-superlink"), ("fedhet-site@.service", "flower-supernode")],
)
def test_a_unit_starts_an_authenticated_process_without_rights(name, program):
    service = unit(name)["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith(f"/{program}")
    assert not {"--insecure", "--host"} & {*words}
    authenticates = {"flower-superlink": "--enable-supernode-auth",
                     "flower-supernode": "--auth-supernode-private-key"}  # fmt: skip
    assert authenticates[program] in words
    assert (service["User"], service["UMask"]) == ("fedhet", "0077")
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"


def pods():
    return [each for each in manifests() if each["kind"] == "StatefulSet"]


def test_a_pod_runs_as_the_images_user_without_rights():
    assert [pod["metadata"]["name"] for pod in pods()] == ["fedhet-server", "site-a"]
    for pod in pods():
        spec = pod["spec"]["template"]["spec"]
        assert f"--uid {spec['securityContext']['runAsUser']} " in DOCKERFILE.read_text()
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (
            False,
            True,
        )
        assert rights["capabilities"] == {"drop": ["ALL"]}
        mounted = {each["name"] for each in container["volumeMounts"]}
        claimed = {each["metadata"]["name"] for each in pod["spec"]["volumeClaimTemplates"]}
        assert mounted == claimed | {each["name"] for each in spec["volumes"]}


def test_the_control_api_has_no_service_and_policies_let_in_the_fleet_alone():
    by_kind = {}
    for each in manifests():
        by_kind.setdefault(each["kind"], []).append(each["spec"])
    (service,) = by_kind["Service"]
    assert [port["port"] for port in service["ports"]] == [9092]
    for policy in by_kind["NetworkPolicy"]:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["ingress"]:
            assert [port["port"] for port in rule["ports"]] == [9092]
    assert "--host=127.0.0.1" in pods()[0]["spec"]["template"]["spec"]["containers"][0]["command"]
