"""What single settings must be: addresses, paths, names and bounded numbers, as types that check them."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from orchestrator.names import TypeName

#: Characters between two dots of a host's name.
MAX_LABEL = 63
#: Characters of what a node says of its GPUs.
MAX_BACKEND = 64


_NO_URL = "must be a URL; write special characters of the password as %XX"


def _split(url: str) -> SplitResult:
    # urlsplit drops tabs and newlines silently, and its own messages quote the password.
    if not url.isprintable() or " " in url:
        raise ValueError("must hold no whitespace and no control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(_NO_URL) from None
    # What is behind the first is the password's, whose rest would be told as the host that does not answer.
    if "@" in parts.netloc and (parts.netloc + parts.path).count("@") > 1:
        raise ValueError(_NO_URL)
    if port == 0:  # the libraries would take their usual one
        raise ValueError("must not name port 0; leave it out for the usual one")
    _check_host(parts.hostname or "")
    return parts


def _check_host(host: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._:-]*", host):
        raise ValueError("must name a host by letters, digits, dots and dashes")
    # Looking up any other ends in an error of Python's own. A dot may stand at the end.
    if host and not all(0 < len(label) <= MAX_LABEL for label in host.removesuffix(".").split(".")):
        raise ValueError(f"must name a host with 1 to {MAX_LABEL} characters between two dots")


#: What may stand behind the ? of a URL. The libraries take any argument of their own there, and some would overrule
#: our time limits or change what answers look like; unknown ones end in an error at the first connection.
_OPTIONS = {
    "sqlite": {},
    "mysql": {
        "charset": r"utf8mb4",
        "unix_socket": r".+",
        r"ssl_(ca|cert|key)": r".+",
        r"ssl_verify_(cert|identity)": r"true|false",
    },
    "redis": {"client_name": r".+", "username": r".+", "password": r".+"},
    "rediss": {"client_name": r".+", "username": r".+", "password": r".+", r"ssl_(ca_certs|certfile|keyfile)": r".+"},
    "unix": {"db": r"[0-9]{1,5}", "client_name": r".+", "username": r".+", "password": r".+"},
}


def _check_options(parts: SplitResult, kind: str) -> None:
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        known = [pattern for name, pattern in _OPTIONS[kind].items() if re.fullmatch(name, key)]
        if not known or not re.fullmatch(known[0], value):
            # The value may be a password.
            raise ValueError(f"must not say ?{key[:40]}=… like that; see docs/settings.md for what may stand there")


def _database_url(url: str) -> str:
    parts, (scheme, separator, rest) = _split(url), url.partition("://")
    if scheme == "sqlite" and separator and not parts.netloc:
        _check_options(parts, "sqlite")
        if parts.path in {"", "/", "/:memory:"}:
            raise ValueError("must name a file (sqlite:///FILE), since several processes share it")
        return url
    if scheme in {"mysql+pymysql", "mysql", "mariadb"} and parts.path.strip("/"):
        _check_options(parts, "mysql")
        return f"mysql+pymysql://{rest}"
    raise ValueError("must be sqlite:///FILE or mysql+pymysql://user:password@host:3306/NAME")


def _redis_url(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    if scheme in {"redis+sentinel", "redis+cluster"}:
        raise ValueError(f"this version does not support {scheme}:// yet; use redis:// or rediss://")
    parts = _split(url)
    # The client library quietly takes database 0 for a path that is no number.
    paths = {"redis": r"(/[0-9]{0,5})?", "rediss": r"(/[0-9]{0,5})?", "unix": r"/.+"}
    if separator and scheme in paths and re.fullmatch(paths[scheme], parts.path):
        _check_options(parts, scheme)
        return url
    raise ValueError("must be redis://host:6379/0, rediss://host:6379/0 or unix:///SOCKET?db=0")


#: Told wherever another address is refused.
WHY_LOOPBACK = "this version has no authentication yet, so it does not listen on a network"


def _host(host: str) -> str:
    try:
        # A zone (::1%lo) adds nothing to a loopback address, and any text can stand there.
        open_to_network = host != "localhost" and ("%" in host or not ipaddress.ip_address(host).is_loopback)
    except ValueError:
        open_to_network = True
    if open_to_network:
        raise ValueError(f"must be a loopback address (127.0.0.1, ::1, localhost): {WHY_LOOPBACK}")
    return host


def _prefix(text: str) -> str:
    # Braces would make one hash tag of the prefix and put every lane on one cluster node.
    if text and all(c.isprintable() and not c.isspace() and c not in "{}" for c in text):
        return text
    raise ValueError("must not be empty and must hold no braces, whitespace or control characters")


def _gpu_backend(text: str) -> str:
    group = r"[1-9][0-9]{0,2}x[1-9][0-9]{0,6}"
    if text in {"auto", "nvml", "none"} or re.fullmatch(rf"sim:{group}(,{group})*", text):
        if len(text) > MAX_BACKEND:
            raise ValueError(f"must have at most {MAX_BACKEND} characters; write GPUs that are alike as one NxMB")
        return text
    raise ValueError("must be auto, nvml, none or sim:NxMB[,NxMB], for example sim:2x24576")


def _path(value: object) -> object:
    if isinstance(value, str) and (not value or "\0" in value):
        raise ValueError("must be a path")
    return Path(value) if isinstance(value, str) else value


def _web_address(url: str) -> SplitResult | None:
    """None for what is no address, or more: these URLs are shown as they are, so nobody may keep a secret there.

    A password without a user leaves the user's name empty, so names and passwords are looked for by their @.
    """
    parts = _split(url)
    plain = parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc
    return parts if plain and not parts.query and not parts.fragment else None


def _http_url(url: str) -> str:
    parts = _web_address(url)
    if parts is None or parts.path.strip("/"):
        raise ValueError("must be https://host:port, without a password, a path and ?…")
    return url


def _otlp_url(url: str) -> str:
    """A bare address means the path that OTLP over HTTP has for spans."""
    parts = _web_address(url)
    if parts is None:
        raise ValueError("must be http://host:4318 or https://host/PATH, without a password and without ?…")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
OtlpUrl = Annotated[str, AfterValidator(_otlp_url)]
Host = Annotated[str, AfterValidator(_host)]
Directory = Annotated[Path, BeforeValidator(_path)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Prefix = Annotated[str, AfterValidator(_prefix)]
LockName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$"), AfterValidator(str.lower)]
Module = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
Modules = Annotated[tuple[Module, ...], Field(strict=False)]  # TOML has lists
PodName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
GpuBackend = Annotated[str, AfterValidator(_gpu_backend)]
# Every number has an upper bound (times: a year), so that each wait and each point in time stays computable.
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]
Millis = Annotated[int, Field(gt=0, le=86_400_000)]  # to Redis, BLOCK 0 means for ever
Port = Annotated[int, Field(ge=0, le=65535)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
UpTo100 = Annotated[int, Field(ge=1, le=100)]
UpTo512 = Annotated[int, Field(ge=1, le=512)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
# Escaped, it doubles, and must still fit into a packet of 16 MiB, which is as much as MariaDB takes by default.
Bytes = Annotated[int, Field(ge=1, le=6 * 2**20)]
PlacementPolicy = Literal["fragmentation", "best_fit", "spread"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class RetryRule(BaseModel):
    """What one job type wants otherwise than the others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_attempts: UpTo100 | None = None
    base_s: Seconds | None = None
    cap_s: Seconds | None = None


def _table(value: object) -> object:
    """A table in the file, JSON text elsewhere."""
    try:
        return json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError('must be JSON such as {"embed": {"max_attempts": 3, "base_s": 0.5}}') from None


RetryRules = Annotated[dict[TypeName, RetryRule], BeforeValidator(_table)]
