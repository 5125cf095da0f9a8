"""The numbers of an evaluation against brute force, and its bookkeeping: kill, resume, ranks, conditions."""

import itertools
import json
import math
import random
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
import math_equal
import tiny
from evaluate import majority_at_k, mean_interval, pass_at_k, published_bootstrap, summarize
from rollout import Trajectory
from tools import ToolResult

REAL = {name: getattr(evaluate, name) for name in ("run_agent", "Sampler", "encode_prompt")}

# ---- pass@k ------------------------------------------------------------------------------------------------


def test_pass_at_k_equals_the_share_of_all_subsets_that_hold_a_right_sample():
    """verl's best@k draws with replacement and is too low: .62 for 1 right of 32 at k = 32; and open-r1 issue
    655: pass@1 fell to half when more samples were taken. It is the mean."""
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert all(pass_at_k(32, c, 1) == pytest.approx(c / 32, abs=1e-12) for c in range(33))


@pytest.mark.parametrize(
    "n, c, k, value",
    [(4, 2, 2, 5 / 6), (64, 1, 8, 0.125), (200, 1, 100, 0.5), (32, 4, 8, 0.704505), (10, 7, 5, 1),
     (16, 0, 4, 0), (1024, 3, 512, 0.875367), (32, 1, 1, 0.03125), (32, 8, 4, 0.704505), (10, 3, 5, 0.916667),
     (32, 1, 32, 1)],
)  # fmt: skip
def test_pass_at_k_has_the_values_worked_out_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_of_more_than_was_sampled_is_refused(n, c, k):
    """human-eval issue 68: k above n with nothing right came out as 1.0."""
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, c, k)


# ---- maj@k -------------------------------------------------------------------------------------------------


def test_the_majority_counts_answers_not_pairs_of_answer_and_mark():
    """NeMo Skills issue 1257: 9 (right) and 9 (wrong) as two answers gave 0.5; 9 has 3 votes."""
    assert majority_at_k(["9", "9", "9", "5", "5"], [True, False, True, False, False]) == pytest.approx(2 / 3)


def test_ties_share_in_every_order_of_the_samples():
    """NeMo Skills issue 678: the first of several winners won, so the order of samples decided."""
    samples = [("1", False), ("1", False), ("2", True), ("2", True), ("3", False)]
    for order in set(itertools.permutations(samples)):
        assert majority_at_k(*map(list, zip(*order))) == 0.5


def test_no_answer_never_wins_over_an_answer():
    assert majority_at_k([None, None, None, "5", "5"], [False, False, False, True, True]) == 1.0
    assert majority_at_k([None] * 4, [False] * 4) == 0.0
    with pytest.raises(ValueError, match="2 answers but 1 marks"):
        majority_at_k(["1", "2"], [True])


def test_equal_answers_in_different_spelling_vote_together():
    """Votes by string split 1/2 and 0.5, and the wrong 7 wins with two votes."""
    assert majority_at_k(["\\frac{1}{2}", "7", "0.5", "7", "1/2"], [True, False, True, False, True]) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "is no mathematics" is said of golds
        assert majority_at_k(["\\text{unclear}", "x+1", "x+2"], [False, True, False]) == pytest.approx(1 / 3)


def test_majority_agrees_with_a_plain_count_where_answers_differ_as_numbers():
    generator = random.Random(0)
    for _ in range(50):
        answers = [str(generator.choice([1, 2, 3, 4])) for _ in range(generator.choice([1, 4, 7]))]
        right = [a == "2" for a in answers]
        votes = Counter(answers)
        winners = [a for a in votes if votes[a] == max(votes.values())]
        assert majority_at_k(answers, right) == pytest.approx(("2" in winners) / len(winners))


# ---- the interval ------------------------------------------------------------------------------------------


def wilson(m: float, n: float) -> tuple[float, float]:
    """Roots of (m - p)^2 = z^2 p (1 - p) / n."""
    roots = np.roots([1 + 1.96**2 / n, -(2 * m + 1.96**2 / n), m * m])
    return min(roots), max(roots)


def test_the_interval_is_wilsons_for_the_draws_that_the_spread_of_problems_is_worth():
    """Means 1, 1/2, 0 and the added 1, 0: mean 1/2, se^2 = 4 (1/2)^2 / (5 * 4) = 1/20, n = (1/4) 20 = 5."""
    assert mean_interval([[1, 1], [1, 0], [0, 0]]) == pytest.approx((0.5, *wilson(0.5, 5)), abs=1e-9)
    assert mean_interval([[1], [0], [0], [0]]) == pytest.approx((0.25, *wilson(0.25, 4)), abs=1e-9)


def test_more_samples_of_the_same_problems_do_not_feign_certainty():
    """Counting samples as independent makes 32 copies of one outcome look like 32 times the evidence."""
    marks = [0, 1, 0, 1, 1, 1, 0, 0]
    _, low, high = mean_interval([[mark] for mark in marks])
    _, low_32, high_32 = mean_interval([[mark] * 32 for mark in marks])
    assert (low_32, high_32) == pytest.approx((low, high), abs=0.02)


def test_samples_that_agree_about_no_problem_do_add_certainty():
    """Each problem half solved: the problems do not differ, and 32 samples know more than one."""
    _, low, high = mean_interval([[0, 1] * 16] * 100)
    assert high - low < 0.07 < 0.19 < np.diff(mean_interval([[0], [1]] * 50)[1:])[0]


def test_an_interval_is_not_empty_when_every_sample_failed():
    """m +- 1.96 se says [0, 0] after 30 problems of a weak model; 0 of 30 still leaves 11 % possible."""
    m, low, high = mean_interval([[0, 0]] * 30)
    assert (m, low) == pytest.approx((0, 0)) and high == pytest.approx(wilson(0, 31)[1])
    assert 0.10 < high < 0.12
    m, low, high = mean_interval([[1, 1]] * 30)
    assert (m, high) == pytest.approx((1, 1)) and low == pytest.approx(wilson(1, 31)[0])
    assert mean_interval([[1, 0]])[1:] == pytest.approx(wilson(0.5, 2), abs=1e-9)  # one problem: two samples


@pytest.mark.parametrize("problems, rate, alike", [(30, 0.03, 1), (30, 0.5, 1), (200, 0.2, 1), (30, 0.1, 5)])
def test_about_95_of_100_intervals_hold_the_true_mean(problems, rate, alike):
    """Problems differ by a Beta law. Of m +- 1.96 se only 76 in 100 do in the first case."""
    generator, hits, rounds = np.random.default_rng(0), 0, 400
    for _ in range(rounds):
        rates = generator.beta(rate * alike, (1 - rate) * alike, problems)
        marks = (generator.random((problems, 8)) < rates[:, None]).astype(float)
        _, low, high = mean_interval(marks.tolist())
        hits += low <= rate <= high
    assert hits / rounds >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / rounds)


@pytest.mark.parametrize("scores", [[], [[1.5]], [[float("nan")]]])
def test_an_interval_of_nothing_or_of_other_scores_is_refused(scores):
    with pytest.raises(ValueError, match="at least one problem, and scores from 0 to 1"):
        mean_interval(scores)


# ---- the published estimate --------------------------------------------------------------------------------


@pytest.mark.parametrize("n, c, k, expected", [(32, 1, 8, 0.2243), (32, 4, 8, 0.656391), (10, 3, 5, 0.83193)])
def test_the_published_best_at_k_is_drawn_with_replacement(n, c, k, expected):
    """Expectation 1 - (1 - c/n)^k; 1000 draws scatter by at most 0.016 (one standard error)."""
    answers = ["42"] * c + [str(i) for i in range(n - c)]
    best, _ = published_bootstrap(answers, [True] * c + [False] * (n - c), k)
    assert abs(best - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)


def test_the_published_majority_is_right_for_a_certain_winner_and_lets_none_vote():
    assert published_bootstrap(["5", "5"], [True, True], 2) == (1.0, 1.0)
    best, majority = published_bootstrap([None] * 30 + ["5"] * 2, [False] * 30 + [True] * 2, 32)
    assert best > 0.8 and majority < 0.01


# ---- the table ---------------------------------------------------------------------------------------------


def row(problem: int, sample: int, correct: bool, **changes) -> dict:
    return {
        "tool": True, "problem": problem, "sample": sample, "id": "x", "family": "f", "kind": "math",
        "answer": "1", "prediction": "1" if correct else "0", "correct": correct, "finish": "stop",
        "calls": 0, "ran": 0, "policy_tokens": 10, "tool_tokens": 0, "seconds": 0.5, "text": "", **changes,
    }  # fmt: skip


def test_samples_that_ran_out_of_room_stay_in_the_denominator():
    """inspect_ai issue 4286: 27 right, 9 wrong, 12 timed out is 27/48 = 0.5625, not 27/36."""
    marks = [True] * 27 + [False] * 21
    rows = [row(i // 4, i % 4, mark, finish="stop" if i < 36 else "length") for i, mark in enumerate(marks)]
    table = summarize(rows, 4)
    assert table["avg@4"] == pytest.approx(0.5625) and table["truncated/length"] == 0.25


def test_the_average_is_over_all_samples_of_a_problem_not_the_first():
    """lm-evaluation-harness issue 3248: avg@k was the score of the first sample. 0, 1, 1, 1 is 3/4."""
    table = summarize([row(0, j, j > 0) for j in range(4)], 4)
    assert table["avg@4"] == table["pass@1"] == 0.75


def test_the_table_says_what_its_rows_say():
    rows = [
        row(0, 0, True, calls=2, ran=1, tool_tokens=6),
        row(0, 1, False, calls=0),
        row(1, 0, False, calls=1, ran=1, finish="turns", family="g", prediction=None, policy_tokens=30),
        row(1, 1, True, calls=1, ran=1, family="g"),
    ]
    table = summarize(random.Random(1).sample(rows, 4), 2, as_published=True)
    expected = {
        "problems": 2, "avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0, "maj@2": 0.75, "no_answer": 0.25,
        "truncated/length": 0.0, "truncated/turns": 0.25, "tool/used": 0.75, "tool/calls": 1.0,
        "tool/success": 0.75, "tokens/policy": 15.0, "tokens/tool": 1.5, "seconds": 2.0, "avg/f": 0.5,
        "avg/g": 0.5,
    }  # fmt: skip
    assert {key: table[key] for key in expected} == pytest.approx(expected)
    assert table["published/best@2"] == pytest.approx(0.75, abs=0.06)
    assert summarize([row(0, 0, True)], 1)["tool/success"] is None, "no call is not a failed call"
    assert "maj@2" not in summarize([row(0, j, True, kind="code", prediction=None) for j in (0, 1)], 2)


# ---- the run, with a sampler that costs nothing ------------------------------------------------------------


class Words:
    """A tokenizer in which each id is a word of the text."""

    vocabulary = ["Think", "\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "<end>", "out"]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(self.vocabulary[i] for i in ids if not (skip_special_tokens and i == 4))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(*options) evaluates six problems in tmp_path/out; run.state.asked is what was sampled."""
    data = tmp_path / "six.jsonl"
    lines = [json.dumps({"problem": f"p{i}", "answer": str(1 + i % 3)}) + "\n" for i in range(6)]
    data.write_text("".join(lines))
    asked: list[tuple] = []
    state = SimpleNamespace(asked=asked, out=tmp_path / "out", rank=0, ranks=1, die_after=None, data=data)

    def run_agent(sampler, prompts, tools, n, *law, seed, indices):
        if state.die_after is not None and len(asked) >= state.die_after:
            raise KeyboardInterrupt
        found = []
        for index, prompt in zip(indices, prompts):
            asked.append((bool(tools), index))
            for j in range(n):
                draw = random.Random(f"{seed} {index} {j}").randrange(1, 4)
                ids, mask, results = [*prompt], [0] * len(prompt), []
                if tools:
                    ids, mask = ids + [2, 4, 5], mask + [1, 1, 0]
                    results = [ToolResult("out", "ok" if j else "error", 0.1)]
                ids, mask = ids + [0, draw, 4], mask + [1, 1, 1]
                found.append(Trajectory(ids, mask, [0.0] * len(ids), len(prompt), results, "stop", index, j))
        return found

    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(max_position_embeddings=100)
    monkeypatch.setattr(evaluate, "run_agent", run_agent)
    monkeypatch.setattr(evaluate, "Sampler", lambda *a, **k: SimpleNamespace(stats={}))
    monkeypatch.setattr(evaluate, "load", lambda name, dtype, device: (model, Words()))
    monkeypatch.setattr(evaluate, "encode_prompt", lambda tokenizer, messages, tools: [0, 0])
    monkeypatch.setattr(evaluate, "init_process_group", lambda: (state.rank, state.ranks, "cpu"))
    monkeypatch.setattr(evaluate.dist, "barrier", lambda: None)
    monkeypatch.setattr(evaluate.dist, "destroy_process_group", lambda: None)

    def call(*options) -> dict | None:
        defaults = ["--model", "m", "--data", str(state.data), "--out", str(state.out)]
        evaluate.main([*defaults, "--samples", "4", "--chunk", "2", "--max_new_tokens", "50", *options])
        summary = state.out / "summary.json"
        return json.loads(summary.read_text()) if summary.exists() else None

    vars(call).update(state=state, model=model)
    return call


def samples(out: Path) -> list[dict]:
    """Rows of samples.jsonl, less what differs from run to run."""
    lines = (out / "samples.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def test_the_text_of_the_last_turn_is_graded_and_all_is_written(run, capsys):
    """The box \\boxed{2} stands in the first turn of each sample; the last turn says something else."""
    summary = run("--both", "--as_published")
    rows = samples(run.state.out)
    assert len(rows) == 2 * 6 * 4 and len({(r["tool"], r["problem"], r["sample"]) for r in rows}) == 48
    for r in rows:
        draw = random.Random(f"0 {r['problem']} {r['sample']}").randrange(1, 4)
        assert r["prediction"] == str(draw) and r["correct"] is (str(draw) == r["answer"])
        assert r["answer"] == str(1 + r["problem"] % 3) and r["finish"] == "stop"
        assert (r["calls"], r["ran"]) == ((1, int(r["sample"] > 0)) if r["tool"] else (0, 0))
        assert (r["policy_tokens"], r["tool_tokens"]) == ((5, 1) if r["tool"] else (3, 0))
        assert r["text"].endswith(f"Think \\boxed{{{draw}}} <end>")
    mean = sum(r["correct"] for r in rows if r["tool"]) / 24
    assert summary["with the tool"]["avg@4"] == summary["without the tool"]["avg@4"] == pytest.approx(mean)
    assert summary["with the tool"]["tool/success"] == 0.75
    for key in ("model", "data", "samples", "temperature", "top_p", "max_new_tokens", "max_turns", "seed",
                "torch", "sha256_weights", "sha256_problems_tool", "sha256_problems_plain"):  # fmt: skip
        assert key in summary["conditions"], f"a number without its {key} cannot be compared"
    printed = capsys.readouterr().out
    assert f"avg@4                {mean:.3f}   95 % [" in printed and "published/best@4" in printed


def test_a_killed_run_goes_on_without_sampling_anything_twice(run):
    """Killed after two chunks and in the middle of a line; the half line must not join the next."""
    run()
    whole = samples(run.state.out)
    run.state.out, run.state.die_after = run.state.out.with_name("killed"), 4
    run.state.asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run()
    with open(run.state.out / "samples.jsonl", "a") as file:
        file.write('{"tool": true, "problem": 4, "sam')
    run.state.die_after = None
    run()
    assert run.state.asked == [(True, i) for i in range(6)]
    assert samples(run.state.out) == whole
    run()
    assert len(run.state.asked) == 6, "a finished run samples nothing more"


def test_a_problem_with_a_missing_sample_gets_that_sample_only(run):
    run()
    file = run.state.out / "samples.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:9] + whole[10:]))
    run.state.asked.clear()
    run()
    assert run.state.asked == [(True, 2)]
    now = file.read_text().splitlines(keepends=True)
    assert now[:9] + now[10:] == whole[:9] + whole[10:], "what was there is kept, to the byte"
    assert len(now) == 24


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_give_the_numbers_of_one_process(run, ranks):
    """Six problems over five ranks: unequal shares; then on in one process after the last rank was killed."""
    alone = run("--both")
    one = samples(run.state.out)
    run.state.out, run.state.ranks = run.state.out.with_name("ranks"), ranks
    run.state.asked.clear()
    run.state.out.mkdir()
    (run.state.out / "config.json").write_text(json.dumps(alone["conditions"]))
    (run.state.out / "samples.jsonl").write_text("")
    for run.state.rank in range(ranks - 1, 0, -1):
        run("--both")
    run.state.rank, run.state.ranks = 0, 2 if ranks == 2 else 1
    summary = run("--both")
    assert samples(run.state.out) == one
    for title in ("with the tool", "without the tool"):
        assert {**alone[title], "seconds": 0} == {**summary[title], "seconds": 0}
    assert len(run.state.asked) == len(set(run.state.asked)) == 12, "each problem was sampled by one rank"
    assert not list(run.state.out.glob("samples.rank*"))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--samples", "8"], "begun with samples 4, and now it is 8"),
        (["--no-tool"], "begun with tool True, and now it is False"),
        (["--top-p", "1"], "begun with top_p 0.6, and now it is 1.0"),
        (["--seed", "1"], "begun with seed 0, and now it is 1"),
        (["--limit", "3"], "begun with limit None, and now it is 3"),
    ],
)
def test_going_on_under_other_conditions_is_refused_by_name(run, capsys, options, words):
    """A number made of samples under two conditions is a number of neither."""
    run()
    before = {file: file.read_bytes() for file in run.state.out.iterdir()}
    with pytest.raises(SystemExit) as end:
        run(*options)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1
    assert before == {file: file.read_bytes() for file in run.state.out.iterdir()}


def test_a_folder_without_a_sample_takes_other_conditions(run):
    """The first command may end before its first sample, by a limit that was too high, or by Ctrl-C."""
    run.state.die_after = 0
    with pytest.raises(KeyboardInterrupt):
        run()
    run.state.die_after = None
    assert run("--seed", "1")["conditions"]["seed"] == 1


@pytest.mark.parametrize("content", [{"config": {}}, {"model_type": "qwen3"}])
def test_the_folder_of_a_run_or_of_a_model_is_not_written_over(run, content, capsys):
    run.state.out.mkdir()
    file = run.state.out / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        run()
    assert "no config.json of an evaluation" in capsys.readouterr().err
    assert json.loads(file.read_text()) == content


def test_other_weights_or_other_problems_under_the_same_name_are_refused(run, capsys):
    run()
    run("--chunk", "5", "--max_rows", "7", "--as_published")  # these change no sample
    with torch.no_grad():
        run.model.weight[0, 0] += 1
    with pytest.raises(SystemExit):
        run()
    assert "begun with sha256_weights" in capsys.readouterr().err
    with torch.no_grad():
        run.model.weight[0, 0] -= 1
    run.state.data.write_text(run.state.data.read_text().replace("p5", "q5"))
    with pytest.raises(SystemExit):
        run()
    assert "begun with sha256_" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--samples", "0"], "--samples 0: take more than 0"),
        (["--temperature", "0"], "--temperature 0 would give 4 times the same sample"),
        (["--limit", "0"], "--limit 0: take more than 0"),
        (["--dtype", "int8"], "--dtype int8: take float32 or bfloat16"),
        (["--data", "nothing.jsonl"], "no file or folder 'nothing.jsonl'"),
        (["--sample", "3"], "unknown option '--sample'; did you mean --samples?"),
        (["--out", "."], "holds files but no config.json"),
    ],
)
def test_bad_settings_end_with_one_sentence_and_write_nothing(run, capsys, options, words):
    with pytest.raises(SystemExit) as end:
        run(*options)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1
    assert not run.state.out.exists()


def test_a_budget_as_long_as_the_context_is_told(run, capsys):
    """open-rs issue 13: 4096 new tokens in a context of 4096 cut the prompt in silence."""
    run("--max_new_tokens", "100")
    assert "the context of 100 leaves 98 tokens after the longest prompt, not 100" in capsys.readouterr().out


def test_golds_that_are_no_mathematics_are_counted_aloud(run, capsys):
    """Such a gold was paid for any answer (open-r1 issue 293); unpaid in silence it is a score too low."""
    run.state.data.write_text(json.dumps({"problem": "p", "answer": "\\text{see the table}"}) + "\n")
    with pytest.warns(UserWarning, match="is no mathematics"):
        math_equal._warn_once.cache_clear()
        math_equal.counts["unparsable_gold"] = 9  # of a condition before this one
        summary = run()
    assert summary["with the tool"]["avg@4"] == 0.0
    assert "4 answers counted as wrong: unparsable_gold" in capsys.readouterr().out


def test_code_programs_are_graded_by_their_tests(run):
    """The real Python tool runs them, with and without the tool in the prompt."""
    good, bad = ("\n```python\n" + code + "\n```\n" for code in ("print(2 * int(input()))", "print(input())"))
    Words.vocabulary = ["Think", good, bad, "none", "<end>", "out"]
    try:
        line = {"problem": "double", "inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}
        run.state.data.write_text(json.dumps(line) + "\n")
        summary = run("--no-tool", "--samples", "8")
        rows = samples(run.state.out)
    finally:
        Words.vocabulary = ["Think", "\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "<end>", "out"]
    draws = [random.Random(f"0 0 {j}").randrange(1, 4) for j in range(8)]
    assert [r["correct"] for r in rows] == [draw == 1 for draw in draws] and 0 < draws.count(1) < 8
    assert "maj@8" not in summary["without the tool"] and all(r["answer"] is None for r in rows)


# ---- the run, with the real sampler and the real tool ------------------------------------------------------


def test_samples_are_all_different_repeat_with_the_seed_and_do_not_depend_on_chunks(run, monkeypatch):
    """evalchemy issue 75: all samples of a problem shared one seed, and avg@32 was the mean of 32 copies."""
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer([p.messages[0]["content"] for p in tiny.problems("train", 100, 0)])
    model = tiny.model(len(tokenizer)).eval()
    monkeypatch.setattr(evaluate, "load", lambda name, dtype, device: (model, tokenizer))
    for name in ("run_agent", "Sampler", "encode_prompt"):
        monkeypatch.setattr(evaluate, name, REAL[name])
    found = []
    for chunk, seed in (("1", "0"), ("4", "0"), ("4", "1")):
        run.state.out = run.state.out.with_name(f"real-{chunk}-{seed}")
        options = "--data tiny --limit 3 --max_new_tokens 12 --top_p 1 --samples 4".split()
        run(*options, "--chunk", chunk, "--seed", seed)
        found.append(samples(run.state.out))
    assert len({row["text"] for row in found[0]}) == 12
    assert found[0] == found[1] and found[1] != found[2]
    assert {row["finish"] for row in found[0]} <= {"length", "stop"}
