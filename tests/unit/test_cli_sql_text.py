"""Statements without their literals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.sql_text import normalized

PIECES = [
    "SELECT", "'it''s'", "E'\\''", "'", '"', "`", "$$", "$a$", "$1", "?", "--", "/*", "*/", "\n", " ", "(", ")", ",",
    "-", "+", "1", "1.5e3", ".5", "0x1f", "x2", ";", "=", "\\", "é", "::", "e", "N'",
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
        ("SELECT E'it\\'s', 'C:\\' || $1", "SELECT ? || $1"),
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


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text())
def test_what_is_normalized_stays(statement: str) -> None:
    once = normalized(statement)
    assert normalized(once) == once
