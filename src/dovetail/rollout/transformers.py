"""Which samples run together: waves of rows whose cache stays within a budget, as a pure function of the lengths."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from dovetail.batch.balancing import plan_microbatches
from dovetail.batch.packed import start_reading
from dovetail.errors import CheckpointError, listing
from dovetail.hf.kimi import replace_tower
from dovetail.hf.names import Names
from dovetail.hf.rotary import check_sections, length_limit
from dovetail.hf.transformers_model import OLD_STEMS, group_even_experts, is_sighted, known_config
from dovetail.hf.vision import as_images, family_of, kinds_of
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.base import Completion, Prompt, SamplingParams, check_lengths, check_prompts
from dovetail.rollout.noise import uniforms
from dovetail.rollout.results import SampleBuffer
from dovetail.rollout.sampling import draw
from dovetail.weights.experts import FUSED, MIXTRAL
from dovetail.weights.hf_reader import TensorSource


@dataclass(frozen=True)
class StaticBatch:
    """Prompts by number, longest first, and the rows to draw: (place in `prompts`, sample)."""

    prompts: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


def plan_static_batches(lengths: Mapping[int, int], samples: int, new: int, budget: int) -> list[StaticBatch]:
    """`samples` rows of every prompt (number -> length), `new` tokens each, in waves of at most `budget` entries.

    A wave costs its rows times its longest row, so prompts of like length go together. A prompt whose samples do not
    fit at once is spread over waves; a single row always gets its own, whatever it costs.
    """
    waves: list[StaticBatch] = []
    prompts: list[int] = []
    rows: list[tuple[int, int]] = []
    longest = 0
    for prompt in sorted(lengths, key=lambda i: (-lengths[i], i)):
        for sample in range(samples):
            if rows and (len(rows) + 1) * longest > budget:
                waves.append(StaticBatch(tuple(prompts), tuple(rows)))
                prompts, rows = [], []
            if not rows:
                longest = lengths[prompt] + new
            if not prompts or prompts[-1] != prompt:
                prompts.append(prompt)
            rows.append((len(prompts) - 1, sample))
    return [*waves, StaticBatch(tuple(prompts), tuple(rows))] if rows else waves


MAX_TOKENS = 1 << 15  # rows times the longest of them that a rank runs at a time


class TransformersSampler:
    """A whole model in the compute dtype on every rank. Implements `Sampler`; every call is collective."""

    def __init__(self, config: Mapping[str, Any], mesh: Mesh, dtype: torch.dtype) -> None:
        """config: of the checkpoint."""
        assert mesh["tp"].size == mesh["pp"].size == 1, "build.sampling makes all ranks replicas"
        self.mesh, self.dtype = mesh, dtype
        known = known_config(config)
        sighted = is_sighted(known)
        kind = transformers.AutoModelForImageTextToText if sighted else transformers.AutoModelForCausalLM
        model: transformers.PreTrainedModel = kind.from_config(known, dtype=dtype)
        replace_tower(model)
        group_even_experts(model)
        _widen_choices(model)
        check_sections(model.get_decoder())
        model.generation_config = transformers.GenerationConfig()  # generate fills in what a call leaves open
        self.model = model.to(mesh.device).eval().requires_grad_(False)
        self.vocab_size: int = known.get_text_config().vocab_size
        self.limit = length_limit(known)
        self._filled = False

    @torch.no_grad()
    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over (HF name, whole tensor) pairs, one at a time. What is missing, extra or mis-shaped raises together."""
        self._filled = False
        own, names = self._places(), Names(self.model)
        left: dict[int, tuple[str, int]] = {}
        for name, (whole, _) in own.items():
            left.setdefault(id(whole), (name, whole.numel()))
        wrong = []
        for listed, tensor in weights:  # to its end, whatever is wrong: other ranks may be waiting for this one
            name = listed if listed in own else names.in_module(listed)
            if name not in own:
                wrong.append(f"{listed}: not a tensor of {type(self.model).__name__}")
                continue
            whole, place = own[name]
            if place.shape != tensor.shape and name.endswith(tuple(ending for ending, _ in FUSED)):
                place = place.transpose(1, 2)  # experts that a checkpoint has turned
            if place.shape != tensor.shape:
                wrong.append(f"{name}: shape {list(tensor.shape)}, expected {list(own[name][1].shape)}")
            else:
                place.copy_(tensor)
            first, missing = left[id(whole)]
            left[id(whole)] = (first, missing - place.numel())
        wrong += sorted(f"{name}: missing" for name, missing in left.values() if missing > 0)
        if wrong:
            raise CheckpointError(
                "the weights given to the sampler are not those of its model; refill it from an engine of the same "
                f"config.json:\n{listing(wrong)}"
            )
        self._filled = True

    def load(self, source: TensorSource) -> None:
        """Take over a checkpoint. Collective."""
        with agreed(self.mesh):
            Names(self.model).in_checkpoint(source, self._places())
            self.refill((name, source.read(name)) for name in source.names)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """`params.samples` completions of every prompt, ordered by prompt, then sample."""
        self._check(prompts, params)
        replicas, new = self.mesh["fsdp"], params.max_new_tokens
        costs = [len(prompt.ids) + params.samples * new for prompt in prompts]
        dealt = plan_microbatches(costs, replicas.size, None)[replicas.rank]
        mine = {i: len(prompts[i].ids) for batch in dealt for i in batch}
        found = SampleBuffer(len(prompts) * params.samples, new, self.mesh.device)
        for wave in plan_static_batches(mine, params.samples, new, MAX_TOKENS):
            self._run(wave, prompts, params, found)
        return found.completions(prompts, params, self.mesh)

    def _run(self, wave: StaticBatch, prompts: Sequence[Prompt], params: SamplingParams, found: SampleBuffer) -> None:
        """All tokens of a wave's rows, which are padded on the left."""
        device = self.mesh.device
        rows = [prompts[wave.prompts[owner]] for owner, _ in wave.rows]
        longest = max(len(prompt.ids) for prompt in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(rows):
            ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, longest - len(prompt.ids) :] = 1
        media = self._media(rows, ids)
        samples = np.array([sample for _, sample in wave.rows], dtype=np.int64)
        slots = torch.tensor([wave.prompts[o] * params.samples + s for o, s in wave.rows], device=device)
        numbers = np.array([prompt.row for prompt in rows], dtype=np.int64)
        self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            **media,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=params.max_new_tokens,
                do_sample=False,
                eos_token_id=list(params.stop_ids) or None,
                pad_token_id=0,
            ),
            logits_processor=transformers.LogitsProcessorList([_Draw(params, numbers, samples, longest, slots, found)]),
        )

    def _media(self, rows: Sequence[Prompt], ids: Tensor) -> dict[str, Tensor]:
        """What the model sees in rows of ids [n, longest]: every row's images and videos, in order."""
        seen = [prompt.media for prompt in rows if prompt.media is not None]
        if not seen:
            return {}
        start_reading(seen)
        kinds = kinds_of(ids, self.model.config)
        if family_of(self.model.config).marks:
            shown = [(row, prompt.media) for row, prompt in zip(ids, rows, strict=True) if prompt.media is not None]
            seen, kinds = [as_images(row, media, self.model.config) for row, media in shown], kinds.clamp(max=1)
        names = {name: None for media in seen for name in media}
        found = {name: torch.cat([media[name] for media in seen if name in media]) for name in names}
        found = {name: x.to(self.dtype) if name.startswith("pixel") else x for name, x in found.items()}
        if hasattr(self.model.model, "get_rope_index"):
            found["mm_token_type_ids"] = kinds
        return {name: x.to(self.mesh.device) for name, x in found.items()}

    def _places(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By every name that a checkpoint may list: a tensor of the model and the part of it that the name means."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, whole in self.model.state_dict(keep_vars=True).items():
            for alias, place in ((name, whole), *_experts(name, whole)):
                earlier = (old + alias.removeprefix(new) for new, old in OLD_STEMS if alias.startswith(new))
                found |= dict.fromkeys((alias, *earlier), (whole, place))
        return found

    def _check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Refuse what cannot be sampled. All ranks have the same prompts, so all refuse alike."""
        if not self._filled:
            raise CheckpointError("the sampler holds no weights; call refill(engine.weights()) before sample()")
        check_prompts(prompts, self.vocab_size)
        if self.limit is not None:
            check_lengths(prompts, params, *self.limit)


def _widen_choices(model: "transformers.PreTrainedModel") -> None:
    """Hold in float32 what transformers keeps so whatever dtype it loads: biases that routers choose by, for instance."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            wide = [re.compile(rf"(^|\.)({name})($|\.)") for name in part._keep_in_fp32_modules_strict or ()]
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                if any(pattern.search(name) for pattern in wide):
                    tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, torch.float32))


def _experts(name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of fused experts, where a checkpoint has them apart (`weights.experts`)."""
    for ending, parts in FUSED:
        if name.endswith(ending):
            stem = name.rpartition(".")[0]
            for expert, matrix in enumerate(whole):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"{stem}.{expert}.{part}.weight", rows
                    yield f"{stem}.{expert}.{MIXTRAL[2][part]}.weight", rows


class _Draw:
    """A logits processor: draws the next token of every row, notes it with its log-prob, and leaves nothing else to take."""

    def __init__(
        self,
        params: SamplingParams,
        rows: np.ndarray[Any, Any],
        samples: np.ndarray[Any, Any],
        prompt_length: int,
        slots: Tensor,
        found: SampleBuffer,
    ) -> None:
        self.params, self.rows, self.samples, self.prompt_length = params, rows, samples, prompt_length
        self.slots, self.found = slots, found
        self.alive = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        self.stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=slots.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position, p = input_ids.shape[1] - self.prompt_length, self.params
        noise = torch.from_numpy(uniforms(p.seed, p.step, self.rows, self.samples, position)).to(scores.device)
        ids, log_probs = draw(scores.to(torch.promote_types(scores.dtype, torch.float32)), noise, p)
        self.found.put(self.slots, position, ids, log_probs, self.alive)
        self.alive = self.alive & ~torch.isin(ids, self.stops)
        return torch.full_like(scores, -torch.inf).scatter_(1, ids[:, None], 0.0)
