"""Whole runs under pp and cp: the first steps and the saved models of one rank, whatever the schedule."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.golden.job import Played, rl, sft, write_inputs
from tests.helpers.checkpoints import tensors_of
from tests.helpers.program import here
from tests.helpers.tolerances import CURVE_FP32, worst_error
from tests.helpers.training_layouts import RECIPES, assert_same_rl, assert_same_sft, played_on

DEPTH = 5
STEPS = 3
RL_STEPS = 2  # the second one samples from what the first has learned
ALL = "pp=2,cp=2,dp=2"
OPTIM = {
    "eps": 1e-4
}  # AdamW divides gradients that are noise by no less: what is saved is comparable
TRAINER = {"steps": STEPS, "tokens_per_batch": 48, "save_every": 2}  # several micro-batches a stage
# layout, what else the recipe says of it, how much is computed again
CUTS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "all": (ALL, {}, "none"),
    "interleaved": ("pp=2,cp=2", {"virtual_stages": 2, "schedule": "interleaved"}, "selective"),
    "zero_bubble": ("pp=2,cp=2", {"schedule": "zero_bubble"}, "full"),
    "zero_bubble_selective": ("pp=4,tp=2", {"schedule": "zero_bubble"}, "selective"),
    "gpipe": ("pp=2,dp=2", {"schedule": "gpipe", "pp_split": [1, 4]}, "full"),
    "gather": ("cp=4", {"cp_mode": "gather"}, "selective"),
}
QUICK = (("tied", "zero_bubble"),)
RUNS = [
    pytest.param(kind, cut, marks=() if (kind, cut) in QUICK else pytest.mark.soak)
    for kind in ("tied", "untied")
    for cut in CUTS
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    return {
        name: write_inputs(folder / name / "in", depth=DEPTH, tied=name == "tied")
        for name in ("tied", "untied")
    }


@pytest.fixture(scope="module")
def alone(written: dict[str, Path]) -> Callable[[str], tuple[Played, Path]]:
    """Fine-tuning on one rank, all tokens of a step at once: what it saw, and where it wrote."""

    def played(name: str) -> tuple[Played, Path]:
        folder = written[name]
        given = sft(
            folder,
            folder.parent / "one",
            trainer={**TRAINER, "tokens_per_batch": 4096},
            optim=OPTIM,
        )
        return played_on("", given), Path(given["run_dir"])

    return cache(played)


def cut_run(given: Mapping[str, Any], cut: str) -> Played:
    layout, more, recompute = CUTS[cut]
    trainer = {**given["trainer"], "activation_checkpointing": recompute}
    return played_on(layout, {**given, "layout": more, "trainer": trainer})


@pytest.mark.parametrize(("kind", "cut"), RUNS)
def test_fine_tuning(
    written: dict[str, Path], alone: Callable[[str], tuple[Played, Path]], kind: str, cut: str
) -> None:
    """The curve; and the checkpoints on the way and the model at the end, which transformers loads."""
    inputs = written[kind]
    given = sft(inputs, inputs.parent / cut, trainer=TRAINER, optim=OPTIM)
    expected, folder = alone(kind)
    assert_same_sft(cut_run(given, cut), expected)
    run_dir = Path(given["run_dir"])
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step_??????"))
    assert saved == ["step_000002", "step_000003"]
    for where in ("checkpoints/step_000002", "hf"):
        assert_same_model(run_dir / where, folder / where, run_dir / "as_hf")
    before = tensors_of(inputs / "model")
    assert worst_error(tensors_of(run_dir / "hf"), before)[0] > CURVE_FP32, "nothing was learned"


def assert_same_model(path: Path, expected: Path, scratch: Path) -> None:
    """Of two checkpoints, sharded or not: the names, and tensors as near as the curves. transformers loads both."""
    found = []
    for i, each in enumerate((path, expected)):
        if not (each / "model.safetensors").exists():
            folder = scratch / f"{each.name}-{i}"
            assert here("inspect", each, "--verify").code == 0
            assert here("convert", each, folder, "--to", "hf").well
            each = folder
        model = AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
        tensors = tensors_of(each)
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
        found.append(tensors)
    error, name = worst_error(*found)
    assert error <= CURVE_FP32, f"{path} {name}: {error:.1e}"


def rl_recipe(inputs: Path, name: str, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """Some steps of one of the algorithms, with a reward that a random model gets some of."""
    reward = {"import": "digit_rewards:share_of_digits"}
    trainer = {"steps": RL_STEPS, "prompts_per_step": 4, "tokens_per_batch": 128}
    return rl(
        inputs, run_dir, name, algorithm=RECIPES[name], reward=reward, trainer=trainer, **sections
    )


@pytest.fixture(scope="module")
def rl_alone(written: dict[str, Path]) -> Callable[[str], Played]:
    """An algorithm on one rank."""
    folder = written["tied"]
    return cache(lambda name: played_on("", rl_recipe(folder, name, folder.parent / f"{name}-one")))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param("grpo", "interleaved", marks=pytest.mark.soak),
        pytest.param("grpo", "all", marks=pytest.mark.soak),
        pytest.param("ppo", "all", marks=pytest.mark.soak),
        pytest.param("ppo", "zero_bubble", marks=pytest.mark.soak),
        pytest.param("ppo", "interleaved", marks=pytest.mark.soak),
        pytest.param("grpo", "zero_bubble_selective", marks=pytest.mark.soak),
        pytest.param("ppo", "gather", marks=pytest.mark.soak),
    ],
)
def test_rl(
    written: dict[str, Path], rl_alone: Callable[[str], Played], name: str, cut: str
) -> None:
    """By the rule of the contract, on identical sampled ids."""
    folder = written["tied"]
    assert_same_rl(
        cut_run(rl_recipe(folder, name, folder.parent / f"{name}-{cut}"), cut), rl_alone(name)
    )


@pytest.mark.parametrize(
    ("layout", "critic", "reference", "rollout"),
    [
        pytest.param(
            "pp=2,cp=2", {"tp": 2, "dp": 2}, {"cp": 4}, {"tp": 2, "dp": 2}, marks=pytest.mark.soak
        ),  # test_train.py has a critic with a layout of its own
        pytest.param(
            "tp=2,dp=2",
            {"pp": 2, "cp": 2, "schedule": "zero_bubble"},
            {"pp": 4},
            {"pp": 2, "cp": 2},
            marks=pytest.mark.soak,
        ),
    ],
)
def test_every_model_may_have_a_layout_of_its_own(
    written: dict[str, Path],
    rl_alone: Callable[[str], Played],
    layout: str,
    critic: dict[str, Any],
    reference: dict[str, Any],
    rollout: dict[str, Any],
) -> None:
    """Policy, critic, reference and sampler over the same four ranks, each in its own way: the numbers of one rank."""
    folder = written["tied"]
    given = rl_recipe(
        folder,
        "ppo",
        folder.parent / f"ppo-own-{layout}",
        critic={"layout": critic},
        reference={"layout": reference},
        rollout={"layout": rollout},
    )
    assert_same_rl(played_on(layout, given), rl_alone("ppo"))
