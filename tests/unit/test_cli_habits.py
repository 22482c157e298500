"""What users of other tracers type, and the command that they are told."""

from __future__ import annotations

import shlex

import pytest

from stapsdtd.cli import stapsdt


@pytest.mark.parametrize(
    ("typed", "to_type"),
    [
        ("-l", "list"),
        ("--list", "list"),
        ("-lv", "list"),
        ("-l 'usdt:/bin/app:*'", "list --file /bin/app"),
        ("-l usdt:/bin/app:shop:sale", "list shop:sale --file /bin/app"),
        ("-l usdt:/bin/app:sale", "list '*:sale' --file /bin/app"),
        ("-l 'shop:*' -p 4711", "list 'shop:*' -p 4711"),
        ("-l -P postgresql", "d -l -P postgresql"),
        ("--server unix:/run/x -l", "--server unix:/run/x list"),
        ("-n 'shop:::sale { @ = count(); }' -c app", "d -n 'shop:::sale { @ = count(); }' -c app"),
        ("-s a.d 4711", "d -s a.d 4711"),
        ("-e 'shop:::sale { trace(arg0); }'", "d -n 'shop:::sale { trace(arg0); }'"),
        ("-e 'usdt:/bin/app:shop:sale { @[pid] = count(); }'", "d -n 'shop*:::sale { trace(arg0); }'"),
        ("-e 'usdt:/bin/app:sale { printf(\"x\"); }'", "d -n '*:::sale { trace(arg0); }'"),
        ("-e 'kprobe:vfs_read { @ = count(); }'", "d -n 'PROVIDER*:::NAME { trace(arg0); }'"),
        ("-p 4711 -e 'a:::b { trace(1); }'", "d -p 4711 -n 'a:::b { trace(1); }'"),
        ("-e 'a:::b { trace(1); }' -p 4711", "d -p 4711 -n 'a:::b { trace(1); }'"),
        ("-p 4711 trace a:b", "trace -p 4711 a:b"),
        ("-p4711 trace a:b", "trace -p 4711 a:b"),
        ("--pid=4711 trace a:b", "trace --pid 4711 a:b"),
        ("-p 4711", "list -p 4711"),
        ("-p 4711 'usdt:/bin/app:*'", "list -p 4711 --file /bin/app"),
        ("-c 'app 3' count a:b --by pid", "count a:b --by pid -c 'app 3'"),
        ("-c app", "trace SELECTOR -c app"),
        ("-c app a:b", "trace a:b -c app"),
        ("-V", "--version"),
        ("trace -e 'a:::b { trace(1); }'", "d -n 'a:::b { trace(1); }'"),
        ("trace a:b -n 5", "trace a:b --count 5"),
        ("trace a:b -t 5", "trace a:b --duration 5"),
        ("count a:b -i 5", "count a:b --interval 5"),
        ("stats a:b arg0 --filter 'arg0 > 1'", "stats a:b arg0 --where 'arg0 > 1'"),
        ("trace a:b --comm psql", "trace a:b --execname psql"),
    ],
)
def test_the_command_is_told(typed: str, to_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(shlex.split(typed)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("stapsdt: error: no such option ")
    assert err.endswith(f": stapsdt {to_type}\n")


@pytest.mark.parametrize(
    ("typed", "to_type"),
    [
        ("latency tcp_sendmsg --pid 1", "latency fbt::tcp_sendmsg:entry"),
        ("spans nf_conntrack:nf_ct_get", "spans fbt:nf_conntrack:nf_ct_get:entry"),
        ("count 'vfs_*'", "count 'fbt::vfs_*:entry'"),
        ("hist 'vfs_read(count)'", "hist fbt::vfs_read:entry arg0"),
    ],
)
def test_commands_for_all_probes_take_functions(typed: str, to_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["kernel", *shlex.split(typed)]) == 2
    assert f": stapsdt {to_type};" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", ["-x", "--xyzzy", "trace a:b -x", "list --count 3", "trace -i 3 a:b", "info -e", "-e"]
)
def test_help_is_named_where_no_habit_is_known(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(typed.split()) == 2
    assert "--help'\n" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["list -l", "list -p 4711", "d -l -P postgresql", "trace a:b -c true"])
def test_what_exists_is_no_habit(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["--server", "unix:/nowhere", *typed.split()]) == 1
    assert "cannot connect to unix:/nowhere" in capsys.readouterr().err
