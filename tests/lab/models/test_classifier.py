"""The classifier: padding changes nothing, and heads start alike."""

import pytest
import torch
import torch.nn.functional as F

from pointsman_lab.models.classifier import ClassificationHead, Classifier
from pointsman_lab.models.initial import seed_for
from pointsman_lab.models.transformer_xl import TransformerXLConfig

ROUTERS = ["smoe:balance=0.1", "hyperrouter", "xmoe", "smoe-dropout", "smoe+similarity", "xmoe+attention", "dense"]


def build(router: str, pooling: str = "last", **changes: object) -> Classifier:
    values = {"num_layers": 2, "dim": 16, "num_heads": 2, "head_dim": 8, "hidden_dim": 8, "num_experts": 4, **changes}
    config = TransformerXLConfig(vocab_size=11, router=router, **values)  # type: ignore[arg-type]
    return Classifier(config, 3, pooling=pooling).double()  # type: ignore[arg-type]


def padded(rows: list[torch.Tensor], extra: int = 0) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([*rows, torch.zeros(len(max(rows, key=len)) + extra)], True, -1).long()[:-1]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_text_has_the_same_logits_alone_and_in_a_padded_batch(router: str, pooling: str) -> None:
    model = build(router, pooling).eval()
    rows = [torch.randint(11, (length,)) for length in (1, 5, 23, 70)]
    together = model(padded(rows, extra=9))
    for index, row in enumerate(rows):
        torch.testing.assert_close(model(row[None])[0], together[index], rtol=1e-6, atol=1e-7)
    assert (together[0] - together[1]).abs().max() > 1e-6  # and the texts do differ


@pytest.mark.parametrize("router", ROUTERS)
def test_more_padding_changes_neither_loss_nor_gradient(router: str) -> None:
    rows = [torch.randint(11, (length,)) for length in (3, 12, 9)]
    labels = torch.tensor([0, 2, 1])
    gradients = []
    for extra in (0, 25):
        model = build(router, dropout=0.0).train()
        model.head.dropout.p = 0.0
        F.cross_entropy(model(padded(rows, extra)), labels).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-7, msg=name)


def test_heads_start_alike_whatever_the_router() -> None:
    torch.manual_seed(1)
    one = build("smoe").head.state_dict()
    torch.manual_seed(2)
    other = build("xmoe").head.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    config = build("smoe").config
    assert not torch.equal(Classifier(config, 3, seed=1).head.project.weight, Classifier(config, 3).head.project.weight)


def test_a_head_is_drawn_without_touching_another_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(3, "head"))
        project, classify = torch.nn.Linear(16, 16), torch.nn.Linear(16, 3)
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    before = torch.get_rng_state()
    head = ClassificationHead(16, 3, project=True, dropout=0.0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not reseeded
    for one, other in ((head.project, project), (head.classify, classify)):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_empty_text_stays_finite(pooling: str) -> None:
    logits = build("smoe", pooling).eval()(torch.tensor([[1, 2, 3], [-1, -1, -1]]))
    assert bool(logits.isfinite().all())
