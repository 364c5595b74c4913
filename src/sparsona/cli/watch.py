"""`sparsona watch`: the report of a run in a browser while it trains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsona.cli.terminal import echo
from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

HOST = "127.0.0.1"
EVERY = 5  # seconds between refreshes, and the fewest between pages that are made


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--port", type=int, default=0, help="Port of this machine to listen on.  [a free one]")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def watch(path: str, port: int, opens: bool) -> None:
    """Show the report of RUN in a browser while it trains. RUN is a folder, a name in ./runs, or a comparison.

    The page is served on this machine alone (127.0.0.1), to all of its users, and is updated as rounds are recorded:
    the last page is shown while the next is made. Watching only reads the run. Ctrl-C ends the command, not the run.

    If the folder does not exist yet, the command waits for it.

    \b
      sparsona run fedspa --rounds 200 --out runs/spa &
      sparsona watch spa --open
    """
    if not 0 <= port <= 65535:
        raise SparsonaError(f"--port {port}", expected="0 to 65535; 0 takes a free one")
    places = _places(path)
    server = make_server(*places, port=port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    echo(f"{address}  (Ctrl-C ends it)")
    if not (place := _first(places)).exists():
        alike = get_close_matches(place.name, [one.name for one in place.parent.glob("*")], n=1)
        hint = f"; did you mean '{place.parent / alike[0]}'?" if alike else ""
        echo(f"waiting for '{place}', which is not there yet{hint}", err=True)
    if opens:
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()


def make_server(*places: Path, port: int = 0, every: float = EVERY) -> ThreadingHTTPServer:
    """A server of the page of a folder's runs, on loopback.

    Args:
        places: where the folder of a run or a comparison may be; the first that is there counts.
        port: 0 takes a free one.
        every: the fewest seconds between two pages that are made.

    Returns:
        The server, which listens and does not answer before `serve_forever` is called.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # here: they take 40 ms

    from sparsona.report.live import Pages

    pages = Pages(lambda: _first(places), every)
    pages.current()  # a folder that cannot be read is an error here, not in the browser

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):  # a reader that leaves in the middle of a page is no error
                super().handle()

        def do_GET(self) -> None:
            port = self.server.server_address[1]  # type: ignore[index]  # of an internet address
            # Another site's page could resolve a name of its own to this machine and read what is served here.
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                self.send_error(403, "only as 127.0.0.1 or localhost")
                return
            if self.path == "/favicon.ico":  # browsers ask for one, and show an error where there is none
                self.send_response(204)
                self.end_headers()
                return
            if self.path != "/":
                self.send_error(404)
                return
            try:
                found = pages.current()
            except (SparsonaError, OSError) as error:  # in the middle of a write, or the folder is gone
                self.send_error(503, "the run cannot be read now", str(error))
                return
            body = found.html.encode(errors="backslashreplace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if not found.is_final:
                self.send_header("Refresh", str(EVERY))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass  # the terminal is for the run

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise SparsonaError(
            f"port {port} cannot be listened on: {error.strerror or error}",
            expected="a free port",
            hint="leave --port out, and a free one is taken",
        ) from error
    server.daemon_threads = True
    return server


def _places(text: str) -> tuple[Path, ...]:
    """Where a run may be, as `find_run` looks for it; the last is where it is expected."""
    path = expand(text)
    below = Path("runs") / text
    return (path, below) if path.name == text else (path, below, path)


def _first(places: Sequence[Path]) -> Path:
    return next((place for place in places if place.exists()), places[-1])
