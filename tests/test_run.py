"""The scripts as a user starts them: runs of grpo.py, their folders, continuations, refusals; cold starts and
rollouts that were killed.

Every command runs in a temporary folder in a process of its own. Importing torch and transformers costs more
than a short run, so most of these processes are forks of one that has imported them already (`Scripts`), with
two ranks two forks and the variables that torchrun sets; what a plain `python grpo.py` does is seen in the
fixture `straight`, what torchrun does in `two_ranks`.
"""

import json
import math
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import run
from data import load_conversations, load_problems

ROOT = Path(grpo.__file__).parent
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}

FORK = """
import json, os, runpy, sys, traceback
import collect, grpo, run, sft
for line in sys.stdin:
    job, pids = json.loads(line), []
    for rank, env in enumerate(job["ranks"]):
        if (pid := os.fork()) == 0:
            os.environ |= env
            if not job["page"]:  # two seconds each
                run.write_report = lambda *_, **__: False
            os.chdir(job["cwd"])
            for fd, name in ((1, "out"), (2, "err")):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(f"{job['cwd']}/{name}-{rank}.txt", flags, 0o600), fd)
            sys.argv, code = job["argv"], 0
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Scripts:
    """Runs `python SCRIPT OPTIONS` in a folder, in a fork of a process that has imported everything."""

    def __init__(self, folder: Path):
        self.folder = folder
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.parent = subprocess.Popen([sys.executable, "-c", FORK], env=ENV, cwd=folder, **pipes)

    def start(self, script: str, *options: str, page: bool = False, ranks: int = 1) -> list[int]:
        """Process ids of the ranks."""
        job = {"argv": [str(ROOT / script), *options], "cwd": str(self.folder), "page": page, "ranks": [{}]}
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
            where |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            job["ranks"] = [{**where, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
        self.parent.stdin.write(json.dumps(job) + "\n")
        self.parent.stdin.flush()
        return json.loads(self.parent.stdout.readline())

    def wait(self) -> tuple[int, str, str]:
        """(exit code, what was printed, what went to stderr) of the first rank; any code of another, if its
        own is 0."""
        codes = json.loads(self.parent.stdout.readline())
        texts = [(self.folder / f"{name}-0.txt").read_text(errors="replace") for name in ("out", "err")]
        return next((code for code in codes if code), 0), *texts

    def __enter__(self) -> "Scripts":
        return self

    def __exit__(self, *_) -> None:
        self.parent.stdin.close()
        self.parent.wait(60)

    def __call__(self, script: str, *options: str, page: bool = False) -> tuple[int, str, str]:
        self.start(script, *options, page=page)
        return self.wait()

    def succeed(self, script: str, *options: str, ranks: int = 1) -> str:
        self.start(script, *options, ranks=ranks)
        code, out, err = self.wait()
        assert code == 0, err[-3000:]
        return out


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    with Scripts(tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="session")
def cold(scripts) -> Path:
    """A short cold start in the easy world: its policy is right in some of its answers."""
    easy_world(scripts.folder)
    options = "--model tiny --data conversations.jsonl --epochs 2 --batch 8 --lr 4e-3 --threads 1 --out cold"
    scripts.succeed("sft.py", *options.split())
    return scripts.folder / "cold"


OPTIONS = "--model cold --data problems.jsonl --eval_data problems.jsonl --max_prompt 300 --threads 1"
OPTIONS += " --batch 32 --group 4 --eval_every 2 --save_every 2 --show_every 0"


def command(out: str, steps: int = 4, **more) -> list[str]:
    """OPTIONS, with `more` in their place; a later option outranks an earlier one."""
    return [
        *OPTIONS.split(),
        "--steps",
        str(steps),
        "--out",
        out,
        *(t for k, v in more.items() for t in (f"--{k}", v)),
    ]


@pytest.fixture(scope="session")
def straight(scripts, cold) -> Path:
    """Four steps in one go, by `python grpo.py` itself."""
    line = [sys.executable, str(ROOT / "grpo.py"), *command("straight")]
    done = subprocess.run(line, env=ENV, cwd=scripts.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return scripts.folder / "straight"


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def trajectories(out: Path, step: int) -> list[dict]:
    return [
        json.loads(line)
        for line in (out / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]


def without_clocks(found):
    """A row or a trajectory, without what a clock said."""
    if isinstance(found, list):
        return [without_clocks(item) for item in found]
    if isinstance(found, dict):
        clocks = re.compile("time/|speed/|seconds$|tool/seconds")
        return {k: without_clocks(v) for k, v in found.items() if not clocks.search(k)}
    return found


def the_same_run(one: Path, other: Path, checkpoints=("step_000002", "step_000004")) -> None:
    """Bit for bit: metrics, sampled ids with their log-probs and rewards, weights."""
    assert without_clocks(rows(one)) == without_clocks(rows(other))
    for step in (1, 2, 3, 4):
        assert without_clocks(trajectories(one, step)) == without_clocks(trajectories(other, step))
    for step in checkpoints:
        file = f"checkpoints/{step}/model/model.safetensors"
        assert (one / file).read_bytes() == (other / file).read_bytes()


# ---- what a run leaves -------------------------------------------------------------------------------------

PROMISED = """step reward/mean reward/correct reward/overlong length/policy_tokens length/tool_tokens
length/truncated tool/calls tool/used tool/success tool/repaired tool/seconds policy/entropy policy/clip_low
policy/clip_high policy/grad_norm policy/kl_old sampler/gap_mean sampler/gap_max group/zero_variance
time/rollout time/tool_wait time/reward time/train time/step speed/tokens_per_s
time/prefill time/decode time/sampling time/idle_slots""".split()


def test_a_row_of_metrics_has_all_that_is_promised(straight):
    """Curves of another tool break when a name is renamed or missing in some rows; a NaN is no JSON."""
    found = rows(straight)
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in found if "eval/correct" in row] == [0, 2, 4]
    for row in found[1:]:
        assert set(PROMISED) <= row.keys()
        assert {k for k in row if k.startswith("correct/")} == {"correct/odd", "correct/even"}
    for row in found:
        assert all(math.isfinite(value) for value in row.values())
        if "eval/correct" in row:
            assert 0 <= row["eval/low"] <= row["eval/correct"] <= row["eval/high"] <= 1
            families = {k for k in row if k.startswith("eval/correct/")}
            assert families == {"eval/correct/odd", "eval/correct/even"}


def test_metrics_are_the_means_of_the_trajectories_on_disk(straight):
    """A logged reward that is not the one that was optimised (huggingface/trl#5353), a length that counts the
    tool's text (THUDM/slime#365): the row must follow from the stored trajectories."""

    def mean(values):
        values = list(values)
        return pytest.approx(sum(values) / len(values), abs=1e-9)

    for step in (1, 2, 3, 4):
        episodes, row = trajectories(straight, step), rows(straight)[step]
        assert [(e["prompt_index"], e["sample_index"]) for e in episodes] == [
            (i // 4, i % 4) for i in range(32)
        ]
        calls = [r["status"] for e in episodes for r in e["tool_results"]]
        assert "ok" in calls and 0 < row["reward/correct"] < 1  # else most of this would be 0 == 0
        groups = [{e["reward"] for e in episodes[i : i + 4]} for i in range(0, 32, 4)]
        assert row["reward/mean"] == mean(e["reward"] for e in episodes)
        assert row["reward/correct"] == mean(e["reward_parts"]["correct"] == 1 for e in episodes)
        assert row["length/policy_tokens"] == mean(sum(e["mask"]) for e in episodes)
        assert row["length/tool_tokens"] == mean(e["mask"][e["prompt_len"] :].count(0) for e in episodes)
        assert row["length/truncated"] == mean(e["finish"] in ("length", "turns") for e in episodes)
        assert row["tool/calls"] == pytest.approx(len(calls) / 32)
        assert row["tool/used"] == mean(bool(e["tool_results"]) for e in episodes)
        assert row["tool/success"] == mean(status == "ok" for status in calls)
        assert row["group/zero_variance"] == mean(len(rewards) == 1 for rewards in groups)
        for e in episodes:
            assert e["reward"] == pytest.approx(sum(e["reward_parts"].values()))
            assert len(e["ids"]) == len(e["mask"]) == len(e["logprobs"])
            assert not any(e["mask"][: e["prompt_len"]])


@pytest.mark.parametrize("step", [1, 3])
def test_the_sampler_used_the_weights_that_the_last_checkpoint_has(straight, cold, step):
    """Log-probs of a stale or of a wrongly saved policy are off (PrimeIntellect-ai/prime-rl#1650): the model
    folder that is on disk before a step, by transformers' own forward, gives what was sampled in it."""
    folder = cold if step == 1 else straight / "checkpoints/step_000002/model"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for e in trajectories(straight, step)[:8]:
        with torch.no_grad():
            logits = model(torch.tensor([e["ids"]])).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(e["ids"][1:])[:, None])[:, 0]
        mask = torch.tensor(e["mask"][1:], dtype=torch.bool)
        torch.testing.assert_close(torch.tensor(e["logprobs"][1:])[mask], logp[mask], atol=1e-4, rtol=0)


def test_a_run_writes_its_configuration_its_tokenizer_and_its_curves(straight):
    """Nobody can tell later what a run was (hkust-nlp/simpleRL-reason#64) unless it is beside its numbers."""
    content = json.loads((straight / "config.json").read_text())
    settings = content["config"]
    assert settings.keys() == vars(grpo.Config()).keys() | {"sha256_problems"}
    assert (settings["group"], settings["lr"], settings["max_prompt"]) == (4, 4e-4, 300)
    assert {"torch", "transformers"} <= content["versions"].keys() and "--group" in content["command"]
    assert (straight / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (straight / "report.html").read_text()
    assert "<html" in page and "eval/correct" in page
    text = AutoTokenizer.from_pretrained(straight / "tokenizer").decode(trajectories(straight, 4)[0]["ids"])
    assert text.startswith("<|im_start|>user\n") and "<|im_end|>\n<|im_start|>assistant\n" in text
    kept = sorted(p.name for p in (straight / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000004"]
    assert not list(straight.rglob("*.part"))


# ---- the same command again --------------------------------------------------------------------------------


def test_two_steps_and_two_more_are_four_steps_bit_for_bit(scripts, straight):
    """A resume that draws a batch again, or loses the optimizer's state, goes another way
    (volcengine/verl#3457, modelscope/ms-swift#9935). Two runs of one seed differ elsewhere even in one go
    (allenai/open-instruct#648)."""
    scripts.succeed("grpo.py", *command("twice", steps=2))
    assert "continued after step 2" in scripts.succeed("grpo.py", *command("twice"))
    the_same_run(scripts.folder / "twice", straight)


def test_a_killed_run_continues_bit_for_bit_and_mends_its_last_line(scripts, straight):
    """kill -9 leaves half a line in metrics.jsonl and half a checkpoint (volcengine/verl#4873,
    PrimeIntellect-ai/prime-rl#2992); the same command must go on as if nothing had happened."""
    out = scripts.folder / "killed"
    [pid] = scripts.start("grpo.py", *command("killed"))
    until(lambda: (out / "checkpoints/step_000002").exists())
    os.kill(pid, signal.SIGKILL)
    code, _, _ = scripts.wait()
    assert code == -signal.SIGKILL
    assert not (out / "checkpoints/step_000004").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    half = out / "checkpoints/step_000004.part/model"
    half.mkdir(parents=True, exist_ok=True)
    (half / "model.safetensors").write_bytes(b"half")
    scripts.succeed("grpo.py", *command("killed"))
    the_same_run(out, straight)
    assert not list(out.rglob("*.part"))


def test_rows_after_the_checkpoint_are_dropped_whatever_the_last_line_is(tmp_path):
    """A row that is kept and written again stands in the curve twice; half a line stops every reader
    (json.loads)."""
    for ending in ("", '{"step": 3, "a"', '{"step": 3, "a": 1}', "\0\0\0"):
        lines = "".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3))
        (tmp_path / "metrics.jsonl").write_text(lines + ending)
        run.Log(tmp_path, 2).write({"step": 3, "new": True})
        assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
        assert rows(tmp_path)[-1] == {"step": 3, "new": True}


def test_a_run_killed_before_its_configuration_was_written_can_be_started_again(tmp_path):
    """A kill in the first moment must not make the name of the run unusable."""
    (tmp_path / "out/trajectories").mkdir(parents=True)
    (tmp_path / "out/config.json.part").write_text('{"config": {"st')
    run.open_run(tmp_path / "out", {"steps": 4}, set())
    assert json.loads((tmp_path / "out/config.json").read_text())["config"] == {"steps": 4}


MEDDLE = """
import os, resource, signal, sys, time
import grpo, run, sft
where, what = sys.argv.pop(1).split(" ", 1)
real = grpo.evaluate

def hook(event, args):  # before python opens, renames or removes something
    if event == where and what in " ".join(map(str, args)):
        os.kill(os.getpid(), signal.SIGKILL)

def evaluate(*args, **more):
    if os.path.exists(os.path.join("in_eval", "trajectories", "step_000002.jsonl")):
        os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **more)

if where == "evaluation":
    grpo.evaluate = evaluate
elif where == "disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
elif where == "save":
    run.checkpoint = lambda *_: time.sleep(300)
else:
    sys.addaudithook(hook)
script = sft if "--teacher" in sys.argv else grpo
run.run_script(script.main, script.parse_args(script.Config, presets=script.PRESETS))
"""


@pytest.fixture(scope="session")
def meddle(scripts) -> str:
    """A script: grpo.py that is killed just before something is done with a file, or has another mishap."""
    (scripts.folder / "meddle.py").write_text(MEDDLE)
    return str(scripts.folder / "meddle.py")


def until(found) -> None:
    end = time.monotonic() + 120
    while not found() and time.monotonic() < end:
        time.sleep(0.005)
    assert found()


def has_row(out: Path, step: int) -> bool:
    file = out / "metrics.jsonl"
    return file.exists() and f'{{"step": {step},' in file.read_text()


MOMENTS = [
    "open config.json.part",
    "open trajectories/step_000001.jsonl",
    "open step_000001.part/state",  # the first file of a checkpoint
    "os.rename step_000001.part/model.part ",  # its weights are written, but have no name yet
    "os.rename checkpoints/step_000001.part ",  # all is written, but has no name yet
    "os.rename checkpoints/step_000001 ",  # the next one is whole, this one about to be removed
    "shutil.rmtree checkpoints/step_000002.part",  # and here half removed
    "open metrics.jsonl a",
]


def test_a_run_killed_at_any_moment_continues_bit_for_bit(scripts, straight, meddle):
    """One run, killed eight times just before it opens, renames or removes a file, also in the middle of
    saving: what it left must never be taken for a whole checkpoint (volcengine/verl#4873)."""
    for moment in MOMENTS:
        code, _, err = scripts(meddle, moment, *command("mishaps", save_every="1", keep="1"))
        assert code == -signal.SIGKILL, (moment, err[-2000:])
    scripts.succeed("grpo.py", *command("mishaps", save_every="1", keep="1"))
    out = scripts.folder / "mishaps"
    the_same_run(out, straight, checkpoints=["step_000004"])
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_000004"]


def test_ctrl_c_saves_the_last_step_and_says_how_to_go_on(scripts, straight):
    """Steps since the last checkpoint are lost otherwise, hours of them on large models. What was begun of
    the next step is thrown away, for the same command samples it again."""
    out = scripts.folder / "interrupted"
    [pid] = scripts.start("grpo.py", *command("interrupted", save_every="99", keep="9"))
    until(lambda: has_row(out, 1))
    os.kill(pid, signal.SIGINT)
    code, _, err = scripts.wait()
    step = rows(out)[-1]["step"]
    assert code == 130 and "Traceback" not in err
    assert f"the same command continues after step {step}, which is saved" in err
    assert run.latest(out)[0] == step
    scripts.succeed("grpo.py", *command("interrupted", keep="9"))
    the_same_run(out, straight, checkpoints=["step_000004"])


def test_a_terminal_that_is_closed_saves_the_last_step(tmp_path):
    """The system refuses each write to it from then on: the handler's own line would end the run unsaved."""
    code = """
import time, policy, run
policy.init_process_group()

def main():
    run.listen(lambda: open("saved", "w").write("12345"))
    with run.breakable():
        while True:
            print("step", flush=True)
            time.sleep(0.2)

run.run_script(main)
"""
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, as there by design
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-c", code], ENV)
    said = b""
    while b"step" not in said:
        said += os.read(terminal, 1000)
    time.sleep(0.1)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert (tmp_path / "saved").read_text() == "12345"


def test_a_second_ctrl_c_ends_the_run_at_once(scripts, meddle):
    """Who presses it twice does not want to wait for a slow disk; the last checkpoint is whole anyway."""
    out = scripts.folder / "twice_interrupted"
    [pid] = scripts.start(meddle, "save slowly", *command("twice_interrupted", save_every="99"))
    until(lambda: has_row(out, 1))
    os.kill(pid, signal.SIGINT)
    time.sleep(1.5)
    os.kill(pid, signal.SIGINT)
    start = time.monotonic()
    assert scripts.wait()[0] == 130 and time.monotonic() - start < 10


def test_a_run_with_every_option_of_the_method_continues_bit_for_bit(scripts, cold):
    """The reference of the KL term is the policy that the run began with, not the one it goes on from;
    problems that replace others come from the seed, not from what was drawn before."""
    options = dict(kl="0.1", entropy="0.01", tis="2", resample="1", ratio="sequence", loss_mean="sequence")
    options |= dict(scale="none", save_every="1", eval_every="0", mini_batches="1", old_logp="trainer")
    scripts.succeed("grpo.py", *command("options", 3, **options))
    scripts.succeed("grpo.py", *command("options_twice", 2, **options))
    scripts.succeed("grpo.py", *command("options_twice", 3, **options))
    found = [rows(scripts.folder / name) for name in ("options", "options_twice")]
    assert without_clocks(found[0]) == without_clocks(found[1])
    assert found[0][0]["policy/kl_ref"] == pytest.approx(0, abs=1e-9) and found[0][2]["policy/kl_ref"] > 1e-6
    assert sum(row["group/resampled"] for row in found[0]) > 0


def test_an_evaluation_that_was_interrupted_is_made_up_for(scripts, straight, meddle):
    """The step is trained and saved; a row without its evaluation is not that of an undisturbed run."""
    assert scripts(meddle, "evaluation ", *command("in_eval", save_every="99", keep="9"))[0] == 130
    out = scripts.folder / "in_eval"
    assert run.latest(out)[0] == rows(out)[-1]["step"] == 2 and "eval/correct" not in rows(out)[-1]
    scripts.succeed("grpo.py", *command("in_eval", keep="9"))
    the_same_run(out, straight)


def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint_whole(scripts, straight, meddle):
    """Libraries hide the system's error in a dozen types of their own; torch does not even name it, and
    raises what is no Exception. Here the limit of a file's size plays the full disk."""
    scripts.succeed("grpo.py", *command("full", steps=2))
    code, _, err = scripts(meddle, "disk ", *command("full"))
    assert code == 2 and "Traceback" not in err
    assert "meddle.py: a write to the disk was cut short; make room, and the same command continues" in err
    assert run.latest(scripts.folder / "full")[0] == 2
    scripts.succeed("grpo.py", *command("full"))
    the_same_run(scripts.folder / "full", straight)


# ---- two ranks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def two_ranks(scripts, cold) -> Path:
    """By torchrun itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line = [*launcher, str(ROOT / "grpo.py"), *command("two_ranks")]
    done = subprocess.run(line, env=ENV, cwd=scripts.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return scripts.folder / "two_ranks"


def test_two_ranks_sample_the_same_trajectories_as_one(straight, two_ranks):
    """Ranks that share a seed sample the same group twice (pixeli99/SVD_Xtend#75); with seeds of their own
    the run depends on their number."""
    for a, b in zip(trajectories(straight, 1), trajectories(two_ranks, 1), strict=True):
        assert all(a[key] == b[key] for key in ("ids", "mask", "finish", "reward"))
        assert a["logprobs"] == pytest.approx(b["logprobs"], abs=1e-5)
    assert rows(two_ranks)[0] == pytest.approx(rows(straight)[0], abs=1e-6)
    norms = [rows(out)[1]["policy/grad_norm"] for out in (two_ranks, straight)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_two_ranks_that_were_interrupted_and_killed_continue_bit_for_bit(scripts, two_ranks):
    """Ctrl-C reaches the ranks at different places: they must save the same step. kill -9 of one rank leaves
    the others in the middle of something."""
    out, again = scripts.folder / "two_killed", command("two_killed", keep="9")
    pids = scripts.start("grpo.py", *again, ranks=2)
    until(lambda: has_row(out, 1))
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    code, _, said = scripts.wait()
    step = rows(out)[-1]["step"]
    assert f"the same command continues after step {step}, which is saved" in said, said[-3000:]
    assert code == 130 and run.latest(out)[0] == step
    pids = scripts.start("grpo.py", *again, "--steps", "5", ranks=2)
    until(lambda: has_row(out, step + 1))
    os.kill(pids[1], signal.SIGKILL)
    assert scripts.wait()[0] != 0  # the other ends by itself
    scripts.succeed("grpo.py", *again, ranks=2)
    the_same_run(out, two_ranks, checkpoints=["step_000004"])


# ---- bad input ---------------------------------------------------------------------------------------------

REFUSED = {  # options, and the words that the sentence must have: the value, and the way out
    "an unknown option": (["--step", "3"], ["--step", "--steps"]),
    "a number that is none": (["--lr", "fast"], ["fast", "lr"]),
    "an unknown preset": (["--preset", "tine"], ["tine", "tiny", "qwen3-4b"]),
    "a missing model folder": (["--model", "./clod"], ["./clod", "cold"]),
    "a model that does not exist": (["--model", "owner/nothing"], ["owner/nothing", "folder"]),
    "a missing data file": (["--data", "nothing.jsonl"], ["nothing.jsonl", "file"]),
    "a missing set of unseen problems": (["--eval_data", "aime2026"], ["aime2026", "aime2025"]),
    "a group of one": (["--group", "1"], ["--group 1", "2"]),
    "a batch of broken groups": (["--batch", "6"], ["6", "4", "8"]),
    "a tracker that is none": (["--tracker", "wand"], ["wand", "wandb", "tensorboard", "trackio"]),
    "prompts that do not fit": (["--max_prompt", "5"], ["--max_prompt", "5"]),
    "more optimizer steps than trajectories": (["--mini_batches", "33"], ["33", "32"]),
    "a greedy policy": (["--temperature", "0"], ["--temperature", "0"]),
    "other settings in a run that exists": (
        ["--out", "straight", "--steps", "6", "--lr", "1"],
        ["straight", "lr", "1.0", "--out"],
    ),
    "a run that is complete": (["--out", "straight"], ["straight", "--steps"]),
    "a folder that is no run": (["--out", "mine"], ["mine", "--out"]),
    "a model folder as the run": (["--out", "cold"], ["cold", "--out"]),
    "a file as the run": (["--out", "note.txt"], ["note.txt", "--out"]),
    "another program's configuration": (["--out", "other_program"], ["config.json", "--out"]),
    "a run as the model": (["--model", "straight"], ["straight", "checkpoints/step_"]),
    "a checkpoint that is gone": (
        ["--model", "runs/x/checkpoints/step_000001/model"],
        ["step_000001", "no such"],
    ),
    "a context that leaves no room": (
        ["--model", "narrow", "--max_prompt", "700", "--out", "none"],
        ["89", "context"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence_that_names_the_value_and_the_way_out(scripts, straight, name):
    """A traceback from deep inside a library is what others answer with (policy-gradient/GRPO-Zero and tiny-
    grpo without a GPU; a batch of broken groups in huggingface/trl#2858). And nothing may be written over."""
    options, words = REFUSED[name]
    (scripts.folder / "mine").mkdir(exist_ok=True)
    (scripts.folder / "mine/thesis.txt").write_text("years of work")
    (scripts.folder / "note.txt").write_text("a note")
    (scripts.folder / "other_program").mkdir(exist_ok=True)
    (scripts.folder / "other_program/config.json").write_text("[section]")
    if name == "a context that leaves no room":
        shutil.copytree(scripts.folder / "cold", scripts.folder / "narrow")
        config = json.loads((scripts.folder / "narrow/config.json").read_text())
        (scripts.folder / "narrow/config.json").write_text(
            json.dumps(config | {"max_position_embeddings": 90})
        )

    def content():
        said = ("out-0.txt", "err-0.txt")
        files = (p for p in scripts.folder.rglob("*") if p.is_file() and p.name not in said)
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}

    before = content()
    code, _, err = scripts("grpo.py", *command("refused"), *options)
    assert code == 2, err[-2000:]
    assert "Traceback" not in err
    sentence = [line for line in err.splitlines() if line.startswith("grpo.py: ")]
    assert len(sentence) == 1 and err.rstrip().endswith(sentence[0])
    for word in words:
        assert word in sentence[0]
    assert before.items() <= content().items()


def test_a_complete_run_gets_its_page_if_that_is_missing(scripts, straight):
    """Killed while the page was written, a run had none: it is complete, so no command would write it."""
    (straight / "report.html").unlink()
    code, _, err = scripts("grpo.py", *command("straight"), page=True)
    assert code == 2 and "complete" in err and (straight / "report.html").is_file()


def test_problems_that_have_changed_are_another_run(scripts, straight):
    """A row more or less makes another order of all of them: some would come twice, others never."""
    lines = (scripts.folder / "problems.jsonl").read_text().splitlines(keepends=True)
    (scripts.folder / "more.jsonl").write_text("".join(lines))
    scripts.succeed("grpo.py", *command("grown", 1, data="more.jsonl"))
    (scripts.folder / "more.jsonl").write_text("".join(lines[1:]))
    code, _, err = scripts("grpo.py", *command("grown", 2, data="more.jsonl"))
    assert code == 2 and "other settings (sha256_problems" in err


def test_a_broken_pipe_that_is_not_our_output_is_an_error():
    """The service of a tracker that has died ended the run without a word, as if its reader had gone."""

    def main():
        raise BrokenPipeError("the service is gone")

    with pytest.raises(BrokenPipeError, match="service"):
        run.run_script(main)


def test_a_command_that_was_refused_can_be_corrected(scripts, straight):
    """A typing error in --model must not leave a run with "other settings" behind that refuses the right
    command."""
    assert scripts("grpo.py", *command("mistyped", 1, model="./clod"))[0] == 2
    assert scripts("grpo.py", *command("mistyped", 1, max_prompt="5"))[0] == 2
    scripts.succeed("grpo.py", *command("mistyped", 1, model="./cold"))
    # out of memory, the program says what to lower: the same run must then take it
    less = dict(model="./cold", max_rows="9", cache_tokens="1024", tokens_per_row="900")
    assert "continued after step 1" in scripts.succeed("grpo.py", *command("mistyped", 2, **less))


def test_sft_refuses_to_write_over_a_model(scripts, cold):
    """A second cold start of the same name would destroy the first."""
    before = (cold / "model.safetensors").read_bytes()
    code, _, err = scripts("sft.py", *"--preset tiny --teacher 50 --out cold".split())
    assert code == 2 and "Traceback" not in err
    assert "cold" in err.splitlines()[-1] and "--out" in err.splitlines()[-1]
    assert (cold / "model.safetensors").read_bytes() == before


# ---- sft.py ------------------------------------------------------------------------------------------------

SFT = "--preset tiny --teacher 320 --save_every 8 --threads 1 --out".split()


def test_a_cold_start_that_is_killed_goes_on_and_gives_the_same_bits(scripts, meddle):
    """kill -9 in the middle: weights and losses are those of the run that was left alone. An optimizer state
    or an order of the data that starts anew shows in the first step."""
    told = scripts.succeed("sft.py", *SFT, "taught")
    assert "trained on" in told and told.count("<|im_start|>assistant") >= 1  # a sample is shown
    assert not (scripts.folder / "taught.training").exists()
    [running] = scripts.start("sft.py", *SFT, "taught_killed")
    saved = scripts.folder / "taught_killed.training" / "checkpoints" / "step_000016"
    until(saved.exists)
    os.kill(running, signal.SIGKILL)
    assert scripts.wait()[0] == -signal.SIGKILL
    assert saved.exists() and not (scripts.folder / "taught_killed").exists()
    # then it is told to stop: what was done since the last checkpoint is saved
    [running] = scripts.start("sft.py", *SFT, "taught_killed")
    until(lambda: has_row(scripts.folder / "taught_killed.training", 20))
    os.kill(running, signal.SIGTERM)
    code, _, err = scripts.wait()
    last, _ = run.latest(scripts.folder / "taught_killed.training")
    assert code == 130 and last >= 20 and f"continues after step {last}, which is saved" in err
    # and again, when all is trained and saved but the model has no name yet
    code, said, _ = scripts(
        meddle, "os.rename taught_killed.training/model taught_killed", *SFT, "taught_killed"
    )
    assert code == -signal.SIGKILL and "continued after step" in said
    assert not (scripts.folder / "taught_killed").exists()
    assert "continued after step" in scripts.succeed("sft.py", *SFT, "taught_killed")
    assert (scripts.folder / "taught_killed" / "training.json").exists()
    assert not (scripts.folder / "taught_killed.training").exists()
    straight, killed = ((scripts.folder / name) for name in ("taught", "taught_killed"))
    assert (killed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").open()] for f in (straight, killed)]
    assert [row["step"] for row in rows[1]] == list(range(1, 41))
    for a, b in zip(*rows):
        assert all(a[key] == b[key] for key in ("step", "loss", "lr", "grad_norm", "tokens"))
    code, _, err = scripts("sft.py", *SFT, "taught_killed")
    assert code == 2 and "exists already" in err


def test_other_data_in_the_same_folder_is_another_run(scripts, cold):
    """A file that grew while the run was stopped would shuffle into an order in which some conversations come
    twice and others never."""
    file = scripts.folder / "said.jsonl"
    said = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"{i}."},
            ]
        }
        for i in range(10, 90)
    ]
    options = (
        "--model cold --data said.jsonl --batch 2 --lr 1e-4 --save_every 1 --threads 1 --out other".split()
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in said))
    [running] = scripts.start("sft.py", *options)
    saved = scripts.folder / "other.training" / "checkpoints" / "step_000002"
    until(saved.exists)
    os.kill(running, signal.SIGKILL)
    scripts.wait()
    file.write_text("".join(json.dumps(row) + "\n" for row in said[1:]))
    code, _, err = scripts("sft.py", *options)
    assert code == 2 and "other settings (sha256_examples" in err


# ---- collect.py --------------------------------------------------------------------------------------------


def test_rollouts_continue_after_a_kill_with_the_same_episodes_and_serve_both_commands(scripts, cold):
    """A filter over 30,000 problems takes days: what a kill leaves, half a line and half a chunk included, is
    kept, and the rest comes out as it would have. The second command samples nothing again."""
    options = "--model cold --data problems.jsonl --samples 8 --chunk 2 --threads 1 --max_prompt 300"
    options += " --max_new_tokens 150 --max_turns 3 --tool_seconds 5 --no-describe_tool --out rolled"
    out = scripts.folder / "rolled"

    def filtered() -> dict[str, str]:
        scripts.succeed("collect.py", "filter", *options.split())
        return {str(f.relative_to(out)): f.read_text() for f in out.rglob("*.json*")}

    straight = filtered()
    assert any(straight[f"problems/{d}.jsonl"] for d in ("easy", "medium", "hard"))
    lines = straight["rollouts.jsonl"].splitlines(keepends=True)
    assert len(lines) == 3
    for kept, after in ((2, lines), (1, lines[:1] + lines)):  # the first chunk of two, and half of it
        (out / "rollouts.jsonl").write_text("".join(lines[:kept]) + lines[kept][:25])
        assert filtered() == {**straight, "rollouts.jsonl": "".join(after)}
    assert "chunks of problems" not in scripts.succeed("collect.py", "collect", *options.split())
    found = load_conversations(str(out / "conversations.jsonl"))
    assert found
    for c in found:
        assert c["tools"] is None
        assert [m["role"] for m in c["messages"]] == ["user", "assistant", "tool", "assistant"]
    code, _, err = scripts("collect.py", "filter", *options.replace("--samples 8", "--samples 9").split())
    assert code == 2 and "other settings (samples 8, now 9)" in err
    short = options.replace("--max_prompt 300", "--max_prompt 5").replace("rolled", "short")
    code, _, err = scripts("collect.py", "filter", *short.split())
    assert code == 2 and "more than 5 (--max_prompt 5" in err


def test_data_py_is_the_door_to_it(scripts):
    """data.py --stitch, --filter, --collect: as a command data.py reaches up, as a module it does not."""
    row = {"question": "How many?", "answer": "5 + 2 = <<5+2=7>>7\n#### 7"}
    (scripts.folder / "set.jsonl").write_text(json.dumps(row) + "\n")
    said = scripts.succeed("data.py", "--stitch", "--data", "set.jsonl", "--out", "made")
    assert "1 conversations in made/conversations.jsonl" in said
    (found,) = load_conversations(str(scripts.folder / "made"))
    assert found["messages"][2] == {"role": "tool", "content": "7", "name": "python"}


# ---- does it learn? ----------------------------------------------------------------------------------------


def easy_world(folder: Path) -> None:
    """problems.jsonl, and conversations.jsonl in which three ways of answering are shown, one of them right.

    Three questions, so that a short cold start knows them; the answers still come from Python alone.
    """
    rng = random.Random(0)
    numbers = [(37, 41, 58), (62, 23, 71), (85, 19, 44)]
    lines = [
        {"problem": f"What is the remainder when {a} times {c} is divided by {b}?", "answer": str(a * c % b),
         "id": f"{a}", "family": "odd" if a % 2 else "even"} for a, c, b in numbers
    ]  # fmt: skip
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [p.messages for p in load_problems(str(folder / "problems.jsonl"))]
    with (folder / "conversations.jsonl").open("w") as file:
        for _ in range(480):
            i = rng.randrange(3)
            a, c, b = numbers[i]
            way = rng.choice(["right", "wrong", "guess"])
            code = f"print({a} * {c} % {b})" if way == "right" else f"print({a} + {c} % {b})"
            said, messages = str(a * c % b if way == "right" else a + c % b), list(asked[i])
            if way == "guess":
                messages.append(
                    {"role": "assistant", "content": f"I think it is \\boxed{{{rng.randint(1, 99)}}}."}
                )
            else:
                call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
                messages.append({"role": "assistant", "content": "Use Python.", "tool_calls": [call]})
                messages.append({"role": "tool", "content": said})
                messages.append({"role": "assistant", "content": f"The answer is \\boxed{{{said}}}."})
            file.write(json.dumps({"messages": messages}) + "\n")


def test_a_short_run_learns_to_answer_by_the_right_program(scripts, cold):
    """The test of everything together: a wrong sign, mask or alignment anywhere, and the share of right
    answers does not rise (the loss falls all the same, which is why "is it broken?" is the most asked
    question in public: huggingface/open-r1#239)."""
    more = dict(batch="48", group="8", eval_every="0", save_every="99")
    scripts.succeed("grpo.py", *command("learns", 8, **more))
    right = [row["reward/correct"] for row in rows(scripts.folder / "learns")]
    assert len(right) == 8 and right[0] < 0.6
    assert sum(right[-2:]) / 2 > right[0] + 0.25


def test_two_processes_never_write_one_run(tmp_path, capsys):
    """The second command would write over the first one's settings, metrics and checkpoints. (The lock
    belongs to what was opened, so that one process stands for two here.)"""
    run.open_run(tmp_path / "out", {"steps": 4}, set())
    with pytest.raises(SystemExit) as end:
        run.open_run(tmp_path / "out", {"steps": 4}, set())
    assert end.value.code == 2 and "another process" in capsys.readouterr().err
