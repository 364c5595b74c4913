"""`sparsona watch`: the report of a run in a browser while it trains."""

from __future__ import annotations

import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from sparsona.core.errors import SparsonaError

HOST = "127.0.0.1"
EVERY = 5  # seconds between looks


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port on loopback.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def watch(path: str, port: int, opens: bool) -> None:
    """Show the report of RUN (a folder, a name in ./runs, or a comparison) in a browser while it trains.

    The page is served on this machine alone (127.0.0.1), to all of its users, and is made again as rounds are recorded.
    It only reads: watching changes nothing. Ctrl-C ends it, and not the run.

    \b
      sparsona run fedspa --rounds 200 --out runs/spa &
      sparsona watch spa --open
    """
    folder = _find(path)
    from sparsona.report.live import live_page

    live_page(folder)  # a folder that cannot be read is an error here, not in the browser
    server = make_server(folder, port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    click.echo(f"{address}  (Ctrl-C ends it)")
    if opens:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page of this folder's runs, on loopback.

    Args:
        folder: of a run or a comparison.
        port: 0 takes a free one.

    Returns:
        The server, which listens and does not answer before `serve_forever` is called.
    """
    from sparsona.report.live import LivePage, last_change, live_page

    lock = threading.Lock()
    kept: dict[float, LivePage] = {}

    def page() -> LivePage:
        with lock:  # several windows, one page
            changed = last_change(folder)
            if changed not in kept:
                kept.clear()
                kept[changed] = live_page(folder)
            return kept[changed]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            port = self.server.server_address[1]  # type: ignore[index]  # of an internet address
            # Another site's page could resolve a name of its own to this machine and read what is served here.
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                self.send_error(403, "only as 127.0.0.1 or localhost")
                return
            if self.path != "/":
                self.send_error(404)
                return
            try:
                found = page()
            except (SparsonaError, OSError) as error:  # in the middle of a write, or the folder is gone
                self.send_error(503, "the run cannot be read now", str(error))
                return
            body = found.html.encode()
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


def _find(path: str) -> Path:
    from sparsona.runs.listing import find_run

    return find_run(path)
