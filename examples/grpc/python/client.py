"""Streams one answer: python client.py ADDRESS PROMPT [CA_FILE]

pip install ./client grpcio-status (in the checkout). The API key comes from ALLSPAN_API_KEY, the deadline from
ALLSPAN_DEADLINE_S (60).
"""

import os
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from allspan.protos import inference_pb2, inference_pb2_grpc


def connect(address: str, ca_file: str | None) -> grpc.Channel:
    if ca_file is None:
        return grpc.insecure_channel(address)
    with open(ca_file, "rb") as file:
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(file.read()))


def complain(error: grpc.RpcError) -> None:
    print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            for violation in bad.field_violations:
                print(f"  field {violation.field}", file=sys.stderr)
        elif detail.Unpack(retry):
            print(f"  try again in {retry.retry_delay.seconds} s", file=sys.stderr)


def main() -> int:
    address, prompt, *rest = sys.argv[1:]
    key = os.environ.get("ALLSPAN_API_KEY")
    metadata = [("authorization", f"Bearer {key}")] if key else []
    request = inference_pb2.GenerateRequest(
        text=prompt, sampling=inference_pb2.SamplingOptions(max_tokens=100, temperature=0)
    )
    with connect(address, rest[0] if rest else None) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            timeout = float(os.environ.get("ALLSPAN_DEADLINE_S", "60"))
            for response in stub.Generate(request, timeout=timeout, metadata=metadata):
                print(response.text, end="", flush=True)
        except grpc.RpcError as error:
            complain(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
