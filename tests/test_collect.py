"""Rollouts sorted by difficulty, trajectories worth imitating, solutions with calls stitched into them."""

import itertools
import json
from pathlib import Path

import pytest
from test_chat import with_template

import chat
import collect
import sft
from data import Problem, load_conversations, load_problems, load_rows
from tools import PythonTool

ROOT = Path(collect.__file__).parent
PROBLEM = Problem([{"role": "user", "content": "How much is 6*7?"}], "42", "math", "set", "set-01")


def rows_of(n: int) -> list:
    return [
        ({"problem": f"q{i}", "answer": str(i)}, Problem([], str(i), "math", "set", f"id{i}"))
        for i in range(n)
    ]


def config(**more) -> collect.Config:
    return collect.Config(**{"data": "d", "out": "o", **more})


# ---- difficulty --------------------------------------------------------------------------------------------


def test_problems_that_all_or_no_episodes_solve_are_dropped_and_the_rest_sorted(tmp_path, capsys):
    """Of 8 episodes 0, 1, 2, 3, 5, 6, 7, 8 right: rates 0 and 1 teach nothing (groups of advantage 0), 1/8
    and 2/8 = 0.25 are hard, 3/8 and 5/8 medium, 6/8 = 0.75 and 7/8 easy (arXiv 2510.11701)."""
    rolled = [{"correct": [True] * n + [False] * (8 - n)} for n in (0, 1, 2, 3, 5, 6, 7, 8)]
    collect.filter_problems(config(), rows_of(8), rolled, tmp_path)
    found = {}
    for name in ("easy", "medium", "hard"):
        lines = (tmp_path / "problems" / f"{name}.jsonl").read_text().splitlines()
        found[name] = [(row["problem"], row["pass_rate"]) for row in map(json.loads, lines)]
        assert all(json.loads(line)["difficulty"] == name for line in lines)
    assert found == {
        "easy": [("q5", 0.75), ("q6", 0.875)],
        "medium": [("q3", 0.375), ("q4", 0.625)],
        "hard": [("q1", 0.125), ("q2", 0.25)],
    }
    table = json.loads((tmp_path / "histogram.json").read_text())
    assert table["right episodes"] == {f"{n}/8": int(n != 4) for n in range(9)}
    assert (table["problems"], table["easy"], table["medium"], table["hard"]) == (8, 2, 2, 2)
    assert "2 easy, 2 medium, 2 hard" in capsys.readouterr().out


def test_filtered_problems_are_read_back_as_they_were(tmp_path):
    """A set whose prompts, kinds, golds or families change on the way through the filter trains on something
    else than what was measured."""
    rows = [
        {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "What is 6*7?"}],
         "reward_model": {"ground_truth": "42", "style": "rule"}, "extra_info": {"index": "a"}},
        {"Question": "Which?", "Correct Answer": "x", "Incorrect Answer 1": "y", "Incorrect Answer 2": "z",
         "Incorrect Answer 3": "w", "High-level domain": "Physics", "Record ID": "r7"},
        {"problem": "Double it.", "inputs": ["1"], "outputs": ["2"]},
        {"question": "How many?", "answer": "5 + 2 = <<5+2=7>>7\n#### 7"},
        {"problem": "37 * 19 % 58", "answer": "7", "family": "mod", "as_is": True},  # of the laptop world
    ]  # fmt: skip
    source = tmp_path / "set.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = load_rows(str(source))
    collect.filter_problems(config(), before, [{"correct": [True, False]}] * 5, tmp_path)
    assert before[4][1].messages == [{"role": "user", "content": "37 * 19 % 58"}]
    assert load_problems(str(tmp_path / "problems")) == [problem for _, problem in before]


# ---- trajectories ------------------------------------------------------------------------------------------


def episode(tokenizer, turns: list[str], outputs: list[str], **more) -> dict:
    """What the agent loop would have stored: turns of the policy, tool results between them."""
    ids = chat.encode_prompt(tokenizer, PROBLEM.messages)
    prompt, mask = len(ids), [0] * len(ids)
    for i, text in enumerate(turns):
        end = tokenizer.convert_tokens_to_ids(chat.turn_marks(tokenizer)[1])
        said = tokenizer.encode(text, add_special_tokens=False) + [end]
        shown = chat.ToolTurn(tokenizer).encode([outputs[i]]) if i < len(outputs) else []
        ids, mask = ids + said + shown, mask + [1] * len(said) + [0] * len(shown)
    results = [{"output": text, "status": "error" if "Error" in text else "ok"} for text in outputs]
    found = {"ids": ids, "mask": mask, "prompt_len": prompt, "tool_results": results}
    return {**found, "correct": True, "finish": "stop", **more}


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


TURNS = [
    "Use Python.\n" + call("print(6*7"),
    "I fix it.\n" + call("print(6*7)"),
    "The answer is \\boxed{42}.",
]
OUTPUTS = ["SyntaxError", "42"]


@pytest.mark.parametrize("name", ["chatml", "alternate", "own calls", "headers"])
def test_a_collected_trajectory_is_trained_on_as_it_was_sampled(tokenizer, name):
    """Ids that differ from those sampled, or tool tokens in the mask, would teach turns that the policy never
    had; an error that was repaired belongs to them. A template may have no place for calls or results."""
    tokenizer = with_template(tokenizer, name)
    sampled = episode(tokenizer, TURNS, OUTPUTS)
    found = collect.conversation(sampled, PROBLEM, tokenizer)
    ids, mask = sft.tokenize_conversation(tokenizer, found["messages"])

    def turns(ids: list[int], mask: list[int]) -> list[tuple]:
        runs = itertools.groupby(zip(mask, ids), key=lambda pair: pair[0])
        return [(m, tokenizer.decode([i for _, i in run])) for m, run in runs]

    found_turns, sampled_turns = turns(ids, mask), turns(sampled["ids"], sampled["mask"])
    assert found_turns[: len(sampled_turns)] == sampled_turns
    assert [text.strip() for _, text in found_turns[len(sampled_turns) :]] in ([], [""])
    if name == "chatml":  # elsewhere <tool_call> is text of a message, and no control token
        assert ids[: len(sampled["ids"])] == sampled["ids"]
    assert [m["role"] for m in found["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found["messages"][1]["content"] == "Use Python."


def test_thinking_that_the_prompt_opened_is_closed_and_opened_in_the_message(tokenizer):
    """Templates of thinking models end the prompt with <think>; without it the stored turn would begin with a
    closing tag only, and a draft of a call inside the thought is no call."""
    tokenizer = with_template(tokenizer, "opened")
    draft = f"I try {call('print(1)')}\n</think>\n\nNow.\n{call('print(6*7)')}"
    found = collect.conversation(episode(tokenizer, [draft, "x\n</think>\n\n42"], ["42"]), PROBLEM, tokenizer)
    first = found["messages"][1]
    assert first["content"] == f"<think>\nI try {call('print(1)')}\n</think>\n\nNow."
    assert [c["function"]["arguments"]["code"] for c in first["tool_calls"]] == ["print(6*7)"]


@pytest.mark.parametrize(
    "turns, outputs, more",
    [
        (TURNS, OUTPUTS, {"correct": False}),
        (TURNS, OUTPUTS, {"finish": "length"}),
        (["The answer is \\boxed{42}."], [], {}),
        ([TURNS[0], TURNS[2]], ["SyntaxError"], {}),
        (["<tool_call>\n{\"name\": \"python\"\n</tool_call>", *TURNS[1:]], OUTPUTS, {}),
        ([TURNS[0] + " and so on", *TURNS[1:]], OUTPUTS, {}),
        ([call(5), *TURNS[1:]], OUTPUTS, {}),
        ([TURNS[0].replace('"python"', '"shell"'), *TURNS[1:]], OUTPUTS, {}),
    ],
    ids=["wrong", "cut off", "no call", "no call that ran", "malformed call", "text behind the call",
         "code that is no text", "another tool"],
)  # fmt: skip
def test_what_should_not_be_imitated_is_not_collected(tokenizer, turns, outputs, more):
    """Imitated, a malformed call or a lucky guess would come back in the policy."""
    assert collect.conversation(episode(tokenizer, turns, outputs, **more), PROBLEM, tokenizer) is None


def test_of_a_problem_at_most_k_trajectories_are_kept_and_no_two_with_the_same_programs(tmp_path, capsys):
    """Easy problems, solved eight times by one program, would outweigh the others."""
    said = [
        {"messages": [{"role": "user", "content": c}], "programs": p} for c, p in ("aX", "bX", "cY", "dZ")
    ]
    rolled = [{"correct": [True] * 4, "calls": 5, "ran": 4, "conversations": said}]
    for keep, kept in ((1, "a"), (2, "ac"), (9, "acd")):
        collect.collect(config(keep=keep, samples=4), rows_of(1), rolled, tmp_path)
        found = load_conversations(str(tmp_path / "conversations.jsonl"))
        assert [c["messages"][0]["content"] for c in found] == list(kept)
        assert found[0]["tools"] == [PythonTool.described()]
    assert "4 episodes, 5 calls, 4 ran; 4 right" in capsys.readouterr().out


# ---- stitched ----------------------------------------------------------------------------------------------


def stitched(answers: list[str]):
    rows = [
        ({"answer": a}, Problem([{"role": "user", "content": "q"}], "72", "math", "s", "i")) for a in answers
    ]
    with PythonTool(workers=2) as tool:
        return collect.stitch(rows, tool)


def test_each_calculation_of_a_solution_becomes_a_call_that_is_really_run():
    """The tool's text must be what Python prints, 24.0 and not the annotation's 24: a policy trained on
    invented outputs meets others when it samples."""
    worked = (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = $<<48+24=72>>72 in all.\n#### 72"
    )
    (found,), left_out = stitched([worked])
    said = [(m["role"], m["content"]) for m in found["messages"]]
    assert said == [
        ("user", "q"), ("assistant", "Natalia sold 48/2"), ("tool", "24.0"),
        ("assistant", "24 clips in May.\nShe sold 48+24"), ("tool", "72"),
        ("assistant", "72 in all.\nThe answer is \\boxed{72}."),
    ]  # fmt: skip
    codes = [c["function"]["arguments"]["code"] for m in found["messages"] for c in m.get("tool_calls", [])]
    assert codes == ["print(48/2)", "print(48+24)"] and not left_out


def test_solutions_that_python_does_not_confirm_are_left_out_and_counted():
    answers = [
        "He has 5.\n#### 5",  # no calculation
        "<<5*3=14>>14\n#### 14",  # wrong
        "<<5(3)=15>>15\n#### 15",  # 5 is not a function
        "<<50%*30=15>>15\n#### 15",  # no Python
        "<<1/3=.33>>.33\n#### .33",  # rounded: right
        "<<24*50=1,200>>1,200\n#### 1,200",  # right
    ]
    found, left_out = stitched(answers)
    assert len(found) == 2 and found[0]["messages"][2]["content"].startswith("0.333")
    assert left_out == {"no calculation": 1, "Python finds another value": 2, "not plain arithmetic": 1}


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "say first what to make: filter, collect or stitch"),
        ("--data d", "say first what to make"),
        ("filter --data tiny --out o", "--model says who rolls out"),
        ("--filter --data tiny --out o --model m --samples 0", "--samples 0: take more than 0"),
        ("filter --data tiny --out o --model m --tool_chars 0", "--tool_chars 0: take more than 0"),
        ("filter --data tiny --out o --model m --hard 0.8", "--hard 0.8 --easy 0.75"),
        ("filter --data tiny --out o --model m --dtype bf16", "--dtype bf16: take float32 or bfloat16"),
        ("filter --data tiny --out o --model m --cache_tokens -1", "--cache_tokens -1: take more than 0"),
        ("collect --data nowhere --out o --model m", "no file or folder 'nowhere'"),
        ("collect --out o --model m", "--data is required"),
    ],
)
def test_a_bad_command_ends_with_one_sentence(line, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        collect.main(line.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
