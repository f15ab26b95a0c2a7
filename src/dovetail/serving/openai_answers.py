"""Answers of OpenAI's endpoints, whole and in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.serving.choices import Piece


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Answers:
    """head: fields of every answer. has_log_probs: of the tokens that were drawn.

    has_top: also of the likeliest tokens, which at temperature 0 are those that were drawn.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        head: Mapping[str, Any],
        tokenizer: Any,
        *,
        has_log_probs: bool,
        has_top: bool = False,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self.has_log_probs = has_log_probs
        self._has_top = has_top
        self._characters: dict[int, int] = {}  # of a choice so far

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first piece; None: there is none."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self.of_stream([self._choice([piece], streamed=True)])

    def of_stream(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def whole(self, parts: Sequence[Sequence[Piece]], prompt_tokens: int) -> dict[str, Any]:
        """Returns the whole answer. parts: the pieces of each choice."""
        choices = [self._choice(each, streamed=False) for each in parts]
        drawn = sum(len(piece.ids) for each in parts for piece in each)
        fields = {"object": self.whole_object, "choices": choices}
        return {**self._head, **fields, "usage": usage(prompt_tokens, drawn)}

    def _choice(self, part: Sequence[Piece], *, streamed: bool) -> dict[str, Any]:
        text = "".join(piece.text for piece in part)
        return {
            "index": part[0].index,
            **self._content(text, streamed=streamed),
            "logprobs": self._log_probs(part) if self.has_log_probs else None,
            "finish_reason": part[-1].finish,
        }

    def _content(self, text: str, *, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _log_probs(self, part: Sequence[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self, part: Sequence[Piece]) -> list[tuple[str, float]]:
        """Texts and log-probs of tokens. Half a character has the text of a replacement."""
        ids = [token for piece in part for token in piece.ids]
        log_probs = [log_prob for piece in part for log_prob in piece.log_probs]
        texts = [self._tokenizer.decode([token]) for token in ids]
        return list(zip(texts, log_probs, strict=True))


class CompletionAnswers(Answers):
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str, *, streamed: bool) -> dict[str, Any]:
        return {"text": text}

    def _log_probs(self, part: Sequence[Piece]) -> dict[str, Any]:
        """Offsets are in the text of all tokens, before it is cut at a stop string."""
        tokens = self._tokens(part)
        index = part[0].index
        offsets = list[int]()
        for text, _ in tokens:
            offset = self._characters.get(index, 0)
            offsets.append(offset)
            self._characters[index] = offset + len(text)
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [log_prob for _, log_prob in tokens],
            "top_logprobs": [{text: log_prob} for text, log_prob in tokens],
            "text_offset": offsets,
        }


class ChatAnswers(Answers):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.of_stream([choice])

    def _content(self, text: str, *, streamed: bool) -> dict[str, Any]:
        if streamed:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _log_probs(self, part: Sequence[Piece]) -> dict[str, Any]:
        content = list[dict[str, Any]]()
        for text, log_prob in self._tokens(part):
            own = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
            content.append({**own, "top_logprobs": [own] if self._has_top else []})
        return {"content": content, "refusal": None}
