# GRPO of TRL on eight processes.
accelerate launch --config_file zero3.yaml --num_processes 8 trl/scripts/grpo.py \
    --model_name_or_path models/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \
    --reward_funcs accuracy_reward my.rewards.short --reward_weights 1.0 0.5 \
    --learning_rate 1e-5 --warmup_steps 0.1 --max_completion_length 1024 --num_generations 8 \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 8 --num_iterations 1 \
    --beta 0.04 --epsilon 0.1 --epsilon-high 0.3 --loss_type dr_grpo --scale_rewards none --max_steps 400 \
    --save_steps 100 --use_vllm --vllm_mode colocate --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_cap 2.5 --use_peft --lora_r 16 --report_to wandb --run_name g --output_dir out
