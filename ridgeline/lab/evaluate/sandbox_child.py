"""Run as `python -I sandbox_child.py`: confines itself, then runs the program from stdin.

Imports nothing of ours. In order: new namespaces (network, mounts, processes, IPC; of users if it is not
root), a root folder with nothing but the interpreter, its libraries and a small tmpfs as working folder, all
else read-only, another user if it is root, limits, exec.
Exit code 125 with a line on stderr: a part could not be enforced, and the program did not run.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    1024,
    2048,
    4096,
    16384,
    1 << 18,
    1 << 21,
)
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # system calls
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
FIRST_UNUSED_ID = 1 << 24  # beyond the ids of users and of containers' ranges
NOT_ENFORCED = 125
_FLAGS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}
WORK, OLD = "/work", "/old"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Runs the program as __main__, and then copies the mark from the descriptor to stdout: no file has the mark.
RUNNER = """
def _run():
    import os, sys
    end = int(sys.argv.pop())
    globals().update(__file__="program.py")
    del globals()["_run"]
    with open("program.py", "rb") as file:
        program = compile(file.read(), "program.py", "exec")
    exec(program, globals())
    sys.__stdout__.flush()
    os.write(1, b"\\n" + os.read(end, 64) + b"\\n")
_run()
"""
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    os.umask(0o022)  # another user enters the folders made here
    try:
        _confine(given["folder"])
        code = _run(program, given)
    except OSError as error:
        print(f"not enforced: {error}", file=sys.stderr, flush=True)
        code = NOT_ENFORCED
    os._exit(code)


def _run(program: bytes, given: dict[str, Any]) -> int:
    """The program's exit code. It is process 1 of its namespace; OSError if it did not begin."""
    failed, failing = os.pipe()  # closed by exec
    child = os.fork()
    if not child:
        try:
            _begin(program, given)
        except (OSError, ValueError) as error:  # a limit above the allowed one is a ValueError
            os.write(failing, str(error).encode())
        os._exit(NOT_ENFORCED)
    os.close(failing)
    reason = os.read(failed, 4096)
    _, status = os.waitpid(child, 0)
    if reason:
        raise OSError(reason.decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_ENFORCED:  # the program's own
        return 1
    return code if code >= 0 else 128 - code


def _begin(program: bytes, given: dict[str, Any]) -> None:
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    with open(f"{WORK}/program.py", "wb") as file:
        file.write(program)
    os.chdir(WORK)
    end, mark = os.pipe()
    os.write(mark, given["mark"].encode())
    os.close(mark)
    os.set_inheritable(end, True)
    _limit(given)
    # exec drops the capabilities in the new user namespace, as its user is not root.
    python = os.path.realpath(sys.executable)
    command = [python, "-I", "-S", "-B", "-X", "utf8", "-c", RUNNER, str(end)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8"}
    os.execve(python, command, environment)


def _confine(folder: str) -> None:
    """Everything but the limits."""
    if os.geteuid() == 0:  # mounts as root, then becomes an unused user: root is exempt from limits
        user = FIRST_UNUSED_ID + int.from_bytes(os.urandom(3), "big")
        _check(_libc.unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC), "unshare")
        _change_root(folder, 0, 0, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        return
    user, group = os.geteuid(), os.getegid()
    spaces = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    _check(_libc.unshare(spaces), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _change_root(folder, user, group, user, group)


def _change_root(folder: str, user: int, group: int, work_user: int, work_group: int) -> None:
    """A new root in memory, built in `folder`: a file or socket that is not in it cannot be named."""
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount: private")
    _tmpfs(folder, f"size=1m,nr_inodes=256,mode=755,uid={user},gid={group}")
    for place in (WORK, OLD, "/tmp"):
        os.mkdir(folder + place)
    prefix = os.path.realpath(sys.base_prefix)
    shown = (
        [*SYSTEM, *DEVICES] if prefix.startswith("/usr/") or prefix == "/usr" else [*SYSTEM, *DEVICES, prefix]
    )
    for place in shown:
        _show(place, folder)
    _tmpfs(folder + WORK, f"size=16m,nr_inodes=256,mode=755,uid={work_user},gid={work_group}")
    call = PIVOT_ROOT.get(os.uname().machine)
    if call is None:
        raise OSError(f"pivot_root: its number on {os.uname().machine} is not known")
    _check(_libc.syscall(call, folder.encode(), (folder + OLD).encode()), "pivot_root")
    os.chdir("/")
    mounts = mounts_in(OLD + "/proc/self/mounts")
    _check(_libc.umount2(OLD.encode(), MNT_DETACH), "umount: the old root")
    os.rmdir(OLD)
    for point, flags in mounts:
        if point not in (WORK.encode(), OLD.encode()) and not point.startswith(OLD.encode() + b"/"):
            failed = _libc.mount(None, point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, None)
            _check(failed, f"mount: {os.fsdecode(point)} read-only")


def _show(place: str, folder: str) -> None:
    """The same place below `folder`: a link as a link, a file or folder as a mount of it and all below."""
    shown = folder + place
    if not os.path.lexists(place) or os.path.lexists(shown):
        return
    os.makedirs(os.path.dirname(shown), mode=0o755, exist_ok=True)
    if os.path.islink(place):
        os.symlink(os.readlink(place), shown)
        return
    if os.path.isdir(place):
        os.mkdir(shown)
    else:
        os.close(os.open(shown, os.O_CREAT | os.O_WRONLY, 0o644))
    _check(
        _libc.mount(os.fsencode(place), os.fsencode(shown), None, MS_BIND | MS_REC, None), f"mount: {place}"
    )


def _tmpfs(place: str, options: str) -> None:
    failed = _libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    _check(failed, f"mount: {place}")


def mounts_in(table: str) -> list[tuple[bytes, int]]:
    r"""Mount points of /proc/self/mounts with the flags they must keep. `\ooo` stands for one byte."""
    found = []
    with open(table, "rb") as file:
        for line in file:
            _, place, _, options, *_ = line.split(b" ")
            flags = sum(_FLAGS.get(option, 0) for option in set(options.decode().split(",")))
            place = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), place)
            found.append((place, flags))
    return found


def _limit(limits: dict[str, Any]) -> None:
    for name, kind in (
        ("cpu_s", resource.RLIMIT_CPU),
        ("memory_bytes", resource.RLIMIT_AS),
        ("file_bytes", resource.RLIMIT_FSIZE),
        ("open_files", resource.RLIMIT_NOFILE),
        ("processes", resource.RLIMIT_NPROC),
    ):
        resource.setrlimit(kind, (limits[name], limits[name]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _check(failed: int, what: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
