"""From a peer through a role to rights."""

from __future__ import annotations

import gc
import grp
import itertools
import logging
import os
import pwd
from dataclasses import replace

import pytest

from stapsdtd.api.access import Gate
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import NO_USERS, Peer, Rights
from stapsdtd.catalog.selectors import parse
from stapsdtd.config import OPERATOR, USER, Quotas, Role
from stapsdtd.errors import AccessDeniedError, InvalidArgumentError, LimitReachedError
from stapsdtd.runtime.line_limiter import LineLimiter
from stapsdtd.runtime.shares import Shares
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.token_bucket import TokenBucket
from stapsdtd.subscribe_options import Scope

SOCKET = "unix:/run/x"
ROOT, ANNE = Peer(SOCKET, 0, frozenset({0}), 1), Peer(SOCKET, 64101, frozenset({64101, 64110}), 2)
REMOTE = Peer("tcp:host:1", names=("web.example.org", "web"))


def rights(peer: Peer, *roles: Role) -> Rights:
    return Policy(roles or (OPERATOR, USER)).rights(peer)


class TestPolicy:
    def test_roles_there_are_by_default(self) -> None:
        operator, user = rights(ROOT), rights(ANNE)
        assert (operator.role, operator.list, operator.trace, operator.manage) == ("operator", None, None, True)
        own = frozenset({64101})
        assert (user.role, user.list, user.trace, user.manage, user.quotas) == ("user", own, own, False, USER.quotas)
        assert (operator.client, user.client) == ("uid 0", "uid 64101")

    def test_kernel_functions_take_a_right_of_their_own(self) -> None:
        rights(ROOT).check_functions()
        member = replace(ANNE, groups=frozenset({grp.getgrgid(os.getgid()).gr_gid}))
        operator = replace(OPERATOR, groups=(grp.getgrgid(os.getgid()).gr_name,))
        assert rights(member, operator).trace is None
        with pytest.raises(AccessDeniedError, match="role operator does not allow tracing kernel functions"):
            rights(member, operator).check_functions()
        rights(member, replace(operator, functions=True)).check_functions()
        # they may handle the data of those whose processes it may not trace
        with pytest.raises(AccessDeniedError, match="role user does not allow tracing kernel functions"):
            rights(ANNE, replace(USER, functions=True)).check_functions()

    def test_who_may_not_trace_functions_may_not_use_others_subscriptions_to_them(self) -> None:
        spec = SubscriptionSpec((ClauseSpec((parse("app:*"),), "", None),), Scope(), 30, 1 << 20, 64)
        without, having = rights(ROOT), Rights("uid 64101", "operator", manage=True)
        assert having.allow(spec)
        assert without.allow(replace(spec, has_functions=True))
        assert not having.allow(replace(spec, has_functions=True))

    def test_engine_that_cannot_tell_processes_apart_serves_operators(self) -> None:
        policy = Policy((OPERATOR, USER, Role("none", trace=("none",))), "it cannot tell")
        assert policy.restricted == ["user"]
        assert policy.rights(ROOT).trace is None
        policy.rights(ROOT).check_trace([1])
        user = policy.rights(ANNE)
        assert (user.list, user.trace, user.trace_restriction) == (frozenset({64101}), NO_USERS, "it cannot tell")
        with pytest.raises(AccessDeniedError, match="does not allow tracing with this server's engine: it cannot tell"):
            user.check_trace([])
        assert not Policy((OPERATOR, USER)).restricted
        # who may trace nothing anyway is told no other reason
        nobody = Policy([replace(USER, trace=("none",))], "it cannot tell")
        assert (nobody.restricted, nobody.rights(ANNE).trace_restriction) == ([], "")

    def test_group_that_this_host_need_not_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> grp.struct_group:
            raise KeyError(name)

        monkeypatch.setattr(grp, "getgrnam", missing)
        assert rights(ROOT).role == "operator"
        with pytest.raises(InvalidArgumentError, match=r"roles\.x\.groups: there is no group 'wheel' on this host"):
            Policy([Role("x", groups=("wheel",))])

    def test_group(self) -> None:
        known = grp.getgrgid(os.getgid())
        operator = replace(OPERATOR, groups=(known.gr_name,))
        member = replace(ANNE, groups=frozenset({64101, known.gr_gid}))
        assert rights(member, operator, USER).role == "operator"
        assert rights(ANNE, operator, USER).role == "user"

    def test_users_by_name_and_number(self) -> None:
        name = pwd.getpwuid(os.getuid()).pw_name
        role = Role("x", users=(name,), list=("64102", "own"), trace=("64102",))
        me = Peer(SOCKET, os.getuid())
        assert rights(me, role).list == frozenset({64102, os.getuid()})
        assert rights(me, role).trace == frozenset({64102})
        for key in ("users", "list", "trace"):
            with pytest.raises(
                InvalidArgumentError, match=rf"roles\.x\.{key}: there is no user 'no such' on this host"
            ):
                Policy([Role("x", **{key: ("no such",)})])  # type: ignore[arg-type]

    def test_nobodys_number_is_no_user(self) -> None:
        """A process that is nobody's must be no role's."""
        for number in (1 << 32) - 1, 1 << 40:
            with pytest.raises(InvalidArgumentError, match="is larger than any user id"):
                Policy([Role("x", trace=(str(number),))])
        Policy([Role("x", trace=(str((1 << 32) - 2),))])

    def test_who_is_meant_by_name_comes_first(self) -> None:
        named = Role("named", users=("64101",), trace=("none",))
        assert rights(ANNE, USER, named).role == "named"
        assert rights(ANNE, replace(named, name="first"), USER, named).role == "first"
        assert rights(ROOT, USER, named).role == "user"

    @pytest.mark.parametrize(("wanted", "users"), [("all", None), ("own", {64101}), ("none", set()), ("7", {7})])
    def test_whose_processes(self, wanted: str, users: set[int] | None) -> None:
        found = rights(ANNE, Role("x", everybody=True, list=(wanted,), trace=(wanted,)))
        assert found.list == found.trace == users

    def test_certificates(self) -> None:
        role = Role("web", certificates=("web",), list=("own", "33"), trace=("own",))
        found = rights(REMOTE, role)
        assert (found.client, found.list, found.trace) == ("certificate web.example.org", frozenset({33}), NO_USERS)
        with pytest.raises(AccessDeniedError, match=r"no role of this server applies to certificate web\.example\.org"):
            rights(REMOTE, OPERATOR)
        # who has no uid has not root's, nor anybody's whom a name happens to resemble
        assert rights(replace(REMOTE, names=("root", "0")), Role("x", users=("0",)), USER).role == "user"

    def test_role_of_a_listener_is_all_there_is(self) -> None:
        peer = replace(ROOT, listener_role="user")
        assert rights(peer).role == "user"
        with pytest.raises(AccessDeniedError):
            rights(replace(ROOT, listener_role="gone"))
        assert rights(Peer("tcp:127.0.0.1:1", listener_role="user")).client == "tcp:127.0.0.1:1"

    def test_who_has_no_role(self) -> None:
        policy = Policy([OPERATOR])
        assert policy.rights_or_none(ANNE) is None
        assert policy.rights_or_none(ROOT) == policy.rights(ROOT)


class TestRights:
    OWN = rights(ANNE)

    def test_processes(self) -> None:
        mine = Rights("uid 0", "x", trace=frozenset({os.getuid()}))
        mine.check_trace([os.getpid()])
        rights(ROOT).check_trace([1 << 30])
        for pid in (os.getpid(), 1 << 30):
            with pytest.raises(AccessDeniedError) as refused:
                self.OWN.check_trace([pid])
            assert str(refused.value) == (
                f"role user does not allow tracing process {pid}, only those with the rights of uid 64101 and no others"
            )

    def test_nothing(self) -> None:
        nothing = Rights("uid 1", "x", list=NO_USERS, trace=NO_USERS)
        with pytest.raises(AccessDeniedError, match="role x does not allow tracing"):
            nothing.check_trace([])
        with pytest.raises(AccessDeniedError, match="role x does not allow listing probes"):
            nothing.check_list()
        self.OWN.check_list()
        self.OWN.check_trace([])

    @pytest.mark.parametrize(
        ("trace", "users", "covers"),
        [(None, None, True), (None, {1}, True), ({1, 2}, {1}, True), ({1}, {1, 2}, False), ({1}, None, False)],
    )
    def test_covers(self, trace: set[int] | None, users: set[int] | None, *, covers: bool) -> None:
        found = Rights("uid 1", "x", trace=None if trace is None else frozenset(trace))
        assert found.covers(None if users is None else frozenset(users)) is covers

    @pytest.mark.parametrize(
        ("client", "owners", "may", "manager_may"),
        [
            ("uid 64101", {64101}, True, True),
            ("uid 64101", {64101, 7}, False, True),
            ("uid 64101", None, False, True),
            ("uid 7", {64101}, False, True),
        ],
    )
    def test_subscriptions(self, client: str, owners: set[int] | None, *, may: bool, manager_may: bool) -> None:
        spec = SubscriptionSpec(
            (ClauseSpec((parse("a:b"),)),), Scope(), 1, 1, 1, owners=None if owners is None else frozenset(owners)
        )
        subscription = Subscription("id", itertools.count(1), spec, 1, lambda *_: None, Principal(client))
        assert self.OWN.may_use(subscription) is may
        assert replace(self.OWN, manage=True).may_use(subscription) is manager_may


class TestGate:
    def gate(self) -> Gate:
        peers = {"anne": ANNE, "again": replace(ANNE, pid=3), "root": ROOT, "bert": Peer(SOCKET, 64102)}

        def find(address: str) -> Peer:
            if address not in peers:
                raise AccessDeniedError("unknown connection", "connect")
            return peers[address]

        policy = Policy([OPERATOR, replace(USER, quotas=Quotas(max_requests_per_second=2))])
        return Gate(find, policy, Shares(), clock=lambda: 0.0)

    def test_who_calls(self) -> None:
        caller = self.gate().enter("list", "anne")
        assert (caller.call, caller.peer, caller.rights.client) == ("list", ANNE, "uid 64101")
        with pytest.raises(AccessDeniedError, match="unknown connection"):
            self.gate().enter("list", "somebody")

    def test_requests_of_all_connections_of_a_client(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = self.gate()
        for name in ("anne", "again"):
            gate.enter("list", name)
        with pytest.raises(LimitReachedError, match="uid 64101 makes more than 2 requests a second; try again later"):
            gate.enter("list", "anne")
        gate.enter("list", "bert")
        for _ in range(100):
            gate.enter("list", "root")
        (record,) = caplog.records
        assert (record.levelno, record.getMessage()) == (logging.WARNING, "list refused")
        assert vars(record)["fields"]["client"] == "uid 64101"
        assert gate.refusals == {"call": 1}

    def test_records_of_refusals_are_few_but_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        gate, limiter = self.gate(), LineLimiter()
        for _ in range(200):
            gate.record_refusal("connection", "connect", ANNE, AccessDeniedError("no", "connect"))
        assert sum(map(limiter.admits, caplog.records)) == 1
        assert gate.refusals["connection"] == 200

    def test_another_policy_counts_from_the_next_call_on(self) -> None:
        gate = self.gate()
        gate.enter("list", "anne")
        gate.policy = Policy([OPERATOR, replace(USER, trace=("none",), quotas=Quotas(max_requests_per_second=1))])
        assert gate.enter("list", "anne").rights.trace == NO_USERS
        with pytest.raises(LimitReachedError, match="more than 1 requests"):
            gate.enter("list", "anne")
        gate.policy = Policy([OPERATOR, replace(USER, quotas=Quotas(max_requests_per_second=5))])
        for _ in range(5):
            gate.enter("list", "anne")
        gate.policy = Policy([OPERATOR])
        with pytest.raises(AccessDeniedError, match="no role of this server applies to uid 64101"):
            gate.enter("list", "anne")

    def test_quiet_clients_are_forgotten(self) -> None:
        def buckets() -> int:
            gc.collect()
            return sum(type(each) is TokenBucket for each in gc.get_objects())

        seconds = itertools.count()
        before = buckets()
        gate = Gate(
            lambda address: Peer(SOCKET, int(address)),
            Policy([replace(USER, quotas=Quotas(max_requests_per_second=1000))]),
            Shares(),
            clock=lambda: next(seconds),
        )
        for uid in range(3000):
            gate.enter("list", str(uid))
        # those of 1,000 clients and the last
        assert 1 < buckets() - before <= 1001

    def test_refusal_inside_a_call_is_recorded(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = self.gate()
        caller = gate.enter("subscribe", "anne")
        with pytest.raises(AccessDeniedError), caller.recording_refusals():
            raise AccessDeniedError("no", "connect")
        with pytest.raises(ValueError, match="x"), caller.recording_refusals():
            raise ValueError("x")
        (record,) = caplog.records
        assert {name: str(value) for name, value in vars(record)["fields"].items()} == {
            "client": "uid 64101", "pid": "2", "role": "user", "reason": "no",
        }  # fmt: skip
        assert gate.refusals["call"] == 1
