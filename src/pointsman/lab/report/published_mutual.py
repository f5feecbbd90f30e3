"""Figures that Mutual-Inform SMoE publishes, as `published` holds those of the other two papers."""

from __future__ import annotations

from pointsman.lab.report.published import FROZEN, HYPERROUTER, SMOE, X_MOE, Column, Line, Paper, PublishedTable

_CLEAN_ATTACKED = (
    Column("valid", split="valid"),
    Column("test"),
    Column("attacked valid", split="valid", attacked=True),
    Column("attacked test", attacked=True),
)
_VALID_TEST = _CLEAN_ATTACKED[:2]


def _similarity(scorer: str, *options: str) -> tuple[str, ...]:
    """Specs of ours that are its Similarity-Inform: the source of its vectors is not stated, so three readings."""
    extra = "".join(f":{option}" for option in options)
    return tuple(f"{scorer}+similarity{source}{extra}" for source in (":source=input", ":source=attention", ""))


def _attention(scorer: str, *options: str) -> tuple[str, ...]:
    """Specs of ours that are its Attention-Inform: causal running heads, or the paper's rule over the sequence."""
    extra = "".join(f":{option}" for option in options)
    return tuple(f"{scorer}+attention{heads}{extra}" for heads in ("", ":heads=lowest-entropy-sequence"))


SIMILARITY, ATTENTION = _similarity("smoe"), _attention("smoe")
_SMOE_2 = Line("SMoE (M=2)", (33.29, 34.84, 41.75, 43.59), SMOE, 2)
_SIMILARITY_2 = Line("Similarity-inform SMoE (M=2)", (30.75, 32.03, 38.33, 39.92), SIMILARITY, 2)
_ATTENTION_2 = Line("Attention-inform SMoE (M=2)", (31.31, 32.23, 39.68, 40.91), ATTENTION, 2)
_SIXTEEN = (
    Line("SMoE (M=1)", (39.55, 40.75, 48.82, 50.21), SMOE, 1),
    Line("Similarity-inform SMoE (M=1)", (37.78, 39.18, 46.93, 48.66), SIMILARITY, 1),
    Line("Attention-inform SMoE (M=1)", (38.02, 39.35, 47.20, 48.72), ATTENTION, 1),
    _SMOE_2,
    _SIMILARITY_2,
    _ATTENTION_2,
)
_SPAN = "Our presets have a Transformer-XL where the paper has attention spans; all else is the paper's."
_TAUS = ("0.1", "1.0", "2.0", "sqrt(352)")


def _number(tau: str) -> str:
    return "18.761663039293719" if tau == "sqrt(352)" else tau


def _wikitext(
    number: str, title: str, lines: tuple[Line, ...], presets: tuple[str, ...] = (), note: str = ""
) -> PublishedTable:
    return PublishedTable(number, title, "perplexity", _CLEAN_ATTACKED, lines, "wikitext-103", presets, None, note)


MUTUAL_INFORM = Paper(
    "mutual-inform",
    "Mutual-Inform SMoE: Improving Routing Stability via Probabilistic Graphical Model, arXiv 2505.00792",
    "https://arxiv.org/abs/2505.00792",
    (
        _wikitext("Table 1", "perplexity on WikiText-103, medium model, 16 experts", _SIXTEEN),
        _wikitext(
            "Table 1 (GLaM)", "perplexity on WikiText-103, GLaM layout (every second layer sparse)",
            (
                Line("GLaM (M=2)", (37.55, 39.10, 48.01, 49.75), SMOE, 2),
                Line("Similarity-inform GLaM (M=2)", (33.72, 34.92, 42.19, 43.72), SIMILARITY, 2),
                Line("Attention-inform GLaM (M=2)", (35.17, 36.71, 44.17, 45.85), ATTENTION, 2),
            ),
            ("mutual-glam",), _SPAN,
        ),
        PublishedTable(
            "Table 2", "top-1 accuracy on ImageNet and its variants, V-MoE of 297M parameters", "accuracy",
            tuple(
                Column(name, task=task)
                for name, task in (
                    ("IN-1K", "imagenet"), ("IN-R", "imagenet-r"), ("IN-A", "imagenet-a"), ("IN-C", "imagenet-c"),
                )
            ),
            (
                Line("V-MoE", (72.71, 35.42, 5.27, 48.72), SMOE),
                Line("Similarity-Inform V-MoE", (73.21, 36.58, 5.60, 50.45), SIMILARITY),
                Line("Attention-Inform V-MoE", (73.33, 36.66, 6.78, 50.85), ATTENTION),
            ),
        ),
        _wikitext(
            "Table 3", "perplexity on WikiText-103, medium model, M=2",
            (
                _SMOE_2, _SIMILARITY_2, _ATTENTION_2,
                Line("X-MoE", (33.05, 34.49, 41.68, 42.96), ("xmoe",), 2),
                Line("Similarity-inform X-MoE", (31.83, 33.06, 39.92, 41.28), _similarity("xmoe"), 2),
                Line("Attention-inform X-MoE", (32.06, 33.24, 40.35, 41.73), _attention("xmoe"), 2),
                Line("SMoE-dropout", (33.08, 34.67, 41.11, 43.09), FROZEN, 2),
                Line("Similarity-inform SMoE-dropout", (32.47, 33.69, 40.6, 41.99), _similarity("smoe-dropout"), 2),
                Line("Attention-inform SMoE-dropout", (32.21, 33.91, 40.56, 42.17), _attention("smoe-dropout"), 2),
            ),
            ("mutual-medium",), _SPAN,
        ),
        PublishedTable(
            "Table 4", "fine-tuning accuracy (%)", "accuracy",
            (Column("SST-5", task="sst5"), Column("SST-2", task="sst2"), Column("BANKING77", task="banking77")),
            (
                Line("SMoE", (36.54, 70.23, 83.96), SMOE),
                Line("Similarity-inform SMoE", (37.91, 71.72, 85.19), SIMILARITY),
                Line("Attention-inform SMoE", (38.89, 72.41, 85.84), ATTENTION),
            ),
        ),
        _wikitext(
            "Table 5", "perplexity on WikiText-103, large model (about 390M parameters), M=2",
            (
                Line("SMoE", (28.737, 30.378, 36.43, 38.34), SMOE, 2),
                Line("Similarity-inform SMoE", (27.06, 28.34, 34.65, 36.28), SIMILARITY, 2),
                Line("Attention-inform SMoE", (27.26, 28.69, 34.69, 36.37), ATTENTION, 2),
            ),
            ("mutual-large",), _SPAN,
        ),
        _wikitext(
            "Table 6 (K=16)", "perplexity on WikiText-103, 16 experts, M=8; M=1 and M=2 as in Table 1",
            (
                Line("SMoE (M=8)", (33.48, 34.92, 41.36, 42.98), SMOE, 8),
                Line("Similarity-inform SMoE (M=8)", (32.5, 33.81, 40.6, 42.37), SIMILARITY, 8),
                Line("Attention-inform SMoE (M=8)", (31.97, 33.28, 39.98, 41.45), ATTENTION, 8),
            ),
        ),
        _wikitext(
            "Table 6 (K=32)", "perplexity on WikiText-103, 32 experts, M=2",
            (
                Line("SMoE", (31.82, 33.41, 39.9, 41.79), SMOE, 2),
                Line("Similarity-inform SMoE", (30.41, 31.62, 38.23, 39.77), SIMILARITY, 2),
                Line("Attention-inform SMoE", (30.39, 31.85, 37.8, 39.65), ATTENTION, 2),
            ),
        ),
        PublishedTable(
            "Table 7", "forward pass, ratio to the same router without mixing, M=2", "ratio",
            (Column("computation", quantity="none"), Column("memory", quantity="none")),
            (
                Line("Similarity-Inform SMoE", (1.048, 1.008)), Line("Attention-Inform SMoE", (1.070, 1.060)),
                Line("Similarity-Inform X-MoE", (1.026, 1.009)), Line("Attention-Inform X-MoE", (1.038, 1.060)),
                Line("Similarity-Inform SMoE-dropout", (1.047, 1.008)),
                Line("Attention-Inform SMoE-dropout", (1.064, 1.060)),
            ),
            note="Ours: `python benchmarks/mixers.py time` measures it; a run directory does not hold it.",
            decimals=3,
        ),
        PublishedTable(
            "Table 8", "temperatures, perplexity on WikiText-103, medium model, M=2", "perplexity", _VALID_TEST,
            (
                Line("SMoE", (33.29, 34.84), SMOE, 2),
                *(
                    Line(f"Similarity, tau={tau}", values, _similarity("smoe", f"tau={_number(tau)}"), 2)
                    for tau, values in zip(
                        _TAUS, ((32.79, 34.01), (30.75, 32.03), (30.68, 32.88), (32.26, 33.83)), strict=True
                    )
                ),
                *(
                    Line(f"Attention, sigma={tau}", values, _attention("smoe", f"sigma={_number(tau)}"), 2)
                    for tau, values in zip(
                        _TAUS, ((31.93, 32.67), (31.31, 32.23), (31.13, 32.85), (31.62, 32.90)), strict=True
                    )
                ),
            ),
            "wikitext-103",
        ),
    ),
)  # fmt: skip

PAPERS = {paper.name: paper for paper in (HYPERROUTER, X_MOE, MUTUAL_INFORM)}
