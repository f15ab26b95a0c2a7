"""Tasks with answers that a program can check, as rows of JSONL: the same seed gives the same rows everywhere."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

Row = Mapping[str, object]

EVAL_SEED, NUM_EVAL = 12345, 100
LARGEST_PROMPT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nThe answer is"
GSM8K_HINT = "\n\nThink step by step, then write the final number after ####."


def largest_of_three(
    seed: int, num_train: int, num_eval: int = NUM_EVAL
) -> tuple[list[Row], list[Row]]:
    """(train, held out) RL rows "Which number is the largest: 54, 94, 2?". No question is in both.

    The prompt is a string in SmolLM2's chat format whose assistant turn has begun: 30 tokens. As messages it would get
    the template's default system prompt (51 tokens): slower, not better.
    """
    held_out = list(islice(_largest(EVAL_SEED, frozenset()), num_eval))
    seen = frozenset(str(row["prompt"]) for row in held_out)
    return list(islice(_largest(seed, seen), num_train)), held_out


def addition(seed: int, num_eval: int = NUM_EVAL) -> tuple[list[Row], list[Row]]:
    """(train, held out) RL rows "47+38=" -> "085": all sums of two numbers of two digits, in a random order."""
    sums = [(a, b) for a in range(100) for b in range(100)]
    random.Random(EVAL_SEED).shuffle(sums)
    held_out, train = sums[:num_eval], sums[num_eval:]
    random.Random(seed).shuffle(train)
    return [_sum(*pair) for pair in train], [_sum(*pair) for pair in held_out]


def demonstrations(rows: Iterable[Row], seed: int, wrong: float = 0.0) -> Iterator[Row]:
    """SFT rows of RL rows whose answers are digits. A share `wrong` of the completions are random digits."""
    rng = random.Random(seed)
    for row in rows:
        answer = str(row["answer"])
        if rng.random() < wrong:
            answer = "".join(rng.choice("0123456789") for _ in answer)
        yield {"prompt": row["prompt"], "completion": answer}


def gsm8k(published: Path) -> Iterator[Row]:
    """RL rows of GSM8K's own JSONL. The answer is the number after ####, without thousands' commas."""
    for line in published.read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        answer = given["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {
            "prompt": [{"role": "user", "content": given["question"] + GSM8K_HINT}],
            "answer": answer,
        }


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """One JSON object a line. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.partial")
    staged.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return staged.replace(path)


def _sum(a: int, b: int) -> Row:
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def _largest(seed: int, seen: frozenset[str]) -> Iterator[Row]:
    """Endless rows, each question once, none of `seen`."""
    rng, used = random.Random(seed), set(seen)
    while True:
        numbers = rng.sample(range(1, 100), 3)
        question = f"Which number is the largest: {numbers[0]}, {numbers[1]}, {numbers[2]}?"
        prompt = LARGEST_PROMPT.format(question=question)
        if prompt not in used:
            used.add(prompt)
            yield {"prompt": prompt, "answer": str(max(numbers))}
