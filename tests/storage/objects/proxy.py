"""A proxy before an S3 server: it notes each request, and breaks answers as a test says."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

CUT, SHORT, BUSY, LOST, STALL, REVOKED = "cut", "short", "busy", "lost", "stall", "revoked"
_STALL_SECONDS = 3.0
_LEFT_OUT = {"transfer-encoding", "connection", "content-length", "date", "server"}
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>No.</Message></Error>"


class DroppedError(Exception):
    """Raised by `Proxy.before` for a request that is not to reach the store."""


class Noted(NamedTuple):
    method: str
    path: str
    start: int  # of the range that was asked for; 0 without one
    nbytes: int  # of the answer
    received: int = 0  # bytes of the request's body


class Proxy:
    """The state of a proxy. rules: pairs of an expression for paths, and what becomes of the next
    answer to a GET of such a one; one that begins with ^ is for methods and paths. before: called
    with the method and path of a request that is to be passed on. at_random: returns what becomes
    of an answer that no rule is for."""

    def __init__(self, port):
        self.to, self.noted, self.rules, self.lock = port, [], [], threading.Lock()
        self.on_get = lambda path: None
        self.before, self.at_random = lambda method, path: None, lambda: None
        self.delay, self.in_flight, self.peak = 0.0, 0, 0  # seconds of each; GETs at a time

    def rule_for(self, method, path):
        with self.lock:
            for number, (expression, action) in enumerate(self.rules):
                is_any = expression.startswith("^")
                text = f"{method} {path}" if is_any else path
                if (is_any or method == "GET") and re.search(expression, text):
                    del self.rules[number]
                    return action
            return self.at_random()

    def bytes_of(self, expression):
        return sum(
            n.nbytes for n in self.noted if n.method == "GET" and re.search(expression, n.path)
        )


def _handler(proxy):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                proxy.before(self.command, self.path)
            except DroppedError:
                self.close_connection = True
                return
            if self.command == "GET":
                proxy.on_get(self.path)
            with proxy.lock:
                proxy.in_flight += 1
                proxy.peak = max(proxy.peak, proxy.in_flight)
            try:
                time.sleep(proxy.delay)
                self.pass_on(body)
            finally:
                proxy.in_flight -= 1

        def pass_on(self, body):
            action = proxy.rule_for(self.command, self.path)
            if action == BUSY:
                self.answer(503, {}, _ERROR.format("SlowDown").encode())
                return
            if action == REVOKED:
                self.answer(400, {}, _ERROR.format("ExpiredToken").encode())
                return
            if action == STALL:
                time.sleep(_STALL_SECONDS)
            connection = HTTPConnection("127.0.0.1", proxy.to, timeout=60)
            try:
                connection.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, text in self.headers.items():
                    connection.putheader(name, text)
                connection.endheaders(body)
                got = connection.getresponse()
                data, headers = got.read(), dict(got.getheaders())
            finally:
                connection.close()
            start = re.search(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-")
            noted = Noted(self.command, self.path, int(start[1]), len(data), len(body))
            proxy.noted.append(noted)
            if action == LOST:  # the store has done it, and nobody hears of that
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.answer(got.status, headers, data, action)

        def answer(self, status, headers, data, action=None):
            sent = data[: len(data) // 2] if action in (CUT, SHORT) else data
            length = len(sent) if action == SHORT else len(data)
            if self.command == "HEAD":
                length = headers.get("Content-Length", 0)
            self.send_response(status)
            for name, text in headers.items():
                if name.lower() not in _LEFT_OUT:
                    self.send_header(name, text)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(sent if self.command != "HEAD" else b"")
            if action == CUT:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    return Handler


@contextmanager
def before(port):
    """Run a proxy before the server at a port; yield its state, with its own port."""
    proxy = Proxy(port)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
