"""What known probes mean: the names and types of their arguments, a line of text, and when they fire.

    data/postgresql.toml ──► files: checked against the schema ──► catalog ──► signature, or why it does not fit
    /etc/stapsdtd/signatures.d/*.toml ─┘      provider.d ──► dtrace_file ──► TOML for the latter

A note says only how large its arguments are. A file adds what the provider's own documentation says, and holds for a
range of versions. It is used for an object only if the object's notes do not contradict it.
"""

from __future__ import annotations

from stapsdtd.signatures.catalog import Catalog, Fit
from stapsdtd.signatures.files import OWN_FILES, SignatureFileError
from stapsdtd.signatures.model import Declared, Kind, Signature

__all__ = ["OWN_FILES", "Catalog", "Declared", "Fit", "Kind", "Signature", "SignatureFileError"]
