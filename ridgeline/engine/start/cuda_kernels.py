"""KernelLoading: a GPU engine's kernels, compiled or taken from the disk cache while the weights are read.

Used by `cuda_build`. Knows which steps have all their kernels on the device. Nothing here can fail a start: a
kernel that is missing is compiled at its launch.
"""

from __future__ import annotations

import atexit
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from ridgeline.engine.start.compile_ahead import CompilingProcesses
from ridgeline.engine.start.compiled_marks import CompiledMarks
from ridgeline.engine.start.cuda_preload import in_thread, log_errors

if TYPE_CHECKING:
    from ridgeline.engine.run.cuda.graphs import GraphKey
    from ridgeline.engine.run.cuda.warm import StepDryRun

URGENT_S = 3.0  # to wait for the kernels of a few users, where none were compiled before
END_S = 5.0  # to wait for a kernel that is being loaded when the process ends


class KernelLoading:
    def __init__(self, marks: CompiledMarks) -> None:
        self._marks = marks
        self._compiling: CompilingProcesses | None = None
        self._ends = Event()
        self.loaded: set[GraphKey] | None = set()  # steps whose kernels are on the device; None: all

    def begin(self) -> None:
        """Without kernels on disk, other processes import what they need while this one makes its plan."""
        if not self._marks:
            self._compiling = CompilingProcesses()

    def is_loaded(self, key: GraphKey) -> bool:
        return self.loaded is None or key in self.loaded

    def load(self, wanted: dict[str, Any], decode_sizes: list[int], trial: tuple[int, int] | None) -> None:
        """Load every kernel from the disk cache if an earlier start compiled them all. Else compile those of
        the first steps here, while other processes compile the rest.

        wanted: arguments of a `StepDryRun`; trial: rows and tokens of the steps that measure --deterministic
        """
        from ridgeline.engine.run.cuda import warm as cuda_warm
        from ridgeline.ops.cuda.recording import compile_all, distinct

        is_compiled = self._marks.holds(wanted, decode_sizes)
        if not is_compiled:
            self._compiling = self._compiling or CompilingProcesses()
            ahead = in_thread(self._compile_ahead, self._compiling, wanted, decode_sizes)
        dry_run = cuda_warm.StepDryRun(**wanted)
        first = cuda_warm.first_kernels(dry_run)
        if trial is not None:
            fast = cuda_warm.StepDryRun(**{**wanted, "deterministic": False})
            first = distinct(first + cuda_warm.trial_kernels([dry_run, fast], *trial))
        log_errors(compile_all(first))
        self.loaded = cuda_warm.first_keys(dry_run.step_tokens)
        if is_compiled:
            log_errors(compile_all(cuda_warm.other_kernels(dry_run, decode_sizes)))
            self.loaded = None
            return
        assert self._compiling is not None
        if self._compiling.urgent_done.wait(URGENT_S):
            log_errors(compile_all(cuda_warm.urgent_kernels(dry_run, decode_sizes)))
            self.loaded |= cuda_warm.urgent_keys(dry_run.step_tokens, decode_sizes)
        atexit.register(self._end, in_thread(self._load_rest, ahead, dry_run, decode_sizes))

    def _compile_ahead(
        self, compiling: CompilingProcesses, wanted: dict[str, Any], decode_sizes: list[int]
    ) -> None:
        if compiling.compile(wanted, decode_sizes):
            self._marks.add(wanted, decode_sizes)

    def _load_rest(self, ahead: Thread, dry_run: StepDryRun, decode_sizes: list[int]) -> None:
        """While the engine serves, one kernel at a time: what other processes have compiled."""
        from ridgeline.engine.run.cuda import warm as cuda_warm
        from ridgeline.ops.cuda.recording import compile_all

        ahead.join()
        for launch in cuda_warm.other_kernels(dry_run, decode_sizes):
            if self._ends.is_set():  # a thread that is in Triton when Python ends takes the process down
                return
            log_errors(compile_all([launch]))
        self.loaded = None

    def _end(self, thread: Thread) -> None:
        self._ends.set()
        if self._compiling is not None:
            self._compiling.end()
        thread.join(END_S)
