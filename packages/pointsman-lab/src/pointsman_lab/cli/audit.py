"""`pointsman audit MODEL`: routing statistics and the loss at every k of a Hugging Face mixture of experts."""

import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import open_named, parse_json, temporary_folder
from pointsman_lab.cli.export import refuse_runs
from pointsman_lab.cli.options import Parser, choose_device, whole
from pointsman_lab.cli.runs import write_page

EPILOG = """examples:
  pointsman audit allenai/OLMoE-1B-7B-0924 --data wikitext-2 --top-k 1,2,4,8,16
  pointsman audit ./my-mixtral --data en.txt,de.txt,code.py --out audits/mine
  pointsman audit ./tuned --against ./before --data chats.jsonl

--data: a data set's name, a text file, or JSON lines with "text" or
"messages" (a conversation); with several of them, divided by commas, every
figure is given for each. report.html in the folder is the page.
The figures and their conventions: docs/huggingface.md.
"""
PIECE = 1 << 16


def parser() -> Parser:
    flags = Parser("audit", "Routing statistics and loss at every k of a Hugging Face MoE.", EPILOG)
    flags.add("model MODEL", "a folder with a saved model, or a name on the hub")
    flags.add("--data NAME|PATH,…", "one domain or several (stdlib)", default="stdlib")
    flags.add("--against MODEL", "another checkpoint of the same model")
    flags.add("--top-k", "default: 1, 2, 4, … up to four times the model's k, and its k")
    flags.add("--eval-tokens", "tokens to read (default: 50000)", default=50_000)
    flags.add("--length N", "tokens a row (512)", type=whole(2, "length"), default=512)
    flags.add("--batch-size N", "rows a forward (4)", type=whole(1, "batch_size"), default=4)
    told = "tokens on which experts are removed and k is set by layer; 0: not at all (4096)"
    flags.add("--probe-tokens N", told, type=whole(0), default=4096)
    told = 'JSON lines with "prompt" (or "messages") and "answer": tokens until the answer at every k'
    flags.add("--task FILE", told, type=Path)
    flags.add("--answer-tokens N", "tokens to generate for a prompt, at most (256)", type=whole(1), default=256)
    told = "keep the experts on the disk and read one layer's at a time, for a model that does not fit in memory"
    flags.add("--on-disk", told, action="store_true")
    flags.add("--tokenizer MODEL", "whose tokenizer to take (default: the model's)")
    flags.add("--dtype")
    flags.common("where the results go (default: audit-NAME here; beside a model that one stands in)", settings="")
    return flags


def run(words: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(words)
    device = choose_device(values.device)
    domains = domains_of(values.data)
    for name in domains.values():
        read_texts(name)
    task = [] if values.task is None else list(read_task(values.task))
    if not task:
        flags.without_effect(values, ["--answer-tokens"], "without --task")
    from pointsman.hf.loading import load_model
    from pointsman_lab.checkpoints import audit
    from pointsman_lab.checkpoints.on_disk import load_on_disk
    from pointsman_lab.checkpoints.text import text_batches
    from pointsman_lab.cli.progress import Display

    out = values.out or folder_of(values.model)
    refuse_runs(out, unless=("audit.json",))
    if values.on_disk:
        flags.without_effect(values, ["--device"], "with --on-disk, which computes on the CPU")
        print("pointsman: every forward reads all experts from the disk, a layer at a time", file=sys.stderr)

    def load(name: str) -> Any:
        if values.on_disk:
            return load_on_disk(name, temporary_folder(), dtype=values.dtype)
        return load_model(name, dtype=values.dtype, device=device)

    model, tokenizer = load(values.model), tokenizer_of(values)
    against = None if values.against is None else load(values.against)
    if values.on_disk:
        told = sum(one.numel() * one.element_size() for one in model.parameters())
        kept = sum(one.numel() * one.element_size() for one in model.parameters() if not one.is_meta)
        print(f"pointsman: {kept / 2**30:.2f} of {told / 2**30:.2f} GiB of weights stay in memory", file=sys.stderr)
    budget = None if values.eval_tokens == "all" else values.eval_tokens
    share = None if budget is None else max(1, budget // len(domains))
    total, read = 0, {"length": values.length, "batch_size": 1, "max_tokens": share}
    for data in domains.values():
        count = sum(batch.ids.numel() for batch in text_batches(tokenizer, read_texts(data), **read))
        if not count:
            raise RunError(f"pointsman audit: --data {data}: there is no text to read")
        total += count
    texts = {name: read_texts(data) for name, data in domains.items()}
    with Display() as display:
        display.phase("audit", total=total)
        result = audit(
            model, tokenizer, texts, top_k=values.top_k, against=against, max_tokens=budget, length=values.length,
            batch_size=values.batch_size, probe_tokens=values.probe_tokens,
            task=task, answer_tokens=values.answer_tokens,
            progress=lambda done, _: display.advance(done, {}),
        )  # fmt: skip
    if not any(row["tokens"] for row in result.quality):
        print(
            "pointsman: no token had a loss: the text is too short, or the tokenizer does not know it", file=sys.stderr
        )
    result.save(out, data=values.data, command=shlex.join(["pointsman", "audit", *words]))
    page = write_page(out)
    print(result.markdown())  # last: whoever reads it may have enough of it
    print(f"all figures: {out / 'audit.json'}; {page}", file=sys.stderr)
    return 0


def folder_of(model: str) -> Path:
    """audit-NAME in the working directory; beside the model's folder where that is the working directory, or above."""
    place = Path(model).resolve()
    return (place.parent if Path.cwd().is_relative_to(place) else Path()) / f"audit-{place.name}"


def tokenizer_of(values: Any) -> Any:
    """The tokenizer of --tokenizer, or of the model."""
    from pointsman.hf.loading import load_tokenizer

    try:
        return load_tokenizer(values.tokenizer or values.model)
    except RunError as error:
        raise RunError(f"{error} (--tokenizer MODEL takes another model's)") from None


def domains_of(data: str) -> dict[str, str]:
    """--data as the name of each domain -> its data; a file whose name has a comma is one domain."""
    parts = [data] if Path(data).is_file() else [part for part in data.split(",") if part]
    names = [Path(part).name if len(parts) > 1 else "text" for part in parts]
    if len(set(names)) < len(names):
        raise RunError(f"--data {data}: two parts have the same name; rename a file")
    return dict(zip(names, parts, strict=True)) or {"text": data}


def read_texts(data: str) -> Iterator[str | list[dict[str, str]]]:
    """The texts of a file, or of a data set's test split. Errors about a missing file are raised at once."""
    path = Path(data)
    if path.is_file():
        return _lines(path) if path.suffix in (".jsonl", ".json") else _pieces(path)
    from pointsman_lab.data.corpus import open_text

    corpus = open_text(data)
    return iter([corpus.vocabulary.decode(corpus.split("test"))])


def _pieces(path: Path) -> Iterator[str]:
    with open_named(path) as file, io.TextIOWrapper(file, "utf-8", "replace") as text:
        while piece := text.read(PIECE):
            yield piece


def _lines(path: Path) -> Iterator[str | list[dict[str, str]]]:
    for where, row in _rows(path):
        found = row.get("messages", row.get("text")) if isinstance(row, dict) else None
        if not isinstance(found, (str, list)):
            raise RunError(f'{where}: needs "text" or "messages", found {_names(row)}')
        yield found


def read_task(path: Path) -> Iterator[tuple[Any, str]]:
    """Prompts and their answers."""
    where = None
    for where, row in _rows(path):
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(prompt, (str, list)) or not prompt:
            raise RunError(f'{where}: needs "prompt" or "messages", found {_names(row)}')
        if not isinstance(row.get("answer"), str) or not row["answer"]:
            raise RunError(f'{where}: needs "answer", a text, found {_names(row)}')
        yield prompt, row["answer"]
    if where is None:
        raise RunError(f"{path}: there is no prompt in it")


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where a line stands, and its JSON."""
    with open_named(path) as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise RunError(f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x})") from None
            if not line.strip():
                continue
            try:
                yield where, parse_json(line)
            except ValueError as error:
                raise RunError(f"{where}: not JSON: {error}") from None


def _names(row: Any) -> str:
    return ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
