"""An HTTP server that supports byte ranges, unlike Python's own, and counts what it sends."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class Sent:
    """What a server has sent: each request, and the total."""

    url: str = ""
    nbytes: int = 0
    requests: list[tuple[str, int, int]] = field(default_factory=list)  # (file, first byte, bytes)
    failures: int = 0  # how many more requests to refuse with a server error
    stopped: bool = False  # if set, a kept connection is cut at its next request
    lock: threading.Lock = field(default_factory=threading.Lock)


def handler(root: Path, sent: Sent, *, ranges: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            if sent.stopped:
                self.close_connection = True
                return
            with sent.lock:
                fails = sent.failures > 0
                sent.failures -= fails
            path = root / unquote(self.path).lstrip("/")
            if fails or not path.is_file():
                self.send_response(
                    HTTPStatus.INTERNAL_SERVER_ERROR if fails else HTTPStatus.NOT_FOUND
                )
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size, start, end = path.stat().st_size, 0, path.stat().st_size
            wanted = self.headers.get("Range", "") if ranges else ""
            if wanted.startswith("bytes="):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1 if last else size, size)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK)
            if ranges:
                self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            if body:
                with (
                    path.open("rb") as file,
                    suppress(ConnectionError),
                ):  # a client may read only the beginning
                    file.seek(start)
                    self.wfile.write(file.read(end - start))
                with sent.lock:
                    sent.nbytes += end - start
                    sent.requests.append((path.name, start, end - start))

    return Handler


@contextmanager
def range_server(root: Path, *, ranges: bool = True, host: str = "127.0.0.1", port: int = 0):
    """Serves a folder until the block ends. Yields the server's address and counters."""
    sent = Sent()
    server = ThreadingHTTPServer((host, port), handler(root, sent, ranges=ranges))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    sent.url = f"http://{host}:{server.server_address[1]}"
    try:
        yield sent
    finally:
        sent.stopped = True
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """`python range_server.py FOLDER HOST` prints its address, and then, for each input line, the
    number of bytes it has sent.
    """
    with range_server(Path(sys.argv[1]), host=sys.argv[2]) as sent:
        print(sent.url, flush=True)
        for _ in sys.stdin:
            print(sent.nbytes, flush=True)


if __name__ == "__main__":
    main()
