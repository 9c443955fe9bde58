"""The errors of the command line's own, apart from what raises them: `main` catches them in every run."""

from __future__ import annotations


class RemoteError(Exception):
    """The server cannot be reached, refused the request or broke off; the message has its reason."""


def check_trust(url: str, error: Exception) -> None:
    """Raise a RemoteError that says what to do if `error` was caused by the server's certificate."""
    import ssl

    reason = error.__cause__
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise RemoteError(
            f"the certificate of {url} is not trusted: {reason.verify_message}. Name the PEM file of its "
            "authority in the environment variable SSL_CERT_FILE"
        ) from error
