"""Builds requests: what a user passes, as the protobuf message it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

Selectors: TypeAlias = "str | Iterable[str]"

CHANNEL_OPTIONS = (
    # What is set for the web has no business here.
    ("grpc.enable_http_proxy", 0),
    # All probes of a host may well be more than gRPC's usual 4 MB.
    ("grpc.max_receive_message_length", 256 << 20),
    # A server that is started again is found at once, not after gRPC's growing pauses of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # In spite of its name, how long a connection may take: one that starts the daemon (systemd/stapsdtd.socket) does.
    ("grpc.min_reconnect_backoff_ms", 20_000),
)


_SHOWN_CHARACTERS = 80


def shown(selectors: Iterable[str]) -> str:
    """As an error names them."""
    text = " ".join(selectors)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def list_request(
    selectors: Selectors, pids: Iterable[int], *, containers: Iterable[str], cgroups: Iterable[str], details: bool
) -> pb.ListProbesRequest:
    return pb.ListProbesRequest(
        selectors=_several(selectors), pids=pids, containers=containers, cgroups=cgroups, details=details
    )


def watch_request(
    selectors: Selectors, pids: Iterable[int], *, containers: Iterable[str], cgroups: Iterable[str]
) -> pb.WatchProbesRequest:
    return pb.WatchProbesRequest(selectors=_several(selectors), pids=pids, containers=containers, cgroups=cgroups)


def subscribe_request(
    selectors: Selectors,
    *,
    pids: Iterable[int],
    exclude_pids: Iterable[int],
    uids: Iterable[int],
    execnames: Iterable[str],
    cgroups: Iterable[str],
    containers: Iterable[str],
    include_clients: bool,
    where: str,
    lease_seconds: int,
    queue_bytes: int,
    kernel_buffer_kib: int,
) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(
        selectors=_several(selectors),
        scope=pb.Scope(
            pids=pids,
            exclude_pids=exclude_pids,
            uids=uids,
            execnames=execnames,
            cgroups=cgroups,
            containers=containers,
            include_clients=include_clients,
        ),
        where=where,
        lease_seconds=lease_seconds,
        queue_bytes=queue_bytes,
        kernel_buffer_kib=kernel_buffer_kib,
    )


def stream_request(subscription_id: str, from_seq: int) -> pb.StreamRequest:
    """For columns, of which `events.py` makes events in less time than it takes to read them one by one."""
    return pb.StreamRequest(
        subscription_id=subscription_id, encoding=pb.StreamRequest.ENCODING_COLUMNS, from_seq=from_seq
    )


def unsubscribe_request(subscription_id: str) -> pb.UnsubscribeRequest:
    return pb.UnsubscribeRequest(subscription_id=subscription_id)


def _several(selectors: Selectors) -> Iterable[str]:
    # A lone string would otherwise be taken for its characters.
    return [selectors] if isinstance(selectors, str) else selectors
