"""Wrong command lines, and what their one message says. Files are those of `test_wrong_inputs.py`."""

import shlex

BASES = {
    "score": "score --model M --data D.jsonl --out O ",
    "generate": "generate --model M --data D.jsonl --out O ",
    "convert": "convert M new --to sharded ",
    "train": "train R.yaml ",
    "": "",
}
TABLE = """
: trian => invalid choice: 'trian' | did you mean train?
: evaluate => invalid choice: 'evaluate'
: --verion => unrecognized arguments: --verion
: score => required: MODEL, --data, --out | see dovetail score --help
: score --model M => required: --data, --out
: generate --data D.jsonl => required: MODEL, --out
: convert => required: SRC, DST, --to
: convert M new => required: --to
: convert M new --to onnx => --to: invalid choice: 'onnx'
: inspect => required: PATH
: report => required: RUN
: rollouts => required: RUN
: train => required: RECIPE.yaml
: serve => required: MODEL
: serve none => none is not a directory
: serve M --port 70000 => --host 127.0.0.1 --port 70000: | 0-65535
: inspect none => none does not exist; give a sharded checkpoint, an HF directory, or a run_dir
: inspect empty => empty holds no MANIFEST.json, config.json or config.yaml
: inspect D.jsonl => D.jsonl is no directory
: report none => none is not the directory of a run: there is no such directory
: report empty => empty is not the directory of a run: it has neither config.yaml nor metrics.jsonl
: rollouts none => none is not the directory of a run
: rollouts done --limit 0 => argument --limit: 0 is not more than 0
: rollouts done --sort newest => invalid choice: 'newest'
: report done --watch -1 => argument --watch: -1
: doctor --device tpu => argument --device: invalid choice: 'tpu'
: doctor extra => unrecognized arguments: extra
score: --temperature 0 => argument --temperature: 0 is not more than 0
score: --temperature=-1 => --temperature: -1 is not more than 0
score: --temperature nan => nan is not finite
score: --temperature hot => --temperature: invalid number value: 'hot'
score: --tokens-per-batch 0 => 0 is not more than 0
score: --tokens-per-batch 1.5 => invalid whole number value: '1.5'
score: --head both => argument --head: invalid choice: 'both'
score: --dtype fp16 => argument --dtype: invalid choice: 'fp16'
score: --dtype bf16 => invalid choice: 'bf16' | did you mean bfloat16?
score: --engine vllm => argument --engine: invalid choice: 'vllm'
score: --device gpu => argument --device: invalid choice: 'gpu'
score: --batch-size 4 => unrecognized arguments: --batch-size 4
score: --samples 4 => unrecognized arguments: --samples 4
score: --layout tp=two => tp must be a whole number of 1 or more, not 'two'
score: --layout tp=0 => tp must be a whole number of 1 or more, not '0'
score: --layout tp=-2 => tp must be a whole number of 1 or more, not '-2'
score: --layout tp => 'tp' is not one of tp=N
score: --layout fsdp=2 => 'fsdp=2' is not one of tp=N, pp=N, cp=N, dp=N, ep=N
score: --layout tp=2,tp=3 => tp is given twice
score: --layout tp:2 => 'tp:2' is not one of
score: --layout tp=64 => 6 attention heads are not a multiple of 64 | use one of tp=1, 2, 3, 6
score: --layout tp=4 => 6 attention heads are not a multiple of 4
score: --layout pp=8 => pp=8 x virtual_stages=1 makes 8 stages, but the model has 4 layers; use pp=4
score: --layout ep=2 => ep=2 does not divide dp x cp = 1
score: --layout ep=2,dp=2 => ep=2 cuts experts, and this llama model has none; set ep=1
score: --layout dp=100000 => 100000 ranks need at least 26,843.5 GB of memory, but 8.6 GB are free
score: --layout tp=2,pp=4,dp=9999 => 79992 ranks need at least
score: --device cuda => device 'cuda': this process sees none here; use --device cpu or auto
score: --device npu => this process sees none here
score: --model moe --layout ep=3,dp=3 => ep=3 does not divide the 4 experts of this mixtral model; use one of ep=1, 2, 4
score: --model gpt --layout tp=2 => model_type is 'gpt_neox' | cut by cp and dp alone; set tp=1, pp=1 and ep=1
score: --model M --engine transformers --layout pp=2 => are cut by cp and dp alone
score: --model gpt --engine native => config.json: model_type is 'gpt_neox'; known families: apertus
score: --model none => none is not a directory; give one with config.json and safetensors files, or OWNER/NAME@COMMIT
score: --model D.jsonl => D.jsonl is not a directory
score: --model empty => empty has no config.json; give a directory that transformers can load
score: --model bin => has only pickled weights (pytorch_model.bin) | AutoModelForCausalLM.from_pretrained('bin')
score: --model bare => bare has no weights: expected model.safetensors or model.safetensors.index.json
score: --model adapter => adapter holds an adapter (adapter_config.json), which is not applied here; merge it
score: --model torn => torn/config.json is not valid JSON
score: --model listed => listed/config.json holds a JSON list, expected an object
score: --model twice => the key 'model_type' appears twice
score: --model untyped => model_type
score: --model headless => num_key_value_heads is 6; supported: a divisor of num_attention_heads=32
score: --model wordy => hidden_size
score: --model Qwen/Qwen3-0.6B => pin it to a commit: Qwen/Qwen3-0.6B@COMMIT (git ls-remote
score: --model Qwen/Qwen3-0.6B@main => git ls-remote https://huggingface.co/Qwen/Qwen3-0.6B HEAD prints
score: --model Qwen/Qwen3-0.6B@abc123 => 'abc123' is not a commit; a branch or tag can move, so give the 40 hexadecimal digits
score: --model ../../M@main => ../../M@main is not a directory
score: --data none.jsonl => none.jsonl: no such data file; give the path of a .jsonl or .parquet file
score: --data empty => empty: no data file in this directory
score: --data *.none => *.none: no file matches
score: --data openai/gsm8k => for a dataset of the hub, pin it to a commit: openai/gsm8k@COMMIT (git ls-remote https://huggingface.co/datasets/openai/gsm8k
score: --data openai/gsm8k@main => 'main' is not a commit
score: --data hf://datasets/gsm8k => expected hf://datasets/OWNER/NAME@COMMIT
score: --data hf://datasets/openai/gsm8k => 'no revision' is not a commit
score: --out empty => --out empty is a directory; give the path of a file
score: --out D.jsonl => --out D.jsonl is the file that --data names, and would replace it
score: --out /dev/null => --out /dev/null is a device or a pipe
score: --out D.jsonl/o => cannot be written
score: --out /proc/o => --out /proc/o cannot be written: /proc is no directory that you may write to
score: --model none --data none.jsonl --out empty --layout dp=100000 => 4 mistakes: | none.jsonl | --out empty | GB are
score: --temperature 0 --dtype fp8 --bogus => 2 mistakes: | --temperature: 0 is not | --dtype: invalid choice: 'fp8'
generate: --max-new-tokens 100000 => --max-new-tokens is 100,000, but the model has 128 positions
generate: --max-new-tokens 128 => --max-new-tokens is 128, but the model has 128 positions
generate: --max-new-tokens 0 => --max-new-tokens: 0 is not more than 0
generate: --max-new-tokens 1e3 => invalid whole number value: '1e3'
generate: --temperature=-0.5 => --temperature: -0.5 is less than 0
generate: --temperature inf => inf is not finite
generate: --top-p 1.5 => argument --top-p: 1.5 is more than 1
generate: --top-p 0 => argument --top-p: 0 is not more than 0
generate: --top-k=-1 => argument --top-k: -1 is less than 0
generate: --seed=-1 => argument --seed: -1 is less than 0
generate: --samples none => --samples: invalid whole number value: 'none'
generate: --layout tp=4 => 6 attention heads are not a multiple of 4
generate: --layout tp=3,pp=4 => the sampler runs pipeline ranks as tp=12
generate: --head value => unrecognized arguments: --head value
generate: --prompt hello => unrecognized arguments: --prompt hello
: eval none --data none.jsonl => 2 mistakes: | none is not a directory | none.jsonl: no such data file
: eval M --data D.jsonl --max-new-tokens 4096 => --max-new-tokens is 4,096, but the model has 128 positions
: eval M --data D.jsonl --reward exactmatch => --reward 'exactmatch' is no built-in reward
: eval M => required: --data
train: 'eval.sets={name: a, data: none.jsonl}' => none.jsonl: no such data file
convert: --layout tp=4 => 6 attention heads are not a multiple of 4
convert: --dtype int8 => argument --dtype: invalid choice: 'int8'
convert: --max-new-tokens 3 => unrecognized arguments
: convert none new --to sharded => none is not a directory
: convert none new --to hf => none is not a directory
: convert M used --to sharded => used is there already and is not an empty directory
: convert M /proc/new --to sharded => the directory /proc/new cannot be written
: convert none used --to hf => 2 mistakes: | used is there already | none is not a directory
: train none.yaml => recipe 'none.yaml' cannot be read: No such file or directory; give the path of a YAML file
: train empty => recipe 'empty' cannot be read: Is a directory
: train tab.yaml => recipe 'tab.yaml' is not valid YAML: line 2, column 1
: train list.yaml => recipe 'list.yaml' holds a list; expected a mapping of sections
: train twice.yaml => the key 'optim' is given twice
: train blank.yaml => model is missing | data is missing | run_dir is missing
train: --learning_rate 1e-5 => unrecognized arguments: --learning_rate 1e-5
train: --resume sometimes => 'sometimes'; expected auto, never or step=N
train: --resume step=x => 'step=x'; expected auto, never or step=N
train: --restarts=-1 => argument --restarts: -1 is less than 0
train: --restarts many => invalid whole number value: 'many'
train: optim.lr => 'optim.lr' has no value; expected key.path=value
train: --optim.lr => --optim.lr has no value; expected --optim.lr=value
train: optim.lr=fast => optim.lr is 'fast'
train: optim.lr='"1e-6"' => optim.lr is '1e-6'
train: optim.lr=-1 => optim.lr is -1
train: optim.lrr=1 => unknown key optim.lrr; did you mean optim.lr?
train: optimizer.lr=1 => unknown key optimizer
train: lr=1e-6 => unknown key lr; did you mean optim.lr?
train: optim.betas=[0.9] => optim.betas
train: trainer.steps=0 => trainer.steps is 0
train: trainer.steps=1.5 => trainer.steps is 1.5
train: trainer.steps=many => trainer.steps is 'many'
train: trainer.save_on_stop=maybe => trainer.save_on_stop is 'maybe'
train: trainer.loggers=[mlflo] => trainer.loggers
train: trainer.timeouts.rollouts=3 => trainer.timeouts
train: model.dtype=fp16 => model.dtype is 'fp16'; expected 'float32' or 'bfloat16'
train: model.path=none => none is not a directory
train: model.path=~/model => begins with ~, which only a shell replaces
train: model.path=bin => has only pickled weights
train: algorithm.name=reinforce => algorithm.name is 'reinforce'; expected one of 'sft', 'grpo', 'ppo', 'rloo'
train: algorithm.name=gspo => that one is {name: grpo, ratio: sequence
train: algorithm.gamma=0.9 => algorithm.gamma
train: algorithm.num_mini_batches=4096 => algorithm.num_mini_batches is 4096, but a step has only
train: data.train=none.jsonl => none.jsonl: no such data file
train: data.eval=none.jsonl => none.jsonl: no such data file
train: data.train=[D.jsonl,none.jsonl] => none.jsonl: no such data file
train: data.train=openai/gsm8k => pin it to a commit: openai/gsm8k@COMMIT
train: data.format=webdataset => data.format is 'webdataset'
train: data.overlong_rows=cut => data.overlong_rows is 'cut'
train: rollout.samples_per_prompt=1 => rollout.samples_per_prompt is 1; grpo compares a prompt's samples
train: trainer.max_lag=-1 => trainer.max_lag is -1; expected
train: trainer.max_lag=1 => trainer.max_lag is 1: engines sample while the trainer trains, but rollout.backend=native
train: trainer.max_lag=0 algorithm.name=sft => trainer.max_lag is 0, which is of RL, not of algorithm sft
train: trainer.max_lag=2 rollout.start.count=2 rollout.router_replay=rollout => rollout
train: trainer.max_lag=2 rollout.engines=[h:1] rollout.sleep=true => trainer.max_lag is 2: engines sample while
train: rollout.start.args=[--port=1] => --port=1: host and port of engines are chosen by the run; leave it out
train: rollout.start.args=['--seed 1'] => rollout.start.args: '--seed 1' is one word; write a list of words
train: rollout.engines='http://a:1,http://b:2' => rollout.engines: 'http://a:1,http://b:2' is one URL; write a list
train: rollout.push.address=http://h => rollout.push.address is 'http://h'
train: rollout.engines=[h:1] rollout.push.transport=file rollout.push.directory=/proc/x => rollout.push.directory /proc
train: 'eval.sets=[{name: a, data: D.jsonl, metrics: [absent:f]}]' => eval.sets: metric 'absent:f'
train: rollout.temperature=0 => rollout.temperature is 0
train: rollout.top_p=2 => rollout.top_p is 2
train: rollout.max_new_tokens=4096 => rollout.max_new_tokens is 4,096, but the model has 128 positions
train: rollout.layout.tp=2 => rollout.layout: layout tp=2,dp=auto needs a multiple of 2 ranks, but the job has 1
train: rollout.layout.tp=4 --layout dp=4 => rollout.layout: layout tp=4: tp=4 does not fit
train: layout.tp=4 => 6 attention heads are not a multiple of 4
train: --layout tp=64 => 6 attention heads are not a multiple of 64
train: layout.tp=two => layout.tp is 'two'
train: layout.fsdp=2 => unknown key layout.fsdp
train: layout.pp=5 => 5 stages, but the model has 4 layers
train: layout.virtual_stages=2 => leave them out at pp=1
train: layout.cp_mode=ulysses => leave it out at cp=1
train: layout.pp=2 layout.pp_split=[1,2] => it adds up to 3, but the model has 4 layers
train: critic.path=none algorithm.name=ppo => none is not a directory
train: critic.layout.tp=3 algorithm.name=ppo => critic.layout: layout tp=3,dp=auto needs a multiple of 3 ranks, but the job has 1
train: reference.path=none => none is not a directory
train: reference.layout.tp=4 --layout dp=4 => reference.layout: layout tp=4: tp=4 does not fit this llama model
train: reward.name=exactmatch => reward.name='exactmatch' is no built-in reward | did you mean 'exact_match'?
train: reward.import=absent_module:f => No module named 'absent_module'; put absent_module.py into the directory of the recipe
train: reward.import=rewards => reward.import: 'rewards'; expected module:function
train: reward.import=/mine.py:score => reward.import: '/mine.py:score'; expected module:function, such as mine:score
train: reward.name=mine:score => reward.name='mine:score' is no built-in | of yours, write import: 'mine:score' instead of name
train: reward=numeric_match => reward: 'numeric_match'; write {name: 'numeric_match'}
train: reward=mine:score => reward: 'mine:score'; write {import: 'mine:score'}
train: reward=[] => reward: the list is empty
train: 'reward={judge: {model: m, url: localhost:1, prompt: "{completion}"}}' => reward.judge.url: 'localhost:1'; expected a URL
train: 'reward={judge: {model: m, url: http://h/v1, prompt: "{text}"}}' => has no {completion} | {prompt}, {completion}, {answer}
train: reward.weight=heavy => reward.weight is 'heavy'
train: run_dir=used => run_dir used is not empty; choose another run_dir
train: run_dir=D.jsonl => run_dir D.jsonl is not empty
train: run_dir=/proc/run => run_dir /proc/run cannot be written
train: run_dir=done --resume never => it holds a run, which --resume auto would go on from
train: --resume step=3 => --resume step=3: run_dir run holds no run; leave it out to begin one
train: --device cuda => this process sees none here
train: model.path=none data.train=none.jsonl run_dir=used => 3 mistakes: | none is not | none.jsonl: no such | run_dir used
train: optim.lr=x trainer.steps=y => optim.lr is 'x' | trainer.steps is 'y'
"""
CASES = tuple(TABLE.strip().split("\n"))


def parts_of(case: str) -> tuple[list[str], list[str]]:
    """The command line of a case, and the words of its message."""
    line, _, words = case.partition(" => ")
    base, _, more = line.partition(":")
    return shlex.split(BASES[base] + more), words.split(" | ")
