"""A transformers model as an engine runs it: its own layers, our packing, attention and head; names as in its checkpoint.

The model is made without memory for its parameters: only what its constructor computes (tables of rotary frequencies,
scales) is kept, since no checkpoint has it. transformers loads its modules as they are first used: runs of our own
decoder do not wait for them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ModelError
from dovetail.hf.attention_interface import NAME, register
from dovetail.hf.head import logit_scale
from dovetail.hf.kimi import STEMS, Block, Encoder, replace_tower, translated
from dovetail.hf.names import Names
from dovetail.hf.rotary import check_sections, follow_lengths, marked
from dovetail.hf.vision import Vision, family_of
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import Recompute, options
from dovetail.nn.context_parallel import attention_of
from dovetail.nn.decoder import Head
from dovetail.nn.heads import LMHead, ValueHead, shared
from dovetail.nn.linear import Linear
from dovetail.nn.model import StagedModel, StageRange
from dovetail.parallel.mesh import Mesh
from dovetail.weights.experts import form_of
from dovetail.weights.hf_reader import TensorSource

# Modules of vision-language models, and how the checkpoints that are older than these modules list them.
OLD_STEMS = (
    *STEMS,
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
)
LAYERS = ("full_attention", "sliding_attention")  # the types of layers that packed attention computes
# A cap of the scores; scales that follow a token's place in its batch.
SCORE_OPTIONS = ("attn_logit_softcapping", "attn_temperature_tuning")
# What transformers raises at configs that it does not like, or that name code which is not there or does not run.
REFUSALS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError, ImportError),
    *(OSError, SyntaxError, StrictDataclassError),
)
# Whose class reads the config.json of a family that has a field: to Mistral's own all layers are alike.
READ_AS: Mapping[str, tuple[str, str]] = MappingProxyType({"mistral": ("layer_types", "ministral")})
FLOAT = "__float__"
LONG = 1000  # characters of a message
GROUPED = 8  # what divides the widths of experts whose products torch groups: 16 bytes, in half precision too


class ForeignDecoder(StagedModel):
    """`model` is transformers' own base model, `lm_head` or `score` our head. One call runs both.

    `source` says how its checkpoint names things and keeps experts. The counterpart of `nn.decoder.Decoder`, as one stage.
    """

    def __init__(
        self,
        spec: TransformersSpec,
        config: Mapping[str, Any],
        mesh: Mesh,
        kernels: KernelSet,
        head: Head = "lm",
        recompute: Recompute = "none",
        source: TensorSource | None = None,
    ) -> None:
        whole = make_model(config)
        base: Any = whole.get_submodule("model")
        words, own_head = base.get_input_embeddings(), whole.get_submodule("lm_head")
        tied = head == "lm" and own_head.weight is words.weight
        super().__init__(spec, mesh, StageRange.whole(spec), tied=tied)
        self.logit_scale = logit_scale(whole, spec.width) if head == "lm" else 1.0
        self.kernels, self.is_critic, self.recompute = kernels, head != "lm", recompute
        self.model: transformers.PreTrainedModel = base
        self.vision = Vision(base, mesh["cp"]) if is_sighted(base.config) else None
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
        self.stems: tuple[tuple[str, str], ...] = ()
        self.renamed: Mapping[str, str] = MappingProxyType({})
        if source is not None:
            if self.vision is None:
                own = {*dict(self.named_parameters()), *dict(self.named_buffers())}
                self.renamed = Names(whole).in_checkpoint(source, own)
            self.stems = tuple((ours, theirs) for ours, theirs in OLD_STEMS if _lists(source.names, theirs, ours))
            self.experts = form_of(self, source)

    def forward(
        self, micro: MicroBatch | None, loss: LossFn | None = None, stage: int = 0, x: Tensor | None = None
    ) -> TokenStats | Loss | Tensor:
        """The model's only stage."""
        assert micro is not None and stage == 0 and x is None
        context = attention_of(micro, self.mesh, self.kernels)
        found = self.text(**self._inputs(micro), use_cache=False, context=context)
        if loss is not None:
            loss = shared(loss, micro, self.mesh["cp"])
        hidden = found.last_hidden_state[0]
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        result: TokenStats | Loss | Tensor = self.head(hidden, micro, loss)
        return result

    @property
    def text(self) -> nn.Module:
        text: nn.Module = self.model if self.vision is None else self.model.get_decoder()
        return text

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """What the text backbone is given of this rank's tokens: ids, or embeddings with features in their places."""
        if self.vision is None:
            limit = self.length_limit
            positions = micro.batch.positions if limit is None else marked(micro.batch, limit)
            return {"input_ids": micro.tokens[None], "position_ids": positions[micro.order][None]}
        stand_ins = self.vision.kinds(micro.tokens) > 0  # their ids may lie beyond the table
        words = self.model.get_input_embeddings()(micro.tokens.masked_fill(stand_ins, 0))
        seen = self.vision.look(micro, words.dtype)
        first, *deep = seen.features
        positions = self.vision.positions(micro.batch)[:, micro.order]
        inputs = {
            "inputs_embeds": words.index_copy(0, seen.places, first)[None],
            "position_ids": positions if len(positions) == 1 else positions[:, None],
        }
        if deep:
            inputs["deepstack_visual_embeds"] = deep
            inputs["visual_pos_masks"] = torch.zeros_like(micro.order, dtype=torch.bool).index_fill(
                0, seen.places, True
            )[None]
        return inputs

    def check(self, batch: PackedBatch) -> None:
        if self.vision is None:
            super().check(batch)
        else:
            self.vision.check(batch)

    def stored_name(self, name: str) -> str:
        for ours, theirs in self.stems:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        return self.renamed.get(name, name)

    def linears(self, stage: int) -> Iterator[Linear]:
        """None: foreign layers have no weight gradients that wait."""
        return iter(())

    def groups(self) -> Iterator[nn.Module]:
        kinds = (Block, transformers.GradientCheckpointingLayer)
        yield from (module for module in self.model.modules() if isinstance(module, kinds))
        if not self.tied:
            yield self.model.get_input_embeddings()
            yield self.head

    def hold_in(self, dtype: torch.dtype) -> "ForeignDecoder":
        """Hold parameters in `dtype`. Buffers stay as they were computed: tables of frequencies are float32 in any model."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def materialize(self, device: torch.device) -> None:
        computed = {name: buffer.to(device) for name, buffer in self.named_buffers()}
        self.to_empty(device=device)
        for name, buffer in self.named_buffers():
            buffer.copy_(computed[name])


class _ParametersWithoutMemory(TorchFunctionMode):
    """Empty tensors, which parameters start as, go to the meta device; what is computed stays where it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = {**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}
        return func(*args, **options)


def make_model(config: Mapping[str, Any]) -> "transformers.PreTrainedModel":
    """The model of a raw config.json in float32, on the meta device but for its computed buffers. Raises ModelError."""
    register()
    known = known_config(config)
    try:
        _refuse(known)
        sighted = is_sighted(known)
        if sighted:
            family_of(known)
        kind = transformers.AutoModelForImageTextToText if sighted else transformers.AutoModelForCausalLM
        with _ParametersWithoutMemory():
            model: transformers.PreTrainedModel = kind.from_config(known, dtype=torch.float32)
            replace_tower(model)
    except ModelError:
        raise
    except REFUSALS as error:
        raise ModelError(
            f"transformers makes no model of this config: {type(error).__name__}: {_short(error)}"
        ) from error
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{type(model).__name__} does not call attention through AttentionInterface, so its batches cannot be packed"
        )
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is not None:
        raise ModelError(f"{type(model).__name__} has a head with a bias, which the fused head does not compute")
    if dict(model.named_children()).keys() != {"model", "lm_head"}:
        raise ModelError(f"{type(model).__name__} is not made of `model` and `lm_head` alone")
    _refuse_modules(model.get_decoder() if sighted else model)
    check_sections(model.get_decoder())
    _hold_frozen(model)
    model.set_attn_implementation({"text_config": NAME} if sighted else NAME)
    group_even_experts(model)
    return model.eval()


def group_even_experts(model: "transformers.PreTrainedModel") -> None:
    """Have experts of a width that torch's grouped products do not take computed one after another."""
    if any(n % GROUPED for p in model.parameters() if p.dim() == 3 for n in p.shape[1:]):
        model.set_experts_implementation("eager")


def known_config(config: Mapping[str, Any]) -> "transformers.PreTrainedConfig":
    """A raw config.json as transformers reads it. Raises ModelError."""
    try:
        options = _floats(dict(translated(config)))
        if options["model_type"] not in transformers.CONFIG_MAPPING and "auto_map" in options:
            raise ModelError(
                f"model_type {options['model_type']!r} is code that comes with the model, which is not run"
            )
        family = options.pop("model_type")
        field, other = READ_AS.get(family, ("", family))
        family = other if field in options else family
        known: transformers.PreTrainedConfig = transformers.AutoConfig.for_model(family, **options)
    except ModelError:
        raise
    except REFUSALS as error:
        raise ModelError(
            f"transformers makes no model of this config: {type(error).__name__}: {_short(error)}"
        ) from error
    return known


def _floats(value: Any) -> Any:
    """A copy, with what JSON has no words for: transformers writes `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        return float(value[FLOAT]) if value.keys() == {FLOAT} else {name: _floats(each) for name, each in value.items()}
    return [_floats(each) for each in value] if isinstance(value, list) else value


def _short(error: Exception) -> str:
    """The first sentence of a long message: behind it transformers lists all types of models that it knows."""
    text = " ".join(str(error).split())
    return text if len(text) < LONG else text.partition(". ")[0]


def is_sighted(config: "transformers.PreTrainedConfig") -> bool:
    """Whether a model of this config has a tower beside its text backbone."""
    return "vision_config" in config.to_dict()


def _lists(names: Collection[str], stem: str, without: str) -> bool:
    """Whether a checkpoint has names with one stem and none with another."""
    return any(name.startswith(stem) for name in names) and not any(name.startswith(without) for name in names)


def _refuse(config: "transformers.PreTrainedConfig") -> None:
    """What packing, Ulysses or the fused head would compute wrongly."""
    text = config.get_text_config()
    values = vars(text)
    if any(vars(part).get("quantization_config") is not None for part in (config, text)):
        raise ModelError(
            "config.json: quantization_config; convert the checkpoint to float32 or bfloat16 weights first"
        )
    for name in SCORE_OPTIONS:
        if values.get(name):
            raise ModelError(
                f"config.json: {name}={values[name]} changes attention, which packed attention does not compute"
            )
    kinds = {kind for kind in values.get("layer_types") or () if kind not in LAYERS}
    if kinds:
        raise ModelError(
            f"config.json: layers of type {', '.join(sorted(kinds))} carry state over sequence boundaries, or choose what a "
            "token sees in a way of their own"
        )
    if values.get("is_causal") is False:
        raise ModelError("config.json: is_causal=False; tokens that see what follows them have no log-probs")


def _refuse_modules(text: nn.Module) -> None:
    """The same, where a config does not say it."""
    for name, module in text.named_modules():
        if vars(module).get("is_causal") is False:
            raise ModelError(f"tokens see what follows them in {name}, so they have no log-probs")
        if isinstance(module, nn.Conv1d):
            raise ModelError(f"{name} is a convolution over tokens, which carries state over sequence boundaries")
        if "sinks" in dict(module.named_parameters(recurse=False)):
            raise ModelError(f"{name} has sinks, which packed attention does not compute")


def _hold_frozen(model: nn.Module) -> None:
    """Parameters that no gradient changes, such as biases of routers, are buffers to us: loaded and saved, not trained."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, torch.zeros(parameter.shape))


def _recompute(model: "transformers.PreTrainedModel", recompute: Recompute) -> None:
    """Checkpointing as transformers does it: by blocks in training mode. Nothing in them is, so dropout stays off."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"{type(model).__name__} recomputes nothing; set activation_checkpointing=none")
    if hasattr(model, "activation_checkpointing_enable"):  # where that is there, its older name warns
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
