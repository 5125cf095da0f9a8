r"""Verifiable rewards: is the answer right? Math, multiple choice, code; and the two shaping terms.

    math_correct(r"so \boxed{\frac{1}{2}}", "0.5")                        True
    choice_correct("The answer is C. A is a trap.", "C")                  True
    code_score(response, {"inputs": ["1 2\n"], "outputs": ["3\n"]})       1.0 if the program passes every test

Left out: math answers outside a box, proofs, code tests with a checker of their own.
To copy it elsewhere: math_equal.py for math, the PythonTool of tools.py for code.
"""

import functools
import json
import math
import re
import secrets
import textwrap
from contextlib import suppress

from math_equal import same_answer

# ---------------------------------------------------------------- math

_BARE = r"(?![A-Za-z]{2})(?:\\[A-Za-z]+ ?|\\[%,!{}]|\{[^{}]*\}|[^\s${}\\])+"  # 17, x, not a word


def _last_box(text: str) -> tuple[str | None, bool]:
    """(last complete box or None, whether a box that is empty or never closed comes after it)."""
    name, withdrawn, at = r"\boxed" if text.rfind(r"\boxed") >= 0 else r"\fbox", False, len(text)
    for _ in range(20):  # a policy may repeat \boxed{ for ever
        if (at := text.rfind(name, 0, at)) < 0:
            break
        start = re.compile(r"\s*").match(text, at + len(name)).end()
        content, depth = "", 0
        if text[start : start + 1] == "{":
            for brace in re.compile(r"\\.|[{}]", re.S).finditer(text, start):
                depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} are no braces
                if depth == 0:
                    content = text[start + 1 : brace.start()].strip()
                    break
        elif bare := re.compile(_BARE).match(text, start):
            content = bare[0].strip(" .,;:!?")
        if re.search(r"\w", content) or (content and text[start] == "{"):
            return content, withdrawn
        withdrawn = withdrawn or text[start : start + 1] == "{"
    return None, False


def extract_boxed(text: str) -> str | None:
    r"""What the last complete \boxed{...} holds. \boxed 5 counts; \fbox does where there is no \boxed."""
    return _last_box(text)[0]


def final_box(text: str) -> str | None:
    r"""What the last \boxed{...} holds; None if that one is empty or never closed."""
    box, withdrawn = _last_box(text)
    return None if withdrawn else box


def math_correct(response: str, answer: str) -> bool:
    r"""Whether the last box of `response` holds `answer` (text or LaTeX, maybe between $ or boxed).

    False without a box, or when a later \boxed{ is empty or never closed. A gold that is no mathematics
    is paid only for its own words; `math_equal.counts` says how often one was met, or the time limit.
    """
    box, gold = final_box(response), str(answer).strip()
    if r"\boxed" in gold:
        gold = extract_boxed(gold) or ""
    if box is None:
        return False
    if re.fullmatch(r"\d{1,300} \d{1,300}", f"{box} {gold}"):  # nearly every call of a training run; 007 is 7
        return int(box) == int(gold)
    return same_answer(gold, box)


# ---------------------------------------------------------------- multiple choice

_STATED = re.compile(
    r"""
    (?: \b(?:answer|choice|option)s?\b[*_ ]*(?:\s(?:is|must\ be|should\ be)\b|[:=>])
      | \b(?P<loose>answer|choose|pick|select|go\ with)\b )
    (?: [\s:(\[{*$_`"'] | \b(?:therefore|thus|clearly|option|choice|letter|answer)\b,?
      | \\(?:text|math|box)[a-z]*\{ )*
        (?P<letter>[A-Ja-j])(?!['’]?[A-Za-z0-9])(?P<shut>[)\]}*$_`"'.:]*)
    | (?-i:(?<![A-Za-z0-9])(?P<subject>[A-J]))[)*\]]*\ is\ (?:the\ )?(?:correct|right|best)\b
    """,
    re.I | re.X,
)
_DENIED = re.compile(
    r"(?:n['’]t|\bnot)\s+(?:think|believe|say|mean|sure)\b[^.!?\n]*$"  # I don't think the answer is B
    r"|\b(?:if|whether|(?<![i'’]s )why)\s+(?:the\s+)?(?:\w+\s+)?$",  # if the correct answer is B
    re.I,
)
_REASON = re.compile(r"\s*(?:because|since|as|which|is|and|due|for|by|with|[-–—(])")
_SEVERAL = re.compile(  # but in "C, I think" there is one
    r"\s*(?:,|/|&|and|or)\s*(?:\(?(?:[A-HJ]\b(?!\s+(?:is|was)\b)|I\b(?!\s+[a-z]|['’]))|(?:both|either)\b)"
)


def extract_choice(text: str) -> str | None:
    """The letter A to J that was chosen, or None: none was, or several were named together.

    A boxed letter counts most; then the last statement ("Answer: C", "C is correct"), wherever it stands;
    then a last line that is nothing but a letter. "A is a trap" and "a vector" choose nothing.
    """
    box = final_box(text)
    if box is not None:
        label = re.sub(r"(?i)\\[a-z]+\{|[{}$*]|(?:^|(?<={))\s*(?:option|choice|answer)\b[\s:]*", "", box)
        label = label.strip(" .")
        if re.fullmatch(r"\(?[A-J]\)?(?:[\s,;/]+(?:and|or)?\s*\(?[A-J]\)?)+", label):
            return None
        if found := re.match(r"\(\s*([A-Ja-j])\s*\)|([A-Ja-j])(?=$|[).:])", label):
            return (found[1] or found[2]).upper()
    for found in reversed(list(_STATED.finditer(text))):
        letter, rest = found["letter"] or found["subject"], text[found.end() :]
        if _DENIED.search(text[: found.start()][-80:]) or (found["loose"] and letter.islower()):
            continue
        if _SEVERAL.match(rest):
            return None
        sure = found["subject"] or found["shut"] or letter in "BCDEFGHJ"
        if sure or re.match(r"\s*(?:[,;!\n]|$)", rest) or (letter in "AI" and _REASON.match(rest)):
            return letter.upper()
    found = re.fullmatch(r"[\s(\[*$]*([A-J])[)\]*$.]*", text.strip().rpartition("\n")[2])
    return found[1] if found else None


def choice_correct(response: str, answer: str) -> bool:
    """Whether the chosen letter is `answer` (C, c or (C)). ValueError if that is no letter A to J."""
    gold = str(answer).strip(" ().").upper()
    if not re.fullmatch("[A-J]", gold):
        raise ValueError(f"the answer of a multiple-choice problem must be one letter A to J, not {answer!r}")
    return extract_choice(response) == gold


# ---------------------------------------------------------------- code

_PROGRAM = re.compile(
    r"^[^\S\n]*```+[^\S\n]*(?:python3?|py)(?!\S).*\n((?:(?![^\S\n]*```).*\n)*)[^\S\n]*```+[^\S\n]*$",
    re.M | re.I,
)
_PRELUDE = """
from string import *; from re import *; from datetime import *; from collections import *; from heapq import *
from bisect import *; from copy import *; from math import *; from random import *; from statistics import *
from itertools import *; from functools import *; from operator import *; from io import *; from sys import *
from json import *; from builtins import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(0)
"""  # but for the last line as LiveCodeBench has it, whose programs rely on these names
_RUN = 'exec(compile({program!r}, "solution.py", "exec"), globals())'
_CALL = f"""
_arguments = json.loads(sys.stdin.read())
sys.modules["solution"], __name__ = sys.modules[__name__], "solution"  # its main block does not run
{_RUN}
_function = Solution().{{name}} if "Solution" in globals() else {{name}}
_result = _function(*_arguments)
print("\\n{{mark}}" + json.dumps(_result, default=lambda x: x.tolist() if hasattr(x, "tolist") else list(x)))
"""


def extract_program(response: str) -> str | None:
    """The last closed code fence tagged python, after the thinking. Fences without the tag do not count."""
    programs = _PROGRAM.findall(response.rpartition("</think>")[2])
    return textwrap.dedent(programs[-1]).removesuffix("\n") if programs else None


def code_score(
    response: str, tests: dict, timeout_s: float = 6.0, tool=None, *, partial: bool = False
) -> float:
    """1.0 if the program of `response` passes every test, else 0.0 (partial: the share of tests passed).

    tests      {"inputs": [...], "outputs": [...], "fn_name"?: str}: texts; with fn_name lists of arguments
               (or JSON text, one a line) and values (or JSON text)
    timeout_s  CPU seconds a test; a test that only waits ends a little later
    tool       a PythonTool; without one a shared one is started on first need

    Stops at the first failure. No tests: 0.0. Non-zero exit fails, whatever was printed. ValueError: not as
    many inputs as outputs, or arguments that cannot be read.
    """
    inputs, outputs, name = tests.get("inputs") or [], tests.get("outputs") or [], tests.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} test inputs but {len(outputs)} outputs; each test needs one of both")
    program = extract_program(response)
    if not inputs or program is None:
        return 0.0
    tool = tool or _shared_tool()
    passed = (_passes(program, *test, name, timeout_s, tool) for test in zip(inputs, outputs))
    return sum(passed) / len(inputs) if partial else float(all(passed))


@functools.cache
def _shared_tool():
    from tools import PythonTool

    return PythonTool()


def call_arguments(given) -> str:
    """The arguments of a test as a JSON list. ValueError: neither a list nor text with a value a line."""
    try:
        if isinstance(given, str):
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        if isinstance(given, list | tuple):
            return json.dumps(given)
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{str(given)[:80]!r} is no list of arguments, nor one JSON value a line")


def _passes(program: str, given, expected, name: str | None, timeout_s: float, tool) -> bool:
    stdin, wanted = ("\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (given, expected))
    if name:
        stdin = call_arguments(given)
    mark = secrets.token_hex(8)  # stands before the function's value; the program cannot know it beforehand
    code = _PRELUDE + (_CALL if name else _RUN).format(program=program, name=name, mark=mark)
    # cpu_s is the limit that counts; the wall is for programs that sleep or wait, and for a crowded machine
    limits = {"cpu_s": timeout_s, "timeout_s": 1.5 * timeout_s + 1, "max_chars": 10_000_000}
    result = tool.run(code, stdin=stdin, echo=False, **limits)
    if result.status != "ok":
        return False
    if not name:  # blanks around a line and around the text do not count, blank lines inside do
        a, b = (text.strip().splitlines() for text in (result.stdout, wanted))
        lines = [(x.split(), y.split()) for x, y in zip(a, b)]
        return len(a) == len(b) and all(
            x == y or len(x) == len(y) and _same(_numbers(x), _numbers(y)) for x, y in lines
        )
    _, found, value = result.stdout.rpartition(mark)
    value = _json(value)
    if isinstance(given, str) or not isinstance(value, str):
        expected = _json(expected)
    return found != "" and _same(value, expected)


def _json(text):
    """JSON text as a value; other text, and integers too long for a float, as they are."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else digits)
    except (ValueError, RecursionError):
        return text


def _numbers(words: list[str]) -> list:
    values = map(_json, words)
    return [v if type(v) in (int, float) and math.isfinite(v) else word for v, word in zip(values, words)]


def _same(found, expected) -> bool:
    """Decimals within 1e-6, absolute or relative to an expected decimal; integers and text exactly."""
    if isinstance(found, list) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        expected = {str(key): value for key, value in expected.items()}  # JSON has only text as keys
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in found)
    numbers = isinstance(found, int | float) and isinstance(expected, int | float)
    if numbers and float in (type(found), type(expected)):
        with suppress(OverflowError):  # an integer beyond all floats
            return math.isclose(found, expected, rel_tol=1e-6 * isinstance(expected, float), abs_tol=1e-6)
    return found == expected


# ---------------------------------------------------------------- shaping, and all together


def tool_shaping(correct: bool, tool_rounds: int) -> float:
    """Outcome, with a consolation for having used the tool (arXiv 2510.11701, eq. 8; bound as in its code).

    1 for a right answer; min(-0.6, -1 + 0.1 n) for a wrong one after n tool rounds. The printed equation also
    adds 0.1 n to right answers; its code does not, and neither do we.
    """
    if tool_rounds < 0:
        raise ValueError(f"tool_rounds is {tool_rounds}; it counts rounds and cannot be below 0")
    return 1.0 if correct else min(-0.6, -1.0 + 0.1 * tool_rounds)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13; 2510.11701, eq. 9).

    0 up to max_length - buffer, then in a straight line to -1 at max_length, and -1 above. length counts the
    tokens of policy and tool.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must lie between 0 and max_length ({max_length})")
    over = length - (max_length - buffer)
    return -1.0 if over > buffer else -max(over, 0) / max(buffer, 1)


def outcome(kind: str, response: str, answer, tool=None) -> bool:
    """Whether the response is right. kind: "math", "choice" or "code"; tool: see code_score."""
    if kind == "math":
        return math_correct(response, answer)
    if kind == "choice":
        return choice_correct(response, answer)
    if kind == "code":
        return code_score(response, answer, tool=tool) == 1.0
    raise ValueError(f'no reward for problems of kind {kind!r}; kinds are "math", "choice" and "code"')
