"""Builds requests: what a user passes, as the protobuf message it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from stapsdtd.client.model import Encoding
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

Selectors: TypeAlias = "str | Iterable[str]"

CHANNEL_OPTIONS = (
    # All probes of a host may well be more than gRPC's usual 4 MB.
    ("grpc.max_receive_message_length", 256 << 20),
    # A server that is started again is found at once, not after gRPC's growing pauses of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_ENCODINGS = {
    Encoding.ROWS: pb.StreamRequest.ENCODING_ROWS,
    Encoding.COLUMNS: pb.StreamRequest.ENCODING_COLUMNS,
}


def list_request(selectors: Selectors, pids: Iterable[int], *, details: bool) -> pb.ListProbesRequest:
    return pb.ListProbesRequest(selectors=_several(selectors), pids=pids, details=details)


def watch_request(selectors: Selectors, pids: Iterable[int]) -> pb.WatchProbesRequest:
    return pb.WatchProbesRequest(selectors=_several(selectors), pids=pids)


def subscribe_request(
    selectors: Selectors,
    *,
    pids: Iterable[int],
    exclude_pids: Iterable[int],
    uids: Iterable[int],
    execnames: Iterable[str],
    cgroups: Iterable[str],
    where: str,
    lease_seconds: int,
    queue_bytes: int,
    kernel_buffer_kib: int,
) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(
        selectors=_several(selectors),
        scope=pb.Scope(pids=pids, exclude_pids=exclude_pids, uids=uids, execnames=execnames, cgroups=cgroups),
        where=where,
        lease_seconds=lease_seconds,
        queue_bytes=queue_bytes,
        kernel_buffer_kib=kernel_buffer_kib,
    )


def stream_request(subscription_id: str, encoding: Encoding, from_seq: int) -> pb.StreamRequest:
    return pb.StreamRequest(subscription_id=subscription_id, encoding=_ENCODINGS[encoding], from_seq=from_seq)


def unsubscribe_request(subscription_id: str) -> pb.UnsubscribeRequest:
    return pb.UnsubscribeRequest(subscription_id=subscription_id)


def _several(selectors: Selectors) -> Iterable[str]:
    # A lone string would otherwise be taken for its characters.
    return [selectors] if isinstance(selectors, str) else selectors
