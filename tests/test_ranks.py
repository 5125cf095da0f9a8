"""Many ranks compute what one process computes, and never wait for a rank that is gone.

The ranks are real: torchrun starts this very file with 2 and with 3 processes over gloo, each job goes
through `everything` below and writes what every rank found to a folder; one process is this one. The last
thing that a job does is to fail on one rank. Further jobs: two nodes of one rank each, and a rank whose tool
never answers.
"""

import concurrent.futures
import math
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import small_model
from transformers import AutoModelForCausalLM

import grpo
import policy as net
import run
import sft
import tiny
from episodes import Agents, gather, measure
from tools import PythonTool

ROOT = Path(net.__file__).parent
UPDATES = {  # what differs: embeddings, optimizer batches, old policy, packed rows
    "tied": dict(tied=True, episodes=13, mini_batches=2, old_logp="trainer", tokens_per_row=64),
    "untied": dict(tied=False, episodes=13, mini_batches=1, old_logp="sampler", tokens_per_row=64),
    "offloaded": dict(
        tied=True, episodes=13, mini_batches=2, old_logp="trainer", tokens_per_row=64, offload=True
    ),
    "checkpointed": dict(
        tied=True, episodes=13, mini_batches=2, old_logp="trainer", tokens_per_row=64, checkpointing=True
    ),
    "kl": dict(
        tied=True, episodes=13, mini_batches=1, old_logp="trainer", tokens_per_row=64, kl=0.1, tis=1.1
    ),
    "sequences": dict(
        tied=True, episodes=13, mini_batches=1, old_logp="sampler", tokens_per_row=64, ratio="sequence",
        loss_mean="sequence", entropy=0.02,
    ),
    "one row": dict(tied=True, episodes=1, mini_batches=1, old_logp="sampler", tokens_per_row=4096),
    "one row untied": dict(tied=False, episodes=1, mini_batches=1, old_logp="sampler", tokens_per_row=4096),
}  # fmt: skip
SAMPLED = {"sampled": 5, "sampled, two problems": 2}  # number of problems
SAMPLED |= {"shared": 5, "shared, two problems": 2, "shared, a slow rank": 9}
LEARNING_RATE = 0.1


def make_model(tied: bool, seed: int = 0):
    return small_model("qwen3", seed, num_hidden_layers=2, tie_word_embeddings=tied)


def logprobs_of(model, ids: list[int]) -> torch.Tensor:
    """Log-probs [T-1, V] of the model's own forward, one sequence alone."""
    return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1], -1)


def make_episodes(model, n: int) -> list[dict]:
    """Prompt, policy, tool, policy, of many lengths; the sampler's log-probs are up to 0.4 off."""
    rng, episodes = random.Random(0), []
    for i in range(n):
        lengths = [rng.randint(3, 9), rng.randint(1, 12), rng.randint(0, 7), rng.randint(1, 5)]
        ids = [rng.randint(3, 127) for _ in range(sum(lengths))]
        mask = [m for m, length in zip([0, 1, 0, 1], lengths) for _ in range(length)]
        with torch.no_grad():
            logp = logprobs_of(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        logprobs = [(lp + rng.uniform(-0.4, 0.4)) * m for lp, m in zip([0.0, *logp], mask)]
        episode = {"ids": ids, "mask": mask, "logprobs": logprobs, "advantage": rng.choice([-1.4, -0.3, 0.9])}
        episodes.append({**episode, "prompt_index": i // 4, "sample_index": i % 4, "prompt_len": lengths[0]})
    return episodes


def update(case: dict) -> dict:
    """grpo.update of one batch with plain SGD: its metrics, and the whole weights after it."""
    model = make_model(case["tied"])
    episodes = make_episodes(model, case["episodes"])
    how = {key: case[key] for key in ("dtype", "offload", "checkpointing") if key in case}
    policy = net.shard(net.Policy(model), "cpu", **how)
    optimizer = torch.optim.SGD(policy.parameters(), LEARNING_RATE)
    config = grpo.Config(**{k: v for k, v in case.items() if hasattr(grpo.Config, k)}, clip_norm=5.0)
    ref = net.shard(net.Policy(make_model(case["tied"], seed=1)).requires_grad_(False), "cpu", **how)
    metrics = grpo.update(policy, optimizer, episodes, config, seed=3, ref=ref)
    noted = [e["ratio"] for e in episodes]  # of every episode, whoever trained on it
    return {"metrics": metrics, "weights": whole(policy), "ratios": noted}


def bfloat16_scores(family: str) -> list[torch.Tensor]:
    """Log-probs of one row by the trainer's policy and by the sampler's copy, both in bfloat16."""
    model = small_model(family, num_hidden_layers=2)
    row = net.packed_row([list(range(5, 105))], [[1] * 100])
    copied = net.Policy(net.sampler_copy(model, torch.bfloat16))
    trained = net.shard(net.Policy(model), "cpu", dtype="bfloat16")
    with torch.no_grad():
        return [policy(*row)[0].float() for policy in (trained, copied)]


def cold_start(batch: int, tokens_per_row: int) -> dict:
    """sft.train for a few steps: the losses, and the weights after it."""
    model = make_model(tied=True)
    examples = [(e["ids"], e["mask"]) for e in make_episodes(model, 10)]
    policy = net.shard(net.Policy(model), "cpu")
    config = sft.Config(batch=batch, epochs=1.0, lr=0.02, clip_norm=1e9, tokens_per_row=tokens_per_row)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # Adam's step hides a gradient that is `ranks` times too large
        patch.setattr(torch.optim, "AdamW", lambda weights, **_: torch.optim.SGD(weights, lr=0.0))
        return {"losses": sft.train(policy, examples, config), "weights": whole(policy)}


def whole(policy) -> dict[str, torch.Tensor]:
    return {name: net.full(weight.detach()).clone() for name, weight in policy.hf.named_parameters()}


def words() -> list[str]:
    return [
        "Use Python.",
        "print(12 ** 34 % 56)",
        *(p.messages[0]["content"] for p in tiny.problems("test", 40)),
    ]


def agents_of(tool, **more):
    tokenizer = tiny.tokenizer(words(), 420)
    torch.manual_seed(0)
    settings = dict(
        max_prompt=200, max_new_tokens=12, overlong_buffer=4, max_rows=8, max_turns=2, describe_tool=False
    )
    model = tiny.model(len(tokenizer)).eval()
    return Agents(model, tokenizer, tool, grpo.Config(**settings, **more))


def sampled(agents, problems) -> tuple[list[tuple], dict]:
    """What was sampled, and of it the metrics that no clock is in."""
    episodes = agents.sample(problems, 2, seed=5)
    found = [(e["prompt_index"], e["sample_index"], e["ids"], e["logprobs"], e["reward"]) for e in episodes]
    return found, {k: v for k, v in measure(episodes).items() if k != "tool/seconds"}


def shared_with_a_slow_rank(tool) -> tuple:
    """Problems drawn from the counter where the last rank is slow: what was sampled, how much of it here."""
    agents = agents_of(tool, deterministic=False)
    step, reward, here = agents.sampler._step, agents.reward, []

    def slow(batch):
        time.sleep(0.2)
        step(batch)

    if 0 < dist.get_rank() == dist.get_world_size() - 1:
        agents.sampler._step = slow
    agents.sampler.max_rows = 2  # one problem at a time
    agents.reward = lambda *given: (here.append(1), reward(*given))[1]
    return sampled(agents, tiny.problems("test", 9)), len(here), agents.seconds


def everything(folder: Path, tool) -> dict:
    """What every rank of a job does, in this order; the result of each step by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {name: update(case) for name, case in UPDATES.items()}
    found["bfloat16"] = update(UPDATES["tied"] | {"dtype": "bfloat16"})
    found["bfloat16 scores"] = [bfloat16_scores(family) for family in ("qwen3", "olmo3")]
    found["cold start"] = cold_start(batch=4, tokens_per_row=48)
    found["cold start, one row"] = cold_start(batch=2, tokens_per_row=4096)

    tokenizer = tiny.tokenizer(words(), 420)
    for tied in (True, False):
        policy = net.shard(net.Policy(make_model(tied, seed=1)), "cpu")
        copies = [make_model(tied, seed=2).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
        for copy in copies:
            net.copy_weights(policy, copy)
        found[f"copies, tied {tied}"] = [dict(copy.named_parameters()) for copy in copies]
        net.save(policy, tokenizer, folder / f"saved-{tied}-{ranks}")

    policy = net.shard(net.Policy(make_model(tied=True)), "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    episodes = make_episodes(make_model(tied=True), 6)
    config = grpo.Config(mini_batches=2, tokens_per_row=64)
    grpo.update(policy, optimizer, episodes, config, seed=0)
    run.checkpoint(folder / f"run-{ranks}", 1, policy, optimizer, tokenizer, torch.float32)
    grpo.update(policy, optimizer, episodes, config, seed=1)
    found["second step"] = whole(policy)

    mine = make_episodes(make_model(tied=True), 11)[rank::ranks]
    found["gathered"] = gather(mine[::-1])
    found["gathered from the first rank"] = gather(mine if rank == 0 else [])
    found["sampled"] = sampled(agents_of(tool), tiny.problems("test", 5))
    found["sampled, two problems"] = sampled(agents_of(tool), tiny.problems("test", 2))
    found["shared"] = sampled(agents_of(tool, deterministic=False), tiny.problems("test", 5))
    found["shared, two problems"] = sampled(agents_of(tool, deterministic=False), tiny.problems("test", 2))
    found["shared, a slow rank"], found["here"], found["seconds"] = shared_with_a_slow_rank(tool)
    return found


def stuck(folder: Path) -> None:
    """A job in which rank 1 waits for a tool that never answers, in the middle of sampling."""
    agents = agents_of(None, stall=3.0)
    (folder / "stuck").write_text(str(time.time()))
    if dist.get_rank() == 1:
        agents.sampler._step = lambda batch: never_answering_tool()
    agents.sample(tiny.problems("test", 4), 1, seed=0)


def never_answering_tool() -> None:
    concurrent.futures.Future().result()


def main(folder: Path, job: str = "") -> None:
    torch.set_num_threads(1)
    rank, ranks, _ = net.init_process_group()
    if job == "stuck":
        return stuck(folder)
    if job == "nodes":
        return torch.save({name: update(case) for name, case in UPDATES.items()}, folder / f"nodes-{rank}.pt")
    with PythonTool(workers=2, timeout_s=300) as tool:
        torch.save(everything(folder, tool), folder / f"{ranks}-{rank}.pt")
        calls = [tool.submit(code) for code in ("import time\ntime.sleep(300)", "while True: pass")]
        time.sleep(1)  # both programs run
        assert not any(call.done() for call in calls)
        dist.barrier()
        agents = agents_of(tool)
        if rank == 3 - ranks:  # rank 1 of 2, rank 0 of 3: the others wait for its episodes

            def broken(*_):
                (folder / f"failed-{ranks}").write_text(str(time.time()))
                raise ArithmeticError("the reward of this rank fails")

            agents.reward = broken
        agents.sample(tiny.problems("test", 4), 1, seed=0)


# ---- one process and the jobs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def torchrun(folder: Path, log: str, options: str, job: str = "") -> subprocess.Popen:
    """Starts this file under torchrun; what it says goes to folder/log."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    env |= {"CUDA_VISIBLE_DEVICES": ""}  # gloo, also where there is a GPU
    line = [sys.executable, "-m", "torch.distributed.run", *options.split(), __file__, str(folder), job]
    with (folder / log).open("w") as file:
        return subprocess.Popen(line, env=env, stdout=file, stderr=file)


@pytest.fixture(scope="module")
def jobs(folder) -> dict[int, list[dict]]:
    """{ranks: what each of its ranks found}; 1 is this process."""
    started = {n: torchrun(folder, f"log-{n}", f"--standalone --nproc_per_node {n}") for n in (2, 3)}
    try:
        with PythonTool(workers=1) as tool:
            found = {1: [everything(folder, tool)]}
        for ranks, process in started.items():
            code = process.wait(300)
            (folder / f"ended-{ranks}").write_text(f"{code} {time.time()}")
            found[ranks] = []
            for rank in range(ranks):
                file = folder / f"{ranks}-{rank}.pt"
                assert file.exists(), (folder / f"log-{ranks}").read_text()[-3000:]
                found[ranks].append(torch.load(file, weights_only=False))
    finally:
        for process in started.values():
            process.terminate()  # torchrun then ends its ranks
            process.wait()
    return found


def same_weights(found: dict, expected: dict, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def naive_update(case: dict) -> tuple[dict, dict]:
    """One optimizer step as the formula says, in float64: every token alone, no packing, no ranks."""
    model = make_model(case["tied"])
    episodes = make_episodes(model, case["episodes"])
    model, reference = model.double(), make_model(case["tied"], seed=1).double()
    tokens = sum(sum(e["mask"]) for e in episodes)
    loss, entropy, gap, worst, kl_ref = 0.0, 0.0, 0.0, 0.0, 0.0
    for e in episodes:
        law, held = logprobs_of(model, e["ids"]), logprobs_of(reference, e["ids"]).detach()
        places = [t for t, m in enumerate(e["mask"]) if m]
        of_sequence = sum(law[t - 1, e["ids"][t]].item() - e["logprobs"][t] for t in places) / len(places)
        weight = 1 / len(episodes) / len(places) if "loss_mean" in case else 1 / tokens
        for t in places:
            a, logp, sampled = e["advantage"], law[t - 1, e["ids"][t]], e["logprobs"][t]
            old = sampled if case["old_logp"] == "sampler" else logp.item()
            ratio = torch.exp(logp - (logp.item() - of_sequence if "ratio" in case else old))
            d, h = logp - held[t - 1, e["ids"][t]], -(law[t - 1].exp() * law[t - 1]).sum()
            term = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
            term = term * min(math.exp(old - sampled), case["tis"]) if "tis" in case else term
            k3 = (torch.exp(-d) - 1 + d).clamp(max=10)
            loss = loss + (term + case.get("kl", 0.0) * k3 - case.get("entropy", 0.0) * h) * weight
            entropy += h.item() / tokens
            kl_ref += k3.item() / tokens
            gap += abs(logp.item() - sampled) / tokens
            worst = max(worst, abs(logp.item() - sampled))
    loss.backward()
    norm = sum(w.grad.square().sum() for w in model.parameters()) ** 0.5
    scale = min(1.0, 5.0 / norm.item())
    weights = {n: (w - LEARNING_RATE * scale * w.grad).detach().float() for n, w in model.named_parameters()}
    metrics = {
        "policy/loss": loss.item(),
        "policy/entropy": entropy,
        "sampler/gap_mean": gap,
        "sampler/gap_max": worst,
    } | ({"policy/kl_ref": kl_ref} if "kl" in case else {})
    return {**metrics, "policy/grad_norm": norm.item()}, weights


# ---- the update --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, case in UPDATES.items() if case["mini_batches"] == 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_update_on_any_number_of_ranks_is_the_formula_for_the_whole_batch(jobs, name, ranks):
    """A loss divided by a rank's own token count weighs tokens by where they lie (huggingface/trl#3231); a
    mean of rank means is no mean over tokens (huggingface/trl#6380)."""
    metrics, weights = naive_update(UPDATES[name])
    for found in jobs[ranks]:
        assert {k: found[name]["metrics"][k] for k in metrics} == pytest.approx(metrics, rel=2e-5)
        same_weights(found[name]["weights"], weights, atol=2e-6)


@pytest.mark.parametrize("name", UPDATES)
def test_metrics_and_weights_do_not_depend_on_the_number_of_ranks(jobs, name):
    """Also where a rank has no row at all: it must still run forward and backward, or the others wait for
    ever (huggingface/trl#4041, PrimeIntellect-ai/prime-rl#2636, verl-project/verl#5591)."""
    case = UPDATES["one row"]  # in which two ranks of three have no row
    lengths = [len(e["ids"]) for e in make_episodes(make_model(True), case["episodes"])]
    assert [len(net.micro_batches(lengths, case["tokens_per_row"], r, 3)[0]) for r in range(3)] == [1, 0, 0]
    one = jobs[1][0][name]
    start = dict(make_model(UPDATES[name]["tied"]).named_parameters())
    assert all(
        (one["weights"][n] - start[n]).abs().max() > 1e-4 for n in start if "proj" in n
    )  # it did learn
    for found in [*jobs[2], *jobs[3]]:
        assert found[name]["metrics"] == pytest.approx(one["metrics"], abs=1e-6, rel=1e-6)
        same_weights(found[name]["weights"], one["weights"], atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_knows_what_the_others_noted_of_their_tokens(jobs, ranks):
    """The first rank writes the trajectories: what only the one that trained on them knew was lost."""
    one = jobs[1][0]["untied"]["ratios"]
    for found in jobs[ranks]:
        for ratios, right in zip(found["untied"]["ratios"], one, strict=True):
            assert ratios == pytest.approx(right, abs=2e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_in_bfloat16_the_trainer_rounds_what_the_sampler_rounds(jobs, ranks):
    """FSDP rounds all that a layer is given, if it is let: of OLMo, whose cosines are float32 on purpose, the
    trainer is then another policy than the sampler (pytorch/torchtitan#2881)."""
    for trained, copied in jobs[ranks][0]["bfloat16 scores"]:
        torch.testing.assert_close(trained, copied, atol=0.02, rtol=0)


def test_compute_in_bfloat16_keeps_the_weights_in_float32(jobs):
    """A step of 1e-6 is lost in a bfloat16 weight (PrimeIntellect-ai/prime-rl#1650 is what that looks like);
    one process on CPU computes in it too, and ranks differ by its rounding only."""
    start = dict(make_model(tied=True).named_parameters())
    right = {name: weight - start[name] for name, weight in jobs[1][0]["tied"]["weights"].items()}
    for found in jobs[1] + jobs[2] + jobs[3]:
        metrics, exact = ({**found[name]["metrics"]} for name in ("bfloat16", "tied"))
        assert metrics.pop("sampler/gap_max") != exact.pop("sampler/gap_max")  # of one token: 0.04 apart here
        assert metrics == pytest.approx(exact, rel=0.1, abs=0.02)
        for name, weight in found["bfloat16"]["weights"].items():
            assert weight.dtype == torch.float32 and (weight != weight.bfloat16()).any()
            moved = weight - start[name]
            # rounding moves some ratios over the clip bound; a step that is lost would be 1.0
            assert (moved - right[name]).norm() < 0.3 * right[name].norm(), name


def test_every_rank_logs_the_same_metrics(jobs):
    """A metric that only rank 0 knows decides differently on the others, for example when to stop."""
    for ranks in (2, 3):
        for name in UPDATES:
            assert all(found[name]["metrics"] == jobs[ranks][0][name]["metrics"] for found in jobs[ranks])


def test_the_time_of_a_rollout_is_that_of_the_slowest_rank(jobs):
    """The first rank's own clock would report a speed that the run does not have: it waits for the others."""
    for ranks in (2, 3):
        times = [found["seconds"] for found in jobs[ranks]]
        assert all(seconds == times[0] for seconds in times) and times[0]["time/rollout"] > 0.4


def test_ranks_on_another_node_take_no_cores_of_this_one(monkeypatch):
    """Two nodes of one rank each: each may use all of its own cores."""
    cores = net.set_threads(1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert net.set_threads(1, 2) == cores


@pytest.mark.parametrize("name", ["cold start", "cold start, one row"])
def test_the_cold_start_does_not_depend_on_the_number_of_ranks(jobs, name):
    """The supervised loss too is normalised once (verl-project/verl#3994), and a rank without a row takes
    part."""
    one = jobs[1][0][name]
    assert len(one["losses"]) == (2 if name == "cold start" else 5)
    for found in [*jobs[2], *jobs[3]]:
        assert found[name]["losses"] == pytest.approx(one["losses"], abs=1e-6, rel=1e-6)
        same_weights(found[name]["weights"], one["weights"], atol=2e-6)


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_samplers_copy_has_the_whole_weights_on_every_rank(jobs, tied):
    """A copy taken from a shard, or only on rank 0, samples from another policy (huggingface/trl#3029 is what
    that looks like: ratios far from 1 at the first step)."""
    right = dict(make_model(tied, seed=1).named_parameters())
    for found in jobs[1] + jobs[2] + jobs[3]:
        exact, rounded = found[f"copies, tied {tied}"]
        same_weights(exact, right, atol=0)
        same_weights(rounded, {name: weight.bfloat16() for name, weight in right.items()}, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sharded_policy_is_saved_whole(jobs, folder, tied, ranks):
    """A folder with one shard's half of each weight loads with random numbers in the rest, or not at all."""
    saved = AutoModelForCausalLM.from_pretrained(folder / f"saved-{tied}-{ranks}")
    same_weights(dict(saved.named_parameters()), dict(make_model(tied, seed=1).named_parameters()), atol=0)
    assert sorted(p.name for p in folder.glob("*.part")) == []


def test_a_policy_saved_by_three_ranks_loads_audited_with_its_tokenizer(jobs, folder):
    """What training writes must be what policy.load accepts, the tokenizer's chat template included."""
    model, tokenizer = net.load(str(folder / "saved-True-3"))
    same_weights(dict(model.named_parameters()), dict(make_model(True, seed=1).named_parameters()), atol=0)
    message = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_of_many_ranks_continues_in_one_process(jobs, folder, ranks):
    """Optimizer state that is lost or sharded wrongly makes another second step (huggingface/trl#3148,
    PrimeIntellect-ai/prime-rl#3004)."""
    policy = net.Policy(make_model(tied=True, seed=7))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    step, place = run.latest(folder / f"run-{ranks}")
    run.restore(place, policy, optimizer)
    assert step == 1
    episodes = make_episodes(make_model(tied=True), 6)
    grpo.update(policy, optimizer, episodes, grpo.Config(mini_batches=2, tokens_per_row=64), seed=1)
    same_weights(whole(policy), jobs[ranks][0]["second step"], atol=0 if ranks == 1 else 5e-5)


# ---- episodes ----------------------------------------------------------------------------------------------


def test_every_rank_gets_all_episodes_in_one_order(jobs):
    """Who sampled what must not matter for the update (huggingface/trl#3231); ids, masks and log-probs arrive
    whole."""
    right = make_episodes(make_model(tied=True), 11)
    for e in right:  # log-probs are float32 in the sampler as well
        e["logprobs"] = torch.tensor(e["logprobs"]).tolist()
    for found in jobs[1] + jobs[2] + jobs[3]:
        assert found["gathered"] == right


def test_a_rank_without_episodes_receives_those_of_the_others(jobs):
    """All of a rank's groups may be gone (volcengine/verl#3891): it waits for nobody and nobody for it."""
    right = make_episodes(make_model(tied=True), 11)
    for ranks in (2, 3):
        for found in jobs[ranks]:
            assert [e["ids"] for e in found["gathered from the first rank"]] == [
                e["ids"] for e in right[::ranks]
            ]


@pytest.mark.parametrize("name, problems", SAMPLED.items())
def test_trajectories_and_their_metrics_do_not_depend_on_the_number_of_ranks(jobs, name, problems):
    """The same seed on every rank would sample the same group twice (pixeli99/SVD_Xtend#75); fewer problems
    than ranks leave one without any. Dealt or drawn from a counter: who samples what must not matter."""
    one, metrics = jobs[1][0][name]
    assert len(one) == 2 * problems
    assert len({tuple(ids) for _, _, ids, _, _ in one}) == len(one)
    for found in [*jobs[2], *jobs[3]]:
        for (p, s, ids, logp, reward), right in zip(found[name][0], one, strict=True):
            assert (p, s, ids, reward) == (right[0], right[1], right[2], right[4])
            assert logp == pytest.approx(right[3], abs=1e-5)
        assert found[name][1] == metrics


def test_a_rank_that_is_slow_samples_less_when_problems_are_shared(jobs):
    """Dealt beforehand, all ranks wait for the one whose trajectories are long. Each is sampled once."""
    assert jobs[1][0]["here"] == 18
    for ranks in (2, 3):
        here = [found["here"] for found in jobs[ranks]]
        assert sum(here) == 18 and here[-1] <= 4  # dealt, it has 8 of two ranks and 6 of three


# ---- nodes ------------------------------------------------------------------------------------------------


def test_two_nodes_of_one_rank_compute_what_one_node_of_two_ranks_does(jobs, folder):
    """torchrun on each node, one rendezvous: local ranks are 0 on both, the ranks 0 and 1, and nothing may be
    counted by the local one. The same bits, for the sums are the same."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    options = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id two --rdzv_endpoint {where}"
    nodes = [torchrun(folder, f"log-node-{i}", options, "nodes") for i in (0, 1)]
    try:
        for i, node in enumerate(nodes):
            assert node.wait(120) == 0, (folder / f"log-node-{i}").read_text()[-3000:]
    finally:
        for node in nodes:
            node.terminate()
    for rank in (0, 1):
        found = torch.load(folder / f"nodes-{rank}.pt", weights_only=False)
        for name in UPDATES:
            assert found[name]["metrics"] == jobs[2][rank][name]["metrics"]
            same_weights(found[name]["weights"], jobs[2][rank][name]["weights"], atol=0)


# ---- failure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exception_on_one_rank_ends_the_job_within_a_minute(jobs, folder, ranks):
    """The others wait for that rank in a collective; without an end they do so until a time-out of hours
    (huggingface/trl#3964, volcengine/verl#3891)."""
    code, ended = (folder / f"ended-{ranks}").read_text().split()
    assert int(code) != 0
    assert float(ended) - float((folder / f"failed-{ranks}").read_text()) < 60
    assert "ArithmeticError: the reward of this rank fails" in (folder / f"log-{ranks}").read_text()


def test_a_rank_that_waits_for_ever_ends_the_job_with_the_place_where_it_stands(folder):
    """The others wait in a collective for hours, and nobody is told for whom (huggingface/trl#3964)."""
    job = torchrun(folder, "log-stuck", "--standalone --nproc_per_node 2", "stuck")
    try:
        assert job.wait(120) != 0
    finally:
        job.terminate()
    said = (folder / "log-stuck").read_text()
    assert time.time() - float((folder / "stuck").read_text()) < 60
    assert "rank 1: for 3 s no token was sampled and no tool answered" in said
    assert "in never_answering_tool" in said


def test_no_tool_process_and_no_file_of_the_tool_outlives_a_failed_job(jobs, folder):
    """Programs that the model started would go on eating the machine (rllm-org/rllm#915,
    volcengine/verl#1466)."""

    def left() -> list[str]:
        found = [str(path) for path in folder.glob("python-tool-*")]
        for process in Path("/proc").glob("[0-9]*"):
            try:  # server, workers and programs of the tool show the tool's folder in their command line
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(f"{process.name}: {line}")
        return found

    until = time.monotonic() + 30
    while left() and time.monotonic() < until:
        time.sleep(0.2)
    assert left() == []


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
