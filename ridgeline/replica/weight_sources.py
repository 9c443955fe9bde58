"""The sources of weights, as settings write them: local, peers, hub, and stores by URL or folder.

Read by fleet.toml's checks and by the server. Opens nothing.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

from ridgeline.options import OptionError, nearest

LOCAL, PEERS, HUB = "local", "peers", "hub"
WORDS = (LOCAL, PEERS, HUB)
DEFAULT = (LOCAL, PEERS, HUB)
_BUCKETS = ("s3", "gs", "az", "abfs", "r2")


def check_sources(sources: Sequence[str], where: str) -> None:
    """OptionError for a list that cannot work. Its message shows no password and no token."""
    for source in sources:
        _check(source, where)
    if sources and sources[0] != LOCAL:
        raise OptionError(
            f"{where} begins with {shown(sources[0])!r}: the first source is always {LOCAL!r}, the cache"
        )
    for source in sources:
        if list(sources).count(source) > 1:
            raise OptionError(f"{where} has {shown(source)!r} twice")
    if HUB in sources and sources[-1] != HUB:
        after = shown(sources[sources.index(HUB) + 1])
        raise OptionError(f"{where}: {after!r} stands after {HUB!r}, which ends the search: move it before")


def _check(source: str, where: str) -> None:
    if source in WORDS or source.startswith(("/", "~/")):
        return
    if source.startswith(("http://", "https://")):
        _check_url(source, where)
        return
    scheme, _, rest = source.partition(":")
    if scheme == "file":
        if not rest.startswith("///"):
            raise OptionError(f"{where}: {_hidden(source)!r} must be file:///PATH, with three slashes")
    elif scheme in _BUCKETS:
        raise OptionError(
            f"{where}: {_hidden(source)!r} needs a bucket's own protocol, which is not read. Give its "
            "https:// URL, the URL of a manifest with presigned URLs, or the folder where it is mounted"
        )
    else:
        raise OptionError(
            f"{where}: {_hidden(source)!r} is not a source: give {', '.join(WORDS)}, an http(s):// or "
            f"file:// URL, or an absolute path{nearest(source, WORDS)}"
        )


def check_peers(peers: Sequence[str], where: str) -> None:
    for peer in peers:
        name, equals, url = peer.partition("=")
        if not (name and equals and url.startswith(("http://", "https://"))):
            raise OptionError(f"{where}: {_hidden(peer)!r} must be NAME=URL, with an http(s):// URL")
        _check_url(url, f"{where}: {name}")


def shown(source: str) -> str:
    """A checked source without the token that its URL may have."""
    return source.partition("?")[0].partition("#")[0]


def _check_url(url: str, where: str) -> None:
    """OptionError for a URL that cannot be opened, or that has a login: errors of a connection show it."""
    if any(mark.isspace() or not mark.isprintable() for mark in url):
        raise OptionError(f"{where}: {_hidden(url)!r} has a space or a control character: write it as %20")
    try:
        parts = urllib.parse.urlsplit(url)
        has_login, host, _ = "@" in parts.netloc, parts.hostname, parts.port
        is_cut = parts.netloc.endswith(":")
    except ValueError:  # the host may be half of a login: it is not shown
        is_cut, has_login, host = True, False, ""
    if is_cut:
        raise OptionError(f"{where}: an http(s):// URL has a host or a port that cannot be read")
    if has_login:
        raise OptionError(
            f"{where}: {_hidden(url)!r} has a login (USER:PASSWORD@), which is not sent: give a token in the "
            "query, presigned URLs, or the folder where it is mounted"
        )
    if not host:
        raise OptionError(f"{where}: {_hidden(url)!r} has no host")


def _hidden(source: str) -> str:
    """What can be shown of a text that was not understood: nothing that may be a password or a token."""
    if "@" not in source:
        return shown(source)
    scheme, slashes, _ = source.partition("://")
    return f"{scheme}://…" if slashes and "@" not in scheme else "…"
