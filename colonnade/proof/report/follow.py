"""An HTTP server on the loopback interface for the report of a live run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from colonnade.errors import ColonnadeError, ConfigError
from colonnade.proof.report.page_of_run import run_page
from colonnade.proof.report.shell import page, policy, script_of

SECONDS = 5
"""Seconds after which the browser loads the report again."""


def serve(sources: Sequence[str | Path], port: int, say: Callable[[str], Any]) -> None:
    """Serve the report on the loopback interface until Ctrl-C. `say` is called with the address."""
    with make_server(sources, port) as server:
        say(f"http://127.0.0.1:{server.server_address[1]}/ (updated every {SECONDS} seconds; Ctrl-C stops the server)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


def make_server(sources: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """Make a server that writes the report again for each request."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site that was led here by a name of its own gets nothing.
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)
            elif self.path != "/":
                self.send_error(404)
            else:
                body = _page(sources).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        do_HEAD = do_GET

        def end_headers(self) -> None:
            for name, value in _guards():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the terminal belongs to the user."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror}). Give another port with --port, or --port 0 for any free "
            "port."
        ) from None


@cache
def _guards() -> tuple[tuple[str, str], ...]:
    """Headers of every answer: the content security policy of the page, and a ban on frames of other sites."""
    return (
        ("Content-Security-Policy", f"{policy(script_of('run'))}; frame-ancestors 'none'"),
        ("X-Frame-Options", "DENY"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
    )


def _page(sources: Sequence[str | Path]) -> str:
    try:
        return run_page(sources, refresh=SECONDS)
    except (ColonnadeError, OSError) as error:  # it may not have begun
        return page("No page yet", [str(error)], [], script_of("run"), refresh=SECONDS)
