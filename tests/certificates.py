"""Authorities and certificates, made with openssl(1)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from stapsdtd import client, config
from tests.support import require, wait_for


class Authority:
    """Its own certificate is `path`; what it signs is beside that."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        require(shutil.which("openssl"), "openssl")
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.path = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        # Python 3.13's default context refuses an authority that does not say that it is one
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl("req", "-x509", *_new_key(self._key), *usage, "-out", self.path, "-days", "1", "-subj", f"/CN={name}")

    def sign(self, name: str, *alternatives: str, usage: str = "clientAuth", days: int = 1) -> tuple[str, str]:
        """A certificate and its key. alternatives are as DNS:localhost; with 0 days it has expired."""
        certificate, key, request = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "request"))
        extensions = self._folder / f"{name}.extensions"
        lines = [f"extendedKeyUsage={usage}"]
        if alternatives:
            lines.append(f"subjectAltName={','.join(alternatives)}")
        extensions.write_text("\n".join(lines))
        _openssl("req", *_new_key(key), "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.path, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signing, "-days", str(days), "-out", certificate)
        if not days:
            # it is valid until the end of this second
            wait_for(lambda: not _is_valid(certificate), f"{certificate} to expire")
        return str(certificate), str(key)

    def server(self) -> config.Tls:
        """Of localhost; clients need a certificate of this authority too."""
        certificate, key = self.sign("server", "DNS:localhost", "IP:127.0.0.1", usage="serverAuth")
        return config.Tls(certificate, key, str(self.path))

    def client(self, name: str, *alternatives: str, usage: str = "clientAuth", days: int = 1) -> client.Tls:
        return client.Tls(*self.sign(name, *alternatives, usage=usage, days=days), str(self.path))


def _new_key(path: Path) -> tuple[Path | str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path)


def _openssl(*arguments: Path | str) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def _is_valid(certificate: Path) -> bool:
    checked = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-checkend", "0"], capture_output=True, check=False
    )
    return checked.returncode == 0
