"""Math answers, multiple choice and the shaping terms. Code tests: test_reward_code.py."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

import math_equal
from reward import (
    choice_correct,
    extract_boxed,
    extract_choice,
    math_correct,
    outcome,
    overlong_penalty,
    tool_shaping,
)

pytestmark = pytest.mark.filterwarnings("ignore:the answer")


def boxed(answer: str) -> str:
    return f"So it is $\\boxed{{{answer}}}$."


# ---------------------------------------------------------------- the box


@pytest.mark.parametrize(
    "text, content",
    [
        (r"So it is $\boxed{\frac{7}{3}}$.", r"\frac{7}{3}"),
        (r"a set \boxed{\{1,3\}} done", r"\{1,3\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"Hence the value is $\boxed 17$.", "17"),
        (r"\(\boxed 17\).", "17"),
        (r"\boxed \frac{1}{2}.", r"\frac{1}{2}"),
        (r"\boxed{5}, put into \boxed form", "5"),
        ("Mark your final result with \\boxed ", None),
        (r"Thus \fbox{12}", "12"),
        (r"\fbox{12} is not \boxed{13}", "13"),
        ("no box", None),
        ("", None),
    ],
)
def test_the_box_is_the_last_one_and_ends_at_its_own_brace(text, content):
    """A regex up to the first } cuts \\frac{7}{3} (ai-agent-book#173); the word \\boxed alone raised an error
    (lm-evaluation-harness#3477), and so did \\fbox (#3116)."""
    assert extract_boxed(text) == content


@pytest.mark.parametrize("after", [r"\boxed{", r"\boxed{6", r"\boxed{}", r"\boxed{ }", r"\boxed{\frac{1}{2}"])
def test_a_box_begun_and_not_finished_withdraws_the_one_before(after):
    """A truncated response was paid for the answer that it was about to correct (lmms-eval#1512)."""
    assert math_correct(r"\boxed{5}", "5")
    assert not math_correct(rf"\boxed{{5}} wait, {after}", "5")


def test_two_equal_boxes_are_one_answer():
    """Two boxes close to each other were glued together, 96 and 96 to 9696 (Math-Verify#44)."""
    text = "Computed \\boxed{96}., let me recheck that.\n\n**Final Answer**\n\\boxed{96}"
    assert math_correct(text, "96") and not math_correct(text, "9696")
    text = (
        "a check gives 3,114,007; last digits 007, so \\boxed{007} holds.\n\n**Final Answer**\n\\boxed{007}"
    )
    assert math_correct(text, "7")


def test_a_long_box_is_read_whole():
    """A grader that looked at the last 100 characters lost the opening of a long box (verl#7440)."""
    answer = "+".join(f"x^{{{k}}}" for k in range(18))
    assert math_correct(f"Answer: $\\boxed{{{answer}}}$", answer)
    assert math_correct(boxed(answer), "+".join(f"x^{{{k}}}" for k in reversed(range(18))))


@pytest.mark.parametrize(
    "text",
    [
        "The final three digits of \\(1999^{2000^{2001}}\\) are:\n\\[Answer: 001\\]",
        "... thus **58**.\nFinal Answer: **58**",
        "",
    ],
)
def test_without_a_box_there_is_no_answer_and_nothing_is_evaluated(text):
    """A tower of powers in the prose was evaluated for hours (torchtitan#4442)."""
    start = time.perf_counter()
    assert not math_correct(text, "1") and not math_correct(text, "58")
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    "part", ["$", "\\(", "\\text{", " ", "1,", "_", "^", "[", "\\frac", "1/", "%", "=", "."]
)
def test_an_answer_of_one_sign_two_thousand_times_takes_no_time_to_read(part):
    """It is read in the trainer itself, where no limit of time reaches it."""
    text = part * (1990 // len(part)) + "x"
    start = time.perf_counter()
    math_equal.clean(text)
    assert time.perf_counter() - start < 0.5


# ---------------------------------------------------------------- answers that are equal, or only look it

# One pair a line: gold, answer in the box.
EQUAL = r"""
p - q | -q + p
ad-bc | -bc+ad
well-known | Well known
27 | 027
027 | 27
0 | 000
0 | -0
7 | +7
5 | 5.0
7/3 | \frac{7}{3}
\dfrac{9}{4} | 2.25
3/4 | \frac34
3/4 | \frac3{4}
1/3 | \tfrac13
1/3 | \cfrac{1}{3}
-\frac{1}{2} | \frac{1}{-2}
$\frac{1}{2}$ | 0.5
\boxed{7} | 7
0.5 | 1/2
53/8 | 6\frac{5}{8}
53/8 | 6 5/8
-53/8 | -6 5/8
-53/8 | -6\frac{5}{8}
53/8 | 6+\frac{5}{8}
1234567 | 1,234,567
23456 | 23{,}456
5000 | 5 000
5000 | 5\,000
5000 | 5~000
10,\!080 | 10080
1200 | 1.2\times 10^{3}
1200 | 1.2e3
1000000 | 10^6
.0000672 | 6.72\times 10^{-5}
1/3 | 0.\overline{3}
1/3 | 0.333333
1/3 | 0.3333333333333333
0.3 | 0.30000000000000004
\sqrt{23} | 4.795831523312719
\frac{20000}{\pi} | 6366.197723675814
10^{10}\sqrt{23} | 47958315233.12719
e | 2.718281828459045
45\% | 45
45 | 45\%
0.45 | 45\%
1/2 | 50\%
42 | 42.
42 | 42,
1/2 | \frac{1}{2}.
42 | 42\text{ cm}
42 | 42\ \mathrm{cm}
42 | 42 apples
42 | \$42
60 | 60^\circ
5\text{ cm} | 5\text{ centimeters}
15\mbox{ cm}^2 | 15\text{ square cm}
\frac{270}7\text{ degrees} | \frac{270}{7}^\circ
5000000 | 5\text{ million}
29 | \text{29}
29 | \mathbf{29}
\text{(E)} | E
\text{A}, \text{C} | C, A
\text{east} | East
Evelyn | \text{Evelyn}
5 | x=5
x=5 | 5
5 | n=10/2=5
12 | x+y=12
y = 2x + 3 | y = 3 + 2x
2x+4y-3=0 | y=-\frac{1}{2}x+\frac{3}{4}
5x - 7y + 11z + 4 = 0 | 5x - 7y + 11z = -4
(0, 7.5) | 0<x<7.5
0<x<7.5 | (0, 7.5)
x>3 | (3,\infty)
x<2 \text{ or } x>3 | (3,\infty) \cup (-\infty,2)
(-\infty,3] | x \le 3
x \in [-2,7] | [-2,7]
x \in [-2,7] | -2 \le x \le 7
(-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2)
1,2,3 | 3,2,1
1,2,3 | 3, 1 \text{ and } 2
\{1,3\} | \{3,1\}
-2,1 | x=1 \text{ or } x=-2
\pm 35 | -35, 35
1 \pm \sqrt{19} | 1-\sqrt{19}, 1+\sqrt{19}
(3,\frac{\pi}{2}) | \left( 3, \pi/2 \right)
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1/2\\2\end{pmatrix} | \begin{pmatrix}\frac12\\ 2\end{pmatrix}
\sqrt{3} | \sqrt3
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}}
x^2-7x+10 | (x-2)(x-5)
0.5x | \frac{x}{2}
y=\frac{1}{2}x+3 | y = 1/2x + 3
2/7 x | \frac{2x}{7}
11,\! 111,\! 111,\! 100 | 11111111100
\begin{pmatrix}16/49\\48/49\end{pmatrix} | \begin{pmatrix}\frac{16}{49}\\[4pt]\frac{48}{49}\end{pmatrix}
5 | 5 lbs
60 | 60 mph
12 | 12\text{ m s}^{-1}
.0000672 | 6.72\times 10^-5
x^{-1} | x^-1
x=1 \text{ or } x=2 | 2, 1
385 | \sum_{k=1}^{10} k^2 = 385
4 | \int_0^2 x^3 dx = 4
10^{-1.5} | 10^-1.5
B-x+\frac{C}{x} | B+\frac{C}{x}-x
R-r | -r+R
2\lambda+1 | 1+\lambda\cdot 2
a=1,b=2 | b=2, a=1
6-5i | -5\mathrm{i}+6
2i | (1+i)^2
10! | 3628800
0 | \sqrt{2}\sqrt{3}-\sqrt{6}
4210_{5} | 4210_5
\text{no solution} | \text{No solution.}
"""
DIFFERENT = r"""
p - q | p + q
p - q | p, q
R - r | r - R
ad-bc | ad+bc
\text{p - q} | p + q
well-known | well+known
70 | 007
8 | 9
12345678901 | 12345678902
1/3 | 0.333
\sqrt{23} | 4.8
5 | 5.0000001
.0000672 | 0.000067
10^{-20} | 2\times 10^{-20}
\frac{\pi}{10^{20}} | \frac{2\pi}{10^{20}}
10^{-20}x+1 | 1
0 | 10^{-12}
6 | 6 5/8
65/8 | 6 5/8
123 | 1,2,3
1234 | 12,34
12 | 1 2
0.45 | 45
45\% | 4500
45 | 0.45
\pm 35 | 35
1 \pm \sqrt{19} | 1+\sqrt{19}
1-\frac{2}{e} | 1+\frac{2}{e}
11:00 | 1:00
2:30 | 1:15
3\text{ p.m.} | 3\text{ a.m.}
5\text{ cm} | 5\text{ m}
15\text{ cm}^2 | 15\text{ cm}^3
\$5 | 5\text{ cents}
5 | 5\text{ million}
5 | 5\text{ or more}
5 | 5 \text{ or } 6
2 | 2 xy
5 | n=5, m=7
5 | x+1=5
5 | 9=5
x=5 | y=5
x+y=5 | 5
385 | \sum_{k=1}^{10} k^2
10^{-1.5} | 0.05
4 | \int_0^2 x^3 dx
a=1,b=2 | 2,1
5\text{ lb} | 5\text{ oz}
5x-2y+1=0 | 5x+2y+1=0
y = 2x + 3 | y = 2x + 4
[0,4) | (0,4)
x>3 | y>3
(0,9) \cup (9,36) | (0,36)
(1,-2) | (-2,1)
-2,1 | (-2,1)
1,1,2 | 1,2,2
1,2 | 1,2,3
x=1,y=2 | x=2,y=1
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&5\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
B-x+\frac{C}{x} | P+\frac{Q}{x}-x
R+r | 2r
\frac{x}{2} | \frac{1}{2x}
R-r | r-R
x_1 | x_2
x' | x
204_5 | 204_6
204_5 | 204
204_5 | 54
\text{east} | seat
\text{Yes} | \text{No}
\text{see figure} | 3
-\infty | \infty
3 | \frac{1}{0}
"""
SELF = r"""\text{(E)} | x \in [-2,7] | 10\% | \$32{,}348 | \begin{pmatrix}1&2\\3&4\end{pmatrix}
 | (3,\frac{\pi}{2}) | \text{Tuesday} | 6-5i | \frac43 | .5 | 5\text{ cm} | -\infty | 2516_8
 | x^2-7x+10 | \text{see figure}"""


def pairs(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("gold, answer", pairs(EQUAL))
def test_equal_answers_are_equal_however_they_are_written(gold, answer):
    """math-verify 0.9.0 itself says no to 42., 6 5/8, 5 000 and 1.2e3, and to (0, 7.5) against 0<x<7.5."""
    assert math_correct(boxed(answer), gold)


@pytest.mark.parametrize("gold, answer", pairs(DIFFERENT))
def test_answers_that_only_look_equal_are_not(gold, answer):
    """math-verify 0.9.0 itself pays 0.000067 for .0000672, 204_6 for 204_5, 2r for R+r, 2\\cdot10^{-20} for
    10^{-20}, 1:15 for 2:30, x+1=5 for 5, 5 m for 5 cm, (-2,1) for -2,1 and 5 million for 5."""
    assert not math_correct(boxed(answer), gold)


@pytest.mark.parametrize("gold", [g.strip() for g in SELF.split(" | ")])
def test_every_gold_answer_equals_itself(gold):
    """lm-evaluation-harness#2212. With other spacing too, so that it is not only the same text."""
    assert math_correct(boxed(gold), gold)
    assert math_correct(boxed(f" {gold} ."), gold)


def test_a_sample_of_math_answers_is_pairwise_different():
    """Of these 24 answers (MATH-500 style) no two are equal; all ordered pairs are graded."""
    golds = r"""-2,1 | (-2,1) | (-2,-1) | 2,-1 | \frac{1}{4} | -\frac{1}{4} | 40_9 | 40 | 4.0001 | \sqrt{51}
    | \sqrt{53}
        | 2k | 2k+2 | p-q | q-p | 3 \pm 2\sqrt{2} | 3+2\sqrt{2} | \text{east} | \text{even} | (5,\infty)
        | [5,\infty) | x=5 | y=5 | 12\pi"""
    golds = [g.strip() for g in golds.split(" | ")]
    equal = [(a, b) for a in golds for b in golds if a != b and math_correct(boxed(b), a)]
    assert equal == []


# ---------------------------------------------------------------- the process behind it


def test_a_gold_that_is_no_mathematics_is_never_paid_for_and_is_counted():
    """Unparsable golds were paid 1.0 whatever the answer was (open-r1#293)."""
    before = math_equal.counts["unparsable_gold"]
    with pytest.warns(UserWarning, match="is no mathematics"):
        assert not math_correct(boxed("3"), r"\text{see the figure}")
    assert not math_correct(boxed("3"), r"\frac{1}{")
    assert not math_correct(boxed("3"), "???")
    assert math_equal.counts["unparsable_gold"] == before + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned of once, counted every time
        assert not math_correct(boxed("4"), "???")
    assert not math_correct(r"\boxed{}", "") and not math_correct(boxed("3"), "")


def test_an_answer_that_never_ends_costs_its_limit_and_no_more():
    """sympy does not come back from a tower of powers (verl#469); the next answer must be graded as ever."""
    for tower, gold in ((r"9^{9^{9^{9}}}", "1"), (r"9^{9^{9^{9}}}-1", "x")):
        start, before = time.perf_counter(), math_equal.counts["timeout"]
        assert not math_correct(rf"\boxed{{{tower}}}", gold)
        assert time.perf_counter() - start < 6 and math_equal.counts["timeout"] == before + 1
        assert math_correct(boxed("3"), "3") and math_correct(r"\boxed{\frac{x}{2}}", "0.5x")


def test_the_gold_is_asked_in_the_place_of_the_gold(monkeypatch):
    """A comparison that is not symmetric was called the wrong way round (Math-Verify#10, sieval#18)."""
    asked = []
    monkeypatch.setattr(
        math_equal._process, "ask", lambda gold, answer: asked.append((gold, answer)) or "True"
    )
    assert math_correct(boxed("0<x<7.5"), "(0, 7.5)")
    assert asked == [("(0, 7.5)", "0<x<7.5")]


def test_any_thread_may_ask():
    """Graders built on SIGALRM raise, or pay nothing, outside the main thread (trl#5281)."""
    found = []
    ask = [
        threading.Thread(
            target=lambda k=k: found.append(math_correct(rf"\boxed{{\frac{{2x}}{{{k}}}}}", f"2/{k} x"))
        )
        for k in range(3, 11)
    ]
    [thread.start() for thread in ask]
    [thread.join() for thread in ask]
    assert found == [True] * 8


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("4", "__import__('os').system('touch pwned')"),
        (r"\pi", r"\pi__import__('os').system('touch pwned')"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", "[open('pwned','w').write('x'), 2]"),
        ("[1,2]", "[open('pwned','w').write('x'), 2]"),
        ("4", "eval(compile('2+2','','eval'))"),
        ("__import__('os').system('touch pwned')", "4"),
    ],
)
def test_an_answer_is_never_run(gold, answer, tmp_path, monkeypatch):
    """sympy.sympify and parse_expr run their text as Python (CVE-2026-6878 in verl; verl#7603)."""
    monkeypatch.chdir(tmp_path)
    math_equal._process.stop()  # so that its working directory is this one
    start = time.perf_counter()
    assert not math_correct(boxed(answer), gold)
    assert time.perf_counter() - start < 5 and list(tmp_path.iterdir()) == []


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_a_right_integer_costs_microseconds_and_starts_no_process():
    """Training grades thousands of integers a step; a process or a parser for each would cost minutes."""
    program = r"""
import time, reward, math_equal
text = "thinking " * 5000 + r"\boxed{70}"
start = time.perf_counter()
assert all(reward.math_correct(text, "70") and not reward.math_correct(text, "71") for _ in range(1000))
print((time.perf_counter() - start) / 2000)
assert reward.math_correct(r"\boxed{\frac{7}{3}}", "7/3")
assert math_equal._process.child is None
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 100e-6  # measured: 4 microseconds


def test_the_process_dies_with_its_parent():
    """A worker that outlives a killed run keeps its memory, and the next run adds another."""
    program = r"""
import os, signal, reward, math_equal
assert reward.math_correct(r"\boxed{x/2}", "0.5x")
print(math_equal._process.child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    child = int(run.stdout)
    for _ in range(100):
        try:
            os.kill(child, 0)
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":  # dead, and nobody here to bury it
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} still runs 10 s after its parent was killed")


def test_a_forked_child_starts_its_own_process():
    """Parent and child reading one pipe would hand each other's verdicts out."""
    assert math_correct(r"\boxed{x/2}", "0.5x")
    child = os.fork()
    if child == 0:
        fresh = math_equal._process.child is None and math_correct(r"\boxed{x/3}", r"\frac{x}{3}")
        math_equal._process.stop()
        os._exit(0 if fresh else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert math_correct(r"\boxed{x/4}", r"\frac{x}{4}")


def test_an_interrupted_question_leaves_no_reply_behind():
    """In a notebook one keeps going after Ctrl-C: the late reply would answer the next question."""
    usual = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            math_correct(r"\boxed{9^{9^{9^{9}}}-2}", "x")
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert math_correct(r"\boxed{x/2}", "0.5x") and not math_correct(r"\boxed{x/3}", "0.5x")


def test_a_system_that_starts_no_process_is_asked_again_and_then_named(monkeypatch):
    """Processes run out for a moment on a crowded machine; the bare error of fork tells nobody what to do."""
    start, refusals = subprocess.Popen, [BlockingIOError(11, "Resource temporarily unavailable")]

    def popen(*args, **more):
        if refusals:
            raise refusals.pop()
        return start(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    math_equal._process.stop()
    assert math_correct(r"\boxed{x/2}", "0.5x")
    math_equal._process.stop()
    refusals.extend([BlockingIOError(11, "Resource temporarily unavailable")] * 5)
    with pytest.raises(RuntimeError, match="no process can be started, .*unavailable"):
        math_correct(r"\boxed{x/2}", "0.5x")


def test_a_response_of_nothing_but_open_boxes_is_read_in_time():
    """A collapsed policy repeats itself; scanning each open box to the end would be quadratic."""
    start = time.perf_counter()
    assert not math_correct(r"\boxed{" * 20000, "1")
    assert not math_correct(boxed(" , " * 20000), "1")
    assert time.perf_counter() - start < 2


# ---------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    "response, letter",
    [
        ("we get \\boxed{\\langle K\\rangle \\ll \\Delta B}\n**Answer: D**", "D"),
        ("The answer is C. Note that A is a frequent trap.", "C"),
        ("ANSWER IS D. B is wrong.", "D"),
        ("Answer: **D**", "D"),
        ("I considered (A), but it fails. Final answer: D.", "D"),
        ("The correct answer is d.", "D"),
        ("Actually this is hard and I am not sure", None),
        ("Error: rate limited", None),
        ("", None),
        ("\\boxed{B}\nOption A would need a larger field.", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("\\boxed{C. 3.2 eV}", "C"),
        ("\\boxed{A, B}", None),
        ("\\boxed{A and C}", None),
        ("\\boxed{A} no, \\boxed{B}", "B"),
        ("\\boxed{A} no, \\boxed{", None),
        ("\\boxed{c}", "C"),
        ("\\boxed{Option C}", "C"),
        ("The final answer is $\\boxed{C}$", "C"),
        ("Answer:\n\n**D**", "D"),
        ("### Answer\nB", "B"),
        ("<answer>D</answer>", "D"),
        ("The answer is: D) 3.2 eV", "D"),
        ("Answer: A) the field", "A"),
        ("So the answer is A.", "A"),
        ("The answer is A because the field is zero.", "A"),
        ("The answer is a vector field.", None),
        ("Answer: I'm not sure", None),
        ("The answer is A or B.", None),
        ("The correct answer is C, I am confident.", "C"),
        ("The answer is H, I", None),
        ("That is why the answer is C.", "C"),
        ("That's why the answer is C.", "C"),
        ("The answer is C, I'm sure.", "C"),
        ("I wonder why the answer is C.", None),
        ("The answer is not A.", None),
        ("I don't think the answer is B.", None),
        ("The answer is 42.", None),
        ("Answer: None of the above", None),
        ("C is tempting. The correct option is (B).", "B"),
        ("Option B is correct.", "B"),
        ("So I choose C.", "C"),
        ("Let me think.\n(D)", "D"),
        ("D", "D"),
        ("A and B are wrong.", None),
    ],
)
def test_the_choice_is_the_letter_that_was_stated(response, letter):
    """Graders took the A of "Answer", the last letter of the text, or A when there was none (OPD-V#2,
    omlx#3668,
    sia#57, Skills#1526, marin#7527)."""
    assert extract_choice(response) == letter
    assert not any(choice_correct(response, other) for other in "ABCD" if other != letter)
    assert letter is None or choice_correct(response, letter)


def test_a_gold_choice_is_one_letter():
    assert choice_correct("Answer: D", "(d)") and not choice_correct("", "A")
    with pytest.raises(ValueError, match="one letter A to J"):
        choice_correct("Answer: D", "the fourth")


# ---------------------------------------------------------------- shaping


def test_a_wrong_answer_loses_less_for_each_tool_round_down_to_a_bound():
    """The bound is min: with max every wrong answer would earn at least the bound. Right ones earn 1."""
    found = [tool_shaping(False, n) for n in (0, 1, 2, 3, 4, 5, 100)]
    assert found == pytest.approx([-1.0, -0.9, -0.8, -0.7, -0.6, -0.6, -0.6], abs=1e-12)
    assert [tool_shaping(True, n) for n in (0, 1, 100)] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="-1"):
        tool_shaping(False, -1)


def test_the_overlong_penalty_starts_at_the_buffer_and_ends_at_minus_one():
    """The buffer began at the wrong place (SkyRL#755, OpenRLHF#1091); past max_length it stays at -1."""
    assert [overlong_penalty(n, 100, 20) for n in (79, 80, 100, 101, 500)] == [0, 0, -1, -1, -1]
    assert [overlong_penalty(n, 100, 20) for n in (81, 90)] == pytest.approx([-0.05, -0.5], abs=1e-12)
    lengths = [16000, 16384, 16385, 18432, 20480]
    found = [overlong_penalty(n, 20480, 4096) for n in lengths]
    assert found == [0, 0, -0.000244140625, -0.5, -1]
    assert [overlong_penalty(n, 100, 0) for n in (0, 100, 101)] == [0, 0, -1]
    for buffer in (-1, 101):
        with pytest.raises(ValueError, match=str(buffer)):
            overlong_penalty(5, 100, buffer)


def test_outcome_asks_the_right_grader():
    assert outcome("math", boxed("0.5"), "1/2") == 1.0 and outcome("math", boxed("C"), "1") == 0.0
    assert outcome("choice", boxed("C"), "C") == 1.0 and outcome("choice", "", "C") == 0.0
    assert outcome("code", "no program", {"inputs": [""], "outputs": ["1"]}) == 0.0
    with pytest.raises(ValueError, match="essay"):
        outcome("essay", "", "")
