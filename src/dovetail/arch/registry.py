"""Model families by `model_type`, and the degrees of tp, ep and Ulysses that a model allows."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from dovetail.arch.apertus import apertus_spec
from dovetail.arch.common import Config
from dovetail.arch.deepseek import deepseek_v2_spec, deepseek_v3_spec
from dovetail.arch.llama import llama_spec, mistral_spec, mixtral_spec
from dovetail.arch.qwen import qwen2_moe_spec, qwen2_spec, qwen3_moe_spec, qwen3_spec
from dovetail.arch.spec import ArchSpec
from dovetail.arch.transformers_spec import AnySpec, transformers_spec
from dovetail.errors import LayoutError, ModelError, OptionError, quoted
from dovetail.parallel.layout import Layout

FAMILIES: Mapping[str, Callable[[Config], ArchSpec]] = {
    "apertus": apertus_spec,
    "deepseek_v2": deepseek_v2_spec,
    "deepseek_v3": deepseek_v3_spec,
    "kimi_k2": deepseek_v3_spec,
    "llama": llama_spec,
    "mistral": mistral_spec,
    "mixtral": mixtral_spec,
    "qwen2": qwen2_spec,
    "qwen2_moe": qwen2_moe_spec,
    "qwen3": qwen3_spec,
    "qwen3_moe": qwen3_moe_spec,
}
MAX_LAYERS = 1 << 16
MAX_DEGREE = 1 << 10


def spec_from_config(config: Config) -> ArchSpec:
    """Return the spec of a family. ModelError; OptionError for an option."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"config.json: model_type is {quoted(family)}; known families: {', '.join(FAMILIES)}"
        )
    depth = config.get("num_hidden_layers")
    if isinstance(depth, int) and depth > MAX_LAYERS:
        raise ModelError(
            f"config.json: num_hidden_layers is {depth}; supported: at most {MAX_LAYERS}"
        )
    return FAMILIES[family](config)


def choose_spec(config: Config, engine: str) -> AnySpec:
    """Return the spec for an engine.

    auto: native if it knows family and options, else transformers.
    """
    family = config.get("model_type")
    is_foreign = isinstance(family, str) and family not in FAMILIES
    if engine == "transformers" or (engine == "auto" and is_foreign):
        return transformers_spec(config)
    try:
        return spec_from_config(config)
    except OptionError as error:
        if engine == "native":
            remedy = "--engine transformers may run it, cut by cp and dp alone"
            raise ModelError(f"{error}; {remedy}") from error
        return replace(transformers_spec(config), missing_features=str(error))


def validate_layout(spec: ArchSpec, layout: Layout) -> None:
    """Raise LayoutError for a tp or ep that does not divide the model.

    Vocabulary and gated widths are padded.
    """
    _validate_ep(spec, layout)
    reasons = _misfits(spec, layout.tp)
    if reasons:
        degrees = range(1, min(spec.attention.num_heads, MAX_DEGREE) + 1)
        fitting = [str(tp) for tp in degrees if not _misfits(spec, tp)]
        raise LayoutError(
            f"layout {layout}: tp={layout.tp} does not fit this {spec.family} model: "
            f"{'; '.join(reasons)}; use one of tp={', '.join(fitting)}"
        )


def ulysses_degree(spec: AnySpec, layout: Layout) -> int:
    """Return the number of cp ranks that exchange heads; over the rest keys and values are gathered.

    cp_mode: auto: the most; ulysses: all of cp; gather: 1; product: the most below cp.
    """
    possible = _ulysses_degrees(spec, layout)
    by_mode = {
        "auto": possible,
        "gather": [1],
        "ulysses": [d for d in possible if d == layout.cp],
        "product": [d for d in possible if 1 < d < layout.cp],
    }
    if layout.cp_mode not in by_mode:
        raise LayoutError(
            f"layout: cp_mode={layout.cp_mode!r} is not known; use one of {', '.join(by_mode)}"
        )
    degrees = by_mode[layout.cp_mode]
    if degrees:
        return degrees[-1]
    attention = spec.attention
    heads = f"{attention.num_heads} attention and {attention.num_kv_heads} key-value heads"
    raise LayoutError(
        f"layout {layout}: cp_mode={layout.cp_mode} does not fit this {spec.family} model with "
        f"{heads} "
        f"at tp={layout.tp}; heads can be exchanged over {', '.join(map(str, possible))} "
        f"of cp={layout.cp} ranks; use cp_mode=auto or gather"
    )


def _ulysses_degrees(spec: AnySpec, layout: Layout) -> list[int]:
    """Return the divisors of cp that the heads allow, ascending."""
    heads = spec.attention.num_heads // layout.tp
    kv_heads = max(1, spec.attention.num_kv_heads // layout.tp)
    degrees = [d for d in range(1, layout.cp + 1) if layout.cp % d == 0]
    degrees = [d for d in degrees if heads % d == 0]
    return [d for d in degrees if kv_heads % d == 0 or d % kv_heads == 0]


def _misfits(spec: ArchSpec, tp: int) -> list[str]:
    heads = spec.attention.num_heads
    kv_heads = spec.attention.num_kv_heads
    reasons = []
    if heads % tp:
        reasons.append(f"{heads} attention heads are not a multiple of {tp}")
    if kv_heads % tp and tp % kv_heads:
        reasons.append(f"{kv_heads} key-value heads are neither a multiple nor a divisor of {tp}")
    if spec.activation == "xielu" and spec.ffn_width % tp:  # padding would learn: xielu(0) is not 0
        reasons.append(f"intermediate_size {spec.ffn_width} is not a multiple of {tp}")
    return reasons


def _validate_ep(spec: ArchSpec, layout: Layout) -> None:
    ep = layout.ep
    if ep == 1:
        return
    if spec.moe is None:
        problem = f"ep={ep} cuts experts, and this {spec.family} model has none"
        raise LayoutError(f"layout {layout}: {problem}; set ep=1")
    count = spec.moe.num_experts
    if count % ep:
        degrees = range(1, min(count, MAX_DEGREE) + 1)
        fitting = ", ".join(str(n) for n in degrees if count % n == 0)
        experts = f"the {count} experts of this {spec.family} model"
        raise LayoutError(
            f"layout {layout}: ep={ep} does not divide {experts}; use one of ep={fitting}"
        )
