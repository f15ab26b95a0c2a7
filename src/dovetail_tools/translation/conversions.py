"""Keys that other projects count otherwise or spread over several names."""

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail_tools.translation.draft import Draft
from dovetail_tools.translation.rewards import eval_sets, own_reward, rewards

ACTOR = "actor_rollout_ref.actor."
VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
ASSUMED_PROMPT = 512  # tokens, for micro-batch sizes
VERL_LOSSES: Mapping[Any, str] = {"cispo": "cispo", "geo_mean": "gmpo", "sapo": "sapo"}
PACKED = (
    "{}: a row there has {} tokens of several; set trainer.prompts_per_step to the rows of a step"
)


def verl(draft: Draft) -> None:
    """Batches count prompts."""
    ranks = draft.use("trainer.nnodes"), draft.use("trainer.n_gpus_per_node")
    draft.to_decide.append(
        f"ranks: {ranks[0]} x {ranks[1]} GPUs there; start as many as you have, such as --layout "
        "dp=8"
    )
    if draft.value_of("trainer.total_training_steps"):
        draft.set_key("trainer.steps", draft.use("trainer.total_training_steps"))
        draft.used.add("trainer.total_epochs")
    if draft.kind == "sft":
        draft.set_key("algorithm.name", "sft")
        _cut_rows(draft, "data.max_length", cut=False)
        return
    _algorithm(draft, "algorithm.adv_estimator")
    prompts = draft.number("data.train_batch_size", 1, keep=True)
    _updates(
        draft,
        prompts,
        draft.number(f"{ACTOR}ppo_mini_batch_size", 1),
        "train_batch_size / ppo_mini_batch_size",
    )
    ulysses = draft.number(f"{ACTOR}ulysses_sequence_parallel_size", 1, keep=True)
    cp = ulysses * draft.number(f"{ACTOR}megatron.context_parallel_size", 1, keep=True)
    if ulysses > 1:
        draft.set_key("layout.cp_mode", "ulysses")
    longest = sum(
        draft.number(f"data.max_{part}_length", 512, keep=True) for part in ("prompt", "response")
    )
    rows = draft.number(f"{ACTOR}ppo_micro_batch_size_per_gpu", 1)
    tokens = draft.number(f"{ACTOR}ppo_max_token_len_per_gpu")
    _micro_batch(
        draft, longest, tokens * cp if draft.use(f"{ACTOR}use_dynamic_bsz") else rows * longest
    )
    in_loss = draft.use(f"{ACTOR}use_kl_loss")
    in_reward = draft.use("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        draft.to_decide.append(
            "verl adds KL terms in the loss and in the reward; the recipe has that of the loss"
        )
    loss_coef = draft.use(f"{ACTOR}kl_loss_coef")
    reward_coef = draft.use("algorithm.kl_ctrl.kl_coef")
    if in_loss:
        _kl(draft, "loss", loss_coef)
    else:
        _kl(draft, "reward" if in_reward else "", reward_coef)
    kinds = {f"{ACTOR}kl_loss_type": in_loss, "algorithm.kl_penalty": in_reward and not in_loss}
    draft.used |= {name for name, is_read in kinds.items() if not is_read}
    if draft.use(f"{ACTOR}clip_ratio") and f"{ACTOR}clip_ratio_low" not in draft.given:
        draft.to_decide.append(
            "clip_ratio: verl reads clip_ratio_low and clip_ratio_high, whose defaults are 0.2"
        )
    mode = str(draft.value_of(f"{ACTOR}policy_loss.loss_mode"))
    if mode in VERL_LOSSES:
        draft.used.add(f"{ACTOR}policy_loss.loss_mode")
        _loss(draft, VERL_LOSSES[mode], f"{ACTOR}tau_pos", f"{ACTOR}tau_neg")
    if mode in VERL_LOSSES or mode == "gspo":
        draft.used.add(f"{ACTOR}clip_ratio_c")  # not read there
    if draft.value_of(f"{ACTOR}optim.lr_warmup_steps") not in (None, -1):
        draft.used.add(f"{ACTOR}optim.lr_warmup_steps_ratio")
    _reward_of_verl(draft)
    sampled, samples, temperature = (
        draft.use(VALIDATION + part) for part in ("do_sample", "n", "temperature")
    )
    if sampled:
        eval_sets(draft, {"val": draft.use("data.val_files")}, samples, temperature)
    draft.used |= {"data.reward_fn_key", f"{ACTOR}ppo_micro_batch_size"}
    if draft.value_of("critic.ppo_mini_batch_size") == draft.value_of(
        f"{ACTOR}ppo_mini_batch_size"
    ):
        draft.used.add("critic.ppo_mini_batch_size")


def _reward_of_verl(draft: Draft) -> None:
    path, name = (draft.use(f"reward.custom_reward_function.{part}") for part in ("path", "name"))
    model = "reward.reward_model.model_path"
    if not draft.use("reward.reward_model.enable"):
        draft.used.add(model)
    own_reward(draft, path, name or "compute_score", model, "what verl chooses by data_source")
    options = [
        draft.use(f"{start}custom_reward_function.reward_kwargs") for start in ("reward.", "")
    ]
    if "reward.import" in draft.recipe and any(options):
        draft.set_key("reward.options", options[0] or options[1])


def trl(draft: Draft) -> None:
    """Batches count rows of one process, in GRPO completions. A step is an update."""
    draft.set_key("algorithm.name", draft.kind)
    updates = _batch_of_processes(draft, "per_device_train_batch_size", "")
    is_half = draft.use("bf16")
    was_given = "bf16" in draft.given
    is_half = draft.use("dtype") in ("bfloat16", "auto") or is_half
    draft.set_key(
        "model.dtype", "bfloat16" if is_half else "float32", "" if was_given else "TRL's default"
    )
    steps = draft.number("max_steps")
    if steps > 0:
        draft.set_key(
            "trainer.steps", max(1, round(steps / updates)), "max_steps / updates of a step"
        )
        draft.used.add("num_train_epochs")
    for name, usual in (("save", "steps"), ("eval", "no")):
        strategy = draft.use(f"{name}_strategy", usual)
        count = draft.number(f"{name}_steps")
        key = f"trainer.{name}_every"
        if strategy in ("epoch", "best") or 0 < count < 1:
            draft.to_decide.append(f"{key}: each {strategy} there; give a number of steps")
        else:
            draft.set_key(key, 0 if strategy in ("no", False) else max(1, round(count / updates)))
    if (warmup := draft.number("warmup_steps")) >= 1:
        draft.set_key("optim.warmup_steps", round(warmup / updates))
    elif warmup:
        draft.given = {**draft.given, "warmup_ratio": warmup}
    _hub_rows(draft)
    if draft.kind == "dpo":
        draft.set_key("data.max_length", draft.use("max_length"))
        draft.set_key(
            "data.truncate", "left" if draft.use("truncation_mode") == "keep_end" else "right"
        )
        draft.set_key(
            "data.overlong_rows", "drop", "rows whose completion is cut off are left out there"
        )
        if draft.value_of("loss_type", "sigmoid") not in ("robust", ["robust"]):
            draft.used.add("label_smoothing")  # not read there
    elif draft.kind == "sft":
        _cut_rows(draft, "max_length")
        if not draft.use("assistant_only_loss"):
            draft.to_decide.append(
                "rows with messages: TRL trains all their tokens, a recipe the assistant's turns"
            )
        if draft.value_of("packing"):
            draft.to_decide.append(PACKED.format("packing", "max_length"))
    else:
        rewards(draft, "")
        _clip_of_trl(draft, draft.value_of("loss_type"))
        if draft.value_of("beta") and draft.use("use_bias_correction_kl", True):
            why = "not supported, because the KL term is not weighted by the ratio of probabilities"
            draft.leave_out(why, "use_bias_correction_kl=true")


def _clip_of_trl(draft: Draft, loss: str) -> None:
    high = draft.number("epsilon_high") or draft.number("epsilon", 0.2, keep=True)
    if loss in ("cispo", "sapo"):
        draft.used.add("loss_type")
        _loss(draft, loss, "sapo_temperature_pos", "sapo_temperature_neg")
        draft.set_key(
            "algorithm.aggregation", "token" if loss == "cispo" else "sequence", f"of {loss} there"
        )
    if loss == "cispo":
        draft.used.add("epsilon")
        draft.set_key("algorithm.clip_low", 1.0, "no lower bound there")
    draft.set_key("algorithm.clip_high", max(0.0, high - 1) if loss == "cispo" else high)


def _batch_of_processes(draft: Draft, size: str, prefix: str) -> float:
    """Sizes of transformers' Trainer. Returns updates per step."""
    rows = draft.number(size, 1)
    accumulated = draft.number("gradient_accumulation_steps", 1)
    processes = next(
        filter(None, (draft.use(name) for name in ("num_processes", "nproc_per_node", "num_gpus"))),
        None,
    )
    if not isinstance(processes, int):
        processes = 1
        draft.to_decide.append(
            "trainer.prompts_per_step: that of one process, as theirs are not counted; multiply it"
        )
    origin = f"{size} x gradient_accumulation_steps x {processes} processes"
    if draft.algorithm in ("sft", "dpo"):
        draft.set_key("trainer.prompts_per_step", rows * accumulated * processes, origin)
        return 1
    generated, parts = (
        draft.number(prefix + name) for name in ("generation_batch_size", "steps_per_generation")
    )
    parts = parts or generated / (rows * processes) or accumulated
    prompts = rows * processes * parts / draft.number(f"{prefix}num_generations", 8, keep=True)
    draft.set_key("trainer.prompts_per_step", max(1, round(prompts)), f"{origin} / num_generations")
    draft.set_key("algorithm.num_mini_batches", max(1, round(parts / accumulated)))
    if prompts != round(prompts) or parts % accumulated:
        draft.to_decide.append(
            f"trainer.prompts_per_step: {prompts:g} prompts and {parts / accumulated:g} updates "
            "there"
        )
    longest = draft.number(f"{prefix}max_completion_length", 512, keep=True)
    longest += draft.number(f"{prefix}max_prompt_length", keep=True) or ASSUMED_PROMPT
    _micro_batch(draft, longest, rows * longest)
    return float(
        draft.recipe["algorithm.num_mini_batches"]
        * draft.number(f"{prefix}num_iterations", 1, keep=True)
    )


def _hub_rows(draft: Draft) -> None:
    name = draft.use("dataset_name")
    subset = draft.use("dataset_config")
    mixture = draft.use("datasets")
    splits = draft.use("dataset_train_split", "train"), draft.use("dataset_test_split", "test")
    part = {"path": name} | ({"subset": subset} if subset else {})
    if mixture:
        draft.set_rows("data.train", mixture)
    elif name:
        is_plain = part == {"path": name} and splits[0] == "train"
        draft.set_key("data.train", name if is_plain else [{**part, "split": splits[0]}])
        if draft.recipe.get("trainer.eval_every"):
            draft.set_key("data.eval", [{**part, "split": splits[1]}])


def openrlhf(draft: Draft) -> None:
    """train.batch_size counts completions, rollout.batch_size prompts."""
    if draft.kind == "sft":
        draft.set_key("algorithm.name", "sft")
        draft.used |= {"train.micro_batch_size", "train.max_tokens_per_gpu"}
        _cut_rows(draft, "data.max_len")
        return
    longest = draft.number("data.max_len", 2048)
    cp = draft.number("ds.ring_attn_size", 1, keep=True)
    if draft.value_of("algo.advantage.estimator") == "dr_grpo":
        draft.set_key("algorithm.scale_by_std", False)
    _algorithm(draft, "algo.advantage.estimator")
    rows = draft.number("rollout.batch_size", 1, keep=True) * draft.number(
        "rollout.n_samples_per_prompt", 1, keep=True
    )
    _updates(
        draft, rows, draft.number("train.batch_size", 1), "completions of a step / train.batch_size"
    )
    room = longest - (draft.number("data.prompt_max_len", keep=True) or longest // 2)
    if draft.value_of("rollout.max_new_tokens") is None:
        draft.set_key("rollout.max_new_tokens", room)
        draft.to_decide.append(
            f"rollout.max_new_tokens: what a prompt leaves of data.max_len={longest}: {room}"
        )
    micro = draft.number("train.micro_batch_size", 1)
    tokens = draft.number("train.max_tokens_per_gpu", 16192)
    _micro_batch(
        draft,
        longest,
        tokens * cp if draft.value_of("train.dynamic_batch_enable") else micro * longest,
    )
    coef = draft.use("algo.kl.init_coef")
    where = ""
    if coef:
        where = "loss" if draft.use("algo.kl.use_loss") else "reward"
    _kl(draft, where, coef)
    low = draft.number("actor.eps_clip", 0.2)
    clips = draft.use("actor.eps_clip_low_high")
    clips = clips if isinstance(clips, list) and clips else [low]
    draft.set_key("algorithm.clip_low", clips[0])
    draft.set_key("algorithm.clip_high", clips[-1])
    if draft.value_of("actor.policy_loss_type") == "gspo":
        draft.set_key("algorithm.aggregation", "sequence", "as gspo there")
    remote = str(draft.use("reward.remote_url") or "")
    if remote and not remote.endswith(".py"):
        draft.set_key("reward.model.server.url", remote)
    else:
        own_reward(
            draft,
            remote,
            "reward_func",
            "reward.model_name_or_path",
            "what the agent of OpenRLHF returns",
        )
    samples = draft.number("eval.n_samples_per_prompt", 4)
    temperature = draft.number("eval.temperature", 0.6)
    if draft.value_of("eval.dataset"):
        eval_sets(draft, {"val": draft.use("eval.dataset")}, samples, temperature)


def axolotl(draft: Draft) -> None:
    wanted = draft.use("rl") or "sft"
    if wanted not in ("sft", "grpo"):
        raise ConfigError(f"rl: {wanted} is not supported yet; sft, grpo, rloo and ppo are")
    draft.set_key("algorithm.name", wanted)
    if draft.use("adapter"):
        draft.to_decide.append(
            "adapter: LoRA is not supported yet, so all parameters are trained; use a lower "
            "optim.lr"
        )
    updates = _batch_of_processes(draft, "micro_batch_size", "trl.")
    if steps := draft.number("max_steps"):
        draft.set_key("trainer.steps", max(1, round(steps / updates)))
        draft.used.add("num_epochs")
    draft.used |= {"warmup_ratio"} if draft.value_of("warmup_steps") else set()
    for name in ("saves_per_epoch", "evals_per_epoch"):
        if draft.use(name):
            draft.to_decide.append(
                f"trainer.{name[:4]}_every: {name} there; give a number of steps"
            )
    if draft.value_of("wandb_project"):
        draft.set_item("trainer.loggers", "name", "wandb")
        draft.used.add("use_wandb")
    _axolotl_rows(draft)
    if (template := draft.use("chat_template")) not in (None, "tokenizer_default"):
        draft.to_decide.append(
            f"chat_template={template}: the model's own is used, or that of data.chat_template"
        )
    if wanted == "grpo":
        rewards(draft, "trl.")
        draft.set_key(
            "algorithm.clip_high",
            draft.number("trl.epsilon_high") or draft.value_of("trl.epsilon", 0.2),
        )
        draft.used.add("sequence_len")
        return
    strategy = draft.use("excess_length_strategy") or "drop"
    _cut_rows(draft, "sequence_len", cut=strategy == "truncate")
    draft.set_key(
        "data.overlong_rows", "error" if strategy == "raise" else "drop", "excess_length_strategy"
    )
    if draft.value_of("sample_packing"):
        draft.to_decide.append(PACKED.format("sample_packing", "sequence_len"))


def _axolotl_rows(draft: Draft) -> None:
    for ours, theirs in (("data.train", "datasets"), ("data.eval", "test_datasets")):
        if rows := draft.use(theirs):
            parts = draft.set_rows(ours, rows)
            kinds = {str(part.get("type")) for part in parts} - {"alpaca", "chat_template", "None"}
            draft.to_decide += [
                f"datasets: rows of type {', '.join(kinds)}: set data.format or columns"
            ] * bool(kinds)
    if draft.use("val_set_size"):
        draft.to_decide.append(
            "data.eval: axolotl holds rows back; put such rows into a file of their own"
        )


def slime(draft: Draft) -> None:
    """global_batch_size counts completions, rollout_batch_size prompts."""
    tokens = draft.number("max_tokens_per_gpu") * draft.number(
        "context_parallel_size", 1, keep=True
    )
    if draft.use("loss_type") == "sft_loss":
        draft.set_key("algorithm.name", "sft")
        draft.set_key(
            "trainer.tokens_per_batch", tokens or 16384, "of one replica; a longer row is refused"
        )
        return
    if draft.value_of("advantage_estimator") == "gspo":
        draft.set_key("algorithm.ratio", "sequence")
    _algorithm(draft, "advantage_estimator")
    rows = draft.number("rollout_batch_size", 1, keep=True) * draft.number(
        "n_samples_per_prompt", 1, keep=True
    )
    part = draft.number("global_batch_size", rows)
    if draft.value_of("num_steps_per_rollout") is None:
        _updates(draft, rows, part, "completions of a step / global_batch_size")
    longest = draft.number("rollout_max_response_len", 512, keep=True)
    longest += draft.number("rollout_max_prompt_len", keep=True) or ASSUMED_PROMPT
    micro = draft.number("micro_batch_size", 1)
    _micro_batch(
        draft, longest, tokens if draft.value_of("use_dynamic_batch_size") else micro * longest
    )
    draft.set_key("algorithm.clip_high", draft.use("eps_clip_high") or draft.value_of("eps_clip"))
    in_loss = draft.use("use_kl_loss")
    loss_coef = draft.number("kl_loss_coef")
    reward_coef = draft.number("kl_coef")
    where = "reward" if reward_coef else ""
    if in_loss and loss_coef:
        where = "loss"
    _kl(draft, where, loss_coef if in_loss else reward_coef)
    if not draft.recipe["algorithm.kl_coef"]:
        draft.used |= {"kl_loss_type", "ref_load"}
    if draft.value_of("num_rollout"):
        draft.set_key("trainer.steps", draft.value_of("num_rollout"))
        draft.used.add("num_epoch")
    if (floor := draft.number("min_lr")) and (peak := draft.number("lr", keep=True)):
        draft.set_key("optim.min_lr_ratio", floor / peak)
    own = str(draft.use("custom_rm_path") or "")
    if not draft.value_of("rm_type") or own:
        module, _, function = own.rpartition(".")
        own_reward(draft, module and f"{module}.py", function, "rm_url", "what slime computes")
        draft.used.add("rm_type")
    samples = draft.number("n_samples_per_eval_prompt", 1)
    temperature = draft.number(
        "eval_temperature", draft.number("rollout_temperature", 1.0, keep=True)
    )
    if isinstance(sets := draft.value_of("eval_prompt_data"), list):
        draft.used.add("eval_prompt_data")
        eval_sets(
            draft, dict(zip(map(str, sets[::2]), sets[1::2], strict=False)), samples, temperature
        )


def _algorithm(draft: Draft, name: str) -> None:
    meaning = draft.table.find(name)
    theirs = str(draft.use(name))
    values: Mapping[str, str] = meaning.entry["values"] if meaning else {}
    if theirs not in values:
        draft.to_decide.append(
            f"{name}={theirs} is not supported yet ({', '.join(values)} are); grpo stands here"
        )
    draft.set_key(
        "algorithm.name",
        values.get(theirs, "grpo"),
        "" if values.get(theirs) == theirs else f"{theirs} there",
    )
    if theirs in ("reinforce_plus_plus_baseline", "reinforce_baseline"):
        draft.set_key("algorithm.group_baseline", True)


def _loss(draft: Draft, name: str, *temperatures: str) -> None:
    options = zip(("tau_positive", "tau_negative"), map(draft.use, temperatures), strict=True)
    given = {option: value for option, value in options if value is not None}
    draft.set_key("algorithm.loss", {"name": name, "options": given} if name == "sapo" else name)
    if name == "gmpo":
        draft.set_key("algorithm.aggregation", "sequence", "of geo_mean there")


def _updates(draft: Draft, rows: float, part: float, comment: str) -> None:
    draft.set_key("algorithm.num_mini_batches", max(1, round(rows / part)), comment)
    if rows % part:
        draft.to_decide.append(
            f"algorithm.num_mini_batches: {rows:g} rows are not a multiple of {part:g}"
        )


def _micro_batch(draft: Draft, longest: float, tokens: float) -> None:
    draft.set_key(
        "trainer.tokens_per_batch",
        max(longest, tokens),
        "of one replica; memory alone depends on it",
    )


def _kl(draft: Draft, where: str, coef: Any) -> None:
    if where:
        draft.set_key("algorithm.kl_in", where)
    draft.set_key("algorithm.kl_coef", coef if where and coef else 0.0)


def _cut_rows(draft: Draft, name: str, *, cut: bool = True) -> None:
    if isinstance(longest := draft.use(name), int):
        draft.set_key(
            "trainer.tokens_per_batch",
            longest,
            f"{name}: longer rows are {'cut' if cut else 'not taken'}",
        )
        if cut:
            draft.set_key("data.truncate", "right")


CONVERSIONS: Mapping[str, Callable[[Draft], None]] = {
    "verl": verl, "TRL": trl, "OpenRLHF": openrlhf, "axolotl": axolotl, "slime": slime,
}  # fmt: skip
