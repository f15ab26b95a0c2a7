#!/usr/bin/env bash
# DAPO, with variables, sums and arrays as verl's scripts have them.
set -xeuo pipefail
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=${MAX_RESPONSE:-$((1024 * 8))}
enable_overlong_buffer=True
sp_size=4
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 1))
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/Qwen2.5-Math-7B"}
DATA=(
    data.train_files="${HOME}/data/dapo-math-17k.parquet" # 17k rows
    data.truncation='left'
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.gen_batch_size=1536
    data.train_batch_size=512
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0 +algorithm.filter_groups.enable=True \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=4 data.val_files=data/aime.parquet \
    reward_model.reward_manager=dapo +reward_model.overlong_buffer.enable=${enable_overlong_buffer} \
    trainer.total_training_steps=400 trainer.test_freq=10
