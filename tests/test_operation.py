"""The units and manifests in `operation/` start working processes without privileges."""

import configparser
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml
from federation import small
from interruption import until

from fedhet.config.resolve import resolve
from fedhet.deployment import certs
from fedhet.deployment.certs import read_publisher_key
from fedhet.deployment.control import Connection, submit
from fedhet.deployment.local import end_trees, free_port

OPERATION = Path(__file__).parents[1] / "operation"
DOCKERFILE = OPERATION.parent / "docker" / "Dockerfile"


class Repeated(dict):
    """Collects the values of a key that a unit sets several times."""

    def __setitem__(self, key, value):
        if key in self and isinstance(value, list):
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit(name, instance="site-a"):
    """Return the sections of an instance's unit: {section: {key: its lines}}."""
    parser = configparser.RawConfigParser(strict=False, dict_type=Repeated)
    parser.optionxform = str
    text = (OPERATION / "systemd" / name).read_text().replace("\\\n", " ")
    parser.read_string(text.replace("%i", instance))
    return {
        section: {key: value.split("\n") for key, value in parser[section].items()}
        for section in parser.sections()
    }


def environment(service):
    """Return the variables that a unit sets."""
    pairs = [word for line in service["Environment"] for word in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def manifests():
    for path in sorted((OPERATION / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


UNITS = {
    "fedhet-server.service": ("server", "${CREDENTIALS_DIRECTORY}", "fedhet-server"),
    "fedhet-site@.service": ("node", "--auth-supernode-private-key", "fedhet-site-a"),
}


@pytest.mark.parametrize("name", UNITS)
def test_unit_starts_an_authenticated_process_without_privileges(name):
    service = unit(name)["Service"]
    command, authenticates, user = UNITS[name]
    words = shlex.split(*service["ExecStart"])
    assert words[0].endswith("/fedhet")
    assert words[1] == command
    assert "--insecure" not in words
    assert authenticates in words
    assert (service["User"], service["UMask"]) == ([user], ["0077"])
    assert service["CapabilityBoundingSet"] == [""]
    assert service["ProtectSystem"] == ["strict"]


def test_no_unit_opens_the_control_api_to_other_machines():
    words = shlex.split(*unit("fedhet-server.service")["Service"]["ExecStart"])
    assert "--control" not in words, "its default is the loopback interface"
    assert dict(pairwise(words))["--address"] == "0.0.0.0:9092"


def test_every_site_unit_runs_only_signed_apps():
    service = unit("fedhet-site@.service")["Service"]
    words = shlex.split(*service["ExecStart"])
    trusted = words[words.index("--trusted-entities") + 1]
    assert trusted == "${CREDENTIALS_DIRECTORY}/publishers.yaml"
    assert "publishers.yaml:/etc/fedhet/publishers.yaml" in service["LoadCredential"]
    (container,) = pods()[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["fedhet", "node"]
    assert "--trusted-entities=/keys/publishers.yaml" in container["command"]
    assert "--from-file=publishers.yaml" in (OPERATION / "kubernetes/site.yaml").read_text()
    (server,) = pods()[0]["spec"]["template"]["spec"]["containers"]
    assert server["command"][:2] == ["fedhet", "server"], "Flower's server drops signatures"


def test_units_have_separate_users_and_keys():
    users = [unit("fedhet-server.service"), unit("fedhet-site@.service", "site-a")]
    users.append(unit("fedhet-site@.service", "site-b"))
    assert len({each["Service"]["User"][0] for each in users}) == 3
    for each in users:
        service = each["Service"]
        given = [line.split(":", 1)[1] for line in service["LoadCredential"]]
        assert not any(path.endswith(certs.CA_KEY) for path in given)
        assert "-/etc/fedhet" in service["InaccessiblePaths"]
        assert "/etc/" not in service["ExecStart"][0], "keys are read as credentials"


@pytest.mark.parametrize("name", UNITS)
def test_unit_has_a_home_a_cache_and_the_programs_that_flower_starts(name):
    service = unit(name)["Service"]
    variables, user = environment(service), UNITS[name][2]
    assert service["StateDirectory"] == service["CacheDirectory"] == [user]
    programs = Path(shlex.split(*service["ExecStart"])[0]).parent
    assert variables["PATH"].split(":")[0] == str(programs)
    assert variables["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert {"HOME", "FLWR_HOME", "XDG_CACHE_HOME", "FEDHET_CACHE_DIR", "MPLCONFIGDIR"} <= {
        *variables
    }
    for key, value in variables.items():
        if value.startswith("/") and key != "PATH":
            home = f"/var/cache/{user}" if "CACHE" in key or key in CACHES else f"/var/lib/{user}"
            assert Path(value).is_relative_to(home), key


CACHES = {"MPLCONFIGDIR", "TORCH_HOME", "HF_HOME"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_between_processes_with_the_units_commands_and_environments(tmp_path):
    """Start the commands of both units with only their variables, below another root."""
    control, fleet = free_port(), free_port()
    keys = tmp_path / "etc/fedhet/keys"
    certs.make(keys, [], [], 30)
    certs.make_node_key(tmp_path / "etc/fedhet/site-a")
    (tmp_path / "etc/fedhet/ca.crt").write_bytes((keys / certs.CA_CERTIFICATE).read_bytes())
    private, public = certs.make_publisher_key(tmp_path / "publisher", "lab")
    (tmp_path / "etc/fedhet/publishers.yaml").write_bytes(public.read_bytes())

    def start(name):
        service, user = unit(name)["Service"], UNITS[name][2]
        for place in ("lib", "cache"):
            (tmp_path / "var" / place / user).mkdir(parents=True)
        given = tmp_path / "run/credentials" / user
        given.mkdir(parents=True)
        for line in service["LoadCredential"]:
            credential, path = line.split(":")
            (given / credential).write_bytes((tmp_path / path.lstrip("/")).read_bytes())
        variables = {
            "CREDENTIALS_DIRECTORY": str(given),
            "SERVER": f"127.0.0.1:{fleet}",
            "NODE_CONFIG": "partition-id=0 num-partitions=1",
        }

        def here(text):
            for variable, value in variables.items():
                text = text.replace(f"${{{variable}}}", value)
            for place in ("/var/lib", "/var/cache"):
                text = text.replace(place, str(tmp_path) + place)
            text = text.replace("0.0.0.0:9092", f"127.0.0.1:{fleet}")
            return text.replace("/opt/fedhet/.venv", sys.prefix)

        # Split before the values are put in, as systemd does: a value with spaces is one word.
        words = [here(word) for word in shlex.split(*service["ExecStart"])]
        own = {
            "server": ["--control", f"127.0.0.1:{control}"],
            "node": ["--port", str(free_port())],
        }
        log = (tmp_path / f"{user}.log").open("wb")
        return subprocess.Popen(
            [*words, *own[words[1]]],
            env={key: here(value) for key, value in environment(service).items()},
            cwd=here(service["WorkingDirectory"][0]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    started = [start("fedhet-server.service")]
    try:
        connection = Connection(
            tmp_path / "flower", f"127.0.0.1:{control}", keys / certs.CA_CERTIFICATE
        )
        connection.prepare()
        until(connection.is_listening)
        connection.register(tmp_path / "etc/fedhet/site-a.pub", "client-0")
        started.append(start("fedhet-site@.service"))
        config = small("local", clients=1, models=["mlp"], rounds=1, join_timeout=300.0)
        said = []
        placed, key = resolve({**config.flat(), "out": "runs/first"}), read_publisher_key(private)
        submit(placed, connection, said.append, key)
    finally:
        end_trees([psutil.Process(each.pid) for each in started])
    assert (tmp_path / "var/lib/fedhet-server/runs/first/summary.json").exists(), "\n".join(said)
    kept = (tmp_path / "var/lib/fedhet-site-a/state").rglob("*")
    assert any(path.is_file() for path in kept)


def pods():
    return [each for each in manifests() if each["kind"] == "StatefulSet"]


def test_pods_run_as_the_image_user_without_privileges():
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


@pytest.mark.parametrize("index", [0, 1])
def test_pods_have_probes(index):
    (container,) = pods()[index]["spec"]["template"]["spec"]["containers"]
    probes = {"livenessProbe", "readinessProbe"}
    assert probes <= container.keys()
    for probe in sorted(probes):
        python, script, *address = container[probe]["exec"]["command"]
        assert (python, script) == ("python", "/opt/fedhet/healthy.py")
        assert address == HEALTHY[container["command"][1]]
        assert f"docker/{Path(script).name} " in DOCKERFILE.read_text()


HEALTHY = {
    "server": ["https://127.0.0.1:8000", "/keys/ca.crt"],
    "node": ["http://127.0.0.1:9094"],
}
"""Addresses of `healthy.py`."""


def by_kind(kind):
    return [each["spec"] for each in manifests() if each["kind"] == kind]


def test_control_api_has_no_service_and_policies_let_in_the_fleet_alone():
    (service,) = by_kind("Service")
    assert [port["port"] for port in service["ports"]] == [9092]
    assert service["type"] == "LoadBalancer", "the sites are outside the cluster"
    for policy in by_kind("NetworkPolicy"):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["ingress"]:
            assert [port["port"] for port in rule["ports"]] == [9092]
    (container,) = pods()[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][1:] == ["server", "/keys", "--address=0.0.0.0:9092"]
    assert [port["containerPort"] for port in container["ports"]] == [9092]


def test_site_in_kubernetes_reaches_only_the_server_and_the_clusters_dns():
    server, site = by_kind("NetworkPolicy")
    assert server["egress"] == []
    assert site["ingress"] == []
    reached = {}
    for rule in site["egress"]:
        for port in rule["ports"]:
            reached.setdefault((port["protocol"], port["port"]), []).append(rule["to"])
    assert reached.keys() == {("TCP", 9092), ("UDP", 53), ("TCP", 53)}
    # The example's address reaches nothing (RFC 5737), so an unset address is noticed.
    assert reached["TCP", 9092] == [[{"ipBlock": {"cidr": "192.0.2.10/32"}}]]
    (dns,), (same,) = reached["UDP", 53], reached["TCP", 53]
    assert dns == same
    (pods_of_dns,) = dns
    assert pods_of_dns["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "kube-system"
    }
    assert pods_of_dns["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}
