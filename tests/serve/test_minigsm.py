"""The embedded model's text, tokenizer, trainer and file format."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moeserve.tiny import minigsm
from moeserve.tiny.checkpoint import load_model, save_model
from moeserve.tiny.corpus import CorpusSpec, batches, few_shot_prefix, make_batch, prompt_of
from moeserve.tiny.decode import greedy_replies
from moeserve.tiny.evaluate import is_right, last_number
from moeserve.tiny.export import export_best, rank
from moeserve.tiny.model import Layer, MoE, Routing, TinyConfig, TinyMoE
from moeserve.tiny.tokenizer import END_OF_TEXT_ID, train_tokenizer
from moeserve.tiny.train import TrainSpec, learning_rate, make_optimizer, train_step
from moeserve.tiny.writing import (
    DIFFICULTIES,
    FAMILIES,
    Dice,
    add,
    div,
    mul,
    percent,
    sub,
    with_commas,
)

SMALL = TinyConfig(
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    head_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_width=16,
)
MARK = re.compile(r"<<([0-9+*/.\-]+)=(-?\d+)>>(-?[\d,]+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a small tokenizer trained on a hundred problems."""
    docs = [few_shot_prefix([example]) for example in minigsm.generate("train", 100, 3)]
    return train_tokenizer(docs, SMALL.vocab_size)


@pytest.fixture
def model() -> TinyMoE:
    """Return a small model with random weights, already rounded to what bf16 files hold."""
    torch.manual_seed(0)
    model = TinyMoE(SMALL)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def first_moe(model: TinyMoE) -> MoE:
    """Return the experts of the first layer."""
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    return layer.moe


# --- text -----------------------------------------------------------------------------------


def test_canonical_splits_have_gsm8k_sizes_and_share_no_question() -> None:
    train, test = minigsm.load_split("train"), minigsm.load_split("test")
    assert (len(train), len(test)) == (7473, 1319)
    hashes = [
        {hashlib.sha256(e.question.encode()).hexdigest() for e in rows} for rows in (train, test)
    ]
    assert [len(h) for h in hashes] == [7473, 1319]
    assert not hashes[0] & hashes[1]
    assert {minigsm.split_of(e.question) for e in train} == {"train"}
    assert {minigsm.split_of(e.question) for e in test} == {"test"}
    assert {e.family for e in test} == set(minigsm.family_names())
    assert len(minigsm.family_names()) >= 24


def test_changed_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(minigsm.SPLIT_SEEDS, "test", 30)
    with pytest.raises(ValueError, match=r"MiniGSM test: sha256 .* expected"):
        minigsm.load_split("test")


@pytest.mark.parametrize("split", ["valid", "Train"])
def test_unknown_split_names_the_known_ones(split: str) -> None:
    with pytest.raises(ValueError, match="'train', 'test'"):
        minigsm.generate(split, 1, 0)  # type: ignore[arg-type]


def test_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="n: -1"):
        minigsm.generate("train", -1, 0)


@pytest.mark.parametrize("difficulty", sorted(DIFFICULTIES))
@pytest.mark.parametrize("name", minigsm.family_names())
def test_each_family_is_exact(name: str, difficulty: str) -> None:
    dice = Dice(Random(f"{name}{difficulty}"), DIFFICULTIES[difficulty])
    for _ in range(40):
        problem = FAMILIES[name](dice)
        marks = MARK.findall("\n".join(problem.lines))
        assert 2 <= len(marks) <= 6
        for expression, value, shown in marks:
            assert eval(expression) == int(value) == int(shown.replace(",", ""))
        assert marks[-1][2] == problem.answer
        assert problem.question.endswith(("?", "."))
        known = set(map(int, re.findall(r"\d+", problem.question.replace(",", ""))))
        known |= {1, 2, 3, 4, 5, 6, 8, 40, 60, 100}  # words such as twice, a third, an hour
        for expression, value, _ in marks:
            operands = set(map(int, re.findall(r"\d+", expression)))
            # The quotient of a division with rest and the hours of a clock have no mark.
            if name not in ("left_over", "clock"):
                assert operands <= known, f"{expression}: a number from nowhere in {problem}"
            known.add(abs(int(value)))


def test_generation_depends_on_the_seed_alone() -> None:
    first = minigsm.generate("train", 50, 1)
    assert first == minigsm.generate("train", 50, 1)
    assert first[:20] == minigsm.generate("train", 20, 1)
    assert first != minigsm.generate("train", 50, 2)


def test_jsonl_has_gsm8k_fields_and_answer_mark() -> None:
    rows = minigsm.generate("test", 5, 0)
    parsed = [json.loads(line) for line in minigsm.to_jsonl(rows).splitlines()]
    assert [set(row) for row in parsed] == [{"question", "answer"}] * 5
    for row, example in zip(parsed, rows, strict=True):
        assert row["answer"].splitlines()[-1] == f"#### {example.gold}"


def test_command_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["minigsm", "--out", str(tmp_path / "data")])
    minigsm.main()
    for split, digest in minigsm.SPLIT_SHA256.items():
        content = (tmp_path / "data" / f"{split}.jsonl").read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest


def test_marks() -> None:
    assert str(add(3, 4, 5)) == "<<3+4+5=12>>12"
    assert str(sub(mul(3, 4), 20)) == "<<12-20=-8>>-8"
    assert str(with_commas(add(1000, 250))) == "<<1000+250=1250>>1,250"
    assert str(percent(40, 15)) == "<<40*15/100=6>>6"
    with pytest.raises(ValueError, match="7/2 is not exact"):
        div(7, 2)
    with pytest.raises(ValueError, match="15% of 7"):
        percent(7, 15)


# --- tokenizer and corpus -------------------------------------------------------------------


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _shared_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


_CACHE: list[Tokenizer] = []


def _shared_tokenizer() -> Tokenizer:
    if not _CACHE:
        docs = [few_shot_prefix([e]) for e in minigsm.generate("train", 100, 3)]
        _CACHE.append(train_tokenizer(docs, SMALL.vocab_size))
    return _CACHE[0]


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.encode("<<123*45=5535>>5535").tokens
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("1234555355535")


def test_vocabulary_must_hold_all_bytes() -> None:
    with pytest.raises(ValueError, match="vocab_size: 200"):
        train_tokenizer(["text"], 200)


def test_pieces_of_a_document_encode_like_the_whole(tokenizer: Tokenizer) -> None:
    spec = CorpusSpec(tokenizer.to_str(), 0, "standard", num_rows=4, row_tokens=400)
    batch = make_batch(spec, 0)
    assert len(batch.tokens) == len(batch.is_answer) == 4 * 401
    for row in range(4):
        ids = list(batch.tokens[row * 401 : (row + 1) * 401])
        for end in [i for i, token in enumerate(ids) if token == END_OF_TEXT_ID][:1]:
            text = tokenizer.decode(ids[:end])
            assert tokenizer.encode(text).ids == ids[:end]
            assert text.startswith(("Question: ", "Q: "))


def test_batches_do_not_depend_on_workers(tokenizer: Tokenizer) -> None:
    spec = CorpusSpec(tokenizer.to_str(), 5, "standard", num_rows=2, row_tokens=64)
    alone, spread = list(batches(spec, 6, 0)), list(batches(spec, 6, 2))
    assert alone == spread
    assert alone[0] != alone[1]


def test_answer_flags_cover_answers_only(tokenizer: Tokenizer) -> None:
    spec = CorpusSpec(tokenizer.to_str(), 1, "standard", num_rows=1, row_tokens=300)
    batch = make_batch(spec, 3)
    pairs = zip(batch.tokens, batch.is_answer, strict=True)
    words = "".join(tokenizer.decode([token]) for token, flag in pairs if not flag)
    assert "<<" not in words
    assert "####" not in words
    assert "?" in words


# --- model and files ------------------------------------------------------------------------


def test_gathered_and_dense_experts_agree(model: TinyMoE) -> None:
    x = torch.randn(50, SMALL.hidden_size)
    moe = first_moe(model)
    probs = moe.router(x).softmax(-1)
    weights, ids = probs.topk(2, dim=-1)
    torch.testing.assert_close(moe._gathered(x, weights, ids), moe._dense(x, weights, ids))


def test_balance_loss_is_one_at_perfect_balance(model: TinyMoE) -> None:
    moe = first_moe(model)
    moe.router.weight.data = torch.eye(8, 32) * 50
    x = torch.zeros(8, 32)
    for token in range(8):
        x[token, token] = 1.0
        x[token, (token + 1) % 8] = 0.99
    routing = Routing()
    moe(x, routing)
    assert routing.balance_losses[0].item() == pytest.approx(1.0, rel=1e-3)
    moe(x[:1], routing)
    assert routing.balance_losses[1].item() > 3.0


def test_folder_loads_in_transformers_with_equal_logits(
    model: TinyMoE, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    save_model(model, tokenizer, tmp_path)
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours, _ = load_model(tmp_path)
    tokens = torch.randint(SMALL.vocab_size, (3, 40))
    with torch.inference_mode():
        expected, got = theirs(tokens).logits, ours(tokens)
    assert (got - expected).norm() / expected.norm() < 1e-4
    assert torch.equal(model(tokens).argmax(-1), expected.argmax(-1))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = prompt_of(minigsm.generate("test", 1, 0)[0]) + " <<3*40=120>>120 \u00fc\u4f60\n\n"
    assert auto(text)["input_ids"] == tokenizer.encode(text).ids
    assert auto.decode(tokenizer.encode(text).ids) == text
    assert (auto.eos_token_id, auto.eos_token) == (END_OF_TEXT_ID, "<|endoftext|>")
    chat = auto.apply_chat_template([{"role": "user", "content": "2+2?"}], tokenize=False)
    assert chat == "Question: 2+2?\nAnswer:"


def test_saved_folder_reads_back_bit_equal(
    model: TinyMoE, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(model, tokenizer, tmp_path)
    again, same_tokenizer = load_model(tmp_path)
    assert again.config == SMALL
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert same_tokenizer.to_str() == tokenizer.to_str()


# --- training and evaluation ----------------------------------------------------------------


def test_learning_rate_warms_up_and_ends_near_zero() -> None:
    spec = TrainSpec(steps=100, warmup_steps=10, peak_lr=1.0)
    rates = [learning_rate(spec, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(1 / 90)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_few_steps_lower_the_loss_the_same_way_twice(tokenizer: Tokenizer) -> None:
    spec = TrainSpec(model=SMALL, rows=4, row_tokens=128, steps=30, warmup_steps=3)
    corpus = CorpusSpec(tokenizer.to_str(), 0, "gentle", spec.rows, spec.row_tokens)
    runs = []
    for _ in range(2):
        torch.manual_seed(spec.seed)
        model = TinyMoE(SMALL)
        optimizer = make_optimizer(model, spec)
        losses = [float(train_step(model, optimizer, b, spec)[0]) for b in batches(corpus, 25, 0)]
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][0] > 5.0
    assert runs[0][-1] < runs[0][0] - 1.0


def test_batched_greedy_equals_one_by_one_without_cache(
    model: TinyMoE, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.tiny.decode.MAX_NEW_TOKENS", 8)
    shots, asked = minigsm.generate("train", 2, 0), minigsm.generate("test", 4, 0)
    replies = greedy_replies(model, tokenizer, shots, asked)
    for row, example in enumerate(asked):
        ids = tokenizer.encode(few_shot_prefix(shots) + prompt_of(example)).ids
        assert replies.prompt_tokens[row] == len(ids)
        start = len(ids)
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected = ids[start:]
        if END_OF_TEXT_ID in expected:
            expected = expected[: expected.index(END_OF_TEXT_ID)]
        assert replies.token_ids[row] == expected
    layers = replies.expert_counts.sum(1)
    assert layers[0] == layers[1] > 0


@pytest.mark.parametrize(
    ("reply", "gold", "right"),
    [
        (" So <<3*4=12>>12.\n#### 12", "12", True),
        (" 1,250", "1250", True),
        ("#### -7", "7", True),
        ("#### 13", "12", False),
        ("no number", "12", False),
    ],
)
def test_scoring_reads_the_last_number(reply: str, gold: str, right: bool) -> None:
    example = minigsm.Example("q", f"#### {gold}", "f")
    assert is_right(reply, example) is right
    assert last_number("") == ""


def test_ranking_prefers_the_range_then_the_aim() -> None:
    reports: list[dict[str, object]] = [{"accuracy": a} for a in (0.89, 0.99, 0.91, 0.96, 0.5)]
    assert [r["accuracy"] for r in rank(reports)] == [0.96, 0.91, 0.99, 0.89, 0.5]


def test_export_packs_the_ranked_folders(tmp_path: Path) -> None:
    reports: list[dict[str, object]] = []
    for step, accuracy in ((1, 0.5), (2, 0.94), (3, 0.99)):
        folder = tmp_path / "run" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(step))
        reports.append({"step": step, "accuracy": accuracy, "folder": folder.name})
    (tmp_path / "run" / "train_report.json").write_text("{}")
    export_best(tmp_path / "run", reports[:1], tmp_path / "out", "name", 2)
    packed = export_best(tmp_path / "run", reports, tmp_path / "out", "name", 2)
    assert sorted((tmp_path / "out").glob("*.tar")) == packed
    assert [path.name for path in packed] == ["name-2.tar", "name-3.tar"]
    with tarfile.open(packed[0]) as archive:
        member = archive.extractfile("minigsm-tiny/config.json")
        assert member is not None
        assert member.read() == b"2"
    assert (tmp_path / "out" / "name-report.json").read_text() == "{}"
