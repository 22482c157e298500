"""Parses the texts of one request: each once, however many clauses have it, and no more than a request may have."""

from __future__ import annotations

from collections.abc import Sequence

from stapsdtd.catalog.selectors import Selector, parse
from stapsdtd.config import Limits
from stapsdtd.config.request_limits import RequestBudget, check_count
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions import selectors as function_selectors
from stapsdtd.functions.selectors import FIELD, FunctionSelector
from stapsdtd.query.parse import Expressions
from stapsdtd.query.tree_builder import FindCgroup

_MAX_GLOBS = 16
"""Of kernel functions: each is compared with 60,000 names."""


class RequestTexts:
    """Methods raise InvalidArgumentError."""

    def __init__(self, limits: Limits, find_cgroup: FindCgroup = lambda _: None) -> None:
        self._budget = RequestBudget()
        self.expressions = Expressions(find_cgroup, self._budget)
        self._most_selectors = limits.max_selectors
        self._selectors: dict[str, Selector] = {}
        self._functions: dict[str, FunctionSelector] = {}
        self._count = 0

    def selectors(self, texts: Sequence[str], field: str = "selectors") -> tuple[Selector, ...]:
        check_count(field, len(texts), self._most_selectors)
        self._count += len(texts)
        if self._count > self._most_selectors:
            raise InvalidArgumentError(field, f"selectors of a request are limited to {self._most_selectors} in all")
        return tuple(self._selector(text, field) for text in texts)

    def _selector(self, text: str, field: str) -> Selector:
        if text not in self._selectors:
            self._budget.take_characters(text, field)
            selector = self._selectors[text] = parse(text, field)
            self._budget.take_captures(len(selector.captures or ()), text, field)
        return self._selectors[text]

    def functions(self, texts: Sequence[str]) -> list[FunctionSelector]:
        """Parse selectors of kernel functions."""
        if not texts:
            raise InvalidArgumentError(FIELD, "at least one function is required")
        if len(texts) > self._most_selectors:
            raise InvalidArgumentError(FIELD, f"at most {self._most_selectors} are allowed")
        parsed = [self._function(text) for text in texts]
        if sum(selector.name.is_glob for selector in parsed) > _MAX_GLOBS:
            raise InvalidArgumentError(FIELD, f"at most {_MAX_GLOBS} may have globs in their names")
        return parsed

    def _function(self, text: str) -> FunctionSelector:
        if text not in self._functions:
            function_selectors.check_length(text)
            self._budget.take_characters(text, FIELD)
            selector = self._functions[text] = function_selectors.parse(text)
            count = sum(1 + len(value.steps) for value in selector.values)
            self._budget.take_captures(count, text, FIELD)
        return self._functions[text]
