"""Admission of subscriptions: the server's limits and the clients' quotas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stapsdtd.config import Limits, Quotas
from stapsdtd.errors import LimitReachedError
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import Subscription


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Of files that live subscriptions name, each of which takes a descriptor. notes: take some 500 bytes each."""

    files: int = 10_000
    files_per_client: int = 4000
    notes_per_client: int = 400_000

    def check(self, client: str, files: Sequence[NamedFile], held: Iterable[tuple[str, NamedFile]]) -> None:
        """Check what a client names in addition. held: what is named already, and by whom. Raises LimitReachedError."""
        if not files:
            return
        named = [*held, *((client, file) for file in files)]
        of_client = [file for name, file in named if name == client]
        if len(of_client) > self.files_per_client:
            text = f"your subscriptions would name more than {self.files_per_client} files"
            raise LimitReachedError(text, "files_per_client", "files")
        if sum(file.notes for file in of_client) > self.notes_per_client:
            text = f"your subscriptions' files would have more than {self.notes_per_client} notes"
            raise LimitReachedError(text, "notes_per_client", "files")
        if len(named) > self.files:
            # do not reveal how many other clients have
            raise LimitReachedError(
                f"all subscriptions together would name more than {self.files} files", "files", "files"
            )


DEFAULT_FILE_LIMITS = FileLimits()


class AdmissionControl:
    """Checks new subscriptions against the server's limits and their clients' quotas. Called from one thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._principals: dict[str, Principal] = {}

    def admit(
        self,
        queue_bytes: int,
        name: str,
        quotas: Quotas,
        live: Collection[Subscription],
        ended: Collection[Subscription],
    ) -> Principal:
        """Charge one more subscription to its client, until release().

        ended: subscriptions whose events are still kept for a stream. Raises LimitReachedError.
        """
        limits = self._limits
        if len(live) >= limits.max_subscriptions:
            text = f"there are {limits.max_subscriptions} subscriptions, as many as this server allows"
            raise LimitReachedError(text, "max_subscriptions")
        # a client that opens a stream and does not read it keeps the log for as long as it likes
        kept = [(each.client.name, sum(clause.log.kept_bytes for clause in each.clauses)) for each in ended]
        total = queue_bytes + sum(each.spec.queue_bytes for each in live) + sum(size for _, size in kept)
        if total > limits.max_total_queue_bytes:
            # do not reveal how much other clients have
            limit = limits.max_total_queue_bytes
            text = f"all queues would take more than the {limit} bytes that this server allows"
            raise LimitReachedError(text, "max_total_queue_bytes", "queue_bytes")
        principal = self._principals.get(name) or Principal(name)
        principal.change_quotas(quotas)
        principal.begin(queue_bytes, sum(size for owner, size in kept if owner == name))
        self._principals[name] = principal
        return principal

    def release(self, principal: Principal, queue_bytes: int) -> None:
        principal.end(queue_bytes)
        if not principal.subscriptions:
            del self._principals[principal.name]
