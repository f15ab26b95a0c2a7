"""Losses and advantages by name and by import: against transcriptions in float64, and what mistakes say."""

import math
import statistics
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.cli.preflight import _check_function
from dovetail.errors import ConfigError
from dovetail.factory.custom import load_algorithm
from dovetail.nn.heads import is_separable
from dovetail.recipe.functions import FunctionSection, LossSection
from dovetail.recipe.schema import make_recipe
from dovetail.rewards.custom_modules import look_in, search_path
from dovetail.rewards.signatures import load
from dovetail.rl.advantages import whiten
from dovetail.rl.algorithms.table import make_algorithm
from dovetail.rl.correction import importance_weights
from dovetail.rl.custom import Custom, custom_advantages
from dovetail.rl.losses import PolicyLoss, weight_fields
from tests.helpers.loss_batches import counted, full_batch, random_stats
from tests.helpers.loss_numbers import LENGTHS, LONGEST, TRL_LOSSES, random_numbers
from tests.helpers.of_trl import of_trl
from tests.helpers.task_batches import SAMPLES, batch_of, recipe_of
from tests.helpers.tolerances import SUM_ORDER, assert_close, assert_sum_close

F64 = torch.float64


def cispo(p: float, old: float, a: float, low: float, high: float) -> tuple[float, float]:
    """Loss and its derivative: the clipped ratio is a constant."""
    ratio = min(max(math.exp(p - old), 1 - low), 1 + high)
    return -ratio * a * p, -ratio * a


def sapo(p: float, old: float, a: float, positive: float, negative: float) -> tuple[float, float]:
    tau, ratio = (positive if a > 0 else negative), math.exp(p - old)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a


@pytest.mark.parametrize("term", ["cispo", "sapo"])
def test_token_terms_equal_a_transcription(term: str) -> None:
    batch, loss = counted(full_batch()), {
        "cispo": PolicyLoss(term="cispo", clip_low=0.3, clip_high=0.1),
        "sapo": PolicyLoss(term="sapo", tau_positive=0.7, tau_negative=1.3),
    }[term]  # fmt: skip
    stats = random_stats(len(batch))
    result = loss(stats, batch)
    columns = zip(
        stats.logprob.tolist(),
        batch.fields["old_logprob"].tolist(),
        batch.fields["advantage"].tolist(),
        strict=True,
    )
    numbers = [
        cispo(*each, 0.3, 0.1) if term == "cispo" else sapo(*each, 0.7, 1.3) for each in columns
    ]
    (gradient,) = torch.autograd.grad(result.total, stats.logprob)
    terms = torch.tensor([value for value, _ in numbers], dtype=F64)
    assert_sum_close(result.total, terms.sum(), terms, SUM_ORDER)
    assert_close(gradient, torch.tensor([slope for _, slope in numbers], dtype=F64), SUM_ORDER)
    clipped = float(result.metrics["clip_fraction"].total)
    assert (0 < clipped < len(batch)) if term == "cispo" else clipped == 0
    assert is_separable(loss)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    batch = counted(full_batch("sequence"))
    signs = torch.tensor([0.7, -1.2, 0.0, 0.4, 0.0], dtype=F64)[batch.sequence_ids]
    batch, stats = batch.with_fields(advantage=signs), random_stats(len(batch))
    loss = PolicyLoss(term="gmpo", clip_low=0.25, clip_high=0.4)
    result = loss(stats, batch)
    terms = []
    for sequence in (0, 1, 3):
        mine = batch.sequence_ids == sequence
        a, product = float(signs[mine][0]), torch.ones((), dtype=F64)
        for p, old in zip(stats.logprob[mine], batch.fields["old_logprob"][mine], strict=True):
            ratio = (p - old).exp()
            bounded = ratio.clamp(math.exp(-0.25), math.exp(0.4))
            product = product * torch.minimum(ratio * a, bounded * a).abs() / abs(a)
        terms.append(-a * product ** (1 / int(mine.sum())))
    expected = torch.stack(terms).sum()
    assert_sum_close(result.total, expected, terms, SUM_ORDER)
    assert float(result.count) == 3
    actual, wanted = (torch.autograd.grad(x, stats.logprob)[0] for x in (result.total, expected))
    assert_close(actual, wanted, SUM_ORDER)
    assert not is_separable(loss)


@pytest.mark.parametrize("term", ["cispo", "gmpo", "sapo"])
def test_penalty_and_bonus_are_added_to_every_term(term: Any) -> None:
    batch = counted(full_batch())
    stats = random_stats(len(batch))
    bare = PolicyLoss(term=term)(stats, batch)
    both = PolicyLoss(term=term, kl_coef=0.3, kl_estimator="k2", entropy_coef=0.1)(stats, batch)
    kl = 0.5 * (stats.logprob - batch.fields["reference_logprob"]) ** 2
    terms = (bare.total, 0.3 * kl.sum(), -0.1 * stats.entropy.sum())
    assert_sum_close(both.total, torch.stack(terms).sum(), terms, SUM_ORDER)
    assert both.metrics.keys() == PolicyLoss(kl_coef=0.3)(stats, batch).metrics.keys()


@pytest.fixture(scope="module")
def trl() -> Mapping[str, Any]:
    return of_trl("trl_losses")


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_values_and_gradients_are_those_of_trl(name: str, trl: Mapping[str, Any]) -> None:
    numbers, settings = random_numbers(), dict(TRL_LOSSES[name][1])
    aggregation = settings.pop("aggregation", "token")
    batch = PackedBatch.pack(
        [Sequence(range(1, n + 2), mask=[False] + [True] * n) for n in LENGTHS]
    )
    fields = {name: x for name, x in numbers.items() if name not in ("logprob", "entropy")}
    batch = counted(batch).with_fields(**fields)
    if correction := settings.pop("correction", None):
        batch = batch.with_fields(rollout_weight=importance_weights(batch, **correction).token)
    batch = batch.with_fields(**weight_fields(batch, aggregation, LONGEST))
    logprob = numbers["logprob"].requires_grad_()
    result = PolicyLoss(**settings)(TokenStats(logprob, numbers["entropy"]), batch)
    loss = result.total / result.count
    (gradient,) = torch.autograd.grad(loss, logprob)
    expected = torch.tensor(trl[name]["gradient"], dtype=F64)
    # A term's derivative in its log-prob is of the size of the term: A e^d for the ratio, as for A.
    assert_sum_close(loss, torch.tensor(trl[name]["loss"], dtype=F64), expected, SUM_ORDER)
    assert_close(gradient, expected, SUM_ORDER)


OWN = '''
import torch


def clipped(stats, batch, *, cap=2.0):
    """Truncated importance sampling."""
    ratio = (stats.logprob - batch.fields["old_logprob"]).exp()
    loss = -batch.fields["advantage"] * ratio.detach().clamp(max=cap) * stats.logprob
    return loss, {"capped": ratio > cap}


clipped.separable = True


def whole(stats, batch):
    """Of whole sequences."""
    return -stats.logprob / batch.lengths[0]


def raises(stats, batch):
    return batch.fields["no such field"]


def flat(stats, batch):
    return torch.ones(len(batch))


def short(stats, batch):
    return stats.logprob[:1]


def scalar(stats, batch):
    return stats.logprob.sum()


def infinite(stats, batch):
    return 1 / (stats.logprob - stats.logprob)


def step(stats, batch):
    return -stats.logprob, {"step": stats.entropy}


def three(stats, batch):
    return -stats.logprob, {}, 1


def tensors(stats, batch):
    return -stats.logprob, stats.entropy


def centered(rewards, groups, batch, *, shift=0.0):
    return rewards - rewards.mean() + shift


def by_token(rewards, groups, batch):
    return batch.positions.double()


def two(rewards, groups, batch):
    return rewards[:2]


def none(rewards, groups, batch):
    return rewards / 0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_functions_of_a_test.py").write_text(OWN)
    return folder


def loaded(folder: Path, name: str = "grpo", **keys: Any) -> Any:
    """The algorithm of a recipe, with functions from a folder."""
    return load_algorithm(recipe_of(name, **keys), folder)


def section(name: str, **options: Any) -> LossSection:
    return LossSection.model_validate(
        {"import": f"own_functions_of_a_test:{name}", "options": options}
    )


def test_an_own_loss_takes_the_place_of_the_term_alone(folder: Path) -> None:
    keys: Any = {"kl_coef": 0.3, "entropy_coef": 0.1, "epochs": 2}
    loss = loaded(folder, loss=section("clipped", cap=1.1), **keys).loss
    batch = counted(full_batch("sequence"))
    stats = random_stats(len(batch))
    result = loss(stats, batch)
    ratio = (stats.logprob - batch.fields["old_logprob"]).exp().detach()
    term = -batch.fields["advantage"] * ratio.clamp(max=1.1) * stats.logprob
    d = stats.logprob - batch.fields["reference_logprob"]
    token = term + 0.3 * (torch.expm1(-d) + d) - 0.1 * stats.entropy
    terms = batch.fields["weight"] * token
    assert_sum_close(result.total, terms.sum(), terms, SUM_ORDER)
    assert float(result.count) == float(batch.fields["count"].sum())
    assert float(result.metrics["capped"].total) == float((ratio > 1.1).sum()) > 0
    assert result.metrics.keys() == {"capped", "kl_mean", "entropy_mean"}
    assert is_separable(loss) and not is_separable(loaded(folder, loss=section("whole")).loss)


def test_an_own_loss_of_supervised_rows(folder: Path) -> None:
    own = FunctionSection.model_validate({"import": "own_functions_of_a_test:whole"})
    loss = loaded(folder, "sft", loss=own).loss
    batch = counted(full_batch("token"))
    stats = random_stats(len(batch))
    assert_close(loss(stats, batch).total, -(stats.logprob / batch.lengths[0]).sum(), SUM_ORDER)
    assert not is_separable(loss) and is_separable(loaded(folder, "sft").loss)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (section("missing"), r"LookupError: module own_functions_of_a_test \(.*of_a_test.py\) has no function 'missing'"),
        (section("clipped", cup=1), r"TypeError: .*options has cup, which clipped\(stats, batch, cap\) does not take"),
        (section("raises"), r"LookupError: no 'no such field'; the fields of this run are advantage, .*, weight \(line 2\d"),
        (section("flat"), "its value depends on no log-prob"),
        (section("short"), r"the loss is a tensor \[1\] of .*; expected one number for each counted token, \[14\]"),
        (section("scalar"), r"the loss is a tensor \[\] of .*; expected"),
        (section("step"), "a metric cannot be called 'step'"),
        (section("three"), "the loss is a tuple; expected one number for each counted token"),
        (section("tensors"), r"metrics are a tensor \[14\] of .*; expected a mapping of names to tensors"),
        (section("infinite"), "its value or gradient is not finite"),
        (LossSection.model_validate({"import": "no_such_module:f"}), "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)  # fmt: skip
def test_mistakes_of_a_loss_name_the_function(folder: Path, given: LossSection, words: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^algorithm.loss {given.function} was tried before the run: .*{words}"
    ):
        loaded(folder, loss=given)


def own_section(name: str, **options: Any) -> FunctionSection:
    return FunctionSection.model_validate(
        {"import": f"own_functions_of_a_test:{name}", "options": options}
    )


def test_own_advantages_a_response_or_a_token(folder: Path) -> None:
    batch, (a, b) = full_batch(), (torch.arange(5.0), torch.zeros(5))
    of_responses, of_tokens = (
        loaded(folder, advantage=own_section(name)).custom_advantage
        for name in ("centered", "by_token")
    )
    assert loaded(folder).custom_advantage is None
    expected = torch.where(batch.mask, (a - 2)[batch.sequence_ids], 0)
    assert torch.equal(custom_advantages(of_responses, a, b, batch), expected)
    assert torch.equal(
        custom_advantages(of_tokens, a, b, batch),
        torch.where(batch.mask, batch.positions.double(), 0),
    )
    for name, words in (
        (
            "two",
            r"the advantage is a tensor \[2\] of .*; expected a number for each response, \[4\]",
        ),
        ("none", "not finite"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"^algorithm.advantage own_functions_of_a_test:{name} was tried .*{words}",
        ):
            loaded(folder, advantage=own_section(name))


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus(baseline: bool) -> None:
    """Rewards to go with each token's KL penalty, or rewards less their group's mean; whitened over all tokens."""
    samples = SAMPLES
    recipe = make_recipe(
        {"model": {"path": "m"}, "data": {"train": "d"}, "run_dir": "r",
         "algorithm": {"name": "reinforce_plus_plus", "group_baseline": baseline, "kl_coef": 0.2, "gamma": 0.9}}, "test"
    )  # fmt: skip
    algorithm: Any = recipe.algorithm
    assert (algorithm.kl_in, algorithm.kl_estimator) == (
        ("loss", "k2") if baseline else ("reward", "k1")
    )
    assert algorithm.normalize_advantage
    batch = batch_of(samples)
    draw = torch.Generator().manual_seed(4)
    old, reference = (torch.randn(len(batch), generator=draw, dtype=F64) for _ in range(2))
    batch = batch.with_fields(old_logprob=old, reference_logprob=reference)
    made: Any = make_algorithm(recipe, Custom())
    got = made.with_advantages(batch, samples).fields["advantage"]
    expected = torch.zeros(len(batch), dtype=F64)
    for s, sample in enumerate(samples):
        tokens = [t for t in range(len(batch)) if batch.sequence_ids[t] == s and batch.mask[t]]
        peers = [other.reward for other in samples if other.group == sample.group]
        following = 0.0
        for t in reversed(tokens):
            own = sample.reward if t == tokens[-1] else 0.0
            following = own - 0.2 * float(old[t] - reference[t]) + 0.9 * following
            expected[t] = sample.reward - sum(peers) / len(peers) if baseline else following
    assert_close(got, whiten(expected, batch.mask).float(), SUM_ORDER)


def test_losses_of_a_recipe() -> None:
    def algorithm(**keys: Any) -> Any:
        base = {"model": {"path": "m"}, "data": {"train": "d"}, "run_dir": "r"}
        return make_recipe({**base, "algorithm": keys}, "test").algorithm

    assert algorithm(loss="cispo").loss.name == "cispo"
    assert algorithm(name="rloo", loss={"import": "a:b", "options": {"c": 1}}).loss.options == {
        "c": 1
    }
    loss = loaded(Path(), loss={"name": "sapo", "options": {"tau_negative": 2.0}}).loss
    assert (loss.term, loss.tau_positive, loss.tau_negative) == ("sapo", 1.0, 2.0)
    for keys, words in (
        ({"loss": "cipso"}, "cipso"),
        ({"loss": {"name": "ppo", "import": "a:b"}}, "give name or import, not both"),
        (
            {"loss": {"name": "cispo", "options": {"tau": 1}}},
            "options has 'tau', but the loss cispo has no options",
        ),
        ({"loss": {"name": "sapo", "options": {"tau_positive": 0}}}, "expected a number above 0"),
        ({"loss": {"import": "a"}}, "'a'; expected module:function"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip is a bound of the loss ppo"),
        ({"loss": "gmpo", "ratio": "sequence"}, "the loss gmpo has a ratio of its own"),
        ({"name": "ppo", "advantage": {"import": "a:b"}}, "advantage"),
    ):
        with pytest.raises(ConfigError, match=words):
            algorithm(**keys)


def test_modules_of_a_recipe_come_before_installed_ones_and_replace_none_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for losses, rewards, and the check before ranks start."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "xdist.py").write_text(OWN)  # installed, too
    (tmp_path / "statistics.py").write_text("def mean(*_): return 'wrong'\n")
    (tmp_path / "rich").mkdir()  # no module
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "xdist.py").touch()
    sys.path.insert(
        0, str(tmp_path / "here")
    )  # as `python -m dovetail` does with the working directory
    entries = search_path(tmp_path)
    at = entries.index(str(tmp_path))
    assert (
        all("site-packages" not in entry for entry in entries[:at])
        and sysconfig.get_path("stdlib") in entries[:at]
    )
    assert PathFinder.find_spec("xdist", entries).origin == str(tmp_path / "xdist.py")  # type: ignore[union-attr]
    assert PathFinder.find_spec("statistics", entries).origin == statistics.__file__  # type: ignore[union-attr]
    for module in ("statistics", "statistics.x"):
        with pytest.raises(
            ConfigError,
            match=rf"{tmp_path}/statistics.py has the name of a module that .* rename it",
        ):
            look_in(tmp_path, module)
    look_in(tmp_path, "xdist")
    assert sys.path == entries and search_path(tmp_path) == entries
    (tmp_path / "jinja2.py").touch()
    with pytest.raises(ConfigError, match=r"jinja2.py has the name"):
        look_in(tmp_path, "xdist")
    (tmp_path / "jinja2.py").unlink()
    (tmp_path / "yaml.py").touch()
    PathFinder.invalidate_caches()
    with pytest.raises(ConfigError, match=r"yaml.py has the name"):
        look_in(tmp_path, "xdist")
    for check in (
        lambda: loaded(tmp_path, loss={"import": "xdist:clipped"}),
        lambda: load(
            {
                "name": None,
                "address": None,
                "function": "xdist:f",
                "options": {},
                "directory": str(tmp_path),
            }
        ),
        lambda: _check_function("reward", "xdist:clipped", tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"yaml.py has the name"):
            check()
