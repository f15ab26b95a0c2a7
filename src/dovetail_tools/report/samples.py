"""Which samples a report shows."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from dovetail.records.runs import ROLLOUT, Row, SampleFile, read_samples, sample_files
from dovetail.records.samples import reward_of

READ_BYTES = 1 << 27  # of all files
MAX_FILES = 40  # of each kind, spread over the steps
ESCAPES: Mapping[int, str] = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def choose(run: Path, most: int, most_bytes: int) -> list[Row]:
    """Chooses samples of many steps; first the most frequent prompts, best and worst reward."""
    files = _files(run)
    read = [list(read_samples(file, READ_BYTES / len(files))) for file in files]
    seen = Counter[tuple[str, str]]()
    for rows in read:
        seen.update({_prompt(row): 1 for row in rows})
    order = {key: place for place, (key, _) in enumerate(seen.most_common())}
    ranked = [_ranked(rows, order) for rows in read]
    chosen: list[Row] = []
    size = 0
    for round_of_files in zip_longest(*ranked):
        for row in round_of_files:
            if row is None:
                continue
            size += len(script_json(row))
            if len(chosen) == most or size > most_bytes:
                return sorted(chosen, key=_order)
            chosen.append(row)
    return sorted(chosen, key=_order)


def _files(run: Path) -> list[SampleFile]:
    """Returns a run's files of samples; of large ones some of each kind."""
    files = sample_files(run)
    if sum(file.path.stat().st_size for file in files) <= READ_BYTES:
        return files
    by_kind: dict[str, list[SampleFile]] = {}
    for file in files:
        by_kind.setdefault(file.kind, []).append(file)
    return [file for of_kind in by_kind.values() for file in spread(of_kind, MAX_FILES)]


def script_json(value: object) -> bytes:
    """Returns JSON that cannot end an HTML `script` element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    escaped = text.translate(ESCAPES)
    valid = escaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return valid.encode()


def spread(items: Sequence[SampleFile], most: int) -> list[SampleFile]:
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[i * last // (most - 1)] for i in range(most)]


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
        for rank, row in enumerate([best, *rest[-1:], *rest[:-1]]):
            keyed.append(((rank > 1, order[key], rank), row))
    keyed.sort(key=lambda pair: pair[0])
    return [row for _, row in keyed]
