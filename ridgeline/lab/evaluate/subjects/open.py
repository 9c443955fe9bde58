"""Opens a subject from its text: an engine here for a model, a client for a URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ridgeline.lab.evaluate.subjects.subject import Subject, parse_subject


@contextlib.contextmanager
def opened(text: str, api_key: str = "") -> Iterator[Subject]:
    """Closed at the end: two models need not fit in memory together."""
    spec = parse_subject(text)
    subject: Subject
    if spec.is_url:
        from ridgeline.lab.evaluate.subjects.remote import RemoteSubject

        subject = RemoteSubject(spec, api_key)
    else:
        from ridgeline.lab.evaluate.subjects.local import LocalSubject

        subject = LocalSubject(spec)
    try:
        yield subject
    finally:
        subject.close()
