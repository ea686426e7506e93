"""The server's description of itself: model, ranks, readiness, and the limits of a request."""

from __future__ import annotations

from allspan import __version__
from allspan.client.cluster.snapshot import ClusterView, RankView
from allspan.client.gateway.context import GatewayContext
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.grammar import KINDS
from allspan.protos.api.options import MAX_TIMEOUT_S


async def server_info(context: GatewayContext) -> pb.ServerInfoResponse:
    limits = context.config.limits
    model, view = context.model, await context.snapshots.look()
    is_ready = context.admission.is_ready
    return pb.ServerInfoResponse(
        version=__version__,
        model=pb.Model(id=model.name, max_model_len=model.max_model_len),
        vocab_size=model.vocab_size,
        eos_token_ids=context.engine.cluster.eos_token_ids,
        ready=is_ready,
        not_ready_cause="" if is_ready else context.admission.down_cause or "the engine is not ready",
        replicas=len(view.replicas),
        replicas_ready=view.num_ready,
        ranks=_ranks(view),
        limits=pb.Limits(
            max_choices=limits.max_n,
            max_prompt_chars=context.prompts.max_chars,
            max_message_bytes=context.config.grpc.grpc_max_message_bytes,
            max_concurrent_requests=limits.max_concurrent_requests,
            max_stop_sequences=limits.max_stop_sequences,
            max_logprobs=limits.max_logprobs,
            max_timeout_s=MAX_TIMEOUT_S,
        ),
        features=[
            *(["chat"] if context.tokenizer.has_chat_template else []),
            *(f"structured.{kind}" for kind in KINDS),
        ],
    )


def _ranks(view: ClusterView) -> list[pb.Rank]:
    return [_rank(rank, replica.index) for replica in view.replicas for rank in replica.ranks]


def _rank(rank: RankView, replica: int) -> pb.Rank:
    told = pb.Rank(rank=rank.rank, replica=replica, host=rank.host, state="no answer")
    if (facts := rank.statistics) is not None:
        told.state, told.kernels = facts.state, facts.kernels
        told.device, told.numa_nodes = facts.device, facts.numa_nodes
    return told
