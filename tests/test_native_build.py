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

CHECKOUT = Path(__file__).parents[1]
BUILD = "import sys; from scikit_build_core import build; print(getattr(build, sys.argv[1])(sys.argv[2], {}))"
QUICK = {
    "SKBUILD_CMAKE_BUILD_TYPE": "Debug",
    "SKBUILD_CMAKE_DEFINE": ";".join(
        f"RL_COMPILES_{isa}=OFF" for isa in ("avx2", "avx512vnni", "avx512", "amx")
    ),
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
        timeout=60,
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


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF files")
def test_the_library_exports_its_interface_and_nothing_else() -> None:
    header = (CHECKOUT / "native/include/ridgeline_native.h").read_text()
    declared = set(re.findall(r"\b(rl_\w+)\(", header))
    assert exported(library.LIBRARY_PATH, "--dynamic") == declared


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
@pytest.mark.parametrize("isa", ["avx2", "avx512vnni", "avx512", "amx"])
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


def files_of(folder: str) -> set[str]:
    paths = (CHECKOUT / folder).rglob("*")
    kinds = (".py", ".h", ".cpp", ".cmake", ".map", ".apple", ".typed")
    return {
        str(path.relative_to(CHECKOUT)) for path in paths if path.suffix in kinds or path.name == "py.typed"
    }
