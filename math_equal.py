r"""Whether two answers to a math problem are the same: same_answer(r"\frac{1}{2}", "0.5"), the gold first.

Read in this order: one spelling for the text; words, units, equations, intervals, lists, tuples and matrices
taken apart; what is left by the parser of math-verify, compared at 50 digits (math-verify itself would pay
0.000067 for 0.0000672, and 204_6 for 204_5). Plain numbers are compared at once; the rest by one long-lived
process, this file run as a program, because sympy never ends on some answers (9^9^9^9): past the limit the
process ends, the answer counts as wrong, and the next question starts a new one. Any thread may ask.

Left out: conversion of units; equations that are not multiples of each other (xy = 1, y = 1/x). To copy it
elsewhere: `pip install math-verify`. Needs Linux or macOS.
"""

import functools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from fractions import Fraction

SECONDS = 3.0  # wall time of one comparison
MEMORY = 512 << 20  # bytes of address space of the process (it starts with 60 MB)
LONGEST = 2000  # characters; a longer answer only equals its own text
_warn_once = functools.cache(warnings.warn)
counts = Counter()  # comparisons that ended as "unparsable_gold", "timeout" or "died"

# ---------------------------------------------------------------- one spelling, plain numbers

_PLAIN = r"""−→-|–→-|×→\times |·→\cdot |⋅→\cdot |π→\pi |∞→\infty |≤→<=|≥→>=|°→^\circ |²→^2 |³→^3 |~→ |{,}→,
**→^|\dfrac→\frac|\tfrac→\frac|\cfrac→\frac|\mathbb{R}→\mathbb R|\mathbb R→(-\infty,\infty)"""
_PLAIN = [pair.split("→") for pair in re.split(r"[|\n]", _PLAIN)]
_STYLE = r"\\(?:text|math|mbox|operatorname|boldsymbol|bm)(?:bf|it|rm|sf)?"
_unwrapped = functools.partial(re.compile(rf"{_STYLE}\s*\{{([^{{}}]*)\}}").sub, r"\1")  # \text{29} -> 29
_MATRIX = r"[(\[]?\s*\\begin\{MATRIX\}(.*?)(?:\\\\)?\s*\\end\{MATRIX\}(?:\s*[)\]])?"
_MATRIX = _MATRIX.replace("MATRIX", r"(?:[bpB]?matrix|array\}\s*\{[^{}]*|array)")
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER = rf"(?<=[\w)\]}}])\s*(\\text\s*\{{)?\s*({'|'.join(_POWERS)})\b"
_REWRITES = [
    (r"\\!\s*", ""),  # 11,\! 111
    # delimiters around the whole answer
    (r"^\s*(?:\\\(|\\\[|\${1,2})(.*?)(?:\\\)|\\\]|(?<!\\)\${1,2})\s*$", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[,;:> \n]|\\q?quad(?![A-Za-z])|[\s\u00a0]+", " "),
    (r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\\frac{\1\2}{\3\4}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\^\s*(-\d+(?:\.\d+)?)", r"^{\1}"),  # 10^-5
    (r"(?<![\w.^/}])(\d+)/(\d+)(?![\d.^!])", r"\\frac{\1}{\2}"),  # 1/2 x would be read as 1/(2x)
    (r"(?<=[.\d])\\(?:overline|dot|bar)\{(\d+)\}", lambda f: 20 * f[1]),  # 0.1\overline{6}
    (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]", r"\\\\ "),  # \\[4pt] between rows
    (_MATRIX, lambda f: "[[" + f[1].replace("&", ",").replace(r"\\", "],[") + "]]"),  # [[1,2],[3,4]]
    (rf"\s*,?(?:\s*{_STYLE}\s*\{{\s*,?\s*(?:and|or)\s*,?\s*\}}|\s(?:and|or)\s)", ", "),
    (r"\\([lg])eq?(?:slant)?(?![A-Za-z])", lambda f: "<=" if f[1] == "l" else ">="),
    (r"\\\{\s*\\\}|\\varnothing", r"\\emptyset"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"\\text{degree}"),
    (r"^\s*(-?)\s*\\?([$€])\s*(.*?)[\s.]*$", r"\1\3\\text{\2}"),
    (r"\\?%|\\text\{\s*percent\s*\}|\s+percent$", "%"),
    (r"(?:\((\w+)\)|(?<=\w))\s*_\s*(?:\{(\w)\}|(\w))", r"\1_\2\3"),  # (204)_{5} is 204_5
    (rf"^{_STYLE}\s*\{{(?=[^{{}}]*[\d\\])((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}$", r"\1"),  # \text{42 dollars}
    (_POWER, lambda f: rf"\cdot10^{{{_POWERS[f[2]]}}}{f[1] or ''}"),
    (r"[\s.,;:。]+$|^(?:\s|=|\\approx)+", ""),
]
_REWRITES = [(re.compile(pattern, re.S), new) for pattern, new in _REWRITES]
_THOUSANDS = re.compile(r"(?<=\d)[, ](?=\d{3}(?!\d))")


def clean(text: str) -> str:
    """One spelling for what LaTeX can spell in several ways; trailing punctuation removed."""
    for old, new in _PLAIN:
        text = text.replace(old, new)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text


def _squeeze(text: str) -> str:
    """Without the spaces and wrappers that mean nothing: a space between digits does (1 2 is not 12)."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _unwrapped(text))


def _number(text: str) -> tuple[Fraction, int] | None:
    """(exact value, decimals written) of an integer, a decimal or a fraction; else None."""
    if re.match(r"[+-]?\d{1,3}(?:[, ]\d{3})+(?!\d)", text):
        text = _THOUSANDS.sub("", text)
    text = re.sub(r"^([+-]?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    text = re.sub(r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{([+-]?\d+)\}|(\d))", r"e\1\2", text)
    found = re.fullmatch(r"[+-]?(?=\.?\d)\d*(?:/0*[1-9]\d*|(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?)", text)
    if not found or len(text) > 400:
        return None
    return Fraction(text), max(1, len(found[1]) - int(found[2] or 0)) if found[1] else 0


def _close(a: tuple, b: tuple, places: int) -> bool:
    """Values by their parts, real and imaginary. places: the most decimals that either side writes.

    Equal to 30 digits; a decimal to the last digits of a float (0.30000000000000004), and to what it is
    rounded from if it has 6 decimals and 6 digits agree.
    """
    gap, size = max(abs(x - y) for x, y in zip(a, b)), max(map(abs, a))
    rounded = places >= 6 and gap <= min(Fraction(1, 2 * 10**places), size * Fraction(101, 10**8))
    return rounded or gap <= size / 10 ** (12 if places else 30)


# ---------------------------------------------------------------- words, units, lists, intervals, equations

_UNITS = """mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch
inche, ft foot feet, yd yard, mi mile, s sec second, min minute, h hr hour, day, week, month, year, g gram, kg
kilogram, lb pound, oz ounce, mph, degree deg, rad radian, dollar $, cent, euro €, am, pm,
2 sq square squared, 3 cubic"""
_UNITS = {alias: line.split()[0] for line in _UNITS.split(",") for alias in line.split()}
_NO_UNIT = set("or and not mod base to than more less least most over if for when where i e x y".split())
_UNIT = rf"(?:[\s/]*{_STYLE}\s*\{{[^{{}}]*\}}|\s+[A-Za-z]{{2,}})(?:\s*\^\s*\{{?-?\d\}}?)?"


def _without_unit(text: str) -> tuple[str, set | None]:
    r"""(quantity, unit or None): 15\text{ cm}^2 -> 15, {"cm", "2"}. An unknown unit goes away, as None."""
    if not (tail := re.fullmatch(rf"(.*?[\w)\]}}%!])((?:{_UNIT})+)", text, re.S)):
        return text, None
    words = re.findall(r"[a-z]+|[$€\d]", _unwrapped(tail[2]).lower().replace(".", ""))
    names = [_UNITS.get(word) or _UNITS.get(word.removesuffix("s")) for word in words]
    unit = set(names)
    short = any(len(word) < 4 and name is None for word, name in zip(words, names))  # 2 xy is a product
    product = "{" not in tail[2] and short
    if product or _NO_UNIT & set(words) or (None in unit and not re.search(r"\d", tail[1])):
        return text, None
    return tail[1].strip(), unit if unit and None not in unit else None


def _split(text: str, separator: str) -> list[str]:
    """The pieces between separators outside of brackets; [] if a bracket closes that never opened."""
    depth, start, pieces = 0, 0, []
    for found in re.finditer(rf"(\\\{{|[(\[{{])|(\\\}}|[)\]}}])|(?:{separator})", text):
        depth += bool(found[1]) - bool(found[2])
        if depth < 0:
            return []
        if depth == 0 and not found[1] and not found[2]:
            pieces.append(text[start : found.start()].strip())
            start = found.end()
    return [*pieces, text[start:].strip()]


def _parts(text: str) -> tuple[str, list[str]]:
    """(kind, pieces). Kinds: "" for lists, sets and unions, without order; "()", "(]" ... for the others."""
    kind, pieces = "", []
    if found := re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text, re.S):
        kind, pieces = (found[1] + found[3]).replace(r"\{\}", ""), _split(found[2], "[,;]")
    if not pieces:
        kind, pieces = "", _split(text, r"[,;]|\\cup(?![A-Za-z])") or [text]
    both = [("+", "-") if piece.count(r"\pm") == 1 else (r"\pm",) for piece in pieces]  # 1 \pm 2 is two
    pieces = [piece.replace(r"\pm", sign) for piece, signs in zip(pieces, both) for sign in signs]
    return ("" if len(pieces) == 1 else kind), pieces


def _interval(text: str) -> str:
    r"""0 < x <= 7 -> x\in(0,7]; other text as it is."""
    found = re.fullmatch(r"(?:([^<>]+)([<>]=?))?\s*([A-Za-z])\s*(?:([<>]=?)([^<>=]+))?", text)
    ends = [(found[1], found[2] or ""), (found[5], found[4] or "")] if found else []
    signs = {sign[0] for _, sign in ends if sign}
    if len(signs) != 1:
        return text
    (low, left), (high, right) = ends if signs == {"<"} else ends[::-1]
    low, high = low or r"-\infty", high or r"\infty"
    return rf"{found[3]}\in{'(['['=' in left]}{low},{high}{')]'['=' in right]}"


_WORDS = r"(?=.{4})(?=.*[A-Za-z]{3})[A-Za-z]+(?:(?:[-'.]|\.? )[A-Za-z]+)*"  # p - q and ad-bc are none


def equal(gold: str, pred: str) -> bool | None:
    """Takes both apart until the pieces can be compared. None: gold is no mathematics, pred other words."""
    gold, pred = clean(gold), clean(pred)
    if _squeeze(gold) == _squeeze(pred):
        return gold != ""
    if re.fullmatch(rf"\(?\s*{_STYLE}\s*\{{[^{{}}0-9]*\}}\s*\)?|{_WORDS}", gold):
        words = [re.findall(r"\w+|[+*/^=<>]|\B-|-\B", _unwrapped(text).casefold()) for text in (gold, pred)]
        return words[0] == words[1] != [] or None
    (gold, unit), (pred, pred_unit) = _without_unit(gold), _without_unit(pred)
    if unit and pred_unit and unit != pred_unit:
        return False
    if gold.endswith("%") != pred.endswith("%"):  # 45% is 0.45, and below 45
        if equal(*(re.sub("%$", r"\\cdot10^{-2}", text) for text in (gold, pred))):
            return True
    gold, pred = (_interval(text.rstrip("% ")) for text in (gold, pred))
    sides = [_split(text, r"(?<![<>!:])=(?!=)|\\in(?![A-Za-z])") for text in (gold, pred)]
    if max(map(len, sides)) > 1 and len(_split(gold, "[,;]")) == len(_split(pred, "[,;]")) == 1:
        return _equations_equal(*sides)
    (kind, parts), (pred_kind, pred_parts) = _parts(gold), _parts(pred)
    if len(parts) != len(pred_parts):  # a number with commas is not a list, unless the other side is one
        parts, pred_parts = ([t] if _number(t) else p for t, p in ((gold, parts), (pred, pred_parts)))
    if kind != pred_kind or len(parts) != len(pred_parts):
        return False
    if (parts, pred_parts) == ([gold], [pred]):
        return _values_equal(gold, pred)
    named = {part.split("=")[0].strip() for part in parts if "=" in part}
    if kind or len(parts) == 1 or (len(named) > 1 and "=" not in pred):
        return all(map(equal, parts, pred_parts))
    for part in parts:  # without order: each finds its own partner
        partner = next((p for p in pred_parts if equal(part, p)), None)
        if partner is None:
            return False
        pred_parts.remove(partner)
    return True


def _equations_equal(gold: list[str], pred: list[str]) -> bool | None:
    """Sides of equations (one: a bare answer). x = 5 and n = 10/2 = 5 are 5; 9 = 5 and x + 1 = 5 are not. A
    response may say what it has found (x + y = 12 for 12); a gold that does asks for as much."""
    if len(gold) > 1 and len(pred) > 1:
        if _squeeze(gold[0]) == _squeeze(pred[0]):
            return equal(gold[-1], pred[-1])
        differences = [f"({sides[0]})-({sides[1]})" for sides in (gold, pred)]
        return len(gold) == len(pred) == 2 and bool(_values_equal(*differences, up_to_factor=True))
    name = re.sub(r"_\{[^{}]*\}|_.|\([^()]*\)", "", max(gold, pred, key=len)[0])
    if len(gold) > 1:
        return not re.search(r"[\d+*/^-]", name) and equal(gold[-1], pred[0])
    return (not re.search(r"\d", name) or bool(equal(pred[0], pred[-1]))) and equal(gold[0], pred[-1])


def _values_equal(gold: str, pred: str, up_to_factor: bool = False) -> bool | None:
    """Compare by value, at several points where there are variables. None: gold cannot be read."""
    import sympy
    from math_verify import verify

    if re.search(r"[\d}]\s*_\s*[\d{]|\b\d\d?:[0-5]\d\b|['\"`;@#]|__", f"{gold} {pred}"):
        return _squeeze(gold) == _squeeze(pred)  # 204_5 (base 5), 2:30, f' are misread; sympy runs Python
    if _number(gold) and re.search(r"\\(?:sum|prod|int|lim)(?![A-Za-z])", pred):
        return False  # the question again is no answer
    a, b = _read(gold), _read(pred)
    if a is None or b is None:
        return None if a is None else False
    pairs, draw = [], random.Random(0)
    if all(isinstance(e, sympy.Expr) and not e.has(sympy.oo, -sympy.oo) for e in (a, b)):
        names = sorted(a.free_symbols | b.free_symbols, key=str)
        for ends in [(0.2, 0.9), (1.1, 2.9), (-2.9, -0.3), (0.2, 3.1), (-1.9, 1.9)] if names else [(0, 1)]:
            point = {name: sympy.Rational(str(round(draw.uniform(*ends), 4))) for name in names}
            pairs.append((_value(a.subs(point)), _value(b.subs(point))))
    pairs = [pair for pair in pairs if pair != (None, None)]
    if not pairs:  # sets, relations, unknown functions
        return verify(a, b, timeout_seconds=None, allow_set_relation_comp=True)
    if any(None in pair for pair in pairs):
        return False
    if up_to_factor:
        ratios = [x[0] / y[0] if y[0] else 0 for x, y in pairs]
        return len(ratios) > 1 and all(r and _close((r,), (ratios[0],), 0) for r in ratios)
    places = max((n[1] for n in (_number(gold), _number(pred)) if n), default=0)
    return all(_close(x, y, places) for x, y in pairs)


@functools.lru_cache(maxsize=512)
def _read(text: str):
    """A sympy expression, decimals as exact fractions; None: cannot be read."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    if plain := _number(text):
        return sympy.Rational(*plain[0].as_integer_ratio())
    latex = _THOUSANDS.sub("", _unwrapped(text)).replace("<=", r"\le ").replace(">=", r"\ge ")
    try:  # without the option R and r are one variable
        a = latex2sympy(latex, conversion_config=ConversionConfig(lowercase_symbols=False))
    except Exception:
        return None
    if isinstance(a, sympy.Basic):
        a = a.xreplace({f: sympy.Rational(str(f)) for f in a.atoms(sympy.Float)})
        a = a.subs({s: sympy.I for s in a.free_symbols if s.name == "i"})
    return a


def _value(expression) -> tuple[Fraction, Fraction] | None:
    """Real and imaginary part at 50 digits, or None where there is no finite number."""
    value = expression if expression.is_Rational else expression.evalf(50)
    if not value.is_number or not (value.is_Add or value.is_Float or value.is_Rational):
        value = expression.doit().evalf(50)
    try:  # a sum that cancels to 0 comes out as 1e-120 or so
        return tuple(Fraction(0) if abs(p) < 1e-100 else Fraction(str(p)) for p in value.as_real_imag())
    except (TypeError, ValueError):
        return None


# ---------------------------------------------------------------- the process


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers (text or LaTeX) are the same. RuntimeError if the process cannot start.

    A gold that is no mathematics equals only its own words; the first miss warns, `counts` counts all.
    """
    if gold == answer or max(len(gold), len(answer)) > LONGEST:
        return gold == answer != ""
    numbers = [_number(clean(text)) for text in (gold, answer)]
    if None not in numbers:
        (a, p), (b, q) = numbers
        return a == b or (max(p, q) > 0 and _close((a,), (b,), max(p, q)))
    verdict = _process.ask(gold, answer)
    if verdict not in ("True", "False"):
        counts[verdict] += 1
    if verdict == "unparsable_gold":
        _warn_once(f"the answer {gold!r} is no mathematics: it equals only its own words")
    return verdict == "True"


def print_counts(title: str) -> None:
    for cause, count in counts.items():
        print(f"{title}: {count} answers counted as wrong: {cause}", flush=True)


class _Process:
    """A line of JSON in, a word out. Started on first need, and again after it ended."""

    def __init__(self) -> None:
        self.lock, self.child = threading.Lock(), None

    def ask(self, gold: str, answer: str) -> str:
        reply, ended = "", None
        with self.lock:
            self.child = self.child or self.start()
            try:
                print(json.dumps([gold, answer]), file=self.child.stdin, flush=True)
                reply = self.child.stdout.readline().strip()
            except BrokenPipeError:
                pass
            finally:
                if not reply:  # ended, or interrupted here: its reply would be taken for the next one
                    ended = self.stop()
        if ended == 1:
            raise RuntimeError("cannot grade math: its process fails at the start; is math-verify installed?")
        return reply or ("timeout" if ended == -signal.SIGALRM else "died")

    def start(self) -> subprocess.Popen:
        # a fresh interpreter, not a fork: this process may hold CUDA and threads
        command, pipe, off = [sys.executable, "-P", __file__], subprocess.PIPE, subprocess.DEVNULL
        for wait in (0.2, 2.0, None):
            try:
                return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=off, text=True)
            except OSError as error:
                if wait is None:
                    raise RuntimeError(f"cannot grade math: no process can be started, {error}") from error
                time.sleep(wait)

    def stop(self) -> int | None:
        child, self.child = self.child, None
        if child:
            child.kill()
            child.communicate()
            return child.returncode


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # a forked child must not read what is for its parent

if __name__ == "__main__":  # the process; it ends with its parent, when its input is closed
    replies, sys.stdout = sys.stdout, sys.stderr
    if sys.platform == "linux":  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends it, even in the middle of a long product
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    equal(r"\frac{x}{2}+\sqrt{3}", r"\sqrt{3}+0.5x")  # loads and warms the parser
    for question in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            verdict = equal(*json.loads(question))
        except Exception:  # sympy raises nearly everything on odd input
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("unparsable_gold" if verdict is None else bool(verdict), file=replies, flush=True)
