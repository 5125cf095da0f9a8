"""The math grader against itself: is every gold answer equal to itself, and which different ones are called
equal?

    python bench/grader.py --data DIR               DIR: math500.jsonl, gsm8k_train.jsonl, aime2024.jsonl, ...
    python bench/grader.py --data DIR --every 40    one pair in 40: some seconds in place of minutes
    python bench/grader.py --data DIR --alone       math-verify alone, as it comes, on the same pairs

For each set: each gold stands in a box as the response (must be right); then each ordered pair of different
gold texts is graded, one as gold, the other as response. Pairs judged equal are printed: read them, each
must really be equal. No filter, except that pairs of two integers are compared by int() and counted apart.
"""

import argparse
import json
import logging
import sys
import time
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from math_verify import parse, verify

import math_worker
from reward import math_correct


def golds(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [str(row["answer"]).rpartition("####")[2].strip() for row in rows]


def boxed(text: str) -> str:
    return f"So it is $\\boxed{{{text}}}$."


def math_verify_alone(response: str, gold: str) -> bool:
    """What a grader that only calls math-verify says (no time limit: enough for gold answers)."""
    return verify(
        parse(boxed(gold), parsing_timeout=None), parse(response, parsing_timeout=None), timeout_seconds=None
    )


def check(path: Path, every: int, math_correct) -> None:
    answers = golds(path)
    distinct = sorted(set(answers))
    misses = [g for g in answers if not math_correct(boxed(g), g)]
    print(
        f"\n{path.name}: {len(answers)} golds, {len(distinct)} different; not equal to themselves: {misses}"
    )
    texts = [g for g in distinct if not g.lstrip("-").isdigit()]
    integers = [g for g in distinct if g.lstrip("-").isdigit()]
    same_integers = [(a, b) for a, b in permutations(integers, 2) if int(a) == int(b)]
    pairs = [p for p in permutations(distinct, 2) if p[0] in texts or p[1] in texts][::every]
    start, equal, slow = time.perf_counter(), [], 0.0
    before = math_worker.counts.copy()
    for gold, other in pairs:
        began = time.perf_counter()
        if math_correct(boxed(other), gold):
            equal.append((gold, other))
        slow = max(slow, time.perf_counter() - began)
    seconds = time.perf_counter() - start
    print(f"  {len(integers) * (len(integers) - 1)} ordered pairs of integers, equal: {same_integers}")
    print(f"  {len(pairs)} ordered pairs with another kind of answer, {seconds:.0f} s, slowest {slow:.2f} s")
    print(f"  ended otherwise: {dict(math_worker.counts - before)}")
    print(f"  judged equal: {len(equal)}")
    for gold, other in equal:
        print(f"    {gold}    =    {other}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl files")
    parser.add_argument("--every", type=int, default=1, help="grade one pair in so many")
    parser.add_argument("--alone", action="store_true", help="grade by math-verify alone, for comparison")
    args = parser.parse_args()
    logging.disable()  # math-verify warns at each call that its own time limit is off
    found = sorted(args.data.glob("*.jsonl"))
    if not found:
        raise SystemExit(f"no .jsonl file in {args.data}; pass the folder of the data sets with --data")
    for path in found:
        check(path, args.every, math_verify_alone if args.alone else math_correct)
