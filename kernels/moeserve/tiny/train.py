"""Train the embedded model: `python -m moeserve.tiny.train --out DIR`.

Receives a seed; writes one model folder for each evaluated checkpoint, and `train_report.json`
with the numbers to pick one by. The defaults are those of the packaged weights. The schedule
counts steps, never time, so a run can be repeated; the text is the same bit for bit, the weights
are not, because CUDA adds in no fixed order. The text is made by `corpus`, replies by `decode`;
which checkpoint is worth shipping is decided in `export`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from moeserve.tiny.checkpoint import load_model, save_model
from moeserve.tiny.corpus import Batch, CorpusSpec, batches, few_shot_prefix
from moeserve.tiny.decode import greedy_replies
from moeserve.tiny.evaluate import is_right, summarise
from moeserve.tiny.export import export_best
from moeserve.tiny.minigsm import SPLIT_ROWS, SPLIT_SEEDS, generate
from moeserve.tiny.model import Routing, TinyConfig, TinyMoE
from moeserve.tiny.tokenizer import train_tokenizer
from moeserve.tiny.writing import DIFFICULTIES

log = logging.getLogger("moeserve.tiny.train")

NUM_SHOTS = 5
# Documents of the tokenizer's own training text, and shots in each.
TOKENIZER_DOCS, TOKENIZER_SHOTS = 3000, 5
# Where in the run checkpoints are evaluated, as fractions of its steps.
EVAL_FRACTIONS = (0.4, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class TrainSpec:
    """One training run.

    Attributes:
        peak_lr: AdamW's learning rate after warm-up; it then falls linearly to zero.
        balance: weight of the load-balancing loss, per layer.
        question_weight: loss weight of the question's tokens, which are random by nature;
            answer tokens weigh 1.
    """

    model: TinyConfig = field(default_factory=TinyConfig)
    difficulty: str = "standard"
    seed: int = 0
    steps: int = 3600
    rows: int = 64
    row_tokens: int = 1024
    peak_lr: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    balance: float = 0.02
    question_weight: float = 0.1


PRESETS = {
    # The packaged weights: 6.83 M parameters, 200 s on one H200.
    "standard": TrainSpec(),
    # For a machine without a GPU: the code path and the folder's form, not the accuracy.
    "cpu": TrainSpec(difficulty="gentle", rows=8, row_tokens=256, warmup_steps=50),
}


@dataclass(frozen=True)
class Options:
    """Where and on what to run; nothing here changes the weights but the device's arithmetic."""

    out: Path
    device: str
    workers: int
    eval_questions: int
    eval_fractions: tuple[float, ...]
    log_every: int
    export: Path | None
    export_count: int
    name: str


def make_tokenizer(spec: TrainSpec) -> Tokenizer:
    """Train the tokenizer on MiniGSM's training split; the same spec gives the same one."""
    num_rows = TOKENIZER_DOCS * TOKENIZER_SHOTS
    rows = generate("train", num_rows, spec.seed, DIFFICULTIES[spec.difficulty])
    step = TOKENIZER_SHOTS
    docs = [few_shot_prefix(rows[at : at + step]) for at in range(0, num_rows, step)]
    return train_tokenizer(docs, spec.model.vocab_size)


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Return the rate of a step: linear warm-up, then linear decay to zero at the end."""
    if step < spec.warmup_steps:
        return spec.peak_lr * (step + 1) / spec.warmup_steps
    return spec.peak_lr * (spec.steps - step) / max(1, spec.steps - spec.warmup_steps)


def make_optimizer(model: TinyMoE, spec: TrainSpec) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    is_cuda = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=spec.peak_lr, betas=(0.9, 0.95), fused=is_cuda)


def unpack(batch: Batch, spec: TrainSpec, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets [rows, row_tokens] int64 and loss weights of the same shape."""
    shape = (spec.rows, spec.row_tokens + 1)
    tokens = torch.frombuffer(batch.tokens, dtype=torch.uint16).view(shape)
    tokens = tokens.to(torch.int64).to(device)
    is_answer = torch.frombuffer(batch.is_answer, dtype=torch.uint8).view(shape)
    answer = is_answer[:, 1:].to(device, torch.float32)
    weights = answer + (1 - answer) * spec.question_weight
    return tokens[:, :-1], tokens[:, 1:], weights


def train_step(
    model: TinyMoE, optimizer: torch.optim.Optimizer, batch: Batch, spec: TrainSpec
) -> tuple[Tensor, Tensor]:
    """Do one step; return the language loss and the mean balance loss as scalars on the device."""
    device = model.embedding.weight.device
    tokens, targets, weights = unpack(batch, spec, device)
    routing = Routing()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens, routing=routing)
    each = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    loss = (each * weights.flatten()).sum() / weights.sum()
    balance = torch.stack(routing.balance_losses)
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss + spec.balance * balance.sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), balance.mean().detach()


def evaluate_folder(
    folder: Path, spec: TrainSpec, num_questions: int, device: torch.device
) -> dict[str, object]:
    """Evaluate a saved checkpoint in float32, and on a GPU in bf16 too, with the flips between."""
    knobs = DIFFICULTIES[spec.difficulty]
    asked = generate("test", SPLIT_ROWS["test"], SPLIT_SEEDS["test"], knobs)[:num_questions]
    shots = generate("train", NUM_SHOTS, SPLIT_SEEDS["train"], knobs)
    model, tokenizer = load_model(folder)
    replies = greedy_replies(model.to(device), tokenizer, shots, asked)
    report = summarise(replies, asked, tokenizer)
    if device.type == "cuda":
        model, _ = load_model(folder, torch.bfloat16)
        other = greedy_replies(model.to(device), tokenizer, shots, asked)
        before = [is_right(t, e) for t, e in zip(replies.texts, asked, strict=True)]
        after = [is_right(t, e) for t, e in zip(other.texts, asked, strict=True)]
        pairs = list(zip(before, after, strict=True))
        report["bfloat16"] = {
            "accuracy": sum(after) / len(after),
            "right_to_wrong": pairs.count((True, False)),
            "wrong_to_right": pairs.count((False, True)),
            "texts_changed": sum(map(str.__ne__, replies.texts, other.texts)),
        }
    report["first_replies"] = replies.texts[:3]
    return report


def train(spec: TrainSpec, options: Options) -> list[dict[str, object]]:
    """Run the schedule; save and evaluate checkpoints; return their reports in order."""
    torch.manual_seed(spec.seed)
    device = torch.device(options.device)
    tokenizer = make_tokenizer(spec)
    model = TinyMoE(spec.model).to(device)
    optimizer = make_optimizer(model, spec)
    corpus = CorpusSpec(tokenizer.to_str(), spec.seed, spec.difficulty, spec.rows, spec.row_tokens)
    log.info("%.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    eval_steps = {max(1, round(f * spec.steps)) for f in options.eval_fractions}
    reports: list[dict[str, object]] = []
    started, paused_s = time.monotonic(), 0.0
    for step, batch in enumerate(batches(corpus, spec.steps, options.workers)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        loss, balance = train_step(model, optimizer, batch, spec)
        done = step + 1
        if done in (10, 40) or done % options.log_every == 0 or done in eval_steps:
            _log_progress(spec, done, time.monotonic() - started - paused_s, loss, balance)
        if done in eval_steps:
            paused = time.monotonic()
            folder = options.out / f"step-{done:06d}"
            save_model(model, tokenizer, folder)
            report = {"step": done, "folder": folder.name, "loss": float(loss)}
            report |= evaluate_folder(folder, spec, options.eval_questions, device)
            reports.append(report)
            paused_s += time.monotonic() - paused
            _log_report(report)
            write_report(options.out, spec, reports, time.monotonic() - started)
            if options.export is not None:
                export_best(
                    options.out, reports, options.export, options.name, options.export_count
                )
    return reports


def _log_progress(
    spec: TrainSpec, done: int, seconds: float, loss: Tensor, balance: Tensor
) -> None:
    rate = done * spec.rows * spec.row_tokens / seconds
    left_s = (spec.steps - done) * seconds / done
    log.info(
        "step %d/%d loss %.4f balance %.3f, %.0f k tokens/s, %.0f s, %.0f s left",
        *(done, spec.steps, float(loss), float(balance), rate / 1e3, seconds, left_s),
    )


def _log_report(report: dict[str, object]) -> None:
    keys = ("step", "accuracy", "bfloat16", "unfinished", "min_expert_share_of_fair")
    log.info("checkpoint %s", json.dumps({key: report.get(key) for key in keys}))


def write_report(
    out: Path, spec: TrainSpec, reports: list[dict[str, object]], seconds: float
) -> None:
    """Write `train_report.json`: the spec, the time so far, and each evaluated checkpoint."""
    content = {
        "spec": asdict(spec),
        "num_shots": NUM_SHOTS,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "checkpoints": reports,
    }
    text = json.dumps(content, indent=1) + "\n"
    (out / "train_report.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the command line and train."""
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="standard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="length of the schedule (the preset's)")
    parser.add_argument("--rows", type=int, help="sequences a step (the preset's)")
    parser.add_argument("--peak-lr", type=float, help="learning rate (the preset's)")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--eval-questions", type=int, default=SPLIT_ROWS["test"])
    parser.add_argument("--eval-at", type=float, nargs="+", default=EVAL_FRACTIONS)
    parser.add_argument("--log-every", type=int, default=400, help="steps between log lines")
    parser.add_argument("--export", type=Path, help="folder for the best checkpoints as tar files")
    parser.add_argument("--export-count", type=int, default=2, help="how many of them")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    given = {"steps": args.steps, "rows": args.rows, "peak_lr": args.peak_lr, "seed": args.seed}
    spec = replace(PRESETS[args.preset], **{k: v for k, v in given.items() if v is not None})
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        out=args.out,
        device=args.device,
        workers=args.workers,
        eval_questions=args.eval_questions,
        eval_fractions=tuple(args.eval_at),
        log_every=args.log_every,
        export=args.export,
        export_count=args.export_count,
        name=args.preset,
    )
    train(spec, options)


if __name__ == "__main__":
    main()
