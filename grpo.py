"""GRPO-TCR: reinforcement learning of a policy that calls Python while it reasons (arXiv 2510.11701).

    python grpo.py                                  # a laptop: cold start, then 32 steps, a few minutes
    torchrun --nproc_per_node 8 grpo.py --preset qwen3-4b --model M --data D --out runs/NAME
    python grpo.py --preset tiny+grpo-scr           # another recipe of the paper: grpo-t, grpo-tcr, grpo-scr
    the same command again continues a run that was stopped

One step: sample a group of trajectories of each prompt, with the tool (rollout.py); reward them (reward.py);

    r_i  = +1 right, -1 wrong; with tool_reward wrong earns 0.1 a tool round, to -0.6   2510.11701 eq. 8
           down by up to 1 in the last `overlong_buffer` tokens                         R: overlong shaping
    A_i  = (r_i - mean(r_group)) / (std(r_group) + 1e-6)                                GRPO 2402.03300 eq. 3
    loss = mean over all policy tokens of the optimizer batch of                        T: token-level loss
           max(-A_i ratio, -A_i clip(ratio, 1 - 0.2, 1 + 0.28))                         C: clip higher
           and, where A_i < 0, at most -10 A_i                                          dual clip

with ratio = pi(token) / pi_old(token). No critic; a KL term, an entropy bonus and other means and ratios are
options, off. The tool's tokens are in the context and count for the length, but are never in the loss.

Left out: asynchronous rollouts, and any launcher beyond torchrun.
"""

import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import fit
import math_equal
import policy as net
import run
import sft
import tiny
from config import PRESETS, Config, check
from data import load_problems
from episodes import Agents, alarms, evaluate, fitting, measure
from loss import group_advantages, kl_estimate, loss_weights, policy_loss
from options import fail, parse_args
from sampling import random_key, shuffled
from terminal import clock, live, show, split, watch
from tools import PythonTool

# ---- one batch ---------------------------------------------------------------------------------------------


def draw(data: list, config: Config, step: int) -> list:
    """The problems of a step; those of tiny.py where there is no data. A function of the step alone: a run
    that is continued sees the same, and no position in the data needs storing."""
    n = config.batch // config.group
    if not data:
        return tiny.problems("train", n, seed=config.seed * 1_000_000 + step)
    places = (divmod(i, len(data)) for i in range((step - 1) * n, step * n))
    return [data[shuffled(len(data), config.seed, epoch)[i]] for epoch, i in places]


def draw_others(data: list, seed: int, n: int) -> list:
    """n problems to replace those whose samples all earned the same; one of these may come again."""
    if not data:
        return tiny.problems("train", n, seed=seed)
    return [data[random_key(seed, i) % len(data)] for i in range(n)]


def sample(agents: Agents, problems: list, data: list, config: Config, seed: int) -> tuple[list[dict], dict]:
    """A group of episodes of each problem, and their metrics.

    Groups whose rewards are all equal teach nothing: config.resample times they are replaced by those of
    problems drawn anew (DAPO 2503.14476 eq. 11, which asks for 0 < right answers < group; with a bound, for
    on problems that are all too easy or too hard it would never end). The metrics are of the first episodes:
    after the replacement any policy looks half right.
    """
    episodes = agents.sample(problems, config.group, seed)
    found, seconds, replaced = measure(episodes), Counter(agents.seconds), 0
    tokens = [len(e["ids"]) - e["prompt_len"] for e in episodes]
    for attempt in range(1, config.resample + 1):
        groups = defaultdict(set)
        for e in episodes:
            groups[e["prompt_index"]].add(e["reward"])
        flat = [prompt for prompt, rewards in groups.items() if len(rewards) == 1]
        if not flat:
            break
        key = random_key(seed, attempt)
        new = agents.sample(draw_others(data, key, len(flat)), config.group, key)
        for e in new:  # the i-th new problem takes the place of the i-th flat one
            e["prompt_index"] = flat[e["prompt_index"]]
        kept = [e for e in episodes if e["prompt_index"] not in flat]
        episodes = sorted(kept + new, key=lambda e: (e["prompt_index"], e["sample_index"]))
        seconds.update(agents.seconds)  # a Counter: adds
        tokens += [len(e["ids"]) - e["prompt_len"] for e in new]
        replaced += len(flat)
    found["group/resampled"] = float(replaced)
    return episodes, {**found, **seconds, "speed/tokens_per_s": sum(tokens) / seconds["time/rollout"]}


# ---- one update --------------------------------------------------------------------------------------------


def training_row(episodes: list[dict], device) -> dict:
    """A packed row and, at each place t, what the loss of token t+1 needs. No episodes (a rank's empty row):
    one token of weight 0."""

    def each(values) -> Tensor:  # one value an episode -> one a token
        return torch.tensor([v for v, e in zip(values, episodes) for _ in e["ids"]], device=device)

    episodes = episodes or [{"ids": [0], "mask": [0], "logprobs": [0.0], "advantage": 0.0, "weight": 0.0}]
    ids, seg, targets = net.packed_row([e["ids"] for e in episodes], [e["mask"] for e in episodes], device)
    sampled = [lp for e in episodes for lp in [*e["logprobs"][1:], 0.0]]
    return {
        "episodes": episodes,
        "ids": ids,
        "seg": seg,
        "targets": targets,
        "mask": targets != -100,
        "sampled": torch.tensor(sampled, device=device),
        "advantage": each(e["advantage"] for e in episodes),
        "weight": each(e["weight"] for e in episodes),
        "sequence": each(range(len(episodes))),
    }


def update(
    policy: net.Policy, optimizer, episodes: list[dict], config: Config, seed: int, device="cpu", ref=None,
    keep=True,
) -> dict:  # fmt: skip
    """The optimizer steps of a batch of episodes with "advantage", known to all ranks -> metrics.

    Episodes are shuffled by the seed, split into optimizer batches, packed into rows and dealt to the ranks.
    The weight of each token (loss_weights) is that in the mean of the whole optimizer batch; after it losses
    are only added up, so neither rows nor ranks change the result. ref: the frozen Policy of the KL term.
    keep: store values of each token in the episodes (NOTED), for the page of the run.
    """
    ranks = dist.get_world_size()
    order = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(seed % 2**62)).tolist()
    work = []  # this rank's packed rows of each optimizer batch
    for part in np.array_split(order, config.mini_batches):
        batch = [episodes[i] for i in part]
        lengths = [sum(e["mask"]) for e in batch]
        for e, w in zip(batch, loss_weights(lengths, config.loss_mean, config.max_new_tokens)):
            e["weight"] = w
        sizes = [len(e["ids"]) for e in batch]
        rows = net.micro_batches(sizes, config.tokens_per_row, dist.get_rank(), ranks)
        work.append([training_row([batch[i] for i in row], device) for row in rows])

    sums = defaultdict(lambda: torch.zeros((), device=device, dtype=torch.float64))

    def measure_old(row: dict, logp: Tensor, entropy: Tensor):
        """The policy before the first optimizer step: on the whole batch if old log-probs are taken, else on
        its first part."""
        gap = torch.where(row["mask"], logp - row["sampled"], 0.0).abs()
        sums["seen"] += row["mask"].sum()
        sums["policy/entropy"] += entropy.sum()
        sums["sampler/gap_mean"] += gap.sum()
        sums["max"] = torch.maximum(sums["max"], gap.max().double())
        if keep:
            note(row, "old_logprobs", logp)
            note(row, "entropy", entropy)

    if config.old_logp == "trainer" and config.mini_batches > 1:
        with torch.no_grad():
            for row in (row for rows in work for row in rows):
                row["old"], entropy = policy(row["ids"], row["seg"], row["targets"], config.temperature)
                measure_old(row, row["old"], entropy)
    norms = []
    for step, rows in enumerate(work):
        for row in rows:
            logp, entropy = policy(row["ids"], row["seg"], row["targets"], config.temperature)
            if step == 0 and "old" not in row:
                measure_old(row, logp.detach(), entropy.detach())
            old = row.get("old", logp.detach()) if config.old_logp == "trainer" else row["sampled"]
            loss, stats = policy_loss(
                logp, old, row["advantage"], row["mask"], config.clip_low, config.clip_high, config.dual_clip,
                row["sequence"] if config.ratio == "sequence" else None,
            )  # fmt: skip
            if config.tis:  # min(pi_old / pi_sampler, C) times the loss
                loss = loss * torch.where(row["mask"], old - row["sampled"], 0.0).exp().clamp(max=config.tis)
            if config.kl:  # + beta KL(pi || pi_ref)
                with torch.no_grad():
                    ref_logp, _ = ref(row["ids"], row["seg"], row["targets"], config.temperature)
                kl = kl_estimate(logp, ref_logp, config.kl_estimator)
                loss = loss + config.kl * kl
                sums["policy/kl_ref"] += kl.detach().sum()
            if config.entropy:  # - c H(pi)
                loss = loss - config.entropy * entropy
            loss = (loss * row["weight"]).sum()
            sums["policy/loss"] += loss.detach() / len(work)
            (loss * ranks).backward()  # FSDP averages over the ranks; times ranks it is the sum
            for key, value in stats.items():
                sums[f"policy/{key}"] += value * row["mask"].sum()
            sums["trained"] += row["mask"].sum()
            if keep:
                note(row, "ratio", (logp.detach() - old).clamp(-20, 20).exp())
        sharded_norm, norm = net.gradient_norm(policy)
        bad = (~torch.isfinite(norm + sums["policy/loss"])).float()  # a NaN loss may have a gradient of 0
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # so that all ranks look for the place together
        if bad:
            places = [(row["ids"], row["seg"], row["targets"]) for row in rows]
            raise FloatingPointError(
                f"loss or gradient is not finite in optimizer step {step + 1} of this batch"
                f"{net.broken(policy, places)}; start again in a new --out, with --lr below {config.lr} "
                "(from a checkpoint by --model OUT/checkpoints/step_.../model)"
            )
        torch.nn.utils.clip_grads_with_norm_(policy.parameters(), config.clip_norm, sharded_norm)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    largest, keys = sums.pop("max"), sorted(sums)
    totals = torch.stack([sums[key] for key in keys])
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    totals = dict(zip(keys, totals.tolist()))
    seen, trained = (max(totals.pop(key), 1) for key in ("seen", "trained"))  # policy tokens
    divisor = {"policy/loss": 1, "policy/entropy": seen, "sampler/gap_mean": seen}
    metrics = {key: value / divisor.get(key, trained) for key, value in totals.items()}
    if keep and ranks > 1:  # a rank knows only what it trained on
        mine = {i: {k: e[k] for k in NOTED if k in e} for i, e in enumerate(episodes) if "ratio" in e}
        everyone: list = [None] * ranks
        dist.all_gather_object(everyone, mine)
        for i, values in (pair for part in everyone for pair in part.items()):
            episodes[i] |= values
    return {**metrics, "sampler/gap_max": largest.item(), "policy/grad_norm": sum(norms) / len(norms)}


NOTED = ("old_logprobs", "entropy", "ratio")


def note(row: dict, key: str, values: Tensor) -> None:
    """Store a value of each token in its episode. Place t of the row holds what belongs to token t+1."""
    values = values.tolist()
    for episode, (start, end, _) in zip(row["episodes"], row["seg"].spans):
        # the first token was not sampled: its ratio is 1, the others 0
        episode[key] = [float(key == "ratio"), *(round(v, 5) for v in values[start : end - 1])]


# ---- the run -----------------------------------------------------------------------------------------------


def main(config: Config) -> None:
    began = time.time()
    rank, ranks, device = net.init_process_group()
    check(config)
    if config.cuda_graphs and device == "cpu":
        fail("--cuda_graphs needs a GPU; leave it out")
    if config.offload and device == "cpu" and ranks == 1:
        fail("--offload moves nothing in one process without a GPU; leave it out")
    if rank == 0:
        title = f"GRPO-TCR, preset {config.preset}, seed {config.seed}"
        print(f"{title}: {ranks} rank(s) on {device}", flush=True)
    cores = net.set_threads(config.threads, ranks)
    out = Path(config.out or f"runs/{config.preset}-{config.seed}")
    workers = config.tool_workers or max(2, cores)
    limits = (config.tool_seconds, config.tool_memory, config.tool_chars)
    try:
        tool = PythonTool(workers, *limits, config.sandbox, config.tool_name)
    except ValueError as error:
        fail(str(error))
    with tool:
        train(config, out, tool, device, began)
    math_equal.print_counts(f"rank {rank}")
    if rank == 0:
        curves = f", curves {out / 'curves.png'}" if run.write_report(out) else ""
        print(f"{clock(time.time() - began)} in all; run folder {out}{curves}")
    dist.destroy_process_group()


def train(config: Config, out: Path, tool: PythonTool, device: str, began: float) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last, newest = run.latest(out)  # the last step that is saved, and its checkpoint
    done = run.read_rows(out / "metrics.jsonl")[-1] if newest else {}
    if last > config.steps or last == config.steps and ("eval/correct" in done or not config.eval_every):
        if rank == 0 and not (out / "report.html").exists():  # killed while it was written
            run.write_report(out)
        dist.barrier()  # torchrun ends a rank that is still at it when another has ended
        fail(f"{out} is complete ({last} steps); raise --steps to go on, or give another --out")
    n = config.eval_problems if config.eval_every else 0
    try:  # before the folder is made: a name may be wrong
        data = load_problems(config.data) if config.data else []
        unseen = tiny.problems("test", n) if config.eval_data == "tiny" else []
        if n and not unseen:
            unseen = load_problems(config.eval_data, limit=n)
        loaded = net.load(config.model) if config.model else None
    except ValueError as error:
        fail(str(error))
    # may differ in a run that is continued; those of the second line change the last bits at most
    may_change = "steps threads sandbox stall out tracker show_every save_every keep store_every "
    may_change += "cache_tokens max_rows tokens_per_row offload cuda_graphs tool_workers"
    problems = run.digest([[asdict(problem) for problem in some] for some in (data, unseen)])
    run.open_run(out, asdict(config) | {"sha256_problems": problems}, set(may_change.split()))
    if not loaded:  # the laptop run: a cold start by sft.py, then on from its folder as from any other model
        cold = out / "cold_start"
        if not cold.exists():
            settings = sft.Config(**sft.PRESETS["tiny"], out=str(cold), seed=config.seed)
            sft.run(replace(settings, threads=config.threads, dtype=config.dtype))
        loaded = net.load(str(cold))
    model, tokenizer = loaded
    plan = fit.predict(config, model.config, ranks, device)
    if rank == 0 and config.model:
        print(plan, flush=True)
    dtype = net.compute_dtype(config.dtype, device)
    shared = ranks == 1 and device == "cpu" and dtype == torch.float32  # trainer and sampler: same weights
    copied = model if shared else net.sampler_copy(model, dtype).to(device)
    ref = None
    if config.kl:
        frozen = net.Policy(net.sampler_copy(model, dtype)).requires_grad_(False)
        ref = net.shard(frozen, device, dtype=config.dtype)
    policy = net.shard(net.Policy(model), device, device != "cpu", dtype=config.dtype, offload=config.offload)
    optimizer = torch.optim.AdamW(
        policy.parameters(), config.lr, (0.9, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    if newest:
        run.restore(newest, policy, optimizer)
    if not shared:
        net.copy_weights(policy, copied)
    with fit.holding("the KV cache", "lower --cache_tokens"):
        agents = Agents(copied, tokenizer, tool, replace(config, cache_tokens=plan.cache_tokens))
    fit.rehearse(plan, policy, optimizer, agents.sampler, config, device, ref)
    for problem in unseen:
        agents.prompt(problem)  # a prompt that is too long ends the run now, not in its first evaluation
    data = fitting(data, [len(agents.encode(p)) for p in data], config, model)

    def due(step: int) -> bool:
        return step % config.eval_every == 0 or step == config.steps

    def evaluated(title: str) -> dict:
        found = evaluate(agents, unseen, seed=2**40)
        if rank == 0:
            interval = f"{found['eval/low']:.2f} to {found['eval/high']:.2f}"
            print(f"{title}: {found['eval/correct']:.3f} of {len(unseen)} unseen problems right "
                  f"({interval}), tool used {found['eval/tool_used']:.2f}", flush=True)  # fmt: skip
        return found

    log, saved = run.Log(out, last if newest else -1, config.tracker, asdict(config)), last

    def save() -> int:
        """A checkpoint of the last step that is done; its number."""
        nonlocal saved
        step = log.rows[-1]["step"] if log.rows else 0
        if step > saved:
            run.checkpoint(out, step, policy, optimizer, tokenizer, dtype, config.keep)
            saved = step
        return saved

    run.listen(save)
    if rank == 0:
        tokenizer.save_pretrained(out / "tokenizer")
        print(f"{f'continued after step {last}' if newest else 'start'} at {clock(time.time() - began)}")
    shown = watch(log, config.steps, agents.sampler)
    for _ in live([last], shown):  # a loop of one step: the view stands below this evaluation too
        if not newest and unseen:
            log.write({"step": 0, **evaluated("before")})
        elif unseen and "eval/correct" not in log.rows[-1] and due(last):  # stopped before its evaluation
            log.write(log.rows[-1] | evaluated(f"step {last}"))
    pace: list[float] = []
    warned: dict[str, str] = {}  # alarms of the step before: each is printed when it begins
    for step in live(range(last + 1, config.steps + 1), shown):
        start = time.perf_counter()
        seed = random_key(config.seed, step)
        episodes, row = sample(agents, draw(data, config, step), data, config, seed)
        rewards, groups = [e["reward"] for e in episodes], [e["prompt_index"] for e in episodes]
        for episode, advantage in zip(episodes, group_advantages(rewards, groups, config.scale).tolist()):
            episode["advantage"] = advantage
        sampled = time.perf_counter()
        keep = bool(config.store_every) and step % config.store_every == 0
        row |= update(policy, optimizer, episodes, config, seed, device, ref, keep)
        if not shared:
            net.copy_weights(policy, copied)
        end = time.perf_counter()
        row = {"step": step, **row, "time/train": end - sampled, "time/step": end - start}
        pace = [*pace[-4:], end - start]
        if rank == 0 and keep:
            with (out / "trajectories" / f"step_{step:06d}.jsonl").open("w") as f:
                for e in episodes:
                    e["logprobs"] = [round(lp, 6) for lp in e["logprobs"]]
                    f.write(json.dumps({"step": step, **e}) + "\n")
        if rank == 0:
            left = clock(sum(pace) / len(pace) * (config.steps - step))
            print_step(row, config.steps, left)
            if config.show_every and (step == 1 or step % config.show_every == 0):
                print(split(row))
                example = max(episodes, key=lambda e: abs(e["advantage"]))
                show(example, tokenizer, f"a trajectory of step {step}")
        try:
            if unseen and due(step):
                row |= evaluated(f"step {step}")
        except run.Stop:
            log.write(row)  # the step is done, only its evaluation is left to the next start
            raise
        alarmed = alarms(row, log.rows, exact=dtype == torch.float32)
        if rank == 0:
            for key in alarmed.keys() - warned.keys():
                print(f"  ! {alarmed[key]}", flush=True)
        warned = alarmed
        if rank == 0 and config.model and step == last + 1:
            print(fit.compare(plan, row, device), flush=True)
        log.write(row)
        if step % config.save_every == 0 or step == config.steps:
            save()
            if rank == 0 and step < config.steps:
                run.write_report(out, wait=False)
    if rank == 0 and unseen:
        print_gain(log.rows)


def print_step(row: dict, steps: int, left: str) -> None:
    right = row["reward/correct"]
    ran = f"{row['tool/success']:.2f}" if "tool/success" in row else "–"  # missing where nothing was called
    print(f"step {row['step']:3d}/{steps}  right {right:.2f} {'#' * round(20 * right):20s}  "
          f"tool {row['tool/used']:.2f}  ran {ran}  tokens {row['length/policy_tokens']:.0f}  "
          f"entropy {row['policy/entropy']:.3f}  {row['time/step']:.1f} s  {left} left",
          flush=True)  # fmt: skip


def print_gain(rows: list[dict]) -> None:
    """Right answers on unseen problems in the first evaluation and in the last, by family."""
    before, after = next(r for r in rows if "eval/correct" in r), rows[-1]
    print(f"\n{'right answers on unseen problems':34s}{'before':>8s}{'after':>8s}")
    families = sorted(k for k in after if k.startswith("eval/correct/"))
    for key in ["eval/correct", *families, "eval/tool_used"]:
        print(f"  {key.removeprefix('eval/'):32s}{before[key]:8.3f}{after[key]:8.3f}")


if __name__ == "__main__":
    run.run_script(main, parse_args(Config, presets=PRESETS, about=__doc__))
