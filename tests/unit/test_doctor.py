"""The doctor names what is here, and notices a device that computes wrongly."""

import argparse

import pytest

from dovetail.cli.main import run_command
from dovetail.kernels.registry import KernelSet
from dovetail_tools.cli import doctor


def test_doctor_shows_versions_devices_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "\ntorch ",
        "\ndevices ",
        "\nchosen       cpu\n",
        "attention: reference",
        "\nall well\n",
    ):
        assert line in shown


def test_doctor_notices_wrong_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = KernelSet(logits=lambda x, weight: 1.05 * (x @ weight.T))
    monkeypatch.setattr(doctor, "kernels_for", lambda _: wrong)
    assert run_command(["doctor", "--device", "cpu"]) == 1
    assert "the self-test failed" in capsys.readouterr().out


def test_under_a_launcher_one_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert doctor.run(argparse.Namespace(device="cpu")) == 0
        told.append(capsys.readouterr().out)
    assert told[0].endswith("all well\n") and not told[1]
