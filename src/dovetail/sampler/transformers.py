"""The transformers sampler: `generate` of static batches, padded on the left."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from dovetail.batch.packed import start_reading
from dovetail.hf.kimi import replace_tower
from dovetail.hf.names import OLD_STEMS, Names
from dovetail.hf.rotary import check_sections, length_limit
from dovetail.hf.transformers_model import (
    auto_class,
    config_errors,
    group_even_experts,
    known_config,
)
from dovetail.hf.vision import as_images, family_of, kinds_of
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import (
    SampleBuffer,
    Sampler,
    SamplingParams,
    TokenPrompt,
    check_request,
    check_weights,
)
from dovetail.sampler.sampling import draw, uniforms
from dovetail.sampler.turn import Turn
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.shards import FUSED, MIXTRAL

MAX_TOKENS = 1 << 15  # of a batch, with padding
StaticBatch = list[tuple[int, int]]  # (prompt, sample)


def plan_static_batches(
    lengths: Mapping[int, int], samples: int, new: int, budget: int
) -> list[StaticBatch]:
    """Returns batches of at most `budget` tokens with padding, or of one row.

    lengths: those of prompts, by place.
    """
    batches: list[StaticBatch] = []
    longest = 0
    for prompt in sorted(lengths, key=lambda i: (-lengths[i], i)):
        for sample in range(samples):
            if not batches or (len(batches[-1]) + 1) * longest > budget:
                batches.append([])
                longest = lengths[prompt] + new
            batches[-1].append((prompt, sample))
    return batches


class TransformersSampler(Sampler):
    """A sampler by transformers' `generate`, with the whole model on every rank."""

    def __init__(self, config: Mapping[str, Any], mesh: Mesh, dtype: torch.dtype) -> None:
        assert mesh["tp"].size == mesh["pp"].size == 1, "factory.sampler makes all ranks replicas"
        super().__init__()
        self.mesh = mesh
        self.dtype = dtype
        known = known_config(config)
        with config_errors():
            model: transformers.PreTrainedModel = auto_class(known).from_config(known, dtype=dtype)
            replace_tower(model)
        group_even_experts(model)
        _keep_in_float32(model)
        check_sections(model.get_decoder())
        model.generation_config = transformers.GenerationConfig()  # which `generate` merges
        self.model = model.to(mesh.device).eval().requires_grad_(False)
        self.vocab_size: int = known.get_text_config().vocab_size
        self.limit = length_limit(known)
        self._filled = False

    @torch.no_grad()
    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._filled = False
        places = self._places()
        names = Names(self.model)
        left: dict[int, tuple[str, int]] = {}
        for name, (whole, _) in places.items():
            left.setdefault(id(whole), (name, whole.numel()))
        problems = []
        for listed, tensor in weights:
            name = listed
            if listed not in places:
                name = names.in_module(listed)
            if name not in places:
                problems.append(f"{listed}: not a tensor of {type(self.model).__name__}")
                continue
            whole, place = places[name]
            if place.shape != tensor.shape and name.endswith(tuple(ending for ending, _ in FUSED)):
                place = place.transpose(1, 2)  # experts [E, in, out]
            if place.shape == tensor.shape:
                place.copy_(tensor)
            else:
                problems.append(
                    f"{name}: shape {list(tensor.shape)}, expected {list(places[name][1].shape)}"
                )
            first, missing = left[id(whole)]
            left[id(whole)] = (first, missing - place.numel())
        lacking = [name for name, missing in left.values() if missing > 0]
        check_weights(problems + sorted(f"{name}: missing" for name in lacking))
        self._filled = True

    def load(self, source: TensorSource) -> None:
        """Loads a checkpoint. Collective."""
        with agreed(self.mesh):
            Names(self.model).in_checkpoint(source, self._places())
            self.refill((name, source.read(name)) for name in source.names)

    @torch.no_grad()
    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        check_request(prompts, params, self.vocab_size, self.limit, filled=self._filled)
        buffer = SampleBuffer(prompts, params, self.mesh, self.mesh.device)
        lengths = buffer.local_prompts()
        done = 0
        new = params.max_new_tokens
        for batch in plan_static_batches(lengths, params.samples, new, MAX_TOKENS):
            self._run(batch, buffer)
            done += len(batch)
            if self.watch is not None:
                self.watch(done, len(lengths) * params.samples, int(buffer.counts.sum()))
        return buffer.turns()

    def _run(self, batch: StaticBatch, buffer: SampleBuffer) -> None:
        rows = [buffer.prompts[i] for i, _ in batch]
        params = buffer.params
        device = self.mesh.device
        longest = max(len(prompt.ids) for prompt in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(rows):
            ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, longest - len(prompt.ids) :] = 1
        samples = np.array([sample for _, sample in batch], dtype=np.int64)
        numbers = np.array([prompt.row for prompt in rows], dtype=np.int64)
        slots = torch.tensor([i * params.samples + sample for i, sample in batch], device=device)
        stop_ids = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=device)

        def draw_next(input_ids: Tensor, scores: Tensor) -> Tensor:
            """Stores drawn tokens and leaves no others."""
            position = input_ids.shape[1] - longest
            noise = uniforms(params.seed, params.step, numbers, samples, position)
            wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
            drawn, log_probs = draw(wide, torch.from_numpy(noise).to(device), params)
            buffer.ids[slots, position] = drawn
            buffer.log_probs[slots, position] = log_probs
            buffer.counts[slots] += alive.long()  # none after a stop
            alive.logical_and_(~torch.isin(drawn, stop_ids))
            return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)

        ends = list(params.stop_ids) or None
        config = transformers.GenerationConfig(
            max_new_tokens=params.max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0
        )
        inputs = {"attention_mask": mask.to(device), **self._media(rows, ids)}
        processors = transformers.LogitsProcessorList([draw_next])
        self.model.generate(
            ids.to(device), **inputs, generation_config=config, logits_processor=processors
        )

    def _media(self, rows: Sequence[TokenPrompt], ids: Tensor) -> dict[str, Tensor]:
        """Returns arguments of the model for the media of rows with ids [n, longest]."""
        shown = [
            (row, prompt.media)
            for row, prompt in zip(ids, rows, strict=True)
            if prompt.media is not None
        ]
        if not shown:
            return {}
        media = [media for _, media in shown]
        start_reading(media)
        kinds = kinds_of(ids, self.model.config)
        if family_of(self.model.config).marks:
            media = [as_images(row, each, self.model.config) for row, each in shown]
            kinds = kinds.clamp(max=1)
        inputs = {}
        for name in dict.fromkeys(name for each in media for name in each):
            joined = torch.cat([each[name] for each in media if name in each])
            if name.startswith("pixel"):
                joined = joined.to(self.dtype)
            inputs[name] = joined.to(self.mesh.device)
        if hasattr(self.model.model, "get_rope_index"):
            inputs["mm_token_type_ids"] = kinds.to(self.mesh.device)
        return inputs

    def _places(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns a tensor and the named part of it, by the names that checkpoints use."""
        places: dict[str, tuple[Tensor, Tensor]] = {}
        for name, whole in self.model.state_dict(keep_vars=True).items():
            for alias, place in ((name, whole), *_experts(name, whole)):
                places[alias] = (whole, place)
                for new, old in OLD_STEMS:
                    if alias.startswith(new):
                        places[old + alias.removeprefix(new)] = (whole, place)
        return places


def _keep_in_float32(model: "transformers.PreTrainedModel") -> None:
    """Widens what transformers marks so, such as routers' correction biases."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            wide = [
                re.compile(rf"(^|\.)({name})($|\.)")
                for name in part._keep_in_fp32_modules_strict or ()
            ]
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                if any(pattern.search(name) for pattern in wide):
                    tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, torch.float32))


def _experts(name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields parts of fused experts by the names of unfused checkpoints."""
    for ending, parts in FUSED:
        if name.endswith(ending):
            stem = name.rpartition(".")[0]
            for expert, matrix in enumerate(whole):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"{stem}.{expert}.{part}.weight", rows
                    yield f"{stem}.{expert}.{MIXTRAL[2][part]}.weight", rows
