"""gRPC: what a port serves, its health, a streamed chat, and any method with JSON, as grpcurl does.

python examples/grpc_client.py
python examples/grpc_client.py ridgeline.v1.Inference/GenerateWhole '{"prompt": "2 + 2 =", "maxTokens": 4}'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub

ADDRESS = os.environ.get("RIDGELINE_GRPC", "127.0.0.1:50051")
KEY = os.environ.get("RIDGELINE_API_KEY", "none")
METADATA = (("authorization", f"Bearer {KEY}"),)


def show(channel: grpc.Channel) -> None:
    print("services:", *sorted(ProtoReflectionDescriptorDatabase(channel).get_services()))
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    print("health:", health_pb2.HealthCheckResponse.ServingStatus.Name(health.status))
    question = pb.Message(role="user", content="Name three primary colors.")
    request = pb.GenerateRequest(chat=pb.Chat(messages=[question]), temperature=0, max_tokens=64)
    for answer in InferenceStub(channel).Generate(request, metadata=METADATA):
        for choice in answer.choices:
            print(choice.text, end="", flush=True)
        if answer.HasField("usage"):
            print(f"\n[{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out]")


def call(channel: grpc.Channel, name: str, text: str) -> Iterator[Any]:
    """Any method of the port: reflection says what it takes and returns. No generated code is needed."""
    service, _, method = name.rpartition("/")
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    found = pool.FindServiceByName(service).FindMethodByName(method)
    takes, returns = (message_factory.GetMessageClass(one) for one in (found.input_type, found.output_type))
    codecs = takes.SerializeToString, returns.FromString
    request = json_format.Parse(text, takes())
    if found.server_streaming:
        yield from channel.unary_stream(f"/{name}", *codecs)(request, metadata=METADATA)
    else:
        yield channel.unary_unary(f"/{name}", *codecs)(request, metadata=METADATA)


def main() -> None:
    with grpc.insecure_channel(ADDRESS) as channel:
        try:
            if len(sys.argv) == 1:
                show(channel)
            else:
                for answer in call(channel, sys.argv[1], sys.argv[2]):
                    print(json_format.MessageToJson(answer))
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")


if __name__ == "__main__":
    main()
