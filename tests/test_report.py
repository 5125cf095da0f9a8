"""The page of a run: what it says, that it runs nothing a model wrote, and that it works in a browser.

Users of verifiers (#433) and prime-rl (#834) ask what their model is doing; a page answers only if it is
right on which token, call and number belong together. The run is made here: a byte-level tokenizer, 30 steps,
groups with a repaired call, one of hostile text. The browser tests drive Chromium through its pipe.
"""

import base64
import fcntl
import json
import math
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import metrics
import report

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
EVIL += "\u2028\x1b[31m\u202e"
REPORT = Path(report.__file__)


def call(code: str) -> str:
    arguments = json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=False)
    return f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"


def result(output: str) -> str:
    start = f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n"
    return start + "<|im_start|>assistant\n"


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["What is the remainder when 17 to the power 23 is divided by 41?", call("print(17 ** 23 % 41)")]
    corpus += ["Use Python. That failed. I fix it. The answer is \\boxed{17}.", result("SyntaxError")]
    options = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, **options)
    tokenizer.train_from_iterator(corpus * 9, trainer)
    return tokenizer


def make_trajectory(tokenizer, rng: random.Random, question: str, turns: list[tuple], **fields) -> dict:
    """turns: ("policy", text) and ("tool", text, status, seconds) in order."""
    row = {k: [] for k in ("ids", "mask", "logprobs", "old_logprobs", "entropy", "ratio", "tool_results")}
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for by, text, *status in [("prompt", prompt), *turns]:
        ids = tokenizer.encode(result(text) if by == "tool" else text, add_special_tokens=False).ids
        m = int(by == "policy")
        entropy = [m * abs(rng.gauss(0, 0.4)) for _ in ids]
        logp = [-m * rng.expovariate(1 / (e + 0.02)) for e in entropy]
        row["ids"] += ids
        row["mask"] += [m] * len(ids)
        row["logprobs"] += logp
        row["old_logprobs"] += [p + m * rng.gauss(0, 1e-6) for p in logp]
        row["entropy"] += entropy
        row["ratio"] += [math.exp(m * rng.gauss(0, 0.12)) for _ in ids]
        if by == "tool":
            row["tool_results"].append({"output": text, "status": status[0], "seconds": status[1]})
        row.setdefault("prompt_len", len(ids))
    return row | {"finish": "stop"} | fields


def make_group(tokenizer, rng: random.Random, index: int, family: str, skill: float, step: int) -> list[dict]:
    a, b, s = rng.randint(11, 99), rng.randint(11, 99), rng.randint(11, 29)
    question = f"What is the remainder when {a} to the power {s} is divided by {b}?"
    answer, rows = str(pow(a, s, b)), []
    for j in range(8):
        good, kind = f"print({a} ** {s} % {b})", rng.random()
        turns = [("policy", "Use Python.\n" + call(good)), ("tool", answer, "ok", 0.0042)]
        if j == 1 or kind > 0.9:
            bad = [("policy", "Use Python.\n" + call(good[:-1]))]
            bad += [("tool", "SyntaxError: '(' was never closed", "error", 0.003)]
            turns = bad + [("policy", "That failed. I fix it.\n" + call(good))] + turns[1:]
        correct = j < 8 * skill
        turns += [("policy", f"The answer is \\boxed{{{answer}}} ✓.<|im_end|>")]
        if not correct:
            turns = [("policy", f"I think it is \\boxed{{{rng.randint(1, 99)}}}.<|im_end|>")]
        reward = {"correct": 2.0 * correct - 1, "overlong": 0.0}
        fields = {"step": step, "prompt_index": index, "sample_index": j, "family": family, "answer": answer}
        fields |= {"correct": correct, "reward": sum(reward.values()), "reward_parts": reward}
        fields |= {"advantage": 0.9 if correct else -0.9}
        rows.append(make_trajectory(tokenizer, rng, question, turns, **fields))
    return rows


COURSES = """
reward/mean -0.4 1.3, reward/correct 0.3 0.65, reward/overlong -0.01 0, reward/tool 0 0
loss 1.5 -1, lr 1e-3 0, grad_norm 1 0, tokens 900 0
tool/calls 0.9 0.15, policy/dual 0 0, eval/tool_success 0.7 0.25, eval/tool_repaired 0.2 -0.15
tool/used 0.6 0.38, tool/success 0.72 0.24, tool/repaired 0.18 -0.14, tool/seconds 0.006 0
correct/mod 0.35 0.6, correct/bits 0.2 0.6
length/policy_tokens 48 9, length/tool_tokens 22 4, length/truncated 0.02 0, policy/entropy 0.12 -0.1
policy/grad_norm 0.5 -0.3, policy/clip_low 2e-4 0, policy/clip_high 4e-4 0, policy/kl_old 1e-3 0
policy/loss -0.02 0.01
group/resampled 2 3, time/prefill 0.4 0, time/decode 1.2 0, time/sampling 0.3 0, time/idle_slots 0.5 0
sampler/gap_mean 2e-7 0, sampler/gap_max 4e-6 0, group/zero_variance 0.1 0.6, speed/tokens_per_s 8200 0
time/rollout 2.1 0, time/reward 0.05 0, time/tool_wait 0.4 0, time/train 1.4 0, time/step 3.6 0
"""  # key, where it starts, how far it rises


def make_row(step: int, rng: random.Random) -> dict:
    x = 1 - math.exp(-step / 8)
    row = {"step": step}
    if step % 5 == 0:
        p, half = 0.32 + 0.64 * x, 0.06 - 0.04 * x
        row |= {
            "eval/correct": p,
            "eval/low": p - half,
            "eval/high": p + half,
            "eval/tool_used": 0.6 + 0.38 * x,
        }
        for i, family in enumerate(("mod", "bits", "digits")):
            row[f"eval/correct/{family}"] = 0.3 + (0.66 - i / 9) * x
    if step:
        for key, start, rise in (c.split() for c in COURSES.strip().replace("\n", ", ").split(", ")):
            row[key] = (float(start) + float(rise) * x) * (1 + rng.gauss(0, 0.03))
    return row


def make_run(folder: Path, seed: int = 0, steps: int = 30) -> Path:
    """A run with all files of a real one; one group of each step is hostile."""
    rng, tokenizer = random.Random(seed), make_tokenizer()
    for name in ("trajectories", "tokenizer"):
        (folder / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"preset": "tiny", "seed": seed, "steps": steps, "clip_low": 0.2, "clip_high": 0.28}
    content = {"config": config, "versions": {"torch": "2.13"}, "command": ["grpo.py", "--seed", str(seed)]}
    (folder / "config.json").write_text(json.dumps(content))
    lines = [json.dumps(make_row(s, rng)) for s in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in range(5, steps + 1, 5):
        rows = make_group(tokenizer, rng, 0, "mod", 0.2 + 0.6 * step / steps, step)
        rows += make_group(tokenizer, rng, 1, "digits", 0.4, step) + make_group(
            tokenizer, rng, 2, "bits", 0.5, step
        )
        hostile = [("policy", call(EVIL)), ("tool", EVIL, "killed", 0.1), ("policy", "é😀 " + EVIL)]
        fields = {"step": step, "prompt_index": 9, "sample_index": 0, "family": EVIL, "answer": EVIL}
        fields |= {"correct": False, "reward": -1.0, "reward_parts": {EVIL: 1.0}, "advantage": 0.0}
        rows.append(make_trajectory(tokenizer, rng, EVIL, hostile, **fields))
        path = folder / "trajectories" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "tiny")
    report.write_page([metrics.read_run(folder)])
    return folder


def page_data(folder: Path) -> dict:
    text = (folder / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    assert not re.search(r"[:,\[](NaN|-?Infinity)", data)  # Python reads them, browsers do not
    return json.loads(data)


class Browser:
    """Chromium over its debugging pipe: commands to fd 3, answers from fd 4, each JSON and a zero."""

    def __init__(self, folder: Path):
        (child_in, self.write), (self.read, child_out) = os.pipe(), os.pipe()
        child_in, child_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (child_in, child_out))
        flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        flags += "disable-component-update disable-sync hide-scrollbars remote-debugging-pipe"
        command = ["chromium", *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={folder}"]
        pipes = lambda: (os.dup2(child_in, 3), os.dup2(child_out, 4))  # noqa: E731
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, close_fds=False, preexec_fn=pipes, **quiet)
        os.close(child_in), os.close(child_out)
        self.buffer, self.count, self.session, self.events = b"", 0, None, []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params) -> dict:
        self.count += 1
        command = {"id": self.count, "method": method, "params": params}
        command |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(command).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            while b"\0" in self.buffer:
                text, self.buffer = self.buffer.split(b"\0", 1)
                message = json.loads(text)
                if message.get("id") == self.count:
                    assert "error" not in message, message
                    return message["result"]
                self.events.append(message)
            if select.select([self.read], [], [], 1)[0]:
                data = os.read(self.read, 1 << 20)
                assert data, "Chromium ended"
                self.buffer += data
        raise AssertionError(f"no answer to {method}")

    def js(self, code: str):
        answer = self("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        end = time.monotonic() + 30
        while self.js("document.readyState") != "complete" and time.monotonic() < end:
            time.sleep(0.05)

    def complaints(self) -> list:
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [e for e in self.events if e.get("method") in kinds]

    def screenshot(self, path: Path) -> None:
        image = self("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def close(self) -> None:
        self.session = None
        try:
            self("Browser.close")
            self.process.wait(10)
        finally:
            self.process.kill()
            os.close(self.write), os.close(self.read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not shutil.which("chromium"):
        pytest.skip("chromium is not on the PATH (Debian: apt-get install chromium)")
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def test_page_has_every_step_and_a_choice_of_trajectories(run):
    """A page that keeps only the last rows, or the first groups, shows no learning: both ends count."""
    data = page_data(run)
    assert [r["step"] for r in data["runs"][0]["rows"]] == list(range(31))
    # there are 5, 10, ..., 30: both ends and three between
    assert [g["step"] for g in data["groups"]] == [s for s in (5, 10, 15, 25, 30) for _ in range(4)]
    for group in data["groups"]:
        rewards = [r["reward"] for r in group["rows"]]
        assert rewards == sorted(rewards, reverse=True)
    titles = [p["title"] for p in data["panels"]]
    assert titles == [p[0] for p in metrics.PANELS]
    assert data["clip"] == [0.2, 0.28]


def test_every_panel_has_a_sentence_and_every_required_key_a_panel():
    """A curve nobody can define is worse than none: each panel has its sentence, each key a panel."""
    keys = [k for p in metrics.PANELS for k in p[2].split()]
    assert all(p[3].endswith(".") for p in metrics.PANELS) and len(keys) == len(set(keys))
    required = """reward/mean reward/correct reward/overlong eval/correct length/policy_tokens
        length/tool_tokens length/truncated tool/calls tool/used tool/success tool/repaired tool/seconds
        policy/entropy policy/clip_low policy/clip_high policy/grad_norm policy/kl_old sampler/gap_mean
        sampler/gap_max group/zero_variance time/rollout time/tool_wait time/reward time/train time/step
        time/prefill time/decode time/sampling policy/kl_ref speed/tokens_per_s"""
    assert set(required.split()) <= set(keys)
    table = (REPORT.parent / "README.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    keys_of = [line.split("|")[1] for line in table.splitlines() if line[:2] == "| "]
    named = {k for cell in keys_of for k in re.findall("`([^`]+)`", cell)}
    named = {k.replace("FAMILY", "*") for k in named} - set(report.BAND["eval/correct"])
    assert len(named) > 30 and named == set(keys)  # told there, drawn here


def test_unknown_keys_get_a_panel_and_a_repeated_step_counts_once(tmp_path):
    """A run that was killed and resumed writes steps twice; an extension logs keys that no panel knows."""
    lines = [{"step": 1, "reward/mean": 0.5, "mine/x": 1}]
    lines += [{"step": 2, "reward/mean": 7.0}, {"step": 2, "reward/mean": 0.25}]
    lines += [{"step": 3, "reward/mean": float("nan"), "note": "text"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = metrics.read_run(tmp_path)
    assert run["rows"] == [lines[0], lines[2], {"step": 3}]
    assert [(p["title"], p["keys"]) for p in metrics.panels([run])] == [
        ("Reward", ["reward/mean"]),
        ("mine/x", ["mine/x"]),
    ]


def test_what_a_model_wrote_stays_data(run):
    """Written as it is, a sampled "</script>" ends the data and what follows runs on the reader's machine."""
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2 and page.count("<script") == 2
    assert "<img" not in page and "\u2028" not in page and "\x1b" not in page
    hostile = [g for g in page_data(run)["groups"] if g["family"] == EVIL]
    assert hostile[-1]["rows"][0]["segments"][2]["calls"][0]["output"] == EVIL  # all of it, as data
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)


def test_name_of_a_run_cannot_break_the_page(tmp_path):
    """A folder's name is text too: here it looks like markup and like a place the page is filled in at."""
    folder = make_run(tmp_path / "a<b>@DATA&@SHA", steps=5)
    report.write_page([metrics.read_run(folder)])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<title>a&lt;b&gt;@DATA&amp;@SHA</title>" in page and page.count('"panels"') == 1


def test_token_text_keeps_characters_that_span_tokens():
    """Decoded one by one, an emoji is four replacement characters that nobody can read or search for."""
    tokenizer = make_tokenizer()
    text = "é😀 ok"
    ids = tokenizer.encode(text).ids
    found = report.pieces(ids, lambda i: tokenizer.decode(i, skip_special_tokens=False), {})
    assert "".join(found) == text
    assert found[:6] == ["", "é", "", "", "", "😀"]  # 2 and 4 bytes in UTF-8, one token each here
    alone = report.pieces(ids[:1] + ids[2:4], lambda i: tokenizer.decode(i, skip_special_tokens=False), {})
    assert len(alone) == 3 and alone[0] == ""  # bytes that never become a character do no harm


def test_words_keep_their_spaces_when_decoded_one_by_one(tmp_path):
    """Tokenizers of the Llama 2 kind drop the space of a first word: the text runs together."""
    folder = make_run(tmp_path / "run", steps=5)
    words = Tokenizer(models.WordLevel({"▁two": 0, "▁words": 1, "!": 2}, unk_token="!"))
    words.decoder = decoders.Metaspace()
    words.save(str(folder / "tokenizer" / "tokenizer.json"))
    row = {"prompt_index": 0, "reward": 1.0, "prompt_len": 0, "ids": [0, 1, 2, 7]}
    row |= {"mask": [1, 1, 1, 1], "logprobs": [-1.0, -1.0, -1.0, -1.0]}
    (folder / "trajectories" / "step_000005.jsonl").write_text(json.dumps(row))
    report.write_page([metrics.read_run(folder)])
    assert [text for _, text in page_data(folder)["pieces"]] == [
        " two",
        " words",
        "!",
        "⟨7⟩",
    ]


def test_calls_are_matched_with_their_results_and_numbers_with_policy_tokens():
    """Counted by turns, two calls in one turn, or a result the policy never saw, shift all later results."""
    tokenizer = make_tokenizer()
    two = call("a = 1").removesuffix("<|im_end|>") + "\n" + call("b = 2")
    turns = [("policy", two), ("tool", "first", "ok", 0.5), ("policy", call("c = 3"))]
    row = make_trajectory(tokenizer, random.Random(0), "q", turns)
    row["tool_results"] += [{"output": o, "status": "error", "seconds": 2.0} for o in ("second", "third")]
    at = [i for i, m in enumerate(row["mask"]) if m]
    row["logprobs"][at[0]], row["old_logprobs"][at[0]], row["entropy"] = -1.5, -1.25, row["entropy"][:-1]
    out = report.trajectory(row, lambda ids: (ids, tokenizer.decode(ids, skip_special_tokens=False)))
    assert [s["by"] for s in out["segments"]] == ["prompt", "policy", "tool", "policy", "tool"]
    keys = ("code", "output", "status", "seconds")
    shown = [[tuple(c[k] for k in keys) for c in s["calls"]] for s in out["segments"]]
    assert shown[2] == [("a = 1", "first", "ok", 0.5), ("b = 2", "second", "error", 2.0)]
    assert shown[4] == [("c = 3", "third", "error", 2.0)] and out["segments"][4]["tokens"] == []
    assert sum((s["tokens"] for s in out["segments"]), []) == row["ids"]
    assert len(out["logp"]) == len(at)
    assert (out["logp"][0], out["gap"][0]) == (-1.5, 0.25)  # the gap is the trainer minus the sampler
    assert out["entropy"] is None  # a number short: not shown rather than shown at the wrong token


def test_observations_state_the_numbers_they_rest_on():
    """Verdicts without numbers cannot be checked. By hand: ten rows, so a fifth is two rows at either end."""
    rows = [{"step": i, "tool/used": 1.0, "tool/calls": 2.0, "tool/success": 0.5} for i in range(10)]
    rows[0] |= {"eval/correct": 0.3, "eval/low": 0.25, "eval/high": 0.35}
    rows[9] |= {"eval/correct": 0.9, "eval/low": 0.36, "eval/high": 0.95}
    rows[9] |= {"tool/calls": 1.0, "tool/success": 0.95}
    found = {what: (here, shown) for what, _, _, here, shown in metrics.observations(rows)}
    assert found["Right answers rise"] == ("held out 30 % (25 to 35) → 90 % (36 to 95)", True)
    assert found["Most calls run"] == ("calls that ran 50 % → 72.5 %", True)  # (0.5 + 0.95) / 2
    assert found["Fewer and better calls"][1] is True and "2.00 → 1.50" in found["Fewer and better calls"][0]
    assert found["Entropy stays in a band"] == (None, None)
    gone = [{"step": i, "tool/used": 0.0, "tool/calls": 0.0} for i in (8, 9)]  # the tool was given up
    assert metrics.observations(rows[:8] + gone)[3][4] is False
    rows[9]["eval/low"] = 0.34
    assert metrics.observations(rows)[0][4] is False
    assert all(here is None and shown is None for *_, here, shown in metrics.observations(rows[:1]))


def run_main(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(REPORT), *args], capture_output=True, text=True, timeout=60)


def test_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path):
    """A traceback for a mistyped path is the first thing many users of a tool see."""
    done = run_main(str(tmp_path / "nothing"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is not a run" in done.stderr


BEGUN = ["", '{"step": 0, "eval/cor', '{"step": 4, "reward/mean": 1}\n{"st', "[1]\nx\n"]


@pytest.mark.parametrize("written", BEGUN)
def test_page_of_a_run_that_has_only_begun(tmp_path, capsys, written):
    """The page is also made while the run writes: half a line, one row, a broken trajectory, no tokenizer."""
    (tmp_path / "metrics.jsonl").write_text(written)
    (tmp_path / "trajectories").mkdir()
    good = {
        "prompt_index": 0,
        "reward": 1,
        "ids": [0, 1],
        "mask": [0, 1],
        "logprobs": [0, -1],
        "prompt_len": 1,
    }
    lines = [{"prompt_index": 0}, good, good | {"prompt_index": 1, "mask": [0]}, good | {"prompt_index": 2}]
    lines[3]["advantage"] = float("nan")
    text = "\n".join(json.dumps(x) for x in lines) + '\n{"prompt_index": 0, "rew'
    (tmp_path / "trajectories" / "step_000004.jsonl").write_text(text)
    report.write_page([metrics.read_run(tmp_path)])
    data, said = page_data(tmp_path), capsys.readouterr().err
    assert len(data["runs"][0]["rows"]) == written.count('"step": 4')
    assert [len(g["rows"]) for g in data["groups"]] == [1, 1]
    assert data["pieces"][0] == [0, "⟨0⟩"]
    assert "config.json" in said and "tokenizer" in said
    assert said.count("left out") == 2 + written.count("]") + written.count(
        "x\n"
    )  # each broken line is named


def test_page_of_a_laptop_run_stays_below_five_megabytes(tmp_path):
    """256 trajectories a step are tens of megabytes of numbers: a page with all of them does not open."""
    folder, rng = make_run(tmp_path / "big", steps=5), random.Random(0)
    tokenizer = make_tokenizer()
    group = make_group(tokenizer, rng, 0, "mod", 0.5, 5)
    lines = [json.dumps(r | {"prompt_index": i}) for i in range(32) for r in group]
    for step in range(25, 30):
        (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    ids = (group[0]["ids"] * 200)[:11_000]  # eight such trajectories do not fit, two do
    long = {"ids": ids, "mask": [0] + [1] * 10_999, "logprobs": [-0.123456] * 11_000, "prompt_len": 1}
    long |= {"prompt_index": 99}
    lines += [json.dumps(r | long | {"reward": 9.0 if i < 4 else -9.0}) for i, r in enumerate(group)]
    (folder / "trajectories" / "step_000030.jsonl").write_text("\n".join(lines) + "\n")
    report.write_page([metrics.read_run(folder)])
    assert (folder / "report.html").stat().st_size < 5e6
    data = page_data(folder)
    best_and_worst = next(g["rows"] for g in data["groups"] if g["step"] == 30)
    assert [r["reward"] for r in best_and_worst] == [9.0, -9.0]
    rows = [r for group in data["groups"] for r in group["rows"]]
    assert sum(len(s["tokens"]) for r in rows for s in r["segments"]) <= report.TOKENS_IN_PAGE


def test_png_is_made_for_one_run_several_and_none_with_data(run, tmp_path):
    """Figures are made at the end of a run, unattended: a missing key must not lose them."""
    other = make_run(tmp_path / "other", seed=1, steps=5)
    (tmp_path / "config.json").write_text("{}")
    for folders in ([run], [other, run], [tmp_path]):
        path = metrics.write_png([metrics.read_run(f) for f in folders])
        assert path.parent == folders[0] and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_follow_prints_a_line_a_step_and_ends_with_the_run(tmp_path):
    """Piped into a file, a redrawn view is a heap of control codes; one that never ends blocks a script."""
    (tmp_path / "config.json").write_text('{"steps": 2}')
    texts = ['{"step": 0, "eval/correct": 0.25}\n{"step": 1, "tool/', 'used": 0.5}\n', '{"step": 2}\n']

    def write():
        with open(tmp_path / "metrics.jsonl", "w") as file:
            for text in texts:
                file.write(text)
                file.flush()
                time.sleep(0.4)

    writer = threading.Thread(target=write)
    writer.start()
    done = run_main("--follow", str(tmp_path))
    writer.join()
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == ["step 0  right, held out 0.250", "step 1  tool used 0.500", "step 2"]


# ---- in Chromium


def test_page_works_in_a_browser_without_error_or_network(run, browser):
    """It must open from disk: no error in the console, nothing asked of the network, hostile text inert."""
    browser.open(run / "report.html")
    assert browser.js("document.title") == "tiny"
    assert (
        browser.js("$('about').textContent")
        == "step 30 of 30 · preset tiny · seed 0 · command grpo.py --seed 0"
    )
    assert browser.js("document.querySelectorAll('figure svg').length") == len(metrics.PANELS)
    assert browser.js("document.querySelectorAll('article').length") == 8
    for group in range(4):  # the hostile group among them
        browser.js(f"go({group})")
    text = browser.js("document.body.textContent")
    assert "⟨U+202e⟩" in text and "⟨U+001b⟩[31m" in text
    assert browser.js("typeof window.hacked") == "undefined" and browser.js("document.images.length") == 0
    assert browser.complaints() == []
    sent = [e["params"]["request"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    asked = [request["url"] for request in sent if not request["url"].startswith("data:")]
    assert asked == [(run / "report.html").as_uri()]


def test_colours_switch_and_clipped_tokens_are_framed(run, browser):
    """By advantage right is blue and wrong orange; framed are exactly the tokens whose ratio is clipped."""
    browser.open(run / "report.html")
    group = next(g["rows"] for g in page_data(run)["groups"] if g["step"] == 30)
    ratios = [(x, r["advantage"] > 0) for r in group for x in r["ratio"]]
    clipped = sum(x > 1.28 if good else x < 0.8 for x, good in ratios)
    colour = "getComputedStyle(document.querySelector('article.%s .policy')).backgroundColor"
    before = browser.js(colour % "right")
    browser.js("$('mode').value = 'advantage'; $('mode').dispatchEvent(new Event('change'))")
    right, wrong = browser.js(colour % "right"), browser.js(colour % "wrong")
    assert right.startswith("rgba(0, 114, 178") and wrong.startswith("rgba(213, 94, 0") and right != before
    assert browser.js("document.querySelectorAll('.clipped').length") == 0
    browser.js("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '4', bubbles: true}))")
    assert browser.js("$('mode').value") == "ratio"
    assert clipped > 0 and browser.js("document.querySelectorAll('.clipped').length") == clipped
    assert "0.8 or 1.28" in browser.js("$('scale').textContent")
    assert browser.complaints() == []


def test_clipped_tokens_are_those_whose_gradient_the_loss_takes_away(tmp_path, browser):
    """By hand, A = -0.9: a ratio of 12 is beyond the dual clip of 10, one of 1/12 below 0.8. A sequence has
    their geometric mean: 1 where all others are 1, and with 1/48 for 1/12 well below 0.999."""
    folder = make_run(tmp_path / "run", steps=5)
    path = folder / "trajectories" / "step_000005.jsonl"
    row = json.loads(path.read_text().splitlines()[7]) | {"advantage": -0.9, "reward": -1.0}
    first, *_, last = [i for i, m in enumerate(row["mask"]) if m]
    for sequence, end, framed in [(False, 1 / 12, 2), (True, 1 / 12, 0), (True, 1 / 48, sum(row["mask"]))]:
        row["ratio"] = [1.0] * len(row["ids"])
        row["ratio"][first], row["ratio"][last] = 12.0, end
        path.write_text(json.dumps(row) + "\n")
        config = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
        config |= {"ratio": "sequence", "clip_low": 1e-3, "clip_high": 1e-3} if sequence else {}
        (folder / "config.json").write_text(json.dumps(config))
        report.write_page([metrics.read_run(folder)])
        browser.open(folder / "report.html")
        browser.js("setMode('ratio')")
        assert browser.js("document.querySelectorAll('.clipped').length") == framed
    assert browser.complaints() == []


def test_tool_calls_fold_and_tokens_tell_their_numbers(run, browser):
    """Folded at first, code and output when open; arrows move over tokens and skip what is folded away."""
    browser.open(run / "report.html")
    assert browser.js("document.querySelectorAll('article details[open]').length") == 0
    summary = browser.js("document.querySelector('article summary').textContent")
    assert summary.startswith("ok 0.0042 s · print(")
    browser.js("$('fold').click()")
    assert browser.js("[...document.querySelectorAll('article details')].every(d => d.open)")
    assert browser.js("document.querySelector('article pre').textContent").startswith("print(")
    browser.js("$('fold').click()")
    before_tool = "lists[1].findIndex(e => e.className === 'tool') - 1"
    browser.js(f"lists[1][{before_tool}].focus()")
    for key, kind in [("ArrowRight", "policy"), ("ArrowLeft", "policy")]:
        browser("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        assert browser.js("document.activeElement.className") == kind  # the tool's tokens are folded away
    assert browser.js(f"document.activeElement === lists[1][{before_tool}]")
    for part in ("id ", "by policy", "log-prob -", "trainer -", "entropy ", "ratio ", "advantage 0.9"):
        assert part in browser.js("$('info').textContent")
    browser("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", code="ArrowDown")
    assert browser.js("lists[2].includes(document.activeElement)")
    assert browser.complaints() == []


def test_search_finds_text_across_tokens_groups_and_folds(run, browser):
    """Search in the elements in view misses other groups, folded text, and words cut into tokens."""
    browser.open(run / "report.html")
    data = page_data(run)
    rows = [r for group in data["groups"] for r in group["rows"]]
    numbers = [[n for s in r["segments"][1:] for n in s["tokens"]] for r in rows]
    texts = ["".join(data["pieces"][n][1] for n in trajectory) for trajectory in numbers]
    expected = sum(t.lower().count("syntaxerror: '('") for t in texts)
    browser.js("$('search').value = \"SYNTAXERROR: '('\"; $('search').dispatchEvent(new Event('input'))")
    assert expected > 5 and browser.js("$('found').textContent") == f"{expected} found"
    browser.js("for (let i = 0; i < 3; i++) next(1)")
    assert browser.js("$('found').textContent") == f"3 of {expected}"
    marked = browser.js("[...document.querySelectorAll('.now')].map(e => e.textContent).join('')")
    assert "SyntaxError" in marked and browser.js("document.querySelector('.now').closest('details').open")
    browser.js("$('search').value = '(?nothing['; $('search').dispatchEvent(new Event('input'))")
    assert browser.js("$('found').textContent") == "nothing found"
    assert browser.js("document.querySelector('.hit')") is None
    assert browser.complaints() == []


def test_curves_can_be_read_by_keyboard_and_by_screen_readers(run, browser):
    """A curve without text is nothing to a screen reader, a readout by mouse alone nothing without one."""
    browser.open(run / "report.html")
    label = browser.js("document.querySelector('figure svg').getAttribute('aria-label')")
    assert re.match(
        r"Right answers: eval/correct [\d.]+ % at step 0, eval/correct [\d.]+ % at step 30; reward/", label
    )
    browser.js("document.querySelector('figure svg').focus()")
    browser("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    browser("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    legend = browser.js("document.querySelector('.legend').textContent")
    assert "eval/correct –" in legend and legend.endswith("step 29")  # held out is measured every five steps
    unlabelled = "[...document.querySelectorAll('input, select')].filter(e => !e.labels.length).length"
    assert browser.js(unlabelled) == 0 and browser.js("document.querySelectorAll('h1').length") == 1


def test_several_runs_are_laid_over_each_other(run, browser, tmp_path):
    """Which of two settings learns faster is seen in one picture, if each line says whose it is."""
    other = make_run(tmp_path / "other", seed=1, steps=20)
    report.write_page([metrics.read_run(f) for f in (other, run)])
    browser.open(other / "report.html")
    legend, keys = (
        browser.js("document.querySelector('.legend').textContent"),
        ("eval/correct", "reward/correct"),
    )
    assert all(f"{name} {key} " in legend for name in ("other", "tiny") for key in keys)
    drawn = "[...document.querySelector('figure svg').querySelectorAll('[fill=none]')].map(e => "
    drawn = browser.js(
        drawn + "[e.getAttribute('stroke'), e.getAttribute('stroke-dasharray')].join(' ')).sort().join()"
    )
    assert drawn == "var(--0) ,var(--0) 6 3,var(--1) ,var(--1) 6 3"  # a colour a run, a dash a key
    assert browser.complaints() == []


CONTRAST = """(() => {
  const rgba = text => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = ([r, g, b, a], under) => [r, g, b].map((v, i) => a * v + (1 - a) * under[i]);
  const light = c => c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => !e ? [255, 255, 255]
    : over(rgba(getComputedStyle(e).backgroundColor), behind(e.parentElement));
  const ratio = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
  const worst = {};
  const note = (kind, e, colour) => {
    const under = behind(e), r = ratio(over(rgba(colour), under), under);
    if (!(worst[kind]?.[0] < r)) worst[kind] = [r, e.tagName, e.className.baseVal ?? e.className, colour];
  };
  for (const e of document.body.querySelectorAll(':not(script, option)')) if (e.checkVisibility()) {
    const style = getComputedStyle(e), says = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (says) note('text', e, e instanceof SVGElement ? style.fill : style.color);
    if (e.matches('path[fill=none]')) note('line', e, style.stroke);
  }
  return worst;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_and_all_curves_have_the_contrast_that_wcag_asks_for(run, browser, dark):
    """WCAG 2 AA: 4.5 for text (1.4.3), 3 for what is drawn (1.4.11); in every colouring, folds open."""
    browser.open(run / "report.html", dark=dark)
    browser.js("$('fold').click(); $('search').value = 'the'; search(); next(1)")
    for mode in ("who", "logp", "entropy", "ratio", "advantage", "gap"):
        browser.js(f"setMode('{mode}')")
        worst = browser.js(CONTRAST)
        assert worst["text"][0] >= 4.5 and worst["line"][0] >= 3, (mode, worst)


def test_headings_are_in_order_and_every_control_has_a_name(run, browser):
    """A screen reader moves by headings and by landmarks, and reads out the name of what can be changed."""
    browser.open(run / "report.html")
    levels = browser.js("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:]))
    tree = browser("Accessibility.getFullAXTree")["nodes"]
    role = lambda node: node.get("role", {}).get("value")  # noqa: E731
    wanted = {"combobox", "searchbox", "button", "link", "navigation", "article", "image"}
    nameless = [n for n in tree if role(n) in wanted and not n.get("name", {}).get("value")]
    assert nameless == [] and {"main", "navigation", "combobox", "searchbox"} <= set(map(role, tree))
    assert browser.js("document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone_and_is_legible_in_the_dark(run, browser, dark, tmp_path):
    """A page that is wider than a phone, or white at night, is closed again."""
    browser.open(run / "report.html", width=360, dark=dark)
    browser.js("setMode('advantage')")
    assert browser.js("document.documentElement.scrollWidth") == 360
    browser.screenshot(tmp_path / "phone.png")  # kept by pytest's --basetemp, to be looked at
    assert (tmp_path / "phone.png").stat().st_size > 10_000
    page = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", page)[0]) < 60) == dark


def test_what_a_run_did_not_log_is_switched_off(tmp_path, browser):
    """Without entropies or ratios a colour by them would show zeros as if they were measured."""
    folder = make_run(tmp_path / "bare", steps=5)
    path = folder / "trajectories" / "step_000005.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    gone = "old_logprobs entropy ratio reward_parts family answer finish tool_results correct".split()
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k not in gone}) + "\n" for r in rows))
    (folder / "config.json").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 5, "reward/mean": 0.5}\n')
    report.write_page([metrics.read_run(folder)])
    browser.open(folder / "report.html")
    off = browser.js("[...$('mode').querySelectorAll(':disabled')].map(e => e.value).join()")
    assert off == "entropy,ratio,gap" and browser.js("document.querySelectorAll('figure').length") == 1
    browser.js("setMode('ratio'); setMode('logp')")
    assert browser.js("mode") == "logp" and browser.complaints() == []


def test_page_without_rows_or_trajectories_says_so(tmp_path, browser):
    """An empty page looks like a broken one."""
    (tmp_path / "config.json").write_text('{"preset": "tiny"}')
    report.write_page([metrics.read_run(tmp_path)])
    browser.open(tmp_path / "report.html")
    assert (
        browser.js("$('notes').textContent") == "No step has been logged yet. There are no trajectories yet."
    )
    shown = "[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.id).join()"
    assert browser.js(shown) == "" and browser.complaints() == []


def picture(folder: Path, path: Path, scratch: Path) -> None:
    """The page of a run with four curves, four trajectories and four observations, one call unfolded."""
    chromium = Browser(scratch)
    chromium.open(folder / "report.html", width=1400, height=1000)
    chromium.js(
        "for (const id of ['charts', 'observed']) [...$(id).children].slice(4).forEach(e => e.remove())"
    )
    repaired = "D.groups.findIndex(g => g.rows.slice(0, 2).some(r => r.correct && r.segments.length > 4))"
    chromium.js(f"go(Math.max(0, {repaired})); setMode('logp')")
    chromium.js("[...document.querySelectorAll('article')].slice(2, -2).forEach(e => e.remove())")
    chromium.js("document.querySelector('article details').open = true")
    chromium.js("info(lists[1].filter(e => e.v.logp != null).sort((a, b) => a.v.logp - b.v.logp)[0])")
    height = chromium.js("document.body.style.padding = '1rem 1rem 3rem', document.body.offsetHeight")
    size = {"width": 1400, "height": math.ceil(height), "deviceScaleFactor": 1, "mobile": False}
    chromium("Emulation.setDeviceMetricsOverride", **size)
    chromium.screenshot(path)
    chromium.close()


if __name__ == "__main__":  # python tests/test_report.py runs/tiny-0 docs/report.png
    with tempfile.TemporaryDirectory() as scratch:
        picture(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), Path(scratch))
