# Flags as OpenRLHF had them before 2026.
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain models/M --remote_rm_url ./reward_func.py --save_path runs/g --micro_train_batch_size 4 \
   --train_batch_size 256 --rollout_batch_size 128 --n_samples_per_prompt 8 --max_epochs 1 --num_episodes 2 \
   --prompt_max_len 1024 --generate_max_len 3072 --advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss \
   --kl_estimator k3 --eps_clip_low_high 0.2 0.28 --dynamic_filtering --actor_learning_rate 1e-6 --prompt_data p.jsonl \
   --input_key question --label_key answer --apply_chat_template --gradient_checkpointing --ring_attn_size 2
