"""Requests whose bytes are within every limit and cost more to read than to send, and such as nobody may make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import grpc

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena

_CLAUSES = 32
_SELECTORS = 256
_THREADS = 4


def _parentheses() -> str:
    return "(" * 1000 + "arg0" + ")" * 1000


def _sum() -> str:
    return "arg0" + " + 1" * 600 + " + arg1" * 200


def _alternatives() -> str:
    return " || ".join(f"arg{i % 9} == {i}" for i in range(230))


def _digits() -> str:
    return "arg0 + " + "1" * 4000


def _blanks() -> str:
    return " " * 4000 + "1"


def _negations() -> str:
    return "!" * 4000 + "1"


def _strings() -> str:
    compared = " || ".join(f'str(arg0, {length}) == "a"' for length in range(1, 40))
    return f'str(arg0) ~ "{"?" * 200}" || {compared}'


def _conditionals() -> str:
    return "arg0 ? " * 300 + "1" + " : 1" * 300


def _shifts() -> str:
    return "(1 << " * 400 + "arg0" + ")" * 400


EXPRESSIONS: Mapping[str, Callable[[], str]] = {
    "parentheses": _parentheses,
    "sum": _sum,
    "alternatives": _alternatives,
    "digits": _digits,
    "blanks": _blanks,
    "negations": _negations,
    "strings": _strings,
    "conditionals": _conditionals,
    "shifts": _shifts,
}


def _subscribe_with(expression: Callable[[], str], arena: Arena) -> None:
    text = expression()
    clauses = [
        pb.Clause(tag=str(number), selectors=["raid:number"], where=text, fields=[text]) for number in range(_CLAUSES)
    ]
    request = pb.SubscribeRequest(clauses=clauses)
    arena.in_threads(_THREADS, partial(subscribe_once, arena, request))


def subscribe_once(arena: Arena, request: pb.SubscribeRequest, stub: StapsdtServiceStub) -> None:
    answer = arena.call("subscribed", lambda: stub.Subscribe(request, timeout=arena.timeout))
    if answer:
        unsubscribe = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
        arena.call("unsubscribed", lambda: stub.Unsubscribe(unsubscribe, timeout=arena.timeout))


def _many_globs(arena: Arena) -> None:
    selectors = [f"*a{number}*b*c*d*:*e*f*g*{'x*' * 60}" for number in range(_SELECTORS)]
    request = pb.ListProbesRequest(selectors=selectors)

    def work(stub: StapsdtServiceStub) -> None:
        arena.call("listed", lambda: stub.ListProbes(request, timeout=arena.timeout))

    arena.in_threads(_THREADS, work)


def _malformed(arena: Arena) -> None:
    """Bytes that are no message, for each call."""
    names = ["GetServerInfo", "ListProbes", "Subscribe", "Unsubscribe", "ListSubscriptions", "ListKernelFunctions"]

    def work() -> None:
        with arena.channel() as channel:
            calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
                channel.unary_unary(f"/stapsdtd.v1.StapsdtService/{name}") for name in names
            ]
            while arena.goes_on:
                futures = [call.future(b"\xff\xff\xff", timeout=arena.timeout) for call in calls]
                for future in futures:
                    arena.call("answered", future.result)

    arena.together(*[work] * _THREADS)


def _forbidden(arena: Arena) -> None:
    """What an ordinary user may not do, or is not there."""

    def work(stub: StapsdtServiceStub) -> None:
        functions = pb.SubscribeRequest(selectors=["fbt:::entry"], functions=["vfs_*"])
        unsubscribe = pb.UnsubscribeRequest(subscription_id="1")
        arena.call("traced functions", lambda: stub.Subscribe(functions, timeout=arena.timeout))
        arena.call("ended another's", lambda: stub.Unsubscribe(unsubscribe, timeout=arena.timeout))
        stream = pb.StreamRequest(subscription_id="1", encoding=pb.StreamRequest.ENCODING_ROWS)
        arena.call("read another's", lambda: next(iter(stub.Stream(stream, timeout=arena.timeout))))
        scope = pb.SubscribeRequest(selectors=["*:*"], scope=pb.Scope(pids=[1]))
        subscribe_once(arena, scope, stub)

    arena.in_threads(1, work)


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    **{f"costly_{name}": partial(_subscribe_with, expression) for name, expression in EXPRESSIONS.items()},
    "costly_globs": _many_globs,
    "malformed": _malformed,
    "forbidden": _forbidden,
}
