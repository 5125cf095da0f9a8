"""Code tests: the program a response hands in, run in the workers of the Python tool."""

import time

import pytest

from reward import code_score, extract_program
from tools import PythonTool


@pytest.fixture(scope="module")
def tool():
    with PythonTool(workers=1) as tool:
        yield tool


def fence(program: str, tag: str = "python") -> str:
    return f"Here it is:\n```{tag}\n{program}\n```\nDone.\n"


def score(tool, program: str, given, expected, **more) -> float:
    name = {"fn_name": more.pop("fn_name")} if "fn_name" in more else {}
    return code_score(fence(program), {"inputs": [given], "outputs": [expected], **name}, tool=tool, **more)


@pytest.mark.parametrize(
    "program, given, expected",
    [
        ("import sys; a, b = map(int, sys.stdin.buffer.read().split()); print(a + b)", "2 3\n", "5"),
        (
            "import sys; r = sys.stdin.buffer.readline; print(r(), r(), sys.stdin.buffer.read())",
            "1\n2\n3\n",
            r"b'1\n' b'2\n' b'3\n'",
        ),
        (r"import sys; sys.stdout.buffer.write(b'5\n')", "", "5"),
        ("print(input())", "x", "x"),
        ("print(10**5000)", "", "1" + "0" * 5000),
        ("print(int(input()) + 1)", "1" * 5000, "1" * 4999 + "2"),
        ("print(5); import sys; sys.exit(0)", "", "5"),
        ("from __future__ import annotations\nprint(1)", "", "1"),
        (
            "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
            "1 2",
            "3",
        ),
        ("print(pow(3, 4, 5), gcd(4, 6), Counter('aab')['a'])", "", "1 2 2"),
        (
            "print(prod([2, 3]), deepcopy([1]), ascii_lowercase[:2], mean([1, 3]), copy.copy(5))",
            "",
            "6 [1] ab 2 5",
        ),
        ("@cache\ndef f(i): return 0 if i == 0 else 1 + f(i - 1)\nprint(f(3000))", "", "3000"),
        ("def f(i): return 0 if i == 0 else 1 + f(i - 1)\nprint(f(40_000))", "", "40000"),
        ("print(); print(5)", "", "5"),
        ("import sys; print(len(sys.stdin.read().split()))", "1 " * 500_000, "500000"),
        ("print('1 ' * 500_000)", "", "1 " * 500_000),
    ],
)
def test_a_right_program_passes_however_it_reads_and_writes(tool, program, given, expected):
    """Mock stdin without .buffer (lighteval#1255), or one that repeats the first line (NeMo Gym#2824); binary
    output, the limit of 4,300 digits, sys.exit(0) (Gym#2956); names and depth that LiveCodeBench gives."""
    assert score(tool, program, given, expected) == 1.0


@pytest.mark.parametrize("printed", ["'[' * 100_000", "'1 ' * 2_000_000", "'1e999'"])
def test_what_a_wrong_program_prints_can_neither_end_nor_stop_the_run(tool, printed):
    """Deep brackets are an error of recursion, not of JSON; a long line need not be read as numbers when it
    has another number of words. Both in the trainer's own process."""
    start = time.perf_counter()
    assert score(tool, f"print({printed})", "", "5 6") == 0.0
    assert time.perf_counter() - start < 5


def test_an_integer_beyond_all_floats_is_no_float(tool):
    call = dict(fn_name="f")
    assert score(tool, "def f(x):\n    return 0.5", "1", 10**400, **call) == 0.0
    assert score(tool, "def f(x):\n    return 10**290 + x", "1", 10**290 + 1, **call) == 1.0


@pytest.mark.parametrize(
    "printed, expected, right",
    [
        ("0.333333", "0.333333333333", True),
        ("0.33", "0.333333333333", False),
        ("5.0", "5", True),
        ("1000001", "1000000", False),
        ("1000000.4", "1000000", False),
        ("nan", "1.0", False),
        ("1e999", "2e999", False),
        ("3 \\n4\\n\\n", "3\n4", True),
        ("1\\n\\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("a b", "a  b", True),
        ("yes", "YES", False),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_line_and_decimals_with_a_tolerance(tool, printed, expected, right):
    """Floats compared as text fail right programs; integers with a relative tolerance pass wrong ones."""
    assert score(tool, f"print('{printed}')", "", expected) == float(right)


@pytest.mark.parametrize(
    "program",
    [
        "print(5); raise SystemExit(1)",
        "import os; os._exit(0)",
        "print(5); 1/0",
        "print(5); import os; os.abort()",
    ],
)
def test_a_program_that_ends_badly_fails_whatever_it_printed(tool, program):
    """An early os._exit(0) must not count as success, nor a crash after the right output."""
    assert score(tool, program, "", "5") == 0.0


@pytest.mark.parametrize(
    "response, program",
    [
        (fence("print(1)") + "text\n" + fence("O(1) time", ""), "print(1)"),
        (fence("print(2)") + fence("print(1)"), "print(1)"),
        (fence("print(1)") + "```python\nprint(2)", "print(1)"),
        ("```python\nprint(2)\n" + fence("print(1)"), "print(1)"),
        (fence("print(1)", "Python3"), "print(1)"),
        ("- step\n  ```python\n  if 1:\n      print(1)\n  ```\n", "if 1:\n    print(1)"),
        ("<think>\n" + fence("print(2)") + "</think>\n" + fence("print(1)"), "print(1)"),
        ("<think>\n" + fence("print(1)") + "</think>\nnothing", None),
        (fence("print(1)", "cpp"), None),
        (fence("print(1)", ""), None),
        ("print(1)", None),
    ],
)
def test_the_program_is_the_last_closed_fence_tagged_python(response, program):
    """The last fence of any kind was graded: a note on complexity ran as Python (LiveCodeBench#118)."""
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "program, given, expected, right",
    [
        ("class Solution:\n    def f(self, a: List[int]) -> int: return len(a)", "[1,2,3]", "3", True),
        ("class Solution:\n    def f(self, a: List[int]) -> int: return len(a)", [[1, 2, 3]], 3, True),
        ("def f(a, b): return [a + b, (1, 2)]", "1\n2", "[3,[1,2]]", True),
        ("def f(a, b): print('noise'); return a + b", '"x"\n"y"', '"xy"', True),
        ("def f(a, b): return a + b", ["x", "y"], "xy", True),
        ("def f(a, b): return str(a + b)", "1\n2", "3", False),
        ("def f(a): return a / 3", "1", "0.33333333", True),
        ("def f(a): return None", "1", "null", True),
        ("def f(a): return a == 1", "1", "true", True),
        ("def f(a): return a == 1", "2", "true", False),
        ("def f(a): return 10 ** a", "5000", "1" + "0" * 5000, True),
        ("import os\ndef f(a): os._exit(0)", "1", "null", False),
        ("def g(a): return 1", "1", "1", False),
        ("def f(a): return 1\nif __name__ == '__main__':\n    print(f(2))", "1", "1", True),
        ("def f(a): return 1\nif __name__ == '__main__':\n    print(f(int(input())))", "1", "1", True),
    ],
)
def test_a_function_is_called_and_its_value_compared(tool, program, given, expected, right):
    """Functional tasks need typing names in scope (evalscope#1005); other printing must not matter."""
    assert score(tool, program, given, expected, fn_name="f") == float(right)


TWELVE = {"inputs": [f"{i}\n" for i in range(1, 13)], "outputs": [str(i) for i in range(1, 13)]}


def test_all_tests_count_and_a_share_only_by_name(tool):
    """Only some of the tests were looked at (verl#1921)."""
    last_wrong = fence("n = int(input()); print(n if n < 12 else 0)")
    assert code_score(last_wrong, TWELVE, tool=tool) == 0.0
    assert code_score(last_wrong, TWELVE, tool=tool, partial=True) == pytest.approx(11 / 12)
    assert code_score(fence("print(input())"), TWELVE, tool=tool) == 1.0


@pytest.mark.parametrize("program", ["while True: pass", "import time\nwhile True: time.sleep(1)"])
def test_a_stuck_program_costs_one_limit(tool, program):
    """Ten tests, each to its limit, held a whole evaluation up (AISBench#182)."""
    start = time.perf_counter()
    assert code_score(fence(program), TWELVE, timeout_s=1, tool=tool) == 0.0
    assert time.perf_counter() - start < 4
    assert code_score(fence("print(input())"), TWELVE, tool=tool) == 1.0


def test_tests_that_say_nothing_pay_nothing_and_broken_ones_say_so(tool):
    assert code_score(fence("print(1)"), {"inputs": [], "outputs": []}, tool=tool) == 0.0
    assert code_score("no program", TWELVE, tool=tool) == 0.0
    with pytest.raises(ValueError, match="1 test inputs but 0 outputs"):
        code_score(fence("print(1)"), {"inputs": ["1"], "outputs": []}, tool=tool)
    with pytest.raises(ValueError, match="one JSON value a line"):
        score(tool, "def f(a): return a", "not json", "1", fn_name="f")


def test_without_a_tool_a_shared_one_is_used():
    assert code_score(fence("print(1)"), {"inputs": [""], "outputs": ["1"]}) == 1.0
