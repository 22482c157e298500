"""What errors tell programs: each kind that there is, and each as the client has it."""

from __future__ import annotations

import asyncio
import errno
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

import stapsdtd
from stapsdtd import errors
from stapsdtd.api.errors import abort_on_error
from stapsdtd.client import Clause, Client, ClientError, RequestFailedError, Span, SubscribeOptions
from stapsdtd.client.errors import Call, from_rpc_error
from stapsdtd.errors import REQUEST, StapsdtdError, about
from stapsdtd.kernel.host_calls import ARM
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served

TOLD = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "FAILED_PRECONDITION"}
REQUESTED = pb.SubscribeRequest(selectors=["a:b", "a:c(x)"], files=["/bin/a", "/bin/b"], scope=pb.Scope(pids=[1, 7]))


@dataclass(frozen=True, slots=True)
class Expected:
    kind: str
    field: str
    index: int | None = None
    column: int | None = None
    facts: tuple[tuple[str, str], ...] = ()


def of_files(error: StapsdtdError) -> StapsdtdError:
    with pytest.raises(type(error)) as raised, about("files"):
        raise error
    return raised.value


EXAMPLES: list[tuple[StapsdtdError, Expected]] = [
    (
        errors.InvalidArgumentError("selectors", "'x' is not a capture", 4, "a:c(x)", capture=0),
        Expected("INVALID_ARGUMENT", "selectors[1]", 1, 4, (("capture", "0"),)),
    ),
    (errors.InvalidArgumentError("where", "too long"), Expected("INVALID_ARGUMENT", "where")),
    (
        errors.InvalidArgumentError("scope.pids", "no process", value=7),
        Expected("INVALID_ARGUMENT", "scope.pids[1]", 1),
    ),
    (errors.MalformedRequestError("7 bytes"), Expected("MALFORMED_REQUEST", REQUEST)),
    (
        errors.UnknownSubscriptionError("x"),
        Expected("UNKNOWN_SUBSCRIPTION", "subscription_id", facts=(("subscription_id", "x"),)),
    ),
    (errors.NoMatchError(), Expected("NO_MATCH", "require_match")),
    (
        errors.NotArmedError(2, 1, "a:b", "in /bin/a", "no room"),
        Expected(
            "NOT_ARMED",
            "all_or_nothing",
            facts=(("sites", "2"), ("failed", "1"), ("probe", "a:b"), ("place", "in /bin/a"), ("reason", "no room")),
        ),
    ),
    (errors.LimitReachedError("full", "lookups"), Expected("LIMIT_REACHED", REQUEST, facts=(("limit", "lookups"),))),
    (
        errors.AccessDeniedError("no", "trace", "scope.pids", value=1),
        Expected("ACCESS_DENIED", "scope.pids[0]", 0, facts=(("right", "trace"),)),
    ),
    (
        errors.FileRefusedError("/bin/b", "no ELF file"),
        Expected("FILE_REFUSED", "files[1]", 1, facts=(("path", "/bin/b"),)),
    ),
    (errors.InventoryError("off"), Expected("INVENTORY", "installed")),
    (errors.ObjectGoneError("/bin/a"), Expected("OBJECT_GONE", REQUEST, facts=(("path", "/bin/a"),))),
    (errors.ObjectUnreadableError("cut"), Expected("OBJECT_UNREADABLE", REQUEST)),
    (errors.ObjectPendingError(), Expected("OBJECT_PENDING", REQUEST)),
    (errors.ObjectForeignError("nfs"), Expected("OBJECT_FOREIGN", REQUEST)),
    (
        of_files(errors.KernelFeatureError("bpf", "it is absent", "load it")),
        Expected("KERNEL_FEATURE", "files", facts=(("feature", "bpf"), ("remedy", "load it"))),
    ),
    (
        ARM.refused("/bin/a:0x10", errno.ENOSPC),
        Expected(
            "HOST_REFUSED",
            REQUEST,
            facts=(
                ("operation", ARM.name),
                ("subject", "/bin/a:0x10"),
                ("errno", "ENOSPC"),
                ("remedy", ARM.remedy(28)),
            ),
        ),
    ),
    (
        errors.TracefsRejectedError("uprobe_events", "p:x", errno.EINVAL, "bad"),
        Expected(
            "TRACEFS_REJECTED", REQUEST, facts=(("path", "uprobe_events"), ("line", "p:x"), ("kernel_message", "bad"))
        ),
    ),
]


def kinds() -> Iterator[type[StapsdtdError]]:
    """Yield what the daemon may raise while it serves a request."""
    for module in pkgutil.walk_packages(stapsdtd.__path__, "stapsdtd."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [StapsdtdError]
    for kind in found:
        found += kind.__subclasses__()
    for kind in found[1:]:
        is_own = kind.__module__.startswith(("stapsdtd.errors", "stapsdtd.api", "stapsdtd.sessions"))
        # those of an errno are made when they are needed
        is_made = kind.__name__ == kind.__bases__[0].__name__
        if is_own and not is_made and not issubclass(kind, ClientError) and kind.grpc_code in TOLD:
            yield kind


def test_each_kind_of_error_has_an_example() -> None:
    shown = {type(error) for error, _ in EXAMPLES}
    # no listener is opened for a request
    missing = [
        each.__name__
        for each in kinds()
        if not any(issubclass(one, each) for one in shown) and each.__name__ != "CannotListenError"
    ]
    assert not missing


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(f"unix:{server.socket}") as connected:
        yield connected


class Aborted(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        super().__init__()
        self._told = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._told[0]

    def details(self) -> str:
        return self._told[1]

    def trailing_metadata(self) -> Any:
        return self._told[2]


class FakeContext:
    """Raises what the client gets."""

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        raise Aborted(code, details, metadata)


def as_the_client_has_it(error: StapsdtdError) -> RequestFailedError:
    async def serve() -> None:
        context: Any = FakeContext()
        async with abort_on_error(context) as asked:
            asked.request = REQUESTED
            raise error

    with pytest.raises(Aborted) as raised:
        asyncio.run(serve())
    return from_rpc_error(raised.value, Call("subscribe", "unix:/run/x.sock"))


@pytest.mark.parametrize(("error", "expected"), EXAMPLES, ids=lambda each: getattr(each, "kind", ""))
def test_programs_are_told(error: StapsdtdError, expected: Expected) -> None:
    told = as_the_client_has_it(error)
    assert told.code.name == error.grpc_code
    found = Expected(told.kind, told.field, told.index, told.column, tuple(sorted(told.facts.items())))
    facts = tuple(sorted((name, fact[:256]) for name, fact in expected.facts))
    assert found == Expected(expected.kind, expected.field, expected.index, expected.column, facts)
    assert told.details == str(error)


def test_long_and_unprintable_facts_fit_into_metadata() -> None:
    told = as_the_client_has_it(errors.ObjectGoneError("/\udc80" + "x" * 4000))
    assert told.facts["path"].startswith(r"/\udc80xxx")
    assert len(told.facts["path"]) == 256


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda client: client.subscribe(["a:b", "c:d(arg0, y)"]), Expected("INVALID_ARGUMENT", "selectors[1]", 1, 10)),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(where="pid == 1 && elapsed > 5")),
            Expected("INVALID_ARGUMENT", "where", None, 12),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(fields=["uid", "start.arg0"])),
            Expected("INVALID_ARGUMENT", "fields[1]", 1, 0),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(exclude=["a:b", "c:*"])),
            Expected("INVALID_ARGUMENT", "exclude[1]", 1, 0),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(pids=[1, 1 << 30])),
            Expected("INVALID_ARGUMENT", "scope.pids[1]", 1),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(cgroups=["/", "/nowhere"])),
            Expected("INVALID_ARGUMENT", "scope.cgroups[1]", 1),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(files=["/bin/sh", "sh"])),
            Expected("INVALID_ARGUMENT", "files[1]", 1),
        ),
        (
            lambda client: client.query(
                [
                    Clause(tag="a", selectors=["a:b"]),
                    Clause(tag="b", selectors=["a:b"], span=Span(start_selectors=["a:c"], key=["pid", "arg0+1"])),
                ]
            ),
            Expected("INVALID_ARGUMENT", "clauses[1].span.key[1]", 1, 0),
        ),
        (
            lambda client: client.subscribe("a:b", options=SubscribeOptions(require_match=True)),
            Expected("NO_MATCH", "require_match"),
        ),
    ],
)
def test_from_request_to_client(client: Client, ask: Callable[[Client], object], expected: Expected) -> None:
    with pytest.raises(RequestFailedError) as raised:
        ask(client)
    error = raised.value
    assert (error.kind, error.field, error.index, error.column) == (
        expected.kind, expected.field, expected.index, expected.column
    )  # fmt: skip
