"""logitless.sample beside the whole softmax in float64, with noise that numpy makes here."""

import logitless
import pytest
import torch
from logitless import sampling
from support import DEVICES, DTYPES
from torch.utils.flop_counter import FlopCounterMode

np = pytest.importorskip("numpy")


def tensors(shape=(5,), vocab=300, hidden=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(*shape, hidden, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    return input, weight, torch.randn(vocab, generator=generator).to(dtype)


def logits_of(input, weight, bias=None, scale=1.0, softcap=None, temperature=1.0, added=0.0):
    """Returns logits in float64."""
    z = scale * (input.double() @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return (z + added) / torch.as_tensor(temperature, dtype=torch.float64).expand(z.shape[:-1])[..., None]


def mix64(h):
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def mix32(h):
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def shares(first, second, counters):
    """Returns the upper bits of numbers in (0, 1), and the numbers."""
    h = counters * np.uint32(0x9E3779B1) + first
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D) + second
    high = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return high, high.astype(np.float64) * 2.0**-32 + (mix32(high + first).astype(np.float64) + 0.5) * 2.0**-64


def noise(seed, row, sample, vocab):
    """Returns -log E of all ids, from docs/sampling.md."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = np.array([seed % 2**64], np.uint64)
        for number in (0, row, sample):
            key = mix64(key + np.uint64(number) + step)
        low, high = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
        ids = np.arange(vocab, dtype=np.uint32)
        bits, of_group = shares(high, low, ids // 64 * 4 + ids // 2 % 4)
        is_first = mix32(bits + low) >> np.uint32(28) == ids // 8 % 8 * 2 + ids % 2
        own = shares(low, high, ids)[1]
    return torch.from_numpy(-np.log(-np.log1p(-of_group) / 16 - np.where(is_first, 0, np.log1p(-own))))


def check(out, z, seeds, error, keeps=None, full=None):
    """Asserts that each sample's key is the largest of the kept ids, up to rounding."""
    z, ids = z.reshape(-1, z.shape[-1]), out.ids.reshape(-1, out.ids.shape[-1])
    kept = z if keeps is None else z.masked_fill(~keeps, -torch.inf)
    log_probs, full = kept.log_softmax(-1), (z if full is None else full).log_softmax(-1)
    for row in range(z.shape[0]):
        for sample in range(ids.shape[1]):
            seed, number = seeds(row)
            keys = kept[row] + noise(seed, number, sample, z.shape[-1])
            id = ids[row, sample]
            assert keys[id] >= keys.max() - 2 * error
    if out.log_probs is not None:
        got = out.log_probs.reshape(ids.shape).double()
        torch.testing.assert_close(got, log_probs.gather(-1, ids), rtol=0, atol=error)
        got = out.full_log_probs.reshape(ids.shape).double()
        torch.testing.assert_close(got, full.gather(-1, ids), rtol=0, atol=error)
    if out.entropy is not None:
        entropy = -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0).sum(-1)
        torch.testing.assert_close(out.entropy.reshape(-1).double(), entropy, rtol=0, atol=error)


def error_of(z, dtype):
    return 64 * (2.0**-40 if dtype == torch.float64 else 2.0**-24) * max(float(z.abs().max()), 16.0)


OPTIONS = [{}, {"scale": 0.5, "softcap": 3.0}, {"temperature": 0.7}, {"temperature": torch.rand(5) + 0.1}]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "temperature", "temperatures"])
ALL = {"return_logprobs": True, "return_entropy": True}


def on(device, tensor):
    return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor


def sample_on(device, *tensors, **options):
    """Samples on a device; returns results on the CPU."""
    options = {name: on(device, value) for name, value in options.items()}
    out = logitless.sample(*(on(device, tensor) for tensor in tensors), **options)
    kept = out.kept and type(out.kept)(*(tensor.cpu() for tensor in out.kept))
    return type(out)(*(on("cpu", field) for field in out[:4]), kept)


each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
@each_device
@each_option
def test_against_float64(device, dtype, options):
    if device != "cpu" and dtype == torch.float64:
        pytest.skip("refused")
    input, weight, bias = tensors(dtype=dtype)
    out = sample_on(device, input, weight, bias=bias, num_samples=3, seed=77, **ALL, **options)
    assert out.ids.dtype == torch.int64 and out.kept is None
    z = logits_of(input, weight, bias, **options)
    check(out, z, lambda row: (77, row), error_of(z, dtype))


@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.5}], ids=["whole", "top_k", "top_p"])
def test_any_leading_shape(shape, more):
    input, weight, _ = tensors(shape)
    out = logitless.sample(input, weight, num_samples=2, seed=1, **ALL, **more)
    assert out.ids.shape == out.log_probs.shape == out.full_log_probs.shape == (*shape, 2)
    assert out.entropy.shape == shape
    assert logitless.sample(input, weight).ids.shape == (*shape, 1)


def test_seeds():
    input, weight, _ = tensors((6,))
    seeds = torch.tensor([5, -9, 2**62, 0, 5, -(2**63)])
    out = logitless.sample(input, weight, num_samples=4, seed=seeds)
    check(out, logits_of(input, weight), lambda row: (int(seeds[row]), 0), 1e-4)
    for row in range(6):
        alone = logitless.sample(input[row : row + 1], weight, num_samples=4, seed=int(seeds[row]))
        assert torch.equal(alone.ids[0], out.ids[row])
    one = logitless.sample(input, weight, num_samples=4, seed=torch.tensor(5))
    assert torch.equal(one.ids, logitless.sample(input, weight, num_samples=4, seed=5).ids)
    assert torch.equal(one.ids[0], out.ids[0])
    torch.manual_seed(3)
    first = logitless.sample(input, weight, num_samples=8).ids
    second = logitless.sample(input, weight, num_samples=8).ids
    torch.manual_seed(3)
    assert torch.equal(first, logitless.sample(input, weight, num_samples=8).ids) and not torch.equal(first, second)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(first, logitless.sample(input, weight, num_samples=8, seed=generator).ids)


def kept_of(z, top_k=None, top_p=None, min_p=None):
    """Returns the kept ids of rows by PyTorch's sort, as lists in order."""
    out = []
    for row in z:
        values, ids = row.sort(descending=True, stable=True)
        if top_k is not None:
            values, ids = values[:top_k], ids[:top_k]
        p = values.softmax(-1) if top_k is not None else row.softmax(-1)[ids]
        if top_p is not None:
            count = int((p.cumsum(-1) < top_p).sum()) + 1
            p, ids = p[:count], ids[:count]
        if min_p is not None:
            ids = ids[p >= min_p * p[0]]
        out.append(ids)
    return out


SETS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 64},
    {"top_k": 200},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"top_p": 1.0, "min_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1e-5},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 100, "top_p": 0.9},
]


@pytest.mark.parametrize("more", SETS, ids=str)
@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_sets_are_those_of_a_sort(more, spread):
    input, weight, bias = tensors((40,), dtype=torch.float64)
    z = logits_of(spread * input, weight, bias)
    keeps_all = more.get("top_k", 300) >= 300 and "top_p" not in more and "min_p" not in more
    out = logitless.sample(
        spread * input,
        weight,
        bias=bias,
        seed=5,
        num_samples=2,
        **ALL,
        **more,
        return_kept=not keeps_all and more != {"top_p": 1.0, "min_p": 0.0},
    )
    expected = kept_of(z, **more)
    keeps = torch.zeros_like(z, dtype=torch.bool)
    for row, ids in enumerate(expected):
        keeps[row, ids] = True
    check(out, z, lambda row: (5, row), error_of(z, torch.float64), keeps)
    if out.kept is None:
        return
    offsets, ids, log_probs = out.kept
    assert offsets.tolist() == [0, *np.cumsum([len(each) for each in expected])]
    assert torch.equal(ids, torch.cat(expected))
    kept = z.masked_fill(~keeps, -torch.inf).log_softmax(-1)
    rows = torch.arange(40).repeat_interleave(offsets.diff())
    torch.testing.assert_close(log_probs, kept[rows, ids], rtol=0, atol=1e-6)


# A flat softmax has too many ids for the 64 largest, a peaked one has not: rows of both kinds in one call.
@each_device
def test_rows_of_both_kinds(device):
    input, weight, _ = tensors((30,), vocab=500)
    input = input * torch.linspace(0, 2, 30)[:, None]
    out = sample_on(device, input, weight, top_p=0.9, seed=3, num_samples=2, return_kept=True, **ALL)
    counts = out.kept.offsets.diff()
    assert counts.min() < 10 and counts.max() > 64
    z = logits_of(input, weight)
    keeps = torch.zeros_like(z, dtype=torch.bool)
    for row, ids in enumerate(kept_of(z, top_p=0.9)):
        keeps[row, ids] = True
    check(out, z, lambda row: (3, row), error_of(z, torch.float32), keeps)


def test_a_set_of_all_ids_has_the_samples_of_the_whole():
    input, weight, _ = tensors((20,), vocab=60)
    whole = logitless.sample(input, weight, seed=8, num_samples=6, **ALL)
    for more in ({"min_p": 1e-30}, {"mask": torch.ones(20, 60, dtype=torch.bool)}):
        out = logitless.sample(input, weight, seed=8, num_samples=6, **ALL, **more)
        assert torch.equal(out.ids, whole.ids)
        torch.testing.assert_close(out.log_probs, whole.log_probs)
        torch.testing.assert_close(out.full_log_probs, whole.log_probs)
        torch.testing.assert_close(out.entropy, whole.entropy)


def test_a_set_by_all_three_options_beyond_the_largest_logits():
    """min_p alone is decided by 64 logits, but top_p's share is of all that top_k leaves."""
    tilt = torch.arange(300) * 1e-6
    weight = torch.cat((torch.full((10,), 0.05), torch.full((90,), 0.5 / 90), torch.full((200,), 1e-9))).log() - tilt
    more = {"top_k": 100, "top_p": 0.515, "min_p": 0.3}
    out = logitless.sample(torch.ones(1, 1), weight[:, None], seed=0, return_kept=True, **more)
    (expected,) = kept_of(weight[None].double(), **more)
    assert out.kept.ids.tolist() == expected.tolist()


@pytest.mark.parametrize(("vocab", "share"), [(20, 0.5), (16, 0.5), (128, 0.25), (50, 0.1), (10, 0.3), (100, 0.9)])
def test_a_share_that_equal_ids_reach_exactly(vocab, share):
    kept = [
        logitless.sample(torch.ones(1, 4), torch.zeros(vocab, 4), seed=0, top_p=share, return_kept=True, **more).kept
        for more in ({}, {"mask": torch.ones(1, vocab, dtype=torch.bool)})
    ]
    assert [each.ids.numel() for each in kept] == [round(vocab * share)] * 2


@pytest.mark.parametrize("more", [{"top_k": 99}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str)
def test_kept_ids_that_are_all(more):
    input, weight, _ = tensors((3,), vocab=20)
    kept = logitless.sample(input, weight, seed=0, return_kept=True, **more).kept
    assert kept.offsets.tolist() == [0, 20, 40, 60]


def test_no_penalties_yet():
    input, weight, _ = tensors((3,))
    none = (torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0))
    whole = logitless.sample(input, weight, seed=4)
    assert torch.equal(logitless.sample(input, weight, seed=4, penalties=none).ids, whole.ids)


def test_all_logits_cast_little_of_the_weight():
    """A 16-bit weight on a CPU is multiplied in float32."""
    input, weight, _ = tensors((2,), vocab=40_000, hidden=300, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        logitless.sample(input, weight, seed=0, top_k=100)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < weight.numel() * 4 * 0.9


def test_log_probs_are_two_tensors():
    input, weight, _ = tensors()
    out = logitless.sample(input, weight, seed=0, return_logprobs=True)
    out.log_probs.add_(1)
    assert not torch.equal(out.log_probs, out.full_log_probs)


def test_masks_and_penalties():
    input, weight, bias = tensors((9,), vocab=75)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(9, 75, generator=generator) < 0.3
    mask[0] = False
    mask[0, 74] = True
    bits = torch.zeros(9, 96, dtype=torch.int64)
    bits[:, :75] = mask
    packed = (bits.reshape(9, 3, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    ids = torch.randint(-1, 75, (9, 6), generator=generator)
    values = torch.randn(9, 6, generator=generator)
    added = torch.zeros(9, 75, dtype=torch.float64)
    for row in range(9):
        for id, value in zip(ids[row].tolist(), values[row].tolist()):
            if id >= 0:
                added[row, id] += value
    options = {"bias": bias, "softcap": 8.0, "temperature": torch.rand(9, generator=generator) + 0.5}
    full = logits_of(input, weight, **options)
    z = logits_of(input, weight, added=added, **options)
    more = {"seed": 2, "num_samples": 3, "penalties": (ids, values), **options, **ALL}
    out = logitless.sample(input, weight, mask=mask, **more)
    check(out, z, lambda row: (2, row), error_of(z, torch.float32), mask, full)
    assert out.ids[0].tolist() == [74] * 3
    assert all(map(torch.equal, out[:4], logitless.sample(input, weight, mask=packed, **more)[:4]))
    out = logitless.sample(input, weight, mask=mask, top_k=4, return_kept=True, **more)
    kept = kept_of(z.masked_fill(~mask, -torch.inf), top_k=4)
    assert torch.equal(out.kept.ids, torch.cat([each[mask[row, each]] for row, each in enumerate(kept)]))
    check(logitless.sample(input, weight, **more), z, lambda row: (2, row), error_of(z, torch.float32), None, full)


def edits_of(vocab, rows, generator):
    """Returns masks and penalties. Row 0 may sample nothing, row 1 one id, row 2 two, both with penalties."""
    mask = torch.rand(rows, vocab, generator=generator) < 0.6
    mask[:3] = False
    mask[1, 31] = mask[2, 5] = mask[2, vocab - 1] = True
    ids = torch.randint(-1, vocab, (rows, 9), generator=generator)
    ids[2, :2] = torch.tensor([5, vocab - 1])
    ids[3] = -1
    ids[4, :6] = 31
    values = 3 * torch.randn(rows, 9, generator=generator)
    values[5, :4] = -torch.inf
    return {
        "mask": {"mask": mask},
        "penalties": {"penalties": (ids, values)},
        "both": {"mask": mask, "penalties": (ids, values)},
    }


EDITED_SETS = [{}, {"top_k": 5}, {"top_k": 40, "top_p": 0.8}, {"top_p": 0.5, "min_p": 0.01}, {"min_p": 0.1}]


@pytest.mark.parametrize("more", EDITED_SETS, ids=str)
@pytest.mark.parametrize("edits", ["mask", "penalties", "both"])
@pytest.mark.parametrize("vocab", [64, 300])
def test_edits_need_no_logits_of_all_ids(vocab, edits, more, monkeypatch):
    """The results are those that the logits of all ids give."""
    input, weight, bias = tensors((20,), vocab=vocab, dtype=torch.float64)
    options = edits_of(vocab, 20, torch.Generator().manual_seed(2))[edits] | more | ALL
    options |= {"bias": bias, "softcap": 20.0, "temperature": torch.rand(20) + 0.5, "seed": 3, "num_samples": 4}
    options["return_kept"] = bool(more)
    expected = logitless.sampling.Given(input, weight, options)
    monkeypatch.setattr(logitless.sampling.Truncation, "may_be_held", lambda *_: False)
    expected = expected._of_sets()
    monkeypatch.undo()
    monkeypatch.setattr(logitless.sampling.Given, "_from_all", None)
    out = logitless.sample(input, weight, **options)
    assert torch.equal(out.ids, expected.ids)
    for got, want in zip(out[1:4], expected[1:4]):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10, equal_nan=True)
    if more:
        assert torch.equal(out.kept.offsets, expected.kept.offsets) and torch.equal(out.kept.ids, expected.kept.ids)
        torch.testing.assert_close(out.kept.log_probs, expected.kept.log_probs, rtol=0, atol=1e-10)


@each_device
def test_edited_rows_of_both_kinds(device):
    """The 64 largest logits hold the sets of some rows."""
    input, weight, _ = tensors((30,), vocab=500)
    input = input * torch.linspace(0, 2, 30)[:, None]
    edits = edits_of(500, 30, torch.Generator().manual_seed(3))["both"]
    edits["mask"][:3] = True
    ids, values = edits["penalties"]
    added = torch.zeros(30, 500, dtype=torch.float64)
    added.scatter_add_(1, ids.clamp(min=0), torch.where(ids < 0, 0, values.double()))
    z = logits_of(input, weight, added=added).masked_fill(~edits["mask"], -torch.inf)
    given = {name: [on(device, each) for each in edits[name]] for name in ("penalties",)}
    out = sample_on(device, input, weight, mask=edits["mask"], top_p=0.9, seed=3, num_samples=2, **given, **ALL)
    keeps = torch.zeros_like(z, dtype=torch.bool)
    for row, kept in enumerate(kept_of(z, top_p=0.9)):
        keeps[row, kept] = True
    check(
        out, z, lambda row: (3, row), error_of(logits_of(input, weight), torch.float32), keeps, logits_of(input, weight)
    )


def test_nan_and_infinite_rows():
    input, weight, _ = tensors((4,))
    input[1, 0] = torch.nan
    for more in ({}, {"top_k": 3}, {"top_p": 0.5}):
        out = logitless.sample(input, weight, seed=1, **ALL, **more)
        good = torch.tensor([0, 2, 3])
        assert out.ids[1].item() == -1
        assert out.log_probs[1].isnan().all() and out.full_log_probs[1].isnan().all() and out.entropy[1].isnan()
        assert torch.isfinite(out.log_probs[good]).all() and (out.ids[good] >= 0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, torch.nan, torch.inf, 1e-40, 2.0**127])
def test_a_row_without_a_temperature(temperature):
    input, weight, _ = tensors((3,))
    temperatures = torch.tensor([1.0, temperature, 2.0])
    mask = torch.ones(3, 300, dtype=torch.bool)
    for more in ({}, {"top_k": 3}, {"top_p": 0.99}, {"mask": mask}):
        out = logitless.sample(input, weight, seed=1, temperature=temperatures, **ALL, **more)
        assert out.log_probs[:, 0].isnan().tolist() == [False, True, False]
        assert out.full_log_probs[:, 0].isnan().tolist() == [False, True, False]


# chi^2 of 40,000 samples within 5 standard deviations, which it exceeds with a probability below 1e-5.
@pytest.mark.parametrize("more", [{}, {"top_k": 8}, {"top_p": 0.7}], ids=["whole", "top_k", "top_p"])
def test_frequencies(more):
    input, weight, _ = tensors((1,), vocab=23, hidden=4)
    input = input.expand(625, 4).contiguous()
    out = logitless.sample(input, weight, num_samples=64, seed=4, **more)
    z = logits_of(input[:1], weight)
    p = torch.zeros(23, dtype=torch.float64)
    kept = kept_of(z, **more)[0]
    p[kept] = z[0, kept].softmax(-1)
    counts = out.ids.reshape(-1).bincount(minlength=23).double()
    assert (counts[p == 0] == 0).all()
    expected = p[p > 0] * counts.sum()
    counts = counts[p > 0]
    rare = expected < 10
    if rare.any():
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    degrees = len(expected) - 1
    chi_square = float(((counts - expected).square() / expected).sum())
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


@pytest.mark.slow
def test_frequencies_of_a_large_vocabulary():
    """Cells of ids with equal lower bits, and cells of equal upper bits."""
    input, weight, _ = tensors((1,), vocab=1 << 18, hidden=8)
    out = logitless.sample(input.expand(64, 8).contiguous(), weight, num_samples=64, seed=4)
    p, ids = logits_of(input, weight)[0].softmax(-1), out.ids.reshape(-1)
    for cell in (torch.arange(1 << 18) % 64, torch.arange(1 << 18) >> 12):
        counts = cell[ids].bincount(minlength=64).double()
        expected = torch.zeros(64, dtype=torch.float64).index_add(0, cell, p) * len(ids)
        chi_square = float(((counts - expected).square() / expected).sum())
        assert expected.min() > 10 and abs(chi_square - 63) < 5 * (2 * 63) ** 0.5


def test_equal_ids_with_and_without_a_penalty():
    input, weight, _ = tensors((6,))
    weight[200] = weight[100]
    input[:] = 8 * weight[100]
    for penalized in (100, 200):
        penalties = (torch.full((6, 1), penalized), torch.zeros(6, 1))
        for dtype in (torch.float32, torch.bfloat16):
            out = logitless.sample(input.to(dtype), weight.to(dtype), top_k=1, seed=1, penalties=penalties)
            assert (out.ids == 100).all()


@pytest.mark.parametrize("top_k", [None, 64, 65])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_penalty_of_a_masked_id_changes_nothing(number, top_k):
    input, weight, _ = tensors((3,))
    mask = torch.ones(3, 300, dtype=torch.bool)
    mask[:, 3] = False
    given = {"mask": mask, "top_k": top_k, "seed": 2}
    penalties = (torch.full((3, 1), 3), torch.full((3, 1), number))
    out, without = (logitless.sample(input, weight, **given, **more) for more in ({"penalties": penalties}, {}))
    assert torch.equal(out.ids, without.ids)


def test_a_row_with_an_infinite_penalty():
    input, weight, _ = tensors((2,))
    penalties = (torch.full((2, 1), 5), torch.tensor([[torch.inf], [0.0]]))
    for more in ({}, {"top_p": 1.0, "return_kept": True}):
        out = logitless.sample(input, weight, penalties=penalties, seed=1, return_entropy=True, **more)
        assert out.ids[:, 0].ge(0).tolist() == [False, True] == out.entropy.isfinite().tolist()
        assert out.entropy[0].isnan()


def test_bools_of_other_bytes():
    input, weight, _ = tensors((64,))
    mask = torch.zeros(64, 300, dtype=torch.uint8)
    mask[:, 8], mask[:, 16] = 255, 2
    ids = logitless.sample(input, weight, mask=mask.view(torch.bool), num_samples=4, seed=0).ids
    assert set(ids.flatten().tolist()) <= {8, 16}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 16384], ids=["few rows", "many rows"])
def test_frequencies_of_ten_million_samples(rows):
    """All ids of a large vocabulary whose expected counts are large, and cells of the others."""
    input, weight, _ = tensors((1,), vocab=1 << 18, hidden=64)
    p = logits_of(input.bfloat16(), weight.bfloat16())[0].softmax(-1)
    input, weight = input.to("cuda", torch.bfloat16).expand(rows, 64).contiguous(), weight.to("cuda", torch.bfloat16)
    counts = torch.zeros(1 << 18, dtype=torch.float64, device="cuda")
    for seed in range(10_000_000 // (64 * rows) + 1):
        ids = logitless.sample(input, weight, num_samples=64, seed=seed).ids
        counts += ids.reshape(-1).bincount(minlength=1 << 18)
    counts = counts.cpu()
    expected = p * counts.sum()
    cells = torch.where(expected >= 20, torch.arange(1 << 18) + 4096, torch.arange(1 << 18) % 4096)
    expected, counts = (torch.zeros(5 << 18, dtype=torch.float64).index_add(0, cells, x) for x in (expected, counts))
    expected, counts = expected[expected > 5], counts[expected > 5]
    degrees = len(expected) - 1
    chi_square = float(((counts - expected).square() / expected).sum())
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_options_that_are_tensors_and_nothing_has_a_gradient():
    input, weight, bias = (t.requires_grad_() for t in tensors())
    scale = torch.tensor(0.5, requires_grad=True)
    out = logitless.sample(input, weight, bias=bias, scale=scale, temperature=torch.tensor([2.0]), seed=1, **ALL)
    assert not any(each.requires_grad for each in out[:4])
    expected = logitless.sample(input, weight, bias=bias, scale=0.5, temperature=2.0, seed=1, **ALL)
    assert all(map(torch.equal, out[:4], expected[:4]))


def test_rows_with_a_stride_and_a_budget():
    input, weight, _ = tensors((40,))
    wide = torch.zeros(40, 2 * input.shape[1])
    wide[:, : input.shape[1]] = input
    expected = logitless.sample(input, weight, seed=6, num_samples=3)
    out = logitless.sample(wide[:, : input.shape[1]], weight, seed=6, num_samples=3, max_workspace_bytes="1MiB")
    assert torch.equal(out.ids, expected.ids)
    with pytest.raises(logitless.BudgetTooSmallError):
        logitless.sample(input, weight, max_workspace_bytes=64)


def test_shards_have_the_samples_of_the_whole():
    input, weight, bias = tensors((12,))
    seed, rest = torch.tensor(9), ([1.0, 0.0, 1.0], 4, True)
    run = torch.ops.logitless.sample
    numbers = rest[0]
    whole = run(input, weight, bias, None, seed, *rest, [], 0, 0)
    parts = [
        run(input, weight[part], bias[part], None, seed, numbers, 4, True, [part.start, 300], 0, 0)
        for part in (slice(0, 100), slice(100, 101), slice(101, 300))
    ]
    keys = torch.stack([part[2] for part in parts])
    best = keys.argmax(0)
    assert torch.equal(torch.stack([part[0] for part in parts]).gather(0, best[None])[0], whole[0])
    lse = torch.stack([part[3] for part in parts])
    torch.testing.assert_close(lse.logsumexp(0), whole[3])
    share = (lse - whole[3]).exp()
    entropy = whole[3] - (share * (lse - torch.stack([part[4] for part in parts]))).sum(0)
    torch.testing.assert_close(entropy, whole[4], rtol=1e-4, atol=1e-5)


MASK = {"mask": torch.arange(5)[:, None] <= torch.arange(300)}


@pytest.mark.parametrize("more", [{}, MASK, MASK | {"top_k": 5, "min_p": 0.1}], ids=["whole", "mask", "top_k"])
def test_compiled(more):
    """Nothing waits for the device, or depends on data."""
    input, weight, _ = tensors()

    def step(input):
        return logitless.sample(input, weight, seed=torch.tensor(3), num_samples=2, **more, **ALL)[:4]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(input), step(input)))


def test_only_what_watches_a_call_sees_the_operator(monkeypatch):
    input, weight, _ = tensors()
    with FlopCounterMode(display=False) as counted:
        expected = logitless.sample(input, weight, seed=1, **ALL)
    assert counted.get_total_flops() == 2 * 5 * 300 * 16
    monkeypatch.setattr(sampling, "_run", None)
    assert all(map(torch.equal, logitless.sample(input, weight, seed=1, **ALL)[:4], expected[:4]))


def test_later_calls_with_the_same_layouts():
    """They skip checks of layouts and options, but not of data."""
    input, weight, bias = tensors()
    ones = torch.ones(5, 300, dtype=torch.bool)

    def kept(**options):
        return logitless.sample(input, weight, num_samples=1, **{"seed": 3} | options)

    first = kept()
    assert torch.equal(kept().ids, first.ids)
    assert not torch.equal(kept(seed=4).ids, first.ids)
    for one, two in (
        (0.01, 100.0),
        (torch.tensor(0.01), torch.tensor(100.0)),
        (torch.ones(5) / 100, torch.ones(5) * 100),
    ):
        cold, hot = kept(temperature=one, return_entropy=True), kept(temperature=two, return_entropy=True)
        assert (cold.entropy < 3).all() and (hot.entropy > 5).all()
    peak = bias.clone().index_fill_(0, torch.tensor(7), 1e4)
    assert not (kept(bias=bias).ids == 7).all() and (kept(bias=peak).ids == 7).all()
    kept(mask=ones)
    only = torch.arange(300).expand(5, 300) == 9
    assert (kept(mask=only).ids == 9).all()
    for options, message in (
        ({"seed": 1 << 63}, "seed: expected an integer of 64 bits"),
        ({"mask": ones[:4]}, "mask: expected shape"),
        ({"return_logprobs": 0}, "return_logprobs: expected a bool"),
        ({"bias": bias[1:]}, "bias: expected shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            kept(**options)
    with pytest.raises(TypeError, match="num_samples: expected an integer, got bool"):
        logitless.sample(input, weight, num_samples=True, seed=3)
    with pytest.raises(TypeError, match="weight: expected a torch.Tensor, got NoneType"):
        logitless.sample(input, None)


@pytest.mark.parametrize("shard", [[], [10, 400]], ids=["whole", "shard"])
@pytest.mark.parametrize("seed", [torch.tensor(3), torch.arange(5)], ids=["seed", "seeds"])
def test_operator(shard, seed):
    input, weight, bias = tensors()
    arguments = (input, weight, bias, torch.rand(5) + 0.5, seed, [1.0, 0.0, 1.0], 2, not shard, shard, 0, 0)
    torch.library.opcheck(torch.ops.logitless.sample.default, arguments)


@pytest.mark.parametrize(("num_samples", "largest"), [(2, 0), (0, 4), (0, 0)])
def test_operator_with_a_mask(num_samples, largest):
    input, weight, _ = tensors()
    mask, seed = torch.full((5, 10), 0x0F0F0F0F, dtype=torch.int32), torch.tensor(3)
    mask = mask if num_samples + largest > 0 else None
    arguments = (input, weight, None, None, seed, [1.0, 0.0, 1.0], num_samples, False, [], 0, 0, mask, largest)
    torch.library.opcheck(torch.ops.logitless.sample.default, arguments)
    ids = torch.tensor([[5, 0, 9], [1, 2, 3]])
    for seed in (torch.tensor(3), torch.tensor([3, 4])):
        torch.library.opcheck(torch.ops.logitless.sample_noise.default, (seed, torch.tensor([7, 1]), 2, ids))


def test_autocast():
    input, weight, _ = tensors((30,))
    edits = edits_of(300, 30, torch.Generator().manual_seed(2))["both"]
    for more in ({}, {"top_k": 5}, {"top_p": 0.9}, edits, edits | {"top_k": 5}):
        with torch.autocast("cpu", torch.bfloat16):
            out = logitless.sample(input, weight, seed=3, num_samples=2, **more)
        expected = logitless.sample(input.bfloat16(), weight.bfloat16(), seed=3, num_samples=2, **more)
        assert torch.equal(out.ids, expected.ids)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_samples": 0}, r"num_samples: expected a number in \[1, 64\], got 0"),
        ({"num_samples": 65}, r"num_samples: expected a number in \[1, 64\], got 65"),
        ({"temperature": 0.0}, "temperature: expected a number"),
        ({"top_k": 0}, "top_k: expected None or a number of at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p: expected None or a number in \(0, 1\], got 0.0"),
        ({"min_p": 1.5}, r"min_p: expected None or a number in \[0, 1\], got 1.5"),
        ({"mask": torch.ones(5, 299, dtype=torch.bool)}, r"mask: expected shape \[5, 300\]"),
        ({"mask": torch.ones(5, 9, dtype=torch.int32)}, r"mask: expected shape \[5, 10\]"),
        ({"mask": torch.ones(5, 300)}, "mask: expected bool"),
        ({"penalties": (torch.tensor([[300]] * 5), torch.ones(5, 1))}, r"penalties\[0\]: expected ids in \[0, 300\)"),
        ({"penalties": torch.ones(5)}, "penalties: expected a pair"),
        ({"penalties": (torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 3))}, r"penalties\[1\]: expected shape"),
        ({"seed": torch.zeros(5)}, "seed: expected int64"),
        ({"seed": torch.zeros(4, dtype=torch.int64)}, "seed: expected one int64 element"),
        ({"seed": 0.5}, "seed: expected an integer"),
        ({"return_kept": True}, "return_kept: expected False"),
        (
            {"max_workspace_bytes": "much", "mask": torch.ones(5, 300, dtype=torch.bool)},
            "max_workspace_bytes: expected",
        ),
        ({"return_logprobs": 1}, "return_logprobs: expected a bool"),
        ({"targets": 1}, "unexpected keyword argument 'targets'"),
    ],
    ids=str,
)
def test_refusals(more, message):
    input, weight, _ = tensors()
    with pytest.raises((ValueError, TypeError), match=message):
        logitless.sample(input, weight, **more)
