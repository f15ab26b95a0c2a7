"""The section `rollout.push`."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from dovetail.recipe.types import PathText, Section, key


class PushSection(Section):
    """How weights get to engines, and how that is proved (pushes.md)."""

    transport: Literal["nccl", "ipc", "file"] = key(
        "nccl", "a broadcast, by gloo where weights are on a CPU; memory shared on one host; files; sglang: file alone"
    )
    proof: Literal["plugin", "checker"] = key(
        "plugin",
        "sums checked by dovetail-vllm before loading; or vLLM's own weight checker after it: nccl, GPUs, slow",
    )
    directory: PathText = key("/dev/shm/dovetail", "of transport=file; engines see it by the same path")
    address: str = key("127.0.0.1", "of rank 0's host, as engines reach it; transport=nccl")
    bucket_mb: PositiveInt = key(1024, "MiB of weights that are sent at once; rank 0 and each engine hold two")
    kv: Literal["keep", "recompute"] = key("keep", "of interrupted requests: cached keys and values of old weights")
    timeout: PositiveFloat = key(120.0, "seconds for each call of a push")
