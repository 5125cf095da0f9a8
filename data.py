"""Problems and tool-use trajectories, from the hub or from disk; and the command line of the scripts.

load_problems       problems with a chat prompt and a gold answer: a named test set (NAMED), a hub data set, a
                    .jsonl or .parquet file, a folder of them; columns are recognised row by row
load_conversations  tool-use trajectories for the cold start
parse_args, fail    one dataclass = one command line; bad input = one sentence

Left out: filters by difficulty, images, hub sets that need their own loading script. To copy it elsewhere: it
imports nothing else of this project; `datasets` is needed for the hub, `pyarrow` for parquet.
"""

import argparse
import ast
import base64
import dataclasses
import difflib
import hashlib
import inspect
import io
import json
import pickle
import re
import sys
import typing
import zlib
from pathlib import Path

EVAL = "hf://datasets/Gen-Verse/Open-AgentRL-Eval"
LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite"
NAMED = {  # name: arguments of datasets.load_dataset
    "aime2024": {"path": "parquet", "data_files": f"{EVAL}/aime2024/aime_2024_problems.parquet"},
    "aime2025": {"path": "parquet", "data_files": f"{EVAL}/aime2025/aime_2025_problems.parquet"},
    "gpqa": {"path": "parquet", "data_files": f"{EVAL}/gpqa-diamond/gpqa_diamond.parquet"},
    # what release v6 added, 175 problems, from the copy that brings the hidden tests
    "livecodebench": {"path": "json", "data_files": f"{LIVECODEBENCH}/test6.jsonl"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
    "math500": {"path": "HuggingFaceH4/MATH-500", "split": "test"},
}
PROBLEM_COLUMNS = ("problem", "Problem", "question", "Question", "question_content", "prompt")
ANSWER_COLUMNS = ("answer", "Answer", "ground_truth", "ground truth", "reward_model", "solution", "Solution")
ID_COLUMNS = ("id", "ID", "unique_id", "question_id", "Record ID")
# Wrong golds of some public copies: two pieces of the problem (letters and digits only), right answer, where.
KNOWN_WRONG = [("sin2pix", "cos3piy", "385", "AIME 2024 I, problem 12")]

OPTIONS = re.compile(r"^\W*A\b.*^\W*B\b", re.M | re.S)  # lines such as "A. one" and "(B) two"

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
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it counts problems and must be at least 1")
    family = name_or_path if name_or_path in NAMED else Path(name_or_path.split(":")[0]).stem.lower()
    return _mapped(name_or_path, lambda row, n: _to_problem(row, family, f"{family}-{n:02d}", tool), limit)


def build_prompt(text: str, final: str, tool: bool, opening: str = "") -> str:
    """Opening, problem, what the tool is for, and how to answer (final: a key of FINAL)."""
    closing = f"Once you are sure, {'stop calling the tool and ' if tool else ''}{FINAL[final]}"
    return "\n\n".join(part for part in (opening, text, TOOL if tool else "", closing) if part)


def _to_problem(row: dict, family: str, number: str, tool: bool) -> Problem:
    """One row: problem + answer, GPQA, LiveCodeBench, GSM8K, or a row of a reinforcement-learning set
    (data_source, prompt = chat messages, reward_model = {"ground_truth": ...})."""
    family = family if family in NAMED else str(row.get("family") or row.get("data_source") or family)
    text, before = next((row[c] for c in PROBLEM_COLUMNS if row.get(c)), None), []
    chat = _parsed(text)
    from_chat = isinstance(chat, list) and chat != [] and all(isinstance(message, dict) for message in chat)
    if from_chat:  # chat messages: the last one is the problem, what stands before it is kept
        before, text = chat[:-1], chat[-1].get("content")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"no problem; expected text in one of {', '.join(PROBLEM_COLUMNS)}")
    text = text.strip()
    if "Correct Answer" in row:  # GPQA as its authors publish it
        kind = final = "choice"
        text, gold = _lettered(text, row)
    elif isinstance(gold := _gold(row), dict):
        kind, final = "code", "function" if "fn_name" in gold else "stdin"
        text += _examples(row)
    elif re.fullmatch(r"\(?[A-J][).]?", gold) and ("domain" in row or OPTIONS.search(text)):
        kind = final = "choice"
        gold = gold.strip("().")
    else:
        kind, final = "math", "number" if from_chat else "math"
        gold = _checked(gold, text, family)
    domain = str(row.get("domain") or row.get("High-level domain") or "").lower()
    opening = OPENING[kind].format(domain=f"{domain} " if domain else "")
    if family in ("math_dapo", "mega-science"):  # these bring their own instructions
        content = build_prompt(text, final, tool=False)
    else:
        content = build_prompt(text, final, tool, opening)
    row_id = next((row[c] for c in ID_COLUMNS if row.get(c) is not None), number)
    return Problem([*before, {"role": "user", "content": content}], gold, kind, family, str(row_id))


def _gold(row: dict) -> str | dict:
    """The gold answer: text, or code tests {"inputs", "outputs", "fn_name"?}."""
    if "public_test_cases" in row:
        return _livecodebench_tests(row)
    if "inputs" in row and "outputs" in row:
        return _tests(row)
    value = next((row[c] for c in ANSWER_COLUMNS if row.get(c) not in (None, "")), None)
    if isinstance(_parsed(value), dict):  # reward_model
        value = _parsed(value).get("ground_truth", value)
    parsed = _parsed(value)
    if isinstance(parsed, dict):
        return _assert_tests(parsed) if "test_code" in parsed else _tests(parsed)
    if isinstance(parsed, list) and len(parsed) == 1 and isinstance(parsed[0], str):
        value = parsed[0]  # some sets wrap the answer: ["72"]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or not str(value).strip():
        raise ValueError(f"no answer ({value!r}); expected text in one of {', '.join(ANSWER_COLUMNS)}")
    text = str(value)
    if "####" in text:  # GSM8K
        text = text.rsplit("####", 1)[1].replace(",", "")
    elif "\\boxed{" in text:  # a worked solution: what its last box holds
        box = text.rsplit("\\boxed{", 1)[1]
        ends = (i for i in range(len(box)) if box[: i + 1].count("}") > box[: i + 1].count("{"))
        text = box[: next(ends, len(box))]
    return text.strip()


def _checked(gold: str, text: str, family: str) -> str:
    """AIME answers are integers from 0 to 999, which some copies write as 033; and a few golds are wrong."""
    if re.search(r"aime\D?(20)?\d\d", family.lower()):
        if not re.fullmatch(r"0*\d{1,3}", gold):
            raise ValueError(f"the answer {gold!r} is not one of AIME, an integer from 0 to 999")
        gold = str(int(gold))
    squeezed = re.sub(r"[^a-z0-9]", "", text.lower())
    for one, two, right, where in KNOWN_WRONG:
        if one in squeezed and two in squeezed and gold != right:
            print(f"{family}: {gold} is a known wrong gold of {where}; {right} is used", file=sys.stderr)
            gold = right
    return gold


def _lettered(question: str, row: dict) -> tuple[str, str]:
    """GPQA: options in an order that depends on the question's text alone, so every process sees the same."""
    right = str(row["Correct Answer"]).strip()
    options = [right, *(str(row.get(f"Incorrect Answer {i}")).strip() for i in (1, 2, 3))]
    options.sort(key=lambda option: hashlib.sha256(f"{question}\0{option}".encode()).digest())
    lines = [f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True)]
    return "\n".join([question, "", *lines]), "ABCD"[options.index(right)]


def _tests(found: dict) -> dict:
    """{"inputs", "outputs", "fn_name"?} from lists or their JSON text."""
    inputs, outputs = _parsed(found.get("inputs")), _parsed(found.get("outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError("code tests need inputs and outputs, two lists of one length that is not 0")
    name = {"fn_name": found["fn_name"]} if found.get("fn_name") else {}
    return {"inputs": inputs, "outputs": outputs, **name}


class NotRunnable(ValueError):
    """Code tests that are not pairs of input and output: nothing here could grade a program on them."""


class _OnlyText(pickle.Unpickler):
    """A pickle runs code only through the names it looks up; none is allowed here."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}: refused")


def _livecodebench_tests(row: dict) -> dict:
    """Public tests as JSON; private ones as JSON or as base64(zlib(pickle(JSON text)))."""
    private = row.get("private_test_cases") or "[]"
    try:
        if not private.lstrip().startswith("["):
            private = _OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
        tests = [*json.loads(row["public_test_cases"]), *json.loads(private)]
        name = json.loads(row.get("metadata") or "{}").get("func_name")
        found = {
            "inputs": [t["input"] for t in tests],
            "outputs": [t["output"] for t in tests],
            "fn_name": name,
        }
    except (pickle.UnpicklingError, zlib.error, ValueError, TypeError, KeyError, EOFError) as reason:
        raise ValueError(f"cannot read the LiveCodeBench tests ({reason})") from None
    return _tests(found)


def _examples(row: dict) -> str:
    """What a code prompt shows beside the statement: public tests, and the code to start from."""
    tests = _parsed(row.get("public_test_cases")) or []
    start = row.get("starter_code")
    start = f"\n\nStart from this code:\n```python\n{start}\n```" if start else ""
    return "".join(f"\n\nInput:\n{t['input']}\nOutput:\n{t['output']}" for t in tests) + start


def _assert_tests(found: dict) -> dict:
    """`assert candidate(a=[1, 2]) == 3` in test_code -> an input/output pair of the method `entry_point`."""
    inputs, outputs = [], []
    try:
        for node in ast.walk(ast.parse(found["test_code"])):
            if isinstance(node, ast.Assert):
                call, (equal,), (value,) = node.test.left, node.test.ops, node.test.comparators
                if not isinstance(equal, ast.Eq) or call.func.id != "candidate":
                    raise ValueError
                arguments = [ast.literal_eval(a) for a in [*call.args, *(k.value for k in call.keywords)]]
                inputs.append("\n".join(json.dumps(a) for a in arguments))
                outputs.append(json.dumps(ast.literal_eval(value)))
    except (SyntaxError, AttributeError, ValueError, TypeError):
        raise NotRunnable("its test_code is more than assert candidate(...) == value") from None
    return _tests({"inputs": inputs, "outputs": outputs, "fn_name": found["entry_point"].split(".")[-1]})


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
    messages = [_message(m, i) for i, m in enumerate(messages)]
    return {"messages": messages, "tools": tools and [_parsed(tool) for tool in tools]}


def _message(message: dict, i: int) -> dict:
    if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"message {i} has no role out of system, user, assistant, tool")
    message = {**message, "content": message.get("content") or ""}
    if not isinstance(message["content"], str):
        raise ValueError(f"the content of message {i} is not text")
    calls = []
    for call in _parsed(message.pop("tool_calls", None)) or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parsed(function.get("arguments"))
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError(f"a tool call of message {i} needs a name, and arguments that are a JSON object")
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _parsed(value):
    """JSON text of a list or an object -> that; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


def _mapped(name_or_path: str, to_item, limit: int | None = None) -> list:
    """to_item(row, its number) of the first rows; an error names the row and its columns."""
    items, left_out = [], []
    for n, (where, row) in enumerate(_rows(name_or_path), 1):
        try:
            items.append(to_item(row, n))
        except NotRunnable as reason:
            left_out.append(f"{where}: {reason}")
        except ValueError as reason:
            raise ValueError(f"{where}: {reason}; columns found: {', '.join(row)}") from None
        if len(items) == limit:
            break
    if left_out:
        print(f"{name_or_path}: {len(left_out)} rows left out; the first is {left_out[0]}", file=sys.stderr)
    if not items:
        raise ValueError(f"{name_or_path} holds no usable row")
    return items


def _rows(name_or_path: str):
    """Yields (where it stands, {column: value}) of a named set, a hub data set, a file or a folder."""
    path, kinds = Path(name_or_path).expanduser(), (".jsonl", ".parquet")
    if name_or_path in NAMED:
        yield from _hub_rows(name_or_path, **NAMED[name_or_path])
    elif path.exists():
        files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in kinds)
        if not files or files[0].suffix not in kinds:
            raise ValueError(f"{name_or_path} is neither a .jsonl or .parquet file nor a folder of them")
        for file in files:
            yield from _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", name_or_path) and path.suffix not in kinds:
        repo, config, split = (name_or_path.split(":") + [None, None])[:3]
        yield from _hub_rows(name_or_path, repo, name=config, split=split)
    else:
        near = difflib.get_close_matches(name_or_path, NAMED, n=1)
        hint = f"did you mean {near[0]}" if near else f"named sets are {', '.join(NAMED)}"
        raise ValueError(f"no file or folder {name_or_path!r}; {hint}, or owner/name for a set on the hub?")


def _jsonl_rows(file: Path):
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for n, line in enumerate(lines, 1):
            if line.strip():
                try:
                    line.encode()  # bytes that are not UTF-8 fail here, not in the tokenizer
                    row = dict(json.loads(line))
                except (ValueError, TypeError) as reason:
                    raise ValueError(f"{file}, row {n}: not a JSON object in UTF-8 ({reason})") from None
                yield f"{file}, row {n}", row


def _parquet_rows(file: Path):
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as reason:
        raise ValueError(f"{file} is not a readable parquet file ({reason})") from None
    yield from ((f"{file}, row {n}", _without_none(row)) for n, row in enumerate(rows, 1))


def _hub_rows(shown: str, path: str, **arguments):
    import datasets

    try:
        found = datasets.load_dataset(path, **arguments)
    except Exception as reason:  # a dozen types: offline, gated, no such name, configuration missing
        text = " ".join(str(reason).split())[:200]
        raise ValueError(f"cannot load {shown} from the hub ({text}); give a file or a folder") from None
    if isinstance(found, dict) and len(found) > 1:
        raise ValueError(f"{shown} has the splits {', '.join(found)}; choose by owner/name:config:split")
    found = next(iter(found.values())) if isinstance(found, dict) else found
    yield from ((f"{shown}, row {n}", _without_none(row)) for n, row in enumerate(found, 1))


def _without_none(value):
    """A parquet struct has every key that any row has, None where a row had none: drop those, everywhere."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def parse_args(config_class, argv: list[str] | None = None, presets: dict[str, dict] | None = None):
    """An instance of the dataclass from the command line; an option outranks the preset, that the default.

    A field is one line, `name: type = default  # unit, meaning`, and an option of its own name, with `_` or
    `-`; the comment is its help; a bool is --tool / --no-tool; `none` is None where the type allows it.
    An unknown option or a value of the wrong type ends the program with one sentence and exit code 2.
    """
    kinds, fields = typing.get_type_hints(config_class), dataclasses.fields(config_class)
    comment = dict(re.findall(r"^    (\w+)\s*:[^#\n]*#\s*(.*)$", inspect.getsource(config_class), re.M))
    parser = _Parser(
        description=inspect.getmodule(config_class).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # only what was typed comes back
    )
    for f in fields:
        default = "required" if f.default is dataclasses.MISSING else f"default {f.default}"
        names = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"])
        text = f"{comment.get(f.name, '')} [{default}]".replace("%", "%%").strip()
        if kinds[f.name] is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = kinds[f.name]
            shown = kind.__name__ if isinstance(kind, type) else str(kind)
            parser.add_argument(*names, type=_reader(kind, shown), metavar=shown.upper(), help=text)
    if presets and "preset" not in kinds:
        parser.add_argument("--preset", metavar="NAME", help=f"settings by name: {', '.join(presets)}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        option = unknown[0].split("=")[0]
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(option, known, n=1)
        parser.error(f"unknown option {option!r}; " + (f"did you mean {near[0]}?" if near else "see --help"))
    given = vars(given)
    name = given.get("preset", getattr(config_class, "preset", None))
    if presets and name and name not in presets:
        parser.error(f"there is no preset {name!r}; choose from {', '.join(presets)}")
    values = {**(presets or {}).get(name, {}), **given}
    if "preset" not in kinds:
        values.pop("preset", None)
    for f in fields:
        if f.default is dataclasses.MISSING and f.name not in values:
            parser.error(f"--{f.name} is required: {comment.get(f.name, 'it has no default')}")
    return config_class(**values)


def fail(sentence: str) -> typing.NoReturn:
    """End the program for a bad input: one sentence, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        fail(message)


def _reader(kind, shown: str):
    """text -> value of the field's type, or of the first that fits in `int | None`"""
    kinds = typing.get_args(kind) or (kind,)

    def read(text: str):
        if type(None) in kinds and text.lower() == "none":
            return None
        for t in kinds:
            try:
                return t(text)
            except (ValueError, TypeError):  # TypeError: NoneType takes no text
                pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {shown}")

    return read
