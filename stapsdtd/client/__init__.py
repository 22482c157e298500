"""The Python client: list probes, subscribe to them and read their events.

    from itertools import islice

    from stapsdtd.client import Client

    with Client("unix:/run/stapsdtd/stapsdtd.sock") as client:
        for probe in client.list_probes("postgresql:*"):
            print(probe.provider, probe.name, probe.path)
        with client.subscribe("postgresql:query__start(arg0:str)") as subscription:
            for event in islice(subscription.events(), 3):
                print(event.pid, event.values[0])  # 4711 BEGIN;

`subscribe` takes `SubscribeOptions`: of which processes, by which filter, with how much buffer. `AsyncClient` has the
same methods for asyncio. `aio.py` does the I/O, and `sync.py` is generated from it. Requests are built in `encode.py`,
responses decoded in `decode.py`, and events decoded in `events.py` or, as arrays, in `columns.py`; `stream.py` keeps a
stream's state. Methods return frozen data from `probes.py`, `server.py`, `kernel_functions.py` and `messages.py`, and
raise a `ClientError` from `errors.py`.
"""

from stapsdtd.client.aio import AsyncClient, AsyncSubscription
from stapsdtd.client.column_batch import Column, ColumnBatch, NumberColumn, StringColumn
from stapsdtd.client.errors import (
    AccessDeniedError,
    CallCancelledError,
    ClientError,
    InvalidAggregateError,
    InvalidRequestError,
    InvalidTargetError,
    LimitReachedError,
    NotFoundError,
    ProtocolError,
    RequestFailedError,
    ServerTimeoutError,
    ServerUnavailableError,
    StillSubscribedError,
    StreamTakenOverError,
    UnsupportedError,
    Violation,
)
from stapsdtd.client.kernel_functions import (
    AttachWay,
    FunctionListing,
    KernelArgument,
    KernelFunction,
    KernelValue,
    UnknownFunction,
)
from stapsdtd.client.messages import (
    CapturedArgument,
    DescribedSite,
    Descriptions,
    Encoding,
    End,
    EndReason,
    Event,
    EventBatch,
    EventBlock,
    Interruption,
    Loss,
    LossStage,
    Message,
    SiteState,
    SiteStatus,
    Status,
    Value,
)
from stapsdtd.client.probes import (
    Address,
    Argument,
    Constant,
    Memory,
    Operand,
    Probe,
    ProbeAdded,
    ProbeListing,
    ProbeRemoved,
    Problem,
    Process,
    Register,
    Site,
    SnapshotComplete,
    Unavailable,
    WatchMessage,
)
from stapsdtd.client.server import (
    Access,
    Account,
    Arming,
    ClauseInfo,
    Feature,
    Inventory,
    InventoryState,
    Limits,
    ServerInfo,
    SpanAccount,
    SubscriptionInfo,
)
from stapsdtd.client.snapshots import Bucket, Snapshot, SnapshotRow
from stapsdtd.client.sync import Client, Subscription
from stapsdtd.client.target import Tls
from stapsdtd.subscribe_options import Aggregate, Clause, Scope, Span, SubscribeOptions

__all__ = [
    "Access",
    "AccessDeniedError",
    "Account",
    "Address",
    "Aggregate",
    "Argument",
    "Arming",
    "AsyncClient",
    "AsyncSubscription",
    "AttachWay",
    "Bucket",
    "CallCancelledError",
    "CapturedArgument",
    "Clause",
    "ClauseInfo",
    "Client",
    "ClientError",
    "Column",
    "ColumnBatch",
    "Constant",
    "DescribedSite",
    "Descriptions",
    "Encoding",
    "End",
    "EndReason",
    "Event",
    "EventBatch",
    "EventBlock",
    "Feature",
    "FunctionListing",
    "Interruption",
    "InvalidAggregateError",
    "InvalidRequestError",
    "InvalidTargetError",
    "Inventory",
    "InventoryState",
    "KernelArgument",
    "KernelFunction",
    "KernelValue",
    "LimitReachedError",
    "Limits",
    "Loss",
    "LossStage",
    "Memory",
    "Message",
    "NotFoundError",
    "NumberColumn",
    "Operand",
    "Probe",
    "ProbeAdded",
    "ProbeListing",
    "ProbeRemoved",
    "Problem",
    "Process",
    "ProtocolError",
    "Register",
    "RequestFailedError",
    "Scope",
    "ServerInfo",
    "ServerTimeoutError",
    "ServerUnavailableError",
    "Site",
    "SiteState",
    "SiteStatus",
    "Snapshot",
    "SnapshotComplete",
    "SnapshotRow",
    "Span",
    "SpanAccount",
    "Status",
    "StillSubscribedError",
    "StreamTakenOverError",
    "StringColumn",
    "SubscribeOptions",
    "Subscription",
    "SubscriptionInfo",
    "Tls",
    "Unavailable",
    "UnknownFunction",
    "UnsupportedError",
    "Value",
    "Violation",
    "WatchMessage",
]
