"""False alarms on runs that differ by rounding alone: the rules always, the model in acceptance."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from evalsuite.noise_doses import doses
from evalsuite.noise_measure import main as measuring
from evalsuite.noise_measure import measure, measure_variants
from evalsuite.noise_rates import clopper_pearson, false_alarms, replays
from evalsuite.noise_runs import (
    NoiseRun,
    RunPlan,
    Split,
    Variant,
    load_runs,
    load_variant,
    path_of,
    variant_path,
    write,
)
from evalsuite.noise_study import BEGIN, END, main
from evalsuite.verdict import Status

VERDICTS = Path(__file__).parents[2] / "docs" / "verdicts.md"


def made_up(runs: int, questions: int, flipping: float, seed: int) -> list[list[bool]]:
    """Runs of one build: a share of the questions is a coin toss, the rest stands."""
    draw = random.Random(seed)
    tossed = int(flipping * questions)
    return [
        [draw.random() < 0.5 if i < tossed else i % 20 > 0 for i in range(questions)]
        for _ in range(runs)
    ]


@pytest.mark.parametrize("by_question", [False, True])
def test_every_gate_keeps_its_rate_on_made_up_runs(by_question: bool) -> None:
    rows = made_up(60, 400, 0.08, seed=3)
    rates = false_alarms(rows, 400, 400, seed=5, by_question=by_question)
    assert [rate.gate for rate in rates] == [
        "paired 5 %", "paired 0.1 %", "statistical 5 %", "calibrated threshold 0.1 %", "threshold",
    ]  # fmt: skip
    for rate in rates:
        low, _ = clopper_pearson(rate.hits, rate.draws, 0.999)
        assert low <= rate.stated, rate
    # A test that never speaks would keep every rate: this one does, now and then.
    assert rates[0].hits > 0


def test_a_real_drop_is_no_false_alarm_and_is_counted() -> None:
    rows = made_up(20, 400, 0.02, seed=3)
    worse = [[right and i % 10 > 0 for i, right in enumerate(row)] for row in rows]
    rates = {r.gate: r for r in false_alarms([*rows, *worse], 400, 200, 1, by_question=False)}
    # Every second run lost a tenth: it falls below the floor whatever it is compared with.
    assert 80 <= rates["paired 5 %"].hits <= 120


@pytest.mark.parametrize(
    ("hits", "draws", "low", "high"),
    # Published: 0 of 3,000 is at most 0.12 % (two sides), 5 of 100 is 1.64 to 11.28 %.
    [(0, 3000, 0.0, 0.00123), (5, 100, 0.0164, 0.1128), (100, 100, 0.9638, 1.0)],
)
def test_clopper_pearson(hits: int, draws: int, low: float, high: float) -> None:
    found = clopper_pearson(hits, draws)
    assert found[0] == pytest.approx(low, abs=2e-4)
    assert found[1] == pytest.approx(high, abs=2e-4)


def test_two_runs_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--work", str(tmp_path)])
    assert stopped.value.code == 2
    assert "three runs or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["engine", "torch"])
def test_the_page_holds_rates_within_what_is_stated(name: str) -> None:
    begin, end = BEGIN.format(name=name), END.format(name=name)
    section = VERDICTS.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    rows = re.findall(
        r"^\| (\d+) \| [^|]+ \| ([\d.]+) \| ([\d.]+) \(([\d.]+) to [\d.]+\) \| "
        r"([\d.]+) \(([\d.]+) to [\d.]+\) \|$",
        section,
        re.MULTILINE,
    )
    assert len(rows) == 15  # five gates, three sizes
    for _, stated, _, low, _, low_mixed in rows:
        assert max(float(low), float(low_mixed)) <= float(stated) + 0.005
    runs = re.search(r"^(\d+) runs, ", section, re.MULTILINE)
    assert runs is not None
    assert "3,000 pairs a row" in section


def made_up_run(
    number: int, right: list[bool], tokens: list[list[float]], seed: int, shift: float = 0.0
) -> NoiseRun:
    """A run whose log-probabilities are noisy by 0.01 nats, and shifted token by token."""
    draw, moved = random.Random(seed), random.Random(0)
    rows = [[x + draw.gauss(0, 0.01) + moved.gauss(0, shift) for x in row] for row in tokens]
    return NoiseRun(number, len(right), right, [], rows, 1.0, 1.0, "made up")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve clean runs and three variants; every answer is 30 tokens, 5 % are coin tosses."""
    draw = random.Random(2)
    tokens = [[-draw.expovariate(5) for _ in range(30)] for _ in range(200)]
    rows = made_up(13, 200, 0.05, seed=4)
    for number in range(12):
        write(path_of(tmp_path, number), made_up_run(number, rows[number], tokens, number))
    worse = [right and i % 5 > 0 for i, right in enumerate(rows[12])]
    for name, shift, right in (
        ("clean", 0.0, rows[12]),
        ("noise:0.01", 0.006, rows[12]),
        ("experts-zeroed:8", 0.05, worse),
    ):
        replays_ = [made_up_run(0, right, tokens, 100 + i, shift).logprobs for i in range(2)]
        parted = [Split(3, 7, 0.25)]
        write(variant_path(tmp_path, name), Variant(name, right, parted, replays_, loads=[4, 5]))
    return tmp_path


def test_replay_of_an_unchanged_build_keeps_its_rate(folder: Path) -> None:
    found = replays(load_runs(folder), draws=60)
    assert (found.num_clean, found.failed) == (60, 0)
    assert found.ratios[0] == pytest.approx(1.0, abs=0.1)
    assert sum(p <= 0.5 for p in found.p_agreements) > 15  # and it does speak


def test_doses_under_noise(folder: Path) -> None:
    runs = load_runs(folder)
    clean, subtle, gross = doses(runs, folder, ["clean", "noise:0.01", "experts-zeroed:8"])
    assert not clean.is_seen_by_accuracy
    assert (clean.twice.status, clean.num_changed) == (Status.PASS, 1)
    # Two fifths of the noise between two replays: nothing sees it but their agreement.
    assert not subtle.is_seen_by_accuracy
    assert (subtle.once.status, subtle.twice.status) == (Status.PASS, Status.FAIL)
    assert subtle.ratio == pytest.approx(1.09, abs=0.04)
    assert gross.is_seen_by_accuracy
    assert gross.outcomes["vLLM -8 points"] is Status.FAIL
    assert gross.once.status is Status.FAIL


def test_the_section_of_a_small_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Twelve made-up runs have no run 0 with margins: give it what a measured one has.
    base = load_runs(folder)[0]
    margins = [[0.5] * 30 for _ in base.right]
    write(path_of(folder, 0), replace(base, token_ids=[[1] * 30] * 200, margins=margins))
    assert main(["--work", str(folder), "--draws", "20"]) == 0
    page = capsys.readouterr().out
    assert "12 runs, 12 of them full" in page
    assert "No accuracy gate sees 1 of these 2 doses. Of them replay sees 0 by one" in page
    assert re.search(r"^\| noise:0.01 \|.*\| · \| \*\*seen\*\* \|", page, re.MULTILINE)


@pytest.mark.slow
def test_the_model_itself(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the embedded model needs torch")
    plain = RunPlan(tmp_path / "plain", num_questions=40, num_replayed=20, dither=0.0)
    measure(plain, 2)
    first, second = load_runs(plain.folder)
    # On a CPU other batches change no bit in bfloat16; that is why the rounding is dithered.
    assert second.splits == []
    assert first.right == second.right
    plan = RunPlan(
        tmp_path / "dithered", num_questions=40, num_replayed=40, num_full=2, replay_every=1
    )
    measure(plan, 8, (0, 2))
    measure(plan, 8, (1, 2))
    runs = load_runs(plan.folder)
    assert [run.number for run in runs] == list(range(8))
    assert [run.num_asked == 40 for run in runs[:3]] == [True, True, False]
    assert all(0.8 < sum(run.right) / 40 <= 1.0 for run in runs)
    assert replays(runs, draws=20).failed == 0
    measure_variants(plan, [(0, "noise:0"), (1, "slots-dropped:1"), (2, "experts-zeroed:8")])
    found = doses(runs, plan.folder, ["noise:0", "slots-dropped:1", "experts-zeroed:8"])
    assert [one.is_seen_by_accuracy for one in found] == [False, False, True]
    assert [one.twice.status for one in found] == [Status.PASS, Status.FAIL, Status.FAIL]


@pytest.mark.slow
def test_moeserves_engine_is_a_side_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the embedded model needs torch")
    words = ["--work", str(tmp_path), "--engine", "--questions", "12", "--replayed", "6"]
    assert measuring([*words, "--runs", "2", "--variants", "noise:0", "experts-zeroed:8"]) == 0
    first, second = load_runs(tmp_path)
    assert first.right == second.right
    assert second.splits == []
    assert [len(row) for row in first.logprobs] == [len(ids) for ids in first.token_ids[:6]]
    # bfloat16 on a CPU: the same tokens as in large batches, where the margin leaves no doubt.
    dithered = RunPlan(tmp_path / "other", num_questions=12, num_replayed=6, dither=0.0)
    measure(dithered, 1)
    (other,) = load_runs(dithered.folder)
    assert other.right == first.right
    same, broken = (load_variant(tmp_path, name) for name in ("noise:0", "experts-zeroed:8"))
    assert same is not None
    assert broken is not None
    assert (same.right, same.splits) == (first.right, [])
    assert sum(broken.right) < 6
    assert measuring([*words, "--variants", "nonsense:1"]) == 1
