"""What a person sees in the terminal, tried in a pseudo-terminal and on a small model of a screen.

verl and TRL print pages of numbers a step, tqdm bars are torn by the first warning; here nothing that was
printed may be lost, and nothing of the view may stay behind.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

import terminal

ROOT = Path(terminal.__file__).parent


class Screen:
    """A terminal that obeys what the view may use, and nothing else: \\r, \\n, ESC[J, ESC[nA, ESC[...m."""

    def __init__(self, columns: int, height: int):
        self.columns, self.height = columns, height
        self.lines, self.row, self.column, self.past = [""], 0, 0, []  # past: scrolled away

    def down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")
        if len(self.lines) > self.height:
            self.past.append(self.lines.pop(0))
            self.row -= 1

    def feed(self, text: str):
        for code, plain in re.findall(r"(\033\[[0-9;?]*[A-Za-z]|[\r\n])|([^\033\r\n]+)", text):
            if code == "\n":
                self.down()
            elif code == "\r":
                self.column = 0
            elif code == "\033[J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            elif code.endswith("A"):
                assert int(code[2:-1]) <= self.row, "the view goes up past the top of the screen"
                self.row -= int(code[2:-1])
            else:
                assert not code or code.endswith("m"), f"unknown code {code!r}"
            for c in plain:
                if self.column == self.columns:
                    self.down()
                    self.column = 0
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + c + line[self.column + 1 :]
                self.column += 1

    def all(self) -> list[str]:
        return [line.rstrip() for line in self.past + self.lines]


class Pty:
    """A program whose terminal we are."""

    def __init__(self, *command: str, columns=80, height=24, **env):
        self.master, slave = pty.openpty()
        self.resize(columns, height)
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **env}

        def start():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite in the background ignores it
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C comes through it

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=start, **streams)
        os.close(slave)
        self.text = ""

    def resize(self, columns: int, height: int):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, columns, 0, 0))

    def read(self, until: str = "", seconds: float = 60) -> str:
        """Everything up to a text, or to the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and until in self.text):
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    data = os.read(self.master, 1 << 16)
                except OSError:  # the other side is closed
                    break
                self.text += data.decode(errors="replace")
        assert until in self.text, self.text[-2000:]
        return self.text

    def end(self) -> int:
        self.read()
        code = self.process.wait(60)
        os.close(self.master)
        return code


RUN = """
import sys, time, types, terminal
log = types.SimpleNamespace(rows=[])
row = types.SimpleNamespace(trajectory=1)
sampler = types.SimpleNamespace(stats={"ended": 143, "tokens": 12034}, queue=[row], running=[row, row])
def main():
    for step in terminal.live(range(1, 5), terminal.watch(log, 400, sampler), every=0.1):
        print("working on", step, end="", flush=True)
        time.sleep(0.3)  # the line is not whole yet: no view may tear it
        print(" and on")
        print(f"note {step}: " + "x" * 60, file=sys.stderr)
        time.sleep(WAIT)
        log.rows.append({"step": step, "time/step": 20.0, "reward/correct": step / 4, "policy/entropy": 0.1})
    print("done")
"""


def start(wait: float, script: str = "main()", **how) -> Pty:
    return Pty(sys.executable, "-c", RUN.replace("WAIT", str(wait)) + script, **how)


AS_OURS = "import run; run.run_script(main)"  # imports torch, which takes seconds


def test_view_has_time_left_and_five_numbers_with_bars():
    """By hand: 3 of 12 steps done at 20 s each, so 9 more take 3 minutes; a quarter of 20 blocks are 5."""
    always = {"time/step": 20.0, "speed/tokens_per_s": 812.4}
    rows = [always | {"step": s, "reward/correct": s / 4} for s in (1, 2, 3)]
    lines = terminal.view(rows, 12, 80)
    assert lines[0] == "step 3/12  3:00 left  " + "█" * 5 + "░" * 15 + "  812 tokens/s"
    assert lines[2].split() == ["right,", "batch", "0.750", "▃▅▇"]
    assert len(lines) == 6 and lines[1].endswith("–")
    assert terminal.view([], None, 80)[0] == "step 0"
    many = terminal.view([{"step": i, "tool/used": i / 99} for i in range(100)], None, 35)
    assert many[3].split()[-1] == "█" * 6 and len(many[3]) < 35  # what is cropped is old


@pytest.mark.parametrize("columns, height", [(80, 24), (28, 24), (100, 6), (9, 3)])
def test_what_is_printed_stays_and_the_view_goes(columns, height):
    """Redrawing with "up N lines" eats what others printed, and in a narrow window lines wrap and pile up."""
    program = start(0.4, columns=columns, height=height)
    assert program.end() == 0
    screen = Screen(columns, height)
    screen.feed(program.text)
    expected = []
    for step in range(1, 5):
        expected += [f"working on {step} and on", f"note {step}: " + "x" * 60]
    whole = "".join(screen.all())
    assert whole.replace(" ", "") == "".join([*expected, "done"]).replace(" ", "")
    if columns == 80:
        assert screen.all() == [*expected, "done", ""]
        assert "step 2, 0:00: 143 episodes sampled, 3 in work, 12034 tokens" in program.text
    drawn = re.findall(r"\033\[J([^\033]*)\r\033\[\d+A", program.text)
    assert drawn and all(len(line) < columns for view in drawn for line in view.split("\r\n"))
    assert all(view.count("\n") < height for view in drawn)


def test_view_follows_the_size_of_the_window():
    """A width asked for once is wrong after the first change of the window, and every line wraps."""
    program = start(0.5, columns=100)
    program.read("tokens\r\033")
    program.resize(30, 10)
    before = len(program.text)
    assert program.end() == 0
    drawn = re.findall(r"\033\[J([^\033]*)\r\033\[\d+A", program.text[before:])[1:]  # one was under way
    assert len(drawn) > 3 and all(len(line) < 30 for view in drawn for line in view.split("\r\n"))


def test_ctrl_c_leaves_a_clean_line_and_a_cursor():
    """A hidden cursor, or half a view under the prompt, is what many programs leave in the shell."""
    program = start(30.0, AS_OURS)
    program.read("tokens\r\033")
    os.write(program.master, b"\x03")
    assert program.end() == 130
    assert "\033[?25l" not in program.text  # it is never hidden
    screen = Screen(80, 24)
    screen.feed(program.text)
    stopped = "stopped; the same command continues from what is saved"
    assert screen.all()[:2] == ["working on 1 and on", "note 1: " + "x" * 60]
    assert [x.replace("^C", "") for x in screen.all()[2:]] == ["", stopped, ""]
    assert (screen.row, screen.column) == (len(screen.lines) - 1, 0)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"RANK": "1"}])
def test_a_dumb_terminal_and_other_ranks_get_plain_lines(env):
    """Control codes are garbage where nobody obeys them, and eight ranks would draw eight views."""
    program = start(0.1, **env)
    assert program.end() == 0
    assert "\033" not in program.text and "done" in program.text


def test_no_color_and_other_encodings(monkeypatch):
    """NO_COLOR asks for no colour, not for no view; a terminal without block letters must not end a run."""
    program = start(0.4, AS_OURS, NO_COLOR="1", PYTHONIOENCODING="latin-1")
    assert program.end() == 0
    assert "right, batch" in program.text and not re.search(r"\033\[[0-9;]*m", program.text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (
        terminal.paint("policy", "a\033[2J\u202e") == "\033[32ma\\x1b[2J\\u202e\033[0m"
    )  # shown, not obeyed
    monkeypatch.setenv("NO_COLOR", "1")
    assert [terminal.paint(kind, "a") for kind in ("prompt", "policy", "tool")] == ["|a|", "a", "|a|"]


def test_an_error_in_training_ends_the_view():
    """A thread that goes on drawing over a trace hides why the run ended."""
    text = "import terminal, time\nfor i in terminal.live(range(3), lambda *a: ['view'], 0.1):\n"
    program = Pty(sys.executable, "-c", text + "    time.sleep(0.7)\n    raise ValueError('lost')\n")
    assert program.end() == 1
    screen = Screen(80, 24)
    screen.feed(program.text)
    assert "view" in program.text and "view" not in screen.all()
    assert screen.all()[-2:] == ["ValueError: lost", ""]


def test_follow_shows_the_view_of_a_running_run_and_ends_with_it(tmp_path):
    """Whoever did not start the run wants to see the same."""
    (tmp_path / "config.json").write_text('{"steps": 2}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/correct": 0.25}\n')
    program = Pty(sys.executable, str(ROOT / "report.py"), "--follow", str(tmp_path))
    program.read("0.250  ▃")

    def write():
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps({"step": s, "tool/used": 0.5}) + "\n" for s in (1, 2)))

    threading.Timer(0.3, write).start()
    assert program.end() == 0
    screen = Screen(80, 24)
    screen.feed(program.text)
    lines = screen.all()
    assert lines[:3] == [
        "step 0  right, held out 0.250",
        "step 1  tool used 0.500",
        "step 2  tool used 0.500",
    ]
    assert lines[3] == "step 2/2" and lines[6] == "  tool used         0.500  ▅▅" and len(lines) == 10


def test_ctrl_c_ends_follow_without_a_trace(tmp_path):
    """It has no other end while the run is going on."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    program = Pty(sys.executable, str(ROOT / "report.py"), "--follow", str(tmp_path))
    program.read("step 0")
    time.sleep(0.7)
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 0 and "Traceback" not in program.text
