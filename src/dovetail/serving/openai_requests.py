"""Bodies of OpenAI's endpoints, as far as the embedded sampler has what they ask for."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from dovetail.errors import quoted
from dovetail.serving.bodies import Body
from dovetail.serving.rl_requests import Bias, TokenId, Word, check_bias

MAX_CHOICES = 128
Tokens = Annotated[int, Field(ge=1, lt=1 << 31)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopList = Annotated[list[StopString], Field(max_length=16)]
PromptIds = Annotated[list[TokenId], Field(min_length=1)]
Object = Mapping[str, JsonValue]
LACKING: Mapping[str, tuple[Any, ...]] = {  # values that ask for nothing
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextRequest(Body):
    """What both endpoints have. Fields that only describe the caller are ignored."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: Choices | None = None
    stop: StopString | StopList | None = None
    seed: Word | None = None
    max_tokens: Tokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Bias | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: JsonValue = None
    metadata: JsonValue = None
    store: JsonValue = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _has_what_we_have(self) -> Self:
        for name, nothing in LACKING.items():
            value = vars(self).get(name)
            if value not in nothing:
                raise ValueError(f"{name}={quoted(value)}: this server has none")
        check_bias(self.logit_bias)
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(TextRequest):
    """A request of /v1/completions."""

    prompt: str | list[str] | PromptIds | list[PromptIds]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return prompt

    @model_validator(mode="after")
    def _check(self) -> Self:
        prompts = len(self.prompts)
        if not 1 <= prompts * (self.n or 1) <= MAX_CHOICES:
            expected = f"expected 1 to {MAX_CHOICES} choices together"
            raise ValueError(f"{prompts} prompts with n={self.n or 1}: {expected}")
        check_log_probs("logprobs", self.logprobs, self.temperature)
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message of OpenAI's API; the chat template reads all fields but role and content."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | list[TextPart] | None = None
    __pydantic_extra__: dict[str, JsonValue]


class ChatRequest(TextRequest):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Object] | None = None
    tool_choice: JsonValue = None
    response_format: JsonValue = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None  # vLLM's

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_log_probs("top_logprobs", self.top_logprobs, self.temperature)
        return self


def check_log_probs(name: str, count: int | None, temperature: float | None) -> None:
    """Raises ValueError for log-probs of tokens that were not drawn, but for the likeliest at 0."""
    most = 1 if temperature == 0 else 0
    if count is not None and not 0 <= count <= most:
        has = "this server has log-probs of the tokens that are drawn"
        raise ValueError(f"{name}={count}: {has}; give {name}=0 (at temperature 0 also 1)")
