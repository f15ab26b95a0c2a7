"""Row shapes of other projects, by their public documentation, with what is read from them.

`expected` is the text of all ids, with [[ and ]] around what is trained. `label` is the answer that a reward gets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """trl: which preparation of TRL's must give the same ids and mask."""

    name: str
    doc: str
    row: Mapping[str, Any]
    task: Literal["sft", "rl", "preference", "score"]
    format: str
    expected: str | Sequence[str | None]  # of a preference: chosen, rejected
    label: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the source
    trl: Literal["", "sft", "prompt", "dpo", "kto"] = ""


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def asked(text: str) -> str:
    """A user's message and the generation prompt."""
    return said("user", text) + ASSISTANT


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ADD = "Add the numbers.\n2 and 2"
ASSISTANT, END = "<|im_start|>assistant\n", "<|im_end|>"
QUESTION, BLUE, GREEN = "What color is the sky?", "It is blue.", "It is green."
TURNS = [user(QUESTION), assistant(BLUE)]
TRAINED = f"{asked(QUESTION)}[[{BLUE}{END}]]\n"
WHOLE = (
    f"{asked(QUESTION)}[[{BLUE}{END}\n]]"  # TRL trains what the template writes behind the prompt
)
TRL, OPENAI = (
    "huggingface.co/docs/trl/dataset_formats",
    "platform.openai.com/docs/guides/supervised-fine-tuning",
)
VERL, VERL_SFT = (
    "verl.readthedocs.io/en/latest/preparation/prepare_data.html",
    "verl docs, sft_trainer and multiturn_sft_dataset",
)
ALPACA, FACTORY = "github.com/tatsu-lab/stanford_alpaca", "LLaMA-Factory data/README.md"
SLIME, OPENRLHF = (
    "slime docs, quick start and slime/utils/data.py",
    "OpenRLHF docs, prepare datasets",
)
GSM8K = "github.com/openai/grade-school-math"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = said("tools", json.dumps([WEATHER]))
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
        }
    ],
}
CALLED = f'[[get_weather({{"city": "Rome"}}){END}]]\n'
NATALIA = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
IDENTITY = {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}
PREAMBLE = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd the numbers.\n\n"
)
PAIRED = (
    PREAMBLE.format(", paired with an input that provides further context")
    + "### Input:\n2 and 2\n\n### Response:"
)
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [user("What is 2+2?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}
SHARED = {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": BLUE}]}

SHAPES: Sequence[Shape] = (
    # TRL, standard and conversational
    Shape(name="trl language modeling", doc=TRL, row={"text": "The sky is blue."}, task="sft", format="trl",
          expected=f"[[The sky is blue.{END}]]", trl="sft"),
    Shape(name="trl language modeling with its eos", doc=TRL, row={"text": f"The sky is blue.{END}"}, task="sft",
          format="trl", expected=f"[[The sky is blue.{END}]]", trl="sft"),
    Shape(name="trl language modeling, messages", doc=TRL, row={"messages": TURNS}, task="sft", format="openai",
          expected=TRAINED, trl="sft"),
    Shape(name="trl prompt-only", doc=TRL, row={"prompt": "The sky is"}, task="rl", format="trl", expected="The sky is",
          trl="prompt"),
    Shape(name="trl prompt-only, messages", doc=TRL, row={"prompt": [user(QUESTION)]}, task="rl", format="trl",
          expected=asked(QUESTION), trl="prompt"),
    Shape(name="trl prompt and solution", doc="huggingface.co/docs/trl/grpo_trainer", format="trl", task="rl",
          row={"prompt": [user("2+2?")], "solution": "$4$"}, expected=asked("2+2?"), label="$4$", trl="prompt"),
    Shape(name="trl prompt-completion", doc=TRL, row={"prompt": "The sky is", "completion": " blue."}, task="sft",
          format="trl", expected=f"The sky is[[ blue.{END}]]", trl="sft"),
    Shape(name="trl prompt-completion, messages", doc=TRL, format="trl", task="sft",
          row={"prompt": TURNS[:1], "completion": TURNS[1:]}, expected=WHOLE, trl="sft"),
    Shape(name="trl prompt-completion, several turns", doc=TRL, format="trl", task="sft", trl="sft",
          row={"prompt": TURNS[:1], "completion": [*TURNS[1:], user("Why?"), assistant("Air.")]},
          expected=f"{asked(QUESTION)}[[{BLUE}{END}\n{asked('Why?')}Air.{END}\n]]"),
    Shape(name="trl preference", doc=TRL, format="trl", task="preference", trl="dpo",
          row={"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
          expected=(f"The sky is[[ blue.{END}]]", f"The sky is[[ green.{END}]]")),
    Shape(name="trl preference, messages", doc=TRL, format="trl", task="preference", trl="dpo",
          row={"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [assistant(GREEN)]},
          expected=(WHOLE, WHOLE.replace(BLUE, GREEN))),
    Shape(name="trl preference, prompt within", doc=TRL, format="trl", task="preference", trl="dpo",
          row={"chosen": "The sky is blue.", "rejected": "The sky is green."},
          expected=(f"The sky is[[ blue.{END}]]", f"The sky is[[ green.{END}]]")),
    Shape(name="trl preference, messages with the prompt within", doc=TRL, format="trl", task="preference", trl="dpo",
          row={"chosen": TURNS, "rejected": [*TURNS[:1], assistant(GREEN)]},
          expected=(WHOLE, WHOLE.replace(BLUE, GREEN))),
    Shape(name="ultrafeedback: a prompt as text and whole conversations", doc="HuggingFaceH4/ultrafeedback_binarized",
          format="trl", task="preference", expected=(WHOLE, WHOLE.replace(BLUE, GREEN)),
          row={"prompt": QUESTION, "chosen": TURNS, "rejected": [*TURNS[:1], assistant(GREEN)], "score_chosen": 8.5}),
    Shape(name="trl unpaired preference, good", doc=TRL, format="trl", task="preference", trl="kto",
          row={"prompt": "The sky is", "completion": " blue.", "label": True},
          expected=(f"The sky is[[ blue.{END}]]", None)),
    Shape(name="trl unpaired preference, bad, messages", doc=TRL, format="trl", task="preference", trl="kto",
          row={"prompt": TURNS[:1], "completion": [assistant(GREEN)], "label": False},
          expected=(None, WHOLE.replace(BLUE, GREEN))),
    Shape(name="trl tokenized with labels", doc=TRL, row={"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, task="sft",
          format="trl", expected='"[[#$]]', trl="sft"),
    Shape(name="trl tokenized", doc=TRL, row={"input_ids": [5, 6, 7]}, task="sft", format="trl", expected='[["#$]]', trl="sft"),
    Shape(name="trl tokenized with a completion mask", doc=TRL, task="sft", format="trl", expected='"[[#$]]', trl="sft",
          row={"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}),
    Shape(name="tokenized with labels and a completion mask", doc=TRL, task="sft", format="trl", expected='"#[[$]]',
          row={"input_ids": [5, 6, 7], "labels": [5, -100, 7], "completion_mask": [0, 1, 1]}),
    Shape(name="tokenized and padded", doc="transformers: attention_mask", task="sft", format="trl", expected='"[[#]]',
          row={"input_ids": [4, 5, 6], "attention_mask": [0, 1, 1], "labels": [-100, -100, 6]}),
    Shape(name="trl tools as JSON text", doc=TRL, format="trl", task="sft", trl="sft",
          row={"prompt": [user("Rome?")], "completion": [assistant("Sun")], "tools": json.dumps([WEATHER])},
          expected=f"{TOOLS}{asked('Rome?')}[[Sun{END}\n]]"),
    Shape(name="trl chat_template_kwargs of a row", doc=TRL, format="trl", task="rl", trl="prompt",
          row={"prompt": [user("2+2?")], "chat_template_kwargs": {"enable_thinking": False}},
          expected=asked("2+2?") + "(no thoughts)"),
    # OpenAI
    Shape(name="openai chat", doc=OPENAI, format="openai", task="sft", trl="sft",
          row={"messages": [{"role": "system", "content": "Be brief."}, *TURNS]}, expected=said("system", "Be brief.") + TRAINED),
    Shape(name="openai weight 0", doc=OPENAI, format="openai", task="sft",
          row={"messages": [user("a"), {**assistant("b"), "weight": 0}, *TURNS[:1], {**TURNS[1], "weight": 1}]},
          expected=f"{asked('a')}b{END}\n{TRAINED}"),
    Shape(name="openai tool calls", doc=OPENAI, format="openai", task="sft",
          row={"messages": [user("Rome?"), CALL, {"role": "tool", "tool_call_id": "call_1", "content": "sun"}, assistant("Sun")],
               "tools": [WEATHER], "parallel_tool_calls": False},
          expected=f"{TOOLS}{asked('Rome?')}{CALLED}{said('tool', 'sun')}{ASSISTANT}[[Sun{END}]]\n"),
    Shape(name="openai content parts", doc=OPENAI, format="openai", task="sft", expected=TRAINED,
          row={"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}, TURNS[1]]}),
    Shape(name="openai messages as a prompt", doc=OPENAI, format="openai", task="rl", expected=asked("2+2?"), label="4",
          row={"messages": [user("2+2?")], "answer": "4"}),
    Shape(name="openai messages with their reply as the answer", doc=OPENAI, format="openai", task="rl",
          row={"messages": TURNS}, expected=asked(QUESTION), label=BLUE),
    Shape(name="openai messages to score", doc=OPENAI, format="openai", task="score", row={"messages": TURNS},
          expected=f"{asked(QUESTION)}{BLUE}{END}\n"),
    # verl
    Shape(name="verl rl", doc=VERL, row=VERL_ROW, task="rl", format="verl", expected=asked("What is 2+2?"), label="4"),
    Shape(name="verl rl with an own answer", doc=VERL, row={**VERL_ROW, "answer": "four"}, task="rl", format="verl",
          expected=asked("What is 2+2?"), label="four"),
    Shape(name="verl rl with a system message", doc=VERL, task="rl", format="verl", label=["4", "four"],
          row={**VERL_ROW, "prompt": [{"role": "system", "content": "s"}, user("2+2?")],
               "reward_model": {"style": "rule", "ground_truth": ["4", "four"]}}, expected=said("system", "s") + asked("2+2?")),
    Shape(name="verl sft", doc=VERL_SFT, row={"prompt": QUESTION, "response": BLUE}, task="sft", format="verl",
          expected=f"{asked(QUESTION)}[[{BLUE}{END}]]"),
    Shape(name="verl multi-turn sft", doc=VERL_SFT, task="sft", format="openai", expected=TOOLS + TRAINED,
          row={"messages": TURNS, "tools": [WEATHER], "enable_thinking": None}),
    Shape(name="verl multi-turn sft without thinking", doc=VERL_SFT, task="rl", format="openai", label=BLUE,
          row={"messages": TURNS, "enable_thinking": False}, expected=asked(QUESTION) + "(no thoughts)"),
    # Alpaca
    Shape(name="alpaca", doc=ALPACA, row=IDENTITY, task="sft", format="alpaca", expected=f"{PAIRED}[[4{END}]]"),
    Shape(name="alpaca without input", doc=ALPACA, row={**IDENTITY, "input": ""}, task="sft", format="alpaca",
          expected=f"{PREAMBLE.format('')}### Response:[[4{END}]]"),
    Shape(name="alpaca of the hub, with the whole text", doc=ALPACA, format="alpaca", task="sft",
          row={**IDENTITY, "text": PAIRED + "\n4"}, expected=f"{PAIRED}[[4{END}]]"),
    Shape(name="alpaca for rl", doc=ALPACA, row=IDENTITY, task="rl", format="alpaca", expected=PAIRED, label="4"),
    Shape(name="alpaca as chat", doc=FACTORY, row=IDENTITY, task="sft", format="alpaca", options={"chat": True},
          expected=f"{asked(ADD)}[[4{END}]]"),
    Shape(name="alpaca with system and history", doc=FACTORY, format="alpaca", task="sft",
          row={**IDENTITY, "system": "s", "history": [["1 and 1", "2"]]},
          expected=f"{said('system', 's')}{asked('1 and 1')}[[2{END}]]\n{asked(ADD)}[[4{END}]]\n"),
    Shape(name="alpaca preference", doc=FACTORY, format="alpaca", task="preference",
          row={"instruction": "Add the numbers.", "input": "2 and 2", "chosen": "4", "rejected": "5"},
          expected=(f"{PAIRED}[[4{END}]]", f"{PAIRED}[[5{END}]]")),
    Shape(name="alpaca kto", doc=FACTORY, row={**IDENTITY, "kto_tag": False}, task="preference", format="alpaca",
          expected=(None, f"{PAIRED}[[4{END}]]")),
    # ShareGPT
    Shape(name="sharegpt", doc=FACTORY, row=SHARED, task="sft", format="sharegpt", expected=TRAINED),
    Shape(name="sharegpt with system and function calls", doc=FACTORY, format="sharegpt", task="sft",
          row={"conversations": [
              {"from": "human", "value": "Rome?"},
              {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}'},
              {"from": "observation", "value": "sun"}, {"from": "gpt", "value": "Sun"}],
               "system": "s", "tools": json.dumps([WEATHER])},
          expected=f"{TOOLS}{said('system', 's')}{asked('Rome?')}{CALLED}{said('tool', 'sun')}{ASSISTANT}[[Sun{END}]]\n"),
    Shape(name="sharegpt for rl", doc=FACTORY, row=SHARED, task="rl", format="sharegpt", expected=asked(QUESTION), label=BLUE),
    Shape(name="sharegpt preference", doc=FACTORY, format="sharegpt", task="preference",
          row={"conversations": SHARED["conversations"][:1], "chosen": {"from": "gpt", "value": BLUE},
               "rejected": {"from": "gpt", "value": GREEN}}, expected=(WHOLE, WHOLE.replace(BLUE, GREEN))),
    # slime
    Shape(name="slime", doc=SLIME, row={"prompt": [user("2+2?")], "label": "4", "metadata": {"level": 1}}, task="rl",
          format="slime", expected=asked("2+2?"), label="4"),
    Shape(name="slime with text", doc=SLIME, row={"prompt": "2+2?", "label": 4}, task="rl", format="slime",
          expected="2+2?", label=4),
    Shape(name="slime with text as chat", doc=SLIME, row={"prompt": "2+2?", "label": "4"}, task="rl", format="slime",
          options={"chat": True}, expected=asked("2+2?"), label="4"),
    Shape(name="slime sft with step_loss_mask", doc=SLIME, format="openai", task="sft",
          row={"messages": [user("a"), {**assistant("b"), "step_loss_mask": 0}, *TURNS]},
          expected=f"{asked('a')}b{END}\n{TRAINED}"),
    # OpenRLHF
    Shape(name="openrlhf prompts", doc=OPENRLHF, row={"input": "2+2?", "label": "4"}, task="rl", format="openrlhf",
          expected="2+2?", label="4"),
    Shape(name="openrlhf prompts alone", doc=OPENRLHF, row={"input": [user("2+2?")]}, task="rl", format="openrlhf",
          expected=asked("2+2?")),
    Shape(name="openrlhf sft", doc=OPENRLHF, row={"input": "2+2?", "output": " 4\n"}, task="sft", format="openrlhf",
          expected=f"2+2?[[ 4 {END}]]"),
    Shape(name="openrlhf sft as chat", doc=OPENRLHF, row={"input": QUESTION, "output": BLUE}, task="sft", format="openrlhf",
          options={"chat": True}, expected=f"{asked(QUESTION)}[[{BLUE}{END}]]"),
    # GSM8K
    Shape(name="gsm8k", doc=GSM8K, row=NATALIA, task="rl", format="gsm8k", expected=NATALIA["question"] + "\n", label="72"),
    Shape(name="gsm8k as chat", doc=GSM8K, row=NATALIA, task="rl", format="gsm8k", options={"chat": True},
          expected=asked(NATALIA["question"]), label="72"),
    Shape(name="gsm8k sft", doc=GSM8K, row=NATALIA, task="sft", format="gsm8k",
          expected=f"{NATALIA['question']}\n[[{NATALIA['answer']}{END}]]"),
    Shape(name="gsm8k of thousands", doc=GSM8K, row={"question": "How many?", "answer": "4 * 250 = 1,000\n#### 1,000"},
          task="rl", format="gsm8k", expected="How many?\n", label="1000"),
    # ours, and columns by name
    Shape(name="prompt and answer", doc="docs/data.md", row={"prompt": "2+2=", "answer": "4", "id": 7}, task="rl", format="trl",
          expected="2+2=", label="4"),
    Shape(name="renamed columns", doc="docs/data.md", row={"problem": "2+2=", "target": "4", "level": 1}, task="rl", format="trl",
          options={"columns": {"prompt": "problem", "answer": "target"}}, expected="2+2=", label="4"),
    Shape(name="a column inside another", doc="docs/data.md", row={"q": {"text": "2+2="}, "a": [{"v": 1}]}, task="rl",
          format="trl", options={"columns": {"prompt": "q.text", "answer": "a"}}, expected="2+2=", label=[{"v": 1}]),
    Shape(name="input_ids to score", doc="docs/contract.md", row={"input_ids": [5, 6, 7]}, task="score",
          format="trl", expected='"#$'),
)  # fmt: skip
