"""Origin: the address of an upstream, read only from the URL in its configuration.

One parser (`urllib.parse.urlsplit`) reads the URL once, at start; the connection and the host header use the
same parts. A URL with a user, a query or a fragment is refused.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ridgeline.options import OptionError

# A request must not race with the upstream's close of an idle connection: uvicorn (ridgeline, vLLM, SGLang)
# closes after 5 s, the load balancers of hosted APIs after a minute or more.
KEEP_ALIVE_S = 4.0
KEEP_ALIVE_TLS_S = 30.0

_PRINTABLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: each has its own pool of connections
class Origin:
    host: str  # a name or an address; the certificate must be for it
    port: int
    base: str = ""  # path prefix of every request, without the trailing slash
    tls: ssl.SSLContext | None = None
    unix: str = ""  # path of a socket, used in place of host and port
    keep_alive_s: float = KEEP_ALIVE_S  # an unused connection is closed after this time

    @property
    def is_address(self) -> bool:
        """Whether the host is an address, which needs no lookup."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def authority(self) -> str:
        """For the host header: without the scheme's default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.unix or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def read_url(
    url: str, ca_file: Path | None = None, where: str = "url", keep_alive_s: float | None = None
) -> Origin:
    """The origin of http://host[:port][/base], https://… or unix:/path. A trailing /v1 is dropped: it is part
    of every request's path.
    """
    if not url:
        raise OptionError(f"{where} is missing")
    if not _PRINTABLE.fullmatch(url):
        raise OptionError(f"{where}: must be printable ASCII without spaces")
    if url.startswith("unix:"):
        return _unix(url.removeprefix("unix:"), where, KEEP_ALIVE_S if keep_alive_s is None else keep_alive_s)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise OptionError(f"{where}: not a URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise OptionError(f"{where}: must begin with http://, https:// or unix:/")
    if "@" in parts.netloc:
        raise OptionError(
            f"{where}: a URL with a user or password is not allowed; give the key in key_env or key_file"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise OptionError(f"{where}: a query or fragment is not allowed; give only the base URL")
    if not host or not _HOST.fullmatch(host):
        raise OptionError(f"{where}: has no host")
    if port == 0:
        raise OptionError(f"{where}: port 0 is not allowed")
    if ".." in parts.path or "%" in parts.path or "\\" in parts.path:
        raise OptionError(f"{where}: the path must not contain .., % or a backslash")
    tls = tls_context(ca_file, where) if parts.scheme == "https" else None
    base = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if keep_alive_s is None:
        keep_alive_s = KEEP_ALIVE_TLS_S if tls else KEEP_ALIVE_S
    return Origin(host, port or (443 if tls else 80), base, tls, keep_alive_s=keep_alive_s)


def tls_context(ca_file: Path | None, where: str = "url") -> ssl.SSLContext:
    """Certificates are always verified: with the system's CAs, or only with those of the file."""
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"{where}: ca_file {ca_file} cannot be read as PEM certificates: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _unix(path: str, where: str, keep_alive_s: float) -> Origin:
    if not path.startswith("/"):
        raise OptionError(f"{where}: unix: needs an absolute path")
    if len(path.encode()) > 107:
        raise OptionError(f"{where}: a socket's path may have at most 107 bytes")
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise OptionError(f"{where}: {path} is not a socket")
    except FileNotFoundError:
        pass  # the server may start later
    except OSError as error:
        raise OptionError(f"{where}: {path}: {error.strerror}") from None
    return Origin("localhost", 80, unix=path, keep_alive_s=keep_alive_s)
