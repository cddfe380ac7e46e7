"""Requests of the tests' own, signed by the standard library alone: `python -m tests.storage.objects.put`.

``--bucket`` makes the bucket; ``FOLDER PREFIX`` puts all files of a folder below a prefix.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import os
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

from tests.storage.objects.servers import BUCKET


def request(method, key, body=b"", headers=()):
    """Make one request; return (status, body, headers)."""
    host = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path, digest = (
        f"/{BUCKET}/{quote(key)}" if key else f"/{BUCKET}",
        hashlib.sha256(body).hexdigest(),
    )
    signed = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    lines = "".join(f"{name}:{text}\n" for name, text in signed.items())
    canonical = "\n".join((method, path, "", lines, ";".join(signed), digest))
    scope = f"{now[:8]}/{os.environ['AWS_REGION']}/s3/aws4_request"
    text = "\n".join(
        ("AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest())
    )
    secret = ("AWS4" + os.environ["AWS_SECRET_ACCESS_KEY"]).encode()
    for part in scope.split("/"):
        secret = hmac.new(secret, part.encode(), "sha256").digest()
    signature = hmac.new(secret, text.encode(), "sha256").hexdigest()
    credential = f"Credential={os.environ['AWS_ACCESS_KEY_ID']}/{scope}"
    signed["Authorization"] = (
        f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={';'.join(list(signed)[:3])}, "
        f"Signature={signature}"
    )
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request(method, path, body, {**signed, **dict(headers)})
    try:
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def put(key, body):
    status, answer, _ = request("PUT", key, body)
    assert status == 200, (key, status, answer)


def put_folder(folder, prefix):
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


if __name__ == "__main__":
    if sys.argv[1:] == ["--bucket"]:
        status, answer, _ = request("PUT", "")
        assert status in (200, 409), (status, answer)
    else:
        put_folder(*sys.argv[1:])
