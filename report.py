"""One HTML page of a run: its curves, its trajectories token by token, and what the paper saw.

    python report.py runs/NAME                writes runs/NAME/report.html
    python report.py runs/NAME runs/OTHER     the same, with the curves of several runs laid over each other
    python report.py runs/NAME --png          also writes runs/NAME/curves.png (needs matplotlib)
    python report.py --follow runs/NAME       live view of a running run in the terminal

The page opens from disk and asks the network for nothing. To stay under 5 MB it holds all metrics.jsonl but a
choice of trajectories: five steps, and in each the groups whose rewards differ most. What a model or a tool
wrote is data: it enters the page as JSON, the document as text nodes, and no script but the page's may run.
Leaves out: statistics over seeds and samples (evaluate.py). To copy it: take report_page.html, metrics.py,
terminal.py and tool_calls.py along, write a run's files as grpo.py does; it needs the package tokenizers.
"""

import argparse
import base64
import hashlib
import html
import json
import os
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from tokenizers import Tokenizer

from metrics import BAND, is_number, observations, panels, read_jsonl, read_run, say, write_png
from terminal import follow
from tool_calls import parse_tool_calls

TOKENS_IN_PAGE = 80_000  # about 3 MB


def pieces(ids: list[int], decode, cache: dict[int, str]) -> list[str]:
    """The text of each token; a character spread over tokens stands at the last, the others get ''."""
    texts, held = [], []
    for i in ids:
        text = cache[i] = cache[i] if i in cache else decode([i])
        if held or "\ufffd" in text:
            held.append(i)
            text = decode(held)
            if text.endswith("\ufffd") and len(held) < 4:  # no character has more than four bytes
                text = ""
            else:
                held = []
        texts.append(text)
    return texts


def trajectory(row: dict, tokens) -> dict:
    """A trajectory for the page: segments by who wrote them, tool calls, and the numbers of policy tokens.

    tokens(ids) -> (their places in the page's table of tokens, text)
    """
    ids, mask, start = row["ids"], row["mask"], row["prompt_len"]
    results, codes, segments = list(row.get("tool_results") or []), [], []
    parts = groupby(zip(mask[start:], ids[start:], strict=True), key=itemgetter(0))
    parts = [("policy" if m else "tool", [i for _, i in part]) for m, part in parts]
    # the last one takes results that the policy never saw
    for by, part in [("prompt", ids[:start]), *parts, ("tool", [])]:
        numbers, text = tokens(part)
        calls = []
        if by == "policy":
            said = [(c.arguments.get("code"), c) for c in parse_tool_calls(text)]
            codes = [x if isinstance(x, str) else c.error or json.dumps(c.arguments) for x, c in said]
        elif by == "tool":  # one result for each call of the turn before
            n = max(1, len(codes)) if part else len(results)
            calls, results = [dict(r, code=c) for r, c in zip(results[:n], codes + [None] * n)], results[n:]
        if part or calls or by == "prompt":
            segments.append({"by": by, "tokens": numbers, "calls": calls})

    def policy(values: list | None, digits: int = 4) -> list | None:
        if not values or len(values) != len(ids):
            return None
        return [float(f"{v:.{digits}g}") if is_number(v) else None for v, m in zip(values, mask) if m]

    both = zip(row.get("old_logprobs") or [], row["logprobs"])
    gap = [a - b if is_number(a) and is_number(b) else None for a, b in both]
    keep = ("sample_index", "correct", "reward", "reward_parts", "advantage", "finish")
    numbers = {k: policy(row.get(k)) for k in ("entropy", "ratio")}
    numbers |= {"logp": policy(row["logprobs"]), "gap": policy(gap, 2)}
    return {k: row.get(k) for k in keep} | numbers | {"segments": segments}


def chosen_trajectories(run: dict) -> dict:
    """{groups: [{step, family, answer, rows}], pieces: [(id, text)]}; up to TOKENS_IN_PAGE tokens.

    Of a group the four best and four worst or, where these do not fit, the best and the worst; best first.
    """
    found, candidates, table, cache, left = [], [], {}, {}, TOKENS_IN_PAGE
    file, tokenizer = run["folder"] / "tokenizer" / "tokenizer.json", None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more special
        say(f"tokens are shown as numbers, for {file} cannot be read ({error})")

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else ""
        if text[:1] != " " and tokenizer and (tokenizer.id_to_token(ids[0]) or "").startswith("▁"):
            text = " " + text  # a decoder of the Llama 2 kind drops the space of a first word
        return text or "".join(f"⟨{i}⟩" for i in ids)

    def tokens(ids: list[int]) -> tuple[list[int], str]:
        texts = pieces(ids, decode, cache)
        return [table.setdefault(piece, len(table)) for piece in zip(ids, texts)], "".join(texts)

    paths = sorted((run["folder"] / "trajectories").glob("step_" + "[0-9]" * 6 + ".jsonl"))
    evenly = {round(i * (len(paths) - 1) / 4) for i in range(5)}  # the first, the last, and three between
    for path in (path for i, path in enumerate(paths) if i in evenly):
        rows, groups = read_jsonl(path), {}
        for row in rows:
            if is_number(row.get("reward")) and isinstance(row.get("ids"), list):
                groups.setdefault(str(row.get("prompt_index")), []).append(row)
        if lost := len(rows) - sum(map(len, groups.values())):
            say(f"{lost} trajectories of {path} lack ids or a reward and are left out")
        ranked = [sorted(g, key=lambda r: -r["reward"]) for g in groups.values()]
        ranked.sort(key=lambda g: g[-1]["reward"] - g[0]["reward"])
        candidates += [(rank, int(path.stem[5:]), g) for rank, g in enumerate(ranked[:4])]
    candidates.sort(key=itemgetter(0))  # each step's first group before any second
    for rank, step, group in candidates:
        group = group if len(group) <= 8 else group[:4] + group[-4:]
        if sum(len(r["ids"]) for r in group) > left:
            group = group[:1] + group[1:][-1:]
        if (size := sum(len(r["ids"]) for r in group)) > left:
            continue
        try:
            shown = {"step": step, "family": group[0].get("family"), "answer": group[0].get("answer")}
            found.append((step, rank, shown | {"rows": [trajectory(r, tokens) for r in group]}))
            left -= size
        except Exception as error:  # whatever is wrong in the file, the page does without this group
            say(f"a group of step {step} is left out ({error!r})")
    return {"groups": [g for *_, g in sorted(found, key=itemgetter(0, 1))], "pieces": list(table)}


def write_page(runs: list[dict]) -> Path:
    """Writes report.html in the first run's folder, whole or not at all, and returns its path."""
    config, data = runs[0]["config"], chosen_trajectories(runs[0])
    data |= {"panels": panels(runs), "band": BAND, "paper": observations(runs[0]["rows"]), "runs": []}
    for run in runs:
        rows = [{k: v if k == "step" else float(f"{v:.5g}") for k, v in row.items()} for row in run["rows"]]
        data["runs"].append({"name": run["name"], "rows": rows})
    bounds = [config.get("clip_low"), config.get("clip_high")]
    data["clip"] = bounds if all(map(is_number, bounds)) else [0.2, 0.28]
    data |= {"dual": config.get("dual_clip") or 0, "sequence": config.get("ratio") == "sequence"}
    done = max((r["step"] for r in runs[0]["rows"]), default=0)
    about = {"step": f"{done} of {config.get('steps', '?')}"}
    about |= {k: config.get(k) for k in ("preset", "model", "seed")}
    about |= {"command": " ".join(map(str, config.get("command") or []))}
    data["about"] = " · ".join(f"{k} {v}" for k, v in about.items() if v not in (None, ""))
    text = json.dumps(data, separators=(",", ":"))  # ASCII: line separators and lone surrogates are escaped
    for c in "<>&":  # no text may end the script element or open a comment
        text = text.replace(c, f"\\u{ord(c):04x}")
    head, tail = Path(__file__).with_name("report_page.html").read_text(encoding="utf-8").split("@DATA")
    script = tail.split("<script>")[1].split("</script>")[0]  # the page's policy names it by its hash
    sha = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = head.replace("@SHA", sha).replace("@NAME", html.escape(runs[0]["name"]))
    path = runs[0]["folder"] / "report.html"
    path.with_suffix(".part").write_text(head + text + tail, encoding="utf-8", errors="replace")
    os.replace(path.with_suffix(".part"), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="One HTML page of a run.")
    parser.add_argument("runs", nargs="+", metavar="runs/NAME", help="runs; the first gets the page")
    parser.add_argument("--png", action="store_true", help="also write curves.png")
    parser.add_argument("--follow", action="store_true", help="only show the first run live in the terminal")
    args = parser.parse_args()
    try:
        if args.follow:
            return follow(lambda: read_run(args.runs[0]))
        runs = [read_run(folder) for folder in args.runs]
        for write in [write_page, write_png][: 1 + args.png]:
            print(f"wrote {write(runs)}")
    except (OSError, ImportError) as error:
        raise SystemExit(f"report.py: {error}") from None
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
