"""`dovetail import-config`."""

import argparse
from pathlib import Path

from dovetail.errors import ConfigError, listing, raise_disk_problem
from dovetail.launch.process import complain, put
from dovetail_tools.translation.importing import import_config, to_yaml

SHOWN = 200
FEW = 8  # lines of each list, names of one line


def run(args: argparse.Namespace) -> None:
    draft = import_config(Path(args.file), args.project)
    text = to_yaml(draft, Path(args.file).name)
    if args.out:
        out = Path(args.out)
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise_disk_problem(error, out)
            raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}") from None
    else:
        put(text)
    kind = f" ({draft.kind})" if draft.kind else ""
    parts = [
        f"{draft.table.title}{kind}: a recipe of {len(draft.recipe)} "
        f"keys{f' in {args.out}' if args.out else ''}"
    ]
    lost = [f"{_few(names)}: {reason}" for reason, names in draft.left_out.items()]
    for title, lines in (
        ("not carried over", lost),
        ("to decide", list(dict.fromkeys(draft.to_decide))),
    ):
        parts += [f"{title}:\n{listing(lines, SHOWN)}"] if lines else []
    parts += [f"not needed here: {_few(draft.unneeded)}"] if draft.unneeded else []
    complain("\n".join([*parts, ""]))


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more
