"""Runs one command of the Makefile and shows how far it is, in place of the command's own output.

    python3 tools/stage.py "compiling the native library" .venv/bin/ninja -C native/editable

On a terminal: one line, rewritten every second. In a log: a line at the start, one every 15 seconds, one at
the end. A command that ends within 3 seconds and has no progress to report shows nothing. When the command
fails, all it wrote follows, and its exit status becomes ours. Needs only the standard library: it runs before
anything is installed.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

CHATTY = ("pip", "auditwheel")  # what they write is worth reading only when they fail
QUIET_SECONDS = 3.0
LOG_SECONDS = 15.0


class Reader:
    """What the lines of pip and ninja say about progress."""

    def __init__(self, program: str) -> None:
        self.chatty = program in CHATTY
        self.packages = 0
        self.detail = ""
        self.outcome = ""
        self.unread: list[str] = []  # neither progress nor chatter: a compiler's warnings

    def read(self, line: str) -> None:
        if found := re.match(r"\s*\[(\d+)/(\d+)\] (.*)", line):
            done, total, what = found.groups()
            if not what.startswith("Re-"):  # re-checking for new files, re-running CMake
                self.detail = f"{done}/{total}"
        elif not self.chatty:
            if not line.startswith(("ninja: ", "-- ")):
                self.unread.append(line)
        elif line.startswith("Collecting "):
            self.packages += 1
            self.detail = f"{counted(self.packages)} found"
        elif found := re.match(r"\s+Downloading ([\w.]+)-.* \((.+)\)", line):
            self.detail = f"{counted(self.packages)} found, downloading {found[1]} ({found[2]})"
        elif line.startswith("Installing collected packages: "):
            self.detail = self.outcome = counted(line.count(",") + 1)


def counted(packages: int) -> str:
    return f"{packages} package{'s' if packages > 1 else ''}"


class Display:
    """The line on a terminal, or the lines in a log."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.started = time.monotonic()
        self.shown_at: float | None = None
        self.on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def update(self, detail: str) -> None:
        now = time.monotonic()
        if not detail and now - self.started < QUIET_SECONDS:
            return
        if self.on_terminal:
            self._write(self._progress(detail))
        elif self.shown_at is None:
            print(f"make: {self.title}", flush=True)
        elif now - self.shown_at >= LOG_SECONDS:
            print(self._progress(detail), flush=True)
        else:
            return
        self.shown_at = now

    def finish(self, detail: str, failed: bool) -> None:
        if not failed and self.shown_at is None:
            return
        detail = f": {detail}" if detail else ""
        end = f"make: {self.title}{detail}: {'failed after' if failed else 'done in'} {self._seconds()}"
        if self.on_terminal:
            self._write(end)
            print(flush=True)
        else:
            print(end, flush=True)

    def _progress(self, detail: str) -> str:
        return f"make: {self.title} … {self._seconds()}" + (f": {detail}" if detail else "")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self.started:.0f} s"

    def _write(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        print(f"\r\033[K{text[: columns - 1]}", end="", flush=True)


def main(title: str, *command: str) -> int:
    display, reader = Display(title), Reader(Path(command[0]).name)
    lines: queue.Queue[str | None] = queue.Queue()
    written: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(Path(command[0])),
    ) as process:
        assert process.stdout is not None
        threading.Thread(target=pass_on, args=(process.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=1)
            except queue.Empty:
                display.update(reader.detail)
                continue
            if line is None:
                break
            written.append(line)
            reader.read(line)
            display.update(reader.detail)
    failed = process.returncode != 0
    display.finish(reader.detail if failed else reader.outcome, failed)
    print("".join(f"{line}\n" for line in (written if failed else reader.unread)), end="", flush=True)
    return process.returncode


def environment(program: Path) -> dict[str, str]:
    """Ours, with the program's own folder first on PATH: tools of a virtual environment find each other."""
    chosen = os.environ | {"NINJA_STATUS": "[%f/%t] ", "PIP_PROGRESS_BAR": "off"}
    if program.name != str(program):
        chosen["PATH"] = f"{program.parent.absolute()}{os.pathsep}{chosen.get('PATH', '')}"
    return chosen


def pass_on(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: stage.py TITLE COMMAND [ARGUMENT …]")
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"make: {sys.argv[2]}: {error.strerror}")
