"""A run in the terminal: a live view under the lines that scroll away, and a trajectory in colours.

    step 12/32  3:05 left  ███████░░░░░░░░░░░░░  8200 tokens/s
      right, held out   0.863  ▂▄▆▇
      ...
      seconds: train 1.9, reward 0.0, rollout 1.0 (prefill 0.2, decode 0.6, ...)
      step 13, 0:07: 143 episodes sampled, 113 in work, 12034 tokens

The view is drawn below what was printed, and the cursor goes back to its first, empty line; whatever is
printed next erases the view before. So nothing that was printed is lost, a change of the window's size breaks
nothing, and the cursor is never hidden. Left out: colours in the view, scrolling, keys.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter

COLOURS = {"prompt": "2", "policy": "32", "tool": "36", "right": "1;32", "wrong": "1;31"}
FOLLOWED = {
    "eval/correct": "right, held out",
    "reward/correct": "right, batch",
    "tool/used": "tool used",
    "tool/success": "calls that ran",
    "policy/entropy": "entropy, nats",
}
ERASE = "\r\033[J"  # from the cursor's line to the end of the screen


def obeys() -> bool:
    """Whether our output is a terminal that understands ANSI codes; of the ranks of a run the first only."""
    first = os.environ.get("RANK", "0") == "0"
    return first and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def erase() -> bytes:
    """What takes the view off the screen, for what is not written through sys.stdout and sys.stderr."""
    return ERASE.encode() if obeys() and os.isatty(2) else b""


def colours() -> bool:
    return obeys() and not os.environ.get("NO_COLOR")


def paint(kind: str, text: str) -> str:
    """Colour on a terminal, elsewhere bars around what the policy did not write. Control codes are shown, not
    obeyed."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if colours():
        return f"\033[{COLOURS[kind]}m{text}\033[0m"
    return f"|{text}|" if kind in ("prompt", "tool") else text


def paint_turns(tokenizer, ids: list[int], mask: list[int], prompt_len: int) -> str:
    """A trajectory's text: prompt grey, the policy's tokens (mask 1) green, the tool's cyan."""
    text = paint("prompt", tokenizer.decode(ids[:prompt_len]))
    for m, turn in groupby(zip(mask[prompt_len:], ids[prompt_len:]), key=itemgetter(0)):
        text += paint("policy" if m else "tool", tokenizer.decode([i for _, i in turn]))
    return text


def show(episode: dict, tokenizer, title: str) -> None:
    """One trajectory in colours, its verdict, its reward and the parts of it."""
    text = paint_turns(tokenizer, episode["ids"], episode["mask"], episode["prompt_len"])
    verdict = "right" if episode["correct"] else "wrong"
    parts = ", ".join(f"{k} {v:+.2f}" for k, v in episode["reward_parts"].items() if v)
    reward = f"reward {episode['reward']:+.2f} = {parts}"
    print(f"\n---- {title} ----\n{text}\n---- {paint(verdict, verdict)}; {reward}\n", flush=True)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def split(row: dict) -> str:
    """Where the seconds of a step went, and those of its rollout."""

    def some(names: str) -> str:
        return ", ".join(f"{k} {row[f'time/{k}']:.1f}" for k in names.split() if f"time/{k}" in row)

    parts = some("prefill decode sampling tool_wait idle_slots").replace("_", " ")
    whole = some("train reward rollout")
    return f"  seconds: {whole}" + f" ({parts})" * bool(parts) if whole else ""


def view(rows: list[dict], steps: int | None, columns: int) -> list[str]:
    """Step, time left and speed, then the five numbers that matter, each with its course in small bars."""
    step, last = (rows[-1]["step"], rows[-1]) if rows else (0, {})
    seconds = [r["time/step"] for r in rows if "time/step" in r][-5:]
    head = [f"step {step}" + (f"/{steps}" if steps else "")]
    if steps and seconds:
        done = min(20, 20 * step // steps)
        left = (steps - step) * sum(seconds) / len(seconds)
        head += [f"{clock(left)} left", "█" * done + "░" * (20 - done)]
    head += [f"{last['speed/tokens_per_s']:.0f} tokens/s"] if "speed/tokens_per_s" in last else []
    lines = ["  ".join(head)]
    for key, label in FOLLOWED.items():
        values = [r[key] for r in rows if key in r][-max(1, min(40, columns - 29)) :]
        top = max([*values, 1e-9 if key == "policy/entropy" else 1.0])
        bars = "".join("▁▂▃▄▅▆▇█"[max(0, min(7, int(8 * v / top)))] for v in values)
        lines.append(f"  {label:16}" + (f"{values[-1]:7.3f}  {bars}" if values else "      –"))
    return lines + [split(last)] * bool(split(last))


def watch(log, steps: int, sampler) -> Callable:
    """What `live` shows of a run in training: its view, and what the sampler is doing in this step."""

    def lines(step: int, seconds: float, columns: int) -> list[str]:
        stats, rows = sampler.stats, [*sampler.queue, *sampler.running]
        work = sum(row.trajectory is not None for row in rows)
        now = f"  step {step}, {clock(seconds)}: {stats.get('ended', 0)} episodes sampled, "
        now += (f"{work} in work, " if work else "") + f"{stats.get('tokens', 0)} tokens"
        return view(log.rows, steps, columns) + [now]

    return lines


def live(items: Iterable, lines: Callable, every: float = 0.5) -> Iterator:
    """The items, one after the other. Meanwhile lines(item, seconds since it came, columns) stand below what
    is printed, drawn anew every half second; where the output is no terminal, nothing.
    """
    if not obeys():
        yield from items
        return
    lock, ended, now = threading.RLock(), threading.Event(), {}
    whole = [True]  # the last line printed has its end: only then there is a place for the view

    def wrap(write: Callable) -> Callable:
        def erase_and_write(text: str) -> int:
            with lock:
                write(ERASE + text if whole[0] and text else text)
                whole[0] = text.endswith("\n") if text else whole[0]
            return len(text)

        return erase_and_write

    def draw() -> None:
        while not ended.wait(every):
            columns, height = os.get_terminal_size(sys.stdout.fileno())
            columns = columns or 80  # some pseudo-terminals have no size
            with lock:
                if not whole[0] or not now:
                    continue
                found = lines(now["item"], time.monotonic() - now["since"], columns)
                found = ["", *(line[: columns - 1] for line in found)][: max(1, (height or 24) - 1)]
                up = f"\033[{len(found) - 1}A" if len(found) > 1 else ""
                streams[sys.stdout](ERASE + "\n".join(found) + "\r" + up)
                sys.stdout.flush()

    streams = {stream: stream.write for stream in (sys.stdout, sys.stderr) if stream.isatty()}
    for stream, write in streams.items():
        stream.write = wrap(write)
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        for item in items:
            now.update(item=item, since=time.monotonic())
            yield item
    finally:
        ended.set()
        thread.join()
        for stream, write in streams.items():
            stream.write = write
        if whole[0]:
            sys.stdout.write(ERASE)
            sys.stdout.flush()


def follow(read: Callable[[], dict]) -> None:
    """Show a run (metrics.read_run) while it is written, until it ends: a line a step, and the live view."""

    def reads():
        ended = False
        while not ended:
            run = read()
            steps = run["config"].get("steps")
            steps = steps if isinstance(steps, (int, float)) and math.isfinite(steps) else None
            yield run["rows"], steps
            ended = run["rows"] and steps and run["rows"][-1]["step"] >= steps
            time.sleep(0 if ended else 1)

    printed = -1
    for seen in live(reads(), lambda item, _, columns: view(*item, columns)):
        for row in [r for r in seen[0] if r["step"] > printed]:
            printed, numbers = row["step"], [f"{t} {row[k]:.3f}" for k, t in FOLLOWED.items() if k in row]
            print(f"step {printed}", *numbers, sep="  ", flush=True)
    if obeys():
        print(*view(*seen, 80), sep="\n")
