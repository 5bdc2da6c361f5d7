"""CI workflows: actions with pinned versions, few permissions, and existing make targets."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ALLOWED_SKIPS, refuse_skip

ROOT = Path(__file__).parent.parent
CONFTEST = ROOT / "tests" / "conftest.py"
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
WRITES = {  # the rights beyond reading, by workflow and job
    "docs": {"publish": {"pages", "id-token"}},
    "image": {},
    "release": {"pypi": {"id-token"}, "image": {"packages"}},
    "tests": {},
    "weekly": {},
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_pinned_with_minimal_permissions(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        wide = {right for right, how in job.get("permissions", {}).items() if how == "write"}
        assert wide == WRITES[path.stem].get(name, set()), name
        assert "uses" in job or "timeout-minutes" in job, name
        for step in job.get("steps", []):
            if action := step.get("uses"):
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action), action
            if "checkout" in step.get("uses", ""):
                assert step["with"] == {"persist-credentials": False}, name
            assert "${{" not in step.get("run", ""), "what others wrote is no part of a script"


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(path.read_text() for path in WORKFLOWS)
    (matrix,) = re.findall(r"target: \[(.*)\]", text)
    named = {*re.findall(r"run: make ([a-z-]+)", text), *matrix.split(", ")}
    assert {"test", "docs", "slow"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("reason", "ci", "outcome"),
    [
        ("Skipped: needs a GPU", "true", "skipped"),
        ("Skipped: no network namespaces here: not permitted", "true", "skipped"),
        ("Skipped: could not import 'timm'", "true", "failed"),
        ("Skipped: could not import 'timm'", "", "skipped"),
    ],
)
def test_skipped_test_fails_in_ci_without_a_listed_reason(reason, ci, outcome, monkeypatch):
    monkeypatch.setenv("CI", ci)
    where = ("test_x.py", 1, reason)
    for report in (
        pytest.TestReport("test_x", ("test_x.py", 1, "test_x"), {}, "skipped", where, "call"),
        pytest.CollectReport("test_x.py", "skipped", where, []),
    ):
        refuse_skip(report)
        assert report.outcome == outcome
        if outcome == "failed":
            assert "skipped: could not import 'timm'. With CI set" in report.longreprtext


def test_every_allowed_skip_is_used():
    text = "\n".join(path.read_text() for path in ROOT.glob("tests/*.py") if path != CONFTEST)
    assert [reason for reason in ALLOWED_SKIPS if reason not in text] == []


def scripted(tmp_path, *, root=True, found=(), apt="exit 0"):
    """Run .ci/run where only `found` is installed, and return the status and the output."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "xargs", "echo"):
        (programs / name).symlink_to(shutil.which(name))
    scripts = dict.fromkeys(found, "exit 0") | {
        "id": f"echo {0 if root else 1000}",
        "apt-get": f'echo "apt-get $*"\n{apt}',
        "make": 'echo "make $* CI=$CI"',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!{programs}/bash\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env={"PATH": str(programs)}, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


ALL_PROGRAMS = ("chromium", "g++", "ip")


def test_ci_installs_nothing_that_is_there(tmp_path):
    assert scripted(tmp_path, root=False, found=ALL_PROGRAMS) == (0, "make test CI=true\n", "")


def test_ci_installs_what_is_missing(tmp_path):
    chromium = tmp_path / "bin" / "chromium"
    installs = f'[ "$1" = update ] || {shutil.which("cp")} {tmp_path}/bin/ip {chromium}'
    code, out, err = scripted(tmp_path, found=("g++", "ip"), apt=installs)
    assert (code, err) == (0, "")
    update, install, made = out.splitlines()
    assert update.startswith("apt-get update")
    assert install.startswith("apt-get install")
    assert install.endswith(" chromium")
    assert made == "make test CI=true"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": False}, "The tests need the Debian packages: chromium g++ iproute2. Install"),
        ({"apt": "exit 100"}, "iproute2. apt-get could not install them"),
        ({"apt": "exit 0"}, "still missing: chromium g++ iproute2"),
    ],
)
def test_ci_ends_with_the_names_of_what_it_cannot_install(tmp_path, options, message):
    code, out, err = scripted(tmp_path, **options)
    assert (code, err.count("\n")) == (1, 1)
    assert message in err
    assert "make" not in out
