"""The settings of a training run (grpo.py): name, default, unit and meaning; the presets; what cannot work.

Each field of Config is an option of its own name, `--clip_high 0.3`; an option outranks the preset, the
preset the default. `python grpo.py --help` lists them.
"""

import math
from dataclasses import dataclass

import tiny
from options import check_values, fail
from tracker import tracker_fault


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
    ratio: str = "token"  # ratio of each token, or of the whole sequence (GSPO)
    loss_mean: str = "token"  # mean of the loss by token, sequence or constant: see loss_weights
    kl: float = 0.0  # weight of the KL term that holds the policy near the one it started from; 0: off
    kl_estimator: str = "k3"  # k1, k2 or k3: see kl_estimate
    entropy: float = 0.0  # weight of the entropy bonus; 0: off
    resample: int = 0  # times that groups of equal rewards are drawn anew, of new problems (DAPO); 0: never
    old_logp: str = "trainer"  # pi_old: the trainer's own log-probs (one more pass), or the sampler's
    tis: float = 0.0  # cap of the importance weight trainer / sampler (truncated correction); 0: off
    tool_reward: bool = True  # wrong answers earn 0.1 a tool round, -1 to -0.6; a weak policy can farm it
    max_prompt: int = 2560  # tokens of a prompt; a longer one is left out of data, and refused in eval_data
    max_new_tokens: int = 20480  # tokens after the prompt, the tool's text included
    overlong_buffer: int = 4096  # last tokens of max_new_tokens, over which the penalty rises to 1
    max_turns: int = 16  # turns of the policy; a call in the last one is not run
    temperature: float = 1.0  # of sampling, and of the log-probs in the loss
    describe_tool: bool = True  # the prompt describes the tool
    tool_name: str = "python"  # what the policy calls the tool by, as in its cold start
    tool_seconds: float = 30.0  # wall clock of a tool call
    tool_memory: int = 2048  # MB of each process of a tool call
    tool_chars: int = 256  # characters of a tool's output that the policy sees
    tool_workers: int = 0  # tool calls at the same time on a rank; 0: its share of the cores, at least 2
    sandbox: str = "namespaces"  # of the tool; "bwrap": the same inside bubblewrap, which hides your files
    max_rows: int = 128  # trajectories that decode together on a rank
    cache_tokens: int | None = None  # tokens of a rank's KV cache; none: what max_rows need and memory allows
    cuda_graphs: bool = False  # decode steps as CUDA graphs (decode.py); not yet run on a GPU
    tokens_per_row: int = 23040  # tokens of a packed row in training
    eval_every: int = 10  # steps between evaluations on unseen problems; 0: never
    eval_data: str = "aime2025"  # unseen problems
    eval_problems: int = 256  # at most so many of them
    save_every: int = 30  # steps between checkpoints
    keep: int = 2  # checkpoints kept, the last ones
    store_every: int = 10  # steps between stored trajectories (300 MB a step on 8 GPUs); 0: never
    show_every: int = 10  # steps between trajectories shown in the terminal; 0: never
    tracker: str = ""  # sends the metrics to wandb, tensorboard or trackio too
    dtype: str = ""  # of compute: float32 or bfloat16; empty: float32 on CPU, bfloat16 on GPU
    offload: bool = False  # weights, gradients and optimizer state in CPU memory, where the optimizer steps
    deterministic: bool | None = None  # a fixed order of work, on CPU the same bits each time; none: on CPU
    stall: float = 300.0  # seconds without a token or a tool's answer, after which a rank ends the job
    threads: int = 0  # CPU threads of torch; 0: all cores, shared among the ranks


RL_DATA = "Gen-Verse/Open-AgentRL-30K"
PRESETS = {
    "tiny": dict(
        steps=32, batch=256, group=8, mini_batches=2, lr=4e-4, beta2=0.95, weight_decay=0.0,
        old_logp="sampler", tool_reward=False, max_prompt=64, max_new_tokens=150, overlong_buffer=30,
        max_turns=4, describe_tool=False,
        tool_seconds=2.0, tool_memory=1024, tool_chars=tiny.MAX_CHARS, max_rows=256, tokens_per_row=16384,
        eval_every=5, eval_data="tiny", save_every=5, store_every=1, threads=1,
    ),
    "qwen3-0.6b": dict(
        model="Qwen/Qwen3-0.6B", data=RL_DATA, steps=200, batch=256, group=8, max_new_tokens=4096,
        overlong_buffer=1024, max_turns=8, tokens_per_row=16384,
    ),
    "qwen3-4b": dict(model="Gen-Verse/Qwen3-4B-RA-SFT", data=RL_DATA, tool_name="code_interpreter"),
    "qwen2.5-7b": dict(model="Gen-Verse/Qwen2.5-7B-RA-SFT", data=RL_DATA, tool_name="code_interpreter"),
    # The paper's three recipes, laid over one of the above: --preset qwen3-4b+grpo-scr
    "grpo-t": dict(clip_high=0.2, overlong_buffer=0, kl=1e-3),  # and 16,384 new tokens there
    "grpo-tcr": dict(clip_high=0.28),  # the default; 0.315 for the paper's final model
    "grpo-scr": dict(ratio="sequence", loss_mean="sequence", clip_low=3e-4, clip_high=4e-4),
}  # fmt: skip
CHOICES = {
    "scale": ("std", "none"),
    "ratio": ("token", "sequence"),
    "loss_mean": ("token", "sequence", "constant"),
    "kl_estimator": ("k1", "k2", "k3"),
    "old_logp": ("trainer", "sampler"),
    "dtype": ("", "float32", "bfloat16"),
}


POSITIVE = """steps clip_norm max_prompt max_new_tokens max_turns temperature tool_seconds tool_memory
tool_chars max_rows tokens_per_row eval_problems save_every keep stall"""
NOT_NEGATIVE = "lr weight_decay eval_every store_every show_every threads tool_workers tis kl resample"


def check(c: Config) -> None:
    """Ends the program with one sentence for what cannot work, before anything is written."""
    check_values(c, POSITIVE, NOT_NEGATIVE, CHOICES, bounds="clip_norm stall tis")
    if c.group < 2:
        fail(f"--group {c.group}: a group of one has no advantage over itself; take at least 2")
    below = max(c.batch, 0) // c.group * c.group
    legal = " or ".join(str(b) for b in (below, below + c.group) if b > 0)
    for wrong, sentence in [
        (c.batch < 1 or c.batch % c.group,
         f"--batch {c.batch} is not divisible by --group {c.group}; take {legal}"),
        (not 0 <= c.beta2 < 1, f"--beta2 {c.beta2}: take 0 to below 1"),
        (not math.isfinite(c.entropy), f"--entropy {c.entropy}: take a finite number"),
        (not 1 <= c.mini_batches <= c.batch, f"--mini_batches {c.mini_batches}: take 1 to --batch {c.batch}"),
        (not 0 <= c.clip_low <= 1 or not c.clip_high >= 0,
         f"--clip_low {c.clip_low} --clip_high {c.clip_high}: take 0 to 1, and 0 or more"),
        (c.cache_tokens is not None and c.cache_tokens < c.max_prompt + c.max_new_tokens,
         f"--cache_tokens {c.cache_tokens}: one trajectory may have {c.max_prompt + c.max_new_tokens}"),
        (c.tool_seconds + 10 > c.stall,
         f"--stall {c.stall:g}: a tool call may take --tool_seconds {c.tool_seconds:g}; take 10 more"),
        (c.tis and c.old_logp == "sampler", "--tis corrects the trainer's pi_old: add --old_logp trainer"),
        (not 0 <= c.overlong_buffer <= c.max_new_tokens,
         f"--overlong_buffer {c.overlong_buffer}: take 0 to --max_new_tokens {c.max_new_tokens}"),
        (c.dual_clip and not c.dual_clip > 1, f"--dual_clip {c.dual_clip}: take more than 1, or 0 for none"),
        ("tiny" not in c.preset.split("+") and not (c.model and c.data),
         "--model and --data say what to train on what (or --preset tiny+..., which brings its own)"),
        (not c.tool_name, "--tool_name is empty; take what the policy calls the tool by, as python"),
        ("tiny" in c.preset.split("+") and not c.model and c.tool_name != "python",
         f"--tool_name {c.tool_name}: the laptop run's policy learns to call it python; leave it out"),
        (fault := tracker_fault(c.tracker), fault),
    ]:  # fmt: skip
        if wrong:
            fail(sentence)
