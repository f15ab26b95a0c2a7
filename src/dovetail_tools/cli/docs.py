"""`dovetail docs`: pages of docs/, in a checkout or a wheel."""

import argparse
import difflib
import pydoc
import sys
from pathlib import Path

from dovetail.errors import ConfigError, quoted
from dovetail.launch.process import put

PACKAGE = Path(__file__).parents[1]


def run(args: argparse.Namespace) -> None:
    folder = PACKAGE / "docs" if (PACKAGE / "docs").is_dir() else PACKAGE.parents[1] / "docs"
    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}
    if args.page is None:
        titles = {name: text.partition("\n")[0].lstrip("# ") for name, text in pages.items()}
        width = max(map(len, titles)) + 2
        put("".join(f"{name:<{width}}{title}\n" for name, title in titles.items()))
    elif (name := Path(args.page).name.removesuffix(".md")) in pages:
        pydoc.pager(pages[name]) if sys.stdout.isatty() else put(pages[name])
    else:
        near = "".join(
            f"; did you mean {word}?" for word in difflib.get_close_matches(name, pages, n=1)
        )
        raise ConfigError(f"there is no page {quoted(args.page)}{near} (pages: {', '.join(pages)})")
