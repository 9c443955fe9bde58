"""The state of an unfinished run, in a folder beside its parts: settings, finished layers, hidden states.

A layer counts as finished when `done.json` lists it, which is written after its part and its streams. A run
with other settings, another model or other text does not continue it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ridgeline import __version__
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.quantize.calibration import Calibration
from ridgeline.lab.quantize.checkpoint import Checkpoint
from ridgeline.lab.quantize.options import QuantizeOptions

FOLDER = ".unfinished"


class LayerRecord(msgspec.Struct, frozen=True):
    """What the report says of one layer.

    output_error: of the layer's own contribution on held-out text, with the inputs it got: Σ off² / Σ part²
    stream_error: of the hidden states after the layer, all earlier layers' errors included
    matrices:     output errors on calibration text, by module
    """

    layer: int
    seconds: float
    output_error: float | None = None
    stream_error: float | None = None
    matrices: dict[str, float] = {}
    unseen: list[str] = []


class Journal:
    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Opens or begins a run. BadInput if the folder has anything else in it."""
        self.folder = out / FOLDER
        self._done = self.folder / "done.json"
        self.records: list[LayerRecord] = []
        file = self.folder / "settings.json"
        if not self.folder.is_dir():
            _refuse_other_files(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / "lock", out)
        try:
            if file.is_file():
                self._require_same(json.loads(file.read_text()), settings, out)
                if self._done.is_file():
                    self.records = msgspec.json.decode(self._done.read_bytes(), type=list[LayerRecord])
            else:
                _refuse_other_files(out)  # that another run has finished meanwhile
                file.write_text(json.dumps(settings, indent=2))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process continue the run."""
        self._lock.close()

    def remove(self) -> None:
        """After the report has been written."""
        shutil.rmtree(self.folder)
        self.close()

    @property
    def layers(self) -> int:
        """Finished layers."""
        return len(self.records)

    def stream(self, name: str, layer: int) -> Path:
        """The file of a stream's states before layer `layer`."""
        return self.folder / f"{name}-{layer}.npy"

    def stream_bytes(self) -> int:
        """Of the hidden states that are on disk."""
        return sum(file.stat().st_size for file in self.folder.glob("*.npy"))

    def finish_layer(self, record: LayerRecord) -> None:
        self.records.append(record)
        unfinished = self._done.with_name("done.json.unfinished")
        unfinished.write_bytes(msgspec.json.encode(self.records))
        unfinished.replace(self._done)
        for file in self.folder.glob(f"*-{record.layer}.npy"):
            file.unlink()

    @staticmethod
    def _require_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
        other = [name for name in now if before.get(name) != json.loads(json.dumps(now[name]))]
        if other:
            raise BadInput(
                f"--out {out}: has an unfinished run with another {', '.join(other)}; repeat the same "
                "command to continue it, or remove the folder"
            )


def _refuse_other_files(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(file.name != FOLDER for file in out.iterdir())):
        raise BadInput(f"--out {out}: is not empty; give a new folder, or remove it first")


def _locked(path: Path, out: Path) -> BinaryIO:
    """An open file with a lock that ends with the process. LabError if another run has it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LabError(
            f"--out {out}: another `ridgeline quantize` writes to this folder; wait for it or give another"
        ) from None
    return file


def run_settings(
    checkpoint: Checkpoint, to: str, options: QuantizeOptions, calibration: Calibration | None
) -> dict[str, Any]:
    """What must be the same for a run to continue."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files()]
    chosen = {
        name: value
        for name, value in asdict(options).items()
        if name not in ("calibration", "held_out", "scan")
    }
    return {
        "model": files,
        "to": to,
        "version": __version__,
        "calibration": None if calibration is None else calibration.sha256,
        **chosen,
    }
