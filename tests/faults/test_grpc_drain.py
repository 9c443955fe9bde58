"""SIGTERM with RPCs under way: they finish, new ones are unavailable with a time, and the exit is clean."""

from __future__ import annotations

import os
import signal
import time

import grpc

from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.conftest import free_port
from tests.faults.conftest import engine_pid
from tests.patience import PATIENCE_S
from tests.server.grpc.rpc_stage import joined


def long(tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="Once upon a time", max_tokens=tokens, ignore_eos=True)


def test_sigterm_finishes_running_rpcs_and_takes_nothing_new(serve):
    port = free_port()
    server = serve("--grpc-port", str(port))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceStub(channel)
        call = stub.Generate(long(300))
        first = next(call)
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + PATIENCE_S
        refusal = None
        while refusal is None:  # until the server has taken the signal
            assert time.monotonic() < end
            try:
                stub.GenerateWhole(long(1))
            except grpc.RpcError as error:
                refusal = error
        answer = joined([first, *call])
    assert refusal.code() is grpc.StatusCode.UNAVAILABLE
    assert int(dict(refusal.trailing_metadata())["retry-after"]) >= 1
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 300
    assert server.process.wait(PATIENCE_S) == 0


def test_an_engine_that_dies_within_a_stream_ends_it_with_unavailable(serve):
    port = free_port()
    server = serve("--grpc-port", str(port))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceStub(channel)
        call = stub.Generate(long(4000))
        next(call)
        engine = engine_pid(server)
        os.kill(engine, signal.SIGKILL)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
        else:
            raise AssertionError("the stream looks complete")
        end = time.monotonic() + PATIENCE_S
        while True:  # the next engine answers on the same port
            try:
                assert stub.GenerateWhole(long(2)).usage.completion_tokens == 2
                return
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
                assert time.monotonic() < end
                time.sleep(0.1)
