"""The pages of runs, served on this machine alone while the runs go on.

A page asks for the status of its run every two seconds, and is loaded again after each round.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fedhet.base.disk import read_file
from fedhet.base.errors import FedhetError, SettingsError, StateError
from fedhet.report.comparison import runs_below
from fedhet.report.comparison_report import comparison_page
from fedhet.report.page import Live, render, render_run
from fedhet.report.run import Run, load_run
from fedhet.runs.directory import BASELINE
from fedhet.runs.progress import read_status
from fedhet.runs.records import NAN, Score
from fedhet.runs.units import natural, path_text

HOST = "127.0.0.1"
Version = tuple[int, ...]
MAX_PAGES = 32
"""How many runs' pages and records are kept in memory."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@contextlib.contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve the pages of the run or the runs in `folder` until the block ends; yield the address.

    Raises SettingsError if the port is taken, StateError if there is no such folder.
    """
    if not folder.is_dir():
        raise StateError(f"{folder}: no such folder")
    handler = type("Pages", (_Handler,), {"pages": Pages(folder)})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise SettingsError(f"'--port {port}': {error.strerror}; 0 takes any free port") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class Pages:
    """The pages by their paths: / lists the runs, /run/NAME is one, /compare?run=NAME several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.single = (folder / "config.toml").exists()
        """Whether the folder is itself a run's."""

    def page(self, path: str, query: Mapping[str, list[str]]) -> tuple[str, str]:
        """Return a page and its type. Raises KeyError if there is none, FedhetError, OSError."""
        head, _, name = path.lstrip("/").partition("/")
        if head == "status" and name:
            run = self._runs()[name]
            status = read_status(run)
            shown = status.as_json() | {"words": status.description, "recorded": _rounds(run)}
            return json.dumps(shown), "application/json"
        if head == "compare":
            runs = self._runs()
            paths = tuple(runs[each] for each in query.get("run", []))
            return _compared(paths, tuple(map(_version, paths))), "text/html"
        if head == "run" and name:
            return self._run(name), "text/html"
        if head:
            raise KeyError(path)
        if self.single:
            return self._run(*self._runs()), "text/html"
        listed = [_listed(name, path) for name, path in self._runs().items()]
        listed.sort(key=lambda run: natural(run["name"]))
        listed.sort(key=lambda run: run["started"], reverse=True)
        title = f"Runs in {path_text(Path(self._folder.name or self._folder))}/"
        return render("runs.html", title=title, runs=listed), "text/html"

    def _runs(self) -> dict[str, Path]:
        """Return the runs that exist now, by the names that the pages show and link."""
        if self.single:
            return {path_text(Path(self._folder.resolve().name)): self._folder}
        found = runs_below(self._folder)
        return {path_text(path.relative_to(self._folder)): path for path in found}

    def _run(self, name: str) -> str:
        path = self._runs()[name]
        rounds = _rounds(path)
        live = Live(f"/status/{quote(name)}", rounds, home=not self.single)
        if not rounds:
            return render("waiting.html", title=name, live=live)
        return _rendered(path, _version(path), live)


def _listed(name: str, path: Path) -> dict[str, Any]:
    """Return a run's line in the list of runs; `fault` is why it cannot be read."""
    line: dict[str, Any] = {
        "name": name, "link": f"/run/{quote(name)}", "method": "", "dataset": "", "stage": "",
        "done": 0, "planned": 0, "clients": 0, "mean": NAN, "worst": NAN, "bytes": NAN,
        "seconds": NAN, "seed": "", "started": "", "fault": "",
    }  # fmt: skip
    try:
        status = read_status(path)
        if not _rounds(path):
            return line | {"stage": status.stage, "planned": status.rounds}
        run = _loaded(path, _version(path))
    except (FedhetError, OSError) as error:
        return line | {"fault": str(error)}
    last, totals = run.last(*run.columns[0]) if run.columns else Score(), run.totals
    return line | {
        "method": run.method, "dataset": run.dataset, "stage": status.stage, "done": run.done,
        "planned": run.planned, "clients": len(run.clients), "mean": last.mean,
        "worst": last.worst, "bytes": float(totals["bytes_up"] + totals["bytes_down"]),
        "seconds": float(totals["seconds"]), "seed": "" if run.seed is None else str(run.seed),
        "started": run.origin.started,
    }  # fmt: skip


def _version(path: Path) -> Version:
    """Return what changes when the files do from which a run and its baseline are read."""
    names = ("config.toml", "run.json", "metrics.jsonl", "summary.json", "partition.json")
    found = [folder / name for folder in (path, path / BASELINE) for name in names]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in found)


@lru_cache(maxsize=MAX_PAGES)
def _loaded(path: Path, version: Version) -> Run:
    return load_run(path)


@lru_cache(maxsize=MAX_PAGES)
def _rendered(path: Path, version: Version, live: Live) -> str:
    return render_run(_loaded(path, version), live)


@lru_cache(maxsize=MAX_PAGES)
def _compared(paths: tuple[Path, ...], versions: tuple[Version, ...]) -> str:
    return comparison_page(paths)


def _rounds(path: Path) -> int:
    """Return the number of recorded rounds, counted by their lines. Raises StateError."""
    try:
        return read_file(path / "metrics.jsonl").count(b"\n")
    except FileNotFoundError:
        return 0


class _Handler(BaseHTTPRequestHandler):
    pages: Pages

    def do_GET(self) -> None:
        """Answer with a page, or with one line that says what is wrong.

        Only a browser that asks for this machine by its name is served: another site's name may
        lead a browser here, and would then read what is served.
        """
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "only for this machine", "text/plain")
            return
        asked = urlsplit(self.path)
        try:
            text, kind = self.pages.page(unquote(asked.path), parse_qs(asked.query))
        except KeyError:
            self._answer(HTTPStatus.NOT_FOUND, "no such page: / lists the runs", "text/plain")
        except (FedhetError, OSError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), "text/plain")
        else:
            self._answer(HTTPStatus.OK, text, kind)

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        sent = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in {**sent, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page asks every two seconds."""
