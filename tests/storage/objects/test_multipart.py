"""How requests are made that this package signs itself."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from urllib.parse import urlsplit

import pytest

from rankxform.storage.objects.access import Bucket
from rankxform.storage.objects.multipart import Uploads, _Answer, signed_headers

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
OBS = {**KEYS, "OBS_ENDPOINT": "https://obs.cn-north-4.myhuaweicloud.com"}


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("scheme", "environment", "endpoint", "base", "has_crc"),
    [
        ("s3", KEYS, "https://s3.us-east-1.amazonaws.com", "/b", True),
        ("s3", {**KEYS, "AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", "/b", True),
        ("s3", {**KEYS, "AWS_ENDPOINT_URL": "http://h:9/"}, "http://h:9", "/b", True),
        ("obs", OBS, "https://b.obs.cn-north-4.myhuaweicloud.com", "", False),
        ("s3", {**KEYS, "AWS_ENDPOINT_URL": OBS["OBS_ENDPOINT"]},
         "https://b.obs.cn-north-4.myhuaweicloud.com", "", False),
    ],
)  # fmt: skip
def test_where_requests_go(scheme, environment, endpoint, base, has_crc, home):
    access = Bucket(scheme, "b", environment).upload_access()
    assert (access.endpoint, access.base, access.has_crc) == (endpoint, base, has_crc)
    assert "s" not in repr(access).replace(endpoint, "").replace("UploadAccess", "")


def test_who_can_send_parts(home):
    role = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.2/x"}
    assert Bucket("s3", "b", KEYS).takes_parts and Bucket("obs", "b", OBS | KEYS).takes_parts
    assert Bucket("s3", "b", {"AWS_SKIP_SIGNATURE": "true"}).takes_parts
    assert not any(Bucket(scheme, "b", KEYS).takes_parts for scheme in ("gs", "az"))
    assert not Bucket("s3", "b", role).takes_parts, "its credentials are obstore's"


def test_a_part_goes_with_its_md5_where_the_store_knows_no_other(home, monkeypatch):
    asked = []

    def once(self, method, key, query, headers, body):
        asked.append(headers)
        return _Answer(200, {"etag": "e"}, b"")

    monkeypatch.setattr(Uploads, "_once", once)
    for scheme, environment in (("obs", OBS), ("s3", KEYS)):
        Uploads(Bucket(scheme, "b", environment)).send("k", "u", 1, b"abc")
    assert asked == [
        {"content-md5": b64encode(hashlib.md5(b"abc").digest()).decode()},
        {"x-amz-checksum-crc32": "NSRBwg=="},
    ]


def test_a_signature_covers_all_headers(home):
    """The signature is that of the algorithm's own description, worked out by other code."""
    access = Bucket("s3", "b", {**KEYS, "AWS_SESSION_TOKEN": "t"}).upload_access()
    headers = signed_headers(access, "PUT", "/b/k", "partNumber=1", {"x-amz-checksum-crc32": "c"})
    names = headers["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    assert sorted(names) == names == sorted({*headers} - {"authorization"})
    assert {"host", "x-amz-security-token", "x-amz-checksum-crc32"} <= {*names}
    assert headers["host"] == urlsplit(access.endpoint).netloc
    unsigned = {"AWS_SKIP_SIGNATURE": "true"}
    public = Bucket("s3", "b", unsigned).upload_access()
    assert "authorization" not in signed_headers(public, "GET", "/b/k", "", {})
