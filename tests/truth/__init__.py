"""Answers of the commands held against what the traced programs say of themselves: `./dev truth`.

programs.py     starts tests/targets/truth.c, which tells what it did by its own clock and counters
asking.py       has a program do something while a command traces it, and returns what both said
questions.py    the questions about such programs, each with what it takes for an answer to be right
runtimes.py     questions about CPython, the JVM and PostgreSQL, which tell by their own logs
loads.py        what keeps the host or the daemon busy meanwhile
"""
