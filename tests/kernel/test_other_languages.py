"""The examples of clients in other languages, against a daemon: what they print of events and the account is right."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.support import COMMANDS, ROOT, TICKER, Ticker, held_port, require, wait_for

pytestmark = pytest.mark.kernel

EXAMPLES = ROOT / "examples"
NODE_MODULES = ROOT / ".venv" / "node" / "node_modules"
JARS = Path("/usr/share/java")
LIBRARIES = (
    "grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-protobuf", "grpc-protobuf-lite", "grpc-stub",
    "gson", "guava", "netty-buffer", "netty-codec", "netty-codec-http", "netty-codec-http2", "netty-common",
    "netty-handler", "netty-handler-proxy", "netty-resolver", "netty-transport", "perfmark-api", "protobuf",
)  # fmt: skip
GENERATED = "geronimo-annotation-1.3-spec"
"""Has javax.annotation.Generated, for the compiler."""
CLASS_PATH = ":".join(str(JARS / f"{name}.jar") for name in LIBRARIES)
SELECTORS = [f"{TICKER}:tick", f"{TICKER}:values", f"{TICKER}:text(arg0:str, arg1)"]
COUNT = 5


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Those of a daemon: a unix socket, and HOST:PORT without TLS."""
    folder = tmp_path_factory.mktemp("daemon")
    unix, log, configuration = folder / "daemon.sock", folder / "log", folder / "stapsdtd.toml"
    with held_port() as port, open(log, "ab") as file:
        configuration.write_text(f"""
            [[listen]]
            address = "unix:{unix}"
            [[listen]]
            address = "tcp:127.0.0.1:{port}"
            plain = true
            role = "operator"
        """)
        command = [str(COMMANDS / "stapsdtd"), "--no-inventory", "--config", str(configuration)]
        process = subprocess.Popen(command, stderr=file)
        try:
            wait_for(lambda: "serving on" in log.read_text(), "the daemon", seconds=60)
            yield f"unix:{unix}", f"127.0.0.1:{port}"
            process.terminate()
            assert process.wait(timeout=30) == 0
            assert " ERROR " not in log.read_text()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def shown(address: str, ticker: Ticker, *command: str | Path, **environment: str) -> tuple[list[str], list[str]]:
    """Return what an example prints of some events, and what it should print of them."""
    with Client(address) as client:
        before = len(client.subscriptions())
        example = subprocess.Popen(
            list(map(str, [*command, COUNT, *SELECTORS])),
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:

            def is_streaming() -> bool:
                assert example.poll() is None, example.communicate()
                found = client.subscriptions()
                return len(found) > before and found[-1].streaming

            wait_for(is_streaming, "the example to stream", seconds=60)
            with client.subscribe(SELECTORS) as subscription:
                for line in ("fire 3", "values", "text größer"):
                    ticker.do(line)
                events = [
                    "  ".join(map(str, [event.pid, f"{TICKER}:{event.probe.name}", *event.values]))
                    for event in islice(subscription.events(), COUNT)
                ]
            printed, errors = example.communicate(timeout=60)
        finally:
            example.kill()
            example.communicate()
    assert not errors
    return printed.splitlines(), [*events, f"fired {COUNT}, delivered {COUNT}, filtered 0"]


def test_node(addresses: tuple[str, str], ticker: Ticker) -> None:
    require(shutil.which("node"), "node")
    require(NODE_MODULES.is_dir(), "the packages of examples/node")
    unix, _ = addresses
    printed, expected = shown(unix, ticker, "node", EXAMPLES / "node" / "follow.js", unix, NODE_PATH=str(NODE_MODULES))
    assert printed == expected
    assert str(1 << 63) in printed[3]
    assert str((1 << 64) - 1) in printed[3]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plugin = shutil.which("grpc_java_plugin")
    require(plugin and shutil.which("javac"), "grpc_java_plugin and javac")
    sources, compiled = (tmp_path_factory.mktemp(name) for name in ("sources", "classes"))
    protos = sorted((ROOT / "proto").glob("stapsdtd/v1/*.proto"))
    outputs = [f"--{name}_out={sources}" for name in ("java", "grpc-java")]
    generate = ["protoc", f"--proto_path={ROOT / 'proto'}", f"--plugin=protoc-gen-grpc-java={plugin}", *outputs]
    subprocess.run([*generate, *protos], check=True)
    generated = sorted(sources.rglob("*.java"))
    assert {each.relative_to(sources).parent for each in generated} == {Path("org/stapsdtd/v1")}
    path = f"{CLASS_PATH}:{JARS / GENERATED}.jar"
    subprocess.run(
        ["javac", "-nowarn", "-cp", path, "-d", compiled, *generated, EXAMPLES / "java" / "Follow.java"], check=True
    )
    return compiled


def test_java(addresses: tuple[str, str], classes: Path, ticker: Ticker) -> None:
    unix, tcp = addresses
    printed, expected = shown(unix, ticker, "java", "-cp", f"{classes}:{CLASS_PATH}", "Follow", tcp)
    assert printed == expected
    assert str((1 << 64) - 1) in printed[3]


@pytest.mark.parametrize("language", ["node", "java"])
def test_a_refusal_is_told(
    addresses: tuple[str, str], language: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    unix, tcp = addresses
    run: dict[str, Callable[[], list[str | Path]]] = {
        "node": lambda: ["node", EXAMPLES / "node" / "follow.js", unix],
        "java": lambda: ["java", "-cp", f"{request.getfixturevalue('classes')}:{CLASS_PATH}", "Follow", tcp],
    }
    environment = {**os.environ, "NODE_PATH": str(NODE_MODULES)}
    command = [*run[language](), "1", "a:b(c"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("selectors: 'a:b(c' lacks a closing parenthesis")
