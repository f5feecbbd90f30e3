"""Figures that the three papers publish, table by table: numbers as printed there, nothing of ours.

Each cell also says which run of ours would stand beside it: the line's router specs, the column's k, split and task.
"""

from __future__ import annotations

from dataclasses import dataclass

Value = float | None


@dataclass(frozen=True)
class Column:
    """A column of a published table.

    Attributes:
        name: as printed.
        top_k: experts a token; None: the line's, or all (k = N).
        split: of the data. attacked: on word-swapped text. task: instead of the table's data.
        layer: for a quantity of one router, counted from 0.
        quantity: "value" (the table's metric), "entropy", "exact_match", "flops", a component of the parameters, or
            "none": not in any run directory.
    """

    name: str
    top_k: int | None = None
    split: str = "test"
    attacked: bool = False
    task: str | None = None
    layer: int | None = None
    quantity: str = "value"


@dataclass(frozen=True)
class Line:
    """A line of a published table.

    Attributes:
        label, values: as printed.
        specs: of ours that count as this router.
        top_k: where the column does not say.
        frozen, balance: fine-tuned with the router frozen, with this weight of the balance loss.
    """

    label: str
    values: tuple[Value, ...]
    specs: tuple[str, ...] = ()
    top_k: int | None = None
    frozen: bool = False
    balance: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        number: as in the paper. title: what it shows, in our words. metric: of `report.metrics`.
        columns, lines: the table.
        data: the corpus of the runs of ours that belong here; None: those of each column's task.
        presets: names of presets and recipes with the paper's model and schedule. steps: of its training.
        note: what a reader must know.
        decimals: printed at least.
    """

    number: str
    title: str
    metric: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    data: str | None = None
    presets: tuple[str, ...] = ()
    steps: int | None = None
    note: str = ""
    decimals: int = 2

    def __post_init__(self) -> None:
        for line in self.lines:
            assert len(line.values) == len(self.columns), (self.number, line.label)


@dataclass(frozen=True)
class Paper:
    """A paper: how it is cited, where it is, and its tables."""

    name: str
    citation: str
    link: str
    tables: tuple[PublishedTable, ...]


DENSE, DENSE_DROPOUT = ("dense",), ("dense-dropout",)
SMOE, FROZEN, HYPER, THOR = ("smoe",), ("smoe-dropout",), ("hyperrouter",), ("thor",)
KS = (1, 2, 4, 8, 16)
BY_K = tuple(Column(f"k={k}", top_k=k) for k in KS)
_NO = (None,) * 4


def _by_k(
    number: str, title: str, metric: str, data: str, size: str, steps: int, lines: tuple[Line, ...], note: str = ""
) -> PublishedTable:
    corpus = data.replace("-", "")
    presets = (size, f"hyperrouter-{corpus}-{size}", f"hyperrouter-{corpus}-{size}-code")
    decimals = 3 if number.startswith("Table 2") else 2
    return PublishedTable(number, title, metric, BY_K, lines, data, presets, steps, note, decimals)


_ENTROPY = tuple(Column(f"router {layer + 1}", layer=layer, quantity="entropy") for layer in range(4))
_TASKS = tuple(
    Column(name, task=task)
    for name, task in (("SST-2", "sst2"), ("SST-5", "sst5"), ("IMDB", "imdb"), ("BANKING77", "banking77"))
)

HYPERROUTER = Paper(
    "hyperrouter",
    "Do et al., HyperRouter: Towards Efficient Training and Inference of Sparse Mixture of Experts, EMNLP 2023",
    "https://arxiv.org/abs/2312.07035",
    (
        _by_k(
            "Table 1 (enwik8)", "bits per character, small model", "bits_per_character", "enwik8", "small", 400_000,
            (
                Line("Dense", (*_NO, 1.25), DENSE),
                Line("Dense+Dropout", (*_NO, 1.16), DENSE_DROPOUT),
                Line("SMoE", (7.20, 3.30, 1.68, 1.32, 1.27), SMOE),
                Line("SMoE-Dropout", (3.02, 1.61, 1.29, 1.19, 1.16), FROZEN),
                Line("HyperRouter", (1.48, 1.25, 1.19, 1.17, 1.16), HYPER),
            ),
            "The released scripts of SMoE and Dense train without dropout, those of the other rows with 0.1.",
        ),
        _by_k(
            "Table 1 (WikiText-103)", "perplexity, small model", "perplexity", "wikitext-103", "small", 400_000,
            (
                Line("Dense", (*_NO, 32.13), DENSE),
                Line("Dense+Dropout", (*_NO, 31.55), DENSE_DROPOUT),
                Line("SMoE", (896.47, 146.54, 54.69, 35.67, 32.27), SMOE),
                Line("SMoE-Dropout", (560.93, 89.13, 40.00, 29.68, 27.66), FROZEN),
                Line("HyperRouter", (65.17, 37.75, 30.45, 28.05, 27.57), HYPER),
            ),
        ),
        _by_k(
            "Table 2 (medium)", "bits per character on enwik8", "bits_per_character", "enwik8", "medium", 400_000,
            (
                Line("SMoE", (2.170, 1.395, 1.260, 1.230, 1.226), SMOE),
                Line("SMoE-Dropout", (3.741, 1.642, 1.257, 1.167, 1.141), FROZEN),
                Line("HyperRouter", (1.457, 1.201, 1.156, 1.137, 1.132), HYPER),
            ),
        ),
        _by_k(
            "Table 2 (large)", "bits per character on enwik8", "bits_per_character", "enwik8", "large", 100_000,
            (
                Line("SMoE", (1.370, 1.216, 1.189, 1.182, 1.181), SMOE),
                Line("SMoE-Dropout", (1.766, 1.298, 1.225, 1.197, 1.183), FROZEN),
                Line("HyperRouter", (1.215, 1.181, 1.174, 1.171, 1.170), HYPER),
            ),
        ),
        PublishedTable(
            "Table 3", "fine-tuning accuracy (%), pre-trained on enwik8", "accuracy", _TASKS,
            (
                Line("Dense", (82.18, 39.72, 88.30, 84.54), DENSE),
                Line("Dense+Dropout", (81.94, 39.95, 88.37, 84.34), DENSE_DROPOUT),
                Line("SMoE-Dropout (k=8)", (81.37, 41.17, 87.78, 87.40), FROZEN, 8),
                Line("HyperRouter (k=8)", (82.87, 41.26, 88.43, 87.66), HYPER, 8),
                Line("SMoE (k=16)", (79.98, 39.45, 88.16, 86.52), SMOE, 16),
                Line("SMoE-Dropout (k=16)", (81.83, 41.30, 87.81, 87.89), FROZEN, 16),
                Line("HyperRouter (k=16)", (83.33, 41.80, 88.46, 88.41), HYPER, 16),
            ),
        ),
        PublishedTable(
            "Tables 4 and A5", "entropy of the router's distribution on enwik8 (nats), small model", "entropy",
            _ENTROPY,
            (
                Line("SMoE", (2.5164, 2.2126, 2.2424, 2.2583), SMOE),
                Line("SMoE-Dropout", (2.5849, 2.1624, 2.2579, 2.2690), FROZEN),
                Line("HyperRouter", (1.4393, 0.8894, 1.1269, 1.3477), HYPER),
            ),
            "enwik8", ("small", "hyperrouter-enwik8-small", "hyperrouter-enwik8-small-code"), 400_000,
            "A5 gives deviations over tokens: SMoE 0.17, 0.31, 0.30, 0.25; SMoE-Dropout 0.11, 0.37, 0.28, 0.27; "
            "HyperRouter 0.42, 0.46, 0.46, 0.50. ln 16 = 2.773. Ours: at the largest k.",
            decimals=4,
        ),
        PublishedTable(
            "Table A3", "inference FLOPs (1e10), small model on enwik8", "flops",
            tuple(Column(f"k={k}", top_k=k, quantity="flops") for k in KS),
            (
                Line("Dense", (*_NO, 7.76), DENSE),
                Line("Dense+Dropout", (*_NO, 7.76), DENSE_DROPOUT),
                Line("THOR", (*_NO, 7.66), THOR),
                Line("SMoE", (3.47, 4.00, 4.54, 5.61, 7.66), SMOE),
                Line("SMoE-Dropout", (3.47, 4.00, 4.54, 5.61, 7.66), FROZEN),
                Line("HyperRouter", (3.47, 4.00, 4.54, 5.61, 7.66), HYPER),
            ),
            note="Ours: counted from the model itself. The paper's k=1 is the figure of k=0 (the routers alone), and "
            "its 7.66 a misprint of 7.76.",
        ),
        PublishedTable(
            "Table A4", "parameters by component, small model on enwik8", "parameters",
            (
                Column("router embeddings", quantity="router_trainable"),
                Column("hypernetwork", quantity="fixed_a_layer"),
                Column("transformer", quantity="backbone"),
            ),
            (
                Line("SMoE-Dropout", (None, None, 19_505_350), FROZEN),
                Line("HyperRouter", (1_024, 1_112_576, 19_505_350), HYPER),
            ),
            note="Ours: counted from the model itself. A frozen router has 16,448 parameters in both. The printed "
            "hypernetwork is that of one layer with one digit off; the released code holds four of them.",
            decimals=0,
        ),
    ),
)  # fmt: skip

SWITCH, SIGMOID = ("switch",), ("smoe:gate=sigmoid", "switch:gate=sigmoid")
XMOE, XMOE_SIGMOID = ("xmoe",), ("xmoe:gate=sigmoid",)
_PLAIN_COSINE = ("xmoe:gate=sigmoid:routing_dim=full:normalize=false",)
_XTREME = (
    Column("POS F1", task="ud"), Column("NER F1", task="panx"),
    Column("XQuAD F1", task="xquad"), Column("XQuAD EM", task="xquad", quantity="exact_match"),
    Column("MLQA F1", task="mlqa"), Column("MLQA EM", task="mlqa", quantity="exact_match"),
    Column("TyDiQA F1", task="tydiqa"), Column("TyDiQA EM", task="tydiqa", quantity="exact_match"),
    Column("XNLI", task="xnli"), Column("PAWS-X", task="pawsx"), Column("average", quantity="none"),
)  # fmt: skip
_XNLI_MLQA = (
    Column("XNLI", task="xnli"), Column("MLQA F1", task="mlqa"), Column("MLQA EM", task="mlqa", quantity="exact_match"),
)  # fmt: skip
_WMT = tuple(
    Column(f"{code}→en", task=f"wmt10-{code}") for code in ("ro", "fr", "cs", "et", "de", "hi", "tr", "fi", "lv")
)

X_MOE = Paper(
    "x-moe",
    "Chi et al., On the Representation Collapse of Sparse Mixture of Experts, NeurIPS 2022",
    "https://arxiv.org/abs/2204.09179",
    (
        PublishedTable(
            "Table 1", "XTREME, fine-tuned on English (F1 or accuracy, %), mean of five runs", "accuracy", _XTREME,
            (
                Line("Dense", (70.0, 61.1, 67.3, 51.1, 58.7, 41.1, 42.1, 28.3, 70.1, 84.1, 61.4), DENSE),
                Line("SMoE, softmax gate", (70.1, 60.9, 71.3, 55.2, 62.8, 44.8, 50.9, 34.5, 71.5, 84.6, 63.8), SWITCH),
                Line("X-MoE, softmax gate", (70.8, 63.2, 72.4, 56.2, 64.5, 46.3, 53.7, 38.1, 72.0, 85.2, 65.3), XMOE),
                Line("SMoE, sigmoid gate", (70.6, 61.2, 71.5, 55.7, 63.2, 45.3, 50.1, 35.1, 71.2, 85.1, 64.1), SIGMOID),
                Line(
                    "X-MoE, sigmoid gate", (71.1, 62.7, 72.3, 56.3, 64.3, 46.0, 51.5, 36.6, 72.2, 85.2, 65.0),
                    XMOE_SIGMOID,
                ),
            ),
            decimals=1,
        ),
        PublishedTable(
            "Table 2", "perplexity of masked language modelling (validation)", "perplexity",
            (Column("perplexity", split="valid"),),
            (
                Line("Dense", (23.51,), DENSE), Line("SMoE, softmax gate", (19.02,), SWITCH),
                Line("X-MoE, softmax gate", (18.72,), XMOE), Line("SMoE, sigmoid gate", (19.59,), SIGMOID),
                Line("X-MoE, sigmoid gate", (19.12,), XMOE_SIGMOID),
            ),
            "cc100",
        ),
        PublishedTable(
            "Table 3", "ablation, sigmoid gate: dimension reduction / L2 norm / routing frozen in fine-tuning",
            "accuracy", _XNLI_MLQA,
            (
                Line("yes / yes / yes", (72.2, 64.3, 46.0), XMOE_SIGMOID, frozen=True),
                Line("no / yes / yes", (71.5, 63.4, 45.2), ("xmoe:gate=sigmoid:routing_dim=full",), frozen=True),
                Line("yes / no / yes", (71.4, 63.0, 45.2), ("xmoe:gate=sigmoid:normalize=false",), frozen=True),
                Line("yes / yes / no", (71.7, 63.9, 45.8), XMOE_SIGMOID),
                Line("no / no / yes", (71.6, 63.6, 45.5), _PLAIN_COSINE, frozen=True),
                Line("no / no / no", (71.2, 63.2, 45.3), _PLAIN_COSINE),
            ),
            decimals=1,
        ),
        PublishedTable(
            "Table 4", "BLEU, WMT-10 into English", "bleu", (*_WMT, Column("average", quantity="none")),
            (
                Line("Dense", (36.9, 33.7, 29.8, 27.8, 40.6, 25.4, 24.6, 22.2, 20.9, 29.1), DENSE),
                Line("SMoE", (37.1, 33.8, 31.0, 28.6, 42.3, 26.0, 24.3, 23.0, 21.2, 29.7), SWITCH),
                Line("X-MoE", (37.9, 34.3, 31.1, 29.0, 42.2, 27.0, 24.8, 23.5, 21.6, 30.2), XMOE),
            ),
            decimals=1,
        ),
        PublishedTable(
            "Table 5", "routing dimension, N = 32 experts, sigmoid gate", "accuracy", _XNLI_MLQA,
            tuple(
                Line(label, values, (f"xmoe:gate=sigmoid:routing_dim={dim}", *more))
                for label, values, dim, more in (
                    ("N/4", (71.4, 64.3, 46.4), 8, ()), ("N/2", (72.2, 64.3, 46.0), 16, XMOE_SIGMOID),
                    ("N", (71.7, 63.8, 45.9), 32, ()),
                    ("2N", (71.7, 62.7, 44.8), 64, ()), ("4N", (71.2, 63.1, 45.0), 128, ()),
                )
            ),
            decimals=1,
        ),
        PublishedTable(
            "Table 6", "weight of the balance loss in fine-tuning (validation)", "accuracy",
            (Column("XNLI", task="xnli", split="valid"), Column("MLQA", task="mlqa", split="valid")),
            tuple(
                Line(weight, values, (*XMOE, *XMOE_SIGMOID), balance=float(weight))
                for weight, values in (
                    ("0", (71.71, 64.57)), ("0.001", (71.65, 64.40)), ("0.01", (71.93, 64.59)), ("0.1", (71.68, 64.50)),
                )
            ),
        ),
        PublishedTable(
            "Table 7", "XNLI with one and two experts a token, softmax gate", "accuracy",
            (Column("k=1", 1, task="xnli"), Column("k=2", 2, task="xnli")),
            (Line("SMoE", (71.5, 73.4), ("switch", "smoe")), Line("X-MoE", (72.0, 73.7), XMOE)),
            decimals=1,
        ),
    ),
)  # fmt: skip
