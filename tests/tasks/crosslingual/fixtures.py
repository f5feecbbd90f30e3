"""The folders of XTREME's tasks in two languages, with random words, and a small encoder pre-trained on them."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.trainer import train

WORDS = ["".join(random.Random(n).choices("abcdefghijklmno", k=2 + n % 6)) for n in range(80)]


def sentence(draw: random.Random, least: int = 3, most: int = 9) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def write_data(root: Path) -> Path:
    """The task folders, and text to pre-train on."""
    draw = random.Random(0)
    for name in ("xnli", "panx", "tydiqa", "text"):
        (root / name).mkdir()
    labels = ("contradiction", "entailment", "neutral")
    for language in ("en", "de"):
        for part, count in (("dev", 120), ("test", 40), *[("train", 80)][: language == "en"]):
            rows = [f"{sentence(draw)}\t{sentence(draw)}\t{labels[n % 3]}" for n in range(count)]
            with gzip.open(root / f"xnli/{part}-{language}.tsv.gz", "wt") as file:
                file.write("\n".join(rows) + "\n")
        for part, count in (("train", 80), ("test", 12), ("dev", 10)):
            lines = []
            for _ in range(count):
                tags = draw.choice((["B-PER", "I-PER", "O"], ["O", "B-LOC", "O", "O"]))
                lines += [f"{draw.choice(WORDS)}\t{tag}" for tag in tags] + [""]
            (root / f"panx/{part}-{language}.tsv").write_text("\n".join(lines))
        for part, count in (("train", 60), ("dev", 8)):
            questions(root / f"tydiqa/tydiqa.goldp.{language}.{part}.json", f"{language}-{part}", count, draw)
        (root / f"text/{language}.txt").write_text("\n".join(sentence(draw) + "." for _ in range(1500)))
    return root


def questions(file: Path, name: str, count: int, draw: random.Random) -> None:
    """A file in SQuAD's form."""
    paragraphs = []
    for number in range(count):
        context = sentence(draw, 20, 40) + ". " + sentence(draw, 4, 8) + "."
        answer = " ".join(context.split()[3:5])
        asked = {"id": f"{name}-{number}", "question": sentence(draw),
                 "answers": [{"text": answer, "answer_start": context.index(answer)}]}  # fmt: skip
        paragraphs.append({"context": context, "qas": [asked]})
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def pretrained(data: Path, out: Path, router: str = "switch", **shape: Any) -> Path:
    """A run of an encoder, trained for two steps on the text."""
    model = EncoderConfig(
        vocab_size=200, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4, router=router,
        moe_layers="after:1", norm="pre", dropout=0.0, attention_dropout=0.0, max_length=64, **shape,
    )  # fmt: skip
    config = RunConfig.of(
        model=model, data=f"multilingual:{data / 'text'}", steps=2, batch_size=8, segment_length=32, memory_length=0,
        eval_tokens=256, valid_tokens=256, train_top_k="1", pieces=96,
    )  # fmt: skip
    train(config, out)
    return out
