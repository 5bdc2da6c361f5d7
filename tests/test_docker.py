"""The containers: their rights and limits, what is in the image, and its packages."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
FILES = ("compose.yaml", "keys.yaml")


def read(name):
    return yaml.safe_load((DOCKER / name).read_text())


SERVICES = {
    service: content for name in FILES for service, content in read(name)["services"].items()
}


def pins():
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


# --- rights and limits -------------------------------------------------------------------------


def test_the_services_are_those_that_are_checked_here():
    sites = {"site-0", "site-1", "site-2"}
    assert set(SERVICES) == {"keys", "server", "register", "federation"} | sites


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_rights_that_it_does_not_need(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert not service.get("privileged")
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_cannot_take_the_whole_machine(name):
    service = SERVICES[name]
    assert 0 < service["pids_limit"] <= 512
    assert re.fullmatch(r"\d+g|\$\{FEDHET_MEMORY:-\d+g\}", service["mem_limit"])
    if name != "keys":
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_is_reachable_from_outside(name):
    service = SERVICES[name]
    assert "ports" not in service
    if name == "keys":
        assert service["network_mode"] == "none"
    else:
        assert service["networks"] == ["federation"]
        assert "network_mode" not in service
    health = service.get("healthcheck", {"test": ["127.0.0.1:"]})["test"][-1]
    assert health.startswith("127.0.0.1:")


def test_the_network_has_no_way_out():
    assert read("compose.yaml")["networks"] == {"federation": {"internal": True}}


def test_processes_are_not_root_and_only_keys_are_made_as_root():
    group = re.search(r"--gid (\d+) fedhet", DOCKERFILE)[1]
    assert re.search(r"^USER fedhet$", DOCKERFILE, re.M)
    users = {name: s["user"] for name, s in SERVICES.items() if "user" in s}
    assert users == {"keys": f"0:{group}"}


def test_every_container_gets_its_own_secrets_and_no_others():
    of = {name: set(service.get("secrets", [])) for name, service in SERVICES.items()}
    assert of == {
        "keys": set(),
        "server": {"ca.crt", "server.pem", "server.key"},
        "register": {"ca.crt", "site-0.pub", "site-1.pub", "site-2.pub"},
        "site-0": {"ca.crt", "site-0"},
        "site-1": {"ca.crt", "site-1"},
        "site-2": {"ca.crt", "site-2"},
        "federation": {"ca.crt"},
    }
    paths = {secret["file"] for secret in read("compose.yaml")["secrets"].values()}
    assert not any(path.endswith("ca.key") for path in paths)


def test_only_the_server_writes_to_its_volume():
    volumes = {name: service.get("volumes", []) for name, service in SERVICES.items()}
    assert volumes == {
        "keys": ["./secrets:/secrets"],
        "server": ["server:/var/lib/fedhet"],
        "register": [],
        **{f"site-{k}": [f"site-{k}:/var/lib/fedhet"] for k in range(3)},
        "federation": ["server:/server:ro"],
    }


def test_gpus_change_nothing_but_the_devices():
    services = read("compose.gpu.yaml")["services"]
    assert set(services) == {"site-0", "site-1", "site-2"}
    assert all(set(service) == {"deploy"} for service in services.values())


# --- the image ---------------------------------------------------------------------------------


def test_the_build_context_has_no_secret():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*", "what is not named is not sent"
    named = {line[1:] for line in lines if line.startswith("!")}
    folders = {"fedhet"}
    files = {"constraints.txt", "wanted.py", "healthy.py", "superlink.py", "submit.sh"}
    assert named == folders | {"pyproject.toml", "README.md", "LICENSE"} | {
        f"docker/{file}" for file in files
    }
    assert "secrets/" in (DOCKER / ".gitignore").read_text().split()


def test_all_that_is_copied_is_in_the_build_context():
    named = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.M)
    copied = {word for words in copies for word in words.split()}
    assert copied == named
    assert all((ROOT / path).exists() for path in copied)


def test_the_base_image_is_named_by_its_digest():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    assert bases == ["${IMAGE}"] * 3
    image = re.search(r"^ARG IMAGE=\$\{BASE:-(.+)\}$", DOCKERFILE, re.M)[1]
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", image)


def test_compose_and_dockerfile_name_the_same_index():
    index = re.search(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE, re.M)[1]
    arguments = SERVICES["keys"]["build"]["args"]
    assert arguments == {"BASE": "${BASE-}", "TORCH_INDEX": f"${{TORCH_INDEX-{index}}}"}


# --- its packages ------------------------------------------------------------------------------


def test_every_package_is_pinned_to_one_version():
    for pin in pins().values():
        assert re.fullmatch(r"==[\w.!+]+", str(pin.specifier)), pin
        assert pin.url is None
        assert pin.marker is None


@pytest.mark.parametrize(
    "wanted", PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
)
def test_the_pins_are_what_pyproject_asks_for(wanted):
    requirement = Requirement(wanted)
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin, f"{wanted} has no pin: make constraints"
    (version,) = pin.specifier
    assert requirement.specifier.contains(version.version), f"{wanted}: make constraints"


def test_wanted_prints_the_requirements():
    def of(*names):
        command = [sys.executable, DOCKER / "wanted.py", *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    dependencies, build = PROJECT["project"]["dependencies"], PROJECT["build-system"]["requires"]
    assert of("image") == dependencies
    assert of("image", "build") == dependencies + build


def test_every_package_is_installed_with_its_constraints():
    steps = re.split(r"&&|\n", DOCKERFILE.replace("\\\n", " "))
    installs = [step for step in steps if "-m pip" in step and " install " in step]
    assert len(installs) == 3
    assert all("-c constraints.txt" in step or "--no-deps" in step for step in installs)
    assert "--no-build-isolation" in DOCKERFILE, "else the build's packages are not pinned"


# --- a run's name, and the server's log --------------------------------------------------------


def submitted(folder, name, *words):
    """Run submit.sh with a `fedhet` that prints its arguments."""
    fake = folder / "bin" / "fedhet"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "RUNS": str(folder / "runs")}
    return subprocess.run(
        ["sh", DOCKER / "submit.sh", name, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_of_a_new_name_is_submitted(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    done = submitted(tmp_path, "second", "felo", "--rounds", "5")
    assert (done.returncode, done.stdout) == (0, "submit felo --rounds 5 --out runs/second\n")


def test_a_second_run_of_a_name_is_refused_at_once(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    done = submitted(tmp_path, "first", "felo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "FEDHET_NAME" in done.stderr
    assert "resume=true" in done.stderr


def test_a_finished_run_is_not_to_be_resumed(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "summary.json").touch()
    done = submitted(tmp_path, "first", "felo")
    assert done.returncode == 1
    assert "FEDHET_NAME" in done.stderr
    assert "resume" not in done.stderr


def test_a_resumed_run_keeps_its_name(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    done = submitted(tmp_path, "first", "felo", "--set", "resume=true")
    assert done.stdout == "submit felo --set resume=true --out runs/first\n"


def test_the_servers_log_has_the_requests_that_failed_and_no_others():
    # uvicorn's own configuration, as Flower gives it, comes after the filter.
    script = f"""
import logging, logging.config, runpy
import flwr.superlink.cli as cli
from flwr.supercore.http_logging import get_uvicorn_log_config

def server():
    logging.config.dictConfig(get_uvicorn_log_config(logging.INFO))
    log = logging.getLogger("uvicorn.access")
    for path, status in (("/good", 200), ("/refused", 401), ("/failed", 500)):
        log.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", status)
    logging.getLogger("uvicorn.error").info("Uvicorn running")

cli.flower_superlink = server
runpy.run_path({str(DOCKER / "superlink.py")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    said = re.findall(r"/good|/refused|/failed|Uvicorn running", done.stdout + done.stderr)
    assert said == ["/refused", "/failed", "Uvicorn running"]
