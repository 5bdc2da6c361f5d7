"""The status of a run in progress: in a file, on the command line, and in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from federation import run, small
from interruption import until
from synthetic import lines_of, make
from test_page_browser import BROWSER, browser  # noqa: F401

from fedhet.base.errors import SettingsError, StateError
from fedhet.report import watch
from fedhet.report.watch import serve
from fedhet.runs.directory import lock
from fedhet.runs.log import Watcher
from fedhet.runs.progress import read_status
from fedhet.server.members import ClientHealth


class Looking(Watcher):
    """Reads the status of its run, like another process, after clients of round 2 are called."""

    def __init__(self, directory):
        self.directory, self.seen = directory, []

    def client_answered(self, client, error):
        if client == "client-2" and not self.seen:
            until(lambda: (self.directory / "status.json").exists(), 5.0)
            until(lambda: answered(read_status(self.directory)), 20.0)
            self.seen.append(read_status(self.directory))


def answered(status):
    """Return whether two clients have replied; the status file is written with a delay."""
    return sum(client.state == "done" for client in status.clients) >= 2


def test_status_shows_replies_and_completion(tmp_path):
    looking = Looking(tmp_path / "run")
    summary = run(small("fedavg"), tmp_path / "run", [looking])
    before, after = looking.seen[0], read_status(tmp_path / "run")
    assert (before.stage, before.round, before.rounds) == ("running", 1, 2)
    states = {client.name: client.state for client in before.clients}
    assert states["client-0"] == states["client-1"] == "done"
    assert states["client-3"] in ("waiting", "training")
    assert (after.stage, after.round, len(after.clients)) == ("finished", 2, 4)
    assert after.bytes == summary["bytes_up"] + summary["bytes_down"]
    assert after.mean == pytest.approx(summary["accuracy"]["common"]["global"]["mean"])
    assert min(client.seconds for client in after.clients) > 0  # clients of a test take 20 ms
    for client in after.clients:
        mine = summary["accuracy"]["common"]["global"]["per_client"][client.name]
        assert (client.accuracy, client.line) == (pytest.approx(mine), "round 2: replied")


def test_killed_run_is_shown_as_stopped(tmp_path):
    command = "run fedavg --clients 2 --rounds 500 --backend inline --out run".split()
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    started = subprocess.Popen(
        [sys.executable, "-m", "fedhet", *command, "--set", "data.max-samples=200"],
        cwd=tmp_path, env=where, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: (tmp_path / "run/status.json").exists(), 120.0)
        until(lambda: read_status(tmp_path / "run").stage == "running", 60.0)
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert read_status(tmp_path / "run").stage == "stopped"


def test_backing_off_and_excluded_clients_are_distinguished():
    health = ClientHealth(max_refusals=1, max_silences=1, notice=lambda text: None)
    health.update(1, {"a": "refused", "b": "silent", "c": None}, ["a", "b", "c"])
    found = [health.exclusion_reason(2, name) for name in "abc"]
    assert found == ["excluded", "backing off", ""]


def test_damaged_status_raises(tmp_path):
    path = make(tmp_path / "run")
    (path / "status.json").write_text('{"round": "many"}')
    with pytest.raises(StateError, match=r"status\.json: round"):
        read_status(path)
    with pytest.raises(StateError):
        read_status(tmp_path)


def test_status_shows_the_newest_run(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    assert call("status")[0] == 2
    make(Path("runs/old"))
    os.utime("runs/old/config.toml", (1, 1))
    make(Path("runs/new"))
    code, said, _ = call("status", "--json")
    assert code == 0
    assert json.loads(said)["directory"] == "runs/new"
    assert "in runs/old" in call("status", "runs/old")[1]
    make(Path("seeds/seed-1"))
    assert "in seeds/seed-1" in call("status", "seeds")[1]
    Path("empty").mkdir()
    assert "empty: no run found" in call("status", "empty")[2]


def test_servers_status_needs_its_authority(call):
    for words, says in (
        (["server:9093"], "--ca"),
        (["server", "--ca", "ca.crt"], "expected HOST:PORT"),
    ):
        code, _, fault = call("status", *words)
        assert (code, says in fault) == (2, True), fault


@pytest.fixture
def runs(tmp_path):
    for name, method, seed in (("felo-0", "felo", 0), ("felo-1", "felo", 1), ("a b", "local", 0)):
        make(tmp_path / "runs" / name, method=method, seed=seed)
    return tmp_path / "runs"


def get(address, path, host=None):
    place = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=30)
    connection.request("GET", path, headers={"Host": host or place})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply


def test_only_existing_runs_are_served(runs, tmp_path):
    (tmp_path / "secret").write_text("secret")
    with serve(runs) as address:
        assert address.startswith("http://127.0.0.1:")
        status, page, reply = get(address, "/")
        assert status == 200
        assert all(name in page for name in ("felo-0", "felo-1", "a b"))
        assert reply.headers["Content-Type"].startswith("text/html")
        assert get(address, "/run/a%20b")[0] == 200
        assert get(address, "/compare?run=felo-0&run=a+b")[0] == 200
        assert json.loads(get(address, "/status/felo-1")[1])["stage"] == "finished"
        for path in ("/run/nobody", "/run/../secret", "/run/%2e%2e%2fsecret", "/felo-0/config.toml",
                     "/compare?run=%2e%2e", "/status/", "/run//etc"):  # fmt: skip
            status, said, _ = get(address, path)
            assert status == 404, path
            assert "secret" not in said
        assert get(address, "/compare")[0] == 500
        assert get(address, "/", host="evil.example:80")[0] == 403
        make(runs / "later")
        assert "later" in get(address, "/")[1]


def test_page_is_rebuilt_only_if_its_run_changed(runs, monkeypatch):
    made = []
    monkeypatch.setattr(
        watch, "render_run", lambda run, live: (made.append(run), str(run.baseline is None))[1]
    )
    monkeypatch.setattr(watch, "comparison_html", lambda paths: str(made.append(paths)))
    with serve(runs) as address:
        assert [get(address, "/run/felo-0")[1] for _ in range(3)] == ["True"] * 3
        assert len(made) == 1
        make(runs / "felo-0" / "baseline", method="local")
        assert [get(address, "/run/felo-0")[1] for _ in range(3)] == ["False"] * 3
        assert len(made) == 2
        for _ in range(3):
            get(address, "/compare?run=felo-0&run=felo-1")
        assert len(made) == 3
        os.utime(runs / "felo-1" / "metrics.jsonl", (1, 1))
        get(address, "/compare?run=felo-0&run=felo-1")
        assert len(made) == 4


def test_run_that_cannot_be_read_is_listed_with_the_reason(runs):
    (runs / "felo-0" / "metrics.jsonl").write_text("{}\n{}\n")
    with serve(runs) as address:
        assert "metrics.jsonl: line 1" in get(address, "/")[1]


def test_occupied_port_raises(runs):
    with serve(runs) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(SettingsError, match=str(port)), serve(runs, port):
            pass


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_page_follows_its_run(runs, browser):  # noqa: F811
    path = runs / "felo-0"
    rows = lines_of(path)
    (path / "summary.json").unlink()
    (path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (path / "status.json").write_text(
        json.dumps(
            {
                "stage": "running", "round": 2, "rounds": len(rows),
                "clients": [{"name": "<b>ward</b>", "state": "training", "line": "round 1"}],
            }
        )
    )  # fmt: skip
    faults = []
    with contextlib.closing(lock(path)), serve(runs) as address:  # as its process would
        tab = browser.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("console", lambda said: faults.append(said.text))
        tab.goto(f"{address}run/felo-0")
        tab.locator("#live .words", has_text="running: round 2 of").wait_for()
        assert tab.inner_text("#live .sites") == "<b>ward</b>: training"
        assert "unfinished: 1 of" in tab.inner_text("body")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(rows[1]) + "\n")
        tab.get_by_text("unfinished: 2 of").wait_for(timeout=15000)
        tab.close()
    assert faults == []


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_runs_are_filtered_selected_and_compared(runs, browser):  # noqa: F811
    with serve(runs) as address:
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        tab.goto(address)
        shown = "tbody tr:visible"
        assert tab.locator(shown).count() == 3
        assert tab.is_disabled("[type=submit]")
        tab.fill("#filter", "felo")
        assert tab.locator(shown).count() == 2
        for box in tab.locator("tbody tr:visible [name=run]").all():
            box.check()
        tab.click("text=Compare 2 runs")
        tab.wait_for_load_state()
        assert "Comparison" in tab.inner_text("h1")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        tab.close()


def test_run_whose_name_is_not_utf_8_is_listed_compared_and_reported(tmp_path, call):
    """A directory name consists of bytes, and may come from a system with another encoding."""
    for name in (b"r\xff", b"s\xe9t"):
        os.rename(make(tmp_path / "run"), os.fsencode(tmp_path) + b"/" + name)
    pages = watch.Pages(tmp_path)
    assert sorted(pages._runs()) == ["r\\xff", "s\\xe9t"]
    pages.page("/", {})[0].encode()
    for page in ("/run/r\\xff", "/status/s\\xe9t"):
        pages.page(page, {})[0].encode("utf-8", "replace")
    pages.page("/compare", {"run": ["r\\xff", "s\\xe9t"]})[0].encode()
    single = watch.Pages(tmp_path / "r\udcff")
    assert single.page("/", {})[0]
    out = tmp_path / "compare"
    for words in (
        ("compare", tmp_path / "r\udcff", tmp_path / "s\udce9t", "--out", out, "--csv", "--latex"),
        ("report", tmp_path / "r\udcff"),
        ("status", tmp_path / "r\udcff"),
    ):
        status, _, err = call(*words)
        assert (status, err) == (0, "")
    assert "r\\xff" in json.dumps(json.loads((out / "compare.json").read_text())).replace(
        "\\\\", "\\"
    )
