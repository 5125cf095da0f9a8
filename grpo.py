"""GRPO-TCR: reinforcement learning of a policy that calls Python while it reasons (arXiv 2510.11701).

    python grpo.py                                  # a laptop: cold start, then 32 steps, under 5 minutes
    torchrun --nproc_per_node 8 grpo.py --preset qwen3-4b --model M --data D --out runs/NAME
    the same command again continues a run that was stopped

One step: sample a group of trajectories of each prompt, with the tool (rollout.py); reward them (reward.py);

    r_i  = +1 right, -1 wrong; down by up to 1 in the last `overlong_buffer` tokens     R: overlong shaping
    A_i  = (r_i - mean(r_group)) / (std(r_group) + 1e-6)                                GRPO 2402.03300 eq. 3
    loss = mean over all policy tokens of the optimizer batch of                        T: token-level loss
           max(-A_i ratio, -A_i clip(ratio, 1 - 0.2, 1 + 0.28))                         C: clip higher
           and, where A_i < 0, at most -10 A_i                                          dual clip

with ratio = pi(token) / pi_old(token). No critic, no KL term, no entropy bonus. The tool's tokens are in the
context and count for the length, but are never in the loss.

Left out: asynchronous rollouts, and any launcher beyond torchrun.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import policy as net
import sft
import tiny
from data import fail, load_problems, parse_args
from episodes import Agents, evaluate, measure
from rollout import random_key
from run import Log, checkpoint, clock, latest, open_run, restore, run_script, show
from tools import PythonTool


@dataclass
class Config:
    """Defaults: the settings of arXiv 2510.11701 for one node of 8 GPUs."""

    preset: str = "tiny"  # tiny (laptop) | qwen3-0.6b (1 GPU) | qwen3-4b, qwen2.5-7b (8 GPUs of 80 GB)
    model: str = ""  # hub name, folder or .gguf file; tiny makes its own by a cold start
    data: str = ""  # problems: hub name, .jsonl, .parquet, or a set that data.py knows; tiny brings its own
    out: str = ""  # folder of the run; default runs/PRESET-SEED; an interrupted run in it is continued
    seed: int = 0  # of everything random
    steps: int = 450  # training steps: one batch of trajectories each
    batch: int = 1024  # trajectories a step
    group: int = 16  # trajectories of the same prompt
    mini_batches: int = 4  # optimizer steps a batch is split into
    lr: float = 1e-6  # learning rate, constant
    beta2: float = 0.999  # AdamW (the first beta is 0.9)
    weight_decay: float = 0.01  # AdamW
    clip_norm: float = 1.0  # largest norm of the gradient
    clip_low: float = 0.2  # a ratio below 1 - clip_low earns nothing more where the advantage is negative
    clip_high: float = 0.28  # a ratio above 1 + clip_high earns nothing more where it is positive
    dual_clip: float = 10.0  # bound of the ratio where the advantage is negative; 0: none
    scale: str = "std"  # divide advantages by the group's std, or "none" (Dr.GRPO)
    old_logp: str = "trainer"  # pi_old: the trainer's own log-probs (one more pass), or the sampler's
    tis: float = 0.0  # cap of the importance weight trainer / sampler (truncated correction); 0: off
    tool_reward: bool = True  # wrong answers earn 0.1 a tool round, -1 to -0.6 (can be farmed: see README)
    max_prompt: int = 2560  # tokens of a prompt; a longer one is refused
    max_new_tokens: int = 20480  # tokens after the prompt, the tool's text included
    overlong_buffer: int = 4096  # last tokens of max_new_tokens, over which the penalty rises to 1
    max_turns: int = 16  # turns of the policy; a call in the last one is not run
    temperature: float = 1.0  # of sampling, and of the log-probs in the loss
    describe_tool: bool = True  # the prompt describes the tool
    tool_seconds: float = 30.0  # wall clock of a tool call
    tool_memory: int = 2048  # MB of a tool call
    tool_chars: int = 256  # characters of a tool's output that the policy sees
    tool_workers: int = 0  # tool calls at the same time on a rank; 0: as many as cores
    max_rows: int = 128  # trajectories that decode together on a rank
    cache_tokens: int | None = None  # tokens of a rank's KV cache; none: what max_rows need and memory allows
    tokens_per_row: int = 23040  # tokens of a packed row in training
    eval_every: int = 10  # steps between evaluations on unseen problems; 0: never
    eval_data: str = "aime2025"  # unseen problems
    eval_problems: int = 256  # at most so many of them
    save_every: int = 30  # steps between checkpoints; the last two are kept
    show_every: int = 10  # steps between trajectories shown in the terminal; 0: never
    threads: int = 0  # CPU threads of torch; 0: all cores, shared among the ranks


RL_DATA = "Gen-Verse/Open-AgentRL-30K"
PRESETS = {
    "tiny": dict(
        steps=32, batch=256, group=8, mini_batches=2, lr=4e-4, beta2=0.95, weight_decay=0.0,
        old_logp="sampler", tool_reward=False, max_prompt=64, max_new_tokens=150, overlong_buffer=30,
        max_turns=4, describe_tool=False,
        tool_seconds=2.0, tool_memory=1024, tool_chars=tiny.MAX_CHARS, max_rows=256, tokens_per_row=16384,
        eval_every=5, eval_data="tiny", save_every=5, threads=1,
    ),
    "qwen3-0.6b": dict(
        model="Qwen/Qwen3-0.6B", data=RL_DATA, steps=200, batch=256, group=8, max_new_tokens=4096,
        overlong_buffer=1024, max_turns=8, tokens_per_row=16384,
    ),
    "qwen3-4b": dict(model="Gen-Verse/Qwen3-4B-RA-SFT", data=RL_DATA),
    "qwen2.5-7b": dict(model="Gen-Verse/Qwen2.5-7B-RA-SFT", data=RL_DATA),
}  # fmt: skip


POSITIVE = """steps clip_norm max_prompt max_new_tokens max_turns temperature tool_seconds tool_memory
tool_chars max_rows tokens_per_row eval_problems save_every""".split()


def check(c: Config) -> None:
    """Ends the program with one sentence for what cannot work, before anything is written."""
    below = c.batch // c.group * c.group if c.group else 0
    legal = " or ".join(str(b) for b in (below, below + c.group) if b)
    for wrong, sentence in [
        (c.group < 2, f"--group {c.group}: a group of one has no advantage over itself; take at least 2"),
        (c.batch < 1 or c.batch % max(c.group, 1),
         f"--batch {c.batch} is not divisible by --group {c.group}; take {legal}"),
        (not 1 <= c.mini_batches <= c.batch, f"--mini_batches {c.mini_batches}: take 1 to --batch {c.batch}"),
        *((not getattr(c, name) > 0, f"--{name} {getattr(c, name)}: take more than 0") for name in POSITIVE),
        (not 0 <= c.lr < float("inf"), f"--lr {c.lr}: take 0 or more"),
        (not 0 <= c.clip_low <= 1 or not c.clip_high >= 0,
         f"--clip_low {c.clip_low} --clip_high {c.clip_high}: take 0 to 1, and 0 or more"),
        (c.cache_tokens is not None and c.cache_tokens < c.max_prompt + c.max_new_tokens,
         f"--cache_tokens {c.cache_tokens}: one trajectory may have {c.max_prompt + c.max_new_tokens}"),
        (min(c.eval_every, c.show_every, c.threads, c.tool_workers, c.tis) < 0,
         "--eval_every, --show_every, --threads, --tool_workers, --tis: take 0 or more"),
        (c.tis and c.old_logp == "sampler", "--tis corrects the trainer's pi_old: add --old_logp trainer"),
        (not 0 <= c.overlong_buffer <= c.max_new_tokens,
         f"--overlong_buffer {c.overlong_buffer}: take 0 to --max_new_tokens {c.max_new_tokens}"),
        (c.dual_clip and c.dual_clip <= 1, f"--dual_clip {c.dual_clip}: take more than 1, or 0 for none"),
        (c.scale not in ("std", "none"), f"--scale {c.scale}: take std or none"),
        (c.old_logp not in ("trainer", "sampler"), f"--old_logp {c.old_logp}: take trainer or sampler"),
        (c.preset != "tiny" and not (c.model and c.data), "--model and --data say what to train on what"),
    ]:  # fmt: skip
        if wrong:
            fail(sentence)


# ---- advantages and loss -----------------------------------------------------------------------------------


def group_advantages(rewards, group_ids, scale: str = "std") -> Tensor:
    """Advantage of each trajectory over its own group (arXiv 2402.03300 eq. 3; "none": Dr.GRPO 2503.20783).

    rewards    [N] float
    group_ids  [N] int     trajectories of the same prompt share an id, in any order
    returns    [N] float32 (r - mean) / (std + 1e-6), std unbiased, or r - mean. Exactly 0 in a group of equal
               rewards (rounding must not make a signal out of nothing) and in a group of one
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale {scale!r}: take 'std' or 'none'")
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    group_ids = torch.as_tensor(group_ids)
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        r = rewards[group_ids == group]
        if r.min() < r.max():
            divisor = r.std() + 1e-6 if scale == "std" else 1.0
            advantages[group_ids == group] = (r - r.mean()) / divisor
    return advantages.float()


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of each token (PPO 1707.06347 eq. 7; DAPO 2503.14476 eq. 10; dual clip 1912.09729).

    logp, old_logp, advantages, mask   [N]; mask is 1 on policy tokens
    seq_ids   [N] int: then the ratio is that of the whole sequence, normalised by its length (GSPO 2507.18071
              eq. 7), without dual clip
    returns   loss [N], 0 where mask is 0; and means over the policy tokens: clip_low, clip_high, dual (share
              of tokens whose gradient each bound took away) and kl_old (of old_logp - logp)

    Not summed here: the sum is divided by the policy tokens of the whole optimizer batch, over micro-batches
    and ranks. Nothing at a masked place, NaN included, changes anything. Raises ValueError for a dual clip of
    1 or less.
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(
            f"dual_clip {dual_clip} is inside the range that the clip allows; take more than 1, or 0"
        )
    mask = mask.bool()
    # `where`, since NaN * 0 is NaN; the clamp, since exp(100) is inf and inf * 0 is NaN too
    log_ratio = torch.where(mask, logp - old_logp, 0.0).clamp(-20, 20)
    kl_old = -log_ratio.detach()
    if seq_ids is not None:  # value: mean over the sequence; gradient: that of each token
        _, seq, count = torch.unique(seq_ids[mask], return_inverse=True, return_counts=True)
        mean = log_ratio.new_zeros(len(count)).index_add(0, seq, log_ratio[mask].detach()) / count
        log_ratio = log_ratio - log_ratio.detach()
        log_ratio = log_ratio.index_put((mask.nonzero()[:, 0],), mean[seq], accumulate=True)
        dual_clip = None
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    held = (advantages < 0) & (ratio > (dual_clip or torch.inf))
    loss = torch.where(held, -advantages * (dual_clip or 0.0), loss)
    n = mask.sum().clamp(min=1)
    stats = {
        "clip_low": ((advantages < 0) & (ratio < 1 - clip_low)).sum() / n,
        "clip_high": ((advantages > 0) & (ratio > 1 + clip_high)).sum() / n,
        "dual": held.sum() / n,
        "kl_old": kl_old.sum() / n,
    }
    return torch.where(mask, loss, 0.0), stats


# ---- one update --------------------------------------------------------------------------------------------


def update(
    policy: net.Policy, optimizer, episodes: list[dict], config: Config, seed: int, device="cpu"
) -> dict:
    """The optimizer steps of a batch of episodes with "advantage", known to all ranks -> metrics.

    Episodes are shuffled by the seed, split into optimizer batches, packed into rows and dealt to the ranks,
    so the number of ranks does not matter. A loss is divided once, by all policy tokens of its batch.
    """
    ranks = dist.get_world_size()
    order = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(seed % 2**62)).tolist()
    work = []  # of each optimizer batch: its policy tokens, and this rank's packed rows
    for part in np.array_split(order, config.mini_batches):
        batch = [episodes[i] for i in part]
        rows = net.micro_batches(
            [len(e["ids"]) for e in batch], config.tokens_per_row, dist.get_rank(), ranks
        )
        tokens = sum(sum(e["mask"]) for e in batch)
        work.append((tokens, [training_row([batch[i] for i in row], device) for row in rows]))

    sums = defaultdict(lambda: torch.zeros((), device=device, dtype=torch.float64))

    def look(row: dict, logp: Tensor, entropy: Tensor):  # at the policy before the first optimizer step
        gap = torch.where(row["mask"], logp - row["sampled"], 0.0).abs()
        sums["seen"] += row["mask"].sum()
        sums["policy/entropy"] += entropy.sum()
        sums["sampler/gap_mean"] += gap.sum()
        sums["max"] = torch.maximum(sums["max"], gap.max().double())
        note(row, "old_logprobs", logp)
        note(row, "entropy", entropy)

    if config.old_logp == "trainer" and config.mini_batches > 1:
        with torch.no_grad():
            for row in (row for _, rows in work for row in rows):
                row["old"], entropy = policy(row["ids"], row["seg"], row["targets"], config.temperature)
                look(row, row["old"], entropy)
    norms = []
    for step, (tokens, rows) in enumerate(work):
        for row in rows:
            logp, entropy = policy(row["ids"], row["seg"], row["targets"], config.temperature)
            if step == 0 and "old" not in row:
                look(row, logp.detach(), entropy.detach())
            if config.old_logp == "trainer":
                old = row.get("old", logp.detach())
            else:
                old = row["sampled"]
            loss, stats = policy_loss(
                logp, old, row["advantage"], row["mask"], config.clip_low, config.clip_high, config.dual_clip
            )
            if config.tis:
                loss = loss * torch.where(row["mask"], old - row["sampled"], 0.0).exp().clamp(max=config.tis)
            sums["policy/loss"] += loss.detach().sum()
            loss = loss.sum() / max(tokens, 1)
            (loss * ranks).backward()  # FSDP averages over the ranks; times ranks it is the sum
            for key, value in stats.items():
                sums[f"policy/{key}"] += value * row["mask"].sum()
            note(row, "ratio", (logp.detach() - old).clamp(-20, 20).exp())
        norm = net.full(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.clip_norm))
        if not torch.isfinite(norm + sums["policy/loss"]):  # a NaN loss may have a gradient of 0
            raise FloatingPointError(
                f"loss or gradient is not finite in optimizer step {step + 1} of this batch; the last "
                f"checkpoint is whole: start from it in a new --out with a lower --lr than {config.lr}"
            )
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    largest = sums.pop("max")
    keys = sorted(sums)
    values = torch.stack([sums[k] for k in keys])
    dist.all_reduce(values)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found = dict(zip(keys, values.tolist()))
    seen, trained = max(found.pop("seen"), 1), max(sum(tokens for tokens, _ in work), 1)
    metrics = {
        k: v / (seen if k in ("policy/entropy", "sampler/gap_mean") else trained) for k, v in found.items()
    }
    return {**metrics, "sampler/gap_max": largest.item(), "policy/grad_norm": sum(norms) / len(norms)}


def note(row: dict, key: str, values: Tensor) -> None:
    """Store a value of each token in its episode, for the page of the run; on the rank that trains on it.

    Place t of the row holds what belongs to token t+1.
    """
    values = values.tolist()
    for episode, (start, end, _) in zip(row["episodes"], row["seg"].spans):
        episode[key] = [float(key == "ratio"), *(round(v, 5) for v in values[start : end - 1])]


def training_row(episodes: list[dict], device) -> dict:
    """A packed row and, at each place t, what the loss of token t+1 needs. None: one token of weight 0."""
    episodes = episodes or [{"ids": [0], "mask": [0], "logprobs": [0.0], "advantage": 0.0}]
    ids, seg, targets = net.packed_row([e["ids"] for e in episodes], [e["mask"] for e in episodes], device)
    sampled = [lp for e in episodes for lp in [*e["logprobs"][1:], 0.0]]
    advantage = [e["advantage"] for e in episodes for _ in e["ids"]]
    return {
        "episodes": episodes,
        "ids": ids,
        "seg": seg,
        "targets": targets,
        "mask": targets != -100,
        "sampled": torch.tensor(sampled, device=device),
        "advantage": torch.tensor(advantage, device=device),
    }


# ---- the run -----------------------------------------------------------------------------------------------


def main(config: Config) -> None:
    began = time.time()
    rank, ranks, device = net.init_process_group()
    check(config)
    if rank == 0:
        print(
            f"GRPO-TCR, preset {config.preset}, seed {config.seed}: {ranks} rank(s) on {device}", flush=True
        )
    cores = net.set_threads(config.threads, ranks)
    out = Path(config.out or f"runs/{config.preset}-{config.seed}")
    workers = config.tool_workers or max(2, cores)
    with PythonTool(workers, config.tool_seconds, config.tool_memory, config.tool_chars) as tool:
        train(config, out, tool, device, began)
    if rank == 0:
        report = subprocess.run([sys.executable, str(Path(__file__).parent / "report.py"), str(out), "--png"])
        curves = "" if report.returncode else f", curves {out / 'curves.png'}"
        print(f"{clock(time.time() - began)} in all; run folder {out}{curves}")
    dist.destroy_process_group()


def train(config: Config, out: Path, tool: PythonTool, device: str, began: float) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, folder = latest(out)
    if first >= config.steps:
        fail(f"{out} is complete ({first} steps); raise --steps to go on, or give another --out")
    n = config.eval_problems if config.eval_every else 0
    try:  # before the folder is made: a name may be wrong
        data = load_problems(config.data) if config.data else []
        unseen = tiny.problems("test", n) if config.eval_data == "tiny" else []
        if n and not unseen:
            unseen = load_problems(config.eval_data, limit=n)
        loaded = net.load(config.model) if config.model else None
    except ValueError as error:
        fail(str(error))
    open_run(out, asdict(config), may_change={"steps", "threads", "out", "show_every"})
    if not loaded:  # the laptop run: a cold start by sft.py, then on from its folder as from any other model
        cold = out / "cold_start"
        if not cold.exists():
            settings = sft.Config(**sft.PRESETS["tiny"], out=str(cold), seed=config.seed)
            sft.run(replace(settings, threads=config.threads))
        loaded = net.load(str(cold))
    model, tokenizer = loaded
    shared = ranks == 1 and device == "cpu"  # one copy of the weights serves the trainer and the sampler
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    copied = model if shared else net.sampler_copy(model, dtype).to(device)
    policy = net.shard(net.Policy(model.to(device)), device, checkpointing=device != "cpu")
    optimizer = torch.optim.AdamW(
        policy.parameters(), config.lr, (0.9, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    if folder:
        restore(folder, policy, optimizer)
    if not shared:
        net.copy_weights(policy, copied)
    agents = Agents(copied, tokenizer, tool, config)

    for problem in [*data, *unseen]:
        agents.prompt(problem)  # a prompt that is too long ends the run now, not in step 300
    prompts = config.batch // config.group

    def batch(step: int) -> list:
        """The problems of a step: a function of the step alone, so a continued run sees the same."""
        if not data:
            return tiny.problems("train", prompts, seed=config.seed * 1_000_000 + step)
        chosen, orders = [], {}
        for i in range((step - 1) * prompts, step * prompts):
            epoch = i // len(data)  # every epoch has an order of its own
            if epoch not in orders:
                generator = torch.Generator().manual_seed(config.seed * 1000 + epoch)
                orders[epoch] = torch.randperm(len(data), generator=generator).tolist()
            chosen.append(data[orders[epoch][i % len(data)]])
        return chosen

    def look(title: str) -> dict:
        found = evaluate(agents, unseen, seed=2**40)
        if rank == 0:
            interval = f"{found['eval/low']:.2f} to {found['eval/high']:.2f}"
            print(f"{title}: {found['eval/correct']:.3f} of {len(unseen)} unseen problems right "
                  f"({interval}), tool used {found['eval/tool_used']:.2f}", flush=True)  # fmt: skip
        return found

    log = Log(out, first if folder else -1)
    if rank == 0:
        tokenizer.save_pretrained(out / "tokenizer")
        print(
            f"{'continued after step ' + str(first) if folder else 'start'} at {clock(time.time() - began)}"
        )
    if not folder and unseen:
        log.write({"step": 0, **look("before")})
    pace: list[float] = []
    for step in range(first + 1, config.steps + 1):
        start = time.perf_counter()
        seed = random_key(config.seed, step)
        episodes = agents.sample(batch(step), config.group, seed)
        rewards, groups = [e["reward"] for e in episodes], [e["prompt_index"] for e in episodes]
        for episode, advantage in zip(episodes, group_advantages(rewards, groups, config.scale).tolist()):
            episode["advantage"] = advantage
        sampled = time.perf_counter()
        metrics = update(policy, optimizer, episodes, config, seed, device)
        if not shared:
            net.copy_weights(policy, copied)
        end = time.perf_counter()
        row = {"step": step, **measure(episodes), **metrics, **agents.seconds}
        row |= {"time/train": end - sampled, "time/step": end - start}
        sampled_tokens = sum(len(e["ids"]) - e["prompt_len"] for e in episodes)
        row["speed/tokens_per_s"] = sampled_tokens / row["time/rollout"]
        pace = [*pace[-4:], end - start]
        if rank == 0:
            with (out / "trajectories" / f"step_{step:06d}.jsonl").open("w") as f:
                for e in episodes:
                    e["logprobs"] = [round(lp, 6) for lp in e["logprobs"]]
                    f.write(json.dumps({"step": step, **e}) + "\n")
            left = clock(sum(pace) / len(pace) * (config.steps - step))
            right, ran = row["reward/correct"], row["tool/success"]
            print(f"step {step:3d}/{config.steps}  right {right:.2f} {'#' * round(20 * right):20s}  "
                  f"tool {row['tool/used']:.2f}  ran {ran:.2f}  tokens {row['length/policy_tokens']:.0f}  "
                  f"entropy {row['policy/entropy']:.3f}  {end - start:.1f} s  {left} left",
                  flush=True)  # fmt: skip
            if config.show_every and (step == 1 or step % config.show_every == 0):
                show(
                    max(episodes, key=lambda e: abs(e["advantage"])),
                    tokenizer,
                    f"a trajectory of step {step}",
                )
        if unseen and (step % config.eval_every == 0 or step == config.steps):
            row |= look(f"step {step}")
        log.write(row)
        if step % config.save_every == 0 or step == config.steps:
            checkpoint(out, step, policy, optimizer, tokenizer, dtype)
    if rank == 0 and unseen:
        before, after = next(r for r in log.rows if "eval/correct" in r), log.rows[-1]
        print(f"\n{'right answers on unseen problems':34s}{'before':>8s}{'after':>8s}")
        for key in [
            "eval/correct",
            *sorted(k for k in after if k.startswith("eval/correct/")),
            "eval/tool_used",
        ]:
            print(f"  {key.removeprefix('eval/'):32s}{before.get(key, 0.0):8.3f}{after[key]:8.3f}")


if __name__ == "__main__":
    run_script(main, parse_args(Config, presets=PRESETS))
