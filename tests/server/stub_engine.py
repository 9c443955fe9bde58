"""An engine process without a model, for the supervisor's tests: each start behaves as its place in a list.

stub_engine.py ok,exit:1,ok --socket=…/engine-N.sock …      start N does what item N says; the last repeats
"""

import faulthandler
import signal
import sys
import time
from pathlib import Path

from ridgeline.engine.client.launch import stack_file
from ridgeline.engine.link.messages import FRAME_HEADER, Hello, Ping, Pong, Stop
from ridgeline.engine.link.transport import EngineSocket, Opened
from ridgeline.telemetry.stats import EngineStats

HELLO = Hello(1, "stub", "none", 128, 8, 4096, 300, 16, {}, {}, {})


def main() -> None:
    behaviours = sys.argv[1].split(",")
    path = Path(next(a for a in sys.argv if a.startswith("--socket=")).removeprefix("--socket="))
    start = int(path.stem.partition("-")[2])
    behaviour = behaviours[min(start, len(behaviours) - 1)]
    if behaviour.startswith("exit:"):
        sys.exit(int(behaviour.removeprefix("exit:")))
    if behaviour == "never ready":
        time.sleep(600)
    socket = EngineSocket(path)
    while True:
        number, message = socket.arrivals.get()
        match message:
            case Opened():
                socket.send(number, Pong(0, EngineStats()) if behaviour == "rude" else HELLO)
            case Ping(id) if behaviour == "garbled":
                socket._connections[number].socket.send(FRAME_HEADER.pack(1) + b"\xc1")
            case Ping() if behaviour == "stuck":
                faulthandler.register(signal.SIGUSR1, file=stack_file(path).open("w"))
                while True:
                    time.sleep(600)
            case Ping(id):
                socket.send(number, Pong(id, EngineStats(steps=5, output_tokens=7, last_step_end=1.0)))
            case Stop():
                return


if __name__ == "__main__":
    main()
