"""Which samples a report shows."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.records.runs import ROLLOUT, Row, SampleFile, read_samples, sample_files
from dovetail.records.samples import reward_of

READ_BYTES = 1 << 27  # of all files
MAX_FILES = 40  # of each kind, spread over the steps
ESCAPES: Mapping[int, str] = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def choose(run: Path, most: int, most_bytes: int) -> list[Row]:
    """Chooses samples of many steps; first the most frequent prompts, best and worst reward."""
    files = sample_files(run)
    if sum(file.path.stat().st_size for file in files) > READ_BYTES:
        kinds = [
            [file for file in files if file.kind == kind]
            for kind in dict.fromkeys(file.kind for file in files)
        ]
        files = [file for of_kind in kinds for file in spread(of_kind, MAX_FILES)]
    read = [list(read_samples(file, READ_BYTES / len(files))) for file in files]
    seen = Counter(key for rows in read for key in dict.fromkeys(map(_prompt, rows)))
    order = {key: place for place, (key, _) in enumerate(seen.most_common())}
    queues = [iter(_ranked(rows, order)) for rows in read]
    chosen: list[Row] = []
    size = 0
    while queues and len(chosen) < most:
        rows = [(queue, next(queue, None)) for queue in queues]
        queues = [queue for queue, row in rows if row is not None]
        for _, row in rows:
            if row is not None and len(chosen) < most:
                size += len(script_json(row))
                if size > most_bytes:
                    return sorted(chosen, key=_order)
                chosen.append(row)
    return sorted(chosen, key=_order)


def script_json(value: object) -> bytes:
    """JSON that cannot end an HTML `script` element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (
        text.translate(ESCAPES)
        .encode("utf-16", "surrogatepass")
        .decode("utf-16", "replace")
        .encode()
    )


def spread(items: Sequence[SampleFile], most: int) -> list[SampleFile]:
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def _prompt(row: Row) -> tuple[str, str]:
    return row["id"], row["prompt"]


def _order(row: Row) -> tuple[int, bool, str]:
    return row["step"], row["kind"] != ROLLOUT, row["kind"]


def _ranked(rows: Sequence[Row], order: Mapping[tuple[str, str], int]) -> list[Row]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[_prompt(row)].append(row)
    keyed = []
    for key, group in groups.items():
        best, *rest = sorted(group, key=reward_of, reverse=True)
        keyed += [
            ((rank > 1, order[key], rank), row)
            for rank, row in enumerate([best, *rest[-1:], *rest[:-1]])
        ]
    return [row for _, row in sorted(keyed, key=lambda pair: pair[0])]
