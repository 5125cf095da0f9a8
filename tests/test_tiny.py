"""The world of the laptop run: problems whose answers are right, a teacher who shows good and bad ways."""

import contextlib
import io
import math
import re
from collections import Counter

import tiny
from tools import PythonTool


def right_answer(question: str) -> str:
    """Computed from the question's words alone."""
    n = [int(number) for number in re.findall(r"\d+", question)]
    value = n[0] ** n[1] if "to the power" in question else math.prod(n)
    if "sum of the digits" in question:
        return str(sum(int(digit) for digit in str(value)))
    if "to the power" in question and "divided" in question:
        return str(value % n[2])
    if "primes" in question:
        return str(sum(all(k % i for i in range(2, k)) for k in range(n[0], n[1])))
    if "times" in question:
        return str(n[0] * n[1] % n[2])
    assert "ones are in the binary form" in question
    return str(f"{value:b}".count("1"))


def test_training_and_test_problems_never_share_a_question():
    """A held-out score on questions that were trained on shows nothing (the usual case of contamination);
    the numbers of a question decide its split, whatever the seed."""
    train = {p.messages[0]["content"] for seed in range(40) for p in tiny.problems("train", 100, seed)}
    test = {p.messages[0]["content"] for seed in range(10) for p in tiny.problems("test", 100, seed)}
    assert not train & test
    with PythonTool(workers=2, timeout_s=2, max_chars=tiny.MAX_CHARS) as tool:
        taught = {c[0]["content"] for c in tiny.conversations(300, 5, tool)}
    assert not taught & test
    assert len(train) > 2500 and len(test) > 600


def test_answers_of_the_built_in_problems_are_right_and_the_families_balanced():
    """A wrong gold pays wrong answers; a family that is hardly drawn is hardly measured."""
    problems = tiny.problems("train", 500, seed=3)
    assert all(p.answer == right_answer(p.messages[0]["content"]) for p in problems)
    count = Counter(p.family for p in problems)
    assert set(count) == set(tiny.FAMILIES) and min(count.values()) > 60
    assert tiny.problems("train", 500, seed=3) == problems and tiny.problems("train", 500, seed=4) != problems


def really(code: str) -> tuple[str, str]:
    """(what the program prints, its last line of traceback or "")."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        return printed.getvalue(), type(error).__name__
    return printed.getvalue(), ""


def test_the_teacher_shows_good_and_bad_ways_and_every_tool_text_is_real():
    """Stitched data, with outputs that nobody's Python ever gave, teaches a policy to make outputs up (arXiv
    2510.11701, section 3); and a teacher that is always right leaves nothing to reinforce."""
    kinds = Counter()
    with PythonTool(workers=2, timeout_s=2, max_chars=tiny.MAX_CHARS) as tool:
        conversations = list(tiny.conversations(400, 1, tool))
    assert len(conversations) == 400
    for messages in conversations:
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"
        errors, output = [], ""
        for asked, answered in zip(messages, messages[1:]):
            if answered["role"] == "tool":
                printed, error = really(asked["tool_calls"][0]["function"]["arguments"]["code"])
                output = answered["content"]
                assert printed.strip() in output
                if error:
                    assert output.splitlines()[-1].startswith(error)
                else:
                    assert output == printed.strip()
                errors.append(error)
        said = re.search(r"\\boxed\{(.*)\}", messages[-1]["content"])[1]
        right = said == right_answer(messages[0]["content"])
        if not errors:
            kinds["guess right" if right else "guess wrong"] += 1
        elif errors[-1]:
            kinds["error given up"] += 1
        else:
            assert said == output
            kinds["error repaired" if errors[0] else "right program" if right else "wrong program"] += 1
    assert min(kinds[k] for k in ("guess wrong", "error given up", "error repaired", "right program")) > 10
    assert kinds["wrong program"] > 10
    assert kinds["guess right"] < kinds["guess wrong"] / 5
    assert 0.2 < (kinds["right program"] + kinds["error repaired"] + kinds["guess right"]) / 400 < 0.5
