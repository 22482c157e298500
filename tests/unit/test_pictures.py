from __future__ import annotations

from tests.pictures import svg, text_of

TERMINAL = (
    '\x1b[1m$ stapsdt list a  b\x1b[0m\n\x1b[1;36mfoo\x1b[0m  \x1b[32mint32 <&>\x1b[0m\n  \x1b[2mdim\x1b[0m "x" é\n'
)


def test_a_picture_shows_the_text_of_the_terminal() -> None:
    picture = svg("x", TERMINAL, 80)
    assert text_of(picture) == '$ stapsdt list a  b\nfoo  int32 <&>\n  dim "x" é\n'
    assert picture.count("#68a0b3") == 1


def test_a_picture_needs_nothing_from_elsewhere() -> None:
    picture = svg("x", TERMINAL, 80)
    assert "url(http" not in picture
    for reference in ('="url(#', "http"):
        assert picture.count(reference) == 1
