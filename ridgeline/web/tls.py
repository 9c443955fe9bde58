"""Certificate: a listener's TLS certificate, reloaded when its files change.

Options `ssl_certfile` and `ssl_keyfile` of the server, the gateway and the admin API. New connections use a
changed pair; open ones keep theirs. A pair that cannot be used is logged, and the old one is kept.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from ridgeline.options import OptionError

log = logging.getLogger("ridgeline.web")

_Seen = tuple[tuple[int, int, int], ...]


class Certificate:
    def __init__(self, certfile: Path, keyfile: Path | None, where: str = "") -> None:
        """keyfile: None if the key is in the certificate's file. Raises OptionError if it is unusable."""
        self._certfile = certfile.expanduser()
        self._keyfile = None if keyfile is None else keyfile.expanduser()
        self._where = where
        self._seen = self._files()
        # The listener keeps this context; each handshake uses the newest one. Loading a changed pair into a
        # context in use would keep the old certificate next to a new one with another key type.
        self.context = self._newest = self._loaded()
        self.context.sni_callback = self._take_newest

    def refresh(self) -> None:
        """Reload the files if they have changed. Called about every second."""
        try:
            seen = self._files()
        except OptionError:
            return  # being replaced: the next call sees the new one
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._newest = self._loaded()
        except OptionError as error:
            log.error("could not load the changed certificate, keeping the old one: %s", error)
            return
        log.info("reloaded the certificate", extra={"certfile": str(self._certfile)})

    def _take_newest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            self._load_into(context)
        except ssl.SSLError as error:
            files = str(self._certfile) if self._keyfile is None else f"{self._certfile} and {self._keyfile}"
            raise OptionError(f"{self._where}ssl_certfile: {_reason(error)}: {files}") from error
        except OSError as error:
            raise OptionError(f"{self._where}ssl_certfile: cannot be read: {error}") from error
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        # Without a password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(self._certfile, self._keyfile, password="")

    def _files(self) -> _Seen:
        named = [("ssl_certfile", self._certfile), ("ssl_keyfile", self._keyfile)]
        seen = []
        for option, path in named:
            if path is None:
                continue
            try:
                now = path.stat()
            except OSError as error:
                raise OptionError(f"{self._where}{option}: {path}: {error.strerror}") from error
            seen.append((now.st_mtime_ns, now.st_size, now.st_ino))
        return tuple(seen)


def certificate(certfile: Path | None, keyfile: Path | None, where: str = "") -> Certificate | None:
    """The certificate of these options; None if there is none: plain HTTP."""
    if certfile is None and keyfile is not None:
        raise OptionError(f"{where}ssl_keyfile: also needs ssl_certfile")
    return None if certfile is None else Certificate(certfile, keyfile, where)


def _reason(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ"):
        return "the key is encrypted; store it without a password"
    return f"no certificate (PEM) with its key ({error.reason or error})"
