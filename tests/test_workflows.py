"""CI workflows: actions with pinned versions, few permissions, and existing make targets."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
WRITES = {  # the rights beyond reading, by workflow and job
    "docs": {"publish": {"pages", "id-token"}},
    "image": {},
    "release": {"pypi": {"id-token"}, "image": {"packages"}},
    "tests": {},
    "weekly": {},
}


def test_every_workflow_is_known():
    assert {path.stem for path in WORKFLOWS} == WRITES.keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_has_few_rights(path):
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


def test_the_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(path.read_text() for path in WORKFLOWS)
    (matrix,) = re.findall(r"target: \[(.*)\]", text)
    named = {*re.findall(r"run: make ([a-z-]+)", text), *matrix.split(", ")}
    assert {"test", "docs", "slow"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tests_run_on_every_python_that_the_project_takes():
    workflow = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert matrix == ["3.11", "3.12", "3.13", "3.14"]
    assert f'requires-python = ">={matrix[0]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_a_form_is_well_formed(path):
    content = yaml.safe_load(path.read_text())
    for part in content.get("body", []) if path.parent.name == "ISSUE_TEMPLATE" else []:
        assert part["type"] in {"markdown", "textarea", "dropdown", "checkboxes", "input"}
        assert part["type"] == "markdown" or part["id"]
        assert part["attributes"]
