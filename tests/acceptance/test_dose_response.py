"""Which gate sees which dose: on made-up answers always, on the embedded model in acceptance."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from evalsuite.config import Calibration, load_config
from evalsuite.dose_response import (
    ACCURACY_GATES,
    BEGIN,
    END,
    GATES,
    OTHER_KERNELS,
    Response,
    main,
    respond,
    responses,
)
from evalsuite.verdict import Status
from moeserve.tiny import measure as measuring
from moeserve.tiny import report
from moeserve.tiny.measure import AGAIN, BFLOAT16, CLEAN, FAULTS, Measured, Plan, load, measure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "embedded-model.md"
VERDICTS = ROOT / "docs" / "verdicts.md"
SHARE_RIGHT = 310
N = 330
NOISE = dict.fromkeys(range(50), 1e-06)


def answers(lost: int = 0, texts_changed: int = 0, shift: float = 0.0) -> Measured:
    """A variant of a model that answers 310 of 330, with log-probabilities of 50 replies."""
    right = [index < SHARE_RIGHT - lost for index in range(N)]
    texts = [f"reply {index}{'!' if index < texts_changed else ''}" for index in range(N)]
    logprobs = [[-0.01 * (token + 1) - shift for token in range(40)] for _ in range(50)]
    return Measured("made up", texts, right, logprobs=logprobs)


def seen(response: Response) -> set[str]:
    return {gate for gate, status in response.outcomes.items() if status is Status.FAIL}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (answers(), set()),
        (answers(texts_changed=1), {"equal"}),
        # 5 lost, none gained: one-sided p = 1/32.
        (answers(lost=5, texts_changed=5), {"equal", "paired 5 %"}),
        (answers(lost=4, texts_changed=4), {"equal"}),
        # 10 lost: below the floor of 0.9194 too, and p = 1/1024.
        (answers(lost=10, texts_changed=10), {"equal", "threshold", "paired 5 %", "paired 0.1 %"}),
        (answers(shift=5e-7), set()),
        (answers(shift=5e-5), {"replay"}),
        (answers(shift=0.01), {"replay", OTHER_KERNELS}),
    ],
)
def test_each_gate_answers_as_its_rule_says(variant: Measured, expected: set[str]) -> None:
    response = respond(answers(), variant, NOISE)
    assert tuple(response.outcomes) == GATES
    assert seen(response) == expected


def test_public_rules_need_many_lost_points() -> None:
    # 8 points of 330 are 26.4 questions; TensorRT-LLM's offset is 6.4 points, 21.1 questions.
    for lost, rules in (
        (21, set()),
        (22, {"TensorRT-LLM"}),
        (27, {"TensorRT-LLM", "vLLM -8 points"}),
    ):
        response = respond(answers(), answers(lost=lost), NOISE)
        assert seen(response) & {"TensorRT-LLM", "vLLM -8 points"} == rules


def test_a_folder_without_measurements_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--work", str(tmp_path)])
    assert stopped.value.code == 2
    assert "measure first" in capsys.readouterr().err


def table_names(page: Path, begin: str) -> list[str]:
    text = page.read_text(encoding="utf-8").partition(begin)[2].partition(END)[0]
    return re.findall(r"^\| `?([a-z0-9-]+(?::[\d.]+(?:@\d)?)?)`? \|", text, re.MULTILINE)


def test_pages_name_the_faults_that_are_measured() -> None:
    named = [name for name in table_names(PAGE, "### Accuracy under faults\n") if ":" in name]
    assert named == list(FAULTS)
    assert report.COMMAND in PAGE.read_text(encoding="utf-8")
    section = [name for name in table_names(VERDICTS, BEGIN) if ":" in name]
    assert section == list(FAULTS)


def test_thresholds_are_the_measured_accuracy() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(r"\*\*([\d.]+) \(.*?; (\d+) of the first (\d+)\.", page, re.DOTALL)
    assert found is not None
    for name in ("cpu", "torch-grouped-mm"):
        path = ROOT / "configs" / "moe-refactor" / f"MiniGSM-tiny-{name}.yaml"
        config = load_config(path)
        assert config.num_questions == int(found[3])
        accuracy = int(found[2]) / int(found[3])
        assert config.accuracy_threshold == round(accuracy, 2)
        # Repeats are bit-equal here; the file allows three answers, for other processors.
        assert isinstance(config.calibration, Calibration)
        assert config.calibration.sigma_run == 0.0
        assert config.calibration.num_questions == config.num_questions
        assert accuracy - 4 / config.num_questions < config.effective_floor
        assert config.effective_floor <= accuracy - 3 / config.num_questions
    assert 90 < float(found[1]) < 98


def test_measuring_goes_on_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def one(plan: Plan, name: str) -> Measured:
        if name == "noise:0.1" and "cut" not in asked:
            asked.append("cut")
            raise KeyboardInterrupt
        asked.append(name)
        return replace(answers(), name=name)

    monkeypatch.setattr(measuring, "measure_one", one)
    names = ("noise:0.01", "noise:0.1", "experts-zeroed:1@2")
    with pytest.raises(KeyboardInterrupt):
        measure(Plan(tmp_path), names)
    measure(Plan(tmp_path), names)
    assert asked == [CLEAN, "noise:0.01", "cut", "noise:0.1", "experts-zeroed:1@2"]
    assert load(tmp_path, "experts-zeroed:1@2") == replace(answers(), name="experts-zeroed:1@2")
    assert load(tmp_path, BFLOAT16) is None


@pytest.mark.slow
def test_doses_on_the_embedded_model(tmp_path: Path) -> None:
    plan = Plan(tmp_path, num_questions=150, num_whole=150, num_replayed=40, batch_size=150)
    subtle = ("noise:0.01", "slots-dropped:1", "expert-scale:0.1")
    measure(plan, (CLEAN, AGAIN, "experts-zeroed:8", *subtle))
    found = {one.name: one for one in responses(tmp_path)[0]}
    assert seen(found[AGAIN]) <= {"equal"}
    assert seen(found["experts-zeroed:8"]) >= {*ACCURACY_GATES, "replay", OTHER_KERNELS}
    for name in subtle:
        assert not found[name].is_seen_by(ACCURACY_GATES), name
        assert found[name].is_seen_by(["replay"]), name
