r"""Verifiable rewards: is the answer right? Math, multiple choice, code; and the two shaping terms.

    math_correct(r"so \boxed{\frac{1}{2}}", "0.5")                        True
    choice_correct("The answer is C. A is a trap.", "C")                  True
    code_score(response, {"inputs": ["1 2\n"], "outputs": ["3\n"]})       1.0 if the program passes every test

Left out: math answers outside a box, proofs, code tests with a checker of their own.
To copy it elsewhere: math_worker.py and math_equal.py for math, the PythonTool of tools.py for code.
"""

import atexit
import functools
import json
import math
import re
import secrets
import textwrap

from math_equal import unwrapped
from math_worker import same_answer

# ---------------------------------------------------------------- math


def extract_boxed(text: str) -> str | None:
    r"""What the last complete \boxed{...} holds. \boxed 5 counts; \fbox does where there is no \boxed."""
    return _last_box(text)[0]


_BRACE = re.compile(r"\\.|[{}]", re.S)  # \{ and \} are no braces
_BARE = re.compile(r"(?![A-Za-z]{2})(?:\\[A-Za-z]+ ?|\\[%,!{}]|\{[^{}]*\}|[^\s${}\\])+")  # 17, x, not a word


def _last_box(text: str) -> tuple[str | None, bool]:
    """(last complete box or None, whether a box that is empty or never closed comes after it)."""
    for name in (r"\boxed", r"\fbox"):
        end, spoiled = len(text), 0
        while (at := text.rfind(name, 0, end)) >= 0 and spoiled < 20:  # a policy may repeat \boxed{ for ever
            end, start = at, at + len(name)
            while text[start : start + 1].isspace():
                start += 1
            if text[start : start + 1] == "{":
                if content := _inside_braces(text, start):
                    return content, spoiled > 0
                spoiled += 1
            elif bare := _BARE.match(text, start):
                content = bare[0].strip(" .,;:!?")
                if re.search(r"\w", content):
                    return content, spoiled > 0
        if end < len(text):
            break
    return None, False


def _inside_braces(text: str, start: int) -> str | None:
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip()
    return None


_TWO_INTEGERS = re.compile(r"[+-]?[0-9]{1,300} [+-]?[0-9]{1,300}")


def math_correct(response: str, answer: str) -> bool:
    r"""Whether the last box of `response` holds `answer` (text or LaTeX, maybe between $ or in a box).

    False without a box, or when a later \boxed{ is empty or never closed. Guarded steps: the same text;
    integers (007 is 7); then math_worker.same_answer. A gold answer that is no mathematics is rewarded only
    for its own words; `math_worker.counts` says how often one was met, and how often the time limit was.
    """
    box, withdrawn = _last_box(response)
    if box is None or withdrawn:
        return False
    gold = str(answer).strip()
    if box == gold:
        return True
    if _TWO_INTEGERS.fullmatch(f"{box} {gold}"):
        return int(box) == int(gold)  # nearly every call of a training run ends here or above
    if r"\boxed" in gold:
        gold = extract_boxed(gold) or ""
    return same_answer(gold, box)


# ---------------------------------------------------------------- multiple choice

_OPEN, _SHUT = r"[\s(\[{*$_`\"']*(?:\\(?:text|textbf|mathrm|mathbf|boxed)\{\(?)?", r"[)\]}*$_`\"'.:]*"
_STATED = re.compile(
    rf"""
    \b(?:answers?|choices?|options?)\b[*_ ]* (?:\s+(?:is|must\ be|should\ be)\b\s*:?|\s*[:=>])[*_ ]*
        (?:\s*(?:therefore|thus|clearly),?\b)? (?:\s*(?:option|choice|letter)\b)?
        {_OPEN}(?P<after_is>[A-Ja-j])(?!['’]?[A-Za-z0-9])(?P<shut>{_SHUT})
    | \banswer\s+(?-i:(?P<after_word>[A-J])(?![A-Za-z0-9]))
    | (?-i:(?<![A-Za-z0-9])(?P<before_is>[A-J]))[)*\]]*\ is\ (?:the\ )?(?:correct|right|best)\b
    | \b(?:choose|pick|select|go\ with)(?:\ (?:option|choice|answer))?
        (?-i:[\s(\[*]+(?P<chosen>[A-J])(?![A-Za-z0-9]))
    """,
    re.I | re.X,
)
_DENIED = re.compile(
    r"(?:n['’]t|\bnot)\s+(?:think|believe|say|mean|sure)\b[^.!?\n]*$"  # I don't think the answer is B
    r"|\b(?:if|whether|why)\s+(?:the\s+)?(?:\w+\s+)?$",  # if the correct answer is B
    re.I,
)
_REASON = re.compile(r"\s*(?:because|since|as|which|is|and|due|for|by|with|[-–—(])")
_SEVERAL = re.compile(r"\s*(?:,|/|&|and|or)\s*(?:\(?[A-J]\b(?!\s+(?:is|was)\b)|(?:both|either)\b)")


def extract_choice(text: str) -> str | None:
    """The letter A to J that was chosen, or None: none was, or several were named together.

    A boxed letter counts most; then the last statement ("Answer: C", "C is correct"), wherever it stands;
    then a last line that holds nothing but a letter. A letter in passing is no choice: "A is a trap", "a
    vector".
    """
    box, withdrawn = _last_box(text)
    if box is not None and not withdrawn:
        label = re.sub(r"(?i)^(?:option|choice|answer)\b[\s:]*", "", unwrapped(box).strip(" $*."))
        if re.fullmatch(r"\(?[A-J]\)?(?:(?:\s*(?:,|;|/|and|or)\s*|\s+)\(?[A-J]\)?)+", label):
            return None
        if found := re.match(r"\(\s*([A-Ja-j])\s*\)|([A-Ja-j])(?=$|[).:])", label):
            return (found[1] or found[2]).upper()
    for found in reversed(list(_STATED.finditer(text))):
        letter, rest = next(filter(None, found.group(1, 3, 4, 5))), text[found.end() :]
        if _DENIED.search(text[: found.start()][-80:]):
            continue
        if _SEVERAL.match(rest):
            return None
        if not found["before_is"] and (letter in "AI" or letter.islower()):  # "the answer is a vector"
            label = found["shut"] or re.match(r"\s*(?:[,;!\n]|$)", rest)
            if not label and not (letter.isupper() and _REASON.match(rest)):
                continue
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

_PRELUDE = """
import sys
sys.set_int_max_str_digits(0)
import bisect, collections, copy, functools, heapq, itertools, json, math, operator, random, re, string
from bisect import *; from collections import *; from functools import *; from heapq import *
from itertools import *; from typing import *; from math import ceil, comb, floor, gcd, inf, isqrt, log, sqrt
"""
_CALL = """
_arguments = json.loads(sys.stdin.read())
exec(compile({program!r}, "solution.py", "exec"), globals())
_function = Solution().{name} if "Solution" in globals() else {name}
_result = _function(*_arguments)
print("\\n{mark}" + json.dumps(_result, default=lambda x: x.tolist() if hasattr(x, "tolist") else list(x)))
"""


def extract_program(response: str) -> str | None:
    """The last closed code fence tagged python, after the thinking. Fences without the tag do not count."""
    program, lines, tag = None, [], None
    for line in response.rpartition("</think>")[2].splitlines():
        fence = re.match(r"\s*```+\s*(\S*)", line)
        if fence and (tag is None or fence[1]):  # opens, and ends what was open and never closed
            tag, lines = fence[1].lower(), []
        elif fence:
            if tag in ("python", "python3", "py"):
                program = textwrap.dedent("\n".join(lines))
            tag = None
        else:
            lines.append(line)
    return program


def code_score(
    response: str, tests: dict, timeout_s: float = 6.0, tool=None, *, partial: bool = False
) -> float:
    """1.0 if the program of `response` passes every test, else 0.0 (partial=True: the share of tests passed).

    tests      {"inputs": [...], "outputs": [...], "fn_name"?: str}. Without fn_name: standard input and
               output, as text. With it: an input is the list of arguments, or JSON text with one argument a
               line; an output is the value or its JSON text; the function is a method of Solution or stands
               alone
    timeout_s  CPU seconds a test; a test that only waits ends a little later
    tool       a PythonTool; without one a shared one is started on first need

    Stops at the first failure. No tests: 0.0. Non-zero exit fails, whatever was printed.
    raises ValueError: not as many inputs as outputs, or arguments that cannot be read
    """
    inputs, outputs, name = tests.get("inputs") or [], tests.get("outputs") or [], tests.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} test inputs but {len(outputs)} outputs; each test needs one of both")
    program = extract_program(response)
    if not inputs or program is None:
        return 0.0
    tool = tool or _shared_tool()
    results = (
        _passes(program, given, expected, name, timeout_s, tool) for given, expected in zip(inputs, outputs)
    )
    return sum(results) / len(inputs) if partial else float(all(results))


@functools.cache
def _shared_tool():
    from tools import PythonTool

    tool = PythonTool()
    atexit.register(tool.close)
    return tool


def _passes(program: str, given, expected, name: str | None, timeout_s: float, tool) -> bool:
    """One test. A function's value comes back behind a mark that the program cannot know beforehand."""
    mark = secrets.token_hex(8)
    if name:
        stdin = json.dumps(_arguments(given))
        code = _PRELUDE + _CALL.format(program=program, name=name, mark=mark)
    else:
        stdin = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
        code = f'{_PRELUDE}\nexec(compile({program!r}, "solution.py", "exec"), globals())'
    # cpu_s is the limit that counts; the wall is for programs that sleep or wait, and for a crowded machine
    result = tool.run(
        code, stdin=stdin, echo=False, cpu_s=timeout_s, timeout_s=1.5 * timeout_s + 1, max_chars=10_000_000
    )
    if result.status != "ok":
        return False
    if not name:
        wanted = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
        return _same_output(result.stdout, wanted)
    _, found, value = result.stdout.rpartition(mark)
    if not found:
        return False
    value = _json(value)
    if isinstance(given, str) or (isinstance(expected, str) and not isinstance(value, str)):
        expected = _json(expected)
    return _same_value(value, expected)


def _arguments(given) -> list:
    if isinstance(given, list | tuple):
        return list(given)
    try:
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    except (ValueError, AttributeError):
        raise ValueError(
            f"a function test needs a list of arguments or one JSON value a line, not {str(given)[:80]!r}"
        ) from None


def _json(text):
    """JSON text as a value; other text as it is. Integers of more than 4,300 digits stay text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits)
    except ValueError:
        return text


def _same_value(found, expected) -> bool:
    if isinstance(found, list) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        expected = {str(key): value for key, value in expected.items()}  # JSON has only text as keys
        return found.keys() == expected.keys() and all(_same_value(found[k], expected[k]) for k in found)
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
    return found == expected


_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _same_output(found: str, expected: str) -> bool:
    """Line by line; blanks at the end of a line and of the text do not count, blank lines inside do."""
    a, b = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (found, expected))
    return len(a) == len(b) and all(x == y or _same_tokens(x.split(), y.split()) for x, y in zip(a, b))


def _same_tokens(found: list[str], expected: list[str]) -> bool:
    """Decimals within 1e-6, absolute or relative; integers and words exactly."""
    if len(found) != len(expected):
        return False
    for a, b in zip(found, expected):
        if a == b:
            continue
        if not (_FLOAT.fullmatch(a) and _FLOAT.fullmatch(b)) or (a.isdigit() and b.isdigit()):
            return False
        slack = 1e-6 if re.search("[.eE]", b) else 0.0
        x, y = float(a), float(b)
        if not (math.isfinite(x) and math.isfinite(y) and math.isclose(x, y, rel_tol=slack, abs_tol=slack)):
            return False
    return True


# ---------------------------------------------------------------- shaping, and all together


def tool_shaping(correct: bool, tool_rounds: int) -> float:
    """Outcome, with a consolation for having used the tool (arXiv 2510.11701, eq. 8; bound as in its code).

    1 for a right answer; min(-0.6, -1 + 0.1 n) for a wrong one after n tool rounds: -1, -0.9 ... -0.6 from 4
    on. The printed equation also adds 0.1 n to right answers; its code does not, and neither do we.
    """
    if tool_rounds < 0:
        raise ValueError(f"tool_rounds is {tool_rounds}; it counts rounds and cannot be below 0")
    return 1.0 if correct else min(-0.6, -1.0 + 0.1 * tool_rounds)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13; 2510.11701, eq. 9).

    0 up to max_length - buffer, then in a straight line to -1 at max_length, and -1 above; buffer 0: 0 up to
    max_length. length counts policy and tool tokens.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must lie between 0 and max_length ({max_length})")
    over = length - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def outcome(kind: str, response: str, answer, tool=None) -> float:
    """1.0 if the response is right, else 0.0. kind: "math", "choice" or "code"; tool: see code_score."""
    if kind == "math":
        return float(math_correct(response, answer))
    if kind == "choice":
        return float(choice_correct(response, answer))
    if kind == "code":
        return code_score(response, answer, tool=tool)
    raise ValueError(f'no reward for problems of kind {kind!r}; kinds are "math", "choice" and "code"')
