"""What the texts of one request cost, counted in tokens, nodes and conversions, and what is beyond its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from stapsdtd.api.requests import spec_of
from stapsdtd.api.texts import RequestTexts
from stapsdtd.catalog.selectors import MAX_SELECTOR_LENGTH, parse_capture
from stapsdtd.catalog.selectors import parse as parse_selector
from stapsdtd.config import Limits
from stapsdtd.config.request_limits import MAX_CAPTURES, MAX_CHARACTERS, MAX_PARTS, RequestBudget
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions import selectors as function_selectors
from stapsdtd.kernel import cgroups
from stapsdtd.query import parse
from stapsdtd.query.expression import Expression
from stapsdtd.query.nodes import Token
from stapsdtd.query.parse import Expressions
from stapsdtd.query.parse_error import ParseError
from stapsdtd.query.text import text_of
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.largest_requests import LARGEST, of_clauses, repeated

TOO_MANY_PARTS = "names, numbers, operators and parentheses of a request are limited to 1536 in all"
TOO_MANY_CAPTURES = "captures and values of a request are limited to 3072 in all"
TOO_LONG = "selectors, functions and expressions of a request are limited to 32768 characters in all"


def parsed(request: pb.SubscribeRequest) -> SubscriptionSpec:
    limits = Limits()
    return spec_of(request, limits, RequestTexts(limits), cgroups, None)


def expressions() -> Expressions:
    return Expressions(lambda _: None, RequestBudget())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is taken of texts: tokens and texts."""
    tokens, found = parse._tokens, Counter[str]()

    def counting(text: str) -> Iterator[Token]:
        found["texts"] += 1
        for token in tokens(text):
            found["tokens"] += 1
            yield token

    monkeypatch.setattr(parse, "_tokens", counting)
    return found


@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_requests_are_accepted(kind: str, counted: Counter[str]) -> None:
    assert parsed(LARGEST[kind]()).clauses
    assert counted["tokens"] <= MAX_PARTS


def test_a_text_is_parsed_and_converted_once_for_all_clauses(counted: Counter[str]) -> None:
    spec = parsed(repeated())
    # the filter and 32 fields, in each of 32 clauses
    assert counted["texts"] == 33
    first, *others = spec.clauses
    assert len(others) == 31
    assert all(each.predicate is first.predicate for each in others)
    sources = [[getattr(field, "source", None) for field in clause.fields] for clause in spec.clauses]
    assert len({id(source) for of_clause in sources for source in of_clause}) == 32


@pytest.mark.parametrize("take", [Expressions.value, Expressions.number, Expressions.condition])
def test_each_conversion_of_a_text_is_made_once(take: Callable[..., object]) -> None:
    texts, made = expressions(), list[Expression]()
    for _ in range(3):
        take(texts, "arg0 + 1", "where", made.append)
        take(texts, "arg0 + 2", "where", made.append)
    assert len(made) == 2


def test_a_text_may_be_a_value_and_a_condition(counted: Counter[str]) -> None:
    texts = expressions()
    taken = texts.value("arg0", "by", text_of), texts.condition("arg0", "where", text_of)
    assert (taken, counted["texts"]) == (("arg0", "arg0 != 0"), 1)


@pytest.mark.parametrize(
    "text",
    ["(" * 700 + "arg0" + ")" * 700, "!" * 1000 + "pid", "-" * 1000 + "1", "~" * 1000 + "1", "+".join(["1"] * 700)],
)
def test_each_token_is_taken_once(counted: Counter[str], text: str) -> None:
    found = expressions().value(text, "fields", lambda expression: expression)
    marks = sum(not each.isalnum() for each in text)
    names = text.count("pid") + text.count("arg0") + text.count("1")
    assert found is not None
    assert counted["tokens"] == marks + names + 1


def in_clauses(*fields: str) -> Callable[[], pb.SubscribeRequest]:
    return lambda: of_clauses([text] for text in fields)


def of_selectors(*texts: str) -> Callable[[], pb.SubscribeRequest]:
    return lambda: pb.SubscribeRequest(selectors=texts)


def list_of(elements: int) -> str:
    return f"a:b({','.join(['arg0'] * elements)})"


LISTS = [f"a{number}:b({','.join(['arg0'] * 128)})" for number in range(MAX_CAPTURES // 128)]
LONG = [f"{number:02}".ljust(MAX_SELECTOR_LENGTH, "x") for number in range(MAX_CHARACTERS // MAX_SELECTOR_LENGTH)]
HALF = "(" * (MAX_PARTS // 4 - 1) + "1" + ")" * (MAX_PARTS // 4 - 1)
"""Has half of the parts that a request may have, the end included."""


@pytest.mark.parametrize(
    ("largest", "beyond", "field", "reason"),
    [
        (in_clauses(HALF, " " + HALF), in_clauses(HALF, f" (({HALF}))"), "clauses[1].fields", TOO_MANY_PARTS),
        (of_selectors(*LISTS), of_selectors(*LISTS, "a:b(arg0)"), "selectors", TOO_MANY_CAPTURES),
        (of_selectors(*LONG), of_selectors(*LONG, "x"), "selectors", TOO_LONG),
        (
            in_clauses(*(f"'{number:03}{'x' * 4000}'" for number in range(8))),
            in_clauses(*(f"'{number:03}{'x' * 4000}'" for number in range(9))),
            "clauses[8].fields",
            TOO_LONG,
        ),
        (
            lambda: spans(128),
            lambda: spans(129),
            "clauses[1].span.start_selectors",
            "selectors of a request are limited to 256 in all",
        ),
    ],
    ids=["tokens", "captures", "characters of selectors", "characters of expressions", "selectors"],
)
def test_what_is_beyond_a_limit_is_refused_by_its_name(
    largest: Callable[[], pb.SubscribeRequest], beyond: Callable[[], pb.SubscribeRequest], field: str, reason: str
) -> None:
    assert parsed(largest()).clauses
    with pytest.raises(InvalidArgumentError) as raised:
        parsed(beyond())
    assert (raised.value.field, raised.value.reason) == (field, reason)


def spans(starts: int) -> pb.SubscribeRequest:
    """Return one with 128 selectors, and so many starts of spans."""
    span = pb.Span(start_selectors=["a:b"] * starts)
    clauses = [pb.Clause(selectors=["a:c"] * 64, tag="a"), pb.Clause(selectors=["a:d"] * 64, tag="b", span=span)]
    return pb.SubscribeRequest(clauses=clauses)


def test_a_column_says_where_there_are_too_many_parts() -> None:
    text = "(" * MAX_PARTS + "("
    with pytest.raises(InvalidArgumentError) as raised:
        expressions().value(text, "fields", text_of)
    assert (raised.value.column, raised.value.text) == (MAX_PARTS, text)


def test_functions_share_what_a_request_may_have() -> None:
    texts = RequestTexts(Limits())
    values = f"f({','.join(['a' + '.b' * 30] * 12)})"
    parts = 12 * 31
    for number in range(MAX_CAPTURES // parts):
        for _ in range(2):
            texts.functions([f"f{number}{values[1:]}"])
    with pytest.raises(InvalidArgumentError) as raised:
        texts.selectors([list_of(MAX_CAPTURES % parts + 1)])
    assert raised.value.reason == TOO_MANY_CAPTURES


def test_nothing_of_a_text_is_looked_at_again_and_again() -> None:
    # each of these would take minutes if it were
    many = 1_000_000
    for text in ("arg0:str" + " " * many + "x", " " * many + "x", "arg0" + " " * many + ":"):
        with pytest.raises(ValueError, match="is not a capture"):
            parse_capture(text)
    assert len([*function_selectors._tokens(" " * many, 0)]) == 2
    for text in (" " * many, "'" + "\\" * many, '"' + "'" * many, "a" * many, "1" * many, "a" + " " * many + "1"):
        with pytest.raises(ParseError):
            for _ in parse._tokens(text + "@"):
                pass


def test_brackets_that_no_bracket_closes() -> None:
    assert parse_selector("[a-z]-[" + "[-" * 500).provider.text == ""
    assert parse_selector("[a-z]-[" + "[-" * 500).name.text == "[a-z]__[" + "[__" * 500
