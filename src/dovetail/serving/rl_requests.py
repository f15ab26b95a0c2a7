"""Bodies of the endpoints that trainers call: vLLM's RL wire, as `inference_servers` speaks it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from dovetail.errors import quoted
from dovetail.inference_servers.protocol import NO_BIAS
from dovetail.serving.bodies import Body

Word = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Place = Annotated[int, Field(ge=0, lt=1 << 16)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 16)]
Name = Annotated[str, Field(max_length=1000)]
Bias = Mapping[Annotated[str, Field(pattern=r"^\d{1,10}$")], float]
LACKING: Mapping[str, tuple[Any, ...]] = {  # values that ask for nothing
    "n": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "stop": (None, "", []),
    "logprobs": (None, 0),
    "prompt_logprobs": (None,),
}


def check_bias(bias: Bias | None) -> None:
    """Raises ValueError for a bias that is not a ban."""
    wrong = {token: value for token, value in (bias or {}).items() if value > NO_BIAS}
    if wrong:
        ban = f"this server takes {NO_BIAS:g} alone, which bans an id"
        raise ValueError(f"logit_bias {quoted(wrong)}: {ban}")


class ExtraArgs(Body):
    """What only our client sends: keys of the noise, tokens drawn before, and the batch."""

    noise: tuple[Word, Word, Word, Word] | None = None
    drawn: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    batch: tuple[Name, BatchSize, Place] | None = None


class Sampling(Body):
    """vLLM's SamplingParams, as far as the embedded sampler has them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: float = 0.0
    seed: Word | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = 16
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logit_bias: Bias | None = None
    stream_interval: PositiveInt | None = None
    extra_args: ExtraArgs | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: str | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None

    @model_validator(mode="after")
    def _has_what_we_have(self) -> Self:
        for name, nothing in LACKING.items():
            value = vars(self)[name]
            if value not in nothing:
                raise ValueError(f"{name}={quoted(value)}: this server has none")
        check_bias(self.logit_bias)
        return self


class GenerateRequest(Body):
    """The body of a request for one sample of a prompt of token ids."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: Sampling = Sampling()
    stream: bool = False
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class InitInfo(Body):
    """The trainer's group, which the server joins; without an address there is none."""

    timeout: Annotated[float, Field(gt=0)]
    backend: Literal["gloo", "nccl"] | None = None
    master_address: Name | None = None
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)] | None = None
    world_size: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    rank_offset: Place | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        fields = (self.backend, self.master_port, self.world_size, self.rank_offset)
        if self.master_address is not None and None in fields:
            raise ValueError("a group needs backend, master_port, world_size and rank_offset")
        return self


class InitRequest(Body):
    """A request of /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(Body):
    """A bucket of tensors, by a file, by memory or by a broadcast; or the manifest of all."""

    abort: bool = False
    manifest: list[tuple[str, str, list[NonNegativeInt], str]] | None = None
    bucket: NonNegativeInt = 0
    num_bytes: PositiveInt = 1
    tensors: list[tuple[str, str, list[int], NonNegativeInt, str]] | None = None
    file: str | None = None
    memory: Mapping[str, Any] | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        given = [self.abort, self.manifest is not None, bool(self.tensors)]
        if given.count(True) != 1:
            raise ValueError("expected abort, a manifest, or a bucket with tensors: one of them")
        return self


class UpdateRequest(Body):
    """A request of /update_weights."""

    update_info: UpdateInfo


class FinishRequest(Body):
    """A request of /finish_weight_update."""

    weight_version: Annotated[str, Field(min_length=1, max_length=200)]
