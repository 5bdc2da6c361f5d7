"""Local web server for HTML reports on runs in progress (`fedhet watch`).

A report polls the status of its run every two seconds, and is reloaded after each round.
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
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fedhet.base.disk import read_file
from fedhet.base.errors import FedhetError, SettingsError, StateError
from fedhet.report.comparison import find_runs
from fedhet.report.comparison_report import comparison_html
from fedhet.report.page import Live, render, render_run
from fedhet.report.run import Run, load_run
from fedhet.runs.directory import BASELINE
from fedhet.runs.progress import Status, read_status
from fedhet.runs.units import natural, path_text

HOST = "127.0.0.1"
Version = tuple[int, ...]
CACHE_SIZE = 32
"""Number of runs, reports and comparisons to keep in memory."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@contextlib.contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve the reports of a run, or of all runs in a directory, until the block ends.

    Yields the address. Raises SettingsError if the port cannot be used, and StateError if the
    directory does not exist.
    """
    if not folder.is_dir():
        raise StateError(f"directory {folder} not found")
    handler = type("Pages", (_Handler,), {"pages": Pages(folder)})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        fault = f"--port: cannot listen on port {port} ({error.strerror})"
        raise SettingsError(f"{fault}. Use --port 0 for any free port.") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class Pages:
    """Content of the server's pages.

    The pages are the list of runs (/), a run's report (/run/NAME) and status (/status/NAME), and a
    comparison of runs (/compare?run=NAME).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.single = (folder / "config.toml").exists()
        """Whether the directory is itself a run directory."""

    def page(self, path: str, query: Mapping[str, list[str]]) -> tuple[str, str]:
        """Return the content of a page and its MIME type.

        Raises KeyError if the page does not exist, and FedhetError or OSError if the page
        cannot be created.
        """
        section, _, name = path.lstrip("/").partition("/")
        if section == "status" and name:
            run = self._runs()[name]
            status = read_status(run)
            content = status.as_json() | {"words": status.description, "recorded": _rounds(run)}
            return json.dumps(content), "application/json"
        if section == "compare":
            runs = self._runs()
            paths = tuple(runs[each] for each in query.get("run", []))
            return _compared(paths, tuple(map(_version, paths))), "text/html"
        if section == "run" and name:
            return self._run(name), "text/html"
        if section:
            raise KeyError(path)
        if self.single:
            return self._run(*self._runs()), "text/html"
        listed = [_listed(name, path) for name, path in self._runs().items()]
        listed.sort(key=lambda each: natural(each.name))
        listed.sort(key=lambda each: each.run.origin.started if each.run else "", reverse=True)
        title = f"Runs in {path_text(Path(self._folder.name or self._folder))}/"
        return render("runs.html", title=title, listed=listed), "text/html"

    def _runs(self) -> dict[str, Path]:
        """Return the current runs by display name."""
        if self.single:
            return {path_text(Path(self._folder.resolve().name)): self._folder}
        return {path_text(path.relative_to(self._folder)): path for path in find_runs(self._folder)}

    def _run(self, name: str) -> str:
        path = self._runs()[name]
        rounds = _rounds(path)
        live = Live(f"/status/{quote(name)}", rounds, home=not self.single)
        if not rounds:
            return render("waiting.html", title=name, live=live)
        return _rendered(path, _version(path), live)


class Listed(NamedTuple):
    """Run in the list of runs, or an error if the run is unreadable."""

    name: str
    status: Status | None = None
    run: Run | None = None
    """Results, or None before the end of the first round."""
    fault: str = ""


def _listed(name: str, path: Path) -> Listed:
    try:
        status = read_status(path)
        return Listed(name, status, _loaded(path, _version(path)) if _rounds(path) else None)
    except (FedhetError, OSError) as error:
        return Listed(name, fault=str(error))


def _version(path: Path) -> Version:
    """Return the modification times of the files of a run and of its baseline, as a cache key."""
    names = (
        "config.toml", "run.json", "metrics.jsonl", "summary.json", "partition.json",
        "confusion.json", "generated.json",
    )  # fmt: skip
    files = [directory / name for directory in (path, path / BASELINE) for name in names]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


@lru_cache(maxsize=CACHE_SIZE)
def _loaded(path: Path, version: Version) -> Run:
    return load_run(path)


@lru_cache(maxsize=CACHE_SIZE)
def _rendered(path: Path, version: Version, live: Live) -> str:
    return render_run(_loaded(path, version), live)


@lru_cache(maxsize=CACHE_SIZE)
def _compared(paths: tuple[Path, ...], versions: tuple[Version, ...]) -> str:
    return comparison_html(paths)


def _rounds(path: Path) -> int:
    """Return the number of recorded rounds, without parsing the records.

    Raises StateError if the records cannot be read.
    """
    try:
        return read_file(path / "metrics.jsonl").count(b"\n")
    except FileNotFoundError:
        return 0


class _Handler(BaseHTTPRequestHandler):
    pages: Pages

    def do_GET(self) -> None:
        """Respond with a page or an error message.

        Rejects requests for other host names, because a website could otherwise read the reports
        through a host name that resolves to this machine (DNS rebinding).
        """
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self._respond(HTTPStatus.FORBIDDEN, "only available on this machine", "text/plain")
            return
        url = urlsplit(self.path)
        try:
            text, kind = self.pages.page(unquote(url.path), parse_qs(url.query))
        except KeyError:
            message = "page not found; see / for the list of runs"
            self._respond(HTTPStatus.NOT_FOUND, message, "text/plain")
        except (FedhetError, OSError) as error:
            self._respond(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), "text/plain")
        else:
            self._respond(HTTPStatus.OK, text, kind)

    def _respond(self, status: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in {**headers, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the access log, because each report sends a request every two seconds."""
