"""The built-in world of the laptop run: five families of problems, a scripted teacher, a tokenizer, a model.

Half a million weights can learn to copy two-digit numbers into a program, but not to compute 37 ** 19 % 58.
So the answer has to come from Python, and the policy has to find out that it should call it, which program is
right, and that a failed program can be repaired. The teacher's trajectories show all of that and its
opposite: guesses from the head, programs that compute the wrong thing, errors that are repaired or given up.
Every program is really run. What to prefer is left to the reward.

What made it learn, found by trying: two digits are one token (single digits are copied wrong), answers have
at most two digits, every program begins by copying the question's numbers in their order, so that all
families teach the same copying, and the tool's text is short.

Left out: everything that makes language hard.
"""

import json
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data import Problem

FAMILIES = {  # question, the program's expression of its numbers a, b, c, and the ranges of these
    "mod": (
        "What is the remainder when {} to the power {} is divided by {}?",
        "a ** b % c",
        [(11, 99), (11, 29), (11, 99)],
    ),
    "digits": (
        "What is the sum of the digits of {} times {} times {}?",
        "sum(map(int, str(a * b * c)))",
        [(11, 99), (11, 99), (11, 99)],
    ),
    "primes": (
        "How many primes are there between {} and {}?",
        "sum(all(n % i for i in range(2, n)) for n in range(a, b))",
        [(10, 49), (60, 99)],
    ),
    "prodmod": (
        "What is the remainder when {} times {} is divided by {}?",
        "a * b % c",
        [(11, 99), (10, 49), (11, 99)],
    ),
    "bits": (
        "How many ones are in the binary form of {} to the power {}?",
        "bin(a ** b).count('1')",
        [(11, 99), (11, 29)],
    ),
}
MAX_CHARS = 200  # of a tool's output

TEMPLATE = (  # ChatML with hermes tool calls, as in Qwen2.5 and Qwen3, without their descriptions
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} | tojson %}"
    "{{ '\\n<tool_call>\\n' + said + '\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def draw(rng: random.Random, test: bool) -> tuple[str, str, str, str, str]:
    """(family, question, assignment, expression, answer). One set of numbers in five is for tests only."""
    family = rng.choice(list(FAMILIES))
    question, expression, ranges = FAMILIES[family]
    names = "abc"[: len(ranges)]
    while True:
        numbers = [rng.randint(*r) for r in ranges]
        answer = str(eval(expression, dict(zip(names, numbers))))  # our own text, not a model's
        if (sum(7**i * n for i, n in enumerate(numbers)) % 5 == 0) == test and len(answer) < 3:
            assignment = f"{', '.join(names)} = {', '.join(map(str, numbers))}\n"
            return family, question.format(*numbers), assignment, expression, answer


def problems(split: str = "test", n: int = 256, seed: int = 0) -> list[Problem]:
    """n problems; the split "train" and the split "test" never share a question's numbers."""
    rng = random.Random(f"{split} {seed}")
    found = []
    for i in range(n):
        family, question, *_, answer = draw(rng, split == "test")
        found.append(
            Problem([{"role": "user", "content": question}], answer, "math", family, f"{split}-{seed}-{i}")
        )
    return found


# ---- the teacher -------------------------------------------------------------------------------------------


RUN, FIX, ANSWER = "Use Python.", "That failed. I fix it.", "The answer is \\boxed{}."


def script(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """(question, turns): each is (words, program to run after them or ""); "{}" is the output before."""
    _, question, assignment, expression, answer = draw(rng, test=False)
    good = f"{assignment}print({expression})"
    if rng.random() < 0.35:  # from the head, nearly always wrong
        guess = answer if rng.random() < 0.05 else str(rng.randint(1, 99))
        return question, [(f"I think it is \\boxed{{{guess}}}.", "")]
    broken = assignment + rng.choice(
        [f"print({expression}", f"print(x + {expression})", f"print({expression}))"]
    )
    u = rng.random()
    if u < 0.15:  # an error is given up
        return question, [(RUN, broken), (f"That failed. I think it is \\boxed{{{rng.randint(1, 99)}}}.", "")]
    if u < 0.35:  # an error is repaired
        return question, [(RUN, broken), (FIX, good), (ANSWER, "")]
    if u < 0.70:  # a program that runs, and computes something else
        for right, wrong in [("**", "*"), (" * ", " + "), ("range(2, n)", "range(2, 4)")]:
            if right in expression:
                good = assignment + f"print({expression.replace(right, wrong)})"
                break
    return question, [(RUN, good), (ANSWER, "")]


def conversations(n: int, seed: int, tool) -> Iterator[list[dict]]:
    """n conversations (messages) of the teacher, whose programs `tool` (tools.PythonTool) really runs."""
    rng = random.Random(f"teacher {seed}")
    scripts = [script(rng) for _ in range(n)]
    programs = dict.fromkeys(program for _, turns in scripts for _, program in turns if program)
    outputs = {program: tool.submit(program) for program in programs}  # each once, all at the same time
    for question, turns in scripts:
        messages, output = [{"role": "user", "content": question}], ""
        for words, program in turns:
            words = words.replace("\\boxed{}", f"\\boxed{{{output}}}")
            messages.append({"role": "assistant", "content": words})
            if program:
                call = {"type": "function", "function": {"name": "python", "arguments": {"code": program}}}
                messages[-1]["tool_calls"] = [call]
                output = outputs[program].result().output
                messages.append({"role": "tool", "content": output})
        yield messages


def texts(conversations: list[dict]) -> list[str]:
    """What the tokenizer is trained on: everything that is said, run and answered."""
    said = (m for conversation in conversations for m in conversation["messages"])
    return [
        "\n".join([m["content"], *(json.dumps(c["function"]) for c in m.get("tool_calls", []))]) for m in said
    ]


# ---- tokenizer and model -----------------------------------------------------------------------------------


def tokenizer(texts: list[str], vocabulary: int = 640) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which two digits are one token, with the control tokens of ChatML and hermes."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # tokens, but no role marks
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=t in special, normalized=False) for t in special + tags],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    for mark in special + tags:
        texts = [part for text in texts for part in text.split(mark)]
    bpe.train_from_iterator([*texts, *[f"{i:02d}" for i in range(100)] * 200], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def model(vocabulary: int) -> Qwen3ForCausalLM:
    """0.47 million weights: 2 layers, hidden 128, 4 query and 2 key heads, tied embeddings."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with the usual .02 so small a model learns to copy several times later
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    return Qwen3ForCausalLM(config)
