"""What the tests share: small random models, a small tokenizer, a process group of one."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # two torch threads in each of two processes wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"

import torch  # does not import triton, which reads the next line

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from policy import init_process_group

SMALL = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {  # every family that is served, with a window small enough to matter
    "qwen2": dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": {},
    "llama": dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
                  high_freq_factor=4.0, original_max_position_embeddings=64)),
    "smollm3": {},
    "mistral": dict(sliding_window=8),
    "gemma3_text": dict(sliding_window=8, query_pre_attn_scalar=16, num_hidden_layers=7),
    "olmo2": {},
    "olmo3": dict(sliding_window=8),
}  # fmt: skip


def small_model(family: str = "qwen3", seed: int = 0, **more):
    """A random float32 model of the family; weights large enough that a wrong mask shows."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
    return model


LONGEST_FIRST = "test_run test_ranks test_pretrained test_tools test_exercises test_fit test_grpo".split()


def pytest_collection_modifyitems(items):
    """Two processes take a file each: with the longest at the end one would wait for the other."""
    place = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def process_group():
    torch.set_num_threads(1)  # tiny tensors: threads only cost
    init_process_group()


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the laptop run (ChatML, hermes tool calls), trained on a few sentences."""
    texts = ["What is the remainder when 12 times 34 is divided by 56?", "Use Python.", "print(12 * 34 % 56)"]
    texts += ["The answer is \\boxed{16}.", '{"name": "python", "arguments": {"code": "print(1)"}}']
    return tiny.tokenizer(texts * 3, vocabulary=420)
