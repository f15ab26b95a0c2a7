set -x
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \
   --actor.model_name_or_path models/sft --reward.model_name_or_path models/rm --ckpt.output_dir runs/ppo \
   --train.batch_size 128 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 --train.max_epochs 1 \
   --data.max_len 2048 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \
   --algo.kl.init_coef 0.01 --data.prompt_dataset prompts.jsonl --data.input_key context_messages \
   --data.apply_chat_template --reward.normalize_enable --actor.gradient_checkpointing_enable --ds.packing_samples \
   --logger.wandb.key a_secret_key --logger.wandb.project rlhf

# --ds.tensor_parallel_size 2 \
