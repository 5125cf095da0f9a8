"""The tool-call format and the Python tool: what comes back from each program, what stays out of reach."""

import glob
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import sandbox
from bench import torture
from notes import SearchNotes
from tool_calls import MAX_CALLS, ToolCall, mismatch, start_call
from tools import PythonTool, parse_tool_calls

linux = pytest.mark.skipif(sys.platform != "linux", reason="the isolation needs Linux")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope="module")
def tool():
    os.environ.update(torture.HOST | torture.TAG)
    with PythonTool(workers=16, memory_mb=1024) as tool:
        yield tool
    for name in torture.HOST | torture.TAG:
        del os.environ[name]


def call_text(code: str, name: str = "python") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


def only_call(text: str):
    (call,) = parse_tool_calls(text)
    return call


def only_code(text: str) -> str:
    call = only_call(text)
    assert call.error is None and call.name == "python" and list(call.arguments) == ["code"]
    return call.arguments["code"]


def only_error(text: str) -> str:
    call = only_call(text)
    assert call.error and call.arguments == {}
    return call.error


# --------------------------------------------------------------------------------------- the tool-call format


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (call_text("print('</tool_call>')"), "print('</tool_call>')"),  # vLLM #45167: the tag ended the call
        (call_text("print('<tool_call>')"), "print('<tool_call>')"),
        (call_text("print('<think>', '</think>')"), "print('<think>', '</think>')"),
        (call_text('print("it\'s")'), 'print("it\'s")'),  # atropos #479: one kind of quotes became the other
        ('<tool_call>{"name":"python","arguments":{"code":"a=1\nprint(a)"}}</tool_call>', "a=1\nprint(a)"),
        ('<tool_call>{"name":"python","arguments":{"code":"if 1:\n\t2"}}</tool_call>', "if 1:\n\t2"),
        (r'<tool_call>{"name":"python","arguments":"{\"code\": \"print(1)\"}"}</tool_call>', "print(1)"),
    ],
)
def test_code_comes_out_as_the_policy_meant_it(text, code):
    """Models write real line breaks into JSON strings (ai-sdk-tool-call-middleware #298), and give the
    arguments as a string that holds JSON (smolagents #1003)."""
    assert only_code(text) == code


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"python","arguments":{"code":"print(1)"}</tool_call>',  # hermes-agent #5315
        '<tool_call>{"name":"python","arguments":{"code":"print("hi")"}}</tool_call>',  # quotes not escaped
        '<tool_call>{"name":"python","arguments":{"code":"print(1)",}}</tool_call>',  # trailing comma
        "<tool_call>{'name': 'python', 'arguments': {'code': 'print(1)'}}</tool_call>",  # a Python dict
        "<tool_call>{'name': {1, 2}}</tool_call>",
        "<tool_call>print(1)</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_invalid_json_becomes_an_error_that_the_policy_can_repair(text):
    """Dropped without a word, a broken call passes for the final answer and is never repaired."""
    assert "not valid JSON" in only_error(text) and "<tool_call>" in only_error(text)


@pytest.mark.parametrize(
    "payload",
    """[1, 2]; 7; null; "text"; {}; {"name": "python"}; {"name": 3, "arguments": {"code": "1"}};
    {"name": "python", "arguments": ["print(1)"]}; {"name": "python", "arguments": "print(1)"}""".split(";"),
)
def test_unknown_shape_is_an_error(payload):
    """A list or number where an object belongs made parsers raise, which ended the run."""
    assert only_error(f"<tool_call>{payload}</tool_call>")


@pytest.mark.parametrize("name", ["python", "code_interpreter"])
@pytest.mark.parametrize("arguments", ["{}", '{"code": 5}', '{"code": null}', '{"program": "print(1)"}'])
def test_arguments_that_the_schema_refuses_are_an_error_by_whatever_name_the_tool_is_called(name, arguments):
    """The published models call the tool code_interpreter: what was checked for the name python was not."""
    call = only_call(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')

    def tool(code):
        raise AssertionError("it must not run")

    tool.schema = PythonTool.described(name)
    result = start_call(call, {name: tool}).result()
    assert (result.status, result.output[:7]) == ("error", "Error: ") and "code" in result.output


def test_drafts_inside_thinking_are_not_run():
    """verl #4757: a call that the policy only considered was run."""
    draft, call = call_text("print(1)"), call_text("print(2)")
    assert only_code(f"<think>maybe {draft}</think>{call}") == "print(2)"
    assert only_code(f"maybe {draft}</think>{call}") == "print(2)"  # the template had opened the thinking
    assert parse_tool_calls(f"<think>maybe {draft}") == []  # never closed


def test_two_calls_come_in_order():
    """langgraph-codeact #5: the second call of a turn was lost."""
    calls = parse_tool_calls(call_text("print(1)") + call_text("print(2)"))
    assert [call.arguments["code"] for call in calls] == ["print(1)", "print(2)"]


def test_a_broken_call_does_not_hide_the_next():
    calls = parse_tool_calls("<tool_call>{oops}</tool_call>" + call_text("print(2)"))
    assert calls[0].error and calls[1].arguments == {"code": "print(2)"} and len(calls) == 2


@pytest.mark.parametrize("cut", range(12, len(call_text("print(1)"))))
def test_a_call_cut_by_the_length_limit_is_never_run(cut):
    """mastra #15718: half a program was run, or the turn was tried again for ever."""
    assert only_error("text " + call_text("print(1)")[:cut])


def test_a_tag_mentioned_in_prose_is_no_call():
    """The final answer that follows must still be read."""
    prose = "I would use a <tool_call> here but do not need it.\n"
    assert parse_tool_calls(prose + r"\boxed{4}") == []
    assert only_code(prose + call_text("print(1)")) == "print(1)"


def test_name_is_handed_on_for_the_loop_to_judge():
    """Which tools exist is the agent loop's knowledge; it answers an unknown name with the list."""
    call = only_call(call_text("print(1)", name="python3"))
    assert (call.name, call.error) == ("python3", None)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "[" * 200_000,
        "<tool_call>" + '{"a":' * 200_000 + "</tool_call>",
        '<tool_call>{"name":"python","arguments":' + json.dumps("[" * 100_000) + "}</tool_call>",
        '<tool_call>{"name":' + "1" * 100_000 + "}</tool_call>",
        "<tool_call>" * 200_000,
        '<tool_call>{"a":"' * 100_000,
        '<tool_call>["' * 2 + ',"' * 500_000,
        "<tool_call>{}</tool_call>" * 50_000,
        "<tool_call>{'}</tool_call>" * 50_000,
        "<think>" * 200_000 + "</think>" * 200_000,
        "<tool_call>" + " " * 2_000_000,
        "<tool_call>{} " + " " * 1_000_000 + "x</tool_call>" * 10_000,
        ("<tool_call> " + " " * 2000) * 1000,
        "\ud800<tool_call>\0</tool_call>",
    ],
)
def test_parser_takes_hostile_text_in_linear_time(text):
    """Nested JSON ends in RecursionError and quadratic scans in hours; both would stop the training run."""
    start = time.perf_counter()
    calls = parse_tool_calls(text)
    assert time.perf_counter() - start < 2
    assert len(calls) <= MAX_CALLS + 1 and all(call.error for call in calls)


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        ("object", {}, [[], "{}", 1, None]),
        ("integer", 1, [True, 1.5, "1"]),
        ("number", 1.5, [False, "1"]),
        ("boolean", True, [1, "true"]),
        ("array", [], [{}, "[]"]),
    ],
)
def test_arguments_have_the_json_type_of_the_schema(kind, good, bad):
    """To Python True is an integer; to JSON, and to a tool that counts with it, it is none."""
    parameters = {"properties": {"x": {"type": kind}}, "required": ["x"]}
    assert mismatch("f", {"x": good}, parameters) == mismatch("f", {}, {"type": "object"}) == ""
    for value in bad:
        assert mismatch("f", {"x": value}, parameters).startswith(f"x must be a {kind}, got ")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"query": "a", "folder": "/etc"}, "search_notes takes query, not folder"),
        ({}, "search_notes needs query"),
        ({"query": 5}, "query must be a string, got int"),
        ({"query": None}, "query must be a string, got NoneType"),
    ],
)
def test_arguments_that_the_schema_does_not_allow_are_refused_with_a_sentence(tmp_path, arguments, wrong):
    """An option of the tool's function that its schema does not name is not for the policy to set."""
    (tmp_path / "a.txt").write_text("a note")
    notes = {"search_notes": SearchNotes(tmp_path)}
    result = start_call(ToolCall("search_notes", arguments), notes).result(5)
    assert (result.output, result.status) == (f"Error: {wrong}", "error")


def test_a_plain_function_that_hangs_times_out_and_others_go_on():
    """Its thread cannot be ended, but the episode that waits for it must be."""
    block = threading.Event()
    tools = {"hang": lambda: block.wait(20), "add": lambda a, b: a + b, "exit": sys.exit}
    start = time.perf_counter()
    hung = [start_call(ToolCall("hang"), tools, timeout_s=0.5) for _ in range(50)]
    assert start_call(ToolCall("add", {"a": 1, "b": 2}), tools).result(5).output == "3"
    assert {future.result(5).status for future in hung} == {"timeout"} and time.perf_counter() - start < 3
    assert hung[0].result().output == "[timed out after 0.5 s]"
    assert start_call(ToolCall("exit"), tools).result(5).output == "SystemExit: "
    block.set()


def test_notes_are_ranked_by_how_rare_the_words_are(tmp_path):
    """Two paragraphs hold "the", more than once, and one holds "prime": a count would rank them first."""
    (tmp_path / "math.md").write_text("the the the sum\n\nA prime has two divisors")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "n.txt").write_text("the sum of the digits")
    (tmp_path / "other.bin").write_bytes(b"prime")
    search = SearchNotes(tmp_path, most=2)
    assert search("the PRIME?").splitlines()[0] == "math.md: A prime has two divisors"
    assert search("digits") == "more/n.txt: the sum of the digits"
    assert search("nothing") == search("") == "no note matches"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        SearchNotes(tmp_path / "empty")


# ---------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("x=2\nx**10", "1024"),
        ("3+4  # c", "7"),
        ("1+1; 2+2", "4"),
        ("a=7\na\n\n# done", "7"),
        ("(1 +\n 2)", "3"),
        ("a, b = 1, 2\na, b", "(1, 2)"),
        ("def f(n, limit=3):\n    return n*limit\nf(4, limit=10)", "40"),
        ("print(3)", "3"),
        ("x=[3,1]\nx.sort()", ""),
        ("None", ""),
        ("x = 5", ""),
        ("if True:\n    5", ""),
        ("for i in range(2):\n    i", ""),
        ("# only a comment", ""),
        ("", ""),
        ("'text'", "'text'"),
        ("print(1)\n2", "1\n2"),
        ("if __name__ == '__main__': print('main')", "main"),
        ("def f():\n    return g()\ndef g():\n    return 5\nf()", "5"),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("try:\n    1\nfinally:\n    pass", ""),
        ("x = '''\n  a\n'''\nx", "'\\n  a\\n'"),
    ],
)
def test_last_expression_is_shown_and_nothing_else_changes(tool, code, output):
    """Rules on text (wrap the last line in print) break 12 of 16 ordinary programs, the syntax tree none."""
    result = tool.run(code)
    assert (result.output, result.status) == (output, "ok")


def test_echo_can_be_switched_off(tool):
    assert tool.run("5", echo=False).output == ""


@pytest.mark.parametrize(
    "code",
    [
        "```python\nprint(1)\n```",
        "```\nprint(1)\n```\n",
        "\n```py\nprint(1)```",
        "    x=1\n    print(x)",
        "\n  # note\n  x=1\n  print(x)\n",
        "\tx=1\n\tprint(x)",
        "x=1\r\nprint(x)\r\n",
    ],
)
def test_fences_indentation_and_crlf_are_forgiven(tool, code):
    """Models hand programs over as they write them in prose."""
    assert tool.run(code).output == "1"


def test_output_keeps_head_and_tail_and_tells_what_was_dropped(tool):
    result = tool.run("for i in range(1000): print(i % 10, end='')", max_chars=10)
    assert result.output == "01234\n[... 990 characters left out ...]\n56789"
    assert result.stdout == result.output
    assert tool.run("print('x' * 10, end='')", max_chars=10).output == "x" * 10


def test_dropped_characters_are_counted_as_characters(tool):
    """Counting bytes gives three times as many for this text."""
    result = tool.run("print('\u20ac' * 10**6, end='')", max_chars=100)
    assert f"[... {10**6 - 100} characters left out ...]" in result.output
    assert result.output.count("\u20ac") == 100


def test_traceback_shows_the_programs_own_lines_only(tool):
    """A model must see its error, not ours: not 'no stdout' (verl sandbox_fusion), not frames of the tool."""
    result = tool.run("def f(x):\n    return 1 / x\nf(0)")
    assert result.status == "error" and result.output.endswith("ZeroDivisionError: division by zero")
    assert "line 3" in result.output and "line 2" in result.output and "return 1 / x" in result.output
    assert "sandbox" not in result.output and result.output.count("File ") == 2
    result = tool.run("import json\njson.loads('{')")
    assert result.output.count("File ") == 1 and "JSONDecodeError" in result.output


def test_syntax_error_is_shown(tool):
    """rllm #5: an empty result for a program that does not parse."""
    result = tool.run("print('a'")
    assert "SyntaxError: '(' was never closed" in result.output and result.status == "error"
    assert "sandbox" not in result.output


def test_stdout_comes_before_the_traceback_and_apart(tool):
    result = tool.run("print('before')\n1/0")
    assert result.output.startswith("before\nTraceback") and result.stdout == "before\n"


def test_runaway_recursion_is_told_shortly(tool):
    result = tool.run("def f(n): return f(n+1)\nf(0)")
    assert result.output.splitlines()[-1].startswith("RecursionError") and len(result.output) < 1000


def test_big_integers_can_be_printed(tool):
    """helm #1381: Python's limit of 4,300 digits fails right programs."""
    assert len(tool.run("print(2**20000)").output) == 6021


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("print(1); import sys; sys.exit(3)", "error", "1\n[exit code 3]"),
        ("import sys; sys.exit('boom')", "error", "boom"),
        ("import sys; sys.exit(0)", "ok", ""),
        ("exit()", "ok", ""),
        ("print(5); raise SystemExit(1)", "error", "5"),
        ("import ctypes; ctypes.string_at(0)", "killed", "[killed by signal 11 (Segmentation fault)]"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "[killed by signal 9 (Killed)]"),
    ],
)
def test_exit_codes_and_signals_are_told_apart(tool, code, status, shown):
    """A death by signal must never look like a program that printed nothing."""
    result = tool.run(code)
    assert (result.status, result.output) == (status, shown)


def test_legal_surrogate_pairs_in_json_are_one_character(tool):
    """agent-zero #1773: a lone surrogate killed the host at encode time."""
    pair, lone = (
        parse_tool_calls(call_text("print('X')").replace("X", x))[0] for x in (r"\ud83e\udebf", r"\ud800")
    )
    assert tool.run(pair.arguments["code"]).output == "\U0001fabf"
    assert tool.run(lone.arguments["code"]).status == "error"


# ---------------------------------------------------------------------------------------- input, state, files


def test_programs_that_wait_for_input_end_at_once(tool):
    """code-r1 #7: reading from a terminal that nobody types at hangs the run."""
    start = time.perf_counter()
    assert "EOFError" in tool.run("x = input('n? ')").output
    assert tool.run("import sys; print(repr(sys.stdin.read()))").output == "''"
    assert time.perf_counter() - start < 1


def test_stdin_is_given_as_text_and_bytes(tool):
    """Harnesses that replace sys.stdin break programs that read bytes."""
    code = "import sys; a,b=map(int,sys.stdin.buffer.read().split()); print(a+b)"
    assert tool.run(code, stdin="2 3\n").output == "5"
    code = "import sys; r=sys.stdin.buffer.readline; print(r(),r(),sys.stdin.buffer.read())"
    assert tool.run(code, stdin="1\n2\n3\n").output == "b'1\\n' b'2\\n' b'3\\n'"
    assert tool.run("print(len(input()))", stdin="x" * 10**6 + "\n").output == "1000000"


def test_stdout_is_whole_for_graders(tool):
    result = tool.run("print('7 ' * 10**6)", echo=False, max_chars=10_000_000)
    assert result.stdout == "7 " * 10**6 + "\n"


def test_no_state_between_calls(tool):
    for _ in range(20):  # whichever worker takes it
        tool.run("x = 1\nimport math, os\nmath.pi = 3\nos.environ['A'] = 'b'\nopen('x.txt', 'w').write('a')")
    code = "import math, os\nprint(math.pi, os.environ.get('A'), os.listdir('.'), os.path.exists('x.txt'))\nx"
    result = tool.run(code)
    assert result.output.startswith("3.141592653589793 None [] False") and "NameError" in result.output


def test_same_program_prints_the_same(tool):
    """Otherwise a training run cannot be repeated bit for bit."""
    code = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'})"
    assert len({tool.run(code).output for _ in range(5)}) == 1
    assert len({tool.run("import numpy\nnumpy.random.rand()").output for _ in range(3)}) == 1


def test_numpy_and_sympy_work_under_the_limits(tool):
    """SandboxFusion #45: numpy's import died under the memory limit."""
    with PythonTool(workers=1, memory_mb=512) as small:
        assert small.run("import numpy; print((numpy.ones((50, 50)) @ numpy.ones(50))[0])").output == "50.0"
    assert tool.run("from sympy import *\nx = symbols('x')\nintegrate(x**2, (x, 0, 3))").output == "9"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plots_do_not_block(tool, monkeypatch):
    """unsloth #7789: plt.show() waited for a window."""
    monkeypatch.setenv("DISPLAY", ":0")
    code = "import matplotlib.pyplot as plt; plt.plot([1,2]); plt.show(); print('ok')"
    result = tool.run(code, timeout_s=60)
    assert result.output.endswith("ok") and result.status == "ok"


def test_multiprocessing_and_asyncio_work(tool):
    code = "import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))"
    assert tool.run(code).output == "[1, 2]"
    assert tool.run("import asyncio\nasync def f(): return 5\nasyncio.run(f())").output == "5"
    code = "from concurrent.futures import ThreadPoolExecutor as T\nlist(T(2).map(abs, [-1, -2]))"
    assert tool.run(code).output == "[1, 2]"


@pytest.mark.parametrize("loaded", ["", "import sympy\n", "import numpy\n"])
def test_threads_are_waited_for_whatever_was_imported_beforehand(tool, loaded):
    """Where sympy is loaded threading is too, and it ends once for a process and its forks: a program that
    reads, computes and prints in a thread, as many do for its larger stack, printed nothing."""
    late = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
    assert tool.run(loaded + late).output == "late"
    pool = "from concurrent.futures import ThreadPoolExecutor as T\nlist(T(2).map(abs, [-1, -2]))"
    assert tool.run(loaded + pool).output == "[1, 2]"


def test_what_libraries_in_c_print_is_shown(tool):
    """C has buffers of its own, which an exit past it leaves unwritten."""
    assert tool.run("import ctypes\nctypes.CDLL(None).puts(b'hi')\nNone").output == "hi"


# ------------------------------------------------------------------------------------- time, numbers, endings


def test_grandchild_that_holds_the_pipe_does_not_delay_the_result(tool):
    """cpython #74340: plain subprocess waits for every holder of the pipe, though the program has ended."""
    code = "import subprocess; subprocess.Popen(['sleep','60']); print('hi')"
    ended = tool.run(code, timeout_s=2)
    assert ended.status == "ok" and ended.output == "hi" and ended.seconds < 1
    late = tool.run(code + "\nimport time; time.sleep(60)", timeout_s=2)
    assert late.status == "timeout" and late.output == "hi\n[timed out after 2 s]" and late.seconds < 3


def test_cpu_limit_is_a_timeout(tool):
    result = tool.run("while True: pass", cpu_s=1, timeout_s=20)
    assert result.status == "timeout" and "CPU" in result.output and result.seconds < 10
    assert tool.run("import time; time.sleep(1.5); print(1)", cpu_s=1).output == "1"  # sleeping takes no CPU


def test_calls_overlap_and_keep_their_own_results(tool):
    """slime's tool blocked: four calls at once ran one after the other."""
    start = time.perf_counter()
    futures = [tool.submit(f"import time; time.sleep(0.5); print({i})") for i in range(64)]
    assert [future.result().output for future in futures] == [str(i) for i in range(64)]
    assert time.perf_counter() - start < 6  # 16 at a time: 2 s


def test_one_bad_program_among_many_harms_no_other(tool):
    """compose-rl #146: a time-out left the whole pool stuck."""
    futures = [tool.submit("while True: pass" if i == 7 else f"{i}", timeout_s=1) for i in range(64)]
    statuses = [future.result().status for future in futures]
    assert statuses[7] == "timeout" and statuses.count("ok") == 63


def test_works_off_the_main_thread(tool):
    """trl #5281: graders and tools built on SIGALRM fail outside the main thread."""
    results = []
    threads = [threading.Thread(target=lambda i=i: results.append(tool.run(f"{i}").output)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(results) == [str(i) for i in range(8)]


def test_wrong_use_is_refused_with_the_value():
    for options in ({"workers": 0}, {"timeout_s": -1}, {"memory_mb": 0}, {"max_chars": 0}):
        with pytest.raises(ValueError, match="positive, got"):
            PythonTool(**options)
    with PythonTool(workers=1) as tool:
        with pytest.raises(ValueError, match="code must be a string, got int"):
            tool.submit(5)
        with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
            tool.submit("1", timeout_s=0)
    with pytest.raises(RuntimeError, match="closed"):
        tool.submit("1")


def test_schema_names_the_function_and_its_argument():
    function = PythonTool.described()["function"]
    assert function["name"] == "python" and function["parameters"]["required"] == ["code"]
    assert "{}.{}".format(*sys.version_info) in function["description"]


# -------------------------------------------------------------------------------------------------- isolation


CHILDREN = "import os, time\nfor i in range(1000):\n    if os.fork() == 0: time.sleep(1); os._exit(0)"


@linux  # before the fork bombs below
def test_a_call_has_at_most_some_hundred_processes(tool):
    result = tool.run(CHILDREN)
    assert result.status == "error" and "BlockingIOError" in result.output


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="for an ordinary user RLIMIT_NPROC binds")
def test_processes_are_counted_where_the_kernel_does_not_limit_those_of_root(tmp_path, monkeypatch, capsys):
    """Before Linux 6.14; to say nothing would promise a limit of the kernel's."""
    with open(sandbox.__file__) as file:
        far_side = file.read().replace("\nLIMITED_PIDS =", "\nLIMITED_PIDS = False and")
    (tmp_path / "sandbox.py").write_text(far_side)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    with PythonTool(workers=1) as tool:
        assert "limit on root's processes" in capsys.readouterr().err
        assert tool.run(CHILDREN).status == "killed" and tool.run("1").output == "1"


@linux
@pytest.mark.parametrize("name", torture.PROGRAMS)
def test_a_hostile_program_ends_in_time_as_expected_and_leaves_nothing(tool, name):
    """Each program is one that hung, leaked or broke somebody's tool; see bench/torture.py."""
    code, limit_s, _, _ = torture.PROGRAMS[name]
    if name in torture.SIGNALS and torture.not_confined(tool):
        pytest.skip("no namespaces here, and before Linux 6.12 nothing else limits signals: it would kill us")
    tool.run("pass")
    before, start = set(torture.processes()), time.monotonic()
    result = tool.run(code, timeout_s=limit_s)
    assert torture.verdict(name, result.status, result.output, time.monotonic() - start) == ""
    assert torture.left_behind(before) == ""
    assert tool.run("print(1)").output == "1"


@linux
def test_only_the_standard_descriptors_are_open(tool, tmp_path):
    with open(tmp_path / "data", "w") as file, socket.socket() as connection:
        os.set_inheritable(file.fileno(), True)
        os.set_inheritable(connection.fileno(), True)
        code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
        assert tool.run(code).output == "[0, 1, 2, 3]"
        with PythonTool(workers=1) as other:
            assert other.run(code).output == "[0, 1, 2, 3]"


@linux
def test_a_call_has_a_session_of_its_own_and_limits_of_size(tool):
    """A signal to the group, as a terminal sends it for Ctrl-C, must not go from one to the other."""
    assert tool.run("import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())").output == "True"
    limit = "import resource as r; print(r.getrlimit(r.RLIMIT_{})[0])"
    found = {name: tool.run(limit.format(name)).output for name in ("AS", "FSIZE", "CORE", "NOFILE", "CPU")}
    assert found == {"AS": str(1 << 30), "FSIZE": str(1 << 28), "CORE": "0", "NOFILE": "256", "CPU": "61"}


@linux
def test_what_lies_outside_of_the_folder_cannot_be_written_or_changed(tool, tmp_path):
    """A read-only mount lets named pipes be written, and root's program could take a device's mode away from
    the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        tried = f"import os\nos.open({str(tmp_path / 'pipe')!r}, os.O_WRONLY | os.O_NONBLOCK)"
        assert "PermissionError" in tool.run(tried).output
    finally:
        os.close(reader)
    assert "Read-only file system" in tool.run("import os; os.chmod('/dev/null', 0o666)").output
    assert tool.run("open('/dev/null', 'w').write('x')").output == "1"


@linux
def test_calls_see_nothing_of_the_host_or_of_each_other(tool):
    slow = tool.submit("open('mine', 'w'); import time; time.sleep(1)")
    code = "import os; print(sum(map(str.isdigit, os.listdir('/proc'))), os.getuid(), os.listdir('/dev/shm'))"
    assert tool.run(code).output == "2 1000 []"  # the worker and the program
    slow.result()


def resources() -> tuple[int, int]:
    """Open descriptors and resident megabytes of this process."""
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), int(file.read().split()[1]) * 4096 >> 20


@linux
def test_endless_output_does_not_grow_the_host(tool):
    """nanochat's host grew by 1.25 GB."""
    before = resources()[1]
    result = tool.run("while True: print('0123456789')", timeout_s=2)
    assert result.status == "timeout" and resources()[1] - before < 50
    assert len(result.output) < tool.max_chars + 100 and result.output.startswith("0123456789\n")


BOTH_WAYS = (  # programs that are tried again without namespaces, and inside bubblewrap
    "endless loop", "grandchild in its own session, call ends", "kills its parent",
    "kills everything (kill -1)", "grandchild in its own session, call times out",
    "reads the parent's environment", "writes outside", "reads every environment in /proc", "internet",
    "folders two thousand deep", "locks its own folder", "memory bomb, one block", "endless output",
    "ignores every signal", "stops itself (SIGSTOP)", "reads its own environment",
    "socket of a local service", "socket by the 32-bit table of calls", "datagram to a local socket",
    "limits its parent's descriptors",
)  # fmt: skip


def host(code: str, **env: str) -> subprocess.Popen:
    """A Python process that uses the tool, and whose descendants carry the mark of these tests."""
    env = os.environ | {"PYTHONPATH": f"{torture.RUN}:{ROOT}"} | env
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, **streams)


def states_below(pid: int) -> list[str]:
    """The state letters of the process and of all below it."""
    with open(f"/proc/{pid}/stat") as file:
        found = [file.read().rsplit(")", 1)[1].split()[0]]
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with open(path) as file:
            found += [state for child in file.read().split() for state in states_below(int(child))]
    return found


def many_calls(count: int) -> None:
    """count calls, a third of which time out or die; run as a program of its own by the next test."""
    bad = ("while True: pass", "import os; os.kill(os.getpid(), 11)", "open('f', 'w').write('x'); 1/0")
    bad += (torture.DETACH,)
    first = resources()
    with PythonTool(workers=8) as tool:
        list(map(tool.run, ["1"] * 8))
        codes = [bad[i // 3 % 4] if i % 3 == 0 else "print('x' * 100)" for i in range(count)]
        futures = [tool.submit(code, timeout_s=0.1) for code in codes]
        statuses = [future.result().status for future in futures]
        zombies = sum(state == "Z" for state in states_below(os.getpid()))
    last = resources()
    grown = {"fds": last[0] - first[0], "mb": last[1] - first[1]}
    print(json.dumps({"ok": statuses.count("ok"), "zombies": zombies, **grown}))


@linux
def test_many_calls_leave_no_process_descriptor_file_or_memory(tmp_path):
    """rllm #918: after hours the machine is full of zombies and the host out of descriptors."""
    before = set(torture.processes())
    code = "from tests.test_tools import many_calls; many_calls(200)"
    stdout, _ = host(code, TMPDIR=str(tmp_path)).communicate(timeout=100)
    found = json.loads(stdout.splitlines()[-1])
    assert found["ok"] >= 133 and found["fds"] <= 0 and found["mb"] < 20 and found["zombies"] == 0
    assert torture.left_behind(before) == "" and os.listdir(tmp_path) == []


@linux
@pytest.mark.parametrize("ending", ["kill", "exit", "fork"])
def test_a_host_that_dies_or_just_ends_leaves_nothing(ending, tmp_path, more="", first=""):
    """A killed trainer left tools that went on computing. A fork of the host may hold its sockets open."""
    code = """
import os, time
from tools import PythonTool
tool = PythonTool(workers=2, MORE)
tool.submit("while True: pass")
tool.submit("import numpy, time; time.sleep(60)")
time.sleep(0.5)
fork = os.fork() if ENDING == "fork" else 0
if fork or ENDING != "fork":
    print(fork, flush=True)
if ENDING != "exit":
    time.sleep(20)
"""
    before = set(torture.processes())
    code = first + code.replace("MORE", more)
    process = host(f"ENDING = {ending!r}\n" + code, TMPDIR=str(tmp_path))
    fork = int(process.stdout.readline())
    if ending != "exit":
        process.kill()
    process.wait(15)
    process.stdout.close()
    process.stderr.close()
    assert torture.left_behind(before | {fork}) == ""
    assert os.listdir(tmp_path) == []
    if fork:
        os.kill(fork, signal.SIGKILL)


@linux
def test_a_server_that_dies_is_started_again_and_leaves_nothing(tmp_path, monkeypatch):
    """Out of memory, the kernel ends it first; then it cannot remove its folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PythonTool(workers=1) as tool:
        tool._servers[""].process.kill()
    assert list(tmp_path.iterdir()) == []
    with PythonTool(workers=2) as tool:
        server = tool._servers[""].process
        server.kill()
        server.wait()
        futures = [
            tool.submit("import time; time.sleep(0.2)") for _ in range(2)
        ]  # two workers, one of them new
        assert [future.result().status for future in futures] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


@linux
def test_a_host_with_many_open_descriptors_can_start_the_tool_and_shows_none():
    """Numbers above 1023 do not fit into select, and closing the first 256 leaves the rest to the program."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    try:
        with PythonTool(workers=1) as tool:
            code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
            assert tool.run(code).output == "[0, 1, 2, 3]"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@linux
def test_a_cleaner_of_the_temporary_folder_costs_one_call_at_most(tmp_path, monkeypatch):
    """Systems remove what has lain in /tmp for ten days; every call of a longer run was lost after that."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PythonTool(workers=1) as tool:
        (folder,) = tmp_path.iterdir()
        folder.rmdir()
        tool.run("1")
        assert [tool.run("open('f', 'w').close(); 1").output for _ in range(3)] == ["1"] * 3
    assert list(tmp_path.iterdir()) == []


def test_files_are_noticed_even_if_the_clock_stands_still(tmp_path):
    """Before Linux 6.13 a folder's time of change ticks every 4 ms, and on ext4 its size does not change: two
    calls may see the same."""
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
import sandbox
sandbox.CHANGES = lambda state: 0
job = dict(code="open('left', 'w')", echo=True, stdin="", max_chars=99, memory_mb=512, timeout_s=5, cpu_s=0)
found = sandbox.call(job, sys.argv[1], False, False, host=os.pipe()[0])
print(found["status"], os.listdir(sys.argv[1]))
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == "ok []\n", done.stderr


bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap (bwrap) is not installed")


@linux
@bubblewrap
def test_bubblewrap_hides_the_users_files_and_weakens_nothing(capfd, tmp_path, monkeypatch):
    """It must come on top: inside it the tool still has its own namespaces, and leaves nothing behind."""
    monkeypatch.setenv("PYTHONPATH", torture.RUN)
    for name, value in torture.HOST.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "secret").write_text("x")
    before = set(torture.processes())
    with PythonTool(workers=1, memory_mb=1024, sandbox="bwrap") as tool:
        assert capfd.readouterr().err == ""  # nothing is missing
        for path in (tmp_path / "secret", __file__, "/etc/passwd", os.path.expanduser("~/.bashrc")):
            assert "FileNotFoundError" in tool.run(f"open({str(path)!r})").output
        assert tool.run("import sympy, numpy; sympy.Integer(6) * 7").output == "42"
        assert tool.run("import os; print(sum(map(str.isdigit, os.listdir('/proc'))))").output == "2"
        for name in BOTH_WAYS:
            code, limit_s, _, _ = torture.PROGRAMS[name]
            result = tool.run(code, timeout_s=limit_s)
            assert torture.verdict(name, result.status, result.output, result.seconds) == "", name
            assert tool.run("import os; print(os.listdir())").output == "[]", name
    assert torture.left_behind(before) == ""


def test_a_sandbox_that_is_not_there_is_refused_with_the_way_out(monkeypatch):
    """Falling back to less isolation in silence would break a promise."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="bwrap needs bubblewrap: apt install bubblewrap, or"):
        PythonTool(sandbox="bwrap")
    with pytest.raises(ValueError, match="sandbox is 'docker'; take namespaces or bwrap"):
        PythonTool(sandbox="docker")


@linux
@pytest.mark.parametrize("ending", ["kill", "fork"])
def test_without_namespaces_too_a_host_that_dies_leaves_nothing(ending, tmp_path):
    no_namespaces = "import sandbox\nassert sandbox.refuse_system_calls()"
    test_a_host_that_dies_or_just_ends_leaves_nothing(ending, tmp_path, first=no_namespaces)


@linux
@bubblewrap
@pytest.mark.parametrize("ending", ["kill", "fork"])
def test_in_bubblewrap_too_a_host_that_dies_leaves_nothing(ending, tmp_path):
    test_a_host_that_dies_or_just_ends_leaves_nothing(ending, tmp_path, 'sandbox="bwrap"')


@linux
def test_without_namespaces_calls_still_work_and_the_host_says_what_is_missing():
    """Containers often refuse namespaces; falling back in silence would promise what is not there."""
    code = """
import sandbox
assert sandbox.refuse_system_calls()  # unshare among them
from bench import torture
from tools import PythonTool
tool = PythonTool(workers=1, memory_mb=1024)
bomb = tool.run(torture.PROGRAMS["fork bomb that catches"][0], timeout_s=20)
assert bomb.status == "killed" and bomb.seconds < 10, bomb
from tests.test_tools import BOTH_WAYS
for name in BOTH_WAYS:
    if name in torture.SIGNALS and torture.not_confined(tool):
        continue
    before = set(torture.processes())
    code, limit_s, _, _ = torture.PROGRAMS[name]
    result = tool.run(code, timeout_s=limit_s)
    wrong = torture.verdict(name, result.status, result.output, result.seconds) or torture.left_behind(before)
    if wrong or tool.run("import os; print(os.listdir())").output != "[]":
        print(name, wrong, result)
tool.close()
"""
    before = set(torture.processes())
    process = host(code, **torture.HOST)
    stdout, stderr = process.communicate(timeout=100)
    assert stdout == "" and process.returncode == 0
    assert stderr.startswith("tools: this system does not grant namespaces")
    assert stderr.endswith(": calls are isolated less\n") and stderr.count("\n") == 1
    assert torture.left_behind(before) == ""
