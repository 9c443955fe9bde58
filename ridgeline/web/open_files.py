"""The limit on open files (RLIMIT_NOFILE): many systems allow a process 1024 unless it raises the limit."""

from __future__ import annotations


def allow_open_files(count: int) -> int:
    """Raise this process's limit to `count` if allowed. Returns the resulting limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return count
    if soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
