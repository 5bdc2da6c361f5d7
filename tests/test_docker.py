"""The containers: their rights and limits, the content of the image, and its packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from flwr.supercore.constant import SUPERNODE_UVICORN_DEFAULT_PORT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fedhet.deployment import certs
from fedhet.deployment.local import free_port

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGE_PACKAGES = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["privacy"],  # the file system is read-only
]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
FILES = ("compose.yaml", "keys.yaml")


def read(name):
    return yaml.safe_load((DOCKER / name).read_text())


SERVICES = {
    service: content for name in FILES for service, content in read(name)["services"].items()
}


PINS = {"constraints.txt": ("1.39", "1.40"), "newest.txt": ("1.40", "1.43")}
"""Files of pins, with the range of Flower's versions in each."""


def pins(name):
    lines = (DOCKER / name).read_text().splitlines()
    found = [Requirement(line.rstrip(" \\")) for line in lines if line[:1] not in ("", "#", " ")]
    return {canonicalize_name(pin.name): pin for pin in found}


# --- rights and limits -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_minimal_privileges(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert not {"cap_add", "privileged", "ports"} & set(service)
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["read_only"] is True
    assert service["pids_limit"] <= 512
    assert "mem_limit" in service
    assert (service.get("user") is None) == (name not in ("keys", "peers")), "keys need root"


def test_only_network_is_internal():
    assert read("compose.yaml")["networks"] == {"federation": {"internal": True}}
    places = {
        name: service.get("networks") or service["network_mode"]
        for name, service in SERVICES.items()
    }
    assert places == {
        "keys": "none",
        "peers": "none",
        "register": "service:server",
        "federation": "service:server",
        **{name: ["federation"] for name in ("server", "site-0", "site-1", "site-2")},
    }


def test_no_site_reaches_the_control_api():
    """The control API authenticates nobody, and a run may contain any code."""
    command = SERVICES["server"]["command"]
    assert command == ["fedhet", "server", "/run/secrets", "--address=0.0.0.0:9092"]
    inside = {n for n, each in SERVICES.items() if each.get("network_mode") == "service:server"}
    assert inside == {"register", "federation"}
    for name in inside:
        words = " ".join(SERVICES[name]["command"])
        assert "--server localhost:8000" in words
    for name in ("site-0", "site-1", "site-2"):
        assert not {"network_mode", "links"} & SERVICES[name].keys()
        assert "8000" not in " ".join(SERVICES[name]["command"])


def test_sites_run_only_apps_signed_by_the_publisher():
    secrets = read("compose.yaml")["secrets"]
    for name in ("site-0", "site-1", "site-2"):
        words = SERVICES[name]["command"][-1].split()
        (trusted,) = (b for a, b in pairwise(words) if a == "--trusted-entities")
        assert Path(trusted).name in SERVICES[name]["secrets"]
        assert secrets[Path(trusted).name]["file"].endswith("/run.publisher.yaml")
    holders = [n for n, each in SERVICES.items() if "run.publisher.key" in each.get("secrets", [])]
    assert holders == ["federation"]
    assert "--sign /run/secrets/run.publisher.key" in SERVICES["federation"]["command"][-1]
    assert "fedhet certs /secrets --publisher run" in SERVICES["keys"]["command"][-1]


def test_private_keys_are_mounted_only_by_their_owner():
    holders = {}
    for name, service in SERVICES.items():
        for secret in service.get("secrets", []):
            holders.setdefault(secret, set()).add(name)
    keys = {"server.key": "server"} | {f"site-{k}": f"site-{k}" for k in range(3)}
    assert {key: holders[key] for key in keys} == {key: {name} for key, name in keys.items()}
    paths = {secret["file"] for secret in read("compose.yaml")["secrets"].values()}
    assert not any(path.endswith("ca.key") for path in paths)


def test_health_checks_ask_the_process_itself():
    """A site listens at Flower's default port, the server at the control API's."""
    checks = {
        n: each["healthcheck"]["test"] for n, each in SERVICES.items() if "healthcheck" in each
    }
    command = ["CMD", "python", "/opt/fedhet/healthy.py"]
    site = [*command, f"http://127.0.0.1:{SUPERNODE_UVICORN_DEFAULT_PORT}"]
    assert checks == {
        "server": [*command, "https://127.0.0.1:8000", "/run/secrets/ca.crt"],
        **{f"site-{k}": site for k in range(3)},
    }
    assert "ca.crt" in SERVICES["server"]["secrets"]
    assert not any("--port" in SERVICES[f"site-{k}"]["command"][-1] for k in range(3))


def test_gpu_file_changes_only_devices():
    services = read("compose.gpu.yaml")["services"]
    assert services.keys() <= SERVICES.keys()
    assert all(set(service) == {"deploy"} for service in services.values())


def test_secure_file_gives_each_site_only_its_own_key():
    secure = read("compose.secure.yaml")
    assert secure["services"].keys() == {f"site-{k}" for k in range(3)}
    for k in range(3):
        site = secure["services"][f"site-{k}"]
        assert set(site) == {"secrets", "environment"}
        targets = {
            secret if isinstance(secret, str) else secret["target"]: secret
            for secret in site["secrets"]
        }
        assert targets["peer.key"]["source"] == f"peer-{k}"
        assert secure["secrets"][f"peer-{k}"]["file"].endswith(f"/client-{k}.peer.key")
        config = site["environment"]["NODE_CONFIG"]
        assert re.findall(r'"/run/secrets/(.*?)"', config) == list(targets)
        # Without this file, the variable is empty.
        assert SERVICES[f"site-{k}"]["environment"]["NODE_CONFIG"] == ""
        assert "$$NODE_CONFIG" in SERVICES[f"site-{k}"]["command"][-1]


# --- the image ---------------------------------------------------------------------------------


def test_build_context_contains_only_copied_files():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*", "what is not named is not sent"
    named = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.M)
    assert {word for words in copies for word in words.split()} == named
    assert all((ROOT / path).exists() for path in named)
    assert not any("secrets" in path or path == "docker" for path in named)
    assert "secrets/" in (DOCKER / ".gitignore").read_text().split()


def test_image_has_a_pinned_base_and_is_not_run_as_root():
    assert {*re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)} == {"${IMAGE}"}
    assert re.search(r"^ARG IMAGE=\$\{BASE:-\S+@sha256:[0-9a-f]{64}\}$", DOCKERFILE, re.M)
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.M)[-1] == "fedhet"


# --- its packages ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PINS)
def test_every_package_is_pinned_to_one_version(name):
    for pin in pins(name).values():
        assert re.fullmatch(r"==[\w.!+]+", str(pin.specifier)), pin
        assert pin.url is None
        assert pin.marker is None


@pytest.mark.parametrize("name", PINS)
def test_every_package_and_pip_have_hashes(name):
    text = (DOCKER / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(pins(name))
    every = [*lines, *(DOCKER / "pip.txt").read_text().splitlines()]
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}( |$)", line) for line in every)
    assert "-r pip.txt" in DOCKERFILE


@pytest.mark.parametrize("name", PINS)
@pytest.mark.parametrize("wanted", IMAGE_PACKAGES + PROJECT["build-system"]["requires"])
def test_pins_satisfy_pyproject(wanted, name):
    requirement = Requirement(wanted)
    pin = pins(name).get(canonicalize_name(requirement.name))
    assert pin, f"{wanted} has no pin: make constraints"
    (version,) = pin.specifier
    assert requirement.specifier.contains(version.version), f"{wanted}: make constraints"


def test_wanted_prints_the_requirements():
    def of(*names):
        command = [sys.executable, DOCKER / "wanted.py", *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    assert of("image") == IMAGE_PACKAGES
    assert of("image", "build") == IMAGE_PACKAGES + PROJECT["build-system"]["requires"]


def test_every_package_is_installed_with_its_constraints():
    steps = re.split(r"&&|\n", DOCKERFILE.replace("\\\n", " "))
    installs = [step for step in steps if "-m pip" in step and " install " in step]
    assert installs
    held = ('-c "$PINS"', "--no-deps", "--require-hashes -r pip.txt")
    assert all(any(words in step for words in held) for step in installs)
    assert "--no-build-isolation" in DOCKERFILE, "else the build's packages are not pinned"


def test_versions_with_known_faults_are_not_in_the_image():
    """With Flower 1.39, a later step replaces a package of which Flower requires an old version."""
    for file, (lowest, below) in PINS.items():
        (certifi,) = pins(file)["certifi"].specifier
        assert Version(certifi.version) >= Version("2026.10.19")
        (flower,) = pins(file)["flwr"].specifier
        assert Version(lowest) <= Version(flower.version) < Version(below)
    (cryptography,) = pins("newest.txt")["cryptography"].specifier
    assert Version(cryptography.version) >= Version("50")
    text = (DOCKER / "overrides.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}( |$)", line) for line in lines)
    (cryptography,) = (line.split()[0] for line in lines)
    name, version = cryptography.split("==")
    assert (name, Version(version) >= Version("50")) == ("cryptography", True)
    steps = re.findall(r"-r (\w+\.txt)", DOCKERFILE)
    assert steps.index("overrides.txt") > steps.index("image.txt")
    assert 'test "$PINS" != constraints.txt ||' in DOCKERFILE, "newest.txt needs no override"
    assert re.search(r"^ARG PINS=constraints\.txt$", DOCKERFILE, re.M)


# --- a run's name, and the server's log --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words", "finished", "printed", "says"),
    [
        ("second", "--rounds 5", False, "submit felo --rounds 5 --out runs/second\n", set()),
        ("first", "", False, "", {"FEDHET_NAME", "resume=true"}),
        ("first", "", True, "", {"FEDHET_NAME"}),
        ("first", "--set resume=true", False,
         "submit felo --set resume=true --out runs/first\n", set()),
    ],
)  # fmt: skip
def test_submission_needs_a_new_name_or_resume(tmp_path, name, words, finished, printed, says):
    """Run submit.sh with a `fedhet` that prints its arguments; a run named first exists."""
    fake, there = tmp_path / "fedhet", tmp_path / "runs" / "first"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o700)
    there.mkdir(parents=True)
    if finished:
        (there / "summary.json").touch()
    done = subprocess.run(
        ["sh", DOCKER / "submit.sh", name, "felo", *words.split()],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RUNS": str(there.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (int(not printed), printed)
    assert done.stderr.count("\n") == int(not printed)
    assert says == {word for word in ("FEDHET_NAME", "resume=true") if word in done.stderr}


def run_server_as(server, folder):
    """Run `fedhet server` in a process where `server` is Flower's SuperLink; return its output."""
    certs.make(folder, [], [], 30)
    script = f"""
import sys
from pathlib import Path
import flwr.superlink.cli as cli
{server}
cli.flower_superlink = server
from fedhet.deployment.processes import run_server
keys, sites, control = sys.argv[1:]
run_server(Path(keys), sites, control, Path("superlink.db"), [])
"""
    words = [folder, *(f"127.0.0.1:{free_port()}" for _ in range(2))]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_transactions_of_server_wait_a_minute_for_locks(tmp_path):
    """After Flower's five seconds, `database is locked` would end Flower's SuperExec."""
    server = """
def server():
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore
    store = SqlObjectStore(sys.argv[sys.argv.index("--database") + 1])
    store.initialize()
    for _ in range(2):
        print(store.query("PRAGMA busy_timeout"))
"""
    assert re.findall(r"'timeout': (\d+)", run_server_as(server, tmp_path)) == ["60000", "60000"]


def test_server_logs_only_failed_requests(tmp_path):
    # uvicorn's own configuration, as Flower gives it, comes after the filter.
    server = """
import logging, logging.config
from flwr.supercore.http_logging import get_uvicorn_log_config

def server():
    logging.config.dictConfig(get_uvicorn_log_config(logging.INFO))
    log = logging.getLogger("uvicorn.access")
    for path, status in (("/good", 200), ("/refused", 401), ("/failed", 500)):
        log.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", status)
    logging.getLogger("uvicorn.error").info("Uvicorn running")
"""
    output = run_server_as(server, tmp_path)
    said = re.findall(r"/good|/refused|/failed|Uvicorn running", output)
    assert said == ["/refused", "/failed", "Uvicorn running"]
