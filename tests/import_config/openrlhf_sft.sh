read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --data.max_len 2048 --data.dataset rows.jsonl --data.input_key question --data.output_key response \
   --train.batch_size 256 --train.micro_batch_size 2 --model.model_name_or_path models/base \
   --ckpt.output_dir runs/sft --ckpt.save_steps -1 --eval.steps -1 --ds.zero_stage 2 --train.max_epochs 1 \
   --ds.param_dtype bf16 --adam.lr 5e-6 --ds.packing_samples --model.gradient_checkpointing_enable
EOF
deepspeed --module $training_commands
