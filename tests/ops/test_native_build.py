"""The build of the native library through the backend pip calls: what it makes, and what it says without it.

The wheel here is built unoptimised and for the portable instruction set alone, which takes seconds. The other
tests use the real library; what that one exports is checked here too.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

from ridgeline.ops.cpu import library

pytest.importorskip("scikit_build_core", reason="the build backend is installed by make")

CHECKOUT = Path(__file__).parents[2]
BUILD = "import sys; from scikit_build_core import build; print(getattr(build, sys.argv[1])(sys.argv[2], {}))"
ONE_ISA = [
    f"RL_COMPILES_{isa}=OFF"
    for isa in ("avx2", "avxvnni", "avx512vnni", "avx512", "amx", "neon", "dotprod", "i8mm")
]
QUICK = {
    "SKBUILD_CMAKE_BUILD_TYPE": "Debug",
    "SKBUILD_CMAKE_DEFINE": ";".join([*ONE_ISA, "RL_PORTABLE=ON"]),
}


def build(kind: str, into: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs build_wheel or build_sdist on this checkout."""
    return subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(into)],
        cwd=CHECKOUT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def import_from(folder: Path, program: str) -> str:
    """Runs a program with the package of this folder. No site: it would put the checkout's package first."""
    paths = os.pathsep.join([str(folder), str(Path(numpy.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "RIDGELINE_ISA": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_compilers(folder: Path) -> dict[str, str]:
    """An environment whose PATH leads to the build tools of this Python and nowhere else."""
    for name in ("cmake", "ninja"):
        (folder / name).symlink_to(Path(sysconfig.get_path("scripts")) / name)
    return {"PATH": str(folder)}


def test_a_wheel_holds_the_library_for_any_python_of_the_platform(tmp_path: Path) -> None:
    done = build("build_wheel", tmp_path, **QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"ridgeline-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "unpacked")
    assert f"ridgeline/ops/cpu/{library.LIBRARY_PATH.name}" in names
    assert "ridgeline/py.typed" in names
    assert not [name for name in names if name.startswith(("native", "tests"))]
    program = "from ridgeline.ops.cpu import library; print(library.LIBRARY_PATH, library.available_isas())"
    path, isas = import_from(tmp_path / "unpacked", program).split(" ", 1)
    assert Path(path).is_relative_to(tmp_path)
    assert isas == "('portable',)"  # the others were left out, as an old compiler leaves them out
    assert "the avx512 kernels are left out" in done.stdout + done.stderr or platform.machine() != "x86_64"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        needed, glibc = dependencies(Path(path))
        assert "libstdc++.so.6" not in needed
        assert exported(Path(path), "--dynamic") == exported(library.LIBRARY_PATH, "--dynamic")
        assert glibc <= (2, 28), "symbols newer than manylinux_2_28: see native/cmake/portable.cmake"


def test_a_source_distribution_holds_what_the_build_needs_and_nothing_built(tmp_path: Path) -> None:
    done = build("build_sdist", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("src", "include", "cmake", "editable/CMakeLists.txt", "CMakeLists.txt"):
        held = {f"native/{needed}"} if needed.endswith(".txt") else files_of(f"native/{needed}")
        assert held <= names
    assert files_of("ridgeline") <= names
    built = re.compile(r"\.(so|dylib|o|pyc)$|^build/|CMakeCache|CMakeFiles|\.ninja|bench-results|\.venv")
    assert not [name for name in names if built.search(name)]


def test_without_a_compiler_the_build_says_what_to_install_and_how_to_do_without(tmp_path: Path) -> None:
    done = build("build_wheel", tmp_path, **without_compilers(tmp_path))
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "no C++ compiler that works was found" in said
    assert "apt install g++" in said
    assert "RIDGELINE_NATIVE=0 pip install" in said


def test_a_compiler_installed_after_a_failed_configuration_is_found(tmp_path: Path) -> None:
    without = os.environ | without_compilers(tmp_path)
    command = ["cmake", "-S", CHECKOUT / "native", "-B", tmp_path / "build", "-G", "Ninja"]
    command += [f"-D{define}" for define in ONE_ISA]
    first = subprocess.run(command, env=without, capture_output=True, text=True, timeout=300)
    assert "no C++ compiler that works was found" in " ".join(first.stderr.split())
    with_tools = os.environ | {"PATH": f"{without['PATH']}{os.pathsep}{os.environ['PATH']}"}
    second = subprocess.run(command, env=with_tools, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = build("build_wheel", tmp_path, CXX="/no/such/compiler")
    assert done.returncode != 0
    assert "CXX=/no/such/compiler" in done.stdout + done.stderr


def test_python_alone_can_be_installed_without_a_compiler(tmp_path: Path) -> None:
    done = build("build_wheel", tmp_path, RIDGELINE_NATIVE="0", **without_compilers(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    said = import_from(
        tmp_path / "unpacked",
        "from ridgeline.ops.cpu import library\n"
        "try: library.load()\n"
        "except library.NativeUnavailable as error: print(error)",
    )
    assert "was installed without its native library" in said


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="auditwheel names wheels for Linux")
def test_make_wheel_builds_what_installs_and_serves_without_a_compiler(tmp_path: Path) -> None:
    checkout, bare = tmp_path / "checkout", tmp_path / "bare"
    copy_checkout(checkout)
    made = subprocess.run(
        ["make", "wheel", f"PYTHON={sys.executable}"],
        cwd=checkout,
        env=os.environ | QUICK,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert re.search(r"^make: building the wheel: done in \d+ s$", made.stdout, re.MULTILINE)
    (wheel,) = (checkout / "dist").iterdir()
    assert re.fullmatch(r"ridgeline-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert wheel.name in made.stdout
    subprocess.run([sys.executable, "-m", "venv", bare], check=True, timeout=120)
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    without["PATH"] = str(bare / "bin")
    for command in (
        ["pip", "install", "--quiet", "--only-binary", ":all:", str(wheel)],
        ["ridgeline", "models", "pull", "smollm2-135m"],
        ["ridgeline", "run", "--max-tokens", "4", "What is 2+2?"],
    ):
        program = [str(bare / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, cwd=bare, env=without, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF files")
def test_the_library_exports_its_interface_and_nothing_else() -> None:
    header = (CHECKOUT / "native/include/ridgeline_native.h").read_text()
    declared = set(re.findall(r"\b(rl_\w+)\(", header))
    assert exported(library.LIBRARY_PATH, "--dynamic") == declared


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
@pytest.mark.parametrize("isa", ["avx2", "avxvnni", "avx512vnni", "avx512", "amx"])
def test_the_code_of_an_instruction_set_is_reached_through_its_table_alone(isa: str) -> None:
    # An inline function that other objects know by name could be linked in for all of them, and then kill the
    # process on a CPU that lacks the set. What kernels use belongs in an anonymous namespace.
    found = list((CHECKOUT / "build/native").glob(f"**/rl_{isa}.dir/**/kernels_isa.cpp.o"))
    if not found:
        pytest.skip(
            f"no {isa} object here: not built by make native, or by a compiler that does not know the set"
        )
    assert exported(found[0]) == {f"ridgeline::{isa}_kernels()"}


def exported(path: Path, *options: str) -> set[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    command = [nm, "--demangle", "--defined-only", "--extern-only", *options, str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split(" ", 2)[2] for line in lines if line.strip()}


def dependencies(path: Path) -> tuple[set[str], tuple[int, int]]:
    """The libraries that a shared object loads, and the newest glibc that its symbols ask for."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    command = [readelf, "--wide", "--dynamic", "--version-info", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", text)]
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)), max(versions)


def copy_checkout(target: Path) -> None:
    """What git tracks or would track, as it is on disk: no environment, nothing built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)


def files_of(folder: str) -> set[str]:
    paths = (CHECKOUT / folder).rglob("*")
    kinds = (".py", ".h", ".cpp", ".cmake", ".map", ".apple", ".typed")
    return {
        str(path.relative_to(CHECKOUT)) for path in paths if path.suffix in kinds or path.name == "py.typed"
    }
