"""One GRPO step of a small language model here, and by TRL's GRPOTrainer on the same settings.

    python bench/trainer.py --model SmolLM2-135M-Instruct.Q4_1.gguf --trl PYTHON
    python bench/trainer.py --model ... --trl PYTHON --dtype bfloat16

PYTHON is the interpreter of an environment with trl, the same torch, gguf and accelerate. Each side is a
process of its own: 4 prompts x 8 samples of exactly 64 tokens (nothing ends them), no tool, the same reward
of every other sample, one optimizer step (AdamW) a batch, no activation checkpointing, the same threads. The
first step warms up, the median of the others counts. Peak: the largest resident memory after loading.
The last line is a JSON object.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = [
    "Mia has 14 red beads and three times as many blue ones. How many beads does she have in all?",
    "A baker sells 26 rolls before noon and 19 after noon, at 2 dollars each. How many dollars is that?",
    "A bus starts with 31 people. 12 get off and 7 get on at the first stop. How many are on the bus?",
    "Five crates hold 18 bottles each, and 11 of the bottles are broken. How many bottles are whole?",
]
CHATS = [[{"role": "user", "content": text + " Think step by step."}] for text in QUESTIONS]
SAMPLES, TOKENS, LR = 8, 64, 1e-6


def peak_mb(start: bool = False) -> float:
    """Largest resident memory since the last start."""
    if start:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def ours(args) -> dict:
    sys.path[0] = str(ROOT)  # not bench/, whose kernels.py would hide kernels/
    import torch

    import grpo
    import policy as net
    from chat import encode_prompt
    from rollout import Sampler

    net.init_process_group()
    torch.set_num_threads(args.threads)
    model, tokenizer = net.load(args.model)
    prompts = [encode_prompt(tokenizer, chat) for chat in CHATS]
    dtype = net.compute_dtype(args.dtype, "cpu")
    shared = dtype == torch.float32
    copied = model if shared else net.sampler_copy(model, dtype)
    policy = net.shard(net.Policy(model), "cpu", dtype=args.dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), LR, weight_decay=0.0, fused=True)
    sampler = Sampler(copied, tokenizer, 4 * SAMPLES, max(map(len, prompts)) + TOKENS)
    sampler.stop = set()
    config = grpo.Config(mini_batches=1, tokens_per_row=args.tokens_per_row)
    found = defaultdict(list)
    peak_mb(start=True)
    for step in range(args.steps + 1):
        start = time.perf_counter()
        trajectories = sampler.generate(prompts, SAMPLES, TOKENS, seed=step)
        sampled = time.perf_counter()
        rewards = [float(i % 2) for i in range(len(trajectories))]
        advantages = grpo.group_advantages(rewards, [t.prompt_index for t in trajectories]).tolist()
        episodes = [vars(t) | {"advantage": a} for t, a in zip(trajectories, advantages)]
        grpo.update(policy, optimizer, episodes, config, seed=step)
        if not shared:
            net.copy_weights(policy, copied)
        end = time.perf_counter()
        found["step"].append(end - start)
        found["sampling"].append(sampled - start)
        found["old log-probs"].append(0.0)  # of one optimizer step: those of the training pass itself
    found["training"] = [a - b for a, b in zip(found["step"], found["sampling"])]
    lengths = {len(t.ids) - t.prompt_len for t in trajectories}
    return dict(found, peak=peak_mb(), lengths=sorted(lengths), prompts=[len(p) for p in prompts])


def trl(args) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    file = Path(args.model)
    where = (file.parent, {"gguf_file": file.name}) if file.suffix == ".gguf" else (file, {})
    tokenizer = AutoTokenizer.from_pretrained(where[0], **where[1])
    model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1])
    model.is_quantized = False  # the file was; its weights are float32 here
    config = GRPOConfig(
        output_dir="unused", use_cpu=True, bf16=args.dtype == "bfloat16", report_to="none", disable_tqdm=True,
        save_strategy="no", per_device_train_batch_size=8, gradient_accumulation_steps=4, beta=0.0,
        num_generations=SAMPLES, max_completion_length=TOKENS, generation_kwargs={"min_new_tokens": TOKENS},
        learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.0, gradient_checkpointing=False,
        max_steps=args.steps + 1, temperature=1.0, shuffle_dataset=False, logging_steps=1000,
    )  # fmt: skip
    found, lengths, prompts = defaultdict(list), set(), set()

    class Timed(GRPOTrainer):
        def _generate(self, chats, *more):
            start = time.perf_counter()
            result = super()._generate(chats, *more)
            found["sampling"].append(time.perf_counter() - start)
            prompts.update(map(len, result[0]))
            lengths.update(map(len, result[1]))
            return result

        def _generate_and_score_completions(self, inputs):
            self.scoring = True
            result = super()._generate_and_score_completions(inputs)
            self.scoring = False
            return result

        def _get_per_token_logps_and_entropies(self, *given, **more):
            start = time.perf_counter()
            result = super()._get_per_token_logps_and_entropies(*given, **more)
            self.old += (time.perf_counter() - start) * self.scoring
            return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start, trainer.old = time.perf_counter(), 0.0

        def on_step_end(self, *_, **__):
            found["step"].append(time.perf_counter() - self.start)
            found["old log-probs"].append(trainer.old)

    data = Dataset.from_list([{"prompt": chat} for chat in CHATS])
    trainer = Timed(
        model, reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()],
    )  # fmt: skip
    trainer.scoring, trainer.old = False, 0.0
    peak_mb(start=True)
    trainer.train()
    parts = zip(found["step"], found["sampling"], found["old log-probs"])
    found["training"] = [step - sampling - old for step, sampling, old in parts]
    return dict(found, peak=peak_mb(), lengths=sorted(lengths), prompts=sorted(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="folder or .gguf file")
    parser.add_argument("--trl", help="python of an environment with trl; without it only our side runs")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of compute")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that warms up")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side")
    parser.add_argument("--tokens_per_row", type=int, default=640, help="tokens of our packed rows")
    parser.add_argument("--side", choices=["ours", "trl"], help="run this side here")
    args = parser.parse_args()
    if args.side:
        print(json.dumps({"ours": ours, "trl": trl}[args.side](args)))
        return
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = {}
    for side, python in [("ours", sys.executable), ("trl", args.trl)]:
        if python:
            line = [python, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(line, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[side] = json.loads(done.stdout.splitlines()[-1])
            print(f"{side}: {done.stdout.splitlines()[-1]}", flush=True)
    print(f"{args.dtype}, {args.threads} threads, median of {args.steps} steps (all of them), seconds")
    print(f"{'':16s}" + "".join(f"{side:>30s}" for side in found))
    medians = {side: {} for side in found}
    for key in ("step", "sampling", "old log-probs", "training"):
        line = f"{key:16s}"
        for side, result in found.items():
            medians[side][key] = statistics.median(result[key][1:])
            each = " ".join(f"{value:.2f}" for value in result[key][1:])
            line += f"{medians[side][key]:9.2f} ({each})".rjust(30)
        print(line)
    print(f"{'peak MB':16s}" + "".join(f"{result['peak']:30.0f}" for result in found.values()))
    for side, result in found.items():
        print(f"{side}: prompts of {sorted(set(result['prompts']))} tokens, samples of {result['lengths']}")
    if len(found) == 2:
        assert sorted(set(found["ours"]["prompts"])) == sorted(set(found["trl"]["prompts"])), "other prompts"
        assert found["ours"]["lengths"] == found["trl"]["lengths"] == [TOKENS], "other lengths"
        print(json.dumps({
            "step_vs_trl": round(medians["trl"]["step"] / medians["ours"]["step"], 2),
            "peak_mb": round(found["ours"]["peak"]), "trl_peak_mb": round(found["trl"]["peak"]),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
