"""Problems and tool-use trajectories, from the hub or from disk.

    python data.py --filter | --collect | --stitch ...    # difficulty and trajectories: see collect.py

Read as they are published, by hub name or from a file: Gen-Verse/Open-AgentRL-30K, -SFT-3K (trajectories) and
-Eval, BytedTsinghua-SIA/DAPO-Math-17k, openai/gsm8k:main:train, MATH (EleutherAI/hendrycks_math:algebra:train
and others with its columns), GPQA, LiveCodeBench. Left out: images, hub sets that need a loading script. To
copy it elsewhere: reward.py, and `pip install datasets` for the hub and parquet.
"""

import ast
import base64
import dataclasses
import difflib
import hashlib
import io
import json
import pickle
import re
import sys
import zlib
from pathlib import Path

from reward import call_arguments, extract_boxed

EVAL = "hf://datasets/Gen-Verse/Open-AgentRL-Eval"
LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite"  # this copy brings the hidden tests
NAMED = {  # name: arguments of datasets.load_dataset
    "aime2024": {"path": "parquet", "data_files": f"{EVAL}/aime2024/aime_2024_problems.parquet"},
    "aime2025": {"path": "parquet", "data_files": f"{EVAL}/aime2025/aime_2025_problems.parquet"},
    "gpqa": {"path": "parquet", "data_files": f"{EVAL}/gpqa-diamond/gpqa_diamond.parquet"},
    "livecodebench": {"path": "json", "data_files": f"{LIVECODEBENCH}/test6.jsonl"},  # 175 new in v6
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
    "math500": {"path": "HuggingFaceH4/MATH-500", "split": "test"},
}
PROBLEM = ("problem", "question", "question_content", "prompt")  # columns, small letters, _ for blanks
ANSWER = ("answer", "ground_truth", "reward_model", "solution")
ID = ("id", "unique_id", "question_id", "record_id")

OPENING = {
    "math": "Solve this problem step by step.",
    "choice": "Answer this {domain}question; reason step by step.",
    "code": "Write a Python program that solves this task.",
}
TOOL = """You have a Python tool: use it to calculate exactly and to check what you found.
**First analyse the problem and settle on a strategy; only then use the tool.**"""
FINAL = {
    "math": "put the final answer in \\boxed{}.",
    "number": "put the final answer in \\boxed{}, as a bare number without units.",
    "choice": "put the capital letter of the right option, and nothing else, in \\boxed{}.",
    "stdin": "give a whole program, reading standard input and printing, in a block starting with ```python.",
    "function": "give the whole code, with the names as they are given, in a block starting with ```python.",
}


@dataclasses.dataclass
class Problem:
    messages: list[dict]  # chat prompt: [{"role": "user", "content": ...}]
    answer: str | dict  # gold: text; for code {"inputs": [...], "outputs": [...], "fn_name"?: str}
    kind: str  # "math" | "choice" | "code"
    family: str  # "aime2024", "gsm8k", ...
    id: str


def load_problems(name_or_path: str, tool: bool = True, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of a named set, a hub set (owner/name[:config[:split]]), a file or a folder.

    tool    False: the prompt does not mention the Python tool
    raises  ValueError, one sentence: nothing there, or a row (named) in which problem or answer is missing
    """
    return [problem for _, problem in load_rows(name_or_path, tool, limit)]


def load_rows(name_or_path: str, tool: bool = True, limit: int | None = None) -> list[tuple[dict, Problem]]:
    """load_problems, each with the row that it was made of. A problem counts once: DAPO-Math-17k on the hub
    holds each of its own a hundred times."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it counts problems and must be at least 1")
    family, seen = Path(name_or_path.split(":")[0]).stem.lower(), set()

    def to_pair(row: dict, n: int):
        problem = _to_problem(row, n, family, tool)
        key = hash((str(problem.messages), str(problem.answer)))
        if key in seen:
            return None
        seen.add(key)
        return row, problem

    return _mapped(name_or_path, to_pair, limit)


def _to_problem(row: dict, n: int, family: str, tool: bool) -> Problem:
    """A row of any set; those for reinforcement learning have chat messages as prompt, and reward_model."""
    row = {column.lower().replace(" ", "_"): value for column, value in row.items()}
    name = next((row[c] for c in ID if row.get(c) is not None), f"{family}-{n:02d}")
    family = family if family in NAMED else str(row.get("family") or row.get("data_source") or family)
    before, text, form = [], next((row[c] for c in PROBLEM if row.get(c)), None), "math"
    match _parsed(text):
        case [*before, {"content": text}]:  # chat messages: what stands before the problem is kept
            form = "number"
    if not isinstance(text, str) or not (text := text.strip()):
        raise ValueError(f"no problem; expected text in one of {', '.join(PROBLEM)}")
    if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in before):
        raise ValueError("a message before the problem has no role or no content")
    options = [str(row[c]).strip() for c in row if re.fullmatch("(in)?correct_answer(_[123])?", c)]
    if len(options) == 4:  # GPQA: in an order that is the same in every process
        options.sort(key=lambda option: hashlib.sha256(f"{text}\0{option}".encode()).digest())
        gold = "ABCD"[options.index(str(row["correct_answer"]).strip())]
        text += "\n\n" + "\n".join(map("{}) {}".format, "ABCD", options))
    else:
        gold = _gold(row, text, family)
    domain = row.get("domain") or row.get("high-level_domain")
    if isinstance(gold, dict):
        kind, final = "code", "function" if "fn_name" in gold else "stdin"
        for test in _parsed(row.get("public_test_cases")) or []:
            text += f"\n\nInput:\n{test['input']}\nOutput:\n{test['output']}"
        if row.get("starter_code"):
            text += f"\n\nStart from this code:\n```python\n{row['starter_code']}\n```"
    elif re.fullmatch(r"\(?[A-J][).]?", gold) and (domain or re.search(r"(?ms)^\W*A\b.*^\W*B\b", text)):
        kind, final, gold = "choice", "choice", gold.strip("().")
    else:
        kind, final = "math", form
    opening = OPENING[kind].format(domain=f"{domain} ".lower() if domain else "")
    if family in ("math_dapo", "mega-science"):  # these bring their own instructions
        opening, tool = "", False
    closing = f"Once you are sure, {'stop calling the tool and ' if tool else ''}{FINAL[final]}"
    content = "\n\n".join(part for part in (opening, text, TOOL if tool else "", closing) if part)
    content = text if row.get("as_is") else content
    return Problem([*before, {"role": "user", "content": content}], gold, kind, family, str(name))


def _gold(row: dict, problem: str, family: str) -> str | dict:
    """The gold answer: text, or code tests {"inputs", "outputs", "fn_name"?}."""
    if "public_test_cases" in row or {"inputs", "outputs"} <= row.keys():
        return _tests(row)
    value = next((row[c] for c in ANSWER if row.get(c) not in (None, "")), None)
    if isinstance(outer := _parsed(value), dict):  # reward_model
        value = outer.get("ground_truth", value)
    if isinstance(parsed := _parsed(value), dict):
        return _tests(parsed)
    if isinstance(parsed, list) and len(parsed) == 1 and isinstance(parsed[0], str):
        value = parsed[0]  # some sets wrap the answer: ["72"]
    if type(value) not in (str, int, float) or not str(value).strip():  # bool is an int, but no answer
        raise ValueError(f"no answer ({value!r}); expected text in one of {', '.join(ANSWER)}")
    gold = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if "####" in gold:  # GSM8K
        gold = gold.rsplit("####", 1)[1].replace(",", "").strip()
    elif "\\boxed" in gold:  # a worked solution
        gold = extract_boxed(gold) or gold
    if re.search(r"aime\D?(20)?\d\d", family.lower()):  # integers from 0 to 999, 033 in some copies
        if not re.fullmatch(r"0*\d{1,3}", gold):
            raise ValueError(f"the answer {gold!r} is not one of AIME, an integer from 0 to 999")
        gold = str(int(gold))
    if gold == "384" and re.search(r"(?is)sin\W*2\W*pi\W*x.*cos\W*3\W*pi\W*y", problem):
        print(f"{gold} is a known wrong gold of AIME 2024 I, problem 12; 385 is used", file=sys.stderr)
        gold = "385"
    return gold


class _OnlyText(pickle.Unpickler):
    def find_class(self, module: str, name: str):  # a pickle runs code only through names it looks up
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}: refused")


def _tests(found: dict) -> dict:
    """{"inputs", "outputs", "fn_name"?} from lists, their JSON text, LiveCodeBench's columns, or asserts."""
    inputs, outputs, name = _parsed(found.get("inputs")), _parsed(found.get("outputs")), found.get("fn_name")
    if "public_test_cases" in found:  # JSON; the hidden ones too, or base64(zlib(pickle(JSON)))
        hidden = found.get("private_test_cases") or "[]"
        try:
            if not hidden.lstrip().startswith("["):
                hidden = _OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(hidden)))).load()
            tests = [*json.loads(found["public_test_cases"]), *json.loads(hidden)]
            inputs, outputs = [t["input"] for t in tests], [t["output"] for t in tests]
            name = json.loads(found.get("metadata") or "{}").get("func_name")
        except Exception as reason:  # base64, zlib and pickle raise a dozen types
            raise ValueError(f"cannot read the LiveCodeBench tests ({reason})") from None
    elif "test_code" in found:  # assert candidate(a=[1, 2]) == 3, for the method `entry_point`
        inputs, outputs, name, order = [], [], found["entry_point"].split(".")[-1], set()
        try:
            for node in ast.walk(ast.parse(found["test_code"])):
                match node:
                    case ast.Assert(ast.Compare(ast.Call(ast.Name("candidate"), a, named), [ast.Eq()], [b])):
                        arguments = [ast.literal_eval(x) for x in [*a, *(k.value for k in named)]]
                        inputs.append("\n".join(map(json.dumps, arguments)))
                        outputs.append(json.dumps(ast.literal_eval(b)))
                        order.add(tuple(k.arg for k in named))
                    case ast.Assert():
                        raise ValueError
            if len(order) > 1:  # by position they would reach other parameters
                raise ValueError
        except (SyntaxError, ValueError, TypeError):
            text = "its test_code is more than assert candidate(...) == value, of arguments in one order"
            raise NotImplementedError(text) from None
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError("code tests need inputs and outputs, two lists of one length that is not 0")
    try:
        for given in inputs if name else []:
            call_arguments(given)
    except ValueError as reason:  # in the middle of training it would end the run
        raise NotImplementedError(str(reason)) from None
    return {"inputs": inputs, "outputs": outputs} | ({"fn_name": name} if name else {})


def load_conversations(name_or_path: str) -> list[dict]:
    """Tool-use trajectories: [{"messages": [{"role", "content", "tool_calls"?}], "tools": [schema] | None}].

    Lists and objects may be JSON text (messages, tools, tool_calls, arguments); arguments come out as a dict.
    raises  ValueError, one sentence that names file, row and what was found
    """
    return _mapped(name_or_path, _to_conversation)


def _to_conversation(row: dict, n: int) -> dict:
    messages, tools = _parsed(row.get("messages")), _parsed(row.get("tools")) or None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages; expected a list of {role, content}, or its JSON text")
    if not isinstance(tools or [], list):
        raise ValueError("tools is not a list of JSON schemas")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or m.get("role") not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"message {i} has no role out of system, user, assistant, tool")
        messages[i] = m = {**m, "content": m.get("content") or ""}
        if not isinstance(m["content"], str):
            raise ValueError(f"the content of message {i} is not text")
        for call in _parsed(m.pop("tool_calls", None)) or []:
            call = call.get("function", call) if isinstance(call, dict) else {}
            name, arguments = call.get("name"), _parsed(call.get("arguments"))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError(f"a tool call of message {i} needs a name, and arguments as a JSON object")
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            m.setdefault("tool_calls", []).append(call)
    return {"messages": messages, "tools": tools and [_parsed(tool) for tool in tools]}


def _parsed(value):
    """JSON text of a list or an object -> that; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    except ValueError:
        return value


def _mapped(name_or_path: str, to_item, limit: int | None = None) -> list:
    """to_item(row, its number) of the first rows; an error names the row and its columns."""
    items, left_out, repeated = [], [], 0
    for n, (where, row) in enumerate(_rows(name_or_path), 1):
        try:
            item = to_item(row, n)
            items += [item] if item else []
            repeated += not item
        except NotImplementedError as reason:  # code tests on which nothing here could grade a program
            left_out.append(f"{where}: {reason}")
        except (ValueError, KeyError, TypeError, AttributeError) as reason:
            reason = reason if type(reason) is ValueError else f"malformed, {reason!r}"
            raise ValueError(f"{where}: {reason}; columns found: {', '.join(row)}") from None
        if len(items) == limit:
            break
    if repeated:
        print(f"{name_or_path}: {repeated} rows left out that repeat a problem", file=sys.stderr)
    if left_out:
        print(f"{name_or_path}: {len(left_out)} rows left out; the first is {left_out[0]}", file=sys.stderr)
    if not items:
        raise ValueError(f"{name_or_path} holds no usable row")
    return items


def _rows(name_or_path: str):
    """Yields (where it stands, {column: value}) of a named set, a hub data set, a file or a folder."""
    path, kinds = Path(name_or_path).expanduser(), (".jsonl", ".parquet")
    like_hub = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", name_or_path) and path.suffix not in kinds
    if name_or_path in NAMED or (like_hub and not path.exists()):
        hub = NAMED.get(name_or_path) or dict(zip(("path", "name", "split"), name_or_path.split(":")))
        tables = {name_or_path: _table(name_or_path, hub)}
    elif path.exists():
        files = sorted(f for f in path.iterdir() if f.suffix in kinds) if path.is_dir() else [path]
        if not files or files[0].suffix not in kinds:
            raise ValueError(f"{name_or_path} is neither a .jsonl or .parquet file nor a folder of them")
        tables = {f: _table(f) if f.suffix == ".parquet" else f.read_bytes().splitlines() for f in files}
    else:
        near = difflib.get_close_matches(name_or_path, NAMED, n=1)
        hint = f"did you mean {near[0]}" if near else f"named sets are {', '.join(NAMED)}"
        raise ValueError(f"no file or folder {name_or_path!r}; {hint}, or owner/name for a set on the hub?")
    for table, rows in tables.items():
        for where, row in ((f"{table}, row {n}", row) for n, row in enumerate(rows, 1) if row):
            try:  # a line is read as bytes: what is not UTF-8 fails here, not in the tokenizer
                yield where, row if isinstance(row, dict) else dict(**json.loads(row))
            except (ValueError, TypeError) as reason:
                raise ValueError(f"{where}: not a JSON object in UTF-8 ({reason})") from None


def _table(where: str | Path, hub: dict | None = None):
    import datasets
    import pyarrow.parquet

    try:
        table = datasets.load_dataset(**hub) if hub else pyarrow.parquet.read_table(where).to_pylist()
    except Exception as reason:  # a dozen types: offline, gated, no such name, configuration missing
        what = f"cannot load {where} from the hub" if hub else f"{where} is not a readable parquet file"
        raise ValueError(f"{what} ({' '.join(str(reason).split())[:200]}); give another --data") from None
    if isinstance(table, dict):
        if len(table) > 1:
            raise ValueError(f"{where} has the splits {', '.join(table)}; choose by owner/name:config:split")
        (table,) = table.values()
    for row in table:  # a struct has every key that any row has, None where this one had none: drop those
        text = json.dumps(row, default=str)
        yield json.loads(text, object_hook=lambda found: {k: v for k, v in found.items() if v is not None})


if __name__ == "__main__":
    import collect  # it stands above this file: only the command reaches up

    collect.run_script(collect.main, sys.argv[1:])
