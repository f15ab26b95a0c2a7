CKPT_ARGS=(
   --hf-checkpoint models/Qwen3-4B
   #--hf-checkpoint models/Qwen3-4B-FP8
   --ref-load models/Qwen3-4B_torch_dist
   --save runs/slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8

   --global-batch-size 128
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime aime-2024.jsonl --n-samples-per-eval-prompt 16)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --context-parallel-size 2
   --recompute-granularity full
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --tis-clip 3.0)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --min-lr 1e-7 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --colocate \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]}
