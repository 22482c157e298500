from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stapsdtd.config import OPERATOR, USER, Config, ContainerSettings, Limits, Listener, Quotas, Role, Tls, validated
from stapsdtd.config.file import load
from stapsdtd.errors import InvalidArgumentError


def loaded(folder: Path, text: str | bytes) -> Config:
    path = folder / "stapsdtd.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path))


def test_all_settings(tmp_path: Path) -> None:
    text = """
    engine = "ftrace"
    [limits]
    max_selectors = 7
    [[listen]]
    address = "unix:/tmp/x"
    owner = "root"
    group = "adm"
    mode = "0660"
    role = "support"
    [[listen]]
    address = "tcp:[::]:7461"
    certificate = "c.pem"
    key = "k.pem"
    client_authority = "a.pem"
    [[listen]]
    address = "tcp:127.0.0.1:7462"
    plain = true
    role = "user"
    [metrics]
    listen = "unix:/tmp/m"
    owner = "root"
    group = "adm"
    mode = "0640"
    [containers]
    storage = ["/disk/containers"]
    [roles.support]
    users = ["alice"]
    groups = ["dba"]
    certificates = ["alice.example"]
    list = "all"
    trace = ["postgres", "own"]
    max_sites = 9
    [roles.user]
    trace = "none"
    """
    support = Role(
        "support", ("alice",), ("dba",), ("alice.example",), False, ("all",), ("postgres", "own"), False,
        False, Quotas(max_sites=9),
    )  # fmt: skip
    assert loaded(tmp_path, text) == Config(
        (
            Listener("unix:/tmp/x", "root", "adm", 0o660, "support"),
            Listener("tcp:[::]:7461", tls=Tls("c.pem", "k.pem", "a.pem")),
            Listener("tcp:127.0.0.1:7462", role="user", plain=True),
        ),
        "ftrace",
        Limits(max_selectors=7),
        (support, replace(USER, trace=("none",)), OPERATOR),
        Listener("unix:/tmp/m", "root", "adm", 0o640),
        containers=ContainerSettings(storage=("/disk/containers",)),
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "[limits]\n", "[roles]\n"])
def test_nothing_set(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text) == Config()


def test_one_address_is_enough(tmp_path: Path) -> None:
    assert loaded(tmp_path, 'listen = "unix:/tmp/x"').listeners == (Listener("unix:/tmp/x"),)
    two = loaded(tmp_path, 'listen = ["unix:/tmp/x", {address = "unix:/tmp/y", mode = "600"}]')
    assert two.listeners == (Listener("unix:/tmp/x"), Listener("unix:/tmp/y", mode=0o600))


def test_file_systems_are_named_as_mountinfo_does(tmp_path: Path) -> None:
    text = '[filesystems]\narm = ["fuse.mergerfs", "9p", "nfs4"]'
    assert loaded(tmp_path, text).filesystems.arm == ("fuse.mergerfs", "9p", "nfs4")
    assert loaded(tmp_path, "").filesystems.arm == ()


@pytest.mark.parametrize("address", ["unix:/tmp/m", "tcp:127.0.0.1:9100", "tcp:[::1]:9100", "tcp:localhost:9100"])
def test_metrics_are_for_root_and_its_group_or_on_loopback(tmp_path: Path, address: str) -> None:
    assert loaded(tmp_path, f'[metrics]\nlisten = "{address}"').metrics == Listener(address, mode=0o660)


TLS = 'certificate = "c"\nkey = "k"\nclient_authority = "a"\n'


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (
            'lisen = "unix:/x"',
            "lisen",
            "is no setting; there are containers, engine, filesystems, inventory, limits, listen, metrics, roles",
        ),
        ("listen = 5", "listen", "must be an address or a table"),
        ("listen = []", "listen", "is empty"),
        ('listen = "tcp:"', "listen", "not of the form"),
        ('listen = "tcp:localhost:99999"', "listen", "not of the form"),
        ('listen = ["unix:/x", "unix:/x"]', "listen", "is given twice"),
        ('listen = "tcp:localhost:1"', "listen.certificate", "is missing"),
        ('[[listen]]\naddress = "tcp:0.0.0.0:1"\nplain = true\nrole = "user"', "listen.plain", "no loopback"),
        ('[[listen]]\naddress = "tcp:127.0.0.1:1"\nplain = true', "listen.role", "is missing"),
        (
            f'[[listen]]\naddress = "tcp:127.0.0.1:1"\nplain = true\n{TLS}',
            "listen.plain",
            "has a certificate; remove one",
        ),
        (f'[[listen]]\naddress = "unix:/x"\n{TLS}', "listen.certificate", "for tcp"),
        ('[[listen]]\naddress = "tcp:h:1"\nkey = "k"', "listen.certificate", "is missing"),
        ('[[listen]]\naddress = "unix:/x"\nmode = 660', "listen.mode", 'a mode such as "0660"'),
        ('[[listen]]\naddress = "unix:/x"\nmode = "0888"', "listen.mode", 'a mode such as "0660"'),
        ('[[listen]]\naddress = "unix:/x"\nrole = "nobody"', "listen.role", "is no role; there are operator, user"),
        ('[[listen]]\naddress = "unix:/x"\nuser = "x"', "listen.user", "is no setting of a listener"),
        ("metrics = 5", "metrics", "must be a table"),
        ("[filesystems]\narm = 5", "filesystems.arm", "must be an array of strings"),
        ('[filesystems]\narm = ["nfs 4"]', "filesystems.arm", "'nfs 4' is no type of file system"),
        ('[filesystems]\nlist = ["nfs4"]', "filesystems.list", "is no setting of file systems; there are arm"),
        ('[containers]\ndocker = ["docker"]', "containers.docker", "'docker' is not an absolute path"),
        ("[metrics]", "metrics.listen", "not of the form"),
        ('[metrics]\nlisten = "tcp:0.0.0.0:9100"', "metrics.listen", "no loopback address"),
        ('[metrics]\nlisten = "tcp:h:9100"', "metrics.listen", "no loopback address"),
        ('[metrics]\nlisten = "tcp:127.0.0.1:99999"', "metrics.listen", "not of the form"),
        ('listen = "unix:/x"\n[metrics]\nlisten = "unix:/x"', "metrics.listen", "already serves clients"),
        ('[metrics]\nlisten = "unix:/x"\nmode = "999"', "metrics.mode", "a mode such as"),
        ('[metrics]\nlisten = "unix:/x"\nrole = "user"', "metrics.role", "is no setting of metrics"),
        ("roles = 5", "roles", "must be a table"),
        ("[roles]\nx = 5", "roles.x", "must be a table"),
        ("[roles.x]\nusers = 5", "roles.x.users", "must be an array of strings"),
        ("[roles.x]\nusers = [5]", "roles.x.users", r"must be an array of strings, not \[5\]"),
        ('[roles.x]\nlist = "mine"', "roles.x.list", '"all", "own", "none" or an array'),
        ("[roles.x]\nmanage = 1", "roles.x.manage", "must be true or false"),
        ("[roles.x]\nmax_sites = -1", "roles.x.max_sites", "above 0"),
        ("[roles.x]\nmax_site = 1", "roles.x.max_site", "is no setting of a role"),
        ("limits = 5", "limits", "must be a table"),
        ("[limits]\nmax_selector = 1", "limits.max_selector", "is no limit; there are default_kernel_buffer_kib"),
        ("[limits]\nmax_selectors = 0", "limits.max_selectors", "above 0, not 0"),
        ("[limits]\nmax_selectors = true", "limits.max_selectors", "not True"),
        ("[limits]\nmax_selectors = 1.5", "limits.max_selectors", "not 1.5"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, field: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as raised:
        loaded(tmp_path, text)
    assert raised.value.field == field


@pytest.mark.parametrize("text", ["listen", b"\xff\xfe", "a = 1\na = 2"])
def test_what_is_not_toml(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="is not TOML") as raised:
        loaded(tmp_path, text)
    assert raised.value.field == str(tmp_path / "stapsdtd.toml")


def test_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="missing: cannot be read: No such file or directory; see "):
        load(str(tmp_path / "missing"))


def test_defaults_are_valid() -> None:
    assert validated(Config()) == Config()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Config(engine="dtrace"), "engine"),
        (Config((Listener("/run/x"),)), "listen"),
        (Config((Listener("unix:"),)), "listen"),
        (Config((Listener("tcp:1"),)), "listen"),
    ],
)
def test_values_that_cannot_be_used(config: Config, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        validated(config)
    assert raised.value.field == field
