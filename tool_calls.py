"""Tool calls: the policy's text becomes calls, and each call a future result.

    <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>

A tool is a name, a JSON schema and a callable: {name: tool}, where `tool.schema` describes it to the policy,
and `tool(**arguments)` returns its text, or `tool.submit(**arguments)` a Future and does not wait (tools.py).
notes.py is an example of the first kind. To copy into another project: this file; standard library only.
"""

import json
import re
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class ToolCall:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # a sentence for the policy; the call must not be run


@dataclass
class ToolResult:
    output: str  # what the policy sees: stdout, stderr with the traceback, a notice if the call was stopped
    status: str  # "ok"; "error": exception, non-zero exit; "timeout": wall or CPU; "killed": died by a signal
    seconds: float  # wall time
    stdout: str = ""  # as it is; like output at most max_chars and a notice


MAX_CALLS = 32  # of one turn; bounds the work on hostile text
TAG = re.compile(r"<think>.*?(?:</think>|\Z)|(</think>)|(<tool_call>)\s*", re.DOTALL)
NEXT, CLOSE = re.compile("</?tool_call>"), re.compile(r"\s*</tool_call>")
DECODER = json.JSONDecoder(strict=False)
FORMAT = 'write <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> of one turn, in order.

    Drafts inside <think> are left out. The JSON is decoded from the opening tag on: a closing tag inside a
    string cuts nothing. Strings may hold raw line breaks, arguments may be JSON text. What cannot be run has
    `error` set and no arguments; a tag that only prose follows is no call. Linear time; raises nothing.
    """
    calls, at = [], 0
    while tag := TAG.search(text, at):
        at = tag.end()
        if tag[1]:
            calls.clear()  # the chat template had opened the thinking: all before this tag was a draft
        elif tag[2] and len(calls) == MAX_CALLS:
            return [*calls, ToolCall("", {}, f"more than {MAX_CALLS} calls in a turn; the rest was not run")]
        elif tag[2]:
            call, at = _decode_call(text, at)
            calls += [call] if call else []
    return calls


def _decode_call(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose JSON begins at start (None: prose that mentions the tag), and where to read on."""
    tag = NEXT.search(text, start)
    closed = tag is not None and tag[0] == "</tool_call>"
    if not closed and text[start : start + 1] not in ("", "{"):
        return None, start
    source, end = text, tag.end() if closed else start
    try:
        value, end = DECODER.raw_decode(text, start)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            source = value["arguments"]
            value["arguments"] = DECODER.decode(source)
        close = CLOSE.match(text, end)
        end = close.end() if close else end
        match value:
            case {"name": str(name), "arguments": dict(arguments)} if close:
                return ToolCall(name, arguments), end
        shape = 'needs "name", a string, and "arguments", an object'
        problem = shape if close else "has no </tool_call> after its JSON"
    except (ValueError, RecursionError) as error:
        reason, at = getattr(error, "msg", type(error).__name__), getattr(error, "pos", start)
        problem = f"is not valid JSON ({reason}, near {source[at : at + 20]!r})" if closed else "is cut off"
    return ToolCall("", {}, f"the tool call {problem}: {FORMAT}"), end


JSON_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict
}  # fmt: skip


def mismatch(name: str, arguments: dict, parameters: dict) -> str:
    """What is wrong with the arguments of tool `name` by its JSON schema; "" if nothing.

    Others than the schema's are refused: a tool's function may have more options, its limits among them, and
    they are not for the policy to set.
    """
    known = parameters.get("properties", {})
    if extra := sorted(set(arguments) - set(known)):
        return f"{name} takes {', '.join(known) or 'nothing'}, not {', '.join(extra)}"
    if missing := [key for key in parameters.get("required", ()) if key not in arguments]:
        return f"{name} needs {', '.join(missing)}"
    for key, value in arguments.items():
        kind = known[key].get("type")
        number = isinstance(value, bool) and kind in ("integer", "number")  # to Python, not to JSON
        if number or not isinstance(value, JSON_TYPES.get(str(kind), object)):
            return f"{key} must be a {kind}, got {type(value).__name__}"
    return ""


def start_call(call: ToolCall, tools: dict, timeout_s: float = 60) -> Future:
    """The future result of a call; raises nothing.

    timeout_s  of a tool without submit(), which runs in a thread: then the policy reads that it timed out.
               Nothing can end the thread: a tool that may hang for ever should run in a process, as Python's
    """
    problem, tool = call.error, tools.get(call.name)
    if not problem and tool is None:
        problem = f"there is no tool {call.name!r}; the tools are: {', '.join(tools)}"
    if not problem and (schema := getattr(tool, "schema", None)):
        problem = mismatch(call.name, call.arguments, schema["function"].get("parameters") or {})
    if not problem:
        try:
            if hasattr(tool, "submit"):
                return tool.submit(**call.arguments)
            return _in_thread(tool, call.arguments, timeout_s)
        except Exception as error:  # arguments that the tool does not have or does not take
            problem = str(error)
    answer = Future()
    answer.set_result(ToolResult(f"Error: {problem}", "error", 0.0))
    return answer


def _in_thread(function, arguments: dict, timeout_s: float) -> Future:
    answer, start = Future(), time.monotonic()

    def settle(result: ToolResult) -> None:
        with suppress(InvalidStateError):  # the other one was first
            answer.set_result(result)

    def work() -> None:
        try:
            value, status = function(**arguments), "ok"
        except BaseException as error:  # sys.exit() too must not end the run
            value, status = f"{type(error).__name__}: {error}", "error"
        done = isinstance(value, ToolResult)
        settle(value if done else ToolResult(str(value), status, time.monotonic() - start))

    late = ToolResult(f"[timed out after {timeout_s:g} s]", "timeout", timeout_s)
    clock = threading.Timer(timeout_s, settle, (late,))
    for thread in (clock, threading.Thread(target=work)):
        thread.daemon = True
        thread.start()
    answer.add_done_callback(lambda _: clock.cancel())
    return answer
