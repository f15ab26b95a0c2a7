"""Built-in rewards: functions of (completion, answer, finish), from 0 to 1."""

import importlib
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from dovetail.rewards.code import code

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+]?)[$\u20ac\u00a3]?(?P<top>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9])|\s?/\s?(?P<bottom>0*[1-9][0-9]*)(?![0-9]|\.[0-9]))?"
)
_BARE = re.compile(rf"[-+]?{_DIGITS}(?:/[0-9]+)?\.?")
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}")
_BEFORE_FRACTION = re.compile(r"(?<=\w)(?=\\[dt]?frac)")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})")
_EXPONENT = re.compile(r"\^(?:\{[-+]?[0-9]+\}|[-+]?[0-9]+)")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MAX_DIGITS = 400  # Python refuses thousands of digits


def exact_match(completion: str, answer: Any, _finish: str) -> float:
    """1 if the completion is the answer, apart from white space around either."""
    return float(completion.strip() == str(answer).strip())


def numeric_match(completion: str, answer: Any, _finish: str, *, tolerance: float = 1e-6) -> float:
    """1 if the `final_number` of the completion is that of the answer, up to a relative `tolerance`."""
    number = final_number(completion)
    expected = expected_number(answer)
    return float(
        number is not None and abs(number - expected) <= Fraction(tolerance) * abs(expected)
    )


def format_match(
    completion: str,
    _answer: Any,
    _finish: str,
    *,
    pattern: str = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*",
) -> float:
    """1 if the whole completion matches the regular expression `pattern`; a dot matches line ends too."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def compiled(pattern: Any, key: str) -> re.Pattern[str]:
    """ValueError that names `key`."""
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"{key} {pattern!r} is no regular expression: {error}") from None


def number_only(completion: str, answer: Any, finish: str) -> float:
    """1 for exactly the number, optionally with a full stop, and then the stop token; 0.3 if the last number is right and
    the model stopped; 0.1 if the number occurs at all; else 0."""
    expected = expected_number(answer)
    given = numbers(completion)
    if expected not in given:
        return 0.0
    if finish != "stop" or given[-1] != expected:
        return 0.1
    return 1.0 if _BARE.fullmatch(completion.strip()) else 0.3


def expected_number(answer: Any) -> Fraction:
    number = final_number(str(answer))
    if number is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return number


def final_number(text: str) -> Fraction | None:
    r"""The last number of the last \boxed{...}, else the first after the last "####", else the last of all, or None."""
    boxed = [number for inside in _BOXED.findall(text) for number in numbers(inside)[-1:]]
    _, marker, tail = text.rpartition("####")
    marked = numbers(tail)[:1] if marker else []
    return next(reversed(boxed or marked or numbers(text)), None)


def numbers(text: str) -> list[Fraction]:
    r"""Returns the numbers of a text in order; no exponents, such as that of cm^2.

    They are written as 1,234.5  $3  -7  .5  2e-3  3/4  \frac{3}{4}  1{,}234.
    """
    plain = _LATEX_COMMA.sub(",", text.replace("\u2212", "-"))
    plain = _LATEX_FRACTION.sub(r"\1\2/\3", _BEFORE_FRACTION.sub(" ", plain))
    plain = _EXPONENT.sub("_", plain)  # a minus after a letter is no sign
    return [
        _fraction(match) for match in _NUMBER.finditer(plain) if len(match.group()) <= _MAX_DIGITS
    ]


def _fraction(match: re.Match[str]) -> Fraction:
    value = Fraction(match["top"].replace(",", "")) / Fraction(match["bottom"] or 1)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    return -value if match["sign"] == "-" else value


def math_verify(completion: str, answer: Any, _finish: str, *, precision: int = 6) -> float:
    """1 if the library math-verify (pip install 'dovetail-rl[math]') finds both results equal."""
    library = importlib.import_module("math_verify")
    gold = library.parse(str(answer)) or library.parse(f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify reads no result in the answer {answer!r:.200}")
    return float(library.verify(gold, library.parse(completion), float_rounding=precision))


BUILT_IN: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "format": format_match,
    "number_only": number_only,
    "math_verify": math_verify,
    "code": code,
}
