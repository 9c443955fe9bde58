"""The port itself: health, reflection, TLS, both event loops, what is missing, and the generated files."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.main import check
from ridgeline.server.process.rpc import grpc_server
from ridgeline.web.grpc.health import Health
from ridgeline.web.grpc.v1 import inference_pb2
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.certificates import RSA_KEY, Authority
from tests.patience import PATIENCE_S
from tests.server.grpc.rpc_stage import HELLO, channel_to, joined, refused, rpc_served, streamed
from tests.server.scripted_client import hang, say
from tests.server.stage import Stage, until
from tests.test_imports import without

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[[Coroutine[Any, Any, None]], None]
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_both_event_loops_serve_and_abort(loop: str) -> None:
    """`ridgeline serve` runs on uvloop."""
    factory = uvloop.new_event_loop if loop == "uvloop" else None

    async def talk() -> None:
        stage = Stage(say("hé!", pause_s=0.001))
        async with rpc_served(stage) as stub:
            assert joined(await streamed(stub.Generate(HELLO))).choices[0].text == "hé!"
            stage.client.script = hang("some")
            call = stub.Generate(HELLO)
            await call.read()
            call.cancel()
            await until(lambda: stage.client.aborted)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(talk(), PATIENCE_S))


async def test_health_is_readiness_and_needs_no_key() -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    async with channel_to(stage) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "ridgeline.v1.Inference"):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert (await stub.Check(asked)).status == SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stage.supervisor.reason = "the engine has made no step for 20 s"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == NOT_SERVING
        stage.supervisor.reason = ""
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == SERVING
        watch.cancel()
        unknown = health_pb2.HealthCheckRequest(service="other")
        assert (await refused(stub.Check(unknown))).code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.Watch(unknown).read()).status == UNKNOWN


async def test_a_watch_ends_with_not_serving_when_the_port_closes() -> None:
    stage = Stage()
    server = grpc_server(stage.app, stage.config)
    await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(PATIENCE_S))
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == NOT_SERVING
        assert await asyncio.wait_for(watch.read(), PATIENCE_S) is grpc.aio.EOF
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_a_watch_tells_a_stop_that_comes_while_it_asks() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        health.stop()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    class Context:
        async def write(self, message: Any) -> None:
            told.append(message.status)

    told: list[int] = []
    health = Health(app, frozenset())
    await asyncio.wait_for(health.Watch(health_pb2.HealthCheckRequest(), Context()), PATIENCE_S)
    assert told == [SERVING, NOT_SERVING]


async def test_reflection_describes_the_services() -> None:
    async with channel_to(Stage()) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="ridgeline.v1.Inference"),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "ridgeline.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = described.file_descriptor_response.file_descriptor_proto
    assert inference_pb2.DESCRIPTOR.serialized_pb in files


async def test_tls_uses_the_files_as_they_are_at_each_handshake(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "one"), Authority(tmp_path / "two")
    certfile, keyfile = tmp_path / "server.pem", tmp_path / "server.key"

    def install(made: tuple[Path, Path]) -> None:
        shutil.copy(made[0], certfile)
        shutil.copy(made[1], keyfile)

    install(authority.issue("server"))
    stage = Stage(say("hi"), ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile))
    server = grpc_server(stage.app, stage.config)
    await server.start("127.0.0.1", 0)
    try:
        assert await _greeted(server.port, authority) == "hi"
        with pytest.raises(grpc.aio.AioRpcError):
            await _greeted(server.port, other)
        install(other.issue("server", RSA_KEY))
        assert await _greeted(server.port, other) == "hi"
    finally:
        await server.stop(0)


async def _greeted(port: int, trusted: Authority) -> str:
    credentials = grpc.ssl_channel_credentials(trusted.file.read_bytes())
    # Without its own pool, a channel would reuse the connection of the previous one.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        answer = await InferenceStub(channel).GenerateWhole(HELLO, timeout=PATIENCE_S)
    text: str = answer.choices[0].text
    return text


def test_a_taken_port_is_reported_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match=r"cannot listen for gRPC on 127\.0\.0\.1:\d+.*grpc_port"):
            check(ServerConfig(grpc_port=taken.getsockname()[1]))


@pytest.mark.parametrize("package", ["grpc", "grpc_reflection"])
def test_without_the_extra_the_option_is_refused_by_its_name(package: str) -> None:
    program = f"{without((package,))}\nfrom ridgeline.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert f"--grpc-port needs the package {package}" in done.stderr
    assert "pip install 'ridgeline[grpc]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_generated_files_are_those_of_the_proto(tmp_path: Path) -> None:
    proto = Path("ridgeline/web/grpc/v1/inference.proto")
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed; the stubs are not compared")
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *out, str(proto)],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    made = sorted((tmp_path / proto.parent).iterdir())
    assert len(made) == 3
    for path in made:
        kept = ROOT / proto.parent / path.name
        assert kept.read_text() == path.read_text(), "run `make proto` and commit the files"
