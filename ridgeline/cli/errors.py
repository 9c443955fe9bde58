"""Errors of the command line, in a small module: `main` imports it in every run."""

from __future__ import annotations


class RemoteError(Exception):
    """The server is unreachable, refused the request or ended it early; the message has the reason."""


def check_trust(url: str, error: Exception) -> None:
    """Raise a RemoteError that says what to do if `error` was caused by the server's certificate."""
    import ssl

    reason = error.__cause__
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise RemoteError(
            f"the certificate of {url} is not trusted: {reason.verify_message}. Set the environment "
            "variable SSL_CERT_FILE to the PEM file of its CA"
        ) from error
