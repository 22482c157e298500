"""Each option of a subscription reaches the server: a field of the same name takes it through the request."""

from __future__ import annotations

from dataclasses import fields

from stapsdtd.client import encode
from stapsdtd.subscribe_options import Aggregate, Clause, Scope, Span, SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb

NO_DEFAULT = SubscribeOptions(
    pids=(1, 2),
    exclude_pids=(3,),
    uids=(4,),
    execnames=("psql",),
    cgroups=("/a",),
    containers=("web",),
    include_clients=True,
    where="arg0",
    lease_seconds=5,
    queue_bytes=6,
    kernel_buffer_kib=7,
    require_match=True,
    all_or_nothing=True,
    files=("/bin/postgres",),
    fields=("uid", "container"),
    follow=True,
    expected_files=("/bin/psql",),
    functions=("vfs_read(count, return)",),
    exclude=("python:line",),
)


def test_request_carries_every_option() -> None:
    assert all(getattr(NO_DEFAULT, field.name) != field.default for field in fields(SubscribeOptions))
    request = encode.subscribe_request("app:*", NO_DEFAULT)
    assert request.selectors == ["app:*"]
    assert SubscribeOptions.of(request.scope, request) == NO_DEFAULT


def test_each_field_of_the_messages_is_an_option() -> None:
    assert set(pb.Scope.DESCRIPTOR.fields_by_name) == {field.name for field in fields(Scope)}
    options = {field.name for field in fields(SubscribeOptions)} - {field.name for field in fields(Scope)}
    of_request = {"selectors", "scope", "aggregation", "span", "clauses"}
    assert set(pb.SubscribeRequest.DESCRIPTOR.fields_by_name) == options | of_request
    of_clause = {field.name for field in fields(Clause)}
    assert set(pb.Clause.DESCRIPTOR.fields_by_name) == of_clause - {"aggregate"} | {"aggregation"}
    assert set(pb.Aggregation.DESCRIPTOR.fields_by_name) == {field.name for field in fields(Aggregate)}
    assert set(pb.Span.DESCRIPTOR.fields_by_name) == {field.name for field in fields(Span)}


def test_defaults_leave_the_request_empty() -> None:
    assert encode.subscribe_request(["app:*"], SubscribeOptions()) == pb.SubscribeRequest(
        selectors=["app:*"], scope=pb.Scope()
    )
