"""Models of transformers with our packing, attention and head."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.arch.common import Config
from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ModelError
from dovetail.hf.attention import packed_attention, window_mask
from dovetail.hf.head import logit_scale
from dovetail.hf.kimi import Block, Encoder, replace_tower, translated
from dovetail.hf.names import OLD_STEMS, Names
from dovetail.hf.rotary import check_sections, follow_lengths, marked
from dovetail.hf.vision import Vision, family_of, kinds_of
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import Recompute, options
from dovetail.nn.attention import attention_of
from dovetail.nn.decoder import Head
from dovetail.nn.heads import LMHead, ValueHead, gather_over_cp
from dovetail.nn.model import StagedModel, StageRange
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.shards import form_of

NAME = "dovetail"  # in transformers' registries
LAYERS = ("full_attention", "sliding_attention")
SCORE_OPTIONS = ("attn_logit_softcapping", "attn_temperature_tuning")
# raised by transformers for a config
CONFIG_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    ImportError,
    OSError,
    SyntaxError,
    StrictDataclassError,
)
# model_type -> (a field, the model_type that reads it)
READ_AS: Mapping[str, tuple[str, str]] = {"mistral": ("layer_types", "ministral")}
FLOAT = "__float__"
MAX_MESSAGE = 1000  # characters
GROUPED = 8  # rows of 16 bytes, which torch groups


class TransformersModel(StagedModel):
    """A model of transformers, whole on each rank, with our attention and head."""

    def __init__(
        self,
        spec: TransformersSpec,
        config: Config,
        mesh: Mesh,
        kernels: KernelSet,
        head: Head = "lm",
        recompute: Recompute = "none",
        source: TensorSource | None = None,
    ) -> None:
        whole = make_model(config)
        base: Any = whole.get_submodule("model")
        words = base.get_input_embeddings()
        own_head = whole.get_submodule("lm_head")
        tied = head == "lm" and own_head.weight is words.weight
        super().__init__(spec, mesh, StageRange.whole(spec), tied=tied)
        self.logit_scale = logit_scale(whole, spec.width) if head == "lm" else 1.0
        self.kernels = kernels
        self.is_critic = head != "lm"
        self.recompute = recompute
        self.model: transformers.PreTrainedModel = base
        self.vision = Vision(base, mesh["cp"]) if has_vision(base.config) else None
        self.length_limit = follow_lengths(base, base.config)
        if recompute != "none":
            _recompute(whole, recompute)
        with torch.device("meta"):
            if head == "lm":
                self.lm_head = LMHead(spec.vocab_size, spec.width, mesh, kernels, tied=tied)
            else:
                self.score = ValueHead(spec.width, mesh, bias=head == "value")
        if tied:
            assert isinstance(words.weight, nn.Parameter)
            self.lm_head.weight = words.weight
        self.stems: list[tuple[str, str]] = []
        self.renamed: Mapping[str, str] = {}
        if source is not None:
            if self.vision is None:
                own = {*dict(self.named_parameters()), *dict(self.named_buffers())}
                self.renamed = Names(whole).in_checkpoint(source, own)
            for stem, old in OLD_STEMS:
                if _has_stem(source, old) and not _has_stem(source, stem):
                    self.stems.append((stem, old))
            self.experts = form_of(self, source)

    def forward(
        self,
        micro: MicroBatch | None,
        loss: LossFn | None = None,
        stage: int = 0,
        x: Tensor | None = None,
    ) -> TokenStats | Loss | Tensor:
        assert micro is not None and stage == 0 and x is None
        context = attention_of(micro, self.mesh, self.kernels)
        output = self.text(**self._inputs(micro), use_cache=False, context=context)
        hidden = output.last_hidden_state[0]
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        if loss is not None:
            loss = gather_over_cp(loss, micro, self.mesh["cp"])
        return self.head(hidden, micro, loss)

    @property
    def text(self) -> nn.Module:
        return self.model if self.vision is None else self.model.get_decoder()

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        if self.vision is None:
            batch = micro.batch
            limit = self.length_limit
            positions = batch.positions if limit is None else marked(batch, limit)
            position_ids = positions[..., micro.order].unsqueeze(-2)  # [1, t] or [3, 1, t]
            return {"input_ids": micro.tokens[None], "position_ids": position_ids}
        placeholders = kinds_of(micro.tokens, self.model.config) > 0
        embed = self.model.get_input_embeddings()
        words = embed(micro.tokens.masked_fill(placeholders, 0))
        places, (first, *deep) = self.vision.encode(micro, words.dtype)
        positions = self.vision.positions(micro.batch)[:, micro.order]
        if len(positions) > 1:
            positions = positions[:, None]
        embeds = words.index_copy(0, places, first)[None]
        inputs = {"inputs_embeds": embeds, "position_ids": positions}
        if deep:
            nowhere = torch.zeros_like(micro.order, dtype=torch.bool)
            inputs["deepstack_visual_embeds"] = deep
            inputs["visual_pos_masks"] = nowhere.index_fill(0, places, True)[None]
        return inputs

    def check(self, batch: PackedBatch) -> None:
        if self.vision is None:
            super().check(batch)
        else:
            self.vision.check(batch)

    def stored_name(self, name: str) -> str:
        for stem, old in self.stems:
            if name.startswith(stem):
                name = old + name.removeprefix(stem)
                break
        return self.renamed.get(name, name)

    def groups(self) -> Iterator[nn.Module]:
        kinds = (Block, transformers.GradientCheckpointingLayer)
        yield from (module for module in self.model.modules() if isinstance(module, kinds))
        if not self.tied:
            yield self.model.get_input_embeddings()
            yield self.head

    def hold_in(self, dtype: torch.dtype) -> "TransformersModel":
        """Convert the parameters; buffers, such as frequencies, keep their dtype."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def materialize(self, device: torch.device) -> None:
        computed = {name: buffer.to(device) for name, buffer in self.named_buffers()}
        self.to_empty(device=device)
        for name, buffer in self.named_buffers():
            buffer.copy_(computed[name])


def _has_stem(source: TensorSource, stem: str) -> bool:
    return any(name.startswith(stem) for name in source.names)


class _ParametersOnMeta(TorchFunctionMode):
    """A mode that makes parameters, which transformers allocates with torch.empty, on meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise ModelError in place of transformers' errors, cut where they list all model types."""
    try:
        yield
    except ModelError:
        raise
    except CONFIG_ERRORS as error:
        text = " ".join(str(error).split())
        if len(text) >= MAX_MESSAGE:
            text, _, _ = text.partition(". ")
        problem = f"{type(error).__name__}: {text}"
        raise ModelError(f"transformers makes no model of this config: {problem}") from error


def make_model(config: Config) -> "transformers.PreTrainedModel":
    """Return the model in float32, on meta but for computed buffers. ModelError."""
    if NAME not in transformers.AttentionInterface():
        transformers.AttentionInterface.register(NAME, packed_attention)
        transformers.AttentionMaskInterface.register(NAME, window_mask)
    known = known_config(config)
    with config_errors():
        _refuse(_config_problems(known))
        with _ParametersOnMeta():
            cls = auto_class(known)
            model: transformers.PreTrainedModel = cls.from_config(known, dtype=torch.float32)
            replace_tower(model)
    _refuse(_model_problems(model))
    check_sections(model.get_decoder())
    _freeze(model)
    model.set_attn_implementation({"text_config": NAME} if has_vision(known) else NAME)
    group_even_experts(model)
    return model.eval()


def auto_class(config: "transformers.PreTrainedConfig") -> Any:
    if has_vision(config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def group_even_experts(model: "transformers.PreTrainedModel") -> None:
    """Let experts of other widths run one by one: torch does not group them."""
    for parameter in model.parameters():
        if parameter.dim() == 3 and any(n % GROUPED for n in parameter.shape[1:]):
            model.set_experts_implementation("eager")
            return


def known_config(config: Config) -> "transformers.PreTrainedConfig":
    """Return the config as transformers reads it. ModelError."""
    with config_errors():
        options = _floats(dict(translated(config)))
        kind = options.pop("model_type")
        if kind not in transformers.CONFIG_MAPPING and "auto_map" in options:
            raise ModelError(
                f"model_type {kind!r} is code that comes with the model, which is not run"
            )
        field, other = READ_AS.get(kind, ("", kind))
        if field in options:
            kind = other
        return transformers.AutoConfig.for_model(kind, **options)


def _floats(value: Any) -> Any:
    """Return `value` with floats in place of `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_floats(x) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT}:
        return float(value[FLOAT])
    return {name: _floats(x) for name, x in value.items()}


def has_vision(config: "transformers.PreTrainedConfig") -> bool:
    return "vision_config" in config.to_dict()


def _refuse(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ModelError(problem)


def _config_problems(config: "transformers.PreTrainedConfig") -> Iterator[str]:
    text = config.get_text_config()
    values = vars(text)
    quantized = [vars(part).get("quantization_config") for part in (config, text)]
    if any(value is not None for value in quantized):
        yield (
            "config.json: quantization_config; "
            "convert the checkpoint to float32 or bfloat16 weights first"
        )
    for name in SCORE_OPTIONS:
        if values.get(name):
            yield (
                f"config.json: {name}={values[name]} changes attention, "
                "which packed attention does not compute"
            )
    kinds = {*(values.get("layer_types") or ())} - {*LAYERS}
    if kinds:
        names = ", ".join(sorted(kinds))
        yield (
            f"config.json: layers of type {names} carry state over sequence boundaries, "
            "or choose what a token sees"
        )
    if values.get("is_causal") is False:
        yield "config.json: is_causal=False; tokens that see what follows them have no log-probs"
    if has_vision(config):
        family_of(config)


def _model_problems(model: "transformers.PreTrainedModel") -> Iterator[str]:
    name = type(model).__name__
    head = model.get_output_embeddings()
    text = model.get_decoder() if has_vision(model.config) else model
    if not model._can_set_attn_implementation():
        yield (
            f"{name} does not call attention through AttentionInterface, "
            "so its batches cannot be packed"
        )
    if isinstance(head, nn.Linear) and head.bias is not None:
        yield f"{name} has a head with a bias, which the fused head does not compute"
    if dict(model.named_children()).keys() != {"model", "lm_head"}:
        yield f"{name} is not made of `model` and `lm_head` alone"
    for name, module in text.named_modules():
        if vars(module).get("is_causal") is False:
            yield f"tokens see what follows them in {name}, so they have no log-probs"
        if isinstance(module, nn.Conv1d):
            yield (
                f"{name} is a convolution over tokens, which carries state over sequence boundaries"
            )
        if "sinks" in dict(module.named_parameters(recurse=False)):
            yield f"{name} has sinks, which packed attention does not compute"


def _freeze(model: nn.Module) -> None:
    """Make buffers of parameters without gradients."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, torch.zeros(parameter.shape))


def _recompute(model: "transformers.PreTrainedModel", recompute: Recompute) -> None:
    """Let the model recompute its blocks. They need training mode; their children do not."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} recomputes nothing; set activation_checkpointing=none"
        )
    if hasattr(model, "activation_checkpointing_enable"):  # the older name warns
        model.activation_checkpointing_enable(options(recompute))
    else:
        model.gradient_checkpointing_enable(options(recompute))
    for block in model.modules():
        if isinstance(block, Encoder):
            block.recompute = recompute
        elif isinstance(block, transformers.GradientCheckpointingLayer):
            block.train()
            for module in block.children():
                module.eval()
