"""The descriptions of the model and of the server that routers ask a worker for; they become its labels."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from allspan.client.gateway.admission.admission import Hold
from allspan.client.gateway.context import GatewayContext
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, read_metadata

SERVER_TYPE = "vllm-grpc"
_STARTED = time.time()


def model_info(context: GatewayContext) -> pb.GetModelInfoResponse:
    """Reads the model's configuration from its files, where they can be read."""
    model, cluster = context.model, context.engine.cluster
    config = _config(Path(cluster.model_path))
    pad = config.get("pad_token_id")
    defaults = model.defaults.sampling()
    return pb.GetModelInfoResponse(
        model_path=cluster.model_path,
        is_generation=model.card.generates,
        max_context_length=model.max_model_len,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        tokenizer_path=cluster.model_path,
        model_type=str(config.get("model_type", "")),
        architectures=[name for name in config.get("architectures") or () if isinstance(name, str)],
        eos_token_ids=cluster.eos_token_ids,
        pad_token_id=pad if isinstance(pad, int) else 0,
        bos_token_id=context.tokenizer.bos_token_id or 0,
        max_req_input_len=model.max_model_len,
        default_sampling_params_json=json.dumps(defaults) if defaults else "",
    )


async def server_info(context: GatewayContext, last_received: float) -> pb.GetServerInfoResponse:
    """`last_received`: seconds since 1970 of the last request. All replicas of this facade are one worker."""
    told = (await context.snapshots.look()).statistics
    return pb.GetServerInfoResponse(
        active_requests=context.admission.num_open,
        is_paused=context.admission.hold is not Hold.NONE,
        last_receive_timestamp=last_received,
        uptime_seconds=time.time() - _STARTED,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=0 if told is None else told.page_size,
        constrained_decoding_start="first_token",
    )


def _config(path: Path) -> dict[str, Any]:
    """Returns the model's config.json, or what a GGUF file says instead; nothing where it cannot be read from here."""
    try:
        if gguf := gguf_of(path):
            return {"model_type": str(read_metadata(gguf).get("general.architecture", ""))}
        return read_json_object(path / "config.json")
    except CheckpointError:
        return {}
