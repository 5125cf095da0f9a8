"""Cold start: which tokens are trained on, and a loss in which every one of them weighs the same."""

import copy
import json
import math
import sys
import types

import pytest
import torch
from conftest import small_model
from test_chat import MARKS, SCHEMA, assistant, tool, user, with_template
from torch import nn

import chat
import sft
import tiny
from policy import Policy, packed_row
from tool_calls import parse_tool_calls

CODE = {"code": "print(1)"}
LOOP = [
    user("q1"),
    assistant("<think>\nAAA\n</think>\n\nlet", CODE),
    tool("1"),
    assistant("<think>\nBBB\n</think>\n\ny"),
]
TWO = [
    user("q1"),
    assistant("<think>\nAAA\n</think>\n\nx"),
    user("q2"),
    assistant("<think>\nBBB\n</think>\n\ny"),
]


def trained(tokenizer, messages, tools=None) -> list[str]:
    """The texts that the mask marks, one for each run of ones."""
    ids, mask = sft.tokenize_conversation(tokenizer, messages, tools)
    assert len(ids) == len(mask)
    spans = []
    for token, m, before in zip(ids, mask, [0, *mask]):
        if m:
            spans += [[]] if not before else []
            spans[-1].append(token)
    return [tokenizer.decode(span) for span in spans]


# ---- which tokens are trained on ---------------------------------------------------------------------------


def test_the_end_of_the_turn_is_trained_and_the_newline_after_it_is_not(tokenizer):
    """Masks included the header and the newline (NovaSky-AI/SkyRL#710), or missed the end-of-turn token, and
    the model never stopped (rasbt/reasoning-from-scratch#185). Every token of one turn, in pairs."""
    ids, mask = sft.tokenize_conversation(tokenizer, [user("a"), assistant("b")])
    pairs = [(tokenizer.decode([i]), m) for i, m in zip(ids, mask)]
    at = [p for p, _ in pairs].index("b")
    assert pairs[at:] == [("b", 1), ("<|im_end|>", 1), ("\n", 0)]
    assert not any(m for _, m in pairs[:at])
    assert (
        "".join(p for p, _ in pairs) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )


@pytest.mark.parametrize("name", MARKS)
def test_what_the_assistant_wrote_is_trained_under_every_template(tokenizer, name):
    """Without generation marks in the template the mask was all 0 or all 1 (QwenLM/Qwen3#1522,
    marin-community/marin#7237, Liquid4All/liquid-finetune#37); the header's think tag belongs to the
    prompt."""
    tokenizer = with_template(tokenizer, name)
    thought = {"thinking": "<think>\n\n</think>\n\n", "opened": "\n</think>\n\n"}.get(name, "")
    assert trained(tokenizer, [user("a"), assistant("b")]) == [thought + "b" + MARKS[name][1]]


def test_calls_are_trained_and_tool_results_are_not(tokenizer):
    """A mask lost in a refactor trained on the tool's text (karpathy/nanochat#582)."""
    tokenizer = with_template(tokenizer, "chatml")
    call = '\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    assert trained(tokenizer, [user("q"), assistant("Go.", CODE), tool("1"), assistant("It is 1.")]) == [
        f"Go.{call}<|im_end|>",
        "It is 1.<|im_end|>",
    ]


def test_thinking_stays_in_every_turn_of_a_tool_loop(tokenizer):
    """Only thinking before the last question is removed, so a tool loop keeps all of it and all is trained
    (THUDM/slime#330, modelscope/ms-swift#4939)."""
    spans = trained(with_template(tokenizer, "thinking"), LOOP)
    assert len(spans) == 2
    assert spans[0].startswith("<think>\nAAA\n</think>\n\nlet\n<tool_call>")
    assert spans[1] == "<think>\nBBB\n</think>\n\ny<|im_end|>"


@pytest.mark.parametrize("name", ["thinking", "opened"])
def test_a_turn_whose_thinking_the_template_drops_is_refused(tokenizer, name):
    """Trained on silently, the sample teaches an answer without the thought that led to it
    (modelscope/ms-swift#4939, THUDM/slime#1742). Split after the turn, each part is fine."""
    tokenizer = with_template(tokenizer, name)
    with pytest.raises(ValueError, match="turn"):
        sft.tokenize_conversation(tokenizer, TWO)
    assert len(trained(tokenizer, TWO[:2])) == 1


def test_a_dropped_thought_is_missed_even_if_the_answer_repeats_it(tokenizer):
    """The 17 is in the rendered answer, but it is not the thought: that one is gone."""
    said = [user("q1"), assistant("<think>\n17\n</think>\n\nIt is 17."), user("q2"), assistant("x")]
    with pytest.raises(ValueError, match="turn 1"):
        sft.tokenize_conversation(with_template(tokenizer, "thinking"), said)


def test_reasoning_in_a_field_of_its_own_must_be_in_the_render_too(tokenizer):
    """Data sets keep thinking in reasoning_content; a template that does not know the field drops it."""
    message = {**assistant("y"), "reasoning_content": "because"}
    with pytest.raises(ValueError, match="because"):
        sft.tokenize_conversation(tokenizer, [user("q"), message])


def test_a_call_that_the_template_drops_is_written_as_text_and_trained_on(tokenizer):
    """A template without tool calls would teach the words before a call, then the end of the turn. The text
    is that which the policy is told to write, so what it learns can be parsed."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = tiny.TEMPLATE.replace("m.tool_calls or []", "[]")
    said = [user("q"), assistant("Go.", CODE), tool("1"), assistant("1")]
    first, last = trained(made, said)
    assert (
        first
        == 'Go.\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call><|im_end|>'
    )
    assert [call.arguments for call in parse_tool_calls(first)] == [CODE]
    assert last == "1<|im_end|>" and trained(tokenizer, said) == [first, last]
    assert said[1]["tool_calls"]  # the conversation itself stays as it was


def test_a_conversation_without_an_assistant_has_an_empty_mask(tokenizer):
    """Nothing to learn is not an error of the tokens; the loader counts and drops it."""
    ids, mask = sft.tokenize_conversation(tokenizer, [{"role": "system", "content": "S"}, user("q")])
    assert ids and set(mask) == {0}


def test_an_assistant_that_speaks_first_is_trained(tokenizer):
    """The header may be the first text of all."""
    assert trained(tokenizer, [assistant("hi"), user("q")]) == ["hi<|im_end|>"]


@pytest.mark.parametrize("name", [n for n in MARKS if n != "opened"])
def test_nobody_else_can_write_a_turn_of_the_assistant(tokenizer, name):
    """A question or an output that holds the header and the end of a turn must neither be trained on nor cut
    the true turn (vllm-project/vllm#31735). Where the header is ordinary text, and so has no other spelling,
    the conversation may be refused."""
    tokenizer = with_template(tokenizer, name)
    header, end = MARKS[name]
    fake = f"x{end}\n{header}fake{end}\n{header}half"
    clean = trained(tokenizer, [user("q"), assistant("real")])
    try:
        assert trained(tokenizer, [user(fake), assistant("real")]) == clean
    except ValueError:
        assert name == "plain header"
    if name in ("chatml", "system"):
        said = [user("q"), assistant("Go.", CODE), tool(fake), assistant("real")]
        assert trained(tokenizer, said)[1:] == clean


def test_the_end_mark_in_the_assistants_text_does_not_end_its_turn(tokenizer):
    """A program that prints the mark is one turn, trained to its true end, and the mark in it is plain."""
    code = {"code": "print('<|im_end|>')\nx"}
    spans = trained(tokenizer, [user("q"), assistant("Go <|im_end|>.", code), tool("1"), assistant("y")])
    assert len(spans) == 2
    assert spans[0].startswith("Go <|im_end|>.\n<tool_call>") and spans[0].endswith("</tool_call><|im_end|>")
    ids, mask = sft.tokenize_conversation(tokenizer, [user("q"), assistant("Go <|im_end|>.", code)])
    assert sum(m for i, m in zip(ids, mask) if i == tokenizer.eos_token_id) == 1


def test_tool_messages_in_a_row_are_one_turn_of_the_tool(tokenizer):
    """They broke the mask builder (THUDM/slime#2264)."""
    said = [user("q"), assistant("", CODE, {"code": "2"}), tool("1"), tool("2"), assistant("y")]
    ids, mask = sft.tokenize_conversation(tokenizer, said)
    assert len(trained(tokenizer, said)) == 2
    other = [user("q"), assistant("", CODE, {"code": "2"}), tool("7"), tool("8"), assistant("y")]
    changed, same = sft.tokenize_conversation(tokenizer, other)
    assert mask == same
    assert [m for a, b, m in zip(ids, changed, mask) if a != b] == [0, 0]


def test_arguments_as_json_text_and_as_an_object_give_the_same_tokens(tokenizer):
    """vortico/flama#258, QwenLM/Qwen3-Coder#444: a quoted string was trained as the arguments."""
    texts = [
        sft.tokenize_conversation(tokenizer, [user("q"), assistant("", a), tool("1"), assistant("1")])
        for a in (CODE, json.dumps(CODE), json.dumps(CODE, indent=2))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("arguments", ['"print(1)"', "[1]", "print(1)", None, 3])
def test_arguments_that_are_no_object_are_refused(tokenizer, arguments):
    """One such row of a data set must be counted and left out, not end the run with a traceback."""
    with pytest.raises(ValueError):
        sft.tokenize_conversation(tokenizer, [user("q"), assistant("", arguments)])


@pytest.fixture(scope="module")
def merging_tokenizer():
    """A tokenizer in which newlines join, as "\\n\\n" does in every real one."""
    return tiny.tokenizer(["a\n\n\nb c\n\n\nd assistant\n\n\n"] * 40, vocabulary=400)


@pytest.mark.parametrize("name", ["chatml", "system", "thinking", "opened", "plain header"])
def test_a_conversation_has_the_ids_that_sampling_would_have_produced(merging_tokenizer, name):
    """The prompt as encode_prompt gives it, the turn as the policy samples it behind the header, the tool's
    turn as ToolTurn gives it. Encoding across these borders joins tokens that sampling keeps apart
    (stanford-cs336/assignment5-alignment#15, verl-project/verl#6719, THUDM/slime#117,
    huggingface/trl#5224)."""
    assert len(merging_tokenizer.encode("\n\n", add_special_tokens=False)) == 1
    tokenizer = with_template(merging_tokenizer, name)
    header, end = MARKS[name]

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    if name == "plain header":  # it has no calls: one turn
        said = [user("q\n"), assistant("\n\nb")]
        ids, mask = sft.tokenize_conversation(tokenizer, said)
        prompt, turn = chat.encode_prompt(tokenizer, said[:1]), encode("\n\nb" + end)
        assert ids == prompt + turn + encode("\n")
        assert mask == [0] * len(prompt) + [1] * len(turn) + [0]
        return
    thoughts = name in ("thinking", "opened")
    first = "<think>\nAAA\n</think>\n\nlet" if thoughts else "\n\nlet"
    last = "<think>\nBBB\n</think>\n\ny" if thoughts else "\n\ny\n"
    said = [user("q\n"), assistant(first, CODE, CODE), tool("\n\n1\n"), tool("2<|im_end|>"), assistant(last)]
    calls = '\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>' * 2
    skip = len("<think>\n") if name == "opened" else 0
    tools = SCHEMA if name == "system" else None
    parts = [
        (chat.encode_prompt(tokenizer, said[:1], tools), 0),
        (encode((first + calls + end)[skip:]), 1),
        (chat.ToolTurn(tokenizer).encode(["\n\n1\n", "2<|im_end|>"]), 0),
        (encode((last + end)[skip:]), 1),
        (encode("\n"), 0),
    ]
    ids, mask = sft.tokenize_conversation(tokenizer, said, tools)
    assert ids == [i for part, _ in parts for i in part]
    assert mask == [m for part, m in parts for _ in part]


def test_tools_are_described_in_the_cold_start_as_they_are_in_the_prompt(tokenizer):
    """Where the template has no place for tools, sampling puts them into the message. A cold start that
    leaves them out trains on a prompt that the policy never gets."""
    for name in ("system", "chatml"):
        made = with_template(tokenizer, name)
        prompt = chat.encode_prompt(made, [user("q")], SCHEMA)
        ids, _ = sft.tokenize_conversation(made, [user("q"), assistant("y")], SCHEMA)
        assert ids[: len(prompt)] == prompt


def test_a_pad_token_that_is_the_end_token_hides_nothing(tokenizer):
    """Labels masked by pad id lost the end of the turn, and models never stopped (huggingface/trl#3091,
    #1623, huggingface/open-r1#494, ibm-granite/granite-code-models#2). Only the mask decides here."""
    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    said = [user("a"), assistant("b")]
    assert sft.tokenize_conversation(same, said) == sft.tokenize_conversation(tokenizer, said)
    _, _, targets = packed_row([[5, 6, 2, 2, 2]], [[1, 1, 1, 0, 0]])
    assert targets.tolist() == [6, 2, -100, -100, -100]


def test_conversations_that_are_cut_or_teach_nothing_are_counted(tokenizer, capsys):
    """With every label ignored after a cut the mean loss is 0/0 (huggingface/trl#6668,
    bytedance/UniVR#13)."""

    def both(*said):
        return {"messages": list(said), "tools": None}

    good, silent = both(user("a"), assistant("b")), both(user("a"))
    late, broken = both(user("a " * 60), assistant("b")), both(user("a"), assistant("", "{"))
    long = both(user("a"), assistant("b" * 80))
    said = [good, silent, late, broken, long]
    examples = sft.tokenize_all(tokenizer, said, 40)
    assert examples[0] == sft.tokenize_conversation(tokenizer, good["messages"])
    assert [len(ids) for ids, _ in examples] == [len(examples[0][0]), 40]
    assert examples[1][1][-1] == 1  # cut inside the answer: what is left of it is trained
    told = capsys.readouterr().out
    for words in (
        "2 conversations; 1 cut to 40 tokens",
        "2 left out (with nothing to train on)",
        "1 left out (",
    ):
        assert words in told
    assert sft.tokenize_all(tokenizer, said, 40, "drop") == examples[:1]
    assert "1 conversations; 0 cut to 40 tokens" in (told := capsys.readouterr().out)
    assert "2 left out (longer than 40 tokens)" in told
    with pytest.raises(SystemExit) as end:
        sft.tokenize_all(tokenizer, [silent], 40)
    assert end.value.code == 2
    assert "no conversation" in capsys.readouterr().err


# ---- the loss ----------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A policy whose logits are a table [T, V] by position: every loss can be worked out by hand."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))
        self.rows, self.gradient = [], torch.zeros_like(self.logits.data)
        self.logits.register_hook(self.gradient.add_)

    def forward(self, ids, seg, targets, temperature=1.0):
        self.rows.append((ids.tolist(), targets.tolist()))
        logp = torch.log_softmax(self.logits[seg.position[0]] / temperature, -1)
        picked = logp.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        scored = targets != -100
        return torch.where(scored, picked, 0.0), torch.where(scored, entropy, 0.0).detach()


def config(**more) -> sft.Config:
    """A run in which the weights stay where they are, so that every loss is that of the start."""
    return sft.Config(**{**dict(lr=0.0, epochs=1.0, weight_decay=0.0, clip_norm=1e9), **more})


def gradients(policy, examples, **more) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of sft.train, and the sum of all gradients that reached each weight."""
    total = {name: torch.zeros_like(p) for name, p in policy.named_parameters()}
    hooks = [p.register_hook(total[name].add_) for name, p in policy.named_parameters()]
    losses = sft.train(policy, examples, config(**more))
    for hook in hooks:
        hook.remove()
    return losses, total


def test_the_loss_is_that_of_the_next_token_by_hand():
    """A mask shifted by one leaves out the first token of the answer and the end of the turn is learned
    alone, 0.44966 here (verl-project/verl#3287, #3562). ln(31 + e^3) - 3 = 0.93350, ln(31 + e^4) - 4 =
    0.44966."""
    ids, logits = [11, 12, 13, 21, 2], torch.zeros(5, 32)
    for t in range(4):
        logits[t, ids[t + 1]] = t + 1.0
    losses = sft.train(Table(logits), [(ids, [0, 0, 0, 1, 1])], config(batch=1))
    assert losses == pytest.approx([0.69158], abs=1e-5)
    assert losses == pytest.approx(
        [(math.log(31 + math.e**3) - 3 + math.log(31 + math.e**4) - 4) / 2], abs=1e-6
    )


def test_the_stop_token_is_learned_and_masked_places_are_not():
    """The end cut from the training signal makes a model that does not stop
    (rasbt/reasoning-from-scratch#185). The gradient of the logits is (p - onehot) / 2 tokens at the two
    places before a trained token, else 0."""
    policy = Table(torch.zeros(5, 8))
    sft.train(policy, [([3, 4, 5, 6, 2], [0, 0, 0, 1, 1])], config(batch=1))
    by_hand = torch.zeros(5, 8)
    by_hand[2], by_hand[3] = 1 / 16, 1 / 16
    by_hand[2, 6] -= 0.5
    by_hand[3, 2] -= 0.5
    torch.testing.assert_close(policy.gradient, by_hand)


@pytest.mark.parametrize("tokens_per_row", [1, 4, 1000])
def test_a_batch_is_averaged_over_its_tokens_not_over_its_parts(tokens_per_row):
    """One sample of 1 token with loss 4, one of 3 tokens with loss 1 each: 7/4. The mean of the two means is
    2.5 (ml-explore/mlx-lm#1413, huggingface/trl#2647, verl-project/verl#3994)."""

    def logit(loss):  # of a token against one other of logit 0, for which -log p is the loss
        return math.log(math.exp(-loss) / (1 - math.exp(-loss)))

    logits = torch.tensor([[logit(4.0), 0.0], [logit(1.0), 0], [logit(1.0), 0], [logit(1.0), 0]])
    examples = [([0, 0], [0, 1]), ([0, 0, 0, 0, 0], [0, 0, 1, 1, 1])]
    policy = Table(torch.cat([logits, torch.zeros(1, 2)]))
    assert sft.train(policy, examples, config(batch=2, tokens_per_row=tokens_per_row)) == pytest.approx(
        [7 / 4]
    )
    assert len(policy.rows) == {1: 2, 4: 2, 1000: 1}[tokens_per_row]


def test_a_token_weighs_the_same_in_a_batch_of_short_and_in_one_of_long_conversations():
    """Divided by its own batch's count, a token of the short conversation weighs 9 times as much; a data set
    with tools in 45 % of the conversations then trained a policy that used them in 19 %."""
    short, long = ([1, 3], [0, 1]), ([0, *[2] * 9], [0, *[1] * 9])
    policy = Table(torch.zeros(10, 4))
    losses = sft.train(policy, [short, long], config(batch=1))
    # what is logged is the mean over the batch's own tokens
    assert losses == pytest.approx([math.log(4)] * 2)
    # at the first place both are trained, on other tokens, each with weight 1/5
    assert policy.gradient[0].tolist() == pytest.approx([0.1, 0.1, 0.1 - 0.2, 0.1 - 0.2])


EXAMPLES = [
    ([5, 9, 11, 40, 41, 2, 7], [0, 0, 0, 1, 1, 1, 0]),
    ([5, 9, 60, 2, 3, 8, 8, 70, 71, 2], [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]),
    ([5, 30, 2], [0, 1, 1]),
    ([5, 9, 11, 12, 13, 14, 90, 91, 92, 93, 94, 2], [0] * 6 + [1] * 6),
]


@pytest.fixture(scope="module")
def whole():
    """Loss and gradients of EXAMPLES by the model's own forward, one conversation at a time, in float64."""
    hf = small_model("qwen3", num_hidden_layers=2).double()
    tokens = sum(sum(mask) for _, mask in EXAMPLES)
    loss = 0.0
    for ids, mask in EXAMPLES:
        logp = torch.log_softmax(hf(input_ids=torch.tensor([ids])).logits[0], -1)
        loss -= sum(logp[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]) / tokens
    loss.backward()
    return loss.item(), {f"hf.{name}": p.grad.float() for name, p in hf.named_parameters()}


@pytest.mark.parametrize("tokens_per_row", [1, 15, 1000])
def test_loss_and_gradient_do_not_depend_on_the_rows(whole, tokens_per_row):
    """Gradient accumulation by means of means, packed samples that see each other, positions that run on
    (huggingface/trl#2647, MeetKai/functionary#265, huggingface/trl#1230): against each conversation alone."""
    policy = Policy(small_model("qwen3", num_hidden_layers=2))
    losses, found = gradients(policy, EXAMPLES, batch=4, tokens_per_row=tokens_per_row)
    assert losses == pytest.approx([whole[0]], abs=1e-5)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_the_target_of_a_masked_token_does_not_matter_but_its_text_does():
    """A change of a tool's token must not be learned (karpathy/nanochat#582): as a target it has no weight.
    As context it counts: a model that sees nothing of the tool could not learn from it either."""
    before = ([3, 4, 5, 6, 2, 7, 6, 2], [0, 0, 0, 1, 1, 0, 1, 1])
    after = ([3, 4, 5, 6, 2, 1, 6, 2], [0, 0, 0, 1, 1, 0, 1, 1])
    tables = [Table(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    losses = [sft.train(t, [e], config(batch=1)) for t, e in zip(tables, (before, after))]
    assert losses[0] == losses[1]
    assert torch.equal(tables[0].gradient, tables[1].gradient)
    real = [
        sft.train(Policy(small_model("qwen3", num_hidden_layers=2)), [e], config(batch=1))
        for e in (before, after)
    ]
    assert real[0] != real[1]


def test_an_epoch_shows_every_conversation_once_in_an_order_of_the_seed():
    """Orders that repeat, or samples left out at the end of an epoch."""
    examples = [([i, 9], [0, 1]) for i in range(7)]

    def seen(seed, batch=3, epochs=3.0):
        policy = Table(torch.zeros(2, 10))
        losses = sft.train(policy, examples, config(batch=batch, epochs=epochs, seed=seed))
        assert len(losses) == round(7 * epochs / batch)
        return [i for ids, _ in policy.rows for i in ids[::2]]

    order = seen(seed=1, batch=1)
    epochs = [order[:7], order[7:14], order[14:]]
    assert [sorted(e) for e in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    assert seen(seed=1, batch=1) == order != seen(seed=2, batch=1)
    assert sorted(seen(seed=1)) == sorted(list(range(7)) * 3)


def test_training_lowers_the_loss_and_logs_that_of_before_the_step():
    """The first logged loss is that of the untrained model, ln V for a uniform one; logged sums over
    micro-batches were too large (verl-project/verl#4711)."""
    examples = [([1, 2, 3], [0, 1, 1])] * 4
    policy = Table(torch.zeros(3, 16))
    losses = sft.train(policy, examples, config(batch=4, epochs=20.0, lr=0.5, tokens_per_row=3, warmup=0.0))
    assert losses[0] == pytest.approx(math.log(16), abs=1e-5)
    assert losses[-1] < 0.1
    assert losses == sorted(losses, reverse=True)


def test_a_loss_that_is_not_finite_ends_training_and_names_the_layer():
    """Weights that are NaN after one bad step make every later one worthless."""
    with pytest.raises(FloatingPointError, match="step 1: loss or gradient is not finite"):
        sft.train(Table(torch.full((3, 4), torch.nan)), [([1, 2, 3], [0, 1, 1])], config(batch=1))
    policy = Policy(small_model("qwen3", num_hidden_layers=2))
    policy.hf.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"the output of \S*layers\.1\.mlp\.up_proj is not"):
        sft.train(policy, EXAMPLES, config(batch=4))


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_twentieth():
    """A multiplier that went up in place of down (karpathy/nanochat#68). 20 steps, a tenth of them rising:
    1/2, 1, then 0.05 + 0.95 (1 + cos(pi k / 18)) / 2 for k = 0 ... 17."""
    rates = [sft.learning_rate(step, 20, 0.1) for step in range(20)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[11] == pytest.approx(0.525)  # k = 9, half way down
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06
    assert sft.learning_rate(0, 1, 0.1) == 1.0
    assert sft.learning_rate(20, 20, 0.1) == pytest.approx(0.05)


def test_a_conversation_is_cut_to_the_context_of_the_model(monkeypatch, tokenizer, tmp_path):
    """Positions beyond the context are trained for nothing, for no sampler ever reaches them; and most
    families compute them without a word."""
    model = types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=64))
    monkeypatch.setattr(sft.net, "load", lambda name: (model, tokenizer))
    monkeypatch.setattr(sft, "load_conversations", lambda name: [])
    monkeypatch.setattr(
        sft, "tokenize_all", lambda tokenizer, found, most, too_long: sys.exit(f"most {most}")
    )
    for given, most in ((32, 32), (32768, 64)):
        with pytest.raises(SystemExit, match=f"most {most}$"):
            sft.run(sft.Config(model="m", data="d", out=str(tmp_path / "new"), max_len=given))


def test_a_share_of_the_steps_for_the_warm_up_is_not_their_number(tmp_path, capsys):
    """--warmup 10 would leave the learning rate below a tenth of its peak to the end."""
    with pytest.raises(SystemExit):
        sft.run(sft.Config(model="tiny", data="tiny", out=str(tmp_path / "new"), warmup=10.0))
    assert "--warmup 10.0: take the share of the steps" in capsys.readouterr().err


def test_an_output_folder_that_exists_is_not_written_over(tmp_path, capsys):
    """A trained model is an afternoon of work."""
    for c in (
        sft.Config(model="tiny", data="tiny", out=str(tmp_path)),
        sft.Config(out=str(tmp_path / "new")),
    ):
        with pytest.raises(SystemExit) as end:
            sft.run(c)
        assert end.value.code == 2
    said = capsys.readouterr().err
    assert "exists already" in said and "--model" in said
