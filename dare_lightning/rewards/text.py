"""Finding the final answer in a completion: the rules that every verifier shares.

One rule for contradictory answers: of several markers of a kind, the last complete one counts, wherever it stands. The
whole text is searched, never a window at its end, and every search is linear in the length of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dare_lightning.rewards.base import Form

_BOX_OR_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf)\b")
_LATEX_SPACING = re.compile(r"\\[,!;: ]|\\(?=[$%])|~")
_NUMBER = re.compile(
    r"(?<![\w.,])"
    r"(?P<sign>\A[-+\u2212]\s+|[-+\u2212]?)(?:[$€£]\s?)?(?P<sign_after>[-\u2212]?)"
    r"(?P<integer>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?P<decimals>\.[0-9]+)?"
    r"(?:\s?/\s?(?P<denominator>[0-9]+))?"
    r"(?!\d|[.,/]\d|[eE][-+]?\d)"
)
MAX_DIGITS = 40
"""Longer numbers are no answer: a bound on the arithmetic that a completion can ask for."""


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Content of the last complete `<tag>…</tag>`, without surrounding white space; None where there is none.

    The content may span lines and nothing has to follow the closing tag. Of nested or repeated opening tags the one
    nearest to its closing tag counts; an opening tag that is never closed is ignored.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    last_close = text.rfind(closing)
    start = text.rfind(opening, 0, max(last_close, 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)].strip()


def stated(text: str, form: Form) -> str | None:
    """The answer to a planning task: "paper" in the last `<answer>…</answer>`, "compact" the text is the answer."""
    return text.strip() if form == "compact" else last_tagged(text)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` (or `\fbox{…}`) whose braces balance; None where there is none.

    Escaped braces (`\{`, `\}`) are text, not structure. Of nested boxes the inner one counts.
    """
    opened: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        if match["box"] or match[0] == "{":
            opened.append((match["box"] is not None, match.end()))
        elif match[0] == "}" and opened:
            is_box, start = opened.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] : best[1]].strip()


def last_hash(text: str) -> str | None:
    """What follows the last `####` on its line (the GSM8K convention); None where there is none or nothing follows."""
    mark = text.rfind("####")
    if mark < 0:
        return None
    return text[mark + 4 :].lstrip(" \t#").split("\n", 1)[0].strip() or None


def numbers_in(text: str) -> list[Fraction]:
    r"""Every number of the text, in order, exactly.

    Read: signs (also the Unicode minus), `$`, `€`, `£` before the digits, thousands separators in groups of three,
    decimals, plain fractions `3/4`, LaTeX spacing, `\text{…}` and `{,}`. Units and `%` are ignored: `12%` is 12.
    Not read: digits outside ASCII, exponents (`1e5`), digits right after a letter or at a malformed separator (`1,23`).
    A sign apart from its digits (`- 5`) counts at the start of the text only: elsewhere it is a dash or a minus.
    """
    plain = _LATEX_SPACING.sub("", _TEXT_COMMAND.sub(" ", text.replace("{,}", ","))).replace("{", " ").replace("}", " ")
    found = []
    for match in _NUMBER.finditer(plain.replace("*", " ").strip()):
        value = _fraction(match)
        if value is not None:
            found.append(value)
    return found


def single_number(text: str) -> Fraction | None:
    """The one number that a short answer states; None where it states none, or several different ones.

    In an equation only the part after the last `=` counts (`3 * 6 = $18` is 18).
    """
    values = set(numbers_in(text.rsplit("=", 1)[-1]))
    return values.pop() if len(values) == 1 else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    integer, decimals = match["integer"].replace(",", ""), match["decimals"] or ""
    if len(integer) + len(decimals) + len(match["denominator"] or "") > MAX_DIGITS:
        return None
    value = Fraction(f"{integer or '0'}{decimals}")
    if match["denominator"] is not None:
        denominator = int(match["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    negative = (match["sign"].strip() in ("-", "\u2212")) != (match["sign_after"] != "")
    return -value if negative else value
