"""Kernel functions from the API to the command, in a kernel that a test makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from stapsdtd.cli import stapsdt
from stapsdtd.client import AsyncClient, Client, InvalidRequestError
from stapsdtd.config import Limits, Role
from stapsdtd.errors import KernelFeatureError
from stapsdtd.functions import lookup
from stapsdtd.kernel.btf import Btf
from stapsdtd.kernel.function_tables import Symbol
from stapsdtd.v1 import kernel_functions_pb2 as pb
from stapsdtd.v1 import stapsdt_pb2
from tests.api.served import PATIENCE_SECONDS, FakeEngine, Served, refused, served
from tests.api.test_cli_completion import complete
from tests.unit.kernel_types import NO_WAYS, FakeKernel, btf_path, colors, kernel_functions
from tests.unit.test_kernel_btf import module_btf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    fake = FakeKernel()
    with Btf(str(btf_path())) as base:
        fake.modules_ = {"nf_nat": module_btf(base, tmp_path / "nf_nat", "nf_get")}
    fake.symbols_.append(Symbol("nf_nat", "nf_get"))
    fake.traceable_ = [symbol for symbol in fake.symbols_ if symbol.name != "with_odd"]
    return fake


@pytest.fixture
def server(tmp_path: Path, kernel: FakeKernel) -> Iterator[Served]:
    with (
        kernel_functions(kernel) as functions,
        served(tmp_path, Limits(max_selectors=3), functions=functions) as started,
    ):
        yield started


@pytest.fixture
def run(server: Served, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `stapsdt kernel info`; answers its exit code, standard output and standard error."""

    def call(*arguments: str, target: str = f"unix:{server.socket}") -> tuple[int, str, str]:
        status = stapsdt.run(["--server", target, "kernel", "info", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def asked(server: Served, *functions: str, names_only: bool = False) -> pb.ListKernelFunctionsResponse:
    request = pb.ListKernelFunctionsRequest(functions=functions, names_only=names_only)
    return server.stub.ListKernelFunctions(request, timeout=PATIENCE_SECONDS)


def test_messages(server: Served) -> None:
    response = asked(server, "by_pointer(outer->flags.wide, outer->next->color, return)", "with_large", "with_pear")
    pointer, large = response.functions
    field, color, result = pointer.values
    assert (field.argument, len(field.offsets), field.bit_field.bits) == (0, 2, 41)
    assert [each.name for each in color.enumerators] == list(colors())
    assert (color.HasField("bit_field"), len(color.offsets), result.HasField("argument")) == (False, 3, False)
    assert (list(large.arguments[1].registers), large.arguments[1].size) == ([], 24)
    assert large.arguments[1].refused == "it is a struct of 24 bytes, passed by value in memory"
    assert [(unknown.function, list(unknown.near)) for unknown in response.unknown] == [("with_pear", ["with_pair"])]
    assert [(way.name, way.available) for way in response.ways] == [("fentry", True), ("kprobe", True)]


def test_names_alone(server: Served) -> None:
    response = asked(server, "nf_*", "returns_l*", names_only=True)
    assert list(response.names) == ["nf_get", "returns_large"]
    assert not response.functions


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ([], "functions: at least one function is required"),
        (["a", "b", "c", "d"], "functions: at most 3 are allowed"),
        (["f(a"], "functions: -> . [ , or ) is expected after a value"),
        (["with_pair(pair.third)"], "functions: struct pair has no member third; it has first, second"),
    ],
)
def test_wrong_requests(server: Served, functions: list[str], reason: str) -> None:
    assert refused(lambda: asked(server, *functions)) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


def test_globs_are_few(tmp_path: Path, kernel: FakeKernel) -> None:
    with kernel_functions(kernel) as functions, served(tmp_path, functions=functions) as server:
        assert asked(server, *["returns_l*"] * 16, "with_pair").functions
        assert refused(lambda: asked(server, *["returns_l*"] * 17)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "functions: at most 16 may have globs in their names",
        )


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (["returns_large(a)"] * 65, "functions: at most 64 may have values"),
        (
            ["with_many(a, b, c, d, e, f, g)", "with_many(h, i, pair, pair.first, pair.second, return, a)"],
            "functions: 13 values of with_many; the limit is 12",
        ),
        (
            ["with_peer"],
            "functions: with_peer: there is no such function, or it is inlined wherever it is called; did ",
        ),
    ],
)
def test_what_a_subscription_may_not_name(
    tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, wanted: list[str], reason: str
) -> None:
    monkeypatch.setattr(FakeEngine, "name", "bpf")
    request = stapsdt_pb2.SubscribeRequest(selectors=["fbt:::"], functions=wanted)
    with kernel_functions(kernel) as functions, served(tmp_path, functions=functions) as server:
        code, text = refused(lambda: server.stub.Subscribe(request))
    assert (code, text[: len(reason)]) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


def test_mistakes_are_pointed_at(server: Served) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        asked(server, "with_pair(pair.third)")
    status = rpc_status.from_call(raised.value)  # type: ignore[arg-type]
    assert status is not None
    violation, excerpt = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(violation)
    assert status.details[1].Unpack(excerpt)
    assert violation.field_violations[0].description.endswith("(column 15)")
    assert dict(excerpt.metadata) == {
        "field": "functions[0]", "index": "0", "column": "14", "excerpt": "with_pair(pair.third)", "caret": "14"
    }  # fmt: skip


def test_who_may_not_list_is_refused(tmp_path: Path, kernel: FakeKernel) -> None:
    nobody = Role("nobody", everybody=True, list=("none",), trace=("none",))
    with kernel_functions(kernel) as functions, served(tmp_path, roles=[nobody], functions=functions) as server:
        code, text = refused(lambda: asked(server, "with_pair"))
    assert (code, text) == (grpc.StatusCode.PERMISSION_DENIED, "role nobody does not allow listing probes")
    # what there was to open is what the fake itself looked at
    assert kernel.opened == []


def test_kernel_without_btf(server: Served, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> list[str]:
        raise KernelFeatureError("kernel BTF", "/sys/kernel/btf: No such file", "boot another kernel")

    monkeypatch.setattr(kernel, "modules", none)
    assert refused(lambda: asked(server, "with_pair")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "kernel BTF: /sys/kernel/btf: No such file; boot another kernel",
    )


def test_clients(server: Served) -> None:
    async def ask() -> tuple[str, ...]:
        async with AsyncClient(f"unix:{server.socket}") as client:
            (function,) = await client.kernel_functions(["returns_pair"])
            return (function.prototype, *await client.kernel_function_names("returns_p*"))

    assert asyncio.run(ask()) == ("struct pair returns_pair(int a)", "returns_pair")
    with Client(f"unix:{server.socket}") as client:
        listing = client.kernel_functions("with_many(pair.second)")
        assert listing.functions[0].values[0].refused == "it is on the stack: 6 registers hold arguments"
        with pytest.raises(InvalidRequestError, match="no argument is called x"):
            client.kernel_functions("with_many(x)")


def test_command(run: Run) -> None:
    status, out, err = run("with_pair", "with_odd", "nf_get")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "int nf_get(struct outer *outer, volatile const char *text, int (*rows)[3], compare_t compare, void *anything)",
        "  of module nf_nat",
        "  attaches by fentry, kprobe",
        "int with_odd(int a, struct odd odd, int b)",
        "  does not attach: ftrace cannot patch it: it is marked notrace, or its code was freed after the start",
        "  odd cannot be traced: it is a struct of 9 bytes, passed by value in memory",
        "int with_pair(int a, struct pair pair, int b)",
        "  attaches by fentry, kprobe",
    ]


def test_command_with_values(run: Run) -> None:
    values = "outer, outer->tag, outer->others[2]->flags.high, rows[1], outer->color, outer->next->name[0], return"
    status, out, err = run(f"by_pointer({values})")
    assert (status, err) == (0, "")
    assert out.splitlines()[2] == "  outer                         struct outer *  8 bytes in rdi"
    assert [" ".join(line.split()) for line in out.splitlines()[3:]] == [
        "outer->tag char 1 byte at outer",
        "outer->others[2]->flags.high int 7 bits at *(*(outer + 176) + 16) + 24, from bit 3",
        "rows[1] int[3] 12 bytes at rows + 12",
        "outer->color enum color 4 bytes at outer + 160",
        ", ".join(f"{name}={number}" for name, number in colors().items()),
        "outer->next->name[0] const char 1 byte at *(*(outer + 168) + 192)",
        "return int 4 bytes in rax",
    ]
    _, out, _ = run("with_pair(pair.second)")
    assert out.splitlines()[-1] == "  pair.second  long int  8 bytes in rsi, rdx, from byte 8"


def test_command_in_json(run: Run) -> None:
    status, out, err = run("--json", "with_large", "by_pointer(outer->flags.low, outer->color)")
    assert (status, err) == (0, "")
    pointer, large = map(json.loads, out.splitlines())
    assert (large["function"], large["module"], large["attaches_by"]) == ("with_large", "vmlinux", ["kprobe"])
    assert large["refused"] == ["fentry: large not in registers"]
    assert large["args"][1:] == [
        {
            "name": "large",
            "type": "struct large",
            "size": 24,
            "registers": [],
            "refused": "it is a struct of 24 bytes, passed by value in memory",
        },
        {"name": "b", "type": "int", "size": 4, "registers": ["rsi"]},
    ]
    assert large["returns"] == {"name": "return", "type": "int", "size": 4, "registers": ["rax"]}
    assert "values" not in large
    low, color = pointer["values"]
    assert (low["argument"], low["offsets"], low["bit_offset"], low["bits"]) == (0, [0, 24], 0, 3)
    assert color["enumerators"] == colors()


def test_command_without_such_functions(run: Run) -> None:
    status, out, err = run("with_pear", "zz_*")
    assert (status, out) == (1, "")
    inlined = "there is no such function, or it is inlined wherever it is called"
    assert err.splitlines() == [
        f"stapsdt: with_pear: {inlined}; did you mean with_pair?",
        "stapsdt: zz_*: no function of the kernel's BTF matches",
    ]
    status, out, err = run("with_pair(par)")
    assert (status, out) == (2, "")
    assert err == "stapsdt: functions: no argument is called par; its arguments are a, pair, b (column 11)\n"
    assert run()[0] == 2


def test_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["kernel"]) == 2
    assert capsys.readouterr().err == "stapsdt: error: missing command; see 'stapsdt kernel --help'\n"


def test_command_on_a_host_without_any_way(
    tmp_path: Path, kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MAX_FUNCTIONS", 2)
    other = tmp_path / "other"
    other.mkdir()
    with kernel_functions(kernel, NO_WAYS) as functions, served(other, functions=functions) as server:
        target = f"unix:{server.socket}"
        _, out, err = run("returns_*", target=target)
        assert run("zzz", target=target)[2].count("\n") == 1
    assert out == (
        "double returns_float(int a)\n"
        "  return cannot be traced: it is a floating-point number, which no kernel register holds\n"
        "struct large returns_large(int a, int b)\n"
        "  does not attach: fentry: it returns a struct or union\n"
        "  return cannot be traced: it is 24 bytes, which the function returns in memory\n"
    )
    assert err == (
        "stapsdt: 2 functions left out: narrow it with a longer name or a module\n"
        "stapsdt: no kernel function can be attached to on this host (fentry: refused; kprobe: the kernel has none); "
        "run 'stapsdt doctor' for what mends it\n"
    )


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("stapsdt kern", "kern", ["kernel"]),
        ("stapsdt kernel in", "in", ["info"]),
        ("stapsdt kernel info --js", "--js", ["--json"]),
        ("stapsdt kernel info returns_l", "returns_l", ["returns_large"]),
        ("stapsdt kernel info nf_nat:nf_", "nf_", ["nf_get"]),
        ("stapsdt kernel info 'with_pair(", "'with_pair(", []),
    ],
)
def test_completion(server: Served, line: str, word: str, found: list[str]) -> None:
    assert complete(f"unix:{server.socket}", line, word) == found
