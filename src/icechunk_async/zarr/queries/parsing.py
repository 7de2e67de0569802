"""Read the text of conditions: comparisons, `and`, `or`, `not` and brackets, as in SQL.

`not` is applied where it is read, to the comparison or to each part of a bracket. What is left is
comparisons that must hold all, or any, so that nobody else has to know what SQL says of `not` and
NULL: a comparison and its opposite are both unfulfilled by a missing value.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from icechunk_async.errors import InvalidInputError
from icechunk_async.zarr.queries.predicates import (
    MOMENT,
    Junction,
    Moment,
    Predicate,
    joined,
)

if TYPE_CHECKING:
    from icechunk_async.zarr.queries.predicates import Where

__all__ = ["parse_where"]

_OPTION: Final = "The option 'where'"
# The parser calls itself: thousands of brackets would exhaust the stack.
_MOST_NESTED: Final = 64
"""The most brackets and `not` around a comparison."""
_SHOWN: Final = 40
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>'[^']*'|"[^"]*")|`(?P<quoted>[^`]+)`|(?P<op>==|!=|<>|<=|>=|[=<>])
    |(?P<mark>[(),])|(?P<word>[-+]?[\w.]+(?:(?<=[eE])[-+]\d+\w*)?))""",
    re.VERBOSE,
)
_NAME: Final = re.compile(r"\w+")
_RESERVED: Final = frozenset({"and", "or", "not"})
_SAME: Final = {"==": "=", "<>": "!="}
_OPPOSITE: Final = {
    "=": "!=",
    "!=": "=",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "in": "not in",
    "not in": "in",
}
_NUMBER: Final = re.compile(
    r"(?P<number>[-+]?(?:\d+(?P<point>\.)?\d*|(?P<first>\.)\d+)(?P<exponent>e[-+]?\d+)?)"
    r"(?P<suffix>bd|[dflsy])?",
    re.IGNORECASE | re.ASCII,
)
_INTEGER_BITS: Final = {"Y": 8, "S": 16, "L": 64}
_MOST_DIGITS: Final = 38
"""Of a decimal in Spark."""
_DATE: Final = re.compile(r"(?P<moment>-?\d{4,6}-\d\d-\d\d)", re.ASCII)


def parse_where(text: str, said: str = _OPTION) -> tuple[Where, ...]:
    """Parse conditions: comparisons, `in (...)` and `between a and b`, joined and in brackets.

    Literals are those of SQL: `0.1` is a decimal, `1e-1` and `0.1D` are doubles, `0.1F` is a float,
    `DATE '2020-01-31'` and `TIMESTAMP '2020-01-31 12:00:00'` are moments.

    Args:
        text: the conditions.
        said: how messages call them.

    Returns:
        Conditions that must all hold; none if the text is empty.

    Raises:
        InvalidInputError: the text is anything else.
    """
    if not text.strip():
        return ()
    found = _Parser(text, said).parsed()
    if isinstance(found, Junction) and not found.is_any:
        return found.parts
    return (found,)


class _Token(NamedTuple):
    kind: str
    """`text`, `quoted`, `op`, `mark`, `word`; `end` behind the last."""
    value: str
    start: int

    @property
    def word(self) -> str:
        """The word in lower case; empty for anything else."""
        return self.value.lower() if self.kind == "word" else ""


class _Parser:
    """The tokens of a text, of which those before a place were understood."""

    def __init__(self, text: str, said: str) -> None:
        self._text = text
        self._said = said
        self._tokens = self._split()
        self._at = 0

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        place, end = 0, len(self._text.rstrip())
        while place < end:
            match = _TOKEN.match(self._text, place)
            if match is None:
                start = place + len(self._text[place:]) - len(self._text[place:].lstrip())
                bad = _Token("other", self._text[start:], start)
                if bad.value[0] in "'\"`":
                    self._refuse(bad, "the quote that ends it")
                self._refuse(bad, "a column, an operator, a literal or a bracket")
            # Each alternative of the pattern has one group.
            kind = match.lastgroup or ""
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*tokens, _Token("end", "", end)]

    def parsed(self) -> Where:
        found = self._any(0, negated=False)
        if self._next.kind != "end":
            self._refuse(self._next, "'and', 'or' or the end")
        return found

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        found = self._next
        # The end is never passed, so that `_next` always has a token.
        self._at += found.kind != "end"
        return found

    def _took(self, value: str) -> bool:
        """Return whether a mark or word is next, and go past it."""
        token = self._next
        found = token.value == value if token.kind == "mark" else token.word == value
        self._at += found
        return found

    def _any(self, depth: int, *, negated: bool) -> Where:
        parts = [self._every(depth, negated=negated)]
        while self._took("or"):
            parts.append(self._every(depth, negated=negated))
        # By De Morgan: the opposite of `a or b` is `not a and not b`.
        return joined(parts, is_any=not negated)

    def _every(self, depth: int, *, negated: bool) -> Where:
        parts = [self._one(depth, negated=negated)]
        while self._took("and"):
            parts.append(self._one(depth, negated=negated))
        return joined(parts, is_any=negated)

    def _one(self, depth: int, *, negated: bool) -> Where:
        """Read a bracket or a comparison, with any `not` before it."""
        while self._next.word == "not" or (self._next.kind, self._next.value) == ("mark", "("):
            token = self._take()
            depth += 1
            if depth > _MOST_NESTED:
                self._refuse(token, f"at most {_MOST_NESTED} brackets and 'not' within each other")
            if token.word:
                negated = not negated
                continue
            found = self._any(depth, negated=negated)
            if not self._took(")"):
                self._refuse(self._next, "'and', 'or' or ')'")
            return found
        return self._comparison(negated=negated)

    def _comparison(self, *, negated: bool) -> Where:
        column = self._column()
        token = self._take()
        if token.kind == "op":
            return _compared(column, _SAME.get(token.value, token.value), negated, self._literal())
        if token.word == "not":
            negated = not negated
            token = self._take()
        if token.word == "in":
            return _compared(column, "in", negated, *self._list())
        if token.word == "between":
            low = self._literal()
            if not self._took("and"):
                self._refuse(self._next, "'and', and the upper bound")
            # The parts become `<` and `>` where it is negated, and one of them has to hold.
            spans = ((">=", low), ("<=", self._literal()))
            parts = [_compared(column, op, negated, it) for op, it in spans]
            return joined(parts, is_any=negated)
        return self._refuse(token, "an operator, such as '>=', 'between' or 'in'")

    def _column(self) -> str:
        token = self._take()
        is_name = token.kind == "word" and _NAME.fullmatch(token.value) is not None
        if token.kind != "quoted" and (not is_name or token.word in _RESERVED):
            self._refuse(token, "a column, '(' or 'not'; other names are written in backticks")
        return token.value

    def _list(self) -> list[Any]:
        if not self._took("("):
            self._refuse(self._next, "'(', and a list of literals")
        found = [self._literal()]
        while self._took(","):
            found.append(self._literal())
        if not self._took(")"):
            self._refuse(self._next, "',' or ')'")
        return found

    def _literal(self) -> Any:
        token = self._take()
        if token.word in {"date", "timestamp"} and self._next.kind == "text":
            return self._moment(token, self._take())
        if token.kind == "text":
            return self._unquoted(token)
        if token.kind != "word":
            self._refuse(token, "a number, quoted text or true or false")
        if token.word in {"true", "false"}:
            return token.word == "true"
        match = _NUMBER.fullmatch(token.value)
        number = None if match is None else _number(match)
        if number is None:
            raise InvalidInputError(
                f"{self._said} holds {token.value[:_SHOWN]!r} at character {token.start + 1}, "
                "which is neither a number of SQL nor quoted text. Columns are compared with "
                "literals, which stand behind the operator."
            )
        return number

    def _unquoted(self, token: _Token) -> str:
        if "\\" in token.value:
            raise InvalidInputError(
                f"{self._said} holds {token.value[:_SHOWN]} at character {token.start + 1}, with a "
                "backslash, which it does not take. Filter in the query."
            )
        return token.value[1:-1]

    def _moment(self, token: _Token, quoted: _Token) -> Moment:
        text = self._unquoted(quoted).strip()
        pattern = _DATE if token.word == "date" else MOMENT
        match = pattern.fullmatch(text)
        try:
            if match is not None:
                np.datetime64(match["moment"], "us")
                return Moment(token.word.upper(), text)
        except (ValueError, OverflowError):
            pass  # such as the 31st of February
        example = "2020-01-31" if token.word == "date" else "2020-01-31 12:00:00"
        raise InvalidInputError(
            f"{self._said} holds {token.value} {quoted.value[:_SHOWN]} at character "
            f"{token.start + 1}, which is no {token.word}. Write it in ISO 8601, such as "
            f"{token.word.upper()} '{example}'."
        )

    def _refuse(self, token: _Token, wanted: str) -> NoReturn:
        found = "the end" if token.kind == "end" else repr(token.value[:_SHOWN])
        raise InvalidInputError(
            f"{self._said} is not understood at character {token.start + 1}: there is {found}, "
            f"instead of {wanted}. It takes comparisons of columns with literals, joined by 'and', "
            "'or' and 'not' with brackets, such as \"(t2m > 320 or lat between 60 and 90) and time "
            ">= '2020-01-01'\"."
        )


def _compared(column: str, op: str, negated: bool, *values: Any) -> Predicate:  # noqa: FBT001
    return Predicate(column, _OPPOSITE[op] if negated else op, values)


def _number(match: re.Match[str]) -> int | float | Decimal | None:
    """Return the value of a literal as SQL means it; None for anything else."""
    text, suffix = match["number"], (match["suffix"] or "").upper()
    fraction, exponent = match["point"] or match["first"], match["exponent"]
    # Y, S and L are Spark's bytes, shorts and longs. Out of their range it refuses them as well.
    if suffix in _INTEGER_BITS:
        if fraction or exponent:
            return None
        bound = 1 << (_INTEGER_BITS[suffix] - 1)
        return int(text) if len(text) <= _MOST_DIGITS and -bound <= int(text) < bound else None
    if suffix in {"D", "F"} or (exponent and not suffix):
        double = float(text)
        with np.errstate(over="ignore"):
            # Spark widens a float for the comparison, and so compares with the rounded number.
            value = float(np.float32(double)) if suffix == "F" else double
        return value if math.isfinite(value) else None
    if fraction or suffix == "BD":
        exact = Decimal(text)
        return exact if len(exact.as_tuple().digits) <= _MOST_DIGITS else None
    return int(text) if len(text.lstrip("+-")) <= _MOST_DIGITS else None
