r"""Whether two answers to a math problem are the same thing.

    equal(r"\frac{1}{2}", "0.5")     True         (gold answer first)

Read in this order: one spelling for the text; plain numbers as exact fractions; units, words, equations,
intervals, lists, tuples and matrices taken apart; and what cannot be taken apart read by math-verify and
compared at 50 digits. math-verify's own verdict counts only where there is no value to compute, because it
calls 0.0000672 and 0.000067, 204_5 and 204_6, R + r and 2r equal.

Left out: conversion of units; equations that are not multiples of each other (xy = 1, y = 1/x); words that
mean the same. Has no time limit: see math_worker.py. To copy it elsewhere: `pip install math-verify`,
nothing else.
"""

import random
import re
from fractions import Fraction

# ---------------------------------------------------------------- text and plain numbers

_STYLE = r"(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol|bm)"
_WRAPPED = re.compile(rf"\\{_STYLE}\s*\{{([^{{}}]*)\}}")
_LATEX = r"- - \times \cdot \cdot \pi \infty <= >= ^\circ ^2 ^3".split()
_SIGNS = str.maketrans(
    dict(zip("−–×·⋅π∞≤≥°²³~\u00a0\u2009\u202f", [f"{sign} " for sign in _LATEX] + [" "] * 4))
)
_REWRITES = [
    (r"^\s*(?:\\\(|\\\[|\$+)(.*?)(?:\\\)|\\\]|(?<!\\)\$+)\s*$", r"\1"),  # delimiters around the whole answer
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])", ""),
    (r",\s*\\!\s*|\{,\}", ","),  # thousands: 1{,}000 and 1,\!000
    (r"\\!|^\s*\*\*|\*\*\s*$", ""),
    (r"\*\*", "^"),
    (r"(?<!\\)\\[,;:> \n]|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))", r"\\frac{\1\2}{\3\4}"),
    (r"(?<![\w.^/}])([0-9]+)/([0-9]+)(?![0-9.^!])", r"\\frac{\1}{\2}"),  # 1/2 x: math-verify reads 1/(2x)
    (r"\\sqrt\s*([0-9])", r"\\sqrt{\1}"),
    (rf"\\{_STYLE}\s*\{{\s*,?\s*(?:and|or)\s*,?\s*\}}|\s*,?\s(?:and|or)\s", ", "),
    (r",\s*,", ","),
    (r"\\leq?(?:slant)?(?![A-Za-z])", "<="),
    (r"\\geq?(?:slant)?(?![A-Za-z])", ">="),
    (r"\\mathbb\s*\{?R\}?", r"(-\\infty,\\infty)"),
    (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\begin\{array\}\s*\{[^{}]*\}(.*)\\end\{array\}", r"\\begin{matrix}\1\\end{matrix}"),
    (r"[(\[]\s*\\begin\{matrix\}(.*)\\end\{matrix\}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"\\text{degree}"),
    (r"\\?%|\\text\{\s*percent\s*\}|\s+percent$", "%"),
    (r"[\s.,;:。]+$|^(?:\s|=|\\approx)+", ""),
]
_REWRITES = [(re.compile(pattern, re.S), new) for pattern, new in _REWRITES]


def clean(text: str) -> str:
    """One spelling for what LaTeX can spell in several ways; trailing punctuation removed."""
    text = text.translate(_SIGNS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text


def unwrapped(text: str) -> str:
    r"""\text{29} -> 29"""
    return _WRAPPED.sub(r"\1", text)


def _squeeze(text: str) -> str:
    """Without the spaces and wrappers that mean nothing: a space between digits does (6 5/8 is not 65/8)."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", unwrapped(text))


_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN = re.compile(
    rf"({_DECIMAL})(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?([+-]?[0-9]{{1,3}})\}}?|[eE]([+-]?[0-9]{{1,3}}))?"
)
_RATIO = re.compile(
    rf"(?:([0-9]+)(?:\s+|\s*(?=\\)))?(?:\\frac\{{(-?{_DECIMAL})\}}\{{(-?{_DECIMAL})\}}|({_DECIMAL})\s*/\s*({_DECIMAL}))"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|dot|bar)\{([0-9]+)\}")


def _digits(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip("."))


def number(text: str) -> tuple[Fraction, int | None, bool] | None:
    """(exact value, decimals written or None, percent sign or not) of a plain number; else None."""
    if len(text) > 400:
        return None
    percent, body = text.endswith("%"), text.rstrip("% ")
    sign, body = (-1 if body[:1] == "-" else 1), body.removeprefix("-").removeprefix("+").strip()
    if found := _PLAIN.fullmatch(body):
        power = found[2] or found[3]
        places = len(found[1].partition(".")[2]) - int(power or 0) if "." in found[1] else None
        return sign * _digits(found[1]) * Fraction(10) ** int(power or 0), places, percent
    if found := _RATIO.fullmatch(body):
        whole, above, below = found[1], _digits(found[2] or found[4]), _digits(found[3] or found[5])
        if below == 0 or (whole and not (0 <= above < below and above.denominator == below.denominator == 1)):
            return None  # with a whole part it is a mixed number, 6 5/8; 2 9/4 is not
        return sign * (int(whole or 0) + above / below), None, percent
    if found := _REPEATING.fullmatch(body):
        written, again = int(found[1] + found[2] or "0"), Fraction(int(found[3]), 10 ** len(found[3]) - 1)
        return sign * (written + again) / 10 ** len(found[2]), None, percent
    return None


def _close(a: Fraction, b: Fraction, places: int | None) -> bool:
    """places: the most decimals that either side writes, None if neither is a decimal (exact then).

    A decimal equals a number that it cannot write in full (1/3, a root) if 6 decimals and 6 digits agree.
    """
    gap = abs(a - b)
    if places is None or gap == 0:
        return gap <= abs(a) / 10**30  # irrational values come here as 50 digits
    if gap <= abs(a) / 10**12:
        return True  # the last digit of a float that Python printed: 0.30000000000000004
    endless = all(abs(x * 10**5 - round(x * 10**5)) > Fraction(1, 10**20) for x in (a, b))
    return endless and places >= 6 and gap <= min(Fraction(5, 10**7), abs(a) * Fraction(101, 10**8))


def numbers_equal(gold, pred) -> bool:
    """Both as number() gives them. A percent sign against none: 45% is 45 and 0.45."""
    places = max((n[1] for n in (gold, pred) if n[1] is not None), default=None)
    if _close(gold[0], pred[0], places):
        return True
    scaled = [n[0] / 100 if n[2] else n[0] for n in (gold, pred)]
    return gold[2] != pred[2] and _close(*scaled, None if places is None else places + 2)


# ---------------------------------------------------------------- units, words, lists, intervals

_UNITS = """mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre,
in inch inche, ft foot feet, yd yard, mi mile, s sec second, min minute, h hr hour, day, week, month, year,
g gram, kg kilogram, lb pound, degree deg, radian rad, dollar usd, cent, euro, am, pm, 2 square sq squared,
3 cubic cubed"""
_UNITS = {alias: line.split()[0] for line in _UNITS.split(",") for alias in line.split()}
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT = set("or and not mod base to than more less least most over if for when where i e x y".split())
_TAIL = re.compile(
    rf"(.*[0-9a-z)\]}}%])(?:[\s/]*\\{_STYLE}\s*\{{([^{{}}]*)\}}|\s+([A-Za-z]{{2,}}))(?:\s*\^\s*\{{?([0-9])\}}?)?",
    re.S,
)


def _without_unit(text: str) -> tuple[str, tuple | None]:
    r"""(quantity, unit or None): 15\text{ cm}^2 -> 15, ("2", "cm"). An unknown unit goes away, as None."""
    unit, known = [], True
    if whole := _WRAPPED.fullmatch(text):  # \text{42 dollars}
        text = whole[1].strip()
    if money := re.match(r"\s*(-?)\s*(?:(\\?\$)|[€£¥])\s*", text):
        text, unit, known = money[1] + text[money.end() :], ["dollar"], money[2] is not None
    while tail := _TAIL.fullmatch(text):
        words = re.findall(r"[a-z]+", re.sub(r"\b([ap])\.\s?m\b", r"\1m", (tail[2] or tail[3] or "").lower()))
        names = [_UNITS.get(w) or _UNITS.get(w.removesuffix("s")) for w in words]
        plain_and_unknown = tail[3] and len(tail[3]) < 4 and None in names  # 2 xy is a product
        if not re.search("[0-9]", tail[1]) or _NO_UNIT & set(words) or plain_and_unknown or "\\sin" in text:
            break
        power = sum(_POWERS.get(w, 0) for w in words)
        text = tail[1] + (rf"\cdot10^{{{power}}}" if power else "")
        unit += [name or "" for name in names if not power] + ([tail[4]] if tail[4] else [])
    known = known and "" not in unit
    return unwrapped(text).strip(), tuple(sorted(unit)) if unit and known else None


def _word(text: str) -> str | None:
    r"""The words of \text{Tuesday} or Tuesday; None where letters are variables."""
    found = re.fullmatch(rf"\(?\s*\\{_STYLE}\s*\{{([^{{}}0-9]*)\}}\s*\)?|([A-Za-z][A-Za-z .'-]{{3,}})", text)
    return _letters(found[1] or found[2] or "") if found else None


def _letters(text: str) -> str:
    return " ".join(re.findall(r"\w+", unwrapped(text).casefold()))


_BRACKETS = r"(\\\{|[(\[{])|(\\\}|[)\]}])"


def _split(text: str, separator: str) -> list[str]:
    """Split where no bracket is open."""
    depth, start, pieces = 0, 0, []
    for found in re.finditer(rf"{_BRACKETS}|(?:{separator})", text):
        depth += bool(found[1]) - bool(found[2])
        if depth == 0 and not found[1] and not found[2]:
            pieces.append(text[start : found.start()].strip())
            start = found.end()
    return [*pieces, text[start:].strip()]


def _one_bracket(text: str) -> bool:
    """Whether the bracket ( [ or \\{ that opens the text closes at its very end."""
    depth = 0
    for found in re.finditer(_BRACKETS, text):
        depth += 1 if found[1] else -1
        if depth == 0:
            return found.end() == len(text) and re.match(r"\\\{|[(\[]", text) is not None
    return False


def _parts(text: str) -> tuple[str, list[str]]:
    """(kind, pieces). Kinds: "" lists and sets, without order; "(]" and the like; "or" unions; matrices."""
    if found := re.fullmatch(r"\\begin\{([bpvBV]?matrix)\}(.*)\\end\{\1\}", text, re.S):
        rows = [row.split("&") for row in re.split(r"\\\\", found[2].strip().removesuffix("\\\\"))]
        return f"{found[1][0] in 'vV'}{[len(row) for row in rows]}", [cell for row in rows for cell in row]
    if len(union := _split(text, r"\\cup(?![A-Za-z])")) > 1:
        return "or", union
    inner, kind = text, ""
    if _one_bracket(text):
        braces = text[0] == "\\"
        inner = text[2:-2] if braces else text[1:-1]
        kind = "" if braces else text[0] + text[-1]
    pieces = _split(inner, "[,;]")
    if kind == "":  # 1 \pm 2 is a list of two
        signs = [["+", "-"] if piece.count(r"\pm") == 1 else [""] for piece in pieces]
        pieces = [
            piece.replace(r"\pm", sign or r"\pm") for piece, both in zip(pieces, signs) for sign in both
        ]
    return ("" if len(pieces) == 1 else kind), pieces


def _intervals(text: str) -> tuple[str, str] | None:
    """(variable, interval or union) of inequalities: 0 < x <= 7 -> (x, "(0,7]"); x < 2 or x > 3."""
    found = [_interval(part) for part in _split(text, ",")]
    if None in found or len({name for name, _ in found}) > 1:
        return None
    return found[0][0], r"\cup ".join(interval for _, interval in found)


def _interval(text: str) -> tuple[str, str] | None:
    order = "(<=|>=|<|>)"
    if found := re.fullmatch(rf"([^<>]+){order}\s*([A-Za-z])\s*{order}([^<>=]+)", text):
        low, first, name, second, high = found.groups()
        if first[0] != second[0]:
            return None
    elif found := re.fullmatch(rf"\s*([A-Za-z])\s*{order}([^<>=]+)", text):
        name, second, high = found.groups()
        low, first = ("-" if second[0] == "<" else "") + r"\infty", second[0]
    elif found := re.fullmatch(rf"([^<>]+){order}\s*([A-Za-z])\s*", text):
        low, first, name = found.groups()
        high, second = ("-" if first[0] == ">" else "") + r"\infty", first[0]
    else:
        return None
    ends = (low, first, second, high) if first[0] == "<" else (high, second, first, low)
    return name, f"{'(['[len(ends[1]) - 1]}{ends[0].strip()},{ends[3].strip()}{')]'[len(ends[2]) - 1]}"


class UnparsableGold(ValueError):
    """The gold answer is no mathematics (words, broken LaTeX), and the other answer is not the same text."""


def equal(gold: str, pred: str) -> bool:
    """Whether two answers (text or LaTeX) are the same thing: taken apart until the pieces can be compared.

    raises UnparsableGold; and, on odd input, whatever sympy raises: to be taken as False
    """
    gold, pred = clean(gold), clean(pred)
    if _squeeze(gold) == _squeeze(pred):
        return gold != ""
    if (word := _word(gold)) is not None:
        if word and word == _letters(pred):
            return True
        raise UnparsableGold
    (gold, gold_unit), (pred, pred_unit) = _without_unit(gold), _without_unit(pred)
    if gold_unit and pred_unit and gold_unit != pred_unit:
        return False
    numbers = number(gold), number(pred)
    if None not in numbers:
        return numbers_equal(*numbers)
    gold_sides, pred_sides = _split(gold, _EQUALS), _split(pred, _EQUALS)
    if len(gold_sides) > 1 or len(pred_sides) > 1:
        if len(_split(gold, "[,;]")) == len(_split(pred, "[,;]")) == 1:
            return _equations_equal(gold_sides, pred_sides)
    intervals = _intervals(gold), _intervals(pred)
    if None not in intervals and intervals[0][0] != intervals[1][0]:
        return False
    gold, pred = (found[1] if found else text for found, text in zip(intervals, (gold, pred)))
    # a number with commas is not a list, unless the other side is one
    (gold_kind, gold_parts), (pred_kind, pred_parts) = _parts(gold), _parts(pred)
    if numbers[0] and len(pred_parts) == 1:
        gold_parts = [re.sub(r"[, ](?=[0-9]{3})", "", gold)]
    if numbers[1] and len(gold_parts) == 1:
        pred_parts = [re.sub(r"[, ](?=[0-9]{3})", "", pred)]
    if gold_kind != pred_kind or len(gold_parts) != len(pred_parts):
        return False
    if len(gold_parts) == 1:
        if (gold_parts[0], pred_parts[0]) != (gold, pred):
            return equal(gold_parts[0], pred_parts[0])
        return _scalars_equal(gold, pred)
    if gold_kind not in ("", "or") or ("=" in gold and "=" not in pred):
        return all(equal(g, p) for g, p in zip(gold_parts, pred_parts))
    for g in gold_parts:  # without order: each finds its own partner
        partner = next((p for p in pred_parts if _piece_equal(g, p)), None)
        if partner is None:
            return False
        pred_parts.remove(partner)
    return True


def _piece_equal(gold: str, pred: str) -> bool:
    try:
        return equal(gold, pred)
    except UnparsableGold:  # another piece may have the words
        return False


_EQUALS = r"(?<![<>!:])=(?!=)|\\in(?![A-Za-z])"


def _equations_equal(gold: list[str], pred: list[str]) -> bool:
    """Sides of equations (one: a bare answer). x = 5 and n = 10/2 = 5 are 5; 9 = 5 and x + 1 = 5 are not."""
    if len(gold) > 1 and len(pred) > 1:
        if _squeeze(gold[0]) == _squeeze(pred[0]):
            return equal(gold[-1], pred[-1])
        return len(gold) == len(pred) == 2 and _same_equation(gold, pred)
    name = re.sub(r"_\{[^{}]*\}|_.|\([^()]*\)", "", (gold if len(gold) > 1 else pred)[0])
    if len(gold) > 1:
        return not re.search(r"[0-9+*/^-]", name) and equal(gold[-1], pred[0])
    if re.search("[0-9]", name) and not equal(pred[-1], pred[0]):
        return False
    return equal(gold[0], pred[-1])


# ---------------------------------------------------------------- expressions, read by math-verify


def _scalars_equal(gold: str, pred: str) -> bool:
    based = [re.fullmatch(r"\(?([0-9A-Za-z]+)\)?(?:\s*_\s*\{?([0-9]+)\}?)?", text) for text in (gold, pred)]
    if any(b and b[2] for b in based):  # 204_5 is written in base 5; math-verify drops the base
        a, b = ((b[1].lstrip("0").upper(), b[2] or "10") if b else None for b in based)
        return a is not None and a == b
    clocks = [re.fullmatch(r"([0-9]{1,2}):([0-5][0-9])", text) for text in (gold, pred)]
    if any(clocks):  # 2:30 is not 1:15, though a ratio would be
        return all(clocks) and [int(t) for t in clocks[0].groups()] == [int(t) for t in clocks[1].groups()]
    a, b = _read(gold, pred)
    if a is None:
        raise UnparsableGold
    if b is None or gold.count("'") != pred.count("'"):  # math-verify drops the prime of f'
        return False
    same = _agree(a, b, number(gold), number(pred))
    if same is None:  # sets, relations, unknown functions: nothing to compute
        from math_verify import verify

        return verify(a, b, timeout_seconds=None, allow_set_relation_comp=True)
    return same


def _read(*texts: str) -> list:
    """sympy expressions (None: cannot be read), decimals as exact fractions."""
    import sympy
    from math_verify import LatexExtractionConfig, parse

    found = []
    for text in _apart_by_case(texts):
        if re.search(r"[0-9}]\s*_\s*[0-9{]|__|import|(?<!\\)lambda|[\"`;@#]", text):
            found.append(None)
            continue
        latex = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("%", r"\%")
        config = LatexExtractionConfig(boxed_match_priority=0)
        read = parse(rf"\boxed{{{latex}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
        a = read[0] if read else None
        if isinstance(a, sympy.Basic):
            a = a.xreplace({f: sympy.Rational(str(f)) for f in a.atoms(sympy.Float)})
            a = a.subs({s: sympy.I for s in a.free_symbols if s.name == "i"})
        found.append(a)
    return found


def _apart_by_case(texts: tuple[str, ...]) -> list[str]:
    """math-verify reads R and r as one variable: where both occur, R gets a letter that is free."""
    letters = set(re.sub(r"\\[A-Za-z]+", "", "".join(texts)))
    free = iter(c for c in "qwzuvhjkmnstpyabcxrlg" if not {c, c.upper()} & letters)
    new = {c: next(free, c) for c in sorted(letters) if c.isascii() and c.isupper() and c.lower() in letters}
    if not new:
        return list(texts)
    pattern = rf"(\\[A-Za-z]+)|[{''.join(new)}]"
    return [re.sub(pattern, lambda found: found[1] or new[found[0]], text) for text in texts]


def _value(expression, point: dict) -> tuple[Fraction, Fraction] | None:
    """Real and imaginary part at 50 digits, or None where there is no finite number."""
    here = expression.subs(point)
    value = here.evalf(50)
    if not value.is_number or not value.is_Add and not value.is_Float:
        value = here.doit().evalf(50)
    parts = [part.evalf(50) for part in value.as_real_imag()]
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    # a sum that cancels to 0 comes out as 1e-120 or so
    return tuple(Fraction(0) if abs(part) < 1e-100 else Fraction(str(part)) for part in parts)


def _points(expressions: list) -> list[dict]:
    """The same few values for the variables every time; one empty point where there are none."""
    import sympy

    names = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    draw = random.Random(0)
    ranges = [(0.2, 0.9), (1.1, 2.9), (-2.9, -0.3), (0.2, 3.1), (-1.9, 1.9)] if names else [(0, 1)]
    return [{s: sympy.Rational(str(round(draw.uniform(*r), 4))) for s in names} for r in ranges]


def _agree(a, b, gold_number: tuple | None, pred_number: tuple | None) -> bool | None:
    """Compare by value, at several points where there are variables. None: neither has values to compare."""
    import sympy

    if any(not isinstance(e, sympy.Expr) or e.has(sympy.oo, -sympy.oo) for e in (a, b)):
        return None
    places = max((n[1] for n in (gold_number, pred_number) if n and n[1] is not None), default=None)
    pairs = [(_value(a, point), _value(b, point)) for point in _points([a, b])]
    pairs = [pair for pair in pairs if pair != (None, None)]
    if not pairs or any(None in pair for pair in pairs):
        return None if not pairs else False
    for x, y in pairs:
        tiny = max(map(abs, x + y)) / 10**30  # rounding of the real part beside the imaginary part
        if not all(abs(u - v) <= tiny or _close(u, v, places) for u, v in zip(x, y)):
            return False
    return True


def _same_equation(gold: list[str], pred: list[str]) -> bool:
    """Equal when left minus right of one is a constant (not 0) times that of the other."""
    import sympy

    sides = _read(*gold, *pred)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    differences = [sides[0] - sides[1], sides[2] - sides[3]]
    values = [[_value(d, point) for d in differences] for point in _points(differences)]
    values = [v for v in values if None not in v]
    if not differences[0].free_symbols or not values or any(a == (0, 0) or b == (0, 0) for a, b in values):
        return False
    numbers = [complex(*map(float, a)) / complex(*map(float, b)) for a, b in values]
    return all(abs(n - numbers[0]) <= 1e-12 * abs(n) for n in numbers)
