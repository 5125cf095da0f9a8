"""An exercise can never rot: its fault applies to the core as it is, crashes nothing, and a test sees it."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from data import Problem
from rollout import Trajectory

EXERCISES = Path(__file__).resolve().parent.parent / "exercises"
sys.path.insert(0, str(EXERCISES))
import check  # noqa: E402
import start  # noqa: E402

# What takes seconds is imported once, then a fork for each copy; torch computes nothing before it forks.
RUNNER = """
import json, os, sys
import datasets, math_verify, numpy, pytest, torch, transformers
import torch.distributed.fsdp, transformers.models.qwen3.modeling_qwen3

class Seen:
    outcome, message = "not collected", ""
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcome = report.outcome if report.when == "call" else report.when
            self.message = report.longrepr.reprcrash.message if report.longrepr else ""

for i, (folder, test) in enumerate(json.loads(sys.argv[1])):
    if i > 1:  # two at a time
        os.wait()
    if not os.fork():
        os.chdir(folder)
        sys.path.insert(0, folder)
        seen = Seen()
        with open("pytest.log", "w") as log:
            os.dup2(log.fileno(), 1)
            alone = ["-o", "addopts=", "-p", "no:cacheprovider", "--rootdir", folder]
            pytest.main(["-q", *alone, test], plugins=[seen])
        with open("seen.json", "w") as file:
            json.dump([seen.outcome, seen.message], file)
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def named_test(name: str) -> str:
    return (EXERCISES / name / "test").read_text().strip()


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """What the named test says of a copy of the core with the fault: (outcome, message), by exercise."""
    found, folders = {}, {name: tmp_path_factory.mktemp(name) / "core" for name in start.NAMES}
    for name, folder in folders.copy().items():
        try:
            start.copy_core(folder, name)
        except SystemExit as error:
            found[name] = "not even begun", error.code
            del folders[name]
    work = json.dumps([[str(folder), named_test(name)] for name, folder in folders.items()])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, work], cwd=tmp_path_factory.mktemp("cwd"), timeout=280
    )
    assert done.returncode == 0
    return found | {name: json.loads((folder / "seen.json").read_text()) for name, folder in folders.items()}


@pytest.mark.parametrize("name", start.NAMES)
def test_the_named_test_catches_the_fault_and_nothing_crashes(seen, name):
    """A patch that no longer applies, a test that was renamed, a fault that the core has outgrown. And one
    that raises: a fault worth finding is silent, so the test fails at an assertion of its own."""
    outcome, message = seen[name]
    assert outcome == "failed", f"{named_test(name)}: {outcome} {message}"
    assert re.match("assert|AssertionError", message), message


@pytest.mark.parametrize("name", start.NAMES)
def test_an_exercise_is_whole(name):
    """Three hints, a picture, a solution; what a student reads names neither the test nor the file."""
    folder, test = EXERCISES / name, named_test(name)
    hints = re.findall(r"^(\d)\. ", (folder / "hints.md").read_text(), re.M)
    assert hints == ["1", "2", "3"]
    picture = (folder / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 60_000
    assert (EXERCISES / "solutions" / f"{name}.md").stat().st_size
    read = (folder / "README.md").read_text()
    assert read.startswith("# ") and test.split("::")[1].split("[")[0] not in read
    prose = re.sub(r"^    .*", "", read, flags=re.M)  # the commands name what they run
    assert not any(file in prose for file in start.faulty_files(name)), "which file it is in is a hint"
    assert len((folder / "bug.patch").read_text().splitlines()) < 30


def run(script: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(EXERCISES / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_student_starts_repairs_and_is_told_what_is_so_and_what_is_not(tmp_path, monkeypatch, capsys):
    """From the first command to the last one, with the smallest exercise. (That a fault makes its test fail
    is shown for each above.)"""
    name, folder = "negative-distance", tmp_path / "mine"
    assert run("start.py", name, str(folder))[0] == 0 and (folder / "exercise.md").exists()
    code, said = run("start.py", name, str(folder))
    assert code and "exists already" in said
    (folder / "loss.py").write_text((start.CORE / "loss.py").read_text())
    code, said = run("check.py", name, str(folder))
    assert code == 0 and said.endswith("repaired\n")
    for fails, said in (([named_test(name)], "not repaired yet"), (["a::b"], "now these fail:\na::b")):
        monkeypatch.setattr(check, "failing", lambda *_, fails=fails: fails)
        monkeypatch.setattr(sys, "argv", ["check.py", name, str(folder)])
        assert check.main() == 1 and said in capsys.readouterr().out


def test_an_unknown_exercise_gets_the_nearest_name():
    code, said = run("start.py", "flatline")
    assert code and "did you mean flat-line?" in said
    assert (
        "flat-line" in run("start.py")[1]
        and "k1 is -KL" in run("check.py", "negative-distance", "--explain")[1]
    )


def test_imports_run_one_way_as_the_readme_says():
    """A reader opens the files in that order, and takes pieces out of it."""
    text = " ".join((start.CORE / "README.md").read_text().split())
    layers = re.search(r"Imports run one way: (.*?)\.", text)[1].split(" → ")
    place = {name: i for i, layer in enumerate(layers) for name in layer.split(", ")}
    files = {path.stem: path.read_text() for path in start.CORE.glob("*.py")}
    assert place.keys() == files.keys() | {"kernels"}
    for name, source in files.items():
        for node in ast.parse(source).body:  # what is imported with the file
            found = (
                [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            )
            found += [node.module] if isinstance(node, ast.ImportFrom) else []
            used = {module.split(".")[0] for module in found} & place.keys()
            assert all(place[module] < place[name] for module in used), f"{name} imports {used}"


# ---- "to change X, edit these lines" (README) --------------------------------------------------------------


def changed(file: str, old: str, new: str) -> ModuleType:
    """The module with a line of it replaced, as a reader would."""
    source = (start.CORE / file).read_text()
    assert source.count(old) == 1, f"{file} has no such line any more: {old}"
    module = ModuleType(file.removesuffix(".py"))
    exec(compile(source.replace(old, new), file, "exec"), module.__dict__)
    return module


def test_another_reward_is_one_line_and_is_logged(tokenizer):
    """A hundredth for each token saved under 100 is in the sum, and in the metrics under its name."""
    line = '            "overlong": overlong_penalty('
    brief = '            "brief": 0.01 * (100 - sum(t.mask)),\n'
    episodes = changed("episodes.py", line, brief + line)
    said = tokenizer.encode("\\boxed{16}")
    t = Trajectory([5, *said], [0] + [1] * len(said), [0.0] * (1 + len(said)), 1, [], "stop")
    config = SimpleNamespace(tool_reward=False, max_new_tokens=200, overlong_buffer=10)
    sampler = SimpleNamespace(max_len=300)
    agents = SimpleNamespace(tokenizer=tokenizer, tool=None, config=config, sampler=sampler)
    found = episodes.Agents.reward(agents, t, Problem([], "16", "math", "mod", "p"))
    bonus = 0.01 * (100 - len(said))
    assert found["reward"] == pytest.approx(1.0 + bonus)
    assert episodes.measure([found])["reward/brief"] == pytest.approx(bonus)


def test_another_loss_is_one_line():
    """The clipped importance weight of MiniMax-M1 (CISPO, arXiv 2506.13585): no token loses its gradient,
    which is -A min(ratio, 1.28) by log pi."""
    line = "torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))"
    cispo = "-advantages * ratio.detach().clamp(max=1 + clip_high) * logp"
    policy_loss = changed("loss.py", line, cispo).policy_loss
    logp = torch.tensor([2.0, 0.5, 2.0]).log().requires_grad_()
    loss, _ = policy_loss(logp, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), torch.ones(3), dual_clip=0)
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-1.28, -0.5, 1.28])
