"""Statements without their literals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.sql_text import DIALECTS, normalized

PIECES = [
    "SELECT", "'it''s'", "E'\\''", "'", '"', "`", "$$", "$a$", "$1", "?", "--", "/*", "*/", "\n", " ", "(", ")", ",",
    "-", "+", "1", "1.5e3", ".5", "0x1f", "x2", ";", "=", "\\", "é", "::", "e", "N'", "#", "NULL", "1_0", "0b1", "_",
    "U&'", "&", "U", "IN", "/", "*",
]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("SELECT name FROM users  WHERE id = 42 -- by Anne", "SELECT name FROM users WHERE id = ?"),
        ("INSERT INTO log VALUES (1, 'a'), (2, 'it''s');", "INSERT INTO log VALUES (?)"),
        ("SELECT * FROM t1 WHERE a IN (1,2, 3) AND b2 = -5", "SELECT * FROM t1 WHERE a IN (?) AND b2 = ?"),
        ("SELECT a-5, a - 5", "SELECT a-?, a - ?"),
        ("SELECT -1 FROM t WHERE a between -2 AND +3 LIMIT -1", "SELECT ? FROM t WHERE a between ? AND ? LIMIT ?"),
        ("SELECT (-+1)", "SELECT (?)"),
        ("SELECT 1.5e3 + .5 + 0xff", "SELECT ? + ? + ?"),
        ("SELECT E'it\\'s', 'C:\\' || $1", "SELECT ? || ?"),
        ("SELECT 1_000 + 0b11 + 0o17 + 0x1F_FF + 1.5_0e1_0 FROM t_1", "SELECT ? + ? + ? + ? + ? FROM t_1"),
        ("SELECT U&'d!0061' UESCAPE '!', U&\"a b\" FROM u", 'SELECT ? UESCAPE ?, U&"a b" FROM u'),
        ("SELECT /* a /* b */ 1 */ x /* cut /* */ y", "SELECT x"),
        ("SELECT a FROM t WHERE a IN ($1, NULL, true, -1)", "SELECT a FROM t WHERE a IN (?)"),
        ("SELECT a FROM t WHERE a IN (null)", "SELECT a FROM t WHERE a IN (?)"),
        ("INSERT INTO t VALUES (NULL, 1), ($1, $2)", "INSERT INTO t VALUES (?)"),
        ("SELECT f(a, NULL), b IS NULL", "SELECT f(a, ?), b IS NULL"),
        ("SELECT a # 5, b #>> '{x}'", "SELECT a # ?, b #>> ?"),
        ("SELECT $$it's$$, $body$a $$ b$body$ FROM x", "SELECT ? FROM x"),
        ('SELECT "a  1", `b 2` FROM "t"', 'SELECT "a  1", `b 2` FROM "t"'),
        ("SELECT /* a\n hint */ x::int4 -- done\nFROM y ;; ", "SELECT x::int4 FROM y"),
        ("SELECT 'cut at some byt", "SELECT ?"),
        ("SELECT x /* cut", "SELECT x"),
        ("", ""),
    ],
)
def test_what_statements_become(statement: str, wanted: str) -> None:
    assert normalized(statement) == wanted


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("SELECT 1 # one\nFROM t -- two\n", "SELECT ? FROM t"),
        ("# hint\nSELECT 5--1", "SELECT ?-?"),
        ("SELECT 'it\\'s', \"a \\\" b\", `c 1`", "SELECT ?, `c 1`"),
        ("SELECT /* a /* b */ x", "SELECT x"),
        ("SELECT a FROM t WHERE a IN (0b1, NULL)", "SELECT a FROM t WHERE a IN (?)"),
    ],
)
def test_what_statements_of_mysql_become(statement: str, wanted: str) -> None:
    assert normalized(statement, "mysql") == wanted


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text(), st.sampled_from(DIALECTS))
def test_what_is_normalized_stays(statement: str, dialect: str) -> None:
    once = normalized(statement, dialect)
    assert normalized(once, dialect) == once
