torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer \
    data.train_files=data/chat.parquet data.train_batch_size=96 data.max_length=4096 data.truncation=right \
    data.messages_key=conversation optim.lr=2e-5 optim.betas='[0.9,0.95]' optim.clip_grad=1.0 \
    optim.lr_scheduler_type=cosine engine=fsdp engine.ulysses_sequence_parallel_size=2 \
    model.path=models/Qwen3-8B trainer.total_epochs=2 trainer.logger=console trainer.default_local_dir=runs/sft
