"""Made-up run directories, and the data of a report, read by a parser of HTML."""

import json
import math
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

SHOWN = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>\u2028 & \"' \ufffd"
HOSTILE = SHOWN.replace("\ufffd", "\ud800")  # half a surrogate pair
CONFIG: Mapping[str, Any] = {
    "model": {"path": "M"},
    "algorithm": {"name": "grpo", "clip_high": 0.28},
    "data": {"train": "train.jsonl"},
    "trainer": {"steps": 200},
    "run_dir": "runs/made-up",
}


def make_run(path: Path, steps: int, *, prompts: int = 16) -> Path:
    """Phases, a range of rewards, evaluations, a skipped update, and two samples of each of four prompts a step."""
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG)))
    write_lines(path / "metrics.jsonl", [metrics(step, steps) for step in range(1, steps + 1)])
    write_lines(
        path / "events.jsonl",
        [{"time": "2026-11-22T10:00", "kind": "death", "step": 2, "cause": HOSTILE}],
    )
    for step in range(1, steps + 1):
        samples = [sample((4 * step + i) % prompts, j, step) for i in range(4) for j in range(2)]
        write_lines(path / "rollouts" / f"step_{step:06}.jsonl", samples)
    return path


def metrics(step: int, steps: int) -> dict[str, Any]:
    reward = 1 / (1 + math.exp(4 - 8 * step / steps))
    phases = {
        "seconds/rollout": 2.0 - reward,
        "seconds/update": 1.0 + 0.1 * (step % 3),
        "seconds/push": 0.2,
    }
    row: dict[str, Any] = {
        "step": step,
        **phases,
        "loss": 0.1 / step,
        "tokens": 1000,
        "peak_memory_gib": 12.5,
    }
    row |= {"reward_mean": reward, "reward_min": 0.0, "reward_max": 1.0, "reward/format": reward**2}
    row |= {
        "step_seconds": 4.0,
        "tokens_per_second": 250.0,
        "grad_norm": 50.0 if step == 7 else 1.0,
    }
    row |= {"eval_reward_mean_before": 0.25} if step == 1 else {}
    row |= {"eval_reward_mean": reward} if step % 10 == 0 else {}
    row |= (
        {"skipped": True, "fault": "rank 1: advantage", "kl_mean": math.nan}
        if step == 3
        else {"kl_mean": 0.01}
    )
    return row


def sample(prompt: int, number: int, step: int) -> dict[str, Any]:
    text = f"step {step} says {prompt + number} " + (
        HOSTILE if prompt == 4 else "and explains it at length. " * 20
    )
    facts = {"answer": str(prompt), "reward": float(number), "reward/format": 0.5, "finish": "stop"}
    message = [{"role": "user", "content": f"What is {prompt}?"}]
    return {
        "id": f"p{prompt}",
        "sample": number,
        "prompt": message,
        "completion": text,
        **facts,
        "token_ids": [1, 2, 3],
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """data: the JSON in the page; elements: tags and attributes."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.json = ""
        self.feed(html.decode())
        self.close()
        self.data: dict[str, Any] = json.loads(self.json)
        self.scripts = sum(tag == "script" for tag, _ in self.elements)

    def start(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def text(self, data: str) -> None:
        if self.elements and self.elements[-1][1].get("id") == "data":
            self.json += data.strip()

    handle_starttag, handle_data = start, text  # the names that the parser calls
