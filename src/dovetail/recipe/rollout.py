"""The section `rollout`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from dovetail.bounds import MAX_NEW_TOKENS, MAX_SAMPLES
from dovetail.errors import quoted
from dovetail.recipe.types import Listed, NotStrict, OwnLayout, PathText, Section, Share, key

Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Listed, NotStrict]
EMBEDDED = ("native", "transformers")


class StartSection(Section):
    """Engines that run as long as the run does, on this machine, with GPUs that no rank uses."""

    count: PositiveInt = key(1, "engines")
    gpus_each: NonNegativeInt = key(
        1, "GPUs of each, which share its model by tensor parallelism; 0: a CPU"
    )
    command: Texts = key(
        (), "program and its words, such as ENV/bin/vllm serve; empty: that of the backend"
    )
    args: Texts = key((), "more words, such as --gpu-memory-utilization 0.8")
    timeout: PositiveFloat = key(1800.0, "seconds until they answer")

    @field_validator("args")
    @classmethod
    def _words(cls, args: Texts) -> Texts:
        for word in args:
            name = word.partition("=")[0]
            if name in ("--host", "--port"):
                raise ValueError(
                    f"{word}: host and port of engines are chosen by the run; leave it out"
                )
            if word.startswith("--") and " " in name:
                raise ValueError(
                    f"{quoted(word)} is one word; write a list of words, such as [--name, value]"
                )
        return args


class PushSection(Section):
    """How weights get to engines, and how that is proved (pushes.md)."""

    transport: Literal["nccl", "ipc", "file"] = key(
        "nccl",
        "a broadcast, by gloo where weights are on a CPU; memory shared on one host; files; "
        "sglang: file alone",
    )
    proof: Literal["plugin", "checker"] = key(
        "plugin",
        "sums checked by dovetail-vllm before loading; or vLLM's own weight checker after it: "
        "nccl, GPUs, slow",
    )
    directory: PathText = key(
        "/dev/shm/dovetail", "of transport=file; engines see it by the same path"
    )
    address: Annotated[str, Field(pattern=r"^[^/\s]+$")] = key(
        "127.0.0.1", "of rank 0's host, as engines reach it; transport=nccl"
    )
    bucket_mb: PositiveInt = key(
        1024, "MiB of weights that are sent at once; rank 0 and each engine hold two"
    )
    kv: Literal["keep", "recompute"] = key(
        "keep", "of interrupted requests: cached keys and values of old weights"
    )
    timeout: PositiveFloat = key(120.0, "seconds for each call of a push")


class RolloutSection(Section):
    """How completions are sampled."""

    backend: Literal["native", "transformers", "vllm", "sglang"] = key(
        "native",
        "the embedded sampler, in the ranks or, with engines or start, as servers; the model's "
        "generate per rank; or "
        "engines of their own; vllm if engines are given",
    )
    engines: Texts = key(
        (), "URLs of servers of vLLM, SGLang or `dovetail serve`, such as http://127.0.0.1:8000"
    )
    start: StartSection | None = key(None, "servers to start, instead")
    request_timeout: PositiveFloat = key(
        600.0, "seconds of silence after which an engine counts as lost"
    )
    max_num_seqs: PositiveInt = key(
        512, "samples that an engine or embedded sampler runs at once (async.md)"
    )
    push: PushSection = key(PushSection(), "weights to engines")
    sleep: bool = key(
        False, "engines on the trainer's GPUs give their memory away while it trains; vllm"
    )
    layout: OwnLayout = key(None, "empty: tp 1, one sampler a rank")
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = key(
        8, "completions of each prompt"
    )
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = key(64, "longest completion")
    temperature: PositiveFloat = key(1.0, "divides the logits, in sampling and in training")
    top_p: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "sample from the smallest set with this mass"
    )
    top_k: NonNegativeInt = key(0, "sample from the k likeliest tokens; 0: all")
    min_p: Share = key(
        0.0, "sample from tokens with this share of the likeliest one's probability; 0: all"
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = key(
        1.0, "of seen tokens; vllm and sglang; 1: none"
    )
    stop: Texts = key((), "strings that end a completion, and stay in it; vllm and sglang")
    ignore_eos: bool = key(False, "sample max_new_tokens, whatever is drawn")
    router_replay: Literal["none", "trainer", "rollout"] = key(
        "none",
        "experts of the update: its own; those of the pass for old log-probs (R2); the sampler's "
        "(R3)",
    )
    mismatch_metrics: bool = key(
        False, "compare the policy's log-probs and routes with the sampler's; costs a pass"
    )

    @model_validator(mode="before")
    @classmethod
    def _implied_backend(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "backend" in given:
            return given
        return (
            {**given, "backend": "vllm"}
            if given.get("engines") or given.get("start") is not None
            else given
        )

    @field_validator("engines")
    @classmethod
    def _urls(cls, urls: Texts) -> Texts:
        for url in urls:
            if "," in url:
                raise ValueError(
                    f"{quoted(url)} is one URL; write a list, such as [http://a:8000, "
                    "http://b:8000]"
                )
        return urls

    @property
    def inside(self) -> bool:
        """Whether the trainer's ranks sample."""
        return not self.engines and self.start is None

    @model_validator(mode="after")
    def _of_backend(self) -> Self:
        embedded = self.backend in EMBEDDED
        backend = self.backend
        if backend == "transformers" and not self.inside:
            raise ValueError(
                f"backend is {backend}, which runs inside the trainer; with engines or start set "
                "another"
            )
        if not (self.inside and embedded) and bool(self.engines) == (self.start is not None):
            raise ValueError(
                f"backend is {backend}: give engines (their URLs), or start (how many), one of "
                "the two"
            )
        if not self.inside and self.layout is not None:
            raise ValueError(
                f"layout is of the sampler inside the trainer; engines of {backend} have their "
                "own flags"
            )
        if embedded and self.start is not None and self.start.gpus_each > 1:
            raise ValueError(
                "start.gpus_each: a server of the embedded sampler runs on one GPU; raise "
                "start.count"
            )
        if embedded and self.push.proof == "checker":
            raise ValueError(
                "push.proof=checker is of vLLM; servers of the embedded sampler check sums: "
                "leave it out"
            )
        alien = {"repetition_penalty": self.repetition_penalty != 1, "stop": bool(self.stop)}
        for name in [name for name, given in alien.items() if given and embedded]:
            raise ValueError(
                f"{name}: the sampler {backend} has none; leave it out, or set backend to vllm "
                "or sglang"
            )
        if self.sleep and (self.inside or backend != "vllm"):
            raise ValueError(
                "sleep is of vLLM's servers: give engines or start with backend vllm, or leave "
                "it out"
            )
        if self.ignore_eos and self.stop:
            raise ValueError(
                "ignore_eos samples max_new_tokens, and stop ends earlier; leave one out"
            )
        return self
