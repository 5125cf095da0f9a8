"""Messages and token ids.

Everything the policy reads goes through this file once: the prompt, and the text of a tool. What the policy
writes is never encoded at all: sampled ids are kept, since decoding and encoding again changes them ("\n" +
"\n" comes back as one token), and then every log-ratio after that place is wrong.

Two rules hold here:
- the template's own control tokens become control tokens, text of a user or a tool that merely looks like
  one does not;
- where a turn begins and ends is known from the template, never guessed from ids.

Left out: images, parallel system prompts, templates that cannot render one turn after the other.
To copy into another project: take tool_calls.py along; needs transformers (a fast tokenizer with a chat
template).
"""

import copy
import functools
import itertools
import json
import re
import weakref

from jinja2 import TemplateError
from tokenizers import Tokenizer

from tool_calls import parse_tool_calls

_plain = weakref.WeakKeyDictionary()  # tokenizer -> the same tokenizer without its added tokens


def encode_plain(tokenizer, text: str) -> list[int]:
    """Ids of `text`, control tokens spelled out in ordinary pieces: "<|im_end|>" -> "<", "|", "im" ...

    A tool may print anything. If its text could become control tokens, a program would be able to end the
    tool's turn and speak as the user (vllm-project/vllm#31735). Raises ValueError if the vocabulary cannot
    spell the text.
    """
    if tokenizer not in _plain:
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        spec["added_tokens"], spec["post_processor"] = [], None
        _plain[tokenizer] = Tokenizer.from_str(json.dumps(spec)), set(tokenizer.added_tokens_decoder)
    plain, control = _plain[tokenizer]
    ids = plain.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    if control.intersection(ids):
        raise ValueError(f"this tokenizer cannot spell the control token in {text[:80]!r}; take it out")
    return ids


def added_tokens(tokenizer, special_only: bool = False) -> list[str]:
    """Texts of the added tokens, longest first. special_only: marks of roles and turns, not <think>."""
    found = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special or not special_only]
    return sorted(found, key=len, reverse=True)


def render(tokenizer, messages: list[dict], tools: list[dict] | None = None, generation_prompt: bool = False):
    """The conversation by the tokenizer's chat template, as pieces [(text, is_plain), ...].

    Plain pieces are text that must not become control tokens: all of a tool's text, and whatever looks like
    an added token in the text of the others (for the assistant only role and turn marks: it writes <think>
    and <tool_call> itself). They travel through the template as private-use characters. Raises ValueError
    without a template.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; set one, or use an instruction-tuned model")
    known: list[str] = []  # plain texts, by number

    def hide(text: str) -> str:
        known.append(text)
        return f"\ue0f0{len(known) - 1}\ue0f1"

    def guard(value, tokens):
        if isinstance(value, str):
            value = value.replace("\ue0f0", "\ufffd").replace("\ue0f1", "\ufffd")
            return re.sub("|".join(map(re.escape, tokens)), lambda m: hide(m[0]), value) if tokens else value
        if isinstance(value, dict):
            return {guard(k, tokens): guard(v, tokens) for k, v in value.items()}
        return [guard(v, tokens) for v in value] if isinstance(value, list) else value

    everything, turns = added_tokens(tokenizer), added_tokens(tokenizer, special_only=True)
    messages = copy.deepcopy(messages)
    for i, message in enumerate(messages):
        message["content"] = message.get("content") or ""
        for call in message.get("tool_calls") or []:
            _, arguments = name_and_arguments(call)
            if not isinstance(arguments, dict):
                raise ValueError(f"the arguments of a tool call are {arguments!r}, not an object")
            call.get("function", call)["arguments"] = arguments  # templates want the object
        if message["role"] == "tool":
            message["content"] = hide(message["content"])
        else:
            messages[i] = guard(message, turns if message["role"] == "assistant" else everything)
    if any(m["role"] == "tool" for m in messages) and not shows_results(tokenizer):
        say_once("the chat template has no place for a tool's text: the user gives it")
        messages = given_by_the_user(messages)
    options = {"add_generation_prompt": generation_prompt, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, **options)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from None
    if "\\ue0f0" in text:
        raise ValueError(
            "the chat template escapes text that is not ASCII, so a control token in it cannot be kept apart"
        )
    pieces = re.split("\ue0f0(\\d+)\ue0f1", text)
    return [(known[int(p)], True) if i % 2 else (p, False) for i, p in enumerate(pieces)]


def name_and_arguments(call: dict) -> tuple[str, dict]:
    """Of a call in a message: bare or under "function", its arguments an object or the JSON text of one."""
    call = call.get("function", call)
    arguments = call["arguments"]
    return call["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def given_by_the_user(messages: list[dict]) -> list[dict]:
    """The texts of tools that follow each other as one message of the user."""
    found = []
    for of_tools, some in itertools.groupby(messages, key=lambda m: m["role"] == "tool"):
        if of_tools:
            texts = [f"<tool_response>\n{m['content']}\n</tool_response>\n" for m in some]
            some = [{"role": "user", "content": "".join(texts)}]
        found += some
    return found


def encode_marks(tokenizer, text: str) -> list[int]:
    """Ids of the template's own text: its control tokens become control tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_pieces(tokenizer, pieces) -> list[int]:
    ids = []
    for text, is_plain in pieces:
        ids += (encode_plain if is_plain else encode_marks)(tokenizer, text)
    return ids


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Ids of the prompt, the header of the assistant's turn included: the policy's first token comes next."""
    messages, tools = place_tools(tokenizer, messages, tools)
    return encode_pieces(tokenizer, render(tokenizer, messages, tools, generation_prompt=True))


def place_tools(tokenizer, messages: list[dict], tools: list[dict] | None):
    """(messages, tools) as they can be rendered. A template may have no place for tools, or for calls, and
    drop them without a word; or it asks for calls in a form (Llama's, Mistral's) that tool_calls.py does not
    read. Then the tools' description goes in front of the first message of the user, the calls into the text
    of their turn, and one line says so."""
    messages = place_calls(tokenizer, messages)
    if not tools:
        return messages, tools
    if writes_calls(tokenizer) and render(tokenizer, messages, tools) != render(tokenizer, messages):
        return messages, tools
    say_once(
        "the chat template has no place for tools, or a form of its own for calls: the tools' description "
        "goes into the user's message"
    )
    messages = copy.deepcopy(messages)
    first = next((m for m in messages if m["role"] == "user"), None)
    if not first:
        raise ValueError("no message of the user, in which the tools could be described")
    first["content"] = tool_description(tools) + "\n\n" + first["content"]
    return messages, None


def once_a_template(function):
    """Keeps what a function of a tokenizer has found until its chat template changes."""
    kept = functools.lru_cache(maxsize=16)(lambda tokenizer, template: function(tokenizer))
    return functools.wraps(function)(lambda tokenizer: kept(tokenizer, str(tokenizer.chat_template)))


@once_a_template
def writes_calls(tokenizer) -> bool:
    """Whether the template writes tool calls, and as tool_calls.py reads them."""
    call = {"name": "python", "arguments": {"code": "qabbaq"}}
    calls = [{"type": "function", "function": call}]
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text = "".join(text for text, _ in render(tokenizer, said))
    except ValueError:
        return False
    return call in [{"name": c.name, "arguments": c.arguments} for c in parse_tool_calls(text)]


@once_a_template
def shows_results(tokenizer) -> bool:
    """Whether the template has a place for the texts of tools, and leaves them as they are."""
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}
    called = {"tool_calls": [call, call]} if writes_calls(tokenizer) else {}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **called}]
    said += [{"role": "tool", "content": "\ue0f0", "name": "python"}] * 2
    try:
        return tokenizer.apply_chat_template(said, tokenize=False).count("\ue0f0") == 2
    except TemplateError:
        return False


def place_calls(tokenizer, messages: list[dict]) -> list[dict]:
    """Tool calls as text, in the form that the policy is told to write, if the template does not do it."""
    if not any(m.get("tool_calls") for m in messages) or writes_calls(tokenizer):
        return messages
    say_once("the chat template writes no tool calls as we read them: they go into the assistant's text")
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.pop("tool_calls", None) or []:
            name, arguments = name_and_arguments(call)
            said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            message["content"] = (message.get("content") or "") + f"\n<tool_call>\n{said}\n</tool_call>"
    return messages


def tool_description(tools: list[dict]) -> str:
    return (
        "You can call these functions, described by JSON schema:\n"
        + "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
        + "\nTo call one, write its name and arguments as JSON between tags, and stop: "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call>. You then get its output.'
    )


@once_a_template
def turn_marks(tokenizer) -> tuple[str, str]:
    """(header, end): the texts that begin and end an assistant's turn, e.g. "<|im_start|>assistant\\n",
    "<|im_end|>". A template without a generation prompt (Mistral) begins it where the user's turn ends."""

    def text(messages, **kw):
        return "".join(p for p, _ in render(tokenizer, messages, **kw))

    ask = [{"role": "user", "content": "qabbaq"}]
    before, prompt = text(ask), text(ask, generation_prompt=True)
    answered = text([*ask, {"role": "assistant", "content": "zyzzyva"}])
    between, _, after = answered.rpartition("zyzzyva")
    end = re.search("|".join(map(re.escape, added_tokens(tokenizer))), after)
    header = prompt.removeprefix(before)
    if not header and prompt.endswith(closing := between.rpartition("qabbaq")[2].rstrip(" ")):
        header = closing
    if not end or header in ("", end[0]):
        raise ValueError("the chat template does not mark where an assistant's turn begins and ends")
    return header, end[0]


class ToolTurn:
    """What is appended after the policy's tool calls: the rest of its turn, the tools' texts, the header of
    its next turn.

    encode(["17"]) for Qwen3 is
    "\\n<|im_start|>user\\n<tool_response>\\n17\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n". The
    newline after the end-of-turn token is part of it (dropping it is a public bug: verl-project/verl#6501).
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.frames: dict[tuple, list] = {}  # names of the tools -> [ids, ids, ...] around their texts

    def encode(self, results: list[str], names: list[str] | None = None) -> list[int]:
        """names: of the tools called, for templates that show them (default: python)."""
        names = tuple(names or ["python"] * len(results))
        if names not in self.frames:
            self.frames[names] = self._frame(names)
        frame = self.frames[names]
        ids = list(frame[0])
        for text, after in zip(results, frame[1:], strict=True):
            ids += encode_plain(self.tokenizer, text) + after
        return ids

    def _frame(self, names: tuple[str, ...]) -> list[list[int]]:
        _, end = turn_marks(self.tokenizer)
        functions = [{"name": name, "arguments": {"code": "1"}} for name in names]
        called = {"role": "assistant", "content": "a"}
        if writes_calls(self.tokenizer):
            called["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        answers = [{"role": "tool", "content": "r", "name": name} for name in names]
        pieces = render(self.tokenizer, [{"role": "user", "content": "q"}, called, *answers], None, True)
        first = pieces[0][0]
        start = first.rindex(end) + len(end)  # the assistant's turn is the last to end
        texts = [first[start:]] + [text for text, plain in pieces[1:] if not plain]
        return [encode_marks(self.tokenizer, t) for t in texts]


@functools.cache
def say_once(line: str) -> None:
    print(line, flush=True)
