"""Buckets: addresses, endpoints, credentials, and clients that make requests to them.

Everything is found where other tools find it: AWS_* variables (and what MindFormers and ModelArts
call S3_* and OBS_*), then the profile of ~/.aws. A key is never in a message: errors are made of
what a server says, and of names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from rankxform.errors import UsageError
from rankxform.storage.store import ACCESS
from rankxform.values import NamedTuple

from .errors import translated

S3, OBS = "s3", "obs"
_ADDRESS = re.compile(
    r"(?P<scheme>s3|obs|gs|az)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?:/(?P<key>.*))?"
)
_OBS_HOST = re.compile(r"obs\.(?P<region>[a-z0-9-]+)\.myhuaweicloud\.(com|eu)")
_VARIABLES = {
    "access_key_id": ("AWS_ACCESS_KEY_ID", "S3_ACCESS_KEY_ID", "OBS_ACCESS_KEY_ID"),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY", "S3_SECRET_ACCESS_KEY", "OBS_SECRET_ACCESS_KEY"),
    "session_token": ("AWS_SESSION_TOKEN", "S3_SECURITY_TOKEN", "OBS_SECURITY_TOKEN"),
}
_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT", "OBS_ENDPOINT"
_REGIONS = "AWS_REGION", "AWS_DEFAULT_REGION", "OBS_REGION"
_STATED = {
    "endpoint": _ENDPOINTS[0], "region": _REGIONS[0], "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY", "session_token": "AWS_SESSION_TOKEN",
    "skip_signature": "AWS_SKIP_SIGNATURE",
    "virtual_hosted_style_request": "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
}  # fmt: skip
"""By the name of an option the variable that it stands for."""
_OTHER_CREDENTIALS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
"""Variables by which obstore finds credentials itself."""
_PROFILE_KEYS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}
_TRUE = "1", "true", "yes", "on"

_CONNECT, _SILENCE, _WHOLE = "5s", "20s", "120s"
"""How long a connection, a pause within an answer, and a whole request may take."""
_PATIENT, _QUICK = (12, 0.5, 15, 300), (1, 0.1, 0.5, 4)
"""How often requests are made again, after how many seconds at first and at most, and for how many
in all: those of work, and the first ones of a process, which fail at once where an address or a key
is wrong."""


def library() -> Any:
    """Return obstore. Raises UsageError where it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise UsageError(
            "addresses of object storage need obstore, which is not installed",
            "pip install 'rankxform[objects]'",
        ) from None
    return obstore


class ObjectAddress(NamedTuple):
    """Where an object is, or a prefix of several: without a slash at its end."""

    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, address: str) -> ObjectAddress:
        """Read an address. Raises UsageError.

        >>> ObjectAddress.of("s3://models/run/7/")
        ObjectAddress(scheme='s3', bucket='models', key='run/7')
        """
        match = _ADDRESS.fullmatch(address)
        key = (match["key"] or "").strip("/") if match else ""
        if match is None or "//" in key or {".", ".."} & {*key.split("/")}:
            where = "" if "@" in address else address  # somebody's keys may stand before it
            raise UsageError("this is no address of a bucket", "s3://BUCKET/PREFIX", where=where)
        return cls(match["scheme"], match["bucket"], key)


class UploadAccess(NamedTuple):
    """How requests are made that this package signs itself: to which server, with which keys.

    base: what stands before a key in a path. has_crc: whether the store takes the CRC-32 of what is
    sent; others take its MD5.
    """

    endpoint: str
    base: str
    region: str
    key: str
    secret: str
    token: str
    has_crc: bool

    def __repr__(self) -> str:
        return f"UploadAccess({self.endpoint})"


def _first_of(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    texts = (environment.get(name, "").strip() for name in names)
    return next(filter(None, texts), None)


def _profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the chosen profile of ~/.aws states; {} if there is none. Raises UsageError."""
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    entries: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", f"profile {name}" if name else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name or "default"),
    ):
        path = Path(environment.get(variable) or Path.home() / ".aws" / file)
        parser = ConfigParser(interpolation=None, default_section="")
        try:
            parser.read(path)
        except (ConfigError, UnicodeDecodeError, OSError) as error:
            text = type(error).__name__  # what is in the file is not repeated
            raise UsageError(f"cannot be read ({text})", "correct it", where=path) from None
        if parser.has_section(section):
            entries |= dict(parser[section])
    if name and not entries:
        raise UsageError(
            f"AWS_PROFILE is {name}, and neither ~/.aws/config nor credentials has it",
            "correct AWS_PROFILE",
            "unset AWS_PROFILE",
        )
    return entries


def _host_of(endpoint: str) -> str:
    """Return the host of an endpoint. Raises UsageError."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in ("http", "https") or port == 0:
        raise UsageError(
            "the endpoint of object storage is no URL", "AWS_ENDPOINT_URL=https://HOST"
        )
    return host


class Bucket:
    """A bucket, and clients of it; one of each in a process."""

    def __init__(
        self,
        scheme: str,
        name: str,
        environment: Mapping[str, str],
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """options: of the client, beside what the environment says. Raises UsageError where nothing
        says how to reach it."""
        self.scheme, self.name = scheme, name
        self._options: dict[str, Any] = {}
        self._clients: dict[bool, Any] = {}
        self._process = os.getpid()
        self.listed: dict[str, Any] = {}  # by key what the last listing said of an object
        self.writes = 0  # of this process, which change what is listed
        self.is_reached: bool | None = None  # by this process; None until it is asked
        self._endpoint, self._is_of_obs = "", scheme == OBS
        emulator = environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower()
        self._is_emulated = scheme == "az" and emulator in _TRUE
        if scheme in (S3, OBS):
            self._read_s3(environment)
        self._options |= options

    @classmethod
    def of(cls, address: ObjectAddress) -> Bucket:
        """Return the bucket of an address, as this process reaches it."""
        return _bucket(address.scheme, address.bucket, tuple(sorted(ACCESS.options.items())))

    def _read_s3(self, environment: Mapping[str, str]) -> None:
        """Work out endpoint, region and credentials."""
        profile = _profile(environment)
        keys = {name: _first_of(environment, variables) for name, variables in _VARIABLES.items()}
        if keys["access_key_id"] is None:
            keys = {name: profile.get(entry) for name, entry in _PROFILE_KEYS.items()}
        unsigned = environment.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE
        has_keys = keys["access_key_id"] and keys["secret_access_key"]
        if not has_keys and not unsigned and not _first_of(environment, _OTHER_CREDENTIALS):
            raise UsageError(
                "there are no credentials for it",
                "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...",
                "export AWS_PROFILE=NAME, one of ~/.aws/credentials",
                "export AWS_SKIP_SIGNATURE=true, if it is public",
                where=f"{self.scheme}://{self.name}",
            )
        endpoint = _first_of(environment, _ENDPOINTS) or profile.get("endpoint_url") or ""
        region = _first_of(environment, _REGIONS) or profile.get("region")
        if endpoint and "://" not in endpoint:
            endpoint = f"https://{endpoint}"
        if self.scheme == OBS and not endpoint:
            if region is None:
                raise UsageError(
                    "nothing says in which region it is",
                    "export OBS_ENDPOINT=https://obs.REGION.myhuaweicloud.com",
                    where=f"{self.scheme}://{self.name}",
                )
            endpoint = f"https://obs.{region}.myhuaweicloud.com"
        host = _host_of(endpoint) if endpoint else ""
        of_obs = _OBS_HOST.fullmatch(host.removeprefix(f"{self.name}."))
        if of_obs is not None:  # OBS takes requests to a bucket's own host alone
            region = region or of_obs["region"]
            if not host.startswith(f"{self.name}."):
                endpoint = endpoint.replace(host, f"{self.name}.{host}", 1)
        text = environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower()
        is_virtual = of_obs is not None or text in _TRUE
        self._is_of_obs |= of_obs is not None
        self._endpoint = endpoint
        self._options = {
            **{name: value for name, value in keys.items() if value},
            "region": region or "us-east-1",
            "virtual_hosted_style_request": is_virtual,
            # One request for many objects is not answered alike by all stores.
            "disable_bulk_delete": True,
            **({"endpoint": endpoint} if endpoint else {}),
            **({"skip_signature": True} if unsigned else {}),
        }

    @property
    def takes_parts(self) -> bool:
        """Whether this package can sign what sends parts: with keys, and not a role's."""
        has_keys = self._options.get("access_key_id") or self._options.get("skip_signature")
        return self.scheme in (S3, OBS) and bool(has_keys)

    def upload_access(self) -> UploadAccess:
        """Return how parts are sent, where that can be."""
        options = self._options
        key, secret, token = (str(options.get(name, "")) for name in _VARIABLES)
        region, is_virtual = options["region"], options["virtual_hosted_style_request"]
        endpoint = options.get("endpoint") or f"https://s3.{region}.amazonaws.com"
        base = "" if is_virtual and options.get("endpoint") else f"/{self.name}"
        has_crc = not self._is_of_obs
        return UploadAccess(endpoint.rstrip("/"), base, region, key, secret, token, has_crc)

    def client(self, *, patient: bool) -> Any:
        """Return what obstore's functions take, with retries for work, or for a first contact."""
        if os.getpid() != self._process:
            raise UsageError(
                "object storage was used before this process was forked, and cannot be here",
                "multiprocessing.get_context('spawn')",
            )
        if patient not in self._clients:
            self._clients[patient] = self._opened(_PATIENT if patient else _QUICK)
        return self._clients[patient]

    def _opened(self, retries: tuple[float, ...]) -> Any:
        stores = library().store
        of_client = {
            "allow_http": self._endpoint.startswith("http://") or self._is_emulated,
            "connect_timeout": _CONNECT, "read_timeout": _SILENCE, "timeout": _WHOLE,
        }  # fmt: skip
        count, first, longest, total = retries
        backoff = {
            "init_backoff": timedelta(seconds=first), "max_backoff": timedelta(seconds=longest),
            "base": 2,
        }  # fmt: skip
        retry = {
            "max_retries": int(count), "backoff": backoff, "retry_timeout": timedelta(seconds=total)
        }  # fmt: skip
        settings = {"client_options": of_client, "retry_config": retry}
        with translated("open", f"{self.scheme}://{self.name}"):
            if self.scheme in (S3, OBS):
                return stores.S3Store(self.name, **self._options, **settings)
            return stores.from_url(f"{self.scheme}://{self.name}", **self._options, **settings)


@cache
def _bucket(scheme: str, name: str, access: tuple[tuple[str, str], ...]) -> Bucket:
    options = dict(access)
    variables = {_STATED[key]: options.pop(key) for key in [*options] if key in _STATED}
    return Bucket(scheme, name, {**os.environ, **variables}, options)
