"""A clock that a test can step while a process runs: a small library, preloaded, that moves CLOCK_REALTIME.

The offset is read from a file at each call. CLOCK_MONOTONIC stays, as on a machine whose clock is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    long seconds = 0;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec; now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (into) *into = at.tv_sec;
    return at.tv_sec;
}
"""


class ClockShift:
    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock-offset", folder / "clock-shift.so"
        source = folder / "clock-shift.c"
        source.write_text(SOURCE)
        command = [shutil.which("cc") or "cc", "-shared", "-fPIC", "-o", self._library, source, "-ldl"]
        subprocess.run(command, check=True)
        self.set(0)

    @staticmethod
    def can_be_built() -> bool:
        return shutil.which("cc") is not None

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes whose clock moves."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        beside = self._file.with_suffix(".new")
        beside.write_text(str(seconds))
        os.replace(beside, self._file)
