"""Logs of the processes of a deployment: plain lines, or JSON for other programs."""

import io
import json
import logging

import pytest
from rich.table import Table

from fedhet.base.errors import SettingsError
from fedhet.deployment.control import filter_log
from fedhet.runs import units


@pytest.fixture(autouse=True)
def restored():
    loggers = [logging.getLogger(name) for name in ("fedhet", "flwr")]
    before = [(each.level, [(h, h.formatter) for h in each.handlers]) for each in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = [handler for handler, _ in handlers]
        for handler, formatter in handlers:
            handler.setFormatter(formatter)


def table():
    found = Table("model", "mean")
    found.add_row("private", "0.5")
    return found


def test_every_line_is_an_object_and_submit_shows_its_message(monkeypatch):
    monkeypatch.setenv("FEDHET_LOG", "json")
    out = io.StringIO()
    console = units.console_for(out)
    console.print('round 1 of "3"', end="")
    console.print(": done")
    console.print(table())
    lines = out.getvalue().splitlines()
    entries = [json.loads(line) for line in lines]
    assert entries[0]["message"] == 'round 1 of "3": done'
    assert {entry["level"] for entry in entries} == {"INFO"}
    assert any("private" in entry["message"] for entry in entries)
    assert [*filter_log(lines)] == [entry["message"] for entry in entries]


def test_sites_warning_is_one_line_with_its_traceback(monkeypatch):
    monkeypatch.setenv("FEDHET_LOG", "json")
    units.configure_logs()
    handler, out = logging.getLogger("fedhet").handlers[0], io.StringIO()
    handler.setStream(out)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("fedhet").exception("it failed")
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"]) == ("ERROR", "fedhet")
    assert entry["message"].startswith("it failed\nTraceback")
    assert "ValueError: two\nlines" in entry["message"]


def test_level_hides_lower_levels(monkeypatch):
    monkeypatch.setenv("FEDHET_LOG_LEVEL", "warning")
    out = io.StringIO()
    units.console_for(out).print("round 1")
    assert out.getvalue() == ""
    assert not logging.getLogger("fedhet").isEnabledFor(logging.INFO)
    assert logging.getLogger("fedhet").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("variable", ["FEDHET_LOG", "FEDHET_LOG_LEVEL"])
def test_invalid_level_or_format_raises(monkeypatch, variable):
    monkeypatch.setenv(variable, "xml")
    with pytest.raises(SettingsError, match=variable):
        units.configure_logs()


def test_line_that_looks_like_json_is_unchanged():
    for line in ('{"time": ', '{"time": 1}', '{"time": "x", "message": ["a"]'):
        assert units.message_of(line) == line
