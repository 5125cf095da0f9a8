"""Problems and trajectories: what comes out of a row, and what a bad row says."""

import base64
import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import data
from data import load_conversations, load_problems

ROOT = Path(__file__).resolve().parent.parent


def jsonl(folder: Path, rows: list, name: str = "set.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def parquet(folder: Path, rows: list, name: str = "set.parquet") -> str:
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, folder / name)
    return str(folder / name)


def one(folder: Path, row: dict, name: str = "set.jsonl", **options):
    (problem,) = load_problems(jsonl(folder, [row], name), **options)
    return problem


# ---- columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"problem": "p", "answer": "7"}, "7"),
        ({"question": "p", "answer": 7}, "7"),
        ({"Problem": "p", "Answer": 7.0, "Solution": "long"}, "7"),
        ({"prompt": "p", "solution": "So it is $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"problem": "p", "solution": "\\boxed{1} but then \\boxed{f(x)=\\{1\\}}"}, "f(x)=\\{1\\}"),
        ({"problem": "p", "ground truth": "7"}, "7"),
        ({"problem": "p", "ground_truth": ' ["7"] '}, "7"),
        ({"problem": "p", "reward_model": '{"style": "rule", "ground_truth": "7"}'}, "7"),
        ({"problem": "p", "reward_model": {"ground_truth": 7}}, "7"),
        ({"question": "p", "answer": "5 + 2 = <<5+2=7>>7\n#### 1,007"}, "1007"),
        ({"problem": "p", "answer": "[2, 5)"}, "[2, 5)"),
        ({"problem": "p", "answer": "[2, 5]"}, "[2, 5]"),
        ({"problem": "p", "answer": "\\{1, 2\\}"}, "\\{1, 2\\}"),
        ({"problem": "[asy] draw((0,0)) [/asy] p", "answer": 0}, "0"),
    ],
)
def test_the_gold_answer_is_found_in_the_usual_columns(tmp_path, row, answer):
    """Would catch a gold taken from the wrong column, which no response can ever match."""
    problem = one(tmp_path, row)
    assert (problem.answer, problem.kind, problem.family, problem.id) == (answer, "math", "set", "set-01")
    assert problem.messages[-1]["content"].count("p") >= 1


def test_a_row_of_a_reinforcement_learning_set_is_read_by_its_own_source(tmp_path):
    """Open-AgentRL chose one prompt for a whole file by its first row, and so wrong words for a mix."""
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": "What is 6*7?"}], "ability": "math",
         "reward_model": {"ground_truth": "42", "style": "rule"}, "extra_info": {"index": 3}}
        for source in ("math_dapo", "skywork")
    ]  # fmt: skip
    rows.append(
        {"data_source": "skywork_code", "prompt": [{"role": "user", "content": "Add two numbers."}],
         "reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}}
    )  # fmt: skip
    dapo, skywork, code = load_problems(jsonl(tmp_path, rows))
    assert [p.family for p in (dapo, skywork, code)] == ["math_dapo", "skywork", "skywork_code"]
    assert [p.kind for p in (dapo, skywork, code)] == ["math", "math", "code"]
    assert code.answer == {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    assert "tool" not in dapo.messages[0]["content"] and "Python tool" in skywork.messages[0]["content"]
    assert all("without units" in p.messages[0]["content"] for p in (dapo, skywork))


def test_messages_before_the_problem_are_kept(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6*7?"}]
    problem = one(tmp_path, {"data_source": "x", "prompt": chat, "reward_model": {"ground_truth": "42"}})
    assert problem.messages[0] == chat[0] and "What is 6*7?" in problem.messages[1]["content"]


def test_parquet_jsonl_and_a_folder_of_both_give_the_same_problems(tmp_path):
    """A parquet struct has every key of every row; a fn_name of None is not a function to call."""
    tests = {"inputs": ["1"], "outputs": ["1"]}
    rows = [{"problem": "p", "reward_model": {"ground_truth": t}} for t in ({**tests, "fn_name": "f"}, tests)]
    text, table = load_problems(jsonl(tmp_path, rows)), load_problems(parquet(tmp_path, rows))
    assert text == table and text[1].answer == tests
    jsonl(tmp_path, [{"problem": "q", "answer": "1"}], "third.jsonl")
    assert len(load_problems(str(tmp_path))) == 3 and len(load_problems(str(tmp_path), limit=2)) == 2


DAPO = {  # as BytedTsinghua-SIA/DAPO-Math-17k is published; in Open-AgentRL-30K the same columns
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve the following math problem step by step.\n\nWhat is 6*7?"
                "\n\nRemember to put your answer on its own line after \"Answer:\"."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}  # fmt: skip
AGENT_RL = [
    DAPO,
    {"data_source": "mega-science", "ability": "science", "extra_info": {"index": "1"},
     "prompt": [{"role": "user", "content": "What is the mass of 2 mol of water in g?"}],
     "reward_model": {"ground_truth": "36", "style": "rule"}},
    {"data_source": "skywork_math", "ability": "math", "extra_info": {"index": "2"},
     "prompt": [{"role": "user", "content": "Find 1/2 + 1/3."}],
     "reward_model": {"ground_truth": '["\\\\frac{5}{6}"]', "style": "rule"}},
    {"data_source": "skywork_code", "ability": "code", "extra_info": {"index": "3"},
     "prompt": [{"role": "user", "content": "Add two numbers."}],
     "reward_model": {"ground_truth": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}', "style": "rule"}},
]  # fmt: skip


def test_the_sets_of_reinforcement_learning_are_read_as_they_are_published(tmp_path):
    """Columns of Open-AgentRL-30K in one parquet file, and the prompts that the paper gives each part: sets
    with instructions of their own keep them, the others get the words about the tool."""
    dapo, science, skywork, code = load_problems(parquet(tmp_path, AGENT_RL))
    assert [p.answer for p in (dapo, science, skywork)] == ["42", "36", "\\frac{5}{6}"]
    assert code.kind == "code" and code.answer == {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    for own in (dapo, science):
        assert "tool" not in own.messages[0]["content"] and "bare number" in own.messages[0]["content"]
    assert dapo.messages[0]["content"].startswith(DAPO["prompt"][0]["content"])
    assert "Python tool" in skywork.messages[0]["content"] and "bare number" in skywork.messages[0]["content"]
    assert "Python tool" in code.messages[0]["content"] and "```python" in code.messages[0]["content"]


def test_a_problem_that_a_set_repeats_counts_once(tmp_path, capsys):
    """DAPO-Math-17k on the hub holds its 17,917 rows a hundred times (verl-project/verl#3065): an epoch would
    be a hundred. The same words with another gold are another problem."""
    other = {**DAPO, "reward_model": {"ground_truth": "43"}}
    assert [p.answer for p in load_problems(parquet(tmp_path, [DAPO] * 5 + [other] + [DAPO] * 3))] == [
        "42",
        "43",
    ]
    assert "7 rows left out that repeat a problem" in capsys.readouterr().err
    assert len(load_problems(parquet(tmp_path, [DAPO] * 5 + [other]), limit=2)) == 2


def test_gsm8k_and_math_are_read_as_they_are_published(tmp_path):
    """GSM8K: question, answer with annotations; MATH: problem, level, type, solution with the last box."""
    gsm = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\nSo <<24*50=1200>>1,200.\n#### 1,200"}
    math = {"problem": "Find $f(1)$.", "level": "Level 5", "type": "Algebra",
            "solution": "With \\boxed{x} as above, $f(1)=\\boxed{\\frac{1}{2}}$."}  # fmt: skip
    assert one(tmp_path, gsm).answer == "1200" and one(tmp_path, math).answer == "\\frac{1}{2}"


# ---- AIME --------------------------------------------------------------------------------------------------


def test_aime_answers_lose_leading_zeros(tmp_path):
    """The usual hub copy of AIME 2024 writes 033; an exact comparison fails the right answer 33."""
    for gold, answer in (("033", "33"), ("000", "0"), (70, "70"), ("809", "809")):
        problem = one(tmp_path, {"problem": "p", "answer": gold}, "aime_2024_problems.jsonl")
        assert problem.answer == answer
    with pytest.raises(ValueError, match="row 1: the answer '1000' is not one of AIME"):
        one(tmp_path, {"problem": "p", "answer": "1000"}, "aime2025.jsonl")


def test_the_known_wrong_gold_of_aime_2024_is_replaced_and_told(tmp_path, capsys):
    """NeMo-Skills issue 118: copies with 384 where 385 is right (counted numerically)."""
    text = "Find the number of intersections of $y=4 g(f(\\sin (2 \\pi x)))$ and $x=4 g(f(\\cos(3\\pi y)))$."
    assert one(tmp_path, {"problem": text, "answer": "384"}, "aime2024.jsonl").answer == "385"
    assert "384 is a known wrong gold of AIME 2024 I, problem 12; 385 is used" in capsys.readouterr().err
    for gold in ("385", "12"):  # 12: of another problem, built like it
        assert one(tmp_path, {"problem": text, "answer": gold}, "mine.jsonl").answer == gold
    assert not capsys.readouterr().err


# ---- multiple choice ---------------------------------------------------------------------------------------

GPQA = {
    "Question": "Which is a noble gas?", "Correct Answer": "argon ", "Incorrect Answer 1": "iron",
    "Incorrect Answer 2": "zinc", "Incorrect Answer 3": "lead", "High-level domain": "Chemistry",
}  # fmt: skip


def test_option_order_is_the_same_in_every_process(tmp_path):
    """evalscope issue 1583: a shuffle by hash() gives each worker its own order, and its own gold letters."""
    path = jsonl(tmp_path, [{**GPQA, "Question": f"{GPQA['Question']} ({i})"} for i in range(8)])
    here = [(p.messages[0]["content"], p.answer) for p in load_problems(path)]
    code = """import sys, json, data
print(json.dumps([(p.messages[0]['content'], p.answer) for p in data.load_problems(sys.argv[1])]))"""
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code, path], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert [tuple(pair) for pair in json.loads(run.stdout)] == here
    assert len({gold for _, gold in here}) > 1  # not always the same letter
    assert all(f"{gold}) argon\n" in content for content, gold in here)


def test_a_letter_is_a_choice_only_beside_options(tmp_path):
    """A math problem whose answer is the letter C has no options, and must go to the math grader."""
    listed = {"problem": "Which?\nA. one\nB. two\nC. three", "solution": "C", "domain": "Physics"}
    assert one(tmp_path, listed).kind == "choice" and one(tmp_path, listed).answer == "C"
    assert one(tmp_path, {"problem": "Name the point.", "answer": "C"}).kind == "math"


# ---- code --------------------------------------------------------------------------------------------------


def livecodebench(private, name: str | None = None) -> dict:
    return {
        "question_title": "t", "question_content": "Double it.", "question_id": "abc", "starter_code": "",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        "private_test_cases": private, "metadata": json.dumps({"func_name": name} if name else {}),
    }  # fmt: skip


def packed(value) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench_rows_bring_public_and_hidden_tests(tmp_path):
    hidden = json.dumps([{"input": "4\n", "output": "8\n", "testtype": "stdin"}])
    for private in (hidden, packed(hidden)):
        problem = one(tmp_path, livecodebench(private))
        assert problem.answer == {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}
        assert problem.kind == "code" and problem.id == "abc"
        content = problem.messages[0]["content"]
        assert "Input:\n1\n" in content and "8" not in content, "a hidden test must not reach the prompt"
    row = {**livecodebench(hidden, "double"), "starter_code": "class Solution:\n    def double(self, n):"}
    problem = one(tmp_path, row)
    assert problem.answer["fn_name"] == "double" and row["starter_code"] in problem.messages[0]["content"]


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path, monkeypatch):
    """The hidden tests of LiveCodeBench are pickles; the usual pickle.loads runs what the file says."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="asks for (posix|nt).system: refused"):
        one(tmp_path, livecodebench(packed(Attack())))
    assert not Path("attacked").exists()
    for value in (7, {"a": 1}, "not json", b"[]"[:1]):
        with pytest.raises(ValueError, match="cannot read the LiveCodeBench tests"):
            one(tmp_path, livecodebench(packed(value)))
    with pytest.raises(ValueError, match="cannot read the LiveCodeBench tests"):
        one(tmp_path, livecodebench("AAAA"))


def test_assert_tests_become_pairs_and_others_are_left_out_aloud(tmp_path, capsys):
    """Part of the code rows test by asserts; a row that nobody can grade would earn 0 for ever."""
    tests = "def check(candidate):\n    assert candidate(nums = [1, 2], k = 3) == [True, None]\n"
    truth = {"test_code": tests, "entry_point": "Solution().pick", "import_prefix": ""}
    others = ("assert is_same(candidate(root([1])), [1])", "assert candidate(root([1])) == [1]", "assert (")
    others += (tests + "    assert candidate(k = 3, nums = [1]) == 1",)  # by position other parameters
    truths = [truth, *({**truth, "test_code": other} for other in others)]
    rows = [{"problem": "p", "reward_model": {"ground_truth": json.dumps(t)}} for t in truths]
    (problem,) = load_problems(jsonl(tmp_path, rows))
    assert problem.answer == {"inputs": ["[1, 2]\n3"], "outputs": ["[true, null]"], "fn_name": "pick"}
    assert "4 rows left out; the first is" in capsys.readouterr().err


def test_a_call_whose_arguments_cannot_be_read_is_left_out_before_the_run(tmp_path, capsys):
    """Read only when a program is graded, one such row ends a run after hours, and every continuation of it,
    which draws the same problem, as well."""
    givens = ("[1, 2]\n3", "1 2 oops", {"a": 1}, 5, [[1, 2], 3])
    tests = [{"inputs": [given], "outputs": ["1"], "fn_name": "pick"} for given in givens]
    rows = [{"problem": f"p{i}", "answer": json.dumps(t)} for i, t in enumerate(tests)]
    kept = [p.answer["inputs"][0] for p in load_problems(jsonl(tmp_path, rows))]
    assert kept == ["[1, 2]\n3", [[1, 2], 3]]
    assert "3 rows left out; the first is" in capsys.readouterr().err


@pytest.mark.parametrize("tests", [{"inputs": [], "outputs": []}, {"inputs": ["1", "2"], "outputs": ["1"]}])
def test_code_without_matching_tests_is_an_error(tmp_path, tests):
    """No tests at all would make every program right, or none."""
    with pytest.raises(ValueError, match="row 1: code tests need inputs and outputs"):
        one(tmp_path, {"problem": "p", **tests})


# ---- prompts -----------------------------------------------------------------------------------------------

WITH_TOOL = """You have a Python tool: use it to calculate exactly and to check what you found.
**First analyse the problem and settle on a strategy; only then use the tool.**

Once you are sure, stop calling the tool and """

GOLDEN = {  # kind: (row, opening and problem, how to answer)
    "math": (
        {"problem": "What is 6*7?", "answer": "42"},
        "Solve this problem step by step.\n\nWhat is 6*7?\n\n",
        "put the final answer in \\boxed{}.",
    ),
    "choice": (
        {"problem": "Which?\nA. one\nB. two", "solution": "B", "domain": "Physics"},
        "Answer this physics question; reason step by step.\n\nWhich?\nA. one\nB. two\n\n",
        "put the capital letter of the right option, and nothing else, in \\boxed{}.",
    ),
    "code": (
        {"problem": "Double it.", "inputs": ["1"], "outputs": ["2"]},
        "Write a Python program that solves this task.\n\nDouble it.\n\n",
        "give a whole program, reading standard input and printing, in a block starting with ```python.",
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
@pytest.mark.parametrize("tool", [True, False])
def test_prompts_are_these_words(tmp_path, kind, tool):
    """Scores differ by template from one project to the next (open-r1 issue 698): change them on purpose."""
    row, head, tail = GOLDEN[kind]
    problem = one(tmp_path, row, tool=tool)
    middle = WITH_TOOL if tool else "Once you are sure, "
    assert problem.messages == [{"role": "user", "content": head + middle + tail}]
    assert ("tool" in problem.messages[0]["content"]) is tool


# ---- trajectories ------------------------------------------------------------------------------------------

CALL = {"name": "python", "arguments": {"code": "print(1)"}}
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": CALL}],
        [CALL],
        json.dumps([CALL]),
        [{"function": {"name": "python", "arguments": json.dumps(CALL["arguments"])}}],
        [json.loads(json.dumps(CALL)) | {"arguments": '{"code": "print(1)"}'}],
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_come_out_as_an_object_however_they_are_stored(tmp_path, calls, as_text):
    """Qwen3-Coder issue 444: arguments stored as text are quoted again by the template: a broken call."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1."},
    ]
    row = {"messages": messages, "tools": TOOLS}
    row = {key: json.dumps(value) for key, value in row.items()} if as_text else row
    (found,) = load_conversations(jsonl(tmp_path, [row]))
    assert found["tools"] == TOOLS
    assert found["messages"][1] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}],
    }  # fmt: skip
    assert [m["role"] for m in found["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_the_cold_start_set_is_read_as_it_is_published(tmp_path):
    """Open-AgentRL-SFT-3K: messages with tool calls, tools, and enable_thinking in some rows."""
    said = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I count.", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "\\boxed{1}"},
    ]  # fmt: skip
    rows = [{"messages": said, "tools": TOOLS, "enable_thinking": True}, {"messages": said, "tools": TOOLS}]
    for path in (jsonl(tmp_path, rows), parquet(tmp_path, rows)):
        for found in load_conversations(path):
            assert found == {"messages": said, "tools": TOOLS}


def test_parquet_conversations_have_no_keys_that_the_row_did_not_have(tmp_path):
    """A struct column fills in None: {"code": ..., "lang": None} would be trained on as a second argument."""
    rows = [
        {"messages": [{"role": "user", "content": "q"},
                      {"role": "assistant", "tool_calls": [{"name": "python", "arguments": arguments}]}],
         "tools": json.dumps(TOOLS)}
        for arguments in ({"code": "1"}, {"lang": "py", "code": "2"})
    ]  # fmt: skip
    first, second = load_conversations(parquet(tmp_path, rows))
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"code": "1"}
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"lang": "py", "code": "2"}
    assert "tool_calls" not in first["messages"][0] and first["tools"] == TOOLS


@pytest.mark.parametrize(
    "row, words",
    [
        ({"text": "x"}, "row 2: no messages; .*columns found: text"),
        ({"messages": []}, "row 2: no messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "row 2: message 0 has no role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "row 2: the content of message 0 is not text"),
        ({"messages": [{"role": "tool", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
         "row 2: a tool call of message 0"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}, "row 2: tools is not a list"),
        ({"messages": [{"role": "assistant", "tool_calls": True}]}, "row 2: malformed, TypeError"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "row 2: malformed"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_named_by_file_and_row(tmp_path, row, words):
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(ValueError, match=f"set.jsonl, {words}"):
        load_conversations(jsonl(tmp_path, [good, row]))


# ---- bad files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.jsonl", '{"problem": "p", "answer": 1}\n{"problem"', "a.jsonl, row 2: not a JSON object"),
        ("a.jsonl", "[1]\n", "a.jsonl, row 1: not a JSON object"),
        ("a.jsonl", '\n{"problem": "\xff", "answer": 1}', "row 2: not a JSON object in UTF-8"),
        ("a.jsonl", '\n{"text": "p", "answer": 1}', "a.jsonl, row 2: no problem; .*found: text, answer"),
        ("a.jsonl", '{"problem": "p", "gold": 1}', "row 1: no answer .*columns found: problem, gold"),
        ("a.jsonl", '{"problem": "p", "answer": ""}', "row 1: no answer"),
        ("a.jsonl", '{"problem": "p", "answer": true}', "row 1: no answer"),
        (
            "a.jsonl",
            '{"problem": "p", "answer": "{\\"test_code\\": \\"\\"}"}',
            "row 1: malformed, KeyError.'entry_",
        ),
        (
            "a.jsonl",
            '{"prompt": [{"content": "s"}, {"content": "q"}], "answer": 1}',
            "row 1: a message before",
        ),
        ("a.jsonl", '{"question": "q", "correct_answer": "argon", "distractor": "iron"}', "row 1: no answer"),
        ("a.jsonl", "", "a.jsonl holds no usable row"),
        ("a.parquet", "text", "a.parquet is not a readable parquet file"),
        ("a.csv", "text", "a.csv is neither a .jsonl or .parquet file nor a folder"),
    ],
)
def test_a_bad_file_is_told_in_one_sentence(tmp_path, name, text, words):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=words) as error:
        load_problems(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_name_that_is_nothing_is_met_with_the_nearest_one(tmp_path):
    with pytest.raises(ValueError, match="no file or folder 'aime24'; did you mean aime2024"):
        load_problems("aime24")
    with pytest.raises(ValueError, match="named sets are aime2024, aime2025"):
        load_problems(str(tmp_path / "nothing" / "here.jsonl"))
    with pytest.raises(ValueError, match="limit is 0"):
        load_problems("aime2024", limit=0)


def test_hub_sets_pass_through_the_same_mapping(monkeypatch):
    """The hub itself is not asked here; the arguments and the rows' way through are."""
    datasets, asked = pytest.importorskip("datasets"), []
    rows = [{"question": "p", "answer": "so\n#### 7"}]

    def load_dataset(path, **arguments):
        asked.append((path, arguments))
        if path == "gated/set":
            raise RuntimeError("403\nask for access")
        return {"train": rows, "test": rows} if path == "two/splits" else {"train": rows}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_problems("gsm8k")[0].answer == "7" and load_problems("gsm8k")[0].family == "gsm8k"
    assert asked[0] == ("openai/gsm8k", {"name": "main", "split": "test"})
    assert load_problems("someone/set:main:test")[0].family == "set"
    assert asked[-1] == ("someone/set", {"name": "main", "split": "test"})
    with pytest.raises(ValueError, match="two/splits has the splits train, test; choose by"):
        load_problems("two/splits")
    with pytest.raises(ValueError, match=r"cannot load gated/set from the hub \(403 ask for access\)"):
        load_problems("gated/set")
    assert all(set(arguments) <= {"path", "name", "split", "data_files"} for arguments in data.NAMED.values())
