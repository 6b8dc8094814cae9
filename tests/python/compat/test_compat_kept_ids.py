"""Compares names that take lists of ids with their formulas over whole logits: sampling masks, and a teacher's ids."""

import math
import sys
import types

import logitless
import pytest
import torch
from exactness import check, head, logits_of
from logitless.compat import prime_rl, skyrl, veomni

ROWS, VOCAB, K = (3, 4), 29, 6
DTYPES = (torch.float64, torch.float32)


def normalized(logits, kept, is_row):
    """Returns the lse of each row's kept ids, and of all ids where ``is_row`` is False."""
    lists = torch.zeros(logits.shape, dtype=torch.bool).scatter_(-1, kept.clamp(min=0).long(), kept >= 0)
    lists[..., 0] = (kept == 0).any(-1)  # -1 was written here as well
    return logits.masked_fill(is_row[..., None] & ~lists, -math.inf).logsumexp(-1)


def masks(kind, labels):
    """Returns a sampling mask and labels. kind: what is unusual about them."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(labels.numel())])
    mask = mask.reshape(*labels.shape, K).to(torch.int32)
    is_in = torch.ones(labels.shape, dtype=torch.bool)
    if kind == "all kept":
        mask = torch.arange(VOCAB, dtype=torch.int32).expand(*labels.shape, VOCAB).flip(-1)
    elif kind == "one kept":
        mask = labels[..., None].to(torch.int32)
    elif kind == "empty":
        mask, is_in = torch.full_like(mask, -1), ~is_in
    elif kind == "no width":
        mask, is_in = mask[..., :0], ~is_in
    else:
        place = torch.arange(labels.numel()).reshape(labels.shape) % K
        labels = mask.gather(-1, place[..., None])[..., 0].long()
        if kind == "mixed":  # short lists, empty ones, and labels that were not kept
            mask[0, 0, :5] = -1
            labels[0, 0] = mask[0, 0, 5]
            mask[0, 1] = mask[2, 3] = -1
            labels[1] = torch.tensor([next(i for i in range(VOCAB) if i not in row) for row in mask[1]])
            is_in[0, 1] = is_in[2, 3] = is_in[1] = False
    return mask, labels, is_in


KINDS = ["usual", "mixed", "all kept", "one kept", "empty", "no width"]


def problem(kind="usual"):
    leaves, target = head(math.prod(ROWS), VOCAB, ignored=())
    return {"input": leaves["input"].reshape(*ROWS, -1), "weight": leaves["weight"]}, *masks(kind, target.reshape(ROWS))


def prime_head(weight, softcap):
    if softcap is None:
        return prime_rl.FusedOutputLinear(weight.shape[1], len(weight), 64)
    return prime_rl.GemmaFusedOutputLinear(weight.shape[1], len(weight), 64, softcap)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_sampling_masks_of_prime_rl(kind, softcap, ids):
    """layers/lm_head.py: a row whose mask has its label is normalized over the mask, others over the vocabulary."""
    leaves, mask, labels, is_in = problem(kind)
    temperature = torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) + 0.5

    def ours(input, weight):
        layer = prime_head(weight, softcap)
        layer.return_mask_logprobs = True
        given = dict(labels=labels, temperature=temperature, sampling_mask=mask.to(ids))
        return dict(torch.func.functional_call(layer, {"weight": weight}, (input,), given))

    def reference(input, weight):
        z = logits_of(input, weight)
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[..., None].to(z.dtype)
        lse, log_p = normalized(z, mask, is_in), z.log_softmax(-1)
        of_mask = z.gather(-1, mask.clamp(min=0).long()) - lse[..., None]
        return {
            "logprobs": z.gather(-1, labels[..., None])[..., 0] - lse,
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "mask_logprobs": torch.where(is_in[..., None] & (mask >= 0), of_mask, 0.0),
        }

    check(ours, reference, leaves, (*DTYPES, torch.bfloat16) if kind == "mixed" else DTYPES)


def test_a_sampling_mask_of_prime_rl_leaves_other_rows_alone():
    """Rows that are not replayed have the results of a call without a mask, and -1 is no label."""
    leaves, mask, labels, is_in = problem("mixed")
    layer = prime_head(leaves["weight"].float(), None)
    labels[2, 3] = -100  # its mask is all -1
    plain, replayed = (
        layer(leaves["input"].float(), labels, torch.tensor(0.7), *more) for more in ((), (mask.reshape(-1, K),))
    )
    assert sorted(replayed) == ["entropy", "logprobs"] and replayed["logprobs"].dtype == torch.float32
    assert torch.equal(plain["entropy"], replayed["entropy"])
    assert torch.equal(plain["logprobs"][~is_in], replayed["logprobs"][~is_in])
    assert (plain["logprobs"][is_in] < replayed["logprobs"][is_in]).all() and replayed["logprobs"][2, 3] == 0


@pytest.mark.parametrize("shape", [(-1,), (*ROWS, 1)])
def test_temperatures_of_prime_rl_have_any_shape(shape):
    leaves, mask, labels, _ = problem()
    layer, input = prime_head(leaves["weight"].float(), None), leaves["input"].float()
    temperature = torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) + 0.5
    for more in ((), (mask,)):
        of_rows, other = (layer(input, labels, given, *more) for given in (temperature, temperature.reshape(shape)))
        assert all(torch.equal(other[name], value) for name, value in of_rows.items())


def call_prime_rl(mask):
    return prime_rl.FusedOutputLinear(7, VOCAB)(torch.ones(1, 4, 7), torch.zeros(1, 4).long(), torch.ones(1, 4), mask)


IDS = torch.zeros(1, 4, 2, dtype=torch.int32)
REFUSED_MASKS = [
    (torch.ones(1, 4, VOCAB, dtype=torch.bool), TypeError, "sampling_mask: expected int64 or int32 class indices"),
    (torch.ones(1, 4, VOCAB), TypeError, "sampling_mask: expected int64 or int32 class indices"),
    (IDS[:, :3], RuntimeError, r"sampling_mask: expected shape \[1, 4, K\] \(ids for each row\), got \[1, 3, 2\]"),
    (torch.tensor(3), RuntimeError, r"sampling_mask: expected shape \[1, 4, K\]"),
    ([[[0]] * 4], TypeError, "sampling_mask: expected a torch.Tensor, got list"),
    (IDS + torch.tensor([0, VOCAB]), logitless.InvalidTargetError, f"expected 0 <= id < {VOCAB}"),
    (IDS + torch.tensor([0, -2]), logitless.InvalidTargetError, f"expected 0 <= id < {VOCAB}"),
]


@pytest.mark.parametrize("mask, error, message", REFUSED_MASKS)
def test_refused_sampling_masks(mask, error, message):
    with pytest.raises(error, match=message):
        call_prime_rl(mask)


# ---- SkyRL


def skyrl_scores(input, weight, sampled, support, **options):
    shard = {"vocab_start_index": 0, "vocab_end_index": len(weight), "tp_group": None}
    given = {"lm_head_weight": weight, "chunk_size": 5} | shard | options
    return skyrl.sample_support_scores(input, sampled, support, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy", [None, False, True])
def test_sample_support_of_skyrl(kind, entropy):
    """sample_support_replay.py: the sampled id's logit minus the lse of kept ids, 0 in rows without any.

    ``entropy`` says whether entropies have a gradient; None leaves them out.
    """
    leaves, support, sampled, _ = problem(kind)
    is_valid = (support >= 0).any(-1)
    temperature = 0.7

    def ours(input, weight):
        anything = sampled.masked_fill(~is_valid, -100)
        wanted = {"compute_entropy": entropy is not None, "entropy_requires_grad": bool(entropy)}
        scores = skyrl_scores(input, weight, anything, support, temperature=temperature, **wanted)
        assert (scores.entropy is not None) == wanted["compute_entropy"]
        outputs = {"logprobs": scores.logprobs, "valid_mask": scores.valid_mask}
        if entropy is None:
            return outputs
        assert scores.entropy.requires_grad == entropy
        return outputs | {"entropy": scores.entropy}

    def reference(input, weight):
        z = logits_of(input, weight) / temperature
        lse = normalized(z, support, is_valid)
        log_p = z.gather(-1, support.clamp(min=0).long()) - lse[..., None]
        terms = torch.where(support >= 0, log_p.exp() * log_p, 0.0)
        of_rows = torch.where(is_valid, -terms.sum(-1), 0.0).clamp(min=0)
        log_probs = torch.where(is_valid, z.gather(-1, sampled[..., None])[..., 0] - lse, 0.0)
        outputs = {"logprobs": log_probs, "valid_mask": is_valid}
        return outputs if entropy is None else outputs | {"entropy": of_rows if entropy else of_rows.detach()}

    check(ours, reference, leaves, (*DTYPES, torch.bfloat16) if kind == "mixed" else DTYPES)


REFUSED_SUPPORT = [
    ({"lm_head_weight": None}, ValueError, "lm_head_weight: expected the head's weight, got None"),
    ({"support": IDS.long()[0]}, ValueError, "support_ids: expected torch.int32, got torch.int64"),
    ({"support": IDS}, ValueError, r"support_ids: expected one or a list for each row of \[4\], got \[1, 4\]"),
    ({"sampled": torch.zeros(3).long()}, ValueError, "sampled_ids: expected one or a list for each row"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a number > 0, got 0.0"),
    ({"entropy_requires_grad": True}, ValueError, "compute_entropy: expected True with entropy_requires_grad"),
    ({"vocab_end_index": VOCAB + 1}, ValueError, f"expected those of a weight with {VOCAB} rows, from 0 on, got 0 and"),
    ({"vocab_start_index": 1, "vocab_end_index": VOCAB + 1}, ValueError, "from 0 on, got 1 and 30"),
    ({"support": IDS[0] + VOCAB}, logitless.InvalidTargetError, f"expected 0 <= id < {VOCAB}"),
    ({"sampled": torch.full((4,), VOCAB)}, logitless.InvalidTargetError, f"expected 0 <= id < {VOCAB}"),
    ({"sampled": torch.full((4,), 2**32)}, logitless.InvalidTargetError, f"expected 0 <= id < {VOCAB}"),
    ({"sampled": torch.full((4,), 1.7)}, TypeError, "sampled_ids: expected int64 or int32"),
]


@pytest.mark.parametrize("given, error, message", REFUSED_SUPPORT)
def test_refused_sample_support(given, error, message):
    tensors = {"sampled": torch.zeros(4).long(), "support": IDS[0]}
    with pytest.raises(error, match=message):
        skyrl_scores(torch.ones(4, 7), torch.ones(VOCAB, 7), **tensors | given)


# ---- VeOmni


@pytest.fixture(params=["shifted here", "shift_labels", "sequence parallel"])
def way(request, monkeypatch):
    """How labels are shifted."""
    if request.param == "sequence parallel":
        state = types.ModuleType("veomni.distributed.parallel_state")
        state.get_parallel_state = lambda: types.SimpleNamespace(sp_enabled=True)
        monkeypatch.setitem(sys.modules, "veomni.distributed.parallel_state", state)
    return request.param


def next_of(tensor, dim, last):
    """Returns each place's next value along a dimension."""
    return torch.cat([tensor.narrow(dim, 1, tensor.shape[dim] - 1), tensor.narrow(dim, 0, 1) * 0 + last], dim)


@pytest.mark.parametrize("clamp", [None, -3.0])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
def test_top_k_distillation_of_veomni(way, clamp, ids):
    """chunk_topk_distill.py: KL(teacher || student) over the teacher's ids, the student over the vocabulary."""
    leaves, _, labels, _ = problem()
    labels[0, 2] = -100
    teacher = torch.randn(*ROWS, VOCAB, generator=torch.Generator().manual_seed(5)).mul(2).log_softmax(-1)
    log_p, top = teacher.topk(K)
    given = {"labels": labels, "temperature": 0.7, "chunk_size": 5}
    if way == "shift_labels":
        given |= {"labels": torch.zeros(0), "shift_labels": labels}
    shifted, p, chosen = labels, log_p, top
    if way == "shifted here":
        shifted, p, chosen = next_of(labels, 1, -100), next_of(log_p, 1, 0), next_of(top, 1, 0)
    is_row = shifted != -100

    def ours(input, weight):
        budget = {"max_workspace_bytes": 1 << 20}
        of_teacher = {"teacher_topk_ids": top.to(ids), "teacher_topk_log_probs": log_p, "log_prob_min_clamp": clamp}
        outputs = veomni.chunk_topk_distill_function(input, weight, **given, **of_teacher, **budget)
        alone = veomni.chunk_logprobs_function(input, weight, **given, **budget)
        assert all(map(torch.equal, alone, outputs)) and not any(mass.requires_grad for mass in outputs[3:])
        return dict(zip(("log_probs", "entropy", "divergence", "of_student", "of_teacher"), outputs))

    def reference(input, weight):
        all_q = (logits_of(input, weight) / 0.7).log_softmax(-1)
        own_p, q = p.to(all_q.dtype), all_q.gather(-1, chosen)
        masses = q.detach().exp().sum(-1), own_p.exp().sum(-1)
        if clamp is not None:
            own_p, q = own_p.clamp(min=clamp), q.clamp(min=clamp)
        made = {
            "log_probs": all_q.gather(-1, shifted.clamp(min=0)[..., None])[..., 0],
            "entropy": -(all_q.exp() * all_q).sum(-1),
            "divergence": (own_p.exp() * (own_p - q)).sum(-1),
            "of_student": masses[0],
            "of_teacher": masses[1],
        }
        return {name: torch.where(is_row, value, 0.0) for name, value in made.items()}

    check(ours, reference, leaves, (*DTYPES, torch.bfloat16))


TEACHER = {"teacher_topk_ids": torch.zeros(4, 2).long(), "teacher_topk_log_probs": torch.zeros(4, 2)}
REFUSED_TEACHERS = [
    ({"teacher_topk_ids": torch.zeros(4, 2)}, TypeError, "teacher_topk_ids: expected int64 or int32 class indices"),
    ({"teacher_topk_ids": torch.zeros(3, 2).long()}, ValueError, r"teacher_topk_ids: expected shape \[4, K\]"),
    ({"teacher_topk_log_probs": torch.zeros(4, 3)}, ValueError, r"teacher_topk_log_probs: expected shape \[4, 2\]"),
    ({"teacher_topk_ids": torch.full((4, 2), -1)}, logitless.InvalidTargetError, f"0 <= id < {VOCAB}"),
    ({"teacher_topk_ids": torch.full((4, 2), VOCAB)}, logitless.InvalidTargetError, f"0 <= id < {VOCAB}"),
    ({"labels": torch.zeros(5).long()}, ValueError, r"labels: expected shape \[4\]"),
    ({"shift_labels": torch.zeros(4)}, TypeError, "shift_labels: expected int64 or int32 class indices"),
]


@pytest.mark.parametrize("given, error, message", REFUSED_TEACHERS)
def test_refused_teachers(given, error, message):
    with pytest.raises(error, match=message):
        veomni.chunk_topk_distill_function(
            torch.ones(4, 7), torch.ones(VOCAB, 7), **{"labels": torch.zeros(4).long()} | TEACHER | given
        )
