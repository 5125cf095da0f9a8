"""Cold start: supervised learning on tool-use trajectories, cross-entropy on the policy's own tokens only.

    python sft.py --preset tiny --out runs/cold                                        # a laptop, about two
                                                                                       minutes
    torchrun --nproc_per_node 8 sft.py --model Qwen/Qwen3-4B-Instruct-2507 \\
        --data Gen-Verse/Open-AgentRL-SFT-3K --out runs/qwen3-4b-sft

In the order of the file: which tokens are trained on, the loss, the loop. Real end-to-end trajectories
(thinking, calls, their true outputs, errors and repairs) are what makes the reinforcement learning after it
work (arXiv 2510.11701, section 3).

Left out: checkpoints on the way (a cold start takes minutes to hours), LoRA, packing across conversations
(they lie side by side in a row but never see each other), curriculum.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import tiny
from chat import added_tokens, encode_marks, encode_plain, place_tools, render, turn_marks
from data import fail, load_conversations, parse_args
from policy import (
    Policy,
    full,
    init_process_group,
    load,
    micro_batches,
    packed_row,
    save,
    set_threads,
    shard,
)  # fmt: skip
from run import make_folder, run_script
from tools import PythonTool


@dataclass
class Config:
    """Defaults: the cold start of arXiv 2510.11701 (8 GPUs of 80 GB)."""

    model: str = ""  # hub name, folder or .gguf file; "tiny" is the built-in small model
    data: str = ""  # hub name, .jsonl or .parquet with columns messages and tools; "tiny": the teacher
    out: str = "runs/sft"  # folder of the trained model; must not exist yet
    seed: int = 1  # of the order of the data, and of a model that starts from nothing
    epochs: float = 5.0  # passes over the data
    batch: int = 32  # conversations an optimizer step
    lr: float = 1e-5  # peak learning rate; cosine to a twentieth of it
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    beta2: float = 0.95  # AdamW (the first beta is 0.9)
    weight_decay: float = 0.01  # AdamW
    clip_norm: float = 1.0  # largest norm of the gradient
    max_len: int = 32768  # tokens of a conversation, longer ones are cut at the right
    tokens_per_row: int = 32768  # tokens of a packed row, one forward and backward
    teacher: int = 14000  # conversations of the built-in teacher
    threads: int = 0  # CPU threads of torch; 0: all cores, shared among the ranks


PRESETS = {
    "tiny": dict(
        model="tiny", data="tiny", epochs=1.0, batch=8, lr=4e-3, warmup=0.03, weight_decay=0.0,
        max_len=512, threads=1,
    ),
    "qwen3-4b": dict(model="Qwen/Qwen3-4B-Instruct-2507", data="Gen-Verse/Open-AgentRL-SFT-3K"),
    "qwen2.5-7b": dict(model="Qwen/Qwen2.5-7B-Instruct", data="Gen-Verse/Open-AgentRL-SFT-3K"),
}  # fmt: skip


# ---- which tokens are trained on ---------------------------------------------------------------------------


def tokenize_conversation(tokenizer, messages: list[dict], tools: list[dict] | None = None):
    """(ids, mask) of a conversation: mask 1 on what the assistant wrote, its end-of-turn token included.

    The turns are found in the rendered text, where the template wrote their header and end; what a message
    merely looks like can neither begin nor end one. Headers are encoded apart from the answers, as they are
    when the policy samples. Raises ValueError if the template drops text of the assistant (stock Qwen3
    removes earlier thinking): training on such a sample would teach something that nobody wrote. Without an
    assistant's turn the mask is all 0.
    """
    header, end = turn_marks(tokenizer)
    if not any(token in header for token in added_tokens(tokenizer)):  # ordinary text: anybody can write it
        for message in messages:
            if message["role"] != "assistant" and header.strip() in (message.get("content") or ""):
                raise ValueError(f"a message of the {message['role']} contains the header {header.strip()!r}")
    ids, mask, turns, inside = [], [], [], False

    def add(new: list[int]):
        ids.extend(new)
        mask.extend([int(inside)] * len(new))

    for text, plain in render(tokenizer, *place_tools(tokenizer, messages, tools)):
        if plain:
            add(encode_plain(tokenizer, text))
            if inside:
                turns[-1] += text
            continue
        while text:
            before, mark, text = text.partition(end if inside else header)
            add(encode_marks(tokenizer, before + mark))
            if inside:
                turns[-1] += before
            if mark:
                inside = not inside
                if inside:
                    turns.append("")
    written = [m for m in messages if m["role"] == "assistant"]
    if len(turns) != len(written):
        raise ValueError(
            f"the template renders {len(turns)} assistant turns of {len(written)}; split the conversation"
        )
    for number, (message, turn) in enumerate(zip(written, turns), 1):
        if lost := _lost(message, turn):
            raise ValueError(
                f"the template drops text of assistant turn {number}: {lost[:60]!r}; split the conversation "
                "after this turn, or use a template that keeps it"
            )
    return ids, mask


def _lost(message: dict, turn: str) -> str:
    """The first text of an assistant's message that its rendered turn does not have ("": nothing is lost)."""
    at = 0  # thinking, then answer: one that repeats its thinking does not stand for it
    for part in [
        message.get("reasoning_content") or "",
        *re.split("</?think>", message.get("content") or ""),
    ]:
        found = turn.find(part.strip(), at)
        if found < 0:
            return part.strip()
        at = found + len(part.strip())
    for call in message.get("tool_calls") or []:
        call = call.get("function", call)
        given = call["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        for part in [call["name"], *(v for v in given.values() if isinstance(v, str))]:
            if part not in turn and json.dumps(part, ensure_ascii=False)[1:-1] not in turn:
                return part
    return ""


def tokenize_all(tokenizer, conversations, max_len: int) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of every conversation that has a token to train on; says how many are cut, and how many
    left out and why."""
    examples, cut, refused, empty = [], 0, {}, 0
    for conversation in conversations:
        try:
            ids, mask = tokenize_conversation(tokenizer, conversation["messages"], conversation.get("tools"))
        except ValueError as error:
            refused[str(error).split(":")[0]] = refused.get(str(error).split(":")[0], 0) + 1
            continue
        cut += len(ids) > max_len
        if any(mask[1:max_len]):
            examples.append((ids[:max_len], mask[:max_len]))
        else:
            empty += 1
    if dist.get_rank() == 0 and (cut or refused or empty):
        print(
            f"{len(examples)} conversations; {cut} cut to {max_len} tokens, {empty} with nothing to train on",
            end="",
        )
        print("".join(f", {n} left out ({why})" for why, n in refused.items()))
    if not examples:
        fail("no conversation has a token to train on; check the columns and the chat template")
    return examples


# ---- the loop ----------------------------------------------------------------------------------------------


def train(policy: Policy, examples, config: Config, device: str = "cpu") -> list[float]:
    """Minimise the cross-entropy of the policy's tokens. Returns the loss of every step, in nats a token.

        loss of a batch = - sum of log pi(token) over its policy tokens / (conversations * tokens of one)

    where "tokens per conversation" is the mean of the whole data set, a constant. So each token of the data
    weighs the same, in any batch, micro-batch and rank. Dividing by the batch's own count would let tokens of
    short batches weigh more: a data set with tools in 45 % of the conversations then trains a policy that
    uses them in 19 %.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=0.0, betas=(0.9, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    steps = max(1, round(len(examples) * config.epochs / config.batch))
    tokens = sum(sum(mask[1:]) for _, mask in examples) / len(examples)  # a conversation
    order: list[int] = []
    epoch, losses = 0, []
    bar = tqdm(range(steps), "cold start", disable=rank > 0, mininterval=1 if sys.stderr.isatty() else 10)
    for step in bar:
        while len(order) < config.batch:
            generator = torch.Generator().manual_seed(config.seed * 1000 + epoch)
            order += torch.randperm(len(examples), generator=generator).tolist()
            epoch += 1
        batch, order = order[: config.batch], order[config.batch :]
        total = torch.zeros((), device=device)
        for row in micro_batches([len(examples[i][0]) for i in batch], config.tokens_per_row, rank, ranks):
            chosen = [examples[batch[i]] for i in row] or [([0], [0])]
            logp, _ = policy(*packed_row([ids for ids, _ in chosen], [mask for _, mask in chosen], device))
            loss = -logp.sum() / (config.batch * tokens)
            (loss * ranks).backward()  # FSDP averages over the ranks; all tokens divide the loss already
            total += loss.detach()
        dist.all_reduce(total)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * learning_rate(step, steps, config.warmup)
        norm = full(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.clip_norm))
        if not torch.isfinite(norm):
            fail(
                f"step {step + 1}: the gradient is {norm.item()}; lower --lr {config.lr} or look at the data"
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        bar.set_postfix_str(f"loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", refresh=False)
    return losses


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak: linear up over the first `warmup` of the steps, then a cosine down to 0.05."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def run(config: Config) -> Path:
    """Train as the configuration says and save a Hugging Face folder at config.out. All ranks call it."""
    rank, ranks, device = init_process_group()
    set_threads(config.threads, ranks)
    out = Path(config.out)
    if out.exists():
        fail(f"--out {out} exists already; give another name, or delete it")
    if not config.model or not config.data:
        fail("--model and --data say what to train on what; --preset tiny brings both")
    for name in ("epochs", "batch", "lr", "clip_norm", "max_len", "tokens_per_row", "teacher"):
        if not 0 < getattr(config, name) < float("inf"):
            fail(f"--{name} {getattr(config, name)}: take more than 0")
    if rank == 0:
        make_folder(out.with_name(out.name + ".part"))  # where the model will be saved: now, not after hours
    if config.data == "tiny":
        lesson = [[]]
        if rank == 0:  # one teacher for all: a program late on one rank would change its tokenizer
            with PythonTool(timeout_s=2, max_chars=tiny.MAX_CHARS) as tool:
                said = tiny.conversations(config.teacher, config.seed, tool)
                bar = tqdm(said, "teacher, every program really run", config.teacher)
                lesson = [[{"messages": messages} for messages in bar]]
        dist.broadcast_object_list(lesson)
        conversations = lesson[0]
    try:
        if config.data != "tiny":
            conversations = load_conversations(config.data)
        if config.model == "tiny":
            torch.manual_seed(config.seed)
            tokenizer = tiny.tokenizer(tiny.texts(conversations[:2000]))
            model = tiny.model(len(tokenizer))
        else:
            model, tokenizer = load(config.model)
    except ValueError as error:
        fail(str(error))
    examples = tokenize_all(tokenizer, conversations, config.max_len)
    policy = shard(Policy(model.to(device)), device, checkpointing=device != "cpu")
    train(policy, examples, config, device)
    save(policy, tokenizer, out, torch.float32 if device == "cpu" else torch.bfloat16)
    return out


def main(config: Config) -> None:
    folder = run(config)
    if dist.get_rank() == 0:
        print(f"saved {folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main, parse_args(Config, presets=PRESETS))
